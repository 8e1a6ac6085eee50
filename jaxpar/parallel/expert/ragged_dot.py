"""Grouped matmuls (`lax.ragged_dot`) as an exchange of tokens between expert ranks.

A program that sorts its tokens by expert has rows [M, D] in groups, one for each expert; `sizes` [E] are their lengths.
A grouped matmul multiplies each group by the leaf of its expert:

    rows    | expert 0 | expert 1 | expert 2 ...      [M, D]
    times   leaf[0]    leaf[1]    leaf[2]             [E, D, F]

The sizes alone determine the expert of a row, so that the sort itself is of no interest. Between two grouped matmuls
stand equations that compute each row independently (an activation, a gate). Such a run of equations is a function of a
row and of its expert's leaves:

    1. `runs` finds the longest runs of a program, backwards from each last grouped matmul.
    2. `ExpertRun.expert` is that function, for n rows of one expert.
    3. `ExpertRun.compute_as_mixture` computes the run as `jp.experts` does without a capacity (`ops/dropless.py`): it
       exchanges the first slots of every expert at once, and the rest in rounds.
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
from .ops.tables import accumulation_dtype

PRIMITIVE = "ragged_dot_general"

# The layout of a value [n, ...] that is computed row by row. There is no dim of experts: all rows are of one.
BY_ROWS: Any = SlotDims(0, 0)


class MixesRowsError(Exception):
    """Raised where an equation is not known to compute each row independently."""


@dataclass
class ByRows(ExpertLocaliser):
    """Rewrites equations that compute each row independently, for another number of rows.

    It has one rank and sends nothing. A value is of rows (`dim` is `BY_ROWS`), or is the same for every row (None).

    Attributes:
      rows: the number of rows of the rewritten program.
    """

    rows: int = 0

    def whole(self, x: LocalValue) -> jax.Array:
        """Return a value that every row reads whole."""
        if x.dim is not None:
            raise MixesRowsError
        return x.value

    def part(self, x: LocalValue, dim: Any) -> jax.Array:
        """Return a value for these rows."""
        if x.dim == dim:
            return x.value
        if x.broadcast is None or dim != BY_ROWS:
            raise MixesRowsError
        operand, dims = x.broadcast
        return lax.broadcast_in_dim(self.whole(operand), self.local(x.shape, dim), dims)

    def local(self, shape: Sequence[int], dim: Any) -> tuple[int, ...]:
        """Return the shape of a value for these rows."""
        return tuple(self.rows if dim is not None and d in dim else n for d, n in enumerate(shape))


@dataclass(frozen=True, eq=False)
class ExpertRun:
    """A run of grouped matmuls over the same groups, with the equations between them, which compute row by row.

    Attributes:
      eqns: the equations in order. The last is a grouped matmul, and only its result is read outside of the run.
      sizes: the variable of the groups' lengths, [E].
      rows: variables [M, ...] that enter the run by row, of one dtype.
      leaves: variables [E, ...]: right operands of grouped matmuls.
      rest: variables that every row reads whole.
      rules: primitive name -> rule for an expert rank.
    """

    eqns: tuple[Any, ...]
    sizes: Any
    rows: tuple[Any, ...]
    leaves: tuple[Any, ...]
    rest: tuple[Any, ...]
    rules: Any = field(repr=False)

    @property
    def out(self) -> Any:
        """The variable of the result."""
        return self.eqns[-1].outvars[0]

    def bytes(self) -> tuple[int, int]:
        """Return the bytes of the buffers of one exchange to the experts and back, and of the leaves of all experts."""
        (num_experts,), (tokens, *_) = self.sizes.aval.shape, self.rows[0].aval.shape
        bytes_per_token = sum(jx.nbytes(v) // tokens for v in (*self.rows, self.out))
        return num_experts * slots_of(tokens, 1, num_experts) * bytes_per_token, sum(map(jx.nbytes, self.leaves))

    def compute_as_mixture(self, sizes: jax.Array, *values: jax.Array) -> jax.Array:
        """Compute the result as a mixture in which each row has chosen one expert.

        `values` are the values of `rows`, `leaves` and `rest`. Returns the value of `out`.
        """
        n, k = len(self.rows), len(self.rows) + len(self.leaves)
        rows, leaves, rest = values[:n], values[n:k], values[k:]
        x = jnp.concatenate([row.reshape(row.shape[0], -1) for row in rows], axis=1)
        # The expert of a row: the number of groups that end at or before it.
        index = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
        ids = (index >= jnp.cumsum(sizes.astype(jnp.int32))).sum(axis=1, keepdims=True, dtype=jnp.int32)
        # `dropless` passes an expert its leaves alone. The values that all rows read become leaves, equal for every
        # expert.
        shared = [jnp.broadcast_to(value, (sizes.size, *value.shape)) for value in rest]
        gates = jnp.ones(ids.shape, accumulation_dtype(x.dtype))
        result = dropless(x, ids, gates, [*leaves, *shared], self.expert)
        return result.reshape(self.out.aval.shape).astype(self.out.aval.dtype)

    def expert(self, leaves: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        """Compute the run for n rows of one expert.

        Args:
          leaves: this expert's leaves, then `rest`.
          x: the rows, [n, D]: the features of all variables in `rows`, flattened and joined.

        Returns:
          [n, D'], the result with flattened features.
        """
        # Rows of one expert have one leaf: here a grouped matmul is a plain one.
        localiser = ByRows(1, False, {**self.rules, PRIMITIVE: _plain_matmul}, rows=x.shape[0])
        env, column = jx.Environment[LocalValue]({}, localiser.literal), 0
        for v in self.rows:
            width = math.prod(v.aval.shape[1:])
            value = x[:, column : column + width].reshape(x.shape[0], *v.aval.shape[1:])
            env[v], column = LocalValue(value, BY_ROWS, v.aval.shape, active=True), column + width
        # Nobody reads the sizes: with rows of one expert, a grouped matmul is a plain one.
        env[self.sizes] = LocalValue(None, None, self.sizes.aval.shape, weight=True)
        for v, value in zip((*self.leaves, *self.rest), leaves, strict=True):
            env[v] = LocalValue(value, None, value.shape, weight=True)
        for eqn in self.eqns:
            env.compute(eqn, localiser.equation)
        return env[self.out].value.reshape(x.shape[0], -1)


def _plain_matmul(localiser: Any, eqn: Any, inputs: Sequence[LocalValue]) -> Found:
    """The rule of a grouped matmul where all rows are of one group: a plain matmul."""
    x, leaf = inputs[:2]
    options = {name: eqn.params[name] for name in ("precision", "preferred_element_type")}
    return [(lax.dot_general(x.value, leaf.value, (((1,), (0,)), ((), ())), **options), BY_ROWS)]


def runs(flat: jx.Flat, rules: Any) -> Iterator[ExpertRun]:
    """Yield the grouped matmuls of a program in the longest possible runs; each is in exactly one."""
    if not any(map(_is_grouped_matmul, flat.eqns)):
        return
    producers = {v: eqn for eqn in flat.eqns for v in eqn.outvars}
    readers = jx.readers(flat.eqns, flat.outvars)
    groups = _sizes_by_variable(flat.eqns, producers, rules)
    finished_ids: set[int] = set()
    # From the end: the last grouped matmul of a run comes first, and its run takes as many earlier ones as it can.
    for last in reversed(flat.eqns):
        if not _is_grouped_matmul(last) or id(last) in finished_ids:
            continue
        run_eqns = _run_of(last, producers, groups)
        run_ids = {id(eqn) for eqn in run_eqns}
        run = None
        # A run has one result. If another equation (or the program, None) reads an inner value too, the last grouped
        # matmul alone is the run.
        inner_vars = [v for eqn in run_eqns if eqn is not last and not repeats(eqn) for v in eqn.outvars]
        if all(id(reader) in run_ids for v in inner_vars for reader in readers.get(v, ())):
            run = _expert_run([eqn for eqn in flat.eqns if id(eqn) in run_ids], rules)
        run = run or _expert_run([last], rules)
        assert run is not None
        finished_ids |= {id(eqn) for eqn in run.eqns}
        yield run


def _is_grouped_matmul(eqn: Any) -> bool:
    """Whether an equation multiplies rows [M, D] in groups by leaves [E, D, F]."""
    if eqn.primitive.name != PRIMITIVE or eqn.params["group_offset"] is not None:
        return False
    # One contracted dim on each side, no batch dims; rows in groups along dim 0, experts along dim 0 of the leaves.
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    dims = (numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions)
    expected = ((((1,), (1,)), ((), ())), (0,), (0,))
    return jax.tree.map(int, jax.tree.leaves(dims)) == jax.tree.leaves(expected) and len(eqn.invars[2].aval.shape) == 1


def _copied_from(v: Any, producers: dict[Any, Any]) -> Any:
    """Return the variable that this one is a copy of, with the same elements."""
    while v in producers and (kind := primitives.of(producers[v])).view and kind.elementwise:
        v = producers[v].invars[0]
    return v


def _sizes_by_variable(eqns: Sequence[Any], producers: dict[Any, Any], rules: Any) -> dict[Any, Any]:
    """Return variables [M, ...] that are computed row by row from grouped matmuls -> the variable of their sizes."""
    sizes_of: dict[Any, Any] = {}
    for eqn in eqns:
        if _is_grouped_matmul(eqn):
            sizes_of[eqn.outvars[0]] = _copied_from(eqn.invars[2], producers)
            continue
        # Rows of different groupings in one equation would meet by position, and not by expert.
        sizes = {sizes_of[v] for v in eqn.invars if not jx.is_literal(v) and v in sizes_of}
        if len(sizes) == 1 and _computes_rows(eqn, sizes_of, producers, rules):
            sizes_of.update(dict.fromkeys(eqn.outvars, *sizes))
    return sizes_of


def _computes_rows(eqn: Any, sizes_of: dict[Any, Any], producers: dict[Any, Any], rules: Any) -> bool:
    """Whether an equation computes each row independently, apart from values that every row reads whole."""
    tokens = next(v.aval.shape[0] for v in eqn.invars if not jx.is_literal(v) and v in sizes_of)
    kinds = [_operand_kind(v, tokens, producers) for v in eqn.invars]
    is_custom = eqn.primitive.name in jx.CUSTOM
    are_floats = all(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.invars)
    if is_custom and (permutations.of(eqn) is not None or {*kinds} != {"rows"} or not are_floats):
        # The derivative of a custom function with respect to a value that all rows read would sum over rows.
        return False
    if not is_custom and jx.programs(eqn):
        return False
    # Try it: rewrite the equation abstractly. A function with its own derivative must be row by row backwards too.
    values = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]

    def rewritten(*values: Any) -> list[Any]:
        localiser = ByRows(1, False, rules, rows=tokens)
        inputs = []
        for v, value, kind in zip(eqn.invars, values, kinds, strict=True):
            dim = BY_ROWS if kind == "rows" else None
            inputs.append(LocalValue(value, dim, v.aval.shape, active=is_custom, weight=kind != "rows"))
            if kind == "alike":
                row = LocalValue(value[0], None, value.shape[1:], weight=True)
                inputs[-1].broadcast = row, tuple(range(1, value.ndim))
        outputs = localiser.equation(eqn, inputs)
        if any(x.dim != BY_ROWS for x in outputs):
            raise MixesRowsError
        return [x.value for x in outputs]

    def total(*values: Any) -> Any:
        return sum(x.astype(jnp.float32).sum() for x in rewritten(*values))

    try:
        jax.eval_shape(jax.grad(total, argnums=tuple(range(len(values)))) if is_custom else rewritten, *values)
    except MixesRowsError:
        return False
    return True


def _operand_kind(v: Any, tokens: int, producers: dict[Any, Any]) -> str:
    """Classify an operand: "rows" (a value for each row), "alike" (a broadcast, equal in all rows) or "rest"."""
    if jx.is_literal(v) or v.aval.shape[:1] != (tokens,):
        return "rest"
    return "alike" if v in producers and repeats(producers[v]) else "rows"


def repeats(eqn: Any) -> bool:
    """Whether an equation broadcasts one value to all rows."""
    if eqn.primitive.name != "broadcast_in_dim":
        return False
    dims, shape = eqn.params["broadcast_dimensions"], eqn.invars[0].aval.shape
    return 0 not in dims or shape[dims.index(0)] == 1 != eqn.outvars[0].aval.shape[0]


def _run_of(last: Any, producers: dict[Any, Any], sizes_of: dict[Any, Any]) -> list[Any]:
    """Return a grouped matmul and the equations that compute its rows, back to grouped matmuls of the same sizes."""
    sizes, tokens = sizes_of[last.outvars[0]], last.invars[0].aval.shape[0]
    eqn_by_id, stack = {id(last): last}, [last]
    while stack:
        eqn = stack.pop()
        # For a grouped matmul, follow the rows alone. Leaves and sizes come from outside of the run.
        for v in eqn.invars[: 1 if _is_grouped_matmul(eqn) else None]:
            if jx.is_literal(v) or v not in producers or id(producers[v]) in eqn_by_id:
                continue
            # A broadcast to all rows belongs to no grouping. The run repeats it for its own number of rows.
            is_broadcast = not _is_grouped_matmul(eqn) and _operand_kind(v, tokens, producers) == "alike"
            if sizes_of.get(v) is sizes or is_broadcast:
                eqn_by_id[id(producers[v])] = producers[v]
                stack.append(producers[v])
    return list(eqn_by_id.values())


def _expert_run(eqns: Sequence[Any], rules: Any) -> ExpertRun | None:
    """Return these equations as a run; None if its rows have several dtypes, or a leaf is also rows or rest."""
    # Sort the variables that enter the run by their part in it; dicts keep them unique and in order.
    inner_vars = {v for eqn in eqns for v in eqn.outvars}
    rows, leaves, rest, sizes = {}, {}, {}, {}
    tokens = eqns[-1].invars[0].aval.shape[0]
    for eqn in eqns:
        for i, v in enumerate(eqn.invars):
            if jx.is_literal(v) or v in inner_vars:
                continue
            if _is_grouped_matmul(eqn):
                # Its operands are rows, leaves and sizes, in this order.
                (rows, leaves, sizes)[i][v] = None
            else:
                (rows if not repeats(eqn) and v.aval.shape[:1] == (tokens,) else rest)[v] = None
    if len({v.aval.dtype for v in rows}) > 1 or {*leaves} & {*rest, *rows}:
        return None
    return ExpertRun(tuple(eqns), eqns[-1].invars[2], tuple(rows), tuple(leaves), tuple(rest), rules)
