"""ZB-H1: Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2.1.

As one_f_one_b.py, a backward in halves: I, the gradient of the stage's input, for which the rank before waits, and W,
that of its weights. Rank s runs W s ticks after I, so that W is where the last ranks were idle. Each half runs the
stage forwards again. jaxpar (parallel/pipeline/slots.py) runs one operation of a table a slot (strategy/schedules/).

    memory per device    parameters P/N, gradients P/N, momentum P/N; 2 N - 1 inputs of a stage, as many cotangents
    sent per step        M + N - 1 activations, as many cotangents; all-reduce of what is no stage's
"""

import jax
import jax.numpy as jnp
from compare import main, place
from jax import P, lax
from jax.flatten_util import ravel_pytree
from model import B, D, N, T, Tree, embed, head_loss, sgd, stack

M, SLOTS = 32, 2 * N - 1  # microbatches; of so many a rank keeps inputs and cotangents
mesh, SPECS = jax.sharding.Mesh(jax.devices(), ("pipe",)), {"outer": P(), "layers": P("pipe")}
RIGHT, LEFT = ([(rank, (rank + by) % N) for rank in range(N)] for by in (1, -1))
PHASES = ("F", 0, N - 1), ("FI", N - 1, 2 * N - 2), ("FIW", 2 * N - 2, M + N - 1), ("IW", M + N - 1, M + 2 * N - 2)
start = lambda params: place(params, mesh, SPECS)


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(SPECS, SPECS, P()), out_specs=(P("pipe"), SPECS, SPECS), check_vma=False)
def step(params: Tree, momentum: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree, Tree]:
    rank, tokens_M = lax.axis_index("pipe"), tokens.reshape(M, B // M, T + 1)

    def stage(params: Tree, x_BTD: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens = tokens_M[number.clip(0, M - 1)]
        x_BTD = stack(jnp.where(rank == 0, embed(params["outer"], tokens), x_BTD), params["layers"])
        return x_BTD, jnp.where(rank == N - 1, head_loss(params["outer"], x_BTD, tokens) / M, 0)

    def tick(carry: Tree, t: jax.Array, kinds: str) -> tuple[Tree, None]:
        y_BTD, dx_BTD, xs, dys, value, grads = carry
        if "F" in kinds:  # take what the rank before made, keep it, run forwards
            number, x_BTD = t - rank, lax.ppermute(y_BTD, "pipe", RIGHT)
            xs, (y_BTD, _) = xs.at[number % SLOTS].set(x_BTD), stage(params, x_BTD, number)
        if "I" in kinds:  # keep the cotangent for W, and send on that of the input
            number, dy_BTD = t - 2 * (N - 1) + rank, jnp.where(rank == N - 1, 0, dx_BTD)
            (_, part), pull = jax.vjp(lambda x_BTD: stage(params, x_BTD, number), xs[number % SLOTS])
            value += jnp.where((number >= 0) & (number < M), part, 0)
            dys, dx_BTD = dys.at[number % SLOTS].set(dy_BTD), lax.ppermute(pull((dy_BTD, 1.0))[0], "pipe", LEFT)
        if "W" in kinds:  # of the microbatch with which rank 0 has just ended, on all ranks
            number = t - 2 * (N - 1)
            _, pull = jax.vjp(lambda params: stage(params, xs[number % SLOTS], number), params)
            grads = jax.tree.map(jnp.add, grads, pull((dys[number % SLOTS], 1.0))[0])
        return (y_BTD, dx_BTD, xs, dys, value, grads), None

    x = jnp.zeros((B // M, T, D))
    carry = x, x, *[jnp.zeros((SLOTS, *x.shape))] * 2, 0.0, jax.tree.map(jnp.zeros_like, params)
    for kinds, *ticks in PHASES:
        carry, _ = lax.scan(lambda carry, t, kinds=kinds: tick(carry, t, kinds), carry, jnp.arange(*ticks))
    vector, unravel = ravel_pytree(carry[-1]["outer"])
    return carry[-2][None], *sgd(params, momentum, carry[-1] | {"outer": unravel(lax.psum(vector, "pipe"))})


if __name__ == "__main__":
    main(start, step)
