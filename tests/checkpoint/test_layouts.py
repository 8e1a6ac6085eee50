"""A checkpoint of any layout restores into any other, bit by bit."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from layouts import LAYOUTS, PAIRED, random_state, saved, step, two_processes

from jaxpar.checkpoint.arrays import arrays_of
from jaxpar.checkpoint.saved import Checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("source")
    return folder, random_state(folder)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_restores_one_state_and_saves_it_again(name: str, source: Any, tmp_path: Path) -> None:
    """Each layout is target and source once. Files do not depend on a layout, so every pair works if this does."""
    folder, values = source
    layout_step = step(name)
    state = layout_step.restore(folder)
    for array, x in zip(arrays_of(layout_step)[0], jax.tree.leaves(state), strict=True):
        # Each device has its part only: no leaf is whole on a device unless the layout says so.
        assert array.key_impl is not None or x.sharding.is_equivalent_to(array.sharding, x.ndim), array.names
    layout_step.save(tmp_path, state).wait()
    assert saved(tmp_path) == {name: x.tobytes() for name, x in values.items()}
    # The boxes must agree with the layout's own conversion.
    logical = layout_step.layout.to_logical(jax.tree.map(np.asarray, state.params))
    for path, x in jax.tree_util.tree_leaves_with_path(logical):
        name_of_leaf = "params/" + jax.tree_util.keystr(path, simple=True, separator="/")
        assert np.asarray(x).tobytes() == values[name_of_leaf].tobytes(), name_of_leaf
    if layout_step.layout.copied:
        np.testing.assert_array_equal(np.asarray(state.copy["table"]), values["params/table"].astype("bfloat16"))


@pytest.mark.slow
def test_two_processes_restore_one_state_and_save_it_again(source: Any, tmp_path: Path) -> None:
    """Two processes are target and source once, which again covers every pair with them."""
    folder, values = source
    step("chunks").save(tmp_path / "chunks", step("chunks").restore(folder)).wait()
    two_processes(tmp_path, "chunks", PAIRED)
    for name in PAIRED:
        assert saved(tmp_path / name) == {name: x.tobytes() for name, x in values.items()}
        assert Checkpoint(tmp_path / name).about.hosts == 2
