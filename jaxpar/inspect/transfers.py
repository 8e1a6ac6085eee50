"""What a central server sends and receives in a step, and the programs between: the step itself, in rehearsal."""

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
      kind: "scatter" and "broadcast" leave the server, "gather" comes to it.
      what: what is sent, in words.
      arrays: the number of arrays in it.
      expected: bytes of the closed form, `exchanges`.
      found: bytes that the other devices together receive or send, which pass through the server's links.
    """

    kind: str
    what: str
    arrays: int
    expected: int
    found: int


class Rehearsal:
    """A `Carrier` of shapes and shardings: writes down what a step would move, and compiles what it would run.

    Attributes: `transfers`, and `programs` (name -> `jax.stages.Compiled`), both in order.
    """

    def __init__(self, server: jax.Device, expected: dict[str, int]) -> None:
        self.server, self.expected = server, expected
        self.transfers: list[Transfer] = []
        self.programs: dict[str, jax.stages.Compiled] = {}

    def move(self, kind: str, what: str, tree: Any, to: Any) -> Any:
        """Shapes at the shardings `to`. What has no sharding is the server's, as the batch of a host is."""
        leaves, structure = jax.tree.flatten(tree)
        places = [to] * len(leaves) if isinstance(to, Sharding) else jax.tree.leaves(to)
        sent = [self._sent(x, place) for x, place in zip(leaves, places, strict=True)]
        self.transfers.append(Transfer(kind, what, sum(map(bool, sent)), self.expected[what], sum(sent)))
        placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(leaves, places, strict=True)]
        return jax.tree.unflatten(structure, placed)

    def run(self, name: str, program: Any, *args: Any) -> Any:
        """The shapes and shardings of the program's results."""
        traced = program.trace(*args)
        platform = {"gpu": "cuda"}.get(self.server.platform, self.server.platform)
        compiled = self.programs[name] = traced.lower(lowering_platforms=(platform,)).compile()
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            traced.out_info,
            compiled.output_shardings,
        )

    def _sent(self, x: Any, to: Sharding) -> int:
        """Bytes that devices need and do not hold; what a device holds is a part of what it needs, or all."""
        shape, source = tuple(x.shape), getattr(x, "sharding", None)
        holders = {self.server} if source is None else source.device_set
        held = math.prod(shape if source is None else source.shard_shape(shape))
        wanted = math.prod(to.shard_shape(shape))
        missing = (max(0, wanted - held) if device in holders else wanted for device in to.device_set)
        return sum(missing) * x.dtype.itemsize


def rehearse(step: ServerStep, batch: Any) -> Rehearsal:
    """One training step on a batch of these shapes; nothing runs."""
    rehearsal = Rehearsal(step.layout.mesh.devices.flat[0], exchanges(step, batch))
    step.carry(rehearsal, "train", step.abstract_home(), jax.eval_shape(lambda x: x, batch))
    return rehearsal


def exchanges(step: ServerStep, batch: Any) -> dict[str, int]:
    """Bytes through the links of a central server in one training step, by what is sent.

    The closed form of `parallel/data/server.py`, for the shapes of the step and the batch.
    """
    state, n = step.abstract_state(), step.replicas
    out = step.traced(batch).outputs
    marked = jax.tree.leaves(batch, is_leaf=lambda x: isinstance(x, Replicated))
    rows = sum(_bytes(jax.eval_shape(lambda x: x, x)) // (1 if isinstance(x, Replicated) else n) for x in marked)
    sent = (state.step, state.params, state.variables, state.scale, state.key)
    reduced = sum(step.policy.reduced(f.dtype).itemsize * math.prod(f.shape) for f in step.layout.leaves if f.trainable)
    return exchanged(n, rows, _bytes(sent), len(out[0]), reduced)


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
