"""Equinox's modules under every axis; what of them is a parameter, static, state; what users read where they err.

Haiku's transformed functions too, by the recipe of docs/equinox-haiku.md. `tests/zoo.py` has stacks of both, and a
ResNet of Equinox, in the battery of the data strategies.
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

eqx = pytest.importorskip("equinox", reason="Equinox is not installed: pip install equinox")
hk = pytest.importorskip("haiku", reason="Haiku is not installed: pip install dm-haiku")

import others  # noqa: E402

SGD = optax.sgd(0.02, momentum=0.9)
STEPS = 2
BATCH = {"tokens": random_tokens(others.VOCAB, others.LENGTH + 1)}


MODELS = {
    "stack with dropout": lambda: others.decoder(True, 0.2),
    "list": lambda: others.decoder(False),
    "haiku stack with dropout": lambda: others.haiku_decoder(0.2),
    "haiku loop": lambda: others.haiku_decoder(stacked=False),
}


@functools.cache
def one_device(name: str) -> OneDevice:
    return OneDevice(MODELS[name]())


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("stack with dropout", "pipe=2,fsdp=2,microbatches=2"),
        ("haiku loop", "tensor=2,fsdp=2"),
        ("list", "context=2,fsdp=2"),
        ("haiku stack with dropout", "pipe=2,fsdp=2,microbatches=2"),
        *(
            pytest.param(name, strategy, marks=pytest.mark.battery)
            for name, strategy in (
                ("stack with dropout", "tensor=2,sequence=true,data=2"),
                ("stack with dropout", "context=2,fsdp=2"),
                ("list", "pipe=2,data=2,microbatches=2"),
                ("list", "data=4"),
                ("list", "tensor=2,fsdp=2"),
                ("haiku stack with dropout", "context=2,data=2"),
                ("haiku loop", "pipe=2,data=2,microbatches=2"),
            )
        ),
    ],
)
@pytest.mark.xdist_group("equinox")
@pytest.mark.slow
def test_parity(name: str, strategy: str) -> None:
    parsed, reference = jp.Strategy.parse(strategy), one_device(name)
    step = jp.make_train_step(reference.model, SGD, parsed, mesh=jax.devices()[:4])
    blocks = step.replicas * parsed.microbatches
    check(step, reference.model, reference.first, BATCH, STEPS, *reference.train(SGD, BATCH, blocks, STEPS))


@pytest.mark.slow
def test_a_module_comes_back() -> None:
    """Whole, with its functions and integers, in the mode that `make` gave it; parameters alone are one as well."""
    model = others.decoder(stacked=True, dropout=0.5)
    step = jp.make_train_step(model, SGD, "fsdp")
    state = step.init(jax.random.key(3))
    module, built = step.model(state), others.Decoder(True, 0.5, key=jax.random.key(3))
    assert jax.tree.structure(module) == jax.tree.structure(built)
    assert module.blocks.mlp.activation is built.blocks.mlp.activation
    assert module.offsets.tolist() == [*range(others.LENGTH)]
    np.testing.assert_allclose(module.head.weight, built.head.weight, rtol=1e-6)

    params = step.params(state)
    assert isinstance(params, others.Decoder)
    assert params.offsets is None
    for params_or_module in (params, built):  # of a module the parameters are taken
        again = step.init(jax.random.key(0), params=params_or_module)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), again.params, state.params)

    _, grads = jax.eval_shape(step.value_and_grad, state, BATCH)
    assert isinstance(grads, others.Decoder)
    # Without dropout in `evaluate`, whatever the key.
    quiet = eqx.nn.inference_mode(built)
    expected = others.next_token(quiet, BATCH, jax.random.key(7))
    np.testing.assert_allclose(step.evaluate(state, BATCH)["loss"], expected, rtol=1e-5)


@pytest.mark.slow
def test_state_comes_back() -> None:
    step = jp.make_train_step(others.resnet(), SGD, "fsdp")
    state = step.init(jax.random.key(0))
    state, _ = step(state, images())
    module, statistics = step.model(state)
    mean, _ = statistics.get(module.norms[0].batch_state_index)
    # A tenth of the mean over all rows, which are of different brightness.
    built, fresh = eqx.nn.make_with_state(others.ResNet)(13, key=jax.random.key(0))
    normalise = jax.vmap(built, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    _, expected = normalise(images()["image"].transpose(0, 3, 1, 2), fresh)
    np.testing.assert_allclose(mean, expected.get(built.norms[0].batch_state_index)[0], atol=1e-5)
    assert int(statistics.get(module.norms[0].batch_counter)) == 1


class Normed(eqx.Module):
    """A norm of a user's own, over the name of a `vmap`."""

    linear: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.linear(x)
        return x - jax.lax.pmean(x, "batch")


def test_a_mean_over_a_vmap_that_is_of_one_device_is_refused() -> None:
    def loss(module: Normed, batch: Any, key: jax.Array) -> jax.Array:
        return jnp.square(jax.vmap(module, axis_name="batch")(batch)).mean()

    model = jp.from_equinox(lambda key: Normed(eqx.nn.Linear(4, 4, key=key)), loss)
    step = jp.make_train_step(model, SGD, "ddp")
    with pytest.raises(ValueError, match="all_rows"):
        step.trace(np.ones((16, 4), np.float32))


def test_what_is_no_such_function() -> None:
    def linear(key: jax.Array) -> Any:
        return eqx.nn.Linear(4, 4, key=key)

    def loss(module: Any, batch: Any, key: jax.Array) -> jax.Array:
        return jax.vmap(module)(batch).mean()

    def short(module: Any, batch: Any) -> jax.Array:
        return jax.vmap(module)(batch).mean()

    def stateless(module: Any, state: Any, batch: Any, key: jax.Array) -> Any:
        return jnp.float32(0)

    norm = eqx.nn.make_with_state(lambda key: eqx.nn.BatchNorm(4, "batch", mode="batch"))
    key = jax.random.key(0)
    for call, words in (
        (lambda: jp.from_equinox(linear(key), loss), "got a Linear, needs a function that makes one: lambda key: Lin"),
        (lambda: jp.from_equinox(3, loss), "both must be functions"),
        (lambda: jp.from_equinox(eqx.nn.Linear, loss), "wrap it: lambda key: Linear"),
        (lambda: jp.from_equinox(linear, short), r"called as short\(module, batch, key\)"),
        (lambda: jp.from_equinox(norm, loss), r"called as loss\(module, state, batch, key\)"),
        (lambda: jp.from_equinox(lambda key: jax.nn.relu, loss), "without a floating-point array"),
        (lambda: jp.from_equinox(norm, stateless).call(*model_parts(norm, stateless), BATCH, key), "return .value, st"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def model_parts(make: Any, loss: Any) -> Any:
    return jp.from_equinox(make, loss).create(jax.random.key(0))


def test_a_module_handed_to_model() -> None:
    """JAX said that a function is not a valid JAX type, and not which or what to write."""
    loss = lambda params, batch, key: jax.vmap(params)(batch).mean()
    model = jp.Model(init=lambda key: eqx.nn.MLP(4, 4, 8, 1, key=key), loss=loss)
    with pytest.raises(ValueError, match=r"whose leaf activation is the function relu, .*jp\.from_equinox\(lambda key"):
        jp.make_train_step(model, SGD, "ddp")
    # A rate became a parameter, or 'bool' object has no attribute 'shape'.
    with pytest.raises(ValueError, match=r"a Dropout, whose leaf p is a float, and no array; .*jp\.from_equinox"):
        jp.Model(init=lambda key: eqx.nn.Dropout(0.1), loss=loss).create(jax.random.key(0))


def test_an_error_names_its_layer() -> None:
    class Net(eqx.Module):
        layers: list[eqx.nn.Linear]

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = layer(x)
            return x

    net = lambda key: Net([eqx.nn.Linear(4, 4, key=key), eqx.nn.Linear(5, 4, key=key)])
    model = jp.from_equinox(net, lambda net, batch, key: jax.vmap(net)(batch).mean())
    with pytest.raises(TypeError) as raised:
        jp.make_train_step(model, None, "single", mesh=jax.devices()[:1]).trace(np.ones((4, 4), np.float32))
    assert any(note.endswith("in layers/1 (Linear)") for note in raised.value.__notes__)


class Rotary(eqx.Module):
    """Keeps arrays where JAX sees none, as palm-jax does with its frequencies."""

    w: jax.Array
    freq: Any = eqx.field(static=True)
    more: Any = eqx.field(static=True)
    scale: Any

    def __init__(self, key: jax.Array, drawn: bool = False):
        self.w = jax.random.normal(key, (4,))
        self.freq = self.w if drawn else 1.0 / 10.0 ** jnp.arange(4)
        self.more = ("name", {"table": [jnp.ones(4)]})
        shift = jnp.arange(4.0)
        self.scale = lambda x: x + shift

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.scale(x * self.w * self.freq) * self.more[1]["table"][0]


def rotated(module: Rotary, batch: Any, key: jax.Array) -> jax.Array:
    return jnp.square(module(batch["x"])).mean()


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_a_module_may_keep_arrays_in_static_fields() -> None:
    """They were tracers of a trace that had ended: JAX's UnexpectedTracerError, where Equinox warns and trains."""
    batch = {"x": np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)}
    step = jp.make_train_step(jp.from_equinox(lambda key: Rotary(key), rotated), SGD, "fsdp")
    state = step.init(key := jax.random.key(0))
    _, grads = step.value_and_grad(state, batch)
    module = eqx.tree_at(lambda module: module.w, Rotary(key), step.params(state).w)
    np.testing.assert_allclose(grads.w, eqx.filter_grad(rotated)(module, batch, key).w, rtol=1e-5)
    np.testing.assert_array_equal(step.model(state).freq, module.freq)


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_a_static_array_that_is_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match=r"freq of a Rotary is static, and make\(key\) draws it .*np\.random\.default"):
        jp.from_equinox(lambda key: Rotary(key, drawn=True), rotated)


def test_advice_about_numpy_in_a_constructor_can_be_followed() -> None:
    """A line that applies NumPy to an array drawn from the key was told to use NumPy (rnn-jax's LRU)."""

    class Lru(eqx.Module):
        nu: jax.Array

    loss = lambda module, batch, key: (module.nu * batch).mean()
    with pytest.raises(ValueError, match=r"Lru\(np.log.*use the function of jax.numpy \(jnp.log for np.log\)") as error:
        jp.from_equinox(lambda key: Lru(np.log(jax.random.uniform(key, (4,)))), loss)
    assert "compute this one with NumPy" not in str(error.value)
    jp.from_equinox(lambda key: Lru(jnp.log(jax.random.uniform(key, (4,)))), loss)
    with pytest.raises(ValueError, match=r"compute this one with NumPy or Python .*np\.random\.default_rng\(0\)"):
        jp.from_equinox(lambda key: Lru(jnp.ones(int(jax.random.randint(key, (), 1, 5)))), loss)
    jp.from_equinox(lambda key: Lru(jnp.ones(int(np.random.default_rng(0).integers(1, 5)))), loss)


@pytest.mark.slow
def test_a_function_of_haiku_comes_back() -> None:
    step = jp.make_train_step(others.haiku_decoder(0.2), SGD, "fsdp")
    state, _ = step(step.init(jax.random.key(0)), BATCH)
    logits = step.model(state)(None, BATCH["tokens"][:, :-1], False)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, BATCH["tokens"][:, 1:])
    np.testing.assert_allclose(step.evaluate(state, BATCH)["loss"], nats.mean(), rtol=1e-5)


def test_state_of_haiku_is_kept() -> None:
    """The state of `hk.transform_with_state` is kept: a count of calls, one for each step."""

    def run(x: jax.Array) -> jax.Array:
        count = hk.get_state("count", (), init=jnp.zeros)
        hk.set_state("count", count + 1)
        return hk.Linear(3)(x)

    net, x = hk.transform_with_state(run), np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)

    def loss(params: Any, state: Any, batch: Any, key: jax.Array | None) -> Any:
        out, state = net.apply(params, state, key, batch)
        return jnp.square(out).mean(), state

    step = jp.make_train_step(jp.Model(lambda key: net.init(key, x[:1]), loss, stateful=True), SGD, "fsdp")
    state = step.init(jax.random.key(0))
    old_count = float(jax.tree.leaves(state.variables)[0])
    state, _ = step(state, x)
    assert float(jax.tree.leaves(state.variables)[0]) == old_count + 1


def test_an_error_names_its_haiku_module() -> None:
    class Squared(hk.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ x

    def run(x: jax.Array) -> jax.Array:
        return hk.Sequential([hk.Linear(4), Squared(name="squared")])(x)

    net, x = hk.transform(run), np.ones((4, 4), np.float32)
    model = jp.Model(lambda key: net.init(key, x), lambda params, batch, key: net.apply(params, key, batch).mean())
    with pytest.raises(TypeError) as raised:
        jp.make_train_step(model, None, "single", mesh=jax.devices()[:1]).trace(np.ones((2, 4), np.float32))
    assert any(note.endswith("in squared (Squared)") for note in raised.value.__notes__)
