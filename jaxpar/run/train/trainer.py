"""A training loop: steps, evaluation, checkpoints, and a clean end when it is stopped.

It computes nothing itself; whoever wants another loop writes it around `make_train_step`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
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
from ...model.contents import OUTSIDE, check_ids
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
from .suspects import out_of_range_leaves, suspects


class Trainer:
    """Trains a model: `Trainer(model, optimizer, data, "fsdp", Loop(steps=1000, out=Path("runs/mine"))).run()`.

    Args:
      model, optimizer, strategy, mesh, trainable, rules: as for `make_train_step`.
      data: batches: a `jaxpar.data.Source`; or a function `data(start)` of an iterator that begins with batch `start`;
        or an iterable (see `streams.training`). With several hosts see `rows`.
      loop: how long, where to, and when to evaluate and save.
      held_out: what to evaluate on: a `Source`, a list of batches, or a function that returns an iterator of them; None
        for nothing but `data`'s own, if it is a `Source`. Batches' means are weighed by their "mask", else their rows.
      hooks: called at every event; see `Hook`.
      units: what progress and plot are counted in.
      about: what identifies the run besides model, layout and seed, such as the optimizer's settings (as JSON): it is
        saved with each checkpoint, and a run about something else does not resume from it.
      params: start from these instead of new values, as in `step.init`: a tree like `step.params(state)`, or a function
        that returns one, which is called only where no checkpoint is resumed from. `fresh`: as in `step.init`.
      rows: "global", or "host" where every host yields its own rows of a batch, to train on and held out: as for
        `make_train_step`. All then need as many batches.
      ids: as for `make_train_step`; where one is beyond its limit the run ends with the leaf, the row and the value.
      extra: `extra(trainer)` returns trees of arrays by name, such as {"ema": trainer.step.params(trainer.state)}, with
        which `trainer.extra` begins: hooks change it, each checkpoint has it, and a run that is resumed has it back.

    Attributes: `step` (the `Step`), `state`, `number` (steps taken), `rows` (in a batch of all hosts), `compiled` (None
    under `server`), `files` (a `Path` for what hooks write: `loop.out`, or where that is a bucket a folder of this
    machine that is copied there with every checkpoint and at the end; None without `out`), and the above.
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
        if restarts() and loop.out is not None:  # `jaxpar launch` has started the run again
            loop = dataclasses.replace(loop, resume=True, overwrite=False)
        self.loop, self.units, self.data = loop, units or Units(), data
        self.held_out = data if held_out is None and hasattr(data, "held_out") else held_out
        self.about = {"seed": self.loop.seed, "rows": self.loop.rows, **(about or {})}
        if self.loop.out is not None and hasattr(data, "fingerprint"):  # for checkpoints; it takes a look at all data
            self.about = {"data": data.fingerprint, **self.about}
        skips, explains = (self.loop.on_nonfinite == policy for policy in ("skip", "explain"))
        self.step = make_train_step(
            model, optimizer, strategy, mesh, trainable, rules,
            rows=rows, skip_nonfinite=skips, ids=ids, trace_nonfinite=explains,
        )  # fmt: skip
        self.step.traces = False  # `_report` looks itself
        self.ids = ids or {}
        if hasattr(data, "batches"):  # a Source makes as many rows as it is asked for
            check_row_count(self.loop.rows, self.step)
        self.progress, self.report = Progress(self.loop.quiet or jax.process_index() > 0), Recorder()
        first = [self.report, self.progress] if jax.process_index() == 0 else []
        self.hooks = [*first, *(validate_hook(hook) for hook in hooks)]
        self._given, self._fresh, self._extra = params, fresh, extra
        self.extra: dict[str, Any] = {}
        self.state: Any = None  # a State, once it runs
        self.number, self.rows, self.compiled = 0, 0, None
        self.files: Path | None = None
        self.finite = Finite(self.loop)
        self._lookups: Mapping[str, Lookup] = {}  # of the loss, by leaves of the batch
        self._warned: set[str] = {*self.ids}  # leaves that are named no more
        self._late: tuple[int, Any, Any] | None = None  # of the last step its number, metrics, and batch
        self._clock, self._stopping = 0.0, False
        self._claim, self._input = Claim(None), Input(self.step, Stream(iter(()), 0), 0)

    def run(self) -> State | None:
        """Trains up to `loop.steps`, and returns the state; with `steps=0` it prints `step.explain` and returns None.

        SIGINT (Ctrl-C), SIGTERM and SIGHUP end it after the step that is running, with a checkpoint: then it raises
        SystemExit 130, 143 or 129. Raises ValueError for what does not fit together, where its folder is removed or
        taken by another run, where replicas drift apart, and where the loss couples rows (`step.check_rows`, which runs
        once where reading leaves it open); OSError where a file cannot be written; FloatingPointError where loss or
        gradients are not finite and `loop.on_nonfinite` does not go on, or in vain. The last checkpoint is left as it
        is.
        """
        loop, out = self.loop, self.loop.out
        same = {name: value for name, value in vars(loop).items() if name not in PER_PROCESS_OPTIONS}
        consistency.compare("the run", {**same, **self.about, "strategy": self.step.strategy})
        if loop.steps == 0:
            batch = next(training(self.data, loop.rows, loop.seed))
            with self.progress.activity("compiling the step", at_once=False):
                explanation = self.step.explain(batch)
            self.progress.say(str(explanation))
            return None
        with contextlib.ExitStack() as stack:
            self._claim = stack.enter_context(claim_folder(loop))
            stack.enter_context(self._claim.explaining())
            stop = stack.enter_context(Stop())  # a signal does not break off the last save, which all hosts wait for
            changed = ("data",) if loop.changed_data else ()
            self.files = (staging := stack.enter_context(Staging(self._claim))).folder
            writes = stack.enter_context(contextlib.ExitStack())  # left after the checkpoints
            saves = out and stack.enter_context(
                Checkpoints(out / "checkpoints", self.step, self.about, loop.keep, changed, staging.copy)
            )
            stack.callback(lambda: writes.enter_context(self.progress.activity("writing what is left", at_once=False)))
            stack.callback(lambda: self._emit("on_end", {"step": self.number}))
            stack.callback(ending.doing, "done with the run")
            stack.callback(lambda: self._input.close())
            stack.enter_context(ending.failing())
            stopped = self._train(saves or None, stop)
        if stopped:
            assert stop.signal is not None
            where = f"saved in {out}; {loop.again}" if out else "nothing is saved, as there is no out"
            self.progress.say(f"stopped by {stop.signal.name} after step {self.number}, {where}")
            ending.agreed()
            raise SystemExit(128 + stop.signal)
        return self.state

    def stop(self) -> None:
        """Ends the run after the step that is running, as its last; for hooks. With several hosts, all must call it."""
        self._stopping = True

    @property
    def memory(self) -> tuple[int, str]:
        """Bytes on the first device, and what they are: "peak" where the device counts them, else those of the
        "compiled" step's arguments and temporaries, or under `server` of its "state", gradients included.
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
        """Where in its data the run is, as JSON: see `Stream.state`."""
        return self._input.position()

    # -- what a run is made of -----------------------------------------------------------------------------------------

    def _train(self, saves: Checkpoints | None, stop: Stop) -> bool:
        """Whether a signal ended it."""
        loop = self.loop
        latest = None if saves is None else saves.latest
        if saves is not None and latest is not None:
            with self.progress.activity(f"restoring the checkpoint of step {latest}"):
                self.state = saves.restore(good=loop.resume == "latest-good")
            self.number = int(self.state.step)
            for line in saves.notes:
                self.progress.say(line)
        # What a run of these data has begun with is as it was.
        if (latest is None or loop.changed_data) and hasattr(self.data, "check_readable"):
            with self.progress.activity("checking that the data can be read", at_once=False):
                self.data.check_readable((loop.steps - self.number) * loop.rows)
        if self.number >= loop.steps:
            self.progress.say(f"nothing to do: {self.number} steps are done, and steps={loop.steps}")
            return False
        position = None if saves is None else saves.data or None
        batches = training(self.data, loop.rows, loop.seed, self.number, position, self.step.part)
        self._input = Input(self.step, batches, loop.prefetch)
        with self.progress.activity("reading the first batch", at_once=False):
            batch = self._input.first_batch(latest)
        with self.progress.activity("compiling the step"):
            self._input.start(batch)
            self.rows = self._input.rows
            # The step finds what is compiled here. A server's programs are several, and none of them is the step.
            self.compiled = None if self.step.strategy.server else self.step.compile(batch)
            self._lookups = self.step.traced(batch).lookups
        self._warn_of_lookups(batch)
        if latest is None:
            with self.progress.activity("compiling and computing the first parameters"):
                self.state = self.initial()
        if self._extra is not None:
            self.extra = dict(self._extra(self))
            if saves is not None and latest is not None:
                self.extra = self.step.restore_extra(saves.folder, self.extra)
        if self.step.may_couple(batch):
            with self.progress.activity("checking whether the loss couples rows"):
                (rows := self.step.check_rows(self.state, batch)).require()
            self.progress.say(str(rows))
        ending.going_on(self.number, self.files)
        self._emit("on_start", {"step": self.number})
        self._start_clock()
        compiles = "compiling the step" if self.compiled is None else ""  # what is said while the next step compiles
        while self.number < loop.steps:
            stop.last = self.number + 1 == loop.steps
            with self.progress.activity(compiles) if compiles else contextlib.nullcontext():
                self.state, metrics = self.step(self.state, batch)
            self.number += 1
            if not self._sound(self._report, saves):  # on the step before, while this one runs
                continue  # with the same batch, on other parameters
            self._late = self.number, metrics, batch
            stopped = stop.after(self.number)
            ends = stopped or self._stopping or self.number == loop.steps
            evaluates = self.held_out is not None and not stopped and (ends or self.number % loop.evaluate_every == 0)
            saved = saves is not None and (ends or self.number % loop.save_every == 0)
            compares = loop.check_replicas_every and self.number % loop.check_replicas_every == 0
            looks = ends or evaluates or saved or compares
            # What is not finite is neither saved nor evaluated. What it is rolled back to is: so a run that is resumed
            # does not meet that batch again.
            if looks and self._sound(self._settle, saves) and saved:
                self.finite.record_progress()
            if compares:
                ending.doing("comparing replicas")
                with self.progress.activity("comparing replicas"):
                    self.step.check_replicas(self.state)
            if evaluates:
                ending.doing("evaluating")
                with self.progress.activity("evaluating"):
                    found = self.evaluate()
                self._emit("on_evaluate", {"step": self.number, **found})
            if saves is not None and saved:
                ending.doing("saving a checkpoint")
                with self.progress.activity("saving a checkpoint"):
                    self._save(saves)
            if ends:
                return stopped
            ending.doing("reading a batch")
            try:
                batch = self._input.next_batch(metrics["loss"])
            except BaseException:
                self._rescue(saves)
                raise
            if told := self._input.recompile_reason(batch):
                told = f"step {self.number + 1} is {told}"
                self._lookups = self.step.traced(batch).lookups
            compiles = told
            self._warn_of_lookups(batch)
            if evaluates or saved or compares:
                self._start_clock()
        return False

    def initial(self) -> State:
        """The state that a run begins with, where it is not resumed."""
        given = self._given() if callable(self._given) else self._given
        return self.step.init(jax.random.key(self.loop.seed), params=given, fresh=self._fresh)

    def evaluate(self) -> dict[str, float]:
        """The held-out metrics as "held_out_loss" and so on: exact means over all that is held out, in its own weights.

        Raises ValueError where there is no held-out batch.
        """
        sums: dict[str, float] = {}
        total, late, fit = 0.0, None, Fitting(self.step.check_weighs)

        def add(weight: float, metrics: Any, batch: Any) -> None:
            values = {name: float(value) for name, value in metrics.items()}
            for name, value in self._inside(values, batch, "held out").items():
                # Of a batch that is masked throughout, a mean is not a number, and none of it counts.
                sums[name] = sums.get(name, 0.0) + (weight * value if weight else 0.0)

        for batch in held_out(self.held_out, self.loop.rows, self.loop.evaluate_batches):
            batch = self.step.place(fit(batch, self.step.blocks))
            metrics = self.step.evaluate(self.state, batch)
            if late:
                add(*late)
            late = weight_of(batch), metrics, batch if self.ids else None
            total += late[0]
        if late is None:
            raise ValueError("held_out has no batch to evaluate on; pass at least one, or None")
        if not total:
            raise ValueError("held_out is masked throughout, in all of its batches; pass at least one row that counts")
        add(*late)
        return {f"held_out_{name}": value / total for name, value in sums.items()}

    def _save(self, saves: Checkpoints) -> None:
        self._claim.check()
        saves.save(self.number, self.state, self.position, self.extra)
        self._emit("on_save", {"step": self.number})

    def _rescue(self, saves: Checkpoints | None) -> None:
        """Data that ends or fails costs no step. Of several hosts one may be alone here, and whatever takes all of
        them, a look at the parameters or a checkpoint, would wait for ever.
        """
        if jax.process_count() > 1:
            self._report()
            return
        self._settle()
        if saves is not None:
            self._save(saves)

    def _sound(self, look: Callable[[], None], saves: Checkpoints | None) -> bool:
        """Whether `look` finds that a step is finite. Where it is not, and the loop says "rollback", the parameters,
        optimizer and mutable state are those of the last checkpoint again, and the next batch is that after the step's:
        numbers of steps, which are those of batches, are not turned back.
        """
        try:
            look()
        except NotFiniteError as error:
            if self.loop.on_nonfinite != "rollback":
                raise
            assert saves is not None
            saves.wait()
            self.progress.say(self.finite.roll_back(error, saves.latest))
            self._late, self.number = None, error.step
            state = self.initial() if saves.latest is None else saves.restore()
            if self.extra and saves.latest is not None:
                self.extra = self.step.restore_extra(saves.folder, self.extra)
            step = np.asarray(error.step, np.int32)
            number = jax.make_array_from_callback((), state.step.sharding, lambda _: step)
            self.state = dataclasses.replace(state, step=number)
            self._start_clock()
            return False
        return True

    def _start_clock(self) -> None:
        self._clock, self._input.waited = time.perf_counter(), 0.0

    def _settle(self) -> None:
        """Reports the last step. Raises NotFiniteError where it or its update is not finite."""
        self._report()
        if not all_finite(self.state.params):
            says = f"the update of step {self.number} left parameters that are not finite"
            raise NotFiniteError(self.number, self.finite.advice(says))

    def _report(self) -> None:
        """Waits for the step before, and passes its metrics on. Raises NotFiniteError where it was not finite."""
        if self._late is None:
            return
        number, metrics, batch = self._late
        self._late = None
        values = self._inside({name: float(value) for name, value in metrics.items()}, batch, f"step {number}")
        ending.doing("between steps")  # and in hooks
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        stopped = bool(values.pop("stopped", False))
        explained = lambda: self._explained(batch) if stopped else ""
        if told := self.finite.check_metrics(
            number, values, lambda: suspects(batch, self._lookups), explained, stopped
        ):
            self.progress.say(told)
        values["skipped"] += self.finite.skipped
        if self.loop.on_nonfinite == "rollback":
            values["rollbacks"] = self.finite.rollbacks
        speed = {"seconds": seconds, f"{self.units.rows}_per_second": self.rows * self.units.per_row / seconds}
        share = {"input_share": min(1.0, self._input.waited / seconds)}
        self.rows = self._input.rows
        self._emit("on_step", {"step": number, **values, **speed, **share})

    def _explained(self, batch: Any) -> str:
        """Where a step's NaN begins, at which the state has stopped: it is still that of before."""
        self.state = dataclasses.replace(self.state, step=-self.state.step)
        before = dataclasses.replace(self.state, step=self.state.step - 1)
        return f"\n{self.step.trace_nonfinite(before, batch)}"

    def _warn_of_lookups(self, batch: Any) -> None:
        """Warns, once of each leaf, where the loss looks up what is not there, and jax reads something else."""
        unknown = {name: lookup for name, lookup in self._lookups.items() if name not in self._warned}
        for name, text in out_of_range_leaves(batch, unknown):
            self._warned.add(name)
            warnings.warn(
                f"step {self.number + 1}: {text}; use ids of what is there, or, where others mark what does not count, "
                f"look up jnp.where({name} < 0, 0, {name}) and give it no weight",
                stacklevel=2,
            )

    def _inside(self, values: dict[str, float], batch: Any, what: str) -> dict[str, float]:
        """The metrics without those on ids. Raises ValueError where some are beyond their limits."""
        shares = {name: share for name, share in values.items() if name.startswith(OUTSIDE)}
        for name, share in shares.items():
            if share:
                try:
                    check_ids(batch, self.ids)
                except ValueError as error:
                    raise ValueError(f"{what}: {error}") from error
                says = f"{what}: {share:.2g} of the ids in {name.removeprefix(OUTSIDE)} are beyond their limit"
                raise ValueError(f"{says}; the error of another host names one")
        return {name: value for name, value in values.items() if name not in shares}

    def _emit(self, event: str, metrics: dict[str, float]) -> None:
        for hook in self.hooks:
            if (call := getattr(hook, event, None)) is not None:
                call(self, metrics)
