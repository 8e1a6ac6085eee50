"""`make_train_step` and the step that it returns.

`TrainStep` has the methods that users call. It adds comparisons between processes, checks, checkpoints and reports to
the compiled programs of `Step` (`step/core.py`).
"""

import collections
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from .backend.buckets import Place
from .backend.compile_cache import keep_compiled
from .checkpoint.checkpoints import Checkpoints
from .checkpoint.restore import extras, restored, weights
from .checkpoint.saved import Checkpoint
from .hosts import ending, initialize
from .layout.mesh import make_mesh
from .layout.state import State
from .model.model import Model
from .parallel.tensor.dims import Rules
from .step import unseen
from .step.agreement import Agreement, batch_kind
from .step.checks import check_made_of, check_state, is_traced
from .step.core import Step
from .step.gradients import Metrics
from .step.loss_warnings import warn_idle
from .step.server import ServerStep
from .strategy import Strategy, as_strategy

if TYPE_CHECKING:  # reports are imported where they are called: a plain step does not load them
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
    """Return a training step of `model` under `strategy`, with the mathematics of one device.

    Args:
      model: from `from_nnx`, `from_linen`, `from_equinox` or `Model(init=..., loss=...)`.
      optimizer: any optax transformation of gradients, parameters and the loss's `value`. It sees whole, logical
        leaves, whatever their layout. A step has nothing else to give: L-BFGS, which needs the loss as a function, does
        not fit. Leaves for which the model has a rule of its own (`Model.optimizer`) are updated by that rule. None
        makes a step for gradients (`step.value_and_grad`) and evaluation, without optimizer state.
      strategy: a `Strategy` or its text, such as "fsdp" or "data=2,fsdp=4,precision=bf16".
      mesh: a mesh or devices; all devices if None. Compile-only devices serve for `step.compile`.
      trainable: `trainable(path) -> bool` for paths such as "layers/attention/query/kernel". All other leaves are
        frozen: no gradients, no optimizer state, no float32 masters under bf16 and f16. None trains all floating-point
        and complex leaves.
      rules: for `tensor`, which dim of which parameter is split: patterns of paths, or logical names of the model's
        annotations (`parallel/tensor/dims.py`). They come before the rules of the model and of jaxpar.
      check: prove that the compiled program does what the strategy promises (`inspect/check/`), before a step first
        runs on a batch of some shapes, and in `step.compile`. ValueError names each broken promise, before anything has
        run. Nothing is compiled twice for it. "overlap" also proves, on GPUs, that communication of layers overlaps
        with compute.
      rows: with several hosts, whose rows a batch holds. "global": the same batch on every host, which keeps its part.
        "host": this host's own rows, as many as every other's, in the order of hosts along the mesh; hosts that hold
        stages of one pipeline then give the same rows. With one host both are the same.
      skip_nonfinite: do not apply a step whose loss or gradients have a NaN or an infinity. Parameters, optimizer state
        and mutable state stay as they are, `metrics["finite"]` is False, and the step's number increases. Finite steps
        do not change by a bit. It costs a few kernels, and no memory.
      ids: leaves of the batch that hold ids, and how many ids there are, such as {"tokens": 32_000} (see
        `jp.check_ids`). `metrics["outside/tokens"]` is then the share of ids that are not below this number. Two
        numbers per leaf join the all-reduce of the metrics.
      trace_nonfinite: after a step whose loss or gradients have a NaN or an infinity, find the equation that made it
        (`step.trace_nonfinite`) and raise `FloatingPointError` with its line, rank and rows (`NonfiniteError`). Neither
        this step nor any later one is applied. Nothing waits for the check: each call looks at the steps that are done
        (with several hosts, at all but its own), and `step.wait(state)`, `step.save` and `step.evaluate` look at all.
        If none of these follows, the next `make_train_step` raises the error, or the process reports it at its end and
        exits with status 1. A batch is kept until its step is checked: do not write into its arrays. It costs what
        `skip_nonfinite` costs. Under float16, gradients that overflow by the loss's scale are no fault until it is 1.

    Raises ValueError on anything that does not fit, naming what was given, what is needed, and what to try. Warns of a
    pipeline with one microbatch, in which one rank works at a time, and of an optimizer that multiplies layers of a
    stack with one another.
    """
    unseen.check_all()  # a step with trace_nonfinite=True that nobody has waited for may have stopped
    # 1. Check the arguments, and place the strategy on a mesh.
    strategy = as_strategy(strategy)
    check_made_of(model, optimizer, trainable, rows, ids, check)
    mesh = make_mesh(strategy, mesh)
    keep_compiled(mesh.devices.flat[0])
    strategy = strategy.on(mesh.shape["pipe"])
    warn_idle(mesh.shape["pipe"], strategy.microbatches)

    # 2. Make the step. It traces shapes alone; programs are compiled when batches arrive.
    step_class = ServerTrainStep if strategy.server else TrainStep
    on_nonfinite = "stop" if trace_nonfinite else "skip" if skip_nonfinite else "apply"
    step = step_class(model, _transformation(model, optimizer), strategy, mesh, trainable, rules, on_nonfinite, ids)
    step.proves, step.rows, step.updates, step.traces = check, rows, optimizer is not None, trace_nonfinite
    if check == "overlap":
        from .inspect.check.overlap import hardware_of

        # Raises ValueError for devices whose overlap cannot be read, before anything is compiled.
        hardware_of(step)
    return step


def _transformation(model: Model, optimizer: optax.GradientTransformation | None) -> optax.GradientTransformation:
    """Return the optimizer with the model's rules for its own leaves; for None, one that changes nothing."""
    if optimizer is None:
        return optax.set_to_zero()
    return optimizer if model.optimizer is None else model.optimizer(optimizer)


_PUBLIC_NAMES = (
    "check_replicas check_rows compare compile evaluate explain init layout mesh model params part place replicas "
    "restore restore_extra save schedule send strategy trace trace_nonfinite traced value_and_grad wait with_params"
).split()


class TrainStep(Step):
    """A compiled training step; see `make_train_step`. `layout`, `mesh` and `strategy` may be read."""

    proves: bool | str = False  # whether a program is checked before it runs, "overlap" if its overlap is too
    updates = True  # whether the step has an optimizer
    traces = False  # whether each call checks that earlier steps were finite

    def __init__(self, *args: Any) -> None:
        initialize.check_joined()
        super().__init__(*args)
        self._agreement = Agreement(self)
        self._proven: set[Any] = set()  # kinds of batches whose program has been checked
        self._saves: dict[Any, Checkpoints] = {}  # by folder, and how many are kept
        self._settled: dict[Any, TrainStep] = {}  # kind of batch -> the step with the choices for it
        self._calls = collections.deque[_Call]()  # calls that have not been checked, oldest first
        if "auto" in (self.strategy.remat, self.strategy.concurrent):
            self.settle = self._settle

    def __repr__(self) -> str:
        kind = self.mesh.devices.flat[0].device_kind
        return f"{type(self).__name__}({str(self.strategy)!r} on {self.mesh.size} x {kind})"

    def __dir__(self) -> list[str]:
        """Return the public names."""
        return [*_PUBLIC_NAMES]

    def init(self, key: jax.Array, params: Any = None, fresh: Callable[[str], bool] | None = None) -> State:
        """Create a state, sharded from the start; it has the same values under every layout.

        Args:
          key: a key from `jax.random.key`; parameters are `model.init(key)`.
          params: start from these parameters instead, a tree like `step.params(state)`; it is not changed.
          fresh: returns whether `params` may lack the leaf of a path, which then gets the model's initial value: new
            adapters on a given base.

        Raises ValueError if a path is missing or unknown, or a leaf's shape is not the model's. Several processes first
        compare strategy, versions, parameters' shapes and key.
        """
        self._agreement.on_state(key, params)
        return super().init(key, params, fresh)

    def with_params(self, state: State, params: Any) -> State:
        """Return the state with other parameters: an average, merged adapters, or the result of your own update.

        Args:
          state: as for the step; it is neither changed nor donated. It shares everything else with the returned state,
            so that only one of the two may go into the next step.
          params: a tree like `step.params(state)`, also within a `jit` of your own; it is not changed.

        Raises ValueError if a path is missing or unknown, or a leaf's shape is not the model's.
        """
        self._check_finite()
        return super().with_params(state, params)

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """Take one step: return `(state, metrics)`. The given state is donated.

        With `check=True` the program is checked before it first runs. Several processes first compare what they are
        about to run: ValueError in all of them names what differs.

        Args:
          state: from `init` or the last step.
          batch: a pytree of arrays [rows, ...]; `jp.Replicated` marks leaves without rows. With several hosts it is
            the same on all of them, or with `rows="host"` each host's own rows.

        Returns the next state, and metrics as scalars, all float32 except `finite` and `skipped`: `loss` (of all rows,
        before the update), `grad_norm`, `finite` (whether both are), `skipped` (steps skipped so far under float16),
        `outside/<leaf>` for each of `ids`, and the loss's own metrics.
        """
        # 1. Checks before anything runs.
        if not self.updates:
            raise ValueError(
                "this step was made with optimizer=None, so it cannot update; use step.value_and_grad(state, batch), "
                "and step.with_params(state, params) with your own update, or give an optimizer"
            )
        if self.proves:
            self._prove(batch)
        if self.traces and is_traced(state, batch):
            raise ValueError(
                "trace_nonfinite=True reads the results of steps on the host, and within a jit of your own they have "
                "no values; use skip_nonfinite=True, and step.trace_nonfinite(state, batch) if metrics['finite'] is "
                "False"
            )
        # A state that is not the last one returned begins another loop, and ends the one before.
        if self._calls and self._calls[-1].state is not state:
            self._check_finite()

        # 2. The step. In a run of several processes, each first compares its batch and program with the others'.
        if not self._agreement.needed or is_traced(state, batch):
            next_state, metrics = super().__call__(state, batch)
        else:
            batch = self.place(batch)
            self.compare(batch)
            with ending.step():
                next_state, metrics = super().__call__(state, batch)

        # 3. Check the steps that are done, without waiting for this one.
        if self.traces:
            self._calls.append(_Call(next_state, metrics.pop("stopped"), batch))
            unseen.expect(self._check_finite)
            self._check_finite(wait=False)
        return next_state, metrics

    def wait(self, state: State) -> State:
        """Wait until a state is computed, and return it.

        Raises NonfiniteError if, with `trace_nonfinite=True`, one of the last steps was not finite.
        """
        self._check_finite()
        return jax.block_until_ready(state)

    def _check_finite(self, wait: bool = True) -> None:
        """Raise NonfiniteError if the step of an unchecked call was not finite; no later step was applied either.

        Args:
          wait: check all calls, else only those that are done. Several processes must check the same calls, since the
            search for the equation communicates: then all calls except the last are checked.
        """
        calls, several_processes = self._calls, jax.process_count() > 1
        while calls and (wait or (len(calls) > 1 if several_processes else calls[0].stopped.is_ready())):
            if (call := calls.popleft()).stopped:
                # Later steps changed nothing, so that the last state still has the values before the faulty step.
                last_state, undone = (calls[-1] if calls else call).state, tuple(later.batch for later in calls)
                calls.clear()
                unseen.forget(self._check_finite)
                from .inspect.nonfinite import NonfiniteError

                # `Update` made the number negative: -n for the faulty step n, which started from the number n - 1.
                finding = self.trace_nonfinite(replace(last_state, step=-last_state.step - 1), call.batch)
                raise NonfiniteError(finding, replace(last_state, step=-last_state.step), call.batch, undone)
        if not calls:
            unseen.forget(self._check_finite)

    def trace_nonfinite(self, state: State, batch: Any, device: jax.Device | None = None) -> "Nonfinite":
        """Find where the NaN or infinity of a step begins.

        The loss is computed again, block by block: first all forwards and, if these are finite, all gradients. Of the
        first block that is not finite, the rows are run one by one, and then the equations, each compiled separately.
        Communicates an all-gather of parameters, batch and variables; with several hosts, all must call it.

        Args:
          state: the state before the step, with the step's number, from which random keys are derived. With
            `skip_nonfinite=True`: dataclasses.replace(returned, step=returned.step - 1).
          batch: as for the step.
          device: the device that computes it; this host's first in the mesh if None. It needs memory for all
            parameters in the compute dtype, their gradients, and one block's activations: `jax.devices("cpu")[0]` has
            the host's.

        Returns the equation with its line, module, layer and operands; the microbatch, rank and rows; and whether the
        batch or the parameters bring the value. Print it.
        """
        from .inspect.nonfinite import Replay

        batch = self._agreed("trace", state, batch)
        return Replay(self, state, batch, device or self.mesh.local_devices[0]).locate()

    def evaluate(self, state: State, batch: Any) -> Metrics:
        """Return the loss and its metrics, without update and without dropout."""
        return super().evaluate(state, self._agreed("evaluate", state, batch))

    def value_and_grad(self, state: State, batch: Any) -> tuple[jax.Array, Any]:
        """Return the loss and its gradients for the next step's keys, as the model's own tree (None: frozen leaf)."""
        return super().value_and_grad(state, self._agreed("gradients", state, batch))

    def _agreed(self, name: str, state: State, batch: Any) -> Any:
        """Place a batch once several processes have compared it; first check that earlier steps were finite."""
        self._check_finite()
        if self._agreement.needed and not is_traced(state, batch):
            batch = self.place(batch)
            self._agreement.on_batch(name, batch)
            ending.alive()
        return batch

    def place(self, batch: Any) -> Any:
        """Return a batch as the step's programs take it: with several hosts, global arrays. A step does so itself."""
        self._agreement.note(batch)
        return super().place(batch)

    def send(self, batch: Any) -> Any:
        """Put a batch on its devices, for a thread that reads ahead. Raises ValueError if its rows do not fit."""
        self._agreement.note(batch)
        return super().send(batch)

    def compare(self, batch: Any) -> None:
        """Raise ValueError in every process if any is about to run another program on a batch of these shapes.

        The error names what differs and where. All processes must call this, each with its batch. A step does so itself
        for the first batch of each kind.
        """
        self._agreement.on_program(batch)

    def compile(self, batch: Any) -> jax.stages.Compiled:
        """Compile the training step for a batch of these shapes, arrays or `jax.ShapeDtypeStruct`; nothing runs."""
        compiled = super().compile(batch)
        if self.proves:
            self._prove(batch, compiled)
        return compiled

    def _settle(self, batch: Any) -> "TrainStep":
        """Return this step with the choices of remat="auto" and concurrent="auto" for these shapes.

        They depend on shapes, programs and the kind of device alone, so that all processes choose the same. The first
        compiles a few programs (`inspect/remat.py`), the second one if memory is short (`inspect/concurrency.py`).

        Raises ValueError if none fits the memory budget: what fills the memory, and the nearest budget that would do.
        """
        if (kind := batch_kind(batch)) not in self._settled:
            from .inspect import concurrency, remat

            trial = copy.copy(self)
            # Only the chosen program is checked, not those that were tried.
            trial.proves, trial.settle = False, None
            is_concurrency = self.strategy.concurrent == "auto"
            self._settled[kind] = (concurrency.settle if is_concurrency else remat.settle)(trial, batch)
        return self._settled[kind]

    def explain(self, batch: Any) -> "Explanation":
        """Report what the training step stores and sends per device, for a batch as for `compile`. Nothing runs.

        Returns memory, matrix products and collectives of the compiled program; the closed form of the collectives;
        what is not sharded and why; and what the update moves. Print it, or take `.json()`.
        """
        from .inspect.explain import explain

        return explain(self, self.shapes(batch) if self.rows == "host" else batch)

    def check_replicas(self, state: State) -> None:
        """Raise ValueError if devices that should hold equal parts of an array do not, to the bit.

        The error names the first such array, and the devices that differ from the majority (of two replicas, both).
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
        """Run the loss to find out whether it couples rows.

        If it does not, two equations hold: rows that are dealt differently over replicas and microbatches have the same
        loss and gradients, and half of each block's rows have the loss and gradients of that half given twice. Compared
        are the loss, and the norm and a projection of every leaf's gradient, up to rounding. Rows of a loss that takes
        all rows (`jp.all_rows`, BatchNorm) stay in their microbatch. If the loss draws random numbers (dropout), they
        stay in their place, with one key for all blocks.

        It costs four evaluations of the gradients in about a step's memory, and at the first call the compilation of
        two programs. If something differs, it costs a few evaluations more, one with another copy of the parameters.
        Communicates what a step does, and an all-gather of the batch. With several hosts, all must call it.

        Args:
          state: as for the step; it is neither changed nor donated.
          batch: as for the step, of rows that differ: equal rows prove nothing.

        Returns a report to print, with `ok` and `coupled`; `require()` raises ValueError if rows are coupled. What
        cannot be judged is in `unjudged`, and is neither `ok` nor `coupled`.
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
        """Save a state in the background, as `folder/<state.step>`; it may be donated to the next step at once.

        Waits for the copy from the devices to the host, and for an earlier save that is still being written. With
        several hosts, all must call it, with a folder that all of them see.

        Args:
          folder: the folder of the run's checkpoints, created if necessary; or "s3://bucket/run", "gs://...".
          state: as a step returned it.
          data: the run's position in the data, as JSON; `jp.Checkpoint(folder).data` returns it.
          keep: the number of checkpoints to keep, the last ones; all if None.
          extra: trees of arrays outside the state, by name, such as an average of the parameters or the parameters of a
            second model; `restore_extra` returns them.

        Returns the folder's `Checkpoints`, whose `wait()` waits until all is on disk, as the end of the program does.
        Raises ValueError if the save before could not be written.
        """
        # A state with parameters that stopped changing is not worth saving.
        self._check_finite()
        # Saves to one folder wait for each other, so that they share one `Checkpoints`.
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
        """Read the state of a checkpoint, whatever its strategy, devices and hosts were.

        Each device reads its own part of each leaf. Waits for a save of this process to the same folder.

        Args:
          folder: the folder of a checkpoint, or of several: then the last one is read.
          weights_only: read parameters and variables alone, into a new state; optimizer, step number and loss scale
            start from the beginning.
          key: with `weights_only`, the key of the new state; `jax.random.key(0)` if None.
          fresh: with `weights_only`, returns whether the parameter of a path starts from the model's initial value: new
            adapters on a given base.

        Raises FileNotFoundError if there is no checkpoint, so that a loop can start anew. Raises ValueError if it is
        damaged, or of another model, optimizer or dtype (nothing is cast); it names the array and the file.
        """
        saved = Checkpoint(folder)
        if weights_only:
            return weights(self, saved, jax.random.key(0) if key is None else key, fresh)
        if key is not None or fresh is not None:
            raise ValueError(
                "key= and fresh= need weights_only=True, since a whole state has its own key and parameters; pass it, "
                "or leave them out"
            )
        return restored(self, saved)

    def restore_extra(self, folder: Place | str, like: Mapping[str, Any]) -> dict[str, Any]:
        """Read the trees that were saved with a state as `extra`; each device reads its own part.

        Args:
          folder: the folder of a checkpoint, or of several: then the last one is read.
          like: by name, a tree with the shapes, dtypes and shardings of the arrays: {"ema": step.params(state)}. Other
            trees of the checkpoint are not read.

        Raises ValueError if a tree is missing or damaged, or has another shape or dtype.
        """
        return extras(self, Checkpoint(folder), like)

    def _prove(self, batch: Any, compiled: jax.stages.Compiled | None = None) -> None:
        """Raise ValueError unless the program for batches of this shape keeps the strategy's promises; once each."""
        if (kind := batch_kind(batch)) in self._proven:
            return
        from .inspect.check import check

        if compiled is None and not self.strategy.server:
            # jit finds this program in its cache afterwards.
            compiled = super().compile(batch)
        check(self, self.shapes(batch), compiled, self.proves == "overlap").require()
        self._proven.add(kind)


class _Call(NamedTuple):
    """A call of a step that has not been checked for NaN and infinity: the state that it returned, and its batch."""

    state: State
    stopped: Any  # bool scalar, whether this or an earlier step was not finite
    batch: Any


class ServerTrainStep(TrainStep, ServerStep):
    """A `TrainStep` whose state lives on the first device of the mesh."""
