"""The command `jaxpar plan`: ranks strategies for one batch size or for several, or plans a run with a deadline."""

import contextlib
import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import jax
import optax
import tyro

from ...backend.text import WIDTH, amount, number
from ...forecast.plan.estimates import Estimator
from ...forecast.plan.planner import Planner, check_precisions, plan, planned_for
from ...forecast.plan.ranking import Plan, summary
from ...forecast.plan.run import PlannedRun, plan_run
from ...model.model import Model
from ...strategy import Strategy
from .model_sources import is_function, load_user_model
from .options import MODEL_HELP, named_model, optimizer_named

# Defaults of a plan, and of a run with a deadline.
_BATCH, _LENGTH, _TOP, _TOP_OF_RUN = 8, 4096, 16, 6
_LONGEST = 8192  # tokens of a row of a run, where the model's context allows more
_MOST_HOSTS = 2048
_SPEEDUP_TO_CONTINUE = 1.01  # smallest gain in rows/s from twice as many rows with which a sweep continues


@dataclass(frozen=True)
class PlanOptions:
    """Rank strategies for a model on devices that need not be here: which fit, how fast they are, and why others lose.

    The best few by closed forms are compiled; nothing runs. The results of compilation are cached.
    """

    model: Annotated[str, tyro.conf.arg(help=MODEL_HELP)] = "llama3-8b"
    target: str = "8xH100"
    """devices to plan for: 8xH100, 32x8xH100, 64xcluster.toml; with --days a kind, H100, to search their number"""
    batch: int | None = None
    """rows of the global batch; by default 8, or with --days those of a usual batch of tokens"""
    seq: int | None = None
    """text: tokens of a row; by default 4096, or with --days the model's context, at most 8192"""
    strategy: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """compile only this strategy; give it several times for several: tensor=8,pipe=16,data=128,precision=bf16"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """optimizer to plan for; muon updates the model's hidden matrices, and all other parameters by AdamW"""
    precision: Literal["bf16", "f16", "f32", "fp8"] = "bf16"
    """compute dtype of all strategies"""
    memory: str | None = None
    """memory of one device, instead of the target's: 40GB"""
    sweep: Literal["batch"] | None = None
    """plan for --batch, twice as many rows, and so on, until nothing fits or more rows are not faster"""
    tokens: str | None = None
    """tokens of a whole run, to show its days: 300B, 15T, 1.5e12; rows, if the model reads no text"""
    days: float | None = None
    """deadline of such a run: finds the smallest number of hosts that meets it, 1, 2, 4, ..."""
    price: float | None = None
    """price of one device for an hour, to show the cost of such a run"""
    top: int | None = None
    """number of strategies to compile; by default 16, or with --days 6 for a number of devices"""
    explain: int | None = None
    """print every number of this line of the table, with its source"""
    json: bool = False
    """print JSON instead of a table"""
    cache: Path | None = None
    """folder of cached results; by default JAXPAR_CACHE, or ~/.cache/jaxpar/plan"""

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "top"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} {value} is too small; use a whole number from 1")
        if self.price is not None and not 0 <= self.price < float("inf"):
            raise ValueError(f"--price {self.price:g} is no price; use a number from 0, for an hour of one device: 2.5")
        tokens_of(self)
        memory_of(self)
        if self.days is not None and not 0 < self.days < float("inf"):
            raise ValueError(f"--days {self.days:g} is no deadline; use a number of days above 0: --days 30")
        if self.days is not None and self.tokens is None:
            raise ValueError(f"--days {self.days:g} is the deadline of a run, which needs a length; add --tokens 2T")
        if self.days is None and is_kind(self.target):
            missing = "--days 30" if self.tokens else "--tokens 2T --days 30"
            raise ValueError(
                f"--target {self.target} names no number of devices; give it, as 8x{self.target}, or add {missing} to "
                "search the smallest number that meets a deadline"
            )
        taken = {"--sweep": self.sweep, "--explain": self.explain, "--json": self.json, "--strategy": self.strategy}
        if self.days is not None and (option := next((name for name, value in taken.items() if value), None)):
            raise ValueError(f"--days prints one table of days and takes no {option}; leave one of the two out")
        if self.sweep and (self.explain is not None or self.json):
            raise ValueError("--sweep prints a line for each batch; leave out --explain and --json, or the sweep")


def main(options: PlanOptions) -> None:
    """Plan, and print the plan. Exits with 1 if no strategy fits, 130 after Ctrl-C."""
    with _stopped_by_sigterm():
        _main(options)


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the compiling as Ctrl-C does, so that the table so far is printed; then exit with 143."""
    received: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        received.append(number)
        # A shell's background job ignores Ctrl-C, and so a SIGINT that is raised here.
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    previous_handler = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if received:
            sys.exit(128 + signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous_handler or signal.SIG_DFL)  # None: a handler that is not Python's


def _main(options: PlanOptions) -> None:
    """Plan, and print the plan, without attention to SIGTERM."""
    for text in options.strategy:
        Strategy.parse(text)  # an error now, not after minutes
    if os.environ.get("JAX_PLATFORMS") is None:
        jax.config.update("jax_platforms", "cpu")  # without this, machines without GPUs lack the GPU compiler
    # Refuse an unknown target before the model is read. A missing compiler is reported by `plan`, after other errors.
    with contextlib.suppress(ImportError):
        planned_for(f"1x{options.target}" if is_kind(options.target) else options.target)
    if options.days is not None:
        _plan_run(options)
        return
    if options.sweep:
        _sweep(options)
        return
    result = _plan(options, options.batch or _BATCH)
    # The plan is printed even if Ctrl-C has interrupted it: it holds the strategies ranked so far.
    if options.json:
        print(json.dumps(result.json(), indent=1))  # noqa: T201
    else:
        print(result if options.explain is None else result.explain(options.explain))  # noqa: T201
    if result.interrupted:
        raise KeyboardInterrupt
    if not any(line.fits for line in result.lines):
        sys.exit(1)


def _sweep(options: PlanOptions) -> None:
    """Plan for a growing batch, and print a sentence about each size. Exits with 1 if not even the first one fits."""
    rows, last_speed = options.batch or _BATCH, 0.0
    while True:
        try:
            result = _plan(options, rows)
        except ValueError as error:
            # An error at the first batch is the user's. At a larger one it ends the sweep.
            if not last_speed:
                raise
            # The first batch fitted, so a larger one that cannot be split is the end of the sweep, and no failure.
            print(textwrap.fill(f"{rows:,} rows: {error}", WIDTH, subsequent_indent="  "))  # noqa: T201
            return
        sentence = f"{rows:,} rows: {summary(result)}"
        print(textwrap.fill(sentence, WIDTH, subsequent_indent="  "), flush=True)  # noqa: T201
        if result.interrupted:
            raise KeyboardInterrupt
        # Lines are ranked, the best one first.
        best = result.lines[0]
        if not best.fits and not last_speed:
            sys.exit(1)
        # The second test also ends a sweep in which twice the rows take twice the time.
        if not best.fits or (speed := best.prediction["rows_per_second"]) < _SPEEDUP_TO_CONTINUE * last_speed:
            return
        rows, last_speed = 2 * rows, speed


def _plan(options: PlanOptions, rows: int) -> Plan:
    """Return the plan for a global batch of `rows` rows."""
    subject = _subject(options, rows, options.seq or _LENGTH)
    result = plan(
        subject.model,
        subject.batch,
        options.target,
        subject.optimizer,
        flops=subject.flops,
        strategies=options.strategy or None,
        top=options.top or _TOP,
        precision=options.precision,
        length=subject.length,
        cache=True if options.cache is None else options.cache,
        trainable=subject.trainable,
        memory_bytes=memory_of(options),
    )
    return replace(result, tokens=tokens_of(options), price=options.price)


@dataclass(frozen=True)
class _Subject:
    """A model, a global batch, and what `plan` asks about them. `length` is None if the model reads no text."""

    model: Model
    batch: Any
    optimizer: optax.GradientTransformation | None
    flops: float | None
    length: int | None
    trainable: Callable[[str], bool] | None


def _subject(options: PlanOptions, rows: int, length: int) -> _Subject:
    """Return the model that the options name, with a global batch of `rows` rows of `length` tokens."""
    # A user's function says nothing about FLOPs, positions or frozen parameters.
    if is_function(options.model):
        user_model = load_user_model(options.model)
        model, batch = user_model.model, user_model.example(rows)
        flops, reads_text, trainable = None, False, None
    else:
        named = named_model(options.model, length)
        model, batch, reads_text = named.model, named.example(rows, length), named.kind == "text"
        trainable, flops = named.trainable, named.flops(rows, length)
    # Without an optimizer, `plan` takes AdamW.
    optimizer = optimizer_named(options.optimizer, 3e-4, 0.1, model, batch) if options.optimizer == "muon" else None
    return _Subject(model, batch, optimizer, flops, length if reads_text else None, trainable)


def memory_of(options: PlanOptions) -> float | None:
    """Return the bytes of memory of one device, if the options name them."""
    return None if options.memory is None else amount(options.memory, "B")


def tokens_of(options: PlanOptions) -> float | None:
    """Return the tokens of the run, if the options name them."""
    if options.tokens is None:
        return None
    try:
        return amount(options.tokens.replace("B", "G"))  # B for billions, not bytes
    except ValueError:
        raise ValueError(
            f"--tokens {options.tokens} is no number above 0 of tokens; write it as 300B, 2T or 1.5e12"
        ) from None


# -- days of a run -----------------------------------------------------------------------------------------------------


def is_kind(target: str) -> bool:
    """Return whether a target names a kind of devices without their number: H100, cluster.toml."""
    return re.match(r"\d+x|\w+:", target) is None


def _plan_run(options: PlanOptions) -> None:
    """Print the days and the cost of a run by numbers of hosts. Exits with 1 if none meets the deadline."""
    rows, length, usual = _usual_batch(options)
    subject = _subject(options, rows, length)
    tokens = tokens_of(options)
    assert tokens is not None  # __post_init__ asks for them
    assert options.days is not None
    run = PlannedRun(
        tokens, rows * (subject.length or 1), options.days, options.price, "tokens" if subject.length else "rows"
    )
    batch = f"{rows:,} rows" + (f" of {length:,} tokens" if subject.length else "")
    if run.tokens < run.step_tokens:
        raise ValueError(
            f"--tokens {options.tokens} is less than one batch, {batch}; give the {run.unit} of the whole run, as 2T"
        )
    result = plan_run(
        _planners(options, subject),
        run,
        f"{options.model}, precision={options.precision}; {run.steps:,} steps of {batch}{usual}",
        searched=is_kind(options.target),
        top=options.top or _TOP_OF_RUN,
        precision=options.precision,
    )
    print(result)  # noqa: T201
    if result.interrupted:
        raise KeyboardInterrupt
    if result.answer is None:
        sys.exit(1)


def _usual_batch(options: PlanOptions) -> tuple[int, int, str]:
    """Return the rows of the global batch, the tokens of a row, and a remark if they were not given."""
    named = None if is_function(options.model) else named_model(options.model, 1)
    reads_text = named is not None and named.kind == "text"
    length = options.seq or (min(named.config.context, _LONGEST) if named and reads_text else _LENGTH)
    if options.batch is not None:
        return options.batch, length, ""
    if named is None or not reads_text:
        raise ValueError(
            f"--days {options.days:g} needs the rows of the global batch, and none are usual for {options.model}; add "
            "--batch 1024"
        )
    # 4M tokens for 7B to 65B parameters: Touvron et al. 2023, arXiv:2302.13971, table 2. 0.5M for fewer than 1B: Brown
    # et al. 2020, arXiv:2005.14165, table 2.1.
    tokens = 2**22 if named.parameters >= 1e9 else 2**19
    remark = f", a usual batch of {number(tokens, '.1f')} tokens, which --batch and --seq change"
    return max(1, tokens // length), length, remark


def _planners(options: PlanOptions, subject: _Subject) -> Iterator[Planner]:
    """Yield a planner for the number of devices that the target names; or for 1, 2, 4, ... hosts of its kind."""
    names: Iterable[str] = [options.target]
    memory = memory_of(options)
    if is_kind(options.target):
        per_host = planned_for(f"1x{options.target}").hardware.per_host
        names = (f"{per_host << k}x{options.target}" for k in range(_MOST_HOSTS.bit_length()))
    estimator: Estimator | None = None
    for name in names:
        target = planned_for(name, memory)
        check_precisions([options.precision], target)
        if estimator is None:
            optimizer = subject.optimizer or optax.adamw(3e-4)
            estimator = Estimator(subject.model, optimizer, target, subject.batch, None, subject.trainable)
        estimator = estimator.for_target(target)
        yield Planner(estimator, subject.flops, subject.length, True if options.cache is None else options.cache)
