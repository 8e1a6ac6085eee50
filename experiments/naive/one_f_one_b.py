"""1F1B: Narayanan et al. 2019, PipeDream, section 3.2; with a flush, Narayanan et al. 2021, Megatron-LM, section 2.2.1.

As gpipe.py, but at tick t rank s also runs microbatch t - 2 (N - 1) + s backwards, on the last rank the one that it has
just run forwards: a ring of 2 N - 1 inputs is enough, whatever M is (the paper: N, with one of both in a tick). Dims
are those of model.py. jaxpar (parallel/pipeline/ticks.py) runs the same scans from a table (strategy/schedules/).

    memory per device    parameters P/N, gradients P/N, momentum P/N; 2 N - 1 inputs of a stage
    sent per step        M + N - 1 activations, as many cotangents; all-reduce of what is no stage's
"""

import jax
import jax.numpy as jnp
from compare import main, place
from jax import P, lax
from jax.flatten_util import ravel_pytree
from model import B, D, N, T, Tree, embed, head_loss, sgd, stack

M, SLOTS = 32, 2 * N - 1  # microbatches; inputs of the stage that a rank keeps
mesh = jax.sharding.Mesh(jax.devices(), ("pipe",))
SPECS = {"outer": P(), "layers": P("pipe")}
RIGHT, LEFT = ([(rank, (rank + by) % N) for rank in range(N)] for by in (1, -1))
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
        y_BTD, dx_BTD, stash, sums = carry
        if "F" in kinds:  # take what the rank before made, keep it, run forwards
            number, x_BTD = t - rank, lax.ppermute(y_BTD, "pipe", RIGHT)
            stash = stash.at[number % SLOTS].set(x_BTD)
            y_BTD, _ = stage(params, x_BTD, number)
        if "B" in kinds:  # from what was kept run forwards again, then backwards
            number = t - 2 * (N - 1) + rank
            (_, value), pull = jax.vjp(lambda *args: stage(*args, number), params, stash[number % SLOTS])
            grads, dx_BTD = pull((jnp.where(rank == N - 1, 0, dx_BTD), 1.0))
            there = (number >= 0) & (number < M)
            sums = jax.tree.map(lambda old, new: old + jnp.where(there, new, 0), sums, (value, grads))
            dx_BTD = lax.ppermute(dx_BTD, "pipe", LEFT)
        return (y_BTD, dx_BTD, stash, sums), None

    x = jnp.zeros((B // M, T, D))
    carry = x, x, jnp.zeros((SLOTS, *x.shape)), jax.tree.map(jnp.zeros_like, (0.0, params))
    for kinds, ticks in ("F", (0, N - 1)), ("FB", (N - 1, M + N - 1)), ("B", (M + N - 1, M + 2 * (N - 1))):
        carry, _ = lax.scan(lambda carry, t, kinds=kinds: tick(carry, t, kinds), carry, jnp.arange(*ticks))
    value, grads = carry[-1]
    vector, unravel = ravel_pytree(grads["outer"])
    return value[None], *sgd(params, momentum, grads | {"outer": unravel(lax.psum(vector, "pipe"))})


if __name__ == "__main__":
    main(start, step)
