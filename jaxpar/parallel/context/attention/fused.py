"""`jp.attention`: attention whose scores are no residuals, by cuDNN on GPUs and by XLA elsewhere.

`attention` checks its inputs, describes them in `AttentionOptions`, and calls one kernel (`flash.py`) on the heads of
each tensor rank. `biased_attention` is the same with a bias of scores, for `spelled.py`.

Dims: B rows, T query positions, S key positions, H heads, K key/value heads, h head_dim.
"""

import functools
import numbers

import jax
import jax.numpy as jnp

from ....program.kernels import local_kernel
from .flash import HIDDEN, AttentionOptions, flash_attention, jax_attention, refusal, visible_keys

IMPLEMENTATIONS = (None, "cudnn", "xla")


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = True,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    mask: jax.Array | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Compute softmax(scale query key^T) value for every head (Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1).

    On GPUs this is cuDNN's flash attention (Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691), chosen when
    the program is compiled, not when it is traced. Under tensor parallelism each rank computes its own heads, and
    nothing is communicated.

    Memory: the residuals are query, key, value, the result and, on GPUs, float32 [B, H, T]. cuDNN never holds the
    scores [B, H, T, S]. XLA holds those of one call, in float32, and computes them again in the backward pass (Rabe &
    Staats 2021, arXiv:2112.05682; Korthikanti et al. 2022, arXiv:2205.05198, section 5). `segment_ids` and `mask` cost
    cuDNN a bias [B, 1 or H, T, S] in the dtype of the query.

    XLA also computes on GPUs in these cases:

    - float32 and float64: cuDNN takes bfloat16 and float16;
    - a head_dim that is no multiple of 8, or over 128; over 256 if the program is traced on a machine with a GPU of
      compute capability 9.0 or more;
    - JAX without cuDNN: `pip install "jax[cuda12]"` installs it.

    cuDNN needs compute capability 8.0: on older GPUs use "xla". It has no forward-mode derivatives.

    Args:
      query: float [B, T, H, h].
      key: same dtype, [B, S, K, h]. K divides H: query head i attends to key head i // (H / K) (grouped-query
        attention, Ainslie et al. 2023, arXiv:2305.13245).
      value: as `key`.
      causal: query i sees keys 0 to i; T = S.
      window: query i sees keys i - window + 1 to i only (Beltagy et al. 2020, arXiv:2004.05150); needs `causal`.
      segment_ids: int [B, T]; a query sees the keys of its segment only, for rows with several documents (Krell et al.
        2021, arXiv:2107.02027). Padding is a segment too: give it a separate id, and no loss.
      kv_segment_ids: int [B, S], the segments of keys; `segment_ids` if None.
      mask: bool [B or 1, H or 1, T or 1, S or 1], True where a query may see a key, in addition to all of the above.
      scale: a number; 1 / sqrt(h) if None.
      implementation: None chooses as above; "xla" is XLA everywhere; "cudnn" chooses as None does, and raises an error
        if that would be XLA on a GPU.

    Returns:
      [B, T, H, h] in the dtype of the query; zeros for a query that sees no key. The softmax is float32.

    Raises:
      ValueError: shapes or dtypes do not fit, or "cudnn" cannot compute them.

    >>> x = jnp.ones((1, 5, 2, 8))
    >>> attention(x, x, x).shape
    (1, 5, 2, 8)
    """
    if scale is not None and not isinstance(scale, numbers.Real):
        raise ValueError(f"scale is {type(scale).__name__}; give a number, or multiply the query by it and use scale=1")
    if kv_segment_ids is not None and segment_ids is None:
        raise ValueError("kv_segment_ids without segment_ids; give the queries' ids as well")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}; use one of {IMPLEMENTATIONS}")
    ids = [x for x in (segment_ids, kv_segment_ids) if x is not None]
    # A Python float: options are static, and part of the key of compiled programs.
    scale = None if scale is None else float(scale)
    options = AttentionOptions(causal, window, scale, implementation, len(ids), mask is not None)
    check_inputs(options, query, key, value, *ids)
    if mask is None:
        return attention_kernel(options, query, key, value, *ids)
    _check_mask(mask, (query.shape[0], query.shape[2], query.shape[1], key.shape[1]))
    return attention_kernel(options, query, key, value, *ids, mask)


def attention_kernel(
    options: AttentionOptions, query: jax.Array, key: jax.Array, value: jax.Array, *ids_and_masks: jax.Array
) -> jax.Array:
    """Compute `attention` with static options, by one kernel on the heads of each tensor rank.

    `ids_and_masks` are ids of queries, ids of keys and a mask, as `options` say.
    """
    ids, masks = ids_and_masks[: options.segments], ids_and_masks[options.segments :]
    # A mask with one head is the same for all tensor ranks.
    in_dims = (2, 2, 2, *[None] * len(ids), *(1 if x.shape[1] != 1 else None for x in masks))
    return local_kernel(functools.partial(_attention, options), in_dims, 2)(query, key, value, *ids_and_masks)


def biased_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array, *, causal: bool, scale: float
) -> jax.Array:
    """Compute `attention` with a bias, float [1, H, T, S], which is added to the scaled scores of all rows.

    The bias has a gradient. cuDNN takes it in the dtype of the query.
    """
    options = AttentionOptions(causal, None, scale, None, 0, False, biased=True)
    # A finite number hides a key as well; the softmax of a row of -inf would be NaN.
    bias = jnp.maximum(bias, HIDDEN).astype(query.dtype)
    return local_kernel(functools.partial(_attention, options), (2, 2, 2, 1), 2)(query, key, value, bias)


def _attention(
    options: AttentionOptions, query: jax.Array, key: jax.Array, value: jax.Array, *arrays: jax.Array
) -> jax.Array:
    """Compute attention of the heads at hand; a query that sees no key gets zeros."""
    reason = "" if options.implementation == "xla" else refusal(query.shape, key.shape, query.dtype.name)
    if reason and options.implementation == "cudnn":
        raise ValueError(
            f"implementation='cudnn' for query {query.dtype} {list(query.shape)}: {reason}; use bfloat16 and another "
            "head_dim, or implementation='xla'"
        )
    if options.implementation == "xla" or reason:
        # The scores are computed again in the backward, so that they are no residuals.
        output = jax.checkpoint(functools.partial(jax_attention, "xla", options))(query, key, value, *arrays)
    else:
        output = flash_attention(options, query, key, value, *arrays)
    # With ids shared by queries and keys, or causality alone, each query sees itself.
    if options.masked or options.segments == 2:
        is_seen = visible_keys(options, query.shape[1], key.shape[1], *arrays)
        sees_any = (jnp.tril(is_seen) if options.causal else is_seen).any(-1)  # [B or 1, H or 1, T]
        output = jnp.where(jnp.swapaxes(sees_any, 1, 2)[..., None], output, 0)
    return output


def check_inputs(
    options: AttentionOptions, query: jax.Array, key: jax.Array, value: jax.Array, *ids: jax.Array
) -> None:
    """Raise ValueError if inputs of `attention` do not fit each other: whole sequences, or one rank's positions."""
    causal, window = options.causal, options.window
    # 1. Four dims, and one dtype that the kernels take.
    for name, x in {"query": query, "key": key, "value": value}.items():
        if x.ndim != 4:
            raise ValueError(f"{name} {list(x.shape)} has {x.ndim} dims; give [rows, positions, heads, head_dim]")
        if x.dtype != query.dtype or x.dtype.name not in ("float16", "bfloat16", "float32", "float64"):
            raise ValueError(
                f"{name} is {x.dtype}, query {query.dtype}; give all three in one of bfloat16, float16, float32"
            )
    # 2. Shapes that fit each other.
    (b, t, heads, h), (_, s, key_heads, _) = query.shape, key.shape
    if key.shape != value.shape or (key.shape[0], key.shape[3]) != (b, h):
        raise ValueError(
            f"key {list(key.shape)} and value {list(value.shape)} must be equal, with the rows and head_dim of query "
            f"{list(query.shape)}: [{b}, S, K, {h}]"
        )
    if heads % key_heads:
        raise ValueError(f"{key_heads} key heads do not divide {heads} query heads; use a divisor of {heads}")
    # 3. Causality and a window compare positions of one sequence.
    if causal and t != s:
        raise ValueError(f"causal=True needs as many queries as keys, not {t} and {s}; use causal=False and a mask")
    if window is not None and (not causal or window < 1):
        raise ValueError(f"window={window}, causal={causal}: a window is 1 or more, and needs causal=True")
    # 4. An id for each query and, if there are two arrays, for each key.
    for name, x, length in zip(("segment_ids", "kv_segment_ids"), ids, (t, s), strict=False):
        if x.shape != (b, length) or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} is {x.dtype} {list(x.shape)}; give integers [{b}, {length}]")
    if len(ids) == 1 and t != s:
        raise ValueError(f"segment_ids has ids for {t} queries and none for {s} keys; give kv_segment_ids as well")


def _check_mask(mask: jax.Array, sizes: tuple[int, int, int, int]) -> None:
    """Raise ValueError if a mask is not bool [B or 1, H or 1, T or 1, S or 1]; `sizes` are B, H, T and S."""
    is_wrong = mask.dtype != bool or mask.ndim != 4
    if is_wrong or any(n not in (1, m) for n, m in zip(mask.shape, sizes, strict=True)):
        needed = ", ".join(f"{m} or 1" for m in sizes)
        raise ValueError(f"mask is {mask.dtype} {list(mask.shape)}; give bool [{needed}]")
