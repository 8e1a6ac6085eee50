"""Distributed data parallel: Li et al. 2020, PyTorch Distributed, VLDB 13, section 3.2.1, "a naive solution".

Every device holds everything and has its own rows. An all-reduce adds up the gradients; all make the same update.

    memory per device    parameters P, gradients P, momentum P
    sent per step        all-reduce P

Dims are those of model.py. jaxpar (parallel/data/ddp.py) reduces a layer's gradient inside the backward, while the
layer before it computes (section 3.2.3). Here the all-reduce waits for the whole backward.
"""

import jax
from compare import main, place
from jax import P, lax
from jax.flatten_util import ravel_pytree
from model import N, Tree, loss, sgd

mesh = jax.sharding.Mesh(jax.devices(), ("data",))
start = lambda params: place(params, mesh, P())


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=(P("data"), P(), P()), check_vma=False)
def step(params: Tree, momentum: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree, Tree]:
    """What one device does with its rows of the batch. The losses of all devices add up to that of the batch."""
    value, grads = jax.value_and_grad(lambda params: loss(params, tokens) / N)(params)
    vector_P, unravel = ravel_pytree(grads)
    grads = unravel(lax.psum(vector_P, "data"))
    return value[None], *sgd(params, momentum, grads)


if __name__ == "__main__":
    main(start, step)
