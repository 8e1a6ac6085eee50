"""The leaves of a model: the dim that each is sharded along, its padding, and how layers are kept.

A leaf is sharded over `fsdp` along one dim. Its first dim is avoided where it may be a stack of layers (at most 512,
and three dims or more, or two with the first the smaller): a scan slices it there. If no dim divides, a leaf of 16,384
elements or more is padded along its largest such dim; a smaller one is replicated, and reported.

With a pipeline, the leaves of the largest stack live on the ranks that run their layers: dim 0 is over `pipe`, and with
v chunks a rank it is two dims, [v, layers / v], the second over `pipe`. If the layers do not divide, zeros follow the
last. The other leaves serve every rank, and are sharded over `pipe` and `fsdp` together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

PAD_FROM = 16_384  # elements; smaller leaves are not worth the padding
LAYERS = 512  # no model stacks more


@dataclass(frozen=True)
class Leaf:
    """One parameter leaf.

    Attributes:
      path: its place in the tree, such as `layers/attention/query/kernel`.
      shape: its shape as a step keeps it: the model's, but for a stage's own leaf (below).
      dtype: the dtype that the model declares.
      dim: the dim that ZeRO shards, None where it does not.
      padded: the size of that dim at rest, a multiple of the number of shards.
      trainable: whether it has a gradient and optimizer state.
      note: why it is not sharded, or padded.
      layers: the number of layers in a leaf that the stages of a pipeline own, None for every other leaf. Its shape is
        then [layers, ...] or, with chunks, [chunks, layers / chunks, ...], where zeros may follow the last layer.
      stage: the dim of such a leaf that is over `pipe`.
      shard: the mesh axes over which `dim` is sharded.
      tensor: the dim that is split over the ranks of `tensor`, None where each holds the whole.
      ranks: the number of these.
      moved: whether these layers are on dim 1 in the model's own leaf (`nn.scan(variable_axes={"params": 1})`).
      rolled: whether it is a stack of leaves that the model has one by one, of layers in a Python loop
        (`slicing/rolling/roll.py`); its path has a `*` in place of their number.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    dim: int | None
    padded: int
    trainable: bool = True
    note: str = ""
    layers: int | None = None
    stage: int = 0
    shard: tuple[str, ...] = ("fsdp",)
    rolled: bool = False
    tensor: int | None = None
    ranks: int = 1
    moved: bool = False

    @property
    def local(self) -> Leaf:
        """The leaf as one tensor rank has it: its part is a leaf like any other."""
        part = tuple(n // self.ranks if d == self.tensor else n for d, n in enumerate(self.shape))
        return self if self.tensor is None else replace(self, shape=part, tensor=None, ranks=1)

    @property
    def logical(self) -> tuple[int, ...]:
        """The model's own shape, with the layers in front: of a rolled leaf they are stacked."""
        return self.shape if self.layers is None else (self.layers, *self.shape[self.stage + 1 :])

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape at rest, padding included."""
        return tuple(self.padded if d == self.dim else n for d, n in enumerate(self.shape))

    def spec(self, sharded: bool = True) -> PartitionSpec:
        """The spec of the leaf where its strategy shards it, and where it does not."""
        axes: list[Any] = [None] * len(self.shape)
        if self.layers is not None:
            axes[self.stage] = "pipe"
        if self.tensor is not None:
            axes[self.tensor] = "tensor"
        if sharded and self.dim is not None:
            one, *more = self.shard
            axes[self.dim] = self.shard if more else one
        while axes and axes[-1] is None:
            axes.pop()
        return PartitionSpec(*axes)

    @property
    def by_layer(self) -> bool:
        """Whether a sharded leaf may be a stack of layers, to be moved one after the other."""
        return self.dim != 0 and (self.rolled or self.layers is not None or may_stack(self.shape))

    def inner(self, sliced: bool, layers: int = 0) -> int:
        """The sharded dim, in one layer of the leaf if it is sliced; its layers are on dim `layers`."""
        if sliced and self.layers is None:
            return (self.dim or 0) - (layers <= (self.dim or 0))
        return (self.dim or 0) - (self.stage + 1 if sliced else 0)

    def pad(self, x: jax.Array, dim: int | None = None) -> jax.Array:
        """Pads the sharded dim for rest; `dim` where `x` is one layer of a stack."""
        dim = self.dim if dim is None else dim
        if self.dim is None or dim is None or self.padded == self.shape[self.dim]:
            return x
        widths = [(0, self.padded - n if d == dim else 0) for d, n in enumerate(x.shape)]
        return jnp.pad(x, widths)

    def unpad(self, x: jax.Array, dim: int | None = None) -> jax.Array:
        """The reverse of `pad`."""
        dim = self.dim if dim is None else dim
        if self.dim is None or dim is None or self.padded == self.shape[self.dim]:
            return x
        return jax.lax.slice_in_dim(x, 0, self.shape[self.dim], axis=dim)

    def own(self, x: jax.Array) -> jax.Array:
        """The logical shape -> the model's own, where that has the layers on dim 1. Its own reverse."""
        return jnp.swapaxes(x, 0, 1) if self.moved else x

    def staged(self, x: jax.Array) -> jax.Array:
        """The logical shape -> the step's: whole stages, chunk by chunk."""
        if self.layers is None or self.shape == self.logical:
            return x
        missing = math.prod(self.shape[: self.stage + 1]) - self.layers
        return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)).reshape(self.shape)

    def unstaged(self, x: jax.Array) -> jax.Array:
        """The reverse of `staged`."""
        if self.layers is None or self.shape == self.logical:
            return x
        return x.reshape(-1, *self.logical[1:])[: self.layers]


@dataclass(frozen=True)
class Pipe:
    """What the layout needs to know of a pipeline: its ranks, and the chunks that each holds."""

    ranks: int = 1
    chunks: int = 1

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a stack's leaf in whole stages: layers, or [chunks, layers / chunks], padded to divide."""
        each = -(-shape[0] // (self.ranks * self.chunks)) * self.ranks
        return (each, *shape[1:]) if self.chunks == 1 else (self.chunks, each, *shape[1:])


_NO_PIPE = Pipe()


def place(
    path: str,
    shape: tuple[int, ...],
    dtype: Any,
    shards: int,
    trainable: bool,
    pipe: Pipe = _NO_PIPE,
    own: bool = False,
    rolled: bool = False,
    tensor: int | None = None,
    ranks: int = 1,
    second: bool = False,
) -> Leaf:
    """Choose the dim of one leaf that `shards` devices share, beside a pipeline if there is one.

    `own` leaves belong to the stages; the dim `tensor` is split over `ranks`; layers that are on the `second` dim are
    split last.
    """
    layers, first_dim, axes = None, 0, ("fsdp",)
    if own:
        layers, shape = shape[0], pipe.shape(shape)
        first_dim = 1 if pipe.chunks == 1 else 2
        tensor = None if tensor is None else tensor + first_dim - 1
    elif pipe.ranks > 1 and shards > 1:
        shards, axes = shards * pipe.ranks, ("pipe", "fsdp")
    second = second and not own
    stacked = not own and not second and (rolled or may_stack(shape))
    dims = [d for d in range(1 if stacked else first_dim, len(shape)) if d != tensor]
    dims.sort(key=lambda d: second and d == 1)
    dim = next((d for d in dims if shape[d] % shards == 0), None) if shards > 1 and math.prod(shape) else None
    note = ""
    if shards > 1 and not math.prod(shape):
        note = f"replicated: {shape} has no elements"
    elif dim is None and shards > 1:
        if dims and math.prod(shape) >= PAD_FROM * (1 if tensor is None else ranks):
            dim = max(dims, key=lambda d: shape[d])
            note = f"padded: dim {dim} from {shape[dim]} to {-(-shape[dim] // shards) * shards}"
        elif stacked and not rolled and tensor != 0 and shape[0] % shards == 0:
            dim = 0
        else:
            rest = "no dim" if tensor is None else f"no dim but {tensor}, which is on tensor,"
            note = f"replicated: {rest} of {shape} divides by {shards}, and it is small"
    padded = 0 if dim is None else -(-shape[dim] // shards) * shards
    return Leaf(
        path,
        shape,
        jnp.dtype(dtype),
        dim,
        padded,
        trainable,
        note,
        layers,
        max(first_dim - 1, 0),
        axes,
        rolled,
        tensor,
        1 if tensor is None else ranks,
    )


def may_stack(shape: tuple[int, ...]) -> bool:
    """Whether an array may be a stack of layers, by its shape."""
    return len(shape) > 1 and shape[0] <= LAYERS and (len(shape) > 2 or shape[0] < shape[1])
