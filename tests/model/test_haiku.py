"""Haiku's transformed functions under every axis, their state, and what users read where they err.

`tests/zoo.py` has a stack and a ResNet of Haiku in the battery of the data strategies.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import OneDevice, check
from zoo import images, random_tokens

import jaxpar as jp

pytest.importorskip("equinox", reason="Equinox is not installed: pip install equinox")
hk = pytest.importorskip("haiku", reason="Haiku is not installed: pip install dm-haiku")

import others  # noqa: E402

SGD = optax.sgd(0.02, momentum=0.9)
STEPS = 2
BATCH = {"tokens": random_tokens(others.VOCAB, others.LENGTH + 1)}


@functools.cache
def one_device(dropout: float, stacked: bool) -> OneDevice:
    return OneDevice(others.haiku_decoder(dropout, stacked))


@pytest.mark.parametrize(
    ("dropout", "stacked", "strategy"),
    [
        (0.2, True, "pipe=2,fsdp=2,microbatches=2"),
        (0.0, False, "tensor=2,fsdp=2"),
        pytest.param(0.2, True, "context=2,data=2", marks=pytest.mark.battery),
        pytest.param(0.0, False, "pipe=2,data=2,microbatches=2", marks=pytest.mark.battery),
    ],
)
@pytest.mark.xdist_group("haiku")
@pytest.mark.slow
def test_parity(dropout: float, stacked: bool, strategy: str) -> None:
    parsed, one = jp.Strategy.parse(strategy), one_device(dropout, stacked)
    step = jp.make_train_step(one.model, SGD, parsed, mesh=jax.devices()[:4])
    blocks = step.replicas * parsed.microbatches
    check(step, one.model, one.first, BATCH, STEPS, *one.train(SGD, BATCH, blocks, STEPS))


@pytest.mark.slow
def test_apply_comes_back() -> None:
    step = jp.make_train_step(others.haiku_resnet(), SGD, "fsdp")
    state, _ = step(step.init(jax.random.key(0)), images())
    logits, averages = step.model(state)(None, images()["image"], False)
    assert logits.shape == (16, 10)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, images()["label"])
    np.testing.assert_allclose(step.evaluate(state, images())["loss"], nats.mean(), rtol=1e-5)
    assert averages["batch_norm/~/mean_ema"]["counter"].tolist() == 1


def test_a_key_is_there_in_evaluate() -> None:
    """DeepMind's Perceiver asks for one whatever its rate of dropout: it was Haiku's own MissingRNGError. What draws by
    it is refused.
    """

    def forward(x: jax.Array, train: bool) -> jax.Array:
        return hk.Linear(3)(hk.dropout(hk.next_rng_key(), 0.5 if train else 0.0, x))

    loss = lambda apply, batch: jnp.square(apply(batch, apply.train)).mean()
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    step = jp.make_train_step(jp.from_haiku(hk.transform(forward), loss, x), SGD, "fsdp")
    state = step.init(jax.random.key(0))
    expected = jnp.square(step.model(state)(jax.random.key(1), x, False)).mean()
    np.testing.assert_allclose(step.evaluate(state, x)["loss"], expected, rtol=1e-6)
    noisy = jp.from_haiku(hk.transform(forward), lambda apply, batch: jnp.square(apply(batch, True)).mean(), x)
    step = jp.make_train_step(noisy, SGD, "fsdp")
    with pytest.raises(ValueError, match=r"depends on its rng in evaluate.* draw only where apply\.train"):
        step.evaluate(state, x)


def test_calls_of_several_kinds_create_what_each_needs() -> None:
    """A second call, of other arguments, made parameters that the first had not; and its keys are others."""

    def run(x: jax.Array, second: bool) -> Any:
        out = hk.Linear(4, name="two" if second else "one")(x)
        return out + jax.random.normal(hk.next_rng_key(), x.shape)

    def loss(apply: Any, batch: Any) -> jax.Array:
        first, again = apply(batch, False), apply(batch, True)
        return jnp.square(first - again).mean()

    model = jp.from_haiku(hk.transform(run), loss, np.ones((2, 4), np.float32))
    params, _ = model.create(jax.random.key(0))
    assert {*params} == {"one", "two"}
    same = jax.tree.map(jnp.zeros_like, params)
    assert float(model.call(same, {}, np.ones((8, 4), np.float32), jax.random.key(0))[0]["loss"].total) > 0.1


@pytest.mark.parametrize("learnt", [True, False])
def test_a_codebook_is_of_all_rows(learnt: bool) -> None:
    """Haiku's VQ-VAE as its example has it: replicas' codebooks would drift apart, and it was refused with advice on
    Flax's BatchNorm. Its quantizers are told of the replicas, as `hk.BatchNorm` is; evaluation leaves them as they are.
    """

    def coded(x: jax.Array, is_training: bool) -> Any:
        kind = hk.nets.VectorQuantizer if learnt else functools.partial(hk.nets.VectorQuantizerEMA, decay=0.9)
        codes = kind(embedding_dim=4, num_embeddings=6, commitment_cost=0.25)(hk.Linear(4)(x), is_training)
        return hk.Linear(3)(codes["quantize"]), codes["loss"], codes["perplexity"]

    def loss(apply: Any, batch: Any) -> Any:
        out, commitment, perplexity = apply(batch["x"], True)
        return jnp.square(out - batch["x"]).mean() + commitment, {"perplexity": perplexity}

    batch = {"x": np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)}
    model = jp.from_haiku(hk.transform_with_state(coded), loss, batch)
    parity = jp.verify(model, "fsdp=4,microbatches=2", batch, mesh=jax.devices()[:4])
    assert parity.ok, parity
    step = jp.make_train_step(model, SGD, "fsdp=4", mesh=jax.devices()[:4])
    state = step.init(jax.random.key(0))
    perplexity = step.evaluate(state, batch)["perplexity"]
    single = jp.make_train_step(model, SGD, "single", mesh=jax.devices()[:1])
    whole = single.evaluate(single.init(jax.random.key(0)), batch)["perplexity"]
    np.testing.assert_allclose(perplexity, whole, rtol=1e-5)
    before = jax.tree.map(np.asarray, state.variables)
    after = step(state, batch)[0].variables
    moved = [not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)]
    assert all(moved)
    assert len(moved) == (0 if learnt else 7)


def test_what_is_no_such_function() -> None:
    transformed = hk.transform(lambda x: hk.Linear(4)(x))
    loss = lambda apply, batch: apply(batch).mean()
    rows = np.ones((8, 4), np.float32)

    def create(loss: Any) -> Any:
        return jp.from_haiku(transformed, loss, rows).create(jax.random.key(0))

    for call, words in (
        (lambda: jp.from_haiku(lambda x: x, loss, rows), "needs what hk.transform"),
        (lambda: jp.from_haiku(hk.without_apply_rng(transformed), loss, rows), "hand over f itself"),
        (lambda: jp.from_haiku(transformed, 3, rows), "must be a function"),
        (lambda: jp.from_haiku(transformed, loss, iter([rows])), r"from_haiku\(example=\) is a list_iterator"),
        (lambda: create(lambda apply, batch: jnp.float32(0)), "created no parameters"),
        (lambda: create(lambda apply, batch: apply(batch, rng=None).mean()), "leave it out"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(AttributeError, match=r"apply.train"):
        create(lambda apply, batch: apply.init(batch))


def test_an_error_names_its_layer() -> None:
    class Squared(hk.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ x

    def run(x: jax.Array) -> jax.Array:
        return hk.Sequential([hk.Linear(4), Squared(name="squared")])(x)

    model = jp.from_haiku(hk.transform(run), lambda apply, batch: apply(batch).mean(), np.ones((4, 4), np.float32))
    with pytest.raises(TypeError) as found:
        jp.make_train_step(model, None, "single", mesh=jax.devices()[:1]).trace(np.ones((2, 4), np.float32))
    assert any(note.endswith("in squared (Squared)") for note in found.value.__notes__)
