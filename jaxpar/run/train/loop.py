"""How a run goes, what its numbers are counted in, and who hears of it."""

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

# What each of several processes may have in its own way.
OWN = ("print_every", "quiet", "config", "devices", "coordinator", "processes", "process", "data")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """How long a run trains, and what it does beside training."""

    steps: int = 300
    """updates in all; 0 compiles the step and explains what it holds and sends, without training"""
    rows: int = 16
    """rows of a batch, over all devices (windows of text, images)"""
    seed: int = 0
    """of initial values, batches and dropout"""
    out: Place | None = None
    """folder for metrics, plot and checkpoints, or an address: s3://bucket/run, gs://bucket/run"""
    evaluate_every: int = 100
    """steps between evaluations on held-out data; there is one at the end as well"""
    evaluate_batches: int | None = None
    """held-out batches in an evaluation, spread evenly; without it: all of them"""
    save_every: int = 100
    """steps between checkpoints; there is one at the end, and when the run is stopped"""
    keep: int = 2
    """checkpoints that are kept, the last ones"""
    print_every: int | None = None
    """steps between printed lines where there is no terminal for a progress bar; without it: a twentieth of all"""
    prefetch: int = 0
    """batches that are read ahead in a thread, and put on their devices; 0: a batch is read while a step runs"""
    resume: bool | Literal["latest-good"] = False
    """go on from the last checkpoint in the output folder, or start where there is none yet; with "latest-good" from
    the newest one that is not damaged"""
    overwrite: bool = False
    """remove what an earlier run wrote to the output folder"""
    changed_data: bool = False
    """go on though the data are no longer those that the run was trained on: files were mended, added or removed"""
    on_nonfinite: str = "stop"
    """where loss or gradients are NaN or infinite: stop, explain (stop, with the equation that made it, its rank and
    rows), skip (do not apply that step), or rollback (the weights and the optimizer of the last checkpoint, and on with
    the batch after; no batch comes twice)"""
    check_replicas_every: int | None = None
    """steps between comparisons of what all replicas should have the same of, to the bit; without it: none"""
    quiet: bool = False
    """print nothing"""

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Refuse options that were removed, and say what to use instead."""
        if says := next(filter(None, (removed(f"Loop.{name}") for name in options)), ""):
            raise ValueError(says)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in (one.name for one in fields(self)):  # those of the command line too
            given = getattr(self, name)
            if name in ("out", "data") and (isinstance(given, str | Path) or is_bucket(given)):
                object.__setattr__(self, name, place(given, name))
            elif isinstance(given, Path):
                local(given, name)
        for name, least in {"steps": 0, "rows": 1, "seed": 0, "evaluate_every": 1, "evaluate_batches": 1,
                            "save_every": 1, "keep": 1, "print_every": 1, "prefetch": 0,
                            "check_replicas_every": 1}.items():  # fmt: skip
            value = getattr(self, name)
            if value is None and name in ("evaluate_batches", "print_every", "check_replicas_every"):
                continue
            if not isinstance(value, Integral):
                raise ValueError(f"{name}={value!r} is not a whole number; use one from {least}")
            if value < least:
                raise ValueError(f"{name}={value} is too small; use {least} or more")
        if self.seed >= 2**32:
            raise ValueError(f"seed={self.seed} is more than jax's keys tell apart; use {2**32 - 1} or less")
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
        """How to go on after the run was stopped."""
        return f"resume=True with out={str(self.out)!r} goes on from there"


@dataclass(frozen=True)
class Units:
    """What the numbers of a run are counted in.

    Attributes:
      rows: what speed counts, "rows", "images", "tokens".
      per_row: how many of those a row holds.
      loss: name of the loss as it is shown; `factor` times the loss that the model returns, which is what is logged.
      flops: floating-point operations of one step over all devices, for the MFU; None where they are not known.
      lines: losses to compare with, in the unit that is shown: name -> value.
    """

    rows: str = "rows"
    per_row: int = 1
    loss: str = "loss"
    factor: float = 1.0
    flops: float | None = None
    lines: Mapping[str, float] = field(default_factory=dict)


class Run(Protocol):
    """A `Trainer` as its hooks see it."""

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
      on_start: compiled, before the first step; metrics {"step"}.
      on_step: metrics of one step as floats: "step", "loss" (before its update), "grad_norm", "finite", "skipped",
        the loss's own, "seconds", "rows_per_second" (or images, tokens), "input_share" (of those seconds, how much at
        most the devices had nothing to do before the next batch came), with `on_nonfinite="rollback"` "rollbacks" so
        far. They come one step late, while the next one runs: `trainer.state` is that of `trainer.number`, not of
        `metrics["step"]`.
      on_evaluate: "step", and the held-out metrics as "held_out_loss" and so on. `trainer.state` is of that step.
      on_save: "step", of a checkpoint that is being written.
      on_end: "step"; always, also after an error.

    With several hosts, all call them.
    """

    on_start: Callable[[Any, dict[str, float]], Any] | None = None
    on_step: Callable[[Any, dict[str, float]], Any] | None = None
    on_evaluate: Callable[[Any, dict[str, float]], Any] | None = None
    on_save: Callable[[Any, dict[str, float]], Any] | None = None
    on_end: Callable[[Any, dict[str, float]], Any] | None = None


def checked(hook: Any) -> Any:
    """Raise ValueError where a hook has no event, or one that is misspelt."""
    named = [name for name in dir(hook) if name.startswith("on_")]
    for name in named:
        if name not in EVENTS:
            raise ValueError(
                f"hook {type(hook).__name__} has {name}, which is no event; use one of {', '.join(EVENTS)}"
                f"{did_you_mean(name, EVENTS)}"
            )
    if not named:
        raise ValueError(f"hook {hook!r} has none of {', '.join(EVENTS)}; wrap a function: Hook(on_step=function)")
    return hook
