"""The batch that image models take, and the loss that they train on.

Dims: B rows, H height, W width, C channels.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ...model.model import Mean


class Sizes:
    """Sizes of an image model; images are square, H = W = `size`."""

    size: int
    channels: int

    def example(self, rows: int, length: int = 0) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of a training batch: {"image": float32 [B, H, W, C], "label": int32 [B]}.

        `length` is ignored; text models need it.
        """
        return {
            "image": jax.ShapeDtypeStruct((rows, self.size, self.size, self.channels), jnp.float32),
            "label": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }


def loss(module: nnx.Module, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, Any]]:
    """Return the mean cross-entropy and the accuracy of an image classifier.

    Args:
      module: images [B, H, W, C] -> logits [B, classes].
      batch: {"image": float [B, H, W, C], "label": int [B]}, and optionally "mask" [B], 1 for rows that count.

    Returns:
      The loss in nats, float32, and the metric `accuracy`, the fraction of rows whose most probable class is the label.
      Without a mask both are means over all rows; with a mask each is a `jp.Mean` over the rows whose mask is 1.

    Raises:
      ValueError: the image is not 4-dimensional, or label or mask has another shape or dtype.
    """
    image, label, mask = batch["image"], batch["label"], batch.get("mask")
    if image.ndim != 4:
        raise ValueError(f"image is {image.dtype}{list(image.shape)}; needs floats [rows, height, width, channels]")
    if label.shape != image.shape[:1] or not jnp.issubdtype(label.dtype, jnp.integer):
        raise ValueError(f"label is {label.dtype}{list(label.shape)}; needs integers [{image.shape[0]}], a class a row")
    if mask is not None and mask.shape != label.shape:
        raise ValueError(f"mask is {list(mask.shape)}; needs {list(label.shape)}, one number a row")
    # Softmax in float32: in bfloat16, exp and the sum over classes would keep 8 bits.
    logits = module(image).astype(jnp.float32)
    row_losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    is_correct = (logits.argmax(axis=-1) == label).astype(jnp.float32)
    if mask is None:
        return row_losses.mean(), {"accuracy": is_correct.mean()}
    # Sum and count apart: microbatches and devices may hold different numbers of rows that count.
    mean_loss, accuracy = (Mean(jnp.sum(values * mask), jnp.sum(mask)) for values in (row_losses, is_correct))
    return mean_loss, {"accuracy": accuracy}
