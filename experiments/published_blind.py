"""Published runs that were written down, with their strategies, before any of them was predicted, and predicted once.

The model of `predict` had been judged, and where it was wrong looked into, by all rows of published_rows.py, also those
that were set aside; so that none of them tells any more how far it is off for a run that it has not met. These do.

DGX Cloud: one commit of NVIDIA's recipes has the sizes of every axis, the batch and seconds of a step on H100s, in
    bf16. Megatron-Core there sums gradients in bf16, recomputes nothing, shards the optimizer, and its context ranks
    pass keys and values round a ring, with causal work balanced. Its GPT-3 has dropout, ours none.
IBM: tables with `torch.compile`, attention by FlashAttention-2, gradients summed in bf16. Left out: 13B, of whose
    layers an unsaid part is checkpointed; the others' hardware FLOPs say all, 4/3 of the model's, and none. "400 Gbps"
    and "800 Gbps" are taken to be a host's.
torchtitan on H200: matmuls in FP8, as in `published_rows.FLOAT8`, with cuDNN's attention, which PyTorch had by then.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from published_rows import FLASH_2, FLOAT8, GRAND_TETON, Run, every_second

from jaxpar.hardware.hardware import KINDS
from jaxpar.models import Named

DGXC = "github.com/NVIDIA/dgxc-benchmarking, v25.04.01 (85380ff)"
IBM = "github.com/foundation-model-stack/fms-fsdp, README.md, ed74fd5 (2024)"
TITAN_405B = "github.com/pytorch/torchtitan, docs/performance.md, 2024: 405B without optimizations (pull request 481)"
TITAN_H200 = "github.com/pytorch/torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"


def projections(model: Named) -> Callable[..., bool]:
    """MaxText's save_qkv_proj: of a layer query, key and value are kept. Of the products of query's shapes, its own and
    out's, it is the first.
    """
    c = model.config
    seen = 0

    def policy(prim: Any, *avals: Any, **params: Any) -> bool:
        nonlocal seen
        if prim.name != "dot_general":
            return False
        shape = avals[1].shape
        seen += shape == (c.dim, c.dim)
        return shape == (c.dim, c.kv_heads * c.head_dim) or (shape == (c.dim, c.dim) and seen % 2 == 1)

    return policy


def _megatron_core(name: str, target: str, strategy: str, rows: int, seconds: float, **more: Any) -> Run:
    model = {"model": name, "length": 8192} | more
    devices = int(target.partition("x")[0])
    return Run(
        name=f"Megatron-Core {name}, {target}, DGX Cloud",
        group="Megatron-Core",
        source=f"{DGXC}, {'nemo_megatron/README_175b.md' if 'gpt' in name else 'llama3.1/README.md'}",
        target=target,
        strategy=f"{strategy},zero=1,reduce=compute,precision=bf16",
        rows=rows,
        tokens=rows * model["length"] / seconds / devices,
        blind=True,
        **model,
    )


def _maxtext(devices: int, axes: str, rows: int, seconds: float) -> Run:
    return Run(
        name=f"MaxText llama3-70b, {devices}xH100, DGX Cloud",
        group="full sharding",
        source=f"{DGXC}, maxtext/README_70b.md, configure.sh",
        model="llama3-70b",
        target=f"{devices}xH100",
        strategy=f"{axes},precision=bf16,reduce=compute",
        rows=rows,
        length=8192,
        tokens=rows * 8192 / seconds / devices,
        remat=projections,
        blind=True,
    )


def _ibm(size: str, target: str, axes: str, tokens: float, model: str, **sizes: Any) -> Run:
    devices, kind = target.split("x")
    network = {"A100-80GB": 400, "H100": 800}[kind]  # Gb/s of a host of 8
    return Run(
        name=f"IBM llama2-{size}, {target}",
        group="full sharding",
        source=IBM,
        model=model,
        target=target,
        strategy=f"{axes},precision=bf16,reduce=compute",
        rows=2 * int(devices),
        length=4096,
        tokens=tokens,
        hardware=replace(KINDS[kind], network_bandwidth=network * 1e9 / 8 / 8),
        sizes=tuple(sizes.items()),
        slower=FLASH_2 if kind == "H100" else {},
        blind=True,
    )


def _h200(devices: int, tokens: float) -> Run:
    return Run(
        name=f"torchtitan llama3-8b, {devices}xH200, Float8",
        group="full sharding",
        source=TITAN_H200,
        model="llama3-8b",
        target=f"{devices}xH200",
        strategy=f"fsdp={devices},precision=bf16",
        rows=2 * devices,
        length=8192,
        tokens=tokens,
        remat=every_second,
        slower={"matmul": FLOAT8["matmul"]},
        blind=True,
    )


_GPT3 = (("vocab", 51200), ("context", 2048), ("dim", 12288), ("layers", 96), ("heads", 96))
_RING = "context=2,attention=ring"

BLIND = (
    _megatron_core("llama3-8b", "8xH100", f"fsdp=4,{_RING},microbatches=32", 128, 12.27),
    _megatron_core(
        "llama3-70b", "64xH100", f"pipe=4,fsdp=2,{_RING},tensor=4,sequence=true,chunks=5,microbatches=64", 128, 14.66
    ),
    _megatron_core(
        "llama3-405b", "1024xH100", f"pipe=8,fsdp=8,{_RING},tensor=8,sequence=true,chunks=8,microbatches=64", 512, 19.84
    ),
    _megatron_core(
        "gpt3-175b",
        "128xH100",
        "pipe=8,fsdp=4,tensor=4,sequence=true,chunks=6,microbatches=64",
        256,
        8.309,
        model="gpt2",
        length=2048,
        sizes=_GPT3,
    ),
    _maxtext(128, "fsdp=128", 256, 15.563),
    _maxtext(512, "data=4,fsdp=128", 1024, 15.519),
    _ibm("7b", "128xA100-80GB", "data=16,fsdp=8", 4550, "llama2-7b"),
    _ibm("7b", "96xH100", "data=12,fsdp=8", 9600, "llama2-7b"),
    _ibm("34b", "128xA100-80GB", "fsdp=128,remat=layer", 820, "llama2-70b", layers=48, ffn=22016),
    _ibm("34b", "96xH100", "fsdp=96,remat=layer", 1830, "llama2-70b", layers=48, ffn=22016),
    _ibm("70b", "128xA100-80GB", "fsdp=128,remat=layer", 410, "llama2-70b"),
    _ibm("70b", "96xH100", "fsdp=96,remat=layer", 890, "llama2-70b"),
    _h200(32, 10938),
    _h200(64, 10753),
    Run(
        name="torchtitan llama3-405b, tensor 8, 128xH100",
        group="tensor",
        source=TITAN_405B,
        model="llama3-405b",
        target="128xH100",
        strategy="fsdp=16,tensor=8,sequence=true,remat=layer,precision=bf16",
        rows=32,
        length=8192,
        tokens=109,
        hardware=GRAND_TETON,
        slower=FLASH_2,
        blind=True,
    ),
)
