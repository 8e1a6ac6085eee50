"""Rewrite a traced loss into the program of one context rank, which holds some of the positions of each sequence.

The sequence is found where ids become features, and is split there (`entry.py`). The values computed from it are split
along the same dim, by the rule of each primitive. Where an equation treats positions separately, that is the rule of
`tensor`; where it adds them up, a rule of `rules.py`. Values that no split reaches, such as positions and masks, stay
whole. They are sliced where they meet split values.

A value is whole, split along a dim, or a partial sum. On `tensor`, every rank computes the whole loss; here, its loss
is its own part of the sum. So the cotangents of whole values, parameters included, are partial sums as well. A
strategy's rule adds up gradients over `context` as it does over `data`. The derivative of each collective is therefore
JAX's own, and no edges are needed. All ranks repeat computation on whole values. Its result is right, once the loss is
divided by the number of ranks.

An equation that mixes positions and has no rule gets whole values if they have at most one number for each position.
Larger values raise an error.

The ranks need not divide a dim, such as [B, T - 1] of shifted targets. Then n positions on c ranks form chunks of
ceil(n / c), or of ceil(n / 2c) in zigzag order. Places beyond the last position repeat other positions, and are left
out where positions are added up.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
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
from .entry import FirstSplit, WholeLoss, find_first_splits
from .ops import from_zigzag, order_of
from .split import PARTIAL, Split, linear_in_partial_sums, map_rows, pad_positions, part_from_inputs


@dataclass
class ContextLocaliser(Localiser):
    """The rewriting of one program. Every split value has a `Split` as its dim.

    Attributes:
      first_splits: the equations where a split begins, by `id`.
      max_gathered: the number of elements that may be gathered for lack of a rule.
      mode: how attention reaches all keys.
      tensor: the number of ranks that share the heads.
      in_lockstep: whether all ranks run the program at the same time, so that they can exchange positions directly.
      eqns: the equations of the program that is being rewritten.
      rows, overlap: how `split` completes a plain int as a dim, while an equation is rewritten: by the rows and the
        overlap of its inputs.
    """

    first_splits: dict[int, FirstSplit] = field(default_factory=dict)
    max_gathered: int = 0
    mode: AttentionMode = GATHER
    tensor: int = 1
    in_lockstep: bool = True
    eqns: Sequence[Any] = ()
    rows: int = 1
    overlap: int = 0

    def whole(self, x: LocalValue) -> jax.Array:
        """Return the whole value, on every rank."""
        if x.partial:
            return x.once("whole", lambda: lax.psum(x.value, AXIS))
        if x.dim is None:
            return x.value
        dim = self.split(x.dim)
        n = x.shape[dim] // dim.rows
        return x.once(
            "whole", lambda: map_rows(lambda y, d: self._gather_positions(y, d, n, dim.overlap), x.value, dim)
        )

    def _gather_positions(self, value: jax.Array, dim: int, n: int, overlap: int) -> jax.Array:
        """All-gather the n positions of a dim, in the user's order."""
        gathered = lax.all_gather(value, AXIS, axis=dim, tiled=True)
        # Ranks hold chunks in zigzag order: restore the user's order.
        if self.mode.order != "plain":
            gathered = from_zigzag(gathered, self.ranks, dim)
        if overlap > 0:
            # Drop the overlap of each chunk: the next chunk holds these positions. Only the last has none after it.
            *chunks, last_chunk = jnp.split(gathered, self.mode.parts(self.ranks), dim)
            owned_chunks = [lax.slice_in_dim(x, 0, self.chunk(n, overlap), axis=dim) for x in chunks]
            gathered = jnp.concatenate([*owned_chunks, last_chunk], dim)
        return lax.slice_in_dim(gathered, 0, n, axis=dim)

    def entered(self, x: LocalValue) -> jax.Array:
        """Return the whole value, for split computation. No edge is needed, as cotangents are partial sums."""
        return self.whole(x)

    def split(self, dim: int) -> Split:
        """Return a dim as a `Split`: a plain int has the rows and the overlap of the current equation."""
        return dim if isinstance(dim, Split) else Split(dim, self.rows, self.overlap)

    def part(self, x: LocalValue, dim: int) -> jax.Array:
        """Return this rank's part along a dim."""
        split = self.split(dim)
        if x.dim is not None and not x.partial and self.split(x.dim).as_tuple == split.as_tuple:
            return x.value
        return x.once(("part", split.as_tuple), lambda: self._part(x, split))

    def _part(self, x: LocalValue, dim: int) -> jax.Array:
        """Compute the part from parts of the equation's inputs, or slice it out of the whole."""
        part = part_from_inputs(self, self.positions, x, self.split(dim)) if x.made is not None else None
        return self.take(self.whole(x), dim) if part is None else part

    def take(self, value: jax.Array, dim: int) -> jax.Array:
        """Slice this rank's part out of a whole value; places beyond its end repeat the last position."""
        dim = self.split(dim)
        return map_rows(lambda x, d: self._take_chunks(x, d, dim.overlap), value, dim)

    def _take_chunks(self, value: jax.Array, dim: int, overlap: int) -> jax.Array:
        """Slice this rank's chunks out of one row."""
        chunk, num_following = self.chunk(value.shape[dim], overlap), max(overlap, 0)
        # The places of all chunks, with the overlap after the last one.
        length = chunk * self.mode.parts(self.ranks) + num_following
        if length > value.shape[dim]:
            value = pad_positions(value, dim, length)
        parts = [lax.dynamic_slice_in_dim(value, i * chunk, chunk + num_following, dim) for i in self.chunks()]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, dim)

    def chunks(self) -> list[jax.Array]:
        """Return the numbers of the chunks that this rank holds of a sequence."""
        chunks_of_ranks = jnp.asarray(order_of(self.ranks, self.mode.order), jnp.int32).reshape(self.ranks, -1)
        return list(chunks_of_ranks[lax.axis_index(AXIS)])

    def chunk(self, n: int, overlap: int = 0) -> int:
        """Return the length of one chunk of n positions, without its overlap."""
        return -(-(n - overlap) // self.mode.parts(self.ranks))

    def local_length(self, n: int, overlap: int = 0) -> int:
        """Return how many places a rank has for n positions, including places beyond the end."""
        # `parts(1)` is the number of chunks of one rank: two in zigzag order.
        return (self.chunk(n, overlap) + max(overlap, 0)) * self.mode.parts(1)

    def positions(self, n: int, dim: Split) -> jax.Array:
        """Return this rank's positions in a dim of length n: int32. Places beyond the end of a row have its last."""
        row_length = n // dim.rows
        row_positions = jnp.minimum(self.row_positions(row_length, dim.overlap), row_length - 1)
        return (jnp.arange(dim.rows, dtype=jnp.int32)[:, None] * row_length + row_positions).reshape(-1)

    def row_positions(self, n: int, overlap: int) -> jax.Array:
        """Return this rank's positions in a row of length n, int32; those beyond the end are n or more."""
        chunk = self.chunk(n, overlap)
        offsets = jnp.arange(chunk + max(overlap, 0), dtype=jnp.int32)
        return jnp.concatenate([i * chunk + offsets for i in self.chunks()])

    def positions_of_ranks(self, n: int, dim: Split, beyond: int = -1) -> np.ndarray:
        """Return the positions of each rank in a dim of length n: int [ranks, ...]; `beyond` after the end of a row."""
        # NumPy, since `places.py` plans exchanges while the program is traced.
        row_length = n // dim.rows
        chunk = self.chunk(row_length, dim.overlap)
        chunk_starts = np.array(order_of(self.ranks, self.mode.order)).reshape(self.ranks, -1, 1) * chunk
        row_positions = (chunk_starts + np.arange(chunk + max(dim.overlap, 0))).reshape(self.ranks, 1, -1)
        positions = np.arange(dim.rows)[:, None] * row_length + row_positions
        return np.where(row_positions < row_length, positions, beyond).reshape(self.ranks, -1)

    def masked_part(self, x: LocalValue, fill: Any = 0) -> jax.Array:
        """Return the part of a split value, with `fill` beyond the end and where another chunk has the position too."""
        assert x.dim is not None
        dim = self.split(x.dim)
        if (is_owned := self.owned_mask(x.shape[dim] // dim.rows, dim)) is None:
            return x.value
        is_owned = jnp.tile(is_owned, dim.rows)
        is_owned = jnp.expand_dims(is_owned, [d for d in range(len(x.shape)) if d != dim])
        return jnp.where(is_owned, x.value, jnp.full_like(x.value, fill))

    def owned_mask(self, n: int, dim: Split) -> jax.Array | None:
        """Return which of this rank's places in a row of n count as its own; None if all do.

        Every position is owned once: not by the overlap of another chunk, and not by places beyond the end.
        """
        if dim.overlap == 0 and self.local_length(n) * self.ranks == n:
            return None
        is_owned = self.row_positions(n, dim.overlap) < n
        if dim.overlap > 0:
            # The next chunk owns the positions of an overlap. No chunk follows the last one, which owns its overlap.
            chunk, parts = self.chunk(n, dim.overlap), self.mode.parts(self.ranks)
            is_in_chunk = jnp.arange(chunk + dim.overlap) < chunk
            is_owned &= jnp.concatenate([is_in_chunk | (i == parts - 1) for i in self.chunks()])
        return is_owned

    def total(self, value: jax.Array) -> jax.Array:
        """Return the sum of the ranks' values."""
        return lax.psum(value, AXIS)

    def of_all(self, value: jax.Array) -> jax.Array:
        """Return the values of all ranks, [ranks, ...]."""
        return lax.all_gather(value, AXIS)

    def local(self, shape: Sequence[int], dim: int | None) -> tuple[int, ...]:
        """Return the shape of a rank's part."""
        if dim is None:
            return (*shape,)
        split = self.split(dim)
        length = split.rows * self.local_length(shape[split] // split.rows, split.overlap)
        return tuple(length if d == split else n for d, n in enumerate(shape))

    def as_partial_sum(self, x: LocalValue) -> jax.Array:
        """Return a value as a partial sum: this rank's share of a value that every rank holds."""
        # All ranks add up their shares: c times 1/c of the value.
        return x.value if x.partial else self.whole(x) / self.ranks

    def cotangent(self, value: Any, out: LocalValue, shape: tuple[int, ...]) -> LocalValue:
        """Describe the cotangent of an output; for a whole output, it is a partial sum."""
        return LocalValue(value, out.dim, shape, partial=out.dim is None)

    def input_cotangent(self, x: LocalValue, dim: int | None) -> jax.Array:
        """Return the cotangent of an input; for a whole input, it is a partial sum."""
        return self.as_partial_sum(x) if dim is None else self.part(x, dim)

    def run(self, flat: jx.Flat, args: Sequence[LocalValue], linear: bool = False) -> list[LocalValue]:
        """Return the outputs of a flat program. They may be partial sums only if the program is linear in them."""
        # `keys_of` reads the equations after a product. Inner programs restore the outer equations.
        outer, self.eqns = self.eqns, flat.eqns
        try:
            outs = super().run(flat, args)
        finally:
            self.eqns = outer
        return outs if linear else self._add_up(outs)

    def _add_up(self, values: Sequence[LocalValue]) -> list[LocalValue]:
        """Return the values, with partial sums all-reduced."""
        return [LocalValue(self.whole(x), None, x.shape, x.active) if x.partial else x for x in values]

    def equation(self, eqn: Any, inputs: Sequence[LocalValue]) -> list[LocalValue]:
        """Compute one equation; plain ints are its inputs' splits where these have the same rows and overlap."""
        layouts = {(dim.rows, dim.overlap) for x in inputs if x.dim is not None for dim in [self.split(x.dim)]}
        outer = self.rows, self.overlap
        self.rows, self.overlap = max(layouts) if len(layouts) == 1 else (1, 0)
        try:
            return self._equation(eqn, inputs, mixed=len(layouts) > 1)
        finally:
            self.rows, self.overlap = outer

    def _equation(self, eqn: Any, inputs: Sequence[LocalValue], mixed: bool) -> list[LocalValue]:
        """Compute one equation; `mixed` tells that its inputs differ in rows or overlap."""
        name = eqn.primitive.name
        local_outputs = None
        # 1. Begin the split here, or compute with partial sums.
        if (first_split := self.first_splits.get(id(eqn))) is not None:
            local_outputs = first_split.run(self, inputs)
        elif any(x.partial for x in inputs):
            local_outputs = linear_in_partial_sums(eqn, inputs)
            inputs = self._add_up(inputs) if local_outputs is None else inputs

        # 2. Apply the rule. Few rules accept inputs that are split in different ways.
        is_split = any(x.dim is not None for x in inputs)
        properties = primitives.of(eqn)
        accepts_mixed = properties.nested or properties.separate or name in ("dot_general", "concatenate")
        rule = self.rule_of(eqn) if accepts_mixed or not mixed else None
        if local_outputs is None and is_split and rule is not None:
            local_outputs = rule(self, eqn, inputs)
        outs = self.results(eqn, inputs, self.on_whole(eqn, inputs) if local_outputs is None else local_outputs)

        # 3. Remember how a whole value was computed, so that `part_from_inputs` can compute its part. A lookup needs to
        # know the same of joined indices, even split ones: some of their columns may count positions (`rules.py`).
        if len(outs) == 1 and (name == "concatenate" or (not is_split and not outs[0].partial and outs[0].dim is None)):
            outs[0].made = eqn, inputs
        return outs

    def results(self, eqn: Any, inputs: Sequence[LocalValue], local_outputs: Found) -> list[LocalValue]:
        """Describe the results of an equation: each whole, split, or a partial sum."""
        outs = super().results(eqn, inputs, local_outputs)
        for x in outs:
            x.partial = x.dim == PARTIAL
            x.dim = None if x.dim is None or x.partial else self.split(x.dim)
        return outs

    def note(self, eqn: Any, x: LocalValue) -> None:
        """Raise ValueError if an equation without a rule would gather features of all positions."""
        # One number for each position may be gathered; features may not.
        if x.dim is None or math.prod(x.shape) <= self.max_gathered:
            return
        # Block-sparse attention, such as BigBird's, gathers blocks of keys.
        masked = " (where it picks keys to attend to, give all of them and mask=)" * (eqn.primitive.name == "gather")
        advice = (
            f"attend by jp.attention or jax.nn.dot_product_attention{masked}, keep rows and positions as "
            "separate dims ([rows, positions, ...])"
        )
        raise ValueError(
            f"context={self.ranks} splits dim {x.dim} of {list(x.shape)}, and {place(eqn)} mixes its positions, for "
            f"which there is no rule; {advice}, or use tensor, fsdp or pipe instead of context"
        )


def split_sequence(
    loss: WholeLoss, ranks: int, mode: AttentionMode, rules: Any, tensor: int = 1, in_lockstep: bool = True
) -> Callable[..., list[Any]]:
    """Build the program of one of `ranks` context ranks, a function of the same whole inputs.

    The function returns a rank's part of each total and count; their sum over ranks is the result. All other outputs
    are whole.

    Args:
      mode: how attention reaches all keys (`attention_mode.py`).
      tensor: the number of ranks that share the heads.
      in_lockstep: whether all ranks run the program at the same time, which direct exchanges of positions need.

    Raises:
      ValueError: if no sequence is found. When the function is traced: if an equation mixes positions and has no rule,
        or its rule needs a number of positions that the ranks divide.
    """
    # Results that nobody reads, such as the last positions for a cache, need no rule.
    flat = dataclasses.replace(loss.flat, eqns=jx.live(loss.flat.eqns, loss.flat.outvars))
    first_splits = find_first_splits(dataclasses.replace(loss, flat=flat), ranks, mode.parts(ranks))
    # One number for each position may be gathered (`note`).
    max_gathered = max(first_split.tokens for first_split in first_splits.values())

    def local_program(*values: Any) -> list[Any]:
        options = {"mode": mode, "tensor": tensor, "in_lockstep": in_lockstep}
        localiser = ContextLocaliser(
            ranks, False, rules, first_splits=first_splits, max_gathered=max_gathered, **options
        )
        outs = localiser.run(flat, localiser.arguments(flat, values, [None] * loss.num_leaves), linear=True)
        return [localiser.as_partial_sum(x) if i < loss.num_sums else localiser.whole(x) for i, x in enumerate(outs)]

    return local_program
