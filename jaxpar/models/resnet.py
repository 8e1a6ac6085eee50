"""Residual networks with BatchNorm (He et al. 2015, arXiv:1512.03385), in plain Flax NNX.

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
    """Sizes of a `ResNet`. Raises ValueError where one is none."""

    blocks: tuple[int, ...] = (2, 2, 2, 2)  # of each stage; a stage halves the image, and doubles the channels
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
        """(inputs, outputs, stride) of every block."""
        inputs = self.width
        for stage, blocks in enumerate(self.blocks):
            outputs = self.width * 2**stage * (4 if self.bottleneck else 1)
            for block in range(blocks):
                yield inputs, outputs, 2 if stage and not block else 1
                inputs = outputs

    @property
    def features(self) -> int:
        """What the last block gives, and the head sees."""
        return list(self.shapes())[-1][1]

    @property
    def parameters(self) -> int:
        """The exact number of parameters: convolutions without biases, a scale and a bias of each norm, the head."""
        convolutions = sum(k * k * a * b + 2 * b for k, a, b, _ in self._convolutions())
        return convolutions + (self.features + 1) * self.classes

    def flops(self, rows: int, length: int = 0) -> float:
        """Operations forward and backward on images of `size`: 6 per output pixel and weight; `length` is for text."""
        weights = sum(k * k * a * b * side**2 for k, a, b, side in self._convolutions()) + self.features * self.classes
        return 6.0 * rows * weights

    def _convolutions(self) -> Iterator[tuple[int, int, int, int]]:
        """(kernel, inputs, outputs, height of the output) of every convolution."""
        side = self.size if self.stem == 3 else _strided(self.size, 2)
        yield self.stem, self.channels, self.width, side
        side = side if self.stem == 3 else _strided(side, 2)
        for inputs, outputs, stride in self.shapes():
            after = _strided(side, stride)
            for kernel, a, b, by in _branch(inputs, outputs, stride, self.bottleneck):
                side = _strided(side, by)
                yield kernel, a, b, side
            if _projects(inputs, outputs, stride):
                yield 1, inputs, outputs, after


def _strided(side: int, stride: int) -> int:
    return -(-side // stride)


def _branch(inputs: int, outputs: int, stride: int, bottleneck: bool) -> list[tuple[int, int, int, int]]:
    """(kernel, inputs, outputs, stride) of the convolutions of a block."""
    if not bottleneck:
        return [(3, inputs, outputs, stride), (3, outputs, outputs, 1)]
    inner = outputs // 4
    return [(1, inputs, inner, 1), (3, inner, inner, stride), (1, inner, outputs, 1)]


def _projects(inputs: int, outputs: int, stride: int) -> bool:
    """Whether the block's input does not have the shape of its output."""
    return stride > 1 or inputs != outputs


SIZES = {
    "resnet-tiny": Config(blocks=(1, 1, 1), width=16, stem=3, channels=1, classes=10, size=8),
    "resnet18": Config(),
    "resnet18-small": Config(stem=3, classes=10, size=32),
    "resnet50": Config(blocks=(3, 4, 6, 3), bottleneck=True),
}

RULES: dict[str, int] | None = None  # `tensor` splits the pairs of convolutions of each block, which jaxpar finds


class Convolution(nnx.Module):
    """A convolution without bias, and BatchNorm (Ioffe & Szegedy 2015, arXiv:1502.03167)."""

    def __init__(self, kernel: int, inputs: int, outputs: int, stride: int, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")  # He et al. 2015, arXiv:1502.01852
        size, padding = (kernel, kernel), kernel // 2
        self.conv = nnx.Conv(
            inputs, outputs, size, stride, padding=padding, use_bias=False, kernel_init=init, rngs=rngs
        )
        self.norm = nnx.BatchNorm(outputs, momentum=0.9, epsilon=1e-5, rngs=rngs)

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """[B, H, W, inputs] -> [B, H / stride, W / stride, outputs], rounded up."""
        y_BHWC = self.conv(x_BHWC)
        return self.norm(y_BHWC).astype(y_BHWC.dtype)  # which else would be that of the statistics


class Block(nnx.Module):
    """Convolutions with rectifiers between them, added to the input, which is projected where its shape differs."""

    def __init__(self, inputs: int, outputs: int, stride: int, bottleneck: bool, *, rngs: nnx.Rngs) -> None:
        branch = _branch(inputs, outputs, stride, bottleneck)
        self.branch = nnx.List([Convolution(*shape, rngs=rngs) for shape in branch])
        projected = _projects(inputs, outputs, stride)
        self.shortcut = Convolution(1, inputs, outputs, stride, rngs=rngs) if projected else None

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """[B, H, W, inputs] -> [B, H / stride, W / stride, outputs], rounded up."""
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
            around: Any = ((1, 1), (1, 1))  # Flax says that it must be a str
            x_BHWC = nnx.max_pool(x_BHWC, (3, 3), strides=(2, 2), padding=around)
        for block in self.blocks:
            x_BHWC = block(x_BHWC)
        return self.head(x_BHWC.mean(axis=(1, 2)))
