"""Filters the start-up messages of XLA, CUDA and Gloo from the output of the command `jaxpar`.

With the CUDA compiler installed, C++ code writes 6 to 16 lines to standard error for every command, before any log
level can be set: TF_CPP_MIN_LOG_LEVEL does not reach them. Gloo, which connects CPU devices of several processes,
writes a line to standard output for each group of devices.

    C++  -> file 2 (a pipe) -> filter process: drops levels I and W       -> standard error
    C++  -> file 1 (a pipe) -> filter process: drops Gloo's connections   -> standard output
    Python ---------------------------------------------------------------> both, directly

Errors (levels E and F) and lines of any other form pass. The filters are processes, not threads, because they have to
outlive an abort of this process, whose last lines matter most.

This module is imported before jax and must not import it.
"""

import io
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import TextIO

# Abseil's log lines of levels I and W: level, month and day, time, thread, file:line.
_NOISE = re.compile(rb"[IW]\d{4} .*\] |WARNING: All log messages before absl::InitializeLog\(\) is called")
# The constant fragments of Gloo's lines. Between them it writes numbers, which are in other programs' lines too.
_GLOO = rb"\[Gloo\] Rank | is connected to | peer ranks\.(?: |$)|Expected number of connected peer ranks is :(?: |$)"
# The first line of an error of the client or the service of JAX's coordinator.
_COORDINATION = re.compile(
    rb"[WEF]\d{4} .* (?:coordination_service\w*|preemption_\w+)\.(?:cc|h):\d+\] "
    rb"|F\d{4} .* client\.h:\d+\] Terminating process because the JAX distributed service .*?(?:absl::Status: (.*))?$"
)
_STACK = b"*** Check failure stack trace: ***"
# The following lines of such an error, and of its stack.
_CONTINUED = re.compile(
    rb"\s*$|RPC: /xla\.coordination|Additional GRPC error information from remote target coordination_service"
    rb"|:[A-Z_]+:| \[type\.googleapis\.com/|This suggests that the workers are out of sync"
    rb"|This is usually caused by an earlier error|    @ +0x|" + re.escape(_STACK)
)


class Gloo:
    """Recognizes Gloo's lines about its connections, one for each group of devices.

    `jaxpar launch` uses it too, to filter the output of every script that it starts.

    The devices of a process write at the same time, each in fragments. Lines of two devices can arrive as `[Gloo] Rank
    [Gloo] Rank 2 is connected ...` and `3 is connected ...`, or with an extra end of line afterwards.
    """

    def __init__(self) -> None:
        self._num_open = 0  # lines that have begun and whose end has not arrived

    def __call__(self, line: bytes) -> bool:
        """Tell whether the next line of a process's output is Gloo's."""
        line = line.rstrip(b"\r\n")
        # Gloo's lines are fragments and numbers alone. A line of numbers alone is Gloo's only within an open line.
        if re.sub(_GLOO, b"", line).strip(b"0123456789 ") or not (self._num_open or re.search(_GLOO, line)):
            return False
        self._num_open = max(0, self._num_open + line.count(b"[Gloo] Rank ") - 1)
        return True


class Coordination:
    """Recognizes the lines and the stack with which XLA ends a process after an error of JAX's coordinator.

    `jaxpar launch` filters them, because a sentence says why the process ends: the process's own (`hosts/ending.py`),
    or else the launcher's.

    Attributes:
      error: the text of the error that ended the process; "" before it.
    """

    def __init__(self) -> None:
        self._is_inside, self.error = False, ""

    def __call__(self, line: bytes) -> bool:
        """Tell whether the next line of a process's standard error belongs to such an error."""
        match = _COORDINATION.match(line.rstrip(b"\r\n"))
        if match and match[1] and not self.error:
            self.error = match[1].decode(errors="replace")
        # A Python traceback of another thread may stand between the error and its stack.
        is_inside = self._is_inside or (self.error and line.startswith(_STACK))
        self._is_inside = bool(match or (is_inside and _CONTINUED.match(line)))
        return self._is_inside


def _is_noise(line: bytes) -> bool:
    """Tell whether a line of standard error is a log line of level I or W."""
    return bool(_NOISE.match(line))


def is_command() -> bool:
    """Tell whether this process is `jaxpar ...` or `python -m jaxpar ...` and the user has set no log level."""
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ or not hasattr(os, "fork"):
        return False
    words = sys.orig_argv
    # While a package is imported for `-m`, sys.argv[0] is "-m"; only orig_argv has the module's name.
    module = words[words.index("-m") + 1 :][:1] if sys.argv[0] == "-m" and "-m" in words else []
    return module == ["jaxpar"] or os.path.basename(sys.argv[0]) == "jaxpar"


def filter_start() -> None:
    """Filter what the C++ code of this process writes from now on. Call it once, before threads start (it forks).

    Python writes to the original standard error and output, which may be terminals. On machines without a GPU, jax's
    warning that the CUDA plugin finds none is dropped too.
    """
    logging.getLogger("jax._src.xla_bridge").addFilter(_is_relevant)
    sys.stderr = sys.__stderr__ = _redirect(2, sys.stderr, _is_noise)  # type: ignore[misc, assignment]
    sys.stdout = sys.__stdout__ = _redirect(1, sys.stdout, Gloo())  # type: ignore[misc, assignment]


def _redirect(descriptor: int, python_file: TextIO | None, is_noise: Callable[[bytes], bool]) -> TextIO | None:
    """Put a filter process in front of a file descriptor.

    Args:
      descriptor: 1 or 2, to which C++ writes.
      python_file: Python's file object of this descriptor.
      is_noise: tells whether to drop a line.

    Returns:
      A file object for Python that bypasses the filter; `python_file` if the descriptor is closed.
    """
    # 1. Keep the original file, for Python and for the filter's output.
    try:
        original = os.dup(descriptor)
    except OSError:
        return python_file
    # 2. Start the filter, and let the descriptor lead to it.
    read, write = os.pipe()
    if os.fork() == 0:
        _copy_lines(read, original, is_noise, close=(0, 1, 2, write))
    # From here on C++ code writes into the pipe. This process closes its other copies: the filter ends when the last
    # writing end is closed.
    os.dup2(write, descriptor)
    os.close(write)
    os.close(read)
    # 3. Wrap the original with the settings of Python's own file object.
    if not isinstance(python_file, io.TextIOWrapper):
        return python_file
    binary = open(original, "wb", buffering=0 if python_file.write_through else -1)  # noqa: SIM115
    return io.TextIOWrapper(
        binary, python_file.encoding, python_file.errors, None, python_file.line_buffering, python_file.write_through
    )


def _is_relevant(record: logging.LogRecord) -> bool:
    """Tell whether a log record of jax is worth showing: without a GPU, the CUDA plugin's error is not."""
    has_gpus = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")
    return has_gpus or not record.getMessage().startswith("Jax plugin configuration error")


def _copy_lines(read: int, target: int, is_noise: Callable[[bytes], bool], close: tuple[int, ...]) -> None:
    """Copy lines until all writers have closed the pipe, then end this process.

    Closes the descriptors in `close` first: an open writing end would keep the pipe from ending.
    """
    # Signals to the process group are for the command. The filter ends when the command has ended and all is copied.
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
        signal.signal(signal_number, signal.SIG_IGN)
    for descriptor in close:
        try:
            os.close(descriptor)
        except OSError:  # closed by the shell
            continue
    try:
        with open(read, "rb", buffering=0) as source:
            unfinished_line = b""
            while chunk := source.read(1 << 16):
                # A read may end within a line, whose end then comes with a later chunk.
                *lines, unfinished_line = (unfinished_line + chunk).split(b"\n")
                for line in lines:
                    if not is_noise(line):
                        os.write(target, line + b"\n")
            if unfinished_line and not is_noise(unfinished_line):
                os.write(target, unfinished_line)
    finally:
        os._exit(0)  # without the exit handlers of the command, which this process inherited
