"""Where batches come from. Text as bytes: a corpus that every machine has, its entropies, and its windows.

NumPy only. Batches are global, with rows on dim 0, and pure functions of seed and step. Dims: B rows, T positions
("length"), n bytes or tokens of text.
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
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from ..backend.buckets import Place, below, is_bucket
from ..backend.files import place, plain
from ..model.contents import check_mapped, chunks
from .tokens import token_ids

READERS = 16  # files that are read at once
HELD_OUT = 20  # one file, or one byte, in so many is held out
TESTS = {"test", "tests", "idle_test"}  # two thirds of the standard library, and unlike the rest of it
INSTALLED = {"site-packages", "dist-packages", "__pycache__"}

Batch = dict[str, np.ndarray]


class Source(Protocol):
    """Where batches come from: what a training loop needs of data, text or images."""

    @property
    def description(self) -> str:
        """One line for people: where it is from, and how much."""
        ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """What a model must have to fit, for `named(name, **source.sizes)`: {} for text, and for images `classes`,
        `channels` and `size`.
        """
        ...

    @property
    def fingerprint(self) -> str:
        """What the data are, by content: the same elsewhere is the same. A run about other data does not resume."""
        ...

    @property
    def baselines(self) -> Mapping[str, float]:
        """Held-out losses, in nats, of guesses that need no training: what a loss is drawn beside."""
        ...

    def batches(self, rows: int, seed: int, start: int = 0) -> Iterator[Batch]:
        """Endless global batches of `rows` from batch `start` on; batch i is a function of (seed, i) alone."""
        ...

    def held_out(self, rows: int) -> Iterator[Batch]:
        """What is held out, once and in order; every batch has `rows` and a "mask", 0 where it was filled up."""
        ...


@dataclass(frozen=True, eq=False)
class Corpus:
    """Bytes, uint8 [n], to train on and to hold out, and what is known of them without a network, in bits per byte."""

    source: str
    files: int
    train: np.ndarray
    held_out: np.ndarray

    @cached_property
    def unigram_entropy(self) -> float:
        """Entropy of a byte, counted in hindsight over the whole corpus."""
        counts = _unigrams(self.train) + _unigrams(self.held_out)
        return _cross_entropy(counts, counts)

    @cached_property
    def bigram_entropy(self) -> float:
        """Entropy of a byte given the one before, counted in hindsight over the whole corpus."""
        counts = _bigrams(self.train) + _bigrams(self.held_out)
        return _cross_entropy(counts, counts)

    @cached_property
    def unigram_bits(self) -> float:
        """Held-out cross-entropy of byte frequencies fitted to `train`, one added to every count."""
        return _cross_entropy(_unigrams(self.held_out), _unigrams(self.train) + 1)

    @cached_property
    def bigram_bits(self) -> float:
        """Held-out cross-entropy of byte pairs fitted to `train`, one added to every count."""
        return _cross_entropy(_bigrams(self.held_out), _bigrams(self.train) + 1)


def _unigrams(text: np.ndarray) -> np.ndarray:
    return np.bincount(text, minlength=256)[None]


def _bigrams(text: np.ndarray) -> np.ndarray:
    """Counts [256, 256] of (byte, next byte)."""
    return np.bincount(text[:-1].astype(np.int64) * 256 + text[1:], minlength=256 * 256).reshape(256, 256)


def _cross_entropy(counts: np.ndarray, model: np.ndarray) -> float:
    """Bits per symbol of the symbols in `counts` [contexts, symbols], each row coded by the same row of `model`."""
    context, symbol = np.nonzero(counts)
    seen = counts[context, symbol]
    return float(seen @ np.log2(model.sum(1)[context] / model[context, symbol]) / seen.sum())


def byte_corpus(path: Place | str | None = None) -> Corpus:
    """The bytes of a file, of the files below a folder (either may be an address, s3:// or gs://), or (None) of the
    Python standard library's own source.

    Files come in the order of their paths, hidden ones and the standard library's tests left out. Every 20th is held
    out; of fewer than 20 files, the last 20th of their bytes. Raises ValueError if `path` is missing or too small.
    """
    root = place(sysconfig.get_path("stdlib") if path is None else path, "path")
    if not root.exists():
        raise ValueError(f"there is no file or folder {root}; give one that exists, or none for Python's own source")
    with ThreadPoolExecutor(READERS) as threads:  # of a bucket, each file is waited for
        contents = threads.map(lambda file: file.read_bytes(), _files(root, stdlib=path is None))
        texts = [np.frombuffer(content, np.uint8) for content in contents]
    texts = [text for text in texts if text.size]
    size = sum(text.size for text in texts)
    if size < HELD_OUT:
        raise ValueError(f"{root} holds {size} bytes in {len(texts)} files; give at least {HELD_OUT} bytes of text")
    if len(texts) < HELD_OUT:
        train, held_out = np.split(np.concatenate(texts), [size - size // HELD_OUT])
    else:
        train = np.concatenate([text for i, text in enumerate(texts, 1) if i % HELD_OUT])
        held_out = np.concatenate(texts[HELD_OUT - 1 :: HELD_OUT])
    return Corpus(str(root), len(texts), train, held_out)


def _files(root: Place, stdlib: bool) -> Sequence[Place]:
    if not root.is_dir():
        return [plain(root)]
    skipped = TESTS | INSTALLED if stdlib else set()
    wanted = lambda name: name not in skipped and not name.startswith(".")
    if is_bucket(root):
        listed = sorted(below(root).items(), key=lambda item: item[0].as_posix())
        return [file for name, file in listed if all(map(wanted, name.parts))]
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = filter(wanted, folders)  # nobody goes into the others: packages have ten times as many files
        found += (Path(folder, name) for name in names if wanted(name) and (not stdlib or name.endswith(".py")))
    return sorted(filter(Path.is_file, found), key=Path.as_posix)


@dataclass(frozen=True, eq=False)
class Text:
    """A `Source` of windows of text, from `text`. `corpus` is None where the text is token ids, not bytes."""

    description: str
    length: int
    train: np.ndarray
    rest: np.ndarray
    corpus: Corpus | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def baselines(self) -> Mapping[str, float]:
        """Of bytes: their frequencies, and those of pairs of bytes, fitted to the training text, in nats per byte."""
        if self.corpus is None:
            return {}
        bits = {"unigram": self.corpus.unigram_bits, "bigram": self.corpus.bigram_bits}
        return {name: bit * math.log(2) for name, bit in bits.items()}

    @cached_property
    def fingerprint(self) -> str:
        """What the text is, wherever and in whatever type it lies: how much, and a checksum of all of it."""
        digest = hashlib.sha256()
        # The smallest type that holds them, whatever they lie in: it is also the least to take a checksum of.
        most = max((int(piece.max()) for part in (self.train, self.rest) for _, piece in chunks(part)), default=0)
        kind = np.min_scalar_type(most).newbyteorder("<")
        for part in (self.train, self.rest):
            digest.update(f"{part.size} ".encode())
            for _, piece in chunks(part):
                digest.update(np.ascontiguousarray(piece, kind).data)
        unit = "tokens" if self.corpus is None else "bytes"
        return f"{self.train.size + self.rest.size:,} {unit}, sha256 {digest.hexdigest()[:16]}"

    def batches(self, rows: int, seed: int, start: int = 0) -> Iterator[Batch]:
        """Endless {"tokens": int32 [B, T+1]}; see `batches`."""
        return batches(self.train, rows, self.length, seed, start)

    def held_out(self, rows: int) -> Iterator[Batch]:
        """The held-out text once: {"tokens": int32 [B, T+1], "mask": float32 [B, T]}; see `windows`."""
        return windows(self.rest, rows, self.length)


def text(path: Place | str | None, length: int, vocabulary: int = 256) -> Text:
    """Windows of `length` positions of a text.

    Args:
      path: a file, a folder or None, whose bytes are the tokens: see `byte_corpus`. Or a file of token ids, of which
        the last 20th is held out: `.npy` with integers [n], or `.bin` with nothing but ids, uint16 for vocabularies up
        to 65,536, else uint32. These are read from disk as they are needed. Any may be an address, s3:// or gs://.
      length: T, how many predictions a window holds.
      vocabulary: of the model, so that no token lies outside it.

    Raises ValueError where the file or folder is missing, too short or not of that form, or holds a token that is not
    below `vocabulary`.
    """
    if path is not None and place(path, "path").suffix in (".npy", ".bin"):
        ids = token_ids(path, vocabulary)
        train, rest = np.split(ids, [ids.size - ids.size // HELD_OUT])
        about, corpus = f"{path}: {ids.size:,} tokens", None
    elif vocabulary < 256:
        raise ValueError(
            f"vocabulary={vocabulary} is too small for bytes; use 256 or more, or a .npy file of token ids"
        )
    else:
        corpus = byte_corpus(path)
        train, rest = corpus.train, corpus.held_out
        files = f" in {corpus.files:,} files" if corpus.files > 1 else ""
        about = f"{corpus.source}: {train.size + rest.size:,} bytes{files}"
    _windowed(train, length)
    if rest.size <= length:
        raise ValueError(
            f"length={length} needs more than {length} held out, but of {about}, {rest.size:,} are; "
            f"use {f'a length below {rest.size} or ' if rest.size > 1 else ''}more text"
        )
    return Text(f"{about}, {rest.size:,} of them held out", length, train, rest, corpus)


def batches(text: np.ndarray, rows: int, length: int, seed: int, start: int = 0) -> Iterator[Batch]:
    """Endless {"tokens": int32 [B, T+1]} of random windows of `text` [n].

    Batch i is a function of (seed, i) alone, so that `start=i` resumes a run at step i. Raises ValueError if the text
    is shorter than one window.
    """
    windowed = _windowed(text, length)

    def batch(step: int) -> Batch:
        starts = np.random.default_rng((seed, step)).integers(len(windowed), size=rows)
        check_mapped(text)
        return {"tokens": windowed[starts].astype(np.int32)}

    return map(batch, count(start))


def windows(text: np.ndarray, rows: int, length: int) -> Iterator[Batch]:
    """The text [n] once, in order: {"tokens": int32 [B, T+1], "mask": float32 [B, T]}.

    Consecutive windows share one token, so that every token but the first is predicted once: the masks hold n - 1 ones.
    Zeros, masked out, fill up the last window and batch. Raises ValueError if the text is shorter than one window.
    """
    _windowed(text, length)
    predictions = text.size - 1
    size = rows * length
    for begin in range(0, predictions, size):
        padded = np.zeros(size + 1, np.int32)
        check_mapped(text)
        piece = text[begin : begin + size + 1]
        padded[: piece.size] = piece
        tokens = np.lib.stride_tricks.sliding_window_view(padded, length + 1)[::length].copy()
        mask = (np.arange(begin, begin + size) < predictions).astype(np.float32).reshape(rows, length)
        yield {"tokens": tokens, "mask": mask}


def _windowed(text: np.ndarray, length: int) -> np.ndarray:
    """A view [n - T, T+1] of every window of `text` [n]."""
    if text.size <= length:
        unit = "bytes" if text.dtype == np.uint8 else "tokens"
        raise ValueError(
            f"length={length} needs windows of {length + 1} {unit}, but the text has {text.size}; "
            f"use {f'a length below {text.size} or ' if text.size > 1 else ''}more text"
        )
    return np.lib.stride_tricks.sliding_window_view(text, length + 1)


def pad_rows(batch: Any, multiple: int) -> tuple[Any, np.ndarray]:
    """Pads dim 0 of every leaf with zeros up to a multiple: (batch, mask float32 [B padded], 1 for the rows given).

    Raises ValueError if the leaves disagree about the number of rows, and where `multiple` is no count.
    """
    if not isinstance(multiple, Integral) or isinstance(multiple, bool) or multiple < 1:
        raise ValueError(f"pad_rows(batch, {multiple!r}): needs a whole number from 1, such as step.replicas")
    sizes = {
        jax.tree_util.keystr(path): np.shape(leaf)[:1] for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
    }
    if len(set(sizes.values())) != 1 or () in sizes.values():
        raise ValueError(
            f"leaves of one batch need the same number of rows on dim 0, got {sizes}; pad or cut them alike"
        )
    (rows,) = next(iter(sizes.values()))
    extra = -rows % multiple
    padded = jax.tree.map(lambda leaf: np.pad(leaf, [(0, extra)] + [(0, 0)] * (np.ndim(leaf) - 1)), batch)
    return padded, (np.arange(rows + extra) < rows).astype(np.float32)
