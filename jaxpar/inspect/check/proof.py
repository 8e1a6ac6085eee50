"""The result of `check`: every promise of a strategy with what the program does, as text, JSON or an error."""

import dataclasses
import textwrap
from dataclasses import dataclass
from typing import Any, Literal

from ...backend.text import WIDTH, heading, number, size, table
from .resharding import Move

Verdict = Literal["ok", "MISSING", "UNPROMISED"]


@dataclass(frozen=True)
class Finding:
    """One promise, and what the program does.

    Attributes:
      part: the part of a step: "state", "arguments", "layers", "as written", "as compiled", "tensor", "products",
        "overlap" or "exchanges".
      what: the array, or the kind and axes of a collective.
      promised, found: bytes per device and step. For "layers" and unpromised gathers, bytes of one execution. For
        "overlap", the bytes that are sent and the bytes that are sent while kernels run.
      verdict: "ok"; "MISSING": a promised sharding or collective is absent; "UNPROMISED": there is more than promised.
      note: for a broken promise, the problem and what to try; otherwise what was allowed for.
      moves: for a collective that the compiler's partitioner added for the update, the arrays that it moves, and why.
      unit: the unit of both numbers. It is "FLOP" for FP8 products, which count once, however often their loop runs.
    """

    part: str
    what: str
    promised: int
    found: int
    verdict: Verdict = "ok"
    note: str = ""
    moves: tuple[Move, ...] = ()
    unit: str = "B"

    @property
    def amounts(self) -> list[str]:
        """The promised and the found amount, as text."""
        return [f"{number(n)}{self.unit}" for n in (self.promised, self.found)]


@dataclass(frozen=True)
class Proof:
    """All findings of `check`. `print` it, or use `.json()`.

    Attributes:
      strategy: as text.
      devices: number and kind, "8 x cpu".
      findings: every promise.
      own: whether the step is the user's own, made without jaxpar. Its author then states the promises, and `strategy`
        is the step's name.
    """

    strategy: str
    devices: str
    findings: tuple[Finding, ...]
    own: bool = False

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The promises that the program does not keep."""
        return tuple(finding for finding in self.findings if finding.verdict != "ok")

    @property
    def ok(self) -> bool:
        """Whether the program keeps all promises."""
        return not self.broken

    def require(self) -> None:
        """Raise ValueError unless all promises are kept, with what was promised, what was found, and what to try."""
        if self.broken:
            lines = [
                f"{finding.verdict} {finding.part}: {finding.what}, promised {finding.amounts[0]}, "
                f"found {finding.amounts[1]}: {finding.note}"
                for finding in self.broken
            ]
            subject = f"{self.strategy} on {self.devices}"
            summary = (
                f"{subject} does not keep its promises:" if self.own else f"strategy {subject} did not take effect:"
            )
            raise ValueError("\n  ".join([summary, *lines]))

    def json(self) -> dict[str, Any]:
        """Return everything as dicts, lists, text and numbers, with exact bytes."""
        # `asdict` would write specs of moves as they are; `Move.json` writes them as text.
        plain = {"strategy": self.strategy, "devices": self.devices, "ok": self.ok}
        findings = [
            dataclasses.asdict(dataclasses.replace(finding, moves=()))
            | {"moves": [move.json() for move in finding.moves]}
            for finding in self.findings
        ]
        return plain | {"findings": findings}

    def __repr__(self) -> str:
        verdict = f"{len(self.broken)} promises broken" if self.broken else "promises kept"
        return f"Proof({self.strategy!r} on {self.devices}, {verdict}; print it)"

    def __str__(self) -> str:
        rows = [["", "", "promised", "found", ""]]
        for part in dict.fromkeys(finding.part for finding in self.findings):
            listed = [finding for finding in self.findings if finding.part == part]
            kept_promises = [finding for finding in listed if finding.verdict == "ok"]
            # A model has hundreds of arrays: intact ones share one line.
            if part == "state" and kept_promises:
                sums = (
                    sum(finding.promised for finding in kept_promises),
                    sum(finding.found for finding in kept_promises),
                )
                rows.append([part, f"{len(kept_promises)} arrays", *map(size, sums), "ok"])
                listed = [finding for finding in listed if finding.verdict != "ok"]
            rows += [[part, finding.what, *finding.amounts, finding.verdict] for finding in listed]
        # Broken promises first, then what was allowed for, each note once.
        notes = dict.fromkeys(finding.note for finding in self.findings if finding.verdict == "ok" and finding.note)
        failures = [f"{finding.verdict} {finding.what}: {finding.note}" for finding in self.broken]
        paragraphs = [
            textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for text in (*failures, *notes)
        ]
        verdict = "kept" if self.ok else f"{len(self.broken)} of {len(self.findings)} broken"
        head = heading(self.strategy, f"{self.devices}, promises {verdict}")
        return "\n\n".join([head, table(rows, "<<>><", cut=1), *(["\n".join(paragraphs)] if paragraphs else [])])
