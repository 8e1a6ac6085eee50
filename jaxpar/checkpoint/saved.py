"""One checkpoint on disk: what it says of itself, its arrays, whether it is what was written; another made of it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..buckets import Bucket, Place, rename
from ..files import place
from ..text import few
from .about import About
from .boxes import Box, size, slices, whole
from .checksum import checksum
from .files import ABOUT, Arrays, Damaged, StoredBox, dtype_of, write_arrays, write_json

STATE = "state"  # the folder in that of a step
UNFINISHED = ".unfinished"  # behind the name of what is being written, or removed


class Checkpoint:
    """A checkpoint: a folder named by its step. It needs no devices.

    Args:
      folder: of one checkpoint, or one that holds several: the last.

    Raises ValueError where there is none, and where `about.json` is damaged, naming it.

    Attributes: `folder`, `step` (steps taken), `strategy` (of the run that wrote it), `run` (what identifies that run),
    `data` (where in the data it was), `arrays` (shape and dtype by name, as the model has them).
    """

    def __init__(self, folder: Place | str):
        self.folder = folder = _last(place(folder, "folder"))
        try:
            self.about = About.read(folder / STATE)
            if folder.name.isdecimal() and int(folder.name) != self.about.step:
                raise Damaged(f"its name says {folder.name}, it holds the state after step {self.about.step}")
        except Damaged as error:
            raise damaged(folder, error) from error
        self.step, self.strategy, self.arrays = self.about.step, self.about.strategy, self.about.arrays
        self.run, self.data = self.about.run, self.about.data

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.folder)!r}: step {self.step}, {len(self.arrays)} arrays of {self.strategy})"

    def read(self, name: str) -> np.ndarray:
        """One array as the model has it. Raises ValueError where it does not exist or is damaged."""
        if name not in self.arrays:
            raise ValueError(f"{self.folder} has no array {name!r}; it has {', '.join(list(self.arrays)[:5])}, ...")
        shape, dtype = self.arrays[name]
        out = np.zeros(shape, dtype)
        self.fill(name, whole(shape), out)
        self.require(name, checksum(out))
        return out

    def fill(self, name: str, box: Box, into: np.ndarray) -> None:
        """Reads a box of an array into memory. Raises ValueError where not all of it is there."""
        found = 0
        for file, block in self._blocks[name]:
            for part, x in file.pieces(block, box):
                into[slices(part, box)] = x
                found += size(part)
        if found != size(box):
            raise damaged(self.folder, Damaged(f"of {size(box)} elements of {name} it holds {found}"))

    def require(self, name: str, total: int) -> None:
        """Raise ValueError unless an array that was read has its checksum, naming the file that is damaged."""
        blocks = self._blocks[name]
        if total == sum(block.sum for _, block in blocks) % 2**64:
            return
        bad = next((file.file for file, block in blocks if _differs(file, block)), None)
        where = f"in {bad}" if bad else "once it was read, though the file is sound: memory may be faulty"
        raise damaged(self.folder, Damaged(f"{name} is not what was written, {where}"))

    def verify(self) -> None:
        """Reads everything. Raises ValueError naming the first arrays and files that are not what was written."""
        bad: dict[str, str] = {}
        for name in self.arrays:
            for file, block in self._blocks[name]:
                if name not in bad and _differs(file, block):
                    bad[name] = file.file
        if not bad and "step" in self.arrays and int(self.read("step")) != self.step:
            bad["step"] = f"{int(self.read('step'))}, and about.json says {self.step}"
        if bad:
            listed = few([f"{name} ({where})" for name, where in bad.items()])
            raise damaged(self.folder, Damaged(f"not what was written: {listed}"))

    @functools.cached_property
    def _blocks(self) -> dict[str, list[tuple[Arrays, StoredBox]]]:
        found: dict[str, list[tuple[Arrays, StoredBox]]] = {name: [] for name in self.arrays}
        try:
            for host in range(self.about.hosts):
                file = Arrays(self.folder / STATE, host, self.arrays)
                for block in file.blocks:
                    found[block.name].append((file, block))
            for name, (shape, _) in self.arrays.items():  # before anyone makes room for a shape that is not true
                if (there := sum(size(block.box) for _, block in found[name])) != (needed := size(whole(shape))):
                    raise Damaged(f"of {needed} elements of {name} it holds {there}")
        except Damaged as error:
            raise damaged(self.folder, error) from error
        return found


def _differs(file: Arrays, block: StoredBox) -> bool:
    found = sum(checksum(x, [start for start, _ in part]) for part, x in file.pieces(block))
    return found % 2**64 != block.sum


def damaged(folder: Place, error: Damaged) -> Damaged:
    """The error with the folder, and what to do."""
    others = sorted((number for number in numbers(folder.parent) if str(number) != folder.name), reverse=True)
    again = f"remove that folder to go on from step {others[0]}" if others else "start a new run"
    if others:
        again += ', or resume with "latest-good"'
    return Damaged(f"{folder} is damaged: {error}; {again}")


def numbers(folder: Place) -> list[int]:
    """The steps of the checkpoints in a folder, in order. In a bucket a checkpoint is what has its last file."""
    if isinstance(folder, Bucket):
        of = [file.relative_to(folder).parts for file in folder.rglob(ABOUT)]
        return sorted(int(step) for step, *rest in of if step.isdecimal() and rest == [STATE, ABOUT])
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.is_dir())


def half(folder: Place) -> Place:
    """Where a folder is written that is to be there whole or not at all: on disk under a name that it loses at the end.
    In a bucket, where nothing is renamed, in its place: without its last file, `about.json`, it is none.
    """
    return folder if isinstance(folder, Bucket) else folder.with_name(f"{folder.name}{UNFINISHED}")


def latest_good(folder: Place) -> tuple[int | None, list[str]]:
    """The step of the newest checkpoint in a folder that is what was written, None without any; and what is wrong with
    each newer one.
    """
    wrong: list[str] = []
    for number in reversed(numbers(folder)):
        try:
            Checkpoint(folder / str(number)).verify()
        except Damaged as error:
            wrong.append(str(error))
        else:
            return number, wrong
    return None, wrong


def _last(folder: Place) -> Place:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; pass that of a checkpoint, or one that holds checkpoints")
    if (folder / STATE).is_dir():
        return folder
    for inside in (folder, folder / "checkpoints"):
        if found := numbers(inside):
            return inside / str(found[-1])
    if folder.name.isdecimal():
        return folder  # what it lacks is said
    raise ValueError(f"{folder} holds no complete checkpoint; start the run anew")


# -- into another one --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Later:
    """An array that is read when it is written."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.read()


def converted(
    saved: Checkpoint, target: Place | str, weights_only: bool = False, dtype: str | None = None
) -> Checkpoint:
    """Writes a checkpoint of one host, whatever number wrote `saved`: everything, or parameters and variables alone. An
    array at a time, in this host's memory.

    Args:
      target: a folder that does not exist; the checkpoint's is made in it, named by its step.
      weights_only: leave out optimizer, key and loss scale; `step.restore(..., weights_only=True)` reads what remains.
      dtype: of floating-point parameters, such as "bfloat16", for storage: a step's masters are float32, so that it
        restores no other. As they are if None.

    Raises ValueError where the folder is there, the dtype is none, or an array is damaged.
    """
    if (target := place(target, "target")).exists():
        raise ValueError(f"{target} already exists; name another folder")
    kinds = ("params", "variables", "step")
    names = [name for name in saved.arrays if not weights_only or name.partition("/")[0] in kinds]
    wanted = None if dtype is None else dtype_of(dtype, f"dtype={dtype!r}:")
    arrays = {}
    for name in names:
        shape, kind = saved.arrays[name]
        cast = wanted is not None and name.startswith("params") and jnp.issubdtype(kind, jnp.floating)
        arrays[name] = shape, wanted if cast else kind
    unfinished = half(target)
    (folder := unfinished / str(saved.step) / STATE).mkdir(parents=True)
    later = [
        (
            name,
            whole(shape),
            _Later(shape, kind, lambda name=name, kind=kind: saved.read(name).astype(kind, copy=False)),
        )
        for name, (shape, kind) in arrays.items()
    ]
    write_arrays(folder, 0, later)
    of_keys = {name: kind for name, kind in saved.about.kinds.items() if name in arrays}
    about = dataclasses.replace(saved.about, hosts=1, arrays=arrays, kinds=of_keys)
    write_json(folder / ABOUT, about.json())
    if isinstance(unfinished, Path):
        rename(unfinished, target)
    return Checkpoint(target)


class Weight:
    """A parameter of a checkpoint, read when it is asked for: whole, `np.asarray(weight)`, or at one index of its first
    dim, `weight[3]`. Raises ValueError where it is damaged, with the whole or with the last of the parts.
    """

    def __init__(self, saved: Checkpoint, name: str):
        self._saved, self._name = saved, name
        self.shape, self.dtype = saved.arrays[name]
        self._sums: dict[int, int] = {}

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._saved.read(self._name)

    def __getitem__(self, index: int) -> np.ndarray:
        into = np.empty((1, *self.shape[1:]), self.dtype)
        self._saved.fill(self._name, ((index, index + 1), *whole(self.shape[1:])), into)
        self._sums[index] = checksum(into, [index, *[0] * (into.ndim - 1)])
        if len(self._sums) == self.shape[0]:
            self._saved.require(self._name, sum(self._sums.values()) % 2**64)
        return into[0]


def weights_of(saved: Checkpoint) -> dict[str, Weight]:
    """The parameters of a checkpoint by their path in the model; nothing is read yet."""
    return {name.removeprefix("params/"): Weight(saved, name) for name in saved.arrays if name.startswith("params/")}
