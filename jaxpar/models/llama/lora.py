"""LoRA (Hu et al. 2021, arXiv:2106.09685): beside each projection of a layer a product of two narrow matrices, which
learns while the projection stays as it is.

    y = x W + (alpha / r) (x A) B        W [in, out] frozen, A [in, r] drawn, B [r, out] zero at first

All seven projections of a layer have one (Dettmers et al. 2023, arXiv:2305.14314, section 4); embedding, norms and
head have none. Once trained, W + (alpha / r) A B is a `Llama` without adapters: `to_hf` writes that, and
`save_adapters` A and B alone, as the package `peft` keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..huggingface.architecture import Stored
from ..huggingface.files import Tensor, write_file

# As peft's own checkpoints have them.
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


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


def write_adapters(
    path: Path, params: Mapping[str, Any], tensors: Mapping[str, Stored], config: Any, base: str
) -> None:
    """A folder of `peft`.

    Args:
      params: of the adapters, by path, stacked over layers; on this host.
      tensors: those of each kernel, by its path.
      config: with `layers`, `lora` and `lora_alpha`.
      base: the name or folder of the model that they are for.
    """
    if (path / _WEIGHTS).exists():
        raise ValueError(f"{path} already holds {_WEIGHTS}; choose another folder, or remove it")
    adapters: dict[str, Tensor] = {}
    modules: set[str] = set()
    for at, stacked in params.items():
        above, _, end = at.rpartition("/")
        module = tensors[f"{above}/kernel"].name.removesuffix(".weight")
        modules.add(module.rpartition(".")[2])
        for layer in range(config.layers):
            part = np.asarray(stacked[layer]).astype(np.float32).T
            name = f"base_model.model.{module.format(layer=layer)}.lora_{end[-1].upper()}.weight"
            adapters[name] = Tensor(part.shape, lambda part=part: part, part.dtype)
    path.mkdir(parents=True, exist_ok=True)
    write_file(path / _WEIGHTS, adapters)
    stated = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora,
        "lora_alpha": config.lora_alpha,
        "target_modules": sorted(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (path / _CONFIG).write_text(json.dumps(stated, indent=2) + "\n")
