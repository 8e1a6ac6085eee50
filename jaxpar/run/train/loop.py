"""The settings of a run, the units of its numbers, and its hooks.

`Loop` holds how long a run trains and when it evaluates and saves. `Units` says in which units progress and plots show
the loss and the speed. A `Hook` is called at the `EVENTS` of a `Trainer`, which hooks see as a `Run`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from ...backend.buckets import Place, is_bucket
from ...backend.files import local, place
from ...backend.removed import removed
from ...backend.text import did_you_mean
from ...step.core import Step

EVENTS = ("on_start", "on_step", "on_evaluate", "on_save", "on_end")
ON_NONFINITE = ("stop", "explain", "skip", "rollback")

# Options that may differ between the processes of one run; all others are compared.
PER_PROCESS_OPTIONS = ("print_every", "quiet", "config", "devices", "coordinator", "processes", "process", "data")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """How long a run trains, when it evaluates and saves, and how it reacts to faults."""

    steps: int = 300
    """number of updates; 0 compiles the step and explains what it holds and sends, without training"""
    rows: int = 16
    """rows of the global batch, over all devices (windows of text, images)"""
    seed: int = 0
    """seed of initial values, batches and dropout"""
    out: Place | None = None
    """folder for metrics, plot and checkpoints, or an address: s3://bucket/run, gs://bucket/run"""
    evaluate_every: int = 100
    """steps between evaluations on held-out data; the run also evaluates at its end"""
    evaluate_batches: int | None = None
    """largest number of held-out batches of an evaluation, evenly spaced in the data; by default all of them"""
    save_every: int = 100
    """steps between checkpoints; the run also saves at its end, and when it is stopped"""
    keep: int = 2
    """number of checkpoints to keep: the latest ones"""
    print_every: int | None = None
    """steps between printed lines if there is no terminal for a progress bar; by default a twentieth of all steps"""
    prefetch: int = 0
    """batches that a thread reads ahead and puts on their devices; 0 reads each batch while a step runs"""
    resume: bool | Literal["latest-good"] = False
    """continue from the last checkpoint in the output folder, or start if it has none; "latest-good" continues from the
    newest checkpoint that is not damaged"""
    overwrite: bool = False
    """remove what an earlier run wrote to the output folder"""
    changed_data: bool = False
    """continue although the data have changed since the checkpoint: files were mended, added or removed"""
    on_nonfinite: str = "stop"
    """reaction to a loss or gradient that is NaN or infinite: stop; explain (stop, and name the equation that caused
    it, its rank and rows); skip (do not apply that step); or rollback (restore weights and optimizer from the last
    checkpoint, and continue with the next batch; no batch comes twice)"""
    check_replicas_every: int | None = None
    """steps between bitwise comparisons of all replicated arrays; by default none"""
    quiet: bool = False
    """print nothing"""

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Raise ValueError for options that were removed, with their replacement."""
        # The dataclass alone would raise a TypeError, which does not say what replaces the option.
        if message := next(filter(None, (removed(f"Loop.{name}") for name in options)), ""):
            raise ValueError(message)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        # 1. Paths. A text becomes a path, or the address of a bucket.
        for name in (option.name for option in fields(self)):  # with the options that subclasses add
            value = getattr(self, name)
            if name in ("out", "data") and (isinstance(value, str | Path) or is_bucket(value)):
                object.__setattr__(self, name, place(value, name))  # the dataclass is frozen
            elif isinstance(value, Path):
                local(value, name)
        # 2. Counts.
        for name, minimum in {"steps": 0, "rows": 1, "seed": 0, "evaluate_every": 1, "evaluate_batches": 1,
                            "save_every": 1, "keep": 1, "print_every": 1, "prefetch": 0,
                            "check_replicas_every": 1}.items():  # fmt: skip
            value = getattr(self, name)
            # None has a meaning for these: all batches, a twentieth of the steps, never.
            if value is None and name in ("evaluate_batches", "print_every", "check_replicas_every"):
                continue
            if not isinstance(value, Integral):
                raise ValueError(f"{name}={value!r} is not a whole number; use one from {minimum}")
            if value < minimum:
                raise ValueError(f"{name}={value} is too small; use {minimum} or more")
        if self.seed >= 2**32:
            raise ValueError(f"seed={self.seed} is too large for jax's random keys; use {2**32 - 1} or less")
        # 3. Choices, and options that contradict each other.
        if self.on_nonfinite not in ON_NONFINITE:
            raise ValueError(
                f"on_nonfinite={self.on_nonfinite!r} is not one of {', '.join(ON_NONFINITE)}"
                f"{did_you_mean(self.on_nonfinite, ON_NONFINITE)}"
            )
        if self.on_nonfinite == "rollback" and self.out is None:
            raise ValueError("on_nonfinite='rollback' needs checkpoints to go back to: give the run's folder as out=")
        if self.resume not in (False, True, "latest-good"):
            raise ValueError(f"resume={self.resume!r}: use True, False or 'latest-good'")
        if self.resume and self.overwrite:
            raise ValueError("resume=True and overwrite=True contradict each other; leave one out")
        if self.changed_data and not self.resume:
            raise ValueError("changed_data=True is for a run that goes on with other data; give resume=True as well")
        if (self.resume or self.overwrite) and self.out is None:
            raise ValueError(f"{'resume' if self.resume else 'overwrite'}=True needs the run's folder: give it as out=")

    @property
    def again(self) -> str:
        """The hint that tells how to continue after the run was stopped."""
        return f"resume=True with out={str(self.out)!r} goes on from there"


@dataclass(frozen=True)
class Units:
    """The units in which a run shows its speed and its loss.

    Attributes:
      rows: the unit of speed: "rows", "images" or "tokens".
      per_row: how many of these units one row holds.
      loss: unit of the loss in progress and plots. Their values are `factor` times the loss that the model returns;
        `metrics.jsonl` holds the loss as returned.
      factor: see `loss`.
      flops: floating-point operations of one step over all devices, for the MFU; None if they are not known.
      lines: reference losses by name, in the unit `loss`.
    """

    rows: str = "rows"
    per_row: int = 1
    loss: str = "loss"
    factor: float = 1.0
    flops: float | None = None
    lines: Mapping[str, float] = field(default_factory=dict)


class Run(Protocol):
    """The attributes of a `Trainer` that its hooks use."""

    step: Step
    loop: Loop
    units: Units
    number: int
    rows: int
    files: Path | None

    @property
    def memory(self) -> tuple[int, str]:
        """See `Trainer.memory`."""
        ...


@dataclass(frozen=True)
class Hook:
    """Functions that a `Trainer` calls as `on_...(trainer, metrics)`; any object with some of these methods is a hook.

    Attributes:
      on_start: called once the step is compiled, before the first step; metrics {"step"}.
      on_step: called with the metrics of one step as floats: "step", "loss" (before its update), "grad_norm", "finite",
        "skipped", the metrics of the loss function, "seconds", "rows_per_second" (or images, tokens), "input_share"
        (the largest part of "seconds" for which the devices can have waited for a batch), and with
        `on_nonfinite="rollback"` the number of "rollbacks" so far. The call comes one step late, while the next step
        runs: `trainer.state` belongs to `trainer.number`, not to `metrics["step"]`.
      on_evaluate: called with "step" and the held-out metrics, "held_out_loss" and so on. `trainer.state` belongs to
        that step.
      on_save: called with "step", the step of a checkpoint that is being written.
      on_end: called with "step" when the run ends, also after an error.

    With several hosts, every host calls its hooks.
    """

    on_start: Callable[[Any, dict[str, float]], Any] | None = None
    on_step: Callable[[Any, dict[str, float]], Any] | None = None
    on_evaluate: Callable[[Any, dict[str, float]], Any] | None = None
    on_save: Callable[[Any, dict[str, float]], Any] | None = None
    on_end: Callable[[Any, dict[str, float]], Any] | None = None


def validate_hook(hook: Any) -> Any:
    """Return the hook. Raises ValueError if it has no method for an event, or one whose name is no event."""
    methods = [name for name in dir(hook) if name.startswith("on_")]
    for name in methods:
        if name not in EVENTS:
            raise ValueError(
                f"hook {type(hook).__name__} has {name}, which is not an event; use one of {', '.join(EVENTS)}"
                f"{did_you_mean(name, EVENTS)}"
            )
    if not methods:
        raise ValueError(f"hook {hook!r} has none of {', '.join(EVENTS)}; wrap a function: Hook(on_step=function)")
    return hook
