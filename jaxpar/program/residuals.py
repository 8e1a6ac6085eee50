"""Which values a forward saves for its backward: products and sums are kept, elementwise values rematerialised.

JAX's derivatives save every operand that they read. Of `silu(x W) * (x V)` that is six arrays, which all follow,
element by element, from the two products; of a norm it is the input, three times. They are most of a layer's
activations, and to write and read them takes longer than to compute them again, since compilers fuse such operations
with what reads them. What operators with backwards of their own save is counted by Korthikanti et al. 2022,
arXiv:2205.05198, section 4.1.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import jaxpr as jx
from . import primitives


def cheap(eqn: Any) -> bool:
    """Whether it is elementwise or moves elements: no sum, no product of matrices, no random numbers."""
    return primitives.of(eqn).cheap


class Kept(NamedTuple):
    """Variables that a forward keeps, whether each waits on the host, and the equations that make of them, and of what
    is there anyway, all that the backward reads.
    """

    values: list[Any]
    host: list[bool]
    again: list[Any]


@dataclass(frozen=True, eq=False)
class Residuals:
    """What a backward reads of its forward, and what is kept of that.

    Attributes:
      eqns: the forward's equations.
      inputs: its inputs, without constants.
      read: the variables that the backward reads.
      known: those that are there anyway.
      weights: those that are there if the backward fetches them; what is computed again may read any.
      saved: those that `residuals_to_save` keeps.
    """

    eqns: Sequence[Any]
    inputs: Collection[Any]
    read: Sequence[Any]
    known: Collection[Any]
    weights: Collection[Any]
    saved: Sequence[Any]

    @functools.cached_property
    def values(self) -> list[Any]:
        """Arrays that have a choice: `saved`, and inputs of which these can be computed again. Not what follows from
        constants alone, which are known or not depending on who traces.
        """
        varies = {*self.inputs, *jx.depends(self.eqns, self.inputs)}
        chosen = [v for v in self.saved if v in varies and v.aval.ndim > 0]
        return list(dict.fromkeys([*chosen, *self._keep(chosen)[len(self.saved) - len(chosen) :]]))

    def _keep(self, again: Collection[Any]) -> list[Any]:
        """What is kept where some of `saved` are computed `again`, and last what these need besides: inputs, and what
        equations with effects return.
        """
        if not again:
            return list(self.saved)
        there, again = {*self.known, *self.weights}, {*again}
        keep = [v for v in self.saved if v not in again]
        effects = {v for eqn in self.eqns if _acts(eqn) for v in eqn.outvars}
        eqns = jx.needed(self.eqns, self.read, {*keep, *there, *effects})
        return [*keep, *(v for v in jx.free(eqns, self.read) if v not in there and v not in keep)]

    def kept(self, choice: str) -> Kept:
        """What is kept where a letter of `choice` for each of `values`, or one for all, says what becomes of it: "s",
        saved; "h", sent to the host; "r", computed again where it can be.
        """
        letters = choice * len(self.values) if len(choice) == 1 else choice
        choices = dict(zip(self.values, letters, strict=True))
        again = [v for v in self.saved if choices.get(v) == "r"]
        keep, known = self._keep(again), {*self.known, *(self.weights if again else ())}
        host = [choices.get(v) == "h" for v in keep]
        return Kept(keep, host, jx.needed(self.eqns, self.read, {*keep, *known}))


def _acts(eqn: Any) -> bool:
    """Whether it may not run twice: it prints, or calls back. That a collective names an axis is no such effect."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def allowed(
    eqns: Sequence[Any], residuals: Sequence[Any], known: Collection[Any], policy: Callable[..., Any]
) -> list[Any]:
    """What is kept under a policy, as `jax.checkpoint` takes it: the backward's residuals can be computed again of this
    and of what is known.
    """

    def saves(eqn: Any) -> bool:  # a policy answers with a bool, or with one of JAX's three cases
        case = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
        if hasattr(case, "dst"):  # of the three, the one that offloads
            raise ValueError(
                f"remat is a policy that sends what {eqn.primitive} makes to {case.dst!r}; give one that saves it, as "
                "jax.checkpoint_policies.save_only_these_names, and offload='activations'"
            )
        return case if isinstance(case, bool) else "Saveable" in type(case).__name__

    there = {*known, *(v for eqn in eqns if _acts(eqn) or saves(eqn) for v in eqn.outvars)}
    return jx.free(jx.needed(eqns, residuals, there), residuals)


def residuals_to_save(
    eqns: Sequence[Any],
    residuals: Iterable[Any],
    known: Collection[Any],
    barred: Collection[Any],
    cheap: Callable[[Any], bool] = cheap,
) -> tuple[list[Any], list[Any]]:
    """Of the variables that a backward reads, those to keep; and the equations that make the others of these.

    `known` variables are there anyway. Where a value follows from others that are smaller together, these are kept in
    its place (the bfloat16 of which it is the float32, and a mean), unless one is `barred`. `cheap` equations may
    run again.
    """
    known, barred = set(known), set(barred)
    made = {v: eqn for eqn in eqns if cheap(eqn) and not eqn.effects for v in eqn.outvars}
    residuals = list(residuals)
    keep = dict.fromkeys(v for v in residuals if not jx.is_literal(v) and v not in known)
    for eqn in reversed(eqns):
        for result in (v for v in eqn.outvars if v in keep and v in made):
            needed = _instead(result, made, lambda v: v in known or v in keep, barred)
            if needed is not None:
                del keep[result]
                keep.update(needed)
    return list(keep), jx.needed(eqns, residuals, {*keep, *known})


def _instead(
    result: Any, made: dict[Any, Any], there: Callable[[Any], bool], barred: Collection[Any]
) -> dict[Any, None] | None:
    """What to keep in place of `result`, beside what is `there`, for it to be computed again: its operands, or theirs,
    and so on, whichever are smallest; None where none are smaller.
    """
    operands = lambda var: {v: None for v in made[var].invars if not jx.is_literal(v) and not there(v)}
    best, least = None, jx.nbytes(result)
    cut = operands(result)
    while True:
        size = sum(map(jx.nbytes, cut))
        if size < least and not any(v in barred for v in cut):
            best, least = cut, size
        if not any(v in made for v in cut):
            return best
        cut = {w: None for v in cut for w in (operands(v) if v in made else (v,))}
