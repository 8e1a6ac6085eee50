"""A unit's backward as two programs: first the cotangents of its inputs, later the gradients of its weights (Qi et al.
2023, Zero Bubble Pipeline Parallelism, section 2).

    whole      leaves, saved, cotangents  -> cotangents of the leaves, and of the inputs
    inputs     leaves, saved, cotangents  -> cotangents of the inputs, and residuals
    weights    leaves, saved, residuals   -> cotangents of the leaves

Both halves are cut from the equations of the whole backward. The first half computes what both need, and saves it as
residuals. The second half repeats only what follows element by element from the residuals, as in
`program/residuals.py`. Gradients that are sums without a product, of scales and biases, move to the first half.

A layer with `remat` is recomputed in the first half alone. The residuals then hold everything that the second half
reads: for a decoder's layer about ten times its input (Llama-3-8B on two tensor ranks, 4,096 tokens: 319 MB for an
input of 34 MB). With `remat="twice"` the second half recomputes the layer too, and the residuals follow from cotangents
alone.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import jax
from jax.core import Tracer

from ..program import jaxpr as jx
from ..program.residuals import cheap, residuals_to_save


def _is_cheap(eqn: Any) -> bool:
    """Whether an equation may run in both halves.

    A `tensor_enter` may: forwards it returns its operand, and communicates in its own backward alone.
    """
    return cheap(eqn) or eqn.primitive.name == "tensor_enter"


@dataclass(frozen=True, eq=False)
class Halves:
    """The two halves of a backward.

    Attributes:
      fetched: which leaves the first half reads, and which the second half reads.
      saved: which of the forward's saved values the second half reads; the others are free after the first half.
      floats: which leaves are floating-point.
      num_active_inputs: the number of the active inputs.
      consts: the arrays that both halves close over.
      run_first, run_second: the halves as functions of `consts` and their operands.
    """

    fetched: tuple[tuple[bool, ...], tuple[bool, ...]]
    saved: tuple[bool, ...]
    floats: Sequence[bool]
    num_active_inputs: int
    consts: Sequence[Any] = field(repr=False)
    run_first: Callable[..., list[Any]] = field(repr=False)
    run_second: Callable[..., list[Any]] = field(repr=False)

    @classmethod
    def split(
        cls,
        flat: jx.Flat,
        eqns: Sequence[Any],
        floats: Sequence[bool],
        num_held: int,
        num_saved: int,
        twice: bool = False,
    ) -> Self:
        """Split a whole backward into its halves.

        Args:
          flat: the backward. Its inputs are the leaves, the held inputs, the saved values and the cotangents. Its
            outputs are the cotangents of the leaves that are `floats`, and then of the active inputs.
          eqns: its live equations.
          floats: which leaves are floating-point.
          num_held, num_saved: the numbers of these inputs.
          twice: whether the second half recomputes everything that follows without cotangents.
        """
        # Both halves are kept for later traces, in which a tracer of this one would be stale.
        assert not any(isinstance(x, Tracer) for x in flat.consts)
        leaves, operands = flat.invars[: len(floats)], flat.invars[len(floats) :]
        held_vars, saved_vars = operands[:num_held], operands[num_held : num_held + num_saved]
        cts = operands[num_held + num_saved :]
        ct_leaves, ct_inputs = flat.outvars[: sum(floats)], flat.outvars[sum(floats) :]

        # 1. Cut: the first half has what the inputs' cotangents need, the second what only the leaves' need.
        first = jx.needed(eqns, ct_inputs)
        first, second = _move_sums(first, _without(jx.needed(eqns, ct_leaves), first))
        crossing = jx.free(second, ct_leaves)

        # 2. Choose the residuals. With `twice`, no value that the forward has computed is one.
        data = jx.depends(eqns, cts if twice else [*held_vars, *saved_vars, *cts])
        weight_eqns = [eqn for eqn in eqns if not any(v in data for v in eqn.outvars)]
        weight_vars = {*leaves, *(v for eqn in weight_eqns for v in eqn.outvars)}
        available = {*flat.constvars, *held_vars, *saved_vars}
        residuals, recomputed = _choose_residuals(first, crossing, available, weight_vars)

        # 3. Assemble the halves. An equation of `weight_eqns` may also be among the recomputed ones; it must run once.
        second = [*recomputed, *second]
        weight_eqns = jx.needed(weight_eqns, jx.free(second, ct_leaves))
        second = [*weight_eqns, *_without(second, weight_eqns)]
        first_results = [*ct_inputs, *residuals]
        # The second half may recompute what it reads, so that some of the first half is dead now.
        first = jx.live(first, first_results)

        # 4. Find which leaves and saved values each half reads.
        first_reads, second_reads = {*jx.free(first, first_results)}, {*jx.free(second, ct_leaves)}
        saved = tuple(v in second_reads for v in saved_vars)
        fetched = (tuple(v in first_reads for v in leaves), tuple(v in second_reads for v in leaves))
        first_operands = [*flat.constvars, *pick(fetched[0], leaves), *operands]
        second_operands = [*flat.constvars, *pick(fetched[1], leaves), *held_vars, *pick(saved, saved_vars), *residuals]
        halves = jx.run(first, first_operands, first_results), jx.run(second, second_operands, ct_leaves)
        return cls(fetched, saved, floats, len(ct_inputs), flat.consts, *halves)

    def inputs(
        self, full: Sequence[Any], held_inputs: Sequence[Any], saved: Sequence[Any], cotangents: Sequence[Any]
    ) -> "tuple[list[Any], WeightGradResiduals]":
        """Run the first half.

        Args:
          full: the whole leaves that it reads.
          held_inputs: the inputs of the forward that are held.
          saved: the saved values.
          cotangents: as for the whole backward.

        Returns:
          The cotangents of the active inputs, and the residuals for the second half.
        """
        results = self.run_first(*self.consts, *full, *held_inputs, *saved, *cotangents)
        return results[: self.num_active_inputs], WeightGradResiduals(results[self.num_active_inputs :], self)

    def weights(
        self,
        full: Sequence[Any],
        held_inputs: Sequence[Any],
        saved: Sequence[Any],
        residuals: "WeightGradResiduals",
    ) -> list[Any]:
        """Run the second half, with the saved values that it reads; return cotangents of leaves, None for integers."""
        grads = self.run_second(*self.consts, *full, *held_inputs, *saved, *residuals.values)
        return merge(self.floats, grads, [None] * len(self.floats))


def _without(eqns: Sequence[Any], excluded: Sequence[Any]) -> list[Any]:
    """Return the equations that are not among the excluded ones, by identity."""
    excluded_ids = set(map(id, excluded))
    return [eqn for eqn in eqns if id(eqn) not in excluded_ids]


def _choose_residuals(
    first: Sequence[Any], crossing: Sequence[Any], available: set[Any], weight_vars: set[Any]
) -> tuple[list[Any], list[Any]]:
    """Choose what the first half saves for the second.

    A value that follows from weights alone is not saved: the second half computes it from weights that it reads in any
    case, or from vectors, which cost little to fetch again.

    Args:
      first: the equations of the first half.
      crossing: the variables that the second half reads and does not define.
      available: the variables that the second half has without residuals, weights aside.
      weight_vars: the variables that follow from weights alone.

    Returns:
      The residuals, and the equations that the second half repeats to recompute `crossing` from them.
    """
    is_vector = lambda v: v.aval.size == max(v.aval.shape, default=1)
    readable = {v for v in weight_vars if v in {*crossing} or is_vector(v)}
    # All weights are barred as residuals. Only those that are fetched anyway, or are vectors, may be read instead.
    return residuals_to_save(first, crossing, available | readable, weight_vars, _is_cheap)


def _move_sums(first: Sequence[Any], second: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Move sums and elementwise equations to the first half if they need no other result of the second half.

    The residuals can then be these results, where they are smaller than their operands. Otherwise a recomputed layer
    would save two factors and not their product, and the gradient of a norm's scale would be saved for every row and
    not as one sum.
    """
    moved, remaining = list(first), []
    second_vars: set[Any] = set()  # defined by the remaining equations
    for eqn in second:
        # Equations stay in order, so that one pass finds all that can move.
        is_ready = not any(v in second_vars for v in eqn.invars if not jx.is_literal(v))
        if is_ready and not eqn.effects and (_is_cheap(eqn) or eqn.primitive.name == "reduce_sum"):
            moved.append(eqn)
        else:
            remaining.append(eqn)
            second_vars.update(eqn.outvars)
    return moved, remaining


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["halves"])
@dataclass(frozen=True)
class WeightGradResiduals:
    """The residuals that one run of a first half saved for the second half."""

    values: list[Any]
    halves: Halves


def pick(mask: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    """Return the values where the mask is true."""
    return [v for v, is_picked in zip(values, mask, strict=True) if is_picked]


def merge(mask: Sequence[bool], picked: Sequence[Any], defaults: Sequence[Any]) -> list[Any]:
    """Return the picked values where the mask is true, and `defaults` elsewhere; inverse of `pick`."""
    remaining = iter(picked)
    return [next(remaining) if is_picked else default for is_picked, default in zip(mask, defaults, strict=True)]
