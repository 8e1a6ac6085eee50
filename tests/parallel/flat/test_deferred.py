"""The deferred form of BatchNorm: microbatches are normalised each by its own statistics, and change the running ones
as one update by all their rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxpar as jp

ROWS = 8
DRAW = np.random.default_rng(0)
BATCH = {"x": DRAW.normal(3, 2, size=(ROWS, 4, 6)).astype(np.float32), "y": DRAW.integers(5, size=ROWS)}


class Linen(nn.Module):
    """The first norm sees no other: its statistics do not depend on how rows are cut into microbatches."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> tuple[jax.Array, jax.Array]:
        first = x = nn.Dense(4)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = second = nn.Dense(7)(nn.relu(x))
        x = nn.BatchNorm(use_running_average=not train, momentum=0.99)(x)
        return nn.Dense(5)(nn.relu(x).mean(1)), (first, second)


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.last = nnx.Linear(6, 4, rngs=rngs), nnx.Linear(4, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, use_fast_variance=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.norm(self.first(x))).mean(1))


def cross(logits: jax.Array, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def linen() -> jp.Model:
    return jp.from_linen(Linen(), lambda apply, b: cross(apply(b["x"], train=apply.train)[0], b), BATCH)


def of_nnx() -> jp.Model:
    return jp.from_nnx(lambda rngs: Nnx(rngs), lambda net, b: cross(net(b["x"]), b))


def after_one_step(model: jp.Model, text: str, devices: int) -> tuple[Any, Any, Any]:
    """Statistics before and after, and the parameters, which one step of SGD has moved by the gradients."""
    rules = {"(Dense|BatchNorm)_0/.*": -1} if "tensor" in text else None
    step = jp.make_train_step(model, optax.sgd(1.0), text, mesh=jax.devices()[:devices], rules=rules)
    state = step.init(jax.random.key(0))
    before = jax.device_get(state.variables)
    state, _ = step(state, BATCH)
    return before, *jax.device_get((state.variables, step.params(state)))


def close(ours: Any, theirs: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "text", "devices"),
    [
        (linen, "pipe=2,microbatches=4,stages=cut", 2),
        pytest.param(of_nnx, "data=2,microbatches=4", 2, marks=pytest.mark.battery),
        pytest.param(
            of_nnx, "pipe=2,microbatches=4,stages=cut,schedule=zb-h1,remat=layer", 2, marks=pytest.mark.battery
        ),
        pytest.param(linen, "single,microbatches=4", 1, marks=pytest.mark.battery),
        pytest.param(linen, "pipe=2,fsdp=2,tensor=2,microbatches=2,stages=cut", 8, marks=pytest.mark.battery),
        pytest.param(linen, "dp,microbatches=4", 2, marks=pytest.mark.battery),
    ],
)
def test_statistics_are_those_of_the_whole_batch(make: Callable[[], jp.Model], text: str, devices: int) -> None:
    """Of the first norm those that one device has after an update by the whole batch; gradients as microbatches alone
    make them.
    """
    model = make()
    _, whole, _ = after_one_step(model, "single", 1)
    before, ours, params = after_one_step(model, f"{text},deferred_batch_norm=true", devices)
    name = "norm" if make is of_nnx else "BatchNorm_0"
    norm = lambda tree: tree[name] if make is of_nnx else tree["batch_stats"][name]
    close(norm(ours), norm(whole))
    _, others, plain = after_one_step(model, text, devices)
    close(params, plain)
    far = jax.tree.map(lambda a, b: np.abs(a - b).max(), norm(others), norm(whole))
    assert min(jax.tree.leaves(far)) > 1e-3  # one update a microbatch is another number
    assert (norm(before)["mean"] == 0).all()


@pytest.mark.battery
def test_a_norm_behind_a_norm_has_the_statistics_of_what_it_saw() -> None:
    """Which other norms have normalised microbatch by microbatch."""
    model, module = linen(), Linen()
    step = jp.make_train_step(model, optax.sgd(0.0), "single,microbatches=4,deferred_batch_norm=true")
    state = step.init(jax.random.key(0))
    variables = {"params": step.params(state), **state.variables}
    parts = [BATCH["x"][i : i + 2] for i in range(0, ROWS, 2)]
    seen = [module.apply(variables, x, train=True, mutable=["batch_stats"])[0][1][1] for x in parts]
    x = np.concatenate(seen).reshape(-1, 7)
    want = {"mean": 0.01 * x.mean(0), "var": 0.99 + 0.01 * x.var(0)}
    close(step(state, BATCH)[0].variables["batch_stats"]["BatchNorm_1"], want)


# -- where the norm stands ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        norm = nn.BatchNorm(use_running_average=not train, momentum=0.9)
        return x + nn.relu(norm(nn.Dense(6, use_bias=False)(x)))


class Blocks(nn.Module):
    """Three blocks alike, each with its norm: in a Python loop, in `nn.scan`, or in a loop of `nn.remat`."""

    way: str

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        if self.way == "scan":
            body = lambda block, x, _: (block(x, train), None)
            axes = {"params": 0, "batch_stats": 0}
            x, _ = nn.scan(body, variable_axes=axes, split_rngs={"params": True}, length=3)(Block(), x, None)
        else:
            block = nn.remat(Block, static_argnums=(2,)) if self.way == "checkpoint" else Block
            for _ in range(3):
                x = block()(x, train)
        return nn.Dense(5)(x.mean(1))


def blocks(way: str = "loop") -> jp.Model:
    return jp.from_linen(Blocks(way), lambda apply, b: cross(apply(b["x"], train=apply.train), b), BATCH)


def abreast() -> jp.Model:
    """Two modules side by side, each with its norm, by `nnx.vmap`."""

    def loss(nets: Any, batch: Any) -> jax.Array:
        return cross(nnx.vmap(lambda net, x: net(x), in_axes=(0, None))(nets, batch["x"]).mean(0), batch)

    return jp.from_nnx(lambda rngs: nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: Nnx(rngs)))(rngs), loss)


@pytest.mark.parametrize(
    ("make", "text", "devices"),
    [
        (abreast, "single,microbatches=4", 1),
        pytest.param(abreast, "pipe=2,microbatches=4,schedule=1f1b-halves,stages=cut", 2, marks=pytest.mark.battery),
        pytest.param(blocks, "single,microbatches=4,remat=layer", 1, marks=pytest.mark.battery),
        pytest.param(blocks, "pipe=2,microbatches=4,stages=cut,remat=layer", 2, marks=pytest.mark.battery),
        pytest.param(
            blocks, "pipe=2,microbatches=4,stages=cut,remat=twice,schedule=zb-h1", 2, marks=pytest.mark.battery
        ),
    ],
)
def test_statistics_of_several_norms(make: Callable[[], jp.Model], text: str, devices: int) -> None:
    """Beside those that each microbatch alone would make of the first ones: their means, and of the means' variance."""
    model, m = make(), 4
    params, first = model.create(jax.random.key(0))
    rows = [jax.tree.map(lambda x, at=at: x.reshape(m, -1, *x.shape[1:])[at], BATCH) for at in range(m)]
    of = jax.jit(lambda rows: model.call(params, first, rows, jax.random.key(1))[1])
    named = [dict(jax.tree_util.tree_leaves_with_path(jax.device_get(of(some)))) for some in rows]
    want = {path: np.mean([some[path] for some in named], 0) for path in named[0]}
    for path in want:
        if "var" in str(path):
            mean = next(one for one in want if str(one) == str(path).replace("var", "mean"))
            # Running means are 0.1 of what a microbatch has, and so is its share of the running variance.
            want[path] = want[path] + np.var([some[mean] for some in named], 0) / 0.1
    before, found, _ = after_one_step(model, f"{text},deferred_batch_norm=true", devices)
    found = dict(jax.tree_util.tree_leaves_with_path(found))
    assert {str(path) for path in found} == {str(path) for path in want}
    for path, x in want.items():
        np.testing.assert_allclose(found[path], x, rtol=1e-5, atol=1e-6)
    moved = [np.abs(a - b).max() for a, b in zip(jax.tree.leaves(before), found.values(), strict=True)]
    assert min(moved) > 1e-3


@pytest.mark.parametrize("way", ["scan", "checkpoint"])
def test_norms_in_loops_and_checkpoints_are_refused(way: str) -> None:
    with pytest.raises(ValueError, match=r"is not changed as .* outside of loops and jax.checkpoint.*leave the option"):
        traced(blocks(way))


# -- refusals ----------------------------------------------------------------------------------------------------------


def own(change: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]) -> jp.Model:
    """Running statistics that a plain function changes: of x, the old mean and the old variance."""

    def loss(params: Any, variables: Any, batch: Any, key: Any) -> Any:
        x = batch["x"].reshape(-1, 6) * params["w"]
        mean, var = change(x, variables["mean"], variables["var"])
        y = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)
        return (y**3).mean(), {"mean": mean, "var": var}

    init = lambda key: ({"w": jnp.ones(6)}, {"mean": jnp.zeros(6), "var": jnp.ones(6)})
    return jp.Model(init=init, loss=loss, stateful=True, rows="independent")


def mixed(old: jax.Array, new: jax.Array, keep: float = 0.9) -> jax.Array:
    return keep * old + (1 - keep) * new


def traced(model: jp.Model) -> Any:
    step = jp.make_train_step(model, optax.sgd(0.1), "single,microbatches=2,deferred_batch_norm=true")
    return step.traced(BATCH)


CHANGES: dict[str, tuple[Any, str]] = {
    "masked": (
        lambda x, m, v: (mixed(m, (x * (x > 0)).sum(0) / (x > 0).sum(0)), mixed(v, x.var(0))),
        "mean does not follow the mean of rows that count alike",
    ),
    "unbiased": (
        lambda x, m, v: (mixed(m, x.mean(0)), mixed(v, x.var(0, ddof=1))),
        "var does not follow the variance of rows .* divided by one less",
    ),
    "power": (
        lambda x, m, v: (mixed(m, x.mean(0)), mixed(v, (x**2).mean(0))),
        "var does not follow the variance",
    ),
    "twice": (
        lambda x, m, v: (mixed(mixed(m, x.mean(0)), (2 * x).mean(0)), mixed(v, x.var(0))),
        "mean is not changed as old . m . new",
    ),
    "renormed": (lambda x, m, v: (m + 0.1 * jnp.tanh(x.mean(0) - m), mixed(v, x.var(0))), "mean is not changed as"),
    "sometimes": (
        lambda x, m, v: jax.lax.cond(x.sum() > 0, lambda: (mixed(m, x.mean(0)), mixed(v, x.var(0))), lambda: (m, v)),
        "mean is not changed as old . m . new .* outside of loops",
    ),
    "momenta": (
        lambda x, m, v: (mixed(m, x.mean(0), 0.8), mixed(v, x.var(0))),
        "mean and var have different momenta, 0.8 and 0.9",
    ),
    "frozen": (lambda x, m, v: (m, v), "the loss changes no running statistics"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_updates_are_refused(name: str) -> None:
    change, message = CHANGES[name]
    with pytest.raises(ValueError, match=f"deferred_batch_norm=True: {message}.*leave"):
        traced(own(change))


def test_statistics_of_ones_own_and_models_without_any() -> None:
    """An update written in another way is the same one; a model that has nothing to defer is refused."""
    own_way = lambda x, m, v: (m + 0.1 * (x.mean(0) - m), v - 0.1 * (v - x.var(0)))
    model = own(own_way)
    _, whole, _ = after_one_step(model, "single", 1)
    close(after_one_step(model, "single,microbatches=4,deferred_batch_norm=true", 1)[1], whole)
    plain = jp.Model(init=lambda key: jnp.ones(6), loss=lambda w, batch, key: (batch["x"] * w).mean())
    with pytest.raises(
        ValueError, match=r"deferred_batch_norm=True: the model has no running statistics.*leave it out"
    ):
        traced(plain)
