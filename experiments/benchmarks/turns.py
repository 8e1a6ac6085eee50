"""How benchmarks time: contenders take turns, and medians are compared, so that a busy machine slows all alike."""

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping

import numpy as np


def cpu() -> float:
    """Seconds of CPU time of this process so far, all threads together."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def medians(contenders: Mapping[str, Callable[[], tuple[float, ...]]], rounds: int) -> dict[str, tuple[float, ...]]:
    """The medians over rounds of what each contender measures, by name; in every round each runs once."""
    found = [[run() for run in contenders.values()] for _ in range(rounds)]
    return {
        name: tuple(float(x) for x in np.median(measured, axis=0))
        for name, measured in zip(contenders, zip(*found, strict=True), strict=True)
    }


def fresh(file: str, *arguments: str) -> str:
    """The last line that a script prints in a process of its own, on CPU devices and without a compilation cache."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    command = [sys.executable, file, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


def report(ratios: Callable[[int], dict[str, float]], doc: str, rounds: int) -> None:
    """The `main` of a benchmark: it prints what it finds, and for `suite.py` its ratios, as JSON on the last line."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds)
    print(json.dumps(ratios(parser.parse_args().rounds)))
