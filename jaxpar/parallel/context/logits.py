"""The logits of a cross-entropy, found in a traced loss, and made a chunk of tokens at a time.

They are a product of hidden states [.., T, D] and a head [D, V], of which nothing remains in the end but numbers a
token, or their sums. What stands between, in whatever words (a cast, a bias, a soft cap, log-softmax and a lookup, a
one-hot, a z-loss, an argmax), is what a rank of `context` would run on its part of the positions, by the same rules
(`localiser.py`): so it runs on one chunk of them after another, in a loop whose backward makes each chunk's logits
again, as `jp.cross_entropy` does. No equation is exchanged for another one. What has no rule, or needs logits of
several chunks at once, leaves them whole.

It is the last rewriting: of the program of one device, whose logits are its own part of the positions and the words.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
from jax import lax

from ...jaxprs import jaxpr as jx
from ...ops import routes
from ...ops.cross_entropy import CHUNK, HeadProduct, first, pieces, product
from ..tensor import RULES as TENSOR
from ..tensor.localiser import Found, Placed
from ..tensor.primitives import ELEMENTWISE, shape_of
from .localiser import Positions
from .rules import RULES as CONTEXT
from .split import Split

LARGE = 4 * 2**30  # bytes of logits in float32, on one device, from which on they are made in chunks
_MADE = frozenset((*ELEMENTWISE, "broadcast_in_dim", "iota", "concatenate"))  # what one-hots and places are made of
_EDGES = ("tensor_enter", "tensor_leave", "tensor_gather", "tensor_scatter", "tensor_unsplit", "tensor_take")
_APART = """
broadcast_in_dim reshape transpose squeeze reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax
argmin dot_general gather pmax psum cumsum cumlogsumexp sort top_k optimization_barrier
""".split()
_RULES: dict[str, Any] = {name: CONTEXT[name] for name in (*ELEMENTWISE, *_APART, *jx.REMATS) if name in CONTEXT}
_RULES |= {name: TENSOR[name] for name in ("cumsum", "cumlogsumexp", "sort", "top_k")}


@dataclass(frozen=True)
class Logits:
    """Logits of a loss that were found: `tokens` of a device's and microbatch's over `words`, in so many `chunks`; if
    they are whole, `why`.
    """

    tokens: int
    words: int
    chunks: int = 1
    why: str = ""


class _Whole(Exception):
    """Logits stay whole; its text says why."""


@dataclass
class _Chunk(Positions):
    """The rewriting into the program of chunk number `at`; `head` is the equation that makes its logits, and `wide` the
    head in float32, to which its gradient belongs.
    """

    at: Any = 0
    head: Any = None
    how: HeadProduct | None = None
    wide: Any = None

    def chunks(self) -> list[jax.Array]:
        """The one."""
        return [self.at]

    def whole(self, x: Placed) -> jax.Array:
        """All of it, which one chunk has only of what is not split."""
        if x.partial or x.dim is not None:
            raise _Whole("logits of several chunks meet")
        return x.value

    def _check(self, x: Placed, eqn: Any) -> None:
        if x.partial or x.dim is not None:
            raise _Whole(
                f"{eqn.primitive.name} at {jx.where(eqn) or 'a function of JAX'} has no rule for chunks of them"
            )

    def _equation(self, eqn: Any, inputs: Sequence[Placed], mixed: bool) -> list[Placed]:
        if eqn is not self.head:
            return super()._equation(eqn, inputs, mixed)
        assert self.how is not None
        hidden, head = inputs[::-1] if self.how.swapped else inputs
        assert hidden.dim is not None
        value = product(self.how, hidden.value, head.value, self.wide)
        dim = Split(hidden.dim - (self.how.of_hidden < hidden.dim) + self.how.swapped)
        return [Placed(value, dim, shape_of(eqn), hidden.active or head.active)]


def _edge(work: _Chunk, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    """To other ranks of `tensor`, of other dims."""
    (x,) = inputs
    if x.dim is None or (x.dim == eqn.params["dim"] and eqn.primitive.name not in _EDGES[:2]):
        return None
    return [(jx.bind(eqn, [x.value])[0], x.dim)]


def _slice(work: _Chunk, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    """Of some words; or of all positions but the last, which stay where they were in their chunk."""
    (x,) = inputs
    dim, strides = work.split(x.dim or 0), eqn.params["strides"]
    starts, limits = [*eqn.params["start_indices"]], [*eqn.params["limit_indices"]]
    n, some = x.shape[dim], limits[dim]
    if starts[dim] or (strides and strides[dim] != 1) or (some != n and (dim.rows > 1 or dim.overlap > 0)):
        return None
    chunk = work.chunk(n // dim.rows, dim.overlap)
    over = 0 if -(-some // work.ranks) == chunk else some - chunk * work.ranks
    if some != n and over < -chunk:
        return None
    limits[dim] = x.value.shape[dim]
    value = jx.bind(eqn, [x.value], start_indices=tuple(starts), limit_indices=tuple(limits))[0]
    return [(value, dim if some == n else Split(int(dim), 1, over))]


def _custom(work: _Chunk, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    """A function with its own derivative, on this chunk's part of a one-hot."""
    if routes.of(eqn) is not None:
        return None
    dims = {x.shape: x.dim for x in inputs if x.dim is not None}
    own = lambda x, dim: Placed(work.part(x, dim), dim, x.shape, x.active)
    inputs = [own(x, dims[x.shape]) if x.made is not None and x.shape in dims else x for x in inputs]
    return TENSOR[eqn.primitive.name](work, eqn, inputs)


_RULES |= dict.fromkeys(_EDGES, _edge) | dict.fromkeys(jx.CUSTOM, _custom) | {"slice": _slice}


def chunked(flat: jx.Flat, leaves: int, chunk: int | str, axes: dict[str, int]) -> tuple[jx.Flat, dict[str, Logits]]:
    """A loss with its logits in chunks, and what was found, by the line of the program.

    Args:
      flat: the program of one device; its first inputs are `leaves` parameters.
      chunk: the tokens of a chunk, at most; "auto" for `CHUNK` where logits are larger than `LARGE`; "whole" for none.
      axes: the mesh axes that the program may name.
    """
    found: dict[str, Logits] = {}
    least = {"whole": math.inf, "auto": LARGE / 4}.get(str(chunk), 0)
    heads = [e for e in flat.eqns if e.primitive.name == "dot_general" and math.prod(shape_of(e)) > least]
    if not heads:
        return flat, found
    for logits in [eqn.outvars[0] for eqn in heads]:
        eqn = next((e for e in flat.eqns if logits in e.outvars), None)  # with the names that the last loop has given
        how = eqn and _product(eqn, jx.depends(flat.eqns, flat.invars[leaves:]))
        region = how and _Region.of(flat, eqn, how, jx.depends(flat.eqns, flat.invars[:leaves]))
        if not how or not region:
            continue
        words = shape_of(eqn)[0 if how.swapped else -1]
        tokens = math.prod(shape_of(eqn)) // words
        place = jx.where(eqn) or f"logits [{tokens}, {words}]"
        try:
            new, chunks = region.looped(CHUNK if isinstance(chunk, str) else chunk, tokens, axes)
        except _Whole as error:
            found[place] = Logits(tokens, words, why=str(error))
            continue
        if chunks > 1:
            found[place], flat = Logits(tokens, words, chunks), region.spliced(flat, new)
    return flat, found


def _product(eqn: Any, of_batch: set[Any]) -> HeadProduct | None:
    """How an equation multiplies hidden states, which are of the batch, with a head, which is not."""
    (contracted, batch), params = eqn.params["dimension_numbers"], eqn.params
    for side in (0, 1):
        hidden, head = eqn.invars[side], eqn.invars[1 - side]
        if jx.is_literal(head) or head in of_batch or hidden not in of_batch or batch[0] or len(contracted[0]) != 1:
            continue
        if head.aval.ndim == 2 <= hidden.aval.ndim and jnp.issubdtype(head.aval.dtype, jnp.floating):
            dtype = params["preferred_element_type"]
            return HeadProduct(contracted[side][0], contracted[1 - side][0], side == 1, params["precision"], dtype)
    return None


@dataclass
class _Region:
    """What is between a product and the numbers a token that remain: `inside` in their order, of which `made` need
    nothing of the logits; `inputs`, hidden states and head first; `outs` are read outside.
    """

    head: Any
    how: HeadProduct
    inside: list[Any]
    made: set[int]
    inputs: list[Any]
    outs: list[Any]
    moved: set[Any]
    after: set[Any]
    splits: list[Placed] = field(default_factory=list)

    @classmethod
    def of(cls, flat: jx.Flat, head: Any, how: HeadProduct, moved: set[Any]) -> _Region | None:
        """That of a product; None where it is no cross-entropy's."""
        logits = math.prod(shape_of(head))
        size = lambda v: 0 if jx.is_literal(v) else math.prod(v.aval.shape)
        large = lambda v: 2 * size(v) > logits
        after = set(head.outvars)
        for eqn in flat.eqns[flat.eqns.index(head) + 1 :]:
            if any(not jx.is_literal(v) and v in after for v in eqn.invars):
                after.update(eqn.outvars)
        made_by = {v: eqn for eqn in flat.eqns for v in eqn.outvars}
        hidden, weight = head.invars[::-1] if how.swapped else head.invars
        inside: set[int] = set()
        made: set[int] = set()
        wanted: set[Any] = set()
        reads = lambda eqn: [v for v in eqn.invars if not jx.is_literal(v)]
        for eqn in reversed(flat.eqns):
            later = not after.isdisjoint(eqn.outvars)
            if later and (eqn is head or any(v in after and large(v) for v in reads(eqn)) or wanted & {*eqn.outvars}):
                inside.add(id(eqn))
                wanted.update(v for v in reads(eqn) if v in after)
        pulled = [v for eqn in flat.eqns if id(eqn) in inside and eqn is not head for v in reads(eqn) if v not in after]
        # Of logits[arange(n), labels] the places have to be known as such.
        places = {eqn.invars[1] for eqn in flat.eqns if id(eqn) in inside and eqn.primitive.name == "gather"} - after
        while pulled:
            v = pulled.pop()
            if (large(v) or v in places) and (eqn := made_by.get(v)) is not None and eqn.primitive.name in _MADE:
                made.add(id(eqn))
                places.update(reads(eqn) if v in places else ())
                pulled += reads(eqn)
        ours = [eqn for eqn in flat.eqns if id(eqn) in inside | made]
        outs = [v for eqn in ours if id(eqn) in inside for v in eqn.outvars]
        outside = {v for eqn in flat.eqns if id(eqn) not in inside for v in reads(eqn)}
        outside.update(v for v in flat.outvars if not jx.is_literal(v))
        outs = [v for v in outs if v in outside]
        words = weight.aval.shape[1 - how.of_head]
        if not outs or any(size(v) * words > logits for v in outs):
            return None
        products = [eqn for eqn in ours if eqn.primitive.name == "dot_general" and eqn is not head]
        known = {name for eqn in ours for name in _primitives(eqn)}
        behind = {name for eqn in flat.eqns if not after.isdisjoint(eqn.outvars) for name in _primitives(eqn)}
        if "exp" not in known or "log" not in behind or any(moved.issuperset(reads(eqn)) for eqn in products):
            return None  # numbers a token, and yet no cross-entropy
        inputs = [v for v in jx.free(ours) if v not in (hidden, weight)]
        return cls(head, how, ours, made, [hidden, weight, *inputs], outs, moved, after)

    def looped(self, chunk: int, tokens: int, axes: dict[str, int]) -> tuple[jx.Flat, int]:
        """The program from `inputs` to `outs`, and its number of chunks. Raises _Whole."""
        hidden, weight, *others = self.inputs
        if any(v is weight or v is hidden for e in self.inside if e is not self.head for v in e.invars):
            raise _Whole("what is made of them reads the head, or the hidden states, again")
        if any(not jx.is_literal(v) and 2 * math.prod(v.aval.shape) > math.prod(shape_of(self.head)) for v in others):
            raise _Whole("they meet a value of their size that is no one-hot")
        free = [d for d in range(hidden.aval.ndim) if d != self.how.of_hidden]
        dim = max(free, key=lambda d: hidden.aval.shape[d])
        t = hidden.aval.shape[dim]
        n = pieces(t, -(-tokens // chunk))
        k = -(-t // n)
        inner = jx.Flat((), (), tuple(self.inputs), tuple(self.outs), tuple(self.inside))
        widths = [(0, k * n - t if d == dim else 0) for d in range(hidden.aval.ndim)]

        def fun(states: jax.Array, head: jax.Array, *rest: jax.Array) -> list[jax.Array]:
            states = jnp.pad(states, widths) if k * n > t else states
            shape = states.shape
            xs = jnp.moveaxis(states.reshape(*shape[:dim], n, k, *shape[dim + 1 :]), dim, 0)
            wide, narrow = _wide(head), lax.stop_gradient(head)
            kept = [_wide(x) if v in self.moved else x for v, x in zip(others, rest, strict=True)]

            @jax.checkpoint
            def one(_: None, given: tuple[jax.Array, jax.Array]) -> tuple[None, list[jax.Array]]:
                at, some = given
                work = _Chunk(n, False, _RULES, cheap=2**62, at=at, head=self.head, how=self.how, wide=wide)
                whole = [x.astype(v.aval.dtype) for v, x in zip(others, kept, strict=True)]
                values = [(some, Split(dim)), (narrow, None), *((x, None) for x in whole)]
                args = [
                    Placed(x, at, v.aval.shape, v in self.moved) for v, (x, at) in zip(self.inputs, values, strict=True)
                ]
                self.splits = work.run(inner, args, linear=True)
                return None, [x.value for x in self.splits]

            _, ys = lax.scan(one, None, (jnp.arange(n, dtype=jnp.int32), xs))
            return [self._joined(y, x) for y, x in zip(ys, self.splits, strict=True)]

        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.inputs]
        if n == 1:
            return inner, 1
        new, _ = jx.trace(fun, *shapes, axes=axes)
        return dataclasses.replace(new, eqns=jx.live(new.eqns, new.outvars)), n  # of one-hots, no more than a chunk's

    @staticmethod
    def _joined(ys: jax.Array, x: Placed) -> jax.Array:
        """What all chunks have, [chunks, ...], as one."""
        if x.partial:
            value = _wide(ys).sum(0).astype(ys.dtype)
        elif not isinstance(x.dim, Split) or x.dim.overlap > 0:
            raise _Whole("what is made of them is no number a token")
        else:
            at, rows = int(x.dim), x.dim.rows
            ys = ys.reshape(*ys.shape[: at + 1], rows, -1, *ys.shape[at + 2 :])  # [chunks, .., rows, positions, ..]
            ys = jnp.moveaxis(ys, 0, at + 1)
            ys = ys.reshape(*ys.shape[: at + 1], -1, *ys.shape[at + 3 :])
            value = lax.slice_in_dim(ys, 0, x.shape[at] // rows, axis=at + 1).reshape(x.shape)
        return first(value) if jnp.issubdtype(value.dtype, jnp.inexact) else value

    def spliced(self, flat: jx.Flat, new: jx.Flat) -> jx.Flat:
        """`flat` with the program `new` in the place of this one's equations."""
        inside = {id(eqn) for eqn in self.inside} - self.made
        last = max(i for i, eqn in enumerate(flat.eqns) if id(eqn) in inside)
        kept = [(i, eqn) for i, eqn in enumerate(flat.eqns) if id(eqn) not in inside]
        later = lambda eqn: not self.after.isdisjoint(v for v in eqn.invars if not jx.is_literal(v))
        before = [eqn for i, eqn in kept if i < last and not later(eqn)]
        behind = [eqn for i, eqn in kept if i > last or later(eqn)]
        given = dict(zip(new.invars, self.inputs, strict=True))
        loop = [_renamed(eqn, given) for eqn in new.eqns]
        atoms = (v if jx.is_literal(v) else given.get(v, v) for v in new.outvars)
        results = dict(zip(self.outs, atoms, strict=True))
        outvars = tuple(v if jx.is_literal(v) else results.get(v, v) for v in flat.outvars)
        behind = [_renamed(eqn, results) for eqn in behind]
        read = {v for v in outvars if not jx.is_literal(v)}
        read.update(v for eqn in (*loop, *behind) for v in eqn.invars if not jx.is_literal(v))
        needed: list[Any] = []
        for eqn in reversed(before):
            if id(eqn) not in self.made or not read.isdisjoint(eqn.outvars):  # else each chunk has its own now
                needed.insert(0, eqn)
                read.update(v for v in eqn.invars if not jx.is_literal(v))
        return jx.Flat(
            (*flat.constvars, *new.constvars),
            (*flat.consts, *new.consts),
            flat.invars,
            outvars,
            (*needed, *loop, *behind),
        )


def _wide(x: jax.Array) -> jax.Array:
    """In float32 where it is narrower."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _renamed(eqn: Any, names: dict[Any, Any]) -> Any:
    return eqn.replace(invars=[v if jx.is_literal(v) else names.get(v, v) for v in eqn.invars])


def _primitives(eqn: Any) -> Iterable[str]:
    """The names of all primitives in an equation."""
    yield eqn.primitive.name
    for inner in jec.jaxprs_in_params(eqn.params):
        for one in jx.opened(inner)[0].eqns:
            yield from _primitives(one)
