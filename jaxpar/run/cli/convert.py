"""Conversion of checkpoints without devices: to another checkpoint (`converted`), or to weights by name (`weights_of`).

Both read from the files as needed, a piece at a time. So the host's memory need not hold a whole model.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...backend.buckets import Place
from ...backend.files import place
from ...checkpoint.arrays import EXTRA, SavedArray, keys_of
from ...checkpoint.commit import wait, writer
from ...checkpoint.saved import STATE, Checkpoint
from ...layout.boxes import slabs


def converted(
    saved: Checkpoint, target: Place | str, weights_only: bool = False, dtype: str | None = None
) -> Checkpoint:
    """Copy a checkpoint, or its weights, into a new checkpoint, and return that.

    Args:
      target: a folder that does not exist. The new checkpoint is a folder in it, named by its step.
      weights_only: leave out optimizer, key and loss scale; `step.restore(..., weights_only=True)` reads the rest.
      dtype: dtype to store floating-point parameters in, such as "bfloat16"; unchanged if None. A step keeps float32
        masters, so a state with another dtype cannot be restored whole, only its weights.

    Raises:
      ValueError: if the folder exists, the dtype does not, or an array is damaged.
    """
    # 1. Check the arguments.
    if (target := place(target, "target").absolute()).exists():
        raise ValueError(f"{target} already exists; name another folder")
    try:
        cast = None if dtype is None else np.dtype(jnp.dtype(dtype))
    except TypeError as error:
        raise ValueError(
            f"dtype={dtype!r} is not a dtype of numbers; use one such as 'bfloat16' or 'float32'"
        ) from error
    # 2. Describe the arrays; none is read yet.
    weight_fields, about = ("params", "variables", "step"), saved.about
    names = [name for name in saved.arrays if not weights_only or name.partition("/")[0] in weight_fields]
    shapes, paths, items = {}, {}, dict[str, Any]()
    for name in names:
        shape, array_dtype = saved.arrays[name]
        if cast is not None and name.startswith("params") and jnp.issubdtype(array_dtype, jnp.floating):
            array_dtype = cast
        # The values are functions, called as each box is written: `save_items` drops every box once it is on the disk.
        pieces = slabs(shape, array_dtype.itemsize)
        boxes: list[Any] = [(box, functools.partial(saved.opened[name].read, box, array_dtype)) for box in pieces]
        shapes[name], paths[name] = (shape, array_dtype), keys_of(name) if saved.is_foreign else about.path(name)
        # Put the array into the nested dicts of its item.
        # The key path of an extra array begins with the name of its item. Paths in the state do not.
        node, keys = items, paths[name] if paths[name][0] == EXTRA else (STATE, *paths[name])
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        # Each slab is one chunk, so that no chunk is written in parts. A chunk of an empty array has the size 1.
        chunk = tuple(max(1, stop - start) for start, stop in pieces[0])
        node[keys[-1]] = SavedArray(shape, array_dtype, chunk, boxes)
    # 3. Write them, as one host. All checkpoints in the new folder stay.
    kinds = {name: kind for name, kind in about.kinds.items() if name in shapes}
    about = dataclasses.replace(about, hosts=1, arrays=shapes, paths=paths, kinds=kinds)
    from ...checkpoint.write import finish, save_items  # imports Orbax, which takes a second

    target.mkdir(parents=True)
    write, complete = (lambda folder: save_items(folder, items)), (lambda folder: finish(folder, items, about))
    wait(writer().begin(target, saved.step, None, write, complete))
    return Checkpoint(target)


class Weight:
    """A parameter of a checkpoint, read on demand: `np.asarray(weight)`, or `weight[3]` for an index of its first dim.

    Both raise ValueError if the part that they read is damaged.
    """

    def __init__(self, saved: Checkpoint, name: str):
        self._saved, self._name = saved, name
        self.shape, self.dtype = saved.arrays[name]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._saved.read(self._name)

    def __getitem__(self, index: int) -> np.ndarray:
        box = ((index, index + 1), *((0, n) for n in self.shape[1:]))
        return self._saved.opened[self._name].read(box, self.dtype)[0]


def weights_of(saved: Checkpoint) -> dict[str, Weight]:
    """Return the parameters of a checkpoint by their path in the model, without reading them."""
    return {name.removeprefix("params/"): Weight(saved, name) for name in saved.arrays if name.startswith("params/")}
