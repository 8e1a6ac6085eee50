"""`Plan`: the result of `jaxpar.plan`, and how it prints.

`table` prints the ranked lines, with `summary` as its first sentence. `explained` prints every number of one line with
its source, in sections for memory, time, communication, closed forms and kernels.
"""

import collections
import dataclasses
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...backend.text import WIDTH, number, size
from ...hardware.hardware import RESERVE
from ...inspect.predict.efficiency import UPPER_BOUND
from ...strategy import Strategy
from .estimates import Estimate
from .line import ERROR, UNSEEN, Line

# The share of the memory that JAX allocates, unless XLA_PYTHON_CLIENT_MEM_FRACTION changes it (JAX's page on GPU
# memory).
_JAX_ALLOCATES = 0.75
_SCALARS = 1000  # bytes; collectives that send less are sums of scalars, such as norms
SECONDS_PER_DAY = 86_400
_LINKS = {"link": "GB link", "network": "GB net"}  # a key of `Line.links` -> its column's title
_MAX_REASONS = 4  # kinds of reasons that the table shows for strategies without a line


@dataclass(frozen=True)
class Plan:
    """The result of `jaxpar.plan`. `print` it, or take `.json()`; `.explain(k)` has every number of line k.

    Attributes:
      target: the name of the target.
      devices: the number and the kind of the devices.
      memory: the bytes of a device.
      rows: the rows of the global batch.
      length: the positions of a row. None if not given.
      lines: the compiled strategies, best first: those that fit by seconds, then the others by bytes.
      pruned: candidates that were not compiled, each with the reason.
      refused: invalid strategies, each with the error of `make_train_step`.
      interrupted: whether Ctrl-C ended the compiling early.
      tokens: the tokens of a whole run (its rows, without `length`), for which the first sentence gives days.
      price: the price of an hour of one device, in any currency. None: no cost is given.
    """

    target: str
    devices: str
    memory: int
    rows: int
    length: int | None
    lines: tuple[Line, ...]
    pruned: dict[str, str]
    refused: dict[str, str]
    interrupted: bool
    tokens: float | None = None
    price: float | None = None

    @property
    def best(self) -> Strategy:
        """Return the first line's strategy. Raises ValueError if nothing fits."""
        if not self.lines or not self.lines[0].fits:
            why = f"; {self.lines[0].why}" if self.lines else ""
            raise ValueError(f"no compiled strategy fits {self.devices}{why}; use more devices or fewer rows")
        return self.lines[0].strategy

    def json(self) -> dict[str, Any]:
        """Return the plan as dicts, lists, text and numbers."""
        return vars(self) | {"lines": [line.json() for line in self.lines], "reserve": RESERVE}

    def explain(self, number: int) -> str:
        """Return every number of a line, from 1, with its source. Raises ValueError for a line that does not exist."""
        # Lines are counted from 1, as the table prints them.
        if not 1 <= number <= len(self.lines):
            raise ValueError(f"explain {number}: the plan has lines 1 to {len(self.lines)}; give one of these")
        return explained(self, number)

    def __str__(self) -> str:
        return table(self)


def table(plan: Plan) -> str:
    """Return the plan as text of 80 columns: summary, lines, reasons, remarks."""
    batch = f"{plan.rows:,} rows" + (f" of {plan.length:,} tokens" if plan.length else "")
    speed = "tokens/s" if plan.length else "rows/s"
    # A precision that all lines share is in the title, and not in each line.
    precisions = {line.strategy.precision for line in plan.lines}
    common = f"precision={precisions.pop()}, " if len(precisions) == 1 else ""
    links = [link for link in _LINKS if any(line.links.get(link) for line in plan.lines)]
    sent = "".join(f"{_LINKS[link]:>8} " for link in links)
    head = [
        f"{plan.devices} ({plan.target}), {batch}: {common}{len(plan.lines)} compiled",
        f"{'#':>2}  {'GB':>6} {'ms':>8} {speed:>10} {'MFU':>6} {sent} strategy",
    ]
    rows = (row for number, line in enumerate(plan.lines, 1) for row in _row(plan, number, line, links, bool(common)))
    parts = [fill(summary(plan), 2), "\n".join([*head, *rows])]
    if losers := [fill(f"{number:>2}  {line.why}", 4) for number, line in enumerate(plan.lines, 1) if line.why]:
        parts.append("\n".join(["why not", *losers]))
    parts += _remarks(plan)
    return "\n\n".join(parts)


def summary(plan: Plan) -> str:
    """Return the answer in one sentence: whether the best line fits, its memory and MFU, and the days of a run."""
    if not plan.lines:
        return "nothing was compiled"
    best = plan.lines[0]
    need = f"{best.memory['total'] / 1e9:.0f} of {plan.memory / 1e9:.0f} GB"
    if not best.fits:
        return f"fits: no; the smallest program takes {need}: {best.strategy}"
    parts = [f"fits: yes, {need}"]
    if best.prediction["mfu"] is not None:
        parts.append(f"{best.prediction['mfu']:.0%} MFU")
    speed = best.prediction["rows_per_second"] * (plan.length or 1)
    # Without a number of tokens, the days are for a trillion tokens or a billion rows: one number to compare plans by.
    amount = plan.tokens or (1e12 if plan.length else 1e9)
    days, devices = amount / speed / SECONDS_PER_DAY, best.prediction["devices"]
    parts.append(f"{days:,.1f} days for {tokens_text(amount)} {'tokens' if plan.length else 'rows'}")
    if plan.price is not None:
        hours = 24 * days * devices
        parts.append(f"{hours:,.0f} device hours at {plan.price:g} are {hours * plan.price:,.0f}")
    return f"{'; '.join(parts)}: {best.strategy}{_exact_alternative(plan)}"


def tokens_text(tokens: float) -> str:
    """Return a number of tokens as text, which are counted in billions: "300B", "1.5T"."""
    return number(tokens, ".4g").replace(" ", "").replace("G", "B")


def _exact_alternative(plan: Plan) -> str:
    """Return the first line that sums gradients in float32, if the best line sums them in a lower precision.

    The best line is then less exact, and the difference in time is often within the error of predictions.
    """
    best = plan.lines[0]
    if best.strategy.reduce == "f32" or best.strategy.precision == "f32":
        return ""
    exact = [i for i, line in enumerate(plan.lines) if line.fits and line.strategy.reduce == "f32"]
    # precision=fp8 multiplies in FP8, and sums in bf16.
    sums = f" (gradients summed in {best.strategy.precision.replace('fp8', 'bf16')}"
    if not exact:
        return f"{sums})"
    alternative = plan.lines[exact[0]]
    within = ", within the error" if alternative.ties(best) else ""
    slowdown = alternative.seconds / best.seconds - 1
    return f"{sums}; in f32, line {exact[0] + 1}, {slowdown:.1%} slower{within})"


def _row(plan: Plan, number: int, line: Line, links: list[str], has_common_precision: bool) -> Iterator[str]:
    """Yield the row of a line."""
    prediction = line.prediction
    speed = prediction["rows_per_second"] * (plan.length or 1)
    mfu = "-" if prediction["mfu"] is None else f"{prediction['mfu']:.1%}"
    sent = "".join(f"{line.links.get(link, 0) / 1e9:>8.1f} " for link in links)
    tie = "~" if number > 1 and line.ties(plan.lines[0]) else " "
    numbers = (
        f"{number:>2}{tie} {line.memory['total'] / 1e9:>5.1f}{' ' if line.fits else '!'} {1e3 * line.seconds:>8,.1f} "
        f"{_speed(speed):>10} {mfu:>6} {sent} "
    )
    yield from layout_lines(numbers, line.strategy, has_common_precision)


def allocation_remark(program: int, memory: float) -> Iterator[str]:
    """Yield the setting that a program of so many bytes needs on a device with this memory, if it needs one."""
    if program > _JAX_ALLOCATES * memory:
        share = f"XLA_PYTHON_CLIENT_MEM_FRACTION={1 - RESERVE:.2f}"
        yield fill(f"JAX allocates {_JAX_ALLOCATES:.0%} of the memory; for larger programs, set {share}.", 2)


def layout_lines(numbers: str, strategy: Strategy, has_common_precision: bool) -> Iterator[str]:
    """Yield the columns of a row followed by its strategy, and the rest of the strategy if that is too long."""
    # A strategy's text leaves out defaults: precision=f32 hides the precision that the title has.
    if has_common_precision:
        strategy = dataclasses.replace(strategy, precision="f32")
    first, *more = _Wrapper(WIDTH - len(numbers), break_on_hyphens=False).wrap(str(strategy))
    yield numbers + first
    yield from (" " * len(numbers) + text for text in more)


class _Wrapper(textwrap.TextWrapper):
    """Breaks lines at spaces, after the commas of a strategy's text, and after the slashes of a kernel's source."""

    wordsep_simple_re = re.compile(r"([ \t\n]+|(?<=,)(?=[a-z])|(?<=/)(?=\w\w))")


def fill(text: str, indent: int) -> str:
    """Return a paragraph of 80 columns; all lines after the first are indented."""
    return _Wrapper(WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False).fill(text)


def _remarks(plan: Plan) -> Iterator[str]:
    """Yield the strategies without a line, with reasons, and remarks on the columns."""
    # 1. Strategies without a line, by the kinds of their reasons.
    for title, reasons in (("not compiled", plan.pruned), ("invalid", plan.refused)):
        if not reasons:
            continue
        # Reasons that differ only in their numbers are of one kind.
        kind_of = lambda reason: "".join("#" if c.isdigit() else c for c in reason)
        kinds = collections.Counter(map(kind_of, reasons.values()))
        lines = [f"{title}: {len(reasons)}"]
        for kind, count in kinds.most_common(_MAX_REASONS):
            name, reason = next((name, reason) for name, reason in reasons.items() if kind_of(reason) == kind)
            lines.append(fill(f"  {count} such as {name}: {reason}", 4))
        if len(kinds) > _MAX_REASONS:
            lines.append(f"  ... and {len(kinds) - _MAX_REASONS} more kinds of reasons in .json()")
        yield "\n".join(lines)
    # 2. How to read the columns.
    yield fill(
        f"GB: of {plan.memory / 1e9:.1f} per device, {RESERVE:.0%} reserved for memory that is in no program; ! "
        "does not fit. GB link and GB net: sent by each device within a host and across hosts. ms: predicted for the "
        "compiled program by jaxpar.inspect.predict.prediction; eight of ten published runs took "
        f"{ERROR[0]} to {ERROR[1]} times as long, twelve of fifteen others {UNSEEN[0]} to {UNSEEN[1]} times. ~: may be "
        "as fast as line 1, since the difference is within this error.",
        2,
    )
    yield from allocation_remark(
        max((line.memory["total"] for line in plan.lines if line.fits), default=0), plan.memory
    )
    if any(line.prediction.get("upper_bound") for line in plan.lines):
        yield fill(f"{plan.lines[0].prediction['hardware']}: all speeds are upper bounds; {UPPER_BOUND}.", 2)
    if plan.interrupted:
        yield "Interrupted: only the strategies that were compiled until then are ranked."


def explained(plan: Plan, number: int) -> str:
    """Return every number of a line, with its source, as text."""
    line = plan.lines[number - 1]
    parts = ["\n".join(fill(text, 3) for text in (f"{number}: {line.strategy}", line.why) if text)]
    parts.append(_section("memory of a device", _memory_rows(plan, line)))
    parts.append(_section("time of a step", _time_rows(plan, line)))
    if line.sent:
        parts.append(_section("sent by each device, in collectives of the compiled program", _sent_rows(line)))
    if line.estimate:
        parts.append(_section("lower bounds by closed forms, by which it was chosen", _estimate_rows(line.estimate)))
    kernels = "kernels and collectives, longest first: executions, kind, why, [HLO name] source"
    parts.append("\n".join([kernels, *(fill(kernel, 25) for kernel in line.kernels)]))
    parts += line.prediction["notes"]
    return "\n\n".join(parts)


_Row = tuple[str, str, str]  # name, value, source


def _memory_rows(plan: Plan, line: Line) -> list[_Row]:
    """Return the parts of a device's memory."""
    memory = line.memory
    at_rest = "the layout's shards at rest"
    # Donated arguments: outputs reuse their memory, and the total counts it once.
    reused = memory["arguments"] + memory["temporaries"] + memory["outputs"] - memory["total"]
    return [
        ("parameters", size(memory["params"]), at_rest),
        ("gradients", size(memory["grads"]), f"{at_rest}; in the program among the temporaries"),
        ("optimizer", size(memory["optimizer"]), at_rest),
        ("activations", size(memory["saved"]), "one microbatch's for its backward, or a pipeline's stash, as traced"),
        ("arguments", size(memory["arguments"]), "the compiled program, memory_analysis()"),
        ("temporaries", size(memory["temporaries"]), "the same"),
        ("outputs", size(memory["outputs"]), f"the same; {size(reused)} of them reuse arguments' memory"),
        ("total", size(memory["total"]), "arguments + temporaries + outputs - reused memory"),
        (
            "may take",
            size(line.usable),
            f"{1 - RESERVE:.0%} of {size(plan.memory)}: fits" + ("" if line.fits else " NOT"),
        ),
    ]


def _time_rows(plan: Plan, line: Line) -> list[_Row]:
    """Return the parts of a step's time, the speed, and the FLOPs."""
    prediction = line.prediction
    speed = prediction["rows_per_second"]
    rows = [
        ("step", _ms(prediction["seconds"]), "compute + exposed"),
        ("compute", _ms(prediction["compute"]), "kernels, in the order of the compiled program"),
        ("exposed", _ms(prediction["exposed"]), "kernels wait for collectives"),
        ("hidden", _ms(prediction["hidden"]), "collectives that overlap with kernels"),
        *((name, _ms(seconds), _cost_source(name, line)) for name, seconds in line.costs().items() if seconds),
        ("rows/s", _speed(speed), f"{plan.rows} rows / step"),
        *(
            [("tokens/s", _speed(speed * plan.length), f"{plan.rows} rows x {plan.length} / step")]
            if plan.length
            else []
        ),
        ("FLOPs", f"{prediction['flops']:.4g}", "recomputation and bubble included; causal attention is half a square"),
    ]
    if prediction["mfu"] is not None:
        source = "as given, over the devices; jaxpar's models count attention as whole squares"
        rows.append(("model FLOPs", f"{prediction['model_flops']:.4g}", source))
        rows.append(("MFU", f"{prediction['mfu']:.2%}", f"model FLOPs / (step x {prediction['peak']:.4g} FLOP/s)"))
    return rows


def _sent_rows(line: Line) -> list[_Row]:
    """Return the bytes that a device sends: found in the program, and by the closed form."""
    rows = []
    for kind, axes, expected, measured in line.sent:
        # Closed forms leave out scalars such as the optimizer's norms, so that a ratio would say nothing.
        ratio = f"ratio {measured / expected:.3f}" if expected >= _SCALARS else "scalars; no form has the optimizer's"
        rows.append((f"{kind} over {axes}", size(measured), f"closed form {size(expected)}, {ratio}"))
    return rows + [(f"by {link}", size(count), "sum of the above") for link, count in line.links.items()]


def _estimate_rows(estimate: Estimate) -> list[_Row]:
    """Return the closed forms."""
    seconds = f"matmuls at the peak {_ms(estimate.compute)}, sent {_ms(estimate.sent)}"
    return [
        ("bytes", size(estimate.bytes), "parameters + optimizer + the larger of gradients and activations"),
        ("activations", size(estimate.activations), "what the traced loss saves for its backward"),
        ("step", _ms(estimate.seconds), seconds),
    ]


def _ms(seconds: float) -> str:
    """Return a time in milliseconds, as text."""
    return f"{1e3 * seconds:,.1f} ms"


def _speed(per_second: float) -> str:
    """Return rows or tokens per second, as text."""
    return f"{per_second:,.{0 if per_second > 100 else 2}f}"


def _section(title: str, rows: list[_Row]) -> str:
    """Return rows in columns, below a title."""
    name_width = max(len(row[0]) for row in rows)
    lines = (f"  {name:<{name_width}}  {value:>12}  {source}" for name, value, source in rows)
    return "\n".join([title, *(fill(line, name_width + 18) for line in lines)])


def _cost_source(name: str, line: Line) -> str:
    """Return how a part of `Line.costs` is computed."""
    return {
        "matmuls and attention": "of compute, products",
        "recomputation": f"of compute, products beyond the {line.least:.4g} FLOPs of the line with fewest",
        "the pipeline's bubble": f"of compute, {line.bubble:.1%} of products: ranks idle by the schedule"
        if line.bubble
        else "ranks wait for others' operations in their slots",
        "memory-bound kernels": "of compute, the rest",
    }.get(name, "of exposed")
