"""The constraints on a `Strategy`: the values that each field takes, and the fields that exclude one another.

`Strategy` checks the rows of `CONSTRAINTS` in order when it is made; the first row that it breaks raises an error. To
add a constraint, add a row, and a strategy that breaks it to `tests/strategy/test_refused_strategies.py`.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..backend.removed import removed
from ..backend.text import amount, did_you_mean
from .axes import AXES
from .schedules import SCHEDULES, is_schedule
from .schedules.operations import MOST

OFFLOADS = ("activations", "optimizer", "params")
# The values of `offload` that name one of these or a sum of them.
SUMS = tuple("+".join(terms) for n in range(1, 4) for terms in itertools.combinations(OFFLOADS, n))


def is_int(value: Any) -> bool:
    """Return whether a value is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class _Choice:
    """The values of a field that is chosen by name.

    Attributes:
      names: the names that the field takes.
      suffix: the text of an error after the names: other values that the field takes, or why it takes no others.
      accepts: returns whether a value that is none of the names is accepted.
    """

    names: tuple[str, ...]
    suffix: str = ""
    accepts: Callable[[Any], Any] = lambda value: False


CHOICES = {
    "schedule": _Choice(tuple(SCHEDULES), accepts=is_schedule),
    "precision": _Choice(
        ("f32", "bf16", "f16", "fp8"),
        " (mxfp8 and nvfp4 have kernels for B200 alone, which jaxpar has not been tested on: see "
        "docs/recipes/precision.md)",
    ),
    "fp8_scaling": _Choice(
        ("row", "tensor"),
        " (XLA has no kernel for blocks of 128, computes nvfp4 in bfloat16, and fails on mxfp8 with 'Unsupported "
        "instruction opcode: scaled-dot': see docs/recipes/precision.md)",
    ),
    "reduce": _Choice(("f32", "compute", "int8")),
    "gather": _Choice(("compute", "int8", "fp8")),
    "remat": _Choice(("none", "layer", "dots", "twice", "auto"), " or a jax.checkpoint policy", callable),
    "offload": _Choice(("none", *SUMS)),
    "attention": _Choice(("auto", "gather", "ulysses", "ring", "usp")),
    "stages": _Choice(
        ("auto", "layers", "cut"),
        " or paths of modules, as in 'mid:up/0', or counts, as in '3:4'",
        lambda value: isinstance(value, str) and all(value.split(":")),
    ),
    "logits": _Choice(("auto", "whole"), " or a number of tokens", lambda value: is_int(value) and value > 0),
    "prefetch": _Choice(
        ("auto",),
        ", 0 or 1 (two layers ahead overlap no better than one, and take more memory: see docs/strategies/zero3.md)",
        lambda value: is_int(value) and value in (0, 1),
    ),
    "sync": _Choice(("microbatch", "step")),
    "kernels": _Choice(("own", "fused")),
}


@dataclass(frozen=True)
class Constraint:
    """A condition that no strategy may meet, and the sentence that refuses it.

    Attributes:
      fields: the fields whose values are tested, one after another.
      broken: `broken(strategy, value)` returns something true if the value of one of `fields` breaks the constraint.
      sentence: the error, a template of `str.format`: `s` is the strategy, `name` and `value` are the field's, `others`
        are the other fields as text, and `detail` is the value that `broken` returned.
    """

    fields: tuple[str, ...]
    broken: Callable[[Any, Any], Any]
    sentence: str

    def check(self, strategy: Any) -> None:
        """Raise ValueError if a strategy breaks the constraint."""
        for name in self.fields:
            if detail := self.broken(strategy, value := getattr(strategy, name)):
                # The sentence names this field itself, and the strategy's other fields as {others}.
                other_fields = strategy.text(skip=name) or "data=1"
                raise ValueError(
                    self.sentence.format(s=strategy, name=name, value=value, others=other_fields, detail=detail)
                )


def _refuse_choice(name: str, _: Any, value: Any) -> str:
    """Return the error for a value that is none of a field's `CHOICES`; "" if it is one."""
    choice = CHOICES[name]
    if (isinstance(value, str) and value in choice.names) or choice.accepts(value):
        return ""
    if error := removed(f"{name}={str(value).partition(':')[0]}"):
        return error
    suggestion = did_you_mean(value, choice.names)
    return f"{name}={value!r} is unknown; use one of {', '.join(choice.names)}{choice.suffix}{suggestion}"


def _is_no_size(size: Any) -> bool:
    """Return whether a value cannot be the size of an axis."""
    return not is_int(size) or (size < 1 and size != -1)


def _free_axes(s: Any, _: Any) -> str:
    """Return the axes of size -1, joined as the start of an error, if there are several; "" else."""
    free_axes = [axis for axis in AXES if getattr(s, axis) == -1]
    # The sentence that takes this text adds the last "=-1".
    return "=-1 and ".join(free_axes) * (len(free_axes) > 1)


_SIZE_ERROR = "{name}={value!r} is not an axis size; use a whole number from 1, or -1 for all remaining devices"
# Constraints are tested in this order. A condition may rely on the rows above it: once the type of a field is tested,
# later rows compare its value.
CONSTRAINTS = (
    # 1. One field: its type and its range.
    Constraint(("data",), lambda s, size: size != "hosts" and _is_no_size(size), _SIZE_ERROR),
    Constraint(tuple(axis for axis in AXES if axis != "data"), lambda s, size: _is_no_size(size), _SIZE_ERROR),
    Constraint(("data",), _free_axes, "{detail}=-1: only one axis can take all remaining devices; size the others"),
    Constraint(
        ("zero",),
        # `is_int` first: True equals 1, and would pass as a stage of ZeRO.
        lambda s, stage: not is_int(stage) or stage not in (1, 2, 3),
        "{name}={value!r} is not a ZeRO stage; use 1, 2 or 3 (no ZeRO: fsdp=1 with data=-1)",
    ),
    Constraint(
        ("microbatches",),
        lambda s, count: not is_int(count) or not (1 <= count <= MOST or count == -1),
        "{name}={value!r} is not a count; use a whole number from 1 to " + f"{MOST:,}, or -1 for four for each "
        "rank of the pipeline",
    ),
    Constraint(
        ("concurrent", "chunks"),
        lambda s, count: count != "auto" and (not is_int(count) or not 1 <= count <= MOST),
        "{name}={value!r} is not a count; use a whole number from 1 to " + f"{MOST:,}, or auto",
    ),
    Constraint(
        ("chunks",),
        # Chunks that the schedule needs anyway were not given: the next row refuses the schedule instead.
        lambda s, chunks: s.pipe == 1 and chunks > 1 and chunks != s.fewest_chunks,
        "chunks={value} without a pipeline; give pipe= a size, or leave chunks out",
    ),
    Constraint(
        ("schedule",),
        lambda s, _: s.pipe == 1 and s.chunks > 1,
        "schedule={value} without a pipeline; give pipe= a size, or leave schedule out",
    ),
    Constraint(
        ("stages",),
        lambda s, stages: s.pipe == 1 and stages != "auto",
        "stages={value!r} without a pipeline; give pipe= a size, or leave stages out",
    ),
    # A field that is chosen by name. The errors differ, so that the detail is the whole sentence.
    *(Constraint((name,), partial(_refuse_choice, name), "{detail}") for name in CHOICES),
    Constraint(
        ("single", "server", "sequence", "hpz"),
        lambda s, flag: not isinstance(flag, bool),
        "{name}={value!r} is not a truth value; use True or False",
    ),
    # 2. Several fields that exclude one another.
    # Tensor parallelism, microbatches and context.
    Constraint(
        ("sequence",),
        lambda s, sequence: sequence and s.tensor == 1,
        "sequence=True splits the sequence over tensor; give tensor= a size, or leave sequence out",
    ),
    Constraint(
        ("concurrent",),
        lambda s, count: s.server and count > 1,
        "concurrent={value} runs microbatches side by side, and server=True sends between steps; leave one out",
    ),
    Constraint(
        ("concurrent",),
        lambda s, count: s.pipe != 1 and count > 1,
        "concurrent={value} runs microbatches side by side, and pipe={s.pipe} does so too; leave one out",
    ),
    Constraint(
        ("concurrent",),
        # -1 becomes a number when the mesh is known (`Strategy.on`), and is tested again then.
        lambda s, count: (
            s.microbatches != -1 and count != "auto" and s.microbatches % count and -(-s.microbatches // count) * count
        ),
        "concurrent={value} does not divide microbatches={s.microbatches}; use microbatches={detail}",
    ),
    Constraint(
        ("attention",),
        lambda s, attention: attention != "auto" and s.context == 1,
        "attention={value!r} says how context ranks attend; give context= a size, or leave attention out",
    ),
    # Data parallelism.
    Constraint(
        ("prefetch",),
        lambda s, prefetch: prefetch == 1 and s.server,
        "prefetch=1 with {others}: a server has no shards to gather; use prefetch=0, or leave prefetch out",
    ),
    Constraint(
        ("sync",),
        # To choose `zero=1` or 2 is the same choice, and a rule or a server makes its own.
        lambda s, sync: sync == "step" and (s.zero != 3 or s.fsdp == 1 or s.rule or s.server),
        "sync='step' with {others}: it accumulates whole gradients of the parameters that zero=3 shards over fsdp; "
        "give fsdp a size and zero=3, or leave sync out (zero=1 reduces once a step)",
    ),
    Constraint(
        ("hpz",),
        lambda s, hpz: hpz and (s.zero != 3 or 1 in (s.fsdp, s.data) or s.rule or s.server),
        "hpz=True with {others}: a second shard of each parameter, over fsdp alone, needs zero=3 over data and fsdp; "
        "use hsdp, or give both a size with zero=3",
    ),
    # Memory.
    Constraint(
        ("budget",),
        # `amount` parses the text, and raises the error for text that is no size.
        lambda s, size: not isinstance(size, str) or (size and amount(size, "B") and s.remat != "auto"),
        "budget={value!r} with remat={s.remat!r}: give text such as '70GB', and remat='auto'",
    ),
    Constraint(
        ("remat",),
        lambda s, remat: remat == "auto" and s.server,
        "remat='auto' with {others}: a server's step is several programs, and a budget is for one; use "
        "remat='layer' or 'dots'",
    ),
    *(
        Constraint(
            ("offload",),
            # The default binds the loop's `term`: the lambda runs after the loop.
            lambda s, _, term=term: term in s.offloads and s.kept_on_device(term),
            f"offload={{value!r}} with {{others}}: {{detail}}; use {alternative}, or leave {term!r} out",
        )
        for term, alternative in (
            ("activations", "remat='layer', or data or fsdp"),
            ("optimizer", "fsdp with zero=3"),
            ("params", "fsdp with zero=3"),
        )
    ),
    # Precision and dtypes of communication.
    Constraint(
        ("precision",),
        lambda s, precision: precision == "fp8" and s.server,
        "server=True with precision='fp8': a server's programs are not compiled for FP8 kernels; use ddp, or "
        "precision='bf16'",
    ),
    Constraint(
        ("gather",),
        lambda s, gather: gather != "compute" and (s.fsdp == 1 or s.zero != 3 or s.rule),
        "gather={value!r} with {others}: only zero=3 gathers weights where they are used; use fsdp=-1, or leave gather "
        "out",
    ),
    Constraint(
        ("reduce",),
        lambda s, reduce: reduce == "int8" and (s.server or s.single or s.rule),
        "reduce='int8' with {others}: it is how ddp and ZeRO send gradients; use ddp or fsdp=-1, or leave reduce out",
    ),
    Constraint(
        ("fp8_except",),
        lambda s, paths: not isinstance(paths, str),
        "fp8_except={value!r}: give parts of paths as text, as 'attention:ffn/down'",
    ),
    Constraint(
        ("precision",),
        lambda s, precision: precision != "fp8" and (s.fp8_except or s.fp8_scaling != "row" or s.gather == "fp8"),
        "precision={value!r} in {s}: fp8_except, fp8_scaling and gather='fp8' apply to products in FP8 and their "
        "weights; use precision='fp8', or gather='int8'",
    ),
    # Strategies that replace the usual ones: a server, a registered rule, one device.
    Constraint(
        tuple(axis for axis in AXES if axis != "data"),
        lambda s, size: s.server and size != 1,
        "server=True with {name}={value}: a central server shards nothing; use data={value} alone",
    ),
    Constraint(
        ("rule",),
        lambda s, rule: not isinstance(rule, str) or (rule and not rule.isidentifier()),
        "rule={value!r} is not the name of a rule; use the name of a registered rule, as in 'int8'",
    ),
    Constraint(
        ("rule",),
        lambda s, rule: rule and (s.server or s.single or s.zero != 3),
        "{s}: server, single and zero choose rules of jaxpar's own; leave them out, or leave rule out",
    ),
    Constraint(
        ("single",),
        lambda s, single: single and (any(getattr(s, axis) != 1 for axis in AXES) or s.server),
        "single=True with {others}: one device has no axes; leave one of the two out",
    ),
)
