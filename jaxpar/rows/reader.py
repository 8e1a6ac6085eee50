"""Reads a traced loss, equation by equation, and says what each value has to do with rows.

It runs nothing: an abstract interpretation over `values.Value`, by the rule of each primitive (`shapes.py`, `mixes.py`,
`calls.py`). An equation without a rule that rows go into may couple them.

Powers of the number of rows n do not stand in one trace, in which n is a plain number. Read alone, a program is read
kindly: a division by n, or by the number of elements that were added up, makes a mean. Where that leaves a doubt, it is
read beside its `twin`, the same loss traced on twice the rows: the ratio of two constants, or of two sizes, is 2^power.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.extend.core as jec
import numpy as np

from ..program import jaxpr as jx
from .values import ODD, Note, Value, coupled, reasons

PrimitiveRule = Callable[["Reader", Any, Any, Sequence[Value]], "Sequence[Value] | Value | None"]
RULES: dict[str, PrimitiveRule] = {}  # what an equation makes of rows and sums over rows
WHOLE: dict[str, PrimitiveRule] = {}  # what it makes of whole values alone
ALWAYS: dict[str, PrimitiveRule] = {}  # whatever it is given: calls and collectives
APART: dict[str, PrimitiveRule] = {}  # what it makes of coupled values that come apart again
_EYES = frozenset(("eq", "convert_element_type", "copy"))  # what leaves a diagonal where it is
_VALID = _EYES | {"ne", "is_finite", "not", "reduce_sum", "reshape", "broadcast_in_dim", "squeeze", "transpose"}
_LARGE = 1 << 16  # elements of a constant that nobody wants to look through
_LARGEST = 1 << 24  # and of one that is looked through where rows may be coupled otherwise


def rule(*names: str, table: dict[str, PrimitiveRule] = RULES) -> Callable[[PrimitiveRule], PrimitiveRule]:
    """Registers a function as the rule of some primitives: (reader, equation, its twin or None, inputs) -> outputs,
    one value if they are all alike, or None where it knows no better than that rows may be coupled.
    """

    def register(fun: PrimitiveRule) -> PrimitiveRule:
        table.update(dict.fromkeys(names, fun))
        return fun

    return register


def shapes(eqn: Any) -> list[tuple[int, ...]]:
    """The shapes of the inputs."""
    return [tuple(getattr(v.aval, "shape", ())) for v in eqn.invars]


def shape_of(eqn: Any) -> tuple[int, ...]:
    """The shape of the first output."""
    return tuple(getattr(eqn.outvars[0].aval, "shape", ()))


@dataclass(frozen=True)
class Reader:
    """One reading: `rows` in a block, the mesh axes over which blocks are spread, whether programs have twins, and
    whether the program is the body of a loop; where its variables come from: an equation, or an array.
    """

    rows: int
    axes: frozenset[str] = frozenset()
    exact: bool = False
    looped: bool = False
    origins: Mapping[Any, Any] = field(default_factory=dict)

    def run(
        self, program: Any, twin: Any, consts: Sequence[Value], inputs: Sequence[Value], arrays: Sequence[Any] = ()
    ) -> list[Value]:
        """The outputs of a jaxpr (or a `jx.Flat`); `arrays` are what its constants are, where that is known."""
        twins = list(twin.eqns) if twin is not None else []
        names = [e.primitive.name for e in program.eqns]
        if names != [e.primitive.name for e in twins]:
            twin = None
        env: dict[Any, Value] = dict(zip([*program.constvars, *program.invars], [*consts, *inputs], strict=True))
        origins = dict(zip(program.constvars, arrays, strict=False)) | {v: e for e in program.eqns for v in e.outvars}
        reader = replace(self, origins=origins)
        for i, eqn in enumerate(program.eqns):
            other = twins[i] if twin is not None else None
            ins = [self.read(env, v, other and other.invars[k]) for k, v in enumerate(eqn.invars)]
            env.update(zip(eqn.outvars, reader.equation(eqn, other, ins), strict=True))
        outs = twin.outvars if twin is not None else [None] * len(program.outvars)
        return [self.read(env, v, w) for v, w in zip(program.outvars, outs, strict=True)]

    def inner(self, jaxpr: Any, twin: Any, inputs: Sequence[Value]) -> list[Value]:
        """The outputs of a jaxpr that an equation holds, closed or not."""
        opened, consts = jx.opened(jaxpr)
        other, others = jx.opened(twin) if twin is not None else (None, ())
        values = self.constants(consts, others if twin is not None else None)
        return self.run(opened, other, values, inputs, consts)

    def read(self, env: Mapping[Any, Value], atom: Any, twin: Any) -> Value:
        """The value of a variable or literal."""
        if not jx.is_literal(atom):
            return env[atom]
        return self.constant(atom.val, twin.val if twin is not None and jx.is_literal(twin) else None)

    def numbers(self, atom: Any) -> np.ndarray | None:
        """What a value is, where it comes from sizes and constants alone, such as indices; None where it does not, is
        large, or comes out of a call.
        """
        needed, waiting = set[Any](), [atom]
        while waiting:
            if jx.is_literal(v := waiting.pop()) or v in needed:
                continue
            if (made := self.origins.get(v)) is None:
                return None
            if isinstance(made, jec.JaxprEqn):
                large = any(math.prod(getattr(out.aval, "shape", ())) > _LARGEST for out in made.outvars)
                if large or made.effects or made.primitive.name in ALWAYS:
                    return None
                waiting += made.invars
            needed.add(v)
        found: dict[Any, Any] = {}
        read = lambda v: v.val if jx.is_literal(v) else found[v]
        with jax.ensure_compile_time_eval():
            for v, made in self.origins.items():  # as the program has them
                if v in needed and v not in found:
                    outs = [(v, made)]
                    if isinstance(made, jec.JaxprEqn):
                        outs = zip(made.outvars, jx.bind(made, [*map(read, made.invars)]), strict=True)
                    found.update(outs)
            return np.asarray(read(atom))

    def constants(self, values: Sequence[Any], twins: Sequence[Any] | None) -> list[Value]:
        """The values of arrays that a trace closed over."""
        others = twins if twins is not None and len(twins) == len(values) else [None] * len(values)
        return [self.constant(x, other) for x, other in zip(values, others, strict=True)]

    def constant(self, x: Any, twin: Any) -> Value:
        """A number or array that stands in the program."""
        if not hasattr(x, "dtype") and not isinstance(x, bool | int | float):
            return Value()
        size = math.prod(np.shape(x))
        anywhere = frozenset(range(np.ndim(x)))
        if size > _LARGE:
            return Value(varies=anywhere)
        array = np.asarray(x)
        if not np.issubdtype(array.dtype, np.number):
            never = array.dtype == bool and size > 0 and not array.any()  # as of indices that numpy counts: `i < 0`
            return Value(varies=frozenset() if never else anywhere, zero=never)
        varies = frozenset(d for d in range(array.ndim) if array.size and (array != array.take([0], d)).any())
        scalar = float(array.flat[0].real) if size and not varies else None
        zero = bool(size) and not varies and (scalar == 0 or scalar != scalar)
        power = 0 if not self.exact or zero else self._power(x, twin, scalar is not None)
        counts = 0 if array.ndim == 1 < array.size and np.array_equal(array, np.arange(array.size)) else None
        return Value(varies=varies, scalar=scalar, zero=zero, power=power, counts=counts)

    def _power(self, x: Any, twin: Any, uniform: bool) -> float | None:
        if twin is None:
            return None
        a, b = np.asarray(x), np.asarray(twin)
        if not uniform or not b.size or (b != b.flat[0]).any():
            return 0 if a.shape != b.shape or np.array_equal(a, b) else None
        if a.flat[0] == b.flat[0]:
            return 0
        power = doubled(float(b.flat[0].real) / float(a.flat[0].real)) if a.flat[0].real else None
        return ODD if power is None else power

    def growth(self, eqn: Any, twin: Any, dims: Sequence[tuple[int, int]]) -> float | None:
        """The power of n that the product of some sizes has: (input, dim) each."""
        if not self.exact:
            return 0
        if twin is None:
            return None
        sizes = [(shapes(eqn)[i][d], shapes(twin)[i][d]) for i, d in dims]
        return doubled(math.prod(b for _, b in sizes) / max(math.prod(a for a, _ in sizes), 1))

    def equation(self, eqn: Any, twin: Any, ins: Sequence[Value]) -> Sequence[Value]:
        """What comes out of one equation."""
        name = eqn.primitive.name
        ins = [_broadcastable(x, shape) for x, shape in zip(ins, shapes(eqn), strict=True)]
        notes = reasons(ins)
        if name in ALWAYS and (found := ALWAYS[name](self, eqn, twin, ins)) is not None:
            return found if not isinstance(found, Value) else [found] * len(eqn.outvars)
        kinds = {x.kind for x in ins}
        if "coupled" in kinds:
            rule = APART.get(name) if any(x.root or x.pairs for x in ins) else None
            if rule and (apart := rule(self, eqn, twin, ins)) is not None:
                return [apart] if isinstance(apart, Value) else apart
            found = coupled(ins)
        elif "extreme" in kinds:
            return [self._extreme(eqn, ins, kinds)] * len(eqn.outvars)
        elif kinds <= {"whole"}:
            rule = WHOLE.get(name)
            found = rule(self, eqn, twin, ins) if rule else None
            if found is None:
                powers = {x.power for x in ins if not x.zero}
                found = [
                    Value(
                        varies=frozenset(range(len(getattr(v.aval, "shape", ())))), power=0 if powers <= {0} else None
                    )
                    for v in eqn.outvars
                ]
        else:
            rule = RULES.get(name)
            found = rule(self, eqn, twin, ins) if rule else None
            if found is None:
                found = coupled(ins, Note.at(eqn, f"{name} may mix rows: jaxpar has no rule for it", certain=False))
        outs = [found] * len(eqn.outvars) if isinstance(found, Value) else found
        outs = [_known(x, name) for x in outs]
        return [x if notes <= x.notes else x.noted(*notes) for x in outs]

    def _extreme(self, eqn: Any, ins: Sequence[Value], kinds: set[str]) -> Value:
        """What comes of a maximum over rows."""
        if kinds <= {"extreme", "whole"}:
            if eqn.primitive.name != "stop_gradient":
                return next(x for x in ins if x.kind == "extreme")
            # As a softmax takes off a maximum, for rounding alone. Not seen here is whether the result depends on it.
            pending = [Note(n.line, n.what, certain=False) for x in ins for n in x.notes]
            return Value(power=None, varies=frozenset(range(len(shape_of(eqn)))), notes=frozenset(pending))
        return coupled(ins)


def _known(x: Value, name: str) -> Value:
    """What is known of single elements, as long as an equation says so."""
    if x.eye is None and x.valid is None:
        return x
    return replace(x, eye=x.eye if name in _EYES else None, valid=x.valid if name in _VALID else None)


def _broadcastable(x: Value, shape: Sequence[int]) -> Value:
    """A value that does not vary along dims of size 1, which have one element for all that they may be spread over."""
    varies = frozenset(d for d in x.varies if shape[d] > 1)
    return x if varies == x.varies else replace(x, varies=varies)


def doubled(ratio: float) -> float | None:
    """The k for which a ratio is 2^k; None unless it is a multiple of 1/2."""
    if ratio <= 0 or not math.isfinite(ratio):
        return None
    power = round(2 * math.log2(ratio)) / 2
    return power if math.isclose(ratio, 2**power, rel_tol=1e-3) else None
