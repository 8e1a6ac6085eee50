"""A mixture of experts, `jp.experts`: a router chooses k of E functions for each token.

    y[n] = sum over the k experts e of token n of   weight[n, e] expert_e(x[n])   (+ shared(x[n]))

Dims: B rows, T tokens of a row, N = B T, D features, F hidden, E experts, k choices of a token, C slots of an expert.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .dispatch import combine, dispatch
from .dropless import dropless
from .overflow import Expert
from .routing import Router, balance_loss, check_choice, count_choices, z_loss
from .tables import accumulation_dtype

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
    _check_arrays(x, router_logits, weights)
    slots = ExpertSlots(capacity, drop, drop_within)
    (b, t, d), logits = x.shape, router_logits.astype(accumulation_dtype(router_logits.dtype))
    ids, gates, probabilities = Router(k, scores, normalize, scale, bias, groups, group_limit).choose(logits)
    counts, tokens = count_choices(ids, logits.shape[2]), jnp.asarray(x).reshape(b * t, d)
    y, dropped = slots.compute(expert, weights, tokens, ids, gates)
    y = y.astype(tokens.dtype).reshape(b, t, d)
    if shared is not None:
        y = y + expert(shared, tokens).reshape(b, t, d)
    return y, Routing(balance_loss(balance, counts, probabilities, t * k), z_loss(logits), counts / (t * k), dropped)


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


@dataclass(frozen=True)
class ExpertSlots:
    """The slots of experts, and the choices that keep theirs; the attributes are those arguments of `jp.experts`."""

    capacity: float | None
    drop: str
    drop_within: str

    def __post_init__(self) -> None:
        """Raise ValueError if an option has none of its values."""
        check_choice("drop", self.drop, DROPS)
        check_choice("drop_within", self.drop_within, WITHIN)
        if self.capacity is not None and not 0 < self.capacity < math.inf:
            raise ValueError(
                f"capacity={self.capacity}, in units of the mean load, must be above 0 and finite; use 1.25, for "
                "example, or None to drop nothing"
            )

    def compute(
        self, expert: Expert, weights: Any, tokens: jax.Array, ids: jax.Array, gates: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Compute each token by its experts.

        Args:
          expert, weights: as for `experts`.
          tokens: [N, D].
          ids, gates: the experts of each token and their weights, int32 and float [B, T, k].

        Returns:
          The weighted sums [N, D] in the dtype of the weights, and the share of each row's choices that was dropped,
          [B].
        """
        (b, t, k), num_experts = ids.shape, jax.tree.leaves(weights)[0].shape[0]
        flat_ids, flat_gates = ids.reshape(b * t, k), gates.reshape(b * t, k)
        # Without a capacity `dropless` also computes the choices beyond C.
        if self.capacity is None:
            return dropless(tokens, flat_ids, flat_gates, weights, expert), jnp.zeros(b, gates.dtype)
        slot_groups = b if self.drop_within == "row" else 1
        # An expert never needs more slots than a group has tokens; with as many, nothing is dropped and rows are
        # independent even if they share slots.
        tokens_per_group = b * t // slot_groups
        slots_per_group = min(tokens_per_group, math.ceil(self.capacity * tokens_per_group * k / num_experts))
        drops, slots = slots_per_group < tokens_per_group, slot_groups * slots_per_group
        couples = _COUPLES if drops and self.drop_within == "microbatch" else ""
        dispatch_tokens = dispatch(num_experts, slots, slot_groups, self.drop == "probability", couples, drops)
        rows, slot, choice = dispatch_tokens(tokens, flat_ids, flat_gates)
        y = combine(slot, jax.vmap(expert)(weights, rows), flat_gates, choice)
        # The table marks a choice without a slot by E C.
        return y, (slot == num_experts * slots).astype(gates.dtype).reshape(b, t * k).mean(axis=1)


def _check_arrays(x: jax.Array, logits: jax.Array, weights: Any) -> None:
    """Raise ValueError if the shapes of `experts`' arrays do not fit each other."""
    if x.ndim != 3:
        raise ValueError(f"x {list(x.shape)} has {x.ndim} dims; give [rows, tokens, features], where tokens may be 1")
    if logits.ndim != 3 or logits.shape[:2] != x.shape[:2]:
        raise ValueError(
            f"router_logits {list(logits.shape)} does not fit x {list(x.shape)}; give [{x.shape[0]}, {x.shape[1]}, "
            "number of experts]"
        )
    num_experts = logits.shape[2]
    if not (leaves := jax.tree.leaves(weights)):
        raise ValueError("weights has no leaves; give a tree of arrays [E, ...], one part for each expert")
    if misshapen := [leaf for leaf in leaves if leaf.shape[:1] != (num_experts,)]:
        raise ValueError(
            f"weights has a leaf {list(misshapen[0].shape)} for {num_experts} experts; give [{num_experts}, ...]"
        )
