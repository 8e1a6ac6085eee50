"""`make mutants`: plant each defect of defects.py in a copy of the tree, run the tests that must find it, and tell.

    make mutants                   all of them, on the cells of `make test`, one after another
    make mutants ROOM=parallel     those whose tests lie there, or whose code does
    make mutants ONLY=ring-chunk   one of them
    make mutants EVERY=3           on the cells of continuous integration

A defect has fallen where a test fails with it that passes without it. The tree itself is never changed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from defects import DEFECTS, Defect

ROOT = Path(__file__).parent.parent
LONGEST = 1200  # seconds that the tests of one defect may take: a dropped message may be waited for
# What may survive: of 60, 10 on the cells of `make test`, and 3 on half of all cells.
SPARED, SPARED_BY_HALF = 10 / 60, 3 / 60


class Outcome(NamedTuple):
    """What became of one defect.

    Attributes:
      defect: which one.
      fell: whether a test has found it.
      by: the test that found it, how the run ended, or why it counts as not found.
      seconds: how long its tests took.
    """

    defect: Defect
    fell: bool
    by: str
    seconds: float


class Copy:
    """A copy of the tree in which defects are planted.

    Args:
      folder: where it is made.
      cells: the options of pytest that choose cells.
    """

    def __init__(self, folder: Path, cells: Sequence[str]):
        self.folder, self.cells = folder / "jaxpar", [*cells]
        # With their bytecode, which else each run of the tests would make anew.
        left_out = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "site", "runs")
        shutil.copytree(ROOT, self.folder, ignore=left_out, symlinks=True)
        for environment in ROOT.glob(".venv*"):
            (self.folder / environment.name).symlink_to(environment.resolve())

    def judge(self, defect: Defect) -> Outcome:
        """Plant one defect, run its tests, take it out again."""
        begin, path = time.monotonic(), self.folder / "jaxpar" / defect.file
        sound = path.read_text()
        assert sound.count(defect.old) == 1, f"{defect.name}: its old text is not there once"
        path.write_text(sound.replace(defect.old, defect.new))
        try:
            # The examples in the file are tests too, and come first, as they take no time.
            status, failed = self._tested([f"jaxpar/{defect.file}", f"tests/{defect.tests}", *self.cells])
        finally:
            path.write_text(sound)
        if status in (0, 5):
            by = "no test fails" if status == 0 else "there is no test in these cells"
        elif failed:
            by = ", ".join(failed)
        else:
            by = "a hang" if status is None else f"the end of the process, with status {status}"
        is_sound = not failed or self._tested(failed)[0] == 0
        by = by if is_sound else f"{by} fails without the defect too"
        return Outcome(defect, status not in (0, 5) and is_sound, by, time.monotonic() - begin)

    def _tested(self, words: Sequence[str]) -> tuple[int | None, list[str]]:
        """Run pytest; return its status, None where it does not end, and the tests that failed."""
        cache = self.folder / ".pytest_cache"
        shutil.rmtree(cache, ignore_errors=True)
        command = [sys.executable, "-m", "pytest", "-n0", "-q", "-x", "--tb=no", *words]
        env = os.environ | {"PYTHONPATH": str(self.folder)}
        ran = subprocess.Popen(command, cwd=self.folder, env=env, start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        try:
            status = ran.wait(LONGEST)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if ran.poll() is None:
                os.killpg(ran.pid, 9)  # with the processes that its tests have started
                ran.wait()
        failed = cache / "v" / "cache" / "lastfailed"
        return status, [*json.loads(failed.read_text())] if failed.exists() else []


def chosen(room: str, only: str) -> list[Defect]:
    """Return the defects of a room, of its tests or its code, or the one of a name."""
    room = room.strip("/")
    inside = lambda path: not room or path == room or path.startswith(f"{room}/")
    found = [d for d in DEFECTS if (inside(d.tests) or inside(d.file)) and only in ("", d.name)]
    if not found:
        rooms = sorted({path.partition("/")[0] for d in DEFECTS for path in (d.file, d.tests) if "/" in path})
        raise SystemExit(
            f"ROOM={room} ONLY={only}: no defect is of that room or name; name a room ({', '.join(rooms)}) or a "
            f"defect ({', '.join(d.name for d in DEFECTS)})"
        )
    return found


def main() -> None:
    """Judge the chosen defects and print a table; exit with 1 where more survive than may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", default="8", help="of the cells of each test one in so many")
    parser.add_argument("--from", dest="start", default="0", help="the place of the first of these")
    parser.add_argument("--slow", action="store_true", help="with the tests marked slow")
    parser.add_argument("--room", default="", help="the defects of one room")
    parser.add_argument("--only", default="", help="one defect, by its name")
    options = parser.parse_args()
    cells = ["--sample", options.sample, "--from", options.start, *([] if options.slow else ["-m", "not slow"])]
    defects, outcomes = chosen(options.room, options.only), []
    with tempfile.TemporaryDirectory(prefix="jaxpar-mutants-") as folder:
        copy = Copy(Path(folder), cells)
        for defect in defects:
            outcomes.append(outcome := copy.judge(defect))
            verdict = "fell" if outcome.fell else "SURVIVED"
            print(f"{verdict:<9}{outcome.seconds:5.0f} s  {defect.name:<20} {outcome.by}", flush=True)
    survivors = [outcome.defect for outcome in outcomes if not outcome.fell]
    print(f"\n{len(outcomes) - len(survivors)} of {len(outcomes)} defects fell")
    for defect in survivors:
        print(f"  {defect.name} ({defect.file}, tests/{defect.tests}): {defect.what} {defect.survives}".rstrip())
    unexplained = [defect for defect in survivors if not defect.survives]
    most = int(len(outcomes) * (SPARED_BY_HALF if options.slow else SPARED))
    if len(unexplained) > most:
        sys.exit(f"{len(unexplained)} survive without a reason, {most} may: write a test that finds them")


if __name__ == "__main__":
    main()
