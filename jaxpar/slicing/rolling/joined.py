"""Layers that a loss stacks itself, `jnp.stack` of the parameters of each, before it scans them.

They are kept as one stack already, so that the loss reads this instead: a program that stacks them would fetch all.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jec

from ...program import jaxpr as jx

_LEADING = ("broadcast_in_dim", "reshape")  # what may put a dim of size 1 in front
StackMembers = Sequence[tuple[int, Sequence[int]]]


def join(flat: jx.Flat, families: Sequence[StackMembers]) -> tuple[jx.Flat, list[StackMembers]]:
    """The program with a stack itself in place of each equation that stacked all its layers in order; and the families
    whose layers it still reads one by one.

    Args:
      flat: the program.
      families: for each list of alike layers its leaves: the stack, and its layers, as positions of inputs.
    """
    places = {
        flat.invars[i]: (flat.invars[stack], k)
        for family in families
        for stack, members in family
        for k, i in enumerate(members)
    }
    made = {v: eqn for eqn in flat.eqns for v in eqn.outvars}
    same: dict[Any, Any] = {}  # a stack that the program makes, and the one that is there
    eqns: list[Any] = []
    for eqn in flat.eqns:
        stack: Any
        stack, casts = _stacked(eqn, made, places)
        if stack is None:
            eqns.append(eqn.replace(invars=[v if jx.is_literal(v) else same.get(v, v) for v in eqn.invars]))
            continue
        for cast in casts:
            out: Any = jec.Var(cast.outvars[0].aval.update(shape=stack.aval.shape))
            eqns.append(cast.replace(invars=[stack], outvars=[out]))
            stack = out
        same[eqn.outvars[0]] = stack
    if not same:
        return flat, list(families)
    outvars = tuple(v if jx.is_literal(v) else same.get(v, v) for v in flat.outvars)
    flat = dataclasses.replace(flat, eqns=tuple(eqns), outvars=outvars)
    read = set(jx.free(jx.live(flat.eqns, flat.outvars), flat.outvars))
    single = lambda family: any(flat.invars[i] in read for _, members in family for i in members)
    whole = lambda family: any(flat.invars[stack] in read for stack, _ in family)
    return flat, [family for family in families if single(family) or not whole(family)]


def _stacked(eqn: Any, made: Mapping[Any, Any], places: Mapping[Any, tuple[Any, int]]) -> tuple[Any, list[Any]]:
    """The stack whose layers an equation stacks, and the casts of each; None if it does no such thing."""
    name, params = eqn.primitive.name, eqn.params
    if name not in ("concatenate", "stack") or params.get("dimension", params.get("axis")) != 0:
        return None, []
    rows = [_layer(v, made, places, name == "stack") for v in eqn.invars]
    first = rows[0]
    if first is None or first[0].aval.shape != eqn.outvars[0].aval.shape:
        return None, []
    types = lambda casts: [(e.params["new_dtype"], e.params["weak_type"]) for e in casts]
    for k, row in enumerate(rows):
        if row is None or row[0] is not first[0] or row[1] != k or types(row[2]) != types(first[2]):
            return None, []
    return first[0], first[2]


def _layer(
    at: Any, made: Mapping[Any, Any], places: Mapping[Any, tuple[Any, int]], leading: bool
) -> tuple[Any, int, list[Any]] | None:
    """Which layer of which stack a variable is, with a dim of size 1 in front (`leading`: without), and its casts."""
    casts: list[Any] = []
    while not jx.is_literal(at) and at not in places and at in made:
        eqn = made[at]
        if eqn.primitive.name == "convert_element_type":
            casts.insert(0, eqn)
        elif not leading and eqn.primitive.name in _LEADING and len(eqn.invars) == 1:
            shape = eqn.invars[0].aval.shape
            behind = tuple(range(1, len(shape) + 1))
            if at.aval.shape != (1, *shape) or eqn.params.get("broadcast_dimensions", behind) != behind:
                return None
            leading = True
        else:
            return None
        at = eqn.invars[0]
    if jx.is_literal(at) or at not in places or not leading:
        return None
    return (*places[at], casts)
