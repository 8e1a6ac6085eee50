"""How long a collective takes: latency and bandwidth (the alpha-beta model), on rings, within a host or across.

Thakur, Rabenseifner & Gropp 2005, Optimization of Collective Communication Operations in MPICH, section 3; NCCL's
tuning.cc adds up the same, for each of its protocols, and takes the fastest (`protocols.py`).

A group that spans hosts runs through them one by one: of the steps of its ring, one from host to host uses the network,
and each host has as many adapters to itself as it has devices in the group (one to a device, as in a DGX). An
all-reduce across hosts takes the faster of a ring and a double binary tree (Sanders, Speck & Träff 2009; NCCL 2.4),
whose steps are as many as the logarithm of the hosts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..compiled.kernels import Start
from ..targets.hardware import Hardware
from .protocols import protocols

# Measured from the host, where NCCL's model has 8: 64 bytes gathered on 4 H100s, github.com/waynehacking8/
# nccl-collectives-bench, results/quiet (2026).
_LEAST = 22.5e-6


@dataclass(frozen=True)
class Reach:
    """The way that a collective takes.

    Attributes:
      group: devices.
      hosts: that a group spans; 1: it stays within one.
      local: devices of a group that share a host.
    """

    group: int
    hosts: int
    local: int

    @classmethod
    def of(cls, start: Start, hosts: Sequence[int]) -> Reach:
        """`hosts`: for each place in the mesh the host of its device. Of all groups the one that spans most."""
        if start.kind == "collective-permute":
            across = any(hosts[a] != hosts[b] for a, b in start.groups)
            return cls(2, 1 + across, 2 - across)
        spans = [len({hosts[place] for place in group}) for group in start.groups]
        widest = max(range(len(spans)), key=lambda at: spans[at])
        size = len(start.groups[widest])
        return cls(size, spans[widest], -(-size // spans[widest]))

    @property
    def name(self) -> str:
        """What it is limited by: "link" or "network"."""
        return "network" if self.hosts > 1 else "link"


def collective_seconds(kind: str, size: int, way: Reach, hardware: Hardware) -> tuple[float, str]:
    """Seconds of one collective, with nothing beside it, and why.

    Args:
      kind: as in `Collective`.
      size: bytes of the whole buffer, as `Collective` counts them.
      way: where it goes.
      hardware: of the devices.

    Raises ValueError where `hardware` lacks a bandwidth. A latency that it lacks counts as none.
    """
    n = way.group
    direct = kind.endswith("all-to-all") and way.hosts > 1
    # Not a ring: each device sends what leaves its host through its own adapter.
    bandwidth = _bandwidth(Reach(n, way.hosts, 1) if direct else way, hardware)
    match kind:
        case "all-reduce":
            rounds, steps = 2 * (n - 1) / n, 2 * (n - 1)
        case "all-gather" | "reduce-scatter":
            rounds, steps = (n - 1) / n, n - 1
        case "all-to-all" | "ragged-all-to-all":
            rounds, steps = (n - way.local) / n if direct else (n - 1) / n, 1
        case "collective-broadcast":
            rounds, steps = 1.0, n - 1
        case _:  # a permute
            rounds, steps = 1.0, 1
    passes = steps // (n - 1) if steps > 1 else 1
    network = min(steps, passes * (way.hosts - 1)) if way.hosts > 1 else 0
    ways = []
    for one in protocols("ring", hardware, bandwidth, way.hosts, way.local, size):
        if one.name not in ("", "Simple") and (direct or steps == 1):
            continue  # messages from one to one go in Simple
        # For large all-reduces across hosts a ring's latency is 1.4 times that.
        plateau = 1.4 if one.name == "Simple" and kind == "all-reduce" and network and size >= 2**16 * n else 1.0
        waits = one.launch + (steps - network) * one.near + network * one.far
        ways.append((plateau * waits, size * rounds, one.bandwidth, one.name))
    if kind == "all-reduce" and way.hosts > 1:
        deep = math.ceil(math.log2(way.hosts))
        for one in protocols("tree", hardware, bandwidth, way.hosts, way.local, size):
            waits = one.launch + 2 * ((way.local - 1) * one.near + deep * one.far)
            ways.append((waits, 2.0 * size, one.bandwidth, f"{one.name}, a tree"))
    waits, sent, rate, name = min(ways, key=lambda one: one[0] + one[1] / one[2])
    if hardware.collective_latency:
        waits = max(waits, _LEAST - sent / rate)
    how = f", {name}" * bool(name)
    reason = f"{sent / 1e6:,.1f} MB at {rate / 1e9:.0f} GB/s + {waits * 1e6:.0f} us, {n} devices by {way.name}{how}"
    return waits + sent / rate, reason


def _bandwidth(way: Reach, hardware: Hardware) -> float:
    """Bytes/s at which a device's share of the ring's traffic flows: that of the narrower of link and network."""
    limits = {}
    if way.local > 1:
        limits["link_bandwidth"] = hardware.link_bandwidth and hardware.link_bandwidth * (hardware.link_efficiency or 1)
    if way.hosts > 1:
        limits["network_bandwidth"] = hardware.network_bandwidth and hardware.network_bandwidth * way.local
    for name, value in limits.items():
        if value is None:
            raise ValueError(
                f"{hardware.kind} has no {name}, and a collective of {way.group} devices on {way.hosts} hosts no time; "
                "give it in a file (jaxpar.inspect.targets.kinds.load)"
            )
    return min(limits.values())
