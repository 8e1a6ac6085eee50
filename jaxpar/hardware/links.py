"""How long a collective takes: latency and bandwidth (the alpha-beta model), on rings, within a host or across hosts.

    seconds = launch + steps * latency + bytes / bandwidth

(Thakur, Rabenseifner & Gropp 2005, Optimization of Collective Communication Operations in MPICH, section 3.) NCCL uses
the same sum for each of its protocols, and takes the fastest by size (github.com/NVIDIA/nccl, src/graph/tuning.cc,
2.28.3). Its latencies in microseconds by algorithm, link and protocol:

            launch            step over NVLink    PCIe               network
    ring    6.6  14.0  8.4    0.6   1.9   3.4     1.0   2.5   5.7    2.7   4.0   14.0     LL, LL128, Simple
    tree    6.8  14.0  8.4    0.6   1.25  4.0     1.0   1.9   4.0    5.0   8.5   14.0

`Hardware` has the latencies of a ring in the Simple protocol. The others follow in the ratios of this table, so a file
with a slower network makes every protocol slower. LL sends a flag with every 4 bytes, LL128 one with every 120.

A ring that spans hosts visits them one by one, so one step in each host uses the network. If a group has several
devices in each host, they share as many network adapters, one per device, as in a DGX. An all-reduce across hosts takes
the faster of a ring and a double binary tree (Sanders, Speck & Träff 2009; NCCL 2.4), whose number of steps is the
logarithm of the number of hosts.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from .compiled.kernels import Start
from .hardware import Hardware

# Highest bandwidth in bytes/s of LL within a host by kind of GPU; across two hosts, and across more (NCCL's llMaxBws,
# for Intel hosts).
_MAX_LL_IN_HOST = {"A100": 87.7e9, "H100": 141e9, "H200": 141e9, "B200": 282e9}
_MAX_LL_ACROSS_HOSTS = (39e9, 20.4e9)
_TREE_EFFICIENCY = 0.92  # share of the bandwidth that a tree across hosts reaches
# Share of a tree's bandwidth by size, for powers of two from 64 B (NCCL's treeCorrectionFactor).
_TREE_CORRECTIONS = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    "Simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8),
        *(0.9, 0.9),
    ),
}
# Shortest time of a collective as the host sees it, where NCCL's model has 8 us: 64 bytes gathered on 4 H100s,
# github.com/waynehacking8/nccl-collectives-bench, results/quiet (2026).
_MIN_SECONDS = 22.5e-6


@dataclass(frozen=True)
class Protocol:
    """One of NCCL's protocols, with its latencies and bandwidth.

    Attributes:
      name: "LL", "LL128" or "Simple"; "" for TPUs.
      launch: seconds before the first step.
      local_step: seconds of a step within a host.
      network_step: seconds of a step between hosts.
      bandwidth: bytes/s.
    """

    name: str
    launch: float
    local_step: float
    network_step: float
    bandwidth: float


def protocols(
    algorithm: Literal["ring", "tree"], hardware: Hardware, bandwidth: float, hosts: int, local: int, size: int
) -> Iterator[Protocol]:
    """Yield the protocols of an algorithm for one group.

    Args:
      hardware: kind of the devices. A latency that it lacks counts as zero.
      bandwidth: bytes/s of the narrowest link.
      hosts: number of hosts that the group spans.
      local: number of the group's devices in each of them.
      size: bytes of the buffer.
    """
    latencies = hardware.collective_latency, hardware.link_latency, hardware.network_latency
    launch, local_step, network_step = (latency or 0.0 for latency in latencies)
    if "TPU" in hardware.device_kind:
        yield Protocol("", launch, local_step, network_step, bandwidth)
        return
    is_ring = algorithm == "ring"
    is_pcie = local_step > 5e-6  # a step over NVLink takes 3.4 us, over PCIe 5.7 us
    # NCCL's latencies in microseconds, from the table above. With one device per host nothing hides the network's
    # latency, so that a ring has a tree's.
    hides_network = is_ring and local > 1
    network_us = {"LL": 2.7 if hides_network else 5.0, "LL128": 4.0 if hides_network else 8.5, "Simple": 14.0}
    link_us = (
        {"LL": 1.0, "LL128": 2.5 if is_ring else 1.9, "Simple": 5.7 if is_ring else 4.0}
        if is_pcie
        else {"LL": 0.6, "LL128": 1.9 if is_ring else 1.25, "Simple": 3.4 if is_ring else 4.0}
    )
    launch_us = {"LL": 6.6 if is_ring else 6.8, "LL128": 14.0, "Simple": 8.4}
    full_bandwidth = bandwidth * (1 if is_ring else _TREE_EFFICIENCY)
    max_ll = next((value for kind, value in _MAX_LL_IN_HOST.items() if kind in hardware.device_kind), bandwidth)
    max_ll = max_ll if hosts == 1 else _MAX_LL_ACROSS_HOSTS[hosts > 2]
    bandwidths = {
        # Half of LL's bytes are flags. NCCL's trees across hosts reach 1 of 3.8 in LL, and 120 of 128 in LL128.
        "LL": min(max_ll, full_bandwidth / (2 if is_ring else 3.8)),
        "LL128": full_bandwidth * (0.92 if is_ring else 120 / 128 if hosts > 1 else 7 / 9),
        "Simple": full_bandwidth,
    }
    for name, rate in bandwidths.items():
        if not is_ring and (power := max(size, 64).bit_length() - 7) < len(_TREE_CORRECTIONS[name]):
            rate *= _TREE_CORRECTIONS[name][power]
        # Between hosts a proxy on the CPU posts every step of a ring: 1 us, and 3 in Simple.
        min_step = 0.0 if hosts == 1 or not is_ring or not local_step else 3e-6 if name == "Simple" else 1e-6
        # Scale this hardware's latencies, which are those of a ring in Simple, by the ratios of the table.
        scaled_local_step = max(local_step * link_us[name] / (5.7 if is_pcie else 3.4), min_step)
        scaled_network_step = network_step * network_us[name] / 14.0
        yield Protocol(name, launch * launch_us[name] / 8.4, scaled_local_step, scaled_network_step, rate)


@dataclass(frozen=True)
class Reach:
    """The devices and hosts that a collective spans.

    Attributes:
      group: number of devices of a group.
      hosts: number of hosts that a group spans.
      local: number of a group's devices that share a host.
    """

    group: int
    hosts: int
    local: int

    @classmethod
    def of(cls, start: Start, hosts: Sequence[int]) -> "Reach":
        """Return the reach of a collective's widest group; `hosts`: the host of each device, in the mesh's order."""
        if start.kind == "collective-permute":
            # A permute's groups are pairs. All wait for the slowest, one that crosses hosts if there is any.
            crosses_hosts = any(hosts[source] != hosts[target] for source, target in start.groups)
            return cls(2, 1 + crosses_hosts, 2 - crosses_hosts)
        num_hosts = [len({hosts[device] for device in group}) for group in start.groups]
        # The group that spans most hosts is the slowest.
        widest = max(range(len(num_hosts)), key=lambda i: num_hosts[i])
        size = len(start.groups[widest])
        return cls(size, num_hosts[widest], -(-size // num_hosts[widest]))

    @property
    def medium(self) -> str:
        """The slowest medium that the collective uses, "link" or "network"."""
        return "network" if self.hosts > 1 else "link"


def collective_seconds(kind: str, size: int, reach: Reach, hardware: Hardware) -> tuple[float, str]:
    """Return the seconds of one collective that runs alone, and the reason in words.

    Args:
      kind: as in `Collective`.
      size: bytes of the whole buffer, as `Collective` counts them.
      reach: the devices and hosts that it spans.
      hardware: kind of the devices. A latency that it lacks counts as zero.

    Raises:
      ValueError: `hardware` lacks a bandwidth.
    """
    # 1. Bytes that each device sends, as a share of the buffer, and steps of the ring.
    n = reach.group
    is_direct = kind.endswith("all-to-all") and reach.hosts > 1
    # An all-to-all across hosts is no ring: each device sends what leaves its host through its own adapter.
    bandwidth = _bandwidth(Reach(n, reach.hosts, 1) if is_direct else reach, hardware)
    match kind:
        case "all-reduce":
            sent_share, steps = 2 * (n - 1) / n, 2 * (n - 1)
        case "all-gather" | "reduce-scatter":
            sent_share, steps = (n - 1) / n, n - 1
        case "all-to-all" | "ragged-all-to-all":
            sent_share, steps = (n - reach.local) / n if is_direct else (n - 1) / n, 1
        case "collective-broadcast":
            sent_share, steps = 1.0, n - 1
        case _:  # a permute
            sent_share, steps = 1.0, 1
    # How often a message passes around the ring: twice in an all-reduce, once in the others.
    passes = steps // (n - 1) if steps > 1 else 1
    # A ring visits the hosts one by one, so that each pass crosses the network hosts - 1 times.
    network_steps = min(steps, passes * (reach.hosts - 1)) if reach.hosts > 1 else 0

    # 2. The candidates: (seconds of latency, bytes sent, bytes/s, name) of each protocol and algorithm.
    candidates = []
    for protocol in protocols("ring", hardware, bandwidth, reach.hosts, reach.local, size):
        if protocol.name not in ("", "Simple") and (is_direct or steps == 1):
            continue  # point-to-point messages use Simple
        # For large all-reduces across hosts NCCL multiplies a ring's latency by 1.4.
        is_plateau = protocol.name == "Simple" and kind == "all-reduce" and network_steps and size >= 2**16 * n
        local_seconds = (steps - network_steps) * protocol.local_step
        latency = protocol.launch + local_seconds + network_steps * protocol.network_step
        candidates.append(
            (latency * (1.4 if is_plateau else 1.0), size * sent_share, protocol.bandwidth, protocol.name)
        )
    if kind == "all-reduce" and reach.hosts > 1:
        depth = math.ceil(math.log2(reach.hosts))
        for protocol in protocols("tree", hardware, bandwidth, reach.hosts, reach.local, size):
            steps_seconds = (reach.local - 1) * protocol.local_step + depth * protocol.network_step
            latency = protocol.launch + 2 * steps_seconds  # up the tree and down again
            candidates.append((latency, 2.0 * size, protocol.bandwidth, f"{protocol.name}, a tree"))

    # 3. NCCL takes the fastest.
    latency, sent, rate, name = min(candidates, key=lambda candidate: candidate[0] + candidate[1] / candidate[2])
    if hardware.collective_latency:
        latency = max(latency, _MIN_SECONDS - sent / rate)
    reason = f"{sent / 1e6:,.1f} MB at {rate / 1e9:.0f} GB/s + {latency * 1e6:.0f} us, {n} devices by {reach.medium}"
    return latency + sent / rate, f"{reason}, {name}" if name else reason


def _bandwidth(reach: Reach, hardware: Hardware) -> float:
    """Return the bytes/s of a device in a ring: what the narrower of link and network gives. Raises ValueError."""
    limits = {}
    if reach.local > 1:
        # `and` keeps an unknown bandwidth None, for the error below.
        limits["link_bandwidth"] = hardware.link_bandwidth and hardware.link_bandwidth * (hardware.link_efficiency or 1)
    if reach.hosts > 1:
        # Each host has an adapter for each of its devices, and the ring leaves it once.
        limits["network_bandwidth"] = hardware.network_bandwidth and hardware.network_bandwidth * reach.local
    for name, value in limits.items():
        if value is None:
            raise ValueError(
                f"{hardware.kind} has no {name}, so the time of a collective of {reach.group} devices on {reach.hosts} "
                "hosts is unknown; give it in a file (jaxpar.hardware.kinds.load)"
            )
    return min(limits.values())
