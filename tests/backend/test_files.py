"""Files of users and downloads are read only if they are regular files of moderate size inside their folder.

Once a FIFO blocked the program forever, /dev/zero was read forever, and a weight_map could open any file.
"""

import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpar as jp
from jaxpar.backend.files import json_of, local, member, place, plain, text_of
from jaxpar.data import byte_corpus, images, token_ids
from jaxpar.data import text as windows_of
from jaxpar.forecast.plan.cache import PlanCache
from jaxpar.forecast.plan.cache import folder as cache_folder
from jaxpar.hardware.kinds import load
from jaxpar.models.llama import from_hf
from jaxpar.run.cli.convert import converted
from jaxpar.run.cli.options import TrainOptions

SIZES = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 64}  # fmt: skip


def model(folder: Path, places: object = None, **changes: object) -> Path:
    """Write a model's config.json, and an index with this weight map; return the folder."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(SIZES | changes))
    if places is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def test_fifos_devices_and_long_files_are_named(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    for read in (plain, text_of, json_of, load, TrainOptions.load):
        with pytest.raises(ValueError, match=r"fifo is a FIFO, which waits .*; give a regular file"):
            read(fifo)
    for name in ("ids.npy", "ids.bin", "text.txt"):  # a FIFO of data was called "no file", or a file of "0 bytes"
        os.mkfifo(tmp_path / name)
        with pytest.raises(
            ValueError, match=rf"{name} is a FIFO, which waits .*; give a regular file: copy its content into"
        ):
            windows_of(tmp_path / name, 4)
    with pytest.raises(ValueError, match="/dev/zero is a device"):
        TrainOptions.load("/dev/zero")
    (long := tmp_path / "long.yaml").write_text("# " + "x" * (1 << 20))
    with pytest.raises(ValueError, match="has 1,048,578 bytes, and at most 1,048,576 are read"):
        TrainOptions.load(long)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[]", "holds a list instead of an object"),
        ('{"a":', "cannot be read as JSON: Expecting value"),
        (b"\xff", "no UTF-8 text"),
    ],
)
def test_json_that_is_none_is_named(text: str | bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=message):
        from_hf(tmp_path)


def test_a_weight_map_stays_in_its_folder(tmp_path: Path) -> None:
    for name in ("/etc/passwd", "../b/model.safetensors"):
        with pytest.raises(ValueError, match=f"'{name}' leads out of"):
            from_hf(model(tmp_path / "a", {"x": name}))
    for places in (3, {"x": 3}, ["a"]):
        with pytest.raises(ValueError, match=r"has no weight_map, which says in which file each tensor is"):
            from_hf(model(tmp_path / "a", places))
    (tmp_path / "a" / "link.safetensors").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match=r"is a link to /etc/passwd, outside of .*; copy that file into the folder"):
        from_hf(model(tmp_path / "a", {"x": "link.safetensors"}))
    os.mkfifo(tmp_path / "a" / "fifo.safetensors")
    with pytest.raises(ValueError, match="is a FIFO"):
        from_hf(model(tmp_path / "a", {"x": "fifo.safetensors"}))


def test_links_of_hugging_faces_cache_are_followed(tmp_path: Path) -> None:
    (tmp_path / "models--a" / "blobs").mkdir(parents=True)
    (blob := tmp_path / "models--a" / "blobs" / "123").write_text("weights")
    snapshot = tmp_path / "models--a" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    assert member(snapshot, "model.safetensors").resolve() == blob


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    (model(tmp_path) / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read: .*header.*; fetch it once more"):
        from_hf(tmp_path)


def test_a_config_of_any_number_of_layers_costs_nothing(tmp_path: Path) -> None:
    # Once all names were listed before any was looked for, which took 7 GB.
    for layers, message in (
        (10**9, "lacks at least"),
        (10**40, "use a whole number from 1 to 2,147,483,647, such as 4"),
    ):
        with pytest.raises(ValueError, match=message):
            from_hf({}, SIZES | {"num_hidden_layers": layers})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size='64' is no size"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 is no size"),  # ZeroDivisionError
        ({"rope_theta": "x"}, "rope_theta='x' of rotary embedding is no positive number"),
        ({"rope_scaling": [1]}, r"rope_scaling \(rope_parameters\) is \[1\]; needs a dict"),
        ({"max_position_embeddings": "x"}, "context='x': use a whole number from 1"),
    ],
)
def test_sizes_that_are_none_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_hf({}, SIZES | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [x, x]\nb: &b [*a, *a]\nmodel: [*b, *b]\n", r"has an alias, \*a; write the value out"),
        ("model: " + "[" * 5000, "is nested; write one option a line"),  # 23 s
        ("steps: " + "1" * 5000, "cannot be read as YAML"),
    ],
)
def test_options_are_flat(text: str, message: str, tmp_path: Path) -> None:
    (path := tmp_path / "options.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        TrainOptions.load(path)


def test_a_cache_gives_what_was_put_and_nothing_else(tmp_path: Path) -> None:
    # A file of another program, or one with a changed digit, was once taken for the numbers of a plan.
    cache = PlanCache(tmp_path, "about")
    value = {"memory": {"total": 1.5}, "lines": [["a", 3]]}
    cache.put(value, "line")
    assert cache.get("line") == value
    (file,) = tmp_path.iterdir()
    content = file.read_text()
    for text in (content.replace("1.5", "1.6"), json.dumps(value), "[]", '{"value": 3}', "[" * 100_000):
        file.write_text(text)
        assert cache.get("line") is None
    file.unlink()
    os.mkfifo(file)
    assert cache.get("line") is None


def test_addresses_are_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """step.save("gs://bucket/run") once wrote a folder `gs:`, and `jaxpar train --out` ended with a traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # as if it were not installed
    model = jp.Model(init=lambda key: {"w": jnp.ones(2)}, loss=lambda p, b, k: (p["w"] * b).sum())
    step = jp.make_train_step(model, optax.sgd(0.1), "single")
    state = step.init(jax.random.key(0))
    saved = step.save(tmp_path / "here", state)
    saved.wait()
    missing = r"='gs://bucket/run.npy' needs gcsfs, which is not installed: pip install gcsfs$"
    for use in (
        lambda path: step.save(path, state),
        step.restore,
        jp.Checkpoint,
        lambda path: converted(jp.Checkpoint(tmp_path / "here"), path),
        lambda path: jp.Loop(out=path),
        lambda path: TrainOptions(out=Path(path)),
        lambda path: TrainOptions(data=Path(path)),
        lambda path: windows_of(path, 8),
        byte_corpus,
        lambda path: token_ids(path, 256),
        images.folder,
    ):
        with pytest.raises(ValueError, match=missing):
            use("gs://bucket/run.npy")
    says = r"='gs://bucket/run.npy' is an address, and only a path on this machine's file systems will do; mount"
    for use in (lambda path: TrainOptions(export=Path(path)), from_hf, cache_folder):
        with pytest.raises(ValueError, match=says):
            use("gs://bucket/run.npy")
    for path in ("hf://datasets/x", "HTTPS://host/x", "s3://"):
        with pytest.raises(ValueError, match=f"out='{path}' is not an address in a bucket; give s3://BUCKET/"):
            place(path, "out")
    for path in ("s3://bucket/x", "hf://datasets/x"):
        for form in (path, Path(path)):
            with pytest.raises(ValueError, match=f"out='{path}' is an address, and only a path"):
                local(form, "out")
    for path in ("runs/x", "/a/b:/c", "./gs:x", "a:b"):
        assert local(path, "out") == place(path, "out") == Path(path)
    assert [x.name for x in tmp_path.iterdir()] == ["here"]
