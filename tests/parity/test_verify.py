"""`verify` judges each leaf by its scale, takes the user's optimizer, and shows its progress."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.step.core import Step


class Attending(nnx.Module):
    """Attention whose key has a bias: it shifts all scores of a query alike, so that its gradient is zero."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.6)
        self.embed = nnx.Embed(16, 16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            2, 16, decode=False, kernel_init=init, bias_init=init, rngs=rngs, keep_rngs=False
        )
        self.out = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = 2 * self.embed(tokens)
        return self.out(x + self.attention(x))


def loss(module: Attending, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(module(batch), batch).mean()


MODEL = jp.from_nnx(Attending, loss)
BATCH = np.random.default_rng(0).integers(0, 16, (4, 24))


def check(**options: Any) -> Any:
    return jp.verify(MODEL, "ddp", BATCH, steps=1, mesh=jax.devices()[:2], **options)


@pytest.mark.slow
def test_one_part_in_ten_thousand_of_one_leaf_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unscaled = Step._grads_for_update

    def wrong(step: Step, grads: Any, state: Any) -> Any:
        grads = unscaled(step, grads, state)
        grads["attention"]["query"]["bias"] *= 1.0001
        return grads

    monkeypatch.setattr(Step, "_grads_for_update", wrong)
    report = check(equation=False)
    assert not report.ok
    assert report.worst.path == "attention/query/bias"
    assert "DIFFERS" in str(report)
    assert report.where is None
    assert "verify" not in capsys.readouterr().err  # there is no terminal
    # Nor would it be hidden in another leaf: the tolerance of each is less than that.
    allowed = {d.path: d.error for d in report.differences if d.kind == "gradient"}
    assert all(error <= report.tolerance for path, error in allowed.items() if path != report.worst.path)


@pytest.mark.slow
def test_a_leaf_whose_terms_cancel_the_users_optimizer_and_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """The gradient of the key's bias is only rounding, and was reported as different. Other leaves stay strict.

    Only SGD was compared, and a pipeline compiled for minutes without a message.
    """
    calls = []
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3))
    counting_optimizer = optax.GradientTransformation(
        lambda params: calls.append(1) or optimizer.init(params), optimizer.update
    )
    report = check(optimizer=counting_optimizer, progress=True)
    assert report.ok
    assert calls
    scales = {d.path: d.scale for d in report.differences if d.kind == "gradient"}
    assert scales.pop("attention/key/bias") == "terms"
    assert set(scales.values()) == {"leaf"}
    assert "zero in exact arithmetic, so compared with their rounding: gradient attention/key/bias" in str(report)
    lines = capsys.readouterr().err.splitlines()
    assert {"verify: ddp: step 1 of 1", "verify: one device: gradients"} <= set(lines)


def test_a_gradient_that_one_device_has_not_either_is_said_so() -> None:
    """A normalised zero head, as in SigLIP: verify reported "DIFFERS", though one device had NaN as well."""
    loss = lambda params, batch, key: jax.vmap(jnp.linalg.norm)(batch["x"] @ params["w"]).mean()
    model = jp.Model(init=lambda key: {"w": jnp.zeros((3, 2))}, loss=loss)
    report = jp.verify(model, "ddp", {"x": np.ones((8, 3), "float32")}, steps=1, mesh=jax.devices()[:2])
    assert not report.ok
    assert "not finite on one device either" in str(report)
    assert "its equation is not known" in str(report)


@pytest.mark.slow
def test_a_step_or_its_state_in_the_place_of_what_they_are_made_of() -> None:
    """The errors said that the strategy is an optimizer, and that the batch lacks a row dim at leaf "step"."""
    step = jp.make_train_step(MODEL, optax.sgd(0.1), "fsdp,microbatches=2", mesh=jax.devices()[:2])
    for args in ((step, step.init(jax.random.key(0))), ("fsdp", step.init(jax.random.key(0))), (step, BATCH)):
        with pytest.raises(ValueError, match=r"verify\(model, step.strategy, batch, mesh=step.mesh\)"):
            jp.verify(MODEL, *args)
    assert jp.verify(MODEL, step.strategy, BATCH, mesh=step.mesh, steps=1).ok
    with pytest.raises(ValueError, match=r"model is a TrainStep; make one with .*: verify\(model, strategy, batch\)"):
        jp.verify(step, "fsdp", BATCH)  # type: ignore[arg-type]


def test_a_variable_gives_no_gradient_from_microbatch_to_microbatch() -> None:
    """One device differentiated through the variables of the previous microbatch, which no step does."""

    class Scaled(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up, self.mean = nnx.Linear(8, 4, rngs=rngs), nnx.BatchStat(jnp.ones(()))

        def __call__(self, x: jax.Array) -> jax.Array:
            h = self.up(x)
            self.mean[...] = self.mean[...] + jp.all_rows(h).mean()
            return h * self.mean[...]

    batch = {"x": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)}
    loss = lambda net, batch: jnp.square(net(batch["x"])).mean()
    model = jp.from_nnx(Scaled, loss, rows="independent")  # of its microbatch
    assert jp.verify(model, "data=2,microbatches=2", batch, mesh=jax.devices()[:2]).ok


@pytest.mark.slow
def test_the_whole_batch_at_once() -> None:
    """One device used the same microbatches, and the report did not say that the whole batch has another loss."""

    def balance(params: Any, batch: Any, key: Any) -> jax.Array:
        x = batch["x"] if key is None else batch["x"] + 0.1 * jax.random.normal(key, batch["x"].shape)
        gates = jp.all_rows(jax.nn.softmax(x @ params))
        return 4 * (gates.mean(0) * jax.nn.one_hot(gates.argmax(-1), 4).mean(0)).sum()

    def plain(params: Any, batch: Any, key: Any) -> jax.Array:
        return jnp.square(batch["x"] @ params + jax.random.normal(key, (len(batch["x"]), 4))).mean()

    batch = {"x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)}
    init = lambda key: jax.random.normal(key, (8, 4))
    devices = jax.devices()[:2]
    model = jp.Model(init, balance, rows="independent")
    cut = jp.verify(model, "data=2,microbatches=4", batch, steps=1, mesh=devices)
    assert cut.ok
    assert cut.uncut_loss is not None
    assert f"the loss of the whole batch at once is {cut.uncut_loss:.7g}; microbatches=1 has it" in str(cut)
    # With as many blocks in one microbatch, every row draws the same noise.
    blocks = jp.verify(model, "data=8", batch, steps=1)
    np.testing.assert_allclose(cut.uncut_loss, blocks.expected_loss, rtol=1e-6)
    assert blocks.uncut_loss is None
    report = jp.verify(jp.Model(init, plain), "data=2,microbatches=4", batch, steps=1, mesh=devices)
    np.testing.assert_allclose(report.uncut_loss, report.expected_loss, rtol=1e-6)
    assert "whole batch" not in str(report)
