"""Mixtures in the ways that people write them, and what a cell of `expert` checks of one.

Losses weigh every token by a number of its own: under a plain mean, tokens out of their places are not seen.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cells import OneDevice, check

import jaxpar as jp

EXPERTS, DIM, FFN, LAYERS, K, VOCAB = 8, 12, 10, 4, 2, 31


class Sizes(NamedTuple):
    """Experts of a mixture, rows of a batch, tokens of a row."""

    experts: int = EXPERTS
    rows: int = 16
    length: int = 6


EVEN, ODD = Sizes(), Sizes(6, 12, 7)


def _layer(p: Any, x: jax.Array, mixture: Callable[..., Any]) -> tuple[jax.Array, jax.Array]:
    """What comes out, and what a row adds to the loss, [B]."""
    x = x + jnp.cumsum(x @ p["mix"], axis=1) / jnp.arange(1, x.shape[1] + 1)[:, None]
    normed = x / jnp.sqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6)
    y = mixture(p["moe"], normed, 4 * normed @ p["moe"]["router"])
    y, added = y if isinstance(y, tuple) else (y, jnp.zeros(x.shape[0]))
    return x + y, added


def _model(mixture: Callable[..., Any], ffn: int = FFN, experts: int = EXPERTS) -> jp.Model:
    def init(key: jax.Array) -> dict[str, Any]:
        key = iter(jax.random.split(key, 8))
        draw = lambda *shape: jax.random.normal(next(key), shape) * shape[-2] ** -0.5
        moe = {
            "router": draw(LAYERS, DIM, experts),
            "up": draw(LAYERS, experts, DIM, ffn),
            "up_bias": draw(LAYERS, experts, ffn),
            "down": draw(LAYERS, experts, ffn, DIM),
        }
        return {"embed": draw(VOCAB, DIM), "layers": {"mix": draw(LAYERS, DIM, DIM), "moe": moe}}

    def loss(params: Any, batch: Any, key: jax.Array | None) -> jp.Mean:
        x = params["embed"][batch["tokens"]]
        x, added = jax.lax.scan(lambda x, p: _layer(p, x, mixture), x, params["layers"])
        nats = optax.softmax_cross_entropy_with_integer_labels(x @ params["embed"].T, batch["targets"])
        nats = nats + added.sum(axis=0)[:, None]
        return jp.Mean(jnp.sum(nats * batch["weights"]), jnp.sum(batch["weights"]))

    return jp.Model(init=init, loss=loss, rows="independent")


def _product(p: Any, name: str, rows: jax.Array, dot: Callable[..., jax.Array] = jnp.matmul) -> jax.Array:
    """A product with a leaf, and with the two small ones beside it (LoRA), if there are some."""
    out = dot(rows, p[name])
    return out + dot(dot(rows, p[f"{name}_a"]), p[f"{name}_b"]) if f"{name}_a" in p else out


def _expert(p: Any, x: jax.Array) -> jax.Array:
    return _product(p, "down", jax.nn.relu(_product(p, "up", x) + p["up_bias"]))


def _weights(p: Any) -> Any:
    return {name: leaf for name, leaf in p.items() if name != "router"}


def _jp(p: Any, x: jax.Array, logits: jax.Array, k: int = K, **options: Any) -> jax.Array:
    y, _ = jp.experts(x, logits, _weights(p), k=k, expert=_expert, **options)
    return y


def _balanced(p: Any, x: jax.Array, logits: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
    y, routing = jp.experts(x, logits, _weights(p), k=K, expert=_expert, **options)
    return y, 0.5 * routing.balance + 0.01 * routing.z


def _einsum(p: Any, x: jax.Array, logits: jax.Array, capacity: int = 2) -> jax.Array:
    """GShard's: dispatch [B, T, E, C] by one-hot, each row with slots of its own."""
    gates, ids = jax.lax.top_k(jax.nn.softmax(logits), K)
    chosen = jax.nn.one_hot(ids, logits.shape[-1])  # [B, T, k, E]
    flat = chosen.reshape(x.shape[0], -1, logits.shape[-1])
    rank = ((jnp.cumsum(flat, axis=1) - 1) * flat).reshape(chosen.shape).astype(jnp.int32)
    slot = jax.nn.one_hot(rank, capacity) * chosen[..., None]  # [B, T, k, E, C]
    combine = (slot * gates[..., None, None]).sum(axis=2)
    rows = jnp.einsum("btec,btd->ebcd", (combine > 0).astype(x.dtype), x)
    dot = functools.partial(jnp.einsum, "ebcd,edf->ebcf")
    hidden = jax.nn.gelu(_product(p, "up", rows, dot) + p["up_bias"][:, None, None])
    out = _product(p, "down", hidden, dot)
    return jnp.einsum("btec,ebcd->btd", combine, out)


def _ragged(p: Any, x: jax.Array, logits: jax.Array, padding: bool = False) -> jax.Array:
    """Choices of all rows sorted by expert, each group its product; those of padding stand behind all groups."""
    gates, ids = jax.lax.top_k(jax.nn.softmax(logits), K)
    count = logits.shape[-1]
    if padding:
        ids = jnp.where(jnp.arange(x.shape[1])[:, None] % 3 == 2, count, ids)
    flat = ids.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=count + 1).astype(jnp.int32)[:count]
    bias = p["up_bias"][jnp.minimum(flat[order], count - 1)]
    dot = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
    hidden = _product(p, "up", x.reshape(-1, DIM)[order // K], dot) + bias
    out = _product(p, "down", jax.nn.silu(hidden), dot)
    back = jnp.zeros_like(out).at[order].set(out).reshape(*ids.shape, DIM)
    return (back * gates[..., None]).sum(axis=2)


def _dense(p: Any, x: jax.Array, logits: jax.Array) -> jax.Array:
    """All experts on all tokens, as small models have it."""
    every = jax.vmap(_expert, in_axes=(0, None), out_axes=2)(_weights(p), x)  # [B, T, E, D]
    return (every * jax.nn.softmax(logits)[..., None]).sum(axis=2)


def _skipped(p: Any, x: jax.Array, logits: jax.Array) -> jax.Array:
    """Which branch a rank takes depends on its rows."""
    return jax.lax.cond(x[0, 0, 0] > 0, lambda: _einsum(p, x, logits), lambda: jnp.zeros_like(x))


FORMS: dict[str, Callable[..., Any]] = {
    "dropless": _jp,  # with so few tokens, several find no slot
    "one_expert": lambda p, x, logits: _jp(p, x, logits.at[..., 3].add(100.0)),
    "all_experts": functools.partial(_jp, k=EXPERTS),
    "others_none": lambda p, x, logits: _jp(p, x, logits.at[..., 3].add(100.0), k=1),
    "capacity": functools.partial(_jp, capacity=1.0),
    "probability": functools.partial(_jp, capacity=0.7, drop="probability"),
    "einsum": _einsum,
    "ragged": _ragged,
    "grouped": _ragged,
    "padded": functools.partial(_ragged, padding=True),
    "dense": _dense,
    "skipped": _skipped,
    "sequence": functools.partial(_balanced, balance="sequence"),
    "global": functools.partial(_balanced, balance="global", capacity=1.0),
    "microbatch": functools.partial(_balanced, balance="microbatch"),
}
WIDE = {"grouped": 48, "padded": 48}  # experts that are more bytes than their tokens


@functools.cache
def built(name: str, experts: int = EXPERTS) -> jp.Model:
    return _model(FORMS[name], WIDE.get(name, FFN), experts)


@functools.cache
def one_device(name: str, experts: int) -> OneDevice:
    return OneDevice(built(name, experts))


@functools.cache
def reference(name: str, sizes: Sizes, replicas: int, microbatches: int) -> tuple[Any, Any]:
    """One device's gradients and parameters. It sees the rows of one replica's microbatch together; where the loss
    looks over all replicas, those of one microbatch of all.
    """
    batch, blocks = batch_of(sizes), replicas * microbatches
    if name == "global":
        apart = lambda x: x.reshape(replicas, microbatches, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
        batch, blocks = {key: apart(x) for key, x in batch.items()}, microbatches
    return one_device(name, sizes.experts).train(optax.sgd(0.1, momentum=0.9), batch, blocks, 3)


@functools.cache
def batch_of(sizes: Sizes = EVEN) -> dict[str, np.ndarray]:
    random, shape = np.random.default_rng(0), (sizes.rows, sizes.length)
    ids = lambda: random.integers(0, VOCAB, shape).astype(np.int32)
    weights = random.uniform(0.5, 1.5, shape).astype(np.float32)
    return {"tokens": ids(), "targets": ids(), "weights": weights}


def check_cell(
    name: str, text: str, sizes: Sizes = EVEN, also: Callable[[Any, Any], Any] = lambda step, batch: step
) -> Any:
    """Gradients, three steps of SGD with momentum, bytes at rest, order and number of collectives; returns the step,
    which is what `also` makes of it and a batch.
    """
    strategy = jp.Strategy.parse(text)
    axes = {axis: getattr(strategy, axis) for axis in ("pipe", "data", "fsdp", "expert", "context", "tensor")}
    devices = int(np.prod(list(axes.values())))
    wanted = reference(name, sizes, axes["data"] * axes["fsdp"] * axes["expert"], strategy.microbatches)
    model = built(name, sizes.experts)
    step = jp.make_train_step(model, optax.sgd(0.1, momentum=0.9), strategy, mesh=jax.devices()[:devices])
    step = also(step, batch_of(sizes))
    check(step, model, one_device(name, sizes.experts).first, batch_of(sizes), 3, *wanted)
    return step
