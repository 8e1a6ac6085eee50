"""The checkpoints of a run: saved in the background, and restored into any layout.

A checkpoint is an Orbax step folder, named by its step. It has the items `state` and `about`, and `extra` if other
trees are saved with the state. `Checkpoints.save` has three parts:

    plan_items      decides the name and path of every saved array
    copied_boxes    copies this host's part from the devices; after that the next step may run
    write           in a thread: Orbax writes the copies (`write.py`), and all hosts commit (`commit.py`)

The last `keep` checkpoints stay. An older one is removed only after a newer one is complete.
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
from .about import About, DamagedError, NoCheckpointError, check_same_run, complete_steps, resolved_strategy
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
from .commit import remove_unfinished, wait, writer
from .restore import restored, run_on_all_hosts
from .saved import STATE, Checkpoint

_Boxes = dict[str, list[tuple[Box, np.ndarray]]]  # boxes and values of the model leaves, by name
Buffers = dict[tuple[str, int], np.ndarray]  # host memory for the copy of an array's shard, by array and device
# The buffers of each step's last save, which the next save uses again (see `copied_boxes`).
_buffers_by_step: weakref.WeakKeyDictionary[Step, Buffers] = weakref.WeakKeyDictionary()


class Checkpoints:
    """The checkpoints of one run, in a folder. A context manager: leaving it waits for the save in progress.

    Args:
      folder: a folder, which is made if it does not exist, or an address in s3:// or gs://. All hosts must see it.
      step: the step whose states are saved.
      about: what identifies the run in addition to the step (seed, sizes, ...), as JSON. Checkpoints of another run are
        not restored.
      keep: number of checkpoints to keep, the last ones; all if None.
      changed: names in `about` whose values in a checkpoint may differ; `notes` then says so.
      beside: called by the saving thread before a checkpoint is complete, to write files that should exist by then.

    Attributes:
      data: the position in the data, from the checkpoint that was restored.
      notes: messages for the user about the checkpoint that was restored.
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
        self.about = json.loads(json.dumps(dict(about)))  # as it is read back: tuples become lists
        self.folder.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            remove_unfinished(self.folder)
        self._pending_save: tuple[int, Future[None]] | None = None
        self._known_steps: set[int] = set()  # checkpoints that this object has saved or restored
        self._buffers: Buffers = {}  # the buffers of the save in progress
        self.data: dict[str, Any] = {}
        self.notes: list[str] = []

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def wait(self) -> None:
        """Wait for the save in progress. Raises ValueError on all hosts if one could not write."""
        if self._pending_save is not None:
            (number, save), self._pending_save = self._pending_save, None
            wait(save)
            self._known_steps.add(number)
            # Only now may the next save write into the buffers: the thread has read them.
            _buffers_by_step[self.step], self._buffers = self._buffers, {}

    @functools.cached_property
    def _arrays(self) -> list[Array]:
        return arrays_of(self.step)[0]

    @property
    def latest(self) -> int | None:
        """The step of the last complete checkpoint; None if there is none."""
        return next(reversed(complete_steps(self.folder)), None)

    def save(
        self, number: int, state: State, data: Mapping[str, Any] | None = None, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Write the state after step `number` in the background; see `TrainStep.save`.

        Under `offload` it waits until all is written: the host's memory has no room for two copies of the state.

        Args:
          number, state: steps taken, and the state after them.
          data: position in the data, as JSON.
          extra: other trees of arrays to save, by name.

        Raises:
          ValueError: if the previous save failed, if the state belongs to another step, or if the folder has a
            checkpoint of that step which this object has neither saved nor restored.
        """
        from .write import finish, save_items  # imports Orbax, which takes a second

        # One save at a time: the thread of the save before this one may still read the buffers.
        self.wait()
        # The last step may also be a multiple of the interval between saves. It is saved once.
        if number in self._known_steps:
            return
        if number in complete_steps(self.folder):
            raise ValueError(
                f"{self.folder}/{number} already exists, from another or an earlier run; "
                "name another folder, or remove that one"
            )
        # 1. Plan the checkpoint, and copy the state from the devices.
        self._buffers = _buffers_by_step.pop(self.step, {})
        added_arrays, values = extra_arrays(self.step, extra or {})
        arrays = [*self._arrays, *added_arrays]
        saved, items, paths = plan_items(self.step, arrays, extra)
        boxes = copied_boxes(arrays, (state, values), self._buffers)
        # Checked after the copy: reading the number waits for the devices, and `copied_boxes` first starts all copies.
        if (state_step := int(np.asarray(state.step))) != number:
            raise ValueError(f"the state is of step {state_step}, and number={number}; save it with its step")
        for name, array in saved.items():
            array.boxes = boxes.get(name, [])  # type: ignore[assignment]  # the values may also be functions
        shapes = {name: (array.shape, array.dtype) for name, array in saved.items()}
        # 2. Describe it.
        kinds = {name: array.key_impl for array in arrays for name in array.names if array.key_impl is not None}
        strategy, hosts = str(resolved_strategy(self.step)), jax.process_count()
        about = About(number, hosts, strategy, shapes, paths, kinds, self.about, dict(data or {}))

        # 3. Write it in the background.
        def write(folder: Place) -> None:
            save_items(folder, items)
            if self._beside is not None:
                self._beside()

        complete = lambda folder: finish(folder, items, about)
        self._pending_save = number, writer().begin(self.folder, number, self._keep, write, complete)
        if any(self.step.layout.host_bytes.values()):
            self.wait()

    def restore(self, good: bool = False) -> State:
        """Return the state in the last complete checkpoint; see `TrainStep.restore`.

        Sets `data` to the position that `save` was called with. Sets `notes` to messages for the user: about damaged
        checkpoints that were skipped, changed values, and a checkpoint that was saved under another strategy.

        Args:
          good: restore the newest checkpoint that is not damaged, and rename newer ones, which are damaged.

        Raises:
          NoCheckpointError: if there is no checkpoint.
          ValueError: if it is damaged or belongs to another run.
        """
        self.notes = []
        if good:  # process 0 verifies and renames, while the others wait for it
            self.notes = run_on_all_hosts("set aside", list if jax.process_index() else self._set_aside_damaged)
        number = self.latest
        if number is None:
            raise NoCheckpointError(f"{self.folder} holds no complete checkpoint; start the run anew")
        # 1. Check that the checkpoint is of this run, and read it.
        saved = Checkpoint(self.folder / str(number))
        check_same_run(saved.run, self.about, saved.folder, self._changed)
        state = restored(self.step, saved)
        # 2. Tell the user about differences that are allowed.
        for name in self._changed:
            if (saved_value := saved.run.get(name)) != (value := self.about.get(name)):
                self.notes.append(f"{saved.folder} was saved with {name} {saved_value!r}, and goes on with {value!r}")
        if saved.strategy != (strategy := str(resolved_strategy(self.step))):
            self.notes.append(f"{saved.folder} was saved under {saved.strategy}, and goes on under {strategy}")
        self.data = saved.data
        self._known_steps.add(number)
        return state

    def _set_aside_damaged(self) -> list[str]:
        """Rename the damaged checkpoints that are newer than the newest sound one, and return the problem of each.

        Raises:
          ValueError: if all checkpoints are damaged. Then none is renamed.
        """
        problems: dict[int, str] = {}
        for number in reversed(complete_steps(self.folder)):
            try:
                if (saved := Checkpoint(self.folder / str(number))).is_foreign:
                    raise DamagedError(saved.folder, "it has no item `about`")
                # Stop at the newest sound one: older checkpoints are not read.
                saved.verify()
                break
            except DamagedError as error:
                problems[number] = str(error)
        else:
            if problems:
                raise ValueError(f"{self.folder} holds no undamaged checkpoint: {'; '.join(problems.values())}")
        for number in problems:
            new_name = f"{number}.damaged"
            while (self.folder / new_name).exists():
                new_name += "-again"
            rename(self.folder / str(number), self.folder / new_name)
        return [*problems.values()]


def plan_items(
    step: Step, arrays: Sequence[Array], extra: Mapping[str, Any] | None
) -> tuple[dict[str, SavedArray], dict[str, Any], dict[str, Keys]]:
    """Decide what a checkpoint holds, still without values; `arrays` are those of the state and of `extra`.

    Returns:
      The arrays to save by name; the tree of each item by the item's name; and the key paths in these trees of arrays
      whose path differs from their name.

    Raises:
      ValueError: if Orbax, which joins the keys of a path by dots, would confuse two arrays.
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
    # The tree of an item may nest a leaf differently than its name says (`model_def.wrap`). Both hold the same object,
    # so its identity leads from the tree to the name.
    name_by_id = {id(array): name for name, array in saved.items()}
    leaves_with_paths = [*flatten(items[STATE]), *flatten(items.get(EXTRA, {}), (EXTRA,))]
    paths = {name_by_id[id(array)]: keys for keys, array in leaves_with_paths}
    counts = collections.Counter(".".join(keys) for keys in paths.values())
    if clashing := [name for name, keys in paths.items() if counts[".".join(keys)] > 1]:
        raise ValueError(
            f"{clashing[0]} and {clashing[1]} cannot be saved together: Orbax joins the keys of a path by dots, and so "
            f"names both {'.'.join(paths[clashing[0]])!r}; rename one of the two, without a dot in its keys"
        )
    return saved, items, {name: keys for name, keys in paths.items() if keys != keys_of(name)}


def copied_boxes(arrays: Sequence[Array], state: Any, buffers: Buffers) -> _Boxes:
    """Copy from the devices what this host saves, and return it as boxes of the model leaves, by name.

    If several devices hold a box, only its first replica is saved. Values that are in the host's memory already
    (`offload`) are not copied: their boxes are views. Waits for the devices and for the copy.

    Args:
      arrays: the arrays, in the order of the leaves of `state`.
      state: the tree of their values.
      buffers: memory of the previous save, which is used again, and grows as needed. On a virtual machine, touching new
        memory for the first time took ten times as long as the copy.
    """
    shards = []
    for array, x in zip(arrays, jax.tree.leaves(state), strict=True):
        if not array.is_derived:
            shards += [(array, shard) for shard in raw(x).addressable_shards if shard.replica_id == 0]
    for _, shard in shards:
        shard.data.copy_to_host_async()  # start all copies before waiting for any
    boxes: _Boxes = {}
    for array, shard in shards:
        values = np.asarray(shard.data)
        if shard.device.platform == "cpu" and shard.data.sharding.memory_kind != "pinned_host":
            # On a CPU device this is a view of the device's memory, into which the next step may write: copy it.
            key = array.names[0], shard.device.id
            if key not in buffers:
                buffers[key] = np.empty_like(values)
            np.copyto(buffers[key], values)
            values = buffers[key]
        for part in parts(array.leaf, array.inner, box_of(shard.index, array.shape)):
            view = part.view(values)
            # Skip boxes of padding, but keep the one box of an array without elements.
            if view.size or not np.prod(array.logical):
                boxes.setdefault(array.names[part.member], []).append((part.box, view))
    return boxes
