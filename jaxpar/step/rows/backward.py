"""Check whether the derivative that a function brings with it couples rows.

The derivative of any other equation follows from what the equation computes. A `custom_vjp` or `custom_jvp` has another
program for its derivative, which is read like any program. For each operand and its cotangent:

    operand    cotangent must be
    rows       rows, and the same ones; or whole
    whole      a sum over rows; or rows
    sum        whole

with the operand's power, negated.
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
from .values import FUNCTION_OF_BLOCK_SIZE, Note, Value, notes_of, reason_of

# Functions in these folders have derivatives that agree with their forward: JAX's, and ours, by our tests.
_PACKAGE = Path(__file__).absolute().parents[2]
_TRUSTED_FOLDERS = (
    os.path.dirname(os.path.abspath(jax.__file__)),
    str(_PACKAGE / "parallel"),
    str(_PACKAGE / "numerics"),
)


def backward_notes(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value], outs: Sequence[Value]) -> list[Note]:
    """Return notes on the derivative of the function of a `custom_vjp` or `custom_jvp`."""
    function_jaxpr, _ = jx.opened(eqn.params.get("call_jaxpr", eqn.params.get("fun_jaxpr")))
    source = function_jaxpr.debug_info.func_src_info or ""
    is_inexact = [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in (*eqn.invars, *eqn.outvars)]
    active_ins = [x for x, inexact in zip(ins, is_inexact, strict=False) if inexact]
    active_outs = [x for x, inexact in zip(outs, is_inexact[len(ins) :], strict=True) if inexact]
    # A derivative of a derivative is not checked, and a coupled forward is refused anyhow.
    is_trusted = any(f"{folder}{os.sep}" in source for folder in _TRUSTED_FOLDERS)
    if reader.in_backward or is_trusted or "coupled" in {x.kind for x in (*active_ins, *active_outs)}:
        return []
    # 1. Trace the pullback, and read it with the cotangents that the loss has.
    program, twin_program = reader.memoize(
        ("pull", id(eqn), id(twin)),
        (eqn, twin),
        lambda: (_pullback(eqn, reader.axes), twin and _pullback(twin, reader.twin_axes)),
    )
    if isinstance(program, str):
        message = f"has a derivative of its own, which jaxpar cannot trace ({program})"
        return [Note.of_eqn(eqn, message, is_certain=False)]
    # Without a twin the powers stay unknown, which is only a warning.
    twin_program = None if isinstance(twin_program, str) else twin_program
    inputs = [*(x.derive(number=x.number) for x in ins), *map(_cotangent, active_outs)]
    cotangents = replace(reader, in_backward=True).read_program(program, twin_program, inputs)
    # 2. Compare each inexact operand with its cotangent: integers have none.
    notes = [note for x, ct in zip(active_ins, cotangents, strict=True) for note in _cotangent_notes(eqn, x, ct)]
    # Notes of the forward are reported already.
    forward_notes = notes_of([*ins, *outs])
    return [replace(n, in_backward=True) for n in notes if n not in forward_notes]


def _pullback(eqn: Any, axes: Mapping[str, int]) -> jx.Flat | str:
    """Trace the program from operands and cotangents of the results to cotangents of the inexact operands.

    Returns:
      The program, or the reason why it cannot be traced.
    """
    # New variables, since an equation may have one variable as two operands, or drop a result.
    is_inexact = lambda v: jnp.issubdtype(v.aval.dtype, jnp.inexact)
    invars = [jec.Var(v.aval) for v in eqn.invars]
    outvars = [jec.Var(v.aval) for v in eqn.outvars]
    fun, num_inputs = jx.run([eqn.replace(invars=invars, outvars=outvars)], invars, outvars), len(invars)

    def pullback(*values: Any) -> Any:
        inputs, cotangents = values[:num_inputs], values[num_inputs:]

        def inexact_part(*inexact_inputs: Any) -> list[Any]:
            remaining = iter(inexact_inputs)
            all_inputs = [next(remaining) if is_inexact(v) else x for v, x in zip(invars, inputs, strict=True)]
            return [y for v, y in zip(outvars, fun(*all_inputs), strict=True) if is_inexact(v)]

        _, pull = jax.vjp(inexact_part, *(x for v, x in zip(invars, inputs, strict=True) if is_inexact(v)))
        return pull(list(cotangents))

    avals: list[Any] = [v.aval for v in (*invars, *(v for v in outvars if is_inexact(v)))]
    try:
        return jx.trace(pullback, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals), axes=dict(axes))[0]
    except Exception as error:  # this runs the user's code: an Equinox custom_vjp may differentiate some operands only
        return reason_of(error)


def _cotangent(x: Value) -> Value:
    """Return the loss's cotangent of a value.

    The loss is linear in sums over rows. So the cotangent of rows is rows, and the cotangent of a sum is whole. A
    whole value has a sum over the rows that use it as its cotangent.
    """
    if x.kind == "rows":
        return x.derive(power=-x.power, has_mean=False, notes=frozenset(), pick_note=None)
    return Value("sum" if x.kind == "whole" else "whole", power=-x.power)


def _cotangent_notes(eqn: Any, x: Value, ct: Value) -> list[Note]:
    """Return notes on cotangent `ct` of operand `x`; none if sizes alone decide `x`, since no parameter is in it."""
    if x.number is not None:
        return []
    notes = sorted(ct.notes - x.notes, key=lambda n: n.line)
    if ct.is_zero or any(n.is_certain for n in notes):
        return notes
    allowed_kinds = {"rows": ("rows", "whole"), "whole": ("sum", "rows"), "sum": ("whole",)}.get(x.kind, (ct.kind,))
    power = -x.power
    has_other_rows = ct.kind == "rows" == x.kind and ct.labels != x.labels
    has_partial_sums = ct.kind == "sum" and ct.varying_dims
    if ct.kind not in allowed_kinds or ct.has_mean or has_other_rows or has_partial_sums:
        message = (
            "has a derivative of its own (custom_vjp, custom_jvp), in which the gradient of a row depends on other "
            "rows, or the gradient of a parameter is no sum over rows; compute each row's part from that row alone"
        )
        return notes or [Note.of_eqn(eqn, message)]
    if ct.power != power:
        return notes or [Note.of_eqn(eqn, f"has a derivative of its own, which is {FUNCTION_OF_BLOCK_SIZE}")]
    return notes
