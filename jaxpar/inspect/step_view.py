"""The attributes of a training step that reports may use: a short list, so that the rest of a step can change."""

from collections.abc import Callable
from typing import Any, Protocol, Self

import jax
import numpy as np
from jax.sharding import Mesh

from ..layout.layout import Layout
from ..layout.precision import Policy
from ..layout.state import State
from ..model.model import Model
from ..parallel.data import Rule
from ..parallel.pipeline.schedules import Schedule
from ..step.gradients import Local
from ..step.tracing import Traced, Tracing
from ..step.update import Update
from ..strategy import Strategy


class StepView(Protocol):
    """The attributes of a step that a report uses if it runs nothing.

    Attributes: The layout
      strategy, mesh, layout: how the step is spread, over which devices, and where it stores every leaf.
      policy: the dtypes in which it stores, computes and reduces.
      replicas: the number of devices that have different rows.
      model_def: the model.

    Attributes: The traced program
      tracing: how a loss is rewritten for one device; a pipeline is traced again with it.
      schedule: the pipeline's; None without one.
      local: the loss on the rows of one device.

    Attributes: What the strategy promises
      rule: tells what each rank stores and sends for a leaf.
      update: which ranks own whole matrices (`owners`), and whether the optimizer sees layers stacked (`as_stacked`).
      chosen: what remat="auto" chose for each value.
      concurrency_remark: what concurrent="auto" chose, and why; "" if it had no choice.
    """

    strategy: Strategy
    mesh: Mesh
    layout: Layout
    policy: Policy
    replicas: int
    model_def: Model
    tracing: Tracing
    schedule: Schedule | None
    local: Local
    rule: Rule
    update: Update
    chosen: tuple[Any, ...]
    concurrency_remark: str

    def settled(self, batch: Any) -> Self:
        """The step with the choices that depend on a batch's shapes; its strategy is the one that runs."""
        ...

    def abstract_state(self) -> State:
        """The state as shapes with shardings."""
        ...

    def check(self, batch: Any) -> None:
        """Raise ValueError unless the rows of a batch fit."""
        ...

    def shapes(self, batch: Any) -> Any:
        """A batch as the shapes of the global batch."""
        ...

    def traced(self, batch: Any) -> Traced:
        """The loss of one microbatch, as the program of one device."""
        ...

    def trace(self, batch: Any) -> Any:
        """The jaxpr of the whole step."""
        ...

    def compile(self, batch: Any) -> jax.stages.Compiled:
        """The whole step, compiled."""
        ...

    def mapped(self, fun: Callable, batch: Any, outs: Any) -> Callable[..., tuple[Any, Any]]:
        """A function of local values, on every device."""
        ...


class RunnableStep(StepView, Protocol):
    """The attributes of a step that a report uses in addition if it runs or compiles other programs of the step."""

    def choosing(self, choices: tuple[str, ...] = (), chosen: tuple[Any, ...] = (), **fields: Any) -> Self:
        """The step with these choices of what its layers save, and with these fields of its strategy."""
        ...

    def params(self, state: State) -> Any:
        """The parameters in the model's own tree."""
        ...

    def place(self, batch: Any) -> Any:
        """A batch on the devices."""
        ...

    def measured(self, state: State, batch: Any, order: np.ndarray) -> dict[str, jax.Array]:
        """The loss and figures of its gradients on rows that are dealt in an order."""
        ...
