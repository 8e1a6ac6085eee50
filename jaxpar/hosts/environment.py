"""Read from environment variables who process 0 is, how many processes a run has, and which of them this is.

    arguments, JAXPAR_* and JAX_* variables   |
    SLURM (srun), Open MPI (mpirun),          |->  _Settings  ->  Place
    Kubernetes (indexed Jobs and JobSets)     |

Arguments come before our variables, and those before a launcher's. To add a launcher, add a function that returns
`_Settings` or None, and call it in `detect`. Nothing here touches a device or the network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

PORT = 12345  # the coordinator's default port
# The coordinator's port depends on the job's number, so that two jobs on one host rarely share a port.
_FIRST_PORT, _NUM_PORTS = 61440, 4096

Env = Mapping[str, str]


@dataclass(frozen=True)
class Place:
    """The place of this process among the processes of its run.

    Attributes:
      source: where it was read: "arguments", "environment", "SLURM", "Open MPI", "Kubernetes", or "alone".
      coordinator: host:port of process 0; None for a run of one process.
      processes: number of processes of the run.
      process: which one this is, from 0.
      neighbours: number of processes on this host; None if unknown.
      local: which of these this is, from 0; None if unknown.
      gpus: the GPUs for this process, as indices among the GPUs that it sees; None for all of them.
    """

    source: str = "alone"
    coordinator: str | None = None
    processes: int = 1
    process: int = 0
    neighbours: int | None = None
    local: int | None = None
    gpus: tuple[int, ...] | None = None


@dataclass(frozen=True)
class _Settings:
    """The settings that one source gives; None where it says nothing. `Place` documents the common fields.

    Attributes:
      advice: what to do if the settings are incomplete.
      has_own_gpus: the launcher gave every process its own GPUs.
    """

    source: str
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    neighbours: int | None = None
    local: int | None = None
    advice: str = ""
    has_own_gpus: bool = False


def detect(
    env: Env,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    name: Callable[[], str] = lambda: "",
    gpus: Callable[[], int] = lambda: 0,
) -> Place:
    """Return the place of this process.

    Args:
      env: the environment variables.
      coordinator, processes, process: settings of the caller, as in `Place`.
      name: returns this host's full name; called if the coordinator of a Kubernetes job follows from it.
      gpus: returns the number of GPUs of this host; called if several processes share it.

    Raises:
      ValueError: settings contradict each other, are no numbers, or are incomplete.
    """
    arguments = {"coordinator": coordinator or None, "processes": processes, "process": process}
    variables: dict[str, Any] = {
        "coordinator": _first_set(env, "JAXPAR_COORDINATOR", "JAX_COORDINATOR_ADDRESS"),
        "processes": _number(env, "JAXPAR_PROCESSES", "JAX_NUM_PROCESSES"),
        "process": _number(env, "JAXPAR_PROCESS", "JAX_PROCESS_ID"),
    }
    explicit = {field: variables[field] if value is None else value for field, value in arguments.items()}
    # mpirun may run within a SLURM allocation, and either of them in a pod: the inner one started this process.
    settings = (_mpi(env) or _slurm(env) or _kubernetes(env, name)) if None in explicit.values() else None
    if settings is None:
        if explicit["coordinator"] is None and explicit["processes"] in (None, 1) and explicit["process"] in (None, 0):
            return Place()
        settings = _Settings("arguments" if coordinator or processes is not None else "environment")
    for field in ("processes", "process"):
        detected, value = getattr(settings, field), explicit[field]
        if None not in (detected, value) and detected != value:
            raise ValueError(f"{field}={value} is given, and {settings.source} says {detected}; leave {field} to it, "
                             "or give coordinator, processes and process all three")  # fmt: skip
    overrides = {field: value for field, value in explicit.items() if value is not None}
    return _to_place(replace(settings, **overrides), env, gpus)


def _to_place(settings: _Settings, env: Env, gpus: Callable[[], int]) -> Place:
    """Check that the settings are complete and consistent, and assign GPUs. Raises ValueError."""
    # 1. All three settings, or none.
    required = {field: getattr(settings, field) for field in ("coordinator", "processes", "process")}
    if missing := [field for field, value in required.items() if value is None]:
        present = ", ".join(f"{field}={value}" for field, value in required.items() if value is not None)
        advice = (
            settings.advice
            or "give all three (arguments, or JAXPAR_COORDINATOR, JAXPAR_PROCESSES, JAXPAR_PROCESS), or none"
        )
        raise ValueError(
            f"{settings.source}: {present or 'nothing'} is given, but not {' or '.join(missing)}; {advice}"
        )
    assert settings.coordinator is not None
    assert settings.processes is not None
    assert settings.process is not None
    # 2. Numbers that fit each other, and an address with a port.
    if settings.processes < 1 or not 0 <= settings.process < settings.processes:
        raise ValueError(f"process={settings.process} of processes={settings.processes} ({settings.source}): number "
                         f"them 0 to {max(settings.processes, 1) - 1}")  # fmt: skip
    if settings.processes == 1:
        return Place(settings.source)
    host, _, port = settings.coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            f"coordinator={settings.coordinator!r} needs a port, as in {settings.coordinator.rstrip(':')}:{PORT}"
        )
    return Place(
        settings.source,
        settings.coordinator,
        settings.processes,
        settings.process,
        settings.neighbours,
        settings.local,
        _gpus(settings, env, gpus),
    )


# -- launchers ---------------------------------------------------------------------------------------------------------


def _slurm(env: Env) -> _Settings | None:
    """Read what srun sets for a task; None outside of srun, or for a step of one task."""
    # These variables describe the step, which srun starts. A batch script has the job's variables, and is one process.
    num_tasks = _number(env, "SLURM_STEP_NUM_TASKS")
    if num_tasks is None or num_tasks == 1:
        return None
    nodes, job = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", ""), _number(env, "SLURM_JOB_ID") or 0
    per_node = re.fullmatch(r"(\d+)(\(x\d+\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    neighbours = int(per_node[1]) if per_node else None  # unknown if the hosts have different numbers of tasks
    return _Settings(
        "SLURM",
        # Each step of a job gets another port.
        f"{_first_node(nodes)}:{_port(env, job + 7 * (_number(env, 'SLURM_STEP_ID') or 0))}" if nodes else None,
        num_tasks,
        _number(env, "SLURM_PROCID"),
        neighbours,
        _number(env, "SLURM_LOCALID"),
        "srun sets SLURM_STEP_NODELIST and SLURM_PROCID; pass them on, or give coordinator, processes and process",
        has_own_gpus=any(
            variable in env for variable in ("SLURM_GPUS_PER_TASK", "SLURM_STEP_GPUS_PER_TASK", "SLURM_GPU_BIND")
        ),
    )


def _first_node(nodes: str) -> str:
    """Return the first host of SLURM's list: node[007-009,12],gpu1 -> node007, rack[1-2]node[3-4] -> rack1node3."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)  # commas within brackets do not end it
    assert first is not None  # it may be empty
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def _mpi(env: Env) -> _Settings | None:
    """Read what Open MPI's mpirun sets; None outside of mpirun, or for one process."""
    size = _number(env, "OMPI_COMM_WORLD_SIZE")
    if size is None or size == 1:
        return None
    local_size = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    # Open MPI 4 gives mpirun's own address, such as 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911. Process 0 runs on
    # mpirun's host.
    uri = env.get("OMPI_MCA_orte_hnp_uri", "")
    address = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
    job = re.match(r"\d+", uri)
    # The upper bits number the job. Open MPI 5 names it instead.
    job_number = int(job[0]) // 4096 if job else sum(env.get("PMIX_NAMESPACE", "").encode())
    mpirun_host = None if address is None else address[1] or f"[{address[2]}]"
    host = "127.0.0.1" if local_size == size else mpirun_host
    return _Settings(
        "Open MPI",
        f"{host}:{_port(env, job_number)}" if host else None,
        size,
        _number(env, "OMPI_COMM_WORLD_RANK"),
        local_size,
        _number(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        "Open MPI 5 does not say where process 0 is; start with mpirun -x JAXPAR_COORDINATOR=host:port",
    )


def _kubernetes(env: Env, name: Callable[[], str]) -> _Settings | None:
    """Read the variables of a pod of an indexed Job; None in other pods.

    The pod's name ends in its index, so the name of process 0's pod is the same with 0 as its index.
    """
    if "KUBERNETES_SERVICE_HOST" not in env or "JOB_COMPLETION_INDEX" not in env:
        # A pod outside an indexed Job has no index, and is a run of its own.
        return None
    num_processes = _number(env, "JAXPAR_PROCESSES", "JAX_NUM_PROCESSES")
    pod_index = _number(env, "JOB_COMPLETION_INDEX")
    if num_processes is None:
        if _first_set(env, "JAXPAR_COORDINATOR", "JAX_COORDINATOR_ADDRESS") is None and "." not in name():
            return None  # without a headless service, each pod of an indexed Job is a separate run
        advice = "a pod does not know how many there are; set JAXPAR_PROCESSES to the Job's completions in its env"
        return _Settings("Kubernetes", process=pod_index, advice=advice)
    # A JobSet has several Jobs with equally many pods; each numbers its pods from 0.
    job_index, num_jobs = _number(env, "JOBSET_JOB_GLOBAL_INDEX"), _number(env, "JOBSET_GLOBAL_REPLICAS") or 1
    if num_processes % num_jobs:
        raise ValueError(f"JAXPAR_PROCESSES={num_processes} is not a multiple of JOBSET_GLOBAL_REPLICAS={num_jobs}; "
                         "set it to the number of pods of all jobs together")  # fmt: skip
    process = (
        pod_index if job_index is None or pod_index is None else job_index * (num_processes // num_jobs) + pod_index
    )
    full_name = "" if num_processes == 1 else name()
    host, dot, domain = full_name.partition(".")
    # Pods are called NAME-INDEX in a Job, NAME-JOB-INDEX in a JobSet.
    coordinator_host = re.sub(r"-\d+-\d+$", "-0-0", host) if job_index is not None else re.sub(r"-\d+$", "-0", host)
    return _Settings(
        "Kubernetes",
        f"{coordinator_host}.{domain}:{_port(env, None)}" if dot else None,
        num_processes,
        process,
        # A pod counts as a host of one process.
        1,
        0,
        "the pods need a headless service, and its name as the Job's spec.template.spec.subdomain, to find each other; "
        "or set JAXPAR_COORDINATOR=host:port",
    )


def _port(env: Env, job: int | None) -> int:
    """Return the coordinator's port for a job's number."""
    if (port := _number(env, "JAXPAR_PORT")) is not None:
        return port
    return PORT if job is None else _FIRST_PORT + job % _NUM_PORTS


def _gpus(settings: _Settings, env: Env, count: Callable[[], int]) -> tuple[int, ...] | None:
    """Return the GPUs of this process: JAXPAR_LOCAL_DEVICES, or an equal share of the host's.

    None leaves the choice to jax, which takes all GPUs that the process sees.
    """
    if (text := env.get("JAXPAR_LOCAL_DEVICES")) is not None:
        try:
            return tuple(int(word) for word in text.split(","))
        except ValueError as error:
            raise ValueError(f"JAXPAR_LOCAL_DEVICES={text!r} is not a list of numbers; write it as 0,1") from error
    num_processes, local = settings.neighbours, settings.local
    if num_processes is None or local is None or num_processes == 1 or settings.has_own_gpus:
        return None
    visible = env.get("CUDA_VISIBLE_DEVICES")
    num_gpus = count() if visible is None else len([word for word in visible.split(",") if word])
    if num_gpus < num_processes:
        return None  # there are no GPUs, or each process sees only its own
    if num_gpus % num_processes:
        raise ValueError(f"{num_gpus} GPUs cannot be shared equally among the {num_processes} processes of this host; "
                         f"start a number of processes that divides {num_gpus}, or set JAXPAR_LOCAL_DEVICES in "
                         "each")  # fmt: skip
    share = num_gpus // num_processes
    return tuple(range(local * share, (local + 1) * share))


def _first_set(env: Env, *variables: str) -> str | None:
    """Return the value of the first variable that is set and not empty."""
    return next((env[variable] for variable in variables if env.get(variable)), None)


def _number(env: Env, *variables: str) -> int | None:
    """Return the first variable that is set, as a whole number. Raises ValueError."""
    for variable in variables:
        if text := env.get(variable):
            if not re.fullmatch(r"\d+", text):
                raise ValueError(f"{variable}={text!r} is not a whole number; set it to 0 or more, or unset it")
            return int(text)
    return None
