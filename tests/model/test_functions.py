"""Functions of users that cannot be called as jaxpar calls them, and batches that lack what a loss asks for.

They ended in TypeErrors and KeyErrors from the inside of jax, which name neither the function nor the batch.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.models import named

BATCH = {"x": np.zeros((8, 4), np.float32), "y": np.zeros(8, np.int32)}


class Net(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.a, self.b = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.b(self.a(x))


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2)(x)


def model(loss: Callable[..., Any]) -> jp.Model:
    return jp.from_nnx(lambda rngs: Net(rngs=rngs), loss)


def trace(loss: Callable[..., Any], batch: Any) -> Any:
    return jp.make_train_step(model(loss), optax.sgd(0.1), "ddp").trace(batch)


def params(key: jax.Array) -> dict[str, jax.Array]:
    return {"w": jnp.ones(4)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: jp.Model(init=lambda: 1, loss=lambda p, b, k: 1),
            r"Model\(init=\) is init\(\), and is called as init\(k",
        ),
        (
            lambda: jp.Model(init=params, loss=lambda p, b: 1),
            r"loss\(p, b\), and is called as loss\(params, batch, key\)",
        ),
        (
            lambda: jp.Model(init=params, loss=lambda p, b, k: 1, stateful=True),
            r"is called as loss\(params, variables, batch, key\)",
        ),
        (
            lambda: jp.from_nnx(lambda: Net(rngs=nnx.Rngs(0)), len),
            r"from_nnx\(make=\) is make\(\), and is called as make",
        ),
        (lambda: jp.from_nnx(Net, lambda m, b: 1), r"Net\(\*, rngs\), .*; wrap it: lambda rngs: Net\(rngs=rngs\)"),
        (lambda: model(lambda m: 1), r"from_nnx\(loss=\) is loss\(m\), .*; write it as def loss\(module, batch\)"),
        (lambda: jp.from_linen(Dense(), lambda a, b, k: 1, BATCH), r"from_linen\(loss=\) is loss\(a, b, k\)"),
    ],
)
def test_functions_of_other_arguments_are_refused_when_they_are_given(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_functions_that_can_be_called_are_taken() -> None:
    def weighed(module: Any, batch: Any, weight: float) -> Any:
        return weight * module(batch["x"]).mean()

    @functools.wraps(weighed)
    def filled(module: Any, batch: Any) -> Any:
        return weighed(module, batch, 2.0)

    class Callable_:
        def __call__(self, *args: Any) -> Any:
            return weighed(*args, weight=1.0)

    for loss in (filled, functools.partial(weighed, weight=2.0), jax.tree_util.Partial(weighed, weight=2), Callable_()):
        model(loss)
    jp.Model(init=jax.jit(params), loss=jax.jit(lambda p, b, k: p["w"].sum()))


@pytest.mark.parametrize(
    ("loss", "batch", "message"),
    [
        (
            lambda m, b: m(b["image"]).mean(),
            BATCH,
            r"asks the batch for 'image', and it is a dict of x float32\[1, 4\], y int32\[1\]; read a leaf that it has",
        ),
        (lambda m, b: m(b["X"]).mean(), BATCH, r"for 'X' \(did you mean 'x'\?\)|for 'X', and"),
        (
            lambda m, b: m(b["x"]).mean(),
            (BATCH["x"], BATCH["y"]),
            r"an item by its name, and it is a tuple of 0 float32\[1, 4\], .*; make dicts of a loader's tuples",
        ),
        (lambda m, b: m(b[0]).mean(), BATCH, "asks the batch for 0, and it is a dict of x"),
        (lambda m, b: m(b[2]).mean(), (BATCH["x"],), "for an item beyond its 1"),
        (lambda m, b: m(b.x).mean(), BATCH, r"asks the batch for \.x, and"),
        (lambda m, b: m(b["in"]["z"]).mean(), {"in": BATCH}, r"for 'z', and it is a dict of in/x float32"),
    ],
)
def test_what_a_loss_asks_for_is_shown_beside_the_batch(loss: Any, batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trace(loss, batch)


def test_other_errors_of_a_loss_stay_and_carry_the_batch() -> None:
    table = {"a": 1}
    with pytest.raises(KeyError, match="'x'") as raised:
        trace(lambda m, b: table["x"] * m(b["x"]).mean(), BATCH)
    note = "the batch, a block of its rows: a dict of x float32[1, 4], y int32[1]"
    assert note in raised.value.__notes__
    with pytest.raises(ValueError, match="label") as refused:  # it went without
        trace(lambda m, b: jnp.einsum("ij,jk", b["x"], jnp.ones((3, 2))).mean(), BATCH)
    assert note in refused.value.__notes__


def test_an_error_of_a_linen_module_that_is_not_made_yet_stays() -> None:
    """SAVi's `nn.GRUCell()`, of an older Flax: "Can't access module paths on unbound modules" alone was read."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense()(x)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="features") as raised:
        jp.from_linen(Net(), lambda apply, batch: apply(batch["x"]).mean(), BATCH).create(jax.random.key(0))
    assert any(note.endswith("in Net") for note in raised.value.__notes__), raised.value.__notes__


def test_a_parameter_that_is_missing_is_not_sought_in_the_batch() -> None:
    """It said that the loss asked the batch for 'W', which the batch had not either."""
    model = jp.Model(init=lambda key: {"w": jnp.ones((4, 4))}, loss=lambda p, b, k: (b["x"] @ p["W"]).mean())
    step = jp.make_train_step(model, optax.sgd(0.1), "ddp")
    with pytest.raises(KeyError, match="'W'") as raised:
        step.trace(BATCH)
    assert any("a dict of x" in note for note in raised.value.__notes__)
    with pytest.raises(ValueError, match=r"state is a flax\.nnx\.State; pass what step\.init"):
        step(nnx.State({}), BATCH)


def test_an_example_that_lacks_a_key_is_shown() -> None:
    linen = jp.from_linen(Dense(), lambda apply, b: apply(b["image"]).mean(), BATCH)
    with pytest.raises(ValueError, match="asks the example for 'image', and it is a dict of x"):
        jp.make_train_step(linen, optax.sgd(0.1))


def test_data_without_a_start_is_refused() -> None:
    def data() -> Iterator[Any]:
        yield BATCH

    loop = jp.Loop(steps=1, rows=8)
    with pytest.raises(
        ValueError, match=r"data is data\(\), .* write it as def data\(start\) \(the number of the first"
    ):
        jp.Trainer(model(lambda m, b: m(b["x"]).mean()), optax.sgd(0.1), data, "single", loop).run()


@pytest.mark.parametrize(("name", "shape"), [("llama-tiny", (8, 1)), ("gpt2", (8,)), ("llama-tiny", (8, 0))])
def test_tokens_need_one_more_than_they_predict(name: str, shape: tuple[int, ...]) -> None:
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)  # ZeroDivisionError, IndexError
    with pytest.raises(ValueError, match=r"tokens are int32\[8.*\]; needs integers \[rows, T \+ 1\]"):
        jp.make_train_step(named(name, layers=1, vocab=8).model, optax.sgd(0.1)).trace({"tokens": tokens})


def test_batches_of_our_models_are_checked() -> None:
    f, i = jnp.float32, jnp.int32
    for name, shapes, message in (
        ("llama-tiny", {"tokens": (f, 8, 9)}, r"tokens are float32\[8, 9\]"),
        ("llama-tiny", {"tokens": (i, 8, 9), "mask": (f, 8, 9)}, r"mask is \[8, 9\]; needs \[8, 8\]"),
        ("mlp-tiny", {"image": (f, 8, 784), "label": (i, 8)}, r"image is float32\[8, 784\]; needs"),
        (
            "mlp-tiny",
            {"image": (f, 8, 8, 8, 1), "label": (f, 8, 10)},
            r"label is float32\[8, 10\]; needs integers \[8\]",
        ),
    ):
        batch = {leaf: jax.ShapeDtypeStruct(shape, dtype) for leaf, (dtype, *shape) in shapes.items()}
        with pytest.raises(ValueError, match=message):
            jp.make_train_step(named(name).model, optax.sgd(0.1)).trace(batch)


@pytest.mark.parametrize("multiple", [0, -8, 4.0, True, "8"])
def test_rows_are_padded_to_a_count(multiple: Any) -> None:
    # ZeroDivisionError; batches cut to nothing.
    with pytest.raises(ValueError, match=r"multiple=.* is no whole number from 1; give one"):
        jp.pad_rows(BATCH, multiple)
