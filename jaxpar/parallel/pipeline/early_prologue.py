"""Prologues that run before the first tick, and whose backwards run after the last.

A tick needs the prologue of one microbatch, in the first stage. If every rank computed it in every tick, all but m of
them would be dropped, and the gradient of a large embedding would be added to once per tick. Instead:

    before the first tick      prologues of all microbatches; their first carries are stored, [m, ...]
    tick with F1 in stage 0    reads the first carry of 1
    tick with B1 in stage 0    stores the cotangents of that carry, in its place
    after the last tick        backwards of all microbatches

A prologue with layers, such as the first three of DeepSeek-V3, takes longer. Its ranks share the work:

    p = 2, m = 4               rank 0 (stage 0)                 rank 1
    before the first tick      prologues of 0, 2                prologues of 1, 3
    tick with F1 in stage 0    reads the first carry of 1   <-  has it                  an all-reduce
    tick with B1 in stage 0    has its cotangents           ->  stores them             an all-reduce
    after the last tick        backwards of 0, 2                backwards of 1, 3

Without layers (an embedding, masks), the work is less than these all-reduces: every rank computes all microbatches.
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


def is_early(program: Program) -> bool:
    """Return whether prologues may run before the first tick.

    They may if the stack's first carry is all that has cotangents in it, since only the carry is stored.
    """
    stack = program.main
    assert stack is not None
    consts, carry, xs = stack.parts(stack.unit.active_inputs)
    first_carry = stack.parts(stack.inputs)[1]
    return (
        all(carry)
        and not any((*consts, *xs))
        and not bypass_variables(program)
        # Cotangents are stored by variable: each part of the carry needs a different variable.
        and not any(jx.is_literal(v) for v in first_carry)
        and len(set(first_carry)) == len(first_carry)
    )


def shares_prologues(program: Program) -> bool:
    """Return whether the ranks share the prologues: they are early, and have layers."""
    return is_early(program) and any(isinstance(piece, Stack) for piece in prologue_pieces(program))


@dataclass(frozen=True)
class EarlyPrologues:
    """The prologues of one loss on the ranks of `pipe`.

    If n ranks share them, rank r computes microbatches r, n + r, 2 n + r, ...: microbatch b is number b // n of rank
    b mod n. If they do not, n is 1, and every rank computes all of them.

    Attributes:
      program: the loss on the rows of one microbatch.
      access: how parameters are fetched and gradients given.
      leaves: this rank's leaves.
      values: `values(microbatch)` returns the values of the program's inputs.
      sharers: the number of ranks that share the prologues, n.
      microbatches: the number of microbatches of a step.
    """

    program: Program
    access: Access
    leaves: Sequence[jax.Array]
    values: Callable[[jax.Array], list[Any]]
    sharers: int
    microbatches: int

    @property
    def carry_variables(self) -> list[Any]:
        """Return the variables of the stack's first carry."""
        assert self.program.main is not None
        return self.program.main.parts(self.program.main.inputs)[1]

    @property
    def per_rank(self) -> int:
        """Return the number of microbatches of a rank, rounded up."""
        return -(-self.microbatches // self.sharers)

    def zeros(self) -> list[jax.Array]:
        """Return zeros in the shapes of the first carries, [per_rank, ...]."""
        return [jnp.zeros((self.per_rank, *v.aval.shape), v.aval.dtype) for v in self.carry_variables]

    def compute(self) -> list[jax.Array]:
        """Compute the prologues of this rank's microbatches; return the first carries, [per_rank, ...]."""

        # A scan rather than a batch of all microbatches: the activations of one prologue at a time.
        def prologue(_: None, number: jax.Array) -> tuple[None, list[Any]]:
            env = self._environment(number)
            forward(prologue_pieces(self.program), self.access, self.leaves, env, False)
            return None, [read(env, v) for v in self.carry_variables]

        return scan(prologue, None, jnp.arange(self.per_rank), self.per_rank)[1]

    def read(self, stored: Sequence[jax.Array], microbatch: jax.Array) -> dict[Any, jax.Array]:
        """Return the first carry of a microbatch, by variable; communicates an all-reduce if the ranks share prologues.

        Args:
          stored: as `compute` returns, and as `store_cotangents` changes it for other microbatches.
          microbatch: the microbatch that enters stage 0, the same on all ranks.
        """
        values = [x[microbatch // self.sharers] for x in stored]
        if self.sharers > 1:
            # An all-reduce of one value and zeros: a broadcast whose root is known only when the tick runs.
            values = [collectives.all_reduce(jnp.where(self._owns(microbatch), x, 0), [AXIS]) for x in values]
        return dict(zip(self.carry_variables, values, strict=True))

    def store_cotangents(
        self, stored: Sequence[jax.Array], cts: dict[Any, jax.Array], microbatch: jax.Array
    ) -> list[jax.Array]:
        """Store the cotangents of a microbatch's first carry in place of the carry.

        Communicates an all-reduce if the ranks share prologues: the rank that computed the microbatch stores them.

        Args:
          stored: first carries and cotangents of this rank's microbatches, [per_rank, ...].
          cts: the cotangents by variable; zeros on all ranks but the first.
          microbatch: the microbatch whose cotangents leave stage 0; -1 if none do.
        """
        # In a tick without such a microbatch (-1), number 0 is written with its own value.
        number = jnp.maximum(microbatch, 0) // self.sharers
        is_stored = (microbatch >= 0) & self._owns(microbatch)
        values = [cts[v] for v in self.carry_variables]
        if self.sharers > 1:
            values = [collectives.all_reduce(ct, [AXIS]) for ct in values]
        return [x.at[number].set(jnp.where(is_stored, ct, x[number])) for x, ct in zip(stored, values, strict=True)]

    def backward(self, stored: Sequence[jax.Array], grads: list[Any]) -> list[Any]:
        """Add the gradients of this rank's prologues, whose cotangents are `stored`, to `grads`."""
        if self.sharers > 1:
            # A rank with fewer microbatches runs one more backward, of a carry without cotangents.
            exists = self._microbatch(jnp.arange(self.per_rank)) < self.microbatches
            stored = [jnp.where(exists.reshape(-1, *[1] * (x.ndim - 1)), x, 0) for x in stored]

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
        return self.program.environment(self.values(jnp.minimum(self._microbatch(number), self.microbatches - 1)))

    def _microbatch(self, number: jax.Array) -> jax.Array:
        """Return the microbatch of a number on this rank."""
        return number * self.sharers + lax.axis_index(AXIS) % self.sharers

    def _owns(self, microbatch: jax.Array) -> jax.Array:
        """Return whether this rank computes the microbatch's prologue."""
        return lax.axis_index(AXIS) % self.sharers == microbatch % self.sharers
