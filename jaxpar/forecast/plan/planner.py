"""plan: which strategy trains a model fastest on devices that need not be here, and why the others lose.

The strategies of `candidates` are ordered by closed forms, the best few of them compiled for the target, and these
ranked by what their programs hold and how long `predict` says that they take.
"""

import dataclasses
import itertools
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ...backend.text import size
from ...hardware.compiled.compiler_remarks import unread
from ...hardware.compiled.kernels import Executable
from ...hardware.devices import Target
from ...hardware.devices import target as target_of
from ...hardware.hardware import KINDS, RESERVE
from ...inspect.expected import expected
from ...inspect.ledger import Ledger
from ...inspect.memory import of_step
from ...inspect.predict.prediction import predict
from ...make import make_train_step
from ...model.batches import check_rows, rows_of
from ...model.model import MAKERS, Model
from ...parallel.pipeline.chunks import padded
from ...parallel.tensor.dims import Rules
from ...step.checks import check_trainable
from ...step.core import Step
from ...strategy import Strategy, as_strategy
from .cache import PlanCache, about, folder
from .candidates import NONE, REMATS, Splits, candidates, enough
from .estimates import Estimate, Estimator
from .line import Line, ranked
from .neighbours import alike_but, families, keeps_more, neighbours
from .ranking import Plan

_TRIES = 3  # of a family whose fastest do not fit


def plan(
    model: Model,
    batch: Any,
    target: Target | str,
    optimizer: optax.GradientTransformation | None = None,
    rules: Rules | None = None,
    flops: float | None = None,
    strategies: Iterable[Strategy | str] | None = None,
    top: int = 16,
    precision: str = "bf16",
    length: int | None = None,
    cache: str | os.PathLike[str] | bool = True,
    console: Console | None = None,
    trainable: Callable[[str], bool] | None = None,
    memory_bytes: float | None = None,
) -> Plan:
    """Strategies for a model on a target, ranked by the step time predicted for their compiled programs. Nothing runs.

    Args:
      model: from `from_nnx`, `from_linen`, `from_equinox` or `Model(init=..., loss=...)`.
      batch: the global batch, as `jax.ShapeDtypeStruct` or arrays.
      target: by name ("8xH100"), or from `jaxpar.hardware.devices.target`.
      optimizer: any optax transformation; `optax.adamw(3e-4)` if None.
      rules: for `tensor`, as for `make_train_step`.
      flops: of a step on that batch, forward and backward without recomputation; gives the MFU.
      strategies: these alone are compiled, all of them; else the best of `candidates` by closed forms, and then what
        differs in one choice from the best that was found.
      top: so many are compiled at most.
      precision: of the candidates, all of them: "bf16", "f16", "f32" or, where the target multiplies it, "fp8".
      length: positions of a row; gives tokens/s.
      cache: folder of what was compiled before; True: `JAXPAR_CACHE`, or jaxpar/plan in the user's folder for caches;
        False: none.
      console: where a progress bar is shown; standard error if None.
      trainable: what is not frozen, as for `make_train_step`: a plan for adapters beside a base.
      memory_bytes: of one device of a target by name, in place of its kind's.

    Ctrl-C ends the compiling: the plan has what was ranked so far, and `interrupted` is True. What was compiled stays
    in the cache.

    Raises ValueError where the target's bandwidths and peaks are not known or its programs not read (CPUs, TPUs), and
    where no strategy can be.
    """
    if not isinstance(model, Model):
        raise ValueError(f"model is a {type(model).__name__}; make one with {MAKERS}")
    Strategy(precision=precision)
    target = planned_for(target, memory_bytes)
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise ValueError(f"top={top!r}: use a whole number from 1")
    if isinstance(strategies, str | Strategy):
        raise ValueError(f"strategies={str(strategies)!r} is one strategy; give a list: [{str(strategies)!r}]")
    chosen = None if strategies is None else [as_strategy(s) for s in strategies]
    if "fp8" in [precision, *(s.precision for s in chosen or ())] and target.hardware.peak("fp8") is None:
        raise ValueError(
            f"precision='fp8' for target={target.name!r}: no peak of FP8 products is known for {target.hardware.kind}; "
            "use precision='bf16', or a kind that multiplies FP8, as '8xH100'"
        )
    check_trainable(trainable)
    check_rows(batch, 1, 1)
    batch = jax.eval_shape(lambda x: x, batch)
    optimizer = optimizer or optax.adamw(3e-4)
    return _Planner(model, target, batch, optimizer, rules, trainable, flops, length, cache).plan(
        chosen, top, precision, console
    )


def planned_for(target: Target | str, memory_bytes: float | None = None) -> Target:
    """The devices that `plan` compiles for. Raises as `plan` does for a target."""
    others = "|".join(["cpu", *(name for name, kind in KINDS.items() if not kind.config)])
    if isinstance(target, str) and (kind := re.fullmatch(rf"(?:\d+x)*({others})(?::[\dx]+)?", target)):
        # Before a compiler is missed.
        why = unread("tpu") if kind[1] != "cpu" else "CPU devices have no peaks and bandwidths to plan by"
        raise ValueError(f"target={target!r}: {why}; plan for GPUs, such as '8xH100'")
    target = target if isinstance(target, Target) else target_of(target, memory_bytes=memory_bytes)
    if target.hardware.memory_bytes is None or not target.hardware.peaks:
        raise ValueError(
            f"target={target.name!r} has no memory, peaks and bandwidths to plan by; use a kind that has, as '8xH100'"
        )
    return target


class _Planner:
    """One call of `plan`."""

    def __init__(
        self, model: Model, target: Target, batch: Any, optimizer: Any, rules: Any, trainable: Any, flops: Any,
        length: Any, cache: Any,
    ) -> None:  # fmt: skip
        self.model, self.target, self.batch, self.optimizer, self.rules = model, target, batch, optimizer, rules
        self.trainable, self.flops, self.length = trainable, flops, length
        self.cache: PlanCache | None = None
        if cache is not False:
            path = folder(None if cache is True else cache)
            self.cache = PlanCache(path, about(model, optimizer, batch, target, rules, trainable))
        self.estimator, self.known = Estimator(model, optimizer, target, batch, rules, trainable), dict[str, Any]()
        self.usable = int((1 - RESERVE) * (target.hardware.memory_bytes or 0))
        self.splits = NONE
        self.lines: list[Line] = []
        self.refused: dict[str, str] = {}
        self.pruned: dict[str, str] = {}
        self.interrupted = False

    def plan(self, given: Sequence[Strategy] | None, top: int, precision: str, console: Console | None) -> Plan:
        bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=console or Console(stderr=True), transient=True,
        )  # fmt: skip
        with bar, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of strategies that nobody has asked for
            try:
                if given is None:
                    self._search(top, precision, bar)
                else:
                    self._compile_all(given, bar)
            except KeyboardInterrupt:
                self.interrupted = True
        if not self.lines and not self.interrupted:
            raise ValueError(self._nothing())
        return Plan(
            target=self.target.name,
            devices=f"{len(self.target.devices)} x {self.target.kind}",
            memory=self.target.hardware.memory_bytes or 0,
            rows=rows_of(self.batch),
            length=self.length,
            lines=ranked(self.lines),
            pruned=self.pruned,
            refused=self.refused,
            interrupted=self.interrupted,
        )

    def _nothing(self) -> str:
        """Why there is no line."""
        whys = list(dict.fromkeys([*self.refused.values(), *self.pruned.values()]))[:3] or ["there is none"]
        rows, n = rows_of(self.batch), len(self.target.devices)
        return (
            f"no strategy can be for {rows} rows on {self.target.name} ({n} devices): {'; '.join(whys)}; try more "
            "devices, a batch whose rows they divide, or strategies= of your own"
        )

    def _compile_all(self, given: Sequence[Strategy], bar: Progress) -> None:
        task = bar.add_task("compile", total=len(given))
        for strategy in given:
            bar.update(task, description=f"compile {strategy}")
            self._compile(strategy, None)
            bar.advance(task)

    def _search(self, top: int, precision: str, bar: Progress) -> None:
        """Compiles the best of each family by closed forms, then what differs in one choice from the best that was
        found, until nothing of that may be faster; what is left of `top` then goes to the rest, by closed forms.
        """
        queue = self._estimated(precision, bar)
        task = bar.add_task("compile", total=min(top, len(queue)))

        def compile_(strategy: Strategy, estimate: Estimate) -> None:
            bar.update(task, description=f"compile {strategy}")
            if self._compile(strategy, estimate):
                bar.advance(task)

        for members in families(queue, self.target)[: max(1, top // 2)]:
            best, before = self._best(), len(self.lines)
            while (pair := self._of_family(members, self.lines[before:], top)) is not None:
                compile_(*pair)
            found = self._best()
            if found and found.fits and found != best and (pair := self._around(top)):
                compile_(*pair)  # a search that is ended early has looked around what it found
        while (pair := self._around(top)) or (pair := self._first(queue, top)):
            compile_(*pair)
        for strategy, estimate in queue:
            if not self._tried(strategy):
                self.pruned[str(strategy)] = reason_to_skip(strategy, estimate, self.lines, self.usable, top) or ""
        self._keep(precision)

    def _keep(self, precision: str) -> None:
        if self.cache and self.cache.get("closed forms", precision) != self.known:
            self.cache.put(self.known, "closed forms", precision)

    def _tried(self, strategy: Strategy) -> bool:
        return str(strategy) in self.refused or any(line.strategy == strategy for line in self.lines)

    def _worth(self, strategy: Strategy, estimate: Estimate, top: int) -> bool:
        return not self._tried(strategy) and not reason_to_skip(strategy, estimate, self.lines, self.usable, top)

    def _first(self, queue: list[tuple[Strategy, Estimate]], top: int) -> tuple[Strategy, Estimate] | None:
        """The first that is worth compiling."""
        return next((pair for pair in queue if self._worth(*pair, top)), None)

    def _of_family(
        self, members: list[tuple[Strategy, Estimate]], found: list[Line], top: int
    ) -> tuple[Strategy, Estimate] | None:
        """The first of a family that is worth compiling and likely to fit, as what was `found` of it needed more than
        closed forms say; None where one of them fits, after some tries, and where what is left of `top` is for what is
        around the best.
        """
        if any(line.fits for line in found) or len(found) == _TRIES or len(self.lines) >= top - top // 4:
            return None
        ratio = min((memory_overrun(line) for line in found), default=1.0)
        likely = [pair for pair in members if ratio * pair[1].bytes <= self.usable]
        return self._first(likely, top)

    def _best(self) -> Line | None:
        """The fastest that fits; the smallest where none does."""
        known = (line for line in self.lines if line.estimate)
        order: Any = lambda line: (not line.fits, line.seconds if line.fits else line.memory["total"])
        return min(known, key=order, default=None)

    def _around(self, top: int) -> tuple[Strategy, Estimate] | None:
        """Of what differs from the best in one choice, the one that is likely to be fastest, and to fit."""
        best = self._best()
        if best is None:
            return None
        least = best.estimate
        assert least is not None
        found: list[tuple[bool, bool, bool, float, int, float, str, Strategy, Estimate]] = []
        in_chunks = best.fits and best.prediction["chunked"] and best.strategy.logits == Strategy.logits
        of_program = [dataclasses.replace(best.strategy, logits="whole")] if in_chunks else []
        others = neighbours(best.strategy, self.target, rows_of(self.batch), self.splits)
        for strategy in itertools.chain(of_program, others):
            if (estimate := self._estimate(strategy)) is not None and self._worth(strategy, estimate, top):
                # In no closed form is what chunks of logits compute twice, nor what remat="dots" computes again. What
                # is sent hides behind compute: of what is as long, that which sends less is first.
                chunked = strategy.logits == best.strategy.logits
                likely = memory_overrun(best) * estimate.bytes <= self.usable
                again = self._again(strategy)
                worse = again > self._again(best.strategy) or any(
                    getattr(estimate, name) > getattr(least, name) for name in ("seconds", "sent", "bytes")
                )  # what is so in nothing, as reduce="compute", comes first, whatever closed forms promise of others
                order = not likely, chunked, worse, estimate.seconds, again, estimate.sent, str(strategy)
                found.append((*order, strategy, estimate))
        return min(found, key=lambda one: one[:7])[7:] if found else None

    @staticmethod
    def _again(strategy: Strategy) -> int:
        """Where a strategy stands among those that compute less and less again; those that choose are last."""
        return REMATS.index(strategy.remat) if strategy.remat in REMATS else len(REMATS)

    def _estimate(self, strategy: Strategy) -> Estimate | None:
        """Its closed forms; None, with the reason kept, where it cannot be or cannot fit."""
        name = str(strategy)
        if name not in self.known:
            try:
                self.known[name] = vars(self.estimator.estimate(strategy))
            except ValueError as error:
                self.known[name] = str(error)
        if isinstance(self.known[name], str):
            self.refused[name] = self.known[name]
            return None
        estimate = Estimate(**self.known[name])
        if estimate.bytes > self.usable:
            self.pruned[name] = (
                f"does not fit: at least {size(estimate.params + estimate.optimizer)} of state and "
                f"{size(max(estimate.activations, estimate.grads))} of activations or gradients by closed forms"
            )
            return None
        return estimate

    def _estimated(self, precision: str, bar: Progress) -> list[tuple[Strategy, Estimate]]:
        """The candidates that may fit, fastest first, by closed forms; of those that are alike the simplest first."""
        self.known = (self.cache and self.cache.get("closed forms", precision)) or {}
        kept = self.cache and self.cache.get("splits")
        (experts, context), why = kept or self._splits()
        self.splits, rows = Splits(experts, context), rows_of(self.batch)
        whole = dataclasses.replace(self.splits, context=1)
        # Positions are split where rows are too few for the devices, until each has some; or a row too long for one.
        found = self._fitting(candidates(self.target, rows, precision, whole), bar)
        if not found or rows < len(self.target.devices):
            most = min(context, enough(len(self.target.devices), rows)) if found else context
            split = candidates(self.target, rows, precision, Splits(experts, most))
            found += self._fitting((one for one in split if one.context > 1), bar)
            if why:
                self.refused["context=2"] = why
        for offload in ("optimizer", "optimizer+params"):  # what no device has room for waits on the host
            if not found:
                every = candidates(self.target, rows, precision, whole)
                every = (one for one in every if not any(map(one.kept_on_device, offload.split("+"))))
                found = self._fitting((dataclasses.replace(one, offload=offload) for one in every), bar)
        self._keep(precision)
        return sorted(found, key=lambda pair: (pair[1].seconds, pair[0].microbatches, pair[1].bytes))

    def _fitting(self, every: Iterable[Strategy], bar: Progress) -> list[tuple[Strategy, Estimate]]:
        """Those that can be and may fit, with their closed forms."""
        found = []
        for strategy in bar.track(list(every), description="closed forms"):
            if (estimate := self._estimate(strategy)) is not None:
                found.append((strategy, estimate))
        return found

    def _splits(self) -> tuple[tuple[int, int], str]:
        splits, why = self.estimator.splits()
        found = (splits.expert, splits.context), why
        if self.cache:
            self.cache.put(found, "splits")
        return found

    def _compile(self, strategy: Strategy, estimate: Estimate | None) -> bool:
        """Adds its line, or the reason why it cannot be; whether there is a line."""
        # A policy is known by its name alone, and two may share it.
        cache = None if callable(strategy.remat) else self.cache
        key = ("line", str(strategy), str(self.flops))
        found: Any = cache and cache.get(*key)
        if not (cached := bool(found)):
            try:
                found = self._numbers(strategy)
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                # That a program is too large is its strategy's fault, other errors of the compiler are not.
                if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                found = {"refused": str(error)}
            if cache:
                cache.put(found, *key)
        if "refused" in found:
            self.refused[str(strategy)] = found["refused"]
            return False
        self.lines.append(Line(strategy=strategy, estimate=estimate, usable=self.usable, cached=cached, **found))
        return True

    def _numbers(self, strategy: Strategy) -> dict[str, Any]:
        begin = time.perf_counter()
        step = make_train_step(self.model, self.optimizer, strategy, self.target.devices, self.trainable, self.rules)
        compiled = step.compile(self.batch)
        seconds = time.perf_counter() - begin
        return numbers(step, self.batch, compiled, self.target, self.flops) | {"compile_seconds": seconds}


def numbers(
    step: Step, batch: Any, compiled: jax.stages.Compiled, target: Target, flops: float | None
) -> dict[str, Any]:
    """The fields of a `Line` that its program gives, as JSON has them; `flops` as for `plan`."""
    program = Executable(compiled.as_text() or "", step.mesh)
    (memory,) = of_step(step, batch, compiled).values()
    hardware = target.hardware
    if memory.host > (there := (1 - RESERVE) * (hardware.host_memory_bytes or math.inf) / hardware.per_host):
        raise ValueError(f"{size(memory.host)} on the host for each device, which has room for {size(int(there))}")
    found = predict(program, step, batch, hardware, flops)
    ledger, closed = Ledger.of(program), expected(step, batch)
    sums = [one.by("kind", "axes", value="sent") for one in (closed, ledger)]
    links: dict[str, float] = {}
    exposed: dict[str, float] = {}
    for part in found.collectives:
        axes = "+".join(part.axes)
        links[part.way] = links.get(part.way, 0) + part.bytes
        exposed[axes] = exposed.get(axes, 0.0) + part.exposed
    prediction = {k: v for k, v in found.json().items() if k != "parts"}
    traced = step.traced(batch)
    main, schedule = traced.program.main, step.schedule
    if schedule and main and (why := padded(main.length, schedule.ranks, schedule.chunks)):
        prediction["notes"].append(f"{why}.")
    if (mode := traced.notes.attention_mode) is not None:
        prediction["notes"].append(f"Attention over context is by {mode.name}: {mode.why}.")
    if found.copies and (speed := hardware.host_bandwidth):
        slow = predict(program, step, batch, dataclasses.replace(hardware, host_bandwidth=speed / 2), flops)
        prediction["notes"].append(
            f"With {speed / 2e9:g} GB/s each way to the host in place of {speed / 1e9:g}, as where two devices share a "
            f"switch to it, {1e3 * slow.seconds:,.0f} ms."
        )
    prediction["chunked"] = any(logits.chunks > 1 for logits in traced.notes.logits.values())
    return {
        "memory": dataclasses.asdict(memory),
        "prediction": prediction,
        "kernels": found.lines(),
        "links": links,
        "exposed": exposed,
        "sent": [[k, "+".join(a), *(one.get((k, a), 0) for one in sums)] for k, a in sorted(sums[0] | sums[1])],
        "bubble": float(schedule.bubble) if schedule and not schedule.branches else 0.0,
    }


# What compilers need beyond closed forms depends on these.
_ALIKE = ("pipe", "expert", "context", "tensor", "remat", "offload")


def memory_overrun(line: Line) -> float:
    """How many times what its closed form says the program of a line needs; the line has one."""
    assert line.estimate is not None
    return line.memory["total"] / line.estimate.bytes


def reason_to_skip(strategy: Strategy, estimate: Estimate, lines: Sequence[Line], usable: int, top: int) -> str | None:
    """Why a strategy need not be compiled, after `lines` were; None where it is worth it.

    Args:
      strategy, estimate: of none of the lines; its closed forms.
      lines: what was compiled.
      usable: bytes that a program may take.
      top: so many are compiled at most; twice as many until one fits.
    """
    fitting = [line for line in lines if line.fits]
    if fitting and (best := min(line.seconds for line in fitting)) < estimate.seconds:
        return f"{1e3 * estimate.seconds:,.0f} ms at least by closed forms, and {1e3 * best:,.0f} ms were found"
    for line in lines:
        if line.estimate == estimate and alike_but("attention", line.strategy, strategy):
            return f"as {line.strategy}, by closed forms: of attention the way is the same"
        if not line.fits and keeps_more(strategy, line.strategy):
            return f"does not fit: {line.strategy}, which keeps less, needs {size(line.memory['total'])}"
    alike = [
        line
        for line in lines
        if line.estimate and all(getattr(line.strategy, name) == getattr(strategy, name) for name in _ALIKE)
    ]
    if not all(line.fits for line in alike):
        # Of those that are alike the one nearest to its closed form: ZeRO-1 with microbatches is far from its own.
        nearest = min(alike, key=memory_overrun)
        if (likely := estimate.bytes * memory_overrun(nearest)) > 1.1 * usable:
            needs = size(nearest.memory["total"])
            return f"does not fit: {size(likely)} likely, as {nearest.strategy} needs {needs}"
    if len(lines) >= top and (fitting or len(lines) >= 2 * top):
        return f"{1e3 * estimate.seconds:,.0f} ms at least by closed forms: not among the {top} that were compiled"
    return None
