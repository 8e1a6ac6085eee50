"""A checkpoint into any layout: each device gets its own part of every leaf, read from the files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding

from ..layout.boxes import box_of, parts
from ..layout.precision import LossScale
from ..layout.state import State
from ..step.core import Step
from ..step.init import BEGIN_ANEW, check_here
from ..text import few
from .about import fits
from .arrays import EXTRA, Array, arrays_of, extra_arrays, raw
from .saved import Checkpoint, damaged
from .stores import Damaged

Fresh = Callable[[str], bool]


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
    kind = lambda array: array.names[0].partition("/")[0]
    anew = [a for a in arrays if kind(a) == "scale" and a.names[0] not in saved.arrays]
    wanted = {name: a for a in arrays if a not in anew and not a.derived for name in a.names}
    optional = [name for name in saved.arrays if name.partition("/")[0] in ("scale", EXTRA)]
    fits(saved.about, wanted, saved.folder, optional)
    scale = iter(jax.tree.leaves(LossScale.create()))
    value = lambda a: jax.device_put(next(scale), a.sharding) if a in anew else _read(saved, a)

    values = _together(lambda: [value(array) for array in arrays])
    state = jax.tree.unflatten(tree, values)
    if (number := int(state.step)) != saved.step:
        raise damaged(saved.folder, Damaged(f"about says step {saved.step}, and the state is of step {number}"))
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
    needed = [array for array in arrays if array.names[0].partition("/")[0] in ("params", "variables")]
    wanted = {name: array for array in needed for name in array.names if not is_fresh(name)}
    there = _names_there(saved, wanted)
    missing = [name for name in wanted if name not in there]
    if saved.is_foreign and (begun := [name for name in missing if name.startswith("variables/")]):
        missing = [name for name in missing if name not in begun]
        if others := [name.removeprefix("variables/") for name in begun if wanted[name].kind is None]:
            warnings.warn(f"{saved.folder} has no {few(others)}: they begin as the model's own", stacklevel=2)
    if missing:
        names = few([name.removeprefix("params/") for name in missing])
        has = few([name.removeprefix("params/") for name in saved.arrays])
        raise ValueError(f"{saved.folder} has no weights for {names}; it has {has}; {BEGIN_ANEW}")
    if saved.is_foreign:
        _check_shapes(saved, {there[name]: wanted[name] for name in there})
    else:
        fits(saved.about, wanted, saved.folder, saved.arrays)
    begins_anew = any(name not in there for array in needed for name in array.names)
    made = dict(zip((a.names for a in arrays), jax.tree.leaves(step.init(key)), strict=True)) if begins_anew else {}
    values = _together(lambda: {a.names: _read(saved, a, there, made.pop(a.names, None)) for a in needed})
    made.clear()
    state = jax.tree.unflatten(tree, [values.get(a.names) if not a.derived else None for a in arrays])
    return step.begin(key, state.params, state.variables)


def _names_there(saved: Checkpoint, wanted: Mapping[str, Array]) -> dict[str, str]:
    """Return the names that a checkpoint has for those that are wanted, where it has them. Another program keeps
    variables beside its parameters, or among them.
    """
    found = {}
    for name in wanted:
        rest = name.removeprefix("variables/")
        ways = (name, f"params/{rest}", f"other/{rest}") if saved.is_foreign and rest != name else (name,)
        if (there := next((way for way in ways if way in saved.arrays), None)) is not None:
            found[name] = there
    return found


def _check_shapes(saved: Checkpoint, wanted: Mapping[str, Array]) -> None:
    for name, array in wanted.items():
        if (shape := saved.arrays[name][0]) != array.logical:
            raise ValueError(
                f"{saved.folder} has {name.removeprefix('params/')} of shape {list(shape)}, the model needs "
                f"{list(array.logical)}; make the model with the sizes of that checkpoint"
            )


def extras(step: Step, saved: Checkpoint, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return trees that were saved beside a state, with the shapes, dtypes and places of `like`."""
    arrays, _ = extra_arrays(step, like)
    wanted = {array.names[0]: array for array in arrays}
    if missing := [name for name in wanted if name not in saved.arrays]:
        have = [name.removeprefix(f"{EXTRA}/") for name in saved.arrays if name.startswith(f"{EXTRA}/")]
        given = few([name.removeprefix(f"{EXTRA}/") for name in missing])
        raise ValueError(
            f"{saved.folder} has no {given} beside its state; it has {few(have) if have else 'nothing there'}"
        )
    fits(saved.about, wanted, saved.folder, saved.arrays)
    values = _together(lambda: [_read(saved, array) for array in arrays])
    return jax.tree.unflatten(jax.tree.structure(dict(like)), values)


def _together(read: Callable[[], Any]) -> Any:
    """Return what `read` returns. Where it fails on one host, raise on all: the others would wait for it for ever."""
    values, problem = None, None
    try:
        values = read()
    except (ValueError, OSError) as error:
        problem = error
    if jax.process_count() > 1:
        failed = np.flatnonzero(multihost_utils.process_allgather(np.bool_(problem is not None)))
        if failed.size and problem is None:
            problem = ValueError(f"process {failed[0]} could not read its part of the checkpoint; its error says why")
    if problem is not None:
        raise problem
    return values


def _read(
    saved: Checkpoint, array: Array, there: Mapping[str, str] | None = None, made: jax.Array | None = None
) -> jax.Array:
    """Return an array of a state, read from a checkpoint.

    Args:
      there: the names that the checkpoint has for those of the array; the same names if None.
      made: what the leaves begin with that the checkpoint has no name for.
    """
    here, shards = jax.process_index(), []
    names = {name: name for name in array.names} if there is None else there
    first = {box_of(s.index, array.shape): s.data for s in raw(made).addressable_shards} if made is not None else {}
    for box, devices in array.boxes().items():
        mine = [device for device in devices if device.process_index == here]
        if mine:
            shape = [stop - start for start, stop in box]
            into = np.array(first[box], array.dtype) if first else np.zeros(shape, array.dtype)
            boxes = [(array.names[part.member], part) for part in parts(array.leaf, array.inner, box)]
            saved.fill((names[name], part.box, part.view(into)) for name, part in boxes if name in names)
            kind = array.sharding.memory_kind
            shards += [jax.device_put(into, SingleDeviceSharding(device, memory_kind=kind)) for device in mine]
            jax.block_until_ready(shards)  # so that one box at a time is in this host's memory
    x = jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
    return x if array.kind is None else jax.random.wrap_key_data(x, impl=array.kind)
