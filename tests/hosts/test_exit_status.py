"""The exit status of a process, as its `atexit` handlers see it."""

import subprocess
import sys
from pathlib import Path

import pytest

import jaxpar

SCRIPT = """
import atexit, importlib.util, sys
spec = importlib.util.spec_from_file_location("exit_status", {path!r})
exit_status = importlib.util.module_from_spec(spec); spec.loader.exec_module(exit_status)
exit_status.watch_exit()
atexit.register(lambda: print(*exit_status.status_and_text(), flush=True))
{leave}
"""


@pytest.mark.parametrize(
    ("leave", "status", "text"),
    [
        ("sys.exit(7)", 7, ""),
        ("raise SystemExit(7)", 7, ""),
        ("import site, builtins; builtins.exit(7)", 7, ""),
        ("class Own(SystemExit): pass\nraise Own(5)", 5, ""),
        ("try: sys.exit(7)\nfinally: pass", 7, ""),
        ("sys.exit('no such file')", 1, "no such file"),
        ("sys.exit(True)", 1, ""),
        ("sys.exit(-1)", 255, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit()", 0, ""),
        ("pass", 0, ""),
        # Caught, or of a thread: the process goes on.
        ("try: sys.exit(7)\nexcept SystemExit as error: assert error.code == 7", 0, ""),
        ("error = SystemExit(3); error.code = 4; assert error.code == 4; raise error", 4, ""),
        ("import threading; t = threading.Thread(target=sys.exit, args=[7]); t.start(); t.join()", 0, ""),
    ],
)
def test_the_status_is_known_before_the_process_ends(leave: str, status: int, text: str) -> None:
    """Python passes it to no handler, so a rank that left by `sys.exit(7)` waited for the others as if it was done."""
    path = str(Path(jaxpar.__file__).parent / "hosts" / "exit_status.py")
    script = SCRIPT.format(path=path, leave=leave)
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert process.returncode == status, process.stderr
    assert process.stdout.strip() == f"{status} {text}".strip()
