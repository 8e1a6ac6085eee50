"""How the state of a run comes to be: every array of it created where the layout keeps it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..layout.layout import Layout
from ..layout.leaves import Leaf
from ..layout.precision import LossScale, Policy
from ..layout.state import State
from ..model.model import Model
from .update import Update, is_stored

_HERE = PartitionSpec()


class Start:
    """The part of a step that makes its state, of a model, a layout, a policy and an update."""

    model_def: Model
    layout: Layout
    policy: Policy
    update: Update

    def init(self, key: jax.Array, params: Any = None) -> State:
        """A new state, created sharded; the same values under every layout.

        Args:
          key: a key from `jax.random.key`; parameters are `model.init(key)`.
          params: start from these parameters instead, a tree like `step.params(state)`; the source is left intact.

        Raises ValueError where the tree's structure or a leaf's shape is not the model's.
        """
        if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()):
            given = f"{key.dtype}{list(key.shape)}" if isinstance(key, jax.Array) else type(key).__name__
            raise ValueError(f"init needs one key from jax.random.key(seed), got {given}")
        if params is None:
            return jax.jit(self._create, out_shardings=self._shardings)(key)
        given = jax.device_put(self._given(params), [self._model_sharding(leaf) for leaf in self.layout.kept.models])
        return jax.jit(self._create, out_shardings=self._shardings)(key, given)

    def _create(self, key: jax.Array, given: list[jax.Array] | None = None) -> State:
        params, variables = self.model_def.create(key)
        kept = self.layout.kept
        masters = kept.to_kept(
            [
                x.astype(Policy.master(leaf.dtype))
                for leaf, x in zip(kept.models, jax.tree.leaves(params) if given is None else given, strict=True)
            ]
        )
        opt_state = self.update.init(masters)
        stored = [self._pad(leaf, x) for leaf, x in zip(self.layout.leaves, masters, strict=True)]
        copy = None
        if self.layout.copied:
            copy = self.layout.unflatten(
                [x.astype(self.policy.computed(f.dtype)) for f, x in zip(self.layout.leaves, masters, strict=True)]
            )
        scale = LossScale.create() if self.policy.scaled else None
        # Another stream than that of the initial values.
        run = jax.random.fold_in(key, 1)
        return State(jnp.int32(0), self.layout.unflatten(stored), copy, opt_state, variables, scale, run)

    def _given(self, params: Any) -> list[Any]:
        params = self.model_def.unwrap(params)
        tree = jax.tree.structure(params)
        kept = self.layout.kept
        if tree != kept.model_tree:
            raise ValueError(
                f"params= has structure {tree}, the model has {kept.model_tree}; pass a tree like step.params(state)"
            )
        for leaf, x in zip(kept.models, jax.tree.leaves(params), strict=True):
            if tuple(jnp.shape(x)) != leaf.shape:
                raise ValueError(
                    f"params= has {leaf.path} of shape {tuple(jnp.shape(x))}, the model needs {leaf.shape}"
                )
        return jax.tree.leaves(params)

    def abstract_state(self) -> State:
        """The state as shapes, dtypes and shardings, without any array."""
        shapes = jax.eval_shape(self._create, jax.random.key(0))
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self._shardings)

    @functools.cached_property
    def _shardings(self) -> Any:
        """A state of shardings."""
        shapes = jax.eval_shape(self._create, jax.random.key(0))
        specs: Any = State(  # of specs, where a state has arrays
            step=_HERE,  # type: ignore[arg-type]
            params=self.layout.params,
            copy=self.layout.unflatten([f.spec(False) for f in self.layout.leaves]) if self.layout.copied else None,
            optimizer=jax.tree.map(lambda s: s.spec, self.layout.optimizer, is_leaf=is_stored),
            variables=jax.tree.map(lambda _: _HERE, shapes.variables),
            scale=jax.tree.map(lambda _: _HERE, shapes.scale),
            key=_HERE,  # type: ignore[arg-type]
        )
        return jax.tree.map(self.layout.sharding, specs, is_leaf=lambda x: isinstance(x, PartitionSpec))

    def _pad(self, leaf: Leaf, x: jax.Array) -> jax.Array:
        return leaf.pad(x) if self.layout.stored(leaf) != leaf.shape else x

    def _model_sharding(self, leaf: Leaf) -> NamedSharding:
        """Where a leaf of the model's own tree lives when it is handed out: padded ones whole."""
        sharded = leaf.stored == leaf.shape and self.layout.spec(leaf, "params") != _HERE
        return self.layout.sharding(leaf.spec() if sharded else _HERE)
