"""What is damaged is named, by array or file, and is never restored in silence. 8 of 12 flipped bits once were."""

import copy
import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from layouts import random_state, saved, step

import jaxpar as jp
from jaxpar.checkpoint import files
from jaxpar.checkpoint.checkpoints import Checkpoints
from jaxpar.checkpoint.files import ABOUT, read_json, write_json


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    random_state(folder)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "run")
    return tmp_path / "run"


def told(read: Callable[[], dict[str, bytes]]) -> dict[str, bytes] | str:
    """What is read, or what is wrong with it."""
    try:
        return read()
    except ValueError as error:
        return str(error)


def test_every_flipped_bit_is_named_or_harmless(sound: Path, folder: Path) -> None:
    """Forty, the same number in each file."""
    rng, expected = random.Random(0), saved(sound)
    every = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    named = 0
    assert len(every) >= 3
    for number in range(40):
        path = every[number % len(every)]
        content = path.read_bytes()
        # Of the file of arrays, half of them in its header.
        at = rng.randrange(len(content)) if number % 2 else rng.randrange(min(len(content), 2000))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :])
        found = told(lambda: saved(folder))
        if isinstance(found, str):
            named += 1
            known = [path.name, *(f": {name} (" for name in expected), "was written in form"]
            assert any(text in found for text in known), found
        else:
            assert found == expected, (path, at)
        path.write_bytes(content)
    assert named >= 38  # a bit of JSON may be a space
    assert saved(folder) == expected


def test_a_flipped_bit_of_an_array_is_not_restored(folder: Path) -> None:
    at = jp.Checkpoint(folder)
    file, block = next(iter(at._blocks["optimizer/0/nu/layers/3/up"]))
    path = at.folder / "state" / file.file
    content = bytearray(path.read_bytes())
    content[block.offset + 5] ^= 1
    path.write_bytes(content)
    for name in ("zero3", "pipe", "ddp"):
        with pytest.raises(ValueError, match=r"nu/layers/3/up is not what was written, in arrays-00000.safetensors"):
            step(name).restore(folder)
    # The weights are sound.
    assert int(step("zero3").restore(folder, weights_only=True).step) == 0


@pytest.mark.parametrize("how", ["half", "nothing", "gone", "noise"])
def test_files_that_are_not_whole_are_named(how: str, folder: Path) -> None:
    for name in (ABOUT, "arrays-00000.json", "arrays-00000.safetensors"):
        path = folder / "3" / "state" / name
        content = path.read_bytes()
        path.unlink()
        if how != "gone":
            path.write_bytes({"half": content[: len(content) // 2], "nothing": b"", "noise": os.urandom(99)}[how])
        with pytest.raises(ValueError, match=rf"{folder}/3 is damaged: {name} .*; start a new run"):
            jp.Checkpoint(folder).verify()
        path.write_bytes(content)


def nodes(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*at, key)
        yield from nodes(item, (*at, key))


def test_crafted_tables_are_refused_in_a_sentence(sound: Path, folder: Path) -> None:
    """Wrong types, missing keys, huge numbers, with a checksum that is right: 7 of 10 ended in a traceback."""
    rng, expected = random.Random(1), saved(sound)
    wrong = [None, "x", -1, 10**30, 1e308, float("nan"), [], {}, True, [[1, 2]], {"shape": 1}, "../../etc", "a" * 9999]
    for name in (ABOUT, "arrays-00000.json"):
        path = folder / "3" / "state" / name
        content = read_json(path)
        every = list(nodes(content))
        top = [node for node in every if len(node) == 1]
        for node in [*top, *top, *rng.sample(every, 120)]:
            crafted = copy.deepcopy(content)
            parent = crafted
            for key in node[:-1]:
                parent = parent[key]
            if rng.random() < 0.2 and isinstance(parent, dict):
                del parent[node[-1]]
            else:
                parent[node[-1]] = rng.choice(wrong)
            write_json(path, crafted)
            found = told(lambda: saved(folder))
            if isinstance(found, str):
                assert str(folder) in found
                assert len(found) < 1000
            else:  # what nobody reads, or what the run says of itself
                assert found == expected, node
        write_json(path, content)


def test_the_folder_is_named_by_the_step_of_its_state(folder: Path) -> None:
    (folder / "3").rename(folder / "7")
    with pytest.raises(ValueError, match=r"7 is damaged: its name says 7, it holds the state after step 3"):
        step("single").restore(folder)


def test_the_newest_good_one_is_gone_on_from_where_the_user_says_so(folder: Path) -> None:
    there = step("zero3")
    state = there.restore(folder)
    with Checkpoints(folder, there, {}) as saves:
        for number in (4, 5):  # a step of the optimizer's is not needed to make them
            state = jax.tree.map(lambda x: x, state)
            object.__setattr__(state, "step", jax.device_put(np.int32(number), state.step.sharding))
            saves.save(number, state)
            saves.wait()
    path = folder / "5" / "state" / "arrays-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    with Checkpoints(folder, there, {}) as saves:
        with pytest.raises(ValueError, match=r"5 is damaged: .* go on from step 4, or resume with .latest-good."):
            saves.restore()
        assert int(saves.restore(good=True).step) == 4
        assert "5 is damaged" in saves.notes[0]
        assert sorted(path.name for path in folder.iterdir()) == ["4", "5.damaged"]
        object.__setattr__(state, "step", jax.device_put(np.int32(5), state.step.sharding))
        saves.save(5, state)  # its place is free again
    jp.Checkpoint(folder / "5").verify()
    for number in (4, 5):
        (folder / str(number) / "state" / ABOUT).unlink()
    with (
        Checkpoints(folder, there, {}) as saves,
        pytest.raises(ValueError, match=r"holds no checkpoint that is whole: .*about.json"),
    ):
        saves.restore(good=True)


def test_a_full_disk_is_said_and_costs_no_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = step("zero3")
    state = there.restore(folder)
    object.__setattr__(state, "step", jax.device_put(np.int32(4), state.step.sharding))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "_write", full)
    says = r"could not be written to .*: No space left on device; make room.* Older ones are as they were"
    with pytest.raises(ValueError, match=says), Checkpoints(folder, there, {}) as saves:
        saves.save(4, state)
    jp.Checkpoint(folder / "3").verify()
    monkeypatch.undo()
    with Checkpoints(folder, there, {}) as saves:
        assert saves.latest == 3
        saves.save(4, state)
    assert sorted(path.name for path in folder.iterdir()) == ["3", "4"]


def test_what_is_saved_stays_as_it_was(tmp_path: Path) -> None:
    """Though the next step writes into its memory at once."""
    one = jp.make_train_step(
        jp.Model(init=lambda key: {"w": jax.numpy.ones(4)}, loss=lambda p, b, key: (p["w"] * b["x"]).mean()),
        optax.sgd(1.0),
    )
    state = one.init(jax.random.key(0))
    for _ in range(2):
        saves = one.save(tmp_path, state, {"batches": int(state.step)})
        state, _ = one(state, {"x": np.ones((8, 4), np.float32)})
    saves.wait()
    found = [jp.Checkpoint(tmp_path / str(number)) for number in (0, 1)]
    assert [at.data for at in found] == [{"batches": 0}, {"batches": 1}]
    np.testing.assert_array_equal(found[0].read("params/w"), 1)
    np.testing.assert_allclose(found[1].read("params/w"), 0.75)


@pytest.mark.battery
def test_a_save_that_nobody_waits_for_is_complete_when_the_program_ends(tmp_path: Path) -> None:
    """Orbax's threads met thread pools that were shut down already: the last checkpoint was none."""
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
