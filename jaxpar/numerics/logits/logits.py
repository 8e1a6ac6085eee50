"""The logits of a cross-entropy, found in a traced loss, and made a chunk of tokens at a time.

They are a product of hidden states [.., T, D] and a head [D, V], of which nothing remains in the end but a few
numbers a token, or their sums. What stands between, in whatever words (a cast, a bias, a soft cap, log-softmax and a
lookup, a one-hot, a z-loss, an argmax), is what a rank of `context` would run on its part of the positions, by the same
rules (`chunks.py`): so it runs on one chunk of them after another, in a loop whose backward makes each chunk's logits
again, as `jp.cross_entropy` does. No equation is exchanged for another one. What has no rule, or needs logits of
several chunks at once, leaves them whole.

It is the last rewriting: of the program of one device, whose logits are its own part of the positions and the words.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
from jax import lax

from ...parallel.context.split import Split
from ...parallel.tensor.localiser import LocalValue
from ...parallel.tensor.primitives import ELEMENTWISE, shape_of
from ...program import jaxpr as jx
from ...program.environment import through
from ...program.walk import propagate, visit
from .chunks import RULES, Chunk, StayWholeError
from .cross_entropy import CHUNK, HeadProduct, first, pieces

LARGE = 4 * 2**30  # bytes of logits in float32, on one device, from which on they are made in chunks
FEW = 8  # numbers a token that may be read of what is made of them: of a token's best few words, for one
_MADE = frozenset((*ELEMENTWISE, "broadcast_in_dim", "iota", "concatenate"))  # what one-hots and places are made of
_HOLDERS = dict.fromkeys(jx.REMATS, "jax.checkpoint") | {"scan": "a loop", "cond": "a branch"}


@dataclass(frozen=True)
class Logits:
    """Logits of a loss that were found: `tokens` of a device's and microbatch's over `words`, in so many `chunks`; if
    they are whole, `why`.
    """

    tokens: int
    words: int
    chunks: int = 1
    why: str = ""


def chunked(flat: jx.Flat, leaves: int, chunk: int | str, axes: dict[str, int]) -> tuple[jx.Flat, dict[str, Logits]]:
    """A loss with its logits in chunks, and what was found, by the line of the program.

    Args:
      flat: the program of one device; its first inputs are `leaves` parameters.
      chunk: the tokens of a chunk, at most; "auto" for `CHUNK` where logits are larger than `LARGE`; "whole" for none.
      axes: the mesh axes that the program may name.
    """
    found: dict[str, Logits] = {}
    least = {"whole": math.inf, "auto": LARGE / 4}.get(str(chunk), 0)
    leaf_vars, rest = flat.invars[:leaves], flat.invars[leaves:]
    for region, holder in _held(flat, leaves, least).values():
        found[region.place] = Logits(region.tokens, region.words, why=f"they are made within {holder}")
    for logits in [eqn.outvars[0] for eqn in flat.eqns if _is_large(eqn, least)]:
        eqn = next((e for e in flat.eqns if logits in e.outvars), None)  # with the names that the last loop has given
        region = eqn and _Region.of(flat, eqn, leaf_vars, rest)
        if not region:
            continue
        place, tokens, words = region.place, region.tokens, region.words
        try:
            new, chunks = region.looped(CHUNK if isinstance(chunk, str) else chunk, axes)
        except StayWholeError as error:
            found[place] = Logits(tokens, words, why=str(error))
            continue
        if chunks > 1:
            found[place], flat = Logits(tokens, words, chunks), region.spliced(flat, new)
    return flat, found


def _is_large(eqn: Any, least: float) -> bool:
    """Whether an equation is a product of more elements."""
    return eqn.primitive.name == "dot_general" and math.prod(shape_of(eqn)) > least


def _held(flat: jx.Flat, leaves: int, least: float) -> "dict[str, tuple[_Region, str]]":
    """The cross-entropies within equations of a program, which stay as they are, by their places, and what each is
    within.
    """
    found: dict[str, tuple[_Region, str]] = {}

    def inside(holder: str, program: Any, ins: list[frozenset[str]], _: Any) -> list[frozenset[str]]:
        if holder:
            flat = jx.flatten(jec.ClosedJaxpr(*jx.opened(program)))
            of = lambda what: [v for v, on in zip(flat.invars, ins, strict=True) if what in on]
            regions = [_Region.of(flat, eqn, of("leaf"), of("rest")) for eqn in flat.eqns if _is_large(eqn, least)]
            found.update((region.place, (region, holder)) for region in regions if region)
        return through(program, ins, follow, frozenset())

    def follow(eqn: Any, ins: list[frozenset[str]]) -> list[frozenset[str]]:
        run = functools.partial(inside, _HOLDERS.get(eqn.primitive.name, ""))
        return propagate(eqn, ins, run, frozenset.union) or [frozenset[str]().union(*ins)] * len(eqn.outvars)

    if any(_is_large(e, least) for eqn in flat.eqns if eqn.primitive.name in _HOLDERS for e, _ in visit([eqn])):
        sources = [frozenset(("leaf" if i < leaves else "rest",)) for i in range(len(flat.invars))]
        through(flat, sources, follow, frozenset())
    return found


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
    nothing of the logits; `inputs`, hidden states and head first; `outs` are read outside. `why` it cannot be in
    chunks, if these are more than numbers a token.
    """

    head: Any
    how: HeadProduct
    inside: list[Any]
    made: set[int]
    inputs: list[Any]
    outs: list[Any]
    moved: set[Any]
    after: set[Any]
    why: str
    splits: list[LocalValue] = field(default_factory=list)

    @classmethod
    def of(cls, flat: jx.Flat, head: Any, leaves: Iterable[Any], rest: Iterable[Any]) -> "_Region | None":
        """That of a product; `leaves` are parameters, `rest` is of the batch. None if it is no cross-entropy's."""
        how = _product(head, jx.depends(flat.eqns, rest))
        if how is None:
            return None
        moved = jx.depends(flat.eqns, leaves)
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
        products = [eqn for eqn in ours if eqn.primitive.name == "dot_general" and eqn is not head]
        names = lambda eqns: {inner.primitive.name for eqn in eqns for inner, _ in visit([eqn])}
        known, behind = names(ours), names(eqn for eqn in flat.eqns if not after.isdisjoint(eqn.outvars))
        numbers = "exp" in known and "log" in behind and not any(moved.issuperset(reads(eqn)) for eqn in products)
        if not outs or not numbers:
            return None  # no cross-entropy
        words = weight.aval.shape[1 - how.of_head]
        much = {v for v in outs if size(v) * words > FEW * logits or large(v)}
        reader = next((eqn for eqn in flat.eqns if id(eqn) not in inside and not much.isdisjoint(reads(eqn))), None)
        where = "the loss returns" if reader is None else f"{reader.primitive.name} at {jx.where(reader)} reads"
        why = f"{where} more than {FEW} numbers a token of what is made of them" if much else ""
        inputs = [v for v in jx.free(ours) if v not in (hidden, weight)]
        return cls(head, how, ours, made, [hidden, weight, *inputs], outs, moved, after, why)

    @property
    def words(self) -> int:
        """Those of the head."""
        return shape_of(self.head)[0 if self.how.swapped else -1]

    @property
    def tokens(self) -> int:
        """Those that have logits."""
        return math.prod(shape_of(self.head)) // self.words

    @property
    def place(self) -> str:
        """The line of the product, or else its shape."""
        return jx.where(self.head) or f"logits [{self.tokens}, {self.words}]"

    def looped(self, chunk: int, axes: dict[str, int]) -> tuple[jx.Flat, int]:
        """The program from `inputs` to `outs` in chunks of tokens, and their number. Raises StayWholeError."""
        hidden, weight, *others = self.inputs
        if self.why:
            raise StayWholeError(self.why)
        if any(v is weight or v is hidden for e in self.inside if e is not self.head for v in e.invars):
            raise StayWholeError("what is made of them reads the head, or the hidden states, again")
        if any(not jx.is_literal(v) and 2 * math.prod(v.aval.shape) > math.prod(shape_of(self.head)) for v in others):
            raise StayWholeError("they meet a value of their size that is no one-hot")
        free = [d for d in range(hidden.aval.ndim) if d != self.how.of_hidden]
        dim = max(free, key=lambda d: hidden.aval.shape[d])
        t = hidden.aval.shape[dim]
        n = pieces(t, -(-self.tokens // chunk))
        k = -(-t // n)
        inner = jx.Flat((), (), tuple(self.inputs), tuple(self.outs), tuple(self.inside))
        widths = [(0, k * n - t if d == dim else 0) for d in range(hidden.aval.ndim)]

        def fun(states: jax.Array, head: jax.Array, *rest: jax.Array) -> list[jax.Array]:
            # Beyond the end the last position again, whose logits are as finite as its own: 0 times NaN is no zero.
            states = jnp.pad(states, widths, "edge") if k * n > t else states
            shape = states.shape
            xs = jnp.moveaxis(states.reshape(*shape[:dim], n, k, *shape[dim + 1 :]), dim, 0)
            wide, narrow = _wide(head), lax.stop_gradient(head)
            kept = [_wide(x) if v in self.moved else x for v, x in zip(others, rest, strict=True)]

            @jax.checkpoint
            def one(_: None, given: tuple[jax.Array, jax.Array]) -> tuple[None, list[jax.Array]]:
                at, some = given
                work = Chunk(n, False, RULES, cheap=2**62, at=at, head=self.head, how=self.how, wide=wide)
                whole = [x.astype(v.aval.dtype) for v, x in zip(others, kept, strict=True)]
                values = [(some, Split(dim)), (narrow, None), *((x, None) for x in whole)]
                args = [
                    LocalValue(x, at, v.aval.shape, v in self.moved)
                    for v, (x, at) in zip(self.inputs, values, strict=True)
                ]
                self.splits = work.run(inner, args, linear=True)
                return None, [x.value for x in self.splits]

            _, ys = lax.scan(one, None, (jnp.arange(n, dtype=jnp.int32), xs))
            return [self._joined(y, x) for y, x in zip(ys, self.splits, strict=True)]

        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.inputs]
        if n == 1:
            return inner, 1
        new, _ = jx.trace(fun, *shapes, axes=axes)
        if any(one.primitive.name.startswith("custom_vjp") for eqn in self.inside for one, _ in visit([eqn])):
            jx.trace(lambda *values: jx.pulled(fun, values), *shapes, axes=axes)  # it may read all tokens there
        return dataclasses.replace(new, eqns=jx.live(new.eqns, new.outvars)), n  # of one-hots, no more than a chunk's

    @staticmethod
    def _joined(ys: jax.Array, x: LocalValue) -> jax.Array:
        """What all chunks have, [chunks, ...], as one."""
        if x.partial:
            value = _wide(ys).sum(0).astype(ys.dtype)
        elif not isinstance(x.dim, Split) or x.dim.overlap > 0:
            raise StayWholeError("what is made of them is no number a token")
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
        given = jx.Environment(zip(new.invars, self.inputs, strict=True), jx.itself)
        loop = [eqn.replace(invars=given.read(eqn.invars)) for eqn in new.eqns]
        results = jx.Environment(zip(self.outs, given.read(new.outvars), strict=True), jx.itself)
        outvars = tuple(results.read(flat.outvars))
        behind = [eqn.replace(invars=results.read(eqn.invars)) for eqn in behind]
        others = [eqn for eqn in before if id(eqn) not in self.made]
        read = [v for eqn in (*others, *loop, *behind) for v in eqn.invars]
        known = {id(eqn) for eqn in (*others, *jx.needed(before, (*read, *outvars)))}
        needed = [eqn for eqn in before if id(eqn) in known]  # of what is not, each chunk has its own now
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
