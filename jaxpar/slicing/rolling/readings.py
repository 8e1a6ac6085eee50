"""Find where a traced program reads the layers of its loops, in which order, and what depends on parameters alone.

The trace of a Python loop is in program order, one block after another. A *pass* is one run over the blocks; a list
that is run twice in one loss has two passes:

    sequence     embed   b0 b0 b0   b1 b1   b2 b2 b2   norm   b0 b0   b1 b1 b1   b2 b2   head
    passes               |------- pass 0 -------|             |------- pass 1 ------|
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...program import jaxpr as jx
from ...program.hoist import closure
from ...program.primitives import having

_DERIVE_KEYS = having("draws", "keys")
_MOVE_KEYS = (*having("moves"), "dynamic_slice")  # move keys that are derived already


@dataclass(frozen=True)
class Row:
    """A row of an array: number `index` along `dim`.

    Attributes:
      source: the variable of the array.
      index: the number of the row.
      dim: the dim along which it is a row.
      keeps_dim: whether the row has that dim, with size 1.
    """

    source: Any
    index: int
    dim: int = 0
    keeps_dim: bool = False


@dataclass(frozen=True)
class Pass:
    """One run over blocks `start`, `start + 1`, ...

    Attributes:
      start: the first block.
      first_reads: for each block, the position in `Readings.sequence` where its parameters are read first.
      last_reads: for each block, the position where they are read last.
    """

    start: int
    first_reads: tuple[int, ...]
    last_reads: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The block after the last."""
        return self.start + len(self.first_reads)


def static_rows(eqn: Any) -> dict[Any, Row]:
    """Return the results of an equation that takes single rows of an array by static number, such as `mask[i]`."""
    name, params = eqn.primitive.name, eqn.params
    # `x[i:i + 1]`, or `x[i]` before its dim is dropped.
    if name == "slice":
        shape, strides = eqn.invars[0].aval.shape, params["strides"] or (1,) * eqn.invars[0].aval.ndim
        cut = list(zip(params["start_indices"], params["limit_indices"], strides, strict=True))
        dims = [d for d, n in enumerate(shape) if cut[d] != (0, n, 1)]  # dims that are not taken completely
        if len(dims) == 1 and cut[dims[0]][1] - cut[dims[0]][0] == 1:
            return {eqn.outvars[0]: Row(eqn.invars[0], cut[dims[0]][0], dims[0], keeps_dim=True)}
    # The same, traced as a dynamic slice at literal indices.
    if name == "dynamic_slice" and all(map(jx.is_literal, eqn.invars[1:])):
        shape, sizes = eqn.invars[0].aval.shape, params["slice_sizes"]
        dims = [d for d, n in enumerate(shape) if sizes[d] != n]
        if len(dims) == 1 and sizes[dims[0]] == 1:
            index = int(eqn.invars[1 + dims[0]].val)
            # `dynamic_slice` counts negative indices from the end, and clamps.
            index = min(max(index + shape[dims[0]] if index < 0 else index, 0), shape[dims[0]] - 1)
            return {eqn.outvars[0]: Row(eqn.invars[0], index, dims[0], keeps_dim=True)}
    # `jnp.split` into parts of size 1: each result is a row.
    if name == "split" and set(params["sizes"]) == {1}:
        return {v: Row(eqn.invars[0], k, params["axis"], keeps_dim=True) for k, v in enumerate(eqn.outvars)}
    return {}


@dataclass(frozen=True)
class Readings:
    """The equations of a program, sorted by the blocks of one loop.

    Attributes:
      block_of: the block of each parameter of the loop, and of each variable that follows from one block's parameters
        alone.
      block_eqns: for each variable that follows from one block's parameters alone, the equation that defines it.
      pure_eqns: all equations that depend on parameters alone, also of several blocks (a norm of all weights) or of
        none, by the variables that they define.
      sequence: the other equations in program order. Positions of reads refer to it.
      last_block: for a loop over a list from its end, the block that it reads first, and that counts as 0; else None.
      ahead: by `id`, equations that are in none of these, and run before the loop.
    """

    block_of: dict[Any, int]
    block_eqns: dict[Any, Any]
    pure_eqns: dict[Any, Any]
    sequence: list[Any]
    last_block: int | None = None
    ahead: frozenset[int] = frozenset()

    @classmethod
    def find(
        cls, eqns: Sequence[Any], params: set[Any], members: Mapping[Any, int], last_block: int | None = None
    ) -> "Readings":
        """Sort the equations of a program.

        Args:
          params: the variables of all parameters.
          members: the block of each variable that is a parameter of one block.
          last_block: as in the class.
        """
        block_of = members if last_block is None else {v: last_block - k for v, k in members.items()}
        readings = cls(dict(block_of), {}, {}, [], last_block)
        pure, of_several_blocks = set(params), set()
        for eqn in eqns:
            atoms = [v for v in eqn.invars if not jx.is_literal(v)]
            blocks = {readings.block_of[v] for v in atoms if v in readings.block_of}
            if all(v in pure for v in atoms) and not eqn.effects:
                # A pure equation of one block extends that block's parameters: its results are read like these.
                pure.update(eqn.outvars)
                if len(blocks) == 1:
                    readings.block_of.update((v, next(iter(blocks))) for v in eqn.outvars)
                    readings.block_eqns.update((v, eqn) for v in eqn.outvars)
                readings.pure_eqns.update((v, eqn) for v in eqn.outvars)
                # The scan slices the stack itself, so that the loop's own `stack[i]` is no equation of a block.
                if any(v in members for v in eqn.outvars):
                    continue
                # Equations of blocks are added where they are read (`with_pure_eqns`). A pure equation of no block,
                # such as the cast of a shared parameter, stays in the sequence.
                if blocks or any(v in of_several_blocks for v in atoms):
                    of_several_blocks.update(eqn.outvars)
                    continue
            readings.sequence.append(eqn)
        return readings

    def without(self, moved: set[int]) -> "Readings":
        """Return these readings with some equations (by `id`) moved in front of the loop."""
        sequence, ahead = [e for e in self.sequence if id(e) not in moved], self.ahead | moved
        return dataclasses.replace(self, sequence=sequence, ahead=ahead)

    @functools.cached_property
    def passes(self) -> list[Pass]:
        """The runs over two blocks or more, in order."""
        runs: list[list[tuple[int, int, int]]] = []  # block, position of its first read, of its last read
        for position, eqn in enumerate(self.sequence):
            atoms = [v for v in eqn.invars if not jx.is_literal(v)]
            for k in sorted({self.block_of[v] for v in atoms if v in self.block_of}):
                # Another read of the current block, the first read of the next block, or the beginning of a run.
                if runs and k == runs[-1][-1][0]:
                    runs[-1][-1] = (k, runs[-1][-1][1], position)
                elif runs and k == runs[-1][-1][0] + 1 and position > runs[-1][-1][2]:
                    runs[-1].append((k, position, position))
                else:
                    runs.append([(k, position, position)])
        return [
            Pass(run[0][0], tuple(first for _, first, _ in run), tuple(last for *_, last in run))
            for run in runs
            if len(run) > 1
        ]

    @functools.cached_property
    def _positions(self) -> dict[int, int]:
        """The position of each equation in `sequence`, by `id`."""
        return {id(e): position for position, e in enumerate(self.sequence)}

    def is_within(self, eqn: Any, loop_pass: Pass, start: int, stop: int) -> bool:
        """Whether an equation lies between the first and the last read of blocks `start` to `stop` (exclusive).

        True for equations that are not in `sequence`.
        """
        position = self._positions.get(id(eqn))
        first, last = loop_pass.first_reads[start - loop_pass.start], loop_pass.last_reads[stop - 1 - loop_pass.start]
        return position is None or first <= position <= last

    @functools.cached_property
    def tokens(self) -> list[Any]:
        """For each equation of `sequence`, a token: equal operations have equal tokens.

        A token is cheap. Operations with equal tokens may still differ, in parameters that are no plain values.
        """
        avals = lambda atoms: tuple((a.aval.shape, str(a.aval.dtype)) for a in atoms)
        params = lambda e: tuple((k, v) for k, v in e.params.items() if _is_plain(v))
        return [(e.primitive.name, avals(e.invars), avals(e.outvars), params(e)) for e in self.sequence]

    def with_pure_eqns(self, part: Sequence[Any]) -> list[Any]:
        """Return the equations of one block: first its pure ones that `part` needs, then the others."""
        defined = {v for e in part for v in e.outvars}
        own_eqns = {v: e for v, e in self.pure_eqns.items() if v in self.block_eqns or v in defined}
        pure = closure(jx.free(part), own_eqns)
        pure_ids = {id(e) for e in pure}
        return [*pure, *(e for e in part if id(e) not in pure_ids)]

    def live_bytes(self, inputs: Sequence[Any], outvars: Sequence[Any]) -> np.ndarray:
        """Return the bytes that are live before each equation of `sequence`, and after the last one, int64.

        The program's inputs count, and what the equations compute.
        """
        num_eqns = len(self.sequence)
        defined_at = dict.fromkeys(inputs, -1) | {v: i for i, e in enumerate(self.sequence) for v in e.outvars}
        last_read = {v: i for i, e in enumerate(self.sequence) for v in e.invars if not jx.is_literal(v)}
        last_read.update((v, num_eqns) for v in outvars if not jx.is_literal(v))
        change = np.zeros(num_eqns + 2, np.int64)  # of the live bytes, at each position
        # A variable is live from the equation after the one that defines it up to its last reader.
        for v, i in defined_at.items():
            if last_read.get(v, -1) > i:
                # The dtype of random keys may have no size.
                size = v.aval.size * getattr(v.aval.dtype, "itemsize", 8)
                change[i + 1] += size
                change[last_read[v] + 1] -= size
        return np.cumsum(change)[:-1]


def key_derivations(eqns: Sequence[Any], inputs: Iterable[Any]) -> set[int]:
    """Return the equations, by `id`, that derive random keys from the program's inputs alone, and draw nothing."""
    inputs, derived, derivations = set(inputs), set[Any](), set[int]()
    for eqn in eqns:
        atoms = {v for v in eqn.invars if not jx.is_literal(v)}
        name = eqn.primitive.name
        # Slices and reshapes count if they move keys that are derived already, not other inputs.
        derives = name in _DERIVE_KEYS and atoms <= inputs | derived
        if atoms and (derives or (name in _MOVE_KEYS and atoms <= derived)):
            derived.update(eqn.outvars)
            derivations.add(id(eqn))
    return derivations


def find_rows(eqns: Sequence[Any], is_source: Callable[[Any], bool]) -> dict[Any, Row]:
    """Return the rows that equations take by static number from arrays for which `is_source` is true, by variable."""
    return {v: row for eqn in eqns for v, row in static_rows(eqn).items() if is_source(row.source)}


def _is_plain(value: Any) -> bool:
    """Whether a parameter of an equation is a number, text or None, or a tuple of these."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | str | float)
