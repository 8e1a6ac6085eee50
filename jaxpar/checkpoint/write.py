"""What is saved: the boxes of a state that this host holds, copied from its devices, and written to its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ..buckets import Place
from .arrays import Array, raw
from .boxes import Box, box_of, parts
from .files import write_arrays

Boxes = list[tuple[str, Box, np.ndarray]]


Room = dict[tuple[str, int], np.ndarray]  # by array and device


def held(arrays: Sequence[Array], state: Any, room: Room) -> Boxes:
    """The boxes of the model's own leaves that this host saves: of every box one replica, copied to its memory; of what
    waits there (`offload`), views.

    Waits for the devices and for the copy. What is derived is left out. Where devices are the host itself, `room` is
    what the save before was copied into, whose boxes are written: memory that a process touches for the first time took
    a virtual machine ten times as long as the copy.
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
        if shard.device.platform == "cpu" and shard.data.sharding.memory_kind != "pinned_host":
            # A view of memory that the next step may write into.
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


def write(folder: Place, boxes: Boxes) -> None:
    """Writes this host's files: `boxes`, which are forgotten as they are written."""

    def drained() -> Iterator[tuple[str, Box, np.ndarray]]:
        while boxes:
            yield boxes.pop()

    write_arrays(folder, jax.process_index(), drained())
