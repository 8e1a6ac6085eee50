"""How long a collective takes: latency and bandwidth (the alpha-beta model), on rings, within a host or across.

Thakur, Rabenseifner & Gropp 2005, Optimization of Collective Communication Operations in MPICH, section 3; NCCL adds
up the same, for each of its protocols, and takes the fastest by size (github.com/NVIDIA/nccl, src/graph/tuning.cc,
2.28.3). Its latencies in microseconds by algorithm, link and protocol:

            launch            step over NVLink    PCIe               network
    ring    6.6  14.0  8.4    0.6   1.9   3.4     1.0   2.5   5.7    2.7   4.0   14.0     LL, LL128, Simple
    tree    6.8  14.0  8.4    0.6   1.25  4.0     1.0   1.9   4.0    5.0   8.5   14.0

`Hardware` has those of a ring in the Simple protocol, which the others are shares of: a file that gives a slower
network makes it slower for each. LL sends a flag with every 4 bytes, LL128 one with every 120.

A group that spans hosts runs through them one by one: of the steps of its ring, one from host to host uses the network,
and each host has as many adapters to itself as it has devices in the group (one to a device, as in a DGX). An
all-reduce across hosts takes the faster of a ring and a double binary tree (Sanders, Speck & Träff 2009; NCCL 2.4),
whose steps are as many as the logarithm of the hosts.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from .compiled.kernels import Start
from .hardware import Hardware

# Of LL where data stays in a host, by the kind of GPU, and of two hosts, and of more (llMaxBws, of Intel's hosts).
_LL_INSIDE = {"A100": 87.7e9, "H100": 141e9, "H200": 141e9, "B200": 282e9}
_LL_ACROSS = (39e9, 20.4e9)
# Of a tree and its protocols across hosts: all but 8 of 100 for the tree, 120 of 128 bytes in LL128, 1 of 3.8 in LL.
_TREE = 0.92
# What trees reach of it by size, powers of two from 64 B (treeCorrectionFactor).
_TREES = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    "Simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8),
        *(0.9, 0.9),
    ),
}


@dataclass(frozen=True)
class Protocol:
    """One of NCCL's: seconds to launch, of a step within a host and of one between hosts, and bytes/s."""

    name: str
    launch: float
    near: float
    far: float
    bandwidth: float


def protocols(
    algorithm: Literal["ring", "tree"], hardware: Hardware, bandwidth: float, hosts: int, local: int, size: int
) -> Iterator[Protocol]:
    """Those of an algorithm for a group on so many hosts, `local` of its devices in each; `bandwidth` is what the
    narrowest link gives, `size` the bytes of the buffer. A latency that `hardware` lacks counts as none.
    """
    given = hardware.collective_latency, hardware.link_latency, hardware.network_latency
    launch, near, far = (value or 0.0 for value in given)
    if "TPU" in hardware.device_kind:
        yield Protocol("", launch, near, far, bandwidth)
        return
    pcie = near > 5e-6
    ring = algorithm == "ring"
    # Where each device is alone on its host, nothing hides its network's latency: that of trees counts.
    hidden = ring and local > 1
    of_network = {"LL": 2.7 if hidden else 5.0, "LL128": 4.0 if hidden else 8.5, "Simple": 14.0}
    of_link = (
        {"LL": 1.0, "LL128": 2.5 if ring else 1.9, "Simple": 5.7 if ring else 4.0}
        if pcie
        else {"LL": 0.6, "LL128": 1.9 if ring else 1.25, "Simple": 3.4 if ring else 4.0}
    )
    of_launch = {"LL": 6.6 if ring else 6.8, "LL128": 14.0, "Simple": 8.4}
    whole = bandwidth * (1 if ring else _TREE)
    most = next((v for kind, v in _LL_INSIDE.items() if kind in hardware.device_kind), bandwidth)
    most = most if hosts == 1 else _LL_ACROSS[hosts > 2]
    reached = {
        "LL": min(most, whole / (2 if ring else 3.8)),
        "LL128": whole * (0.92 if ring else 120 / 128 if hosts > 1 else 7 / 9),
        "Simple": whole,
    }
    for name, rate in reached.items():
        if not ring and (at := max(size, 64).bit_length() - 7) < len(_TREES[name]):
            rate *= _TREES[name][at]
        # Between hosts a proxy on the CPU posts every step: 1 us, and 3 in Simple.
        least = 0.0 if hosts == 1 or not ring or not near else 3e-6 if name == "Simple" else 1e-6
        step = max(near * of_link[name] / (5.7 if pcie else 3.4), least)
        yield Protocol(name, launch * of_launch[name] / 8.4, step, far * of_network[name] / 14.0, rate)


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
    def of(cls, start: Start, hosts: Sequence[int]) -> "Reach":
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
                "give it in a file (jaxpar.hardware.kinds.load)"
            )
    return min(limits.values())
