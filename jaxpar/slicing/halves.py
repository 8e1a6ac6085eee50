"""A unit's backward as two programs: cotangents of its inputs first, those of its weights later (Qi et al. 2023, Zero
Bubble Pipeline Parallelism, section 2).

    whole      leaves, saved, cotangents -> cotangents of the leaves, and of the inputs
    inputs     leaves, saved, cotangents -> cotangents of the inputs, and what is left for the other half
    weights    leaves, saved, left       -> cotangents of the leaves

Both are cut from the equations of the whole. What both need, the first half computes and leaves behind; only what
follows element by element from the rest is computed again, as in `program/residuals.py`. Gradients that are sums
without a product, of scales and biases, come with the first half. A layer that is recomputed in its backward (`remat`)
is so in the first half alone, and then all that the second reads of it is left: of a decoder's layer about ten times
its input (Llama-3-8B on two tensor ranks: 319 MB of a layer and 4,096 tokens, its input 34 MB). With `remat="twice"`
the second recomputes it again, and only what follows from cotangents is left.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import jax
from jax.core import Tracer

from ..program import jaxpr as jx
from ..program.residuals import cheap, residuals_to_save


def _cheap(eqn: Any) -> bool:
    """An edge that is its operand too: what it sends it sends in its own backward."""
    return cheap(eqn) or eqn.primitive.name == "tensor_enter"


@dataclass(frozen=True, eq=False)
class Halves:
    """A backward's two halves.

    Attributes:
      fetched: which leaves the first half reads, and which the second.
      saved: which of the forward's saved values the second half reads as well; the others are free after the first.
      inputs: `inputs(fetched leaves, held inputs, saved, cotangents)`: cotangents of the linear inputs, what is left.
      weights: `weights(fetched leaves, held inputs, saved that it reads, left)`: cotangents of the leaves, None for
        integers.
    """

    fetched: tuple[tuple[bool, ...], tuple[bool, ...]]
    saved: tuple[bool, ...]
    inputs: "Callable[..., tuple[list[Any], WeightGradResiduals]]" = field(repr=False)
    weights: Callable[..., list[Any]] = field(repr=False)

    @classmethod
    def of(
        cls,
        flat: jx.Flat,
        eqns: Sequence[Any],
        floats: Sequence[bool],
        held: int,
        saved: int,
        cotangents: int,
        twice: bool = False,
    ) -> Self:
        """The halves of a whole backward.

        Its inputs are the leaves, and then so many `held` inputs, `saved` values and `cotangents`; its outputs are
        cotangents of those leaves that are `floats`, and then those of the linear inputs. `twice`: nothing that follows
        without cotangents is left, so that the second half computes it again.
        """
        assert not any(isinstance(x, Tracer) for x in flat.consts)
        n, w = len(floats), sum(floats)
        leaves, others = flat.invars[:n], flat.invars[n:]
        helds, values, cts = others[:held], others[held : held + saved], others[held + saved :]
        assert len(cts) == cotangents
        of_leaves, of_inputs = flat.outvars[:w], flat.outvars[w:]

        first = jx.needed(eqns, of_inputs)
        done = set(map(id, first))
        second = [eqn for eqn in jx.needed(eqns, of_leaves) if id(eqn) not in done]
        first, second = _moved(first, second)
        crossing = jx.free(second, of_leaves)
        # What follows from weights alone is no part of what is left: the second half makes it of weights that it reads
        # in any case, and of vectors, which cost little to fetch again. Nor is, if `twice`, what the forward has made.
        data = jx.depends(eqns, cts if twice else [*helds, *values, *cts])
        early = [eqn for eqn in eqns if not any(v in data for v in eqn.outvars)]
        alone = {*leaves, *(v for eqn in early for v in eqn.outvars)}
        there = {v for v in alone if v in {*crossing} or v.aval.size == max(v.aval.shape, default=1)}
        known = {*flat.constvars, *helds, *values, *there}
        keep, again = residuals_to_save(first, crossing, known, alone, _cheap)
        second = [*again, *second]
        early = jx.needed(early, jx.free(second, of_leaves))
        both = set(map(id, early))  # what both halves make
        second = [*early, *(eqn for eqn in second if id(eqn) not in both)]

        first = jx.live(first, [*of_inputs, *keep])
        reads = {*jx.free(second, of_leaves)}
        part = tuple(v in reads for v in values)
        used = ({*jx.free(first, [*of_inputs, *keep])}, reads)
        fetched = tuple(tuple(v in some for v in leaves) for some in used)
        run_first = jx.run(
            first, [*flat.constvars, *pick(fetched[0], leaves), *helds, *values, *cts], [*of_inputs, *keep]
        )
        run_second = jx.run(
            second, [*flat.constvars, *pick(fetched[1], leaves), *helds, *pick(part, values), *keep], of_leaves
        )

        def inputs(full: Sequence[Any], held: Sequence[Any], saved: Sequence[Any], cotangents: Sequence[Any]) -> Any:
            outs = run_first(*flat.consts, *full, *held, *saved, *cotangents)
            return outs[: len(of_inputs)], WeightGradResiduals(outs[len(of_inputs) :], halves)

        def weights(
            full: Sequence[Any], held: Sequence[Any], saved: Sequence[Any], left: WeightGradResiduals
        ) -> list[Any]:
            outs = run_second(*flat.consts, *full, *held, *saved, *left.values)
            return merge(floats, outs, [None] * n)

        halves = cls((fetched[0], fetched[1]), part, inputs, weights)
        return halves


def _moved(first: Sequence[Any], second: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Both halves, after equations of the second that need none of its results have moved to the first: sums, and
    what is computed element by element.

    The first half can then leave their results where these are smaller than their operands. Without it, a layer that
    is recomputed would leave two factors in place of their product, and the gradient of a norm's scale would be left
    for every row, not as one sum.
    """
    moved, stay = list(first), []
    later: set[Any] = set()
    for eqn in second:
        there = not any(v in later for v in eqn.invars if not jx.is_literal(v))
        if there and not eqn.effects and (_cheap(eqn) or eqn.primitive.name == "reduce_sum"):
            moved.append(eqn)
        else:
            stay.append(eqn)
            later.update(eqn.outvars)
    return moved, stay


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["halves"])
@dataclass(frozen=True)
class WeightGradResiduals:
    """What one run of a first half left for the second."""

    values: list[Any]
    halves: Halves


def pick(mask: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    """The values where the mask is true."""
    return [v for v, take in zip(values, mask, strict=True) if take]


def merge(mask: Sequence[bool], picked: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """The picked values where the mask is true, elsewhere those of `others`."""
    it = iter(picked)
    return [next(it) if take else other for take, other in zip(mask, others, strict=True)]
