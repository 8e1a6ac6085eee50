"""Host overhead: `step(state, batch)` against the same step written by hand with `jax.jit` and `shard_map`.

A model so small that a step is mostly what the host does for it, on 8 simulated devices. The hand-written step takes
and returns the same arrays, has the same collectives in the same places, and updates outside the `shard_map`. The two
take turns in one process, so that a busy machine slows both; the ratios are of medians over rounds.

    python experiments/benchmarks/overhead.py

    step    seconds from call to call
    host    of those, what the thread that calls spends (CPU time, no waiting)
"""

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from turns import report

import jaxpar as jp

DEVICES, LAYERS, DIM, VOCAB = 8, 2, 16, 64
CALLS = 50
OPTIMIZER = optax.adamw(1e-3)
Tree = Any


def init(key: jax.Array) -> Tree:
    shapes = {"embed": (VOCAB, DIM), "w": (LAYERS, DIM, DIM), "scale": (LAYERS, DIM), "head": (DIM, VOCAB)}
    keys = jax.random.split(key, len(shapes))
    return {name: 0.2 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def loss(params: Tree, batch: Tree, key: jax.Array | None) -> jax.Array:
    return cross_entropy(params, batch["tokens"], lambda x, dim: x)


def cross_entropy(params: Tree, tokens: jax.Array, fetch: Callable[[jax.Array, int], jax.Array]) -> jax.Array:
    """Mean over rows; `fetch(leaf, dim)` makes whole what is sharded along `dim`."""

    def layer(h: jax.Array, leaves: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        w, scale = (fetch(x, 0) for x in leaves)
        return h + jnp.tanh(h * (1 + scale) @ w), None

    h = fetch(params["embed"], 0)[tokens[:, :-1]]
    # Under remat the backward gathers again.
    h, _ = lax.scan(jax.checkpoint(layer, prevent_cse=False), h, (params["w"], params["scale"]))
    logits = h @ fetch(params["head"], 1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def gather(x: jax.Array, dim: int) -> jax.Array:
    """Its transpose scatters, and so sums."""
    return lax.all_gather(x, "fsdp", axis=dim, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def replicated(x: jax.Array, dim: int) -> jax.Array:
    """Whole as it is; its gradient is summed at once."""
    return x


replicated.defvjp(lambda x, dim: (x, None), lambda dim, _, ct: (lax.psum(ct, "fsdp"),))


def by_hand(zero3: bool, mesh: Mesh) -> tuple[Callable[..., Any], Callable[[], Tree]]:
    """A step `(state, batch) -> (state, metrics)`, state donated, and what makes its first state."""
    dims = {"embed": P("fsdp"), "w": P(None, "fsdp"), "scale": P(None, "fsdp"), "head": P(None, "fsdp")}

    def spec(path: tuple[Any, ...], _: Any) -> P:
        return dims.get(getattr(path[-1], "key", ""), P()) if zero3 else P()

    def create() -> Tree:
        params = init(jax.random.key(0))
        return {"step": jnp.int32(0), "params": params, "moments": OPTIMIZER.init(params), "key": jax.random.key(1)}

    specs = jax.tree.map_with_path(spec, jax.eval_shape(create))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs["params"], P("fsdp")),
        out_specs=(P(), specs["params"]),
        check_vma=False,
    )
    def gradients(params: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree]:
        fetch = gather if zero3 else replicated
        value, grads = jax.value_and_grad(lambda p: cross_entropy(p, tokens, fetch) / DEVICES)(params)
        return lax.psum(value, "fsdp"), grads

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        value, grads = gradients(state["params"], batch["tokens"])
        changes, moments = OPTIMIZER.update(grads, state["moments"], state["params"])
        params = optax.apply_updates(state["params"], changes)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        metrics = {"loss": value, "grad_norm": norm, "finite": finite, "skipped": jnp.int32(0)}
        return {"step": state["step"] + 1, "params": params, "moments": moments, "key": state["key"]}, metrics

    place = functools.partial(jax.tree.map, lambda s: NamedSharding(mesh, s))
    jitted = jax.jit(step, in_shardings=place((specs, P("fsdp"))), out_shardings=(place(specs), None), donate_argnums=0)
    return jitted, jax.jit(create, out_shardings=place(specs))


class Runner:
    """A step, its state, and a batch."""

    def __init__(self, step: Callable[..., Any], state: Any, batch: Any) -> None:
        self.step, self.state, self.batch, self.metrics = step, state, batch, {}

    def run(self) -> tuple[float, float]:
        """Seconds a step: on the clock, and of CPU time of this thread."""
        start, host = time.perf_counter(), time.thread_time()
        for _ in range(CALLS):
            self.state, self.metrics = self.step(self.state, self.batch)
        host = time.thread_time() - host
        jax.block_until_ready(self.state)
        return (time.perf_counter() - start) / CALLS, host / CALLS


def ratios(rounds: int) -> dict[str, float]:
    """Prints a line for each strategy, batch and measure; ours over that by hand, by name."""
    jp.simulate(DEVICES)
    ratio: dict[str, float] = {}
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    batch = {"tokens": np.random.default_rng(0).integers(0, VOCAB, (2 * DEVICES, 9), dtype=np.int32)}
    for strategy, name in itertools.product(("zero3", "ddp"), ("NumPy", "sharded")):
        ours = jp.make_train_step(jp.Model(init=init, loss=loss), OPTIMIZER, strategy)
        theirs, create = by_hand(strategy == "zero3", mesh)
        batches = [batch, batch]
        if name == "sharded":
            places = NamedSharding(ours.mesh, P(("data", "fsdp"))), NamedSharding(mesh, P("fsdp"))
            batches = [jax.device_put(batch, place) for place in places]
        runners = Runner(ours, ours.init(jax.random.key(0)), batches[0]), Runner(theirs, create(), batches[1])
        for runner in runners:
            runner.run()
        losses = [float(runner.metrics["loss"]) for runner in runners]
        assert np.allclose(*losses, rtol=1e-3), losses
        found = np.array([[runner.run() for runner in runners] for _ in range(rounds)])
        for what, (mine, hand) in zip(("step", "host"), np.median(found, axis=0).T, strict=True):
            print(
                f"{strategy:6}{name:>8} batch  {what}  jaxpar {mine * 1e6:5.0f} us  by hand {hand * 1e6:5.0f} us  "
                f"ratio {mine / hand:.3f}",
                flush=True,
            )
            if what == "host":  # the clock depends on what else the machine does
                ratio[f"{strategy}, {name} batch: host over by hand"] = float(mine / hand)
    return ratio


if __name__ == "__main__":
    report(ratios, __doc__, rounds=30)
