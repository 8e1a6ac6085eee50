"""The arrays of a step's state, and the names under which they are saved.

A step stores the model's leaves stacked, padded and sharded, as its layout says. A checkpoint stores the leaves of the
model itself. `arrays_of` returns the stored arrays (`Array`), each with the names of the model leaves in it.
`logical_tree` returns the tree of model leaves that is saved, with a `SavedArray` at each leaf.

A name is a key path as text: the keys joined by "/". A "/" or "~" within a key is written "~1" or "~0", as in JSON
pointers (RFC 6901, section 3). So two leaves never share a name.
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

EXTRA = "extra"  # first key of the trees that are saved in addition to a state
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
    """Return the leaves of a tree with their key paths, keys as text, behind `prefix`."""
    as_text = lambda key: jax.tree_util.keystr((key,), simple=True)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [((*prefix, *map(as_text, path)), leaf) for path, leaf in leaves]


@dataclass(frozen=True)
class Array:
    """One array of a state, as a step stores it.

    Attributes:
      shape, dtype, sharding: of the stored array. For random keys, these describe the data of the keys.
      inner: shape of the stored array without the padding of its sharded dim.
      names: names of the model leaves that the array holds, such as the layers of a stack.
      leaf: layout of the parameter that the array is, or mirrors as an optimizer's moment does; None for other arrays.
      key_impl: implementation of random keys; None for numbers.
      is_derived: whether the array is a copy of these parameters in the compute dtype, which is not saved.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    inner: tuple[int, ...]
    names: tuple[str, ...]
    leaf: Leaf | None = None
    key_impl: str | None = None
    is_derived: bool = False

    @property
    def is_frozen(self) -> bool:
        """Whether the array is a frozen parameter, which is stored in the dtype that the loss uses."""
        return self.leaf is not None and not self.leaf.trainable and not self.names[0].startswith("optimizer")

    @property
    def logical(self) -> tuple[int, ...]:
        """The shape of each model leaf in the array."""
        if self.leaf is None:
            return self.inner
        # A rolled leaf stacks equal layers of a Python loop, and each layer is a leaf of the model.
        if self.leaf.rolled:
            return self.leaf.logical[1:]
        # A pipeline stores the layers on dim 0, wherever the model's leaf has them: swap the two dims back.
        shape = list(self.leaf.logical)
        if isinstance(self.leaf.form, Staged) and (dim := self.leaf.form.dim):
            shape[0], shape[dim] = shape[dim], shape[0]
        return tuple(shape)

    def boxes(self) -> dict[Box, list[jax.Device]]:
        """Return the boxes of the stored array, each with the devices that hold it."""
        devices_by_box: dict[Box, list[jax.Device]] = {}
        for device, index in self.sharding.devices_indices_map(self.shape).items():
            devices_by_box.setdefault(box_of(index, self.shape), []).append(device)
        return devices_by_box

    @functools.cached_property
    def chunks(self) -> list[tuple[int, ...]]:
        """For each name, the shape of the largest chunks that cross no border of a device's box.

        Along each dim, the size of a chunk is the greatest common divisor of all borders.
        """
        # spacing[name][dim] is the greatest common divisor so far; 0 means that no border was seen.
        spacing = [[0] * len(self.logical) for _ in self.names]
        for box in self.boxes():
            for part in parts(self.leaf, self.inner, box):
                for dim, (bounds, size) in enumerate(zip(part.box, self.logical, strict=True)):
                    # The last chunk may be smaller, so that the end is no border. A border at 0 changes no divisor.
                    cuts = [bound for bound in bounds if bound < size]
                    spacing[part.member][dim] = math.gcd(spacing[part.member][dim], *cuts)
        # Without a border the dim is one chunk, of at least 1 for a dim without elements.
        return [tuple(step or max(1, n) for step, n in zip(steps, self.logical, strict=True)) for steps in spacing]


@dataclass
class SavedArray:
    """One of the model's arrays, as this host saves it.

    Attributes:
      shape, dtype: of the whole array.
      chunk: shape of the chunks on disk. No chunk crosses a border between the boxes of two hosts, so that no chunk has
        two writers.
      boxes: the parts that this host writes, as (box, values); values may be a function that returns them.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    boxes: list[tuple[Box, np.ndarray | Callable[[], np.ndarray]]]


def arrays_of(step: Step) -> tuple[list[Array], Any]:
    """Return the arrays of a step's state in the order of its leaves, and the tree of that state."""
    state = step.abstract_state()
    flat, tree = jax.tree.flatten(state)
    arrays = []
    for x, (place, names, is_derived) in zip(flat, _places(step, state), strict=True):
        leaf = None if place is None else place.leaf
        # A server's state lives on the layout's mesh of one device, whatever devices its replicas have.
        sharding = step.layout.sharding(
            PartitionSpec() if place is None else x.sharding.spec, place is not None and place.host
        )
        data, key_impl = _data_and_key_impl(x)
        inner = data.shape if leaf is None else leaf.shape
        arrays.append(Array(data.shape, np.dtype(data.dtype), sharding, inner, names, leaf, key_impl, is_derived))
    return arrays, tree


def _places(step: Step, state: Any) -> Iterator[tuple[Stored | None, tuple[str, ...], bool]]:
    """Yield, for each leaf of a state, how it is stored, the names in it, and whether it is derived."""
    layout, storage = step.layout, step.layout.storage
    model_keys = [keys for keys, _ in flatten(jax.tree.unflatten(storage.model_tree, storage.models))]
    # The key paths of the model leaves in each stored leaf, by the path of the stored leaf.
    members = {
        leaf.path: [model_keys[i] for i in indices]
        for leaf, indices in zip(storage.leaves, storage.origin, strict=True)
    }
    stored_keys = {leaf.path: keys for keys, leaf in flatten(jax.tree.unflatten(storage.tree, storage.leaves))}
    is_model_tree = storage.tree == storage.model_tree

    def names_in(keys: Keys, place: Stored | None) -> tuple[str, ...]:
        if place is None or place.leaf is None or is_model_tree or place.leaf.path not in members:
            return (name_of(keys),)
        # A moment's path is the optimizer's prefix followed by the path of its parameter: replace the latter.
        param_keys = stored_keys[place.leaf.path]
        if keys[-len(param_keys) :] != param_keys:  # an optimizer that sees the model's leaves and not the stacks
            return (name_of(keys),)
        return tuple(name_of((*keys[: -len(param_keys)], *member)) for member in members[place.leaf.path])

    # The copy has the names of the parameters that it was made from.
    for field, value in vars(state).items():
        leaves = flatten(value, ("params" if field == "copy" else field,))
        if field in ("params", "copy", "optimizer"):
            places = jax.tree.leaves(layout.places(field), is_leaf=is_stored) if leaves else []
        else:
            # The other fields have no place in the layout, and are replicated.
            places = [None] * len(leaves)
        for (keys, _), place in zip(leaves, places, strict=True):
            yield place, names_in(keys, place), field == "copy"


def logical_tree(step: Step, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree that is saved, nested like `step.params(state)` and the state of the optimizer.

    At each leaf is the value that `names` has for the leaf's name.
    """
    state, storage = step.abstract_state(), step.layout.storage
    tree = {field: value for field, value in vars(state).items() if field != "copy" and jax.tree.leaves(value)}
    param_leaves = flatten(jax.tree.unflatten(storage.model_tree, storage.models), ("params",))
    # An optimizer that works on stacks has a state of stacks. Save the state that it has for the model's leaves.
    if "optimizer" in tree and step.update.as_stacked and not storage.same:
        tree["optimizer"] = jax.eval_shape(step.update.optimizer.init, storage.seen(as_stacked=False)[1])
    other_fields = {field: value for field, value in tree.items() if field != "params"}
    values = [names[name_of(keys)] for keys, _ in flatten(other_fields)]
    param_values = [names[name_of(keys)] for keys, _ in param_leaves]
    params = step.model_def.wrap(jax.tree.unflatten(storage.model_tree, param_values))
    return {**jax.tree.unflatten(jax.tree.structure(other_fields), values), "params": params}


def extra_arrays(step: Step, extra: Mapping[str, Any]) -> tuple[list[Array], list[jax.Array]]:
    """Return the arrays of trees that are saved with a state, and their values on the step's devices.

    Values that are not on these devices are replicated over them.
    """
    if not isinstance(extra, Mapping):
        raise ValueError(f"extra is a {type(extra).__name__}; pass a dict of trees by name, such as {{'ema': tree}}")
    arrays, values = [], []
    replicated = step.layout.sharding(PartitionSpec())
    for keys, x in flatten(dict(extra), (EXTRA,)):
        # With several processes, an array of one process alone must become one that all devices hold.
        if not isinstance(x, jax.Array) or (jax.process_count() > 1 and x.is_fully_addressable):
            x = jax.device_put(x, replicated)
        data, key_impl = _data_and_key_impl(x)
        sharding = raw(x).sharding
        arrays.append(
            Array(data.shape, np.dtype(data.dtype), sharding, data.shape, (name_of(keys),), key_impl=key_impl)
        )
        values.append(x)
    return arrays, values


def _data_and_key_impl(x: Any) -> tuple[Any, str | None]:
    """Return the shape and dtype of an array, or of the data of random keys, and the implementation of the keys."""
    # Under `eval_shape` no key is computed. Its implementation is no array, so it leaves the trace by this list.
    key_impls: list[str] = []

    def data(x: jax.Array) -> jax.Array:
        key_impls.extend([str(jax.random.key_impl(x))] if is_key(x) else [])
        return raw(x)

    return jax.eval_shape(data, x), next(iter(key_impls), None)


def is_key(x: Any) -> bool:
    """Return whether an array holds random keys."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def raw(x: Any) -> Any:
    """Return an array, or the data of an array of random keys."""
    return jax.random.key_data(x) if is_key(x) else x
