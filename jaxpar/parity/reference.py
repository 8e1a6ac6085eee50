"""One device, plainly: what the strategies are compared with."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..backend.cpu_compiler import cpu_options
from ..layout.precision import Policy
from ..model.batches import check_rows
from ..model.model import Mean, Model, Replicated
from ..model.paths import name_of
from ..numerics.fp8 import in_fp8, of_blocks
from ..program import jaxpr as jx
from ..program.walk import visit
from ..step.gradients import block_key
from ..step.update import taking_value
from ..strategy import Strategy

_SAMPLES = 3  # runs with another rounding: a small leaf's noise may be small by chance in one


class Reference:
    """One device: the model's loss on the global batch, microbatch by microbatch, differentiated by `jax.grad`.

    `replicas` fixes which rows share a microbatch and, where the loss draws random numbers, a key. `microbatches` are
    those of the strategy if None.
    """

    def __init__(self, model: Model, strategy: Strategy, replicas: int, microbatches: int | None = None):
        self.model, self.strategy, self.replicas = model, strategy, replicas
        self.microbatches = strategy.microbatches if microbatches is None else microbatches
        grad = jax.value_and_grad(self.objective, has_aux=True, allow_int=True)
        self._grad = jax.jit(grad, compiler_options=cpu_options())
        self._create = jax.jit(model.create, compiler_options=cpu_options())
        self._updates: dict[int, tuple[Any, Any, Any]] = {}

    def objective(self, params: Any, variables: Any, batch: Any, key: jax.Array, step: jax.Array | int) -> Any:
        """Return the loss of a batch, block by block, and what goes with it."""
        m, n = self.microbatches, self.replicas
        policy = Policy.of(self.strategy)
        declared = jax.eval_shape(self.model.create, jax.random.key(0))[0]
        masters, params = params, jax.tree.map(lambda x, d: x.astype(policy.computed(d.dtype)), params, declared)
        written = params
        sums: list[Mean] = []
        drawn: bool | None = None  # whether the loss depends on its key: to be traced once, not for every microbatch
        for i in range(m):
            variables = jax.lax.stop_gradient(variables)  # a microbatch gives none to the one before, in a step

            def rows(
                x: Any, i: int = i
            ) -> Any:  # replica r has rows r R to (r + 1) R, and microbatch i of each is taken
                return x if _marked(x) else x.reshape(n, m, -1, *x.shape[1:])[:, i]

            blocks = jax.tree.map(rows, batch, is_leaf=_marked)
            keys = jax.vmap(lambda r, i=i: block_key(key, step, r * m + i))(jnp.arange(n))
            drawn = self._draws(params, variables, blocks, keys) if drawn is None else drawn
            if drawn:
                axes = jax.tree.map(lambda x: None if _marked(x) else 0, blocks, is_leaf=_marked)

                def block(rows: Any, key: jax.Array, variables: Any = variables) -> Any:
                    return self._call(params, variables, rows, key, {"rows": n})

                out, *new = jax.vmap(block, in_axes=(axes, 0), axis_name="rows")(blocks, keys)
                out, (variables, written) = jax.tree.map(lambda x: x.sum(0), out), jax.tree.map(lambda x: x[0], new)
            else:
                whole = jax.tree.map(
                    lambda x: x if _marked(x) else x.reshape(-1, *x.shape[2:]), blocks, is_leaf=_marked
                )
                out, variables, written = self._call(params, variables, whole, keys[0])
            sums.append(out["loss"])
        # Where the loss leaves a parameter as it is, a low precision must not round the master.
        kept = lambda master, old, new: jnp.where(new == old, master, new.astype(master.dtype))
        masters = jax.lax.stop_gradient(jax.tree.map(kept, masters, params, written))
        return sum(s.total for s in sums) / sum(s.count for s in sums), (variables, masters)

    def _call(
        self, params: Any, variables: Any, rows: Any, key: jax.Array, axes: Mapping[str, int] = MappingProxyType({})
    ) -> Any:
        """`Model.forward`; under FP8 with products of the same layers in it, scaled and rounded alike."""
        if self.strategy.precision != "fp8":
            return self.model.forward(params, variables, rows, key, tuple(axes))
        named = [(name_of(path), x) for path, x in jax.tree_util.tree_leaves_with_path(params)]
        loss = lambda params, rest: self.model.forward(params, rest[0], rest[1], rest[2], tuple(axes))
        flat, out = jx.trace(loss, params, (variables, rows, key), axes=dict(axes))
        alike = of_blocks([(path, x.shape) for path, x in named])
        leaves = [(path, path in alike) for path, _ in named]
        own, _ = in_fp8(flat, flat, leaves, self.strategy, Policy.of(self.strategy).compute)
        run = jx.run(own.eqns, (*own.constvars, *own.invars), own.outvars)
        outs = run(*own.consts, *(x for _, x in named), *jax.tree.leaves((variables, rows, key)))
        return jax.tree.unflatten(jax.tree.structure(out), outs)

    def _draws(self, params: Any, variables: Any, blocks: Any, keys: jax.Array) -> bool:
        """Whether the loss depends on its key."""
        rows = jax.tree.map(lambda x: x if _marked(x) else x[0], blocks, is_leaf=_marked)
        rest = (params, variables, rows)
        flat, _ = jx.trace(lambda rest, key: self.model.call(rest[0], rest[1], rest[2], key), rest, keys[0])
        marked = jx.depends(flat.eqns, flat.invars[-1:])
        return any(not jx.is_literal(v) and v in marked for v in flat.outvars)

    def low(self, batch: Any) -> list[str]:
        """The low precisions in which the model itself declares parameters or computes, as bfloat16 modules do."""
        fresh = jax.eval_shape(self.model.create, jax.random.key(0))
        traced = jax.make_jaxpr(self.model.call)(*fresh, batch, jax.random.key(0))
        computed = (v.aval for eqn, _ in visit(jx.opened(traced)[0].eqns) for v in eqn.outvars)
        found = {aval.dtype for aval in computed if hasattr(aval, "dtype")}
        found.update(x.dtype for x in jax.tree.leaves(fresh[0]))
        return [
            "f32",
            *(name for name, dtype in {"bf16": jnp.bfloat16, "f16": jnp.float16}.items() if jnp.dtype(dtype) in found),
        ]

    def value_and_grad(self, key: jax.Array, batch: Any, nudge: float = 0.0, sample: int = 0) -> tuple[jax.Array, Any]:
        """Loss and gradients at the initial values that `key` gives, for the keys of the first step."""
        check_rows(batch, self.replicas, self.microbatches)
        params, variables = self._start(key, nudge, sample)
        (loss, _), grads = self._grad(params, variables, batch, jax.random.fold_in(key, 1), 0)
        return loss, _trained(grads)

    def uncut_loss(self, key: jax.Array, batch: Any) -> jax.Array:
        """The loss at the initial values that `key` gives, of all rows in one microbatch; blocks keep their keys."""
        whole = Reference(self.model, self.strategy, self.replicas * self.microbatches, microbatches=1)
        loss = jax.jit(whole.objective, compiler_options=cpu_options())
        return loss(*self._start(key, 0.0, 0), batch, jax.random.fold_in(key, 1), 0)[0]

    def train(
        self,
        optimizer: optax.GradientTransformation,
        key: jax.Array,
        batch: Any,
        steps: int,
        nudge: float = 0.0,
        sample: int = 0,
    ) -> Any:
        """Parameters after some steps on one batch."""
        params, variables = self._start(key, nudge, sample)
        tuned, update = self._tuned(optimizer)
        state = tuned.init(_trained(params))
        for step in range(steps):
            (loss, (variables, params)), grads = self._grad(params, variables, batch, jax.random.fold_in(key, 1), step)
            params, state = update(grads, state, params, loss)
        return params

    def _tuned(self, optimizer: optax.GradientTransformation) -> tuple[Any, Any]:
        """The transformation, and its update under `jit`: `rounding` trains four times, and compiles it once."""
        if id(optimizer) not in self._updates:
            tuned = taking_value(optimizer)

            @functools.partial(jax.jit, compiler_options=cpu_options())
            def update(grads: Any, state: Any, params: Any, loss: jax.Array) -> Any:
                changes, state = tuned.update(_trained(grads), state, _trained(params), value=loss)
                moved = optax.apply_updates(_trained(params), changes)
                return jax.tree.map(
                    lambda new, old: old if new is None else new, moved, params, is_leaf=lambda x: x is None
                ), state

            self._updates[id(optimizer)] = tuned, update, optimizer  # held, so that its id stays its own
        tuned, update, _ = self._updates[id(optimizer)]
        return tuned, update

    def rounding(self, run: Callable[[float, int], Any], epsilon: float) -> list[float]:
        """How far the leaves of what `run(nudge, sample)` makes move for another rounding: the largest change of an
        element, in some runs whose initial values are changed at random by up to `epsilon`, relatively: in the last
        bit. Where large terms cancel, nothing but their last bits is left.
        """
        plain = jax.tree.leaves(run(0.0, 0))
        others = (jax.tree.leaves(run(epsilon, sample)) for sample in range(_SAMPLES))
        changed = [list(map(_change, plain, other)) for other in others]
        return [max(over) for over in zip(*changed, strict=True)]

    def _start(self, key: jax.Array, nudge: float, sample: int) -> tuple[Any, Any]:
        """Master parameters and variables, the parameters changed by up to `nudge`, relatively."""
        params, variables = self._create(key)
        params = jax.tree.map(lambda x: x.astype(Policy.master(x.dtype)), params)
        if not nudge:
            return params, variables
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.fold_in(key, sample), len(leaves))
        moved = [
            x * (1 + nudge * jax.random.uniform(k, x.shape, jnp.float32, -1, 1)).astype(x.dtype) if _moves(x) else x
            for k, x in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(tree, moved), variables


def _change(a: jax.Array, b: jax.Array) -> float:
    """The largest change of an element; 0 where it is not finite, which says nothing about rounding."""
    with np.errstate(invalid="ignore"):
        change = np.abs(np.asarray(a) - np.asarray(b))
    return float(np.nan_to_num(change, nan=0, posinf=0).max(initial=0))


def _moves(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _trained(tree: Any) -> Any:
    """None in place of what no optimizer moves: integers, and the float0 that stands for their gradients."""
    return jax.tree.map(lambda x: x if _moves(x) else None, tree)


def _marked(x: Any) -> bool:
    return isinstance(x, Replicated)
