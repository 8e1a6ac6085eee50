"""Published throughput of training runs: what ran, where, how fast, and who says so.

Every second row is set aside (`Run.held_out`): the model of `predict` is judged by these, and was not changed while
looking at them. The rows stand in the order of their sources, and but for the first three, of which predictions were
known, the flag follows from the place alone.

Rows with a context or an expert axis, and those in FP8, were added when the model of `predict` stood (`Run.later`), and
nothing was changed for them. Of FP8 those of torchtitan, which has the same run in bf16 beside it, and two of
Megatron Bridge, which has not; MaxText publishes none for H100s. Left out: rows that do not give their batch.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.hardware.hardware import KINDS, Hardware, peaks_of
from jaxpar.models import Named, named

MOSAIC = "github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md (2023)"
TITAN_A100 = "github.com/pytorch/torchtitan, docs/performance.md (2024)"
TITAN_H100 = "github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
MAXTEXT = "github.com/NVIDIA/JAX-Toolbox, docs/frameworks/maxtext/README.md"
AUTOMODEL = "github.com/NVIDIA-NeMo/Automodel, docs/performance-summary.mdx and examples/llm_benchmark (2026)"
MEGATRON_MOE = "github.com/NVIDIA/Megatron-LM, megatron/core/transformer/moe/README.md (022bcb5, 2025)"
BRIDGE = "github.com/NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md, 25.11 (00b7660)"
MEGATRON = "Korthikanti et al. 2022, arXiv:2205.05198, table 5, present work"

Policy = Callable[[Named], Callable[..., bool]]


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
      name: who ran what.
      group: runs that are counted together.
      source: where it was published.
      model: of `jaxpar.models`; `sizes` are changed in it.
      target: devices to compile for.
      strategy: as text, without `remat` where that is a policy.
      rows, length: of the global batch.
      tokens: per second and device, as published.
      remat: what is kept of a layer, as a `jax.checkpoint` policy; None: as `strategy` says.
      hardware: what it ran on, where that is not the target's.
      slower: kinds of kernels that took so many times longer there.
      held_out: whether it was set aside.
      later: added when the model of `predict` was not changed any more.
      blind: written down before it was predicted, and predicted once (published_blind.py).
      unsupported: why it is not predicted.
    """

    name: str
    group: str
    source: str
    model: str
    target: str
    strategy: str
    rows: int
    length: int
    tokens: float
    remat: Policy | None = None
    hardware: Hardware | None = None
    sizes: tuple[tuple[str, Any], ...] = ()
    slower: Mapping[str, float] = dataclasses.field(default_factory=dict)
    held_out: bool = False
    later: bool = False
    blind: bool = False
    unsupported: str = ""


def minimal_flash(_: Named) -> Callable[..., bool]:
    """MaxText's: products and attention are kept."""
    return lambda prim, *_, **params: prim.name in ("dot_general", "custom_vmap_call")  # the latter is attention


def every_second(model: Named) -> Callable[..., bool]:
    """torchtitan's selective checkpointing, "op": attention is kept, and of the products all but every second.

    In their order query, key, value, out, gate, up, down: key, out and up are computed again. A policy sees shapes
    only, so it counts: of two alike, is it the first that is computed again, or the second? Where query, key, value
    and out are alike, the second and the fourth.
    """
    c = model.config
    heads = c.kv_heads * c.head_dim
    again = {(c.dim, heads): (0,), (c.dim, c.dim): (1,), (c.dim, c.ffn): (1,)}
    if heads == c.dim:
        again[c.dim, c.dim] = (1, 3)
    each = {(c.dim, heads): 2, (c.dim, c.dim): 2, (c.dim, c.ffn): 2} | ({(c.dim, c.dim): 4} if heads == c.dim else {})
    seen = dict.fromkeys(again, 0)

    def policy(prim: Any, *avals: Any, **params: Any) -> bool:
        if prim.name != "dot_general":
            return prim.name == "custom_vmap_call"
        shape = avals[1].shape
        if shape not in again:
            return True
        seen[shape] += 1
        return (seen[shape] - 1) % each[shape] not in again[shape]

    return policy


# PyTorch's attention on H100s, FlashAttention-2, and cuDNN's, TFLOP/s at 8k, head_dim 128: Shah et al. 2024,
# arXiv:2407.08608, figures 5 and 6. torchtitan's cuDNN came in March 2025 (github.com/pytorch/pytorch/pull/138522).
FLASH_2 = {"attention": 529 / 333, "attention backward": 518 / 318}

# FlashAttention in Triton, by which llm-foundry's tables were made: `attn_impl` in submit_benchmarks.py of b2a43a1,
# the tables' commit (October 2023). FlashAttention-2 is 1.3 to 1.5 times faster forwards and 2 times backwards, on
# A100s: Dao 2023, arXiv:2307.08691, section 4.1. On H100s that comes on top of FLASH_2.
TRITON = {"attention": 1.4, "attention backward": 2.0}

# The same shapes in bf16 and in FP8 (SemiAnalysis, as in `predict.efficiency`): of torchtitan's Float8 the matmuls,
# with the head's, which is in bf16 there (less than 1% of these steps); casts and their scales are not counted.
FLOAT8 = FLASH_2 | {"matmul": 720 / 1280}

# Of torchtitan's H100s: 96 GB HBM2e at 2.4 TB/s, 500 W; "the actual peak TFLOPs number is between SXM and NVL".
GRAND_TETON = dataclasses.replace(
    KINDS["H100"],
    kind="H100-HBM2e",
    memory_bytes=96 * 2**30,
    memory_bandwidth=2.4e12,
    peaks=peaks_of("NVIDIA H100 NVL"),
)

# llm-foundry's MPT: a GPT with biases and learned positions (its column of parameters is that of `gpt.Config`).
# dim, layers, heads: scripts/train/yamls.
_MPT = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16), "3b": (2560, 32, 20),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56), "70b": (8192, 80, 64),
}  # fmt: skip


def _mpt(size: str, target: str, length: int, rows: int, micro: int, again: bool, pure: bool, tokens: float) -> Run:
    """Full sharding; "DEFAULT" reduces gradients in float32, "PURE" in bfloat16. `micro`: "GradAccum"."""
    dim, layers, heads = _MPT[size]
    devices = int(target.partition("x")[0])
    text = f"fsdp={devices},precision=bf16"
    text += f",microbatches={micro}" * (micro > 1) + ",reduce=compute" * pure + ",remat=layer" * again
    kind = target.partition("x")[2]
    return Run(
        name=f"MPT-{size}, {target}, {length}",
        group=f"{'A100' if 'A100' in kind else 'H100'}, {'one host' if devices <= 8 else 'hosts'}",
        source=MOSAIC,
        model="gpt2",
        target=target,
        strategy=text,
        rows=rows,
        length=length,
        tokens=tokens,
        sizes=(("vocab", 50368), ("context", length), ("dim", dim), ("layers", layers), ("heads", heads)),
        slower={kind: by * (FLASH_2[kind] if "H100" in target else 1) for kind, by in TRITON.items()},
    )


def _titan(
    model: str, target: str, rows: int, length: int, tokens: float, remat: Policy | str, source: str = TITAN_A100
) -> Run:
    """FSDP over all devices; gradients are reduced in float32."""
    devices = int(target.partition("x")[0])
    hosts = "one host" if devices <= 8 else "hosts"
    what = "every second product again" if callable(remat) else f"remat {remat}"
    return Run(
        name=f"torchtitan {model}, {target}, {what}",
        group=f"{'A100' if 'A100' in target else 'H100'}, {hosts}",
        source=source,
        model=model,
        target=target,
        strategy=f"fsdp={devices},precision=bf16" + ("" if callable(remat) else f",remat={remat}"),
        rows=rows,
        length=length,
        tokens=tokens,
        remat=remat if callable(remat) else None,
        hardware=GRAND_TETON if "H100" in target else None,
        slower=FLASH_2 if "H100" in target else {},
    )


def _megatron(size: str, target: str, strategy: str, rows: int, seconds: float, sizes: tuple[int, int, int]) -> Run:
    """GPT of 2,048 positions and 51,200 words, tensor and sequence parallel over a host. Its attention computes scores
    again in the backward, as flash attention does, but writes them to memory.
    """
    dim, layers, heads = sizes
    devices = int(target.partition("x")[0])
    return Run(
        name=f"Megatron-LM {size}, {target}",
        group="tensor and pipe",
        source=MEGATRON,
        model="gpt2",
        target=target,
        strategy=strategy + ",precision=bf16",
        rows=rows,
        length=2048,
        tokens=rows * 2048 / seconds / devices,
        sizes=(("vocab", 51200), ("context", 2048), ("dim", dim), ("layers", layers), ("heads", heads)),
    )


_IN_ORDER = (
    Run(
        name="MaxText llama2-7b, 8xH100",
        group="H100, one host",
        source=MAXTEXT,  # 2 sequences to a GPU, minimal_flash, not scanned: 0.721 s, 22.19 sequences/s
        model="llama2-7b",
        target="8xH100",
        strategy="fsdp=8,precision=bf16,reduce=compute",
        rows=16,
        length=4096,
        tokens=22.19 * 4096 / 8,
        remat=minimal_flash,
    ),
    _titan("llama3-8b", "8xH100", 16, 8192, 6667, every_second, TITAN_H100),  # with torch.compile, as the next
    # Sequences of 8,192 for Llama 3, as their MFU implies, and 4,096 for Llama 2.
    _titan("llama3-8b", "64xA100-80GB", 64, 8192, 2973, every_second),
    _titan("llama3-8b", "128xH100", 256, 8192, 6514, every_second, TITAN_H100),
    _titan("llama3-70b", "64xA100-80GB", 64, 8192, 331, "layer"),
    _titan("llama2-13b", "64xA100-80GB", 128, 4096, 2162, "none"),
    _titan("llama2-13b", "64xA100-80GB", 128, 4096, 1904, every_second),
    _titan("llama2-70b", "64xA100-80GB", 128, 4096, 353, "layer"),
    _mpt("70b", "64xH100", 2048, 2048, 4, True, False, 1039),
    _mpt("30b", "32xH100", 2048, 1344, 3, True, False, 2308),
    _mpt("30b", "8xH100", 4096, 168, 21, True, False, 1802),
    _mpt("13b", "64xH100", 2048, 128, 1, False, False, 4800),
    _mpt("13b", "16xH100", 2048, 32, 1, False, False, 4767),
    _mpt("13b", "8xH100", 2048, 16, 1, False, False, 4792),
    _mpt("13b", "8xH100", 4096, 240, 3, True, False, 4717),
    _mpt("7b", "8xH100", 2048, 48, 1, False, False, 10643),
    _mpt("7b", "8xH100", 4096, 256, 2, True, False, 8611),
    _mpt("7b", "8xH100", 8192, 128, 2, True, False, 6935),
    _mpt("3b", "64xH100", 2048, 1152, 3, False, False, 22525),
    _mpt("3b", "16xH100", 2048, 480, 3, False, False, 24142),
    _mpt("3b", "8xH100", 8192, 144, 6, False, False, 16578),
    _mpt("3b", "8xH100", 1024, 960, 6, False, False, 27046),
    _mpt("1b", "64xH100", 2048, 1280, 1, False, False, 44402),
    _mpt("1b", "8xH100", 2048, 112, 1, False, False, 45455),
    _mpt("1b", "8xH100", 4096, 224, 4, False, False, 38535),
    _mpt("760m", "8xH100", 2048, 384, 2, False, False, 63147),
    _mpt("70b", "64xA100-80GB", 2048, 2048, 4, True, True, 410),
    _mpt("30b", "8xA100-80GB", 2048, 504, 21, True, False, 916),
    _mpt("13b", "8xA100-80GB", 4096, 240, 3, True, False, 2060),
    _mpt("13b", "8xA100-80GB", 2048, 48, 3, False, False, 2262),
    _mpt("7b", "8xA100-80GB", 2048, 96, 2, False, False, 4641),
    _mpt("7b", "8xA100-80GB", 8192, 128, 2, True, False, 3206),
    _mpt("3b", "8xA100-80GB", 4096, 240, 6, False, False, 9457),
    _mpt("1b", "8xA100-80GB", 2048, 448, 4, False, False, 20513),
    _mpt("350m", "8xA100-80GB", 2048, 512, 2, False, False, 58782),
    _mpt("125m", "8xA100-80GB", 2048, 512, 2, False, False, 141737),
    _mpt("30b", "128xA100-40GB", 2048, 768, 1, True, True, 865),
    _mpt("13b", "128xA100-40GB", 2048, 2048, 1, True, True, 1972),
    _mpt("7b", "128xA100-40GB", 2048, 2304, 1, True, True, 3623),
    _mpt("7b", "8xA100-40GB", 2048, 384, 4, True, True, 3679),
    _megatron("22B", "8xA100-80GB", "tensor=8,sequence=true", 4, 1.10, (6144, 48, 64)),
    _megatron(
        "175B", "64xA100-80GB", "pipe=8,tensor=8,sequence=true,chunks=3,microbatches=64", 64, 13.75, (12288, 96, 96)
    ),
)


def _float8(
    name: str, model: str, target: str, strategy: str, rows: int, length: int, tokens: float, group: str = "context"
) -> Run:
    """torchtitan's, compiled, with Float8. Context ranks gather keys and values there, in an order that balances causal
    work: `ring` here.
    """
    return Run(
        name=f"torchtitan {name}, {target}, Float8",
        group=group,
        source=TITAN_H100,
        model=model,
        target=target,
        strategy=strategy + ",precision=bf16",
        rows=rows,
        length=length,
        tokens=tokens,
        hardware=GRAND_TETON,
        sizes=(("context", length),),
        slower=FLOAT8,
        later=True,
    )


def _of_8b(context: int, tokens: float) -> Run:
    """Llama-3-8B on 8, one sequence to a replica (table 2)."""
    length, replicas = 32768 * context, 8 // context
    axes = f"fsdp={replicas},context={context},attention=ring" if context > 1 else "fsdp=8"
    return _float8(
        f"llama3-8b, {length}, context {context}",
        "llama3-8b",
        "8xH100",
        f"{axes},remat=layer",
        replicas,
        length,
        tokens,
    )


def _of_405b(context: int, tokens: float) -> Run:
    """Llama-3-405B on 512, 8 sequences to a replica, 1F1B, tensor 8 (table 6). Weights stay gathered beside pipe."""
    length, replicas = 32768 * context, 8 // context
    axes = f"pipe=8,fsdp={replicas},tensor=8,sequence=true,zero=2,microbatches=8,remat=layer"
    axes += f",context={context},attention=ring" if context > 1 else ""
    name = f"llama3-405b, {length}, context {context}"
    return _float8(name, "llama3-405b", "64x8xH100", axes, 8 * replicas, length, tokens)


def _bridge(model: str, target: str, strategy: str, tokens: float) -> Run:
    """Megatron Bridge's, FP8 with a scale a tensor ("FP8-CS"), 128 rows of 8,192, cuDNN's attention. What else
    Megatron-Core does is as in published_blind.py: sums of gradients in bf16, nothing recomputed.
    """
    return Run(
        name=f"Megatron Bridge {model}, {target}, FP8",
        group="FP8",
        source=BRIDGE,
        model=model,
        target=target,
        strategy=f"{strategy},reduce=compute,precision=bf16",
        rows=128,
        length=8192,
        tokens=tokens,
        slower={"matmul": FLOAT8["matmul"]},
        later=True,
    )


# Tokens are spread evenly over experts in these benchmarks (AutoModel's "fake balanced gate"), so that as many slots as
# there are choices hold them: `capacity=1`, which drops none of them.
_BALANCED = (("capacity", 1.0),)
_LATER = (
    _of_8b(1, 3890),
    _of_8b(2, 2540),
    _of_8b(4, 1071),
    _of_8b(8, 548),
    _of_405b(1, 76),
    _of_405b(2, 47),
    _of_405b(4, 31),
    _of_405b(8, 16),
    Run(
        name="AutoModel llama3-70b, 64xH100, context 2",
        group="context",
        source=AUTOMODEL,
        model="llama3-70b",
        target="8x8xH100",
        strategy="fsdp=32,context=2,attention=ring,microbatches=4,remat=layer,precision=bf16",
        rows=128,
        length=8192,
        tokens=866.77,
        slower=FLASH_2,  # PyTorch's attention
    ),
    Run(
        name="Megatron-Core mixtral-8x7b, 64xH100",
        group="expert",
        source=MEGATRON_MOE,  # 468 TFLOP/s of a model's FLOPs, attention without a mask; the mapping in its last table
        model="mixtral-8x7b",
        target="8x8xH100",
        strategy="pipe=4,fsdp=2,expert=8,zero=1,chunks=8,microbatches=16,precision=bf16",
        rows=256,
        length=4096,
        tokens=468e12 * 4096 / named("mixtral-8x7b").flops(1, 4096),
        sizes=_BALANCED,
    ),
    Run(
        name="AutoModel qwen3-30b-a3b, 8xH100",
        group="expert",
        source=AUTOMODEL,  # qwen/qwen3_moe_30b_te_deepep.yaml: layers are computed again
        model="qwen3-30b-a3b",
        # Its state is in bf16 throughout. Float32 leaves XLA too little of 80 GB: the same chip with more.
        target="8xH200",
        # As there: one microbatch after another.
        strategy="expert=8,fsdp=-1,microbatches=16,concurrent=1,remat=layer,precision=bf16",
        rows=512,
        length=4096,
        tokens=12040,
        hardware=KINDS["H100"],
        sizes=_BALANCED,
    ),
    *(
        Run(
            name=f"AutoModel deepseek-v3, {devices}xH100",
            group="expert",
            source=AUTOMODEL,
            model="deepseek-v3",
            target=f"{devices // 8}x8xH100",
            strategy=f"pipe=4,fsdp={devices // 256},expert=64,schedule=1f1b-overlap,chunks=8,microbatches={micro},"
            "remat=layer,precision=bf16",
            rows=rows,
            length=4096,
            tokens=tokens,
            sizes=_BALANCED,
            unsupported="its state, in float32, takes 122 GB of a device" if devices == 256 else "",
        )
        for devices, rows, micro, tokens in ((256, 512, 8, 1002), (1024, 8192, 32, 865))
    ),
    _float8(
        "llama3-70b, tensor 8",
        "llama3-70b",
        "32x8xH100",
        "fsdp=32,tensor=8,sequence=true,remat=layer",
        512,
        8192,
        829,
        "FP8",
    ),
    _bridge("llama3-8b", "8xH100", "fsdp=8,microbatches=16", 14451),
    _bridge("llama3-70b", "64xH100", "pipe=8,chunks=5,fsdp=2,tensor=4,sequence=true,zero=1,microbatches=64", 1602),
)
_SEEN = 3  # of the first three, predictions were looked at before rows were set aside
RUNS = (
    *(dataclasses.replace(run, held_out=at >= _SEEN and at % 2 == 0) for at, run in enumerate(_IN_ORDER)),
    *(dataclasses.replace(run, later=True) for run in _LATER),
)
