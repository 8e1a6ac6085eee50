"""The loss of several groups of rows as one program, whose layers run side by side.

While a rank waits for a collective of one group of rows, it can compute another group. So the equations of the groups
stand next to each other in the program, and the groups alternate in sending (Wang et al. 2024, "Domino: eliminating
communication in LLM training via generic tensor slicing and overlapping", section 3.2, on rows):

    group 1    compute | gather  | compute | scatter | compute
    group 2              compute | gather  | compute | scatter | compute

A value that depends on parameters alone is computed once. So a layer is fetched once for all groups, and its gradients
are added up before they are given. Mathematically the groups are microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..program import jaxpr as jx
from ..program.collectives import PRIMITIVES
from ..program.environment import through
from ..program.primitives import PRODUCTS
from ..program.walk import propagate
from .iteration import hold

_COMBINED = ("all-gather", "all-reduce", "reduce-scatter")  # XLA may combine several of one kind into one


class _PerGroup(tuple[Any, ...]):
    """The values of one variable in all groups; empty for a variable whose equation has not run yet."""


jax.tree_util.register_pytree_node(_PerGroup, lambda x: (tuple(x), None), lambda _, items: _PerGroup(items))


def side_by_side(flat: jx.Flat, shared: int, sums: int, groups: int, axes: Mapping[str, int]) -> jx.Flat:
    """Return the program of several groups of rows.

    Args:
      flat: the program of one group.
      shared: the number of inputs, the first ones, that are the same for all groups. Each later input becomes one input
        for each group.
      sums: the number of outputs, the first ones, that are added up over the groups.
      groups: their number.
      axes: mesh axes that the program may name, name -> size.

    Raises:
      ValueError: another output depends on the group.
    """

    def combined(*values: Any) -> list[Any]:
        grouped = [_PerGroup(values[i : i + groups]) for i in range(shared, len(values), groups)]
        outputs = _run(flat, [*values[:shared], *grouped], groups)
        if any(isinstance(x, _PerGroup) for x in outputs[sums:]):
            raise ValueError(
                f"concurrent={groups} runs {groups} microbatches at once, and the loss passes variables, such as "
                "BatchNorm's running statistics, from one to the next; leave concurrent out"
            )
        # An output that does not depend on the group counts once for each group, as it would in each microbatch.
        # Not `sum(x)`, which would begin with 0 and add one equation more.
        add = lambda x: sum(x[1:], x[0]) if isinstance(x, _PerGroup) else x * groups
        return [add(x) for x in outputs[:sums]] + outputs[sums:]

    abstract = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in flat.invars]
    grouped_args = (x for x in abstract[shared:] for _ in range(groups))
    return jx.trace(combined, *abstract[:shared], *grouped_args, axes=dict(axes))[0]


def _run(program: Any, values: Sequence[Any], groups: int, is_layer: bool = False) -> list[Any]:
    """Run a program on values, where some are `_PerGroup`.

    Equations without such values run once. The others are collected until the next scan, and then run for all groups,
    so that `_compute_groups` can choose their order.
    """
    env = jx.Environment.of(program, values)
    jaxpr, _ = jx.opened(program)
    pending: list[Any] = []  # equations that run for each group
    for eqn in jaxpr.eqns:
        if not any(isinstance(x, _PerGroup) for x in env.read(eqn.invars)):
            env.compute(eqn)
        elif eqn.primitive.name == "scan":
            # The scan needs the values of its operands now.
            _compute_groups(pending, env, groups, is_layer)
            pending.clear()
            env.compute(eqn, lambda eqn, inputs: _scan(eqn, inputs, groups))
        else:
            # The mark tells later equations that their operand differs between groups.
            pending.append(eqn)
            env.update((v, _PerGroup()) for v in eqn.outvars)
    _compute_groups(pending, env, groups, is_layer)
    return env.read(jaxpr.outvars)


def _compute(eqns: Sequence[Any], env: jx.Environment[Any]) -> None:
    """Run equations in an environment."""
    for eqn in eqns:
        env.compute(eqn)


def _compute_groups(eqns: Sequence[Any], env: jx.Environment[Any], groups: int, is_layer: bool) -> None:
    """Run equations for each group; in a layer, the groups alternate at each collective.

    A group sends, then the previous group computes, and so on. What a group has received is held back until the next
    group's collective can start. Otherwise XLA combines the collectives of several groups into one, and no group
    computes meanwhile (jax 0.10.2). It does not combine all-to-alls.
    """
    # An empty `_PerGroup` stays: the equations below compute its values.
    value_of = lambda x, group: x[group] if isinstance(x, _PerGroup) and x else x
    envs = [jx.Environment({v: value_of(x, group) for v, x in env.items()}) for group in range(groups)]
    # The equations that the previous group computes next, and the variables that it has received.
    computes, arrived, previous = list[Any](), list[Any](), envs[-1]
    for sends, following in _phases(eqns) if is_layer else [([], eqns)]:
        for group_env in envs:
            if sends:
                hold(previous, filter(_is_float, arrived), group_env, filter(_is_float, sends[0].invars))
            # Send for this group, and compute for the previous one.
            _compute(sends, group_env)
            _compute(computes, previous)
            arrived = [v for eqn in sends if PRIMITIVES.get(eqn.primitive.name) in _COMBINED for v in eqn.outvars]
            computes, previous = following, group_env
    # The last group's computation has no collective to overlap with.
    _compute(computes, previous)
    env.update((v, _PerGroup(group_env[v] for group_env in envs)) for eqn in eqns for v in eqn.outvars)


def _is_float(v: Any) -> bool:
    """Whether an atom is a floating-point or complex variable."""
    return not jx.is_literal(v) and jnp.issubdtype(v.aval.dtype, jnp.inexact)


def _phases(eqns: Sequence[Any]) -> list[tuple[list[Any], list[Any]]]:
    """Split equations into phases: what a group sends, and what it computes until it sends a product's result."""
    phases: list[tuple[list[Any], list[Any]]] = [([], [])]
    for eqn in eqns:
        sends, computes = phases[-1]
        if PRIMITIVES.get(eqn.primitive.name) not in _COMBINED:
            computes.append(eqn)
        elif not sends or jx.communicates(computes, PRODUCTS):
            phases.append(([eqn], []))
        else:
            # Without a product since the last collective, there is nothing to overlap with: both are one phase.
            sends += [*computes, eqn]
            computes.clear()
    return phases


def _scan(eqn: Any, inputs: Sequence[Any], groups: int) -> list[Any]:
    """Run a scan on inputs, where some are `_PerGroup`, with all groups in its body."""
    parts = jx.scan_parts(eqn)
    n, k = len(parts.consts), len(parts.carry)
    varies = _varies(eqn, [isinstance(x, _PerGroup) for x in inputs])
    # A carry that differs between groups after a layer is one value for each group from the beginning.
    spread = lambda x, varies: x if isinstance(x, _PerGroup) or not varies else _PerGroup([x] * groups)

    def layer(program: Any, values: Sequence[Any], state: Any) -> tuple[Any, list[Any]]:
        outputs = _run(program, values, groups, is_layer=True)
        return state, list(map(spread, outputs, varies))

    return jx.rerun(eqn, [*inputs[:n], *map(spread, inputs[n : n + k], varies), *inputs[n + k :]], layer)[1]


def _varies(eqn: Any, inputs: list[bool]) -> list[bool]:
    """Return which results of an equation differ between groups, given which inputs do.

    For a call or a branch: all results, if any input differs. For a loop: the results that depend on such an input.
    """
    inside = lambda program, inputs, _: through(program, inputs, _varies, False)
    looped = propagate(eqn, inputs, inside, bool.__or__) if eqn.primitive.name == "scan" else None
    return looped or [any(inputs)] * len(eqn.outvars)
