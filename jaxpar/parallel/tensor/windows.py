"""Rules of convolutions, of pooling, and of sums by index (segment sums of graph networks)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...collectives import edges
from ...jaxprs import jaxpr as jx
from .localiser import Found, Localiser, Placed
from .primitives import along, rule

# -- convolutions ------------------------------------------------------------------------------------------------------


@rule("conv_general_dilated")
def _convolution(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    """Split by rows, by output features, by the input features of both operands, or by groups of features or rows.

    Transposed convolutions are the same primitive, with a dilated input. So are the gradients of convolutions, where
    the loss holds some: in that of a grouped kernel it is the rows that are grouped. With groups, a rank has whole
    groups of all three arrays (a depthwise convolution works on a rank's own channels), and nothing is sent.
    """
    left, right = inputs
    numbers = eqn.params["dimension_numbers"]
    rows, features = numbers.lhs_spec[:2]
    outputs, contracted = numbers.rhs_spec[:2]
    grouped = next((name for name in ("feature_group_count", "batch_group_count") if eqn.params[name] > 1), "")
    if not grouped and right.dim == outputs:
        return [(jx.bind(eqn, [work.entered(left), right.value])[0], numbers.out_spec[1])]
    by = rows if grouped == "batch_group_count" else features  # the dim of the left operand that groups divide
    if grouped and (right.dim == outputs or (right.dim is None and left.dim == by)):
        if eqn.params[grouped] % work.ranks:
            return None
        values = [work.part(left, by), work.part(right, outputs)]
        return [(jx.bind(eqn, values, **{grouped: eqn.params[grouped] // work.ranks})[0], numbers.out_spec[1])]
    if grouped != "batch_group_count" and right.dim is None and left.dim == rows:
        return [(jx.bind(eqn, [left.value, work.entered(right)])[0], numbers.out_spec[0])]
    # Within a group of features each output needs all of them: this is a sum for one group alone.
    if grouped != "feature_group_count" and (right.dim == contracted or (right.dim is None and left.dim == features)):
        (value,) = jx.bind(eqn, [work.part(left, features), work.part(right, contracted)])
        return [(edges.leave(value, work.ranks), None)]
    return None


# -- windows -----------------------------------------------------------------------------------------------------------


@rule(
    "reduce_window",
    "reduce_window_sum",
    "reduce_window_max",
    "reduce_window_min",
    "select_and_scatter_add",
    "select_and_gather_add",
)
def _pool(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    """Pooling and its gradients, where no window has more than one element along the split dim."""
    stretched = [eqn.params.get(name) for name in ("window_strides", "base_dilation", "window_dilation")]
    mixed = [
        d
        for d, (size, padding) in enumerate(zip(eqn.params["window_dimensions"], eqn.params["padding"], strict=True))
        if size != 1 or tuple(padding) != (0, 0) or any(steps and steps[d] != 1 for steps in stretched)
    ]
    return along(work, eqn, inputs, mixed)


# -- sums by index -----------------------------------------------------------------------------------------------------


@rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    """Updates at indices that each rank has, along other dims than the split one: messages to nodes, by feature."""
    operand, indices, updates = inputs
    numbers = eqn.params["dimension_numbers"]
    batch = tuple(getattr(numbers, "operand_batching_dims", ()))
    kept = [d for d in range(len(operand.shape)) if d not in (*numbers.inserted_window_dims, *batch)]
    # A dim of the operand, and that of the updates that runs along all of it.
    windows = {
        d: at
        for d, at in zip(kept, numbers.update_window_dims, strict=True)
        if d not in numbers.scatter_dims_to_operand_dims and operand.shape[d] == updates.shape[at]
    }
    if indices.dim is not None:
        return None
    dim = operand.dim if operand.dim is not None else next((d for d, at in windows.items() if at == updates.dim), None)
    if dim is None or dim not in windows:
        return None
    values = [work.part(operand, dim), indices.value, work.part(updates, windows[dim])]
    return [(jx.bind(eqn, values)[0], dim)]
