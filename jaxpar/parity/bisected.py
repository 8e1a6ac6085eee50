"""What a bisection has found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Bisected:
    """Where two sides part; print it.

    Attributes:
      a, b: the sides; b may be "one device".
      primitive: of the equation, "" where nothing differs.
      line, scope: of the user's program, its module path.
      iteration: of the loop that it is in, None outside.
      backward: whether the loss's value agrees up to it, and gradients differ.
      what: the value, or the gradient that is furthest off; `error`, how far, relative to its scale.
      tolerance: what was allowed.
      programs: how many were compiled and run on each side.
      beside: where a loss of other equations parts from it, and how much of the two was aligned.
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
        way = "its backward" if self.backward else "its result"
        lines = [f"{self.a} and {self.b} part at {self.primitive}, {way}, at {self.line or 'no line of the program'}"]
        lines += [f"in {self.scope}"] if self.scope else []
        lines += [f"iteration {self.iteration} of the loop"] if self.iteration is not None else []
        far = f"differs by {self.error:.2g} of its scale" if np.isfinite(self.error) else "is not finite on one side"
        lines.append(f"{self.what} {far} (allowed {self.tolerance:.0e})")
        lines.append(self.beside or f"what is before it agrees; {self.programs} programs on each side")
        return "\n  ".join(lines)
