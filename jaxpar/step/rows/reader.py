"""Reads a traced loss, equation by equation, and says what each value has to do with rows.

An abstract interpretation over `values.Value`: it runs nothing but what follows from sizes alone. `program/factors.py`
says which dims of an equation's operands and results are one index; what is no factor has a rule of its own here. An
equation that nothing is known of, and that rows go into, may couple them.

One trace does not show powers of the number of rows n, which is a plain number in it. It is read beside its `twin`, the
same loss on twice the rows: the ratio of two literals, or of two sizes, is 2^power.
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
from .labels import alike
from .numbers import computed, constant
from .values import NUMBER, ODD, UNNAMED, Note, Value, picks, reasons

PrimitiveRule = Callable[["Reader", Any, Any, Sequence[Value]], "Sequence[Value] | Value"]
Rule = TypeVar("Rule", bound=PrimitiveRule)
Made = TypeVar("Made")
RULES: dict[str, PrimitiveRule] = {}  # what an equation makes of rows, sums and whole values
ALWAYS: dict[str, PrimitiveRule] = {}  # of coupled ones too: calls and collectives


def rule(*names: str, table: dict[str, PrimitiveRule] = RULES) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of some primitives: (reader, equation, its twin or None, inputs) -> outputs, or
    one value if they are all alike.
    """
    return lambda fun: table.update(dict.fromkeys(names, fun)) or fun


def shapes(eqn: Any) -> list[tuple[int, ...]]:
    """The shapes of the inputs."""
    return [tuple(getattr(v.aval, "shape", ())) for v in eqn.invars]


def shape_of(eqn: Any, out: int = 0) -> tuple[int, ...]:
    """The shape of an output."""
    return tuple(getattr(eqn.outvars[out].aval, "shape", ()))


@dataclass(frozen=True)
class Reader:
    """One reading of a loss.

    Attributes:
      rows: how many a block has.
      axes, twin_axes: the mesh axes over which blocks are spread, name -> size, in the program and in its twin.
      looped: whether this is the body of a loop.
      backward: whether this is a derivative, which the loss's own derivative does not go through.
      memo: what `once` has made.
    """

    rows: int
    axes: Mapping[str, int]
    twin_axes: Mapping[str, int]
    looped: bool = False
    backward: bool = False
    memo: dict[tuple[Any, ...], tuple[Any, Any]] = field(default_factory=dict)

    def once(self, key: tuple[Any, ...], kept: Any, make: Callable[[], Made]) -> Made:
        """What has been made for a key already, or is made now. What the key has the ids of is `kept`, so that no other
        object gets one of them.
        """
        if key not in self.memo:
            self.memo[key] = (kept, make())
        return self.memo[key][1]

    def run(self, program: Any, twin: Any, consts: Sequence[Value], inputs: Sequence[Value]) -> list[Value]:
        """The outputs of a jaxpr (or a `jx.Flat`)."""
        if not self.looped:
            return self._run(program, twin, consts, inputs)
        # A loop is read until its carry settles, and in each of these rounds the loops within it are too. Most of what
        # they are given has been read before: without the memo, reading would take 2^depth times as long, and more.
        key = ("run", id(program), id(twin), self.backward, *(x.known for x in (*consts, *inputs)))
        kept = (program, twin, consts, inputs)
        return list(self.once(key, kept, lambda: self._run(program, twin, consts, inputs)))

    def _run(self, program: Any, twin: Any, consts: Sequence[Value], inputs: Sequence[Value]) -> list[Value]:
        env: dict[Any, Value] = dict(zip([*program.constvars, *program.invars], [*consts, *inputs], strict=True))
        twins, other = paired(program.eqns, twin.eqns) if twin is not None else ({}, None)
        for i, eqn in enumerate(program.eqns):
            ins = [self.read(env, v, k, twins[i].invars if i in twins else ()) for k, v in enumerate(eqn.invars)]
            env.update(zip(eqn.outvars, self.equation(eqn, twins.get(i), ins), strict=True))
        what = "is another program for twice the rows, so that what it makes of their number is not known"
        notes = [Note.at(other, what, certain=False)] if other is not None else []
        outs = enumerate(program.outvars)
        return [self.read(env, v, k, twin.outvars if twin is not None else ()).noted(*notes) for k, v in outs]

    def inner(self, jaxpr: Any, twin: Any, inputs: Sequence[Value]) -> list[Value]:
        """The outputs of a jaxpr that an equation holds, closed or not."""
        opened, consts = jx.opened(jaxpr)
        other, others = jx.opened(twin) if twin is not None else (None, ())
        return self.run(opened, other, self.constants(consts, others), inputs)

    def read(self, env: Mapping[Any, Value], atom: Any, k: int, twins: Sequence[Any]) -> Value:
        """The value of a variable or literal, the k-th of some, beside those of the twin."""
        if not jx.is_literal(atom):
            return env[atom]
        return self.constant(atom.val, twins[k].val if k < len(twins) and jx.is_literal(twins[k]) else None)

    def constants(self, values: Sequence[Any], twins: Sequence[Any]) -> list[Value]:
        """The values of arrays that a trace closed over."""
        found = twins if len(twins) == len(values) else [None] * len(values)
        return list(map(self.constant, values, found))

    def constant(self, x: Any, twin: Any) -> Value:
        """A number or array that stands in the program."""
        number = self._number(("constant", id(x), id(twin)), (x, twin), lambda: constant(x, twin))
        if number is None:
            return Value(varies=frozenset(range(np.ndim(x))) if hasattr(x, "dtype") else frozenset())
        if number.uniform:
            return self.powered(Value(number=number))
        array = number.array
        varies = frozenset(d for d in range(array.ndim) if array.size and (array != array.take([0], d)).any())
        return Value(varies=varies, number=number)

    def _number(self, key: tuple[Any, ...], kept: Any, make: Callable[[], Made]) -> Made:
        """The same number in each round of a loop, so that `run` knows it again."""
        return self.once(key, kept, make) if self.looped else make()

    def powered(self, x: Value) -> Value:
        """A whole value with the power that its two numbers show."""
        assert x.number is not None
        one, two = x.number.pair
        if two is None:
            return x
        return replace(x, power=0 if x.zero else power_between(float(np.real(one)), float(np.real(two))))

    def growth(self, eqn: Any, twin: Any, dims: Sequence[tuple[int, int]]) -> float:
        """The power of n that the product of some sizes has: (input, dim) each."""
        if twin is None or not dims:
            return 0
        sizes = [(shapes(eqn)[i][d], shapes(twin)[i][d]) for i, d in dims]
        return power_between(math.prod(a for a, _ in sizes), math.prod(b for _, b in sizes))

    def equation(self, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value]:
        """What comes out of one equation."""
        name, some = eqn.primitive.name, any(x.kind == "coupled" for x in ins)
        # "unvmap_any" ends loops and finds errors: what a row has been given is not known from there, nor refused.
        if not name.startswith("unvmap") and (program := implemented(eqn)) is not None:
            twins = implemented(twin) if twin is not None else None
            return [_located(eqn, x) for x in self.inner(program, twins, ins)]
        fun = ALWAYS.get(name) or RULES.get("coupled" if some else name, RULES[""])
        outs = fun(self, eqn, twin, ins)
        outs = [outs] * len(eqn.outvars) if isinstance(outs, Value) else outs
        if name in ALWAYS:
            return [_located(eqn, x) for x in outs]
        if some:  # what couples them may have cancelled
            ins = [replace(x, notes=frozenset()) for x in ins]
        return self._finished(eqn, twin, ins, outs)

    def _finished(self, eqn: Any, twin: Any, ins: Sequence[Value], outs: Sequence[Value]) -> list[Value]:
        """What becomes of any equation's results: notes go on, numbers are made."""
        notes = [*reasons(ins), *_differing(eqn, twin, ins)]
        if _tests_for_nan(eqn):
            notes = [replace(note, of_nan=False) for note in notes]
            outs = [replace(x, notes=frozenset(replace(note, of_nan=False) for note in x.notes)) for x in outs]
        if not eqn.primitive.name.startswith(("gather", "scatter")):  # they say it where it matters
            notes += [note for x in ins for note in column_notes(eqn, x)]
        keyed = any(x.keyed for x in ins)
        known, found = [x.number for x in ins], list[Value]()
        key = ("computed", id(eqn), id(twin), *(x and x.key for x in known))
        numbers = self._number(key, (eqn, twin, known), lambda: computed(eqn, twin, known))
        for x, number, v in zip(outs, numbers, eqn.outvars, strict=True):
            x = replace(x.noted(*notes), number=x.number or number)
            if not jnp.issubdtype(v.aval.dtype, jnp.inexact) or eqn.primitive.name == "stop_gradient":
                x = replace(x, notes=frozenset(n for n in x.notes if not n.backward))  # no gradient goes through it
            if x.kind == "whole":
                x = replace(x, keyed=keyed, pick=None if keyed else x.pick or picks(ins))
                if x.number is not None and x.number.uniform:
                    x = replace(x, varies=frozenset())
                    if any(y.power or (y.number is not None and not y.number.uniform) for y in ins):
                        x = self.powered(x)
            found.append(x)
        return found


def _located(eqn: Any, x: Value) -> Value:
    """A result of an inner program, of whose lines none may be the user's."""
    # A branch of a library's is named by the call around it, which stands in the user's program.
    line = jx.user_line(eqn) if eqn.primitive.name == "cond" else jx.where(eqn)
    if not line or not any(n.line == UNNAMED for n in x.notes):
        return x
    return replace(x, notes=frozenset(replace(n, line=line) if n.line == UNNAMED else n for n in x.notes))


def _tests_for_nan(eqn: Any) -> bool:
    """Whether an equation tells NaN from numbers: `jnp.isfinite`, or `jnp.isnan`, which is x != x."""
    name = eqn.primitive.name
    return name == "is_finite" or (name in ("eq", "ne") and eqn.invars[0] is eqn.invars[1])


def _differing(eqn: Any, twin: Any, ins: Sequence[Value]) -> Iterator[Note]:
    """What is to be said of parameters, beside shapes, that are not those of the twin: `x ** n`, or `x[:, n]`."""
    if twin is None:
        return
    grouped = {f.grouped: f for f in factors.of(eqn) if f.grouped}
    for name, value in eqn.params.items():
        other = twin.params.get(name)
        if name in grouped and _groups_alike(eqn, twin, grouped[name]):
            continue
        if isinstance(value, tuple) and name in ("start_indices", "limit_indices", "padding_config"):
            same = [d for d, (n, m) in enumerate(zip(shapes(eqn)[0], shapes(twin)[0], strict=True)) if n == m]
            value, other = [value[d] for d in same], [other[d] for d in same]
        elif not isinstance(value, int | float | str):
            continue
        if name == "k" and all(shape_of(e) == shapes(e)[0] for e in (eqn, twin)):
            continue  # top_k of all that a dim has
        if value != other and value == value:  # NaN where indices are outside of an array
            # The derivative of `x[i]` puts a row's own back to where it was, among zeros.
            back = name == "padding_config" and ins[0].kind == "rows" and not ins[0].at.dims
            yield Note.at(eqn, f"{eqn.primitive.name} by {NUMBER}", certain=not back)


def _groups_alike(eqn: Any, twin: Any, factor: factors.Factor) -> bool:
    """Whether twice the rows are as many more groups of the same size, as where each row has a kernel of its own."""
    n, m = eqn.params[factor.grouped], twin.params[factor.grouped]
    dims = [(k, d) for k, d in enumerate(factor.ins) if d is not None]
    return all(shapes(eqn)[k][d] * m == shapes(twin)[k][d] * n for k, d in dims)


def paired(eqns: Sequence[Any], twins: Sequence[Any]) -> tuple[dict[int, Any], Any]:
    """For equations, by number, those of the same program for twice the rows, and the first that makes it another
    program: they are paired from both ends.
    """
    kind = lambda e: (e.primitive, len(e.outvars), *map(jx.is_literal, e.invars[:4]))
    alike = lambda pairs: sum(1 for _ in itertools.takewhile(lambda pair: kind(pair[0]) == kind(pair[1]), pairs))
    first = alike(zip(eqns, twins, strict=False))
    last = alike(zip(reversed(eqns[first:]), reversed(twins[first:]), strict=False))
    found = {i: twins[i] for i in range(first)}
    found |= {len(eqns) - i: twins[len(twins) - i] for i in range(1, last + 1)}
    return found, next(iter((*eqns[first:], *twins[first:])), None)


def column_notes(eqn: Any, x: Value) -> list[Note]:
    """What is to be said of indices that are rows, where a column that is known is not the same for each."""
    what = f"{eqn.primitive.name} with a row's place in its block; put it into the batch"
    same = all(alike(x.at.array[..., 0], *x.column(c)) for c, _ in x.columns)
    return [] if same else [Note.at(eqn, what, certain=False)]


def power_between(one: float, two: float) -> float:
    """The power of n, a multiple of 1/2, of a number that is `two` for twice the rows; `ODD` if there is none."""
    if one == two:
        return 0
    ratio = two / one if one else math.nan
    power = round(2 * math.log2(ratio)) / 2 if 0 < ratio < math.inf else ODD
    return power if power == power and math.isclose(ratio, 2**power, rel_tol=1e-5) else ODD
