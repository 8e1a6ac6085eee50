"""Which inputs of a program are looked up in a dim as they are, without a word about values that it does not have.

    logits[rows, labels]                      -> labels: of 4
    jnp.take_along_axis(logits, labels, 1)    -> labels: of 4
    jnp.where(labels < 0, 0, labels) first    -> nothing: the program knows of other values

NumPy's indices from the end and beyond it are no errors under `jit`: -1 reads the last of a dim, what lies beyond is
clamped, or read as NaN (https://docs.jax.dev/en/latest/notebooks/Common_Gotchas_in_JAX.html#out-of-bounds-indexing).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from . import jaxpr as jx
from .environment import through
from .walk import propagate

# The results hold the elements of the first operand, and no others. A cast to a narrower type is one as well: what is
# looked up in range is in range before.
_MOVES = {"convert_element_type", "reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose", "slice", "rev",
          "copy", "copy_p", "stop_gradient", "name", "split", "sharding_constraint"}  # fmt: skip
_COMPARES = {"lt", "le", "gt", "ge", "eq", "ne"}


class Lookup(NamedTuple):
    """How an input is looked up: among how many, 0 to `size` - 1, and in which line of the user's program."""

    size: int
    line: str


class _Elements(NamedTuple):
    """A value that is an input's elements; `wrapped` where a size was added, as to count negative ones from the end."""

    source: int
    wrapped: bool = False


class _Compared(NamedTuple):
    """Booleans of a comparison of an input's elements with something."""

    source: int


class _Vectors(NamedTuple):
    """Vectors along the last dim: what each of their elements is, None for something else."""

    parts: tuple[_Elements | None, ...]


def lookups(flat: jx.Flat, inputs: Sequence[int]) -> dict[int, Lookup]:
    """Of some of a program's inputs (their positions), those that are looked up, in the smallest dim where they are.

    Left out are inputs that the program compares with anything, other than as an index from the end.
    """
    reader = _Reader()
    ins = [_Elements(i) if i in inputs else None for i in range(len(flat.invars))]
    reader.run(jx.build(flat.eqns, flat.invars, ()), ins)
    return {i: lookup for i, lookup in reader.found.items() if i not in reader.compared}


class _Reader:
    """Follows inputs' elements through a program.

    Attributes:
      found: the lookups.
      compared: inputs that may be anything, as the program knows.
    """

    def __init__(self) -> None:
        self.found: dict[int, Lookup] = {}
        self.compared: set[int] = set()

    def run(self, program: Any, ins: Sequence[Any], decides: Any = None) -> list[Any]:
        """What the results of a program are of an input's, from what its inputs are; None for nothing."""
        self._use([decides])
        return through(program, ins, self._outs, None)

    def _use(self, ins: Sequence[Any]) -> None:
        """A comparison is used, for whatever."""
        self.compared |= {x.source for x in ins if isinstance(x, _Compared)}

    def _outs(self, eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
        if all(x is None for x in ins):
            return [None] * len(eqn.outvars)
        name, first = eqn.primitive.name, next((x for x in ins if isinstance(x, _Elements)), None)
        if name == "select_n" and self._from_the_end(ins):
            return [_Elements(ins[0].source)]
        if name in _MOVES:
            return [ins[0]] * len(eqn.outvars)
        inside = propagate(eqn, ins, self.run, lambda a, b: a if a == b else None)
        if inside is not None:
            return inside
        self._use(ins)
        if name in _COMPARES and first is not None:
            return [_Compared(first.source)]
        if name == "add" and first is not None and None in ins:
            return [_Elements(first.source, True)]
        if name == "concatenate" and eqn.params["dimension"] == len(eqn.outvars[0].aval.shape) - 1:
            sizes = [v.aval.shape[-1] for v in eqn.invars]
            parts = [x if isinstance(x, _Elements) else None for x in ins]
            return [_Vectors(tuple(x for x, n in zip(parts, sizes, strict=True) for _ in range(n)))]
        if name in ("gather", "dynamic_slice"):
            for of, size in self._indices(eqn, ins):
                if not of.wrapped and (of.source not in self.found or size < self.found[of.source].size):
                    self.found[of.source] = Lookup(size, jx.where(eqn))
        return [None] * len(eqn.outvars)

    @staticmethod
    def _from_the_end(ins: Sequence[Any]) -> bool:
        """Whether a choice is between an index and the same from the end, by whether it is negative."""
        which, *cases = ins
        wanted = isinstance(which, _Compared) and all(
            isinstance(x, _Elements) and x.source == which.source for x in cases
        )
        return wanted and [x.wrapped for x in cases] == [False, True]

    @staticmethod
    def _indices(eqn: Any, ins: Sequence[Any]) -> Iterator[tuple[_Elements, int]]:
        """The inputs that are indices of single elements, and the size of the dim that they are in."""
        shape = eqn.invars[0].aval.shape
        if eqn.primitive.name == "dynamic_slice":
            dims, parts, sizes = range(len(shape)), ins[1:], eqn.params["slice_sizes"]
        else:
            dims, sizes = eqn.params["dimension_numbers"].start_index_map, eqn.params["slice_sizes"]
            parts = ins[1].parts if isinstance(ins[1], _Vectors) else [ins[1]]
        if len(parts) == len(dims):
            for dim, part in zip(dims, parts, strict=True):
                if isinstance(part, _Elements) and sizes[dim] == 1:
                    yield part, shape[dim]
