"""What `plan` found, and how it prints."""

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
from .line import ERROR, UNSEEN, Line

_JAX_TAKES = 0.75  # of the memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION says else (JAX's page on GPU memory)
_SCALARS = 1000  # bytes: collectives that send less are of norms and the like
_DAY = 86_400  # seconds
_WAYS = {"link": "GB link", "network": "GB net"}  # and what a column is called
_SHOWN = 4  # reasons of those that were not compiled


@dataclass(frozen=True)
class Plan:
    """What `jaxpar.plan` found. `print` it, or take `.json()`; `.explain(k)` has every number of line k.

    Attributes:
      target, devices: its name; number and kind.
      memory: bytes of a device.
      rows, length: of the global batch; positions of a row, None where not given.
      lines: the compiled strategies, best first: those that fit by seconds, then the others by bytes.
      pruned: candidates that were not compiled, and why.
      refused: strategies that cannot be, and the error of `make_train_step`.
      interrupted: Ctrl-C came before all was compiled.
      tokens: of a whole run (rows, where there is no `length`), for which the first sentence says days.
      price: of an hour of one device, in a currency of the user's; None: no cost is said.
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
        """The first line's strategy. Raises ValueError where nothing fits."""
        if not self.lines or not self.lines[0].fits:
            least = f"; {self.lines[0].why}" if self.lines else ""
            raise ValueError(f"no compiled strategy fits {self.devices}{least}; use more devices or fewer rows")
        return self.lines[0].strategy

    def json(self) -> dict[str, Any]:
        """All of it as dicts, lists, text and numbers."""
        return vars(self) | {"lines": [line.json() for line in self.lines], "reserve": RESERVE}

    def explain(self, number: int) -> str:
        """Every number of a line, from 1, with its source. Raises ValueError for a line that does not exist."""
        if not 1 <= number <= len(self.lines):
            raise ValueError(f"explain {number}: the plan has lines 1 to {len(self.lines)}")
        return explained(self, number)

    def __str__(self) -> str:
        return table(self)


def table(plan: Plan) -> str:
    """The plan in 80 columns."""
    each = f"{plan.rows:,} rows" + (f" of {plan.length:,} tokens" if plan.length else "")
    speed = "tokens/s" if plan.length else "rows/s"
    precisions = {line.strategy.precision for line in plan.lines}
    common = f"precision={precisions.pop()}, " if len(precisions) == 1 else ""
    ways = [way for way in _WAYS if any(line.links.get(way) for line in plan.lines)]
    sent = "".join(f"{_WAYS[way]:>8} " for way in ways)
    head = [
        f"{plan.devices} ({plan.target}), {each}: {common}{len(plan.lines)} compiled",
        f"{'#':>2}  {'GB':>6} {'ms':>8} {speed:>10} {'MFU':>6} {sent} strategy",
    ]
    parts = [
        _fill(summary(plan), 2),
        "\n".join(
            [*head, *(row for at, line in enumerate(plan.lines, 1) for row in _row(plan, at, line, ways, bool(common)))]
        ),
    ]
    if losers := [_fill(f"{at:>2}  {line.why}", 4) for at, line in enumerate(plan.lines, 1) if line.why]:
        parts.append("\n".join(["why not", *losers]))
    parts += _left(plan)
    return "\n\n".join(parts)


def summary(plan: Plan) -> str:
    """The answer in one sentence: whether it fits, how much of the device is used, how long a run takes."""
    if not plan.lines:
        return "nothing was compiled"
    best = plan.lines[0]
    need = f"{best.memory['total'] / 1e9:.0f} of {plan.memory / 1e9:.0f} GB"
    if not best.fits:
        return f"fits: no; the least that was compiled takes {need}, as {best.strategy}"
    parts = [f"fits: yes, {need}"]
    if best.prediction["mfu"] is not None:
        parts.append(f"{best.prediction['mfu']:.0%} MFU")
    speed = best.prediction["rows_per_second"] * (plan.length or 1)
    many = plan.tokens or (1e12 if plan.length else 1e9)
    days, devices = many / speed / _DAY, best.prediction["devices"]
    counted = number(many, ".4g").replace(" ", "").replace("G", "B")  # billions, as of tokens
    parts.append(f"{days:,.1f} days for {counted} {'tokens' if plan.length else 'rows'}")
    if plan.price is not None:
        hours = 24 * days * devices
        parts.append(f"{hours:,.0f} device hours at {plan.price:g} are {hours * plan.price:,.0f}")
    return f"{'; '.join(parts)}: {best.strategy}{_exact(plan)}"


def _exact(plan: Plan) -> str:
    """The first line whose gradients are summed in float32, where the best's are not: that is less exact, and the
    difference is often within the error.
    """
    best = plan.lines[0]
    if best.strategy.reduce == "f32" or best.strategy.precision == "f32":
        return ""
    exact = [at for at, line in enumerate(plan.lines) if line.fits and line.strategy.reduce == "f32"]
    sums = f" (gradients summed in {best.strategy.precision.replace('fp8', 'bf16')}"  # FP8 is of products alone
    if not exact:
        return f"{sums})"
    other = plan.lines[exact[0]]
    within = ", within the error" if other.ties(best) else ""
    return f"{sums}; in f32, line {exact[0] + 1}, {other.seconds / best.seconds - 1:.1%} slower{within})"


def _row(plan: Plan, number: int, line: Line, ways: list[str], common: bool) -> Iterator[str]:
    found = line.prediction
    speed = found["rows_per_second"] * (plan.length or 1)
    mfu = "-" if found["mfu"] is None else f"{found['mfu']:.1%}"
    sent = "".join(f"{line.links.get(way, 0) / 1e9:>8.1f} " for way in ways)
    tie = "~" if number > 1 and line.ties(plan.lines[0]) else " "
    numbers = (
        f"{number:>2}{tie} {line.memory['total'] / 1e9:>5.1f}{' ' if line.fits else '!'} {1e3 * line.seconds:>8,.1f} "
        f"{_speed(speed):>10} {mfu:>6} {sent} "
    )
    strategy = dataclasses.replace(line.strategy, precision="f32") if common else line.strategy  # its default
    first, *more = _Wrapper(WIDTH - len(numbers), break_on_hyphens=False).wrap(str(strategy))
    yield numbers + first
    yield from (" " * len(numbers) + text for text in more)


class _Wrapper(textwrap.TextWrapper):
    """Breaks at spaces, behind the commas of a strategy's text, and behind the slashes of a kernel's source."""

    wordsep_simple_re = re.compile(r"([ \t\n]+|(?<=,)(?=[a-z])|(?<=/)(?=\w\w))")


def _fill(text: str, indent: int) -> str:
    """A paragraph whose lines but the first are indented."""
    return _Wrapper(WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False).fill(text)


def _left(plan: Plan) -> Iterator[str]:
    """What was not compiled, and remarks."""
    for what, whys in (("not compiled", plan.pruned), ("cannot be", plan.refused)):
        if not whys:
            continue
        # Reasons that differ in numbers only are one.
        kinds = collections.Counter("".join("#" if c.isdigit() else c for c in why) for why in whys.values())
        lines = [f"{what}: {len(whys)}"]
        for kind, count in kinds.most_common(_SHOWN):
            name, why = next((n, w) for n, w in whys.items() if "".join("#" if c.isdigit() else c for c in w) == kind)
            lines.append(_fill(f"  {count} such as {name}: {why}", 4))
        if len(kinds) > _SHOWN:
            lines.append(f"  ... and {len(kinds) - _SHOWN} kinds of reasons more in .json()")
        yield "\n".join(lines)
    yield _fill(
        f"GB of a device's {plan.memory / 1e9:.1f}, of which {RESERVE:.0%} are kept back for what is in no program; ! "
        "does not fit. GB link and GB net: what each device sends within a host and across hosts. ms by the model of "
        "jaxpar.inspect.predict.prediction, of the compiled program; eight of ten published runs took "
        f"{ERROR[0]} to {ERROR[1]} times as long, twelve of fifteen others {UNSEEN[0]} to {UNSEEN[1]} times. ~ may be "
        "as fast as 1: so little is no ranking.",
        2,
    )
    if any(line.fits and line.memory["total"] > _JAX_TAKES * plan.memory for line in plan.lines):
        share = f"XLA_PYTHON_CLIENT_MEM_FRACTION={1 - RESERVE:.2f}"
        yield _fill(f"JAX takes {_JAX_TAKES:.0%} of the memory; beyond, set {share}.", 2)
    if any(line.prediction.get("upper_bound") for line in plan.lines):
        yield _fill(f"{plan.lines[0].prediction['hardware']}: all speeds are upper bounds; {UPPER_BOUND}.", 2)
    if plan.interrupted:
        yield "Interrupted: ranked is what was compiled until then."


def explained(plan: Plan, number: int) -> str:
    """Every number of a line, with its source."""
    line = plan.lines[number - 1]
    found, memory, estimate = line.prediction, line.memory, line.estimate
    parts = ["\n".join(_fill(text, 3) for text in (f"{number}: {line.strategy}", line.why) if text)]
    at_rest = "the layout's shards at rest"
    taken = memory["arguments"] + memory["temporaries"] + memory["outputs"] - memory["total"]
    rows = [
        ("parameters", size(memory["params"]), at_rest),
        ("gradients", size(memory["grads"]), f"{at_rest}; in the program among the temporaries"),
        ("optimizer", size(memory["optimizer"]), at_rest),
        ("activations", size(memory["saved"]), "one microbatch's for its backward, or a pipeline's stash, as traced"),
        ("arguments", size(memory["arguments"]), "the compiled program, memory_analysis()"),
        ("temporaries", size(memory["temporaries"]), "the same"),
        ("outputs", size(memory["outputs"]), f"the same; {size(taken)} of them in arguments' memory"),
        ("total", size(memory["total"]), "arguments + temporaries + outputs - what is taken over"),
        (
            "may take",
            size(line.usable),
            f"{1 - RESERVE:.0%} of {size(plan.memory)}: fits" + ("" if line.fits else " NOT"),
        ),
    ]
    parts.append(_rows("memory of a device", rows))
    speed = found["rows_per_second"]
    rows = [
        ("step", _ms(found["seconds"]), "compute + exposed"),
        ("compute", _ms(found["compute"]), "kernels, in the order of the compiled program"),
        ("exposed", _ms(found["exposed"]), "kernels wait for collectives"),
        ("hidden", _ms(found["hidden"]), "collectives behind kernels"),
        *((name, _ms(seconds), _part(name, line)) for name, seconds in line.costs().items() if seconds),
        ("rows/s", _speed(speed), f"{plan.rows} rows / step"),
        *(
            [("tokens/s", _speed(speed * plan.length), f"{plan.rows} rows x {plan.length} / step")]
            if plan.length
            else []
        ),
        ("FLOPs", f"{found['flops']:.4g}", "recomputation and bubble included; causal attention is half a square"),
    ]
    if found["mfu"] is not None:
        given = "as given, over the devices; jaxpar's models count attention as whole squares"
        rows.append(("model FLOPs", f"{found['model_flops']:.4g}", given))
        rows.append(("MFU", f"{found['mfu']:.2%}", f"model FLOPs / (step x {found['peak']:.4g} FLOP/s)"))
    parts.append(_rows("time of a step", rows))
    if line.sent:
        sent = [
            (
                f"{kind} over {axes}",
                size(got),
                f"closed form {size(want)}, "
                + (f"ratio {got / want:.3f}" if want >= _SCALARS else "scalars; the optimizer's own are in no form"),
            )
            for kind, axes, want, got in line.sent
        ]
        sent += [(f"by {way}", size(count), "sum of the above") for way, count in line.links.items()]
        parts.append(_rows("sent by each device, in collectives of the compiled program", sent))
    if estimate:
        rows = [
            ("bytes", size(estimate.bytes), "parameters + optimizer + the larger of gradients and activations"),
            ("activations", size(estimate.activations), "what the traced loss keeps for its backward"),
            ("step", _ms(estimate.seconds), f"matmuls at the peak {_ms(estimate.compute)}, sent {_ms(estimate.sent)}"),
        ]
        parts.append(_rows("closed forms by which it was chosen, at least", rows))
    kernels = "kernels and collectives, most first: executions, kind, why, [HLO name] source"
    parts.append("\n".join([kernels, *(_fill(kernel, 25) for kernel in line.kernels)]))
    parts += found["notes"]
    return "\n\n".join(parts)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


def _speed(each_second: float) -> str:
    return f"{each_second:,.{0 if each_second > 100 else 2}f}"


def _rows(title: str, rows: list[tuple[str, str, str]]) -> str:
    wide = max(len(row[0]) for row in rows)
    lines = (f"  {name:<{wide}}  {value:>12}  {source}" for name, value, source in rows)
    return "\n".join([title, *(_fill(line, wide + 18) for line in lines)])


def _part(name: str, line: Line) -> str:
    """What a part of a step's seconds is."""
    return {
        "matmuls and attention": "of compute, products",
        "recomputation": f"of compute, products beyond the {line.least:.4g} FLOPs of the line with fewest",
        "the pipeline's bubble": f"of compute, {line.bubble:.1%} of products: ranks idle by the schedule"
        if line.bubble
        else "ranks wait for others' operations in their slots",
        "memory-bound kernels": "of compute, the rest",
    }.get(name, "of exposed")
