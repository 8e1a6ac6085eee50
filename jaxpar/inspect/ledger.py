"""The ledger: every collective of a program, by kind, mesh axes, dtype, count and bytes per device and step.

It is read from two places, which answer different questions:

- **The jaxpr** (`Ledger.from_jaxpr`): what the author wrote inside `shard_map`. Its counts are portable. It has no
  collective that the partitioner adds later (the update at `jit` level, `tensor`), and a dim that is automatic over
  some axis counts whole.
- **The compiled program** (`Ledger.from_hlo`): what runs. Bytes are portable; counts are not, because each compiler
  combines collectives as it likes, and an all-reduce followed by a slice may stand for a reduce-scatter: what is there
  is reported. The CPU backend widens bfloat16 collectives to float32, so dtypes and bytes differ there.

Bytes are those of the whole buffer that a device takes part in, times the count: output for all-gather, input for
every other kind. An algorithm on a ring of N devices sends (N-1)/N of them (all-reduce: twice that) per device.
Groups of one device move nothing and are dropped.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import jax
import numpy as np

# jax 0.10 to 0.12; a name may end in _start. With check_vma the names end in _invariant and _reduced.
PRIMITIVES = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "unreduced_psum"), "all-reduce"),
    **dict.fromkeys(("pmax", "pmin", "unreduced_pmax", "unreduced_pmin"), "all-reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), "all-gather"),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), "reduce-scatter"),
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
    **dict.fromkeys(("pbroadcast", "pbroadcast_dynamic"), "collective-broadcast"),
}
KINDS = tuple(dict.fromkeys(PRIMITIVES.values()))
# Instructions that only move, cast or fill memory: a collective behind these alone is not hidden by compute.
MOVES = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|bitcast-convert|copy|copy-start|convert|reshape|transpose|pad|iota|"
    "broadcast|slice|dynamic-slice|dynamic-update-slice|concatenate|reverse|partition-id|replica-id|after-all|send|recv"
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """Equal collectives of one program, taken together.

    Attributes:
      kind: one of `KINDS`, in HLO's spelling: "all-reduce" (pmax and pmin too), "all-gather", "reduce-scatter", ...
      axes: the mesh axes it runs over, in mesh order; ("2 of data+fsdp",) for groups of 2 devices that lie within
        those axes without filling any set of them.
      dtype: as numpy names it: "float32", "bfloat16".
      count: executions per step; None in a loop of unknown length. A combined instruction counts once per dtype.
      bytes: bytes per device and step, over all executions (of one execution where `count` is None).
      asynchronous: it starts in one place of the schedule and is waited for in another (HLO only).
      overlapped: compute, not only copies and casts, is scheduled between the two (HLO only).
      in_loop: it runs in the body of a loop.
      conditional: it runs in one branch of a conditional and not in the others; count and bytes are upper bounds.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    count: int | None
    bytes: int
    asynchronous: bool = False
    overlapped: bool = False
    in_loop: bool = False
    conditional: bool = False


FIELDS = tuple(field.name for field in dataclasses.fields(Collective))


class Ledger(tuple[Collective, ...]):
    """The collectives of a program: a tuple of `Collective`, alike ones added up, sorted by kind, axes and dtype."""

    def __new__(cls, collectives: Iterable[Collective] = ()) -> Self:
        groups: dict[tuple[Any, ...], list[Collective]] = {}
        for one in collectives:
            key = dataclasses.replace(one, count=None if one.count is None else 0, bytes=0)
            groups.setdefault(dataclasses.astuple(key), []).append(one)
        rows = (
            dataclasses.replace(
                same[0],
                count=None if same[0].count is None else sum(one.count or 0 for one in same),
                bytes=sum(one.bytes for one in same),
            )
            for same in groups.values()
        )
        return super().__new__(
            cls, sorted(rows, key=lambda one: (KINDS.index(one.kind), str(dataclasses.astuple(one))))
        )

    @classmethod
    def from_jaxpr(cls, jaxpr: Any, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Self:
        """Collectives written in a program, through jit, scan, cond, while, remat, custom derivatives, shard_map.

        Args:
          jaxpr: `jax.make_jaxpr(f)(...)`. Nothing in it is taken to be dead code.
          mesh: the mesh of its `shard_map`; gives the size of each axis.

        Raises:
          ValueError: a collective runs over an axis that `mesh` lacks.
        """
        return cls(_from_jaxpr(getattr(jaxpr, "jaxpr", jaxpr), mesh, _Place()))

    @classmethod
    def from_hlo(cls, text: str, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Self:
        """Collectives of a compiled program; loops count by their `known_trip_count`.

        Args:
          text: `compiled.as_text()`, from the CPU, GPU or TPU compiler.
          mesh: the mesh that it was compiled for, devices in the program's order.

        Raises:
          ValueError: the program is for another number of devices, or has a form of groups or a dtype not known here.
        """
        found = re.search(r"^HloModule.*", text, re.MULTILINE)
        header = found[0] if found else ""
        devices = math.prod(int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header))
        if devices != mesh.size:
            raise ValueError(
                f"mesh has {mesh.size} devices, the program {devices}; give the mesh that it was compiled for"
            )
        return cls(_Hlo(text, tuple(mesh.shape.items())).walk())

    def by(self, *fields: str, value: str = "bytes") -> dict[Any, int]:
        """Sums of `value` ("bytes" or "count") by the given fields: `by("kind", "axes")` has keys (kind, axes).

        One field gives plain keys: `by("dtype")` is {"float32": ...}.

        Raises:
          ValueError: no such field, or a collective runs in a loop of unknown length.
        """
        self._check(*fields, value)
        sums: dict[Any, int] = {}
        for one in self:
            if one.count is None:
                raise ValueError(
                    f"{one.kind} over {one.axes} of {one.dtype} runs in a while loop of unknown length and cannot be "
                    "summed; use lax.scan or static bounds, or read the ledger's entries one by one"
                )
            key = tuple(getattr(one, field) for field in fields)
            key = key[0] if len(fields) == 1 else key
            sums[key] = sums.get(key, 0) + getattr(one, value)
        return sums

    def total(self, value: str = "bytes", **where: Any) -> int:
        """Sum of `value` ("bytes" or "count") where fields are as given: `total(kind="all-gather", dtype="bfloat16")`.

        Raises:
          ValueError: as `by`; or a kind that no collective has, or axes that are no tuple, which nothing could equal.
        """
        if where.get("kind", KINDS[0]) not in KINDS:
            raise ValueError(f"kind={where['kind']!r} is no collective; use {', '.join(KINDS)}")
        if not isinstance(where.get("axes", ()), tuple):
            raise ValueError(f"axes={where['axes']!r} is no tuple of axes; use for example axes=('fsdp',)")
        self._check(*where)
        chosen = Ledger(one for one in self if all(getattr(one, field) == v for field, v in where.items()))
        return chosen.by(value=value).get((), 0)

    @staticmethod
    def _check(*fields: str) -> None:
        if unknown := set(fields) - set(FIELDS):
            raise ValueError(f"a collective has no {sorted(unknown)}; use {', '.join(FIELDS)}")

    def __str__(self) -> str:
        """A table with one line for each collective."""
        flags = ("asynchronous", "overlapped", "in_loop", "conditional")
        rows = [("kind", "axes", "dtype", "count", "bytes", "")]
        for one in self:
            notes = " ".join(flag for flag in flags if getattr(one, flag))
            count = "?" if one.count is None else str(one.count)
            rows.append((one.kind, "+".join(one.axes), one.dtype, count, f"{one.bytes:,}", notes))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        align = "<<<>><"
        cells = ([f"{cell:{a}{w}}" for cell, a, w in zip(row, align, widths, strict=True)] for row in rows)
        return "\n".join("  ".join(row).rstrip() for row in cells)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where in the program an equation or instruction stands."""

    times: int | None = 1
    asynchronous: bool = False
    overlapped: bool = False
    in_loop: bool = False
    conditional: bool = False

    def loop(self, trips: int | None) -> "_Place":
        times = None if trips is None or self.times is None else self.times * trips
        return dataclasses.replace(self, times=times, in_loop=True)

    def collectives(
        self, kind: str, axes: tuple[str, ...], group: int, buffers: Iterable[tuple[str, int]]
    ) -> Iterator[Collective]:
        """One for each dtype among the input `buffers` (dtype, bytes), unless alone in its group or never run."""
        place = dataclasses.asdict(self)
        times = place.pop("times")
        size: dict[str, int] = {}
        for dtype, nbytes in buffers:
            size[dtype] = size.get(dtype, 0) + nbytes * (group if kind == "all-gather" else 1)
        if group > 1 and times != 0:
            for dtype, nbytes in size.items():
                yield Collective(kind, axes, dtype, times, nbytes * (1 if times is None else times), **place)

    def branches(self, walks: Iterable[Callable[["_Place"], Iterator[Collective]]]) -> Iterator[Collective]:
        """The branch that sends most; `conditional` unless all branches run the same collectives."""
        ledgers = [Ledger(walk(self)) for walk in walks]
        most = max(range(len(ledgers)), key=lambda i: sum(one.bytes for one in ledgers[i]))
        same = all(ledger == ledgers[0] for ledger in ledgers)
        return (one if same else dataclasses.replace(one, conditional=True) for one in ledgers[most])


def _from_jaxpr(jaxpr: Any, mesh: Any, place: _Place) -> Iterator[Collective]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if kind := PRIMITIVES.get(name.removesuffix("_start")):
            named = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
            named = (named,) if isinstance(named, str) else named
            if unknown := set(named) - set(mesh.axis_names):
                raise ValueError(
                    f"{name} runs over {sorted(unknown)}, mesh has {mesh.axis_names}; give the mesh of the shard_map"
                )
            axes = tuple(axis for axis in mesh.axis_names if axis in named and mesh.shape[axis] > 1)
            group = math.prod(mesh.shape[axis] for axis in axes)
            if parts := eqn.params.get("axis_index_groups"):
                axes, group = (f"{len(parts[0])} of {'+'.join(axes)}",), len(parts[0])
            avals = [v.aval for v in eqn.invars[: 1 if kind == "ragged-all-to-all" else None]]
            yield from place.collectives(kind, axes, group, [(a.dtype.name, a.size * a.dtype.itemsize) for a in avals])
        elif name == "cond":
            walks = [functools.partial(_from_jaxpr, branch.jaxpr, mesh) for branch in eqn.params["branches"]]
            yield from place.branches(walks)
        else:
            inner = place.loop(eqn.params.get("length")) if name in ("scan", "while") else place
            for value in eqn.params.values():
                for sub in value if isinstance(value, tuple) else (value,):
                    sub = getattr(sub, "jaxpr", sub)
                    if hasattr(sub, "eqns"):
                        yield from _from_jaxpr(sub, mesh, inner)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str  # "f32[8,3]{1,0}", or a tuple of those in parentheses
    opcode: str
    operands: tuple[str, ...]
    rest: str  # attributes, metadata, backend config

    @property
    def called(self) -> list[str]:
        """Computations that it runs, but for `while` and `conditional`."""
        names = re.findall(r"\b(?:calls|to_apply|called_computations)=(\{[^}]*\}|%?[\w.\-]+)", self.rest)
        return [name for found in names for name in re.findall(r"[\w.\-]+", found)]


class _Hlo:
    """The text of one HLO module: its computations, and a walk through them in the order of the schedule."""

    def __init__(self, text: str, mesh: tuple[tuple[str, int], ...]) -> None:
        self.mesh = mesh
        self.computations: dict[str, list[_Instruction]] = {}
        block: list[_Instruction] = []
        for line in text.splitlines():
            if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                block = self.computations.setdefault(head[2], [])
                if head[1]:
                    self.entry = head[2]
            elif found := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)", line):
                shape, rest = _split(found[2]) if found[2].startswith("(") else found[2].split(" ", 1)
                opcode, rest = rest.strip().split("(", 1)
                operands, rest = _split("(" + rest)
                block.append(_Instruction(found[1], shape, opcode, tuple(re.findall(r"%([\w.\-]+)", operands)), rest))

    def walk(self, name: str = "", place: _Place = _Place()) -> Iterator[Collective]:
        block = self.computations[name or self.entry]
        shapes = {i.name: i.shape for i in block}
        for position, i in enumerate(block):
            here = place
            if '"is_sync":true' in i.rest:
                here = dataclasses.replace(place, asynchronous=False, overlapped=False)
            elif i.opcode.endswith("-start"):
                here = dataclasses.replace(place, asynchronous=True, overlapped=self._overlapped(block, position))
            kind = "collective-permute" if i.opcode == "send" else i.opcode.removesuffix("-start")
            if kind in KINDS:
                axes, group = self._axes(kind, i)
                operands = i.operands[:1] if kind == "ragged-all-to-all" else i.operands
                buffers = [buffer for operand in operands for buffer in _buffers(shapes[operand])]
                yield from here.collectives(kind, axes, group, buffers)
            elif i.opcode == "while":
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', i.rest)
                for part in re.findall(r"\b(?:condition|body)=%?([\w.\-]+)", i.rest):
                    yield from self.walk(part, here.loop(int(trips[1]) if trips else None))
            elif i.opcode == "conditional":
                found = re.search(r"branch_computations=\{([^}]*)\}", i.rest)
                named = found[1] if found else " ".join(re.findall(r"(?:true|false)_computation=(\S+)", i.rest))
                branches = re.findall(r"[\w.\-]+", named)
                yield from here.branches([functools.partial(self.walk, branch) for branch in branches])
            else:
                for called in i.called:
                    yield from self.walk(called, here)

    def _overlapped(self, block: list[_Instruction], start: int) -> bool:
        """Whether compute stands between a start and its done."""
        name = block[start].name
        rest = block[start + 1 :]
        between = itertools.takewhile(lambda i: not (i.opcode.endswith("-done") and name in i.operands), rest)
        return any(map(self._computes, between))

    def _computes(self, i: _Instruction) -> bool:
        """Whether it computes more than a scalar, itself or in what it calls."""
        if MOVES.fullmatch(i.opcode) or i.opcode.endswith("-done") or i.opcode.removesuffix("-start") in KINDS:
            return False
        if i.opcode in ("fusion", "call", "while", "async-start"):
            called = i.called + re.findall(r"\bbody=%?([\w.\-]+)", i.rest)
            return any(self._computes(inner) for name in called for inner in self.computations[name])
        return not re.match(r"\w+\[\]", i.shape)

    def _axes(self, kind: str, i: _Instruction) -> tuple[tuple[str, ...], int]:
        """The mesh axes that a collective runs over, and the number of devices in a group."""
        sizes = dict(self.mesh)
        if kind == "collective-permute":
            # A send to the host has no pairs, and an exchange with oneself no axes: both are groups of one.
            found = re.search(r'source_target_pairs="?\{((?:\{\d+,\d+\},?)*)\}', i.rest)
            pairs = np.array(re.findall(r"(\d+),(\d+)", found[1] if found else ""), int).reshape(-1, 2)
            sources, targets = (np.array(np.unravel_index(ids, tuple(sizes.values()))) for ids in pairs.T)
            moved = (sources != targets).any(axis=1)
            axes = tuple(axis for axis, differs in zip(sizes, moved, strict=True) if differs)
            return axes, math.prod(sizes[axis] for axis in axes)
        groups = _groups(i.rest, math.prod(sizes.values()))
        return _axes_of(frozenset(map(frozenset, groups)), self.mesh), max(map(len, groups))


def _split(text: str) -> tuple[str, str]:
    """What stands in the parentheses that `text` opens with, and what follows them."""
    depth = 0
    for position, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if not depth:
            return text[: position + 1], text[position + 1 :]
    raise ValueError(f"HLO text is cut off: no closing parenthesis in {text[:80]!r}; give all of compiled.as_text()")


def _buffers(shape: str) -> list[tuple[str, int]]:
    """(dtype, bytes) of each array in a shape; tokens are none."""
    found = re.findall(r"(\w+)\[([\d,<=]*)\]", shape)
    arrays = [
        (_dtype(dtype), math.prod(map(int, re.findall(r"\d+", dims)))) for dtype, dims in found if dtype != "token"
    ]
    return [(dtype, elements * jax.numpy.dtype(dtype).itemsize) for dtype, elements in arrays]


def _dtype(hlo: str) -> str:
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
        lists = [[int(n) for n in group.split(",")] for group in re.findall(r"[\d,]+(?=\})", found[1] or "")]
        return lists or [list(range(devices))]
    if found := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, dims, order = ([int(n) for n in part.split(",")] if part else None for part in found.groups())
        return np.arange(math.prod(dims or ())).reshape(dims).transpose(order).reshape(shape).tolist()
    if found := re.match(r"mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        place = np.array(np.unravel_index(np.arange(devices), tuple(sizes.values())))
        group = place.copy()
        for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found[4]):
            size, axis = int(part or sizes[name]), list(sizes).index(name)
            stride = sizes[name] // (int(before or 1) * size)
            group[axis] -= place[axis] // stride % size * stride
        _, label = np.unique(group, axis=1, return_inverse=True)
        dims, order = ([int(n) for n in part.split(",")] if part else None for part in (found[2], found[3]))
        ids = np.arange(devices).reshape(dims or [devices]).transpose(order).ravel()
        return [ids[label.ravel() == n].tolist() for n in range(label.max() + 1)]
    raise ValueError(
        f"form of replica_groups not known: {text[:60]!r}; known: {{{{0,1}}}}, [4,2]<=[2,4]T(1,0), mesh['a'=2] {{'a'}}"
    )


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
