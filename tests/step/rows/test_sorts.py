"""Sorts over rows: a sum over all sorted rows couples none, and a loss that depends on their order does."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxpar as jp

Batch = dict[str, Any]
Loss = Callable[[jax.Array, Batch], Any]
ROWS, DIM = 16, 4
RANDOM = np.random.default_rng(0)
BATCH = {
    "x": RANDOM.normal(size=(ROWS, DIM)).astype(np.float32),
    "y": RANDOM.normal(size=ROWS).astype(np.float32),
    "mask": (np.arange(ROWS) % 3 > 0).astype(np.float32),
    "label": np.arange(ROWS, dtype=np.int32) % 3,
}
W = RANDOM.normal(size=(DIM, DIM)).astype(np.float32)


def verdict_on(loss: Loss) -> tuple[str, str]:
    """Trace a loss of `x @ w`; return "refused", "warned" or "silent", and the message."""
    model = jp.Model(lambda key: {"w": jnp.asarray(W)}, lambda p, batch, key: loss(batch["x"] @ p["w"], batch))
    step = jp.make_train_step(model, optax.sgd(0.1), "data=2", mesh=jax.devices()[:2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            step.trace(BATCH)
        except ValueError as error:
            return "refused", str(error)
    messages = [str(w.message) for w in caught if "does not read batch lea" not in str(w.message)]
    return ("warned", messages[0]) if messages else ("silent", "")


def couples(loss: Loss) -> bool:
    """Return whether two halves of the rows have a different loss or gradient than all rows at once."""

    def value(w: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        result = loss(batch["x"] @ w, batch)
        return (result.total, result.count) if isinstance(result, jp.Mean) else (result, jnp.float32(1))

    def loss_and_grad_of(blocks: int) -> jax.Array:
        def mean(w: jax.Array) -> jax.Array:
            block_batch = jax.tree.map(lambda x: x.reshape(blocks, -1, *x.shape[1:]), BATCH)
            total, count = jax.vmap(value, (None, 0))(w, block_batch)
            return total.sum() / count.sum()

        loss_and_grad = jax.jit(jax.value_and_grad(mean))(jnp.asarray(W))
        return jnp.concatenate([x.ravel() for x in loss_and_grad])

    return not bool(jnp.allclose(loss_and_grad_of(1), loss_and_grad_of(2), rtol=1e-4, atol=1e-5))


score = lambda h: jnp.square(h).sum(1)
top = lambda h, k: lax.top_k(score(h), k)[0]
by_score = lambda h, *operands: lax.sort((score(h), *operands), num_keys=1)
jitted_sort = jax.jit(jnp.sort)  # two calls have one program

APART: dict[str, Loss] = {
    "mean": lambda h, b: jnp.sort(h, 0).mean(),
    "sum by rows": lambda h, b: jnp.sort(score(h)).sum() / len(h),
    "function of each": lambda h, b: jnp.tanh(jnp.sort(h, axis=0, descending=True)).mean(),
    "reversed": lambda h, b: -jnp.tanh(jnp.sort(-score(h))[::-1]).mean(),
    "all elements": lambda h, b: jnp.tanh(jnp.sort(h, axis=None)).mean(),
    "twice": lambda h, b: jnp.tanh(jnp.sort(jnp.sort(h, 0), 1)).mean(),
    "weights of columns": lambda h, b: (jnp.tanh(jnp.sort(h, 0)) * jnp.arange(4.0)).mean(),
    "weights of columns at last": lambda h, b: (jnp.tanh(jnp.sort(h, 0)).mean(0) * jnp.arange(4.0)).sum(),
    "one column": lambda h, b: jnp.tanh(jnp.sort(h, 0)[:, 1]).mean(),
    "sums of columns": lambda h, b: jnp.sort(jnp.tanh(h), 0).sum(1).mean(),
    "groups": lambda h, b: jnp.sort(score(h).reshape(2, -1), axis=1).mean(1).mean(),
    "with itself": lambda h, b: jnp.vdot(*[jnp.sort(score(h))] * 2) / len(h),
    "all of top_k": lambda h, b: jnp.tanh(top(h, len(h))).mean(),
    "with others": lambda h, b: jnp.prod(jnp.stack(by_score(h, b["mask"], b["y"])), axis=0).mean(),
    "jp.Mean": lambda h, b: jp.Mean(jnp.sort(score(h) * b["mask"]).sum(), jnp.sort(b["mask"]).sum()),
    "a loop": lambda h, b: lax.scan(lambda c, x: (c + jnp.tanh(x), None), 0.0, jnp.sort(score(h)))[0] / len(h),
    "a mean beside": lambda h, b: (jnp.sort(score(h)) + h.mean()).mean(),
}

COUPLED: dict[str, Loss] = {
    "first": lambda h, b: jnp.sort(score(h))[0],
    "median": lambda h, b: jnp.abs(h - jnp.median(h, 0)).mean(),
    "half": lambda h, b: jnp.sort(score(h))[: len(h) // 2].mean(),
    "some of top_k": lambda h, b: top(h, 4).mean(),
    "as many as a block has": lambda h, b: top(h, min(len(h), 8)).mean(),
    "best of all of top_k": lambda h, b: top(h, len(h))[0],
    "weights by rank": lambda h, b: (jnp.sort(score(h)) * jnp.arange(len(h))).mean(),
    "sum by rank": lambda h, b: jnp.arange(1.0, 1 + len(h)) @ jnp.sort(score(h)) / len(h),
    "mask by rank": lambda h, b: jnp.where(jnp.arange(len(h)) < 4, jnp.sort(score(h)), 0).mean(),
    "running sums": lambda h, b: jnp.cumsum(jnp.sort(score(h))).mean(),
    "differences": lambda h, b: jnp.square(jnp.diff(jnp.sort(score(h)))).mean(),
    "two sorts": lambda h, b: jnp.abs(jnp.sort(h[:, 0]) - jnp.sort(b["y"])).mean(),
    "one program twice": lambda h, b: (jitted_sort(h[:, 0]) * jitted_sort(h[:, 1])).mean(),
    "each step of a loop": lambda h, b: jnp.prod(lax.scan(lambda c, x: (c, jnp.sort(x)), 0, h.T)[1], 0).mean(),
    "beside rows": lambda h, b: (jnp.sort(h, 0) * h).mean(),
    "beside the reverse": lambda h, b: (lambda s: (s * s[::-1]).mean())(jnp.sort(score(h))),
    "columns": lambda h, b: (lambda s: (s[:, 0] * s[:, 1]).mean())(jnp.sort(h, 0)),
    "sums of columns": lambda h, b: jnp.tanh(jnp.sort(h, 0).sum(1)).mean(),
    "largest column": lambda h, b: jnp.sort(h, 0).max(1).mean(),
    "products of columns": lambda h, b: jnp.tanh(jnp.sort(h, 0) @ jnp.asarray(W)).mean(),
    "sums of groups": lambda h, b: jnp.square(jnp.sort(score(h)).reshape(4, -1).mean(1)).mean(),
    "weights of groups": lambda h, b: (jnp.sort(score(h).reshape(2, -1), 1) * jnp.arange(2)[:, None]).mean(),
    "some rows": lambda h, b: jnp.sort(score(h)[: len(h) // 2]).mean(),
    "with others by another": lambda h, b: (by_score(h, b["y"])[1] * lax.sort((b["label"], b["y"]))[1]).mean(),
    "with others unsorted": lambda h, b: (by_score(h, b["mask"])[1] * h[:, 0]).mean(),
    "lookups": lambda h, b: (jnp.sort(score(h))[b["label"]] * h[:, 0]).mean(),
    "ranks": lambda h, b: (jnp.sort(score(h)) * jnp.argsort(score(h))).mean(),
    "all rows": lambda h, b: jnp.square(h - jp.all_rows(jnp.sort(score(h)))[0]).mean(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_sums_over_all_that_was_sorted_are_no_coupling(name: str) -> None:
    """Any sort over rows was refused, although a sum is the same in any order."""
    assert verdict_on(APART[name]) == ("silent", "")
    assert not couples(APART[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", COUPLED)
def test_what_looks_at_an_order_is_a_coupling(name: str) -> None:
    kind, message = verdict_on(COUPLED[name])
    assert kind == ("warned" if name == "ranks" else "refused")
    assert "over rows" in message
    assert name == "all rows" or couples(COUPLED[name])


def test_what_all_of_top_k_puts_back_is_a_warning_in_a_loop_too() -> None:
    def put_back(h: jax.Array, _: Any) -> tuple[jax.Array, None]:
        values, indices = lax.top_k(h[:, 0], len(h))
        return h + jnp.zeros_like(h).at[indices].set(jnp.tanh(h[indices]) * values[:, None]), None

    best = lambda h, _: (h + lax.top_k(h[:, 0], 2)[0].mean(), None)
    in_a_loop = lambda step: lambda h, b: lax.scan(step, h, None, length=2)[0].mean()
    for loss in (lambda h, b: put_back(h, None)[0].mean(), in_a_loop(put_back)):
        kind, message = verdict_on(loss)
        assert kind == "warned"
        assert "applies sort over rows, which is fine if its results are put back" in message
    assert verdict_on(in_a_loop(best))[0] == "refused"


def test_rows_that_are_picked_before_all_rows_are_those_of_each_block() -> None:
    """`jp.all_rows` of the first half of each block passed, although one device takes half of the batch."""
    kind, message = verdict_on(lambda h, b: (h * jp.all_rows(h[: len(h) // 2]).max(0)).mean())
    assert kind == "refused"
    assert "takes some of the rows" in message
