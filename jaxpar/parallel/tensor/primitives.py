"""What the equation of each primitive becomes for one tensor rank, where some of its inputs are split.

A rule gets the rewriting, the equation and its inputs, and returns for each output the rank's value and the dim along
which that is split (None: whole). It returns None where it knows no better than to gather its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ...jaxprs import jaxpr as jx
from .localiser import Found, Localiser, Placed, PrimitiveRule

RULES: dict[str, PrimitiveRule] = {}

# Elementwise, of operands of one shape, or with 1 in its place, or scalars.
ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp complex conj
convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul name ne neg
nextafter not or population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
""".split()


def rule(*names: str) -> Callable[[PrimitiveRule], PrimitiveRule]:
    """Registers a function as the rule of some primitives."""

    def register(fun: PrimitiveRule) -> PrimitiveRule:
        RULES.update(dict.fromkeys(names, fun))
        return fun

    return register


def shape_of(eqn: Any) -> tuple[int, ...]:
    """The shape of its first output."""
    return eqn.outvars[0].aval.shape


def _dim(inputs: Sequence[Placed]) -> int:
    """The dim of the first split input; of one that is no parameter, if there is any."""
    split = [x for x in inputs if x.dim is not None]
    dim = next((x for x in split if not x.weight), split[0]).dim
    assert dim is not None
    return dim


@rule(*ELEMENTWISE)
def _elementwise(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found:
    dim = _dim(inputs)
    alike = lambda x: not x.shape or x.shape[dim] == 1 != shape_of(eqn)[dim]
    values = [work.entered(x) if alike(x) else work.part(x, dim) for x in inputs]
    return [(jx.bind(eqn, values)[0], dim)]


@rule("optimization_barrier", "psum", "pmax", "pmin", "ppermute", "pbroadcast")
def _each(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found:
    """Every input by itself; over other axes than `tensor`."""
    return [(value, x.dim) for value, x in zip(jx.bind(eqn, [x.value for x in inputs]), inputs, strict=True)]


@rule("all_gather", "reduce_scatter")
def _over_other_axes(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    (x,) = inputs
    at = eqn.params.get("all_gather_dimension", eqn.params.get("scatter_dimension"))
    if not eqn.params["tiled"] or at == x.dim:
        return None
    return [(jx.bind(eqn, [x.value])[0], x.dim)]


@rule("all_to_all")
def _exchanged(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    """Over other axes, of other dims."""
    (x,) = inputs
    if not eqn.params["tiled"] or x.dim in (eqn.params["split_axis"], eqn.params["concat_axis"]):
        return None
    return [(jx.bind(eqn, [x.value])[0], x.dim)]


# -- shape -------------------------------------------------------------------------------------------------------------


@rule("broadcast_in_dim")
def _broadcast(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found:
    x, *_ = inputs
    assert x.dim is not None
    dim = eqn.params["broadcast_dimensions"][x.dim]
    return [(jx.bind(eqn, [x.value], shape=work.local(shape_of(eqn), dim))[0], dim)]


def outermost(eqn: Any, x: Placed) -> int | None:
    """The outermost of the dims that the split dim of a reshaped value becomes, or is merged with; None for neither."""
    assert x.dim is not None
    before, shape = math.prod(x.shape[: x.dim]), shape_of(eqn)
    dims = [d for d, n in enumerate(shape) if n > 1 and math.prod(shape[:d]) == before]
    return dims[0] if len(dims) == 1 and eqn.params["dimensions"] is None else None


@rule("reshape")
def _reshape(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    """A split dim stays split as the outermost of the dims that it becomes, or that it is merged with."""
    x, *_ = inputs
    shape, dim = shape_of(eqn), outermost(eqn, x)
    if dim is None:
        return None
    heads = x.origin and not x.weight and dim == x.dim == len(x.shape) - 1 == len(shape) - 2
    if shape[dim] % work.ranks and heads:
        raise ValueError(
            f"tensor={work.ranks} does not divide {shape[dim]}: {list(x.shape)}, whose dim {x.dim} is split because of "
            f"{x.origin}, becomes {list(shape)} at {jx.where(eqn)}, and whole heads (or groups) belong to a rank; use "
            f"a tensor= that divides {shape[dim]}, or leave the leaf whole: rules={{{x.origin!r}: None}}"
        )
    if shape[dim] % work.ranks:
        return None
    return [(jx.bind(eqn, [x.value], new_sizes=work.local(shape, dim))[0], dim)]


@rule("transpose")
def _transpose(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found:
    (x,) = inputs
    return [(jx.bind(eqn, [x.value])[0], list(eqn.params["permutation"]).index(x.dim))]


@rule("squeeze")
def _squeeze(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found:
    (x,) = inputs
    return [(jx.bind(eqn, [x.value])[0], without(x.dim, eqn.params["dimensions"]))]


def without(dim: int | None, dims: Sequence[int]) -> int:
    """What a dim is called when others are gone."""
    assert dim is not None
    return dim - sum(d < dim for d in dims)


@rule("concatenate")
def _concatenate(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    dim = _dim(inputs)
    if dim == eqn.params["dimension"]:
        return None
    return [(jx.bind(eqn, [work.part(x, dim) for x in inputs])[0], dim)]


@rule("stack")
def _stack(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found:
    dim = _dim(inputs)
    return [(jx.bind(eqn, [work.part(x, dim) for x in inputs])[0], dim + (dim >= eqn.params["axis"]))]


@rule("unstack")
def _unstack(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    (x,) = inputs
    axis = eqn.params["axis"]
    return None if x.dim == axis else [(value, without(x.dim, [axis])) for value in jx.bind(eqn, [x.value])]


@rule("tile")
def _tile(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    (x,) = inputs
    assert x.dim is not None
    return None if eqn.params["reps"][x.dim] != 1 else [(jx.bind(eqn, [x.value])[0], x.dim)]


@rule("sharding_constraint")
def _constraint(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found:
    """What a model asks of a mesh of its own says nothing here."""
    (x,) = inputs
    return [(x.value, x.dim)]


@rule("pad")
def _pad(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    x, fill = inputs
    if x.dim is None or tuple(eqn.params["padding_config"][x.dim]) != (0, 0, 0):
        return None
    return [(jx.bind(eqn, [x.value, work.entered(fill)])[0], x.dim)]


@rule("rev")
def _rev(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    return along(work, eqn, inputs, eqn.params["dimensions"])


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    return along(work, eqn, inputs, [eqn.params["axis"]])


@rule("sort")
def _sort(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    return along(work, eqn, inputs, [eqn.params["dimension"]])


@rule("top_k")
def _top_k(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    return along(work, eqn, inputs, [eqn.params.get("axis", len(inputs[0].shape) - 1) % len(inputs[0].shape)])


@rule("split")
def _split(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    return along(work, eqn, inputs, [eqn.params["axis"]])


def along(work: Localiser, eqn: Any, inputs: Sequence[Placed], dims: Sequence[int]) -> Found | None:
    """An equation that mixes elements along `dims` alone; scalars among its inputs are what it starts with."""
    dim = _dim(inputs)
    if dim in dims:
        return None
    values = [work.part(x, dim) if x.shape else work.entered(x) for x in inputs]
    return [(value, dim) for value in jx.bind(eqn, values)]


@rule("slice")
def _slice(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    (x,) = inputs
    starts, limits, strides = (eqn.params[k] for k in ("start_indices", "limit_indices", "strides"))
    assert x.dim is not None
    if starts[x.dim] != 0 or limits[x.dim] != x.shape[x.dim] or (strides and strides[x.dim] != 1):
        return None
    limits = tuple(n // work.ranks if d == x.dim else n for d, n in enumerate(limits))
    return [(jx.bind(eqn, [x.value], limit_indices=limits)[0], x.dim)]


@rule("dynamic_slice")
def _dynamic_slice(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    x, *starts = inputs
    sizes = eqn.params["slice_sizes"]
    if x.dim is None or sizes[x.dim] != x.shape[x.dim]:
        return None
    return [(jx.bind(eqn, [x.value, *map(work.whole, starts)], slice_sizes=work.local(sizes, x.dim))[0], x.dim)]


@rule("dynamic_update_slice")
def _dynamic_update_slice(work: Localiser, eqn: Any, inputs: Sequence[Placed]) -> Found | None:
    x, update, *starts = inputs
    dim = _dim([x, update])
    if x.shape[dim] != update.shape[dim]:
        return None
    return [(jx.bind(eqn, [work.part(x, dim), work.part(update, dim), *map(work.whole, starts)])[0], dim)]
