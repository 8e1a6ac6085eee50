"""Rules for one expert rank: how to rewrite an equation of each primitive that has split leaves or slotwise inputs.

Equations of split leaves alone follow the rules of `tensor`. Where an input is slotwise, a rule must know that the
equation computes each slot independently. If it does not, it returns None, and the equation gets whole inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ...model import permutations
from ...program import factors
from ...program import jaxpr as jx
from ...program.primitives import having
from ..tensor import RULES as TENSOR
from ..tensor.localiser import BY_FACTORS, Found, LocalValue, place
from ..tensor.primitives import follow
from .localiser import ExpertLocaliser, SlotDims
from .ops.gather import gathering_sends_less

Rule = Callable[[Any, Any, Sequence[LocalValue]], Found | None]
RULES: dict[str, Rule] = {}


def _leaf_rule(localiser: ExpertLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Rewrite an equation of split leaves and values that are equal on all ranks: each rank computes its experts."""
    tensor_rule = TENSOR[eqn.primitive.name] if eqn.primitive.name in ("reshape", "optimization_barrier") else follow
    return tensor_rule(localiser, eqn, inputs) if all(x.weight for x in inputs) else None


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of some primitives for slotwise inputs. Without such inputs they follow `_leaf_rule`."""

    def register(slotwise_rule: Rule) -> Rule:
        def either_rule(localiser: ExpertLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
            chosen_rule = slotwise_rule if any(isinstance(x.dim, SlotDims) for x in inputs) else _leaf_rule
            return chosen_rule(localiser, eqn, inputs)

        RULES.update(dict.fromkeys(names, either_rule))
        return slotwise_rule

    return register


def _slot_dims(inputs: Sequence[LocalValue]) -> Any:
    """Return the `SlotDims` of the first slotwise input."""
    return next(x.dim for x in inputs if isinstance(x.dim, SlotDims))


rule("optimization_barrier")(TENSOR["optimization_barrier"])


@rule(BY_FACTORS)
def _follow(localiser: ExpertLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Rewrite an equation that mixes neither experts nor slots.

    Both must be free dims of the equation: dims that it neither sums over nor merges with others. Inputs that lack
    either dim must be equal on all ranks.
    """
    # 1. The factors of the equation to which the dims of experts and slots belong.
    i = next(i for i, x in enumerate(inputs) if isinstance(x.dim, SlotDims))
    slot_dims: Any = inputs[i].dim
    free_factors = {factor.ins[i]: factor for factor in factors.of(eqn) if not factor.reduced}
    experts, slots = free_factors.get(slot_dims.dim), free_factors.get(slot_dims.slots)
    # `ragged_dot.BY_ROWS` has one dim as both. Two different dims must not be merged into one factor.
    if experts is None or slots is None or (experts is slots) != (slot_dims.dim == slot_dims.slots):
        return None
    if experts.grouped or slots.grouped:
        return None
    # 2. This rank's part of each operand.
    values = [_part(localiser, x, d, s) for x, d, s in zip(inputs, experts.ins, slots.ins, strict=True)]
    outs: list[Any] = [SlotDims(d, s) for d, s in zip(experts.outs, slots.outs, strict=True)]  # type: ignore[arg-type]
    if any(value is None for value in values):
        return None
    # 3. Parameters that are shapes, as a reshape has, get the rank's sizes. Each factor changes its own dims.
    changes: dict[str, Any] = {}
    for factor, to_dims in ((experts, lambda d: SlotDims(d, -1)), (slots, lambda d: SlotDims(-1, d))):  # -1 is no dim
        local_shape = lambda shape, d, to_dims=to_dims: localiser.local(
            shape, SlotDims(d, d) if experts is slots else to_dims(d)
        )
        for name, sizes in (factor.params(local_shape) if factor.params else {}).items():
            old_sizes = eqn.params[name]
            changes[name] = tuple(
                n if n != m else k for n, m, k in zip(sizes, old_sizes, changes.get(name, old_sizes), strict=True)
            )
    return list(zip(jx.bind(eqn, values, **changes), outs, strict=True))


def _part(localiser: ExpertLocaliser, x: LocalValue, dim: int | None, slots: int | None) -> Any:
    """Return the part of an operand for a rank's slots; None if it cannot be made.

    Args:
      dim, slots: its dims of experts and of slots. None if it lacks the dim, or has size 1 there.
    """
    if dim is not None and slots is not None:
        return localiser.part(x, SlotDims(dim, slots))
    # An operand without slots serves the slots of all ranks. It must be equal on all ranks, or a split leaf (or a value
    # computed from leaves alone).
    if not (x.weight if x.dim is None else x.dim == dim):
        return None
    value = x.value if x.dim is not None else localiser.whole(x) if dim is None else localiser.take(x, dim)
    return value if slots is None else jnp.concatenate([value] * localiser.ranks, axis=slots)


def _dot(localiser: ExpertLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Rewrite a matmul. If it multiplies split leaves by whole buffers, the buffers become slotwise (the exchange)."""
    if any(isinstance(x.dim, SlotDims) for x in inputs):
        return _follow(localiser, eqn, inputs)
    if all(x.weight for x in inputs):
        return follow(localiser, eqn, inputs)
    token_side = int(isinstance(inputs[0].dim, int))  # the operand that is no split leaf
    x, leaf, equation_factors = inputs[token_side], inputs[1 - token_side], factors.of(eqn)
    # The exchange begins only if experts are a batch dim: each expert's leaf meets the tokens for this expert.
    experts = next(factor for factor in equation_factors if factor.ins[1 - token_side] == leaf.dim)
    free = [
        d
        for factor in equation_factors
        if factor.ins[1 - token_side] is None and (d := factor.ins[token_side]) is not None
    ]
    if x.dim is not None or experts.reduced or (dim := experts.ins[token_side]) is None or not free:
        return None
    # The slots are the largest free dim of the tokens. Any of them would be right.
    slot_dims: Any = SlotDims(dim, max(free, key=lambda d: x.shape[d]))
    operands = list(inputs)
    operands[token_side] = replace(x, value=localiser.part(x, slot_dims), dim=slot_dims)
    return _follow(localiser, eqn, operands)


RULES["dot_general"] = _dot


def _loop(localiser: ExpertLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Rewrite a scan or while loop by the rule of `tensor`, after gathering operands that cannot stay split in it."""
    # `while` has no scanned operands, so that its carry is at the end.
    first, xs = len(inputs) - len(eqn.outvars), len(inputs)  # the carry is inputs[first:xs]
    if eqn.primitive.name == "scan":
        parts = jx.scan_parts(eqn)
        first, xs = len(parts.consts), len(parts.consts) + len(parts.carry)
    are_equal, operands = all(x.weight for x in inputs), list(inputs)
    for i, x in enumerate(inputs):
        by_step = i >= xs and (isinstance(x.dim, SlotDims) or x.dim == 0)  # a loop over experts or slots
        # A carried leaf that meets tokens in the loop may come out as something else than a split leaf.
        if by_step or (first <= i < xs and isinstance(x.dim, int) and not are_equal):
            localiser.note(eqn, x)
            operands[i] = replace(x, value=localiser.whole(x), dim=None)
    return TENSOR[eqn.primitive.name](localiser, eqn, operands)


def _custom(localiser: ExpertLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Rewrite a function with its own derivative, by its route (`model/permutations.py`) or the rule of `tensor`."""
    route = permutations.of(eqn)
    if route is not None and route.gather is not None:
        return _gather_tokens(localiser, eqn, inputs, route.gather)
    if all(x.dim is None for x in inputs):
        return None
    # `overflow` on split leaves: ranks exchange tokens in rounds. It returns the tokens' results, then the leaves.
    if route is not None and route.spread is not None:
        values = [localiser.part(x, 0) if i > 2 else localiser.whole(x) for i, x in enumerate(inputs)]
        outputs = route.spread(localiser.ranks)(*values)
        return [(value, None if i == 0 else 0) for i, value in enumerate(outputs)]
    if route is not None or any(isinstance(x.dim, int) for x in inputs):
        return None  # its derivative reads the leaves of all experts
    return TENSOR[eqn.primitive.name](localiser, eqn, inputs)


def _gather_tokens(localiser: ExpertLocaliser, eqn: Any, inputs: Sequence[LocalValue], gather: Any) -> Found | None:
    """Rewrite dispatch or combine so that ranks gather all tokens, if these are fewer bytes than the buffers.

    Dispatch takes tokens [T, D] to buffers [E, C, D], which are slotwise; combine is the way back.
    """
    is_dispatch = len(eqn.invars[0].aval.shape) == len(eqn.outvars[0].aval.shape) - 1
    buffer = (eqn.outvars[0] if is_dispatch else eqn.invars[1]).aval
    slotwise: Any = SlotDims(0, 1)
    tokens = eqn.invars[0].aval.shape[0]
    if not gathering_sends_less(tokens, buffer.shape, localiser.ranks) or not (
        is_dispatch or inputs[1].dim == slotwise
    ):
        return None
    outputs = gather(localiser.ranks)(*(x.value if x.dim == slotwise else localiser.whole(x) for x in inputs))
    if not is_dispatch:
        return [(outputs, None)]
    bytes_per_row = buffer.shape[2] * buffer.dtype.itemsize
    localiser.all_tokens[place(eqn)] = (
        localiser.ranks * tokens * bytes_per_row,
        buffer.shape[0] * buffer.shape[1] * bytes_per_row,
    )
    rows, *tables = outputs
    return [(rows, slotwise), *((table, None) for table in tables)]


# Equations that contain programs (branches, calls, solvers) are rewritten inside, by these rules.
RULES |= {name: TENSOR[name] for name in having("nested")}
RULES |= {"scan": _loop, "while": _loop, **dict.fromkeys(jx.CUSTOM, _custom)}
