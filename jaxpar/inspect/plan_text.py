"""A plan as text, and the command `jaxpar plan`."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
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
        f"{speed:>10,.{0 if speed > 100 else 1}f} {mfu:>6} {sent[0]:>8} {sent[1]:>7}  "
    )
    strategy = dataclasses.replace(line.strategy, precision="f32") if common else line.strategy  # its default
    first, *more = _folded(str(strategy), WIDTH - len(numbers))
    yield numbers + first
    yield from (" " * len(numbers) + text for text in more)


def _folded(strategy: str, width: int) -> list[str]:
    """A strategy's text in lines, broken behind commas."""
    lines = [""]
    for part in strategy.replace(",", ",\0").split("\0"):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return lines


def _reason(plan: Plan, line: Line) -> str:
    number = plan.lines.index(line) + 1
    return textwrap.fill(f"{number:>2}  {line.why}", WIDTH, subsequent_indent="    ", break_on_hyphens=False)


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
            text = f"  {count} such as {name}: {why}"
            lines.append(textwrap.fill(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False))
        if len(kinds) > _SHOWN:
            lines.append(f"  ... and {len(kinds) - _SHOWN} kinds of reasons more in .json()")
        yield "\n".join(lines)
    fill = lambda text: textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    yield fill(
        f"GB of a device's {plan.memory / 1e9:.1f}, of which {RESERVE:.0%} are kept back for what is in no program; ! "
        "does not fit. GB link and GB net: buffers of collectives within a host and across. ms by the model of "
        "jaxpar.inspect.predict, of the compiled program."
    )
    if any(line.fits and line.memory["total"] > _JAX_TAKES * plan.memory for line in plan.lines):
        yield fill(
            f"JAX takes {_JAX_TAKES:.0%} of the memory; beyond, set XLA_PYTHON_CLIENT_MEM_FRACTION={1 - RESERVE:.2f}."
        )
    if plan.interrupted:
        yield "Interrupted: ranked is what was compiled until then."


def explained(plan: Plan, number: int) -> str:
    """Every number of a line, with its source."""
    line = plan.lines[number - 1]
    found, memory, estimate = line.prediction, line.memory, line.estimate
    parts = [f"{number}: {line.strategy}" + (f"\n{line.why}" if line.why else "")]
    at_rest = "the layout's shards at rest"
    rows = [
        ("parameters", size(memory["params"]), at_rest),
        ("gradients", size(memory["grads"]), f"{at_rest}; in the program among the temporaries"),
        ("optimizer", size(memory["optimizer"]), at_rest),
        ("activations", size(memory["saved"]), "one microbatch's for its backward, or a pipeline's stash, as traced"),
        ("arguments", size(memory["arguments"]), "the compiled program, memory_analysis()"),
        ("temporaries", size(memory["temporaries"]), "the same"),
        ("outputs", size(memory["outputs"]), "the same; most take over an argument's memory"),
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
        *((name, _ms(seconds), "part of the step") for name, seconds in line.costs().items()),
        ("rows/s", f"{speed:,.2f}", f"{plan.rows} rows / step"),
        *([("tokens/s", f"{speed * plan.length:,.0f}", f"rows/s x {plan.length}")] if plan.length else []),
        ("FLOPs", f"{found['flops']:.4g}", "of the program's matrix products, recomputation and bubble included"),
    ]
    if found["mfu"] is not None:
        rows.append(("model FLOPs", f"{found['model_flops']:.4g}", "as given, over the devices"))
        rows.append(("MFU", f"{found['mfu']:.2%}", f"model FLOPs / (step x {found['peak']:.4g} FLOP/s)"))
    parts.append(_rows("time of a step", rows))
    if line.sent:
        sent = [
            (
                f"{kind} over {axes}",
                size(got),
                f"closed form {size(want)}" + (f", ratio {got / want:.3f}" if want else ""),
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
    kernels = "kernels and collectives, most first: executions, kind, why so long, [HLO name] source"
    parts.append("\n".join([kernels, *line.kernels]))
    parts += found["notes"]
    return "\n\n".join(parts)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


def _rows(title: str, rows: list[tuple[str, str, str]]) -> str:
    wide = max(len(row[0]) for row in rows)
    return "\n".join([title, *(f"  {name:<{wide}}  {value:>12}  {source}" for name, value, source in rows)])


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
