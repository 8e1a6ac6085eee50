"""A checkpoint into any layout: each device gets its own part of every leaf, read from the files."""

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
_AHEAD = 1 << 28  # bytes that are read at a time, before the devices have them; their boxes share chunks


def restored(step: Step, saved: Checkpoint) -> State:
    """Return the whole state, as the step's layout stores it.

    A loss scale (float16) begins anew where the checkpoint has none, and is left out where the step has none.

    Raises ValueError where it is another model's or optimizer's, or damaged, naming the array.
    """
    check_here(step.layout)
    if saved.is_foreign:
        raise ValueError(
            f"{saved.folder} has no item `about`: another program wrote it, or a part of it is missing; take its "
            "weights alone with weights_only=True"
        )
    arrays, tree = arrays_of(step)
    kind = lambda name: name.partition("/")[0]
    scale = {name_of(keys): np.asarray(x) for keys, x in flatten(LossScale.create(), ("scale",))}
    begun = {name for name in scale if name not in saved.arrays}
    needed = [a for a in arrays if a.names[0] not in begun]
    optional = [name for name in saved.arrays if kind(name) in ("scale", EXTRA)]
    check_fits(saved.about, {name: a for a in needed if not a.is_derived for name in a.names}, saved.folder, optional)

    def begin(array: Array) -> jax.Array:
        x = scale[array.names[0]]
        return jax.make_array_from_callback(array.shape, array.sharding, lambda index: x[index])

    def values() -> list[jax.Array]:
        found = iter(_read(saved, needed))
        return [begin(a) if a.names[0] in begun else next(found) for a in arrays]

    state = jax.tree.unflatten(tree, together("restore", values))
    if (number := int(state.step)) != saved.step:
        raise DamagedError(saved.folder, f"about says step {saved.step}, and the state is of step {number}")
    return state


def weights(step: Step, saved: Checkpoint, key: jax.Array, fresh: Fresh | None) -> State:
    """Return a new state with the parameters and variables of a checkpoint, which another program may have written.

    Args:
      key: of the new state.
      fresh: `fresh(path)` for the paths of parameters that begin as the model's own, whatever the checkpoint has.
    """
    check_here(step.layout)
    arrays, tree = arrays_of(step)
    is_fresh = lambda name: fresh is not None and name.startswith("params/") and fresh(name.removeprefix("params/"))
    is_needed = lambda array: array.names[0].partition("/")[0] in ("params", "variables") and not array.is_derived
    needed = [array for array in arrays if is_needed(array)]
    wanted = {name: array for array in needed for name in array.names if not is_fresh(name)}
    # Another program keeps variables beside its parameters, or among them.
    foreign = ("other/", "params/") if saved.is_foreign else ()
    ways = lambda name: [root + x for root in foreign if (x := name.removeprefix("variables/")) != name] + [name]
    there = {name: way for name in wanted for way in ways(name) if way in saved.arrays}
    missing = [name for name in wanted if name not in there]
    if saved.is_foreign and (begun := [name for name in missing if name.startswith("variables/")]):
        missing = [name for name in missing if name not in begun]
        if others := [name.removeprefix("variables/") for name in begun if wanted[name].kind is None]:
            warnings.warn(f"{saved.folder} has no {few(others)}: they begin as the model's own", stacklevel=2)
    if missing:
        names = few([name.removeprefix("params/") for name in missing])
        has = few([name.removeprefix("params/") for name in saved.arrays])
        raise ValueError(f"{saved.folder} has no weights for {names}; it has {has}; {BEGIN_ANEW}")
    hint = "make the model with the sizes of that checkpoint, and the step with its precision"
    check_fits(
        saved.about, {there[x]: wanted[x] for x in there}, saved.folder, saved.arrays, hint, casts=saved.is_foreign
    )
    begins_anew = any(name not in there for array in needed for name in array.names)
    begun = zip(arrays, jax.tree.leaves(step.init(key)), strict=True) if begins_anew else ()
    made = {array.names: x for array, x in begun if is_needed(array)}
    values = iter(together("restore", lambda: _read(saved, needed, there, made)))
    state = jax.tree.unflatten(tree, [next(values) if is_needed(a) else None for a in arrays])
    return step.begin(key, state.params, state.variables)


def extras(step: Step, saved: Checkpoint, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return trees that were saved beside a state, with the shapes, dtypes and places of `like`."""
    arrays, _ = extra_arrays(step, like)
    wanted = {array.names[0]: array for array in arrays}
    if missing := [name.removeprefix(f"{EXTRA}/") for name in wanted if name not in saved.arrays]:
        have = [name.removeprefix(f"{EXTRA}/") for name in saved.arrays if name.startswith(f"{EXTRA}/")]
        has = few(have) if have else "nothing there"
        raise ValueError(f"{saved.folder} has no {few(missing)} beside its state; it has {has}")
    check_fits(saved.about, wanted, saved.folder, saved.arrays)
    return jax.tree.unflatten(jax.tree.structure(dict(like)), together("restore", lambda: _read(saved, arrays)))


def together(name: str, action: Callable[[], Value]) -> Value:
    """Return what an action returns that all hosts do. Where it fails on one, raise on all, with the reason."""
    value, error, problem = writer().together(name, action)
    if error is not None or problem:
        raise error or ValueError(problem)
    return cast(Value, value)


def _read(
    saved: Checkpoint,
    arrays: Sequence[Array],
    names: Mapping[str, str] | None = None,
    made: dict[tuple[str, ...], jax.Array] | None = None,
) -> list[jax.Array]:
    """Return arrays of a state, read from a checkpoint, about `_AHEAD` bytes at a time in this host's memory.

    Args:
      names: the checkpoint's names of the leaves that are read, by the step's; the same names, and all, if None.
      made: by names, the arrays with the values that other leaves begin with; they are removed.
    """
    names = {name: name for array in arrays for name in array.names} if names is None else names
    placed: list[list[jax.Array]] = [[] for _ in arrays]
    ahead = collections.deque[tuple[list[Callable[[], object]], np.ndarray, int, list[jax.Device]]]()
    size = 0

    def put_first() -> int:
        reads, box, at, devices = ahead.popleft()
        for wait in reads:
            wait()
        kind = arrays[at].sharding.memory_kind
        shards = [jax.device_put(box, SingleDeviceSharding(device, memory_kind=kind)) for device in devices]
        placed[at] += jax.block_until_ready(shards)
        return box.nbytes

    for at, array in enumerate(arrays):
        x = (made or {}).pop(array.names, None)
        first = {} if x is None else {box_of(s.index, array.shape): s.data for s in raw(x).addressable_shards}
        for bounds, devices in array.boxes().items():
            if mine := [device for device in devices if device.process_index == jax.process_index()]:
                shape = [stop - start for start, stop in bounds]
                box = np.array(first[bounds], array.dtype) if first else np.zeros(shape, array.dtype)
                found = [(array.names[part.member], part) for part in parts(array.leaf, array.inner, bounds)]
                wanted = [(names[name], part) for name, part in found if name in names]
                reads = [saved.opened[name].begin(part.box, part.view(box)) for name, part in wanted]
                ahead.append((reads, box, at, mine))
                size += box.nbytes
            while size > _AHEAD:
                size -= put_first()
    while ahead:
        put_first()
    made_of = jax.make_array_from_single_device_arrays
    values = [made_of(array.shape, array.sharding, shards) for array, shards in zip(arrays, placed, strict=True)]
    wrap = lambda array, x: x if array.key_impl is None else jax.random.wrap_key_data(x, impl=array.key_impl)
    return [wrap(array, x) for array, x in zip(arrays, values, strict=True)]
