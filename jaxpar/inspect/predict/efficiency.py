"""How long a kernel takes: published measurements, each with its source. No number here was fitted to a training run.

    matmul       max of FLOPs / (sustained share of the peak), and whole waves of tiles at their share of the peak
    attention    FLOPs / (measured share of the peak)
    other        bytes / (measured share of the memory bandwidth)

The names of the sources that lines below cite:

semi: SemiAnalysis, MI300X vs H100 vs H200 Benchmark Part 1: Training, December 2024: torch.matmul on Llama 70B's
    shapes and 8192^3, normally distributed, L2 cleared, median: H100 and H200 720 TFLOP/s in bf16, 1,280 in FP8
he: He, Strangely, Matrix Multiplications on GPUs Run Faster When Given "Predictable" Data!, 2024
    (www.thonking.ai): 8192^3 by cuBLAS on an A100: 257 TFLOP/s of normal data, 295 of zeros, as power limits the clock
mamf: Bekman, Machine Learning Engineering, maximum achievable matmul FLOPS (github.com/stas00/ml-engineering, 2026):
    the best of many shapes: A100 271.2, H100 794.5, B200 1,745 TFLOP/s in bf16; B200 3,432.5 in FP8
xla: github.com/openxla/xla, xla/service/gpu/model/matmul_interpolator_data.h (2025): matmuls on an H100, 256 to 4,096
    wide, in short runs, which power does not limit: 6.5 to 779 TFLOP/s in bf16
guide: NVIDIA, Matrix Multiplication Background User's Guide, 2023, sections 2.3, 3.1, 3.2: tile and wave quantization
fa3: Shah et al. 2024, arXiv:2407.08608, figures 5 and 6: cuDNN's attention on an H100 (80 GB, SXM5), 16k tokens,
    hidden dim 2,048, float16, in TFLOP/s; FLOPs with a causal mask count half
fa2: Dao 2023, arXiv:2307.08691, section 4.1: on an A100 up to 73% of the peak forward, 63% backward
stream: BabelStream's triad: A100-40GB 1,377.5 of 1,555 GB/s (github.com/argonne-lcf/ALCFBeginnersGuide), A100-80GB
    1,724.8 of 2,039 (Tursa, DiRAC), H100 NVL 3,303.8 of 3,938: 89%, 85%, 84%
model: github.com/openxla/xla, gpu_performance_model_base.h: 1 us to launch a kernel
sinha: Sinha et al. 2022, arXiv:2208.11035 (SC22), over 18,800 hours on five clusters of equal GPUs: the same work
    differs by 8% on average between them, by 22% at most, as chips differ and power limits their clocks
nccl: NCCL's log on 8 H100, "24 coll channels": collectives take as many SMs from the kernels beside them. Lee et al.
    2025, arXiv:2507.03114, measured on four kinds of GPUs 18.9% on average, and up to 40%
"""

import math
import re
from collections.abc import Mapping

import numpy as np

from ...hardware.compiled.kernels import Kernel
from ...hardware.compiled.products import Product
from ...hardware.hardware import Hardware

_BEST = "the best shape, an upper bound"
# The factor is from six published runs on B200s (experiments/results/published.md).
UPPER_BOUND = (
    "matmuls run at the best shape that anybody measured, attention at an H100's share of the peak; six published runs "
    "took 1.2 to 1.4 times as long"
)

# The share of its peak that a GPU sustains in large matmuls. The peak assumes the boost clock, which power limits.
_SUSTAINED_SHARES = {
    ("A100", "bf16"): (257 / 312, "he"),
    ("H100", "bf16"): (720 / 989.4, "semi"),
    ("H100", "fp8"): (1280 / 1979, "semi"),
    ("B200", "bf16"): (1745 / 2250, f"mamf, {_BEST}"),
    ("B200", "fp8"): (3432.5 / 4500, f"mamf, {_BEST}"),
}
_ASSUMED_SHARE = 720 / 989.4, "assumed, as H100"

# The share of the peak by the output tile that an SM computes, while power does not limit the clock. With these shares,
# 41 shapes of xla are predicted within 27%, on average within 7% (tests/inspect/test_predict.py). Larger tiles read
# less for the same FLOPs (guide, 2.3).
_TILE_SHARES = {(128, 256): 0.82, (256, 128): 0.82, (128, 128): 0.82, (128, 64): 0.57, (64, 128): 0.57, (64, 64): 0.53}
PRODUCT_START = 5e-6  # seconds; xla: 256^3 takes 5.2 us, though its FLOPs need only 0.1

# TFLOP/s of attention on an H100, by sequence length.
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_ATTENTION = {  # fa3; (head_dim, causal)
    (64, False): (335, 373, 395, 408, 412, 413),
    (64, True): (225, 288, 334, 363, 379, 388),
    (128, False): (497, 574, 617, 609, 600, 595),
    (128, True): (315, 410, 484, 518, 529, 539),
    (256, False): (470, 546, 580, 581, 580, 581),
    (256, True): (308, 391, 450, 483, 497, 509),
}
_ATTENTION_BACKWARD = {64: (266, 348, 395, 417, 432, 433), 128: (305, 408, 465, 499, 518, 516)}  # fa3; without a mask
_FA3_PEAK = 989.4

_MEMORY_SHARE = 0.86  # stream
_LAUNCH_SECONDS = 1e-6  # model
CHANNELS = 24  # nccl

# A step takes as long as its slowest device. These are the times of that device's matrix products, relative to the
# device that was measured: as expected, and at both ends of the interval (sinha).
EXPECTED_PACE, FASTEST_PACE, SLOWEST_PACE = 1.08, 1.0, 1.22

_PEAK_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "tf32", "int8": "fp8", "uint8": "fp8"}
_FALLBACK_PEAKS = {"fp8": "bf16", "f16": "bf16", "tf32": "f32", "f32": "bf16"}


def kernel_seconds(kernel: Kernel, hardware: Hardware, slowest: float = 1.0) -> tuple[float, str]:
    """Return the seconds of one execution of a kernel, alone on the device, and the reason: the share of a peak.

    Args:
      slowest: the time of matrix products relative to those of the device that was measured.

    Raises:
      ValueError: `hardware` lacks the peak or the memory bandwidth.
    """
    if hardware.memory_bandwidth is None:
        raise ValueError(
            f"{hardware.kind} has no memory_bandwidth, which every kernel needs; describe it in a file "
            "(jaxpar.hardware.kinds.load), or predict for a target such as '8xH100'"
        )
    num_bytes = kernel.read + kernel.written
    memory_seconds = _LAUNCH_SECONDS + num_bytes / (hardware.memory_bandwidth * _MEMORY_SHARE)
    reason = f"{num_bytes / 1e6:,.1f} MB at {_MEMORY_SHARE:.0%} of {hardware.memory_bandwidth / 1e12:.2f} TB/s (stream)"
    if not kernel.products:
        return memory_seconds, reason
    timed_products = [_product_seconds(product, hardware) for product in kernel.products]
    seconds = slowest * sum(product_seconds for product_seconds, _ in timed_products)
    # Reading operands overlaps with multiplying them: the slower of both counts.
    if seconds < memory_seconds:
        return memory_seconds, reason
    return seconds, "; ".join(product_reason for _, product_reason in timed_products)


def is_upper_bound(hardware: Hardware) -> bool:
    """Return whether this kind's matmul numbers are for the best shape only."""
    return _BEST in _sustained(_family(hardware), "bf16")[1]


def estimated_seconds(flops: Mapping[str, float], size: int, hardware: Hardware) -> float:
    """Return the seconds of a kernel that has not been compiled, from its FLOPs and bytes.

    Args:
      flops: FLOPs by dtype. Products are assumed to be as fast as large ones.
      size: bytes read and written.

    Raises:
      ValueError: `hardware` lacks the peak or the memory bandwidth.
    """
    # A kernel that only moves the bytes. Products can but take longer.
    seconds = kernel_seconds(Kernel("", "", "memory", "", (), size, 0), hardware)[0]
    for dtype, count in flops.items():
        name, peak = _peak_name_and_flops(Product("matmul", dtype, 1, 1, 1, 1, round(count), round(count)), hardware)
        seconds = max(seconds, count / (peak * _sustained(_family(hardware), name)[0]))
    return seconds


def busy_share(hardware: Hardware) -> float:
    """Return the share of a device's speed that a kernel has while a collective runs beside it."""
    cores = _num_cores(hardware)
    return 1 - CHANNELS / cores if cores else 1.0


def peak_of(product: Product, hardware: Hardware) -> float:
    """Return the device's peak in this product's dtype, in FLOP/s. Raises ValueError if `hardware` lacks it."""
    return _peak_name_and_flops(product, hardware)[1]


def _product_seconds(product: Product, hardware: Hardware) -> tuple[float, str]:
    """Return the seconds of one product, and the reason."""
    name, peak = _peak_name_and_flops(product, hardware)
    if product.kind.startswith("attention"):
        share, source = _attention_share(product, hardware)
        seconds = PRODUCT_START + product.flops / (peak * share)
        shape_text = f"head_dim {product.k}, {product.m} queries x {product.n} keys{', causal' * product.causal}"
    else:
        share, source = _sustained(_family(hardware), name)
        # Power limits large matmuls, whole waves of tiles limit small ones.
        sustained_seconds = product.full_flops / (peak * share)
        wave_seconds = quantized_seconds(product, peak, hardware)
        seconds = max(sustained_seconds, wave_seconds)
        if wave_seconds > sustained_seconds:
            bound = ", an upper bound" * is_upper_bound(hardware)
            share, source = product.full_flops / (peak * wave_seconds), f"tiles, xla{bound}"
        shape_text = f"{product.batch} x " * (product.batch > 1) + f"{product.m}x{product.n}x{product.k}"
    return seconds, f"{product.dtype} {shape_text} at {share:.1%} of {peak / 1e12:.0f} TFLOP/s ({source})"


def quantized_seconds(product: Product, peak: float, hardware: Hardware) -> float:
    """Return the seconds of a matmul in whole waves of the fastest tile (guide, 3.1 and 3.2); 0 if SMs are unknown."""
    num_cores = _num_cores(hardware)
    if not num_cores:
        return 0.0

    def seconds_with(tile: tuple[int, int]) -> float:
        # The SMs compute one tile each at a time, so the last wave takes as long as a full one.
        num_tiles = product.batch * math.ceil(product.m / tile[0]) * math.ceil(product.n / tile[1])
        num_waves = math.ceil(num_tiles / num_cores)
        return num_waves * num_cores * 2 * tile[0] * tile[1] * product.k / (peak * _TILE_SHARES[tile])

    return PRODUCT_START + min(map(seconds_with, _TILE_SHARES))


def _attention_share(product: Product, hardware: Hardware) -> tuple[float, str]:
    """Return the share of the peak that attention reaches, and the source."""
    backward = product.kind == "attention backward"
    if _family(hardware) == "A100":
        return (0.63, "fa2") if backward else (0.73, "fa2")
    head_dim = min((64, 128, 256), key=lambda measured_dim: abs(measured_dim - product.k))
    # Between two measured lengths, interpolate over the logarithm of the length.
    log_length = math.log2(max(product.n, 1))
    speeds = {
        causal: float(np.interp(log_length, np.log2(_LENGTHS), _ATTENTION[head_dim, causal]))
        for causal in (False, True)
    }
    speed = speeds[product.causal]
    if backward:
        # The backward was not measured with a mask or at head_dim 256. Assume that a mask slows it as much as it slows
        # the forward.
        unmasked = float(np.interp(log_length, np.log2(_LENGTHS), _ATTENTION_BACKWARD[min(head_dim, 128)]))
        speed = unmasked * speeds[product.causal] / speeds[False]
    suffix = ", an upper bound" * is_upper_bound(hardware)
    return speed / _FA3_PEAK, "fa3" if _family(hardware) == "H100" else f"fa3, assumed as H100{suffix}"


def _peak_name_and_flops(product: Product, hardware: Hardware) -> tuple[str, float]:
    """Return the name of the peak that applies to a product, and its FLOP/s.

    If the device has no peak for the dtype, a wider dtype's applies.
    """
    name = "f32" if product.precise else _PEAK_NAMES.get(product.dtype, "fp8" if "float8" in product.dtype else "f32")
    dtype_peak = name
    while (peak := hardware.peak(name)) is None:
        if name not in _FALLBACK_PEAKS:
            raise ValueError(
                f"{hardware.kind} has no peak for {product.dtype} ({dtype_peak}), which matmuls need; give `peaks` in "
                "its file (jaxpar.hardware.kinds.load)"
            )
        name = _FALLBACK_PEAKS[name]
    return name, peak


def _sustained(family: str, name: str) -> tuple[float, str]:
    """Return the share of the peak that large matmuls sustain, and the source."""
    if (family, name) in _SUSTAINED_SHARES:
        return _SUSTAINED_SHARES[family, name]
    if (family, "bf16") not in _SUSTAINED_SHARES:
        return _ASSUMED_SHARE
    share, source = _SUSTAINED_SHARES[family, "bf16"]
    return share, f"{source}, as bf16"


def _family(hardware: Hardware) -> str:
    """Return the measured family of a device, "A100", "H100" or "B200"; else "". An H200 is an H100 (semi)."""
    # Boards with PCIe were not measured.
    match = re.search("(A100|H100|H200|B200)(?!.*PCIe)", hardware.device_kind)
    return match[1].replace("H200", "H100") if match else ""


def _num_cores(hardware: Hardware) -> int:
    """Return the number of SMs; 0 if it is unknown."""
    match = re.search(r"\bcore_count: (\d+)", hardware.config)
    return int(match[1]) if match else 0
