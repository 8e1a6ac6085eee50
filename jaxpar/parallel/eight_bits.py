"""ZeRO-3 whose weights are gathered in 8 bits (ZeRO++, Wang et al. 2023, arXiv:2306.10209, section 3.1: qwZ).

    sent         as ZeRO-3's, of a weight P (1 + 4 / 256) bytes in place of 2 P in bfloat16, 4 P in float32
    elsewhere    as ZeRO-3: masters, what is computed, and gradients

What a device has of a weight is cut into blocks of 256 numbers, in the order in which they lie; the last may be
shorter. Each is rounded to 8 bits with a scale of its own, a float32 that follows them in the same buffer: one
all-gather of bytes for each of ZeRO-3's. Every rank, its owner too, computes with what was rounded, and gradients are
those at these weights. Arrays of less than 16,384 elements, norms and biases, travel as they are.

    int8    round(127 x / m), m the block's largest: of a weight to 1/254 of that
    fp8     float8_e4m3fn times a power of two: what FP8 products round their weights to in any case, so that these
            round them to the same numbers again (`localise/fp8/`), but for what is 2^14 times smaller than a block's
            largest
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator

import jax
import jax.numpy as jnp
from jax import lax

from ..collectives import all_gather
from ..layout.leaves import PAD_FROM, Leaf
from ..localise.fp8.product import quantised
from .contract import Rule, Sent, Use, Uses
from .ddp import DDP
from .fsdp import ZERO3, ZERO3_ONCE

BLOCK = 256  # numbers with one scale
_SCALE = 4  # bytes of one
_LEAST = 2.0**-100  # of a block's largest number: a scale and its inverse are normal numbers
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


def _fetch(rounding: Rounding, x: jax.Array, use: Use) -> jax.Array:
    n = math.prod(lax.axis_size(axis) for axis in use.shard)
    if n == 1 or not _rounds(n * x.size, x.dtype):
        return all_gather(x, use.shard, use.dim)
    blocks = jnp.pad(x.reshape(-1), (0, -x.size % BLOCK)).reshape(-1, BLOCK)
    low, scales = rounding(blocks)
    values = lax.bitcast_convert_type(low, jnp.uint8).reshape(-1)[: x.size]
    bytes_of = lax.bitcast_convert_type(scales.astype(jnp.float32), jnp.uint8).reshape(-1)
    parts = all_gather(jnp.concatenate([values, bytes_of]), use.shard).reshape(n, -1)
    values = jnp.pad(parts[:, : x.size], ((0, 0), (0, -x.size % BLOCK))).reshape(n, *blocks.shape)
    scales = lax.bitcast_convert_type(parts[:, x.size :].reshape(n, -1, 1, _SCALE), jnp.float32)
    whole = lax.bitcast_convert_type(values, low.dtype).astype(x.dtype) * scales.astype(x.dtype)
    shards = whole.reshape(n, -1)[:, : x.size].reshape(n, *x.shape)
    return jnp.moveaxis(shards, 0, use.dim).reshape(*x.shape[: use.dim], -1, *x.shape[use.dim + 1 :])


def _rounds(elements: int, dtype: jax.typing.DTypeLike) -> bool:
    """Whether an array of so many elements travels in 8 bits."""
    return elements >= PAD_FROM and jnp.issubdtype(dtype, jnp.floating)


def _sends(rule: Rule, leaf: Uses) -> Iterator[Sent]:
    """The closed form: the rule's, whose all-gathers are of a byte for each number and 4 for each block of a shard."""
    times = iter(leaf.fetched)
    for one in rule.promise.sends(leaf):
        each = next(times) if one.kind == "all-gather" else None
        if each is None or not _rounds(each.elements, leaf.compute):
            yield one
            continue
        shard = each.elements // leaf.shards
        size = leaf.shards * (shard + _SCALE * -(-shard // BLOCK))
        yield dataclasses.replace(one, dtype=jnp.uint8, elements=each.count * size)


def _rounded(rule: Rule, rounding: Rounding) -> Rule:
    promise = dataclasses.replace(rule.promise, sends=functools.partial(_sends, rule))
    name = f"{rule.name}, weights gathered in {rounding.__name__}"
    return dataclasses.replace(rule, name=name, fetch=functools.partial(_fetch, rounding), promise=promise)


ROUNDED = {(rule, how.__name__): _rounded(rule, how) for rule in (ZERO3, ZERO3_ONCE) for how in (int8, fp8)}
_UNROUNDED = {rounded: rule for (rule, how), rounded in ROUNDED.items() if how == "fp8"}


def of_leaf(rule: Rule, leaf: Leaf, in_fp8: Collection[str]) -> Rule:
    """How a leaf travels under a rule: what ZeRO does not shard is replicated, as in plain data parallelism; and where
    weights of FP8 products are gathered in FP8, others (not `in_fp8`, by path) are gathered as they are.
    """
    if rule.sharded and leaf.dim is None:
        return DDP
    return rule if leaf.path in in_fp8 else _UNROUNDED.get(rule, rule)
