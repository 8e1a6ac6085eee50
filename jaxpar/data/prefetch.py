"""Batches read ahead, in a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from threading import Condition, Thread
from typing import Any

_PATIENCE = 5.0  # seconds that the end waits for a batch that is being read


class Ahead:
    """Reads batches ahead in a thread, at most `count` of them, and puts them on their devices; an iterator.

        with Ahead(data, step.send, 2) as batches:
            for batch in batches:
                state, metrics = step(state, batch)

    What the data raise, and their end, comes where the batch would have come. At its own end, or when it is closed, the
    thread ends; one that is stuck in the data is left behind, and does not keep the process.

    Args:
      batches: an iterable; a `Stream` is asked for its state after every batch.
      prepare: called in the thread with every batch, as `step.send`.
      count: how many batches at most are ready and not yet taken. They need memory where `prepare` puts them.

    Raises ValueError where `count` is below 1.
    """

    def __init__(self, batches: Any, prepare: Callable[[Any], Any], count: int):
        if count < 1:
            raise ValueError(f"count={count} batches cannot be read ahead; use 1 or more, or the data themselves")
        self._batches: Iterator[Any] = iter(batches)
        self._prepare, self._count = prepare, count
        self._ready: deque[tuple[Any, Any]] = deque()
        self._error: BaseException | None = None
        self._closed, self._changed = False, Condition()
        self._position = self._asked()
        self._thread = Thread(target=self._read, name="jaxpar-data", daemon=True)
        self._thread.start()

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> Any:
        """The next batch; waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error is not None or self._closed)
            if self._ready:
                batch, self._position = self._ready.popleft()
                self._changed.notify_all()
                return batch
            if self._error is not None:
                raise self._error
            raise ValueError("these batches are closed; read on from the data with a new Ahead")

    def state(self) -> Any:
        """The position of the next batch that is taken, not of the next one that is read: see `Stream.state`."""
        return self._position

    def close(self) -> None:
        """Ends the thread, after the batch that it is reading."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(_PATIENCE)

    def _asked(self) -> Any:
        ask = getattr(self._batches, "state", None)
        return ask() if callable(ask) else None

    def _read(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._count)
                    if self._closed:
                        return
                batch = self._prepare(next(self._batches))
                with self._changed:
                    if not self._closed:
                        self._ready.append((batch, self._asked()))
                        self._changed.notify_all()
        except BaseException as error:  # raised where the batch would have been taken
            with self._changed:
                self._error = error
                self._changed.notify_all()
