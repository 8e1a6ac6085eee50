"""One checkpoint on disk or in a bucket: what it says of itself, its arrays, whether it is what was written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from ..buckets import ANSWER_SECONDS, Place, answered, is_bucket
from ..files import place
from ..layout.boxes import Box, slabs
from ..text import few
from .about import About, check_files, files_of
from .arrays import EXTRA, Keys, name_of
from .stores import Damaged, TreeFiles, fetched, handler, orbax_path

STATE = "state"  # the item of a state in a checkpoint
UNFINISHED = ".orbax-checkpoint-tmp"  # what Orbax puts behind the name of a folder that is not complete
COMPLETE = "commit_success.txt"  # what Orbax writes last in a bucket
DATABASE = "manifest.ocdbt"  # the first file of an OCDBT database
_METADATA = "_METADATA"  # Orbax's description of a tree
_ITEMS = (STATE, "params", "default", "model", "pytree")  # where others keep a tree in a checkpoint
_SLOWEST = 1e6  # bytes per second that a bucket takes at least
_ATTRIBUTE = "value"  # of a variable of Flax NNX, the last key of its path


class Checkpoint:
    """A checkpoint of jaxpar, or of another program that writes Orbax checkpoints. It needs no devices.

    Args:
      folder: of one checkpoint, or one that holds several: the last.

    Raises ValueError where there is none, and where what it says of itself is damaged.

    Attributes: `folder`, `step` (steps taken), `strategy` (of the run that wrote it), `run` (what identifies that run),
    `data` (the position in the data), `arrays` (shape and dtype by name, as the model has them). In another program's
    checkpoint the parameters are what is below its `params`, or all of it where nothing has that name.
    """

    def __init__(self, folder: Place | str):
        self.folder = folder = _last(place(folder, "folder"))
        foreign = None if (folder / "about").is_dir() else _foreign_tree(folder)
        self.is_foreign, self._is_checked = foreign is not None, foreign is not None
        try:
            if foreign is not None:
                self.about, self._files = _foreign_about(foreign), {"": _files_of_foreign(foreign)}
            else:
                self.about = About.read(folder)
                is_database = {item: (folder / item / DATABASE).is_file() for item in (STATE, EXTRA)}
                self._files = {item: TreeFiles(folder / item, found) for item, found in is_database.items()}
                if folder.name.isdecimal() and int(folder.name) != self.about.step:
                    raise Damaged(f"its name says {folder.name}, it holds the state after step {self.about.step}")
        except Damaged as error:
            raise damaged(folder, error) from error
        self.step, self.strategy, self.arrays = self.about.step, self.about.strategy, self.about.arrays
        self.run, self.data = self.about.run, self.about.data

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.folder)!r}: step {self.step}, {len(self.arrays)} arrays of {self.strategy})"

    def read(self, name: str) -> np.ndarray:
        """Return one array as the model has it. Raises ValueError where it does not exist or is damaged."""
        if name not in self.arrays:
            raise ValueError(f"{self.folder} has no array {name!r}; it has {few(list(self.arrays), 5)}")
        self.fill([(name, None, None)])  # before room is made for a shape that is not true
        shape, dtype = self.arrays[name]
        out = np.zeros(shape, dtype)
        self.fill([(name, tuple((0, n) for n in shape), out)])
        return out

    def fill(self, parts: Iterable[tuple[str, Box | None, np.ndarray | None]]) -> None:
        """Read boxes of arrays into memory, all at once; without a box, see that the array is there with its shape.

        Raises ValueError naming an array that is damaged.
        """
        self.check()
        try:
            opened = [(name, box, into, self._open(name)) for name, box, into in parts]
            reads = []
            for name, box, into, future in opened:
                store = fetched(future, name, self.folder)
                shape, dtype = self.arrays[name]
                if store.shape != shape or store.dtype.numpy_dtype != dtype:
                    raise Damaged(f"{name} is {store.dtype.name}{list(store.shape)}, not {dtype.name}{list(shape)}")
                if box is None or into is None:
                    continue
                source = store[tuple(slice(*bounds) for bounds in box)]
                if source.dtype.numpy_dtype != into.dtype:
                    source = ts.cast(source, into.dtype)
                origin = source.translate_to[(0,) * source.rank] if source.rank else source
                reads.append((name, ts.array(into).write(origin)))
            for name, future in reads:
                fetched(future, name, self.folder)
        except Damaged as error:
            raise damaged(self.folder, error) from error

    def _open(self, name: str) -> Any:
        keys = self.about.path(name)
        if self.is_foreign:
            return self._files[""].open(keys)
        item = EXTRA if keys[0] == EXTRA else STATE
        return self._files[item].open(keys[1:] if item == EXTRA else keys)

    def check(self) -> None:
        """Raise Damaged where a file is missing, or another than the one that was written; they are read once."""
        if not self._is_checked:
            try:
                check_files(self.about, self.folder)
            except Damaged as error:
                raise damaged(self.folder, error) from error
            self._is_checked = True

    def verify(self) -> None:
        """Read everything. Raises ValueError naming the first arrays or files that are not what was written."""
        self.check()
        wrong: list[str] = []
        for name, (shape, dtype) in self.arrays.items():
            try:
                self.fill([(name, None, None)])
                for box in slabs(shape, dtype.itemsize):
                    self.fill([(name, box, np.empty([stop - start for start, stop in box], dtype))])
            except Damaged as error:
                wrong.append(str(error.__cause__ or error))
        if not wrong and "step" in self.arrays and not self.is_foreign and int(self.read("step")) != self.step:
            wrong.append(f"step is {int(self.read('step'))}, and about says {self.step}")
        if wrong:
            raise damaged(self.folder, Damaged(few(wrong)))


def damaged(folder: Place, error: Damaged) -> Damaged:
    """Return the error with the folder, and what to do."""
    others = sorted((number for number in numbers(folder.parent) if str(number) != folder.name), reverse=True)
    again = f"remove that folder to go on from step {others[0]}" if others else "start a new run"
    if others:
        again += ', or resume with "latest-good"'
    return Damaged(f"{folder} is damaged: {error}; {again}")


def numbers(folder: Place) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, in order."""
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if path.name.isdecimal() and str(int(path.name)) == path.name]
    is_complete = lambda path: (path / COMPLETE).is_file() if is_bucket(path) else path.is_dir()
    return sorted(int(path.name) for path in named if is_complete(path))


def latest_good(folder: Place) -> tuple[int | None, list[str]]:
    """Return the step of the newest checkpoint in a folder that is what was written, None without any, and what is
    wrong with each newer one.
    """
    wrong: list[str] = []
    for number in reversed(numbers(folder)):
        try:
            saved = Checkpoint(folder / str(number))
            if saved.is_foreign:
                raise damaged(saved.folder, Damaged("it has no item `about`"))
            saved.verify()
        except Damaged as error:
            wrong.append(str(error))
        else:
            return number, wrong
    return None, wrong


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


# -- checkpoints of other programs -------------------------------------------------------------------------------------


def _foreign_tree(folder: Place) -> Place | None:
    """Return the folder of a tree that Orbax has written, in a checkpoint of another program."""
    places = (folder, *(folder / item for item in _ITEMS))
    return next((place for place in places if (place / _METADATA).is_file()), None)


def _files_of_foreign(tree: Place) -> TreeFiles:
    try:
        metadata = json.loads((tree / _METADATA).read_bytes())
        driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
        has_zeros = bool(metadata.get("store_array_data_equal_to_fill_value"))
    except (ValueError, AttributeError) as error:
        raise Damaged(f"{_METADATA} is not what Orbax writes ({error})") from error
    return TreeFiles(tree, (tree / DATABASE).is_file(), driver, has_zeros)


def _foreign_about(tree: Place) -> About:
    """Describe a tree of another program: its arrays below `params` are the parameters."""
    if str(tree).startswith("s3://"):
        raise ValueError(
            f"{tree} was written by another program, whose checkpoints are read from disk or gs://; copy it"
        )
    try:
        found = ocp.PyTreeCheckpointHandler().metadata(orbax_path(tree))
    except Exception as error:  # Orbax raises what its parts raise
        raise Damaged(f"Orbax cannot read it: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    tree_of = getattr(found, "tree", found)
    arrays, paths = {}, {}
    for keys, leaf in _leaves(tree_of):
        if getattr(leaf, "shape", None) is None or getattr(leaf, "dtype", None) is None:
            continue  # text, and nodes without a value
        if jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool:
            name = keys[:-1] if len(keys) > 1 and keys[-1] == _ATTRIBUTE else keys
            paths[name] = keys
            arrays[name] = tuple(leaf.shape), np.dtype(leaf.dtype)
    roots = {name[: name.index("params") + 1] for name in paths if "params" in name[:-1]}
    least = min(map(len, roots), default=0)
    root = next(iter(roots)) if len(roots := {root for root in roots if len(root) == least}) == 1 else ()
    while root and all(name[len(root)] == "params" for name in paths if name[: len(root)] == root):
        root = (*root, "params")  # of Linen's variables in a state
    named = lambda name: name_of(("params", *name[len(root) :]) if name[: len(root)] == root else ("other", *name))
    return About(
        step=int(tree.name) if tree.name.isdecimal() else 0,
        hosts=1,
        strategy="another program",
        arrays={named(name): array for name, array in arrays.items()},
        paths={named(name): keys for name, keys in paths.items()},
    )


def _leaves(node: Any, keys: Keys = ()) -> Iterable[tuple[Keys, Any]]:
    inside = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list | tuple) else None
    if inside is None:
        yield keys, node
        return
    for key, child in inside:
        yield from _leaves(child, (*keys, str(key)))


def save_tree(folder: Place, tree: Any) -> None:
    """Write this process's part of a tree of `SavedArray` into a folder, which is made if need be."""
    folder.mkdir(exist_ok=True)  # also where a file system does not show at once what process 0 has made
    size = sum(array.nbytes for array in jax.tree.leaves(tree))
    save = lambda: handler(folder).save(orbax_path(folder), args=ocp.args.PyTreeSave(tree))
    answered(folder, save, ANSWER_SECONDS + size / _SLOWEST)


def finish(folder: Place, items: Sequence[str], about: About) -> None:
    """On process 0, once all have written: merge the processes' parts, and write what the checkpoint says of itself."""
    for item in items if not str(folder).startswith("s3://") else ():
        handler(folder).finalize(orbax_path(folder / item))
    about = dataclasses.replace(about, files=files_of(folder))
    (folder / "about").mkdir(exist_ok=True)
    ocp.JsonCheckpointHandler().save(orbax_path(folder / "about"), args=ocp.args.JsonSave(about.json()))
