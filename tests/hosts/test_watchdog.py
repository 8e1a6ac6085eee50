"""The watchdog, on the test's own table and clock: which process is lost, stuck or has failed, and what it says."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from workers import Table

from jaxpar.hosts import watchdog
from jaxpar.hosts.environment import Place
from jaxpar.hosts.judge import Beat, Verdict
from jaxpar.hosts.watchdog import Watch


class Run:
    """Three processes on three hosts, in simulated seconds.

    Attributes:
      now: the clock of all.
      verdicts: rank -> the verdict that ended it.
    """

    def __init__(self) -> None:
        self.now, self.table, self.verdicts = 0.0, Table(), dict[int, Verdict]()
        on_verdict = lambda watch, verdict: self.verdicts.setdefault(watch.place.process, verdict)
        self.watches = [
            Watch(self.table, Place("test", "a:1", 3, rank), 60, on_verdict, lambda: self.now) for rank in range(3)
        ]
        for rank, watch in enumerate(self.watches):
            watch.beat = Beat(host=f"node{rank}", pid=40 + rank)  # without a machine: these pids are not looked up

    def advance(
        self, seconds: float, silent: tuple[int, ...] = (), every_second: Callable[[], None] = lambda: None
    ) -> None:
        """Let time pass, in which some processes are silent."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1
            every_second()
            for rank, watch in enumerate(self.watches):
                if rank not in silent:
                    try:
                        watch.exchange()
                    except RuntimeError as error:
                        watch._coordinator_error = str(error)
            for rank, watch in enumerate(self.watches):
                if rank not in silent and rank not in self.verdicts:
                    watch.check()

    def step(self, *ranks: int) -> None:
        for rank in ranks or range(3):
            self.watches[rank].begin_step()
            self.watches[rank].end_step()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(watchdog, "_SPREAD_TIME", 0.0)
    return Run()


def test_nobody_ends_a_run_that_goes_well_or_compiles_for_long(run: Run) -> None:
    run.advance(200)  # before step 1, and then in it
    for watch in run.watches[1:]:
        watch.begin_step()
    run.advance(200)
    run.watches[0].begin_step()
    for watch in run.watches:
        watch.end_step()
    run.advance(50, every_second=run.step)
    run.advance(200)  # an evaluation, a checkpoint
    assert not run.verdicts


def test_a_lost_process_ends_all_within_the_limit(run: Run) -> None:
    """jax's own watch takes 100 s, and 320 s at the end of a run."""
    run.advance(5, every_second=run.step)
    begin = run.now
    run.watches[1].begin_step()
    run.advance(60, silent=(1,))
    assert [*run.verdicts] == [0, 2]
    assert run.now - begin == 60
    (sentence,) = {verdict.sentence for verdict in run.verdicts.values()}
    assert sentence.startswith("rank 1 on node1 (pid 41) is lost: nothing was heard of it for 3")
    assert sentence.endswith("it last reported step 5 finished")  # it had said so, before step 6
    run.advance(2)  # stopped, and continued: it hears what the others have decided
    assert run.verdicts[1] == run.verdicts[0]


@pytest.mark.parametrize(
    ("is_broken", "says"),
    [
        (False, "rank 0 on node0 (pid 40) is lost: nothing was heard of it"),
        (
            True,
            "its coordinator has not answered for 37 s: UNAVAILABLE: Socket closed; it last reported step 5 finished",
        ),
    ],
)
def test_a_lost_process_0_is_judged_by_each(run: Run, is_broken: bool, says: str) -> None:
    run.advance(5, every_second=run.step)
    run.table.is_broken = is_broken
    run.advance(50, silent=(0,))
    assert [*run.verdicts] == [1, 2]
    assert all(says in verdict.sentence for verdict in run.verdicts.values())


@pytest.mark.parametrize("slow", [0, 2])
def test_a_stuck_process_is_who_others_wait_for(run: Run, slow: int) -> None:
    run.advance(5, every_second=run.step)
    run.advance(100)
    for rank in {0, 1, 2} - {slow}:
        run.watches[rank].begin_step()
    run.advance(60)
    assert [*run.verdicts] == [0, 1, 2]
    assert all(verdict.stacks for verdict in run.verdicts.values())
    (sentence,) = {verdict.sentence for verdict in run.verdicts.values()}
    says = "is stuck: it last reported step 5 finished, and stayed there 37 s while others are in step 6"
    assert sentence == f"rank {slow} on node{slow} (pid {40 + slow}) {says}"


def test_who_was_behind_when_all_were_stopped_is_given_time(run: Run) -> None:
    """A scheduler stops all processes of a job, and lets them go on hours later."""
    run.advance(5, every_second=run.step)
    run.watches[0].begin_step()
    run.watches[1].begin_step()
    run.advance(20)
    run.now += 10_000
    run.advance(20)
    assert not run.verdicts
    run.advance(40)
    assert "rank 2 on node2 (pid 42) is stuck" in run.verdicts[0].sentence


def test_a_slow_process_that_moves_is_not_stuck(run: Run) -> None:
    run.step()
    for _ in range(5):
        run.step(0, 1)
        run.advance(30)
        run.step(2)
    assert not run.verdicts


def test_fewer_steps_than_others(run: Run) -> None:
    """With other --steps, the others waited for 150 s and more, and ended by an abort."""
    run.advance(5, every_second=run.step)
    run.watches[2].beat.has_ended = True
    run.step(0, 1)
    run.advance(60)
    expected = "(pid 42) ended, and last reported step 5 finished, while others are past step 6; give every process"
    assert expected in run.verdicts[0].sentence
    assert not run.verdicts[1].stacks


def test_a_failure_is_told_to_all(run: Run) -> None:
    run.advance(3, every_second=run.step)
    run.watches[2].beat.failure = "ValueError: no such row"
    run.advance(3)
    expected = "rank 2 on node2 (pid 42) failed: ValueError: no such row (it last reported step 3 finished)"
    assert run.verdicts[1].sentence == json.loads(run.table["verdict"])[0] == expected


def test_a_collective_that_broke_off_is_not_the_reason(run: Run) -> None:
    """Where a process is killed, the others' collectives fail, seconds before anything is known of it."""
    run.advance(3, every_second=run.step)
    run.watches[0].beat.failure = "JaxRuntimeError: Gloo: connection closed by peer"
    run.watches[0].beat.may_follow = True
    run.advance(60, silent=(1,))
    assert "rank 1 on node1 (pid 41) is lost" in run.verdicts[2].sentence
    alone = Run()
    alone.watches[2].beat.failure, alone.watches[2].beat.may_follow = "JaxRuntimeError: out of memory", True
    alone.advance(60)
    assert alone.verdicts[0].sentence.startswith("rank 2 on node2 (pid 42) failed: JaxRuntimeError: out of memory")


def test_a_process_that_is_gone_from_this_machine_is_seen_at_once(run: Run) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    run.watches[1].beat = Beat.first()
    run.watches[1].beat.pid = process.pid
    run.advance(2)
    assert f"(pid {process.pid}) is lost: its process is gone; it had not begun a step" in run.verdicts[0].sentence


def test_a_resumed_run_counts_from_its_checkpoint(run: Run) -> None:
    for watch in run.watches:
        watch.begin_run(100)
    run.advance(200)  # it compiles
    assert not run.verdicts
    run.step()
    assert run.watches[0].beat.progress_text == "last reported step 101 finished"
    assert Beat.from_json(run.watches[0].beat.to_json()) == run.watches[0].beat


def test_stacks_are_written_beside_the_run(run: Run, tmp_path: Path) -> None:
    run.watches[1].stack_folder = tmp_path
    sentence = watchdog.write_stacks(run.watches[1])
    assert sentence == f"where the threads of this process were is in {tmp_path}/stacks-rank-1.txt"
    assert "test_stacks_are_written_beside_the_run" in (tmp_path / "stacks-rank-1.txt").read_text()


def test_a_launcher_that_is_gone_leaves_nobody_behind(run: Run) -> None:
    run.watches[0].launcher_pid = run.watches[1].launcher_pid = 1
    run.advance(2)
    assert run.verdicts[0].sentence == "jaxpar launch, which had started rank 0 on node0 (pid 40), is gone"
    assert 1 in run.verdicts


def test_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watchdog.limit_seconds() == 60
    assert watchdog.limit_seconds(0) == 0
    monkeypatch.setenv("JAXPAR_WATCHDOG", "20")
    assert watchdog.limit_seconds() == 20
    with pytest.raises(ValueError, match=r"a watchdog of 2 s is too quick"):
        watchdog.limit_seconds(2)
    monkeypatch.setenv("JAXPAR_WATCHDOG", "soon")
    with pytest.raises(ValueError, match="JAXPAR_WATCHDOG='soon' is not a number of seconds"):
        watchdog.limit_seconds()


def test_all_that_train_far_longer_than_before_are_stuck(run: Run) -> None:
    """Whoever hung in one collective with all others was taken for one that compiles, and waited for ever."""
    for watch in run.watches:
        watch.waits_for_steps = True
    for _ in range(10):
        run.step()
        run.advance(2)
        for watch in run.watches:
            watch.begin_activity("reading a batch")
        run.advance(3)
    run.step()
    run.advance(30)
    assert not run.verdicts
    run.advance(30)
    assert [*run.verdicts] == [0, 1, 2]
    (sentence,) = {verdict.sentence for verdict in run.verdicts.values()}
    expected = (
        "all 3 processes are stuck: for 37 s none has begun anything else; rank 0 on node0 (pid 40) is training, "
        "which took 2.0 s at most before (it last reported step 11 finished); rank 1 on node1 (pid 41) is training"
    )
    assert sentence.startswith(expected)
    assert run.verdicts[0].stacks


@pytest.mark.parametrize(
    ("activity", "is_limited"),
    [("compiling", False), ("between steps", False), ("evaluating", True), ("reading a batch", True)],
)
def test_what_may_take_long_is_given_long(run: Run, activity: str, is_limited: bool) -> None:
    run.advance(5, every_second=run.step)
    for watch in run.watches:
        watch.begin_activity(activity)
    run.advance(150)
    run.watches[1].begin_activity(activity)  # one of them goes on
    run.advance(1700)
    assert not run.verdicts
    run.advance(200)
    assert bool(run.verdicts) == is_limited
    if is_limited:
        assert f"rank 2 on node2 (pid 42) is {activity}, which took 0.0 s at most before" in run.verdicts[0].sentence


def test_what_jax_compiles_is_no_hang() -> None:
    watch = Watch(Table(), Place("test", "a:1", 2, 0), stall=20)
    watch.begin_step()
    assert watch.beat.patience == 20
    watch.on_jax_event("/jax/core/compile/jaxpr_to_mlir_module_duration", 0.1)
    assert (watch.beat.activity, watch.beat.patience) == ("compiling", 0)
    watch.on_jax_event("/jax/core/compile/backend_compile_duration", 0.1, fun_name="step")
    assert (watch.beat.activity, watch.beat.patience) == ("in a step", 20)


def test_a_process_that_waits_for_the_others_says_so(run: Run, capfd: pytest.CaptureFixture) -> None:
    """A script that returned before the others did waited for minutes, and nothing was said; then once."""
    run.advance(3, every_second=run.step)
    run.watches[1].beat.has_ended = True
    run.advance(5)
    assert not capfd.readouterr().err
    run.advance(60)
    assert capfd.readouterr().err == (
        "jaxpar: rank 1 has come to its end, after step 3, and waits for rank 0 (between steps), 10 s so far\n"
    )
    run.watches[0].beat.has_ended = True
    run.watches[2].begin_activity("compiling")
    run.advance(25)
    says = "jaxpar: rank 0 has come to its end, after step 3, and waits for rank 2 (compiling)"
    assert capfd.readouterr().err == f"{says}, 10 s so far\n{says}, 20 s so far\n"
    assert not run.verdicts
