"""`jp.attention` on this rank's queries: the keys and values of all ranks are gathered, masks are sliced.

Grattafiori et al. 2024, The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...jaxprs import kernels
from ...ops.attention import attention
from ...ops.flash import AttentionOptions
from ..tensor.localiser import Found, Placed
from .localiser import AXIS, Positions
from .rules import rule


@rule("jit", "pjit")
def _kernel(work: Positions, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    """`jp.attention`; another kernel is refused."""
    kernel = kernels.of(eqn)
    options = getattr(kernel.fun, "args", (None,))[0] if kernel is not None else None
    if not isinstance(options, AttentionOptions):
        return None
    query, key, value, *more = inputs
    if query.dim != 1 or query.shape[1] % work.ranks or any(x.dim not in (None, 1) for x in (key, value)):
        return None
    ids, masks = more[: options.segments], more[options.segments :]
    ids = ids if len(ids) != 1 else [ids[0], ids[0]]
    given = [work.part(query, 1), *(work.part(x, 1) if x.dim is not None else x.value for x in (key, value))]
    given += [work.part(ids[0], 1), work.whole(ids[1])] if ids else []
    given += [work.part(x, 2) if x.shape[2] > 1 else work.whole(x) for x in masks]
    return [(gathered(dataclasses.replace(options, segments=len(ids)), key.dim is not None, *given), 1)]


def gathered(
    options: AttentionOptions, split: bool, query: jax.Array, key: jax.Array, value: jax.Array, *more: jax.Array
) -> jax.Array:
    """Attention of this rank's queries [B, T/c, H, h]; keys and values are [B, S/c, K, h] where they are `split`, else
    [B, S, K, h]. `more` are, where there are some, ids of these queries, ids of all keys, a mask of these queries and
    all keys.
    """
    if split:
        key, value = lax.all_gather(jnp.stack([key, value]), AXIS, axis=2, tiled=True)
    ids, masks = more[: options.segments], more[options.segments :]
    mask = masks[0] if masks else None
    if options.causal:
        own = lax.axis_index(AXIS) * query.shape[1] + jnp.arange(query.shape[1])
        at = jnp.arange(key.shape[1])
        seen = at <= own[:, None]
        if options.window is not None:
            seen &= at > own[:, None] - options.window
        mask = seen[None, None] if mask is None else mask & seen
    named = dict(zip(("segment_ids", "kv_segment_ids"), ids, strict=False))
    kind = options.implementation
    return attention(query, key, value, causal=False, mask=mask, scale=options.scale, implementation=kind, **named)
