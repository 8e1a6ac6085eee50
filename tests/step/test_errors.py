"""Errors about bad input name the fault, the need and the next thing to try, before anything is compiled."""

import pickle
import re
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh

import jaxpar as jp
from jaxpar.data import images
from jaxpar.hardware.devices import target
from jaxpar.models.llama import from_hf
from jaxpar.parallel.pipeline.schedules import Schedule

X = np.ones((8, 2), np.float32)
KEY = jax.random.key(0)


def weights(key: jax.Array) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(key, (2, 2))}


def square(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
    return jnp.square(batch["x"] @ params["w"]).mean()


def build(strategy: Any = "ddp", *, init: Any = weights, loss: Any = square, **kwargs: Any) -> Any:
    model = kwargs.pop("model", None) or jp.Model(init=init, loss=loss)
    return jp.make_train_step(model, kwargs.pop("optimizer", optax.sgd(0.1)), strategy, **kwargs)


def train(batch: Any = None, **kwargs: Any) -> None:
    """Trace one step without compiling it: every error here comes before compilation."""
    build(**kwargs).trace({"x": X} if batch is None else batch)


def raises(call: Callable[[], Any], *parts: str, error: type[Exception] = ValueError) -> None:
    """Assert that an error holds these parts in order: the value given, the value needed, the next thing to try."""
    with pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, parts))):
        call()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ("strategy ''", "use one of single, dp, ddp", "name=value")),
        ("fsdp8", ("'fsdp8' is unknown", "did you mean 'fsdp=8'?")),
        ("zer3", ("'zer3' is unknown", "use one of", "did you mean 'zero3'?")),
        ("ddp,zero2", ("'zero2'", "use name=value", "did you mean 'zero'?")),
        ("precison=bf16", ("'precison=bf16'", "use name=value", "did you mean 'precision'?")),
        ("fsdp=", ("'fsdp='", "no value", "write fsdp=...")),
        ("fsdp=4,fsdp=8", ("'fsdp=8'", "'fsdp=4,fsdp=8'", "once")),
        ("fsdp=x", ("fsdp='x'", "whole number from 1, or -1")),
        ("fsdp=0", ("fsdp=0", "whole number from 1, or -1")),
        ("data=-1,fsdp=-1", ("data=-1 and fsdp=-1", "only one", "size the others")),
        ("zero=4", ("zero=4", "use 1, 2 or 3")),
        ("microbatches=0", ("microbatches=0", "whole number from 1")),
        ("precision=bf61", ("precision='bf61'", "use one of f32, bf16, f16", "did you mean 'bf16'?")),
        ("reduce=bf16", ("reduce='bf16'", "use one of f32, compute")),
        ("remat=layers", ("remat='layers'", "none, layer, dots, twice, auto or a jax.check", "did you mean 'layer'?")),
        ("server=1", ("server=1", "use True or False")),
        ("sequence=true", ("sequence=True", "give tensor= a size", "leave sequence out")),
        ("server=true,tensor=2", ("server=True with tensor=2", "use data=2 alone")),
        ("single=true,data=2", ("single=True with data=2", "leave one of the two out")),
    ],
)
def test_strategy_text(text: str, parts: tuple[str, ...]) -> None:
    raises(lambda: jp.Strategy.parse(text), *parts)


@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        (None, ("strategy=None", "jaxpar.Strategy nor text", "try 'fsdp'")),
        (
            "fsdp=3",
            (
                "fsdp=3 needs 3 devices and there are 8",
                "make pipe x data x fsdp x expert x context x tensor = 8",
                "-1",
                "a mesh of 3 devices",
            ),
        ),
        (
            "data=2,fsdp=2",
            ("data=2, fsdp=2 needs 4 devices and there are 8", "pipe x data x fsdp x expert x context x tensor = 8"),
        ),
        ("data=3,fsdp=-1", ("data=3 does not divide 8 devices", "use 1 or 2 or 4 or 8")),
    ],
)
def test_strategy_for_devices(strategy: Any, parts: tuple[str, ...]) -> None:
    raises(lambda: build(strategy), *parts)


def test_an_axis_of_minus_1_is_what_the_others_leave() -> None:
    sizes = lambda text, *of: {axis: n for axis, n in jp.Strategy.parse(text).sizes(*of).items() if n > 1}
    assert sizes("data=2,fsdp=-1,tensor=2", 16) == {"data": 2, "fsdp": 4, "tensor": 2}
    assert sizes("hsdp", 16, 4) == {"data": 4, "fsdp": 4}
    assert sizes("fsdp=-1", 1) == {}


def mesh_of(sizes: tuple[int, ...], axes: tuple[str, ...]) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(sizes), axes)


@pytest.mark.parametrize(
    ("strategy", "mesh", "parts"),
    [
        ("ddp", lambda: mesh_of((8,), ("x",)), ("mesh axes ('x',)", "['x']", "name them among ('pipe', 'data'")),
        ("hsdp", lambda: mesh_of((4, 2), ("fsdp", "data")), ("('fsdp', 'data')", "out of order", "('pipe', 'data'")),
        ("ddp", lambda: mesh_of((4, 2), ("data", "fsdp")), ("mesh has data=4", "the strategy data=8", "agree")),
        ("data=4", lambda: mesh_of((4, 2), ("data", "tensor")), ("data=4 needs 4 devices", "x tensor = 8")),
        ("single", lambda: mesh_of((8,), ("data",)), ("'single' takes one device", "has 8", "pass a mesh of one")),
        ("ddp", lambda: [], ("mesh=[]", "devices")),
        ("ddp", lambda: 4, ("mesh=4", "devices", "jax.devices()")),
        ("ddp", lambda: jax.devices()[:1] * 2, ("twice", "jax.devices()")),
    ],
)
def test_mesh(strategy: str, mesh: Callable[[], Any], parts: tuple[str, ...]) -> None:
    raises(lambda: build(strategy, mesh=mesh()), *parts)


def test_simulate() -> None:
    late = ("simulate(4) came too late", "8 cpu device(s)", "before the first array")
    raises(lambda: jp.simulate(4), *late, error=RuntimeError)
    raises(lambda: jp.simulate(0), "simulate(0)", "whole number from 1", "such as 8")
    jp.simulate(8)  # as many devices as exist already


def nothing(module: Any, batch: Any) -> float:
    return 0.0


def linear(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(2, 2, rngs=rngs)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (
            lambda: jp.from_nnx(linear(nnx.Rngs(0)), len),
            ("got a Linear", "a function", "lambda rngs: Linear(..., rngs=rngs)"),
        ),
        (lambda: jp.from_nnx(lambda rngs: {"a": linear(rngs)}, nothing), ("returned dict", "needs an nnx.Module")),
        (lambda: jp.from_nnx(linear, None), ("loss=None", "function")),
        (lambda: jp.from_linen(nn.Dense, len, example=X), ("Dense", "instance")),
        (lambda: jp.from_linen(nn.Dense(2), 3, example=X), ("loss=3", "loss(apply, batch)")),
        (lambda: jp.from_linen(linear(nnx.Rngs(0)), len, example=X), ("Linear", "flax.linen.Module instance")),
        (lambda: jp.Model(init=3, loss=square), ("init=3", "must be a function")),
        (
            lambda: build(model=linear),
            ("model is a function", "jp.from_equinox or jp.Model"),
        ),
        (
            lambda: build(optimizer=optax.sgd),
            ("optimizer is a function, sgd, that was not called", "optax.adamw(3e-4)"),
        ),
        (
            lambda: build(optimizer=nnx.Optimizer(linear(nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)),
            ("optimizer is a Optimizer", "such as optimizer.tx"),
        ),
        (lambda: build(strategy=optax.sgd(0.1)), ("strategy= is an optimizer", "(model, optimizer, strategy)")),
        (lambda: build(trainable="w"), ("trainable='w'", "function", "path")),
        (
            lambda: build(trainable=lambda path: "bias" in path),
            ("no trainable parameters", "(w)", "must be true for some path"),
        ),
        (lambda: build(init=lambda key: {"i": jnp.arange(2)}), ("no trainable parameters", "(i)", "floating-point")),
        (lambda: build(init=lambda key: weights(key) | {"k": key}), ("k is key<fry>", "Model(stateful=True)")),
        (lambda: build().model(None), ("pair of functions", "use step.params(state)")),
        (
            lambda: build(model=jp.from_linen(nn.Dense(2), lambda apply, batch: batch.mean(), example=X)),
            ("Dense created no parameters", "does the loss call apply(...)?"),
        ),
        (
            lambda: build(model=jp.Model(init=weights, loss=lambda p, v, b, k: (1.0, v), stateful=True)),
            ("init returned dict", "stateful=True", "(params, variables)"),
        ),
    ],
)
def test_model(make: Callable[[], Any], parts: tuple[str, ...]) -> None:
    raises(make, *parts)


@pytest.mark.parametrize(
    ("returns", "parts"),
    [
        (lambda y: y, ("the loss is float32[1, 2]", "scalar mean over rows", "try .mean()", "jp.Mean(total, count)")),
        (lambda y: None, ("the loss is None", "scalar mean over rows")),
        (lambda y: "low", ("the loss is", "str", "scalar mean over rows")),
        (lambda y: {"loss": y.mean()}, ("loss returned a dict of 1 (float32[])", "scalar mean over rows")),
        (lambda y: [y.mean(), {}], ("loss returned a list of 2 (float32[], dict)", "(value, {'name': other})")),
        # The error advised `.mean()`, which a tuple does not have.
        (lambda y: (y.mean(), 1, {}), ("returned a tuple of 3 (float32[], int, dict)", "(value, {'name': other})")),
        (lambda y: (y.mean(), y), ("returned a tuple of 2 (float32[], float32[1, 2])", "(value, {'name': other})")),
        (lambda y: 3, ("the loss is int32", "floating-point")),
        (lambda y: (y.mean(), [y.mean()]), ("a tuple of 2 (float32[], list)", "a dict of metrics by name")),
        (lambda y: (y.mean(), {"grad_norm": y.mean()}), ("named 'grad_norm'", "rename it")),
        (lambda y: (y.mean(), {7: y.mean()}), ("7", "str")),
        (lambda y: (y.mean(), {"a": y}), ("metric 'a' is float32[1, 2]", "scalar mean over rows", "try .mean()")),
        (lambda y: (y.mean(), {"a": {"b": y.mean()}}), ("metric 'a' is", "dict", "scalar mean over rows")),
        (lambda y: jp.Mean(y.sum(axis=1), 1), ("the loss is jp.Mean", "shape (1,)", "sum both parts")),
        (lambda y: jp.Mean(y.sum(), jnp.ones(3)), ("the loss is jp.Mean", "shape (3,)", "sum both parts")),
        (lambda y: jp.Mean(y.sum(), None), ("the loss is jp.Mean", "None", "sum")),
        (lambda y: jp.Mean(jnp.int32(3), 1), ("the loss is int32", "floating-point")),
        (
            lambda y: jp.Mean(y.sum(), (y > 0).sum()),
            ("count", "depends on the parameters", "count rows or tokens of the batch"),
        ),
    ],
)
def test_what_a_loss_returns(returns: Callable[[jax.Array], Any], parts: tuple[str, ...]) -> None:
    raises(lambda: train(loss=lambda params, batch, key: returns(batch["x"] @ params["w"])), *parts)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, labels: optax.softmax_cross_entropy_with_integer_labels(y, labels),
        lambda y, labels: y[jnp.arange(len(labels)), labels],
        lambda y, labels: jnp.take_along_axis(y, labels[:, None], 1),
        lambda y, labels: jax.vmap(jnp.take)(y, labels),
        lambda y, labels: jax.vmap(lambda y, i: jax.lax.dynamic_index_in_dim(y, i))(y, labels),
        lambda y, labels: y * nn.Embed(2, 2).apply({"params": {"embedding": jnp.eye(2)}}, labels),
    ],
)
def test_labels_that_are_no_integers(loss: Callable[[jax.Array, jax.Array], jax.Array]) -> None:
    """The raw TypeError of optax, jax or Flax names no leaf of the batch. The advice of the new error works."""
    of = lambda params, batch, key: loss(batch["x"] @ params["w"], batch["label"]).mean()
    labels = np.zeros(8, np.float32)
    raises(
        lambda: train({"x": X, "label": labels}, loss=of),
        "needs integers",
        "label float32[1], x float32[1, 2]",
        "labels.astype('int32')",
    )
    train({"x": X, "label": labels.astype("int32")}, loss=of)


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        (
            {"x": np.ones((12, 2))},
            ("12 rows", "8 replicas x 1 microbatches", "multiple of 8", "drop 4 rows", "jp.pad_rows(batch, 8)"),
        ),
        ({"x": X[:0]}, ("no rows", "multiple of 8 (8 replicas x 1 microbatches)")),
        ({"x": X[:3]}, ("3 rows", "multiple of 8", "jp.pad_rows(batch, 8)")),
        ({"x": X, "y": X[:4]}, ("x has 8, y has 4", "jp.Replicated")),
        ({"x": X, "scale": np.float32(2)}, ("batch leaf scale is a scalar", "jp.Replicated(...)")),
        ({"x": X, "scale": 2.0}, ("batch leaf scale is a float", "use arrays", "jp.Replicated(np.asarray(x))")),
        ({"x": [[1.0, 2.0]] * 8}, ("batch leaf x/0/0 is a float", "use arrays")),
        ({"x": X, "name": np.array(["a"] * 8)}, ("batch leaf name", "<U1", "numbers")),
        # jax's own errors about these name no leaf, or not its kind.
        ({"x": X, "when": np.arange(8).astype("datetime64[s]")}, ("batch leaf when is datetime64[s][8]", "astype")),
        (
            {"x": types.SimpleNamespace(shape=(8, 2), dtype=X.dtype)},
            ("batch leaf x is a SimpleNamespace", "np.asarray"),
        ),
        ({"x": types.SimpleNamespace(shape=(8, 2))}, ("batch leaf x is a SimpleNamespace", "np.asarray")),
        ({"x": X, "kind": jp.Replicated({"name": "a"})}, ("batch leaf kind/name is a str", "text")),
        ({}, ("no leaf with rows", "at least one array [rows, ...]")),
        ({"x": jp.Replicated(X)}, ("no leaf with rows", "at least one array [rows, ...]")),
    ],
)
def test_batch(batch: Any, parts: tuple[str, ...]) -> None:
    raises(lambda: train(batch), *parts)
    raises(lambda: build().compile(batch), *parts)


def test_batch_with_microbatches() -> None:
    raises(lambda: train(strategy="ddp,microbatches=2"), "8 rows", "8 replicas x 2 microbatches", "multiple of 16")
    raises(lambda: jp.verify(jp.Model(init=weights, loss=square), "ddp", {"x": X[:3]}), "3 rows", "multiple of 8")


@pytest.mark.parametrize(
    "key", [0, None, jax.random.PRNGKey(0), jax.random.split(KEY), nnx.Rngs(0)], ids=lambda k: type(k).__name__
)
def test_key(key: Any) -> None:
    kind = {int: "int", type(None): "NoneType", nnx.Rngs: "Rngs"}.get(type(key)) or f"{key.dtype}[2]"
    raises(lambda: build().init(key), "one key from jax.random.key(seed)", f"got {kind}")


def test_the_data_of_a_key() -> None:
    """A program that passes `PRNGKey`s has no seed from which to make a typed key."""
    step, data = build(), jax.random.PRNGKey(3)
    raises(lambda: step.init(data), "uint32[2]; make it one by jax.random.wrap_key_data(key)")
    params = step.params(step.init(jax.random.wrap_key_data(data)))
    expected = step.params(step.init(jax.random.key(3)))
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize(
    ("params", "parts"),
    [
        ({"v": X}, ("params= lacks w; it has v", "the model has w", "step.params(state)")),
        ([X], ("params= lacks w; it has 0", "the model has w", "step.params(state)")),
        ({}, ("params= lacks w", "step.params(state)", "fresh=lambda path")),
        ({"w": X}, ("w of shape (8, 2)", "the model needs (2, 2)")),
        ({"params": {"w": X}}, ("w of shape (8, 2)", "the model needs (2, 2)")),  # Linen's variables
        (
            {"params": {"w": X}, "batch_stats": {"m": X}},
            ("lacks w; it has batch_stats/m, params/w", "pass variables['params']"),
        ),
    ],
)
def test_params(params: Any, parts: tuple[str, ...]) -> None:
    raises(lambda: build().init(KEY, params=params), *parts)


def test_params_of_nnx() -> None:
    """Neither of two NNX states has a structure that is short enough to read, so the paths that differ are named."""
    step = build(model=jp.from_nnx(linear, nothing))
    params_without_bias = nnx.state(nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0)), nnx.Param)
    raises(lambda: step.init(KEY, params=params_without_bias), "params=", "bias", "step.params(state)")


def test_state() -> None:
    step = build("single")
    state = step.init(KEY)
    raises(lambda: step({"x": X}, state), "state is a dict", "step.init")
    raises(lambda: step.evaluate(step.params(state), {"x": X}), "state is a dict", "step.init")
    raises(lambda: step.with_params(step.params(state), {"w": X}), "pass what step.init")
    raises(lambda: step.with_params(state, {"v": X}), "params= lacks w", "step.params(state)")
    raises(lambda: step.with_params(state, {"w": X}), "w of shape (8, 2)")
    step(state, {"x": X})
    # With several devices jax itself would abort the process here.
    raises(lambda: step(state, {"x": X}), "donated", "state, metrics = step(state, batch)")
    raises(lambda: step.evaluate(state, {"x": X}), "donated", "state, metrics = step(state, batch)")


def test_remat_without_stack() -> None:
    raises(lambda: train(strategy="ddp,remat=layer"), "remat='layer'", "scan the layers", "or use remat='none'")
    # The error claimed that a model scans no layers if the shards divide none of its widths.
    init = lambda key: {"w": jax.random.normal(key, (4, 2, 2))}
    scanned = lambda wrap: (
        lambda params, batch, key: jnp.square(
            jax.lax.scan(wrap(lambda x, w: (jnp.tanh(x @ w), None)), batch["x"], params["w"])[0]
        ).mean()
    )
    parts = "remat='layer'", "the 4 shards of w have some of the layers each", "fsdp=2", "jax.checkpoint in the model"
    mesh, itself = jax.devices()[:4], lambda f: f
    raises(lambda: train(strategy="fsdp,remat=layer", init=init, loss=scanned(itself), mesh=mesh), *parts)
    train(strategy="fsdp=2,data=-1,remat=layer", init=init, loss=scanned(itself), mesh=mesh)
    train(strategy="fsdp", init=init, loss=scanned(jax.checkpoint), mesh=mesh)
    # With hpZ the error counted the shards of `fsdp` alone, and advised what was given.
    init, hpz = lambda key: {"w": jax.random.normal(key, (8, 2, 2))}, "fsdp=2,data=-1,remat=layer,hpz=true"
    parts = "the 8 shards of w have some of the layers each, since 8 divides", "fsdp=2 with data=-1 and without hpz"
    raises(lambda: train(strategy=hpz, init=init, loss=scanned(itself)), *parts)
    train(strategy="fsdp=2,data=-1,remat=layer", init=init, loss=scanned(itself))
    raises(lambda: train(strategy="ddp,remat=twice"), "remat='twice'", "backwards are whole", "remat='layer'", "zb-h1")


class Normed(nnx.Module):
    """A BatchNorm that jaxpar does not know: each replica would keep its own statistics."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(2))

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        y_BD = self.linear(x_BD)
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * y_BD.mean(axis=0)
        return y_BD - y_BD.mean(axis=0)


class Adding(nnx.Module):
    """Makes a variable when it is called."""

    def __init__(self, kind: type[nnx.Variable], *, rngs: nnx.Rngs) -> None:
        self.linear, self.kind = nnx.Linear(2, 2, rngs=rngs), kind

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        self.late = self.kind(jnp.zeros(2))
        return self.linear(x_BD) + self.late[...]


class Reshaping(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear, self.last = nnx.Linear(2, 2, rngs=rngs), nnx.Cache(jnp.zeros(2))

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        self.last.set_value(jnp.zeros(3))
        return self.linear(x_BD)


def sown(name: str) -> nn.Module:
    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x_BD: jax.Array) -> jax.Array:
            y_BD = nn.Dense(2)(x_BD)
            self.sow(name, "size", y_BD.mean())
            return y_BD

    return Sowing()


def output(module: Any, batch: Any) -> jax.Array:
    return jnp.square(module(batch["x"])).mean()


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (
            lambda: jp.from_nnx(lambda rngs: Normed(rngs=rngs), output),
            ("variable mean", "this replica's rows alone", "jp.all_rows(...)", "BatchNorm"),
        ),
        (
            lambda: jp.from_nnx(lambda rngs: Adding(nnx.BatchStat, rngs=rngs), output),
            ("adds late (BatchStat)", "create it in the constructor"),
        ),
        (
            lambda: jp.from_nnx(lambda rngs: Adding(nnx.Param, rngs=rngs), output),
            ("adds late (Param)", "create it in the constructor"),
        ),
        (
            lambda: jp.from_nnx(lambda rngs: Reshaping(rngs=rngs), output),
            ("variable last", "(2,) to (3,)", "keep it fixed"),
        ),
        (
            lambda: jp.from_linen(nn.Dense(2), lambda apply, b: apply(b["x"], mutable=True)[0].mean(), {"x": X}),
            ("apply(mutable=True): name the collections", "mutable=['intermediates']"),
        ),
        (lambda: jp.from_linen(sown("aux"), output, example={"x": X}), ("collection 'aux'", "sown", "mutable=['aux']")),
        (
            lambda: jp.Model(
                lambda key: (weights(key), {"n": jnp.zeros(())}),
                lambda p, v, b, k: (square(p, b, k), {}),
                stateful=True,
            ),
            ("structure of the variables", "{'n': *}", "{}"),
        ),
        (
            lambda: jp.Model(
                lambda key: (weights(key), {"n": jnp.zeros(())}), lambda p, v, b, k: square(p, b, k), stateful=True
            ),
            ("stateful", "(value, variables)"),
        ),
    ],
)
def test_variables(model: Callable[[], jp.Model], parts: tuple[str, ...]) -> None:
    raises(lambda: train(model=model()), *parts)


def test_the_advice_of_an_error_works() -> None:
    """A sown collection that the loss asks for was rejected with the advice to ask for it."""

    def loss(apply: Any, batch: Any) -> jax.Array:
        y_BD, collections = apply(batch["x"], mutable=["aux"])
        return jnp.square(y_BD).mean() + collections["aux"]["size"][0]

    train(model=jp.from_linen(sown("aux"), loss, example={"x": X}))
    train(
        loss=lambda params, batch, key: jnp.square(batch["x"] @ params["w"]).mean() * batch["scale"],
        batch={"x": X, "scale": jp.Replicated(2.0)},
    )


def test_errors_that_came_from_python_or_were_missing() -> None:
    raises(lambda: jp.Strategy("fsdp"), "Strategy('fsdp',)", "use Strategy.parse('fsdp')")
    raises(lambda: jp.Strategy(fdsp=2), "has no 'fdsp'", "did you mean 'fsdp'")
    raises(lambda: jp.Strategy.parse("FSDP"), "'FSDP' is unknown", "did you mean 'fsdp'")
    raises(lambda: build().init(KEY, params="weights.npz"), "params= is a str", "step.params(state)")
    raises(lambda: jp.from_linen(nn.Dense(2), lambda a, b: a(b), "x"), "example=", "is a str", "ShapeDtypeStruct")
    raises(lambda: jp.from_linen(nn.Dense(2), lambda a, b: a(b), iter([X])), "a list_iterator", "next(loader)")
    # Habits from module.apply. An attribute error of `apply` named `Apply`, a class that no user has seen.
    for call, parts in (
        (lambda apply, x: apply(x, rngs={"dropout": KEY}), ("apply(rngs=...): leave it out", "a key for each step")),
        (lambda apply, x: apply({"params": {}}, x), ("apply(variables, ...): leave them out, apply(x)",)),
    ):
        raises(lambda call=call: jp.from_linen(nn.Dense(2), call, X).create(KEY), *parts)
    with pytest.raises(AttributeError, match=r"apply has no 'training'.* has apply\.train"):
        jp.from_linen(nn.Dense(2), lambda apply, x: apply(x) * apply.training, X).create(KEY)
    for steps in (0, 1.5, True):
        raises(lambda steps=steps: jp.verify(jp.Model(weights, square), "ddp", {"x": X}, steps), "whole number from 1")
    raises(lambda: jp.plan("llama", {"x": X}, "8xH100"), "model is a str", "jp.from_nnx")
    raises(lambda: jp.plan(jp.Model(weights, square), {"x": X}, "8xH100", precision="f8"), "precision='f8' is unknown")
    raises(lambda: from_hf(None), "from_hf(None)", "a folder, or a state dict")
    raises(lambda: images.folder("/", size="8"), "size='8'", "whole number from 1")
    assert pickle.loads(pickle.dumps(jp.Strategy(fsdp=2))) == jp.Strategy(fsdp=2)


def test_numbers_beyond_reason() -> None:
    # Tables of schedules, devices and topologies of this size filled the memory before any error.
    raises(lambda: build("pipe=8,microbatches=1000000000"), "microbatches=1000000000 is not a count", "1 to 65,536")
    raises(lambda: build("pipe=8,chunks=1000000000"), "chunks=1000000000 is not a count", "1 to 65,536")
    raises(lambda: Schedule("1f1b", 8, 10**9), "microbatches=1000000000 is not a count", "1 to 65,536")
    raises(lambda: Schedule("1f1b", 2**12, 2**12), "makes 16,777,216 cells", "for 4,194,304 cells at most")
    raises(lambda: jp.simulate(10**9), "simulate(1000000000)", "at most 4,096")
    for name, num_devices in (("1000000000xH100", "1,000,000,000"), ("40000x8xH100", "320,000")):
        raises(lambda name=name: target(name), f"target={name!r} has {num_devices} devices", "at most 131,072")
    raises(lambda: target("1" * 5000 + "xH100"), "a number of 5000 digits", "at most 131,072 devices")


def test_a_module_of_another_dtype_than_the_precision_is_told_so() -> None:
    """big_vision's scanned encoder computes in float32: "carry input and carry output must have equal types" alone."""

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        layer = lambda x, w: (x.astype(jnp.float32) @ w.astype(jnp.float32), None)
        return jax.lax.scan(layer, batch["x"].astype(params["w"].dtype), params["w"])[0].mean()

    init = lambda key: {"w": jnp.ones((3, 2, 2))}
    with pytest.raises(TypeError, match="carry") as error:
        build("ddp,precision=bf16", init=init, loss=loss).traced({"x": X})
    assert any("gives the loss its parameters in bfloat16" in note for note in error.value.__notes__)


def test_a_loss_whose_groups_of_rows_blocks_cut() -> None:
    """GRPO's advantages, `reshape(-1, 4)`: jax's error about a reshape of (2,) names no batch."""

    def grouped(params: Any, batch: Any, key: Any) -> jax.Array:
        groups = jnp.square(batch["x"] @ params["w"]).sum(-1).reshape(-1, 4)
        return jnp.square(groups.max(1)).sum() / groups.shape[0]

    parts = "takes the batch's 24 rows, but not the 3 of one of its 8 blocks", "(-1, 4)", "make each group one row"
    rows = lambda n: {"x": np.ones((n, 2), np.float32)}
    model = jp.Model(weights, grouped, rows="independent")
    raises(lambda: build(model=model).traced(rows(24)), *parts, "32 rows, or use fewer blocks")
    build(model=model).traced(rows(32))
    build("data=2,fsdp=1", model=model, mesh=jax.devices()[:2]).traced(rows(24))
    with pytest.raises(TypeError, match="reshape"):  # an error that no batch avoids stays jax's own
        build(loss=lambda p, batch, key: square(p, batch, key) + batch["x"].reshape(3, 5, 7).sum()).traced(rows(24))


class Recurrent(nnx.Module):
    """A recurrent network; if `stateful`, it stores its output for each row from batch to batch."""

    def __init__(self, stateful: bool, rngs: nnx.Rngs) -> None:
        self.inner, self.outer = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        if stateful:
            self.seen = nnx.BatchStat(jnp.zeros((8, 8)))

    def next(self, x: jax.Array, seen: jax.Array) -> jax.Array:
        return jnp.tanh(self.inner(x) + self.outer(seen))


@pytest.mark.slow
def test_a_variable_with_a_value_for_each_row() -> None:
    """The error took the carry of a stateful RNN for a group of rows, and its advice did not help."""
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)

    def loss_of_stateful(net: Recurrent, batch: Any) -> jax.Array:
        y = net.next(batch["x"], net.seen[...])
        net.seen[...] = jax.lax.stop_gradient(y)
        return jnp.square(y - 1).mean()

    def loss_with_carry(net: Recurrent, batch: Any) -> jax.Array:
        return jnp.square(net.next(batch["x"], batch["seen"]) - 1).mean()

    stateful_model = jp.from_nnx(lambda rngs: Recurrent(True, rngs), loss_of_stateful)
    parts = "variable seen [8, 8]", "each of the batch's 8 rows, and a block has 4", "in the batch", "step.model"
    make = lambda model, strategy: jp.make_train_step(model, optax.sgd(0.1), strategy, mesh=jax.devices()[:2])
    raises(lambda: make(stateful_model, "ddp").trace({"x": x}), *parts)

    single = make(stateful_model, "single")
    ddp = make(jp.from_nnx(lambda rngs: Recurrent(False, rngs), loss_with_carry), "ddp")
    single_state, ddp_state, seen = single.init(KEY), ddp.init(KEY), np.zeros((8, 8), np.float32)
    for _ in range(2):
        next_seen = np.asarray(ddp.model(ddp_state).next(x, seen))
        single_state, _ = single(single_state, {"x": x})
        ddp_state, _ = ddp(ddp_state, {"x": x, "seen": seen})
        seen = next_seen
    params = jax.tree.leaves(single.params(single_state)), jax.tree.leaves(ddp.params(ddp_state))
    for a, b in zip(*params, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_optimizers_that_a_trace_cannot_run() -> None:
    """`optax.inject_hyperparams(optax.adafactor)` ended in JAX's TracerBoolConversionError, of no optimizer."""
    injected = optax.inject_hyperparams(optax.adafactor)
    parts = "optimizer.init asks for the value of an array", "static_args="
    raises(lambda: build(optimizer=injected(0.1)), *parts)
    raises(lambda: build(optimizer=optax.inject_hyperparams(optax.lbfgs)(0.1)), *parts)
    static = optax.inject_hyperparams(optax.adafactor, static_args=("min_dim_size_to_factor",))
    build(optimizer=static(0.1))

    def step_of(choice: Callable[[Any, Any], Any]) -> Any:
        update = lambda updates, state, params=None: (choice(optax.tree.norm(updates) < 1, updates), state)
        return build("single", optimizer=optax.GradientTransformation(lambda params: optax.EmptyState(), update))

    parts = "optimizer.update asks for the value", "test_errors.py", "jnp.where in place of if"
    raises(lambda: step_of(lambda small, x: x if small else {"w": 0 * x["w"]}).compile({"x": X}), *parts)
    step_of(lambda small, x: {"w": jnp.where(small, x["w"], 0)}).compile({"x": X})


def test_masks_that_are_built_from_a_module() -> None:
    """Masks and labels may be trees of a module, which optax accepts for parameters in that module.

    They raised JAX's "pytree structure error: different types", and a function that reads an attribute of the
    parameters raised AttributeError.
    """
    model = jp.from_nnx(lambda rngs: Recurrent(False, rngs), lambda net, batch: net.inner(batch["x"]).mean())
    make = lambda mask: jp.make_train_step(model, optax.adamw(0.1, mask=mask), "ddp", mesh=jax.devices()[:2])
    state = nnx.state(nnx.eval_shape(lambda: Recurrent(False, nnx.Rngs(0))), nnx.Param)
    sees, makes = (
        "optimizer.init sees the parameters as a dict of inner/bias, inner/kernel, outer/bias, ...",
        "by a func",
    )
    raises(lambda: make(jax.tree.map(lambda p: p.ndim > 1, state)), sees, "of another structure", makes)
    raises(lambda: make(lambda params: {"inner": params.inner}), sees, "asks for .inner of the parameters", makes)
    make(lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
    make(lambda params: jax.tree_util.tree_map_with_path(lambda path, p: "bias" not in str(path), params))
