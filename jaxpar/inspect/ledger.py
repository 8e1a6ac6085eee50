"""The ledger of a program: its collectives by kind, mesh axes, dtype, count and bytes per device and step.

A ledger is read from one of two sources, which answer different questions:

- **The jaxpr** (`Ledger.from_jaxpr`) has the collectives that the author wrote inside `shard_map`. Its counts are
  portable. It lacks the collectives that the partitioner adds later (the update at `jit` level, `tensor`). A dim that
  the partitioner splits over an automatic axis counts with its full size.
- **The compiled program** (`Ledger.from_hlo`) has the collectives that run. Its bytes are portable. Its counts are not,
  because each compiler combines collectives differently. An all-reduce followed by a slice may replace a
  reduce-scatter; the ledger reports the all-reduce. The CPU backend widens bfloat16 collectives to float32, so dtypes
  and bytes differ there.

`bytes` is the size of the whole buffer that a device takes part in, times the count: the output of an all-gather, the
input of every other kind. `sent` is what a device puts on the wire, by the ring convention:

    all-reduce                    2 (n - 1)/n of the buffer in a group of n devices
    permute                       all of the buffer
    every other kind              (n - 1)/n of the buffer

Groups of one device send nothing and are dropped.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import jax

from ..backend.text import table
from ..hardware.compiled.entry import Collective as Collective
from ..hardware.compiled.entry import Nesting, buffer_bytes, merged
from ..hardware.compiled.kernels import Choice, Done, Executable, Kernel, Operation, Start, While, loops_of_ranks
from ..program.collectives import KINDS, PRIMITIVES, axes_of
from ..program.jaxpr import live
from ..program.trip_counts import runs_of
from ..program.walk import fold, opened

FIELDS = tuple(field.name for field in dataclasses.fields(Collective))


class Ledger(tuple[Collective, ...]):
    """The collectives of a program: a tuple of `Collective`, equal ones merged, sorted by kind, axes and dtype."""

    def __new__(cls, collectives: Iterable[Collective] = ()) -> Self:  # noqa: D102 - the class says it
        return super().__new__(cls, merged(collectives))

    @classmethod
    def from_jaxpr(cls, jaxpr: Any, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Self:
        """Read the collectives of a jaxpr, through jit, scan, cond, while, remat, custom derivatives and shard_map.

        Args:
          jaxpr: `jax.make_jaxpr(f)(...)`. Dead code is left out, as compilers leave it out. (A derivative of `max`, for
            example, counts the elements that tie, even if it is stopped later.)
          mesh: the mesh of its `shard_map`, for the size of each axis.

        Raises:
          ValueError: a collective runs over an axis that `mesh` lacks.
        """
        program = opened(jaxpr)[0]
        operations = fold(live(program.eqns, program.outvars), functools.partial(_program_operations, mesh))
        return cls(collectives(operations, Nesting()))

    @classmethod
    def from_hlo(cls, text: str, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Self:
        """Read the collectives of a compiled program; loops count by their `known_trip_count`.

        Args:
          text: `compiled.as_text()`, from the CPU, GPU or TPU compiler.
          mesh: the mesh for which it was compiled, with the devices in the program's order.

        Raises:
          ValueError: the program is for another number of devices, or has a form of groups or a dtype that is unknown
            here.
        """
        return cls.of(Executable(text, mesh))

    @classmethod
    def of(cls, *programs: Executable) -> Self:
        """Read the collectives of programs that were parsed before, each with its mesh."""
        return cls(collective for program in programs for collective in collectives(program.operations, Nesting()))

    def by(self, *fields: str, value: str = "bytes") -> dict[Any, int]:
        """Sum `value` ("bytes", "sent" or "count") by the given fields: `by("kind", "axes")` has keys (kind, axes).

        One field gives plain keys: `by("dtype")` is {"float32": ...}.

        Raises:
          ValueError: there is no such field, or a collective runs in a loop of unknown length.
        """
        self._check(*fields)
        if value not in ("bytes", "sent", "count"):
            raise ValueError(f"value={value!r} cannot be summed; use 'bytes', 'sent' or 'count'")
        sums: dict[Any, int] = {}
        for collective in self:
            if collective.count is None:
                raise ValueError(
                    f"{collective.kind} over {collective.axes} of {collective.dtype} runs in a while loop of unknown "
                    "length and cannot be summed; use lax.scan or static bounds, or read the ledger's entries one by "
                    "one"
                )
            key = tuple(getattr(collective, field) for field in fields)
            # A plain key reads better than a tuple of one.
            key = key[0] if len(fields) == 1 else key
            sums[key] = sums.get(key, 0) + getattr(collective, value)
        return sums

    def total(self, value: str = "bytes", **conditions: Any) -> int:
        """Sum `value` ("bytes", "sent" or "count") over entries with the given fields: `total(dtype="bfloat16")`.

        Raises:
          ValueError: as `by`; or no collective has this kind, or axes are not a tuple, so that no entry could match.
        """
        # A misspelt kind, or a string of axes, would silently sum to 0.
        if conditions.get("kind", "all-reduce") not in KINDS:
            raise ValueError(f"kind={conditions['kind']!r} is no collective; use {', '.join(KINDS)}")
        if not isinstance(conditions.get("axes", ()), tuple):
            raise ValueError(f"axes={conditions['axes']!r} is no tuple of axes; use for example axes=('fsdp',)")
        self._check(*conditions)
        chosen = Ledger(
            collective
            for collective in self
            if all(getattr(collective, field) == expected_value for field, expected_value in conditions.items())
        )
        return chosen.by(value=value).get((), 0)

    @staticmethod
    def _check(*fields: str) -> None:
        """Raise ValueError for a field that entries do not have."""
        if unknown := set(fields) - set(FIELDS):
            raise ValueError(f"a collective has no {sorted(unknown)}; use {', '.join(FIELDS)}")

    def __str__(self) -> str:
        """Return a table with one line for each entry."""
        flags = ("asynchronous", "overlapped", "in_loop", "conditional")
        rows = [("kind", "axes", "dtype", "count", "bytes", "sent", "")]
        for collective in self:
            notes = " ".join(flag for flag in flags if getattr(collective, flag))
            count = "?" if collective.count is None else str(collective.count)
            amounts = f"{collective.bytes:,}", f"{collective.sent:,}"
            rows.append((collective.kind, "+".join(collective.axes), collective.dtype, count, *amounts, notes))
        return table(rows, "<<<>>><")


def collectives(operations: Sequence[Operation], nesting: Nesting) -> Iterator[Collective]:
    """Yield the collectives of a compiled program or of a loop's body, unmerged.

    Args:
      operations: in the order of the schedule.
      nesting: the loops and conditionals around them.
    """
    for position, operation in enumerate(operations):
        if isinstance(operation, Start):
            # A collective overlaps with compute if some kernel is scheduled between its start and its done.
            operations_until_done = itertools.takewhile(
                functools.partial(operator.ne, Done(operation.name)), operations[position + 1 :]
            )
            is_overlapped = not operation.waits and any(
                isinstance(inner, Kernel) and inner.computes for inner in with_inner(operations_until_done)
            )
            start_nesting = dataclasses.replace(nesting, asynchronous=not operation.waits, overlapped=is_overlapped)
            yield from start_nesting.collectives(
                operation.kind, operation.axes, operation.ranks, operation.buffers, operation.name
            )
        elif isinstance(operation, While) and operation.rank is None:
            yield from collectives(operation.body, nesting.loop(operation.trips))
        elif isinstance(operation, Choice):
            yield from nesting.branches([functools.partial(collectives, branch) for branch in operation.branches])
    # A device runs only its own rank's loops, so they count like the branches of a conditional.
    if loops_by_rank := loops_of_ranks(operations):
        yield from nesting.branches([functools.partial(collectives, loops) for loops in loops_by_rank.values()])


def with_inner(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield operations, each followed by the operations inside it: those of a loop's body or of all branches."""
    for operation in operations:
        yield operation
        if isinstance(operation, While):
            yield from with_inner(operation.body)
        elif isinstance(operation, Choice):
            yield from with_inner(itertools.chain(*operation.branches))


def _program_operations(
    mesh: Any, eqns: Sequence[Any], inner_operations: Sequence[Sequence[list[Operation]]]
) -> list[Operation]:
    """Return the operations that a compiled form of these equations would have.

    `inner_operations` has, for each equation, the operations of each program that it contains.
    """
    return [
        operation
        for eqn, programs in zip(eqns, inner_operations, strict=True)
        for operation in _eqn_operations(mesh, eqn, programs)
    ]


def _eqn_operations(mesh: Any, eqn: Any, inner_operations: Sequence[list[Operation]]) -> Iterable[Operation]:
    """Return the operations of one equation: a start, a choice, a loop, or the operations of its inner programs."""
    name, all_inner_operations = eqn.primitive.name, tuple(itertools.chain(*inner_operations))
    # JAX names asynchronous collectives with `_start`.
    if kind := PRIMITIVES.get(name.removesuffix("_start")):
        eqn_axes = axes_of(eqn)
        if unknown := set(eqn_axes) - set(mesh.axis_names):
            raise ValueError(
                f"{name} runs over {sorted(unknown)}, mesh has {mesh.axis_names}; give the mesh of the shard_map"
            )
        # Axes in mesh order, without axes of one device, as compiled programs have them.
        axes = tuple(axis for axis in mesh.axis_names if axis in eqn_axes and mesh.shape[axis] > 1)
        group_size = math.prod(mesh.shape[axis] for axis in axes)
        # Groups that are parts of axes have no axis name: they are named by their size.
        if index_groups := eqn.params.get("axis_index_groups"):
            axes, group_size = (f"{len(index_groups[0])} of {'+'.join(axes)}",), len(index_groups[0])
        # A ragged all-to-all also takes offsets and sizes; only its first operand is sent.
        avals = [var.aval for var in eqn.invars[: 1 if kind == "ragged-all-to-all" else None]]
        buffers = buffer_bytes(kind, group_size, ((aval.dtype.name, aval.size * aval.dtype.itemsize) for aval in avals))
        return [Start("", "", kind, axes, sum(buffers.values()), (), True, buffers, group_size)]
    if name == "cond":
        return [Choice("", tuple(map(tuple, inner_operations)))]
    if name in ("scan", "while"):
        runs = runs_of(eqn)
        loop = While("", runs.trips, all_inner_operations, rank=runs.rank)
        return [Choice("", ((), (loop,)))] if runs.is_upper_bound else [loop]
    return all_inner_operations
