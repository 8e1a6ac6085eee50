"""From a predicted step to a better table: what F, I, W and a message take, and the best order for these times."""

import math
from collections.abc import Sequence

from ...parallel.pipeline.schedules import OpCosts, Schedule
from ...parallel.pipeline.slots import scope
from ...step.core import Step
from ...tables import SCHEDULES
from .prediction import Prediction


def halved(schedule: Schedule) -> bool:
    """Whether its backwards are run in halves, I and W, so that a prediction has their times."""
    return {"I", "W"} <= {op.kind for column in schedule.table() for ops in column for op in ops}


def op_costs(found: Prediction, step: Step) -> OpCosts:
    """Seconds of F, I and W through all layers of a rank, and of a slot's messages, from the prediction of a step.

    They hold what collectives inside of layers expose; a slot's two messages come one after the other, so that both
    are one. The head and the embedding, which are no operation of the table, are left out.

    Raises ValueError where the step's ranks do not run I and W: compile it with `schedule="zb-h1"` first.
    """
    schedule = step.schedule
    if schedule is None or not halved(schedule):
        raise ValueError(
            f"{step.strategy} has no gradients of inputs and of weights of their own, whose times a search needs; "
            'compile and predict the step with schedule="zb-h1", and give both'
        )
    seconds = dict.fromkeys("FIW", 0.0)
    messages = 0.0
    for part in found.parts:
        taken = part.exposed if part.collective else part.seconds
        for kind in seconds:
            seconds[kind] += taken if f"/{scope(kind)}/" in part.source else 0.0
        messages += part.seconds if part.kind == "collective-permute" and part.axes == ("pipe",) else 0.0
    forward, inputs, weights = (seconds[kind] / schedule.microbatches for kind in "FIW")
    return OpCosts(forward, inputs, weights, message=messages / schedule.ticks)


def best_schedule(
    found: Prediction, step: Step, limit: float = math.inf, chunks: Sequence[int] = (1, 2)
) -> tuple[Schedule, OpCosts]:
    """The schedule of least time that a search finds for a step's predicted times, and these times. A strategy takes it
    as `schedule=`, with its `chunks`, or by its `kind`, which is text.

    Args:
      found: the prediction of `step`, which runs a schedule with I and W, such as "zb-h1".
      step: gives ranks and microbatches.
      limit: activations of all its layers and one microbatch that a rank may hold.
      chunks: of a rank, that are tried: one, or two that lie as a V.

    Raises ValueError as `op_costs`, and as `Schedule.auto` where no order of any of these chunks fits the limit.
    """
    costs, fitting, why = op_costs(found, step), [], None
    assert step.schedule is not None
    for count in chunks:
        try:
            fitting.append(Schedule.auto(step.schedule.ranks, step.schedule.microbatches, costs, limit, count))
        except ValueError as error:
            why = error
    if not fitting:
        raise why or ValueError("chunks is empty; give 1, 2 or both")
    return min(fitting, key=lambda one: (one.timed(costs.times(one.chunks), costs.message)[0], one.chunks)), costs


def searched(found: Prediction, step: Step) -> list[Schedule]:
    """The best schedules for predicted times with room for p and 2 p activations; none unless it runs I and W."""
    schedule = step.schedule
    if schedule is None or schedule.kind not in SCHEDULES or not halved(schedule) or not op_costs(found, step).forward:
        return []
    tables = [best_schedule(found, step, limit)[0] for limit in (schedule.ranks, 2 * schedule.ranks)]
    return list({(table.kind, table.chunks): table for table in tables}.values())
