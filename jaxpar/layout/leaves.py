"""The leaves of a model: the dim that each is sharded along, its padding, and how layers are kept.

A leaf is sharded over `fsdp` along one dim. Its first dim is avoided where it may be a stack of layers (at most 512,
and three dims or more, or two with the first the smaller): a scan slices it there. If no dim divides, a leaf of 16,384
elements or more is padded along its largest such dim; a smaller one is replicated, and reported.

With a pipeline, the leaves of the largest stack live on the ranks that run their layers: dim 0 is over `pipe`, and with
v chunks a rank it is two dims, [v, layers / v], the second over `pipe`; in a V, odd chunks lie in reverse. If the
layers do not divide, zeros follow the last. The other leaves serve every rank, and are sharded over `pipe` and `fsdp`
together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

PAD_FROM = 16_384  # elements; smaller leaves are not worth the padding
LAYERS = 512  # no model stacks more


@dataclass(frozen=True)
class Whole:
    """The form of a leaf that is one of the model's own, as the model has it."""

    def to_logical(self, x: jax.Array) -> list[jax.Array]:
        """The leaf -> the model's own leaves that are in it: one here."""
        return [x]

    def to_stored(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The reverse of `to_logical`."""
        return parts[0]


@dataclass(frozen=True)
class Stacked:
    """Layers of a Python loop, the model's own leaves, as one stack along dim 0 (`slicing/rolling/roll.py`)."""

    def to_logical(self, x: jax.Array) -> list[jax.Array]:
        """A stack [layers, ...] -> its layers."""
        return [x[k] for k in range(x.shape[0])]

    def to_stored(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The reverse of `to_logical`."""
        return jnp.stack(parts)


@dataclass(frozen=True)
class Staged:
    """The form of layers that the stages of a pipeline own: whole stages, with zeros after the last layer if need be.

    Attributes:
      layers: the number of layers.
      held: the dims that they fill: (layers,) or, with chunks, (chunks, layers / chunks). The last is over `pipe`.
      dim: the dim that they are on in the model's own leaf, 1 after `nn.scan(variable_axes={"params": 1})`; None where
        the model has them one by one, in a Python loop.
      turned: the ranks of a V, on which odd chunks lie in reverse; 0 where every chunk begins on the first rank.
    """

    layers: int
    held: tuple[int, ...]
    dim: int | None = 0
    turned: int = 0

    @property
    def chunks(self) -> int:
        """The chunks that each rank holds."""
        return self.held[0] if len(self.held) > 1 else 1

    def in_order(self, x: jax.Array) -> jax.Array:
        """Whole stages [*held, ...] -> [layers, ...]."""
        if self.held == (self.layers,):
            return x
        return self._turn(x).reshape(-1, *x.shape[len(self.held) :])[: self.layers]

    def in_stages(self, x: jax.Array) -> jax.Array:
        """The reverse of `in_order`."""
        if self.held == (self.layers,):
            return x
        widths = [(0, math.prod(self.held) - self.layers)] + [(0, 0)] * (x.ndim - 1)
        return self._turn(jnp.pad(x, widths).reshape(*self.held, *x.shape[1:]))

    def _turn(self, x: jax.Array) -> jax.Array:
        """Stages [*held, ...] in the order of the layers, from that of the ranks, or the reverse."""
        if not self.turned:
            return x
        stages = x.reshape(self.chunks, self.turned, -1, *x.shape[2:])
        return jnp.stack([part[::-1] if c % 2 else part for c, part in enumerate(stages)]).reshape(x.shape)

    def own(self, x: jax.Array) -> list[jax.Array]:
        """Layers in order [layers, ...] -> the model's own leaves that hold them."""
        if self.dim is None:
            return Stacked().to_logical(x)
        return [jnp.swapaxes(x, 0, self.dim)]

    def to_logical(self, x: jax.Array) -> list[jax.Array]:
        """Whole stages -> the model's own leaves that hold their layers."""
        return self.own(self.in_order(x))

    def to_stored(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The reverse of `to_logical`."""
        return self.in_stages(jnp.stack(parts) if self.dim is None else jnp.swapaxes(parts[0], 0, self.dim))


Form = Whole | Stacked | Staged


@dataclass(frozen=True)
class Leaf:
    """One parameter leaf, as a step keeps it.

    Attributes:
      path: its place in the tree, such as `layers/attention/query/kernel`; that of layers of a Python loop has a `*` in
        place of their number.
      shape: its shape, which follows from the model's by its form.
      dtype: the dtype that the model declares.
      dim: the dim that ZeRO shards, None where it does not.
      padded: the size of that dim at rest, a multiple of the number of shards.
      trainable: whether it has a gradient and optimizer state.
      note: why it is not sharded, or padded.
      form: which of the model's own leaves are in it, and how.
      shard: the mesh axes over which `dim` is sharded; with `Strategy.hpz`, `data` is the last of them.
      tensor: the dim that is split over the ranks of `tensor`, None where each holds the whole.
      ranks: the number of these.
      spread: whether `dim` is over `pipe` too, whatever ZeRO shards: of a model whose program is cut into stages.
      expert: the dim of experts, split over the ranks of `expert`, None where each holds the whole.
      experts: the number of these ranks.
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
        """Whether each rank of a pipeline holds a part of its own."""
        return self.layers is not None or (self.spread and self.dim is not None)

    @property
    def layers(self) -> int | None:
        """The number of layers of a leaf that the stages of a pipeline own, None for every other leaf."""
        return self.form.layers if isinstance(self.form, Staged) else None

    @property
    def stage(self) -> int:
        """The dim of such a leaf that is over `pipe`; 0 for every other."""
        return len(self.form.held) - 1 if isinstance(self.form, Staged) else 0

    @property
    def rolled(self) -> bool:
        """Whether it is a stack of leaves that the model has one by one, of layers in a Python loop."""
        return isinstance(self.form, Stacked) or (isinstance(self.form, Staged) and self.form.dim is None)

    @property
    def as_modelled(self) -> bool:
        """Whether the model has this very leaf."""
        return self.form in (Whole(), Staged(self.layers or 0, self.logical[:1]))

    @property
    def split(self) -> tuple[str, ...]:
        """The axes along which each rank has a part of the leaf to itself, and so that part's whole gradient."""
        return ("pipe",) * self.of_a_stage + ("expert",) * (self.expert is not None)

    @property
    def of_experts(self) -> "Leaf":
        """The leaf as one rank of `expert` has it."""
        part = tuple(n // self.experts if d == self.expert else n for d, n in enumerate(self.shape))
        return self if self.expert is None else replace(self, shape=part, expert=None, experts=1)

    @property
    def local(self) -> "Leaf":
        """The leaf as one rank of `expert` and `tensor` has it: its part is a leaf like any other."""
        mine = self.of_experts
        part = tuple(n // mine.ranks if d == mine.tensor else n for d, n in enumerate(mine.shape))
        return mine if mine.tensor is None else replace(mine, shape=part, tensor=None, ranks=1)

    @property
    def logical(self) -> tuple[int, ...]:
        """Its shape without the padding of stages, and layers in front."""
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
        if self.expert is not None:
            axes[self.expert] = "expert"
        if self.dim is not None and (sharded or self.spread):
            one, *more = (*(("pipe",) if self.spread else ()), *(self.shard if sharded else ()))
            axes[self.dim] = (one, *more) if more else one
        while axes and axes[-1] is None:
            axes.pop()
        return PartitionSpec(*axes)

    @property
    def by_layer(self) -> bool:
        """Whether a sharded leaf may be a stack of layers, to be moved one after the other."""
        return self.dim != 0 and not self.spread and (not isinstance(self.form, Whole) or may_stack(self.shape))

    def inner(self, sliced: bool, layers: int = 0) -> int:
        """The sharded dim, in one layer of the leaf if it is sliced; its layers are on dim `layers`."""
        if sliced and self.layers is None:
            return (self.dim or 0) - (layers <= (self.dim or 0))
        return (self.dim or 0) - (self.stage + 1 if sliced else 0)

    def pad(self, x: jax.Array, dim: int | None = None) -> jax.Array:
        """Pads the sharded dim for rest, unless it is; `dim` where `x` is one layer of a stack."""
        dim = self.dim if dim is None else dim
        if self.dim is None or dim is None or x.shape[dim] == self.padded:
            return x
        widths = [(0, self.padded - n if d == dim else 0) for d, n in enumerate(x.shape)]
        return jnp.pad(x, widths)

    def unpad(self, x: jax.Array, dim: int | None = None) -> jax.Array:
        """The reverse of `pad`."""
        dim = self.dim if dim is None else dim
        if self.dim is None or dim is None or x.shape[dim] != self.padded:  # of a leaf that is spread, a rank's part
            return x
        return jax.lax.slice_in_dim(x, 0, self.shape[self.dim], axis=dim)


@dataclass(frozen=True)
class Pipe:
    """What the layout needs to know of a pipeline: its ranks, the chunks that each holds, whether odd chunks lie on the
    ranks in reverse; the axes over which ZeRO shards; and what becomes a stage (`Strategy.stages`).
    """

    ranks: int = 1
    chunks: int = 1
    turns: bool = False
    shard: tuple[str, ...] = ("fsdp",)
    stages: str = "auto"

    def held(self, layers: int) -> tuple[int, ...]:
        """The dims that the layers of a stack fill in whole stages."""
        each = -(-layers // (self.ranks * self.chunks)) * self.ranks
        return (each,) if self.chunks == 1 else (self.chunks, each)


@dataclass(frozen=True)
class Sharing:
    """The devices that share a leaf: `shards` over which ZeRO shards it, on the axes `pipe.shard`, 1 where it does not;
    those of the pipeline; the `ranks` of `tensor`; `experts`, the ranks of that axis.
    """

    shards: int = 1
    pipe: Pipe = Pipe()
    ranks: int = 1
    experts: int = 1


def place(
    path: str,
    shape: tuple[int, ...],
    dtype: Any,
    trainable: bool,
    sharing: Sharing,
    form: Form = Whole(),
    tensor: int | None = None,
    expert: int | None = None,
    second: bool = False,
) -> Leaf:
    """Choose the dim along which a leaf is sharded.

    `shape` is without the padding of stages, layers in front. Its dim `tensor` is split over the ranks of that axis,
    its dim `expert` over those of that one, and the rest of it is sharded. Layers that are on the `second` dim are
    split last.
    """
    pipe, shards, axes = sharing.pipe, sharing.shards, sharing.pipe.shard
    ranks, experts = (1 if tensor is None else sharing.ranks), (1 if expert is None else sharing.experts)
    if expert is not None and "expert" in axes:
        shards, axes = shards // experts, tuple(axis for axis in axes if axis != "expert")
    first = 0
    if isinstance(form, Staged):
        shape, first = (*form.held, *shape[1:]), len(form.held)
        tensor, expert = (None if at is None else at + first - 1 for at in (tensor, expert))
    elif pipe.stages == "cut":
        shards, axes = shards * pipe.ranks, axes if shards > 1 else ("fsdp",)  # over `pipe` alone without ZeRO
    elif pipe.ranks > 1 and shards > 1:
        shards, axes = shards * pipe.ranks, ("pipe", *axes)
    stacked = not isinstance(form, Staged) and not second and (isinstance(form, Stacked) or may_stack(shape))
    dims = [d for d in range(1 if stacked else first, len(shape)) if d not in (tensor, expert)]
    dims.sort(key=lambda d: second and d == 1)
    own = stacked and not isinstance(form, Stacked) and 0 not in (tensor, expert)  # dim 0, if no other will do
    dim, note = None, ""
    if shards > 1:
        dim = _sharded(shape, shards, dims, own, PAD_FROM * ranks * experts)
        note = _note(shape, shards, dim, {"tensor": tensor, "expert": expert})
    padded = 0 if dim is None else -(-shape[dim] // shards) * shards
    parts = (tensor, ranks, expert, experts, pipe.stages == "cut")
    return Leaf(path, shape, jnp.dtype(dtype), dim, padded, trainable, note, form, axes, *parts)


def _sharded(shape: tuple[int, ...], shards: int, dims: Sequence[int], first: bool, least: int) -> int | None:
    """The first of `dims` that divides; the largest, padded, of a leaf of `least` elements; dim 0 if `first` allows."""
    if not math.prod(shape):
        return None
    if (dim := next((d for d in dims if shape[d] % shards == 0), None)) is not None:
        return dim
    if dims and math.prod(shape) >= least:
        return max(dims, key=lambda d: shape[d])
    return 0 if first and shape[0] % shards == 0 else None


def _note(shape: tuple[int, ...], shards: int, dim: int | None, taken: Mapping[str, int | None]) -> str:
    """Why a leaf is not sharded, or padded; `taken` are the dims that other axes split."""
    if dim is not None:
        whole = -(-shape[dim] // shards) * shards
        return "" if whole == shape[dim] else f"padded: dim {dim} from {shape[dim]} to {whole}"
    if not math.prod(shape):
        return f"replicated: {shape} has no elements"
    others = [f"{at}, which is on {axis}," for axis, at in taken.items() if at is not None]
    rest = f"no dim but {' and '.join(others)}" if others else "no dim"
    return f"replicated: {rest} of {shape} divides by {shards}, and it is small"


def may_stack(shape: tuple[int, ...]) -> bool:
    """Whether an array may be a stack of layers, by its shape."""
    return len(shape) > 1 and shape[0] <= LAYERS and (len(shape) > 2 or shape[0] < shape[1])
