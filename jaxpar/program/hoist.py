"""Cut the part of a program that depends on parameters alone out of it.

A model writes casts, transposes, `1 + scale` or weight norm beside its matmuls. Differentiation would save their
results, copies of the weights, with the activations of every layer. Here they become a program of their own:

    layer:  c = cast w    h = dot x c    y = tanh h      -->    pre:   c = cast w
                                                                rest:  h = dot x c    y = tanh h

`pre` runs right after the parameters are fetched, in the forward and again in the backward.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax.extend.core as jec

from . import jaxpr as jx
from .collectives import PRIMITIVES

# Equations whose result depends on the rank, which stay in place. The edges of a tensor rank's program may move: they
# gather weights, and go where the weights go.
_OF_RANKS = frozenset(("axis_index", *(name for name in PRIMITIVES if not name.startswith("tensor_"))))


def hoist(eqns: Sequence[Any], params: Collection[Any], fixed: Collection[Any]) -> tuple[list[Any], list[Any]]:
    """Split equations into those that need parameters alone, and all others.

    Equations that enlarge their operands (broadcasts) are not moved: they are cheap to repeat.

    Args:
      params: the variables of the parameters.
      fixed: variables that both sides may read. Equations that read these alone, or nothing, are on both sides.

    Returns:
      (pre, rest): the equations on parameters, and the others.
    """
    param_vars, fixed_vars = set(params), set(fixed)
    pre: list[Any] = []
    rest: list[Any] = []
    for eqn in eqns:
        atoms = [v for v in eqn.invars if not jx.is_literal(v)]
        is_movable = not eqn.effects and eqn.primitive.name not in _OF_RANKS
        if is_movable and all(v in fixed_vars for v in atoms):
            fixed_vars.update(eqn.outvars)
            pre.append(eqn)
            rest.append(eqn)
        elif is_movable and all(v in param_vars or v in fixed_vars for v in atoms) and not _grows(eqn, param_vars):
            param_vars.update(eqn.outvars)
            pre.append(eqn)
        elif eqn.primitive.name in jx.REMATS and any(v in param_vars for v in atoms):
            # A rematerialised call would compute its part on parameters again in the backward: move that part out.
            moved, eqn = _from_remat(eqn, param_vars, fixed_vars)
            param_vars.update(v for e in moved for v in e.outvars)
            pre += moved
            rest.append(eqn)
        else:
            rest.append(eqn)
    return pre, rest


def _grows(eqn: Any, param_vars: set[Any]) -> bool:
    """Return whether the results of an equation are larger than the parameters that it reads."""
    size = sum(math.prod(v.aval.shape) for v in eqn.invars if not jx.is_literal(v) and v in param_vars)
    return sum(math.prod(v.aval.shape) for v in eqn.outvars) > size


def _from_remat(eqn: Any, param_vars: set[Any], fixed_vars: set[Any]) -> tuple[list[Any], Any]:
    """Return the equations that leave a rematerialised call, in the caller's variables, and the call without them."""
    jaxpr, consts = jx.opened(eqn.params["jaxpr"])
    if consts:
        return [], eqn
    flat = jx.flatten(jec.ClosedJaxpr(jaxpr, ()))
    outer_atoms = dict(zip(flat.invars, eqn.invars, strict=True))

    def inner_vars(outer_vars: set[Any]) -> list[Any]:
        return [v for v, atom in outer_atoms.items() if not jx.is_literal(atom) and atom in outer_vars]

    # 1. Split the call's program, and find the values that cross from one side to the other.
    pre, rest = hoist(flat.eqns, inner_vars(param_vars), inner_vars(fixed_vars))
    rest = list(jx.live(rest, flat.outvars))
    rest_inputs = jx.free(rest, flat.outvars)
    moved = [v for v in rest_inputs if v not in outer_atoms]
    pre = list(jx.live(pre, moved)) if moved else []
    if not pre or flat.constvars:
        return [], eqn
    # 2. Build the smaller call, whose additional arguments are the values that left it.
    invars = [v for v in rest_inputs if v in outer_atoms]
    body = jx.build(rest, [*invars, *moved], list(flat.outvars)).jaxpr
    call = eqn.replace(invars=[*(outer_atoms[v] for v in invars), *moved], params={**eqn.params, "jaxpr": body})
    names = jx.Environment(outer_atoms, jx.itself)
    return [e.replace(invars=names.read(e.invars)) for e in pre], call


def split(
    eqns: Sequence[Any], leaves: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], fixed: Collection[Any]
) -> tuple[Callable, Callable, tuple[bool, ...]]:
    """Split one program into two functions: one of the parameters, and the rest.

    Args:
      leaves: the variables of the parameters.
      inputs: the variables of all other inputs.
      fixed: the inputs that `pre` may read too.

    Returns:
      (pre, rest, has_derivative): `pre(leaves, inputs) -> weights` and `rest(weights, inputs) -> outputs`; and for each
      weight whether it has a derivative by the leaves. `rest` need not be differentiable by the other weights, as with
      a `while` over `stop_gradient(w)`.
    """
    pre, rest = hoist(eqns, leaves, fixed)
    rest = list(jx.live(rest, outputs))
    input_vars = set(inputs)
    # Only values that live equations still read, so that `pre` computes nothing in vain.
    weights = [v for v in jx.free(rest, outputs) if v not in input_vars]
    pre = list(jx.live(pre, weights))
    constants = [v for v in inputs if v in fixed]
    constant_positions = [i for i, v in enumerate(inputs) if v in fixed]
    run_pre = jx.run(pre, [*leaves, *constants], weights)
    run_rest = jx.run(rest, [*weights, *inputs], outputs)
    active_vars = jx.active(pre, leaves)
    return (
        lambda params, values: run_pre(*params, *(values[i] for i in constant_positions)),
        lambda weights, values: run_rest(*weights, *values),
        tuple(v in active_vars for v in weights),
    )


def closure(variables: Sequence[Any], eqn_of: Mapping[Any, Any]) -> list[Any]:
    """Return the equations that some variables need, in program order.

    Args:
      eqn_of: the equation that computes each variable, in program order.
    """
    # An equation with several results occurs several times.
    return jx.needed([*{id(eqn): eqn for eqn in eqn_of.values()}.values()], variables)
