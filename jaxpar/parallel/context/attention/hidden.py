"""The keys that a mask lets a query see, read from the program that makes it: by positions and ids, never by trial.

Each value of the mask's program is described by symbols: a number, a position, an id, or a table over the distances
i - j of query i and key j, once for pairs of equal ids and once for the others. The values of an equation on tables are
computed for all distances. So 2 (T + S) numbers describe a mask of [T, S], whatever its program does with them:

    iota of queries           TokenPosition("t", 0)
    iota of keys              TokenPosition("s", 0)
    queries >= keys           Table     i - j     -3 -2 -1  0  1  2  3
                                        values     F  F  F  T  T  T  T      a causal mask of T = S = 4
    segments == segments.T    Table     values     F for pairs of different ids, T for pairs of equal ids
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

# One label for each dim: "t" of queries, "s" of keys, "b" of anything else, None of one element.
Labels = tuple[Any, ...]


class Obstacle(Exception):
    """The reason why an attention cannot be replaced, with the line of an equation; raised and caught in this room."""

    def __init__(self, eqn: Any, why: str):
        super().__init__(f"{why} ({jx.where(eqn)})")


@dataclass(frozen=True)
class Scope:
    """A program, and the program around it if its inputs are values of that one.

    Attributes:
      flat: the program.
      consts: the arrays that it closes over, by variable.
      parent: the program that holds it, None for the outermost.
      outer: for inputs that are values of the parent unchanged, the parent's variable.
      replacements: by `id` of an equation, the attention that ends there, or the scope of the program that it holds,
        if that contains some.
      extra_inputs: variables of the parents that become further inputs, in front of the others.
    """

    flat: jx.Flat
    consts: Mapping[Any, Any]
    parent: "Scope | None" = None
    outer: Mapping[Any, Any] = field(default_factory=dict)
    replacements: dict[int, Any] = field(default_factory=dict)
    extra_inputs: dict[Any, None] = field(default_factory=dict)

    @property
    def eqns(self) -> tuple[Any, ...]:
        """The program's equations."""
        return self.flat.eqns

    @functools.cached_property
    def _producers(self) -> dict[Any, Any]:
        """The equation that computes each variable."""
        return {v: eqn for eqn in self.eqns for v in eqn.outvars}

    def producer(self, atom: Any) -> Any:
        """Return the equation that computes a value; None for literals and inputs."""
        return None if jx.is_literal(atom) else self._producers.get(atom)

    def make_available(self, atom: Any) -> None:
        """Pass a variable of a parent into this program as an extra input, if the program does not have it yet."""
        if atom not in self._producers and atom not in self.consts and atom not in self.flat.invars:
            assert self.parent is not None
            self.parent.make_available(atom)
            self.extra_inputs[atom] = None


@dataclass(frozen=True)
class Ids:
    """Integers, one for each query ("t") or key ("s") of every row, such as segment ids.

    Attributes:
      root: the variable in the outermost program that has them. Two `Ids` are the same ids if their roots are equal.
      atom: the variable in the program at hand.
      side: "t" or "s".
    """

    root: Any
    atom: Any
    side: str


@dataclass(frozen=True)
class Constant:
    """A value that is the same for all queries and keys."""

    value: Any


@dataclass(frozen=True)
class TokenPosition:
    """The position of a query ("t") or a key ("s"), plus a number."""

    side: str
    offset: float


@dataclass(frozen=True, eq=False)
class Table:
    """A value by distance i - j, from 1 - S to T - 1: [2, T + S - 1], row 0 for unequal ids and row 1 for equal ones.

    Attributes:
      values: the value at each distance.
      is_known: bool of the same shape, whether the value there is known.
      ids: the ids that are compared; empty if both rows are equal.
    """

    values: np.ndarray
    is_known: np.ndarray
    ids: frozenset[Ids] = frozenset()


Value = Constant | TokenPosition | Table | Ids


def ones_dropped(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without dims of one element."""
    return tuple(n for n in shape if n != 1)


def number_of(value: Value, eqn: Any) -> float:
    """Return the number that a value is known to be; raise Obstacle if it is none."""
    if isinstance(value, Constant):
        return value.value
    raise Obstacle(eqn, "takes a value that is no known number")


def describe(atom: Any, labels: Labels, scope: Scope, reader: Any) -> Value:
    """Describe a value of a mask's program, which is followed back to its sources.

    Args:
      atom: a literal or variable of the program `scope`.
      labels: the labels of its dims, which align with the dims of the scores.
      reader: the equation that takes it, for error texts.

    Raises:
      Obstacle: the value is no function of positions and ids that this module understands.
    """
    if jx.is_literal(atom):
        return _describe_array(np.asarray(atom.val), labels, reader)
    labels = tuple(None if n == 1 else x for x, n in zip(labels, atom.aval.shape, strict=True))
    if (eqn := scope.producer(atom)) is not None:
        try:
            value = _describe_result(eqn, labels, scope)
            if isinstance(value, TokenPosition) and atom.aval.dtype.name not in _POSITION_DTYPES:
                raise Obstacle(eqn, f"counts positions in {atom.aval.dtype}, which wraps or rounds")
            return value
        except Obstacle:
            # Integers that a program computes in some other way may still be ids: any integers are, if compared.
            if not _may_be_ids(atom, labels):
                raise
    elif atom in scope.consts:
        return _describe_array(np.asarray(scope.consts[atom]), labels, reader)
    elif atom in scope.outer and scope.parent is not None:
        value = describe(scope.outer[atom], labels, scope.parent, reader)
        # The ids stay the same, and are read by this program's variable.
        return replace(value, atom=atom) if isinstance(value, Ids) else value
    if not _may_be_ids(atom, labels):
        type_text = atom.aval.str_short()
        raise Obstacle(reader, f"takes {type_text}, which is neither a function of positions nor ids")
    return Ids(atom, atom, next(x for x in labels if x in ("t", "s")))


def _may_be_ids(atom: Any, labels: Labels) -> bool:
    """Whether a value is integers along rows and queries, or rows and keys."""
    wide_labels = [x for x in labels if x is not None]
    return jnp.issubdtype(atom.aval.dtype, jnp.integer) and wide_labels in (["b", "t"], ["b", "s"], ["t"], ["s"])


def _describe_array(array: np.ndarray, labels: Labels, reader: Any) -> Value:
    """Describe an array whose values are known: a number, positions, or a table by distance."""
    # Comparisons of values, so that a mask which the program closes over is understood in whatever way it was made.
    if array.size and (array == array.flat[0]).all():
        return Constant(array.flat[0])
    squeezed, wide_labels = array.reshape(ones_dropped(array.shape)), [x for x in labels if x is not None]
    if wide_labels in (["t"], ["s"]) and (squeezed == squeezed[0] + np.arange(len(squeezed))).all():
        return TokenPosition(wide_labels[0], squeezed[0].item())
    if wide_labels == ["t", "s"] and (squeezed[1:, 1:] == squeezed[:-1, :-1]).all():
        # All diagonals are constant: the first row has the distances up to 0, backwards, and the first column the rest.
        return _table(np.concatenate([squeezed[0, :0:-1], squeezed[:, 0]]))
    raise Obstacle(reader, f"takes an array {list(array.shape)} that depends on more than distances")


def _table(values: np.ndarray, ids: frozenset[Ids] = frozenset()) -> Table:
    """Return a table of known values: [2, n], or [n] if they do not depend on ids."""
    rows = np.broadcast_to(values, (2, values.shape[-1]))
    return Table(rows, np.ones(rows.shape, bool), ids)


def _distances(eqn: Any, labels: Labels) -> np.ndarray:
    """Return the distances i - j of the queries and keys along which an equation's result runs: 1 - S to T - 1."""
    size = {x: n for x, n in zip(labels, eqn.outvars[0].aval.shape, strict=True) if x in ("t", "s")}
    if len(size) != 2:
        raise Obstacle(eqn, f"computes {eqn.primitive.name} of positions or ids")
    return np.arange(1 - size["s"], size["t"])


def _describe_result(eqn: Any, labels: Labels, scope: Scope) -> Value:
    """Describe the result of an equation from its operands; raise Obstacle if that is impossible."""
    name, operands, params, primitive = eqn.primitive.name, eqn.invars, eqn.params, primitives.of(eqn)
    describe_operand = lambda atom, labels: describe(atom, labels, scope, eqn)
    # An operand of an elementwise equation has the dims of the result, or is a scalar.
    describe_elementwise = lambda atom: describe_operand(atom, labels if jx.is_literal(atom) or atom.aval.shape else ())
    # A branch that does not return falls through to the error at the end.
    if name == "iota":
        side = labels[params["dimension"]]
        if side in ("t", "s"):
            return TokenPosition(side, 0)
        if side is None:
            # The only position along a dim of one element is 0.
            return Constant(0)
    elif name == "broadcast_in_dim":
        dims, shape = params["broadcast_dimensions"], operands[0].aval.shape
        operand_labels = tuple(labels[int(d)] if n != 1 else None for d, n in zip(dims, shape, strict=True))
        return describe_operand(operands[0], operand_labels)
    elif name == "transpose":
        label_of_dim = dict(zip(map(int, params["permutation"]), labels, strict=True))
        return describe_operand(operands[0], tuple(label_of_dim[d] for d in range(len(label_of_dim))))
    elif primitive.moves and primitive.view:
        # Only dims of one element appear or disappear: the others keep their order and labels.
        shape = operands[0].aval.shape
        if ones_dropped(shape) == ones_dropped(eqn.outvars[0].aval.shape):
            wide_labels = iter([x for x, n in zip(labels, eqn.outvars[0].aval.shape, strict=True) if n != 1])
            return describe_operand(operands[0], tuple(next(wide_labels) if n != 1 else None for n in shape))
    elif name in ("slice", "dynamic_slice"):
        # A dynamic slice has its starts as operands; they must be constants here.
        starts = params.get("start_indices") or [number_of(describe_operand(x, ()), eqn) for x in operands[1:]]
        if name == "dynamic_slice" or not params["strides"] or set(params["strides"]) == {1}:
            sizes = dict(zip(labels, operands[0].aval.shape, strict=True))
            start_of = {x: int(n) for x, n in zip(labels, starts, strict=True) if x is not None}
            return _slice(describe_operand(operands[0], labels), start_of, sizes, eqn, labels)
    elif name == "name" or (primitive.elementwise and primitive.view and name != "convert_element_type"):
        return describe_operand(operands[0], labels)
    elif name in _FUNCTIONS:
        return _describe_elementwise(eqn, [lambda x=x: describe_elementwise(x) for x in operands], labels)
    raise Obstacle(eqn, f"computes {name} of positions or ids")


def _slice(value: Value, start_of: Mapping[Any, int], sizes: Mapping[Any, int], eqn: Any, labels: Labels) -> Value:
    """Describe a slice of a described value, from the starts of the slice and the sizes of the value by label."""
    match value:
        case Constant():
            return value
        case TokenPosition(side, offset):
            return TokenPosition(side, offset + start_of.get(side, 0))
        case Table(values, is_known, ids) if not ids:
            # Query i and key j of the slice are query i + start and key j + start; column 0 is distance 1 - S.
            columns = _distances(eqn, labels) + start_of["t"] - start_of["s"] + sizes["s"] - 1
            return Table(values[:, columns], is_known[:, columns])
    raise Obstacle(eqn, "slices ids")


def _describe_elementwise(eqn: Any, operands: Sequence[Callable[[], Value]], labels: Labels) -> Value:
    """Describe the result of an elementwise equation, whose dims have these labels.

    `operands` has a function that describes each operand. One that raises Obstacle is no obstacle where another operand
    decides: False in "and", True in "or".
    """
    name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
    descriptions: list[Value] = []
    failures: list[Obstacle] = []
    for describe_operand in operands:
        try:
            descriptions.append(describe_operand())
        except Obstacle as failure:
            failures.append(failure)
    if failures:  # keys that a mask hides stay hidden, whatever the unknown operand is
        deciding_value = {"and": False, "or": True}.get(name) if dtype.name == "bool" else None
        match descriptions:
            case [Table(values, is_known, ids)] if deciding_value is not None:
                return Table(values, is_known & (values == deciding_value), ids)
        raise failures[0]
    # Distances that a mask excludes may overflow or divide by zero on the way, as on the device.
    compute = np.errstate(all="ignore")(lambda *values: np.asarray(_FUNCTIONS[name](*values)).astype(dtype))
    match descriptions:
        # Positions, cast, plus or minus a number, or times 1.
        case [TokenPosition() as position] if name == "convert_element_type" and jnp.issubdtype(dtype, jnp.number):
            return position
        case [TokenPosition(side, x), Constant(y)] if name in ("add", "sub"):
            return TokenPosition(side, x + y if name == "add" else x - y)
        case [Constant(1), TokenPosition() as position] | [TokenPosition() as position, Constant(1)] if name == "mul":
            return position
        case [Constant(x), TokenPosition(side, y)] if name == "add":
            return TokenPosition(side, x + y)
        # A position of a query against one of a key: their distance.
        case [TokenPosition(side, x), TokenPosition(second_side, y)] if {side, second_side} == {"t", "s"} and (
            name == "sub" or name in _COMPARISONS
        ):
            distances = _distances(eqn, labels)
            # i + x against j + y is the distance (i - j) + (x - y) against 0; reversed if the key comes first.
            return _table(compute((distances if side == "t" else -distances) + (x - y), 0))
        # Ids of queries against the same ids of keys.
        case [Ids(root, _, side) as first_ids, Ids(second_root, _, second_side) as second_ids] if (
            root == second_root and {side, second_side} == {"t", "s"}
        ):
            if name in ("eq", "ne"):
                # Row 0 is for unequal ids, row 1 for equal ones.
                rows = np.array([[name == "ne"], [name == "eq"]])
                return _table(
                    rows.repeat(len(_distances(eqn, labels)), 1), frozenset([first_ids if side == "t" else second_ids])
                )
        # Numbers and tables: compute at all distances.
        case _ if (numbers := [x for x in descriptions if isinstance(x, Constant | Table)]) == descriptions:
            tables = [x for x in numbers if isinstance(x, Table)]
            ids = frozenset[Ids]().union(*(x.ids for x in tables))
            if len(ids) > 1:
                raise Obstacle(eqn, "compares two kinds of ids")
            values = compute(*(x.values if isinstance(x, Table) else x.value for x in numbers))
            return Table(values, np.all([x.is_known for x in tables], 0), ids) if tables else Constant(values[()])
    raise Obstacle(eqn, f"computes {name} of values that are no positions, or of different ids")


# Dtypes that represent every position and every distance exactly.
_POSITION_DTYPES = ("int32", "int64", "float32", "float64")
# The largest number that hides a key when it is added to a score: exp underflows, whatever the other scores are.
HIDING = -1e4
_COMPARISONS = {name: getattr(operator, name) for name in ("ge", "gt", "le", "lt", "eq", "ne")}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **_COMPARISONS,
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
