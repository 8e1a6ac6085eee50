"""A process that keeps the others waiting is named, with the step from which on it does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.train.pace import Pace, slowest
from jaxpar.train.recorder import read


class Table(dict[str, str]):
    """A `Store` of this process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def folder(self, name: str) -> dict[str, str]:
        return {key.removeprefix(f"{name}/"): value for key, value in self.items() if key.startswith(f"{name}/")}

    def wait(self, name: str, seconds: float) -> bool:
        raise AssertionError("a gathering that waits is a synchronisation")


def told(away: list[list[float]], every: int, out: Path) -> dict[int, str]:
    """What is said after which step of [steps][ranks] that are away for so long, in steps of a second."""
    table, said = Table(), {}
    ranks = [Pace(every, table, rank, len(away[0])) for rank in range(len(away[0]))]
    ranks[0].begin(0, out, out)
    for number, row in enumerate(away, 1):
        for rank in reversed(range(len(row))):
            if text := ranks[rank].add(number, 1.0, row[rank], row[rank] / 2):
                said[number] = text
    ranks[0].end()
    return said


def test_the_slowest_is_named_once_with_its_first_step(tmp_path: Path) -> None:
    even, slow = [0.02, 0.03, 0.02], [0.02, 0.03, 0.52]
    said = told([even] * 4 + [slow] * 8, 2, tmp_path)
    assert [*said] == [8]
    assert "rank 2 on " in said[8]
    assert "keeps the others waiting since step 5 or so" in said[8]
    assert "is away from its devices for 520 ms, 260 ms of them in its data; the others' median is 30 ms" in said[8]
    lines = read(tmp_path / "pace.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, 12]
    assert lines[-1]["away"] == pytest.approx(slow)
    assert (tmp_path / "pace.png").stat().st_size > 5000


def test_who_is_slow_once_or_as_slow_as_all_is_not_named(tmp_path: Path) -> None:
    assert not told([[0.02, 0.02], [0.02, 0.6], [0.02, 0.02], [0.6, 0.6], [0.6, 0.62]], 1, tmp_path)
    assert slowest({0: 0.5, 1: 0.02, 2: 0.5}, 1.0) == -1  # half of the others are as slow: it is no odd one out


_WORKER = """
import sys, time
import jaxpar as jp
place = jp.initialize()
import jax, numpy as np, optax
sys.path[:0] = ["tests", "tests/train"]
from test_processes import model, rows

def data(start):
    for number in range(start, 10**6):
        if place.process and number >= 6:
            time.sleep(0.5)
        yield rows()

def trainer():
    loop = jp.Loop(steps=12, out=sys.argv[1], record=2, save_every=5, overwrite=True)
    return jp.Trainer(model(), optax.adam(1e-2), data, "ddp", loop)

trainer().run()
found = jp.replay(trainer(), 12)
assert found.ok and not found.others and found.compared == (10, 12), found
print("REPLAYED", found.total)
"""


@pytest.mark.battery
def test_of_two_processes_the_one_with_slow_data_is_named_and_a_step_replayed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jaxpar", "launch", "--processes", "2", "--devices", "2", "--", "-c", _WORKER]
    env = {**os.environ, "JAXPAR_WATCHDOG": "300"}
    run = subprocess.run([*command, str(tmp_path / "run")], env=env, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("REPLAYED (9, 4)") == 2, run.stdout
    assert run.stdout.count("rank 1 on ") == 1, run.stdout
    assert "keeps the others waiting since step 7 or so" in run.stdout
    assert (tmp_path / "run" / "pace.png").exists()
