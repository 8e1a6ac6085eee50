"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685): trainable low-rank updates of frozen projections.

    y = x W + (alpha / r) (x A) B        W [in, out] frozen; A [in, r] starts random, B [r, out] starts at zero

All seven projections of a layer have an adapter (Dettmers et al. 2023, arXiv:2305.14314, section 4), or those in
`lora_targets`; embedding, norms and head have none. After training, W + (alpha / r) A B are the kernels of a `Llama`
without adapters: `to_hf` writes these, while `save_adapters` writes A and B alone, in the format of the package `peft`:

    adapter_config.json          r, lora_alpha, target_modules, and the name of the base   (`PeftConfig.read`)
    adapter_model.safetensors    base_model.model.<module of transformers>.lora_A.weight [r, in], lora_B.weight [out, r]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ...backend.counts import is_count
from ...backend.files import json_of, member

PROJECTIONS = ("query", "key", "value", "out", "gate", "up", "down")  # of a layer; each may have an adapter
# Keys of adapter_config.json that leave the function as it is, and those that `PeftConfig.read` reads. Others are
# refused unless they are off: a later version of peft may add one that changes it.
_HARMLESS = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "use_rslora", "bias", "init_lora_weights",
    "megatron_core", "qalora_group_size", "eva_config", "loftq_config", "runtime_config",
}  # fmt: skip
# Other initial values, such as PiSSA's, change the base too.
_INITIAL_VALUES = (True, False, None, "gaussian", "orthogonal", "eva")


class PeftConfig(NamedTuple):
    """The contents of an `adapter_config.json`.

    Attributes:
      rank: r.
      alpha: adapters are scaled by alpha / r. It is the file's `lora_alpha`, times sqrt(r) if `use_rslora` is on.
      modules: the last parts of the names of the modules with an adapter, such as q_proj; None if the file has a
        pattern.
      base: the name or folder of the model that the adapters were trained on; "" if it is not stated.
      dropout: the rate of dropout on the input of adapters, which peft applies in training, and `Llama` never.
    """

    rank: int
    alpha: float
    modules: frozenset[str] | None
    base: str
    dropout: float

    @classmethod
    def read(cls, folder: Path) -> PeftConfig:
        """Read the file in a folder; raise ValueError if its adapters compute another function than `LoRALinear`."""
        file = member(folder, "adapter_config.json")
        options = json_of(file)
        if options.get("peft_type") != "LORA":
            raise ValueError(f"{file}: peft_type={options.get('peft_type')!r} is not supported: Llama here has 'LORA'")
        unsupported = [name for name, x in options.items() if name not in _HARMLESS and x not in (None, False, {}, [])]
        unsupported += [] if options.get("bias", "none") == "none" else ["bias"]
        unsupported += [] if options.get("init_lora_weights") in _INITIAL_VALUES else ["init_lora_weights"]
        if unsupported:
            raise ValueError(
                f"{file}: {', '.join(f'{name}={options[name]!r}' for name in unsupported)} is not supported; merge the "
                "adapters in peft, and train the merged model: model.merge_and_unload().save_pretrained(FOLDER)"
            )
        rank, alpha, dropout = (options.get(name, 0) for name in ("r", "lora_alpha", "lora_dropout"))
        is_number = lambda x: isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
        if not is_count(rank) or not all(map(is_number, (alpha, dropout))):
            raise ValueError(
                f"{file}: r={rank!r}, lora_alpha={alpha!r}, lora_dropout={dropout!r}; needs a whole number from 1, and "
                "two numbers: fetch the file once more"
            )
        # Rank-stabilized LoRA (Kalajdzievski 2023, arXiv:2312.03732) scales by alpha / sqrt(r).
        alpha = alpha * rank**0.5 if options.get("use_rslora") else alpha
        modules = options.get("target_modules")
        names = frozenset(str(x).rpartition(".")[2] for x in modules) if isinstance(modules, list) else None
        return cls(rank, float(alpha), names, options.get("base_model_name_or_path") or "", float(dropout))


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
