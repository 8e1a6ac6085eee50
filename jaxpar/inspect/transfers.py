"""A central server's transfers in one step, and the programs that run between them, from a rehearsal of the step."""

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Sharding

from ..model.model import Replicated
from ..parallel.data.server import exchanged
from ..step.server import ServerStep


@dataclass(frozen=True)
class Transfer:
    """One exchange between the server and all other devices.

    Attributes:
      kind: "scatter" or "broadcast" from the server, "gather" to it.
      what: the content, in words.
      arrays: the number of arrays sent.
      expected: bytes of the closed form; see `exchanges`.
      found: the bytes that all other devices receive or send together. They all pass through the server's links.
    """

    kind: str
    what: str
    arrays: int
    expected: int
    found: int


class Rehearsal:
    """A `Carrier` of shapes and shardings: it records what a step would move, and compiles what it would run.

    Attributes:
      transfers: the transfers, in order.
      programs: name -> `jax.stages.Compiled`, in order.
    """

    def __init__(self, server: jax.Device, expected: dict[str, int]) -> None:
        self.server, self.expected = server, expected
        self.transfers: list[Transfer] = []
        self.programs: dict[str, jax.stages.Compiled] = {}

    def move(self, kind: str, what: str, tree: Any, to: Any) -> Any:
        """Record a transfer; return its shapes with the shardings `to`.

        An array without a sharding is on the server, like a batch from the host.
        """
        leaves, structure = jax.tree.flatten(tree)
        shardings = [to] * len(leaves) if isinstance(to, Sharding) else jax.tree.leaves(to)
        sent_bytes = [self._sent(x, sharding) for x, sharding in zip(leaves, shardings, strict=True)]
        # An array that moves no bytes is not counted as sent.
        self.transfers.append(Transfer(kind, what, sum(map(bool, sent_bytes)), self.expected[what], sum(sent_bytes)))
        return jax.tree.unflatten(structure, map(_placed, leaves, shardings))

    def run(self, name: str, program: Any, *args: Any) -> Any:
        """Compile a program; return the shapes and shardings of its results."""
        traced = program.trace(*args)
        # `lowering_platforms` takes "cuda" where `Device.platform` says "gpu".
        platform = {"gpu": "cuda"}.get(self.server.platform, self.server.platform)
        compiled = self.programs[name] = traced.lower(lowering_platforms=(platform,)).compile()
        return jax.tree.map(_placed, traced.out_info, compiled.output_shardings)

    def _sent(self, x: Any, target_sharding: Sharding) -> int:
        """Return the bytes that devices need under `target_sharding` and do not have yet.

        The part that a device has is always contained in the part that it needs, so sizes can be subtracted.
        """
        shape, source = tuple(x.shape), getattr(x, "sharding", None)
        holders = {self.server} if source is None else source.device_set
        # Without a sharding the server has all of it.
        elements_present = math.prod(shape if source is None else source.shard_shape(shape))
        elements_needed = math.prod(target_sharding.shard_shape(shape))
        missing = (
            max(0, elements_needed - elements_present) if device in holders else elements_needed
            for device in target_sharding.device_set
        )
        return sum(missing) * x.dtype.itemsize


def rehearse(step: ServerStep, batch: Any) -> Rehearsal:
    """Rehearse one training step on a batch of these shapes; nothing runs."""
    rehearsal = Rehearsal(step.layout.mesh.devices.flat[0], exchanges(step, batch))
    step.carry(rehearsal, "train", step.abstract_home(), jax.eval_shape(lambda x: x, batch))
    return rehearsal


def exchanges(step: ServerStep, batch: Any) -> dict[str, int]:
    """Return the bytes through the links of a central server in one training step, by content.

    It is the closed form of `parallel/data/server.py`, for the shapes of the step and the batch.
    """
    state, num_replicas = step.abstract_state(), step.replicas
    outputs = step.traced(batch).outputs
    batch_leaves = jax.tree.leaves(batch, is_leaf=lambda x: isinstance(x, Replicated))
    # Rows are split over the replicas; a `Replicated` leaf goes to each of them whole.
    row_bytes = sum(
        _bytes(jax.eval_shape(lambda x: x, x)) // (1 if isinstance(x, Replicated) else num_replicas)
        for x in batch_leaves
    )
    broadcast_state = (state.step, state.params, state.variables, state.scale, state.key)
    grad_bytes = sum(
        step.policy.reduced(leaf.dtype).itemsize * math.prod(leaf.shape)
        for leaf in step.layout.leaves
        if leaf.trainable
    )
    return exchanged(num_replicas, row_bytes, _bytes(broadcast_state), len(outputs[0]), grad_bytes)


def _placed(x: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """Return the shape of an array that has this sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _bytes(tree: Any) -> int:
    """Return the bytes of all arrays of a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
