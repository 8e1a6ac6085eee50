"""A multi-layer perceptron on the pixels of small images: the smallest model with a stack of layers.

The activation is GELU, not ReLU: at ReLU's kink, a rounding error decides whether a unit learns, and then two
strategies that should agree do not. No dtype is set: matmuls run in the dtype of the parameters.

Dims: B rows, H height, W width, C channels, D hidden.
"""

from dataclasses import dataclass

import jax
from flax import nnx

from .parts.config import check_sizes
from .parts.image import Sizes
from .parts.image import loss as loss
from .parts.stack import run, stack


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of an `MLP`. Raises ValueError if one of them is invalid."""

    size: int = 8  # height and width of the images
    channels: int = 1
    hidden: int = 128
    layers: int = 2  # from hidden to hidden; the first and last map, of pixels and classes, are not counted
    classes: int = 10

    def __post_init__(self) -> None:
        check_sizes(self)

    @property
    def weights(self) -> int:
        """The number of parameters in matmuls, that is without biases."""
        pixels = self.size * self.size * self.channels
        return pixels * self.hidden + self.layers * self.hidden**2 + self.hidden * self.classes

    @property
    def parameters(self) -> int:
        """The exact number of parameters."""
        return self.weights + (1 + self.layers) * self.hidden + self.classes

    def flops(self, rows: int, length: int = 0) -> float:
        """Return the operations forward and backward: 6 per row and weight of a matmul."""
        return 6.0 * rows * self.weights


SIZES = {"mlp-tiny": Config(), "mlp-large": Config(size=28, hidden=4096, layers=8)}

# The dim of each kernel that `tensor` splits: always `hidden`, of inputs or of outputs. All layers of a scan are split
# alike, so a layer cannot pass split features to the next one: each is split by its inputs, and the ranks' outputs are
# summed.
RULES = {"into/kernel": -1, "(linear|out)/kernel": -2}


def _linear(fan_in: int, fan_out: int, rngs: nnx.Rngs) -> nnx.Linear:
    # He et al. 2015, arXiv:1502.01852: the signal keeps about its variance through any number of layers.
    return nnx.Linear(fan_in, fan_out, kernel_init=nnx.initializers.he_normal(), rngs=rngs)


class Layer(nnx.Module):
    """A linear map and a GELU."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.linear = _linear(config.hidden, config.hidden, rngs)

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        """[B, D] -> [B, D]."""
        return jax.nn.gelu(self.linear(x_BD))


class MLP(nnx.Module):
    """The classifier: a linear map of all pixels, `config.layers` layers, and a linear head."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.into = _linear(config.size * config.size * config.channels, config.hidden, rngs)
        self.layers = stack(lambda rngs: Layer(config, rngs=rngs), config.layers, rngs)
        self.out = _linear(config.hidden, config.classes, rngs)

    def __call__(self, image_BHWC: jax.Array) -> jax.Array:
        """Images float [B, H, W, C] -> logits [B, classes] in the dtype of the parameters."""
        pixels = image_BHWC.reshape(len(image_BHWC), -1).astype(self.into.kernel.dtype)
        return self.out(run(self.layers, jax.nn.gelu(self.into(pixels))))
