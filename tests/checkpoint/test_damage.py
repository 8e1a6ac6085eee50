"""An error names damaged arrays and files, and none is restored in silence, as 8 of 12 flipped bits once were."""

import errno
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from layouts import random_state, saved, step

import jaxpar as jp
from jaxpar.checkpoint import write
from jaxpar.checkpoint.about import ABOUT, VERSION
from jaxpar.checkpoint.checkpoints import Checkpoints


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    random_state(folder)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "run")
    return tmp_path / "run"


def files(folder: Path) -> list[Path]:
    """Return the files whose content is read. Of Orbax's marker, only the name matters."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    return [path for path in paths if path.name != "commit_success.txt"]


def read_or_error(read: Callable[[], dict[str, bytes]]) -> dict[str, bytes] | str:
    """Return the arrays that are read, or the text of the error."""
    try:
        return read()
    except ValueError as error:
        return str(error)


def after(number: int, state: Any) -> Any:
    """Return the state with another number of steps."""
    return replace(state, step=jax.device_put(np.int32(number), state.step.sharding))


def kind(path: Path) -> str:
    """Return the kind of a file: "arrays", or its name."""
    return "arrays" if path.parent.name == "d" else path.name


def test_every_flipped_bit_is_named_or_harmless(sound: Path, folder: Path) -> None:
    """Flip forty bits in each kind of file."""
    rng, expected = random.Random(0), saved(sound)
    kinds = {name: list(paths) for name, paths in itertools.groupby(sorted(files(folder), key=kind), key=kind)}
    assert {"arrays", "metadata", "manifest.ocdbt", "_METADATA"} <= {*kinds}
    for paths in kinds.values():
        for _ in range(40):
            path = rng.choice(paths)
            content = path.read_bytes()
            position = rng.randrange(len(content))
            flipped = bytes([content[position] ^ 1 << rng.randrange(8)])
            path.write_bytes(content[:position] + flipped + content[position + 1 :])
            result = read_or_error(lambda: saved(folder))
            if isinstance(result, str):
                messages = [f": {name} is not what was written" for name in expected]
                assert any(text in result for text in [path.name, *messages]), result
            else:  # a bit of JSON may be a space
                assert (result, path.name) == (expected, "metadata"), (path, position)
            path.write_bytes(content)
    assert saved(folder) == expected


def test_a_flipped_bit_within_a_large_array_is_not_restored(tmp_path: Path) -> None:
    """The bit is far from the ends of its file, so that only the checksum of its chunk covers it."""
    large = jp.Model(
        init=lambda key: {"w": jax.random.normal(key, (2048, 512))}, loss=lambda p, b, key: (p["w"] * b["x"]).mean()
    )
    sgd_step = jp.make_train_step(large, optax.sgd(1.0), "fsdp")
    sgd_step.save(tmp_path, sgd_step.init(jax.random.key(0))).wait()
    path = max((tmp_path / "0").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"0 is damaged: params/w is not what was written: .*Digest mismatch"):
        sgd_step.restore(tmp_path)


def test_files_that_are_not_whole_are_named(folder: Path) -> None:
    arrays = [path for path in files(folder) if kind(path) == "arrays"]
    for path in [*{*files(folder)}.difference(arrays), *arrays[::20]]:
        content, named_file = path.read_bytes(), ABOUT if path.name == "metadata" else path.name
        # The last one has the same size.
        for damaged in (content[: len(content) // 2], b"", None, os.urandom(99), bytes(reversed(content))):
            path.unlink(missing_ok=True)
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(ValueError, match=rf"{folder}/3 is damaged: .*{named_file} .*; start a new run"):
                jp.Checkpoint(folder).verify()
            if named_file != ABOUT:
                with pytest.raises(ValueError, match=rf"3 is damaged: .*{named_file} "):
                    step("zero3").restore(folder)
        path.write_bytes(content)


def test_files_of_another_checkpoint_are_named(sound: Path, folder: Path) -> None:
    """The files are of the same arrays after another step: the checksums of all chunks are right."""
    zero3 = step("zero3")
    zero3.save(folder, after(4, zero3.restore(folder))).wait()
    shutil.rmtree(folder / "4" / "state")
    shutil.copytree(sound / "3" / "state", folder / "4" / "state")
    with pytest.raises(ValueError, match=r"4 is damaged: state/.* is missing") as caught:
        zero3.restore(folder)
    assert not isinstance(caught.value, FileNotFoundError)  # a loop that starts anew without a checkpoint catches that


def test_crafted_descriptions_are_refused_in_a_sentence(sound: Path, folder: Path) -> None:
    """Wrong types, missing keys and huge numbers, with a valid checksum: 7 of 10 ended in a traceback."""
    rng, expected = random.Random(1), saved(sound)
    wrong_values = [None, "x", -1, 10**30, 1e308, [], {}, True, [[1, 2]], {"shape": 1}, "../../etc", "a" * 9999]
    path = folder / "3" / ABOUT
    sound_content = json.loads(path.read_text())
    del sound_content["crc32"]
    for key, value in [(key, value) for key in sound_content for value in rng.sample(wrong_values, 4)]:
        content = {**sound_content, key: value}
        if isinstance(sound_content[key], dict) and sound_content[key] and rng.random() < 0.5:
            inner_key = rng.choice(sorted(sound_content[key]))
            content[key] = {**sound_content[key], inner_key: value}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        path.write_text(json.dumps({**content, "crc32": zlib.crc32(text.encode())}))
        result = read_or_error(lambda: saved(folder))
        if isinstance(result, str):
            assert str(folder) in result, (key, value, result)
            assert len(result) < 1500
        else:  # values that only people read, or that only describe the run
            assert result == expected, (key, value)


def test_the_folder_is_named_by_the_step_of_its_state(folder: Path) -> None:
    (folder / "3").rename(folder / "7")
    with pytest.raises(ValueError, match=r"7 is damaged: its name says 7, and its state is of step 3"):
        step("single").restore(folder)


def test_the_newest_good_one_is_gone_on_from_where_the_user_says_so(folder: Path) -> None:
    zero3 = step("zero3")
    state = zero3.restore(folder)
    with Checkpoints(folder, zero3, {}) as saves:
        for number in (4, 5):  # checkpoints of two more steps, without training
            saves.save(number, after(number, state))
            saves.wait()
    path = max((folder / "5").rglob("d/*"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    with Checkpoints(folder, zero3, {}) as saves:
        with pytest.raises(ValueError, match=r"5 is damaged: .* go on from step 4, or resume with .latest-good."):
            saves.restore()
        assert int(saves.restore(good=True).step) == 4
        assert "5 is damaged" in saves.notes[0]
        assert sorted(path.name for path in folder.iterdir()) == ["4", "5.damaged"]
        saves.save(5, after(5, state))  # its folder is free again
    jp.Checkpoint(folder / "5").verify()
    shutil.rmtree(folder / "4" / "about")
    (folder / "5" / ABOUT).unlink()
    with (
        Checkpoints(folder, zero3, {}) as saves,
        pytest.raises(ValueError, match=rf"holds no undamaged checkpoint: .*{ABOUT}.*no item `about`"),
    ):
        saves.restore(good=True)


def test_a_checkpoint_of_a_later_format_is_not_set_aside_as_damaged(folder: Path) -> None:
    """It was renamed to 3.damaged."""
    path = folder / "3" / ABOUT
    content = json.loads(path.read_text()) | {"version": VERSION + 1}
    del content["crc32"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**content, "crc32": zlib.crc32(text.encode())}))
    with (
        Checkpoints(folder, step("zero3"), {}) as saves,
        pytest.raises(ValueError, match=rf"has version {VERSION + 1} of .*; use the jaxpar that wrote it"),
    ):
        saves.restore(good=True)
    assert [path.name for path in folder.iterdir()] == ["3"]


def test_a_full_disk_is_said_and_costs_no_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zero3 = step("zero3")
    state = after(4, zero3.restore(folder))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(write, "_write_spec", full)
    message = r"could not be written to .*: No space left on device; make room.* Older checkpoints are unchanged"
    with pytest.raises(ValueError, match=message), Checkpoints(folder, zero3, {}) as saves:
        saves.save(4, state)
    jp.Checkpoint(folder / "3").verify()
    monkeypatch.undo()
    assert (folder / "4.orbax-checkpoint-tmp").is_dir()  # as a killed process leaves it too
    with Checkpoints(folder, zero3, {}) as saves:
        assert [path.name for path in folder.iterdir()] == ["3"]  # at once, not in a thread that outlives the run
        assert saves.latest == 3
        saves.save(4, state)
    assert sorted(path.name for path in folder.iterdir()) == ["3", "4"]


@pytest.mark.battery
def test_a_save_that_nobody_waits_for_is_complete_when_the_program_ends(tmp_path: Path) -> None:
    """Orbax used thread pools that had been shut down already, and the last checkpoint was missing."""
    program = f"""
import jax, optax, jaxpar as jp
model = jp.Model(init=lambda key: {{"w": jax.numpy.ones((3000, 999))}}, loss=lambda p, b, key: (p["w"] * b["x"]).mean())
step = jp.make_train_step(model, optax.adam(1.0), mesh=jax.devices()[:1])
step.save({str(tmp_path)!r}, step.init(jax.random.key(0)))
raise SystemExit(3)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=1800).returncode == 3
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    jp.Checkpoint(tmp_path).verify()
