"""The arrays of a step's state, and which of the model's own leaves each of them holds: what is saved under which name.

A name is a key path as text: the keys joined by "/", in which "/" and "~" of a key itself are written "~1" and "~0" as
in JSON pointers (RFC 6901, section 3). So two leaves never share a name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, Sharding

from ..layout.boxes import Box, box_of, parts
from ..layout.layout import Stored, is_stored
from ..layout.leaves import Leaf, Staged
from ..step.core import Step

EXTRA = "extra"  # the first key of trees that are no state
Keys = tuple[str, ...]


def name_of(keys: Sequence[str]) -> str:
    """Return the name of a key path.

    >>> name_of(("params", "a/b")), name_of(("params", "a", "b"))
    ('params/a~1b', 'params/a/b')
    """
    return "/".join(key.replace("~", "~0").replace("/", "~1") for key in keys)


def keys_of(name: str) -> Keys:
    """Return the key path of a name."""
    return tuple(key.replace("~1", "/").replace("~0", "~") for key in name.split("/"))


def flatten(tree: Any, prefix: Keys = ()) -> list[tuple[Keys, Any]]:
    """Return the leaves of a tree with their key paths, keys as text; `prefix` is put in front of each."""
    text = lambda key: jax.tree_util.keystr((key,), simple=True)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [((*prefix, *map(text, path)), leaf) for path, leaf in leaves]


@dataclass(frozen=True)
class Array:
    """One array of a state, as a step stores it.

    Attributes:
      shape, dtype, sharding: of the stored array; of random keys, those of their data.
      inner: its shape without padding.
      names: the names of the model's own leaves that it holds.
      leaf: the parameter that it is or mirrors, None for other arrays.
      kind: the implementation of random keys, None for numbers.
      derived: whether it is a copy made from the parameters of these names, and so not saved.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    inner: tuple[int, ...]
    names: tuple[str, ...]
    leaf: Leaf | None = None
    kind: str | None = None
    derived: bool = False

    @property
    def is_frozen(self) -> bool:
        """Whether it is a parameter that is not trained, and so stored in the dtype that the loss sees."""
        return self.leaf is not None and not self.leaf.trainable and not self.names[0].startswith("optimizer")

    @property
    def logical(self) -> tuple[int, ...]:
        """The shape of each of the model's leaves in it."""
        if self.leaf is None:
            return self.inner
        if self.leaf.rolled:
            return self.leaf.logical[1:]
        shape = list(self.leaf.logical)
        if isinstance(self.leaf.form, Staged) and (dim := self.leaf.form.dim):
            shape[0], shape[dim] = shape[dim], shape[0]
        return tuple(shape)

    def boxes(self) -> dict[Box, list[jax.Device]]:
        """Return the boxes of the stored array, each with the devices that hold it."""
        found: dict[Box, list[jax.Device]] = {}
        for device, index in self.sharding.devices_indices_map(self.shape).items():
            found.setdefault(box_of(index, self.shape), []).append(device)
        return found

    @functools.cached_property
    def chunks(self) -> list[tuple[int, ...]]:
        """Return, for each name, the largest chunk shape whose grid no device's box cuts through."""
        spacing = [[0] * len(self.logical) for _ in self.names]
        for box in self.boxes():
            for part in parts(self.leaf, self.inner, box):
                for dim, (bounds, size) in enumerate(zip(part.box, self.logical, strict=True)):
                    cuts = [bound for bound in bounds if bound < size]  # a cut at 0 changes no divisor
                    spacing[part.member][dim] = math.gcd(spacing[part.member][dim], *cuts)
        return [tuple(step or max(1, n) for step, n in zip(steps, self.logical, strict=True)) for steps in spacing]


@dataclass
class SavedArray:
    """One of the model's arrays, as this host saves it.

    Attributes:
      shape, dtype: of the whole array.
      chunk: a shape whose grid no host's boxes cut through, so that no chunk has two writers.
      boxes: the parts that this host writes, as (box, values), or functions that make the values.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    boxes: list[tuple[Box, np.ndarray | Callable[[], np.ndarray]]]


def arrays_of(step: Step) -> tuple[list[Array], Any]:
    """Return the arrays of a step's state in the order of its leaves, and the tree of that state."""
    state = step.abstract_state()
    flat, tree = jax.tree.flatten(state)
    found = []
    for x, (place, names, derived) in zip(flat, _places(step, state), strict=True):
        leaf = None if place is None else place.leaf
        # A server's state lives on the layout's mesh of one device, whatever devices its replicas have.
        sharding = step.layout.sharding(
            PartitionSpec() if place is None else x.sharding.spec, place is not None and place.host
        )
        data, kind = _data_and_kind(x)
        inner = data.shape if leaf is None else leaf.shape
        found.append(Array(data.shape, np.dtype(data.dtype), sharding, inner, names, leaf, kind, derived))
    return found, tree


def _places(step: Step, state: Any) -> Iterator[tuple[Stored | None, tuple[str, ...], bool]]:
    """Yield how each leaf of a state is stored, the names that it holds, and whether it is derived."""
    layout, storage = step.layout, step.layout.storage
    model_keys = [keys for keys, _ in flatten(jax.tree.unflatten(storage.model_tree, storage.models))]
    members = {leaf.path: [model_keys[i] for i in at] for leaf, at in zip(storage.leaves, storage.origin, strict=True)}
    stored_keys = {leaf.path: keys for keys, leaf in flatten(jax.tree.unflatten(storage.tree, storage.leaves))}
    is_model_tree = storage.tree == storage.model_tree

    def named(keys: Keys, place: Stored | None) -> tuple[str, ...]:
        if place is None or place.leaf is None or is_model_tree or place.leaf.path not in members:
            return (name_of(keys),)
        own = stored_keys[place.leaf.path]
        if keys[-len(own) :] != own:  # an optimizer that is shown the model's own leaves
            return (name_of(keys),)
        return tuple(name_of((*keys[: -len(own)], *member)) for member in members[place.leaf.path])

    for field, value in vars(state).items():
        leaves = flatten(value, ("params" if field == "copy" else field,))
        if field in ("params", "copy", "optimizer"):
            places = jax.tree.leaves(layout.places(field), is_leaf=is_stored) if leaves else []
        else:
            places = [None] * len(leaves)
        for (keys, _), place in zip(leaves, places, strict=True):
            yield place, named(keys, place), field == "copy"


def logical_tree(step: Step, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree that is saved, in the nesting of `step.params(state)` and of the optimizer's state.

    Args:
      names: what stands at each leaf, by its name.
    """
    state, storage = step.abstract_state(), step.layout.storage
    tree = {field: value for field, value in vars(state).items() if field != "copy" and jax.tree.leaves(value)}
    own = flatten(jax.tree.unflatten(storage.model_tree, storage.models), ("params",))
    if "optimizer" in tree and step.update.as_stacked and not storage.same:
        tree["optimizer"] = jax.eval_shape(step.update.optimizer.init, storage.seen(as_stacked=False)[1])
    others = {field: value for field, value in tree.items() if field != "params"}
    values = [names[name_of(keys)] for keys, _ in flatten(others)]
    params = step.model_def.wrap(jax.tree.unflatten(storage.model_tree, [names[name_of(keys)] for keys, _ in own]))
    return {**jax.tree.unflatten(jax.tree.structure(others), values), "params": params}


def extra_arrays(step: Step, extra: Mapping[str, Any]) -> tuple[list[Array], list[jax.Array]]:
    """Return the arrays of trees that are saved beside a state, and their values on the step's devices, replicated
    where they were elsewhere.
    """
    if not isinstance(extra, Mapping):
        raise ValueError(f"extra is a {type(extra).__name__}; pass a dict of trees by name, such as {{'ema': tree}}")
    arrays, values = [], []
    everywhere = step.layout.sharding(PartitionSpec())
    for keys, x in flatten(dict(extra), (EXTRA,)):
        if not isinstance(x, jax.Array) or (jax.process_count() > 1 and x.is_fully_addressable):
            x = jax.device_put(x, everywhere)
        data, kind = _data_and_kind(x)
        sharding = raw(x).sharding
        arrays.append(Array(data.shape, np.dtype(data.dtype), sharding, data.shape, (name_of(keys),), kind=kind))
        values.append(x)
    return arrays, values


def _data_and_kind(x: Any) -> tuple[Any, str | None]:
    """Return the shape and dtype of an array, or of the data of random keys, and the implementation of the keys."""
    kinds: list[str] = []

    def data(x: jax.Array) -> jax.Array:
        kinds.extend([str(jax.random.key_impl(x))] if is_key(x) else [])
        return raw(x)

    return jax.eval_shape(data, x), next(iter(kinds), None)


def is_key(x: Any) -> bool:
    """Return whether an array is of random keys."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def raw(x: Any) -> Any:
    """Return an array; of random keys, their data."""
    return jax.random.key_data(x) if is_key(x) else x
