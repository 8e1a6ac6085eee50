"""Eight simulated devices, and what else the tests need. Imported before any of them imports jax."""

import atexit
import gc
import os
import re
import sys
import tempfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Compiling programs that run once takes most of the time here, and XLA's newer generator of code for fusions half of
# that (jax 0.10.2: a pipeline's step in 2.0 instead of 4.8 s). jax 0.12 has no other any more.
older = version("jaxlib").startswith("0.10.")
QUICK = " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1" if older else ""

# What a developer has set for other work, or the job in which the tests run, of which they are no process.
OTHERS = ("JAX_", "JAXPAR_", "SLURM_", "OMPI_", "KUBERNETES_", "JOBSET_", "JOB_COMPLETION_", "FORCE_COLOR")
OTHERS += ("XDG_", "MPLCONFIGDIR")
for name in [name for name in os.environ if name.startswith(OTHERS)]:
    del os.environ[name]

# All tests share a new home directory. Caches and settings in a developer's own home would change what tests see, and
# some machines have no home: there matplotlib writes a warning into every command's output.
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit it
    home = tempfile.TemporaryDirectory(prefix="jaxpar-tests-", ignore_cleanup_errors=True)
    atexit.register(home.cleanup)
    os.environ["HOME"] = home.name

# Some hundred processes of the tests import the same files. Where bytecode is not kept, as containers often have it,
# each compiles them anew: a sixth of its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Before the backend starts. Subprocesses of tests inherit all of it.
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    # Collectives of 8 devices wait for each other on few cores: 600 s is a hang, 60 s may be a busy machine.
    "XLA_FLAGS": (
        "--xla_force_host_platform_device_count=8"
        " --xla_cpu_collective_call_warn_stuck_timeout_seconds=120"
        # Nobody runs what is compiled for GPUs that are not there: ptxas need not optimize.
        " --xla_gpu_disable_gpuasm_optimizations=true"
        f" --xla_cpu_collective_call_terminate_timeout_seconds=600{QUICK}"
    ),
    # Of the rest, LLVM's optimization is half. It comes after all that tests look at in programs for GPUs.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    # A CPU program from the persistent cache has lost the order of its collectives: two all-gathers met in one
    # rendezvous, and the process aborted or hung (jax 0.10.2, always in the same program; compiled afresh, never).
    "JAX_ENABLE_COMPILATION_CACHE": "0",
    "COLUMNS": "80",
    "MPLBACKEND": "agg",
    "TPU_SKIP_MDS_QUERY": "1",
}

import pytest  # noqa: E402
from defects import DEFECTS  # noqa: E402

from jaxpar.hardware.devices import missing_compiler  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--battery", action="store_true", help="every cell of the battery, not only its covering array")
    parser.addoption("--sample", type=int, default=1, help="of the cells of each test one in so many, in their order")
    parser.addoption("--from", type=int, default=0, help="the place of the first of these")
    parser.addoption("--rotate", type=int, default=1, help="of tests that no planted defect needs, one in so many")
    parser.addoption("--rotate-slow", type=int, default=1, help="of such tests that are marked slow, one in so many")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--battery"):
        deselect(config, items, [item for item in items if item.get_closest_marker("battery")])
    cells: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cells[item.nodeid.partition("[")[0]].append(item)
    each, first = config.getoption("--sample"), config.getoption("--from")

    def is_in_turn(i: int, test: str) -> bool:
        is_slow = all(item.get_closest_marker("slow") for item in cells[test])
        rotate = config.getoption("--rotate-slow" if is_slow else "--rotate")
        return i % rotate == first // each % rotate or finds_defect(test)

    tests = [test for i, test in enumerate(cells) if is_in_turn(i, test)]
    kept = {item for test in tests for item in cells[test][first % min(each, len(cells[test])) :: each]}
    deselect(config, items, [item for item in items if item not in kept])
    # Of tests in no group, those that start processes take longest: at the end one worker would wait for the other.
    items.sort(key=lambda item: item.path.parent.name not in ("hosts", "train"))


def finds_defect(test: str) -> bool:
    """Return whether a planted defect names this test, its file or its folder as the one that must find it."""
    return any(re.match(rf"tests/{re.escape(defect.tests)}(/|::|$)", test) for defect in DEFECTS)


def deselect(config: pytest.Config, items: list[pytest.Item], others: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=others)
    left = {*items} - {*others}
    items[:] = [item for item in items if item in left]


def pytest_collection_finish() -> None:
    """Tracing makes objects by the million. The collector, at its usual pace, took a sixth of a test's time."""
    gc.collect()
    gc.freeze()  # the modules, which stay
    gc.set_threshold(200_000, 20, 50)


@pytest.hookimpl(tryfirst=True)  # before fixtures, which compile too
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda_compiler") is not None and (missing := missing_compiler()):
        reason = f"compiling for GPUs: {missing}; `make gpu-compiler` installs it"
        # Where it should be installed, a skip would hide that it is not.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
