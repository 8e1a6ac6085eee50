"""What the compiler's partitioner moves between devices, and why: collectives that stand outside `shard_map`.

Inside `shard_map` jaxpar writes every collective. Outside it is the update, where an optimizer sees global arrays and
the partitioner decides: for an elementwise optimizer it sends nothing but scalars, for one that multiplies or
factorises matrices what that needs of them, and for one that asks for another sharding than a leaf's the leaf itself.
Where it finds no way from one sharding to another it gathers the whole and cuts it anew, and XLA warns on stderr of
"[SPMD] Involuntary full rematerialization": P('pipe', 'fsdp') to P(None, None, ('pipe', 'fsdp')), or P(None, ('pipe',
'fsdp')) to P('fsdp'). Of optax's own, Muon, LAMB and Adafactor were tried beside ZeRO, tensor and pipe: they send, and
XLA warns of none. Here the program tells, and the trace who asked.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ...backend.text import size
from ...hardware.compiled.hlo import Instruction, Module, arrays, short
from ...hardware.compiled.kernels import MOVES, Executable
from ...model.paths import name_of
from ...program.factors import ELEMENTWISE
from ...program.jaxpr import where
from ...program.primitives import having
from ...program.walk import visit
from ..step_view import StepView as Step

# What works element by element, or gives an array another sharding and no other value.
_IN_PLACE = {*ELEMENTWISE, *having("identity"), "shard_map"}


@dataclass(frozen=True)
class Move:
    """A collective that the partitioner wrote; equal ones are taken together.

    Attributes:
      kind, axes: as in `Collective`.
      shape: of its largest result on a device.
      bytes: of one execution, as in `Collective`.
      count: how many of these the program's text has.
      leaf: the parameter that what is sent is computed from, or from whose state; "" where the program does not tell.
      path: that of the array of the state, "params/w" or "optimizer/0/mu/w"; "" where only the leaf is known.
      operation: that it serves, by JAX's name, such as "dot_general".
      source: file and line of that, "optax/contrib/_muon.py:97"; "" where the program does not say.
      kept: the spec that the leaf's shard has in the update; None where the leaf is not known.
      wanted: the other spec, where the optimizer asks for one by `with_sharding_constraint`; `source` is then its line.
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
        return f"{self.kind} over {'+'.join(self.axes)}{of} {list(self.shape)} for {self.operation}{at}"

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


def moves(step: Step, program: Executable, jaxpr: Any, least: int) -> list[Move]:
    """Those of `least` bytes or more in a compiled program of a step, the largest first, and of equal ones those whose
    parameter is known. `jaxpr`: of the step, `step.trace(batch)`.
    """
    module = program.module
    leaves = {leaf.path: leaf for leaf in step.layout.leaves}
    paths = sorted(leaves, key=len, reverse=True)
    every: list[Move] = []
    for block in module.computations.values():
        made, shapes = {i.name: i for i in block}, {i.name: i.shape for i in block}
        for i in block:
            # What the compiler combined may have no name, or that of the first of several. What it gathers of the
            # results of `shard_map` itself may be called "jit(_train)/shard_map", and is outside it.
            if not i.collective or not (name := i.source) or "shard_map/" in name:
                continue
            kind, (axes, _) = i.collective, module.axes(i)
            if (sent := sum(module.moved(i, shapes).values())) < least:
                continue
            users = users_of(block)
            ends = i if not name.endswith("shard_map") else next(_ends(users, i), i)
            shape = max((dims for _, dims in arrays(i.shape)), key=math.prod, default=())
            path, leaf = _leaf(made, i, paths)
            # Not by what it is computed from, which may be a sum over all leaves: by its shape.
            if not leaf or math.prod(leaves[leaf].stored) % math.prod(shape):
                path, leaf = ("", other) if (other := _alike(step, shape)) else (path, leaf)
            move = Move(kind, axes, shape, sent, 1, leaf, ends.source.rpartition("/")[2], module.line(ends), path)
            every.append(dataclasses.replace(move, involuntary=kind == "all-gather" and only_cut(module, users, i)))
    asked = _asked(step, jaxpr) if every else {}
    found = collections.Counter(_suggested(step, _told(_needed(move, every), asked)) for move in every)
    counted = [dataclasses.replace(move, count=count) for move, count in found.items()]
    return sorted(counted, key=lambda move: (-move.bytes, not move.leaf))


def cause(step: Step, move: Move) -> str:
    """Why a move is there, and what to try."""
    if not step.update.as_stacked:
        stages = step.strategy.pipe * step.strategy.chunks
        return (
            "the optimizer is shown leaves in the model's own shape, and the step keeps them in another (whole stages, "
            "loops as stacks); use one that works element by element, such as optax.adamw"
            + (f", or a number of layers that {stages} divides" if step.schedule is not None else "")
        )
    if move.spec is not None and (move.involuntary or move.operation in _IN_PLACE):
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
    alone, of = _IN_PLACE, (move.leaf, move.axes)
    if not move.leaf or move.involuntary or move.operation not in alone:
        return move
    needs = next((o for o in every if (o.leaf, o.axes) == of and o.operation not in alone), move)
    return dataclasses.replace(move, operation=needs.operation, source=needs.source)


def _told(move: Move, asked: Mapping[str, tuple[PartitionSpec, str]]) -> Move:
    """With the sharding that is asked for: what is to be named is the line that does, not what meets its result."""
    wanted, source = asked.get(move.leaf.partition(" or ")[0], (None, ""))
    if wanted is None or not (move.involuntary or move.operation in _IN_PLACE):
        return move
    return dataclasses.replace(move, wanted=wanted, operation="sharding_constraint", source=source)


def _suggested(step: Step, move: Move) -> Move:
    """With the spec that would spare it, where the leaf is known."""
    own = [step.layout.spec(f, "optimizer") for f in step.layout.leaves if f.path in move.leaf.split(" or ")]
    if len(set(own)) != 1:  # unknown, or one of several that are kept differently
        return move
    kept = _specs(step).get(move.path, own[0])
    if not step.update.as_stacked or move.involuntary or move.operation in _IN_PLACE:
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


def _asked(step: Step, jaxpr: Any) -> dict[str, tuple[PartitionSpec, str]]:
    """By leaf the sharding that is asked for outside `shard_map`, and the line that asks: where it is the only one for
    arrays of the leaf's shape besides the leaf's own.
    """
    found: dict[tuple[int, ...], dict[PartitionSpec, str]] = {}
    for eqn, _ in visit(jaxpr.eqns, lambda eqn: eqn.primitive.name != "shard_map"):
        constrained = eqn.primitive.name == "sharding_constraint"
        if constrained and isinstance(sharding := eqn.params["sharding"], NamedSharding):
            line = re.match(r"(.*?):(\d+)", where(eqn))
            source = f"{short(line[1])}:{line[2]}" if line else ""
            found.setdefault(eqn.outvars[0].aval.shape, {}).setdefault(_plain(sharding.spec), source)
    asked = {}
    for leaf in step.layout.leaves:
        own = [_plain(step.layout.spec(leaf, kind)) for kind in ("params", "grads", "optimizer")]
        others = {**found.get(leaf.shape, {}), **found.get(leaf.stored, {})}
        if len(specs := [spec for spec in others if spec not in own]) == 1:
            asked[leaf.path] = specs[0], others[specs[0]]
    return asked


def _plain(spec: PartitionSpec) -> PartitionSpec:
    return as_spec([axes_of(entry) for entry in spec])


def axes_of(entry: Any) -> tuple[str, ...]:
    """The axes of one dim, as a spec has them."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def as_spec(named: Sequence[Sequence[str]]) -> PartitionSpec:
    """A spec from the axes of each dim."""
    entries: list[Any] = [None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in named]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def users_of(block: Sequence[Instruction]) -> dict[str, list[Instruction]]:
    """By name of an instruction those that use its result."""
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


def only_cut(module: Module, users: Mapping[str, Sequence[Instruction]], i: Instruction) -> bool:
    """Whether nothing is done with a result but to cut it by the device's own place, itself or after more gathers."""
    after = () if i.root else users.get(i.name, ())
    return bool(after) and all(_cuts(module, users, user, i) for user in after)


def _cuts(module: Module, users: Mapping[str, Sequence[Instruction]], user: Instruction, i: Instruction) -> bool:
    if user.opcode == "dynamic-slice":
        return user.operands[0] == i.name
    if user.opcode == "fusion":
        inner = module.computations[user.called[0]]
        within = users_of(inner)
        same = [p for p in inner if p.opcode == "parameter" and arrays(p.shape) == arrays(i.shape)[-1:]]
        moved = all(p.opcode in MOVES and p.opcode != "dynamic-slice" for p in inner)
        return (bool(same) and all(only_cut(module, within, p) for p in same)) or (
            moved and only_cut(module, users, user)
        )
    passed = user.opcode in ("all-gather", "all-gather-start", "all-gather-done", "copy", "bitcast", "transpose")
    return passed and only_cut(module, users, user)


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
    if of is None or at is None or not of.collective or of.opcode == "all-to-all":
        return one.operands
    return of.operands[int(at[1]) : int(at[1]) + 1] or one.operands
