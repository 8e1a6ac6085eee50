"""Errors name the line of a loss that couples rows, and other losses give no alarm. Losses are traced, not compiled."""

import functools
import inspect
import re
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from zoo import ZOO

import jaxpar as jp
from jaxpar.step.rows.reader import Reader

Batch = dict[str, Any]
Loss = Callable[[jax.Array, Batch], Any]
ROWS, DIM, WIDTH = 32, 6, 5
RANDOM = np.random.default_rng(0)
BATCH = {
    "x": RANDOM.normal(size=(ROWS, DIM)).astype(np.float32),
    "y": RANDOM.normal(size=(ROWS, WIDTH)).astype(np.float32),
    "label": np.arange(ROWS, dtype=np.int32) % WIDTH,
    "mask": (np.arange(ROWS) % 3 > 0).astype(np.float32),
    "tokens": RANDOM.integers(DIM, size=(ROWS, 7)).astype(np.int32),
}


def traced(model: jp.Model, strategy: str = "data=2,microbatches=2", batch: Any = None) -> list[str]:
    """Trace a model's loss and return the warnings; raise ValueError if it couples rows."""
    devices = jax.devices()[: 1 if "data=1" in strategy else 2]
    step = jp.make_train_step(model, optax.sgd(0.1), strategy, mesh=devices)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.trace(BATCH if batch is None else batch)
    messages = [str(w.message) for w in caught]
    # Each loss here reads some of BATCH, which is another warning.
    return [message for message in messages if "does not read batch lea" not in message]


def model_of(loss: Loss, rows: str | None = None) -> jp.Model:
    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"w": jax.random.normal(key, (DIM, WIDTH))}

    return jp.Model(init=init, loss=lambda params, batch, key: loss(params["w"], batch), rows=rows)


def square(w: jax.Array, batch: Batch) -> jax.Array:
    """Return the error of each row."""
    return jnp.square(batch["x"] @ w - batch["y"]).mean(-1)


def mean(w: jax.Array, batch: Batch) -> jax.Array:
    return square(w, batch).mean()


# -- losses that couple rows: the comment on the line that does has words of the message ------------------------------


def ppo(w: jax.Array, batch: Batch) -> jax.Array:
    logits = batch["x"] @ w
    advantage = batch["y"][:, 0]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)  # a sum or mean over rows
    return -(jax.nn.log_softmax(logits)[:, 0] * advantage).mean()


def masked_mean(w: jax.Array, batch: Batch) -> jax.Array:
    squares = jnp.square(batch["x"] @ w - batch["y"]).mean(-1)
    return (squares * batch["mask"]).sum() / batch["mask"].sum()  # jp.Mean(total, count)


def triplet(w: jax.Array, batch: Batch) -> jax.Array:
    anchor = batch["x"] @ w
    negative = jnp.roll(anchor, 1, axis=0)  # puts rows into another order
    near, far = (jnp.square(anchor - target).sum(-1) for target in (batch["y"], negative))
    return jnp.maximum(0, near - far + 1).mean()


def discrepancy(w: jax.Array, batch: Batch) -> jax.Array:
    """Maximum mean discrepancy with a Gaussian kernel."""
    x, y = batch["x"] @ w, batch["y"]
    kernel = lambda a, b: jnp.exp(-jnp.square(a[:, None] - b[None]).sum(-1)).mean()  # rows with other rows by sub
    return kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)


def vicreg(w: jax.Array, batch: Batch) -> jax.Array:
    x = batch["x"] @ w
    covariance = x.T @ x / (x.shape[0] - 1)
    return jnp.square(x - batch["y"]).mean() + jnp.square(covariance - jnp.eye(WIDTH)).sum()  # a sum or mean over rows


def decay_in_a_sum(w: jax.Array, batch: Batch) -> jp.Mean:
    """Each block would add the decay to its total, and the sum of totals is divided by the count of all blocks."""
    nats = jnp.square(batch["x"] @ w - batch["y"]).mean(-1) * batch["mask"]
    total = nats.sum() + 0.1 * jnp.square(w).sum()  # adds up a sum over rows and a value that is the same for all rows
    return jp.Mean(total, batch["mask"].sum())


def over_rows(w: jax.Array, batch: Batch) -> jax.Array:
    """Run a recurrence from row to row."""

    def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = jnp.tanh(carry + x @ w)  # carries values from row to row
        return carry, carry

    return jax.lax.scan(step, jnp.zeros(WIDTH), batch["x"])[1].mean()


def beside_the_diagonal(w: jax.Array, batch: Batch) -> jax.Array:
    similar = (batch["x"] @ w) @ batch["y"].T  # jp.all_rows
    return (similar.sum() - jnp.trace(similar)) / len(similar)


def kernel_of_two_rows(w: jax.Array, batch: Batch) -> jax.Array:
    """Convolve groups that have the features of two rows each."""
    x, groups = batch["x"].reshape(1, 1, -1), len(batch["x"]) // 2
    kernel = jnp.broadcast_to(w.ravel()[: 2 * DIM, None], (1, 2 * DIM, groups))
    numbers = ("NWC", "WIO", "NWC")
    conv = functools.partial(jax.lax.conv_general_dilated, dimension_numbers=numbers, feature_group_count=groups)
    return jnp.square(conv(x, kernel, (1,), "SAME")).mean()  # conv_general_dilated over rows


def views_beside_each_other(w: jax.Array, batch: Batch) -> jax.Array:
    views = jp.all_rows(jnp.stack([batch["x"] @ w, batch["y"]]))  # an array without all rows of the block
    return jnp.square(views.mean((0, 1)) - batch["y"]).mean()


def gathered_places(w: jax.Array, batch: Batch) -> jax.Array:
    place = jnp.arange(len(batch["x"]))
    right = place[:, None] == jp.all_rows(place)[None]  # passes to jp.all_rows a row's place in its block
    return -jnp.where(right, jax.nn.log_softmax(batch["x"] @ w @ jp.all_rows(batch["y"]).T), 0).sum(1).mean()


def _pairs(n: int, shift: int) -> tuple[jax.Array, ...]:
    """Return one list of indices for all rows, with each pair of features once, as DLRM makes it."""
    which = jnp.array(jnp.triu_indices(2))
    row = jnp.tile(jnp.arange(n)[:, None], [1, which.shape[1]]).reshape(1, -1)
    return tuple(jnp.concatenate([(row + shift) % n, jnp.tile(which, [1, n])]))


def pairs_of_features(w: jax.Array, batch: Batch) -> jax.Array:
    """Multiply a row's features with each other, as DLRM does. It was refused."""
    x = (batch["x"] @ w)[..., None] * batch["x"][:, None, :2]
    return jnp.square(x[_pairs(len(x), 0)].reshape(len(x), -1).sum(-1)).mean()


def pairs_after_many_equations(w: jax.Array, batch: Batch) -> jax.Array:
    """Indices follow from more equations than Python allows nested calls."""
    x = (batch["x"] @ w)[..., None] * batch["x"][:, None, :2]
    rows, *places = _pairs(len(x), 0)
    for _ in range(400):
        rows = (rows + 1) - 1
    return jnp.square(x[rows, *places].reshape(len(x), -1).sum(-1)).mean()


def pairs_of_the_next(w: jax.Array, batch: Batch) -> jax.Array:
    """Without labels these would be all rows in another order; with labels each row meets another row's label."""
    x = (batch["x"] @ w)[..., None] * batch["x"][:, None, :2]
    following = x[_pairs(len(x), 1)].reshape(len(x), -1).sum(-1)  # picks rows by computed indices
    return jnp.square(following - batch["y"][:, 0]).mean()


def pairs_by_column(w: jax.Array, batch: Batch) -> jax.Array:
    """Take rows 0, 1, 2, ... three times over: after the reshape, a row has elements of other rows."""
    x = batch["x"] @ w
    tiled = x[jnp.tile(jnp.arange(len(x)), 3), 0]  # picks rows by computed indices
    return jnp.square(tiled.reshape(len(x), 3).sum(-1)).mean()


def langevin(w: jax.Array, batch: Batch) -> jax.Array:
    """Take a step along the gradient of a mean, which has 1 / n in each row. Unknown powers passed."""
    x = batch["x"]
    x = x - jax.grad(lambda x: jnp.square(x @ w).mean())(x)
    return jnp.tanh(x @ w).mean()  # depends on how many rows a block has


@jax.custom_vjp
def normed(x: jax.Array) -> jax.Array:
    return x


normed.defvjp(lambda x: (x, None), lambda _, ct: (ct / jnp.linalg.norm(ct),))


@jax.custom_jvp
def centred(x: jax.Array) -> jax.Array:
    return x


centred.defjvp(lambda x, dx: (x[0], dx[0] - dx[0].mean(0)))


def moving_average(w: jax.Array, batch: Batch) -> jax.Array:
    """Weight rows by their place. The reader took it for their sum."""
    x = jnp.tanh(batch["x"] @ w)
    end, _ = jax.lax.scan(lambda c, row: (0.9 * c + 0.1 * row.mean(), None), 0.0, x)  # carries values from row to row
    return end / len(x)


def running_sums(w: jax.Array, batch: Batch) -> jax.Array:
    """Return every partial sum. The reader took each for the sum of all rows."""
    x = jnp.tanh(batch["x"] @ w)
    _, sums = jax.lax.scan(lambda c, row: (c + row.mean(), c + row.mean()), 0.0, x)  # carries values from row to row
    return sums.mean() / len(x)


def _segments(w: jax.Array, batch: Batch, segment_of: Callable[[Any], Any], segments: int | None = None) -> jax.Array:
    """Add up tokens of all rows in segments; `segment_of` maps the row of each token to its segment."""
    rows, length = batch["tokens"].shape
    tokens = jnp.tanh(w[batch["tokens"]]).reshape(-1, WIDTH)
    return jax.ops.segment_sum(tokens, segment_of(jnp.repeat(jnp.arange(rows), length)), segments or rows)


def first_in_place_of_some(w: jax.Array, batch: Batch) -> jax.Array:
    count = jnp.arange(len(batch["x"]))
    x = (batch["x"] @ w)[jnp.where(count < 2, 0, count), batch["label"]]  # picks rows by computed indices
    return jnp.square(x).mean()


def other_row_in_python(w: jax.Array, batch: Batch) -> jax.Array:
    x, n = batch["x"], len(batch["x"])
    return jnp.stack([jnp.tanh(x[i] @ w) * x[n - 1 - i].sum() for i in range(n)]).mean()  # takes some of the rows


def mean_in_python(w: jax.Array, batch: Batch) -> jax.Array:
    x, mean = batch["x"], (batch["x"] @ w).mean(0)
    return jnp.stack([jnp.tanh(x[i] @ w - mean) for i in range(len(x))]).mean()  # tanh to rows that hold a sum or mean


COUPLED = [ppo, triplet, discrepancy, vicreg, over_rows, beside_the_diagonal, kernel_of_two_rows]
COUPLED += [views_beside_each_other, gathered_places, pairs_of_the_next, pairs_by_column, langevin, moving_average]
COUPLED += [running_sums, first_in_place_of_some, other_row_in_python, mean_in_python]
# Losses of one line, and words of the message.
COUPLED_IN_A_LINE: dict[str, tuple[Loss, str]] = {
    "variance": (lambda w, b: mean(w, b) - (b["x"] @ w).std(0).mean(), "a sum or mean over rows"),
    # JAX keeps the mean over a vmapped axis as a collective over a dim. The reader took that for something else.
    "vmapped mean": (
        lambda w, b: jnp.tanh(jax.vmap(lambda x: x - jax.lax.pmean(x, "i"), axis_name="i")(b["x"] @ w)).mean(),
        "a sum or mean over rows",
    ),
    "one segment": (lambda w, b: jnp.square(_segments(w, b, jnp.zeros_like, 1)).mean(), "a sum or mean over rows"),
    "segments of the next": (
        lambda w, b: jnp.square(_segments(w, b, lambda row: (row + 1) % len(b["x"])) - b["y"]).mean(),
        "combines rows with other rows by sub",
    ),
    "segments reversed": (
        lambda w, b: jnp.square(_segments(w, b, lambda row: row[::-1]) - b["y"]).mean(),
        "combines rows with other rows by sub",
    ),
    "mixup": (lambda w, b: jnp.square((b["x"] + b["x"][::-1]) @ w - b["y"]).mean(), "reverses the order of rows"),
    "cumulative": (lambda w, b: jnp.square(jnp.cumsum(b["x"] @ w, axis=0)).mean(), "cumsum over rows"),
    "global maximum": (lambda w, b: jnp.square(b["x"] @ w / jnp.abs(b["x"] @ w).max()).mean(), "maximum over rows"),
    "log of a mean": (lambda w, b: jnp.log(jnp.square(b["x"] @ w).mean()), "log to a sum or mean over rows"),
    "root of a mean": (lambda w, b: jnp.linalg.norm(b["x"] @ w) / len(b["x"]), "sqrt to a sum or mean over rows"),
    "last row": (lambda w, b: jnp.square(b["y"] - (b["x"] @ w)[-1]).mean(), "takes some of the rows"),
    "first rows": (lambda w, b: (b["x"] @ w)[jnp.arange(4), 0].mean(), "picks rows by computed indices"),
    # The reader took these for `x[jnp.arange(len(x)), labels]`: they trained silently with wrong gradients.
    "first three": (
        lambda w, b: jnp.square((b["x"] @ w)[jnp.arange(3)[None], b["label"][:, None]]).mean(),
        "picks rows by computed indices",
    ),
    # Row 7 is the last row of a block, and not of twice as many rows. It passed.
    "picks that end": (
        lambda w, b: jnp.square((b["x"] @ w)[jnp.minimum(jnp.arange(len(b["x"])), 7)] - b["y"]).mean(),
        "picks rows by computed indices",
    ),
    "permuted": (
        lambda w, b: jnp.tanh(b["x"] @ w - jax.random.permutation(jax.random.key(0), b["y"])).mean(),
        "picks rows by computed indices",
    ),
    "next to the diagonal": (lambda w, b: jnp.diagonal((b["x"] @ w) @ b["y"].T, 1).mean(), "jp.all_rows"),
    # The block has fewer rows than the batch.
    "count in each row": (
        lambda w, b: jnp.tanh(b["x"] @ w / len(b["x"]) ** 0.5).mean(),
        "depends on how many rows a block has",
    ),
    "scaled by the count": (
        lambda w, b: mean(w, b) + 0.1 * len(b["x"]) * jnp.square(w).sum(),
        "a value that depends on how many rows a block has",
    ),
    "log of the count": (
        lambda w, b: mean(w, b) + jnp.log(jnp.ones_like(b["mask"]).sum()) * jnp.square(w).sum(),
        "a value that depends on how many rows a block has",
    ),
    # The reader read only the forward of a function, and not its own derivative: gradients were 1.97 off.
    "normed gradient": (lambda w, b: jnp.square(normed(b["x"] @ w)).mean(), "sqrt to a sum or mean over rows"),
    "centred tangent": (lambda w, b: jnp.square(centred(b["x"] @ w)).mean(), "the gradient of a row depends on"),
}


def cases_of_coupled_losses() -> Iterator[Any]:
    """Yield each loss, the line that the error must name, and words of its message."""
    for loss in COUPLED:
        lines, first = inspect.getsourcelines(loss)
        (place,) = [i for i, line in enumerate(lines) if "  # " in line]
        yield pytest.param(loss, first + place, lines[place].split("  # ")[1].strip(), id=loss.__name__)
    for name, (loss, words) in COUPLED_IN_A_LINE.items():
        yield pytest.param(loss, loss.__code__.co_firstlineno, words, id=name)


@pytest.mark.parametrize(("loss", "line", "words"), [*cases_of_coupled_losses()])
def test_a_loss_that_couples_rows_is_named_by_its_line(loss: Loss, line: int, words: str) -> None:
    """PPO's normalisation of advantages trained without a warning, with a gradient 63% off."""
    with pytest.raises(ValueError, match=rf"test_rows\.py:{line}\b.*{re.escape(words)}"):
        traced(model_of(loss))
    assert traced(model_of(loss, rows="independent")) == []


def test_what_is_written_most_is_refused_in_every_sample() -> None:
    """The two most frequent mistakes are in every sample of the tests: a masked mean, and a decay added to a sum."""
    with pytest.raises(ValueError, match="divides one sum over rows by another"):
        traced(model_of(masked_mean))
    with pytest.raises(ValueError, match="adds up a sum over rows and a value that is the same for all rows"):
        traced(model_of(decay_in_a_sum))


def test_the_line_is_the_callers_not_a_librarys() -> None:
    """The error named a line within Optax or Flax, and not the user's line that calls them."""

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm = nnx.LayerNorm(DIM, reduction_axes=0, feature_axes=-1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.norm(x)  # over rows

    def contrastive(w: jax.Array, batch: Batch) -> jax.Array:
        return optax.losses.ntxent(batch["x"] @ w, batch["label"])  # in the loss

    net = jp.from_nnx(lambda rngs: Net(rngs), lambda module, batch: module(batch["x"]).mean())
    lines, first = inspect.getsourcelines(test_the_line_is_the_callers_not_a_librarys)
    for model, comment in ((net, "over rows"), (model_of(contrastive), "in the loss")):
        line_number = next(first + i for i, line in enumerate(lines) if line.rstrip().endswith(f"# {comment}"))
        with pytest.raises(ValueError, match=rf"test_rows\.py:{line_number}\b") as caught:
            traced(model)
        assert "site-packages" not in str(caught.value)


# -- losses that do not -----------------------------------------------------------------------------------------------


def weighted(w: jax.Array, batch: Batch) -> jp.Mean:
    nats = optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ w, batch["label"])
    return jp.Mean((nats * batch["mask"]).sum(), batch["mask"].sum() + 1e-8)


def smoothed(w: jax.Array, batch: Batch) -> jax.Array:
    labels = optax.smooth_labels(jax.nn.one_hot(batch["label"], WIDTH), 0.1)
    nats = optax.softmax_cross_entropy(batch["x"] @ w, labels)
    return jnp.where(batch["mask"] > 0, nats, 0).mean()


def frames(w: jax.Array, batch: Batch) -> jax.Array:
    """Vmap a convolution over axis 1, as SAVi does over time: the error said that it takes some of the rows."""
    video = jnp.stack([batch["x"], 2 * batch["x"], batch["x"]], 1)[..., None]  # [rows, 3, features, 1]
    kernel = w[:3, :4].reshape(3, 1, 4)
    conv = lambda x: jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return jnp.square(jax.vmap(conv, 1, 1)(video)[:, 0]).mean()


def attention(w: jax.Array, batch: Batch) -> jax.Array:
    x = jax.nn.one_hot(batch["tokens"], DIM) @ w
    x = jax.nn.dot_product_attention(x[:, :, None], x[:, :, None], x[:, :, None], is_causal=True)[:, :, 0]
    return jnp.square(x).mean()


def merged(w: jax.Array, batch: Batch) -> jax.Array:
    """Merge [B, T] -> [B T], look labels up, run over chunks of tokens, and split again."""
    x = w[batch["tokens"]].reshape(-1, WIDTH)
    labels = batch["tokens"].reshape(-1) % WIDTH
    x = x - (optax.softmax_cross_entropy_with_integer_labels(x, labels) + x[jnp.arange(labels.size), labels])[:, None]
    x = jax.lax.map(jnp.tanh, x.reshape(4, -1, WIDTH)).reshape(-1, 7, WIDTH)
    return x.mean(1).mean()


def inside_a_row(w: jax.Array, batch: Batch) -> jax.Array:
    x = batch["x"] @ w
    top, _ = jax.lax.top_k(jnp.sort(x, axis=1), 2)
    return top.mean() + jax.nn.logsumexp(jnp.cumsum(x, axis=1), axis=1).mean() + (x - x.mean(1, keepdims=True)).mean()


def by_row(w: jax.Array, batch: Batch) -> jax.Array:
    """Vmap over rows, with segments inside a row and a choice by row."""

    def one_row(x: jax.Array, tokens: jax.Array, label: jax.Array) -> jax.Array:
        sums = jax.ops.segment_sum(w[tokens], tokens, num_segments=DIM)
        return jax.lax.cond(label > 2, jnp.sin, jnp.cos, sums.sum() + (x @ w)[label])

    return jax.vmap(one_row)(batch["x"], batch["tokens"], batch["label"]).mean()


def two_views(w: jax.Array, batch: Batch) -> jax.Array:
    """Concatenate two views and split them again, as preference losses do."""
    views = jnp.concatenate([batch["x"], 2 * batch["x"]]) @ w
    better, worse = jnp.split(views, 2)
    return -jax.nn.log_sigmoid(better - worse).mean()


def with_all_rows(w: jax.Array, batch: Batch) -> jax.Array:
    """Use all rows of the microbatch: normalise by them, compare rows with them, balance them."""
    x = batch["x"] @ w
    all_rows = jp.all_rows(x)
    x = (x - all_rows.mean(0)) / (all_rows.std(0) + 1e-5)
    nats = -jax.nn.log_softmax(x @ jp.all_rows(batch["y"]).T).mean(-1)
    return nats.mean() + 0.01 * jnp.square(jax.nn.softmax(all_rows).mean(0)).sum()


def rows_in_python(w: jax.Array, batch: Batch) -> jax.Array:
    """Loop over rows in Python: stack, concatenate or add up, by functions with their own derivative as well."""
    x, n = batch["x"], len(batch["x"])
    parts = jnp.stack([jax.nn.relu(x[i] @ w) * x[i].sum() for i in range(n)], axis=1).mean()
    parts += jnp.concatenate([jnp.tanh(x[i : i + 1] @ w) for i in range(n)]).mean()
    parts += sum(jnp.tanh(row @ w).sum() for row in x) / n
    total = 0.5 * jnp.sum(w**2) * n
    for label, row in zip(batch["label"], x, strict=True):
        total = total + label * jax.nn.silu(row @ w).sum()
    return parts + total / n


def loop_by_row(w: jax.Array, batch: Batch) -> jax.Array:
    """Run a loop that each row ends after its own number of steps."""

    def one_row(x: jax.Array) -> jax.Array:
        continues = lambda carry: carry[1] < 3 * jnp.abs(x[0])
        return jax.lax.while_loop(continues, lambda carry: (jnp.tanh(carry[0]), carry[1] + 1), (x.sum(), 0.0))[0]

    return mean(w, batch) + jax.lax.stop_gradient(jax.vmap(one_row)(batch["x"])).mean()


def eigenvalues(w: jax.Array, batch: Batch) -> jax.Array:
    """Use the eigenvalues of a matrix of parameters, as S4 does. Two results of different rank gave an IndexError."""
    values, vectors = jnp.linalg.eigh(w.T @ w)
    return jnp.square(batch["y"] @ vectors * values.astype(jnp.float32)).mean()


def tokens_beside_rows(w: jax.Array, batch: Batch) -> jax.Array:
    """Broadcast values to all rows: a class token, and positions counted by a mask, as in BLOOM."""
    x = w[batch["tokens"]]
    first = jnp.broadcast_to(w[None, :1], (x.shape[0], 1, WIDTH))
    counted = jnp.cumsum(jnp.ones(x.shape[:2]), axis=1)[..., None]
    flipped = jnp.sort(jnp.ones_like(x) * w[0], axis=2)[:, ::-1]
    bias = w[:2, None, None]  # [2, 1, 1, W], which an addition spreads itself
    return ((jnp.concatenate([first, jnp.tanh(x + counted) + flipped], axis=1)[None] + bias) ** 2).mean()


def capacity_in_a_row(w: jax.Array, batch: Batch) -> jax.Array:
    """Fill the buffers of a mixture of experts row by row: each row is a group."""
    x = jax.nn.one_hot(batch["tokens"], DIM)
    gates = jax.nn.softmax(x @ w)
    chosen = jax.nn.one_hot(gates.argmax(-1), WIDTH)
    place = jnp.cumsum(chosen, axis=1) * chosen - 1
    sent = jax.nn.one_hot(place.astype(jnp.int32), 2) * (place < 2)[..., None]
    buffers = jnp.einsum("bsec,bsd->ebcd", sent, x)
    combined = jnp.einsum("bsec,ebcd->bsd", sent * gates[..., None], jnp.tanh(buffers))
    return jnp.square(combined @ w - batch["y"][:, None]).mean()


def numbered_rows(w: jax.Array, batch: Batch) -> jax.Array:
    """Divide by n before the sum, weight by 1 / n, and index with NumPy's arange."""
    x, n = batch["x"] @ w - batch["y"], len(batch["x"])
    weights = np.ones(n, np.float32) / n
    return x[np.arange(n), batch["label"]].mean() + jnp.maximum(x / n, 0).sum() + weights @ jnp.abs(x / 2).mean(-1)


def solved(w: jax.Array, batch: Batch) -> jax.Array:
    """Solve systems of equations for each row, with one matrix and with one for each row. They were refused."""
    matrix = w @ w.T + jnp.eye(DIM)
    lower = jnp.linalg.cholesky(matrix)
    triangular = jax.vmap(lambda x: jax.scipy.linalg.solve_triangular(lower, x, lower=True))(batch["x"])
    columns = jax.scipy.linalg.solve_triangular(lower, batch["x"].T, lower=True)
    by_factors = jax.vmap(lambda x: x @ jax.scipy.linalg.cho_solve((lower, True), x))(batch["x"])
    shared = jax.vmap(lambda x: jnp.linalg.solve(matrix, x))(batch["x"])
    by_own_matrix = jax.vmap(lambda x: jnp.linalg.solve(matrix + jnp.outer(x, x), x))(batch["x"])
    return sum((jnp.square(x).mean() for x in (triangular, columns, shared, by_own_matrix)), by_factors.mean())


def kernel_of_each_channel(w: jax.Array, batch: Batch) -> jax.Array:
    """Vmap a convolution over channels and rows, which become groups of features. It was refused."""
    x = jax.nn.one_hot(batch["tokens"], WIDTH)
    channel = lambda x, w: jnp.convolve(x, w)[: len(x)]
    return jnp.square(jax.vmap(lambda x: jax.vmap(channel, 1, 1)(x, w))(x)).mean()


def kernel_of_each_row(w: jax.Array, batch: Batch) -> jax.Array:
    """Use gradients of a convolution for each row, a step along them, and a kernel that each row predicts.

    In these programs rows are groups of features. They were refused.
    """
    images = jax.nn.one_hot(batch["tokens"], DIM)  # [rows, 7, DIM]
    conv = functools.partial(jax.lax.conv_general_dilated, window_strides=(1,), padding="SAME")
    convolve = lambda x, w: conv(x[None], w.reshape(1, DIM, WIDTH), dimension_numbers=("NWC", "WIO", "NWC"))[0]
    row_loss = lambda w, x: jnp.square(jnp.tanh(convolve(x, w))).mean()
    grads = jax.vmap(jax.grad(row_loss), (None, 0))(w, images)
    adapted = jax.vmap(lambda x: row_loss(w - 0.1 * jax.grad(row_loss)(w, x), x))(images)
    predicted = jax.vmap(convolve)(images, batch["x"][:, :, None] * w)
    return jnp.square(grads).mean() + adapted.mean() + jnp.tanh(predicted).mean()


def segments(w: jax.Array, batch: Batch) -> jax.Array:
    """Sum the tokens of each row by segment indices; without labels, rows may be in another order."""
    x, n = batch["x"] @ w, len(batch["x"])
    segment_functions = [lambda row: row, lambda row: jnp.arange(row.size) // 7, lambda row: np.repeat(np.arange(n), 7)]
    by_segments = sum(jnp.tanh(_segments(w, batch, segment_of) - batch["y"]) for segment_of in segment_functions)
    by_scatter = jnp.ones_like(x).at[jnp.arange(n)].add(x)
    return jnp.square(by_segments * by_scatter).mean() + jnp.tanh(_segments(w, batch, lambda row: (row + 1) % n)).mean()


APART = [segments, solved, kernel_of_each_channel, kernel_of_each_row, numbered_rows, tokens_beside_rows, weighted]
APART += [smoothed, attention, merged, inside_a_row, by_row, frames, eigenvalues, loop_by_row]
APART += [rows_in_python, two_views, with_all_rows, capacity_in_a_row, pairs_of_features]
APART += [pairs_after_many_equations]
APART_IN_A_LINE: dict[str, Loss] = {
    "indexed": lambda w, b: jax.nn.log_softmax(b["x"] @ w)[jnp.arange(len(b["x"])), b["label"]].mean(),
    "taken along": lambda w, b: jnp.take_along_axis(jnp.tanh(b["x"] @ w), b["label"][:, None], 1).mean(),
    "mean of a mean": lambda w, b: (jnp.square(b["x"] @ w) + 0.1 * jnp.abs(b["x"] @ w).mean()).mean(),
    "gradient of each row": lambda w, b: norms(jax.vmap(jax.grad(lambda x: jnp.tanh(x @ w).sum()))(b["x"])).mean(),
    # One query for all rows: the warning said that it depends on a row's place.
    "class token": lambda w, b: jnp.square(b["x"] @ w + jnp.tile(w[:1], (len(b["x"]), 1))).mean(),
    # A jitted function without arguments, as diffrax calls it: it ended in an IndexError.
    "called with nothing": lambda w, b: (b["y"] * jax.jit(lambda: jnp.arange(1.0, WIDTH + 1))() @ w.T).mean(),
    # The square of the root of a sum over rows: it was refused for the root.
    "norm squared": lambda w, b: jnp.linalg.norm(b["x"] @ w) ** 2 / len(b["x"]),
    "norm of a tree": lambda w, b: jnp.square(optax.tree.norm(b["x"] @ w)) / b["y"].size,
    # A derivative that calls its function: the reader recursed into it until Python's stack overflowed.
    "own derivative": lambda w, b: jnp.square(softmax(b["x"] @ w)).mean(),
    # A density whose triangular solve has rows as columns: it was refused.
    "normal": lambda w, b: jax.scipy.stats.multivariate_normal.logpdf(b["x"], w[:, 0], w @ w.T + jnp.eye(DIM)).mean(),
    # Chunks of rows are added up in a loop that starts with a weakly typed 0. The mean of each chunk was refused.
    "in chunks": lambda w, b: jax.lax.scan(add_mean, 0.0, square(w, b).reshape(4, -1))[0] / 4,
}


@jax.custom_vjp
def softmax(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x)


softmax.defvjp(lambda x: (softmax(x), softmax(x)), lambda y, ct: (y * (ct - (y * ct).sum(-1, keepdims=True)),))


def norms(x: jax.Array) -> jax.Array:
    return jnp.linalg.norm(x, axis=1)


def add_mean(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
    return total + x.mean(), None


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", [*APART, *APART_IN_A_LINE.values()], ids=[*(f.__name__ for f in APART), *APART_IN_A_LINE]
)
def test_a_loss_that_does_not_gives_no_alarm(loss: Loss) -> None:
    uses_all_rows = loss is with_all_rows
    assert traced(model_of(loss), "data=2" if uses_all_rows else "data=2,microbatches=2") == []
    assert uses_all_rows or traced(model_of(loss), "data=1,microbatches=4") == []


def test_a_derivative_of_a_package_whose_name_begins_with_jax_is_read() -> None:
    """jaxopt's folder begins with jax's, so that its derivatives were trusted unread."""
    names: dict[str, Any] = {}
    source = (
        inspect.getsource(normed.fun) + "normed.defvjp(lambda x: (x, None), lambda _, ct: (ct / jnp.linalg.norm(ct),))"
    )
    file = f"{Path(jax.__file__).parent}opt/losses.py"
    exec(compile(f"import jax\nfrom jax import numpy as jnp\n{source}", file, "exec"), names)
    with pytest.raises(ValueError, match="couples rows"):
        traced(model_of(lambda w, batch: jnp.square(names["normed"](batch["x"] @ w)).mean()))


def test_dims_and_branches_may_depend_on_the_number_of_rows() -> None:
    """The check ended in `zip() argument 2 is longer`."""

    def padded(w: jax.Array, batch: Batch) -> jax.Array:
        errors = square(w, batch)
        return jnp.pad(errors.reshape([2] * (len(errors).bit_length() - 1)), 1).sum() / len(errors)

    def branches(w: jax.Array, batch: Batch) -> jax.Array:
        errors = square(w, batch)
        return jax.lax.switch(jnp.int32(1), [lambda x: x.mean()] * len(errors), errors)

    assert "pad" in traced(model_of(padded))[0]
    assert "chooses among as many branches" in traced(model_of(branches))[0]


@pytest.mark.parametrize("name", ["resnet", "resnet_linen"])
def test_batch_norm_gives_no_alarm_with_one_replica(name: str) -> None:
    """With one replica the trace does not show that BatchNorm takes all rows."""
    entry = ZOO[name]()
    assert traced(entry.model, "data=1,microbatches=2", entry.batch) == []


@pytest.mark.parametrize("rows", [2, 4])
def test_groups_and_strides_of_as_few_rows_as_a_block_has(rows: int) -> None:
    """If each group has one row of a block, the reader took a mean over a group for a sum, and refused it."""
    groups: list[Loss] = [
        lambda w, batch: square(w, batch).reshape(2, -1).mean(1).mean(),
        lambda w, batch: jnp.square(batch["x"] @ w).reshape(2, -1).mean(1).mean(),
        lambda w, batch: (batch["x"] @ w).reshape(-1, 2, WIDTH).mean(1).mean(),
        lambda w, batch: (batch["x"] @ w).reshape(2, -1, WIDTH).mean((0, 1)).mean(),
        lambda w, batch: jax.lax.map(jnp.mean, square(w, batch).reshape(2, -1)).mean(),
        lambda w, batch: jax.vmap(jnp.mean)(square(w, batch).reshape(-1, 2)).mean(),
        lambda w, batch: square(w, batch)[::2].mean(),
        lambda w, batch: 2 * square(w, batch)[1::2].sum() / len(batch["x"]),
    ]
    batch = jax.tree.map(lambda x: x[: 2 * rows], BATCH)
    for number, loss in enumerate(groups):
        messages = traced(model_of(loss), "data=2", batch)
        if rows == 2:
            assert any("reads as a mean over rows in blocks of 4 rows or more" in message for message in messages), (
                number
            )
        else:
            assert bool(messages) == (number > 5)  # a row's place decides


class MaskedNorm(nnx.Module):
    """A BatchNorm over the rows that a mask selects, by sums over all rows."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale, self.mean = nnx.Param(jnp.ones(WIDTH)), nnx.BatchStat(jnp.zeros(WIDTH))

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        everyone, real = jp.all_rows(x), jp.all_rows(mask)[:, None]
        mean = (everyone * real).sum(0) / real.sum()
        var = (jnp.square(everyone - mean) * real).sum(0) / real.sum()
        self.mean[...] = 0.9 * self.mean + 0.1 * mean
        return (x - mean) * jax.lax.rsqrt(var + 1e-5) * self.scale


class FlaxNorm(nnx.BatchNorm):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        return super().__call__(x, mask=mask[:, None] > 0)


class Normed(nnx.Module):
    def __init__(self, norm: Callable[..., nnx.Module], rngs: nnx.Rngs) -> None:
        self.inner, self.norm = nnx.Linear(DIM, WIDTH, rngs=rngs), norm(rngs=rngs)

    def __call__(self, batch: Batch) -> jax.Array:
        return self.norm(self.inner(batch["x"]), batch["mask"])


class LinenNormed(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, train: bool) -> jax.Array:
        return nn.BatchNorm(use_running_average=not train)(nn.Dense(WIDTH)(x), mask=mask[:, None] > 0)


def weighed(out: jax.Array, batch: Batch) -> jp.Mean:
    errors = jnp.square(out - batch["y"]).sum(-1)
    return jp.Mean((errors * batch["mask"]).sum(), batch["mask"].sum())


@pytest.mark.slow
def test_batch_norm_of_a_mask_is_named_and_what_is_advised_works() -> None:
    """Flax averages means of unequal numbers of rows. The error advised "return jp.Mean", which a norm cannot do."""
    normed = lambda norm: jp.from_nnx(lambda rngs: Normed(norm, rngs), lambda net, batch: weighed(net(batch), batch))
    linen = jp.from_linen(
        LinenNormed(), lambda apply, b: weighed(apply(b["x"], b["mask"], train=apply.train), b), BATCH
    )
    for model in (normed(FlaxNorm), linen):
        with pytest.raises(ValueError, match="as BatchNorm does with mask=; leave mask= out, or write a norm"):
            traced(model, "data=2")
    assert traced(normed(MaskedNorm), "data=2") == []
    assert jp.verify(normed(MaskedNorm), "data=2,fsdp=2", BATCH, mesh=jax.devices()[:4]).ok


# -- messages, and when they come -------------------------------------------------------------------------------------


def opaque(w: jax.Array, b: Batch) -> jax.Array:
    x = b["x"] @ w
    x = x + jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))
    return jnp.square(x - b["y"]).mean()


def ended(w: jax.Array, b: Batch) -> jax.Array:
    """End a loop by a primitive without a rule, as diffrax does. It was an error."""
    x = jax.lax.stop_gradient(b["x"] @ w)
    continues = lambda x: jax.pure_callback(lambda x: (x > 1).any(), jax.ShapeDtypeStruct((), bool), x)
    return mean(w, b) + jax.lax.while_loop(continues, lambda x: x / 2, x).mean()


def softmax_by_hand(w: jax.Array, b: Batch) -> jax.Array:
    x = b["x"] @ w
    x = jnp.exp(x - jax.lax.stop_gradient(x.max()))  # of no effect
    return -jnp.log(x[:, 0] / x.sum(-1)).mean()


def ragged(w: jax.Array, b: Batch) -> jax.Array:
    """Mark where each expert's tokens begin, as Tunix and MaxText do. It was an error."""
    order, counts = jnp.argsort(b["label"]), jnp.bincount(b["label"], length=WIDTH)
    experts = jnp.repeat(jnp.arange(WIDTH), counts, total_repeat_length=b["label"].size)
    sent = jax.lax.ragged_dot(b["x"][order], jnp.stack([w] * WIDTH), counts) * w[0, experts, None]
    return jnp.square(sent[jnp.argsort(order)] - b["y"]).mean()


def until_all_are_small(w: jax.Array, b: Batch) -> jax.Array:
    """The number of steps depends on all rows, though the carry does not."""
    x = b["x"] @ w
    size = jnp.abs(jax.lax.stop_gradient(x))
    return (x * jax.lax.while_loop(lambda c: (c * size).max() > 0.5, lambda c: c * 0.9, 1.0)).mean()


def on_the_diagonal(w: jax.Array, b: Batch) -> jax.Array:
    """Multiply rows with all rows, and use the diagonal alone. It was an error."""
    similar = (b["x"] @ w) @ b["y"].T
    traced, diagonal = jnp.trace(similar) / len(similar), jnp.diagonal(jnp.tanh(similar / 2).T).mean()
    return traced + diagonal + (similar * jnp.eye(len(similar))).sum() / len(similar)


def sorted_back(w: jax.Array, b: Batch) -> jax.Array:
    x = square(w, b)
    return (jnp.sort(x)[jnp.argsort(jnp.argsort(x))] * b["mask"]).mean()


def put_back(w: jax.Array, b: Batch) -> jax.Array:
    order = jax.random.permutation(jax.random.key(0), len(b["x"]))
    x = jnp.zeros_like(b["y"]).at[order].set(jnp.tanh((b["x"] @ w)[order]))
    return jnp.square(x - b["y"]).mean()


def of_no_rule(w: jax.Array, b: Batch) -> jax.Array:
    weight = lambda x: jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))
    return jnp.stack([weight(row @ w) * (row @ w) for row in b["x"]]).mean()  # a callback has no rule for vmap


def row_by_row(w: jax.Array, b: Batch) -> jax.Array:
    """Multiply row by row in a mixture of experts: vmap of `ragged_dot` raised a raw NotImplementedError."""

    def of_row(x_D: jax.Array) -> jax.Array:
        sizes = jnp.bincount((x_D[:1] > 0).astype(int), length=2)
        return jnp.square(jax.lax.ragged_dot(x_D[None], jnp.stack([w, -w]), sizes)).mean()

    return jax.lax.map(of_row, b["x"]).mean()


def slope(loop: Callable[[jax.Array], jax.Array]) -> Loss:
    """The derivative of a loop pads each row with zeros, and was refused: "pad by what depends on how many rows"."""
    return lambda w, b: jnp.square(b["x"] @ w - jax.grad(lambda x: loop(x).sum())(b["x"] @ w)).mean()


def of_segments(segment_of: Callable[[Any], Any]) -> Loss:
    return lambda w, b: jnp.tanh(_segments(w, b, segment_of)).mean()


PLACE, SCATTER = "a row's place in its block", "applies scatter-add to rows at computed indices"
# The rows of the batch, of which a block has a quarter; a loss; and words of the one warning.
WARNED: list[tuple[int, Loss, str]] = [
    (32, opaque, "pure_callback may mix rows"),
    (32, ended, "pure_callback may mix rows"),
    (32, softmax_by_hand, "maximum over rows"),
    (32, ragged, "sort over rows"),
    (32, until_all_are_small, "all rows of a block have ended"),
    (32, on_the_diagonal, "multiplies rows with other rows"),
    (32, row_by_row, "a loop over rows that jax.vmap cannot run for all rows at once (ragged_dot"),
    (32, of_no_rule, "another program for twice"),
    # A scan over rows and places: the reader forgot that places differ from step to step, and it passed.
    (
        32,
        lambda w, b: jax.lax.map(lambda x: jnp.tanh(x[0] * x[1]), (b["x"] @ w, jnp.arange(len(b["x"])) * 1.0)).mean(),
        PLACE,
    ),
    (32, lambda w, b: jax.lax.scan(lambda c, x: (c / 2, jnp.tanh(x * c)), 1.0, b["x"] @ w)[1].mean(), PLACE),
    (
        32,
        lambda w, b: jnp.stack([(1.0 + i) * jnp.tanh(b["x"][i] @ w) for i in range(len(b["x"]))]).mean(),
        "by mul with a value that depends on a row's place",
    ),
    # The reader took a number that is the same for two rows, and not for four, for a constant.
    (8, lambda w, b: jnp.where(jnp.arange(len(b["x"]))[:, None] < 2, b["x"] @ w, 0).mean(), PLACE),
    # A mask that is true for all rows of a block, and of twice as many, trained without a warning.
    (32, lambda w, b: jnp.where(jnp.arange(len(b["x"]))[:, None] < 16, b["x"] @ w, 0).mean(), "applies lt to places"),
    (32, lambda w, b: ((b["x"] @ w) * (1.0 + jnp.arange(len(b["x"])) // 16)[:, None]).mean(), "applies div to places"),
    # The divisor is the same for 2 rows and for 4.
    (8, lambda w, b: square(w, b).sum() / max(len(b["x"]) // 4, 1), "a mean over rows in blocks of 4 rows or more"),
    # Rows that go back to where they were: they were refused, and the reader cannot prove that they go back.
    (32, sorted_back, "sort over rows"),
    (32, put_back, "picks rows"),
    (32, lambda w, b: jnp.tanh(jnp.fft.ifft(jnp.fft.fft(b["x"] @ w, axis=0), axis=0).real).mean(), "Fourier"),
    (32, lambda w, b: jnp.tanh(jnp.fft.irfft2(jnp.fft.rfft2(b["x"] @ w), (8, WIDTH))).mean(), "Fourier"),
    (
        32,
        lambda w, b: jnp.square(jnp.roll(jnp.tanh(jnp.roll(b["x"] @ w, 1, 0)), -1, 0) - b["y"]).mean(),
        "the row's place in its block",
    ),
    (32, lambda w, b: sum(x.mean() for x in jnp.split(square(w, b), 2)) / 2, "takes some of the rows"),
    (16, slope(lambda x: jnp.stack([jnp.tanh(row) * row.sum() for row in x])), "rows"),
    (16, slope(lambda x: jnp.concatenate([jnp.tanh(x[i : i + 1]) * x[i].sum() for i in range(len(x))])), "rows"),
    # Segments that may be of several rows.
    (32, of_segments(lambda row: row // 2), SCATTER),
    (32, of_segments(lambda row: row % 8), SCATTER),
    (32, of_segments(lambda row: jnp.sort(row % 4 * 2)), SCATTER),
    (32, of_segments(lambda row: jnp.tile(row[::7], 7)), SCATTER),
    (32, of_segments(lambda row: jnp.where(jnp.arange(row.size) < 5, row[-1], row)), SCATTER),
    (32, of_segments(lambda row: row - 1), SCATTER),
    (32, of_segments(lambda row: row % 16), "applies rem to places"),
    (32, of_segments(lambda row: jnp.minimum(row, 15)), "applies min to places"),
    (32, of_segments(lambda row: row + (row >> 4)), "applies shift_right_arithmetic to places"),
]


def lines_of(code: types.CodeType) -> set[int]:
    """Return the lines of a function and of those within it."""
    within = [lines_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {line for *_, line in code.co_lines() if line}.union(*within)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "loss", "words"), WARNED)
def test_what_may_couple_rows_is_a_warning(rows: int, loss: Loss, words: str) -> None:
    batch = jax.tree.map(lambda x: x[:rows], BATCH)
    (message,) = traced(model_of(loss), batch=batch)
    assert "may couple rows" in message
    assert words in message
    named = {int(line) for line in re.findall(r"test_rows\.py:(\d+)", message)}
    assert named or "in blocks of 4 rows or more" in message  # which is of the loss as a whole
    inner = [cell.cell_contents.__code__ for cell in loss.__closure__ or ()]
    assert named <= set().union(*map(lines_of, (loss.__code__, square.__code__, _segments.__code__, *inner)))
    assert traced(model_of(loss, rows="independent"), batch=batch) == []


def thrice(w: jax.Array, b: Batch) -> jax.Array:
    first, second = jnp.split(square(w, b), 2)
    return first.mean() + jnp.tanh(first.mean() + second.mean())


SOME = "takes some of the rows"
# Rows that do not go back, in the same form.
REFUSED: list[tuple[int, Loss, str]] = [
    (32, lambda w, b: jnp.square(jnp.fft.fft(b["x"] @ w, axis=0).real - b["y"]).mean(), "Fourier"),
    (32, lambda w, b: jnp.multiply(*(x.mean() for x in jnp.split(square(w, b), 2))), SOME),
    (32, lambda w, b: jnp.subtract(*(x.mean() for x in jnp.split(square(w, b), 2))), SOME),
    (32, thrice, SOME),
    (16, lambda w, b: jnp.tanh(jnp.pad((b["x"] @ w)[:1], ((1, len(b["x"]) - 2), (0, 0))) + b["x"] @ w).mean(), SOME),
    (
        16,
        lambda w, b: jnp.tanh(1 + jnp.pad(b["x"] @ w, ((0, 0), (len(b["x"]), 0)))[:, :WIDTH]).mean(),
        "passes to pad a value that depends on how many rows",
    ),
    # A block with only the rows that a slice drops gave a ZeroDivisionError.
    (8, lambda w, b: jnp.concatenate([jnp.tanh(b["x"][:2] @ w), b["x"][2:] @ w]).mean(), SOME),
    *((n, lambda w, b: square(w, b).reshape(2, -1).sum(1).mean(), "is a sum over rows") for n in (8, 16, 32)),
    *((n, lambda w, b: square(w, b)[: len(b["x"]) // 2].mean(), SOME) for n in (8, 16, 32)),
]


@pytest.mark.parametrize(("rows", "loss", "words"), REFUSED)
def test_rows_that_do_not_go_back_are_refused(rows: int, loss: Loss, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        traced(model_of(loss), batch=jax.tree.map(lambda x: x[:rows], BATCH))


def test_a_metric_that_couples_rows_is_a_warning() -> None:
    """The gradients are right, and the reported metric is wrong."""

    def measured(w: jax.Array, batch: Batch) -> Any:
        value = mean(w, batch)
        return value, {
            "perplexity": jnp.exp(value),
            "count": jp.Mean(batch["mask"].sum(), jnp.float32(len(batch["x"]))),
        }

    (message,) = traced(model_of(measured))
    assert "metric 'perplexity'" in message
    assert "applies exp to" in message


def test_it_asks_only_where_rows_are_spread() -> None:
    assert traced(model_of(ppo), "data=1") == []
    for strategy in ("data=2", "data=1,microbatches=2"):
        with pytest.raises(ValueError, match="rows='independent'"):
            traced(model_of(ppo), strategy)
    read = {name: BATCH[name] for name in ("x", "y")}
    with pytest.raises(ValueError, match=r"(?s)2 replicas x 2 microbatches.*a sum or mean over rows"):
        jp.verify(model_of(ppo), "data=2,microbatches=2", read, mesh=jax.devices()[:2])


def test_a_loop_over_layers_is_traced_twice() -> None:
    """The model ran four times.

    Its trace was compared after its layers had become a scan, and never fitted the trace of twice the rows.
    """
    traces = 0

    def loss(params: list[jax.Array], batch: Batch, key: jax.Array | None) -> jax.Array:
        nonlocal traces
        traces += 1
        x = batch["x"]
        for w in params:
            x = x + jnp.tanh(x @ w)
        return (x**2).mean()

    model = jp.Model(init=lambda key: [jnp.eye(DIM)] * 3, loss=loss)
    assert traced(model, "data=2", {"x": BATCH["x"]}) == []
    assert traces == 2


def test_layers_in_a_loop_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer was read anew: 15% of the time that tracing and lowering 8 blocks of attention and MLP took."""
    read, finish = list[str](), Reader._finish
    counting = lambda self, eqn, *args: read.append(eqn.primitive.name) or finish(self, eqn, *args)
    monkeypatch.setattr(Reader, "_finish", counting)

    def num_tanhs(num_layers: int) -> int:
        def loss(params: list[jax.Array], batch: Batch, key: jax.Array | None) -> jax.Array:
            x = batch["x"]
            for w in params:
                x = x + jnp.tanh(x @ w)
            return (x**2).mean()

        read.clear()
        assert traced(jp.Model(init=lambda key: [jnp.eye(DIM)] * num_layers, loss=loss), "data=2") == []
        return read.count("tanh")

    assert num_tanhs(6) == num_tanhs(2) == 1


@pytest.mark.parametrize("axes", [(1, 0), (0, 1)])
def test_steps_of_a_loop_are_told_apart(axes: tuple[int, int]) -> None:
    """The same line may couple rows in one step of a loop, and not in another."""

    def loss(w: jax.Array, batch: Batch) -> jax.Array:
        x = batch["x"] @ w
        for axis in axes:
            x = jnp.square(x - jax.lax.rev(x, (axis,)))
        return x.mean()

    with pytest.raises(ValueError, match="reverses the order of rows"):
        traced(model_of(loss))


def test_one_row_in_a_block() -> None:
    """A dim of one row cannot be told from other dims of size 1."""
    batch = jax.tree.map(lambda x: x[:4], BATCH)
    for loss in (mean, attention, APART_IN_A_LINE["indexed"], two_views, with_all_rows):
        strategy = "data=2" if loss is with_all_rows else "data=2,microbatches=2"
        rows = 2 if loss is with_all_rows else 4
        assert traced(model_of(loss), strategy, {name: x[:rows] for name, x in batch.items()}) == []
    with pytest.raises(ValueError, match=r"jp\.Mean"):
        traced(model_of(masked_mean), batch=batch)


@pytest.mark.parametrize("make", ["nnx", "linen"])
def test_the_adapters_take_rows(make: str) -> None:
    def loss(module: Any, batch: Batch) -> jax.Array:
        return module(batch["x"]).std()

    def model(rows: str | None) -> jp.Model:
        if make == "nnx":
            return jp.from_nnx(lambda rngs: nnx.Linear(DIM, 3, rngs=rngs), loss, rows=rows)
        return jp.from_linen(nn.Dense(3), loss, example=BATCH, rows=rows)

    with pytest.raises(ValueError, match=r"test_rows\.py.*a sum or mean over rows"):
        traced(model(None))
    assert traced(model("independent")) == []
    with pytest.raises(ValueError, match=r"rows='apart'.*'independent'"):
        model("apart")
