"""Chats, prompts with completions, and texts in JSONL as a source of packed rows: `chat`.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}
    {"text": "..."}

Each line is a document. The loss counts the assistant's messages, the completion, or the whole text. Several documents
share a row (`pack`):

    tokens      a a a a b b b 0        int32 [T+1]
    segments    0 0 0 0 1 1 1 -1       int32 [T+1], the document of each token in its row; -1 fills up the row
    mask          0 1 1 0 1 1 0        float32 [T], whether the prediction of tokens[1:] counts

Dims: B rows, T positions ("length").
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..backend.buckets import Place
from ..backend.files import place
from ..backend.text import did_you_mean, few
from .corpus import HELD_OUT, Batch, check_broken, files_below
from .rows import RowBatches, Rows
from .tokenizer import NoTemplateError, Rendered, TemplateError, Tokenizer

JSONL = ".jsonl"
_MALFORMED, _REFUSED = "malformed", "refused by the chat template"
_ROLES = ("system", "developer", "user", "assistant", "tool")  # a template may know more
_BLOCK = 1024  # lines that are tokenized at once, on all cores
_FORMS = '{"messages": [...]}, {"prompt": "...", "completion": "..."} or {"text": "..."}'


class Packed(Sequence[dict[str, np.ndarray]]):
    """Documents of tokens, packed into rows, as a data set for `Rows`.

    Args:
      documents: for each document its ids, int32 [n], and whether the loss counts each, bool [n].
      length: T, the number of predictions in a row. No document may have more than T + 1 tokens.
    """

    def __init__(self, documents: Sequence[tuple[np.ndarray, np.ndarray]], length: int):
        self.documents, self.length = documents, length
        self.rows = pack([ids.size for ids, _ in documents], length + 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        """Return the row with this index: "tokens", "segments" and "mask", see the top of this file."""
        tokens, counts = (np.zeros(self.length + 1, dtype) for dtype in (np.int32, bool))
        segments, begin = np.full(self.length + 1, -1, np.int32), 0
        for number, document in enumerate(self.rows[index]):
            ids, is_counted = self.documents[document]
            tokens[begin : begin + ids.size], counts[begin : begin + ids.size] = ids, is_counted
            segments[begin : begin + ids.size] = number
            begin += ids.size
        # Nothing predicts the first token of a document.
        mask = counts[1:] & (segments[1:] == segments[:-1])
        return {"tokens": tokens, "segments": segments, "mask": mask.astype(np.float32)}


def pack(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Distribute documents over rows of `room` tokens: the longest first, each into the fullest row that has room.

    This is best-fit decreasing (Johnson 1973, "Near-optimal bin packing algorithms"), which needs at most 11/9 of the
    fewest possible rows, and one more.

    Returns:
      The indices of the documents in each row.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (free tokens, row) of the rows that have free tokens, sorted
    for document in sorted(range(len(sizes)), key=lambda i: -sizes[i]):  # a stable order
        position = bisect.bisect_left(open_rows, (sizes[document], 0))
        if position == len(open_rows):
            rows.append([])
        num_free, row = open_rows.pop(position) if position < len(open_rows) else (room, len(rows) - 1)
        rows[row].append(document)
        if num_free > sizes[document]:
            bisect.insort(open_rows, (num_free - sizes[document], row))
    return rows


@dataclass(frozen=True, eq=False)
class Chat:
    """A `Source` of packed documents, built by `chat`.

    Attributes:
      description: one line for people.
      train, rest: the training and the held-out rows.
      question: the first held-out document up to its last answer; None if it is a text.
      left_out: for each reason, the lines that are left out, as "file:line" and details.
      sizes, baselines: {}.
    """

    description: str
    train: Packed
    rest: Packed
    question: Rendered | None
    left_out: Mapping[str, Sequence[str]]
    sizes: Mapping[str, int] = field(default_factory=dict)
    baselines: Mapping[str, float] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """The number of documents and a checksum of their tokens, of what the loss counts, and of the length."""
        digest, documents = hashlib.sha256(), [*self.train.documents, *self.rest.documents]
        digest.update(f"{self.train.length} {len(self.train.documents)}".encode())
        for ids, counts in documents:
            digest.update(f" {ids.size} ".encode() + ids.astype("<i4").tobytes() + counts.tobytes())
        return f"{len(documents):,} documents, sha256 {digest.hexdigest()[:16]}"

    def batches(self, rows: int, seed: int, start: int = 0) -> RowBatches:
        """Return endless batches of shuffled rows {"tokens", "segments", "mask"}; see `Rows.batches`."""
        return Rows(self.train, name=self.description).batches(rows, seed, start)

    def held_out(self, rows: int) -> Iterator[Batch]:
        """Return the held-out rows once, in order."""
        return Rows(self.rest).once(rows)


def chat(
    path: Place | str, tokenizer: Tokenizer, length: int, vocabulary: int | None = None, broken: str = "error"
) -> Chat:
    """Return a source of the documents in JSONL files, packed into rows.

    Every 20th document is held out; of fewer than 20 the last one. Every process reads and tokenizes all of them.

    Args:
      path: a file, or a folder whose files `*.jsonl` are read in the order of their paths; or an address in s3:// or
        gs://.
      tokenizer: the model's tokenizer. Lines with "messages" need its chat template; their "tools" go to it too.
      length: T, the number of predictions in a row. A longer text is cut into pieces that share one token. Chats and
        completions that are longer are left out, as are lines that have no answer to train on (`Chat.left_out`).
      vocabulary: the model's number of tokens, above all ids.
      broken: the treatment of lines that are no document: of bad JSON, of another form, without an assistant's message,
        or refused by the template. "error" raises an error that names them, "skip" leaves them out.

    Raises:
      ValueError: there is no such file, lines are no documents, fewer than two documents remain, or an id is not below
        `vocabulary`.
    """
    check_broken(broken)
    root = place(path, "path")
    if not root.exists():
        raise ValueError(f"there is no file or folder {root}; give a file {JSONL}, or a folder of some")
    # 1. Tokenize the lines.
    reading, lines = _Reading(tokenizer, length), _lines(root)
    while block := list(itertools.islice(lines, _BLOCK)):
        reading.add(block)
    documents = reading.documents
    # 2. Refuse what cannot be meant.
    if broken == "error" or not documents:
        reading.refuse_broken(", or leave them out with broken='skip'" if broken == "error" else "")
    if len(documents) < 2:
        hint = f", or use length={reading.longest - 1}" if reading.longest > length + 1 else ""
        raise ValueError(
            f"{root} has {len(documents)} documents in {reading.lines:,} lines{_describe(reading.left_out)}; give two "
            f"or more, one to train on and one to hold out{hint}"
        )
    if vocabulary is not None and (largest := max(int(ids.max()) for ids, _ in documents)) >= vocabulary:
        raise ValueError(
            f"the tokenizer of {tokenizer.folder} makes token {largest}, but the model has a vocabulary of "
            f"{vocabulary}: 0 to {vocabulary - 1}; use the tokenizer that the model was trained with"
        )
    # 3. Hold some out, and pack both.
    held_out = range(HELD_OUT - 1, len(documents), HELD_OUT) or range(len(documents) - 1, len(documents))
    train = Packed([x for i, x in enumerate(documents) if i not in held_out], length)
    rest = Packed([documents[i] for i in held_out], length)
    filled = sum(ids.size for ids, _ in train.documents) / (len(train) * (length + 1))
    description = (
        f"{root}: {len(documents):,} documents in {reading.lines:,} lines, {len(held_out):,} of them held out; the "
        f"others fill {len(train):,} rows to {filled:.0%}{_describe(reading.left_out)}"
    )
    example = reading.texts[held_out[0]]
    question = None if _is_text(example) else example._replace(text=example.text[: example.answers[-1][0]], answers=())
    return Chat(description, train, rest, question, reading.left_out)


class _Reading:
    """The documents of the lines so far, and the lines that are left out."""

    def __init__(self, tokenizer: Tokenizer, length: int):
        self._tokenizer, self._length = tokenizer, length
        self.documents: list[tuple[np.ndarray, np.ndarray]] = []
        self.texts: list[Rendered] = []
        self.left_out: dict[str, list[str]] = {}
        self.lines = self.longest = 0

    def add(self, lines: Sequence[tuple[str, bytes]]) -> None:
        """Tokenize lines, or note in `left_out` why they are no documents."""
        self.lines += len(lines)
        rendered: dict[str, Rendered] = {}
        for where, line in lines:
            try:
                if line.strip():
                    rendered[where] = _parse(line, self._tokenizer)
                else:
                    self._leave_out("empty", where)
            # Without a template, no line with messages is a document, and the file is not to blame.
            except NoTemplateError:
                raise
            except (ValueError, RecursionError) as error:
                kind = _REFUSED if isinstance(error, TemplateError) else _MALFORMED
                self._leave_out(kind, f"{where} ({error or 'it is nested too deeply'})")
        tokens = self._tokenizer.encode([*rendered.values()])
        for (where, text), (ids, counts) in zip(rendered.items(), tokens, strict=True):
            self._add_document(where, text, ids, counts)

    def refuse_broken(self, skip: str) -> None:
        """Raise ValueError if there were lines that are no documents; `skip` is the advice to leave them out."""
        for kind, fault, advice in (
            (_MALFORMED, "are no documents", f"write {_FORMS} a line"),
            (_REFUSED, "do not fit the chat template", "change the template, or give messages that it can render"),
        ):
            if places := self.left_out.get(kind):
                raise ValueError(f"{len(places):,} of {self.lines:,} lines {fault}: {few(places)}; {advice}{skip}")

    def _add_document(self, where: str, rendered: Rendered, ids: np.ndarray, counts: np.ndarray) -> None:
        if not any(begin < end for begin, end in rendered.answers) or not counts[1:].any():
            return self._leave_out("empty", where)
        if ids.size > self._length + 1 and not _is_text(rendered):
            self.longest = max(self.longest, ids.size)
            return self._leave_out(f"longer than length={self._length}", f"{where} ({ids.size - 1})")
        # Pieces of a long text share one token, so that every token but the first is predicted.
        for begin in range(0, ids.size - 1, self._length):
            piece = slice(begin, begin + self._length + 1)
            self.documents.append((ids[piece], counts[piece]))
            self.texts.append(rendered)

    def _leave_out(self, kind: str, where: str) -> None:
        self.left_out.setdefault(kind, []).append(where)


def _lines(root: Place) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of all files, each with its place, "file:line"."""
    files = [file for file in files_below(root) if file.suffix == JSONL or file == root]
    if not files:
        raise ValueError(f"{root} holds no file {JSONL}; give a folder of some, or one file")
    for file in files:
        name = file.name if file == root else file.as_posix().removeprefix(f"{root.as_posix()}/")
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            yield f"{name}:{number}", line


def _parse(line: bytes, tokenizer: Tokenizer) -> Rendered:
    """Return a line as text; raise ValueError if it is no document."""
    try:
        document = json.loads(line)
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from error
    match document:
        case {"messages": [_, *_] as messages}:
            for i, message in enumerate(messages, 1):
                match message:
                    case {"role": str(role), "content": str()} | {"role": str(role), "tool_calls": _}:
                        # A misspelled role would go into the template as it is, and its message would not count.
                        if role not in _ROLES and (correction := did_you_mean(role, _ROLES, "; {}", 0.7)):
                            raise ValueError(f"message {i} has the role {role!r}{correction}")
                    case _:
                        raise ValueError(f"message {i} needs a role and a content, both texts")
            if not any(message["role"] == "assistant" for message in messages):
                roles = sorted({message["role"] for message in messages})
                raise ValueError(f"it has messages of {few(roles)}, and the loss counts those of the assistant alone")
            return tokenizer.chat(messages, document.get("tools"))
        case {"prompt": str(prompt), "completion": str(completion)}:
            return Rendered(prompt + completion, ((len(prompt), len(prompt) + len(completion)),), True)
        case {"text": str(text)}:
            return Rendered(text, ((0, len(text)),), True)
        case {**keys}:
            raise ValueError(f"keys {few(sorted(keys))}, which have another form")
    raise ValueError(f"a {type(document).__name__}, no object")


def _is_text(rendered: Rendered) -> bool:
    """Return whether a document has no prompt."""
    return rendered.is_plain and rendered.answers[0][0] == 0


def _describe(left_out: Mapping[str, Sequence[str]]) -> str:
    """Return the end of a description: how many lines are left out for each reason, and the first ones."""
    return "".join(f"; left out, {kind}: {len(places):,}, {few(places)}" for kind, places in left_out.items())
