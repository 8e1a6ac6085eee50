"""How the matmuls of experts may run: FLOPs and temporaries of one layer's forward and backward pass, compiled.

The compiled programs for one H100, which need not be there (`make gpu-compiler`), and for the CPU, in bfloat16. FLOPs
are in units of what a balanced mixture needs, 18 N k D F; temporaries in GB. `overflow` is the most that
blocks beyond the buffers may add, if all tokens go where they cost most.

    JAX_PLATFORMS=cpu python experiments/benchmarks/experts.py
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.hardware.compiled.cost import Costs
from jaxpar.hardware.devices import gpu_topology
from jaxpar.parallel.expert.ops.experts import experts, swiglu
from jaxpar.parallel.expert.ops.overflow import OverflowBlocks, overflow_route
from jaxpar.parallel.expert.ops.tables import order

Tree = Any
SIZES = {  # tokens, features, hidden, experts, chosen
    "mixtral-8x7b": (8192, 4096, 14336, 8, 2),
    "deepseek-v3": (8192, 7168, 2048, 256, 8),
    "small": (512, 64, 128, 8, 2),
}


def gates(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    values, ids = jax.lax.top_k(jax.nn.softmax(logits), k)
    return ids[0], (values / values.sum(-1, keepdims=True))[0]


def every(x: jax.Array, logits: jax.Array, weights: Tree, k: int) -> jax.Array:
    """All experts on all tokens."""
    ids, g = gates(logits, k)
    full = (jax.nn.one_hot(ids, logits.shape[-1]) * g[..., None]).sum(1).astype(x.dtype)
    return jnp.einsum("ne,end->nd", full, jax.vmap(lambda w: swiglu(w, x[0]))(weights))[None]


def ragged(x: jax.Array, logits: jax.Array, weights: Tree, k: int) -> jax.Array:
    """Sorted by expert, `lax.ragged_dot`, and back."""
    ids, g = gates(logits, k)
    by = order(ids, None, logits.shape[-1])
    rows = x[0][by.sorted // k]
    dot = lambda a, w: jax.lax.ragged_dot(a, w, by.load)
    out = dot(jax.nn.silu(dot(rows, weights["gate"])) * dot(rows, weights["up"]), weights["down"])
    out = out * g.reshape(-1)[by.sorted, None].astype(out.dtype)
    return jnp.zeros_like(x[0]).at[by.sorted // k].add(out)[None]


def blocks(x: jax.Array, logits: jax.Array, weights: Tree, k: int) -> jax.Array:
    """Blocks of one expert each, and no buffers."""
    ids, g = gates(logits, k)
    flat, tree = jax.tree.flatten(weights)
    overflow = overflow_route(OverflowBlocks(swiglu, tree, 0, 512 if k == 2 else 128))
    return overflow(x[0], ids, g, *flat)[0].astype(x.dtype)[None]


def capacity(x: jax.Array, logits: jax.Array, weights: Tree, k: int) -> jax.Array:
    """Buffers of 1.25 times the mean load, and the rest dropped."""
    return experts(x, logits, weights, k=k, capacity=1.25)[0]


def dropless(x: jax.Array, logits: jax.Array, weights: Tree, k: int) -> jax.Array:
    """`jp.experts`: the same buffers, and blocks for the rest."""
    return experts(x, logits, weights, k=k)[0]


WAYS: tuple[Callable[..., jax.Array], ...] = (every, ragged, blocks, capacity, dropless)


def compiled(way: Callable[..., jax.Array], size: str, platform: str) -> Any:
    n, d, f, e, k = SIZES[size]
    device = gpu_topology("1xH100")[0] if platform == "h100" else jax.devices("cpu")[0]
    place = jax.sharding.SingleDeviceSharding(device)
    of = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    weights = {"gate": of(e, d, f), "up": of(e, d, f), "down": of(e, f, d)}

    def step(x: jax.Array, logits: jax.Array, weights: Tree, given: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *args: way(*args, k), x, logits, weights)
        return out, pull(given)

    args = (of(1, n, d), of(1, n, e, dtype=jnp.float32), weights, of(1, n, d))
    platforms = ("cuda",) if platform == "h100" else ("cpu",)
    return jax.jit(step).trace(*args).lower(lowering_platforms=platforms).compile()


def measured(way: Callable[..., jax.Array], size: str, platform: str) -> list[str]:
    n, d, f, _, k = SIZES[size]
    program = compiled(way, size, platform)
    needed = 18 * n * k * d * f
    sums = {False: 0, True: 0}
    for cost in Costs.from_hlo(program.as_text()):
        sums[cost.conditional] += cost.kernel.flops * (cost.executions or 1)
    temporaries = program.memory_analysis().temp_size_in_bytes
    return [size, platform, way.__name__, *(f"{s / needed:.2f}" for s in sums.values()), f"{temporaries / 1e9:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["mixtral-8x7b", "deepseek-v3"])
    parser.add_argument("--platforms", nargs="+", choices=("h100", "cpu"), default=["h100", "cpu"])
    options = parser.parse_args()
    for size in options.sizes:
        for platform in options.platforms:
            for way in WAYS:
                print("  ".join(measured(way, size, platform)), flush=True)


if __name__ == "__main__":
    main()
