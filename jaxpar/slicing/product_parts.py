"""Matmuls cut into parts, so that a forward's collectives of activations over `tensor` overlap with them.

A forward cannot compute while it sends: a product needs the whole gathered activations, and a reduce-scatter needs the
whole product. Cut by rows or positions, one part is sent while the next one is computed:

    y = x w, reduce-scatter y      compute   x0 w    x1 w    x2 w    x3 w
                                   send              y0      y1      y2      y3

    all-gather x, x w              send      x0      x1      x2      x3
                                   compute           x0 w    x1 w    x2 w    x3 w

Every element of the result is the same sum of products as before. A backward has gradients of weights to compute
meanwhile (`loop.py`).

Joining the parts of a result copies it. If the copy takes longer than the overlap saves, the gather stays whole. This
happens with few ranks, where each has more columns of w and sends less: under `tensor=2` for all layers, and under
`tensor=4` for feed-forwards.

Llama-3-8B under `tensor=8,sequence=true` on 8 H100 takes 3.7% less time by `predict`, and waits for collectives for
10.8% of it instead of 18.1%.

Source: Wang et al. 2023, "Overlap communication with dependent computation via decomposition in large deep learning
models", ASPLOS, section 4.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from ..program import factors
from ..program import jaxpr as jx
from .iteration import Body

_MAX_PARTS = 4
# Of one part of the gathered array, or of the array that is scattered. With smaller parts matmuls lose more than the
# overlap gains: Llama-3-8B takes 4% longer with parts of 8 MiB.
_MIN_PART_BYTES = 24 << 20
# To join the parts of results, a kernel reads and writes them. These are the most bytes that it may move for each byte
# that is sent during a product. By `predict`, 3 is best or within .4% of it for Llama-3-8B and 70B under `tensor=2`, 4
# and 8 on H100 and H200. On A100s, `tensor=4` is .3% slower than with whole gathers.
_JOINED_BYTES_PER_SENT_BYTE = 3


class _Split(NamedTuple):
    """How one dim of an array is cut into parts.

    Attributes:
      dim: the dim.
      num_shards: the number of ranks whose shards, one after another, make up the dim; 1 if the dim is one rank's. Each
        part has an equal share of every shard.
      num_parts: the number of parts.
    """

    dim: int
    num_shards: int
    num_parts: int

    def parts(self, x: jax.Array) -> list[jax.Array]:
        """Return the parts of an array."""
        before, size, after = x.shape[: self.dim], x.shape[self.dim], x.shape[self.dim + 1 :]
        shards = x.reshape(*before, self.num_shards, self.num_parts, size // (self.num_shards * self.num_parts), *after)
        parts = (lax.index_in_dim(shards, k, self.dim + 1, keepdims=False) for k in range(self.num_parts))
        return [part.reshape(*before, size // self.num_parts, *after) for part in parts]

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Return the array that has these parts."""
        shape = parts[0].shape
        before, size, after = shape[: self.dim], shape[self.dim], shape[self.dim + 1 :]
        shards = [part.reshape(*before, self.num_shards, size // self.num_shards, *after) for part in parts]
        return lax.concatenate(shards, self.dim + 1).reshape(*before, self.num_parts * size, *after)


class _GatherInParts(NamedTuple):
    """An all-gather, and the products that alone read its result.

    Attributes:
      gather: the all-gather.
      products: the products.
      positions: for each product, which of its operands is the gathered one.
      in_split: how the all-gather's operand is cut.
      out_splits: for each product, how its result is cut.
    """

    gather: Any
    products: Sequence[Any]
    positions: Sequence[int]
    in_split: _Split
    out_splits: Sequence[_Split]

    @property
    def equations(self) -> list[Any]:
        """All of the equations."""
        return [self.gather, *self.products]

    def compute(self, env: Any) -> None:
        """Add the results of the products to an environment."""

        def multiply(gathered: jax.Array) -> list[jax.Array]:
            return [
                _bind(eqn, [gathered if i == position else env[v] for i, v in enumerate(eqn.invars)])
                for eqn, position in zip(self.products, self.positions, strict=True)
            ]

        first_part, *other_parts = self.in_split.parts(env[self.gather.invars[0]])
        gathered, results = _bind(self.gather, [first_part]), []
        for part in other_parts:
            # A part leaves when the one before has arrived. Else XLA would gather several at once.
            part, gathered = lax.optimization_barrier((part, gathered))
            next_gathered, products = lax.optimization_barrier((_bind(self.gather, [part]), multiply(gathered)))
            gathered = next_gathered
            results.append(products)
        results.append(multiply(gathered))
        for eqn, split, parts in zip(self.products, self.out_splits, zip(*results, strict=True), strict=True):
            env.store(eqn, [split.join(parts)])


class _ScatterInParts(NamedTuple):
    """A product, and the reduce-scatter that alone reads its result.

    Attributes:
      product: the product.
      scatter: the reduce-scatter.
      position: which operand of the product is cut.
      in_split: how it is cut.
      out_split: how the reduce-scatter's result is cut.
    """

    product: Any
    scatter: Any
    position: int
    in_split: _Split
    out_split: _Split

    @property
    def equations(self) -> list[Any]:
        """Both equations."""
        return [self.product, self.scatter]

    def compute(self, env: Any) -> None:
        """Add the result of the reduce-scatter to an environment."""
        operands = env.read(self.product.invars)
        multiply = lambda part: _bind(self.product, [part if i == self.position else x for i, x in enumerate(operands)])
        first_part, *other_parts = self.in_split.parts(operands[self.position])
        product, arrived = multiply(first_part), []
        for part in other_parts:
            # The next product starts when this one leaves, and nothing else leaves before both are done.
            part, product = lax.optimization_barrier((part, product))
            scattered, product = lax.optimization_barrier((_bind(self.scatter, [product]), multiply(part)))
            arrived.append(scattered)
        env.store(self.scatter, [self.out_split.join([*arrived, _bind(self.scatter, [product])])])


def overlap_products(body: Body) -> Body:
    """Return the body with its large collectives of activations over `tensor`, and their products, in parts."""

    def overlapped(carry: Any, iteration: Any, x: Any) -> Any:
        flat, results = jx.trace(body, carry, iteration, x)
        eqns = jx.live(flat.eqns, flat.outvars)
        if not (by_first_eqn := _find(eqns, flat.outvars)):
            return body(carry, iteration, x)
        env = jx.Environment.of(flat, jax.tree.leaves((carry, iteration, x)))
        in_parts = {id(eqn) for pair in by_first_eqn.values() for eqn in pair.equations}
        for eqn in eqns:
            if id(eqn) in by_first_eqn:
                by_first_eqn[id(eqn)].compute(env)
            elif id(eqn) not in in_parts:
                env.compute(eqn)
        return jax.tree.unflatten(jax.tree.structure(results), env.read(flat.outvars))

    return overlapped


def _find(eqns: Sequence[Any], outvars: Iterable[Any]) -> Mapping[int, _GatherInParts | _ScatterInParts]:
    """Return what to compute in parts, by the id of its first equation: the gather, or the product that is scattered.

    Args:
      eqns: the equations of a program.
      outvars: its results.
    """
    readers = jx.readers(eqns, outvars)
    later = {v for eqn in eqns for v in eqn.outvars}
    by_first_eqn: dict[int, _GatherInParts | _ScatterInParts] = {}
    behind_gathers: set[int] = set()
    for eqn in eqns:
        later.difference_update(eqn.outvars)
        readers_of_result = readers.get(eqn.outvars[0], []) if len(eqn.outvars) == 1 else []
        if gather := _gather_in_parts(eqn, readers_of_result, later):
            by_first_eqn[id(eqn)] = gather
            behind_gathers.update(map(id, gather.products))
        elif id(eqn) not in behind_gathers and (scatter := _scatter_in_parts(eqn, readers_of_result)):
            by_first_eqn[id(eqn)] = scatter
    return by_first_eqn


def _gather_in_parts(eqn: Any, readers: Sequence[Any], later: set[Any]) -> _GatherInParts | None:
    """Return an all-gather with its products; None if an equation is no such gather, or cannot be cut.

    Args:
      eqn: the equation.
      readers: the equations that read its result, and None if the caller does.
      later: the variables that are computed after it. A product that reads one of them would have to wait.
    """
    if eqn.primitive.name != "tensor_all_gather" or not all(map(_is_product, readers)):
        return None
    result, gathered_dim = eqn.outvars[0], eqn.params["dim"]
    if any(not jx.is_literal(v) and v in later for product in readers for v in product.invars):
        return None
    # A product of the result with itself needs the whole.
    if any(product.invars[0] is product.invars[1] for product in readers):
        return None
    positions = [product.invars.index(result) for product in readers]
    num_ranks, joined_bytes = eqn.params["ranks"], 2 * sum(jx.nbytes(product.outvars[0]) for product in readers)
    candidates = []
    for dim, size in enumerate(eqn.invars[0].aval.shape[: gathered_dim + 1]):
        out_dims = [_free_dim(product, i, dim) for product, i in zip(readers, positions, strict=True)]
        num_parts = _num_parts(jx.nbytes(result), size)
        # All parts but the first are sent during a product.
        sent_bytes = jx.nbytes(result) * (num_ranks - 1) / num_ranks * (num_parts - 1) / num_parts
        if joined_bytes > sent_bytes * _JOINED_BYTES_PER_SENT_BYTE:
            continue
        num_shards = num_ranks if dim == gathered_dim else 1
        out_splits = [_Split(out_dim, num_shards, num_parts) for out_dim in out_dims if out_dim is not None]
        if len(out_splits) == len(out_dims):
            candidates.append(_GatherInParts(eqn, readers, positions, _Split(dim, 1, num_parts), out_splits))
    return _most_parts(candidates)


def _scatter_in_parts(eqn: Any, readers: Sequence[Any]) -> _ScatterInParts | None:
    """Return a product with its reduce-scatter; None if an equation is no such product, or cannot be cut.

    Args:
      eqn: the equation.
      readers: the equations that read its result, and None if the caller does.
    """
    if not _is_product(eqn) or len(readers) != 1 or readers[0] is None:
        return None
    (scatter,) = readers
    if scatter.primitive.name != "tensor_reduce_scatter":
        return None
    scattered_dim = scatter.params["dim"]
    dims = {_free_dim(eqn, i, dim): (i, dim) for i, v in enumerate(eqn.invars) for dim in range(v.aval.ndim)}
    candidates = []
    for out_dim, size in enumerate(scatter.outvars[0].aval.shape[: scattered_dim + 1]):
        if out_dim in dims:
            position, dim = dims[out_dim]
            num_parts = _num_parts(jx.nbytes(eqn.outvars[0]), size)
            in_split = _Split(dim, scatter.params["ranks"] if out_dim == scattered_dim else 1, num_parts)
            candidates.append(_ScatterInParts(eqn, scatter, position, in_split, _Split(out_dim, 1, num_parts)))
    return _most_parts(candidates)


def _most_parts(candidates: Sequence[Any]) -> Any:
    """Return the first candidate of those with most parts; None if none has several.

    The first is cut along the rows, whose parts are contiguous in memory.
    """
    best = max(candidates, key=lambda candidate: candidate.in_split.num_parts, default=None)
    return best if best and best.in_split.num_parts > 1 else None


def _num_parts(num_bytes: int, size: int) -> int:
    """Return the number of parts for an array of `num_bytes` that is cut along a dim with `size` elements per rank."""
    num_parts = _MAX_PARTS
    while num_parts > 1 and (num_bytes < num_parts * _MIN_PART_BYTES or size % num_parts):
        num_parts //= 2
    return num_parts


def _is_product(eqn: Any) -> bool:
    """Return whether an equation, or None, is a matmul."""
    return eqn is not None and eqn.primitive.name == "dot_general"


def _free_dim(product: Any, position: int, dim: int) -> int | None:
    """Return the dim of a product's result that is a dim of this operand alone; None if it is summed or shared."""
    for factor in factors.of(product):
        if factor.ins[position] == dim and sum(d is not None for d in factor.ins) == 1:
            return factor.outs[0]
    return None


def _bind(eqn: Any, operands: Sequence[Any]) -> jax.Array:
    """Return the result of an equation on other operands."""
    with jx.source_info_of(eqn):
        (result,) = jx.bind(eqn, operands)
    return result
