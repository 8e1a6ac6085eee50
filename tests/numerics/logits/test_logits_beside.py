"""Logits in chunks beside what a training run does with them: numbers are those of `logits=whole`, or `explain` says
that they are whole, and why.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp

VOCAB, DIM, ROWS = 40, 16, 8


def init(key: jax.Array) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 8))
    draw = lambda *shape: jax.random.normal(next(keys), shape) * 0.3
    lora = {"body_a": draw(DIM, 3), "body_b": draw(3, DIM), "head_a": draw(VOCAB, 3), "head_b": draw(3, DIM)}
    return {"embed": draw(VOCAB, DIM), "body": draw(DIM, DIM), "head": draw(DIM, VOCAB), "lora": lora}


def states(p: Any, tokens: jax.Array) -> jax.Array:
    x = p["embed"][tokens]
    x = jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
    return x + jnp.tanh(x @ p["body"] + x @ p["lora"]["body_a"] @ p["lora"]["body_b"])


def tied(p: Any, x: jax.Array) -> jax.Array:
    return x @ (p["embed"] + p["lora"]["head_a"] @ p["lora"]["head_b"]).T


def own(p: Any, x: jax.Array) -> jax.Array:
    return x @ p["head"]


def added(p: Any, x: jax.Array) -> jax.Array:
    """LoRA of the head, as most write it: beside it, a second product."""
    return x @ p["embed"].T + x @ p["lora"]["head_b"].T @ p["lora"]["head_a"].T


def masked(logits: jax.Array, batch: Any) -> tuple[jp.Mean, dict[str, Any]]:
    """A smoothed label, a z-loss, weights of which many are 0; and metrics of the same logits."""
    logits, labels, weights = logits.astype(jnp.float32), batch["tokens"][:, 1:], batch["weights"]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    smooth = 0.9 * nats - 0.1 * jax.nn.log_softmax(logits).mean(-1)
    z = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    count = weights.sum()
    mean = lambda x: jp.Mean((x * weights).sum(), count)
    right = logits.argmax(-1) == labels
    near = (jax.lax.top_k(logits, 3)[1] == labels[..., None]).any(-1)
    p = jax.nn.log_softmax(logits)
    entropy = -(jnp.exp(p) * p).sum(-1)
    return mean(smooth + 1e-2 * z), {
        "nats": mean(nats),
        "right": mean(right),
        "near": mean(near),
        "spread": mean(entropy),
    }


def model(head: Callable[..., jax.Array] = tied, loss: Callable[..., Any] = masked) -> jp.Model:
    return jp.Model(init=init, loss=lambda p, batch, key: loss(head(p, states(p, batch["tokens"][:, :-1])), batch))


def batch_of(rows: int = ROWS, length: int = 13, zeros: str = "some") -> dict[str, np.ndarray]:
    """Windows of 13 positions: no chunk of 8 tokens divides them."""
    draw = np.random.default_rng(7)
    weights = draw.uniform(0.1, 2, (rows, length)) * (draw.random((rows, length)) < 0.6)
    weights[rows // 2 :] *= zeros == "some"  # else the rows of half of the replicas count for nothing
    tokens = draw.integers(VOCAB, size=(rows, length + 1))
    return {"tokens": tokens, "weights": weights.astype("float32")}


def run(model: jp.Model, text: str, logits: Any, batch: Any, **given: Any) -> tuple[Any, Any]:
    """What three steps and an evaluation, of fewer rows, say and leave; and the step."""
    devices = {"data=2": 2, "zero3": 4, "data=2,tensor=2": 4, "context=2": 2, "data=2,microbatches=2": 2}
    count = devices[",".join(part for part in text.split(",") if not part.startswith(("precision", "remat")))]
    optimizer = given.pop("optimizer", optax.sgd(0.3, momentum=0.9))
    step = jp.make_train_step(model, optimizer, f"{text},logits={logits}", mesh=jax.devices()[:count], **given)
    state, said = step.init(jax.random.key(0)), []
    for _ in range(3):
        state, metrics = step(state, batch)
        said.append(metrics)
    short = jax.tree.map(lambda x: x[:4], batch)
    return step, jax.tree.map(np.asarray, (said, step.params(state), step.evaluate(state, short), state.optimizer))


def check(model: jp.Model, text: str, batch: Any, tolerance: float = 1e-5, **given: Any) -> None:
    step, found = run(model, text, 8, batch, **given)
    assert [one.chunks > 1 for one in step.traced(batch).notes.logits.values()] == [True]
    _, wanted = run(model, text, "whole", batch, **given)
    for (path, ours), whole in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        error = np.abs(np.asarray(ours, np.float64) - np.asarray(whole, np.float64)).max(initial=0)
        assert error <= tolerance * max(1, np.abs(np.asarray(whole, np.float64)).max(initial=0)), (path, error)


SHARDED = ("data=2", "zero3", "data=2,tensor=2", "data=2,microbatches=2")


@pytest.mark.battery
@pytest.mark.parametrize("zeros", ["some", "half"])
@pytest.mark.parametrize("head", [tied, own])
@pytest.mark.parametrize("text", SHARDED)
def test_smoothed_and_masked_of_an_odd_length(text: str, head: Any, zeros: str) -> None:
    check(model(head), text, batch_of(zeros=zeros))


@pytest.mark.slow
def test_lora_and_a_running_mean_where_half_the_replicas_count_for_nothing() -> None:
    """Of 13 positions in chunks of 2, on two replicas, one of which has weights of 0 alone."""
    optimizer = optax.chain(optax.sgd(0.3, momentum=0.9), optax.ema(0.9))
    lora = lambda path: path.startswith("lora")
    check(model(), "data=2", batch_of(zeros="half"), trainable=lora, optimizer=optimizer)


@pytest.mark.battery
@pytest.mark.parametrize("head", [tied, own])
@pytest.mark.parametrize("text", ["data=2,precision=bf16", "zero3,precision=bf16", "data=2,precision=f16"])
def test_in_low_precision(text: str, head: Any) -> None:
    """The head's gradient is rounded once, and not for each product, so that it is not the same to the bit."""
    check(model(head), text, batch_of(), 2e-2)


@pytest.mark.battery
@pytest.mark.parametrize("head", [tied, own])
def test_beside_context(head: Any) -> None:
    check(model(head), "context=2", batch_of(length=14))


def teacher(p: Any, x: jax.Array) -> jax.Array:
    """As distillation has it: of two heads' logits."""
    return x @ p["head"] + 0.5 * jax.nn.softmax(x @ p["embed"].T)


@pytest.mark.parametrize("head", [added, teacher])
def test_logits_of_two_products_stay_whole_and_explain_says_so(head: Any) -> None:
    step = jp.make_train_step(model(head), optax.sgd(0.1), "data=2,logits=8", mesh=jax.devices()[:2])
    assert {one.chunks for one in step.traced(batch_of()).notes.logits.values()} == {1}
    if head is added:
        said = " ".join(str(step.explain(batch_of())).split())
        assert "the logits of 52 tokens, 8.32 kB in float32, are whole: they meet a value of their size" in said
