"""`Source`, the contract of training data, and text as a source: a corpus of bytes, its entropies, its windows.

`text` builds a `Text` source of the bytes of files (`byte_corpus`) or of a file of token ids. Training batches are
random windows (`batches`), held-out batches consecutive ones (`windows`). The default corpus, Python's standard
library, is on every machine. Batches are NumPy arrays, global, with rows on dim 0, and pure functions of seed and step.

Dims: B rows, T positions ("length"), n bytes or tokens of text.
"""

import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from ..backend.buckets import Place, below, is_bucket
from ..backend.counts import is_count
from ..backend.files import place, plain
from ..backend.text import did_you_mean
from ..model.contents import check_mapped, chunks
from .tokens import token_ids

MAX_READERS = 16  # threads that read files
BROKEN = ("error", "skip")  # the treatment of images that cannot be read, and of lines that are no documents
HELD_OUT = 20  # one file in 20, or one byte in 20, is held out
TEST_FOLDERS = {"test", "tests", "idle_test"}  # two thirds of the standard library, with other code than the rest
PACKAGE_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}

Batch = dict[str, np.ndarray]


class Source(Protocol):
    """The contract of training data: what a training loop needs of text or images."""

    @property
    def description(self) -> str:
        """One line for people: where the data are, and how many."""
        ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes that a model needs to fit the data, for `named(name, **source.sizes)`.

        {} for text; `classes`, `channels` and `size` for images.
        """
        ...

    @property
    def fingerprint(self) -> str:
        """A checksum of the contents, wherever they are stored. A run does not resume with another fingerprint."""
        ...

    @property
    def baselines(self) -> Mapping[str, float]:
        """Held-out losses, in nats, of predictions that need no training, to compare a loss with."""
        ...

    def batches(self, rows: int, seed: int, start: int = 0) -> Iterator[Batch]:
        """Return endless global batches of `rows` rows, from batch `start` on; batch i depends only on (seed, i)."""
        ...

    def held_out(self, rows: int) -> Iterator[Batch]:
        """Return the held-out data once, in order, in batches of `rows` with a "mask", 0 for rows that fill them up."""
        ...


@dataclass(frozen=True, eq=False)
class Corpus:
    """The bytes of a text, split into training and held-out text, and their entropies in bits per byte.

    Attributes:
      source, files: the file or folder, and the number of files.
      train, held_out: the two texts, uint8 [n].
    """

    source: str
    files: int
    train: np.ndarray
    held_out: np.ndarray

    @cached_property
    def unigram_entropy(self) -> float:
        """The entropy of a byte, from the counts of the whole corpus."""
        # A model that is the counts themselves: the cross-entropy is then the entropy.
        counts = _unigrams(self.train) + _unigrams(self.held_out)
        return _cross_entropy(counts, counts)

    @cached_property
    def bigram_entropy(self) -> float:
        """The entropy of a byte given the previous one, from the counts of the whole corpus."""
        counts = _bigrams(self.train) + _bigrams(self.held_out)
        return _cross_entropy(counts, counts)

    @cached_property
    def unigram_bits(self) -> float:
        """The held-out cross-entropy of byte frequencies fitted to `train`, one added to every count."""
        # Without the one added, a byte that `train` lacks would cost infinitely many bits.
        return _cross_entropy(_unigrams(self.held_out), _unigrams(self.train) + 1)

    @cached_property
    def bigram_bits(self) -> float:
        """The held-out cross-entropy of byte pairs fitted to `train`, one added to every count."""
        return _cross_entropy(_bigrams(self.held_out), _bigrams(self.train) + 1)


def _unigrams(text: np.ndarray) -> np.ndarray:
    """Count bytes, [1, 256]."""
    return np.bincount(text, minlength=256)[None]


def _bigrams(text: np.ndarray) -> np.ndarray:
    """Count pairs (byte, next byte), [256, 256]."""
    # int64 first: a uint8 would overflow at the product.
    return np.bincount(text[:-1].astype(np.int64) * 256 + text[1:], minlength=256 * 256).reshape(256, 256)


def _cross_entropy(counts: np.ndarray, model: np.ndarray) -> float:
    """Return the cross-entropy of counted symbols under a model, in bits per symbol.

    Args:
      counts: how often each symbol follows each context, [contexts, symbols].
      model: counts that the model's probabilities are proportional to in each context, [contexts, symbols].
    """
    context, symbol = np.nonzero(counts)  # others add 0, but would divide by 0 if the model lacks them too
    weights = counts[context, symbol]
    return float(weights @ np.log2(model.sum(1)[context] / model[context, symbol]) / weights.sum())


def byte_corpus(path: Place | str | None = None) -> Corpus:
    """Read the bytes of a text into memory and split them.

    Files are read in the order of their paths, without hidden files and without the standard library's tests. Every
    20th file is held out; with fewer than 20 files, the last 20th of their bytes.

    Args:
      path: a file or folder, or its address in s3:// or gs://. None reads the source of Python's standard library.

    Raises:
      ValueError: `path` does not exist or has too few bytes.
    """
    root = place(sysconfig.get_path("stdlib") if path is None else path, "path")
    if not root.exists():
        raise ValueError(f"there is no file or folder {root}; give one that exists, or none for Python's own source")
    with ThreadPoolExecutor(MAX_READERS) as threads:  # to overlap the latencies of a bucket
        contents = threads.map(lambda file: file.read_bytes(), files_below(root, stdlib=path is None))
        texts = [np.frombuffer(content, np.uint8) for content in contents]
    # Empty files count neither in `Corpus.files` nor in the choice of held-out files.
    texts = [text for text in texts if text.size]
    size = sum(text.size for text in texts)
    if size < HELD_OUT:
        raise ValueError(f"{root} holds {size} bytes in {len(texts)} files; give at least {HELD_OUT} bytes of text")
    # With too few files to hold some out, hold out the end of the text.
    if len(texts) < HELD_OUT:
        train, held_out = np.split(np.concatenate(texts), [size - size // HELD_OUT])
    else:
        train = np.concatenate([text for i, text in enumerate(texts, 1) if i % HELD_OUT])
        held_out = np.concatenate(texts[HELD_OUT - 1 :: HELD_OUT])
    return Corpus(str(root), len(texts), train, held_out)


def check_broken(broken: str) -> None:
    """Raise ValueError unless `broken` is in `BROKEN`."""
    if broken not in BROKEN:
        raise ValueError(f"broken={broken!r}: use {' or '.join(map(repr, BROKEN))}{did_you_mean(broken, BROKEN)}")


def files_below(root: Place, stdlib: bool = False) -> Sequence[Place]:
    """List the files of a corpus, a file or folder, in the order of their paths.

    With `stdlib`, root is Python's standard library: take only its modules, without tests and installed packages.
    """
    # 1. A file, which is the whole corpus.
    if not root.is_dir():
        return [plain(root)]
    skipped_names = TEST_FOLDERS | PACKAGE_FOLDERS if stdlib else set()
    is_included = lambda name: name not in skipped_names and not name.startswith(".")
    # 2. The objects of a bucket. It has no folders to walk, and one listing has all keys.
    if is_bucket(root):
        listing = sorted(below(root).items(), key=lambda item: item[0].as_posix())
        return [file for name, file in listing if all(map(is_included, name.parts))]
    # 3. The files of a folder on disk. The walk returns them in the order of the file system, which differs between
    # machines: sort them at the end.
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # Changing the list in place prunes the walk: installed packages have ten times as many files.
        subfolders[:] = filter(is_included, subfolders)
        files += (Path(folder, name) for name in names if is_included(name) and (not stdlib or name.endswith(".py")))
    return sorted(filter(Path.is_file, files), key=Path.as_posix)


@dataclass(frozen=True, eq=False)
class Text:
    """A `Source` of windows of text, built by `text`.

    Attributes:
      description: one line for people.
      length: T, the number of predictions in a window.
      train, rest: the training and the held-out text, bytes or token ids [n].
      corpus: the corpus of bytes; None if the text is token ids.
      sizes: {}: any text model fits.
    """

    description: str
    length: int
    train: np.ndarray
    rest: np.ndarray
    corpus: Corpus | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def baselines(self) -> Mapping[str, float]:
        """Held-out losses of byte frequencies and of byte pairs, fitted to `train`, in nats per byte; {} for ids."""
        if self.corpus is None:
            return {}
        losses = {"unigram": self.corpus.unigram_bits, "bigram": self.corpus.bigram_bits}
        # Entropies are in bits and losses in nats: a bit is ln 2 nats.
        return {name: bits * math.log(2) for name, bits in losses.items()}

    @cached_property
    def fingerprint(self) -> str:
        """The number of bytes or tokens and a checksum of all of them, whatever their dtype and wherever they are."""
        digest = hashlib.sha256()
        # The smallest dtype that holds all ids: the checksum must not depend on the stored dtype, and this is fastest.
        largest = max((int(chunk.max()) for text in (self.train, self.rest) for _, chunk in chunks(text)), default=0)
        dtype = np.min_scalar_type(largest).newbyteorder("<")
        for text in (self.train, self.rest):
            digest.update(f"{text.size} ".encode())
            for _, chunk in chunks(text):
                digest.update(np.ascontiguousarray(chunk, dtype).data)
        unit = "tokens" if self.corpus is None else "bytes"
        return f"{self.train.size + self.rest.size:,} {unit}, sha256 {digest.hexdigest()[:16]}"

    def batches(self, rows: int, seed: int, start: int = 0) -> Iterator[Batch]:
        """Return endless training batches {"tokens": int32 [B, T+1]}; see `batches`."""
        return batches(self.train, rows, self.length, seed, start)

    def held_out(self, rows: int) -> Iterator[Batch]:
        """Return the held-out text once: {"tokens": int32 [B, T+1], "mask": float32 [B, T]}; see `windows`."""
        return windows(self.rest, rows, self.length)


def text(path: Place | str | None, length: int, vocabulary: int = 256) -> Text:
    """Return a source of windows of a text.

    Args:
      path: a file, a folder or None, whose bytes are the tokens: see `byte_corpus`. Or a file of token ids, whose last
        20th is held out: `.npy` with integers [n], or `.bin` with ids alone, uint16 for vocabularies up to 65,536, else
        uint32. Token ids are read from disk on demand. Files and folders may be addresses in s3:// or gs://.
      length: T, the number of predictions in a window.
      vocabulary: the model's number of tokens, against which all tokens are checked.

    Raises:
      ValueError: the file or folder does not exist, is too short or has another form, or contains a token that is not
        below `vocabulary`.
    """
    # 1. Training and held-out text: ids from a file with one of two suffixes, else the bytes of files.
    if path is not None and place(path, "path").suffix in (".npy", ".bin"):
        ids = token_ids(path, vocabulary)
        train, rest = np.split(ids, [ids.size - ids.size // HELD_OUT])
        description, corpus = f"{path}: {ids.size:,} tokens", None
    elif vocabulary < 256:
        raise ValueError(
            f"vocabulary={vocabulary} is too small for bytes; use 256 or more, or a .npy file of token ids"
        )
    else:
        corpus = byte_corpus(path)
        train, rest = corpus.train, corpus.held_out
        files = f" in {corpus.files:,} files" if corpus.files > 1 else ""
        description = f"{corpus.source}: {train.size + rest.size:,} bytes{files}"
    # 2. Each of the two needs one window.
    _window_view(train, length)  # raises ValueError if the text is too short
    if rest.size <= length:
        raise ValueError(
            f"length={length} needs more than {length} held-out tokens, and of {description}, {rest.size:,} are held "
            f"out; use {f'a length below {rest.size} or ' if rest.size > 1 else ''}more text"
        )
    return Text(f"{description}, {rest.size:,} of them held out", length, train, rest, corpus)


def batches(text: np.ndarray, rows: int, length: int, seed: int, start: int = 0) -> Iterator[Batch]:
    """Return endless batches of random windows of a text.

    Batch i depends only on (seed, i), so that `start=i` resumes a run at step i.

    Args:
      text: bytes or token ids [n].
      rows, length: B and T.
      seed: determines the windows.
      start: the number of the first batch.

    Returns:
      An iterator of {"tokens": int32 [B, T+1]}.

    Raises:
      ValueError: the text is shorter than one window.
    """
    all_windows = _window_view(text, length)

    # A generator for each batch, seeded by its number: batch i does not depend on the batches before it.
    def batch(step: int) -> Batch:
        # [B] first tokens; indexing the view [n - T, T+1] with them copies B windows, and reads no others from the
        # disk.
        starts = np.random.default_rng((seed, step)).integers(len(all_windows), size=rows)
        check_mapped(text)
        return {"tokens": all_windows[starts].astype(np.int32)}

    return map(batch, count(start))


def windows(text: np.ndarray, rows: int, length: int) -> Iterator[Batch]:
    """Yield a text [n] once, in order, as consecutive windows: {"tokens": int32 [B, T+1], "mask": float32 [B, T]}.

    Consecutive windows share one token, so that every token except the first is predicted once: the masks contain n - 1
    ones. Zeros with the mask 0 fill up the last window and batch.

    Raises:
      ValueError: the text is shorter than one window.
    """
    _window_view(text, length)  # raises ValueError if the text is too short
    num_predictions = text.size - 1
    batch_predictions = rows * length
    for begin in range(0, num_predictions, batch_predictions):
        # One more token than predictions: the last token of a row is the first one of the next row.
        padded = np.zeros(batch_predictions + 1, np.int32)
        check_mapped(text)
        segment = text[begin : begin + batch_predictions + 1]
        padded[: segment.size] = segment
        tokens = np.lib.stride_tricks.sliding_window_view(padded, length + 1)[::length].copy()  # [B, T+1]
        # Prediction i is of token i + 1. The numbers go on behind the end of the text, where the mask is 0.
        positions = np.arange(begin, begin + batch_predictions)
        mask = (positions < num_predictions).astype(np.float32).reshape(rows, length)
        yield {"tokens": tokens, "mask": mask}


def _window_view(text: np.ndarray, length: int) -> np.ndarray:
    """Return a view [n - T, T+1] of every window of `text` [n]; raise ValueError if there is none."""
    if text.size <= length:
        unit = "bytes" if text.dtype == np.uint8 else "tokens"
        raise ValueError(
            f"length={length} needs windows of {length + 1} {unit}, but the text has {text.size}; "
            f"use {f'a length below {text.size} or ' if text.size > 1 else ''}more text"
        )
    return np.lib.stride_tricks.sliding_window_view(text, length + 1)


def pad_rows(batch: Any, multiple: int) -> tuple[Any, np.ndarray]:
    """Pad dim 0 of every leaf with zeros up to a multiple.

    Args:
      batch: a pytree of arrays [B, ...].
      multiple: pads to a multiple of this number, such as `step.replicas`.

    Returns:
      The padded batch, and a mask, float32 [padded B], that is 1 for the rows of the batch and 0 for the padding.

    Raises:
      ValueError: the leaves have different numbers of rows, or `multiple` is no whole number from 1.
    """
    if not is_count(multiple):
        raise ValueError(
            f"multiple={multiple!r} is no whole number from 1; give one to pad_rows, such as step.replicas"
        )
    row_shapes = {
        jax.tree_util.keystr(path): np.shape(leaf)[:1] for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
    }
    if len(set(row_shapes.values())) != 1 or () in row_shapes.values():
        raise ValueError(
            f"leaves of one batch need the same number of rows on dim 0, got {row_shapes}; pad or cut them alike"
        )
    (rows,) = next(iter(row_shapes.values()))
    padding = -rows % multiple
    padded = jax.tree.map(lambda leaf: np.pad(leaf, [(0, padding)] + [(0, 0)] * (np.ndim(leaf) - 1)), batch)
    return padded, (np.arange(rows + padding) < rows).astype(np.float32)
