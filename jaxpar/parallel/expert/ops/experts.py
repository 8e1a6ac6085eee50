"""A mixture of experts: each token is computed by k of E functions, which a router chooses.

Dims: B rows, T tokens of a row, N = B T, D features, F hidden, E experts, k choices of a token, C slots of an expert.
"""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .dispatch import combine, dispatch
from .dropless import dropless
from .overflow import Expert
from .routing import BALANCES, SCORES, balance_loss, chosen, counted, z_loss
from .tables import wide

DROPS = ("position", "probability")
WITHIN = ("row", "microbatch")
_COUPLES = (
    "drops the tokens beyond an expert's capacity, which depends on the rows that share a microbatch; use "
    "drop_within='row', or capacity=None, which drops nothing"
)


class Routing(NamedTuple):
    """What a mixture did with its tokens, row by row: float32, whose means over rows are losses and metrics.

    Attributes:
      balance: [B], the balance loss; 1 where all experts are used alike.
      z: [B], the mean of logsumexp(router_logits)^2.
      load: [B, E], the share of a row's choices that fall on each expert; they sum to 1.
      dropped: [B], the share of a row's choices that were dropped; 0 without a capacity.
    """

    balance: jax.Array
    z: jax.Array
    load: jax.Array
    dropped: jax.Array


def swiglu(weights: Any, x: jax.Array) -> jax.Array:
    """(silu(x gate) * (x up)) down (Shazeer 2020, arXiv:2002.05202), of {"gate", "up": [D, F], "down": [F, D]}."""
    return (jax.nn.silu(x @ weights["gate"]) * (x @ weights["up"])) @ weights["down"]


def experts(
    x: jax.Array,
    router_logits: jax.Array,
    weights: Any,
    *,
    k: int,
    capacity: float | None = None,
    expert: Expert = swiglu,
    shared: Any = None,
    scores: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    bias: jax.Array | None = None,
    groups: int = 1,
    group_limit: int | None = None,
    balance: Literal["sequence", "global", "microbatch"] = "sequence",
    drop: Literal["position", "probability"] = "position",
    drop_within: Literal["row", "microbatch"] = "row",
) -> tuple[jax.Array, Routing]:
    """Each token through the k experts that its router prefers, weighted and added up (Shazeer et al. 2017,
    arXiv:1701.06538; Mixtral: Jiang et al. 2024, arXiv:2401.04088, section 2.1).

    Without a capacity no token is dropped: each expert computes its first C = 1.25 N k / E tokens, rounded up to 8, in
    one batched matmul, and what overflows follows in blocks, as many as there are. Under `context` each rank does so
    with its own tokens. With a capacity, C = capacity T k / E of each row (or capacity N k / E of all), and what
    overflows is dropped: it keeps nothing but its residual connection, and its `shared` experts.
    Communicates nothing, but what `jp.all_rows` gathers for balance="global": float32 [B, E].

    Memory: between forward and backward, x, what goes into the experts and comes out, [E, C, D], and what `expert`
    keeps.

    Args:
      x: float [B, T, D], rows first.
      router_logits: float [B, T, E]; routing computes in float32.
      weights: a tree of leaves [E, ...], one part for each expert.
      k: experts of a token, 1 to E.
      capacity: None, or slots of an expert in units of the mean load (GShard: Lepikhin et al. 2021, arXiv:2006.16668).
      expert: (the part of `weights` of one expert, [n, D]) -> [n, D], each token for itself; SwiGLU by default, with
        weights {"gate": [E, D, F], "up": [E, D, F], "down": [E, F, D]}.
      shared: as `weights` but without the dim E: an expert of every token (DeepSeekMoE: Dai et al. 2024,
        arXiv:2401.06066), with weight 1.
      scores: a softmax over all experts, or a sigmoid of each (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
      normalize: the k weights of a token are divided by their sum.
      scale: a factor of the weights, after that.
      bias: [E], added to scores where experts are chosen, not where they are weighted: balance without a loss (Wang et
        al. 2024, arXiv:2408.15664). It gets no gradient; `balanced` makes the next one.
      groups, group_limit: experts lie in so many groups of E / groups, and a token goes to `group_limit` of them, those
        whose two best experts are best (DeepSeek-V3's limit of nodes); groups=1: no limit.
      balance: over which tokens the balance loss takes its means: of each "sequence" (row), "global" (the rows of all
        replicas in one microbatch), or of this "microbatch" of this replica, which depends on the layout, and which
        jaxpar refuses where rows are spread unless the model says rows="independent". Three different losses.
      drop: which choices keep their slots, the first by "position" or the largest by "probability" (their weight).
      drop_within: whether each "row" has its own slots, so that what is dropped is the same in every layout, or the
        "microbatch" of a replica shares them: a warning where rows are spread.

    Returns:
      [B, T, D] in the dtype of x, and a `Routing`.

    Raises:
      ValueError: shapes do not fit, or a choice is none of the above; says which.

    >>> draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
    >>> weights = {"gate": draw(0, 4, 8, 16), "up": draw(1, 4, 8, 16), "down": draw(2, 4, 16, 8)}
    >>> y, routing = experts(draw(3, 2, 5, 8), draw(4, 2, 5, 4), weights, k=2)
    >>> y.shape, routing.load.sum(axis=-1).tolist(), routing.dropped.tolist()
    ((2, 5, 8), [1.0, 1.0], [0.0, 0.0])
    """
    count = _check(
        x, router_logits, weights, k, capacity, scores, bias, groups, group_limit, balance, drop, drop_within
    )
    x, (b, t, d) = jnp.asarray(x), x.shape
    logits = router_logits.astype(wide(router_logits.dtype))
    ids, gates, every = chosen(logits, k, scores, normalize, scale, bias, groups, group_limit or groups)
    counts = counted(ids, count)
    tokens, flat_ids, flat_gates = x.reshape(b * t, d), ids.reshape(b * t, k), gates.reshape(b * t, k)

    if capacity is None:
        y, dropped = dropless(tokens, flat_ids, flat_gates, weights, expert), jnp.zeros(b, logits.dtype)
    else:
        parts = b if drop_within == "row" else 1
        per = b * t // parts
        each = min(per, math.ceil(capacity * per * k / count))
        couples = _COUPLES if drop_within == "microbatch" and each < per else ""
        by_weight, slots = drop == "probability", parts * each
        dispatched = dispatch(count, slots, parts, by_weight, couples, each < per)
        rows, slot, choice = dispatched(tokens, flat_ids, flat_gates)
        y = combine(slot, jax.vmap(expert)(weights, rows), flat_gates, choice)
        dropped = (slot == count * slots).astype(logits.dtype).reshape(b, t * k).mean(axis=1)
    y = y.astype(x.dtype).reshape(b, t, d)
    if shared is not None:
        y = y + expert(shared, tokens).reshape(b, t, d)
    losses = balance_loss(balance, counts, every, t * k), z_loss(logits)
    return y, Routing(*losses, counts / (t * k), dropped)


def balanced(bias: jax.Array, load: jax.Array, rate: float = 1e-3) -> jax.Array:
    """The bias of the next step, float [E]: up by `rate` where an expert had less than the mean load, down where it had
    more (Wang et al. 2024, arXiv:2408.15664, algorithm 1; DeepSeek-V3 takes rate 0.001).

    Args:
      bias: [E].
      load: [E], the mean of `Routing.load` over the rows of the step.
    """
    return bias + rate * jnp.sign(load.mean() - load).astype(bias.dtype)


def _check(
    x: jax.Array,
    logits: jax.Array,
    weights: Any,
    k: int,
    capacity: float | None,
    scores: str,
    bias: jax.Array | None,
    groups: int,
    group_limit: int | None,
    balance: str,
    drop: str,
    drop_within: str,
) -> int:
    """The number of experts."""
    if x.ndim != 3:
        raise ValueError(
            f"x {list(x.shape)} has {x.ndim} dims; give [rows, tokens, features], with tokens 1 if need be"
        )
    if logits.ndim != 3 or logits.shape[:2] != x.shape[:2]:
        raise ValueError(f"router_logits {list(logits.shape)}; needs {[*x.shape[:2]]} and the number of experts")
    count = logits.shape[2]
    if not (leaves := jax.tree.leaves(weights)):
        raise ValueError("weights has no leaves; give a tree of arrays [E, ...], one part for each expert")
    if wrong := [leaf for leaf in leaves if leaf.shape[:1] != (count,)]:
        raise ValueError(f"weights has a leaf {list(wrong[0].shape)} for {count} experts; needs [{count}, ...]")
    if not 1 <= k <= count:
        raise ValueError(f"k={k} experts of {count}; use 1 to {count}")
    if capacity is not None and not 0 < capacity < math.inf:
        raise ValueError(f"capacity={capacity} in units of the mean load; use 1.25, say, or None to drop nothing")
    if bias is not None and bias.shape != (count,):
        raise ValueError(f"bias {list(bias.shape)} for {count} experts; needs [{count}]")
    if groups < 1 or count % groups:
        raise ValueError(f"groups={groups} does not divide {count} experts; use a divisor")
    if (group_limit is None) != (groups == 1) or not 1 <= (group_limit or 1) <= groups:
        raise ValueError(f"groups={groups} with group_limit={group_limit}; use both, with a limit of 1 to {groups}")
    if group_limit is not None and group_limit * (count // groups) < k:
        raise ValueError(
            f"group_limit={group_limit} groups of {count // groups} experts have fewer than k={k}; use more"
        )
    known = {"scores": (scores, SCORES), "balance": (balance, BALANCES), "drop": (drop, DROPS)}
    for name, (given, names) in {**known, "drop_within": (drop_within, WITHIN)}.items():
        if given not in names:
            raise ValueError(f"{name}={given!r}; use one of {names}")
    return count
