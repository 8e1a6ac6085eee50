"""One checkpoint on disk or in a bucket: its description, its arrays, whether it is what was written."""

from __future__ import annotations

import functools

import numpy as np

from ..backend.buckets import Place
from ..backend.files import place
from ..backend.text import few
from ..layout.boxes import slabs
from .about import TREE, About, Damaged, check_files, numbers
from .arrays import EXTRA
from .stores import OpenedArray, Tree

STATE = "state"  # the item of a state in a checkpoint
_ITEMS = (STATE, "params", "default", "model", "pytree")  # where others keep a tree in a checkpoint


class Checkpoint:
    """A checkpoint of jaxpar, or of another program that writes Orbax checkpoints. It needs no devices.

    Args:
      folder: of one checkpoint, or one that holds several: the last.

    Raises ValueError where there is none, and where its description is damaged.

    Attributes: `folder`, `step` (steps taken), `strategy` (of the run that wrote it), `run` (what identifies that run),
    `data` (the position in the data), `arrays` (shape and dtype by name, as the model has them). In another program's
    checkpoint the parameters are what is below its `params`, or all of it where nothing has that name.
    """

    def __init__(self, folder: Place | str):
        self.folder = folder = _last(place(folder, "folder"))
        foreign = None if (folder / "about").is_dir() else _foreign_tree(folder)
        self.is_foreign, self._foreign = foreign is not None, foreign and Tree(foreign)
        self.about = self._foreign.about() if self._foreign else About.read(folder)
        if not self.is_foreign and folder.name.isdecimal() and int(folder.name) != self.about.step:
            raise Damaged(folder, f"its name says {folder.name}, it holds the state after step {self.about.step}")
        self.step, self.strategy, self.arrays = self.about.step, self.about.strategy, self.about.arrays
        self.run, self.data = self.about.run, self.about.data

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.folder)!r}: step {self.step}, {len(self.arrays)} arrays of {self.strategy})"

    @functools.cached_property
    def opened(self) -> dict[str, OpenedArray]:
        """The arrays by name, which are opened all at once. Raises Damaged where a file is missing or another one."""
        if not self.is_foreign:
            check_files(self.about, self.folder)
        tree = functools.cache(lambda item: self._foreign or Tree(self.folder / item))
        opened = {}
        for name, (shape, dtype) in self.arrays.items():
            keys = self.about.path(name)
            future = tree(EXTRA).open(keys[1:]) if keys[0] == EXTRA and not self.is_foreign else tree(STATE).open(keys)
            opened[name] = OpenedArray(name, self.folder, shape, dtype, future)
        return opened

    def read(self, name: str) -> np.ndarray:
        """Return one array as the model has it. Raises ValueError where it does not exist or is damaged."""
        if name not in self.arrays:
            raise ValueError(f"{self.folder} has no array {name!r}; it has {few(list(self.arrays), 5)}")
        shape, dtype = self.arrays[name]
        return self.opened[name].read(tuple((0, n) for n in shape), dtype)

    def verify(self) -> None:
        """Read everything. Raises ValueError naming the first arrays or files that are not what was written."""
        wrong: list[str] = []
        for array in self.opened.values():
            try:
                array.check()
                for box in slabs(array.shape, array.dtype.itemsize):
                    array.read(box, array.dtype)
            except Damaged as error:
                wrong.append(error.what)
        if not wrong and "step" in self.arrays and not self.is_foreign and int(self.read("step")) != self.step:
            wrong.append(f"step is {int(self.read('step'))}, and about says {self.step}")
        if wrong:
            raise Damaged(self.folder, few(wrong))


def _last(folder: Place) -> Place:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; pass that of a checkpoint, or one that holds checkpoints")
    if (folder / "about").is_dir() or (folder / STATE).is_dir() or _foreign_tree(folder) is not None:
        return folder
    for inside in (folder, folder / "checkpoints"):
        if found := numbers(inside):
            return inside / str(found[-1])
    if folder.name.isdecimal():
        return folder  # the error says what it lacks
    raise ValueError(f"{folder} holds no complete checkpoint; start the run anew")


def _foreign_tree(folder: Place) -> Place | None:
    """Return the folder of a tree that Orbax has written, in a checkpoint of another program."""
    places = (folder, *(folder / item for item in _ITEMS))
    return next((place for place in places if (place / TREE).is_file()), None)
