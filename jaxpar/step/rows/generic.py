"""What any equation makes of rows, by its factors: which dims of its operands and results are one index.

A factor that has rows and survives leaves them rows; one that is summed makes sums over rows of them. Along what is no
factor, rows are mixed. All operands meet where each factor is a dim: there their rows must be the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...program import factors, primitives
from ...program import jaxpr as jx
from ...program.primitives import PRIMITIVES
from .labels import Labels, moved
from .numbers import computed
from .reader import Reader, rule, shape_of, shapes
from .values import (
    FROM_ALL,
    GATHER,
    NUMBER,
    ODD,
    PICKS,
    SOME,
    Note,
    Value,
    coupled,
    mixed,
    others,
    picks,
    position,
    some_rows,
)

# What is linear in all its operands but those that say where.
LINEAR = {name for name, known in PRIMITIVES.items() if known.linear not in ("", "each") and name != "div"}
LINEAR |= {"dynamic_update_slice", "scatter", "scatter-add", "stop_gradient"}
PRODUCTS = {name for name, known in PRIMITIVES.items() if known.linear == "each"}
_BOUNDS = {"and", "clamp", "convert_element_type", "div", "floor", "max", "min", "rem", "round", "sign"}
_SAID = {"approx_top_k": "sort", "fft": "Fourier transform", "reduce_max": "maximum", "reduce_min": "minimum"}
_INVERSE = (jax.lax.FftType.IFFT, jax.lax.FftType.IRFFT)
_SAID |= {"reduce_or": "any", "reduce_and": "all"}


class Met:
    """Where the operands of an equation meet: each of its factors is a dim.

    Attributes:
      factors, sizes: in order.
      known: whether anything is known of the primitive.
      ins: for each dim of each operand its factor, or None.
      outs: for each result and factor its dim, or None.
    """

    def __init__(self, eqn: Any) -> None:
        self.eqn, self.factors, self.known = eqn, factors.of(eqn), bool(primitives.of(eqn).factors)
        number = lambda k, d: next((i for i, f in enumerate(self.factors) if f.ins[k] == d), None)
        self.ins = [[number(k, d) for d in range(len(s))] for k, s in enumerate(shapes(eqn))]
        self.outs = [[f.outs[j] for f in self.factors] for j in range(len(eqn.outvars))]
        every = [*shapes(eqn), *(shape_of(eqn, j) for j in range(len(eqn.outvars)))]
        size = lambda f: max(s[d] for s, d in zip(every, (*f.ins, *f.outs), strict=True) if d is not None)
        self.sizes = [eqn.params[f.grouped] if f.grouped else size(f) for f in self.factors]

    def to_factors(self, k: int, array: np.ndarray) -> np.ndarray | None:
        """The row labels of operand k with one dim for each factor; None where they differ along what is no factor, or
        within one of its groups.
        """
        for d, i in enumerate(self.ins[k]):
            if (n := array.shape[d]) > 1:
                if i is None:
                    return None
                every, size = array, n // self.sizes[i]  # of a group: 1, but for a convolution's
                array = every.take(range(0, n, size), d)
                if not np.array_equal(array.repeat(size, d), every):
                    return None
        return moved(array, self.ins[k], len(self.factors))

    def to_result(self, j: int, array: np.ndarray) -> np.ndarray:
        """Row labels with one dim for each factor -> those of result j."""
        shape = shape_of(self.eqn, j)
        array = moved(array, self.outs[j], len(shape))
        for d, n in enumerate(shape):
            if array.shape[d] not in (1, n):
                array = np.repeat(array, n // array.shape[d], axis=d)
        return array

    def whole(self, k: int, x: Value) -> Value:
        """A whole operand."""
        to = self.ins[k]
        same = x.scalar is not None or to == [*range(len(self.factors))]
        varies = frozenset(i for d in x.varies if (i := to[d]) is not None)
        return replace(x, varies=varies, number=x.number if same else None)

    def result(self, r: Reader, j: int, x: Value) -> Value:
        """Rows, where all meet, as they are in result j."""
        name, gone = self.eqn.primitive.name, [i for i in x.at.dims if self.outs[j][i] is None]
        how = {self.factors[i].reduced for i in gone}
        if not gone:
            return replace(x, at=Labels(self.to_result(j, x.at.array)))
        if x.routed and not x.places:
            what = f"{name} over the tokens of experts, which are of many rows; {FROM_ALL}"
            return coupled([x], Note.at(self.eqn, what))
        if how != {"sum"}:
            return coupled([x], Note.at(self.eqn, f"{_SAID.get(name, name)} over rows; {FROM_ALL}"))
        if not x.of_all(r.rows):
            some = coupled([x], x.pick or some_rows(self.eqn))
            return replace(some, part=frozenset() if x.routed else frozenset(x.at.array.flat))
        left = frozenset(d for i in x.order.dims if (d := self.outs[j][i]) is not None)
        return Value("sum", power=x.power, varies=left, pick=x.pick, notes=x.notes)


@rule("")
def generic(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value]:
    """The rule of what has none of its own."""
    met, name, results = Met(eqn), eqn.primitive.name, range(len(eqn.outvars))
    alike = lambda x: [x] * len(results)
    rows = {k: x for k, x in enumerate(ins) if x.kind == "rows"}
    if any(x.kind == "sum" for x in ins):
        return _of_sums(r, eqn, twin, ins, met)
    if not rows:
        return [_of_whole(r, eqn, twin, ins, met, j) for j in results]
    plus = any(x.plus for x in rows.values())
    if plus and name not in LINEAR and (name not in PRODUCTS or len(rows) > 1):
        return alike(mixed(eqn, ins, "a product with" if name in PRODUCTS else f"{name} of rows that hold"))
    found = {k: met.to_factors(k, x.at.array) for k, x in rows.items()}
    labels = {k: Labels(at) for k, at in found.items() if at is not None}
    if len(labels) < len(rows):
        return alike(mixes_rows(eqn, ins, met.known))
    if len({*labels.values()}) > 1:
        kept = all(met.outs[0][i] is not None for at in labels.values() for i in at.dims)
        return alike(replace(others(eqn, ins, "a product of" if name in PRODUCTS else ""), pairs=kept))
    (k, x), *_ = rows.items()
    x = x.plain(at=labels[k], plus=plus, pick=picks(rows.values()))
    summed = any(out[i] is None for out in met.outs for i in x.at.dims)
    what = "weights rows by their place in the block; put the weights into the batch" if summed else ""
    wholes = [met.whole(k, y) for k, y in enumerate(ins) if y.kind == "whole"]
    places = [note for y in wholes for note in position(eqn, y, x, what)]
    if plus and places and name in PRODUCTS:
        return alike(mixed(eqn, ins, "a product, row by row, with"))
    return [met.result(r, j, powered(r, eqn, twin, ins, met, x.noted(*places), j)) for j in results]


def _of_whole(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value], met: Met, j: int) -> Value:
    """Result j of whole operands. Along what is no factor, it may differ in any case."""
    to, found = met.outs[j], Value()
    varies = {d for d in range(len(shape_of(eqn, j))) if not met.known or d not in to}
    more = 0.0
    for k, x in enumerate(ins):
        up = met.whole(k, x)
        for i in up.varies:
            if (d := to[i]) is not None:
                varies.add(d)
            else:  # more numbers than of fewer rows would be others
                more = more or r.growth(eqn, twin, [(k, met.ins[k].index(i))])
    found = powered(r, eqn, twin, ins, met, found, j).noted(*_same_places(eqn, twin, ins))
    return replace(found, varies=frozenset(varies), power=ODD if more else found.power)


def _same_places(eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Note]:
    """What is to be said where `arange(n) < 64`, or `arange(n) % 64`, does nothing to blocks of 16 rows and of 32."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    bounds = primitives.of(eqn).compares or (out.dtype != bool and (name in _BOUNDS or "shift" in name))
    if twin is None or not bounds or out.shape == shape_of(twin) or 0 in out.shape:
        return []
    (number,) = computed(eqn, twin, [x.number for x in ins])
    if number is None or number.uniform or number.pair[1] is None:
        return []
    pairs = [x.number.pair for x in ins if x.number is not None]
    same = [k for k, a in enumerate((number.array.flat[0], *(a for a, _ in pairs))) if (number.array == a).all()]
    if not same:
        return []
    ends = [[np.real([np.min(a), np.max(a)]).astype(float) for a in pair] for pair in pairs]
    with jax.ensure_compile_time_eval(), np.errstate(all="ignore"):  # far beyond, where numbers have grown on so
        far = [a + np.nan_to_num(b - a) * ((1 << 30) // (1 + np.abs(ends).max())) for a, b in ends]
        points = np.broadcast_arrays(*np.ix_(*(np.clip(np.concatenate(far), *x) for x in far)))
        points = [x.astype(v.aval.dtype) for x, v in zip(points, eqn.invars, strict=True)]
        if (jx.bind(eqn, points)[0] == [number.array.flat[0], *points][same[0]].astype(out.dtype)).all():
            return []
    return [Note.at(eqn, f"{name} of places does nothing in this block, and may in the whole batch", certain=False)]


def powered(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value], met: Met, x: Value, j: int = 0) -> Value:
    """Result j with its power of the number of rows, and what is to be said where it has none."""
    name, inexact = eqn.primitive.name, lambda v: jnp.issubdtype(v.aval.dtype, jnp.inexact)
    data = [y for y, v in zip(ins, eqn.invars, strict=True) if inexact(v) or not inexact(eqn.outvars[j])]
    first, *more = [y.power for y in data if not y.zero] or [0]
    own = {"rows": x.at.dims, "sum": x.varies}.get(x.kind, ())
    summed = [i for i, f in enumerate(met.factors) if f.reduced == "sum" and i not in own]
    side = lambda i: next((k, d) for k, d in enumerate(met.factors[i].ins) if d is not None)
    growth = r.growth(eqn, twin, [side(i) for i in summed])
    alike = all(p == first for p in more) or (len(ins) > 1 and eqn.invars[0] is eqn.invars[1])
    rounded = not inexact(eqn.outvars[j]) and any(map(inexact, eqn.invars))
    if growth and x.kind != "whole":
        x = x.noted(Note.at(eqn, "sums over as many numbers as a block has rows", certain=False))
    if name in PRODUCTS:
        power = sum(y.power for y in ins) + growth
    elif not any((first, *more)):
        power = growth
    elif name in ("div", "triangular_solve"):
        power = (ins[0].power - ins[1].power) * (1 if name == "div" else -1)
    elif alike and primitives.of(eqn).scaling == "none":
        power = 0
    elif alike and (name in LINEAR or primitives.of(eqn).scaling == "first") and not rounded:
        power = first + growth
    elif (name in LINEAR and not rounded) or any(y.unknown for y in ins) or all(y.number is not None for y in ins):
        power = ODD  # a function of it will be named; or it has been; or it is known as a number
    else:
        certain = not primitives.of(eqn).compares or any(map(inexact, eqn.invars))  # an index may be one of none
        return replace(x, power=ODD).noted(Note.at(eqn, f"{name} of {NUMBER}", certain))
    return replace(x, power=power if power == power else ODD)


def mixes_rows(eqn: Any, ins: Sequence[Value], known: bool = True) -> Value:
    """The result of an equation that mixes rows along a dim of theirs, as a sort does."""
    name = eqn.primitive.name
    if not known:
        return coupled(ins, Note.at(eqn, f"{name} may mix rows: jaxpar has no rule for it", certain=False))
    said, certain = f"{_SAID.get(name, name)} over rows; {FROM_ALL}", name not in ("reduce", "pad")
    if name in ("sort", "approx_top_k") and len(ins) > 1:  # as where tokens are sorted by their experts and put back
        said, certain = said.replace(";", ", of no effect if results go back to their rows; else"), False
    return coupled(ins, Note.at(eqn, said, certain))


def _of_sums(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value], met: Met) -> list[Value]:
    name, outs = eqn.primitive.name, list[Value]()
    x, *more = [y for y in ins if y.kind == "sum"]
    k = ins.index(x)
    dims = {d: met.ins[k][d] for d in x.varies}
    wholes = [met.whole(i, y) for i, y in enumerate(ins) if y.kind == "whole"]
    places = any({*dims.values()} & y.varies for y in wholes)
    linear = name in LINEAR | PRODUCTS or (name == "div" and k == 0)
    if more or any(y.kind == "rows" for y in ins) or not linear or (name == "pad" and not ins[1].zero) or places:
        found = _guarded(eqn, ins) or mixed(eqn, ins, "a product with" if name in PRODUCTS else "")
        return [found] * len(eqn.outvars)
    for j in range(len(eqn.outvars)):
        y = powered(r, eqn, twin, ins, met, x.plain(varies=frozenset(dims.values())), j)
        left = set[int | None]()
        for d, i in dims.items():
            out = None if i is None else met.outs[j][i]
            parted = out is not None and shape_of(eqn, j)[out] < shapes(eqn)[k][d]  # by a reshape
            if i is None or parted or (out is None and met.factors[i].reduced != "sum"):
                y = mixed(eqn, ins)
            left.add(out)
        outs.append(replace(y, varies=frozenset(left - {None})) if y.kind == "sum" else y)
    return outs


def _guarded(eqn: Any, ins: Sequence[Value]) -> Value | None:
    """What is made of a sum over rows to keep a division by it from zero, as `maximum(count, 1)` does; or its root."""
    name, rest = eqn.primitive.name, [y.scalar for y in ins if y.kind != "sum"]
    x = next((y for y in ins if y.kind == "sum"), ins[0])
    if x.kind != "sum" or x.varies:
        return None
    if name == "sqrt":
        return replace(mixed(eqn, ins), root=x)
    compared = primitives.of(eqn).compares and all(y == 0 for y in rest)
    if not compared and not (name == "max" and len(rest) == 1 and rest[0] is not None and rest[0] <= 1):
        return None
    what = f"{name} of a sum over rows, which a block without terms would change; jp.Mean needs no guard"
    return (Value() if compared else x.plain()).noted(Note.at(eqn, what, certain=False))


@rule("coupled")
def _coupled(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    """What is coupled stays so, but for the square of a root. What may come apart again is no certain coupling."""
    name, (x, *more) = eqn.primitive.name, [y for y in ins if y.kind != "whole"]
    itself = name == "mul" and eqn.invars[0] is eqn.invars[1]
    if x.root is not None and (itself or name == "square" or eqn.params.get("y") == 2):
        return x.root
    found, known = coupled(ins), primitives.of(eqn)
    if part := _part(eqn, ins):  # sums over some rows and over the others are one over all, in chunks
        return replace(found, part=part, notes=_doubted(found.notes, SOME) if len(part) == r.rows else found.notes)
    if x.root is not None and known.view and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return replace(found, root=x.root)
    if name == "stop_gradient" and all("imum over rows" in n.what for n in x.notes):
        # As a softmax takes off a maximum, for rounding alone. Not seen here is whether the result depends on it.
        return Value(varies=frozenset(range(len(shape_of(eqn)))), notes=_doubted(x.notes, "imum over rows"))
    # What is taken from, or put at, indices that are not known may be rows that go back to where they were.
    moved = {"gather": ins[0], "scatter": ins[-1]}.get(name, Value())
    if moved.kind == "coupled" and ins[1].number is None and all(y in (moved, ins[1]) for y in (x, *more)):
        return replace(found, notes=_doubted(found.notes, PICKS, "sort over rows"))
    if name == "fft" and eqn.params["fft_type"] in _INVERSE:  # it may undo a transform over rows
        return replace(found, notes=_doubted(found.notes, _SAID["fft"]))
    if more or not x.pairs or not (known.elementwise or known.moves):
        return found
    diagonal = _of_diagonal(eqn, ins, ins.index(x))
    return replace(found, pairs=not diagonal, notes=_doubted(found.notes, GATHER) if diagonal else found.notes)


def _part(eqn: Any, ins: Sequence[Value]) -> frozenset[int]:
    """The rows of a sum over some rows that is multiplied by a number, or added to sums over others; none of other
    values.
    """
    name, parts = eqn.primitive.name, [x.part for x in ins if x.kind != "whole"]
    part = frozenset().union(*parts)
    apart = all(parts) and len(part) == sum(map(len, parts))
    numbers = all(x.scalar is not None for x in ins if x.kind == "whole")
    if len(parts) > 1:
        linear = name in primitives.SUMS and name != "sub"
    else:
        linear = name in LINEAR | PRODUCTS or (name == "div" and ins[0].part == part)
    return part if apart and numbers and linear else frozenset()


def _doubted(notes: Collection[Note], *what: str) -> frozenset[Note]:
    """The same, those that say any of it no longer certain."""
    return frozenset(replace(n, certain=n.certain and not any(one in n.what for one in what)) for n in notes)


def _of_diagonal(eqn: Any, ins: Sequence[Value], k: int) -> bool:
    """Whether a product with known numbers, or a choice between it and zeros, keeps of a matrix its diagonal alone."""
    name = eqn.primitive.name
    zero = name == "mul" or (name == "select_n" and len(ins) == 3 and k > 0 and ins[3 - k].zero)
    mask = ins[1 - k if name == "mul" else 0].number if zero else None
    if mask is None or mask.array.ndim != 2:
        return False
    kept = mask.array != 0
    return np.array_equal(kept if name == "mul" or k == 2 else ~kept, np.eye(*kept.shape, dtype=bool))
