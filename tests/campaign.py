"""Breaks runs, counts what they lose, and fails where a promise is not kept.

    python tests/campaign.py [--seconds 1800] [--kills 200] [--flips 40] [--faults all] [--short]

Kills: runs of one process and of two (on loopback, one folder), on noise and on images, are ended at random moments,
also while they start, in a save and in their last steps, each gone on with until it is done. None may lose a checkpoint
that was complete, hang, or end with other numbers than the run that nobody broke.
Flips: in a copy of a checkpoint one bit is another; restoring it must name the checkpoint. Faults: the table `FAULTS`
says of each what is promised, and within how many seconds. Two parts run at a time, in a folder that is removed.
"""

import argparse
import collections
import concurrent.futures
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from campaign_faults import FAULTS, Fault
from campaign_runs import Group, Truth, complete, last

from jaxpar.backend.buckets import Place

_SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MOMENTS = ("anywhere", "between steps", "in a save", "while it starts", "at its end")
ENDS = 60  # seconds within which a signal ends a run, and a run that nobody broke comes to its end once it trains


class Counts:
    """What was done and how it ended, by part of the campaign; printed as it happens."""

    def __init__(self, seconds: float):
        self.table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.failed: list[str] = []
        self._end = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        """Whether nothing more should be started."""
        return time.monotonic() > self._end

    def add(self, part: str, end: str, good: bool, said: str = "") -> None:
        """One more of a part, which ended so."""
        self.table[part][end] += 1
        print(f"{part:34} {end:22} {said}".rstrip(), flush=True)
        if not good:
            self.failed.append(f"{part}: {end} {said}".rstrip())


def kill(
    folder: Place, processes: int, kills: int, seed: int, truth: Truth, counts: Counts, signals: Any = _SIGNALS
) -> None:
    """Breaks runs of so many processes `kills` times, and compares each that comes to its end."""
    choice, done, number = random.Random(seed), 0, 0
    part = f"kills, {processes} process{'es' if processes > 1 else ''}, {truth.data}"
    while done < kills and not counts.over:
        out, number = folder / f"kill{processes}-{seed}-{number}", number + 1
        while True:  # one start of the run after the other
            before, how = complete(out), None
            if done < kills and not counts.over:
                how = choice.choice(_MOMENTS), choice.choice(signals)
            sent = False
            with Group(processes, out=str(out), **truth.work) as group:
                if how is not None:
                    group.wait(how[0], choice, truth)
                    whom = choice.randrange(processes)
                    sent = group.send(whom, how[1])
                    if sent and how[1] == signal.SIGKILL and processes > 1:
                        # As where a machine dies. What happens to the rest if one alone is killed is a fault's matter.
                        group.send(1 - whom, signal.SIGKILL)
                    done += sent
                ended = group.end(ENDS + truth.seconds)
            # What a run goes on from is no earlier than what was complete when the last one died.
            lost = (complete(out) or 0) < (before or 0) or (group.started is not None and group.started < (before or 0))
            if how is not None and sent:
                what = f"{how[1].name} {how[0]}, at step {group.step}"
                unsaved = group.status in (128 + how[1], 143) and complete(out) != last(out)
                end = "hung" if not ended else "lost" if lost else "unsaved" if unsaved else "ended"
                counts.add(part, end, end == "ended", what if end == "ended" else f"{what}: {group.said()}")
            elif lost or group.status:
                counts.add(part, "lost" if lost else "failed", False, group.said())
                break
            if group.status == 0:
                break
        if group.status == 0:
            wrong = truth.differs(out, group)
            counts.add(f"{part}: to the end", "other numbers" if wrong else "the same, bit for bit", not wrong, wrong)


def flip(truth: Truth, flips: int, counts: Counts) -> None:
    """Restores copies of a checkpoint in which one bit is another."""
    with Group(1, out=str(truth.out), flips=flips, **truth.work) as group:
        group.end(60 + 10 * flips, until=lambda: counts.over)
    found = [line.removeprefix("FLIP ") for line in group.lines if line.startswith("FLIP ")]
    for line in found:
        end, _, said = line.partition(" ")
        counts.add("bit flips", end, end == "named", said)
    if len(found) < flips and not counts.over:
        counts.add("bit flips", "not done", False, group.said())


def fault(fault: Fault, folder: Path, truth: Truth, counts: Counts) -> None:
    """One of the table."""
    if counts.over:
        return
    met, seconds, said = fault.run(folder / fault.name.replace(" ", "-"), truth)
    late = met and seconds > fault.seconds
    end = "late" if late else "as promised" if met else "not as promised"
    counts.add(f"fault: {fault.name}", end, met and not late, f"{seconds:.0f} s of {fault.seconds}: {said}")


def main() -> None:
    """Runs the parts, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800, help="start nothing after this time")
    parser.add_argument("--kills", type=int, default=200, help="half of them on runs of one process")
    parser.add_argument("--flips", type=int, default=40)
    parser.add_argument("--faults", default="all", help=f"all, none, or some of: {', '.join(x.name for x in FAULTS)}")
    parser.add_argument("--short", action="store_true", help="6 kills, 8 flips, four faults, one process, 35 s")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--jobs", type=int, default=2, help="parts at a time")
    if parser.parse_known_args()[0].short:
        some = "full disk, folder removed, lock removed, checkpoints read-only"
        parser.set_defaults(seconds=35, kills=6, flips=8, faults=some)
    options = parser.parse_args()
    wanted = [name.strip() for name in options.faults.split(",")]
    known = [x.name for x in FAULTS]
    if unknown := [name for name in wanted if name not in (*known, "all", "none")]:
        parser.error(f"--faults {unknown[0]}: use all, none, or some of: {', '.join(known)}")
    with tempfile.TemporaryDirectory(prefix="campaign-") as place:
        folder = Path(place)
        truth = Truth.of(folder / "unbroken", processes=1, steps=60 if options.short else 150)
        counts = Counts(options.seconds)
        print(f"a run that nobody breaks: {truth.seconds:.0f} s, {truth.running:.1f} of them in {truth.steps} steps")
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            parts = [pool.submit(flip, truth, options.flips, counts)] if options.flips else []
            share = -(-options.kills // 4)
            digits = Truth.of(folder / "unbroken-digits", processes=1, steps=truth.steps, data="digits")
            for seed, right in enumerate((truth, digits)):
                parts.append(pool.submit(kill, folder, 1, share, options.seed + seed, right, counts))
            chosen = [x for x in FAULTS if x.name in wanted or "all" in wanted]
            parts += [pool.submit(fault, x, folder, truth, counts) for x in chosen]
            for seed, data in enumerate(() if options.short else ("noise", "digits"), 2):
                two = Truth.of(folder / f"unbroken-two-{data}", processes=2, steps=150, data=data)
                parts.append(pool.submit(kill, folder, 2, share, options.seed + seed, two, counts))
            for part in concurrent.futures.as_completed(parts):
                part.result()
    print(f"\n{'what':34} {'how it ended':22} {'times':>5}")
    for part, ends in sorted(counts.table.items()):
        for end, times in ends.most_common():
            print(f"{part:34} {end:22} {times:5}")
    for x in FAULTS:
        if f"fault: {x.name}" in counts.table:
            print(f"promised of {x.name}, within {x.seconds} s: {x.promise}")
    print("\n".join(["", *(f"FAILED {line}" for line in counts.failed), f"{len(counts.failed)} promises not kept"]))
    sys.exit(bool(counts.failed) or not counts.table)


if __name__ == "__main__":
    os.environ["PYTHONHASHSEED"] = "0"
    sys.path.insert(0, str(Path(__file__).parent))
    main()
