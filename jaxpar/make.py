"""make_train_step: a model, an optimizer and a strategy make a step, which can also show what it holds and sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from .inspect.check import check as _check
from .inspect.explain import Explanation
from .inspect.explain import explain as _explain
from .layout.mesh import make_mesh
from .layout.state import State
from .model.batches import globalise
from .model.model import Model
from .parallel.tensor.dims import Rules
from .step.core import Step
from .step.gradients import Metrics
from .step.server import ServerStep
from .strategy import Strategy, as_strategy


def make_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    strategy: Strategy | str = "single",
    mesh: Mesh | Sequence[jax.Device] | None = None,
    trainable: Callable[[str], bool] | None = None,
    rules: Rules | None = None,
    check: bool = False,
) -> TrainStep:
    """A training step of `model` under `strategy`, with the mathematics of one device.

    Args:
      model: from `from_nnx`, `from_linen` or `Model(init=..., loss=...)`.
      optimizer: any optax transformation of gradients, parameters and the loss's `value`, which is all that a step has
        (L-BFGS asks for the loss as a function); it sees whole, logical leaves, whatever their layout.
      strategy: a `Strategy` or its text, such as "fsdp" or "data=2,fsdp=4,precision=bf16".
      mesh: a mesh or devices; all devices if None. Compile-only devices serve for `step.compile`.
      trainable: `trainable(path) -> bool` for paths such as "layers/attention/query/kernel"; the rest is frozen: no
        gradients, no optimizer state. All floating-point and complex leaves if None.
      rules: for `tensor`, which dim of which parameter is split: patterns of paths, or logical names of the model's
        annotations (`parallel/tensor/dims.py`). They come before what the model and jaxpar know themselves.
      check: prove, before a step first runs on a batch of some shapes (and in `step.compile`), that its compiled
        program does what the strategy promises: see `inspect/check/`. ValueError names each promise that is broken,
        and nothing has run. Nothing is compiled twice for it.

    Raises ValueError on anything that does not fit, naming what was given, what is needed, and what to try.
    """
    strategy = as_strategy(strategy)
    if not isinstance(model, Model):
        raise ValueError(
            f"model is a {type(model).__name__}; make one with jp.from_nnx, jp.from_linen or jp.Model(init=, loss=)"
        )
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}; pass an optax transformation such as optax.adamw(3e-4)"
        )
    if trainable is not None and not callable(trainable):
        raise ValueError(
            f"trainable={trainable!r} is not a function of a path; try trainable=lambda path: 'lora' in path"
        )
    kind = ServerTrainStep if strategy.server else TrainStep
    step = kind(model, optimizer, strategy, make_mesh(strategy, mesh), trainable, rules)
    step.proves = check
    return step


class TrainStep(Step):
    """A compiled training step; see `make_train_step`. `layout`, `mesh` and `strategy` may be read."""

    proves = False  # whether what is compiled is checked before it runs

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._proven: set[Any] = set()

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """See `Step.__call__`; with `check=True` the program is checked before it first runs."""
        if self.proves:
            self._prove(batch)
        return super().__call__(state, batch)

    def compile(self, batch: Any) -> jax.stages.Compiled:
        """See `Step.compile`; with `check=True` the program is checked."""
        compiled = super().compile(batch)
        if self.proves:
            self._prove(batch, compiled)
        return compiled

    def explain(self, batch: Any) -> Explanation:
        """What the training step holds and sends per device: print it, or take `.json()`. Nothing runs.

        Memory, matrix products and collectives of the compiled program, the collectives beside their closed form, what
        is not sharded and why, what the update moves.

        Args:
          batch: as for `compile`.
        """
        return _explain(self, batch)

    def _prove(self, batch: Any, compiled: jax.stages.Compiled | None = None) -> None:
        """Raise ValueError unless the program for a batch of these shapes keeps the strategy's promises; once each."""
        leaves, tree = jax.tree.flatten(batch)
        kind = (tree, *(np.shape(x) for x in leaves))
        if kind in self._proven:
            return
        self._proven.add(kind)  # it compiles, where nothing is compiled yet
        try:
            _check(self, batch if compiled else globalise(batch, self.mesh), compiled).require()
        except ValueError:
            self._proven.discard(kind)
            raise


class ServerTrainStep(TrainStep, ServerStep):
    """A `TrainStep` whose state lives on the first device of the mesh."""
