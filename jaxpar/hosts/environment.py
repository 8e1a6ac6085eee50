"""What launchers say in environment variables: who is process 0, how many processes there are, which one this is.

Nothing here touches a device or a network; the variables are those of SLURM's srun, Open MPI's mpirun, Kubernetes'
indexed Jobs and JobSets, and our own, which come before them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

PORT = 12345  # the coordinator's, where nothing else says
_FIRST, _PORTS = 61440, 4096  # ports by the number of a job, so that two jobs on a host rarely share one

Env = Mapping[str, str]


@dataclass(frozen=True)
class Place:
    """Where this process stands among those of its run.

    Attributes:
      source: what said so: "arguments", "environment", "SLURM", "Open MPI", "Kubernetes", or "alone".
      coordinator: host:port of process 0; None alone.
      processes, process: how many there are, and which one this is.
      neighbours, local: how many of them are on this host, and which of these this is; None where nothing says.
      gpus: the GPUs that this process is to use, by their numbers among those it sees; None for all of them.
    """

    source: str = "alone"
    coordinator: str | None = None
    processes: int = 1
    process: int = 0
    neighbours: int | None = None
    local: int | None = None
    gpus: tuple[int, ...] | None = None


@dataclass(frozen=True)
class _Said:
    """What one source says; None where it does not."""

    source: str
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    neighbours: int | None = None
    local: int | None = None
    missing: str = ""  # what to do where it does not say enough
    divided: bool = False  # whether it gave every process GPUs of its own


def detect(
    env: Env,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    name: Callable[[], str] = lambda: "",
    gpus: Callable[[], int] = lambda: 0,
) -> Place:
    """The place of this process. Arguments come before our variables, and these before a launcher's.

    Args:
      env: the environment.
      coordinator, processes, process: what the caller says itself.
      name: this host's full name, asked for where Kubernetes' coordinator follows from it.
      gpus: how many GPUs this host has, asked for where several processes share it.

    Raises ValueError where they contradict each other, are no numbers, or say too little.
    """
    given = {"coordinator": coordinator or None, "processes": processes, "process": process}
    ours: dict[str, Any] = {
        "coordinator": _first(env, "JAXPAR_COORDINATOR", "JAX_COORDINATOR_ADDRESS"),
        "processes": _number(env, "JAXPAR_PROCESSES", "JAX_NUM_PROCESSES"),
        "process": _number(env, "JAXPAR_PROCESS", "JAX_PROCESS_ID"),
    }
    said = {name: ours[name] if value is None else value for name, value in given.items()}
    # mpirun within a SLURM allocation, and either in a pod: the inner one started this process, and knows.
    launcher = (_mpi(env) or _slurm(env) or _kubernetes(env, name)) if None in said.values() else None
    if launcher is None:
        if said["coordinator"] is None and said["processes"] in (None, 1) and said["process"] in (None, 0):
            return Place()
        launcher = _Said("arguments" if coordinator or processes is not None else "environment")
    for what in ("processes", "process"):
        its, own = getattr(launcher, what), said[what]
        if None not in (its, own) and its != own:
            raise ValueError(f"{what}={own} is given, and {launcher.source} says {its}; leave {what} to it, or give "
                             "coordinator, processes and process all three")  # fmt: skip
    filled = {name: value for name, value in said.items() if value is not None}
    return _placed(replace(launcher, **filled), env, gpus)


def _placed(said: _Said, env: Env, gpus: Callable[[], int]) -> Place:
    """Checked, and complete. Raises ValueError."""
    known = {"coordinator": said.coordinator, "processes": said.processes, "process": said.process}
    if missing := [name for name, value in known.items() if value is None]:
        says = ", ".join(f"{name}={value}" for name, value in known.items() if value is not None)
        advice = (
            said.missing
            or "give all three (arguments, or JAXPAR_COORDINATOR, JAXPAR_PROCESSES, JAXPAR_PROCESS), or none"
        )
        raise ValueError(f"{said.source}: {says or 'nothing'} is known, and not {' or '.join(missing)}: {advice}")
    assert said.coordinator is not None
    assert said.processes is not None
    assert said.process is not None
    if said.processes < 1 or not 0 <= said.process < said.processes:
        raise ValueError(f"process={said.process} of processes={said.processes} ({said.source}): number them 0 to "
                         f"{max(said.processes, 1) - 1}")  # fmt: skip
    if said.processes == 1:
        return Place(said.source)
    host, _, port = said.coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"coordinator={said.coordinator!r} needs a port, as in {said.coordinator.rstrip(':')}:{PORT}")
    place = Place(said.source, said.coordinator, said.processes, said.process, said.neighbours, said.local)
    return replace(place, gpus=_gpus(said, env, gpus))


# -- launchers ---------------------------------------------------------------------------------------------------------


def _slurm(env: Env) -> _Said | None:
    # Of the step, which srun starts: a batch script itself has the job's numbers, and is one process.
    tasks = _number(env, "SLURM_STEP_NUM_TASKS")
    if tasks is None or tasks == 1:
        return None
    nodes, job = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", ""), _number(env, "SLURM_JOB_ID") or 0
    per_node = re.fullmatch(r"(\d+)(\(x\d+\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    neighbours = int(per_node[1]) if per_node else None  # hosts with different numbers of tasks: not known
    return _Said(
        "SLURM",
        f"{_first_node(nodes)}:{_port(env, job + 7 * (_number(env, 'SLURM_STEP_ID') or 0))}" if nodes else None,
        tasks,
        _number(env, "SLURM_PROCID"),
        neighbours,
        _number(env, "SLURM_LOCALID"),
        "srun sets SLURM_STEP_NODELIST and SLURM_PROCID; pass them on, or give coordinator, processes and process",
        divided=any(name in env for name in ("SLURM_GPUS_PER_TASK", "SLURM_STEP_GPUS_PER_TASK", "SLURM_GPU_BIND")),
    )


def _first_node(nodes: str) -> str:
    """The first host of SLURM's list: node[007-009,12],other -> node007."""
    head = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    assert head is not None  # every part may be empty
    return f"{head[1]}{head[2] or ''}{head[3]}"


def _mpi(env: Env) -> _Said | None:
    size = _number(env, "OMPI_COMM_WORLD_SIZE")
    if size is None or size == 1:
        return None
    local = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    # Open MPI 4: 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911, of mpirun, on whose host process 0 is.
    uri = env.get("OMPI_MCA_orte_hnp_uri", "")
    address = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
    job = re.match(r"\d+", uri)
    number = int(job[0]) // 4096 if job else sum(env.get("PMIX_NAMESPACE", "").encode())
    told = None if address is None else address[1] or f"[{address[2]}]"
    host = "127.0.0.1" if local == size else told
    return _Said(
        "Open MPI",
        f"{host}:{_port(env, number)}" if host else None,
        size,
        _number(env, "OMPI_COMM_WORLD_RANK"),
        local,
        _number(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        "Open MPI 5 does not say where process 0 is; start with mpirun -x JAXPAR_COORDINATOR=host:port",
    )


def _kubernetes(env: Env, name: Callable[[], str]) -> _Said | None:
    """Of an indexed Job: the pod's index is in the environment, its name ends in it, and process 0's in 0."""
    if "KUBERNETES_SERVICE_HOST" not in env or "JOB_COMPLETION_INDEX" not in env:
        return None
    count = _number(env, "JAXPAR_PROCESSES", "JAX_NUM_PROCESSES")
    index = _number(env, "JOB_COMPLETION_INDEX")
    if count is None:
        if _first(env, "JAXPAR_COORDINATOR", "JAX_COORDINATOR_ADDRESS") is None and "." not in name():
            return None  # without a headless service, pods of an indexed Job are runs of their own
        missing = "a pod does not know how many there are; set JAXPAR_PROCESSES to the Job's completions in its env"
        return _Said("Kubernetes", process=index, missing=missing)
    job, jobs = _number(env, "JOBSET_JOB_GLOBAL_INDEX"), _number(env, "JOBSET_GLOBAL_REPLICAS") or 1
    if count % jobs:
        raise ValueError(f"JAXPAR_PROCESSES={count} do not divide among JOBSET_GLOBAL_REPLICAS={jobs} jobs; set it to "
                         "the pods of all of them")  # fmt: skip
    process = index if job is None or index is None else job * (count // jobs) + index
    own = "" if count == 1 else name()
    host, dot, domain = own.partition(".")
    # NAME-INDEX for a Job, NAME-JOB-INDEX for a JobSet's.
    first = re.sub(r"-\d+-\d+$", "-0-0", host) if job is not None else re.sub(r"-\d+$", "-0", host)
    return _Said(
        "Kubernetes",
        f"{first}.{domain}:{_port(env, None)}" if dot else None,
        count,
        process,
        1,
        0,
        "the pods need a headless service, and its name as the Job's spec.template.spec.subdomain, to find each other; "
        "or set JAXPAR_COORDINATOR=host:port",
    )


def _port(env: Env, job: int | None) -> int:
    if (port := _number(env, "JAXPAR_PORT")) is not None:
        return port
    return PORT if job is None else _FIRST + job % _PORTS


def _gpus(said: _Said, env: Env, count: Callable[[], int]) -> tuple[int, ...] | None:
    """The GPUs of this process: as it is told, or its share of those that it sees beside the others of its host."""
    if (own := env.get("JAXPAR_LOCAL_DEVICES")) is not None:
        try:
            return tuple(int(word) for word in own.split(","))
        except ValueError as error:
            raise ValueError(f"JAXPAR_LOCAL_DEVICES={own!r} is no list of numbers; write it as 0,1") from error
    among, local = said.neighbours, said.local
    if among is None or local is None or among == 1 or said.divided:
        return None  # all of them: jax sees those that the launcher left it
    listed = env.get("CUDA_VISIBLE_DEVICES")
    seen = count() if listed is None else len([word for word in listed.split(",") if word])
    if seen < among:
        return None  # none, or each has been given its own
    if seen % among:
        raise ValueError(f"{seen} GPUs do not divide among the {among} processes of this host; start as many as divide "
                         "them, or set JAXPAR_LOCAL_DEVICES in each")  # fmt: skip
    share = seen // among
    return tuple(range(local * share, (local + 1) * share))


def _first(env: Env, *names: str) -> str | None:
    return next((env[name] for name in names if env.get(name)), None)


def _number(env: Env, *names: str) -> int | None:
    for name in names:
        if text := env.get(name):
            if not re.fullmatch(r"\d+", text):
                raise ValueError(f"{name}={text!r} is no whole number; set it to one from 0, or unset it")
            return int(text)
    return None
