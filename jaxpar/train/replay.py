"""A step of a run, computed again from the checkpoint before, and compared with the digests that the run has kept."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..checkpoint.about import same_run
from ..checkpoint.saved import Checkpoint, numbers
from ..data.streams import training
from ..inspect.verify.differences import TOLERANCE, dtypes_of
from ..text import few
from .digests import Digests, differing, digests_of
from .input import Input
from .trainer import Trainer


@dataclass(frozen=True)
class Replayed:
    """What has become of a step that was computed again; print it.

    Attributes:
      step: the number of the first recorded step that differs, else of the step that was asked for.
      since: that of the checkpoint that it was computed from; 0 for the initial values.
      compared: the recorded steps that were compared, in order.
      others: what is not as it was, so that bits may be others too: {"the strategy": (then, now)}. Where nothing is,
        bits are compared; else losses and norms of gradients, up to `tolerance` of their own.
      batch: the leaves of the batch that differ.
      scalars: "loss" and "grad_norm" that differ: (then, now).
      leaves: of the state, that differ; `devices`, on which.
      tolerance: for what is compared up to rounding.
    """

    step: int
    since: int
    compared: tuple[int, ...]
    others: dict[str, tuple[str, str]]
    batch: tuple[str, ...]
    scalars: dict[str, tuple[float, float]]
    leaves: tuple[str, ...]
    devices: tuple[str, ...]
    tolerance: float
    total: tuple[int, int] = (0, 0)

    @property
    def ok(self) -> bool:
        """Whether nothing differs, to the bit or up to rounding."""
        return not (self.batch or self.scalars or self.leaves)

    def __str__(self) -> str:
        begin = f"the checkpoint of step {self.since}" if self.since else "the initial values"
        says = f"step {self.step}, computed again from {begin}"
        changed = few([f"{name} was {then}, and is {now}" for name, (then, now) in self.others.items()], 4)
        if self.ok:
            many = f"recorded steps: {few(list(map(str, self.compared)), 8)}"
            if self.others:
                return f"{says}, is the same within {self.tolerance:.1g} ({many}); {changed}"
            return (
                f"{says}, is the same to the bit: loss, and {self.total[0]} leaves on {self.total[1]} devices ({many})"
            )
        lines = [f"{says}, DIFFERS; {len(self.compared) - 1} recorded steps before it are the same"]
        if self.batch:
            lines.append(f"its batch is another, in {few(self.batch)}: the data are not what they were")
        lines += [f"{name} was {then:.9g}, and is {now:.9g}" for name, (then, now) in self.scalars.items()]
        if self.leaves:
            where = "all devices" if len(self.devices) == self.total[1] else few(self.devices, 4)
            what = "all leaves" if len(self.leaves) == self.total[0] else few(self.leaves, 8)
            lines.append(f"other bits: {what}, on {where}")
        return "\n  ".join([*lines, *([changed] if changed else [])])


def replay(trainer: Trainer, number: int) -> Replayed:
    """Compute step `number` of the trainer's run again, from the last checkpoint before it, and compare each recorded
    step on the way, the checkpoint itself among them. Nothing is written; hooks are not called.

    Args:
      trainer: as the run's, which has trained in its `loop.out` with `loop.record`: another strategy or mesh may do.
      number: of a step that was recorded.

    The same layout, devices, versions and flags give the same bits; else what is compared is what no layout changes.
    With several hosts, all must call it. Takes the memory and the communication of training, and of one digest a
    recorded step.

    Raises ValueError where the step was not recorded, and where the checkpoint is of another run.
    """
    step, loop = trainer.step, trainer.loop
    if loop.out is None:
        raise ValueError("this trainer writes nothing; give the folder of the recorded run as out")
    recorded = {line["step"]: (head, line) for head, line in digests_of(loop.out)}
    if number not in recorded:
        near = sorted(recorded, key=lambda step: (abs(step - number), step))[:3]
        raise ValueError(f"step {number} was not recorded; use one that was, such as {few(list(map(str, near)))}")
    same_run(recorded[number][0]["run"], json.loads(json.dumps(trainer.about)), loop.out)
    folder = loop.out / "checkpoints"
    since = max((saved for saved in numbers(folder) if saved < number), default=0)
    position = None
    if since:
        state, position = step.restore(folder / str(since)), Checkpoint(folder / str(since)).data or None
    else:
        state = trainer.initial()
    made = Digests(step)
    tolerance = max(TOLERANCE[name] for name in (*recorded[number][0]["dtypes"], *dtypes_of(step.strategy)))
    compared: list[int] = []

    def compare(at: int, batch: Any, metrics: Any) -> Replayed | None:
        """What differs at a recorded step. None where nothing can be compared: a checkpoint has no loss and no batch,
        and its bits are of one layout.
        """
        head, then = recorded[at]
        if at > since and head["steps"] != loop.steps:
            raise ValueError(
                f"step {at} was computed with steps={head['steps']}, here steps={loop.steps}, and the learning rate "
                f"follows them; give steps={head['steps']}"
            )
        now = made.written(at, made.take(state, batch, metrics))
        here = made.about()
        others = {
            name: (was, here.get(name, "not there")) for name, was in head["about"].items() if was != here.get(name)
        }
        names, devices, scalars = list[str](), list[str](), {}
        both = {
            name: (float.fromhex(then[name]), float.fromhex(now[name])) for name in ("loss", "grad_norm") if name in now
        }
        if others and not both:
            return None
        compared.append(at)
        if others:
            scalars = {name: pair for name, pair in both.items() if not np.isclose(*pair, rtol=tolerance, atol=1e-30)}
        elif head["names"] != made.names:
            raise ValueError(
                f"{loop.out} is of another model or optimizer: their leaves are others; give the run's own"
            )
        else:
            scalars = {name: (a, b) for name, (a, b) in both.items() if a != b}
            names = differing(head["names"], then["leaves"], now["leaves"])
            places = [a if a == b else f"{a} (now {b})" for a, b in zip(head["on"], made.devices, strict=True)]
            devices = differing(places, then["devices"], now["devices"])
        wrong = [name for name, total in now["batch"].items() if then["batch"].get(name) != total]
        total = len(head["names"]), len(head["on"])
        return Replayed(at, since, tuple(compared), others, tuple(wrong), scalars, tuple(names), tuple(devices),
                        tolerance, total)  # fmt: skip

    found = compare(since, {}, {}) if since in recorded else None
    batches = Input(step, training(trainer.data, loop.rows, loop.seed, since, position, step.part), 0)
    for at in range(since + 1, number + 1):
        if found is not None and not found.ok:
            break
        batch = batches.next() if at > since + 1 else batches.first(since)
        state, metrics = step(state, batch)
        if at in recorded:
            found = compare(at, batch, metrics)
        jax.block_until_ready(metrics)
    assert found is not None
    return found
