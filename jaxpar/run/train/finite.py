"""What a run does about a loss, gradients or parameters that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .loop import Loop

HOPELESS = 32  # steps skipped in a row: a float16 loss scale halved so often is 1, and it was not the scale
_RETURNS = 3  # to one checkpoint: what went wrong so often from there is not a batch


class NotFiniteError(FloatingPointError):
    """That a step has come to nothing; `step` is its number."""

    def __init__(self, step: int, says: str):
        super().__init__(says)
        self.step = step


class Finite:
    """Looks at the metrics of every step.

    Attributes:
      skipped: steps that were not applied, besides those that float16's loss scale counts.
      rollbacks: how often the run has gone back to a checkpoint.
    """

    def __init__(self, loop: Loop):
        self.loop, self.skipped, self.rollbacks = loop, 0, 0
        self._scaled, self._times, self._returns = 0.0, 0, 0

    def look(
        self,
        number: int,
        values: Mapping[str, float],
        suspects: Callable[[], str] = str,
        explained: Callable[[], str] = str,
        stopped: bool = False,
    ) -> str:
        """What is to be told of a step: "" where it was finite.

        Args:
          number: of the step.
          values: its metrics.
          suspects: what is wrong with its batch, "" where nothing is; asked where the step is not finite.
          explained: where it begins; asked where the run ends with it.
          stopped: whether nothing is applied any more.

        Raises NotFiniteError where nothing good can come any more.
        """
        skips = self.loop.on_nonfinite == "skip"
        wrong = [name for name in ("loss", "grad_norm") if not math.isfinite(values[name])]
        scaled, self._scaled = values["skipped"] > self._scaled, values["skipped"]
        left_out = skips and bool(wrong) and not scaled
        self.skipped += left_out
        self._times = self._times + 1 if scaled or left_out else 0
        if not wrong:
            return ""
        says = f"step {number}: {' and '.join(f'{name} is {values[name]}' for name in wrong)}"
        # float16's loss scale was too large, as it is meant to be now and then.
        if scaled and self._times < HOPELESS and not stopped:
            return ""
        found = suspects()
        because = f": {found}" if found else ""
        if stopped or not self._times:
            raise NotFiniteError(number, self.advice(f"{says}{because}", found) + explained())
        if self._times >= HOPELESS:
            many = f"{HOPELESS} in a row are not applied"
            raise NotFiniteError(number, self.advice(f"{says}, {many}{because}", found) + explained())
        return f"{says}{because}; it is not applied"

    def come_further(self) -> None:
        """To a checkpoint of more than the last one."""
        self._returns = 0

    def back(self, error: NotFiniteError, to: int | None) -> str:
        """What is to be told of a return to the checkpoint of step `to`, None for the initial values.

        Raises NotFiniteError where there were so many that there is no more in it.
        """
        where = f"the checkpoint of step {to}" if to is not None else "the initial values"
        if self._returns == _RETURNS:
            raise NotFiniteError(
                error.step, f"{error}; rolled back {_RETURNS} times in a row, at last to {where}, and it came again"
            ) from error
        self._returns += 1
        self.rollbacks += 1
        return f"{str(error).partition(';')[0]}; rolled back to {where}, and on with the batch of step {error.step + 1}"

    def advice(self, wrong: str, found: str = "") -> str:
        """What is wrong, and what to try: of the optimizer nothing where the batch has been `found` to be wrong."""
        last = f"; the last checkpoint in {self.loop.out} is from before" if self.loop.out else ""
        if found:
            skip = "" if self.loop.on_nonfinite == "skip" else ", or go on without them: on_nonfinite='skip'"
            return f"{wrong}; mend these rows, or leave them out{skip}{last}"
        return f"{wrong}; try a lower learning rate, a longer warm-up, clipping of gradients, or precision=f32{last}"


@jax.jit
def all_finite(params: Any) -> jax.Array:
    """Whether all elements of all arrays are, as a boolean array of no dims."""
    return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(params)]).all()
