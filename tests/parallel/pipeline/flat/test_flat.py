"""Pipelines of models without one stack: exactness, memory of ranks, refusals, and how even the stages are."""

import functools
import itertools
import math
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import context_cells
import expert_cells
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import OPTIMIZERS, OneDevice, check
from flax import linen as nn
from tensor_cells import SHARED_BATCH

import jaxpar as jp
from jaxpar.inspect.expected import expected
from jaxpar.inspect.ledger import Ledger
from jaxpar.inspect.memory import slot_bytes
from jaxpar.parallel.pipeline.flat.cut import LINK, crossing, stages_of, times
from jaxpar.parallel.pipeline.flat.stages import stages, used
from jaxpar.program import jaxpr as jx

pytestmark = SHARED_BATCH

SGD = optax.sgd(0.05, momentum=0.9)
ROWS = 16


def make_step(model: jp.Model, text: str, devices: int, optimizer: Any = SGD) -> Any:
    return jp.make_train_step(model, optimizer, text, mesh=jax.devices()[:devices])


def weighted(losses: jax.Array, batch: Any) -> jp.Mean:
    """Return the loss under random weights of the rows, so that all replicas and microbatches count differently."""
    losses = losses.reshape(losses.shape[0], -1).mean(1)
    return jp.Mean((losses * batch["w"]).sum(), batch["w"].sum())


def weights() -> np.ndarray:
    return np.random.default_rng(3).uniform(0.1, 2, ROWS).astype(np.float32)


# -- models ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block of a U-Net: GroupNorm, two convolutions, and an addend from the time step."""

    features: int

    @nn.compact
    def __call__(self, x_BHWC: jax.Array, t_BT: jax.Array) -> jax.Array:
        y = nn.Conv(self.features, (3, 3))(nn.silu(nn.GroupNorm(2)(x_BHWC)))
        y = nn.Conv(self.features, (3, 3))(nn.silu(y + nn.Dense(self.features)(t_BT)[:, None, None]))
        return y + (x_BHWC if x_BHWC.shape[-1] == self.features else nn.Conv(self.features, (1, 1))(x_BHWC))


class UNet(nn.Module):
    """A U-Net whose skips cross the whole model; every block reads the embedding of the time step."""

    @nn.compact
    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        t = nn.Dense(16)(nn.silu(nn.Dense(16)(jnp.stack([jnp.sin(t * k) for k in range(1, 5)], -1))))
        x, skips = nn.Conv(4, (3, 3))(x), []
        for features in (4, 8):
            skips.append(x := Block(features)(x, t))
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = Block(12)(x, t)
        for features in (8, 4):
            b, h, w, c = x.shape
            x = jax.image.resize(x, (b, 2 * h, 2 * w, c), "nearest")
            x = Block(features)(jnp.concatenate([x, skips.pop()], -1), t)
        return nn.Conv(2, (3, 3))(x)


def unet() -> tuple[jp.Model, Any]:
    draw = np.random.default_rng(0)
    batch = {"x": draw.normal(size=(ROWS, 8, 8, 2)), "t": draw.uniform(size=ROWS)}
    batch = {name: x.astype(np.float32) for name, x in batch.items()} | {"w": weights()}

    def loss(apply: Any, batch: Any) -> jp.Mean:
        noise = jnp.cos(3 * batch["x"])
        return weighted((apply(batch["x"] + noise, batch["t"]) - noise) ** 2, batch)

    return jp.from_linen(UNet(), loss, batch), batch


def irregular() -> tuple[jp.Model, Any]:
    """Return 13 blocks that all differ: in widths and functions, with a gather, a scan, dropout and a constant."""
    widths = [12, 20, 8, 36, 16, 24, 10, 28, 14, 18, 40, 22, 6, 9]
    functions = [jnp.tanh, jax.nn.relu, jnp.sin, jax.nn.gelu, jax.nn.softplus]

    def init(key: jax.Array) -> Any:
        draw = lambda i, *shape: shape[0] ** -0.5 * jax.random.normal(jax.random.fold_in(key, i), shape)
        sizes = enumerate(itertools.pairwise(widths))
        return {f"block{i}": {"w": draw(i, a, b), "b": jnp.zeros(b)} for i, (a, b) in sizes}

    def loss(params: Any, batch: Any, key: jax.Array | None) -> jp.Mean:
        x = batch["x"]
        for i in range(13):
            p = params[f"block{i}"]
            x = functions[i % 5](x @ p["w"] + p["b"])
            if i == 3:
                x = x[:, jnp.argsort(jnp.arange(16) * 7 % 16)]
            if i == 5:
                x, _ = jax.lax.scan(lambda x, k: (x + 0.1 * jnp.cos(k * x), None), x, jnp.arange(3.0))
            if i == 8 and key is not None:
                x = x * jax.random.bernoulli(key, 0.8, x.shape) / 0.8
            if i == 10:
                x = x + jnp.asarray(np.linspace(0, 1, 22, dtype=np.float32)) * jnp.sign(batch["x"][:, :1])
        return weighted((x - batch["y"]) ** 2, batch)

    draw = np.random.default_rng(0)
    batch = {"x": draw.normal(size=(ROWS, 12)).astype(np.float32), "y": draw.normal(size=(ROWS, 9)).astype(np.float32)}
    return jp.Model(init=init, loss=loss), batch | {"w": weights()}


MODELS: dict[str, Callable[[], tuple[jp.Model, Any]]] = {"unet": unet, "irregular": irregular}


@functools.cache
def model_and_batch(name: str) -> tuple[jp.Model, Any]:
    return MODELS[name]()


@functools.cache
def one_device(name: str) -> OneDevice:
    return OneDevice(model_and_batch(name)[0])


# -- exact -------------------------------------------------------------------------------------------------------------

CELL = ("irregular", "pipe=2,fsdp=2,tensor=2,microbatches=4,schedule=zb-v,chunks=2,remat=layer", 8)
BATTERY = [
    ("irregular", "pipe=2,fsdp=2,tensor=2,microbatches=2,schedule=zb-h1,remat=twice", 8),
    ("irregular", "pipe=4,data=2,microbatches=8,schedule=zb-h2", 8),
    ("irregular", "pipe=2,chunks=4,microbatches=2,remat=layer", 2),
    ("irregular", "pipe=2,tensor=2,data=2,microbatches=4,chunks=2", 8),
    ("irregular", "pipe=2,microbatches=3,data=1,chunks=1,schedule=gpipe", 2),
    ("irregular", "pipe=2,chunks=2,microbatches=2,fsdp=2,zero=1", 4),
    ("irregular", "pipe=4,fsdp=2,zero=2,microbatches=8,schedule=1f1b-halves,remat=twice", 8),
    ("irregular", "pipe=2,microbatches=2,stages=block10", 2),
    ("unet", "pipe=2,chunks=2,fsdp=2,zero=2,microbatches=4,schedule=zb-v", 4),
    ("unet", "pipe=2,tensor=2,chunks=2,microbatches=4,schedule=v-half,remat=twice", 4),
    ("unet", "pipe=4,microbatches=4,schedule=zb-h1,remat=dots", 4),
    ("unet", "pipe=2,fsdp=2,tensor=2,microbatches=2", 8),
    ("unet", "pipe=2,tensor=4,microbatches=2,schedule=gpipe", 8),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy", "devices"), [CELL, *(pytest.param(*cell, marks=pytest.mark.battery) for cell in BATTERY)]
)
def test_exact(name: str, strategy: str, devices: int) -> None:
    """Check gradients, three steps of SGD with momentum, stored bytes, the collectives' order, and the closed form."""
    (model, batch), device = model_and_batch(name), one_device(name)
    step = make_step(model, strategy, devices)
    assert step.layout.storage.cut
    blocks = step.replicas * step.strategy.microbatches
    rows = ROWS // blocks * blocks
    batch = jax.tree.map(lambda x: x[:rows], batch)
    grads, params = device.train(SGD, batch, blocks, 3)
    check(step, model, device.first, batch, 3, grads, params)


@pytest.mark.battery
@pytest.mark.filterwarnings("ignore:pipe=2 with microbatches=1")
@pytest.mark.parametrize(
    ("cells", "name", "strategy"),
    [
        (context_cells, "encoder_decoder", "pipe=2,chunks=2,fsdp=2,microbatches=4,schedule=dualpipe-v,remat=twice"),
        (context_cells, "encoder_decoder", "pipe=2,fsdp=2,tensor=2,microbatches=2,schedule=zb-h1"),
        (context_cells, "encoder_decoder", "pipe=2,fsdp=2,zero=2,microbatches=1"),
        (context_cells, "t5_translator", "pipe=4,chunks=2,microbatches=4,schedule=v-min,remat=layer"),
        (context_cells, "t5", "pipe=2,context=2,fsdp=2,microbatches=2"),
        (context_cells, "loop", "pipe=2,context=2,tensor=2,microbatches=2"),
        (context_cells, "encoder_decoder", "pipe=2,context=4,microbatches=2"),
        (context_cells, "window", "pipe=2,context=2,fsdp=2,zero=1,microbatches=2,attention=ulysses"),
        (context_cells, "mixture", "pipe=2,context=2,expert=2,microbatches=2"),
        (expert_cells, "dropless", "pipe=2,expert=2,fsdp=2,microbatches=2"),
        (expert_cells, "einsum", "pipe=2,expert=2,tensor=2,microbatches=4"),
        (expert_cells, "capacity", "pipe=4,expert=2,microbatches=2,schedule=gpipe"),
    ],
)
def test_exact_beside_context_and_expert(cells: ModuleType, name: str, strategy: str) -> None:
    """Ranks that share positions or experts are in one stage, and so run the same operation.

    The encoder and the decoder of `encoder_decoder` read one embedding, which is also the head.
    """
    cells.check_cell(name, f"{strategy},stages=cut")


class Normed(nn.Module):
    """Convolutions, BatchNorm and skips: no loop, and statistics that change from microbatch to microbatch."""

    @nn.compact
    def __call__(self, x_BHWC: jax.Array, train: bool) -> jax.Array:
        for features in (4, 8):
            y = nn.Conv(features, (3, 3), use_bias=False)(x_BHWC)
            y = nn.relu(nn.BatchNorm(use_running_average=not train)(y))
            x_BHWC = jnp.concatenate([x_BHWC, y], -1)
        return nn.Dense(5)(x_BHWC.mean((1, 2)))


def normed() -> tuple[jp.Model, Any]:
    draw = np.random.default_rng(0)
    batch = {
        "x": draw.normal(size=(ROWS, 6, 6, 3)).astype(np.float32),
        "y": draw.integers(5, size=ROWS),
        "w": weights(),
    }

    def loss(apply: Any, batch: Any) -> jp.Mean:
        logits = apply(batch["x"], train=apply.train)
        return weighted(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]), batch)

    return jp.from_linen(Normed(), loss, batch), batch


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.battery)])
def test_batch_norm(tensor: int) -> None:
    """Statistics change by microbatch as without a pipeline, and are the same on every rank.

    Under `tensor`, whose ranks have parts of the statistics, they were once refused: the last stage gathered them.
    """
    model, batch = normed()
    single = make_step(model, "single,microbatches=4", 1)
    rules = {"(Conv|BatchNorm).*": -1} if tensor > 1 else None
    pipelined = jp.make_train_step(
        model, SGD, f"pipe=2,tensor={tensor},microbatches=4", mesh=jax.devices()[: 2 * tensor], rules=rules
    )
    assert pipelined.layout.storage.cut
    states = [step.init(jax.random.key(0)) for step in (single, pipelined)]
    for _ in range(2):
        states = [step(state, batch)[0] for step, state in zip((single, pipelined), states, strict=True)]
    pairs = list(zip((single, pipelined), states, strict=True))
    ours, theirs = (jax.device_get((step.params(s), s.variables)) for step, s in pairs)
    assert len(jax.tree.leaves(ours[1])) == 4
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), ours, theirs)
    copies = [[np.asarray(shard.data) for shard in x.addressable_shards] for x in jax.tree.leaves(states[1].variables)]
    assert all((shards[0] == shard).all() for shards in copies for shard in shards)
    losses = [float(step.evaluate(s, batch)["loss"]) for step, s in pairs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# -- what ranks hold ---------------------------------------------------------------------------------------------------


def test_a_rank_holds_its_part_of_parameters_and_optimizer() -> None:
    model, _ = model_and_batch("unet")
    step = make_step(model, "pipe=4,microbatches=4", 4, optax.adam(1e-3))
    state = step.abstract_state()
    num_params = sum(x.size for x in jax.tree.leaves(jax.eval_shape(model.create, jax.random.key(0))[0]))
    held = lambda tree: sum(math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))
    for tree, copies in ((state.params, 1), (state.optimizer[0], 2)):
        # A quarter, and leaves of which no dim divides, which are small: a bias of 2.
        assert held(tree) <= copies * (num_params / 4 + 200)
    assert step.layout.bytes["params"] == 4 * held(state.params)


def test_a_recomputed_stage_keeps_the_message_it_gets() -> None:
    """If a stage is recomputed, the stash holds its message alone.

    This holds for halves as well: I recomputes, and its residuals for W wait from I to W alone.
    """
    model, batch = model_and_batch("irregular")
    slot_sizes, message_sizes = [], []
    for remat in ("none", "layer"):
        step = make_step(model, f"pipe=2,microbatches=2,remat={remat},schedule=zb-h1", 2)
        slot_sizes.append(slot_bytes(step, batch))
        message_sizes.append(max(stage.incoming_packing.bytes for stage in stages(step.traced(batch).program)))
    assert slot_sizes[1] <= message_sizes[1] < slot_sizes[0] / 4


@pytest.mark.filterwarnings("ignore:the optimizer multiplies")
@pytest.mark.battery
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_optimizers_see_logical_leaves(name: str) -> None:
    (model, batch), device = model_and_batch("irregular"), one_device("irregular")
    step = make_step(model, "pipe=2,fsdp=2,microbatches=2", 4, OPTIMIZERS[name]())
    state = step.init(jax.random.key(0), params=device.first)
    _, expected_params = device.train(OPTIMIZERS[name](), batch, 4, 2)
    for _ in range(2):
        state, _ = step(state, batch)
    for ours, theirs in zip(*map(jax.tree.leaves, (step.params(state), expected_params)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-5)


# -- the cut -----------------------------------------------------------------------------------------------------------


def equations(name: str) -> list[Any]:
    """Return the equations of a model's loss on two rows."""
    model, batch = model_and_batch(name)
    params, variables = jax.eval_shape(model.create, jax.random.key(0))
    rows = jax.tree.map(lambda x: x[:2], batch)
    return list(jx.trace(lambda p, b: model.call(p, variables, b, None)[0]["loss"].total, params, rows)[0].eqns)


@pytest.mark.parametrize("name", ["irregular", "unet"])
def test_the_cut_is_the_best(name: str) -> None:
    """No other two cuts have a shorter longest stage."""
    eqns = equations(name)
    sums, enter = np.concatenate([[0], np.cumsum(times(eqns))]), 2 * LINK * crossing(eqns)

    def longest(i: int, j: int) -> float:
        return max(sums[i], sums[j] - sums[i] + enter[i], sums[-1] - sums[j] + enter[j])

    parts = stages_of(eqns, 3)
    assert [eqn for part in parts for eqn in part] == eqns
    cut_time = longest(len(parts[0]), len(parts[0]) + len(parts[1]))
    bounds = range(1, len(eqns))
    assert cut_time == pytest.approx(min(longest(i, j) for i in bounds for j in bounds if i < j))


@pytest.mark.parametrize("update", ["set", "add", "max"])
def test_a_scatter_takes_the_time_of_the_array_that_it_writes(update: str) -> None:
    """A scatter once took next to no time: that of its nested program, a function of two scalars."""
    scatter = lambda x, i: jnp.sin(getattr(x.at[i], update)(1.0)) @ x.T
    eqns = jx.trace(scatter, jnp.zeros((64, 32)), jnp.zeros(8, jnp.int32))[0].eqns
    (scatter_time,) = (t for eqn, t in zip(eqns, times(eqns), strict=True) if eqn.primitive.name.startswith("scatter"))
    assert scatter_time == 3 * 2 * 4 * 64 * 32


def test_a_program_grows_with_its_stages_and_not_with_their_ranks() -> None:
    """The program has each stage's forward and backward once: as many products on two ranks as on four."""
    model, batch = model_and_batch("irregular")

    def products(text: str, devices: int) -> int:
        return str(make_step(model, text, devices).trace(batch)).count("dot_general[")

    on_2, on_4 = products("pipe=2,microbatches=4", 2), products("pipe=4,microbatches=4", 4)
    assert 13 * 3 - 1 <= on_2 <= on_4 <= 13 * 3 + 2


def test_what_a_device_sends_and_waits_for_is_counted_once() -> None:
    """A device runs its own stages. All stages were once counted for it, p times what a device sends."""
    model, batch = model_and_batch("irregular")
    step = make_step(model, "pipe=4,fsdp=2,microbatches=4", 8)
    jaxpr = step.trace(batch)
    traced_ledger = Ledger.from_jaxpr(jaxpr, step.mesh)
    closed_form = expected(step, batch)
    assert traced_ledger.by("kind", "axes") == closed_form.by("kind", "axes")
    # Ranks that use a leaf gather it in the forward and in the backward of each microbatch, without padding.
    traced = step.traced(batch)
    sizes = [step.layout.leaves[i].local for i in range(len(step.layout.leaves))]
    leaf_bytes = lambda leaves: sum(4 * math.prod(sizes[i].stored) for i in leaves if sizes[i].dim is not None)
    rank_bytes = [leaf_bytes(leaves) for leaves in used(traced.program, traced.schedule)]
    largest, total = max(rank_bytes), sum(rank_bytes)
    assert largest < traced_ledger.total(kind="all-gather", axes=("fsdp",)) / 4 <= 2 * largest < total
    paces = re.findall(r"runs_4_paces_(\d+)_of_(\d+)_on_(\d)", step.trace(batch).pretty_print(name_stack=True))
    assert sum(int(n) for n, _, _ in paces) == int(paces[0][1])  # one operation determines the length of each slot
    assert {rank for _, _, rank in paces} == set("0123")


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("irregular", ["block2", "block7", "block12"]),
        pytest.param("unet", "Block_1:Block_2:Block_4/Conv_1", marks=pytest.mark.battery),
        ("irregular", [2, 5, 5, 1]),
    ],
)
def test_stages_begin_where_the_user_says(name: str, cuts: Any) -> None:
    """A stage begins at the first use of a parameter below its path, or has the given number of blocks."""
    model, batch = model_and_batch(name)
    strategy = jp.Strategy(pipe=4, microbatches=2, stages=cuts)
    assert jp.Strategy.parse(str(strategy)) == strategy
    step = jp.make_train_step(model, SGD, strategy, mesh=jax.devices()[:4])
    traced = step.traced(batch)
    names = [[step.layout.leaves[i].path for i in leaves] for leaves in used(traced.program, traced.schedule)]
    points = strategy.cuts if isinstance(cuts, str) or isinstance(cuts[0], str) else ("block2", "block7", "block12")
    for earlier, stage, path in zip(names, names[1:], points, strict=False):
        assert any(name.startswith(f"{path}/") for name in stage)
        assert not any(name.startswith(f"{path}/") for name in earlier)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "devices", "message"),
    [
        ("pipe=2,context=2,attention=ring,microbatches=4", 4, "attention='ring': pipe=2 cuts the program"),
        ("pipe=8,chunks=16,microbatches=8", 8, "makes 128 stages of a loss that has .* operations"),
        ("pipe=2,stages=layers,microbatches=4", 2, "stages='cut', which makes stages of any program"),
        ("data=2,stages=cut", 2, "stages='cut' without a pipeline"),
        (
            "pipe=2,microbatches=2,stages=block44",
            2,
            "below 'block44' .did you mean 'block4'.*paths of modules",
        ),
        ("pipe=2,microbatches=2,stages=laeyrs", 2, "no parameter lies below 'laeyrs'.*or auto, layers, cut"),
        ("pipe=2,stages=a::b", 2, "stages='a::b' is unknown; use one of auto, layers, cut or paths of modules"),
        ("pipe=2,microbatches=2,stages=block3:block4", 2, "makes 3 stages and pipe=2 x chunks=1 has 2; name 1 modules"),
        (
            "pipe=3,microbatches=2,stages=block4:block3",
            3,
            "can begin at 'block3'.*begins .'block4'.*in the order",
        ),
        (
            "pipe=2,microbatches=2,stages=6:6",
            2,
            "6:6' gives 12 blocks to 2 stages, and no lists.*: 13 .block.;",
        ),
        ("pipe=2,microbatches=2,stages=13:0", 2, "leaves a stage without blocks"),
        ("pipe=2,microbatches=2,stages=block0", 2, "no stage can begin at 'block0'.*without the first"),
    ],
)
def test_refused(strategy: str, devices: int, message: str) -> None:
    model, batch = model_and_batch("irregular")
    with pytest.raises(ValueError, match=message):
        make_step(model, strategy, devices).trace(batch)


def test_a_variable_of_two_stages_is_refused() -> None:
    """The stage that reads the variable runs another microbatch than the stage that changes it."""

    def loss(params: Any, variables: Any, batch: Any, key: Any) -> Any:
        x = batch["x"] * variables["scale"]
        for w in params:
            x = jnp.tanh(x @ w)
        return weighted(x, batch), {"scale": variables["scale"] * 0.9 + 0.1 * jnp.abs(x).max()}

    init = lambda key: ([jnp.ones((8, 12)), jnp.ones((12, 20)), jnp.ones((20, 8))], {"scale": jnp.ones(())})
    batch = {"x": np.ones((ROWS, 8), np.float32), "w": weights()}
    step = make_step(jp.Model(init=init, loss=loss, stateful=True), "pipe=3,microbatches=2", 3)
    with pytest.raises(ValueError, match="variable scale is changed in stage 2 of pipe=3 and read in stage 0"):
        step.trace(batch)


@pytest.mark.parametrize(
    "strategy",
    [
        "pipe=4,microbatches=4,remat=layer",
        pytest.param("pipe=2,chunks=2,microbatches=4,schedule=zb-v,remat=layer", marks=pytest.mark.battery),
    ],
)
def test_callbacks_come_once_a_microbatch_and_frozen_leaves_stay(strategy: str) -> None:
    widths, calls = [16, 24, 12, 20, 8], list[int]()

    def init(key: jax.Array) -> Any:
        return {f"w{i}": jax.random.normal(key, shape) for i, shape in enumerate(itertools.pairwise(widths))}

    def loss(params: Any, batch: Any, key: jax.Array | None) -> jp.Mean:
        x = batch["x"]
        for i in range(4):
            x = jnp.tanh(x @ params[f"w{i}"])
            jax.debug.callback(lambda _, i=i: calls.append(i), x.sum())
        return weighted(x**2, batch)

    batch = {"x": np.random.default_rng(0).normal(size=(ROWS, 16)).astype(np.float32), "w": weights()}
    trainable = lambda path: path != "w1"
    mesh = jax.devices()[: 4 if "pipe=4" in strategy else 2]
    step = jp.make_train_step(jp.Model(init=init, loss=loss), SGD, strategy, mesh=mesh, trainable=trainable)
    state = step.init(jax.random.key(0))
    old_params = jax.device_get(step.params(state))
    calls.clear()
    state, _ = step(state, batch)
    new_params = jax.device_get(step.params(state))
    jax.effects_barrier()
    assert sorted(calls) == sorted([0, 1, 2, 3] * 4)
    assert [name for name in old_params if not (old_params[name] == new_params[name]).all()] == ["w0", "w2", "w3"]
