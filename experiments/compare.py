"""Every strategy on the same data from the same initial values, in one table and one picture.

python experiments/compare.py
python experiments/compare.py --strategies ddp zero3 zero3,microbatches=2,remat=layer --steps 20
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import optax
import tyro
from compare_picture import draw
from report import MB, Common, console, grid, is_first, progress, record, start, where
from rich.console import Console
from rich.table import Table

import jaxpar as jp
from jaxpar.data import text
from jaxpar.inspect.explain import Explanation, explain
from jaxpar.models import named
from jaxpar.parity.parity import Difference, Reference, differences

WARM = 3  # steps that are not timed
SPLIT = ("data=4,tensor=2", "pipe=4,data=2,microbatches=4")  # within a layer, and between layers


@dataclass(frozen=True)
class Options(Common):
    """Trains one model under every strategy and shows that they compute the same, and what each stores and sends."""

    strategies: tuple[str, ...] = ("single", "dp", "ddp", "zero1", "zero2", "zero3", "hsdp", *SPLIT)
    """presets, or name=value,...; the first is what losses are compared with"""
    model: str = "llama-tiny"
    """the name of a model of text"""
    data: Path | None = None
    """a file or folder to learn from; without it: Python's own source"""
    steps: int = 60
    """of every strategy; the first three are not timed"""
    rows: int = 8
    """windows of text in the global batch"""
    length: int = 64
    """bytes that each window predicts"""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """sgd has momentum, and shows a wrong scale of the gradients, which adamw would hide"""
    lr: float | None = None
    """learning rate; without it: 0.1 for sgd, 0.003 for adamw, gradients clipped to norm 1"""
    seed: int = 0
    """of the initial values and of the data"""
    out: Path = Path("runs/compare")
    """where compare.json, compare.svg, compare.png and their dark twins go"""

    def __post_init__(self) -> None:
        self.positive("steps", "rows", "length")
        if not self.strategies:
            raise ValueError("--strategies names none; name at least one, such as ddp")
        for name in self.strategies:  # before the first is compiled
            jp.Strategy.parse(name)
        if named(self.model).kind != "text":
            raise ValueError(
                f"model={self.model} is one of {named(self.model).kind}; give one of text: llama-tiny, ..."
            )


@dataclass
class Trial:
    """One strategy, what is known of it before it runs, and what was measured.

    Attributes:
      run: the compiled step.
      worst: the gradient at the start that is furthest from one device's, by plain `jax.grad`.
      state: the newest.
      losses, seconds: of every step.
      measured: on accelerators, peak bytes in use on the first and the last device.
    """

    name: str
    step: Any
    run: Any
    explanation: Explanation
    worst: Difference | None = None
    state: Any = None
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    measured: list[int] = field(default_factory=list)

    @property
    def milliseconds(self) -> float:
        """The median step."""
        return 1e3 * statistics.median(self.seconds[WARM:] or self.seconds)

    @property
    def sent(self) -> dict[str, int]:
        """Bytes on the wire per device and step by kind of collective; of a server, through its links."""
        sent: dict[str, int] = {}
        for kind, found, _ in self._exchanges:
            sent[kind] = sent.get(kind, 0) + found
        return sent

    @property
    def expected(self) -> int:
        """Bytes of the closed form, likewise."""
        return sum(expected for _, _, expected in self._exchanges)

    @property
    def _exchanges(self) -> list[tuple[str, int, int]]:
        """Kind, bytes found, bytes expected."""
        through = [(one.kind, one.found, one.expected) for one in self.explanation.transfers]
        return through + [(one.kind, one.found_sent, one.expected_sent) for one in self.explanation.checks]

    @property
    def counts(self) -> tuple[int, int]:
        """Collectives in the jaxpr and in the closed form; the exchanges of a server."""
        checks, exchanges = self.explanation.checks, len(self.explanation.transfers)
        return sum(c.written_count or 0 for c in checks) + exchanges, sum(c.expected_count for c in checks) + exchanges


def prepare(model: jp.Model, optimizer: Any, name: str, batch: Any) -> Trial:
    step = jp.make_train_step(model, optimizer, name)
    if step.strategy.server:
        return Trial(name, step, step, step.explain(batch))
    compiled = step.compile(batch)
    return Trial(name, step, compiled, explain(step, batch, compiled))


def measure(trials: Sequence[Trial], key: jax.Array, batch: Any) -> None:
    """One step of each alone, those that need least first, since a device only remembers its highest peak."""
    if not jax.devices()[0].memory_stats():
        return  # a CPU counts nothing
    for trial in sorted(trials, key=lambda t: max(m.total for m in t.explanation.memory.values())):
        state = trial.step.init(key)
        jax.block_until_ready(trial.run(state, batch))
        ends = trial.step.mesh.devices.flat[0], trial.step.mesh.devices.flat[-1]
        trial.measured = [device.memory_stats()["peak_bytes_in_use"] for device in ends]


def check(trials: Sequence[Trial], model: jp.Model, key: jax.Array, batch: Any) -> None:
    """Gradients of the first batch against those of one device without any of jaxpar's machinery."""
    _, wanted = Reference(model, jp.Strategy(single=True), 1).value_and_grad(key, batch)
    for trial in trials:
        trial.state = trial.step.init(key)
        _, grads = trial.step.value_and_grad(trial.state, batch)
        trial.worst = max(differences("gradient", model.unwrap(grads), wanted), key=lambda d: d.error)


def train(trials: Sequence[Trial], batches: Sequence[Any], screen: Console) -> None:
    """All strategies take turns step by step, so that a busy machine slows all of them alike."""
    with progress(screen, len(batches) * len(trials)) as next_is:
        for number, batch in enumerate(batches):
            first = number % len(trials)
            for trial in (*trials[first:], *trials[:first]):
                next_is(f"step {number}, {trial.name}")
                begin = time.perf_counter()
                trial.state, metrics = trial.run(trial.state, batch)
                jax.block_until_ready((trial.state, metrics))
                trial.seconds.append(time.perf_counter() - begin)
                trial.losses.append(float(metrics["loss"]))


# -- what is shown -----------------------------------------------------------------------------------------------------


def table(trials: Sequence[Trial]) -> Table:
    """A line for each strategy, or role where devices differ; in MB, per device."""
    heads = ["final\nloss", "grads\noff by", "params", "grads", "optim.", "tempo-\nraries"]
    heads += ["peak"] if trials[0].measured else []
    lines = grid([""], [*heads, "collec-\ntives", "sent", "/ closed\nform", "step\nms"])
    for trial in trials:
        for place, (role, memory) in enumerate(trial.explanation.memory.items()):
            sizes = [f"{x / MB:.2f}" for x in (memory.params, memory.grads, memory.optimizer, memory.temporaries)]
            sizes += [f"{trial.measured[place] / MB:.2f}"] if trial.measured else []
            name = (trial.name if role == "each device" else f"{trial.name} {role}").replace(",", ",\n")
            if place:
                lines.add_row(name, "", "", *sizes)
                continue
            sent, (written, closed) = sum(trial.sent.values()), trial.counts
            ratio = f"{sent / trial.expected:.3f}" if trial.expected else "-"
            lines.add_row(
                name,
                f"{trial.losses[-1]:.5f}",
                f"{trial.worst.error:.0e}" if trial.worst else "",
                *sizes,
                f"{written}" if written == closed else f"{written} v {closed}",
                f"{sent / MB:.2f}",
                ratio,
                f"{trial.milliseconds:.0f}",
            )
    return lines


def _caption(trials: Sequence[Trial], options: Options) -> str:
    error, path, name = max((t.worst.error, t.worst.path, t.name) for t in trials if t.worst)
    timed = options.steps - WARM if options.steps > WARM else options.steps
    return (
        "Off by: the largest difference of a gradient from plain jax.grad on one device, relative to the largest "
        f"element of its leaf: {error:.1e} at most, in {path} under {name}. Memory and sent: MB per device; sent is "
        "what goes out on the wire, on a ring of n devices (n-1)/n of a buffer, for an all-reduce twice that; dp sends "
        "through the server. Gradients are among the temporaries, of a server among the arguments of its update. "
        f"Step: the median of {timed} steps" + (", all strategies in turn." if len(trials) > 1 else ".")
    )


def found(trials: Sequence[Trial]) -> dict[str, Any]:
    """Everything, for other programs to read."""
    return {
        trial.name: {
            "losses": trial.losses,
            "seconds": trial.seconds,
            "median_milliseconds": trial.milliseconds,
            "worst_gradient": dataclasses.asdict(trial.worst) if trial.worst else None,
            "sent": trial.sent,
            "sent_expected": trial.expected,
            "peak_bytes_measured": trial.measured,
            **trial.explanation.json(),
        }
        for trial in trials
    }


def main(options: Options) -> list[Trial]:
    """Compares, prints the table, writes the files."""
    begin = time.perf_counter()
    start(options.devices)
    screen = console()
    chosen, source = named(options.model), text(options.data, options.length)
    rate = options.lr or {"sgd": 0.1, "adamw": 3e-3}[options.optimizer]
    descent = optax.sgd(rate, momentum=0.9) if options.optimizer == "sgd" else optax.adamw(rate)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), descent)
    batches = list(itertools.islice(source.batches(options.rows, options.seed), options.steps))
    key = jax.random.key(options.seed)
    trials = []
    for name in options.strategies:
        with screen.status(f"compiling {name}"):
            trials.append(prepare(chosen.model, optimizer, name, batches[0]))
    with screen.status("comparing gradients"):
        measure(trials, key, batches[0])
        check(trials, chosen.model, key, batches[0])
    train(trials, batches, screen)

    size = f"{chosen.parameters:,} parameters, batch {options.rows} x {options.length}"
    title = f"{options.model}, {size}, {options.optimizer}, {where()}"
    if is_first():
        record(options.out / "compare.json", options, strategies=found(trials))
        draw(trials, title, options.out / "compare")
    screen.print(title)
    screen.print(source.description)
    screen.print(table(trials))
    screen.print(_caption(trials, options))
    screen.print(
        f"{time.perf_counter() - begin:.0f} s; {options.out}/compare.json, .svg, .png, and -dark.svg, -dark.png"
    )
    return trials


if __name__ == "__main__":
    main(tyro.cli(Options))
