"""Say why a strategy need not be compiled, given the programs that were.

Closed forms are lower bounds, which exclude little: a program takes 1.4 to 7 times as long. Similar programs exceed
them by similar ratios. So closed forms that are scaled to a compiled program tell which strategies are likely to fit,
and which are likely to be faster.
"""

from collections.abc import Sequence

from ...backend.text import size
from ...strategy import Strategy
from .estimates import Estimate
from .line import Line
from .neighbours import alike_but, keeps_more

_TIGHT = 0.85  # share of the usable memory above which a program is near the limit
_GAIN = 0.005  # share by which a strategy must be likely to be faster than the best program, to be compiled
_PATIENCE = 2  # programs in a row that are not faster end the search
# Fields on which the ratio of a program's memory to its closed form depends.
_OVERRUN_FIELDS = ("pipe", "expert", "context", "tensor", "remat", "offload")


def memory_overrun(line: Line) -> float:
    """Return the memory of a line's program / the bytes of its closed form, which the line must have."""
    assert line.estimate is not None
    return line.memory["total"] / line.estimate.bytes


def _similar(strategy: Strategy, lines: Sequence[Line]) -> list[Line]:
    """Return the lines whose programs exceed their closed forms by similar ratios of memory."""
    alike = lambda other: all(getattr(other, name) == getattr(strategy, name) for name in _OVERRUN_FIELDS)
    return [line for line in lines if line.estimate and alike(line.strategy)]


def least_overrun(strategy: Strategy, lines: Sequence[Line], family_lines: Sequence[Line]) -> float:
    """Return the least `memory_overrun` of similar lines, else of those of the strategy's family; 1 without any."""
    return min(map(memory_overrun, _similar(strategy, lines) or family_lines), default=1.0)


def likely_seconds(strategy: Strategy, estimate: Estimate, lines: Sequence[Line]) -> tuple[float, Line]:
    """Return the seconds of a strategy if its program exceeds its closed forms as a similar one does; and that line.

    It is the fastest line that uses the same axes, or else the fastest. Its kernels take longer than their closed form
    by some factor, and waits for communication exceed theirs by a share of all that is sent.
    """
    estimated_lines = [line for line in lines if line.estimate]
    lines_on_same_axes = [line for line in estimated_lines if _axes(line.strategy) == _axes(strategy)]
    line = min(lines_on_same_axes or estimated_lines, key=lambda line: line.seconds)
    of_line = line.estimate
    assert of_line is not None
    kernels = line.prediction["compute"]
    exposed_of_line = of_line.seconds - of_line.compute
    waits = max(0.0, line.seconds - kernels - exposed_of_line) / of_line.sent if of_line.sent else 0.0
    exposed = estimate.seconds - estimate.compute
    return kernels / of_line.compute * estimate.compute + exposed + waits * estimate.sent, line


def is_relief(strategy: Strategy, best: Line, usable: int) -> bool:
    """Return whether a strategy is the best one with less memory, and that one is near the memory limit.

    There XLA recomputes kernels and overlaps less, which no closed form knows. Twice the microbatches and remat="dots"
    need less memory for hardly more seconds.
    """
    has_more = strategy.microbatches > best.strategy.microbatches
    is_smaller = (has_more and alike_but("microbatches", strategy, best.strategy)) or (
        strategy.remat == "dots" and keeps_more(best.strategy, strategy)
    )
    return is_smaller and best.memory["total"] > _TIGHT * usable


def _may_surprise(strategy: Strategy, best: Line, lines: Sequence[Line], usable: int) -> bool:
    """Return whether a strategy differs from the best one in something that no closed form counts.

    Logits in chunks are computed twice, and remat="dots" recomputes; casts of gradients take kernels, and so do whole
    gradients of ZeRO-1; kinds of attention overlap differently; ZeRO waits for a collective of every layer, where plain
    replicas send gradients together. Each choice is tried once for programs on the same axes.
    """
    around = [line.strategy for line in lines if _axes(line.strategy) == _axes(strategy)]
    is_new = lambda name: all(getattr(strategy, name) != getattr(other, name) for other in around)
    names = ["attention", "reduce"] if strategy.reduce == "compute" else ["attention"]
    names += ["logits"] if best.prediction["chunked"] else []
    names += ["remat"] if keeps_more(strategy, best.strategy) else []
    names += ["zero"] if strategy.zero == Strategy.zero else []
    is_unknown = any(alike_but(name, strategy, best.strategy) and is_new(name) for name in names)
    is_unknown |= strategy.fsdp == 1 and _axes(strategy) == _axes(best.strategy) and is_new("fsdp")
    return is_unknown or is_relief(strategy, best, usable)


def _axes(strategy: Strategy) -> tuple[bool, ...]:
    """Return which axes a strategy uses, except for those of data parallelism."""
    return tuple(getattr(strategy, axis) > 1 for axis in ("pipe", "expert", "context", "tensor"))


def reason_to_skip(strategy: Strategy, estimate: Estimate, lines: Sequence[Line], usable: int, top: int) -> str | None:
    """Return why a strategy need not be compiled, given the lines so far; None if it is worth compiling.

    `strategy` has no line yet, and `estimate` for its closed forms. A program may take `usable` bytes. At most `top`
    strategies are compiled, twice as many until one fits.
    """
    # 1. Its lower bound on time is above a compiled program's time.
    fitting = [line for line in lines if line.fits]
    if fitting and (best := min(line.seconds for line in fitting)) < estimate.seconds:
        return (
            f"at least {1e3 * estimate.seconds:,.1f} ms by closed forms, and a compiled one takes {1e3 * best:,.1f} ms"
        )

    # 2. A line has the same program, or saves fewer activations and does not fit.
    for line in lines:
        if line.estimate == estimate and alike_but("attention", line.strategy, strategy):
            return f"the same as {line.strategy} by closed forms: both compute attention in the same way"
        if not line.fits and keeps_more(strategy, line.strategy):
            return f"does not fit: {line.strategy}, which saves fewer activations, needs {size(line.memory['total'])}"

    # 3. Similar programs exceed their closed forms so far that this one will not fit. Take the one nearest to its
    #    closed form: ZeRO-1 with microbatches is far above its own, and says nothing about others.
    similar = _similar(strategy, lines)
    if not all(line.fits for line in similar):
        nearest = min(similar, key=memory_overrun)
        # 10% of tolerance, since the ratio is only similar.
        if (likely := estimate.bytes * memory_overrun(nearest)) > 1.1 * usable:
            needs = size(nearest.memory["total"])
            return f"does not fit: {size(likely)} likely, as {nearest.strategy} needs {needs}"

    # 4. By closed forms that are scaled to a program, it is no faster; or strategies that were likely to be, were not.
    if fitting and (best := min(fitting, key=lambda line: line.seconds)).estimate:
        likely, scaled_to = likely_seconds(strategy, estimate, fitting)
        is_over = len(lines) - 1 - lines.index(best) >= _PATIENCE
        if (is_over or likely > (1 - _GAIN) * best.seconds) and not _may_surprise(strategy, best, lines, usable):
            after = f"; {_PATIENCE} programs in a row were not faster" if is_over else ""
            return f"{1e3 * likely:,.1f} ms likely, by closed forms and the program of {scaled_to.strategy}{after}"

    # 5. Enough strategies were compiled.
    if len(lines) >= top and (fitting or len(lines) >= 2 * top):
        return f"at least {1e3 * estimate.seconds:,.1f} ms by closed forms: not among the {top} that were compiled"
    return None
