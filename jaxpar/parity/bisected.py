"""`Bisected`: the result of a bisection, and how it prints."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Bisected:
    """The first equation at which two sides differ. Print it.

    Attributes:
      a, b: the names of the sides; `b` may be "one device".
      primitive: the equation's primitive; "" if the sides agree.
      line: the line of the user's program.
      scope: the module path of the equation.
      iteration: the iteration of the loop that contains the equation. None outside loops.
      backward: whether the loss agrees up to the equation, and only gradients differ.
      what: the array that differs most: "the value", or the gradient of a parameter.
      error: how far it differs, relative to its scale.
      tolerance: the error that is allowed.
      programs: the number of programs that were compiled and run on each side.
      beside: for a user's loss: where the other loss differs, and how many results of the two are equal.
    """

    a: str
    b: str
    primitive: str
    line: str
    scope: str
    iteration: int | None
    backward: bool
    what: str
    error: float
    tolerance: float
    programs: int
    beside: str = ""

    def __str__(self) -> str:
        if not self.primitive:
            return f"{self.a} and {self.b} agree within {self.tolerance:.0e}: there is no equation to name"
        direction = "its backward" if self.backward else "its result"
        line = self.line or "no line of the program"
        lines = [f"{self.a} and {self.b} part at {self.primitive}, {direction}, at {line}"]
        lines += [f"in {self.scope}"] if self.scope else []
        lines += [f"iteration {self.iteration} of the loop"] if self.iteration is not None else []
        is_finite = np.isfinite(self.error)
        difference = f"differs by {self.error:.2g} of its scale" if is_finite else "is not finite on one side"
        lines.append(f"{self.what} {difference} (allowed {self.tolerance:.0e})")
        lines.append(self.beside or f"everything before it agrees; {self.programs} programs on each side")
        return "\n  ".join(lines)
