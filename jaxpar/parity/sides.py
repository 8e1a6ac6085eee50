"""The two kinds of sides that are bisected: a strategy on some devices, and one device.

A side is called with a site. It returns the loss that is cut there, and the gradients, as a float and NumPy arrays.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..inspect.nonfinite.replay import whole_array
from ..layout.precision import all_finite
from ..make import make_train_step
from ..strategy import Strategy
from .cut import CutLoss, Site
from .differences import EPSILON, MARGIN, dtypes_of
from .reference import Reference


@dataclasses.dataclass(frozen=True)
class UnderStrategy:
    """The loss and gradients of a strategy's step on the global batch, at the initial values that `key` gives."""

    cut: CutLoss
    strategy: Strategy
    mesh: Any
    key: jax.Array
    batch: Any

    @property
    def dtypes(self) -> list[str]:
        """Return the low precisions in which the strategy computes and communicates."""
        return dtypes_of(self.strategy)

    def __call__(self, site: Site | None) -> tuple[float, Any]:
        """Return loss and gradients of the loss cut at a site; None: of the whole loss."""
        step = make_train_step(self.cut.cut_at(site), None, self.strategy, self.mesh)
        state = step.init(self.key)
        loss, grads = step.value_and_grad(state, self.batch)
        while (scale := state.scale) is not None and scale.scale > 1 and not all_finite(grads):
            # float16 starts with a loss scale that overflows on purpose. A training step would halve it as well.
            state = dataclasses.replace(state, scale=dataclasses.replace(scale, scale=scale.scale / 2))
            loss, grads = step.value_and_grad(state, self.batch)
        return float(loss), jax.tree.map(lambda x: np.asarray(whole_array(x)), grads)


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """The loss and gradients of plain JAX on one device, in the precision and with the row blocks of a strategy.

    Attributes:
      template: the side whose precision, row blocks, key and batch are used.
      dtypes: none, since one device adds no low precision to the template's.
    """

    template: UnderStrategy
    device: jax.Device
    dtypes: Sequence[str] = ()

    def __call__(self, site: Site | None) -> tuple[float, Any]:
        """Return loss and gradients of the loss cut at a site; None: of the whole loss."""
        with jax.default_device(self.device):
            loss, grads = self.reference(site).value_and_grad(self.template.key, self.template.batch)
            return float(loss), jax.tree.map(np.asarray, grads)

    def reference(self, site: Site | None = None) -> Reference:
        """Return the plain program of the loss cut at a site."""
        model = self.template.cut.cut_at(site)
        # The step gives the number of replicas and the completed strategy. It is not compiled.
        step = make_train_step(model, None, self.template.strategy, self.template.mesh)
        return Reference(model, step.strategy, step.replicas)

    def rounding(self, site: Site | None, dtypes: list[str]) -> list[float]:
        """Return how far rounding in some precisions may move the loss and the elements of each gradient."""
        with jax.default_device(self.device):
            reference = self.reference(site)
            run = lambda *nudge: reference.value_and_grad(self.template.key, self.template.batch, *nudge)
            return [MARGIN * x for x in reference.rounding(run, max(EPSILON[name] for name in dtypes))]
