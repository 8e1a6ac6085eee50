"""Weights and gradients that travel in 8 bits: qwZ and qgZ of ZeRO++ (Wang et al. 2023, arXiv:2306.10209, section 3).

For P parameters, each device sends

    weights      ZeRO-3's all-gathers of P (1 + 4/256) bytes, instead of 2 P in bfloat16 or 4 P in float32
    gradients    an all-to-all of P (1 + 4/256) bytes and a sum on arrival, instead of a reduce-scatter of 4 P;
                 for an all-reduce, the same and an all-gather of the quantised sums
    elsewhere    the same as the rule without 8 bits: masters, compute and accumulation

    gradient [n ranks, s]  -> quantise blocks -> all-to-all -> [n, s + scales] -> dequantise -> sum over n -> shard [s]

A device cuts an array that it sends into blocks of 256 numbers, in the order of memory; the last block may be shorter.
Each block is quantised to 8 bits with its own scale, a float32 that follows the numbers in the same buffer. So each
collective of the rule remains one collective of bytes. Every rank computes with the quantised values, also the rank
that owns them. A gradient is quantised once on its way to the sum, whatever the number of ranks. A ring of sums would
quantise it at every hop (section 3.3). Arrays of fewer than 16,384 elements, norms and biases, travel unquantised.

    int8    round(127 x / amax), with amax the largest magnitude of the block: errors up to amax / 254
    fp8     float8_e4m3fn times a power of two. FP8 products (`numerics/fp8/`) quantise their weights in the same way.
            They get the same numbers as without this rule, except for numbers 2^14 times smaller than amax.
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
_SCALE_BYTES = 4
_MIN_AMAX = 2.0**-100  # floor of a block's largest magnitude, so that its scale and the inverse are normal numbers
_QUANTISED_REDUCTIONS = {"reduce-scatter": ("all-to-all",), "all-reduce": ("all-to-all", "all-gather")}
_HPZ_GATHER = "all-gather", ("data",)  # kind and axes of hpZ's gather of second shards
Rounding = Callable[[jax.Array], tuple[jax.Array, jax.Array]]

# ----------------------------------------------------------------------------------------------------------------------
# Quantisation.


def int8(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantise blocks symmetrically, as ZeRO++ does.

    Args:
      blocks: [n, BLOCK], floating-point.

    Returns:
      int8 [n, BLOCK] and float32 scales [n, 1], whose product approximates the blocks. A NaN or an infinity makes its
      block NaN.
    """
    amax = jnp.maximum(jnp.abs(blocks).max(1, keepdims=True).astype(jnp.float32), _MIN_AMAX)
    return jnp.round(blocks.astype(jnp.float32) * (127 / amax)).astype(jnp.int8), amax * (1 / 127)


def fp8(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantise blocks [n, BLOCK] to float8_e4m3fn, with scales [n, 1] that are powers of two."""
    return quantised(blocks, (1,))


def _encode(rounding: Rounding, rows: jax.Array) -> jax.Array:
    """Quantise rows [n, s] to bytes [n, s + 4 ceil(s / BLOCK)]: the numbers, then the scales of their blocks."""
    n, size = rows.shape
    quantised_blocks, scales = rounding(jnp.pad(rows, ((0, 0), (0, -size % BLOCK))).reshape(-1, BLOCK))
    # The padding of the last block is not sent.
    values = lax.bitcast_convert_type(quantised_blocks, jnp.uint8).reshape(n, -1)[:, :size]
    return jnp.concatenate([values, lax.bitcast_convert_type(scales.astype(jnp.float32), jnp.uint8).reshape(n, -1)], 1)


def _decode(rounding: Rounding, encoded: jax.Array, size: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return the rows [n, size] in `dtype`; inverse of `_encode`."""
    values = jnp.pad(encoded[:, :size], ((0, 0), (0, -size % BLOCK))).reshape(len(encoded), -1, BLOCK)
    scales = lax.bitcast_convert_type(encoded[:, size:].reshape(len(encoded), -1, 1, _SCALE_BYTES), jnp.float32)
    quantised_dtype = jnp.int8 if rounding is int8 else F8
    blocks = lax.bitcast_convert_type(values, quantised_dtype).astype(dtype) * scales.astype(dtype)
    return blocks.reshape(len(encoded), -1)[:, :size]


def _travels_quantised(num_elements: int, dtype: jax.typing.DTypeLike) -> bool:
    """Return whether an array travels in 8 bits; for a small one, the scales and the extra work do not pay."""
    return num_elements >= PAD_FROM and jnp.issubdtype(dtype, jnp.floating)


# ----------------------------------------------------------------------------------------------------------------------
# Parameters and gradients, inside `shard_map`.


def _gather_params(rounding: Rounding, param_shard: jax.Array, use: Use) -> jax.Array:
    """Return the whole leaf, or one layer of it, from quantised shards; all-gathers bytes over `use.shard`."""
    n = count(use.shard)
    if n == 1 or not _travels_quantised(n * param_shard.size, param_shard.dtype):
        return all_gather(param_shard, use.shard, use.dim)
    encoded_shards = all_gather(_encode(rounding, param_shard.reshape(1, -1)), use.shard)
    shape, dim = param_shard.shape, use.dim
    shards = _decode(rounding, encoded_shards, param_shard.size, param_shard.dtype).reshape(n, *shape)
    # Blocks cut the shards in the order of memory, so that the ranks' shards are joined only after decoding.
    return jnp.moveaxis(shards, 0, dim).reshape(*shape[:dim], -1, *shape[dim + 1 :])


def _reduce_scatter(grad: jax.Array, use: Use) -> jax.Array:
    """Reduce-scatter a gradient over `use.shard`, as an all-to-all of quantised parts and their sum."""
    n, dim = count(use.shard), use.dim
    if n == 1 or not _travels_quantised(grad.size, use.dtype):
        return reduce_scatter_as(grad, use.shard, dim, use.dtype)
    shape = grad.shape
    parts = jnp.moveaxis(grad.reshape(*shape[:dim], n, shape[dim] // n, *shape[dim + 1 :]), dim, 0)  # [n, *shard]
    return _sum_rows(parts.reshape(n, -1), use.shard, use.dtype).reshape(parts.shape[1:])


def _all_reduce(grad: jax.Array, use: Use) -> jax.Array:
    """All-reduce over `use.rest`: each rank sums a part, quantises it again, and all gather these sums."""
    n = count(use.rest)
    if n == 1 or not _travels_quantised(grad.size, use.dtype):
        return all_reduce(grad.astype(use.dtype), use.rest)
    part = _sum_rows(jnp.pad(grad.reshape(-1), (0, -grad.size % n)).reshape(n, -1), use.rest, use.dtype)
    parts = _decode(int8, all_gather(_encode(int8, part[None]), use.rest), part.size, use.dtype)
    return parts.reshape(-1)[: grad.size].reshape(grad.shape)


def _sum_rows(rows: jax.Array, axes: tuple[str, ...], dtype: jnp.dtype) -> jax.Array:
    """Return on rank j the sum [s] of all ranks' rows j; each rank has rows [n, s] and quantises its own."""
    return _decode(int8, all_to_all(_encode(int8, rows), axes), rows.shape[1], dtype).sum(0)


def _give_grad(rule: Rule, grad: jax.Array, use: Use) -> jax.Array:
    """Return what one use adds to the accumulator, as `rule` does, but with quantised reductions."""
    if not (rule.at_once or use.last):
        return grad.astype(use.dtype)
    # Under ddp `use.shard` is empty, and the reduce-scatter only casts.
    grad_shard = _reduce_scatter(grad, use)
    return _reduce_over_replicas(grad_shard, use) if use.last else grad_shard


def _finish_grad(rule: Rule, accumulated: jax.Array, use: Use) -> jax.Array:
    """Return the gradient of the update, as `rule` does, but with quantised reductions."""
    if use.last:
        return accumulated
    return _reduce_over_replicas(accumulated if rule.at_once else _reduce_scatter(accumulated, use), use)


def _reduce_over_replicas(grad_shard: jax.Array, use: Use) -> jax.Array:
    """Sum a shard over the replicas along `use.rest`; with hpZ, scatter it over `use.second` first."""
    return _all_reduce(_reduce_scatter(grad_shard, dataclasses.replace(use, shard=use.second)), use)


# ----------------------------------------------------------------------------------------------------------------------
# Closed forms.


def _encoded_bytes(num_elements: int) -> int:
    """Return the bytes of this many numbers and the scales of their blocks."""
    return num_elements + _SCALE_BYTES * -(-num_elements // BLOCK)


def _quantised_sends(rule: Rule, kinds: Mapping[str, tuple[str, ...]], leaf: Uses) -> Iterator[Sent]:
    """Yield the closed form of `rule` with quantised collectives.

    Each collective whose kind is a key of `kinds` is replaced by the kinds named there. They send one byte for each
    number, and 4 for each block of a rank's part. hpZ gathers its second shards unquantised.
    """
    for sent in rule.promise.sends(leaf):
        n, elements_per_call = math.prod(leaf.sizes[axis] for axis in sent.axes), sent.elements // max(1, sent.count)
        travels_quantised = _travels_quantised(elements_per_call, sent.dtype) and (sent.kind, sent.axes) != _HPZ_GATHER
        if n == 1 or sent.kind not in kinds or not travels_quantised:
            yield sent
        else:
            part_bytes = _encoded_bytes(-(-elements_per_call // n))
            for kind in kinds[sent.kind]:
                yield Sent(kind, sent.axes, jnp.uint8, sent.count, sent.count * n * part_bytes)


def _quantised_reductions(rule: Rule, leaf: Uses) -> Iterator[Sent]:
    """Yield the closed form of `rule` with quantised reductions."""
    grads = tuple(dataclasses.replace(grad, pieces=1) for grad in leaf.given)  # an all-to-all sends one piece
    return _quantised_sends(rule, _QUANTISED_REDUCTIONS, dataclasses.replace(leaf, given=grads))


# ----------------------------------------------------------------------------------------------------------------------
# Rules.


def _with_quantised_weights(rule: Rule, rounding: Rounding) -> Rule:
    """Return the rule that gathers weights in 8 bits and is `rule` otherwise (qwZ)."""
    sends = functools.partial(_quantised_sends, rule, {"all-gather": ("all-gather",)})
    return dataclasses.replace(
        rule,
        name=f"{rule.name}, weights gathered in {rounding.__name__}",
        fetch=functools.partial(_gather_params, rounding),
        promise=dataclasses.replace(rule.promise, sends=sends),
    )


def _with_quantised_gradients(rule: Rule) -> Rule:
    """Return the rule that reduces gradients in int8 and is `rule` otherwise (qgZ)."""
    return dataclasses.replace(
        rule,
        name=f"{rule.name}, gradients reduced in int8",
        give=functools.partial(_give_grad, rule),
        finish=functools.partial(_finish_grad, rule),
        promise=dataclasses.replace(rule.promise, sends=functools.partial(_quantised_reductions, rule)),
    )


# (rule, name of the rounding) -> the rule that also gathers weights in 8 bits.
ROUNDED = {
    (rule, rounding.__name__): _with_quantised_weights(rule, rounding)
    for rule in (ZERO3, ZERO3_ONCE)
    for rounding in (int8, fp8)
}
# rule -> the rule that also reduces gradients in int8.
REDUCED = {rule: _with_quantised_gradients(rule) for rule in (DDP, ZERO1, ZERO2, ZERO3, ZERO3_ONCE, *ROUNDED.values())}
# rule that gathers weights in FP8 -> the same rule that gathers them unquantised.
_WITHOUT_FP8 = {rounded: rule for (rule, rounding), rounded in ROUNDED.items() if rounding == "fp8"}
_WITHOUT_FP8 |= {REDUCED[rounded]: REDUCED[rule] for rounded, rule in _WITHOUT_FP8.items()}


def of_leaf(rule: Rule, leaf: Leaf, in_fp8: Collection[str]) -> Rule:
    """Return the rule that one leaf follows under the rule of a strategy.

    A leaf that ZeRO does not shard is replicated, and follows ddp. If weights are gathered in FP8, leaves without FP8
    products are gathered unquantised.

    Args:
      in_fp8: the paths of the leaves whose products are in FP8.
    """
    if rule.sharded and leaf.dim is None:
        return REDUCED[DDP] if rule in REDUCED.values() else DDP
    return rule if leaf.path in in_fp8 else _WITHOUT_FP8.get(rule, rule)
