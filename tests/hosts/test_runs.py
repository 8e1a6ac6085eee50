"""Runs of several processes on this machine: one is killed, stopped, stuck or different, and all end with a sentence.

They are started by `jaxpar launch`, as a user does, each on one or two simulated devices.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port
from workers import started

MODEL = """
import os, sys, time
from pathlib import Path
import jaxpar as jp
place = jp.initialize()
import jax, jax.numpy as jnp, numpy as np, optax
init = lambda key: {"w": jax.random.normal(key, (8, 8))}
model = jp.Model(init, lambda params, batch, key: ((batch["x"] @ params["w"]) ** 2).mean())
"""
LOOP = """
fault, rank, at = os.environ.get("FAULT", "none:0:0").split(":")
rate = 0.2 if fault == "rate" and int(rank) == place.process else 0.1
step = jp.make_train_step(model, optax.sgd(rate), "ddp")
state = step.init(jax.random.key(0))
for i in range(6):
    if (int(rank), int(at)) == (place.process, i):
        if fault in ("KILL", "STOP"):
            time.sleep(1)  # so that the others have heard of the last step
            os.kill(os.getpid(), {"KILL": 9, "STOP": 19}[fault])
        if fault == "sleep": time.sleep(10_000)
        if fault == "raise": raise RuntimeError("no such row")
    wide = fault == "shape" and (int(rank), int(at)) == (place.process, i)
    state, metrics = step(state, {"x": np.full((16 if wide else 8, 8), i, np.float32)})
    print("step", i + 1, float(metrics["loss"]))
"""


QUICK = {"JAXPAR_WATCHDOG": "12"}  # for the tests that wait for it


def launch(code: str, *words: str, options: str = "--processes 2 --devices 1", **env: str) -> tuple[int, str]:
    """Launch `MODEL` and the code; return the exit status and the output."""
    command = [sys.executable, "-m", "jaxpar", "launch", *options.split(), "--", "-c", MODEL + code, *words]
    environment = {**os.environ, "JAXPAR_WATCHDOG": "60", **env}  # on a busy machine threads are late
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    return run.returncode, run.stdout + run.stderr


LAST = f"""{LOOP}
if place.process == int(os.environ["WHO"]):
    os.kill(os.getpid(), 15)
    time.sleep(3)  # until jax's thread has seen it
"""


@pytest.mark.slow
@pytest.mark.parametrize("who", [pytest.param("0", marks=pytest.mark.battery), "1"])
def test_a_signal_after_the_last_step_keeps_no_process(who: str) -> None:
    """jax asked a process for its step that had left, and waited a quarter of an hour."""
    status, output = launch(LAST, WHO=who)
    assert status == 0, output
    assert output.count("step 6 ") == 2
    assert "[Gloo]" not in output  # which stood between the steps


@pytest.mark.slow
def test_the_death_of_process_0_is_told_by_the_others() -> None:
    """jax's client ends a process by an abort, without a word, once its coordinator closes the connection."""
    status, output = launch(LOOP, FAULT="KILL:0:3")
    assert status == 137, output
    assert "[0] jaxpar: 2 processes (environment); process 0 listens on 127.0.0.1:" in output
    (sentence,) = [line for line in output.splitlines() if "is lost" in line]
    assert sentence.startswith("[1] jaxpar: rank 0 on ")
    # As of its last beat, a second before at most: on a quick machine that was before the first step.
    assert re.search(r"it (last reported step [0-3] finished|had not begun a step)\b", sentence)
    # It is heard of by the closed connection, by its process's end, or by a collective that breaks off.
    assert sentence.endswith(("ends with it.", "which ends too."))
    assert "rank 0 was ended by SIGKILL; the run ends with status 137" in output


@pytest.mark.battery
@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        ("STOP:0:3", 75, "is lost: "),
        ("sleep:1:3", 75, "is stuck: it last reported step 3 finished"),
        ("sleep:0:3", 75, "is stuck: it last reported step 3 finished"),
        ("raise:1:3", 1, "failed: RuntimeError: no such row"),
        ("raise:0:0", 1, "failed: RuntimeError: no such row"),
        ("shape:1:3", 1, "rank 0 will not compare the batch to train with the others: it last reported step "),
        ("shape:1:0", 1, "the processes differ in the batch to train: its shape is ['x'] float32[8, 8] on rank 0 on "),
        ("rate:1:0", 1, "the processes differ in the step: the program is '"),
    ],
)
def test_faults(fault: str, status: int, message: str) -> None:
    exit_status, output = launch(LOOP, FAULT=fault, **QUICK)
    assert exit_status == status, output
    assert f"rank {fault.split(':')[1]} on " in output, output
    assert message in output, output


WAYS = """
import signal
def leave():
    match os.environ["WAY"]:
        case "sys.exit": sys.exit(7)
        case "raise": raise SystemExit(7)
        case "text": sys.exit("no such file")
        case "os._exit": os._exit(7)
        case "well": os._exit(0)
        case "kill": os.kill(os.getpid(), signal.SIGKILL)
        case "interrupt": os.kill(os.getpid(), signal.SIGINT)
        case "error": raise RuntimeError("no such row")
if place.process == int(os.environ["WHO"]): leave()
jax.numpy.zeros(1)
time.sleep(1000)
"""
LEFT = "failed: it left with exit status "
GONE = "is lost: its process is gone"


@pytest.mark.parametrize(
    ("way", "who", "hosts", "status", "message"),
    [
        pytest.param("sys.exit", 1, 1, 7, LEFT + "7 (it had not begun a step)", marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.battery)
            for case in [
                ("raise", 0, 1, 7, LEFT + "7 "),
                ("sys.exit", 1, 2, 7, LEFT + "7 "),
                ("text", 1, 1, 1, LEFT + "1, no such file"),
                ("os._exit", 1, 1, 7, GONE),
                ("os._exit", 1, 2, 7, GONE),
                ("well", 1, 1, 75, "rank 1 ended with exit status 0 before the others"),
                ("well", 0, 1, 75, "rank 0 ended with exit status 0 before the others"),
                ("kill", 1, 2, 137, GONE),
                ("kill", 0, 1, 137, " lost: "),
                ("interrupt", 1, 1, 130, "failed: KeyboardInterrupt"),
                ("error", 1, 2, 1, "failed: RuntimeError: no such row"),
            ]
        ),
    ],
)
def test_a_process_that_leaves_early_is_noticed(way: str, who: int, hosts: int, status: int, message: str) -> None:
    """One that left by `sys.exit` was taken for one that is done, and the others waited for two minutes and more."""
    command = [sys.executable, "-m", "jaxpar", "launch", "--processes", str(2 // hosts), "--devices", "1"]
    environments = [{**os.environ, **QUICK, "WAY": way, "WHO": str(who)} for _ in range(hosts)]
    run = {"JAXPAR_COORDINATOR": f"127.0.0.1:{free_port()}", "JAXPAR_PROCESSES": "2"}
    for host, environment in enumerate(environments if hosts == 2 else []):
        environment |= {**run, "JAXPAR_PROCESS": str(host)}
    with started([[*command, "--", "-c", MODEL + WAYS]] * hosts, environments, stderr=subprocess.STDOUT) as launchers:
        outputs = [launcher.communicate(timeout=900)[0] for launcher in launchers]  # before the 1000 s of a sleep
    assert launchers[who if hosts == 2 else 0].returncode == status, outputs
    assert message in "".join(outputs), outputs
    assert "xla::" not in "".join(outputs)  # a sentence replaces the stack


# -- all stuck at one point --------------------------------------------------------------------------------------------

TRAINER = """
def data(start):
    for i in range(start, 1000):
        if os.environ["FAULT"] == "data" and i == 12: time.sleep(10_000)
        yield {"x": np.full((8, 8), i, np.float32)}
def wait(x):
    if os.environ["FAULT"] == "step" and np.asarray(x)[0, 0] == 12: time.sleep(10_000)
    return x
def loss(params, batch, key):
    x = jax.pure_callback(wait, jax.ShapeDtypeStruct(batch["x"].shape, jnp.float32), batch["x"])
    return ((x @ params["w"]) ** 2).mean()
jp.Trainer(jp.Model(init, loss), optax.sgd(0.1), data, "ddp", jp.Loop(steps=20, quiet=True)).run()
"""


@pytest.mark.battery
@pytest.mark.parametrize(("fault", "doing"), [("data", "reading a batch"), ("step", "training")])
def test_all_processes_that_hang_at_one_point_end(fault: str, doing: str) -> None:
    """In their data, or each in the same step, whose collective none ends: it looked like a long compilation."""
    status, output = launch(TRAINER, FAULT=fault, JAXPAR_STALL="8", **QUICK)
    assert status == 75, output
    assert "all 2 processes are stuck: for " in output
    assert f" is {doing}, which took " in output


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.battery
def test_processes_that_are_all_stopped_go_on_later() -> None:
    """As under a scheduler that suspends jobs: each ended, without a sentence, once it was continued."""
    code = MODEL + LOOP.replace("range(6)", "range(10**6)") + '    i % 100 or print("PID", os.getpid(), i)'
    command = [sys.executable, "-m", "jaxpar", "launch", "--processes", "2", "--devices", "1", "--", "-uc", code]
    pids: set[int] = set()
    with started([command], [os.environ | QUICK], stderr=subprocess.STDOUT) as (run,), contextlib.ExitStack() as stack:
        assert run.stdout is not None
        lines = (line.split("] PID ")[1].split() for line in run.stdout if "] PID " in line)
        while len(pids) < 2:
            pids.add(int(next(lines)[0]))
        for pid in pids:
            stack.callback(kill, pid)
        for sign, pause in ((signal.SIGSTOP, 16), (signal.SIGCONT, 0)):
            for pid in pids:
                os.kill(pid, sign)
            time.sleep(pause)
        until = time.monotonic() + 15
        assert any(time.monotonic() > until for _ in lines)  # which end with the run


# -- restarts ----------------------------------------------------------------------------------------------------------

RESTARTED = """
def data(start):
    for i in range(start, 1000):
        yield {"x": np.random.default_rng(i).normal(size=(12, 8)).astype("float32")}
def fall(trainer, metrics):
    if sys.argv[2] == "fall" and os.environ["JAXPAR_RESTART"] == "0" and place.process == 2 and metrics["step"] == 14:
        os.kill(os.getpid(), 9)
loop = jp.Loop(steps=20, out=Path(sys.argv[1]), save_every=5, quiet=True)
jp.Trainer(model, optax.adam(0.05), data, "ddp", loop, hooks=[jp.Hook(on_step=fall)]).run()
"""


def losses(out: Path) -> list[float]:
    """Return the losses of all steps; the last one of a step that was taken twice."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    loss_by_step = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert [*loss_by_step] == [*range(1, 21)]
    return [*loss_by_step.values()]


@pytest.mark.battery
@pytest.mark.parametrize("least", [4, 3])
def test_a_killed_process_costs_a_restart_and_the_curve_joins(tmp_path: Path, least: int) -> None:
    options = f"--processes 4 --devices 1 --restarts 1 --least {least}"
    status, output = launch(RESTARTED, str(tmp_path / "broken"), "fall", options=options)
    assert status == 0, output
    assert f"rank 2 was ended by SIGKILL; started again with {least} processes, restart 1 of 1" in output
    status, output = launch(RESTARTED, str(tmp_path / "whole"), "go", options=options)
    assert status == 0, output
    assert losses(tmp_path / "broken") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


# -- two hosts as network namespaces -----------------------------------------------------------------------------------


def ip(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces with a wire between them; skipped where they are not allowed."""
    names = [f"jaxpar{os.getpid()}{x}" for x in "ab"]
    try:
        results = [ip("netns", "add", name) for name in names]
    except FileNotFoundError:
        pytest.skip("network namespaces: there is no command ip (iproute2)")
    try:
        a, b = (f"v{os.getpid()}{x}" for x in "ab")
        results.append(ip("link", "add", a, "netns", names[0], "type", "veth", "peer", "name", b, "netns", names[1]))
        for name, end, address in zip(names, (a, b), ("10.77.0.1/24", "10.77.0.2/24"), strict=True):
            results += [ip("-n", name, "addr", "add", address, "dev", end)]
            results += [ip("-n", name, "link", "set", link, "up") for link in (end, "lo")]
        if errors := [result.stderr.strip() for result in results if result.returncode]:
            pytest.skip(f"network namespaces: {errors[0]}")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


ENDLESS = """
data = lambda start: iter(lambda: {"x": np.ones((8, 8), np.float32)}, None)
hook = jp.Hook(on_step=lambda _, metrics: metrics["step"] == 20 and print("TWENTY", flush=True))
jp.Trainer(model, optax.sgd(1e-5), data, "ddp", jp.Loop(steps=10**6, quiet=True), hooks=[hook]).run()
"""


@pytest.mark.battery
def test_a_link_that_goes_down_ends_both_hosts(hosts: list[str]) -> None:
    """Nothing is closed: packets are lost, and a collective would wait for them for ever."""
    run = {"JAXPAR_WATCHDOG": "30", "JAXPAR_COORDINATOR": "10.77.0.1:12345", "JAXPAR_PROCESSES": "2"}
    run["JAXPAR_DEVICES"] = "1"
    commands = [["ip", "netns", "exec", host, sys.executable, "-c", MODEL + ENDLESS] for host in hosts]
    environments = [{**os.environ, **run, "JAXPAR_PROCESS": str(rank)} for rank in range(2)]
    with started(commands, environments, stderr=subprocess.STDOUT) as workers:
        for worker in workers:
            assert worker.stdout is not None
            assert any("TWENTY" in line for line in worker.stdout)
        ip("-n", hosts[0], "link", "set", f"v{os.getpid()}a", "down")
        outputs = [worker.communicate(timeout=1800)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [75, 75], outputs
    assert "rank 0 on " in outputs[1]
    assert "is lost: " in outputs[1]
