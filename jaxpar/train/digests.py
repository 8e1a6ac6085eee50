"""Digests of steps, some kilobytes each, by which a step that is computed again is compared with what a run computed.

Of a state there is a checksum of each leaf, over all devices, and one of each device, over all leaves: a device that
computed something else changes its own and those of the leaves concerned. They are of one layout. The loss and the
gradients' norm are the same under every one, rounding apart.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..buckets import Place
from ..checkpoint.about import exact
from ..checkpoint.arrays import raw
from ..hosts import consistency
from ..inspect.check import replicas
from ..inspect.verify.differences import dtypes_of
from ..layout.state import State
from ..make import TrainStep
from ..model.paths import name_of
from .folder import write_whole
from .loop import Loop
from .recorder import read, until

FILE = "digests.jsonl"
_FLAGS = ("jax_default_matmul_precision", "jax_enable_x64", "jax_threefry_partitionable", "jax_default_prng_impl")


class Digests:
    """Takes digests of the states of a `step`."""

    def __init__(self, step: TrainStep):
        self.step = step
        words = lambda leaves: [replicas.checksum(raw(x)) for x in leaves]
        self._words = jax.jit(words, out_shardings=NamedSharding(step.mesh, PartitionSpec()))

    @functools.cached_property
    def _state(self) -> State:
        return self.step.abstract_state()

    @functools.cached_property
    def names(self) -> list[str]:
        """Of the leaves of the state, in their order."""
        return [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(self._state)]

    @property
    def devices(self) -> list[str]:
        """Those of the mesh, as people read them."""
        return [replicas.name_of_device(device) for device in self.step.layout.mesh.devices.flat]

    def about(self) -> dict[str, str]:
        """What must be the same for the same bits."""
        mesh = self.step.mesh
        flags = {name: str(getattr(jax.config, name)) for name in _FLAGS} | {
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")
        }
        devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind}, {jax.process_count()} processes"
        return {"the strategy": str(exact(self.step)), "the devices": devices, **consistency.versions(), **flags}

    def take(self, state: State, batch: Any, metrics: Mapping[str, jax.Array]) -> Any:
        """What `written` makes a digest of, as arrays that are not waited for; the state may be donated next."""
        scalars = {name: metrics[name] for name in ("loss", "grad_norm") if name in metrics}
        names = [name_of(path) or "batch" for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
        sums = zip(names, self._words(jax.tree.leaves(batch)), strict=True)
        return scalars, dict(sums), self.step.checksums(state)

    def written(self, number: int, taken: Any) -> dict[str, Any]:
        """The digest of step `number`, as JSON. Raises ValueError where replicas hold other bits."""
        scalars, batch, sums = jax.tree.map(np.asarray, taken)
        replicas.check(self._state, sums, self.step.layout.mesh, number)
        return {
            "step": number,
            **{name: float(value).hex() for name, value in scalars.items()},
            "batch": {name: int(value) for name, value in batch.items()},
            "leaves": _combined(sums),
            "devices": _combined(sums.T),
        }


def _combined(sums: np.ndarray) -> list[int]:
    """uint32 [n, m] -> [m], modulo 2^32; each of the n counts by an odd number of its own, so that one that changes
    changes the result.
    """
    odd = 2 * np.arange(len(sums), dtype=np.uint32) + np.uint32(1)
    return (sums * odd[:, None]).sum(0, dtype=np.uint32).tolist()


class Record:
    """Writes the digest of every `loop.record`th step into `digests.jsonl`, the first line of each start of a run says
    what must be the same for the same bits. Called on all hosts; process 0 writes.
    """

    def __init__(self, step: TrainStep, loop: Loop, run: Mapping[str, Any]):
        if loop.out is None:
            raise ValueError(f"record={loop.record} needs somewhere to write to: give the run's folder as out=")
        self._loop, self._run, self._digests, self._taken = loop, run, Digests(step), None

    def begin(self, number: int, folder: Any) -> None:
        """Before the first step of a start, after step `number`. Later lines, of a run that was killed, are removed."""
        self._path = None if jax.process_index() else folder / FILE
        if self._path is None:
            return
        made = self._digests
        head = {"step": number, "about": made.about(), "run": self._run, "steps": self._loop.steps}
        head |= {"names": made.names, "on": made.devices, "dtypes": dtypes_of(made.step.strategy)}
        assert self._loop.out is not None
        write_whole(self._path, until(self._loop.out / FILE, number) + f"{json.dumps(head)}\n".encode())

    def take(self, number: int, state: State, batch: Any, metrics: Mapping[str, jax.Array]) -> None:
        """Of the state after step `number`, if it is one of those."""
        if number % (self._loop.record or 1) == 0:
            self._taken = number, self._digests.take(state, batch, metrics)

    def write(self) -> None:
        """What was last taken. Raises ValueError where replicas hold other bits, OSError where it cannot be written."""
        if self._taken is None:
            return
        line, self._taken = self._digests.written(*self._taken), None
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(f"{json.dumps(line)}\n")


def digests_of(out: Place) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The digests of a run, in order, each behind what its start says of itself. Raises ValueError where none are."""
    found, head = [], None
    for line in read(out / FILE):
        head = line if "about" in line else head
        if head is None:
            raise ValueError(f"{out / FILE} does not begin with what its digests are of; it was not written by a run")
        if head is not line:
            found.append((head, line))
    if not found:
        raise ValueError(f"{out} holds no digests; record them as it trains, with record=10")
    return found
