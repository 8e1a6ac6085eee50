"""Prologues with layers, such as the first three of DeepSeek-V3: the ranks share the work, microbatch by microbatch.

    p = 2, m = 4               rank 0 (stage 0)                 rank 1
    before the first tick      prologues of 0, 2                prologues of 1, 3
    tick with F1 in stage 0    reads the first carry of 1   <-  has it                  an all-reduce
    tick with B1 in stage 0    has its cotangents           ->  stores them             an all-reduce
    after the last tick        backwards of 0, 2                backwards of 1, 3

Without this, every rank would compute a prologue in every tick, and drop it on all ranks but the first. That costs the
time of as many layers per tick. A prologue without layers (an embedding, masks) costs less than these all-reduces, and
is computed in every tick.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ... import collectives
from ...program import jaxpr as jx
from ...program.buffers import scan
from ...slicing.access import Access
from ...slicing.pieces import Stack
from ...slicing.program import Program, backward, forward, read
from .chunks import AXIS, bypass_variables, prologue_pieces


def shares_prologues(program: Program) -> bool:
    """Return whether the ranks share the prologues.

    They do if the prologue has layers, and if the stack's first carry is all that has cotangents in it: only the carry
    is sent to other ranks.
    """
    stack = program.main
    assert stack is not None
    consts, carry, xs = stack.parts(stack.unit.active_inputs)
    first_carry = stack.parts(stack.inputs)[1]
    return (
        any(isinstance(piece, Stack) for piece in prologue_pieces(program))
        and all(carry)
        and not any((*consts, *xs))
        and not bypass_variables(program)
        # Cotangents are stored by variable: each part of the carry needs a different variable.
        and not any(jx.is_literal(v) for v in first_carry)
        and len(set(first_carry)) == len(first_carry)
    )


@dataclass(frozen=True)
class SharedPrologues:
    """The prologues of one loss on the ranks of `pipe`.

    Rank r computes microbatches r, p + r, 2 p + r, ...: microbatch b is number b // p of rank b mod p.

    Attributes:
      program: the loss on the rows of one microbatch.
      access: how parameters are fetched and gradients given.
      leaves: this rank's leaves.
      values: `values(microbatch)` returns the values of the program's inputs.
      ranks: the number of ranks, p.
      microbatches: the number of microbatches of a step.
    """

    program: Program
    access: Access
    leaves: Sequence[jax.Array]
    values: Callable[[jax.Array], list[Any]]
    ranks: int
    microbatches: int

    @property
    def carry_variables(self) -> list[Any]:
        """Return the variables of the stack's first carry."""
        assert self.program.main is not None
        return self.program.main.parts(self.program.main.inputs)[1]

    @property
    def per_rank(self) -> int:
        """Return the number of microbatches of a rank, rounded up."""
        return -(-self.microbatches // self.ranks)

    def zeros(self) -> list[jax.Array]:
        """Return zeros for the first carries, or for their cotangents, [per_rank, ...].

        A rank with fewer microbatches needs them: `backward` reads the cotangents of one more, which nobody stores.
        """
        return [jnp.zeros((self.per_rank, *v.aval.shape), v.aval.dtype) for v in self.carry_variables]

    def compute(self) -> list[jax.Array]:
        """Compute the prologues of this rank's microbatches; return the first carries, [per_rank, ...]."""

        # A scan rather than a batch of all microbatches: the activations of one prologue at a time.
        def prologue(_: None, number: jax.Array) -> tuple[None, list[Any]]:
            env = self._environment(number)
            forward(prologue_pieces(self.program), self.access, self.leaves, env, False)
            return None, [read(env, v) for v in self.carry_variables]

        return scan(prologue, None, jnp.arange(self.per_rank), self.per_rank)[1]

    def broadcast(self, carries: Sequence[jax.Array], microbatch: jax.Array) -> dict[Any, jax.Array]:
        """Return the first carry of a microbatch on all ranks, by variable; communicates an all-reduce.

        Args:
          carries: as `compute` returns.
          microbatch: the microbatch that enters stage 0, the same on all ranks.
        """
        # An all-reduce of one value and zeros: a broadcast whose root is known only when the tick runs.
        owner_values = [jnp.where(self._owns(microbatch), x[microbatch // self.ranks], 0) for x in carries]
        return {v: collectives.all_reduce(x, [AXIS]) for v, x in zip(self.carry_variables, owner_values, strict=True)}

    def store_cotangents(
        self, stored: Sequence[jax.Array], cts: dict[Any, jax.Array], microbatch: jax.Array
    ) -> list[jax.Array]:
        """Store the cotangents of a microbatch's first carry on the rank that computed it; communicates an all-reduce.

        Args:
          stored: the cotangents of this rank's microbatches, [per_rank, ...].
          cts: the cotangents by variable; zeros on all ranks but the first.
          microbatch: the microbatch whose cotangents leave stage 0; -1 if none do.
        """
        # In a tick without such a microbatch (-1), number 0 is written with its own value.
        number = jnp.maximum(microbatch, 0) // self.ranks
        is_stored = (microbatch >= 0) & self._owns(microbatch)
        sums = [collectives.all_reduce(cts[v], [AXIS]) for v in self.carry_variables]
        return [x.at[number].set(jnp.where(is_stored, ct, x[number])) for x, ct in zip(stored, sums, strict=True)]

    def backward(self, stored: Sequence[jax.Array], grads: list[Any]) -> list[Any]:
        """Add the gradients of this rank's prologues, whose cotangents are `stored`, to `grads`."""

        def prologue_backward(grads: list[Any], x: Any) -> tuple[list[Any], None]:
            # The prologue runs again, so that its residuals do not wait in memory during the ticks.
            number, carry_cts = x
            env = self._environment(number)
            tape = forward(prologue_pieces(self.program), self.access, self.leaves, env, True)
            cts = dict(zip(self.carry_variables, carry_cts, strict=True))
            return backward(prologue_pieces(self.program), self.access, self.leaves, tape, cts, grads), None

        # A scan's carry has one structure: leaves whose first gradient comes from a prologue start with zeros.
        xs = (jnp.arange(self.per_rank), list(stored))
        shapes = jax.eval_shape(
            lambda grads, x: prologue_backward(grads, x)[0], grads, jax.tree.map(lambda x: x[0], xs)
        )
        init = [
            jnp.zeros(shape.shape, shape.dtype) if g is None and shape is not None else g
            for g, shape in zip(grads, shapes, strict=True)
        ]
        return lax.scan(prologue_backward, init, xs)[0]

    def _environment(self, number: jax.Array) -> dict[Any, Any]:
        """Return the program's input values for a microbatch of this rank, given its number on the rank.

        A rank with fewer microbatches repeats the last one, whose results nobody reads and whose cotangents are zero.
        """
        microbatch = number * self.ranks + lax.axis_index(AXIS)
        return self.program.environment(self.values(jnp.minimum(microbatch, self.microbatches - 1)))

    def _owns(self, microbatch: jax.Array) -> jax.Array:
        """Return whether this rank computes the microbatch's prologue."""
        return lax.axis_index(AXIS) == microbatch % self.ranks
