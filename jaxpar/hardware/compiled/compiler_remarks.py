"""What a compiler did that nobody asked for: it computes again what it has no room for, and its attention is slow; and
whose programs are not read.
"""

from collections.abc import Iterable, Iterator

from .cost import Cost

# The einsum of JAX's own attention (jax.nn.dot_product_attention, implementation "xla"), which writes its scores down.
_SCORES = "BTNH,BSNH->BNTS"


def remarks(costs: Iterable[Cost], platform: str) -> Iterator[str]:
    """A sentence for each of them. On CPUs, where attention is always XLA's, none on attention."""
    costs = list(costs)
    # XLA's rematerialisation names what it makes; `jax.checkpoint` does not.
    again = [cost for cost in costs if ".remat" in cost.kernel.name]
    if again:
        flops = sum(cost.kernel.flops * (cost.executions or 1) for cost in again)
        times = sum(cost.executions or 1 for cost in again)
        share = flops / max(1, sum(cost.kernel.flops * (cost.executions or 1) for cost in costs))
        yield (
            f"XLA computes {len(again)} kernels again to save memory, {times} times a step (.remat, {share:.1%} of its "
            "FLOPs): less in a microbatch, or remat=layer, would let it choose better."
        )
    scores = [cost.kernel for cost in costs if _SCORES in cost.kernel.source and cost.kernel.products]
    if scores and platform == "gpu":
        # Of queries, keys and features, which backward products have in another order, features are fewest.
        heads = sorted({min(product.m, product.n, product.k) for kernel in scores for product in kernel.products})
        yield (
            f"Attention is XLA's and not cuDNN's (head_dim {', '.join(map(str, heads))}), and writes its scores to "
            "memory: cuDNN takes bfloat16 and float16, and a head_dim that is a multiple of 8 and at most 128."
        )


def unread(platform: str) -> str:
    """Why programs for a platform are not read, as a sentence, or ""."""
    if platform != "tpu":
        return ""
    return (
        "programs compiled for TPUs have their collectives in parts inside fusions, and arrays padded to tiles, "
        "which is not read here: bytes and seconds would come out wrong"
    )
