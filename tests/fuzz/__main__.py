"""Random programs under random strategies beside one device, and random losses that couple rows or do not.

    make fuzz [SECONDS=600] [SEED=0] [FROM=0] [COUNT=100] [JOBS=2]
    PYTHONPATH=tests python -m fuzz [--seconds 600] [--seed 0] [--jobs 2] [--from 0] [--count 100] [--into FOLDER]

A number is one program under four strategies and four losses; the same seed and number are always the same. Each
failure is printed as a program that runs by itself, made small, and written into a folder if one is named. Exit status
1 where a gradient is wrong, an error is raw, a process dies, a loss couples rows in silence, or more than 1 in 200 of
the losses that do not couple rows are refused.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import platform
import queue
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

HANG = 600  # seconds without a line, after which a process is taken to hang
NUMBERS = 25  # of a process, after which another takes its place: compiled programs add up
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
if version("jaxlib").startswith("0.10."):  # as in the tests: half of a program's compilation
    FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
if platform.machine() == "x86_64":
    # No fused multiply-add: with it, and without LLVM's optimizations, a maximum that is computed again where it is
    # compared with what it was the maximum of is another by a bit, and its gradient 0 / 0, on one device or on several.
    FLAGS += " --xla_cpu_max_isa=AVX"
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"{FLAGS} --xla_cpu_collective_call_terminate_timeout_seconds=300",
    "JAX_ENABLE_COMPILATION_CACHE": "0",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]),
}
Record = dict[str, Any]


def main() -> None:
    """Run, print the table, exit."""
    parser = argparse.ArgumentParser(
        prog="fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600, help="start nothing after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the number to begin with")
    parser.add_argument("--count", type=int, default=sys.maxsize, help="how many numbers")
    parser.add_argument("--minimise", type=float, default=120, help="seconds for making a failure small")
    parser.add_argument("--into", type=Path, help="a folder for failing programs")
    parser.add_argument("--worker", nargs=3, type=float, metavar=("FROM", "TO", "UNTIL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        from .worker import work

        first, last, until = options.worker
        work(options.seed, iter(range(int(first), int(last))), until, options.minimise)
        return
    run = Run(options)
    run.go()
    print(run.table())
    sys.exit(run.failed())


class Run:
    """All processes of a run, and what they have found."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.until = options, time.time() + options.seconds
        self.counts: collections.Counter[tuple[str, str, str]] = collections.Counter()
        self.said: collections.Counter[tuple[str, str]] = collections.Counter()
        self.failures = 0
        self._lock, self._next = threading.Lock(), itertools.count(options.first, NUMBERS)

    def go(self) -> None:
        """Until the time is up, or all numbers are done."""
        threads = [threading.Thread(target=self._thread) for _ in range(self.options.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _thread(self) -> None:
        end = self.options.first + self.options.count
        while time.time() < self.until:
            with self._lock:
                first = next(self._next)
            last = min(first + NUMBERS, end)
            while first < last and time.time() < self.until:
                first = self._process(first, last)
            if last == end:
                return

    def _process(self, first: int, last: int) -> int:
        """One process; where it dies or hangs, that is a failure, and the next number is returned."""
        o = self.options
        command = [sys.executable, "-m", "fuzz", "--seed", str(o.seed), "--minimise", str(o.minimise)]
        command += ["--worker", str(first), str(last), str(self.until)]
        with subprocess.Popen(
            command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            lines: queue.Queue[str | None] = queue.Queue()
            errors: collections.deque[str] = collections.deque(maxlen=20)
            readers = [
                threading.Thread(target=lambda: ([lines.put(x) for x in process.stdout or ()], lines.put(None))),
                threading.Thread(target=lambda: errors.extend(process.stderr or ())),
            ]
            for reader in readers:
                reader.start()
            at, number, done = {"at": "its start", "program": ""}, first, False
            while True:
                try:
                    line = lines.get(timeout=HANG)
                except queue.Empty:
                    process.kill()
                    errors.append(f"hung: no line for {HANG} s")
                    break
                if line is None:
                    break
                record = json.loads(line)
                if "at" in record:
                    at = record
                    kind, n = record["at"].split()[:2]
                    number = int(n) if kind == "program" else number
                elif "done" in record:
                    done = True
                else:
                    self._take(record)
            process.wait()
            for reader in readers:
                reader.join()
        if done:
            return last
        title = f"died at {at['at']}: {' '.join(''.join(errors).split())[-600:]}"
        self._take({"part": "strategies", "row": "processes", "kind": "died", "said": title[:200]})
        self._take({"failure": title, "program": at["program"], "part": "strategies"})
        return number + 1

    def _take(self, record: Record) -> None:
        with self._lock:
            if "failure" in record:
                self._failure(record)
                return
            self.counts[record["part"], record["row"], record["kind"]] += 1
            if record["kind"] in ("refused", "rounded", "invalid", "died") and record["row"] != "coupled":
                self.said[f"{record['kind']}, {record['row']}", record["said"]] += 1

    def _failure(self, record: Record) -> None:
        """Shown when it has been made small, which follows the same failure as it was found; kept both times."""
        small = record.get("minimal", False)
        self.failures += not small
        rule = "-" * 100
        print(f"{rule}\n{'made small: ' * small}{record['failure']}\n{rule}", flush=True)
        if small or "died" in record["failure"]:
            print(record["program"], flush=True)
        if self.options.into:
            self.options.into.mkdir(parents=True, exist_ok=True)
            name = f"{self.options.seed}_{self.failures:04}{'_small' * small}.py"
            (self.options.into / name).write_text(record["program"])

    def table(self) -> str:
        """Counts of each part, and what was refused."""
        lines = []
        for part, kinds in (
            ("strategies", ("equal", "refused", "rounded", "crashed", "wrong", "invalid", "died")),
            ("losses", ("refused", "warned", "silent", "crashed", "invalid")),
        ):
            rows = sorted({row for p, row, _ in self.counts if p == part})
            lines += ["", f"{part:24}" + "".join(f"{kind:>10}" for kind in kinds)]
            for row in [*rows, "all"]:
                counts = [
                    sum(n for (p, r, k), n in self.counts.items() if p == part and k == kind and row in (r, "all"))
                    for kind in kinds
                ]
                lines.append(f"{row:24}" + "".join(f"{n or '':>10}" for n in counts))
        lines += ["", "what was said:"]
        lines += [f"{n:5} {kind}: {said}" for (kind, said), n in self.said.most_common(40)]
        return "\n".join(lines)

    def failed(self) -> bool:
        """Whether a promise is broken."""
        by = lambda row, kind: self.counts["losses", row, kind]
        innocent = sum(by("innocent", kind) for kind in ("refused", "warned", "silent"))
        kinds = [kind for (_, _, kind), n in self.counts.items() if n]
        broken = {"crashed", "wrong", "died"}.intersection(kinds) or by("coupled", "silent")
        return bool(broken) or 200 * by("innocent", "refused") > max(innocent, 200) or not self.counts


if __name__ == "__main__":
    main()
