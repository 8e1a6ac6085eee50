"""The Llama decoder computes what its papers define: causality, rotary embedding, grouped queries, tying, loss."""

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
from jaxpar.models import llama, resnet
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


def test_a_model_without_dropout_is_its_parameters() -> None:
    assert len(jax.tree.leaves(nnx.state(build(SMALL)))) == len(jax.tree.leaves(nnx.state(build(SMALL), nnx.Param)))


def test_a_future_token_does_not_change_an_earlier_logit() -> None:
    model, text = build(SMALL), tokens()
    changed = logits(model, text.at[:, 5].add(1) % SMALL.vocab) - logits(model, text)
    np.testing.assert_allclose(changed[:, :5], 0, atol=1e-6)
    assert jnp.abs(changed[:, 5:]).max(axis=(0, 2)).min() > 1e-3  # every later position sees it


def test_rows_do_not_see_each_other() -> None:
    model, text = build(SMALL), tokens(rows=3)
    np.testing.assert_allclose(logits(model, text)[1], logits(model, text[1:2])[0], atol=1e-5)


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


def test_grouped_queries_equal_full_attention_with_repeated_keys_and_values() -> None:
    grouped = build(SMALL)
    full = build(dataclasses.replace(SMALL, kv_heads=SMALL.heads), seed=1)
    state = nnx.to_pure_dict(nnx.state(grouped))
    for name in ("key", "value"):
        projection = state["layers"]["attention"][name]
        heads = projection["kernel"].reshape(SMALL.layers, SMALL.dim, SMALL.kv_heads, SMALL.head_dim)
        projection["kernel"] = jnp.repeat(heads, SMALL.heads // SMALL.kv_heads, axis=2).reshape(SMALL.layers, 24, 24)
    target = nnx.state(full)
    nnx.replace_by_pure_dict(target, state)
    nnx.update(full, target)
    np.testing.assert_allclose(logits(full, tokens()), logits(grouped, tokens()), atol=1e-5)


@pytest.mark.slow
def test_the_whole_model_is_the_textbook_formula() -> None:
    """The formula runs layer by layer, head by head, on one row: no scan, no batching, no library attention."""

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale

    model, text = build(SMALL), tokens(rows=1, length=7)
    state = nnx.to_pure_dict(nnx.state(model))
    # Scales away from one, so that each of them counts.
    state = jax.tree.map(lambda leaf: leaf + 0.1 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), state)
    target = nnx.state(model)
    nnx.replace_by_pure_dict(target, state)
    nnx.update(model, target)

    @jax.jit  # one program instead of a thousand small ones
    def formula(state: Any) -> jax.Array:
        angles = llama.rope_table(7, SMALL.head_dim, SMALL.rope_theta)
        x = state["embedding"][text[0]]
        for i in range(SMALL.layers):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], state["layers"])
            attention, ffn = layer["attention"], layer["ffn"]
            y = norm(x, layer["attention_norm"]["scale"])
            q, k, v = (
                (y @ attention[name]["kernel"]).reshape(1, 7, -1, SMALL.head_dim) for name in ("query", "key", "value")
            )
            q, k = llama.rope(q, angles), llama.rope(k, angles)
            heads = []
            for head in range(SMALL.heads):
                group = head // (SMALL.heads // SMALL.kv_heads)
                scores = q[0, :, head] @ k[0, :, group].T / jnp.sqrt(SMALL.head_dim)
                heads.append(jax.nn.softmax(jnp.where(jnp.tri(7, dtype=bool), scores, -jnp.inf)) @ v[0, :, group])
            x = x + jnp.concatenate(heads, axis=-1) @ attention["out"]["kernel"]
            y = norm(x, layer["ffn_norm"]["scale"])
            gate = y @ ffn["gate"]["kernel"]
            x = x + (gate * jax.nn.sigmoid(gate) * (y @ ffn["up"]["kernel"])) @ ffn["down"]["kernel"]
        return norm(x, state["norm"]["scale"]) @ state["head"]["kernel"]

    expected = formula(state)
    np.testing.assert_allclose(logits(model, text)[0], expected, rtol=1e-4, atol=1e-4 * jnp.abs(expected).max())


@pytest.mark.slow
def test_tied_head_is_the_embedding() -> None:
    model = build(dataclasses.replace(SMALL, tied=True))
    _, gradient = nnx.jit(nnx.value_and_grad(llama.loss))(model, {"tokens": jnp.zeros((1, 4), jnp.int32)})
    assert model.head is None
    # The embedding alone reaches row 0 only; the head reaches every row.
    assert (jnp.abs(gradient["embedding"][...]).max(axis=1) > 0).all()


def test_initial_loss_is_near_that_of_a_uniform_guess() -> None:
    value = loss(build(SMALL), {"tokens": tokens(rows=16, length=33)})
    assert abs(value - np.log(SMALL.vocab)) < 1


@pytest.mark.slow
def test_bfloat16_parameters_compute_in_bfloat16_and_lose_in_float32() -> None:
    model = build(SMALL)
    exact = loss(model, {"tokens": tokens()})
    nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(model)))
    rounded = loss(model, {"tokens": tokens()})
    assert logits(model, tokens()[:, :-1]).dtype == jnp.bfloat16
    assert rounded.dtype == jnp.float32
    np.testing.assert_allclose(rounded, exact, rtol=2e-2)


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
    for _ in range(60):
        parameters, state, value = step(parameters, state)
    assert value < 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 30}, r"dim=30 .* heads=4 .* try dim=32"),
        ({"kv_heads": 3}, r"kv_heads=3 does not divide heads=4; use one of \[1, 2, 4\]"),
        ({"dropout": 1.0}, r"dropout=1.0 must lie in \[0, 1\); use 0"),
    ],
)
def test_sizes_that_do_not_fit_say_what_would(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


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
