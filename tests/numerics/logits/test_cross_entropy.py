"""The fused cross-entropy against the plain one: values, gradients, ids out of range; under strategies; memory."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.models import llama

B, T, D, V = 4, 12, 8, 16


def arrays(dtype: Any = np.float32, t: int = T) -> tuple[Any, ...]:
    """Return hidden states, a head, labels and a cotangent."""
    random = np.random.default_rng(0)
    hidden, head = random.normal(size=(B, t, D)), random.normal(size=(D, V))
    labels, cotangent = random.integers(V, size=(B, t)), random.normal(size=(B, t)).astype(np.float32)
    return jnp.asarray(hidden, dtype), jnp.asarray(head, dtype), jnp.asarray(labels), cotangent


def in_float64(hidden: Any, head: Any, labels: Any, cotangent: Any) -> tuple[np.ndarray, ...]:
    hidden, head = (np.asarray(x, np.float64) for x in (hidden, head))
    logits = hidden @ head
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    one_hot = np.eye(V)[labels]
    d_logits = (p - one_hot) * cotangent[..., None]
    return -np.log((p * one_hot).sum(-1)), d_logits @ head.T, np.einsum("btd,btv->dv", hidden, d_logits)


@pytest.mark.parametrize(
    ("t", "chunk", "dtype", "tolerance"),
    [
        (T, 16, np.float32, 2e-6),
        (T, 16, jnp.bfloat16, 2e-2),
        (13, 16, np.float32, 2e-6),
        *(pytest.param(T, chunk, np.float32, 2e-6, marks=pytest.mark.battery) for chunk in (1, 7, 10_000)),
    ],
)
def test_equals_float64(t: int, chunk: int, dtype: Any, tolerance: float) -> None:
    hidden, head, labels, cotangent = arrays(dtype, t)

    @jax.jit
    def value_and_grads(hidden: jax.Array, head: jax.Array) -> Any:
        nats, pull = jax.vjp(lambda *x: jp.cross_entropy(*x, labels, chunk=chunk), hidden, head)
        return nats, *pull(cotangent)

    results = value_and_grads(hidden, head)
    assert [x.dtype for x in results] == [np.float32, dtype, dtype]
    for result, expected in zip(results, in_float64(hidden, head, labels, cotangent), strict=True):
        assert np.abs(np.asarray(result, np.float64) - expected).max() < tolerance * np.abs(expected).max()


def test_gradient_of_a_bfloat16_head_adds_up_in_float32() -> None:
    """1,024 chunks of equal gradients: in bfloat16 a sum stops growing at 256 times its summand."""
    hidden, head = jnp.ones((1, 1024, 1), jnp.bfloat16), jnp.zeros((1, 2), jnp.bfloat16)
    labels = jnp.zeros((1, 1024), jnp.int32)
    grad = jax.jit(jax.grad(lambda head: jp.cross_entropy(hidden, head, labels, chunk=1).sum()))(head)
    np.testing.assert_array_equal(np.asarray(grad, np.float32), [[-512, 512]])


def test_ids_out_of_range_are_seen_and_ignored_ones_cost_nothing() -> None:
    hidden, head, labels, cotangent = arrays()
    odd = labels.at[0, 0].set(V).at[1, 1].set(-1).at[2, 2].set(-100)
    nats, pull = jax.vjp(lambda h: jp.cross_entropy(h, head, odd, ignore=-100, chunk=8), hidden)
    assert np.isnan(nats[0, 0])
    assert np.isnan(nats[1, 1])
    assert nats[2, 2] == 0
    assert not np.any(pull(jnp.asarray(cotangent))[0][2, 2])
    assert np.isnan(np.asarray(nats)).sum() == 2


def decoder(key: jax.Array) -> Any:
    """Return the parameters of two scanned layers, and of a head that is not tied."""
    shapes = {"embedding": (V, D), "up": (2, D, 4 * D), "down": (2, 4 * D, D), "head": (D, V)}
    keys = jax.random.split(key, len(shapes))
    return {name: 0.3 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def fused(p: Any, batch: Any, key: Any) -> Any:
    layer = lambda x, w: (x + jax.nn.relu(x @ w[0]) @ w[1], None)
    hidden, _ = jax.lax.scan(layer, p["embedding"][batch["tokens"]], (p["up"], p["down"]))
    nats = jp.cross_entropy(hidden, p["head"], batch["labels"], ignore=-100, chunk=32)
    weights = batch["weights"] * (batch["labels"] != -100)
    return jp.Mean((nats * weights).sum(), weights.sum())


RULES = {"up|head": -1, "down": -2, "embedding": -2}
STRATEGIES = {
    "fsdp=2,data=2": 4,
    "fsdp=2,tensor=2": 4,
    "tensor=2,sequence=true": 2,
    "pipe=2,microbatches=4": 2,
    "fsdp=2,microbatches=2,precision=bf16": 2,
}


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=[pytest.mark.battery] * (name != "fsdp=2,tensor=2")) for name in STRATEGIES],
)
def test_under_strategies(strategy: str) -> None:
    random = np.random.default_rng(0)
    labels = random.integers(V, size=(16, T))
    labels[:, -2:] = -100
    batch = {"tokens": random.integers(V, size=(16, T)), "labels": labels, "weights": random.random((16, T))}
    batch["weights"] = batch["weights"].astype(np.float32)
    model = jp.Model(init=decoder, loss=fused, rules=RULES)
    devices = jax.devices()[: STRATEGIES[strategy]]
    assert jp.verify(model, strategy, batch, mesh=devices, steps=1).ok


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.battery)])
def test_llama_by_chunks(tied: bool) -> None:
    module = llama.Llama(
        llama.Config(vocab=V, dim=16, layers=1, heads=2, kv_heads=2, ffn=8, tied=tied), rngs=nnx.Rngs(0)
    )
    random = np.random.default_rng(0)
    batch = {"tokens": random.integers(V, size=(B, T + 1)), "mask": random.random((B, T)).astype(np.float32)}

    graph, params = nnx.split(module)

    def grads(loss: Any) -> Any:
        value = lambda params: (mean := loss(nnx.merge(graph, params), batch)).total / mean.count
        return jax.tree.leaves(jax.jit(jax.value_and_grad(value))(params))

    chunked = lambda module, batch: llama.chunked_loss(module, batch, chunk=16)
    for chunked_grad, plain_grad in zip(grads(chunked), grads(llama.loss), strict=True):
        assert np.abs(chunked_grad - plain_grad).max() < 2e-6 * np.abs(plain_grad).max()


def test_logits_are_never_there_as_a_whole() -> None:
    hidden, head, labels = jnp.ones((4, 128, D)), jnp.ones((D, 4096)), jnp.zeros((4, 128), jnp.int32)

    def temporaries(nats: Any) -> int:
        grad = jax.jit(jax.grad(lambda *x: nats(*x).mean(), (0, 1)))
        return grad.lower(hidden, head).compile().memory_analysis().temp_size_in_bytes

    plain = temporaries(lambda h, w: optax.softmax_cross_entropy_with_integer_labels(h @ w, labels))
    assert plain > 4 * labels.size * 4096
    assert temporaries(lambda h, w: jp.cross_entropy(h, w, labels, chunk=32)) < plain / 4


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"head": np.ones((D + 1, V))}, ("hidden is [4, 12, 8]", "head is [9, 16]", "embedding.T")),
        ({"labels": np.zeros((B, T))}, ("labels are float", "integers [4, 12]")),
        ({"labels": np.zeros((B, T + 1), int)}, ("[4, 13]", "integers [4, 12]")),
        ({"chunk": 0}, ("chunk=0", "from 1 on")),
    ],
)
def test_errors(change: dict[str, Any], parts: tuple[str, ...]) -> None:
    hidden, head, labels, _ = arrays()
    arguments = {"hidden": hidden, "head": head, "labels": labels} | change
    arguments = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
    with pytest.raises(ValueError, match=".*".join(map(re.escape, parts))):
        jp.cross_entropy(**arguments)
