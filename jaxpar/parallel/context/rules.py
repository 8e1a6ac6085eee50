"""Rules of equations that add positions up, pick some of them, or look something up for each; and of `jp.attention`.

The table starts from the rules of `tensor`, and replaces those that mix positions:

    reshape, gather, reductions, dot_general    in this file
    jp.attention                                in this file, by the run's mode (`attention_mode.py`)
    slice, pad, concatenate, convolution, ...   `neighbours.py`
    cumulative sums, scan                       `recurrences.py`
    any other primitive with factors            `follow`: on the parts, if it treats positions separately
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...model import permutations
from ...program import factors, kernels
from ...program import jaxpr as jx
from ...program.environment import through
from ...program.lookups import counting_dim
from ...program.primitives import having
from ...program.walk import called, propagate
from ..tensor import RULES as TENSOR
from ..tensor.localiser import BY_FACTORS, Found, LocalValue, place
from ..tensor.primitives import follow, registering, shape_of
from ..tensor.sums import with_column
from .attention.flash import AttentionOptions
from .attention_mode import AXIS, AttentionMode, options_of
from .localiser import ContextLocaliser
from .ops import (
    Ring,
    Rounds,
    attend_by_heads,
    by_blocks,
    by_rounds,
    gather_attention,
    ring_attention,
    to_zigzag,
    ulysses_attention,
    usp_attention,
)
from .places import constant, place_positions, with_split
from .split import PARTIAL, Split, pad_positions, reshape_split

Rule = Callable[[Any, Any, Sequence[LocalValue]], Found | None]
RULES: dict[str, Rule] = {**TENSOR, BY_FACTORS: follow}
rule = registering(RULES)


@rule("reshape")
def _reshape(localiser: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Keep positions as a separate dim, merge them with rows or with inner dims, or divide them into several dims."""
    x, *_ = inputs
    assert x.dim is not None
    # A reshape that permutes dims as well has no rule.
    if eqn.params["dimensions"] is not None:
        return None
    parts, shape = localiser.mode.parts(localiser.ranks), shape_of(eqn)
    dim = reshape_split(x.shape, localiser.split(x.dim), shape, parts)
    if dim is not None:
        return [(jx.bind(eqn, [x.value], new_sizes=localiser.local(shape, dim))[0], dim)]
    if math.prod(x.shape) <= localiser.max_gathered:
        return None
    raise ValueError(
        f"context={localiser.ranks} splits dim {x.dim} of {list(x.shape)} into {parts} parts, and {place(eqn)} to "
        f"{list(shape)} cuts through them; keep rows and positions as separate dims, or make the outermost of the dims "
        f"that positions become a multiple of {parts} (in jp.cross_entropy, by a chunk= {localiser.ranks} times as "
        "large)"
    )


@rule(*jx.CUSTOM)
def _custom(localiser: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Route each rank's own tokens to slots of that rank (`model/permutations.py`); others as on `tensor`."""
    route = permutations.of(eqn)
    if route is None:
        return TENSOR[eqn.primitive.name](localiser, eqn, inputs)
    line, parts = jx.where(eqn), localiser.mode.parts(localiser.ranks)
    # With a capacity, a token's slot depends on all tokens before it, on other ranks too.
    if route.part is None:
        raise ValueError(
            f"context={localiser.ranks} splits the tokens of a row, and {line} gives slots to all of them in their "
            "order: its capacity drops the tokens beyond the slots; use capacity=None, which drops nothing, or data, "
            "fsdp or tensor instead of context"
        )
    slots = [v.aval.shape[1] for v, kind in zip(eqn.outvars, route.outs, strict=True) if kind == "routed"]
    if any(n % parts for n in slots):
        raise ValueError(
            f"context={localiser.ranks} splits the {slots[0]} slots of an expert at {line} into {parts} parts, which "
            "do not divide them; use another number of positions, or data, fsdp or tensor instead of context"
        )
    tokens = next((x.dim for x in inputs if x.dim == 0), None)
    if tokens is None or localiser.overlap:
        return None
    dims = {"rows": tokens, "routed": Split(1), "whole": None}
    values = route.part(localiser.ranks)(*(x.value for x in inputs))
    return list(zip(jax.tree.leaves(values), (dims[kind] for kind in route.outs), strict=True))


@rule(*having("reduces"))
def _reduce(localiser: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Sum the part into a partial sum; gather for an argmax; reduce others as on `tensor`."""
    (x,), name = inputs, eqn.primitive.name
    if x.dim not in eqn.params["axes"]:
        return follow(localiser, eqn, inputs)
    if name == "reduce_sum":
        return [(jx.bind(eqn, [localiser.masked_part(x)])[0], PARTIAL)]
    # Extremes and products are reduced over the ranks' results. An argmax would need global positions.
    return None if name.startswith("arg") else TENSOR[name](localiser, eqn, inputs)


@rule("dot_general")
def _dot(localiser: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found:
    """Multiply each position separately if positions are free or batched; sum into a partial sum if contracted.

    In a product of queries and keys, where positions of both operands are free, keys (`keys_of`) are gathered and
    queries stay split.
    """
    # 1. Choose the operand that stays split: one with free positions, and queries before keys.
    split_sides = [side for side in (0, 1) if inputs[side].dim is not None]
    all_factors = factors.of(eqn)
    factor_of: dict[int, Any] = {i: next(f for f in all_factors if f.ins[i] == inputs[i].dim) for i in split_sides}
    free_sides = [side for side in split_sides if None in factor_of[side].ins]
    split_side = (free_sides or split_sides)[0]
    if len(free_sides) == 2 and keys_of(localiser.eqns, eqn, [factor_of[side].outs[0] for side in free_sides]) == 0:
        split_side = 1
    factor, layout = factor_of[split_side], localiser.split(inputs[split_side].dim).as_tuple[1:]  # type: ignore[arg-type]

    # 2. Multiply.
    values = [
        localiser.whole(x) if d is None else localiser.part(x, Split(d, *layout))
        for x, d in zip(inputs, factor.ins, strict=True)
    ]
    (out_dim,) = factor.outs
    if out_dim is None:  # contracted: each position must be summed once
        values[split_side] = localiser.masked_part(inputs[split_side])
        return [(jx.bind(eqn, values)[0], PARTIAL)]
    return [(jx.bind(eqn, values)[0], Split(out_dim, *layout))]


@rule("gather")
def _lookup(localiser: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Look up known positions, `x[:, places]`, or one element of each position, `logits[jnp.arange(n), labels]`.

    The second works for any indices in the other dims, also for indices that each rank computes, such as the best
    experts of its tokens.
    """
    (table, indices), numbers = inputs, eqn.params["dimension_numbers"]
    if table.dim is None or table.dim not in numbers.start_index_map:
        return TENSOR["gather"](localiser, eqn, inputs)

    # 1. Known positions.
    column, starts = list(numbers.start_index_map).index(table.dim), constant(indices)
    takes_rows = numbers.offset_dims == tuple(d for d in range(len(table.shape)) if d != table.dim)
    if starts is not None and takes_rows and starts.ndim == 2 and starts.size:
        # Other dims may be sliced, as in `x[:, places, 1:4]`, if all positions take the same slice.
        sizes = eqn.params["slice_sizes"]
        limits = [table.shape[d] - sizes[d] for d in numbers.start_index_map]
        is_in_bounds = ((starts >= 0) & (starts <= limits)).all()
        if is_in_bounds and (np.delete(starts, column, 1) == np.delete(starts[0], column)).all():
            first = dict(zip(numbers.start_index_map, starts[0], strict=True))
            return place_positions(localiser, eqn, [_sliced(table, first, sizes)], int(table.dim), starts[:, column])

    # 2. The index of the position counts 0, 1, 2, ... along the positions of the indices.
    if table.dim not in numbers.collapsed_slice_dims or indices.made is None:
        return None
    concatenation, columns = indices.made
    if concatenation.primitive.name != "concatenate" or len(columns) != indices.shape[-1]:
        return None
    positions = constant(columns[column])
    dim = None if positions is None else counting_dim(positions[..., 0])
    if dim is None or indices.shape[dim] != table.shape[table.dim] or indices.dim not in (None, dim):
        return None  # it looks up other positions
    # Locally, a rank's positions are numbered from 0.
    local_indices = localiser.part(indices, dim)
    local_positions = lax.broadcasted_iota(local_indices.dtype, local_indices.shape[:-1], dim)
    local_indices = with_column(local_indices, column, local_positions)
    # Promises about all indices need not hold for this rank's.
    (value,) = jx.bind(eqn, [table.value, local_indices], indices_are_sorted=False, unique_indices=False)
    batch_dims = [d for d in range(len(shape_of(eqn))) if d not in numbers.offset_dims]
    return [(value, batch_dims[dim])]


def _sliced(table: LocalValue, first: dict[int, int], sizes: Sequence[int]) -> LocalValue:
    """Return a value with slices of its dims but the split one; `first` has their starts, 0 if missing."""
    value, shape = table.value, list(table.shape)
    for dim, size in enumerate(sizes):
        if dim != table.dim and size < shape[dim]:
            start, shape[dim] = int(first.get(dim, 0)), size
            value = lax.slice_in_dim(value, start, start + size, axis=dim)
    return LocalValue(value, table.dim, tuple(shape))


@rule("jit", "pjit")
def _kernel(localiser: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found:
    """Run `jp.attention` as a kernel if its positions, rows or heads are split; rewrite any other kernel's equations.

    So a kernel that mixes positions without a rule is refused with the name and line of its equation.
    """
    options, kernel = options_of(eqn), kernels.of(eqn)
    if options is not None and kernel is not None:
        query, key, value = (x.dim for x in inputs[:3])
        # Queries are [B, T, H, h]: dim 1 has positions, which attention mixes. Other dims it may keep apart.
        if query == 1 and not {key, value} - {None, 1} and localiser.rows == 1:
            return _attention(localiser, eqn, inputs, options, kernel)
        if query is not None and query == key == value and options.function is None:
            dims = _separate_dims(localiser, inputs, localiser.split(query), options, kernel)
            if dims is not None:
                values = [
                    localiser.whole(x) if d is None else localiser.part(x, d) for x, d in zip(inputs, dims, strict=True)
                ]
                return [(_for_tensor(localiser, kernel.fun, (2, 2, 2, *kernel.in_dims[3:]), 2)(*values), dims[0])]
    # An ordinary `jit`, or a kernel without a rule.
    return [(x.value, x.dim) for x in localiser.run(jx.flatten(called(eqn)), inputs)]


def _for_tensor(localiser: ContextLocaliser, fun: Callable[..., Any], *dims: Any) -> Callable[..., Any]:
    """Wrap attention as a kernel if tensor ranks share its heads, so that each runs it on its heads.

    Without tensor ranks it stays a plain function, because a kernel must not be differentiated.
    """
    return kernels.local_kernel(fun, *dims) if localiser.tensor > 1 else fun


def _separate_dims(
    localiser: ContextLocaliser,
    inputs: Sequence[LocalValue],
    dim: Split,
    options: AttentionOptions,
    kernel: kernels.LocalKernel,
) -> list[Split | None] | None:
    """Return the dims of attention's inputs along which it can run part by part, without communication.

    Attention is separate along rows (block-wise attention reshapes blocks of positions to rows), and along whole heads.

    Returns:
      A dim for each input, None for a whole one; None instead of the list if attention is not separate along `dim`.
    """
    if dim == 0:
        num_arrays = 3 + options.segments  # then masks follow: one with a single row is broadcast, and stays whole
        has_rows = [i < num_arrays or x.shape[0] > 1 for i, x in enumerate(inputs)]
        return [Split(0, *dim.as_tuple[1:]) if by_row else None for by_row in has_rows]
    # Each chunk of heads must be whole on every rank.
    heads = [x.shape[2] for x in inputs[:3]]
    if dim.as_tuple != (2, 1, 0) or any(n % localiser.mode.parts(localiser.ranks) for n in heads):
        return None
    return [None if d is None else Split(d) for d in kernel.in_dims]


def _attention(
    localiser: ContextLocaliser,
    eqn: Any,
    inputs: Sequence[LocalValue],
    options: AttentionOptions,
    kernel: kernels.LocalKernel,
) -> Found:
    """Run `jp.attention` of queries whose positions are split, by the run's mode."""
    for_tensor = functools.partial(_for_tensor, localiser)
    is_plain = not (options.causal or options.segments or options.masked or options.function)
    # Cross-attention to whole keys, such as frames that every rank encodes, sends nothing.
    if is_plain and all(x.dim is None for x in inputs[1:3]):
        value = for_tensor(kernel.fun, (2, 2, 2), 2)(inputs[0].value, *map(localiser.whole, inputs[1:3]))
        return [(value, inputs[0].dim)]

    # 1. Split query, key and value into chunks without overlap.
    (query, key), positions = inputs[:2], Split(1)
    t, s = query.shape[1], key.shape[1]
    values = [with_split(localiser, eqn, x, positions).value for x in inputs[:3]]
    if options.function is not None:
        # 2a. A function of scores: its operands with queries are split, unless ranks share heads and swap queries.
        function, group = options.function, localiser.mode.sharing(localiser.ranks)
        operands = zip(inputs[3:], function.dims("t"), strict=True)
        values += [localiser.whole(x) if d is None or group > 1 else localiser.part(x, Split(d)) for x, d in operands]
        fun, dims = functools.partial(attend_scored, options, localiser.mode, (t, s)), function.heads()
    else:
        # 2b. Ids of segments and masks. Places beyond the end of the keys need an id that no query has; a causal mask
        # hides them already.
        ids = [localiser.part(x, positions) for x in inputs[3 : 3 + options.segments]]
        masks = inputs[3 + options.segments :]
        if (is_owned := localiser.owned_mask(s, positions)) is not None and not options.causal:
            known_ids = [x.astype(jnp.int32) for x in ids] or [jnp.zeros(x.shape[:2], jnp.int32) for x in values[:2]]
            ids = [known_ids[0], jnp.where(is_owned, known_ids[-1], jnp.iinfo(jnp.int32).min)]
            options = dataclasses.replace(options, segments=2)
        masks = [localiser.part(x, Split(2)) if x.shape[2] > 1 else localiser.whole(x) for x in masks]
        padded_keys = localiser.local_length(s) * localiser.ranks
        values += [*ids, *(pad_positions(x, 3, padded_keys) if x.shape[3] > 1 else x for x in masks)]
        fun = functools.partial(attend, options, localiser.mode)
        dims = (2, 2, 2, *([None] * options.segments), *(1 if x.shape[1] > 1 else None for x in masks)), 2

    # 3. Run it, and return the result in the layout of the queries.
    assert query.dim is not None
    result = LocalValue(for_tensor(fun, *dims)(*values), positions, query.shape)
    result = with_split(localiser, eqn, result, localiser.split(query.dim))
    return [(result.value, result.dim)]


def attend(
    options: AttentionOptions,
    mode: AttentionMode,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *ids_and_masks: jax.Array,
) -> jax.Array:
    """Attend from this rank's queries to the keys and values of all ranks, by `mode`, or with a mask by gather.

    Args:
      options: the static options of the call.
      mode: how keys reach the queries.
      query: [B, T/c, H, h].
      key, value: [B, S/c, K, h].
      ids_and_masks: ids of these queries, of these keys, and a mask of these queries and all keys, as `options` say.
    """
    if options.masked or mode.name == "gather":
        return gather_attention(Ring(AXIS, mode.order), options, query, key, value, *ids_and_masks)
    attend_by_mode = {"usp": usp_attention, "ring": ring_attention, "ulysses": ulysses_attention}[mode.name]
    return attend_by_mode(Ring(AXIS, mode.order, mode.group), options, query, key, value, *ids_and_masks)


def attend_scored(
    options: AttentionOptions,
    mode: AttentionMode,
    lengths: tuple[int, int],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *score_operands: Any,
) -> jax.Array:
    """Attend from this rank's queries to all keys, with a function of scores.

    Args:
      options: the static options of the call, with the function.
      mode: how keys reach the queries.
      lengths: the number of queries and of keys, without places beyond the end.
      query: [B, T/c, H, h].
      key, value: [B, S/c, K, h].
      score_operands: the function's operands. They have all keys and heads in the user's order, and this rank's
        queries, or all queries where ranks share heads.
    """
    function, ranks = options.function, lax.axis_size(AXIS)
    group, (query_heads, key_heads) = mode.sharing(ranks), (x.shape[2] for x in (query, key))
    # On the ring, the axis consists of groups of ranks that share the heads.
    size, (ring_index, head_index), operands = ranks // group, divmod(lax.axis_index(AXIS), group), list(score_operands)

    def map_dim(side: str, change: Callable[[jax.Array, int], jax.Array]) -> list[jax.Array]:
        return [x if d is None else change(x, d) for x, d in zip(operands, function.dims(side), strict=True)]

    # 1. Pad and order the operands' positions as the ranks hold them.
    in_order = lambda x, d: to_zigzag(x, size, d) if mode.order == "zigzag" else x
    operands = map_dim("s", lambda x, d: in_order(pad_positions(x, d, ranks * key.shape[1]), d))
    if group > 1:
        operands = map_dim("t", lambda x, d: in_order(pad_positions(x, d, ranks * query.shape[1]), d))
        # 2. Slice this rank's queries and heads: key heads, and for each of them its query heads.
        local_key_heads = max(key_heads // group, 1)
        heads_per_key, length = query_heads // group // local_key_heads, group * query.shape[1]
        slices = {
            "t": (ring_index * length, length),
            "k": (head_index * key_heads // group, local_key_heads),
            "g": (head_index * query_heads // group % (query_heads // key_heads), heads_per_key),
        }
        for side, (start, n) in slices.items():
            operands = map_dim(side, lambda x, d, start=start, n=n: lax.dynamic_slice_in_dim(x, start, n, d))

    # 3. Attend, between the exchanges of positions for heads.
    ring, attend_keys = Ring(AXIS, mode.order, group), by_blocks if mode.name == "gather" else by_rounds

    def attend_heads(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend_keys(Rounds.of(ring, options, q, k, lengths), q, k, v, *operands)

    return attend_by_heads(attend_heads, ring, query, key, value)


Sides = dict[int, int]  # dim -> the operand whose positions it has


def keys_of(eqns: Sequence[Any], product: Any, dims: Sequence[int]) -> int | None:
    """Return which operand of a product has the keys: 0 or 1, None if the program does not tell.

    A softmax sums over keys, and so do the products with values. So the operand has the keys whose positions are first
    summed or sorted after the product.

    Args:
      eqns: the program.
      product: an equation of it, in which positions of both operands are free.
      dims: the dims of the product's result that have the positions of operand 0 and of operand 1.
    """
    key_sides: list[int] = []

    def follow_sides(eqn: Any, sides: Sequence[Sides]) -> list[Sides]:
        if key_sides or not any(sides):
            return [{}] * len(eqn.outvars)
        if (side := _summed_side(eqn, sides)) is not None:
            key_sides.append(side)
        # The body of a scan has other dims.
        outs = None if eqn.primitive.name == "scan" else propagate(eqn, sides, follow_program, lambda a, b: {**b, **a})
        return [_moved_sides(eqn, v, sides) for v in eqn.outvars] if outs is None else outs

    follow_program = lambda program, ins, decides: through(program, ins, follow_sides, {})
    product_index = next(i for i, eqn in enumerate(eqns) if eqn is product)
    follow_program(jx.build(eqns[product_index + 1 :], product.outvars, ()), [{dims[0]: 0, dims[1]: 1}], None)
    return next(iter(key_sides), None)


def _summed_side(eqn: Any, sides: Sequence[Sides]) -> int | None:
    """Return the operand of the product whose positions an equation sums, accumulates or sorts; None if neither."""
    mixed = [(i, d) for f in factors.of(eqn) if f.reduced for i, d in enumerate(f.ins) if d is not None]
    mixed += [
        (0, eqn.params[name])
        for name in ("axis", "dimension")
        if eqn.primitive.name.startswith(("cum", "sort")) and name in eqn.params
    ]
    return next((sides[i][d] for i, d in mixed if d in sides[i]), None)


def _moved_sides(eqn: Any, out: Any, sides: Sequence[Sides]) -> Sides:
    """Return the dims of positions in an output of an equation that keeps positions apart."""
    out_index = list(eqn.outvars).index(out)
    moves = [(d, f.outs[out_index], i) for f in factors.of(eqn) for i, d in enumerate(f.ins)]
    return {out_dim: sides[i][d] for d, out_dim, i in moves if d in sides[i] and out_dim is not None}
