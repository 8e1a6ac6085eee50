"""The result of `explain`, and how it prints."""

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...backend.text import WIDTH, heading, number, size, table
from ...program.savings import KINDS
from ..check.resharding import Move
from ..ledger import Collective, Ledger
from ..memory import Memory
from ..remat import ChosenValue
from ..transfers import Transfer

_MAX_LISTED_MOVES = 6
_LARGE_SAVING = 1_000_000  # bytes of a saving that is printed
_MEMORY_LABELS = {
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
    """The collectives of one kind over some axes, expected and found, per device and step.

    Attributes:
      strategy: the purpose of these collectives: "ZeRO-3", "tensor", "pipeline", "data parallel", "scalars" (losses,
        metrics, norms), or "beside the closed form" if the closed form lacks them.
      kind, axes: as in `Collective`.
      expected: bytes of the closed form's buffers.
      expected_count: executions in the closed form.
      written_count: executions in the jaxpr, equal to `expected_count`; None if a loop's length is unknown.
      found: bytes of the compiled program's buffers.
      found_count: executions in the compiled program, or None. Compilers combine collectives, so it may differ.
      expected_sent, found_sent: bytes that a device sends, by the ring convention (`Collective.sent`), for both.
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
        """Bytes found over bytes expected; None if nothing is expected."""
        return self.found / self.expected if self.expected else None


@dataclass(frozen=True)
class Explanation:
    """The result of `step.explain(batch)`. `print` it, or use `.json()` or `.picture(path)`.

    Attributes:
      strategy: as text.
      devices: number and kind, "8 x cpu".
      hosts: the number of their hosts.
      axes: the mesh axes with several devices, name -> size.
      parameters: the number of parameters.
      memory: "each device" -> `Memory`; for `server=True`, "server" and "others".
      flops: FLOPs of matrix products per device and step, by dtype; {} if a loop's length is unknown.
      ledger: the collectives of the compiled program.
      across: the axes whose collectives leave a host.
      checks: the ledger compared with the closed form and the jaxpr.
      transfers: the exchanges of a central server, which are not collectives; else empty.
      notes: leaf -> why it is not sharded, or padded.
      gathered: what ranks of `tensor` gather for lack of a rule: line -> bytes.
      loops: lists of blocks and stacks of layers: path -> how many layers, and whether they are one stack or why not.
      moves: the arrays of 1 kB or more that the compiler's partitioner sends for the update, each with parameter, axis,
        line and the spec that would avoid the move.
      savings: kind of rewriting (`jaxpar/program/savings.py`) -> estimated bytes of memory traffic that it saves on a
        device in a step. The same program without the rewriting would write and read them in addition.
      values: with remat="auto", the choice for each value that layers leave for their backwards.
      remarks: sentences that help to read the numbers.
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
    savings: dict[str, int]
    values: tuple[ChosenValue, ...]
    remarks: tuple[str, ...]

    @property
    def exposed(self) -> int:
        """Bytes that a device sends while nothing is computed."""
        return sum(collective.sent for collective in self.ledger if not collective.overlapped)

    def json(self) -> dict[str, Any]:
        """Return everything as dicts, lists, text and numbers, with exact bytes."""
        # `across` goes into the entries of the ledger, as sets of tuples are no JSON.
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "across"}
        ledger = [
            dataclasses.asdict(collective)
            | {"axes": list(collective.axes), "sent": collective.sent, "across_hosts": collective.axes in self.across}
            for collective in self.ledger
        ]
        checks = [dataclasses.asdict(check) | {"axes": list(check.axes), "ratio": check.ratio} for check in self.checks]
        return fields | {
            "memory": {name: dataclasses.asdict(memory) for name, memory in self.memory.items()},
            "ledger": ledger,
            "checks": checks,
            "transfers": [dataclasses.asdict(transfer) for transfer in self.transfers],
            "moves": [move.json() for move in self.moves],
            "values": [dataclasses.asdict(value) for value in self.values],
            "remarks": list(self.remarks),
        }

    def picture(self, path: Path | str) -> None:
        """Draw a device's memory and the bytes that it sends, as .svg, .png or .pdf.

        The background is transparent, for light and dark pages.
        """
        from .picture import Bar, picture  # importing matplotlib is slow

        # A server's exchanges are no collectives, and its ledger has the model's own only.
        if self.transfers:
            title = "through the server's links in a step"
            bars = [
                Bar(transfer.kind, f"{transfer.kind} of {transfer.what}", transfer.expected, transfer.found)
                for transfer in self.transfers
            ]
        else:
            # Sums of scalars would be invisible bars.
            checks = [check for check in self.checks if check.strategy != "scalars"]
            title = "sent by each device in a step" + ("" if checks else ": nothing")
            bars = [
                Bar(
                    check.kind,
                    f"{check.strategy}, over {'+'.join(check.axes)}",
                    check.expected_sent,
                    check.found_sent,
                    check.axes in self.across,
                )
                for check in checks
            ]
        picture(
            f"A training step on {self.devices}: {_strategy_in_words(self)}",
            self.strategy,
            self.memory,
            bars,
            title,
            Path(path),
        )

    def __repr__(self) -> str:
        return f"Explanation({self.strategy!r} on {self.devices}; print it)"

    def __str__(self) -> str:
        return text(self)


def _strategy_in_words(explanation: Explanation) -> str:
    """Return what distributes the step, in words: "data parallel over 2, ZeRO-3 over 4".

    Each strategy is named once, with the fewest ranks of its checks: gradients of replicated leaves are summed over
    more axes than the strategy's own.
    """
    ranks_by_strategy: dict[str, int] = {}
    for check in explanation.checks:
        if check.strategy != "scalars":
            num_ranks = math.prod(explanation.axes.get(axis, 1) for axis in check.axes)
            ranks_by_strategy[check.strategy] = min(num_ranks, ranks_by_strategy.get(check.strategy, num_ranks))
    distribution = ", ".join(f"{strategy} over {num_ranks}" for strategy, num_ranks in ranks_by_strategy.items())
    return "data parallel through a central server" if explanation.transfers else distribution or "nothing is sent"


def text(explanation: Explanation) -> str:
    """Return an explanation as text, its sentences wrapped to 80 columns."""
    axes = ", ".join(f"{axis}={axis_size}" for axis, axis_size in explanation.axes.items()) or "no axes"
    hosts = f" on {explanation.hosts} hosts" if explanation.hosts > 1 else ""
    parts = [
        heading(explanation.strategy, f"{explanation.devices}{hosts} ({axes}), {explanation.parameters:,} parameters"),
        _memory_table(explanation),
    ]
    # These parts are left out where a step has none of them.
    if explanation.values:
        parts.append(_values_table(explanation.values))
    if explanation.flops:
        flops = ", ".join(f"{number(count)}FLOP in {dtype}" for dtype, count in explanation.flops.items())
        parts.append(f"matrix products of a device and step: {flops}")
    savings = sorted(((n, KINDS[kind]) for kind, n in explanation.savings.items() if n >= _LARGE_SAVING), reverse=True)
    if savings:
        parts.append(table([["memory traffic saved", "estimate"], *([label, size(n)] for n, label in savings)], "<>"))
    if explanation.transfers:
        parts.append(_transfers_table(explanation))
    collectives = ledger_table(explanation.ledger, explanation.across)
    parts += (
        [collectives, _checks_table(explanation)] if explanation.ledger or explanation.checks else ["collectives: none"]
    )
    # Notes of one line each: title -> subject -> text. Empty lists are left out.
    lists_by_title = {
        "not sharded, or padded": explanation.notes,
        "gathered by tensor ranks for want of a rule": {
            line: size(num_bytes) for line, num_bytes in explanation.gathered.items()
        },
        "layers": explanation.loops,
        "moved by the compiler for the update": _moves_by_text(explanation),
    }
    parts += ["\n".join([title, *_wrapped_lines(lines)]) for title, lines in lists_by_title.items() if lines]
    parts += [
        textwrap.fill(remark, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for remark in explanation.remarks
    ]
    # Tables pad their last column: strip each line.
    return "\n\n".join("\n".join(line.rstrip() for line in part.splitlines()) for part in parts)


def _memory_table(explanation: Explanation) -> str:
    """Return the memory as a table, a column for each kind of device."""
    rows = [["memory", *explanation.memory]]
    for name, label in _MEMORY_LABELS.items():
        values = [getattr(memory, name) for memory in explanation.memory.values()]
        # Without `offload`, a row of zeros for the host would only confuse.
        if name == "host" and not any(values):
            continue
        rows.append([label, *(value if isinstance(value, str) else size(value) for value in values)])
    return table(rows, "<" + ">" * len(explanation.memory))


def _values_table(values: Sequence[ChosenValue]) -> str:
    """Return the values of at least 1% of the bytes as a table, and the others as one row."""
    total = sum(value.bytes for value in values)
    # A layer has dozens of small values, which are always saved.
    large = [value for value in values if 100 * value.bytes >= total]
    rows = [["layers leave", "at", "bytes", "choice", "ms"]]
    for value in large:
        line = value.where.rpartition("/")[2].partition(" ")[0]
        rows.append([value.what, line, size(value.bytes), value.choice, f"{1e3 * value.seconds:.2f}"])
    small_bytes = total - sum(value.bytes for value in large)
    return table([*rows, ["smaller ones", "", size(small_bytes), "save", ""]], "<<><>", cut=0)


def _moves_by_text(explanation: Explanation) -> dict[str, str]:
    """Return the largest moves: text of the move -> the remaining text."""
    lines = {str(move): move.message.removeprefix(f"{move}: ") for move in explanation.moves[:_MAX_LISTED_MOVES]}
    num_unlisted = len(explanation.moves) - _MAX_LISTED_MOVES
    return lines | ({f"and {num_unlisted} more": "see .moves, or .json()"} if num_unlisted > 0 else {})


def _transfers_table(explanation: Explanation) -> str:
    """Return the exchanges of a central server as a table."""
    rows = [["exchange", "of", "arrays", "closed form", "found", "ratio"]]
    for transfer in explanation.transfers:
        ratio = f"{transfer.found / transfer.expected:.2f}" if transfer.expected else "-"
        rows.append(
            [transfer.kind, transfer.what, str(transfer.arrays), size(transfer.expected), size(transfer.found), ratio]
        )
    return table(rows, "<<>>>>")


def ledger_table(ledger: Ledger, across: frozenset[tuple[str, ...]] | None) -> str:
    """Return the collectives of a program as a table.

    Args:
      across: the axes whose collectives leave a host; None if this is unknown.
    """
    rows = [["collective", "axes", "dtype", "count", "buffers", "sent", "hosts", "hidden"]]
    # Entries that differ in overlap or nesting alone share a line; their overlap is a share of its bytes.
    groups: dict[tuple[Any, ...], list[Collective]] = {}
    for collective in ledger:
        groups.setdefault((collective.kind, collective.axes, collective.dtype), []).append(collective)
    for (kind, axes, dtype), group in groups.items():
        total = sum(collective.sent for collective in group)
        hidden = sum(collective.sent for collective in group if collective.overlapped)
        # A synchronous collective cannot overlap, so that a share of 0% would say nothing.
        hidden_share = f"{hidden / total:.0%}" if any(collective.asynchronous for collective in group) else "-"
        reach = "?" if across is None else "across" if axes in across else "inside"
        counts = [collective.count for collective in group]
        count_text = "?" if None in counts else str(sum(count or 0 for count in counts))
        buffer_bytes = sum(collective.bytes for collective in group)
        amounts = size(buffer_bytes), size(total)
        rows.append([kind, "+".join(axes), dtype, count_text, *amounts, reach, hidden_share])
    total = sum(collective.sent for collective in ledger)
    hidden = sum(collective.sent for collective in ledger if collective.overlapped)
    legend = (
        f"exposed: {size(total - hidden)} of {size(total)}, sent while nothing is computed\n"
        "sent: bytes on the wire; (n-1)/n of a buffer in a group of n, all-reduce twice"
    )
    return f"{table(rows, '<<<>>>>>')}\n{legend}"


def _checks_table(explanation: Explanation) -> str:
    """Return the collectives, expected and found, as a table, "scalars" last."""
    rows = [
        ["expected v found", "", "times", "", "sent", "", ""],
        ["", "axes", "formula", "jaxpr", "formula", "compiled", "ratio"],
    ]
    # A line for each strategy, and its collectives indented below.
    names = dict.fromkeys(check.strategy for check in explanation.checks)
    for name in sorted(names, key=lambda name: name == "scalars"):
        rows.append([name, "", "", "", "", "", ""])
        for check in (check for check in explanation.checks if check.strategy == name):
            # The optimizer adds scalars, so that their ratio means nothing.
            ratio = "-" if check.ratio is None or name == "scalars" else f"{check.ratio:.2f}"
            written = "?" if check.written_count is None else str(check.written_count)
            amounts = str(check.expected_count), written, size(check.expected_sent), size(check.found_sent)
            rows.append([f"  {check.kind}", "+".join(check.axes), *amounts, ratio])
    legend = "formula: the closed form; jaxpr: what the step calls; compiled: what runs"
    return f"{table(rows, '<<>>>>>')}\n{legend}"


def _wrapped_lines(notes: dict[str, str]) -> Iterable[str]:
    """Yield notes as wrapped lines: path, two spaces, note."""
    return (
        textwrap.fill(f"{path}  {note}", WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        for path, note in notes.items()
    )
