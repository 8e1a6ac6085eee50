"""How XLA's GPU compiler should schedule collectives and combine them.

Its latency-hiding scheduler, which starts a collective early and lets kernels run beside it, is on by itself for an
H100 and later alone; an A100's gathers would all wait. So it is asked for wherever there is more than one GPU.

A layer's weights come in some six gathers, and over many hosts each of them waits for its ring's steps: of 512 devices
1 to 2 ms (NCCL's tuning.cc), whatever its bytes. So they are one, as NVIDIA recommends for FSDP (JAX-Toolbox,
docs/GPU_performance.md). What runs beside another layer the program itself carries from one iteration to the next
(`slicing/pieces.py`): XLA's pipeliner takes one loop and not that over microbatches around it, and jax 0.12 has no flag
for it. There a layer's gradients are one reduce-scatter, or all-reduce, as well: of three in a row, which XLA takes for
equally long as one, it leaves two to wait.
"""

import os
from collections.abc import Sequence

import jax

from ..backend.cpu_compiler import cpu_options
from ..backend.machines import leaves_host

_HIDDEN = {"xla_gpu_enable_latency_hiding_scheduler": True}
_COMBINED = {"xla_gpu_all_gather_combine_threshold_bytes": 1 << 30}
_AT_ONCE = {f"xla_gpu_{kind}_combine_threshold_bytes": 1 << 30 for kind in ("reduce_scatter", "all_reduce")}
# Triton's matmuls multiply float8 in bfloat16; cuBLASLt's are what XLA has otherwise (jax 0.10.2).
_FP8 = {"xla_gpu_enable_triton_gemm": False}
# XLA counts what is in the host's memory as if it were on the device, and so would compute again, and start copies
# late, for room that there is (jax 0.10.2): in % of the memory that arguments leave, what it may plan with.
_ON_HOST = {"xla_gpu_memory_limit_slop_factor": 200}


def compiler_options(
    mesh: jax.sharding.Mesh, axes: Sequence[str], ahead: bool = False, fp8: bool = False, on_host: bool = False
) -> dict[str, bool | int | str] | None:
    """For `jax.jit`, where the mesh has several GPUs, products are in `fp8`, or what layers leave is kept `on_host`.
    Collectives are combined where groups along `axes` span hosts; `ahead`: loops over layers send ahead. What XLA_FLAGS
    names stays as it is there. On CPUs: those of `cpu_options`, or None.
    """
    platform = mesh.devices.flat[0].platform
    if platform != "gpu" or (mesh.size == 1 and not fp8 and not on_host):
        return cpu_options(platform)
    options: dict[str, bool | int | str] = {**(_HIDDEN if mesh.size > 1 else {}), **(_FP8 if fp8 else {})}
    options |= _ON_HOST if on_host else {}
    if leaves_host(mesh, axes):
        options |= _COMBINED | (_AT_ONCE if ahead else {})
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in flags}
