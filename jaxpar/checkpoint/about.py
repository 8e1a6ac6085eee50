"""The item `about` of a checkpoint: a description of its arrays, its run, the position in the data, and its files."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..backend.buckets import Place, is_bucket
from ..backend.text import did_you_mean
from ..step.core import Step
from ..strategy import Strategy
from ..strategy.axes import ROWS
from .arrays import Array, keys_of

VERSION = 3  # of the form; version 2 was jaxpar's own, without Orbax
ABOUT = "about/metadata"  # as Orbax's JsonCheckpointHandler names it
TREE = "_METADATA"  # the file in which Orbax describes a tree
COMPLETE = "commit_success.txt"  # the file that Orbax writes last in a bucket
UNFINISHED = ".orbax-checkpoint-tmp"  # what Orbax puts behind the name of a folder that is not complete
_END = 1 << 16  # bytes at the two ends of a file of arrays that are summed; its chunks have checksums of their own
HINT = "resume with what it was trained with, take its weights alone with weights_only=True, or start a new run"


def numbers(folder: Place) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, in order."""
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if path.name.isdecimal() and str(int(path.name)) == path.name]
    is_complete = lambda path: (path / COMPLETE).is_file() if is_bucket(path) else path.is_dir()
    return sorted(int(path.name) for path in named if is_complete(path))


class Damaged(ValueError):
    """A part of a checkpoint is missing, incomplete, or not what was written; `what` says which."""

    def __init__(self, folder: Place, what: str):
        self.what, others = what, [number for number in numbers(folder.parent) if str(number) != folder.name]
        advice = f'remove that folder to go on from step {others[-1]}, or resume with "latest-good"' if others else ""
        super().__init__(f"{folder} is damaged: {what}; {advice or 'start a new run'}")


@dataclass(frozen=True)
class About:
    """The description of a checkpoint.

    Attributes:
      step: steps taken.
      hosts: how many wrote it.
      strategy: of the run that wrote it, for people; any other strategy reads it.
      arrays: shape and dtype by name (`arrays.name_of`).
      paths: the key path in Orbax's tree by name, where it is not that of the name.
      kinds: the implementation of random keys, by name.
      run: what identifies the run, such as seed and rows.
      data: the position in the data, as the data say it.
      files: size, and checksum or tag, of every other file of the checkpoint, by its path.
    """

    step: int
    hosts: int
    strategy: str
    arrays: dict[str, tuple[tuple[int, ...], np.dtype]]
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)

    def path(self, name: str) -> tuple[str, ...]:
        """Return the key path of an array in Orbax's tree."""
        return self.paths.get(name, keys_of(name))

    def json(self) -> dict[str, Any]:
        """Return the content of the file, with the CRC-32 of the rest."""
        arrays = {name: {"shape": list(shape), "dtype": dtype.name} for name, (shape, dtype) in self.arrays.items()}
        versions = {"version": VERSION, "jax": jax.__version__}
        content = json.loads(json.dumps({**versions, **vars(self), "arrays": arrays}))  # lists for tuples
        return {**content, "crc32": _crc(content)}

    @classmethod
    def read(cls, folder: Place) -> About:
        """Read the description of a checkpoint. Raises Damaged where it is not what was written, and ValueError where
        the checkpoint has the form of an earlier version.
        """
        if (folder / "state" / "about.json").is_file():
            raise ValueError(
                f"{folder} was written by an earlier jaxpar, in a form of its own. To go on from its weights, run "
                f"`jaxpar convert {folder} weights --weights-only` with that version, and give the parameters, which "
                "weights/*/state/arrays-00000.safetensors then holds by path, to step.init(key, params=...)"
            )
        try:
            content = json.loads((folder / ABOUT).read_bytes())
            if content.pop("crc32") != _crc(content):
                raise ValueError("its checksum is another")
            if (version := content.pop("version")) != VERSION:
                reads = f"this jaxpar reads {VERSION}; use the version of jaxpar that wrote it"
                raise Damaged(folder, f"{ABOUT} was written in form {str(version)[:20]}, {reads}")
            del content["jax"]
            arrays, paths = content.pop("arrays"), content.pop("paths")
            arrays = {name: (tuple(x["shape"]), np.dtype(jnp.dtype(x["dtype"]))) for name, x in arrays.items()}
            about = cls(arrays=arrays, paths={name: tuple(map(str, path)) for name, path in paths.items()}, **content)
            sizes = [size for size, _ in about.files.values()]  # fails where they are no pairs
            naturals = [about.step, about.hosts, *sizes, *(n for shape, _ in arrays.values() for n in shape)]
            texts, objects = [about.strategy, *about.kinds.values()], [about.run, about.data]
            are_right = [type(n) is int and n >= 0 for n in naturals] + [isinstance(x, str) for x in texts]
            if not all([*are_right, *(isinstance(x, dict) for x in objects)]):
                raise TypeError("a number, a text or an object is of another type")
            return about
        except (ConnectionError, Damaged):  # a bucket that does not answer is not damaged
            raise
        except OSError as error:
            raise Damaged(folder, f"{ABOUT} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
            raise Damaged(folder, f"{ABOUT} is not what was written ({reason})") from error


def _crc(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def files_of(folder: Place) -> dict[str, Any]:
    """Return, for each file of a checkpoint but `about`, its size and what tells it from another of that size: on disk
    a CRC-32, in a bucket the tag that the bucket gives it.
    """
    if is_bucket(folder):
        root = len(folder.path.rstrip("/")) + 1
        objects: Any = folder.fs.find(folder.path, detail=True)
        tag = lambda info: str(info.get("ETag") or info.get("md5Hash"))
        found = {key[root:]: [info["size"], tag(info)] for key, info in objects.items()}
    else:
        files = [path for path in folder.rglob("*") if path.is_file()]
        found = {path.relative_to(folder).as_posix(): [path.stat().st_size, _checksum(path)] for path in files}
    return {name: found[name] for name in sorted(found) if "/" in name and name != ABOUT}


def _checksum(path: Path) -> int:
    """Return the CRC-32 of a file; of a file of arrays, whose chunks have their own, that of its two ends."""
    size = path.stat().st_size
    end = _END if path.parent.name == "d" else size
    with path.open("rb") as file:
        crc = zlib.crc32(file.read(end))
        file.seek(max(end, size - end))
        return zlib.crc32(file.read(), crc)


def check_files(about: About, folder: Place) -> None:
    """Raise Damaged, naming them, where files of a checkpoint are missing or others than those that were written."""
    there = files_of(folder)
    for name, (size, tag) in about.files.items():
        if name not in there:
            raise Damaged(folder, f"{name} is missing")
        size_here, tag_here = there[name]
        if size_here != size:
            raise Damaged(folder, f"{name} has {size_here} bytes, and was written with {size}")
        if type(tag) is type(tag_here) and tag != tag_here:  # a copy of a bucket on disk has no tags
            raise Damaged(folder, f"{name} is not what was written")


def exact(step: Step) -> Strategy:
    """Return the strategy of a step with the sizes that its axes have, where it says -1 or "hosts"."""
    sizes = {axis: step.mesh.shape[axis] for axis in ROWS}
    return step.strategy if step.strategy.single else dataclasses.replace(step.strategy, **sizes)


def same_run(saved: Mapping[str, Any], here: Mapping[str, Any], where: Place, changed: Collection[str] = ()) -> None:
    """Raise ValueError unless both describe one run, but for what may have `changed`, naming what differs."""
    names = [name for name in {**saved, **here} if name not in changed]
    if differing := [name for name in names if saved.get(name) != here.get(name)]:
        listed = ", ".join(f"{name} {saved.get(name)!r} there and {here.get(name)!r} here" for name in differing)
        hint = ", with changed_data to go on with other data" if "data" in differing else ""
        raise ValueError(f"{where} is of another run: {listed}; resume with the values there{hint}, or start a new run")


def fits(
    saved: About,
    wanted: Mapping[str, Array],
    where: Place,
    more: Collection[str],
    hint: str = HINT,
    casts: bool = False,
) -> None:
    """Raise ValueError unless a checkpoint has the arrays `wanted` by name, and no others but `more`, naming the first
    that differs.

    Args:
      hint: advice for the user.
      casts: whether any dtype will do. Otherwise that of frozen parameters alone may be another float, since they are
        stored as the loss sees them.
    """
    of_another = f"{where} is of another model or optimizer"
    for name, array in wanted.items():
        if name not in saved.arrays:
            raise ValueError(f"{of_another}: {name} is here and not there{did_you_mean(name, saved.arrays)}; {hint}")
        there, here = (*saved.arrays[name], saved.kinds.get(name)), (array.logical, array.dtype, array.kind)
        are_floats = all(jnp.issubdtype(dtype, jnp.floating) for _, dtype, _ in (there, here))
        if here != there and not (here[0] == there[0] and (casts or (array.is_frozen and are_floats))):
            texts = [f"{kind or dtype.name}{list(shape)}" for shape, dtype, kind in (there, here)]
            same = "nothing is cast in silence: " if here[0] == there[0] else ""
            says = f"{name} is {texts[0]} there and {texts[1]} here"
            raise ValueError(f"{where} is of another model, optimizer or precision: {says}; {same}{hint}")
    if others := [name for name in saved.arrays if name not in wanted and name not in more]:
        near = did_you_mean(others[0], wanted)
        raise ValueError(f"{of_another}: {others[0]} is there and not here{near}; {hint}")
