"""Whether a strategy is worth compiling, after those that were."""

from __future__ import annotations

from collections.abc import Sequence

from ...strategy import Strategy
from ...text import size
from .estimates import Estimate
from .line import Line
from .neighbours import alike_but, keeps_more

_ALIKE = ("pipe", "expert", "context", "tensor", "remat")  # what compilers need beyond closed forms depends on these


def memory_overrun(line: Line) -> float:
    """How many times what its closed form says the program of a line needs; the line has one."""
    assert line.estimate is not None
    return line.memory["total"] / line.estimate.bytes


def reason_to_skip(strategy: Strategy, estimate: Estimate, lines: Sequence[Line], usable: int, top: int) -> str | None:
    """Why a strategy need not be compiled, after `lines` were; None where it is worth it.

    Args:
      strategy, estimate: of none of the lines; its closed forms.
      lines: what was compiled.
      usable: bytes that a program may take.
      top: so many are compiled at most; twice as many until one fits.
    """
    fitting = [line for line in lines if line.fits]
    if fitting and (best := min(line.seconds for line in fitting)) < estimate.seconds:
        return f"{1e3 * estimate.seconds:,.0f} ms at least by closed forms, and {1e3 * best:,.0f} ms were found"
    for line in lines:
        if line.estimate == estimate and alike_but("attention", line.strategy, strategy):
            return f"as {line.strategy}, by closed forms: of attention the way is the same"
        if not line.fits and keeps_more(strategy, line.strategy):
            return f"does not fit: {line.strategy}, which keeps less, needs {size(line.memory['total'])}"
    alike = [
        line
        for line in lines
        if line.estimate and all(getattr(line.strategy, name) == getattr(strategy, name) for name in _ALIKE)
    ]
    if not all(line.fits for line in alike):
        # Of those that are alike the one nearest to its closed form: ZeRO-1 with microbatches is far from its own.
        nearest = min(alike, key=memory_overrun)
        if (likely := estimate.bytes * memory_overrun(nearest)) > 1.1 * usable:
            needs = size(nearest.memory["total"])
            return f"does not fit: {size(likely)} likely, as {nearest.strategy} needs {needs}"
    if len(lines) >= top and (fitting or len(lines) >= 2 * top):
        return f"{1e3 * estimate.seconds:,.0f} ms at least by closed forms: not among the {top} that were compiled"
    return None
