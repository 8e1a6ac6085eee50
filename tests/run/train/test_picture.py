"""The picture of a run: its labels, the strategies of its parts, and what it shows of a mixture."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.run.train import picture
from jaxpar.run.train.loop import Units
from jaxpar.run.train.recorder import read


def lines(load: float | None = 1.0, dropped: float = 0.0) -> list[dict[str, Any]]:
    metrics = {"loss": 2.0, "load_0": load, "load_1": 1.0, "load_2": 1.0, "load_3": 1.0, "dropped": dropped}
    return [{"step": 1, **metrics}, {"step": 2, **metrics}, {"step": 2, "held_out_loss": 2.5}]


def test_a_mixture_has_its_loads_and_drops_below_the_loss(tmp_path: Path) -> None:
    assert len(picture.draw([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], Units(), "a run").axes) == 1
    figure = picture.draw(lines(load=1.8, dropped=0.3), Units(), "a run")
    _, load_axes, dropped_axes, _ = figure.axes
    shares = np.asarray(load_axes.collections[0].get_array()).reshape(4, 2)
    np.testing.assert_allclose(shares, [[1.8] * 2, [1] * 2, [1] * 2, [1] * 2])
    assert [text.get_text() for text in load_axes.texts] == ["1.80", "1.00", "1.00", "1.00"]
    np.testing.assert_allclose(dropped_axes.lines[0].get_ydata(), [30, 30])
    picture.plot(lines(load=None), tmp_path / "a.png", Units(), "a run")  # what was not finite


def test_loads_are_known_by_their_names() -> None:
    names = ["load_0", "held_out_load_12", "loading_1", "load_x", "dropped"]
    assert picture.loads(names) == {"load_0": 0, "held_out_load_12": 12}


@pytest.mark.parametrize("seed", range(4))
def test_no_label_lies_on_the_curve_or_on_another_label(seed: int) -> None:
    """ "bigram entropy" and the last held-out value lay on the end of the curve, and on each other."""
    rng = np.random.default_rng(seed)
    end, offsets = 3.0, rng.uniform(-0.1, 0.1, 2)
    losses = end + 4 * np.exp(-np.arange(40) / 8) + rng.normal(0, 0.05, 40)
    records = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    records += [{"step": step, "held_out_loss": losses[step - 1] + 0.02} for step in (20, 40)]
    units = Units(lines={"unigram entropy": end + offsets[0], "bigram entropy": end + offsets[1]})
    for mixture in (False, True):
        if mixture:
            records = [{**line, "load_0": 1.0, "dropped": 0.0} if "loss" in line else line for line in records]
        figure = picture.draw(records, units, "a run")
        figure.canvas.draw()
        axes = figure.axes[0]
        boxes = [text.get_window_extent() for text in axes.texts]
        assert len(boxes) == 3
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
        points = np.concatenate([line.get_transform().transform(line.get_xydata()) for line in axes.lines[:2]])
        assert not any(box.contains(*point) for box in boxes for point in points)
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes)


def test_the_title_has_the_strategy_of_each_part_of_a_run(tmp_path: Path) -> None:
    """A resumed run was titled with the strategy of its last part, as if that had trained all of it."""
    loss = lambda params, batch, _: ((batch["x"] @ params["w"]) ** 2).mean()
    model = jp.Model(init=lambda key: {"w": jax.random.normal(key, (8,))}, loss=loss)
    batches = [{"x": np.ones((8, 8), np.float32)}]
    for steps, strategy in ((2, "ddp"), (3, "ddp"), (4, "zero1")):
        loop = jp.Loop(steps=steps, rows=8, out=tmp_path, resume=True, quiet=True)
        jp.Trainer(model, optax.sgd(0.1), lambda _: iter(batches * 9), strategy, loop).run()
    lines = read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "strategy" in line] == [1, 3, 4]
    title = picture.draw(lines, Units(), "another").axes[0].get_title()
    assert title == "steps 1 to 3: data=8 on 8 x cpu\nsteps 4 to 4: fsdp=8,zero=1 on 8 x cpu"
    many = [{"step": at, "loss": 1.0, "strategy": f"fsdp={at}", "devices": "8 x H100"} for at in range(1, 6)]
    title = picture.draw(many, Units(), "another").axes[0].get_title()
    assert title.splitlines()[0] == "steps 1 to 1: fsdp=1 on 8 x H100"
    assert title.splitlines()[1:] == ["3 other strategies", "steps 5 to 5: fsdp=5 on 8 x H100"]
    assert picture.draw(many[:1], Units(), "another").axes[0].get_title() == "fsdp=1 on 8 x H100"
    old = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0}]
    assert picture.draw(old, Units(), "another").axes[0].get_title() == "another"
