"""What a plan keeps of a compiled strategy."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ...parallel.pipeline.chunks import padded
from ...step.core import Step
from ..compiled.kernels import Executable
from ..expected import expected
from ..ledger import Ledger
from ..memory import of_step
from ..predict.prediction import predict
from ..predict.slots import searched
from ..targets.devices import Target


def numbers(
    step: Step, batch: Any, compiled: jax.stages.Compiled, target: Target, flops: float | None
) -> dict[str, Any]:
    """The fields of a `Line` that its program gives, as JSON has them; `flops` as for `plan`."""
    program = Executable(compiled.as_text() or "", step.mesh)
    (memory,) = of_step(step, batch, compiled).values()
    found = predict(program, step, batch, target.hardware, flops)
    ledger, closed = Ledger.of(program), expected(step, batch)
    sums = [one.by("kind", "axes", value="sent") for one in (closed, ledger)]
    links: dict[str, float] = {}
    exposed: dict[str, float] = {}
    for part in found.collectives:
        axes = "+".join(part.axes)
        links[part.way] = links.get(part.way, 0) + part.bytes
        exposed[axes] = exposed.get(axes, 0.0) + part.exposed
    prediction = {k: v for k, v in found.json().items() if k != "parts"}
    main, schedule = step.traced(batch).program.main, step.schedule
    if schedule and main and (why := padded(main.length, schedule.ranks, schedule.chunks)):
        prediction["notes"].append(f"{why}.")
    prediction["notes"] += [
        f"Attention over context is by {mode.name}: {mode.why}." for mode in step.tracing.attention_modes
    ]
    prediction["tables"] = [[table.kind, table.chunks] for table in searched(found, step)]
    prediction["chunked"] = any(logits.chunks > 1 for logits in step.tracing.logits.values())
    return {
        "memory": dataclasses.asdict(memory),
        "prediction": prediction,
        "kernels": found.lines(),
        "links": links,
        "exposed": exposed,
        "sent": [[k, "+".join(a), *(one.get((k, a), 0) for one in sums)] for k, a in sorted(sums[0] | sums[1])],
        "bubble": float(schedule.bubble) if schedule and not schedule.branches else 0.0,
    }
