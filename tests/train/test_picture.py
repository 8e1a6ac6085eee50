"""The picture of a run: what it shows of a mixture."""

from pathlib import Path
from typing import Any

import matplotlib.image as images
import numpy as np

from jaxpar.train.loop import Units
from jaxpar.train.picture import loads, plot


def lines(load: float | None = 1.0, dropped: float = 0.0) -> list[dict[str, Any]]:
    one = {"loss": 2.0, "load_0": load, "load_1": 1.0, "load_2": 1.0, "load_3": 1.0, "dropped": dropped}
    return [{"step": 1, **one}, {"step": 2, **one}, {"step": 2, "held_out_loss": 2.5}]


def drawn(path: Path, found: list[dict[str, Any]]) -> np.ndarray:
    plot(found, path, Units(), "a run")
    return images.imread(path)


def test_a_mixture_has_its_loads_and_drops_below_the_loss(tmp_path: Path) -> None:
    plain = drawn(tmp_path / "a.png", [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])
    even, uneven = drawn(tmp_path / "b.png", lines()), drawn(tmp_path / "c.png", lines(load=1.8))
    assert even.shape[0] > 1.5 * plain.shape[0]
    assert even.shape == uneven.shape
    assert (even != uneven).any()
    assert (even != drawn(tmp_path / "d.png", lines(dropped=0.3))).any()
    drawn(tmp_path / "e.png", lines(load=None))  # what was not finite


def test_loads_are_known_by_their_names() -> None:
    assert loads(["load_0", "held_out_load_12", "loading_1", "load_x", "dropped"]) == {
        "load_0": 0,
        "held_out_load_12": 12,
    }
