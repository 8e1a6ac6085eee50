"""What the processes of a run compare before they run something together, each with its own step.

Programs that differ wait for each other in a collective for ever, or train something else; batches that differ, where
they should be the same, train something else. So all compare strategy, shapes and programs first, and the error names
what differs.
"""

from typing import Any

import jax
import numpy as np

from ..hosts import consistency
from ..model.batches import WHOSE, is_global
from .core import Step


class Agreement:
    """What has been compared of one step. Where `needed` is False, in a run of one process, nothing ever is."""

    def __init__(self, step: Step):
        self._step = step
        self.needed = jax.process_count() > 1 and len({d.process_index for d in step.mesh.devices.flat}) > 1
        self._compared: set[Any] = set()
        self._given: dict[Any, dict[str, str]] = {}  # of the first batch of each kind, as this process gave it

    def on_state(self, key: jax.Array, params: Any) -> None:
        """Raise ValueError in every process where any begins with another step, key, or shapes of parameters."""
        if self.needed:
            own = {"its key": consistency.digest(key), "its parameters": consistency.shapes(params)}
            consistency.compare("the first state", {**self._settings, **own})

    def note(self, batch: Any) -> None:
        """Note the first batch of each kind as it was given, before it lies on devices of several processes."""
        if not self.needed or (given := kind_of(batch)) in self._compared or is_global(batch):
            return
        sums = {"its checksum": consistency.digest(batch)} if self._step.rows == "global" else {}
        self._given.setdefault(kind_of(self._step.shapes(batch)), {"its shape": consistency.shapes(batch), **sums})
        self._compared.add(given)

    def on_batch(self, name: str, batch: Any) -> None:
        """Raise ValueError in every process where any gives another batch: other shapes, or other values where rows are
        global. The first of each kind is compared, for the program `name`.
        """
        if not self.needed or (name, kind := kind_of(batch)) in self._compared:
            return
        own = self._given.get(kind, {"its shape": consistency.shapes(batch)})
        do = "as many rows on each" if self._step.rows == "host" else "the same on each, or say rows='host'"
        consistency.compare(f"the batch to {name}", own, hint=f"{WHOSE}: give {do}")
        self._compared.add((name, kind))

    def on_program(self, batch: Any) -> None:
        """Raise ValueError in every process where any is about to run another step on a batch of these shapes."""
        if not self.needed or ("program", kind := kind_of(batch)) in self._compared:
            return
        self.note(batch)
        self.on_batch("train", batch)
        program = consistency.program(self._step.trace(batch))
        consistency.compare("the step", self._settings, {"the program": program})
        self._compared.add(("program", kind))

    @property
    def _settings(self) -> dict[str, Any]:
        step = self._step
        sizes = " x ".join(f"{axis}={size}" for axis, size in step.mesh.shape.items() if size > 1)
        shapes = {leaf.path: jax.ShapeDtypeStruct(leaf.logical, leaf.dtype) for leaf in step.layout.leaves}
        return {
            "the strategy": step.strategy,
            "the mesh": sizes,
            "the model": consistency.shapes(shapes),
            **consistency.versions(),
        }


def kind_of(batch: Any) -> Any:
    """What batches of one kind share: tree, shapes, dtypes."""
    leaves, tree = jax.tree.flatten(batch)
    return (tree, *((np.shape(x), getattr(x, "dtype", None)) for x in leaves))
