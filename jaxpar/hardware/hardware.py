"""Memory, peaks and bandwidths of accelerators: the numbers behind a predicted step time, each with its source.

Bandwidths hold for one device and one direction; data sheets print the sum of both directions. Peaks are dense; data
sheets print twice as much, "with sparsity". Vendors round, so memory and its bandwidth are what the driver reports, if
XLA has it on record (`configs/`, the same numbers).

The comments below name these sources:

A100: NVIDIA A100 Tensor Core GPU, data sheet, June 2021 (nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf), table of
    specifications; quoted by glennklockwood.com/garden/processors/A100
H100: NVIDIA H100 Tensor Core GPU, data sheet, 2022, table of specifications (www.nvidia.com/en-us/data-center/h100),
    with the PCIe column, which later editions lack; quoted by archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html
white: NVIDIA H100 Tensor Core GPU Architecture, white paper, 2022: the same numbers with one more digit; quoted by
    glennklockwood.com/garden/processors/h100
NVL: NVIDIA H100 NVL, data sheet, 2024 (h100-nvl-datasheet.pdf at www.pny.com); the H200 NVL has the same peaks, says
    www.nvidia.com/en-us/data-center/h200
H200: NVIDIA H200 Tensor Core GPU, data sheet, 2024, table of specifications (www.nvidia.com/en-us/data-center/h200);
    quoted by itkb.uw.cz/2026/06/nvidia-h200-vs-b300-precisions-cores.html
B200: NVIDIA Blackwell, data sheet, 2025, column HGX B200, individual GPU; quoted by
    zdszero.github.io/Computer/Artificial_Intelligence/Hardware.html
DGX: NVIDIA DGX A100 user guide, introduction (docs.nvidia.com/dgx/dgxa100-user-guide): 8 ConnectX-6 of 200 Gb/s for 8
    GPUs. NVIDIA DGX BasePOD, core components (docs.nvidia.com/dgx-basepod), DGX H100, H200, B200: 8 ConnectX-7 of 400
NCCL: github.com/NVIDIA/nccl, the model by which it chooses algorithms, for every GPU. src/graph/tuning.cc (2.28.7),
    ring, Simple protocol, for large messages, in microseconds: launch 8.4; a step over NVLink 3.4, PCIe 5.7, network
    14.0. (LL, for small messages: 6.6; 0.6, 1.0, 2.7.) src/graph/topo.h (2026), in GB/s that a link gives:
    NVLink of A100 20.0, H100 20.6, B200 40.1. src/graph/topo.cc: a lane of PCIe 4, 12 Gb/s, of PCIe 5, 24 Gb/s
MLPerf: hosts of 8 GPUs as their vendors describe them, github.com/mlcommons/inference_results_v3.1,
    closed/Dell/systems/XE9680_H100_SXM_80GBx8_TRT.json; inference_results_v4.1,
    closed/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json: 2 TB each; other kinds were not looked up
TPU: Google Cloud, TPU v5e, TPU v5p, TPU v6e, system architecture, 2025 (docs.cloud.google.com/tpu/docs/v5e, ...)
"""

import pathlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Share of a device's memory that no program uses: CUDA's context, NCCL's buffers, fragmentation. Chosen, not measured.
RESERVE = 0.08
DTYPES = ("bf16", "f16", "tf32", "f32", "fp8")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of accelerator, and the links between its devices. None means unknown.

    Let each of N devices send S bytes over the slowest link of its ring. Then a collective takes about

        collective_latency + steps * latency + S / (bandwidth * efficiency)

    with N - 1 steps for an all-gather or reduce-scatter, and 2 (N - 1) for an all-reduce (Thakur et al. 2005, section
    3; NCCL's tuning.cc adds up the same).

    Attributes:
      kind: its name in a target, such as "H100".
      device_kind: its `jax.Device.device_kind`.
      memory_bytes: memory of one device. JAX takes three quarters of it, or XLA_PYTHON_CLIENT_MEM_FRACTION.
      memory_bandwidth: bytes/s.
      peaks: dense FLOP/s of matrix products by dtype; see `peak`.
      link_bandwidth: bytes/s that one device sends to the others of its host (NVLink, PCIe) or slice (ICI of TPUs, over
        all its links at once), by the data sheet.
      link_efficiency: share of the link bandwidth that collectives reach.
      link_latency: seconds of a step over a link.
      host_bandwidth: bytes/s between a device's memory and its host's, each way, while other devices are silent.
      host_memory_bytes: memory of one host, for all its devices.
      network_bandwidth: bytes/s that one device sends to other hosts, or slices.
      network_latency: seconds of a step over the network.
      collective_latency: seconds to launch a collective, before its first step.
      per_host: number of devices of one host.
      config: the compiler's description of the GPU (XLA's GpuTargetConfigProto) as text; "" for TPUs, whose compiler
        needs none.
    """

    kind: str
    device_kind: str
    memory_bytes: int | None = None
    memory_bandwidth: float | None = None
    peaks: Mapping[str, float] = field(default_factory=dict, hash=False)
    link_bandwidth: float | None = None
    link_efficiency: float | None = None
    link_latency: float | None = None
    host_bandwidth: float | None = None
    host_memory_bytes: int | None = None
    network_bandwidth: float | None = None
    network_latency: float | None = None
    collective_latency: float | None = None
    per_host: int = 8
    config: str = field(default="", repr=False)

    def peak(self, dtype: str) -> float | None:
        """Return the peak FLOP/s in dense matrix products; None if this kind has no units for them, or it is unknown.

        Args:
          dtype: "bf16", "f16", "fp8", "tf32" (in which XLA multiplies float32 on GPUs, unless `precision="highest"`) or
            "f32" (outside the tensor cores).

        Raises:
          ValueError: there is no such dtype.

        >>> KINDS["H100"].peak("bf16")
        989400000000000.0
        """
        if dtype not in DTYPES:
            raise ValueError(f"peak({dtype!r}): the dtype must be one of {', '.join(DTYPES)}")
        return self.peaks.get(dtype)

    @property
    def target_config(self) -> str:
        """`config` with this kind's memory and bandwidth, by which the compiler schedules and rematerializes."""
        text = self.config
        for name, value in (("device_memory_size", self.memory_bytes), ("memory_bandwidth", self.memory_bandwidth)):
            # A number that the kind does not know stays as the compiler's own description has it.
            if value is not None:
                text = re.sub(rf"\b{name}: \d+", f"{name}: {value:.0f}", text)
        return text


def _peaks(bf16: float, tf32: float | None, f32: float | None, fp8: float | None) -> dict[str, float]:
    """Return FLOP/s by dtype, given TFLOP/s."""
    # A device without TF32 is a TPU, which has no f16 either.
    teraflops = {"bf16": bf16, "f16": bf16 if tf32 else None, "tf32": tf32, "f32": f32, "fp8": fp8}
    return {dtype: 1e12 * value for dtype, value in teraflops.items() if value is not None}


# TFLOP/s. NVIDIA's bf16 and f16 are equal; TPUs have neither f16 nor TF32. A number without a source is left out.
_A100 = _peaks(312, 156, 19.5, None)  # A100: printed both dense and sparse. No FP8 units.
_H100 = _peaks(989.4, 494.7, 66.9, 1978.9)  # white; H100, H200: 1,979, 989, 67, 3,958 (sparse, but for f32)
_H100_PCIE = _peaks(756, 378, 51, 1513)  # H100, PCIe column: 1,513, 756, 51, 3,026 (sparse, but for f32)
_NVL = _peaks(835.5, 417.5, 60, 1670.5)  # NVL: 1,671, 835, 60, 3,341 (sparse, but for f32)
_B200 = _peaks(2250, 1100, 75, 4500)  # B200: 4.5, 2.2, 0.075, 9 PFLOP/s (sparse, but for f32)
_V5E = _peaks(197, None, None, None)  # TPU; its int8 (393) is no floating point
_V5P = _peaks(459, None, None, 459)  # TPU
_V6E = _peaks(918, None, None, None)  # TPU; its int8 is 1836

# Keyed by the beginning of `device_kind`, as boards of one chip have many names; the longest match counts.
_BOARDS = {
    "NVIDIA A100": _A100,
    "NVIDIA H100": _H100,
    "NVIDIA H100 PCIe": _H100_PCIE,
    "NVIDIA H100 NVL": _NVL,
    "NVIDIA H200": _H100,
    "NVIDIA H200 NVL": _NVL,
    "NVIDIA B200": _B200,
    "TPU v5": _V5P,
    "TPU v5 lite": _V5E,
    "TPU v6 lite": _V6E,
}


def peaks_of(device_kind: str) -> dict[str, float]:
    """Return the dense peaks in FLOP/s by dtype of a `jax.Device.device_kind`; an empty dict if it is unknown."""
    longest = max((board for board in _BOARDS if device_kind.startswith(board)), key=len, default=None)
    return {} if longest is None else _BOARDS[longest]


def peak_flops(device_kind: str, precision: str) -> float | None:
    """Return the peak FLOP/s of one device in dense matrix products; None if it is unknown.

    Args:
      device_kind: a `jax.Device.device_kind`.
      precision: a `Strategy`'s: "f32" (TF32 on these GPUs), "bf16", "f16" or "fp8". For "fp8" the peak is bf16's: the
        gradients of weights, the head and attention stay in bf16, and so the MFU of both compares.

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bf16")
    989400000000000.0
    """
    return peaks_of(device_kind).get({"f32": "tf32", "fp8": "bf16"}.get(precision, precision))


def _gpu(kind: str, device_kind: str, config: str, **numbers: Any) -> Hardware:
    """Return a kind of NVIDIA GPU: its memory from a file in `configs/`, its latencies from NCCL, unless given."""
    text = (pathlib.Path(__file__).parent / "configs" / config).read_text()
    # Exactly one match each, or unpacking raises an error.
    (memory,) = re.findall(r"\bdevice_memory_size: (\d+)", text)
    (bandwidth,) = re.findall(r"\bmemory_bandwidth: (\d+)", text)
    numbers = {
        "memory_bytes": int(memory),
        "memory_bandwidth": float(bandwidth),
        "collective_latency": 8.4e-6,  # NCCL
        "link_latency": 3.4e-6,  # NCCL, NVLink
        "network_latency": 14e-6,  # NCCL
    } | numbers
    return Hardware(kind=kind, device_kind=device_kind, config=text, peaks=peaks_of(device_kind), **numbers)


# Bandwidth to the host: 16 lanes (NCCL) of PCIe 4 (A100) or PCIe 5 (H100, H200). Not found for a B200: its chip has
# PCIe 6, its hosts may not. Whether several devices share the lanes, at a switch, differs from host to host.
# NVLink of an A100: 600 GB/s both ways (A100). 12 links of 20 GB/s (NCCL). Network: DGX.
_NVLINK_3 = {"link_bandwidth": 300e9, "link_efficiency": 0.8, "network_bandwidth": 25e9, "host_bandwidth": 24e9}
# NVLink of a Hopper: 900 GB/s both ways (H100, H200). 18 links of 20.6 GB/s (NCCL). Network: DGX.
_NVLINK_4 = {"link_bandwidth": 450e9, "link_efficiency": 0.824, "network_bandwidth": 50e9, "host_bandwidth": 48e9}
# NVLink of a B200: 1.8 TB/s both ways (B200). 18 links of 40.1 GB/s (NCCL). Network: DGX.
_NVLINK_5 = {"link_bandwidth": 900e9, "link_efficiency": 0.802, "network_bandwidth": 50e9}
# PCIe 5, 128 GB/s both ways (H100); a bridge of NVLink (600 GB/s) joins only two cards. 16 lanes (NCCL).
# Network not found: a reference system of H100 PCIe. Assumed: as DGX, one ConnectX-7 to a GPU.
_PCIE_5 = {"link_bandwidth": 64e9, "link_efficiency": 0.75, "network_bandwidth": 50e9, "link_latency": 5.7e-6,
           "host_bandwidth": 48e9}  # fmt: skip
_HOST = 2 * 10**12  # MLPerf

_GPUS = (
    _gpu("A100-40GB", "NVIDIA A100-SXM4-40GB", "a100_sxm_40.txtpb", **_NVLINK_3),  # A100: 40 GB, 1,555 GB/s
    _gpu("A100-80GB", "NVIDIA A100-SXM4-80GB", "a100_sxm_80.txtpb", **_NVLINK_3),  # A100: 80 GB, 2,039 GB/s
    # H100: 80 GB, 3.35 TB/s
    _gpu("H100", "NVIDIA H100 80GB HBM3", "h100_sxm.txtpb", host_memory_bytes=_HOST, **_NVLINK_4),
    _gpu("H100-PCIe", "NVIDIA H100 PCIe", "h100_pcie.txtpb", **_PCIE_5),  # H100: 80 GB, 2 TB/s
    _gpu("H200", "NVIDIA H200", "h200_sxm.txtpb", host_memory_bytes=_HOST, **_NVLINK_4),  # H200: 141 GB, 4.8 TB/s
    _gpu("B200", "NVIDIA B200", "b200.txtpb", **_NVLINK_5),  # B200: 180 GB, 7.7 TB/s
)

# All from TPU, which prints both directions of ICI. Not found: latencies, and the share of ICI that collectives reach.
_TPUS = (
    Hardware(
        kind="v5e",
        device_kind="TPU v5 lite",
        peaks=_V5E,
        memory_bytes=16 * 10**9,
        memory_bandwidth=819e9,
        link_bandwidth=200e9,
        network_bandwidth=3.125e9,  # 6.4 Tb/s of a pod of 256
        per_host=4,
    ),
    Hardware(
        kind="v5p",
        device_kind="TPU v5",
        peaks=_V5P,
        memory_bytes=95 * 2**30,
        memory_bandwidth=2765e9,
        link_bandwidth=600e9,
        network_bandwidth=6.25e9,  # 50 Gb/s
        per_host=4,
    ),
    Hardware(
        kind="v6e",
        device_kind="TPU v6 lite",
        peaks=_V6E,
        memory_bytes=32 * 10**9,
        memory_bandwidth=1638e9,
        link_bandwidth=400e9,
        network_bandwidth=None,  # not found
        per_host=4,
    ),
)

KINDS = {hardware.kind: hardware for hardware in (*_GPUS, *_TPUS)}


def of_device_kind(name: str) -> Hardware | None:
    """Return the kind with this `jax.Device.device_kind`; None if the table lacks it."""
    return next((hardware for hardware in KINDS.values() if hardware.device_kind == name), None)
