"""The corpus, its entropies compared with ones computed by hand, and batches that resume at any step."""

import os
import re
from itertools import islice
from math import log
from pathlib import Path

import numpy as np
import pytest

import jaxpar as jp
from jaxpar.data import Corpus, Rows, Source, Windows, batches, byte_corpus, pad_rows, token_ids, windows
from jaxpar.data import text as source_of


def text(string: str) -> np.ndarray:
    return np.frombuffer(string.encode(), np.uint8)


def corpus(train: str, held_out: str) -> Corpus:
    return Corpus("by hand", 1, text(train), text(held_out))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "below").mkdir()
    for i in range(40):
        (tmp_path / ("below" if i % 2 else ".") / f"{i:02}.txt").write_text(f"file {i:02}\n" * (i + 1))
    (tmp_path / ".hidden").write_text("never read")
    (tmp_path / "empty").write_text("")
    return tmp_path


def test_standard_library_is_a_corpus_of_megabytes() -> None:
    stdlib = byte_corpus()
    assert stdlib.train.size > 4e6
    assert stdlib.held_out.size > 1e5
    assert stdlib.train.dtype == stdlib.held_out.dtype == np.uint8
    assert b"class TestCase" in stdlib.train.tobytes() + stdlib.held_out.tobytes()  # unittest itself is no test
    assert stdlib.bigram_entropy < stdlib.unigram_entropy < 6


def test_standard_library_is_read_without_tests_and_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("os.py", "json/decoder.py", "json/data.txt", "test/test_os.py", "a/tests/t.py", "site-packages/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n" * 4)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    stdlib = byte_corpus()
    assert stdlib.files == 2
    assert set((stdlib.train.tobytes() + stdlib.held_out.tobytes()).splitlines()) == {b"# json/decoder.py", b"# os.py"}


def test_a_folder_holds_out_every_20th_file(folder: Path) -> None:
    corpus = byte_corpus(str(folder))
    order = sorted(folder.rglob("*.txt"), key=lambda f: f.relative_to(folder).as_posix())
    assert corpus.files == 40
    assert corpus.held_out.tobytes() == order[19].read_bytes() + order[39].read_bytes()
    assert corpus.train.size + corpus.held_out.size == sum(f.stat().st_size for f in order)


def test_a_file_holds_out_its_end(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_bytes(bytes(range(100)))
    corpus = byte_corpus(file)
    assert corpus.train.tolist() == list(range(95))
    assert corpus.held_out.tolist() == list(range(95, 100))


def test_errors_name_the_path_and_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short").write_text("abc")
    for name, says in (
        ("nowhere", "no file or folder .*nowhere; give one that exists, or none for Python's own"),
        ("empty", "holds 0 bytes in 0 files; give at least 20 bytes"),
        ("short", "short holds 3 bytes in 1 files; give at least 20 bytes"),
    ):
        with pytest.raises(ValueError, match=says):
            byte_corpus(tmp_path / name)


def test_entropies_by_hand() -> None:
    # a a b | b: unigrams 2 a, 2 b in all. Bigrams aa, ab in train, none in the single held-out byte.
    small = corpus("aab", "b")
    assert small.unigram_entropy == pytest.approx(1.0)
    assert small.bigram_entropy == pytest.approx(1.0)  # after a: a or b, once each
    assert small.unigram_bits == pytest.approx(np.log2((3 + 256) / 2))  # b was seen once, plus one
    assert corpus("abab", "ba").bigram_bits == pytest.approx(np.log2((1 + 256) / 2))  # after b: a, once
    assert corpus("abab", "bc").bigram_bits == pytest.approx(np.log2((1 + 256) / 1))  # c never
    assert corpus("abababab", "abab").bigram_entropy == pytest.approx(0.0)
    all_bytes = np.tile(np.arange(256, dtype=np.uint8), 50)
    uniform = Corpus("by hand", 1, all_bytes, all_bytes[:256])
    assert uniform.unigram_entropy == pytest.approx(8.0)
    assert uniform.unigram_bits == pytest.approx(8.0)


def test_batches_are_windows_of_the_text() -> None:
    source = np.arange(200, dtype=np.uint8)
    batch = next(batches(source, rows=64, length=7, seed=0))["tokens"]
    assert (batch.shape, batch.dtype) == ((64, 8), np.int32)
    assert (np.diff(batch) == 1).all()
    assert len(set(batch[:, 0].tolist())) > 32
    assert not np.array_equal(batch, next(batches(source, rows=64, length=7, seed=1))["tokens"])


def test_batches_reach_the_first_and_the_last_byte() -> None:
    read_bytes = np.unique([b["tokens"] for b in islice(batches(np.arange(10, dtype=np.uint8), 8, 7, seed=0), 20)])
    assert read_bytes.tolist() == list(range(10))


@pytest.mark.parametrize("size", [9, 10, 24, 25, 26, 49, 100])
def test_windows_predict_every_byte_but_the_first_once(size: int) -> None:
    source = np.arange(1, size + 1, dtype=np.uint8)
    held_out = list(windows(source, rows=3, length=8))
    assert all(b["tokens"].shape == (3, 9) and b["mask"].shape == (3, 8) and b["mask"].any() for b in held_out)
    targets = np.concatenate([b["tokens"][:, 1:][b["mask"] == 1] for b in held_out])
    contexts = np.concatenate([b["tokens"][:, :-1][b["mask"] == 1] for b in held_out])
    assert targets.tolist() == source[1:].tolist()
    assert contexts.tolist() == source[:-1].tolist()
    assert held_out[0]["tokens"].dtype == np.int32
    assert held_out[0]["mask"].dtype == np.float32


def test_a_text_shorter_than_one_window_says_so_before_the_first_batch() -> None:
    message = r"length=8 needs windows of 9 bytes, but the text has 8; use a length below 8"
    with pytest.raises(ValueError, match=message):
        batches(np.zeros(8, np.uint8), 1, 8, seed=0)
    with pytest.raises(ValueError, match=message):
        next(windows(np.zeros(8, np.uint8), 1, 8))


def test_text_is_a_source_of_the_corpus(folder: Path) -> None:
    source: Source = source_of(folder, length=16)
    corpus = byte_corpus(folder)
    size = corpus.train.size + corpus.held_out.size
    assert f"{folder}: {size:,} bytes in 40 files, 632 of them" in source.description
    assert source.sizes == {}
    bits = {"unigram": corpus.unigram_bits, "bigram": corpus.bigram_bits}
    assert source.baselines == pytest.approx({name: x * log(2) for name, x in bits.items()})
    for ours, theirs in (
        (source.batches(3, seed=1, start=2), batches(corpus.train, 3, 16, seed=1, start=2)),
        (source.held_out(3), windows(corpus.held_out, 3, 16)),
    ):
        for a, b in zip(islice(ours, 4), islice(theirs, 4), strict=True):
            assert a.keys() == b.keys()
            assert all((a[name] == b[name]).all() for name in a)


def saved(ids: np.ndarray, path: Path) -> Path:
    np.save(path, ids) if path.suffix == ".npy" else ids.tofile(path)
    return path


@pytest.mark.parametrize(
    ("name", "dtype", "vocabulary"),
    [("t.npy", "uint16", 50_000), ("t.npy", "int64", 50_000), ("t.bin", "uint16", 50_000), ("t.bin", "uint32", 99_999)],
)
def test_token_ids_are_read_from_disk(tmp_path: Path, name: str, dtype: str, vocabulary: int) -> None:
    ids = np.arange(2000).astype(dtype) * 20
    source = source_of(saved(ids, tmp_path / name), 7, vocabulary)
    assert isinstance(source.train, np.memmap)
    assert source.train.tolist() == ids[:1900].tolist()
    batch = next(source.batches(5, seed=0))["tokens"]
    assert batch.dtype == np.int32
    assert (np.diff(batch) == 20).all()
    held_out = np.concatenate([b["tokens"][:, 1:][b["mask"] == 1] for b in source.held_out(3)])
    assert held_out.tolist() == ids[1901:].tolist()
    assert source.baselines == {}
    assert "2,000 tokens, 100 of them held out" in source.description


@pytest.mark.parametrize("name", ["ids.bin", "ids.npy"])
def test_a_file_that_is_cut_short_under_a_run_is_named(name: str, tmp_path: Path) -> None:
    """Reading such a file once ended the process with "Bus error"."""
    path = tmp_path / name
    content = (np.arange(200_000) % 250).astype(np.uint16)
    content.tofile(path) if name == "ids.bin" else np.save(path, content)
    ids, source = token_ids(path, 256), source_of(path, 8, 256)
    stream, held_out, rows = source.batches(4, seed=0), source.held_out(4), Rows({"x": ids.reshape(-1, 8)})
    next(stream)
    os.truncate(path, 1000)
    says = rf"{name} had 400,\d\d\d bytes when it was opened and has 1,000 now; write it again"
    for read in (
        lambda: next(stream),
        lambda: next(held_out),
        lambda: Windows(ids, 8)[-1],
        lambda: next(rows.once(4)),
        lambda: source.fingerprint,
        lambda: jp.check_ids({"x": ids}, {"x": 256}),
    ):
        with pytest.raises(ValueError, match=says):
            read()


def test_token_ids_that_do_not_fit_are_named(tmp_path: Path) -> None:
    for name, dtype, ids, length, says in (
        ("t.npy", "uint16", [*range(101)] * 2, 4, "token 100, but the vocabulary has 100: 0 to 99; use the model"),
        ("t.npy", "int32", [-1] * 200, 4, "holds token -1, but the vocabulary"),
        ("t.npy", "int64", [1] * 150 + [2**32 + 5], 4, "holds token 4294967301, but .* at 150 of"),  # as int32 it is 5
        ("t.npy", "float32", [1] * 200, 4, r"holds float32\[200\]; save token ids as integers \[n\]"),
        ("t.bin", "uint8", [1] * 201, 4, "201 bytes, and ids of a vocabulary of 100 are uint16, which takes a multi"),
        ("t.npy", "uint16", [1] * 200, 300, "length=300 needs windows of 301 tokens, .* has 190; use a length"),
        ("t.npy", "uint16", [1] * 200, 10, "than 10 held-out tokens, and of .*t.npy: 200 tokens, 10 are held out"),
    ):
        with pytest.raises(ValueError, match=says):
            source_of(saved(np.asarray(ids, dtype), tmp_path / name), length, 100)


def test_files_that_hold_no_token_ids_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object))
    (tmp_path / "empty.npy").touch()
    with (tmp_path / "several.npy").open("wb") as file:
        np.savez(file, ids=np.arange(4))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "several.npy").read_bytes()[:20])  # BadZipFile
    damaged = {"shape": "(18446744073709551616,)", "bracket": "(4,"}  # OverflowError, TokenError
    for name, shape in damaged.items():
        header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}".ljust(117).encode() + b"\n"
        (tmp_path / f"{name}.npy").write_bytes(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header)
    for name, message in (
        *((f"{name}.npy", r"cannot be read as NumPy's array file .*; write integers \[n\]") for name in damaged),
        ("pickled.npy", r"cannot be read as NumPy's array file .*; write integers \[n\]"),
        ("empty.npy", r"is no NumPy file; write one array of integers \[n\]"),
        ("several.npy", r"is a zip archive, as numpy.savez writes for several arrays; write one array"),
        ("cut.npy", r"is a zip archive"),
    ):
        with pytest.raises(ValueError, match=f"{name} {message}"):
            source_of(tmp_path / name, 4)
    with pytest.raises(ValueError, match=r"no file .*none.npy; give one"):
        source_of(tmp_path / "none.npy", 4)
    with pytest.raises(ValueError, match=r"vocabulary=100 is too small for bytes; use 256 or more, or a .npy file"):
        source_of(None, 4, vocabulary=100)


def test_pad_rows_fills_up_with_zeros_and_masks_them() -> None:
    batch = {"x": np.ones((5, 3), np.int32), "y": (np.ones(5),)}
    padded, mask = pad_rows(batch, 8)
    assert (padded["x"].dtype, mask.dtype) == (np.int32, np.float32)
    assert mask.tolist() == padded["y"][0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    np.testing.assert_array_equal(padded["x"], np.repeat(mask, 3).reshape(8, 3))
    unpadded, mask = pad_rows(batch, 5)
    np.testing.assert_array_equal(unpadded["x"], batch["x"])
    assert mask.all()
    for batch, says in (
        ({"x": np.ones(5), "y": np.ones(4)}, "same number of rows on dim 0, got {\"['x']\": (5,), \"['y']\": (4,)}"),
        ({"x": np.float32(1)}, "got {\"['x']\": ()}"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            pad_rows(batch, 8)
