"""explain: what a training step holds and sends, from the compiled program, beside the closed form."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..server import OF_REPLICAS, ServerStep
from ..step import Step
from .entry import Collective
from .expected import expected
from .ledger import Ledger
from .transfers import Transfer, rehearse

WIDTH = 80
LABELS = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer state",
    "program": "program",
    "arguments": "  arguments",
    "outputs": "  outputs",
    "temporaries": "  temporaries",
    "total": "  total",
}
_SCALARS = 1000  # bytes; collectives of less are sums of scalars


@dataclass(frozen=True)
class Memory:
    """What one device holds in a step, in bytes.

    Attributes:
      params, grads, optimizer: at rest, as the layout stores them; a server's gradients are those of all replicas.
      arguments, outputs, temporaries: of the compiled program, as `memory_analysis()` has them; gradients are among
        the temporaries, or where programs follow each other among arguments and outputs.
      total: arguments, outputs and temporaries, memory that an output takes over from an argument counted once.
      program: which program that is: "step", or of those that follow each other the one that needs most.
    """

    params: int
    grads: int
    optimizer: int
    program: str
    arguments: int
    outputs: int
    temporaries: int
    total: int


@dataclass(frozen=True)
class Check:
    """One kind of collective, expected v found, per device and step.

    Attributes:
      kind, axes: as in `Collective`.
      expected: bytes of the closed form.
      expected_count: executions of the closed form.
      written_count: executions in the jaxpr, None where a loop's length is unknown. It equals `expected_count`.
      found: bytes in the compiled program.
      found_count: its executions, likewise. Compilers combine collectives, so the count is the compiler's.
    """

    kind: str
    axes: tuple[str, ...]
    expected: int
    expected_count: int
    written_count: int | None
    found: int
    found_count: int | None

    @property
    def ratio(self) -> float | None:
        """Bytes found over bytes expected; None where nothing is expected."""
        return self.found / self.expected if self.expected else None


@dataclass(frozen=True)
class Explanation:
    """What `step.explain(batch)` found. `print` it, or take `.json()`.

    Attributes:
      strategy: as text.
      devices: number and kind, "8 x cpu".
      axes: the mesh axes with several devices, name -> size.
      parameters: the number of parameters.
      memory: "each device" -> `Memory`; for `server=True` "server" and "others".
      ledger: the collectives of the compiled program.
      checks: the ledger beside the closed form and the jaxpr.
      transfers: the exchanges of a central server, which are no collectives; else empty.
      notes: leaf -> why it is not sharded, or padded.
      remarks: what a reader of the numbers should know.
    """

    strategy: str
    devices: str
    axes: dict[str, int]
    parameters: int
    memory: dict[str, Memory]
    ledger: Ledger
    checks: tuple[Check, ...]
    transfers: tuple[Transfer, ...]
    notes: dict[str, str]
    remarks: tuple[str, ...]

    def json(self) -> dict[str, Any]:
        """All of it as dicts, lists, text and numbers, bytes unrounded."""
        checks = [dataclasses.asdict(c) | {"axes": list(c.axes), "ratio": c.ratio} for c in self.checks]
        ledger = [dataclasses.asdict(one) | {"axes": list(one.axes)} for one in self.ledger]
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return plain | {
            "memory": {name: dataclasses.asdict(m) for name, m in self.memory.items()},
            "ledger": ledger,
            "checks": checks,
            "transfers": [dataclasses.asdict(t) for t in self.transfers],
            "remarks": list(self.remarks),
        }

    def __str__(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in self.axes.items()) or "no axes"
        head = f"{self.strategy}: {self.devices} ({axes}), {self.parameters:,} parameters"
        parts = [head, self._memory()]
        if self.transfers:
            parts.append(self._transfers())
        parts += [self._ledger(), self._checks()] if self.ledger or self.checks else ["collectives: none"]
        if self.notes:
            parts.append("\n".join(["not sharded, or padded", *_wrapped(self.notes)]))
        parts += [textwrap.fill(remark, WIDTH, subsequent_indent="  ") for remark in self.remarks]
        return "\n\n".join("\n".join(line.rstrip() for line in part.splitlines()) for part in parts)

    def _memory(self) -> str:
        rows = [["memory", *self.memory]]
        for name, label in LABELS.items():
            values = (getattr(m, name) for m in self.memory.values())
            rows.append([label, *(value if isinstance(value, str) else size(value) for value in values)])
        return _table(rows, "<" + ">" * len(self.memory))

    def _transfers(self) -> str:
        rows = [["exchange", "of", "arrays", "closed form", "found", "ratio"]]
        for t in self.transfers:
            ratio = f"{t.found / t.expected:.2f}" if t.expected else "-"
            rows.append([t.kind, t.what, str(t.arrays), size(t.expected), size(t.found), ratio])
        return _table(rows, "<<>>>>")

    def _ledger(self) -> str:
        rows = [["collective", "axes", "dtype", "count", "bytes", "overlapped"]]
        groups: dict[tuple[Any, ...], list[Collective]] = {}
        for one in self.ledger:
            groups.setdefault((one.kind, one.axes, one.dtype), []).append(one)
        for (kind, axes, dtype), same in groups.items():
            total, hidden = sum(one.bytes for one in same), sum(one.bytes for one in same if one.overlapped)
            share = f"{hidden / total:.0%}" if any(one.asynchronous for one in same) else "-"
            rows.append([kind, "+".join(axes), dtype, _count(_sum(same)), size(total), share])
        return _table(rows, "<<<>>>")

    def _checks(self) -> str:
        rows = [["expected v found", "axes", "closed form", "jaxpr", "", "compiled", "ratio"]]
        for c in self.checks:
            ratio = "-" if c.ratio is None or c.found < _SCALARS else f"{c.ratio:.2f}"
            counts = [f"{c.expected_count} x", f"{_count(c.written_count)} x"]
            rows.append([c.kind, "+".join(c.axes), *counts, size(c.expected), size(c.found), ratio])
        return _table(rows, "<<>>>>>")


def explain(step: Step, batch: Any, compiled: jax.stages.Compiled | None = None) -> Explanation:
    """See `Step.explain`; `compiled` where `step.compile(batch)` was called before."""
    step.check(batch)
    closed, written = expected(step, batch), Ledger.from_jaxpr(step.trace(batch), step.mesh)
    transfers: tuple[Transfer, ...] = ()
    remarks = []
    if isinstance(step, ServerStep):
        rehearsal = rehearse(step, batch)
        transfers, memory = tuple(rehearsal.transfers), _served(step, rehearsal.programs)
        texts = [rehearsal.programs[name].as_text() or "" for name in OF_REPLICAS]
        found = Ledger(one for text in texts for one in Ledger.from_hlo(text, step.mesh))
        total = size(sum(t.found for t in transfers))
        remarks.append(f"{len(transfers)} exchanges a step pass {total} through the server's links.")
    else:
        compiled = compiled or step.compile(batch)
        found = Ledger.from_hlo(compiled.as_text() or "", step.mesh)
        memory = {"each device": Memory(**step.layout.bytes, **_program("step", compiled))}
    remarks += _remarks(step, found)
    return Explanation(
        strategy=str(step.strategy),
        devices=f"{step.mesh.size} x {step.mesh.devices.flat[0].device_kind}",
        axes={axis: n for axis, n in step.mesh.shape.items() if n > 1},
        parameters=sum(math.prod(leaf.shape) for leaf in step.layout.kept.models),
        memory=memory,
        ledger=found,
        checks=tuple(_compared(closed, written, found)),
        transfers=transfers,
        notes=step.layout.notes,
        remarks=tuple(remarks),
    )


def size(n: float) -> str:
    """Bytes as text: "512 B", "3.41 MB" (decimal units)."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n) >= scale:
            return f"{n / scale:.2f} {unit}"
    return f"{n:.0f} B"


def _program(name: str, compiled: jax.stages.Compiled) -> dict[str, Any]:
    found: Any = compiled.memory_analysis()
    parts = {
        "arguments": found.argument_size_in_bytes,
        "outputs": found.output_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
    }
    return parts | {"program": name, "total": sum(parts.values()) - found.alias_size_in_bytes}


def _served(step: ServerStep, programs: dict[str, jax.stages.Compiled]) -> dict[str, Memory]:
    """The server holds the optimizer's state while it is a replica too, and every replica's gradients at the end."""
    at_rest, sizes = step.layout.bytes, {name: _program(name, compiled) for name, compiled in programs.items()}
    replica = max((sizes[name] for name in OF_REPLICAS), key=lambda p: p["total"])
    with_state = replica | {"total": replica["total"] + at_rest["optimizer"]}
    server = max([with_state, sizes["update"]], key=lambda p: p["total"])
    return {
        "server": Memory(**at_rest | {"grads": step.mesh.size * at_rest["grads"]}, **server),
        "others": Memory(**at_rest | {"optimizer": 0}, **replica),
    }


def _compared(closed: Ledger, written: Ledger, found: Ledger) -> Iterable[Check]:
    def chosen(ledger: Ledger, key: tuple[str, tuple[str, ...]]) -> list[Collective]:
        return [one for one in ledger if (one.kind, one.axes) == key]

    for key in dict.fromkeys((one.kind, one.axes) for ledger in (closed, written, found) for one in ledger):
        a, b, c = (chosen(ledger, key) for ledger in (closed, written, found))
        sent, compiled = sum(one.bytes for one in a), sum(one.bytes for one in c)
        yield Check(*key, sent, _sum(a) or 0, _sum(b), compiled, _sum(c))


def _remarks(step: Step, found: Ledger) -> Iterable[str]:
    if step.mesh.devices.flat[0].platform == "cpu":
        yield (
            "CPU: the program's total is arguments + outputs + temporaries, since the backend's own peak omits "
            "temporaries; collectives of low precision are compiled as float32, and none overlaps with compute."
        )
    if any(one.bytes < _SCALARS for one in found):
        yield f"Collectives of less than {_SCALARS} B add up scalars: losses, metrics, the optimizer's norms."
    if any(one.count is None for one in found):
        yield "?: in a loop of unknown length; the bytes are those of one round."
    if any(one.conditional for one in found):
        yield "Some collectives run in one branch of a conditional only: counts and bytes are upper bounds."


def _sum(collectives: Sequence[Collective]) -> int | None:
    counts = [one.count for one in collectives]
    return None if None in counts else sum(n for n in counts if n is not None)


def _count(n: int | None) -> str:
    return "?" if n is None else str(n)


def _wrapped(notes: dict[str, str]) -> Iterable[str]:
    return (
        textwrap.fill(f"{path}  {note}", WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        for path, note in notes.items()
    )


def _table(rows: Sequence[Sequence[str]], align: str) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:{a}{w}}" for cell, a, w in zip(row, align, widths, strict=True)) for row in rows)
