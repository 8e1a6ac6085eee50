"""Residual networks with BatchNorm (He et al. 2015, arXiv:1512.03385), in plain Flax NNX.

    basic block         3x3 (stride) -> 3x3                  + x
    bottleneck block    1x1 -> 3x3 (stride) -> 1x1           + x

A block adds its input x, or a 1x1 projection of x if the shape changes. Every convolution is followed by BatchNorm.

The bottleneck strides in its 3x3 convolution, not in the first 1x1 ("v1.5"), as torchvision's does. No dtype is set:
convolutions run in the dtype of the parameters, norms and the loss in float32. On several devices jaxpar takes
BatchNorm's statistics over the rows of all of them.

Dims: B rows, H height, W width, C channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from .parts.config import check_sizes
from .parts.image import Sizes
from .parts.image import loss as loss


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of a `ResNet`. Raises ValueError if one of them is invalid."""

    blocks: tuple[int, ...] = (2, 2, 2, 2)  # in each stage; stages after the first halve the image, double the channels
    bottleneck: bool = False  # 1x1, 3x3, 1x1 convolutions instead of two 3x3, with 4 times the channels between blocks
    width: int = 64  # channels of the first stage's 3x3 convolutions
    stem: int = 7  # kernel of the first convolution: 7 with stride 2 and a max-pool, or 3 with neither (small images)
    channels: int = 3
    classes: int = 1000
    size: int = 224  # height and width of the images in `example` and `flops`; the model takes any

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.stem not in (3, 7):
            raise ValueError(f"stem={self.stem}: use 7, or 3 for images of less than 64 pixels")

    def shapes(self) -> Iterator[tuple[int, int, int]]:
        """Yield (input channels, output channels, stride) of every block."""
        inputs = self.width
        for stage, blocks in enumerate(self.blocks):
            outputs = self.width * 2**stage * (4 if self.bottleneck else 1)
            for block in range(blocks):
                # The first block of a stage halves the image, except in the first stage.
                yield inputs, outputs, 2 if stage and not block else 1
                inputs = outputs

    @property
    def features(self) -> int:
        """The number of channels after the last block, which the head reads."""
        return list(self.shapes())[-1][1]

    @property
    def parameters(self) -> int:
        """The exact number of parameters: convolutions without biases, a scale and a bias of each norm, the head."""
        convolutions = sum(
            kernel**2 * inputs * outputs + 2 * outputs for kernel, inputs, outputs, _ in self._convolutions()
        )
        return convolutions + (self.features + 1) * self.classes

    def flops(self, rows: int, length: int = 0) -> float:
        """Return the operations forward and backward on images of `size`: 6 per output pixel and weight."""
        convolutions = sum(
            kernel**2 * inputs * outputs * side**2 for kernel, inputs, outputs, side in self._convolutions()
        )
        return 6.0 * rows * (convolutions + self.features * self.classes)

    def _convolutions(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (kernel, input channels, output channels, height of the output) of every convolution."""
        # The stem: one convolution, and for stem=7 a max-pool. Both then have stride 2.
        side = self.size if self.stem == 3 else _strided(self.size, 2)
        yield self.stem, self.channels, self.width, side
        side = side if self.stem == 3 else _strided(side, 2)
        for inputs, outputs, stride in self.shapes():
            # The branch, then the projection of the block's input, if any.
            block_side = _strided(side, stride)
            for kernel, branch_inputs, branch_outputs, branch_stride in _branch(
                inputs, outputs, stride, self.bottleneck
            ):
                side = _strided(side, branch_stride)
                yield kernel, branch_inputs, branch_outputs, side
            if _needs_projection(inputs, outputs, stride):
                yield 1, inputs, outputs, block_side


def _strided(side: int, stride: int) -> int:
    """Return the height of a strided convolution's output, rounded up."""
    return -(-side // stride)


def _branch(inputs: int, outputs: int, stride: int, bottleneck: bool) -> list[tuple[int, int, int, int]]:
    """List (kernel, input channels, output channels, stride) of the convolutions of a block."""
    if not bottleneck:
        return [(3, inputs, outputs, stride), (3, outputs, outputs, 1)]
    # The 3x3 convolution has a quarter of the channels that the block returns.
    inner = outputs // 4
    return [(1, inputs, inner, 1), (3, inner, inner, stride), (1, inner, outputs, 1)]


def _needs_projection(inputs: int, outputs: int, stride: int) -> bool:
    """Tell whether a block's input has to be projected to the shape of its output."""
    return stride > 1 or inputs != outputs


SIZES = {
    "resnet-tiny": Config(blocks=(1, 1, 1), width=16, stem=3, channels=1, classes=10, size=8),
    "resnet18": Config(),
    "resnet18-small": Config(stem=3, classes=10, size=32),
    "resnet50": Config(blocks=(3, 4, 6, 3), bottleneck=True),
}

RULES: dict[str, int] | None = None  # no rules: jaxpar itself finds the pairs of convolutions that `tensor` splits


class Convolution(nnx.Module):
    """A convolution without bias, followed by BatchNorm (Ioffe & Szegedy 2015, arXiv:1502.03167)."""

    def __init__(self, kernel: int, inputs: int, outputs: int, stride: int, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")  # He et al. 2015, arXiv:1502.01852
        # As in torchvision. With stride 2, "SAME" would pad an even image on one side only.
        size, padding = (kernel, kernel), kernel // 2
        self.conv = nnx.Conv(
            inputs, outputs, size, stride, padding=padding, use_bias=False, kernel_init=init, rngs=rngs
        )
        # Flax's momentum is the share of the old statistics that stays: 0.9 here is 0.1 in torch.
        self.norm = nnx.BatchNorm(outputs, momentum=0.9, epsilon=1e-5, rngs=rngs)

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """[B, H, W, inputs] -> [B, H / stride, W / stride, outputs], rounded up."""
        y_BHWC = self.conv(x_BHWC)
        return self.norm(y_BHWC).astype(y_BHWC.dtype)  # BatchNorm returns the float32 of its statistics


class Block(nnx.Module):
    """A residual block: convolutions with ReLU between them, added to the input or to its projection, then ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int, bottleneck: bool, *, rngs: nnx.Rngs) -> None:
        branch = _branch(inputs, outputs, stride, bottleneck)
        self.branch = nnx.List([Convolution(*shape, rngs=rngs) for shape in branch])
        needs_projection = _needs_projection(inputs, outputs, stride)
        self.shortcut = Convolution(1, inputs, outputs, stride, rngs=rngs) if needs_projection else None

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """[B, H, W, inputs] -> [B, H / stride, W / stride, outputs], rounded up."""
        # The last convolution's ReLU comes after the addition.
        y_BHWC = self.branch[0](x_BHWC)
        for convolution in self.branch[1:]:
            y_BHWC = convolution(jax.nn.relu(y_BHWC))
        return jax.nn.relu(y_BHWC + (x_BHWC if self.shortcut is None else self.shortcut(x_BHWC)))


class ResNet(nnx.Module):
    """The stem, `config.blocks` residual blocks, the mean over all pixels, and a head."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.stem = Convolution(config.stem, config.channels, config.width, 1 if config.stem == 3 else 2, rngs=rngs)
        self.blocks = nnx.List([Block(*shape, config.bottleneck, rngs=rngs) for shape in config.shapes()])
        self.head = nnx.Linear(config.features, config.classes, rngs=rngs)

    def __call__(self, image_BHWC: jax.Array) -> jax.Array:
        """Images float [B, H, W, C] of any size -> logits [B, classes] in the dtype of the parameters."""
        x_BHWC = jax.nn.relu(self.stem(image_BHWC.astype(self.head.kernel.dtype)))
        if self.config.stem == 7:
            padding: Any = ((1, 1), (1, 1))  # Any, since Flax annotates the argument as a str and takes pairs too
            x_BHWC = nnx.max_pool(x_BHWC, (3, 3), strides=(2, 2), padding=padding)
        for block in self.blocks:
            x_BHWC = block(x_BHWC)
        return self.head(x_BHWC.mean(axis=(1, 2)))
