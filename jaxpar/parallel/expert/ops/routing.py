"""Routing: the experts of each token, their weights, and the losses that balance the load of experts.

    scores  = softmax(logits) or sigmoid(logits)                      [B, T, E]
    ids     = the k largest scores + bias, within the best groups     [B, T, k]
    weights = scores of ids, divided by their sum, times scale        [B, T, k]

Dims: B rows, T tokens of a row, E experts, k choices of a token, G groups of experts.
"""

import jax
import jax.numpy as jnp

from ....model.model import all_rows
from ....model.permutations import route

SCORES = ("softmax", "sigmoid")
BALANCES = ("sequence", "global", "microbatch")
_TINY = 1e-20  # as in DeepSeek-V3: weights stay finite if all scores of a token underflow


def choose_experts(
    logits: jax.Array,
    k: int,
    scores: str,
    normalize: bool,
    scale: float,
    bias: jax.Array | None,
    groups: int,
    group_limit: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the experts of each token, their weights, and the scores of all experts.

    Args:
      logits: float32 [B, T, E].
      k, scores, normalize, scale, bias, groups, group_limit: as for `jp.experts`.

    Returns:
      ids int32 [B, T, k], the largest score first; weights float32 [B, T, k]; scores float32 [B, T, E], which sum to 1
      for each token.
    """
    probabilities = jax.nn.softmax(logits, axis=-1) if scores == "softmax" else jax.nn.sigmoid(logits)
    # Choosing has no gradient. The bias changes which experts are chosen, and not their weights.
    ranked = jax.lax.stop_gradient(probabilities) + (
        0 if bias is None else jax.lax.stop_gradient(bias.astype(probabilities.dtype))
    )
    if groups > 1:
        ranked = _limit_groups(ranked, groups, group_limit)
    _, ids = jax.lax.top_k(ranked, k)
    weights = jnp.take_along_axis(probabilities, ids, axis=-1)
    if normalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + _TINY)
    # The balance loss is 1 for an even load only if the scores of a token sum to 1.
    if scores == "sigmoid":
        probabilities = probabilities / (probabilities.sum(axis=-1, keepdims=True) + _TINY)
    return ids, weights * scale, probabilities


def _limit_groups(ranked: jax.Array, groups: int, group_limit: int) -> jax.Array:
    """Set scores to -inf outside of the `group_limit` groups whose two best experts have the largest sum."""
    group_size = ranked.shape[-1] // groups
    by_group = ranked.reshape(*ranked.shape[:-1], groups, group_size)
    best_scores, _ = jax.lax.top_k(by_group, min(2, group_size))
    _, group_ids = jax.lax.top_k(best_scores.sum(axis=-1), group_limit)
    is_chosen = jax.nn.one_hot(group_ids, groups, dtype=ranked.dtype).sum(axis=-2) > 0
    return jnp.where(is_chosen[..., None], by_group, -jnp.inf).reshape(ranked.shape)


def count_choices(ids: jax.Array, experts: int) -> jax.Array:
    """Return the number of choices of each row for each expert: float32 [B, E]."""
    return jax.nn.one_hot(ids, experts, dtype=jnp.float32).sum(axis=(1, 2))


def _mean_of_rows(x: jax.Array) -> jax.Array:
    """Return the mean over rows, for each of them: [B, E] -> [B, E]. Its derivative is the same function."""
    return jnp.broadcast_to(x.mean(axis=0), x.shape)


_of_microbatch = route(
    "mean_of_microbatch",
    ("rows",),
    _mean_of_rows,
    lambda x: (_mean_of_rows(x), None),
    lambda _, cotangent: (_mean_of_rows(cotangent),),
    couples="balance='microbatch' takes means over one replica's rows; use balance='global' for those of all replicas, "
    "or 'sequence' for each row's own",
    part=lambda ranks: _mean_of_rows,  # [B, E] has no dim of tokens for ranks of `context` to split
    certain=True,
)


def balance_loss(kind: str, counts: jax.Array, probabilities: jax.Array, choices: int) -> jax.Array:
    """Return the balance loss of each row, [B]: the sum over experts e of f_e P_e.

    f_e is E times the share of choices for expert e, without a gradient; P_e is its mean score. The loss is 1 if both
    are uniform (Fedus et al. 2022, arXiv:2101.03961, eq. 4-6). f and P may be means over different sets of tokens,
    which makes three losses. Each is the mean over rows of the returned values:

    - "sequence": f and P of each row (DeepSeek-V3, arXiv:2412.19437, eq. 17-20).
    - "global": f of the rows of all replicas (`jp.all_rows`, float32 [B, E]), so that experts may be used unevenly
      within a row (Qiu et al. 2025, arXiv:2501.11873). P of each row suffices: since f has no gradient and is common to
      all rows, the mean over rows of f P is f times the mean of P.
    - "microbatch": f and P of the rows of this call.

    Args:
      kind: one of the three.
      counts: [B, E], from `count_choices`.
      probabilities: the scores, [B, T, E].
      choices: T k, the choices of a row.
    """
    # Counts of choices have no derivative. The gradient flows through the mean scores.
    counts = jax.lax.stop_gradient(counts)
    share = counts * (counts.shape[-1] / choices)  # [B, E], each row's f
    mean = probabilities.mean(axis=1)  # [B, E]
    if kind == "global":
        share = all_rows(share).mean(axis=0)
    if kind == "microbatch":
        share, mean = _of_microbatch(share), _of_microbatch(mean)
    return (share * mean).sum(axis=-1)


def z_loss(logits: jax.Array) -> jax.Array:
    """Return each row's mean over tokens of logsumexp(logits)^2, [B] (Zoph et al. 2022, arXiv:2202.08906, eq. 5)."""
    return jnp.square(jax.nn.logsumexp(logits, axis=-1)).mean(axis=1)
