"""If a host cannot write a checkpoint, all hosts raise the error, none waits, and older checkpoints survive."""

import asyncio
import concurrent.futures
import errno
import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from workers import Table

from jaxpar.checkpoint.about import UNFINISHED, complete_steps
from jaxpar.checkpoint.commit import Writer, remove_unfinished, wait
from jaxpar.checkpoint.write import _wait_for_writes
from jaxpar.hosts import outcomes
from jaxpar.hosts.outcomes import Outcomes

Write = Callable[[Path], object]


def hosts(count: int) -> list[Writer]:
    table = Table()
    return [Writer(Outcomes(host, count, table if count > 1 else None)) for host in range(count)]


def save(writers: list[Writer], folder: Path, number: int, keep: Any = None, writes: Any = None) -> list[str]:
    """Save on every host, and return each host's error or "". `writes` replaces the write of some hosts, by host."""
    write_file = lambda host: lambda place: (place / f"{host}").write_text(str(number)) and None
    commits = [
        writer.begin(folder, number, keep, (writes or {}).get(host, write_file(host)))
        for host, writer in enumerate(writers)
    ]
    errors = []
    for commit in commits:
        assert concurrent.futures.wait([commit], 600).done
        try:
            wait(commit)
            errors.append("")
        except ValueError as error:
            errors.append(str(error))
    return errors


def full(_: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_files_are_on_the_disk_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure a checkpoint with its name would hold empty files."""
    fsync, synced = os.fsync, set[str]()

    def record_fsync(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record_fsync)
    assert save(hosts(2), tmp_path, 1) == [""] * 2
    files = {path.relative_to(tmp_path / "1").as_posix() for path in (tmp_path / "1").rglob("*")}
    unfinished = {path.partition(f"{UNFINISHED}/")[2] for path in synced}
    assert {"0", "1"} <= files & unfinished
    assert str(tmp_path) in synced  # the folder with the checkpoint's name


def test_a_write_that_fails_is_raised_once_all_have_ended() -> None:
    ended = []

    async def write(number: int) -> None:
        ended.append(number)
        if number == 0:
            full(Path())

    with pytest.raises(OSError, match="No space left on device"):
        asyncio.run(_wait_for_writes([write(number) for number in range(3)]))
    assert ended == [0, 1, 2]


@pytest.mark.parametrize("keep", [None, *range(1, 7)])
def test_all_write_and_as_many_as_asked_are_kept(keep: int | None, tmp_path: Path) -> None:
    """With 4 or more to keep, the first ones were removed before there were as many: of 12 with keep=4, 2 stayed."""
    for count in (1, 3):
        writers, folder, names = hosts(count), tmp_path / str(count), []
        folder.mkdir()
        for number in (1, 2, 3, 5, 8, 13, 21, 34):
            assert save(writers, folder, number, keep) == [""] * count
            names.append(str(number))
            assert {path.name for path in folder.iterdir()} == {*names[-(keep or 8) :]}
        files = sorted(path.name for path in (folder / "34").iterdir())
        assert files == [*map(str, range(count)), "commit_success.txt"]


@pytest.mark.parametrize("count", [1, 3])
def test_a_host_that_cannot_write_is_named_and_the_next_save_is_another_one(count: int, tmp_path: Path) -> None:
    """Once a host had failed, Orbax's threads waited for each other for ever, and the run waited for them."""
    writers = hosts(count)
    assert not any(save(writers, tmp_path, 1, keep=1))
    errors = save(writers, tmp_path, 2, keep=1, writes={count - 1: full})
    process = f"process {count - 1}: " if count > 1 else ""
    message = (
        f"a checkpoint could not be written to {tmp_path}: {process}No space left on device; make room, or see that"
    )
    assert all(text.startswith(message) for text in errors)
    assert (tmp_path / "1").is_dir()
    assert not (tmp_path / "2").exists()
    bug = lambda _: {}["x"]
    assert all(
        "KeyError: 'x'; see what it says" in text for text in save(writers, tmp_path, 3, writes={count - 1: bug})
    )
    assert not any(save(writers, tmp_path, 2, keep=1))
    assert not any(save(writers, tmp_path, 4, keep=1))
    assert [x.name for x in tmp_path.iterdir() if x.name.isdigit()] == ["4"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_place_that_is_gone_is_not_made_again(count: int, tmp_path: Path) -> None:
    writers, folder = hosts(count), tmp_path / "checkpoints"
    folder.mkdir()
    assert not any(save(writers, folder, 1))
    shutil.rmtree(folder)
    process = "process 0: " if count > 1 else ""
    advice = "create it, and see that all hosts have the same folder"
    message = f"a checkpoint could not be written to {folder}: {process}No such file or directory; {advice}"
    assert save(writers, folder, 2) == [message] * count
    assert not folder.exists()


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    """Two saves of one process would mix up their entries in the table."""
    first, second = hosts(2)
    go, order = threading.Event(), []
    slow = lambda place: (go.wait(600), order.append(place.name))
    fast = lambda place: order.append(place.name)
    commits = [writer.begin(tmp_path, 1, None, slow) for writer in (first, second)]
    commits += [writer.begin(tmp_path, 2, None, fast) for writer in (second, first)]
    go.set()
    for commit in commits:
        wait(commit)
    assert [name.partition(".")[0] for name in order] == ["1", "1", "2", "2"]
    assert sorted(x.name for x in tmp_path.iterdir()) == ["1", "2"]


def test_a_host_that_says_nothing_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait had no time limit. It uses a monotonic clock, so setting the clock does not change it."""
    monkeypatch.setattr(outcomes, "LONGEST", 0.2)
    first, _ = hosts(2)
    commit = first.begin(tmp_path, 1, None, lambda place: None)
    with pytest.raises(ValueError, match=r"process 1 has not said in 0.2 s how it fared"):
        wait(commit)
    assert not any(path.name.isdigit() for path in tmp_path.iterdir())


def test_a_host_that_fails_and_goes_on_is_not_missed(tmp_path: Path) -> None:
    """Its entry about the next save replaced the one that the others still waited for."""
    first, second = hosts(2)
    failed = [second.begin(tmp_path, number, None, full) for number in (1, 2)]
    concurrent.futures.wait(failed, 0.5)
    commits = [first.begin(tmp_path, number, None, lambda place: None) for number in (1, 2)]
    for commit in (*commits, *failed):
        with pytest.raises(ValueError, match="process 1: No space left on device"):
            wait(commit)


def test_a_read_that_fails_on_one_host_is_told_to_all() -> None:
    """Other hosts did not get the reason. An error without a text counts as well."""

    def fails(error: Exception) -> None:
        raise error

    for error, reason in ((ValueError("params/w is damaged"), "params/w is damaged"), (OSError(), "OSError")):
        first, second = hosts(2)
        with concurrent.futures.ThreadPoolExecutor() as threads:
            sound = threads.submit(first.attempt_on_all_hosts, "restore", lambda: 7)
            damaged = threads.submit(second.attempt_on_all_hosts, "restore", functools.partial(fails, error))
        assert sound.result() == (7, None, f"process 1: {reason}")
        assert damaged.result() == (None, error, f"process 1: {reason}")


def test_odd_neighbours_are_no_dead_end(tmp_path: Path) -> None:
    """A folder `0100`, a file `200`, and a link with the name of an unfinished checkpoint do no harm."""
    (tmp_path / "elsewhere").mkdir()
    folder = tmp_path / "checkpoints"
    (folder / "0100").mkdir(parents=True)
    (folder / "200").write_text("")
    (folder / "3.orbax-checkpoint-tmp").symlink_to(tmp_path / "elsewhere")
    assert complete_steps(folder) == []
    assert save(hosts(1), folder, 3, keep=1) == [""]
    assert save(hosts(1), folder, 4, keep=1) == [""]
    assert complete_steps(folder) == [4]
    (folder / "5.orbax-checkpoint-tmp").symlink_to(tmp_path / "elsewhere")
    remove_unfinished(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["0100", "200", "4"]
    assert (tmp_path / "elsewhere").is_dir()


@pytest.mark.slow
def test_a_program_whose_last_save_fails_does_not_end_well(tmp_path: Path) -> None:
    """If the folder was removed, the program waited for ever at its end. If the folder could not be written to, the
    program showed a traceback and ended with status 0.
    """
    program = f"""
import atexit, shutil
from pathlib import Path
from jaxpar.checkpoint.commit import writer
atexit.register(lambda: print("the program's own end"))
folder = Path({str(tmp_path / "gone")!r})
folder.mkdir()
writer().begin(folder, 1, None, lambda place: shutil.rmtree(folder) or (place / "x").write_text(""))
print("the end")
"""
    ended = subprocess.run([sys.executable, "-c", program], timeout=1800, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stdout == "the end\nthe program's own end\n"
    message = f"error: a checkpoint could not be written to {tmp_path}/gone: No such file or directory; create it"
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
