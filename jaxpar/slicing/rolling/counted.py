"""Loops that look up their layers by number, `x = f(w[i], x)` for i from 0, as scans that slice them.

So `fori_loop` is written, a `scan` over `arange`, and the layer stack of AlphaFold: the loop reads the stacked weights
whole, and every iteration takes its row. Where all that it takes of an array is the row of its own number, the scan may
slice the array itself, so that a strategy fetches a layer when its turn comes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...program import jaxpr as jx

_WIDE = ("int32", "uint32", "int64", "uint64")  # the 200th is no int8


def sliced(flat: jx.Flat, trace: Callable[[Callable[..., list[Any]], jx.Flat], jx.Flat]) -> jx.Flat:
    """A program whose scans slice the arrays of which they took the rows of their iterations.

    `trace` makes a program of a function of another's inputs.
    """
    made = {v: eqn for eqn in flat.eqns for v in eqn.outvars} | dict(zip(flat.constvars, flat.consts, strict=True))
    loops = {id(eqn): loop for eqn in flat.eqns if eqn.primitive.name == "scan" and (loop := _sliced(eqn, made))}
    if not loops:
        return flat

    def fun(*values: Any) -> list[Any]:
        env = dict(zip((*flat.constvars, *flat.invars), (*flat.consts, *values), strict=True))
        for eqn in flat.eqns:
            ins = [jnp.asarray(a.val, a.aval.dtype) if jx.is_literal(a) else env[a] for a in eqn.invars]
            with jx.source_info_of(eqn):
                outs = loops[id(eqn)](ins) if id(eqn) in loops else jx.bind(eqn, ins)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [jnp.asarray(v.val, v.aval.dtype) if jx.is_literal(v) else env[v] for v in flat.outvars]

    return trace(fun, flat)


def _sliced(eqn: Any, made: Mapping[Any, Any]) -> Callable[[Sequence[Any]], list[Any]] | None:
    """A scan as a function of its operands that slices arrays instead; None where it takes no rows by its number."""
    parts = jx.scan_parts(eqn)
    body = jx.flatten(parts.body)
    n, k = len(parts.consts), len(parts.consts) + len(parts.carry)
    numbers = {v for v, x in zip(body.invars[k:], parts.xs, strict=True) if _counts(x, parts.length, made)}
    if not parts.reverse:
        adds = {e.outvars[0]: e.invars for e in body.eqns if e.primitive.name == "add"}
        for v, first, out in zip(body.invars[n:k], parts.carry, body.outvars, strict=False):
            terms = () if jx.is_literal(out) else adds.get(out, ())
            if _is(first, 0) and any(a is v for a in terms) and any(_is(a, 1) for a in terms):
                numbers.add(v)
    arrays = [v for v in body.invars[:n] if numbers and v.aval.shape[:1] == (parts.length,)]
    rows = {v: jec.Var(v.aval.update(shape=(1, *v.aval.shape[1:]))) for v in arrays if _by_number(body, v, numbers)}
    if not rows:
        return None
    eqns = [_of_rows(e, rows) for e in body.eqns]
    whole = [v for v in body.invars[:n] if v not in rows]
    order = [*body.constvars, *whole, *body.invars[n:k], *body.invars[k:], *rows.values()]
    run = jx.run(eqns, order, body.outvars)

    def loop(ins: Sequence[Any]) -> list[Any]:
        given = dict(zip(body.invars, ins, strict=True))
        fixed = [*body.consts, *(given[v] for v in whole)]

        def step(carry: list[Any], x: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            outs = run(*fixed, *carry, *x[0], *(row[None] for row in x[1]))
            return outs[: k - n], outs[k - n :]

        xs = [given[v] for v in body.invars[k:]], [given[v] for v in rows]
        unroll = eqn.params["unroll"]
        carry, ys = lax.scan(step, list(ins[n:k]), xs, length=parts.length, reverse=parts.reverse, unroll=unroll)
        return [*carry, *ys]

    return loop


def _is(atom: Any, value: int) -> bool:
    return jx.is_literal(atom) and np.ndim(atom.val) == 0 and atom.val == value


def _counts(x: Any, length: int, made: Mapping[Any, Any]) -> bool:
    """Whether what a scan slices is 0, 1, 2, ..."""
    maker = None if jx.is_literal(x) else made.get(x)
    if isinstance(maker, np.ndarray):
        return maker.dtype.kind in "iu" and np.array_equal(maker, np.arange(length))
    return getattr(maker, "primitive", None) is lax.iota_p and x.aval.shape == (length,)


def _same_number(eqns: Iterable[Any], numbers: set[Any]) -> set[Any]:
    """All that is the iteration's number: also where a negative one would count from the end."""
    found, negative = set(numbers), set[Any]()
    known = lambda atom, among: not jx.is_literal(atom) and atom in among
    for e in eqns:
        name, ins = e.primitive.name, e.invars
        if name == "convert_element_type" and known(ins[0], found) and e.outvars[0].aval.dtype.name in _WIDE:
            found.add(e.outvars[0])
        elif name == "lt" and known(ins[0], found) and _is(ins[1], 0):
            negative.add(e.outvars[0])
        elif name == "select_n" and known(ins[0], negative) and known(ins[1], found):
            found.add(e.outvars[0])
    return found


def _by_number(program: jx.Flat, array: Any, numbers: set[Any]) -> bool:
    """Whether all that a program takes of an array is the row of the iteration's number."""
    numbers = _same_number(program.eqns, numbers)
    if any(v is array for v in program.outvars):
        return False
    for e in program.eqns:
        at = [i for i, a in enumerate(e.invars) if a is array]
        if not at:
            continue
        if e.primitive.name in jx.REMATS:
            inner = _inside(e)
            here = {v for v, a in zip(inner.invars, e.invars, strict=True) if not jx.is_literal(a) and a in numbers}
            if inner.consts or not all(_by_number(inner, inner.invars[i], here) for i in at):
                return False
        elif not (
            e.primitive.name == "dynamic_slice"
            and at == [0]
            and not jx.is_literal(e.invars[1])
            and e.invars[1] in numbers
            and e.params["slice_sizes"] == (1, *array.aval.shape[1:])
        ):
            return False
    return True


def _inside(eqn: Any) -> jx.Flat:
    """What a rematerialised call runs."""
    return jx.flatten(jec.ClosedJaxpr(*jx.opened(eqn.params["jaxpr"])))


def _of_rows(eqn: Any, rows: Mapping[Any, Any]) -> Any:
    """An equation that is given single rows [1, ...] for arrays: `dynamic_slice` moves what would begin beyond it."""
    if not any(not jx.is_literal(a) and a in rows for a in eqn.invars):
        return eqn
    params, ins = eqn.params, [a if jx.is_literal(a) else rows.get(a, a) for a in eqn.invars]
    if eqn.primitive.name in jx.REMATS:
        inner = _inside(eqn)
        mine = {
            v: jec.Var(rows[a].aval)
            for v, a in zip(inner.invars, eqn.invars, strict=True)
            if not jx.is_literal(a) and a in rows
        }
        eqns = [_of_rows(e, mine) for e in inner.eqns]
        program = jx.build(eqns, [mine.get(v, v) for v in inner.invars], inner.outvars)
        return eqn.replace(invars=ins, params={**params, "jaxpr": program.jaxpr})
    return eqn.replace(invars=[ins[0], *([jec.Literal(np.int32(0), jax.typeof(np.int32(0)))] * (len(ins) - 1))])
