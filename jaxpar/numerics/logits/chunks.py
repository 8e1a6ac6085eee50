"""Rewrite a region of a loss into the program of one chunk of tokens.

A chunk is treated as the part of the positions that a rank of `context` holds, with the same rules
(`parallel/context/localiser.py`). The difference is that chunks run one after another, not side by side: a rule may not
communicate, since the values of several chunks never exist together. Such a rule raises `StayWholeError`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ...model import permutations
from ...parallel.context.localiser import ContextLocaliser
from ...parallel.context.rules import RULES as CONTEXT
from ...parallel.context.split import Split
from ...parallel.tensor import RULES as TENSOR
from ...parallel.tensor.edges import EDGES, dims_of
from ...parallel.tensor.localiser import BY_FACTORS, Found, LocalValue, place
from ...parallel.tensor.primitives import follow, shape_of
from ...program import jaxpr as jx
from ...program.primitives import having
from .cross_entropy import HeadProduct, product

# Rules of `context`, for primitives that do more than follow one factor, that need nothing of other chunks.
_LOCAL_CONTEXT_RULES = ("reshape", "dot_general", "gather", *having("reduces"), *having("separate"), *jx.REMATS)
RULES: dict[str, Any] = {**dict.fromkeys(TENSOR), BY_FACTORS: follow}
RULES |= {name: CONTEXT[name] for name in _LOCAL_CONTEXT_RULES}


class StayWholeError(Exception):
    """Logits stay whole; the text says why."""


@dataclass
class Chunk(ContextLocaliser):
    """The rewriting of a region into the program of one chunk.

    Attributes:
      index: the number of the chunk, a traced integer.
      product_eqn: the equation that makes the logits.
      head_product: how it multiplies hidden states and the head.
      wide_head: the head in float32, to which its gradient belongs.
    """

    index: Any = 0
    product_eqn: Any = None
    head_product: HeadProduct | None = None
    wide_head: Any = None

    def chunks(self) -> list[jax.Array]:
        """Return the numbers of the chunks that this program computes: one chunk, where context ranks may have two."""
        return [self.index]

    def whole(self, x: LocalValue) -> jax.Array:
        """Return all of a value; one chunk has it only if the value is not split."""
        if x.partial or x.dim is not None:
            raise StayWholeError("logits of several chunks meet")
        return x.value

    def of_all(self, value: jax.Array) -> jax.Array:
        """Raise StayWholeError: one chunk has nothing of the other chunks."""
        raise StayWholeError("logits of several chunks meet")

    total = of_all

    def note(self, eqn: Any, x: LocalValue) -> None:
        """Raise StayWholeError if an equation without a rule would gather logits."""
        if x.partial or x.dim is not None:
            raise StayWholeError(f"{place(eqn)} has no rule for chunks of them")

    def _equation(self, eqn: Any, inputs: Sequence[LocalValue], mixed: bool) -> list[LocalValue]:
        if eqn is not self.product_eqn:
            return super()._equation(eqn, inputs, mixed)
        assert self.head_product is not None
        hidden, head = inputs[::-1] if self.head_product.swapped else inputs
        assert hidden.dim is not None
        value = product(self.head_product, hidden.value, head.value, self.wide_head)
        # The product drops the features' dim of the hidden states, and may put the words in front.
        dim = Split(hidden.dim - (self.head_product.of_hidden < hidden.dim) + self.head_product.swapped)
        return [LocalValue(value, dim, shape_of(eqn), hidden.active or head.active)]


def _edge(localiser: Chunk, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Communicate with other ranks of `tensor`, along a dim that is not split into chunks."""
    # Whole values go the common way. An edge along the split dim would need the other chunks.
    (x,) = inputs
    if x.dim is None or (x.dim in dims_of(eqn) and eqn.primitive.name not in ("tensor_enter", "tensor_leave")):
        return None
    return [(jx.bind(eqn, [x.value])[0], x.dim)]


def _slice(localiser: Chunk, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Slice words, or cut positions off the end, where the remaining positions stay in their chunks.

    A loss often cuts the last position off, which predicts nothing. The chunks keep their sizes, and the result's
    `Split` says by how much they overlap its end.
    """
    (x,) = inputs
    dim, strides = localiser.split(x.dim or 0), eqn.params["strides"]
    starts, limits = [*eqn.params["start_indices"]], [*eqn.params["limit_indices"]]
    length, limit = x.shape[dim], limits[dim]
    if starts[dim] or (strides and strides[dim] != 1) or (limit != length and (dim.rows > 1 or dim.overlap > 0)):
        return None
    chunk_length = localiser.chunk(length // dim.rows, dim.overlap)
    overlap = 0 if -(-limit // localiser.ranks) == chunk_length else limit - chunk_length * localiser.ranks
    # The last chunk would have no position left.
    if limit != length and overlap < -chunk_length:
        return None
    limits[dim] = x.value.shape[dim]
    value = jx.bind(eqn, [x.value], start_indices=tuple(starts), limit_indices=tuple(limits))[0]
    return [(value, dim if limit == length else Split(int(dim), 1, overlap))]


def _custom(localiser: Chunk, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Run a function that has its own derivative, with this chunk's part of each one-hot that it reads."""
    if permutations.of(eqn) is not None:
        return None
    # Inputs of one shape are split alike: a one-hot has the split of the logits that it meets.
    split_dims = {x.shape: x.dim for x in inputs if x.dim is not None}
    part = lambda x, dim: LocalValue(localiser.part(x, dim), dim, x.shape, x.active)
    inputs = [part(x, split_dims[x.shape]) if x.made is not None and x.shape in split_dims else x for x in inputs]
    return TENSOR[eqn.primitive.name](localiser, eqn, inputs)


RULES |= dict.fromkeys(EDGES, _edge) | dict.fromkeys(jx.CUSTOM, _custom) | {"slice": _slice}
