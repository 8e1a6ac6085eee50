"""One checkpoint on disk or in a bucket: its description, its arrays, and whether they are what was written."""

from __future__ import annotations

import functools

import numpy as np

from ..backend.buckets import Place
from ..backend.files import place
from ..backend.text import few
from ..layout.boxes import slabs
from .about import TREE, About, DamagedError, NoCheckpointError, check_files, complete_steps
from .arrays import EXTRA
from .commit import wait_for
from .stores import OpenedArray, Tree

STATE = "state"  # the item of a checkpoint that holds the state
_FOREIGN_ITEMS = (STATE, "params", "default", "model", "pytree")  # items in which other programs save a tree


class Checkpoint:
    """A checkpoint of jaxpar, or of another program that writes Orbax checkpoints. It needs no devices.

    Args:
      folder: the folder of one checkpoint; or a folder that holds several, to read the last one.

    Attributes:
      folder: the folder of the checkpoint.
      step: steps taken.
      strategy: strategy of the run that wrote it.
      run: what identifies that run.
      data: position in the data.
      arrays: shape and dtype by name, as the model has them. In another program's checkpoint the parameters are the
        arrays below its `params`, or all arrays if nothing has that name.

    Raises:
      FileNotFoundError: if there is no checkpoint; it is also a ValueError.
      ValueError: if its description is damaged.
    """

    def __init__(self, folder: Place | str):
        wait_for(folder)
        self.folder = folder = _last_checkpoint(place(folder, "folder"))
        foreign_folder = None if (folder / "about").is_dir() else _foreign_tree(folder)
        self.is_foreign, self._foreign_tree = foreign_folder is not None, foreign_folder and Tree(foreign_folder)
        self.about = self._foreign_tree.about() if self._foreign_tree else About.read(folder)
        # Somebody may have renamed the folder; then a run would go on from the wrong step.
        if not self.is_foreign and folder.name.isdecimal() and int(folder.name) != self.about.step:
            raise DamagedError(folder, f"its name says {folder.name}, and its state is of step {self.about.step}")
        self.step, self.strategy, self.arrays = self.about.step, self.about.strategy, self.about.arrays
        self.run, self.data = self.about.run, self.about.data

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.folder)!r}: step {self.step}, {len(self.arrays)} arrays of {self.strategy})"

    @functools.cached_property
    def opened(self) -> dict[str, OpenedArray]:
        """The arrays by name, all opened at once. Raises DamagedError if a file is missing or not what was written."""
        # The checksums of chunks do not detect a file that belongs to another checkpoint.
        if not self.is_foreign:
            check_files(self.about, self.folder)
        # The tree of an item is opened once, and its arrays share the cache.
        tree = functools.cache(lambda item: self._foreign_tree or Tree(self.folder / item))
        opened = {}
        for name, (shape, dtype) in self.arrays.items():
            keys = self.about.path(name)
            is_extra = keys[0] == EXTRA and not self.is_foreign
            future = tree(EXTRA).open(keys[1:]) if is_extra else tree(STATE).open(keys)
            opened[name] = OpenedArray(name, self.folder, shape, dtype, future)
        return opened

    def read(self, name: str) -> np.ndarray:
        """Return one array as the model has it. Raises ValueError if it does not exist or is damaged."""
        if name not in self.arrays:
            raise ValueError(f"{self.folder} has no array {name!r}; it has {few(list(self.arrays), 5)}")
        shape, dtype = self.arrays[name]
        return self.opened[name].read(tuple((0, n) for n in shape), dtype)

    def verify(self) -> None:
        """Read all arrays. Raises ValueError with the first arrays or files that are not what was written."""
        problems: list[str] = []
        for array in self.opened.values():
            try:
                array.check()
                # A slab at a time, so that the host's memory need not hold the array.
                for box in slabs(array.shape, array.dtype.itemsize):
                    array.read(box, array.dtype)
            except DamagedError as error:
                problems.append(error.problem)
        # If an array is damaged, this read would raise its error a second time.
        if not problems and "step" in self.arrays and not self.is_foreign and int(self.read("step")) != self.step:
            problems.append(f"step is {int(self.read('step'))}, and about says {self.step}")
        if problems:
            raise DamagedError(self.folder, few(problems))


def _last_checkpoint(folder: Place) -> Place:
    """Return the folder of a checkpoint: `folder`, or the last one in it or in its folder `checkpoints`.

    Raises:
      NoCheckpointError: if there is none.
    """
    if not folder.is_dir():
        raise NoCheckpointError(
            f"{folder} is not a folder; pass the folder of a checkpoint, or one that holds checkpoints"
        )
    if (folder / "about").is_dir() or (folder / STATE).is_dir() or _foreign_tree(folder) is not None:
        return folder
    for parent in (folder, folder / "checkpoints"):
        if steps := complete_steps(parent):
            return parent / str(steps[-1])
    if folder.name.isdecimal():
        return folder  # a damaged checkpoint: reading it says what it lacks
    raise NoCheckpointError(f"{folder} holds no complete checkpoint; start the run anew")


def _foreign_tree(folder: Place) -> Place | None:
    """Return the folder of the tree in a checkpoint of another program; None if there is no such tree."""
    candidates = (folder, *(folder / item for item in _FOREIGN_ITEMS))
    return next((candidate for candidate in candidates if (candidate / TREE).is_file()), None)
