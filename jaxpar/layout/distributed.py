"""Processes and devices of a run: simulate devices on one machine, and stop all processes after the same step."""

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
    """Simulate `devices` CPU devices in each process; if None, `default` devices if jax sees one CPU device alone.

    Args:
      devices: at least 1. None keeps accelerators, several processes, and devices that are simulated already.

    Raises:
      ValueError: if the number is below 1.
    """
    if devices is None:
        if jax.process_count() > 1 or jax.default_backend() != "cpu" or jax.device_count() > 1:
            return
        # `jax.device_count` started a backend, whose number of devices is fixed; `simulate` needs a new backend.
        clear_backends()
    simulate(default if devices is None else devices)


class Stop:
    """Context manager that catches SIGINT, SIGTERM and SIGHUP, so that a run ends after a step that all processes take.

    A terminal that closes sends SIGHUP. A second Ctrl-C ends the process immediately. Outside the main thread, which
    alone receives signals, the manager does nothing.

    Attributes:
      signal: the first signal that arrived, None before.
      last: set by the run from its last step on. A signal is then not passed on: the run ends after this step anyway,
        and jax would wait for an agreement with processes that may have exited.
    """

    last = False

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            # With several hosts jax handles SIGTERM: it tells all processes, and they agree on a step.
            caught_signals = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGINT, signal.SIGTERM]
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # `nohup` ignores it, and must keep doing so
                caught_signals.append(signal.SIGHUP)
            self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in caught_signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            # None stands for a handler that Python has not installed, and cannot install again.
            signal.signal(number, handler or signal.SIG_DFL)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """Remember the first signal, and tell the other processes through jax's own SIGTERM handler."""
        self.signal = self.signal or signal.Signals(number)
        # From now on Ctrl-C ends the process, even while it waits for a device.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if jax.process_count() > 1 and not self.last:
            os.kill(os.getpid(), signal.SIGTERM)

    def after(self, number: int) -> bool:
        """Return whether the run ends after step `number`. Every process must call this after every step."""
        if jax.process_count() == 1:
            return self.signal is not None
        if multihost_utils.reached_preemption_sync_point(number):
            self.signal = self.signal or signal.SIGTERM
            return True
        return False
