"""What the compiler's partitioner moves between devices, and why: collectives that stand outside `shard_map`.

Inside `shard_map` jaxpar writes every collective. Outside it is the update, where an optimizer sees global arrays and
the partitioner decides: for an elementwise optimizer it sends nothing but scalars, for one that multiplies or
factorises matrices what that needs of them, and for one that asks for another sharding than a leaf's the leaf itself.
Where it finds no way from one sharding to another it gathers the whole: `inspect/compiled/involuntary.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ...layout.elementwise import _ELEMENTWISE
from ...model.paths import name_of
from ...step.core import Step
from ..compiled.entry import KINDS
from ..compiled.hlo import MOVES, Instruction, Module, arrays, bits, buffers
from ..compiled.involuntary import Rematerialised, as_spec, axes_of, read
from ..text import size

# What gives an array another sharding and no other value, besides what works element by element.
_PLACES = frozenset({"sharding_constraint", "reshard", "copy", "shard_map", "device_put"})


@dataclass(frozen=True)
class Move:
    """A collective that the partitioner wrote; equal ones are taken together.

    Attributes:
      kind, axes: as in `Collective`; "rematerialisation" for what XLA warns of where no gather of the program is it.
      shape: of its largest result on a device.
      bytes: of one execution, as in `Collective`.
      count: how many of these the program's text has.
      leaf: the parameter that what is sent is computed from, or from whose state; "" where the program does not tell.
      path: that of the array of the state, "params/w" or "optimizer/0/mu/w"; "" where only the leaf is known.
      operation: that it serves, by JAX's name, such as "dot_general".
      source: file and line of that, "optax/contrib/_muon.py:97"; "" where the program does not say.
      kept: the spec that the leaf's shard has in the update; None where the leaf is not known.
      wanted: the other spec, where XLA's warning has it.
      spec: that under which nothing would be moved: the leaf's own where another is asked for, and where an operation
        needs more than a shard, what is left of it without the axes of the move.
      involuntary: the compiler gathers the whole for no other end than to cut it anew.
    """

    kind: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    bytes: int
    count: int
    leaf: str
    operation: str
    source: str
    path: str = ""
    kept: PartitionSpec | None = None
    wanted: PartitionSpec | None = None
    spec: PartitionSpec | None = None
    involuntary: bool = False

    def __str__(self) -> str:
        of = f" of {self.leaf}" if self.leaf else ""
        at = f" at {self.source}" if self.source else ""
        how = "involuntary " if self.involuntary and self.kind == "rematerialisation" else ""
        return f"{how}{self.kind} over {'+'.join(self.axes)}{of} {list(self.shape)} for {self.operation}{at}"

    @property
    def message(self) -> str:
        """All of it in one line: parameter, axis, line, bytes, and the spec that would spare it."""
        said = f"{self}: {self.count} x {size(self.bytes)}" + (f" of {self.path}" if self.path else "")
        if self.involuntary:
            said += ", involuntary full rematerialisation"
        if self.kept is not None:
            said += f"; kept as {_text(self.kept)}"
            said += f", asked for as {_text(self.wanted)}" if self.wanted is not None else ""
        return said + (f"; suggested spec {_text(self.spec)}" if self.spec is not None else "")

    def json(self) -> dict[str, Any]:
        """All of it as lists, text and numbers, specs as text, with the message."""
        specs = {name: None if (x := getattr(self, name)) is None else _text(x) for name in ("kept", "wanted", "spec")}
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return plain | specs | {"axes": list(self.axes), "shape": list(self.shape), "message": self.message}


def moves(step: Step, text: str, least: int, said: Sequence[str] = ()) -> list[Move]:
    """Those of `least` bytes or more in a compiled program of a step (`compiled.as_text()`), the largest first, and of
    equal ones those whose parameter is known. `said`: the compiler's warnings, from `heard`.
    """
    module = Module(text, tuple(step.mesh.shape.items()))
    leaves = {leaf.path: leaf for leaf in step.layout.leaves}
    paths = sorted(leaves, key=len, reverse=True)
    remats = read(said, step.mesh.shape)
    met: set[Rematerialised] = set()
    asked: dict[Any, tuple[str, str]] = {}
    every: list[Move] = []
    for block in module.computations.values():
        made = {i.name: i for i in block}
        for i in block:
            kind = i.opcode.removesuffix("-start")
            # What the compiler combined may have no name, or that of the first of several. What it gathers of the
            # results of `shard_map` itself may be called "jit(_train)/shard_map", and is outside it.
            if kind not in KINDS or not (name := i.source) or "shard_map/" in name:
                continue
            axes, group = module.axes(kind, i)
            sent = sum(n for operand in i.operands for _, n in buffers(made[operand].shape))
            sent *= group if kind == "all-gather" else 1
            if group == 1 or sent < least:
                continue
            users = _users(block)
            ends = i if not name.endswith("shard_map") else next(_ends(users, i), i)
            shape = max((dims for _, dims in arrays(i.shape)), key=math.prod, default=())
            path, leaf = _leaf(made, i, paths)
            # Not by what it is computed from, which may be a sum over all leaves: by its shape.
            if not leaf or math.prod(leaves[leaf].stored) % math.prod(shape):
                path, leaf = ("", other) if (other := _alike(step, shape)) else (path, leaf)
            move = Move(kind, axes, shape, sent, 1, leaf, ends.source.rpartition("/")[2], _line(text, ends), path)
            if kind == "all-gather":
                remat = next((r for r in remats if _is(move, r, step.mesh.shape)), None)
                met |= {remat} if remat else set()
                move = _told(move, remat, step, asked) if remat else move
                cut = remat is not None or _only_cut(module, users, i)
                move = dataclasses.replace(move, involuntary=cut)
            every.append(move)
    left = (remat for remat in remats if remat not in met and remat.given is not None)
    every += [_told(_of_warning(remat, step.mesh.shape), remat, step, asked) for remat in left]
    found = collections.Counter(_suggested(step, _needed(move, every)) for move in every)
    counted = [dataclasses.replace(move, count=count) for move, count in found.items()]
    return sorted(counted, key=lambda move: (-move.bytes, not move.leaf))


def cause(step: Step, move: Move) -> str:
    """Why a move is there, and what to try."""
    if not step.update.as_kept:
        stages = step.strategy.pipe * step.strategy.chunks
        return (
            "the optimizer is shown leaves in the model's own shape, and the step keeps them in another (whole stages, "
            "loops as stacks); use one that works element by element, such as optax.adamw"
            + (f", or a number of layers that {stages} divides" if step.schedule is not None else "")
        )
    if move.spec is not None and (move.involuntary or move.operation in _ELEMENTWISE | _PLACES):
        asked = f" ({_text(move.wanted)})" if move.wanted is not None else ""
        return (
            f"the optimizer asks for another sharding{asked} than that in which {move.leaf} is kept; ask for "
            f"{_text(move.spec)} there, or leave the constraint out"
        )
    spared = ""
    if move.spec is not None and move.kept is not None and move.spec != move.kept:
        met, left = ([axis for entry in spec for axis in axes_of(entry)] for spec in (move.kept, move.spec))
        gone = [axis for axis in met if axis not in left]
        ranks = "+".join(axis for axis in gone if axis != "tensor")
        hows = [f"rules={{'{move.leaf}': None}} or another dim"] * ("tensor" in gone)
        hows += [f"more ranks of data in place of {ranks}"] * bool(ranks)
        spared = f", or keep {move.leaf} as {_text(move.spec)}: {', '.join(hows)}"
    return (
        "the optimizer needs more of a leaf than the shard that a device has; use one that works element by element, "
        f"such as optax.adamw{spared}"
    )


def _needed(move: Move, every: Sequence[Move]) -> Move:
    """For the operation that needs it: XLA may move an array already for one that works element by element, whose
    result goes to another that needs more than a shard.
    """
    alone, of = _ELEMENTWISE | _PLACES, (move.leaf, move.axes)
    if not move.leaf or move.involuntary or move.operation not in alone:
        return move
    needs = next((o for o in every if (o.leaf, o.axes) == of and o.operation not in alone), move)
    return dataclasses.replace(move, operation=needs.operation, source=needs.source)


def _suggested(step: Step, move: Move) -> Move:
    """With the spec that would spare it, where the leaf is known."""
    own = [step.layout.spec(f, "optimizer") for f in step.layout.leaves if f.path in move.leaf.split(" or ")]
    if len(set(own)) != 1:  # unknown, or one of several that are kept differently
        return move
    kept = _specs(step).get(move.path, own[0])
    if not step.update.as_kept or move.involuntary or move.operation in _ELEMENTWISE | _PLACES:
        return dataclasses.replace(move, kept=kept, spec=own[0])
    met: set[str] = {axis for entry in kept for axis in axes_of(entry)}
    gone = met & set(move.axes) or met  # along other axes, copies share in the work on what is cut along these
    without = [tuple(a for a in axes_of(entry) if a not in gone) for entry in kept]
    return dataclasses.replace(move, kept=kept, spec=as_spec(without))


def _specs(step: Step) -> dict[str, PartitionSpec]:
    """Of the optimizer's arrays, by path."""
    stored = jax.tree_util.tree_leaves_with_path(step.abstract_state().optimizer)
    return {f"optimizer/{name_of(path)}": x.sharding.spec for path, x in stored}


def _text(spec: PartitionSpec) -> str:
    return str(spec).replace("PartitionSpec", "P")


# -- what XLA warns of -------------------------------------------------------------------------------------------------


def _is(move: Move, remat: Rematerialised, sizes: Mapping[str, int]) -> bool:
    """Whether a gather is one of those of a warning: along the axes of one of its dims, and that dim whole after it."""
    whole = remat.whole(sizes)
    if remat.given is None or len(whole) != len(move.shape):
        return False
    dims = [d for d, entry in enumerate(remat.given) if sorted(axes_of(entry)) == sorted(move.axes)]
    either = all(n in (full, part) for n, full, part in zip(move.shape, whole, remat.local, strict=True))
    return either and any(move.shape[d] == whole[d] for d in dims)


def _told(move: Move, remat: Rematerialised, step: Step, asked: dict[Any, tuple[str, str]]) -> Move:
    """With what the warning knows: the leaf, by shape and spec, and the spec that is not the leaf's.

    `asked` has who asked for which spec of a leaf.
    """
    sides, parts = (remat.given, remat.wanted), remat.parts(step.mesh.shape)
    cut = lambda shape: tuple(-(-n // k) for n, k in zip(shape, parts, strict=False))
    fits = [f for f in step.layout.leaves if remat.local in (cut(f.shape), cut(f.stored))]
    specs = {f.path: step.layout.spec(f, "optimizer") for f in fits}
    same = [path for path, spec in specs.items() if spec in sides] or [*specs]
    leaf = move.leaf if move.leaf in same else " or ".join(same) or move.leaf
    kept = specs.get(leaf.partition(" or ")[0])
    path, wanted = (move.path if leaf == move.leaf else ""), remat.wanted
    if wanted == kept:  # the way back: what is to be named is what asked for the other sharding, not what meets it
        wanted = remat.given
        operation, source = asked.get((leaf, wanted), (move.operation, move.source))
        move = dataclasses.replace(move, operation=operation, source=source)
    asked.setdefault((leaf, wanted), (move.operation, move.source))
    return dataclasses.replace(move, leaf=leaf, path=path, wanted=wanted)


def _of_warning(remat: Rematerialised, sizes: Mapping[str, int]) -> Move:
    """A warning that no gather of the program is. Its line is not known: the compiled program numbers them anew."""
    whole = remat.whole(sizes)
    axes = tuple(axis for axis in sizes if any(axis in axes_of(entry) for entry in remat.given or ()))
    nbytes = math.prod(whole) * bits(remat.dtype) // 8
    return Move("rematerialisation", axes, whole, nbytes, 1, "", remat.operation, "", involuntary=True)


# -- what the program says ---------------------------------------------------------------------------------------------


def _users(block: Sequence[Instruction]) -> dict[str, list[Instruction]]:
    found: dict[str, list[Instruction]] = {}
    for i in block:
        for name in dict.fromkeys(i.operands):
            found.setdefault(name, []).append(i)
    return found


def _ends(users: Mapping[str, Sequence[Instruction]], i: Instruction) -> Iterator[Instruction]:
    """What uses an instruction's result first that has a name of its own."""
    for user in users.get(i.name, ()):
        if user.source and not user.source.endswith("shard_map"):
            yield user
        else:
            yield from _ends(users, user)


def _only_cut(module: Module, users: Mapping[str, Sequence[Instruction]], i: Instruction) -> bool:
    """Whether nothing is done with a result but to cut it by the device's own place, itself or after more gathers."""
    after = () if i.root else users.get(i.name, ())
    return bool(after) and all(_cuts(module, users, user, i) for user in after)


def _cuts(module: Module, users: Mapping[str, Sequence[Instruction]], user: Instruction, i: Instruction) -> bool:
    if user.opcode == "dynamic-slice":
        return user.operands[0] == i.name
    if user.opcode == "fusion":
        inner = module.computations[user.called[0]]
        within = _users(inner)
        same = [p for p in inner if p.opcode == "parameter" and arrays(p.shape) == arrays(i.shape)[-1:]]
        moved = all(MOVES.fullmatch(p.opcode) and p.opcode != "dynamic-slice" for p in inner)
        return (bool(same) and all(_only_cut(module, within, p) for p in same)) or (
            moved and _only_cut(module, users, user)
        )
    passed = user.opcode in ("all-gather", "all-gather-start", "all-gather-done", "copy", "bitcast", "transpose")
    return passed and _only_cut(module, users, user)


def _alike(step: Step, shape: tuple[int, ...]) -> str:
    """The leaf of this shape, or those from whose shard in the update an array of this shape may come, cut elsewhere
    along two dims at most: three leaves at most, joined by " or "; "" if there is none.
    """
    leaves = step.layout.leaves
    exact = [leaf.path for leaf in leaves if shape in (leaf.shape, leaf.stored)]
    shards = {f.path: step.layout.sharding(step.layout.spec(f, "optimizer")).shard_shape(f.stored) for f in leaves}
    found = exact if len(exact) == 1 else [path for path, shard in shards.items() if _recut(shape, shard)]
    return " or ".join(found) if len(found) <= 3 else ""


def _recut(shape: Sequence[int], shard: Sequence[int]) -> bool:
    ours, theirs = ([n for n in dims if n > 1] for dims in (shape, shard))
    pairs = [(max(pair), min(pair)) for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]]
    return len(ours) == len(theirs) > 1 and len(pairs) <= 2 and all(more % less == 0 for more, less in pairs)


def _leaf(made: Mapping[str, Instruction], i: Instruction, paths: Sequence[str]) -> tuple[str, str]:
    """The array of the state nearest to an instruction among what it is computed from, and its parameter."""
    level, seen = [i.name], set()
    while level:
        found = [made[name] for name in level]
        for one in found:
            # JAX names arguments: state.optimizer[0].mu['head']['kernel'].
            name = one.source.replace("\\", "") if one.opcode == "parameter" else ""
            parts = "/".join(re.findall(r"(?<=\[')[^']*|\w+", name))
            if leaf := next((p for p in paths if parts.startswith("state/") and parts.endswith(f"/{p}")), ""):
                return parts.removeprefix("state/"), leaf
        seen.update(level)
        operands = dict.fromkeys(name for one in found for name in _comes_from(made, one))
        level = [name for name in operands if name in made and name not in seen]
    return "", ""


def _comes_from(made: Mapping[str, Instruction], one: Instruction) -> Sequence[str]:
    """Its operands; of one result of several that were sent together, the one that it is."""
    if one.opcode == "while":
        return ()
    of = made.get(one.operands[0]) if one.opcode == "get-tuple-element" else None
    at = re.search(r"index=(\d+)", one.rest)
    if of is None or at is None or of.opcode.removesuffix("-start") not in KINDS or of.opcode == "all-to-all":
        return one.operands
    return of.operands[int(at[1]) : int(at[1]) + 1] or one.operands


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
