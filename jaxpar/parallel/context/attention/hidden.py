"""Which keys a mask lets a query see, read from the program that makes it: by positions and ids, never by trial.

A value of the mask's program is a number, a position, an id, or a table: what it is for each distance i - j of a query
and a key, where their ids are equal and where they are not. What an equation makes of tables is computed for all
distances. So a mask of [T, S] is known by 2 (T + S) numbers, whatever its program does with them.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from ....program import jaxpr as jx
from ....program import primitives

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
class Constant:
    """The same everywhere."""

    value: Any


@dataclass(frozen=True)
class TokenPosition:
    """The position of a query ("t") or a key ("s"), and a number."""

    side: str
    plus: float


@dataclass(frozen=True, eq=False)
class Table:
    """By distance, [2, T + S - 1]: where ids are not equal and where they are; i - j from 1 - S on.

    Attributes:
      values: what it is.
      known: where that is known.
      ids: those that are compared; none where both rows are one.
    """

    values: np.ndarray
    known: np.ndarray
    ids: frozenset[Ids] = frozenset()


Value = Constant | TokenPosition | Table | Ids


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
            if isinstance(value, TokenPosition) and atom.aval.dtype.name not in _COUNTS:
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
    """Of an array that is there: a number, positions, or a table by distance."""
    if array.size and (array == array.flat[0]).all():
        return Constant(array.flat[0])
    square, wide = array.reshape(ones_dropped(array.shape)), [x for x in labels if x is not None]
    if wide in (["t"], ["s"]) and (square == square[0] + np.arange(len(square))).all():
        return TokenPosition(wide[0], square[0].item())
    if wide == ["t", "s"] and (square[1:, 1:] == square[:-1, :-1]).all():
        return _table(np.concatenate([square[0, :0:-1], square[:, 0]]))
    raise Hindered(reader, f"takes an array {list(array.shape)} that is no band of positions")


def _table(values: np.ndarray, ids: frozenset[Ids] = frozenset()) -> Table:
    both = np.broadcast_to(values, (2, values.shape[-1]))
    return Table(both, np.ones(both.shape, bool), ids)


def _distances(eqn: Any, labels: Labels) -> np.ndarray:
    """Of the result of an equation along queries and keys."""
    size = {x: n for x, n in zip(labels, eqn.outvars[0].aval.shape, strict=True) if x in ("t", "s")}
    if len(size) != 2:
        raise Hindered(eqn, f"computes {eqn.primitive.name} of positions or ids")
    return np.arange(1 - size["s"], size["t"])


def _of_equation(eqn: Any, labels: Labels, scope: Scope) -> Value:
    """What the result of an equation is, from its operands. Raises Hindered."""
    name, ins, params, known = eqn.primitive.name, eqn.invars, eqn.params, primitives.of(eqn)
    of = lambda atom, labels: describe(atom, labels, scope, eqn)
    same = lambda atom: of(atom, labels if jx.is_literal(atom) or atom.aval.shape else ())
    if name == "iota":
        side = labels[params["dimension"]]
        if side in ("t", "s"):
            return TokenPosition(side, 0)
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
            whole = dict(zip(labels, ins[0].aval.shape, strict=True))
            first = {x: int(n) for x, n in zip(labels, starts, strict=True) if x is not None}
            return _sliced(of(ins[0], labels), first, whole, eqn, labels)
    elif name == "name" or (known.elementwise and known.view and name != "convert_element_type"):
        return of(ins[0], labels)
    elif name in _FUNCTIONS:
        return _elementwise(eqn, [lambda x=x: same(x) for x in ins], labels)
    raise Hindered(eqn, f"computes {name} of positions or ids")


def _sliced(value: Value, first: Mapping[Any, int], whole: Mapping[Any, int], eqn: Any, labels: Labels) -> Value:
    match value:
        case Constant():
            return value
        case TokenPosition(side, plus):
            return TokenPosition(side, plus + first.get(side, 0))
        case Table(values, known, ids) if not ids:
            at = _distances(eqn, labels) + first["t"] - first["s"] + whole["s"] - 1
            return Table(values[:, at], known[:, at])
    raise Hindered(eqn, "cuts ids")


def _elementwise(eqn: Any, operands: Sequence[Callable[[], Value]], labels: Labels) -> Value:
    """Of an elementwise equation, one of whose operands need not show where the others decide."""
    name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
    found: list[Value] = []
    hindered: list[Hindered] = []
    for of in operands:
        try:
            found.append(of())
        except Hindered as why:
            hindered.append(why)
    if hindered:  # keys that a mask hides stay hidden
        decides = {"and": False, "or": True}.get(name) if dtype.name == "bool" else None
        match found:
            case [Table(values, known, ids)] if decides is not None:
                return Table(values, known & (values == decides), ids)
        raise hindered[0]
    compute = np.errstate(all="ignore")(lambda *values: np.asarray(_FUNCTIONS[name](*values)).astype(dtype))
    match found:
        case [TokenPosition() as place] if name == "convert_element_type" and jnp.issubdtype(dtype, jnp.number):
            return place
        case [TokenPosition(side, x), Constant(y)] if name in ("add", "sub"):
            return TokenPosition(side, x + y if name == "add" else x - y)
        case [Constant(1), TokenPosition() as place] | [TokenPosition() as place, Constant(1)] if name == "mul":
            return place
        case [Constant(x), TokenPosition(side, y)] if name == "add":
            return TokenPosition(side, x + y)
        case [TokenPosition(side, x), TokenPosition(other, y)] if {side, other} == {"t", "s"} and (
            name == "sub" or name in _COMPARED
        ):
            away = _distances(eqn, labels)
            return _table(compute((away if side == "t" else -away) + (x - y), 0))
        case [Ids(root, _, side) as a, Ids(other, _, far) as b] if root == other and {side, far} == {"t", "s"}:
            if name in ("eq", "ne"):
                rows = np.array([[name == "ne"], [name == "eq"]])
                return _table(rows.repeat(len(_distances(eqn, labels)), 1), frozenset([a if side == "t" else b]))
        case _ if (numbers := [x for x in found if isinstance(x, Constant | Table)]) == found:
            tables = [x for x in numbers if isinstance(x, Table)]
            ids = frozenset[Ids]().union(*(x.ids for x in tables))
            if len(ids) > 1:
                raise Hindered(eqn, "compares two kinds of ids")
            values = compute(*(x.values if isinstance(x, Table) else x.value for x in numbers))
            return Table(values, np.all([x.known for x in tables], 0), ids) if tables else Constant(values[()])
    raise Hindered(eqn, f"computes {name} of what is no position, or of ids that are not the same")


_COUNTS = ("int32", "int64", "float32", "float64")  # that have every position, and every distance
HIDING = -1e4  # what is added to a score so that its weight is nothing: exp underflows, whatever other scores are
_COMPARED = {name: getattr(operator, name) for name in ("ge", "gt", "le", "lt", "eq", "ne")}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **_COMPARED,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "neg": np.negative,
    "abs": np.abs,
    "not": np.invert,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
    "convert_element_type": lambda x: x,
}
