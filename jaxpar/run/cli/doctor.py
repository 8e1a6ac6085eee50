"""The command `jaxpar doctor`: prints the findings of `inspect/bench/doctor.py` about the machines of a run."""

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
    """Check what a run depends on: versions, devices, addresses, clocks, the shared folder, collectives.

    Start it in every process, as you would start the run. Exits with 1 if it finds a problem.
    """

    strategy: str = "fsdp"
    """strategy over whose axes collectives are measured"""
    folder: Path = Path("runs")
    """folder that all hosts should share: where --out will be"""
    bytes: int | None = None
    """bytes of each collective; by default 64 MB on accelerators, 1 MB on CPUs"""
    devices: int | None = None
    """number of CPU devices to simulate in each process; by default the accelerators, or 8 simulated devices"""
    coordinator: str | None = None
    """host:port of process 0, if there are several processes; srun and mpirun need none of these three"""
    processes: int | None = None
    """number of processes"""
    process: int | None = None
    """number of this process, from 0"""
    json: bool = False
    """print JSON instead of lines"""


def main(options: DoctorOptions) -> None:
    """Examine the machines, and print the findings on process 0. Every process exits with 1 if there is a problem."""
    Strategy.parse(options.strategy)  # an error now, not after minutes
    initialize(options.coordinator, options.processes, options.process)
    attach(options.devices)
    findings, prints = [], jax.process_index() == 0
    try:
        for finding in examine(options.strategy, local(options.folder, "folder"), options.bytes):
            # Print each finding at once: a later examination may wait for another process.
            findings.append(finding)
            if prints and not options.json:
                print(finding, flush=True)  # noqa: T201
    except Silent as error:
        print(f"jaxpar doctor: {error}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(1)  # a normal exit would wait for the silent process
    num_problems = sum(bool(finding.wrong) for finding in findings)
    if prints and options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))  # noqa: T201
    elif prints:
        print(f"{num_problems} problem{'s' * (num_problems > 1)}" if num_problems else "all well")  # noqa: T201
    if num_problems:
        sys.exit(1)
