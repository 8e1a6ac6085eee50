"""How the state of a run comes to be: every array of it created where the layout keeps it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..layout.layout import Layout
from ..layout.precision import LossScale, Policy
from ..layout.state import State
from ..model.model import Model
from .update import Update


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
        given = jax.device_put(self._given(params), self.layout.handed_out)
        return jax.jit(self._create, out_shardings=self._shardings)(key, given)

    def _create(self, key: jax.Array, given: Any = None) -> State:
        layout = self.layout
        params, variables = self.model_def.create(key)
        values = zip(layout.kept.models, jax.tree.leaves(params if given is None else given), strict=True)
        masters = [x.astype(Policy.master(leaf.dtype)) for leaf, x in values]
        whole = layout.to_stored(jax.tree.unflatten(layout.kept.model_tree, masters), "copy")
        params = layout.to_stored(whole, "params", as_kept=True)
        copy = None
        if layout.copied:
            copy = jax.tree.map(lambda place, x: x.astype(place.dtype), layout.places("copy"), whole)
        scale = LossScale.create() if self.policy.scaled else None
        # Another stream than that of the initial values.
        run = jax.random.fold_in(key, 1)
        return State(jnp.int32(0), params, copy, self.update.init(whole), variables, scale, run)

    def _given(self, params: Any) -> Any:
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
        return params

    def abstract_state(self) -> State:
        """The state as shapes, dtypes and shardings, without any array."""
        shapes = jax.eval_shape(self._create, jax.random.key(0))
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self._shardings)

    @functools.cached_property
    def _shardings(self) -> Any:
        """A state of shardings."""
        shapes = jax.eval_shape(self._create, jax.random.key(0))
        layout, here = self.layout, self.layout.sharding(PartitionSpec())
        return State(  # of shardings, where a state has arrays
            step=here,  # type: ignore[arg-type]
            params=layout.shardings("params"),
            copy=layout.shardings("copy") if layout.copied else None,
            optimizer=layout.shardings("optimizer"),
            variables=jax.tree.map(lambda _: here, shapes.variables),
            scale=jax.tree.map(lambda _: here, shapes.scale),
            key=here,  # type: ignore[arg-type]
        )
