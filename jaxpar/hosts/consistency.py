"""Compare what the processes of a run are about to do, and name the process that differs.

Processes that run different programs wait for each other in a collective for ever, or train something else. So the
comparison uses no device. It goes through the coordinator's table, whose keys are

    notes/KEY/zero, text/NAME    process 0 writes its notes, and its long texts in compressed form
    notes/KEY/said/RANK          every other process writes the list of its differences from process 0
    notes/KEY/verdict            process 0 writes one sentence, which every process raises; "" if nothing differs
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import numpy as np

from . import ending
from .environment import Place
from .initialize import place as joined_place
from .store import Coordinator, Store

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "jaxpar")
# Seconds to wait for a process that is alive but does not come, because it reads data or compiles.
PATIENCE = 600.0
_FIRST_NOTICE = 30.0  # seconds after which stderr says which process is missing
_MAX_SHOWN = 120  # characters of a value in an error
# Bytes of a compressed text that the table takes. Of longer texts, only the digests are compared.
_MAX_TEXT = 2**21


def compare(
    subject: str,
    notes: Mapping[str, Any],
    texts: Mapping[str, str] | None = None,
    hint: str = "start all with the same",
) -> None:
    """Raise ValueError in every process if the notes of any process differ from process 0's.

    All processes call this with the same `subject`, equally often. A run of one process compares nothing.

    Args:
      subject: what is compared, such as "the step".
      notes: name -> value, compared as text.
      texts: name -> a long text; the error shows the first line that differs.
      hint: what to do about a difference.

    Raises:
      ValueError: the processes differ; the message says in what, and on which hosts. Or a process did not come.
    """
    if jax.process_count() == 1:
        return
    place = joined_place()
    if place.processes == 1:  # the user called jax.distributed.initialize instead of jp.initialize
        place = Place("jax", None, jax.process_count(), jax.process_index())
    watch = ending.watch()
    # Before the first step a process may compile or read data for long; afterwards the watchdog's limit holds.
    patience = watch.silence_limit if watch is not None and watch.beat.has_stepped else PATIENCE
    count = _counts[subject] = _counts.get(subject, 0) + 1
    Comparison(Coordinator(), place, f"{subject}/{count}", patience)(subject, notes, texts or {}, hint)


def told(subject: str, statement: str) -> dict[int, str]:
    """Exchange one statement per process; return rank -> statement, of all that come within 10 seconds.

    All processes call this with the same `subject`, equally often.
    """
    if jax.process_count() == 1:
        return {0: statement}
    store, deadline = Coordinator(), time.monotonic() + 10
    # Counted alike in all processes, so that statements of an earlier call are never read.
    count = _counts[subject] = _counts.get(subject, 0) + 1
    key = f"told/{subject}/{count}"
    store.set(f"{key}/{jax.process_index()}", statement)
    # The table has no blocking read of a folder.
    while len(statements := store.folder(key)) < jax.process_count() and time.monotonic() < deadline:
        time.sleep(0.02)
    return {int(rank): text for rank, text in sorted(statements.items())}


# Calls per subject. Equal in all processes, so that every comparison has a key that no earlier one used.
_counts: dict[str, int] = {}


class Comparison:
    """One comparison among all processes: each calls it, and it raises ValueError in all of them or in none.

    Args:
      store, place, key: the coordinator's table, this process, and this comparison in the table.
      patience: seconds that process 0 waits for the others, and the others for process 0.
      ask: returns why the process of a rank will never come; "" while it may.
    """

    def __init__(self, store: Store, place: Place, key: str, patience: float, ask: Callable[[int], str] | None = None):
        self.store, self.place, self.key, self.patience = store, place, f"notes/{key}", patience
        self.ask = ask or _why_never
        self.host = socket.gethostname()

    def __call__(self, subject: str, notes: Mapping[str, Any], texts: Mapping[str, str], hint: str) -> None:
        """Compare the notes and texts of all processes; the arguments are those of `compare`."""
        # Digests of the texts travel with the notes; the texts themselves are read only if their digests differ.
        local_notes = {name: str(value) for name, value in notes.items()}
        digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
        if self.place.process == 0:
            for name, text in texts.items():
                packed = base64.b64encode(zlib.compress(text.encode())).decode()
                self.store.set(f"{self.key}/text/{name}", packed if len(packed) < _MAX_TEXT else "")
            # After the texts: whoever reads these notes finds them in the table.
            self.store.set(f"{self.key}/zero", json.dumps([self.host, local_notes, digests]))
            try:
                reports = self._wait(self._all_reports, subject)
                verdict = self._summary({int(rank): json.loads(text) for rank, text in reports.items()}, subject, hint)
            except ValueError as error:  # a process does not come: tell those that did come
                verdict = str(error)
            self.store.set(f"{self.key}/verdict", verdict)
        else:
            # Each process compares itself with process 0, so that its own texts need not travel.
            reference = json.loads(self._wait(lambda: self.store.get(f"{self.key}/zero"), subject))
            differences = self._differences(reference, local_notes, digests, texts)
            self.store.set(f"{self.key}/said/{self.place.process}", json.dumps([self.host, differences]))
            verdict = self._wait(lambda: self.store.get(f"{self.key}/verdict"), subject)
        if verdict:
            raise ValueError(verdict)

    def _all_reports(self) -> dict[str, str] | None:
        """Return the reports of all other processes by rank; None while one is missing."""
        reports = self.store.folder(f"{self.key}/said")
        return reports if len(reports) == self.place.processes - 1 else None

    def _wait(self, get: Callable[[], Any], subject: str) -> Any:
        """Poll `get` until it returns something else than None, and return that.

        The watchdog ends this process if one that it waits for is lost.

        Raises:
          ValueError: a process will never come, or has not come within `patience`.
        """
        begin, pause, next_notice = time.monotonic(), 0.005, _FIRST_NOTICE
        while (value := get()) is None:
            waited = time.monotonic() - begin
            missing = self._missing()
            # A process that has ended, or is past this comparison, would not come within any time.
            for rank in missing:
                if reason := self.ask(rank):
                    raise ValueError(
                        f"rank {rank} will not compare {subject} with the others: {reason}; let all processes run the "
                        "same script, with batches of the same shapes"
                    )
            names = f"rank {', '.join(map(str, missing))}"
            if waited > self.patience:
                raise ValueError(f"{names} has not come to compare {subject} within {self.patience:.0f} s, though it "
                                 "lives; see what it does, and that every process runs the same script")  # fmt: skip
            if waited > next_notice:
                next_notice *= 2  # after 30 s, 60 s, 120 s, ...
                print(f"jaxpar: waiting for {names}, to compare {subject}", file=sys.stderr, flush=True)  # noqa: T201
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        return value

    def _missing(self) -> list[int]:
        """Return the ranks that this process waits for."""
        if self.place.process:
            return [0]
        reports = self.store.folder(f"{self.key}/said")
        return [rank for rank in range(1, self.place.processes) if str(rank) not in reports]

    def _differences(
        self, reference: Any, local_notes: Mapping[str, str], digests: Mapping[str, str], texts: Mapping[str, str]
    ) -> list[list[str]]:
        """List [name, value on process 0, value on this process] of each difference; "" twice if a text is too long.

        `reference` is [host, notes, digests of texts] of process 0; the other arguments are this process's.
        """
        _, reference_notes, reference_digests = reference
        absent = "not there"
        # Names of process 0 come first, so that all processes list their differences in one order.
        differences = [
            [name, reference_notes.get(name, absent), local_notes.get(name, absent)]
            for name in dict.fromkeys([*reference_notes, *local_notes])
            if reference_notes.get(name) != local_notes.get(name)
        ]
        for name in digests:
            if digests[name] != reference_digests.get(name):
                packed = self.store.get(f"{self.key}/text/{name}")
                text = zlib.decompress(base64.b64decode(packed)).decode() if packed else ""
                differences.append([name, *_first_difference(text, texts[name])] if text else [name, "", ""])
        return differences

    def _summary(self, reports: Mapping[int, Any], subject: str, hint: str) -> str:
        """Describe all differences in one sentence; "" if nothing differs. `reports`: rank -> [host, differences]."""
        # Ranks with the same difference share one clause.
        ranks_by_difference: dict[tuple[str, str, str], list[str]] = {}
        for rank, (host, differences) in sorted(reports.items()):
            for name, reference, local in differences:
                ranks_by_difference.setdefault((name, reference, local), []).append(f"{rank} on {host}")
        if not ranks_by_difference:
            return ""
        clauses = []
        for (name, reference, local), ranks in ranks_by_difference.items():
            names = f"rank {', '.join(ranks)}"
            if reference or local:
                clauses.append(f"{name} is {_short(reference)} on rank 0 on {self.host} and {_short(local)} on {names}")
            else:
                clauses.append(f"{name} differs between rank 0 on {self.host} and {names}")
        more = f"; and {len(clauses) - 4} more" if len(clauses) > 4 else ""
        return f"the processes differ in {subject}: {'; '.join(clauses[:4])}{more}; {hint}"


def _why_never(rank: int) -> str:
    """Return why the process of this rank will never come to a comparison, by its last beat; "" if it may."""
    watch = ending.watch()
    if watch is None or (peer := watch.peers.get(rank)) is None:
        return ""
    if peer.beat.has_ended:
        return f"its script has ended; it {peer.beat.progress_text}"
    # This process has not begun the step that it compares for. A peer that is past it has not compared anything. Its
    # last beat may belong to an earlier run, whose positions mean nothing here.
    if peer.beat.run == watch.beat.run and peer.beat.position > watch.beat.position:
        return f"it {peer.beat.progress_text}, with a batch of shapes that it has trained on before"
    return ""


def _first_difference(reference: str, text: str) -> tuple[str, str]:
    """Return the first line that differs, of both texts; their numbers of lines if one text continues the other."""
    reference_lines, lines = reference.splitlines(), text.splitlines()
    for reference_line, line in zip(reference_lines, lines, strict=False):
        if reference_line != line:
            return f"{reference_line.strip()!r}", f"{line.strip()!r}"
    return f"{len(reference_lines)} lines long", f"{len(lines)}"


def _short(value: str) -> str:
    """Truncate a value for an error."""
    return value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}..."


# -- notes -------------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return the versions of the packages that determine a program."""
    notes = {}
    for package in PACKAGES:
        try:
            notes[f"the version of {package}"] = version(package)
        except PackageNotFoundError:  # jaxpar runs from its folder
            notes[f"the version of {package}"] = "not installed"
    return notes


def program(jaxpr: Any) -> str:
    """Return a jaxpr as text that is the same in every process, with digests of the constants that it closes over."""
    text = re.sub(r"0x[0-9a-f]+", "0x", str(jaxpr))  # a function's address in memory differs between processes
    # A constant that spans hosts is one array for all of them, and no host can read it whole.
    consts = [x for x in getattr(jaxpr, "consts", ()) if not isinstance(x, jax.Array) or x.is_fully_addressable]
    return "\n".join([text, *(f"constant {shapes(x)} {digest(x)}" for x in consts)])


def shapes(batch: Any) -> str:
    """Return the path, dtype and shape of every leaf of a batch, as one line."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    parts = (
        f"{jax.tree_util.keystr(path)} {getattr(x, 'dtype', type(x).__name__)}{list(np.shape(x))}" for path, x in leaves
    )
    return ", ".join(part.strip() for part in parts)


def digest(batch: Any) -> str:
    """Return 16 hexadecimal digits that identify the values of a batch.

    Arrays that span several hosts are left out: they are one array for all processes, and no host can read them.
    """
    sha = hashlib.sha256()
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            continue
        if jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key):
            x = jax.random.key_data(x)  # NumPy cannot hold typed keys
        array = np.ascontiguousarray(x)
        sha.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()[:16]
