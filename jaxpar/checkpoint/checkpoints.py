"""The checkpoints of a run: saved in the background, the last few kept, restored into any layout.

A checkpoint is an Orbax step folder, named by its step, with the items `state`, `about` and, where there are more
trees, `extra`. An older one is removed only after a newer one is complete.
"""

from __future__ import annotations

import collections
import functools
import json
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from ..backend.buckets import Place, rename
from ..backend.files import place
from ..layout.boxes import Box, box_of, parts
from ..layout.state import State
from ..step.core import Step
from .about import About, DamagedError, check_same_run, numbers, resolved_strategy
from .arrays import (
    EXTRA,
    Array,
    Keys,
    SavedArray,
    arrays_of,
    extra_arrays,
    flatten,
    keys_of,
    logical_tree,
    name_of,
    raw,
)
from .commit import clear, wait, writer
from .restore import restored, together
from .saved import STATE, Checkpoint

_Boxes = dict[str, list[tuple[Box, np.ndarray]]]  # of the model's own leaves, by name
Room = dict[tuple[str, int], np.ndarray]  # by array and device
# For each step, the memory into which its last save was copied (`held`).
_rooms: weakref.WeakKeyDictionary[Step, Room] = weakref.WeakKeyDictionary()


class Checkpoints:
    """The checkpoints of one run, in a folder. A context manager: leaving it waits for what is being written.

    Args:
      folder: made if need be, or an address in s3:// or gs://. With several hosts it must be one that all of them see.
      step: whose states they are.
      about: what else makes the run what it is (seed, sizes, ...), as JSON; another run is not resumed.
      keep: how many are kept, the last ones; all if None.
      changed: names of `about` that a checkpoint may have with other values; `notes` then says which.
      beside: called by the thread that saves, before a checkpoint is complete: what else is to be there by then.
    """

    def __init__(
        self,
        folder: Place | str,
        step: Step,
        about: Mapping[str, Any],
        keep: int | None = 2,
        changed: Collection[str] = (),
        beside: Callable[[], object] | None = None,
    ):
        self.step, self.folder, self._keep, self._changed = step, place(folder, "folder").absolute(), keep, changed
        self._beside = beside
        self.about = json.loads(json.dumps(dict(about)))  # as it is read back: lists for tuples
        self.folder.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            clear(self.folder)
        self._writing: tuple[int, Future[None]] | None = None
        self._own: set[int] = set()  # what was saved or restored here
        self._room: Room = {}  # while it is lent to a save
        self.data: dict[str, Any] = {}
        self.notes: list[str] = []

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def wait(self) -> None:
        """Wait until what is being written is complete. Raises ValueError, on all hosts, where one could not write."""
        if self._writing is not None:
            (number, save), self._writing = self._writing, None
            wait(save)
            self._own.add(number)
            _rooms[self.step], self._room = self._room, {}

    @functools.cached_property
    def _arrays(self) -> list[Array]:
        return arrays_of(self.step)[0]

    @property
    def latest(self) -> int | None:
        """Return the step of the last complete checkpoint, None without any."""
        return next(reversed(numbers(self.folder)), None)

    def save(
        self,
        number: int,
        state: State,
        data: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the state after step `number` in the background, as `TrainStep.save` says.

        Waits until all is written where some of the state is in the host's memory (`offload`), which has no room for it
        twice. Raises ValueError where the save before failed, where the number is not the state's, and where the folder
        has a checkpoint of that number which was neither saved nor restored here.
        """
        from .write import finish, save_items

        self.wait()
        if number in self._own:
            return
        if number in numbers(self.folder):
            raise ValueError(
                f"{self.folder}/{number} is there already, of another run; name another folder, or remove that one"
            )
        self._room = _rooms.pop(self.step, {})
        more, values = extra_arrays(self.step, extra or {})
        arrays = [*self._arrays, *more]
        saved, items, paths = planned(self.step, arrays, extra)
        boxes = held(arrays, (state, values), self._room)
        if (here := int(np.asarray(state.step))) != number:
            raise ValueError(f"this is the state after step {here}, to be saved as that after step {number}")
        for name, array in saved.items():
            array.boxes = boxes.get(name, [])  # type: ignore[assignment]  # arrays, where functions may be too
        shapes = {name: (array.shape, array.dtype) for name, array in saved.items()}
        kinds = {name: array.key_impl for array in arrays for name in array.names if array.key_impl is not None}
        strategy, hosts = str(resolved_strategy(self.step)), jax.process_count()
        about = About(number, hosts, strategy, shapes, paths, kinds, self.about, dict(data or {}))

        def write(folder: Place) -> None:
            save_items(folder, items)
            if self._beside is not None:
                self._beside()

        complete = lambda folder: finish(folder, items, about)
        self._writing = number, writer().begin(self.folder, number, self._keep, write, complete)
        if any(self.step.layout.host_bytes.values()):
            self.wait()

    def restore(self, good: bool = False) -> State:
        """Return the last complete state, as `TrainStep.restore` does.

        Then `data` is what was given to `save`, and `notes` says what a user should know: checkpoints that were passed
        over, and another strategy than that of the checkpoint.

        Args:
          good: go on from the newest one that is what was written; damaged ones that are newer are renamed.

        Raises ValueError where there is none, where it is damaged, and where it belongs to another run.
        """
        self.notes = []
        if good:  # process 0 looks, and the others wait for it
            self.notes = together("set aside", list if jax.process_index() else self._set_aside)
        number = self.latest
        if number is None:
            raise ValueError(f"{self.folder} holds no complete checkpoint; start the run anew")
        saved = Checkpoint(self.folder / str(number))
        check_same_run(saved.run, self.about, saved.folder, self._changed)
        state = restored(self.step, saved)
        for name in self._changed:
            if (there := saved.run.get(name)) != (now := self.about.get(name)):
                self.notes.append(f"{saved.folder} was saved with {name} {there!r}, and goes on with {now!r}")
        if saved.strategy != (here := str(resolved_strategy(self.step))):
            self.notes.append(f"{saved.folder} was saved under {saved.strategy}, and goes on under {here}")
        self.data = saved.data
        self._own.add(number)
        return state

    def _set_aside(self) -> list[str]:
        """Rename what is newer than the newest checkpoint that is what was written; return what is wrong with each."""
        wrong: dict[int, str] = {}
        for number in reversed(numbers(self.folder)):
            try:
                if (saved := Checkpoint(self.folder / str(number))).is_foreign:
                    raise DamagedError(saved.folder, "it has no item `about`")
                saved.verify()
                break
            except DamagedError as error:
                wrong[number] = str(error)
        else:
            if wrong:
                raise ValueError(f"{self.folder} holds no checkpoint that is whole: {'; '.join(wrong.values())}")
        for number in wrong:
            aside = f"{number}.damaged"
            while (self.folder / aside).exists():
                aside += "-again"
            rename(self.folder / str(number), self.folder / aside)
        return [*wrong.values()]


def planned(
    step: Step, arrays: Sequence[Array], extra: Mapping[str, Any] | None
) -> tuple[dict[str, SavedArray], dict[str, Any], dict[str, Keys]]:
    """Return what is saved, still without values: the arrays by name, the tree of each item, and the key paths of
    arrays in these trees where they are not those of the names.

    Raises ValueError where Orbax, which joins the keys of a path by dots, would take two arrays for one.
    """
    saved = {
        name: SavedArray(array.logical, array.dtype, chunk, [])
        for array in arrays
        if not array.is_derived
        for name, chunk in zip(array.names, array.chunks, strict=True)
    }
    items = {STATE: logical_tree(step, saved)}
    if extra:
        leaves = [saved[name_of(keys)] for keys, _ in flatten(dict(extra), (EXTRA,))]
        items[EXTRA] = jax.tree.unflatten(jax.tree.structure(dict(extra)), leaves)
    names = {id(array): name for name, array in saved.items()}
    flat = [*flatten(items[STATE]), *flatten(items.get(EXTRA, {}), (EXTRA,))]
    paths = {names[id(array)]: keys for keys, array in flat}
    joined = collections.Counter(".".join(keys) for keys in paths.values())
    if same := [name for name, keys in paths.items() if joined[".".join(keys)] > 1]:
        raise ValueError(
            f"{same[0]} and {same[1]} cannot be saved together: Orbax joins the keys of a path by dots, and so names "
            f"both {'.'.join(paths[same[0]])!r}; rename one of the two, without a dot in its keys"
        )
    return saved, items, {name: keys for name, keys in paths.items() if keys != keys_of(name)}


def held(arrays: Sequence[Array], state: Any, room: Room) -> _Boxes:
    """Return the boxes of the model's own leaves that this host saves, by name: of every box one replica, copied to
    this host's memory; views of what waits there already (`offload`).

    Waits for the devices and for the copy. Where devices are the host itself, values are copied into `room`, the memory
    of the save before: memory that a process touches for the first time took a virtual machine ten times as long as the
    copy.
    """
    shards = []
    for array, x in zip(arrays, jax.tree.leaves(state), strict=True):
        if not array.is_derived:
            shards += [(array, shard) for shard in raw(x).addressable_shards if shard.replica_id == 0]
    for _, shard in shards:
        shard.data.copy_to_host_async()  # all at once, before any is waited for
    boxes: _Boxes = {}
    for array, shard in shards:
        host = np.asarray(shard.data)
        if shard.device.platform == "cpu" and shard.data.sharding.memory_kind != "pinned_host":
            # A view of memory that the next step may write into.
            where = array.names[0], shard.device.id
            if where not in room:
                room[where] = np.empty_like(host)
            np.copyto(room[where], host)
            host = room[where]
        for part in parts(array.leaf, array.inner, box_of(shard.index, array.shape)):
            view = part.view(host)
            if view.size or not np.prod(array.logical):
                boxes.setdefault(array.names[part.member], []).append((part.box, view))
    return boxes
