"""Comparisons between the processes of a run, each of which makes its own step, before they run a program together.

Processes with different programs wait for each other in a collective for ever, or train something else. So do processes
with different batches where all should give the same one. All processes therefore compare strategy, shapes and programs
first (`hosts/consistency.py`), and an error names what differs.
"""

from typing import Any

import jax
import numpy as np

from ..hosts import consistency
from ..model.batches import WHOSE, is_global
from .core import Step


class Agreement:
    """The comparisons of one step, each made once.

    Attributes:
      needed: whether several processes run the step. If not, nothing is ever compared.
    """

    def __init__(self, step: Step):
        self._step = step
        # A mesh of one process's devices, in a run of several, concerns that process alone.
        self.needed = jax.process_count() > 1 and len({d.process_index for d in step.mesh.devices.flat}) > 1
        self._compared: set[Any] = set()
        self._batch_digests: dict[Any, dict[str, str]] = {}  # kind of batch -> what this process gave, to be compared

    def on_state(self, key: jax.Array, params: Any) -> None:
        """Raise ValueError in every process if any begins with another step, key, or shapes of parameters."""
        if self.needed:
            digests = {"its key": consistency.digest(key), "its parameters": consistency.shapes(params)}
            consistency.compare("the first state", {**self._settings, **digests})

    def note(self, batch: Any) -> None:
        """Note the first batch of each kind as the user gave it, before it becomes an array of several processes."""
        if not self.needed or (local_kind := batch_kind(batch)) in self._compared or is_global(batch):
            return
        # With rows="host" every process has other rows, so that shapes alone are compared.
        checksum = {"its checksum": consistency.digest(batch)} if self._step.rows == "global" else {}
        digests = {"its shape": consistency.shapes(batch), **checksum}
        # `on_batch` sees the global batch, and looks the digests up by its kind.
        self._batch_digests.setdefault(batch_kind(self._step.shapes(batch)), digests)
        self._compared.add(local_kind)

    def on_batch(self, name: str, batch: Any) -> None:
        """Raise ValueError in every process if any gives another batch, the first time that a program sees its kind.

        Shapes must agree, and values too if rows are global. `batch` is the global batch.
        """
        if not self.needed or (name, kind := batch_kind(batch)) in self._compared:
            return
        digests = self._batch_digests.get(kind, {"its shape": consistency.shapes(batch)})
        advice = "as many rows on each" if self._step.rows == "host" else "the same on each, or pass rows='host'"
        consistency.compare(f"the batch to {name}", digests, hint=f"{WHOSE}: give {advice}")
        self._compared.add((name, kind))

    def on_program(self, batch: Any) -> None:
        """Raise ValueError in every process if any is about to run another step on a batch of these shapes."""
        if not self.needed or ("program", kind := batch_kind(batch)) in self._compared:
            return
        # Batches first: their error is plainer than the difference of programs that follows from it.
        self.note(batch)
        self.on_batch("train", batch)
        program = consistency.program(self._step.trace(batch))
        consistency.compare("the step", self._settings, {"the program": program})
        self._compared.add(("program", kind))

    @property
    def _settings(self) -> dict[str, Any]:
        """The arguments of the step that all processes must share, by name."""
        step = self._step
        sizes = " x ".join(f"{axis}={size}" for axis, size in step.mesh.shape.items() if size > 1)
        shapes = {leaf.path: jax.ShapeDtypeStruct(leaf.logical, leaf.dtype) for leaf in step.layout.leaves}
        return {
            "the strategy": step.strategy,
            "the mesh": sizes,
            "the model": consistency.shapes(shapes),
            **consistency.versions(),
        }


def batch_kind(batch: Any) -> Any:
    """Return the kind of a batch: its tree, shapes and dtypes, for which one program is compiled."""
    leaves, tree = jax.tree.flatten(batch)
    return (tree, *((np.shape(x), getattr(x, "dtype", None)) for x in leaves))
