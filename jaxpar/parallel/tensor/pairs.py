"""Which dims of a model's leaves `tensor` splits where no rule names them: products that follow one another.

The layout is made before any batch is seen, so that there is no loss to look at. What there is, for every model, is
the program that creates its leaves. A module creates its leaves in the order in which it uses them (Linen's compact
modules by construction, others by habit), so that order, shapes and paths tell which products follow one another:

    [a, b], then [b, c], in one module    column-parallel, then row-parallel (Shoeybi et al. 2019, section 3): one
                                          all-reduce of c features forwards, one of a backwards, none between them
    several [a, b] in a row, a != b       gate and up, or mean and variance: as one
    [k, k, 1, b] or [k, k, b / g, b]      between the two: depthwise and grouped convolutions, by whole groups
    [b], [.., b]                          between the two: biases, scales of norms
    [a, b] alone, called kernel or w      row-parallel, if it is worth it: an all-reduce of b features forwards and an
                                          all-gather of a backwards
    tables, by their names                by rows, or by features if the rows do not divide

A convolution's kernel [k, k, in, out] is like any other, and its window is part of what it multiplies. What is called
weight may be [out, in, k, k], as Equinox has it: of both readings that counts in which pairs multiply more. Inner
modules go first; what one without pairs holds stands in the module around it. Of the pairs that a chain allows, those
are taken that multiply most. The price is counted for each position of the output, in elements that are sent against
products that are saved. A pair saves b (a + c) and sends in proportion to a + c, so that it is worth it from the width
of b on: the hidden features must be as many as those on its narrower side, or it would rather be computed twice. A
product alone sends 2 b + a for its a b and is split if it is large, and multiplies 64 times for each element.

A guess can be wrong (a module that creates its leaves in another order). Then more is sent; the result is the same,
because `localise` follows the loss itself.
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
_WORTH = 64  # products for each element that is sent
_KERNEL = re.compile("(.*/)?(kernel|w|weight)")
_TABLE = re.compile("(.*/)?[^/]*(embed|table|vocab|wte)[^/]*(/[^/]*)?", re.IGNORECASE)
# What is added or multiplied, and no product: positions, class tokens, scales. Cells of recurrent networks of Flax: in
# a loop over positions a collective at each costs more than the cell.
_NO_PRODUCT = re.compile(
    "(.*/)?([^/]*(pos|token|cls|type|bias|scale|gamma|beta|mean|var|norm|mask|lora)[^/]*"
    "|(i[ifgorzn]|h[fgorzni]|in|dense_[ih])/kernel)",
    re.IGNORECASE,
)


def creation_order(create: Callable[[jax.Array], Any]) -> list[str]:
    """The paths of the leaves of `create(key)[0]` in the order in which it makes them."""
    closed, out = jax.make_jaxpr(create, return_shape=True)(jax.random.key(0))
    paths = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(out[0])]
    places = dict(zip(paths, _places(closed, [()]), strict=False))  # variables may follow the parameters
    natural = lambda path: [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", path)]
    return sorted(paths, key=lambda path: (places[path], natural(path)))


def _places(program: Any, ins: Sequence[tuple[int, ...]], within: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Where outputs are made: the equation's number, then that within its loop or call, ...; () for constants."""
    number = itertools.count()

    def made(eqn: Any, ins: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        at = (*within, next(number))
        inside = propagate(eqn, ins, lambda inner, ins, _: _places(inner, ins, at), max)
        return [at] * len(eqn.outvars) if inside is None else inside

    return through(program, ins, made, ())


class _Product(NamedTuple):
    """Kernels that multiply the same: their positions among the leaves, features in and out, elements."""

    at: tuple[int, ...]
    into: int
    out_of: int
    size: int

    def pairs(self, after: "_Product", ranks: int) -> bool:
        """Whether another can be the row-parallel one to this."""
        hidden = self.out_of
        return after.into == hidden >= min(self.into, after.out_of) and hidden % ranks == 0


def found(leaves: Leaves, ranks: int, chosen: Mapping[str, int | None], expanding: bool = False) -> dict[str, int]:
    """Path -> dim of what is split beyond what is `chosen`.

    Args:
      leaves: paths and shapes, in the order of creation.
      ranks: the number of devices on `tensor`.
      chosen: what rules say, with None for leaves that stay whole; nothing is paired across these.
      expanding: only pairs of convolutions, and pairs [a, b], [b, a] with b > a: feed-forwards of a model whose
        attention is known.
    """
    searches = [_Search(leaves, ranks, chosen, expanding, turned) for turned in (True, False)]
    for search in searches:
        search.module("", range(len(leaves)))
    return max(searches, key=lambda search: search.paired).dims


class _Search:
    """One search: `dims` is what it found, `paired` how many elements are in pairs; `turned`: whether leaves called
    weight are [out, in, ...].
    """

    def __init__(
        self, leaves: Leaves, ranks: int, chosen: Mapping[str, int | None], expanding: bool, turned: bool
    ) -> None:
        self.leaves, self.ranks, self.chosen, self.expanding, self.turned = leaves, ranks, chosen, expanding, turned
        self.dims: dict[str, int] = {}
        self.paired = 0
        # Modules, layers and features out of what may be stacks of kernels.
        stacks = ((p, s, self._features(p, s)[1]) for p, s in leaves if len(s) > 2)
        self.stacks = {(_module(path), shape[0], shape[dim]) for path, shape, dim in stacks if dim}
        self.seen = False  # whether there was a product
        self.beside: set[int] = set()  # grouped convolutions, stacked vectors
        if not expanding:
            for path, shape in leaves:
                if path not in chosen and len(shape) == 2 and _is_table(path):
                    self.dims.update((path, d) for d in (1, 0) if shape[d] % ranks == 0)

    def _features(self, path: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """The dims of a kernel's features in and out: the last two; if turned [out, in, *window], of stacks [L, out,
        in]. Of a bias or a scale the second is its features.
        """
        if len(shape) > 2 and {*shape[1:]} == {1}:
            return 1, 0  # a bias of Equinox's convolutions
        if self.turned and len(shape) > 1 and path.endswith("weight"):
            first = int(len(shape) == 3 and shape[0] < shape[2])  # windows are narrower than a stack's features
            return first + 1, first
        return len(shape) - 2, len(shape) - 1

    def module(self, prefix: str, at: Sequence[int]) -> list[_Product | None]:
        """Pairs within the module below `prefix`, whose leaves stand `at`. Returns what is left, None at each break."""
        parts: dict[str, list[int]] = {}
        for i in at:
            parts.setdefault(self.leaves[i][0][len(prefix) :].partition("/")[0], []).append(i)
        left: list[_Product | None] = []
        for name, inner in parts.items():
            path, shape = self.leaves[inner[0]]
            if path == f"{prefix}{name}":
                left += self._product(inner[0], path, shape)
            else:
                left += self.module(f"{prefix}{name}/", inner)
        out: list[_Product | None] = []
        before = len(self.dims)
        for chain in _chains(_alike(self._ungrouped(left), lambda i: self.leaves[i][1])):
            out += self._pairs(chain) if chain else [None]
        if prefix and len(self.dims) == before:
            return out
        if not self.expanding:
            for product in out:
                self._alone(product)
        return [None]  # what a module with pairs has beside them is a branch, not a part of a chain around it

    def _product(self, at: int, path: str, shape: tuple[int, ...]) -> Iterator[_Product | None]:
        """The product that a leaf is; nothing for what stands beside products."""
        if path in self.chosen or path in self.dims:
            if len(shape) > 1:
                yield None
        elif len(shape) > 1 and not _NO_PRODUCT.fullmatch(path):
            into, out_of = self._features(path, shape)
            depthwise = len(shape) > 2 and shape[into] == 1 and self.seen  # or of an image of one channel
            self.seen = True
            if depthwise or self._stacked(path, shape):
                self.beside.add(at)
            else:
                yield _Product((at,), shape[into], shape[out_of], math.prod(shape))

    def _stacked(self, path: str, shape: tuple[int, ...]) -> bool:
        """Whether it is a vector for each layer of a stack, [L, b] beside [L, a, b]."""
        return len(shape) == 2 and (_module(path), *shape) in self.stacks

    def _ungrouped(self, products: Sequence[_Product | None]) -> list[_Product | None]:
        """Without the grouped convolutions that stand between two that might be a pair."""
        out = list(products)
        for one, two, three in zip(products, products[1:], products[2:], strict=False):
            if one and two and three and one.out_of == two.out_of == three.into != two.into != one.into:
                groups, rest = divmod(two.out_of, two.into)
                if not rest and groups % self.ranks == 0 and len(self.leaves[two.at[0]][1]) > 2:
                    self.beside.update(two.at)
                    out.remove(two)
        return out

    def _pairs(self, chain: Sequence[_Product]) -> list[_Product | None]:
        """The pairs of a chain that multiply most; of equal ones the first. Returns what is in none."""
        best: list[tuple[int, tuple[int, ...]]] = [(0, ()), (0, ())]  # of the first n: products, where pairs begin
        for n in range(2, len(chain) + 1):
            one, two = chain[n - 2], chain[n - 1]
            options = [best[n - 1]]
            apart = one.into == two.out_of < two.into or all(
                len(self.leaves[i][1]) > 3
                for i in (*one.at, *two.at)  # convolutions over two dims or more
            )
            if one.pairs(two, self.ranks) and (apart or not self.expanding):
                size, begins = best[n - 2]
                options.append((size + one.size + two.size, (*begins, n - 2)))
            best.append(max(options, key=lambda option: option[0]))
        size, begins = best[len(chain)]
        self.paired += size
        for n in begins:
            self._split(chain[n], chain[n + 1])
        paired = {i for n in begins for i in (n, n + 1)}
        return [None if i in paired else product for i, product in enumerate(chain)]

    def _split(self, one: _Product, two: _Product) -> None:
        """Columns, what stands between, rows."""
        self.dims.update((self.leaves[i][0], self._features(*self.leaves[i])[1]) for i in one.at)
        self.dims.update((self.leaves[i][0], self._features(*self.leaves[i])[0]) for i in two.at)
        for at in range(one.at[0], two.at[0]):
            path, shape = self.leaves[at]
            if not shape:  # a scalar, such as a temperature or a gate, has no features
                continue
            dim = self._features(path, shape)[1]
            vector = len(shape) == 2 or math.prod(shape) == shape[dim]  # of each layer, or one
            beside = at in self.beside or len(shape) == 1 or (vector and _NO_PRODUCT.fullmatch(path))
            if beside and shape[dim] == one.out_of and path not in self.chosen:
                self.dims.setdefault(path, dim)

    def _alone(self, product: _Product | None) -> None:
        for at in product.at if product else ():
            path, shape = self.leaves[at]
            (into, out_of), size = self._features(path, shape), math.prod(shape)
            worth = size >= max(PAD_FROM, _WORTH * (2 * shape[out_of] + shape[into]))
            if _KERNEL.fullmatch(path) and shape[into] % self.ranks == 0 and worth:
                self.dims[path] = into


def _module(path: str) -> str:
    """The outermost module of a leaf."""
    return path.partition("/")[0] if "/" in path else ""


def _is_table(path: str) -> bool:
    return bool(_TABLE.fullmatch(path)) and not _KERNEL.fullmatch(path) and not _NO_PRODUCT.fullmatch(path)


def _alike(products: Sequence[_Product | None], shape: Callable[[int], tuple[int, ...]]) -> list[_Product | None]:
    """Those that read one input and write as many features: no one of them can follow another. Of one shape they are
    one; of a convolution and its shortcut the larger counts.
    """
    out: list[_Product | None] = []
    for product in products:
        last = out[-1] if out else None
        if product and last and (product.into, product.out_of) == (last.into, last.out_of) and last.into != last.out_of:
            if shape(last.at[0]) == shape(product.at[0]):
                out[-1] = _Product((*last.at, *product.at), last.into, last.out_of, last.size + product.size)
            elif last.size < product.size:
                out[-1] = product
        else:
            out.append(product)
    return out


def _chains(products: Sequence[_Product | None]) -> Iterator[list[_Product]]:
    """The runs between breaks, and an empty one for each break."""
    run: list[_Product] = []
    for product in products:
        if product is None:
            if run:
                yield run
            yield []
            run = []
        else:
            run.append(product)
    if run:
        yield run
