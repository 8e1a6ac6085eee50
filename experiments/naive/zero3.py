"""ZeRO-3, fully sharded: Rajbhandari et al. 2020, ZeRO, section 5.3; Zhao et al. 2023, PyTorch FSDP, section 3.

Every device stores 1/N of each layer. All-gathers make a layer whole just before it runs, forwards and once more
backwards; its gradient is reduce-scattered at once. So nobody holds more than one whole layer.

    memory per device    parameters P/N, gradients P/N, momentum P/N; one layer; what is outside the layers
    sent per step        all-gather P forwards, P (layers) backwards, reduce-scatter P

Dims are those of model.py. What is outside the layers is gathered once, and stays until its backward, as in FSDP's
root module. jaxpar (parallel/data/fsdp.py) gathers leaf by leaf, drops the embedding after its use, and keeps the
activations of a layer, which `checkpoint` here computes again (unless remat="layer").
"""

import jax
from compare import main, place, unflatten
from jax import P, lax
from model import N, Tree, embed, flatten, head_loss, layer, layer_of, outer_of, sgd

mesh = jax.sharding.Mesh(jax.devices(), ("fsdp",))
SHARDS = {"outer": P("fsdp"), "layers": P(None, "fsdp")}
start = lambda params: place(flatten(params), mesh, SHARDS)

gather = jax.custom_vjp(lambda shard: lax.all_gather(shard, "fsdp", tiled=True))
reduce_scatter = lambda _, grad: (lax.psum_scatter(grad, "fsdp", tiled=True),)
gather.defvjp(lambda shard: (gather(shard), None), reduce_scatter)


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(SHARDS, SHARDS, P("fsdp")), out_specs=(P("fsdp"), SHARDS, SHARDS), check_vma=False)
def step(shards: Tree, momentum: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree, Tree]:
    """What one device does with its rows of the batch and its shards."""

    def loss(shards: Tree) -> jax.Array:
        outer = outer_of(gather(shards["outer"]))
        # What is inside `checkpoint` is not kept for the backward, which gathers the layer again.
        gathered_layer = jax.checkpoint(lambda x_BTD, shard: (layer(x_BTD, layer_of(gather(shard))), None))
        x_BTD, _ = lax.scan(gathered_layer, embed(outer, tokens), shards["layers"])
        return head_loss(outer, x_BTD, tokens) / N

    value, grads = jax.value_and_grad(loss)(shards)
    return value[None], *sgd(shards, momentum, grads)


if __name__ == "__main__":
    main(start, step, unflatten)
