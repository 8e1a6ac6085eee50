"""Llama and GPT compute what their papers define: causality, rotary embedding, grouped queries, tying, loss."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpar.model.model import Mean
from jaxpar.models import gpt, llama, resnet
from jaxpar.models.llama import Config, Llama

SMALL = Config(vocab=61, dim=24, layers=3, heads=4, kv_heads=2, ffn=40)


def tokens(rows: int = 2, length: int = 9, vocab: int = SMALL.vocab) -> jax.Array:
    return jax.random.randint(jax.random.key(1), (rows, length), 0, vocab)


@partial(nnx.jit, static_argnums=(0, 1))
def build(config: Config, seed: int = 0) -> Llama:
    return Llama(config, rngs=nnx.Rngs(seed))


@nnx.jit
def logits(model: Llama, text: jax.Array) -> jax.Array:
    return model(text)


loss = nnx.jit(llama.loss)


def test_layers_are_stacked_on_dim_0_and_differ() -> None:
    layers = nnx.state(build(SMALL).layers, nnx.Param)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(layers)} == {SMALL.layers}
    query = layers["attention"]["query"]["kernel"][...]
    assert not np.allclose(query[0], query[1])


def test_a_resnet_has_logits_for_each_row_that_no_other_row_changes() -> None:
    config = resnet.SIZES["resnet-tiny"]
    model = nnx.jit(lambda: resnet.ResNet(config, rngs=nnx.Rngs(0)))()
    model.eval()
    image = np.random.default_rng(0).normal(size=(3, config.size, config.size, config.channels)).astype(np.float32)
    run = nnx.jit(lambda model, image: model(image))
    logits, changed_logits = run(model, image), run(model, image * [[[[1]]], [[[-1]]], [[[1]]]])
    assert logits.shape == (3, config.classes)
    differences = np.abs(np.asarray(logits) - np.asarray(changed_logits)).max(axis=1)
    assert differences[1] > 1e-3
    np.testing.assert_allclose(differences[[0, 2]], 0, atol=1e-6)


def test_rope_depends_on_relative_position_alone() -> None:
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))
    angles = llama.rope_table(64, 16, 10_000.0)

    def score(i: int, j: int) -> jax.Array:
        return jnp.sum(llama.rope(query, angles[i : i + 1]) * llama.rope(key, angles[j : j + 1]))

    np.testing.assert_allclose(score(10, 3), score(47, 40), rtol=1e-4)
    assert abs(score(10, 3) - score(10, 4)) > 1e-3
    np.testing.assert_allclose(score(0, 0), jnp.sum(query * key), rtol=1e-5)


def test_rope_turns_the_first_pair_by_one_radian_per_position() -> None:
    unit = jnp.zeros((1, 3, 1, 4)).at[..., 0].set(1)
    turned = llama.rope(unit, llama.rope_table(3, 4, 100.0))[0, :, 0]
    np.testing.assert_allclose(turned[:, 0], np.cos([0, 1, 2]), atol=1e-6)
    np.testing.assert_allclose(turned[:, 2], np.sin([0, 1, 2]), atol=1e-6)
    np.testing.assert_allclose(llama.rope_table(2, 4, 100.0)[1], [1.0, 0.1], rtol=1e-5)


# The formulas run layer by layer, head by head, row by row: no scan, no batching, no library attention. They are
# causal, and no row sees another.


def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of one row by its formula: [T, heads, dim] -> [T, heads * dim]; groups of queries share a key."""
    length, heads, dim = q.shape
    outputs = []
    for head in range(heads):
        group = head // (heads // k.shape[1])
        scores = q[:, head] @ k[:, group].T / math.sqrt(dim)
        outputs.append(jax.nn.softmax(jnp.where(np.tri(length, dtype=bool), scores, -jnp.inf)) @ v[:, group])
    return jnp.concatenate(outputs, axis=-1)


def assert_is_formula(model: nnx.Module, formula: Any, text: jax.Array, spread: float, tolerance: float) -> None:
    """Compare a model with `formula(state, row)`, with scales and biases away from one and zero: each counts."""
    state = jax.tree.map(
        lambda x: x + spread * jnp.cos(jnp.arange(x.size)).reshape(x.shape), nnx.to_pure_dict(nnx.state(model))
    )
    target = nnx.state(model)
    nnx.replace_by_pure_dict(target, state)
    nnx.update(model, target)
    formula = jax.jit(formula)  # one program instead of a thousand small ones
    expected = jnp.stack([formula(state, row) for row in text])
    atol = tolerance * jnp.abs(expected).max()
    np.testing.assert_allclose(logits(model, text), expected, rtol=tolerance, atol=atol)


def test_llama_is_the_textbook_formula() -> None:
    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale

    def formula(state: Any, row: jax.Array) -> jax.Array:
        angles = llama.rope_table(7, SMALL.head_dim, SMALL.rope_theta)
        x = state["embedding"][row]
        for i in range(SMALL.layers):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], state["layers"])
            attention, ffn = layer["attention"], layer["ffn"]
            y = norm(x, layer["attention_norm"]["scale"])
            q, k, v = (
                (y @ attention[name]["kernel"]).reshape(7, -1, SMALL.head_dim) for name in ("query", "key", "value")
            )
            q, k = (llama.rope(heads[None], angles)[0] for heads in (q, k))
            x = x + causal(q, k, v) @ attention["out"]["kernel"]
            y = norm(x, layer["ffn_norm"]["scale"])
            gate = y @ ffn["gate"]["kernel"]
            x = x + (gate * jax.nn.sigmoid(gate) * (y @ ffn["up"]["kernel"])) @ ffn["down"]["kernel"]
        return norm(x, state["norm"]["scale"]) @ state["head"]["kernel"]

    assert_is_formula(build(SMALL), formula, tokens(length=7), spread=0.1, tolerance=1e-4)


def test_gpt_is_the_textbook_formula() -> None:
    def norm(x: jax.Array, params: Any) -> jax.Array:
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * params["scale"] + params["bias"]

    def linear(x: jax.Array, params: Any) -> jax.Array:
        return x @ params["kernel"] + params["bias"]

    def formula(state: Any, row: jax.Array) -> jax.Array:
        x = state["embedding"][row] + state["position"][:7]
        for i in range(config.layers):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], state["layers"])
            y = norm(x, layer["attention_norm"])
            q, k, v = (linear(y, layer["attention"][name]).reshape(7, 3, 10) for name in ("query", "key", "value"))
            x = x + linear(causal(q, k, v), layer["attention"]["out"])
            y = linear(norm(x, layer["ffn_norm"]), layer["up"])
            y = 0.5 * y * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
            x = x + linear(y, layer["down"])
        return norm(x, state["norm"]) @ state["embedding"].T

    config = gpt.Config(vocab=61, dim=30, heads=3, layers=3, context=12)
    model = nnx.jit(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))()
    assert_is_formula(model, formula, tokens(length=7), spread=0.3, tolerance=1e-5)


@pytest.mark.slow
def test_tied_head_is_the_embedding() -> None:
    model = build(dataclasses.replace(SMALL, tied=True))
    _, gradient = nnx.jit(nnx.value_and_grad(llama.loss))(model, {"tokens": jnp.zeros((1, 4), jnp.int32)})
    assert model.head is None
    # The embedding alone reaches row 0 only; the head reaches every row.
    assert (jnp.abs(gradient["embedding"][...]).max(axis=1) > 0).all()


def test_norm_rounds_once_however_coarse_its_input() -> None:
    x = jax.random.normal(jax.random.key(3), (1, 64, 48)).astype(jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    exact /= np.sqrt(np.mean(exact**2, axis=-1, keepdims=True) + 1e-6)
    normed = llama.RMSNorm(48)(x)
    assert normed.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(normed, np.float64), exact, rtol=2**-8 + 1e-5)  # half an ulp


def test_masked_loss_counts_only_the_mask() -> None:
    model, text = build(SMALL), tokens(rows=2, length=7)
    mask = jnp.zeros((2, 6)).at[1, :3].set(1)
    masked = loss(model, {"tokens": text, "mask": mask})
    assert isinstance(masked, Mean)
    assert masked.count == 3
    np.testing.assert_allclose(masked.total / masked.count, loss(model, {"tokens": text[1:, :4]}), rtol=1e-5)


@pytest.mark.slow
def test_dropout_drops_in_training_only_and_differs_between_layers_and_calls() -> None:
    model = build(dataclasses.replace(SMALL, dropout=0.5))
    text = tokens()
    assert not np.allclose(logits(model, text), logits(model, text))
    model.eval()
    np.testing.assert_array_equal(logits(model, text), logits(model, text))
    keys = jax.random.key_data(model.layers.dropout.rngs.key[...])
    assert len({tuple(key) for key in keys.tolist()}) == SMALL.layers


@pytest.mark.slow
def test_the_model_learns() -> None:
    graph, parameters = nnx.split(build(SMALL))
    optimizer = optax.adam(1e-2)
    batch = {"tokens": tokens(rows=4, length=12)}

    @jax.jit
    def step(parameters: nnx.State, state: optax.OptState) -> tuple[nnx.State, optax.OptState, jax.Array]:
        value, gradient = jax.value_and_grad(lambda p: llama.loss(nnx.merge(graph, p), batch))(parameters)
        updates, state = optimizer.update(gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    state = optimizer.init(parameters)
    losses = []
    for _ in range(60):
        parameters, state, value = step(parameters, state)
        losses.append(value)
    assert abs(losses[0] - np.log(SMALL.vocab)) < 1  # near that of a uniform guess
    assert losses[-1] < 0.5


def test_rope_is_stretched_as_in_llama_3_1() -> None:
    plain, stretched = (np.asarray(llama.rope_table(2, 128, 500_000.0, factor)[1], np.float64) for factor in (1, 8))
    for frequency, scaled in zip(plain, stretched, strict=True):
        turns = 8192 * frequency / (2 * math.pi)
        expected = frequency / 8 if turns < 1 else frequency
        if 1 <= turns <= 4:
            smooth = (turns - 1) / (4 - 1)
            expected = (1 - smooth) * frequency / 8 + smooth * frequency
        assert scaled == pytest.approx(expected, rel=1e-5)
    assert stretched[0] == plain[0]
    assert stretched[-1] == pytest.approx(plain[-1] / 8)
