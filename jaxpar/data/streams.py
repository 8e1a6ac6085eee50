"""What a trainer accepts as data, as streams of batches that know where they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..model.batches import as_array, rows_of
from ..model.calls import check_call
from ..model.model import Replicated
from .positions import cursor, epochs, from_json, restored, to_json
from .rows import Rows

Data = Any  # a `data.Source`, a function, or an iterable of batches


class Stream:
    """Batches from a position on; an iterator.

    Attributes:
      number: how many batches of the run are before the next one.
      fills: whether the data fill up batches with rows whose mask is 0.
    """

    fills = False

    def __init__(self, batches: Iterator[Any], number: int, own: Callable[[], Mapping[str, Any]] = dict):
        self._batches, self._own, self.number = batches, own, number

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        """The next batch, of arrays. Raises ValueError where the data ends."""
        try:
            batch = next(self._batches)
        except StopIteration:
            raise ValueError(
                f"the data ended after {self.number} batches; train for so many steps, or pass data that can be gone "
                "through again (a list, a data loader, a function)"
            ) from None
        self.number += 1
        return jax.tree.map(as_array, batch)

    def state(self) -> dict[str, Any]:
        """The position of the next batch, as JSON: how many came before it ("batches"), and where the data have a
        position of their own, that ("data"), with what it counts from: the batch at which the iterator was made
        ("origin", if it is not 0), the number of the pass ("pass", where data are told it). It is the same on every
        host, unless the data's own is not. Raises ValueError where the data's own is nothing that JSON can hold.
        """
        return {"batches": self.number, **self._own()}


def training(
    data: Data,
    rows: int,
    seed: int,
    start: int = 0,
    state: Mapping[str, Any] | None = None,
    part: tuple[int, int] = (0, 1),
) -> Stream:
    """Batches to train on, from batch `start` on.

    Args:
      data: a `jaxpar.data.Source` or `Rows`; a data set with rows by index and `__getitems__` (Hugging Face's), which
        becomes `Rows`; a function `data(start)` of an iterator that begins with batch `start`; or an iterable: a list
        or data loader is gone through again and again, an iterator once. Where an iterable has a position of its own
        (`state_dict` and `load_state_dict`, or `get_state` and `set_state`, as grain's), `state` restores it; of
        others the first `start` batches are dropped.
      rows, seed: for a `Source`.
      state: where to go on, from `Stream.state`, in place of `start`.
      part: (index, count) of the rows of a batch that this host takes, of `Rows`.

    Raises ValueError for anything else, and where the data ends.
    """
    start = start if state is None else state["batches"]
    own = None if state is None else from_json(state.get("data"))
    if hasattr(data, "__getitems__") and hasattr(data, "__len__"):
        data = Rows(data, name=type(data).__name__)
    if hasattr(data, "batches"):
        # grain's iterators count from where they were made. To begin at the batch and then to restore such a position
        # would pass over what came before it twice.
        origin = start if state is None or own is None else state.get("origin", 0)
        made = data.batches(rows, seed, origin)
        if part[1] > 1:
            if not hasattr(made, "part"):
                raise ValueError(
                    f"rows='host', and {type(data).__name__} yields global batches; leave it out, or use data.Rows"
                )
            made.part = part
        ask, beside = restored(made, own), {"origin": origin} if origin else {}
        stream = Stream(made, start, dict if ask is None else lambda: {"data": to_json(ask()), **beside})
        stream.fills = getattr(made, "fills", False)
        return stream
    if callable(data):
        check_call(data, "data", "start", note="the number of the first batch: 0, or where a resumed run goes on")
        made = data(start)
        if not isinstance(made, Iterable):
            raise ValueError(f"data({start}) returned {type(made).__name__}; return an iterator of batches from there")
        return Stream(iter(made), start)
    if not isinstance(data, Iterable) or isinstance(data, Mapping | str):
        raise ValueError(
            f"data is a {type(data).__name__}; pass a jaxpar.data.Source, an iterable of batches, or a function of the "
            "number of the first batch that returns one"
        )
    passes = _Passes(data, own, 0 if state is None else state.get("pass", 0))
    stream = Stream(passes, 0 if own is None else start, passes.state)
    while stream.number < start:
        next(stream)
    return stream


class _Passes:
    """An iterable again and again, an iterator once; of what has a position, that is restored in the pass `number`.

    Data with `set_epoch` are told the number of every pass. Hugging Face's shuffle by it, and what they were told of a
    position holds for that pass alone; without it every later one would begin there too.
    """

    def __init__(self, data: Iterable[Any], own: Any = None, number: int = 0):
        self._data, self._once, self._empty = data, isinstance(data, Iterator), False
        self._unread, self._own, self._number, self._epochs = True, own, number, epochs(data)
        self._tell()
        restored(data, own)  # loaders take it before they are gone through, iterators themselves
        self._pass = iter(data)
        if own is not None and cursor(data) is None and restored(self._pass, own) is None:
            raise ValueError(
                f"the run's position in its data is {own}, and a {type(data).__name__} takes none; resume with the "
                "data that it was trained on"
            )

    def __iter__(self) -> _Passes:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._pass)
        except StopIteration:
            if self._once or self._empty:
                raise
            self._number, self._empty = self._number + 1, True
            self._tell()
            self._pass = iter(self._data)
            return next(self)
        self._empty = self._unread = False
        return batch

    def _tell(self) -> None:
        for set_epoch in self._epochs:
            set_epoch(self._number)

    def state(self) -> dict[str, Any]:
        found = cursor(self._data) or cursor(self._pass)  # of those that are told
        # Before the first batch, many do not know yet what they were told.
        own = self._own if self._unread or found is None else found[0]()
        if own is None:
            return {}
        return {"data": to_json(own)} | ({"pass": self._number} if self._epochs else {})


def held_out(data: Data, rows: int, most: int | None) -> Iterator[Any]:
    """Held-out batches: all of them, or `most` spread evenly (counting them goes through the data once more).

    `data` is a `Source`, `Rows`, a function without arguments that returns an iterator, or an iterable other than an
    iterator.
    """
    if isinstance(data, Iterator):
        raise ValueError(f"held_out is a {type(data).__name__}, which ends after one evaluation; pass a list, or a "
                         "function that returns an iterator")  # fmt: skip

    if data is None or isinstance(data, Mapping | str):
        raise ValueError(f"held_out is a {type(data).__name__}; pass a list of batches, or a function that returns an "
                         "iterator of them")  # fmt: skip
    if hasattr(data, "__getitems__") and hasattr(data, "__len__"):
        data = Rows(data, name=type(data).__name__)

    def again() -> Any:
        for name in ("held_out", "once"):
            if hasattr(data, name):
                return getattr(data, name)(rows)
        return data() if callable(data) else data

    every = 1 if most is None else max(1, -(-sum(1 for _ in again()) // most))
    return (jax.tree.map(as_array, batch) for batch in itertools.islice(again(), 0, None, every))


def weight_of(batch: Any) -> float:
    """How much a global batch's mean counts among others: the sum of its "mask" where it has one, else its rows."""
    if not (isinstance(batch, dict) and "mask" in batch):
        return rows_of(batch)
    mask = batch["mask"]
    return float(jnp.sum(mask) if isinstance(mask, jax.Array) else np.sum(mask))


class Fitting:
    """Fills up batches whose rows do not divide, where they have a "mask": `fit(batch, blocks)`.

    Rows of the batch are repeated with the mask 0, up to the rows of the longest batch so far, for which the step is
    compiled, or else up to the next multiple of `blocks`. A batch without a mask is left as it is: the step says how to
    pad it. `check(batch)` is called with the first that is filled up.
    """

    def __init__(self, check: Callable[[Any], None] = lambda batch: None):
        self._most, self._check, self._checked = 0, check, False

    def __call__(self, batch: Any, blocks: int) -> Any:
        """The batch, with a number of rows that `blocks` divides."""
        if not (isinstance(batch, dict) and "mask" in batch):
            return batch
        rows = rows_of(batch)
        if not rows or rows % blocks == 0:
            self._most = max(self._most, rows)
            return batch
        taken = np.arange(max(self._most, -(-rows // blocks) * blocks)) % rows
        marked = lambda x: isinstance(x, Replicated)
        filled = jax.tree.map(lambda x: x if marked(x) else np.asarray(x)[taken], batch, is_leaf=marked)
        filled["mask"][rows:] = 0
        if not self._checked:
            self._check(filled)
            self._checked = True
        return filled
