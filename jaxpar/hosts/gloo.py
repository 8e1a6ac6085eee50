"""The address on which CPU devices of several hosts listen for each other."""

from __future__ import annotations

import socket
from typing import Any

from jax._src import config, distributed, xla_bridge
from jax._src.lib import _jax


def listen_towards(coordinator: str) -> None:
    """Make CPU devices, whose collectives are Gloo's, listen only on the interface that leads to the coordinator.

    By default Gloo listens on the address of the host's name. In Debian's /etc/hosts that is loopback, where no other
    host finds it. In a run on loopback alone, it may be an address that other hosts reach.
    """
    client = distributed.global_state.client
    assert client is not None
    if config.cpu_collectives_implementation.value != "gloo":
        return
    address = local_address_towards(coordinator)

    def make_client() -> Any:
        return xla_bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(distributed_client=client, hostname=address))

    # With the options of jax's own registration. The devices are made when a program first asks for them.
    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def local_address_towards(coordinator: str) -> str:
    """Return this host's address on the way to the coordinator, given as host:port."""
    host, _, port = coordinator.rpartition(":")
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of a datagram socket: looks up the route, and sends nothing
        return str(probe.getsockname()[0])
