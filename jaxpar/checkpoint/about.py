"""What a checkpoint says of itself, in its item `about`: its arrays, the run, the position in the data, its files."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..axes import ROWS
from ..buckets import Place, below, is_bucket
from ..step.core import Step
from ..strategy import Strategy
from ..text import did_you_mean
from .arrays import Array, keys_of
from .stores import Damaged

VERSION = 3  # of the form; version 2 was jaxpar's own, without Orbax
ABOUT = "about/metadata"  # as Orbax's JsonCheckpointHandler names it
_END = 1 << 16  # bytes at the two ends of a file of arrays that are summed; its chunks have checksums of their own


@dataclass(frozen=True)
class About:
    """What a checkpoint says of itself.

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
        """Return what is written, with the CRC-32 of the rest."""
        arrays = {name: {"shape": list(shape), "dtype": dtype.name} for name, (shape, dtype) in self.arrays.items()}
        versions = {"version": VERSION, "jax": jax.__version__}
        content = json.loads(json.dumps({**versions, **vars(self), "arrays": arrays}))  # lists for tuples
        return {**content, "crc32": _crc(content)}

    @classmethod
    def read(cls, folder: Place) -> About:
        """Read what a checkpoint says of itself. Raises Damaged where it is not what was written, and ValueError where
        the form is another.
        """
        if (folder / "state" / "about.json").is_file():
            raise ValueError(
                f"{folder} was written by an earlier jaxpar, in a form of its own. To go on from its weights, run "
                f"`jaxpar convert {folder} weights --weights-only` with that version: the file "
                "weights/*/state/arrays-00000.safetensors then holds each parameter by its path, for "
                "step.init(key, params=...)"
            )
        try:
            content = json.loads((folder / ABOUT).read_bytes())
            if content.pop("crc32") != _crc(content):
                raise Damaged(f"{ABOUT} is not what was written: its checksum is another")
            if (version := content.pop("version")) != VERSION:
                reads = f"this jaxpar reads {VERSION}; use the version of jaxpar that wrote it"
                raise Damaged(f"{ABOUT} was written in form {str(version)[:20]}, {reads}")
            arrays = {
                name: (tuple(entry["shape"]), np.dtype(jnp.dtype(entry["dtype"])))
                for name, entry in content.pop("arrays").items()
            }
            paths = {name: tuple(map(str, path)) for name, path in content.pop("paths").items()}
            del content["jax"]
            about = cls(arrays=arrays, paths=paths, **content)
            sizes = [size for size, _ in about.files.values()]  # fails where they are no pairs
            texts = [about.strategy, *about.kinds.values()]
            numbers = [about.step, about.hosts, *sizes, *(n for shape, _ in arrays.values() for n in shape)]
            if not all(type(n) is int and n >= 0 for n in numbers) or not all(isinstance(x, str) for x in texts):
                raise TypeError("a number or a text is of another type")
            if not isinstance(about.run, dict) or not isinstance(about.data, dict):
                raise TypeError("run and data are no objects")
            return about
        except ConnectionError:  # a bucket that does not answer is not damaged
            raise
        except OSError as error:
            raise Damaged(f"{ABOUT} cannot be read: {error.strerror}") from error
        except Damaged:
            raise
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
            raise Damaged(f"{ABOUT} is not what was written ({reason})") from error


def _crc(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def about_of(
    step: Step, arrays: Sequence[Array], number: int, run: Mapping[str, Any], data: Mapping[str, Any]
) -> About:
    """Return what a checkpoint of these arrays says of itself; `paths` and `files` are still missing."""
    saved = [(name, array) for array in arrays if not array.derived for name in array.names]
    shapes = {name: (array.logical, array.dtype) for name, array in saved}
    kinds = {name: array.kind for name, array in saved if array.kind is not None}
    return About(number, jax.process_count(), str(exact(step)), shapes, {}, kinds, dict(run), dict(data))


def files_of(folder: Place) -> dict[str, Any]:
    """Return, for each file of a checkpoint but `about`, its size and what tells it from another of that size: on disk
    a CRC-32, of a file of arrays that of its two ends; in a bucket the tag that the bucket gives it.
    """
    if is_bucket(folder):
        root = len(folder.path.rstrip("/")) + 1
        objects: Any = folder.fs.find(folder.path, detail=True)
        tag = lambda info: [info["size"], str(info.get("ETag") or info.get("md5Hash"))]
        tags = {key[root:]: tag(info) for key, info in objects.items()}
        return {name: tag for name, tag in sorted(tags.items()) if "/" in name and name != ABOUT}
    found = {}
    for name, path in sorted(below(folder).items()):
        if isinstance(path, Path) and path.is_file() and len(name.parts) > 1 and name.as_posix() != ABOUT:
            found[name.as_posix()] = [path.stat().st_size, _ends(path)]
    return found


def _ends(path: Path) -> int:
    with path.open("rb") as file:
        if path.stat().st_size <= 2 * _END or path.parent.name != "d":
            return zlib.crc32(file.read())
        crc = zlib.crc32(file.read(_END))
        file.seek(-_END, 2)
        return zlib.crc32(file.read(), crc)


def check_files(about: About, folder: Place) -> None:
    """Raise Damaged, naming them, where files of a checkpoint are missing or others than those that were written."""
    there = files_of(folder)
    for name, (size, tag) in about.files.items():
        if name not in there:
            raise Damaged(f"{name} is missing")
        size_here, tag_here = there[name]
        if size_here != size:
            raise Damaged(f"{name} has {size_here} bytes, and was written with {size}")
        if type(tag) is type(tag_here) and tag != tag_here:  # a copy of a bucket on disk has no tags
            raise Damaged(f"{name} is not what was written")


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


def fits(saved: About, wanted: Mapping[str, Array], where: Place, more: Collection[str]) -> None:
    """Raise ValueError unless a checkpoint has the arrays `wanted` by name, and no others but `more`, naming the first
    that differs. No dtype is cast, but for frozen parameters, which are stored as the loss sees them.
    """
    hint = "resume with what it was trained with, take its weights alone with weights_only=True, or start a new run"
    for name, array in wanted.items():
        if name not in saved.arrays:
            near = did_you_mean(name, saved.arrays)
            raise ValueError(f"{where} is of another model or optimizer: {name} is here and not there{near}; {hint}")
        here, there = (array.logical, array.dtype), saved.arrays[name]
        floats = array.is_frozen and all(jnp.issubdtype(dtype, jnp.floating) for _, dtype in (here, there))
        if floats and here[0] == there[0]:
            continue
        if here != there or saved.kinds.get(name) != array.kind:
            texts = [f"{dtype.name}{list(shape)}" for shape, dtype in (there, here)]
            if saved.kinds.get(name) != array.kind:
                texts = [f"a key of {saved.kinds.get(name)}", f"one of {array.kind}"]
            if there[0] == here[0]:
                hint = f"nothing is cast in silence: {hint}"
            says = f"{name} is {texts[0]} there and {texts[1]} here"
            raise ValueError(f"{where} is of another model, optimizer or precision: {says}; {hint}")
    if others := [name for name in saved.arrays if name not in wanted and name not in more]:
        near = did_you_mean(others[0], wanted)
        raise ValueError(f"{where} is of another model or optimizer: {others[0]} is there and not here{near}; {hint}")
