"""What `experiments/launch/` holds, as far as a machine without a cluster can tell: scripts run under faked launchers,
manifests hold fields that exist, the image copies what is there and is nobody's root.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxpar.hosts import environment
from jaxpar.hosts.launch import LaunchOptions
from jaxpar.run.cli.options import TrainOptions
from jaxpar.run.cli.parsing import parse
from jaxpar.strategy import Strategy

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "experiments" / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
# Every fake writes what it was started with, and as what, into a folder of its own.
FAKE = """#!{python} -IS
import json, os, sys, time
keep = ("SLURM_", "OMPI_", "JAXPAR_", "NCCL_")
env = {{k: v for k, v in os.environ.items() if k.startswith(keep)}}
json.dump([sys.argv[1:], env], open(os.path.join({seen!r}, f"{{os.getpid()}}-{{time.time_ns()}}"), "w"))
sys.exit(int(os.environ.get("FAIL_" + sys.argv[1].upper(), 0)))
"""
SRUN = """#!/bin/bash
# As srun does on 2 hosts of 8 tasks: an option, then a command for each of the tasks.
shift
for rank in {0..15}; do
  SLURM_STEP_NUM_TASKS=16 SLURM_STEP_NODELIST='gpu[07-08]' SLURM_STEP_TASKS_PER_NODE='8(x2)' SLURM_STEP_ID=0 \\
    SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 8)) "$@" || exit $?
done
"""
MPIRUN = """#!/bin/bash
# As Open MPI 5 does: what -x does not name is not there on the other host.
names=(); while [[ $1 == -* ]]; do
  case $1 in -x) names+=("$2");; -np) n=$2;; --host) [[ $2 == gpu07:8,gpu08:8 ]] || exit 9;; esac
  shift 2
done
for ((rank = 0; rank < n; rank++)); do
  words=(); for name in "${names[@]}"; do words+=("$name=${!name}"); done
  env -i "${words[@]}" OMPI_COMM_WORLD_SIZE=$n OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_SIZE=8 \\
    OMPI_COMM_WORLD_LOCAL_RANK=$((rank % 8)) "$@" || exit $?
done
"""
SSH = """#!/bin/bash
# The last word is a command line, which a shell on the other side takes apart.
exec env -i PATH="$PATH" FAIL_LAUNCH="${FAIL_LAUNCH-0}" sh -c "${@: -1}"
"""


def started(tmp_path: Path, script: str, **env: str) -> tuple[int, list[tuple[list[str], dict[str, str]]]]:
    """The exit status of a script under faked launchers, and what `jaxpar` was started with, process by process."""
    tools, seen = tmp_path / "bin", tmp_path / "seen"
    for folder in (tools, seen):
        folder.mkdir()
    fakes = {"srun": SRUN, "mpirun": MPIRUN, "ssh": SSH, "jaxpar": FAKE.format(python=sys.executable, seen=str(seen))}
    for name, text in fakes.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(tools)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "OMPI", "JAXPAR", "NCCL"))}
    clean |= {"PATH": f"{tools}:{os.environ['PATH']}", "VENV": str(tmp_path / ".venv")}
    command = ["bash", str(LAUNCH / script), "--steps", "7"]
    done = subprocess.run(command, env=clean | env, capture_output=True, text=True, check=False)
    assert "line " not in done.stderr, done.stderr
    found = [json.loads(path.read_text()) for path in seen.iterdir()]
    return done.returncode, sorted(found, key=lambda one: (one[0][0], *(int(one[1].get(k, 0)) for k in RANKS)))


def trained(words: list[str]) -> list[str]:
    """The options of `jaxpar train`, by itself or under `jaxpar launch`, which then starts a process for each GPU."""
    if words[0] == "launch":
        cut = words.index("--")
        assert parse(LaunchOptions, "launch", words[1:cut]).processes is None
        assert words[cut + 1 : cut + 3] == ["-m", "jaxpar"]
        words = words[cut + 3 :]
    assert words[0] == "train"
    return words[1:]


RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JAXPAR_PROCESS")
SLURM = {"SLURM_JOB_NAME": "jaxpar", "SLURM_JOB_ID": "5000", "SLURM_CPUS_PER_TASK": "8", "SLURM_SUBMIT_DIR": str(ROOT)}
HOSTS = {"HOSTS": "gpu07,gpu08"}


@pytest.mark.parametrize("script", ["slurm.sh", "mpirun.sh", "ssh.sh"])
def test_scripts_start_what_jaxpar_understands(script: str, tmp_path: Path) -> None:
    out = tmp_path / "a run"  # a blank in its name
    status, found = started(tmp_path, script, **(SLURM if script == "slurm.sh" else HOSTS), OUT=str(out))
    assert status == 0
    by_ssh = script == "ssh.sh"  # a launcher on each host; elsewhere the processes themselves
    kinds = ("doctor", "launch" if by_ssh else "train")
    doctors, runs = ([one for one in found if one[0][0] == kind] for kind in kinds)
    assert len(runs) == (2 if by_ssh else 16)
    assert len(doctors) == (0 if by_ssh else 16)
    for words, env in runs:
        options = parse(TrainOptions, "train", trained(words))
        assert (options.out, options.resume, options.steps) == (out, True, 7)
        assert Strategy.parse(options.strategy).precision == "bf16"
        assert env["NCCL_DEBUG"] == "WARN"
        assert env["NCCL_SOCKET_IFNAME"] == "^lo,docker"
        assert env["JAXPAR_WATCHDOG"] == "60"
    for words, _ in doctors:
        assert words[words.index("--folder") + 1] == str(out)
    places = [environment.detect(env, name=lambda: "", gpus=lambda: 8) for _, env in runs]
    assert [(place.processes, place.process) for place in places] == [(len(runs), rank) for rank in range(len(runs))]
    # Each has a GPU of its own.
    assert by_ssh or [place.gpus for place in places] == [(rank % 8,) for rank in range(16)]
    assert {place.coordinator.partition(":")[0] for place in places} == {"gpu07"}
    assert len({place.coordinator for place in places}) == 1


@pytest.mark.parametrize(("script", "command", "fails"), [("slurm.sh", "doctor", 1), ("ssh.sh", "launch", 2)])
def test_a_command_that_fails_is_the_last_and_gives_the_status(
    script: str, command: str, fails: int, tmp_path: Path
) -> None:
    env = {f"FAIL_{command.upper()}": str(fails), "OUT": str(tmp_path / "r")}
    status, found = started(tmp_path, script, **(SLURM if script == "slurm.sh" else HOSTS), **env)
    assert status == fails
    assert {words[0] for words, _ in found} == {command}


@pytest.mark.parametrize("script", [*SCRIPTS, LAUNCH / "nccl.env"], ids=lambda path: path.name)
def test_shell_parses(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, capture_output=True)
    if script.suffix == ".sh":
        assert "set -euo pipefail" in script.read_text()


def test_what_slurm_is_asked_for_exists() -> None:
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", (LAUNCH / "slurm.sh").read_text(), re.M))
    assert set(asked) <= {
        *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem", "time", "signal"),
        *("requeue", "open-mode", "output"),
    }  # of sbatch's manual
    assert (asked["nodes"], asked["gpus-per-node"], asked["ntasks-per-node"]) == ("2", "8", "8")
    assert re.fullmatch(r"\d+:\d\d:\d\d", asked["time"])


# -- manifests ---------------------------------------------------------------------------------------------------------

# The fields that ours have, as Kubernetes' API (v1, batch/v1) and JobSet's (v1alpha2) define them; no others are let
# through, for a misspelt one is dropped in silence, or refused on the cluster.
META = {"name": str}
ENV = {"name": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath": str}}}
CONTAINER = {
    "name": str, "image": str, "args": [str], "env": [ENV], "ports": [{"containerPort": int}],
    "resources": {"limits": {"nvidia.com/gpu": int, "memory": str}},
    "securityContext": {"allowPrivilegeEscalation": bool},
    "volumeMounts": [{"name": str, "mountPath": str}],
}  # fmt: skip
VOLUME = {"name": str, "persistentVolumeClaim": {"claimName": str}, "emptyDir": {"medium": str, "sizeLimit": str}}
POD = {
    "subdomain": str, "restartPolicy": str, "terminationGracePeriodSeconds": int, "containers": [CONTAINER],
    "volumes": [VOLUME], "securityContext": {"runAsNonRoot": bool, "runAsUser": int, "fsGroup": int},
}  # fmt: skip
JOB = {"completions": int, "parallelism": int, "completionMode": str, "backoffLimit": int, "template": {"spec": POD}}
PORTS = [{"name": str, "port": int}]
SERVICE = {"clusterIP": str, "publishNotReadyAddresses": bool, "selector": {"job-name": str}, "ports": PORTS}
JOBSET = {
    "network": {"enableDNSHostnames": bool, "subdomain": str}, "failurePolicy": {"maxRestarts": int},
    "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
}  # fmt: skip
KINDS = {("v1", "Service"): SERVICE, ("batch/v1", "Job"): JOB, ("jobset.x-k8s.io/v1alpha2", "JobSet"): JOBSET}


def fits(value: Any, schema: Any, where: str) -> None:
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        assert set(value) <= set(schema), f"{where} has {set(value) - set(schema)}"
        for name, inner in value.items():
            fits(inner, schema[name], f"{where}.{name}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        assert value, where
        for i, inner in enumerate(value):
            fits(inner, schema[0], f"{where}[{i}]")
    else:
        assert type(value) is schema, f"{where} is {value!r}, and should be of type {schema.__name__}"


def manifests(name: str) -> list[Any]:
    return list(yaml.safe_load_all((LAUNCH / name).read_text()))


def pods(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The Job's spec and its pods'."""
    last = manifests(name)[-1]["spec"]
    job = last["replicatedJobs"][0]["template"]["spec"] if name == "jobset.yaml" else last
    return job, job["template"]["spec"]


@pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml"])
def test_manifests(name: str) -> None:
    for one in manifests(name):
        assert set(one) == {"apiVersion", "kind", "metadata", "spec"}
        fits(one["metadata"], META, f"{name} metadata")
        fits(one["spec"], KINDS[one["apiVersion"], one["kind"]], f"{name} {one['kind']}")
    job, pod = pods(name)
    (container,) = pod["containers"]
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == int(env["JAXPAR_PROCESSES"])  # all or none: each waits for all
    assert pod["restartPolicy"] == "Never"
    assert pod["securityContext"]["runAsNonRoot"]
    assert [v["name"] for v in pod["volumes"]] == [m["name"] for m in container["volumeMounts"]]
    assert {m["mountPath"] for m in container["volumeMounts"]} == {"/shared", "/dev/shm"}
    options = parse(TrainOptions, "train", trained(container["args"]))
    assert options.resume
    assert options.out is not None
    assert options.out.is_relative_to("/shared")
    Strategy.parse(options.strategy)


def test_the_service_leads_to_the_pods() -> None:
    service, job = manifests("job.yaml")
    assert service["spec"]["clusterIP"] == "None"
    # A label that Kubernetes gives a Job's pods.
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    pod = job["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == pod["subdomain"]
    assert [port["port"] for port in service["spec"]["ports"]] == [12345]
    assert [port["containerPort"] for port in pod["containers"][0]["ports"]] == [12345]


@pytest.mark.parametrize(("name", "own"), [("job.yaml", "train-%d"), ("jobset.yaml", "jaxpar-hosts-0-%d")])
def test_pods_find_each_other(name: str, own: str) -> None:
    given = {one["name"]: one.get("value") or "" for one in pods(name)[1]["containers"][0]["env"]}
    if name == "jobset.yaml":  # what the annotations say
        given |= {"JOBSET_JOB_GLOBAL_INDEX": "0", "JOBSET_GLOBAL_REPLICAS": "1"}
    for index in range(2):
        env = given | {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(index)}
        host = f"{own % index}.jaxpar.default.svc.cluster.local"
        place = environment.detect(env, name=lambda host=host: host, gpus=lambda: 8)
        assert (place.processes, place.process) == (2, index)
        assert place.coordinator == f"{own % 0}.jaxpar.default.svc.cluster.local:12345"


# -- the image ---------------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    lines = (LAUNCH / "Dockerfile").read_text().splitlines(keepends=True)
    text = re.sub(r"\\\n\s*", "", "".join(line for line in lines if not line.startswith("#")))
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def test_the_image() -> None:
    lines = instructions()
    assert {word for word, _ in lines} <= {"FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
    assert lines[0][0] == "FROM"
    assert re.fullmatch(r"nvidia/cuda:12\.\d+\.\d+-base-ubuntu\d\d\.04", lines[0][1])  # a version, never `latest`
    users = [rest for word, rest in lines if word == "USER"]
    assert len(users) == 1  # by number: Kubernetes cannot know that a name is not root's
    assert int(users[0]) == pods("job.yaml")[1]["securityContext"]["runAsUser"] > 0
    assert any(f"--uid {users[0]} " in rest for word, rest in lines if word == "RUN")
    words = [word for word, _ in lines]
    assert words.index("USER") > max(i for i, word in enumerate(words) if word in ("RUN", "COPY"))
    for word, rest in lines:
        if word in ("ENTRYPOINT", "CMD"):
            assert isinstance(json.loads(rest), list)  # without a shell, which would keep SIGTERM to itself
        if word == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)


def test_what_is_copied_is_there_and_all_that_the_package_needs() -> None:
    copied = [path for word, rest in instructions() if word == "COPY" for path in shlex.split(rest)[:-1]]
    assert all((ROOT / path).exists() for path in copied)
    let_in = re.findall(r"^!(.+)$", (LAUNCH / "Dockerfile.dockerignore").read_text(), re.M)
    assert sorted(copied) == sorted(let_in)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert needed | set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == set(copied)
    (extra,) = re.findall(r'"/src\[(\w+)\]"', (LAUNCH / "Dockerfile").read_text())
    assert extra in project["project"]["optional-dependencies"]
