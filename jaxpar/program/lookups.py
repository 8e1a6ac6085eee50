"""Find inputs of a program that are used as indices without a check, such as the labels of a cross-entropy.

    logits[rows, labels]                      -> labels index a dim of size 4
    jnp.take_along_axis(logits, labels, 1)    -> the same
    jnp.where(labels < 0, 0, labels) first    -> no lookup: the program expects labels out of range

Under `jit`, NumPy's indices from the end and beyond it raise no error: -1 reads the last element, and an index beyond
the end is clamped, or reads NaN (https://docs.jax.dev/en/latest/notebooks/Common_Gotchas_in_JAX.html#out-of-bounds-indexing).
A caller that knows the lookups can check the values of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import jaxpr as jx
from .environment import through
from .walk import propagate

# The results hold the elements of the first operand, and no others. A cast to a narrower type belongs here too: an
# index that is in range after the cast was in range before.
_MOVES = {"convert_element_type", "reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose", "slice", "rev",
          "copy", "copy_p", "stop_gradient", "name", "split", "sharding_constraint"}  # fmt: skip
_COMPARES = {"lt", "le", "gt", "ge", "eq", "ne"}


class Lookup(NamedTuple):
    """The use of an input as an index.

    Attributes:
      size: the size of the dim: valid indices are 0 to `size` - 1.
      line: the line of the user's program.
    """

    size: int
    line: str


class _Elements(NamedTuple):
    """A value that holds an input's elements.

    Attributes:
      source: the position of the input.
      wrapped: whether a size was added, as JAX does to count negative indices from the end.
    """

    source: int
    wrapped: bool = False


class _Compared(NamedTuple):
    """Booleans that compare an input's elements with another value."""

    source: int


class _Vectors(NamedTuple):
    """Index vectors along the last dim: the input whose elements each coordinate holds; None for another value."""

    parts: tuple[_Elements | None, ...]


def counting_dim(indices: np.ndarray) -> int | None:
    """Return the dim along which integers are 0, 1, 2, ..., constant in all other dims; None if there is none."""
    shape = indices.shape
    counts = [np.arange(n).reshape([n if i == d else 1 for i in range(len(shape))]) for d, n in enumerate(shape)]
    return next((d for d, count in enumerate(counts) if (indices == count).all()), None)


def lookups(flat: jx.Flat, inputs: Sequence[int]) -> dict[int, Lookup]:
    """Return how some of a program's inputs are looked up: the smallest dim in which each is used as an index.

    Inputs that the program compares with anything are left out, unless it compares to count from the end.

    Args:
      inputs: the positions of the inputs to follow.

    Returns:
      For each input that is looked up, by position, the smallest lookup.
    """
    reader = _Reader()
    ins = [_Elements(i) if i in inputs else None for i in range(len(flat.invars))]
    reader.run(jx.build(flat.eqns, flat.invars, ()), ins)
    # A program that compares an input anywhere may expect values out of range.
    return {i: lookup for i, lookup in reader.lookups.items() if i not in reader.compared}


class _Reader:
    """Follow inputs' elements through a program.

    Attributes:
      lookups: the smallest lookup of each input so far.
      compared: the inputs whose values the program compares and acts on: it may accept any value.
    """

    def __init__(self) -> None:
        self.lookups: dict[int, Lookup] = {}
        self.compared: set[int] = set()

    def run(self, program: Any, ins: Sequence[Any], decides: Any = None) -> list[Any]:
        """Return what the results of a program hold, from what its inputs hold; None for values that are no input's."""
        # A branch or a loop that a comparison decides is a use of it.
        self._use([decides])
        return through(program, ins, self._results, None)

    def _use(self, ins: Sequence[Any]) -> None:
        """Note that an equation reads these values: an input whose comparison is read may have any value."""
        self.compared |= {x.source for x in ins if isinstance(x, _Compared)}

    def _results(self, eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
        """Return what the results of one equation hold, and note the lookups in it."""
        if all(x is None for x in ins):
            return [None] * len(eqn.outvars)
        name, first_elements = eqn.primitive.name, next((x for x in ins if isinstance(x, _Elements)), None)
        # JAX writes `x[i]` as `select(i < 0, i, i + size)`, which is no check by the program.
        if name == "select_n" and self._counts_from_end(ins):
            return [_Elements(ins[0].source)]
        if name in _MOVES:
            return [ins[0]] * len(eqn.outvars)
        inside = propagate(eqn, ins, self.run, lambda a, b: a if a == b else None)
        if inside is not None:
            return inside
        # Equations that only move values have been handled: a comparison that is moved is not used yet.
        self._use(ins)
        if name in _COMPARES and first_elements is not None:
            return [_Compared(first_elements.source)]
        if name == "add" and first_elements is not None and None in ins:
            return [_Elements(first_elements.source, True)]
        if name == "concatenate" and eqn.params["dimension"] == len(eqn.outvars[0].aval.shape) - 1:
            # Coordinates are joined along the last dim to index vectors.
            sizes = [v.aval.shape[-1] for v in eqn.invars]
            parts = [x if isinstance(x, _Elements) else None for x in ins]
            return [_Vectors(tuple(x for x, n in zip(parts, sizes, strict=True) for _ in range(n)))]
        if name in ("gather", "dynamic_slice"):
            for index, size in self._indices(eqn, ins):
                source = index.source
                # A sum alone is another number than the input.
                if not index.wrapped and (source not in self.lookups or size < self.lookups[source].size):
                    self.lookups[source] = Lookup(size, jx.where(eqn))
        return [None] * len(eqn.outvars)

    @staticmethod
    def _counts_from_end(ins: Sequence[Any]) -> bool:
        """Return whether a `select_n` chooses between an index and the same index plus a size, by a comparison."""
        predicate, *cases = ins
        is_one_input = isinstance(predicate, _Compared) and all(
            isinstance(x, _Elements) and x.source == predicate.source for x in cases
        )
        return is_one_input and [x.wrapped for x in cases] == [False, True]

    @staticmethod
    def _indices(eqn: Any, ins: Sequence[Any]) -> Iterator[tuple[_Elements, int]]:
        """Yield the inputs that index single elements, with the size of the dim that they index."""
        shape = eqn.invars[0].aval.shape
        if eqn.primitive.name == "dynamic_slice":
            dims, coordinates, sizes = range(len(shape)), ins[1:], eqn.params["slice_sizes"]
        else:
            dims, sizes = eqn.params["dimension_numbers"].start_index_map, eqn.params["slice_sizes"]
            coordinates = ins[1].parts if isinstance(ins[1], _Vectors) else [ins[1]]
        # An index vector from elsewhere is one value for several dims, and is not followed.
        if len(coordinates) == len(dims):
            for dim, coordinate in zip(dims, coordinates, strict=True):
                # A larger slice reads several elements: its start is no index of one.
                if isinstance(coordinate, _Elements) and sizes[dim] == 1:
                    yield coordinate, shape[dim]
