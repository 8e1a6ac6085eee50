"""Cut what depends on parameters alone out of a program.

Casts, transposes, `1 + scale`, weight norm: a model writes them beside its matmuls, and differentiation would save
their results, copies of the weights, with the activations of every layer. Here they become a program of their own,
which runs right after the parameters are fetched, forwards and again backwards.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax.extend.core as jec

from . import jaxpr as jx
from .collectives import PRIMITIVES

# Edges of a tensor rank's program may move: they follow the weights that they gather.
_OF_RANKS = frozenset(("axis_index", *(name for name in PRIMITIVES if not name.startswith("tensor_"))))


def hoist(eqns: Sequence[Any], own: Collection[Any], fixed: Collection[Any]) -> tuple[list[Any], list[Any]]:
    """Split equations into those that need `own` variables (parameters) alone, and the rest.

    `fixed` variables, and what follows from them or from nothing, may be read on both sides; equations that compute
    such values are in both lists. Equations that make their operands larger (broadcasts) stay: they cost nothing to
    repeat.
    """
    ours, both = set(own), set(fixed)
    pre: list[Any] = []
    rest: list[Any] = []
    for eqn in eqns:
        atoms = [v for v in eqn.invars if not jx.is_literal(v)]
        movable = not eqn.effects and eqn.primitive.name not in _OF_RANKS
        if movable and all(v in both for v in atoms):
            both.update(eqn.outvars)
            pre.append(eqn)
            rest.append(eqn)
        elif movable and all(v in ours or v in both for v in atoms) and not _grows(eqn, ours):
            ours.update(eqn.outvars)
            pre.append(eqn)
        elif eqn.primitive.name in jx.REMATS and any(v in ours for v in atoms):
            moved, eqn = _from_remat(eqn, ours, both)
            ours.update(v for e in moved for v in e.outvars)
            pre += moved
            rest.append(eqn)
        else:
            rest.append(eqn)
    return pre, rest


def _grows(eqn: Any, ours: set[Any]) -> bool:
    size = sum(math.prod(v.aval.shape) for v in eqn.invars if not jx.is_literal(v) and v in ours)
    return sum(math.prod(v.aval.shape) for v in eqn.outvars) > size


def _from_remat(eqn: Any, ours: set[Any], both: set[Any]) -> tuple[list[Any], Any]:
    """The equations that leave a rematerialised call, in the caller's variables, and the call without them."""
    jaxpr, consts = jx.opened(eqn.params["jaxpr"])
    if consts:
        return [], eqn
    flat = jx.flatten(jec.ClosedJaxpr(jaxpr, ()))
    outer = dict(zip(flat.invars, eqn.invars, strict=True))

    def inside(names: set[Any]) -> list[Any]:
        return [v for v, atom in outer.items() if not jx.is_literal(atom) and atom in names]

    pre, rest = hoist(flat.eqns, inside(ours), inside(both))
    rest = list(jx.live(rest, flat.outvars))
    needed = jx.free(rest, flat.outvars)
    moved = [v for v in needed if v not in outer]
    pre = list(jx.live(pre, moved)) if moved else []
    if not pre or flat.constvars:
        return [], eqn
    invars = [v for v in needed if v in outer]
    body = jx.build(rest, [*invars, *moved], list(flat.outvars)).jaxpr
    call = eqn.replace(invars=[*(outer[v] for v in invars), *moved], params={**eqn.params, "jaxpr": body})
    names = jx.Environment(outer, jx.itself)
    return [e.replace(invars=names.read(e.invars)) for e in pre], call


def split(
    eqns: Sequence[Any], leaves: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], fixed: Collection[Any]
) -> tuple[Callable, Callable, tuple[bool, ...]]:
    """`pre(leaves, inputs) -> weights` and `rest(weights, inputs) -> outputs` of one program; and which weights have a
    derivative by the leaves: `rest` may have none by the others (a `while` over `stop_gradient(w)`).

    `pre` reads only those inputs that are in `fixed`.
    """
    pre, rest = hoist(eqns, leaves, fixed)
    rest = list(jx.live(rest, outputs))
    handed = set(inputs)
    weights = [v for v in jx.free(rest, outputs) if v not in handed]
    pre = list(jx.live(pre, weights))
    constants = [v for v in inputs if v in fixed]
    at = [i for i, v in enumerate(inputs) if v in fixed]
    run_pre = jx.run(pre, [*leaves, *constants], weights)
    run_rest = jx.run(rest, [*weights, *inputs], outputs)
    moving = jx.active(pre, leaves)
    return (
        lambda full, values: run_pre(*full, *(values[i] for i in at)),
        lambda weights, values: run_rest(*weights, *values),
        tuple(v in moving for v in weights),
    )


def closure(wanted: Sequence[Any], own: Mapping[Any, Any]) -> list[Any]:
    """The equations of `own` that some variables need, in program order."""
    return jx.needed([*{id(eqn): eqn for eqn in own.values()}.values()], wanted)
