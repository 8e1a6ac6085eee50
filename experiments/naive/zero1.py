"""ZeRO-1, optimizer state sharded: Rajbhandari et al. 2020, ZeRO, section 5.1 (P_os).

Every device holds all parameters and accumulates whole gradients over M microbatches. A reduce-scatter adds these up
and leaves each device 1/N of them, with which it updates its 1/N of the parameters; an all-gather makes them whole.

    memory per device    parameters P, gradients P, momentum P/N
    sent per step        reduce-scatter P, all-gather P: together one all-reduce, whatever M is

Dims are those of model.py. jaxpar (parallel/data/zero.py) does this leaf by leaf, here all leaves are one vector.
"""

import jax
from compare import first, main
from jax import NamedSharding, P, lax
from jax.flatten_util import ravel_pytree
from model import N, T, Tree, loss, sgd

M = 4  # microbatches
mesh = jax.sharding.Mesh(jax.devices(), ("fsdp",))
unravel = ravel_pytree(first())[1]


def start(params: Tree) -> tuple[jax.Array, jax.Array]:
    params_P = jax.device_put(ravel_pytree(params)[0], NamedSharding(mesh, P()))
    return params_P, jax.device_put(0 * params_P, NamedSharding(mesh, P("fsdp")))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), P("fsdp"), P("fsdp")), out_specs=(P("fsdp"), P(), P("fsdp")), check_vma=False)
def step(params_P: jax.Array, momentum: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What one device does with its rows of the batch and its part of the momentum [P/N]."""

    def microbatch(grads_P: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, new_P = jax.value_and_grad(lambda params_P: loss(unravel(params_P), tokens) / (N * M))(params_P)
        return grads_P + new_P, value

    grads_P, values = lax.scan(microbatch, 0 * params_P, tokens.reshape(M, -1, T + 1))
    grads = lax.psum_scatter(grads_P, "fsdp", tiled=True)
    mine = params_P.reshape(N, -1)[lax.axis_index("fsdp")]
    mine, momentum = sgd(mine, momentum, grads)
    return values.sum(keepdims=True), lax.all_gather(mine, "fsdp", tiled=True), momentum


def whole(stored: jax.Array) -> Tree:
    return unravel(jax.device_get(stored))


if __name__ == "__main__":
    main(start, step, whole)
