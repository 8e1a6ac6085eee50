"""The house: rooms that hold one idea, imports that run one way, files that a reader can hold."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxpar
from jaxpar.program.primitives import PRIMITIVES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxpar"
# From the ground up: a file may import from its own room and from rooms of lower floors, types included. A room is a
# folder of `jaxpar/` with all that is below it, a folder of `jaxpar/parallel/`, or a file of `jaxpar/`.
HOUSE = (PACKAGE / "README.md").read_text()
FLOOR = {
    room.removesuffix(".py").rstrip("/"): int(floor)
    for floor, room in re.findall(r"^\| (\d+) \| `([\w/.]+)` \|", HOUSE, re.MULTILINE)
}
# They open the house: each may import from every room, and no room imports them.
DOORS = (PACKAGE / "__init__.py", PACKAGE / "__main__.py", PACKAGE / "parallel" / "__init__.py")
FILES = sorted({*PACKAGE.rglob("*.py")} - {*DOORS})
MOST_FLOORS, MOST_NAMES = 12, 20
MOST_LINES = 500


def room(path: Path) -> str:
    inside = path.relative_to(PACKAGE)
    return "/".join(inside.parts[: 2 if inside.parts[0] == "parallel" else 1]).removesuffix(".py")


def module(name: str) -> Path | None:
    """The file of a dotted name, if it is one of ours."""
    path = ROOT.joinpath(*name.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()), None)


@functools.cache  # of all files it takes a second, which not every process of the tests needs
def imported(path: Path) -> set[Path]:
    """Our files that a file imports, anywhere in it."""
    found = set()
    package = list(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {module(name.name) for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {module(f"{base}.{name.name}") or module(base) for name in node.names}
    return {p for p in found if p is not None and PACKAGE in (p, *p.parents)}


def test_no_import_runs_up() -> None:
    up = [
        f"{path.relative_to(ROOT)} is on floor {FLOOR[room(path)]} and imports {other.relative_to(ROOT)} "
        f"(floor {FLOOR.get(room(other), 'of the doors')})"
        for path in FILES
        for other in imported(path)
        if other in DOORS or (room(other) != room(path) and FLOOR[room(other)] >= FLOOR[room(path)])
    ]
    assert not up, "\n".join(up)


def test_there_is_no_circle() -> None:
    done: set[Path] = set()

    def visit(path: Path, above: tuple[Path, ...]) -> None:
        assert path not in above, "a circle: " + " -> ".join(p.relative_to(ROOT).as_posix() for p in (*above, path))
        if path not in done:
            for other in imported(path) - {path}:
                visit(other, (*above, path))
            done.add(path)

    for path in FILES:
        visit(path, ())


def test_the_house_has_these_rooms() -> None:
    assert {*FLOOR} == {room(path) for path in FILES}
    assert len({*FLOOR.values()}) <= MOST_FLOORS
    names = {path.relative_to(PACKAGE).parts[0] for path in FILES}
    assert len(names) <= MOST_NAMES, sorted(names)


def test_files_stay_small() -> None:
    long = {p.relative_to(ROOT).as_posix(): n for p in FILES if (n := len(p.read_text().splitlines())) > MOST_LINES}
    assert not long, f"more than {MOST_LINES} lines: {long}"


def test_lists_of_primitives_stand_with_the_primitives() -> None:
    """What a primitive is, its record says (`program/primitives.py`); a list elsewhere is one that the next forgets."""
    names = {*PRIMITIVES} - {"name", "split", "copy", "reduce"}

    found = []
    for path in FILES:
        if room(path) == "program":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            literal = ast.List | ast.Tuple | ast.Set
            parts = node.elts if isinstance(node, literal) else []
            if isinstance(node, ast.Call):  # and "a b c".split()
                parts = [*node.args, getattr(node.func, "value", None)]
            texts = [x.value for x in parts if isinstance(x, ast.Constant) and isinstance(x.value, str)]
            words = [word for text in texts for word in text.split()]
            known = [word for word in words if word in names]
            if len(known) > 2 and 2 * len(known) >= len(words):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {', '.join(known)}")
    assert len(found) <= 12, "\n".join(found)


def test_a_rooms_page_is_short_and_names_its_files() -> None:
    for page in PACKAGE.rglob("README.md"):
        text, where = page.read_text(), page.relative_to(ROOT)
        assert len(text.splitlines()) <= 60, where
        assert max(map(len, text.splitlines())) <= 140, where
        if page.parent != PACKAGE:
            missing = [p.name for p in page.parent.glob("*.py") if p.stem != "__init__" and f"`{p.name}`" not in text]
            assert not missing, f"{where} does not say what {missing} are for"
        for path in re.findall(r"`([\w/]+\.py)`", text):
            exists = any((folder / path).exists() for folder in (PACKAGE, ROOT)) or any(page.parent.rglob(path))
            assert exists, f"{where} names {path}"


def test_the_tour_names_what_is_there() -> None:
    steps = re.findall(r"^\d\. (.*(?:\n   .*)*)", HOUSE.partition("## Follow one gradient")[2], re.MULTILINE)
    assert len(steps) == 9
    for step in steps:
        names = re.findall(r"`([\w./]+)`", step)
        texts = [(PACKAGE / name).read_text() for name in names if name.endswith(".py")]
        for name in (n.rpartition(".")[2] for n in names if not n.endswith(".py")):
            assert any(name in text for text in texts), f"the tour names {name}, which its files lack"


def test_a_step_loads_no_reports() -> None:
    """`make.py` imported all of `inspect/`, whether a step explained itself or not."""
    code = "import sys, jaxpar as jp; jp.make_train_step; print(*(m for m in sys.modules if 'jaxpar.inspect' in m))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_rooms_are_attributes_as_well() -> None:
    """`jp.data.Rows` was an error until something had imported `jaxpar.data`."""
    code = "import jaxpar as jp; print(jp.data.Rows.__name__, jp.models.named.__name__)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "Rows named\n"
    with pytest.raises(AttributeError, match=r"^module 'jaxpar' has no attribute 'nonsense'$"):
        jaxpar.nonsense  # noqa: B018


def test_dir_shows_the_public_names_and_no_more() -> None:
    assert dir(jaxpar) == sorted([*jaxpar.__all__, "__version__"])


def test_a_class_has_a_name_of_its_own() -> None:
    """Models apart: each has its `Config` and its `Layer`."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] != "models":
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    twice = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not twice, f"one name, two meanings: {twice}"


UNPICKLING = r"""
    \b(?:import|from)\s+(?:[\w.]+\s*,\s*)*(?:_?c?[pP]ickle|cloudpickle|dill|marshal|shelve|joblib|multiprocessing)\b
  | \bimport_module\(\s*["'](?:pickle|cloudpickle|dill|marshal|shelve|joblib|multiprocessing)
  | \b(?:read_pickle|unpickle|Unpickler|recv_pyobj|serialize_executable|unsafe_load|full_load|UnsafeLoader|FullLoader)\b
  | allow_pickle\s*=\s*(?!False\b)
  | \byaml\.(?:load|load_all)\(
  | \btorch\.load\((?![^()]*(?:\([^()]*\)[^()]*)*\bweights_only\s*=\s*True)
"""


def unpickles(text: str) -> list[str]:
    return [found[0].strip() for found in re.finditer(UNPICKLING, text, re.VERBOSE)]


def test_nothing_unpickles_what_comes_from_outside_the_process() -> None:
    """`jp.bisect` between two processes unpickled what a stranger sent, and so ran the stranger's code."""
    found = {path.relative_to(ROOT).as_posix(): unpickles(path.read_text()) for path in FILES}
    assert not any(found.values()), {path: names for path, names in found.items() if names}


UNPICKLES = """
import pickle
import os, pickle as p
from pickle import loads
import marshal
import cloudpickle
from multiprocessing.connection import Client, Listener
import multiprocessing
importlib.import_module('pickle')
np.load(path, allow_pickle=True)
np.load(path, allow_pickle=trusted)
torch.load(path)
torch.load(str(path), map_location='cpu')
torch.load(path, weights_only=False)
pd.read_pickle(path)
yaml.load(text, yaml.Loader)
yaml.unsafe_load(text)
yaml.parse(text, yaml.UnsafeLoader)
from jax.experimental import serialize_executable
"""
HARMLESS = """
np.load(path)
np.load(path, mmap_mode='r', allow_pickle=False)
yaml.safe_load(text)
torch.load(str(path), weights_only=True)
# pickled objects are refused
"""


def test_the_search_finds_each_way_to_unpickle_and_no_other_line() -> None:
    assert not [line for line in UNPICKLES.strip().splitlines() if not unpickles(line)]
    assert not unpickles(HARMLESS)
