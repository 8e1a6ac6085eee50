"""Parse a compiled program: its text in HLO, as the CPU, GPU and TPU compilers print it.

A program is a tree of computations, each a list of instructions in the order in which they run:

    ENTRY %main (x: f32[8]) -> f32[8] {                                        computation
      %x = f32[8]{0} parameter(0)
      ROOT %y = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, ...          instruction
    }      name shape     opcode    operands  rest

A collective may stand alone. It may be split in halves (start and done) with other instructions between. It may run in
a computation that runs asynchronously, or be combined with others in one instruction.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import PurePath

import jax
import numpy as np

from ...program.collectives import KINDS
from ...program.trip_counts import Runs, runs_by_name
from .entry import buffer_bytes


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: name without "%".
      shape: "f32[8,3]{1,0}", or a tuple of shapes in parentheses.
      opcode: the operation.
      operands: names of its operands.
      rest: attributes, metadata and backend config, as text.
      root: its result is the result of its computation.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    root: bool = False

    @property
    def collective(self) -> str:
        """The kind of collective that the instruction is or starts; "" if it is none."""
        # A send and its receive are a permute in two halves: the send counts for both.
        kind = "collective-permute" if self.opcode == "send" else self.opcode.removesuffix("-start")
        return kind if kind in KINDS else ""

    @property
    def called(self) -> list[str]:
        """The computations that the instruction runs, except those of `while` and `conditional`."""
        lists = re.findall(r"\b(?:calls|to_apply|called_computations)=(\{[^}]*\}|%?[\w.\-]+)", self.rest)
        return [name for names in lists for name in re.findall(r"[\w.\-]+", names)]

    @property
    def source(self) -> str:
        """The origin by JAX's names ("jit(_train)/.../dot_general"); "" if the compiler made the instruction."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return match[1] if match else ""

    @property
    def target(self) -> str:
        """The library function that a `custom-call` calls, such as "__cublas$lt$matmul"; "" for other opcodes."""
        match = re.search(r'custom_call_target="([^"]*)"', self.rest)
        return match[1] if match else ""

    @property
    def runs(self) -> Runs:
        """How often a `while` runs: by its name (`program/trip_counts.py`), and by XLA's count of its iterations."""
        runs, match = runs_by_name(self.source), re.search(r'"known_trip_count":\{"n":"(\d+)"', self.rest)
        return dataclasses.replace(runs, trips=int(match[1])) if match and not runs.is_upper_bound else runs

    @property
    def branches(self) -> list[str]:
        """The computations of a `conditional`; one of them runs."""
        if self.opcode != "conditional":
            return []
        match = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        names = match[1] if match else " ".join(re.findall(r"(?:true|false)_computation=(\S+)", self.rest))
        return re.findall(r"[\w.\-]+", names)


class Module:
    """One parsed HLO module: its computations, and the bytes, axes and groups of their collectives.

    Args:
      text: the module's text.
      mesh: (axis, size) of the mesh that it was compiled for.

    Attributes:
      computations: name -> instructions in the order in which they run.
      entry: name of the computation that the program begins with.
    """

    def __init__(self, text: str, mesh: tuple[tuple[str, int], ...]) -> None:
        self.text, self.mesh = text, mesh
        self.computations: dict[str, list[Instruction]] = {}
        block: list[Instruction] = []
        for line in text.splitlines():
            if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                block = self.computations.setdefault(header[2], [])
                if header[1]:
                    self.entry = header[2]
            elif match := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*)", line):
                # The shape of a tuple contains spaces, and ends with its closing parenthesis.
                shape, rest = _split(match[3]) if match[3].startswith("(") else match[3].split(" ", 1)
                opcode, rest = rest.strip().split("(", 1)
                arguments, rest = _split("(" + rest)
                # Only operands have a percent sign. Literals of constants have none.
                operands = tuple(re.findall(r"%([\w.\-]+)", arguments))
                block.append(Instruction(match[2], shape, opcode, operands, rest, bool(match[1])))

    def moved(self, instr: Instruction, shapes: Mapping[str, str]) -> dict[str, int]:
        """Return the bytes of a collective's buffers by dtype, as `buffer_bytes` counts them.

        `shapes` are those of all instructions of its computation, by name.
        """
        # The other operands of a ragged all-to-all are its output, offsets and sizes.
        operands = instr.operands[:1] if instr.collective == "ragged-all-to-all" else instr.operands
        inputs = (array for operand in operands for array in buffers(shapes[operand]))
        return buffer_bytes(instr.collective, self.axes(instr)[1], inputs)

    def axes(self, instr: Instruction) -> tuple[tuple[str, ...], int]:
        """Return the mesh axes that a collective runs over, and the number of devices in a group."""
        sizes = dict(self.mesh)
        if instr.collective == "collective-permute":
            # A send to the host has no pairs. A device that sends to itself crosses no axis. Both are groups of one.
            pairs = np.array(self.groups(instr), int).reshape(-1, 2)
            sources, targets = (np.array(np.unravel_index(ids, tuple(sizes.values()))) for ids in pairs.T)
            is_crossed = (sources != targets).any(axis=1)
            axes = tuple(axis for axis, is_crossed_axis in zip(sizes, is_crossed, strict=True) if is_crossed_axis)
            return axes, math.prod(sizes[axis] for axis in axes)
        groups = self.groups(instr)
        return _axes_of(frozenset(map(frozenset, groups)), self.mesh), max(map(len, groups))

    def trips(self, instr: Instruction, siblings: Mapping[str, Instruction]) -> int | Fraction | None:
        """Return the iterations of a `while`; None if they are unknown.

        They follow from XLA's count or the loop's name. TPU programs have neither; there they follow from a condition
        `counter < constant`, if the counter starts at a constant and the body adds one to it. `siblings` are the
        instructions of its computation, by name.
        """
        if instr.runs.trips is not None:
            return instr.runs.trips
        # 1. The condition is `counter < end`.
        blocks = [self.computations[name] for part in ("condition", "body")
                  if (name := "".join(re.findall(rf"\b{part}=%?([\w.\-]+)", instr.rest)))]  # fmt: skip
        roots = [next((inner for inner in block if inner.root), None) for block in blocks]
        if (
            len(roots) < 2
            or not roots[0]
            or not roots[1]
            or roots[0].opcode != "compare"
            or "direction=LT" not in roots[0].rest
        ):
            return None
        # 2. The counter is one element of the carry, which the body returns as a tuple.
        condition, body = [{inner.name: inner for inner in block} for block in blocks]
        counter, bound = roots[0].operands
        index = re.search(r"index=(\d+)", condition[counter].rest) if counter in condition else None
        if index is None or condition[counter].opcode != "get-tuple-element" or roots[1].opcode != "tuple":
            return None
        position = int(index[1])
        # 3. It starts at a constant, and the body adds 1.
        carry = siblings[instr.operands[0]]
        # Copies may stand between the constant and the loop.
        initial = siblings.get(carry.operands[position]) if carry.opcode == "tuple" else None
        while initial is not None and initial.opcode in ("copy", "bitcast"):
            initial = siblings.get(initial.operands[0])
        update = body.get(roots[1].operands[position])
        adds_one = update is not None and update.opcode == "add" and 1 in map(self._constant, update.operands)
        start, end = self._constant(initial.name if initial else ""), self._constant(bound)
        return max(end - start, 0) if adds_one and start is not None and end is not None else None

    def _constant(self, name: str) -> int | None:
        """Return the value of an integer constant; None if the name is no integer constant's."""
        match = re.search(rf"^\s+%{re.escape(name)} = [su]\d+\[\]\S* constant\((-?\d+)\)", self.text, re.MULTILINE)
        return int(match[1]) if match and name else None

    def line(self, instr: Instruction) -> str:
        """Return the line of Python that an instruction comes from, "optax/contrib/_muon.py:97"; "" if unknown."""
        file, number = next(self.lines(instr), ("", ""))
        return f"{short(file)}:{number}" if file else ""

    def lines(self, instr: Instruction) -> Iterator[tuple[str, str]]:
        """Yield (file, line number) of an instruction's origin, then of its callers outwards, as far as they are known.

        XLA prints either one file and line with each instruction, or tables of stack frames at the top of the program.
        """
        if plain := re.search(r'source_file="([^"]*)" source_line=(\d+)', instr.rest):
            yield plain[1], plain[2]
            return
        files, locations, frames = self._tables
        match = re.search(r"stack_frame_id=(\d+)", instr.rest)
        frame = match[1] if match else ""
        # Some releases print a caller's number plus one. Then the outermost frame, 1, has itself as its caller.
        offset = int(frames.get("1", ("", "0"))[1])
        while frame in frames and (location := locations.get(frames[frame][0])):
            yield files[location[0]][0], location[1]
            frame = str(int(frames[frame][1]) - offset)

    @functools.cached_property
    def _tables(self) -> tuple[dict[str, tuple[str, ...]], ...]:
        """The tables at the top of a program: id -> (file name), id -> (file, line), id -> (location, caller)."""
        row_patterns = {
            "FileNames": r'"(.*)"',
            "FileLocations": r"{file_name_id=(\d+).*? line=(\d+)",
            "StackFrames": r"{file_location_id=(\d+)(?: parent_frame_id=(\d+))?",
        }
        tables: list[dict[str, tuple[str, ...]]] = []
        for name, pattern in row_patterns.items():
            table = re.search(rf"^{name}\n((?:\d.*\n)*)", self.text, re.MULTILINE)
            rows = re.finditer(rf"^(\d+) {pattern}", table[1] if table else "", re.MULTILINE)
            tables.append({row[1]: tuple(part or "0" for part in row.groups()[1:]) for row in rows})
        return tuple(tables)

    def groups(self, instr: Instruction) -> list[list[int]]:
        """Return the devices of each group, as positions in the mesh; for a permute its pairs [source, target]."""
        if instr.collective != "collective-permute":
            return _groups(instr.rest, math.prod(size for _, size in self.mesh))
        match = re.search(r'source_target_pairs="?\{((?:\{\d+,\d+\},?)*)\}', instr.rest)
        return _pairs(match[1] if match else "")


def short(path: str) -> str:
    """Return the end of a file's path, such as "optax/contrib/_muon.py"."""
    parts = PurePath(path).parts
    start = next((i + 1 for i, part in enumerate(parts) if part == "site-packages"), -3)
    return str(PurePath(*parts[start:]))


def _split(text: str) -> tuple[str, str]:
    """Split a text that begins with a parenthesis after the parenthesis that closes it."""
    depth = 0
    for parenthesis in re.finditer(r"[()]", text):
        depth += 1 if parenthesis[0] == "(" else -1
        if not depth:  # this one closes the first
            return text[: parenthesis.end()], text[parenthesis.end() :]
    raise ValueError(f"HLO text is cut off: no closing parenthesis in {text[:80]!r}; give all of compiled.as_text()")


def buffers(shape: str) -> list[tuple[str, int]]:
    """Return (numpy dtype, bytes) of each array in a shape, without tokens."""
    sizes = [(dtype_of(dtype), math.prod(dims)) for dtype, dims in arrays(shape)]
    return [(dtype, elements * jax.numpy.dtype(dtype).itemsize) for dtype, elements in sizes]


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return (HLO dtype, dims) of each array in a shape; a dynamic dim counts as its bound.

    >>> arrays("(bf16[8,3]{1,0}, pred[], token[])")
    [('bf16', (8, 3)), ('pred', ())]
    """
    matches = re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", shape)
    return [(dtype, tuple(map(int, re.findall(r"\d+", dims)))) for dtype, dims in matches if dtype != "token"]


def nbytes(shape: str) -> int:
    """Return the bytes of all arrays in a shape; elements of less than 8 bits are packed.

    >>> nbytes("(bf16[8,3]{1,0}, s4[3])")
    50
    """
    return sum(math.ceil(math.prod(dims) * bits(dtype) / 8) for dtype, dims in arrays(shape))


def bits(dtype: str) -> int:
    """Return the bits of one element.

    >>> [bits(dtype) for dtype in ("bf16", "f8e4m3fn", "s4", "pred")]
    [16, 8, 4, 8]
    """
    match = re.search(r"\d+", dtype)
    # pred has no number, and takes a byte.
    return int(match[0]) if match else 8


def dtype_of(hlo: str) -> str:
    """Return numpy's name of a dtype: bf16 is bfloat16, s32 is int32, f8e4m3fn is float8_e4m3fn, pred is bool."""
    names = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}
    match = re.fullmatch(r"(f|bf|s|u|c)(\d+)(e\w+)?", hlo)
    if not match and hlo != "pred":
        raise ValueError(
            f"HLO dtype {hlo!r} of a collective is not known; known are pred, and a number of bits after "
            f"{', '.join(names)}"
        )
    return f"{names[match[1]]}{match[2]}{'_' * bool(match[3])}{match[3] or ''}" if match else "bool"


def _groups(attributes: str, num_devices: int) -> list[list[int]]:
    """Parse groups of devices in the three forms that XLA prints.

    Lists: {{0,1},{2,3}}, or {} for one group of all devices.
    An iota: [groups,size]<=[dims]T(permutation), the numbers from 0 in an array of these dims, transposed and reshaped.
    Axes of a mesh: mesh['a'=2,'b'=4] {'b':(2)2}, where (2)2 is a part of an axis: 2 devices, with 2 groups of the axis
    outside it. The mesh may name its devices by an iota: mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}.
    """
    text = attributes.partition("replica_groups=")[2]
    if match := re.match(r"\{((?:\{[\d,]*\},?)*)\}|$", text):
        lists = [_numbers(group) for group in re.findall(r"[\d,]+(?=\})", match[1] or "")]
        return lists or [list(range(num_devices))]
    if match := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return [group.tolist() for group in _iota(match[2], match[3]).reshape(_numbers(match[1]))]
    if match := re.match(r"mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        coordinates = np.array(np.unravel_index(np.arange(num_devices), tuple(sizes.values())))
        # Devices of one group share the coordinates that remain once those along the group's axes are set to 0.
        group_coordinates = coordinates.copy()
        for name, num_outer, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", match[4]):
            size, axis = int(part or sizes[name]), list(sizes).index(name)
            # If a group is a part of an axis, `num_outer` groups lie outside it, and neighbours within it are `stride`
            # coordinates apart.
            stride = sizes[name] // (int(num_outer or 1) * size)
            group_coordinates[axis] -= coordinates[axis] // stride % size * stride
        _, label = np.unique(group_coordinates, axis=1, return_inverse=True)
        ids = _iota(match[2] or str(num_devices), match[3]).ravel()
        return [ids[label.ravel() == group].tolist() for group in range(label.max() + 1)]
    raise ValueError(
        f"the form of replica_groups is not known: {text[:60]!r}; known forms are {{{{0,1}}}}, [4,2]<=[2,4]T(1,0) and "
        "mesh['a'=2] {'a'}"
    )


@functools.lru_cache(maxsize=64)  # every message of a pipeline has the same pairs, as many as there are devices
def _pairs(text: str) -> list[list[int]]:
    """Parse {{0,1},{1,0}}, given without its outer braces."""
    return [_numbers(pair) for pair in re.findall(r"\d+,\d+", text)]


def _numbers(text: str) -> list[int]:
    """Parse numbers with commas between them."""
    return [int(number) for number in text.split(",")]


def _iota(dims: str, order: str | None) -> np.ndarray:
    """Parse XLA's [2,4]T(1,0): the numbers from 0 in an array of these dims, then transposed."""
    grid = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return grid.transpose(_numbers(order)) if order else grid


@functools.lru_cache(maxsize=256)
def _axes_of(groups: frozenset[frozenset[int]], mesh: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """Return the axes whose lines through the mesh are exactly these groups.

    Groups that fill only a part of such lines give one text, such as ("2 of data+fsdp",).
    """
    sizes = dict(mesh)
    grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    wide_axes = [axis for axis in sizes if sizes[axis] > 1]
    # Fewer axes first, so that parts of lines name as few axes as possible.
    for count in range(len(wide_axes) + 1):
        for axes in itertools.combinations(wide_axes, count):
            dims = [list(sizes).index(axis) for axis in axes]
            lines = np.moveaxis(grid, dims, range(-count, 0)).reshape(-1, math.prod(sizes[axis] for axis in axes))
            if groups == frozenset(map(frozenset, lines.tolist())):
                return axes
            # The groups lie within these lines and do not fill them.
            if all(any(group <= set(line) for line in lines.tolist()) for group in groups):
                return (f"{max(map(len, groups))} of {'+'.join(axes)}",)
    raise AssertionError(f"groups {groups} lie outside the mesh {mesh}")
