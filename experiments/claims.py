"""What is said of parallel training, each sentence measured: bytes, counts and differences of programs, times of runs.

python experiments/claims.py
python experiments/claims.py --only ring_is_flat mean_of_means
python experiments/claims.py --page experiments/results/claims.md

On simulated devices, whose programs are those of accelerators and whose times are not. Writes NAME.json, and with
`--page` the page of the docs.
"""

import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import claims_of_mathematics as mathematics
import claims_of_memory as memory
import claims_of_time as timing
import claims_of_traffic as traffic
import jax
import tyro
from claim import CLAIMS, DEVICES, LENGTH, MODEL, ROWS, Claim, Found, chosen
from report import console, grid, progress

import jaxpar as jp

ROOMS = {"What is sent": traffic, "What devices hold": memory, "What is computed": mathematics, "Time": timing}
HOW = {
    "traced": "read from the traced step or its layout",
    "compiled": "read from the compiled step",
    "run": "run",
    "timed": "timed",
}
SIMULATED = 64  # devices, for 70B; all else takes the first eight


@dataclass(frozen=True)
class Options:
    """Measures each claim and says whether it is true."""

    only: tuple[str, ...] = ()
    """claims by name; without it: all"""
    how: tuple[Literal["traced", "compiled", "run", "timed"], ...] = ("traced", "compiled", "run", "timed")
    """kinds of measurement; without `timed` all numbers are the same everywhere"""
    page: Path | None = None
    """write the page of the docs there"""
    out: Path = Path("runs/claims")
    """where claims.json goes"""

    def __post_init__(self) -> None:
        if unknown := set(self.only) - set(CLAIMS):
            raise ValueError(f"--only {' '.join(sorted(unknown))}: use {', '.join(CLAIMS)}")


def machine() -> str:
    """Of which the times are."""
    name = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        name = next((x.partition(": ")[2] for x in info.read_text().splitlines() if x.startswith("model name")), name)
    load = os.getloadavg()[0]  # of which this process is about one
    return f"{DEVICES} simulated devices on {os.cpu_count()} cores of {name}, load {load:.0f}, jax {jax.__version__}"


def line(one: Claim, found: Found) -> str:
    """One row of the page's tables."""
    return f"| {one.says} ({one.source}) | **{found.verdict}** | {found.figure} | {one.how} |"


def page(found: Mapping[str, Found]) -> str:
    """The page of the docs."""
    counts = {v: sum(x.verdict == v for x in found.values()) for v in ("true", "true if", "false")}
    said = ", ".join(f"{n} {v}" for v, n in counts.items())
    lines = [
        "# What is said, measured",
        "",
        "Sentences from papers, lecture notes and posts about parallel training, each measured by a program. "
        f"{len(found)} claims: {said}. This page is made by",
        "",
        "```sh",
        "python experiments/claims.py --page experiments/results/claims.md",
        "```",
        "",
        f"Where nothing else is said the model is `{MODEL}`, P = {chosen().parameters:,} parameters in float32, "
        f"batches of {ROWS} "
        f"rows of {LENGTH} tokens, Adam, {DEVICES} devices. *Sent* is what a device puts on the wire, by the ring "
        f"convention: "
        '(n - 1)/n of a buffer, for an all-reduce twice that. A verdict follows from the numbers: "true if" names its '
        "condition in the figure.",
        "",
        *(f"- *{how}*: {words}." for how, words in HOW.items() if how != "timed"),
        f"- *timed*: the fastest of {timing.ROUNDS} steps on {machine()}. That is no accelerator, and beside other "
        "work even the order can change.",
        "",
    ]
    for title, room in ROOMS.items():
        mine = [c for c in CLAIMS.values() if c.measure.__module__ == room.__name__ and c.name in found]
        if mine:
            lines += [f"## {title}", "", "| said | verdict | figure | how |", "|-|-|-|-|"]
            lines += [*(line(one, found[one.name]) for one in mine), ""]
    lines += [
        "## Sources",
        "",
        "Chen et al. 2016, arXiv:1604.06174. Goyal et al. 2017, arXiv:1706.02677. Huang et al. 2019, GPipe, "
        "arXiv:1811.06965. "
        "Ioffe 2017, arXiv:1702.03275. Kalamkar et al. 2019, arXiv:1905.12322. Korthikanti et al. 2022, "
        "arXiv:2205.05198. "
        "Li et al. 2014, *Parameter server*, OSDI. Li et al. 2020, *PyTorch distributed*, arXiv:2006.15704. "
        "Micikevicius et al. "
        "2018, arXiv:1710.03740. Narayanan et al. 2019, *PipeDream*, SOSP. Narayanan et al. 2021, arXiv:2104.04473. "
        "Patarasu & "
        "Yuan 2009, JPDC 69. Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054. Shoeybi et al. 2019, arXiv:1909.08053. "
        "Zhao et "
        "al. 2023, *PyTorch FSDP*, arXiv:2304.11277.",
    ]
    return "\n".join(lines) + "\n"


def main(options: Options) -> dict[str, Found]:
    """Measures, prints the table, writes the files."""
    jp.simulate(SIMULATED)
    screen = console()
    wanted = [c for c in CLAIMS.values() if c.how in options.how and (not options.only or c.name in options.only)]
    found: dict[str, Found] = {}
    seconds: dict[str, float] = {}
    with progress(screen, len(wanted)) as next_is:
        for one in wanted:
            next_is(one.name)
            begin = time.perf_counter()
            found[one.name] = one.measure()
            seconds[one.name] = time.perf_counter() - begin
    options.out.mkdir(parents=True, exist_ok=True)
    lines = {
        one.name: dataclasses.asdict(found[one.name])
        | {"says": one.says, "source": one.source, "how": one.how, "line": line(one, found[one.name])}
        | {"seconds": seconds[one.name]}
        for one in wanted
    }
    about = {"machine": machine(), "python": sys.version.split()[0], "claims": lines}
    (options.out / "claims.json").write_text(json.dumps(about, indent=1))
    table = grid(["said", "verdict", "figure"], [])
    for one in wanted:
        table.add_row(one.says, found[one.name].verdict, found[one.name].figure, end_section=True)
    screen.print(table)
    screen.print(f"{options.out}/claims.json")
    if options.page:
        options.page.write_text(page(found))
        screen.print(str(options.page))
    return found


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
