"""`make compare`, small: two strategies, three steps; the table, the record and the pictures."""

import contextlib
import importlib.util
import io
import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import tyro

STRATEGIES = ("dp", "zero3")
STEPS = 3
Compared = tuple[str, Path, dict[str, Any]]
pytestmark = pytest.mark.xdist_group("compare")  # the tests share one run

# `experiments/naive` has a module of this name too.
_spec = importlib.util.spec_from_file_location(
    "compare_of_experiments", Path(__file__).parents[2] / "experiments" / "compare.py"
)
assert _spec is not None
assert _spec.loader is not None
compare = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = compare
_spec.loader.exec_module(compare)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """What it prints, its folder, its record."""
    out = tmp_path_factory.mktemp("compare")
    data = out / "text"
    data.write_bytes(bytes(range(256)) * 40)
    with contextlib.redirect_stdout(printed := io.StringIO()):
        compare.main(compare.Options(strategies=STRATEGIES, data=data, steps=STEPS, rows=8, length=16, out=out))
    return printed.getvalue(), out, json.loads((out / "compare.json").read_text())


@pytest.mark.slow
def test_table(compared: Compared) -> None:
    printed, _, record = compared
    assert max(map(len, printed.splitlines())) <= 80
    rows = [line.split() for line in printed.splitlines() if line.startswith(STRATEGIES)]
    assert [row[0] for row in rows] == ["dp", "dp", "zero3"]
    assert "8 simulated devices on" in re.sub(r"\s+", " ", printed)
    zero3 = record["strategies"]["zero3"]
    params, _, _, temporaries, collectives, sent, ratio = rows[-1][3:10]
    assert float(params) == pytest.approx(zero3["memory"]["each device"]["params"] / 1e6, abs=0.005)
    assert float(temporaries) == pytest.approx(zero3["memory"]["each device"]["temporaries"] / 1e6, abs=0.005)
    assert int(collectives) == sum(check["expected_count"] for check in zero3["checks"])
    assert float(sent) == pytest.approx(sum(zero3["sent"].values()) / 1e6, abs=0.005)
    assert ratio == "1.000"


def test_strategies_agree(compared: Compared) -> None:
    *_, record = compared
    assert tuple(record["strategies"]) == STRATEGIES
    first = np.array(record["strategies"]["dp"]["losses"])
    assert len(first) == STEPS
    for found in record["strategies"].values():
        np.testing.assert_allclose(found["losses"], first, rtol=1e-5)
        assert found["worst_gradient"]["error"] < 1e-5
        assert len(found["seconds"]) == STEPS
        assert min(found["seconds"]) > 0


def test_dp_makes_five_exchanges_through_its_server(compared: Compared) -> None:
    *_, record = compared
    dp = record["strategies"]["dp"]
    assert [t["kind"] for t in dp["transfers"]] == ["scatter", "broadcast", "gather", "scatter", "gather"]
    assert sum(dp["sent"].values()) == dp["sent_expected"]
    assert dp["memory"]["server"]["total"] > dp["memory"]["others"]["total"]


def test_pictures(compared: Compared) -> None:
    _, out, _ = compared
    for theme, paper in ("", 1.0), ("-dark", 0.07):
        image = matplotlib.image.imread(out / f"compare{theme}.png")
        assert image[0, 0, :3] == pytest.approx(paper, abs=0.04)
        assert len(np.unique(image[::8, ::8, :3].reshape(-1, 3), axis=0)) > 20  # ink, lines, bars
        assert ET.parse(out / f"compare{theme}.svg").getroot().tag.endswith("svg")


def test_the_picture_draws_one_curve_and_the_largest_difference_from_it(compared: Compared) -> None:
    """Curves that lie on each other said nothing: of ten one saw the last."""
    _, out, record = compared
    svg = (out / "compare.svg").read_text()
    of = dict(zip(("loss", "stored", "apart", "sent"), re.split(r'<g id="axes_\d">', svg)[1:], strict=True))
    curves = re.findall(r'<path d="([^"]*)" clip-path="[^"]*" style="fill: none', of["loss"])
    assert [len(re.findall("[ML]", curve)) for curve in curves] == [STEPS]
    assert "<!-- the loss of dp -->" in of["loss"]
    assert "<!-- the largest difference from it, of zero3 -->" in of["apart"]
    first, other = (np.array(record["strategies"][name]["losses"]) for name in STRATEGIES)
    apart = abs(other - first)[other != first]
    (group,) = re.findall(r"<g clip-path[^>]*>(.*?)</g>", of["apart"], re.DOTALL)
    heights = -np.array(re.findall(r'<use [^>]*y="([\d.]+)"', group), float)
    assert len(heights) == len(apart)
    assert np.array_equal(np.argsort(heights, stable=True), np.argsort(apart, stable=True))


def test_a_misspelt_strategy_is_named_before_anything_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tyro.cli(compare.Options, args=["--strategies", "ddp", "zero33"])
    assert "did you mean 'zero3'" in re.sub(r"[\s│]+", " ", capsys.readouterr().err)  # whatever the box breaks
