"""A bisection between two processes, of two releases of jax or on two machines, that meet by a path both see.

Who comes first writes there where it listens, and searches; the other runs the loss cut where it is asked to, and sends
its value and gradients. Both have the result.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...hosts.gloo import facing
from ...model.paths import name_of
from .bisected import Bisected
from .cut import Site
from .sides import OneDevice, UnderStrategy

_SAME = 1e-5  # of initial values: `jax.random`'s bits are the same in every release, what follows may be rounded


class Meeting:
    """The other process, as a side of a bisection for the first to come, `leads`; the second serves it.

    Args:
      path: of a new file, on a file system that both processes see.
      own: this process's side.
      said: what it is, for people.

    Raises ValueError where the other process fails or is gone, and where the two do not have the same batch, the same
    initial values and the same equations.
    """

    def __init__(self, path: Path, own: UnderStrategy | OneDevice, said: str):
        self.own, self.path = own, path
        self.leads, self._link = _linked(path)
        like = own if isinstance(own, UnderStrategy) else own.like
        self._params = jax.eval_shape(like.cut.model.create, like.key)[0]
        said = f"{said} (jax {jax.__version__}, {jax.default_backend()}, process {os.getpid()})"
        hello = said, own.dtypes, like.cut.described(), _sums(like)
        self._link.send(hello)
        other = self._received()
        self.said, self.dtypes = (said, other[0]), other[1]
        _compare(hello, other)

    def __call__(self, site: Site | None) -> tuple[float, Any]:
        """Loss, and gradients as NumPy arrays, of the loss cut at a site, from the other process."""
        self._link.send(site)
        loss, arrays = self._received()
        leaves, tree = jax.tree.flatten(self._params)
        grads = [arrays.pop(0) if jnp.issubdtype(x.dtype, jnp.inexact) else None for x in leaves]
        return loss, jax.tree.unflatten(tree, grads)

    def search(self, search: Callable[[], Bisected]) -> Bisected:
        """The equation that `search()` finds in the process that leads; in the other one, what that has found."""
        with self._link:
            if self.leads:
                self._link.send(found := search())
                return found
            while not isinstance(wanted := self._received(), Bisected):
                loss, grads = self.own(wanted)
                self._link.send((loss, [np.asarray(x, np.float32) for x in jax.tree.leaves(grads)]))
            return wanted

    def _received(self) -> Any:
        try:
            return self._link.recv()
        except (EOFError, OSError) as error:
            raise ValueError(
                f"the process met at {os.fspath(self.path)!r} has failed or is gone; see what it says, and begin again "
                "by the same call in both"
            ) from error


def _linked(path: Path) -> tuple[bool, Any]:
    """Whether this process is the first at a path, and its connection to the other."""
    try:
        path.touch(0o600, exist_ok=False)
    except FileExistsError:
        try:
            while not (said := path.read_text()).endswith("\n"):
                time.sleep(0.1)
            host, port, key = said.split()
            return False, Client((host, int(port)), authkey=bytes.fromhex(key))
        except OSError as error:
            raise ValueError(f"nobody waits at {os.fspath(path)!r} any more ({error}); use a new path") from error
    try:
        key = secrets.token_hex()
        with Listener(("", 0), authkey=bytes.fromhex(key)) as listener:
            path.write_text(f"{_address()} {listener.address[1]} {key}\n")
            return True, listener.accept()
    finally:
        path.unlink()


def _address() -> str:
    """This host's, for others; that of loopback where there is no network."""
    try:
        return facing("192.0.2.1:9")  # of no host
    except OSError:
        return "127.0.0.1"


def _sums(like: UnderStrategy) -> dict[str, tuple[float, float]]:
    """Of each leaf of the batch and of the initial values, its sum and the sum of its magnitudes."""
    named = jax.tree_util.tree_leaves_with_path((like.batch, jax.jit(like.cut.model.create)(like.key)[0]))
    kinds = ("the batch", "the initial values")
    leaves = [(f"{kinds[path[0].idx]} {name_of(path[1:])}", np.asarray(x).astype(np.float64)) for path, x in named]
    return {name: (float(x.sum()), float(np.abs(x).sum())) for name, x in leaves}


def _compare(one: Any, two: Any) -> None:
    """Raises ValueError where the two processes cannot be compared."""
    (said, _, equations, sums), (other, _, others, totals) = one, two
    pairs = zip([*sums, *equations, "nothing"], [*totals, *others, "nothing"], strict=False)
    if differing := next(((a, b) for a, b in pairs if a != b), None):
        raise ValueError(
            f"the two trace other programs: {said} has {differing[0]} where {other} has {differing[1]}: no cut is "
            "common; bisect(model, a, None, batch) in each tells whether it departs from its own one device"
        )
    for name, (total, scale) in sums.items():
        if abs(total - totals[name][0]) > _SAME * scale:
            raise ValueError(
                f"{name} sums to {total:.7g} in {said} and to {totals[name][0]:.7g} in {other}; give both the same "
                "batch and key"
            )
