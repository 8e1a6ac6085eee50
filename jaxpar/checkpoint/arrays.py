"""The arrays of a step's state, each with the model's own leaves that are in it: what is saved under which name."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, Sharding

from ..layout.layout import is_stored
from ..layout.leaves import Leaf, Staged
from ..layout.state import State
from ..model.paths import name_of
from ..step.core import Step

LEFT = "residuals/"  # what begins the names of residuals of gradients
EXTRA = "extra/"  # what begins the names of arrays that are no state's


@dataclass(frozen=True)
class Array:
    """One array of a state, as a step stores it.

    Attributes:
      path: its place in the state, such as `optimizer/0/mu/layers/*/w`.
      shape, dtype, sharding: as it is stored; of keys, those of their data.
      inner: its shape without padding.
      names: what it is saved as: `optimizer/0/mu/layers/0/w` and so on, one for each of the model's leaves in it.
      leaf: the parameter that it is or mirrors, None for others.
      kind: of keys, their implementation.
      derived: whether it is not saved, but made of the parameters of these names.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    inner: tuple[int, ...]
    names: tuple[str, ...]
    leaf: Leaf | None = None
    kind: str | None = None
    derived: bool = False

    @property
    def frozen(self) -> bool:
        """Whether it is a parameter that is not trained, and so stored in the dtype that the loss sees."""
        return self.leaf is not None and not self.leaf.trainable and not self.path.startswith("optimizer")

    @property
    def logical(self) -> tuple[int, ...]:
        """The shape of each of the model's leaves in it."""
        if self.leaf is None:
            return self.inner
        if self.leaf.rolled:
            return self.leaf.logical[1:]
        shape = list(self.leaf.logical)
        if isinstance(self.leaf.form, Staged) and self.leaf.form.dim:
            dim = self.leaf.form.dim
            shape[0], shape[dim] = shape[dim], shape[0]
        return tuple(shape)


def arrays_of(step: Step) -> tuple[list[Array], Any]:
    """The arrays of a step's state in their order, and its tree."""
    layout, state = step.layout, step.abstract_state()
    storage = layout.storage
    places: dict[str, Any] = {}
    for kind in ("params", "copy", "optimizer") if layout.copied else ("params", "optimizer"):
        stored = jax.tree.leaves(layout.places(kind), is_leaf=is_stored)
        places |= zip(_paths(getattr(state, kind), kind), stored, strict=True)
    places |= {f"{LEFT}{path}": place for path, place in layout.residuals.items()}
    members = {
        leaf.path: [storage.models[i].path for i in at] for leaf, at in zip(storage.leaves, storage.origin, strict=True)
    }
    found = []
    flat, tree = jax.tree_util.tree_flatten_with_path(state)
    for (path, x), (data, kind) in zip(flat, _data(state), strict=True):
        name = name_of(path)
        place = places.get(name)
        leaf = place.leaf if place is not None else None
        # A server's state lives on the layout's mesh of one device, whatever devices its replicas have.
        spec = PartitionSpec() if place is None else x.sharding.spec
        sharding = layout.sharding(spec, place is not None and place.host)
        names: tuple[str, ...] = (name,)
        if leaf is not None and not leaf.as_modelled:
            assert name.endswith(leaf.path), (name, leaf.path)
            names = tuple(name.removesuffix(leaf.path) + own for own in members[leaf.path])
        derived = name.startswith("copy/") or name == "copy"
        if derived:
            names = tuple("params" + own.removeprefix("copy") for own in names)
        inner = tuple(data.shape) if leaf is None else leaf.shape
        array = Array(name, tuple(data.shape), np.dtype(data.dtype), sharding, inner, names, leaf, kind, derived)
        found.append(array)
    return _distinct(found), tree


def extra_arrays(step: Step, extra: Mapping[str, Any]) -> tuple[list[Array], list[jax.Array]]:
    """The arrays of trees that are saved beside a state, as `extra/<name>/<path>`, and their values: where they are on
    the step's devices, or replicated on all.
    """
    if not isinstance(extra, Mapping):
        raise ValueError(f"extra is a {type(extra).__name__}; pass a dict of trees by name, such as {{'ema': tree}}")
    arrays, values = [], []
    everywhere = step.layout.sharding(PartitionSpec())
    for path, x in jax.tree_util.tree_leaves_with_path(dict(extra)):
        if not isinstance(x, jax.Array) or (jax.process_count() > 1 and x.is_fully_addressable):
            x = jax.device_put(x, everywhere)
        data, kind = raw(x), str(jax.random.key_impl(x)) if is_key(x) else None
        shape, name = tuple(data.shape), f"{EXTRA}{name_of(path)}"
        arrays.append(Array(name, shape, np.dtype(data.dtype), data.sharding, shape, (name,), kind=kind))
        values.append(x)
    return _distinct(arrays), values


def _paths(tree: Any, name: str) -> list[str]:
    paths = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [f"{name}/{path}" if path else name for path in paths]


def _data(state: State) -> list[tuple[Any, str | None]]:
    """Of every array its shape and dtype, of keys those of their data, and the name of their implementation."""
    kinds: list[str | None] = []

    def note(leaves: list[Any]) -> list[Any]:
        kinds.extend(str(jax.random.key_impl(x)) if is_key(x) else None for x in leaves)
        return [raw(x) for x in leaves]

    return list(zip(jax.eval_shape(note, jax.tree.leaves(state)), kinds, strict=True))


def _distinct(arrays: list[Array]) -> list[Array]:
    """Names with a slash of their own may be two arrays' at once: those after the first are numbered. Of such a model
    no layers are rolled, so that the order of its leaves is that of its tree in every layout.
    """
    seen: Counter[tuple[bool, str]] = Counter()
    out = []
    for array in arrays:
        names = []
        for name in array.names:
            seen[array.derived, name] += 1
            number = seen[array.derived, name]
            names.append(name if number == 1 else f"{name}#{number}")
        out.append(dataclasses.replace(array, names=tuple(names)))
    return out


def is_key(x: Any) -> bool:
    """Whether an array is of keys."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def raw(x: Any) -> Any:
    """An array; of keys, their data."""
    return jax.random.key_data(x) if is_key(x) else x
