"""make_train_step: a model, an optimizer and a strategy make a step, which can also show what it holds and sends."""

import collections
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import Mesh

from .backend.buckets import Place
from .backend.compile_cache import keep_compiled
from .checkpoint.checkpoints import Checkpoints
from .checkpoint.commit import wait_for
from .checkpoint.restore import extras, restored, weights
from .checkpoint.saved import Checkpoint
from .hosts import ending, initialize
from .layout.mesh import make_mesh
from .layout.state import State
from .model.model import Model
from .parallel.tensor.dims import Rules
from .step import unseen
from .step.agreement import Agreement, kind_of
from .step.checks import check_made_of, check_state
from .step.core import Step
from .step.gradients import Metrics
from .step.refusals import warn_idle
from .step.server import ServerStep
from .strategy import Strategy, as_strategy

if TYPE_CHECKING:  # a step that explains nothing does not load what explains
    from .inspect.check import RowCheck
    from .inspect.explain import Explanation
    from .inspect.nonfinite import Nonfinite


def make_train_step(
    model: Model,
    optimizer: optax.GradientTransformation | None,
    strategy: Strategy | str = "single",
    mesh: Mesh | Sequence[jax.Device] | None = None,
    trainable: Callable[[str], bool] | None = None,
    rules: Rules | None = None,
    check: bool | Literal["overlap"] = False,
    rows: str = "global",
    skip_nonfinite: bool = False,
    ids: Mapping[str, int] | None = None,
    trace_nonfinite: bool = False,
) -> "TrainStep":
    """A training step of `model` under `strategy`, with the mathematics of one device.

    Args:
      model: from `from_nnx`, `from_linen`, `from_equinox` or `Model(init=..., loss=...)`.
      optimizer: any optax transformation of gradients, parameters and the loss's `value`, which is all that a step has
        (L-BFGS asks for the loss as a function); it sees whole, logical leaves, whatever their layout. Leaves for which
        the model has a rule of its own (`Model.optimizer`) are left to that. None for gradients alone
        (`step.value_and_grad`) and evaluation: there is no optimizer state, and no step to take.
      strategy: a `Strategy` or its text, such as "fsdp" or "data=2,fsdp=4,precision=bf16".
      mesh: a mesh or devices; all devices if None. Compile-only devices serve for `step.compile`.
      trainable: `trainable(path) -> bool` for paths such as "layers/attention/query/kernel"; the rest is frozen: no
        gradients, no optimizer state, no float32 masters under bf16 and f16. All floating-point and complex leaves if
        None.
      rules: for `tensor`, which dim of which parameter is split: patterns of paths, or logical names of the model's
        annotations (`parallel/tensor/dims.py`). They come before what the model and jaxpar know themselves.
      check: prove, before a step first runs on a batch of some shapes (and in `step.compile`), that its compiled
        program does what the strategy promises: see `inspect/check/`. ValueError names each promise that is broken,
        and nothing has run. Nothing is compiled twice for it. "overlap": on GPUs, also that what layers send is hidden.
      rows: with several hosts, what a batch given to the step is: "global", the same on every host, which keeps its
        part; or "host", this host's own rows, as many as every other's, in the order of hosts along the mesh. Hosts
        that hold stages of one pipeline then give the same rows. With one host both are the same.
      skip_nonfinite: do not apply a step whose loss or gradients have a NaN or an infinity: parameters, optimizer state
        and mutable state stay as they are, `metrics["finite"]` is False, and the step's number goes on. Other steps are
        what they would be, to the bit; it costs a few kernels, and no memory.
      ids: leaves of the batch that hold ids, such as {"tokens": 32_000}, and how many there are, as for `jp.check_ids`:
        the step counts those that are not below, and `metrics["outside/tokens"]` is their share of all ids of the leaf.
        Two numbers a leaf join the all-reduce of the metrics.
      trace_nonfinite: after a step whose loss or gradients have a NaN or an infinity, find the equation that made it
        (`step.trace_nonfinite`) and raise `FloatingPointError` with its line, rank and rows (`NonfiniteError`). Nothing
        waits for it: such a step and what comes after it are not applied, each call looks at the steps that are done
        (with several hosts, at all but its own), and `step.wait(state)`, `step.save` and `step.evaluate` at the last.
        If none of them follows, the next `make_train_step` raises, or the process says it at its end and exits with
        status 1. A batch is kept until its step is seen: do not write into its arrays. Costs what `skip_nonfinite`
        does. Under float16, gradients that overflow by the loss's scale are no fault until it is 1.

    Raises ValueError on anything that does not fit, naming what was given, what is needed, and what to try. Warns where
    a pipeline has one microbatch, and so one rank that works at a time, and where an optimizer multiplies layers of a
    stack with one another.
    """
    unseen.look()  # at what an earlier step was given last
    strategy = as_strategy(strategy)
    check_made_of(model, optimizer, trainable, rows, ids, check)
    mesh = make_mesh(strategy, mesh)
    keep_compiled(mesh.devices.flat[0])
    strategy = strategy.on(mesh.shape["pipe"])
    warn_idle(mesh.shape["pipe"], strategy.microbatches)
    kind = ServerTrainStep if strategy.server else TrainStep
    on_nonfinite = "stop" if trace_nonfinite else "skip" if skip_nonfinite else "apply"
    step = kind(model, _transformation(model, optimizer), strategy, mesh, trainable, rules, on_nonfinite, ids)
    step.proves, step.rows, step.updates, step.traces = check, rows, optimizer is not None, trace_nonfinite
    if check == "overlap":
        from .inspect.check.overlap import hardware_of

        hardware_of(step)  # refuses before anything is compiled
    return step


def _transformation(model: Model, optimizer: optax.GradientTransformation | None) -> optax.GradientTransformation:
    """The optimizer with the rules that the model has for its own leaves; without an optimizer, nothing changes."""
    if optimizer is None:
        return optax.set_to_zero()
    return optimizer if model.optimizer is None else model.optimizer(optimizer)


_SHOWN = (
    "check_replicas check_rows compare compile evaluate explain init layout mesh model params part place replicas "
    "restore restore_extra save schedule send strategy trace trace_nonfinite traced value_and_grad wait with_params"
).split()


class TrainStep(Step):
    """A compiled training step; see `make_train_step`. `layout`, `mesh` and `strategy` may be read."""

    proves: bool | str = False  # whether what is compiled is checked before it runs
    updates = True  # whether it has an optimizer
    traces = False  # whether each call looks if steps before were finite, and raises where one was not

    def __init__(self, *args: Any) -> None:
        initialize.check_joined()
        super().__init__(*args)
        self._agreement = Agreement(self)
        self._proven: set[Any] = set()
        self._saves: dict[Any, Checkpoints] = {}
        self._settled: dict[Any, TrainStep] = {}
        self._calls = collections.deque[_Call]()
        if self.strategy.remat == "auto":
            self.settle = self._chosen

    def __repr__(self) -> str:
        kinds = next(iter({device.device_kind for device in self.mesh.devices.flat}))
        return f"{type(self).__name__}({str(self.strategy)!r} on {self.mesh.size} x {kinds})"

    def __dir__(self) -> list[str]:
        """What a user calls and reads; the rest is the step's own."""
        return [*_SHOWN]

    def init(self, key: jax.Array, params: Any = None, fresh: Callable[[str], bool] | None = None) -> State:
        """A new state, created sharded; the same values under every layout.

        Args:
          key: a key from `jax.random.key`; parameters are `model.init(key)`.
          params: start from these parameters instead, a tree like `step.params(state)`; the source is left intact.
          fresh: `fresh(path)` for the paths that `params` need not have, and that are as without it: fresh adapters
            beside a given base.

        Raises ValueError where a path is missing or unknown, or a leaf's shape is not the model's. Several processes
        compare strategy, versions, parameters' shapes and key first.
        """
        self._agreement.on_state(key, params)
        return super().init(key, params, fresh)

    def with_params(self, state: State, params: Any) -> State:
        """The state with other parameters: an average of them, merged adapters, what an update of your own made.

        Args:
          state: as for the step; it is neither changed nor donated, and shares all but its parameters with what is
            returned, so that one of the two goes into the next step.
          params: a tree like `step.params(state)`, also within a `jit` of your own; it is left intact.

        Raises ValueError where a path is missing or unknown, or a leaf's shape is not the model's.
        """
        self._look()
        return super().with_params(state, params)

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """One step: `(state, metrics)`. The state given is donated.

        Args:
          state: from `init` or the last step.
          batch: a pytree of arrays [rows, ...]; `jp.Replicated` marks leaves without rows. With several hosts it is
            the same on all of them, or with `rows="host"` each host's own rows.

        Returns metrics as scalars, float32 but for `finite` and `skipped`: `loss` (of all rows, before the update),
        `grad_norm`, `finite` (whether both are), `skipped` (steps skipped so far, float16), with `ids` `outside/tokens`
        and so on, and the loss's own. With `check=True` the program is checked before it first runs. Several processes
        first compare what they are about to run: ValueError in all of them names what differs.
        """
        if not self.updates:
            raise ValueError(
                "this step was made with optimizer=None, and takes none: use step.value_and_grad(state, batch), and "
                "step.with_params(state, params) with what you make of it; or give an optimizer"
            )
        if self.proves:
            self._prove(batch)
        if self.traces and _traced(state, batch):
            raise ValueError(
                "trace_nonfinite=True looks at what a step has given, and within a jit of your own there is nothing to "
                "see yet; use skip_nonfinite=True, and step.trace_nonfinite(state, batch) where metrics['finite'] is "
                "False"
            )
        if self._calls and self._calls[-1].state is not state:
            self._look()
        if not self._agreement.needed or _traced(state, batch):
            after, metrics = super().__call__(state, batch)
        else:
            batch = self.place(batch)
            self.compare(batch)
            with ending.step():
                after, metrics = super().__call__(state, batch)
        if self.traces:
            self._calls.append(_Call(after, metrics.pop("stopped"), batch))
            unseen.expect(self._look)
            self._look(wait=False)
        return after, metrics

    def wait(self, state: State) -> State:
        """The state, once it is computed.

        Raises NonfiniteError where, with `trace_nonfinite=True`, one of the last steps was not finite: after the last
        call of a loop nothing else looks at them.
        """
        self._look()
        return jax.block_until_ready(state)

    def _look(self, wait: bool = True) -> None:
        """Raise NonfiniteError where a call's step was not finite. What came after it was not applied either.

        Args:
          wait: for all of them; else one is looked at that is done. Processes look at the same: at all but the last.
        """
        calls, together = self._calls, jax.process_count() > 1
        while calls and (wait or (len(calls) > 1 if together else calls[0].stopped.is_ready())):
            if (call := calls.popleft()).stopped:
                after, undone = (calls[-1] if calls else call).state, tuple(later.batch for later in calls)
                calls.clear()
                unseen.forget(self._look)
                from .inspect.nonfinite import NonfiniteError

                found = self.trace_nonfinite(replace(after, step=-after.step - 1), call.batch)
                raise NonfiniteError(found, replace(after, step=-after.step), call.batch, undone)
        if not calls:
            unseen.forget(self._look)

    def trace_nonfinite(self, state: State, batch: Any, device: jax.Device | None = None) -> "Nonfinite":
        """Where the NaN or infinity of a step begins: the equation with its line, module, layer and operands, the
        microbatch, the rank and the rows, and whether the batch or the parameters bring it. Print it.

        Args:
          state: of before the step, whose number is that of the random keys. With `skip_nonfinite=True` it is what the
            step returned, but for the number: dataclasses.replace(state, step=state.step - 1).
          batch: as for the step.
          device: where it is computed; the first of this host's in the mesh if None. It needs the memory of all
            parameters in the compute dtype, their gradients, and one block's activations (a microbatch of one replica);
            `jax.devices("cpu")[0]` has the host's.

        The step is computed again by the loss's own program, block by block: a forward of each, and where these are
        finite a gradient of each; of the first that is not, the rows one by one, and then its equations one by one,
        each compiled for itself. Communicates an all-gather of parameters, batch and variables; with several hosts, all
        must call it.
        """
        from .inspect.nonfinite import Replay

        batch = self._agreed("trace", state, batch)
        return Replay(self, state, batch, device or self.mesh.local_devices[0]).found()

    def evaluate(self, state: State, batch: Any) -> Metrics:
        """The loss and its metrics, without update and without dropout."""
        return super().evaluate(state, self._agreed("evaluate", state, batch))

    def value_and_grad(self, state: State, batch: Any) -> tuple[jax.Array, Any]:
        """The loss and its gradients for the next step's keys, in the model's own tree (None for frozen leaves)."""
        return super().value_and_grad(state, self._agreed("gradients", state, batch))

    def _agreed(self, name: str, state: State, batch: Any) -> Any:
        """The batch, as several processes have found that all of them have it; the state is of finite steps."""
        self._look()
        if self._agreement.needed and not _traced(state, batch):
            batch = self.place(batch)
            self._agreement.on_batch(name, batch)
            ending.alive()
        return batch

    def place(self, batch: Any) -> Any:
        """A batch as the step's programs take it, as the step does itself: with several hosts global arrays."""
        self._agreement.note(batch)
        return super().place(batch)

    def send(self, batch: Any) -> Any:
        """A batch on its devices: for a thread that reads ahead. Raises ValueError where rows do not fit."""
        self._agreement.note(batch)
        return super().send(batch)

    def compare(self, batch: Any) -> None:
        """Raise ValueError in every process of a run where any is about to run another program on a batch of these
        shapes, naming what differs and where. A step does this itself for the first batch of each kind.

        Args:
          batch: as for the step. All processes call it, with theirs.
        """
        self._agreement.on_program(batch)

    def compile(self, batch: Any) -> jax.stages.Compiled:
        """The training step compiled for a batch of these shapes, arrays or `jax.ShapeDtypeStruct`; nothing runs."""
        compiled = super().compile(batch)
        if self.proves:
            self._prove(batch, compiled)
        return compiled

    def _chosen(self, batch: Any) -> "TrainStep":
        """With remat="auto", this step with its choices for a batch of these `jax.ShapeDtypeStruct`; see
        `inspect/remat.py`, which compiles some programs.

        Raises ValueError where none of them fits the budget: what holds the memory, and the nearest budget that does.
        """
        if (kind := kind_of(batch)) not in self._settled:
            from .inspect.remat import settle

            trial = copy.copy(self)
            trial.proves, trial.settle = False, None  # what is chosen is proven, and not what was tried
            self._settled[kind] = settle(trial, batch)
        return self._settled[kind]

    def explain(self, batch: Any) -> "Explanation":
        """What the training step holds and sends per device: print it, or take `.json()`. Nothing runs.

        Memory, matrix products and collectives of the compiled program, the collectives beside their closed form, what
        is not sharded and why, what the update moves.

        Args:
          batch: as for `compile`.
        """
        from .inspect.explain import explain

        step = self if self.settle is None else self._chosen(self.shapes(batch))
        return explain(step, self.shapes(batch) if self.rows == "host" else batch)

    def check_replicas(self, state: State) -> None:
        """Raise ValueError where devices that should hold the same of an array do not, to the bit; it names the first
        such array of the state, the odd devices and their processes: of two replicas both, as there is no majority.

        Reads the state once on every device; with several hosts, all must call it. A server's state has no replicas.
        """
        from .inspect.check import replicas

        check_state(state)
        if self.layout.mesh.size > 1:
            abstract = self.abstract_state()
            if "replicas" not in self._jitted:
                specs = [x.sharding.spec for x in jax.tree.leaves(abstract)]
                self._jitted["replicas"] = replicas.checksums(self.layout.mesh, specs)
            sums = np.asarray(self._jitted["replicas"](jax.tree.leaves(state)))
            replicas.check(abstract, sums, self.mesh, int(state.step))

    def check_rows(self, state: State, batch: Any) -> "RowCheck":
        """Whether the loss couples rows, by running it: a batch and the same rows dealt otherwise over replicas and
        microbatches have the same loss and gradients, and half of each block's rows have those of that half twice.

        Print what is returned, or look at its `ok` and `coupled`; `require()` raises ValueError where rows are coupled.

        Args:
          state: as for the step; it is neither changed nor donated.
          batch: as for the step, of rows that differ: equal ones tell nothing.

        What dealing may change stays as it is: where the loss takes all rows (`jp.all_rows`, BatchNorm) they stay in
        their microbatch, and where it draws random numbers (dropout) in their place, with one key for all blocks. What
        cannot be seen is in `unjudged`, and is neither `ok` nor `coupled`. Compared are the loss and of every leaf's
        gradient the norm and a sum, to rounding.

        Costs four evaluations of the gradients, in about a step's memory, and at the first call the compilation of two
        programs, each like the step without its update; where something differs a few evaluations more, one of them
        with another copy of the parameters. Communicates what a step does, and an all-gather of the batch. With several
        hosts, all must call it.
        """
        from .inspect.check import check_rows

        return check_rows(self, state, self._agreed("check", state, batch))

    def save(
        self,
        folder: Place | str,
        state: State,
        data: Mapping[str, Any] | None = None,
        keep: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Checkpoints:
        """Saves a state in the background, as `folder/<state.step>`; it may be donated to the next step at once.

        Waits for the copy from the devices to the host, and where the save before is still being written, for that.
        With several hosts all must call it, with a folder that all of them see.

        Args:
          folder: of all checkpoints of the run, made if need be; or an address, "s3://bucket/run" or "gs://...".
          state: as a step returned it.
          data: where in the data the run is, as JSON: given back as `jp.Checkpoint(folder).data`.
          keep: how many are kept, the last ones; all if None.
          extra: trees of arrays that are no part of the state, by name, such as an average of the parameters or the
            parameters of a second model: given back by `restore_extra`.

        Returns the folder's `Checkpoints`, whose `wait()` returns when all is on disk; so does the end of the program.
        Raises ValueError where the save before could not be written.
        """
        self._look()
        saves = self._saves.get(key := (str(folder), keep))
        if saves is None:
            saves = self._saves[key] = Checkpoints(folder, self, {}, keep)
        saves.save(int(state.step), state, data, extra)
        return saves

    def restore(
        self,
        folder: Place | str,
        weights_only: bool = False,
        key: jax.Array | None = None,
        fresh: Callable[[str], bool] | None = None,
    ) -> State:
        """The state in a checkpoint, of whatever strategy, devices, hosts: each device reads its own part of each leaf.

        Args:
          folder: of a checkpoint, or of several: the last.
          weights_only: parameters and variables alone, in a new state: the optimizer, the number of the step and the
            loss scale begin anew.
          key: with `weights_only`, that of the new state; `jax.random.key(0)` if None.
          fresh: with `weights_only`, `fresh(path)` for the paths of parameters that begin as the model's own: fresh
            adapters beside a given base.

        What this process is still saving there is waited for. Raises ValueError where the checkpoint is of another
        model or optimizer, or another dtype (nothing is cast), or damaged: naming the array, and the file.
        """
        wait_for(folder)
        saved = Checkpoint(folder)
        if weights_only:
            return weights(self, saved, jax.random.key(0) if key is None else key, fresh)
        if key is not None or fresh is not None:
            raise ValueError("key= and fresh= are for weights_only=True: a whole state has its own key and parameters")
        return restored(self, saved)

    def restore_extra(self, folder: Place | str, like: Mapping[str, Any]) -> dict[str, Any]:
        """The trees that were saved beside a state, by name, in any layout: each device reads its own part.

        Args:
          folder: of a checkpoint, or of several: the last.
          like: trees of the same shapes and dtypes by name, where the arrays are to be: {"ema": step.params(state)}. A
            checkpoint may have others.

        Raises ValueError where one is missing, or of another shape or dtype, or damaged.
        """
        wait_for(folder)
        return extras(self, Checkpoint(folder), like)

    def _prove(self, batch: Any, compiled: jax.stages.Compiled | None = None) -> None:
        """Raise ValueError unless the program for a batch of these shapes keeps the strategy's promises; once each."""
        if (kind := kind_of(batch)) in self._proven:
            return
        from .inspect.check import check

        if compiled is None and not self.strategy.server:
            compiled = super().compile(batch)  # jit finds it afterwards
        check(self, self.shapes(batch), compiled, self.proves == "overlap").require()
        self._proven.add(kind)


def _traced(state: Any, batch: Any) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves((state, batch)))


class _Call(NamedTuple):
    """A call of a step that has not been looked at: the state that it returned, whether that has stopped, its batch."""

    state: State
    stopped: Any
    batch: Any


class ServerTrainStep(TrainStep, ServerStep):
    """A `TrainStep` whose state lives on the first device of the mesh."""
