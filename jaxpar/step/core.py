"""The step: the only place where model, optimizer, strategy and layout meet.

    (state, batch)
       |  __call__, _run_program   check the state, place the batch, look up the compiled program
       |  _function                jit, with the shardings of the layout
       |  _train                   the whole step in three lines, traced once per shape of batch
       v
    (state, metrics)

`evaluate`, `value_and_grad` and `measured` have other functions than `_train`. `tracing.py` makes the program of one
device, and `init.py` the first state.
"""

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..collectives import order
from ..collectives.compiling import compiler_options
from ..collectives.order import Token
from ..hardware.devices import has_memories, mark_on_host
from ..layout.layout import Layout, is_stored, place_optimizer
from ..layout.mesh import check_context
from ..layout.precision import Policy
from ..layout.state import State
from ..layout.storage import Storage, check_trains
from ..model.batches import batch_shardings, batch_specs, is_array, one_block
from ..model.model import Model, Replicated
from ..model.paths import name_of
from ..numerics.matrices.elementwise import sees_stacked
from ..numerics.matrices.numbers import matrix_warning
from ..numerics.matrices.owners import Dealer, Owners
from ..numerics.matrices.whole_matrices import axes_at_rest, update_program
from ..parallel.data import rule_of
from ..parallel.pipeline.schedules import Schedule
from ..parallel.tensor.dims import Rules, undivided_leaves
from ..program.buffers import HOST, on_device
from ..program.filter_primitives import without_filter_primitives
from ..strategy import Strategy
from ..strategy.axes import ROWS, SHARDS
from .checks import Intake, Named, check_reached, check_state, is_traced, misfit, naming, shapes_of
from .gradients import Local, Metrics, gradient_figures, metrics_of
from .init import FirstState
from .offload import streams
from .placement import ParamPlacement
from .tracing import Sums, Traced, Tracing
from .update import Update, taking_value, transforming

_REPLICATED = PartitionSpec()


class Step(FirstState, Intake):
    """A compiled training step; see `make_train_step`.

    Attributes (`Intake` lists the others):
      layout: where every array of the state lives.
      schedule: the schedule of the pipeline, or None.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Any,
        strategy: Strategy,
        mesh: Mesh,
        trainable: Any,
        rules: Rules | None = None,
        on_nonfinite: str = "apply",
        ids: Mapping[str, int] | None = None,
    ):
        self.model_def, self.strategy, self.mesh = model, strategy, mesh
        self.optimizer = taking_value(optimizer)
        self.policy, self.rule = Policy.of(strategy), rule_of(strategy)
        params, _ = jax.eval_shape(naming(model.create, ()), jax.random.key(0))
        check_trains(params, trainable)
        ranks, tensor_ranks = mesh.shape["pipe"], mesh.shape["tensor"]
        table_size = ranks, strategy.microbatches, strategy.chunks
        self.schedule = Schedule.of(strategy.schedule, *table_size) if ranks > 1 else None

        # 1. How each parameter is stored: its sharded dims, stages and padding.
        shapes = [(name_of(path), tuple(x.shape)) for path, x in jax.tree_util.tree_leaves_with_path(params)]
        placement = ParamPlacement(model, strategy, mesh, self.schedule)
        storage, tensor_split = placement.make_storage(params, shapes, trainable, rules)

        # 2. How each array of the optimizer is stored, and who multiplies whole matrices.
        as_stacked = sees_stacked(self.optimizer, storage)
        places, owners, warn_matrices = self._place_optimizer(storage, shapes, as_stacked)

        # 3. The layout: all of this on a mesh, in the dtypes of the strategy.
        has_copy = self.rule.published and placement.num_shards > 1 and self.policy.compute != jnp.float32
        undivided = undivided_leaves(shapes, tensor_split, tensor_ranks) if tensor_ranks > 1 else {}
        choices = self.rule.sharded, has_copy, places, tensor_split.found, undivided
        self.layout = Layout(
            storage,
            self._home(),
            self.policy,
            *choices,
            host="params" in strategy.offloads,
            shards=placement.num_shards,
        )

        # 4. The parts of a step: trace the loss, differentiate it on one device, update.
        streamed = streams(self.optimizer, self.layout, strategy.offloads, as_stacked, owners is not None)
        row_axes = {axis: mesh.shape[axis] for axis in ROWS if mesh.shape[axis] > 1}
        self.replicas = math.prod(row_axes.values())
        setting = {"layout": self.layout, "strategy": strategy, "axes": row_axes, "schedule": self.schedule}
        self.tracing = Tracing(model=model, matrix_warning=warn_matrices, **setting)
        self.update = Update(self.optimizer, self.layout, self.rule, as_stacked, on_nonfinite, owners, streamed)
        self.local = Local(self.tracing, dict(ids or {}))
        self._jitted: dict[Any, Any] = {}

    def _place_optimizer(self, storage: Storage, shapes: Named, as_stacked: bool) -> tuple[Any, Owners | None, Any]:
        """Choose how the optimizer's arrays are stored.

        Args:
          shapes: the path and shape of the model's own parameters.
          as_stacked: whether the optimizer sees leaves as they are stored.

        Returns:
          A `Stored` for each array; the owners of whole matrices, or None; and a function that warns of leaves which
          the optimizer should not multiply (`Tracing.matrix_warning`), or None.
        """
        # 1. The abstract state. An array that mirrors a parameter is stored like the parameter's shard.
        leaves_seen, params_seen = storage.seen(as_stacked)
        with transforming("optimizer.init", params_seen):
            state = jax.eval_shape(naming(self.optimizer.init, shapes), params_seen)
        masters, tree = jax.tree.flatten(params_seen)
        program = update_program(self.optimizer, tree, tuple(masters))
        is_sharded, on_host = "optimizer" in self.rule.sharded, "optimizer" in self.strategy.offloads
        places = place_optimizer(state, params_seen, leaves_seen, is_sharded, on_host)
        # 2. An optimizer that multiplies matrices needs each of them whole on some rank, its owner.
        if program is None:  # an optimizer that works element by element, such as AdamW
            return places, None, None
        owners = Dealer(leaves_seen, axes_at_rest(storage, is_sharded, self.mesh.shape), self.mesh)(program)
        multiplied = {leaf.path: program.leaves.get(i, frozenset()) for i, leaf in enumerate(leaves_seen)}
        warn_matrices = functools.partial(matrix_warning, multiplied=multiplied, factors=program.factors)
        return owners.stored(places), owners, warn_matrices

    chosen: tuple[Any, ...] = ()  # what remat="auto" chose for each value (`inspect/remat.py`)
    concurrency_remark = ""  # what concurrent="auto" chose, and why (`inspect/concurrency.py`)
    settle: Callable[[Any], Any] | None = None  # shapes of a batch -> this step with the choices that depend on them

    def settled(self, batch: Any) -> Self:
        """Return this step with all choices made for batches of these shapes; reports on a batch read its strategy."""
        return self if self.settle is None else self.settle(self.shapes(batch))

    def choosing(self, choices: tuple[str, ...] = (), chosen: tuple[Any, ...] = (), **fields: Any) -> Self:
        """Return this step with other choices of what its strategy leaves open; both share the traces of the model.

        Args:
          choices: for each stack, what happens to the values that its layers save (`Residuals.kept`).
          chosen: what a report shows of these choices.
          fields: `concurrent` or `remat`, if they replace the strategy's.
        """
        # A shallow copy shares layout and update, but needs its own programs.
        step = copy.copy(self)
        step.chosen, step.strategy = chosen, replace(self.strategy, **fields)
        step.tracing = replace(self.tracing, strategy=step.strategy, choices=choices)
        step.local, step._jitted = replace(self.local, tracing=step.tracing), {}
        return step

    def _home(self) -> Mesh:
        """Return the mesh on which the state lives."""
        return self.mesh

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """Take one step: return `(state, metrics)`; see `TrainStep.__call__`."""
        return self._run_program("train", state, batch)

    def evaluate(self, state: State, batch: Any) -> Metrics:
        """Return the loss and its metrics; see `TrainStep.evaluate`."""
        return self._run_program("evaluate", state, batch)

    def value_and_grad(self, state: State, batch: Any) -> tuple[jax.Array, Any]:
        """Return the loss and its gradients; see `TrainStep.value_and_grad`."""
        loss, grads = self._run_program("gradients", state, batch)
        # `wrap` expects a value for every leaf, and a frozen leaf has no gradient.
        return loss, self.model_def.wrap(grads) if all(leaf.trainable for leaf in self.layout.leaves) else grads

    def measured(self, state: State, batch: Any, order: np.ndarray) -> dict[str, jax.Array]:
        """Return the loss and figures of its gradients (`gradient_figures`) on rows of a batch dealt in some order.

        All blocks get the key of block 0: noise then depends on a row's place in its block, and not on the block.

        Args:
          state: as for the step; it is not donated.
          batch: as for the step; with several hosts as `place` returns it.
          order: int32 [rows], numbers of rows of the global batch: a multiple of replicas x microbatches. One program
            serves all orders of the same length.
        """
        # Marked as replicated, the order joins the batch of the program: it is an argument, and no constant.
        everywhere = NamedSharding(self.mesh, _REPLICATED)
        placed = jax.make_array_from_callback(order.shape, everywhere, lambda index: order[index])
        return self._run_program("measured", state, (batch, Replicated(placed)))

    def params(self, state: State) -> Any:
        """Return the parameters as the model's own tree, without padding, sharded where a dim divides.

        Trained leaves are float32; frozen ones have the compute dtype.
        """
        check_state(state)
        return self.model_def.wrap(self._params(state))

    def _params(self, state: State) -> Any:
        """Return the parameters as the tree of `Model.create`; jitted once."""
        if "params" not in self._jitted:
            logical = lambda params: self.layout.to_logical(jax.tree.map(on_device, params))
            self._jitted["params"] = jax.jit(logical, out_shardings=self.layout.handed_out)
        return self._jitted["params"](state.params)

    def model(self, state: State) -> Any:
        """Return the user's module, NNX or bound Linen, with the parameters of a state.

        Raises ValueError for a model that is a pair of functions.
        """
        if self.model_def.bind is None:
            raise ValueError("this model is a pair of functions and has no module; use step.params(state)")
        check_state(state)
        # The variables are copied: the module would otherwise share arrays that the next step donates.
        return self.model_def.bind(self._params(state), jax.tree.map(jnp.copy, state.variables))

    def compile(self, batch: Any) -> jax.stages.Compiled:
        """Compile the training step for batches of one shape, arrays or `jax.ShapeDtypeStruct`; nothing runs.

        With compile-only devices in the mesh, the program is compiled for them.
        """
        state, batch = self._typed_state, self._typed_batch(batch)
        traced = self._function("train", batch).trace(state, batch)
        # `lowering_platforms` takes "cuda" where `Device.platform` says "gpu".
        platform = {"gpu": "cuda"}.get(p := self.mesh.devices.flat[0].platform, p)
        lowered = traced.lower(lowering_platforms=(platform,))
        if self._must_mark_host:
            mark_on_host(lowered, [i for i, x in enumerate(jax.tree.leaves(state)) if isinstance(x, ShapedArray)])
        return lowered.compile()

    @property
    def _must_mark_host(self) -> bool:
        """Whether a program must mark its arguments on the host, since compile-only devices have no host memory."""
        return any(self.layout.host_bytes.values()) and not has_memories(self.mesh.devices.flat[0])

    @functools.cached_property
    def _typed_state(self) -> State:
        """The abstract state on which programs are traced: shapes with shardings (`abstract_state`).

        If a sharding cannot name the host's memory, the type of the array does.
        """
        state = self.abstract_state()
        if not self._must_mark_host:
            return state
        typed = lambda place, x: ShapedArray(x.shape, x.dtype, memory_space=HOST) if place.host else x
        at_rest = lambda kind, tree: jax.tree.map(typed, self.layout.places(kind), tree, is_leaf=is_stored)
        params, optimizer = at_rest("params", state.params), at_rest("optimizer", state.optimizer)
        return replace(state, params=params, optimizer=optimizer)

    def trace(self, batch: Any) -> Any:
        """Return the jaxpr of the training step for batches of one shape."""
        batch = self._typed_batch(batch)
        return self._function("train", batch).trace(self._typed_state, batch).jaxpr

    def _typed_batch(self, batch: Any) -> Any:
        """Return the shapes of the global batch, with the types that its arrays have when the step receives them.

        The type of an array that lies on the devices of a mesh names this mesh. `jit` traces and compiles a function
        again for another type, so that a program compiled for plain shapes would be compiled twice.
        """
        shapes, places = self.shapes(batch), batch_shardings(batch, self.mesh)

        def typed(shape: Any, x: Any, place: NamedSharding) -> Any:
            on_mesh = jax.process_count() > 1 or (is_array(x) and x.committed)
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place) if on_mesh else shape

        return jax.tree.map(typed, shapes, batch, places)

    def traced(self, batch: Any) -> Traced:
        """Return the loss of one microbatch as the program that each device runs.

        Nothing is compiled, unless there is something to choose (`settled`). Each shape of a batch is traced once.

        Args:
          batch: a pytree of arrays or `jax.ShapeDtypeStruct` [rows, ...].

        Returns:
          An abstract record. `program` holds the loss in pieces, `outputs` the positions of its results; `schedule` and
          `axes` tell how a step runs it. Raises ValueError if the strategy cannot run the loss, or if the rows of the
          batch do not fit.
        """
        batch, state = self.shapes(batch), self.abstract_state()
        step = self.settled(batch)
        block = one_block(batch, self.replicas * self.strategy.microbatches)
        return step.tracing(state.variables, block, state.key)

    def may_couple(self, batch: Any) -> bool:
        """Return whether reading the program left open if the loss couples rows; a warning then named the lines."""
        return bool(self.traced(batch).notes.doubts)

    def _run_program(self, name: str, state: State, batch: Any) -> Any:
        """Run the program of this name, a key of the table in `_function`, on a batch as the user gave it."""
        check_state(state)
        leaves, tree = jax.tree.flatten(batch)
        # 1. A batch of a kind that needed no placement before goes straight to jit: on a tiny model, looking at every
        # array in every step costs more than the rest of this call.
        # Types count too: once jit has taken a plain array, it takes a masked array without its mask.
        kinds = ((x.sharding, x.committed) if is_array(x) else (type(x), getattr(x, "dtype", None)) for x in leaves)
        places = list(zip(map(np.shape, leaves), kinds, strict=True))
        inside = is_traced(state.step, leaves)
        kind = ("in place", name, inside, tree, *places)
        if (run := self._jitted.get(kind)) is None:
            placed = self._take_in(batch)
            run = self._function(name, placed, inside)
            if all(a is b for a, b in zip(leaves, jax.tree.leaves(placed), strict=True)):
                self._jitted[kind] = run
            batch = placed

        # 2. Run it. Steps of one caller's program have their collectives one after the other (`collectives/order.py`).
        if inside:
            state = replace(state, step=order.follow(state.step))
        try:
            result = run(state, batch)
        except (TypeError, ValueError) as error:
            # jax does not say which array of the state it means.
            if fault := misfit(state, self.abstract_state()):
                raise ValueError(fault) from error
            raise
        if inside:
            order.leave(result[0].step if name == "train" else jax.tree.leaves(result)[0])
        return result

    @functools.cached_property
    def _evaluator(self) -> Self:
        """This step for evaluation: it saves nothing for a backward, so nothing has to be chosen for a batch."""
        step = self.choosing(concurrent=1)
        step.settle = None
        return step

    def _function(self, name: str, batch: Any, inside: bool = False) -> Any:
        """Return the jitted function of this name for batches of one shape.

        Args:
          name: "train", "evaluate", "gradients" or "measured".
          batch: a placed batch, or its shapes.
          inside: whether a caller's `jit` traces the step; then nothing is donated.
        """
        if self.settle is not None:
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), batch)
            # "measured" has the order of rows with the batch, and the choices are those for the batch.
            step = self._evaluator if name == "evaluate" else self.settle(shapes[0] if name == "measured" else shapes)
            return step._function(name, batch, inside)
        leaves, tree = jax.tree.flatten(batch)
        cache_key = (name, inside, tree, *(np.shape(x) for x in leaves))
        if cache_key not in self._jitted:
            state, rows = self._shardings, batch_shardings(batch, self.layout.mesh)
            fun, outs, donate = {
                "train": (self._train, (state, None), (0,)),
                "evaluate": (self._evaluate, None, ()),
                "gradients": (self._value_and_grad, None, ()),
                "measured": (self._measured, None, ()),
            }[name]
            prefetches = self.strategy.prefetches(self.mesh)
            run = jax.jit(
                naming(fun, shapes_of(self.layout, batch)),
                in_shardings=(state, rows),
                out_shardings=outs,
                # In a caller's program XLA reuses buffers itself, and under grad or vmap the state may be read again.
                donate_argnums=() if inside else donate,
                # `mark_on_host` counts arguments, so that unused ones must stay.
                keep_unused=self._must_mark_host,
                # XLA accepts options for whole programs only.
                compiler_options=None
                if inside
                else compiler_options(
                    self.mesh,
                    ("data", *SHARDS) if prefetches else SHARDS,
                    ahead=prefetches,
                    fp8=self.strategy.precision == "fp8",
                    on_host="activations" in self.strategy.offloads,
                ),
            )
            if not inside:
                # jit keeps this trace, so that the check costs no second one.
                check_reached(run.trace(self._typed_state, batch).jaxpr)
            self._jitted[cache_key] = run
        return self._jitted[cache_key]

    def _train(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """Take one training step, for `_function` to compile: all layers that are wrapped around a loss.

        `Tracing` (step/tracing.py) makes the program of one device: trace, rewrite, slice. Around it come:

            schedule    step/gradients.py   forwards and backwards, one microbatch after another or, in step/pipeline.py
                                            and parallel/pipeline/, in the order of a schedule's table
            rule        parallel/           within these, how parameters are fetched and gradients are reduced
            place       layout/             all of it on every device, on its part of each leaf
            update      step/update.py      the optimizer, on logical leaves that stay sharded
        """
        placed_gradients = self._placed(self.local.gradients, batch)
        return self.update(state, *placed_gradients(state), writes=self.tracing.writes)

    def _value_and_grad(self, state: State, batch: Any) -> tuple[jax.Array, Any]:
        """Return the loss and its gradients, for `_function` to compile."""
        return self.loss_and_grads(*self._placed(self.local.gradients, batch)(state))

    def loss_and_grads(self, grads: Any, variables: Any, sums: Sums) -> tuple[jax.Array, Any]:
        """Return the loss, and its gradients as the model's own tree, from the results of `_placed`."""
        return metrics_of(sums)["loss"], self.layout.to_logical(grads, "grads")

    def _measured(self, state: State, batch_and_order: Any) -> dict[str, jax.Array]:
        """Return `gradient_figures` of rows dealt in an order, for `_function` to compile."""

        def gradients(stored: Any, variables: Any, batch_and_order: Any, *rest: Any) -> Any:
            batch, order = batch_and_order
            return self.local.gradients(stored, variables, self.local.deal_rows(batch, order.value), *rest, alike=True)

        grads, _, sums = self._placed(gradients, batch_and_order)(state)
        return gradient_figures(grads, sums)

    def _evaluate(self, state: State, batch: Any) -> Metrics:
        """Return the metrics of a batch, for `_function` to compile."""
        sums, _ = self.mapped(self.local.evaluate, batch, _REPLICATED)(
            state.step, self._weights(state), state.variables
        )
        return metrics_of(sums)

    def _placed(self, gradients: Callable, batch: Any) -> Callable[[State], tuple[Any, Any, Sums]]:
        """Turn a function of one device's rows into a function of the state on all devices.

        Args:
          gradients: `Local.gradients`, or a function with its arguments and results.
          batch: the batch, or its shapes.

        Returns:
          state -> (gradients as `_grads_for_update` returns them, new variables, each metric's sums over all rows).
        """
        run = self.mapped(gradients, batch, (self.layout.specs("grads"), _REPLICATED, _REPLICATED))

        def placed(state: State) -> tuple[Any, Any, Sums]:
            scale = state.scale.scale if state.scale is not None else jnp.float32(1)
            weights, variables = self._weights(state), state.variables
            (grads, variables, sums), _ = run(state.step, weights, variables, state.key, state.step, scale)
            return self._grads_for_update(grads, state), variables, sums

        return placed

    def mapped(self, fun: Callable, batch: Any, outs: Any) -> Callable[..., tuple[Any, Token | None]]:
        """Run a function on every device, inside `shard_map`.

        Args:
          fun: `fun(stored leaves, variables, batch, *replicated)`, of local values.
          batch: a batch of the same leaves, for its specs.
          outs: the specs of what `fun` returns.

        Returns:
          A function of the step's number, the stored weights, the variables, the batch and the replicated arguments. It
          returns the results of `fun`, and the token after its collectives. No result is ready before they are done.
        """
        specs = self.layout.specs("copy" if self.layout.copied else "params")

        def call(step: jax.Array, stored: Any, variables: Any, *rest: Any) -> tuple[Any, Token | None]:
            check_context(self.mesh)
            ins = (_REPLICATED, specs, _REPLICATED, batch_specs(batch), *([_REPLICATED] * len(rest)))
            run = order.in_order(without_filter_primitives(fun), self.mesh)

            def ordered(token: Token | None, *args: Any) -> tuple[Any, Token | None]:
                result, token = run(token, *args)
                # Collectives that the partitioner adds outside, for the update, then come after all of these.
                return order.behind(token, result), token

            mapped = jax.shard_map(
                ordered, mesh=self.mesh, in_specs=ins, out_specs=(outs, _REPLICATED), check_vma=False
            )
            # The first collective waits for the step's number, and so for the step before.
            return mapped(order.first_token(step, self.mesh), jax.tree.leaves(stored), variables, batch, *rest)

        return call

    def _weights(self, state: State) -> Any:
        """Return the parameters that forward and backward read: the copy in the compute dtype, if there is one."""
        return state.copy if self.layout.copied else state.params

    def _grads_for_update(self, grads: Sequence[jax.Array | None], state: State) -> Any:
        """Convert the gradient of each leaf, as the rule reduced it, to the gradient of the unscaled loss.

        Returns unpadded gradients in the dtype of the masters, in the tree of the leaves, None if frozen.
        """
        trainable = [leaf for leaf in self.layout.leaves if leaf.trainable]
        logical = self.layout.to_logical(self.layout.unflatten(grads), "grads", as_stacked=True)
        unpadded, tree = jax.tree.flatten(logical)
        # Cast before the division: gradients that were reduced in float16 would underflow without their scale.
        unpadded = [grad.astype(Policy.master(leaf.dtype)) for leaf, grad in zip(trainable, unpadded, strict=True)]
        if state.scale is not None:
            unpadded = [grad / state.scale.scale for grad in unpadded]
        return jax.tree.unflatten(tree, unpadded)
