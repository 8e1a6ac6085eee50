"""Collectives with NCCL's semantics, over mesh axes inside `shard_map` or, by `on(mesh)`, on stacked global arrays.

Every function takes one device's buffer `x` and the `axes` that it runs over; n is the number of ranks along these.
All devices call it with the same shape, dtype and options, as NCCL demands ("Collective Operations" and "Point-to-point
communication" in the NCCL user guide). If NCCL leaves a buffer untouched (on ranks other than the root in `reduce` and
`gather`, or on a rank that receives nothing), the device holds zeros. Arrays are values, so nothing happens in place.
NCCL's in-place calls are those whose `x` the caller does not need any more, so that XLA may reuse its memory.

Dtypes: functions that only move data take any dtype. Those that reduce take NCCL's dtypes (int8, uint8, int32, uint32,
int64, uint64, float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2). They also take 16-bit integers, complex
numbers (no order: not "min" and "max") and bool ("min" is all, "max" is any; to count, cast). Sums have the array's
dtype and overflow as it does; "avg" of integers rounds towards zero.

Costs are the bytes that each device sends on a ring; S is the size in bytes of the named buffer. Over one rank a
collective adds nothing to the program. Linear collectives can be differentiated: the gradient is that of the sum, over
devices, of the values that each of them computes from its result.
"""

import math
from collections.abc import Callable, Sequence
from numbers import Integral

import jax
import jax.numpy as jnp
from jax import lax

from ..program.buffers import zeros_after
from .ranks import Axes as Axes
from .ranks import Ranks as Ranks
from .ranks import check_rank, collective, count, spanned
from .ranks import index as index
from .ranks import on as on
from .reductions import OPS as OPS
from .reductions import check_op, mean

# `reduce_scatter_as` cuts arrays of this many elements, 256 MB in float32, into pieces below this size.
_MAX_PIECE = 1 << 26
_MAX_PIECES = 16
_MIN_SHARD_OF_PIECE = 1 << 20  # elements that each device gets of a piece: 4 MB in float32
# Up to this number of pieces are unrolled, so that XLA overlaps them with compute. More pieces, as of an embedding, are
# sent in a loop, one after the other.
_MAX_UNROLLED = 4


@collective
def all_reduce(x: jax.Array, axes: Axes, op: str = "sum") -> jax.Array:
    """Reduce over all ranks, and return the result on each of them: [...] -> [...]. Sends 2(n-1)/n S.

    Args:
      x: this rank's values.
      axes: mesh axes, or `on(mesh)`.
      op: "sum", "prod", "min", "max" or "avg" (ncclRedOp_t). XLA's all-reduce has no "prod", which is a
        `reduce_scatter` and an `all_gather` instead; they send the same number of bytes.

    Raises:
      ValueError: no such axis or op, or the op is not defined for this dtype.
    """
    check_op(op, x.dtype)
    if not axes:
        return x
    if op == "prod":
        return _by_shards(x, axes, lambda flat: reduce_scatter(flat, axes, op="prod", pad=True))
    if op in ("min", "max"):
        return {"min": lax.pmin, "max": lax.pmax}[op](x, axes)
    return mean(lax.psum(x, axes), axes) if op == "avg" else lax.psum(x, axes)


@collective
def broadcast(x: jax.Array, axes: Axes, root: int = 0) -> jax.Array:
    """Return the root's `x` on every rank, bit by bit: [...] -> [...].

    On GPUs this is NCCL's broadcast, which sends S. On other devices it is a `scatter` and an `all_gather` (van de
    Geijn's algorithm for long messages), which send 2(n-1)/n S.

    Args:
      x: the buffer to send; read on the root only.
      axes: mesh axes, or `on(mesh)`.
      root: a rank from 0 to n - 1 (not a device's id).

    Raises:
      ValueError: no such axis or root.
    """
    root = check_rank(root, axes, "root")
    if not axes:
        return x
    by_nccl = lambda x: lax.pbroadcast(x, axes, root)
    by_shards = lambda x: _by_shards(x, axes, lambda flat: scatter(flat, axes, root, pad=True))
    # `platform_dependent` chooses when the program is lowered, by the mesh's devices and not by the default ones.
    move = jax.custom_vjp(lambda x: lax.platform_dependent(x, cuda=by_nccl, rocm=by_nccl, default=by_shards))
    # lax.pbroadcast's own transpose takes scalars only (jax 0.10 to 0.12).
    move.defvjp(lambda x: (move(x), None), lambda _, cotangent: (reduce(cotangent, axes, root),))
    return move(x)


@collective
def reduce(x: jax.Array, axes: Axes, root: int = 0, op: str = "sum") -> jax.Array:
    """Reduce over all ranks, and return the result on the root, zeros on the others: [...] -> [...].

    XLA has no reduction to one device, so this is an `all_reduce`: it sends 2(n-1)/n S, where NCCL's reduce sends S.

    Args:
      x: this rank's values.
      axes: mesh axes, or `on(mesh)`.
      root: the rank that gets the result.
      op: as in `all_reduce`.

    Raises:
      ValueError: no such axis, root or op, or the op is not defined for this dtype.
    """
    return _zero_unless_root(check_rank(root, axes, "root"), all_reduce(x, axes, op), axes)


@collective
def all_gather(x: jax.Array, axes: Axes, dim: int = 0) -> jax.Array:
    """Concatenate the `x` of all ranks, in order of rank, on each of them: [.., d, ..] -> [.., n d, ..].

    Sends (n-1)/n S, where S is the size of the result.

    Args:
      x: this rank's part.
      axes: mesh axes, or `on(mesh)`.
      dim: the dim along which the parts are concatenated.

    Raises:
      ValueError: no such axis or dim.
    """
    dim = _check_dim(dim, x.shape)
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes and x.shape[dim] else x  # XLA refuses a dim of size 0


@collective
def reduce_scatter(x: jax.Array, axes: Axes, dim: int = 0, op: str = "sum", pad: bool = False) -> jax.Array:
    """Reduce over all ranks, and return part i of the result on rank i: [.., n d, ..] -> [.., d, ..]. Sends (n-1)/n S.

    Args:
      x: this rank's values, all n parts.
      axes: mesh axes, or `on(mesh)`.
      dim: the dim that is cut into n equal parts.
      op: as in `all_reduce`. "prod", "min" and "max" are an `all_to_all` and a local reduction, with the same bytes.
      pad: pad `x` with zeros to the next multiple of n; the last parts then end in zeros.

    Raises:
      ValueError: no such axis, dim or op, the op is not defined for this dtype, or n does not divide the dim.
    """
    check_op(op, x.dtype)
    x, dim = _divisible(x, axes, dim, pad)
    if not axes or not x.shape[dim]:  # XLA refuses a dim of size 0
        return x
    if op in ("sum", "avg"):
        part = lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        return mean(part, axes) if op == "avg" else part
    # XLA's reduce-scatter only adds: exchange the parts, [.., n, d, ..], and reduce them locally.
    parts = _split(all_to_all(x, axes, dim), count(axes), dim)
    if op == "prod":
        return jnp.prod(parts, dim, dtype=x.dtype)
    return {"min": jnp.min, "max": jnp.max}[op](parts, dim)


@collective
def scatter(x: jax.Array, axes: Axes, root: int = 0, dim: int = 0, pad: bool = False) -> jax.Array:
    """Return part i of the root's `x` on rank i: [.., n d, ..] -> [.., d, ..].

    This is an `all_to_all` after which each rank selects the root's part. It sends (n-1)/n S, which the root must send
    in any algorithm.

    Args:
      x: the buffer to send; read on the root only.
      axes: mesh axes, or `on(mesh)`.
      root: the rank that sends.
      dim: the dim that is cut into n equal parts.
      pad: pad `x` with zeros to the next multiple of n.

    Raises:
      ValueError: no such axis, root or dim, or n does not divide the dim.
    """
    root = check_rank(root, axes, "root")
    x, dim = _divisible(x, axes, dim, pad)
    return lax.index_in_dim(_split(all_to_all(x, axes, dim), count(axes), dim), root, dim, keepdims=False)


@collective
def gather(x: jax.Array, axes: Axes, root: int = 0, dim: int = 0) -> jax.Array:
    """Concatenate the `x` of all ranks, in order of rank, on the root: [.., d, ..] -> [.., n d, ..]; zeros elsewhere.

    This is an `all_gather`. It sends (n-1)/n S, where S is the size of the result; the root must receive as much in any
    algorithm.

    Args:
      x: this rank's part.
      axes: mesh axes, or `on(mesh)`.
      root: the rank that gets the result.
      dim: the dim along which the parts are concatenated.

    Raises:
      ValueError: no such axis, root or dim.
    """
    return _zero_unless_root(check_rank(root, axes, "root"), all_gather(x, axes, dim), axes)


@collective
def all_to_all(x: jax.Array, axes: Axes, dim: int = 0, into: int | None = None, pad: bool = False) -> jax.Array:
    """Exchange parts: part j of rank i becomes part i of rank j, [.., n d, ..] -> [.., n d, ..]. Sends (n-1)/n S.

    Args:
      x: this rank's n parts.
      axes: mesh axes, or `on(mesh)`.
      dim: the dim that is cut into n equal parts.
      into: the dim along which the received parts are concatenated, by default `dim`, as in NCCL; with another dim,
        [.., n d, .., e, ..] -> [.., d, .., n e, ..].
      pad: pad `x` with zeros to the next multiple of n.

    Raises:
      ValueError: no such axis or dim, or n does not divide the dim.
    """
    x, dim = _divisible(x, axes, dim, pad)
    into = dim if into is None else _check_dim(into, x.shape)
    return lax.all_to_all(x, axes, dim, into, tiled=True) if axes else x


@collective
def send_recv(x: jax.Array, axes: Axes, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Return the `x` of each source on its destination, zeros on ranks that receive nothing: [...] -> [...]. Sends S.

    Args:
      x: the buffer to send.
      axes: mesh axes, or `on(mesh)`.
      pairs: (source, destination) ranks; a rank sends at most once, and receives at most once.

    Raises:
      ValueError: no such axis or rank, or a rank is the source, or the destination, of two pairs.
    """
    try:
        pairs = [(source, destination) for source, destination in pairs]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"pairs={pairs!r} is not a list of pairs; give (source, destination) ranks: [(0, 1)]"
        ) from error
    pairs = [
        (check_rank(source, axes, "source"), check_rank(destination, axes, "destination"))
        for source, destination in pairs
    ]
    # XLA's permute demands that no rank sends twice or receives twice.
    for role, ranks in zip(("source", "destination"), zip(*pairs, strict=True), strict=False):
        if repeated := [rank for i, rank in enumerate(ranks) if rank in ranks[:i]]:
            raise ValueError(f"rank {repeated[0]} is the {role} of two pairs; use it in one, or call send_recv twice")
    # The one rank can only send to itself.
    if not axes:
        return x if pairs else jnp.zeros_like(x)
    return lax.ppermute(x, axes, pairs)


@collective
def shift(x: jax.Array, axes: Axes, by: int) -> jax.Array:
    """Return on rank r the `x` of rank r - `by`, cyclically along some axes: [...] -> [...]. Sends S.

    Args:
      x: the buffer to send.
      axes: mesh axes, or `on(mesh)`.
      by: number of ranks; negative numbers shift the other way.

    Raises:
      ValueError: no such axis, or `by` is not a whole number.
    """
    if not isinstance(by, Integral) or isinstance(by, bool):
        raise ValueError(f"by={by!r} is not a number of ranks; use a whole number, such as 1 or -1")
    n = count(axes)
    return send_recv(x, axes, [(i, (i + int(by)) % n) for i in range(n)])


@collective
def barrier(x: jax.Array, axes: Axes) -> jax.Array:
    """Return `x`, on every rank only after all ranks have computed theirs. This is an all-reduce of one int32."""
    if not axes or not x.size:
        return x
    # Not by lax.optimization_barrier: the compiler drops it, and with it a collective whose result nobody reads. The
    # compiler does not know that a sum of zeros and ones is never negative.
    arrived = lax.psum((x[(0,) * x.ndim] == 0).astype(jnp.int32), axes)
    return jnp.where(arrived >= 0, x, jnp.zeros_like(x))


def reduce_scatter_as(x: jax.Array, axes: Sequence[str], dim: int, dtype: jnp.dtype) -> jax.Array:
    """Reduce-scatter in a wider dtype, a large `x` in pieces, so that all of it never exists in that dtype.

    A piece is an equal part of every rank's shard. The bytes are the same, in more and smaller collectives:

        x, n = 2 ranks, 3 pieces     | 0 1 2 | 0 1 2 |
        piece 1                      |   1   |   1   |     -> part 1 of each rank's shard

    Up to four pieces overlap with other compute, as a layer's do in its loop. More pieces, such as an embedding's, are
    sent one at a time, because memory has room for one.

    Args:
      x: this rank's values.
      axes: mesh axes inside `shard_map`.
      dim: the dim that is cut into n equal parts.
      dtype: dtype of the sum and of the result.

    Returns:
      This rank's part of the sum, [.., n d, ..] -> [.., d, ..].
    """
    axes = spanned(axes)
    n = count(axes)
    num_pieces = scatter_pieces(x.shape, x.dtype, dim, n, dtype)
    if num_pieces == 1:
        return reduce_scatter(x.astype(dtype), axes, dim)
    part = x.shape[dim] // n // num_pieces
    split = x.reshape(*x.shape[:dim], n, num_pieces, part, *x.shape[dim + 1 :])  # the dim is rank x piece x part
    shard_shape = (*x.shape[:dim], num_pieces, part, *x.shape[dim + 1 :])

    def scatter_piece(i: int | jax.Array, shard: jax.Array) -> jax.Array:
        # [.., n, part, ..] in the wider dtype, then [.., 1, part, ..] after the collective.
        piece = lax.dynamic_index_in_dim(split, i, axis=dim + 1, keepdims=False).astype(dtype)
        shard_of_piece = lax.squeeze(reduce_scatter(piece, axes, dim), [dim])
        return lax.dynamic_update_index_in_dim(shard, shard_of_piece, i, axis=dim)

    # Zeros that depend on x, so that the compiler does not allocate them long before. An uninitialized buffer depends
    # on nothing: with it, a ZeRO-3 step of a Llama needs over 5% more temporaries (`tests/step/test_gpu.py`).
    shard = zeros_after(x, shard_shape, dtype)
    if num_pieces <= _MAX_UNROLLED:
        for i in range(num_pieces):
            shard = scatter_piece(i, shard)
    else:
        shard = lax.fori_loop(0, num_pieces, scatter_piece, shard)
    return shard.reshape(*x.shape[:dim], num_pieces * part, *x.shape[dim + 1 :])


def scatter_pieces(shape: Sequence[int], dtype: jnp.dtype, dim: int, n: int, wider: jnp.dtype) -> int:
    """Return the number of pieces in which `reduce_scatter_as` scatters an array over n devices in a wider dtype.

    This is the smallest number that keeps a piece small, if it is at most four; else the largest that leaves every
    device enough of each piece.

    Over many devices a ring waits for its steps rather than for bytes. With 3.4 us per step over NVLink (NCCL's
    tuning.cc) at 371 GB/s, a device should get 1.3 MB of a piece, or the steps take longer than the bytes.
    """
    size = math.prod(shape)
    if n == 1 or jnp.dtype(dtype) == jnp.dtype(wider) or size < _MAX_PIECE:
        return 1
    max_pieces = min(_MAX_PIECES, size // n // _MIN_SHARD_OF_PIECE)
    divisors = [pieces for pieces in range(1, max_pieces + 1) if shape[dim] // n % pieces == 0]
    # If no divisor makes the pieces small, the default leads to the largest divisor in the next line.
    smallest = next((pieces for pieces in divisors if size // pieces <= _MAX_PIECE), _MAX_PIECES)
    return smallest if smallest <= _MAX_UNROLLED else divisors[-1] if divisors else 1


def _by_shards(x: jax.Array, axes: Axes, shard: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Compute a result of the shape of `x` by a function that returns each rank's shard of it, and an all-gather.

    `shard` takes `x` flattened, and returns the rank's shard of the flat result, which may be padded.
    """
    return all_gather(shard(x.reshape(-1)), axes)[: x.size].reshape(x.shape)


def _zero_unless_root(root: int, x: jax.Array, axes: Axes) -> jax.Array:
    """Return `x` on the root, zeros on other ranks."""
    # A select rather than a product with 0, which would keep NaN.
    return jnp.where(index(axes) == root, x, jnp.zeros_like(x)) if axes else x


def _split(x: jax.Array, n: int, dim: int) -> jax.Array:
    """Reshape [.., n d, ..] to [.., n, d, ..]."""
    return x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])


def _divisible(x: jax.Array, axes: Axes, dim: int, pad: bool) -> tuple[jax.Array, int]:
    """Return `x`, padded if n does not divide `dim`, and the dim counted from 0. Raises ValueError without `pad`."""
    dim, n = _check_dim(dim, x.shape), count(axes)
    missing = -x.shape[dim] % n
    if missing and not pad:
        raise ValueError(
            f"dim {dim} of x {list(x.shape)} does not divide into {n} parts; make it {x.shape[dim] + missing}, or pad "
            "it with zeros: pad=True"
        )
    return (jnp.pad(x, [(0, missing if i == dim else 0) for i in range(x.ndim)]) if missing else x), dim


def _check_dim(dim: int, shape: Sequence[int]) -> int:
    """Return a dim counted from 0. Raises ValueError if the shape has no such dim."""
    if not isinstance(dim, Integral) or not -len(shape) <= dim < len(shape):
        hint = f"use 0 to {len(shape) - 1}" if shape else "give a scalar as x[None]"
        raise ValueError(f"x {list(shape)} has no dim {dim!r}; {hint}")
    return dim % len(shape)
