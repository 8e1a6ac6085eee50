"""Claims of what is computed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from claim import DEVICES, Found, batch, claim, off, step_of, verdict
from flax import nnx

import jaxpar as jp
from jaxpar.model.model import Model

KEY = 0  # of the initial values
STEPS = 5


@functools.cache
def gradients(strategy: str) -> Any:
    step = step_of(strategy, adam=False)
    return jax.device_get(step.value_and_grad(step.init(jax.random.key(KEY)), batch())[1])


@claim("Every strategy computes the gradients of one device", "each of their papers", "run")
def same_gradients() -> Found:
    errors = {s: off(gradients(s), gradients("single")) for s in ("ddp", "zero3", "pipe=4,data=2,microbatches=4")}
    figure = f"To rounding: {', '.join(f'`{s}` {e:.0e}' for s, e in errors.items())} of a leaf's largest element."
    return Found(verdict(max(errors.values()) < 1e-5), figure, {})


@claim("It computes them to the bit", "posts", "run")
def same_bits() -> Found:
    error = off(gradients("ddp"), gradients("single"))
    figure = f"{error:.0e} apart: sums in another order are rounded otherwise."
    return Found(verdict(error == 0), figure, {})


@claim("Gradient accumulation equals a large batch", "posts", "run")
def accumulation_is_a_large_batch() -> Found:
    error = off(gradients("ddp,microbatches=4"), gradients("ddp"))
    figure = (
        f"{error:.0e} apart, if the loss is a mean over rows of equal weight and no row looks at another "
        f"(BatchNorm), and each "
        "microbatch counts by its weight."
    )
    return Found(verdict(error < 1e-5, only_if=True), figure, {})


def _trained(state: Any) -> Any:
    step = step_of("ddp", adam=False)
    for _ in range(STEPS):
        state, _ = step(state, batch())
    return state


@claim("Replicas stay identical without ever exchanging weights", "Li et al. 2020, section 3", "run")
def replicas_stay_identical() -> Found:
    step = step_of("ddp", adam=False)
    state = _trained(step.init(jax.random.key(KEY)))
    apart = _spread(state.params)
    step.check_replicas(state)  # raises where one bit differs
    figure = f"After {STEPS} steps on {DEVICES} devices they are {apart:.0f} apart, to the bit (`step.check_replicas`)."
    return Found(verdict(apart == 0), figure, {"apart": apart})


def _copies(x: jax.Array) -> list[np.ndarray]:
    return [np.asarray(shard.data) for shard in x.addressable_shards]


def _spread(params: Any) -> float:
    """The largest difference of two replicas."""
    return max(float(np.abs(c - _copies(x)[0]).max()) for x in jax.tree.leaves(params) for c in _copies(x))


@claim("A replica that drifts is drawn back by the averaged gradients", "posts", "run")
def drifting_replicas_heal() -> Found:
    step = step_of("ddp", adam=False)
    state = step.init(jax.random.key(KEY))
    leaves, tree = jax.tree.flatten(state.params)
    copies = [shard.data for shard in leaves[0].addressable_shards]
    copies[-1] = jax.device_put(copies[-1] + 1e-2, copies[-1].sharding)
    leaves[0] = jax.make_array_from_single_device_arrays(leaves[0].shape, leaves[0].sharding, copies)
    state = state.__class__(**{**vars(state), "params": jax.tree.unflatten(tree, leaves)})
    before = _spread(state.params)
    state = _trained(state)
    after = _spread(state.params)
    try:
        step.check_replicas(state)
        seen = False
    except ValueError:
        seen = True
    figure = (
        f"{before:.3f} apart before, {after:.3f} after {STEPS} steps: all get the same update, which draws nothing "
        f"together. "
        f"`step.check_replicas` {'names it' if seen else 'does not see it'}; `--check-replicas-every` asks it in a run."
    )
    return Found(verdict(after < before / 2), figure, {"ratio": round(after / before, 3)})


# -- losses that couple rows -------------------------------------------------------------------------------------------


class _Normed(nnx.Module):
    """A dense layer and BatchNorm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.out = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.norm(self.dense(x))))[:, 0]


def _points() -> dict[str, jax.Array]:
    """64 rows, whose spread grows from row to row, as those of sorted data do."""
    x = jax.random.normal(jax.random.key(1), (64, 8)) * jnp.linspace(0.2, 3, 64)[:, None]
    return {"x": x, "y": jnp.sin(x[:, 0])}


@claim("BatchNorm under data parallelism depends on how rows are split", "Ioffe 2017; PyTorch's SyncBatchNorm", "run")
def batchnorm_depends() -> Found:
    model = jp.from_nnx(lambda rngs: _Normed(rngs), lambda net, b: jnp.square(net(b["x"]) - b["y"]).mean())
    steps = {s: jp.make_train_step(model, optax.sgd(0.1), s, jax.devices()[:n]) for s, n in (("single", 1), ("ddp", 8))}
    states = {s: step.init(jax.random.key(KEY)) for s, step in steps.items()}
    rows = _points()
    whole, ours = (float(steps[s].value_and_grad(states[s], rows)[0]) for s in ("single", "ddp"))
    parts = [jax.tree.map(lambda x, i=i: x[8 * i : 8 * i + 8], rows) for i in range(8)]
    each = float(np.mean([steps["single"].value_and_grad(states["single"], part)[0] for part in parts]))
    figure = (
        f"Loss of 64 rows {whole:.4f}; mean of 8 devices that normalise their own 8 rows {each:.4f}, "
        f"{each / whole - 1:+.0%}. "
        f"jaxpar normalises over all rows: {ours:.4f} on 8 devices."
    )
    holds = abs(each / whole - 1) > 0.01
    return Found(verdict(holds, only_if=abs(ours / whole - 1) < 1e-5), figure, {"naive": round(each / whole, 3)})


@claim("The mean over devices of their mean losses is the mean loss", "tutorials", "run")
def mean_of_means() -> Found:
    nats = np.asarray(jax.random.exponential(jax.random.key(2), (8, 64))) * np.linspace(1, 2, 8)[:, None]
    mask = np.arange(64) < np.array([64, 56, 48, 40, 32, 24, 16, 8])[:, None]
    right = (nats * mask).sum() / mask.sum()
    wrong = ((nats * mask).sum(1) / mask.sum(1)).mean()
    model = Model(
        init=lambda key: {"w": jnp.ones(())},
        loss=lambda params, b, key: jp.Mean((params["w"] * b["nats"] * b["mask"]).sum(), b["mask"].sum()),
    )
    step = jp.make_train_step(model, optax.sgd(0.1), "ddp", jax.devices()[:8])
    rows = {"nats": nats.astype(np.float32), "mask": mask.astype(np.float32)}
    ours = float(step.value_and_grad(step.init(jax.random.key(0)), rows)[0])
    figure = (
        f"Rows of 8 to 64 tokens, one a device: mean over tokens {right:.4f}, mean of means {wrong:.4f}, "
        f"{wrong / right - 1:+.0%}. It is if all devices have as many tokens. `jp.Mean`, which says sum and count: "
        f"{ours:.4f}."
    )
    return Found("true if" if abs(ours / right - 1) < 1e-5 else "false", figure, {"ratio": round(wrong / right, 3)})


# -- optimizers --------------------------------------------------------------------------------------------------------


def _loss(params: Any, rows: Any) -> jax.Array:
    return jnp.square(jnp.tanh(rows["x"] @ params["up"]) @ params["down"] - rows["y"]).mean()


@claim(
    "With k times the batch and k times the learning rate training is the same", "read into Goyal et al. 2017", "run"
)
def linear_scaling_is_the_same() -> Found:
    rows, k = _points(), 8
    up, down = jax.random.split(jax.random.key(3))
    start = {"up": jax.random.normal(up, (8, 32)) / 3, "down": jax.random.normal(down, (32,)) / 6}
    grad = jax.jit(jax.grad(_loss))

    def apart(rate: float) -> float:
        """How far k small steps and a large one end from each other, over how far they went."""
        small = start
        for i in range(k):
            part = jax.tree.map(lambda x, i=i: x[i::k], rows)
            small = jax.tree.map(lambda p, g: p - rate * g, small, grad(small, part))
        large = jax.tree.map(lambda p, g: p - k * rate * g, start, grad(start, rows))
        length = lambda a, b: float(optax.tree.norm(jax.tree.map(jnp.subtract, a, b)))
        return length(small, large) / length(small, start)

    far, near = apart(0.02), apart(0.001)
    figure = (
        f"{k} steps of 8 rows and one of 64 with {k} times the rate end {far:.0%} of their way apart at a rate of "
        f"0.02, and "
        f"{near:.1%} at 0.001: a rule for small steps, no identity."
    )
    return Found(verdict(far < 0.01), figure, {"far": round(far, 2), "near": round(near, 4)})


@claim("Gradients may be clipped on each device before they are averaged", "posts", "run")
def clip_before_reducing() -> Found:
    rows = _points()
    up, down = jax.random.split(jax.random.key(3))
    params = {"up": jax.random.normal(up, (8, 32)) / 3, "down": jax.random.normal(down, (32,)) / 6}
    parts = [jax.grad(_loss)(params, jax.tree.map(lambda x, i=i: x[8 * i : 8 * i + 8], rows)) for i in range(8)]
    mean = lambda trees: jax.tree.map(lambda *x: sum(x) / len(x), *trees)
    limit = 0.5 * float(optax.tree.norm(mean(parts)))
    clip = lambda g: jax.tree.map(lambda x: x * jnp.minimum(1, limit / optax.tree.norm(g)), g)
    right, wrong = clip(mean(parts)), mean([clip(g) for g in parts])
    flat = lambda tree: jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)])
    cosine = float(flat(right) @ flat(wrong) / optax.tree.norm(right) / optax.tree.norm(wrong))
    length = float(optax.tree.norm(wrong) / optax.tree.norm(right))
    figure = (
        f"8 parts of one batch, clipped to half the norm of their mean: {length:.2f} of the length, in a direction "
        f"with a "
        f"cosine of {cosine:.2f} to it. Here optax sees whole gradients under every strategy."
    )
    return Found(verdict(cosine > 0.999 and abs(length - 1) < 0.001), figure, {"cosine": round(cosine, 2)})


@claim("f16 needs a loss scale, bf16 does not", "Micikevicius et al. 2018; Kalamkar et al. 2019", "run")
def loss_scale() -> Found:
    flat = np.concatenate([np.abs(np.asarray(x)).ravel() for x in jax.tree.leaves(gradients("single"))])
    flat = flat[flat > 0]
    gone = {
        "f16": float((flat.astype(np.float16) == 0).mean()),
        "scaled": float(((flat * 2.0**15).astype(np.float16) == 0).mean()),
        "bf16": float((flat.astype(jnp.bfloat16) == 0).mean()),
        "small": float(((1e-3 * flat).astype(np.float16) == 0).mean()),
    }
    share = {name: f"{100 * x:.2g}%" for name, x in gone.items()}
    figure = (
        f"Of this model's first gradients {share['f16']} are zero in f16, {share['scaled']} after a scale of 2^15, "
        f"{share['bf16']} in bf16; of gradients a thousand times smaller {share['small']} in f16."
    )
    holds = gone["f16"] > 10 * gone["scaled"] and gone["bf16"] == 0
    return Found(verdict(holds, only_if=gone["f16"] < 1e-3), figure, gone)
