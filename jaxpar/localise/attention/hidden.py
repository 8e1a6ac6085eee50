"""Which keys a mask lets a query see, read from the program that makes it: by positions and ids, never by trial.

A value of the mask's program is a number, a position, an id, or a choice between two numbers by what is `Seen`. Query i
sees key j where `least <= i - j <= most` and where all ids are equal: causal is `least` 0, a window of w `most` w - 1.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...program import jaxpr as jx
from ...program import primitives

Labels = tuple[Any, ...]  # of each dim: "t" of queries, "s" of keys, "b" another, None of one element


class Hindered(Exception):
    """What is no part of an attention that could be taken, and why."""

    def __init__(self, eqn: Any, why: str):
        super().__init__(f"{why} ({jx.where(eqn)})")


@dataclass(frozen=True)
class Scope:
    """A program, and the one around it as far as its inputs are values of that.

    Attributes:
      flat: the program.
      consts: the arrays that it closed over, by variable.
      around: the program that holds it, None of a whole one.
      outer: of its inputs, those that are values of that program as they are.
      found: by `id` of an equation the attention that ends there, or the program that it holds, where that has some.
      extra: variables of the programs around that are to be inputs as well, before the others.
    """

    flat: jx.Flat
    consts: Mapping[Any, Any]
    around: "Scope | None" = None
    outer: Mapping[Any, Any] = field(default_factory=dict)
    found: dict[int, Any] = field(default_factory=dict)
    extra: dict[Any, None] = field(default_factory=dict)

    @property
    def eqns(self) -> tuple[Any, ...]:
        """Its equations."""
        return self.flat.eqns

    @functools.cached_property
    def _made(self) -> dict[Any, Any]:
        return {v: eqn for eqn in self.eqns for v in eqn.outvars}

    def made(self, atom: Any) -> Any:
        """The equation of a value; None of literals and inputs."""
        return None if jx.is_literal(atom) else self._made.get(atom)

    def bring(self, atom: Any) -> None:
        """Has a variable of this program, or of one around it, be there."""
        if atom not in self._made and atom not in self.consts and atom not in self.flat.invars:
            assert self.around is not None
            self.around.bring(atom)
            self.extra[atom] = None


@dataclass(frozen=True)
class Ids:
    """Integers, one for each query ("t") or key ("s") of every row: `atom` of a program, which is `root` of the
    outermost one that has it.
    """

    root: Any
    atom: Any
    side: str


@dataclass(frozen=True)
class Seen:
    """Where `least <= i - j <= most`, and the ids of query and key are equal; or at `fewer` keys yet."""

    least: float = -math.inf
    most: float = math.inf
    ids: frozenset[Ids] = frozenset()
    fewer: bool = False

    def __and__(self, other: "Seen") -> "Seen":
        ids, fewer = self.ids | other.ids, self.fewer or other.fewer
        return Seen(max(self.least, other.least), min(self.most, other.most), ids, fewer)

    def complement(self, eqn: Any) -> "Seen":
        """Where not; raises Hindered where that is not of this form."""
        match (self.least > -math.inf, self.most < math.inf, bool(self.ids) or self.fewer):
            case (True, False, False):
                return Seen(most=self.least - 1)
            case (False, True, False):
                return Seen(least=self.most + 1)
        raise Hindered(eqn, "hides keys on two sides, or by equal ids")

    def moved(self, by: int) -> "Seen":
        """Of queries and keys that are counted from others, so that i - j is less by a number."""
        return replace(self, least=self.least - by, most=self.most - by)

    def options(self, t: int, s: int, eqn: Any) -> tuple[bool, int | None, tuple[Any, ...]]:
        """`causal`, `window` and the segment ids of `jp.attention` for t queries and s keys. Raises Hindered."""
        if self.fewer:
            raise Hindered(eqn, "hides keys by what is no function of positions and no ids of queries and keys")
        least = -math.inf if self.least <= 1 - s else self.least
        most = math.inf if self.most >= t - 1 else self.most
        if least not in (-math.inf, 0) or (most < math.inf and (least != 0 or most < 0)):
            raise Hindered(eqn, f"lets query i see keys from i - {most:g} to i - {least:g}")
        if (self.ids or least == 0) and t != s:
            raise Hindered(eqn, f"hides keys of {t} queries and {s} keys")
        if len(self.ids) > 1:
            raise Hindered(eqn, "compares two kinds of ids")
        return least == 0, None if most == math.inf else int(most) + 1, tuple(x.atom for x in self.ids)


ALL = Seen()


@dataclass(frozen=True)
class Constant:
    """The same everywhere."""

    value: float


@dataclass(frozen=True)
class Linear:
    """i times the query's position, j times the key's, and a number."""

    i: float
    j: float
    plus: float


@dataclass(frozen=True)
class Either:
    """`yes` where seen, `no` elsewhere."""

    seen: Seen
    yes: float
    no: float


Value = Constant | Linear | Either | Ids


def ones_dropped(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without dims of one element."""
    return tuple(n for n in shape if n != 1)


def number_of(value: Value, eqn: Any) -> float:
    """Raises Hindered where it is no number."""
    if isinstance(value, Constant):
        return value.value
    raise Hindered(eqn, "takes what is no number")


def describe(atom: Any, labels: Labels, scope: Scope, reader: Any) -> Value:
    """What a value of a mask's program is, whose dims are those of scores; `reader` is an equation that takes it.

    Raises Hindered where that does not show.
    """
    if jx.is_literal(atom):
        return _of_array(np.asarray(atom.val), labels, reader)
    labels = tuple(None if n == 1 else x for x, n in zip(labels, atom.aval.shape, strict=True))
    if (eqn := scope.made(atom)) is not None:
        try:
            value = _of_equation(eqn, labels, scope)
            if isinstance(value, Linear) and atom.aval.dtype.name not in _COUNTS:
                raise Hindered(eqn, f"counts positions in {atom.aval.dtype}, which wraps or rounds")
            return value
        except Hindered:
            if not _is_ids(atom, labels):
                raise
    elif atom in scope.consts:
        return _of_array(np.asarray(scope.consts[atom]), labels, reader)
    elif atom in scope.outer and scope.around is not None:
        found = describe(scope.outer[atom], labels, scope.around, reader)
        return replace(found, atom=atom) if isinstance(found, Ids) else found
    if not _is_ids(atom, labels):
        what = f"{atom.aval.str_short()}"
        raise Hindered(reader, f"takes {what}, which is no function of positions and no ids of queries and keys")
    return Ids(atom, atom, next(x for x in labels if x in ("t", "s")))


def _is_ids(atom: Any, labels: Labels) -> bool:
    wide = [x for x in labels if x is not None]
    return jnp.issubdtype(atom.aval.dtype, jnp.integer) and wide in (["b", "t"], ["b", "s"], ["t"], ["s"])


def _of_array(array: np.ndarray, labels: Labels, reader: Any) -> Value:
    """Of an array that is there: a number, positions, or one of two numbers by a band of positions."""
    values = np.unique(array)
    if len(values) == 1:
        return Constant(values[0].item())
    square, wide = array.reshape(ones_dropped(array.shape)), [x for x in labels if x is not None]
    if wide in (["t"], ["s"]) and (square == square[0] + np.arange(len(square))).all():
        return _counted(wide[0], square[0].item())
    if wide == ["t", "s"] and len(values) == 2:
        away = np.arange(square.shape[0])[:, None] - np.arange(square.shape[1])
        for yes, no in (values, values[::-1]):
            of = away[square == yes]
            band = (away >= of.min()) & (away <= of.max())
            if (band == (square == yes)).all():
                least = -math.inf if of.min() == away.min() else of.min().item()
                most = math.inf if of.max() == away.max() else of.max().item()
                return Either(Seen(least, most), yes.item(), no.item())
    raise Hindered(reader, f"takes an array {list(array.shape)} that is no band of positions")


def _counted(side: str, plus: float) -> Linear:
    return Linear(1, 0, plus) if side == "t" else Linear(0, 1, plus)


def _of_equation(eqn: Any, labels: Labels, scope: Scope) -> Value:
    """What the result of an equation is, from its operands. Raises Hindered."""
    name, ins, params, known = eqn.primitive.name, eqn.invars, eqn.params, primitives.of(eqn)
    of = lambda atom, labels: describe(atom, labels, scope, eqn)
    same = lambda atom: of(atom, labels if jx.is_literal(atom) or atom.aval.shape else ())
    if name == "iota":
        side = labels[params["dimension"]]
        if side in ("t", "s"):
            return _counted(side, 0)
        if side is None:
            return Constant(0)
    elif name == "broadcast_in_dim":
        dims, shape = params["broadcast_dimensions"], ins[0].aval.shape
        return of(ins[0], tuple(labels[int(d)] if n != 1 else None for d, n in zip(dims, shape, strict=True)))
    elif name == "transpose":
        back = dict(zip(map(int, params["permutation"]), labels, strict=True))
        return of(ins[0], tuple(back[d] for d in range(len(back))))
    elif known.moves and known.view:
        shape = ins[0].aval.shape
        if ones_dropped(shape) == ones_dropped(eqn.outvars[0].aval.shape):
            wide = iter([x for x, n in zip(labels, eqn.outvars[0].aval.shape, strict=True) if n != 1])
            return of(ins[0], tuple(next(wide) if n != 1 else None for n in shape))
    elif name in ("slice", "dynamic_slice"):
        starts = params.get("start_indices") or [number_of(of(x, ()), eqn) for x in ins[1:]]
        if name == "dynamic_slice" or not params["strides"] or set(params["strides"]) == {1}:
            first = {x: int(n) for x, n in zip(labels, starts, strict=True) if x is not None}
            return _sliced(of(ins[0], labels), first.get("t", 0), first.get("s", 0), eqn)
    elif name == "convert_element_type":
        return _each(np.dtype(params["new_dtype"]).type, of(ins[0], labels), eqn)
    elif name == "name" or (known.elementwise and known.view):
        return of(ins[0], labels)
    elif name in _ALONE:
        return _each(_ALONE[name], same(ins[0]), eqn)
    elif name in _TOGETHER:
        return _together(name, [lambda x=x: same(x) for x in ins], eqn)
    elif name == "select_n" and len(ins) == 3:
        return _chosen(same(ins[0]), same(ins[1]), same(ins[2]), eqn)
    raise Hindered(eqn, f"computes {name} of positions or ids")


def _sliced(value: Value, t: int, s: int, eqn: Any) -> Value:
    match value:
        case Constant():
            return value
        case Linear(i, j, plus):
            return Linear(i, j, plus + i * t + j * s)
        case Either(seen, yes, no) if not seen.ids:
            return Either(seen.moved(t - s), yes, no)
    raise Hindered(eqn, "cuts ids")


def _each(of: Callable[[Any], Any], value: Value, eqn: Any) -> Value:
    match value:
        case Constant(x):
            return Constant(_plain(of(x)))
        case Either(seen, yes, no):
            return Either(seen, _plain(of(yes)), _plain(of(no)))
    if eqn.primitive.name == "convert_element_type" and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.number):
        return value
    raise Hindered(eqn, f"computes {eqn.primitive.name} of positions or ids")


def _plain(x: Any) -> Any:
    return x.item() if isinstance(x, np.generic) else x


def _together(name: str, operands: Sequence[Callable[[], Value]], eqn: Any) -> Value:
    """Of two operands, one of which need not show where the other decides: keys that a mask hides stay hidden."""
    found: list[Value | Hindered] = []
    for of in operands:
        try:
            found.append(of())
        except Hindered as why:
            found.append(why)
    a, b = found
    match (a, b) if isinstance(b, Hindered) else (b, a):
        case Either(seen, yes, no), Hindered() if eqn.outvars[0].aval.dtype == bool and no == {"and": 0, "or": 1}.get(
            name
        ):
            return Either(replace(seen, fewer=True), yes, no)
        case _, Hindered() as why:
            raise why
    return _both(name, a, b, eqn)  # type: ignore[arg-type]


def _both(name: str, a: Value, b: Value, eqn: Any) -> Value:
    """Of two operands. Raises Hindered."""
    of = _TOGETHER[name]
    match a, b:
        case Constant(x), Constant(y):
            return Constant(of(x, y))
        case Either(seen, yes, no), Constant(y):
            return Either(seen, of(yes, y), of(no, y))
        case Constant(x), Either(seen, yes, no):
            return Either(seen, of(x, yes), of(x, no))
        case Either(), Either():
            both, first, second, none = (of(x, y) for x in (a.yes, a.no) for y in (b.yes, b.no))
            return _by_two(a.seen, b.seen, both, first, second, none, eqn)
        case Ids(root, _, side), Ids(other, _, far) if root == other and {side, far} == {"t", "s"}:
            if name in ("eq", "ne"):
                seen = Seen(ids=frozenset([a if side == "t" else b]))
                return Either(seen, name == "eq", name != "eq")
        case ((Linear() | Constant()), (Linear() | Constant())):
            (i, j, x), (k, l, y) = _terms(a), _terms(b)
            if name in ("add", "sub"):
                sign = 1 if name == "add" else -1
                return Linear(i + sign * k, j + sign * l, x + sign * y)
            if name == "mul" and (isinstance(a, Constant) or isinstance(b, Constant)):
                by = x if isinstance(a, Constant) else y
                return Linear(*(by * z for z in (_terms(b) if isinstance(a, Constant) else _terms(a))))
            if name in _COMPARED:
                return _compared(name, i - k, j - l, x - y, eqn)
    raise Hindered(eqn, f"computes {name} of what is no position, or of ids that are not the same")


def _terms(value: Any) -> tuple[float, float, float]:
    return (0, 0, value.value) if isinstance(value, Constant) else (value.i, value.j, value.plus)


def _compared(name: str, i: float, j: float, plus: float, eqn: Any) -> Value:
    """Whether i times the query's position, j times the key's, and a number compare so to nought."""
    if i == -1 and j == 1:
        name, i, j, plus = _FLIPPED.get(name, name), 1, -1, -plus
    if (i, j) == (0, 0):
        return Constant(_COMPARED[name](plus, 0))
    if (i, j) != (1, -1):
        raise Hindered(eqn, f"compares {i:g} times the query's position and {j:g} times the key's")
    least = {"ge": math.ceil(-plus), "gt": math.floor(-plus) + 1, "eq": -plus, "ne": -plus}.get(name, -math.inf)
    most = {"le": math.floor(-plus), "lt": math.ceil(-plus) - 1, "eq": -plus, "ne": -plus}.get(name, math.inf)
    return Either(Seen(least, most), name != "ne", name == "ne")


def _chosen(which: Value, no: Value, yes: Value, eqn: Any) -> Value:
    """`select_n` of two cases."""
    match which:
        case Constant(x):
            return yes if x else no
        case Either(seen, 1, 0):
            pass
        case Either(seen, 0, 1):
            yes, no = no, yes
        case _:
            raise Hindered(eqn, "chooses by what is no comparison of positions or ids")
    match yes, no:
        case Constant(x), Constant(y):
            return Either(seen, x, y)
        case Either(also, x, y), Constant(z):
            return _by_two(seen, also, x, y, z, z, eqn)
        case Constant(z), Either(also, x, y):
            return _by_two(seen, also, z, z, x, y, eqn)
    raise Hindered(eqn, "chooses between more than two numbers")


def _by_two(a: Seen, b: Seen, both: float, first: float, second: float, none: float, eqn: Any) -> Either:
    """What is `both` where a and b see, `first` where a alone does, and so on: a choice where three of the four are
    one, or hide alike.
    """
    if first == second == none or (both == 0 and max(first, second, none) <= HIDING):
        return Either(a & b, both, max(first, second, none))
    if a.fewer or b.fewer:
        raise Hindered(eqn, "has more than two values")
    if both == first and second == none:
        return Either(a, both, none)
    if both == second and first == none:
        return Either(b, both, none)
    if a == b:
        return Either(a, both, none)
    if both == second == none:
        return Either(a & b.complement(eqn), first, none)
    if both == first == none:
        return Either(b & a.complement(eqn), second, none)
    if both == first == second:
        return Either(a.complement(eqn) & b.complement(eqn), none, both)
    raise Hindered(eqn, "has more than two values")


_COUNTS = ("int32", "int64", "float32", "float64")  # that have every position, and every distance
HIDING = -1e4  # what is added to a score so that its weight is nothing: exp underflows, whatever other scores are
_COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("ge", "gt", "le", "lt", "eq", "ne")
}
_FLIPPED = {"ge": "le", "le": "ge", "gt": "lt", "lt": "gt"}
_TOGETHER: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
    "min": min,
    "and": operator.and_,
    "or": operator.or_,
    **_COMPARED,
}
_ALONE: dict[str, Callable[[Any], Any]] = {
    "neg": operator.neg,
    "not": lambda x: not x,
    "log": lambda x: math.log(x) if x else -math.inf,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
}
