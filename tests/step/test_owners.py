"""Optimizers of whole matrices: the update with owners does what one device does, and sends less than a gather."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.inspect.ledger import Ledger
from jaxpar.parallel.owners import Owners

D, F, LAYERS, ROWS = 16, 48, 6, 24


def init(key: jax.Array) -> Any:
    """A scanned stack, whose layers 8 ranks do not divide, and the layers of a loop, some of one shape."""
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
    """Gupta et al. 2018, arXiv:1802.09568, algorithm 1, for the matrices on the last two dims of each leaf."""

    def power(m: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(m + 0.1 * jnp.eye(m.shape[-1]))
        return (vectors * values[..., None, :] ** -0.25) @ vectors.mT

    is_matrix = lambda x: (x.ndim > 1 and x.shape[0] != LAYERS) or x.ndim == 3

    def start(params: Any) -> Any:
        zeros = lambda x, n: jnp.zeros((*x.shape[:-2], n, n)) if is_matrix(x) else jnp.zeros(())
        return {
            "left": jax.tree.map(lambda x: zeros(x, x.shape[-2] if x.ndim > 1 else 1), params),
            "right": jax.tree.map(lambda x: zeros(x, x.shape[-1] if x.ndim > 1 else 1), params),
        }

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        left = jax.tree.map(lambda g, s: s + g @ g.mT if is_matrix(g) else s, updates, state["left"])
        right = jax.tree.map(lambda g, s: s + g.mT @ g if is_matrix(g) else s, updates, state["right"])
        step = lambda g, a, b: -rate * (power(a) @ g @ power(b) if is_matrix(g) else g)
        return jax.tree.map(step, updates, left, right), {"left": left, "right": right}

    return optax.GradientTransformation(start, update)


def muon(rate: float, **more: Any) -> optax.GradientTransformation:
    return optax.contrib.muon(rate, ns_steps=3, muon_weight_dimension_numbers=jp.matrices(MODEL, BATCH), **more)


OPTIMIZERS = {
    "muon": lambda: optax.chain(optax.clip_by_global_norm(0.5), muon(1e-2)),
    "shampoo": lambda: shampoo(1e-2),
    "aol": lambda: muon(1e-2, preconditioning="aol", weight_decay=0.1, consistent_rms=0.2),
}


def trained(optimizer: str, strategy: str, devices: int) -> tuple[Any, Any, Owners | None]:
    step = jp.make_train_step(MODEL, OPTIMIZERS[optimizer](), strategy, jax.devices()[:devices])
    state = step.init(jax.random.key(0))
    first = jax.device_get(step.params(state))
    for _ in range(5):
        state, _ = step(state, BATCH)
    return first, jax.device_get(step.params(state)), step.update.owners


@functools.cache
def one_device(optimizer: str) -> tuple[Any, Any]:
    return trained(optimizer, "single", 1)[:2]


SOME = [("muon", "fsdp", 8), ("shampoo", "fsdp", 4), ("muon", "tensor=2,fsdp=4", 8)]
OTHERS = [
    (optimizer, strategy, devices)
    for optimizer in OPTIMIZERS
    for strategy, devices in [
        ("fsdp", 8),
        ("zero1", 8),
        ("zero2", 8),
        ("data=2,fsdp=4", 8),
        ("tensor=2,fsdp=4", 8),
        ("pipe=2,fsdp=4,microbatches=3", 8),
        ("fsdp", 6),
        ("fsdp", 2),
        ("ddp", 8),
    ]
    if (optimizer, strategy, devices) not in SOME
]


@pytest.mark.filterwarnings("ignore:tensor")
@pytest.mark.parametrize(
    ("optimizer", "strategy", "devices"), [*SOME, *(pytest.param(*cell, marks=pytest.mark.battery) for cell in OTHERS)]
)
def test_parity(optimizer: str, strategy: str, devices: int) -> None:
    """After five steps, to 3e-5 of the largest movement of each leaf (what is small in a gradient is multiplied by 3.4
    in each iteration, rounding too: replicas of ddp, which have no owners, differ by as much), and what float32 loses
    where a movement is added to a parameter that is a hundred times as large.
    """
    first, found, owned = trained(optimizer, strategy, devices)
    before, wanted = one_device(optimizer)
    assert (owned is None) == (strategy == "ddp")
    for a, b, start in zip(*map(jax.tree.leaves, (found, wanted, before)), strict=True):
        moved = np.abs(b - start).max()
        rounded = 5 * np.finfo(np.float32).eps * np.abs(b).max()
        assert np.abs(a - b).max() <= 3e-5 * max(moved, 1e-3) + rounded
    jax.tree.map(np.testing.assert_array_equal, first, before)


def test_who_owns_what() -> None:
    """Stacks by their layers, layers of a loop side by side; elementwise optimizers have no owners."""
    step = jp.make_train_step(MODEL, muon(1e-2), "fsdp")
    owned = step.update.owners
    assert owned is not None
    assert sorted(len(group) for group in owned.groups) == [1, 1, 3, 3]
    assert all(sum(v.aval.ndim > 1 for v in r.ins) == len(r.outs) == 1 for group in owned.groups for r in group)
    said = " ".join(step.explain(BATCH).remarks)
    assert "whole matrices with their owners: one all-to-all there, one back" in said
    assert "beside 2 of its shape, each whole with its owner" in said
    assert jp.make_train_step(MODEL, optax.adamw(1e-2), "fsdp").update.owners is None


def test_what_has_no_owner_is_said() -> None:
    """Within a branch nothing is moved: that was said nowhere."""
    step = jp.make_train_step(MODEL, optax.MultiSteps(muon(1e-2), 2), "fsdp")
    assert step.update.owners is not None
    assert not step.update.owners.groups
    assert any("as the layout keeps it" in remark for remark in step.explain(BATCH).remarks)


def test_what_is_sent() -> None:
    """Each matrix to its owner and back, where every product gathered; all else is what SGD sends."""
    sent = []
    for optimizer in (muon(1e-2), optax.sgd(1e-2)):
        step = jp.make_train_step(MODEL, optimizer, "fsdp", jax.devices()[:2])
        ledger = Ledger.from_hlo(step.compile(BATCH).as_text() or "", step.mesh)
        sent.append(ledger.by("kind", value="bytes"))
    ours, theirs = sent
    assert ours["all-gather"] <= 1.01 * theirs["all-gather"], sent
    there = 4 * 2 * (LAYERS + 4) * D * F / 2  # three blocks and a fourth of zeros, on two ranks
    assert 0 < ours["all-to-all"] <= 1.2 * 2 * there, sent  # the partitioner pads them where it cuts
