"""How NCCL would send a message: its protocols and algorithms, as it weighs them itself.

github.com/NVIDIA/nccl, src/graph/tuning.cc (2.28.3): latencies in microseconds by algorithm, link and protocol, and
what a protocol leaves of the bandwidth. NCCL takes the fastest of them by size, and so does this.

            launch            step over NVLink    PCIe               network
    ring    6.6  14.0  8.4    0.6   1.9   3.4     1.0   2.5   5.7    2.7   4.0   14.0     LL, LL128, Simple
    tree    6.8  14.0  8.4    0.6   1.25  4.0     1.0   1.9   4.0    5.0   8.5   14.0

`Hardware` has those of a ring in the Simple protocol, which the others are shares of: a file that gives a slower
network makes it slower for each. LL sends a flag with every 4 bytes, LL128 one with every 120.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..targets.hardware import Hardware

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
