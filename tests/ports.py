"""Ports for tests of several processes."""

import itertools
import os
import socket

_numbers = itertools.count()


def free_port() -> int:
    """A port of loopback that nobody takes until a process that has yet to start listens there.

    It is below those that the kernel hands out, which any connection of another test may get meanwhile, and of a range
    that is this process's own.
    """
    while True:
        port = 16_000 + os.getpid() % 800 * 20 + next(_numbers) % 20
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # somebody's server
                continue
        return port
