"""The command `jaxpar doctor`."""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

from ...backend.files import local
from ...hosts.initialize import initialize
from ...inspect.bench.doctor import Silent, examine
from ...layout.distributed import attach
from ...strategy import Strategy


@dataclass(frozen=True)
class DoctorOptions:
    """Looks at what a run stands on: versions, devices, addresses, clocks, the shared folder, collectives.

    Start it as the run itself would be started, in every process. Exits with 1 where something is off.
    """

    strategy: str = "fsdp"
    """over whose axes collectives are measured"""
    folder: Path = Path("runs")
    """that all hosts should share: where --out will be"""
    bytes: int | None = None
    """of each collective; without it 64 MB on accelerators, 1 MB on CPUs"""
    devices: int | None = None
    """simulate so many CPU devices in each process; without it: the accelerators, or 8 simulated devices"""
    coordinator: str | None = None
    """host:port of process 0, where there are several; srun and mpirun need none of these three"""
    processes: int | None = None
    """how many processes there are"""
    process: int | None = None
    """which one this is, from 0"""
    json: bool = False
    """print JSON instead of lines"""


def main(options: DoctorOptions) -> None:
    """Examines and prints, on process 0. Exits with 1 where something is off, in every process."""
    Strategy.parse(options.strategy)  # before anything that takes time
    initialize(options.coordinator, options.processes, options.process)
    attach(options.devices)
    findings, speaks = [], jax.process_index() == 0
    try:
        for finding in examine(options.strategy, local(options.folder, "folder"), options.bytes):
            findings.append(finding)
            if speaks and not options.json:
                print(finding, flush=True)  # noqa: T201
    except Silent as error:
        print(f"jaxpar doctor: {error}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(1)  # leaving in good order would wait for the silent process
    off = sum(bool(finding.wrong) for finding in findings)
    if speaks and options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))  # noqa: T201
    elif speaks:
        print(f"{off} off" if off else "all well")  # noqa: T201
    if off:
        sys.exit(1)
