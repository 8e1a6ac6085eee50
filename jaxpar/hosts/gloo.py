"""CPU devices of several hosts: the address on which each listens for the others."""

from __future__ import annotations

import socket
from typing import Any

from jax._src import config, distributed, xla_bridge
from jax._src.lib import _jax


def listen_towards(coordinator: str) -> None:
    """CPU devices, whose collectives are Gloo's, listen on the interface that leads to the coordinator, and no other.

    Left to itself Gloo takes what the host's own name means there: in Debian's /etc/hosts loopback, where no other host
    finds it; and on loopback alone an address that others reach.
    """
    client = distributed.global_state.client
    assert client is not None
    if config.cpu_collectives_implementation.value != "gloo":
        return
    address = facing(coordinator)

    def devices() -> Any:
        return xla_bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(distributed_client=client, hostname=address))

    # As jax registers its own; the devices are made when they are first asked for.
    xla_bridge.register_backend_factory("cpu", devices, priority=0, fail_quietly=False)


def facing(coordinator: str) -> str:
    """This host's own address towards the coordinator's host:port. Nothing is sent."""
    host, _, port = coordinator.rpartition(":")
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
