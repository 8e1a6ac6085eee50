"""Which experts a token goes to, with what weights, and the losses that keep experts in balance.

Dims: B rows, T tokens of a row, E experts, k choices of a token, G groups of experts.
"""

import jax
import jax.numpy as jnp

from ....model.model import all_rows
from ....model.permutations import route

SCORES = ("softmax", "sigmoid")
BALANCES = ("sequence", "global", "microbatch")
_TINY = 1e-20  # DeepSeek-V3's: keeps weights finite where all scores of a token underflow


def chosen(
    logits: jax.Array,
    k: int,
    scores: str,
    normalize: bool,
    scale: float,
    bias: jax.Array | None,
    groups: int,
    group_limit: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The experts of each token, their weights, and the scores of all, which sum to 1 for a token.

    Args:
      logits: float32 [B, T, E].

    Returns int32 [B, T, k], the likeliest first; float32 [B, T, k]; float32 [B, T, E].
    """
    every = jax.nn.softmax(logits, axis=-1) if scores == "softmax" else jax.nn.sigmoid(logits)
    ranked = jax.lax.stop_gradient(every) + (0 if bias is None else jax.lax.stop_gradient(bias.astype(every.dtype)))
    if groups > 1:
        ranked = _limited(ranked, groups, group_limit)
    _, ids = jax.lax.top_k(ranked, k)
    weights = jnp.take_along_axis(every, ids, axis=-1)
    if normalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + _TINY)
    if scores == "sigmoid":
        every = every / (every.sum(axis=-1, keepdims=True) + _TINY)
    return ids, weights * scale, every


def _limited(ranked: jax.Array, groups: int, group_limit: int) -> jax.Array:
    """-inf outside the `group_limit` groups whose two best experts are best (DeepSeek-V3's nodes)."""
    per = ranked.shape[-1] // groups
    by_group = ranked.reshape(*ranked.shape[:-1], groups, per)
    best, _ = jax.lax.top_k(by_group, min(2, per))
    _, kept = jax.lax.top_k(best.sum(axis=-1), group_limit)
    on = jax.nn.one_hot(kept, groups, dtype=ranked.dtype).sum(axis=-2) > 0
    return jnp.where(on[..., None], by_group, -jnp.inf).reshape(ranked.shape)


def counted(ids: jax.Array, experts: int) -> jax.Array:
    """How many choices of each row fall on each expert: float32 [B, E]."""
    return jax.nn.one_hot(ids, experts, dtype=jnp.float32).sum(axis=(1, 2))


def _mean_of_rows(x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x.mean(axis=0), x.shape)


_of_microbatch = route(
    "mean_of_microbatch",
    ("rows",),
    _mean_of_rows,
    lambda x: (_mean_of_rows(x), None),
    lambda _, given: (_mean_of_rows(given),),
    couples="balance='microbatch' takes means over one replica's rows; use balance='global' for those of all replicas, "
    "or 'sequence' for each row's own",
    part=lambda ranks: _mean_of_rows,  # [B, E] has no tokens that ranks of `context` could part
    certain=True,
)


def balance_loss(kind: str, counts: jax.Array, every: jax.Array, choices: int) -> jax.Array:
    """sum_e f_e P_e of each row, [B]: f_e is E times the share of choices that fall on expert e, P_e its mean score.

    1 where both are even; f has no gradient (Fedus et al. 2022, arXiv:2101.03961, eq. 4-6). Over which tokens the two
    means go makes three losses, each a mean over rows of what is returned:

    - "sequence": f and P of each row (DeepSeek-V3, arXiv:2412.19437, eq. 17-20).
    - "global": f of the rows of all replicas (`jp.all_rows`, float32 [B, E]), so that experts may be used unevenly
      within a row (Qiu et al. 2025, arXiv:2501.11873). With P of each row the mean over rows is the loss of all of
      them, since f has no gradient.
    - "microbatch": f and P of this call's rows, whichever those are.

    Args:
      counts: [B, E], of `counted`.
      every: [B, T, E].
      choices: T k, of a row.
    """
    counts = jax.lax.stop_gradient(counts)
    share = counts * (counts.shape[-1] / choices)  # [B, E], each row's f
    mean = every.mean(axis=1)  # [B, E]
    if kind == "global":
        share = all_rows(share).mean(axis=0)
    if kind == "microbatch":
        share, mean = _of_microbatch(share), _of_microbatch(mean)
    return (share * mean).sum(axis=-1)


def z_loss(logits: jax.Array) -> jax.Array:
    """Mean over the tokens of each row of logsumexp(logits)^2, [B] (Zoph et al. 2022, arXiv:2202.08906, eq. 5)."""
    return jnp.square(jax.nn.logsumexp(logits, axis=-1)).mean(axis=1)
