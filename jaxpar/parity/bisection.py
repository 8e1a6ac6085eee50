"""`bisect`: find the first equation of a loss whose result, or whose gradient, differs between two sides.

`cut.py` cuts the loss after an equation, `sides.py` runs the cut loss on both sides, and binary search finds the
equation. It assumes that all cuts after the first difference differ too:

    equations   0 .. i-1   agree                 a scan is searched over its iterations first,
                i          first difference      then within the body of that iteration
                i+1 ..     differ
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
from .cut import CutLoss, Site, scan_body, without_casts
from .differences import TOLERANCE, LargestDifference, largest_difference
from .losses import bisect_losses
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
    """Find the first equation of the loss whose result, or gradient, differs between two sides beyond rounding.

    Only values with a dim of rows are compared. If all of these agree, the equation that sums them is named. A value
    that is finite on one side alone is a difference.

    The allowed rounding is that of `jp.verify` for the lower of the two precisions. If the precisions differ, it may be
    more: 16 times the change of one device's cut loss when the last bits of its initial values change.

    Each side compiles and runs about log2(number of equations) programs, each in the memory of a gradient step and with
    its communication; if the precisions differ, one device runs as many. With several processes, all of them call this
    with the same batch.

    Args:
      model, batch, mesh: as for `make_train_step`; the batch may be NumPy arrays.
      a: a strategy. None: one device without jaxpar, as in `jp.verify`.
      b: a strategy, which may have another precision; None; or a loss function, see `losses.py`. Both sides run in this
        process.
      key: the key of the initial values; `jax.random.key(0)` if None.
      mesh_b: the devices of `b`, if they are others, or in another order. The same strategy on both compares two
        devices. None: the devices of `a`.

    Raises:
      ValueError: neither side is finite; the two sides make different programs of the loss; a strategy refuses a cut
        loss; or `b` is a path.
    """
    if isinstance(b, os.PathLike):
        raise ValueError(removed("jp.bisect(b=path)"))
    if a is None and b is None and mesh_b is None:
        raise ValueError(
            "bisect(a=None, b=None) compares one device with itself; give a strategy, such as 'fsdp', or other devices "
            "as mesh_b"
        )
    key = jax.random.key(0) if key is None else key
    # A loss function is compared with the model's loss only if the strategy agrees with one device.
    if callable(b):
        difference = None if a is None else bisect(model, a, None, batch, mesh, key)
        return bisect_losses(model, b, batch, key) if difference is None or not difference.primitive else difference

    pairs = [(a, mesh), (b, mesh if mesh_b is None else mesh_b)]
    return _search(model, batch, key, pairs, names_devices=mesh_b is not None).first_equation()


def _search(model: Model, batch: Any, key: jax.Array, pairs: Sequence[tuple[Any, Any]], names_devices: bool) -> _Search:
    """Make both sides from pairs of a strategy (None: one device) and a mesh, and the search between them.

    One device takes its precision and row blocks from the strategy with the lowest precision.
    """
    cut = CutLoss(model, batch, key)
    steps = [s if s is None else UnderStrategy(cut, as_strategy(s), devices, key, batch) for s, devices in pairs]
    single = UnderStrategy(cut, as_strategy("single"), _devices(pairs[0][1])[:1], key, batch)
    coarseness = lambda side: max(TOLERANCE[name] for name in side.dtypes)
    # Without any strategy, the step of one device is the template.
    template = max([step for step in steps if step is not None] or [single], key=coarseness)
    # With several processes, every process runs the one device's program, on one of its local devices.
    local = lambda devices: next(
        (d for d in _devices(devices) if d.process_index == jax.process_index()), jax.local_devices()[0]
    )
    sides = [step or OneDevice(template, local(devices)) for step, (_, devices) in zip(steps, pairs, strict=True)]
    names = ["one device" if s is None else str(s) for s, _ in pairs]
    if names_devices:
        names = [f"{name} on {_device_ids(side)}" for name, side in zip(names, sides, strict=True)]
    return _Search(cut, sides, template, names)


def _devices(mesh: Mesh | Sequence[jax.Device] | None) -> list[jax.Device]:
    """Return the devices of a mesh, in its order; all devices if there is none."""
    return jax.devices() if mesh is None else [*(mesh.devices.flat if isinstance(mesh, Mesh) else mesh)]


def _device_ids(side: Side) -> str:
    """Return the devices of a side by their ids, as text."""
    ids = [d.id for d in (_devices(side.mesh) if isinstance(side, UnderStrategy) else [side.device])]
    return f"device{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}"


class _Search:
    """A binary search for the first cut at which two sides differ.

    One device's rounding is measured in the lower of their precisions, which is `template`'s.
    """

    def __init__(self, cut: CutLoss, sides: Sequence[Side], template: UnderStrategy, names: Sequence[str]):
        self.cut, self.sides = cut, sides
        self.results: dict[Site | None, LargestDifference] = {}  # every site that was run; None: the loss without a cut
        self.a, self.b = names
        self.one_device = OneDevice(template, jax.local_devices()[0])
        # The model itself may compute in a lower precision than both sides.
        model_dtypes = self.one_device.reference().model_dtypes(template.batch)
        self.dtypes = [*(name for side in sides for name in side.dtypes), *model_dtypes]
        self.tolerance = max(TOLERANCE[name] for name in self.dtypes)
        # Only different precisions need a measured rounding: within one precision, another rounding would decide which
        # of several equal elements is the maximum, and gradients would differ by much more.
        self.has_mixed_precision = len({tuple(side.dtypes) for side in sides if side.dtypes}) > 1
        self.values_only = False

    def first_equation(self) -> Bisected:
        """Return the first equation at which the sides differ."""
        # 1. The loss without a cut.
        if not self.differs(None):
            return Bisected(self.a, self.b, "", "", "", None, False, "", 0.0, self.results[None].allowed, 1)

        # 2. The equations of the program.
        indices, eqns = self.cut.indices_with_rows(()), self.cut.eqns
        index = self.first_difference(indices, lambda i: (i,))
        if index is None:
            # All values with rows agree. The next equation sums rows.
            following = next((eqn for i, eqn in enumerate(eqns) if i > (indices or [-1])[-1]), eqns[-1])
            return self.report(following, None, None)

        # 3. In a scan: its iterations by the last cut of the body, then the body.
        eqn, site, iteration = eqns[index], (index,), None
        if eqn.primitive.name == "scan" and (inner_indices := self.cut.indices_with_rows((index,))):
            parts = scan_parts(eqn)
            # A reversed scan runs its last iteration first.
            order = range(parts.length)[::-1] if parts.reverse else range(parts.length)
            iteration = self.first_difference(order, lambda n: (index, n, inner_indices[-1]))
            if iteration is not None:
                inner_index = self.first_difference(inner_indices, lambda i: (index, iteration, i))
                assert inner_index is not None, "the last cut was seen to differ"
                eqn, site = without_casts(scan_body(eqn).eqns)[inner_index], (index, iteration, inner_index)
        return self.report(self.cut.summing_eqn(eqn), iteration, site)

    def report(self, eqn: Any, iteration: int | None, site: Site | None) -> Bisected:
        """Return the report of an equation, with the difference that was found at a site."""
        result, is_backward = self.results[site], self.results[site].leaf is not None
        equation = eqn.primitive.name, jx.user_line(eqn), scope_of([eqn])
        difference = result.what, result.error, result.allowed
        return Bisected(self.a, self.b, *equation, iteration, is_backward, *difference, len(self.results))

    def first_difference(self, indices: Sequence[int], site: Callable[[int], Site]) -> int | None:
        """Return the first index whose cut differs, and all later ones; None if not even the last cut differs."""
        if not indices or not self.differs(site(indices[-1])):
            return None
        # All cuts before `low` agree, and the one at `high` differs.
        low, high = 0, len(indices) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.differs(site(indices[middle])) else (middle + 1, high)
        return indices[high]

    def differs(self, site: Site | None) -> bool:
        """Return whether the sides differ at a cut, and store the result."""
        if site not in self.results:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the loss without a cut has given its warnings already
                compare = functools.partial(largest_difference, *(side(site) for side in self.sides), self.tolerance)
                result = compare(values_only=self.values_only)
                # Measuring the rounding takes several runs more: only where a difference depends on it.
                if self.has_mixed_precision and result.allowed < result.error < float("inf"):
                    result = compare(self.one_device.rounding(site, self.dtypes), self.values_only)
            self.results[site] = result
            # A value that is not finite makes the gradients of every cut NaN, since the rest of the program is part of
            # each cut loss.
            self.values_only |= result.leaf is None and not np.isfinite(result.error)
        return self.results[site].error > self.results[site].allowed
