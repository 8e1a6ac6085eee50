"""Writes of a module to its own parameters in the forward pass were dropped, even on the one device of `verify`."""

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxpar as jp
from jaxpar.step import tracing

BATCH = {"x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)}


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.last = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def write(self, x: jax.Array) -> None:
        pass

    def __call__(self, x: jax.Array) -> jax.Array:
        self.write(x)
        return self.last(jnp.tanh(self.first(x)))


class Spectral(Net):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.first = nnx.SpectralNorm(self.first, rngs=rngs)


class Weight(Net):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.first = nnx.WeightNorm(self.first, rngs=rngs)


class Clipped(Net):
    def write(self, x: jax.Array) -> None:
        self.first.kernel[...] = jnp.clip(self.first.kernel[...], -0.2, 0.2)


class Moved(Net):
    """One parameter takes the value of another."""

    def write(self, x: jax.Array) -> None:
        self.first.bias[...] = self.last.kernel[:, 0]


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.SpectralNorm(nnx.Linear(8, 8, rngs=rngs), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.inner(x))


class Scanned(nnx.Module):
    """The layers of a scan write, and are rematerialised."""

    def __init__(self, rngs: nnx.Rngs):
        make = nnx.split_rngs(splits=2)(nnx.vmap(Layer, in_axes=(0,), out_axes=0))
        self.layers, self.last = make(rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer: Layer, x: jax.Array) -> jax.Array:
            return nnx.remat(lambda layer, x: layer(x))(layer, x)

        return self.last(run(self.layers, x))


def loss(net: Any, batch: Any) -> jax.Array:
    return jnp.square(net(batch["x"]) - batch["x"]).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        (Spectral, "tensor=2,fsdp=4"),
        (Weight, "zero1"),
        (Clipped, "fsdp"),
        (Moved, "ddp"),
        (Scanned, "fsdp"),
    ],
)
def test_a_step_trains_as_a_plain_flax_loop_does(kind: type[Any], strategy: str) -> None:
    step = jp.make_train_step(jp.from_nnx(lambda rngs: kind(rngs), loss), optax.sgd(0.1, momentum=0.9), strategy)
    state = step.init(jax.random.key(0))
    net = nnx.clone(step.model(state))
    plain = nnx.Optimizer(net, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    gradients = nnx.jit(nnx.value_and_grad(loss))
    for _ in range(3):
        value, grads = gradients(net, BATCH)
        plain.update(net, grads)
        state, metrics = step(state, BATCH)
        assert metrics["loss"] == pytest.approx(float(value), rel=1e-5)
    expected = nnx.state(net, nnx.Param)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), step.params(state), expected)


class Clipping(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.normal(1.0), (8, 8))
        self.put_variable("params", "kernel", jnp.clip(kernel, -0.5, 0.5))
        return x @ self.get_variable("params", "kernel")


def _function(params: Any, variables: Any, batch: Any, key: Any) -> Any:
    new_params = {"w": jnp.clip(params["w"], -0.5, 0.5)}
    return jnp.square(batch["x"] @ new_params["w"] - batch["x"]).mean(), variables, new_params


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        jp.from_linen(Clipping(), lambda apply, b: jnp.square(apply(b["x"], mutable=["params"])[0]).mean(), BATCH),
        jp.Model(lambda key: ({"w": jax.random.normal(key, (8, 8))}, {}), _function, stateful=True),
    ],
)
def test_linen_modules_and_functions_write_too(model: jp.Model) -> None:
    step = jp.make_train_step(model, optax.sgd(0.0), "ddp")
    state, _ = step(step.init(jax.random.key(0)), BATCH)
    assert np.abs(jax.tree.leaves(step.params(state))[0]).max() == 0.5
    assert jp.verify(model, "fsdp", BATCH).ok


@pytest.mark.slow
def test_verify_notices_a_step_that_drops_the_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference on one device keeps the writes of the user's loss, whatever the step does."""
    monkeypatch.setattr(tracing, "find_writes", lambda *args: None)
    report = jp.verify(jp.from_nnx(lambda rngs: Clipped(rngs), loss), "ddp", BATCH, steps=2, equation=False)
    assert not report.ok
    assert report.worst.path == "first/kernel"


class OfRows(Net):
    def write(self, x: jax.Array) -> None:
        self.first.bias[...] = jp.all_rows(x @ self.first.kernel[...]).mean(0)


class Codebook(nnx.Variable[jax.Array]):
    pass


class OfRowsKept(OfRows):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.first.bias = Codebook(jnp.zeros(16))


class Large(Clipped):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.last = nnx.Linear(8, 4096, rngs=rngs), nnx.Linear(4096, 8, rngs=rngs)


@pytest.mark.parametrize(
    ("kind", "strategy", "trainable", "parts"),
    [
        (OfRows, "ddp", None, ("first/bias", "test_writes.py", "jp.all_rows(x @", "nnx.Variable of your own class")),
        (
            Clipped,
            "ddp,microbatches=2",
            None,
            ("first/kernel", "jnp.clip(", "2 microbatches", "leave microbatches out"),
        ),
        (Clipped, "ddp", lambda path: "last" in path, ("first/kernel", "trainable= freezes", "trainable= choose it")),
        (Large, "ddp,offload=optimizer", None, ("first/kernel", "leave optimizer out of offload")),
    ],
)
def test_writes_that_a_step_cannot_keep_are_refused(kind: Any, strategy: str, trainable: Any, parts: Any) -> None:
    model, optimizer = jp.from_nnx(lambda rngs: kind(rngs), loss), optax.sgd(0.1, momentum=0.9)
    step = jp.make_train_step(model, optimizer, strategy, **({"trainable": trainable} if trainable else {}))
    with pytest.raises(ValueError, match="the loss writes to the parameter") as error:
        step.traced(BATCH)
    assert [part for part in parts if part not in str(error.value)] == []


@pytest.mark.slow
def test_the_advice_about_rows_can_be_followed() -> None:
    assert jp.verify(jp.from_nnx(lambda rngs: OfRowsKept(rngs), loss), "ddp", BATCH).ok


class Rematerialised(Net):
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.remat(lambda layer, x: layer(x))(self.first, x))


def test_parameters_that_only_pass_through_are_not_written() -> None:
    """Flax returns every parameter of a rematerialised layer, as another value."""
    step = jp.make_train_step(
        jp.from_nnx(lambda rngs: Rematerialised(rngs), loss), optax.sgd(0.1), "ddp,microbatches=2"
    )
    notes = step.traced(BATCH).notes
    assert notes.touched
    assert not notes.writes


class Counting(Net):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.steps = 0

    def write(self, x: jax.Array) -> None:
        self.steps += 1


class Counted(Net):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.steps = nnx.Variable(jnp.zeros(()))

    def write(self, x: jax.Array) -> None:
        self.steps[...] += 1


def test_a_plain_number_that_the_loss_changes_is_warned_of() -> None:
    step = jp.make_train_step(jp.from_nnx(lambda rngs: Counting(rngs), loss), optax.sgd(0.1), "single")
    with pytest.warns(UserWarning, match=r"changes steps, a plain Python attribute, from 0 to 1; .*nnx.Variable\("):
        step.traced(BATCH)
    step = jp.make_train_step(jp.from_nnx(lambda rngs: Counted(rngs), loss), optax.sgd(0.1), "single")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = step(step.init(jax.random.key(0)), BATCH)
    assert float(jax.tree.leaves(state.variables)[0]) == 1


class Moded(Net):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def write(self, x: jax.Array) -> None:
        self.train()


def test_a_mode_belongs_into_the_function_that_makes_the_module() -> None:
    """The advice was a variable, which does not fit a module's mode."""

    def make(rngs: nnx.Rngs, trains: bool) -> Moded:
        net = Moded(rngs)
        net.train() if trains else net.eval()
        return net

    step = jp.make_train_step(jp.from_nnx(lambda rngs: make(rngs, False), loss), optax.sgd(0.1), "single")
    with pytest.warns(
        UserWarning, match="drop/deterministic, .* from True to False; .*; call train[(][)] in the function"
    ):
        step.traced(BATCH)
    step = jp.make_train_step(jp.from_nnx(lambda rngs: make(rngs, True), loss), optax.sgd(0.1), "single")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.traced(BATCH)


def test_a_write_is_placed_in_a_file_whose_path_has_spaces(tmp_path: Path) -> None:
    """Reading its line ended in `not enough values to unpack`."""
    (tmp_path / "my models").mkdir()
    path = tmp_path / "my models" / "clip.py"
    path.write_text("import jax.numpy as jnp\ndef clip(x): return jnp.clip(x, -0.1, 0.1)\n")
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)

    class Spaced(Net):
        def write(self, x: jax.Array) -> None:
            self.first.kernel[...] = names["clip"](self.first.kernel[...])

    step = jp.make_train_step(jp.from_nnx(lambda rngs: Spaced(rngs), loss), optax.sgd(0.1), "ddp,microbatches=2")
    with pytest.raises(ValueError, match=r"my models/clip.py:2.*`def clip"):
        step.traced(BATCH)


def test_a_variable_may_become_a_plain_number() -> None:
    """It ended in `'float' object has no attribute 'dtype'`."""
    model = jp.Model(
        init=lambda key: ({"w": jnp.ones((8, 8))}, {"n": jnp.zeros(())}),
        loss=lambda params, variables, batch, key: (jnp.square(batch["x"] @ params["w"]).mean(), {"n": 1.5}),
        stateful=True,
    )
    step = jp.make_train_step(model, optax.sgd(0.1), "ddp")
    state, _ = step(step.init(jax.random.key(0)), BATCH)
    assert float(state.variables["n"]) == 1.5
