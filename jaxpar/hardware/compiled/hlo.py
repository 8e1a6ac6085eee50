"""Reading a compiled program: its text in HLO, as the CPU, GPU and TPU compilers print it.

The program is a tree of computations, each a list of instructions in the order in which they run. A collective may
stand alone, in halves (start and done) with others between, in a computation that runs asynchronously, or combined
with others in one instruction.
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
from ...program.trip_counts import Share, share_of
from .entry import whole


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str  # "f32[8,3]{1,0}", or a tuple of those in parentheses
    opcode: str
    operands: tuple[str, ...]
    rest: str  # attributes, metadata, backend config
    root: bool = False  # what it computes is the result of its computation

    @property
    def collective(self) -> str:
        """The kind of collective that it is or starts; "" of all else."""
        kind = "collective-permute" if self.opcode == "send" else self.opcode.removesuffix("-start")
        return kind if kind in KINDS else ""

    @property
    def called(self) -> list[str]:
        """Computations that it runs, but for `while` and `conditional`."""
        names = re.findall(r"\b(?:calls|to_apply|called_computations)=(\{[^}]*\}|%?[\w.\-]+)", self.rest)
        return [name for found in names for name in re.findall(r"[\w.\-]+", found)]

    @property
    def source(self) -> str:
        """Where it comes from, by JAX's names ("jit(_train)/.../dot_general"); "" if the compiler made it."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return found[1] if found else ""

    @property
    def target(self) -> str:
        """What a `custom-call` calls: "__cublas$lt$matmul"; "" of all else."""
        found = re.search(r'custom_call_target="([^"]*)"', self.rest)
        return found[1] if found else ""

    @property
    def trips(self) -> int | Fraction | None:
        """Iterations of a `while`, where XLA knows them, or its name says in which part of another's it has one."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.rest)
        return int(found[1]) if found else self.share and self.share.runs

    @property
    def share(self) -> Share | None:
        """What the name of a `while` says (`program/trip_counts.py`)."""
        found = re.search(r'op_name="([^"]*)"', self.rest) if self.opcode == "while" else None
        return share_of(found[1]) if found else None

    @property
    def branches(self) -> list[str]:
        """The computations of a `conditional`, of which one runs."""
        if self.opcode != "conditional":
            return []
        found = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        named = found[1] if found else " ".join(re.findall(r"(?:true|false)_computation=(\S+)", self.rest))
        return re.findall(r"[\w.\-]+", named)


class Module:
    """The text of one HLO module: its computations, and what their collectives move over which axes of a mesh."""

    def __init__(self, text: str, mesh: tuple[tuple[str, int], ...]) -> None:
        self.text, self.mesh = text, mesh
        self.computations: dict[str, list[Instruction]] = {}
        block: list[Instruction] = []
        for line in text.splitlines():
            if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                block = self.computations.setdefault(head[2], [])
                if head[1]:
                    self.entry = head[2]
            elif found := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*)", line):
                shape, rest = _split(found[3]) if found[3].startswith("(") else found[3].split(" ", 1)
                opcode, rest = rest.strip().split("(", 1)
                inside, rest = _split("(" + rest)
                operands = tuple(re.findall(r"%([\w.\-]+)", inside))
                block.append(Instruction(found[2], shape, opcode, operands, rest, bool(found[1])))

    def moved(self, i: Instruction, shapes: Mapping[str, str]) -> dict[str, int]:
        """Bytes by dtype of a collective's buffers: `whole`. `shapes`: of all instructions beside it, by name."""
        operands = i.operands[:1] if i.collective == "ragged-all-to-all" else i.operands
        return whole(i.collective, self.axes(i)[1], (x for operand in operands for x in buffers(shapes[operand])))

    def axes(self, i: Instruction) -> tuple[tuple[str, ...], int]:
        """The mesh axes that a collective runs over, and the number of devices in a group."""
        sizes = dict(self.mesh)
        if i.collective == "collective-permute":
            # A send to the host has no pairs, and an exchange with oneself no axes: both are groups of one.
            pairs = np.array(self.groups(i), int).reshape(-1, 2)
            sources, targets = (np.array(np.unravel_index(ids, tuple(sizes.values()))) for ids in pairs.T)
            moved = (sources != targets).any(axis=1)
            axes = tuple(axis for axis, differs in zip(sizes, moved, strict=True) if differs)
            return axes, math.prod(sizes[axis] for axis in axes)
        groups = self.groups(i)
        return _axes_of(frozenset(map(frozenset, groups)), self.mesh), max(map(len, groups))

    def trips(self, i: Instruction, beside: Mapping[str, Instruction]) -> int | Fraction | None:
        """Iterations of a `while`: as XLA or its name says, or, as for TPUs, from its condition `counter < constant`,
        where the counter starts at a constant and its body adds one. None of others. `beside`: what stands beside it.
        """
        if i.trips is not None:
            return i.trips
        blocks = [self.computations[found] for part in ("condition", "body")
                  if (found := "".join(re.findall(rf"\b{part}=%?([\w.\-]+)", i.rest)))]  # fmt: skip
        ends = [next((j for j in block if j.root), None) for block in blocks]
        if (
            len(ends) < 2
            or not ends[0]
            or not ends[1]
            or ends[0].opcode != "compare"
            or "direction=LT" not in ends[0].rest
        ):
            return None
        named = [{j.name: j for j in block} for block in blocks]
        counter, most = ends[0].operands
        at = re.search(r"index=(\d+)", named[0][counter].rest) if counter in named[0] else None
        if at is None or named[0][counter].opcode != "get-tuple-element" or ends[1].opcode != "tuple":
            return None
        place = int(at[1])
        first = beside.get(beside[i.operands[0]].operands[place]) if beside[i.operands[0]].opcode == "tuple" else None
        while first is not None and first.opcode in ("copy", "bitcast"):
            first = beside.get(first.operands[0])
        step = named[1].get(ends[1].operands[place])
        adds = step is not None and step.opcode == "add" and 1 in map(self._constant, step.operands)
        start, end = self._constant(first.name if first else ""), self._constant(most)
        return max(end - start, 0) if adds and start is not None and end is not None else None

    def _constant(self, name: str) -> int | None:
        found = re.search(rf"^\s+%{re.escape(name)} = [su]\d+\[\]\S* constant\((-?\d+)\)", self.text, re.MULTILINE)
        return int(found[1]) if found and name else None

    def line(self, i: Instruction) -> str:
        """The line of Python that it comes from, "optax/contrib/_muon.py:97"; or ""."""
        file, number = next(self.lines(i), ("", ""))
        return f"{short(file)}:{number}" if file else ""

    def lines(self, i: Instruction) -> Iterator[tuple[str, str]]:
        """File and number of the line of Python that it comes from, in either of XLA's spellings, then of those that
        called it, outwards, as far as the program tells.
        """
        if plain := re.search(r'source_file="([^"]*)" source_line=(\d+)', i.rest):
            yield plain[1], plain[2]
            return
        files, locations, frames = self._tables
        found = re.search(r"stack_frame_id=(\d+)", i.rest)
        frame = found[1] if found else ""
        # Some releases print a caller's number plus one: then the outermost frame, 1, has itself as its caller.
        offset = int(frames.get("1", ("", "0"))[1])
        while frame in frames and (location := locations.get(frames[frame][0])):
            yield files[location[0]][0], location[1]
            frame = str(int(frames[frame][1]) - offset)

    @functools.cached_property
    def _tables(self) -> tuple[dict[str, tuple[str, ...]], ...]:
        """Those at the beginning of a program: file names, places in files, frames with their callers."""
        forms = {
            "FileNames": r'"(.*)"',
            "FileLocations": r"{file_name_id=(\d+).*? line=(\d+)",
            "StackFrames": r"{file_location_id=(\d+)(?: parent_frame_id=(\d+))?",
        }
        found: list[dict[str, tuple[str, ...]]] = []
        for name, form in forms.items():
            table = re.search(rf"^{name}\n((?:\d.*\n)*)", self.text, re.MULTILINE)
            rows = re.finditer(rf"^(\d+) {form}", table[1] if table else "", re.MULTILINE)
            found.append({row[1]: tuple(part or "0" for part in row.groups()[1:]) for row in rows})
        return tuple(found)

    def groups(self, i: Instruction) -> list[list[int]]:
        """The devices of each group, as places in the mesh; of a permute its pairs [source, target]."""
        if i.collective != "collective-permute":
            return _groups(i.rest, math.prod(size for _, size in self.mesh))
        found = re.search(r'source_target_pairs="?\{((?:\{\d+,\d+\},?)*)\}', i.rest)
        return _pairs(found[1] if found else "")


def short(path: str) -> str:
    """The end of a file's path: "optax/contrib/_muon.py"."""
    parts = PurePath(path).parts
    start = next((at + 1 for at, part in enumerate(parts) if part == "site-packages"), -3)
    return str(PurePath(*parts[start:]))


def _split(text: str) -> tuple[str, str]:
    """What stands in the parentheses that `text` opens with, and what follows them."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return text[: found.end()], text[found.end() :]
    raise ValueError(f"HLO text is cut off: no closing parenthesis in {text[:80]!r}; give all of compiled.as_text()")


def buffers(shape: str) -> list[tuple[str, int]]:
    """(dtype, bytes) of each array in a shape; tokens are none."""
    found = [(dtype_of(dtype), math.prod(dims)) for dtype, dims in arrays(shape)]
    return [(dtype, elements * jax.numpy.dtype(dtype).itemsize) for dtype, elements in found]


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(HLO dtype, dims) of each array in a shape; of a dynamic dim its bound.

    >>> arrays("(bf16[8,3]{1,0}, pred[], token[])")
    [('bf16', (8, 3)), ('pred', ())]
    """
    found = re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", shape)
    return [(dtype, tuple(map(int, re.findall(r"\d+", dims)))) for dtype, dims in found if dtype != "token"]


def nbytes(shape: str) -> int:
    """Bytes of all arrays in a shape; those of less than 8 bits are packed.

    >>> nbytes("(bf16[8,3]{1,0}, s4[3])")
    50
    """
    return sum(math.ceil(math.prod(dims) * bits(dtype) / 8) for dtype, dims in arrays(shape))


def bits(dtype: str) -> int:
    """Bits of one element.

    >>> [bits(dtype) for dtype in ("bf16", "f8e4m3fn", "s4", "pred")]
    [16, 8, 4, 8]
    """
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 8


def dtype_of(hlo: str) -> str:
    """numpy's name: bf16 is bfloat16, s32 is int32, f8e4m3fn is float8_e4m3fn, pred is bool."""
    names = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}
    found = re.fullmatch(r"(f|bf|s|u|c)(\d+)(e\w+)?", hlo)
    if not found and hlo != "pred":
        raise ValueError(
            f"HLO dtype {hlo!r} of a collective is not known; known are pred and {', '.join(names)} + bits"
        )
    return f"{names[found[1]]}{found[2]}{'_' * bool(found[3])}{found[3] or ''}" if found else "bool"


def _groups(attributes: str, devices: int) -> list[list[int]]:
    """Groups of devices, in the forms that XLA prints: lists, an iota, or axes of a mesh of its own.

    {{0,1},{2,3}} or {} for all;  [groups,size]<=[dims]T(permutation);  mesh['a'=2,'b'=4] {'b':(2)2}, where (2)2 is a
    part of an axis: 2 devices, with 2 groups of the axis outside it. The mesh may name its devices, as an iota too:
    mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}.
    """
    text = attributes.partition("replica_groups=")[2]
    if found := re.match(r"\{((?:\{[\d,]*\},?)*)\}|$", text):
        lists = [_numbers(group) for group in re.findall(r"[\d,]+(?=\})", found[1] or "")]
        return lists or [list(range(devices))]
    if found := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return [group.tolist() for group in _iota(found[2], found[3]).reshape(_numbers(found[1]))]
    if found := re.match(r"mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        place = np.array(np.unravel_index(np.arange(devices), tuple(sizes.values())))
        group = place.copy()
        for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found[4]):
            size, axis = int(part or sizes[name]), list(sizes).index(name)
            stride = sizes[name] // (int(before or 1) * size)
            group[axis] -= place[axis] // stride % size * stride
        _, label = np.unique(group, axis=1, return_inverse=True)
        ids = _iota(found[2] or str(devices), found[3]).ravel()
        return [ids[label.ravel() == n].tolist() for n in range(label.max() + 1)]
    raise ValueError(
        f"form of replica_groups not known: {text[:60]!r}; known: {{{{0,1}}}}, [4,2]<=[2,4]T(1,0), mesh['a'=2] {{'a'}}"
    )


@functools.lru_cache(maxsize=64)  # every message of a pipeline has the same, as many as devices
def _pairs(text: str) -> list[list[int]]:
    """{{0,1},{1,0}} without its outer braces."""
    return [_numbers(pair) for pair in re.findall(r"\d+,\d+", text)]


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _iota(dims: str, order: str | None) -> np.ndarray:
    """XLA's [2,4]T(1,0): the numbers from 0, in an array of these dims, which are then transposed."""
    grid = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return grid.transpose(_numbers(order)) if order else grid


@functools.lru_cache(maxsize=256)
def _axes_of(groups: frozenset[frozenset[int]], mesh: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """The axes whose lines through the mesh are exactly these groups."""
    sizes = dict(mesh)
    grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    wide = [axis for axis in sizes if sizes[axis] > 1]
    for count in range(len(wide) + 1):
        for axes in itertools.combinations(wide, count):
            last = [list(sizes).index(axis) for axis in axes]
            lines = np.moveaxis(grid, last, range(-count, 0)).reshape(-1, math.prod(sizes[axis] for axis in axes))
            if groups == frozenset(map(frozenset, lines.tolist())):
                return axes
            if all(any(group <= set(line) for line in lines.tolist()) for group in groups):
                return (f"{max(map(len, groups))} of {'+'.join(axes)}",)
    raise AssertionError(f"groups {groups} lie outside the mesh {mesh}")
