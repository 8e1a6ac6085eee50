"""NaN's line: planted faults are found where they stand, under every strategy."""

import collections
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import planted
import pytest

import jaxpar as jp
from jaxpar.inspect.nonfinite import Nonfinite, NonfiniteError
from jaxpar.inspect.nonfinite.replay import Replay
from jaxpar.make import TrainStep, _Call
from jaxpar.step import unseen

# Every run of the tests tries one fault for each strategy. The battery tries all of them.
FAULT_OF_STRATEGY = dict(
    zip(
        planted.STRATEGIES,
        ("one_hot_times_masked_logits", "derivative_of_sqrt_at_0", "two_masks_of_the_lowest_number",
         "quotient_behind_nan_to_num", "inf_in_a_row", "nan_parameter"),
        strict=True,
    )
)  # fmt: skip


def nonfinite_step(name: str, strategy: str, light: bool = False, **options: Any) -> tuple[Any, Any, Any]:
    """Return a step, its state, and a batch with which it is not finite."""
    model = planted.model(name, mixing=not light)
    step = jp.make_train_step(model, optax.sgd(0.1), planted.STRATEGIES[strategy], **options)
    state = step.init(jax.random.key(0))
    if planted.FAULTS[name][0] == "params":
        state = step.with_params(state, step.params(state) | {"w": jnp.float32(jnp.nan)})
    return step, state, planted.batch(name)


def check_fault(name: str, finding: Nonfinite, step: Any) -> None:
    """Check that the finding names the planted line, with the rank, the microbatch and the row."""
    fault = finding.fault
    assert fault is not None, finding
    assert f"planted.py:{planted.line_of(name)}:" in fault.line, str(finding)
    place = planted.FAULTS[name][0]
    if place == "layer":
        ((_, iteration, layers),) = fault.loops[:1]
        assert iteration < layers == planted.LAYERS
    if place == "params":
        assert str(fault.brought) == "parameter w holds nan"
        assert len(finding.blocks) == step.replicas * step.strategy.microbatches
        return
    rows_per_block = planted.ROWS // (step.replicas * step.strategy.microbatches)
    replica, microbatch = divmod(planted.ROW // rows_per_block, step.strategy.microbatches)
    assert finding.blocks == ((microbatch, replica),)
    assert finding.rows == (planted.ROW,), str(finding)
    if place == "batch":
        assert str(fault.brought) == f"batch leaf s holds inf at [{planted.ROW}]"


CELLS = [
    pytest.param(name, strategy, marks=[] if fault == name else [pytest.mark.battery])
    for name in planted.FAULTS
    for strategy, fault in FAULT_OF_STRATEGY.items()
]


@pytest.mark.parametrize(("name", "strategy"), CELLS)
def test_a_planted_line_is_named(name: str, strategy: str) -> None:
    light = name == FAULT_OF_STRATEGY[strategy] and strategy != "expert"
    step, state, batch = nonfinite_step(name, strategy, light)
    check_fault(name, step.trace_nonfinite(state, batch), step)


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_an_error_that_names_the_line_and_has_the_state_of_before() -> None:
    step, state, batch = nonfinite_step(name := "log_of_0", "pipe zb-h1", light=True, trace_nonfinite=True)
    good = planted.batch(name, bad=False)
    state, metrics = step(state, good)
    assert set(metrics) == {"loss", "grad_norm", "finite", "skipped"}
    params_before = jax.tree.map(np.asarray, step.params(state))
    with pytest.raises(NonfiniteError) as error:
        step(jax.block_until_ready(step(state, batch)[0]), good)
    assert error.value.batch is batch
    # There are none if the step had ended when its call returned; then that call raises the error.
    assert all(undone_batch is good for undone_batch in error.value.undone)
    assert len(error.value.undone) < 2
    check_fault(name, error.value.found, step)
    message = str(error.value)
    assert message.startswith("step 2: the loss is not finite: log makes -inf at ")
    assert "\n  microbatch 1, rank 2 (data=2), rows 10, 11 of the batch; 1 of 8 blocks are not finite" in message
    assert "\n  the batch causes it: row 11 alone" in message
    jax.tree.map(np.testing.assert_array_equal, step.params(error.value.state), params_before)
    state, metrics = step(error.value.state, good)
    assert (bool(metrics["finite"]), int(state.step)) == (True, 3)
    assert step.trace_nonfinite(state, good).what == ""
    with pytest.raises(ValueError, match="within a jit of your own"):
        jax.jit(step)(state, batch)


@pytest.mark.parametrize(
    ("strategy", "devices"), [("data=2,fsdp=2", 4), ("single,precision=f16", 1), ("dp", 2), ("zero2,precision=bf16", 2)]
)
def test_what_was_started_since_is_done_again_and_no_row_is_lost(strategy: str, devices: int) -> None:
    """The result equals, bit by bit, that of a loop that waits for each step, which skips the two bad batches."""

    def noisy(p: Any, b: Any, key: Any) -> jax.Array:
        x = b["x"] * jax.random.uniform(key, b["x"].shape)
        return jnp.square(x.astype(p["w"].dtype) @ p["w"]).mean()

    model, _ = mean_squares(noisy)
    rows = lambda i: np.random.default_rng(i).normal(size=(16, 4)).astype(np.float32) * (np.nan if i in (2, 4) else 1)
    batches = [{"x": rows(i)} for i in range(5)]
    step = jp.make_train_step(model, optax.adam(0.1), strategy, jax.devices()[:devices], trace_nonfinite=True)

    def run(waits: bool) -> tuple[Any, list[tuple[bool, bool]]]:
        state, todo, met = step.init(jax.random.key(0)), collections.deque(batches), []
        while todo:
            try:
                state, _ = step(state, todo.popleft())
                if waits or not todo:
                    step.wait(state)
            except NonfiniteError as error:
                bad = error.found.step - 1
                met.append((bad, error.batch is batches[bad]))
                state = error.state
                todo.extendleft(reversed(error.undone))
        return state, met

    (state, met), (expected, waited) = run(waits=False), run(waits=True)
    assert met == waited == [(2, True), (4, True)]
    equal = jax.jit(lambda a, b: jax.tree.map(lambda x, y: (x == y).all(), a, b))
    assert all(jax.tree.leaves(equal(state, expected)))


def test_what_has_stopped_is_seen_before_it_is_used(tmp_path: Path) -> None:
    model, batch = mean_squares(lambda p, b, key: jnp.square(b["x"] @ p["w"]).mean())
    step = jp.make_train_step(model, optax.sgd(0.1), "single", trace_nonfinite=True)
    bad = {**batch, "x": batch["x"] * np.inf}
    uses = {
        "save": lambda state: step.save(tmp_path, state),
        "evaluate": lambda state: step.evaluate(state, batch),
        "value_and_grad": lambda state: step.value_and_grad(state, batch),
        "with_params": lambda state: step.with_params(state, step.params(state)),
        "another state": lambda state: step(step.init(jax.random.key(1)), batch),
    }
    step.traces = False  # no call looks, as where its step is still running
    for name, use in uses.items():
        state, metrics = step(step.init(jax.random.key(0)), bad)
        step._calls.append(_Call(state, metrics["stopped"], bad))
        with pytest.raises(NonfiniteError, match=r"step 1: the loss is not finite: batch leaf x holds") as error:
            use(state)
        assert (name, error.value.undone, int(error.value.state.step)) == (name, (), 1)
    assert not list(tmp_path.iterdir())


UNREAD = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
import jaxpar as jp
from jaxpar.make import TrainStep
jp.initialize()
look = TrainStep._check_finite  # no call looks, as where its step is still running
TrainStep._check_finite = lambda step, wait=True: look(step, wait) if wait else None

def main():
    x = np.ones((8, 4), "float32")
    x[3, 2] = np.nan if "bad" in sys.argv else 1
    loss = lambda p, b, key: jnp.square(b["x"] @ p["w"]).mean()
    model = jp.Model(init=lambda key: {"w": jnp.ones((4, 2))}, loss=loss)
    step = jp.make_train_step(model, optax.sgd(0.1), "ddp", trace_nonfinite=True)
    state = step.init(jax.random.key(0))
    for _ in range(3):
        state, _ = step(state, {"x": x})

main()
print("dropped")
if "exit" in sys.argv: sys.exit(0)
"""


@pytest.mark.parametrize(("words", "status"), [(["bad"], 1), (["bad", "exit"], 1), (["good"], 0)])
def test_a_process_that_reads_no_loss_says_at_its_end_that_a_step_was_not_finite(words: list[str], status: int) -> None:
    """Such a process ended with status 0 and without an error."""
    completed = subprocess.run([sys.executable, "-c", UNREAD, *words], capture_output=True, text=True, timeout=1800)
    assert (completed.returncode, completed.stdout) == (status, "dropped\n"), completed.stderr
    message = "error: step 1: the loss is not finite: batch leaf x holds nan at [3, 2]"
    assert (message in completed.stderr) == bool(status)


def test_the_next_step_that_is_made_says_that_an_earlier_one_was_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    look = TrainStep._check_finite  # no call looks, as where its step is still running
    monkeypatch.setattr(TrainStep, "_check_finite", lambda step, wait=True: look(step, wait) if wait else None)
    model, batch = mean_squares(lambda p, b, key: jnp.square(b["x"] @ p["w"]).mean())
    make = lambda: jp.make_train_step(model, optax.sgd(0.1), "single", trace_nonfinite=True)
    step = make()
    step(step.init(jax.random.key(0)), {**batch, "x": batch["x"] * np.inf})
    del step
    with pytest.raises(NonfiniteError, match="step 1: the loss is not finite: batch leaf x holds"):
        make()
    step = make()
    step.wait(step(step.init(jax.random.key(0)), batch)[0])
    assert not unseen._checks


def mean_squares(loss: Any) -> tuple[jp.Model, dict[str, np.ndarray]]:
    model = jp.Model(lambda key: {"w": jax.random.normal(key, (4, 4))}, loss)
    return model, {"x": np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)}


def trace_of(model: jp.Model, strategy: str, batch: Any) -> Nonfinite:
    step = jp.make_train_step(model, optax.sgd(0.1), strategy)
    return step.trace_nonfinite(step.init(jax.random.key(0)), batch)


@pytest.mark.slow
def test_what_blocks_make_together_is_named() -> None:
    """The faults of a masked batch's count, of a sum of gradients, and of a loss that takes all rows are named."""

    def masked(p: Any, b: Any, key: Any) -> jp.Mean:
        return jp.Mean(((b["x"] @ p["w"]) ** 2 * b["mask"][:, None]).sum(), b["mask"].sum())

    model, batch = mean_squares(masked)
    finding = trace_of(model, "ddp", {**batch, "mask": np.zeros(16, np.float32)})
    assert (finding.what, finding.fault.operands[1].high) == ("mean", 0)  # type: ignore[union-attr]
    assert "reduce_sum at" in str(finding)
    assert "the count of the loss is 0 over all rows" in str(finding)

    def huge(p: Any, b: Any, key: Any) -> jp.Mean:
        return jp.Mean(1e38 * (p["w"] * b["mask"]).sum(), b["mask"].sum() / 16)  # 2e38 for a block

    model = jp.Model(lambda key: {"w": jnp.float32(0)}, huge)
    finding = trace_of(model, "ddp", {"mask": np.ones(16, np.float32)})
    assert finding.what == "sum"
    assert "every block is finite, and the sum of the gradients of w over all, or its square, overflows" in str(finding)

    def coupled(p: Any, b: Any, key: Any) -> jax.Array:
        all_rows = jp.all_rows(b["x"] @ p["w"])
        return jnp.square(b["x"] @ p["w"] / all_rows.min()).mean()  # where one row of all is nought

    model, batch = mean_squares(coupled)
    batch["x"] = np.abs(batch["x"])
    batch["x"][3] = 0
    model = jp.Model(lambda key: {"w": jax.random.uniform(key, (4, 4)) + 0.1}, model.loss)
    finding = trace_of(model, "fsdp", batch)
    assert finding.fault is not None
    assert finding.fault.primitive == "div"
    assert finding.rows is None
    assert "of all ranks together, as the loss takes all rows" in str(finding)


def test_a_mask_is_no_fault_and_an_overflow_beside_it_is() -> None:
    mask = jnp.where(jnp.arange(4) < 2, 0.0, -jnp.inf)
    x = jnp.array([1.0, 2.0, 3.0, 4.0])
    assert jp.trace_nonfinite(lambda x: jax.nn.softmax(x + mask).sum(), x) is None
    for function, primitive, place in (
        (lambda x: jnp.exp(200 * x + mask).sum(), "exp", (0,)),
        # Of two overflows the one that came first.
        (lambda x: (jnp.exp(30 * x) * jnp.array([1e38, 1, 1, 1])).sum(), "exp", (2,)),
        # Of two NaNs that meet as well.
        (lambda x: jnp.log(x - 9).sum() + jnp.sqrt(x - 9).sum(), "log", (0,)),
        # An infinity that harms nothing is not taken for the one that does.
        (lambda x: jax.nn.softmax(x + jnp.log(jnp.maximum(x - 2, 0))).sum() / (x[0] - 1), "div", ()),
    ):
        fault = jp.trace_nonfinite(function, x)
        assert fault is not None
        assert (fault.primitive, fault.place, fault.brought) == (primitive, place, None)


def test_the_forward_value_that_a_backward_divides_by_is_named() -> None:
    """The value comes stacked out of the forward's loop. The equation in the loop is named, not the loop."""

    def loss(x: jax.Array) -> jax.Array:
        layer = lambda x, w: (x / jnp.exp(w), None)
        return jax.lax.scan(layer, x, jnp.array([-80.0, -80.0]))[0].sum()  # of zeros; backwards 1 / e^-160 overflows

    fault = jp.trace_nonfinite(jax.grad(loss), jnp.zeros(2))
    assert fault is not None
    assert (fault.primitive, fault.value, fault.backward, len(fault.loops)) == ("div", "inf", True, 1), str(fault)
    assert fault.operands[1].maker.startswith("exp at "), str(fault)


def test_branches_and_closed_over_arrays() -> None:
    constant = jnp.array([1.0, jnp.nan])
    fault = jp.trace_nonfinite(lambda x: (x * constant).sum(), jnp.ones(2))
    assert fault is not None
    assert str(fault.brought) == "an array that the function closes over holds nan at [1]"
    branch = lambda x: jax.lax.cond(x.sum() > 0, lambda x: jnp.log(x - 1).sum(), lambda x: x.sum(), x)
    fault = jp.trace_nonfinite(jax.grad(branch), {"a": jnp.ones(3)}["a"])
    assert fault is not None
    assert (fault.primitive, fault.backward) == ("div", True)


def test_an_overflow_by_float16s_scale_is_no_fault() -> None:
    """The loss is 1e3 times too large for the first scale of 2^15, which is therefore halved."""
    model, batch = mean_squares(lambda p, b, key: 1e3 * jnp.square(b["x"].astype(p["w"].dtype) @ p["w"]).mean())
    step = jp.make_train_step(model, optax.sgd(1e-6), "single,precision=f16", trace_nonfinite=True)
    state, metrics = step(step.init(jax.random.key(0)), batch)
    assert not metrics["finite"]
    while not metrics["finite"]:
        state, metrics = step(state, batch)
    assert int(metrics["skipped"]) > 0


@pytest.mark.slow
def test_the_replay_is_the_steps_mathematics() -> None:
    """The replay has the step's rows, microbatches, keys, counts and scale, and so its loss and gradients."""

    def noisy(p: Any, b: Any, key: Any) -> jp.Mean:
        x = b["x"] * (jax.random.uniform(key, b["x"].shape) > 0.3)
        return jp.Mean((jnp.square(x @ p["w"]) * b["mask"][:, None]).sum(), b["mask"].sum())

    model, batch = mean_squares(noisy)
    batch["mask"] = np.random.default_rng(1).uniform(size=16).astype(np.float32)
    step = jp.make_train_step(model, optax.sgd(0.1), "data=2,fsdp=4,microbatches=2")
    state = step.init(jax.random.key(0))
    replay = Replay(step, state, batch, jax.devices()[0])
    assert replay.locate().what == ""
    loss, grads = step.value_and_grad(state, batch)
    assert replay.loss == pytest.approx(float(loss), rel=1e-6)
    np.testing.assert_allclose(replay.grads["w"], grads["w"], rtol=1e-5, atol=1e-6)
