"""Rows with several documents: loss and gradients are those of the documents in rows of their own.

The unpacked batch has one document in each row, and a mask of its predictions.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.models import Llama, llama, named

LENGTH = 16
# The documents of each row; what they leave of LENGTH + 1 tokens is padding. A document of one token predicts nothing.
DOCUMENTS = [[5, 9, 3], [17], [1, 8, 8], [4, 4, 4, 4], [2, 11], [6, 1, 7], [13, 3], [9, 6, 2]]
SIZES = {
    "gpt-tiny": {"vocab": 61, "dim": 32, "layers": 2, "heads": 4, "context": LENGTH},
    "llama-tiny": {"vocab": 61, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 48},
    "mixtral-tiny": {
        "vocab": 61, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 24, "balance": 0.0
    },
}  # fmt: skip


def batches(masked: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the packed batch and the unpacked one, optionally with a random mask of predictions."""
    random = np.random.default_rng(0)
    tokens = random.integers(1, 61, (len(DOCUMENTS), LENGTH + 1)).astype(np.int32)
    mask = random.uniform(0.2, 1, (len(DOCUMENTS), LENGTH)).astype(np.float32)
    segments, rows, row_masks = np.full_like(tokens, -1), [], []
    for row, lengths in enumerate(DOCUMENTS):
        for number, end in enumerate(np.cumsum(lengths)):
            begin = end - lengths[number]
            # Neighbours differ, and that is all: the third document has the number of the first.
            segments[row, begin:end] = 7 * (number % 2)
            rows.append(np.pad(tokens[row, begin:end], (0, LENGTH + 1 - lengths[number])))
            weights = mask[row, begin : end - 1] if masked else np.ones(lengths[number] - 1)
            row_masks.append(np.pad(weights, (0, LENGTH + 1 - lengths[number])))
    # A multiple of the replicas and microbatches of every strategy.
    padding = ((0, -len(rows) % 8), (0, 0))
    unpacked = {"tokens": np.pad(rows, padding), "mask": np.pad(row_masks, padding).astype(np.float32)}
    return {"tokens": tokens, "segments": segments} | ({"mask": mask} if masked else {}), unpacked


def random_params(name: str) -> Any:
    """Return parameters of which none has its initial value."""
    params, _ = named(name, **SIZES[name]).model.create(jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [
        x + 0.2 * jax.random.normal(key, x.shape) / x.shape[-1] ** 0.5 for x, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, noisy)


def value_and_grad(model: jp.Model, params: Any, batch: Any) -> tuple[float, Any]:
    """Return the mean and its gradients on one device, without a step."""

    def mean(params: Any) -> jax.Array:
        loss = model.call(params, variables, batch, None)[0]["loss"]
        return loss.total / loss.count

    variables = model.create(jax.random.key(0))[1]
    return jax.jit(jax.value_and_grad(mean))(params)


@functools.cache
def expected(name: str) -> tuple[float, Any]:
    """Return the loss and gradients of the unpacked documents."""
    return value_and_grad(named(name, **SIZES[name]).model, random_params(name), batches()[1])


def assert_equal(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """Assert that losses and gradients are equal, to within 1e-5 of the largest value in each array."""
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    assert jax.tree.structure(found[1]) == jax.tree.structure(expected[1])
    for (path, x), y in zip(jax.tree.leaves_with_path(found[1]), jax.tree.leaves(expected[1]), strict=True):
        # The gradient of a key's bias is zero except for rounding, since a softmax does not change with it.
        scale = max(float(jnp.abs(y).max()), 1e-3)
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("name", SIZES)
def test_a_packed_row_is_its_documents(name: str) -> None:
    """The models had no way to take documents that share a row: each saw the ones before it."""
    packed, _ = batches()
    assert_equal(value_and_grad(named(name, **SIZES[name]).model, random_params(name), packed), expected(name))


@pytest.mark.parametrize("loss", [llama.loss, llama.chunked_loss])
def test_the_mask_weighs_packed_predictions(loss: Callable[..., Any]) -> None:
    packed, unpacked = batches(masked=True)
    config, params = named("llama-tiny", **SIZES["llama-tiny"]).config, random_params("llama-tiny")
    model = jp.from_nnx(lambda rngs: Llama(config, rngs=rngs), loss)
    assert_equal(value_and_grad(model, params, packed), value_and_grad(model, params, unpacked))
    # Padding counts nothing, whatever stands there.
    other = {**packed, "tokens": np.where(packed["segments"] < 0, 60, packed["tokens"])}
    assert float(value_and_grad(model, params, other)[0]) == float(value_and_grad(model, params, packed)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        # In zigzag order a rank has two chunks, and documents lie across them.
        ("llama-tiny", "context=4,attention=ring"),
        ("gpt-tiny", "context=2,fsdp=2,attention=ring"),
        pytest.param("llama-tiny", "context=4,attention=ulysses", marks=pytest.mark.battery),
        pytest.param("llama-tiny", "context=4,attention=gather", marks=pytest.mark.battery),
        pytest.param("llama-tiny", "context=2,pipe=2,microbatches=4", marks=pytest.mark.battery),
        pytest.param("llama-tiny", "fsdp=2,tensor=2,remat=layer", marks=pytest.mark.battery),
        pytest.param("gpt-tiny", "pipe=2,fsdp=2,microbatches=2", marks=pytest.mark.battery),
        pytest.param("mixtral-tiny", "expert=2,fsdp=2,microbatches=2", marks=pytest.mark.battery),
    ],
)
def test_packed_rows_under_strategies(name: str, strategy: str) -> None:
    packed, _ = batches()
    step = jp.make_train_step(named(name, **SIZES[name]).model, None, strategy, mesh=jax.devices()[:4])
    state = step.init(jax.random.key(0), params=random_params(name))
    loss, grads = step.value_and_grad(state, packed)
    assert_equal((loss, nnx.to_pure_dict(grads)), expected(name))


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"segment_ids": np.zeros((2, 9), int)}, r"has segment_ids, which .* segments, integers \[rows, 9\].*rename"),
        ({"doc_ids": np.zeros((2, 9), int)}, "has doc_ids"),
        ({"segments": np.zeros((2, 8), int)}, r"segments are int32\[2, 8\]; needs signed integers \[rows, 9\]"),
        ({"segments": np.zeros((2, 9), "float32")}, r"segments are float32\[2, 9\]"),
        ({"segments": np.zeros((2, 9), "uint32")}, r"segments are uint32\[2, 9\]; needs signed"),  # padding is negative
    ],
)
def test_segments_by_another_name_or_form_are_refused(leaves: dict[str, Any], message: str) -> None:
    """`segment_ids` was a leaf that no model read, and the loss that of one long document."""
    model = named("llama-tiny", **SIZES["llama-tiny"]).model
    shapes = jax.eval_shape(model.create, jax.random.key(0))
    tokens = np.zeros((2, 9), np.int32)
    evaluate = lambda batch: jax.eval_shape(lambda *args: model.call(*args, batch, None), *shapes)
    with pytest.raises(ValueError, match=message):
        evaluate({"tokens": tokens, **jax.tree.map(jnp.asarray, leaves)})
    evaluate({"tokens": tokens, "segments": np.zeros((2, 9), np.int32)})  # the advice
