"""`make test ROOM=parallel/pipeline`: print the paths of one room's tests, and of the examples in its code.

parallel/pipeline     the folder tests/parallel/pipeline
step/rows/test_rows.py  one file below tests/
inspect/predict       a room of jaxpar/ whose tests are files: tests/inspect/test_predict*.py
models/llama          a room of jaxpar/ that is tested with the rooms beside it: tests/models
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS, PACKAGE = ROOT / "tests", ROOT / "jaxpar"


def paths_of(room: str) -> list[Path]:
    """Return the tests of a room and the code whose examples are run with them; nothing where it has no tests."""
    room = room.removeprefix("tests/").removeprefix("jaxpar/").strip("/")
    if not Path(room).parts or ".." in Path(room).parts:
        return []
    code = next((path for path in (PACKAGE / room, PACKAGE / f"{room}.py") if path.exists()), None)
    return found + [code] * (code is not None) if (found := _tests_of(room, code is not None)) else []


def _tests_of(room: str, is_code: bool) -> list[Path]:
    if (TESTS / room).is_file() or _has_tests(TESTS / room):
        return [TESTS / room]
    if not is_code:
        return []
    parent, name = (TESTS / room).parent, Path(room).stem
    if found := sorted({*parent.glob(f"test_{name}.py"), *parent.glob(f"test_{name}_*.py")}):
        return found
    return [parent] if parent != TESTS and _has_tests(parent) else []


def _has_tests(folder: Path) -> bool:
    return folder.is_dir() and any(folder.rglob("test_*.py"))


def rooms() -> list[str]:
    """Return the names of all rooms that have tests: folders of tests/, and rooms of jaxpar/."""
    folders = [path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*") if path.is_dir()]
    code = [path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.glob("*.py")]
    code += [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*") if path.is_dir()]
    return sorted(room for room in {*folders, *code} if "__" not in room and paths_of(room))


if __name__ == "__main__":
    given = sys.argv[1]
    paths = paths_of(given)
    if not paths:
        known = "\n".join(f"  {room}" for room in rooms())
        sys.exit(
            f"ROOM={given}: no room of that name has tests. Name a folder or a file below tests/, or one of these "
            f"rooms, as in `make test ROOM=parallel/pipeline`:\n{known}"
        )
    print(*(path.relative_to(ROOT).as_posix() for path in paths))
