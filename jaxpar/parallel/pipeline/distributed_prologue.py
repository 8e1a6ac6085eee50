"""Layers before the stack that is cut (DeepSeek-V3's first three): the ranks share the prologues of the microbatches.

    rank r        ahead of the ticks: the prologues of microbatches r, p + r, 2 p + r, ...
    in a tick     what enters the first stage, from the rank that has it; its cotangents to that rank: all-reduces
    rank r        behind the ticks: the backwards of its prologues

Computed where they are read, they would take the time of as many layers of every rank, in every tick, and of all but
the first rank's nothing is read. A prologue without layers (an embedding, masks) costs less than what would be sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ... import collectives
from ...program import jaxpr as jx
from ...slicing.access import Access
from ...slicing.pieces import Stack
from ...slicing.program import Program, backward, forward, read
from .chunks import AXIS, before, side


def shared(program: Program) -> bool:
    """Whether ranks share the prologues: they have layers, and gradients through the stack's first carry alone."""
    stack = program.main
    assert stack is not None
    consts, carry, xs = stack.parts(stack.unit.linear)
    first = stack.parts(stack.inputs)[1]
    return (
        any(isinstance(piece, Stack) for piece in before(program))
        and all(carry)
        and not any((*consts, *xs))
        and not side(program)
        and not any(jx.is_literal(v) for v in first)
        and len(set(first)) == len(first)
    )


@dataclass(frozen=True)
class SharedPrologues:
    """The prologues of one loss on the ranks of `pipe`; fields as those of `Engine`."""

    program: Program
    access: Access
    leaves: Sequence[jax.Array]
    values: Callable[[jax.Array], list[Any]]
    ranks: int
    microbatches: int

    @property
    def first(self) -> list[Any]:
        """The variables of the stack's first carry."""
        assert self.program.main is not None
        return self.program.main.parts(self.program.main.inputs)[1]

    @property
    def each(self) -> int:
        """Microbatches of a rank."""
        return -(-self.microbatches // self.ranks)

    def zeros(self) -> list[jax.Array]:
        """For what enters, or for its cotangents, [each, ...]."""
        return [jnp.zeros((self.each, *v.aval.shape), v.aval.dtype) for v in self.first]

    def run(self) -> list[jax.Array]:
        """What this rank's microbatches bring to the first layer, [each, ...]."""

        def one(_: None, number: jax.Array) -> tuple[None, list[Any]]:
            env = self._environment(number)
            forward(before(self.program), self.access, self.leaves, env, False)
            return None, [read(env, v) for v in self.first]

        return lax.scan(one, None, jnp.arange(self.each))[1]

    def entering(self, made: Sequence[jax.Array], microbatch: jax.Array) -> dict[Any, jax.Array]:
        """The first carry of a microbatch, on all ranks, by variable."""
        here = [jnp.where(self._mine(microbatch), x[microbatch // self.ranks], 0) for x in made]
        return {v: collectives.all_reduce(x, [AXIS]) for v, x in zip(self.first, here, strict=True)}

    def kept(self, kept: Sequence[jax.Array], made: dict[Any, jax.Array], microbatch: jax.Array) -> list[jax.Array]:
        """`kept` with the cotangents of a microbatch, zeros on all ranks but the first; -1 for none."""
        at = jnp.maximum(microbatch, 0) // self.ranks
        mine = (microbatch >= 0) & self._mine(microbatch)
        sums = [collectives.all_reduce(made[v], [AXIS]) for v in self.first]
        return [x.at[at].set(jnp.where(mine, ct, x[at])) for x, ct in zip(kept, sums, strict=True)]

    def backward(self, kept: Sequence[jax.Array], grads: list[Any]) -> list[Any]:
        """`grads` with those of the prologues added."""

        def one(grads: list[Any], x: Any) -> tuple[list[Any], None]:
            number, cts = x
            env = self._environment(number)
            tape = forward(before(self.program), self.access, self.leaves, env, True)
            made = dict(zip(self.first, cts, strict=True))
            return backward(before(self.program), self.access, self.leaves, tape, made, grads), None

        every = (jnp.arange(self.each), list(kept))
        due = jax.eval_shape(lambda grads, x: one(grads, x)[0], grads, jax.tree.map(lambda x: x[0], every))
        start = [
            jnp.zeros(d.shape, d.dtype) if g is None and d is not None else g for g, d in zip(grads, due, strict=True)
        ]
        return lax.scan(one, start, every)[0]

    def _environment(self, number: jax.Array) -> dict[Any, Any]:
        """Of this rank's microbatch of that number; of the last where it has fewer, and nothing is read of that."""
        microbatch = number * self.ranks + lax.axis_index(AXIS)
        return self.program.environment(self.values(jnp.minimum(microbatch, self.microbatches - 1)))

    def _mine(self, microbatch: jax.Array) -> jax.Array:
        return lax.axis_index(AXIS) == microbatch % self.ranks
