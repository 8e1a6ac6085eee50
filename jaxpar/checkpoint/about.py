"""The item `about` of a checkpoint: a JSON file about its arrays, its run, the position in its data, and its files.

`About` is the content of that file. Anybody may have written it, so `About.read` checks every value before it is used.
The functions below answer three questions. Are the files as they were written (`check_files`)? Does the checkpoint
belong to this run (`check_same_run`)? Does it have the arrays that a step needs (`check_fits`)?
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import zlib
from collections.abc import Collection, Iterator, Mapping
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

VERSION = 3  # version of the format; version 2 was a format without Orbax
ABOUT = "about/metadata"  # as Orbax's JsonCheckpointHandler names it
TREE = "_METADATA"  # the file in which Orbax describes a tree
COMPLETE = "commit_success.txt"  # the file that Orbax writes last in a bucket
UNFINISHED = ".orbax-checkpoint-tmp"  # the suffix that Orbax gives to a folder that is not complete
_END = 1 << 16  # bytes at each end of a file of arrays that its checksum covers; its chunks have checksums too
HINT = "resume with the settings of that run, take its weights alone with weights_only=True, or start a new run"


def complete_steps(folder: Place) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, in order."""
    if not folder.is_dir():
        return []
    # `isdecimal` alone would accept 007, and digits of other scripts.
    numbered = [path for path in folder.iterdir() if path.name.isdecimal() and str(int(path.name)) == path.name]
    # On disk a folder gets its name once it is complete. A bucket cannot rename, so a last file marks the end there.
    is_complete = lambda path: (path / COMPLETE).is_file() if is_bucket(path) else path.is_dir()
    return sorted(int(path.name) for path in numbered if is_complete(path))


class DamagedError(ValueError):
    """Error about a part of a checkpoint that is missing, incomplete, or not what was written (`problem`)."""

    def __init__(self, folder: Place, problem: str):
        self.problem, steps = problem, [step for step in complete_steps(folder.parent) if str(step) != folder.name]
        advice = f'remove that folder to go on from step {steps[-1]}, or resume with "latest-good"' if steps else ""
        super().__init__(f"{folder} is damaged: {problem}; {advice or 'start a new run'}")


class NoCheckpointError(FileNotFoundError, ValueError):
    """Error about a folder without a complete checkpoint.

    It is a ValueError, as all errors about checkpoints. As a FileNotFoundError, a loop can tell it from a damaged
    checkpoint, and start anew only where there is nothing to lose.
    """


@dataclass(frozen=True)
class About:
    """The description of a checkpoint. Its fields have the names of the JSON file.

    Attributes:
      step: steps taken.
      hosts: number of hosts that wrote it.
      strategy: strategy of the run that wrote it, for people to read; any other strategy can restore it.
      arrays: shape and dtype of each array by name (`arrays.name_of`).
      paths: key path of an array in Orbax's tree by name, for arrays whose path differs from their name.
      kinds: implementation of random keys by name, for arrays that hold such keys.
      run: what identifies the run, such as its seed and rows.
      data: position in the data, in the form that the data use.
      files: [size, checksum or tag] of every other file of the checkpoint by its path.
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
        """Return the content of the JSON file, with the CRC-32 of all other values."""
        arrays = {name: {"shape": list(shape), "dtype": dtype.name} for name, (shape, dtype) in self.arrays.items()}
        versions = {"version": VERSION, "jax": jax.__version__}
        # The checksum is of the values as `read` gets them.
        content = json.loads(json.dumps({**versions, **vars(self), "arrays": arrays}))  # tuples become lists
        return {**content, "crc32": _crc(content)}

    @classmethod
    def read(cls, folder: Place) -> About:
        """Read the description. Raises DamagedError if it is not what was written, ValueError for another format."""
        if (folder / "state" / "about.json").is_file():
            raise ValueError(
                f"{folder} was written by an earlier jaxpar, in another format. To go on from its weights, run "
                f"`jaxpar convert {folder} weights --weights-only` with that version, and give the parameters, which "
                "weights/*/state/arrays-00000.safetensors then holds by path, to step.init(key, params=...)"
            )
        with _damage(folder):
            content = json.loads((folder / ABOUT).read_bytes())
            # Check the sum before any value is used.
            if content.pop("crc32") != _crc(content):
                raise ValueError("its checksum differs")
            version = content.pop("version")
        # No damage: `resume="latest-good"` must not set such a checkpoint aside.
        if version != VERSION:
            raise ValueError(
                f"{folder} has version {str(version)[:20]} of jaxpar's format, and this jaxpar reads version "
                f"{VERSION}; use the jaxpar that wrote it"
            )
        with _damage(folder):
            del content["jax"]
            arrays, paths = content.pop("arrays"), content.pop("paths")
            arrays = {name: (tuple(x["shape"]), np.dtype(jnp.dtype(x["dtype"]))) for name, x in arrays.items()}
            # An unknown or missing field is a TypeError of the dataclass, and counts as damage.
            about = cls(arrays=arrays, paths={name: tuple(map(str, path)) for name, path in paths.items()}, **content)
            # The checksum proves nothing about who wrote the file: check the types of all values as well.
            sizes = [size for size, _ in about.files.values()]  # raises an error for values that are not pairs
            naturals = [about.step, about.hosts, *sizes, *(n for shape, _ in arrays.values() for n in shape)]
            texts, objects = [about.strategy, *about.kinds.values()], [about.run, about.data]
            # `type`, not `isinstance`: True is an int.
            are_valid = [type(n) is int and n >= 0 for n in naturals] + [isinstance(x, str) for x in texts]
            if not all([*are_valid, *(isinstance(x, dict) for x in objects)]):
                raise TypeError("a number, a text or an object has another type")
        return about


@contextlib.contextmanager
def _damage(folder: Place) -> Iterator[None]:
    """Raise DamagedError in place of what reading a damaged description raises."""
    try:
        yield
    except ConnectionError:  # a bucket that does not answer is not damaged
        raise
    except OSError as error:
        raise DamagedError(folder, f"{ABOUT} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise DamagedError(folder, f"{ABOUT} is not what was written ({reason})") from error


def _crc(content: Any) -> int:
    """Return the CRC-32 of JSON values, whatever the order of their keys."""
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def files_of(folder: Place) -> dict[str, Any]:
    """Return [size, checksum] for each file of a checkpoint but `about`, by its path.

    The checksum is a CRC-32 for a file on disk, and the tag of the object for a file in a bucket.
    """
    if is_bucket(folder):
        # A key begins with the bucket's name and the folder: cut them off.
        root = len(folder.path.rstrip("/")) + 1
        objects: Any = folder.fs.find(folder.path, detail=True)
        tag = lambda info: str(info.get("ETag") or info.get("md5Hash"))
        files = {key[root:]: [info["size"], tag(info)] for key, info in objects.items()}
    else:
        paths = [path for path in folder.rglob("*") if path.is_file()]
        files = {path.relative_to(folder).as_posix(): [path.stat().st_size, _checksum(path)] for path in paths}
    # Files at the top are marks that Orbax adds later, and `about` cannot hold its own checksum.
    return {name: files[name] for name in sorted(files) if "/" in name and name != ABOUT}


def _checksum(path: Path) -> int:
    """Return the CRC-32 of a file; for a file of arrays, whose chunks have checksums, only of its two ends."""
    size = path.stat().st_size
    end = _END if path.parent.name == "d" else size  # OCDBT keeps the chunks of arrays in folders named "d"
    with path.open("rb") as file:
        crc = zlib.crc32(file.read(end))
        # `max`, so that a file shorter than both ends counts its bytes once.
        file.seek(max(end, size - end))
        return zlib.crc32(file.read(), crc)


def check_files(about: About, folder: Place) -> None:
    """Raise DamagedError with its name if a file of a checkpoint is missing or is not what was written."""
    present_files = files_of(folder)
    for name, (size, tag) in about.files.items():
        if name not in present_files:
            raise DamagedError(folder, f"{name} is missing")
        present_size, present_tag = present_files[name]
        if present_size != size:
            raise DamagedError(folder, f"{name} has {present_size} bytes, and was written with {size}")
        # A checkpoint that was copied from a bucket to a disk has checksums now instead of tags.
        if type(tag) is type(present_tag) and tag != present_tag:
            raise DamagedError(folder, f"{name} is not what was written")


def resolved_strategy(step: Step) -> Strategy:
    """Return the strategy of a step with the actual sizes of its axes instead of -1 or "hosts"."""
    sizes = {axis: step.mesh.shape[axis] for axis in ROWS}
    # A strategy of one device has no axes to give sizes to.
    return step.strategy if step.strategy.single else dataclasses.replace(step.strategy, **sizes)


def check_same_run(
    saved: Mapping[str, Any], current: Mapping[str, Any], folder: Place, changed: Collection[str]
) -> None:
    """Raise ValueError unless what identifies the run of the checkpoint in `folder` also identifies the current run.

    Values whose names are in `changed` may differ.
    """
    names = [name for name in {**saved, **current} if name not in changed]
    if differing := [name for name in names if saved.get(name) != current.get(name)]:
        listed = ", ".join(f"{name} {saved.get(name)!r} there and {current.get(name)!r} here" for name in differing)
        hint = ", with changed_data to go on with other data" if "data" in differing else ""
        raise ValueError(
            f"{folder} is of another run: {listed}; resume with the values there{hint}, or start a new run"
        )


def check_fits(
    saved: About,
    needed: Mapping[str, Array],
    folder: Place,
    optional: Collection[str],
    hint: str = HINT,
    casts: bool = False,
) -> None:
    """Raise ValueError with the first difference unless a checkpoint has exactly the arrays that a step needs.

    Args:
      saved: the description of the checkpoint.
      needed: the arrays that the step needs, by their names in the checkpoint.
      folder: the checkpoint, for the error.
      optional: names that the checkpoint may have in addition.
      hint: advice for the user.
      casts: whether any dtype will do. Otherwise only frozen parameters may have another float dtype, since they are
        stored in the dtype that the loss uses.
    """
    of_another = f"{folder} is of another model or optimizer"
    # 1. Every needed array exists, with the same shape, dtype and implementation of random keys.
    for name, array in needed.items():
        if name not in saved.arrays:
            raise ValueError(f"{of_another}: it lacks {name}{did_you_mean(name, saved.arrays)}; {hint}")
        saved_form = (*saved.arrays[name], saved.kinds.get(name))
        needed_form = (array.logical, array.dtype, array.key_impl)
        has_same_shape = needed_form[0] == saved_form[0]
        are_floats = all(jnp.issubdtype(dtype, jnp.floating) for _, dtype, _ in (saved_form, needed_form))
        if needed_form != saved_form and not (has_same_shape and (casts or (array.is_frozen and are_floats))):
            texts = [f"{key_impl or dtype.name}{list(shape)}" for shape, dtype, key_impl in (saved_form, needed_form)]
            cast_note = "nothing is cast in silence: " if has_same_shape else ""
            difference = f"{name} is {texts[0]} there and {texts[1]} here"
            raise ValueError(f"{folder} is of another model, optimizer or precision: {difference}; {cast_note}{hint}")
    # 2. There is no other array, which would belong to another model or optimizer.
    if extra_names := [name for name in saved.arrays if name not in needed and name not in optional]:
        suggestion = did_you_mean(extra_names[0], needed)
        raise ValueError(f"{of_another}: it has {extra_names[0]}, which the step lacks{suggestion}; {hint}")
