"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685): trainable low-rank updates of frozen projections.

    y = x W + (alpha / r) (x A) B        W [in, out] frozen; A [in, r] starts random, B [r, out] starts at zero

All seven projections of a layer have an adapter (Dettmers et al. 2023, arXiv:2305.14314, section 4); embedding, norms
and head have none. After training, W + (alpha / r) A B are the kernels of a `Llama` without adapters: `to_hf` writes
these, while `save_adapters` writes A and B alone, in the format of the package `peft`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def is_adapter(path: str) -> bool:
    """Tell by its path whether a parameter belongs to an adapter: for `trainable=` and `fresh=`."""
    return path.endswith(("/lora_a", "/lora_b"))


class LoRALinear(nnx.Linear):
    """A projection without bias and its adapter of rank `rank`, computed in the dtype of its input and kernel."""

    def __init__(self, fan_in: int, fan_out: int, rank: int, scale: float, *, rngs: nnx.Rngs, **options: Any) -> None:
        super().__init__(fan_in, fan_out, use_bias=False, rngs=rngs, **options)
        self.scale = scale
        self.lora_a = nnx.LoRAParam(nnx.initializers.normal(fan_in**-0.5)(rngs.params(), (fan_in, rank)))
        # With B at zero, the model begins as the one without adapters.
        self.lora_b = nnx.LoRAParam(jnp.zeros((rank, fan_out)))

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """[..., in] -> [..., out]."""
        projected = super().__call__(inputs, out_sharding)
        # Frozen kernels may be stored in bfloat16 and adapters in float32. The residual stream must keep one dtype,
        # which is that of the projection.
        low_rank = inputs.astype(projected.dtype) @ self.lora_a[...].astype(projected.dtype)
        return projected + self.scale * (low_rank @ self.lora_b[...].astype(projected.dtype))


class MergedKernel:
    """A stacked kernel [L, in, out] that adds its adapter to a layer when that layer is read.

    `merged[layer]` is W + (alpha / r) A B in float32, [in, out]. `dtype` is that of the stored kernel, in which the
    merged one is written.
    """

    def __init__(self, kernel: Any, lora_a: Any, lora_b: Any, scale: float) -> None:
        self.shape, self.dtype = kernel.shape, kernel.dtype
        self._stacks, self._scale = (kernel, lora_a, lora_b), scale

    def __getitem__(self, layer: int) -> np.ndarray:
        # In float32: the update is small beside its kernel, and a sum in bfloat16 would round most of it away.
        kernel, lora_a, lora_b = (np.asarray(stack[layer]).astype(np.float32) for stack in self._stacks)
        return kernel + np.float32(self._scale) * (lora_a @ lora_b)


def merge_adapters(params: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Return the parameters by path without adapters; each kernel that had one becomes a `MergedKernel`."""
    # Kernels without an adapter, embedding, norms and head stay as they are.
    merged = {path: param for path, param in params.items() if not is_adapter(path)}
    for path in merged:
        module = path.removesuffix("/kernel")
        if path.endswith("/kernel") and f"{module}/lora_a" in params:
            merged[path] = MergedKernel(params[path], params[f"{module}/lora_a"], params[f"{module}/lora_b"], scale)
    return merged
