"""`experiments/async_compare.py`, small: processes, one slow, one killed by kill -9; table, record, picture."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = "--workers 2 --steps 6 --rows 2 --length 16 --staleness 0 2 --pause 0.2"
PATIENCE = 3600  # seconds of the whole, which takes two minutes on two cores


@pytest.mark.battery
def test_the_experiment(tmp_path: Path) -> None:
    script = ROOT / "experiments" / "async_compare.py"
    # Its workers run programs of one device, which may come from the cache that the tests otherwise do without.
    run = subprocess.Popen(
        [sys.executable, str(script), "--out", str(tmp_path), *SMALL.split()],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "1"},
    )  # fmt: skip
    try:
        said, errors = run.communicate(timeout=PATIENCE)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)  # with its workers
    assert run.returncode == 0, errors[-3000:]
    assert max(map(len, said.splitlines())) <= 80
    assert {path.name for path in tmp_path.iterdir()} == {"async.json", "async.svg", "async.png", "cache"}
    trials = {(t["case"], t["name"]): t for t in json.loads((tmp_path / "async.json").read_text())["trials"]}
    for case in ("equal", "slow"):  # in step it is ddp, step by step, processes and all
        ddp, in_step = trials[case, "ddp"], trials[case, "staleness 0"]
        means = [sum(in_step["losses"][i : i + 2]) / 2 for i in range(0, 12, 2)]
        assert means == pytest.approx(ddp["losses"], rel=1e-4)
        assert in_step["held_out"] == pytest.approx(ddp["held_out"], rel=1e-4)
        assert set(in_step["staleness"]) == {0}
        assert max(trials[case, "staleness 2"]["staleness"]) <= 2 * 2 + 1
    assert len(trials["equal", "one by one"]["losses"]) == 12
    for name in ("staleness 0", "staleness 2"):
        killed = trials["killed", name]
        assert "no sign of it" in killed["lost"]["1"]
        assert killed["workers"][-1] == 0  # the other went on
        assert killed["seconds"][-1] > killed["killed"]
