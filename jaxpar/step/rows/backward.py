"""Whether the derivative that a function brings with it couples rows: the backward is a part of the program.

The derivative of anything else follows from what it computes. Of a `custom_vjp` or `custom_jvp` it is another program,
read like any: a row's cotangent must follow from that row's own, and a whole value's must be their sum.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from ...program import jaxpr as jx
from .reader import Reader
from .values import NUMBER, Note, Value, reasons

# Their own derivatives are those of what they compute: JAX's functions, and ours, by our tests.
_PACKAGE = Path(__file__).absolute().parents[2]
_KNOWN = (os.path.dirname(os.path.abspath(jax.__file__)), str(_PACKAGE / "parallel"), str(_PACKAGE / "numerics"))


def backward_notes(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value], outs: Sequence[Value]) -> list[Note]:
    """What is to be said of the derivative of an equation's function."""
    info = jx.opened(eqn.params.get("call_jaxpr", eqn.params.get("fun_jaxpr")))[0].debug_info.func_src_info or ""
    inexact = [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in (*eqn.invars, *eqn.outvars)]
    active = [x for x, on in zip(ins, inexact, strict=False) if on]
    given = [x for x, on in zip(outs, inexact[len(ins) :], strict=True) if on]
    if r.backward or any(folder in info for folder in _KNOWN) or "coupled" in {x.kind for x in (*active, *given)}:
        return []
    program, other = r.once(
        ("pull", id(eqn), id(twin)),
        (eqn, twin),
        lambda: (_pull(eqn, r.axes), twin and _pull(twin, r.twin_axes)),
    )
    if isinstance(program, str):
        return [Note.at(eqn, f"the derivative of a function cannot be read ({program})", certain=False)]
    other = None if isinstance(other, str) else other
    consts = r.constants(program.consts, other.consts if other is not None else ())
    found = replace(r, backward=True).run(
        program, other, consts, [*(x.plain(number=x.number) for x in ins), *map(_cotangent, given)]
    )
    notes = [note for x, ct in zip(active, found, strict=True) for note in _judged(eqn, x, ct)]
    before = reasons([*ins, *outs])
    return [replace(n, backward=True) for n in notes if n not in before]


def _pull(eqn: Any, axes: Mapping[str, int]) -> jx.Flat | str:
    """The program from an equation's operands and its results' cotangents to its operands', or why there is none."""
    inexact = lambda v: jnp.issubdtype(v.aval.dtype, jnp.inexact)
    invars = [jec.Var(v.aval) for v in eqn.invars]
    outvars = [jec.Var(v.aval) for v in eqn.outvars]
    fun, n = jx.run([eqn.replace(invars=invars, outvars=outvars)], invars, outvars), len(invars)

    def pulled(*values: Any) -> Any:
        def active(*given: Any) -> list[Any]:
            it = iter(given)
            full = [next(it) if inexact(v) else x for v, x in zip(invars, values[:n], strict=True)]
            return [y for v, y in zip(outvars, fun(*full), strict=True) if inexact(v)]

        _, pull = jax.vjp(active, *(x for v, x in zip(invars, values[:n], strict=True) if inexact(v)))
        return pull(list(values[n:]))

    avals: list[Any] = [v.aval for v in (*invars, *(v for v in outvars if inexact(v)))]
    try:
        return jx.trace(pulled, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals), axes=dict(axes))[0]
    except Exception as error:  # the user's code, of which an operand may have no derivative: Equinox's custom_vjp
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"


def _cotangent(x: Value) -> Value:
    """The loss's cotangent of a value: a sum over rows, of which each knows its own part, is linear in it."""
    if x.kind == "rows":
        return x.plain(power=-x.power, plus=False, notes=frozenset(), pick=None)
    return Value("sum" if x.kind == "whole" else "whole", power=-x.power)


def _judged(eqn: Any, x: Value, ct: Value) -> list[Note]:
    """What is wrong with the cotangent of a value; nothing of one that sizes alone decide, which no parameter is in."""
    if x.number is not None:
        return []
    notes = sorted(ct.notes - x.notes, key=lambda n: n.line)
    if ct.zero or any(n.certain for n in notes):
        return notes
    fits = {"rows": ("rows", "whole"), "whole": ("sum", "rows"), "sum": ("whole",)}.get(x.kind, (ct.kind,))
    power = -x.power
    of_others = (ct.kind == "rows" == x.kind and ct.at != x.at) or (ct.kind == "sum" and ct.varies)
    if ct.kind not in fits or ct.plus or of_others:
        what = "the derivative of a function gives rows what follows from other rows too, or a sum to each block"
        return notes or [Note.at(eqn, what)]
    if ct.power != power:
        return notes or [Note.at(eqn, f"the derivative of a function is {NUMBER}")]
    return notes
