"""Everything that a trainer accepts as data, as streams of batches that know their position.

data                                     how a resumed run continues
`Source`, `Rows`                         from the batch number, or from the iterator's position
a function `data(start)`                 from the batch number
an iterable with a position (torch)      from its position, in the same pass over the data
any other iterable                       the batches before the position are read and dropped
"""

from __future__ import annotations

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

Data = Any  # a `data.Source`, a function, or an iterable of batches: see `training`


class Stream:
    """An iterator of batches that knows its position.

    Args:
      batches: the batches from this position on.
      data_state: returns the data's part of `state()`; {} if the data have no position.

    Attributes:
      number: how many batches of the run come before the next one.
      fills: whether the data fill up batches with rows whose mask is 0.
    """

    fills = False

    def __init__(self, batches: Iterator[Any], number: int, data_state: Callable[[], Mapping[str, Any]] = dict):
        self._batches, self._data_state, self.number = batches, data_state, number

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        """Return the next batch, with arrays as leaves; raise ValueError if the data have ended."""
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
        """Return the position of the next batch, as JSON.

        It is the same on every host, unless the data's position differs between hosts.

        Returns:
          A dict with "batches", the number of earlier batches. If the data have a position, also "data", that position;
          "origin", the batch at which their iterator was created, if it is not 0; and "pass", the number of the pass,
          if the data have `set_epoch`.

        Raises:
          ValueError: the data's position contains values that JSON cannot store.
        """
        return {"batches": self.number, **self._data_state()}


def training(
    data: Data,
    rows: int,
    seed: int,
    start: int = 0,
    state: Mapping[str, Any] | None = None,
    part: tuple[int, int] = (0, 1),
) -> Stream:
    """Return a stream of training batches, from batch `start` on.

    Args:
      data: one of
        - a `jaxpar.data.Source` or `Rows`;
        - a data set with rows by index and `__getitems__` (Hugging Face's), which becomes `Rows`;
        - a function `data(start)` that returns an iterator of batches from batch `start` on;
        - an iterable. A list or data loader is read again and again, an iterator once. If it has a position
          (`state_dict` and `load_state_dict`, or grain's `get_state` and `set_state`), `state` restores it; otherwise
          the first `start` batches are dropped.
      rows: rows of a batch, for a `Source`.
      seed: determines the order of a `Source`.
      start: the number of the first batch.
      state: the position to continue from, of `Stream.state`; it replaces `start`.
      part: (index, count) of the rows of a batch that this host reads, for `Rows`.

    Raises:
      ValueError: the data have another form, or end before `start`.
    """
    start = start if state is None else state["batches"]
    # Hugging Face's data sets are iterable, but yield single rows: read them by index instead.
    if hasattr(data, "__getitems__") and hasattr(data, "__len__"):
        data = Rows(data, name=type(data).__name__)
    # 1. A source: batches by number or from its iterator's position.
    if hasattr(data, "batches"):
        return _of_source(data, rows, seed, start, state, part)
    # 2. A function of the first batch's number.
    if callable(data):
        # Check the signature first, so that a TypeError inside the user's function is not taken for a wrong signature.
        check_call(data, "data", "start", note="the number of the first batch: 0, or where a resumed run goes on")
        batches = data(start)
        if not isinstance(batches, Iterable):
            raise ValueError(
                f"data({start}) returned {type(batches).__name__}; return an iterator of batches from there"
            )
        return Stream(iter(batches), start)
    # 3. An iterable, from its position or by dropping batches.
    if not isinstance(data, Iterable) or isinstance(data, Mapping | str):
        raise ValueError(
            f"data is a {type(data).__name__}; pass a jaxpar.data.Source, an iterable of batches, or a function of the "
            "number of the first batch that returns one"
        )
    position = None if state is None else from_json(state.get("data"))
    passes = _Passes(data, position, 0 if state is None else state.get("pass", 0))
    # With a position the data continue from it. Without one they begin at batch 0, and the loop drops the batches
    # before `start`.
    stream = Stream(passes, 0 if position is None else start, passes.state)
    while stream.number < start:
        next(stream)
    return stream


def _of_source(
    data: Any, rows: int, seed: int, start: int, state: Mapping[str, Any] | None, part: tuple[int, int]
) -> Stream:
    """Return the stream of a source; arguments are as for `training`."""
    position = None if state is None else from_json(state.get("data"))
    # The position of grain's iterators counts from the batch at which they were created. Creating one at `start`
    # and restoring such a position would skip the earlier batches twice: create it at the same batch as before.
    origin = start if state is None or position is None else state.get("origin", 0)
    batches = data.batches(rows, seed, origin)
    if part[1] > 1:
        if not hasattr(batches, "part"):
            raise ValueError(
                f"rows='host', and {type(data).__name__} yields global batches; leave rows out, or use data.Rows"
            )
        batches.part = part
    get_position, origin_entry = restored(batches, position), {"origin": origin} if origin else {}
    data_state = dict if get_position is None else lambda: {"data": to_json(get_position()), **origin_entry}
    stream = Stream(batches, start, data_state)
    stream.fills = getattr(batches, "fills", False)
    return stream


class _Passes:
    """Batches of repeated passes over an iterable, or of one pass over an iterator.

    Before every pass, the method `set_epoch` of data that have it gets the number of the pass. Hugging Face's data sets
    shuffle by it. It also ends the effect of a restored position, which would otherwise apply to later passes too.

    Args:
      data: the iterable.
      position: the position to restore, in pass `pass_number`; None begins at the first batch.
    """

    def __init__(self, data: Iterable[Any], position: Any = None, pass_number: int = 0):
        self._data, self._is_iterator = data, isinstance(data, Iterator)
        self._set_epochs, self._pass_number = epochs(data), pass_number
        self._restored_position = position
        self._has_read, self._pass_is_empty = False, False
        self._announce_pass()
        # Loaders take a position before `iter`, their iterators after it.
        restored(data, position)
        self._pass = iter(data)
        if position is not None and cursor(data) is None and restored(self._pass, position) is None:
            raise ValueError(
                f"the run's position in its data is {position}, and a {type(data).__name__} takes none; resume with "
                "the data that it was trained on"
            )

    def __iter__(self) -> _Passes:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._pass)
        except StopIteration:
            # A pass without any batch ends the data: empty iterables would loop here forever.
            if self._is_iterator or self._pass_is_empty:
                raise
            self._pass_number, self._pass_is_empty = self._pass_number + 1, True
            self._announce_pass()
            self._pass = iter(self._data)
            return next(self)
        self._pass_is_empty, self._has_read = False, True
        return batch

    def _announce_pass(self) -> None:
        """Tell the data the number of the pass that begins."""
        for set_epoch in self._set_epochs:
            set_epoch(self._pass_number)

    def state(self) -> dict[str, Any]:
        """Return the data's position and the number of the pass, as entries of `Stream.state`."""
        methods = cursor(self._data) or cursor(self._pass)
        # Before their first batch, many loaders do not yet report a position that they were given.
        position = self._restored_position if not self._has_read or methods is None else methods[0]()
        if position is None:
            return {}
        return {"data": to_json(position)} | ({"pass": self._pass_number} if self._set_epochs else {})


def held_out(data: Data, rows: int, max_batches: int | None) -> Iterator[Any]:
    """Return the held-out batches.

    Args:
      data: a `Source`, `Rows`, a function without arguments that returns an iterator, or an iterable that can be read
        again.
      rows: rows of a batch, for a `Source` or `Rows`.
      max_batches: takes this many batches, evenly spaced, or all if there are fewer; counting them reads the data once
        more. None takes all.

    Raises:
      ValueError: the data have another form.
    """
    if isinstance(data, Iterator):
        raise ValueError(f"held_out is a {type(data).__name__}, which ends after one evaluation; pass a list, or a "
                         "function that returns an iterator")  # fmt: skip

    if data is None or isinstance(data, Mapping | str):
        raise ValueError(f"held_out is a {type(data).__name__}; pass a list of batches, or a function that returns an "
                         "iterator of them")  # fmt: skip
    if hasattr(data, "__getitems__") and hasattr(data, "__len__"):
        data = Rows(data, name=type(data).__name__)

    def new_pass() -> Any:
        # A `Source` has `held_out`, `Rows` have `once`.
        for name in ("held_out", "once"):
            if hasattr(data, name):
                return getattr(data, name)(rows)
        return data() if callable(data) else data

    if max_batches is None:
        return (jax.tree.map(as_array, batch) for batch in new_pass())
    # The data may have no length, so count the batches by a pass.
    count = sum(1 for _ in new_pass())
    num_chosen = min(count, max_batches)
    chosen = {i * count // num_chosen for i in range(num_chosen)}
    return (jax.tree.map(as_array, batch) for i, batch in enumerate(new_pass()) if i in chosen)


def weight_of(batch: Any) -> float:
    """Return the weight of a global batch's mean in an average over batches: the sum of its "mask", or its rows."""
    if not (isinstance(batch, dict) and "mask" in batch):
        return rows_of(batch)
    mask = batch["mask"]
    # A `jax.Array` may have rows on other hosts, which NumPy cannot read.
    return float(jnp.sum(mask) if isinstance(mask, jax.Array) else np.sum(mask))


class Fitting:
    """Fills up batches with a "mask" whose rows do not divide over replicas and microbatches: `fit(batch, blocks)`.

    Rows of the batch are repeated, with the mask 0. The batch gets as many rows as the longest batch so far, for which
    the step is compiled, or else the next multiple of `blocks`. A batch without a mask is returned unchanged; the step
    then raises an error that says how to pad it.

    Args:
      check: called with the first batch that is filled up, to check that the loss weighs by the mask.
    """

    def __init__(self, check: Callable[[Any], None] = lambda batch: None):
        self._max_rows, self._check, self._is_checked = 0, check, False

    def __call__(self, batch: Any, blocks: int) -> Any:
        """Return the batch with a number of rows that `blocks` divides."""
        if not (isinstance(batch, dict) and "mask" in batch):
            return batch
        rows = rows_of(batch)
        if not rows or rows % blocks == 0:
            self._max_rows = max(self._max_rows, rows)
            return batch
        # Row indices that go round: the first rows fill up the batch.
        indices = np.arange(max(self._max_rows, -(-rows // blocks) * blocks)) % rows
        is_replicated = lambda x: isinstance(x, Replicated)  # has no rows
        filled = jax.tree.map(lambda x: x if is_replicated(x) else np.asarray(x)[indices], batch, is_leaf=is_replicated)
        # Indexing has copied the leaf, so that the caller's mask stays as it was.
        filled["mask"][rows:] = 0
        if not self._is_checked:
            self._check(filled)
            self._is_checked = True
        return filled
