"""Running statistics that change once a step, by those of all its microbatches: the deferred form of BatchNorm.

Kim et al. 2020 (torchgpipe, arXiv:2004.09910; its `DeferredBatchNorm`). Each microbatch is normalised by its own
statistics, and a step changes the running ones as a single update by the rows of all m microbatches would. With o the
running mean before the step, s the mean and v the variance of a microbatch, and the momentum r:

    mean   r o + (1 - r) E[s]                 summed as d/m, where d = (1 - r) (s - o) is what the update adds
    var    r var + (1 - r) (E[v] + Var[s])    and Var[s] (1 - r) = (E[d^2] - E[d]^2) / (1 - r)

So the loss's own update is read, and never written again: its program says r, and whether it is of this form.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..program import jaxpr as jx
from ..program import primitives
from .paths import name_of

_ARITHMETIC = {"add": operator.add, "sub": operator.sub, "gt": operator.gt, "convert_element_type": float}
_OPTION = "deferred_batch_norm=True"


@dataclass(frozen=True)
class Deferred:
    """A model's variables within a step.

    Attributes:
      variables: as they will be after it; running statistics have what the microbatches so far have added.
      before: running means and variances before the step, by the path of the mean.
      squares: what the microbatches so far have added to E[d^2], by the same.
    """

    variables: Any
    before: dict[str, tuple[jax.Array, jax.Array]]
    squares: dict[str, jax.Array]

    @classmethod
    def of(cls, variables: Any) -> Deferred:
        """Before the first microbatch. Raises ValueError where the model has no running statistics."""
        leaves = _named(variables)
        before = {mean: (leaves[mean], leaves[var]) for mean, var in _pairs(leaves).items()}
        if not before:
            raise ValueError(
                f"{_OPTION}: the model has no running statistics, no two variables side by side that are called mean "
                f"and var ({', '.join(leaves) or 'it has no variables'}); leave it out"
            )
        return cls(variables, before, {mean: jnp.zeros_like(old) for mean, (old, _) in before.items()})

    def reading(self) -> Any:
        """What a microbatch reads."""
        pairs = _pairs(_named(self.variables))
        old = {var: self.before[mean][1] for mean, var in pairs.items()}
        return _changed(self.variables, old | {mean: old for mean, (old, _) in self.before.items()})

    def settled(self, momenta: Mapping[str, float]) -> Any:
        """The variables after the last microbatch; `momenta` are of the running statistics that the loss changes."""
        leaves, new = _named(self.variables), dict[str, jax.Array]()
        for mean, var in _pairs(leaves).items():
            if mean in momenta:
                added = leaves[mean] - self.before[mean][0]
                between = jnp.maximum(self.squares[mean] - added**2, 0) / (1 - momenta[mean])
                new[var] = leaves[var] + between.astype(leaves[var].dtype)
        return _changed(self.variables, new)


jax.tree_util.register_dataclass(Deferred, [f.name for f in dataclasses.fields(Deferred)], [])


def _named(variables: Any) -> dict[str, Any]:
    return {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(variables)}


def _pairs(names: Mapping[str, Any]) -> dict[str, str]:
    """The variance beside each mean."""
    found = {name: name.removesuffix("mean") + "var" for name in names if name.endswith("mean")}
    return {mean: var for mean, var in found.items() if var in names}


def _changed(variables: Any, new: Mapping[str, Any]) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, x: new.get(name_of(path), x), variables)


def deferring(
    flat: jx.Flat, inputs: Any, outputs: Any, microbatches: int, axes: Mapping[str, int]
) -> tuple[jx.Flat, dict[str, float]]:
    """The program of a microbatch whose running statistics wait for the end of the step, and their momenta.

    Args:
      flat: one that reads `Deferred.reading()` and puts new values in place of `Deferred.variables`.
      inputs, outputs: positions of the leaves of a `Deferred` among the program's inputs and outputs.
      microbatches: of a step.
      axes: the mesh axes that the program may name, and their sizes.

    Raises ValueError where an update is not old * m + new * (1 - m) of a mean over rows and its variance.
    """
    ins, outs = _named(inputs.variables), _named(outputs.variables)
    outvars, behind, momenta = list(flat.outvars), dict[int, list[Any]](), {}
    homes = {v: at for at, eqn in enumerate(flat.eqns) for v in eqn.outvars}
    update = _Update(flat.eqns, axes)
    for mean, var in _pairs(ins).items():
        old = [flat.invars[at] for at in inputs.before[mean]]
        new = [flat.outvars[outs[name]] for name in (mean, var)]
        if all(n is o for n, o in zip(new, old, strict=True)):  # frozen
            continue
        momenta[mean] = update.momentum((mean, var), old, new)
        share = 1 / microbatches

        def step(new: Any, old: Any, sums: Any, share: float = share) -> list[jax.Array]:
            added = [n - o for n, o in zip(new, old, strict=True)]
            parts = (*added, added[0] ** 2)
            return [total + share * part for total, part in zip(sums, parts, strict=True)]

        sums = [flat.invars[at] for at in (ins[mean], ins[var], inputs.squares[mean])]
        avals = [[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in some] for some in (new, old, sums)]
        inner, _ = jx.trace(step, *avals)
        known = dict(zip(inner.invars, [*new, *old, *sums], strict=True))
        read = lambda v, known=known: v if jx.is_literal(v) else known.get(v, v)
        # Where its values are made: in a pipeline, in the stage that has them.
        behind.setdefault(max(homes[v] for v in new), []).extend(
            eqn.replace(invars=list(map(read, eqn.invars))) for eqn in inner.eqns
        )
        for at, v in zip((outs[mean], outs[var], outputs.squares[mean]), inner.outvars, strict=True):
            outvars[at] = v
    if not momenta:
        raise ValueError(f"{_OPTION}: the loss changes no running statistics; leave it out")
    eqns = [one for at, eqn in enumerate(flat.eqns) for one in (eqn, *behind.get(at, ()))]
    return dataclasses.replace(flat, eqns=tuple(eqns), outvars=tuple(outvars)), momenta


class _Update:
    """How a program changes a running statistic."""

    def __init__(self, eqns: Sequence[Any], axes: Mapping[str, int]):
        self.eqns, self.made, self.axes = eqns, {v: eqn for eqn in eqns for v in eqn.outvars}, axes

    def momentum(self, names: tuple[str, str], olds: Sequence[Any], news: Sequence[Any]) -> float:
        """That of a mean and its variance; raises ValueError where they have none, or another one each."""
        found = []
        for name, old, new in zip(names, olds, news, strict=True):
            self.old, self.reads = old, jx.depends(self.eqns, [old])
            terms = self._terms(new)
            kept, weights = (terms or {}).pop(old, None), list((terms or {}).items())
            if kept is None or len(weights) != 1 or not math.isclose(kept + weights[0][1], 1, abs_tol=1e-6):
                raise ValueError(
                    f"{_OPTION}: {name} is not changed as old * m + new * (1 - m), with a number m and once in a call "
                    "of the loss, outside of loops and jax.checkpoint, so that a step's microbatches cannot change it "
                    "as one; leave the option out"
                )
            value, weight = weights[0]
            if not math.isclose(self._mean(value) or 0, 1, rel_tol=1e-6) or (
                name == names[1] and not self._centred(value)
            ):
                what = "the variance" if name == names[1] else "the mean"
                raise ValueError(
                    f"{_OPTION}: {name} does not follow {what} of rows that count alike, divided by their number (a "
                    "mask, or a variance divided by one less, is none), so that what microbatches have does not make "
                    "that of the step; leave the option out"
                )
            found.append(1 - weight)
        if not math.isclose(*found, abs_tol=1e-6):
            raise ValueError(
                f"{_OPTION}: {' and '.join(names)} have different momenta, {found[0]:g} and {found[1]:g}; use one, or "
                "leave the option out"
            )
        return found[0]

    def _terms(self, v: Any) -> dict[Any, float] | None:
        """A sum of variables, times numbers; None if it is none."""
        if jx.is_literal(v):
            return None
        if v is self.old or v not in self.reads:
            eqn = self.made.get(v)
            if eqn is None or v is self.old or eqn.primitive.name not in ("mul", "neg"):
                return {v: 1.0}
        eqn = self.made[v]
        name, numbers = eqn.primitive.name, [self._number(x) for x in eqn.invars]
        if primitives.of(eqn).view and primitives.of(eqn).elementwise:
            return self._terms(eqn.invars[0])
        if name == "mul" and any(n is not None for n in numbers):
            by, of = (numbers[0], eqn.invars[1]) if numbers[0] is not None else (numbers[1], eqn.invars[0])
            terms = self._terms(of)
            return None if terms is None or by is None else {x: by * n for x, n in terms.items()}
        if name in primitives.SUMS:
            first, second = map(self._terms, eqn.invars)
            if first is None or second is None:
                return None
            sign = -1 if name == "sub" else 1
            return {x: first.get(x, 0) + sign * second.get(x, 0) for x in {**first, **second}}
        return None if v in self.reads else {v: 1.0}

    def _mean(self, v: Any) -> float | None:
        """The weight of all rows in a value that is a sum over rows, or of products of such: 1 of a mean; None where it
        is something else.
        """
        number, eqn = self._number(v), None if jx.is_literal(v) else self.made.get(v)
        if number is not None or eqn is None:
            return number
        name, ins = eqn.primitive.name, eqn.invars
        if name == "reduce_sum":
            return math.prod(ins[0].aval.shape) / math.prod(eqn.outvars[0].aval.shape)
        if name == "psum":
            over, weight = eqn.params["axes"], self._mean(ins[0])
            return None if weight is None else weight * math.prod(self.axes[axis] for axis in over)
        if name == "select_n" and (which := self._number(ins[0])) is not None:
            return self._mean(ins[1 + int(which)])
        weights = [self._mean(x) for x in ins if not (name == "max" and self._number(x) == 0)]
        if any(w is None for w in weights):
            return None
        known = [w for w in weights if w is not None]
        if name == "mul":
            return math.prod(known)
        if name == "div":
            return known[0] / known[1] if self._number(ins[1]) is not None else None
        if name in ("square", "integer_pow"):
            return known[0] ** eqn.params.get("y", 2)
        if _keeps(eqn) or name in ("sub", "add"):
            return known[0] if all(math.isclose(w, known[0], rel_tol=1e-6) for w in known) else None
        return None

    def _centred(self, v: Any, summed: bool = False) -> bool:
        """Whether a mean is of squares of what is left of values without their mean."""
        eqn = None if jx.is_literal(v) else self.made.get(v)
        if eqn is None or eqn.primitive.name == "sub":
            return eqn is not None
        name = eqn.primitive.name
        if name == "select_n" and (which := self._number(eqn.invars[0])) is not None:
            return self._centred(eqn.invars[1 + int(which)], summed)
        through = name in ("square", "integer_pow", "mul", "convert_element_type", "abs")
        if not through and (summed or (not _keeps(eqn) and name not in ("psum", "div", "reduce_sum"))):
            return False
        return any(self._centred(x, summed or name == "reduce_sum") for x in eqn.invars)

    def _number(self, v: Any) -> float | None:
        """That of a literal, or of arithmetic of such."""
        if jx.is_literal(v):
            return float(v.val) if getattr(v.val, "ndim", 0) == 0 else None
        eqn = None if v.aval.shape else self.made.get(v)
        known = [] if eqn is None or eqn.primitive.name not in _ARITHMETIC else list(map(self._number, eqn.invars))
        if eqn is None or not known or any(n is None for n in known):
            return None
        return float(_ARITHMETIC[eqn.primitive.name](*known))


def _keeps(eqn: Any) -> bool:
    """Whether an operation leaves a mean a mean."""
    known = primitives.of(eqn)
    return known.moves or known.view or eqn.primitive.name in ("abs", "max")
