"""What a strategy is: which trees carry `fsdp`, how parameters are fetched, how gradients are returned; and what it
promises to hold and to send.

A rule says itself twice: as functions of arrays that the step runs, and as a closed form, the paper's, in numbers. The
second is never derived from the first, so that `check`, which compares the two, proves something.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclass(frozen=True)
class Use:
    """One use of a leaf, as the program runs it.

    Attributes:
      dim: the dim that is sharded, in the array at hand (one layer of a stack has a dim less).
      shard: the mesh axes that it is sharded over: `fsdp`, and `pipe` too for a leaf that is no stage's own.
      rest: the other axes along which devices use the same values, over which gradients are summed as well.
      last: whether this use yields the leaf's whole gradient of the step (one use, in a stack, one microbatch): then
        it is reduced right here, inside the backward loop, and not once more at the end.
      dtype: the dtype in which gradients are reduced and accumulated.
      second: the axes over which what is stored is sharded besides, with `Strategy.hpz`: a step has gathered over them
        in front of all uses, and what it has reduced over `shard` is scattered over them.
    """

    dim: int
    shard: tuple[str, ...]
    rest: tuple[str, ...]
    last: bool
    dtype: jnp.dtype
    second: tuple[str, ...] = ()


@dataclass(frozen=True)
class Times:
    """Executions of one thing in a step, on one device.

    Attributes:
      count: how many.
      elements: of each: of a whole leaf, or of one layer of it; padding included.
      pieces: the number of reduce-scatters that one gradient takes, several for a very large one
        (`collectives.scatter_pieces`).
    """

    count: int
    elements: int
    pieces: int = 1

    @property
    def total(self) -> int:
        """Elements of all executions."""
        return self.count * self.elements


@dataclass(frozen=True)
class Uses:
    """How one step uses one leaf on one device: what a closed form is a function of.

    Attributes:
      elements: of the leaf, or of those layers of it that are this rank's of `pipe`, and of this rank of `tensor`;
        padding included.
      fetched: the uses in forwards and backwards, whole and layer by layer. Idle ticks of a pipeline count.
      given: the gradients of these uses; () for a leaf that has none.
      updated: the leaf as `publish` gathers it after the update, or before a step over `second`, whole or layer by
        layer; () for one that is not sharded, or frozen and not gathered.
      last: as in `Use`.
      shard, rest, second: as in `Use`, without axes of one device; () for a leaf that is not sharded.
      sizes: the size of each mesh axis.
      compute, reduce, stored: the dtypes of what is fetched, of gradients, and of what a device stores whole.
    """

    elements: int
    fetched: tuple[Times, ...]
    given: tuple[Times, ...]
    updated: tuple[Times, ...]
    last: bool
    shard: tuple[str, ...]
    rest: tuple[str, ...]
    sizes: Mapping[str, int]
    compute: jnp.dtype
    reduce: jnp.dtype
    stored: jnp.dtype
    second: tuple[str, ...] = ()

    @property
    def once(self) -> tuple[Times, ...]:
        """The gradients of the step, as they accumulate: one of the whole leaf, or those of its only use."""
        return self.given if self.last or not self.given else (Times(1, self.elements),)

    @property
    def shards(self) -> int:
        """The number of devices that share the leaf."""
        return math.prod(self.sizes[axis] for axis in self.shard)

    @property
    def seconds(self) -> int:
        """The number of parts in which one of these stores its shard."""
        return math.prod(self.sizes[axis] for axis in self.second)

    @property
    def replicas(self) -> int:
        """The number of devices along `rest`."""
        return math.prod(self.sizes[axis] for axis in self.rest)


@dataclass(frozen=True)
class Sent:
    """Collectives that a rule promises, of one kind, over some axes.

    Attributes:
      kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", ... (`inspect.ledger.Collective.kind`).
      axes: the mesh axes, those of one device left out: `Uses.shard`, `Uses.rest`.
      dtype: of what is sent.
      count: executions in a step.
      elements: of all these together; of an all-gather those of its results, of every other kind those of its inputs.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: DTypeLike
    count: int
    elements: int

    @property
    def bytes(self) -> int:
        """Of all executions."""
        return self.elements * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Promise:
    """What a rule promises, in the numbers of its paper.

    Attributes:
      holds: which of "params", "optimizer" a device holds one shard of at rest; it holds the other whole.
        Where a copy in low precision is stored beside float32 masters, the masters live with the optimizer.
      sends: what is sent for one leaf in a step, a function of its uses. Of a rule that shards, it is asked for the
        leaves that are sharded; what is sent for the others is ddp's, as their rule is.
      sums: whether replicas add up their losses and metrics themselves.
    """

    holds: frozenset[str]
    sends: Callable[[Uses], Iterable[Sent]]
    sums: bool = True


@dataclass(frozen=True)
class Rule:
    """A strategy along the data axes; its functions run inside `shard_map`.

    Attributes:
      name: its name, in words: "ddp", "ZeRO-2".
      sharded: which of "params", "grads", "optimizer" carry `fsdp` at rest.
      fetch: what is stored -> the whole leaf; at every use, forwards and backwards.
      give: the local gradient of one use -> what is accumulated, in the dtype of the reduction.
      finish: what was accumulated -> the gradient that the update gets; once a step.
      promise: what all that holds and sends.
      published: whether updated shards are all-gathered to what is stored.
      at_once: whether `give` sends the gradient of every use, and not of a last one alone.
    """

    name: str
    sharded: frozenset[str]
    fetch: Callable[[jax.Array, Use], jax.Array]
    give: Callable[[jax.Array, Use], jax.Array]
    finish: Callable[[jax.Array, Use], jax.Array]
    promise: Promise
    published: bool = False
    at_once: bool = False
