"""What a run leaves behind: a line of JSON for every step and evaluation, TensorBoard events, a plot of the loss."""

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
from ...checkpoint.about import exact
from .folder import write_whole
from .loop import Run
from .picture import plot


class Recorder:
    """A hook that writes `metrics.jsonl`, TensorBoard events if tensorboardX is installed, and `loss.png`
    (`picture.plot`).

    Each line of `metrics.jsonl` is one step or one evaluation, losses as the model returns them (nats), what is not
    finite as null. The first line of each start also has the `strategy` and the `devices`. Where a run resumes from an
    earlier step than the last one written, later lines are removed. What cannot be written (a full disk) ends the run:
    OSError names the file.
    """

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._board: _Board | None = None
        self._failed = False
        self._start: dict[str, str] = {}  # what the next line says of this start of the run

    def on_start(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """Opens the files, for a run that has somewhere to write to."""
        if trainer.loop.out is None or trainer.files is None:
            return
        path = trainer.files / "metrics.jsonl"
        with self._writing(path):
            write_whole(path, until(trainer.loop.out / "metrics.jsonl", metrics["step"]))
            self._file = path.open("a", buffering=1)
        self._start = _under(trainer)
        if importlib.util.find_spec("tensorboardX") is not None:
            folder = trainer.files / "tensorboard"
            with self._writing(folder):
                self._board = _Board(folder, int(metrics["step"]) + 1)

    def on_step(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """Writes one line."""
        out = trainer.files
        if self._file is not None and out is not None:
            finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            with self._writing(out / "metrics.jsonl"):
                self._file.write(json.dumps(finite | self._start) + "\n")
            self._start = {}
        if self._board is not None and out is not None:
            with self._writing(out / "tensorboard"):
                self._board.write(metrics)

    on_evaluate = on_step

    def on_end(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """Closes the files, and draws the loss."""
        out, open_ = trainer.files, [x for x in (self._file, self._board) if x is not None]
        self._file = self._board = None
        if out is None or not open_:
            return
        if self._failed:  # the run ends for it, and closing would say it again
            for file in open_:
                with contextlib.suppress(OSError):
                    file.close()
            return
        with self._writing(out / "metrics.jsonl"):
            for file in open_:
                file.close()
        if out.exists():  # else someone has removed it under the run, which ends with these words
            with self._writing(out / "loss.png"):
                plot(
                    read(out / "metrics.jsonl"),
                    out / "loss.png",
                    trainer.units,
                    "{strategy} on {devices}".format(**_under(trainer)),
                )

    @contextlib.contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed = True
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error


class _Board:
    """A file of TensorBoard's events, written where it is asked for.

    tensorboardX's own writer does it in a thread; where that died of a full disk, the next `add_scalar` waited for it
    for ever.
    """

    def __init__(self, folder: Path, first: int):
        from tensorboardX.event_file_writer import EventsWriter

        made: Any = importlib.import_module("tensorboardX.proto.event_pb2")  # whose names no type checker finds
        self._event, log = made.Event, made.SessionLog
        self._summary = importlib.import_module("tensorboardX.proto.summary_pb2").Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._events = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        self._write(step=first, session_log=log(status=log.START))  # what is there from this step on is not true
        self._events.flush()
        self._flushed = time.monotonic()

    def write(self, metrics: Mapping[str, float]) -> None:
        """Everything but the step, as scalars; every 10 s it reaches the disk, which is waited for."""
        values = [self._summary.Value(tag=name, simple_value=x) for name, x in metrics.items() if name != "step"]
        self._write(step=int(metrics["step"]), summary=self._summary(value=values))
        if time.monotonic() - self._flushed > 10:
            self._events.flush()
            self._flushed = time.monotonic()

    def _write(self, **what: Any) -> None:
        self._events.write_event(self._event(wall_time=time.time(), **what))

    def close(self) -> None:
        """Ends the file."""
        self._events.close()


def _under(trainer: Run) -> dict[str, str]:
    """The strategy of a run, with the sizes of its axes, and its devices."""
    step = trainer.step
    devices = f"{step.mesh.size} x {step.mesh.devices.flat[0].device_kind}"
    return {"strategy": str(exact(step)), "devices": devices}


def read(path: Place) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; none where there is no file. A last line that a kill cut short is left out.

    Raises ValueError where another line is not what a run writes.
    """
    lines = path.read_bytes().splitlines() if path.exists() else []
    if lines and not lines[-1].endswith(b"}"):
        lines.pop()
    return [_line(path, number, line) for number, line in enumerate(lines, 1)]


def until(path: Place, step: float) -> bytes:
    """Of such a file, what a run wrote up to a step, after which it goes on."""
    return "".join(f"{json.dumps(line)}\n" for line in read(path) if line["step"] <= step).encode()


def _line(path: Place, number: int, text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text)
        float(line["step"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path}, line {number} is {text[:60]!r}, and a run writes JSON with a step; remove the line, or the file"
        ) from error
    return line
