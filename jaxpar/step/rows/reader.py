"""The reader: it goes through a traced loss, equation by equation, and computes the abstract value of each variable.

This is an abstract interpretation over `values.Value`. It runs nothing but equations that follow from sizes alone.

1. Each equation has a rule (`RULES`), which maps the values of its operands to the values of its results. Equations
   without a rule follow `generic.py`, by the table of `program/factors.py`: which dims of operands and results are one
   index. If nothing is known of a primitive and rows enter it, the result is coupled.
2. `Reader._finish` passes notes on to the results, and attaches numbers that follow from sizes.

A single trace does not show powers of the number of rows n, since n is a plain number in it. So the trace is read
together with its `twin`, the same loss on twice the rows: the ratio of two literals, or of two sizes, is 2^power.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from ...program import factors
from ...program import jaxpr as jx
from ...program.filter_primitives import implemented
from .labels import same_in_all_rows
from .numbers import computed_numbers, constant_number
from .values import FUNCTION_OF_BLOCK_SIZE, UNKNOWN_POWER, UNNAMED_LINE, Note, Value, first_pick_note, notes_of

PrimitiveRule = Callable[["Reader", Any, Any, Sequence[Value]], "Sequence[Value] | Value"]
Rule = TypeVar("Rule", bound=PrimitiveRule)
Result = TypeVar("Result")
RULES: dict[str, PrimitiveRule] = {}  # primitive -> rule, for operands that are not coupled
ALWAYS: dict[str, PrimitiveRule] = {}  # calls, loops and collectives: their rules also apply to coupled operands


def rule(*names: str, table: dict[str, PrimitiveRule] = RULES) -> Callable[[Rule], Rule]:
    """Register a function as the rule of some primitives.

    A rule takes the reader, the equation, its twin (or None) and the values of its operands. It returns the values of
    the results, or one value if all results are alike.
    """
    # `update` returns None, so that the decorator returns the function.
    return lambda fun: table.update(dict.fromkeys(names, fun)) or fun


def input_shapes(eqn: Any) -> list[tuple[int, ...]]:
    """Return the shapes of an equation's operands."""
    return factors.shapes(eqn)[0]


def output_shape(eqn: Any, index: int = 0) -> tuple[int, ...]:
    """Return the shape of a result of an equation."""
    return factors.shapes(eqn)[1][index]


@dataclass(frozen=True)
class Reader:
    """One reading of a loss.

    Attributes:
      rows_per_block: the number of rows in a block.
      axes: the mesh axes over which blocks are spread in the program, name -> size.
      twin_axes: the same for the twin.
      in_loop: whether this reads the body of a loop.
      in_backward: whether this reads a derivative, which is not differentiated again.
      memo: the results of `memoize`, each with the objects whose ids are in its key.
    """

    rows_per_block: int
    axes: Mapping[str, int]
    twin_axes: Mapping[str, int]
    in_loop: bool = False
    in_backward: bool = False
    memo: dict[tuple[Any, ...], tuple[Any, Any]] = field(default_factory=dict)

    def memoize(self, key: tuple[Any, ...], referents: Any, make: Callable[[], Result]) -> Result:
        """Return the result for a key, and make it on the first call.

        Args:
          key: a key, which may contain ids of objects.
          referents: these objects. The memo keeps them alive, so that no other object gets the same id.
        """
        # Keys are long tuples: each look-up hashes all of them.
        if (entry := self.memo.get(key)) is None:
            entry = self.memo[key] = (referents, make())
        return entry[1]

    def read_program(self, program: Any, twin: Any, inputs: Sequence[Value]) -> list[Value]:
        """Return the output values of a program (open, closed or `jx.Flat`) for the values of its inputs."""
        jaxpr, consts = jx.opened(program)
        twin_jaxpr, twin_consts = jx.opened(twin) if twin is not None else (None, ())
        if len(twin_consts) != len(consts):
            twin_consts = [None] * len(consts)
        values = [*map(self.value_of_constant, consts, twin_consts), *inputs]
        if not self.in_loop:
            return self._read_equations(jaxpr, twin_jaxpr, values)
        # A loop is read until its carry settles, and each of these rounds also reads the loops within. Most of their
        # inputs have been read before: without the memo, the time would grow as 2^depth or faster.
        key = ("run", id(jaxpr), id(twin_jaxpr), self.in_backward, *(x.identity_key for x in values))
        return list(
            self.memoize(key, (jaxpr, twin_jaxpr, values), lambda: self._read_equations(jaxpr, twin_jaxpr, values))
        )

    def _read_equations(self, jaxpr: Any, twin: Any, values: Sequence[Value]) -> list[Value]:
        """Read the equations in order, for the values of the constants and inputs: the twin has the same."""
        env: dict[Any, Value] = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))
        twins, unpaired = pair_equations(jaxpr.eqns, twin.eqns) if twin is not None else ({}, None)
        for i, eqn in enumerate(jaxpr.eqns):
            ins = [self.value_of(env, v, k, twins[i].invars if i in twins else ()) for k, v in enumerate(eqn.invars)]
            env.update(zip(eqn.outvars, self.read_equation(eqn, twins.get(i), ins), strict=True))
        message = "computes by another program for twice the rows, so that its dependence on their number is unknown"
        notes = [Note.of_eqn(unpaired, message, is_certain=False)] if unpaired is not None else []
        atoms = enumerate(jaxpr.outvars)
        return [self.value_of(env, v, k, twin.outvars if twin is not None else ()).with_notes(*notes) for k, v in atoms]

    def value_of(self, env: Mapping[Any, Value], atom: Any, k: int, twin_atoms: Sequence[Any]) -> Value:
        """Return the value of a variable or literal; a literal is compared with the twin's `k`-th atom."""
        if not jx.is_literal(atom):
            return env[atom]
        return self.value_of_constant(
            atom.val, twin_atoms[k].val if k < len(twin_atoms) and jx.is_literal(twin_atoms[k]) else None
        )

    def value_of_constant(self, x: Any, twin: Any) -> Value:
        """Return the value of a number or array in the program."""
        number = self._memoize_in_loop(("constant", id(x), id(twin)), (x, twin), lambda: constant_number(x, twin))
        if number is None:
            return Value(varying_dims=frozenset(range(np.ndim(x))) if hasattr(x, "dtype") else frozenset())
        if number.uniform:
            return self.with_power(Value(number=number))
        array = number.array
        dims = frozenset(d for d in range(array.ndim) if array.size and (array != array.take([0], d)).any())
        return Value(varying_dims=dims, number=number)

    def _memoize_in_loop(self, key: tuple[Any, ...], referents: Any, make: Callable[[], Result]) -> Result:
        """Return the same object in each round of a loop, so that the memo of `read_program` recognises it."""
        return self.memoize(key, referents, make) if self.in_loop else make()

    def with_power(self, x: Value) -> Value:
        """Return a uniform whole value with the power that its numbers in the program and the twin show."""
        assert x.number is not None
        value, twin_value = x.number.pair
        if twin_value is None:
            return x
        return replace(x, power=0 if x.is_zero else power_between(float(np.real(value)), float(np.real(twin_value))))

    def size_power(self, eqn: Any, twin: Any, dims: Sequence[tuple[int, int]]) -> float:
        """Return the power of n in the product of some sizes, given as (operand, dim) each."""
        if twin is None or not dims:
            return 0
        sizes = [(input_shapes(eqn)[i][d], input_shapes(twin)[i][d]) for i, d in dims]
        return power_between(math.prod(n for n, _ in sizes), math.prod(m for _, m in sizes))

    def read_equation(self, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value]:
        """Return the values of an equation's results from the values of its operands."""
        name, has_coupled = eqn.primitive.name, any(x.kind == "coupled" for x in ins)
        # Equinox's `unvmap_any` decides for all rows when a loop ends, or whether an error is raised. Read through its
        # implementation it is `any` over rows, an error. As a primitive without a rule it is no certain coupling.
        if not name.startswith("unvmap") and (program := implemented(eqn)) is not None:
            twin_program = implemented(twin) if twin is not None else None
            return [_located(eqn, x) for x in self.read_program(program, twin_program, ins)]
        if (always := ALWAYS.get(name)) is not None:
            return [_located(eqn, x) for x in _one_for_each(eqn, always(self, eqn, twin, ins))]
        primitive_rule = RULES.get("coupled" if has_coupled else name, RULES[""])

        def apply_rule() -> list[Value]:
            outs = _one_for_each(eqn, primitive_rule(self, eqn, twin, ins))
            # The coupled rule has chosen which notes stay: the square of a root, say, has lost the root's note.
            operands = [replace(x, notes=frozenset()) for x in ins] if has_coupled else ins
            return self._finish(eqn, twin, operands, outs)

        # Layers in a Python loop have the same equations again, most of them with the same operands.
        key = self._key_of_reading(eqn, twin, ins)
        return apply_rule() if key is None else self.memoize(key, (), apply_rule)

    def _key_of_reading(self, eqn: Any, twin: Any, ins: Sequence[Value]) -> tuple[Any, ...] | None:
        """Return everything that the rule of an equation reads; None if it must be read again each time.

        The traceback counts, since notes name the user's line. Two sorts give two orders, whatever they sort.
        """
        if eqn.effects or eqn.primitive.name in ("sort", "top_k"):
            return None
        of_equation = lambda e: (e.primitive, *e.params.items(), *(v.aval for v in (*e.invars, *e.outvars)))
        is_self_product = len(ins) > 1 and eqn.invars[0] is eqn.invars[1]
        equations = of_equation(eqn), None if twin is None else of_equation(twin)
        settings = eqn.source_info.traceback, is_self_product, self.in_loop, self.in_backward
        key = ("equation", equations, settings, *(x.identity_key for x in ins))
        try:
            hash(key)
        except TypeError:  # a parameter that cannot be hashed
            return None
        return key

    def _finish(self, eqn: Any, twin: Any, ins: Sequence[Value], outs: Sequence[Value]) -> list[Value]:
        """Complete the results of any equation: pass notes on, attach numbers, and derive powers from numbers."""
        # 1. Notes of the operands, and notes on parameters that depend on the number of rows.
        notes = [*notes_of(ins), *_parameter_notes(eqn, twin, ins)]
        if _tests_for_nan(eqn):
            notes = [replace(note, only_if_nan_tested=False) for note in notes]
            outs = [
                replace(x, notes=frozenset(replace(note, only_if_nan_tested=False) for note in x.notes)) for x in outs
            ]
        if not eqn.primitive.name.startswith(("gather", "scatter")):  # their rules give these notes if they matter
            notes += [note for x in ins for note in column_notes(eqn, x)]
        # 2. Numbers that follow from the operands' numbers.
        is_keyed = any(x.is_keyed for x in ins)
        in_numbers, results = [x.number for x in ins], list[Value]()
        key = ("computed", id(eqn), id(twin), *(x and x.key for x in in_numbers))
        numbers = self._memoize_in_loop(key, (eqn, twin, in_numbers), lambda: computed_numbers(eqn, twin, in_numbers))
        for x, number, v in zip(outs, numbers, eqn.outvars, strict=True):
            x = replace(x.with_notes(*notes), number=x.number or number)
            if not jnp.issubdtype(v.aval.dtype, jnp.inexact) or eqn.primitive.name == "stop_gradient":
                # No gradient flows through this result, so that notes on derivatives end here.
                x = replace(x, notes=frozenset(n for n in x.notes if not n.in_backward))
            if x.kind == "whole":
                x = replace(x, is_keyed=is_keyed, pick_note=None if is_keyed else x.pick_note or first_pick_note(ins))
                if x.number is not None and x.number.uniform:
                    x = replace(x, varying_dims=frozenset())
                    # 3. A uniform number shows the power, if an operand's power or size may have changed it.
                    if any(y.power or (y.number is not None and not y.number.uniform) for y in ins):
                        x = self.with_power(x)
            results.append(x)
        return results


def _one_for_each(eqn: Any, outs: Sequence[Value] | Value) -> Sequence[Value]:
    """Return one value for each result of an equation; a rule may return a single value for all of them."""
    return [outs] * len(eqn.outvars) if isinstance(outs, Value) else outs


def _located(eqn: Any, x: Value) -> Value:
    """Return a result of an inner program, with the line of `eqn` in notes that name no line of the user's."""
    # For a branch within a library, the call around the `cond` names the line instead.
    line = jx.user_line(eqn) if eqn.primitive.name == "cond" else jx.where(eqn)
    if not line or not any(n.line == UNNAMED_LINE for n in x.notes):
        return x
    return replace(x, notes=frozenset(replace(n, line=line) if n.line == UNNAMED_LINE else n for n in x.notes))


def _tests_for_nan(eqn: Any) -> bool:
    """Return whether an equation tells NaN from numbers: `jnp.isfinite`, or `jnp.isnan`, which is x != x."""
    name = eqn.primitive.name
    return name == "is_finite" or (name in ("eq", "ne") and eqn.invars[0] is eqn.invars[1])


def _parameter_notes(eqn: Any, twin: Any, ins: Sequence[Value]) -> Iterator[Note]:
    """Yield notes on parameters, other than shapes, that differ in the twin: `x ** n`, or `x[:, n]`."""
    if twin is None:
        return
    grouped = {f.grouped: f for f in factors.of(eqn) if f.grouped}
    for name, value in eqn.params.items():
        twin_value = twin.params.get(name)
        if name in grouped and _groups_alike(eqn, twin, grouped[name]):
            continue
        if isinstance(value, tuple) and name in ("start_indices", "limit_indices", "padding_config"):
            (shape, *_), (twin_shape, *_) = input_shapes(eqn), input_shapes(twin)
            if len(shape) != len(twin_shape):
                message = f"gives {eqn.primitive.name} an array with as many dims as {FUNCTION_OF_BLOCK_SIZE}"
                yield Note.of_eqn(eqn, message, is_certain=False)
                continue
            # Along dims whose size depends on the number of rows, these parameters must differ.
            fixed_dims = [d for d, (n, m) in enumerate(zip(shape, twin_shape, strict=True)) if n == m]
            value, twin_value = [value[d] for d in fixed_dims], [twin_value[d] for d in fixed_dims]
        elif not isinstance(value, int | float | str):
            continue
        if name == "k" and all(output_shape(e) == input_shapes(e)[0] for e in (eqn, twin)):
            continue  # top_k of all elements along a dim
        # `value == value` excludes NaN, the fill value for indices outside of an array.
        if value != twin_value and value == value:
            # The derivative of `x[i]` pads a row's cotangent with zeros, at the place where the row was.
            puts_row_back = name == "padding_config" and ins[0].kind == "rows" and not ins[0].labels.dims
            message = f"passes to {eqn.primitive.name} {FUNCTION_OF_BLOCK_SIZE}"
            yield Note.of_eqn(eqn, message, is_certain=not puts_row_back)


def _groups_alike(eqn: Any, twin: Any, factor: factors.Factor) -> bool:
    """Return whether twice the rows only give more groups of the same size, as if each row has its own kernel."""
    n, m = eqn.params[factor.grouped], twin.params[factor.grouped]
    dims = [(k, d) for k, d in enumerate(factor.ins) if d is not None]
    return all(input_shapes(eqn)[k][d] * m == input_shapes(twin)[k][d] * n for k, d in dims)


def pair_equations(eqns: Sequence[Any], twin_eqns: Sequence[Any]) -> tuple[dict[int, Any], Any]:
    """Pair the equations of a program and its twin, the program for twice the rows, from both ends.

    Returns:
      twins: index of an equation -> the twin's equation.
      unpaired: the first equation that has no partner, which makes the twin another program; None if all have one.
    """
    kind = lambda e: (e.primitive, len(e.outvars), *map(jx.is_literal, e.invars[:4]))
    count_alike = lambda pairs: sum(1 for _ in itertools.takewhile(lambda pair: kind(pair[0]) == kind(pair[1]), pairs))
    num_first = count_alike(zip(eqns, twin_eqns, strict=False))
    num_last = count_alike(zip(reversed(eqns[num_first:]), reversed(twin_eqns[num_first:]), strict=False))
    twins = {i: twin_eqns[i] for i in range(num_first)}
    twins |= {len(eqns) - i: twin_eqns[len(twin_eqns) - i] for i in range(1, num_last + 1)}
    return twins, next(iter((*eqns[num_first:], *twin_eqns[num_first:])), None)


def column_notes(eqn: Any, x: Value) -> list[Note]:
    """Return a note if a known column of indices, which are rows, is not the same for each row."""
    message = f"applies {eqn.primitive.name} to a row's place in its block; put it into the batch"
    is_same = all(same_in_all_rows(x.labels.array[..., 0], *x.column(c)) for c, _ in x.columns)
    return [] if is_same else [Note.of_eqn(eqn, message, is_certain=False)]


def power_between(value: float, twin_value: float) -> float:
    """Return the power of n, a multiple of 1/2, of a number that is `twin_value` for twice the rows.

    Returns `UNKNOWN_POWER` if no such power fits.
    """
    if value == twin_value:
        return 0
    ratio = twin_value / value if value else math.nan
    # Square roots give powers of 1/2.
    power = round(2 * math.log2(ratio)) / 2 if 0 < ratio < math.inf else UNKNOWN_POWER
    return power if math.isclose(ratio, 2**power, rel_tol=1e-5) else UNKNOWN_POWER
