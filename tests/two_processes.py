"""A step on two processes, of one device each, beside the same step in this one."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import jaxpar as jp

_PROGRAM = """
import sys
import jaxpar as jp
place = jp.initialize()
import jax, numpy as np
from jax.experimental.multihost_utils import process_allgather
import two_processes
from jaxpar.backend import machines
path, cells, name, text, *rows = sys.argv[1:]
step, grads = two_processes.step_of(cells, name, text, jax.devices(), *map(int, rows))
assert machines._hosts == [0, 0]  # one machine, which they have told each other
across = {device.process_index for device in step.mesh.devices.reshape(-1, 2)[0]}
grads = jax.tree.map(lambda x: process_allgather(x, tiled=True), grads)
if place.process == 0:
    np.savez(path, *jax.tree.leaves(grads))
print("processes", sorted(across))
"""


def step_of(cells: str, name: str, text: str, devices: Any, *rows: int) -> tuple[Any, Any]:
    """A step of a model of some cells, and its gradients on their batch."""
    found = importlib.import_module(cells)
    step = jp.make_train_step(found.built(name), optax.sgd(0.1), text, mesh=devices)
    return step, step.value_and_grad(step.init(jax.random.key(0)), found.batch_of(*rows))[1]


def check_two(path: Path, cells: str, name: str, text: str, *rows: int) -> None:
    """Gradients of two processes, written to `path`, are those of one."""
    command = [sys.executable, "-m", "jaxpar", "launch", "--processes", "2", "--devices", "1", "--", "-c", _PROGRAM]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [*command, str(path), cells, name, text, *map(str, rows)],
        env={**os.environ, "PYTHONPATH": paths, "JAXPAR_WATCHDOG": "300"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("processes [0, 1]") == 2, run.stdout
    _, grads = step_of(cells, name, text, jax.devices()[:2], *rows)
    with np.load(path) as found:
        for got, wanted in zip(found.values(), jax.tree.leaves(grads), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
