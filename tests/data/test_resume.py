"""A resumed run, however often and on however many hosts, trains on the same batches as an unbroken run.

Every kind of data that `training` accepts is one line of `KINDS`. Once images began at the resumed run's batch and then
restored grain's position too: after 10 batches came batch 20, and after the next resume batch 30.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_rows_by_index import Listed

from jaxpar.data import Rows, Windows, images, text, token_ids
from jaxpar.data.positions import from_json, to_json
from jaxpar.data.streams import training

ROWS = 8
READ = 14  # batches of the unbroken run: more than an epoch of all kinds except text and digits
BREAKS = [(0, 0), (1, 0), (1, 5), (5, 1), (4, 5), (6, 6)]  # batches before the first resume, and before the second
X = np.random.default_rng(0).normal(size=(42, 3)).astype(np.float32)  # 6 batches in 8 rows, the last one short


def _module(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed (jaxpar[images]; make hf; pip install datasets)")


def _tensors() -> Any:
    torch = _module("torch")
    return torch.utils.data.TensorDataset(torch.from_numpy(X), torch.arange(42))


def _stateful_loader(shuffle: bool) -> Any:
    stateful_dataloader, torch = _module("torchdata.stateful_dataloader"), _module("torch")
    torch.manual_seed(3)
    return stateful_dataloader.StatefulDataLoader(_tensors(), ROWS, shuffle=shuffle, drop_last=True)


def _hf() -> Any:
    return _module("datasets").Dataset.from_dict({"x": X.tolist()})


def _tokens(place: Path, suffix: str) -> Path:
    ids = np.random.default_rng(1).integers(0, 500, 700).astype(np.uint16)
    path = place / f"ids{suffix}"
    np.save(path, ids) if suffix == ".npy" else ids.tofile(path)
    return path


def _folder(place: Path) -> images.Images:
    from PIL import Image

    for name, color in (("red", 250), ("blue", 5)):
        (place / name).mkdir(exist_ok=True)
        for i in range(20):
            Image.new("RGB", (5, 4), (color, 10 * i, i)).save(place / name / f"{i:02}.png")
    return images.folder(place, 4)


def _batches() -> list[dict[str, np.ndarray]]:
    return [{"x": X[i : i + ROWS]} for i in range(0, 40, ROWS)]


class Loader:
    """A loader like torch's `StatefulDataLoader`: it has the position, and takes one before a pass.

    Every pass has another order.
    """

    def __init__(self) -> None:
        self.batch, self.epoch, self.restored = 0, -1, None

    def __iter__(self) -> Iterator[Any]:
        self.epoch, self.batch = (self.epoch + 1, 0) if self.restored is None else self.restored
        self.restored = None
        order = np.random.default_rng(self.epoch).permutation(40).reshape(5, ROWS)
        while self.batch < 5:
            self.batch += 1
            yield {"x": X[order[self.batch - 1]]}

    def state_dict(self) -> dict[str, int]:
        return {"at": self.batch, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.restored = state["epoch"], state["at"]


class Shuffled:
    """An iterable like Hugging Face's: a restored position applies to its own epoch, and is reported only later."""

    def __init__(self) -> None:
        self.epoch, self.restored, self.state = 0, None, None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        is_current = self.restored is not None and self.restored["epoch"] == self.epoch
        start = self.restored["at"] if is_current else 0
        order = np.random.default_rng(self.epoch).permutation(40).reshape(5, ROWS)
        for i in range(start, 5):
            self.state = {"at": i + 1, "epoch": self.epoch}
            yield {"x": X[order[i]]}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.restored = state


class GrainSource:
    """A user's `Source` whose iterators are grain's, with positions that count from the batch of their creation."""

    def batches(self, rows: int, seed: int, start: int = 0) -> Iterator[Any]:
        endless = _module("grain").MapDataset.source(range(42)).shuffle(seed=seed).repeat().map(lambda i: {"x": X[i]})
        return iter(endless[start * rows :].to_iter_dataset().batch(rows))


def _grain_rows() -> Any:
    return _module("grain").MapDataset.source(range(42)).shuffle(seed=3).map(lambda i: {"x": X[i]})


def _grain_loader(place: Path) -> Any:
    grain = _module("grain")
    return grain.DataLoader(
        data_source=[{"x": x} for x in X],
        sampler=grain.samplers.IndexSampler(42, shuffle=True, seed=1, shard_options=grain.sharding.NoSharding()),
        operations=[grain.transforms.Batch(ROWS, drop_remainder=True)],
    )


def _torch_loader(shuffle: bool) -> Any:
    torch = _module("torch")
    seeded = torch.Generator().manual_seed(7)
    return torch.utils.data.DataLoader(_tensors(), ROWS, shuffle=shuffle, generator=seeded, drop_last=True)


# The data that a new process would create, with its own folder for files.
KINDS: dict[str, Callable[[Path], Any]] = {
    "text": lambda place: text(None, 16),
    "tokens in .npy": lambda place: text(_tokens(place, ".npy"), 16, 500),
    "tokens in .bin": lambda place: text(_tokens(place, ".bin"), 16, 500),
    "windows of tokens": lambda place: Rows(Windows(token_ids(_tokens(place, ".bin"), 500), 16)),
    "digits": lambda place: images.digits(),
    "a folder of images": _folder,
    "a source of grain's": lambda place: GrainSource(),
    "rows of arrays": lambda place: Rows({"x": X, "y": X[:, 0]}),
    "rows in order": lambda place: Rows({"x": X}, shuffle=False),
    "rows with pad": lambda place: Rows((X, X[:, 0]), last="pad"),
    "rows with drop_last": lambda place: Rows(X, last="drop_last"),
    "rows of a list": lambda place: Rows([{"x": x} for x in X]),
    "rows of grain's": lambda place: Rows(_grain_rows()),
    "rows of torch's": lambda place: Rows(_tensors(), last="pad"),
    "torch's subset": lambda place: _module("torch").utils.data.Subset([{"x": x} for x in X], range(41, -1, -1)),
    "rows by __getitems__": lambda place: Listed(),
    "Hugging Face's data set": lambda place: _hf(),
    "Hugging Face's iterable": lambda place: _hf().to_iterable_dataset().batch(ROWS, True).with_format("numpy"),
    "Hugging Face's, shuffled anew": lambda place: (
        _hf().to_iterable_dataset(6).shuffle(seed=1, buffer_size=1).batch(7).with_format("numpy")
    ),
    "a function": lambda place: lambda start: ({"x": X * i} for i in range(start, 99)),
    "a function with a position": lambda place: (
        lambda start: iter(_grain_rows().repeat()[start * ROWS :].to_iter_dataset().batch(ROWS))
    ),
    "a list": lambda place: _batches(),
    "an iterator": lambda place: ({"x": X * i} for i in range(99)),
    "a loader that is told the pass": lambda place: Shuffled(),
    "a loader with a position": lambda place: Loader(),
    "torch's loader": lambda place: _torch_loader(shuffle=False),
    "torch's loader, shuffled": lambda place: _torch_loader(shuffle=True),
    "torch's stateful loader": lambda place: _stateful_loader(shuffle=False),
    "torch's stateful loader, shuffled": lambda place: _stateful_loader(shuffle=True),
    "grain's data set": lambda place: _grain_rows().to_iter_dataset().batch(ROWS),
    "grain's iterator": lambda place: iter(_grain_rows().repeat().to_iter_dataset().batch(ROWS)),
    "grain's loader": _grain_loader,
}
PARTS = {"windows of tokens", "torch's subset", "Hugging Face's data set"}  # kinds of which a host can read its part


def _content(batches: list[Any]) -> str:
    """Return a checksum of one batch, whose parts are given in the order of the hosts."""
    digest = hashlib.sha256()
    for path, x in jax.tree_util.tree_leaves_with_path(jax.tree.map(lambda *parts: np.concatenate(parts), *batches)):
        digest.update(f"{path}{x.dtype}{x.shape}".encode() + np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()


def _hosts(kind: str, place: Path, state: Any, hosts: int, start: int = 0) -> list[Any]:
    """Return every host's stream; each host creates the data for itself."""
    has_parts = "rows" in kind or kind in PARTS
    parts = [(i, hosts) if has_parts else (0, 1) for i in range(hosts if has_parts else 1)]
    return [training(KINDS[kind](place), ROWS, 5, start, state, part) for part in parts]


def _read(streams: list[Any], count: int) -> tuple[list[str], Any]:
    """Read `count` batches; return their checksums and the position afterwards."""
    checksums = [_content([next(stream) for stream in streams]) for _ in range(count)]
    (state,) = {json.dumps(stream.state()) for stream in streams}  # the same on every host
    return checksums, json.loads(state)


@pytest.mark.xdist_group("torch")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it
@pytest.mark.parametrize("kind", KINDS)
def test_batches_after_a_resume_are_those_of_the_unbroken_run(kind: str, tmp_path: Path) -> None:
    unbroken, _ = _read(_hosts(kind, tmp_path, None, 1), READ)
    assert len(set(unbroken)) >= 5
    for read, more in BREAKS:
        first, state = _read(_hosts(kind, tmp_path, None, 2), read)
        second, state = _read(_hosts(kind, tmp_path, state, 4), more)
        third, state = _read(_hosts(kind, tmp_path, state, 1), 2)
        assert [*first, *second, *third] == unbroken[: read + more + 2], (read, more)
        assert state["batches"] == read + more + 2
    # From a batch number alone, as for a checkpoint without a position, and then from that run's position.
    numbered, state = _read(_hosts(kind, tmp_path, None, 1, start=3), 4)
    assert [*numbered, *_read(_hosts(kind, tmp_path, state, 2), 2)[0]] == unbroken[3:9]


def test_a_position_may_hold_what_json_does_not() -> None:
    """The position of a shuffling torch loader has a generator's state, a tensor; the first checkpoint once failed."""
    array, state = np.arange(6, dtype=np.uint32).reshape(2, 3), np.random.RandomState(3).get_state()
    position = {"a": [1, (b"\xff", None, 2.5)], 3: {"bytes": 5}, "state": state, "array": array, "scalar": np.int64(4)}
    read_position = from_json(json.loads(json.dumps(to_json(position))))
    np.testing.assert_equal(read_position, position)
    assert (type(read_position["a"][1]), read_position["array"].dtype) == (tuple, np.uint32)
    with pytest.raises(ValueError, match=r"position holds a set at /a/1, which a checkpoint cannot keep; let the data"):
        to_json({"a": [0, {1}]})
    tensor = _module("torch").arange(3)
    assert _module("torch").equal(from_json(json.loads(json.dumps(to_json(tensor)))), tensor)
