"""Batches of data sets with rows by index: contents, masks, positions on any number of hosts, and fingerprints."""

from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxpar as jp
from jaxpar.data import Rows, Windows, images, token_ids
from jaxpar.data import text as source_of
from jaxpar.model.contents import shares_outside

X = np.arange(14, dtype=np.float32).reshape(7, 2)


class Listed:
    """A data set like Hugging Face's: rows are dicts, and several are read at once."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise AssertionError("rows are read one by one")

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [{"x": X[i].tolist(), "label": i} for i in indices]


@pytest.mark.parametrize(
    "data", [{"x": X, "label": np.arange(7)}, [{"x": x, "label": i} for i, x in enumerate(X)], Listed()]
)
def test_batches_hold_every_row_once_in_an_epoch(data: Any) -> None:
    batches = list(islice(Rows(data).batches(3, seed=0), 3))
    assert all(batch["x"].shape == (3, 2) and batch["mask"].dtype == np.float32 for batch in batches)
    labels = np.concatenate([batch["label"][batch["mask"] == 1] for batch in batches])
    assert sorted(labels.tolist()) == list(range(7))
    np.testing.assert_array_equal(np.concatenate([b["x"][b["mask"] == 1] for b in batches]), X[labels])
    assert batches[2]["mask"].tolist() == [1, 0, 0]
    once = list(Rows(data).once(4))
    assert [batch["label"].tolist() for batch in once] == [[0, 1, 2, 3], [4, 5, 6, 0]]
    assert once[1]["mask"].tolist() == [1, 1, 1, 0]


def test_a_mask_of_the_rows_own_is_kept() -> None:
    row_masks = np.arange(15, dtype=np.float32).reshape(5, 3) % 2
    batch = list(Rows({"mask": row_masks}).once(4))[1]
    np.testing.assert_array_equal(batch["mask"], [row_masks[4], *np.zeros((3, 3))])


def test_tuples_have_no_place_for_a_mask() -> None:
    data = (X, np.arange(7))
    says = "7 rows in batches of 3 leave a short one, and a tuple has no place for its mask"
    with pytest.raises(ValueError, match=says):
        Rows(data).batches(3, seed=0)
    assert len(next(Rows(data).batches(7, seed=0))) == 2
    x, labels = next(Rows(data, last="pad").batches(3, seed=0, start=2))
    np.testing.assert_array_equal(x, X[labels])
    in_order = islice(Rows(data, last="drop_last", shuffle=False).batches(3, 0), 4)
    assert {tuple(batch[1]) for batch in in_order} == {(0, 1, 2), (3, 4, 5)}


@pytest.mark.parametrize(("last", "in_an_epoch"), [("mask", 3), ("pad", 3), ("drop_last", 2)])
def test_batches_end_after_their_epochs(last: str, in_an_epoch: int) -> None:
    """They were endless, whatever the caller wanted: `for batch in Rows(data).batches(...)` never returned."""
    rows = Rows({"x": np.arange(8)}, last=last)
    read = [batch["x"].tolist() for batch in rows.batches(3, 0, epochs=2)]
    endless = rows.batches(3, 0, epochs=None)
    assert read == [next(endless)["x"].tolist() for _ in range(2 * in_an_epoch)]
    # A resumed run reads what is left, also in batches of another size, and batches that have ended stay so.
    resumed = rows.batches(3, 0, epochs=2)
    next(resumed)
    position = resumed.state()
    other = rows.batches(5, 0, epochs=2)
    other.restore(position)
    assert len(list(other)) == {"mask": 3, "pad": 3, "drop_last": 2}[last]
    assert not list(other)
    assert len(list(rows.batches(3, 0, start=in_an_epoch, epochs=2))) == in_an_epoch


@pytest.mark.parametrize("epochs", [0, -1, 1.5, True])
def test_epochs_are_counted_from_one(epochs: Any) -> None:
    with pytest.raises(ValueError, match=r"epochs=.*whole number from 1, or None for batches that never end"):
        Rows({"x": np.arange(8)}).batches(3, 0, epochs=epochs)


def test_hosts_take_parts_of_one_batch() -> None:
    data = Rows({"row": np.arange(50)})
    batches, *hosts = (data.batches(12, seed=4) for _ in range(4))
    for index, host in enumerate(hosts):
        host.part = (index, 3)
        host.restore({"epoch": 0, "row": 12})
    next(batches)
    assert [row for host in hosts for row in next(host)["row"]] == next(batches)["row"].tolist()
    assert hosts[2].state() == batches.state() == {"epoch": 0, "row": 24}
    with pytest.raises(ValueError, match="row 60 of an epoch is beyond rows: 50 rows"):
        batches.restore({"epoch": 0, "row": 60})
    hosts[0].part = (0, 5)
    with pytest.raises(ValueError, match="12 rows do not divide among 5 hosts; use a multiple of 5"):
        next(hosts[0])


def test_rows_that_make_no_batch_are_named() -> None:
    says = r"2 rows of texts make no batch .*; rows need the same keys and shapes: pad or cut"
    with pytest.raises(ValueError, match=says):
        next(Rows([{"t": [1, 2]}, {"t": [1]}], name="texts").batches(2, seed=0))
    with pytest.raises(ValueError, match="the data set is a generator; pass arrays"):
        Rows(x for x in X)
    with pytest.raises(ValueError, match=r"same number of rows on dim 0, got \{'x': \(7, 2\), 'y': \(3,\)\}"):
        Rows({"x": X, "y": np.ones(3)})


def test_windows_of_token_ids_are_rows(tmp_path: Path) -> None:
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    windows = Windows(token_ids(tmp_path / "ids.bin", 1000), length=8)
    assert isinstance(windows.ids, np.memmap)
    assert len(windows) == 124
    targets = np.concatenate([b["tokens"][:, 1:][b["mask"] == 1].ravel() for b in Rows(windows).once(10)])
    assert targets.tolist() == list(range(1, 993))
    assert windows[-1]["tokens"].dtype == np.int32
    with pytest.raises(IndexError, match="there is no window 124; the data set has 124"):
        windows[124]
    with pytest.raises(ValueError, match="length=1000 needs token ids"):
        Windows(windows.ids, 1000)


# -- fingerprints ------------------------------------------------------------------------------------------------------


def test_the_same_bytes_elsewhere_are_the_same_data_and_others_are_not(tmp_path: Path) -> None:
    """A run once resumed on other bytes under the same name, and refused the same bytes under another name."""

    def fingerprint(name: str, content: bytes) -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
        return source_of(tmp_path / name, 4).fingerprint

    content = bytes(range(200))
    assert fingerprint("a/one.txt", content) == fingerprint("b/two.txt", content)
    assert fingerprint("a/one.txt", content) != fingerprint("a/one.txt", content[::-1])
    ids = np.arange(200)
    np.save(tmp_path / "t.npy", ids)
    ids.astype(np.uint16).tofile(tmp_path / "t.bin")
    assert source_of(tmp_path / "t.npy", 4).fingerprint == source_of(tmp_path / "t.bin", 4).fingerprint
    assert source_of(tmp_path / "t.npy", 4).fingerprint.startswith("200 tokens, sha256 ")


def test_rows_are_known_by_their_values() -> None:
    data = {"x": X, "y": np.arange(7)}
    assert Rows(data, name="a").fingerprint == Rows({k: v.copy() for k, v in data.items()}, name="b").fingerprint
    changed = X.copy()
    changed[5, 1] += 1
    assert Rows(data).fingerprint != Rows({**data, "x": changed}).fingerprint
    fewer_rows = Listed().__getitems__([*range(6)])
    assert Rows(Listed()).fingerprint == Rows(Listed()).fingerprint != Rows(fewer_rows).fingerprint


def test_images_are_known_by_their_files(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    for name in ("here/a", "here/b", "there/a", "there/b"):
        (tmp_path / name).mkdir(parents=True)
        for i in range(10):
            image.new("RGB", (4, 4), (i, 0, len(name.rpartition("/")[2]))).save(tmp_path / name / f"{i}.png")
    fingerprints = [images.folder(tmp_path / name, 4).fingerprint for name in ("here", "there")]
    assert fingerprints[0] == fingerprints[1]
    image.new("RGB", (4, 4), (9, 9, 9)).save(tmp_path / "there/b/3.png")
    assert images.folder(tmp_path / "there", 4).fingerprint != fingerprints[0]


# -- ids ---------------------------------------------------------------------------------------------------------------


def test_ids_beyond_their_limit_are_named() -> None:
    batch = {"tokens": np.arange(12).reshape(3, 4), "x": np.ones(3), "deep": {"label": np.array([0, 1, 2])}}
    assert jp.check_ids(batch, {"tokens": 12, "deep/label": 3}) is batch
    for limits, says in (
        ({"tokens": 11}, r"leaf tokens holds 11 at row 2, \[3\], but limits allow 0 to 10; use"),
        ({"deep/label": 2}, "leaf deep/label holds 2 at row 2, but limits allow 0 to 1"),
        ({"negative": 5}, "leaf negative holds -1 at row 0"),
        ({"token": 5}, r"limits name 'token', and the batch has deep/label, negative, tokens, x \(did you mean"),
        ({"x": 5}, r"leaf x is float64\[3\], and ids are integers"),
    ):
        with pytest.raises(ValueError, match=says):
            jp.check_ids({**batch, "negative": np.array([[-1]] * 3)}, limits)
    shares = jax.jit(lambda x: shares_outside(x, {"tokens": 10, "deep/label": 300}))
    outside = shares({**batch, "deep": {"label": np.array([0, -1, 127], np.int8)}})
    assert {name: (float(m.total), float(m.count)) for name, m in outside.items()} == {
        "outside/tokens": (2, 12), "outside/deep/label": (1, 3)
    }  # fmt: skip
