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
from typing import Any

import pytest
from ports import free_port

LOOP = """
import os, sys, time
import jaxpar as jp
place = jp.initialize()
import jax, numpy as np, optax
fault, rank, at = os.environ.get("FAULT", "none:0:0").split(":")
rate = 0.2 if fault == "rate" and int(rank) == place.process else 0.1
model = jp.Model(init=lambda key: {"w": jax.random.normal(key, (8, 8))},
                 loss=lambda params, batch, key: ((batch["x"] @ params["w"]) ** 2).mean())
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


def launch(*words: str, timeout: float = 1800, **env: str) -> tuple[int, str, float]:
    """Return the exit status, the output and the seconds of a run."""
    begin = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-m", "jaxpar", "launch", *words],
        env={**os.environ, "JAXPAR_WATCHDOG": "60", **env},  # on a busy machine threads are late
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    return run.returncode, run.stdout + run.stderr, time.monotonic() - begin


LAST = f"""{LOOP}
if place.process == int(os.environ["WHO"]):
    os.kill(os.getpid(), 15)
    time.sleep(3)  # until jax's thread has seen it
"""


@pytest.mark.slow
@pytest.mark.parametrize("who", [pytest.param("0", marks=pytest.mark.battery), "1"])
def test_a_signal_after_the_last_step_keeps_no_process(who: str) -> None:
    """jax asked a process for its step that had left, and waited a quarter of an hour."""
    status, output, _ = launch("--processes", "2", "--devices", "1", "--", "-c", LAST, WHO=who)
    assert status == 0, output
    assert output.count("step 6 ") == 2
    assert "[Gloo]" not in output  # which stood between the steps


@pytest.mark.slow
def test_the_death_of_process_0_is_told_by_the_others() -> None:
    """jax's client ends a process by an abort, without a word, once its coordinator closes the connection."""
    status, output, _ = launch("--processes", "2", "--devices", "1", "--", "-c", LOOP, FAULT="KILL:0:3")
    assert status == 137, output
    assert "[0] jaxpar: 2 processes (environment); process 0 listens on 127.0.0.1:" in output
    (sentence,) = [line for line in output.splitlines() if "is lost" in line]
    assert sentence.startswith("[1] jaxpar: rank 0 on ")
    # As of its last beat, a second before at most: on a quick machine that was before the first step.
    assert re.search(r"it (last finished step [0-3]|had not begun a step)\b", sentence)
    # It is heard of by the closed connection, by its process's end, or by a collective that breaks off.
    assert sentence.endswith(("ends with it.", "which ends too."))
    assert "rank 0 was ended by SIGKILL; the run ends with status 137" in output


@pytest.mark.battery
@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        ("KILL:1:3", 137, "is lost: its process is gone; it "),
        ("STOP:1:3", 75, "is lost: its process is stopped; it "),
        ("STOP:0:3", 75, "is lost: "),
        ("sleep:1:3", 75, "is stuck: it last finished step 3"),
        ("sleep:0:3", 75, "is stuck: it last finished step 3"),
        ("raise:1:3", 1, "failed: RuntimeError: no such row"),
        ("raise:0:0", 1, "failed: RuntimeError: no such row"),
        ("shape:1:3", 1, "rank 0 will not compare the batch to train with the others: it last finished step "),
        ("shape:1:0", 1, "the processes differ in the batch to train: its shape is ['x'] float32[8, 8] on rank 0 on "),
        ("rate:1:0", 1, "the processes differ in the step: the program is '"),
    ],
)
def test_faults(fault: str, status: int, message: str) -> None:
    exit_status, output, seconds = launch("--processes", "2", "--devices", "1", "--", "-c", LOOP, FAULT=fault, **QUICK)
    assert exit_status == status, output
    assert f"rank {fault.split(':')[1]} on " in output, output
    assert message in output, output
    assert seconds < 1500


WAYS = """
import os, signal, sys, time
import jaxpar as jp
place = jp.initialize()
import jax
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
def test_a_process_that_leaves_before_the_first_step_is_noticed_with_its_status(
    way: str, who: int, hosts: int, status: int, message: str
) -> None:
    """One that left by `sys.exit` was taken for one that is done, and the others waited for two minutes and more."""
    command = [sys.executable, "-m", "jaxpar", "launch", "--processes", str(2 // hosts), "--devices", "1"]
    env = {**os.environ, **QUICK, "WAY": way, "WHO": str(who)}
    run = {"JAXPAR_COORDINATOR": f"127.0.0.1:{free_port()}", "JAXPAR_PROCESSES": "2"} if hosts == 2 else {}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    launchers = [
        subprocess.Popen(
            [*command, "--", "-c", WAYS], env={**env, **run, **({"JAXPAR_PROCESS": str(n)} if run else {})}, **pipes
        )
        for n in range(hosts)
    ]
    try:
        outputs = [launcher.communicate(timeout=900)[0] for launcher in launchers]  # before the 1000 s of a sleep
    finally:
        for launcher in launchers:
            launcher.kill()
    assert launchers[who if hosts == 2 else 0].returncode == status, outputs
    assert message in "".join(outputs), outputs
    assert "xla::" not in "".join(outputs)  # a sentence replaces the stack


# -- all stuck at one point --------------------------------------------------------------------------------------------

TRAINER = """
import os, sys, time
import jaxpar as jp
jp.initialize()
import jax, jax.numpy as jnp, numpy as np, optax
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
model = jp.Model(init=lambda key: {"w": jax.random.normal(key, (8, 8))}, loss=loss)
jp.Trainer(model, optax.sgd(0.1), data, "ddp", jp.Loop(steps=20, quiet=True)).run()
"""


@pytest.mark.battery
@pytest.mark.parametrize(("fault", "doing"), [("data", "reading a batch"), ("step", "training")])
def test_all_processes_that_hang_at_one_point_end(fault: str, doing: str) -> None:
    """In their data, or each in the same step, whose collective none ends: it looked like a long compilation."""
    status, output, _ = launch(
        "--processes", "2", "--devices", "1", "--", "-c", TRAINER, FAULT=fault, JAXPAR_STALL="8", **QUICK
    )
    assert status == 75, output
    assert "all 2 processes are stuck: for " in output
    assert f" is {doing}, which took " in output


@pytest.mark.battery
def test_processes_that_are_all_stopped_go_on_later() -> None:
    """As under a scheduler that suspends jobs: each ended, without a sentence, once it was continued."""
    code = LOOP.replace("range(6)", "range(10**6)").replace(
        'print("step", i + 1', 'i % 100 or print("PID", os.getpid(), i); print("step", i + 1'
    )
    command = [sys.executable, "-m", "jaxpar", "launch", "--processes", "2", "--devices", "1", "--", "-uc", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.Popen(command, env={**os.environ, "JAXPAR_WATCHDOG": "12"}, **pipes)
    assert run.stdout is not None
    pids: set[int] = set()
    try:
        lines = (line.split("] PID ")[1].split() for line in run.stdout if "] PID " in line)
        while len(pids) < 2:
            pids.add(int(next(lines)[0]))
        for sign, pause in ((signal.SIGSTOP, 16), (signal.SIGCONT, 0)):
            for pid in pids:
                os.kill(pid, sign)
            time.sleep(pause)
        until = time.monotonic() + 15
        assert any(time.monotonic() > until for _ in lines)  # which end with the run
    finally:
        run.kill()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.communicate()


# -- unequal hosts -----------------------------------------------------------------------------------------------------

TRAIN = """
import os, sys
from jaxpar.run.cli.commands import main
words = "train --model mlp-tiny --strategy zero1 --steps 4 --quiet --out".split() + [sys.argv[1]]
main(words + (sys.argv[2:] if os.environ["JAXPAR_PROCESS"] == "1" else []))
"""


@pytest.mark.battery
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--seed 1", "the processes differ in the options: seed is 0 on rank 0 on "),
        ("--lr 0.1", "lr is 0.003 on rank 0"),
        ("--rows 32", "rows is 16 on rank 0"),
        ("--steps 5", "steps is 4 on rank 0"),
        ("--steps 0", "steps is 4 on rank 0"),
        ("--strategy fsdp", "strategy is zero1 on rank 0"),
        ("--model mlp-tiny,hidden=(32,)", "model is mlp-tiny on rank 0"),
        ("--data /nowhere", "failed: ValueError: there is no folder /nowhere"),
    ],
)
def test_unequal_hosts(tmp_path: Path, words: str, message: str) -> None:
    """Other --seed, --lr, --rows trained on with exit 0; other --steps and --strategy hung for 150 s and more."""
    command = ["--processes", "2", "--devices", "2", "--", "-c", TRAIN, str(tmp_path / "run"), *words.split()]
    status, output, _ = launch(*command)
    assert status == 2, output
    assert message in output


# -- restarts ----------------------------------------------------------------------------------------------------------

RESTARTED = """
import os, sys
from pathlib import Path
import jaxpar as jp
place = jp.initialize()
import jax, numpy as np, optax
def data(start):
    for i in range(start, 1000):
        x = np.random.default_rng(i).normal(size=(12, 8)).astype("float32")
        yield {"x": x, "y": x[:, :4] * 2}
def fall(trainer, metrics):
    if sys.argv[2] == "fall" and os.environ["JAXPAR_RESTART"] == "0" and place.process == 2 and metrics["step"] == 14:
        os.kill(os.getpid(), 9)
model = jp.Model(init=lambda key: {"w": jax.random.normal(key, (8, 4))},
                 loss=lambda params, batch, key: ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean())
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
    words = ["--processes", "4", "--devices", "1", "--restarts", "1", "--least", str(least), "--", "-c", RESTARTED]
    status, output, _ = launch(*words, str(tmp_path / "broken"), "fall")
    assert status == 0, output
    assert f"rank 2 was ended by SIGKILL; started again with {least} processes, restart 1 of 1" in output
    status, output, _ = launch(*words, str(tmp_path / "whole"), "go")
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


MODEL = """
import jax, optax
import jaxpar as jp
from jaxpar.data import batches, byte_corpus
from jaxpar.model.batches import batch_shardings
from jaxpar.models import llama
config = llama.Config(vocab=256, dim=16, layers=4, heads=2, kv_heads=2, ffn=24)
def losses(strategy):
    model = jp.from_nnx(lambda rngs: llama.Llama(config, rngs=rngs), llama.loss)
    step = jp.make_train_step(model, optax.sgd(0.1, momentum=0.9), strategy)
    batch = next(batches(byte_corpus().train, rows=16, length=12, seed=0))
    place = lambda x, where: jax.make_array_from_callback(x.shape, where, lambda index: x[index])
    batch = jax.tree.map(place, batch, batch_shardings(batch, step.mesh))
    state, losses = step.init(jax.random.key(0)), []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses
"""
APART = f"""
import json
import jaxpar as jp
jp.initialize(devices=1)
{MODEL}
print("RESULT", json.dumps(losses("pipe=2,fsdp=2,microbatches=2")))
"""


ENDLESS = """
import jaxpar as jp
jp.initialize(devices=1)
import jax, numpy as np, optax
model = jp.Model(init=lambda key: {"w": jax.random.normal(key, (8, 8))},
                 loss=lambda params, batch, key: ((batch["x"] @ params["w"]) ** 2).mean())
data = lambda start: iter(lambda: {"x": np.ones((8, 8), np.float32)}, None)
hook = jp.Hook(on_step=lambda _, metrics: metrics["step"] == 20 and print("TWENTY", flush=True))
jp.Trainer(model, optax.sgd(1e-5), data, "ddp", jp.Loop(steps=10**6, quiet=True), hooks=[hook]).run()
"""


@pytest.mark.battery
def test_a_link_that_goes_down_ends_both_hosts(hosts: list[str]) -> None:
    """Nothing is closed: packets are lost, and a collective would wait for them for ever."""
    workers = []
    for rank, host in enumerate(hosts):
        env = {"JAXPAR_COORDINATOR": "10.77.0.1:12345", "JAXPAR_PROCESSES": "2", "JAXPAR_PROCESS": str(rank)}
        command = ["ip", "netns", "exec", host, sys.executable, "-c", ENDLESS]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        workers.append(subprocess.Popen(command, env={**os.environ, "JAXPAR_WATCHDOG": "30", **env}, **pipes))
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert any("TWENTY" in line for line in worker.stdout)
        ip("-n", hosts[0], "link", "set", f"v{os.getpid()}a", "down")
        outputs = [worker.communicate(timeout=1800)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [75, 75], outputs
    assert "rank 0 on " in outputs[1]
    assert "is lost: " in outputs[1]


@pytest.mark.battery
def test_two_hosts_of_two_processes_train_as_one_device(hosts: list[str]) -> None:
    """A process is given only the coordinator's address. Gloo finds the interface between the hosts."""
    workers = []
    for rank in range(4):
        env = {"JAXPAR_COORDINATOR": "10.77.0.1:12345", "JAXPAR_PROCESSES": "4", "JAXPAR_PROCESS": str(rank)}
        command = ["ip", "netns", "exec", hosts[rank // 2], sys.executable, "-c", APART]
        process = subprocess.Popen(
            command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        workers.append(process)
    try:
        names: dict[str, Any] = {}
        exec(MODEL, names)
        truth = names["losses"]("single")
        outputs = [worker.communicate(timeout=1800) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for stdout, stderr in outputs:
        (line,) = [line for line in stdout.splitlines() if line.startswith("RESULT")] or [stderr[-3000:]]
        assert json.loads(line.removeprefix("RESULT")) == pytest.approx(truth, rel=1e-5)
