"""The loss of several groups of rows as one program, layer by layer side by side.

A rank that waits for a collective of one group of rows has another group to compute: their equations stand beside each
other, and take turns to send (Wang et al. 2024, "Domino: eliminating communication in LLM training via generic tensor
slicing and overlapping", section 3.2, on rows):

    group 1    compute | gather  | compute | scatter | compute
    group 2              compute | gather  | compute | scatter | compute

What depends on parameters alone is there once, so that a layer is fetched once for all of them, and its gradients are
added up before they are given. Mathematically the groups are microbatches.
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
from .loop import hold

_COMBINED = ("all-gather", "all-reduce", "reduce-scatter")  # XLA makes one of several


class _Each(tuple[Any, ...]):
    """A value of each group."""


jax.tree_util.register_pytree_node(_Each, lambda x: (tuple(x), None), lambda _, items: _Each(items))


def side_by_side(flat: jx.Flat, shared: int, sums: int, groups: int, axes: Mapping[str, int]) -> jx.Flat:
    """The program of several groups of rows.

    Args:
      flat: the program of one group.
      shared: so many of its inputs, the first, are the same for all; each other one becomes those of all groups.
      sums: so many of its outputs, the first, are added up. Raises ValueError where others depend on a group.
      groups: their number.
      axes: mesh axes that the program may name.
    """

    def run(*values: Any) -> list[Any]:
        each = [_Each(values[i : i + groups]) for i in range(shared, len(values), groups)]
        outs = _run(flat, [*values[:shared], *each], groups)
        if any(isinstance(x, _Each) for x in outs[sums:]):
            raise ValueError(
                f"concurrent={groups} runs {groups} microbatches at once, and the loss gives variables, as BatchNorm's "
                "running statistics, from one to the next; leave concurrent out"
            )
        add = lambda x: sum(x[1:], x[0]) if isinstance(x, _Each) else x * groups
        return [add(x) for x in outs[:sums]] + outs[sums:]

    abstract = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in flat.invars]
    return jx.trace(run, *abstract[:shared], *(x for x in abstract[shared:] for _ in range(groups)), axes=dict(axes))[0]


def _run(program: Any, values: Sequence[Any], groups: int, layer: bool = False) -> list[Any]:
    env = jx.Environment.of(program, values)
    jaxpr, _ = jx.opened(program)
    todo: list[Any] = []  # equations of each group
    for eqn in jaxpr.eqns:
        if not any(isinstance(x, _Each) for x in env.read(eqn.invars)):
            env.compute(eqn)
        elif eqn.primitive.name == "scan":
            _compute_each(todo, env, groups, layer)
            todo.clear()
            env.compute(eqn, lambda eqn, ins: _scan(eqn, ins, groups))
        else:
            todo.append(eqn)
            env.update((v, _Each()) for v in eqn.outvars)
    _compute_each(todo, env, groups, layer)
    return env.read(jaxpr.outvars)


def _compute(eqns: Sequence[Any], env: jx.Environment[Any]) -> None:
    for eqn in eqns:
        env.compute(eqn)


def _compute_each(eqns: Sequence[Any], env: jx.Environment[Any], groups: int, layer: bool) -> None:
    """Equations of each group: of a `layer` those of one until it has sent, then those of the next.

    Of what a group has received nothing is computed before what the next one sends can start. Else XLA makes one
    collective of what several send, beside which none of them computes (jax 0.10.2). All-to-alls it leaves apart.
    """
    own = lambda x, group: x[group] if isinstance(x, _Each) and x else x
    envs = [jx.Environment({v: own(x, group) for v, x in env.items()}) for group in range(groups)]
    computes, arrived, last = list[Any](), list[Any](), envs[-1]
    for sends, following in _phases(eqns) if layer else [([], eqns)]:
        for one in envs:
            if sends:
                hold(last, filter(_floats, arrived), one, filter(_floats, sends[0].invars))
            _compute(sends, one)
            _compute(computes, last)
            arrived = [v for eqn in sends if PRIMITIVES.get(eqn.primitive.name) in _COMBINED for v in eqn.outvars]
            computes, last = following, one
    _compute(computes, last)
    env.update((v, _Each(one[v] for one in envs)) for eqn in eqns for v in eqn.outvars)


def _floats(v: Any) -> bool:
    return not jx.is_literal(v) and jnp.issubdtype(v.aval.dtype, jnp.inexact)


def _phases(eqns: Sequence[Any]) -> list[tuple[list[Any], list[Any]]]:
    """What is sent, and what is then computed before there is more to send that follows from a product."""
    phases: list[tuple[list[Any], list[Any]]] = [([], [])]
    for eqn in eqns:
        sends, computes = phases[-1]
        if PRIMITIVES.get(eqn.primitive.name) not in _COMBINED:
            computes.append(eqn)
        elif not sends or jx.communicates(computes, PRODUCTS):
            phases.append(([eqn], []))
        else:
            sends += [*computes, eqn]
            computes.clear()
    return phases


def _scan(eqn: Any, ins: Sequence[Any], groups: int) -> list[Any]:
    parts = jx.scan_parts(eqn)
    n, k = len(parts.consts), len(parts.carry)
    apart = _apart(eqn, [isinstance(x, _Each) for x in ins])
    spread = lambda x, on: x if isinstance(x, _Each) or not on else _Each([x] * groups)

    def layer(program: Any, values: Sequence[Any], state: Any) -> tuple[Any, list[Any]]:
        outs = _run(program, values, groups, layer=True)
        return state, list(map(spread, outs, apart))

    return jx.rerun(eqn, [*ins[:n], *map(spread, ins[n : n + k], apart), *ins[n + k :]], layer)[1]


def _apart(eqn: Any, ins: list[bool]) -> list[bool]:
    """Which results of an equation differ from group to group: of a call or a branch all, of a loop those that do."""
    run = lambda program, ins, _: through(program, ins, _apart, False)
    looped = propagate(eqn, ins, run, bool.__or__) if eqn.primitive.name == "scan" else None
    return looped or [any(ins)] * len(eqn.outvars)
