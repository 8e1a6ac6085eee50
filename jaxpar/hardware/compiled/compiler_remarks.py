"""Remarks on slow decisions of a compiler (rematerialization, XLA's attention), and platforms that are not read."""

from collections.abc import Iterable, Iterator

from .cost import Cost

# The einsum of JAX's own attention (jax.nn.dot_product_attention, implementation "xla"), which stores its scores.
_SCORES = "BTNH,BSNH->BNTS"


def remarks(costs: Iterable[Cost], platform: str) -> Iterator[str]:
    """Yield a sentence for each slow decision. On CPUs attention is always XLA's, and is not remarked on."""
    costs = list(costs)
    # XLA's rematerialization adds ".remat" to the names of its kernels; `jax.checkpoint` does not.
    rematerialized = [cost for cost in costs if ".remat" in cost.kernel.name]
    if rematerialized:
        flops = sum(cost.kernel.flops * (cost.executions or 1) for cost in rematerialized)
        executions = sum(cost.executions or 1 for cost in rematerialized)
        share = flops / max(1, sum(cost.kernel.flops * (cost.executions or 1) for cost in costs))
        yield (
            f"XLA computes {len(rematerialized)} kernels again to save memory, {executions} times a step (.remat, "
            f"{share:.1%} of its FLOPs): less in a microbatch, or remat=layer, would let it choose better."
        )
    scores = [cost.kernel for cost in costs if _SCORES in cost.kernel.source and cost.kernel.products]
    if scores and platform == "gpu":
        # Sizes are queries, keys and features, in another order in backward products. Features are the fewest.
        head_dims = sorted({min(product.m, product.n, product.k) for kernel in scores for product in kernel.products})
        yield (
            f"Attention is XLA's and not cuDNN's (head_dim {', '.join(map(str, head_dims))}), and writes its scores to "
            "memory: cuDNN takes bfloat16 and float16, and a head_dim that is a multiple of 8 and at most 128."
        )


def why_unread(platform: str) -> str:
    """Return why programs for a platform are not read, in a sentence; "" if they are."""
    if platform != "tpu":
        return ""
    return (
        "programs compiled for TPUs have their collectives in parts inside fusions, and arrays padded to tiles, "
        "which is not read here: bytes and seconds would come out wrong"
    )
