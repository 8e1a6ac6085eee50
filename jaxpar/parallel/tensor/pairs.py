"""Find which dims `tensor` splits in a model that no rule names, from products that follow one another.

The layout is made before any batch is seen, so no loss can be traced yet. The program that creates the leaves can. A
module creates its leaves in the order in which it uses them: Linen's compact modules by construction, others by habit.
So order, shapes and paths tell which products follow one another:

    [a, b], then [b, c], in one module    column-parallel, then row-parallel (Shoeybi et al. 2019, section 3): one
                                          all-reduce of c features forwards, one of a backwards, none between them
    several [a, b] in a row, a != b       one product: gate and up, or mean and variance
    [k, k, 1, b] or [k, k, b / g, b]      between a pair: depthwise and grouped convolutions, by whole groups
    [b], [.., b]                          between a pair: biases, scales of norms
    [a, b] alone, a kernel, w or weight   row-parallel, if it is worth it: an all-reduce of b features forwards and an
                                          all-gather of a backwards
    tables, by their names                by rows, or by features if the rows do not divide

Convolutions. A kernel [k, k, in, out] is treated like any other; its window counts as part of the product's size. A
leaf called weight may be [out, in, k, k], as in Equinox. The search runs with both readings, and keeps the one whose
pairs multiply more.

Modules. Inner modules are searched first. The products of a module without pairs become part of the module around it.
Of the pairs that a chain of products allows, the search takes those that multiply most.

Cost. For each position of the output, the elements that are sent are weighed against the products that are saved. A
pair saves b (a + c) products and sends in proportion to a + c, so it is worth it from some width b on. The hidden
features must be as many as the features on the pair's narrower side; otherwise it is cheaper to compute them twice. A
single product sends 2 b + a for its a b products. It is split if it is large and multiplies 64 times for each element.

The search may be wrong, for a module that creates its leaves in another order. The ranks then send more, but the result
is the same, because `localise` follows the loss.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ...layout.leaves import PAD_FROM
from ...model.paths import name_of
from ...program.environment import through
from ...program.walk import propagate

Leaves = Sequence[tuple[str, tuple[int, ...]]]
_MIN_PRODUCTS_PER_ELEMENT = 64  # products of a single kernel for each element that is sent
_KERNEL = re.compile("(.*/)?(kernel|w|weight)")
_TABLE = re.compile("(.*/)?[^/]*(embed|table|vocab|wte)[^/]*(/[^/]*)?", re.IGNORECASE)
# Leaves that are added or multiplied elementwise: positions, class tokens, scales. Also the cells of Flax's recurrent
# networks: a collective at each position of their loop would cost more than the cell.
_NO_PRODUCT = re.compile(
    "(.*/)?([^/]*(pos|token|cls|type|bias|scale|gamma|beta|mean|var|norm|mask|lora)[^/]*"
    "|(i[ifgorzn]|h[fgorzni]|in|dense_[ih])/kernel)",
    re.IGNORECASE,
)


def creation_order(create: Callable[[jax.Array], Any]) -> list[str]:
    """Return the paths of the leaves of `create(key)[0]`, in the order in which the function computes them."""
    closed, out = jax.make_jaxpr(create, return_shape=True)(jax.random.key(0))
    paths = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(out[0])]
    places = dict(zip(paths, _places(closed, [()]), strict=False))  # variables may follow the parameters
    # Leaves of one equation, such as the slices of a stack, follow the numbers in their paths.
    natural = lambda path: [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", path)]
    return sorted(paths, key=lambda path: (places[path], natural(path)))


def _places(program: Any, ins: Sequence[tuple[int, ...]], outer: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Return the place that computes each output: the equation's number, then its number inside a loop or call, ...

    `ins` are the places of the program's inputs, and `outer` is the place of the equation that holds it. Constants have
    the place ().
    """
    number = itertools.count()

    def output_places(eqn: Any, ins: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        place = (*outer, next(number))
        inner_places = propagate(eqn, ins, lambda program, ins, _: _places(program, ins, place), max)
        return [place] * len(eqn.outvars) if inner_places is None else inner_places

    return through(program, ins, output_places, ())


class _Product(NamedTuple):
    """One or more kernels that multiply the same input, treated as one product.

    Attributes:
      leaf_indices: the positions of the kernels among the leaves.
      into: the number of input features.
      out_of: the number of output features.
      size: the number of elements.
    """

    leaf_indices: tuple[int, ...]
    into: int
    out_of: int
    size: int

    def pairs(self, successor: "_Product", ranks: int) -> bool:
        """Return whether `successor` can be row-parallel to this product as the column-parallel one."""
        hidden = self.out_of
        return successor.into == hidden >= min(self.into, successor.out_of) and hidden % ranks == 0


def pair_dims(
    leaves: Leaves, ranks: int, chosen: Mapping[str, int | None], feed_forward_only: bool = False
) -> dict[str, int]:
    """Return, by path, the dims that are split over `ranks` ranks in addition to the chosen ones.

    Args:
      leaves: paths and shapes, in the order of creation.
      chosen: the dims that rules choose, None for leaves that stay whole. No pair reaches across these leaves.
      feed_forward_only: whether to pair only convolutions, and [a, b] with [b, a] where b > a: the feed-forwards of a
        model whose attention is known.
    """
    # Read leaves called weight as [out, in, ...] in the first search, as [in, out] in the second.
    searches = [_Search(leaves, ranks, chosen, feed_forward_only, out_first) for out_first in (True, False)]
    for search in searches:
        search.module("", range(len(leaves)))
    return max(searches, key=lambda search: search.paired_size).dims


class _Search:
    """A search for pairs, under one reading of leaves called weight.

    Attributes:
      dims: the dims found, by path.
      paired_size: the number of elements in pairs.
      out_first: whether leaves called weight are [out, in, ...].
      stack_shapes: (outermost module, number of layers, output features) of leaves that may be stacks of kernels.
      has_product: whether a product has been seen.
      elementwise: the indices of grouped convolutions and stacked vectors, which are split like the pair around them.
    """

    def __init__(
        self, leaves: Leaves, ranks: int, chosen: Mapping[str, int | None], feed_forward_only: bool, out_first: bool
    ) -> None:
        self.leaves, self.ranks, self.chosen = leaves, ranks, chosen
        self.feed_forward_only, self.out_first = feed_forward_only, out_first
        self.dims: dict[str, int] = {}
        self.paired_size = 0
        stacks = ((p, s, self._features(p, s)[1]) for p, s in leaves if len(s) > 2)
        self.stack_shapes = {(_outer_module(path), shape[0], shape[dim]) for path, shape, dim in stacks if dim}
        self.has_product = False
        self.elementwise: set[int] = set()
        if not feed_forward_only:
            for path, shape in leaves:
                if path not in chosen and len(shape) == 2 and _is_table(path):
                    # Rows come last, so that they win if both dims divide.
                    self.dims.update((path, d) for d in (1, 0) if shape[d] % ranks == 0)

    def _features(self, path: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the dims of a kernel's input and output features.

        They are the last two dims, or with `out_first` those of [out, in, *window] or of a stack [L, out, in]. For a
        bias or a scale, the second is the dim of its features.
        """
        if len(shape) > 2 and {*shape[1:]} == {1}:
            return 1, 0  # a bias of Equinox's convolutions
        if self.out_first and len(shape) > 1 and path.endswith("weight"):
            # [L, out, in] or [out, in, window]: windows are narrower than the features of a stack.
            out_dim = int(len(shape) == 3 and shape[0] < shape[2])
            return out_dim + 1, out_dim
        return len(shape) - 2, len(shape) - 1

    def module(self, prefix: str, leaf_indices: Sequence[int]) -> list[_Product | None]:
        """Find the pairs in the module below `prefix`.

        Returns:
          The remaining products in order, with None at each break of the chain.
        """
        # 1. Collect the products of this module and of its inner modules.
        parts: dict[str, list[int]] = {}
        for i in leaf_indices:
            parts.setdefault(self.leaves[i][0][len(prefix) :].partition("/")[0], []).append(i)
        products: list[_Product | None] = []
        for name, inner_indices in parts.items():
            path, shape = self.leaves[inner_indices[0]]
            if path == f"{prefix}{name}":
                products += self._product(inner_indices[0], path, shape)
            else:
                products += self.module(f"{prefix}{name}/", inner_indices)

        # 2. Pair them.
        unpaired: list[_Product | None] = []
        num_dims_before = len(self.dims)
        for chain in _chains(_merge_alike(self._without_grouped(products), lambda i: self.leaves[i][1])):
            unpaired += self._pairs(chain) if chain else [None]
        if prefix and len(self.dims) == num_dims_before:
            return unpaired

        # 3. The remaining products of a module with pairs are branches, and no part of a chain around the module.
        if not self.feed_forward_only:
            for product in unpaired:
                self._split_alone(product)
        return [None]

    def _product(self, leaf_index: int, path: str, shape: tuple[int, ...]) -> Iterator[_Product | None]:
        """Yield the product of a leaf; None for a kernel that is split or whole already; nothing for other leaves."""
        if path in self.chosen or path in self.dims:
            if len(shape) > 1:
                yield None
        elif len(shape) > 1 and not _NO_PRODUCT.fullmatch(path):
            into, out_of = self._features(path, shape)
            # A first kernel with one input feature reads an image of one channel, and is not depthwise.
            is_depthwise = len(shape) > 2 and shape[into] == 1 and self.has_product
            self.has_product = True
            if is_depthwise or self._is_stacked_vector(path, shape):
                self.elementwise.add(leaf_index)
            else:
                yield _Product((leaf_index,), shape[into], shape[out_of], math.prod(shape))

    def _is_stacked_vector(self, path: str, shape: tuple[int, ...]) -> bool:
        """Return whether a leaf is a vector for each layer of a stack: [L, b] in a module with [L, a, b]."""
        return len(shape) == 2 and (_outer_module(path), *shape) in self.stack_shapes

    def _without_grouped(self, products: Sequence[_Product | None]) -> list[_Product | None]:
        """Remove the grouped convolutions between two products that may be a pair."""
        remaining = list(products)
        for left, middle, right in zip(products, products[1:], products[2:], strict=False):
            if left and middle and right and left.out_of == middle.out_of == right.into != middle.into != left.into:
                groups, remainder = divmod(middle.out_of, middle.into)
                if not remainder and groups % self.ranks == 0 and len(self.leaves[middle.leaf_indices[0]][1]) > 2:
                    self.elementwise.update(middle.leaf_indices)
                    remaining.remove(middle)
        return remaining

    def _pairs(self, chain: Sequence[_Product]) -> list[_Product | None]:
        """Split the pairs of a chain that multiply most, the first ones if several choices are equal.

        Returns:
          The chain, with None instead of each paired product.
        """
        # Dynamic programming over prefixes. best[n], for the first n products: (paired elements, where pairs begin).
        best: list[tuple[int, tuple[int, ...]]] = [(0, ()), (0, ())]
        for n in range(2, len(chain) + 1):
            column, row = chain[n - 2], chain[n - 1]
            options = [best[n - 1]]
            # Either [a, b] and [b, a] with b > a, or convolutions over two dims or more.
            shapes = [self.leaves[i][1] for i in (*column.leaf_indices, *row.leaf_indices)]
            is_feed_forward = column.into == row.out_of < row.into or all(len(shape) > 3 for shape in shapes)
            if column.pairs(row, self.ranks) and (is_feed_forward or not self.feed_forward_only):
                size, begins = best[n - 2]
                options.append((size + column.size + row.size, (*begins, n - 2)))
            best.append(max(options, key=lambda option: option[0]))
        size, begins = best[len(chain)]
        self.paired_size += size
        for n in begins:
            self._split(chain[n], chain[n + 1])
        paired = {i for n in begins for i in (n, n + 1)}
        return [None if i in paired else product for i, product in enumerate(chain)]

    def _split(self, column: _Product, row: _Product) -> None:
        """Split a pair: output features, vectors between the two, input features."""
        self.dims.update((self.leaves[i][0], self._features(*self.leaves[i])[1]) for i in column.leaf_indices)
        self.dims.update((self.leaves[i][0], self._features(*self.leaves[i])[0]) for i in row.leaf_indices)
        for leaf_index in range(column.leaf_indices[0], row.leaf_indices[0]):
            path, shape = self.leaves[leaf_index]
            if not shape:  # a scalar, such as a temperature or a gate, has no features
                continue
            dim = self._features(path, shape)[1]
            is_vector = len(shape) == 2 or math.prod(shape) == shape[dim]  # one vector per layer, or a single one
            is_bias_or_scale = len(shape) == 1 or (is_vector and _NO_PRODUCT.fullmatch(path))
            if (
                (is_bias_or_scale or leaf_index in self.elementwise)
                and shape[dim] == column.out_of
                and path not in self.chosen
            ):
                self.dims.setdefault(path, dim)

    def _split_alone(self, product: _Product | None) -> None:
        """Split the kernels of a product without partner by their input features, if that is worth it."""
        for leaf_index in product.leaf_indices if product else ():
            path, shape = self.leaves[leaf_index]
            (into, out_of), size = self._features(path, shape), math.prod(shape)
            # An all-reduce moves each output feature twice, an all-gather each input feature once.
            is_worth_it = size >= max(PAD_FROM, _MIN_PRODUCTS_PER_ELEMENT * (2 * shape[out_of] + shape[into]))
            if _KERNEL.fullmatch(path) and shape[into] % self.ranks == 0 and is_worth_it:
                self.dims[path] = into


def _outer_module(path: str) -> str:
    """Return the outermost module of a leaf, "" if it has none."""
    return path.partition("/")[0] if "/" in path else ""


def _is_table(path: str) -> bool:
    """Return whether a leaf's name is the name of a table, such as an embedding."""
    return bool(_TABLE.fullmatch(path)) and not _KERNEL.fullmatch(path) and not _NO_PRODUCT.fullmatch(path)


def _merge_alike(products: Sequence[_Product | None], shape: Callable[[int], tuple[int, ...]]) -> list[_Product | None]:
    """Merge consecutive products with the same features in and out: none of them can follow another.

    Kernels of one shape become one product. Of a convolution and its shortcut, only the larger one remains.
    """
    merged: list[_Product | None] = []
    for product in products:
        previous = merged[-1] if merged else None
        features = (product.into, product.out_of) if product else None
        if product and previous and features == (previous.into, previous.out_of) and previous.into != previous.out_of:
            if shape(previous.leaf_indices[0]) == shape(product.leaf_indices[0]):
                leaf_indices = (*previous.leaf_indices, *product.leaf_indices)
                merged[-1] = previous._replace(leaf_indices=leaf_indices, size=previous.size + product.size)
            elif previous.size < product.size:
                merged[-1] = product
        else:
            merged.append(product)
    return merged


def _chains(products: Sequence[_Product | None]) -> Iterator[list[_Product]]:
    """Yield the runs of products between breaks, and an empty run for each break."""
    chain: list[_Product] = []
    for product in products:
        if product is None:
            if chain:
                yield chain
            yield []
            chain = []
        else:
            chain.append(product)
    if chain:
        yield chain
