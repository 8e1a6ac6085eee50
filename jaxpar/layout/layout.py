"""The layout of a training state: where every array lives, how many bytes a device stores, and the two conversions.

    model's own tree   --to_stored-->   arrays at rest   --to_logical-->   model's own tree
                       stack, stage, pad                 unpad, unstage, unstack

A `Layout` joins the parameter leaves (`storage.py`) with a mesh and with the choice of the trees that ZeRO shards. Each
array at rest is described by a `Stored`: shape, dtype, spec and memory. All conversions go through `Stored` and
`Leaf.form`, so that no other module knows about padding or stacks.
"""

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
from .leaves import PAD_FROM, Leaf
from .precision import Policy
from .storage import Storage, uneven

Kind = Literal["params", "copy", "grads", "optimizer"]


@dataclass(frozen=True)
class Stored:
    """How one array of a state is stored.

    Attributes:
      shape, dtype, spec: as stored between steps ("at rest").
      leaf: the parameter that the array is, or that it mirrors; None for a counter and the like.
      host: whether it lives in the host's pinned memory instead of the device's.
    """

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    leaf: Leaf | None
    host: bool = False

    def pad(self, x: jax.Array | None) -> jax.Array | None:
        """Pad an array to its shape at rest; its memory does not change. None stays None."""
        return x if x is None or self.leaf is None or x.shape == self.shape else self.leaf.pad(x)

    def unpad(self, x: jax.Array | None) -> jax.Array | None:
        """Remove the padding; inverse of `pad`. An array in the host's memory is returned unchanged."""
        return x if x is None or self.leaf is None or (self.host and is_on_host(x)) else self.leaf.unpad(x)


@dataclass(frozen=True)
class Layout:
    """The layout of a training state: the place and the form of every leaf.

    Attributes:
      storage: the parameter leaves.
      mesh: the devices, by axis.
      sharded: which of "params", "grads", "optimizer" carry `fsdp`.
      policy: the dtypes of parameters and gradients.
      copied: whether a replicated copy in the compute dtype is stored with the sharded float32 master (ZeRO-1 and 2 in
        low precision).
      optimizer: the arrays of the optimizer state, a pytree of `Stored`.
      found: the paths of the model's leaves that `parallel/tensor/pairs.py` splits over `tensor` without a rule.
      whole: the paths of large leaves that every rank of `tensor` holds whole, with the reason.
      host: whether large stacks of layers rest in the host's memory.
      shards: the number of devices over which ZeRO shards a leaf; 1 if the strategy has no `fsdp`.
      loops: how the layers of each list of blocks, and of each stack, run. A step adds this when it traces a batch.
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
    shards: int = 1
    loops: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def ruled(self) -> list[str]:
        """The path of each unit (`Storage.units`); "" for a unit that is on `tensor` without a rule.

        If the split of a unit fails, an error names the rule of its path. A unit without a rule is gathered instead.
        """
        models, stored = self.storage.models, zip(self.leaves, self.storage.origin, strict=True)
        unnamed = self.found | {leaf.path for leaf, members in stored if models[members[0]].path in self.found}
        return ["" if leaf.path in unnamed else leaf.path for leaf in self.storage.units]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The parameter leaves as a step stores them."""
        return self.storage.leaves

    def spec(self, leaf: Leaf, kind: str) -> PartitionSpec:
        """Return the spec of a leaf's "params" (the master), "copy", "grads" or "optimizer"."""
        # With a replicated copy, the master is stored like the optimizer's state.
        return leaf.spec(kind in self.sharded or (kind == "params" and self.copied))

    def specs(self, kind: str) -> list[PartitionSpec]:
        """Return the spec of every leaf, in order."""
        return [self.spec(leaf, kind) for leaf in self.leaves]

    def places(self, kind: Kind) -> Any:
        """Return how the arrays of a kind are stored.

        Args:
          kind: "params" (the master), "copy", "grads" or "optimizer".

        Returns:
          A pytree of `Stored`: the tree of the optimizer's state for "optimizer", else the tree of the leaves.
        """
        if kind == "optimizer":
            return self.optimizer
        policy = self.policy
        dtype = {
            "params": lambda leaf: policy.stored(leaf.dtype, leaf.trainable),
            "copy": lambda leaf: policy.computed(leaf.dtype),
            "grads": lambda leaf: policy.reduced(leaf.dtype),
        }[kind]
        # A step fetches stacks layer by layer. Any other leaf is complete on the device while the step runs, so that
        # the host's memory would save nothing.
        on_host = lambda leaf: self.host and kind == "params" and leaf.by_layer and math.prod(leaf.stored) >= PAD_FROM
        return self.unflatten(
            Stored(self.stored(leaf, kind), dtype(leaf), self.spec(leaf, kind), leaf, on_host(leaf))
            for leaf in self.leaves
        )

    def at_rest(self, params: Any) -> Any:
        """Move stored parameters from the devices' memory to the memory where they rest."""
        places, values = jax.tree.leaves(self.places("params"), is_leaf=is_stored), jax.tree.leaves(params)
        previous: Any = ()
        for i, place in enumerate(places):
            if place.host:
                # The barrier moves one array after the other. Without it, a program that makes the parameters would
                # hold all of them on the device first.
                value, previous = jax.lax.optimization_barrier((values[i], previous))
                values[i] = previous = jax.device_put(value, HOST)
        return self.unflatten(values)

    def sharding(self, spec: PartitionSpec, host: bool = False) -> NamedSharding:
        """Return the sharding of a spec on this mesh, in the devices' memory or in their hosts' pinned memory."""
        return NamedSharding(self.mesh, spec, memory_kind="pinned_host" if host else None)

    def shardings(self, kind: Kind) -> Any:
        """Return the shardings of the arrays of a kind, a tree like `places`."""
        return self._map_places(kind, lambda place: self.sharding(place.spec, place.host))

    @property
    def handed_out(self) -> Any:
        """The shardings of the model's own tree, as `step.params` returns it.

        Padded leaves are replicated. Layers of a Python loop are split along the same dim as their stack.
        """
        stacks = zip(self.leaves, self.storage.origin, strict=True)
        stack_of = {i: stack for stack, members in stacks if stack.rolled and stack.dim is not None for i in members}
        leaves = [
            self._split_like(stack_of[i], leaf) if i in stack_of else leaf for i, leaf in enumerate(self.storage.models)
        ]
        # jit cannot return an array with a sharding that does not divide it, so that padded leaves are replicated.
        is_sharded = lambda leaf: leaf.stored == leaf.shape and self.spec(leaf, "params") != PartitionSpec()
        specs = [leaf.spec() if is_sharded(leaf) else PartitionSpec() for leaf in leaves]
        return jax.tree.unflatten(self.storage.model_tree, map(self.sharding, specs))

    def _split_like(self, stack: Leaf, layer: Leaf) -> Leaf:
        """Return a layer of a Python loop that is split like its stack, and also over `pipe` if its dim divides."""
        dim, shard = stack.inner(True), stack.shard
        # `pipe` comes after `fsdp`, so that a single all-to-all converts the stack. In any other order XLA gathers the
        # whole stack.
        if stack.layers is not None and layer.shape[dim] % math.prod(self.mesh.shape[a] for a in (*shard, "pipe")) == 0:
            shard = (*shard, "pipe")
        return replace(layer, dim=dim, padded=stack.padded, shard=shard)

    def to_logical(self, stored: Any, kind: Kind = "params", as_stacked: bool = False) -> Any:
        """Convert stored arrays to the model's own tree and shapes, without padding.

        Args:
          stored: a tree like `places(kind)`; a leaf without a value is None, and stays None.
          kind: which tree it is. The optimizer's state keeps its structure.
          as_stacked: remove the padding alone: layers stay stacked and in complete stages, as an optimizer that works
            element by element sees them.

        Returns:
          The model's own tree; a tree like `places(kind)` for the optimizer's state, or if `as_stacked`.
        """
        # The reverse order of `to_stored`: padding first, then stages and stacks.
        stored = self._map_places(kind, Stored.unpad, stored)
        # The optimizer's arrays are padded and nothing more: it was given the leaves in the form that it sees.
        if as_stacked or kind == "optimizer":
            return stored
        model_values: dict[int, Any] = {}  # by position among the model's leaves
        values = self.storage.tree.flatten_up_to(stored)
        for leaf, members, x in zip(self.leaves, self.storage.origin, values, strict=True):
            parts = [None] * len(members) if x is None else leaf.form.to_logical(x)
            model_values.update(zip(members, parts, strict=True))
        return jax.tree.unflatten(self.storage.model_tree, [model_values[i] for i in range(len(model_values))])

    def to_stored(self, logical: Any, kind: Kind = "params", as_stacked: bool = False) -> Any:
        """Convert the model's own tree to stored arrays; inverse of `to_logical`. No dtype changes."""
        if not as_stacked and kind != "optimizer":
            values = self.storage.model_tree.flatten_up_to(logical)
            parts = [[values[i] for i in members] for members in self.storage.origin]
            logical = self.unflatten(
                None if xs[0] is None else leaf.form.to_stored(xs) for leaf, xs in zip(self.leaves, parts, strict=True)
            )
        return self._map_places(kind, Stored.pad, logical)

    def _map_places(self, kind: Kind, fun: Callable[..., Any], *trees: Any) -> Any:
        """Map a function of a `Stored` and of the arrays of `trees` at the same place."""
        return jax.tree.map(fun, self.places(kind), *trees, is_leaf=is_stored)

    def stored(self, leaf: Leaf, kind: str = "params") -> tuple[int, ...]:
        """Return the shape of a leaf's array of a kind at rest: padded only if it is sharded or spread over `pipe`."""
        return leaf.stored if leaf.spread or self.spec(leaf, kind) == leaf.spec() else leaf.shape

    def unflatten(self, values: Iterable[Any]) -> Any:
        """Return the tree of the leaves with these values, one for each leaf."""
        return jax.tree.unflatten(self.storage.tree, list(values))

    @property
    def params(self) -> Any:
        """The specs of the parameters at rest, in their tree."""
        return self.unflatten(self.specs("params"))

    @property
    def grads(self) -> Any:
        """The specs of the gradients that the update receives, in the tree of the parameters."""
        return self.unflatten(self.specs("grads"))

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes in each device's memory: "params" (the master and any copy), "grads" and "optimizer"."""
        params = self._bytes("params") + (self._bytes("copy") if self.copied else 0)
        return {"params": params, "grads": self._bytes("grads"), "optimizer": self._bytes("optimizer")}

    @property
    def host_bytes(self) -> dict[str, int]:
        """Bytes in the host's memory for each device: "params" and "optimizer"."""
        return {kind: self._bytes(kind, host=True) for kind in ("params", "optimizer")}

    def _bytes(self, kind: Kind, host: bool = False) -> int:
        """Return the bytes that one device stores for a kind, in its own memory or in the host's."""
        total = 0
        for place in jax.tree.leaves(self.places(kind), is_leaf=is_stored):
            # Frozen leaves have a place among the gradients, and no gradient.
            if place.host == host and (kind != "grads" or place.leaf.trainable):
                local = self.sharding(place.spec).shard_shape(place.shape)
                total += math.prod(local) * jnp.dtype(place.dtype).itemsize
        return total

    @property
    def notes(self) -> dict[str, str]:
        """By path, the reason why a leaf is replicated, padded, or whole on tensor ranks.

        Large arrays of the optimizer that mirror no sharded parameter have a note too.
        """
        notes = {leaf.path: leaf.note for leaf in self.leaves if leaf.note}
        for path, reason in self.whole.items():
            notes[path] = f"{notes[path]}; {reason}" if path in notes else reason
        if "optimizer" in self.sharded and self.shards > 1:
            for path, x in jax.tree_util.tree_leaves_with_path(self.optimizer, is_leaf=is_stored):
                # Small arrays, such as counters, are replicated by design.
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
        # Leaves first, then how the layers of each list of blocks are stored and run.
        rolled = (leaf for leaf in self.leaves if leaf.rolled)
        stacks = {leaf.path.partition("*")[0] + "*": f"{leaf.shape[0]} layers of a Python loop" for leaf in rolled}
        stacks |= {
            path: f"{stacks[path]}; other blocks are not alike: {reason}"
            for path, reason in uneven(self.storage).items()
        }
        lines += [f"{path}: {description}" for path, description in (stacks | self.loops).items()]
        return "\n".join([*lines, f"bytes per device: {total}"])


def is_stored(x: Any) -> bool:
    """Return whether a node of a tree is a `Stored`, and so a leaf of a tree of places."""
    return isinstance(x, Stored)


def place_optimizer(state: Any, params: Any, leaves: Sequence[Leaf], sharded: bool, host: bool = False) -> Any:
    """Choose how each array of an optimizer state is stored.

    An array mirrors a parameter if its path ends with the parameter's path and their shapes agree, as momenta do. It is
    then stored as the parameter's shard is. All other arrays (counters, factored moments) are replicated on devices.

    Args:
      state: the abstract optimizer state.
      params: the abstract trainable parameters that the optimizer sees.
      leaves: the leaf of each of these parameters.
      sharded: whether ZeRO shards the optimizer state.
      host: whether arrays of `PAD_FROM` elements or more live in the host's memory.

    Returns:
      A `Stored` for each array, in the tree of `state`.
    """
    leaf_by_path = {
        _names(path): leaf for (path, _), leaf in zip(jax.tree_util.tree_leaves_with_path(params), leaves, strict=True)
    }
    # The shape that the optimizer sees, which may differ from the stored one.
    shape_by_path = {leaf.path: tuple(x.shape) for x, leaf in zip(jax.tree.leaves(params), leaves, strict=True)}

    def place_array(path: Any, x: Any) -> Stored:
        names = _names(path)
        # The longest suffix first. The empty one is the path of a model that is a single array.
        suffix_leaves = (leaf_by_path.get(names[start:]) for start in range(len(names) + 1))
        leaf = next(
            (leaf for leaf in suffix_leaves if leaf is not None and shape_by_path[leaf.path] == tuple(x.shape)), None
        )
        if leaf is None:
            return Stored(tuple(x.shape), x.dtype, PartitionSpec(), None)
        shape = leaf.stored if sharded or leaf.spread else leaf.shape
        return Stored(shape, x.dtype, leaf.spec(sharded), leaf, host and math.prod(shape) >= PAD_FROM)

    return jax.tree_util.tree_map_with_path(place_array, state)


def _names(path: Any) -> tuple[str, ...]:
    """Return the name of each entry of a tree path."""
    return tuple(name_of((entry,)) for entry in path)
