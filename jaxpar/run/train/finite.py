"""How a run reacts to a loss, gradients or parameters that are not finite.

`Finite` reads the metrics of every step and applies `Loop.on_nonfinite`:

    stop, explain    raise NotFiniteError at the first such step
    skip             report the step, which was not applied; raise after `HOPELESS` of them in a row
    rollback         raise; the trainer catches the error, restores a checkpoint, and records that with `roll_back`

With float16, a loss scale that was too large also gives infinite gradients. The step halves the scale then, and
`Finite` reports nothing until that has happened `HOPELESS` times in a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .loop import Loop

# Skipped steps in a row. A float16 loss scale that was halved so often is 1, so the scale was not the cause.
HOPELESS = 32
# Rollbacks to one checkpoint. A fault that comes back so often does not come from one batch.
_MAX_ROLLBACKS = 3


class NotFiniteError(FloatingPointError):
    """Error of a step whose loss, gradients or updated parameters are not finite; `step` is its number."""

    def __init__(self, step: int, message: str):
        super().__init__(message)
        self.step = step


class Finite:
    """Checks the metrics of every step, and counts skipped steps and rollbacks.

    Attributes:
      skipped: steps that were not applied, without those that float16's loss scale counts.
      rollbacks: number of times that the run has gone back to a checkpoint.
    """

    def __init__(self, loop: Loop):
        self.loop, self.skipped, self.rollbacks = loop, 0, 0
        self._overflows = 0.0  # steps that float16's loss scale has skipped so far
        self._skipped_in_row, self._rollbacks_in_row = 0, 0

    def check_metrics(
        self,
        number: int,
        values: Mapping[str, float],
        find_suspects: Callable[[], str] = str,
        explain_origin: Callable[[], str] = str,
        has_stopped: bool = False,
    ) -> str:
        """Return the line to print about a step, or "" if it is finite.

        Args:
          number, values: the step's number and metrics.
          find_suspects: returns the faults in the step's batch, or "". Called only if the step is not finite.
          explain_origin: returns where the first NaN or infinity arises. Called only if the run ends here.
          has_stopped: whether the step has stopped applying updates (`trace_nonfinite`).

        Raises:
          NotFiniteError: if the run cannot continue from this step.
        """
        skips = self.loop.on_nonfinite == "skip"
        nonfinite_names = [name for name in ("loss", "grad_norm") if not math.isfinite(values[name])]
        # float16's loss scale counts the steps that overflowed; with a new count, the scale skipped this step.
        is_overflow, self._overflows = values["skipped"] > self._overflows, values["skipped"]
        is_skipped = skips and bool(nonfinite_names) and not is_overflow
        self.skipped += is_skipped
        self._skipped_in_row = self._skipped_in_row + 1 if is_overflow or is_skipped else 0
        if not nonfinite_names:
            return ""
        message = f"step {number}: {' and '.join(f'{name} is {values[name]}' for name in nonfinite_names)}"
        # A loss scale that is too large now and then is how float16 finds its scale.
        if is_overflow and self._skipped_in_row < HOPELESS and not has_stopped:
            return ""
        suspects = find_suspects()
        cause = f": {suspects}" if suspects else ""
        # Neither the loss scale nor `skip` has left this step out: its update is in the parameters, or the step has
        # stopped.
        if has_stopped or not self._skipped_in_row:
            raise NotFiniteError(number, self.advice(f"{message}{cause}", suspects) + explain_origin())
        if self._skipped_in_row >= HOPELESS:
            count = f"{HOPELESS} in a row are not applied"
            raise NotFiniteError(number, self.advice(f"{message}, {count}{cause}", suspects) + explain_origin())
        return f"{message}{cause}; it is not applied"

    def record_progress(self) -> None:
        """Note that the run has saved a checkpoint after the last rollback, so that rollbacks count from 0 again."""
        self._rollbacks_in_row = 0

    def roll_back(self, error: NotFiniteError, checkpoint_step: int | None) -> str:
        """Count a rollback and return the line to print about it.

        `checkpoint_step` is the step of the checkpoint that is restored; None for the initial values.

        Raises:
          NotFiniteError: if the run went back `_MAX_ROLLBACKS` times already without a new checkpoint.
        """
        target = f"the checkpoint of step {checkpoint_step}" if checkpoint_step is not None else "the initial values"
        if self._rollbacks_in_row == _MAX_ROLLBACKS:
            raise NotFiniteError(
                error.step,
                f"{error}; the run went back {_MAX_ROLLBACKS} times in a row, at last to {target}, and the fault came "
                "again",
            ) from error
        self._rollbacks_in_row += 1
        self.rollbacks += 1
        # The advice behind the semicolon is for a run that ends here.
        problem = str(error).partition(";")[0]
        return f"{problem}; the run goes back to {target}, and on with the batch of step {error.step + 1}"

    def advice(self, problem: str, suspects: str = "") -> str:
        """Return an error text: the problem, and what to try.

        If `suspects` names bad rows of the batch, the advice is about these rows and not about the optimizer.
        """
        last = f"; the last checkpoint in {self.loop.out} is from an earlier step" if self.loop.out else ""
        if suspects:
            skip = "" if self.loop.on_nonfinite == "skip" else ", or go on without them: on_nonfinite='skip'"
            return f"{problem}; mend these rows, or leave them out{skip}{last}"
        return f"{problem}; try a lower learning rate, a longer warm-up, clipping of gradients, or precision=f32{last}"


@jax.jit
def all_finite(params: Any) -> jax.Array:
    """Return whether all elements of all arrays are finite, as a boolean scalar."""
    return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(params)]).all()
