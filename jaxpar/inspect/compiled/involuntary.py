"""Involuntary rematerialisation: what XLA says where it finds no way from one sharding of an array to another.

It then replicates the whole and cuts it anew, and warns on stderr, from C++ (spmd_partitioner.cc): "[SPMD] Involuntary
full rematerialization. The compiler cannot go from sharding ... to ...". Gradients are computed inside `shard_map`,
where nothing is partitioned; the update is where it happens, for an optimizer that asks for a sharding that is not the
leaf's: P('pipe', 'fsdp') to P(None, None, ('pipe', 'fsdp')), or P(None, ('pipe', 'fsdp')) to P('fsdp'). Of optax's own,
Muon, LAMB and Adafactor were tried beside ZeRO, tensor and pipe: they send, and XLA warns of none.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from .hlo import arrays

_SAID = "[SPMD] Involuntary full rematerialization"
_ONE = threading.Lock()  # a process has one stderr


@dataclass(frozen=True)
class Rematerialised:
    """One warning.

    Attributes:
      dtype: of the array, as HLO names it.
      local: its shape on a device, before.
      given, wanted: its specs before and after; None where the warning's is no spec of the mesh.
      operation: the operation that made it, by JAX's name.
    """

    dtype: str
    local: tuple[int, ...]
    given: PartitionSpec | None
    wanted: PartitionSpec | None
    operation: str

    def parts(self, sizes: Mapping[str, int]) -> list[int]:
        """Into how many parts the array was cut before, dim by dim; `sizes` are those of the mesh axes."""
        entries = [*(self.given or ()), *[None] * len(self.local)]
        return [math.prod(sizes[axis] for axis in axes_of(entry)) for entry in entries[: len(self.local)]]

    def whole(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the whole array, with what the compiler has padded."""
        return tuple(n * parts for n, parts in zip(self.local, self.parts(sizes), strict=True))


def axes_of(entry: Any) -> tuple[str, ...]:
    """The axes of one dim, as a spec has them."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """The compiler's warnings of rematerialisation in the block, taken from file descriptor 2; the list is complete
    after it. All else goes on to stderr as it comes, and so do they if the block raises. Should the process abort, what
    it wrote last may be lost.
    """
    said: list[str] = []
    with _ONE:
        try:
            stderr = os.dup(2)
        except OSError:  # a process without one
            yield said
            return
        if sys.stderr is not None:
            sys.stderr.flush()
        ours, theirs = os.pipe()
        os.dup2(theirs, 2)
        os.close(theirs)
        reader = threading.Thread(target=_pass_on, args=(ours, stderr, said), daemon=True)
        reader.start()
        try:
            yield said
        except BaseException:
            _end(reader, stderr, ours)
            for line in said:
                os.write(stderr, line.encode())
            os.close(stderr)
            raise
        _end(reader, stderr, ours)
        os.close(stderr)


def _end(reader: threading.Thread, stderr: int, ours: int) -> None:
    if sys.stderr is not None:
        sys.stderr.flush()
    os.dup2(stderr, 2)  # the last that could write to `ours`, so that the reader comes to its end
    reader.join()
    os.close(ours)


def _pass_on(ours: int, stderr: int, said: list[str]) -> None:
    rest = b""
    while chunk := os.read(ours, 1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if _SAID.encode() in line:
                said.append(line.decode(errors="replace") + "\n")
            else:
                os.write(stderr, line + b"\n")
        if rest[:1] not in (b"W", b"E"):  # no beginning of a warning: a progress bar need not wait for its end
            os.write(stderr, rest)
            rest = b""
    os.write(stderr, rest)


def read(said: Sequence[str], sizes: Mapping[str, int]) -> list[Rematerialised]:
    """The warnings, in words of a mesh with axes of these sizes."""
    found = []
    for line in said:
        parts = re.search(
            r"from sharding (\{.*?\}) to (\{.*?\}) (?:efficiently|without).*?HLO operation:? %?\S+ = (\S+)", line
        )
        if parts is None or not arrays(parts[3]):
            continue
        dtype, local = arrays(parts[3])[0]
        name = re.search(r'op_name="([^"]*)"', line)
        found.append(
            Rematerialised(
                dtype,
                local,
                spec_of(parts[1], sizes),
                spec_of(parts[2], sizes),
                name[1].rpartition("/")[2] if name else "",
            )
        )
    return found


def spec_of(sharding: str, sizes: Mapping[str, int]) -> PartitionSpec | None:
    """A sharding as XLA prints it, by tiles or by axes, as a spec of the mesh; None where it is none.

    >>> sizes = {"data": 2, "fsdp": 4}
    >>> tuple(spec_of("{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}", sizes))
    (None, 'fsdp')
    >>> tuple(spec_of("{mesh['data'=2,'fsdp'=4], [{}, {'data', 'fsdp'}]}", sizes))
    (None, ('data', 'fsdp'))
    """
    if sharding.startswith("{replicated"):
        return PartitionSpec()
    if by_axes := re.fullmatch(r"\{mesh\[[^\]]*\], \[(.*)\]\}", sharding):
        named = [re.findall(r"'([^']+)'", entry) for entry in re.findall(r"\{([^}]*)\}", by_axes[1])]
        known = ":" not in by_axes[1] and all(axis in sizes for axes in named for axis in axes)
        return as_spec(named) if known else None
    tiles = re.match(r"\{devices=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?( last_tile_dim_replicate)?", sharding)
    if not tiles:
        return None
    shape, dims, order = ([int(n) for n in part.split(",")] if part else [] for part in tiles.groups()[:3])
    ids = np.arange(math.prod(dims)).reshape(dims).transpose(order or None).reshape(shape)
    if ids.size != math.prod(sizes.values()):
        return None
    at = np.array(np.unravel_index(np.argsort(ids.ravel()), shape))  # [dim, device]: the tile of each device
    place = dict(zip(sizes, np.unravel_index(np.arange(ids.size), tuple(sizes.values())), strict=True))
    wide = [axis for axis, n in sizes.items() if n > 1]
    found = []
    for dim in range(len(shape) - bool(tiles[4])):
        orders = (axes for n in range(len(wide) + 1) for axes in itertools.permutations(wide, n))
        fits = (axes for axes in orders if np.array_equal(_number([place[a] for a in axes], axes, sizes), at[dim]))
        axes = next(fits, None)
        if axes is None:
            return None
        found.append(axes)
    return as_spec(found)


def _number(places: Sequence[np.ndarray], axes: Sequence[str], sizes: Mapping[str, int]) -> np.ndarray:
    """Each device's number among those along some axes, the first the slowest."""
    number = np.zeros(math.prod(sizes.values()), int)
    for place, axis in zip(places, axes, strict=True):
        number = number * sizes[axis] + place
    return number


def as_spec(named: Sequence[Sequence[str]]) -> PartitionSpec:
    """A spec from the axes of each dim."""
    entries: list[Any] = [None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in named]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
