"""Restoring a checkpoint into any layout: each device gets its part of every leaf, read from the files.

`restored` restores a whole state, `weights` parameters and variables alone, and `extras` the trees that were saved with
a state. All of them read with `_read`, which bounds the memory of the host:

    for each array, for each box of this host's devices:
        begin to read the box's parts of the model leaves     TensorStore reads in threads
        once more than `_READ_AHEAD_BYTES` are being read:    wait for the first box, and copy it to its devices
"""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ..backend.text import few
from ..layout.boxes import box_of, parts
from ..layout.precision import LossScale
from ..layout.state import State
from ..step.core import Step
from ..step.init import BEGIN_ANEW, check_here
from .about import DamagedError, check_fits
from .arrays import EXTRA, Array, arrays_of, extra_arrays, flatten, name_of, raw
from .commit import writer
from .saved import Checkpoint

Fresh = Callable[[str], bool]
Value = TypeVar("Value")
_READ_AHEAD_BYTES = 1 << 28  # bytes that are read at a time, before the devices get them; their boxes share chunks


def restored(step: Step, saved: Checkpoint) -> State:
    """Return the state in a checkpoint, as the step's layout stores it.

    A step in float16 starts with a new loss scale if the checkpoint has none; other steps ignore a saved one.

    Raises:
      ValueError: with the array's name, if the checkpoint is of another model or optimizer, or is damaged.
    """
    check_here(step.layout)
    if saved.is_foreign:
        raise ValueError(
            f"{saved.folder} has no item `about`: another program wrote it, or a part of it is missing; take its "
            "weights alone with weights_only=True"
        )
    # 1. The arrays of the step, and those that it finds in the checkpoint.
    arrays, tree = arrays_of(step)
    field_of = lambda name: name.partition("/")[0]
    initial_scale = {name_of(keys): np.asarray(x) for keys, x in flatten(LossScale.create(), ("scale",))}
    unsaved = {name for name in initial_scale if name not in saved.arrays}
    needed = [array for array in arrays if array.names[0] not in unsaved]
    optional = [name for name in saved.arrays if field_of(name) in ("scale", EXTRA)]
    needed_by_name = {name: array for array in needed if not array.is_derived for name in array.names}
    check_fits(saved.about, needed_by_name, saved.folder, optional)

    def make_scale(array: Array) -> jax.Array:
        x = initial_scale[array.names[0]]
        return jax.make_array_from_callback(array.shape, array.sharding, lambda index: x[index])

    def read_values() -> list[jax.Array]:
        read_arrays = iter(_read(saved, needed))
        return [make_scale(array) if array.names[0] in unsaved else next(read_arrays) for array in arrays]

    # 2. Read them; a loss scale that was not saved is new.
    state = jax.tree.unflatten(tree, run_on_all_hosts("restore", read_values))
    # The state and its description are files of their own, and somebody may have copied only one of them.
    if (number := int(state.step)) != saved.step:
        raise DamagedError(saved.folder, f"about says step {saved.step}, and the state is of step {number}")
    return state


def weights(step: Step, saved: Checkpoint, key: jax.Array, fresh: Fresh | None) -> State:
    """Return a new state with the parameters and variables of a checkpoint, which another program may have written.

    Args:
      step: the step that the state is for.
      key: random key of the new state.
      fresh: `fresh(path)` says whether the parameter with that path gets the model's initial value, whatever the
        checkpoint has.

    Raises:
      ValueError: if the checkpoint lacks weights, or has them with other shapes.
    """
    check_here(step.layout)
    arrays, tree = arrays_of(step)
    is_fresh = lambda name: fresh is not None and name.startswith("params/") and fresh(name.removeprefix("params/"))
    is_needed = lambda array: array.names[0].partition("/")[0] in ("params", "variables") and not array.is_derived
    needed = [array for array in arrays if is_needed(array)]
    needed_by_name = {name: array for array in needed for name in array.names if not is_fresh(name)}
    # 1. Find each needed leaf in the checkpoint. Other programs keep variables next to the parameters, or among them.
    foreign_roots = ("other/", "params/") if saved.is_foreign else ()
    candidates = lambda name: [
        *(root + path for root in foreign_roots if (path := name.removeprefix("variables/")) != name),
        name,
    ]
    saved_names = {
        name: candidate for name in needed_by_name for candidate in candidates(name) if candidate in saved.arrays
    }
    missing = [name for name in needed_by_name if name not in saved_names]
    # 2. Variables may be missing in another program's checkpoint. Parameters may not.
    if saved.is_foreign and (initial := [name for name in missing if name.startswith("variables/")]):
        missing = [name for name in missing if name not in initial]
        # Random keys among the variables need no warning.
        reported = [name.removeprefix("variables/") for name in initial if needed_by_name[name].key_impl is None]
        if reported:
            warnings.warn(
                f"{saved.folder} has no {few(reported)}: they begin with the model's initial values", stacklevel=2
            )
    if missing:
        names = few([name.removeprefix("params/") for name in missing])
        available = few([name.removeprefix("params/") for name in saved.arrays])
        raise ValueError(f"{saved.folder} has no weights for {names}; it has {available}; {BEGIN_ANEW}")
    hint = "make the model with the sizes of that checkpoint, and the step with its precision"
    saved_leaves = {saved_names[name]: needed_by_name[name] for name in saved_names}
    check_fits(saved.about, saved_leaves, saved.folder, saved.arrays, hint, casts=saved.is_foreign)
    # 3. Initialize a state only if some leaves keep their initial values.
    needs_init = any(name not in saved_names for array in needed for name in array.names)
    initial_leaves = zip(arrays, jax.tree.leaves(step.init(key)), strict=True) if needs_init else ()
    initial_values = {array.names: x for array, x in initial_leaves if is_needed(array)}
    # 4. Read the others into it.
    values = iter(run_on_all_hosts("restore", lambda: _read(saved, needed, saved_names, initial_values)))
    # Fields that were not read are None here: `begin` makes the optimizer's state anew.
    state = jax.tree.unflatten(tree, [next(values) if is_needed(array) else None for array in arrays])
    return step.begin(key, state.params, state.variables)


def extras(step: Step, saved: Checkpoint, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trees that were saved with a state, with the shapes, dtypes and shardings of `like`.

    Raises:
      ValueError: if the checkpoint has no such trees, or has them with other shapes or dtypes.
    """
    arrays, _ = extra_arrays(step, like)
    needed_by_name = {array.names[0]: array for array in arrays}
    if missing := [name.removeprefix(f"{EXTRA}/") for name in needed_by_name if name not in saved.arrays]:
        saved_extras = [name.removeprefix(f"{EXTRA}/") for name in saved.arrays if name.startswith(f"{EXTRA}/")]
        available = few(saved_extras) if saved_extras else "nothing else"
        raise ValueError(f"{saved.folder} has no {few(missing)} beside its state; it has {available}")
    check_fits(saved.about, needed_by_name, saved.folder, saved.arrays)
    values = run_on_all_hosts("restore", lambda: _read(saved, arrays))
    return jax.tree.unflatten(jax.tree.structure(dict(like)), values)


def run_on_all_hosts(name: str, action: Callable[[], Value]) -> Value:
    """Run an action that all hosts run, and return its value. If it fails on one host, raise an error on all."""
    value, error, problem = writer().attempt_on_all_hosts(name, action)
    if error is not None or problem:
        raise error or ValueError(problem)
    return cast(Value, value)


def _read(
    saved: Checkpoint,
    arrays: Sequence[Array],
    names: Mapping[str, str] | None = None,
    initial_values: dict[tuple[str, ...], jax.Array] | None = None,
) -> list[jax.Array]:
    """Return arrays of a state, read from a checkpoint. The host's memory holds about `_READ_AHEAD_BYTES` at a time.

    Args:
      names: the checkpoint's names of the leaves to read, by the step's names. If None, all leaves, by equal names.
      initial_values: arrays with the values of leaves that are not read, by the names of the array. Each is removed
        from the dict when it has been used, to free its memory.
    """
    names = {name: name for array in arrays for name in array.names} if names is None else names
    shards_by_array: list[list[jax.Array]] = [[] for _ in arrays]
    # Each entry: functions that wait for the reads, the box, the index of its array, the devices that get the box.
    queue = collections.deque[tuple[list[Callable[[], object]], np.ndarray, int, list[jax.Device]]]()
    num_bytes = 0

    def place_first_box() -> int:
        """Wait for the first box in the queue, copy it to its devices, and return its bytes."""
        pending_reads, box, array_index, devices = queue.popleft()
        for wait in pending_reads:
            wait()
        memory_kind = arrays[array_index].sharding.memory_kind
        shards = [jax.device_put(box, SingleDeviceSharding(device, memory_kind=memory_kind)) for device in devices]
        # Until the copy is complete, the box must not be freed, and its bytes count.
        shards_by_array[array_index] += jax.block_until_ready(shards)
        return box.nbytes

    # 1. Begin to read every box of this host; place the oldest ones as soon as too many bytes are being read.
    for array_index, array in enumerate(arrays):
        initial = (initial_values or {}).pop(array.names, None)
        initial_shards = {}
        if initial is not None:
            initial_shards = {box_of(s.index, array.shape): s.data for s in raw(initial).addressable_shards}
        for bounds, devices in array.boxes().items():
            if local_devices := [device for device in devices if device.process_index == jax.process_index()]:
                shape = [stop - start for start, stop in bounds]
                box = (
                    np.array(initial_shards[bounds], array.dtype)
                    if initial_shards
                    else np.zeros(shape, array.dtype)  # zeros, because padding is not read
                )
                leaf_parts = [(array.names[part.member], part) for part in parts(array.leaf, array.inner, bounds)]
                parts_to_read = [(names[name], part) for name, part in leaf_parts if name in names]
                pending_reads = [saved.opened[name].begin(part.box, part.view(box)) for name, part in parts_to_read]
                queue.append((pending_reads, box, array_index, local_devices))
                num_bytes += box.nbytes
            while num_bytes > _READ_AHEAD_BYTES:
                num_bytes -= place_first_box()
    # 2. Place the boxes that are left, and assemble the arrays from their shards.
    while queue:
        place_first_box()
    assemble = jax.make_array_from_single_device_arrays
    values = [
        assemble(array.shape, array.sharding, shards) for array, shards in zip(arrays, shards_by_array, strict=True)
    ]
    wrap = lambda array, x: x if array.key_impl is None else jax.random.wrap_key_data(x, impl=array.key_impl)
    return [wrap(array, x) for array, x in zip(arrays, values, strict=True)]
