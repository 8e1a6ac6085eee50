"""`plan_run`: how many hosts finish a training run by its deadline, under which strategy, and at what price.

    1, 2, 4, ... hosts -> closed forms of all strategies -> if they may meet the deadline: compile the best few
        -> the first count that meets it, and one more

No program is faster than its closed form. So a count whose least closed form misses the deadline is not compiled. Its
row is an estimate: the closed form times (seconds / closed form) of the compiled row with the nearest count.
"""

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...backend.text import size
from ...hardware.hardware import RESERVE
from ...strategy import Strategy
from .line import ERROR, UNSEEN, Line, fastest
from .planner import Pair, Planner
from .progress import PlanProgress
from .ranking import SECONDS_PER_DAY, allocation_remark, fill, layout_lines, tokens_text


@dataclass(frozen=True)
class PlannedRun:
    """A training run, with its deadline and the price of its devices.

    Attributes:
      tokens: the tokens of the run; rows, if the model reads no text.
      step_tokens: the tokens, or rows, of the global batch.
      days: the deadline.
      price: the price of one device for an hour, in any currency. None: no cost is given.
      unit: "tokens" or "rows".
    """

    tokens: float
    step_tokens: int
    days: float
    price: float | None = None
    unit: str = "tokens"

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return math.ceil(self.tokens / self.step_tokens)

    @property
    def limit(self) -> float:
        """Return the seconds of a step with which the run ends at its deadline."""
        return self.days * SECONDS_PER_DAY / self.steps


@dataclass
class _Count:
    """One number of devices.

    Attributes:
      planner: its search.
      pairs: the strategies that may fit, fastest by closed forms first.
      too_large: the state that does not fit, in words; "" if it may fit.
    """

    planner: Planner
    pairs: list[Pair]
    too_large: str = ""

    @classmethod
    def of(cls, planner: Planner, precision: str, bar: PlanProgress) -> "_Count":
        """Compute the closed forms of a number of devices, unless not even the state fits."""
        if (state := planner.least_state(precision)) > planner.usable:
            return cls(planner, [], f"{size(state, '.0f')} of state")
        return cls(planner, planner.candidates(precision, bar))

    @property
    def bound(self) -> float:
        """Return a lower bound on the seconds of a step; infinite if nothing can fit."""
        return self.pairs[0][1].seconds if self.pairs else math.inf

    @property
    def best(self) -> Line | None:
        """Return the best compiled line; None if nothing was compiled."""
        return fastest(self.planner.lines)

    def meets(self, limit: float) -> bool:
        """Return whether a compiled program fits, and takes at most `limit` seconds."""
        return self.best is not None and self.best.fits and self.best.seconds <= limit

    def search(self, top: int, limit: float, bar: PlanProgress) -> None:
        """Compile at most `top` programs, of strategies whose closed forms are within the limit."""
        self.planner.limit = limit
        self.planner.search([pair for pair in self.pairs if pair[1].seconds <= limit], top, bar)


@dataclass(frozen=True)
class CountRow:
    """A number of devices, with its best strategy.

    Attributes:
      hosts, devices: how many.
      seconds: the seconds of a step; infinite if nothing fits.
      strategy: the best strategy; None if nothing fits.
      compiled: the number of compiled programs. 0: the row is an estimate.
      remark: why nothing fits.
      memory: the bytes of the compiled program on one device; 0 if the row is an estimate.
      usable: the bytes that a program may take.
    """

    hosts: int
    devices: int
    seconds: float
    strategy: Strategy | None
    compiled: int
    remark: str = ""
    memory: int = 0
    usable: int = 0


@dataclass(frozen=True)
class RunPlan:
    """The result of `plan_run`; print it.

    Attributes:
      run: the run.
      kind: the kind of the devices.
      about: the model, the batch and the precision, in words.
      rows: the numbers of devices, in the order of the search.
      ratios: seconds / closed form by which estimates were multiplied, of the compiled row nearest to each. Empty: no
        row is compiled, and estimates are lower bounds.
      searched: whether the number of devices was searched, and not given.
      interrupted: whether a signal ended the search early.
    """

    run: PlannedRun
    kind: str
    about: str
    rows: tuple[CountRow, ...]
    ratios: tuple[float, ...]
    searched: bool
    interrupted: bool

    @property
    def answer(self) -> CountRow | None:
        """Return the smallest compiled count that meets the deadline; None if none does."""
        return next((row for row in self.rows if row.compiled and row.seconds <= self.run.limit), None)

    def __str__(self) -> str:
        title = f"{'hosts':>6} {'devices':>7} {'days':>7} {'dev. hours':>10} {self._cost('cost'):>10} {'':8} layout"
        table = [title, *(line for row in self.rows for line in self._lines(row))]
        return "\n\n".join([fill(self._summary(), 2), fill(self.about, 2), "\n".join(table), *self._remarks()])

    def _days(self, row: CountRow) -> float:
        return self.run.steps * row.seconds / SECONDS_PER_DAY

    def _cost(self, text: str) -> str:
        """Return a text of the column of costs, which is empty if there is no price."""
        return text if self.run.price is not None else ""

    def _summary(self) -> str:
        """Return the answer in one sentence."""
        tokens = f"{tokens_text(self.run.tokens)} {self.run.unit}"
        deadline = f"{self.run.days:g} days"
        row = self.answer
        fitting = [row for row in self.rows if row.strategy is not None]
        if row is None and self.interrupted:
            return f"not complete: no count is known yet that finishes {tokens} in {deadline}"
        if row is None and not fitting:
            return f"no count of {self.kind} fits: nothing can finish {tokens}"
        if row is None:
            row = min(fitting, key=lambda row: (not row.compiled, row.seconds))
            late = f"no count finishes {tokens} in {deadline}; the fastest is " if self.searched else "too late: "
        else:
            late = ""
        days = self._days(row)
        within = ", within the error of predictions" if days <= self.run.days < days * ERROR[1] else ""
        price = self.run.price
        hours = 24 * days * row.devices
        cost = "" if price is None else f", {hours * price:,.0f} at {price:g}"
        hosts = f"{row.hosts} host{'s' * (row.hosts > 1)} ({row.devices} {self.kind})"
        memory = f", {row.memory / 1e9:.1f} of {size(row.usable, '.1f')} each" if row.memory else ""
        return (
            f"{late}{hosts}: {days:,.1f} days for {tokens}, deadline {deadline}{within}; {hours:,.0f} device "
            f"hours{cost}: {row.strategy}{memory}"
        )

    def _lines(self, row: CountRow) -> Iterator[str]:
        """Yield the lines of a row of the table."""
        head = f"{'*' if row is self.answer else ' '}{row.hosts:>5} {row.devices:>7} "
        if row.strategy is None:
            yield f"{head}{'-':>7} {'-':>10} {self._cost('-'):>10} {'':8} {row.remark}"
            return
        days = self._days(row)
        hours = 24 * days * row.devices
        cost = self._cost(f"{hours * (self.run.price or 0):,.0f}")
        source = "compiled" if row.compiled else "estimate" if self.ratios else "at least"
        head += f"{days:>7,.1f} {hours:>10,.0f} {cost:>10} {source:8} "
        yield from layout_lines(head, row.strategy, True)

    def _remarks(self) -> Iterator[str]:
        """Yield how to read the table, and where the search ended."""
        answer = self.answer
        if compiled := [f"{row.compiled} for {row.devices}" for row in self.rows if row.compiled]:
            yield fill(
                f"compiled: the fastest of the compiled programs ({', '.join(compiled)}), by predicted seconds; eight "
                f"of ten published runs took {ERROR[0]} to {ERROR[1]} times as long, twelve of fifteen others "
                f"{UNSEEN[0]} to {UNSEEN[1]} times. Time for checkpoints, evaluation and failures comes on top.",
                2,
            )
        if self.ratios and not all(row.compiled for row in self.rows):
            ratios = " or ".join(f"{ratio:.2f}" for ratio in self.ratios)
            yield fill(
                f"estimate: not compiled. The fastest strategy by closed forms, times {ratios}: the seconds of the "
                "nearest compiled row divided by its own closed form. Its program may need more memory, and so another "
                "layout.",
                2,
            )
        elif not all(row.compiled for row in self.rows):
            yield fill("at least: not compiled; closed forms are lower bounds on time.", 2)
        if self.interrupted:
            yield "Interrupted: this table is not complete."
        elif self.searched and answer:
            yield fill(
                "*: the smallest of these counts that meets the deadline. Larger ones than the next were not searched.",
                2,
            )
        if answer:
            yield from allocation_remark(answer.memory, answer.usable / (1 - RESERVE))
            yield fill(
                f"{answer.compiled} programs were compiled for this count. To search further and to see their "
                f"memory, rank the strategies of one count: --target {answer.devices}x{self.kind}, with --batch and "
                "--seq as above and without --days.",
                2,
            )


def plan_run(
    planners: Iterable[Planner],
    run: PlannedRun,
    about: str,
    searched: bool = True,
    top: int = 6,
    precision: str = "bf16",
) -> RunPlan:
    """Find the smallest number of devices that finishes a run by its deadline. Nothing runs.

    A signal that raises KeyboardInterrupt ends the search; the plan then has the rows so far.

    Args:
      planners: a planner for each number of devices, smallest first. They are made on demand.
      run: the run.
      about: the model, the batch and the precision, in words, for the printed plan.
      searched: whether the number of devices is searched. If not, there is one planner, and it compiles in any case.
      top: the most programs to compile for one number of devices.
      precision: the precision of all strategies.

    Returns:
      The plan: a row for each number of devices.

    Raises:
      ValueError: no strategy is valid for the number of devices that was given, as for rows that they do not divide.
    """
    counts: list[_Count] = []
    interrupted = False
    with PlanProgress() as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nobody asked for the strategies that the warnings are about
        try:
            for planner in planners:
                counts.append(_Count.of(planner, precision, bar))
                if not searched:
                    if not counts[-1].pairs and not counts[-1].too_large:
                        raise ValueError(planner.why_no_line())
                    counts[-1].search(top, math.inf, bar)
                elif _ends(counts, run.limit, top, bar):
                    break
            # If no count meets the deadline, the fastest is the answer, and a compiled one.
            if not any(count.meets(run.limit) for count in counts):
                least = min(counts, key=lambda count: count.bound)
                if not least.planner.lines:
                    least.search(top, math.inf, bar)
        except KeyboardInterrupt:
            interrupted = True
    rows, ratios = _rows(counts)
    kind = counts[0].planner.target.kind if counts else "devices"
    return RunPlan(run, kind, about, rows, ratios, searched, interrupted)


def _ends(counts: list[_Count], limit: float, top: int, bar: PlanProgress) -> bool:
    """Compile programs for the last count if it may meet the limit, and return whether it is the last to look at."""
    *earlier, count = counts
    # The count after the one that meets the limit is only compared with it.
    if earlier and earlier[-1].meets(limit):
        return True
    if count.bound <= limit:
        count.search(top, limit, bar)
    # Twice the devices that are no faster by closed forms, or that no strategy can use, are the end of the search.
    previous = earlier[-1].bound if earlier else math.inf
    return not count.meets(limit) and previous < math.inf and count.bound >= previous


def _rows(counts: list[_Count]) -> tuple[tuple[CountRow, ...], tuple[float, ...]]:
    """Return the rows of the table, and the ratios of compiled rows by which estimates were multiplied."""
    compiled = [(i, count.best) for i, count in enumerate(counts) if count.best and count.best.fits]
    rows: list[CountRow] = []
    ratios: list[float] = []
    for i, count in enumerate(counts):
        target, num_compiled = count.planner.target, len(count.planner.lines)
        strategy, seconds = (count.pairs[0][0], count.bound) if count.pairs else (None, math.inf)
        if count.best is None and count.pairs and compiled:
            _, line = min(compiled, key=lambda pair: abs(pair[0] - i))
            assert line.estimate is not None  # only lines that the user named have none
            ratios.append(line.seconds / line.estimate.seconds)
            seconds *= ratios[-1]
        if count.best is not None:
            strategy, seconds = (count.best.strategy, count.best.seconds) if count.best.fits else (None, math.inf)
        remark = (count.too_large or "nothing fits") if strategy is None else ""
        memory = count.best.memory["total"] if count.best and strategy else 0
        devices, usable = len(target.devices), count.planner.usable
        rows.append(CountRow(target.hosts, devices, seconds, strategy, num_compiled, remark, memory, usable))
    return tuple(rows), tuple(dict.fromkeys(ratios)) if compiled else ()
