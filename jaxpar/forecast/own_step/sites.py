"""Where a program's collectives come from: the line of Python, and the arguments that are sent as they stand.

XLA's partitioner writes a collective for an operation whose operands lie otherwise than it needs, and names it after
that operation. Compilers combine several into one: there each operand has a line of its own.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...backend.text import size
from ...hardware.compiled.entry import Nesting, whole
from ...hardware.compiled.hlo import Instruction, Module, arrays, buffers, short
from ...hardware.compiled.kernels import MOVES
from ...inspect.check.resharding import only_cut, users_of
from ...inspect.ledger import Collective, collectives
from ...program.collectives import on_the_wire
from ...program.libraries import of_library
from ...program.primitives import having
from .program import JittedProgram

# An array behind these is the same, or a part of it.
_SAME = frozenset("bitcast bitcast-convert convert reshape transpose slice dynamic-slice opt-barrier".split())
_SAME |= {f"{kind}{part}" for kind in ("copy", "all-gather") for part in ("", "-start", "-done")}
_MOVES = frozenset((*having("moves"), "dynamic_slice"))  # as jax 0.12 names a scan's slices

Said = tuple[str, str, str, tuple[int, ...], bool]  # of a site, from its source on


@dataclass(frozen=True)
class Site:
    """The collectives of one kind, axes, line and array. Bytes are per device and step, as in `Collective`.

    Attributes:
      kind, axes, dtype: as in `Collective`.
      count: executions; None in a loop of unknown length.
      bytes: their buffers; `sent`: what a device puts on the wire of them; `hidden`: of that, what is sent while
        something is computed.
      source: the innermost line that is of no library (`program/libraries.py`), "model.py:31"; "" where the compiler
        does not say.
      operation: what it serves, by JAX's name, "dot_general".
      argument: path of that which is sent as it stands, as weights that are gathered; "" of what was computed.
      shape: of what a device puts in.
      involuntary: the compiler gathers the whole for no other end than to cut it anew.
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
        of = f" of {self.argument or f'{self.dtype}{list(self.shape)}'}"
        at = f" at {self.source}" if self.source else ", of a line that the compiler does not say"
        why = f" for {self.operation}" if self.operation else ""
        again = ", gathered whole only to be cut anew (involuntary full rematerialization)" if self.involuntary else ""
        return f"{self.kind} over {'+'.join(self.axes)}{of}{why}{at}: {self.times} x, {size(self.sent)} sent{again}"

    @property
    def times(self) -> str:
        """`count` as text."""
        return "?" if self.count is None else str(self.count)


def sites_of(program: JittedProgram) -> tuple[Site, ...]:
    """Those of a program, what sends most first; of a combined collective each operand for itself."""
    reader = _Reader(program.executable.module, program.names)
    groups: dict[tuple[Any, ...], list[tuple[Collective, int]]] = {}
    for one in collectives(program.executable.operations, Nesting()):
        for dtype, nbytes, said in reader.operands(one):
            if dtype == one.dtype:  # an instruction has an entry for each of its dtypes
                groups.setdefault((one.kind, one.axes, dtype, *said), []).append((one, nbytes))
    found = []
    for (kind, axes, dtype, *said), same in groups.items():
        counts = {id(one): one.count for one, _ in same}.values()  # of an instruction once, whatever its operands
        each = [(one, nbytes * (1 if one.count is None else one.count)) for one, nbytes in same]
        wire = [(one, round(nbytes * on_the_wire(kind, one.ranks or 1))) for one, nbytes in each]
        found.append(
            Site(
                kind,
                axes,
                dtype,
                None if None in counts else sum(n or 0 for n in counts),
                sum(nbytes for _, nbytes in each),
                sum(sent for _, sent in wire),
                sum(sent for one, sent in wire if one.overlapped),
                *said,
            )
        )
    return tuple(sorted(found, key=lambda site: -site.sent))


class _Reader:
    """Reads what a collective of a module is for."""

    def __init__(self, module: Module, names: dict[str, str]) -> None:
        self.module, self.names = module, names
        self.blocks = {i.name: name for name, block in module.computations.items() for i in block}
        self._made = {name: {i.name: i for i in block} for name, block in module.computations.items()}
        self._paths = {i.source for i in module.computations[module.entry] if i.opcode == "parameter"}
        self._read: dict[str, list[tuple[str, int, Said]]] = {}

    @cached_property
    def _loops(self) -> dict[str, Instruction]:
        """Body -> its loop."""
        whiles = (i for block in self.module.computations.values() for i in block if i.opcode == "while")
        return {found[1]: i for i in whiles if (found := re.search(r"\bbody=%?([\w.\-]+)", i.rest))}

    def operands(self, of: Collective) -> list[tuple[str, int, Said]]:
        """Of each operand of an instruction its dtype, the bytes of its buffer, and what is said of it."""
        if of.instruction not in self._read:
            block = self.blocks[of.instruction]
            one = self._made[block][of.instruction]
            if not one.collective:  # it stands in a computation that is started
                block = next(name for name in one.called if any(i.collective for i in self.module.computations[name]))
                one = next(i for i in self.module.computations[block] if i.collective)
            users = users_of(self.module.computations[block])
            again = one.collective == "all-gather" and only_cut(self.module, users, one)
            again = again and self._by_place(block, users, one)
            found = []
            for at, name in enumerate(one.operands[:1] if of.kind == "ragged-all-to-all" else one.operands):
                own, name_of_own = one, self._operation(one)
                # Combined, a sum is named by its terms, else by its use; so is a gather of what is only moved. Of
                # all-to-alls none are: on CPUs each has its pieces as operands.
                combined = len(one.operands) > 1 and of.kind != "all-to-all"
                if not name_of_own or combined or (name_of_own in _MOVES and "reduce" not in of.kind):
                    used = None if "reduce" in of.kind else self._use(users, one, at)
                    own = used or self._named(block, name) or one
                shape = self._made[block][name].shape
                dims = next((dims for _, dims in arrays(shape)), ())
                said = self._line(own), self._operation(own), self._argument(block, name), dims, again
                sizes = whole(of.kind, of.ranks or 1, buffers(shape))
                found += [(dtype, nbytes, said) for dtype, nbytes in sizes.items()]
            self._read[of.instruction] = found
        return self._read[of.instruction]

    def _operation(self, i: Instruction) -> str:
        """JAX's name of what an instruction is of; "" of the compiler's, and of an argument, whose path XLA gives."""
        return "" if i.source in self._paths else i.source.partition(";")[0].rpartition("/")[2]

    def _line(self, i: Instruction) -> str:
        lines = list(self.module.lines(i))
        own = (line for line in lines if not of_library(line[0]))
        file, number = next(own, lines[0] if lines else ("", ""))
        return f"{short(file)}:{number}" if file else ""

    def _use(self, users: Mapping[str, Sequence[Instruction]], i: Instruction, at: int) -> Instruction | None:
        """The first instruction with a name of JAX's that uses one of the results of several, and not only moves it."""
        for user in users.get(i.name, ()):
            if user.opcode == "get-tuple-element" and re.search(rf"\bindex={at}\b", user.rest) is None:
                continue
            passed = user.opcode in ("get-tuple-element", "copy", "bitcast") or user.opcode.endswith("-done")
            passed |= (name := self._operation(user)) in _MOVES
            if found := (self._use(users, user, at) if passed else None) or (user if name else None):
                return found
        return None

    def _named(self, block: str, name: str) -> Instruction | None:
        """The nearest instruction with a name of JAX's that one is computed from."""
        level, seen = [name], set[str]()
        while level:
            found = [self._made[block][x] for x in level if x in self._made[block]]
            if named := next((i for i in found if self._operation(i)), None):
                return named
            seen.update(level)
            level = [x for i in found for x in i.operands if x not in seen]
        return None

    def _by_place(self, block: str, users: Mapping[str, Sequence[Instruction]], i: Instruction) -> bool:
        """Whether what cuts a result does so by the device's own place, and not by an index of the program's."""
        after, seen = [i.name], set[str]()
        while after:
            name = after.pop()
            for user in users.get(name, ()):
                if any(self._from_place(block, x) for x in user.operands if x != name):
                    return True
                if user.name not in seen and user.opcode in (_SAME - {"dynamic-slice"} | {"fusion"}):
                    seen.add(user.name)
                    after += [user.name] if user.opcode != "fusion" or not self._slices(user) else []
        return False

    def _slices(self, fusion: Instruction) -> bool:
        return any(x.opcode == "dynamic-slice" for called in fusion.called for x in self.module.computations[called])

    def _from_place(self, block: str, name: str) -> bool:
        """Whether a scalar is computed from the number of the device."""
        level, seen = [name], set[str]()
        while level:
            found = [x for name in level if (x := self._made[block].get(name)) is not None and not _is_wide(x)]
            if any(x.opcode == "partition-id" for x in found):
                return True
            seen.update(level)
            level = [name for x in found for name in x.operands if name not in seen]
        return False

    def _argument(self, block: str, name: str) -> str:
        """The argument that a value is, or is a part of; "" of what was computed."""
        i = self._made[block].get(name)
        if i is None:
            return ""
        if i.opcode == "parameter":
            path = i.source.replace("\\", "") if block == self.module.entry else ""
            return self.names.get(path, path)
        if i.opcode == "get-tuple-element":
            return self._element(block, i)
        if i.opcode == "fusion":
            inside = (x for called in i.called for x in self.module.computations[called])
            if not all(x.opcode in MOVES or not _is_wide(x) for x in inside):  # scalars find the place of a slice
                return ""
            wide = [x for x in i.operands if (of := self._made[block].get(x)) is not None and _is_wide(of)]
            return self._argument(block, wide[0]) if len(wide) == 1 else ""
        return self._argument(block, i.operands[0]) if i.opcode in _SAME and i.operands else ""

    def _element(self, block: str, i: Instruction) -> str:
        """Of a tuple's element; of what a loop carries, where no iteration changes it."""
        of, at = self._made[block].get(i.operands[0]), re.search(r"\bindex=(\d+)", i.rest)
        place = int(at[1]) if at else 0
        if of is not None and of.opcode == "opt-barrier":
            of = self._made[block].get(of.operands[0])
        if of is None:
            return ""
        if of.opcode == "tuple":
            return self._argument(block, of.operands[place])
        if of.opcode == "parameter" and block in self._loops:
            body, loop = block, self._loops[block]
        else:
            body, loop = next(((body, loop) for body, loop in self._loops.items() if loop is of), ("", None))
        if loop is None or not self._carries(body, place):
            return ""
        outside = self.blocks[loop.name]
        first = self._made[outside].get(loop.operands[0])
        return self._argument(outside, first.operands[place]) if first is not None and first.opcode == "tuple" else ""

    def _carries(self, body: str, place: int) -> bool:
        """Whether a loop's body hands on an element of what it carries as it is."""
        end = next((x for x in self.module.computations[body] if x.root and x.opcode == "tuple"), None)
        kept = self._made[body].get(end.operands[place]) if end is not None else None
        while kept is not None and kept.opcode in ("copy", "bitcast"):
            kept = self._made[body].get(kept.operands[0])
        of = self._made[body].get(kept.operands[0]) if kept is not None and kept.opcode == "get-tuple-element" else None
        same = kept is not None and re.search(rf"\bindex={place}\b", kept.rest) is not None
        return same and of is not None and of.opcode == "parameter"


def _is_wide(i: Instruction) -> bool:
    """Whether it is more than a scalar or a table of the compiler's."""
    return i.opcode != "constant" and any(math.prod(dims) > 1 for _, dims in arrays(i.shape))
