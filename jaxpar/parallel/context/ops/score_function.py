"""Attention whose scores a program makes into others before their softmax, a block of queries and keys at a time.

What stands between the product of queries and keys and the softmax (a bias by distance, a soft cap, a mask of any kind)
is a function of the scores, of the positions of queries and keys, of heads, and of operands that have an entry for each
of one of these, or none. A rank replays its equations for what is at hand, so that no [T, T] is ever whole. Softmax
and gradients are those of `blocks.py`, but for the largest score m and the sum l of exp(score - m), which are kept
apart: in log(l) + m the sum is lost where all keys of a query are hidden by a large number, and a softmax is then their
mean.

Dims: b rows, t query positions, s key positions, H heads, k key heads, g query heads of each, h head_dim.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry_2x32

from ....program import factors
from ....program import jaxpr as jx
from ..attention.flash import AttentionOptions
from .blocks import Rectangle, by_queries, dtype_of_sums, joined


class Along(NamedTuple):
    """What a dim runs along: queries ("t"), keys ("s"), key heads ("k") or the query heads of each ("g"), of which it
    has those from `start` on.
    """

    side: str
    start: int = 0


Labels = tuple[Along | None, ...]  # of each dim
Value = tuple[Any, Labels]  # a variable of a program, and along what its dims run


# What has no variable: the numbers of heads, and what is in a softmax beside the scores and has no value.
HEADS: dict[str, Value] = {side: (None, (Along(side),)) for side in "kg"}
SINK: Value = (None, (None, Along("k"), Along("g"), Along("t")))


class ScoreStep(NamedTuple):
    """An equation, its operands (values or literals) and its result."""

    eqn: Any
    operands: tuple[Any, ...]
    result: Value


class ScoreLayout(NamedTuple):
    """How a program has scores: which of the dims [b, k, g, t, s] each of its dims merges; none where it has one
    element.
    """

    merged: tuple[tuple[int, ...], ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The five dims as the program has them, before those of one element."""
        flat = tuple(d for dims in self.merged for d in dims)
        return (*flat, *(d for d in range(5) if d not in flat))

    def put(self, x: jax.Array) -> jax.Array:
        """[b, k, g, t, s] as the program has it."""
        shape = [math.prod(x.shape[d] for d in dims) for dims in self.merged]
        return jnp.transpose(x, self.order).reshape(shape)

    def back(self, x: jax.Array, shape: Sequence[int]) -> jax.Array:
        """`x`, as the program has it, as [b, k, g, t, s] of this shape."""
        return jnp.transpose(x.reshape([shape[d] for d in self.order]), [self.order.index(d) for d in range(5)])


@dataclass(frozen=True)
class ScoreProgram:
    """What a program makes of scores or weights, to be replayed for some queries and keys.

    Attributes:
      text: the program as text: those of equal texts and layouts are equal.
      into: the layout of what it starts with.
      back: that of its result.
      steps: its equations, in order.
      start: what it starts with.
      end: its result.
      operands: what it reads beside.
    """

    text: str
    into: ScoreLayout
    back: ScoreLayout
    steps: tuple[ScoreStep, ...] = field(compare=False, repr=False)
    start: Value = field(compare=False, repr=False)
    end: Value = field(compare=False, repr=False)
    operands: tuple[Value, ...] = field(compare=False, repr=False)

    @property
    def numbered(self) -> set[str]:
        """The sides whose places are read, and not only how many there are."""
        made = [step for step in self.steps if step.eqn.primitive.name in ("iota", "random_bits")]
        return {x.side for step in made for x in step.result[1] if x}

    def __call__(self, x: jax.Array, places: Mapping[str, jax.Array], operands: Sequence[jax.Array]) -> jax.Array:
        """Of [b, k, g, t, s] the same, where queries, keys and heads are at these places of all."""
        env = dict(zip(self.operands, operands, strict=True))
        env[self.start] = self.into.put(x).astype(self.start[0].aval.dtype)
        for step in self.steps:
            values = [y.val if jx.is_literal(y) else env[y] for y in step.operands]
            env[step.result] = _replayed(step, values, places)
        return self.back.back(env[self.end].astype(x.dtype), x.shape)


@dataclass(frozen=True)
class ScoreFunction:
    """What becomes of the products of queries and keys until they are multiplied by values.

    Attributes:
      scores: of the products those that a softmax is taken of.
      weights: of a softmax what values are multiplied by, linear in it, as dropout is; None: the softmax.
      sink: whether the softmax has more than the scores; its operand `SINK` is then the last.
      by_heads: whether some of the heads are computed without the others. Those of `HEADS` that count come first.
    """

    scores: ScoreProgram
    weights: ScoreProgram | None = None
    sink: bool = False
    by_heads: bool = True

    @property
    def operands(self) -> tuple[Value, ...]:
        """Of both programs, those of no variable among them."""
        more = () if self.weights is None else self.weights.operands
        return (*(HEADS[side] for side in self.numbered), *self.scores.operands, *more, *[SINK] * self.sink)

    @property
    def numbered(self) -> list[str]:
        """Which of "k" and "g" are read as numbers."""
        read = self.scores.numbered | (self.weights.numbered if self.weights else set())
        return [side for side in HEADS if side in read]

    def dims(self, side: str) -> list[int | None]:
        """The dim of each operand that runs along a side."""
        along = [[x and x.side for x in labels] for _, labels in self.operands]
        return [sides.index(side) if side in sides else None for sides in along]

    def heads(self) -> tuple[tuple[int | None, ...], int | None]:
        """Which dims of queries, keys, values and operands, and of the result, have a part of the key heads each."""
        return ((2, 2, 2, *self.dims("k")), 2) if self.by_heads else ((None,) * (3 + len(self.operands)), None)


def _replayed(step: ScoreStep, values: Sequence[jax.Array], places: Mapping[str, jax.Array]) -> jax.Array:
    eqn, labels, params = step.eqn, step.result[1], step.eqn.params
    along = lambda shape: tuple(len(places[x.side]) if x else n for x, n in zip(labels, shape, strict=True))
    changes: dict[str, Any] = {}
    if eqn.primitive.name == "iota":
        d = params["dimension"]
        at = jnp.arange(params["shape"][d]) if (x := labels[d]) is None else places[x.side] + x.start
        return lax.broadcast_in_dim(at.astype(params["dtype"]), along(params["shape"]), (d,))
    if eqn.primitive.name == "random_bits":
        every = zip(labels, params["shape"], strict=True)
        return _bits(values[0], params["shape"], [places[x.side] + x.start if x else jnp.arange(n) for x, n in every])
    if eqn.primitive.name == "slice":
        starts = tuple(0 if x else n for x, n in zip(labels, params["start_indices"], strict=True))
        changes = {"start_indices": starts, "limit_indices": along(params["limit_indices"])}
    else:
        for factor in factors.of(eqn):
            label = None if factor.outs[0] is None else labels[factor.outs[0]]
            if factor.params is not None and label is not None:
                n = len(places[label.side])
                local = lambda shape, d, n=n: (*shape[:d], n, *shape[d + 1 :])
                for name, sizes in factor.params(local).items():  # what other factors have changed stays so
                    both = zip(sizes, params[name], changes.get(name, sizes), strict=True)
                    changes[name] = tuple(before if size == whole else size for size, whole, before in both)
    return jx.bind(eqn, values, **changes)[0]


def _bits(key: jax.Array, shape: Sequence[int], places: Sequence[jax.Array]) -> jax.Array:
    """Of `jax.random.bits(key, shape)` in uint32 those at these places of each dim: threefry of their numbers."""
    high = low = jnp.zeros([len(at) for at in places], jnp.uint32)
    for d, at in enumerate(places):
        stride = math.prod(shape[d + 1 :])
        at = jnp.expand_dims(at.astype(jnp.uint32), [i for i in range(len(shape)) if i != d])
        more = at * jnp.uint32(stride % 2**32)
        carry = _high(at, stride % 2**32) + at * jnp.uint32(stride >> 32)
        high, low = high + carry + (low + more < more), low + more
    both = threefry_2x32(jax.random.key_data(key), jnp.stack([high, low]))
    return both[0] ^ both[1]


def _high(a: jax.Array, b: int) -> jax.Array:
    """The upper 32 bits of a product of uint32."""
    low, high = a & 0xFFFF, a >> 16
    middle = high * jnp.uint32(b & 0xFFFF) + (low * jnp.uint32(b & 0xFFFF) >> 16)
    return high * jnp.uint32(b >> 16) + (middle >> 16) + ((low * jnp.uint32(b >> 16) + (middle & 0xFFFF)) >> 16)


def operands_of(eqn: Any, labels: Labels) -> list[Labels] | None:
    """Along what the dims of an equation's operands run, where those of its result run along `labels`; None where it
    cannot be replayed for some of their elements.
    """
    name, shapes = eqn.primitive.name, factors.shapes(eqn)[0]
    if name == "iota":
        return []
    if name == "random_bits":  # which each element has by its number, in this way of drawing alone
        threefry = str(eqn.invars[0].aval.dtype) == "key<fry>" and jax.config.values["jax_threefry_partitionable"]
        return [()] if threefry and not eqn.invars[0].aval.shape and eqn.params["bit_width"] == 32 else None
    if name == "slice":
        if {*(eqn.params["strides"] or [1])} != {1}:
            return None
        starts = eqn.params["start_indices"]
        return [tuple(x and Along(x.side, x.start + int(n)) for x, n in zip(labels, starts, strict=True))]
    found: list[list[Along | None]] = [[None] * len(shape) for shape in shapes]
    every = factors.of(eqn) if len(eqn.outvars) == 1 else []
    for d, label in enumerate(labels):
        if label is None:
            continue
        factor = next((f for f in every if f.outs[0] == d), None)
        n = eqn.outvars[0].aval.shape[d]
        if factor is None or any(at is not None and shapes[i][at] != n for i, at in enumerate(factor.ins)):
            return None
        for i, at in enumerate(factor.ins):
            if at is not None:
                found[i][at] = label
    return [tuple(x) for x in found]


@dataclass(frozen=True)
class ScoreBlock:
    """A score function and what it needs in a rectangle: the places of its queries and keys, all operands, whose heads
    are a rank's and whose keys are those of all ranks, which of these keys is the rectangle's first, and which of its
    keys are keys at all; None: all.
    """

    function: ScoreFunction
    places: Mapping[str, jax.Array]
    operands: tuple[jax.Array, ...]
    first: jax.Array | int
    keys: jax.Array | None = None

    @property
    def sink(self) -> jax.Array | None:
        """What is in the softmax of each query beside the scores."""
        if not self.function.sink:
            return None
        b, k, g, t = self.operands[-1].shape
        return self.operands[-1].reshape(b, k * g, t)

    def _cut(
        self, r: Rectangle, first: jax.Array | int, shape: Sequence[int], floats: Sequence[jax.Array]
    ) -> tuple[dict[str, jax.Array], list[jax.Array]]:
        """The places and operands of scores [b, k, g, n, s], whose queries are from the rectangle's `first` on."""
        given = iter(floats)
        operands = [next(given) if _is_float(x) else x for x in self.operands]
        for side, at, size in (("t", r.query + first, shape[3]), ("s", self.first, r.keys)):
            dims = self.function.dims(side)
            operands = [x if d is None else cut(x, at, size, d) for x, d in zip(operands, dims, strict=True)]
        numbered = self.function.numbered
        places = {"t": cut(self.places["t"], first, shape[3], 0), "s": self.places["s"]}
        places |= dict(zip("kg", map(jnp.arange, shape[1:3]), strict=True)) | dict(
            zip(numbered, operands, strict=False)
        )
        return places, operands[len(numbered) :]

    def scores(self, r: Rectangle, first: jax.Array | int, q: jax.Array, k: jax.Array, *floats: jax.Array) -> jax.Array:
        """[b, k, g, n, s] of n queries [b, n, H, h] from the rectangle's `first` on, by operands that are `floats`."""
        dots = jnp.einsum("btkgh,bskh->bkgts", _grouped(q, k).astype(dtype_of_sums(q)), k.astype(dtype_of_sums(q)))
        places, operands = self._cut(r, first, dots.shape, floats)
        scores = self.function.scores(dots, places, operands[: len(self.function.scores.operands)])
        return scores if self.keys is None else jnp.where(self.keys, scores, -jnp.inf)

    def weights(self, r: Rectangle, first: jax.Array | int, weights: jax.Array, *floats: jax.Array) -> jax.Array:
        """What values are multiplied by, of a softmax, or of what it is a multiple of."""
        if (program := self.function.weights) is None:
            return weights
        places, operands = self._cut(r, first, weights.shape, floats)
        begin = len(self.function.scores.operands)
        return program(weights, places, operands[begin : begin + len(program.operands)])


def start(q: jax.Array, block: ScoreBlock) -> tuple[jax.Array, ...]:
    """What is merged with the first block: sums of weighed values [b, t, H, h]; m and l [b, H, t]; in float32."""
    b, t, heads, _ = q.shape
    most, sums = jnp.full((b, heads, t), -jnp.inf, dtype_of_sums(q)), jnp.zeros(q.shape, dtype_of_sums(q))
    return (sums, most, jnp.zeros_like(most)) if block.sink is None else (sums, block.sink, jnp.ones_like(most))


def attend(
    parts: list[Rectangle], q: jax.Array, kv: jax.Array, so_far: tuple[jax.Array, ...] | None
) -> tuple[jax.Array, ...]:
    """Some parts merged with what is so far, as `start` has it."""
    so_far = so_far or start(q, parts[0].replay)
    for r in parts:
        k, v = r.of_keys(kv, 2)
        before = [r.of_queries(x, d) for x, d in zip(so_far, _QUERIES, strict=True)]
        merged = _merged(r, r.of_queries(q), k, v, before)
        if r.there is not None:
            merged = [jnp.where(r.there, new, old) for new, old in zip(merged, before, strict=True)]
        so_far = tuple(
            lax.dynamic_update_slice_in_dim(x, new, r.query, d)
            for x, new, d in zip(so_far, merged, _QUERIES, strict=True)
        )
    return so_far


def _merged(r: Rectangle, q: jax.Array, k: jax.Array, v: jax.Array, before: Sequence[jax.Array]) -> list[jax.Array]:
    def some(_: Any, first: jax.Array, n: int) -> tuple[None, tuple[jax.Array, ...]]:
        sums, most, total = (cut(x, first, n, d) for x, d in zip(before, _QUERIES, strict=True))
        floats = [*filter(_is_float, r.replay.operands)]
        scores = r.replay.scores(r, first, cut(q, first, n), k, *floats)
        b, groups, each, *_ = scores.shape
        now = jnp.maximum(most, scores.max(-1).reshape(most.shape))
        weights = jnp.exp(scores - _finite(now).reshape(b, groups, each, n, 1))
        kept = jnp.exp(most - _finite(now))
        # A softmax of no key is NaN, which a program may turn into 0; once a key is seen, nothing is left of either.
        none, seen = (now == -jnp.inf).reshape(b, groups, each, n, 1), (most == -jnp.inf) & (now > -jnp.inf)
        multiplied = r.replay.weights(r, first, jnp.where(none, jnp.nan, weights), *floats)
        new = jnp.einsum("bkgts,bskh->btkgh", multiplied, v.astype(weights.dtype)).reshape(sums.shape)
        kept_sums, seen = (jnp.swapaxes(x, 1, 2)[..., None] for x in (kept, seen))
        sums = jnp.where(seen, 0, sums * kept_sums) + new
        return None, (sums, now, total * kept + weights.sum(-1).reshape(most.shape))

    outs = by_queries(r.queries, some, None)[1]
    return [joined(x, d) for x, d in zip(outs, _QUERIES, strict=True)]


def finish(q: jax.Array, sums: jax.Array, most: jax.Array, total: jax.Array) -> tuple[jax.Array, Any]:
    """The result in the dtype of q, and m and l as backward needs them. As a softmax: NaN where no key is seen."""
    total = jnp.where(total == 0, 1, total)  # `sums` are NaN there already, or what the program makes of it
    return (sums / jnp.swapaxes(total, 1, 2)[..., None]).astype(q.dtype), (_finite(most), total)


def nothing(q: jax.Array, rounds: Any, operands: Sequence[jax.Array], final: Any) -> tuple[jax.Array, ...]:
    """What the gradients of queries and of operands that are floats are added to; `final` is as of `pull`."""
    sums = _zeros(q, *operands)
    if not rounds.function.sink:
        return sums
    out, (most, total), given = final  # no block has a sink, whose value is nought
    along = (given.astype(most.dtype) * out.astype(most.dtype)).sum(-1)
    sink = operands[-1].reshape(most.shape)
    return *sums[:-1], (-jnp.exp(sink - most) / total * jnp.swapaxes(along, 1, 2)).reshape(operands[-1].shape)


def _zeros(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(jnp.zeros(x.shape, dtype_of_sums(x)) for x in arrays if _is_float(x))


def pull(
    parts: list[Rectangle], q: jax.Array, kv: jax.Array, final: tuple[jax.Array, Any, jax.Array], sums: Any
) -> tuple[Any, jax.Array]:
    """The gradients of some parts: of queries and operands, added to `sums`; of keys and values [2, b, s, k, h].

    `final` are the result over all keys, its m and l, and the result's cotangent.
    """
    (out, (most, total), given), (dq, *rest) = final, sums
    dkv = jnp.zeros(kv.shape, dtype_of_sums(q))
    for r in parts:
        k, v = r.of_keys(kv, 2)
        mine = [r.of_queries(x, d) for x, d in ((q, 1), (out, 1), (given, 1), (most, 2), (total, 2))]
        (dk, dv, *more), own = _pulled(r, mine, k, v, _zeros(k, v, *r.replay.operands))
        if r.there is not None:  # what is not there may be infinite
            dk, dv, own, *more = (jnp.where(r.there, x, 0) for x in (dk, dv, own, *more))
        dq = lax.dynamic_update_slice_in_dim(dq, r.of_queries(dq) + own, r.query, 1)
        dkv = lax.dynamic_update_slice_in_dim(dkv, r.of_keys(dkv, 2) + jnp.stack([dk, dv]), r.key, 2)
        rest = [x + y for x, y in zip(rest, more, strict=True)]
    return (dq, *rest), dkv


def _pulled(r: Rectangle, mine: Sequence[jax.Array], k: jax.Array, v: jax.Array, sums: Any) -> tuple[Any, jax.Array]:
    def some(sums: Any, first: jax.Array, n: int) -> tuple[Any, jax.Array]:
        q, out, given, most, total = (cut(x, first, n, d) for x, d in zip(mine, (1, 1, 1, 2, 2), strict=True))
        arrays = [x.astype(dtype_of_sums(x)) for x in (q, k)]
        floats = [x for x in r.replay.operands if _is_float(x)]
        scores, back = jax.vjp(lambda *x: r.replay.scores(r, first, *x), *arrays, *floats)
        each = lambda x: x.reshape(*scores.shape[:-1], 1)
        weights = jnp.exp(scores - each(most)) / each(total)
        d_out, result = (_grouped(x, k).astype(scores.dtype) for x in (given, out))
        along = jnp.einsum("btkgh,btkgh->bkgt", d_out, result)[..., None]
        multiplied, linear = jax.vjp(lambda *x: r.replay.weights(r, first, *x), weights, *floats)
        d_weights, *others = linear(jnp.einsum("btkgh,bskh->bkgts", d_out, v.astype(scores.dtype)))
        dq, dk, *more = back(weights * (d_weights - along))
        dv = jnp.einsum("bkgts,btkgh->bskh", multiplied, d_out)
        more = [x + y for x, y in zip(more, others, strict=True)]
        return tuple(x + y for x, y in zip(sums, (dk, dv, *more), strict=True)), dq

    sums, dqs = by_queries(r.queries, some, sums)
    return sums, joined(dqs, 1)


def scored_attention(options: AttentionOptions, q: jax.Array, k: jax.Array, v: jax.Array, *operands: jax.Array) -> Any:
    """softmax(function(q k^T)) v of whole sequences on one device.

    Args:
      options: with the function of scores.
      q: float [b, t, H, h].
      k: same dtype, [b, t, k, h]; k divides H.
      v: as `k`.
      operands: those of the function, whole, the numbers of heads first.

    Returns:
      [b, t, H, h] in the dtype of q.
    """
    places = {side: jnp.arange(x.shape[1], dtype=jnp.int32) for side, x in (("t", q), ("s", k))}
    r = Rectangle(0, 0, q.shape[1], k.shape[1])

    def whole(q: jax.Array, k: jax.Array, v: jax.Array, *operands: jax.Array) -> jax.Array:
        block = ScoreBlock(options.function, places, operands, 0)
        floats = [*filter(_is_float, operands)]
        scores = block.scores(r, 0, q, k, *floats)
        more = [] if block.sink is None else [block.sink.reshape(*scores.shape[:-1], 1)]
        weights = jax.nn.softmax(jnp.concatenate([scores, *more], -1))[..., : scores.shape[-1]]
        weights = block.weights(r, 0, weights, *floats)
        return jnp.einsum("bkgts,bskh->btkgh", weights, v.astype(weights.dtype)).reshape(q.shape).astype(q.dtype)

    return jax.checkpoint(whole)(q, k, v, *operands)


_QUERIES = (1, 2, 2)  # the dim of queries in each part of what `start` gives


def cut(x: jax.Array, first: jax.Array | int, n: int, dim: int = 1) -> jax.Array:
    """Some of an array's entries along a dim."""
    return lax.dynamic_slice_in_dim(x, first, n, dim)


def _grouped(q: jax.Array, k: jax.Array) -> jax.Array:
    """Queries [b, t, H, h] by key head, [b, t, k, g, h]."""
    return q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
