"""Batches read ahead in a thread.

The thread and the consumer share a queue of at most `count` batches, guarded by one condition:

    thread      wait until the queue has room  ->  read and prepare a batch  ->  append it with its position
    consumer    wait until the queue has a batch, the thread has failed, or `close`  ->  take the batch

Every batch travels with the position after it, so that `state()` counts batches taken, not batches read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from threading import Condition, Thread
from typing import Any

_CLOSE_TIMEOUT = 5.0  # seconds that `close` waits for the thread, which may be reading a batch


class Ahead:
    """An iterator that reads up to `count` batches ahead in a thread and puts them on their devices.

        with Ahead(data, step.send, 2) as batches:
            for batch in batches:
                state, metrics = step(state, batch)

    An error of the data, or their end, is raised when the batch would have been taken. The thread ends with the data or
    when the iterator is closed. A thread that is stuck in the data is abandoned, and does not keep the process alive.

    Args:
      batches: an iterable. If it has a method `state`, as a `Stream` does, it is called after every batch.
      prepare: called in the thread with every batch, such as `step.send`.
      count: the largest number of batches that are ready and not yet taken. They need memory on their devices.

    Raises:
      ValueError: `count` is below 1.
    """

    def __init__(self, batches: Any, prepare: Callable[[Any], Any], count: int):
        if count < 1:
            raise ValueError(f"count={count} batches cannot be read ahead; use 1 or more, or the data themselves")
        self._batches: Iterator[Any] = iter(batches)
        self._prepare, self._count = prepare, count
        self._ready: deque[tuple[Any, Any]] = deque()
        self._error: BaseException | None = None
        self._closed, self._changed = False, Condition()
        self._position = self._batches_state()
        self._thread = Thread(target=self._read, name="jaxpar-data", daemon=True)
        self._thread.start()

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> Any:
        """Wait for the next batch and return it."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error is not None or self._closed)
            # Batches that were read before an error come first: the error is raised in its turn.
            if self._ready:
                batch, self._position = self._ready.popleft()
                self._changed.notify_all()
                return batch
            if self._error is not None:
                raise self._error
            raise ValueError("these batches are closed; read on from the data with a new Ahead")

    def state(self) -> Any:
        """Return the position of the next batch to be taken, not of the next one to be read: see `Stream.state`."""
        return self._position

    def close(self) -> None:
        """End the thread after the batch that it is reading."""
        with self._changed:
            self._closed = True
            # Nobody takes these batches any more: free their memory on the devices.
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(_CLOSE_TIMEOUT)

    def _batches_state(self) -> Any:
        """Return the data's position; None if they have none."""
        get_state = getattr(self._batches, "state", None)
        return get_state() if callable(get_state) else None

    def _read(self) -> None:
        """Read batches until the data end or the iterator is closed; this runs in the thread."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._count)
                    if self._closed:
                        return
                # Without the lock: the consumer takes batches meanwhile.
                batch = self._prepare(next(self._batches))
                with self._changed:
                    if not self._closed:
                        # The position is that after this batch, so read it before the next one.
                        self._ready.append((batch, self._batches_state()))
                        self._changed.notify_all()
        except BaseException as error:  # StopIteration too: `__next__` raises it in the consumer
            with self._changed:
                self._error = error
                self._changed.notify_all()
