"""The cost of pipelines, their errors, and optimizers on leaves that stages store in another shape.

Memory is flat in microbatches, and the program's size is flat in depth. `schedule_cells.py` has the messages.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import OPTIMIZERS, OneDevice
from flax import nnx
from schedule_cells import LENGTH, VOCAB, batch_of, experts, kinds, scanned
from zoo import cross_entropy

import jaxpar as jp
from jaxpar.hardware import target
from jaxpar.inspect.ledger import Ledger
from jaxpar.inspect.memory import saved
from jaxpar.models import llama

SGD = optax.sgd(0.02, momentum=0.9)
TUNERS = {**OPTIMIZERS, "adaptive-clip": lambda: optax.chain(optax.adaptive_grad_clip(0.05), optax.sgd(0.1))}


def make_step(model: jp.Model, text: str, optimizer: Any = SGD, devices: int = 4) -> Any:
    return jp.make_train_step(model, optimizer, text, mesh=jax.devices()[:devices])


def plain(layers: int, dim: int, hidden: int, loop: bool = False) -> jp.Model:
    """Return layers of two matrices and a scale, scanned or in a Python loop; the embedding is the head."""

    def init(key: jax.Array) -> Any:
        draw = lambda i, *shape: shape[-2] ** -0.5 * jax.random.normal(jax.random.fold_in(key, i), shape)

        def layer_params(start: int, *stack: int) -> Any:
            up, down = draw(start, *stack, dim, hidden), draw(start + 1, *stack, hidden, dim)
            return {"up": {"kernel": up}, "down": {"kernel": down}, "scale": jnp.ones((*stack, dim))}

        stack = [layer_params(2 * i + 1) for i in range(layers)] if loop else layer_params(1, layers)
        return {"embed": draw(0, VOCAB, dim), "layers": stack}

    def loss(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return x + w["scale"] * (jnp.tanh(x @ w["up"]["kernel"]) @ w["down"]["kernel"]), None

        x = params["embed"][batch["tokens"][:, :-1]]
        if loop:
            for w in params["layers"]:
                x, _ = layer(x, w)
        else:
            x, _ = jax.lax.scan(layer, x, params["layers"])
        return cross_entropy(x @ params["embed"].T, batch["tokens"][:, 1:])

    return jp.Model(init=init, loss=loss)


# -- optimizers --------------------------------------------------------------------------------------------------------


@functools.cache
def model_of_kind(kind: str) -> jp.Model:
    return experts() if kind == "scanned" else plain(4, 16, 20, loop=True)  # Adafactor factors dims of 16 or more


@functools.cache
def one_device(kind: str) -> OneDevice:
    return OneDevice(model_of_kind(kind))


@functools.cache
def tuned(kind: str, optimizer: str) -> Any:
    """Return the parameters of one device after three steps."""
    return one_device(kind).train(TUNERS[optimizer](), batch_of(8), 8, 3)[1]


STACK_CELLS = [
    ("scanned", "pipe=2,chunks=2,microbatches=2,fsdp=2,zero=1"),  # 9 layers in 4 stages: two dims, and padding
    ("rolled", "zero3"),
    ("rolled", "pipe=2,microbatches=2,fsdp=2,zero=2"),
]


@pytest.mark.filterwarnings("ignore:the optimizer multiplies")  # it does the same on one device
@pytest.mark.xdist_group("stages optimizers")  # they share gradients of one device
@pytest.mark.parametrize(
    ("kind", "strategy", "optimizer"),
    [(*STACK_CELLS[i % 3], name) for i, name in enumerate(TUNERS)],
)
def test_optimizer(kind: str, strategy: str, optimizer: str) -> None:
    """Optimizers that read shapes and norms treat leaves stored as stacks or in stages as they do on one device."""
    step = make_step(model_of_kind(kind), strategy, TUNERS[optimizer](), 4)
    initial, expected = one_device(kind).first, tuned(kind, optimizer)
    state = step.init(jax.random.key(0), params=initial)
    batch = batch_of(8)
    for _ in range(3):
        state, _ = step(state, batch)
    changes = lambda tree: [
        np.asarray(b) - np.asarray(a) for a, b in zip(*map(jax.tree.leaves, (initial, tree)), strict=True)
    ]
    for ours, theirs in zip(changes(model_of_kind(kind).unwrap(step.params(state))), changes(expected), strict=True):
        # Compare norms: where a gradient is nearly zero, Adam divides rounding by rounding, and single elements differ.
        assert np.linalg.norm(ours - theirs) <= 2e-3 * np.linalg.norm(theirs) + 1e-7


@pytest.mark.xdist_group("stages optimizers")
def test_masks_by_path_see_the_models_own_tree() -> None:
    """A mask that reads the model's tree gets it, although the layers of its loop are stored as one stack."""
    decayed: list[int] = []

    def kernels(params: Any) -> Any:
        flat, tree = jax.tree_util.tree_flatten_with_path(params)
        mask = [jax.tree_util.keystr(path).endswith("['kernel']") and x.ndim == 2 for path, x in flat]
        decayed.append(sum(mask))
        return jax.tree.unflatten(tree, mask)

    step = make_step(model_of_kind("rolled"), "zero3", optax.adamw(1e-2, mask=kernels))
    device = one_device("rolled")
    state, _ = step(step.init(jax.random.key(0), params=device.first), batch_of(8))
    _, expected = device.train(optax.adamw(1e-2, mask=kernels), batch_of(8), 8, 1)
    for ours, theirs in zip(
        jax.tree.leaves(model_of_kind("rolled").unwrap(step.params(state))), jax.tree.leaves(expected), strict=True
    ):
        assert np.allclose(ours, theirs, atol=1e-4)
    assert decayed[-1] == 4 * 2


# -- cost --------------------------------------------------------------------------------------------------------------


@functools.cache
def temporaries(schedule: str, chunks: int, microbatches: int) -> int:
    """Return the bytes of the compiled step's temporaries, with one row of 64 positions per microbatch."""
    model = plain(layers=8, dim=48, hidden=96)
    step = make_step(model, f"pipe=4,schedule={schedule},chunks={chunks},microbatches={microbatches}")
    batch = {"tokens": jax.ShapeDtypeStruct((microbatches, 65), jnp.int32)}
    return step.compile(batch).memory_analysis().temp_size_in_bytes


@pytest.mark.xdist_group("stages memory")  # they share GPipe's
@pytest.mark.parametrize("chunks", [1, 2])
def test_memory_is_flat_in_microbatches(chunks: int) -> None:
    assert temporaries("1f1b", chunks, 32) <= 1.05 * temporaries("1f1b", chunks, 8)
    assert temporaries("1f1b", chunks, 32) < 0.5 * temporaries("gpipe", 1, 32)


@pytest.mark.battery
@pytest.mark.parametrize(("schedule", "chunks"), list(kinds()))
@pytest.mark.parametrize("devices", ["cpu", pytest.param("4xH100", marks=pytest.mark.cuda_compiler)])
def test_temporaries_are_what_the_schedule_holds(devices: str, schedule: str, chunks: int) -> None:
    """The stashes, from F to B or W and from I to W, are nearly all temporaries; only GPipe's grow with m."""
    mesh, sizes = jax.devices()[:4] if devices == "cpu" else target(devices).devices, []
    for m in (16, 48):
        text = f"pipe=4,schedule={schedule},chunks={chunks},microbatches={m}"
        step = jp.make_train_step(plain(layers=16, dim=64, hidden=128), optax.sgd(0.1), text, mesh=mesh)
        batch = {"tokens": jax.ShapeDtypeStruct((m, 257), jnp.int32)}
        stashed, temporary_bytes = saved(step, batch), step.compile(batch).memory_analysis().temp_size_in_bytes
        # With one layer per chunk, no loop is around the reads of the stash, and XLA's CPU compiler copies it.
        has_one_layer = schedule == "1f1b-overlap" and chunks == 4 and devices == "cpu"
        assert stashed <= temporary_bytes <= (2.2 if has_one_layer else 1.6) * stashed
        sizes.append(temporary_bytes)
    with_16, with_48 = sizes
    assert with_48 > 2.5 * with_16 if schedule == "gpipe" else with_48 < 1.01 * with_16


@pytest.mark.parametrize("strategy", ["zero3", "pipe=2,microbatches=2"])
def test_program_of_a_loop_is_flat_in_depth(strategy: str) -> None:
    """Equations are counted before the compiler unrolls loops."""
    step_of = lambda layers: make_step(plain(layers, 12, 20, loop=True), strategy, devices=2)
    shallow, deep = (str(step_of(layers).trace(batch_of(4))).count(" = ") for layers in (4, 8))
    assert deep <= 1.1 * shallow


def test_ranks_share_the_rows_of_the_epilogue() -> None:
    """If rows divide among the ranks, no rank computes the logits of a whole microbatch."""
    step = make_step(plain(4, 12, 20), "pipe=4,microbatches=2")
    text = {rows: str(step.trace(batch_of(2 * rows))) for rows in (4, 5)}
    logits = lambda rows: f"f32[{rows},{LENGTH - 1},{VOCAB}]"
    assert logits(1) in text[4]
    assert logits(4) not in text[4]
    assert logits(5) in text[5]  # 5 rows do not divide among 4 ranks


@pytest.mark.parametrize(("zero", "schedule"), [(2, "1f1b"), (2, "zb-h1"), (3, "zb-h1")])
def test_parameters_that_no_stage_owns_move_once_a_step(zero: int, schedule: str) -> None:
    """Their gradients were once scattered for every microbatch: 24 of 51 s of a 405B step on 1,024 devices."""
    sent = []
    for m in (2, 8):
        step = make_step(plain(4, 16, 20), f"pipe=2,fsdp=4,zero={zero},schedule={schedule},microbatches={m}", devices=8)
        ledger = Ledger.from_jaxpr(step.trace(batch_of(32)), step.mesh)
        sent.append({kind: ledger.total(kind=kind, axes=("pipe", "fsdp")) for kind in ("all-gather", "reduce-scatter")})
    assert sent == [dict.fromkeys(sent[0], 4 * VOCAB * 16)] * 2


def test_layers_of_padding_are_said() -> None:
    with pytest.warns(UserWarning, match=r"5 layers in 4 x 1 chunks of 2 take the time and the memory of 8"):
        make_step(plain(5, 16, 20), "pipe=4,microbatches=4").trace(batch_of(8))


# -- errors ------------------------------------------------------------------------------------------------------------


class Uneven(nnx.Module):
    """Blocks of the same shapes whose programs differ."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, 12, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(12, 12, rngs=rngs) for _ in range(4)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = x + (jnp.tanh if number == 2 else jnp.sin)(block(x))
        return self.embed.attend(x)


@pytest.mark.parametrize(
    ("model", "strategy", "parts"),
    [
        (
            lambda: jp.from_nnx(Uneven, llama.loss),
            "pipe=4,microbatches=4",
            ("blocks/*", "sin", "tanh", "test_stages.py"),
        ),
        (scanned, "pipe=4,chunks=3,microbatches=4", ("12 stages", "9 layers", "at most 9")),
        (scanned, "pipe=4,chunks=2,microbatches=6", ("chunks=2", "pipe=4", "microbatches=6", "8 microbatches")),
        (scanned, "pipe=4,microbatches=3", ("batch has 16 rows", "3 microbatches", "multiple of 3")),
        (
            lambda: jp.Model(init=lambda key: jnp.ones(3), loss=lambda p, batch, key: (p.sum() * batch["mask"]).mean()),
            "pipe=4,microbatches=4",
            ("pipe=4", "4 stages", "3 operations"),
        ),
    ],
)
def test_errors(model: Any, strategy: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        make_step(model(), strategy).trace(batch_of(16))
    assert not [part for part in parts if not re.search(re.escape(part), str(error.value))], error.value


@pytest.mark.parametrize("strategy", ["pipe=2,tensor=2,fsdp=2,microbatches=2", "fsdp=8"])
def test_a_loop_is_handed_out_without_gathering_its_stacks(strategy: str, capfd: pytest.CaptureFixture[str]) -> None:
    """XLA once reported "Involuntary full rematerialization" of every stack: layers were split along another dim."""
    step = make_step(plain(8, 64, 256, loop=True), strategy, devices=8)
    params = step.params(step.init(jax.random.key(0)))
    assert "nvoluntary" not in capfd.readouterr().err
    at_rest = {x.sharding.shard_shape(x.shape) for x in (layer["up"]["kernel"] for layer in params["layers"])}
    assert {8 * np.prod(shape) for shape in at_rest} == {64 * 256}


def drawn(matrices: str = "w", **more: Any) -> Any:
    """Return an `init` of an embedding, four blocks with these matrices, and the leaves that `more` gives."""
    draw = lambda key, i, *shape: 0.3 * jax.random.normal(jax.random.fold_in(key, i), shape)
    return lambda key: {
        "embed": draw(key, 9, VOCAB, 8),
        "layers": [{name: draw(key, i + 4 * j, 8, 8) for j, name in enumerate(matrices)} for i in range(4)],
        **{name: draw(key, i + 10, *shape) for i, (name, shape) in enumerate(more.items())},
    }


def sums_over_layers_and_weights(params: Any, x: jax.Array) -> jax.Array:
    extra = 0.0
    for layer in params["layers"]:
        x = x + jax.checkpoint(lambda x, w: jax.nn.relu(x @ w))(x, layer["w"])
        extra = extra + (x**2).mean()  # summed over layers, from zero
    return (x**3).mean() + 0.1 * extra + 0.01 * sum(jnp.sum(w**2) for w in jax.tree.leaves(params))


def shared_table(params: Any, x: jax.Array) -> jax.Array:
    """A table of relative positions that all blocks look up was once computed twice: KeyError."""
    bias = jnp.tanh(params["table"][jnp.arange(x.shape[1]) % 5])
    for layer in params["layers"]:
        x = x + jax.nn.relu((x + bias) @ layer["w"])
    return (x**3).mean()


def weights_scaled_by_a_shared_value(params: Any, x: jax.Array) -> jax.Array:
    """A block's product once came before the `tanh` of the shared leaf that it needs: KeyError."""
    for layer in params["layers"]:
        x = x + jnp.sin(x) @ (layer["w"] * jnp.tanh(params["gain"]))
    return (x**3).mean()


def one_leaf_or_another(params: Any, x: jax.Array) -> jax.Array:
    """Odd blocks read both leaves, even ones read `w` twice.

    `w` was once read from its stack and layer by layer, and the stack's gradient was lost.
    """
    for number, layer in enumerate(params["layers"]):
        x = x + jnp.tanh(x @ layer["w"]) @ layer["v" if number % 2 else "w"]
    return (x**3).mean()


def block_before_the_last(params: Any, x: jax.Array) -> jax.Array:
    """Two streams take turns, so that two blocks are one round. This was once an AttributeError."""
    y = x[:, ::-1]
    for layer in params["layers"]:
        x, y = y, x + jnp.tanh(y @ layer["w"])
    return (x * y).mean()


def scanned_twice(params: Any, x: jax.Array) -> jax.Array:
    """The bias [4, 41] is sharded by layers, and two scans read it whole. The second gradient once counted twice."""
    layer = lambda x, w: (x + jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"], None)
    for _ in range(2):
        x, _ = jax.lax.scan(layer, x, {name: params[name] for name in ("up", "bias", "down")})
    return (x**2).mean()


@pytest.mark.parametrize(
    ("run", "leaves", "strategy", "rounds"),
    [
        (sums_over_layers_and_weights, {}, "pipe=2,microbatches=2", ""),
        (shared_table, {"table": (5, 8)}, "pipe=2,microbatches=2", ""),
        (weights_scaled_by_a_shared_value, {"gain": (8,)}, "pipe=2,microbatches=2", ""),
        (one_leaf_or_another, {"matrices": "wv"}, "fsdp=2", "layers 0 to 3 scanned in 2 rounds of 2"),
        (block_before_the_last, {}, "fsdp=2", "layers 0 to 3 scanned in 2 rounds of 2"),
        (scanned_twice, {"matrices": "", "up": (4, 8, 41), "bias": (4, 41), "down": (4, 41, 8)}, "fsdp=2", ""),
    ],
)
def test_loops_that_gave_errors_or_wrong_gradients(run: Any, leaves: Any, strategy: str, rounds: str) -> None:
    model = jp.Model(drawn(**leaves), lambda params, batch, key: run(params, params["embed"][batch["tokens"]]))
    report = jp.verify(model, strategy, batch_of(8), mesh=jax.devices()[:2])
    assert report.ok, report
    if rounds:
        step = make_step(model, "pipe=2,microbatches=2", devices=2)
        step.trace(batch_of(8))
        assert step.layout.loops["layers/*"].endswith(f"one stack: {rounds}")


@pytest.mark.parametrize("remat", [False, True])
def test_rules_of_differentiation_are_looked_at(remat: bool) -> None:
    """Blocks that differ in the rule of a derivative alone were once taken for the same program.

    They are stored as a stack and read one by one.
    """

    def scaled(x: jax.Array, by: float) -> jax.Array:
        identity = jax.custom_jvp(lambda x: x)
        identity.defjvp(lambda primals, tangents: (primals[0], tangents[0] * by))
        return identity(x)

    def loss(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        x = params["embed"][batch["tokens"]]
        for number, layer in enumerate(params["layers"]):
            block = lambda x, w, by=number + 1.0: scaled(x + jnp.tanh(x @ w), by)
            x = (jax.checkpoint(block) if remat else block)(x, layer["w"])
        return (x**3).mean()

    model = jp.Model(drawn(), loss)
    report = jp.verify(model, "fsdp=2", batch_of(8), mesh=jax.devices()[:2])
    assert report.ok, report
    with pytest.raises(ValueError, match="needs layers with the same program"):
        make_step(model, "pipe=2,microbatches=2", devices=2).trace(batch_of(8))


def test_pp_has_microbatches_enough() -> None:
    # `pp` once ran one microbatch, without a warning: each of 8 ranks idled 87.5% of a step.
    step = jp.make_train_step(scanned(), SGD, "pp")
    assert (str(step.strategy), step.schedule.microbatches) == ("pipe=-1,microbatches=32", 32)
    assert make_step(scanned(), "pp,microbatches=2").schedule.microbatches == 2
    assert make_step(scanned(), "pp", devices=1).strategy.microbatches == 1
    assert make_step(scanned(), "ddp,microbatches=-1").strategy.microbatches == 1
    with pytest.raises(ValueError, match=r"batch has 8 rows; .* 16 microbatches .*: use microbatches=8, or pad"):
        make_step(scanned(), "pp").check(batch_of(8))
    with pytest.warns(match=r"pipe=4 with microbatches=1: .* each idles 75% of a step; use microbatches=16 \(16%\)"):
        make_step(scanned(), "pipe=4")
