"""How a run goes, what its numbers are counted in, who hears of it, and the folder that is its own."""

from __future__ import annotations

import contextlib
import errno
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

import jax
from filelock import FileLock, Timeout
from jax.experimental import multihost_utils

from ..step.core import Step
from ..text import did_you_mean

EVENTS = ("on_start", "on_step", "on_evaluate", "on_save", "on_end")
# What a run writes into its folder, and all that `overwrite` removes.
WRITTEN = ("config.yaml", "metrics.jsonl", "loss.png", "checkpoints", "tensorboard")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """How long a run trains, and what it does beside training."""

    steps: int = 300
    """updates in all; 0 compiles the step and explains what it holds and sends, without training"""
    rows: int = 16
    """rows of a batch, over all devices (windows of text, images)"""
    seed: int = 0
    """of initial values, batches and dropout"""
    out: Path | None = None
    """folder for metrics, plot and checkpoints"""
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
    resume: bool = False
    """go on from the last checkpoint in the output folder, or start where there is none yet"""
    overwrite: bool = False
    """remove what an earlier run wrote to the output folder"""
    quiet: bool = False
    """print nothing"""

    def __post_init__(self) -> None:
        if isinstance(self.out, str):
            object.__setattr__(self, "out", Path(self.out))
        for name, least in {"steps": 0, "rows": 1, "seed": 0, "evaluate_every": 1, "evaluate_batches": 1,
                            "save_every": 1, "keep": 1, "print_every": 1}.items():  # fmt: skip
            value = getattr(self, name)
            if value is None and name in ("evaluate_batches", "print_every"):
                continue
            if not isinstance(value, Integral):
                raise ValueError(f"{name}={value!r} is not a whole number; use one from {least}")
            if value < least:
                raise ValueError(f"{name}={value} is too small; use {least} or more")
        if self.seed >= 2**32:
            raise ValueError(f"seed={self.seed} is more than jax's keys tell apart; use {2**32 - 1} or less")
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite contradict each other; leave one out")
        if (self.resume or self.overwrite) and self.out is None:
            raise ValueError(f"{'resume' if self.resume else 'overwrite'} needs the run's folder: give it as out")

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

    @property
    def memory(self) -> tuple[int, str]:
        """See `Trainer.memory`."""
        ...


@dataclass(frozen=True)
class Hook:
    """Functions that a `Trainer` calls as `on_...(trainer, metrics)`; any object with some of these methods is a hook.

    Attributes:
      on_start: compiled, before the first step; metrics {"step"}.
      on_step: metrics of one step as floats: "step", "loss" (before its update), "grad_norm", "skipped", the loss's
        own, "seconds", "rows_per_second" (or images, tokens). They come one step late, while the next one runs:
        `trainer.state` is that of `trainer.number`, not of `metrics["step"]`.
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


@contextlib.contextmanager
def claimed(loop: Loop) -> Iterator[None]:
    """Within it the folder of a run is its own. Raises ValueError where another run is in it that is not to be
    resumed, or that is still going on; with several hosts, on all of them.
    """
    if (out := loop.out) is None:
        yield
        return
    there = [name for name in WRITTEN if (out / name).is_file() or any((out / name).glob("*"))]
    if there and not (loop.resume or loop.overwrite):
        raise ValueError(
            f"{out} already holds a run ({', '.join(there)}); resume goes on with it, overwrite removes it, "
            "another out leaves it alone"
        )
    several, problem = jax.process_count() > 1, ""
    if several:  # none removes what another has not looked at yet, or writes what one then removes
        multihost_utils.sync_global_devices("looked")
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            try:
                out.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(out / ".lock", blocking=False))
            except Timeout:
                problem = f"another run is going on in {out}; wait for its end, or name another out"
            except OSError as error:
                if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
                    says = f"{out} is where files cannot be locked; see to it that no two runs use it at once"
                    warnings.warn(says, stacklevel=2)
                else:
                    problem = f"out={str(out)!r} cannot be used: {error.strerror}; name a folder that you may write to"
            for path in (out / name for name in there if loop.overwrite and not problem):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if several and multihost_utils.broadcast_one_to_all(bool(problem)) and not problem:
            problem = f"process 0 cannot use {out}; its own error says why"
        if problem:
            raise ValueError(problem)
        yield
