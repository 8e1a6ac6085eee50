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
      inputs: `inputs(fetched leaves, held inputs, saved, cotangents)` returns the cotangents of the linear inputs, and
        the residuals for the second half.
      weights: `weights(fetched leaves, held inputs, saved values that it reads, residuals)` returns the cotangents of
        the leaves, None for integers.
    """

    fetched: tuple[tuple[bool, ...], tuple[bool, ...]]
    saved: tuple[bool, ...]
    inputs: "Callable[..., tuple[list[Any], WeightGradResiduals]]" = field(repr=False)
    weights: Callable[..., list[Any]] = field(repr=False)

    @classmethod
    def split(
        cls,
        flat: jx.Flat,
        eqns: Sequence[Any],
        floats: Sequence[bool],
        num_held: int,
        num_saved: int,
        num_cotangents: int,
        twice: bool = False,
    ) -> Self:
        """Split a whole backward into its halves.

        Args:
          flat: the backward. Its inputs are the leaves, the held inputs, the saved values and the cotangents. Its
            outputs are the cotangents of the leaves that are `floats`, and then of the linear inputs.
          eqns: its live equations.
          floats: which leaves are floating-point.
          num_held, num_saved, num_cotangents: the numbers of these inputs.
          twice: whether the second half recomputes everything that follows without cotangents.
        """
        assert not any(isinstance(x, Tracer) for x in flat.consts)
        num_leaves, num_floats = len(floats), sum(floats)
        leaves, operands = flat.invars[:num_leaves], flat.invars[num_leaves:]
        held_vars, saved_vars, cts = (
            operands[:num_held],
            operands[num_held : num_held + num_saved],
            operands[num_held + num_saved :],
        )
        assert len(cts) == num_cotangents
        ct_leaves, ct_inputs = flat.outvars[:num_floats], flat.outvars[num_floats:]

        # 1. Cut: the first half has what the inputs' cotangents need, the second what only the leaves' need.
        first = jx.needed(eqns, ct_inputs)
        first_ids = set(map(id, first))
        second = [eqn for eqn in jx.needed(eqns, ct_leaves) if id(eqn) not in first_ids]
        first, second = _move_sums(first, second)
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
        weight_ids = set(map(id, weight_eqns))
        second = [*weight_eqns, *(eqn for eqn in second if id(eqn) not in weight_ids)]
        first = jx.live(first, [*ct_inputs, *residuals])

        # 4. Find which leaves and saved values each half reads.
        second_reads = {*jx.free(second, ct_leaves)}
        saved_reads = tuple(v in second_reads for v in saved_vars)
        reads = ({*jx.free(first, [*ct_inputs, *residuals])}, second_reads)
        fetched = tuple(tuple(v in half_reads for v in leaves) for half_reads in reads)
        run_first = jx.run(
            first,
            [*flat.constvars, *pick(fetched[0], leaves), *held_vars, *saved_vars, *cts],
            [*ct_inputs, *residuals],
        )
        run_second = jx.run(
            second,
            [*flat.constvars, *pick(fetched[1], leaves), *held_vars, *pick(saved_reads, saved_vars), *residuals],
            ct_leaves,
        )

        def inputs(
            full: Sequence[Any], held_inputs: Sequence[Any], saved: Sequence[Any], cotangents: Sequence[Any]
        ) -> Any:
            outputs = run_first(*flat.consts, *full, *held_inputs, *saved, *cotangents)
            return outputs[: len(ct_inputs)], WeightGradResiduals(outputs[len(ct_inputs) :], halves)

        def weights(
            full: Sequence[Any], held_inputs: Sequence[Any], saved: Sequence[Any], residuals: WeightGradResiduals
        ) -> list[Any]:
            grads = run_second(*flat.consts, *full, *held_inputs, *saved, *residuals.values)
            return merge(floats, grads, [None] * num_leaves)

        halves = cls((fetched[0], fetched[1]), saved_reads, inputs, weights)
        return halves


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
