"""A mixture of experts, `jp.experts`: a router chooses k of E functions for each token.

    y[n] = sum over the k experts e of token n of   weight[n, e] expert_e(x[n])   (+ shared(x[n]))

Dims: B rows, T tokens of a row, N = B T, D features, F hidden, E experts, k choices of a token, C slots of an expert.
"""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .dispatch import combine, dispatch
from .dropless import dropless
from .overflow import Expert
from .routing import BALANCES, SCORES, balance_loss, choose_experts, count_choices, z_loss
from .tables import wide

DROPS = ("position", "probability")
WITHIN = ("row", "microbatch")
_COUPLES = (
    "drops the tokens beyond an expert's capacity, which depends on the rows that share a microbatch; use "
    "drop_within='row', or capacity=None, which drops nothing"
)


class Routing(NamedTuple):
    """Statistics of a mixture for each row, float32. Their means over rows are losses and metrics.

    Attributes:
      balance: [B], the balance loss; 1 if all experts are used equally.
      z: [B], the mean of logsumexp(router_logits)^2.
      load: [B, E], the share of a row's choices for each expert; they sum to 1.
      dropped: [B], the share of a row's choices that were dropped; 0 without a capacity.
    """

    balance: jax.Array
    z: jax.Array
    load: jax.Array
    dropped: jax.Array


def swiglu(weights: Any, x: jax.Array) -> jax.Array:
    """Return (silu(x gate) * (x up)) down (Shazeer 2020, arXiv:2002.05202).

    Args:
      weights: {"gate": [D, F], "up": [D, F], "down": [F, D]}.
      x: [.., D].
    """
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
    """Compute each token by the k experts that its router prefers, and add up the results (Shazeer et al. 2017,
    arXiv:1701.06538; Mixtral: Jiang et al. 2024, arXiv:2401.04088, section 2.1).

    Without a capacity no token is dropped. Each expert computes its first C = 1.25 N k / E tokens, rounded up to 8, in
    one batched matmul. Tokens beyond them follow in blocks, as many as there are. Under `context` each rank does so
    with its own tokens.

    With a capacity, each expert has C = capacity T k / E slots for each row (or capacity N k / E for all rows). A
    token beyond them is dropped: it keeps only its residual connection and its `shared` experts.

    Communicates nothing, except for balance="global": `jp.all_rows` gathers float32 [B, E].

    Memory: between forward and backward, x, the inputs and outputs of the experts, [E, C, D], and what `expert` saves.

    Args:
      x: float [B, T, D], rows first.
      router_logits: float [B, T, E]; routing computes in float32.
      weights: a tree of leaves [E, ...], one part for each expert.
      k: experts of a token, 1 to E.
      capacity: None, or slots of an expert in units of the mean load (GShard: Lepikhin et al. 2021, arXiv:2006.16668).
      expert: (the part of `weights` of one expert, [n, D]) -> [n, D], each token independently. The default is SwiGLU,
        with weights {"gate": [E, D, F], "up": [E, D, F], "down": [E, F, D]}.
      shared: as `weights` but without the dim E: an expert of every token (DeepSeekMoE: Dai et al. 2024,
        arXiv:2401.06066), with weight 1.
      scores: a softmax over all experts, or a sigmoid of each (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
      normalize: whether the k weights of a token are divided by their sum.
      scale: a factor of the weights, after that.
      bias: [E], added to scores to choose experts, but not to weight them: balance without a loss (Wang et al. 2024,
        arXiv:2408.15664). It gets no gradient; `balanced` returns the next one.
      groups, group_limit: experts are divided into `groups` groups of E / groups, and a token may use `group_limit` of
        them: those whose two best experts have the largest sum (DeepSeek-V3's limit of nodes). groups=1: no limit.
      balance: the tokens over which the balance loss takes its means: each "sequence" (row); "global", the rows of all
        replicas in one microbatch; or "microbatch", the rows of this replica's microbatch. These are three different
        losses. The last depends on the layout: jaxpar raises an error if rows are spread, unless the model says
        rows="independent".
      drop: which choices keep their slots: the first by "position", or the largest by "probability" (their weight).
      drop_within: whether each "row" has its own slots, so that every layout drops the same tokens, or the "microbatch"
        of a replica shares them, which gives a warning if rows are spread.

    Returns:
      [B, T, D] in the dtype of x, and a `Routing`.

    Raises:
      ValueError: shapes do not fit each other, or an option has none of the above values.

    >>> draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
    >>> weights = {"gate": draw(0, 4, 8, 16), "up": draw(1, 4, 8, 16), "down": draw(2, 4, 16, 8)}
    >>> y, routing = experts(draw(3, 2, 5, 8), draw(4, 2, 5, 4), weights, k=2)
    >>> y.shape, routing.load.sum(axis=-1).tolist(), routing.dropped.tolist()
    ((2, 5, 8), [1.0, 1.0], [0.0, 0.0])
    """
    num_experts = _check(
        x, router_logits, weights, k, capacity, scores, bias, groups, group_limit, balance, drop, drop_within
    )
    # 1. Routing.
    x, (b, t, d) = jnp.asarray(x), x.shape
    logits = router_logits.astype(wide(router_logits.dtype))
    ids, gates, probabilities = choose_experts(logits, k, scores, normalize, scale, bias, groups, group_limit or groups)
    counts = count_choices(ids, num_experts)
    tokens, flat_ids, flat_gates = x.reshape(b * t, d), ids.reshape(b * t, k), gates.reshape(b * t, k)

    # 2. Experts. Without a capacity `dropless` also computes the choices beyond C.
    if capacity is None:
        y, dropped = dropless(tokens, flat_ids, flat_gates, weights, expert), jnp.zeros(b, logits.dtype)
    else:
        slot_groups = b if drop_within == "row" else 1
        # An expert never needs more slots than a group has tokens; with as many, nothing is dropped and rows are
        # independent even if they share slots.
        tokens_per_group = b * t // slot_groups
        slots_per_group = min(tokens_per_group, math.ceil(capacity * tokens_per_group * k / num_experts))
        couples = _COUPLES if drop_within == "microbatch" and slots_per_group < tokens_per_group else ""
        by_weight, slots = drop == "probability", slot_groups * slots_per_group
        dispatch_tokens = dispatch(
            num_experts, slots, slot_groups, by_weight, couples, slots_per_group < tokens_per_group
        )
        rows, slot, choice = dispatch_tokens(tokens, flat_ids, flat_gates)
        y = combine(slot, jax.vmap(expert)(weights, rows), flat_gates, choice)
        # The table marks a choice without a slot by E C.
        dropped = (slot == num_experts * slots).astype(logits.dtype).reshape(b, t * k).mean(axis=1)

    # 3. Shared experts, losses and metrics.
    y = y.astype(x.dtype).reshape(b, t, d)
    if shared is not None:
        y = y + expert(shared, tokens).reshape(b, t, d)
    losses = balance_loss(balance, counts, probabilities, t * k), z_loss(logits)
    return y, Routing(*losses, counts / (t * k), dropped)


def balanced(bias: jax.Array, load: jax.Array, rate: float = 1e-3) -> jax.Array:
    """Return the bias of the next step, float [E], which balances experts without a loss.

    It rises by `rate` if an expert had less than the mean load, and falls by `rate` if it had more (Wang et al. 2024,
    arXiv:2408.15664, algorithm 1; DeepSeek-V3 uses rate 0.001).

    Args:
      bias: [E].
      load: [E], the mean of `Routing.load` over the rows of the step.
      rate: the change per step.
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
    """Check the arguments of `experts`, and return the number of experts."""
    if x.ndim != 3:
        raise ValueError(
            f"x {list(x.shape)} has {x.ndim} dims; give [rows, tokens, features], with tokens 1 if need be"
        )
    if logits.ndim != 3 or logits.shape[:2] != x.shape[:2]:
        raise ValueError(f"router_logits {list(logits.shape)}; needs {[*x.shape[:2]]} and the number of experts")
    num_experts = logits.shape[2]
    if not (leaves := jax.tree.leaves(weights)):
        raise ValueError("weights has no leaves; give a tree of arrays [E, ...], one part for each expert")
    if misshapen := [leaf for leaf in leaves if leaf.shape[:1] != (num_experts,)]:
        raise ValueError(
            f"weights has a leaf {list(misshapen[0].shape)} for {num_experts} experts; needs [{num_experts}, ...]"
        )
    if not 1 <= k <= num_experts:
        raise ValueError(f"k={k} experts of {num_experts}; use 1 to {num_experts}")
    if capacity is not None and not 0 < capacity < math.inf:
        raise ValueError(f"capacity={capacity} in units of the mean load; use 1.25, say, or None to drop nothing")
    if bias is not None and bias.shape != (num_experts,):
        raise ValueError(f"bias {list(bias.shape)} for {num_experts} experts; needs [{num_experts}]")
    if groups < 1 or num_experts % groups:
        raise ValueError(f"groups={groups} does not divide {num_experts} experts; use a divisor")
    if (group_limit is None) != (groups == 1) or not 1 <= (group_limit or 1) <= groups:
        raise ValueError(f"groups={groups} with group_limit={group_limit}; use both, with a limit of 1 to {groups}")
    if group_limit is not None and group_limit * (num_experts // groups) < k:
        raise ValueError(
            f"group_limit={group_limit} groups of {num_experts // groups} experts have fewer than k={k}; use more"
        )
    choices = {"scores": (scores, SCORES), "balance": (balance, BALANCES), "drop": (drop, DROPS)}
    for name, (value, options) in {**choices, "drop_within": (drop_within, WITHIN)}.items():
        if value not in options:
            raise ValueError(f"{name}={value!r}; use one of {options}")
    return num_experts
