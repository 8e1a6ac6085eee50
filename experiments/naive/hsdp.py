"""Hybrid sharding: Zhao et al. 2023, PyTorch FSDP, section 3.2.2.

As zero3.py within a host, whose links are fast: `fsdp` are its devices, over which a layer is gathered and its gradient
scattered. The hosts, `data`, hold the same shards and have other rows: an all-reduce adds up the shards of gradients.

    memory per device    parameters P/n, gradients P/n, momentum P/n; one layer; what is outside the layers
    sent, n = N/2        all-gather P forwards, P (layers) backwards, reduce-scatter P; between hosts all-reduce P/n

Dims are those of model.py. jaxpar (parallel/data/fsdp.py, and zero.py for its reductions over `data`) all-reduces a
layer's shard inside the backward, where the next layer's computation hides it; for the rest see zero3.py.
"""

import jax
import numpy as np
from compare import main, place, unflatten
from jax import P, lax
from jax.flatten_util import ravel_pytree
from model import N, Tree, embed, flatten, head_loss, layer, layer_of, outer_of, sgd

mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (2, N // 2)), ("data", "fsdp"))
ROWS = P(("data", "fsdp"))
SHARDS = {"outer": P("fsdp"), "layers": P(None, "fsdp")}
start = lambda params: place(flatten(params), mesh, SHARDS)

gather = jax.custom_vjp(lambda shard: lax.all_gather(shard, "fsdp", tiled=True))
reduce_scatter = lambda _, grad: (lax.psum_scatter(grad, "fsdp", tiled=True),)
gather.defvjp(lambda shard: (gather(shard), None), reduce_scatter)


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(SHARDS, SHARDS, ROWS), out_specs=(ROWS, SHARDS, SHARDS), check_vma=False)
def step(shards: Tree, momentum: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree, Tree]:
    """What one device does with its rows of the batch and its shards."""

    def loss(shards: Tree) -> jax.Array:
        outer = outer_of(gather(shards["outer"]))
        # What is inside `checkpoint` is not kept for the backward, which gathers the layer again.
        gathered_layer = jax.checkpoint(lambda x_BTD, shard: (layer(x_BTD, layer_of(gather(shard))), None))
        x_BTD, _ = lax.scan(gathered_layer, embed(outer, tokens), shards["layers"])
        return head_loss(outer, x_BTD, tokens) / N

    value, grads = jax.value_and_grad(loss)(shards)
    vector, unravel = ravel_pytree(grads)
    grads = unravel(lax.psum(vector, "data"))
    return value[None], *sgd(shards, momentum, grads)


if __name__ == "__main__":
    main(start, step, unflatten)
