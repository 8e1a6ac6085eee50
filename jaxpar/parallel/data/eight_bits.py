"""Weights and gradients that travel in 8 bits (ZeRO++, Wang et al. 2023, arXiv:2306.10209, section 3): qwZ and qgZ.

    weights      ZeRO-3's all-gathers have P (1 + 4 / 256) bytes in place of 2 P in bfloat16, 4 P in float32
    gradients    a reduce-scatter is an all-to-all of P (1 + 4 / 256) bytes in place of 4 P, and a sum on arrival; an
                 all-reduce is that, and an all-gather of the rounded sums
    elsewhere    as the rule without: masters, what is computed and accumulated

What a device sends is cut into blocks of 256 numbers, in the order in which they lie; the last may be shorter. Each is
rounded to 8 bits with a scale of its own, a float32 that follows them in the same buffer: one collective of bytes for
each of the rule's. Every rank, its owner too, computes with what was rounded. A gradient is rounded once on its way to
the sum, whatever the number of ranks, where a ring of sums would round it at every hop (section 3.3). Arrays of less
than 16,384 elements, norms and biases, travel as they are.

    int8    round(127 x / m), m the block's largest: of a number to 1/254 of that
    fp8     float8_e4m3fn times a power of two: what FP8 products round their weights to in any case, so that these
            round them to the same numbers again (`numerics/fp8/`), but for what is 2^14 times smaller than a block's
            largest
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from ...collectives import all_gather, all_reduce, all_to_all, reduce_scatter_as
from ...collectives.ranks import count
from ...layout.leaves import PAD_FROM, Leaf
from ...layout.precision import F8, quantised
from .contract import Rule, Sent, Use, Uses
from .ddp import DDP
from .fsdp import ZERO3, ZERO3_ONCE
from .zero import ZERO1, ZERO2

BLOCK = 256  # numbers with one scale
_SCALE = 4  # bytes of one
_LEAST = 2.0**-100  # of a block's largest number: a scale and its inverse are normal numbers
_REDUCED = {"reduce-scatter": ("all-to-all",), "all-reduce": ("all-to-all", "all-gather")}
_SECOND = "all-gather", ("data",)
Rounding = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def int8(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Blocks [n, BLOCK] -> int8 and scales [n, 1]: x is about their product. A NaN or an infinity makes its block NaN.

    Symmetric, as ZeRO++ has it.
    """
    most = jnp.maximum(jnp.abs(blocks).max(1, keepdims=True).astype(jnp.float32), _LEAST)
    return jnp.round(blocks.astype(jnp.float32) * (127 / most)).astype(jnp.int8), most * (1 / 127)


def fp8(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same with float8_e4m3fn, and scales that are powers of two."""
    return quantised(blocks, (1,))


def _encoded(rounding: Rounding, rows: jax.Array) -> jax.Array:
    """Rows [n, s] -> bytes [n, s + 4 ceil(s / BLOCK)]: what is rounded, then the scales of its blocks."""
    n, size = rows.shape
    low, scales = rounding(jnp.pad(rows, ((0, 0), (0, -size % BLOCK))).reshape(-1, BLOCK))
    values = lax.bitcast_convert_type(low, jnp.uint8).reshape(n, -1)[:, :size]
    return jnp.concatenate([values, lax.bitcast_convert_type(scales.astype(jnp.float32), jnp.uint8).reshape(n, -1)], 1)


def _decoded(rounding: Rounding, parts: jax.Array, size: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The reverse, of rows of this size, in a dtype."""
    values = jnp.pad(parts[:, :size], ((0, 0), (0, -size % BLOCK))).reshape(len(parts), -1, BLOCK)
    scales = lax.bitcast_convert_type(parts[:, size:].reshape(len(parts), -1, 1, _SCALE), jnp.float32)
    low = jnp.int8 if rounding is int8 else F8
    whole = lax.bitcast_convert_type(values, low).astype(dtype) * scales.astype(dtype)
    return whole.reshape(len(parts), -1)[:, :size]


def _fetch(rounding: Rounding, x: jax.Array, use: Use) -> jax.Array:
    n = count(use.shard)
    if n == 1 or not _rounds(n * x.size, x.dtype):
        return all_gather(x, use.shard, use.dim)
    parts = all_gather(_encoded(rounding, x.reshape(1, -1)), use.shard)
    shards = _decoded(rounding, parts, x.size, x.dtype).reshape(n, *x.shape)
    return jnp.moveaxis(shards, 0, use.dim).reshape(*x.shape[: use.dim], -1, *x.shape[use.dim + 1 :])


def _scatter(x: jax.Array, use: Use) -> jax.Array:
    """`zero.scatter`'s reduce-scatter, as an all-to-all of rounded parts and their sum."""
    n, dim = count(use.shard), use.dim
    if n == 1 or not _rounds(x.size, use.dtype):
        return reduce_scatter_as(x, use.shard, dim, use.dtype)
    parts = jnp.moveaxis(x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :]), dim, 0)
    return _summed(parts.reshape(n, -1), use.shard, use.dtype).reshape(parts.shape[1:])


def _all_reduce(x: jax.Array, use: Use) -> jax.Array:
    """`all_reduce` over the rest: each rank sums a part, rounds it again, and all gather these."""
    n = count(use.rest)
    if n == 1 or not _rounds(x.size, use.dtype):
        return all_reduce(x.astype(use.dtype), use.rest)
    part = _summed(jnp.pad(x.reshape(-1), (0, -x.size % n)).reshape(n, -1), use.rest, use.dtype)
    parts = _decoded(int8, all_gather(_encoded(int8, part[None]), use.rest), part.size, use.dtype)
    return parts.reshape(-1)[: x.size].reshape(x.shape)


def _summed(rows: jax.Array, axes: tuple[str, ...], dtype: jnp.dtype) -> jax.Array:
    """Row j [s] of the ranks' rows [n, s], on rank j: their sum, each rounded by its rank."""
    return _decoded(int8, all_to_all(_encoded(int8, rows), axes), rows.shape[1], dtype).sum(0)


def _give(rule: Rule, x: jax.Array, use: Use) -> jax.Array:
    if not (rule.at_once or use.last):
        return x.astype(use.dtype)
    x = _scatter(x, use)
    return _rest(x, use) if use.last else x


def _finish(rule: Rule, x: jax.Array, use: Use) -> jax.Array:
    return x if use.last else _rest(x if rule.at_once else _scatter(x, use), use)


def _rest(x: jax.Array, use: Use) -> jax.Array:
    return _all_reduce(_scatter(x, dataclasses.replace(use, shard=use.second)), use)


def _rounds(elements: int, dtype: jax.typing.DTypeLike) -> bool:
    """Whether an array of so many elements travels in 8 bits."""
    return elements >= PAD_FROM and jnp.issubdtype(dtype, jnp.floating)


def _size(elements: int) -> int:
    """Bytes of so many numbers and the scales of their blocks."""
    return elements + _SCALE * -(-elements // BLOCK)


def _sends(rule: Rule, kinds: Mapping[str, tuple[str, ...]], leaf: Uses) -> Iterator[Sent]:
    """The closed form: the rule's, each collective that is a key of `kinds` replaced by those named there, of a byte
    for each number and 4 for each block of a rank's part. What hpZ gathers over `second` goes as it is.
    """
    for one in rule.promise.sends(leaf):
        n, each = math.prod(leaf.sizes[axis] for axis in one.axes), one.elements // max(1, one.count)
        if n == 1 or one.kind not in kinds or not _rounds(each, one.dtype) or (one.kind, one.axes) == _SECOND:
            yield one
        else:
            for kind in kinds[one.kind]:
                yield Sent(kind, one.axes, jnp.uint8, one.count, one.count * n * _size(-(-each // n)))


def _reduces(rule: Rule, leaf: Uses) -> Iterator[Sent]:
    whole = tuple(dataclasses.replace(each, pieces=1) for each in leaf.given)  # bytes are sent in one piece
    return _sends(rule, _REDUCED, dataclasses.replace(leaf, given=whole))


def _rounded(rule: Rule, rounding: Rounding) -> Rule:
    promise = dataclasses.replace(rule.promise, sends=functools.partial(_sends, rule, {"all-gather": ("all-gather",)}))
    name = f"{rule.name}, weights gathered in {rounding.__name__}"
    return dataclasses.replace(rule, name=name, fetch=functools.partial(_fetch, rounding), promise=promise)


ROUNDED = {(rule, how.__name__): _rounded(rule, how) for rule in (ZERO3, ZERO3_ONCE) for how in (int8, fp8)}


def _reduced(rule: Rule) -> Rule:
    promise = dataclasses.replace(rule.promise, sends=functools.partial(_reduces, rule))
    give, finish = functools.partial(_give, rule), functools.partial(_finish, rule)
    name = f"{rule.name}, gradients reduced in int8"
    return dataclasses.replace(rule, name=name, give=give, finish=finish, promise=promise)


REDUCED = {rule: _reduced(rule) for rule in (DDP, ZERO1, ZERO2, ZERO3, ZERO3_ONCE, *ROUNDED.values())}
_UNROUNDED = {rounded: rule for (rule, how), rounded in ROUNDED.items() if how == "fp8"}
_UNROUNDED |= {REDUCED[rounded]: REDUCED[rule] for rounded, rule in _UNROUNDED.items()}


def of_leaf(rule: Rule, leaf: Leaf, in_fp8: Collection[str]) -> Rule:
    """How a leaf travels under a rule: what ZeRO does not shard is replicated, as in plain data parallelism; and where
    weights of FP8 products are gathered in FP8, others (not `in_fp8`, by path) are gathered as they are.
    """
    if rule.sharded and leaf.dim is None:
        return REDUCED[DDP] if rule in REDUCED.values() else DDP
    return rule if leaf.path in in_fp8 else _UNROUNDED.get(rule, rule)
