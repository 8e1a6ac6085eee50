"""Data parallel 1.0, a central server: Li et al. 2014, Parameter Server, OSDI, algorithm 1; nn.DataParallel.

Device 0 has the weights and the momentum. It sends everyone the weights and their rows, gets their gradients, adds
these up and updates alone, while the others wait. No program has a collective: all that moves is `device_put`.

    memory per device    server: parameters P, momentum P, gradients N P; others: parameters P, gradients P
    sent per step        by the server (N-1) P, to the server (N-1) P, all through its own links

Dims are those of model.py. jaxpar (parallel/data/server.py, step/server.py) has the server compute the loss,
from sums that it gathers, and scatter its gradient before the backward: five exchanges, of which here are three.
"""

import jax
import jax.numpy as jnp
from compare import main
from jax import NamedSharding, P
from model import N, Tree, loss, sgd

mesh = jax.sharding.Mesh(jax.devices(), ("data",))
server, everyone, rows = jax.devices()[0], NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
update = jax.jit(lambda params, momentum, grads: sgd(params, momentum, jax.tree.map(lambda g: g.sum(0), grads)))


def start(params: Tree) -> tuple[Tree, Tree]:
    params = jax.device_put(params, server)
    return params, jax.tree.map(jnp.zeros_like, params)


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
def gradients(params: Tree, tokens: jax.Array) -> Tree:
    """What every device does with its rows: its part of the loss and its gradients, which stay where they are."""
    return jax.tree.map(lambda x: x[None], jax.value_and_grad(lambda params: loss(params, tokens) / N)(params))


def step(params: Tree, momentum: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree, Tree]:
    params_everywhere = jax.device_put(params, everyone)  # broadcast
    results = gradients(params_everywhere, jax.device_put(tokens, rows))  # scatter
    values_N, grads = jax.device_put(results, server)  # gather
    return values_N, *update(params, momentum, grads)


def lower(params: Tree, momentum: Tree, tokens: jax.Array) -> jax.stages.Lowered:
    return gradients.lower(jax.device_put(params, everyone), tokens)


if __name__ == "__main__":
    main(start, step, lower=lower)
