"""A plan as text, and the command `jaxpar plan`."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jax
import tyro

from ..strategy import Strategy
from .explain_text import WIDTH, size
from .plan import plan
from .plan_line import RESERVE, Line, Plan

_JAX_TAKES = 0.75  # of the memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION says else (JAX's page on GPU memory)
_SCALARS = 1000  # bytes: collectives that send less are of norms and the like
_SHOWN = 4  # reasons of those that were not compiled


def table(plan: Plan) -> str:
    """The plan in 80 columns."""
    each = f"{plan.rows:,} rows" + (f" of {plan.length:,} tokens" if plan.length else "")
    speed = "tokens/s" if plan.length else "rows/s"
    precisions = {line.strategy.precision for line in plan.lines}
    common = f"precision={precisions.pop()}, " if len(precisions) == 1 else ""
    head = [
        f"{plan.devices} ({plan.target}), {each}: {common}{len(plan.lines)} compiled",
        f"{'#':>2}  {'GB':>6} {'ms':>8} {speed:>10} {'MFU':>6} {'GB link':>8} {'GB net':>7}  strategy",
    ]
    parts = [
        "\n".join(
            [*head, *(row for at, line in enumerate(plan.lines, 1) for row in _row(plan, at, line, bool(common)))]
        )
    ]
    if losers := [line for line in plan.lines if line.why]:
        parts.append("\n".join(["why not", *(_reason(plan, line) for line in losers)]))
    parts += _left(plan)
    return "\n\n".join(parts)


def _row(plan: Plan, number: int, line: Line, common: bool) -> Iterator[str]:
    found = line.prediction
    speed = found["rows_per_second"] * (plan.length or 1)
    mfu = "-" if found["mfu"] is None else f"{found['mfu']:.1%}"
    sent = [f"{line.links.get(way, 0) / 1e9:.1f}" for way in ("link", "network")]
    numbers = (
        f"{number:>2}  {line.memory['total'] / 1e9:>5.1f}{' ' if line.fits else '!'} {1e3 * line.seconds:>8,.1f} "
        f"{_speed(speed):>10} {mfu:>6} {sent[0]:>8} {sent[1]:>7}  "
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


def _reason(plan: Plan, line: Line) -> str:
    number = plan.lines.index(line) + 1
    return _fill(f"{number:>2}  {line.why}", 4)


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
        "does not fit. GB link and GB net: buffers of collectives within a host and across. ms by the model of "
        "jaxpar.inspect.predict, of the compiled program.",
        2,
    )
    if any(line.fits and line.memory["total"] > _JAX_TAKES * plan.memory for line in plan.lines):
        share = f"XLA_PYTHON_CLIENT_MEM_FRACTION={1 - RESERVE:.2f}"
        yield _fill(f"JAX takes {_JAX_TAKES:.0%} of the memory; beyond, set {share}.", 2)
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
        *((name, _ms(seconds), _part(name, line)) for name, seconds in line.costs().items()),
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
        parts.append(_rows("sent: buffers of collectives in the compiled program", sent))
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
        "the pipeline's bubble": f"of compute, {line.bubble:.1%} of products: ranks idle by the schedule",
        "memory-bound kernels": "of compute, the rest",
    }.get(name, "of exposed")


@dataclass(frozen=True)
class Options:
    """Ranks strategies for a model on devices that need not be here: what fits, how fast, and why the others lose.

    The best few by closed forms are compiled; nothing runs. What was compiled is kept for the next time.
    """

    model: str = "llama3-8b"
    """a name, and sizes to change: llama3-8b, gpt2, ... or llama3-8b,layers=2"""
    target: str = "8xH100"
    """devices to plan for: 8xH100, 32x8xH100, v5e:4x4, 64xcluster.toml"""
    batch: int = 8
    """rows of the global batch"""
    seq: int = 4096
    """text: tokens of a row"""
    strategy: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """compile this alone, or these if given several times: tensor=8,pipe=16,data=128,microbatches=16,precision=bf16"""
    precision: Literal["bf16", "f16", "f32"] = "bf16"
    """compute dtype of the strategies that are tried"""
    top: int = 8
    """so many are compiled"""
    explain: int | None = None
    """print every number of this line with its source"""
    json: bool = False
    """print JSON instead of a table"""
    cache: Path | None = None
    """folder of what was compiled before; without it: JAXPAR_CACHE, or ~/.cache/jaxpar/plan"""

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "top"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: use a whole number from 1")


def main(options: Options) -> None:
    """Plans and prints. Exits with 1 where nothing fits, 130 after Ctrl-C."""
    from ..options import named_of  # only where a model is asked for

    for text in options.strategy:
        Strategy.parse(text)  # before anything that takes time
    if os.environ.get("JAX_PLATFORMS") is None:
        jax.config.update("jax_platforms", "cpu")  # else the compiler for GPUs is missing where there is none
    model = named_of(options.model, options.seq)
    text = model.kind == "text"
    found = plan(
        model.model,
        model.example(options.batch, options.seq),
        options.target,
        flops=model.flops(options.batch, options.seq),
        strategies=options.strategy or None,
        top=options.top,
        precision=options.precision,
        length=options.seq if text else None,
        cache=True if options.cache is None else options.cache,
    )
    if options.json:
        print(json.dumps(found.json(), indent=1))  # noqa: T201
    else:
        print(found if options.explain is None else found.explain(options.explain))  # noqa: T201
    if found.interrupted:
        raise KeyboardInterrupt
    if not any(line.fits for line in found.lines):
        sys.exit(1)
