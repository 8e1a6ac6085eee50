"""The watchdog, with a table and a clock of the test's: who is lost, stuck or has failed, and how that is told."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxpar.hosts import watchdog
from jaxpar.hosts.environment import Place
from jaxpar.hosts.judge import Beat, Verdict
from jaxpar.hosts.watchdog import Watch


class Table(dict[str, str]):
    """A `Store` in this process."""

    broken = False

    def set(self, key: str, value: str) -> None:
        if self.broken:
            raise RuntimeError("UNAVAILABLE: Socket closed")
        self[key] = value

    def get(self, key: str) -> str | None:  # type: ignore[override]
        return super().get(key)

    def folder(self, name: str) -> dict[str, str]:
        return {key.removeprefix(f"{name}/"): value for key, value in self.items() if key.startswith(f"{name}/")}

    def wait(self, name: str, seconds: float) -> bool:
        return True


class Run:
    """Three processes, on three hosts, and what ended each."""

    def __init__(self) -> None:
        self.now, self.table, self.left = 0.0, Table(), dict[int, Verdict]()
        end = lambda watch, verdict: self.left.setdefault(watch.place.process, verdict)
        self.watches = [Watch(self.table, Place("test", "a:1", 3, n), 60, end, lambda: self.now) for n in range(3)]
        for rank, watch in enumerate(self.watches):
            watch.own = Beat(host=f"node{rank}", pid=40 + rank)  # of no machine: their pids mean nothing here

    def go(self, seconds: float, silent: tuple[int, ...] = (), each: Callable[[], None] = lambda: None) -> None:
        """Time passes, in which some say nothing."""
        until = self.now + seconds
        while self.now < until:
            self.now += 1
            each()
            for rank, watch in enumerate(self.watches):
                if rank not in silent:
                    try:
                        watch.talk()
                    except RuntimeError as error:
                        watch._problem = str(error)
            for rank, watch in enumerate(self.watches):
                if rank not in silent and rank not in self.left:
                    watch.look()

    def step(self, *ranks: int) -> None:
        for rank in ranks or range(3):
            self.watches[rank].entered()
            self.watches[rank].left()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(watchdog, "_LEAVING", 0.0)
    return Run()


def test_nobody_ends_a_run_that_goes_well_or_compiles_for_long(run: Run) -> None:
    run.go(200)  # before step 1, and then in it
    for watch in run.watches[1:]:
        watch.entered()
    run.go(200)
    run.watches[0].entered()
    for watch in run.watches:
        watch.left()
    run.go(50, each=run.step)
    run.go(200)  # an evaluation, a checkpoint
    assert not run.left


def test_a_lost_process_ends_all_within_the_limit(run: Run) -> None:
    """jax's own watch takes 100 s, and 320 s at the end of a run."""
    run.go(5, each=run.step)
    before = run.now
    run.watches[1].entered()
    run.go(60, silent=(1,))
    assert [*run.left] == [0, 2]
    assert run.now - before == 60
    (sentence,) = {verdict.sentence for verdict in run.left.values()}
    assert sentence.startswith("rank 1 on node1 (pid 41) is lost: nothing was heard of it for 3")
    assert sentence.endswith("it last finished step 5")  # it had said so, before step 6
    run.go(2)  # stopped, and continued: it hears what the others have decided
    assert run.left[1] == run.left[0]


def test_a_lost_process_0_is_judged_by_each(run: Run) -> None:
    run.go(5, each=run.step)
    run.go(50, silent=(0,))
    assert [*run.left] == [1, 2]
    assert "rank 0 on node0 (pid 40) is lost: nothing was heard of it" in run.left[2].sentence


def test_a_coordinator_that_does_not_answer_is_process_0s(run: Run) -> None:
    run.go(5, each=run.step)
    run.table.broken = True
    run.go(50, silent=(0,))
    assert [*run.left] == [1, 2]
    says = "its coordinator has not answered for 37 s: UNAVAILABLE: Socket closed; it last finished step 5"
    assert says in run.left[1].sentence


@pytest.mark.parametrize("slow", [0, 2])
def test_a_stuck_process_is_who_others_wait_for(run: Run, slow: int) -> None:
    run.go(5, each=run.step)
    run.go(100)
    others = [rank for rank in range(3) if rank != slow]
    for rank in others:
        run.watches[rank].entered()
    run.go(60)
    assert [*run.left] == [0, 1, 2]
    assert all(verdict.stacks for verdict in run.left.values())
    (sentence,) = {verdict.sentence for verdict in run.left.values()}
    assert sentence == (
        f"rank {slow} on node{slow} (pid {40 + slow}) is stuck: "
        "it last finished step 5, and stayed there 37 s while others are in step 6"
    )


def test_who_was_behind_when_all_were_stopped_is_given_time(run: Run) -> None:
    """A scheduler stops all processes of a job, and lets them go on hours later."""
    run.go(5, each=run.step)
    run.watches[0].entered()
    run.watches[1].entered()
    run.go(20)
    run.now += 10_000
    run.go(20)
    assert not run.left
    run.go(40)
    assert "rank 2 on node2 (pid 42) is stuck" in run.left[0].sentence


def test_a_slow_process_that_moves_is_not_stuck(run: Run) -> None:
    run.step()
    for _ in range(5):
        run.step(0, 1)
        run.go(30)
        run.step(2)
    assert not run.left


def test_fewer_steps_than_others(run: Run) -> None:
    """With other --steps, the others waited for 150 s and more, and ended by an abort."""
    run.go(5, each=run.step)
    run.watches[2].own.ended = True
    run.step(0, 1)
    run.go(60)
    says = "rank 2 on node2 (pid 42) ended, and last finished step 5, while others are past step 6; give every process"
    assert says in run.left[0].sentence
    assert not run.left[1].stacks


def test_a_failure_is_told_to_all(run: Run) -> None:
    run.go(3, each=run.step)
    run.watches[2].own.failed = "ValueError: no such row"
    run.go(3)
    assert run.left[1].sentence == (
        "rank 2 on node2 (pid 42) failed: ValueError: no such row (it last finished step 3)"
    )


def test_a_collective_that_broke_off_is_not_the_reason(run: Run) -> None:
    """Where a process is killed, the others' collectives fail, seconds before anything is known of it."""
    run.go(3, each=run.step)
    run.watches[0].own.failed, run.watches[0].own.follows = "JaxRuntimeError: Gloo: connection closed by peer", True
    run.go(60, silent=(1,))
    assert "rank 1 on node1 (pid 41) is lost" in run.left[2].sentence
    alone = Run()
    alone.watches[2].own.failed, alone.watches[2].own.follows = "JaxRuntimeError: out of memory", True
    alone.go(60)
    assert alone.left[0].sentence.startswith("rank 2 on node2 (pid 42) failed: JaxRuntimeError: out of memory")


def test_a_process_that_is_gone_from_this_machine_is_seen_at_once(run: Run) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    run.watches[1].own = Beat.here()
    run.watches[1].own.pid = dead.pid
    run.go(2)
    assert f"(pid {dead.pid}) is lost: its process is gone; it had not begun a step" in run.left[0].sentence


def test_a_resumed_run_counts_from_its_checkpoint(run: Run) -> None:
    for watch in run.watches:
        watch.resumed(100)
    run.go(200)  # it compiles
    assert not run.left
    run.step()
    assert run.watches[0].own.where == "last finished step 101"
    assert Beat.read(run.watches[0].own.written()) == run.watches[0].own


def test_stacks_are_written_beside_the_run(run: Run, tmp_path: Path) -> None:
    run.watches[1].folder = tmp_path
    assert watchdog.stacks(run.watches[1]) == f"where its threads were is in {tmp_path}/stacks-rank-1.txt"
    assert "test_stacks_are_written_beside_the_run" in (tmp_path / "stacks-rank-1.txt").read_text()


def test_a_launcher_that_is_gone_leaves_nobody_behind(run: Run) -> None:
    run.watches[0].parent = run.watches[1].parent = 1
    run.go(2)
    assert run.left[0].sentence == "jaxpar launch, which had started rank 0 on node0 (pid 40), is gone"
    assert 1 in run.left


def test_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watchdog.seconds() == 60
    assert watchdog.seconds(0) == 0
    monkeypatch.setenv("JAXPAR_WATCHDOG", "20")
    assert watchdog.seconds() == 20
    with pytest.raises(ValueError, match=r"a watchdog of 2 s is too quick"):
        watchdog.seconds(2)
    monkeypatch.setenv("JAXPAR_WATCHDOG", "soon")
    with pytest.raises(ValueError, match="JAXPAR_WATCHDOG='soon' is no number of seconds"):
        watchdog.seconds()


def test_the_verdict_is_in_the_table(run: Run) -> None:
    run.watches[0].own.failed = "OSError: no space"
    run.go(2)
    assert json.loads(run.table["verdict"])[0].startswith("rank 0 on node0 (pid 40) failed: OSError: no space")


def test_all_that_train_far_longer_than_before_are_stuck(run: Run) -> None:
    """Whoever hung in one collective with all others was taken for one that compiles, and waited for ever."""
    for watch in run.watches:
        watch.waits = True

    def train() -> None:
        for watch in run.watches:
            watch.entered()
            watch.left()
        run.go(2)
        for watch in run.watches:
            watch.doing("reading a batch")

    for _ in range(10):
        train()
        run.go(3)
    for watch in run.watches:
        watch.entered()
        watch.left()
    run.go(30)
    assert not run.left
    run.go(30)
    assert [*run.left] == [0, 1, 2]
    (sentence,) = {verdict.sentence for verdict in run.left.values()}
    says = "all 3 processes are stuck: for 37 s none has begun anything else; rank 0 on node0 (pid 40) is training, "
    assert sentence.startswith(says)
    assert (
        "which took 2.0 s at most before (it last finished step 11); rank 1 on node1 (pid 41) is training" in sentence
    )
    assert run.left[0].stacks


@pytest.mark.parametrize(
    ("doing", "ends"),
    [("compiling", False), ("between steps", False), ("evaluating", True), ("reading a batch", True)],
)
def test_what_may_take_long_is_given_long(run: Run, doing: str, ends: bool) -> None:
    run.go(5, each=run.step)
    for watch in run.watches:
        watch.doing(doing)
    run.go(150)
    run.watches[1].doing(doing)  # one of them goes on
    run.go(1700)
    assert not run.left
    run.go(200)
    assert bool(run.left) == ends
    if ends:
        assert f"rank 2 on node2 (pid 42) is {doing}, which took 0.0 s at most before" in run.left[0].sentence


def test_what_jax_compiles_is_no_hang() -> None:
    watch = Watch(Table(), Place("test", "a:1", 2, 0), stall=20)
    watch.entered()
    assert watch.own.patience == 20
    watch.compiles("/jax/core/compile/jaxpr_to_mlir_module_duration", 0.1)
    assert (watch.own.doing, watch.own.patience) == ("compiling", 0)
    watch.compiles("/jax/core/compile/backend_compile_duration", 0.1, fun_name="step")
    assert (watch.own.doing, watch.own.patience) == ("in a step", 20)


def test_a_process_that_waits_for_the_others_says_so_once(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    """A script that returned before the others did waited for minutes, and nothing was said."""
    run.go(3, each=run.step)
    run.watches[1].own.ended = True
    run.go(5)
    assert not capfd.readouterr().err
    run.go(60)
    assert capfd.readouterr().err == "jaxpar: rank 1 has come to its end, after step 3, and waits for the others\n"
    assert not run.left
