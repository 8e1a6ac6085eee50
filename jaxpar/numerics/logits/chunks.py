"""A part of a loss as the program of one chunk of the tokens: what a rank of `context` runs on its positions, by the
same rules (`localiser.py`), but that chunks follow one another: nothing can be had of several at once.
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
from ...parallel.tensor.edges import EDGES
from ...parallel.tensor.localiser import BY_FACTORS, Found, LocalValue, place
from ...parallel.tensor.primitives import follow, shape_of
from ...program import jaxpr as jx
from ...program.primitives import having
from .cross_entropy import HeadProduct, product

# Of what is no single factor, the rules that ask nothing of other chunks.
_OWN = ("reshape", "dot_general", "gather", *having("reduces"), *having("separate"), *jx.REMATS)
RULES: dict[str, Any] = {**dict.fromkeys(TENSOR), BY_FACTORS: follow}
RULES |= {name: CONTEXT[name] for name in _OWN}


class StayWholeError(Exception):
    """Logits stay whole; its text says why."""


@dataclass
class Chunk(ContextLocaliser):
    """The rewriting into the program of chunk number `at`; `head` is the equation that makes its logits, and `wide` the
    head in float32, to which its gradient belongs.
    """

    at: Any = 0
    head: Any = None
    how: HeadProduct | None = None
    wide: Any = None

    def chunks(self) -> list[jax.Array]:
        """The number of the chunk at hand, in a list as for context ranks."""
        return [self.at]

    def whole(self, x: LocalValue) -> jax.Array:
        """All of it, which one chunk has only of what is not split."""
        if x.partial or x.dim is not None:
            raise StayWholeError("logits of several chunks meet")
        return x.value

    def of_all(self, value: jax.Array) -> jax.Array:
        """Of one chunk alone there is nothing else."""
        raise StayWholeError("logits of several chunks meet")

    total = of_all

    def note(self, eqn: Any, x: LocalValue) -> None:
        """Raises StayWholeError where an equation without a rule would gather logits."""
        if x.partial or x.dim is not None:
            raise StayWholeError(f"{place(eqn)} has no rule for chunks of them")

    def _equation(self, eqn: Any, inputs: Sequence[LocalValue], mixed: bool) -> list[LocalValue]:
        if eqn is not self.head:
            return super()._equation(eqn, inputs, mixed)
        assert self.how is not None
        hidden, head = inputs[::-1] if self.how.swapped else inputs
        assert hidden.dim is not None
        value = product(self.how, hidden.value, head.value, self.wide)
        dim = Split(hidden.dim - (self.how.of_hidden < hidden.dim) + self.how.swapped)
        return [LocalValue(value, dim, shape_of(eqn), hidden.active or head.active)]


def _edge(work: Chunk, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """To other ranks of `tensor`, of other dims."""
    (x,) = inputs
    if x.dim is None or (x.dim == eqn.params["dim"] and eqn.primitive.name not in ("tensor_enter", "tensor_leave")):
        return None
    return [(jx.bind(eqn, [x.value])[0], x.dim)]


def _slice(work: Chunk, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Of some words; or of all positions but the last, which stay where they were in their chunk."""
    (x,) = inputs
    dim, strides = work.split(x.dim or 0), eqn.params["strides"]
    starts, limits = [*eqn.params["start_indices"]], [*eqn.params["limit_indices"]]
    n, some = x.shape[dim], limits[dim]
    if starts[dim] or (strides and strides[dim] != 1) or (some != n and (dim.rows > 1 or dim.overlap > 0)):
        return None
    chunk = work.chunk(n // dim.rows, dim.overlap)
    over = 0 if -(-some // work.ranks) == chunk else some - chunk * work.ranks
    if some != n and over < -chunk:
        return None
    limits[dim] = x.value.shape[dim]
    value = jx.bind(eqn, [x.value], start_indices=tuple(starts), limit_indices=tuple(limits))[0]
    return [(value, dim if some == n else Split(int(dim), 1, over))]


def _custom(work: Chunk, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """A function with its own derivative, on this chunk's part of a one-hot."""
    if permutations.of(eqn) is not None:
        return None
    dims = {x.shape: x.dim for x in inputs if x.dim is not None}
    own = lambda x, dim: LocalValue(work.part(x, dim), dim, x.shape, x.active)
    inputs = [own(x, dims[x.shape]) if x.made is not None and x.shape in dims else x for x in inputs]
    return TENSOR[eqn.primitive.name](work, eqn, inputs)


RULES |= dict.fromkeys(EDGES, _edge) | dict.fromkeys(jx.CUSTOM, _custom) | {"slice": _slice}
