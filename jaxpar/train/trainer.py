"""A training loop: steps, evaluation, checkpoints, and a clean end when it is stopped.

It computes nothing itself; whoever wants another loop writes it around `make_train_step`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..data.streams import Data, held_out, training, weight_of
from ..layout.distributed import Stop, spread
from ..layout.state import State
from ..make import make_train_step
from ..model.batches import rows_of
from ..model.model import Model
from ..parallel.tensor.dims import Rules
from ..step.core import Step
from ..strategy import Strategy
from .checkpoint import Checkpoints
from .loop import Loop, Units, checked, claimed
from .progress import Progress
from .recorder import Recorder

_HOPELESS = 32  # float16 steps skipped in a row: halved so often, the loss scale is 1, and it was not the scale


class Trainer:
    """Trains a model: `Trainer(model, optimizer, data, "fsdp", Loop(steps=1000, out=Path("runs/mine"))).run()`.

    Args:
      model, optimizer, strategy, mesh, trainable, rules: as for `make_train_step`.
      data: global batches: a `jaxpar.data.Source`; or a function `data(start)` of an iterator that begins with batch
        `start`; or an iterable (see `streams.training`). With several hosts, all must yield the same batches.
      loop: how long, where to, and when to evaluate and save.
      held_out: what to evaluate on: a `Source`, a list of batches, or a function that returns an iterator of them; None
        for nothing but `data`'s own, if it is a `Source`. Batches' means are weighed by their "mask", else their rows.
      hooks: called at every event; see `Hook`.
      units: what progress and plot are counted in.
      about: what identifies the run besides model, layout and seed, such as the optimizer's settings (as JSON): it is
        saved with each checkpoint, and a run about something else does not resume from it.

    Attributes: `step` (the `Step`), `state`, `number` (steps taken), `compiled` (None under `server`), and the above.
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
    ):
        if not isinstance(loop, Loop | None):
            raise ValueError(f"loop is a {type(loop).__name__}; pass a jp.Loop, such as Loop(steps=1000)")
        if not isinstance(hooks, Iterable):
            raise ValueError(f"hooks is a {type(hooks).__name__}; pass a list of hooks")
        self.loop, self.units, self.data = loop or Loop(), units or Units(), data
        self.held_out = data if held_out is None and hasattr(data, "held_out") else held_out
        self.about = {"seed": self.loop.seed, "rows": self.loop.rows, **(about or {})}
        self.step = make_train_step(model, optimizer, strategy, mesh, trainable, rules)
        if hasattr(data, "batches"):  # a Source makes as many rows as it is asked for
            _check_rows(self.loop.rows, self.step)
        self.progress, self.report = Progress(self.loop.quiet or jax.process_index() > 0), Recorder()
        first = [self.report, self.progress] if jax.process_index() == 0 else []
        self.hooks = [*first, *(checked(hook) for hook in hooks)]
        self.state: Any = None  # a State, once it runs
        self.number, self.rows, self.compiled = 0, 0, None
        self._late: tuple[int, Any] | None = None
        self._clock, self._skipped, self._stopping = 0.0, (0.0, 0), False

    def run(self) -> State | None:
        """Trains up to `loop.steps`, and returns the state; with `steps=0` it prints `step.explain` and returns None.

        SIGINT (Ctrl-C) and SIGTERM end it after the step that is running, with a checkpoint: then it raises SystemExit
        130 or 143. Raises ValueError for what does not fit together, FloatingPointError where loss or gradients are
        not finite; the last checkpoint is left as it is.
        """
        loop, out = self.loop, self.loop.out
        if loop.steps == 0:
            batch = next(training(self.data, loop.rows, loop.seed))
            self.progress.say(str(self.step.explain(batch)))
            return None
        with contextlib.ExitStack() as stack:
            stack.enter_context(claimed(loop))
            saves = out and stack.enter_context(Checkpoints(out / "checkpoints", self.step, self.about, loop.keep))
            stop = stack.enter_context(Stop())
            stack.callback(lambda: self._emit("on_end", {"step": self.number}))
            stopped = self._train(saves or None, stop)
        if stopped:
            assert stop.signal is not None
            where = f"saved in {out}; {loop.again}" if out else "nothing is saved, as there is no out"
            self.progress.say(f"stopped by {stop.signal.name} after step {self.number}, {where}")
            raise SystemExit(128 + stop.signal)
        return self.state

    def stop(self) -> None:
        """Ends the run after this step, as if it were the last; for hooks. With several hosts, all must call it."""
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

    # -- what a run is made of -----------------------------------------------------------------------------------------

    def _train(self, saves: Checkpoints | None, stop: Stop) -> bool:
        """Whether a signal ended it."""
        loop = self.loop
        latest = None if saves is None else saves.latest
        if saves is not None and latest is not None:
            self.state, self.number = saves.restore(), latest
        if self.number >= loop.steps:
            self.progress.say(f"nothing to do: {self.number} steps are done, and steps={loop.steps}")
            return False
        batches = training(self.data, loop.rows, loop.seed, self.number)
        batch = spread(next(batches), self.step.mesh)
        self.step.check(batch)
        self.rows = rows_of(batch)
        # The step finds what is compiled here. A server's programs are several, and none of them is the step.
        self.compiled = None if self.step.strategy.server else self.step.compile(batch)
        if latest is None:
            self.state = self.step.init(jax.random.key(loop.seed))
        self._emit("on_start", {"step": self.number})
        self._clock = time.perf_counter()
        while self.number < loop.steps:
            self.state, metrics = self.step(self.state, batch)
            self.number += 1
            self._report()  # on the step before, while this one runs
            self._late = self.number, metrics
            stopped = stop.after(self.number)
            ends = stopped or self._stopping or self.number == loop.steps
            evaluates = self.held_out is not None and not stopped and (ends or self.number % loop.evaluate_every == 0)
            saved = saves is not None and (ends or self.number % loop.save_every == 0)
            if ends or evaluates or saved:
                self._settle()  # what is not finite is neither saved nor evaluated
            if evaluates:
                self._emit("on_evaluate", {"step": self.number, **self.evaluate()})
            if saves is not None and saved:
                self._save(saves)
            if ends:
                return stopped
            try:
                batch = spread(next(batches), self.step.mesh)
            except BaseException:
                self._rescue(saves)
                raise
            if evaluates or saved:
                self._clock = time.perf_counter()
        return False

    def evaluate(self) -> dict[str, float]:
        """The held-out metrics as "held_out_loss" and so on: exact means over all that is held out, in its own weights.

        Raises ValueError where there is no held-out batch.
        """
        sums: dict[str, float] = {}
        total, late = 0.0, None

        def add(weight: float, metrics: Any) -> None:
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + weight * float(value)

        for batch in held_out(self.held_out, self.loop.rows, self.loop.evaluate_batches):
            metrics = self.step.evaluate(self.state, spread(batch, self.step.mesh))
            if late:
                add(*late)
            late = weight_of(batch), metrics
            total += late[0]
        if late is None or not total:
            raise ValueError("held_out has no batch to evaluate on; pass at least one, or None")
        add(*late)
        return {f"held_out_{name}": value / total for name, value in sums.items()}

    def _save(self, saves: Checkpoints) -> None:
        saves.save(self.number, self.state)
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

    def _settle(self) -> None:
        """Reports the last step. Raises FloatingPointError where it or its update is not finite."""
        self._report()
        if not _all_finite(self.state.params):
            raise FloatingPointError(
                self._advice(f"the update of step {self.number} left parameters that are not finite")
            )

    def _report(self) -> None:
        """Waits for the step before, and passes its metrics on."""
        if self._late is None:
            return
        number, metrics = self._late
        self._late = None
        values = {name: float(value) for name, value in metrics.items()}
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        self._check(number, values)
        units = self.units
        speed = {"seconds": seconds, f"{units.rows}_per_second": self.rows * units.per_row / seconds}
        self._emit("on_step", {"step": number, **values, **speed})

    def _check(self, number: int, values: Mapping[str, float]) -> None:
        """Raise FloatingPointError where nothing good can come any more."""
        before, times = self._skipped
        self._skipped = values["skipped"], times + 1 if values["skipped"] > before else 0
        wrong = [name for name in ("loss", "grad_norm") if not math.isfinite(values[name])]
        if not wrong or 0 < self._skipped[1] < _HOPELESS:
            return
        raise FloatingPointError(
            self._advice(f"step {number}: {' and '.join(f'{name} is {values[name]}' for name in wrong)}")
        )

    def _advice(self, wrong: str) -> str:
        last = f"; the last checkpoint in {self.loop.out} is from before" if self.loop.out else ""
        return f"{wrong}; try a lower learning rate, a longer warm-up, clipping of gradients, or precision=f32{last}"

    def _emit(self, event: str, metrics: dict[str, float]) -> None:
        for hook in self.hooks:
            if (call := getattr(hook, event, None)) is not None:
                call(self, metrics)


@jax.jit
def _all_finite(params: Any) -> jax.Array:
    return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(params)]).all()


def _check_rows(rows: int, step: Step) -> None:
    """Raise ValueError where a batch of so many rows does not split over replicas and microbatches."""
    replicas, microbatches = step.replicas, step.strategy.microbatches
    if extra := rows % (blocks := replicas * microbatches):
        below = f"{rows - extra} or " if rows > blocks else ""
        raise ValueError(
            f"rows={rows} do not split over {replicas} replicas x {microbatches} microbatches: "
            f"use rows={below}{rows - extra + blocks}, or any multiple of {blocks}"
        )
