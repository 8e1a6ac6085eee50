"""Environments as srun, mpirun and Kubernetes make them, and settings that contradict each other."""

import socket
import unittest.mock
from pathlib import Path

import pytest

from jaxpar.hosts import gloo, initialize
from jaxpar.hosts.environment import Place, detect

SLURM = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "16",
         "SLURM_STEP_NODELIST": "gpu[007-008]", "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_PROCID": "9",
         "SLURM_LOCALID": "1"}  # fmt: skip
MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
       "OMPI_COMM_WORLD_LOCAL_RANK": "1",
       "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}  # fmt: skip
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3", "JAXPAR_PROCESSES": "4"}


def test_nothing_said_is_alone() -> None:
    assert detect({}) == Place() == detect({"JAXPAR_PROCESSES": "1"})
    # Runs of one task: an allocation, a batch script that srun has not started, a pod of a sweep.
    assert detect({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) == Place()
    assert detect({name: value for name, value in SLURM.items() if "STEP" not in name}) == Place()
    assert detect({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}, name=lambda: "job-3") == Place()


def test_slurm() -> None:
    place = detect(SLURM, gpus=lambda: 8)
    assert place == Place("SLURM", f"gpu007:{61440 + 4711 % 4096}", 16, 9, 8, 1, (1,))
    # jax alone would give a host's one task the first of its eight GPUs, and a task that has its own GPU another one.
    one_per_host = {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
    assert detect(one_per_host, gpus=lambda: 8).gpus is None
    assert detect({**SLURM, "CUDA_VISIBLE_DEVICES": "5"}, gpus=lambda: 8).gpus is None
    assert detect({**SLURM, "SLURM_GPUS_PER_TASK": "1"}, gpus=lambda: 8).gpus is None
    assert detect({**SLURM, "JAXPAR_LOCAL_DEVICES": "2,3"}).gpus == (2, 3)
    says = r"12 GPUs cannot be shared equally among the 8 processes of this host; start a"
    with pytest.raises(ValueError, match=says):
        detect(SLURM, gpus=lambda: 12)
    for nodes, first in {
        "a,b": "a",
        "n[1,3-4],m": "n1",
        "n01": "n01",
        "r[2-3]s": "r2s",
        "r[1-2]n[3-4],m": "r1n3",
    }.items():
        coordinator = detect({**SLURM, "SLURM_STEP_NODELIST": nodes, "JAXPAR_PORT": "77"}).coordinator
        assert coordinator == f"{first}:77"


def test_open_mpi() -> None:
    place = detect(MPI)
    assert (place.source, place.processes, place.process, place.local) == ("Open MPI", 4, 3, 1)
    assert place.coordinator == f"10.96.0.1:{61440 + 1531576320 // 4096 % 4096}"
    ipv6 = detect({**MPI, "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b,2620::2]:43370", "JAXPAR_PORT": "9"})
    assert ipv6.coordinator == "[fe80::b9b]:9"
    assert detect({**SLURM, **MPI}).source == "Open MPI"  # mpirun within an allocation
    open_mpi_5 = {name: value for name, value in MPI.items() if "hnp" not in name}
    says = r"Open MPI 5 does not say where process 0 is; start with mpirun -x JAXPAR_COO"
    with pytest.raises(ValueError, match=says):
        detect(open_mpi_5)
    assert detect({**open_mpi_5, "JAXPAR_COORDINATOR": "a:1"}).coordinator == "a:1"
    assert (detect({**open_mpi_5, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).coordinator or "").startswith("127.0.0.1:")


def test_kubernetes() -> None:
    assert detect(POD, name=lambda: "train-3.pods.ns.svc.cluster.local") == Place(
        "Kubernetes", "train-0.pods.ns.svc.cluster.local:12345", 4, 3, 1, 0
    )
    jobs = {**POD, "JOBSET_JOB_GLOBAL_INDEX": "1", "JOBSET_GLOBAL_REPLICAS": "2", "JOB_COMPLETION_INDEX": "1"}
    place = detect(jobs, name=lambda: "set-workers-1-1.set")
    assert (place.coordinator, place.process) == ("set-workers-0-0.set:12345", 3)
    place = detect({**jobs, "JAXPAR_PROCESSES": "6"}, name=lambda: "set-workers-1-1.set")
    assert place.process == 4  # of jobs of three pods each
    for env, name, says in (
        (POD, "train-3", "Kubernetes: .* not coordinator; the pods need a headless service"),
        ({**POD, "JAXPAR_PROCESSES": ""}, "train-3.pods.ns", "set JAXPAR_PROCESSES to the Job's completions"),
        ({**jobs, "JAXPAR_PROCESSES": "5"}, "set-workers-1-1.set", "=5 is not a multiple of JOBSET_GLOBAL_REPLICAS=2"),
    ):
        with pytest.raises(ValueError, match=says):
            detect(env, name=lambda name=name: name)


def test_what_is_said_explicitly_comes_first() -> None:
    jaxpar_env = {"JAXPAR_COORDINATOR": "b:2", "JAXPAR_PROCESSES": "2", "JAXPAR_PROCESS": "0"}
    assert detect({**SLURM, **jaxpar_env}) == Place("environment", "b:2", 2, 0)
    jax_env = {"JAX_COORDINATOR_ADDRESS": "c:3", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}
    assert detect(jax_env) == Place("environment", "c:3", 3, 2)
    assert detect({**jaxpar_env, **jax_env}, "d:4", 9, 8) == Place("arguments", "d:4", 9, 8)
    assert detect({**SLURM, "JAXPAR_COORDINATOR": "b:2"}).coordinator == "b:2"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"JAXPAR_PROCESSES": "2"}, r"processes=2 is given, but not coordinator or process; give all three"),
        ({"JAXPAR_COORDINATOR": "a:1"}, r"coordinator=a:1 is given, but not processes or process"),
        ({**SLURM, "JAXPAR_PROCESSES": "4"}, r"processes=4 is given, and SLURM says 16; leave processes to it"),
        ({**SLURM, "SLURM_PROCID": "x"}, r"SLURM_PROCID='x' is not a whole number"),
        ({**SLURM, "SLURM_PROCID": "16"}, r"process=16 of processes=16 \(SLURM\): number them 0 to 15"),
        ({**SLURM, "JAXPAR_COORDINATOR": "b"}, r"coordinator='b' needs a port, as in b:12345"),
        ({**SLURM, "JAXPAR_LOCAL_DEVICES": "all"}, r"JAXPAR_LOCAL_DEVICES='all' is not a list of numbers"),
    ],
)
def test_contradictions_are_sentences(env: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        detect(env)


def test_the_coordinator_listens_where_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax listens on all interfaces by default."""
    assert initialize.coordinator_address("127.0.0.1:80") == "127.0.0.1:80"
    assert initialize.coordinator_address("localhost:80") == "127.0.0.1:80"
    assert initialize.coordinator_address("[::1]:80") == "[::1]:80"
    # Debian's /etc/hosts gives a host's own name an address of loopback, where nobody else would find it.
    # Both with and without a network, whichever this machine has.
    getaddrinfo = lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 80))]
    for connect_error, address in ((None, "198.51.100.3:80"), (OSError("Network is unreachable"), "127.0.1.1:80")):
        probe = unittest.mock.MagicMock()
        probe.__enter__.return_value = probe
        probe.connect.side_effect = connect_error
        probe.getsockname.return_value = ("198.51.100.3", 40000)
        with monkeypatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", getaddrinfo)
            patch.setattr(socket, "socket", lambda *_, probe=probe: probe)
            assert initialize.coordinator_address("node7:80") == address
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(ValueError, match=r"port \d+ of 127.0.0.1 is in use; name another"):
            initialize.check_free(f"127.0.0.1:{listener.getsockname()[1]}")
    with pytest.raises(ValueError, match=r"192.0.2.7 is not an address of this host, which is process 0"):
        initialize.check_free("192.0.2.7:1234")
    with pytest.raises(ValueError, match=r"bind='0.0.0.0' is not address:port"):
        initialize.check_free("0.0.0.0")


def test_devices_listen_on_the_way_to_the_coordinator() -> None:
    """Gloo listened where the host's own name led to: on loopback, where /etc/hosts says so."""
    assert gloo.local_address_towards("127.0.0.1:80") == "127.0.0.1"
    if Path("/proc/net/if_inet6").exists() and Path("/proc/net/if_inet6").read_text():  # many containers have none
        assert gloo.local_address_towards("[::1]:80") == "::1"


def test_a_script_that_has_not_joined_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of four processes would have trained alone, on all rows, with exit status 0."""
    monkeypatch.setenv("JAXPAR_PROCESSES", "4")
    monkeypatch.setenv("JAXPAR_PROCESS", "1")
    with pytest.raises(ValueError, match=r"one of 4 processes .* call jp.initialize\(\) at the beginning"):
        initialize.check_joined()
    monkeypatch.delenv("JAXPAR_PROCESS")  # in a pod, whose manifest says how many there are, any script may run alone
    initialize.check_joined()
    monkeypatch.delenv("JAXPAR_PROCESSES")
    assert initialize.initialize() == Place()
    monkeypatch.setenv("SLURM_NTASKS", "16")
    with pytest.warns(UserWarning, match="16 tasks, and srun did not start this process"):
        initialize.initialize()
