"""Named dims of the arrays of one attention: which dims are rows, positions, heads and features.

A program may have these dims in any order, and merged. Their names follow from its two products:

    queries  keys               both share rows and heads, and sum "h"; their positions differ, "t" and "s"
    weights  values             both share rows and heads, and sum "s"
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .hidden import Obstacle
from .softmax import Dim, Names


def product_dims(eqn: Any) -> tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]:
    """Return the dims that a product sums, for each operand, and the dims that both operands share, in their order."""
    summed, shared = ([[*map(int, dims)] for dims in pair] for pair in eqn.params["dimension_numbers"])
    return (summed[0], summed[1]), (shared[0], shared[1])


def name_dims(product: Any, key_index: int) -> tuple[Names, Names]:
    """Return the names of the dims of queries, and of keys, from their product, whose operand `key_index` is the keys.

    The summed dim is "h". Among shared dims, rows come before heads.

    Raises:
      Obstacle: the dims of queries or keys are no rows, positions, heads and features.
    """
    summed, shared = product_dims(product)
    query_index = 1 - key_index
    query, key = (product.invars[i].aval.shape for i in (query_index, key_index))
    free = lambda i, shape: [d for d, n in enumerate(shape) if n != 1 and d not in summed[i] + shared[i]]
    free_query_dims, free_key_dims = free(query_index, query), free(key_index, key)
    if len(summed[0]) != 1 or len(free_key_dims) != 1:
        raise Obstacle(product, "has keys of more or fewer dims than rows, positions, heads and features")
    # Of two free dims of queries, the positions are the one with as many entries as keys.
    position_dims = [d for d in free_query_dims if len(free_query_dims) == 1 or query[d] == key[free_key_dims[0]]]
    if len(shared[0]) > 2:  # there may be any number of dims of one element, as `[None]` makes under vmap
        wide = [n for n, d in enumerate(shared[query_index]) if query[d] != 1]
        shared = tuple([dims[n] for n in wide] for dims in shared)
    if len(position_dims) != 1 or len(free_query_dims) > 2 or len(shared[0]) > 2:
        raise Obstacle(
            product, f"has queries {list(query)} and keys {list(key)}, whose positions and heads cannot be told apart"
        )
    # Shared dims keep the order that they have in queries: [rows, heads].
    order = sorted(range(len(shared[0])), key=lambda n: shared[query_index][n])

    def names(i: int, shape: Sequence[int], free_names: dict[int, Any]) -> Names:
        name_of = free_names | {summed[i][0]: "h"} | {shared[i][n]: ("b", rank) for rank, n in enumerate(order)}
        return tuple((Dim(name_of[d], n),) if n != 1 else () for d, n in enumerate(shape))

    query_free_names = {d: ("g", d) for d in free_query_dims} | {position_dims[0]: "t"}
    return names(query_index, query, query_free_names), names(key_index, key, {free_key_dims[0]: "s"})


def names_of_product(eqn: Any, operands: Sequence[Names]) -> Names:
    """Return the names of a product's dims from its operands' names: shared dims, then the free dims of each."""
    summed, shared = product_dims(eqn)
    free = lambda i: [x for d, x in enumerate(operands[i]) if d not in summed[i] + shared[i]]
    return (*(operands[0][d] for d in shared[0]), *free(0), *free(1))


class AttentionDims(NamedTuple):
    """The named dims of one attention's arrays in the program.

    Attributes:
      query: the names of the dims of queries.
      key: the names of the dims of keys.
      value: the names of the dims of values.
      result: the dims of the result, one after the other.
      sizes: the size of each name.
      rows: the names of rows: one or none.
      heads: the names of key heads: one or none.
      groups: the names of the query heads of each key head: one or none.
    """

    query: Names
    key: Names
    value: Names
    result: list[Dim]
    sizes: dict[Any, int]
    rows: list[Any]
    heads: list[Any]
    groups: list[Any]

    def arrange(self, x: jax.Array, names: Names, *order: Sequence[Any]) -> jax.Array:
        """Transpose and reshape an array with these names to four dims, each of which merges the names in `order`."""
        # Dims without a name have one element. They go to the front, where the reshape drops them.
        dim_of_name = {dims[0].name: d for d, dims in enumerate(names) if dims}
        flat = [dim_of_name[name] for dims in order for name in dims]
        unnamed_dims = [d for d in range(x.ndim) if d not in flat]
        shape = [math.prod(self.sizes[name] for name in dims) for dims in order]
        return jnp.transpose(x, (*unnamed_dims, *flat)).reshape(shape)

    def computation(self, attend: Callable[..., jax.Array], result: Any) -> Callable[..., jax.Array]:
        """Return a function of the program's arrays that computes `result`, an abstract value, of its last product.

        It transposes the arrays to [B, positions, heads, h] for `attend`, which takes further arrays too.
        """

        def compute(query: jax.Array, key: jax.Array, value: jax.Array, *operands: jax.Array) -> jax.Array:
            v = self.arrange(value, self.value, self.rows, ["s"], self.heads, ["h"])
            q = self.arrange(query, self.query, self.rows, ["t"], self.heads + self.groups, ["h"]).astype(v.dtype)
            k = self.arrange(key, self.key, self.rows, ["s"], self.heads, ["h"]).astype(v.dtype)
            output = attend(q, k, v, *operands)
            # The kernel's dims merge names in a fixed order. Split them, and restore the program's order.
            output_names = [*self.rows, "t", *self.heads, *self.groups, "h"]
            output = output.reshape([self.sizes[name] for name in output_names])
            output = jnp.transpose(output, [output_names.index(dim.name) for dim in self.result])
            return output.reshape(result.shape).astype(result.dtype)

        return compute


def attention_dims(
    last: Any, side: int, softmax_dims: tuple[Dim, ...], query_names: Names, key_names: Names, weight_names: Names
) -> AttentionDims:
    """Name the dims of values and of the result, and check that they fit queries and keys.

    `last` is the product of weights and values. `weight_names` are the names of the weights as its operand `side`, and
    `softmax_dims` are the named dims that the softmax sums.

    Raises:
      Obstacle: the softmax is not over keys, or values or the result have other dims than keys and queries.
    """
    summed, shared = product_dims(last)
    # A dim of values that the product shares or sums has the name of its partner among the weights' dims.
    partner = dict(zip((*shared[1 - side], *summed[1 - side]), (*shared[side], *summed[side]), strict=True))
    value_names: Names = tuple(
        (weight_names[partner[d]] if d in partner else (Dim("h", n),)) if n != 1 else ()
        for d, n in enumerate(last.invars[1 - side].aval.shape)
    )
    result_names = names_of_product(last, (weight_names, value_names) if side == 0 else (value_names, weight_names))
    result, query_dims = [*itertools.chain(*result_names)], {*itertools.chain(*query_names)}
    softmax_names = [dim.name for dim in softmax_dims]
    summed_names = [dim.name for d in summed[side] for dim in weight_names[d]]
    if softmax_names != ["s"] or summed_names != ["s"] or {*value_names} != {*key_names}:
        raise Obstacle(last, "weighs values that do not go with the keys, head by head")
    if {*result} != query_dims or len(result) != len(query_dims):
        raise Obstacle(last, "has a result with other dims than its queries")
    sizes = {dim.name: dim.size for dim in (*query_dims, *itertools.chain(*key_names))}
    rows, heads = ([name for name in sizes if name == ("b", n)] for n in range(2))
    groups = [name for name in sizes if name[0] == "g"]
    return AttentionDims(query_names, key_names, value_names, result, sizes, rows, heads, groups)
