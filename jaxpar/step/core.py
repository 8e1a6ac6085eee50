"""The step: the one place where model, optimizer, strategy and layout meet. `Step._train` has it in one view."""

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..collectives import order
from ..collectives.compiling import compiler_options
from ..collectives.order import Token
from ..hardware.devices import has_memories, mark_on_host
from ..layout.layout import Layout, is_stored, place_optimizer
from ..layout.leaves import Pipe, Sharing
from ..layout.mesh import check_context
from ..layout.precision import Policy
from ..layout.state import State
from ..layout.storage import check_trains, make_leaves
from ..model.batches import batch_shardings, batch_specs, is_array, one_block
from ..model.model import Model, Replicated
from ..model.paths import name_of
from ..numerics.matrices.elementwise import sees_stacked
from ..numerics.matrices.numbers import astray
from ..numerics.matrices.owners import Dealer
from ..numerics.matrices.whole_matrices import axes_at_rest, update_program
from ..parallel.data import rule_of
from ..parallel.expert.dims import apart, expert_dims, looks_stacked
from ..parallel.pipeline.schedules import Schedule
from ..parallel.tensor.dims import Dims, Rules, tensor_dims, undivided_leaves
from ..parallel.tensor.pairs import creation_order
from ..program.buffers import HOST, on_device
from ..program.filter_primitives import without_filter_primitives
from ..strategy import Strategy
from ..strategy.axes import ROWS, SHARDS
from .checks import Intake, check_reached, check_state, misfit, naming, shapes_of
from .gradients import Local, Metrics, measures, metrics_of
from .init import FirstState
from .offload import streams
from .refusals import check_cut, check_prefetch
from .tracing import Sums, Traced, Tracing
from .update import Update, taking_value, transforming

_HERE = PartitionSpec()


class Step(FirstState, Intake):
    """A compiled training step; see `make_train_step`.

    `layout`, `mesh` and `strategy` may be read; `replicas`, the number of devices (or groups of devices) among which
    rows are divided; `rows`, whose rows a batch is made of; and `schedule`, the pipeline's, or None.
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
        over = tuple(axis for axis in SHARDS if axis == "fsdp" or mesh.shape[axis] > 1)
        over += ("data",) * strategy.hpz
        shards = math.prod(mesh.shape[axis] for axis in over) if strategy.fsdp != 1 else 1
        ranks = mesh.shape["pipe"]
        numbers = ranks, strategy.microbatches, strategy.chunks
        schedule = Schedule.of(strategy.schedule, *numbers) if ranks > 1 else None
        flat = [(name_of(path), tuple(x.shape)) for path, x in jax.tree_util.tree_leaves_with_path(params)]
        parts = mesh.shape["tensor"]
        order = functools.partial(creation_order, model.create)
        mine, rules = apart(rules)
        theirs, own = apart(model.rules)
        split = tensor_dims(flat, parts, rules, own, model.names(), order) if parts > 1 else Dims()
        experts = mesh.shape["expert"]
        mixed = expert_dims(flat, experts, mine, theirs, model.names()) if experts > 1 else {}
        turns = schedule is not None and schedule.placement == "V"
        stages = "cut" if strategy.cuts else str(strategy.stages)
        sharing = Sharing(shards, Pipe(ranks, strategy.chunks, turns, over, stages), parts, experts)
        others = looks_stacked(flat) | mixed | {path: split[path] for path in split.found}
        storage = make_leaves(params, trainable, sharing, split, mixed, others)
        if schedule is not None:
            check_prefetch(schedule, strategy, storage.cut)
        if schedule is not None and storage.cut:
            check_cut(schedule, strategy, [path for path, _ in flat])
        as_stacked = sees_stacked(self.optimizer, storage)
        seen, tuned = storage.seen(as_stacked)
        with transforming("optimizer.init", tuned):
            state = jax.eval_shape(naming(self.optimizer.init, flat), tuned)
        masters, tree = jax.tree.flatten(tuned)
        program = update_program(self.optimizer, tree, tuple(masters))
        sharded = "optimizer" in self.rule.sharded
        host = "optimizer" in strategy.offloads
        places = place_optimizer(state, tuned, seen, sharded, host)
        owned, wrong = None, None
        if program is not None:
            owned = Dealer(seen, axes_at_rest(storage, sharded, mesh.shape), mesh)(program)
            places = owned.stored(places)
            multiplied = {leaf.path: program.leaves.get(i, frozenset()) for i, leaf in enumerate(seen)}
            wrong = functools.partial(astray, multiplied=multiplied, factors=program.factors)
        copied = self.rule.published and shards > 1 and self.policy.compute != jnp.float32
        whole = undivided_leaves(flat, split, parts) if parts > 1 else {}
        split_by = self.rule.sharded, copied, places, split.found, whole
        self.layout = Layout(storage, self._home(), self.policy, *split_by, host="params" in strategy.offloads)
        streamed = streams(self.optimizer, self.layout, strategy.offloads, as_stacked, owned is not None)
        axes = {axis: mesh.shape[axis] for axis in ROWS if mesh.shape[axis] > 1}
        self.schedule, self.replicas = schedule, math.prod(axes.values())
        setting = {"layout": self.layout, "strategy": strategy, "axes": axes, "schedule": schedule}
        self.tracing = Tracing(model=model, astray=wrong, **setting)
        self.update = Update(self.optimizer, self.layout, self.rule, as_stacked, on_nonfinite, owned, streamed)
        self.local = Local(self.tracing, dict(ids or {}))
        self._jitted: dict[Any, Any] = {}

    chosen: tuple[Any, ...] = ()  # what remat="auto" chose for each value (`inspect/remat.py`)
    settle: Callable[[Any], Any] | None = None  # with remat="auto": of a batch's shapes, this step with its choices

    def choosing(self, choices: tuple[str, ...], chosen: tuple[Any, ...] = ()) -> Self:
        """This step where `choices` say what becomes of what each stack's layers save (`Residuals.kept`)."""
        other = copy.copy(self)
        other.chosen = chosen
        other.tracing = replace(self.tracing, choices=choices)
        other.local, other._jitted = replace(self.local, tracing=other.tracing), {}
        return other

    def _home(self) -> Mesh:
        """The mesh on which the state lives."""
        return self.mesh

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """One step: `(state, metrics)`; see `TrainStep.__call__`."""
        return self._run("train", state, batch)

    def evaluate(self, state: State, batch: Any) -> Metrics:
        """The loss and its metrics; see `TrainStep.evaluate`."""
        return self._run("evaluate", state, batch)

    def value_and_grad(self, state: State, batch: Any) -> tuple[jax.Array, Any]:
        """The loss and its gradients; see `TrainStep.value_and_grad`."""
        loss, grads = self._run("gradients", state, batch)
        return loss, self.model_def.wrap(grads) if all(f.trainable for f in self.layout.leaves) else grads

    def measured(self, state: State, batch: Any, order: np.ndarray) -> dict[str, jax.Array]:
        """The loss and figures of its gradients (`measures`) on some rows of a batch, dealt in an order.

        Args:
          state: as for the step; it is not donated.
          batch: as for the step; with several hosts as `place` gives it.
          order: int32 [rows], numbers of rows of the global batch: a multiple of replicas x microbatches. One program
            serves every order of so many.

        All blocks get the key of the first: noise depends on a row's place in its block, and not on the block.
        """
        everywhere = NamedSharding(self.mesh, _HERE)
        placed = jax.make_array_from_callback(order.shape, everywhere, lambda index: order[index])
        return self._run("measured", state, (batch, Replicated(placed)))

    def params(self, state: State) -> Any:
        """The model's own tree, unpadded, sharded where a dim divides; float32, or frozen in the compute dtype."""
        check_state(state)
        return self.model_def.wrap(self._params(state))

    def _params(self, state: State) -> Any:
        if "params" not in self._jitted:
            logical = lambda params: self.layout.to_logical(jax.tree.map(on_device, params))
            self._jitted["params"] = jax.jit(logical, out_shardings=self.layout.handed_out)
        return self._jitted["params"](state.params)

    def model(self, state: State) -> Any:
        """The user's module, NNX or bound Linen, with these parameters. Raises ValueError if the model has none."""
        if self.model_def.bind is None:
            raise ValueError("this model is a pair of functions and has no module; use step.params(state)")
        check_state(state)
        return self.model_def.bind(self._params(state), jax.tree.map(jnp.copy, state.variables))

    def compile(self, batch: Any) -> jax.stages.Compiled:
        """The training step compiled for a batch of these shapes (arrays, or `jax.ShapeDtypeStruct` of a global batch);
        nothing runs.

        With compile-only devices in the mesh, it is compiled for them.
        """
        state, batch = self._typed_state, self._typed_batch(batch)
        traced = self._function("train", batch).trace(state, batch)
        platform = {"gpu": "cuda"}.get(p := self.mesh.devices.flat[0].platform, p)
        lowered = traced.lower(lowering_platforms=(platform,))
        if self._marks:
            mark_on_host(lowered, [at for at, x in enumerate(jax.tree.leaves(state)) if isinstance(x, ShapedArray)])
        return lowered.compile()

    @property
    def _marks(self) -> bool:
        """Whether arguments on the host are marked in the program, as devices that are not there have no memories."""
        return any(self.layout.host_bytes.values()) and not has_memories(self.mesh.devices.flat[0])

    @functools.cached_property
    def _typed_state(self) -> State:
        """`abstract_state` to trace programs of; where no sharding says what is on the host, its type does."""
        state = self.abstract_state()
        if not self._marks:
            return state
        typed = lambda place, x: ShapedArray(x.shape, x.dtype, memory_space=HOST) if place.host else x
        at_rest = lambda kind, tree: jax.tree.map(typed, self.layout.places(kind), tree, is_leaf=is_stored)
        params, optimizer = at_rest("params", state.params), at_rest("optimizer", state.optimizer)
        return replace(state, params=params, optimizer=optimizer)

    def trace(self, batch: Any) -> Any:
        """The jaxpr of the training step for a batch of these shapes."""
        batch = self._typed_batch(batch)
        return self._function("train", batch).trace(self._typed_state, batch).jaxpr

    def _typed_batch(self, batch: Any) -> Any:
        """The shapes of the global batch, with the types that its arrays have when the step takes them.

        An array that lies on the devices of a mesh names this mesh in its type. `jit` traces and compiles a function
        again for another type, so a program that was compiled for shapes alone would be compiled twice.
        """
        shapes, places = self.shapes(batch), batch_shardings(batch, self.mesh)

        def typed(shape: Any, x: Any, place: NamedSharding) -> Any:
            placed = jax.process_count() > 1 or (is_array(x) and x.committed)
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place) if placed else shape

        return jax.tree.map(typed, shapes, batch, places)

    def traced(self, batch: Any) -> Traced:
        """The loss of one microbatch as the program that each device runs, and what it reads.

        Args:
          batch: a pytree of arrays or `jax.ShapeDtypeStruct` [rows, ...].

        Returns the record `Traced`, all of it abstract: `program` has the loss in pieces, `outputs` the positions of
        its results, `schedule` and `axes` how a step runs it. Nothing is compiled, unless `remat="auto"` has still to
        choose; a loss is traced once for batches of one shape. Raises ValueError where the strategy cannot run it, or
        the batch's rows do not fit.
        """
        batch, state = self.shapes(batch), self.abstract_state()
        step = self if self.settle is None else self.settle(batch)
        block = one_block(batch, self.replicas * self.strategy.microbatches)
        return step.tracing(state.variables, block, state.key)

    def may_couple(self, batch: Any) -> bool:
        """Whether reading the loss has left open if it couples rows, which was a warning; it is traced at most once."""
        return bool(self.traced(batch).notes.doubts)

    def _run(self, name: str, state: State, batch: Any) -> Any:
        check_state(state)
        leaves, tree = jax.tree.flatten(batch)
        # A batch of a kind that was already where the step wants it goes straight to jit: on a tiny model, a look at
        # every array in every step costs more than the rest of this call.
        # Types count too: jit takes a masked array without its mask once it has taken a plain one.
        kinds = ((x.sharding, x.committed) if is_array(x) else (type(x), getattr(x, "dtype", None)) for x in leaves)
        places = list(zip(map(np.shape, leaves), kinds, strict=True))
        inside = any(isinstance(x, Tracer) for x in (state.step, *leaves))
        kind = ("in place", name, inside, tree, *places)
        if (run := self._jitted.get(kind)) is None:
            placed = self._take_in(batch)
            run = self._function(name, placed, inside)
            if all(a is b for a, b in zip(leaves, jax.tree.leaves(placed), strict=True)):
                self._jitted[kind] = run
            batch = placed
        if inside:
            state = replace(state, step=order.follow(state.step))
        try:
            result = run(state, batch)
        except (TypeError, ValueError) as error:  # jax does not say which array of the state it means
            if wrong := misfit(state, self.abstract_state()):
                raise ValueError(wrong) from error
            raise
        if inside:
            order.leave(result[0].step if name == "train" else jax.tree.leaves(result)[0])
        return result

    def _function(self, name: str, batch: Any, inside: bool = False) -> Any:
        """The jitted function; `inside` a caller's `jit` nothing is donated."""
        if self.settle is not None:
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), batch)
            return self.settle(shapes)._function(name, batch, inside)
        leaves, tree = jax.tree.flatten(batch)
        key = (name, inside, tree, *(np.shape(x) for x in leaves))
        if key not in self._jitted:
            state, rows = self._shardings, batch_shardings(batch, self.layout.mesh)
            fun, outs, donate = {
                "train": (self._train, (state, None), (0,)),
                "evaluate": (self._evaluate, None, ()),
                "gradients": (self._value_and_grad, None, ()),
                "measured": (self._measured, None, ()),
            }[name]
            ahead = self.strategy.prefetches(self.mesh)
            run = jax.jit(
                naming(fun, shapes_of(self.layout, batch)),
                in_shardings=(state, rows),
                out_shardings=outs,
                # Within a caller's program XLA sees to that; under grad and vmap the caller may need the state again.
                donate_argnums=() if inside else donate,
                keep_unused=self._marks,  # or positions would not be those of arguments
                # XLA takes options of whole programs alone.
                compiler_options=None
                if inside
                else compiler_options(
                    self.mesh,
                    ("data", *SHARDS) if ahead else SHARDS,
                    ahead=ahead,
                    fp8=self.strategy.precision == "fp8",
                    on_host="activations" in self.strategy.offloads,
                ),
            )
            if not inside:  # what is traced here is traced once: jit keeps it
                check_reached(run.trace(self._typed_state, batch).jaxpr)
            self._jitted[key] = run
        return self._jitted[key]

    def _train(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """One training step, for `_function` to compile: all that is wrapped around a loss.

        `Tracing` (step/tracing.py) has the first half: trace, rewrite, slice. What it makes goes on here:

            schedule    step/gradients.py   forwards and backwards, one microbatch after another or, in step/pipeline.py
                                            and parallel/pipeline/, in the order of a schedule's table
            rule        parallel/           within these, how parameters are fetched and gradients are reduced
            place       layout/             that on every device, on its part of each leaf
            update      step/update.py      the optimizer, on logical leaves that stay where they are
        """
        scheduled = self.local.gradients
        placed = self._placed(scheduled, batch)
        return self.update(state, *placed(state), writes=self.tracing.writes)

    def _value_and_grad(self, state: State, batch: Any) -> tuple[jax.Array, Any]:
        return self.handed_out(*self._placed(self.local.gradients, batch)(state))

    def handed_out(self, grads: Any, variables: Any, sums: Sums) -> tuple[jax.Array, Any]:
        """The loss and its gradients in the model's own tree."""
        return metrics_of(sums)["loss"], self.layout.to_logical(grads, "grads")

    def _measured(self, state: State, ordered: Any) -> dict[str, jax.Array]:
        def gradients(stored: Any, variables: Any, ordered: Any, *rest: Any) -> Any:
            batch, order = ordered
            return self.local.gradients(stored, variables, self.local.deal(batch, order.value), *rest, alike=True)

        grads, _, sums = self._placed(gradients, ordered)(state)
        return measures(grads, sums)

    def _evaluate(self, state: State, batch: Any) -> Metrics:
        sums, _ = self.mapped(self.local.evaluate, batch, _HERE)(state.step, self._weights(state), state.variables)
        return metrics_of(sums)

    def _placed(self, gradients: Callable, batch: Any) -> Callable[[State], tuple[Any, Any, Sums]]:
        """From the gradients of one device's rows to those of all: a function of the state, which returns float32
        gradients as `_unscaled` gives them, new variables, and sums.
        """
        run = self.mapped(gradients, batch, (self.layout.specs("grads"), _HERE, _HERE))

        def placed(state: State) -> tuple[Any, Any, Sums]:
            scale = state.scale.scale if state.scale is not None else jnp.float32(1)
            weights, variables = self._weights(state), state.variables
            (grads, variables, sums), _ = run(state.step, weights, variables, state.key, state.step, scale)
            return self._unscaled(grads, state), variables, sums

        return placed

    def mapped(self, fun: Callable, batch: Any, outs: Any) -> Callable[..., tuple[Any, Token | None]]:
        """`fun` on every device, for a batch of these leaves: a function of the step's number, what is stored of the
        weights, variables, batch, and whatever is the same everywhere.

        `fun(stored leaves, variables, batch, *replicated)` gets local values; its results have the specs
        `outs`. None of them is there before its collectives are done, and the second result is the token after these.
        """
        specs = self.layout.specs("copy" if self.layout.copied else "params")

        def call(step: jax.Array, stored: Any, variables: Any, *rest: Any) -> tuple[Any, Token | None]:
            check_context(self.mesh)
            ins = (_HERE, specs, _HERE, batch_specs(batch), *([_HERE] * len(rest)))
            run = order.in_order(without_filter_primitives(fun), self.mesh)

            def last(token: Token | None, *args: Any) -> tuple[Any, Token | None]:
                result, token = run(token, *args)
                return order.behind(token, result), token  # what the partitioner adds outside comes after all that

            mapped = jax.shard_map(last, mesh=self.mesh, in_specs=ins, out_specs=(outs, _HERE), check_vma=False)
            return mapped(order.first_token(step, self.mesh), jax.tree.leaves(stored), variables, batch, *rest)

        return call

    def _weights(self, state: State) -> Any:
        """What a step's programs read of the parameters."""
        return state.copy if self.layout.copied else state.params

    def _unscaled(self, grads: Sequence[jax.Array | None], state: State) -> Any:
        """Reduced gradients -> those of the unscaled loss: float32, unpadded, in the leaves' tree, None if frozen."""
        trainable = [leaf for leaf in self.layout.leaves if leaf.trainable]
        whole, tree = jax.tree.flatten(self.layout.to_logical(self.layout.unflatten(grads), "grads", as_stacked=True))
        whole = [g.astype(Policy.master(leaf.dtype)) for leaf, g in zip(trainable, whole, strict=True)]
        return jax.tree.unflatten(tree, whole if state.scale is None else [g / state.scale.scale for g in whole])
