"""`plan`: find the strategy that trains a model fastest on devices that need not be here, and say why the others lose.

    candidates -> closed forms -> search: compile the best of each family, then neighbours of the best -> ranking

Closed forms are lower bounds on memory and time. A strategy whose closed form is slower than a compiled program, or
does not fit, is never compiled; nor is one that is likely to be slower (`reasons.py`). Lines of the plan are ranked by
the memory of their compiled programs, and by the time that `predict` gives for them.
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

from ...backend.counts import is_count
from ...backend.text import size
from ...hardware.compiled.compiler_remarks import why_unread
from ...hardware.devices import Target
from ...hardware.devices import target as target_of
from ...hardware.hardware import KINDS, RESERVE
from ...make import make_train_step
from ...model.batches import check_rows, rows_of
from ...model.model import MAKERS, Model
from ...parallel.tensor.dims import Rules
from ...step.checks import check_trainable
from ...strategy import Strategy, as_strategy
from .cache import PlanCache, folder, plan_key
from .candidates import NO_SPLITS, REMATS, Splits, candidates, parts_per_row
from .estimates import Estimate, Estimator
from .line import Line, fastest, line_fields, ranked
from .neighbours import families, neighbours
from .progress import PlanProgress
from .ranking import Plan
from .reasons import is_relief, least_overrun, likely_seconds, memory_overrun, reason_to_skip

Pair = tuple[Strategy, Estimate]
_MAX_TRIES = 3  # strategies of one family that are compiled until one fits


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
    """Rank strategies for a model on a target by the step time predicted for their compiled programs. Nothing runs.

    Ctrl-C ends the compiling: the plan then has the strategies that were compiled so far, and `interrupted` is True.
    What was compiled stays in the cache.

    Args:
      model: from `from_nnx`, `from_linen`, `from_equinox` or `Model(init=..., loss=...)`.
      batch: the global batch, as `jax.ShapeDtypeStruct` or arrays.
      target: the name of a target ("8xH100"), or the result of `jaxpar.hardware.devices.target`.
      optimizer: any optax transformation; `optax.adamw(3e-4)` if None.
      rules: the dims that `tensor` splits, as for `make_train_step`.
      flops: the FLOPs of a step on this batch, forward and backward without recomputation, from which the MFU follows.
      strategies: compile all of these, and no others. If None: compile the best of `candidates` by closed forms, and
        then strategies that differ in one choice from the best so far.
      top: the most strategies to compile.
      precision: the precision of all candidates: "bf16", "f16", "f32" or, if the target has FP8 products, "fp8".
      length: the positions of a row, from which tokens/s follows.
      cache: the folder of what earlier plans compiled. True: `JAXPAR_CACHE`, or jaxpar/plan in the user's cache folder;
        False: no cache.
      console: shows the progress bar; standard error if None.
      trainable: which parameters are not frozen, as for `make_train_step`, such as adapters on a frozen base.
      memory_bytes: the memory of one device, if it differs from the named target's.

    Returns:
      The plan: its lines are ranked, and have bytes and seconds per device and step.

    Raises:
      ValueError: the target's bandwidths and peaks are unknown or its programs are not read (CPUs, TPUs), or no
        strategy is valid.
    """
    # 1. Check the arguments before anything that takes time.
    if not isinstance(model, Model):
        raise ValueError(f"model is a {type(model).__name__}; make one with {MAKERS}")
    # Raises an error for a precision that does not exist.
    Strategy(precision=precision)
    target = planned_for(target, memory_bytes)
    if not is_count(top):
        raise ValueError(f"top={top!r}: use a whole number from 1")
    if isinstance(strategies, str | Strategy):
        raise ValueError(f"strategies={str(strategies)!r} is one strategy; give a list: [{str(strategies)!r}]")
    chosen = None if strategies is None else [as_strategy(s) for s in strategies]
    check_precisions([precision, *(s.precision for s in chosen or ())], target)
    check_trainable(trainable)
    check_rows(batch, 1, 1)

    # 2. Search, or compile the given strategies.
    batch = jax.eval_shape(lambda x: x, batch)
    optimizer = optimizer or optax.adamw(3e-4)
    estimator = Estimator(model, optimizer, target, batch, rules, trainable)
    return Planner(estimator, flops, length, cache).plan(chosen, top, precision, console)


def planned_for(target: Target | str, memory_bytes: float | None = None) -> Target:
    """Return the devices that `plan` compiles for. Raises ValueError for a target that `plan` refuses."""
    without_compiler = "|".join(["cpu", *(name for name, kind in KINDS.items() if not kind.config)])
    if isinstance(target, str) and (kind := re.fullmatch(rf"(?:\d+x)*({without_compiler})(?::[\dx]+)?", target)):
        # `target_of` would first ask for a compiler that does not help.
        why = why_unread("tpu") if kind[1] != "cpu" else "CPU devices have no peaks and bandwidths to plan by"
        raise ValueError(f"target={target!r}: {why}; plan for GPUs, such as '8xH100'")
    target = target if isinstance(target, Target) else target_of(target, memory_bytes=memory_bytes)
    if target.hardware.memory_bytes is None or not target.hardware.peaks:
        raise ValueError(
            f"target={target.name!r} has no memory, peaks and bandwidths to plan by; use a kind with these, as '8xH100'"
        )
    return target


def check_precisions(precisions: Iterable[str], target: Target) -> None:
    """Raise ValueError if strategies compute in FP8, and the target has no peak of FP8 products to plan by."""
    if "fp8" in precisions and target.hardware.peak("fp8") is None:
        raise ValueError(
            f"precision='fp8' for target={target.name!r}: no peak of FP8 products is known for {target.hardware.kind}; "
            "use precision='bf16', or a kind that multiplies FP8, as '8xH100'"
        )


class Planner:
    """One call of `plan`.

    Args:
      estimator: the closed forms of the model on the target.
      flops, length, cache: as for `plan`.

    Attributes:
      estimates: a strategy's text -> the fields of its `Estimate`, which need not be exact, or the error that refuses
        it. Stored in the cache, as is `exact`.
      exact: the same of exact closed forms, for the strategies that were about to be compiled.
      usable: the bytes that a program may take on one device.
      splits: how many ranks may share experts and positions.
      lines: the compiled strategies, in the order of compiling.
      refused: invalid strategies, each with its error.
      excluded: strategies that exact closed forms exclude, each with the reason.
      pruned: strategies that were not compiled, each with the reason.
      limit: seconds of a step. Strategies whose closed form is above it are not compiled.
      interrupted: whether Ctrl-C ended the search.
    """

    def __init__(
        self,
        estimator: Estimator,
        flops: float | None = None,
        length: int | None = None,
        cache: str | os.PathLike[str] | bool = True,
    ) -> None:
        e = estimator
        self.estimator, self.target, self.batch, self.flops, self.length = e, e.target, e.batch, flops, length
        self.cache: PlanCache | None = None
        if cache is not False:
            path = folder(None if cache is True else cache)
            self.cache = PlanCache(path, plan_key(e.model, e.optimizer, e.batch, e.target, e.rules, e.trainable))
        self.estimates: dict[str, Any] = {}
        self.exact: dict[str, Any] = {}
        self.excluded: dict[str, str] = {}
        self.usable = int((1 - RESERVE) * (e.target.hardware.memory_bytes or 0))
        self.splits = NO_SPLITS
        self.lines: list[Line] = []
        self.refused: dict[str, str] = {}
        self.pruned: dict[str, str] = {}
        self.limit = math.inf
        self.interrupted = False

    def plan(self, chosen: Sequence[Strategy] | None, top: int, precision: str, console: Console | None) -> Plan:
        """Compile the chosen strategies, or search if there are none, and return the plan."""
        with PlanProgress(console) as bar, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nobody asked for the strategies that the warnings are about
            try:
                if chosen is None:
                    self.search(self.candidates(precision, bar), top, bar)
                    self._store_estimates(precision)
                else:
                    self._compile_all(chosen, bar)
            except KeyboardInterrupt:
                self.interrupted = True
        if not self.lines and not self.interrupted:
            raise ValueError(self.why_no_line())
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

    def why_no_line(self) -> str:
        """Return the error of a plan without lines: the first reasons why strategies are refused or pruned."""
        reasons = list(dict.fromkeys([*self.refused.values(), *self.pruned.values()]))[:3] or ["there is no candidate"]
        rows, n = rows_of(self.batch), len(self.target.devices)
        return (
            f"no strategy is valid for {rows} rows on {self.target.name} ({n} devices): {'; '.join(reasons)}; try more "
            "devices, a batch whose rows they divide, or strategies= of your own"
        )

    def _compile_all(self, strategies: Sequence[Strategy], bar: PlanProgress) -> None:
        """Compile the strategies that the user named."""
        task = bar.add_task("compile", total=len(strategies))
        for strategy in strategies:
            bar.compiling(task, self.target.name, strategy, fastest(self.lines))
            self._compile(strategy, None)
            bar.advance(task)

    # -- the search ----------------------------------------------------------------------------------------------------

    def search(self, queue: list[Pair], top: int, bar: PlanProgress) -> None:
        """Compile at most `top` strategies, beginning with the candidates of `queue`.

        First the best of each family by closed forms, and after each new best one of its neighbours; then neighbours of
        the best; then the remaining candidates, by closed forms. `reason_to_skip` ends each of them, and checks the
        exact closed forms before compiling. All choices are deterministic, so that a cached plan makes the same ones.
        """
        task = bar.add_task("compile", total=min(top, len(queue)))

        def compile_(strategy: Strategy, estimate: Estimate) -> None:
            bar.compiling(task, self.target.name, strategy, self._best_line())
            if (exact := self._exact_estimate(strategy, estimate, top)) and self._compile(strategy, exact):
                bar.advance(task)

        for members in families(queue, self.target)[: max(1, top // 2)]:
            # Only lines of this family count for `_next_of_family`.
            previous_best, num_lines = self._best_line(), len(self.lines)
            while (pair := self._next_of_family(members, self.lines[num_lines:], top)) is not None:
                compile_(*pair)
            best = self._best_line()
            # A search that Ctrl-C ends early should have tried a neighbour of its best, which is often better.
            if best and best.fits and best != previous_best and (pair := self._best_neighbour(top)):
                compile_(*pair)
        while (pair := self._best_neighbour(top)) or (pair := self._first_worth_compiling(queue, top)):
            compile_(*pair)
        for strategy, estimate in queue:
            if not self._is_tried(strategy):
                self.pruned[str(strategy)] = reason_to_skip(strategy, estimate, self.lines, self.usable, top) or ""
        self.pruned |= self.excluded
        bar.remove_task(task)

    def _store_estimates(self, precision: str) -> None:
        """Store the closed forms in the cache, if there are new ones."""
        if self.cache and self.cache.get("closed forms", precision) != (both := [self.estimates, self.exact]):
            self.cache.put(both, "closed forms", precision)

    def _is_tried(self, strategy: Strategy) -> bool:
        """Return whether a strategy was compiled, refused or excluded."""
        name = str(strategy)
        return name in self.refused or name in self.excluded or any(line.strategy == strategy for line in self.lines)

    def _is_worth_compiling(self, strategy: Strategy, estimate: Estimate, top: int) -> bool:
        """Return whether a strategy was not tried, and nothing that was compiled speaks against it."""
        if estimate.seconds > self.limit or self._is_tried(strategy):
            return False
        return not reason_to_skip(strategy, estimate, self.lines, self.usable, top)

    def _first_worth_compiling(self, queue: list[Pair], top: int) -> Pair | None:
        """Return the first of some strategies that is worth compiling."""
        return next((pair for pair in queue if self._is_worth_compiling(*pair, top)), None)

    def _next_of_family(self, members: list[Pair], family_lines: list[Line], top: int) -> Pair | None:
        """Return the first member of a family, with `family_lines` so far, that is worth compiling and likely to fit.

        Return None once a member fits, or after `_MAX_TRIES`; and None once only the last quarter of `top` remains,
        which is reserved for neighbours of the best.
        """
        if any(line.fits for line in family_lines) or len(family_lines) == _MAX_TRIES:
            return None
        if len(self.lines) >= top - top // 4:
            return None
        # Similar programs exceed their closed forms by similar ratios.
        overrun = lambda strategy: least_overrun(strategy, self.lines, family_lines)
        likely = [pair for pair in members if overrun(pair[0]) * pair[1].bytes <= self.usable]
        return self._first_worth_compiling(likely, top)

    def _best_line(self) -> Line | None:
        """Return the fastest line that fits, or the smallest if none fits. Lines without a closed form do not count."""
        return fastest(line for line in self.lines if line.estimate)

    def _best_neighbour(self, top: int) -> Pair | None:
        """Return the neighbour of the best line that is likely to fit and to be fastest; None if none may be faster."""
        best = self._best_line()
        if best is None:
            return None
        best_estimate = best.estimate
        assert best_estimate is not None
        options: list[tuple[tuple[Any, ...], Strategy, Estimate]] = []
        in_chunks = best.fits and best.prediction["chunked"] and best.strategy.logits == Strategy.logits
        whole_logits = [dataclasses.replace(best.strategy, logits="whole")] if in_chunks else []
        around = neighbours(best.strategy, self.target, rows_of(self.batch), self.splits)
        for strategy in itertools.chain(whole_logits, around):
            estimate = self._estimate(strategy)
            if estimate is None or not self._is_worth_compiling(strategy, estimate, top):
                continue
            likely_fits = memory_overrun(best) * estimate.bytes <= self.usable
            # No closed form counts what chunks of logits compute twice, nor what remat="dots" recomputes. So whole
            # logits come first, and of equal seconds the least recomputation.
            same_logits = strategy.logits == best.strategy.logits
            recomputation = self._recomputation_rank(strategy)
            # A strategy that is worse in nothing, such as reduce="compute", comes before others that closed forms
            # call faster but that may lose elsewhere.
            worse = recomputation > self._recomputation_rank(best.strategy) or any(
                getattr(estimate, name) > getattr(best_estimate, name) for name in ("seconds", "sent", "bytes")
            )
            # Communication that overlaps with compute takes no seconds by closed forms: of equal seconds, send less.
            likely, _ = likely_seconds(strategy, estimate, [line for line in self.lines if line.fits] or [best])
            seconds = worse, likely, recomputation, estimate.sent
            order = not likely_fits, not is_relief(strategy, best, self.usable), same_logits, *seconds, str(strategy)
            options.append((order, strategy, estimate))
        return min(options, key=lambda option: option[0])[1:] if options else None

    @staticmethod
    def _recomputation_rank(strategy: Strategy) -> int:
        """Return the rank of a strategy's `remat` by how much it recomputes; policies that choose rank last."""
        return REMATS.index(strategy.remat) if strategy.remat in REMATS else len(REMATS)

    # -- closed forms --------------------------------------------------------------------------------------------------

    def _estimate(self, strategy: Strategy, exact: bool = False) -> Estimate | None:
        """Return the closed forms of a strategy; None if it is invalid or cannot fit, which is recorded."""
        name, estimates = str(strategy), self.exact if exact else self.estimates
        if name not in estimates:
            try:
                estimates[name] = vars(self.estimator.estimate(strategy, exact))
            except ValueError as error:
                estimates[name] = str(error)
        if isinstance(estimates[name], str):
            self.refused[name] = estimates[name]
            return None
        estimate = Estimate(**estimates[name])
        if estimate.bytes > self.usable:
            self.pruned[name] = (
                f"does not fit: at least {size(estimate.params + estimate.optimizer)} of state and "
                f"{size(max(estimate.activations, estimate.grads))} of activations or gradients by closed forms"
            )
            return None
        return estimate

    def _exact_estimate(self, strategy: Strategy, estimate: Estimate, top: int) -> Estimate | None:
        """Return the exact closed forms of a strategy; None if they speak against it, which is recorded."""
        exact, name = self._estimate(strategy, exact=True), str(strategy)
        if exact is None:
            self.excluded |= {name: self.pruned[name]} if name in self.pruned else {}
        # The closed forms may have been exact already; then they do not speak against the strategy.
        elif exact != estimate and (why := reason_to_skip(strategy, exact, self.lines, self.usable, top)):
            self.excluded[name], exact = why, None
        return exact

    def least_state(self, precision: str) -> int:
        """Return the bytes of parameters and optimizer on one device if ZeRO-3 shards them over all devices."""
        estimate = self.estimator.estimate(Strategy(fsdp=len(self.target.devices), precision=precision))
        return estimate.params + estimate.optimizer

    def candidates(self, precision: str, bar: PlanProgress) -> list[Pair]:
        """Return the candidates that may fit, fastest by closed forms first; of equal ones, the simplest first."""
        self.estimates, self.exact = (self.cache and self.cache.get("closed forms", precision)) or ({}, {})
        cached_splits = self.cache and self.cache.get("splits")
        (experts, context), why = cached_splits or self._find_splits(precision)
        self.splits, rows = Splits(experts, context), rows_of(self.batch)

        # 1. Whole rows. Positions are split only if there are fewer rows than devices, until each device has some; or
        #    if nothing fits, since a row may be too long for one device.
        whole_rows = dataclasses.replace(self.splits, context=1)
        pairs = self._estimate_all(candidates(self.target, rows, precision, whole_rows), bar)
        if not pairs or rows < len(self.target.devices):
            max_context = min(context, parts_per_row(len(self.target.devices), rows)) if pairs else context
            with_context = candidates(self.target, rows, precision, Splits(experts, max_context))
            pairs += self._estimate_all((s for s in with_context if s.context > 1), bar)
            if why:
                self.refused["context=2"] = why

        # 2. If nothing fits, more and more of the state waits on the host.
        for offload in ("optimizer", "optimizer+params"):
            if not pairs:
                strategies = candidates(self.target, rows, precision, whole_rows)
                strategies = (s for s in strategies if not any(map(s.kept_on_device, offload.split("+"))))
                pairs = self._estimate_all((dataclasses.replace(s, offload=offload) for s in strategies), bar)
        self._store_estimates(precision)
        # No closed form counts what remat="dots" recomputes.
        recomputation = self._recomputation_rank
        return sorted(
            pairs, key=lambda pair: (pair[1].seconds, pair[0].microbatches, recomputation(pair[0]), pair[1].bytes)
        )

    def _estimate_all(self, strategies: Iterable[Strategy], bar: PlanProgress) -> list[Pair]:
        """Return the strategies that are valid and may fit, with their closed forms."""
        pairs = []
        strategies = list(strategies)
        task = bar.add_task(f"{self.target.name}: closed forms", total=len(strategies))
        for strategy in strategies:
            if (estimate := self._estimate(strategy)) is not None:
                pairs.append((strategy, estimate))
            bar.advance(task)
        return pairs

    def _find_splits(self, precision: str) -> tuple[tuple[int, int], str]:
        """Return how many ranks may share experts and positions, and why positions cannot be split; cache both."""
        splits, why = self.estimator.splits(precision)
        numbers = (splits.expert, splits.context), why
        if self.cache:
            self.cache.put(numbers, "splits")
        return numbers

    # -- compiled programs ---------------------------------------------------------------------------------------------

    def _compile(self, strategy: Strategy, estimate: Estimate | None) -> bool:
        """Compile a strategy, or read it from the cache; record its line or its error. Return whether it has a line."""
        # A remat policy is a function, which its name alone does not identify.
        cache = None if callable(strategy.remat) else self.cache
        key = ("line", str(strategy), str(self.flops))
        fields: Any = cache and cache.get(*key)
        if not (cached := bool(fields)):
            try:
                fields = self._line_fields(strategy)
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                # A program that is too large is the fault of its strategy; the compiler's other errors are not.
                if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                # A refusal is stored as well: to find it again would take as long as compiling.
                fields = {"refused": str(error)}
            if cache:
                cache.put(fields, *key)
        if "refused" in fields:
            self.refused[str(strategy)] = fields["refused"]
            return False
        self.lines.append(Line(strategy=strategy, estimate=estimate, usable=self.usable, cached=cached, **fields))
        return True

    def _line_fields(self, strategy: Strategy) -> dict[str, Any]:
        """Compile a strategy, and return the fields of its line."""
        start = time.perf_counter()
        e = self.estimator
        step = make_train_step(e.model, e.optimizer, strategy, e.target.devices, e.trainable, e.rules)
        compiled = step.compile(self.batch)
        seconds = time.perf_counter() - start
        return line_fields(step, self.batch, compiled, self.target, self.flops) | {"compile_seconds": seconds}
