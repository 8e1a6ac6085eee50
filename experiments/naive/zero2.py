"""ZeRO-2, gradients sharded too: Rajbhandari et al. 2020, ZeRO, section 5.2 (P_os+g).

As zero1.py, but a layer's gradient is reduce-scattered as soon as the backward has it, and shards accumulate over the
M microbatches: there never are whole gradients.

    memory per device    parameters P, gradients P/N and those of one layer, momentum P/N
    sent per step        reduce-scatter M P, all-gather P

Dims are those of model.py. jaxpar (parallel/data/zero.py) scatters leaf by leaf, here a layer is one vector.
"""

import jax
import jax.numpy as jnp
from compare import main, unflatten
from jax import NamedSharding, P, lax
from model import N, T, Tree, embed, flatten, head_loss, layer, layer_of, outer_of, sgd

M = 4  # microbatches
mesh = jax.sharding.Mesh(jax.devices(), ("fsdp",))
SHARDS = {"outer": P("fsdp"), "layers": P(None, "fsdp")}


def start(params: Tree) -> tuple[Tree, Tree]:
    flat = jax.device_put(flatten(params), NamedSharding(mesh, P()))
    return flat, {name: jax.device_put(0 * x, NamedSharding(mesh, SHARDS[name])) for name, x in flat.items()}


# A layer as it is, but the gradient of the `whole`, added up over the devices, goes to `mine`, this device's shard.
scattered = jax.custom_vjp(lambda mine, whole: whole)
reduce_scatter = lambda _, grad: (lax.psum_scatter(grad, "fsdp", tiled=True), None)
scattered.defvjp(lambda mine, whole: (whole, None), reduce_scatter)


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), SHARDS, P("fsdp")), out_specs=(P("fsdp"), P(), SHARDS), check_vma=False)
def step(params: Tree, momentum: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree, Tree]:
    """What one device does with its rows of the batch and its shards of the momentum."""

    def loss(mine: Tree, tokens: jax.Array) -> jax.Array:
        outer = outer_of(scattered(mine["outer"], params["outer"]))
        body = lambda x_BTD, w: (layer(x_BTD, layer_of(scattered(*w))), None)
        x_BTD, _ = lax.scan(body, embed(outer, tokens), (mine["layers"], params["layers"]))
        return head_loss(outer, x_BTD, tokens) / (N * M)

    def microbatch(grads: Tree, tokens: jax.Array) -> tuple[Tree, jax.Array]:
        value, new = jax.value_and_grad(loss)(mine, tokens)
        return jax.tree.map(jnp.add, grads, new), value

    mine = jax.tree.map(lambda x: jnp.array(jnp.split(x, N, axis=-1))[lax.axis_index("fsdp")], params)
    grads, values = lax.scan(microbatch, jax.tree.map(jnp.zeros_like, mine), tokens.reshape(M, -1, T + 1))
    mine, momentum = sgd(mine, momentum, grads)
    outer = lax.all_gather(mine["outer"], "fsdp", tiled=True)
    layers = mine["layers"] + 0 * outer[0]  # the second gather after the first, see README.md
    layers = lax.all_gather(layers, "fsdp", axis=1, tiled=True)
    return values.sum(keepdims=True), {"outer": outer, "layers": layers}, momentum


if __name__ == "__main__":
    main(start, step, unflatten)
