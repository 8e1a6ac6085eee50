"""How XLA's GPU compiler should schedule and combine collectives.

Overlap: the latency-hiding scheduler starts a collective early and lets kernels run meanwhile. XLA enables it only for
an H100 and later GPUs; on an A100 every gather would wait. So it is requested for every mesh of several GPUs.

Combining: a layer's weights need some six gathers. Over many hosts each of them waits for its ring's steps, for 1 to 2
ms on 512 devices (NCCL's tuning.cc), however few bytes it has. So they are combined into one, as NVIDIA recommends for
FSDP (JAX-Toolbox, docs/GPU_performance.md).

Gradients: the program itself carries collectives from one iteration of a loop over layers to the next, to overlap them
with another layer (`slicing/pieces.py`). XLA's pipeliner takes one loop, and not the loop over microbatches around it;
jax 0.12 has no flag for it. In such a loop a layer's gradients are combined into one reduce-scatter or all-reduce too:
XLA expects three in a row to take as long as one, and would leave two of them exposed.
"""

import os
from collections.abc import Sequence

import jax

from ..backend.cpu_compiler import cpu_options
from ..backend.machines import leaves_host

_OVERLAP = {"xla_gpu_enable_latency_hiding_scheduler": True}
_COMBINE_GATHERS = {"xla_gpu_all_gather_combine_threshold_bytes": 1 << 30}
_COMBINE_GRADIENTS = {f"xla_gpu_{kind}_combine_threshold_bytes": 1 << 30 for kind in ("reduce_scatter", "all_reduce")}
# Triton's matmuls multiply float8 in bfloat16. Without Triton XLA uses cuBLASLt's (jax 0.10.2).
_FP8 = {"xla_gpu_enable_triton_gemm": False}
# XLA counts arrays in the host's memory as if they were on the device. To save memory that is free, it would
# rematerialize and start copies late (jax 0.10.2). So it may plan with 200% of the memory that arguments leave.
_ON_HOST = {"xla_gpu_memory_limit_slop_factor": 200}


def compiler_options(
    mesh: jax.sharding.Mesh, axes: Sequence[str], ahead: bool = False, fp8: bool = False, on_host: bool = False
) -> dict[str, bool | int | str] | None:
    """Return compiler options for `jax.jit`.

    Args:
      mesh: the devices. On CPUs the options are those of `cpu_options`.
      axes: collectives are combined if groups along these axes span hosts.
      ahead: loops over layers send ahead, so that gradients are combined too.
      fp8: products are in float8.
      on_host: activations of layers are stored in the host's memory.

    Returns:
      The options, without those that XLA_FLAGS sets; None if no option is needed.
    """
    platform = mesh.devices.flat[0].platform
    if platform != "gpu" or (mesh.size == 1 and not fp8 and not on_host):
        return cpu_options(platform)
    options: dict[str, bool | int | str] = {**(_OVERLAP if mesh.size > 1 else {}), **(_FP8 if fp8 else {})}
    options |= _ON_HOST if on_host else {}
    if leaves_host(mesh, axes):
        options |= _COMBINE_GATHERS | (_COMBINE_GRADIENTS if ahead else {})
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in flags}
