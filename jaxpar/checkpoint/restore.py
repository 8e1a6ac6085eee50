"""A checkpoint into any layout: each device gets its own part of every leaf, read from the files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding

from ..layout.precision import LossScale
from ..layout.state import State
from ..step.core import Step
from ..step.init import BEGIN_ANEW, check_here
from ..text import few
from .about import fits
from .arrays import EXTRA, LEFT, Array, arrays_of, extra_arrays, raw
from .boxes import box_of, parts
from .checksum import checksum
from .files import Damaged
from .saved import Checkpoint, damaged

Fresh = Callable[[str], bool]


def restored(step: Step, saved: Checkpoint) -> State:
    """The whole state, as the step's layout stores it.

    A loss scale (float16) begins anew where the checkpoint has none, and is left out where the step has none; so do
    residuals of gradients, with a warning. Of n ranks each gets those of every n-th there: their sum is kept.

    Raises ValueError where it is another model's or optimizer's, or damaged, naming the array.
    """
    check_here(step.layout)
    arrays, tree = arrays_of(step)
    of_scale = lambda name: name.startswith("scale/")
    left = {array.path: array for array in arrays if array.path.startswith(LEFT)}
    kept = {name for name, a in left.items() if name in saved.arrays and saved.arrays[name][0][1:] == a.shape[1:]}
    there = {name for name in saved.arrays if name.startswith(LEFT)}
    if lost := [name.removeprefix(LEFT) for name in sorted((there | {*left}) - kept)]:
        warnings.warn(
            f"{saved.folder}: what rounding took from the gradients of {few(lost)} is not carried over from "
            f"{saved.strategy} to {step.strategy}: error_feedback begins anew there, or is off",
            stacklevel=2,
        )
    scaled = [array for array in arrays if of_scale(array.path) and array.path not in saved.arrays]
    wanted = {name: a for a in arrays if a not in scaled and not a.derived and a.path not in left for name in a.names}
    beside = lambda name: of_scale(name) or name.startswith((EXTRA, LEFT))
    fits(saved.about, wanted, saved.folder, list(filter(beside, saved.arrays)))
    first = dict(zip((a.path for a in scaled), jax.tree.leaves(LossScale.create()), strict=False))
    read = _Reader(saved)
    first |= {name: _residual(saved if name in kept else None, a) for name, a in left.items()}
    values = [jax.device_put(first[a.path], a.sharding) if a.path in first else read(a) for a in arrays]
    read.check()
    state = jax.tree.unflatten(tree, values)
    if (number := int(state.step)) != saved.step:
        raise damaged(saved.folder, Damaged(f"about.json says step {saved.step}, and the state is of step {number}"))
    return state


def _residual(saved: Checkpoint | None, array: Array) -> jax.Array:
    """Residuals [n, ...] of n ranks: row r has the sum of rows r, r + n, ... of a checkpoint, zeros without one. Every
    host reads them whole.
    """
    rows = np.zeros(array.shape, array.dtype)
    for at, row in enumerate(() if saved is None else saved.read(array.path)):
        rows[at % len(rows)] += row
    return jax.make_array_from_callback(array.shape, array.sharding, lambda index: rows[index])


def weights(step: Step, saved: Checkpoint, key: jax.Array, fresh: Fresh | None) -> State:
    """A new state with the parameters and variables of a checkpoint.

    Args:
      key: of the new state.
      fresh: `fresh(path)` for the paths of parameters that begin as the model's own, whatever the checkpoint has.
    """
    check_here(step.layout)
    arrays, tree = arrays_of(step)
    anew = lambda name: fresh is not None and name.startswith("params/") and fresh(name.removeprefix("params/"))
    needed = [array for array in arrays if array.path.partition("/")[0] in ("params", "variables")]
    wanted = {name: array for array in needed for name in array.names if not anew(name)}
    if missing := [name.removeprefix("params/") for name in wanted if name not in saved.arrays]:
        raise ValueError(f"{saved.folder} has no weights for {few(missing)}; {BEGIN_ANEW}")
    fits(saved.about, wanted, saved.folder, saved.arrays)
    made = dict(zip((a.path for a in arrays), jax.tree.leaves(step.init(key)), strict=True)) if fresh else {}
    read = _Reader(saved)
    values = {a.path: read(a, made.get(a.path), anew) for a in needed}
    read.check()
    del made
    state = jax.tree.unflatten(tree, [values.get(a.path) for a in arrays])
    return step.begin(key, state.params, state.variables)


def extras(step: Step, saved: Checkpoint, like: Mapping[str, Any]) -> dict[str, Any]:
    """Trees that were saved beside a state, with the shapes, dtypes and places of `like`."""
    arrays, _ = extra_arrays(step, like)
    wanted = {array.path: array for array in arrays}
    if missing := [name for name in wanted if name not in saved.arrays]:
        have = [name.removeprefix(EXTRA) for name in saved.arrays if name.startswith(EXTRA)]
        given = few([name.removeprefix(EXTRA) for name in missing])
        raise ValueError(
            f"{saved.folder} has no {given} beside its state; it has {few(have) if have else 'nothing there'}"
        )
    fits(saved.about, wanted, saved.folder, saved.arrays)
    read = _Reader(saved)
    found = [read(array) for array in arrays]
    read.check()
    return jax.tree.unflatten(jax.tree.structure(dict(like)), found)


class _Reader:
    """Reads arrays of a checkpoint into a layout, and sums up what it has read."""

    def __init__(self, saved: Checkpoint):
        self.saved = saved
        self.sums: dict[str, int] = {}

    def __call__(self, array: Array, made: jax.Array | None = None, anew: Callable[[str], bool] | None = None) -> Any:
        """An array of a state; where it has leaves that begin anew, these are those of `made`."""
        if not array.derived:  # on every host in this order, whatever it holds
            self.sums |= {name: 0 for name in array.names if anew is None or not anew(name)}
        places = array.sharding.devices_indices_map(array.shape)
        boxes: dict[Any, list[jax.Device]] = {}
        for device, index in places.items():
            boxes.setdefault(box_of(index, array.shape), []).append(device)
        own = {box_of(s.index, array.shape): s.data for s in raw(made).addressable_shards} if made is not None else {}
        here, shards = jax.process_index(), []
        for box, devices in boxes.items():
            mine = [device for device in devices if device.process_index == here]
            if mine:
                shape = [stop - start for start, stop in box]
                read = [name for name in array.names if anew is None or not anew(name)]
                dtype = self.saved.arrays[read[0]][1] if read else array.dtype
                into = np.zeros(shape, dtype) if made is None else np.array(own[box], dtype)
                self._fill(array, box, into, anew, devices[0].process_index == here)
                into = into.astype(array.dtype, copy=False)  # what is frozen, or a copy
                kind = array.sharding.memory_kind
                shards += [jax.device_put(into, SingleDeviceSharding(device, memory_kind=kind)) for device in mine]
                jax.block_until_ready(shards)  # so that one box at a time is in this host's memory
        x = jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
        return x if array.kind is None else jax.random.wrap_key_data(x, impl=array.kind)

    def _fill(self, array: Array, box: Any, into: np.ndarray, anew: Any, counts: bool) -> None:
        for part in parts(array.leaf, array.inner, box):
            name = array.names[part.member]
            if anew is not None and anew(name):
                continue
            view = part.view(into)
            self.saved.fill(name, part.box, view)
            if counts and not array.derived:  # of several hosts with one box, one
                total = checksum(view, [start for start, _ in part.box])
                self.sums[name] = (self.sums[name] + total) % 2**64

    def check(self) -> None:
        """Raise ValueError unless all that was read, by all hosts together, is what was written."""
        totals = np.array(list(self.sums.values()), np.uint64)
        if jax.process_count() > 1:  # jax has no 64 bits here
            halves = multihost_utils.process_allgather(totals.view(np.uint32))
            totals = np.asarray(halves).reshape(jax.process_count(), -1).view(np.uint64).sum(0, dtype=np.uint64)
        for name, total in zip(self.sums, totals.tolist(), strict=True):
            self.saved.require(name, total)
