"""The list of planted defects does not rot, and a room's tests are found by its name."""

import ast
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import rooms
from conftest import finds_defect
from defects import DEFECTS, Defect
from mutants import chosen

ROOT = Path(__file__).parents[1]


def problems(defect: Defect) -> Iterator[str]:
    sound, (path, _, name) = (ROOT / "jaxpar" / defect.file).read_text(), defect.tests.partition("::")
    if (times := sound.count(defect.old)) != 1:
        yield f"{defect.name}: {defect.file} has {defect.old!r} {times} times, not once"
    ast.parse(sound.replace(defect.old, defect.new), defect.name)
    tests = ROOT / "tests" / path
    if not tests.exists() or (name and f"def {name}(" not in tests.read_text()):
        yield f"{defect.name}: tests/{defect.tests} is not there"


def test_each_defect_is_one_change_of_a_program_that_still_reads() -> None:
    assert not [problem for defect in DEFECTS for problem in problems(defect)]


def test_defects_are_sixty_with_names_of_their_own_in_every_room() -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 60
    planted = {Path(defect.file).parts[0] for defect in DEFECTS}
    code = "collectives layout slicing parallel numerics strategy step checkpoint hosts inspect run data models"
    assert planted >= {*code.split()}


def test_defects_are_chosen_by_room_of_code_or_tests_or_by_name() -> None:
    assert [defect.name for defect in chosen("", "ring-chunk")] == ["ring-chunk"]
    assert {defect.file.split("/")[0] for defect in chosen("parallel", "")} >= {"parallel", "strategy"}
    with pytest.raises(SystemExit, match="ROOM=nowhere ONLY=: no defect is of that room or name; name a room"):
        chosen("nowhere", "")


@pytest.mark.parametrize(
    ("room", "paths"),
    [
        ("parallel/pipeline", ["tests/parallel/pipeline", "jaxpar/parallel/pipeline"]),
        ("tests/parallel/pipeline/", ["tests/parallel/pipeline", "jaxpar/parallel/pipeline"]),
        ("step/rows/test_rows.py", ["tests/step/rows/test_rows.py"]),
        ("inspect/predict", [*(f"tests/inspect/test_predict{x}.py" for x in ("", "_axes")), "jaxpar/inspect/predict"]),
        ("models/llama", ["tests/models", "jaxpar/models/llama"]),
        ("backend/buckets", ["tests/backend/test_buckets.py", "jaxpar/backend/buckets.py"]),
        ("../jaxpar", []),
        (".", []),
        ("parallel/nowhere", []),
    ],
)
def test_a_room_has_its_tests_and_the_examples_in_its_code(room: str, paths: list[str]) -> None:
    assert [path.relative_to(ROOT).as_posix() for path in rooms.paths_of(room)] == paths


def test_a_room_that_does_not_exist_is_told_which_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rooms.py", "parallel/nowhere"])
    with pytest.raises(SystemExit, match="no room of that name has tests") as error:
        runpy.run_path(rooms.__file__, run_name="__main__")
    listed = str(error.value).splitlines()[1:]
    assert "  parallel/pipeline" in listed
    assert len(listed) == len(rooms.rooms())
    assert all(rooms.paths_of(room) for room in rooms.rooms())


def test_what_a_planted_defect_needs_is_always_run() -> None:
    for defect in DEFECTS:
        assert finds_defect(f"tests/{defect.tests}")
    assert finds_defect("tests/collectives/test_order.py::test_of_a_file_that_is_named_whole")
    assert not finds_defect("tests/layout/test_state.py::test_pad")  # named is test_padding
    assert not finds_defect("jaxpar/collectives/order.py::jaxpar.collectives.order")
