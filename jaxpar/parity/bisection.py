"""bisect: the first equation of a loss whose results, or whose gradients, differ between two sides.

The loss is cut (`cut.py`), run on both sides (`sides.py`), and halving finds the equation. A scan is halved over its
iterations, and then within its body.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..backend.removed import removed
from ..model.model import Model
from ..program import jaxpr as jx
from ..program.evaluation import scope_of
from ..program.walk import scan_parts
from ..strategy import Strategy, as_strategy
from .bisected import Bisected
from .cut import CutLoss, Site, body_of, without_casts
from .differences import TOLERANCE, Furthest, furthest
from .losses import beside
from .sides import OneDevice, UnderStrategy

Side = UnderStrategy | OneDevice


def bisect(
    model: Model,
    a: Strategy | str | None,
    b: Strategy | str | Callable[..., Any] | None,
    batch: Any,
    mesh: Mesh | Sequence[jax.Device] | None = None,
    key: jax.Array | None = None,
    mesh_b: Mesh | Sequence[jax.Device] | None = None,
) -> Bisected:
    """The first equation of the loss whose results, or gradients, differ between two sides beyond rounding.

    Args:
      model, batch, mesh: as for `make_train_step`; the batch may be NumPy arrays.
      a, b: strategies, which may differ in precision; None is one device, plainly, as in `jp.verify`. `b` may also be a
        loss of one's own: see `losses.py`. Both sides run in this process.
      key: the key of the initial values; `jax.random.key(0)` if None.
      mesh_b: the devices of `b`, where they are others, or the same ones in another order: the same strategy on both
        tells two devices apart. None: those of `a`.

    Rounding is what `jp.verify` allows for the lower of the precisions. Of two precisions it is 16 times what one
    device's cut loss does when its initial values change in the last bits of the lower, where that is more. Compared
    are values that have a dim of rows;
    what sums them is named where all of these agree. A value that is finite on one side alone is a difference.

    Costs about log2 of the number of equations programs on each side, each compiled and run once, in a gradient step's
    memory, and one more on one device where they differ. Communicates what these do. With several processes all call
    it, with the same batch.

    Raises ValueError where both sides are not finite, where the two make other programs of the loss, where a strategy
    takes none that is cut, and where `b` is a path.
    """
    if isinstance(b, os.PathLike):
        raise ValueError(removed("jp.bisect(b=path)"))
    if a is None and b is None and mesh_b is None:
        raise ValueError(
            "bisect(a=None, b=None) compares one device with itself; give a strategy, such as 'fsdp', or other devices "
            "as mesh_b"
        )
    key = jax.random.key(0) if key is None else key
    if callable(b):
        apart = None if a is None else bisect(model, a, None, batch, mesh, key)
        return beside(model, b, batch, key) if apart is None or not apart.primitive else apart
    cut = CutLoss(model, batch, key)
    given = [(a, mesh), (b, mesh if mesh_b is None else mesh_b)]
    steps = [one if one is None else UnderStrategy(cut, as_strategy(one), on, key, batch) for one, on in given]
    single = UnderStrategy(cut, as_strategy("single"), _devices(mesh)[:1], key, batch)
    lowest = lambda side: max(TOLERANCE[name] for name in side.dtypes)
    like = max([step for step in steps if step is not None] or [single], key=lowest)
    here = lambda on: next((d for d in _devices(on) if d.process_index == jax.process_index()), jax.local_devices()[0])
    sides = [step or OneDevice(like, here(on)) for step, (_, on) in zip(steps, given, strict=True)]
    said = ["one device" if one is None else str(one) for one, _ in given]
    if mesh_b is not None:
        said = [f"{one} on {_named(side)}" for one, side in zip(said, sides, strict=True)]
    return _Search(cut, sides, like, said).found()


def _devices(mesh: Mesh | Sequence[jax.Device] | None) -> list[jax.Device]:
    """Those of a mesh, in its order."""
    return jax.devices() if mesh is None else [*(mesh.devices.flat if isinstance(mesh, Mesh) else mesh)]


def _named(side: UnderStrategy | OneDevice) -> str:
    """The devices of a side, by their ids."""
    ids = [d.id for d in (_devices(side.mesh) if isinstance(side, UnderStrategy) else [side.device])]
    return f"device{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}"


class _Search:
    """Halves a cut loss between two sides, as they are `said`; `like` has the lower of their precisions."""

    def __init__(self, cut: CutLoss, sides: Sequence[Side], like: UnderStrategy, said: Sequence[str]):
        self.cut, self.sides, self.told = cut, sides, dict[Site | None, Furthest]()
        self.a, self.b = said
        self.plain = OneDevice(like, jax.local_devices()[0])
        self.low = [*(name for side in sides for name in side.dtypes), *self.plain.reference().low(like.batch)]
        self.tolerance = max(TOLERANCE[name] for name in self.low)
        # Of the same precision: other last bits would decide which of several largest elements is the maximum.
        self.mixed = len({tuple(side.dtypes) for side in sides if side.dtypes}) > 1
        self.values_only = False

    def found(self) -> Bisected:
        """The equation."""
        if not self.differs(None):
            return Bisected(self.a, self.b, "", "", "", None, False, "", 0.0, self.told[None].allowed, 1)
        places, eqns = self.cut.with_rows(()), self.cut.eqns
        at = self.first(places, lambda place: (place,))
        if at is None:  # all values with rows agree: it is what sums them
            following = next((e for i, e in enumerate(eqns) if i > (places or [-1])[-1]), eqns[-1])
            return self.named(following, None, None)
        eqn, site, iteration = eqns[at], (at,), None
        if eqn.primitive.name == "scan" and (inner := self.cut.with_rows((at,))):
            parts = scan_parts(eqn)
            order = range(parts.length)[::-1] if parts.reverse else range(parts.length)
            iteration = self.first(order, lambda number: (at, number, inner[-1]))
            if iteration is not None:
                within = self.first(inner, lambda place: (at, iteration, place))
                assert within is not None, "the last cut was seen to differ"
                eqn, site = without_casts(body_of(eqn).eqns)[within], (at, iteration, within)
        return self.named(self.cut.summing(eqn), iteration, site)

    def named(self, eqn: Any, iteration: int | None, site: Site | None) -> Bisected:
        """What `Bisected` has of it."""
        told, backward = self.told[site], self.told[site].leaf is not None
        of = eqn.primitive.name, jx.user_line(eqn), scope_of([eqn])
        far = told.what, told.error, told.allowed
        return Bisected(self.a, self.b, *of, iteration, backward, *far, len(self.told))

    def first(self, places: Sequence[int], site: Callable[[int], Site]) -> int | None:
        """The first place from which on the sides differ; None where not even the last does."""
        if not places or not self.differs(site(places[-1])):
            return None
        low, high = 0, len(places) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.differs(site(places[middle])) else (middle + 1, high)
        return places[high]

    def differs(self, site: Site | None) -> bool:
        """Whether the sides do, at a cut; `told` then has what differs most, and how far."""
        if site not in self.told:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what there is to say of the loss has been said of it
                judged = functools.partial(furthest, *(side(site) for side in self.sides), self.tolerance)
                told = judged(values_only=self.values_only)
                if self.mixed and told.allowed < told.error < float("inf"):
                    told = judged(self.plain.rounding(site, self.low), self.values_only)
            self.told[site] = told
            # What is behind a cut makes its gradients NaN, whatever it is cut after.
            self.values_only |= told.leaf is None and not np.isfinite(told.error)
        return self.told[site].error > self.told[site].allowed
