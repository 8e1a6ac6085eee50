"""make_train_step: the one place where model, optimizer, strategy and layout meet."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .batches import batch_specs, check_rows, globalise
from .gradients import Local, Sums
from .layout import Layout, Leaf, Stored, make_leaves, place_optimizer
from .mesh import make_mesh
from .model import Model
from .parallel import publish, rule_of
from .precision import LossScale, Policy, all_finite
from .state import State
from .strategy import ROWS, Strategy, as_strategy

Metrics = dict[str, jax.Array]
_HERE = PartitionSpec()


def make_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    strategy: Strategy | str = "single",
    mesh: Mesh | Sequence[jax.Device] | None = None,
    trainable: Callable[[str], bool] | None = None,
) -> Step:
    """A training step of `model` under `strategy`, with the mathematics of one device.

    Args:
      model: from `from_nnx`, `from_linen` or `Model(init=..., loss=...)`.
      optimizer: any optax transformation; it sees whole, logical leaves, whatever their layout.
      strategy: a `Strategy` or its text, such as "fsdp" or "data=2,fsdp=4,precision=bf16".
      mesh: a mesh or devices; all devices if None. Compile-only devices serve for `step.compile`.
      trainable: `trainable(path) -> bool` for paths such as "layers/attention/query/kernel"; the rest is frozen: no
        gradients, no optimizer state. All floating-point leaves if None.

    Raises ValueError on anything that does not fit, naming what was given, what is needed, and what to try.
    """
    strategy = as_strategy(strategy)
    if not isinstance(model, Model):
        raise ValueError(
            f"model is a {type(model).__name__}; make one with jp.from_nnx, jp.from_linen or jp.Model(init=, loss=)"
        )
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}; pass an optax transformation such as optax.adamw(3e-4)"
        )
    if trainable is not None and not callable(trainable):
        raise ValueError(
            f"trainable={trainable!r} is not a function of a path; try trainable=lambda path: 'lora' in path"
        )
    kind = Step
    if strategy.server:
        from .server import ServerStep as kind  # stands on this module
    return kind(model, optimizer, strategy, make_mesh(strategy, mesh), trainable)


class Step:
    """A compiled training step; see `make_train_step`. `layout`, `mesh` and `strategy` may be read."""

    def __init__(self, model: Model, optimizer: Any, strategy: Strategy, mesh: Mesh, trainable: Any):
        self.model_def, self.optimizer, self.strategy, self.mesh = (
            model,
            optax.with_extra_args_support(optimizer),
            strategy,
            mesh,
        )
        self.policy, self.rule = Policy.of(strategy), rule_of(strategy)
        self._params, self._variables = jax.eval_shape(model.create, jax.random.key(0))
        shards = 1 if strategy.server else mesh.shape["fsdp"]
        leaves, tree = make_leaves(self._params, shards, trainable)
        masters = [jax.ShapeDtypeStruct(leaf.shape, Policy.master(leaf.dtype)) for leaf in leaves]
        tuned = _trained(leaves, masters, tree)
        state = jax.eval_shape(self.optimizer.init, tuned)
        places = place_optimizer(
            state, tuned, [leaf for leaf in leaves if leaf.trainable], "optimizer" in self.rule.sharded
        )
        copied = self.rule.publish is not None and shards > 1 and self.policy.compute != jnp.float32
        self.layout = Layout(leaves, tree, self._home(), self.policy, self.rule.sharded, copied, places)
        axes = {axis: mesh.shape[axis] for axis in ROWS if mesh.shape[axis] > 1}
        self.local = Local(model, self.layout, strategy, axes)
        self._jitted: dict[Any, Any] = {}

    def _home(self) -> Mesh:
        """The mesh on which the state lives."""
        return self.mesh

    # -- state ---------------------------------------------------------------------------------------------------------

    def init(self, key: jax.Array, params: Any = None) -> State:
        """A new state, created sharded; the same values under every layout.

        Args:
          key: a key from `jax.random.key`; parameters are `model.init(key)`.
          params: start from these parameters instead, a tree like `step.params(state)`; the source is left intact.

        Raises ValueError where the tree's structure or a leaf's shape is not the model's.
        """
        if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()):
            raise ValueError(f"init needs one key from jax.random.key(seed), got {_describe(key)}")
        if params is None:
            return jax.jit(self._create, out_shardings=self._shardings)(key)
        given = jax.device_put(self._given(params), [self._logical_sharding(leaf) for leaf in self.layout.leaves])
        return jax.jit(self._create, out_shardings=self._shardings)(key, given)

    def _create(self, key: jax.Array, given: list[jax.Array] | None = None) -> State:
        params, variables = self.model_def.create(key)
        masters = [
            x.astype(Policy.master(leaf.dtype))
            for leaf, x in zip(self.layout.leaves, jax.tree.leaves(params) if given is None else given, strict=True)
        ]
        opt_state = self._pack(self.optimizer.init(_trained(self.layout.leaves, masters, self.layout.tree)))
        stored = [self._pad(leaf, x) for leaf, x in zip(self.layout.leaves, masters, strict=True)]
        copy = None
        if self.layout.copied:
            copy = self._tree(
                [x.astype(self.policy.computed(f.dtype)) for f, x in zip(self.layout.leaves, masters, strict=True)]
            )
        scale = LossScale.create() if self.policy.scaled else None
        # Another stream than that of the initial values.
        run = jax.random.fold_in(key, 1)
        return State(jnp.int32(0), self._tree(stored), copy, opt_state, variables, scale, run)

    def _given(self, params: Any) -> list[Any]:
        params = self.model_def.unwrap(params)
        tree = jax.tree.structure(params)
        if tree != self.layout.tree:
            raise ValueError(
                f"params= has structure {tree}, the model has {self.layout.tree}; pass a tree like step.params(state)"
            )
        for leaf, x in zip(self.layout.leaves, jax.tree.leaves(params), strict=True):
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
            copy=jax.tree.map(lambda _: _HERE, shapes.copy),
            optimizer=jax.tree.map(lambda s: s.spec, self.layout.optimizer, is_leaf=_is_stored),
            variables=jax.tree.map(lambda _: _HERE, shapes.variables),
            scale=jax.tree.map(lambda _: _HERE, shapes.scale),
            key=_HERE,  # type: ignore[arg-type]
        )
        return jax.tree.map(self.layout.sharding, specs, is_leaf=lambda x: isinstance(x, PartitionSpec))

    # -- running -------------------------------------------------------------------------------------------------------

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """One step: `(state, metrics)`. The state given is donated.

        Args:
          state: from `init` or the last step.
          batch: a pytree of arrays [rows, ...], global or this host's rows; `jp.Replicated` marks leaves without rows.

        Returns metrics as float32 scalars: `loss` (of all rows, before the update), `grad_norm`, `skipped` (steps
        skipped so far, float16), and the loss's own.
        """
        return self._run("train", state, batch)

    def evaluate(self, state: State, batch: Any) -> Metrics:
        """The loss and its metrics, without update and without dropout."""
        return self._run("evaluate", state, batch)

    def value_and_grad(self, state: State, batch: Any) -> tuple[jax.Array, Any]:
        """The loss and its gradients for the next step's keys, in the model's own tree (None for frozen leaves)."""
        loss, grads = self._run("gradients", state, batch)
        return loss, self.model_def.wrap(grads) if all(f.trainable for f in self.layout.leaves) else grads

    def params(self, state: State) -> Any:
        """The parameters in the model's own tree, unpadded, float32 masters, sharded where a dim divides."""
        return self.model_def.wrap(self._logical_params(state))

    def _logical_params(self, state: State) -> Any:
        if "params" not in self._jitted:
            shardings = [self._logical_sharding(leaf) for leaf in self.layout.leaves]
            unpad = lambda tree: self._tree(
                [self._unpad(f, x) for f, x in zip(self.layout.leaves, jax.tree.leaves(tree), strict=True)]
            )
            self._jitted["params"] = jax.jit(unpad, out_shardings=self._tree(shardings))
        return self._jitted["params"](state.params)

    def model(self, state: State) -> Any:
        """The user's module with these parameters: an NNX module, or a bound Linen module. Raises ValueError if it
        has none.
        """
        if self.model_def.bind is None:
            raise ValueError("this model is a pair of functions and has no module; use step.params(state)")
        return self.model_def.bind(self._logical_params(state), jax.tree.map(jnp.copy, state.variables))

    def compile(self, batch: Any) -> jax.stages.Compiled:
        """The training step compiled for a batch of these shapes (arrays or `jax.ShapeDtypeStruct`); nothing runs.

        With compile-only devices in the mesh, it is compiled for them.
        """
        self.check(batch)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), batch)
        traced = self._function("train", batch).trace(self.abstract_state(), batch)
        platform = {"gpu": "cuda"}.get(p := self.mesh.devices.flat[0].platform, p)
        return traced.lower(lowering_platforms=(platform,)).compile()

    def trace(self, batch: Any) -> Any:
        """The jaxpr of the training step for a batch of these shapes."""
        return self._function("train", batch).trace(self.abstract_state(), batch).jaxpr

    def _run(self, name: str, state: State, batch: Any) -> Any:
        check_state(state)
        return self._function(name, batch)(state, globalise(batch, self.mesh))

    def check(self, batch: Any) -> None:
        """Raise ValueError unless the batch's rows fit the strategy."""
        check_rows(batch, self.local.replicas, self.strategy.microbatches)

    def _function(self, name: str, batch: Any) -> Any:
        leaves, tree = jax.tree.flatten(batch)
        key = (name, tree, *(np.shape(x) for x in leaves))
        if key not in self._jitted:
            self.check(batch)
            rows = jax.tree.map(
                self.layout.sharding, batch_specs(batch), is_leaf=lambda x: isinstance(x, PartitionSpec)
            )
            state = self._shardings
            fun, outs, donate = {
                "train": (self._train, (state, None), (0,)),
                "evaluate": (self._evaluate, None, ()),
                "gradients": (self._value_and_grad, None, ()),
            }[name]
            self._jitted[key] = jax.jit(fun, in_shardings=(state, rows), out_shardings=outs, donate_argnums=donate)
        return self._jitted[key]

    # -- the programs, under jit ---------------------------------------------------------------------------------------

    def _mapped(self, fun: Callable, batch: Any, outs: Any) -> Callable:
        """`fun(stored leaves, variables, batch, *replicated)` on local values."""
        specs = [self.layout.spec(leaf, "params") if not self.layout.copied else _HERE for leaf in self.layout.leaves]

        def call(stored: Any, variables: Any, *rest: Any) -> Any:
            ins = (specs, _HERE, batch_specs(batch), *([_HERE] * len(rest)))
            mapped = jax.shard_map(fun, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False)
            return mapped(jax.tree.leaves(stored), variables, batch, *rest)

        return call

    def _evaluate(self, state: State, batch: Any) -> Metrics:
        stored = state.copy if self.layout.copied else state.params
        return metrics_of(self._mapped(self.local.evaluate, batch, _HERE)(stored, state.variables))

    def _gradients(self, state: State, batch: Any) -> tuple[list[jax.Array], Any, Sums]:
        """Logical float32 gradients of the trainable leaves, new variables, sums."""
        trained = [leaf for leaf in self.layout.leaves if leaf.trainable]
        outs = ([self.layout.spec(leaf, "grads") for leaf in trained], _HERE, _HERE)
        scale = state.scale.scale if state.scale is not None else jnp.float32(1)
        stored = state.copy if self.layout.copied else state.params
        grads, variables, sums = self._mapped(self.local.gradients, batch, outs)(
            stored, state.variables, state.key, state.step, scale
        )
        return self._unscaled(grads, state), variables, sums

    def _unscaled(self, grads: list[jax.Array], state: State) -> list[jax.Array]:
        """Reduced gradients -> logical float32 gradients of the loss itself."""
        trained = [leaf for leaf in self.layout.leaves if leaf.trainable]
        grads = [self._unpad(f, g).astype(Policy.master(f.dtype)) for f, g in zip(trained, grads, strict=True)]
        return grads if state.scale is None else [g / state.scale.scale for g in grads]

    def _value_and_grad(self, state: State, batch: Any) -> tuple[jax.Array, Any]:
        grads, _, sums = self._gradients(state, batch)
        return metrics_of(sums)["loss"], self.filled(grads)

    def _train(self, state: State, batch: Any) -> tuple[State, Metrics]:
        return self._update(state, *self._gradients(state, batch))

    def _update(self, state: State, grads: list[jax.Array], variables: Any, sums: Sums) -> tuple[State, Metrics]:
        """The optimizer's step, on global arrays: it sees what it would see on one device."""
        leaves = self.layout.leaves
        masters = [
            self._unpad(f, self._constrain(f, x)) for f, x in zip(leaves, jax.tree.leaves(state.params), strict=True)
        ]
        params = _trained(leaves, masters, self.layout.tree)
        updates = _trained(leaves, _fill(leaves, grads), self.layout.tree)
        loss = metrics_of(sums)["loss"]
        opt_state = self._unpack(state.optimizer)
        changes, new_opt = self.optimizer.update(updates, opt_state, params, value=loss)
        tuned = iter(jax.tree.leaves(optax.apply_updates(params, changes)))
        new = [next(tuned) if f.trainable else x for f, x in zip(leaves, masters, strict=True)]
        metrics = metrics_of(sums) | {"grad_norm": optax.tree.norm(grads), "skipped": jnp.int32(0)}
        packed, scale = self._pack(new_opt), None
        if state.scale is not None:
            finite = all_finite(grads)
            keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
            new, packed, variables = keep(new, masters), keep(packed, state.optimizer), keep(variables, state.variables)
            scale = state.scale.next(finite)
            metrics["skipped"] = scale.skipped
        stored, copy = self._publish(new, state)
        return State(state.step + 1, stored, copy, packed, variables, scale, state.key), metrics

    def _constrain(self, leaf: Leaf, x: jax.Array) -> jax.Array:
        """A stored leaf as the optimizer's shard of it, in stored shape: where it is replicated, each device takes
        its part.
        """
        if "optimizer" not in self.rule.sharded or leaf.dim is None:
            return x
        x = leaf.pad(x) if x.shape != leaf.stored else x
        return jax.lax.with_sharding_constraint(x, self.layout.sharding(leaf.spec))

    def _publish(self, masters: list[jax.Array], state: State) -> tuple[Any, Any]:
        """Updated logical leaves -> what is stored: shards, or (ZeRO-1 and 2) the whole of every leaf, all-gathered."""
        leaves = self.layout.leaves
        shards = [self._constrain(f, x) for f, x in zip(leaves, masters, strict=True)]
        if self.rule.publish is None or self.mesh.shape["fsdp"] == 1:
            return self._tree(shards), None
        old = jax.tree.leaves(state.copy if self.layout.copied else state.params)
        gather = functools.partial(publish, self.rule, leaves)
        specs = [leaf.spec for leaf in leaves]
        whole = jax.shard_map(gather, mesh=self.mesh, in_specs=(specs, _HERE), out_specs=_HERE, check_vma=False)(
            shards, old
        )
        return (self._tree(shards), self._tree(whole)) if self.layout.copied else (self._tree(whole), None)

    # -- between logical and stored ------------------------------------------------------------------------------------

    def filled(self, trained: Sequence[Any]) -> Any:
        """The model's tree from values of the trainable leaves: None for the others."""
        return self._tree(_fill(self.layout.leaves, trained))

    def _tree(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.layout.tree, list(leaves))

    def _pad(self, leaf: Leaf, x: jax.Array) -> jax.Array:
        return leaf.pad(x) if self.layout.stored(leaf) != leaf.shape else x

    def _unpad(self, leaf: Leaf, x: jax.Array) -> jax.Array:
        return leaf.unpad(x) if x.shape != leaf.shape else x

    def _logical_sharding(self, leaf: Leaf) -> NamedSharding:
        spec = self.layout.spec(leaf, "params") if leaf.stored == leaf.shape else _HERE
        return self.layout.sharding(spec)

    def _pack(self, opt_state: Any) -> Any:
        def pack(place: Stored, x: jax.Array) -> jax.Array:
            return x if place.leaf is None else place.leaf.pad(x)

        return jax.tree.map(pack, self.layout.optimizer, opt_state, is_leaf=_is_stored)

    def _unpack(self, opt_state: Any) -> Any:
        def unpack(place: Stored, x: jax.Array) -> jax.Array:
            return x if place.leaf is None else place.leaf.unpad(x)

        return jax.tree.map(unpack, self.layout.optimizer, opt_state, is_leaf=_is_stored)


def _trained(leaves: Sequence[Leaf], values: Sequence[Any], tree: Any) -> Any:
    """The tree that the optimizer sees: None, which is no leaf, in place of frozen ones."""
    return jax.tree.unflatten(tree, [x if leaf.trainable else None for leaf, x in zip(leaves, values, strict=True)])


def _fill(leaves: Sequence[Leaf], trained: Sequence[Any]) -> list[Any]:
    it = iter(trained)
    return [next(it) if leaf.trainable else None for leaf in leaves]


def check_state(state: Any) -> None:
    """Raise ValueError unless this is a state whose arrays are still there."""
    if not isinstance(state, State):
        raise ValueError(
            f"state is a {type(state).__name__}; pass what step.init or the last step returned, and then the batch"
        )
    if isinstance(state.step, jax.Array) and not isinstance(state.step, jax.core.Tracer) and state.step.is_deleted():
        raise ValueError(
            "this state was donated to an earlier step; keep the new one: state, metrics = step(state, batch)"
        )


def metrics_of(sums: Sums) -> Metrics:
    """The means that sums over all rows stand for."""
    return {name: mean.total / mean.count for name, mean in sums.items()}


def _is_stored(x: Any) -> bool:
    return isinstance(x, Stored)


def _describe(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.Array | np.ndarray) else type(x).__name__
