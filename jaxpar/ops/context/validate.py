"""What is asked of an attention over a context axis, checked.

Dims: b rows, t query positions, s key positions, c ranks, hq heads, hkv key/value heads, d head_dim.
"""

import numbers

import jax
import jax.numpy as jnp

from .order import ORDERS


def check_inputs(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    causal: bool,
    window: int | None,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    scale: float | None,
    order: str,
) -> None:
    """Raises ValueError where blocks or options do not fit each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} {list(x.shape)} has {x.ndim} dims; give [rows, positions, heads, head_dim]")
        if x.dtype != q.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} is {x.dtype}, q {q.dtype}; give all three in one of bfloat16, float16, float32")
    if k.shape != v.shape or (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]):
        raise ValueError(
            f"k {list(k.shape)} and v {list(v.shape)} must be equal, with the rows and head_dim of q {list(q.shape)}"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{k.shape[2]} key heads do not divide {q.shape[2]} query heads; use a divisor")
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(f"causal=True for blocks of {q.shape[1]} queries and {k.shape[1]} keys; use causal=False")
    if window is not None and (not causal or window < 1):
        raise ValueError(f"window={window}, causal={causal}: a window is 1 or more, and needs causal=True")
    if scale is not None and not isinstance(scale, numbers.Real):
        raise ValueError(f"scale is {type(scale).__name__}; give a number")
    if order not in ORDERS:
        raise ValueError(f"order={order!r}; use one of {ORDERS}")
    if order == "zigzag" and (q.shape[1] % 2 or k.shape[1] % 2):
        raise ValueError(
            f"order='zigzag' for blocks of {q.shape[1]} queries and {k.shape[1]} keys: a rank holds two chunks; "
            "give an even number, or use order='plain'"
        )
    if segment_ids is None and kv_segment_ids is not None:
        raise ValueError("kv_segment_ids without segment_ids; give the queries' ids as well")
    if segment_ids is not None and kv_segment_ids is None and q.shape[1] != k.shape[1]:
        raise ValueError(f"segment_ids of {q.shape[1]} queries say nothing of {k.shape[1]} keys; give kv_segment_ids")
    for name, ids, x in (("segment_ids", segment_ids, q), ("kv_segment_ids", kv_segment_ids, k)):
        if ids is not None and (ids.shape != x.shape[:2] or not jnp.issubdtype(ids.dtype, jnp.integer)):
            raise ValueError(f"{name} is {ids.dtype} {list(ids.shape)}; give integers {list(x.shape[:2])}")
