"""The result of a mean over rows does not depend on the distribution of rows over blocks; that of other losses does."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from zoo import ZOO

import jaxpar as jp
from jaxpar.inspect.check.dealing import _permuted_rows

# All losses of this file share one batch, and most read some of its leaves.
pytestmark = pytest.mark.filterwarnings("ignore:the loss does not read batch")
Batch = dict[str, Any]
Loss = Callable[[jax.Array, Batch], Any]
RANDOM = np.random.default_rng(0)
W = RANDOM.normal(size=(4, 4)).astype(np.float32)
BATCH = {
    "x": RANDOM.normal(size=(16, 4)).astype(np.float32),
    "y": RANDOM.normal(size=(16, 4)).astype(np.float32),
    "mask": (np.arange(16) % 5 > 1).astype(np.float32),
    "scale": jp.Replicated(np.ones(4, np.float32)),
}


def row_check_of(loss: Any, strategy: str = "ddp", batch: Any = BATCH, takes_key: bool = False) -> Any:
    """Check the rows of a loss that declares them independent, so that its program is not read."""
    full_loss = loss if takes_key else lambda params, batch, key: loss(params["w"], batch)
    model = jp.Model(lambda key: {"w": jnp.asarray(W)}, full_loss, rows="independent")
    step = jp.make_train_step(model, optax.sgd(0.1), strategy, mesh=jax.devices()[:4])
    state = step.init(jax.random.key(0))
    row_check = step.check_rows(state, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    return row_check


# -- what couples rows -------------------------------------------------------------------------------------------------


@jax.custom_vjp
def normed(x: jax.Array) -> jax.Array:
    return x


normed.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.linalg.norm(g),))


def backward(w: jax.Array, batch: Batch) -> jax.Array:
    """Normalise a gradient over the block, in a custom derivative: the loss itself is right."""
    return jnp.square(normed(jnp.tanh(batch["x"] @ w))).mean()


def fixed_key(w: jax.Array, batch: Batch) -> jax.Array:
    """Draw the same noise in every block."""
    noise = jax.random.normal(jax.random.key(0), batch["x"].shape)
    return jnp.square((batch["x"] + noise) @ w - batch["y"]).mean()


def place(w: jax.Array, batch: Batch) -> jax.Array:
    x = batch["x"] @ w
    return lax.scan(lambda c, row: (c * 0.9, jnp.tanh(row * c)), 1.0, x)[1].mean()


def longest(w: jax.Array, batch: Batch) -> jax.Array:
    x = batch["x"] @ w
    big = lax.stop_gradient(jnp.abs(x))
    return jnp.square(x * lax.while_loop(lambda a: (big * a).max() > 0.5, lambda a: a * 0.9, 1.0)).mean()


def by_hand(w: jax.Array, batch: Batch) -> jax.Array:
    nats = jnp.square(batch["x"] @ w - batch["y"]).mean(-1)
    return (nats * batch["mask"]).sum() / (batch["mask"].sum() + 1e-3)


@pytest.mark.parametrize("loss", [backward, fixed_key, place, longest, by_hand])
def test_rows_dealt_otherwise_show_what_couples_them(loss: Loss) -> None:
    row_check = row_check_of(loss)
    assert row_check.coupled
    assert not row_check.ok
    assert [dealing.what for dealing in row_check.dealings] == ["rows permuted between blocks"]
    with pytest.raises(ValueError, match=r"(?s)rows are COUPLED.*off by .*jp\.all_rows\(x\).*rows='independent'"):
        row_check.require()


def penalty(w: jax.Array, batch: Batch) -> jax.Array:
    g = jax.grad(lambda x: jnp.tanh(x @ w).mean())(batch["x"])
    return jnp.tanh(batch["x"] @ w).mean() + jnp.square(jnp.sqrt(jnp.square(g).sum(1) + 1e-12) - 1).mean()


def by_number(w: jax.Array, batch: Batch) -> jax.Array:
    return jnp.tanh(batch["x"] @ w / (1 + 0.3 * len(batch["x"]))).mean()


@pytest.mark.parametrize("loss", [penalty, by_number])
def test_half_of_the_rows_show_what_their_number_changes(loss: Loss) -> None:
    """Permuting rows does not change their number, so the permutation alone would pass these losses."""
    row_check = row_check_of(loss)
    assert row_check.coupled
    assert [dealing.same for dealing in row_check.dealings] == [True, False]


# -- what does not -----------------------------------------------------------------------------------------------------


def mean(w: jax.Array, batch: Batch) -> jax.Array:
    return jnp.square(batch["x"] @ w - batch["y"] * batch["scale"]).mean()


def masked(w: jax.Array, batch: Batch) -> jp.Mean:
    nats = jnp.square(batch["x"] @ w - batch["y"]).mean(-1)
    return jp.Mean((nats * batch["mask"]).sum(), batch["mask"].sum())


def cancelling(w: jax.Array, batch: Batch) -> jax.Array:
    """A policy's first step, whose loss is zero: it consists of rounding, and must not be measured against itself."""
    p, gain = jax.nn.log_softmax(batch["x"] @ w)[:, 0], batch["y"][:, 0] - BATCH["y"][:, 0].mean()
    return -(jnp.exp(p - lax.stop_gradient(p)) * gain).mean()


@pytest.mark.parametrize("loss", [mean, masked, cancelling])
def test_a_mean_over_rows_is_the_same(loss: Loss) -> None:
    row_check = row_check_of(loss)
    assert row_check.ok
    row_check.require()
    assert (row_check.group, row_check.evaluations) == (1, 4)


@pytest.mark.parametrize("strategy", ["dp,microbatches=2", "data=2,fsdp=2,microbatches=2"])
def test_microbatches_and_a_server(strategy: str) -> None:
    row_check = row_check_of(mean, strategy)
    assert row_check.ok
    assert "4 x 2 blocks (replicas x microbatches) of 2 rows" in str(row_check)
    assert row_check_of(longest, strategy).coupled


@pytest.mark.parametrize(
    ("name", "strategy", "devices", "noise"),
    [
        ("function", "data=2,pipe=2,microbatches=2", 4, 3e-6),
        ("gpt_masked", "fsdp=2,tensor=2,precision=bf16", 4, 1e-2),
        ("resnet", "data=4", 4, 3e-6),
    ],
)
def test_models_are_independent(name: str, strategy: str, devices: int, noise: float) -> None:
    """A pipeline, a masked decoder, and BatchNorm, whose rows stay in their microbatch, differ by rounding only."""
    entry = ZOO[name]()
    step = jp.make_train_step(entry.model, optax.sgd(0.1), strategy, mesh=jax.devices()[:devices])
    row_check = step.check_rows(step.init(jax.random.key(0)), entry.batch)
    assert row_check.ok, str(row_check)
    assert all(error < noise for dealing in row_check.dealings for error in dealing.errors.values()), str(row_check)


def grouped(w: jax.Array, batch: Batch) -> jax.Array:
    """GRPO's gains, relative to the mean of the answers to one prompt, which are consecutive rows."""
    gain = batch["y"][:, 0].reshape(-1, 2)
    return ((batch["x"] @ w)[:, 0] * (gain - gain.mean(1, keepdims=True)).reshape(-1)).mean()


@pytest.mark.slow
def test_groups_that_no_block_parts_are_dealt_whole() -> None:
    """One device has the same groups, so the step computes the same; permuting single rows would refuse it."""
    row_check = row_check_of(grouped)
    assert row_check.ok
    assert row_check.group == 2
    assert "rows are independent, except within groups of 2, which no block separates" in str(row_check)
    # Blocks of two rows each: nothing to tell groups from.
    assert row_check_of(grouped, "data=2,fsdp=2,microbatches=2").coupled


# -- what cannot be told -----------------------------------------------------------------------------------------------


def noisy(params: Any, batch: Batch, key: jax.Array | None) -> jax.Array:
    x = batch["x"] if key is None else batch["x"] + jax.random.normal(key, batch["x"].shape)
    return jnp.square(x @ params["w"] - batch["y"]).mean()


def noisy_and_centred(params: Any, batch: Batch, key: jax.Array | None) -> jax.Array:
    x = batch["x"] if key is None else batch["x"] + jax.random.normal(key, batch["x"].shape)
    x = x @ params["w"]
    return jnp.square(x - x.mean(0) - batch["y"]).mean()


@pytest.mark.parametrize("strategy", ["ddp", "dp,microbatches=2"])
def test_noise_stays_where_it_is(strategy: str) -> None:
    """Each block draws its own noise, so a row that changes blocks would get other noise."""
    row_check = row_check_of(noisy, strategy, takes_key=True)
    assert not row_check.coupled
    assert not row_check.ok
    assert "not judged: the number of rows in a block, and a row's place, by which the loss draws" in str(row_check)
    assert row_check_of(noisy_and_centred, strategy, takes_key=True).coupled


def contrastive(w: jax.Array, batch: Batch) -> jax.Array:
    return -jax.nn.log_softmax((batch["x"] @ w) @ jp.all_rows(batch["y"]).T).max(-1).mean()


def test_a_loss_that_takes_all_rows_may_count_them() -> None:
    row_check = row_check_of(contrastive)
    assert not row_check.coupled
    assert "the loss takes all rows, and may count them" in str(row_check)


def centred(w: jax.Array, batch: Batch) -> jax.Array:
    x = batch["x"] @ w
    return jnp.square(x - jp.all_rows(x).mean(0) - batch["y"]).mean()


@pytest.mark.filterwarnings("ignore:jp.all_rows returns the rows of one microbatch")
@pytest.mark.slow
def test_what_is_not_judged_is_said() -> None:
    one_row_per_block = {"x": BATCH["x"][:4], "y": BATCH["y"][:4], "scale": BATCH["scale"]}
    assert "anything, as a block has one row" in str(row_check_of(mean, batch=one_row_per_block))
    model = jp.Model(lambda key: {"w": jnp.asarray(W)}, lambda p, batch, key: centred(p["w"], batch))
    step = jp.make_train_step(model, optax.sgd(0.1), "microbatches=4", mesh=jax.devices()[:1])
    row_check = step.check_rows(step.init(jax.random.key(0)), BATCH)  # microbatches are what it asks rows of
    assert "anything, as no two blocks may exchange rows" in str(row_check)
    three_rows_per_block = jax.tree.map(lambda x: x if x.ndim == 1 and x.size == 4 else x[:12], BATCH)
    assert "3 cannot be halved" in str(row_check_of(mean, batch=three_rows_per_block))
    fixed_rows = lambda w, batch: jnp.square((batch["x"] @ w).reshape(4, 4) - batch["y"]).mean()
    nan_batch = {**BATCH, "x": BATCH["x"] * np.nan}
    for reason, row_check in (
        ("half of it is refused", row_check_of(fixed_rows)),
        ("not finite", row_check_of(mean, batch=nan_batch)),
    ):
        assert reason in str(row_check)
        assert not row_check.ok
        assert not row_check.coupled


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("shape", [(2, 1, 2), (3, 1, 5), (4, 2, 2)])
def test_every_dealing_gives_blocks_other_rows(shape: tuple[int, int, int], keep: bool) -> None:
    order = _permuted_rows(shape, keep)
    identity = np.arange(order.size).reshape(shape)
    assert sorted(order.flat) == [*range(order.size)]
    blocks, former_blocks = ({*map(frozenset, x.reshape(-1, shape[-1]))} for x in (order, identity))
    assert blocks != former_blocks
    for set_index in range(shape[1]):  # of a microbatch, where the loss takes all rows of it
        assert sorted(order[:, set_index].flat) == sorted(identity[:, set_index].flat)
    assert not keep or (order % shape[-1] == identity % shape[-1]).all()


# -- two hosts ---------------------------------------------------------------------------------------------------------

WORKER = """
import jaxpar as jp
place = jp.initialize()
import sys, jax, numpy as np, optax
from test_dealing import BATCH, by_hand, mean, W
for rows in ("global", "host"):
    part = slice(None) if rows == "global" else slice(8 * place.process, 8 * place.process + 8)
    batch = {name: BATCH[name][part] for name in ("x", "y", "mask")} | {"scale": BATCH["scale"]}
    for loss in (mean, by_hand):
        model = jp.Model(lambda key: {"w": jax.numpy.asarray(W)}, lambda p, b, key: loss(p["w"], b), rows="independent")
        step = jp.make_train_step(model, optax.sgd(0.1), "ddp", rows=rows)
        print("FOUND", rows, loss.__name__, str(step.check_rows(step.init(jax.random.key(0)), batch)).splitlines()[:2])
"""


@pytest.mark.slow
def test_two_hosts_deal_rows_with_each_other() -> None:
    """With a global batch and with a batch for each host, all rows are permuted, and the result is one process's."""
    paths = os.pathsep.join([*(str(p) for p in (Path(__file__).parent, Path(__file__).parents[1])), *sys.path])
    run = subprocess.run(
        [sys.executable, "-m", "jaxpar", "launch", "--processes", "2", "--devices", "2", "--", "-c", WORKER],
        env={**os.environ, "PYTHONPATH": paths, "JAXPAR_WATCHDOG": "300"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for loss in (mean, by_hand):
        for rows in ("global", "host"):
            first_line = str(row_check_of(loss)).splitlines()[0]
            assert run.stdout.count(f"FOUND {rows} {loss.__name__} ['{first_line}") == 2, run.stdout
