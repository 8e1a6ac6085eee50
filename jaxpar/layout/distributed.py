"""Processes and devices of a run: joining the hosts, simulating devices, global batches, stopping together."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.extend.backend import clear_backends
from jax.sharding import Mesh, NamedSharding

from ..model.batches import batch_shardings
from .mesh import simulate

# What launchers set in each process that they start, where there are several: srun, and Open MPI's mpirun.
_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def join(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Joins the processes of one run, one a host; before anything else that touches a device.

    Without arguments, a process that srun or mpirun started as one of several asks them, and any other is alone.

    Args:
      coordinator: host:port of process 0.
      processes: how many there are.
      process: which one this is, from 0.

    Raises ValueError where only some of the three are given, or they cannot be.
    """
    if coordinator is None and processes is None and process is None:
        if any(int(os.environ.get(name, 1)) > 1 for name in _LAUNCHERS):
            jax.distributed.initialize()
        return
    if coordinator is None or processes is None or process is None:
        raise ValueError(
            f"coordinator={coordinator}, processes={processes}, process={process}: give all three, or none under srun"
        )
    if not 0 <= process < processes:
        raise ValueError(f"process={process} of processes={processes}: number them 0 to {processes - 1}")
    if not coordinator.rpartition(":")[2].isdigit():
        raise ValueError(f"coordinator={coordinator!r} needs a port, as in {coordinator.rstrip(':')}:12345")
    jax.distributed.initialize(coordinator, processes, process)


def attach(devices: int | None, default: int = 8) -> None:
    """Simulates `devices` CPU devices in each process, or, if None, `default` where there is nothing but one CPU.

    Raises ValueError for a number below 1.
    """
    if devices is None:
        if jax.process_count() > 1 or jax.default_backend() != "cpu" or jax.device_count() > 1:
            return
        clear_backends()  # the question started one, and its number of devices is fixed
    simulate(default if devices is None else devices)


def spread(batch: Any, mesh: Mesh) -> Any:
    """A global batch, the same in every process, as the step takes it: of several hosts each keeps its rows."""
    if jax.process_count() == 1:
        return batch

    def spread(x: Any, place: NamedSharding) -> jax.Array:
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, place, lambda index: x[index])

    return jax.tree.map(spread, batch, batch_shardings(batch, mesh))


class Stop:
    """Catches SIGINT and SIGTERM, so that a run ends after a step that all processes take. A context manager.

    `signal` is the first that came. A second Ctrl-C ends the process at once. Outside the main thread, which alone gets
    signals, it does nothing.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            # With several hosts SIGTERM is jax's: whoever gets it, all learn of it and agree on a step.
            caught = (signal.SIGINT,) if jax.process_count() > 1 else (signal.SIGINT, signal.SIGTERM)
            self._old = {number: signal.signal(number, self._on_signal) for number in caught}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # also while the process waits for a device
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def after(self, number: int) -> bool:
        """Whether the run ends after this step. Every process asks after every step."""
        if jax.process_count() == 1:
            return self.signal is not None
        if multihost_utils.reached_preemption_sync_point(number):
            self.signal = self.signal or signal.SIGTERM
            return True
        return False
