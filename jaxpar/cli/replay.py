"""The command that computes a recorded step of a run again."""

import collections
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import tyro

from ..files import place
from ..hosts.initialize import initialize
from ..layout.distributed import attach
from ..strategy import Strategy
from ..train.digests import digests_of
from ..train.replay import replay
from .options import TrainOptions, trainer_of


@dataclass(frozen=True)
class ReplayOptions:
    """Computes a step of a run again, from the last checkpoint before it, and compares the digests that the run has
    recorded with --record on the way.

    Says whether it is the same: to the bit where layout, devices, versions and flags are, else within rounding. Exits
    with 1 where it is not, naming the leaves, the devices and the equation.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """folder of the run, or its address"""
    step: int
    """number of a recorded step"""
    strategy: str | None = None
    """compute it under another one; without it: the run's"""
    devices: int | None = None
    """simulate so many CPU devices; without it: as many as the run did, or the accelerators"""
    rotate: int = 0
    """every device of a host takes the part of the one so many places before it: what moves with a device is its
    fault"""
    equation: bool = True
    """where it differs, name the equation at which the run's strategy and this one part, or its own on the same devices
    in other places: some twenty programs, minutes"""
    coordinator: str | None = None
    """host:port of process 0, where there are several"""
    processes: int | None = None
    """how many processes there are"""
    process: int | None = None
    """which one this is, from 0"""


def main(options: ReplayOptions) -> None:
    """`jaxpar replay`."""
    out = place(options.run, "run")
    head = next((head for head, line in digests_of(out) if line["step"] == options.step), digests_of(out)[-1][0])
    run = TrainOptions.load(out / "config.yaml")
    made = {"out": out, "quiet": True, "steps": head["steps"], "devices": options.devices or run.devices}
    made["strategy"] = options.strategy or head["about"]["the strategy"]
    Strategy.parse(str(made["strategy"]))  # before anything that takes time
    initialize(options.coordinator, options.processes, options.process)
    attach(int(made["devices"]) if made["devices"] else None)
    trainer, _ = trainer_of(dataclasses.replace(run, **made), mesh=_turned(options.rotate))
    found = replay(trainer, options.step, options.equation)
    if jax.process_index() == 0:
        print(found)  # noqa: T201
    if not found.ok:
        sys.exit(1)


def _turned(places: int) -> list[jax.Device] | None:
    """All devices, those of each process turned by so many places; None for 0."""
    hosts = collections.defaultdict[int, list[jax.Device]](list)
    for device in jax.devices():
        hosts[device.process_index].append(device)
    turned = [here[(at - places) % len(here)] for here in hosts.values() for at in range(len(here))]
    return turned if places else None
