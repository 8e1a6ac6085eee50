"""The passes that rewrite a traced loss into the program of one device.

    equations on all ranks  --take attention, roll-->  the same on all ranks
                            --split, exchange, localise-->  one rank of `context`, `expert`, `tensor`
                            --chunk, double, quantise-->        less memory and traffic, more overlap, float8 products

`PASSES` lists them in order. A pass takes a `PlacedLoss` and returns another with the same values on all devices
together. A `PlacedLoss` knows which part of each parameter its equations read, so that a later pass finds the dims that
are still to be split. What reports show of a pass goes into `Notes`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from ..layout.layout import Layout
from ..layout.leaves import Leaf
from ..numerics.fp8 import in_fp8, of_blocks
from ..numerics.logits import Logits, chunked
from ..parallel.context import RULES as CONTEXT_RULES
from ..parallel.context import AttentionMode, WholeLoss, calls, choose, split_sequence
from ..parallel.context.attention import spelled
from ..parallel.expert import RULES as EXPERT_RULES
from ..parallel.expert import exchange_tokens
from ..parallel.pipeline.schedules import Schedule
from ..parallel.tensor import RULES, localise
from ..program import jaxpr as jx
from ..slicing.rolling.loops import RolledLoop, roll_loops
from ..slicing.side_by_side import side_by_side
from ..strategy import Strategy
from .loss_warnings import warn_no_rule
from .writes import Writes


@dataclass(frozen=True)
class Setting:
    """The circumstances under which a loss is rewritten.

    Attributes:
      layout, strategy: the step's.
      axes: the mesh axes over which rows are spread and that have several devices, name -> size.
      schedule: the schedule of the pipeline, or None.
    """

    layout: Layout
    strategy: Strategy
    axes: dict[str, int]
    schedule: Schedule | None = None

    @property
    def sizes(self) -> Mapping[str, int]:
        """The size of each mesh axis."""
        return self.layout.mesh.shape

    @property
    def takes_attention(self) -> bool:
        """Whether attention that the loss spells out becomes `jp.attention`."""
        shared = self.sizes["context"] > 1 and self.strategy.attention != "gather"
        return shared or self.strategy.kernels == "fused"

    @property
    def summed(self) -> dict[str, int]:
        """The mesh axes over which totals and counts are summed: the axes of rows and of positions."""
        return self.axes | ({"context": n} if (n := self.sizes["context"]) > 1 else {})

    @property
    def traced_axes(self) -> dict[str, int]:
        """The mesh axes that a rewritten program may name: `summed`, and `tensor`."""
        return self.summed | ({"tensor": n} if (n := self.sizes["tensor"]) > 1 else {})

    @property
    def staged(self) -> list[bool]:
        """For each parameter, whether it is a stack of layers that the stages of a pipeline own."""
        return [leaf.layers is not None for leaf in self.layout.storage.units]


@dataclass(frozen=True)
class PlacedLoss:
    """A traced loss between two passes, with the placements of its parameters.

    Attributes:
      flat: its equations. Their inputs are the parameters, then the leaves of `inputs`.
      placements: for each parameter, the part that `flat` reads: of all ranks, until a pass takes one rank's.
      inputs: abstract variables, rows of one microbatch and key.
      num_sums: the number of its first outputs that are totals and counts.
      unsplit: its equations on all parameters, before a pass split them over ranks.
    """

    flat: jx.Flat
    placements: Sequence[Leaf]
    inputs: tuple[Any, Any, Any]
    num_sums: int
    unsplit: jx.Flat

    def of_rank(self, fun: Callable[..., Any], placements: Sequence[Leaf], axes: Mapping[str, int]) -> "PlacedLoss":
        """Trace a function that computes this loss from smaller parts of the parameters.

        Args:
          fun: a function of the parts, then of the other inputs of `flat`.
          placements: for each parameter, the part that it reads.
          axes: the mesh axes that it may name, with their sizes.
        """
        inputs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.flat.invars]
        # Only the parameters become parts. The other inputs of the program follow them as they are.
        parts = [jax.ShapeDtypeStruct(leaf.logical, x.dtype) for leaf, x in zip(placements, inputs, strict=False)]
        flat, _ = jx.trace(fun, *parts, *inputs[len(parts) :], axes=dict(axes))
        return replace(self, flat=flat, placements=placements)


@dataclass
class Notes:
    """Notes of the passes and checks on one traced loss, for reports.

    Attributes:
      attention_mode: how context ranks attend; None without them.
      attention_spelled: attention that the loss spells out, by its line: which keys count, and the type of its scores.
      attention_not_taken: other attention that it spells out, by its line: why no pass took it.
      loops: the Python loops over layers that became scans, and why others did not.
      experts_gathered: by line, where expert ranks gather experts instead of exchanging tokens, and bytes of all
        experts.
      experts_fewer: by line, where they gather experts because tokens would be more, and bytes of the experts.
      tokens_gathered: by line, where they gather the tokens of all ranks: bytes of these, and bytes of an exchange.
      gathered: by line, bytes that tensor ranks gather because an operation has no rule.
      logits: which logits of a cross-entropy are made in chunks.
      fp8: under precision="fp8", by path of a leaf, why its products are not in FP8; "" if they are.
      doubts: how the loss may couple rows.
      unread: paths of the batch's leaves that the loss does not read, in a step or without a key in evaluate.
      touched: positions of the model's own leaves that the loss returns as other values.
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
        return [path for path, reason in self.fp8.items() if not reason]


def _take_attention(setting: Setting, loss: PlacedLoss, notes: Notes) -> PlacedLoss:
    """Replace attention that the loss spells out by `jp.attention` (parallel/context/attention/).

    Raises ValueError if kernels find none to run.
    """
    fused, shared = setting.strategy.kernels == "fused", setting.sizes["context"] > 1
    take = setting.takes_attention
    # Blocks of a split sequence may have other functions of scores than a softmax; the fused kernel may not.
    replay = not take or (shared and setting.strategy.attention != "gather")
    # Only the kernel on whole sequences takes biases.
    attention = spelled(loss.flat, setting.traced_axes, replay, biases=fused and not shared, take=take)
    notes.attention_spelled = {line: (keys, attention.scores[line]) for line, keys in attention.taken.items()}
    notes.attention_not_taken = dict(attention.not_taken)
    if fused and not attention.taken and not any(calls(loss.flat.eqns)):
        reasons = "; ".join(f"the attention at {line} {reason}" for line, reason in attention.not_taken.items())
        raise ValueError(
            "kernels='fused' runs attention by a kernel, and the loss has no attention that a kernel can run: "
            f"{reasons or 'none was found'}; leave kernels out"
        )
    return replace(loss, flat=attention.flat)


def _roll(setting: Setting, loss: PlacedLoss, notes: Notes) -> PlacedLoss:
    """Turn Python loops over layers into scans over stacked parameters (slicing/rolling/)."""
    families = setting.layout.storage.families
    flat, notes.loops = roll_loops(loss.flat, families, len(loss.placements), setting.traced_axes, setting.staged)
    # `unsplit` moves on as well: FP8 looks for the products of layers in it, by the paths of whole parameters.
    return replace(loss, flat=flat, unsplit=flat)


def _split(setting: Setting, loss: PlacedLoss, notes: Notes) -> PlacedLoss:
    """Take the equations of one context rank, on its positions of the sequence (parallel/context/)."""
    num_leaves, (variables, rows, _), ranks = len(loss.placements), loss.inputs, setting.sizes["context"]
    tensor_ranks = setting.sizes["tensor"]
    # The program's inputs are parameters, variables, rows and key, in this order.
    first_row = num_leaves + len(jax.tree.leaves(variables))
    batch = range(first_row, first_row + len(jax.tree.leaves(rows)))
    # The ranks of such a pipeline are not in the same layer at the same time, so that a hop around all ranks of a ring
    # is impossible.
    schedule = setting.schedule
    is_out_of_step = schedule is not None and (setting.layout.storage.cut or schedule.branches)
    out_of_step_schedule = schedule.kind if schedule is not None and is_out_of_step else ""
    mode = choose(
        setting.strategy.attention,
        loss.flat.eqns,
        ranks,
        tensor_ranks,
        out_of_step_schedule,
        notes.attention_not_taken,
    )
    notes.attention_mode = mode
    whole_loss = WholeLoss(loss.flat, num_leaves, batch, loss.num_sums)
    fun = split_sequence(whole_loss, ranks, mode, CONTEXT_RULES, tensor_ranks, not out_of_step_schedule)
    return loss.of_rank(fun, loss.placements, setting.traced_axes)


def _exchange(setting: Setting, loss: PlacedLoss, notes: Notes) -> PlacedLoss:
    """Take the equations of one expert rank, on its experts and the tokens of all ranks (parallel/expert/)."""
    # Units are counted without the dim of chunks, as the loss reads them.
    dims = [None if leaf.expert is None else leaf.expert - leaf.stage for leaf in loss.placements]
    fun, exchanges = exchange_tokens(loss.flat, dims, setting.sizes["expert"], EXPERT_RULES)
    loss = loss.of_rank(fun, [leaf.of_experts for leaf in loss.placements], setting.traced_axes)
    notes.experts_gathered, notes.experts_fewer = exchanges.gathered, exchanges.fewer
    notes.tokens_gathered = exchanges.all_tokens
    return loss


def _localise(setting: Setting, loss: PlacedLoss, notes: Notes) -> PlacedLoss:
    """Take the equations of one tensor rank, on its parts of the weights (parallel/tensor/)."""
    dims = [None if leaf.tensor is None else leaf.tensor - leaf.stage for leaf in loss.placements]
    ruled, ranks = setting.layout.ruled, setting.sizes["tensor"]
    fun, notes.gathered = localise(loss.flat, dims, ruled, ranks, setting.strategy.sequence, RULES)
    loss = loss.of_rank(fun, [leaf.local for leaf in loss.placements], setting.traced_axes)
    # Warn once the parts are traced: only then is it known what is gathered.
    warn_no_rule(notes.gathered, ranks)
    return loss


def _chunk(setting: Setting, loss: PlacedLoss, notes: Notes) -> PlacedLoss:
    """Compute large logits for a chunk of the tokens at a time, in a loop (numerics/logits/)."""
    flat, notes.logits = chunked(loss.flat, len(loss.placements), setting.strategy.logits, setting.traced_axes)
    return replace(loss, flat=flat)


def _double(setting: Setting, loss: PlacedLoss, notes: Notes) -> PlacedLoss:
    """Put the equations of concurrent microbatches side by side; they share parameters and variables."""
    num_shared, concurrent = len(loss.placements) + len(jax.tree.leaves(loss.inputs[0])), setting.strategy.concurrent
    return replace(loss, flat=side_by_side(loss.flat, num_shared, loss.num_sums, concurrent, setting.traced_axes))


def _quantise(setting: Setting, loss: PlacedLoss, notes: Notes) -> PlacedLoss:
    """Compute the products of layers' weights in float8 (numerics/fp8/)."""
    # A leaf belongs to layers if it stacks the layers of a Python loop, or lies in one of several alike blocks.
    layer_paths = of_blocks([(leaf.path, leaf.shape) for leaf in setting.layout.storage.models])
    leaves = [(leaf.path, leaf.rolled or leaf.path in layer_paths) for leaf in setting.layout.storage.units]
    flat, notes.fp8 = in_fp8(loss.unsplit, loss.flat, leaves, setting.strategy, setting.layout.policy.compute)
    return replace(loss, flat=flat)


@dataclass(frozen=True)
class LossPass:
    """A rewriting of a loss.

    Attributes:
      name: what it does, a verb.
      applies: whether a setting asks for it.
      rewrite: a function of the setting, the loss and the notes, to which it adds. The loss that it returns has the
        same values on all devices together.
    """

    name: str
    applies: Callable[[Setting], bool]
    rewrite: Callable[[Setting, PlacedLoss, Notes], PlacedLoss]


def _always(setting: Setting) -> bool:
    """Return True: the pass itself finds out whether there is anything to rewrite."""
    return True


# The order matters: the first two passes read whole parameters; the next three take one rank's part of them, each from
# the part that the pass before has left (`PlacedLoss.placements`); the last three rewrite the program of one rank.
PASSES = (
    LossPass("take attention", _always, _take_attention),
    LossPass("roll", _always, _roll),
    LossPass("split", lambda setting: setting.sizes["context"] > 1, _split),
    LossPass("exchange", lambda setting: setting.sizes["expert"] > 1, _exchange),
    LossPass("localise", lambda setting: setting.sizes["tensor"] > 1, _localise),
    LossPass("chunk", _always, _chunk),
    LossPass("double", lambda setting: setting.strategy.concurrent > 1, _double),
    LossPass("quantise", lambda setting: setting.strategy.precision == "fp8", _quantise),
)


def rewrite(setting: Setting, loss: PlacedLoss, notes: Notes) -> PlacedLoss:
    """Return the loss as one device runs it; raises ValueError if the strategy cannot run it so."""
    for loss_pass in PASSES:
        if loss_pass.applies(setting):
            loss = loss_pass.rewrite(setting, loss, notes)
    return loss
