"""A contender of `gpu.py speed`: the same shapes in PyTorch, by `torch.compile`, float32 masters, bf16 autocast.

Without CUDA it is not compiled: that is for small sizes, to see that it runs.

Dims: B rows, T positions, D dim, H heads, K key/value heads, h head_dim.
"""

import importlib.util
import sys
import time
from collections.abc import Callable
from typing import Any

from gpu_report import ROOT
from gpu_speed import serve

sys.path.insert(0, str(ROOT))


def make(spec: dict[str, Any]) -> tuple[dict[str, Any], Callable[[int], dict[str, Any]]]:
    """See `gpu_speed.serve`."""
    if importlib.util.find_spec("torch") is None:
        return {"absent": "torch is not installed"}, lambda count: {}
    import torch

    if not torch.cuda.is_available() and not spec["tiny"]:
        return {"absent": f"torch {torch.__version__} sees no CUDA"}, lambda count: {}
    if not spec["model"].startswith(("gpt2", "llama")):
        return {"absent": f"{spec['model']} is not written in torch here"}, lambda count: {}
    import os

    os.environ["JAX_PLATFORMS"] = "cpu"  # jaxpar gives sizes here, and must not take the card
    from jaxpar.hardware.hardware import peak_flops
    from jaxpar.models import named

    chosen = named(spec["model"], **spec["changes"])
    rows, length = spec["rows"], spec["length"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = decoder(torch, chosen.config, gated=spec["model"].startswith("llama")).to(device)
    run = torch.compile(model) if device == "cuda" else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
    )
    tokens = torch.randint(chosen.config.vocab, (rows, length + 1), device=device)

    def step() -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = run(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    start = time.perf_counter()
    for _ in range(3):
        loss = step()
    wait()
    compiled = time.perf_counter() - start

    def steps(count: int) -> dict[str, Any]:
        nonlocal loss
        start = time.perf_counter()
        for _ in range(count):
            loss = step()
        wait()
        seconds = (time.perf_counter() - start) / count
        cuda = device == "cuda"
        peak = peak_flops(torch.cuda.get_device_name(), "bf16") if cuda else None
        return {"seconds": seconds, "tokens": rows * length, "loss": float(loss), "peak_flops": peak,
                "peak_GB": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
                "in_use_GB": torch.cuda.memory_allocated() / 1e9 if cuda else None,
                "model_flops": chosen.flops(rows, length)}  # fmt: skip

    count = sum(p.numel() for p in model.parameters())
    if count != chosen.parameters:
        raise AssertionError(f"{count} parameters here, {chosen.parameters} in {spec['model']}")
    return {"parameters": count, "torch": torch.__version__, "first_step_s": compiled}, steps


def decoder(torch: Any, config: Any, gated: bool) -> Any:
    """GPT-2, or with `gated` Llama, in jaxpar's sizes: the same parameters, products and norms."""
    nn, functional = torch.nn, torch.nn.functional
    dim, heads, h = config.dim, config.heads, config.head_dim
    groups, bias = (config.kv_heads if gated else heads), not gated
    tied = getattr(config, "tied", True)
    norm = (lambda: nn.RMSNorm(dim, eps=config.norm_eps)) if gated else (lambda: nn.LayerNorm(dim, eps=1e-5))

    def rotated(x_BHTh: Any, angles: Any) -> Any:
        a, b = x_BHTh.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_BHTh.dtype)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([norm(), norm()])
            self.query, self.out = nn.Linear(dim, dim, bias=bias), nn.Linear(dim, dim, bias=bias)
            self.key, self.value = (nn.Linear(dim, groups * h, bias=bias) for _ in range(2))
            width = config.ffn if gated else 4 * dim
            self.up, self.down = nn.Linear(dim, width, bias=bias), nn.Linear(width, dim, bias=bias)
            self.gate = nn.Linear(dim, width, bias=False) if gated else None

        def forward(self, x_BTD: Any, angles: Any) -> Any:
            normed = self.norms[0](x_BTD)
            b, t, _ = x_BTD.shape
            query, key, value = (
                project(normed).view(b, t, -1, h).transpose(1, 2) for project in (self.query, self.key, self.value)
            )
            if gated:
                query, key = rotated(query, angles), rotated(key, angles)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=gated)
            x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(b, t, dim))
            normed = self.norms[1](x_BTD)
            hidden = functional.gelu(self.up(normed), approximate="tanh") if self.gate is None else (
                functional.silu(self.gate(normed)) * self.up(normed))  # fmt: skip
            return x_BTD + self.down(hidden)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(config.vocab, dim)
            self.position = None if gated else nn.Parameter(0.01 * torch.randn(config.context, dim))
            self.layers = nn.ModuleList([Layer() for _ in range(config.layers)])
            self.norm = norm()
            self.head = None if tied else nn.Linear(dim, config.vocab, bias=False)
            nn.init.normal_(self.embedding.weight, std=0.02)

        def forward(self, tokens_BT: Any) -> Any:
            t = tokens_BT.shape[1]
            x_BTD, angles = self.embedding(tokens_BT), None
            if self.position is not None:
                x_BTD = x_BTD + self.position[:t]
            else:
                exponents = torch.arange(0, h, 2, device=tokens_BT.device) / h
                angles = torch.arange(t, device=tokens_BT.device)[:, None] * config.rope_theta**-exponents
            for layer in self.layers:
                x_BTD = layer(x_BTD, angles)
            x_BTD = self.norm(x_BTD)
            return functional.linear(x_BTD, self.embedding.weight) if self.head is None else self.head(x_BTD)

    return Decoder()


if __name__ == "__main__":
    serve(make)
