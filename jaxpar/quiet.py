"""The command `jaxpar` without what XLA and CUDA say of themselves while they start.

With the CUDA compiler installed that is 6 to 16 lines on standard error for every command, written by C++ before any
level can be set: TF_CPP_MIN_LOG_LEVEL does not reach them. So what C++ writes goes through a process that leaves out
lines of the levels I and W; errors (E, F), all that Python writes, and whatever has another form are shown as they are.
It is a process and no thread, since it must outlive an abort, whose last words matter most.

This is imported before jax is, and must not import it.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys

# Abseil's form: level, month and day, time, thread, file:line.
_NOISE = re.compile(rb"[IW]\d{4} .*\] |WARNING: All log messages before absl::InitializeLog\(\) is called")
# What Gloo writes to standard output for each group of processes of CPU devices, whatever its level. `jaxpar launch`,
# through which all that its processes print goes anyway, leaves it out.
GLOO = re.compile(rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\..*\s*")


def is_command() -> bool:
    """Whether this process is `jaxpar ...` or `python -m jaxpar ...`, and nobody has set a level of his own."""
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ or not hasattr(os, "fork"):
        return False
    words = sys.orig_argv
    module = words[words.index("-m") + 1 :][:1] if sys.argv[0] == "-m" and "-m" in words else []
    return module == ["jaxpar"] or os.path.basename(sys.argv[0]) == "jaxpar"


def filter_errors() -> None:
    """From now on what this process's C++ writes to standard error is filtered. Called once, before there are threads.

    Python's own standard error stays what it is, a terminal or not. Where there is no GPU, jax does not say that CUDA's
    plugin cannot load one.
    """
    logging.getLogger("jax._src.xla_bridge").addFilter(_matters)
    try:
        real = os.dup(2)
    except OSError:  # it is closed
        return
    read, write = os.pipe()
    if os.fork() == 0:
        _pass_on(read, real, close=(0, 1, 2, write))
    os.dup2(write, 2)
    os.close(write)
    os.close(read)
    if sys.stderr is not None:
        encoding, errors = sys.stderr.encoding, sys.stderr.errors
        sys.stderr = sys.__stderr__ = open(real, "w", buffering=1, encoding=encoding, errors=errors)  # type: ignore[misc]  # noqa: SIM115


def _matters(record: logging.LogRecord) -> bool:
    gpus = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")
    return gpus or not record.getMessage().startswith("Jax plugin configuration error")


def _pass_on(read: int, real: int, close: tuple[int, ...]) -> None:
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
                    if not _NOISE.match(line):
                        os.write(real, line + b"\n")
            if rest and not _NOISE.match(rest):
                os.write(real, rest)
    finally:
        os._exit(0)
