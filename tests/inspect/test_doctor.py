"""`jaxpar doctor`: what is off is named, with the next thing to try, and the status is 1; else all is well."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ports import free_port

from jaxpar import collectives
from jaxpar.backend.cpu_compiler import CANARIES, FLAG
from jaxpar.hardware.devices import INSTALL
from jaxpar.inspect.bench import doctor
from jaxpar.run.cli.commands import main

WORKER = """
import json, sys, time
import jax
from jaxpar.inspect.bench import doctor
rank, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_num_cpu_devices", 1)
if rank == 1:  # another clock, another folder under the same name, another package
    real, doctor.wall_clock, folder = doctor.wall_clock, lambda: real() - 5000, folder + "/elsewhere"
    doctor.metadata.version = lambda name: "0.0.1" if name == "optax" else "1.0"
doctor.failing = lambda environment: {}  # which compiles for seconds; one process shows it
from jaxpar.run.cli import main
main(["doctor", "--strategy", "ddp", "--folder", folder, "--bytes", "4000", "--devices", "1", "--json",
      "--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process", str(rank)])
"""


@pytest.mark.slow
def test_one_process_is_well(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main(["doctor", "--strategy", "data=2,fsdp=4", "--bytes", "4096", "--folder", str(tmp_path)])
    printed = capsys.readouterr().out
    assert printed.endswith("all well\n")
    assert f"jax {jax.__version__}" in printed
    assert f"{len(CANARIES)} of {len(CANARIES)} known programs right" in printed
    assert all(x in printed for x in ("1 process x 8 x cpu", "data=2: all-reduce of 4.10 kB", "fsdp=4: all-reduce"))
    assert "OFF" not in printed
    assert not list(tmp_path.iterdir())  # it leaves nothing behind


@pytest.mark.slow
def test_wrong_sums_a_wrong_compiler_and_a_folder_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A jax that fails a canary is reported, as 0.10.2 does if the user enables YNNPACK's kernels."""
    right = collectives.all_reduce

    def wrong(x: Any, axes: Any, **options: Any) -> jax.Array:
        y = right(x, axes, **options)
        return y.at[-1].set(jnp.asarray(9, y.dtype))

    failed = {"a sum over 8 dims": "ended by SIGSEGV", "sums of products over 40,000 rows": "wrong numbers"}
    monkeypatch.setattr(doctor, "failing", lambda environment: failed)
    monkeypatch.setattr(collectives, "all_reduce", wrong)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit) as exit_:
        main(["doctor", "--strategy", "ddp", "--bytes", "4096", "--folder", str(file)])
    assert exit_.value.code == 1
    printed = capsys.readouterr().out
    assert "8 elements of an all-reduce over data are wrong" in printed
    assert f"cannot write to {file}: File exists" in printed
    assert "a sum over 8 dims: ended by SIGSEGV; sums of products over 40,000 rows: wrong numbers" in printed
    assert f"try: XLA_FLAGS={FLAG} in every process" in printed
    assert printed.count("    try: ") == 3
    assert printed.endswith("3 problems\n")


@pytest.mark.slow
def test_two_hosts_that_differ(tmp_path: Path) -> None:
    """Differences between two hosts are reported, although each alone is well; both end with status 1."""
    port = str(free_port())
    command = [sys.executable, "-c", WORKER]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen([*command, str(rank), port, str(tmp_path)], **pipes) for rank in range(2)]
    try:
        outputs = [worker.communicate(timeout=1800) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [1, 1], outputs
    assert "versions" not in outputs[1][0]  # process 0 speaks for all
    printed = outputs[0][0]
    findings = {finding["name"]: finding for finding in json.loads(printed[printed.index("[\n") :])}  # Gloo prints too
    first_label, second_label = (f"process {rank} on host {socket.gethostname()}" for rank in range(2))
    for name, sentence in {
        "clock": f"the clock of {second_label} is N s behind that of {first_label}",
        "folder": f"{first_label} does not see in {tmp_path} what {second_label} has written there",
    }.items():
        # On a busy machine the clocks are known only roughly.
        assert re.sub(r"\b(4[5-9]|5[0-4])\d\d\.\d s", "N s", findings[name]["wrong"]) == sentence
        assert findings[name]["hint"]
    assert f"{second_label} has " in findings["versions"]["wrong"]
    for name in ("devices", "cpu compiler", "addresses", "shm", "collectives"):
        assert not findings[name]["wrong"]
    assert "data=2: all-reduce" in findings["collectives"]["found"]


CPU = {"kind": "cpu", "platform": "cpu", "count": 8, "memory": None, "gpu": False}
GPUS = CPU | {"kind": "NVIDIA H100", "platform": "gpu", "gpu": True}


ONE, TWO = ["host a"], ["host a", "host b"]
OFF = {
    "plugin": (
        doctor.check_versions([{"jaxlib": "0.10.2", "jax-cuda12-plugin": "0.10.0"}], ONE),
        "jax-cuda12-plugin 0.10.0 is not of jaxlib's version 0.10.2",
        "pip install jax-cuda12-plugin==0.10.2",
    ),
    "versions": (
        doctor.check_versions([{"jaxlib": "1"}, {"jaxlib": "1", "libtpu": "2"}], TWO),
        "libtpu: host a has nothing, host b has 2",
        "from one image",
    ),
    "unused GPU": (
        doctor.check_devices([CPU | {"gpu": True}], ONE),
        "host a has an NVIDIA GPU, and jax uses its CPU",
        "JAX_PLATFORMS",
    ),
    "devices": (
        doctor.check_devices([CPU, CPU | {"count": 7}], TWO),
        "host a has 8 x cpu, host b has 7 x cpu",
        "CUDA_VISIBLE_DEVICES",
    ),
    "many GPUs": (
        doctor.check_devices([GPUS], ONE),
        "a process drives 8 GPUs; it can hang",
        "a process for each GPU, by srun, mpirun or jaxpar launch (docs/launch.md), or NCCL_LAUNCH_MODE=GROUP",
    ),
    "loopback": (
        doctor.check_addresses([["10.0.0.1"], ["127.0.1.1"]], TWO),
        "host b's own name leads to 127.0.1.1 there",
        "/etc/hosts",
    ),
    "unknown": (doctor.check_addresses([["10.0.0.1"], []], TWO), "host b's own name is not known there", "DNS"),
    "clocks": (
        doctor.check_clocks([[0, 0], [4.0, 0.1]], TWO),
        "the clock of host b is 4.0 s ahead of that of host a",
        "chrony",
    ),
}


@pytest.mark.parametrize(("finding", "wrong", "hint"), OFF.values(), ids=OFF)
def test_what_is_off_has_a_reason_and_a_next_thing(finding: doctor.Diagnosis, wrong: str, hint: str) -> None:
    assert wrong in finding.wrong
    assert hint in finding.hint
    assert str(finding).startswith("OFF ")


def test_what_is_well_and_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_LAUNCH_MODE", "GROUP")
    diagnoses = [
        doctor.check_addresses([["127.0.1.1"]], ["host a"]),  # alone it matters to nobody
        doctor.check_clocks([[0, 0], [4.0, 3.9]], ["host a", "host b"]),  # the network was too slow to tell
        doctor.check_devices([CPU, CPU], ["host a", "host b"]),
        doctor.check_devices([GPUS], ["host a"]),  # launched as a group, it does not hang
        doctor.check_devices([GPUS | {"count": 1}] * 8, [f"process {p} on a" for p in range(8)]),
    ]
    assert not [diagnosis for diagnosis in diagnoses if diagnosis.wrong]
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)  # what to install where jax sees no GPU
    assert doctor.check_devices([CPU | {"gpu": True}], ["host a"]).hint == INSTALL
