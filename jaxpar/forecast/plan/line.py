"""A plan: its lines, each a compiled strategy, in their order, and why each but the first loses."""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ...backend.text import size
from ...inspect.predict.prediction import longer
from ...strategy import Strategy
from .estimates import Estimate

# Of the published runs that were set aside, eight of ten took so many times what was predicted (docs/predict.md).
ERROR = (0.94, 1.09)
UNSEEN = (0.72, 1.24)  # and of the fifteen that were written down before they were predicted, twelve
_SLIGHT = 0.005  # of the best's seconds: a part that costs less is not named


@dataclass(frozen=True)
class Line:
    """A compiled strategy. Bytes and seconds are those of one device and one step.

    Attributes:
      strategy: what was compiled.
      estimate: its closed forms; None where `strategies` named it.
      usable: bytes that a program may take.
      memory: as `Memory` has it, by name.
      prediction: `Prediction.json()` without its parts.
      kernels: `Prediction.lines()`.
      links: bytes that a device sends by "link" (within a host) and "network".
      exposed: seconds in which kernels wait for collectives, by axes.
      sent: [kind, axes, bytes by the closed form, bytes found in the program].
      bubble: the part of the kernels' time in which a rank of the pipeline does masked work; where ranks branch none.
      compile_seconds: it took to build and compile.
      cached: whether that was before.
      least: FLOPs outside the bubble of the plan's line that computes fewest: what is more is recomputation.
      why: it is not first; "" of the first.
    """

    strategy: Strategy
    estimate: Estimate | None
    usable: int
    memory: dict[str, Any]
    prediction: dict[str, Any]
    kernels: list[str]
    links: dict[str, float]
    exposed: dict[str, float]
    sent: list[list[Any]]
    bubble: float
    compile_seconds: float
    cached: bool = False
    least: float = 0.0
    why: str = ""

    @property
    def fits(self) -> bool:
        """Whether the program takes no more than `usable`."""
        return self.memory["total"] <= self.usable

    @property
    def seconds(self) -> float:
        """Of a step, predicted."""
        return self.prediction["seconds"]

    def ties(self, best: "Line") -> bool:
        """Whether it may be as fast as `best`, by what predictions were off."""
        return self.fits and self.seconds * ERROR[0] <= best.seconds * ERROR[1]

    def json(self) -> dict[str, Any]:
        """All of it as dicts, lists, text and numbers."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        estimate = None if self.estimate is None else {**vars(self.estimate), "bytes": self.estimate.bytes}
        return plain | {"strategy": str(self.strategy), "estimate": estimate, "fits": self.fits}

    def costs(self) -> dict[str, float]:
        """The seconds by what they are spent on; they add up to `seconds`."""
        found = self.prediction
        products = ("matmul", "convolution", "attention", "attention backward")
        kinds: dict[str, float] = found["by_kind"]
        multiplied = sum(kinds.get(kind, 0.0) for kind in products)
        idle = self.bubble * multiplied
        again = (multiplied - idle) * (1 - self.least / self.useful) if self.least else 0.0
        other = found["compute"] - multiplied
        copies = kinds.get("copy to host", 0.0) + kinds.get("copy from host", 0.0)
        waits = found["seconds"] - found["compute"] - sum(self.exposed.values()) - copies  # in slots, for other ranks
        return {
            "matmuls and attention": multiplied - idle - again,
            "recomputation": again,
            "the pipeline's bubble": idle + max(0.0, waits),
            "exposed copies to and from the host": copies,
            "memory-bound kernels": other,
            **{f"exposed collectives over {axes}": seconds for axes, seconds in self.exposed.items()},
        }

    @property
    def useful(self) -> float:
        """FLOPs that a device computes outside the bubble, recomputation included."""
        return self.prediction["flops"] * (1 - self.bubble)


def ranked(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Best first, each with the reason why it is not."""
    lines = list(lines)
    least = min((line.useful for line in lines), default=0.0)
    lines = [dataclasses.replace(line, least=least) for line in lines]
    order = sorted(lines, key=lambda line: (not line.fits, line.seconds if line.fits else line.memory["total"]))
    return tuple(dataclasses.replace(line, why="; ".join(_whys(line, order[0], at))) for at, line in enumerate(order))


def _whys(line: Line, best: Line, at: int) -> Iterator[str]:
    if not line.fits:
        memory = line.memory
        rest = memory["total"] - memory["arguments"]
        yield (
            f"does not fit: {size(memory['total'])} is {size(memory['total'] - line.usable)} too much; "
            f"{size(memory['arguments'])} of state and batch, {size(rest)} of temporaries"
        )
        return
    if at == 0:
        return
    named = longer(line.costs(), best.costs())
    causes = [f"{1e3 * s:+,.0f} ms {name}" for s, name in named[:3] if s > _SLIGHT * best.seconds]
    saved = [f"{1e3 * s:+,.0f} ms {name}" for s, name in named[::-1][:1] if s < -_SLIGHT * best.seconds]
    within = ", within the error" if line.ties(best) else ""
    why = ", ".join([*causes, *saved]) or "a little of everything"
    yield f"{line.seconds / best.seconds - 1:.1%} slower{within}: {why}"
