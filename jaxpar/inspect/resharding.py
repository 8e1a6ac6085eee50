"""What the compiler's partitioner moves between devices, and why: collectives that stand outside `shard_map`.

Inside `shard_map` jaxpar writes every collective. Outside it is the update, where an optimizer sees global arrays and
the partitioner decides: for an elementwise optimizer it sends nothing but scalars, for one that multiplies or
factorises matrices what that needs of them. Where it finds no way from one sharding to another it gathers the whole:
XLA's log has "Involuntary full rematerialization" for it (spmd_partitioner.cc).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from ..step import Step
from .entry import KINDS
from .hlo import Instruction, Module, arrays, buffers


@dataclass(frozen=True)
class Move:
    """A collective that the partitioner wrote; equal ones are taken together.

    Attributes:
      kind, axes: as in `Collective`.
      shape: of its largest result on a device.
      bytes: of one execution, as in `Collective`.
      count: how many of these the program's text has.
      leaf: the parameter that what is sent is computed from, or from whose state; "" where the program does not tell.
      operation: that it serves, by JAX's name, such as "dot_general".
      source: file and line of that, "optax/contrib/_muon.py:97"; "" where the program does not say.
    """

    kind: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    bytes: int
    count: int
    leaf: str
    operation: str
    source: str

    def __str__(self) -> str:
        of = f" of {self.leaf}" if self.leaf else ""
        at = f" at {self.source}" if self.source else ""
        return f"{self.kind} over {'+'.join(self.axes)}{of} {list(self.shape)} for {self.operation}{at}"


def moves(step: Step, text: str, least: int) -> list[Move]:
    """Those of `least` bytes or more in a compiled program of a step (`compiled.as_text()`), the largest first, and of
    equal ones those whose parameter is known.
    """
    module = Module(text, tuple(step.mesh.shape.items()))
    paths = sorted({leaf.path for leaf in step.layout.leaves}, key=len, reverse=True)
    found: dict[Move, int] = {}
    for block in module.computations.values():
        made = {i.name: i for i in block}
        for i in block:
            kind = i.opcode.removesuffix("-start")
            # What the compiler combined may have no name, or that of the first of several.
            if kind not in KINDS or not (name := i.source) or "shard_map" in name:
                continue
            axes, group = module.axes(kind, i)
            sent = sum(size for operand in i.operands for _, size in buffers(made[operand].shape))
            size = sent * (group if kind == "all-gather" else 1)
            if group > 1 and size >= least:
                operation = name.rpartition("/")[2]
                leaf = _leaf(made, i, paths)
                move = Move(
                    kind,
                    axes,
                    max((dims for _, dims in arrays(i.shape)), key=math.prod, default=()),
                    size,
                    1,
                    leaf,
                    operation,
                    _line(text, i),
                )
                found[move] = found.get(move, 0) + 1
    every = [dataclasses.replace(move, count=count) for move, count in found.items()]
    return sorted(every, key=lambda move: (-move.bytes, not move.leaf))


def cause(step: Step, move: Move) -> str:
    """Why a move is there, and what to try."""
    if not step.update.as_kept:
        stages = step.strategy.pipe * step.strategy.chunks
        return (
            "the optimizer is shown leaves in the model's own shape, and the step keeps them in another (whole stages, "
            "loops as stacks); use one that works element by element, such as optax.adamw"
            + (f", or a number of layers that {stages} divides" if step.local.schedule is not None else "")
        )
    return (
        "the optimizer needs more of a leaf than the shard that a device has; use one that works element by element, "
        "such as optax.adamw"
    )


def _leaf(made: Mapping[str, Instruction], i: Instruction, paths: Sequence[str]) -> str:
    """The parameter nearest to an instruction among what it is computed from, itself or in its state, loops aside."""
    level, seen = [i.name], set()
    while level:
        found = [made[name] for name in level]
        for one in found:
            # JAX names arguments: state.optimizer[0].mu['head']['kernel'].
            name = one.source.replace("\\", "") if one.opcode == "parameter" else ""
            parts = "/".join(re.findall(r"(?<=\[')[^']*|\w+", name))
            if leaf := next((p for p in paths if parts.startswith("state/") and parts.endswith(f"/{p}")), ""):
                return leaf
        seen.update(level)
        operands = dict.fromkeys(name for one in found if one.opcode != "while" for name in one.operands)
        level = [name for name in operands if name in made and name not in seen]
    return ""


def _line(text: str, i: Instruction) -> str:
    """The line of Python that an instruction comes from, in either of XLA's spellings."""
    if plain := re.search(r'source_file="([^"]*)" source_line=(\d+)', i.rest):
        return f"{_short(plain[1])}:{plain[2]}"
    frame = re.search(r"stack_frame_id=(\d+)", i.rest)
    place = frame and _entry(text, "StackFrames", frame[1], r"{file_location_id=(\d+)")
    line = place and _entry(text, "FileLocations", place[1], r"{file_name_id=(\d+).*? line=(\d+)")
    file = line and _entry(text, "FileNames", line[1], r'"(.*)"')
    return f"{_short(file[1])}:{line[2]}" if line and file else ""


def _entry(text: str, table: str, number: str, form: str) -> re.Match[str] | None:
    """A line of one of the tables at the beginning of a program."""
    return re.search(rf"^{table}\n(?:.+\n)*?{number} {form}", text, re.MULTILINE)


def _short(path: str) -> str:
    parts = PurePath(path).parts
    start = next((at + 1 for at, part in enumerate(parts) if part == "site-packages"), -3)
    return str(PurePath(*parts[start:]))
