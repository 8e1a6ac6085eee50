"""A checkpoint of any layout restores into any other, bit by bit."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from layouts import LAYOUTS, PAIRED, TWO, bits, losses, random_state, saved, step, two_processes

from jaxpar.checkpoint.arrays import arrays_of
from jaxpar.checkpoint.saved import Checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("source")
    return folder, random_state(folder)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_restores_one_state_and_saves_it_again(name: str, source: Any, tmp_path: Path) -> None:
    """Each layout is once the target and once the source. What is on disk has no layout, so that every pair follows."""
    folder, values = source
    there = step(name)
    state = there.restore(folder)
    for array, x in zip(arrays_of(there)[0], jax.tree.leaves(state), strict=True):
        # Each device got its own part: no leaf is whole on a device that does not hold it.
        assert array.key_impl is not None or x.sharding.is_equivalent_to(array.sharding, x.ndim), array.path
    there.save(tmp_path, state).wait()
    assert saved(tmp_path) == {name: x.tobytes() for name, x in values.items()}
    # What the layout itself says of the arrays, which the boxes must agree with.
    logical = there.layout.to_logical(jax.tree.map(np.asarray, state.params))
    for path, x in jax.tree_util.tree_leaves_with_path(logical):
        at = "params/" + jax.tree_util.keystr(path, simple=True, separator="/")
        assert np.asarray(x).tobytes() == values[at].tobytes(), at
    if there.layout.copied:
        np.testing.assert_array_equal(np.asarray(state.copy["table"]), values["params/table"].astype("bfloat16"))


@pytest.mark.slow
def test_two_processes_restore_one_state_and_save_it_again(source: Any, tmp_path: Path) -> None:
    """The last row and column: as what is on disk has no layout, it follows for the others."""
    folder, values = source
    step("chunks").save(tmp_path / "chunks", step("chunks").restore(folder)).wait()
    two_processes(tmp_path, PAIRED[:1], ["chunks"], train=False)
    assert saved(tmp_path / TWO) == {name: x.tobytes() for name, x in values.items()}
    assert Checkpoint(tmp_path / TWO).about.hosts == 2


@pytest.mark.battery
def test_every_pair_goes_on_alike(source: Any, tmp_path: Path) -> None:
    """All ordered pairs, two processes among them: masters and moments bit by bit, the next three steps to 1e-5."""
    folder, values = source
    names = list(LAYOUTS)
    for name in names:
        step(name).save(tmp_path / name, step(name).restore(folder)).wait()
    pair = two_processes(tmp_path, PAIRED, names, train=True)
    assert Checkpoint(tmp_path / TWO).about.hosts == 2
    for name in PAIRED[1:]:
        assert saved(tmp_path / f"{TWO}, {name}") == {name: x.tobytes() for name, x in values.items()}
    found: dict[str, list[float]] = {}
    for target in names:
        there, reference = step(target), None
        for origin in (*names, TWO):
            state = there.restore(tmp_path / origin)
            reference = bits(state) if reference is None else reference
            assert bits(state) == reference, (origin, target)
        there.save(tmp_path / f"again {target}", state).wait()
        assert saved(tmp_path / f"again {target}") == {name: x.tobytes() for name, x in values.items()}
        found[target] = losses(target, state)
    for rank in pair:
        found |= {f"{TWO}, {name}": of for name, of in rank.items()}
        for target, of in found.items():
            assert of == pytest.approx(found["single"], rel=2e-2 if "copies" in target else 1e-5), target
