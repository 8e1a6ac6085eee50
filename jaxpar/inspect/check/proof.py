"""What `check` finds: every promise of a strategy beside what the program does, as text, JSON or an error."""

import dataclasses
import textwrap
from dataclasses import dataclass
from typing import Any, Literal

from ...backend.text import WIDTH, heading, number, size, table
from .resharding import Move

Verdict = Literal["ok", "MISSING", "UNPROMISED"]


@dataclass(frozen=True)
class Finding:
    """One promise, and what was found.

    Attributes:
      part: what of a step: "state", "arguments", "layers", "as written", "as compiled", "tensor", "products",
        "overlap" or "exchanges".
      what: the array, or the kind and axes of a collective.
      promised, found: bytes per device and step; of layers and of what is gathered without a promise, of one execution;
        of overlap those that are sent, and that are sent while kernels run.
      verdict: "ok"; "MISSING": a promised sharding or collective is not there; "UNPROMISED": there is more.
      note: where something is wrong, what it is and what to try; else what was allowed for.
      moves: of a collective that the compiler's partitioner has for the update, each: what it moves, and what would
        spare it.
      unit: of both numbers; "FLOP" of products in FP8, each once, however often its loop runs.
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
        """Promised and found, as text."""
        return [f"{number(n)}{self.unit}" for n in (self.promised, self.found)]


@dataclass(frozen=True)
class Proof:
    """What `check` found. `print` it, or take `.json()`.

    Attributes:
      strategy: as text.
      devices: number and kind, "8 x cpu".
      findings: every promise.
      own: of a step that jaxpar did not make, whose author promises; `strategy` is its name.
    """

    strategy: str
    devices: str
    findings: tuple[Finding, ...]
    own: bool = False

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The promises that are not kept."""
        return tuple(found for found in self.findings if found.verdict != "ok")

    @property
    def ok(self) -> bool:
        """Whether all are kept."""
        return not self.broken

    def require(self) -> None:
        """Raise ValueError unless all promises are kept, with what was promised, what was found, and what to try."""
        if self.broken:
            lines = [
                f"{found.verdict} {found.part}: {found.what}, promised {found.amounts[0]}, found {found.amounts[1]}: "
                f"{found.note}"
                for found in self.broken
            ]
            on = f"{self.strategy} on {self.devices}"
            said = f"{on} does not keep its promises:" if self.own else f"strategy {on} did not take effect:"
            raise ValueError("\n  ".join([said, *lines]))

    def json(self) -> dict[str, Any]:
        """All of it as dicts, lists, text and numbers, bytes unrounded."""
        plain = {"strategy": self.strategy, "devices": self.devices, "ok": self.ok}
        findings = [
            dataclasses.asdict(dataclasses.replace(found, moves=())) | {"moves": [move.json() for move in found.moves]}
            for found in self.findings
        ]
        return plain | {"findings": findings}

    def __repr__(self) -> str:
        found = f"{len(self.broken)} promises broken" if self.broken else "promises kept"
        return f"Proof({self.strategy!r} on {self.devices}, {found}; print it)"

    def __str__(self) -> str:
        rows = [["", "", "promised", "found", ""]]
        for part in dict.fromkeys(found.part for found in self.findings):
            mine = [found for found in self.findings if found.part == part]
            kept = [found for found in mine if found.verdict == "ok"]
            if part == "state" and kept:  # one line for all: models have hundreds
                sums = (sum(found.promised for found in kept), sum(found.found for found in kept))
                rows.append([part, f"{len(kept)} arrays", *map(size, sums), "ok"])
                mine = [found for found in mine if found.verdict != "ok"]
            rows += [[part, found.what, *found.amounts, found.verdict] for found in mine]
        notes = dict.fromkeys(found.note for found in self.findings if found.verdict == "ok" and found.note)
        wrong = [f"{found.verdict} {found.what}: {found.note}" for found in self.broken]
        said = [textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for text in (*wrong, *notes)]
        verdict = "kept" if self.ok else f"{len(self.broken)} of {len(self.findings)} broken"
        head = heading(self.strategy, f"{self.devices}, promises {verdict}")
        return "\n\n".join([head, table(rows, "<<>><", cut=1), *(["\n".join(said)] if said else [])])
