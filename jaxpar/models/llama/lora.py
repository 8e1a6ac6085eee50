"""LoRA (Hu et al. 2021, arXiv:2106.09685): beside each projection of a layer a product of two narrow matrices, which
learns while the projection stays as it is.

    y = x W + (alpha / r) (x A) B        W [in, out] frozen, A [in, r] drawn, B [r, out] zero at first

All seven projections of a layer have one (Dettmers et al. 2023, arXiv:2305.14314, section 4); embedding, norms and
head have none. Once trained, W + (alpha / r) A B is a `Llama` without adapters: `to_hf` writes that, and
`save_adapters` A and B alone, as the package `peft` keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def is_adapter(path: str) -> bool:
    """Whether a parameter is an adapter's, by its path: for `trainable=` and `fresh=`."""
    return path.endswith(("/lora_a", "/lora_b"))


class LoRALinear(nnx.Linear):
    """A projection without bias, and its adapter of rank r. Computes in the dtype of its input and its kernel."""

    def __init__(self, fan_in: int, fan_out: int, rank: int, scale: float, *, rngs: nnx.Rngs, **options: Any) -> None:
        super().__init__(fan_in, fan_out, use_bias=False, rngs=rngs, **options)
        self.scale = scale
        self.lora_a = nnx.LoRAParam(nnx.initializers.normal(fan_in**-0.5)(rngs.params(), (fan_in, rank)))
        self.lora_b = nnx.LoRAParam(jnp.zeros((rank, fan_out)))

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """[..., in] -> [..., out]."""
        out = super().__call__(inputs, out_sharding)
        # The kernel may be kept narrower than the adapters, and the residual stream is of one dtype.
        low = inputs.astype(out.dtype) @ self.lora_a[...].astype(out.dtype)
        return out + self.scale * (low @ self.lora_b[...].astype(out.dtype))


class Merged:
    """A stacked kernel [L, in, out] with its adapter added, one layer at a time: in float32, as what it was."""

    def __init__(self, kernel: Any, a: Any, b: Any, scale: float) -> None:
        self.shape, self.dtype = kernel.shape, kernel.dtype
        self._parts, self._scale = (kernel, a, b), scale

    def __getitem__(self, layer: int) -> np.ndarray:
        kernel, a, b = (np.asarray(part[layer]).astype(np.float32) for part in self._parts)
        return kernel + np.float32(self._scale) * (a @ b)


def merged(params: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Parameters by path without adapters, which are added to their kernels."""
    found = {path: x for path, x in params.items() if not is_adapter(path)}
    for path in found:
        above = path.removesuffix("/kernel")
        if path.endswith("/kernel") and f"{above}/lora_a" in params:
            found[path] = Merged(params[path], params[f"{above}/lora_a"], params[f"{above}/lora_b"], scale)
    return found
