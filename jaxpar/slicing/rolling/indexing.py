"""Turn loops that look up their layers by number, `x = f(w[i], x)` for i from 0, into scans that slice the layers.

A `fori_loop` is written like this, a `scan` over `arange`, and the layer stack of AlphaFold: the loop reads the stacked
weights whole, and every iteration takes its row. If each iteration reads only its row of an array, the scan can slice
the array itself, and a strategy fetches each layer when it runs:

    scan(i in 0..n)   reads w whole, takes w[i]        becomes        scan((i, w_i) in zip(0..n, w))
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from ...program import jaxpr as jx
from ...program.environment import through
from ...program.walk import called, propagate

_WIDE_INTEGERS = ("int32", "uint32", "int64", "uint64")  # an int8 cannot hold every layer's number


def slice_rows(flat: jx.Flat, trace: Callable[[Callable[..., list[Any]], jx.Flat], jx.Flat]) -> jx.Flat:
    """Return a program whose scans slice the arrays from which they took the rows of their iterations.

    Args:
      trace: `trace(fun, flat)` makes a program of a function of another program's inputs.
    """
    defined_by = {v: eqn for eqn in flat.eqns for v in eqn.outvars} | dict(
        zip(flat.constvars, flat.consts, strict=True)
    )
    loops = {
        id(eqn): loop for eqn in flat.eqns if eqn.primitive.name == "scan" and (loop := _slicing_scan(eqn, defined_by))
    }
    if not loops:
        return flat
    # Trace the program again, with these scans replaced.
    compute = lambda eqn, operands: loops[id(eqn)](operands) if id(eqn) in loops else jx.bind(eqn, operands)
    return trace(lambda *values: jx.evaluate(flat, values, compute), flat)


def _slicing_scan(eqn: Any, defined_by: Mapping[Any, Any]) -> Callable[[Sequence[Any]], list[Any]] | None:
    """Return a scan as a function of its operands that slices arrays; None if it takes no rows by its number.

    Args:
      defined_by: for each variable of the program, the equation or the constant array that defines it.
    """
    parts = jx.scan_parts(eqn)
    body = jx.flatten(parts.body)
    n, k = len(parts.consts), len(parts.consts) + len(parts.carry)

    # 1. Find the variables of the body that are the iteration's number: a scanned `arange`, or a carry that counts.
    numbers = {v for v, x in zip(body.invars[k:], parts.xs, strict=True) if _is_arange(x, parts.length, defined_by)}
    if not parts.reverse:
        additions = {e.outvars[0]: e.invars for e in body.eqns if e.primitive.name == "add"}
        for v, init, result in zip(body.invars[n:k], parts.carry, body.outvars, strict=False):
            terms = () if jx.is_literal(result) else additions.get(result, ())
            if _is_scalar(init, 0) and any(a is v for a in terms) and any(_is_scalar(a, 1) for a in terms):
                numbers.add(v)

    # 2. Find the constants from which it takes nothing but the row of that number.
    arrays = {v: i for i, v in enumerate(body.invars[:n]) if numbers and v.aval.shape[:1] == (parts.length,)}
    row_consts = _read_by_number(body, arrays, numbers)
    if not row_consts:
        return None

    # 3. Scan them. In the body, such a constant has the shape [1, ...], and `_compute_on_rows` takes its only row.
    def loop(operands: Sequence[Any]) -> list[Any]:
        def step(carry: list[Any], x: tuple[list[Any], dict[int, Any]]) -> tuple[list[Any], list[Any]]:
            xs, rows = x
            consts = [rows[i][None] if i in row_consts else value for i, value in enumerate(operands[:n])]
            results = jx.evaluate(body, [*consts, *carry, *xs], _compute_on_rows)
            return results[: k - n], results[k - n :]

        xs, unroll = (list(operands[k:]), {i: operands[i] for i in row_consts}), eqn.params["unroll"]
        carry, ys = lax.scan(step, list(operands[n:k]), xs, length=parts.length, reverse=parts.reverse, unroll=unroll)
        return [*carry, *ys]

    return loop


def _is_scalar(atom: Any, value: int) -> bool:
    """Whether an atom is this literal."""
    return jx.is_literal(atom) and np.ndim(atom.val) == 0 and atom.val == value


def _is_arange(x: Any, length: int, defined_by: Mapping[Any, Any]) -> bool:
    """Whether a scanned value is 0, 1, 2, ..."""
    # A constant is an array that the trace closed over; `jnp.arange` in the loss is an `iota`.
    source = None if jx.is_literal(x) else defined_by.get(x)
    if isinstance(source, np.ndarray):
        return source.dtype.kind in "iu" and np.array_equal(source, np.arange(length))
    return getattr(source, "primitive", None) is lax.iota_p and x.aval.shape == (length,)


def _read_by_number(program: Any, arrays: Mapping[Any, int], numbers: set[Any]) -> list[int]:
    """Return the arrays from which a program takes only the row of the iteration's number.

    The program is interpreted on marks instead of values: the number of an array; "number" for the iteration's
    number; "negative" for whether that is negative, and would count from the end (`w[i]` checks this); None for any
    other value. An array that an equation reads in another way is read whole.

    Args:
      program: the body of a scan.
      arrays: inputs that have a row for each iteration, with the positions that are returned.
      numbers: inputs that are the iteration's number.
    """
    read_whole = set[Any]()

    def marks_of_results(eqn: Any, marks: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        inside = propagate(eqn, marks, run, lambda a, b: a) if name in (*jx.CALLS, *jx.REMATS) else None
        if inside is not None:
            return inside
        results: list[Any] = [None] * len(eqn.outvars)
        # The number passes through casts, and through JAX's handling of negative indices: select(i < 0, i, i + n).
        if name == "convert_element_type" and eqn.outvars[0].aval.dtype.name in _WIDE_INTEGERS and marks == ["number"]:
            results = marks
        elif name == "lt" and marks[0] == "number" and _is_scalar(eqn.invars[1], 0):
            results = ["negative"]
        elif name == "select_n" and marks[:2] == ["negative", "number"]:
            results = ["number"]
        elif name == "dynamic_slice" and eqn.params["slice_sizes"] == (1, *eqn.invars[0].aval.shape[1:]):
            # This takes a row: the array, the first operand, is not read whole.
            marks = marks[1:] if marks[1] == "number" else marks
        # Marks of numbers end up here too; only marks of arrays are looked up below.
        read_whole.update(marks)
        return results

    run = lambda program, marks, _=None: through(program, marks, marks_of_results, None)
    read_whole.update(run(program, ["number" if v in numbers else arrays.get(v) for v in program.invars]))
    return [i for i in arrays.values() if i not in read_whole]


def _compute_on_rows(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Compute an equation on operands, where some are single rows [1, ...] of the arrays that it expects."""
    if all(x.shape == v.aval.shape for x, v in zip(operands, eqn.invars, strict=True)):
        return jx.bind(eqn, operands)
    if eqn.primitive.name == "dynamic_slice":
        return [operands[0]]  # the row itself
    # Only a call may have other operands of a wrong shape. Its own equations get the rows.
    run = lambda *values: jx.evaluate(called(eqn), values, _compute_on_rows)
    if eqn.primitive.name in jx.REMATS:
        run = jax.checkpoint(run, **{name: eqn.params[name] for name in ("policy", "prevent_cse")})
    return run(*operands)
