"""Where every leaf of a training state lives: its spec, and the bytes that a device stores."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..backend.text import size
from ..model.paths import name_of
from ..program.buffers import HOST, is_on_host
from ..strategy.axes import SHARDS
from .leaves import PAD_FROM, Leaf
from .precision import Policy
from .storage import Storage, uneven

Kind = Literal["params", "copy", "grads", "optimizer"]


@dataclass(frozen=True)
class Stored:
    """How one array of a state is stored.

    Attributes:
      shape: its shape at rest.
      dtype: its dtype at rest.
      spec: its spec.
      leaf: the parameter that it is, or that it mirrors; None for a counter and the like.
      host: whether it lives in the host's memory (pinned), and not in the device's.
    """

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    leaf: Leaf | None
    host: bool = False

    def pad(self, x: jax.Array | None) -> jax.Array | None:
        """An array as it is at rest, but for its memory; None stays."""
        return x if x is None or self.leaf is None or x.shape == self.shape else self.leaf.pad(x)

    def unpad(self, x: jax.Array | None) -> jax.Array | None:
        """The reverse of `pad`; what is on the host stays as it is."""
        return x if x is None or self.leaf is None or (self.host and is_on_host(x)) else self.leaf.unpad(x)


@dataclass(frozen=True)
class Layout:
    """Where every leaf of a training state lives.

    Attributes:
      storage: the parameter leaves.
      mesh: the mesh.
      sharded: which of "params", "grads", "optimizer" carry `fsdp`.
      copied: whether a replicated copy in the compute dtype is stored beside a sharded float32 master (ZeRO-1 and 2 in
        low precision).
      optimizer: the arrays of the optimizer state, a pytree of `Stored`.
      found: the paths of the model's leaves that are on `tensor` though no rule names them
        (`parallel/tensor/pairs.py`).
      whole: the paths of large leaves that every rank of `tensor` holds whole, and why.
      host: whether large stacks of layers rest in the host's memory.
      loops: how the layers of each list of blocks, and of each stack, run; known once a batch has been traced.
    """

    storage: Storage
    mesh: Mesh
    policy: Policy
    sharded: frozenset[str]
    copied: bool
    optimizer: Any
    found: frozenset[str] = frozenset()
    whole: Mapping[str, str] = field(default_factory=dict, compare=False)
    host: bool = False
    loops: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def ruled(self) -> list[str]:
        """The paths of the units, "" for those that are on `tensor` by no rule: there nobody made a mistake."""
        storage, found = self.storage, self.found
        rolled = {
            leaf.path
            for leaf, at in zip(storage.leaves, storage.origin, strict=True)
            if storage.models[at[0]].path in found
        }
        return ["" if leaf.path in found | rolled else leaf.path for leaf in storage.units]

    @property
    def shards(self) -> int:
        """The number of devices over which ZeRO shards."""
        return math.prod(self.mesh.shape[axis] for axis in SHARDS)

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The parameter leaves as a step keeps them."""
        return self.storage.leaves

    def spec(self, leaf: Leaf, kind: str) -> PartitionSpec:
        """The spec of a leaf's "params" (the master), "copy", "grads" or "optimizer"."""
        return leaf.spec(kind in self.sharded or (kind == "params" and self.copied))

    def specs(self, kind: str) -> list[PartitionSpec]:
        """`spec` of every leaf."""
        return [self.spec(leaf, kind) for leaf in self.leaves]

    def places(self, kind: Kind) -> Any:
        """How the arrays of a kind are stored: "params" (the master), "copy", "grads", in the tree of the leaves, or
        "optimizer", in that of the optimizer's state. A pytree of `Stored`.
        """
        if kind == "optimizer":
            return self.optimizer
        policy = self.policy
        dtype = {
            "params": lambda leaf: policy.stored(leaf.dtype, leaf.trainable),
            "copy": lambda leaf: policy.computed(leaf.dtype),
            "grads": lambda leaf: policy.reduced(leaf.dtype),
        }[kind]
        host = lambda leaf: self.host and kind == "params" and leaf.by_layer and math.prod(leaf.stored) >= PAD_FROM
        return self.unflatten(
            Stored(self.stored(leaf, kind), dtype(leaf), self.spec(leaf, kind), leaf, host(leaf))
            for leaf in self.leaves
        )

    def at_rest(self, params: Any) -> Any:
        """Parameters, as they are stored but for their memory, where they rest. Those of the host go there one after
        the other, so that a program that makes them need not hold them all.
        """
        places, values = jax.tree.leaves(self.places("params"), is_leaf=is_stored), jax.tree.leaves(params)
        last: Any = ()
        for at, place in enumerate(places):
            if place.host:
                value, last = jax.lax.optimization_barrier((values[at], last))
                values[at] = last = jax.device_put(value, HOST)
        return self.unflatten(values)

    def sharding(self, spec: PartitionSpec, host: bool = False) -> NamedSharding:
        """A spec on this mesh, of arrays in the devices' memory or their hosts'."""
        return NamedSharding(self.mesh, spec, memory_kind="pinned_host" if host else None)

    def shardings(self, kind: Kind) -> Any:
        """The shardings of the arrays of a kind, a tree like `places`."""
        return self._each(kind, lambda place: self.sharding(place.spec, place.host))

    @property
    def handed_out(self) -> Any:
        """The shardings of the model's own tree where it is handed out: padded leaves are whole, layers of a Python
        loop are split along the dim along which their stack is.
        """
        stacks = zip(self.leaves, self.storage.origin, strict=True)
        stack_of = {i: leaf for leaf, at in stacks if leaf.rolled and leaf.dim is not None for i in at}
        leaves = [self._as_in(stack_of[i], x) if i in stack_of else x for i, x in enumerate(self.storage.models)]
        sharded = lambda leaf: leaf.stored == leaf.shape and self.spec(leaf, "params") != PartitionSpec()
        specs = [leaf.spec() if sharded(leaf) else PartitionSpec() for leaf in leaves]
        return jax.tree.unflatten(self.storage.model_tree, map(self.sharding, specs))

    def _as_in(self, stack: Leaf, layer: Leaf) -> Leaf:
        """A layer split as its stack is, and over the stages of a pipeline where that divides: of `fsdp` and `pipe`
        the latter last, so that one all-to-all leads there. Split otherwise, the whole stack would be gathered.
        """
        dim, shard = stack.inner(True), stack.shard
        if stack.layers is not None and layer.shape[dim] % math.prod(self.mesh.shape[a] for a in (*shard, "pipe")) == 0:
            shard = (*shard, "pipe")
        return replace(layer, dim=dim, padded=stack.padded, shard=shard)

    def to_logical(self, stored: Any, kind: Kind = "params", as_stacked: bool = False) -> Any:
        """Arrays as they are stored -> as the model has them: without padding, in the model's own tree and shapes.

        Args:
          stored: a tree like `places(kind)`; None, for a leaf without a value, stays.
          kind: which tree it is. The optimizer's state keeps its structure.
          as_stacked: leave it at padding: layers stay stacked and in whole stages, as an optimizer may be shown them.
        """
        stored = self._each(kind, Stored.unpad, stored)
        if as_stacked or kind == "optimizer":
            return stored
        out: dict[int, Any] = {}
        values = self.storage.tree.flatten_up_to(stored)
        for leaf, at, x in zip(self.leaves, self.storage.origin, values, strict=True):
            out.update(zip(at, [None] * len(at) if x is None else leaf.form.to_logical(x), strict=True))
        return jax.tree.unflatten(self.storage.model_tree, [out[i] for i in range(len(out))])

    def to_stored(self, logical: Any, kind: Kind = "params", as_stacked: bool = False) -> Any:
        """The reverse of `to_logical`; no dtype changes."""
        if not as_stacked and kind != "optimizer":
            values = self.storage.model_tree.flatten_up_to(logical)
            parts = [[values[i] for i in at] for at in self.storage.origin]
            logical = self.unflatten(
                None if xs[0] is None else leaf.form.to_stored(xs) for leaf, xs in zip(self.leaves, parts, strict=True)
            )
        return self._each(kind, Stored.pad, logical)

    def _each(self, kind: Kind, fun: Callable[..., Any], *trees: Any) -> Any:
        return jax.tree.map(fun, self.places(kind), *trees, is_leaf=is_stored)

    def stored(self, leaf: Leaf, kind: str = "params") -> tuple[int, ...]:
        """The shape of a leaf's master at rest: padded only where it is sharded."""
        return leaf.stored if leaf.spread or self.spec(leaf, kind) == leaf.spec() else leaf.shape

    def unflatten(self, values: Iterable[Any]) -> Any:
        """One value for each leaf, in their tree."""
        return jax.tree.unflatten(self.storage.tree, list(values))

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
        """Bytes per device: "params" (the master and, where there is one, the copy), "grads", "optimizer",
        without what is on the host.
        """
        params = self._bytes("params") + (self._bytes("copy") if self.copied else 0)
        return {"params": params, "grads": self._bytes("grads"), "optimizer": self._bytes("optimizer")}

    @property
    def host_bytes(self) -> dict[str, int]:
        """Bytes in the host's memory, for each device, of "params" and "optimizer"."""
        return {kind: self._bytes(kind, host=True) for kind in ("params", "optimizer")}

    def _bytes(self, kind: Kind, host: bool = False) -> int:
        total = 0
        for place in jax.tree.leaves(self.places(kind), is_leaf=is_stored):
            if place.host == host and (kind != "grads" or place.leaf.trainable):
                local = self.sharding(place.spec).shard_shape(place.shape)
                total += math.prod(local) * jnp.dtype(place.dtype).itemsize
        return total

    @property
    def notes(self) -> dict[str, str]:
        """Path -> why a leaf is replicated, padded, or whole on tensor ranks; likewise large optimizer arrays."""
        notes = {leaf.path: leaf.note for leaf in self.leaves if leaf.note}
        for path, why in self.whole.items():
            notes[path] = f"{notes[path]}; {why}" if path in notes else why
        if "optimizer" in self.sharded and self.shards > 1:
            for path, x in jax.tree_util.tree_leaves_with_path(self.optimizer, is_leaf=is_stored):
                if x.spec == PartitionSpec() and math.prod(x.shape) >= PAD_FROM:
                    notes[f"optimizer/{name_of(path)}"] = f"replicated: {x.shape} is the shape of no sharded parameter"
        return notes

    def __repr__(self) -> str:
        total = ", ".join(f"{name} {size(count)}" for name, count in self.bytes.items())
        return f"Layout({len(self.leaves)} leaves on {self.mesh.size} devices, each {total}; print it to see them)"

    def __str__(self) -> str:
        width = max((len(leaf.path) for leaf in self.leaves), default=0)
        notes = self.notes
        lines = [
            f"{leaf.path:<{width}}  {leaf.shape!s:<20} params {self.spec(leaf, 'params')!s:<28} "
            f"{notes.get(leaf.path, '')}".rstrip()
            for leaf in self.leaves
        ]
        total = ", ".join(f"{name} {count:,}" for name, count in self.bytes.items())
        rolled = (leaf for leaf in self.leaves if leaf.rolled)
        stacks = {leaf.path.partition("*")[0] + "*": f"{leaf.shape[0]} layers of a Python loop" for leaf in rolled}
        stacks |= {
            path: f"{stacks[path]}; other blocks are not alike: {why}" for path, why in uneven(self.storage).items()
        }
        lines += [f"{path}: {how}" for path, how in (stacks | self.loops).items()]
        return "\n".join([*lines, f"bytes per device: {total}"])


def is_stored(x: Any) -> bool:
    """Whether a node of a tree is one array's place."""
    return isinstance(x, Stored)


def place_optimizer(state: Any, params: Any, leaves: Sequence[Leaf], sharded: bool, host: bool = False) -> Any:
    """A `Stored` for each array of an abstract optimizer state.

    An array mirrors the parameter whose path its own path ends with, if their shapes agree (momenta do); it lives as
    the parameter's shard does, with `host` in the host's memory if it has `PAD_FROM` elements. Others (counters,
    factored moments) are replicated, on the devices.
    """
    mirrors = {
        _names(path): leaf for (path, _), leaf in zip(jax.tree_util.tree_leaves_with_path(params), leaves, strict=True)
    }
    seen = {leaf.path: tuple(x.shape) for x, leaf in zip(jax.tree.leaves(params), leaves, strict=True)}

    def stored(path: Any, x: Any) -> Stored:
        names = _names(path)
        ends = (mirrors.get(names[at:]) for at in range(len(names) + 1))
        leaf = next((found for found in ends if found is not None and seen[found.path] == tuple(x.shape)), None)
        if leaf is None:
            return Stored(tuple(x.shape), x.dtype, PartitionSpec(), None)
        shape = leaf.stored if sharded or leaf.spread else leaf.shape
        return Stored(shape, x.dtype, leaf.spec(sharded), leaf, host and math.prod(shape) >= PAD_FROM)

    return jax.tree_util.tree_map_with_path(stored, state)


def _names(path: Any) -> tuple[str, ...]:
    return tuple(name_of((entry,)) for entry in path)
