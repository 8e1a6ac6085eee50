"""A checkpoint of any layout restores into any other, bit by bit."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from layouts import LAYOUTS, batch, random_state, saved, step
from ports import free_port

from jaxpar.checkpoint.arrays import arrays_of
from jaxpar.checkpoint.saved import Checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("source")
    return folder, random_state(folder)


def bits(state: Any) -> list[bytes]:
    raw = lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(raw(x)).tobytes() for x in jax.tree.leaves(state)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_restores_one_state_and_saves_it_again(name: str, source: Any, tmp_path: Path) -> None:
    """Each layout is once the target and once the source. What is on disk has no layout, so that every pair follows."""
    folder, values = source
    there = step(name)
    state = there.restore(folder)
    for array, x in zip(arrays_of(there)[0], jax.tree.leaves(state), strict=True):
        # Each device got its own part: no leaf is whole on a device that does not hold it.
        assert array.kind is not None or x.sharding.is_equivalent_to(array.sharding, x.ndim), array.path
    there.save(tmp_path, state).wait()
    assert saved(tmp_path) == {name: x.tobytes() for name, x in values.items()}
    # What the layout itself says of the arrays, which the boxes must agree with.
    logical = there.layout.to_logical(jax.tree.map(np.asarray, state.params))
    for path, x in jax.tree_util.tree_leaves_with_path(logical):
        at = "params/" + jax.tree_util.keystr(path, simple=True, separator="/")
        assert np.asarray(x).tobytes() == values[at].tobytes(), at
    if there.layout.copied:
        np.testing.assert_array_equal(np.asarray(state.copy["table"]), values["params/table"].astype("bfloat16"))


@pytest.mark.battery
def test_every_pair_goes_on_alike(source: Any, tmp_path: Path) -> None:
    """All ordered pairs, masters and moments bit by bit; and the next three steps of every layout agree."""
    folder, _ = source
    names = list(LAYOUTS)
    for name in names:
        step(name).save(tmp_path / name, step(name).restore(folder)).wait()
    truths: dict[str, list[float]] = {}
    for target in names:
        there, reference = step(target), None
        for origin in names:
            state = there.restore(tmp_path / origin)
            reference = bits(state) if reference is None else reference
            assert bits(state) == reference, (origin, target)
        losses = []
        for number in range(3):
            state, metrics = there(state, batch(number))
            losses.append(float(metrics["loss"]))
        truths[target] = losses
    for target, losses in truths.items():
        low = "bf16" in LAYOUTS[target][0]
        assert losses == pytest.approx(truths["single"], rel=2e-2 if low else 1e-5), target


WORKER = """
import sys, jax
rank, port, source, out = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
sys.path[:0] = ["tests/checkpoint"]
import layouts
from jax.experimental import multihost_utils
for name in ("ddp", "zero2", "hsdp", "chunks", "four axes"):
    step = layouts.step(name)
    state = step.restore(source)
    step.save(f"{out}/{name}", state, {"batches": 3}).wait()
    # What two hosts wrote, they read.
    again = step.restore(f"{out}/{name}")
losses = []
step = layouts.step("hsdp")
for number in range(3):
    again = step.restore(f"{out}/hsdp") if number == 0 else again
    again, metrics = step(again, layouts.batch(number))
    losses.append(float(metrics["loss"]))
multihost_utils.sync_global_devices("end")
print("RESULT", losses)
"""


@pytest.mark.battery
def test_two_processes_save_and_restore_what_one_does(source: Any, tmp_path: Path) -> None:
    folder, values = source
    port = str(free_port())
    command = lambda rank: [sys.executable, "-c", WORKER, str(rank), port, str(folder), str(tmp_path)]
    workers = [
        subprocess.Popen(command(rank), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(2)
    ]
    try:
        outs = [worker.communicate(timeout=300) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], outs[0][1][-3000:] + outs[1][1][-3000:]
    for name in ("ddp", "zero2", "hsdp", "chunks", "four axes"):
        assert saved(tmp_path / name) == {name: x.tobytes() for name, x in values.items()}
        assert Checkpoint(tmp_path / name).about.hosts == 2
    state, losses = step("single").restore(tmp_path / "hsdp"), []
    for number in range(3):
        state, metrics = step("single")(state, batch(number))
        losses.append(float(metrics["loss"]))
    for out, _ in outs:
        found = json.loads(next(line for line in out.splitlines() if line.startswith("RESULT"))[7:])
        assert found == pytest.approx(losses, rel=1e-5)
