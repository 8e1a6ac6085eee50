"""A checkpoint made of another one: all of it, or its weights, in another dtype. It needs no devices."""

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
    """Write a checkpoint with what another one has, a piece at a time in this host's memory.

    Args:
      target: a folder that does not exist; the checkpoint is made in it, named by its step.
      weights_only: leave out optimizer, key and loss scale; `step.restore(..., weights_only=True)` reads the rest.
      dtype: of floating-point parameters, such as "bfloat16", for storage; as they are if None. A step's masters are
        float32, so that it restores no other whole state.

    Raises ValueError where the folder is there, the dtype is none, or an array is damaged.
    """
    if (target := place(target, "target").absolute()).exists():
        raise ValueError(f"{target} already exists; name another folder")
    try:
        cast = None if dtype is None else np.dtype(jnp.dtype(dtype))
    except TypeError as error:
        raise ValueError(f"dtype={dtype!r} is no dtype of numbers; use one such as 'bfloat16' or 'float32'") from error
    kinds, about = ("params", "variables", "step"), saved.about
    names = [name for name in saved.arrays if not weights_only or name.partition("/")[0] in kinds]
    shapes, paths, items = {}, {}, dict[str, Any]()
    for name in names:
        shape, kind = saved.arrays[name]
        if cast is not None and name.startswith("params") and jnp.issubdtype(kind, jnp.floating):
            kind = cast
        pieces = slabs(shape, kind.itemsize)
        boxes: list[Any] = [(box, functools.partial(saved.opened[name].read, box, kind)) for box in pieces]
        shapes[name], paths[name] = (shape, kind), keys_of(name) if saved.is_foreign else about.path(name)
        node, keys = items, paths[name] if paths[name][0] == EXTRA else (STATE, *paths[name])
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = SavedArray(shape, kind, tuple(max(1, stop - start) for start, stop in pieces[0]), boxes)
    kept = {name: kind for name, kind in about.kinds.items() if name in shapes}
    about = dataclasses.replace(about, hosts=1, arrays=shapes, paths=paths, kinds=kept)
    from ...checkpoint.write import finish, save_items

    target.mkdir(parents=True)
    write, complete = (lambda folder: save_items(folder, items)), (lambda folder: finish(folder, items, about))
    wait(writer().begin(target, saved.step, None, write, complete))
    return Checkpoint(target)


class Weight:
    """A parameter of a checkpoint, read when it is asked for: whole, `np.asarray(weight)`, or at one index of its first
    dim, `weight[3]`. Raises ValueError where that part is damaged.
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
    """Return the parameters of a checkpoint by their path in the model; nothing is read yet."""
    return {name.removeprefix("params/"): Weight(saved, name) for name in saved.arrays if name.startswith("params/")}
