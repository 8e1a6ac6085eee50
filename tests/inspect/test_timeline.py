"""`jaxpar timeline`: what is drawn is what runs, in text and as SVG, and bytes are those of the stash."""

import io
import itertools
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import jax
import optax
import pytest
from rich.console import Console

import jaxpar as jp
from jaxpar import models
from jaxpar.inspect.memory import slot_bytes
from jaxpar.inspect.timeline.drawing import draw, summary
from jaxpar.inspect.timeline.svg import svg
from jaxpar.parallel.pipeline.schedules import Schedule
from jaxpar.run.cli.timeline import TimelineOptions, main
from jaxpar.strategy import schedules as tables

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
SCHEDULES = [Schedule("1f1b", 4, 8), Schedule("1f1b", 4, 8, 2), Schedule("gpipe", 3, 5), Schedule("1f1b", 2, 6, 3)]
SCHEDULES += [Schedule("zb-h1", 3, 5), Schedule("zb-v", 2, 5, 2)]
TIME = {"F": 1, "B": 2, "I": 1, "W": 1}


NAMED = list(tables.SCHEDULES)
TINY = models.named("llama-tiny")


def lanes(schedule: Schedule, color: bool = False, width: int = 10_000) -> list[str]:
    """Each rank's lane, all bands of it in a row."""
    out = [""] * schedule.ranks
    for line in draw(schedule, width, color):
        assert len(line) <= width
        if match := re.match(r"rank (\d+) +", line.plain):
            out[int(match[1])] += line.plain[8:]
    return out


def shown(options: TimelineOptions, **console: object) -> str:
    file = io.StringIO()
    main(options, Console(file=file, width=80, highlight=False, **console))  # type: ignore[arg-type]
    return file.getvalue()


# -- text --------------------------------------------------------------------------------------------------------------


def test_text() -> None:
    assert [line.plain for line in draw(Schedule("1f1b", 2, 3), 40)] == [
        "tick    0 1     2     3     4",
        "rank 0  F0F1....F2B0--..B1--B2--",
        "rank 1  ..F0B0--F1B1--F2B2--....",
        "",
        "F1 and B1: forward and backward of microbatch 1; a dot is idle",
        "",
    ]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.title)
def test_a_cell_is_as_wide_as_it_is_long(schedule: Schedule) -> None:
    """On every rank, the idle part of the drawing is the bubble, and operations stand in the order of the table."""
    for rank, lane in enumerate(lanes(schedule)):
        cells = re.findall(r"\.+|[FBIW]\d+\.\d+[ -]*" if schedule.chunks > 1 else r"\.+|[FBIW]\d+[ -]*", lane)
        assert "".join(cells) == lane
        ops = [cell for cell in cells if cell[0] in TIME]
        unit = len(next(cell for cell in ops if cell[0] == "F"))
        assert {(cell[0], len(cell)) for cell in ops} == {(kind, unit * TIME[kind]) for kind in {c[0] for c in ops}}
        assert 1 - unit * sum(TIME[cell[0]] for cell in ops) / len(lane) == pytest.approx(float(schedule.bubble))
        names = [cell.rstrip(" -") for cell in ops]
        suffix = lambda op: f".{op.chunk}" if schedule.chunks > 1 else ""
        assert names == [f"{o.kind}{o.microbatch}{suffix(o)}" for column in schedule.table() for o in column[rank]]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.title)
@pytest.mark.parametrize("color", [False, True])
def test_wraps_without_losing_anything(schedule: Schedule, color: bool) -> None:
    unwrapped, wrapped = lanes(schedule, color), lanes(schedule, color, 80)
    numbers = lambda lane: re.findall(r"\d+(?:\.\d+)?", lane)
    assert [numbers(lane) for lane in wrapped] == [numbers(lane) for lane in unwrapped]
    heads = [line.plain for line in draw(schedule, 80, color) if line.plain.startswith("tick")]
    ticks = [int(n) for head in heads for n in head.split()[1:]]
    assert ticks == sorted(set(ticks))
    lengths = {len(line) for line in draw(schedule, 80, color) if line.plain.startswith("rank")}
    assert min(lengths) > 0.6 * max(lengths)  # bands are about equally long


def test_the_middle_of_a_long_schedule_is_left_out() -> None:
    lines = [line.plain for line in draw(Schedule("gpipe", 8, 64), 80)]
    assert len(lines) < 70
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if re.search(r"ticks \d+ to \d+ are left out here; --svg has them", line)]


def test_colours_only_where_there_are_some() -> None:
    plain = shown(TimelineOptions())
    assert "\x1b" not in plain
    assert "F0F1F2F3....F4" in plain
    assert max(map(len, plain.splitlines())) <= 80
    colored = shown(TimelineOptions(chunks=2), force_terminal=True, color_system="truecolor")
    assert len(set(re.findall(r"48;2;(\d+;\d+;\d+)m", colored))) == 4  # forward and backward, two shades each


def test_summary() -> None:
    numbers = summary(Schedule("1f1b", 4, 8, 2), 1_000_000)
    assert numbers["bubble"].startswith("15.8%")  # 3/2 of 9 1/2
    assert numbers["time"].startswith("28.5 = 3m + 3(p-1)/v")
    assert numbers["in flight"].startswith("11 (11 MB), 9 (9 MB), 7 (7 MB), 5 (5 MB) on ranks 0 to 3")
    assert numbers["room"].startswith("for 11 on every rank = 11 MB")
    assert summary(Schedule("gpipe", 4, 8))["in flight"].startswith("8 on every rank")
    halves = summary(Schedule("zb-v", 4, 8, 2))
    assert halves["schedule"].endswith(": 51 slots")
    assert halves["time"] == "25.5 = 3m + (p-1)/v: a rank's layers take 1 for F, 1 for I, 1 for W"
    assert halves["bubble"].startswith("5.9% of the time; 0.0% between a rank's first operation and its last")


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.title)
def test_svg(schedule: Schedule) -> None:
    text = svg(schedule, ["held"] * schedule.ranks)
    assert "prefers-color-scheme:dark" in text
    root = ET.fromstring(text)
    assert root.findtext(f"{SVG}title") == f"{schedule.title}: bubble {float(schedule.bubble):.1%}"
    fills: dict[str, set[str]] = {}
    rows: dict[float, list[tuple[float, float, str]]] = {}
    for group in root.iter(f"{SVG}g"):
        rect, name = group.find(f"{SVG}rect"), group.findtext(f"{SVG}title") or ""
        assert rect is not None
        assert group.findtext(f"{SVG}text") == re.split(r"\D", name[1:])[0]
        fills.setdefault(name[0], set()).add(rect.get("fill") or "")
        x, y, width = (float(rect.get(key) or 0) for key in ("x", "y", "width"))
        rows.setdefault(y, []).append((x, width, name))
    kinds = "FIW" if schedule.branches else "FB"
    assert {kind: len(colors) for kind, colors in fills.items()} == dict.fromkeys(kinds, schedule.chunks)
    assert len(set().union(*fills.values())) == len(kinds) * schedule.chunks
    lane = max(float(rect.get("width") or 0) for rect in root.iter(f"{SVG}rect") if rect.get("class") == "idle")
    for rank, row in enumerate(rows[y] for y in sorted(rows)):
        assert row == sorted(row)
        assert all(x + width <= next_x + 1e-2 for (x, width, _), (next_x, _, _) in itertools.pairwise(row))
        assert 1 - sum(width for _, width, _ in row) / lane == pytest.approx(float(schedule.bubble), abs=1e-3)
        ops = [(tick, op) for tick, column in enumerate(schedule.table()) for op in column[rank]]
        stage = lambda op, rank=rank: schedule.stage(rank, op.chunk)
        assert [name for *_, name in row] == [f"{o.kind}{o.microbatch}, stage {stage(o)}, tick {t}" for t, o in ops]


def test_a_table_from_a_file(tmp_path: Path) -> None:
    """A table from `--csv` is drawn like the schedule that wrote it; a table that cannot run says why."""
    path = tmp_path / "mine.csv"
    assert "mine.csv" in shown(TimelineOptions(schedule="zb-v", chunks=2, csv=path))
    drawn, expected = shown(TimelineOptions(table=path)), shown(TimelineOptions(schedule="zb-v", chunks=2))
    assert drawn == expected.replace("zb-v, 4 ranks", "mine, 4 ranks")
    path.write_text("0F0,0B0\n1B0,1F0\n")
    with pytest.raises(ValueError, match="rank 1 cannot go on: 1B0 needs 1F0"):
        shown(TimelineOptions(table=path))
    path.write_text("\n".join(Schedule("zb-h1", 2, 2).csv()))
    size = 8 * TINY.config.dim * 4 * TINY.config.layers // 2  # inputs of a rank's layers
    text = shown(TimelineOptions(table=path, model="llama-tiny", length=8, remat="layer"))
    assert f"2 ({2 * size / 1e3:.1f} kB) on every rank" in text


@pytest.mark.parametrize("name", ["", *NAMED])
def test_pictures_of_the_docs_are_what_the_command_draws(tmp_path: Path, name: str) -> None:
    """`pipe.svg` of 1F1B with chunks, and one for every schedule."""
    options = {"schedule": name or "1f1b", "chunks": 2 if not name or tables.SCHEDULES[name].placement == "V" else 1}
    shown(TimelineOptions(**options, svg=tmp_path / "drawn.svg"))  # type: ignore[arg-type]
    drawn = ROOT / "docs" / "assets" / (f"pipe-{name}.svg" if name else "pipe.svg")
    assert (tmp_path / "drawn.svg").read_text() == drawn.read_text()
    page = (ROOT / "docs" / "strategies" / ("pipe-all.md" if name else "pipe.md")).read_text()
    assert f"../assets/{drawn.name})" in page


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "width", "chunks"), [("f32", 4, 1), ("bf16", 2, 2)])
def test_a_slot_holds_the_inputs_of_its_layers(precision: str, width: int, chunks: int) -> None:
    """Under remat="layer" the residual stream before each layer of the chunk, and no weights."""
    text = f"pipe=2,microbatches=4,remat=layer,chunks={chunks},precision={precision}"
    step = jp.make_train_step(TINY.model, optax.sgd(0.1), text, mesh=jax.devices()[:2])
    rows, layers = 16 // 4, TINY.config.layers // 2 // chunks
    assert slot_bytes(step, TINY.example(16, 32)) == layers * rows * 32 * TINY.config.dim * width


def test_model_by_name() -> None:
    options = TimelineOptions(pipe=4, microbatches=8, model="llama-tiny", rows=16, length=32, remat="layer")
    size = 16 // 8 * 32 * TINY.config.dim * 4
    assert f"7 ({7 * size / 1e3:.0f} kB), 5 ({5 * size / 1e3:.0f} kB)" in shown(options)
    with pytest.raises(ValueError, match="pipe=64 ranks need as many devices, and jax already runs on 8"):
        shown(TimelineOptions(pipe=64, model="llama-tiny"))


def test_errors() -> None:
    with pytest.raises(ValueError, match="microbatches=6 is no multiple of it; use 8 microbatches, or chunks=1"):
        shown(TimelineOptions(microbatches=6, chunks=2))
    with pytest.raises(ValueError, match="pipe=0 is not a count"):
        shown(TimelineOptions(pipe=0))
