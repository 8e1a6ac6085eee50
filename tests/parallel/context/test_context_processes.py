"""Context over two processes, by a ring, with logits in chunks: gradients are those of one process."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from context_cells import batch_of, built

import jaxpar as jp

TEXT = "context=2,attention=ring,logits=8"
PROGRAM = """
import sys
import jaxpar as jp
place = jp.initialize()
import jax, numpy as np, optax
from jax.experimental.multihost_utils import process_allgather
from context_cells import batch_of, built
path, name, text = sys.argv[1:]
step = jp.make_train_step(built(name), optax.sgd(0.1), text)
across = {device.process_index for device in step.mesh.devices.reshape(-1, 2)[0]}
_, grads = step.value_and_grad(step.init(jax.random.key(0)), batch_of(4))
grads = jax.tree.map(lambda x: process_allgather(x, tiled=True), grads)
if place.process == 0:
    np.savez(path, *jax.tree.leaves(grads))
print("processes", sorted(across))
"""


@pytest.mark.battery
def test_gradients_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    path, tests = tmp_path / "grads.npz", Path(__file__).parents[2]
    command = [sys.executable, "-m", "jaxpar", "launch", "--processes", "2", "--devices", "1", "--"]
    paths = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [*command, "-c", PROGRAM, str(path), "llama_gqa", TEXT],
        env={**os.environ, "PYTHONPATH": paths, "JAXPAR_WATCHDOG": "300"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("processes [0, 1]") == 2, run.stdout
    step = jp.make_train_step(built("llama_gqa"), optax.sgd(0.1), TEXT, mesh=jax.devices()[:2])
    _, grads = step.value_and_grad(step.init(jax.random.key(0)), batch_of(4))
    with np.load(path) as found:
        for got, wanted in zip(found.values(), jax.tree.leaves(grads), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
