"""What users rely on around a step: initial values, freezing, evaluation, donation, streams, statistics, bytes."""

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
from jaxpar.step.gradients import block_key

KEY = jax.random.key(0)
LAYOUTS = ("single", "dp", "ddp", "zero1", "zero2", "zero3", "hsdp")
ROWS = 16
X = np.random.default_rng(0).normal(size=(ROWS, 16)).astype(np.float32)
BATCH = {"x": X}
SGD = optax.sgd(0.1, momentum=0.9)


def init(key: jax.Array) -> dict[str, jax.Array]:
    """A leaf that divides, one that is padded (131 x 131 >= 16,384), and one that is too small for either."""
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


@pytest.mark.parametrize("strategy", LAYOUTS)
def test_state_life(strategy: str) -> None:
    """Initial values are those of one device, bit by bit; states are donated; given parameters are not."""
    step = make(strategy)
    state = step.init(KEY)
    params = step.params(state)
    assert equal(params, jax.jit(init)(KEY))
    assert [x.shape for x in jax.tree.leaves(params)] == [(131, 131), (3,), (16, 16)]

    again = step.init(jax.random.key(1), params=params)
    assert equal(step.params(again), params)
    new, _ = step(again, BATCH)
    assert all(alive(params))
    if strategy != "dp":  # its update runs in a program of its own
        assert not any(alive(again.params))
    before = jax.device_get((new.step, new.params, new.optimizer))
    metrics = step.evaluate(new, BATCH)
    assert equal((new.step, new.params, new.optimizer), before)
    assert metrics["loss"] == pytest.approx(float(loss(step.params(new), BATCH, None)), rel=1e-6)


def test_start_from_nnx_state() -> None:
    model = jp.from_nnx(
        lambda rngs: nnx.Linear(16, 16, rngs=rngs), lambda module, batch: jnp.square(module(batch["x"])).mean()
    )
    given = nnx.state(nnx.Linear(16, 16, rngs=nnx.Rngs(7)), nnx.Param)
    step = make("zero3", model)
    state = step.init(KEY, params=given)
    assert isinstance(step.params(state), nnx.State)
    assert equal(step.params(state), given)
    step(state, BATCH)
    assert all(alive(given))
    # In another layout, from what a step has returned.
    assert equal(make("ddp", model).init(KEY, params=step.params(step.init(KEY, params=given))).params, given)


def test_frozen() -> None:
    """Frozen parameters do not move and have no gradient and no optimizer state; the others move as ever."""
    step = make("zero3", optimizer=optax.adamw(0.1, weight_decay=0.1), trainable=lambda path: path == "w")
    state = step.init(KEY)
    moments = [x.size for x in jax.tree.leaves(state.optimizer) if x.ndim]
    assert moments == [256, 256]
    _, grads = step.value_and_grad(state, BATCH)
    assert (grads["odd"], grads["small"]) == (None, None)
    same(grads["w"], jax.grad(loss)(init(KEY), BATCH, None)["w"])
    before = jax.device_get(step.params(state))
    for _ in range(2):
        state, _ = step(state, BATCH)
    after = step.params(state)
    assert equal((before["odd"], before["small"]), (after["odd"], after["small"]))
    assert not equal(before["w"], after["w"])
    assert step.layout.bytes["grads"] == 256 * 4 // 8


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp", "dp"])
def test_frozen_leaves_have_no_float32_master(strategy: str) -> None:
    """LoRA on a base of 70 billion parameters held 280 GB of it under bf16, of which the loss saw 140."""
    trainable = lambda path: path == "w"
    step = make(f"{strategy},precision=bf16", trainable=trainable)
    state = step.init(KEY)
    held = {path: x.dtype.name for path, x in step.params(state).items()}
    assert held == {"odd": "bfloat16", "small": "bfloat16", "w": "float32"}
    full = make(f"{strategy},precision=bf16")
    saved = full.layout.bytes["params"] - step.layout.bytes["params"]
    parts = 8 if step.layout.copied or strategy == "zero3" else 1  # `odd` is padded to 136 rows where it is sharded
    assert saved == 2 * ((136 * 131 // 8 if parts == 8 else 131 * 131) + 3)
    # What is trained goes where it went beside float32 masters, which the loss saw in bfloat16 too.
    given = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), init(KEY))
    state, other = step.init(KEY, params=given), full.init(KEY, params=given)
    for _ in range(2):
        (loss_, grads), (other_loss, other_grads) = step.value_and_grad(state, BATCH), full.value_and_grad(other, BATCH)
        assert equal((loss_, grads["w"]), (other_loss, other_grads["w"]))
        state, metrics = step(state, BATCH)
        other = full.init(KEY, params={**given, "w": step.params(state)["w"]})
    assert metrics["finite"]
    assert equal(step.params(state)["odd"], given["odd"])


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


@pytest.mark.slow
def test_dropout() -> None:
    """Masks belong to blocks of rows: 8 replicas draw what 4 replicas of 2 microbatches draw. Each step draws anew."""
    still = optax.sgd(0.0)
    losses = {}
    for name, devices in {"data=8": 8, "data=4,microbatches=2": 4, "fsdp=2,microbatches=4": 2}.items():
        step = make(name, NOISY, still, mesh=jax.devices()[:devices])
        state = step.init(KEY)
        losses[name] = []
        for _ in range(2):
            state, metrics = step(state, BATCH)
            losses[name].append(float(metrics["loss"]))
        without = float(squared(nnx.view(step.model(state), deterministic=True), BATCH))
        assert float(step.evaluate(state, BATCH)["loss"]) == pytest.approx(without, rel=1e-6)
        assert without not in losses[name]
    first, *others = losses.values()
    assert first[0] != first[1]
    for other in others:
        assert other == pytest.approx(first, rel=1e-6)


def test_module() -> None:
    """`step.model` gives the user's module, whose forward is that of the parameters, and which outlives the state."""
    module = Noisy(rngs=nnx.Rngs(0))
    step = make("zero3", NOISY)
    state = step.init(KEY)
    ours = step.model(state)
    nnx.update(module, step.params(state))
    ours.eval()
    module.eval()
    same(ours(X), module(X))
    step(state, BATCH)
    assert all(alive(nnx.state(ours)))

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
    """Running statistics are those of one device, rows of different size included, and `evaluate` leaves them alone."""
    batch = {"x": X * np.arange(ROWS, dtype=np.float32)[:, None]}
    model = jp.from_nnx(lambda rngs: Normed(rngs=rngs), lambda m, b: jnp.square(m(b["x"]) - b["x"]).mean())
    statistics = {}
    for strategy in ("single", "ddp", "zero3"):
        step = make(strategy, model, optax.sgd(1e-3))
        state = step.init(KEY)
        for _ in range(2):
            state, _ = step(state, batch)
        statistics[strategy] = jax.device_get(state.variables["norm"])
        step.evaluate(state, batch)
        assert equal(state.variables["norm"], statistics[strategy])
    assert np.abs(statistics["single"]["mean"]).max() > 0.1
    for strategy in ("ddp", "zero3"):
        same(statistics[strategy], statistics["single"], 1e-5)


@pytest.mark.filterwarnings("ignore:jp.all_rows returns the rows of one microbatch")
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "ddp,microbatches=2", "zero3,microbatches=2"])
def test_contrastive(strategy: str) -> None:
    """Every row against the rows of all replicas."""

    def contrast(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        everybody, at = jp.all_rows(batch["y"] @ params["w"]), jp.all_rows(batch["at"])
        scores = jax.nn.log_softmax(batch["x"] @ params["w"] @ everybody.T)
        return -jnp.where(batch["at"][:, None] == at, scores, 0).sum(axis=1).mean()

    batch = {"x": X, "y": X[::-1].copy(), "at": np.arange(ROWS)}
    report = jp.verify(jp.Model(init=init, loss=contrast), strategy, batch, steps=1)
    assert report.ok, report


@pytest.mark.parametrize("strategy", ["ddp", "zero3,microbatches=2"])
def test_metrics_and_replicated_leaves(strategy: str) -> None:
    """Means over all rows, and of counts that differ from row to row; leaves without rows reach every device."""
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


@pytest.mark.parametrize("strategy", ["dp", "ddp", "zero1", "zero3"])
def test_skipped_steps(strategy: str) -> None:
    """float16: one row that is not finite skips the step everywhere and halves the scale; the next one counts."""
    step = make(f"{strategy},precision=f16")
    state = step.init(KEY)
    state = dataclasses.replace(state, scale=dataclasses.replace(state.scale, scale=state.scale.scale / 2**7))
    before, scale = jax.device_get((step.params(state), state.optimizer)), float(state.scale.scale)
    poison = {"x": np.where(np.arange(ROWS)[:, None] == ROWS - 1, np.nan, X).astype(np.float32)}
    state, metrics = step(state, poison)
    assert equal((step.params(state), state.optimizer), before)
    assert (int(metrics["skipped"]), float(state.scale.scale), int(state.step)) == (1, scale / 2, 1)
    state, metrics = step(state, BATCH)
    assert (int(metrics["skipped"]), float(state.scale.scale), int(state.scale.good)) == (1, scale / 2, 1)
    assert not equal(step.params(state), before[0])
    wanted = jax.grad(loss)(before[0], BATCH, None)["w"]  # not times the scale
    np.testing.assert_allclose(state.optimizer[0].trace["w"], wanted, rtol=0, atol=0.02 * float(jnp.abs(wanted).max()))


@pytest.mark.parametrize("strategy", ["dp", "zero1,precision=bf16"])
def test_a_step_that_is_not_finite_is_not_applied(strategy: str) -> None:
    """Of masters, moments and the low copy nothing changes but the step's number; others are what they would be."""
    mesh = jax.devices()[:4]
    step = jp.make_train_step(jp.Model(init=init, loss=loss), optax.adam(0.1), strategy, mesh, skip_nonfinite=True)
    plain = jp.make_train_step(jp.Model(init=init, loss=loss), optax.adam(0.1), strategy, mesh)
    state, same = step.init(KEY), plain.init(KEY)
    before = jax.device_get((state.params, state.copy, state.optimizer))
    poison = {"x": np.where(np.arange(ROWS)[:, None] == ROWS - 1, np.nan, X).astype(np.float32)}
    state, metrics = step(state, poison)
    assert equal((state.params, state.copy, state.optimizer), before)
    assert (bool(metrics["finite"]), int(state.step)) == (False, 1)
    state, metrics = step(state, BATCH)
    assert (bool(metrics["finite"]), int(metrics["skipped"]), int(state.step)) == (True, 0, 2)
    same, _ = plain(same, BATCH)
    assert equal((state.params, state.copy, state.optimizer), jax.device_get((same.params, same.copy, same.optimizer)))


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
    found = []
    for finite in (True, True, True, False):
        scale = scale.next(jnp.bool_(finite))
        found.append((float(scale.scale) / 2**15, int(scale.good), int(scale.skipped)))
    assert found == [(1, 1999, 0), (2, 0, 0), (2, 1, 0), (1, 0, 1)]


def test_gradients_that_are_not_finite_beside_a_loss_that_is_are_not_applied() -> None:
    """At 0 the root of a square has the value 0 and no derivative."""
    model = jp.Model(
        lambda key: {"w": jnp.zeros(3)}, lambda params, batch, key: jnp.sqrt(jnp.square(params["w"]).sum())
    )
    step = jp.make_train_step(model, SGD, "single", skip_nonfinite=True)
    with pytest.warns(UserWarning, match="the loss does not read"):
        state, metrics = step(step.init(KEY), BATCH)
    assert (float(metrics["loss"]), bool(metrics["finite"])) == (0, False)
    assert equal(step.params(state), {"w": np.zeros(3)})


PARAMETERS = 64 * 64  # one leaf, so that the table is exact
# Bytes per parameter of the master and copy, the gradients, and Adam's moments: whole, and of a shard. DESIGN's table.
TABLE = {
    "single": ((4, 0), (4, 0), (8, 0)),
    "ddp": ((4, 0), (4, 0), (8, 0)),
    "zero1": ((4, 0), (0, 4), (0, 8)),
    "zero2": ((4, 0), (0, 4), (0, 8)),
    "zero3": ((0, 4), (0, 4), (0, 8)),
    "hsdp": ((0, 4), (0, 4), (0, 8)),
}


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("strategy", TABLE)
def test_bytes(strategy: str, precision: str) -> None:
    """What a device holds is what the layout says, and what the papers say; masters and moments are float32."""
    model = jp.Model(
        init=lambda key: {"w": jax.random.normal(key, (64, 64))},
        loss=lambda params, batch, key: jnp.square(batch["x"][:, :1] * params["w"].sum()).mean().astype(jnp.float32),
    )
    step = make(f"{strategy},precision={precision}", model, optax.adam(1e-3))
    state = step.init(KEY)
    table = dict(zip(("params", "grads", "optimizer"), TABLE[strategy], strict=True))
    if precision == "bf16" and strategy in ("zero1", "zero2"):
        table["params"] = (2, 4)  # a copy, and the master with the optimizer
    shards = step.mesh.shape["fsdp"]
    closed = {name: whole * PARAMETERS + part * PARAMETERS // shards for name, (whole, part) in table.items()}
    closed["optimizer"] += 4  # Adam's count
    assert step.layout.bytes == closed

    def held(tree: Any) -> int:
        return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))

    assert held((state.params, state.copy)) == closed["params"]
    assert held(state.optimizer) == closed["optimizer"]
    state, _ = step(state, BATCH)
    assert held((state.params, state.copy)) == closed["params"]
    assert state.params["w"].dtype == jnp.float32
    assert (state.copy is not None) == (precision == "bf16" and strategy in ("zero1", "zero2"))
    if state.copy is not None:
        assert equal(state.copy["w"], step.params(state)["w"].astype(jnp.bfloat16))


def test_padding() -> None:
    """Padding is zero, stays zero through weight decay and momentum, and is seen by nobody."""
    step = make("zero3", optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, weight_decay=0.5)))
    given = init(KEY)
    state = step.init(KEY, params=given)
    assert equal(step.params(state), given)
    assert state.params["odd"].shape == (136, 131)
    assert step.layout.notes["odd"] == "padded: dim 0 from 131 to 136"
    assert step.layout.notes["small"].startswith("replicated: no dim of (3,) divides by 8")
    for _ in range(2):
        state, _ = step(state, BATCH)
    stored = [x for x in jax.tree.leaves((state.params, state.optimizer)) if x.shape == (136, 131)]
    assert len(stored) == 3
    assert not any(np.asarray(x)[131:].any() for x in stored)
    assert step.params(state)["odd"].shape == (131, 131)


def test_repr_is_a_summary() -> None:
    """It printed every array; and whatever a state holds, it is read in an error's traceback and must not raise."""
    step = make("zero3")
    state = step.init(KEY)
    stored = 136 * 131 + 16 * 16 + 3
    of_one = 2 * (136 * 131 + 16 * 16) * 4 // 8 + 2 * 3 * 4 + 4 + 8  # with momentum, the step's number, the key
    of_all = 2 * stored * 4 + 4 + 8
    assert repr(state) == f"State(step 0, {stored:,} parameters as stored, {of_one:,} bytes on each of 8 x cpu)"
    assert repr(step.abstract_state()) == repr(state).replace("step 0", "step abstract")
    inside: list[str] = []
    jax.eval_shape(lambda s: inside.append(repr(s)), state)
    assert inside == [f"State(step traced, {stored:,} parameters as stored, {of_all:,} bytes)"]
    assert "NamedSharding" in repr(jax.tree.map(lambda x: x.sharding, state))
    for x in jax.tree.leaves(state):
        x.delete()
    assert repr(state).startswith(f"State(step donated, {stored:,} parameters")


@pytest.mark.parametrize("strategy", ["zero3", "ddp,microbatches=2"])
def test_count_that_is_drawn(strategy: str) -> None:
    """A masked loss whose mask is random: gradients were divided by the count of another key's mask."""

    def masked(params: Any, batch: Any, key: jax.Array | None) -> jp.Mean:
        kept = jnp.ones(batch["x"].shape[:1]) if key is None else jax.random.uniform(key, batch["x"].shape[:1])
        return jp.Mean((jnp.square(batch["x"] @ params["w"]).mean(axis=1) * kept).sum(), kept.sum())

    report = jp.verify(jp.Model(init=init, loss=masked), strategy, BATCH, steps=1)
    assert report.ok, report


def test_callback_in_a_layer() -> None:
    """A print within scanned layers was looked up where there are no parameters, to find the loss's count."""
    seen = []

    def layers(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            jax.debug.callback(seen.append, x.shape[0])
            return jnp.tanh(x @ w), None

        return jnp.square(jax.lax.scan(body, batch["x"], params)[0]).mean()

    step = make("zero3", jp.Model(init=lambda key: jax.random.normal(key, (2, 16, 16)), loss=layers))
    jax.block_until_ready(step(step.init(KEY), BATCH))
    jax.effects_barrier()
    assert len(seen) == 8 * 2
    assert set(map(int, seen)) == {ROWS // 8}


class Plain(nnx.Module):
    """Keeps arrays that are no variables: under jit, Flax takes the first for a static attribute."""

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
    """Batches and given parameters are taken from wherever the user has put them; jit alone refuses."""
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
    one = make("single")
    assert equal(step.params(step.init(KEY, params=one.params(one.init(KEY)))), jax.jit(init)(KEY))


def test_steps_under_jit() -> None:
    """Several steps in one program."""
    step = make("zero3")
    batches = {"x": np.stack([X, -X])}
    state, losses = jax.lax.scan(lambda s, b: (lambda n, m: (n, m["loss"]))(*step(s, b)), step.init(KEY), batches)
    other = step.init(KEY)
    for i in range(2):
        other, metrics = step(other, {"x": batches["x"][i]})
        assert float(metrics["loss"]) == pytest.approx(float(losses[i]), rel=1e-6)
    same(state.params, other.params)


def test_large_optimizer_arrays_that_are_not_sharded_are_reported() -> None:
    model = jp.Model(
        init=lambda key: {"w": jnp.ones((64, 64))}, loss=lambda params, batch, key: (batch @ params["w"]).mean()
    )
    step = jp.make_train_step(model, optax.scale_by_lbfgs(), "zero2")
    assert any(name.startswith("optimizer/") and "(10, 64, 64)" in note for name, note in step.layout.notes.items())
