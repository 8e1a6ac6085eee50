"""What `explain` found, and how it prints."""

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...backend.text import WIDTH, heading, number, size, table
from ..check.resharding import Move
from ..ledger import Collective, Ledger
from ..memory import Memory
from ..remat import ChosenValue
from ..transfers import Transfer

_MOVED = 6  # moves that are listed
_MEMORY = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer state",
    "saved": "saved activations",
    "host": "on the host",
    "program": "program",
    "arguments": "  arguments",
    "outputs": "  outputs",
    "temporaries": "  temporaries",
    "total": "  total",
}


@dataclass(frozen=True)
class Check:
    """One kind of collective over some axes, expected v found, per device and step.

    Attributes:
      strategy: what it serves: "ZeRO-3", "tensor", "pipeline", "data parallel", "scalars" (losses, metrics, norms), or
        "beside the closed form".
      kind, axes: as in `Collective`.
      expected: bytes of the closed form's buffers.
      expected_count: executions of the closed form.
      written_count: executions in the jaxpr, None where a loop's length is unknown. It equals `expected_count`.
      found: bytes of the compiled program's buffers.
      found_count: its executions, likewise. Compilers combine collectives, so the count is the compiler's.
      expected_sent, found_sent: of both what a device sends, by the ring convention: see `Collective.sent`.
    """

    strategy: str
    kind: str
    axes: tuple[str, ...]
    expected: int
    expected_count: int
    written_count: int | None
    found: int
    found_count: int | None
    expected_sent: int
    found_sent: int

    @property
    def ratio(self) -> float | None:
        """Bytes found over bytes expected; None where nothing is expected."""
        return self.found / self.expected if self.expected else None


@dataclass(frozen=True)
class Explanation:
    """What `step.explain(batch)` found. `print` it, or take `.json()` or `.picture(path)`.

    Attributes:
      strategy: as text.
      devices: number and kind, "8 x cpu".
      hosts: how many they are in.
      axes: the mesh axes with several devices, name -> size.
      parameters: the number of parameters.
      memory: "each device" -> `Memory`; for `server=True` "server" and "others".
      flops: floating-point operations of matrix products per device and step, by dtype; {} where a loop's length is
        unknown.
      ledger: the collectives of the compiled program.
      across: the axes whose collectives leave a host.
      checks: the ledger beside the closed form and the jaxpr.
      transfers: the exchanges of a central server, which are no collectives; else empty.
      notes: leaf -> why it is not sharded, or padded.
      gathered: what ranks of `tensor` gather for want of a rule: where -> bytes.
      loops: lists of blocks and stacks of layers: path -> how many layers, whether they are one stack, if not why.
      moves: what the compiler's partitioner sends for the update, of 1 kB or more, with parameter, axis, line and the
        spec that would spare it.
      values: with remat="auto", what becomes of each value that layers leave for their backwards.
      remarks: what a reader of the numbers should know.
    """

    strategy: str
    devices: str
    hosts: int
    axes: dict[str, int]
    parameters: int
    memory: dict[str, Memory]
    flops: dict[str, int]
    ledger: Ledger
    across: frozenset[tuple[str, ...]]
    checks: tuple[Check, ...]
    transfers: tuple[Transfer, ...]
    notes: dict[str, str]
    gathered: dict[str, int]
    loops: dict[str, str]
    moves: tuple[Move, ...]
    values: tuple[ChosenValue, ...]
    remarks: tuple[str, ...]

    @property
    def exposed(self) -> int:
        """Bytes that a device sends while nothing is computed."""
        return sum(one.sent for one in self.ledger if not one.overlapped)

    def json(self) -> dict[str, Any]:
        """All of it as dicts, lists, text and numbers, bytes unrounded."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "across"}
        ledger = [
            dataclasses.asdict(one)
            | {"axes": list(one.axes), "sent": one.sent, "across_hosts": one.axes in self.across}
            for one in self.ledger
        ]
        checks = [dataclasses.asdict(c) | {"axes": list(c.axes), "ratio": c.ratio} for c in self.checks]
        return plain | {
            "memory": {name: dataclasses.asdict(m) for name, m in self.memory.items()},
            "ledger": ledger,
            "checks": checks,
            "transfers": [dataclasses.asdict(t) for t in self.transfers],
            "moves": [move.json() for move in self.moves],
            "values": [dataclasses.asdict(value) for value in self.values],
            "remarks": list(self.remarks),
        }

    def picture(self, path: Path | str) -> None:
        """Draws a device's memory and bytes sent, as .svg, .png or .pdf, transparent for light and dark pages."""
        from .picture import Bar, picture  # matplotlib takes its time

        if self.transfers:
            title = "through the server's links in a step"
            bars = [Bar(t.kind, f"{t.kind} of {t.what}", t.expected, t.found) for t in self.transfers]
        else:
            checks = [c for c in self.checks if c.strategy != "scalars"]
            title = "sent by each device in a step" + ("" if checks else ": nothing")
            bars = [
                Bar(
                    c.kind,
                    f"{c.strategy}, over {'+'.join(c.axes)}",
                    c.expected_sent,
                    c.found_sent,
                    c.axes in self.across,
                )
                for c in checks
            ]
        picture(
            f"A training step on {self.devices}: {_words(self)}", self.strategy, self.memory, bars, title, Path(path)
        )

    def __repr__(self) -> str:
        return f"Explanation({self.strategy!r} on {self.devices}; print it)"

    def __str__(self) -> str:
        return text(self)


def _words(found: Explanation) -> str:
    """What spreads the step, in words: "data parallel over 2, ZeRO-3 over 4".

    Each way once, over its own axes: leaves that are replicated there are summed over others as well.
    """
    ways: dict[str, int] = {}
    for check in found.checks:
        if check.strategy != "scalars":
            ranks = math.prod(found.axes.get(axis, 1) for axis in check.axes)
            ways[check.strategy] = min(ranks, ways.get(check.strategy, ranks))
    spread = ", ".join(f"{way} over {ranks}" for way, ranks in ways.items())
    return "data parallel through a central server" if found.transfers else spread or "nothing is sent"


def text(found: Explanation) -> str:
    """What `explain` found, its sentences in 80 columns."""
    axes = ", ".join(f"{axis}={n}" for axis, n in found.axes.items()) or "no axes"
    hosts = f" on {found.hosts} hosts" if found.hosts > 1 else ""
    parts = [
        heading(found.strategy, f"{found.devices}{hosts} ({axes}), {found.parameters:,} parameters"),
        _memory(found),
    ]
    if found.values:
        parts.append(_values(found.values))
    if found.flops:
        flops = ", ".join(f"{number(n)}FLOP in {dtype}" for dtype, n in found.flops.items())
        parts.append(f"matrix products of a device and step: {flops}")
    if found.transfers:
        parts.append(_transfers(found))
    sent = ledger_table(found.ledger, found.across)
    parts += [sent, _checks(found)] if found.ledger or found.checks else ["collectives: none"]
    listed = {
        "not sharded, or padded": found.notes,
        "gathered by tensor ranks for want of a rule": {at: size(n) for at, n in found.gathered.items()},
        "layers": found.loops,
        "moved by the compiler for the update": _moves(found),
    }
    parts += ["\n".join([title, *_wrapped(lines)]) for title, lines in listed.items() if lines]
    parts += [textwrap.fill(remark, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for remark in found.remarks]
    return "\n\n".join("\n".join(line.rstrip() for line in part.splitlines()) for part in parts)


def _memory(found: Explanation) -> str:
    rows = [["memory", *found.memory]]
    for name, label in _MEMORY.items():
        values = [getattr(m, name) for m in found.memory.values()]
        if name == "host" and not any(values):
            continue
        rows.append([label, *(value if isinstance(value, str) else size(value) for value in values)])
    return table(rows, "<" + ">" * len(found.memory))


def _values(values: Sequence[ChosenValue]) -> str:
    """Those of 1% or more, all others in one line."""
    total = sum(value.bytes for value in values)
    large = [value for value in values if 100 * value.bytes >= total]
    rows = [["layers leave", "at", "bytes", "choice", "ms"]]
    for value in large:
        line = value.where.rpartition("/")[2].partition(" ")[0]
        rows.append([value.what, line, size(value.bytes), value.choice, f"{1e3 * value.seconds:.2f}"])
    rest = sum(value.bytes for value in values) - sum(value.bytes for value in large)
    return table([*rows, ["smaller ones", "", size(rest), "save", ""]], "<<><>", cut=0)


def _moves(found: Explanation) -> dict[str, str]:
    """The largest, by what is moved."""
    lines = {str(move): move.message.removeprefix(f"{move}: ") for move in found.moves[:_MOVED]}
    more = len(found.moves) - _MOVED
    return lines | ({f"and {more} more": "see .moves, or .json()"} if more > 0 else {})


def _transfers(found: Explanation) -> str:
    rows = [["exchange", "of", "arrays", "closed form", "found", "ratio"]]
    for t in found.transfers:
        ratio = f"{t.found / t.expected:.2f}" if t.expected else "-"
        rows.append([t.kind, t.what, str(t.arrays), size(t.expected), size(t.found), ratio])
    return table(rows, "<<>>>>")


def ledger_table(ledger: Ledger, across: frozenset[tuple[str, ...]] | None) -> str:
    """The collectives of a program; `across` None where it is not known which leave a host."""
    rows = [["collective", "axes", "dtype", "count", "buffers", "sent", "hosts", "hidden"]]
    groups: dict[tuple[Any, ...], list[Collective]] = {}
    for one in ledger:
        groups.setdefault((one.kind, one.axes, one.dtype), []).append(one)
    for (kind, axes, dtype), same in groups.items():
        total, hidden = sum(one.sent for one in same), sum(one.sent for one in same if one.overlapped)
        share = f"{hidden / total:.0%}" if any(one.asynchronous for one in same) else "-"
        where = "?" if across is None else "across" if axes in across else "inside"
        counts = [one.count for one in same]
        times = "?" if None in counts else str(sum(n or 0 for n in counts))
        rows.append(
            [kind, "+".join(axes), dtype, times, size(sum(one.bytes for one in same)), size(total), where, share]
        )
    total, hidden = sum(one.sent for one in ledger), sum(one.sent for one in ledger if one.overlapped)
    beside = (
        f"exposed: {size(total - hidden)} of {size(total)}, sent while nothing is computed\n"
        "sent: on the wire; of a buffer (n-1)/n among n, for an all-reduce twice that"
    )
    return f"{table(rows, '<<<>>>>>')}\n{beside}"


def _checks(found: Explanation) -> str:
    rows = [
        ["expected v found", "", "times", "", "sent", "", ""],
        ["", "axes", "formula", "jaxpr", "formula", "compiled", "ratio"],
    ]
    names = dict.fromkeys(c.strategy for c in found.checks)
    for name in sorted(names, key=lambda name: name == "scalars"):
        rows.append([name, "", "", "", "", "", ""])
        for c in (c for c in found.checks if c.strategy == name):
            ratio = "-" if c.ratio is None or name == "scalars" else f"{c.ratio:.2f}"
            written = "?" if c.written_count is None else str(c.written_count)
            counts = [str(c.expected_count), written]
            rows.append([f"  {c.kind}", "+".join(c.axes), *counts, size(c.expected_sent), size(c.found_sent), ratio])
    said = "formula: the closed form; jaxpr: what the step calls; compiled: what runs"
    return f"{table(rows, '<<>>>>>')}\n{said}"


def _wrapped(notes: dict[str, str]) -> Iterable[str]:
    return (
        textwrap.fill(f"{path}  {note}", WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        for path, note in notes.items()
    )
