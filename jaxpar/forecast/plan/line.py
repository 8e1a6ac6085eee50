"""The lines of a plan: compiled strategies, ranked, each with the reason why it is not the best.

`line_fields` reads a line's numbers from its compiled program. `ranked` orders lines and compares them with the best.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from ...backend.text import size
from ...hardware.compiled.kernels import Executable
from ...hardware.devices import Target
from ...hardware.hardware import RESERVE
from ...inspect.expected import expected
from ...inspect.ledger import Ledger
from ...inspect.memory import of_step
from ...inspect.predict.prediction import predict, time_differences
from ...parallel.pipeline.chunks import padded
from ...step.core import Step
from ...strategy import Strategy
from .estimates import Estimate

# Measured step time / predicted step time. Eight of ten published runs that were held out are in this range
# (experiments/results/published.md).
ERROR = (0.94, 1.09)
UNSEEN = (0.72, 1.24)  # the range of twelve of the fifteen runs that were written down before they were predicted
_SLIGHT = 0.005  # of the best line's seconds: smaller differences are not named as reasons


@dataclass(frozen=True)
class Line:
    """A compiled strategy. Bytes and seconds are per device and step.

    Attributes:
      strategy: the strategy.
      estimate: its closed forms. None if the user named the strategy.
      usable: the bytes that a program may take.
      memory: the fields of `Memory`, by name.
      prediction: `Prediction.json()` without its parts.
      kernels: `Prediction.lines()`.
      links: the bytes that a device sends, by "link" (within a host) and "network".
      exposed: the seconds in which kernels wait for collectives, by axes.
      sent: [kind, axes, bytes by the closed form, bytes found in the program] for all collectives.
      bubble: the share of the kernels' time in which a rank of the pipeline computes masked microbatches; 0 if idle
        ranks branch instead.
      compile_seconds: the seconds that it took to make and compile the step.
      cached: whether the numbers come from an earlier plan.
      least: the fewest FLOPs outside the bubble of any line in the plan. More FLOPs than these are recomputation.
      why: the reason why the line is not the first; "" for the first.
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
        """Return whether the program takes at most `usable` bytes."""
        return self.memory["total"] <= self.usable

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of a step."""
        return self.prediction["seconds"]

    @property
    def rank_key(self) -> tuple[bool, float]:
        """Order lines: those that fit by seconds, then the others by bytes."""
        return not self.fits, self.seconds if self.fits else self.memory["total"]

    def ties(self, best: "Line") -> bool:
        """Return whether the line may be as fast as `best`, given the error of predictions."""
        return self.fits and self.seconds * ERROR[0] <= best.seconds * ERROR[1]

    def json(self) -> dict[str, Any]:
        """Return the line as dicts, lists, text and numbers."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        estimate = None if self.estimate is None else {**vars(self.estimate), "bytes": self.estimate.bytes}
        return fields | {"strategy": str(self.strategy), "estimate": estimate, "fits": self.fits}

    def costs(self) -> dict[str, float]:
        """Return the seconds of a step by what they are spent on; they add up to `seconds`."""
        prediction = self.prediction
        product_kinds = ("matmul", "convolution", "attention", "attention backward")
        kinds: dict[str, float] = prediction["by_kind"]
        # The seconds of products = masked in the bubble + recomputation + the FLOPs that every line computes.
        products = sum(kinds.get(kind, 0.0) for kind in product_kinds)
        masked = self.bubble * products
        recomputed = (products - masked) * (1 - self.least / self.useful) if self.least else 0.0
        memory_bound = prediction["compute"] - products
        copies = kinds.get("copy to host", 0.0) + kinds.get("copy from host", 0.0)
        # Exposed seconds that belong to no collective or copy: a rank waits in its slot for other ranks.
        waits = prediction["seconds"] - prediction["compute"] - sum(self.exposed.values()) - copies
        return {
            "matmuls and attention": products - masked - recomputed,
            "recomputation": recomputed,
            "the pipeline's bubble": masked + max(0.0, waits),
            "exposed copies to and from the host": copies,
            "memory-bound kernels": memory_bound,
            **{f"exposed collectives over {axes}": seconds for axes, seconds in self.exposed.items()},
        }

    @property
    def useful(self) -> float:
        """Return the FLOPs that a device computes outside the bubble, recomputation included."""
        return self.prediction["flops"] * (1 - self.bubble)


def line_fields(
    step: Step, batch: Any, compiled: jax.stages.Compiled, target: Target, flops: float | None
) -> dict[str, Any]:
    """Return the fields of a `Line` that follow from its program, as JSON values; `flops` as for `plan`.

    Raises ValueError if the program needs more memory on the host than the host has for each device.
    """
    # 1. Memory.
    program = Executable(compiled.as_text() or "", step.mesh)
    # A step of a plan has one program; only a server has several.
    (memory,) = of_step(step, batch, compiled).values()
    hardware = target.hardware
    host_room = (1 - RESERVE) * (hardware.host_memory_bytes or math.inf) / hardware.per_host
    if memory.host > host_room:
        needed, room = size(memory.host), size(int(host_room))
        raise ValueError(
            f"the program needs {needed} on the host for each device, and the host has room for {room}; offload less"
        )

    # 2. Time and communication.
    prediction = predict(program, step, batch, hardware, flops)
    ledger, closed_form = Ledger.of(program), expected(step, batch)
    sent_bytes = [entries.by("kind", "axes", value="sent") for entries in (closed_form, ledger)]
    links: dict[str, float] = {}
    exposed: dict[str, float] = {}
    for part in prediction.collectives:
        axes = "+".join(part.axes)
        links[part.way] = links.get(part.way, 0) + part.bytes
        exposed[axes] = exposed.get(axes, 0.0) + part.exposed
    prediction_json = {k: v for k, v in prediction.json().items() if k != "parts"}  # `kernels` has the parts as text

    # 3. Notes.
    traced = step.traced(batch)
    main, schedule = traced.program.main, step.schedule
    if schedule and main and (why := padded(main.length, schedule.ranks, schedule.chunks)):
        prediction_json["notes"].append(f"{why}.")
    if (mode := traced.notes.attention_mode) is not None:
        prediction_json["notes"].append(f"Attention over context is by {mode.name}: {mode.why}.")
    if prediction.copies and (speed := hardware.host_bandwidth):
        halved = dataclasses.replace(hardware, host_bandwidth=speed / 2)
        slow = predict(program, step, batch, halved, flops)
        prediction_json["notes"].append(
            f"With {speed / 2e9:g} GB/s each way to the host instead of {speed / 1e9:g}, as if two devices share a "
            f"switch to it, {1e3 * slow.seconds:,.0f} ms."
        )
    prediction_json["chunked"] = any(logits.chunks > 1 for logits in traced.notes.logits.values())
    return {
        "memory": dataclasses.asdict(memory),
        "prediction": prediction_json,
        "kernels": prediction.lines(),
        "links": links,
        "exposed": exposed,
        "sent": [
            [kind, "+".join(axes), *(entries.get((kind, axes), 0) for entries in sent_bytes)]
            for kind, axes in sorted(sent_bytes[0] | sent_bytes[1])
        ],
        "bubble": float(schedule.bubble) if schedule and not schedule.branches else 0.0,
    }


def fastest(lines: Iterable[Line]) -> Line | None:
    """Return the fastest line that fits, or the smallest if none fits; None if there is no line."""
    return min(lines, key=lambda line: line.rank_key, default=None)


def ranked(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Return the lines, best first, each with the reason why it is not the best."""
    lines = list(lines)
    fewest_flops = min((line.useful for line in lines), default=0.0)
    lines = [dataclasses.replace(line, least=fewest_flops) for line in lines]
    lines.sort(key=lambda line: line.rank_key)
    return tuple(dataclasses.replace(line, why="; ".join(_reasons(line, lines[0], i))) for i, line in enumerate(lines))


def _reasons(line: Line, best: Line, rank: int) -> Iterator[str]:
    """Yield why a line is not the best, or does not fit; nothing for the best, of rank 0, if it fits."""
    if not line.fits:
        memory = line.memory
        temporaries = memory["total"] - memory["arguments"]
        yield (
            f"does not fit: {size(memory['total'])} is {size(memory['total'] - line.usable)} too much; "
            f"{size(memory['arguments'])} of state and batch, {size(temporaries)} of temporaries"
        )
        return
    if rank == 0:
        return
    # The parts that cost more than in the best line, and the one that saves most.
    differences = time_differences(line.costs(), best.costs())
    causes = [f"{1e3 * s:+,.0f} ms {name}" for s, name in differences[:3] if s > _SLIGHT * best.seconds]
    savings = [f"{1e3 * s:+,.0f} ms {name}" for s, name in differences[::-1][:1] if s < -_SLIGHT * best.seconds]
    within = ", within the error" if line.ties(best) else ""
    why = ", ".join([*causes, *savings]) or "a little of everything"
    yield f"{line.seconds / best.seconds - 1:.1%} slower{within}: {why}"
