"""A bisection between two processes, of two releases of jax or on two machines: they meet in a folder.

Who comes first searches, and writes which cut it wants to know of; the other runs the loss cut there, and writes its
value and gradients. Both have the result. A file is whole once it has its name. Each touches a file of its own every
few seconds, whatever it compiles, so that the other need not wait for one that was killed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...model.paths import name_of
from .bisected import Bisected
from .cut import Site
from .sides import OneDevice, UnderStrategy

_PATIENCE = 1800  # seconds until the other comes
_SILENCE, _BEAT = 45, 5  # seconds after which one that does not touch its file is gone, and between two touches
_LOOK = 0.1  # seconds between two looks
_SAME = 1e-5  # of initial values: `jax.random`'s bits are the same in every release, what follows may be rounded


class Meeting:
    """The other process, as a side of a bisection for the first to come, `leads`; the second serves it.

    Args:
      folder: a new or empty one, on a file system that both processes see.
      own: this process's side.
      said: what it is, for people.

    Raises ValueError where the folder had a bisection, where the other process fails or is gone, and where the two do
    not have the same batch, the same initial values and the same equations.
    """

    def __init__(self, folder: Path, own: UnderStrategy | OneDevice, said: str):
        self.folder, self.own, self.asked = folder, own, 0
        folder.mkdir(parents=True, exist_ok=True)
        self.leads = self._is_first("first")
        if not self.leads and not self._is_first("second"):
            raise ValueError(f"two processes have met in {os.fspath(folder)!r}; use a new folder, the same in both")
        mine, self._theirs = ("first", "second") if self.leads else ("second", "first")
        self._over = threading.Event()
        threading.Thread(target=self._beat, args=(folder / mine,), name="jaxpar-meeting", daemon=True).start()
        with self._telling():
            like = own if isinstance(own, UnderStrategy) else own.like
            self._params = jax.eval_shape(like.cut.model.create, like.key)[0]
            hello = {
                "said": f"{said} (jax {jax.__version__}, {jax.default_backend()}, process {os.getpid()})",
                "dtypes": own.dtypes, "equations": like.cut.described(), "values": _sums(like),
            }  # fmt: skip
            self._write(f"{mine}.json", json.dumps(hello).encode())
            other = json.loads(self._there(f"{self._theirs}.json").read_text())
            self.said, self.dtypes = (hello["said"], other["said"]), other["dtypes"]
            _compare(hello, other)

    def __call__(self, site: Site | None) -> tuple[float, Any]:
        """Loss, and gradients as NumPy arrays, of the loss cut at a site, from the other process."""
        self.asked += 1
        self._write(f"ask{self.asked}.json", json.dumps(site).encode())
        with np.load(self._there(f"answer{self.asked}.npz")) as found:
            loss, *arrays = found.values()
        leaves, tree = jax.tree.flatten(self._params)
        after = iter(arrays)
        grads = [next(after) if jnp.issubdtype(x.dtype, jnp.inexact) else None for x in leaves]
        return float(loss), jax.tree.unflatten(tree, grads)

    def search(self, search: Any) -> Bisected:
        """The equation that `search()` finds in the process that leads; in the other one, what that has found."""
        with self._telling():
            if self.leads:
                found = search()
                self._write(f"ask{self.asked + 1}.json", json.dumps(dataclasses.asdict(found)).encode())
                self._over.set()
                return found
            while True:
                self.asked += 1
                wanted = json.loads(self._there(f"ask{self.asked}.json").read_text())
                if isinstance(wanted, dict):
                    self._over.set()
                    return Bisected(**wanted)
                loss, grads = self.own(None if wanted is None else tuple(wanted))
                fresh = self.folder / f"answer{self.asked}.part.npz"
                np.savez(fresh, loss, *(np.asarray(x, np.float32) for x in jax.tree.leaves(grads)))
                fresh.rename(self.folder / f"answer{self.asked}.npz")

    def _is_first(self, name: str) -> bool:
        try:
            (self.folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _write(self, name: str, data: bytes) -> None:
        fresh = self.folder / f"{name}.part"
        fresh.write_bytes(data)
        fresh.rename(self.folder / name)

    def _beat(self, path: Path) -> None:
        while not self._over.wait(_BEAT):
            path.touch()

    def _there(self, name: str) -> Path:
        """The path of what the other writes, once it is there."""
        sign, touched, since = self.folder / self._theirs, None, time.monotonic()
        while not (self.folder / name).exists():
            if (self.folder / "failed").exists():
                raise ValueError(f"the other process has failed: {(self.folder / 'failed').read_text()}")
            # Of the other's clock: it is not compared with ours.
            now = sign.stat().st_mtime_ns if sign.exists() else None
            if now != touched:
                touched, since = now, time.monotonic()
            elif time.monotonic() - since > (_PATIENCE if now is None else _SILENCE):
                gone = f"not come for {_PATIENCE} s" if now is None else f"been there, and gone for {_SILENCE} s"
                raise ValueError(
                    f"the other process of {os.fspath(self.folder)!r} has {gone}; begin again in a new folder, by the "
                    "same call in both at the same time"
                )
            time.sleep(_LOOK)
        return self.folder / name

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Within it, the other process learns of an error of this one, and does not wait."""
        try:
            yield
        except BaseException as error:
            self._over.set()
            if not (self.folder / "failed").exists():
                self._write("failed", str(error).encode())
            raise


def _sums(like: UnderStrategy) -> dict[str, list[float]]:
    """Of each leaf of the batch and of the initial values, its sum and the sum of its magnitudes."""
    named = jax.tree_util.tree_leaves_with_path((like.batch, jax.jit(like.cut.model.create)(like.key)[0]))
    kinds = ("the batch", "the initial values")
    leaves = [(f"{kinds[path[0].idx]} {name_of(path[1:])}", np.asarray(x).astype(np.float64)) for path, x in named]
    return {name: [float(x.sum()), float(np.abs(x).sum())] for name, x in leaves}


def _compare(one: dict[str, Any], two: dict[str, Any]) -> None:
    """Raises ValueError where the two processes cannot be compared."""
    if one["values"].keys() != two["values"].keys():
        name = min(one["values"].keys() ^ two["values"].keys())
        raise ValueError(f"{name} is in one of {one['said']} and {two['said']}; give both the same model and batch")
    for name, (total, scale) in one["values"].items():
        if abs(total - two["values"][name][0]) > _SAME * scale:
            raise ValueError(
                f"{name} sums to {total:.7g} in {one['said']} and to {two['values'][name][0]:.7g} in {two['said']}; "
                "give both the same batch and key"
            )
    pairs = zip([*one["equations"], "nothing"], [*two["equations"], "nothing"], strict=False)
    if differing := next(((a, b) for a, b in pairs if a != b), None):
        raise ValueError(
            f"the two trace other equations: {one['said']} has {differing[0]} where {two['said']} has {differing[1]}: "
            "no cut is common; bisect(model, a, None, batch) in each tells whether it departs from its own one device"
        )
