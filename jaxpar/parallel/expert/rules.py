"""What the equation of each primitive becomes for one expert rank, where experts or slots are among its inputs.

Of split leaves alone, the rules are `tensor`'s. A rule returns None where it does not know that each slot is computed
for itself: then every input is as the model has it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ...ops import permutations
from ...ops.experts.gathered import fewer
from ...program import factors
from ...program import jaxpr as jx
from ..tensor import RULES as TENSOR
from ..tensor.localiser import Found, Placed
from ..tensor.primitives import ELEMENTWISE
from .localiser import ExpertLocaliser, SlotDims, place

Rule = Callable[[Any, Any, Sequence[Placed]], Found | None]
RULES: dict[str, Rule] = {}
_OF_LEAVES = """
broadcast_in_dim reshape transpose squeeze concatenate stack unstack slice dynamic_slice split pad optimization_barrier
""".split()


def _of_leaves(rule: Any, work: ExpertLocaliser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    """Split leaves, beside what is equal on all ranks: each rank does the same with its experts."""
    return rule(work, eqn, inputs) if all(x.weight for x in inputs) else None


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of some primitives where an input is slotwise; else that of leaves."""

    def register(fun: Rule) -> Rule:
        def chosen(name: str) -> Rule:
            of_leaves = functools.partial(_of_leaves, TENSOR[name]) if name in (*ELEMENTWISE, *_OF_LEAVES) else None

            def run(work: ExpertLocaliser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
                if any(isinstance(x.dim, SlotDims) for x in inputs):
                    return fun(work, eqn, inputs)
                return of_leaves(work, eqn, inputs) if of_leaves else None

            return run

        RULES.update((name, chosen(name)) for name in names)
        return fun

    return register


def _slots(inputs: Sequence[Placed]) -> Any:
    """The first that is slotwise says where experts and slots are."""
    return next(x.dim for x in inputs if isinstance(x.dim, SlotDims))


@rule("optimization_barrier")
def _each(work: ExpertLocaliser, eqn: Any, inputs: Sequence[Placed]) -> Found:
    return [(value, x.dim) for value, x in zip(jx.bind(eqn, [x.value for x in inputs]), inputs, strict=True)]


@rule(*(name for name in factors.FACTORS if name not in ("gather", "scatter", "conv_general_dilated")))
def _follow(work: ExpertLocaliser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    """Each slot for itself: neither experts nor slots are mixed, and what lacks either is equal on all ranks."""
    i = next(i for i, x in enumerate(inputs) if isinstance(x.dim, SlotDims))
    at: Any = inputs[i].dim
    free = {f.ins[i]: f for f in factors.of(eqn) if not f.reduced}
    of = [free.get(at.dim), free.get(at.slots)]
    if None in of or (of[0] is of[1]) != (at.dim == at.slots):
        return None
    experts, slots = of
    values = [_part(work, x, d, s) for x, d, s in zip(inputs, experts.ins, slots.ins, strict=True)]
    outs = [SlotDims(d, s) for d, s in zip(experts.outs, slots.outs, strict=True)]
    if any(value is None for value in values):
        return None
    # Sizes of parts: of both dims at once.
    local = lambda shape, d: work.local(
        shape, at if len(shape) == len(inputs[i].shape) and eqn.primitive.name in _SAME_RANK else outs[0]
    )
    changes = {}
    for f in (experts, slots):
        changes |= f.params(local) if f.params else {}
    return list(zip(jx.bind(eqn, values, **changes), outs, strict=True))


_SAME_RANK = ("slice", "dynamic_slice")


def _part(work: ExpertLocaliser, x: Placed, dim: int | None, slots: int | None) -> Any:
    """An operand for slots, which may have 1 in the place of experts or slots, or neither; None where it is unknown."""
    if dim is not None and slots is not None:
        return work.part(x, SlotDims(dim, slots))
    if not x.weight or x.dim not in (None, dim):
        return None
    value = x.value if x.dim is not None else work.whole(x) if dim is None else work.take(x, dim)
    return value if slots is None else jnp.concatenate([value] * work.ranks, axis=slots)


for _name in _OF_LEAVES:
    RULES.setdefault(_name, functools.partial(_of_leaves, TENSOR[_name]))


def _dot(work: ExpertLocaliser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    """A product for each expert: here slots begin. One with what is equal on all ranks keeps them."""
    contracted, batch = eqn.params["dimension_numbers"]
    of_leaf = [side for side in (0, 1) if isinstance(inputs[side].dim, int)]
    slotwise = [side for side in (0, 1) if isinstance(inputs[side].dim, SlotDims)]
    place = lambda side, d: _place(eqn, side, d)
    if len(of_leaf) == 2:
        at = [list(batch[side]).index(x.dim) if x.dim in batch[side] else None for side, x in enumerate(inputs)]
        return [(jx.bind(eqn, [x.value for x in inputs])[0], at[0])] if None not in at and at[0] == at[1] else None
    if len(slotwise) == 2:
        return None
    side = slotwise[0] if slotwise else 1 - of_leaf[0]
    x, other = inputs[side], inputs[1 - side]
    if other.dim is not None:  # experts
        if other.dim not in batch[1 - side]:
            return None
        dim = batch[side][list(batch[1 - side]).index(other.dim)]
        if x.dim is None:
            if x.weight:
                return None
            free = [d for d in range(len(x.shape)) if d not in (*contracted[side], *batch[side])]
            if not free:
                return None
            x = replace(x, dim=SlotDims(dim, max(free, key=lambda d: x.shape[d])))  # type: ignore[arg-type]
        at: Any = x.dim
        if at.dim != dim or at.slots in (*contracted[side], *batch[side]):
            return None
    elif not other.weight:
        return None
    at = x.dim
    if any(d in contracted[side] for d in (at.dim, at.slots)):
        return None
    values: list[Any] = [None, None]
    values[side] = work.part(inputs[side], at)
    if other.dim is None and (at.dim in batch[side] or at.slots in batch[side]):
        return None
    values[1 - side] = other.value
    return [(jx.bind(eqn, values)[0], at.moved(lambda d: place(side, d)))]


RULES["dot_general"] = _dot


def _place(eqn: Any, side: int, dim: int) -> int:
    """The dim of a product that one of a side's becomes."""
    contracted, batch = eqn.params["dimension_numbers"]
    if dim in batch[side]:
        return list(batch[side]).index(dim)
    ranks = [len(v.aval.shape) for v in eqn.invars]
    free = [d for d in range(ranks[side]) if d not in (*contracted[side], *batch[side])]
    before = len(batch[0]) + (ranks[0] - len(contracted[0]) - len(batch[0])) * side
    return before + free.index(dim)


# -- equations that hold programs --------------------------------------------------------------------------------------


def _scan(work: ExpertLocaliser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    """Layers by layers. What is carried may differ from rank to rank after a step."""
    parts = jx.scan_parts(eqn)
    n, k = len(parts.consts), len(parts.carry)
    given = list(inputs)
    for i, x in enumerate(inputs):
        if i >= n + k and (isinstance(x.dim, SlotDims) or x.dim == 0):  # step by step over experts, or slots
            work.note(eqn, x)
            given[i] = replace(x, value=work.whole(x), dim=None)
        elif n <= i < n + k:
            given[i] = replace(x, weight=False)
    return TENSOR["scan"](work, eqn, given)


def _custom(work: ExpertLocaliser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
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


def _gathered(work: ExpertLocaliser, eqn: Any, inputs: Sequence[Placed], gather: Any) -> Found | None:
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


def _cond(work: ExpertLocaliser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    """Where ranks may take different branches, as their rows say, no branch may exchange tokens: some would wait."""
    return TENSOR["cond"](work, eqn, inputs) if inputs[0].weight else None


RULES |= {"scan": _scan, "cond": _cond}
RULES |= {name: TENSOR[name] for name in jx.REMATS if name in TENSOR}
RULES |= {name: _custom for name in jx.CUSTOM if name in TENSOR}
