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
from typing import TextIO

# Abseil's form: level, month and day, time, thread, file:line.
_NOISE = re.compile(rb"[IW]\d{4} .*\] |WARNING: All log messages before absl::InitializeLog\(\) is called")
# Whatever its level. `jaxpar launch` leaves it out for every script, as all that its processes print goes through it.
GLOO = re.compile(rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\..*\s*")


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
    sys.stderr = sys.__stderr__ = _around(2, sys.stderr, _NOISE)  # type: ignore[misc, assignment]
    sys.stdout = sys.__stdout__ = _around(1, sys.stdout, GLOO)  # type: ignore[misc, assignment]


def _around(number: int, python: TextIO | None, noise: re.Pattern[bytes]) -> TextIO | None:
    """The file `number` filtered for C++, and what Python has to write to for its own not to be; as it is if closed."""
    try:
        real = os.dup(number)
    except OSError:
        return python
    read, write = os.pipe()
    if os.fork() == 0:
        _pass_on(read, real, noise, close=(0, 1, 2, write))
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


def _pass_on(read: int, real: int, noise: re.Pattern[bytes], close: tuple[int, ...]) -> None:
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
                    if not noise.match(line):
                        os.write(real, line + b"\n")
            if rest and not noise.match(rest):
                os.write(real, rest)
    finally:
        os._exit(0)
