"""What models of images share: the batch they take and the loss they train on.

Dims: B rows, H height, W width, C channels.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ...model.model import Mean


class Sizes:
    """Sizes of a model of images, H = W = `size`."""

    size: int
    channels: int

    def example(self, rows: int, length: int = 0) -> dict[str, jax.ShapeDtypeStruct]:
        """A training batch's shapes: {"image": float32 [B, H, W, C], "label": int32 [B]}; `length` is for text."""
        return {
            "image": jax.ShapeDtypeStruct((rows, self.size, self.size, self.channels), jnp.float32),
            "label": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }


def loss(module: nnx.Module, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, Any]]:
    """Mean cross-entropy in nats, float32, and the metric `accuracy`, the share of rows whose class is the likeliest.

    `batch` is {"image": float32 [B, H, W, C], "label": int32 [B]} for means over all rows, and with "mask" [B] both are
    a `jp.Mean` over the rows whose mask is 1.
    """
    image, label, mask = batch["image"], batch["label"], batch.get("mask")
    if image.ndim != 4:
        raise ValueError(f"image is {image.dtype}{list(image.shape)}; needs floats [rows, height, width, channels]")
    if label.shape != image.shape[:1] or not jnp.issubdtype(label.dtype, jnp.integer):
        raise ValueError(f"label is {label.dtype}{list(label.shape)}; needs integers [{image.shape[0]}], a class a row")
    if mask is not None and mask.shape != label.shape:
        raise ValueError(f"mask is {list(mask.shape)}; needs {list(label.shape)}, one number a row")
    logits = module(image).astype(jnp.float32)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    right = (logits.argmax(axis=-1) == label).astype(jnp.float32)
    if mask is None:
        return nats.mean(), {"accuracy": right.mean()}
    nats, right = (Mean(jnp.sum(term * mask), jnp.sum(mask)) for term in (nats, right))
    return nats, {"accuracy": right}
