"""Check the covering array of `schedule_cells.py`: gradients, parameters and collectives of every schedule."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from schedule_cells import GROUPS, SGD, batch_of
from test_pipeline import deep

import jaxpar as jp
from jaxpar.inspect.expected import expected
from jaxpar.inspect.ledger import Ledger


@pytest.mark.battery
@pytest.mark.parametrize(("model", "pipe"), GROUPS)
def test_every_schedule(model: str, pipe: int | None) -> None:
    """Run the cells in a process with 16 devices, for 8 stages and another axis."""
    program = f"import schedule_cells; schedule_cells.run({model!r}, {pipe})"
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=16")
    folder, tests = Path(__file__).parent, Path(__file__).parents[2]
    python_path = os.pathsep.join(map(str, (tests.parent, tests, folder)))
    env = {**os.environ, "XLA_FLAGS": flags, "PJRT_NPROC": "64", "PYTHONPATH": python_path}
    process = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=7200)
    assert process.returncode == 0, process.stderr[-6000:]


def test_closed_form_has_what_one_part_of_a_slot_makes_for_another() -> None:
    """The closed form counts reductions in one part of a slot whose results another part reads.

    I sums gradients of norms' scales over `tensor`, and the prologue's backward adds them. Counted alone, each part
    lost these reductions, since nothing read their results.
    """
    step = jp.make_train_step(
        deep(layers=4), SGD, "pipe=2,tensor=2,sequence=true,schedule=zb-h1,microbatches=2", mesh=jax.devices()[:4]
    )
    batch = batch_of(2)
    closed, written = expected(step, batch), Ledger.from_jaxpr(step.trace(batch), step.mesh)
    assert written.by("kind", "axes", value="count") == closed.by("kind", "axes", value="count")
    assert written.total("count", kind="all-reduce", axes=("tensor",)) > 2 * 2 * 2  # norms, layers, microbatches
