"""The ledger: every collective of a program, by kind, mesh axes, dtype, count and bytes per device and step.

It is read from two places, which answer different questions:

- **The jaxpr** (`Ledger.from_jaxpr`): what the author wrote inside `shard_map`. Its counts are portable. It has no
  collective that the partitioner adds later (the update at `jit` level, `tensor`), and a dim that is automatic over
  some axis counts whole.
- **The compiled program** (`Ledger.from_hlo`): what runs. Bytes are portable; counts are not, because each compiler
  combines collectives as it likes, and an all-reduce followed by a slice may stand for a reduce-scatter: what is there
  is reported. The CPU backend widens bfloat16 collectives to float32, so dtypes and bytes differ there.

`bytes` are those of the whole buffer that a device takes part in, times the count: output for all-gather, input for
every other kind. `sent` is what a device puts on the wire, by the ring convention: (n - 1)/n of the buffer in a group
of n, for all-reduce twice that, and all of it for a permute. Groups of one device move nothing and are dropped.
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
from ..hardware.compiled.entry import Nesting, merged, whole
from ..hardware.compiled.kernels import Choice, Done, Executable, Kernel, Operation, Start, While, of_ranks
from ..program.collectives import KINDS, PRIMITIVES, axes_of
from ..program.jaxpr import live
from ..program.trip_counts import share_of
from ..program.walk import fold, opened

FIELDS = tuple(field.name for field in dataclasses.fields(Collective))


class Ledger(tuple[Collective, ...]):
    """The collectives of a program: a tuple of `Collective`, alike ones added up, sorted by kind, axes and dtype."""

    def __new__(cls, collectives: Iterable[Collective] = ()) -> Self:  # noqa: D102 - the class says it
        return super().__new__(cls, merged(collectives))

    @classmethod
    def from_jaxpr(cls, jaxpr: Any, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Self:
        """Collectives written in a program, through jit, scan, cond, while, remat, custom derivatives, shard_map.

        Args:
          jaxpr: `jax.make_jaxpr(f)(...)`. What nobody reads is left out, as compilers leave it out (a derivative of
            `max` counts the elements that tie, even if it is then stopped).
          mesh: the mesh of its `shard_map`; gives the size of each axis.

        Raises:
          ValueError: a collective runs over an axis that `mesh` lacks.
        """
        program = opened(jaxpr)[0]
        read = fold(live(program.eqns, program.outvars), functools.partial(_operations, mesh))
        return cls(collectives(read, Nesting()))

    @classmethod
    def from_hlo(cls, text: str, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Self:
        """Collectives of a compiled program; loops count by their `known_trip_count`.

        Args:
          text: `compiled.as_text()`, from the CPU, GPU or TPU compiler.
          mesh: the mesh that it was compiled for, devices in the program's order.

        Raises:
          ValueError: the program is for another number of devices, or has a form of groups or a dtype not known here.
        """
        return cls.of(Executable(text, mesh))

    @classmethod
    def of(cls, *programs: Executable) -> Self:
        """The same of programs that were read before, with their mesh."""
        return cls(one for program in programs for one in collectives(program.operations, Nesting()))

    def by(self, *fields: str, value: str = "bytes") -> dict[Any, int]:
        """Sums of `value` ("bytes", "sent" or "count") by the given fields: `by("kind", "axes")` has keys (kind, axes).

        One field gives plain keys: `by("dtype")` is {"float32": ...}.

        Raises:
          ValueError: no such field, or a collective runs in a loop of unknown length.
        """
        self._check(*fields, *({value} - {"sent"}))
        sums: dict[Any, int] = {}
        for one in self:
            if one.count is None:
                raise ValueError(
                    f"{one.kind} over {one.axes} of {one.dtype} runs in a while loop of unknown length and cannot be "
                    "summed; use lax.scan or static bounds, or read the ledger's entries one by one"
                )
            key = tuple(getattr(one, field) for field in fields)
            key = key[0] if len(fields) == 1 else key
            sums[key] = sums.get(key, 0) + getattr(one, value)
        return sums

    def total(self, value: str = "bytes", **where: Any) -> int:
        """Sum of `value` ("bytes", "sent" or "count") where fields are as given: `total(dtype="bfloat16")`.

        Raises:
          ValueError: as `by`; or a kind that no collective has, or axes that are no tuple, which nothing could equal.
        """
        if where.get("kind", "all-reduce") not in KINDS:
            raise ValueError(f"kind={where['kind']!r} is no collective; use {', '.join(KINDS)}")
        if not isinstance(where.get("axes", ()), tuple):
            raise ValueError(f"axes={where['axes']!r} is no tuple of axes; use for example axes=('fsdp',)")
        self._check(*where)
        chosen = Ledger(one for one in self if all(getattr(one, field) == v for field, v in where.items()))
        return chosen.by(value=value).get((), 0)

    @staticmethod
    def _check(*fields: str) -> None:
        if unknown := set(fields) - set(FIELDS):
            raise ValueError(f"a collective has no {sorted(unknown)}; use {', '.join(FIELDS)}")

    def __str__(self) -> str:
        """A table with one line for each collective."""
        flags = ("asynchronous", "overlapped", "in_loop", "conditional")
        rows = [("kind", "axes", "dtype", "count", "bytes", "sent", "")]
        for one in self:
            notes = " ".join(flag for flag in flags if getattr(one, flag))
            count = "?" if one.count is None else str(one.count)
            rows.append((one.kind, "+".join(one.axes), one.dtype, count, f"{one.bytes:,}", f"{one.sent:,}", notes))
        return table(rows, "<<<>>><")


def collectives(operations: Sequence[Operation], nesting: Nesting) -> Iterator[Collective]:
    """Those of a compiled program, or of a loop's body, each for itself."""
    for position, one in enumerate(operations):
        if isinstance(one, Start):
            until = itertools.takewhile(functools.partial(operator.ne, Done(one.name)), operations[position + 1 :])
            hidden = not one.waits and any(map(_computes, until))
            here = dataclasses.replace(nesting, asynchronous=not one.waits, overlapped=hidden)
            yield from here.collectives(one.kind, one.axes, one.ranks, one.buffers, one.name)
        elif isinstance(one, While) and one.rank is None:
            yield from collectives(one.body, nesting.loop(one.trips))
        elif isinstance(one, Choice):
            yield from nesting.branches([functools.partial(collectives, branch) for branch in one.branches])
    if own := of_ranks(operations):
        yield from nesting.branches([functools.partial(collectives, loops) for loops in own.values()])


def _computes(one: Operation) -> bool:
    inside = one.body if isinstance(one, While) else itertools.chain(*one.branches) if isinstance(one, Choice) else ()
    return one.computes if isinstance(one, Kernel) else any(map(_computes, inside))


def _operations(mesh: Any, eqns: Sequence[Any], held: Sequence[Sequence[list[Operation]]]) -> list[Operation]:
    """A program as if it were compiled, from those that each of its equations holds."""
    return [one for eqn, inner in zip(eqns, held, strict=True) for one in _operation(mesh, eqn, inner)]


def _operation(mesh: Any, eqn: Any, held: Sequence[list[Operation]]) -> Iterable[Operation]:
    name, inside = eqn.primitive.name, tuple(itertools.chain(*held))
    if kind := PRIMITIVES.get(name.removesuffix("_start")):
        named = axes_of(eqn)
        if unknown := set(named) - set(mesh.axis_names):
            raise ValueError(
                f"{name} runs over {sorted(unknown)}, mesh has {mesh.axis_names}; give the mesh of the shard_map"
            )
        axes = tuple(axis for axis in mesh.axis_names if axis in named and mesh.shape[axis] > 1)
        group = math.prod(mesh.shape[axis] for axis in axes)
        if parts := eqn.params.get("axis_index_groups"):
            axes, group = (f"{len(parts[0])} of {'+'.join(axes)}",), len(parts[0])
        avals = [v.aval for v in eqn.invars[: 1 if kind == "ragged-all-to-all" else None]]
        buffers = whole(kind, group, ((a.dtype.name, a.size * a.dtype.itemsize) for a in avals))
        return [Start("", "", kind, axes, sum(buffers.values()), (), True, buffers, group)]
    if name == "cond":
        return [Choice("", tuple(map(tuple, held)))]
    if name in ("scan", "while"):
        share = share_of(str(eqn.source_info.name_stack)) if name == "while" else None
        trips = share.runs if share else eqn.params.get("length")
        return [While("", trips, inside, rank=share.rank if share else None)]
    return inside
