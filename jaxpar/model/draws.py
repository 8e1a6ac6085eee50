"""Equal small draws of random numbers, of which a program has hundreds, as one batched draw.

XLA compiles every draw anew, on CPUs in about 0.1 s each: a model of 300 small leaves took half a minute to
initialise, on any number of devices. JAX's own generator (threefry) gives the same numbers batched as one by one.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax.dtypes import extended

from ..jaxprs import jaxpr as jx

_DRAWS = ("random_bits", "random_fold_in", "random_split", "threefry2x32")
SMALL = 16_384  # elements: larger ones may be sharded, and two copies of them are memory


def draws_together(fun: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    """`fun` of a key, with equal small draws that do not wait for each other made together.

    Other generators than threefry (`jax_default_prng_impl`) draw other numbers when they are batched; a program that
    uses one runs as it is.
    """

    def run(key: jax.Array) -> Any:
        closed, out = jax.make_jaxpr(fun, return_shape=True)(key)
        outs = None if jx.opened(closed)[0].effects else _evaluated(closed, [key])
        return fun(key) if outs is None else jax.tree.unflatten(jax.tree.structure(out), outs)

    return run


def _evaluated(closed: Any, args: Sequence[Any]) -> list[Any] | None:
    """The results of a program with equal draws together; None where none are equal."""
    jaxpr, consts = jx.opened(closed)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    read = lambda v: _literal(v) if jx.is_literal(v) else env[v]
    if len(jaxpr.eqns) == 1 and jaxpr.eqns[0].params.get("inline"):  # newer jax inlines a call when it lowers it
        (call,) = jaxpr.eqns
        outs = _evaluated(call.params["jaxpr"], [read(v) for v in call.invars])
        if outs is None:
            return None
        env.update(zip(call.outvars, outs, strict=True))
    else:
        groups = _groups(jaxpr.eqns)
        if not any(len(group) > 1 for group in groups):
            return None
        for group in groups:
            values = [[read(v) for v in eqn.invars] for eqn in group]
            with jx.standing(group[0]):
                outs = [jx.bind(group[0], values[0])] if len(group) == 1 else _together(group[0], values)
            for eqn, results in zip(group, outs, strict=True):
                env.update(zip(eqn.outvars, results, strict=True))
    return [v.val if jx.is_literal(v) else env[v] for v in jaxpr.outvars]


def _together(eqn: Any, values: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The results of one equation on several lists of operands."""
    columns = list(zip(*values, strict=True))
    shared = [all(x is column[0] for x in column) for column in columns]
    stacked = [column[0] if same else jnp.stack(column) for column, same in zip(columns, shared, strict=True)]
    batched = jax.vmap(lambda *xs: jx.bind(eqn, xs), in_axes=[None if same else 0 for same in shared])
    outs = batched(*stacked) if not all(shared) else jx.bind(eqn, values[0])
    return [[x if all(shared) else x[n] for x in outs] for n in range(len(values))]


def _groups(eqns: Sequence[Any]) -> list[list[Any]]:
    """The equations in an order in which they can run, those that run as one together."""
    level: dict[Any, int] = collections.defaultdict(int)  # of a variable: one more than those that it follows from
    groups: dict[Any, list[Any]] = {}
    for number, eqn in enumerate(eqns):
        at = 1 + max((level[v] for v in eqn.invars if not jx.is_literal(v)), default=0)
        level.update((v, at) for v in eqn.outvars)
        groups.setdefault((at, _kind(eqn) or number), []).append(eqn)
    return [group for _, group in sorted(groups.items(), key=lambda item: item[0][0])]


def _kind(eqn: Any) -> Any:
    """What equal draws have in common; None for an equation that is no small draw."""
    elements = sum(math.prod(v.aval.shape) for v in (*eqn.outvars, *eqn.invars))
    if elements > SMALL or not jx.communicates([eqn], _DRAWS) or not _threefry(eqn):
        return None
    params = tuple((name, _hashable(value)) for name, value in sorted(eqn.params.items()))
    return eqn.primitive.name, params, tuple((v.aval.shape, v.aval.dtype) for v in eqn.invars)


def _literal(atom: Any) -> Any:
    """Its value, in its own dtype when it is stacked."""
    return np.asarray(atom.val, atom.aval.dtype)


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)  # lives as long as its equation
    return id(value) if isinstance(value, jec.Jaxpr | jec.ClosedJaxpr) else value


def _threefry(eqn: Any) -> bool:
    """Whether the keys that an equation draws from are threefry's, and it makes none of others."""
    given = [v.aval.dtype for v in eqn.invars if jnp.issubdtype(v.aval.dtype, extended)]
    return bool(given) and all(str(dtype) == "key<fry>" for dtype in given)
