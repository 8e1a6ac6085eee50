"""The contract of a strategy along the data axes: a `Rule` of three functions, and a `Promise` in numbers.

    Rule.fetch     stored parameter          -> the whole leaf            at every use, and in backwards that read it
    Rule.give      local gradient of a use   -> accumulated gradient      at every use, in the backward
    Rule.finish    accumulated gradient      -> gradient of the update    once per step
    Promise        Uses of a leaf            -> memory at rest, and every collective (`Sent`)

A rule describes itself twice: as functions of arrays, which the step runs, and as the closed form of its paper. The
closed form is never derived from the functions, so that `check`, which compares the two, proves something.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclass(frozen=True)
class Use:
    """One use of a leaf: a place in the program that reads it.

    Attributes:
      dim: the sharded dim of the array that is used (one layer of a stack has a dim less than the stack).
      shard: the mesh axes over which it is sharded: `fsdp`, and also `pipe` for a leaf that all stages share.
      rest: the replica axes, all other axes along which devices use the same values. Gradients are summed over them
        too.
      last: whether the gradient of this use is the whole gradient of the leaf, or of its layer, in the step. It is if a
        stack alone reads the leaf, each layer once, and there is one microbatch. The gradient is then reduced inside
        the backward loop instead of at the end of the step.
      dtype: the dtype in which gradients are reduced and accumulated; the compute dtype if nothing is added to them.
      second: hpZ's axes: with `Strategy.hpz`, the stored shard is split once more over them. The step gathers over them
        before all uses. Gradients that are reduced over `shard` are then scattered over them.
    """

    dim: int
    shard: tuple[str, ...]
    rest: tuple[str, ...]
    last: bool
    dtype: jnp.dtype
    second: tuple[str, ...] = ()


@dataclass(frozen=True)
class Times:
    """Equal uses of a leaf, or gradients of these uses, in one step on one device.

    Attributes:
      count: the number of uses.
      elements: the elements of one use, padding included: a whole leaf, or one layer of it.
      pieces: the number of reduce-scatters that one gradient takes, several for a very large one
        (`collectives.scatter_pieces`).
    """

    count: int
    elements: int
    pieces: int = 1

    @property
    def total(self) -> int:
        """The elements of all these uses together."""
        return self.count * self.elements


@dataclass(frozen=True)
class Uses:
    """How one step uses one leaf on one device: the argument of a closed form.

    Attributes:
      elements: the leaf's elements on one rank of `pipe` and `tensor`, padding included.
      fetched: the uses in forward and backward, whole and layer by layer. Idle ticks of a pipeline count.
      given: the gradients of these uses; () for a leaf without gradient.
      updated: the leaf as `publish` gathers it, whole or layer by layer: after the update, or over `second` before a
        step. () for a leaf that is not sharded, or frozen and not gathered.
      last: as in `Use`.
      shard, rest, second: as in `Use`, without axes of one device; () for a leaf that is not sharded.
      sizes: the size of each mesh axis.
      compute, reduce, stored: the dtypes of fetched parameters, of gradients, and of parameters that a device stores
        whole.
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
        """The accumulated gradients of the step: one of the whole leaf, or one of each layer if `last`."""
        return self.given if self.last or not self.given else (Times(1, self.elements),)

    @property
    def shards(self) -> int:
        """The number of devices that share the leaf."""
        return math.prod(self.sizes[axis] for axis in self.shard)

    @property
    def hpz_parts(self) -> int:
        """The number of parts into which hpZ splits a shard at rest, 1 without it."""
        return math.prod(self.sizes[axis] for axis in self.second)

    @property
    def replicas(self) -> int:
        """The number of devices along `rest`."""
        return math.prod(self.sizes[axis] for axis in self.rest)


@dataclass(frozen=True)
class Sent:
    """Equal collectives that a rule promises: their kind, axes, dtype and size.

    Attributes:
      kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", ... (`inspect.ledger.Collective.kind`).
      axes: the mesh axes, without axes of one device: `Uses.shard`, `Uses.rest`.
      dtype: the dtype of the arrays that are sent.
      count: the number of executions per step.
      elements: the elements of all executions together. An all-gather counts its results, any other kind its inputs.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: DTypeLike
    count: int
    elements: int

    @property
    def bytes(self) -> int:
        """The bytes of all executions together."""
        return self.elements * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Promise:
    """The memory and the communication that a rule promises: the closed form of its paper.

    Attributes:
      holds: which of "params" and "optimizer" are sharded at rest; a device stores the remaining ones whole. If a copy
        in low precision is stored with float32 masters, the masters count as part of the optimizer.
      sends: maps the uses of one leaf to the collectives of one step. If the rule shards, it is called for sharded
        leaves alone; leaves that are not sharded follow ddp.
      sums: whether the replicas' programs sum losses and metrics over the replicas.
    """

    holds: frozenset[str]
    sends: Callable[[Uses], Iterable[Sent]]
    sums: bool = True


@dataclass(frozen=True)
class Rule:
    """A strategy along the data axes; its functions run inside `shard_map`.

    Attributes:
      name: the name that reports show: "ddp", "ZeRO-2".
      sharded: which of "params", "grads", "optimizer" are sharded over `fsdp` between steps; "grads" are the gradients
        that the update receives, whether or not they accumulate whole.
      fetch: maps the stored parameter to the whole leaf, or one layer of it. Runs at every use, and again in its
        backward if that reads the leaf. It does not read biases, and the epilogue keeps its leaves from the forward.
      give: maps the local gradient of one use to what this use adds to the accumulated gradient, in the reduce dtype.
      finish: maps the accumulated gradient to the gradient of the update. Runs once per step.
      promise: the memory and the communication of these functions.
      published: whether updated shards are all-gathered into the stored parameters.
      at_once: whether `give` communicates at every use, instead of at uses with `Use.last` alone.
    """

    name: str
    sharded: frozenset[str]
    fetch: Callable[[jax.Array, Use], jax.Array]
    give: Callable[[jax.Array, Use], jax.Array]
    finish: Callable[[jax.Array, Use], jax.Array]
    promise: Promise
    published: bool = False
    at_once: bool = False
