"""The passes that rewrite a traced loss into the program of one device, in order, and what they note for reports."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from ..layout.layout import Layout
from ..layout.leaves import Leaf
from ..numerics.fp8 import in_fp8, of_blocks
from ..numerics.logits import Logits, chunked
from ..parallel.context import RULES as CONTEXT_RULES
from ..parallel.context import AttentionMode, calls, choose, split_sequence
from ..parallel.context.attention import spelled
from ..parallel.expert import RULES as EXPERT_RULES
from ..parallel.expert import exchange_tokens
from ..parallel.pipeline.schedules import Schedule
from ..parallel.tensor import RULES, localise
from ..program import jaxpr as jx
from ..slicing.rolling.loops import RolledLoop, roll_loops
from ..slicing.side_by_side import side_by_side
from ..strategy import Strategy
from .refusals import warn_no_rule
from .writes import Writes


@dataclass(frozen=True)
class Setting:
    """The strategy under which a loss is rewritten, and what it became on a mesh.

    Attributes:
      layout, strategy: of the step.
      axes: the mesh axes over which rows are spread and that have several devices, name -> size.
      schedule: the pipeline's; None without one.
    """

    layout: Layout
    strategy: Strategy
    axes: dict[str, int]
    schedule: Schedule | None = None

    @property
    def ranks(self) -> int:
        """The number of tensor ranks."""
        return self.layout.mesh.shape["tensor"]

    @property
    def takes_attention(self) -> bool:
        """Whether attention that the loss spells out becomes `jp.attention`."""
        shared = self.layout.mesh.shape["context"] > 1 and self.strategy.attention != "gather"
        return shared or self.strategy.kernels == "fused"

    @property
    def summed(self) -> dict[str, int]:
        """The mesh axes over which totals and counts are summed: of rows, and of positions."""
        context = self.layout.mesh.shape["context"]
        return self.axes | ({"context": context} if context > 1 else {})

    @property
    def traced_axes(self) -> dict[str, int]:
        """The mesh axes that a program may name: what it is on one rank of `context` and `tensor`."""
        return self.summed | ({"tensor": self.ranks} if self.ranks > 1 else {})

    @property
    def staged(self) -> list[bool]:
        """For each parameter, whether it is a stack of layers that the stages of a pipeline own."""
        return [leaf.layers is not None for leaf in self.layout.storage.units]


@dataclass(frozen=True)
class PlacedLoss:
    """A traced loss between two passes, with the placements of its parameters.

    Attributes:
      flat: its equations. The inputs are the parameters, then the leaves of `rest`.
      placements: for each parameter, the part that `flat` reads: of all ranks, until a pass takes one rank's.
      rest: abstract variables, rows of one microbatch and key.
      sums: the number of its first outputs that are totals and counts.
      whole: its equations on all parameters, before a pass split them over ranks.
    """

    flat: jx.Flat
    placements: Sequence[Leaf]
    rest: tuple[Any, Any, Any]
    sums: int
    whole: jx.Flat

    def of_rank(self, fun: Callable[..., Any], placements: Sequence[Leaf], axes: Mapping[str, int]) -> "PlacedLoss":
        """The loss that a function computes from other parts of the parameters, and from the same other inputs."""
        inputs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.flat.invars]
        parts = [jax.ShapeDtypeStruct(leaf.logical, x.dtype) for leaf, x in zip(placements, inputs, strict=False)]
        flat, _ = jx.trace(fun, *parts, *inputs[len(parts) :], axes=dict(axes))
        return replace(self, flat=flat, placements=placements)


@dataclass
class Notes:
    """What the passes and the checks of one traced loss found, for reports.

    Attributes:
      attention_mode: how context ranks attend; None without them.
      attention_spelled: attention that the loss spells out, by its line: which keys count, and the type of its scores.
      attention_not_taken: other attention that it spells out, by its line: why.
      loops: the Python loops over layers that became scans, and why others did not.
      experts_gathered: where expert ranks gather experts and do not exchange tokens, and bytes of all experts.
      experts_fewer: where they do because the tokens would be more, and bytes of those.
      tokens_gathered: where they gather the tokens of all ranks, and bytes of those and of what would be sent.
      gathered: what tensor ranks gather for want of a rule: where, and bytes.
      logits: which logits of a cross-entropy are made in chunks.
      fp8: under precision="fp8" why the products of each leaf are not in FP8, "" where they are.
      doubts: how the loss may couple rows.
      unread: paths of the batch's leaves that the loss does not read, in a step or without a key in evaluate.
      touched: positions of the model's own leaves that the loss hands back as other values.
      writes: what it writes to them.
    """

    attention_mode: AttentionMode | None = None
    attention_spelled: dict[str, tuple[str, Any]] = field(default_factory=dict)
    attention_not_taken: dict[str, str] = field(default_factory=dict)
    loops: Sequence[RolledLoop] = ()
    experts_gathered: dict[str, int] = field(default_factory=dict)
    experts_fewer: dict[str, int] = field(default_factory=dict)
    tokens_gathered: dict[str, tuple[int, int]] = field(default_factory=dict)
    gathered: dict[str, int] = field(default_factory=dict)
    logits: dict[str, Logits] = field(default_factory=dict)
    fp8: dict[str, str] = field(default_factory=dict)
    doubts: Sequence[str] = ()
    unread: Sequence[str] = ()
    touched: Sequence[int] = ()
    writes: Writes | None = None

    @property
    def in_fp8(self) -> list[str]:
        """The paths of leaves whose products are all in FP8."""
        return [path for path, why in self.fp8.items() if not why]


def _take_attention(how: Setting, loss: PlacedLoss, notes: Notes) -> PlacedLoss:
    fused, shared = how.strategy.kernels == "fused", how.layout.mesh.shape["context"] > 1
    take = how.takes_attention
    replay = not take or (shared and how.strategy.attention != "gather")
    found = spelled(loss.flat, how.traced_axes, replay, biases=fused and not shared, take=take)
    notes.attention_spelled = {line: (what, found.scores[line]) for line, what in found.taken.items()}
    notes.attention_not_taken = dict(found.not_taken)
    if fused and not found.taken and not any(calls(loss.flat.eqns)):
        why = "; ".join(f"that of {line} {why}" for line, why in found.not_taken.items()) or "it spells none out"
        raise ValueError(
            f"kernels='fused' is for attention, and the loss has none that a kernel takes: {why}; leave kernels out"
        )
    return replace(loss, flat=found.flat)


def _roll(how: Setting, loss: PlacedLoss, notes: Notes) -> PlacedLoss:
    families = how.layout.storage.families
    flat, notes.loops = roll_loops(loss.flat, families, len(loss.placements), how.traced_axes, how.staged)
    return replace(loss, flat=flat, whole=flat)


def _split(how: Setting, loss: PlacedLoss, notes: Notes) -> PlacedLoss:
    leaves, (variables, rows, _), ranks = len(loss.placements), loss.rest, how.layout.mesh.shape["context"]
    before = leaves + len(jax.tree.leaves(variables))
    batch = range(before, before + len(jax.tree.leaves(rows)))
    apart = how.layout.storage.cut or (how.schedule is not None and how.schedule.branches)
    branching = how.schedule.kind if apart and how.schedule else ""  # ranks are not in one layer at one time
    mode = choose(how.strategy.attention, loss.flat.eqns, ranks, how.ranks, branching, notes.attention_not_taken)
    notes.attention_mode = mode
    fun = split_sequence(loss.flat, leaves, batch, loss.sums, ranks, mode, CONTEXT_RULES, how.ranks, not branching)
    return loss.of_rank(fun, loss.placements, how.traced_axes)


def _exchange(how: Setting, loss: PlacedLoss, notes: Notes) -> PlacedLoss:
    dims = [None if leaf.expert is None else leaf.expert - leaf.stage for leaf in loss.placements]
    fun, found = exchange_tokens(loss.flat, dims, how.layout.mesh.shape["expert"], EXPERT_RULES)
    loss = loss.of_rank(fun, [leaf.of_experts for leaf in loss.placements], how.traced_axes)
    notes.experts_gathered, notes.experts_fewer, notes.tokens_gathered = found.gathered, found.fewer, found.all_tokens
    return loss


def _localise(how: Setting, loss: PlacedLoss, notes: Notes) -> PlacedLoss:
    dims = [None if leaf.tensor is None else leaf.tensor - leaf.stage for leaf in loss.placements]
    fun, notes.gathered = localise(loss.flat, dims, how.layout.ruled, how.ranks, how.strategy.sequence, RULES)
    loss = loss.of_rank(fun, [leaf.local for leaf in loss.placements], how.traced_axes)
    warn_no_rule(notes.gathered, how.ranks)
    return loss


def _chunk(how: Setting, loss: PlacedLoss, notes: Notes) -> PlacedLoss:
    flat, notes.logits = chunked(loss.flat, len(loss.placements), how.strategy.logits, how.traced_axes)
    return replace(loss, flat=flat)


def _double(how: Setting, loss: PlacedLoss, notes: Notes) -> PlacedLoss:
    shared = len(loss.placements) + len(jax.tree.leaves(loss.rest[0]))
    return replace(loss, flat=side_by_side(loss.flat, shared, loss.sums, how.strategy.concurrent, how.traced_axes))


def _quantise(how: Setting, loss: PlacedLoss, notes: Notes) -> PlacedLoss:
    alike = of_blocks([(leaf.path, leaf.shape) for leaf in how.layout.storage.models])
    leaves = [(leaf.path, leaf.rolled or leaf.path in alike) for leaf in how.layout.storage.units]
    flat, notes.fp8 = in_fp8(loss.whole, loss.flat, leaves, how.strategy, how.layout.policy.compute)
    return replace(loss, flat=flat)


@dataclass(frozen=True)
class LossPass:
    """A rewriting of a loss.

    Attributes:
      name: what it does, a verb.
      applies: whether a setting asks for it.
      rewrite: from a loss to a loss with the same values on all devices together; it writes what reports need into the
        notes.
    """

    name: str
    applies: Callable[[Setting], bool]
    rewrite: Callable[[Setting, PlacedLoss, Notes], PlacedLoss]


def _always(how: Setting) -> bool:
    return True


PASSES = (
    # Attention that the loss spells out becomes `jp.attention` (parallel/context/attention/).
    LossPass("take attention", _always, _take_attention),
    # Blocks that a Python loop wrote out become a scan over layers (slicing/rolling/).
    LossPass("roll", _always, _roll),
    # The equations of one context rank, on its positions of the sequence (parallel/context/).
    LossPass("split", lambda how: how.layout.mesh.shape["context"] > 1, _split),
    # The equations of one expert rank, on its experts and the tokens of all ranks (parallel/expert/).
    LossPass("exchange", lambda how: how.layout.mesh.shape["expert"] > 1, _exchange),
    # The equations of one tensor rank, on its parts of the weights (parallel/tensor/).
    LossPass("localise", lambda how: how.ranks > 1, _localise),
    # Large logits are made a chunk of the tokens at a time, in a loop (numerics/logits/).
    LossPass("chunk", _always, _chunk),
    # The equations of each concurrent microbatch stand beside those of the others (slicing/side_by_side.py).
    LossPass("double", lambda how: how.strategy.concurrent > 1, _double),
    # Products of layers' weights in float8 (numerics/fp8/).
    LossPass("quantise", lambda how: how.strategy.precision == "fp8", _quantise),
)


def rewrite(how: Setting, loss: PlacedLoss, notes: Notes) -> PlacedLoss:
    """The loss as one device runs it. Raises ValueError where the strategy cannot run it so."""
    for each in PASSES:
        if each.applies(how):
            loss = each.rewrite(how, loss, notes)
    return loss
