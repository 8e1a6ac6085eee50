"""Say why a strategy need not be compiled, given the programs that were.

Closed forms are lower bounds, which exclude little: a program takes 1.4 to 7 times as long. Similar programs exceed
them by similar ratios. So closed forms that are scaled to a compiled program tell which strategies are likely to fit,
and which are likely to be faster.
"""

from collections.abc import Sequence

from ...backend.text import size
from ...strategy import Strategy
from .candidates import REMATS
from .estimates import Estimate
from .line import Line, fastest
from .neighbours import alike_but, keeps_more

_TIGHT = 0.9  # share of the usable memory above which a program is near the limit
_GAIN = 0.01  # a strategy is compiled if it is likely to be faster than the best program by this share
# Fields on which the ratio of a program's memory to its closed form depends.
_OVERRUN_FIELDS = ("pipe", "expert", "context", "tensor", "remat", "offload")


def memory_overrun(line: Line) -> float:
    """Return the memory of a line's program / the bytes of its closed form, which the line must have."""
    assert line.estimate is not None
    return line.memory["total"] / line.estimate.bytes


def likely_seconds(strategy: Strategy, estimate: Estimate, lines: Sequence[Line]) -> tuple[float, Line]:
    """Return the seconds of a strategy if its program exceeds its closed forms as a similar one does; and that line.

    It is the fastest line that uses the same axes, or else the fastest. Its kernels take longer than their closed form
    by some factor, and waits for communication exceed theirs by a share of all that is sent.
    """
    uses = lambda s: tuple(getattr(s, axis) > 1 for axis in ("pipe", "expert", "context", "tensor"))
    known = [line for line in lines if line.estimate]
    alike = [line for line in known if uses(line.strategy) == uses(strategy)]
    line = min(alike or known, key=lambda line: line.seconds)
    own = line.estimate
    assert own is not None
    kernels = line.prediction["compute"]
    waits = max(0.0, line.seconds - kernels - (own.seconds - own.compute)) / own.sent if own.sent else 0.0
    exposed = estimate.seconds - estimate.compute
    return kernels / own.compute * estimate.compute + exposed + waits * estimate.sent, line


def is_relief(strategy: Strategy, best: Line, usable: int) -> bool:
    """Return whether a strategy is the best one with twice the microbatches, and that one is near the memory limit.

    There XLA recomputes kernels and overlaps less, which no closed form knows.
    """
    is_tight = best.memory["total"] > _TIGHT * usable
    has_more = strategy.microbatches > best.strategy.microbatches
    return is_tight and has_more and alike_but("microbatches", strategy, best.strategy)


def _may_surprise(strategy: Strategy, best: Line, usable: int) -> bool:
    """Return whether a strategy differs from the best one in something that no closed form counts."""
    in_order = strategy.remat in REMATS and best.strategy.remat in REMATS
    recomputes_less = in_order and REMATS.index(strategy.remat) < REMATS.index(best.strategy.remat)
    return (
        (recomputes_less and alike_but("remat", strategy, best.strategy))
        or alike_but("attention", strategy, best.strategy)
        or (best.prediction["chunked"] and alike_but("logits", strategy, best.strategy))
        or is_relief(strategy, best, usable)
    )


def reason_to_skip(strategy: Strategy, estimate: Estimate, lines: Sequence[Line], usable: int, top: int) -> str | None:
    """Return why a strategy need not be compiled, given the lines so far; None if it is worth compiling.

    `strategy` has no line yet, and `estimate` for its closed forms. A program may take `usable` bytes. At most `top`
    strategies are compiled, twice as many until one fits.
    """
    # 1. Its lower bound on time is above a compiled program's time.
    fitting = [line for line in lines if line.fits]
    if fitting and (best := min(line.seconds for line in fitting)) < estimate.seconds:
        return (
            f"at least {1e3 * estimate.seconds:,.0f} ms by closed forms, and a compiled one takes {1e3 * best:,.0f} ms"
        )

    # 2. A line has the same program, or saves fewer activations and does not fit.
    for line in lines:
        if line.estimate == estimate and alike_but("attention", line.strategy, strategy):
            return f"the same as {line.strategy} by closed forms: both compute attention in the same way"
        if not line.fits and keeps_more(strategy, line.strategy):
            return f"does not fit: {line.strategy}, which saves fewer activations, needs {size(line.memory['total'])}"

    # 3. Similar programs exceed their closed forms so far that this one will not fit. Take the one nearest to its
    #    closed form: ZeRO-1 with microbatches is far above its own, and says nothing about others.
    similar = [
        line
        for line in lines
        if line.estimate and all(getattr(line.strategy, name) == getattr(strategy, name) for name in _OVERRUN_FIELDS)
    ]
    if not all(line.fits for line in similar):
        nearest = min(similar, key=memory_overrun)
        # 10% of tolerance, since the ratio is only similar.
        if (likely := estimate.bytes * memory_overrun(nearest)) > 1.1 * usable:
            needs = size(nearest.memory["total"])
            return f"does not fit: {size(likely)} likely, as {nearest.strategy} needs {needs}"

    # 4. By closed forms that are scaled to a program, it is no faster.
    if fitting and (best := fastest(fitting)) and best.estimate and not _may_surprise(strategy, best, usable):
        likely, scaled_to = likely_seconds(strategy, estimate, fitting)
        if likely > (1 - _GAIN) * best.seconds:
            return f"{1e3 * likely:,.0f} ms likely, by closed forms and the program of {scaled_to.strategy}"

    # 5. Enough strategies were compiled.
    if len(lines) >= top and (fitting or len(lines) >= 2 * top):
        return f"at least {1e3 * estimate.seconds:,.0f} ms by closed forms: not among the {top} that were compiled"
    return None
