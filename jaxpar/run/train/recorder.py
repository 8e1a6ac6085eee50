"""The records of a run: a line of JSON for every step and evaluation, TensorBoard events, and a plot of the loss.

`Recorder` is the hook that writes them; `read` reads `metrics.jsonl`. A run that resumes first removes the lines after
its checkpoint (`lines_until`), so that each step has one line.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from ...backend.buckets import Place
from ...checkpoint.about import resolved_strategy
from ...layout.mesh import devices_text
from .folder import write_whole
from .loop import Run
from .picture import plot


class Recorder:
    """A hook that writes `metrics.jsonl`, `loss.png` and, if tensorboardX is installed, TensorBoard events.

    Each line of `metrics.jsonl` is one step or one evaluation. Losses are as the model returns them (nats); values that
    are not finite are null. The first line of each start also has the `strategy` and the `devices`. If a run resumes
    from an earlier step than the last one written, later lines are removed. `picture.plot` draws `loss.png`.

    If a file cannot be written, for example because the disk is full, the run ends with an OSError that names it.
    """

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._board: _Board | None = None
        self._has_failed = False  # whether a write has failed, which ends the run
        self._start_fields: dict[str, str] = {}  # strategy and devices, for the first line after a start

    def on_start(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """Open the files, if the run has a folder."""
        if trainer.loop.out is None or trainer.files is None:
            return
        path = trainer.files / "metrics.jsonl"
        with self._writing(path):
            # A resumed run repeats the steps after its checkpoint. Their lines go.
            write_whole(path, lines_until(trainer.loop.out / "metrics.jsonl", metrics["step"]))
            # Buffered by line, so that a kill loses no complete line.
            self._file = path.open("a", buffering=1)
        self._start_fields = _setup(trainer)
        if importlib.util.find_spec("tensorboardX") is not None:
            folder = trainer.files / "tensorboard"
            with self._writing(folder):
                self._board = _Board(folder, int(metrics["step"]) + 1)

    def on_step(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """Write one line and the TensorBoard scalars."""
        folder = trainer.files
        if self._file is not None and folder is not None:
            # JSON has no NaN and no infinity: null stands for them.
            finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            with self._writing(folder / "metrics.jsonl"):
                self._file.write(json.dumps(finite | self._start_fields) + "\n")
            self._start_fields = {}
        if self._board is not None and folder is not None:
            with self._writing(folder / "tensorboard"):
                self._board.write(metrics)

    on_evaluate = on_step

    def on_end(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """Close the files, and draw the loss."""
        folder, open_files = trainer.files, [x for x in (self._file, self._board) if x is not None]
        self._file = self._board = None
        if folder is None or not open_files:
            return
        if self._has_failed:
            # The run is ending with the error of the failed write. Closing flushes, which would fail again.
            for file in open_files:
                with contextlib.suppress(OSError):
                    file.close()
            return
        with self._writing(folder / "metrics.jsonl"):
            for file in open_files:
                file.close()
        if folder.exists():  # else the folder was removed during the run, which ends with an error about that
            with self._writing(folder / "loss.png"):
                plot(
                    read(folder / "metrics.jsonl"),
                    folder / "loss.png",
                    trainer.units,
                    "{strategy} on {devices}".format(**_setup(trainer)),
                )

    @contextlib.contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        """Add the path to an OSError of the block, and note the failure."""
        try:
            yield
        except OSError as error:
            self._has_failed = True
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error


class _Board:
    """A file of TensorBoard events, written by the thread of the run.

    tensorboardX's own writer uses a thread. If that died of a full disk, the next `add_scalar` waited for it for ever.
    """

    def __init__(self, folder: Path, first_step: int):
        from tensorboardX.event_file_writer import EventsWriter

        # Generated modules, in which a type checker finds no names.
        event_module: Any = importlib.import_module("tensorboardX.proto.event_pb2")
        self._event, log = event_module.Event, event_module.SessionLog
        self._summary = importlib.import_module("tensorboardX.proto.summary_pb2").Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._events = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        # Makes TensorBoard drop the events of an earlier start from this step on.
        self._write(step=first_step, session_log=log(status=log.START))
        self._events.flush()
        self._flushed = time.monotonic()

    def write(self, metrics: Mapping[str, float]) -> None:
        """Write the metrics as scalars, and every 10 s flush them to the disk."""
        values = [self._summary.Value(tag=name, simple_value=x) for name, x in metrics.items() if name != "step"]
        self._write(step=int(metrics["step"]), summary=self._summary(value=values))
        if time.monotonic() - self._flushed > 10:
            self._events.flush()
            self._flushed = time.monotonic()

    def _write(self, **fields: Any) -> None:
        """Write an event with these fields of its protocol buffer."""
        self._events.write_event(self._event(wall_time=time.time(), **fields))

    def close(self) -> None:
        """Flush and close the file."""
        self._events.close()


def _setup(trainer: Run) -> dict[str, str]:
    """Return the strategy of a run, with the sizes of its axes, and its devices."""
    return {"strategy": str(resolved_strategy(trainer.step)), "devices": devices_text(trainer.step.mesh)}


def read(path: Place) -> list[dict[str, Any]]:
    """Return the lines of a `metrics.jsonl`, without a last line that a kill cut short; [] if there is no file.

    Raises:
      ValueError: if another line is not JSON with a step.
    """
    lines = path.read_bytes().splitlines() if path.exists() else []
    # A run writes whole lines. Only a kill leaves one without its brace, and only at the end.
    if lines and not lines[-1].endswith(b"}"):
        lines.pop()
    return [_line(path, number, line) for number, line in enumerate(lines, 1)]


def lines_until(path: Place, step: float) -> bytes:
    """Return the content of a `metrics.jsonl` up to and including a step."""
    # Rewritten from the parsed lines, so that a line that was cut short is gone as well.
    return "".join(f"{json.dumps(line)}\n" for line in read(path) if line["step"] <= step).encode()


def _line(path: Place, number: int, text: bytes) -> dict[str, Any]:
    """Parse line `number` of a file. Raises ValueError if it is not JSON with a step."""
    try:
        line = json.loads(text)
        float(line["step"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path}, line {number} is {text[:60]!r}, and a run writes JSON with a step; remove the line, or the file"
        ) from error
    return line
