"""What the equation of each primitive becomes for one expert rank, where experts or slots are among its inputs.

Of split leaves alone, the rules are `tensor`'s. A rule returns None where it does not know that each slot is computed
for itself: then every input is as the model has it.
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
from .ops.gather import fewer

Rule = Callable[[Any, Any, Sequence[LocalValue]], Found | None]
RULES: dict[str, Rule] = {}


def _of_leaves(work: ExpertLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Split leaves, beside what is equal on all ranks: each rank does the same with its experts."""
    own = TENSOR[eqn.primitive.name] if eqn.primitive.name in ("reshape", "optimization_barrier") else follow
    return own(work, eqn, inputs) if all(x.weight for x in inputs) else None


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of some primitives where an input is slotwise; else that of leaves."""

    def register(fun: Rule) -> Rule:
        def chosen(work: ExpertLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
            return (fun if any(isinstance(x.dim, SlotDims) for x in inputs) else _of_leaves)(work, eqn, inputs)

        RULES.update(dict.fromkeys(names, chosen))
        return fun

    return register


def _slots(inputs: Sequence[LocalValue]) -> Any:
    """The first that is slotwise says where experts and slots are."""
    return next(x.dim for x in inputs if isinstance(x.dim, SlotDims))


rule("optimization_barrier")(TENSOR["optimization_barrier"])


@rule(BY_FACTORS)
def _follow(work: ExpertLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Each slot for itself: neither experts nor slots are mixed, and what lacks either is equal on all ranks."""
    i = next(i for i, x in enumerate(inputs) if isinstance(x.dim, SlotDims))
    at: Any = inputs[i].dim
    free = {f.ins[i]: f for f in factors.of(eqn) if not f.reduced}
    experts, slots = free.get(at.dim), free.get(at.slots)
    if experts is None or slots is None or (experts is slots) != (at.dim == at.slots):
        return None
    if experts.grouped or slots.grouped:
        return None
    values = [_part(work, x, d, s) for x, d, s in zip(inputs, experts.ins, slots.ins, strict=True)]
    outs: list[Any] = [SlotDims(d, s) for d, s in zip(experts.outs, slots.outs, strict=True)]  # type: ignore[arg-type]
    if any(value is None for value in values):
        return None
    changes: dict[str, Any] = {}
    for f, only in ((experts, lambda d: SlotDims(d, -1)), (slots, lambda d: SlotDims(-1, d))):  # -1 is no dim
        part = lambda shape, d, only=only: work.local(shape, SlotDims(d, d) if experts is slots else only(d))
        for name, sizes in (f.params(part) if f.params else {}).items():
            whole = eqn.params[name]
            changes[name] = tuple(
                n if n != m else k for n, m, k in zip(sizes, whole, changes.get(name, whole), strict=True)
            )
    return list(zip(jx.bind(eqn, values, **changes), outs, strict=True))


def _part(work: ExpertLocaliser, x: LocalValue, dim: int | None, slots: int | None) -> Any:
    """An operand for slots, which may have 1 in the place of experts or slots, or neither; None where it is unknown."""
    if dim is not None and slots is not None:
        return work.part(x, SlotDims(dim, slots))
    if not (x.weight if x.dim is None else x.dim == dim):  # split experts are leaves', whatever they went through
        return None
    value = x.value if x.dim is not None else work.whole(x) if dim is None else work.take(x, dim)
    return value if slots is None else jnp.concatenate([value] * work.ranks, axis=slots)


def _dot(work: ExpertLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Where split experts meet a rank's own tokens for all of them, slots begin."""
    if any(isinstance(x.dim, SlotDims) for x in inputs):
        return _follow(work, eqn, inputs)
    if all(x.weight for x in inputs):
        return follow(work, eqn, inputs)
    side = int(isinstance(inputs[0].dim, int))  # that of tokens
    x, leaf, every = inputs[side], inputs[1 - side], factors.of(eqn)
    experts = next(f for f in every if f.ins[1 - side] == leaf.dim)
    free = [d for f in every if f.ins[1 - side] is None and (d := f.ins[side]) is not None]
    if x.dim is not None or experts.reduced or (dim := experts.ins[side]) is None or not free:
        return None
    at: Any = SlotDims(dim, max(free, key=lambda d: x.shape[d]))
    given = list(inputs)
    given[side] = replace(x, value=work.part(x, at), dim=at)
    return _follow(work, eqn, given)


RULES["dot_general"] = _dot


def _loop(work: ExpertLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Layers by layers, and what is done again and again. Leaves of experts that become something else are gathered."""
    first, xs = len(inputs) - len(eqn.outvars), len(inputs)  # where what is carried begins and ends
    if eqn.primitive.name == "scan":
        parts = jx.scan_parts(eqn)
        first, xs = len(parts.consts), len(parts.consts) + len(parts.carry)
    alike, given = all(x.weight for x in inputs), list(inputs)
    for i, x in enumerate(inputs):
        by_step = i >= xs and (isinstance(x.dim, SlotDims) or x.dim == 0)  # step by step over experts, or slots
        if by_step or (first <= i < xs and isinstance(x.dim, int) and not alike):
            work.note(eqn, x)
            given[i] = replace(x, value=work.whole(x), dim=None)
    return TENSOR[eqn.primitive.name](work, eqn, given)


def _custom(work: ExpertLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    route = permutations.of(eqn)
    if route is not None and route.gather is not None:
        return _gathered(work, eqn, inputs, route.gather)
    if all(x.dim is None for x in inputs):
        return None
    if route is not None and route.spread is not None:
        values = [work.part(x, 0) if i > 2 else work.whole(x) for i, x in enumerate(inputs)]
        outs = route.spread(work.ranks)(*values)
        return [(value, None if i == 0 else 0) for i, value in enumerate(outs)]
    if route is not None or any(isinstance(x.dim, int) for x in inputs):
        return None  # its derivative reads all experts
    return TENSOR[eqn.primitive.name](work, eqn, inputs)


def _gathered(work: ExpertLocaliser, eqn: Any, inputs: Sequence[LocalValue], gather: Any) -> Found | None:
    """Tokens to buffers [E, C, D], or back from there, where all tokens of all ranks are fewer bytes."""
    entering = len(eqn.invars[0].aval.shape) == len(eqn.outvars[0].aval.shape) - 1
    buffer = (eqn.outvars[0] if entering else eqn.invars[1]).aval
    slotwise: Any = SlotDims(0, 1)
    tokens = eqn.invars[0].aval.shape[0]
    if not fewer(tokens, buffer.shape, work.ranks) or not (entering or inputs[1].dim == slotwise):
        return None
    outs = gather(work.ranks)(*(x.value if x.dim == slotwise else work.whole(x) for x in inputs))
    if not entering:
        return [(outs, None)]
    each = buffer.shape[2] * buffer.dtype.itemsize
    work.all_tokens[place(eqn)] = work.ranks * tokens * each, buffer.shape[0] * buffer.shape[1] * each
    rows, *tables = outs
    return [(rows, slotwise), *((table, None) for table in tables)]


RULES |= {name: TENSOR[name] for name in having("nested")}
RULES |= {"scan": _loop, "while": _loop, **dict.fromkeys(jx.CUSTOM, _custom)}
