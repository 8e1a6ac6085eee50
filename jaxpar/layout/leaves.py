"""One stored leaf: the form in which it holds the model's layers, the dim that is sharded, and its padding.

ZeRO shards a leaf over `fsdp` along one dim, the first that the number of shards divides. If dim 0 may be a stack of
layers, it is the last choice, because a scan slices the leaf there. If no dim divides, a leaf of 16,384 elements or
more is padded along its largest dim. A smaller leaf is replicated, and its note says so.

With a pipeline, the leaves of the largest stack live on the ranks that run their layers:

    one chunk per rank    [layers, ...]               dim 0 over `pipe`
    v chunks per rank     [v, layers / v, ...]        dim 1 over `pipe`; in a V, the ranks of odd chunks are reversed

If the layers do not divide evenly, zeros follow the last layer. All other leaves serve every rank, and are sharded over
`pipe` and `fsdp` together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

PAD_FROM = 16_384  # elements; smaller leaves are not worth the padding
LAYERS = 512  # a larger first dim is a feature dim: no model stacks more layers


@dataclass(frozen=True)
class Whole:
    """The form of a leaf that is stored as the model has it."""

    def to_logical(self, x: jax.Array) -> list[jax.Array]:
        """Return the model's own leaves that the stored leaf holds: the leaf itself."""
        return [x]

    def to_stored(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Return the stored leaf; inverse of `to_logical`."""
        return parts[0]


@dataclass(frozen=True)
class Stacked:
    """The form that stacks the layers of a Python loop, separate leaves of the model, along dim 0.

    `slicing/rolling/roll.py` runs the loop as a scan over this stack.
    """

    def to_logical(self, x: jax.Array) -> list[jax.Array]:
        """Return the layers of a stack [layers, ...]."""
        return [x[layer] for layer in range(x.shape[0])]

    def to_stored(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Stack the layers; inverse of `to_logical`."""
        return jnp.stack(parts)


@dataclass(frozen=True)
class Staged:
    """The form of layers that the stages of a pipeline own: complete stages, with zeros after the last layer.

    Attributes:
      layers: the number of layers.
      held: the dims that they fill, padding included: (layers,) or, with chunks, (chunks, layers / chunks). The last
        is over `pipe`.
      dim: the dim of layers in the model's own leaf, 1 after `nn.scan(variable_axes={"params": 1})`; None if the model
        has a leaf for each layer, in a Python loop.
      v_ranks: the number of ranks of placement "V", in whose odd chunks stages run from the last rank to the first; 0
        for placement "loop", where every chunk runs from the first rank to the last (`stage_of`).
    """

    layers: int
    held: tuple[int, ...]
    dim: int | None = 0
    v_ranks: int = 0

    @property
    def chunks(self) -> int:
        """The number of chunks that each rank holds."""
        return self.held[0] if len(self.held) > 1 else 1

    def in_order(self, x: jax.Array) -> jax.Array:
        """Convert complete stages [*held, ...] to layers in the order of the model, [layers, ...]."""
        if self.held == (self.layers,):
            return x
        # [*held, ...] -> [layers and padding, ...] -> [layers, ...]
        return self._reverse_odd_chunks(x).reshape(-1, *x.shape[len(self.held) :])[: self.layers]

    def in_stages(self, x: jax.Array) -> jax.Array:
        """Convert layers in order [layers, ...] to complete stages [*held, ...]; inverse of `in_order`."""
        if self.held == (self.layers,):
            return x
        # Zeros follow the last layer, so that all stages have the same number of layers.
        widths = [(0, math.prod(self.held) - self.layers)] + [(0, 0)] * (x.ndim - 1)
        return self._reverse_odd_chunks(jnp.pad(x, widths).reshape(*self.held, *x.shape[1:]))

    def _reverse_odd_chunks(self, x: jax.Array) -> jax.Array:
        """Reverse the order of the ranks in the odd chunks of a V, in stages [*held, ...]; its own inverse."""
        if not self.v_ranks:
            return x
        # [chunks, ranks, layers per stage, ...]. Rank s of p holds stages s and 2 p - 1 - s, as `stage_of` says.
        stages = x.reshape(self.chunks, self.v_ranks, -1, *x.shape[2:])
        return jnp.stack([part[::-1] if c % 2 else part for c, part in enumerate(stages)]).reshape(x.shape)

    def own(self, x: jax.Array) -> list[jax.Array]:
        """Return the model's own leaves that hold the layers [layers, ...]."""
        if self.dim is None:
            return Stacked().to_logical(x)
        # [layers, ...] to the model's own leaf, with the layers on dim `dim`.
        return [jnp.swapaxes(x, 0, self.dim)]

    def to_logical(self, x: jax.Array) -> list[jax.Array]:
        """Return the model's own leaves that hold the layers of complete stages [*held, ...]."""
        return self.own(self.in_order(x))

    def to_stored(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Return complete stages [*held, ...]; inverse of `to_logical`."""
        return self.in_stages(jnp.stack(parts) if self.dim is None else jnp.swapaxes(parts[0], 0, self.dim))


Form = Whole | Stacked | Staged


@dataclass(frozen=True)
class Leaf:
    """One parameter leaf, as a step stores it.

    Attributes:
      path: its path in the tree, such as `layers/attention/query/kernel`. A stack of the layers of a Python loop has a
        `*` instead of their number.
      shape: its shape without padding of `dim`: the model's shape, converted to `form`.
      dtype: the dtype that the model declares.
      dim: the dim that ZeRO shards, None if it shards none.
      padded: the size of that dim at rest, a multiple of the number of shards.
      trainable: whether it has a gradient and optimizer state.
      note: the reason why it is not sharded, or is padded.
      form: which of the model's own leaves it holds, and how.
      shard: the mesh axes over which `dim` is sharded; with `Strategy.hpz`, `data` is the last of them.
      tensor: the dim that is split over the ranks of `tensor`, None if each rank holds all of the leaf.
      ranks: the number of ranks of `tensor`.
      expert: the dim of experts, split over the ranks of `expert`, None if each rank holds all of the leaf.
      experts: the number of ranks of `expert`.
      spread: whether `dim` is split over `pipe` too, even for trees that ZeRO does not shard. True in a model whose
        program is cut into stages.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    dim: int | None
    padded: int
    trainable: bool = True
    note: str = ""
    form: Form = Whole()
    shard: tuple[str, ...] = ("fsdp",)
    tensor: int | None = None
    ranks: int = 1
    expert: int | None = None
    experts: int = 1
    spread: bool = False

    @property
    def of_a_stage(self) -> bool:
        """Whether each rank of a pipeline holds a different part of the leaf."""
        return self.layers is not None or (self.spread and self.dim is not None)

    @property
    def layers(self) -> int | None:
        """The number of layers of a leaf that the stages of a pipeline own, None for any other leaf."""
        return self.form.layers if isinstance(self.form, Staged) else None

    @property
    def stage(self) -> int:
        """The dim that is over `pipe` if the stages of a pipeline own the leaf's layers; 0 for any other leaf."""
        return len(self.form.held) - 1 if isinstance(self.form, Staged) else 0

    @property
    def rolled(self) -> bool:
        """Whether the leaf stacks several leaves of the model, the layers of a Python loop."""
        return isinstance(self.form, Stacked) or (isinstance(self.form, Staged) and self.form.dim is None)

    @property
    def as_modelled(self) -> bool:
        """Whether the leaf is stored in the same shape as one of the model's own leaves."""
        # Layers on dim 0 that need no padding and no chunks are stored as the model has them.
        return self.form in (Whole(), Staged(self.layers or 0, self.logical[:1]))

    @property
    def split(self) -> tuple[str, ...]:
        """The axes along which each rank holds a different part, and computes the complete gradient of that part."""
        return ("pipe",) * self.of_a_stage + ("expert",) * (self.expert is not None)

    @property
    def of_experts(self) -> "Leaf":
        """The part of the leaf that one rank of `expert` holds, as a leaf."""
        shape = tuple(n // self.experts if d == self.expert else n for d, n in enumerate(self.shape))
        return self if self.expert is None else replace(self, shape=shape, expert=None, experts=1)

    @property
    def local(self) -> "Leaf":
        """The part of the leaf that one rank of `expert` and `tensor` holds, as a leaf that neither axis splits."""
        expert_part = self.of_experts
        shape = tuple(n // self.ranks if d == self.tensor else n for d, n in enumerate(expert_part.shape))
        return expert_part if self.tensor is None else replace(expert_part, shape=shape, tensor=None, ranks=1)

    @property
    def logical(self) -> tuple[int, ...]:
        """The shape without the padding of stages, with the layers on dim 0."""
        return self.shape if self.layers is None else (self.layers, *self.shape[self.stage + 1 :])

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape at rest, with `dim` padded."""
        return tuple(self.padded if d == self.dim else n for d, n in enumerate(self.shape))

    def spec(self, sharded: bool = True) -> PartitionSpec:
        """Return the leaf's spec, with the axes over which ZeRO shards if `sharded`.

        The axes `tensor` and `expert`, and `pipe` of a leaf whose ranks hold different parts, are always in it.
        """
        # 1. Axes whose ranks hold different parts of the leaf, whatever ZeRO shards.
        axes: list[Any] = [None] * len(self.shape)
        if self.layers is not None:
            axes[self.stage] = "pipe"
        if self.tensor is not None:
            axes[self.tensor] = "tensor"
        if self.expert is not None:
            axes[self.expert] = "expert"
        # 2. The axes of ZeRO.
        if self.dim is not None and (sharded or self.spread):
            first_axis, *more_axes = (*(("pipe",) if self.spread else ()), *(self.shard if sharded else ()))
            axes[self.dim] = (first_axis, *more_axes) if more_axes else first_axis
        # 3. Equal specs must compare equal: jax distinguishes P("fsdp", None) from P("fsdp").
        while axes and axes[-1] is None:
            axes.pop()
        return PartitionSpec(*axes)

    @property
    def by_layer(self) -> bool:
        """Whether a sharded leaf may be a stack of layers, which are gathered one after the other."""
        # If dim 0 is sharded, each layer lies whole on one device, and cannot be gathered from all.
        return self.dim != 0 and not self.spread and (not isinstance(self.form, Whole) or may_stack(self.shape))

    def inner(self, sliced: bool, layers: int = 0) -> int:
        """Return the sharded dim of the leaf or, if `sliced`, of one of its layers, which lie on dim `layers`."""
        if sliced and self.layers is None:
            # A layer has a dim less: dims after the dim of layers move one to the left.
            return (self.dim or 0) - (layers <= (self.dim or 0))
        # A layer of a staged leaf has neither the dim of chunks nor the dim of layers.
        return (self.dim or 0) - (self.stage + 1 if sliced else 0)

    def pad(self, x: jax.Array, dim: int | None = None) -> jax.Array:
        """Pad the sharded dim of `x` to its size at rest, unless it is padded already.

        Args:
          x: the leaf, or one layer of it.
          dim: the sharded dim of `x` if it is one layer of a stack; None means `self.dim`.
        """
        dim = self.dim if dim is None else dim
        if self.dim is None or dim is None or x.shape[dim] == self.padded:
            return x
        widths = [(0, self.padded - n if d == dim else 0) for d, n in enumerate(x.shape)]
        return jnp.pad(x, widths)

    def unpad(self, x: jax.Array, dim: int | None = None) -> jax.Array:
        """Remove the padding of the sharded dim; inverse of `pad`, with the same arguments."""
        dim = self.dim if dim is None else dim
        # Another size than the padded one has no padding to remove, such as one rank's part of a spread leaf.
        if self.dim is None or dim is None or x.shape[dim] != self.padded:
            return x
        return jax.lax.slice_in_dim(x, 0, self.shape[self.dim], axis=dim)


@dataclass(frozen=True)
class Pipe:
    """The properties of a pipeline that a layout depends on.

    Attributes:
      ranks: the number of ranks.
      chunks: the number of chunks of layers that each rank holds.
      is_v: whether the ranks hold odd chunks in reverse order, as in a V.
      shard: the axes over which ZeRO shards, also without a pipeline.
      stages: what becomes a stage (`Strategy.stages`).
    """

    ranks: int = 1
    chunks: int = 1
    is_v: bool = False
    shard: tuple[str, ...] = ("fsdp",)
    stages: str = "auto"

    def held(self, layers: int) -> tuple[int, ...]:
        """Return the dims that the layers of a stack fill in complete stages, padding included (`Staged.held`)."""
        # The layers of a stage, rounded up, for all ranks: stages have one size.
        layers_per_chunk = -(-layers // (self.ranks * self.chunks)) * self.ranks
        return (layers_per_chunk,) if self.chunks == 1 else (self.chunks, layers_per_chunk)


@dataclass(frozen=True)
class Sharing:
    """The devices that share a leaf.

    Attributes:
      shards: the number of devices over which ZeRO shards, along the axes `pipe.shard`; 1 if it does not shard.
      pipe: the pipeline.
      ranks: the number of ranks of `tensor`.
      experts: the number of ranks of `expert`.
    """

    shards: int = 1
    pipe: Pipe = Pipe()
    ranks: int = 1
    experts: int = 1


@dataclass(frozen=True)
class ModelLeaf:
    """One of the model's own leaves, or a stack of the layers of a Python loop, before it is placed.

    Attributes:
      path, shape, dtype, trainable: as in `Leaf`.
      tensor, expert: the dims that these axes split.
      members: its positions among the model's own leaves; one for each layer of a stack.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    trainable: bool
    tensor: int | None
    expert: int | None
    members: tuple[int, ...]

    @property
    def rolled(self) -> bool:
        """Whether this is a stack of the layers of a Python loop."""
        return len(self.members) > 1

    def stacked(self, path: str, members: tuple[int, ...]) -> "ModelLeaf":
        """Return the stack of several layers like this one, along a new dim 0."""
        # All dims move by one for the new dim of layers.
        tensor, expert = (None if d is None else d + 1 for d in (self.tensor, self.expert))
        shape = (len(members), *self.shape)
        return replace(self, path=path, shape=shape, tensor=tensor, expert=expert, members=members)

    def with_layers_first(self) -> "ModelLeaf":
        """Move the layers from dim 1 to dim 0, which the stages of a pipeline split."""
        tensor, expert = (None if d is None else {0: 1, 1: 0}.get(d, d) for d in (self.tensor, self.expert))
        shape = (self.shape[1], self.shape[0], *self.shape[2:])
        return replace(self, shape=shape, tensor=tensor, expert=expert)

    def placed(self, sharing: Sharing, form: Form = Whole(), layers_second: bool = False) -> Leaf:
        """Choose the dim along which the leaf is sharded, and pad it.

        Args:
          form: how it is stored; with `Staged`, `shape` is without the padding of stages, with the layers on dim 0.
          layers_second: whether dim 1 is a dim of layers, which is sharded only if no other dim divides.

        Returns:
          The leaf, sharded along one of the remaining dims, or replicated with a note.
        """
        shape, tensor, expert = self.shape, self.tensor, self.expert
        # 1. The axes over which this leaf is sharded, and how many shards they make.
        pipe, shards, axes = sharing.pipe, sharing.shards, sharing.pipe.shard
        ranks, experts = (1 if tensor is None else sharing.ranks), (1 if expert is None else sharing.experts)
        if expert is not None and "expert" in axes:
            # Each rank of `expert` holds other experts, so that ZeRO cannot shard over that axis again.
            shards, axes = shards // experts, tuple(axis for axis in axes if axis != "expert")
        first_dim = 0
        if isinstance(form, Staged):
            shape, first_dim = (*form.held, *shape[1:]), len(form.held)
            tensor, expert = (None if dim is None else dim + first_dim - 1 for dim in (tensor, expert))
        elif pipe.stages == "cut":
            # The stages of a cut program share no stack, so that each leaf is spread over `pipe`, even without ZeRO.
            shards, axes = shards * pipe.ranks, axes if shards > 1 else ("fsdp",)
        elif pipe.ranks > 1 and shards > 1:
            # All stages use this leaf. ZeRO shards it over their devices too.
            shards, axes = shards * pipe.ranks, ("pipe", *axes)

        # 2. The dims to choose from, dims of layers last. A leaf that may be a stack, but is none that we made, may be
        #    sharded along dim 0 if no other dim serves.
        stacked = not isinstance(form, Staged) and not layers_second and (isinstance(form, Stacked) or may_stack(shape))
        dims = [d for d in range(1 if stacked else first_dim, len(shape)) if d not in (tensor, expert)]
        dims.sort(key=lambda d: layers_second and d == 1)
        may_shard_first = stacked and not isinstance(form, Stacked) and 0 not in (tensor, expert)

        # 3. The choice. PAD_FROM counts the elements that one rank of `tensor` and `expert` holds.
        dim, note = None, ""
        if shards > 1:
            dim = _choose_dim(shape, shards, dims, may_shard_first, PAD_FROM * ranks * experts)
            note = _note(shape, shards, dim, {"tensor": tensor, "expert": expert})
        padded = 0 if dim is None else -(-shape[dim] // shards) * shards
        splits = (tensor, ranks, expert, experts, pipe.stages == "cut")
        return Leaf(self.path, shape, jnp.dtype(self.dtype), dim, padded, self.trainable, note, form, axes, *splits)


def _choose_dim(
    shape: tuple[int, ...], shards: int, dims: Sequence[int], may_shard_first: bool, pad_from: int
) -> int | None:
    """Return the dim to shard, None for a leaf that stays replicated.

    In this order: the first of `dims` that `shards` divides; the largest of `dims`, to be padded, if the leaf has
    `pad_from` elements; dim 0, if `may_shard_first` and it divides.
    """
    if not math.prod(shape):
        return None
    if (dim := next((d for d in dims if shape[d] % shards == 0), None)) is not None:
        return dim
    # Padding wastes least along the largest dim.
    if dims and math.prod(shape) >= pad_from:
        return max(dims, key=lambda d: shape[d])
    return 0 if may_shard_first and shape[0] % shards == 0 else None


def _note(shape: tuple[int, ...], shards: int, dim: int | None, split_dims: Mapping[str, int | None]) -> str:
    """Return the reason why a leaf is replicated or padded; "" if it is neither.

    `split_dims` maps each other axis to the dim that it splits.
    """
    if dim is not None:
        padded = -(-shape[dim] // shards) * shards
        return "" if padded == shape[dim] else f"padded: dim {dim} from {shape[dim]} to {padded}"
    if not math.prod(shape):
        return f"replicated: {shape} has no elements"
    exceptions = [f"{d}, which is on {axis}," for axis, d in split_dims.items() if d is not None]
    subject = f"no dim but {' and '.join(exceptions)}" if exceptions else "no dim"
    return f"replicated: {subject} of {shape} is divisible by {shards}, and it is small"


def may_stack(shape: tuple[int, ...]) -> bool:
    """Return whether an array of this shape may be a stack of layers.

    Its first dim is at most `LAYERS`, and it has three dims or more, or two with the first the smaller.
    """
    return len(shape) > 1 and shape[0] <= LAYERS and (len(shape) > 2 or shape[0] < shape[1])
