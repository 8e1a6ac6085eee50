"""One device without any strategy: the reference that strategies are compared with.

The loss of a batch is computed as a strategy divides its rows: into m microbatches of each of n replicas' rows.

    replica r has rows r R to (r + 1) R;   block (r, i) is microbatch i of them
    loss = sum of totals over all blocks / sum of counts over all blocks
"""

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
from ..model.batches import check_rows, map_rows
from ..model.model import Mean, Model
from ..model.paths import name_of
from ..numerics.fp8 import in_fp8, of_blocks
from ..program import jaxpr as jx
from ..program.walk import visit
from ..step.blocks import block_key, blocks_of_microbatch, call_on_blocks
from ..step.update import taking_value
from ..strategy import Strategy

_NUM_SAMPLES = 3  # runs with other rounding: the noise of a small leaf may be small by chance in one of them


class Reference:
    """The model's loss on the global batch, on one device, differentiated by `jax.grad`."""

    def __init__(self, model: Model, strategy: Strategy, replicas: int, microbatches: int | None = None):
        """Store the model, and how rows are divided.

        Args:
          model, strategy: the strategy gives the precision and the microbatches.
          replicas: the number of replicas. It fixes which rows share a microbatch and, if the loss draws random
            numbers, a key.
          microbatches: the number of microbatches; the strategy's number if None.
        """
        self.model, self.strategy, self.replicas = model, strategy, replicas
        self.microbatches = strategy.microbatches if microbatches is None else microbatches
        grad = jax.value_and_grad(self.objective, has_aux=True, allow_int=True)
        self._grad = jax.jit(grad, compiler_options=cpu_options())
        self._create = jax.jit(model.create, compiler_options=cpu_options())
        self._updates: dict[int, tuple[Any, Any, Any]] = {}  # id of an optimizer -> transformation, update, optimizer

    def objective(self, params: Any, variables: Any, batch: Any, key: jax.Array, step: jax.Array | int) -> Any:
        """Return the loss of a batch, block by block, and the new (variables, master parameters)."""
        m, n = self.microbatches, self.replicas
        policy = Policy.of(self.strategy)
        # 1. Cast the master parameters to the precision in which the strategy computes.
        declared = jax.eval_shape(self.model.create, jax.random.key(0))[0]
        # Gradients are those of the masters, through the cast, as in a step.
        masters, params = params, jax.tree.map(lambda x, d: x.astype(policy.computed(d.dtype)), params, declared)
        written_params = params
        means: list[Mean] = []
        # 2. Sum over the microbatches.
        draws: bool | None = None  # whether the loss depends on its key; traced for the first microbatch only
        for i in range(m):
            variables = jax.lax.stop_gradient(variables)  # as in a step, no gradient flows between microbatches
            blocks = blocks_of_microbatch(batch, n, m, i)
            keys = jax.vmap(lambda r, i=i: block_key(key, step, r * m + i))(jnp.arange(n))
            draws = self._draws(params, variables, blocks, keys) if draws is None else draws
            if draws:
                # Each replica's block has its own key.
                def block_loss(rows: Any, key: jax.Array, variables: Any = variables) -> Any:
                    return self._call(params, variables, rows, key, {"rows": n})

                out, *written = call_on_blocks(block_loss, blocks, keys)
                # Variables and written parameters are the same for all replicas.
                variables, written_params = jax.tree.map(lambda x: x[0], written)
                out = jax.tree.map(lambda x: x.sum(0), out)
            else:
                all_rows = map_rows(blocks, lambda x: x.reshape(-1, *x.shape[2:]))
                out, variables, written_params = self._call(params, variables, all_rows, keys[0])
            means.append(out["loss"])
        # 3. A parameter that the loss does not write keeps its master: a low precision must not round it.
        keep_master = lambda master, cast, written: jnp.where(written == cast, master, written.astype(master.dtype))
        masters = jax.lax.stop_gradient(jax.tree.map(keep_master, masters, params, written_params))
        return sum(s.total for s in means) / sum(s.count for s in means), (variables, masters)

    def _call(
        self, params: Any, variables: Any, rows: Any, key: jax.Array, axes: Mapping[str, int] = MappingProxyType({})
    ) -> Any:
        """Return `Model.forward`; under FP8, with products of the same layers in FP8, scaled and rounded alike."""
        if self.strategy.precision != "fp8":
            return self.model.forward(params, variables, rows, key, tuple(axes))
        named_params = [(name_of(path), x) for path, x in jax.tree_util.tree_leaves_with_path(params)]
        loss = lambda params, rest: self.model.forward(params, rest[0], rest[1], rest[2], tuple(axes))
        flat, out = jx.trace(loss, params, (variables, rows, key), axes=dict(axes))
        layer_paths = of_blocks([(path, x.shape) for path, x in named_params])
        leaves = [(path, path in layer_paths) for path, _ in named_params]
        rewritten, _ = in_fp8(flat, flat, leaves, self.strategy, Policy.of(self.strategy).compute)
        forward = jx.run(rewritten.eqns, (*rewritten.constvars, *rewritten.invars), rewritten.outvars)
        outs = forward(*rewritten.consts, *(x for _, x in named_params), *jax.tree.leaves((variables, rows, key)))
        return jax.tree.unflatten(jax.tree.structure(out), outs)

    def _draws(self, params: Any, variables: Any, blocks: Any, keys: jax.Array) -> bool:
        """Return whether the loss depends on its key."""
        rows = map_rows(blocks, lambda x: x[0])
        rest = (params, variables, rows)
        flat, _ = jx.trace(lambda rest, key: self.model.call(rest[0], rest[1], rest[2], key), rest, keys[0])
        key_dependent = jx.depends(flat.eqns, flat.invars[-1:])
        return any(not jx.is_literal(v) and v in key_dependent for v in flat.outvars)

    def model_dtypes(self, batch: Any) -> list[str]:
        """Return "f32", and "bf16" and "f16" if the model declares parameters or computes in them."""
        abstract_state = jax.eval_shape(self.model.create, jax.random.key(0))
        traced = jax.make_jaxpr(self.model.call)(*abstract_state, batch, jax.random.key(0))
        computed_avals = (v.aval for eqn, _ in visit(jx.opened(traced)[0].eqns) for v in eqn.outvars)
        dtypes = {aval.dtype for aval in computed_avals if hasattr(aval, "dtype")}
        dtypes.update(x.dtype for x in jax.tree.leaves(abstract_state[0]))
        # float32 is always among them, so that no tolerance is below its own.
        return [
            "f32",
            *(name for name, dtype in {"bf16": jnp.bfloat16, "f16": jnp.float16}.items() if jnp.dtype(dtype) in dtypes),
        ]

    def value_and_grad(self, key: jax.Array, batch: Any, nudge: float = 0.0, sample: int = 0) -> tuple[jax.Array, Any]:
        """Return loss and gradients at the initial values that `key` gives, with the random keys of the first step.

        The initial values change at random, `sample` says how, by up to `nudge`, relatively.
        """
        check_rows(batch, self.replicas, self.microbatches)
        params, variables = self._start(key, nudge, sample)
        # 1 is the key of a state's random numbers (`step/init.py`), and 0 the number of the first step.
        (loss, _), grads = self._grad(params, variables, batch, jax.random.fold_in(key, 1), 0)
        return loss, _trained(grads)

    def uncut_loss(self, key: jax.Array, batch: Any) -> jax.Array:
        """Return the loss at the initial values with all rows in one microbatch; blocks keep their random keys."""
        one_microbatch = Reference(self.model, self.strategy, self.replicas * self.microbatches, microbatches=1)
        loss = jax.jit(one_microbatch.objective, compiler_options=cpu_options())
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
        """Return the parameters after some steps on one batch; `key`, `nudge` and `sample` as for `value_and_grad`."""
        params, variables = self._start(key, nudge, sample)
        transformation, update = self._update_of(optimizer)
        state = transformation.init(_trained(params))
        for step in range(steps):
            # The loss comes back with the parameters that it wrote itself, which the update then changes.
            (loss, (variables, params)), grads = self._grad(params, variables, batch, jax.random.fold_in(key, 1), step)
            params, state = update(grads, state, params, loss)
        return params

    def _update_of(self, optimizer: optax.GradientTransformation) -> tuple[Any, Any]:
        """Return the transformation, and its jitted update: `rounding` trains four times, and compiles it once."""
        if id(optimizer) not in self._updates:
            transformation = taking_value(optimizer)

            @functools.partial(jax.jit, compiler_options=cpu_options())
            def update(grads: Any, state: Any, params: Any, loss: jax.Array) -> Any:
                updates, state = transformation.update(_trained(grads), state, _trained(params), value=loss)
                updated = optax.apply_updates(_trained(params), updates)
                keep_untrained = lambda new, x: x if new is None else new
                return jax.tree.map(keep_untrained, updated, params, is_leaf=lambda x: x is None), state

            # The optimizer is stored too, so that no other object gets its id.
            self._updates[id(optimizer)] = transformation, update, optimizer
        transformation, update, _ = self._updates[id(optimizer)]
        return transformation, update

    def rounding(self, run: Callable[[float, int], Any], epsilon: float) -> list[float]:
        """Return how much each leaf of a result changes with rounding.

        It is the largest change of an element over some runs whose initial values change at random in the last bit.
        Where large terms cancel, only their last bits remain, so that such changes may be large.

        Args:
          run: computes the result for (nudge, sample), see `value_and_grad`.
          epsilon: the largest relative change of an initial value.
        """
        # Nothing changes in the first run, from which the others differ by rounding alone.
        expected_leaves = jax.tree.leaves(run(0.0, 0))
        nudged_runs = (jax.tree.leaves(run(epsilon, sample)) for sample in range(_NUM_SAMPLES))
        changes = [list(map(_largest_change, expected_leaves, nudged_leaves)) for nudged_leaves in nudged_runs]
        return [max(leaf_changes) for leaf_changes in zip(*changes, strict=True)]

    def _start(self, key: jax.Array, nudge: float, sample: int) -> tuple[Any, Any]:
        """Return master parameters and variables, the parameters changed at random by up to `nudge`, relatively."""
        params, variables = self._create(key)
        params = jax.tree.map(lambda x: x.astype(Policy.master(x.dtype)), params)
        if not nudge:
            return params, variables
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.fold_in(key, sample), len(leaves))
        vary = lambda x, k: x * (1 + nudge * jax.random.uniform(k, x.shape, jnp.float32, -1, 1)).astype(x.dtype)
        nudged = [vary(x, k) if _is_inexact(x) else x for x, k in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(tree, nudged), variables


def _largest_change(a: jax.Array, b: jax.Array) -> float:
    """Return the largest change of an element; changes that are not finite tell nothing about rounding, and count 0."""
    with np.errstate(invalid="ignore"):
        change = np.abs(np.asarray(a) - np.asarray(b))
    return float(np.nan_to_num(change, nan=0, posinf=0).max(initial=0))


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _trained(tree: Any) -> Any:
    """Replace leaves that no optimizer changes by None: integers, and the float0 arrays that are their gradients."""
    return jax.tree.map(lambda x: x if _is_inexact(x) else None, tree)
