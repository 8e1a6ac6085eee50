"""Routing: the experts of each token, their weights, and the losses that balance the load of experts.

    scores  = softmax(logits) or sigmoid(logits)                      [B, T, E]
    ids     = the k largest scores + bias, within the best groups     [B, T, k]
    weights = scores of ids, divided by their sum, times scale        [B, T, k]

Dims: B rows, T tokens of a row, E experts, k choices of a token, G groups of experts.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ....model.model import all_rows
from ....model.permutations import route

SCORES = ("softmax", "sigmoid")
BALANCES = ("sequence", "global", "microbatch")
_TINY = 1e-20  # as in DeepSeek-V3: weights stay finite if all scores of a token underflow


def check_choice(name: str, value: str, options: tuple[str, ...]) -> None:
    """Raise ValueError, which names the argument, unless its value is one of `options`."""
    if value not in options:
        raise ValueError(f"{name}={value!r}; use one of {options}")


@dataclass(frozen=True)
class Router:
    """How tokens choose their experts; the attributes are those arguments of `jp.experts`."""

    k: int
    scores: str
    normalize: bool
    scale: float
    bias: jax.Array | None
    groups: int
    group_limit: int | None

    def _check(self, num_experts: int) -> None:
        """Raise ValueError if an option has a wrong value for this number of experts."""
        k, bias, groups, group_limit = self.k, self.bias, self.groups, self.group_limit
        check_choice("scores", self.scores, SCORES)
        if not 1 <= k <= num_experts:
            raise ValueError(f"k={k} experts cannot be chosen from {num_experts}; use 1 to {num_experts}")
        if bias is not None and bias.shape != (num_experts,):
            raise ValueError(f"bias {list(bias.shape)} does not fit {num_experts} experts; give [{num_experts}]")
        if groups < 1 or num_experts % groups:
            raise ValueError(f"groups={groups} does not divide {num_experts} experts; use a divisor")
        if (group_limit is None) != (groups == 1) or not 1 <= (group_limit or 1) <= groups:
            raise ValueError(
                f"groups={groups} with group_limit={group_limit}; use groups of 2 or more with a group_limit of 1 to "
                "groups, or neither of them"
            )
        if group_limit is not None and group_limit * (num_experts // groups) < k:
            raise ValueError(
                f"group_limit={group_limit} groups of {num_experts // groups} experts have fewer than k={k} experts; "
                "use a larger group_limit, or a smaller k"
            )

    def choose(self, logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the experts of each token, their weights, and the scores of all experts.

        Args:
          logits: float32 [B, T, E].

        Returns:
          ids int32 [B, T, k], the largest score first; weights float32 [B, T, k]; scores float32 [B, T, E], which sum
          to 1 for each token.

        Raises:
          ValueError: an option has a wrong value, or one that does not fit the number of experts.
        """
        self._check(logits.shape[-1])
        is_softmax, bias = self.scores == "softmax", self.bias
        probabilities = jax.nn.softmax(logits, axis=-1) if is_softmax else jax.nn.sigmoid(logits)
        # Choosing has no gradient. The bias changes which experts are chosen, and not their weights.
        ranked = jax.lax.stop_gradient(probabilities) + (
            0 if bias is None else jax.lax.stop_gradient(bias.astype(probabilities.dtype))
        )
        if self.group_limit is not None:
            ranked = _limit_groups(ranked, self.groups, self.group_limit)
        _, ids = jax.lax.top_k(ranked, self.k)
        weights = jnp.take_along_axis(probabilities, ids, axis=-1)
        if self.normalize:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + _TINY)
        # The balance loss is 1 for an even load only if the scores of a token sum to 1.
        if not is_softmax:
            probabilities = probabilities / (probabilities.sum(axis=-1, keepdims=True) + _TINY)
        return ids, weights * self.scale, probabilities


def _limit_groups(ranked: jax.Array, groups: int, group_limit: int) -> jax.Array:
    """Set scores to -inf outside of the `group_limit` groups whose two best experts have the largest sum."""
    group_size = ranked.shape[-1] // groups
    by_group = ranked.reshape(*ranked.shape[:-1], groups, group_size)
    best_scores, _ = jax.lax.top_k(by_group, min(2, group_size))
    _, group_ids = jax.lax.top_k(best_scores.sum(axis=-1), group_limit)
    # [.., G]: a group is chosen at most once, so that the sum of its one-hots is 0 or 1.
    is_chosen = jax.nn.one_hot(group_ids, groups, dtype=ranked.dtype).sum(axis=-2) > 0
    return jnp.where(is_chosen[..., None], by_group, -jnp.inf).reshape(ranked.shape)


def count_choices(ids: jax.Array, experts: int) -> jax.Array:
    """Return the number of choices of each row for each expert: float32 [B, E]."""
    return jax.nn.one_hot(ids, experts, dtype=jnp.float32).sum(axis=(1, 2))


def _mean_of_rows(x: jax.Array) -> jax.Array:
    """Return the mean over rows, for each of them: [B, E] -> [B, E]. Its derivative is the same function."""
    return jnp.broadcast_to(x.mean(axis=0), x.shape)


_mean_over_microbatch = route(
    "mean_of_microbatch",
    ("rows",),
    _mean_of_rows,
    lambda x: (_mean_of_rows(x), None),
    lambda _, cotangent: (_mean_of_rows(cotangent),),
    couples="balance='microbatch' takes means over one replica's rows; use balance='global' for means over the rows of "
    "all replicas, or 'sequence' for means of each row",
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

    Raises:
      ValueError: there is no such kind.
    """
    check_choice("balance", kind, BALANCES)
    # Counts of choices have no derivative. The gradient flows through the mean scores.
    counts = jax.lax.stop_gradient(counts)
    share = counts * (counts.shape[-1] / choices)  # [B, E], each row's f
    mean = probabilities.mean(axis=1)  # [B, E]
    if kind == "global":
        share = all_rows(share).mean(axis=0)
    if kind == "microbatch":
        share, mean = _mean_over_microbatch(share), _mean_over_microbatch(mean)
    return (share * mean).sum(axis=-1)


def z_loss(logits: jax.Array) -> jax.Array:
    """Return each row's mean over tokens of logsumexp(logits)^2, [B] (Zoph et al. 2022, arXiv:2202.08906, eq. 5)."""
    return jnp.square(jax.nn.logsumexp(logits, axis=-1)).mean(axis=1)
