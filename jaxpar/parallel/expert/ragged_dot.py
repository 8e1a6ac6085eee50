"""Grouped matmuls (`lax.ragged_dot`) as the exchange of tokens.

Rows [M, D] lie in groups, one for each expert, as long as `sizes` [E] says: a program that sorts its
tokens by expert has them. What a row meets is in these sizes alone, so that nothing need be known of the sort. One
product follows another, with what computes each row for itself between them (an activation, a gate): such a run of
equations is a function of a row and of its expert's leaves, and is computed as `jp.experts` computes one without a
capacity: the first slots of every expert exchanged at once, the rest in rounds (`parallel/expert/ops/dropless.py`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...model import permutations
from ...program import jaxpr as jx
from ...program import primitives
from ..tensor.localiser import Found, LocalValue
from .localiser import ExpertLocaliser, SlotDims
from .ops.dropless import dropless, slots_of
from .ops.tables import wide

PRIMITIVE = "ragged_dot_general"

BY_ROWS: Any = SlotDims(0, 0)


class MixesRowsError(Exception):
    """An equation that is not known to compute each row for itself."""


@dataclass
class ByRows(ExpertLocaliser):
    """What computes each row for itself, as a program of another number of `rows`."""

    rows: int = 0

    def whole(self, x: LocalValue) -> jax.Array:
        """What every row reads."""
        if x.dim is not None:
            raise MixesRowsError
        return x.value

    def part(self, x: LocalValue, dim: Any) -> jax.Array:
        """These rows of a value."""
        if x.dim == dim:
            return x.value
        if x.broadcast is None or dim != BY_ROWS:
            raise MixesRowsError
        inner, dims = x.broadcast
        return lax.broadcast_in_dim(self.whole(inner), self.local(x.shape, dim), dims)

    def local(self, shape: Sequence[int], dim: Any) -> tuple[int, ...]:
        """The shape of these rows of a value."""
        return tuple(self.rows if dim is not None and d in dim else n for d, n in enumerate(shape))


@dataclass(frozen=True, eq=False)
class ExpertRun:
    """Grouped matmuls over the same groups, and what computes each row for itself between them.

    Attributes:
      eqns: in order; the last is a grouped matmul, and nothing else of them is read outside.
      sizes: the variable of the groups' lengths, [E].
      rows: variables [M, ...] that come in with a row, of one dtype.
      leaves: variables [E, ...]: right sides of grouped matmuls.
      rest: variables that every row reads whole.
      rules: what becomes of an equation for an expert rank, by primitive.
    """

    eqns: tuple[Any, ...]
    sizes: Any
    rows: tuple[Any, ...]
    leaves: tuple[Any, ...]
    rest: tuple[Any, ...]
    rules: Any = field(repr=False)

    @property
    def out(self) -> Any:
        """The variable of its result."""
        return self.eqns[-1].outvars[0]

    def bytes(self) -> tuple[int, int]:
        """Of the buffers of one exchange to the experts and back, and of all the experts' leaves."""
        (count,), (tokens, *_) = self.sizes.aval.shape, self.rows[0].aval.shape
        moved = sum(jx.nbytes(v) // tokens for v in (*self.rows, self.out))
        return count * slots_of(tokens, 1, count) * moved, sum(map(jx.nbytes, self.leaves))

    def exchanged(self, sizes: jax.Array, *values: jax.Array) -> jax.Array:
        """The result, from values of `rows`, `leaves` and `rest`, as a mixture of one choice for each row."""
        n, k = len(self.rows), len(self.rows) + len(self.leaves)
        rows, leaves, rest = values[:n], values[n:k], values[k:]
        x = jnp.concatenate([row.reshape(row.shape[0], -1) for row in rows], axis=1)
        at = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
        ids = (at >= jnp.cumsum(sizes.astype(jnp.int32))).sum(axis=1, keepdims=True, dtype=jnp.int32)
        each = [jnp.broadcast_to(value, (sizes.size, *value.shape)) for value in rest]
        ones = jnp.ones(ids.shape, wide(x.dtype))
        out = dropless(x, ids, ones, [*leaves, *each], self.expert)
        return out.reshape(self.out.aval.shape).astype(self.out.aval.dtype)

    def expert(self, leaves: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        """What one expert makes of n rows, [n, D] -> [n, D']: `leaves` are its own, then `rest`."""
        work = ByRows(1, False, {**self.rules, PRIMITIVE: _product}, rows=x.shape[0])
        env, at = jx.Environment[LocalValue]({}, work.literal), 0
        for v in self.rows:
            size = math.prod(v.aval.shape[1:])
            value = x[:, at : at + size].reshape(x.shape[0], *v.aval.shape[1:])
            env[v], at = LocalValue(value, BY_ROWS, v.aval.shape, active=True), at + size
        env[self.sizes] = LocalValue(None, None, self.sizes.aval.shape, weight=True)
        for v, value in zip((*self.leaves, *self.rest), leaves, strict=True):
            env[v] = LocalValue(value, None, value.shape, weight=True)
        for eqn in self.eqns:
            env.compute(eqn, work.equation)
        return env[self.out].value.reshape(x.shape[0], -1)


def _product(work: Any, eqn: Any, inputs: Sequence[LocalValue]) -> Found:
    """A grouped matmul, of rows of one group."""
    x, leaf = inputs[:2]
    options = {name: eqn.params[name] for name in ("precision", "preferred_element_type")}
    return [(lax.dot_general(x.value, leaf.value, (((1,), (0,)), ((), ())), **options), BY_ROWS)]


def runs(flat: jx.Flat, rules: Any) -> Iterator[ExpertRun]:
    """The grouped matmuls of a flat program, each in one run, as long as they get."""
    if not any(map(_plain, flat.eqns)):
        return
    made = {v: eqn for eqn in flat.eqns for v in eqn.outvars}
    readers: dict[Any, list[Any]] = {v: [None] for v in flat.outvars if not jx.is_literal(v)}
    for eqn in flat.eqns:
        for v in eqn.invars:
            if not jx.is_literal(v):
                readers.setdefault(v, []).append(id(eqn))
    groups = _by_group(flat.eqns, made, rules)
    taken: set[int] = set()
    for last in reversed(flat.eqns):
        if not _plain(last) or id(last) in taken:
            continue
        inside = _before(last, made, groups)
        known = {id(eqn) for eqn in inside}
        found = None
        inner = [v for eqn in inside if eqn is not last and not repeats(eqn) for v in eqn.outvars]
        if all(reader in known for v in inner for reader in readers.get(v, ())):
            found = _run([eqn for eqn in flat.eqns if id(eqn) in known], rules)
        found = found or _run([last], rules)
        assert found is not None
        taken |= {id(eqn) for eqn in found.eqns}
        yield found


def _plain(eqn: Any) -> bool:
    """Whether an equation is rows [M, D] in groups, times leaves [E, D, F]."""
    if eqn.primitive.name != PRIMITIVE or eqn.params["group_offset"] is not None:
        return False
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    dims = (numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions)
    plain = ((((1,), (1,)), ((), ())), (0,), (0,))
    return jax.tree.map(int, jax.tree.leaves(dims)) == jax.tree.leaves(plain) and len(eqn.invars[2].aval.shape) == 1


def _source(v: Any, made: dict[Any, Any]) -> Any:
    """The variable that this one is a copy of."""
    while v in made and (how := primitives.of(made[v])).view and how.elementwise:
        v = made[v].invars[0]
    return v


def _by_group(eqns: Sequence[Any], made: dict[Any, Any], rules: Any) -> dict[Any, Any]:
    """Variables [M, ...] that come of grouped matmuls, row by row, with the variable of their sizes."""
    groups: dict[Any, Any] = {}
    for eqn in eqns:
        if _plain(eqn):
            groups[eqn.outvars[0]] = _source(eqn.invars[2], made)
            continue
        found = {groups[v] for v in eqn.invars if not jx.is_literal(v) and v in groups}
        if len(found) == 1 and _computes_rows(eqn, groups, made, rules):
            groups.update(dict.fromkeys(eqn.outvars, *found))
    return groups


def _computes_rows(eqn: Any, groups: dict[Any, Any], made: dict[Any, Any], rules: Any) -> bool:
    """Whether an equation computes each row for itself, beside values that every row reads whole."""
    tokens = next(v.aval.shape[0] for v in eqn.invars if not jx.is_literal(v) and v in groups)
    kinds = [_kind(v, tokens, made) for v in eqn.invars]
    custom = eqn.primitive.name in jx.CUSTOM
    floats = all(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.invars)
    if custom and (permutations.of(eqn) is not None or {*kinds} != {"rows"} or not floats):
        return False  # a derivative with respect to what all rows read adds them up
    if not custom and jx.programs(eqn):
        return False
    values = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]

    def run(*values: Any) -> list[Any]:
        work = ByRows(1, False, rules, rows=tokens)
        inputs = []
        for v, value, kind in zip(eqn.invars, values, kinds, strict=True):
            placed = BY_ROWS if kind == "rows" else None
            inputs.append(LocalValue(value, placed, v.aval.shape, active=custom, weight=kind != "rows"))
            if kind == "alike":
                inner = LocalValue(value[0], None, value.shape[1:], weight=True)
                inputs[-1].broadcast = inner, tuple(range(1, value.ndim))
        outs = work.equation(eqn, inputs)
        if any(x.dim != BY_ROWS for x in outs):
            raise MixesRowsError
        return [x.value for x in outs]

    def total(*values: Any) -> Any:
        return sum(x.astype(jnp.float32).sum() for x in run(*values))

    try:
        jax.eval_shape(jax.grad(total, argnums=tuple(range(len(values)))) if custom else run, *values)
    except MixesRowsError:
        return False
    return True


def _kind(v: Any, tokens: int, made: dict[Any, Any]) -> str:
    """Of an operand beside rows: "rows", "alike" for one thing for all rows, or "rest"."""
    if jx.is_literal(v) or v.aval.shape[:1] != (tokens,):
        return "rest"
    return "alike" if v in made and repeats(made[v]) else "rows"


def repeats(eqn: Any) -> bool:
    """Whether an equation has the same in each row."""
    if eqn.primitive.name != "broadcast_in_dim":
        return False
    dims, shape = eqn.params["broadcast_dimensions"], eqn.invars[0].aval.shape
    return 0 not in dims or shape[dims.index(0)] == 1 != eqn.outvars[0].aval.shape[0]


def _before(last: Any, made: dict[Any, Any], groups: dict[Any, Any]) -> list[Any]:
    """The equations that a grouped matmul's rows come of, back to grouped matmuls of the same sizes; and itself."""
    sizes, found, todo = groups[last.outvars[0]], {id(last): last}, [last]
    while todo:
        eqn = todo.pop()
        for v in eqn.invars[: 1 if _plain(eqn) else None]:
            if jx.is_literal(v) or v not in made or id(made[v]) in found:
                continue
            alike = _kind(v, last.invars[0].aval.shape[0], made) == "alike" and not _plain(eqn)
            if groups.get(v) is sizes or alike:
                found[id(made[v])] = made[v]
                todo.append(made[v])
    return list(found.values())


def _run(eqns: Sequence[Any], rules: Any) -> ExpertRun | None:
    """These equations as a run; None where rows of several dtypes come in."""
    inner = {v for eqn in eqns for v in eqn.outvars}
    rows, leaves, rest, sizes = {}, {}, {}, {}
    tokens = eqns[-1].invars[0].aval.shape[0]
    for eqn in eqns:
        for i, v in enumerate(eqn.invars):
            if jx.is_literal(v) or v in inner:
                continue
            if _plain(eqn):
                (rows, leaves, sizes)[i][v] = None
            else:
                (rows if not repeats(eqn) and v.aval.shape[:1] == (tokens,) else rest)[v] = None
    if len({v.aval.dtype for v in rows}) > 1 or {*leaves} & {*rest, *rows}:
        return None
    return ExpertRun(tuple(eqns), eqns[-1].invars[2], tuple(rows), tuple(leaves), tuple(rest), rules)
