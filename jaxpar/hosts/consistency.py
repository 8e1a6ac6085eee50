"""Before the first step the processes compare notes: one that runs something else is named, and by what.

Devices are not asked: programs that differ wait for each other in a collective for ever, or train something else.
Process 0 lays its notes into the coordinator's table, each other one says there how its own differ, and process 0 sums
up.
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
from .initialize import place as joined
from .store import Coordinator, Store

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "jaxpar")
PATIENCE = 600.0  # seconds that a process is waited for that lives and does not come, to read data or to compile
_ASKING = 30.0  # seconds after which it is said who is waited for
_SHOWN = 120  # characters of a value
# Bytes of a text, compressed, whose first difference is looked for; beyond that it is only said to differ.
_MOST = 2**21


def compare(
    what: str, notes: Mapping[str, Any], texts: Mapping[str, str] | None = None, hint: str = "start all with the same"
) -> None:
    """Raise ValueError in every process where any has other notes than process 0: what differs, and where. All call it,
    with the same `what`, as often as each other. Nothing happens in a run of one process.

    Args:
      what: what is compared, such as "the step".
      notes: name -> value, compared as text.
      texts: name -> a long text; the first line that differs is shown.
      hint: what to do where something differs.
    """
    if jax.process_count() == 1:
        return
    here = joined()
    if here.processes == 1:  # joined by jax.distributed.initialize, and not by ours
        here = Place("jax", None, jax.process_count(), jax.process_index())
    watch = ending.watch()
    patience = watch.silent if watch is not None and watch.own.armed else PATIENCE
    number = _counts[what] = _counts.get(what, 0) + 1
    Comparison(Coordinator(), here, f"{what}/{number}", patience)(what, notes, texts or {}, hint)


def told(what: str, own: str, patience: float = 10.0) -> dict[int, str]:
    """What every process says, by its number: this one `own`. Those that have not said it within so many seconds are
    left out. All call it, with the same `what`, as often as each other.
    """
    if jax.process_count() == 1:
        return {0: own}
    store, end = Coordinator(), time.monotonic() + patience
    number = _counts[what] = _counts.get(what, 0) + 1
    key = f"told/{what}/{number}"
    store.set(f"{key}/{jax.process_index()}", own)
    while len(said := store.folder(key)) < jax.process_count() and time.monotonic() < end:
        time.sleep(0.02)
    return {int(rank): text for rank, text in sorted(said.items())}


_counts: dict[str, int] = {}


class Comparison:
    """One comparison: called in every process, it raises ValueError in all or in none.

    Args:
      store: the coordinator's table.
      place: which process this is.
      key: of this comparison alone.
      patience: seconds that process 0 waits for the others, and these for it.
      ask: of a process that has not come, why it never will; "" while it may.
    """

    def __init__(self, store: Store, place: Place, key: str, patience: float, ask: Callable[[int], str] | None = None):
        self.store, self.place, self.key, self.patience = store, place, f"notes/{key}", patience
        self.ask = ask or _why_never
        self.host = socket.gethostname()

    def __call__(self, what: str, notes: Mapping[str, Any], texts: Mapping[str, str], hint: str) -> None:
        """See `compare`."""
        mine = {name: str(value) for name, value in notes.items()}
        sums = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
        if self.place.process == 0:
            for name, text in texts.items():
                packed = base64.b64encode(zlib.compress(text.encode())).decode()
                self.store.set(f"{self.key}/text/{name}", packed if len(packed) < _MOST else "")
            self.store.set(f"{self.key}/zero", json.dumps([self.host, mine, sums]))
            try:
                said = self._wait(self._all_said, what)
                verdict = self._summed({int(rank): json.loads(text) for rank, text in said.items()}, what, hint)
            except ValueError as error:  # of one that does not come: those that did hear of it too
                verdict = str(error)
            self.store.set(f"{self.key}/verdict", verdict)
        else:
            zero = json.loads(self._wait(lambda: self.store.get(f"{self.key}/zero"), what))
            self.store.set(
                f"{self.key}/said/{self.place.process}", json.dumps([self.host, self._differ(zero, mine, sums, texts)])
            )
            verdict = self._wait(lambda: self.store.get(f"{self.key}/verdict"), what)
        if verdict:
            raise ValueError(verdict)

    def _all_said(self) -> dict[str, str] | None:
        said = self.store.folder(f"{self.key}/said")
        return said if len(said) == self.place.processes - 1 else None

    def _wait(self, get: Callable[[], Any], what: str) -> Any:
        """What `get` returns once it is not None. The watchdog ends the process where one that it waits for is lost."""
        begin, pause, asked = time.monotonic(), 0.005, _ASKING
        while (value := get()) is None:
            waited = time.monotonic() - begin
            missing = self._missing()
            for rank in missing:
                if why := self.ask(rank):
                    raise ValueError(f"rank {rank} will not compare {what} with the others: {why}")
            who = f"rank {', '.join(map(str, missing))}"
            if waited > self.patience:
                raise ValueError(f"{who} has not come to compare {what} within {self.patience:.0f} s, though it lives; "
                                 "see what it does, and that every process runs the same script")  # fmt: skip
            if waited > asked:
                asked *= 2
                print(f"jaxpar: waiting for {who}, to compare {what}", file=sys.stderr, flush=True)  # noqa: T201
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        return value

    def _missing(self) -> list[int]:
        if self.place.process:
            return [0]
        said = self.store.folder(f"{self.key}/said")
        return [rank for rank in range(1, self.place.processes) if str(rank) not in said]

    def _differ(
        self, zero: Any, mine: Mapping[str, str], sums: Mapping[str, str], texts: Mapping[str, str]
    ) -> list[list[str]]:
        """[what, there, here] of all that differs; there and here are "" where it is too long to be shown."""
        _, notes, their_sums = zero
        none = "not there"
        found = [
            [name, notes.get(name, none), mine.get(name, none)]
            for name in dict.fromkeys([*notes, *mine])
            if notes.get(name) != mine.get(name)
        ]
        for name in sums:
            if sums[name] != their_sums.get(name):
                packed = self.store.get(f"{self.key}/text/{name}")
                theirs = zlib.decompress(base64.b64decode(packed)).decode() if packed else ""
                found.append([name, *_first_difference(theirs, texts[name])] if theirs else [name, "", ""])
        return found

    def _summed(self, said: Mapping[int, Any], what: str, hint: str) -> str:
        """One sentence of all that differs; "" where nothing does."""
        differing: dict[tuple[str, str, str], list[str]] = {}
        for rank, (host, found) in sorted(said.items()):
            for name, there, here in found:
                differing.setdefault((name, there, here), []).append(f"{rank} on {host}")
        if not differing:
            return ""
        parts = []
        for (name, there, here), ranks in differing.items():
            where = f"rank {', '.join(ranks)}"
            if there or here:
                parts.append(f"{name} is {_short(there)} on rank 0 on {self.host} and {_short(here)} on {where}")
            else:
                parts.append(f"{name} differs between rank 0 on {self.host} and {where}")
        more = f"; and {len(parts) - 4} more" if len(parts) > 4 else ""
        return f"the processes differ in {what}: {'; '.join(parts[:4])}{more}; {hint}"


def _why_never(rank: int) -> str:
    watch = ending.watch()
    if watch is None or (heard := watch.heard.get(rank)) is None:
        return ""
    if heard.beat.ended:
        return f"its script has ended; it {heard.beat.where}"
    # Who is here has not begun that step; what was heard last may be of the run before.
    if heard.beat.run == watch.own.run and heard.beat.position > watch.own.position:
        return f"it {heard.beat.where}, with a batch of shapes that it has trained on before"
    return ""


def _first_difference(there: str, here: str) -> tuple[str, str]:
    """The first lines that differ."""
    theirs, ours = there.splitlines(), here.splitlines()
    for a, b in zip(theirs, ours, strict=False):
        if a != b:
            return f"{a.strip()!r}", f"{b.strip()!r}"
    return f"{len(theirs)} lines long", f"{len(ours)}"


def _short(value: str) -> str:
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."


# -- what notes are made of --------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Versions of the packages that make a program what it is."""
    found = {}
    for package in PACKAGES:
        try:
            found[f"the version of {package}"] = version(package)
        except PackageNotFoundError:  # run from a folder
            found[f"the version of {package}"] = "not installed"
    return found


def program(jaxpr: Any) -> str:
    """A jaxpr as text that is the same in every process, with the digests of the constants that it closes over."""
    text = re.sub(r"0x[0-9a-f]+", "0x", str(jaxpr))  # where a function is in memory says nothing
    consts = [x for x in getattr(jaxpr, "consts", ()) if not isinstance(x, jax.Array) or x.is_fully_addressable]
    return "\n".join([text, *(f"constant {shapes(x)} {digest(x)}" for x in consts)])


def shapes(batch: Any) -> str:
    """The leaves of a batch by their path: dtype and shape."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    parts = (
        f"{jax.tree_util.keystr(path)} {getattr(x, 'dtype', type(x).__name__)}{list(np.shape(x))}" for path, x in leaves
    )
    return ", ".join(part.strip() for part in parts)


def digest(batch: Any) -> str:
    """What a batch of arrays holds, in 16 digits; those that lie on several hosts are one for all, and left out."""
    found = hashlib.sha256()
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            continue
        if jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        array = np.ascontiguousarray(x)
        found.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()[:16]
