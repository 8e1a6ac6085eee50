"""`jaxpar launch`, with scripts of Python alone, which start at once."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from test_environment import SLURM

from jaxpar.hosts import launch
from jaxpar.hosts.launch import LaunchOptions

PRINT = "import os; print(*(os.environ[f'JAXPAR_{x}'] for x in ('PROCESS', 'PROCESSES', 'DEVICES', 'RESTART')))"


def test_every_process_has_its_place(capfd: pytest.CaptureFixture) -> None:
    assert launch.launch(LaunchOptions(processes=3, devices=2), ["-c", PRINT]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 0 3 2 0", "[1] 1 3 2 0", "[2] 2 3 2 0"]


def test_a_failure_ends_all(tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ended with 75, because of another one, is no reason; one that does not end is killed."""
    monkeypatch.setattr(launch, "_GRACE", 0.5)
    script = f"""
import os, pathlib, sys, time
rank, first = int(os.environ["JAXPAR_PROCESS"]), pathlib.Path({str(tmp_path)!r})
if rank == 1:
    (first / str(os.getpid())).touch()
    sys.exit(3)
while True:
    time.sleep(0.01)
    for path in first.iterdir() if rank == 0 else ():
        try:
            os.kill(int(path.name), 0)
        except ProcessLookupError:
            sys.exit(75)  # the launcher has seen the end of rank 1
"""
    assert launch.launch(LaunchOptions(processes=3), ["-c", script]) == 3
    assert "rank 1 failed with exit status 3; the run ends with status 3" in capfd.readouterr().err
    killed = "import os; os.kill(os.getpid(), 9)"
    assert launch.launch(LaunchOptions(processes=1), ["-c", killed]) == 137
    assert "rank 0 was ended by SIGKILL" in capfd.readouterr().err


def test_a_process_that_ends_early_is_named(capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that left by `os._exit(0)` was not named, and the run ended with the 75 of the others."""
    monkeypatch.setattr(launch, "_ALONE", 0.2)
    script = "import os, sys, time; rank = int(os.environ['JAXPAR_PROCESS'])\nif rank == 1: os._exit({0})\n"
    assert launch.launch(LaunchOptions(processes=2), ["-c", script.format(0) + "time.sleep(3); sys.exit(75)"]) == 75
    stderr = capfd.readouterr().err
    assert "rank 1 has ended with exit status 0, and 1 of 2 processes go on" in stderr
    assert "ended with exit status 0 before the others, rank 0 failed with exit status 75; the run ends" in stderr
    assert launch.launch(LaunchOptions(processes=2), ["-c", script.format(7) + "time.sleep(1); sys.exit(75)"]) == 7
    stderr = capfd.readouterr().err
    assert "rank 1 failed with exit status 7; 1 of 2 processes have 20 s to end" in stderr
    assert "rank 1 failed with exit status 7; the run ends with status 7" in stderr


COORDINATION = """E1128 18:22:04.611674 11683 coordination_service_agent.cc:289] Polled an error from the service.
F1128 18:22:04.611928 11683 client.h:80] Terminating process because the JAX distributed service detected fatal \
errors. See the other logs. absl::Status: {error}
Additional GRPC error information from remote target coordination_service while calling /xla.coordination:
:UNKNOWN:Error received from peer  {{grpc_message:"Socket closed", grpc_status:14}}
*** Check failure stack trace: ***
    @     0x7f47ddf040ee  xla::CoordinationServiceAgent::SetError()
    @     0x7f47e94a71f5  (unknown)
"""


@pytest.mark.parametrize(
    ("error", "advice"),
    [("ABORTED: 1 unexpectedly tried to connect.", True), ("UNAVAILABLE: Failed to send RPC. Check earlier", False)],
)
def test_a_sentence_stands_for_xlas_stack(error: str, advice: bool, capfd: pytest.CaptureFixture) -> None:
    """Another program that spoke to JAX's coordinator ended both processes, with 40 lines of XLA's and no reason."""
    # A traceback of another thread may stand before the stack.
    before_stack, stack = COORDINATION.format(error=error).split("***", 1)
    text = before_stack + "of the script\n    at its line 3\n***" + stack + "and its end\n"
    script = f"import faulthandler, os; faulthandler.disable(); os.write(2, {text!r}.encode()); os.abort()"
    assert launch.launch(LaunchOptions(processes=1), ["-c", script]) == 134
    *lines, last = capfd.readouterr().err.splitlines()
    assert lines == ["[0] of the script", "[0]     at its line 3", "[0] and its end"]
    assert "rank 0 was ended by SIGABRT; JAX's coordinator at 127.0.0.1:" in last
    assert f" had ended it: {error.rstrip('.')}." in last
    assert ("It asks nobody for a password: see that nothing else speaks to 127.0.0.1:" in last) == advice


GLOO = "[Gloo] Rank {0} is connected to 3 peer ranks. Expected number of connected peer ranks is : 3"


@pytest.mark.parametrize(
    "lines",
    [
        [GLOO.format(1)],
        ["[Gloo] Rank [Gloo] Rank 2 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3",
         "3 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3"],
        [GLOO.format(1) + GLOO.format(2), ""],
        [GLOO.format(1)[:-1] + GLOO.format(2)[:-1] + "33", ""],
        [GLOO.format(1)[:-1] + GLOO.format(2), "3"],
        ["[Gloo] Rank 2" + GLOO.format(1),
         " is connected to 3 peer ranks. Expected number of connected peer ranks is : 3"],
    ],
)  # fmt: skip
def test_lines_that_several_devices_mixed_are_left_out(lines: list[str], capfd: pytest.CaptureFixture) -> None:
    """Gloo writes a line in pieces, and each device its own: `[Gloo] Rank [Gloo] Rank 2 is ...` was shown."""
    script_lines = ["3", "", "[Gloo] timed out", "3 is connected to nothing", "step 1"]
    text = "".join(line + "\n" for line in [*script_lines, *lines, *script_lines])
    assert launch.launch(LaunchOptions(processes=1), ["-c", f"print({text!r}, end='')"]) == 0
    assert capfd.readouterr().out.splitlines() == 2 * [f"[0] {line}" for line in script_lines]


def test_restarts_with_fewer_processes(capfd: pytest.CaptureFixture) -> None:
    """Four fail at first; three do not divide the rows, which is status 2; two do."""
    script = """
import os, sys
rank, count, again = (int(os.environ["JAXPAR_" + x]) for x in ("PROCESS", "PROCESSES", "RESTART"))
if count == 4: os.kill(os.getpid(), 9) if rank == 2 else sys.exit(1 if rank else 75)
if count == 3: sys.exit(2)
print("trained", again)
"""
    assert launch.launch(LaunchOptions(processes=4, restarts=1, least=2), ["-c", script]) == 0
    stdout, stderr = capfd.readouterr()
    assert sorted(stdout.splitlines()) == ["[0] trained 1", "[1] trained 1"]
    assert "rank 2 was ended by SIGKILL" in stderr
    assert "started again with 3 processes, restart 1 of 1" in stderr
    assert "the run is tried with 2 processes" in stderr
    assert launch.launch(LaunchOptions(processes=2, restarts=1), ["-c", "raise SystemExit(4)"]) == 4
    assert "after 1 restarts the run ends with status 4" in capfd.readouterr().err
    status = launch.launch(LaunchOptions(processes=1, restarts=5), ["-c", "raise SystemExit(2)"])
    assert status == 2  # as it would again


def test_signals_are_passed_on(tmp_path: Path) -> None:
    script = "import signal, sys, time, pathlib; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); " \
             f"pathlib.Path(r'{tmp_path}', str(time.time_ns())).touch(); time.sleep(1000)"  # fmt: skip

    def send_signal() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send_signal, daemon=True)
    sender.start()
    assert launch.launch(LaunchOptions(processes=2, restarts=3), ["-c", script]) == 143  # and is not started again
    sender.join()


def test_gpus_are_shared() -> None:
    base = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert [launch.share_of_gpus(base, rank, 2) for rank in range(2)] == ["4,5", "6,7"]
    assert launch.share_of_gpus({**base, "JAX_PLATFORMS": "cpu"}, 0, 3) == ""
    with pytest.raises(ValueError, match=r"4 GPUs cannot be shared equally among 3 processes"):
        launch.share_of_gpus(base, 0, 3)


def test_a_process_for_each_gpu(capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the default, because a process that drives several GPUs can hang."""
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    names = ("JAXPAR_PROCESS", "JAXPAR_PROCESSES", "CUDA_VISIBLE_DEVICES")
    script = f"import os; print(*(os.environ[x] for x in {names}))"
    assert launch.launch(LaunchOptions(), ["-c", script]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 0 2 3", "[1] 1 2 5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match="a process for each GPU, and found none; give their number"):
        launch.launch(LaunchOptions(), ["-c", script])


def test_launchers_of_two_hosts_are_one_run(capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods and ssh start launchers so. Each launcher began a separate run on loopback."""
    run = {"JAXPAR_COORDINATOR": "node1:12345", "JAXPAR_PROCESSES": "2", "JAXPAR_PROCESS": "1"}
    for name, value in run.items():
        monkeypatch.setenv(name, value)
    script = "import os; print(os.environ['JAXPAR_COORDINATOR'])\n" + PRINT
    assert launch.launch(LaunchOptions(processes=2, devices=1), ["-c", script]) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == ["[2] 2 4 1 0", "[2] node1:12345", "[3] 3 4 1 0", "[3] node1:12345"]
    assert launch.launch(LaunchOptions(processes=1, devices=1), ["-c", "raise SystemExit(3)"]) == 3
    assert "rank 1 failed with exit status 3" in capfd.readouterr().err
    with pytest.raises(ValueError, match=r"restarts=1 is for one host, and this is one of 2 \(environment\)"):
        launch.launch(LaunchOptions(processes=2, devices=1, restarts=1), ["-c", script])
    for name in run:
        monkeypatch.delenv(name)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="SLURM starts 8 processes on each host, and each would start more; leave"):
        launch.launch(LaunchOptions(processes=2, devices=1), ["-c", script])


def test_options() -> None:
    with pytest.raises(ValueError, match=r"launch needs a script behind --"):
        launch.launch(LaunchOptions(processes=2), [])
    for options, says in (
        ({"processes": 0}, "processes=0 is too small; use 1 or more"),
        ({"processes": 2, "least": 3}, "least=3 is more than processes=2"),
        ({"least": 1}, "least=1 needs processes="),
    ):
        with pytest.raises(ValueError, match=says):
            LaunchOptions(**options)
