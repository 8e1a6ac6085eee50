"""How fast collectives are, in nccl-tests' terms: algbw and busbw over sizes, each result checked.

algbw is S / t, with S the bytes of the larger of a rank's two buffers (as nccl-tests count: the whole of what is
gathered or scattered). busbw is algbw times the bytes that the busiest link must carry, per byte of S; it can be set
beside the hardware's peak, whatever the number of ranks n (nccl-tests, doc/PERFORMANCE.md; scatter, gather and sendrecv
from their sources).

What is timed is one compiled program of several collectives in a row, each waiting for the one before, from its
launch to the moment when all devices are done: the median program, divided by their number.
"""

import functools
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import collectives

Op = Literal[
    *("all_reduce", "ring_all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"),
    *("scatter", "gather", "all_to_all", "send_recv"),
]
Dtype = Literal["int8", "uint8", "int32", "uint32", "float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"]


@dataclass(frozen=True)
class Measurement:
    """One measurement.

    Attributes:
      op: the collective.
      bytes: S, rounded down to whole elements on every rank.
      seconds: one collective.
      algbw, busbw: in 1e9 bytes/s.
      wrong: elements, over all ranks, that are not what they should be.
      timed: collectives that were timed, over all programs.
    """

    op: str
    bytes: int
    seconds: float
    algbw: float
    busbw: float
    wrong: int
    timed: int


def bytes_of(text: str) -> int:
    """A size in bytes.

    >>> bytes_of("1k"), bytes_of("256MB"), bytes_of("100")
    (1024, 268435456, 100)
    """
    found = re.fullmatch(r"(\d+) ?([kMG]?)i?B?", text, re.IGNORECASE)
    if found is None or not int(found[1]):
        raise ValueError(f"{text!r} is no size; use for example 1000, 64k, 256M or 1G")
    return int(found[1]) * 1024 ** " KMG".index(found[2].upper() or " ")


def busbw_factor(op: str, n: int) -> float:
    """busbw / algbw of a collective over n ranks.

    >>> busbw_factor("all_reduce", 8), busbw_factor("all_gather", 8), busbw_factor("broadcast", 8)
    (1.75, 0.875, 1.0)
    """
    if op in ("all_reduce", "ring_all_reduce"):
        return 2 * (n - 1) / n
    return 1.0 if op in ("broadcast", "reduce", "send_recv") else (n - 1) / n


@dataclass(frozen=True)
class Effort:
    """How long to measure: collectives in a timed program and timed programs, at most; collectives before these; and
    seconds of the timed programs.
    """

    iterations: int
    repeats: int
    warmup: int
    seconds: float


def _value(rank: Any, position: Any, dtype: str) -> jax.Array:
    """What a rank holds at a position: 0 or 1, so that sums are exact in every dtype on up to 8 ranks."""
    mixed = (jnp.uint32(2654435761) * (jnp.uint32(position) + jnp.uint32(40503) * jnp.uint32(rank))) >> 28
    return (mixed < 5).astype(dtype)


def _expected(op: str, rank: Any, n: int, at: jax.Array, dtype: str) -> jax.Array:
    """A collective's result at the positions `at` [result], computed without it. Root 0, sums, right neighbours."""
    value = functools.partial(_value, dtype=dtype)
    total = lambda at: lax.fori_loop(0, n, lambda r, sums: sums + value(r, at), jnp.zeros(at.shape, dtype))
    part = at.size // n
    gathered = lambda: value(at // part, at % part)
    match op:
        case "all_reduce" | "ring_all_reduce":
            return total(at)
        case "reduce":
            return jnp.where(rank == 0, total(at), jnp.zeros(at.shape, dtype))
        case "reduce_scatter":
            return total(rank * at.size + at)
        case "broadcast":
            return value(0, at)
        case "scatter":
            return value(0, rank * at.size + at)
        case "all_gather":
            return gathered()
        case "gather":
            return jnp.where(rank == 0, gathered(), jnp.zeros(at.shape, dtype))
        case "all_to_all":
            return value(at // part, rank * part + at % part)
    return value((rank - 1) % n, at)  # send_recv


def measure(op: str, size: int, dtype: str, mesh: Mesh, effort: Effort, axis: str | None = None) -> Measurement:
    """Times and checks a collective of `size` bytes: over a mesh, or by all groups along its `axis` at once."""
    if axis is None:
        (axis,) = mesh.axis_names
    every = tuple(mesh.axis_names)
    n, width = mesh.shape[axis], jnp.dtype(dtype).itemsize
    whole = max(size // width // n, 1) * n
    count = whole // n if op in ("all_gather", "gather") else whole
    collective: Callable[..., jax.Array] = getattr(collectives, op)
    if op == "send_recv":
        collective = functools.partial(collective, pairs=[(i, (i + 1) % n) for i in range(n)])

    def chained(x: jax.Array, times: jax.Array) -> jax.Array:
        def again(_: Any, x: jax.Array) -> jax.Array:
            y = collective(x, axis)
            # Of another shape: no value changes, since none is negative; but the compiler cannot know, and must wait.
            return y if y.shape == x.shape else x.at[0].set(jnp.minimum(x[0], x[0] + y[0]))

        return collective(lax.fori_loop(1, times, again, x), axis)

    def wrong(y: jax.Array) -> jax.Array:
        rank = lax.axis_index(axis)
        off = y != _expected(op, rank, n, lax.iota(jnp.int32, y.size), dtype)
        return lax.psum(off.sum(dtype=jnp.int32), every)

    over = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    fill = lambda: _value(lax.axis_index(axis), lax.iota(jnp.int32, count), dtype)
    x = jax.jit(over(fill, in_specs=(), out_specs=P(every)))()
    scalar = functools.partial(jax.device_put, device=NamedSharding(mesh, P()))
    program = jax.jit(over(chained, in_specs=(P(every), P()), out_specs=P(every)))
    program = program.lower(x, scalar(np.int32(1))).compile()

    def run(times: int) -> tuple[float, jax.Array]:
        trips = scalar(np.int32(times))
        jax.block_until_ready((x, trips))
        begin = time.perf_counter()
        y = jax.block_until_ready(program(x, trips))
        return time.perf_counter() - begin, y

    for _ in range(effort.warmup):
        run(1)
    once, y = run(1)
    mistakes = int(jax.jit(over(wrong, in_specs=P(every), out_specs=P()))(y))
    del y
    times = int(min(max(effort.seconds / effort.repeats / once, 1), effort.iterations))
    taken = [once] if once > effort.seconds else []
    while len(taken) < effort.repeats and (not taken or sum(taken) + min(taken) <= effort.seconds):
        taken.append(run(times)[0])
    seconds = statistics.median(taken) / times
    algbw = whole * width / seconds / 1e9
    busbw = algbw * busbw_factor(op, n)
    return Measurement(op, whole * width, seconds, algbw, busbw, mistakes, times * len(taken))
