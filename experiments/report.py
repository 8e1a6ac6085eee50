"""What experiments share: how they start on one host or several, time steps, and show what they found."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import jaxpar as jp
from jaxpar.hardware.hardware import KINDS, Hardware
from jaxpar.layout.distributed import attach

MB, GB = 1e6, 1e9
THEMES = {"": ("#1f2328", "#ffffff", "#d0d7de"), "-dark": ("#e6edf3", "#0d1117", "#3d444d")}  # ink, paper, lines
# Legible on both papers, and told apart by most who see few colours.
LINES = ("#4c8dd6", "#d9822b", "#3fa05a", "#9a6fd0", "#d1495b", "#2aa5a0", "#8c959f", "#c061a8", "#7a5230")
WARM = 3  # steps that are not timed


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every experiment takes."""

    devices: int | None = None
    """simulate so many CPU devices in each process; without it: the accelerators attached, or 8 simulated ones where
    there are none"""

    def positive(self, *names: str) -> None:
        """Raises ValueError where one of these options is below 1."""
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} leaves nothing to do; use 1 or more")


@dataclass(frozen=True, kw_only=True)
class Timed(Common):
    """What an experiment takes that times the steps of a model of text."""

    model: str = "llama-tiny"
    """the name of a model of text"""
    length: int = 64
    """positions of a row"""
    steps: int = 10
    """that are timed, after three that are not"""


def start(devices: int | None) -> None:
    """Joins the processes of the run, if they are several; simulates devices if asked to, or where there are none."""
    if jp.initialize(devices=devices).processes == 1:
        attach(devices)


def is_first() -> bool:
    """Whether this process prints and writes: one of several does."""
    return jax.process_index() == 0


def simulated() -> bool:
    return jax.devices()[0].platform == "cpu"


def hardware() -> Hardware | None:
    """The data sheet of the attached devices; None where there is none."""
    kind = jax.devices()[0].device_kind
    return next((one for one in KINDS.values() if one.device_kind == kind), None)


def where() -> str:
    """The machine, in words."""
    count, hosts = jax.device_count(), jax.process_count()
    spread = f" in {hosts} processes" if hosts > 1 else ""
    if simulated():
        return f"{count} simulated devices{spread} on {os.cpu_count()} cores"
    return f"{count} x {jax.devices()[0].device_kind}{spread}"


def console() -> Console:
    """For tables of 80 to 100 columns; mute in all processes but the first."""
    return Console(width=max(80, min(100, Console().width)), highlight=False, quiet=not is_first())


@contextmanager
def progress(screen: Console, total: int) -> Iterator[Callable[[str], None]]:
    """A bar; the function that it gives says what is done next. Where nobody watches, there is none."""
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=screen, disable=not screen.is_terminal, transient=True) as bar:
        task, begun = bar.add_task("", total=total), False

        def next_is(what: str) -> None:
            nonlocal begun
            bar.update(task, advance=int(begun), description=what)
            begun = True

        yield next_is


def seconds_of(run: Callable[[Any, Any], Any], state: Any, batch: Any, steps: int) -> tuple[list[float], Any]:
    """The seconds of so many steps, each waited for, after `WARM` that do not count; and the last state."""
    taken = []
    for _ in range(WARM + steps):
        begin = time.perf_counter()
        state, metrics = run(state, batch)
        jax.block_until_ready((state, metrics))
        taken.append(time.perf_counter() - begin)
    return taken[WARM:], state


def grid(left: Sequence[str], right: Sequence[str]) -> Table:
    """A table: columns of words, which may be folded, then columns of numbers, which never are."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False, header_style="bold")
    for head in left:
        table.add_column(head, overflow="fold")
    for head in right:
        table.add_column(head, justify="right", no_wrap=True)
    return table


@contextmanager
def style(theme: str) -> Iterator[str]:
    """Matplotlib's settings for a theme; gives the colour of ink."""
    ink, paper, lines = THEMES[theme]
    settings: dict[str, Any] = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ink)
    settings |= {"figure.facecolor": paper, "axes.facecolor": paper, "axes.edgecolor": lines, "grid.color": lines}
    settings |= {"font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left"}
    settings |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    settings |= {"svg.fonttype": "path", "svg.hashsalt": "jaxpar"}
    with plt.rc_context(settings):
        yield ink


def pictures(path: Path, draw: Callable[[str], Any]) -> None:
    """Writes path.svg, path.png and their dark twins of the figure that `draw(ink)` makes. path.svg itself is dark to
    readers whose page or system is.
    """
    for theme in THEMES:
        with style(theme) as ink:
            figure = draw(ink)
            for suffix in (".svg", ".png"):
                figure.savefig(path.with_name(f"{path.name}{theme}{suffix}"), dpi=150)
            plt.close(figure)
    light = path.with_name(f"{path.name}.svg")
    light.write_text(follows_reader(light.read_text()))


def follows_reader(svg: str) -> str:
    """A light picture that is dark where its reader's page or system is."""
    pairs = zip(THEMES[""], THEMES["-dark"], strict=True)
    rules = [f'[style*="{of}: {a}"]{{{of}:{b}!important}}' for a, b in pairs for of in ("fill", "stroke")]
    return svg.replace("<defs>", f"<style>@media(prefers-color-scheme:dark){{{''.join(rules)}}}</style>\n <defs>", 1)


def over_devices(axis: Any, at: Sequence[int], **labels: Any) -> None:
    """Numbers that double along the horizontal axis, each with its tick."""
    axis.set(**labels)
    axis.set_xscale("log", base=2)
    axis.set_xticks(at, [str(n) for n in at])
    axis.xaxis.minorticks_off()
    axis.grid(axis="y", linewidth=0.5, alpha=0.6)


def record(path: Path, options: Any, **found: Any) -> None:
    """Writes everything as JSON, for other programs to read."""
    plain = {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(options).items()}
    about = {"options": plain, "where": where(), "jax": jax.__version__, "cores": os.cpu_count()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about | found, indent=1, default=str))
