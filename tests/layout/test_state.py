"""Tests of the state of a run: initial values, freezing, evaluation, donation, streams, statistics and bytes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec

import jaxpar as jp
from jaxpar.layout.precision import LossScale, Policy
from jaxpar.step.blocks import block_key

KEY = jax.random.key(0)
ROWS = 16
X = np.random.default_rng(0).normal(size=(ROWS, 16)).astype(np.float32)
BATCH = {"x": X}
POISON = {"x": np.where(np.arange(ROWS)[:, None] == ROWS - 1, np.nan, X).astype(np.float32)}
SGD = optax.sgd(0.1, momentum=0.9)


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Return a leaf that divides, one that is padded (131 x 131 >= 16,384), and one that is too small for either."""
    keys = jax.random.split(key, 3)
    shapes = {"w": (16, 16), "odd": (131, 131), "small": (3,)}
    return {name: 0.3 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def loss(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
    y = jnp.tanh(batch["x"].astype(params["w"].dtype) @ params["w"])
    return sum(jnp.square(x.astype(jnp.float32)).mean() for x in (y, params["odd"], params["small"] - 1))


MODEL = jp.Model(init=init, loss=loss)


def make(strategy: str, model: jp.Model = MODEL, optimizer: Any = SGD, **kwargs: Any) -> Any:
    return jp.make_train_step(model, optimizer, strategy, **kwargs)


def equal(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


def same(a: Any, b: Any, tolerance: float = 1e-6) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def alive(tree: Any) -> list[bool]:
    return [not x.is_deleted() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp", "zero2", "zero3"])
def test_state_life(strategy: str) -> None:
    """Initial values equal those of one device bit by bit; states are donated; parameters passed to `init` are not."""
    step = make(strategy)
    state = step.init(KEY)
    params = step.params(state)
    assert equal(params, jax.jit(init)(KEY))
    assert [x.shape for x in jax.tree.leaves(params)] == [(131, 131), (3,), (16, 16)]

    restarted = step.init(jax.random.key(1), params=params)
    assert equal(step.params(restarted), params)
    trained, _ = step(restarted, BATCH)
    assert all(alive(params))
    if strategy != "dp":  # its update runs in a separate program
        assert not any(alive(restarted.params))
    expected = jax.device_get((trained.step, trained.params, trained.optimizer))
    metrics = step.evaluate(trained, BATCH)
    assert equal((trained.step, trained.params, trained.optimizer), expected)
    assert metrics["loss"] == pytest.approx(float(loss(step.params(trained), BATCH, None)), rel=1e-6)


def test_start_from_nnx_state() -> None:
    model = jp.from_nnx(
        lambda rngs: nnx.Linear(16, 16, rngs=rngs), lambda module, batch: jnp.square(module(batch["x"])).mean()
    )
    params = nnx.state(nnx.Linear(16, 16, rngs=nnx.Rngs(7)), nnx.Param)
    step = make("zero3", model)
    state = step.init(KEY, params=params)
    assert isinstance(step.params(state), nnx.State)
    assert equal(step.params(state), params)
    step(state, BATCH)
    assert all(alive(params))
    # Another layout starts from the parameters that a step has returned.
    assert equal(make("ddp", model).init(KEY, params=step.params(step.init(KEY, params=params))).params, params)


def test_frozen() -> None:
    """Frozen parameters do not change, and have no gradient and no optimizer state; trained ones change."""
    step = make("zero3", optimizer=optax.adamw(0.1, weight_decay=0.1), trainable=lambda path: path == "w")
    state = step.init(KEY)
    moments = [x.size for x in jax.tree.leaves(state.optimizer) if x.ndim]
    assert moments == [256, 256]
    _, grads = step.value_and_grad(state, BATCH)
    assert (grads["odd"], grads["small"]) == (None, None)
    same(grads["w"], jax.grad(loss)(init(KEY), BATCH, None)["w"])
    initial_params = jax.device_get(step.params(state))
    for _ in range(2):
        state, _ = step(state, BATCH)
    params = step.params(state)
    assert equal((initial_params["odd"], initial_params["small"]), (params["odd"], params["small"]))
    assert not equal(initial_params["w"], params["w"])
    assert step.layout.bytes["grads"] == 256 * 4 // 8


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "dp"])
def test_frozen_leaves_have_no_float32_master(strategy: str) -> None:
    """Under bf16, LoRA stored a base of 70 billion parameters in 280 GB of float32, of which the loss read 140 GB."""
    trainable = lambda path: path == "w"
    step = make(f"{strategy},precision=bf16", trainable=trainable)
    state = step.init(KEY)
    dtypes = {path: x.dtype.name for path, x in step.params(state).items()}
    assert dtypes == {"odd": "bfloat16", "small": "bfloat16", "w": "float32"}
    full = make(f"{strategy},precision=bf16")
    saved = full.layout.bytes["params"] - step.layout.bytes["params"]
    parts = 8 if step.layout.copied or strategy == "zero3" else 1  # `odd` is padded to 136 rows where it is sharded
    assert saved == 2 * ((136 * 131 // 8 if parts == 8 else 131 * 131) + 3)
    # Trained leaves change as they do with float32 masters of all leaves, because the loss reads bfloat16 in both.
    initial_params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), init(KEY))
    state, full_state = step.init(KEY, params=initial_params), full.init(KEY, params=initial_params)
    for _ in range(2):
        value, grads = step.value_and_grad(state, BATCH)
        full_value, full_grads = full.value_and_grad(full_state, BATCH)
        assert equal((value, grads["w"]), (full_value, full_grads["w"]))
        state, metrics = step(state, BATCH)
        full_state = full.init(KEY, params={**initial_params, "w": step.params(state)["w"]})
    assert metrics["finite"]
    assert equal(step.params(state)["odd"], initial_params["odd"])


class Noisy(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear, self.dropout = nnx.Linear(16, 16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.linear(x))


def squared(module: Any, batch: Any) -> jax.Array:
    return jnp.square(module(batch["x"])).mean()


NOISY = jp.from_nnx(lambda rngs: Noisy(rngs=rngs), squared)


def test_blocks_are_numbered_over_replicas_and_their_microbatches() -> None:
    step = make("data=4,microbatches=2", mesh=jax.devices()[:4])
    keys = lambda key: jax.random.key_data(step.local.keys(key, jnp.int32(3)))
    run = jax.shard_map(
        keys, mesh=step.mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec("data"), check_vma=False
    )
    blocks = [jax.random.key_data(block_key(KEY, 3, block)) for block in range(8)]
    np.testing.assert_array_equal(jax.jit(run)(KEY), blocks)


def test_module() -> None:
    """`step.model` returns the user's module with the state's parameters; it stays alive when the state is donated.

    An evaluation draws no masks, and a step does.
    """
    expected = Noisy(rngs=nnx.Rngs(0))
    step = make("zero3", NOISY)
    state = step.init(KEY)
    module = step.model(state)
    nnx.update(expected, step.params(state))
    module.eval()
    expected.eval()
    same(module(X), expected(X))
    evaluated = float(step.evaluate(state, BATCH)["loss"])
    assert evaluated == pytest.approx(float(squared(module, BATCH)), rel=1e-6)
    _, metrics = step(state, BATCH)
    assert metrics["loss"] != pytest.approx(evaluated, rel=1e-3)
    assert all(alive(nnx.state(module)))

    linen = nn.Dense(16)
    step = make("zero3", jp.from_linen(linen, lambda apply, batch: jnp.square(apply(batch["x"])).mean(), example=BATCH))
    state = step.init(KEY)
    same(step.model(state)(X), linen.apply({"params": step.params(state)}, X))


class Normed(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear, self.norm = nnx.Linear(16, 16, rngs=rngs), nnx.BatchNorm(16, momentum=0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.linear(x))


def test_batch_norm() -> None:
    """Running statistics equal those of one device, for rows of different size too; `evaluate` does not change them."""
    batch = {"x": X * np.arange(ROWS, dtype=np.float32)[:, None]}
    model = jp.from_nnx(lambda rngs: Normed(rngs=rngs), lambda m, b: jnp.square(m(b["x"]) - b["x"]).mean())
    statistics = {}
    for strategy in ("single", "zero3"):
        step = make(strategy, model, optax.sgd(1e-3))
        state = step.init(KEY)
        for _ in range(2):
            state, _ = step(state, batch)
        statistics[strategy] = jax.device_get(state.variables["norm"])
        step.evaluate(state, batch)
        assert equal(state.variables["norm"], statistics[strategy])
    assert np.abs(statistics["single"]["mean"]).max() > 0.1
    same(statistics["zero3"], statistics["single"], 1e-5)


def contrast(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
    """A contrastive loss compares every row with the rows of all replicas."""
    all_targets, all_ids = jp.all_rows(batch["x"][:, ::-1] @ params["w"]), jp.all_rows(batch["id"])
    scores = jax.nn.log_softmax(batch["x"] @ params["w"] @ all_targets.T)
    return -jnp.where(batch["id"][:, None] == all_ids, scores, 0).sum(axis=1).mean()


def masked(params: Any, batch: Any, key: jax.Array | None) -> jp.Mean:
    """Gradients of a loss with a random mask were divided by the count of another key's mask."""
    mask = jnp.ones(batch["x"].shape[:1]) if key is None else jax.random.uniform(key, batch["x"].shape[:1])
    return jp.Mean((jnp.square(batch["x"] @ params["w"]).mean(axis=1) * mask).sum(), mask.sum())


@pytest.mark.filterwarnings("ignore:jp.all_rows returns the rows of one microbatch")
@pytest.mark.filterwarnings("ignore:the loss does not read batch")
@pytest.mark.parametrize(
    ("loss", "strategy"),
    [(contrast, "ddp"), (contrast, "zero3,microbatches=2"), (masked, "zero3"), (masked, "ddp,microbatches=2")],
)
def test_rows_of_all_replicas_and_counts_that_are_drawn(loss: Any, strategy: str) -> None:
    report = jp.verify(jp.Model(init=init, loss=loss), strategy, {"x": X, "id": np.arange(ROWS)}, steps=1)
    assert report.ok, report


@pytest.mark.parametrize("strategy", ["ddp", "zero3,microbatches=2"])
def test_metrics_and_replicated_leaves(strategy: str) -> None:
    """Metrics are means over all rows, also with weights that differ; leaves without rows reach every device."""
    weights = np.arange(ROWS, dtype=np.float32)

    def weighted(params: Any, batch: Any, key: jax.Array | None) -> Any:
        y = jnp.square(batch["x"] @ params["w"]).mean(axis=1) * batch["scale"]["by"]
        metrics = {"plain": y.mean(), "weighted": jp.Mean((y * batch["weight"]).sum(), batch["weight"].sum())}
        return jp.Mean((y * batch["weight"]).sum(), batch["weight"].sum()), metrics

    batch = {"x": X, "weight": weights, "scale": jp.Replicated({"by": np.float32(3)})}
    step = make(strategy, jp.Model(init=init, loss=weighted))
    state = step.init(KEY)
    y = 3 * np.square(X @ np.asarray(step.params(state)["w"])).mean(axis=1)
    expected = {"plain": y.mean(), "weighted": (y * weights).sum() / weights.sum()}
    expected["loss"] = expected["weighted"]
    evaluated = step.evaluate(state, batch)
    _, metrics = step(state, batch)
    assert set(evaluated) == set(expected)
    assert set(metrics) == {*expected, "grad_norm", "skipped", "finite"}
    for name, value in expected.items():
        assert float(evaluated[name]) == pytest.approx(value, rel=1e-5), name
        assert float(metrics[name]) == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("strategy", ["dp", "zero1", "zero3"])
def test_skipped_steps(strategy: str) -> None:
    """In float16, one row that is not finite skips the step everywhere and halves the scale; the next step counts."""
    step = make(f"{strategy},precision=f16")
    state = step.init(KEY)
    state = dataclasses.replace(state, scale=dataclasses.replace(state.scale, scale=state.scale.scale / 2**7))
    initial, scale = jax.device_get((step.params(state), state.optimizer)), float(state.scale.scale)
    state, metrics = step(state, POISON)
    assert equal((step.params(state), state.optimizer), initial)
    assert (int(metrics["skipped"]), float(state.scale.scale), int(state.step)) == (1, scale / 2, 1)
    state, metrics = step(state, BATCH)
    assert (int(metrics["skipped"]), float(state.scale.scale), int(state.scale.good)) == (1, scale / 2, 1)
    assert not equal(step.params(state), initial[0])
    expected = jax.grad(loss)(initial[0], BATCH, None)["w"]  # without the scale
    tolerance = 0.02 * float(jnp.abs(expected).max())
    np.testing.assert_allclose(state.optimizer[0].trace["w"], expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("strategy", ["dp", "zero1,precision=bf16"])
def test_a_step_that_is_not_finite_is_not_applied(strategy: str) -> None:
    """A step that is not finite changes the step's number alone; finite steps after it are applied as usual."""
    step, plain = (
        make(strategy, optimizer=optax.adam(0.1), mesh=jax.devices()[:4], skip_nonfinite=skip) for skip in (True, False)
    )
    state, plain_state = step.init(KEY), plain.init(KEY)
    initial = jax.device_get((state.params, state.copy, state.optimizer))
    state, metrics = step(state, POISON)
    assert equal((state.params, state.copy, state.optimizer), initial)
    assert (bool(metrics["finite"]), int(state.step)) == (False, 1)
    state, metrics = step(state, BATCH)
    assert (bool(metrics["finite"]), int(metrics["skipped"]), int(state.step)) == (True, 0, 2)
    plain_state, _ = plain(plain_state, BATCH)
    expected = jax.device_get((plain_state.params, plain_state.copy, plain_state.optimizer))
    assert equal((state.params, state.copy, state.optimizer), expected)


def test_masters_and_sums_of_gradients_are_float32_or_wider() -> None:
    policy = Policy.of(jp.Strategy.parse("ddp,precision=bf16"))
    f32, bf16, f64, i32 = (jnp.dtype(name) for name in ("float32", "bfloat16", "float64", "int32"))
    assert [policy.master(dtype) for dtype in (f32, bf16, f64, i32)] == [f32, f32, f64, i32]
    assert [policy.computed(dtype) for dtype in (f32, bf16, f64)] == [bf16, bf16, f64]
    assert [policy.reduced(dtype) for dtype in (f32, bf16, f64)] == [f32, f32, f64]
    assert [policy.stored(bf16, trainable) for trainable in (True, False)] == [f32, bf16]
    low = Policy.of(jp.Strategy.parse("ddp,precision=bf16,reduce=compute"))
    assert [low.reduced(dtype) for dtype in (f32, bf16, f64)] == [bf16, bf16, f64]


def test_float16s_scale_doubles_with_the_2000th_finite_step_in_a_row() -> None:
    scale = dataclasses.replace(LossScale.create(), good=jnp.int32(1998))
    history = []
    for finite in (True, True, True, False):
        scale = scale.next(jnp.bool_(finite))
        history.append((float(scale.scale) / 2**15, int(scale.good), int(scale.skipped)))
    assert history == [(1, 1999, 0), (2, 0, 0), (2, 1, 0), (1, 0, 1)]


def test_gradients_that_are_not_finite_beside_a_loss_that_is_are_not_applied() -> None:
    """At 0 the square root of a square is 0, and has no derivative."""
    model = jp.Model(
        lambda key: {"w": jnp.zeros(3)}, lambda params, batch, key: jnp.sqrt(jnp.square(params["w"]).sum())
    )
    step = jp.make_train_step(model, SGD, "single", skip_nonfinite=True)
    with pytest.warns(UserWarning, match="the loss does not read"):
        state, metrics = step(step.init(KEY), BATCH)
    assert (float(metrics["loss"]), bool(metrics["finite"])) == (0, False)
    assert equal(step.params(state), {"w": np.zeros(3)})


# Bytes per parameter under bf16 of the master and copy, the gradients, and Adam's moments: (replicated, sharded).
TABLE = {
    "single": ((4, 0), (4, 0), (8, 0)),
    "ddp": ((4, 0), (4, 0), (8, 0)),
    "zero1": ((2, 4), (0, 4), (0, 8)),  # a copy, and the master with the optimizer
    "zero2": ((2, 4), (0, 4), (0, 8)),
    "zero3": ((0, 4), (0, 4), (0, 8)),
    "hsdp": ((0, 4), (0, 4), (0, 8)),
}


@pytest.mark.parametrize("strategy", TABLE)
def test_bytes(strategy: str) -> None:
    """Under bf16 a device stores what the layout and the papers state; `test_transparency.py` has float32."""
    model = jp.Model(
        init=lambda key: {"w": jax.random.normal(key, (64, 64))},  # one leaf, so that the table is exact
        loss=lambda params, batch, key: jnp.square(batch["x"][:, :1] * params["w"].sum()).mean().astype(jnp.float32),
    )
    step = make(f"{strategy},precision=bf16", model, optax.adam(1e-3))
    state = step.init(KEY)
    sizes = [(replicated + sharded / step.mesh.shape["fsdp"]) * 64 * 64 for replicated, sharded in TABLE[strategy]]
    expected = dict(zip(("params", "grads", "optimizer"), sizes, strict=True))
    expected["optimizer"] += 4  # Adam's count
    assert step.layout.bytes == expected

    def local_bytes(tree: Any) -> int:
        return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))

    assert local_bytes((state.params, state.copy)) == expected["params"]
    assert local_bytes(state.optimizer) == expected["optimizer"]
    state, _ = step(state, BATCH)
    assert local_bytes((state.params, state.copy)) == expected["params"]
    assert state.params["w"].dtype == jnp.float32
    assert (state.copy is not None) == (strategy in ("zero1", "zero2"))
    if state.copy is not None:
        assert equal(state.copy["w"], step.params(state)["w"].astype(jnp.bfloat16))


def test_padding() -> None:
    """Padding is zero, stays zero through weight decay and momentum, and is in no parameters that users see."""
    step = make("zero3", optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, weight_decay=0.5)))
    params = init(KEY)
    state = step.init(KEY, params=params)
    assert equal(step.params(state), params)
    assert state.params["odd"].shape == (136, 131)
    assert step.layout.notes["odd"] == "padded: dim 0 from 131 to 136"
    assert step.layout.notes["small"].startswith("replicated: no dim of (3,) is divisible by 8")
    for _ in range(2):
        state, _ = step(state, BATCH)
    stored = [x for x in jax.tree.leaves((state.params, state.optimizer)) if x.shape == (136, 131)]
    assert len(stored) == 3
    assert not any(np.asarray(x)[131:].any() for x in stored)
    assert step.params(state)["odd"].shape == (131, 131)


def test_repr_is_a_summary() -> None:
    """`repr` printed every array. It must not raise for any content, because tracebacks show it."""
    step = make("zero3")
    state = step.init(KEY)
    stored = 136 * 131 + 16 * 16 + 3
    # With momentum, the step's number and the key.
    bytes_per_device = 2 * (136 * 131 + 16 * 16) * 4 // 8 + 2 * 3 * 4 + 4 + 8
    total_bytes = 2 * stored * 4 + 4 + 8
    expected = f"State(step 0, {stored:,} parameters as stored, {bytes_per_device:,} bytes on each of 8 x cpu)"
    assert repr(state) == expected
    assert repr(step.abstract_state()) == repr(state).replace("step 0", "step abstract")
    traced_reprs: list[str] = []
    jax.eval_shape(lambda s: traced_reprs.append(repr(s)), state)
    assert traced_reprs == [f"State(step traced, {stored:,} parameters as stored, {total_bytes:,} bytes)"]
    assert "NamedSharding" in repr(jax.tree.map(lambda x: x.sharding, state))
    for x in jax.tree.leaves(state):
        x.delete()
    assert repr(state).startswith(f"State(step donated, {stored:,} parameters")


def test_callback_in_a_layer() -> None:
    """A print within scanned layers failed in the program that computes the loss's count, which has no parameters."""
    printed = []

    def layers(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            jax.debug.callback(printed.append, x.shape[0])
            return jnp.tanh(x @ w), None

        return jnp.square(jax.lax.scan(body, batch["x"], params)[0]).mean()

    step = make("zero3", jp.Model(init=lambda key: jax.random.normal(key, (2, 16, 16)), loss=layers))
    jax.block_until_ready(step(step.init(KEY), BATCH))
    jax.effects_barrier()
    assert len(printed) == 8 * 2
    assert set(map(int, printed)) == {ROWS // 8}


class Plain(nnx.Module):
    """A module with an array that is no variable; under jit, Flax treats it as a static attribute."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.table = jnp.arange(16.0)
        self.linear = nnx.WeightNorm(nnx.Linear(16, 16, rngs=rngs), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x * self.table)


def test_plain_arrays_in_a_module() -> None:
    step = make("zero3", jp.from_nnx(lambda rngs: Plain(rngs=rngs), squared), mesh=jax.devices()[:2])
    state = step.init(KEY)
    _, metrics = step(state, BATCH)
    reference = Plain(rngs=nnx.Rngs(0))
    assert np.isfinite(float(metrics["loss"]))
    assert step.model(step.init(KEY))(X).shape == reference(X).shape


def test_arrays_that_lie_elsewhere() -> None:
    """Batches and parameters may lie on any devices; jit alone would refuse them."""
    step = make("zero3", optimizer=optax.sgd(0.0))
    expected = float(step.evaluate(step.init(KEY), BATCH)["loss"])
    meshes = jax.make_mesh((8,), ("d",)), step.mesh
    places = [
        jax.devices()[3],
        *(jax.NamedSharding(mesh, jax.P()) for mesh in meshes),
        jax.NamedSharding(meshes[0], jax.P("d")),
    ]
    for place in places:
        state = step.init(KEY)
        _, metrics = step(state, jax.device_put(BATCH, place))
        assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-6), place
    single = make("single")
    assert equal(step.params(step.init(KEY, params=single.params(single.init(KEY)))), jax.jit(init)(KEY))


def test_steps_under_jit() -> None:
    """Several steps run in one program."""
    step = make("zero3")
    batches = {"x": np.stack([X, -X])}
    state, losses = jax.lax.scan(lambda s, b: (lambda n, m: (n, m["loss"]))(*step(s, b)), step.init(KEY), batches)
    expected = step.init(KEY)
    for i in range(2):
        expected, metrics = step(expected, {"x": batches["x"][i]})
        assert float(metrics["loss"]) == pytest.approx(float(losses[i]), rel=1e-6)
    same(state.params, expected.params)


def test_large_optimizer_arrays_that_are_not_sharded_are_reported() -> None:
    model = jp.Model(
        init=lambda key: {"w": jnp.ones((64, 64))}, loss=lambda params, batch, key: (batch @ params["w"]).mean()
    )
    step = jp.make_train_step(model, optax.scale_by_lbfgs(), "zero2")
    assert any(name.startswith("optimizer/") and "(10, 64, 64)" in note for name, note in step.layout.notes.items())
