"""Choose the values that a forward saves for its backward: products and sums are saved, elementwise values recomputed.

JAX's derivatives save every operand that they read. For `silu(x W) * (x V)` they save six arrays, which all follow
element by element from the two products:

    a = x W        saved                   b = x V      saved
    s = silu(a)    recomputed from a       y = s * b    recomputed from a and b

For a norm they save the input three times. These arrays are most of a layer's activations. Writing and reading them
takes longer than computing them again, since compilers fuse such operations with their readers. Korthikanti et al. 2022
(arXiv:2205.05198, section 4.1) count what operators with hand-written backwards save.

Recomputation goes on: where operands are smaller than a result, the operands are saved instead, or their operands.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import jaxpr as jx
from . import primitives
from .savings import marked


def cheap(eqn: Any) -> bool:
    """Return whether an equation is elementwise or moves elements: no sum, matrix product or random number."""
    return primitives.of(eqn).cheap


class Kept(NamedTuple):
    """The choice of saved values.

    Attributes:
      values: the variables that the forward saves.
      host: whether each of them waits in the host's memory.
      again: the equations that recompute everything else that the backward reads.
    """

    values: list[Any]
    host: list[bool]
    again: list[Any]


@dataclass(frozen=True, eq=False)
class Residuals:
    """The values of a forward that its backward reads, and which of them are saved.

    Attributes:
      eqns: the forward's equations.
      inputs: its inputs, without constants.
      read: the variables that the backward reads.
      known_vars: the variables that the backward has in any case.
      weights: the variables that the backward has if it fetches them; recomputed equations may read any of them.
      saved: the variables that `residuals_to_save` chooses.
    """

    eqns: Sequence[Any]
    inputs: Collection[Any]
    read: Sequence[Any]
    known_vars: Collection[Any]
    weights: Collection[Any]
    saved: Sequence[Any]

    @functools.cached_property
    def values(self) -> list[Any]:
        """The arrays for which there is a choice: `saved`, and the inputs from which these can be recomputed.

        Values that follow from constants alone are left out: whether they are known depends on who traces.
        """
        varies = {*self.inputs, *jx.depends(self.eqns, self.inputs)}
        optional = [v for v in self.saved if v in varies and v.aval.ndim > 0]
        return list(dict.fromkeys([*optional, *self._to_save(optional)[len(self.saved) - len(optional) :]]))

    def _to_save(self, recompute: Collection[Any]) -> list[Any]:
        """Return the variables to save if some of `saved` are recomputed instead.

        The last ones are those that recomputation needs in addition: inputs, and results of equations with effects.
        """
        if not recompute:
            return list(self.saved)
        available, recompute = {*self.known_vars, *self.weights}, {*recompute}
        saved = [v for v in self.saved if v not in recompute]
        # Results of equations with effects are saved rather than computed twice.
        effects = {v for eqn in self.eqns if _has_effects(eqn) for v in eqn.outvars}
        eqns = jx.needed(self.eqns, self.read, {*saved, *available, *effects})
        return [*saved, *(v for v in jx.free(eqns, self.read) if v not in available and v not in saved)]

    def kept(self, choice: str) -> Kept:
        """Return what a choice saves, and where.

        Args:
          choice: a letter for each of `values`, or one for all: "s", saved; "h", sent to the host; "r", recomputed if
            it can be.
        """
        # One letter stands for all values.
        letters = choice * len(self.values) if len(choice) == 1 else choice
        choices = dict(zip(self.values, letters, strict=True))
        recompute = [v for v in self.saved if choices.get(v) == "r"]
        # Weights are fetched for recomputation only.
        saved, known_vars = self._to_save(recompute), {*self.known_vars, *(self.weights if recompute else ())}
        host = [choices.get(v) == "h" for v in saved]
        return Kept(saved, host, jx.needed(self.eqns, self.read, {*saved, *known_vars}))


def _has_effects(eqn: Any) -> bool:
    """Return whether an equation may not run twice: it prints or calls back."""
    # That a collective names an axis is an effect in JAX, too, but one that may happen twice.
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def allowed(
    eqns: Sequence[Any], residuals: Sequence[Any], known_vars: Collection[Any], policy: Callable[..., Any]
) -> list[Any]:
    """Return the variables to save under a policy, as `jax.checkpoint` takes it.

    Args:
      eqns: the forward's equations.
      residuals: the variables that the backward reads.
      known_vars: the variables that the backward has in any case.

    Raises:
      ValueError: if the policy offloads a value; the strategy's `offload` does that.
    """

    def saves(eqn: Any) -> bool:
        # A policy returns a bool, or one of JAX's three cases: `Saveable`, `Recompute` and `Offloadable`.
        case = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
        # `Offloadable` names a memory.
        if hasattr(case, "dst"):
            raise ValueError(
                f"remat is a policy that sends the results of {eqn.primitive} to {case.dst!r}, and jaxpar sends values "
                "to the host by offload alone; give a policy that saves them, such as "
                "jax.checkpoint_policies.save_only_these_names, and offload='activations'"
            )
        return case if isinstance(case, bool) else "Saveable" in type(case).__name__

    available = {*known_vars, *(v for eqn in eqns if _has_effects(eqn) or saves(eqn) for v in eqn.outvars)}
    return jx.free(jx.needed(eqns, residuals, available), residuals)


def residuals_to_save(
    eqns: Sequence[Any],
    residuals: Iterable[Any],
    known_vars: Collection[Any],
    barred: Collection[Any],
    cheap: Callable[[Any], bool] = cheap,
) -> tuple[list[Any], list[Any]]:
    """Choose which of the variables that a backward reads are saved.

    If a value follows from others that are smaller together, these are saved instead: the bfloat16 value behind a
    float32 cast, or a mean.

    Args:
      eqns: the forward's equations.
      residuals: the variables that the backward reads.
      known_vars: variables that the backward has in any case.
      barred: variables that may not be saved instead of others.
      cheap: returns whether an equation may run again.

    Returns:
      The variables to save, and the equations that recompute the others from them.
    """
    barred, residuals = set(barred), list(residuals)
    # JAX wraps a literal of a derivative, such as the 1 in that of tanh, in `reshard`.
    may_rerun = lambda eqn: cheap(eqn) or (eqn.primitive.name == "reshard" and jx.is_literal(eqn.invars[0]))
    cheap_eqn_of = {v: eqn for eqn in eqns if may_rerun(eqn) and not eqn.effects for v in eqn.outvars}
    # The variables that follow from literals alone. If layers saved them, each would write and read them.
    constants: set[Any] = set()
    for eqn in eqns:
        if all(jx.is_literal(v) or v in constants for v in eqn.invars):
            constants.update(v for v in eqn.outvars if v in cheap_eqn_of)
    known_vars = constants.union(known_vars)
    saved_vars = dict.fromkeys(v for v in residuals if not jx.is_literal(v) and v not in known_vars)
    # From last to first, so that the operands that are saved instead of a result are considered in their turn.
    for eqn in reversed(eqns):
        for result in (v for v in eqn.outvars if v in saved_vars and v in cheap_eqn_of):
            replacement = _smaller_sources(result, cheap_eqn_of, lambda v: v in known_vars or v in saved_vars, barred)
            if replacement is not None:
                del saved_vars[result]
                saved_vars.update(replacement)
    return list(saved_vars), jx.needed(eqns, residuals, {*saved_vars, *known_vars} - constants)


def row_scales(eqns: Sequence[Any]) -> set[Any]:
    """Return the sums over the last dim that only scale rows: the sum of squares in an RMS norm.

        r = rsqrt(sum x^2 / D + eps)        y = x r        backward: d r = sum dy x

    The backward reads x for its own sum, and computes both sums in one pass. If nothing else reads r, XLA computes the
    whole norm in one kernel, which reads x once (H200 program, jax 0.10.2). If r is saved, XLA reads x twice.

    A mean m that is subtracted is not such a sum: `sum dy (x - m)` needs m first, and so another pass over x.
    """
    readers = jx.readers(eqns)
    only_scale: set[Any] = set()

    def scales(eqn: Any, var: Any) -> bool:
        if len(eqn.outvars) != 1:  # a callback has no result
            return False
        result = eqn.outvars[0]
        if result.aval.size == var.aval.size:  # a function of it, for each row
            return cheap(eqn) and result in only_scale
        products = readers.get(result, ()) if eqn.primitive.name == "broadcast_in_dim" else [eqn]
        return all(product.primitive.name == "mul" for product in products)

    # From last to first, so that the functions of a variable come before it.
    for eqn in reversed(eqns):
        only_scale.update(v for v in eqn.outvars if all(scales(reader, v) for reader in readers.get(v, ())))
    sums = (eqn for eqn in eqns if eqn.primitive.name == "reduce_sum" and eqn.outvars[0].aval.ndim)
    return {eqn.outvars[0] for eqn in sums if eqn.params["axes"] == (eqn.invars[0].aval.ndim - 1,)} & only_scale


def mark_row_sums(eqns: Sequence[Any], scales: set[Any]) -> list[Any]:
    """Return a backward's equations with marks on row sums, each of which saves a read of its rows (`savings.py`).

    A layer norm's variance gets no mark. Its scale follows from the mean too, so that XLA reads the rows twice anyway.

    Args:
      eqns: the equations that recompute values.
      scales: the result of `row_scales`.
    """

    def with_mark(eqn: Any) -> Any:
        if scales.isdisjoint(eqn.outvars):
            return eqn
        # 1. The values with one number per row that follow from the sum.
        (row_sum,) = eqn.outvars
        row_values = [v for v in jx.depends(eqns, [row_sum]) if v.aval.size == row_sum.aval.size]
        # 2. The arrays from which they are computed. XLA reads the rows once if there are no others.
        sources = [v for v in jx.free(jx.needed(eqns, row_values)) if v.aval.size > 1]
        return marked(eqn, "row_sums", jx.nbytes(sources[0])) if len(sources) == 1 else eqn

    return [with_mark(eqn) for eqn in eqns]


def _smaller_sources(
    result: Any, cheap_eqn_of: dict[Any, Any], available: Callable[[Any], bool], barred: Collection[Any]
) -> dict[Any, None] | None:
    """Return the smallest variables from which `result` can be recomputed; None if none are smaller than it.

    They are its operands, or the operands of these, and so on. Variables that are `available` cost nothing.

    Args:
      result: the variable to recompute.
      cheap_eqn_of: the equation of each variable that can be recomputed.
      available: returns whether the backward has a variable.
      barred: variables that may not be saved.
    """
    operands = lambda var: {v: None for v in cheap_eqn_of[var].invars if not jx.is_literal(v) and not available(v)}
    best, best_size = None, jx.nbytes(result)
    # Each iteration replaces all variables of the cut that can be recomputed by their operands.
    cut = operands(result)
    while True:
        size = sum(map(jx.nbytes, cut))
        if size < best_size and not any(v in barred for v in cut):
            best, best_size = cut, size
        if not any(v in cheap_eqn_of for v in cut):
            return best
        cut = {w: None for v in cut for w in (operands(v) if v in cheap_eqn_of else (v,))}
