"""GPipe: Huang et al. 2019, GPipe, sections 2.2 and 2.3: all forwards, then all backwards.

Each of N ranks has L/N layers, a stage. At tick t, rank s runs microbatch t - s and hands the activations to the next
rank; it idles N - 1 of M + N - 1 ticks. Autodiff runs the ticks in reverse and turns the permutation round.

    memory per device    parameters P/N, gradients P/N, momentum P/N; M + N - 1 inputs of a stage
    sent per step        M + N - 1 activations, as many cotangents; all-reduce of what is no stage's

Dims are those of model.py. jaxpar (parallel/pipeline/ticks.py) takes the schedule from a table
(strategy/schedules/) and computes the loss only in ticks that have one; it keeps activations, or with remat="layer" the
inputs of layers.
"""

import jax
import jax.numpy as jnp
from compare import main, place
from jax import P, lax
from jax.flatten_util import ravel_pytree
from model import B, D, N, T, Tree, embed, head_loss, sgd, stack

M = 32  # microbatches
mesh = jax.sharding.Mesh(jax.devices(), ("pipe",))
SPECS = {"outer": P(), "layers": P("pipe")}
RING = [(rank, (rank + 1) % N) for rank in range(N)]
start = lambda params: place(params, mesh, SPECS)


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(SPECS, SPECS, P()), out_specs=(P("pipe"), SPECS, SPECS), check_vma=False)
def step(params: Tree, momentum: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree, Tree]:
    """What one rank does."""
    rank, tokens_M = lax.axis_index("pipe"), tokens.reshape(M, B // M, T + 1)

    @jax.checkpoint  # only its inputs are kept for the backward (section 2.3)
    def stage(params: Tree, x_BTD: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The stage on a microbatch, and the loss, which the last rank has. Other numbers give what nobody uses."""
        tokens = tokens_M[number.clip(0, M - 1)]
        x_BTD = stack(jnp.where(rank == 0, embed(params["outer"], tokens), x_BTD), params["layers"])
        there = (rank == N - 1) & (number >= 0) & (number < M)
        return x_BTD, jnp.where(there, head_loss(params["outer"], x_BTD, tokens) / M, 0)

    def loss(params: Tree) -> jax.Array:
        def tick(x_BTD: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            x_BTD, value = stage(params, x_BTD, t - rank)
            return lax.ppermute(x_BTD, "pipe", RING), value

        return lax.scan(tick, jnp.zeros((B // M, T, D)), jnp.arange(M + N - 1))[1].sum()

    value, grads = jax.value_and_grad(loss)(params)
    vector, unravel = ravel_pytree(grads["outer"])
    grads["outer"] = unravel(lax.psum(vector, "pipe"))
    return value[None], *sgd(params, momentum, grads)


if __name__ == "__main__":
    main(start, step)
