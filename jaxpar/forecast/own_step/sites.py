"""Find where a program's collectives come from: the line of Python, and the arguments that are sent unchanged.

XLA's partitioner inserts a collective where an operation needs its operands in another sharding, and names it after
that operation. Compilers combine several collectives into one instruction; here every operand of it has its own line.

`sites_of` groups the collectives of a program into `Site`s. `_OriginReader` finds the origin of each operand. It walks
the dataflow graph of the HLO:

    argument   upwards from the operand, through instructions that only move values, to a parameter of the entry
    operation  from the collective itself; of a combined collective, downwards to the first use or upwards to the source
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...backend.text import size
from ...hardware.compiled.entry import Nesting, buffer_bytes
from ...hardware.compiled.hlo import Instruction, Module, arrays, buffers, short
from ...hardware.compiled.kernels import MOVES
from ...inspect.check.resharding import only_cut, users_of
from ...inspect.ledger import Collective, collectives
from ...program.collectives import on_the_wire
from ...program.libraries import of_library
from ...program.primitives import having
from .program import JittedProgram

# HLO opcodes whose result is their operand, or a part of it, perhaps in another layout.
_FORWARDING = frozenset("bitcast bitcast-convert convert reshape transpose slice dynamic-slice opt-barrier".split())
_FORWARDING |= {f"{kind}{part}" for kind in ("copy", "all-gather") for part in ("", "-start", "-done")}
# JAX primitives that only move values. jax 0.12 names the slices of a scan "dynamic_slice".
_MOVING_PRIMITIVES = frozenset((*having("moves"), "dynamic_slice"))

Origin = tuple[str, str, str, tuple[int, ...], bool]  # the last fields of a `Site`, from `source` on


@dataclass(frozen=True)
class Site:
    """The collectives of one kind, axes, line and array. Bytes are per device and step, as in `Collective`.

    Attributes:
      kind, axes, dtype: as in `Collective`.
      count: the number of executions; None in a loop of unknown length.
      bytes: the size of their buffers.
      sent: the bytes that a device sends.
      hidden: the part of `sent` that overlaps with compute.
      source: the innermost line outside libraries (`program/libraries.py`), "model.py:31"; "" if the compiler does not
        report it.
      operation: the operation that needs the collective, by JAX's name, "dot_general".
      argument: the path of the argument that is sent unchanged, such as weights that are gathered; "" if the program
        computed the sent array.
      shape: the shape of the operand on one device.
      involuntary: whether the compiler gathers the array only to slice it again.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    count: int | None
    bytes: int
    sent: int
    hidden: int
    source: str
    operation: str
    argument: str
    shape: tuple[int, ...]
    involuntary: bool

    def __str__(self) -> str:
        array = f" of {self.argument or f'{self.dtype}{list(self.shape)}'}"
        line = f" at {self.source}" if self.source else ", at a line that the compiler does not report"
        purpose = f" for {self.operation}" if self.operation else ""
        remark = ", gathered only to be sliced again (involuntary full rematerialization)" if self.involuntary else ""
        axes = "+".join(self.axes)
        return f"{self.kind} over {axes}{array}{purpose}{line}: {self.times} x, {size(self.sent)} sent{remark}"

    @property
    def times(self) -> str:
        """Return `count` as text."""
        return "?" if self.count is None else str(self.count)


def sites_of(program: JittedProgram) -> tuple[Site, ...]:
    """Return the sites of a program's collectives, those that send most first.

    Each operand of a combined collective counts at its own site.
    """
    reader = _OriginReader(program.executable.module, program.names)
    # 1. Group the operands of all collectives by what a site names.
    groups: dict[tuple[Any, ...], list[tuple[Collective, int]]] = {}
    for collective in collectives(program.executable.operations, Nesting()):
        for dtype, nbytes, origin in reader.operands(collective):
            # A combined instruction has one `Collective` per dtype: each takes the operands of that dtype.
            if dtype == collective.dtype:
                # The origin is part of the key: equal collectives of two lines are two sites.
                key = (collective.kind, collective.axes, dtype, *origin)
                groups.setdefault(key, []).append((collective, nbytes))

    # 2. Add up each group.
    sites = []
    for (kind, axes, dtype, *origin), group in groups.items():
        # An instruction with several operands in the group executes once for all of them.
        counts = {id(collective): collective.count for collective, _ in group}.values()
        totals = [(entry, nbytes * (1 if entry.count is None else entry.count)) for entry, nbytes in group]
        sends = [(entry, round(nbytes * on_the_wire(kind, entry.ranks or 1))) for entry, nbytes in totals]
        sites.append(
            Site(
                kind,
                axes,
                dtype,
                None if None in counts else sum(n or 0 for n in counts),
                sum(nbytes for _, nbytes in totals),
                sum(sent for _, sent in sends),
                sum(sent for entry, sent in sends if entry.overlapped),
                *origin,
            )
        )
    return tuple(sorted(sites, key=lambda site: -site.sent))


class _OriginReader:
    """Reads the origin of a module's collectives: source line, operation, argument.

    Args:
      module: the HLO module.
      names: the name of an entry parameter in the text -> the argument's path, if the two differ.
    """

    def __init__(self, module: Module, names: dict[str, str]) -> None:
        self.module, self.names = module, names
        # Names of instructions are unique in a module. `computation` below is always the name of a computation.
        self.computation_of = {i.name: name for name, block in module.computations.items() for i in block}
        self._instructions = {name: {i.name: i for i in block} for name, block in module.computations.items()}
        self._parameter_sources = {i.source for i in module.computations[module.entry] if i.opcode == "parameter"}
        # A combined instruction is asked for once per dtype, and its users are searched once.
        self._operands: dict[str, list[tuple[str, int, Origin]]] = {}

    @cached_property
    def _loops(self) -> dict[str, Instruction]:
        """Return the while loop of each loop body, by the body's name."""
        whiles = (i for block in self.module.computations.values() for i in block if i.opcode == "while")
        return {match[1]: i for i in whiles if (match := re.search(r"\bbody=%?([\w.\-]+)", i.rest))}

    def operands(self, collective: Collective) -> list[tuple[str, int, Origin]]:
        """Return the dtype, the bytes of the buffer and the origin of each operand of a collective's instruction."""
        if collective.instruction not in self._operands:
            computation = self.computation_of[collective.instruction]
            instruction = self._instructions[computation][collective.instruction]
            if not instruction.collective:
                # An asynchronous start whose collective stands in the computation that it calls.
                computation = next(
                    name for name in instruction.called if any(i.collective for i in self.module.computations[name])
                )
                instruction = next(i for i in self.module.computations[computation] if i.collective)
            users = users_of(self.module.computations[computation])
            involuntary = instruction.collective == "all-gather" and only_cut(self.module, users, instruction)
            involuntary = involuntary and self._is_cut_by_device(computation, users, instruction)
            entries = []
            # The other operands of a ragged all-to-all are its output buffer, offsets and sizes.
            names = instruction.operands[:1] if collective.kind == "ragged-all-to-all" else instruction.operands
            for index, name in enumerate(names):
                named, operation = instruction, self._operation(instruction)
                # A combined instruction has one name for all operands. Name a reduction by the operation that computed
                # its operand, and anything else by the operation that uses its result; so too a gather whose name only
                # moves values. All-to-alls are never combined: on CPUs, their operands are the pieces of one array.
                combined = len(instruction.operands) > 1 and collective.kind != "all-to-all"
                if not operation or combined or (operation in _MOVING_PRIMITIVES and "reduce" not in collective.kind):
                    user = None if "reduce" in collective.kind else self._first_use(users, instruction, index)
                    named = user or self._nearest_source(computation, name) or instruction
                shape = self._instructions[computation][name].shape
                dims = next((dims for _, dims in arrays(shape)), ())
                origin = self._line(named), self._operation(named), self._argument(computation, name), dims, involuntary
                sizes = buffer_bytes(collective.kind, collective.ranks or 1, buffers(shape))
                entries += [(dtype, nbytes, origin) for dtype, nbytes in sizes.items()]
            self._operands[collective.instruction] = entries
        return self._operands[collective.instruction]

    def _operation(self, instr: Instruction) -> str:
        """Return JAX's name of an instruction's operation; "" if there is none.

        Instructions that the compiler made have no name, or, if it inserts them for an argument, the argument's path.
        """
        return "" if instr.source in self._parameter_sources else instr.source.partition(";")[0].rpartition("/")[2]

    def _line(self, instr: Instruction) -> str:
        """Return file and line of an instruction: the innermost outside libraries, else the innermost of all."""
        lines = list(self.module.lines(instr))
        user_lines = (line for line in lines if not of_library(line[0]))
        file, number = next(user_lines, lines[0] if lines else ("", ""))
        return f"{short(file)}:{number}" if file else ""

    # -- which operation a collective serves ---------------------------------------------------------------------------

    def _first_use(
        self, users: Mapping[str, Sequence[Instruction]], instr: Instruction, index: int
    ) -> Instruction | None:
        """Return the first instruction with a JAX name that uses result `index`, and does more than move it.

        If the result is only moved, return the first instruction with a JAX name that moves it.
        """
        for user in users.get(instr.name, ()):
            # If the result is a tuple, follow the element that is asked for.
            if user.opcode == "get-tuple-element" and re.search(rf"\bindex={index}\b", user.rest) is None:
                continue
            is_moved = user.opcode in ("get-tuple-element", "copy", "bitcast") or user.opcode.endswith("-done")
            is_moved |= (name := self._operation(user)) in _MOVING_PRIMITIVES
            if use := (self._first_use(users, user, index) if is_moved else None) or (user if name else None):
                return use
        return None

    def _nearest_source(self, computation: str, name: str) -> Instruction | None:
        """Return the nearest instruction with a JAX name from which a value is computed, breadth first."""
        level, seen = [name], set[str]()
        while level:
            instructions = [self._instructions[computation][x] for x in level if x in self._instructions[computation]]
            if named := next((i for i in instructions if self._operation(i)), None):
                return named
            seen.update(level)
            level = [x for i in instructions for x in i.operands if x not in seen]
        return None

    # -- whether a gathered array is only sliced again -----------------------------------------------------------------

    def _is_cut_by_device(
        self, computation: str, users: Mapping[str, Sequence[Instruction]], instr: Instruction
    ) -> bool:
        """Return whether a result is sliced at the device's own place, rather than at an index of the user's program.

        A user's `dynamic_slice` of a gathered array is a choice of the program, and no involuntary gather.
        """
        pending, seen = [instr.name], set[str]()
        while pending:
            name = pending.pop()
            for user in users.get(name, ()):
                if any(self._depends_on_device(computation, x) for x in user.operands if x != name):
                    return True
                if user.name not in seen and user.opcode in (_FORWARDING - {"dynamic-slice"} | {"fusion"}):
                    seen.add(user.name)
                    pending += [user.name] if user.opcode != "fusion" or not self._slices(user) else []
        return False

    def _slices(self, fusion: Instruction) -> bool:
        """Return whether a fusion contains a dynamic slice."""
        return any(x.opcode == "dynamic-slice" for called in fusion.called for x in self.module.computations[called])

    def _depends_on_device(self, computation: str, name: str) -> bool:
        """Return whether a scalar is computed from the number of the device."""
        level, seen = [name], set[str]()
        while level:
            # Indices are computed from scalars and small tables; wide arrays would lead back to the data.
            scalars = [
                x for name in level if (x := self._instructions[computation].get(name)) is not None and not _is_wide(x)
            ]
            if any(x.opcode == "partition-id" for x in scalars):
                return True
            seen.update(level)
            level = [name for x in scalars for name in x.operands if name not in seen]
        return False

    # -- which argument is sent ----------------------------------------------------------------------------------------

    def _argument(self, computation: str, name: str) -> str:
        """Return the path of the argument that a value is, or is a part of; "" if the program computed it."""
        instr = self._instructions[computation].get(name)
        if instr is None:
            return ""
        if instr.opcode == "parameter":
            path = instr.source.replace("\\", "") if computation == self.module.entry else ""
            return self.names.get(path, path)
        if instr.opcode == "get-tuple-element":
            return self._element(computation, instr)
        if instr.opcode == "fusion":
            inner = (x for called in instr.called for x in self.module.computations[called])
            # Scalars may be computed: they are the index of a slice.
            if not all(x.opcode in MOVES or not _is_wide(x) for x in inner):
                return ""
            instructions = self._instructions[computation]
            wide = [x for x in instr.operands if (operand := instructions.get(x)) is not None and _is_wide(operand)]
            return self._argument(computation, wide[0]) if len(wide) == 1 else ""
        return self._argument(computation, instr.operands[0]) if instr.opcode in _FORWARDING and instr.operands else ""

    def _element(self, computation: str, instr: Instruction) -> str:
        """Return the path of the argument that an element of a tuple is.

        An element that a loop carries is followed out of the loop, if no iteration changes it.
        """
        source, match = self._instructions[computation].get(instr.operands[0]), re.search(r"\bindex=(\d+)", instr.rest)
        index = int(match[1]) if match else 0
        if source is not None and source.opcode == "opt-barrier":
            source = self._instructions[computation].get(source.operands[0])
        if source is None:
            return ""
        if source.opcode == "tuple":
            return self._argument(computation, source.operands[index])
        # The tuple is either the parameter of a loop's body, or the result of a loop.
        if source.opcode == "parameter" and computation in self._loops:
            body, loop = computation, self._loops[computation]
        else:
            body, loop = next(((body, loop) for body, loop in self._loops.items() if loop is source), ("", None))
        if loop is None or not self._is_carried_unchanged(body, index):
            return ""
        outside = self.computation_of[loop.name]
        initial = self._instructions[outside].get(loop.operands[0])
        if initial is None or initial.opcode != "tuple":
            return ""
        return self._argument(outside, initial.operands[index])

    def _is_carried_unchanged(self, body: str, index: int) -> bool:
        """Return whether a loop's body passes element `index` of its carry on unchanged."""
        instructions = self._instructions[body]
        root = next((x for x in self.module.computations[body] if x.root and x.opcode == "tuple"), None)
        element = instructions.get(root.operands[index]) if root is not None else None
        while element is not None and element.opcode in ("copy", "bitcast"):
            element = instructions.get(element.operands[0])
        if element is None or element.opcode != "get-tuple-element":
            return False
        carry = instructions.get(element.operands[0])
        is_same_element = re.search(rf"\bindex={index}\b", element.rest) is not None
        return is_same_element and carry is not None and carry.opcode == "parameter"


def _is_wide(instr: Instruction) -> bool:
    """Return whether an instruction's result is more than a scalar or a constant table of the compiler."""
    return instr.opcode != "constant" and any(math.prod(dims) > 1 for _, dims in arrays(instr.shape))
