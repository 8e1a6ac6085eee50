"""The command `jaxpar` without what XLA, CUDA and Gloo say of themselves while they start.

With the CUDA compiler installed that is 6 to 16 lines on standard error for every command, written by C++ before any
level can be set: TF_CPP_MIN_LOG_LEVEL does not reach them. Gloo, which connects CPU devices of several processes,
writes a line to standard output for each group of them. So what C++ writes goes through two processes that leave out
lines of the levels I and W, and Gloo's that it is connected; errors (E, F), all that Python writes, and whatever has
another form are shown as they are. They are processes and no threads, since they must outlive an abort, whose last
words matter most.

This is imported before jax is, and must not import it.
"""

import io
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import TextIO

# Abseil's form: level, month and day, time, thread, file:line.
_NOISE = re.compile(rb"[IW]\d{4} .*\] |WARNING: All log messages before absl::InitializeLog\(\) is called")
# What Gloo writes, in pieces; a number, which may be anybody's, is one of them.
_GLOO = rb"\[Gloo\] Rank | is connected to | peer ranks\.(?: |$)|Expected number of connected peer ranks is :(?: |$)"
# The client and the service of JAX's coordinator, where one of them ends.
_COORDINATION = re.compile(
    rb"[WEF]\d{4} .* (?:coordination_service\w*|preemption_\w+)\.(?:cc|h):\d+\] "
    rb"|F\d{4} .* client\.h:\d+\] Terminating process because the JAX distributed service .*?(?:absl::Status: (.*))?$"
)
_CONTINUED = re.compile(
    rb"\s*$|RPC: /xla\.coordination|Additional GRPC error information from remote target coordination_service"
    rb"|:[A-Z_]+:| \[type\.googleapis\.com/|This suggests that the workers are out of sync"
    rb"|This is usually caused by an earlier error|\*\*\* Check failure stack trace: \*\*\*|    @ +0x"
)


class Gloo:
    """Knows the lines of Gloo about its own connections, one for each group of devices. `jaxpar launch` leaves them out
    for every script, as all that its processes print goes through it.

    A process's devices write at once, each in pieces: lines of two of them come as `[Gloo] Rank [Gloo] Rank 2 is
    connected ...`, `3 is connected ...`, or with an end of a line too many later.
    """

    def __init__(self) -> None:
        self._begun = 0  # of its lines, whose end has not been seen

    def __call__(self, line: bytes) -> bool:
        """Whether the next line of a process's output is Gloo's."""
        line = line.rstrip(b"\r\n")
        if re.sub(_GLOO, b"", line).strip(b"0123456789 ") or not (self._begun or re.search(_GLOO, line)):
            return False
        self._begun = max(0, self._begun + line.count(b"[Gloo] Rank ") - 1)
        return True


class Coordination:
    """Knows the lines, and the stack, with which XLA ends a process once JAX's coordinator is gone or reports an error.
    `jaxpar launch` leaves them out, as a sentence then says why the process ends: its own (`hosts/ending.py`), or else
    the launcher's.

    Attributes: `error`, the one that ended the process, "" before.
    """

    def __init__(self) -> None:
        self._within, self.error = False, ""

    def __call__(self, line: bytes) -> bool:
        """Whether the next line of a process's errors is one of these."""
        begun = _COORDINATION.match(line.rstrip(b"\r\n"))
        if begun and begun[1] and not self.error:
            self.error = begun[1].decode(errors="replace")
        self._within = bool(begun or (self._within and _CONTINUED.match(line)))
        return self._within


def _is_noise(line: bytes) -> bool:
    return bool(_NOISE.match(line))


def is_command() -> bool:
    """Whether this process is `jaxpar ...` or `python -m jaxpar ...`, and nobody has set a level of his own."""
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ or not hasattr(os, "fork"):
        return False
    words = sys.orig_argv
    module = words[words.index("-m") + 1 :][:1] if sys.argv[0] == "-m" and "-m" in words else []
    return module == ["jaxpar"] or os.path.basename(sys.argv[0]) == "jaxpar"


def filter_start() -> None:
    """From now on what this process's C++ writes is filtered. Called once, before there are threads.

    Python's own standard error and output stay what they are, terminals or not. Where there is no GPU, jax does not say
    that CUDA's plugin cannot load one.
    """
    logging.getLogger("jax._src.xla_bridge").addFilter(_matters)
    sys.stderr = sys.__stderr__ = _around(2, sys.stderr, _is_noise)  # type: ignore[misc, assignment]
    sys.stdout = sys.__stdout__ = _around(1, sys.stdout, Gloo())  # type: ignore[misc, assignment]


def _around(number: int, python: TextIO | None, is_noise: Callable[[bytes], bool]) -> TextIO | None:
    """The file `number` filtered for C++, and what Python has to write to for its own not to be; as it is if closed."""
    try:
        real = os.dup(number)
    except OSError:
        return python
    read, write = os.pipe()
    if os.fork() == 0:
        _pass_on(read, real, is_noise, close=(0, 1, 2, write))
    os.dup2(write, number)
    os.close(write)
    os.close(read)
    if not isinstance(python, io.TextIOWrapper):
        return python
    binary = open(real, "wb", buffering=0 if python.write_through else -1)  # noqa: SIM115
    return io.TextIOWrapper(binary, python.encoding, python.errors, None, python.line_buffering, python.write_through)


def _matters(record: logging.LogRecord) -> bool:
    gpus = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")
    return gpus or not record.getMessage().startswith("Jax plugin configuration error")


def _pass_on(read: int, real: int, is_noise: Callable[[bytes], bool], close: tuple[int, ...]) -> None:
    """Copies lines until all writers are gone, and ends the process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):  # those are the command's
        signal.signal(number, signal.SIG_IGN)
    for file in close:
        try:
            os.close(file)
        except OSError:  # closed by the shell
            continue
    try:
        with open(read, "rb", buffering=0) as source:
            rest = b""
            while part := source.read(1 << 16):
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if not is_noise(line):
                        os.write(real, line + b"\n")
            if rest and not is_noise(rest):
                os.write(real, rest)
    finally:
        os._exit(0)
