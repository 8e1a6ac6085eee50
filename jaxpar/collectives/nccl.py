"""Collectives with NCCL's semantics, over mesh axes inside `shard_map` or, by `on(mesh)`, on stacked global arrays.

Every function takes one device's buffer `x` and the `axes` that it runs over; n is the number of ranks along these.
All devices call it with the same shape, dtype and options, as NCCL demands ("Collective Operations" and "Point-to-point
communication" in the NCCL user guide). Where NCCL leaves a buffer untouched (any but the root's in `reduce` and
`gather`, or one that nothing is sent to), the device holds zeros. Arrays are values, so nothing happens in place; what
NCCL calls in place is an `x` that the caller no longer needs, whose memory XLA may use.

Dtypes: what only moves data takes any dtype. What reduces takes NCCL's (int8, uint8, int32, uint32, int64, uint64,
float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2), and 16-bit integers, complex numbers (no order: not
"min" and "max") and bool ("min" is all, "max" is any; to count, cast). Sums are made in the array's dtype and
overflow as it does; "avg" of integers rounds towards zero.

Costs are bytes that each device sends on a ring, S being the bytes of the buffer named. Over one rank no collective
leaves a trace. Linear ones can be differentiated: the gradient is that of the sum, over devices, of what each of them
computes from its result.
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

_IN_PIECES = 1 << 26  # elements: 256 MB in float32
_PIECES = 16
_OF_A_RANK = 1 << 20  # elements of a piece that one device gets: 4 MB in float32
_AT_ONCE = 4  # pieces that XLA may send beside what else is computed; more, as of an embedding, one after the other


@collective
def all_reduce(x: jax.Array, axes: Axes, op: str = "sum") -> jax.Array:
    """The reduction over all ranks, on each of them: [...] -> [...]. Sends 2(n-1)/n S.

    Args:
      x: this rank's values.
      axes: mesh axes, or `on(mesh)`.
      op: "sum", "prod", "min", "max" or "avg" (ncclRedOp_t). "prod", which XLA's all-reduce lacks, is a
        `reduce_scatter` and an `all_gather`: the same bytes, in two.

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
    """The root's `x` on every rank, with no arithmetic: [...] -> [...].

    On GPUs, NCCL's broadcast: sends S. Elsewhere a `scatter` and an `all_gather` (van de Geijn's, for long messages):
    2(n-1)/n S.

    Args:
      x: what is sent; read on the root only.
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
    move = jax.custom_vjp(lambda x: lax.platform_dependent(x, cuda=by_nccl, rocm=by_nccl, default=by_shards))
    # lax.pbroadcast's own transpose takes scalars only (jax 0.10 to 0.12).
    move.defvjp(lambda x: (move(x), None), lambda _, cotangent: (reduce(cotangent, axes, root),))
    return move(x)


@collective
def reduce(x: jax.Array, axes: Axes, root: int = 0, op: str = "sum") -> jax.Array:
    """The reduction over all ranks on the root, zeros elsewhere: [...] -> [...].

    An `all_reduce`, since XLA has no reduction to one device: sends 2(n-1)/n S, where NCCL's sends S.

    Args:
      x: this rank's values.
      axes: mesh axes, or `on(mesh)`.
      root: the rank that gets the result.
      op: as in `all_reduce`.

    Raises:
      ValueError: no such axis, root or op, or the op is not defined for this dtype.
    """
    return _only(check_rank(root, axes, "root"), all_reduce(x, axes, op), axes)


@collective
def all_gather(x: jax.Array, axes: Axes, dim: int = 0) -> jax.Array:
    """Everybody's `x` in order of rank, on each rank: [.., d, ..] -> [.., n d, ..]. Sends (n-1)/n of the result's S.

    Args:
      x: this rank's part.
      axes: mesh axes, or `on(mesh)`.
      dim: the dim along which parts follow each other.

    Raises:
      ValueError: no such axis or dim.
    """
    dim = _check_dim(dim, x.shape)
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes and x.shape[dim] else x  # XLA refuses a dim of size 0


@collective
def reduce_scatter(x: jax.Array, axes: Axes, dim: int = 0, op: str = "sum", pad: bool = False) -> jax.Array:
    """Part i of the reduction on rank i: [.., n d, ..] -> [.., d, ..]. Sends (n-1)/n S.

    Args:
      x: this rank's values, the whole of them.
      axes: mesh axes, or `on(mesh)`.
      dim: the dim that is cut into n equal parts.
      op: as in `all_reduce`. "prod", "min", "max" are an `all_to_all`, reduced where it arrives: the same bytes.
      pad: whether zeros may follow `x`, up to the next multiple of n; the last parts then end in zeros.

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
    parts = _split(all_to_all(x, axes, dim), count(axes), dim)
    if op == "prod":
        return jnp.prod(parts, dim, dtype=x.dtype)
    return {"min": jnp.min, "max": jnp.max}[op](parts, dim)


@collective
def scatter(x: jax.Array, axes: Axes, root: int = 0, dim: int = 0, pad: bool = False) -> jax.Array:
    """Part i of the root's `x` on rank i: [.., n d, ..] -> [.., d, ..].

    An `all_to_all` that keeps the root's parts alone: sends (n-1)/n S, as the root must in any case.

    Args:
      x: what is sent; read on the root only.
      axes: mesh axes, or `on(mesh)`.
      root: the rank that sends.
      dim: the dim that is cut into n equal parts.
      pad: whether zeros may follow `x`, up to the next multiple of n.

    Raises:
      ValueError: no such axis, root or dim, or n does not divide the dim.
    """
    root = check_rank(root, axes, "root")
    x, dim = _divisible(x, axes, dim, pad)
    return lax.index_in_dim(_split(all_to_all(x, axes, dim), count(axes), dim), root, dim, keepdims=False)


@collective
def gather(x: jax.Array, axes: Axes, root: int = 0, dim: int = 0) -> jax.Array:
    """Everybody's `x` in order of rank on the root, zeros elsewhere: [.., d, ..] -> [.., n d, ..].

    An `all_gather`: sends (n-1)/n of the result's S, as much as the root must receive in any case.

    Args:
      x: this rank's part.
      axes: mesh axes, or `on(mesh)`.
      root: the rank that gets the result.
      dim: the dim along which parts follow each other.

    Raises:
      ValueError: no such axis, root or dim.
    """
    return _only(check_rank(root, axes, "root"), all_gather(x, axes, dim), axes)


@collective
def all_to_all(x: jax.Array, axes: Axes, dim: int = 0, into: int | None = None, pad: bool = False) -> jax.Array:
    """Part j of rank i's `x` becomes part i of rank j's result: [.., n d, ..] -> [.., n d, ..]. Sends (n-1)/n S.

    Args:
      x: this rank's n parts.
      axes: mesh axes, or `on(mesh)`.
      dim: the dim that is cut into n equal parts.
      into: the dim along which parts follow each other in the result, `dim` if None (NCCL's); with another one,
        [.., n d, .., e, ..] -> [.., d, .., n e, ..].
      pad: whether zeros may follow `x`, up to the next multiple of n.

    Raises:
      ValueError: no such axis or dim, or n does not divide the dim.
    """
    x, dim = _divisible(x, axes, dim, pad)
    into = dim if into is None else _check_dim(into, x.shape)
    return lax.all_to_all(x, axes, dim, into, tiled=True) if axes else x


@collective
def send_recv(x: jax.Array, axes: Axes, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """`x` of each source on its destination, zeros on ranks that receive nothing: [...] -> [...]. Sends S.

    Args:
      x: what is sent.
      axes: mesh axes, or `on(mesh)`.
      pairs: (source, destination) ranks; a rank sends once at most, and receives once at most.

    Raises:
      ValueError: no such axis or rank, or a rank is the source, or the destination, of two pairs.
    """
    try:
        pairs = [(a, b) for a, b in pairs]
    except (TypeError, ValueError) as error:
        raise ValueError(f"pairs={pairs!r} is no list of pairs; give (source, destination) ranks: [(0, 1)]") from error
    pairs = [(check_rank(a, axes, "source"), check_rank(b, axes, "destination")) for a, b in pairs]
    for name, ranks in zip(("source", "destination"), zip(*pairs, strict=True), strict=False):
        if again := [rank for i, rank in enumerate(ranks) if rank in ranks[:i]]:
            raise ValueError(f"rank {again[0]} is the {name} of two pairs; let it be so once, or call send_recv twice")
    if not axes:
        return x if pairs else jnp.zeros_like(x)
    return lax.ppermute(x, axes, pairs)


@collective
def shift(x: jax.Array, axes: Axes, by: int) -> jax.Array:
    """The value of the rank `by` places before along some axes, around their end: [...] -> [...]. Sends S.

    Args:
      x: what is sent.
      axes: mesh axes, or `on(mesh)`.
      by: places; negative ones lead the other way.

    Raises:
      ValueError: no such axis, or `by` is no whole number.
    """
    if not isinstance(by, Integral) or isinstance(by, bool):
        raise ValueError(f"by={by!r} is no number of places; use a whole number, such as 1 or -1")
    n = count(axes)
    return send_recv(x, axes, [(i, (i + int(by)) % n) for i in range(n)])


@collective
def barrier(x: jax.Array, axes: Axes) -> jax.Array:
    """`x` itself, which no rank has before all of them have theirs. An all-reduce of one int32."""
    if not axes or not x.size:
        return x
    # Not by lax.optimization_barrier: the compiler drops it, and with it a collective whose result nobody reads.
    arrived = lax.psum((x[(0,) * x.ndim] == 0).astype(jnp.int32), axes)
    return jnp.where(arrived >= 0, x, jnp.zeros_like(x))


def reduce_scatter_as(x: jax.Array, axes: Sequence[str], dim: int, dtype: jnp.dtype) -> jax.Array:
    """`reduce_scatter` in a wider dtype; a large `x` in pieces, so that the whole of it never exists in that dtype.

    The pieces are equal parts of every shard: the same bytes in more, smaller collectives. Up to four run beside
    whatever else is computed, as a layer's do in its loop; of more, as an embedding's, only one at a time has room.
    """
    axes = spanned(axes)
    n = count(axes)
    pieces = scatter_pieces(x.shape, x.dtype, dim, n, dtype)
    if pieces == 1:
        return reduce_scatter(x.astype(dtype), axes, dim)
    part = x.shape[dim] // n // pieces
    split = x.reshape(*x.shape[:dim], n, pieces, part, *x.shape[dim + 1 :])
    shard = (*x.shape[:dim], pieces, part, *x.shape[dim + 1 :])

    def scatter(i: int | jax.Array, shards: jax.Array) -> jax.Array:
        piece = lax.dynamic_index_in_dim(split, i, axis=dim + 1, keepdims=False).astype(dtype)
        piece = lax.squeeze(reduce_scatter(piece, axes, dim), [dim])
        return lax.dynamic_update_index_in_dim(shards, piece, i, axis=dim)

    shards = zeros_after(x, shard, dtype)
    if pieces <= _AT_ONCE:
        for i in range(pieces):
            shards = scatter(i, shards)
    else:
        shards = lax.fori_loop(0, pieces, scatter, shards)
    return shards.reshape(*x.shape[:dim], pieces * part, *x.shape[dim + 1 :])


def scatter_pieces(shape: Sequence[int], dtype: jnp.dtype, dim: int, n: int, wider: jnp.dtype) -> int:
    """The number of pieces in which `reduce_scatter_as` scatters an array over n devices: a few that keep a piece
    small, else as many as leave every device enough of each.

    Over many devices a ring waits for its steps rather than for bytes: of 3.4 us a step over NVLink (NCCL's tuning.cc)
    at 371 GB/s a device should have 1.3 MB of a piece, or the piece takes longer than its bytes do.
    """
    size = math.prod(shape)
    if n == 1 or jnp.dtype(dtype) == jnp.dtype(wider) or size < _IN_PIECES:
        return 1
    most = min(_PIECES, size // n // _OF_A_RANK)
    able = [p for p in range(1, most + 1) if shape[dim] // n % p == 0]
    few = next((p for p in able if size // p <= _IN_PIECES), _PIECES)
    return few if few <= _AT_ONCE else able[-1] if able else 1


def _by_shards(x: jax.Array, axes: Axes, shard: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """What everybody should hold, from a function of flat arrays that gives each rank its part of it."""
    return all_gather(shard(x.reshape(-1)), axes)[: x.size].reshape(x.shape)


def _only(root: int, x: jax.Array, axes: Axes) -> jax.Array:
    return jnp.where(index(axes) == root, x, jnp.zeros_like(x)) if axes else x


def _split(x: jax.Array, n: int, dim: int) -> jax.Array:
    """[.., n d, ..] -> [.., n, d, ..]."""
    return x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])


def _divisible(x: jax.Array, axes: Axes, dim: int, pad: bool) -> tuple[jax.Array, int]:
    dim, n = _check_dim(dim, x.shape), count(axes)
    missing = -x.shape[dim] % n
    if missing and not pad:
        raise ValueError(
            f"dim {dim} of x {list(x.shape)} does not divide into {n} parts; make it {x.shape[dim] + missing}, or let "
            "zeros follow it: pad=True"
        )
    return (jnp.pad(x, [(0, missing if i == dim else 0) for i in range(x.ndim)]) if missing else x), dim


def _check_dim(dim: int, shape: Sequence[int]) -> int:
    if not isinstance(dim, Integral) or not -len(shape) <= dim < len(shape):
        hint = f"use 0 to {len(shape) - 1}" if shape else "give a scalar as x[None]"
        raise ValueError(f"x {list(shape)} has no dim {dim!r}; {hint}")
    return dim % len(shape)
