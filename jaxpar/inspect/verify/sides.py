"""What is bisected: loss and gradients of a cut loss, as a strategy on some devices has them, and as one device has."""

import dataclasses
from typing import Any

import jax
import numpy as np

from ...layout.precision import all_finite
from ...make import make_train_step
from ...strategy import Strategy
from ..nonfinite.replay import whole
from .cut import CutLoss, Site
from .differences import EPSILON, MARGIN, dtypes_of
from .reference import Reference

_NUDGES = 3  # of the initial values: a small leaf's noise may be small by chance in one


@dataclasses.dataclass(frozen=True)
class UnderStrategy:
    """Those that a strategy's step has on a mesh."""

    cut: CutLoss
    strategy: Strategy
    mesh: Any
    key: jax.Array
    batch: Any

    @property
    def dtypes(self) -> list[str]:
        """Those in which it multiplies and gathers."""
        return dtypes_of(self.strategy)

    def __call__(self, site: Site | None) -> tuple[float, Any]:
        """Loss, and gradients as NumPy arrays, of the loss cut at a site."""
        step = make_train_step(self.cut.at(site), None, self.strategy, self.mesh)
        state = step.init(self.key)
        loss, grads = step.value_and_grad(state, self.batch)
        while (scale := state.scale) is not None and scale.scale > 1 and not all_finite(grads):
            # float16's first scale is meant to be too large: a training step halves it as well.
            state = dataclasses.replace(state, scale=dataclasses.replace(scale, scale=scale.scale / 2))
            loss, grads = step.value_and_grad(state, self.batch)
        return float(loss), jax.tree.map(lambda x: np.asarray(whole(x)), grads)


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """Those of one device, plainly, in the precision and with the blocks of rows of a strategy's side."""

    like: UnderStrategy
    device: jax.Device

    @property
    def dtypes(self) -> list[str]:
        """None of its own."""
        return []

    def __call__(self, site: Site | None) -> tuple[float, Any]:
        """Loss, and gradients as NumPy arrays, of the loss cut at a site."""
        with jax.default_device(self.device):
            return self._run(self.reference(site))

    def reference(self, site: Site | None = None) -> Reference:
        """What computes them."""
        model = self.like.cut.at(site)
        step = make_train_step(model, None, self.like.strategy, self.like.mesh)
        return Reference(model, step.strategy, step.replicas)

    def rounding(self, site: Site | None, low: list[str]) -> tuple[float, list[float]]:
        """How far rounding in these precisions may move the loss and each gradient's elements: a multiple of what some
        initial values do that are changed in their last bits.
        """
        with jax.default_device(self.device):
            reference, epsilon = self.reference(site), max(EPSILON[name] for name in low)
            loss, grads = self._run(reference)
            changed = [self._run(reference, epsilon, sample) for sample in range(_NUDGES)]
        largest = lambda x, *others: max(float(np.nan_to_num(np.abs(x - y), posinf=0).max(initial=0)) for y in others)
        with np.errstate(invalid="ignore"):
            leaves = [
                largest(*leaf) for leaf in zip(*map(jax.tree.leaves, (grads, *(g for _, g in changed))), strict=True)
            ]
            return MARGIN * largest(loss, *(x for x, _ in changed)), [MARGIN * x for x in leaves]

    def _run(self, reference: Reference, *nudge: Any) -> tuple[float, Any]:
        loss, grads = reference.value_and_grad(self.like.key, self.like.batch, *nudge)
        return float(loss), jax.tree.map(np.asarray, grads)
