"""Where every leaf lives: its sharded dim, its padding, and the bytes that a device stores.

A leaf is sharded over `fsdp` along one dim. Its first dim is avoided where it may be a stack of layers (at most 512,
and three dims or more, or two with the first the smaller): a scan slices it there. If no dim divides, a leaf of 16,384
elements or more is padded along its largest such dim; a smaller one is replicated, and reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .precision import Policy

PAD_FROM = 16_384  # elements; smaller leaves are not worth the padding
_LAYERS = 512  # no model stacks more


@dataclass(frozen=True)
class Leaf:
    """One parameter leaf.

    Attributes:
      path: its place in the tree, such as `layers/attention/query/kernel`.
      shape: its logical shape, as the model and the optimizer see it.
      dtype: the dtype that the model declares.
      dim: the dim sharded over `fsdp`, None where it is replicated.
      padded: the size of that dim at rest, a multiple of the axis size.
      trainable: whether it has a gradient and optimizer state.
      note: why it is not sharded, or padded.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    dim: int | None
    padded: int
    trainable: bool = True
    note: str = ""

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape at rest, padding included."""
        return tuple(self.padded if d == self.dim else n for d, n in enumerate(self.shape))

    @property
    def spec(self) -> PartitionSpec:
        """The spec of the leaf where its strategy shards it."""
        return PartitionSpec() if self.dim is None else PartitionSpec(*[None] * self.dim, "fsdp")

    def pad(self, x: jax.Array, dim: int | None = None) -> jax.Array:
        """Logical -> stored shape; `dim` where `x` is one layer of a stack."""
        dim = self.dim if dim is None else dim
        if self.dim is None or dim is None or self.padded == self.shape[self.dim]:
            return x
        widths = [(0, self.padded - n if d == dim else 0) for d, n in enumerate(x.shape)]
        return jnp.pad(x, widths)

    def unpad(self, x: jax.Array, dim: int | None = None) -> jax.Array:
        """Stored -> logical shape; `dim` where `x` is one layer of a stack."""
        dim = self.dim if dim is None else dim
        if self.dim is None or dim is None or self.padded == self.shape[self.dim]:
            return x
        return jax.lax.slice_in_dim(x, 0, self.shape[self.dim], axis=dim)


def place(path: str, shape: tuple[int, ...], dtype: Any, shards: int, trainable: bool) -> Leaf:
    """Choose the dim of one leaf that `shards` devices share."""
    first = shape[0] if shape else 0
    stacked = len(shape) > 1 and first <= _LAYERS and (len(shape) > 2 or first < shape[1])
    dims = range(1, len(shape)) if stacked else range(len(shape))
    dim = next((d for d in dims if shape[d] and shape[d] % shards == 0), None) if shards > 1 else None
    note = ""
    if dim is None and shards > 1:
        if dims and math.prod(shape) >= PAD_FROM:
            dim = max(dims, key=lambda d: shape[d])
            note = f"padded: dim {dim} from {shape[dim]} to {-(-shape[dim] // shards) * shards}"
        elif stacked and first and first % shards == 0:
            dim = 0
        else:
            note = f"replicated: no dim of {shape} divides by {shards}, and it is small"
    padded = 0 if dim is None else -(-shape[dim] // shards) * shards
    return Leaf(path, shape, jnp.dtype(dtype), dim, padded, trainable, note)


@dataclass(frozen=True)
class Stored:
    """How one array of the optimizer state is stored: its logical shape, spec and shape at rest."""

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    leaf: Leaf | None  # the parameter that it mirrors


@dataclass(frozen=True)
class Layout:
    """Where every leaf of a training state lives.

    Attributes:
      leaves: the parameter leaves, in the order of their tree.
      tree: the tree of the parameters.
      mesh: the mesh.
      sharded: which of "params", "grads", "optimizer" carry `fsdp`.
      copied: whether a replicated copy in the compute dtype is stored beside a sharded float32 master (ZeRO-1 and 2 in
        low precision).
      optimizer: the arrays of the optimizer state, a pytree of `Stored`.
    """

    leaves: tuple[Leaf, ...]
    tree: Any
    mesh: Mesh
    policy: Policy
    sharded: frozenset[str]
    copied: bool
    optimizer: Any

    def spec(self, leaf: Leaf, kind: str) -> PartitionSpec:
        """The spec of a leaf's "params" (the master), "copy", "grads" or "optimizer"."""
        return leaf.spec if kind in self.sharded or (kind == "params" and self.copied) else PartitionSpec()

    def specs(self, kind: str) -> list[PartitionSpec]:
        """`spec` of every leaf."""
        return [self.spec(leaf, kind) for leaf in self.leaves]

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """A spec on this mesh."""
        return NamedSharding(self.mesh, spec)

    def stored(self, leaf: Leaf, kind: str = "params") -> tuple[int, ...]:
        """The shape of a leaf's master at rest: padded only where it is sharded."""
        return leaf.stored if self.spec(leaf, kind) != PartitionSpec() else leaf.shape

    def unflatten(self, values: Sequence[Any]) -> Any:
        """One value for each leaf, in the tree of the parameters."""
        return jax.tree.unflatten(self.tree, list(values))

    @property
    def params(self) -> Any:
        """The specs of the parameters at rest, in their tree."""
        return jax.tree.unflatten(self.tree, self.specs("params"))

    @property
    def grads(self) -> Any:
        """The specs of the gradients that the update gets, in the tree of the parameters."""
        return jax.tree.unflatten(self.tree, self.specs("grads"))

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes per device: "params" (the master and, where there is one, the copy), "grads", "optimizer"."""
        params = sum(self._bytes(leaf, "params", Policy.master(leaf.dtype)) for leaf in self.leaves)
        if self.copied:
            params += sum(math.prod(leaf.shape) * self.policy.computed(leaf.dtype).itemsize for leaf in self.leaves)
        trainable = [leaf for leaf in self.leaves if leaf.trainable]
        grads = sum(self._bytes(leaf, "grads", self.policy.reduced(leaf.dtype)) for leaf in trainable)
        stored = jax.tree.leaves(self.optimizer, is_leaf=lambda x: isinstance(x, Stored))
        optimizer = sum(self._local(s.shape, s.spec) * jnp.dtype(s.dtype).itemsize for s in stored)
        return {"params": params, "grads": grads, "optimizer": optimizer}

    def _bytes(self, leaf: Leaf, kind: str, dtype: Any) -> int:
        return self._local(self.stored(leaf, kind), self.spec(leaf, kind)) * jnp.dtype(dtype).itemsize

    def _local(self, shape: tuple[int, ...], spec: PartitionSpec) -> int:
        return math.prod(self.sharding(spec).shard_shape(shape))

    @property
    def notes(self) -> dict[str, str]:
        """What a reader should know: leaf path -> why it is replicated or padded; large optimizer arrays likewise."""
        notes = {leaf.path: leaf.note for leaf in self.leaves if leaf.note}
        if "optimizer" in self.sharded and self.mesh.shape["fsdp"] > 1:
            for path, x in jax.tree_util.tree_leaves_with_path(self.optimizer, is_leaf=lambda x: isinstance(x, Stored)):
                if x.leaf is None and math.prod(x.shape) >= PAD_FROM:
                    notes[f"optimizer/{name_of(path)}"] = f"replicated: {x.shape} is the shape of no sharded parameter"
        return notes

    def __str__(self) -> str:
        width = max((len(leaf.path) for leaf in self.leaves), default=0)
        lines = [
            f"{leaf.path:<{width}}  {leaf.shape!s:<20} params {self.spec(leaf, 'params')!s:<28} {leaf.note}".rstrip()
            for leaf in self.leaves
        ]
        total = ", ".join(f"{name} {size:,}" for name, size in self.bytes.items())
        return "\n".join([*lines, f"bytes per device: {total}"])


def make_leaves(params: Any, shards: int, trainable: Callable[[str], bool] | None) -> tuple[tuple[Leaf, ...], Any]:
    """The leaves of an abstract parameter tree, placed for `shards` devices. Raises ValueError on a tree without
    any.
    """
    flat, tree = jax.tree_util.tree_flatten_with_path(params)
    leaves = []
    for path, x in flat:
        name = name_of(path)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise ValueError(
                f"parameter {name} is {x.dtype}; make it two real ones, and lax.complex(real, imag) in the loss"
            )
        trains = bool(jnp.issubdtype(x.dtype, jnp.floating)) and (trainable is None or bool(trainable(name)))
        leaves.append(place(name, tuple(x.shape), x.dtype, shards, trains))
    if not any(leaf.trainable for leaf in leaves):
        names = ", ".join(leaf.path for leaf in leaves[:5]) or "none"
        needed = "at least one must be floating-point" if trainable is None else "trainable= must be true for some path"
        raise ValueError(f"no trainable parameters among {len(leaves)} leaves ({names}); {needed}")
    return tuple(leaves), tree


def place_optimizer(state: Any, params: Any, leaves: Sequence[Leaf], sharded: bool) -> Any:
    """A `Stored` for each array of an abstract optimizer state.

    An array mirrors the parameter whose path its own path ends with, if their shapes agree (momenta do); it lives as
    the parameter's shard does. Others (counters, factored moments) are replicated.
    """
    mirrors = {
        _names(path): leaf for (path, _), leaf in zip(jax.tree_util.tree_leaves_with_path(params), leaves, strict=True)
    }

    def stored(path: Any, x: Any) -> Stored:
        names = _names(path)
        ends = (mirrors.get(names[at:]) for at in range(len(names) + 1))
        leaf = next((found for found in ends if found is not None and found.shape == tuple(x.shape)), None)
        if leaf is None or leaf.dim is None or not sharded:
            return Stored(tuple(x.shape), x.dtype, PartitionSpec(), None)
        return Stored(leaf.stored, x.dtype, leaf.spec, leaf)

    return jax.tree_util.tree_map_with_path(stored, state)


def name_of(path: Any) -> str:
    """A key path as text, `layers/0/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _names(path: Any) -> tuple[str, ...]:
    return tuple(name_of((entry,)) for entry in path)
