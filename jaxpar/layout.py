"""Where every leaf of a training state lives: its spec, and the bytes that a device stores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .kept import Kept
from .leaves import PAD_FROM, Leaf, name_of
from .parallel.tensor import unsplit
from .precision import Policy
from .stacks import uneven


@dataclass(frozen=True)
class Stored:
    """How one array of the optimizer state is stored: its shape at rest, dtype and spec."""

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    leaf: Leaf | None  # the parameter that it mirrors


@dataclass(frozen=True)
class Layout:
    """Where every leaf of a training state lives.

    Attributes:
      kept: the parameter leaves.
      mesh: the mesh.
      sharded: which of "params", "grads", "optimizer" carry `fsdp`.
      copied: whether a replicated copy in the compute dtype is stored beside a sharded float32 master (ZeRO-1 and 2 in
        low precision).
      optimizer: the arrays of the optimizer state, a pytree of `Stored`.
      found: the paths of the model's leaves that are on `tensor` though no rule names them (`parallel/pairs.py`).
      loops: how the layers of each list of blocks, and of each stack, run; known once a batch has been traced.
    """

    kept: Kept
    mesh: Mesh
    policy: Policy
    sharded: frozenset[str]
    copied: bool
    optimizer: Any
    found: frozenset[str] = frozenset()
    loops: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def ruled(self) -> list[str]:
        """The paths of the units, "" for those that are on `tensor` by no rule: there nobody made a mistake."""
        kept, found = self.kept, self.found
        rolled = {
            leaf.path for leaf, at in zip(kept.leaves, kept.origin, strict=True) if kept.models[at[0]].path in found
        }
        return ["" if leaf.path in found | rolled else leaf.path for leaf in kept.units]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The parameter leaves as a step keeps them."""
        return self.kept.leaves

    def spec(self, leaf: Leaf, kind: str) -> PartitionSpec:
        """The spec of a leaf's "params" (the master), "copy", "grads" or "optimizer"."""
        return leaf.spec(kind in self.sharded or (kind == "params" and self.copied))

    def specs(self, kind: str) -> list[PartitionSpec]:
        """`spec` of every leaf."""
        return [self.spec(leaf, kind) for leaf in self.leaves]

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """A spec on this mesh."""
        return NamedSharding(self.mesh, spec)

    def stored(self, leaf: Leaf, kind: str = "params") -> tuple[int, ...]:
        """The shape of a leaf's master at rest: padded only where it is sharded."""
        return leaf.stored if self.spec(leaf, kind) == leaf.spec() else leaf.shape

    def unflatten(self, values: Sequence[Any]) -> Any:
        """One value for each leaf, in their tree."""
        return jax.tree.unflatten(self.kept.tree, list(values))

    @property
    def params(self) -> Any:
        """The specs of the parameters at rest, in their tree."""
        return self.unflatten(self.specs("params"))

    @property
    def grads(self) -> Any:
        """The specs of the gradients that the update gets, in the tree of the parameters."""
        return self.unflatten(self.specs("grads"))

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes per device: "params" (the master and, where there is one, the copy), "grads", "optimizer"."""
        params = sum(self._bytes(leaf, "params", Policy.master(leaf.dtype)) for leaf in self.leaves)
        if self.copied:
            params += sum(self._bytes(leaf, "copy", self.policy.computed(leaf.dtype)) for leaf in self.leaves)
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
        """What a reader should know: leaf path -> why it is replicated or padded, or whole on every tensor rank; large
        optimizer arrays likewise.
        """
        notes = {leaf.path: leaf.note for leaf in self.leaves if leaf.note}
        if self.mesh.shape["tensor"] > 1:
            shapes = [(leaf.path, leaf.shape) for leaf in self.kept.models]
            split = {leaf.path: leaf.tensor for leaf in self.kept.models if leaf.tensor is not None}
            for path, why in unsplit(shapes, split, self.mesh.shape["tensor"]).items():
                notes[path] = f"{notes[path]}; {why}" if path in notes else why
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
        rolled = (leaf for leaf in self.leaves if leaf.rolled)
        stacks = {leaf.path.partition("*")[0] + "*": f"{leaf.shape[0]} layers of a Python loop" for leaf in rolled}
        stacks |= {
            path: f"{stacks[path]}; other blocks are not alike: {why}" for path, why in uneven(self.kept).items()
        }
        lines += [f"{path}: {how}" for path, how in (stacks | self.loops).items()]
        return "\n".join([*lines, f"bytes per device: {total}"])


def place_optimizer(state: Any, params: Any, leaves: Sequence[Leaf], sharded: bool) -> Any:
    """A `Stored` for each array of an abstract optimizer state.

    An array mirrors the parameter whose path its own path ends with, if their shapes agree (momenta do); it lives as
    the parameter's shard does. Others (counters, factored moments) are replicated.
    """
    mirrors = {
        _names(path): leaf for (path, _), leaf in zip(jax.tree_util.tree_leaves_with_path(params), leaves, strict=True)
    }
    seen = {leaf.path: tuple(x.shape) for x, leaf in zip(jax.tree.leaves(params), leaves, strict=True)}

    def stored(path: Any, x: Any) -> Stored:
        names = _names(path)
        ends = (mirrors.get(names[at:]) for at in range(len(names) + 1))
        leaf = next((found for found in ends if found is not None and seen[found.path] == tuple(x.shape)), None)
        if leaf is None or leaf.spec(sharded) == PartitionSpec():
            return Stored(tuple(x.shape), x.dtype, PartitionSpec(), None)
        return Stored(leaf.stored if sharded else leaf.shape, x.dtype, leaf.spec(sharded), leaf)

    return jax.tree_util.tree_map_with_path(stored, state)


def _names(path: Any) -> tuple[str, ...]:
    return tuple(name_of((entry,)) for entry in path)
