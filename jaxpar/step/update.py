"""The update: the optimizer's step on global arrays, outside `shard_map`.

Whatever the layout, an optax transformation sees what it would see on one device: whole, logical leaves. What is stored
otherwise (padded) is sliced before it and padded after it. Leaves that a pipeline keeps in whole stages have another
shape; they are shown to the transformation as they are where that makes no difference to it, and brought to the model's
own shape, at the price of moving them, where it does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from ..collectives import order
from ..collectives.order import Token
from ..layout.layout import Layout, Stored
from ..layout.leaves import Leaf
from ..layout.precision import all_finite
from ..layout.state import State
from ..parallel import Rule, publish
from .gradients import Metrics, metrics_of
from .tracing import Sums


@dataclass(frozen=True)
class Update:
    """An optimizer under a layout and a rule; `as_kept` says whether it sees leaves as a step keeps them."""

    optimizer: Any
    layout: Layout
    rule: Rule
    as_kept: bool

    def init(self, masters: Sequence[Any]) -> Any:
        """The optimizer's state, as it is stored, from the leaves of a step."""
        return self.pack(self.optimizer.init(self._seen(masters)))

    def _seen(self, values: Sequence[Any]) -> Any:
        """What the optimizer sees of one value for each leaf."""
        kept = self.layout.kept
        if self.as_kept:
            return trained(kept.leaves, values, kept.tree)
        return trained(kept.models, kept.of_model(values), kept.model_tree)

    def __call__(self, state: State, grads: list[jax.Array], variables: Any, sums: Sums) -> tuple[State, Metrics]:
        """The next state and the metrics, from logical gradients of the trainable leaves, variables and sums."""
        leaves = self.layout.leaves
        masters = [
            unpadded(f, self.constrain(f, x)) for f, x in zip(leaves, jax.tree.leaves(state.params), strict=True)
        ]
        params, updates = self._seen(masters), self._seen(fill(leaves, grads))
        loss = metrics_of(sums)["loss"]
        opt_state = self.unpack(state.optimizer)
        changes, new_opt = self._changes(updates, opt_state, params, loss)
        tuned = jax.tree.leaves(optax.apply_updates(params, changes))
        if not self.as_kept:
            tuned = [x for x in self.layout.kept.to_kept(fill(self.layout.kept.models, tuned)) if x is not None]
        new = [x if old is None else old for x, old in zip(masters, fill(leaves, tuned), strict=True)]
        metrics = metrics_of(sums) | {"grad_norm": optax.tree.norm(grads), "skipped": jnp.int32(0)}
        packed, scale = self.pack(new_opt), None
        if state.scale is not None:
            finite = all_finite(grads)
            keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
            new, packed, variables = keep(new, masters), keep(packed, state.optimizer), keep(variables, state.variables)
            scale = state.scale.next(finite)
            metrics["skipped"] = scale.skipped
        stored, copy, token = self.publish(new, state, order.start(metrics["grad_norm"], self.layout.mesh))
        # The next step's collectives follow its number.
        step, metrics = order.behind(token, (state.step + 1, metrics))
        return State(step, stored, copy, packed, variables, scale, state.key), metrics

    def _changes(self, updates: Any, opt_state: Any, params: Any, loss: jax.Array) -> Any:
        try:
            return self.optimizer.update(updates, opt_state, params, value=loss)
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise ValueError(
                f"the optimizer asks for more than gradients, parameters and the loss's value: {error}; use one "
                "without a line search, or give step.value_and_grad to it yourself"
            ) from error

    def constrain(self, leaf: Leaf, x: jax.Array) -> jax.Array:
        """A stored leaf as the optimizer's shard of it, in stored shape: where it is replicated, each device takes
        its part.
        """
        if "optimizer" not in self.rule.sharded or leaf.dim is None:
            return x
        x = leaf.pad(x) if x.shape != leaf.stored else x
        return jax.lax.with_sharding_constraint(x, self.layout.sharding(leaf.spec()))

    def publish(self, masters: list[jax.Array], state: State, token: Token | None) -> tuple[Any, Any, Token | None]:
        """Updated logical leaves -> what is stored: shards, or (ZeRO-1 and 2) the whole of every leaf, all-gathered;
        and the token after that.
        """
        leaves = self.layout.leaves
        shards = [self.constrain(f, x) for f, x in zip(leaves, masters, strict=True)]
        if not self.rule.published or self.layout.mesh.shape["fsdp"] == 1:
            return self.layout.unflatten(shards), None, token
        old = jax.tree.leaves(state.copy if self.layout.copied else state.params)
        gather = order.in_order(functools.partial(publish, leaves), self.layout.mesh)
        specs, whole_specs = [leaf.spec() for leaf in leaves], [leaf.spec(False) for leaf in leaves]
        whole, token = jax.shard_map(
            gather,
            mesh=self.layout.mesh,
            in_specs=(PartitionSpec(), specs, whole_specs),
            out_specs=(whole_specs, PartitionSpec()),
            check_vma=False,
        )(token, shards, old)
        if self.layout.copied:
            return self.layout.unflatten(shards), self.layout.unflatten(whole), token
        return self.layout.unflatten(whole), None, token

    def pack(self, opt_state: Any) -> Any:
        """Logical -> stored optimizer state."""

        def pack(place: Stored, x: jax.Array) -> jax.Array:
            return x if place.leaf is None or x.shape == place.shape else place.leaf.pad(x)

        return jax.tree.map(pack, self.layout.optimizer, opt_state, is_leaf=is_stored)

    def unpack(self, opt_state: Any) -> Any:
        """Stored -> logical optimizer state."""

        def unpack(place: Stored, x: jax.Array) -> jax.Array:
            return x if place.leaf is None else unpadded(place.leaf, x)

        return jax.tree.map(unpack, self.layout.optimizer, opt_state, is_leaf=is_stored)


def taking_value(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """The transformation, such that it may be given the loss's `value`, be it only to ignore it."""
    update = optimizer.update
    given = inspect.signature(update).parameters.values()
    if any(p.name == "value" or p.kind is p.VAR_KEYWORD for p in given):
        return optax.with_extra_args_support(optimizer)
    # One may ask for other extra arguments (`optax.contrib.sam`), and refuse this one.
    return optax.GradientTransformationExtraArgs(
        optimizer.init, lambda updates, state, params=None, **extra: update(updates, state, params)
    )


def trained(leaves: Sequence[Leaf], values: Sequence[Any], tree: Any) -> Any:
    """The tree that the optimizer sees: None, which is no leaf, in place of frozen ones."""
    return jax.tree.unflatten(tree, [x if leaf.trainable else None for leaf, x in zip(leaves, values, strict=True)])


def fill(leaves: Sequence[Leaf], values: Sequence[Any]) -> list[Any]:
    """One value for each leaf from those of the trainable ones: None for the others."""
    it = iter(values)
    return [next(it) if leaf.trainable else None for leaf in leaves]


def unpadded(leaf: Leaf, x: jax.Array) -> jax.Array:
    """A leaf in its logical shape, from either shape."""
    return leaf.unpad(x) if x.shape != leaf.shape else x


def is_stored(x: Any) -> bool:
    """Whether a node of an optimizer layout is one array's place."""
    return isinstance(x, Stored)
