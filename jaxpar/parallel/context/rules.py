"""Rules of equations that add positions up, pick some of them, or look something up for each; and of `jp.attention`.

Equations that leave positions apart, as their factors say, have the rules of `tensor`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...model import permutations
from ...program import factors, kernels
from ...program import jaxpr as jx
from ...program.environment import through
from ...program.primitives import having
from ...program.walk import called, propagate
from ..tensor import RULES as TENSOR
from ..tensor.localiser import BY_FACTORS, Found, LocalValue, place
from ..tensor.primitives import follow, registering, shape_of
from .attention.flash import AttentionOptions
from .attention_mode import AXIS, AttentionMode, options_of
from .localiser import ContextLocaliser
from .ops import (
    Rounds,
    by_blocks,
    by_rounds,
    exchanged,
    gather_attention,
    ring_attention,
    to_zigzag,
    ulysses_attention,
    usp_attention,
)
from .places import constant, laid, placed
from .split import PARTIAL, Split, counts, reshaped

Rule = Callable[[Any, Any, Sequence[LocalValue]], Found | None]
RULES: dict[str, Rule] = {**TENSOR, BY_FACTORS: follow}
rule = registering(RULES)


@rule("reshape")
def _reshape(work: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Positions stay a dim of their own, are merged with rows or with what is in a position, or become several dims."""
    x, *_ = inputs
    assert x.dim is not None
    if eqn.params["dimensions"] is not None:
        return None
    parts, shape = work.mode.parts(work.ranks), shape_of(eqn)
    dim = reshaped(x.shape, work.split(x.dim), shape, parts)
    if dim is not None:
        return [(jx.bind(eqn, [x.value], new_sizes=work.local(shape, dim))[0], dim)]
    if math.prod(x.shape) <= work.cheap:
        return None
    raise ValueError(
        f"context={work.ranks} splits dim {x.dim} of {list(x.shape)} into {parts} parts, and {place(eqn)} to "
        f"{list(shape)} cuts through them; keep rows and positions as dims of their own, or let the outermost of the "
        f"dims that positions become be a multiple of {parts}: in jp.cross_entropy by a chunk= {work.ranks} times as "
        "large"
    )


@rule(*jx.CUSTOM)
def _custom(work: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """A route (`model/permutations.py`) takes each rank's own tokens, in slots of its own."""
    route = permutations.of(eqn)
    if route is None:
        return TENSOR[eqn.primitive.name](work, eqn, inputs)
    where, parts = jx.where(eqn), work.mode.parts(work.ranks)
    if route.part is None:
        raise ValueError(
            f"context={work.ranks} splits the tokens of a row, and {where} gives them slots in their order: a capacity "
            "drops what finds none; use capacity=None, which drops nothing, or data, fsdp or tensor for context"
        )
    slots = [v.aval.shape[1] for v, kind in zip(eqn.outvars, route.outs, strict=True) if kind == "routed"]
    if any(n % parts for n in slots):
        raise ValueError(
            f"context={work.ranks} splits the {slots[0]} slots of an expert at {where} into {parts} parts, which do "
            "not divide them; use another number of positions, or data, fsdp or tensor for context"
        )
    tokens = next((x.dim for x in inputs if x.dim == 0), None)
    if tokens is None or work.overlap:
        return None
    dims = {"rows": tokens, "routed": Split(1), "whole": None}
    values = route.part(work.ranks)(*(x.value for x in inputs))
    return list(zip(jax.tree.leaves(values), (dims[kind] for kind in route.outs), strict=True))


@rule(*having("reduces"))
def _reduce(work: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """A sum stays a partial one, the place of an extreme needs all positions, and others are `tensor`'s."""
    (x,), name = inputs, eqn.primitive.name
    if x.dim not in eqn.params["axes"]:
        return follow(work, eqn, inputs)
    if name == "reduce_sum":
        return [(jx.bind(eqn, [work.masked_part(x)])[0], PARTIAL)]
    return None if name.startswith("arg") else TENSOR[name](work, eqn, inputs)


@rule("dot_general")
def _dot(work: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found:
    """Each position by itself where they are free or batched; a partial sum where they are contracted.

    Of two operands whose positions meet, keys (`keys_of`) are gathered and queries stay.
    """
    split = [side for side in (0, 1) if inputs[side].dim is not None]
    every = factors.of(eqn)
    of: dict[int, Any] = {side: next(f for f in every if f.ins[side] == inputs[side].dim) for side in split}
    free = [side for side in split if None in of[side].ins]
    keep = (free or split)[0]
    if len(free) == 2 and keys_of(work.eqns, eqn, [d for side in free if (d := of[side].outs[0]) is not None]) == 0:
        keep = 1
    factor, how = of[keep], work.split(inputs[keep].dim).how[1:]  # type: ignore[arg-type]
    values = [
        work.whole(x) if d is None else work.part(x, Split(d, *how)) for x, d in zip(inputs, factor.ins, strict=True)
    ]
    (out,) = factor.outs
    if out is None:  # summed: of what has them, without what other ranks have as well
        values[keep] = work.masked_part(inputs[keep])
        return [(jx.bind(eqn, values)[0], PARTIAL)]
    return [(jx.bind(eqn, values)[0], Split(out, *how))]


@rule("gather")
def _gather(work: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """`x[:, places]` of known places; `logits[jnp.arange(n), labels]`: something of each position, at its own place,
    also where what is looked up beside the place is a rank's own, such as a token's best experts.
    """
    (table, indices), numbers = inputs, eqn.params["dimension_numbers"]
    if table.dim is None or table.dim not in numbers.start_index_map:
        return TENSOR["gather"](work, eqn, inputs)
    at, whole = constant(indices), numbers.offset_dims == tuple(d for d in range(len(table.shape)) if d != table.dim)
    if at is not None and whole and len(at.shape) == 2 and (at >= 0).all() and (at < table.shape[table.dim]).all():
        return placed(work, eqn, [table], int(table.dim), at[:, 0])
    column = list(numbers.start_index_map).index(table.dim)
    if table.dim not in numbers.collapsed_slice_dims or indices.made is None:
        return None
    joined, columns = indices.made
    if joined.primitive.name != "concatenate" or len(columns) != indices.shape[-1]:
        return None
    at = counts(columns[column])
    if at is None or indices.shape[at] != table.shape[table.dim] or indices.dim not in (None, at):
        return None  # other places
    held = work.part(indices, at)
    places = jnp.expand_dims(jnp.arange(held.shape[at], dtype=held.dtype), [*range(1, len(held.shape) - 1 - at)])
    held = held.at[..., column].set(jnp.broadcast_to(places, held.shape[:-1]))
    (value,) = jx.bind(eqn, [table.value, held], indices_are_sorted=False, unique_indices=False)
    batch = [d for d in range(len(shape_of(eqn))) if d not in numbers.offset_dims]
    return [(value, batch[at])]


@rule("jit", "pjit")
def _kernel(work: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found:
    """`jp.attention` as a kernel, where its positions, rows or heads are what is split. Any other kernel is what it
    computes, equation by equation, so that one that mixes positions without a rule is refused by its name and line.
    """
    options, kernel = options_of(eqn), kernels.of(eqn)
    if options is not None and kernel is not None:
        query, key, value = (x.dim for x in inputs[:3])
        if query == 1 and not {key, value} - {None, 1} and work.rows == 1:
            return _attention(work, eqn, inputs, options, kernel)
        if query is not None and query == key == value and options.function is None:
            dims = _separate(work, inputs, work.split(query), options, kernel)
            if dims is not None:
                values = [work.whole(x) if d is None else work.part(x, d) for x, d in zip(inputs, dims, strict=True)]
                return [(_for_tensor(work, kernel.fun, (2, 2, 2, *kernel.in_dims[3:]), 2)(*values), dims[0])]
    return [(x.value, x.dim) for x in work.run(jx.flatten(called(eqn)), inputs)]


def _for_tensor(work: ContextLocaliser, fun: Callable[..., Any], *dims: Any) -> Callable[..., Any]:
    """Attention as it is; for tensor ranks one kernel, which they run on their heads. As one it must not be
    differentiated.
    """
    return kernels.local_kernel(fun, *dims) if work.tensor > 1 else fun


def _separate(
    work: ContextLocaliser,
    inputs: Sequence[LocalValue],
    dim: Split,
    options: AttentionOptions,
    kernel: kernels.LocalKernel,
) -> list[Split | None] | None:
    """The dims of the inputs of attention where it is separate along a dim of its queries: along rows, as where
    positions are attended to block by block, or along whole heads; else None.
    """
    if dim == 0:
        ids = [True] * (3 + options.segments)
        rows = [*ids, *(x.shape[0] > 1 for x in inputs[len(ids) :])]
        return [Split(0, *dim.how[1:]) if by_row else None for by_row in rows]
    heads = [x.shape[2] for x in inputs[:3]]
    if dim.how != (2, 1, 0) or any(n % work.mode.parts(work.ranks) for n in heads):
        return None
    return [None if d is None else Split(d) for d in kernel.in_dims]


def _attention(
    work: ContextLocaliser,
    eqn: Any,
    inputs: Sequence[LocalValue],
    options: AttentionOptions,
    kernel: kernels.LocalKernel,
) -> Found:
    """`jp.attention` of queries whose positions are split, by the run's mode."""
    local = functools.partial(_for_tensor, work)
    plain = not (options.causal or options.segments or options.masked or options.function)
    if plain and all(x.dim is None for x in inputs[1:3]):  # as of frames, which every rank encodes: nothing is sent
        return [(local(kernel.fun, (2, 2, 2), 2)(inputs[0].value, *map(work.whole, inputs[1:3])), inputs[0].dim)]
    (query, key), of = inputs[:2], Split(1)
    t, s = query.shape[1], key.shape[1]
    values = [laid(work, eqn, x, of).value for x in inputs[:3]]
    if options.function is not None:
        function, group = options.function, work.mode.sharing(work.ranks)
        operands = zip(inputs[3:], function.dims("t"), strict=True)
        values += [work.whole(x) if d is None or group > 1 else work.part(x, Split(d)) for x, d in operands]
        fun, dims = functools.partial(attend_scored, options, work.mode, (t, s)), function.heads()
    else:
        ids, masks = [work.part(x, of) for x in inputs[3 : 3 + options.segments]], inputs[3 + options.segments :]
        if (there := work.there(s, of)) is not None and not options.causal:  # which hides what is beyond the end
            own = [x.astype(jnp.int32) for x in ids] or [jnp.zeros(x.shape[:2], jnp.int32) for x in values[:2]]
            ids = [own[0], jnp.where(there, own[-1], jnp.iinfo(jnp.int32).min)]
            options = dataclasses.replace(options, segments=2)
        masks = [work.part(x, Split(2)) if x.shape[2] > 1 else work.whole(x) for x in masks]
        values += [*ids, *(beyond(x, 3, work.size(s) * work.ranks) if x.shape[3] > 1 else x for x in masks)]
        fun = functools.partial(attend, options, work.mode)
        dims = (2, 2, 2, *([None] * options.segments), *(1 if x.shape[1] > 1 else None for x in masks)), 2
    assert query.dim is not None
    out = laid(work, eqn, LocalValue(local(fun, *dims)(*values), of, query.shape), work.split(query.dim))
    return [(out.value, out.dim)]


def attend(
    options: AttentionOptions,
    mode: AttentionMode,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *more: jax.Array,
) -> jax.Array:
    """Attention of this rank's queries [B, T/c, H, h] to the keys and values of all ranks, each of which has
    [B, S/c, K, h]. `more` are ids of these queries, of these keys, and a mask of these queries and all keys, with
    which it is by gather.
    """
    ids, masks = more[: options.segments], more[options.segments :]
    given: dict[str, Any] = {"axis": AXIS, "causal": options.causal, "scale": options.scale, "order": mode.order}
    given |= {"window": options.window} | dict(zip(("segment_ids", "kv_segment_ids"), ids, strict=False))
    if masks or mode.name == "gather":
        return gather_attention(query, key, value, mask=masks[0] if masks else None, **given)
    if mode.name == "usp":
        return usp_attention(query, key, value, group=mode.group, **given)
    return (ring_attention if mode.name == "ring" else ulysses_attention)(query, key, value, **given)


def attend_scored(
    options: AttentionOptions,
    mode: AttentionMode,
    lengths: tuple[int, int],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *read: Any,
) -> jax.Array:
    """The same by a function of scores. Its operands have all keys and heads, in the user's order, and this rank's
    queries, or all where ranks share heads. Of queries and keys there are no more than `lengths`.
    """
    function, ranks = options.function, lax.axis_size(AXIS)
    group, (heads, groups) = mode.sharing(ranks), (x.shape[2] for x in (query, key))
    ring, (at, place), operands = ranks // group, divmod(lax.axis_index(AXIS), group), list(read)

    def changed(side: str, change: Callable[[jax.Array, int], jax.Array]) -> list[jax.Array]:
        return [x if d is None else change(x, d) for x, d in zip(operands, function.dims(side), strict=True)]

    ordered = lambda x, d: to_zigzag(x, ring, d) if mode.order == "zigzag" else x
    operands = changed("s", lambda x, d: ordered(beyond(x, d, ranks * key.shape[1]), d))
    if group > 1:
        operands = changed("t", lambda x, d: ordered(beyond(x, d, ranks * query.shape[1]), d))
        mine = max(groups // group, 1)  # of the key heads; and of each the query heads that are this rank's
        each, length = heads // group // mine, group * query.shape[1]
        parts = {
            "t": (at * length, length),
            "k": (place * groups // group, mine),
            "g": (place * heads // group % (heads // groups), each),
        }
        for side, (first, n) in parts.items():
            operands = changed(side, lambda x, d, i=first, n=n: lax.dynamic_slice_in_dim(x, i, n, d))

    def among(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        rounds = Rounds.of(q, k, AXIS, options.causal, None, None, mode.order, group, function, lengths)
        return (by_blocks if mode.name == "gather" else by_rounds)(rounds, q, k, v, *operands)

    return exchanged(among, query, key, value, axis=AXIS, group=group, order=mode.order)


def beyond(x: jax.Array, dim: int, length: int) -> jax.Array:
    """What has so many positions along a dim, the last of them repeated."""
    return jnp.pad(x, [(0, length - n if d == dim else 0) for d, n in enumerate(x.shape)], "edge")


Sides = dict[int, int]  # dim -> which operand's positions it has


def keys_of(eqns: Sequence[Any], product: Any, dims: Sequence[int]) -> int | None:
    """The operand that has the keys, of a product among `eqns` with the positions of either operand at these dims: that
    whose positions are added up, or sorted, first.
    """
    found: list[int] = []

    def of(eqn: Any, sides: Sequence[Sides]) -> list[Sides]:
        if found or not any(sides):
            return [{}] * len(eqn.outvars)
        if (hit := _summed(eqn, sides)) is not None:
            found.append(hit)
        # A scan's body has other dims.
        outs = None if eqn.primitive.name == "scan" else propagate(eqn, sides, run, lambda a, b: {**b, **a})
        return [_moved(eqn, v, sides) for v in eqn.outvars] if outs is None else outs

    run = lambda program, ins, decides: through(program, ins, of, {})
    at = next(i for i, eqn in enumerate(eqns) if eqn is product)
    run(jx.build(eqns[at + 1 :], product.outvars, ()), [{dims[0]: 0, dims[1]: 1}], None)
    return next(iter(found), None)


def _summed(eqn: Any, sides: Sequence[Sides]) -> int | None:
    mixed = [(i, d) for f in factors.of(eqn) if f.reduced for i, d in enumerate(f.ins) if d is not None]
    mixed += [
        (0, eqn.params[k])
        for k in ("axis", "dimension")
        if eqn.primitive.name.startswith(("cum", "sort")) and k in eqn.params
    ]
    return next((sides[i][d] for i, d in mixed if d in sides[i]), None)


def _moved(eqn: Any, out: Any, sides: Sequence[Sides]) -> Sides:
    """Where the positions are in an output of an equation that leaves them apart."""
    at = list(eqn.outvars).index(out)
    pairs = [(d, f.outs[at], i) for f in factors.of(eqn) for i, d in enumerate(f.ins)]
    return {to: sides[i][d] for d, to, i in pairs if d in sides[i] and to is not None}
