"""Processes and devices of a run: simulating devices, stopping together."""

import os
import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.extend.backend import clear_backends

from .mesh import simulate


def attach(devices: int | None, default: int = 8) -> None:
    """Simulates `devices` CPU devices in each process, or, if None, `default` where there is nothing but one CPU.

    Raises ValueError for a number below 1.
    """
    if devices is None:
        if jax.process_count() > 1 or jax.default_backend() != "cpu" or jax.device_count() > 1:
            return
        clear_backends()  # the question started one, and its number of devices is fixed
    simulate(default if devices is None else devices)


class Stop:
    """Catches SIGINT, SIGTERM and SIGHUP (a terminal that closes), so that a run ends after a step that all processes
    take. A context manager.

    `signal` is the first that came. A second Ctrl-C ends the process at once. Outside the main thread, which alone gets
    signals, it does nothing. `last` is set from the last step on, after which the run ends in any case: then no other
    process is told, since some may be gone, and jax would wait for them to agree.
    """

    last = False

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            # With several hosts SIGTERM is jax's: whoever gets it, all learn of it and agree on a step.
            caught = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGINT, signal.SIGTERM]
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as `nohup` wants it
                caught.append(signal.SIGHUP)
            self._old = {number: signal.signal(number, self._on_signal) for number in caught}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # also while the process waits for a device
        if jax.process_count() > 1 and not self.last:
            os.kill(os.getpid(), signal.SIGTERM)

    def after(self, number: int) -> bool:
        """Whether the run ends after this step. Every process asks after every step."""
        if jax.process_count() == 1:
            return self.signal is not None
        if multihost_utils.reached_preemption_sync_point(number):
            self.signal = self.signal or signal.SIGTERM
            return True
        return False
