"""Optimizers of whole matrices: an update with owners equals one device's, and sends less than a gather would."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from poison import poison_empty

import jaxpar as jp
from jaxpar.hardware.devices import target
from jaxpar.inspect.check.findings import check
from jaxpar.inspect.explain import explain
from jaxpar.inspect.ledger import Ledger
from jaxpar.numerics.matrices.owners import Owners

D, F, LAYERS, ROWS = 16, 48, 6, 24


def init(key: jax.Array) -> Any:
    """Return a scanned stack, whose layers 8 ranks do not divide, and the layers of a loop, some of the same shape."""
    shapes = {
        "into": (D, D),
        "stack": {"norm": (LAYERS, D), "up": (LAYERS, D, F), "down": (LAYERS, F, D)},
        "blocks": [{"a": (D, F), "b": (F, D)} for _ in range(3)],
        "head": (D, 4),
    }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    draw = lambda k, s: jax.random.normal(k, s) / s[-2] ** 0.5 if s != (LAYERS, D) else jnp.ones(s)
    return jax.tree.unflatten(tree, [draw(k, s) for k, s in zip(keys, leaves, strict=True)])


def loss(params: Any, batch: Any, key: Any) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x * w["norm"] @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, batch["x"] @ params["into"], params["stack"])
    for block in params["blocks"]:
        x = x + jnp.tanh(x @ block["a"]) @ block["b"]
    return jnp.square(x @ params["head"] - batch["y"]).mean()


MODEL = jp.Model(init, loss, rows="independent")
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(ROWS, D)).astype(np.float32), "y": RNG.normal(size=(ROWS, 4)).astype(np.float32)}


def shampoo(rate: float) -> optax.GradientTransformation:
    """Return Shampoo for the last two dims of each leaf (Gupta et al. 2018, arXiv:1802.09568, algorithm 1)."""

    def power(m: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(m + 0.1 * jnp.eye(m.shape[-1]))
        return (vectors * values[..., None, :] ** -0.25) @ vectors.mT

    is_matrix = lambda x: (x.ndim > 1 and x.shape[0] != LAYERS) or x.ndim == 3

    def init(params: Any) -> Any:
        zeros = lambda x, n: jnp.zeros((*x.shape[:-2], n, n)) if is_matrix(x) else jnp.zeros(())
        return {
            "left": jax.tree.map(lambda x: zeros(x, x.shape[-2] if x.ndim > 1 else 1), params),
            "right": jax.tree.map(lambda x: [zeros(x, x.shape[-1] if x.ndim > 1 else 1)], params),  # a list, as in SOAP
        }

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        left = jax.tree.map(lambda g, s: s + g @ g.mT if is_matrix(g) else s, updates, state["left"])
        right = jax.tree.map(lambda g, s: [s[0] + g.mT @ g] if is_matrix(g) else s, updates, state["right"])
        step = lambda g, a, b: -rate * (power(a) @ g @ power(b[0]) if is_matrix(g) else g)
        return jax.tree.map(step, updates, left, right), {"left": left, "right": right}

    return optax.GradientTransformation(init, update)


def muon(rate: float, model: Any, batch: Any, **options: Any) -> optax.GradientTransformation:
    return optax.contrib.muon(rate, ns_steps=3, muon_weight_dimension_numbers=jp.matrices(model, batch), **options)


def galore(rate: float) -> optax.GradientTransformation:
    """Return GaLore for leaves of two dims, with new projections every two steps.

    The epsilon of its Adam is large, so that rounding errors of small gradients do not grow.
    """
    dims = lambda params: jax.tree.map(
        lambda p: optax.contrib.GaLoreDimensionNumbers() if p.ndim == 2 and p.shape[0] != LAYERS else None, params
    )
    base = optax.scale_by_adam(eps=1e-2)
    return optax.contrib.galore(rate, 4, 2, base_optimizer=base, weight_dimension_numbers=dims)


OPTIMIZERS = {
    "muon": lambda model, batch: optax.chain(
        optax.clip_by_global_norm(0.5), muon(1e-2, model, batch, weight_decay=0.1, consistent_rms=0.2)
    ),
    "shampoo": lambda model, batch: shampoo(1e-2),
    "galore": lambda model, batch: galore(1e-3),
}


def moe_init(key: jax.Array) -> Any:
    draw = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape) / shape[-2] ** 0.5
    experts = {"up": draw(0, LAYERS, 4, D, F), "down": draw(1, LAYERS, 4, F, D)}
    return {"in": draw(2, D, D), "layers": {"router": draw(3, LAYERS, D, 4), "experts": experts}, "out": draw(4, D, 4)}


def moe_loss(params: Any, batch: Any, key: Any) -> jax.Array:
    """Return the loss of a model that routes every token, one per row, to two of four experts."""

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        y, _ = jp.experts(
            x[:, None],
            (x @ w["router"])[:, None],
            w["experts"],
            k=2,
            expert=lambda e, rows: jnp.tanh(rows @ e["up"]) @ e["down"],
        )
        return x + y[:, 0], None

    x, _ = jax.lax.scan(layer, batch["x"] @ params["in"], params["layers"])
    return jnp.square(x @ params["out"] - batch["y"]).mean()


def llama() -> jp.Model:
    from jaxpar.models import llama

    config = llama.Config(vocab=40, dim=32, layers=6, heads=8, kv_heads=4, ffn=24)
    return jp.from_nnx(lambda rngs: llama.Llama(config, rngs=rngs), llama.loss, llama.RULES)


MODELS = {
    "layers": (MODEL, BATCH),
    "experts": (jp.Model(moe_init, moe_loss, rows="independent"), BATCH),
    "llama": (llama(), {"tokens": RNG.integers(40, size=(ROWS, 17)).astype(np.int32)}),
}


def step_of(optimizer: str, strategy: str, devices: int = 8, model: str = "layers") -> Any:
    return jp.make_train_step(
        MODELS[model][0], OPTIMIZERS[optimizer](*MODELS[model]), strategy, jax.devices()[:devices]
    )


def trained(optimizer: str, strategy: str, devices: int, model: str = "layers") -> tuple[Any, Any, Owners | None]:
    step = step_of(optimizer, strategy, devices, model)
    state = step.init(jax.random.key(0))
    initial_params = jax.device_get(step.params(state))
    for _ in range(5):
        state, _ = step(state, MODELS[model][1])
    return initial_params, jax.device_get(step.params(state)), step.update.owners


@functools.cache
def one_device(optimizer: str, model: str = "layers") -> tuple[Any, Any]:
    return trained(optimizer, "single", 1, model)[:2]


CELLS = [
    ("muon", "data=2,fsdp=4", 8, "layers"),
    ("muon", "fsdp", 8, "layers"),
    ("galore", "tensor=2,fsdp=4", 8, "layers"),
    ("muon", "expert=2,fsdp=4", 8, "experts"),
]
NUM_DEVICES = {  # 8 for any other strategy
    "fsdp=6": 6,
    "data=2,fsdp=3": 6,
    "fsdp=2": 2,
    "pipe=2,fsdp=2,chunks=3,microbatches=2": 4,
    "pipe=4,microbatches=3": 4,
    "expert=4": 4,
}
BATTERY_CELLS = [
    (optimizer, strategy, devices, model)
    for model, strategies in {
        "layers": "fsdp zero1 zero2 data=2,fsdp=4 tensor=2,fsdp=4 pipe=2,fsdp=4,microbatches=3 ddp fsdp=6 fsdp=2 "
        "data=2,fsdp=3 data=4,fsdp=2,zero=1 data=2,fsdp=4,zero=2 "
        "pipe=2,fsdp=2,chunks=3,microbatches=2 pipe=4,microbatches=3",
        "experts": "expert=2,fsdp=4 fsdp expert=4 data=2,expert=2,fsdp=2",
        "llama": "context=2,fsdp=4 tensor=2,context=2,fsdp=2",
    }.items()
    for optimizer in OPTIMIZERS
    for strategy in strategies.split()
    for devices in [NUM_DEVICES.get(strategy, 8)]
    if (optimizer, strategy, devices, model) not in CELLS
]


@functools.cache
def in_float64(optimizer: str, model: str = "layers") -> Any:
    """Return the parameters after five steps of plain JAX in float64, from the initial parameters of one device."""
    jp_model, batch = MODELS[model]
    tx = OPTIMIZERS[optimizer](jp_model, batch)
    with jax.enable_x64(True):
        to_float64 = lambda tree: jax.tree.map(lambda x: np.float64(x) if x.dtype == np.float32 else x, tree)
        params, rows = to_float64(jp_model.unwrap(one_device(optimizer, model)[0])), to_float64(batch)
        variables = jax.jit(jp_model.create)(jax.random.key(0))[1]

        def mean_loss(params: Any) -> jax.Array:
            mean = jp_model.call(params, variables, rows, jax.random.key(0))[0]["loss"]
            return mean.total / mean.count

        @jax.jit
        def step(params: Any, state: Any) -> Any:
            updates, state = tx.update(jax.grad(mean_loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        state = tx.init(params)
        for _ in range(5):
            params, state = step(params, state)
        return jax.device_get(params)


def assert_same(params: Any, optimizer: str, model: str = "layers") -> None:
    """Assert that trained parameters match float64 to 1e-5 of each leaf's largest change.

    Or to twice the error of one device in float32, if that is larger. Each iteration of Muon multiplies the small
    elements of a gradient by 3.4, and their rounding errors too: one device has an error of 1.3e-5. With Shampoo it has
    1.4e-5, with GaLore 4.5e-5. A change that is added to a parameter rounds at the parameter's scale.
    """
    initial, one_device_params = (MODELS[model][0].unwrap(tree) for tree in one_device(optimizer, model))
    trees = MODELS[model][0].unwrap(params), one_device_params, in_float64(optimizer, model), initial
    for actual, single, expected, start in zip(*map(jax.tree.leaves, trees), strict=True):
        change, single_error = np.abs(expected - start).max(), np.abs(single - expected).max()
        rounding = 5 * np.finfo(np.float32).eps * np.abs(expected).max()
        assert np.abs(actual - expected).max() <= max(1e-5 * change, 2 * single_error) + rounding * (change < 1e-3)


@pytest.mark.filterwarnings("ignore:tensor")
@pytest.mark.parametrize(
    ("optimizer", "strategy", "devices", "model"),
    [*CELLS, *(pytest.param(*cell, marks=pytest.mark.battery) for cell in BATTERY_CELLS)],
)
@pytest.mark.slow
def test_parity(optimizer: str, strategy: str, devices: int, model: str) -> None:
    """Five steps with owners equal five steps on one device. Muon's gradients are clipped by their global norm."""
    initial_params, params, owners = trained(optimizer, strategy, devices, model)
    assert owners is not None
    # Without the experts there are only two matrices, for four ranks.
    has_too_few_matrices = (optimizer, strategy) == ("galore", "expert=4")
    assert bool(owners.bundles) != has_too_few_matrices
    assert_same(params, optimizer, model)
    jax.tree.map(np.testing.assert_array_equal, initial_params, one_device(optimizer, model)[0])


PAIRS = [
    ("zero2", 6, "tensor=2,fsdp=4", 8),  # the one parity test of Shampoo outside the battery, too
    ("tensor=2,fsdp=4", 8, "pipe=2,fsdp=4,microbatches=3", 8),
    ("pipe=2,fsdp=4,microbatches=3", 8, "zero1", 6),
    ("zero1", 6, "ddp", 2),
    ("ddp", 2, "fsdp", 6),
    ("fsdp", 6, "pipe=4,microbatches=3", 4),
    ("pipe=4,microbatches=3", 4, "fsdp", 6),
    ("fsdp", 6, "data=2,fsdp=4", 8),
    ("data=2,fsdp=4", 8, "data=2,fsdp=3", 6),
    ("data=2,fsdp=3", 6, "ddp", 3),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:tensor")
@pytest.mark.parametrize(
    "pair", [PAIRS[0], *(pytest.param(pair, marks=pytest.mark.battery) for pair in PAIRS[1:])], ids=str
)
def test_checkpoints_go_from_owners_to_owners(pair: tuple[str, int, str, int], tmp_path: Path) -> None:
    """Three steps under one strategy, two under another; factors live with owners, are sharded, or are replicated."""
    step = step_of("shampoo", *pair[:2])
    state = step.init(jax.random.key(0))
    for _ in range(3):
        state, _ = step(state, BATCH)
    step.save(tmp_path, state)
    second_step = step_of("shampoo", *pair[2:])
    state = second_step.restore(tmp_path)
    for _ in range(2):
        state, _ = second_step(state, BATCH)
    assert_same(jax.device_get(second_step.params(state)), "shampoo")


def test_factors_at_rest() -> None:
    """A device stores the factors of its own layers if the stack divides, and a part of the factors of other leaves."""
    step = step_of("shampoo", "fsdp", 6)
    state = step.abstract_state().optimizer
    assert state["left"]["stack"]["up"].sharding.spec == jax.P("fsdp", None, None)
    assert state["left"]["blocks"][0]["a"].sharding.shard_shape((18, D)) == (3, D)  # 16 rows and 2 of padding
    local_elements = sum(np.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(state))
    stacks, loops = 2 * LAYERS * (D * D + F * F) // 6, 3 * 2 * (18 * D + F * F) // 6
    small = 3 * D * D + 4 * 4 + 2  # of leaves that are too small to be sharded, and of the norms
    assert local_elements == stacks + loops + small
    assert check(step, BATCH).ok


@pytest.mark.slow
def test_no_result_depends_on_unwritten_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners send rows whose ends nobody writes, and fill the factors that they keep: NaN there changes no bit."""
    (_, expected, _), shapes = trained("shampoo", "fsdp", 2), poison_empty(monkeypatch)
    _, found, _ = trained("shampoo", "fsdp", 2)
    assert {(2, 5376), (3, D, D)} <= {*shapes}  # rows of both owners, and the factors of one
    jax.tree.map(np.testing.assert_array_equal, expected, found)


@pytest.mark.slow
def test_stages_keep_the_factors_of_their_layers() -> None:
    """If each rank has whole matrices, nothing is sent for them. Every rank stored the factors of all layers.

    All ranks have the matrices of the two loops, and divide them.
    """
    step = step_of("shampoo", "pipe=4,microbatches=4", 4)
    state = step.abstract_state().optimizer
    assert state["left"]["stack"]["up"].sharding.shard_shape((8, D, D)) == (2, D, D)  # six layers and two of padding
    assert {(sent.kind, sent.axes) for sent in step.update.owners.sends} == {("all-gather", ("pipe",))}
    assert step.update.owners.notes["blocks/0/a"].startswith("a share on each of 4 replicas of pipe")
    assert step.update.owners.notes["stack/up"] == "whole where they lie: nothing is sent"
    assert check(step, BATCH).ok


@pytest.mark.slow
def test_who_owns_what() -> None:
    """Six layers of two stacks and three of two loops on 8 devices: 18 matrices, at most three on each device."""
    step = step_of("muon", "fsdp")
    (bundle,) = step.update.owners.bundles
    assert sorted(kind.count for kind in bundle.kinds) == [3, 3, 6, 6]
    assert all(sum(v is not None for v in kind.ins) == len(kind.outs) == 1 for kind in bundle.kinds)
    assert step.update.owners.flops * 6 == sum(bundle.flops)
    explanation = step.explain(BATCH)
    remarks = " ".join(explanation.remarks)
    assert "18 matrices dealt out by FLOPs over 8 ranks of fsdp, the busiest has 0.167 of all" in remarks
    assert any("on the busiest device, 0.167 of all matrices" in remark for remark in explanation.remarks)
    assert any(check.strategy == "owners of matrices" for check in explanation.checks)
    sgd_explanation = jp.make_train_step(MODEL, optax.sgd(1e-2), "fsdp").explain(BATCH)
    # The compiled program has loops that run a different number of times on each rank; the busiest counts.
    busiest_flops = explanation.flops["float32"] - sgd_explanation.flops["float32"]
    assert busiest_flops == step.update.owners.flops
    assert jp.make_train_step(MODEL, optax.adamw(1e-2), "fsdp").update.owners is None


@pytest.mark.slow
def test_replicas_divide_matrices() -> None:
    """Six layers of two stacks and three of two loops on two replicas of four ranks: nine or ten matrices each.

    Factors of layers live with their replica, and whole with their owner if the owners divide them.
    """
    step = step_of("muon", "data=2,fsdp=4")
    (bundle,) = step.update.owners.bundles
    assert [(kind.count, kind.share) for kind in bundle.kinds] == [(3, 2), (3, 2), (6, 3), (6, 3)]
    assert max(map(sum, zip(*bundle.counts, strict=True))) == 3
    to_owners, _, *gathers = [(sent.kind, sent.axes, sent.elements) for sent in step.update.owners.sends if sent.axes]
    assert to_owners == ("all-to-all", ("fsdp",), 4 * 3 * D * F // 4)
    assert gathers == [("all-gather", ("data",), 2 * share * D * F // 4) for share in (2, 2, 3, 3)]
    compiled = step.compile(BATCH)
    explanation = explain(step, BATCH, compiled)
    assert any("a share on each of 2 replicas of data, which gather all" in remark for remark in explanation.remarks)
    assert any(check.strategy == "owners of matrices" and check.axes == ("data",) for check in explanation.checks)
    assert check(step, BATCH, compiled).ok
    for strategy, devices, spec in (
        ("data=2,fsdp=3", 6, jax.P(("data", "fsdp"), None, None)),
        ("data=2,fsdp=4", 8, jax.P("data", "fsdp", None)),
        ("data=4,fsdp=2", 8, jax.P(None, "fsdp", None)),
    ):
        state = step_of("shampoo", strategy, devices).abstract_state().optimizer
        assert state["left"]["stack"]["up"].sharding.spec == spec


@pytest.mark.cuda_compiler
@pytest.mark.parametrize("width", [4096, 512])
def test_hosts_divide_matrices_where_that_takes_less(width: int) -> None:
    """Replicas on different hosts divide wide matrices, whose products take longer than their transfer, alone.

    FLOPs grow faster with the width than bytes. Within a host, transfers are faster, so that replicas divide all.
    """
    init = lambda key: {
        "in": jnp.ones((8, width)),
        "stack": jnp.ones((256, width, width)),
        "out": jnp.ones((width, 4)),
    }

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch @ params["in"], params["stack"])
        return jnp.square(x @ params["out"]).mean()

    model, batch = jp.Model(init, loss, rows="independent"), jax.ShapeDtypeStruct((16, 8), jnp.float32)
    for name, divides in (("2x8xH100", width > 512), ("1x16xH100", True)):
        step = jp.make_train_step(model, muon(1e-2, model, batch), "data=2,fsdp=8", target(name).devices)
        assert {bundle.copies for bundle in step.update.owners.bundles} == {("data",) * divides}


@pytest.mark.slow
def test_values_of_several_dtypes() -> None:
    """Factors in bfloat16 and gradients in float32 have one exchange each, both in the closed form."""
    is_matrix = lambda x: x.ndim == 2 and x.shape[0] != LAYERS

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        change = lambda g, q: -0.1 * (q.astype(g.dtype) @ g if is_matrix(g) else g)
        next_factor = lambda g, q: (q + g @ g.mT).astype(q.dtype) if is_matrix(g) else q
        return jax.tree.map(change, grads, state), jax.tree.map(next_factor, grads, state)

    init = lambda params: jax.tree.map(lambda x: jnp.eye(x.shape[0], dtype="bfloat16") if is_matrix(x) else 0, params)
    step, one_device_step = (
        jp.make_train_step(MODEL, optax.GradientTransformation(init, update), strategy, jax.devices()[:devices])
        for strategy, devices in (("fsdp", 4), ("single", 1))
    )
    assert step.update.owners is not None
    assert {jnp.dtype(sent.dtype).name for sent in step.update.owners.sends} == {"float32", "bfloat16"}
    compiled = step.compile(BATCH)
    assert check(step, BATCH, compiled).ok
    actual = jax.device_get(compiled(step.init(jax.random.key(0)), BATCH)[0])
    expected = jax.device_get(one_device_step(one_device_step.init(jax.random.key(0)), BATCH)[0])
    close = lambda rtol: lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=rtol, atol=1e-6)
    jax.tree.map(close(1e-5), actual.params, expected.params)
    jax.tree.map(close(1e-2), actual.optimizer, expected.optimizer)  # a unit in the last place of bfloat16 is 2^-8


def test_products_of_factors_alone_have_owners() -> None:
    """PSGD solves with its factors and random numbers, without a gradient; every device did so for all matrices."""
    is_matrix = lambda x: x.ndim == 2 and x.shape[0] != LAYERS

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        noise = jax.random.normal(jax.random.key(state[1]), (D,))
        next_factor = lambda q: q + jnp.outer(noise, jnp.linalg.solve(q, noise)) if q.shape == (D, D) else q @ q
        factors = jax.tree.map(lambda g, q: [next_factor(q[0])] if is_matrix(g) else q, grads, state[0])
        return jax.tree.map(lambda g, q: q[0] @ g if is_matrix(g) else g, grads, factors), (factors, state[1] + 1)

    init = lambda params: (
        jax.tree.map(lambda x: [jnp.eye(x.shape[0])] if is_matrix(x) else [0], params),
        jnp.int32(0),
    )
    owners = jp.make_train_step(MODEL, optax.GradientTransformation(init, update), "fsdp").update.owners
    assert owners is not None
    assert owners.repeated == 0
    assert sum(kind.count for bundle in owners.bundles for kind in bundle.kinds) == 2 + 2 * 3


@pytest.mark.slow
def test_owners_within_branches() -> None:
    """`apply_if_finite` updates in a branch, here within another branch; matrices had no owners there.

    A step whose gradients are not finite sends no matrix. The closed form counts what the branch may send.
    """
    tx = optax.conditionally_transform(optax.apply_if_finite(shampoo(1e-2), 3), lambda step: step < 10)
    step = jp.make_train_step(MODEL, tx, "fsdp=6", jax.devices()[:6])
    owners = step.update.owners
    assert owners is not None
    assert sum(kind.count for bundle in owners.bundles for kind in bundle.kinds) == 2 * LAYERS + 2 * 3
    compiled, state = step.compile(BATCH), step.init(jax.random.key(0))
    assert check(step, BATCH, compiled).ok
    for scale in (1, np.nan, 1, 1, 1, 1):
        state, _ = compiled(state, BATCH | {"y": BATCH["y"] * np.float32(scale)})
    assert_same(jax.device_get(step.params(state)), "shampoo")


def test_what_has_no_owner_is_said() -> None:
    """If an optimizer stacks blocks itself, one product multiplies all of them, and has no owner.

    XLA's partitioner runs it. Every device does its FLOPs, which were not counted.
    """

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        stack = jnp.stack([block["a"] for block in grads["blocks"]])
        changes = -1e-3 * stack @ stack.mT @ stack
        return grads | {
            "blocks": [{"a": x, "b": block["b"]} for x, block in zip(changes, grads["blocks"], strict=True)]
        }, state

    step = jp.make_train_step(MODEL, optax.GradientTransformation(lambda params: (), update), "fsdp")
    assert step.update.owners is not None
    assert not step.update.owners.bundles
    assert step.update.owners.flops == 2 * 3 * 2 * D * D * F
    assert any(
        "one equation of the optimizer multiplies several leaves" in line for line in step.explain(BATCH).remarks
    )


def test_what_is_sent() -> None:
    """Each matrix goes to its owner and back: promised, traced and compiled. All other bytes equal those of SGD."""
    bytes_by_kind = []
    for optimizer in (muon(1e-2, MODEL, BATCH), optax.sgd(1e-2)):
        step = jp.make_train_step(MODEL, optimizer, "fsdp", jax.devices()[:2])
        compiled = step.compile(BATCH)
        proof = check(step, BATCH, compiled)
        assert proof.ok, proof
        bytes_by_kind.append(Ledger.from_hlo(compiled.as_text() or "", step.mesh).by("kind", value="bytes"))
    with_muon, with_sgd = bytes_by_kind
    assert with_muon["all-gather"] == with_sgd["all-gather"], bytes_by_kind
    # To the owner and back; each device has half of each matrix.
    assert with_muon["all-to-all"] == 2 * 4 * (2 * LAYERS + 2 * 3) * D * F / 2
