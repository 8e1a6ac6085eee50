"""Rules for loops. A scan over rows is read with all its steps at once, as `jax.vmap` makes them.

Other loops are read until the values of their carry settle:

    carry = start
    repeat:  carry = join(carry, body(carry))     until nothing changes

In a scan over rows, or of as many steps as the block has rows, a carry may be one of these:

    kept      each step passes it on unchanged
    added to  each step adds something to it, and nothing else reads it: read as 0, and summed up at the end
    whole     no row reaches it
    else      it carries something from row to row, and is coupled
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jec

from ...program import jaxpr as jx
from .arithmetic import join_values
from .calls import choose_by
from .labels import NO_LABELS, Labels
from .numbers import Number
from .reader import ALWAYS, Reader, rule
from .values import ADVISE_ALL_ROWS, UNKNOWN_POWER, Note, Value, coupled

_MAX_ROUNDS = 12
_ZERO = Number((0, 0))


def _settle(
    eqn: Any,
    start: Sequence[Value],
    body: Callable[[list[Value]], list[Value]],
    join: Callable[[int, Value, Value], Value],
) -> list[Value]:
    """Read a loop's body until its carry settles.

    Args:
      start: the values of the carry before the loop.
      body: returns the results of a step, first the next carry, for the values of its carry.
      join: returns the value of carry `i` for its values before and after a step.

    Returns:
      The values of the carry in any step, and then the results of the body for them; coupled ones if the carry does not
      settle.
    """
    carry, outs = list(start), list[Value]()
    for step in range(_MAX_ROUNDS):
        outs = body(carry)
        joined_carry = [join(i, x, y) for i, (x, y) in enumerate(zip(carry, outs, strict=False))]
        # The first round does not count: it reads the known numbers of the start, which comparison ignores, and later
        # steps may not have.
        if step and joined_carry == carry:
            return [*carry, *outs]
        carry = joined_carry
    note = Note.of_eqn(eqn, "runs a loop that jaxpar cannot follow", is_certain=False)
    return [coupled([x], note) for x in (*carry, *outs)]


def _passes_through(body: Any, first: int, num_carries: int) -> list[bool]:
    """Return, for each carry of a loop, whether each step passes it on unchanged.

    Args:
      body: the jaxpr of a step.
      first: the index of the first carry among the body's inputs.
      num_carries: the number of carries.
    """
    opened, _ = jx.opened(body)
    carry_in, carry_out = opened.invars[first : first + num_carries], opened.outvars[:num_carries]
    return [a is b for a, b in zip(carry_in, carry_out, strict=True)]


def _join_steps(eqn: Any, passes_through: Sequence[bool]) -> Callable[[int, Value, Value], Value]:
    """Return a function for `_settle` that joins each carry before and after a step, if a step changes it."""
    return lambda i, before, after: before if passes_through[i] else join_values(eqn, before, after)


def _after_counted_steps(eqn: Any, x: Value) -> Value:
    """Return a carry that changes in each step, where the number of steps depends on the number of rows."""
    note = Note.of_eqn(eqn, "runs a loop whose number of steps depends on how many rows a block has", is_certain=False)
    return x.derive(power=UNKNOWN_POWER).with_notes(note)


@rule("while", table=ALWAYS)
def _while(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value]:
    params, twin_params = eqn.params, twin.params if twin is not None else {}
    # Operands: constants of the condition, constants of the body, the carry.
    num_cond_consts, carry_start = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    body_consts = ins[num_cond_consts:carry_start]
    passes_through = _passes_through(params["body_jaxpr"], len(body_consts), len(ins) - carry_start)
    loop_reader = replace(reader, in_loop=True)

    def body(carry: list[Value]) -> list[Value]:
        return loop_reader.read_program(params["body_jaxpr"], twin_params.get("body_jaxpr"), [*body_consts, *carry])

    carry = _settle(eqn, ins[carry_start:], body, _join_steps(eqn, passes_through))[: len(passes_through)]
    # The condition decides how the loop ends, for the settled carry.
    (condition,) = loop_reader.read_program(
        params["cond_jaxpr"], twin_params.get("cond_jaxpr"), [*ins[:num_cond_consts], *carry]
    )

    def end(x: Value) -> Value:
        if condition.kind in ("coupled", "sum"):
            notes = [replace(note, is_certain=False) for note in condition.notes]
            message = "runs a loop until all rows of a block have ended"
            return coupled([x], *notes, Note.of_eqn(eqn, message, False))
        if condition.kind == "whole" and condition.power and not condition.is_keyed:
            return _after_counted_steps(eqn, x).with_notes(*condition.notes)
        # Under vmap, a loop runs until all rows have ended, and each row keeps its carry from where it ended.
        return choose_by(eqn, condition, x)

    return [x if unchanged else end(x) for x, unchanged in zip(carry, passes_through, strict=True)]


@rule("scan", table=ALWAYS)
def _scan(reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value]:
    parts, twin_parts = jx.scan_parts(eqn), jx.scan_parts(twin) if twin is not None else None
    num_consts, num_carries = len(parts.consts), len(parts.carry)
    consts, scanned = ins[:num_consts], ins[num_consts + num_carries :]
    passes_through, loop_reader = _passes_through(parts.body, num_consts, num_carries), replace(reader, in_loop=True)
    # Dim 0 of scanned values is the dim of steps. As many steps as rows are read all at once, too.
    scans_rows = any(
        0 in (x.labels.dims if x.kind == "rows" else x.varying_dims) for x in scanned if x.kind in ("rows", "sum")
    )
    if scans_rows or (twin_parts is not None and parts.length != twin_parts.length):
        return _scan_over_rows(loop_reader, eqn, twin, ins, passes_through)

    def body(carry: list[Value]) -> list[Value]:
        inputs = [*consts, *carry, *map(_in_one_step, scanned)]
        return loop_reader.read_program(parts.body, twin_parts and twin_parts.body, inputs)

    outs = _settle(eqn, ins[num_consts : num_consts + num_carries], body, _join_steps(eqn, passes_through))
    # `outs` are the carries in any step, the carries after a step, and the results that the scan stacks.
    return [*outs[:num_carries], *map(_stack_steps, outs[2 * num_carries :])]


def _in_one_step(x: Value) -> Value:
    """Return a scanned value as one step reads it: without the leading dim of steps."""
    labels = x.labels if x.labels is NO_LABELS else Labels(x.labels.array[0])
    # A known array differs from step to step. A scalar does not.
    number = x.number if x.scalar is not None else None
    return x.derive(varying_dims=frozenset(d - 1 for d in x.varying_dims if d), labels=labels, number=number)


def _stack_steps(x: Value, differs: bool = True) -> Value:
    """Return a value with a leading dim of steps; if `differs`, a whole value may vary from step to step."""
    labels = x.labels if x.labels is NO_LABELS else Labels(x.labels.array[None])
    varying_dims = frozenset(d + 1 for d in x.varying_dims) | {*range(differs and x.kind == "whole")}
    return x.derive(varying_dims=varying_dims, labels=labels)


def _scan_over_rows(
    reader: Reader, eqn: Any, twin: Any, ins: Sequence[Value], passes_through: Sequence[bool]
) -> list[Value]:
    """Return the results of a scan over rows, or of as many steps; the module describes the carries."""
    parts = jx.scan_parts(eqn)
    num_consts, num_carries, (body, _) = len(parts.consts), len(parts.carry), jx.opened(parts.body)
    start, scanned = ins[num_consts : num_consts + num_carries], ins[num_consts + num_carries :]
    # 1. The program of all steps at once.
    programs = lambda: (_all_steps(eqn, reader.axes), _all_steps(twin, reader.twin_axes) if twin is not None else None)
    try:
        program, twin_program = reader.memoize(("at once", id(eqn), id(twin)), (eqn, twin), programs)
    except NotImplementedError as error:  # vmap has no rule for a primitive, such as ragged_dot with different groups
        note = Note.of_eqn(eqn, f"runs a loop over rows that jax.vmap cannot run for all rows at once ({error})", False)
        return [coupled(ins, note)] * len(eqn.outvars)
    # 2. The kind of each carry.
    producers = [next((e for e in body.eqns if v in e.outvars), eqn) for v in body.outvars[:num_carries]]
    is_added_to = [_only_adds(body, v, e) for v, e in zip(body.invars[num_consts:], producers, strict=False)]
    carry = [
        replace(_stack_steps(x, not unchanged), number=None) for x, unchanged in zip(start, passes_through, strict=True)
    ]
    # An added-to carry is read as 0, so that a step's result is its addend alone; step 3 adds these up.
    carry = [Value(number=_ZERO) if adds else x for x, adds in zip(carry, is_added_to, strict=True)]

    def read(carry: list[Value]) -> list[Value]:
        return reader.read_program(program, twin_program, [*ins[:num_consts], *carry, *scanned])

    def join(i: int, carry_in: Value, carry_out: Value) -> Value:
        if passes_through[i] or is_added_to[i]:
            return carry_in
        if carry_in.kind == carry_out.kind == "whole":
            return join_values(eqn, carry_in, carry_out)
        if carry_out.kind == "coupled":
            return coupled([carry_out])
        message = f"carries values from row to row in a loop over rows; {ADVISE_ALL_ROWS}"
        return coupled([carry_out], Note.of_eqn(producers[i], message))

    outs = _settle(eqn, carry, read, join)
    # 3. The carries after the last step.
    final_carry = []
    carries = zip(start, passes_through, is_added_to, outs, outs[num_carries:], strict=False)
    for i, (x, unchanged, adds, any_step, next_step) in enumerate(carries):
        if adds:
            final_carry.append(_sum_of_steps(reader, eqn, twin, i, x, next_step))
        elif any_step.kind == "whole" and not unchanged:
            step_value = _in_one_step(any_step)
            final_carry.append(step_value if any_step.is_keyed else _after_counted_steps(eqn, step_value))
        else:
            final_carry.append(x if unchanged else any_step)
    return [*final_carry, *outs[2 * num_carries :]]


def _only_adds(body: Any, carry: Any, producer: Any) -> bool:
    """Return whether a step does nothing with a carry but add something to it, casts aside.

    Args:
      body: the open jaxpr of a step.
      carry: the variable of the carry.
      producer: the equation that makes the next carry. Nothing else may read the carry or the equation's result.
    """
    # None stands for the step's results, as a reader.
    readers = lambda v: (
        [e for e in body.eqns if any(a is v for a in e.invars)] + [None for result in body.outvars if result is v]
    )
    # A carry in low precision may be widened before the addition.
    while len(eqns := readers(carry)) == 1 and eqns[0] is not None and eqns[0].primitive.name == "convert_element_type":
        carry = eqns[0].outvars[0]
    is_read_once = (
        eqns == [producer] and sum(v is carry for v in producer.invars) == 1 and readers(producer.outvars[0]) == [None]
    )
    return is_read_once and producer.primitive.name == "add"


def _all_steps(eqn: Any, axes: Mapping[str, int]) -> jx.Flat:
    """Return the program of all steps of a scan at once.

    Its inputs are the constants, and then the carries and scanned values of all steps, [steps, ...].
    """
    parts = jx.scan_parts(eqn)
    num_consts, num_carries = len(parts.consts), len(parts.carry)
    stacked_avals = [
        v.aval.update(shape=(parts.length, *v.aval.shape)) if i < num_carries else v.aval
        for i, v in enumerate(eqn.invars[num_consts:])
    ]
    in_axes = (*[None] * num_consts, *[0] * len(stacked_avals))
    all_steps = jax.vmap(jec.jaxpr_as_fun(parts.body), in_axes, axis_size=parts.length)
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*(v.aval for v in parts.consts), *stacked_avals)]
    return jx.trace(all_steps, *avals, axes=dict(axes))[0]


def _sum_of_steps(reader: Reader, eqn: Any, twin: Any, i: int, start: Value, addends: Value) -> Value:
    """Return carry `i` after the last step, from its value before the loop and each step's addend, [steps, ...]."""

    def program(scan: Any, axes: Mapping[str, int]) -> jx.Flat:
        aval, num_steps = jx.scan_parts(scan).carry[i].aval, jx.scan_parts(scan).length
        avals = [jax.ShapeDtypeStruct(s, aval.dtype) for s in (aval.shape, (num_steps, *aval.shape))]
        with jx.source_info_of(scan):  # notes on the sum name the user's line of the scan
            return jx.trace(lambda x, y: x + y.sum(0), *avals, axes=dict(axes))[0]

    twin_program = None if twin is None else program(twin, reader.twin_axes)
    return reader.read_program(program(eqn, reader.axes), twin_program, [start, addends])[0]
