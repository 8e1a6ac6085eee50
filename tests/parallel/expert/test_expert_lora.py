"""Frozen experts with small trainable ones beside them (LoRA): what each layout trains is what one device does."""

import functools
from typing import Any

import expert_cells as cells
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp

EXPERTS, DIM, FFN, LAYERS, RANK, K, VOCAB = 8, 12, 48, 2, 3, 2, 31


def init(key: jax.Array) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 16))
    draw = lambda *shape: jax.random.normal(next(keys), shape) * shape[-2] ** -0.5
    moe: dict[str, Any] = {"router": draw(LAYERS, DIM, EXPERTS)}
    for name, into, out in (("up", DIM, FFN), ("down", FFN, DIM)):
        moe |= {name: draw(LAYERS, EXPERTS, into, out)}
        moe |= {f"{name}_a": draw(LAYERS, EXPERTS, into, RANK), f"{name}_b": draw(LAYERS, EXPERTS, RANK, out)}
    mix = {"mix": draw(LAYERS, DIM, DIM), "mix_a": draw(LAYERS, DIM, RANK), "mix_b": draw(LAYERS, RANK, DIM)}
    return {"embed": draw(VOCAB, DIM), "layers": mix | {"moe": moe}}


def dropless(p: Any, x: jax.Array, logits: jax.Array) -> jax.Array:
    def expert(p: Any, x: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(x @ p["up"] + x @ p["up_a"] @ p["up_b"])
        return hidden @ p["down"] + hidden @ p["down_a"] @ p["down_b"]

    return jp.experts(x, logits, {k: v for k, v in p.items() if k != "router"}, k=K, expert=expert)[0]


def ragged(p: Any, x: jax.Array, logits: jax.Array) -> jax.Array:
    gates, ids = jax.lax.top_k(jax.nn.softmax(logits), K)
    order = jnp.argsort(ids.reshape(-1))
    dot = functools.partial(
        jax.lax.ragged_dot, group_sizes=jnp.bincount(ids.reshape(-1), length=EXPERTS).astype(jnp.int32)
    )
    rows = x.reshape(-1, DIM)[order // K]
    hidden = jax.nn.silu(dot(rows, p["up"]) + dot(dot(rows, p["up_a"]), p["up_b"]))
    out = dot(hidden, p["down"]) + dot(dot(hidden, p["down_a"]), p["down_b"])
    return (jnp.zeros_like(out).at[order].set(out).reshape(*ids.shape, DIM) * gates[..., None]).sum(2)


def einsum(p: Any, x: jax.Array, logits: jax.Array) -> jax.Array:
    chosen = jax.nn.one_hot(jax.lax.top_k(logits, 1)[1][..., 0], EXPERTS)
    slot = jax.nn.one_hot(((jnp.cumsum(chosen, 1) - 1) * chosen).sum(-1).astype(jnp.int32), 2)
    dispatch = chosen[..., None] * slot[:, :, None]
    rows = jnp.einsum("btec,btd->ebcd", dispatch, x)
    apart = lambda rows, name: jnp.einsum("ebcd,edf->ebcf", rows, p[name])
    adapted = lambda rows, name: apart(rows, name) + apart(apart(rows, f"{name}_a"), f"{name}_b")
    out = adapted(jax.nn.gelu(adapted(rows, "up")), "down")
    return jnp.einsum("btec,ebcd->btd", dispatch * jax.nn.softmax(logits)[..., None], out)


@functools.cache
def trained(mixture: Any, text: str) -> tuple[Any, Any]:
    """Gradients, and how far three steps move each leaf."""

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        x = x + jnp.cumsum(x @ p["mix"] + x @ p["mix_a"] @ p["mix_b"], axis=1) / x.shape[1]
        normed = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
        return x + mixture(p["moe"], normed, 4 * normed @ p["moe"]["router"]), None

    def loss(p: Any, batch: Any, key: jax.Array | None) -> jp.Mean:
        x, _ = jax.lax.scan(layer, p["embed"][batch["tokens"]], p["layers"])
        nats = optax.softmax_cross_entropy_with_integer_labels(x @ p["embed"].T, batch["targets"])
        return jp.Mean((nats * batch["weights"]).sum(), batch["weights"].sum())

    model, batch = jp.Model(init=init, loss=loss, rows="independent"), cells.batch_of()
    sizes = [
        int(part.split("=")[1])
        for part in text.split(",")
        if part.partition("=")[0] in ("pipe", "expert", "fsdp", "tensor")
    ]
    step = jp.make_train_step(
        model,
        optax.sgd(0.1, momentum=0.9),
        text,
        mesh=jax.devices()[: int(np.prod(sizes))],
        trainable=lambda path: path.endswith(("_a", "_b")),
    )
    state = step.init(jax.random.key(0))
    first, (_, grads) = jax.device_get(step.params(state)), step.value_and_grad(state, batch)
    for _ in range(3):
        state, _ = step(state, batch)
    return jax.device_get(grads), jax.tree.map(np.subtract, jax.device_get(step.params(state)), first)


@pytest.mark.battery
@pytest.mark.parametrize("mixture", [dropless, ragged, einsum])
@pytest.mark.parametrize(
    "text",
    [
        "expert=2,fsdp=2,tensor=2",
        "expert=4,fsdp=2,zero=3",
        "pipe=2,expert=2,tensor=2,microbatches=2",
        "pipe=2,expert=2,fsdp=2,microbatches=4,schedule=zb-h1",
        "pipe=2,tensor=2,microbatches=2,schedule=1f1b,remat=layer",
    ],
)
def test_small_experts_beside_frozen_ones(mixture: Any, text: str) -> None:
    expected = jax.tree.leaves_with_path(trained(mixture, "single"))
    for (path, reference), ours in zip(expected, jax.tree.leaves(trained(mixture, text)), strict=True):
        name = jax.tree_util.keystr(path)
        assert (np.abs(reference).max() > 0) == name.endswith(("_a']", "_b']")), name
        assert np.abs(ours - reference).max() <= 1e-5 * np.abs(reference).max(), name
