"""`jaxpar launch`, with scripts of Python alone, which start at once."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from jaxpar.hosts import launch
from jaxpar.hosts.launch import LaunchOptions

PRINT = "import os; print(*(os.environ[f'JAXPAR_{x}'] for x in ('PROCESS', 'PROCESSES', 'DEVICES', 'RESTART')))"


def test_every_process_has_its_place(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.launch(LaunchOptions(processes=3, devices=2), ["-c", PRINT]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 0 3 2 0", "[1] 1 3 2 0", "[2] 2 3 2 0"]


def test_the_first_failure_ends_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever ended for its sake, with 75, is no reason; and who does not end is ended."""
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


def test_restarts_with_fewer_processes(capfd: pytest.CaptureFixture[str]) -> None:
    """Four fail at first; three do not divide the rows, which is status 2; two do."""
    script = """
import os, sys
rank, count, again = (int(os.environ["JAXPAR_" + x]) for x in ("PROCESS", "PROCESSES", "RESTART"))
if count == 4: os.kill(os.getpid(), 9) if rank == 2 else sys.exit(1 if rank else 75)
if count == 3: sys.exit(2)
print("trained", again)
"""
    assert launch.launch(LaunchOptions(processes=4, restarts=1, least=2), ["-c", script]) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] trained 1", "[1] trained 1"]
    assert "rank 2 was ended by SIGKILL" in err
    assert "started again with 3 processes, restart 1 of 1" in err
    assert "2 processes are tried" in err
    assert launch.launch(LaunchOptions(processes=2, restarts=1), ["-c", "raise SystemExit(4)"]) == 4
    assert "after 1 restarts the run ends with status 4" in capfd.readouterr().err
    assert (
        launch.launch(LaunchOptions(processes=1, restarts=5), ["-c", "raise SystemExit(2)"]) == 2
    )  # as it would again


def test_signals_are_passed_on(tmp_path: Path) -> None:
    script = "import signal, sys, time, pathlib; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); " \
             f"pathlib.Path(r'{tmp_path}', str(time.time_ns())).touch(); time.sleep(1000)"  # fmt: skip

    def tell() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    assert launch.launch(LaunchOptions(processes=2, restarts=3), ["-c", script]) == 143  # and is not started again
    teller.join()


def test_gpus_are_shared() -> None:
    base = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert [launch.share_of_gpus(base, rank, 2) for rank in range(2)] == ["4,5", "6,7"]
    assert launch.share_of_gpus({**base, "JAX_PLATFORMS": "cpu"}, 0, 3) == ""
    with pytest.raises(ValueError, match=r"4 GPUs do not divide among 3 processes"):
        launch.share_of_gpus(base, 0, 3)


def test_options() -> None:
    with pytest.raises(ValueError, match=r"launch needs a script behind --"):
        launch.launch(LaunchOptions(processes=2), [])
    with pytest.raises(ValueError, match="processes=0 is too small; use 1 or more"):
        LaunchOptions(processes=0)
    with pytest.raises(ValueError, match="least=3 is more than processes=2"):
        LaunchOptions(processes=2, least=3)
