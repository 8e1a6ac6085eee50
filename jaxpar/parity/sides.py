"""What is bisected: loss and gradients of a cut loss, as a strategy on some devices has them, and as one device has."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..inspect.nonfinite.replay import whole
from ..layout.precision import all_finite
from ..make import make_train_step
from ..strategy import Strategy
from .cut import CutLoss, Site
from .differences import EPSILON, MARGIN, dtypes_of
from .reference import Reference


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
    dtypes: Sequence[str] = ()  # none of its own

    def __call__(self, site: Site | None) -> tuple[float, Any]:
        """Loss, and gradients as NumPy arrays, of the loss cut at a site."""
        with jax.default_device(self.device):
            loss, grads = self.reference(site).value_and_grad(self.like.key, self.like.batch)
            return float(loss), jax.tree.map(np.asarray, grads)

    def reference(self, site: Site | None = None) -> Reference:
        """What computes them."""
        model = self.like.cut.at(site)
        step = make_train_step(model, None, self.like.strategy, self.like.mesh)
        return Reference(model, step.strategy, step.replicas)

    def rounding(self, site: Site | None, low: list[str]) -> list[float]:
        """How far rounding in these precisions may move the loss and each gradient's elements."""
        with jax.default_device(self.device):
            reference = self.reference(site)
            run = lambda *nudge: reference.value_and_grad(self.like.key, self.like.batch, *nudge)
            return [MARGIN * x for x in reference.rounding(run, max(EPSILON[name] for name in low))]
