"""The arrays that the compiler's partitioner moves between devices, and why: collectives outside `shard_map`.

Inside `shard_map` jaxpar writes every collective. The update runs outside it: there an optimizer sees global arrays and
the partitioner decides what to send.

- An elementwise optimizer sends only scalars.
- An optimizer that multiplies or factorises matrices sends the parts of them that it needs.
- An optimizer that asks for a sharding other than the leaf's sends the leaf itself.

If the partitioner finds no way from one sharding to another, it gathers the whole array and cuts it again. XLA then
warns on stderr of "[SPMD] Involuntary full rematerialization". Examples are P('pipe', 'fsdp') to P(None, None, ('pipe',
'fsdp')), and P(None, ('pipe', 'fsdp')) to P('fsdp'). Optax's Muon, LAMB and Adafactor were tried with ZeRO, tensor and
pipe: they send, but XLA warns about none of them.

The compiled program tells what moves. The jaxpr tells which line asked for another sharding.
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

# Operations that work element by element, or change only the sharding of an array.
_ELEMENTWISE = {*ELEMENTWISE, *having("identity"), "shard_map"}


@dataclass(frozen=True)
class Move:
    """A collective that the partitioner added; equal ones are merged.

    Attributes:
      kind, axes: as in `Collective`.
      shape: the shape of its largest result on a device.
      bytes: of one execution, as in `Collective`.
      count: how often the program's text has it.
      leaf: the parameter from which, or from whose state, the sent value is computed; "" if the program does not tell.
      operation: the operation that needs it, by JAX's name, such as "dot_general".
      source: file and line of the operation, "optax/contrib/_muon.py:97"; "" if the program does not tell.
      path: the array of the state, "params/w" or "optimizer/0/mu/w"; "" if only the leaf is known.
      kept: the spec of the leaf's shard in the update; None if the leaf is unknown.
      wanted: the other spec for which the optimizer asks by `with_sharding_constraint`, if any; `source` is then its
        line.
      spec: the spec that would avoid the move. It is the leaf's own if another one was asked for. If an operation needs
        more than a shard, it is the leaf's spec without the axes of the move.
      involuntary: whether the compiler gathers the whole array only to cut it again.
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
        of_leaf = f" of {self.leaf}" if self.leaf else ""
        at_source = f" at {self.source}" if self.source else ""
        return f"{self.kind} over {'+'.join(self.axes)}{of_leaf} {list(self.shape)} for {self.operation}{at_source}"

    @property
    def message(self) -> str:
        """Everything in one line: parameter, axis, line, bytes, and the spec that would avoid the move."""
        message = f"{self}: {self.count} x {size(self.bytes)}" + (f" of {self.path}" if self.path else "")
        if self.involuntary:
            message += ", involuntary full rematerialisation"
        if self.kept is not None:
            message += f"; kept as {_spec_text(self.kept)}"
            message += f", asked for as {_spec_text(self.wanted)}" if self.wanted is not None else ""
        return message + (f"; suggested spec {_spec_text(self.spec)}" if self.spec is not None else "")

    def json(self) -> dict[str, Any]:
        """Return everything as lists, text and numbers, specs as text, with the message."""
        specs = {
            name: None if (spec := getattr(self, name)) is None else _spec_text(spec)
            for name in ("kept", "wanted", "spec")
        }
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | specs | {"axes": list(self.axes), "shape": list(self.shape), "message": self.message}


def moves(step: Step, program: Executable, jaxpr: Any, min_bytes: int) -> list[Move]:
    """Return the partitioner's moves, the largest first; among equal sizes, those with a known parameter first.

    Args:
      jaxpr: `step.trace(batch)`, where constraints of the optimizer are found.
      min_bytes: moves that send fewer bytes in one execution are left out.
    """
    module = program.module
    leaves = {leaf.path: leaf for leaf in step.layout.leaves}
    # The longest path first: "block/w" before "w", which its state's paths end with, too.
    paths = sorted(leaves, key=len, reverse=True)
    all_moves: list[Move] = []
    for block in module.computations.values():
        instructions = {instruction.name: instruction for instruction in block}
        shapes = {instruction.name: instruction.shape for instruction in block}
        for instruction in block:
            # Combined collectives may have no name, or the name of the first of several. A gather of a result of
            # `shard_map` may be called "jit(_train)/shard_map" although it is outside: only "shard_map/" is inside.
            if not instruction.collective or not (name := instruction.source) or "shard_map/" in name:
                continue
            # 1. The bytes, the axes, and the named operation that needs them.
            kind, (axes, _) = instruction.collective, module.axes(instruction)
            if (num_bytes := sum(module.moved(instruction, shapes).values())) < min_bytes:
                continue
            users = users_of(block)
            named_instruction = (
                instruction if not name.endswith("shard_map") else next(_named_users(users, instruction), instruction)
            )
            shape = max((dims for _, dims in arrays(instruction.shape)), key=math.prod, default=())
            # 2. The parameter: from the operands, or else from the shape.
            path, leaf = _source_leaf(instructions, instruction, paths)
            # A leaf whose size is no multiple of the shape's is not the array that is sent (in a sum over all leaves,
            # for example). Then the shape itself may tell the leaf.
            if not leaf or math.prod(leaves[leaf].stored) % math.prod(shape):
                path, leaf = ("", shape_leaves) if (shape_leaves := _leaves_of_shape(step, shape)) else (path, leaf)
            operation, line = named_instruction.source.rpartition("/")[2], module.line(named_instruction)
            involuntary = kind == "all-gather" and only_cut(module, users, instruction)
            move = Move(kind, axes, shape, num_bytes, 1, leaf, operation, line, path, involuntary=involuntary)
            all_moves.append(move)
    # 3. The line that asked for another sharding, and the spec that would avoid the move. Equal moves are counted.
    requested = _requested_specs(step, jaxpr) if all_moves else {}
    counts = collections.Counter(
        _with_suggested_spec(step, _with_requested_spec(_at_needing_operation(move, all_moves), requested))
        for move in all_moves
    )
    merged = [dataclasses.replace(move, count=count) for move, count in counts.items()]
    return sorted(merged, key=lambda move: (-move.bytes, not move.leaf))


def cause(step: Step, move: Move) -> str:
    """Return why the partitioner makes a move, and what to try."""
    # 1. An optimizer that sees other shapes than the stored ones.
    if not step.update.as_stacked:
        # The optimizer sees shapes that differ from the stored ones, so that no spec would help.
        stages = step.strategy.pipe * step.strategy.chunks
        return (
            "the optimizer is shown leaves in the model's own shape, and the step keeps them in another (whole stages, "
            "loops as stacks); use one that works element by element, such as optax.adamw"
            + (f", or a number of layers that {stages} divides" if step.schedule is not None else "")
        )
    # 2. An elementwise operation needs no other sharding than the leaf's own, so that somebody asked for another.
    if move.spec is not None and (move.involuntary or move.operation in _ELEMENTWISE):
        requested = f" ({_spec_text(move.wanted)})" if move.wanted is not None else ""
        return (
            f"the optimizer asks for another sharding{requested} than that in which {move.leaf} is kept; ask for "
            f"{_spec_text(move.spec)} there, or leave the constraint out"
        )
    # 3. An operation that needs more than a shard: name the axes that would have to go, if there are any.
    alternative = ""
    if move.spec is not None and move.kept is not None and move.spec != move.kept:
        kept_axes, suggested_axes = (
            [axis for entry in spec for axis in axes_of(entry)] for spec in (move.kept, move.spec)
        )
        dropped_axes = [axis for axis in kept_axes if axis not in suggested_axes]
        data_axes = "+".join(axis for axis in dropped_axes if axis != "tensor")
        options = [f"rules={{'{move.leaf}': None}} or another dim"] * ("tensor" in dropped_axes)
        options += [f"more ranks of data in place of {data_axes}"] * bool(data_axes)
        alternative = f", or keep {move.leaf} as {_spec_text(move.spec)}: {', '.join(options)}"
    return (
        "the optimizer needs more of a leaf than the shard that a device has; use one that works element by element, "
        f"such as optax.adamw{alternative}"
    )


def _at_needing_operation(move: Move, all_moves: Sequence[Move]) -> Move:
    """Return the move with the operation that needs it.

    XLA may move an array ahead of an elementwise operation whose result goes to another operation that needs more than
    a shard. Then the latter is named.
    """
    if not move.leaf or move.involuntary or move.operation not in _ELEMENTWISE:
        return move
    # Only moves of the same parameter over the same axes belong together.
    related_moves = [candidate for candidate in all_moves if (candidate.leaf, candidate.axes) == (move.leaf, move.axes)]
    needing_move = next((related for related in related_moves if related.operation not in _ELEMENTWISE), move)
    return dataclasses.replace(move, operation=needing_move.operation, source=needing_move.source)


def _with_requested_spec(move: Move, requested: Mapping[str, tuple[PartitionSpec, str]]) -> Move:
    """Return the move with the sharding that the optimizer asks for.

    The line that asks is named, not the operation that meets its result.
    """
    requested_spec, source = requested.get(move.leaf.partition(" or ")[0], (None, ""))
    if requested_spec is None or not (move.involuntary or move.operation in _ELEMENTWISE):
        return move
    return dataclasses.replace(move, wanted=requested_spec, operation="sharding_constraint", source=source)


def _with_suggested_spec(step: Step, move: Move) -> Move:
    """Return the move with the spec that would avoid it, if the leaf is known."""
    specs = [step.layout.spec(leaf, "optimizer") for leaf in step.layout.leaves if leaf.path in move.leaf.split(" or ")]
    if len(set(specs)) != 1:  # unknown, or several leaves with different specs
        return move
    kept_spec = _optimizer_specs(step).get(move.path, specs[0])
    if not step.update.as_stacked or move.involuntary or move.operation in _ELEMENTWISE:
        return dataclasses.replace(move, kept=kept_spec, spec=specs[0])
    kept_axes: set[str] = {axis for entry in kept_spec for axis in axes_of(entry)}
    # If the move's axes do not shard the leaf, the devices along them share the work on the gathered array.
    dropped_axes = kept_axes & set(move.axes) or kept_axes
    remaining_axes = [tuple(axis for axis in axes_of(entry) if axis not in dropped_axes) for entry in kept_spec]
    return dataclasses.replace(move, kept=kept_spec, spec=as_spec(remaining_axes))


def _optimizer_specs(step: Step) -> dict[str, PartitionSpec]:
    """Return the specs of the optimizer's arrays by path."""
    leaves = jax.tree_util.tree_leaves_with_path(step.abstract_state().optimizer)
    return {f"optimizer/{name_of(path)}": array.sharding.spec for path, array in leaves}


def _spec_text(spec: PartitionSpec) -> str:
    """Return a spec as short text."""
    return str(spec).replace("PartitionSpec", "P")


def _requested_specs(step: Step, jaxpr: Any) -> dict[str, tuple[PartitionSpec, str]]:
    """Return, for each leaf, the sharding that the program asks for outside `shard_map`, and the line that asks.

    A leaf is included only if exactly one spec other than its own is asked for on arrays of its shape.
    """
    specs_by_shape: dict[tuple[int, ...], dict[PartitionSpec, str]] = {}
    for eqn, _ in visit(jaxpr.eqns, lambda eqn: eqn.primitive.name != "shard_map"):
        is_constraint = eqn.primitive.name == "sharding_constraint"
        if is_constraint and isinstance(sharding := eqn.params["sharding"], NamedSharding):
            line = re.match(r"(.*?):(\d+)", where(eqn))
            source = f"{short(line[1])}:{line[2]}" if line else ""
            specs_by_shape.setdefault(eqn.outvars[0].aval.shape, {}).setdefault(_normalized(sharding.spec), source)
    requested = {}
    for leaf in step.layout.leaves:
        leaf_specs = [_normalized(step.layout.spec(leaf, kind)) for kind in ("params", "grads", "optimizer")]
        candidates = {**specs_by_shape.get(leaf.shape, {}), **specs_by_shape.get(leaf.stored, {})}
        if len(other_specs := [spec for spec in candidates if spec not in leaf_specs]) == 1:
            requested[leaf.path] = other_specs[0], candidates[other_specs[0]]
    return requested


def _normalized(spec: PartitionSpec) -> PartitionSpec:
    """Return a spec without trailing None and without tuples of one axis, so that equal specs compare equal."""
    return as_spec([axes_of(entry) for entry in spec])


def axes_of(entry: Any) -> tuple[str, ...]:
    """Return the axes of one dim of a spec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def as_spec(axes_by_dim: Sequence[Sequence[str]]) -> PartitionSpec:
    """Return a spec from the axes of each dim."""
    entries: list[Any] = [None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in axes_by_dim]
    # P('fsdp') and P('fsdp', None) are the same sharding, but need not compare equal.
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def users_of(block: Sequence[Instruction]) -> dict[str, list[Instruction]]:
    """Return, for each instruction's name, the instructions that use its result."""
    users: dict[str, list[Instruction]] = {}
    for instruction in block:
        # An instruction may read an operand twice, and uses it once.
        for name in dict.fromkeys(instruction.operands):
            users.setdefault(name, []).append(instruction)
    return users


def _named_users(users: Mapping[str, Sequence[Instruction]], instruction: Instruction) -> Iterator[Instruction]:
    """Yield the first named users of an instruction's result, looking through unnamed ones."""
    for user in users.get(instruction.name, ()):
        if user.source and not user.source.endswith("shard_map"):
            yield user
        else:
            yield from _named_users(users, user)


def only_cut(module: Module, users: Mapping[str, Sequence[Instruction]], instruction: Instruction) -> bool:
    """Return whether every use of a result, after more gathers perhaps, cuts it at the device's own position."""
    # The result of the root leaves the computation, so its uses are not all known.
    result_users = () if instruction.root else users.get(instruction.name, ())
    return bool(result_users) and all(_only_cuts(module, users, user, instruction) for user in result_users)


def _only_cuts(
    module: Module, users: Mapping[str, Sequence[Instruction]], user: Instruction, instruction: Instruction
) -> bool:
    """Return whether `user` does nothing with an instruction's result but to cut it."""
    # The result must be the array that is cut, not an index by which another one is cut.
    if user.opcode == "dynamic-slice":
        return user.operands[0] == instruction.name
    if user.opcode == "fusion":
        fused_instructions = module.computations[user.called[0]]
        inner_users = users_of(fused_instructions)
        parameters = [
            parameter
            for parameter in fused_instructions
            if parameter.opcode == "parameter" and arrays(parameter.shape) == arrays(instruction.shape)[-1:]
        ]
        only_moves = all(fused.opcode in MOVES and fused.opcode != "dynamic-slice" for fused in fused_instructions)
        # The fusion cuts the array itself, or it copies the array and its own users cut it.
        return (bool(parameters) and all(only_cut(module, inner_users, parameter) for parameter in parameters)) or (
            only_moves and only_cut(module, users, user)
        )
    is_passed_on = user.opcode in ("all-gather", "all-gather-start", "all-gather-done", "copy", "bitcast", "transpose")
    return is_passed_on and only_cut(module, users, user)


def _leaves_of_shape(step: Step, shape: tuple[int, ...]) -> str:
    """Return the leaf of this shape, or the leaves whose shard in the update may have been cut anew into this shape.

    At most three leaves are returned, joined by " or "; "" if there are none, or more.
    """
    layout = step.layout
    exact_matches = [leaf.path for leaf in layout.leaves if shape in (leaf.shape, leaf.stored)]
    # Only one leaf of this very shape is unambiguous.
    if len(exact_matches) == 1:
        return exact_matches[0]
    shard_shape = lambda leaf: layout.sharding(layout.spec(leaf, "optimizer")).shard_shape(leaf.stored)
    candidates = [leaf.path for leaf in layout.leaves if _is_recut(shape, shard_shape(leaf))]
    return " or ".join(candidates) if len(candidates) <= 3 else ""


def _is_recut(shape: Sequence[int], shard: Sequence[int]) -> bool:
    """Return whether an array of one shape may be a shard cut differently, along two dims at most."""
    shape_dims, shard_dims = ([dim_size for dim_size in dims if dim_size > 1] for dims in (shape, shard))
    # The dims that differ: each must be a multiple of the other array's.
    pairs = [(max(pair), min(pair)) for pair in zip(shape_dims, shard_dims, strict=False) if pair[0] != pair[1]]
    return (
        len(shape_dims) == len(shard_dims) > 1
        and len(pairs) <= 2
        and all(larger % smaller == 0 for larger, smaller in pairs)
    )


def _source_leaf(
    instructions: Mapping[str, Instruction], instruction: Instruction, paths: Sequence[str]
) -> tuple[str, str]:
    """Return the nearest array of the state from which an instruction is computed, and its parameter; "" if unknown."""
    # Breadth-first search through the operands.
    level, visited = [instruction.name], set()
    while level:
        frontier = [instructions[name] for name in level]
        for candidate in frontier:
            # JAX names arguments like state.optimizer[0].mu['head']['kernel'].
            name = candidate.source.replace("\\", "") if candidate.opcode == "parameter" else ""
            # Keys in quotes, or names and numbers outside of them.
            state_path = "/".join(re.findall(r"(?<=\[')[^']*|\w+", name))
            if leaf_path := next(
                (path for path in paths if state_path.startswith("state/") and state_path.endswith(f"/{path}")), ""
            ):
                return state_path.removeprefix("state/"), leaf_path
        visited.update(level)
        operands = dict.fromkeys(name for candidate in frontier for name in _source_operands(instructions, candidate))
        level = [name for name in operands if name in instructions and name not in visited]
    return "", ""


def _source_operands(instructions: Mapping[str, Instruction], instruction: Instruction) -> Sequence[str]:
    """Return an instruction's operands; for one result of a combined collective, only the operand that became it."""
    # A loop's operand is a tuple of all its values: following it would find any array.
    if instruction.opcode == "while":
        return ()
    tuple_instruction = instructions.get(instruction.operands[0]) if instruction.opcode == "get-tuple-element" else None
    index = re.search(r"index=(\d+)", instruction.rest)
    if (
        tuple_instruction is None
        or index is None
        or not tuple_instruction.collective
        or tuple_instruction.opcode == "all-to-all"
    ):
        return instruction.operands
    return tuple_instruction.operands[int(index[1]) : int(index[1]) + 1] or instruction.operands
