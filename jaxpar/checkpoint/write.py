"""What is saved: the boxes of a state that this host holds, copied from its devices; and how Orbax has them written."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as orbax
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from .arrays import Array, raw
from .boxes import Box, box_of, parts
from .files import ABOUT, read_json, write_arrays, write_json

Boxes = list[tuple[str, Box, np.ndarray]]


Room = dict[tuple[str, int], np.ndarray]  # by array and device


def held(arrays: Sequence[Array], state: Any, room: Room) -> Boxes:
    """The boxes of the model's own leaves that this host saves: of every box one replica, copied to its memory.

    Waits for the devices and for the copy. What is derived is left out. Where the devices are CPUs, `room` is what the
    save before was copied into, whose boxes are written: memory that a process touches for the first time took a
    virtual machine ten times as long as the copy.
    """
    shards = []
    for array, x in zip(arrays, jax.tree.leaves(state), strict=True):
        if not array.derived:
            shards += [(array, shard) for shard in raw(x).addressable_shards if shard.replica_id == 0]
    for _, shard in shards:
        shard.data.copy_to_host_async()  # all at once, before any is waited for
    boxes: Boxes = []
    for array, shard in shards:
        host = np.asarray(shard.data)
        if shard.device.platform == "cpu":  # a view of memory that the next step may write into
            place = array.path, shard.device.id
            if place not in room:
                room[place] = np.empty_like(host)
            np.copyto(room[place], host)
            host = room[place]
        for part in parts(array.leaf, array.inner, box_of(shard.index, array.shape)):
            view = part.view(host)
            if view.size or not np.prod(array.logical):
                boxes.append((array.names[part.member], part.box, view))
    return boxes


class Handler(orbax.AsyncCheckpointHandler):
    """Writes the files of a checkpoint into the folder that Orbax gives it, in a thread, and renames when all have."""

    async def async_save(self, directory: Any, args: Save) -> list[Any]:
        """What is to be waited for until all is written."""
        return [CommitFutureAwaitingContractedSignals(_write(Path(directory), args), name="jaxpar")]

    def save(self, directory: Any, args: Save) -> None:
        """The same, waited for."""
        asyncio.run(_write(Path(directory), args))

    def restore(self, directory: Any, args: Any = None) -> Any:
        """What a checkpoint says of itself; `Checkpoint` and `restored` read the arrays, without Orbax."""
        return read_json(Path(directory) / ABOUT)


@orbax.args.register_with_handler(Handler, for_save=True, for_restore=True)
@dataclasses.dataclass
class Save(orbax.args.CheckpointArgs):
    """What `Handler` is to write: `about.json` and this host's boxes, which are forgotten as they are written."""

    about: dict[str, Any]
    boxes: Boxes


async def _write(folder: Path, args: Save) -> None:
    def drained() -> Iterator[tuple[str, Box, np.ndarray]]:
        while args.boxes:
            yield args.boxes.pop()

    write_arrays(folder, jax.process_index(), drained())
    if jax.process_index() == 0:
        write_json(folder / ABOUT, args.about)


@contextlib.contextmanager
def saying(folder: Path) -> Iterator[None]:
    """Within it, what Orbax raises of a checkpoint that it could not write is a ValueError with what to do."""
    try:
        yield
    except Exception as error:  # its own are bare `Exception`s, of whatever its threads met
        seen: list[BaseException] = [error]
        while (cause := seen[-1].__cause__ or seen[-1].__context__) is not None and cause not in seen:
            seen.append(cause)
        system = next((e for e in seen if isinstance(e, OSError) and e.strerror), None)
        why, then = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", "see what it says"
        if system is not None:
            why, then = str(system.strerror), "make room, or see that the folder is there and may be written to"
        raise ValueError(
            f"a checkpoint could not be written to {folder}: {why}; {then}. Older ones are as they were"
        ) from error
