"""Loops that look up their layers by number, `x = f(w[i], x)` for i from 0, as scans that slice them.

So `fori_loop` is written, a `scan` over `arange`, and the layer stack of AlphaFold: the loop reads the stacked weights
whole, and every iteration takes its row. Where all that it takes of an array is the row of its own number, the scan may
slice the array itself, so that a strategy fetches a layer when its turn comes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from ...program import jaxpr as jx
from ...program.environment import through
from ...program.walk import called, propagate

_WIDE = ("int32", "uint32", "int64", "uint64")  # the 200th is no int8


def sliced(flat: jx.Flat, trace: Callable[[Callable[..., list[Any]], jx.Flat], jx.Flat]) -> jx.Flat:
    """A program whose scans slice the arrays of which they took the rows of their iterations.

    `trace` makes a program of a function of another's inputs.
    """
    made = {v: eqn for eqn in flat.eqns for v in eqn.outvars} | dict(zip(flat.constvars, flat.consts, strict=True))
    loops = {id(eqn): loop for eqn in flat.eqns if eqn.primitive.name == "scan" and (loop := _sliced(eqn, made))}
    if not loops:
        return flat
    of = lambda eqn, ins: loops[id(eqn)](ins) if id(eqn) in loops else jx.bind(eqn, ins)
    return trace(lambda *values: jx.evaluate(flat, values, of), flat)


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
    arrays = {v: i for i, v in enumerate(body.invars[:n]) if numbers and v.aval.shape[:1] == (parts.length,)}
    rows = _by_number(body, arrays, numbers)
    if not rows:
        return None

    def loop(ins: Sequence[Any]) -> list[Any]:
        def step(carry: list[Any], x: tuple[list[Any], dict[int, Any]]) -> tuple[list[Any], list[Any]]:
            consts = [x[1][i][None] if i in rows else value for i, value in enumerate(ins[:n])]
            outs = jx.evaluate(body, [*consts, *carry, *x[0]], _of_rows)
            return outs[: k - n], outs[k - n :]

        xs, unroll = (list(ins[k:]), {i: ins[i] for i in rows}), eqn.params["unroll"]
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


def _by_number(program: Any, arrays: Mapping[Any, int], numbers: set[Any]) -> list[int]:
    """Those arrays, inputs with their number, of which all that a program takes is the row of the iteration's number.

    A value is known as an array, as the number, or as whether that is negative, which would count from the end.
    """
    whole = set[Any]()

    def of(eqn: Any, ins: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        inside = propagate(eqn, ins, run, lambda a, b: a) if name in (*jx.CALLS, *jx.REMATS) else None
        if inside is not None:
            return inside
        outs: list[Any] = [None] * len(eqn.outvars)
        if name == "convert_element_type" and eqn.outvars[0].aval.dtype.name in _WIDE and ins == ["number"]:
            outs = ins
        elif name == "lt" and ins[0] == "number" and _is(eqn.invars[1], 0):
            outs = ["negative"]
        elif name == "select_n" and ins[:2] == ["negative", "number"]:
            outs = ["number"]
        elif name == "dynamic_slice" and eqn.params["slice_sizes"] == (1, *eqn.invars[0].aval.shape[1:]):
            ins = ins[1:] if ins[1] == "number" else ins
        whole.update(ins)
        return outs

    run = lambda program, ins, _=None: through(program, ins, of, None)
    whole.update(run(program, ["number" if v in numbers else arrays.get(v) for v in program.invars]))
    return [i for i in arrays.values() if i not in whole]


def _of_rows(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """What an equation makes of operands of which some are single rows [1, ...] of arrays."""
    if all(x.shape == v.aval.shape for x, v in zip(ins, eqn.invars, strict=True)):
        return jx.bind(eqn, ins)
    if eqn.primitive.name == "dynamic_slice":
        return [ins[0]]
    run = lambda *values: jx.evaluate(called(eqn), values, _of_rows)
    if eqn.primitive.name in jx.REMATS:
        run = jax.checkpoint(run, **{name: eqn.params[name] for name in ("policy", "prevent_cse")})
    return run(*ins)
