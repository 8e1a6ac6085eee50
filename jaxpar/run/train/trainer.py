"""The training loop: steps, evaluation, checkpoints, and a clean end when the run is stopped.

    run                        claims the folder, and catches signals
      _train                   restores the last checkpoint
        _loop                  compiles the step and completes the state (`_prepare`); then, for each batch:
          step                   dispatch step n
          _report                wait for step n - 1, and pass its metrics to the hooks
          _settle                before evaluating or saving: wait for step n too, and check its parameters
          evaluate, _save        at their intervals, and at the end

Metrics are read one step late, so that the devices always have a step to run. The trainer computes nothing itself: for
another loop, write your own around `make_train_step`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from ...checkpoint.checkpoints import Checkpoints
from ...data.streams import Data, Fitting, Stream, held_out, training, weight_of
from ...hosts import consistency, ending
from ...hosts.initialize import restarts
from ...layout.distributed import Stop
from ...layout.state import State
from ...make import make_train_step
from ...model.model import Model
from ...parallel.tensor.dims import Rules
from ...program.lookups import Lookup
from ...strategy import Strategy
from .finite import Finite, NotFiniteError, all_finite
from .folder import Claim, Staging, claim_folder
from .input import Input, check_row_count
from .loop import PER_PROCESS_OPTIONS, Loop, Units, validate_hook
from .progress import Progress
from .recorder import Recorder
from .suspects import suspects, warn_of_lookups, without_id_shares


class Trainer:
    """Trains a model: `Trainer(model, optimizer, data, "fsdp", Loop(steps=1000, out=Path("runs/mine"))).run()`.

    Args:
      model, optimizer, strategy, mesh, trainable, rules: as for `make_train_step`.
      data: the batches: a `jaxpar.data.Source`; a function `data(start)` that returns an iterator beginning with batch
        `start`; or an iterable (see `streams.training`). With several hosts see `rows`.
      loop: how long to train, where to write, and when to evaluate and save.
      held_out: what to evaluate on: a `Source`, a list of batches, or a function that returns an iterator of them. With
        None it is the held-out part of `data`, if `data` is a `Source`. Batches are weighted by their "mask", or else
        by their rows.
      hooks: called at every event; see `Hook`.
      units: the units in which progress and plot show speed and loss.
      about: what identifies the run in addition to model, layout and seed, such as the optimizer's settings (as JSON).
        Each checkpoint stores it, and a run with another `about` does not resume from that checkpoint.
      params: parameters to start from instead of new ones, as in `step.init`: a tree like `step.params(state)`, or a
        function that returns one. The function is called only if the run does not resume from a checkpoint.
      fresh: as in `step.init`.
      rows: "global", or "host" if every host yields its own rows of a batch, to train on and held out: as for
        `make_train_step`. All hosts then need equally many batches.
      ids: as for `make_train_step`. If an id is beyond its limit, the run ends with its leaf, row and value.
      extra: `extra(trainer)` returns trees of arrays by name, such as {"ema": trainer.step.params(trainer.state)}. They
        are the first value of `trainer.extra`, which hooks may change. Checkpoints store it, and a resumed run restores
        it.

    Attributes:
      step: the `Step`.
      state: the `State`, once the run has one.
      number: steps taken.
      rows: rows of the batch, over all hosts.
      compiled: the compiled step; None under `server`.
      files: the folder in which hooks write, a `Path`: `loop.out`, or, if that is in a bucket, a folder of this machine
        that is copied there with every checkpoint and at the end. None without `out`.
      loop, units, data, held_out, about, hooks, ids, extra: the arguments.
    """

    def __init__(
        self,
        model: Model,
        optimizer: optax.GradientTransformation,
        data: Data,
        strategy: Strategy | str = "single",
        loop: Loop | None = None,
        *,
        held_out: Data = None,
        hooks: Iterable[Any] = (),
        units: Units | None = None,
        about: Mapping[str, Any] | None = None,
        mesh: Any = None,
        trainable: Callable[[str], bool] | None = None,
        rules: Rules | None = None,
        rows: str = "global",
        params: Any = None,
        fresh: Callable[[str], bool] | None = None,
        ids: Mapping[str, int] | None = None,
        extra: Callable[[Any], Mapping[str, Any]] | None = None,
    ):
        if not isinstance(loop, Loop | None):
            raise ValueError(f"loop is a {type(loop).__name__}; pass a jp.Loop, such as Loop(steps=1000)")
        if not isinstance(hooks, Iterable):
            raise ValueError(f"hooks is a {type(hooks).__name__}; pass a list of hooks")
        loop = loop or Loop()
        # `jaxpar launch` has started the run again after a failure: it continues whatever the options say.
        if restarts() and loop.out is not None:
            loop = dataclasses.replace(loop, resume=True, overwrite=False)
        self.loop, self.units, self.data = loop, units or Units(), data
        self.held_out = data if held_out is None and hasattr(data, "held_out") else held_out
        self.about = {"seed": self.loop.seed, "rows": self.loop.rows, **(about or {})}
        # Only checkpoints need the fingerprint, and computing it looks at all data.
        if self.loop.out is not None and hasattr(data, "fingerprint"):
            self.about = {"data": data.fingerprint, **self.about}
        skips, explains = (self.loop.on_nonfinite == policy for policy in ("skip", "explain"))
        self.step = make_train_step(
            model, optimizer, strategy, mesh, trainable, rules,
            rows=rows, skip_nonfinite=skips, ids=ids, trace_nonfinite=explains,
        )  # fmt: skip
        self.step.traces = False  # `_report` traces NaN, with the batch's suspects
        self.ids = ids or {}
        if hasattr(data, "batches"):  # a Source makes as many rows as the loop wants
            check_row_count(self.loop.rows, self.step)
        self.progress, self.report = Progress(self.loop.quiet or jax.process_index() > 0), Recorder()
        # Process 0 writes the files and prints, for all hosts.
        built_in = [self.report, self.progress] if jax.process_index() == 0 else []
        self.hooks = [*built_in, *(validate_hook(hook) for hook in hooks)]
        self._initial_params, self._fresh, self._make_extra = params, fresh, extra
        self.extra: dict[str, Any] = {}
        self.state: Any = None  # a State, once the run has one
        self.number, self.rows, self.compiled = 0, 0, None
        self.files: Path | None = None
        self.finite = Finite(self.loop)
        self._lookups: Mapping[str, Lookup] = {}  # the arrays that the loss indexes, by the batch leaf with the ids
        self._warned_leaves: set[str] = {*self.ids}  # no more warnings about their ids
        self._pending: tuple[int, Any, Any] | None = None  # number, metrics and batch of a step not yet reported
        self._last_report, self._stop_requested = 0.0, False
        self._claim, self._input = Claim(None), Input(self.step, Stream(iter(()), 0), 0)

    def run(self) -> State | None:
        """Train up to `loop.steps` and return the state; with `steps=0` print `step.explain` and return None.

        SIGINT (Ctrl-C), SIGTERM and SIGHUP end the run after the current step, with a checkpoint. The last checkpoint
        survives every error.

        Raises:
          SystemExit: after a signal: 130, 143 or 129.
          ValueError: if the arguments do not fit together; if the run's folder is removed, or taken by another run; if
            replicas drift apart; if the loss couples rows (`step.check_rows`, which runs once if the program alone does
            not answer this).
          OSError: if a file cannot be written.
          FloatingPointError: if loss or gradients are not finite, and `loop.on_nonfinite` says to stop or has tried in
            vain to continue.
        """
        loop, out = self.loop, self.loop.out
        shared_options = {name: value for name, value in vars(loop).items() if name not in PER_PROCESS_OPTIONS}
        consistency.compare("the run", {**shared_options, **self.about, "strategy": self.step.strategy})
        if loop.steps == 0:
            batch = next(training(self.data, loop.rows, loop.seed))
            with self.progress.activity("compiling the step", at_once=False):
                explanation = self.step.explain(batch)
            self.progress.write(str(explanation))
            return None
        # The stack unwinds from its end: data, hooks and checkpoints are closed before the claim on the folder ends.
        with contextlib.ExitStack() as stack:
            self._claim = stack.enter_context(claim_folder(loop))
            stack.enter_context(self._claim.explaining())
            # Signals are caught until the last save is complete. All hosts wait for that save.
            stop = stack.enter_context(Stop())
            changed = ("data",) if loop.changed_data else ()
            last_writes = stack.enter_context(contextlib.ExitStack())  # left after checkpoints and staging
            self.files = (staging := stack.enter_context(Staging(self._claim))).folder
            saves = out and stack.enter_context(
                Checkpoints(out / "checkpoints", self.step, self.about, loop.keep, changed, staging.copy)
            )
            stack.callback(lambda: self._emit("on_end", {"step": self.number}))
            stack.callback(
                lambda: last_writes.enter_context(self.progress.activity("writing the last files", at_once=False))
            )
            stack.callback(ending.doing, "done with the run")
            stack.callback(lambda: self._input.close())
            stack.enter_context(ending.failing())
            was_stopped = self._train(saves or None, stop)
        if was_stopped:
            assert stop.signal is not None
            result = f"saved in {out}; {loop.again}" if out else "nothing is saved, because the run has no folder"
            self.progress.say(f"stopped by {stop.signal.name} after step {self.number}, {result}")
            ending.agreed()
            raise SystemExit(128 + stop.signal)
        return self.state

    def stop(self) -> None:
        """End the run after the current step; for hooks. With several hosts all must call it at the same step."""
        self._stop_requested = True

    @property
    def memory(self) -> tuple[int, str]:
        """Bytes on the first device, and their source.

        The source is "peak" if the device counts its peak; else "compiled", the arguments and temporaries of the
        compiled step; under `server` "state", which includes gradients.
        """
        stats = self.step.mesh.local_devices[0].memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            return stats["peak_bytes_in_use"], "peak"
        if self.compiled is not None:
            analysis: Any = self.compiled.memory_analysis()
            return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes, "compiled"
        return sum(self.step.layout.bytes.values()), "state"

    @property
    def position(self) -> dict[str, Any]:
        """The run's position in its data, as JSON: see `Stream.state`."""
        return self._input.position()

    # -- parts of a run ------------------------------------------------------------------------------------------------

    def _train(self, saves: Checkpoints | None, stop: Stop) -> bool:
        """Resume from a checkpoint, if there is one, and run the loop. Returns whether a signal ended it."""
        latest = self._resume(saves)
        if self.number >= self.loop.steps:
            self.progress.say(f"nothing to do: {self.number} steps are done, and steps={self.loop.steps}")
            return False
        return self._loop(saves, stop, latest)

    def _resume(self, saves: Checkpoints | None) -> int | None:
        """Restore the last checkpoint, if there is one, and check that the data can be read. Returns its step."""
        loop, latest = self.loop, None if saves is None else saves.latest
        if saves is not None and latest is not None:
            with self.progress.activity(f"restoring the checkpoint of step {latest}"):
                self.state = saves.restore(good=loop.resume == "latest-good")
            # Not `saves.latest`, which may have been damaged: then an older checkpoint was restored.
            self.number = latest = int(self.state.step)
            for line in saves.notes:
                self.progress.say(line)
        # A resumed run with unchanged data has checked them at its first start.
        if (latest is None or loop.changed_data) and hasattr(self.data, "check_readable"):
            with self.progress.activity("checking that the data can be read", at_once=False):
                self.data.check_readable((loop.steps - self.number) * loop.rows)
        return latest

    def _prepare(self, saves: Checkpoints | None, latest: int | None) -> Any:
        """Compile the step, complete the state, and announce the start of the run. Returns the first batch."""
        batch = self._compile(saves, latest)
        self._complete_state(saves, latest, batch)
        ending.going_on(self.number, self.files)
        self._emit("on_start", {"step": self.number})
        self._start_clock()
        return batch

    def _compile(self, saves: Checkpoints | None, latest: int | None) -> Any:
        """Open the data, compile the step for the first batch, and return that batch."""
        loop = self.loop
        position = None if saves is None else saves.data or None
        batches = training(self.data, loop.rows, loop.seed, self.number, position, self.step.part)
        self._input = Input(self.step, batches, loop.prefetch)
        with self.progress.activity("reading the first batch", at_once=False):
            batch = self._input.first_batch(latest)
        with self.progress.activity("compiling the step"):
            self._input.start(batch)
            self.rows = self._input.rows
            # The step uses this program later. A server has several programs, and none of them is the step.
            self.compiled = None if self.step.strategy.server else self.step.compile(batch)
            self._lookups = self.step.traced(batch).lookups
        self._warn_of_lookups(batch)
        return batch

    def _complete_state(self, saves: Checkpoints | None, latest: int | None, batch: Any) -> None:
        """Make the state of a new run, make or restore the extra trees, and check that the loss couples no rows."""
        if latest is None:
            with self.progress.activity("compiling and computing the first parameters"):
                self.state = self.initial()
        if self._make_extra is not None:
            self.extra = dict(self._make_extra(self))
            if saves is not None and latest is not None:
                self.extra = self.step.restore_extra(saves.folder, self.extra)
        if self.step.may_couple(batch):
            with self.progress.activity("checking whether the loss couples rows"):
                (rows := self.step.check_rows(self.state, batch)).require()
            self.progress.say(str(rows))

    def _loop(self, saves: Checkpoints | None, stop: Stop, latest: int | None) -> bool:
        """Train from the first batch to the last step. Returns whether a signal ended the loop."""
        # The first batch comes from here and not from the caller, who would keep it on the devices during the run.
        loop, batch = self.loop, self._prepare(saves, latest)
        # The activity to show while the next step compiles; "" if it is compiled already.
        compiling = "compiling the step" if self.compiled is None else ""
        while self.number < loop.steps:
            # 1. Dispatch a step, and report the step before it while this one runs.
            stop.last = self.number + 1 == loop.steps
            with self.progress.activity(compiling) if compiling else contextlib.nullcontext():
                self.state, metrics = self.step(self.state, batch)
            self.number += 1
            if not self._passes(self._report, saves):
                continue  # rolled back: the same batch trains the restored parameters
            self._pending = self.number, metrics, batch
            # 2. Decide what follows this step. All hosts agree on `was_stopped`.
            was_stopped = stop.after(self.number)
            ends = was_stopped or self._stop_requested or self.number == loop.steps
            evaluates = (
                self.held_out is not None and not was_stopped and (ends or self.number % loop.evaluate_every == 0)
            )
            saves_now = saves is not None and (ends or self.number % loop.save_every == 0)
            compares = loop.check_replicas_every and self.number % loop.check_replicas_every == 0
            # 3. Wait for the step before its state is used: a state that is not finite is neither saved nor evaluated.
            # A state that was rolled back to is saved, so that a resumed run does not meet the bad batch again.
            needs_state = ends or evaluates or saves_now or compares
            if needs_state and self._passes(self._settle, saves) and saves_now:
                self.finite.record_progress()
            # 4. Compare, evaluate, save.
            if compares:
                ending.doing("comparing replicas")
                with self.progress.activity("comparing replicas"):
                    self.step.check_replicas(self.state)
            if evaluates:
                ending.doing("evaluating")
                with self.progress.activity("evaluating"):
                    held_out_metrics = self.evaluate()
                self._emit("on_evaluate", {"step": self.number, **held_out_metrics})
            if saves is not None and saves_now:
                ending.doing("saving a checkpoint")
                with self.progress.activity("saving a checkpoint"):
                    self._save(saves)
            if ends:
                return was_stopped
            # 5. Take the next batch, which may need another program.
            batch, compiling = self._next_batch(metrics["loss"], saves)
            if evaluates or saves_now or compares:
                self._start_clock()  # the time of these does not count as a step's
        return False

    def _next_batch(self, loss: jax.Array, saves: Checkpoints | None) -> tuple[Any, str]:
        """Return the next batch, and the activity to show if the step compiles for it.

        By the loss of the running step, the input sees when the devices are idle. If the data fail, the steps so far
        are saved.
        """
        ending.doing("reading a batch")
        try:
            batch = self._input.next_batch(loss)
        except BaseException:
            self._save_after_data_error(saves)
            raise
        compiling = ""
        if reason := self._input.recompile_reason(batch):
            compiling = f"step {self.number + 1} is {reason}"
            self._lookups = self.step.traced(batch).lookups
        self._warn_of_lookups(batch)
        return batch, compiling

    def initial(self) -> State:
        """Return the state with which a new run begins."""
        params = self._initial_params() if callable(self._initial_params) else self._initial_params
        return self.step.init(jax.random.key(self.loop.seed), params=params, fresh=self._fresh)

    def evaluate(self) -> dict[str, float]:
        """Return the held-out metrics as "held_out_loss" and so on: exact means over all rows that are held out.

        Each batch counts with its weight, the sum of its mask or its number of rows.

        Raises:
          ValueError: if there is no held-out batch, or none has any weight.
        """
        sums: dict[str, float] = {}
        total, pending, fit = 0.0, None, Fitting(self.step.check_weighs)

        def add(weight: float, metrics: Any, batch: Any) -> None:
            # `float` waits for the devices.
            values = {name: float(value) for name, value in metrics.items()}
            for name, value in without_id_shares(values, batch, self.ids, "held out").items():
                # A batch that is masked throughout has the mean 0 / 0, which must not spoil the sum.
                sums[name] = sums.get(name, 0.0) + (weight * value if weight else 0.0)

        # Read the metrics of a batch only after the next one is dispatched: the devices do not wait for the host then.
        for batch in held_out(self.held_out, self.loop.rows, self.loop.evaluate_batches):
            batch = self.step.place(fit(batch, self.step.blocks))
            metrics = self.step.evaluate(self.state, batch)
            if pending:
                add(*pending)
            pending = weight_of(batch), metrics, batch if self.ids else None
            total += pending[0]
        if pending is None:
            raise ValueError("held_out has no batch to evaluate on; pass at least one, or None")
        if not total:
            raise ValueError("held_out is masked throughout, in all of its batches; pass at least one row that counts")
        add(*pending)
        return {f"held_out_{name}": value / total for name, value in sums.items()}

    def _save(self, saves: Checkpoints) -> None:
        """Begin to save a checkpoint, if the folder is still this run's."""
        self._claim.check()
        saves.save(self.number, self.state, self.position, self.extra)
        self._emit("on_save", {"step": self.number})

    def _save_after_data_error(self, saves: Checkpoints | None) -> None:
        """Save the steps so far after the data have ended or failed.

        With several hosts this one may be alone here. Then it only reports: checking the parameters and saving wait for
        all hosts, and would never return.
        """
        if jax.process_count() > 1:
            self._report()
            return
        self._settle()
        if saves is not None:
            self._save(saves)

    def _passes(self, check: Callable[[], None], saves: Checkpoints | None) -> bool:
        """Run a check, and return whether it finds the step finite. With "rollback", a failure restores a checkpoint.

        Parameters, optimizer and mutable state then come from the last checkpoint. The number of the step stays, so the
        next batch is the one after the failing step's: numbers of steps are numbers of batches.

        Raises:
          NotFiniteError: if the step is not finite, and the loop does not roll back or has done so too often.
        """
        try:
            check()
        except NotFiniteError as error:
            if self.loop.on_nonfinite != "rollback":
                raise
            assert saves is not None
            saves.wait()  # the last checkpoint may still be on its way to the disk
            self.progress.say(self.finite.roll_back(error, saves.latest))
            self._pending, self.number = None, error.step
            state = self.initial() if saves.latest is None else saves.restore()
            if self.extra and saves.latest is not None:
                self.extra = self.step.restore_extra(saves.folder, self.extra)
            # The number stays that of the failing step, although the state is an earlier one.
            step = np.asarray(error.step, np.int32)
            number = jax.make_array_from_callback((), state.step.sharding, lambda _: step)
            self.state = dataclasses.replace(state, step=number)
            self._start_clock()
            return False
        return True

    def _start_clock(self) -> None:
        """Begin the time of the next step now."""
        self._last_report, self._input.waited = time.perf_counter(), 0.0

    def _settle(self) -> None:
        """Report the last step, and check its parameters. Raises NotFiniteError if either is not finite."""
        self._report()
        if not all_finite(self.state.params):
            message = f"the update of step {self.number} left parameters that are not finite"
            raise NotFiniteError(self.number, self.finite.advice(message))

    def _report(self) -> None:
        """Wait for the pending step, and pass its metrics to the hooks. Raises NotFiniteError if it is not finite."""
        if self._pending is None:
            return
        number, metrics, batch = self._pending
        self._pending = None
        # `float` waits for the devices.
        values = {name: float(value) for name, value in metrics.items()}
        values = without_id_shares(values, batch, self.ids, f"step {number}")
        ending.doing("between steps")  # and in hooks
        time_of_report = time.perf_counter()
        seconds, self._last_report = time_of_report - self._last_report, time_of_report
        has_stopped = bool(values.pop("stopped", False))
        explain_origin = lambda: self._nonfinite_origin(batch) if has_stopped else ""
        find_suspects = lambda: suspects(batch, self._lookups)
        if message := self.finite.check_metrics(number, values, find_suspects, explain_origin, has_stopped):
            self.progress.say(message)
        values["skipped"] += self.finite.skipped
        if self.loop.on_nonfinite == "rollback":
            values["rollbacks"] = self.finite.rollbacks
        speed = {"seconds": seconds, f"{self.units.rows}_per_second": self.rows * self.units.per_row / seconds}
        share = {"input_share": min(1.0, self._input.waited / seconds)}
        self.rows = self._input.rows
        self._emit("on_step", {"step": number, **values, **speed, **share})

    def _nonfinite_origin(self, batch: Any) -> str:
        """Return where the NaN of a step arises, as text. The step applied nothing, so the state is the one before it.

        A step that has stopped marks its state with a negative step number; turn that back.
        """
        self.state = dataclasses.replace(self.state, step=-self.state.step)
        state_before = dataclasses.replace(self.state, step=self.state.step - 1)
        return f"\n{self.step.trace_nonfinite(state_before, batch)}"

    def _warn_of_lookups(self, batch: Any) -> None:
        """Warn, once for each leaf of the batch, if the loss uses an id that is out of range as an index."""
        lookups = {name: lookup for name, lookup in self._lookups.items() if name not in self._warned_leaves}
        self._warned_leaves |= warn_of_lookups(batch, lookups, self.number + 1)

    def _emit(self, event: str, metrics: dict[str, float]) -> None:
        """Call the method for an event of every hook that has one."""
        for hook in self.hooks:
            if (call := getattr(hook, event, None)) is not None:
                call(self, metrics)
