"""Conversions between values that are whole on every tensor rank and values that are split over the ranks.

In the program of one rank, a value has one of three layouts: whole (each rank holds all of it), split along a dim, or a
partial sum (its value is the sum over ranks). The cotangent of a whole value is whole, the cotangent of a split value
is split along the same dim, and the cotangent of a partial sum is whole. Three pairs of linear functions convert one
layout into another. The functions of a pair are each other's transpose, and `exchange` is its own, with dims swapped:

    enter     whole -> whole, read by split computation, which gives partial cotangents          sends nothing
    leave     partial sum -> whole                                                                all-reduce

    all_gather
              split -> whole, read by split computation                                           all-gather
    reduce_scatter
              partial sum -> split                                                                reduce-scatter

    all_gather_replicated
              split -> whole, read by computation that every rank repeats                         all-gather
    take      whole -> split                                                                      sends nothing

    exchange  split -> split along another dim                                                    all-to-all

`enter` and `leave` are f and g of Megatron-LM (Shoeybi et al. 2019, section 3). `all_gather` and `reduce_scatter` are
the conversions of its sequence parallelism (Korthikanti et al. 2022, section 4.2.2). They are primitives instead of
`jax.custom_vjp`, because a model's own rules of differentiation may put them among tangents, which JAX must transpose.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
from jax import lax
from jax.interpreters import ad, batching, mlir

AXIS = "tensor"


def enter(x: jax.Array, ranks: int) -> jax.Array:
    """Pass a whole value to split computation; the transpose all-reduces the ranks' partial cotangents."""
    return _bind("enter", x, 0, ranks)


def leave(x: jax.Array, ranks: int) -> jax.Array:
    """All-reduce a partial sum into a whole value."""
    return _bind("leave", x, 0, ranks)


def all_gather(x: jax.Array, dim: int, ranks: int) -> jax.Array:
    """All-gather a value split along `dim` for split computation; the transpose reduce-scatters the cotangent."""
    return _bind("all_gather", x, dim, ranks)


def reduce_scatter(x: jax.Array, dim: int, ranks: int) -> jax.Array:
    """Reduce-scatter a partial sum into a value split along `dim`."""
    return _bind("reduce_scatter", x, dim, ranks)


def all_gather_replicated(x: jax.Array, dim: int, ranks: int) -> jax.Array:
    """All-gather a value split along `dim` for computation that every rank repeats; its cotangent is whole already."""
    return _bind("all_gather_replicated", x, dim, ranks)


def take(x: jax.Array, dim: int, ranks: int) -> jax.Array:
    """Slice this rank's part along `dim` out of a whole value."""
    return _bind("take", x, dim, ranks)


def exchange(x: jax.Array, dim: int, to: int, ranks: int) -> jax.Array:
    """Split a value that is split along `dim` along another dim instead."""
    return _bind("exchange", x, (dim, to), ranks)


def dims_of(eqn: Any) -> tuple[int, ...]:
    """Return the dims along which an edge communicates: two of an exchange."""
    dim = eqn.params["dim"]
    return dim if isinstance(dim, tuple) else (dim,)


def _bind(name: str, x: jax.Array, dim: int | tuple[int, int], ranks: int) -> jax.Array:
    """Apply the primitive of an edge."""
    return _PRIMITIVES[name].bind(x, axis_name=AXIS, dim=dim, ranks=ranks)


def _local_slice(x: jax.Array, dim: int, ranks: int) -> jax.Array:
    """Return this rank's slice of a whole array along `dim`."""
    size = x.shape[dim] // ranks
    return lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * size, size, dim)


_RUN: dict[str, Callable[..., jax.Array]] = {
    "enter": lambda x, dim, ranks: x,
    "leave": lambda x, dim, ranks: lax.psum(x, AXIS),
    "all_gather": lambda x, dim, ranks: lax.all_gather(x, AXIS, axis=dim, tiled=True),
    "reduce_scatter": lambda x, dim, ranks: lax.psum_scatter(x, AXIS, scatter_dimension=dim, tiled=True),
    "all_gather_replicated": lambda x, dim, ranks: lax.all_gather(x, AXIS, axis=dim, tiled=True),
    "take": _local_slice,
    "exchange": lambda x, dim, ranks: lax.all_to_all(x, AXIS, dim[1], dim[0], tiled=True),
}
# Each pair is listed once, and completed below.
_TRANSPOSE = {"enter": "leave", "all_gather": "reduce_scatter", "all_gather_replicated": "take"}
_TRANSPOSE |= {b: a for a, b in _TRANSPOSE.items()} | {"exchange": "exchange"}
# Other rooms recognise an edge in a program by its name: `tensor_enter`, `tensor_all_gather`, ...
_PRIMITIVES = {name: jec.Primitive(f"tensor_{name}") for name in _RUN}
EDGES = tuple(primitive.name for primitive in _PRIMITIVES.values())  # as equations name them


def _define(name: str, primitive: Any) -> None:
    """Register the shape, lowering, transpose and batching rules of an edge."""

    def abstract_eval(x: Any, axis_name: str, dim: Any, ranks: int) -> Any:
        if name == "exchange":
            factors = {dim[0]: ranks, dim[1]: 1 / ranks}
            return x.update(shape=tuple(round(n * factors.get(d, 1)) for d, n in enumerate(x.shape)))
        size = {"all_gather": lambda n: n * ranks, "reduce_scatter": lambda n: n // ranks}
        size |= {"all_gather_replicated": size["all_gather"], "take": size["reduce_scatter"]}
        resize = size.get(name, lambda n: n)
        return x.update(shape=tuple(resize(n) if d == dim else n for d, n in enumerate(x.shape)))

    primitive.def_abstract_eval(abstract_eval)
    implementation = lambda x, axis_name, dim, ranks: _RUN[name](x, dim, ranks)
    mlir.register_lowering(primitive, mlir.lower_fun(implementation, multiple_results=False))
    # Every edge is linear, so its transpose alone defines both the JVP and the VJP.
    back = lambda dim: dim[::-1] if name == "exchange" else dim
    ad.deflinear2(primitive, lambda ct, x, axis_name, dim, ranks: (_bind(_TRANSPOSE[name], ct, back(dim), ranks),))

    def batch_rule(args: Sequence[Any], dims: Sequence[int], axis_name: str, dim: Any, ranks: int) -> tuple[Any, int]:
        ((x,), (batch_dim,)) = args, dims
        # A batch dim at or before the edge's dim shifts that dim by one.
        shifted = tuple(d + (batch_dim <= d) for d in dim) if name == "exchange" else dim + (batch_dim <= dim)
        return _bind(name, x, shifted, ranks), batch_dim

    batching.primitive_batchers[primitive] = batch_rule


for _name, _primitive in _PRIMITIVES.items():
    _define(_name, _primitive)
