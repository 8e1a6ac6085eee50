"""Static deadlock check: whether all ranks of a collective come to it, under control flow that depends on the rank.

Ranks run one program, and come to its collectives in the order in which it has them. They part where a condition, or
the number of a loop's iterations, is not the same on all of them: a pipeline's operations, rounds for tokens that
overflow. A collective that stands there must lie within ranks that take one way; else some wait in it for others, which
wait in their next one, or have ended: NCCL hangs, and XLA's CPU runtime ends the process.

    while kind == F:  (not the same over `pipe`)          all-to-all over `expert`: its ranks take one way
                                                          messages over `pipe`: some ranks never come

So of every value it is followed over which mesh axes it may differ: where it comes into `shard_map` by its spec; as its
operands do; `axis_index` over its axis; no longer over an axis over which it was summed or gathered.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ..program import jaxpr as jx
from ..program.collectives import PRIMITIVES, axes_of
from ..program.environment import through
from ..program.walk import propagate, visit
from .order import is_token

Axes = frozenset[str]
_NONE: Axes = frozenset()
_SAME_AFTER = ("all-reduce", "all-gather", "collective-broadcast")
_OWN_PART = {"axis_index": "axis_name", "tensor_take": "axis_name"}


def not_reached(jaxpr: Any, but: Iterable[str] = ()) -> list[str]:
    """Each collective that some of its ranks may not come to, or not as often: what it is, where ranks part, and the
    user's line.

    Args:
      jaxpr: a program with `shard_map`, as of `step.trace(batch)`.
      but: mesh axes that are left out.

    What is packed into one buffer with values that differ over an axis is taken to differ as well.
    """
    work = _Walk(but=frozenset(but))
    work.run(jaxpr, [_NONE] * len(jx.opened(jaxpr)[0].invars), _NONE)
    return list(work.found)


@dataclass
class _Walk:
    """One reading of a program; `axes` are those of the mesh that have more than one device, without those in `but`."""

    found: dict[str, None] = field(default_factory=dict)
    axes: Axes = _NONE
    but: Axes = _NONE
    done: dict[Any, tuple[Any, list[Axes]]] = field(default_factory=dict)

    def run(self, closed: Any, given: Sequence[Axes], parted: Axes) -> list[Axes]:
        """Over which axes the outputs of a program differ, whose inputs do over those `given`; ranks that differ along
        `parted` may not run it together.
        """
        key = (id(closed), tuple(given), parted)
        if key in self.done:
            return self.done[key][1]
        outs = through(closed, given, lambda eqn, ins: self.equation(eqn, ins, parted), _NONE)
        self.done[key] = closed, outs  # with the program, so that its id stays its own
        return outs

    def equation(self, eqn: Any, given: list[Axes], parted: Axes) -> list[Axes]:
        """Over which axes the results of one equation differ; collectives that not all ranks reach are noted."""
        name, every = eqn.primitive.name, _NONE.union(*given)
        if special := getattr(self, f"_{name}", None):
            return special(eqn, given, parted)
        if is_token(eqn):
            return [_NONE] * len(eqn.outvars)
        if name == "optimization_barrier":  # each output is one operand
            return given
        if name in _OWN_PART:
            return [every | self._named(eqn)] * len(eqn.outvars)
        if kind := PRIMITIVES.get(name.removesuffix("_start")):
            axes = self._named(eqn)
            if axes & parted:
                ranks = f"{kind} over {'+'.join(sorted(axes))}, where ranks of {'+'.join(sorted(axes & parted))} part"
                self.found[f"{ranks}, at {jx.where(eqn) or 'no line of the model'}"] = None
            same = kind in _SAME_AFTER and eqn.params.get("axis_index_groups") is None
            return [x - axes if same else x | axes for x in (given if len(given) == len(eqn.outvars) else [every])]
        sent = {_sent(branch) for branch in eqn.params["branches"]} if name == "cond" else {None}
        alike = len(sent) == 1 and None not in sent  # branches that send the same need not be taken by all

        def run(jaxpr: Any, given: list[Axes], decides: Axes | None) -> list[Axes]:
            return self.run(jaxpr, given, parted if alike or decides is None else parted | decides)

        return propagate(eqn, given, run, frozenset.union, every) or [every] * len(eqn.outvars)

    def _named(self, eqn: Any) -> Axes:
        return self.axes.intersection(axes_of(eqn))

    def _shard_map(self, eqn: Any, given: list[Axes], parted: Axes) -> list[Axes]:
        several = frozenset(axis for axis, n in eqn.params["mesh"].shape.items() if n > 1)
        inside = _Walk(self.found, several - self.but)
        specs = jax.tree.leaves(eqn.params["in_specs"], is_leaf=lambda x: isinstance(x, PartitionSpec))
        named = lambda spec: {axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())}
        inside.run(eqn.params["jaxpr"], [inside.axes & named(spec) for spec in specs], _NONE)
        return [_NONE] * len(eqn.outvars)


def _sent(closed: Any) -> tuple[Any, ...] | None:
    """The collectives of a program in order, with their loops; None where only running tells their number."""
    found: list[Any] = []
    for eqn, times in visit(jx.opened(closed)[0].eqns):
        name = eqn.primitive.name
        if name in PRIMITIVES:
            found.append((times, name, str(eqn.params), *(str(v.aval) for v in eqn.invars)))
        elif jx.communicates([eqn], PRIMITIVES):
            if name in ("while", "cond"):
                return None
            found.append((times, name, eqn.params.get("length")))
    return tuple(found)
