"""The asynchronous parameter server beside ddp: steps per second, staleness, loss at equal samples, a killed worker.

python experiments/async_compare.py
python experiments/async_compare.py --staleness 0 2 8 --steps 200 --pause 1

Workers are processes on loopback that share this machine's cores; what differs between the lines of one table is how
they wait for each other. `ddp` has as many simulated devices as there are workers.
"""

import dataclasses
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import optax
import tyro
from async_picture import draw
from async_server import Server, Worker
from jax.extend.backend import clear_backends
from rich import box
from rich.console import Console
from rich.table import Table

import jaxpar as jp
from jaxpar.data import text
from jaxpar.models import named

WARM = 5  # steps of every worker that are not timed: they compile


@dataclass(frozen=True)
class Options:
    """Trains one model under ddp and by an asynchronous server: with equal workers, a slow one, a killed one."""

    model: str = "llama-tiny"
    """the name of a model of text"""
    data: Path | None = None
    """a file or folder to learn from; without it: Python's own source"""
    workers: int = 3
    """processes, or devices of ddp"""
    staleness: tuple[int, ...] = (0, 4)
    """bounds to try; without any bound is always tried too"""
    steps: int = 60
    """of ddp; a server makes that many times `workers` gradients"""
    rows: int = 4
    """of each worker in each step"""
    length: int = 64
    """bytes that each row predicts"""
    lr: float = 0.1
    """of SGD with momentum and gradients clipped to norm 1; divided by `workers` where every gradient is an update"""
    momentum: float = 0.9
    """of SGD"""
    pause: float = 0.5
    """seconds by which the slow worker's steps are longer"""
    lease: float = 20.0
    """seconds after which the killed worker is given up"""
    seed: int = 0
    """of the initial values and of the data"""
    out: Path = Path("runs/async")
    """where async.json, async.svg and async.png go"""

    def __post_init__(self) -> None:
        for name, least in {"workers": 2, "steps": 3, "rows": 1, "length": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} leaves nothing to compare; use {least} or more")
        if named(self.model).kind != "text":
            raise ValueError(f"model={self.model} is one of images; give one of text: llama-tiny, ...")


@dataclass
class Trial:
    """One line of the table.

    Attributes:
      case: "equal", "slow" or "killed".
      losses: of every gradient in nats per byte, in the order in which they came; of ddp one for each step.
      samples, seconds: rows that had been learnt from, and time, with each of them.
      staleness: of every gradient.
      workers: whose each gradient was; empty for ddp.
      held_out: loss at the end, on held-out text.
      rate: rows per second, without the first steps.
      killed, lost: seconds at which a worker was killed, and what the server said of it.
    """

    name: str
    case: str
    losses: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    held_out: float = 0.0
    rate: float = 0.0
    killed: float = 0.0
    lost: dict[int, str] = field(default_factory=dict)


def optimizer(options: Options, rate: float) -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate, momentum=options.momentum))


def rows(options: Options, number: int) -> Any:
    """The rows of worker `number`, step after step: its part of ddp's batches."""
    batches = text(options.data, options.length).batches(options.rows * options.workers, options.seed)
    mine = slice(number * options.rows, (number + 1) * options.rows)
    return ({name: x[mine] for name, x in batch.items()} for batch in batches)


def work(options: Options, address: str, number: int, pause: float, gradients: int | None) -> None:
    """One worker, in its own process: `options.steps` steps, or until all together have made so many gradients."""
    # Programs of one device, of which every trial starts the same; compiling them would take longer than running them.
    jax.config.update("jax_compilation_cache_dir", str(options.out.absolute() / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    with Worker(named(options.model).model, address, number) as worker:
        for batch in itertools.islice(rows(options, number), worker.clock, None):
            done = worker.step(batch)
            if done.clock + 1 == options.steps if gradients is None else done.version + options.workers >= gradients:
                return
            time.sleep(pause)


def scored(options: Options) -> Callable[[Any], float]:
    """The loss of parameters on held-out text."""
    model, source = named(options.model).model, text(options.data, options.length)
    held_out = list(itertools.islice(source.held_out(32), 20))
    variables = model.create(jax.random.key(options.seed))[1]

    @jax.jit
    def sums(params: Any, batch: Any) -> Any:
        return model.call(params, variables, batch, None)[0]["loss"]

    def score(params: Any) -> float:
        means = [sums(model.unwrap(params), batch) for batch in held_out]
        return float(sum(m.total for m in means) / sum(m.count for m in means))

    return score


def synchronous(options: Options, case: str, pause: float, score: Callable[[Any], float]) -> Trial:
    """Ddp on as many devices; a slow device keeps all waiting."""
    trial, count = Trial("ddp", case), options.rows * options.workers
    step = jp.make_train_step(
        named(options.model).model, optimizer(options, options.lr), "ddp", jax.devices()[: options.workers]
    )
    state = step.init(jax.random.key(options.seed))
    batches = text(options.data, options.length).batches(count, options.seed)
    begin = time.monotonic()
    for batch in itertools.islice(batches, options.steps):
        state, metrics = step(state, batch)
        trial.losses.append(float(metrics["loss"]))
        time.sleep(pause)
        trial.samples.append(len(trial.losses) * count)
        trial.seconds.append(time.monotonic() - begin)
    trial.held_out = score(step.params(state))
    return timed(trial, 1)


def one_by_one(options: Options, score: Callable[[Any], float]) -> Trial:
    """The updates of a server whose workers take turns, on one device: as many and as large, and none stale."""
    trial = Trial("one by one", "equal")
    step = jp.make_train_step(
        named(options.model).model, optimizer(options, options.lr / options.workers), "single", jax.devices()[:1]
    )
    state, begin = step.init(jax.random.key(options.seed)), time.monotonic()
    turns = zip(*(rows(options, number) for number in range(options.workers)), strict=True)
    for batch in itertools.islice(itertools.chain.from_iterable(turns), options.steps * options.workers):
        state, metrics = step(state, batch)
        trial.losses.append(float(metrics["loss"]))
        trial.samples.append(len(trial.losses) * options.rows)
        trial.seconds.append(time.monotonic() - begin)
    trial.held_out = score(step.params(state))
    return timed(trial, options.workers)


def asynchronous(
    options: Options, case: str, staleness: int | None, score: Callable[[Any], float], same_rate: bool = False
) -> Trial:
    """A server in this process, and workers in their own."""
    name = "no bound" if staleness is None else f"staleness {staleness}"
    trial = Trial(f"{name}, ddp's rate" if same_rate else name, case)
    rate = options.lr / (1 if staleness == 0 or same_rate else options.workers)
    total = None if staleness == 0 else options.steps * options.workers
    start = multiprocessing.get_context("spawn").Process
    with Server(
        named(options.model).model,
        optimizer(options, rate),
        jax.random.key(options.seed),
        workers=options.workers,
        staleness=staleness,
        lease=options.lease,
    ) as server:
        pauses = [options.pause * (case == "slow" and number == 0) for number in range(options.workers)]
        jobs = [start(target=work, args=(options, server.address, i, pause, total)) for i, pause in enumerate(pauses)]
        for job in jobs:
            job.start()
        begin = server.begin
        if case == "killed":
            while len(server.log) < options.steps * options.workers // 3 and not server.wait(0.05):
                pass
            jobs[-1].kill()
            trial.killed = time.monotonic() - begin
        server.wait()
        for job in jobs:
            job.join()
        log, trial.lost = server.log, server.lost
        trial.held_out = score(server.params)
    if any(job.exitcode for job in jobs[: -1 if case == "killed" else None]):
        raise RuntimeError(f"a worker failed: exit statuses {[job.exitcode for job in jobs]}; see its output above")
    trial.losses = [one.loss / one.count for one in log]
    trial.samples = [(i + 1) * options.rows for i in range(len(log))]
    trial.seconds = [one.seconds for one in log]
    trial.staleness = [one.staleness for one in log]
    trial.workers = [one.worker for one in log]
    return timed(trial, options.workers)


def timed(trial: Trial, each: int) -> Trial:
    """The trial with its rows per second; `each` is how many gradients a step of all has."""
    first = min(WARM, len(trial.losses) // each // 2) * each
    trial.rate = (trial.samples[-1] - trial.samples[first]) / (trial.seconds[-1] - trial.seconds[first])
    return trial


def table(trials: list[Trial], options: Options) -> Table:
    """A line for each trial."""
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False, header_style="bold")
    grid.add_column("", no_wrap=True)
    for head in ("rows/s", "steps/s", "stale\nmean", "stale\nmax", "held-out\nnats/byte"):
        grid.add_column(head, justify="right", no_wrap=True)
    for case, after in itertools.pairwise([*trials, None]):
        assert case is not None
        stale = case.staleness
        grid.add_row(
            f"{case.case}: {case.name}",
            f"{case.rate:.0f}",
            f"{case.rate / options.rows / options.workers:.2f}",
            f"{statistics.mean(stale):.2f}" if stale else "-",
            f"{max(stale)}" if stale else "-",
            f"{case.held_out:.4f}",
            end_section=after is not None and after.case != case.case,
        )
    return grid


def record(trials: list[Trial], options: Options) -> dict[str, Any]:
    """Everything, for other programs to read."""
    plain = {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(options).items()}
    found = [dataclasses.asdict(one) | {"histogram": dict(Counter(one.staleness))} for one in trials]
    return {"options": plain, "jax": jax.__version__, "cores": os.cpu_count(), "trials": found}


def main(options: Options) -> list[Trial]:
    """Measures, prints the table, writes the files."""
    console = Console(width=max(80, min(100, Console().width)), highlight=False)
    clear_backends()
    jp.simulate(max(options.workers, 2))
    score, trials = scored(options), []
    bounds: list[int | None] = [*options.staleness, None]
    for case in ("equal", "slow"):
        console.print(f"{case}: ddp")
        trials.append(synchronous(options, case, options.pause * (case == "slow"), score))
        if case == "equal":
            trials.append(one_by_one(options, score))
        for bound in bounds:
            console.print(f"{case}: staleness {'without bound' if bound is None else bound}")
            trials.append(asynchronous(options, case, bound, score))
    console.print("equal: no bound, at ddp's learning rate")
    trials.insert(len(bounds) + 2, asynchronous(options, "equal", None, score, same_rate=True))
    for bound in dict.fromkeys((options.staleness[0], options.staleness[-1])):
        console.print(f"killed: staleness {bound}")
        trials.append(asynchronous(options, "killed", bound, score))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "async.json").write_text(json.dumps(record(trials, options), indent=1))
    size = (
        f"{named(options.model).parameters:,} parameters, {options.workers} workers x {options.rows} x {options.length}"
    )
    title = f"{options.model}, {size}, on {os.cpu_count()} cores"
    draw(trials, title, options.out / "async")
    console.print(title)
    console.print(table(trials, options))
    console.print(
        "one by one: the updates of a server whose workers take turns, none stale, on one device. "
        f"slow: the steps of one worker are {options.pause:g} s longer. killed: one, by kill -9, after a third of the "
        f"gradients; lease {options.lease:g} s. {WARM} steps of each are not timed. Stale: updates between pulling "
        "weights and the update by their gradient. Where workers are equal, do not use it: ddp is exact, and no slower."
    )
    console.print(f"{options.out}/async.json, async.svg, async.png")
    return trials


if __name__ == "__main__":
    main(tyro.cli(Options))
