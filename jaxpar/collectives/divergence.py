"""Static deadlock check: find collectives that some of their ranks never reach, under rank-dependent control flow.

Ranks run one program, and reach its collectives in the program's order. They diverge at a condition, or at the number
of a loop's iterations, that is not the same on all of them: a pipeline's operations, rounds for tokens that overflow. A
collective there must run over ranks that take the same way. Otherwise some wait in it for others, which wait in their
next collective, or have ended. Then NCCL hangs, and XLA's CPU runtime ends the process.

    while kind == F:  (differs over `pipe`)      all-to-all over `expert`: its ranks take the same way
                                                 messages over `pipe`: some ranks never come

So the check computes, for every value, the mesh axes over which it may differ:

    input of `shard_map`       the axes in its spec
    axis_index                 its axis
    all-reduce, all-gather     the operand's axes, without those of the collective
    other collectives          the operand's axes and those of the collective
    any other equation         the axes of all operands
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
_NO_AXES: Axes = frozenset()
# Collectives with the same result on all of their ranks.
_REPLICATING = ("all-reduce", "all-gather", "collective-broadcast")
# Primitives whose result is a rank's own part. Both name their axis `axis_name`.
_RANK_DEPENDENT = {"axis_index", "tensor_take"}


def not_reached(jaxpr: Any, but: Iterable[str] = ()) -> list[str]:
    """Describe each collective that some of its ranks may not reach, or not equally often.

    Values that are packed into one buffer with values that differ over an axis count as different too.

    Args:
      jaxpr: a program with `shard_map`, such as `step.trace(batch)`.
      but: mesh axes to leave out.

    Returns:
      For each collective its kind and axes, the axes along which ranks diverge, and the user's line.
    """
    walk = _Walk(ignored_axes=frozenset(but))
    walk.program(jaxpr, [_NO_AXES] * len(jx.opened(jaxpr)[0].invars), _NO_AXES)
    return list(walk.findings)


@dataclass
class _Walk:
    """One walk through a program.

    Attributes:
      findings: descriptions of collectives that ranks may not reach, as keys in the order of the program.
      axes: mesh axes with more than one device, without `ignored_axes`; empty outside of `shard_map`.
      ignored_axes: axes to leave out.
      cache: (id of a program, input axes, divergent axes) -> (program, output axes).
    """

    findings: dict[str, None] = field(default_factory=dict)
    axes: Axes = _NO_AXES
    ignored_axes: Axes = _NO_AXES
    cache: dict[Any, tuple[Any, list[Axes]]] = field(default_factory=dict)

    def program(self, closed: Any, input_axes: Sequence[Axes], divergent_axes: Axes) -> list[Axes]:
        """Return the axes over which a program's outputs differ, from the axes over which its inputs differ.

        Some ranks along `divergent_axes` may not run this program.
        """
        # One program may be called many times, and a loop's body once more for each turn of its fixpoint.
        key = (id(closed), tuple(input_axes), divergent_axes)
        if key in self.cache:
            return self.cache[key][1]
        output_axes = through(
            closed, input_axes, lambda eqn, operand_axes: self.equation(eqn, operand_axes, divergent_axes), _NO_AXES
        )
        self.cache[key] = closed, output_axes  # holds the program, so that no other program gets its id
        return output_axes

    def equation(self, eqn: Any, operand_axes: list[Axes], divergent_axes: Axes) -> list[Axes]:
        """Return the axes over which an equation's results differ; note collectives that not all ranks reach."""
        name, all_operand_axes = eqn.primitive.name, _NO_AXES.union(*operand_axes)
        if name == "shard_map":
            return self._shard_map(eqn)
        if is_token(eqn):  # always zero
            return [_NO_AXES] * len(eqn.outvars)
        if name == "optimization_barrier":  # each output is one operand
            return operand_axes
        if name in _RANK_DEPENDENT:
            return [all_operand_axes | self._axes_of(eqn)] * len(eqn.outvars)
        if kind := PRIMITIVES.get(name.removesuffix("_start")):
            axes = self._axes_of(eqn)
            if axes & divergent_axes:
                divergence = f"where ranks of {'+'.join(sorted(axes & divergent_axes))} diverge"
                line = jx.where(eqn) or "no line of the model"
                self.findings[f"{kind} over {'+'.join(sorted(axes))}, {divergence}, at {line}"] = None
            # With groups, each group of ranks has its own result.
            is_replicating = kind in _REPLICATING and eqn.params.get("axis_index_groups") is None
            # A collective of several operands has one result for each. Otherwise all operands reach its only result.
            by_output = operand_axes if len(operand_axes) == len(eqn.outvars) else [all_operand_axes]
            return [differing - axes if is_replicating else differing | axes for differing in by_output]
        # If all branches of a conditional send the same, ranks that take different branches still meet.
        branches = {_communication(branch) for branch in eqn.params["branches"]} if name == "cond" else {None}
        branches_agree = len(branches) == 1 and None not in branches

        def walk_inner(jaxpr: Any, input_axes: list[Axes], predicate_axes: Axes | None) -> list[Axes]:
            if branches_agree or predicate_axes is None:
                return self.program(jaxpr, input_axes, divergent_axes)
            return self.program(jaxpr, input_axes, divergent_axes | predicate_axes)

        results = propagate(eqn, operand_axes, walk_inner, frozenset.union, all_operand_axes)
        return results or [all_operand_axes] * len(eqn.outvars)

    def _axes_of(self, eqn: Any) -> Axes:
        """Return the axes of a collective that matter: those with several devices that are not ignored."""
        return self.axes.intersection(axes_of(eqn))

    def _shard_map(self, eqn: Any) -> list[Axes]:
        """Walk through the program of a `shard_map`, whose results are global arrays and differ over no axis."""
        wide_axes = frozenset(axis for axis, size in eqn.params["mesh"].shape.items() if size > 1)
        inner = _Walk(self.findings, wide_axes - self.ignored_axes)
        specs = jax.tree.leaves(eqn.params["in_specs"], is_leaf=lambda x: isinstance(x, PartitionSpec))
        # An entry of a spec is one axis, a tuple of axes, or None.
        as_tuple = lambda entry: (entry,) if isinstance(entry, str) else entry or ()
        axes_in = lambda spec: {axis for entry in spec for axis in as_tuple(entry)}
        inner.program(eqn.params["jaxpr"], [inner.axes & axes_in(spec) for spec in specs], _NO_AXES)
        return [_NO_AXES] * len(eqn.outvars)


def _communication(closed: Any) -> tuple[Any, ...] | None:
    """Return the collectives of a program in order, with their loops; None if only a run tells their number."""
    communication: list[Any] = []
    for eqn, times in visit(jx.opened(closed)[0].eqns):
        name = eqn.primitive.name
        if name in PRIMITIVES:
            communication.append((times, name, str(eqn.params), *(str(v.aval) for v in eqn.invars)))
        # The programs of this equation communicate. A scan says how often they run; a while or a cond does not.
        elif jx.communicates([eqn], PRIMITIVES):
            if name in ("while", "cond"):
                return None
            communication.append((times, name, eqn.params.get("length")))
    return tuple(communication)
