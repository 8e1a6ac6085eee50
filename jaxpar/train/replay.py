"""A step of a run, computed again from the checkpoint before, and compared with the digests that the run has kept."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checkpoint.about import exact, same_run
from ..checkpoint.saved import Checkpoint, numbers
from ..data.streams import training
from ..inspect.nonfinite.replay import whole
from ..inspect.verify import Bisected, bisect
from ..inspect.verify.differences import TOLERANCE, dtypes_of
from ..text import few
from ..text import size as of_bytes
from .digests import Digests, digests_of
from .input import Input
from .trainer import Trainer

_CONSTANTS = 1 << 30  # bytes of a step's parameters: the programs of `bisect` hold them, and none may have 2 GB


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
      equation: at which the strategies part (`jp.bisect`), on the parameters and the batch of that step: the recorded
        one and this one, or where they are the same, that one on its devices and on the same ones in other places; or
        why none can be named.
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
    equation: Bisected | str | None = None

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
            everywhere, before = len(self.devices) == self.total[1] > 1, (self.since, *self.compared)[-2]
            where = "all devices" if everywhere else few(self.devices, 4)
            lines.append(f"other bits: {few(self.leaves, 8)}, on {where}")
            if everywhere and self.step > before + 1:
                lines.append(
                    f"it began in one of the steps {before + 1} to {self.step}: where each is recorded (record=1), the "
                    "first that differs names leaf and device"
                )
        lines += [changed] * bool(changed)
        if isinstance(part := self.equation, Bisected) and not part.primitive:
            part = f"computed here once more, {part.a} and {part.b} agree: what made the difference does not come again"
        lines += str(part).split("\n  ") if part is not None else []
        return "\n  ".join(lines)


def replay(trainer: Trainer, number: int, equation: bool = True) -> Replayed:
    """Compute step `number` of the trainer's run again, from the last checkpoint before it, and compare each recorded
    step on the way, the checkpoint itself among them. Nothing is written; hooks are not called.

    Args:
      trainer: as the run's, which has trained in its `loop.out` with `loop.record`: another strategy or mesh may do.
      number: of a step that was recorded.
      equation: where one differs, find the equation (`jp.bisect`), with which the report ends: some twenty programs.

    The same layout, devices, versions and flags give the same bits; else what is compared is what no layout changes.
    With several hosts, all must call it. Takes the memory and the communication of training, of one digest a recorded
    step, and with `equation` of another copy of the parameters there.

    Raises ValueError where the step was not recorded, and where the checkpoint is of another run.
    """
    step, loop = trainer.step, trainer.loop
    if loop.out is None:
        raise ValueError("this trainer writes nothing; give the folder of the recorded run as out=")
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
        now, here = made.written(at, made.take(state, batch, metrics)), made.about()
        others = {name: (was, here.get(name, "not there")) for name, was in head["about"].items()}
        others = {name: (was, now) for name, (was, now) in others.items() if was != now}
        scalars = {
            name: (float.fromhex(then[name]), float.fromhex(now[name])) for name in ("loss", "grad_norm") if name in now
        }
        if others and not scalars:
            return None
        if not others and head["names"] != made.names:
            raise ValueError(
                f"{loop.out} is of another model or optimizer: their leaves are others; give the run's own"
            )
        compared.append(at)
        same = lambda a, b: a == b or (bool(others) and np.isclose(a, b, rtol=tolerance, atol=1e-30))
        differing = lambda names, kind: [n for n, a, b in zip(names, then[kind], now[kind], strict=True) if a != b]
        places = [a if a == b else f"{a} (now {b})" for a, b in zip(head["on"], made.devices, strict=not others)]
        return Replayed(
            at,
            since,
            tuple(compared),
            others,
            tuple(name for name, total in now["batch"].items() if then["batch"].get(name) != total),
            {name: pair for name, pair in scalars.items() if not same(*pair)},
            tuple([] if others else differing(head["names"], "leaves")),
            tuple([] if others else differing(places, "devices")),
            tolerance,
            (len(head["names"]), len(head["on"])),
        )

    found = compare(since, {}, {}) if since in recorded else None
    batches = Input(step, training(trainer.data, loop.rows, loop.seed, since, position, step.part), 0)
    for at in range(since + 1, number + 1):
        if found is not None and not found.ok:
            break
        if at > since + 1:
            batch = batches.next()
        else:
            batches.begin(batch := batches.first(since))
        before = (step.params(state), state.variables) if equation and at in recorded else None
        before = jax.tree.map(jnp.copy, before)  # the step takes the state
        state, metrics = step(state, batch)
        if at in recorded:
            found = compare(at, batch, metrics)
            if before is not None and not (found is None or found.ok or found.batch):
                found = dataclasses.replace(found, equation=_parting(trainer, recorded[at][0], before, batch))
        jax.block_until_ready(metrics)
    assert found is not None
    return found


def _parting(trainer: Trainer, head: Mapping[str, Any], before: Any, batch: Any) -> Bisected | str:
    """The equation at which the run's strategy, on these parameters and variables, parts from the trainer's, or where
    that is the same, from itself on the same devices, each in the place of the next.
    """
    step, says = trainer.step, "its equation is not known"
    then, now = head["about"]["the strategy"], str(exact(step))
    if (held := sum(x.nbytes for x in jax.tree.leaves(before[0]))) > _CONSTANTS:
        return f"{says}: parameters have {of_bytes(held)}B, and may have {of_bytes(_CONSTANTS)}B; try fewer layers"
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    params, variables = jax.tree.map(lambda x: x if is_key(x) else np.asarray(whole(x)), before)
    batch = jax.tree.map(whole, step.place(batch))  # of all hosts
    model, params = step.model_def, step.model_def.unwrap(params)
    made = dataclasses.replace(model, init=lambda key: (params, variables) if model.stateful else params)
    devices, many = [*step.mesh.devices.flat], len(head["on"])
    of_run = devices if len(devices) == many else jax.devices()[:many]
    if then == now:
        devices = [*devices[1:], devices[0]]  # what is wrong on one of them moves with it
    try:
        return bisect(made, then, now, batch, of_run, mesh_b=devices)
    except ValueError as error:
        return f"{says}: {error}"
