"""`jp.attention` on this rank's queries, by one of four ways (`ops/context/`); masks are sliced."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from ...jaxprs import kernels
from ...ops.context import gather_attention, ring_attention, ulysses_attention, usp_attention
from ...ops.flash import AttentionOptions
from ..tensor.localiser import Found, Placed
from .localiser import Positions
from .rules import rule
from .ways import AXIS, Way, options_of


@rule("jit", "pjit")
def _kernel(work: Positions, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    """`jp.attention`; another kernel is refused."""
    options = options_of(eqn)
    if options is None or inputs[0].dim != 1 or work.rows > 1 or any(x.dim not in (None, 1) for x in inputs[1:3]):
        return None
    if any(n % work.way.parts(work.ranks) for n in (inputs[0].shape[1], inputs[1].shape[1])):
        return None
    values = [work.part(x, 1) for x in inputs[: 3 + options.segments]]
    masks = inputs[3 + options.segments :]
    values += [work.part(x, 2) if x.shape[2] > 1 else work.whole(x) for x in masks]
    other = bool(masks) or options.segments == 2 or inputs[0].shape[1] != inputs[1].shape[1]
    fun = functools.partial(attend, options, work.way, other)
    heads = (2, 2, 2, *([None] * options.segments), *(1 if x.shape[1] > 1 else None for x in masks))
    # For tensor ranks it is one kernel, which they run on their heads; as one it must not be differentiated.
    return [((kernels.local_kernel(fun, heads, 2) if work.tensor > 1 else fun)(*values), 1)]


def attend(
    options: AttentionOptions,
    way: Way,
    other: bool,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *more: jax.Array,
) -> jax.Array:
    """Attention of this rank's queries [B, T/c, H, h] to the keys and values of all ranks, each of which has
    [B, S/c, K, h]. `more` are ids of these queries, of these keys, and a mask of these queries and all keys. Of
    `other` keys than the queries' own, or with a mask, it is by gather.
    """
    ids, masks = more[: options.segments], more[options.segments :]
    given: dict[str, Any] = {"axis": AXIS, "causal": options.causal, "scale": options.scale, "order": way.order}
    given |= {"window": options.window} | dict(zip(("segment_ids", "kv_segment_ids"), ids, strict=False))
    if other or way.name == "gather":
        return gather_attention(query, key, value, mask=masks[0] if masks else None, **given)
    if way.name == "usp":
        return usp_attention(query, key, value, group=way.group, **given)
    return (ring_attention if way.name == "ring" else ulysses_attention)(query, key, value, **given)
