"""Where values that are whole on every tensor rank meet values that are split over the ranks.

In the program of one rank a value is whole (each rank holds all of it), split along a dim, or a partial sum: the sum
over ranks is meant. The cotangent of a whole value is whole, that of a split one split alike, and that of a partial sum
whole. Three pairs of linear functions change one into another, and each is the other's transpose:

    enter     whole -> whole, read by split computation, which gives partial cotangents          sends nothing
    leave     partial sum -> whole                                                                all-reduce

    gather    split -> whole, read by split computation                                           all-gather
    scatter   partial sum -> split                                                                reduce-scatter

    all_gather_replicated
              split -> whole, read by computation that every rank repeats                         all-gather
    take      whole -> split                                                                      sends nothing

`enter` and `leave` are f and g of Megatron-LM (Shoeybi et al. 2019, section 3), `gather` and `scatter` those of its
sequence parallelism (Korthikanti et al. 2022, section 4.2.2). They are primitives, and not `jax.custom_vjp`, because
rules of differentiation that a model brings along may put them among tangents, which must be transposed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
from jax import lax
from jax.interpreters import ad, batching, mlir

AXIS = "tensor"


def enter(x: jax.Array, ranks: int) -> jax.Array:
    """Whole -> whole, for split computation."""
    return _bind("enter", x, 0, ranks)


def leave(x: jax.Array, ranks: int) -> jax.Array:
    """Partial sum -> whole."""
    return _bind("leave", x, 0, ranks)


def gather(x: jax.Array, dim: int, ranks: int) -> jax.Array:
    """Split along `dim` -> whole, for split computation."""
    return _bind("gather", x, dim, ranks)


def scatter(x: jax.Array, dim: int, ranks: int) -> jax.Array:
    """Partial sum -> split along `dim`."""
    return _bind("scatter", x, dim, ranks)


def all_gather_replicated(x: jax.Array, dim: int, ranks: int) -> jax.Array:
    """Split along `dim` -> whole, for computation that is repeated on every rank."""
    return _bind("all_gather_replicated", x, dim, ranks)


def take(x: jax.Array, dim: int, ranks: int) -> jax.Array:
    """Whole -> split along `dim`."""
    return _bind("take", x, dim, ranks)


def _bind(name: str, x: jax.Array, dim: int, ranks: int) -> jax.Array:
    return _PRIMITIVES[name].bind(x, axis_name=AXIS, dim=dim, ranks=ranks)


def _own(x: jax.Array, dim: int, ranks: int) -> jax.Array:
    size = x.shape[dim] // ranks
    return lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * size, size, dim)


_RUN: dict[str, Callable[..., jax.Array]] = {
    "enter": lambda x, dim, ranks: x,
    "leave": lambda x, dim, ranks: lax.psum(x, AXIS),
    "gather": lambda x, dim, ranks: lax.all_gather(x, AXIS, axis=dim, tiled=True),
    "scatter": lambda x, dim, ranks: lax.psum_scatter(x, AXIS, scatter_dimension=dim, tiled=True),
    "all_gather_replicated": lambda x, dim, ranks: lax.all_gather(x, AXIS, axis=dim, tiled=True),
    "take": _own,
}
_TRANSPOSE = {"enter": "leave", "gather": "scatter", "all_gather_replicated": "take"}
_TRANSPOSE |= {b: a for a, b in _TRANSPOSE.items()}
_PRIMITIVES = {name: jec.Primitive(f"tensor_{name}") for name in _RUN}
EDGES = tuple(primitive.name for primitive in _PRIMITIVES.values())  # as equations name them


def _define(name: str, primitive: Any) -> None:
    def shape(x: Any, axis_name: str, dim: int, ranks: int) -> Any:
        size = {"gather": lambda n: n * ranks, "scatter": lambda n: n // ranks}
        size |= {"all_gather_replicated": size["gather"], "take": size["scatter"]}
        change = size.get(name, lambda n: n)
        return x.update(shape=tuple(change(n) if d == dim else n for d, n in enumerate(x.shape)))

    primitive.def_abstract_eval(shape)
    run = lambda x, axis_name, dim, ranks: _RUN[name](x, dim, ranks)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))
    ad.deflinear2(primitive, lambda ct, x, axis_name, dim, ranks: (_bind(_TRANSPOSE[name], ct, dim, ranks),))

    def batched(args: Sequence[Any], dims: Sequence[int], axis_name: str, dim: int, ranks: int) -> tuple[Any, int]:
        ((x,), (at,)) = args, dims
        return _bind(name, x, dim + (at <= dim), ranks), at

    batching.primitive_batchers[primitive] = batched


for _name, _primitive in _PRIMITIVES.items():
    _define(_name, _primitive)
