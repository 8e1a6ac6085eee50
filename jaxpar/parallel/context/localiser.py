"""Rewrite a traced loss into the program of one context rank, which has some of the positions of each sequence.

The sequence is found where ids become features, and is split there (`entry.py`); what follows is split along the same
dim, by the rule of each primitive: `tensor`'s rules where an equation leaves positions apart, those of `rules.py` where
it adds them up. Values that nobody split, positions and masks, stay whole and are sliced where they meet split ones.

A value is whole, split along a dim, or a partial sum. Unlike on `tensor`, every rank's loss is its own part of the sum:
cotangents of whole values, parameters among them, are partial sums as well, and a strategy's rule adds up gradients
over `context` as it does over `data`. So the derivative of each collective is JAX's own, and what all ranks repeat on
whole values is right unchanged, once the loss is divided by their number. An equation that mixes positions, and for
which there is no rule, gets whole values where these are at most a number a position, and is refused where they are
more.

A dim that the ranks do not divide, such as [B, T - 1] of shifted targets, has n positions on c ranks in chunks of
ceil(n / c), or of ceil(n / 2c) in zigzag order. What is beyond the last
position repeats others, and is left out where positions are added up.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...program import jaxpr as jx
from ...program import primitives
from ..tensor.localiser import Found, Localiser, LocalValue, place
from .attention_mode import AXIS, GATHER, AttentionMode
from .entry import FirstSplit, starts
from .ops import from_zigzag, order_of
from .split import PARTIAL, Split, by_row, linear, pushed


@dataclass
class ContextLocaliser(Localiser):
    """One rewriting. `begin` has the equations where a split begins, `cheap` how many elements may be gathered for want
    of a rule, `mode` how attention reaches all keys, `tensor` the number of ranks that share heads,
    `together` whether all ranks of a program run it at one time, and `eqns` the program that is being rewritten. Every
    value that is split says so by a `Split`; `rows`
    and `overlap` are what a plain number means in the rule of the equation at hand: those of its inputs.
    """

    begin: dict[int, FirstSplit] = field(default_factory=dict)
    cheap: int = 0
    mode: AttentionMode = GATHER
    tensor: int = 1
    together: bool = True
    eqns: Sequence[Any] = ()
    rows: int = 1
    overlap: int = 0

    def whole(self, x: LocalValue) -> jax.Array:
        """All of it, on every rank."""
        if x.partial:
            return x.once("whole", lambda: lax.psum(x.value, AXIS))
        if x.dim is None:
            return x.value
        dim = self.split(x.dim)
        n = x.shape[dim] // dim.rows
        return x.once("whole", lambda: by_row(lambda y, d: self._gathered(y, d, n, dim.overlap), x.value, dim))

    def _gathered(self, value: jax.Array, dim: int, n: int, overlap: int) -> jax.Array:
        every = lax.all_gather(value, AXIS, axis=dim, tiled=True)
        if self.mode.order != "plain":
            every = from_zigzag(every, self.ranks, dim)
        if overlap > 0:  # of each chunk itself, and of the last what follows
            *first, last = jnp.split(every, self.mode.parts(self.ranks), dim)
            kept = [lax.slice_in_dim(x, 0, self.chunk(n, overlap), axis=dim) for x in first]
            every = jnp.concatenate([*kept, last], dim)
        return lax.slice_in_dim(every, 0, n, axis=dim)

    def entered(self, x: LocalValue) -> jax.Array:
        """The same: no edge is needed where cotangents are partial sums."""
        return self.whole(x)

    def split(self, dim: int) -> Split:
        """A dim, how many rows are merged in it, and what of it overlaps."""
        return dim if isinstance(dim, Split) else Split(dim, self.rows, self.overlap)

    def part(self, x: LocalValue, dim: int) -> jax.Array:
        """This rank's part along a dim."""
        at = self.split(dim)
        if x.dim is not None and not x.partial and self.split(x.dim).how == at.how:
            return x.value
        return x.once(("part", at.how), lambda: self._part(x, at))

    def _part(self, x: LocalValue, dim: int) -> jax.Array:
        made = pushed(self, self.positions, x, self.split(dim)) if x.made is not None else None
        return self.take(self.whole(x), dim) if made is None else made

    def take(self, value: jax.Array, dim: int) -> jax.Array:
        """This rank's part of a value that it has whole; beyond its end the last position again."""
        dim = self.split(dim)
        return by_row(lambda x, d: self._taken(x, d, dim.overlap), value, dim)

    def _taken(self, value: jax.Array, dim: int, overlap: int) -> jax.Array:
        n = value.shape[dim]
        chunk, after = self.chunk(n, overlap), max(overlap, 0)
        missing = chunk * self.mode.parts(self.ranks) + after - n
        if missing:
            value = jnp.pad(value, [(0, missing if d == dim else 0) for d in range(value.ndim)], "edge")
        parts = [lax.dynamic_slice_in_dim(value, at * chunk, chunk + after, dim) for at in self.chunks()]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, dim)

    def chunks(self) -> list[jax.Array]:
        """The numbers of the chunks of a sequence that this rank has."""
        held = jnp.asarray(order_of(self.ranks, self.mode.order), jnp.int32).reshape(self.ranks, -1)
        return list(held[lax.axis_index(AXIS)])

    def chunk(self, n: int, overlap: int = 0) -> int:
        """The positions of one chunk of n, without what overlaps."""
        return -(-(n - overlap) // self.mode.parts(self.ranks))

    def size(self, n: int, overlap: int = 0) -> int:
        """How many of n positions a rank has, those beyond the end included."""
        return (self.chunk(n, overlap) + max(overlap, 0)) * self.mode.parts(1)

    def positions(self, n: int, dim: Split) -> jax.Array:
        """Where in a dim of n this rank's positions are: int32. Those beyond the end of a row are its last."""
        per = n // dim.rows
        each = jnp.minimum(self._places(per, dim.overlap), per - 1)
        return (jnp.arange(dim.rows, dtype=jnp.int32)[:, None] * per + each).reshape(-1)

    def _places(self, n: int, overlap: int) -> jax.Array:
        chunk = self.chunk(n, overlap)
        each = jnp.arange(chunk + max(overlap, 0), dtype=jnp.int32)
        return jnp.concatenate([at * chunk + each for at in self.chunks()])

    def held(self, n: int, dim: Split, beyond: int = -1) -> np.ndarray:
        """Where in a dim of n the positions of each rank are: int [ranks, ...]; `beyond` the end of a row."""
        per = n // dim.rows
        chunk = self.chunk(per, dim.overlap)
        first = np.array(order_of(self.ranks, self.mode.order)).reshape(self.ranks, -1, 1) * chunk
        each = (first + np.arange(chunk + max(dim.overlap, 0))).reshape(self.ranks, 1, -1)
        places = np.where(each < per, np.arange(dim.rows)[:, None] * per + each, beyond)
        return places.reshape(self.ranks, -1)

    def kept(self, x: LocalValue, nothing: Any = 0) -> jax.Array:
        """The part of a split value, with `nothing` where it has no position, or another chunk has the same."""
        assert x.dim is not None
        dim = self.split(x.dim)
        if (inside := self.there(x.shape[dim] // dim.rows, dim)) is None:
            return x.value
        inside = jnp.tile(inside, dim.rows)
        inside = jnp.expand_dims(inside, [d for d in range(len(x.shape)) if d != dim])
        return jnp.where(inside, x.value, jnp.full_like(x.value, nothing))

    def there(self, n: int, dim: Split) -> jax.Array | None:
        """Which positions of n that a rank has are no others' as well, nor beyond the end; None: all are its own."""
        if dim.overlap == 0 and self.size(n) * self.ranks == n:
            return None
        inside = self._places(n, dim.overlap) < n
        if dim.overlap > 0:  # what follows is the next chunk's, but behind the last
            chunk, parts = self.chunk(n, dim.overlap), self.mode.parts(self.ranks)
            own = jnp.arange(chunk + dim.overlap) < chunk
            inside &= jnp.concatenate([own | (at == parts - 1) for at in self.chunks()])
        return inside

    def total(self, value: jax.Array) -> jax.Array:
        """The sum of what ranks have."""
        return lax.psum(value, AXIS)

    def of_all(self, value: jax.Array) -> jax.Array:
        """What every rank has, [ranks, ...]."""
        return lax.all_gather(value, AXIS)

    def local(self, shape: Sequence[int], dim: int | None) -> tuple[int, ...]:
        """The shape of a rank's part."""
        if dim is None:
            return (*shape,)
        at = self.split(dim)
        return tuple(at.rows * self.size(n // at.rows, at.overlap) if d == at else n for d, n in enumerate(shape))

    def shared(self, x: LocalValue) -> jax.Array:
        """A partial sum: of what every rank has whole, its share."""
        return x.value if x.partial else self.whole(x) / self.ranks

    def cotangent(self, value: Any, out: LocalValue, shape: tuple[int, ...]) -> LocalValue:
        """That of a whole output is a partial sum."""
        return LocalValue(value, out.dim, shape, partial=out.dim is None)

    def input_cotangent(self, x: LocalValue, dim: int | None) -> jax.Array:
        """That of a whole input is a partial sum."""
        return self.shared(x) if dim is None else self.part(x, dim)

    def run(self, flat: jx.Flat, args: Sequence[LocalValue], linear: bool = False) -> list[LocalValue]:
        """The outputs of a flat program: partial sums only of one that is linear in them."""
        outer, self.eqns = self.eqns, flat.eqns
        try:
            outs = super().run(flat, args)
        finally:
            self.eqns = outer
        return outs if linear else self._complete(outs)

    def _complete(self, values: Sequence[LocalValue]) -> list[LocalValue]:
        """The same values, partial sums added up."""
        return [LocalValue(self.whole(x), None, x.shape, x.active) if x.partial else x for x in values]

    def equation(self, eqn: Any, inputs: Sequence[LocalValue]) -> list[LocalValue]:
        """What becomes of one equation."""
        how = {(dim.rows, dim.overlap) for x in inputs if x.dim is not None for dim in [self.split(x.dim)]}
        outer = self.rows, self.overlap
        self.rows, self.overlap = max(how) if len(how) == 1 else (1, 0)
        try:
            return self._equation(eqn, inputs, mixed=len(how) > 1)
        finally:
            self.rows, self.overlap = outer

    def _equation(self, eqn: Any, inputs: Sequence[LocalValue], mixed: bool) -> list[LocalValue]:
        name = eqn.primitive.name
        found = None
        if (start := self.begin.get(id(eqn))) is not None:
            found = start.run(self, inputs)
        elif any(x.partial for x in inputs):
            found = linear(eqn, inputs)
            inputs = self._complete(inputs) if found is None else inputs
        split = any(x.dim is not None for x in inputs)
        how = primitives.of(eqn)
        apart = how.nested or how.separate or name in ("dot_general", "concatenate")  # inputs need not be split alike
        rule = self.rule_of(eqn) if apart or not mixed else None
        if found is None and split and rule is not None:
            found = rule(self, eqn, inputs)
        outs = self.results(eqn, inputs, self.on_whole(eqn, inputs) if found is None else found)
        # Of indices that are joined, some may count positions (`rules.py`), whatever the others are.
        if len(outs) == 1 and (name == "concatenate" or (not split and not outs[0].partial and outs[0].dim is None)):
            outs[0].made = eqn, inputs
        return outs

    def results(self, eqn: Any, inputs: Sequence[LocalValue], found: Found) -> list[LocalValue]:
        """The results of an equation: each whole, split, or a partial sum."""
        outs = super().results(eqn, inputs, found)
        for x in outs:
            x.partial = x.dim == PARTIAL
            x.dim = None if x.dim is None or x.partial else self.split(x.dim)
        return outs

    def note(self, eqn: Any, x: LocalValue) -> None:
        """Raises ValueError where an equation without a rule would gather features of all positions."""
        if x.dim is None or math.prod(x.shape) <= self.cheap:
            return
        # Of blocks that are picked, as BigBird's.
        masked = " (where it picks keys to attend to, give all of them and mask=)" * (eqn.primitive.name == "gather")
        advice = (
            f"attend by jp.attention or jax.nn.dot_product_attention{masked}, keep rows and positions as dims of their "
            "own ([rows, positions, ...])"
        )
        raise ValueError(
            f"context={self.ranks} splits dim {x.dim} of {list(x.shape)}, and {place(eqn)} mixes its positions, for "
            f"which there is no rule; {advice}, or use tensor, fsdp or pipe for context"
        )


def split_sequence(
    flat: jx.Flat,
    leaves: int,
    batch: Collection[int],
    sums: int,
    ranks: int,
    mode: AttentionMode,
    rules: Any,
    tensor: int = 1,
    together: bool = True,
) -> Callable[..., list[Any]]:
    """The program of one rank, a function of the same whole inputs.

    Args:
      flat: the traced loss on whole arrays; its first inputs are `leaves` parameters, those at the positions `batch`
        the rows of a batch [rows, positions, ...].
      sums: the first so many outputs are totals and counts; the function gives a rank's part of each, whose sum over
        ranks is meant. All other outputs are whole.
      mode: how attention reaches all keys (`attention_mode.py`).
      rules: what becomes of an equation, by primitive.
      tensor: the number of ranks that share the heads.
      together: whether all ranks run the program at one time, as permutes of positions need.

    Raises ValueError where no sequence is found, or the ranks do not divide it; and, when the function is traced, where
    an equation mixes positions and has no rule.
    """
    # What nobody reads, such as the last positions for a cache, need have no rule.
    flat = dataclasses.replace(flat, eqns=jx.live(flat.eqns, flat.outvars))
    begin = starts(flat, leaves, batch, ranks, mode.parts(ranks))
    cheap = max(start.tokens for start in begin.values())

    def fun(*values: Any) -> list[Any]:
        options = {"begin": begin, "cheap": cheap, "mode": mode, "tensor": tensor, "together": together}
        work = ContextLocaliser(ranks, False, rules, **options)
        outs = work.run(flat, work.arguments(flat, values, [None] * leaves), linear=True)
        return [work.shared(x) if i < sums else work.whole(x) for i, x in enumerate(outs)]

    return fun
