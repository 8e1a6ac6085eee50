"""Parameters, variables and batches of unusual kinds: no dims, no elements, integers, None, nested containers."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxpar as jp


def init(key: jax.Array) -> Any:
    return {
        "temperature": jnp.float32(1.5),
        "no rows": jnp.zeros((0, 4)),
        "no columns": jnp.zeros((3, 0)),
        "none": None,
        "nested": (jnp.ones(1), [jnp.ones((1, 1))]),
        "frozen": flax.core.freeze({"w": jax.random.normal(key, (8, 8))}),
        "quantised": jnp.ones((8, 8), jnp.int8),
    }


def loss(params: Any, batch: jax.Array, key: jax.Array | None) -> jax.Array:
    weight = params["frozen"]["w"] * params["quantised"].astype(jnp.float32) * params["temperature"]
    (outer, (inner,)), empty = params["nested"], params["no rows"].sum() + params["no columns"].sum()
    return jnp.mean((batch @ weight * outer * inner[0] - batch) ** 2) + empty


@pytest.mark.parametrize("strategy", ["fsdp", "zero2,microbatches=2"])
def test_parameters_of_unusual_kinds(strategy: str) -> None:
    """A leaf without elements was sharded, and no part of it could be cut: "slice_sizes must be less than or equal to
    operand shape".
    """
    batch = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    assert jp.verify(jp.Model(init, loss), strategy, batch, steps=1, mesh=jax.devices()[:2]).ok


class Cached(nnx.Module):
    """With a cache that is made when it is needed, as many a decoder has it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out, self.cache = nnx.Linear(4, 1, rngs=rngs), nnx.Variable(None)


def test_a_variable_that_holds_nothing() -> None:
    """`nnx.Variable(None)` was "not enough values to unpack" in `from_nnx`. What a loss fills is named."""
    batch = {"x": np.ones((8, 4), np.float32)}
    model = jp.from_nnx(lambda rngs: Cached(rngs), lambda net, b: jnp.square(net.out(b["x"])).mean())
    step = jp.make_train_step(model, optax.sgd(0.1), "ddp")
    state, _ = step(step.init(jax.random.key(0)), batch)
    assert step.model(state).cache.get_value() is None

    def fills(net: Cached, b: Any) -> jax.Array:
        net.cache.set_value(net.out(b["x"]))
        return jnp.square(net.out(b["x"])).mean()

    step = jp.make_train_step(jp.from_nnx(lambda rngs: Cached(rngs), fills), optax.sgd(0.1), "ddp")
    with pytest.raises(ValueError, match=r"the loss changes cache from None to an array, .*; create it in the constr"):
        step(step.init(jax.random.key(0)), batch)


class Tabled(nnx.Module):
    """With a pair of tables in one variable, as of RoPE, and one that the loss changes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out, self.tables = nnx.Linear(4, 1, rngs=rngs), nnx.Variable((jnp.ones(4), jnp.zeros(1)))

    def __call__(self, x: jax.Array) -> jax.Array:
        scale, calls = self.tables[0], self.tables[1]
        self.tables.set_value((scale, calls + 1))
        return self.out(x * scale)


def test_a_variable_that_holds_several_arrays() -> None:
    """It was "too many values to unpack" in `from_nnx`."""
    model = jp.from_nnx(lambda rngs: Tabled(rngs), lambda net, b: jnp.square(net(b["x"])).mean())
    step = jp.make_train_step(model, optax.sgd(0.1), "ddp")
    state, _ = step(step.init(jax.random.key(0)), {"x": np.ones((8, 4), np.float32)})
    scale, calls = step.model(state).tables.get_value()
    assert (scale.shape, float(calls[0])) == ((4,), 1)


class Tensor:
    """A tensor of another library: an array to NumPy, and no array to JAX."""

    def __init__(self, x: np.ndarray) -> None:
        self.x, self.shape, self.dtype = x, x.shape, "float32 of another library"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.x


def test_tensors_of_other_libraries_are_batches() -> None:
    """A loop of one's own gave jax what its loader had given, a list of tensors, and jax refused it."""
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    model = jp.from_linen(nn.Dense(1), lambda apply, batch: jnp.square(apply(batch[0])).mean(), [Tensor(x)])
    step = jp.make_train_step(model, optax.sgd(0.1), "ddp")
    state = step.init(jax.random.key(0))
    losses = [float(step.evaluate(state, [kind(x)])["loss"]) for kind in (np.asarray, Tensor)]
    assert losses[0] == losses[1]
    # These two refused what the step took.
    assert step.explain([Tensor(x)]).json() == step.explain([x]).json()
    assert jp.verify(model, "ddp", [Tensor(x)], steps=1).ok


X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
_float = lambda x: x.astype("float32")
REFUSED = {  # a leaf that jax does not take, what is said, and what the advice makes of it
    "of other machines": (X.astype(">f4"), r">f4\[8, 4\]; its bytes .* x.astype\('float32'\)", _float),
    "integers of other machines": (X.astype(">i8"), r"x.astype\('int64'\)", lambda x: x.astype("int64")),
    "of 128 bits": (X.astype("longdouble"), r"no such numbers, .* x.astype\('float32'\)", _float),
    "objects": (X.astype(object), r"x.astype\('float32'\), or np.stack\(x\)", _float),
    "a memoryview": (memoryview(X), r"a memoryview; give it as .* np.asarray\(x\)", np.asarray),
    "masked": (np.ma.masked_array(X, X > 1), r"fill masked values, x.filled\(0\)", lambda x: x.filled(0)),
    "text": (X.astype("U4"), "keep text, dates and records out of the batch", None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_leaf_that_jax_does_not_take(name: str) -> None:
    """The error once advised np.asarray for `>f4`, which changes nothing.

    A later batch of the same shapes was not checked, and JAX raised a TypeError.
    """
    leaf, message, advised = REFUSED[name]
    step = jp.make_train_step(
        jp.Model(lambda key: {"w": jnp.ones(4)}, lambda p, b, key: (b["x"] * p["w"]).mean()), optax.sgd(0.1), "single"
    )
    state, _ = step(step.init(jax.random.key(0)), {"x": X})
    with pytest.raises(ValueError, match=f"batch leaf x is .*{message}"):
        step(state, {"x": leaf})
    if advised is not None:
        step(state, {"x": advised(leaf)})


def test_an_example_that_jax_does_not_take() -> None:
    """The error held all of its numbers."""
    with pytest.raises(ValueError, match=r"leaf x of from_linen\(example=\) is >f4\[8, 4\]; its bytes .*'\)$"):
        jp.from_linen(nn.Dense(1), lambda apply, b: apply(b["x"]).mean(), {"x": X.astype(">f4")}).create(
            jax.random.key(0)
        )


def test_a_linen_module_is_none_of_nnx() -> None:
    for make, verb in ((nn.Dense(1), "got"), (lambda rngs: nn.Dense(1), r"make\(rngs\) returned")):
        with pytest.raises(ValueError, match=rf"from_nnx:? {verb} a Linen module; use jp\.from_linen"):
            jp.from_nnx(make, lambda net, batch: 0.0)


class Table:
    def __init__(self, values: Any) -> None:
        self.values = values


def test_arrays_in_plain_objects_of_a_module() -> None:
    """NNX takes such an object for static; its array, made while the module was traced, outlived the trace."""

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs, random: bool) -> None:
            self.scale = nnx.Param(jnp.ones(4))
            self.table = Table(rngs.params.normal((4,)) if random else jnp.arange(4.0))

        def __call__(self, x: Any) -> Any:
            return x * self.scale * self.table.values

    loss = lambda net, batch: net(batch).mean()
    model = jp.from_nnx(lambda rngs: Net(rngs, False), loss)
    assert model.bind is not None
    net = model.bind(*model.create(jax.random.key(0)))
    np.testing.assert_array_equal(net(jnp.ones(4)), np.arange(4.0))
    with pytest.raises(ValueError, match="values of a Table is random"):
        jp.from_nnx(lambda rngs: Net(rngs, True), loss)


class RowByRow(nn.Module):
    @nn.compact
    def __call__(self, x_D: jax.Array) -> jax.Array:
        x_D = nn.BatchNorm(use_running_average=False, axis_name="rows")(nn.Dense(6)(x_D))
        return nn.Dense(1)(jnp.tanh(x_D))[0]


class Vmapped(nn.Module):
    """A module for one row, vmapped as S5's models are, after a norm over the axis of a `pmap` that does not run."""

    @nn.compact
    def __call__(self, x_BD: jax.Array) -> jax.Array:
        x_BD = nn.BatchNorm(use_running_average=False, axis_name="devices")(x_BD)
        over = {"params": None, "batch_stats": None}
        return nn.vmap(RowByRow, variable_axes=over, split_rngs={"params": False}, axis_name="rows")()(x_BD)


@pytest.mark.slow
def test_a_vmapped_batch_norm_is_over_all_rows() -> None:
    """Its own axis was replaced by that of the replicas: "vmap has mapped output but out_axes is None". With `tensor`,
    its mean kept the dim that it had before it lost one (IndexError).
    """

    def loss(apply: Any, batch: Any) -> jax.Array:
        return (batch["w"] * (apply(batch["x"]) - batch["y"]) ** 2).mean()

    random = np.random.default_rng(0)
    batch = {name: random.normal(size=size).astype("float32") for name, size in (("x", (8, 5)), ("y", 8), ("w", 8))}
    report = jp.verify(jp.from_linen(Vmapped(), loss, batch), "data=2,tensor=2", batch, steps=2, mesh=jax.devices()[:4])
    assert report.ok, report


@pytest.mark.parametrize("name", ["rows", "devices"])
def test_a_vmapped_batch_norm_of_nnx_is_over_all_rows(name: str) -> None:
    """Its own axis was replaced by that of the replicas, as Linen's was; one of a `pmap` failed on one device."""

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.inner, self.outer = nnx.Linear(5, 6, rngs=rngs), nnx.Linear(6, 1, rngs=rngs)
            self.norm = nnx.BatchNorm(6, use_running_average=False, axis_name=name, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.outer(jnp.tanh(self.norm(self.inner(x))))[..., 0]

    def loss(net: Net, batch: Any) -> jax.Array:
        apply = nnx.vmap(lambda net, x: net(x), in_axes=(None, 0), axis_name="rows") if name == "rows" else Net.__call__
        return (batch["w"] * (apply(net, batch["x"]) - batch["y"]) ** 2).mean()

    random = np.random.default_rng(0)
    batch = {name: random.normal(size=size).astype("float32") for name, size in (("x", (8, 5)), ("y", 8), ("w", 8))}
    report = jp.verify(jp.from_nnx(Net, loss), "data=2,tensor=2", batch, steps=2, mesh=jax.devices()[:4])
    assert report.ok, report


def test_an_error_inside_a_vmapped_linen_module_is_said() -> None:
    """Asking a Linen module for its place made it set itself up: "The scope None is no longer valid" hid the error."""

    class Cached(nn.Module):
        def setup(self) -> None:
            self.dense = nn.Dense(4)
            self.last = self.variable("cache", "last", jnp.zeros, (3,))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.dense(x + self.last.value)

    rows = nn.vmap(Cached, variable_axes={"params": None, "cache": 0}, split_rngs={"params": False})()
    batch = {"x": np.ones((8, 3), np.float32)}
    model = jp.from_linen(rows, lambda apply, batch: apply(batch["x"]).mean(), batch)
    step = jp.make_train_step(model, optax.sgd(0.1), "ddp", mesh=jax.devices()[:4])
    with pytest.raises(ValueError, match=r"cache/last \[8, 3\] has one value for each of the batch's 8 rows"):
        step.trace(batch)


def test_a_constructor_runs_once() -> None:
    """It ran in `from_nnx` and again in `make_train_step`: under a trace, 64 layers in a loop take 20 s each time."""
    eqx = pytest.importorskip("equinox", reason="Equinox is not installed: pip install equinox")
    calls: list[str] = []

    def make_nnx(rngs: nnx.Rngs) -> nnx.Module:
        calls.append("nnx")
        return nnx.Linear(4, 1, rngs=rngs)

    def make_equinox(key: jax.Array) -> Any:
        calls.append("equinox")
        return eqx.nn.Linear(4, 1, key=key)

    for model in (
        jp.from_nnx(make_nnx, lambda module, x: module(x).mean()),
        jp.from_equinox(make_equinox, lambda module, x, key: jax.vmap(module)(x).mean()),
    ):
        step = jp.make_train_step(model, optax.sgd(0.1), "fsdp", mesh=jax.devices()[:2])
        step(step.init(jax.random.key(1)), jnp.ones((4, 4)))
    assert calls == ["nnx", "equinox"]
