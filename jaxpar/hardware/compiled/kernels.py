"""A compiled program as kernels, collectives and loops, in the order in which they are launched."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import jax

from ...program.collectives import on_the_wire
from ...program.trip_counts import OVERFLOW
from .hlo import Instruction, Module, arrays, bits, nbytes
from .products import Product, products

# Instructions that only move, cast or fill memory: a collective behind these alone is not hidden by compute.
MOVES = frozenset(
    "parameter constant tuple get-tuple-element bitcast bitcast-convert copy copy-start convert reshape transpose pad "
    "iota broadcast slice dynamic-slice dynamic-update-slice concatenate reverse partition-id replica-id after-all "
    "send recv".split()
)
# What the compiler resolves: no kernel runs.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier domain "
    "add-dependency get-dimension-size".split()
)
_HOST = ":S(5)"  # XLA's number of the host's memory, in a layout
_COPYING = frozenset("fusion fusion-start copy copy-start dynamic-slice dynamic-update-slice".split())
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand has the new values


@dataclass(frozen=True)
class Kernel:
    """One kernel: a fusion, a call of a library, or an instruction that is neither.

    Attributes:
      name: of its instruction in HLO.
      source: where it comes from, by JAX's names ("jit(_train)/.../dot_general"); "" if the compiler made it.
      kind: of its products ("matmul", "convolution", "attention", "attention backward"), or "memory" if it has none.
      label: what it is in HLO: "loop fusion", "copy", "__cublas$lt$matmul".
      products: what it multiplies.
      read, written: bytes.
      computes: more than a scalar, and not only copies and casts: enough to hide a collective behind.
    """

    name: str
    source: str
    kind: str
    label: str
    products: tuple[Product, ...]
    read: int
    written: int
    computes: bool = True

    @property
    def flops(self) -> int:
        """Of its products; what else it computes takes less time than its bytes."""
        return sum(product.flops for product in self.products)


@dataclass(frozen=True)
class Start:
    """A collective starts. `kind` and `axes` are those of a `Collective`, `bytes` those of one execution.

    Attributes:
      name: of its instruction; a `Done` waits for it.
      groups: devices that communicate, as places in the mesh; of a permute its pairs.
      waits: nothing runs beside it.
      buffers: `bytes` by dtype.
      ranks: devices of one group.
    """

    name: str
    source: str
    kind: str
    axes: tuple[str, ...]
    bytes: int
    groups: tuple[tuple[int, ...], ...] = dataclasses.field(repr=False)
    waits: bool
    buffers: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
    ranks: int = 1

    @property
    def sent(self) -> int:
        """Bytes that a device sends, by the ring convention."""
        return round(self.bytes * on_the_wire(self.kind, self.ranks))


@dataclass(frozen=True)
class HostCopy:
    """A copy between the device's memory and its host's starts.

    Attributes:
      name: of its instruction; a `Done` waits for it.
      source: where it comes from, by JAX's names.
      to_host: else it comes from there.
      bytes: of one execution.
      waits: nothing runs beside it.
    """

    name: str
    source: str
    to_host: bool
    bytes: int
    waits: bool


@dataclass(frozen=True)
class Done:
    """The collective, or the copy, `name` must have ended."""

    name: str


@dataclass(frozen=True)
class While:
    """A `while`: condition and body, `trips` times; None where nobody knows how often. A fraction is of the iterations
    of the loop around it, in `paces` of which devices wait for this one. With a `rank` it is that one's alone.
    """

    name: str
    trips: int | Fraction | None
    body: "tuple[Operation, ...]"
    paces: Fraction | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Choice:
    """A `conditional`: one of these runs. `overflow`: one has what finds no slot in experts' buffers, or nothing."""

    name: str
    branches: "tuple[tuple[Operation, ...], ...]"
    overflow: bool = False


Operation = Kernel | Start | HostCopy | Done | While | Choice


def of_ranks(operations: Sequence[Operation]) -> dict[int, list[Operation]]:
    """The loops that ranks have of their own, by rank. As of a conditional's branches, a device runs one's."""
    found: dict[int, list[Operation]] = {}
    for one in operations:
        if isinstance(one, While) and one.rank is not None:
            found.setdefault(one.rank, []).append(dataclasses.replace(one, rank=None))
    return found


def devices_of(text: str) -> int:
    """How many devices a compiled program is for."""
    header = found[0] if (found := re.search(r"^HloModule.*", text, re.MULTILINE)) else ""
    return math.prod(int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header))


class Executable:
    """A compiled program.

    Args:
      text: `compiled.as_text()`; scheduled, as every compiled program is.
      mesh: the mesh that it was compiled for; without it collectives are left out.

    Its `operations` are those of the entry; each loop has its own. Its `module` is what was read.

    Raises ValueError where the program is for another number of devices than `mesh` has.
    """

    def __init__(self, text: str, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None) -> None:
        self._with_collectives = mesh is not None
        if mesh is not None and (devices := devices_of(text)) != mesh.size:
            raise ValueError(
                f"mesh has {mesh.size} devices, the program {devices}; give the mesh that it was compiled for"
            )
        self.module = Module(text, tuple(mesh.shape.items()) if mesh is not None else ())
        self._read: dict[str, tuple[Operation, ...]] = {}
        self.operations = self._block(self.module.entry)

    def _block(self, name: str) -> tuple[Operation, ...]:
        if name not in self._read:
            block = self.module.computations[name]
            shapes = {i.name: i.shape for i in block}
            beside = {i.name: i for i in block}
            self._read[name] = tuple(operation for i in block for operation in self._operations(i, shapes, beside))
        return self._read[name]

    def _operations(
        self, i: Instruction, shapes: dict[str, str], beside: Mapping[str, Instruction]
    ) -> Iterator[Operation]:
        if i.collective:
            yield from self._start(i, i, shapes)
        elif i.opcode == "async-start":
            yield from self._asynchronous(i)
        elif _HOST in "".join((i.shape, *(shapes[x] for x in i.operands))) and i.opcode in _COPYING:
            yield self._host_copy(i, shapes)
        elif i.opcode == "fusion-start":  # jax 0.12; compute on a stream of its own: as if on this one
            yield self._kernel(dataclasses.replace(i, opcode="fusion"), shapes)
        elif i.opcode.endswith(("-done", "-update")) and i.opcode != "recv-done":
            yield Done(i.operands[0])
        elif i.opcode == "while":
            parts = re.findall(r"\b(?:condition|body)=%?([\w.\-]+)", i.rest)
            # GPUs do not run the condition of a loop whose length is known.
            trips = self.module.trips(i, beside)
            parts = parts if trips is None else re.findall(r"\bbody=%?([\w.\-]+)", i.rest)
            body = tuple(operation for part in parts for operation in self._block(part))
            share = i.share
            yield While(i.name, trips, body, share and share.paces, share and share.rank)
        elif i.opcode == "conditional":
            overflow = i.source.endswith(f"{OVERFLOW}/cond")
            yield Choice(i.name, tuple(self._block(branch) for branch in i.branches), overflow)
        elif i.opcode == "call":
            for called in i.called:
                yield from self._block(called)
        elif i.opcode not in _FREE and i.opcode not in ("recv", "recv-done") and i.target != "AllocateBuffer":
            yield self._kernel(i, shapes)

    def _kernel(self, i: Instruction, shapes: dict[str, str]) -> Kernel:
        found = products(self.module, i, shapes)
        kind = max(found, key=lambda product: product.flops).kind if found else "memory"
        return Kernel(i.name, i.source, kind, _label(i), found, *traffic(self.module, i, shapes), self._computes(i))

    def _host_copy(self, i: Instruction, shapes: dict[str, str]) -> HostCopy:
        waits = not i.opcode.endswith("-start")
        called = next((one for name in i.called for one in self.module.computations[name] if one.root), i)
        kernel = dataclasses.replace(i, opcode="fusion") if i.called else i
        to_host = _HOST in called.shape.partition("}")[0]  # of a copy's start the result comes first
        return HostCopy(i.name, i.source, to_host, traffic(self.module, kernel, shapes)[1], waits)

    def _computes(self, i: Instruction) -> bool:
        if i.opcode == "fusion":
            return any(self._computes(inner) for name in i.called for inner in self.module.computations[name])
        return i.opcode not in MOVES and not re.match(r"\w+\[\]", i.shape)

    def _start(self, i: Instruction, outer: Instruction, shapes: dict[str, str]) -> Iterator[Start]:
        """The collective `i`, which stands alone or in the asynchronous computation that `outer` starts."""
        if not self._with_collectives:
            return
        if buffers := self.module.moved(i, shapes):
            axes, ranks = self.module.axes(i)
            waits = (not outer.opcode.endswith("-start") and outer.opcode != "send") or '"is_sync":true' in outer.rest
            groups = tuple(tuple(ids) for ids in self.module.groups(i))
            yield Start(outer.name, i.source, i.collective, axes, sum(buffers.values()), groups, waits, buffers, ranks)

    def _asynchronous(self, outer: Instruction) -> Iterator[Operation]:
        for called in outer.called:
            block = self.module.computations[called]
            shapes = {i.name: i.shape for i in block}
            if any(i.collective for i in block):
                for i in block:
                    yield from self._start(i, outer, shapes) if i.collective else ()
            else:  # compute on a stream of its own: as if on this one
                yield from self._block(called)


def _label(i: Instruction) -> str:
    if i.opcode == "custom-call":
        return i.target or i.opcode
    if i.opcode == "fusion":
        kind = re.search(r"\bkind=k(\w+)", i.rest)
        backend = re.search(r'"fusion_backend_config":\{"kind":"_*(\w+)"', i.rest)
        return f"{backend[1] if backend else kind[1].lower() if kind else ''} fusion".strip()
    return i.opcode


def traffic(module: Module, i: Instruction, shapes: dict[str, str]) -> tuple[int, int]:
    """Bytes (read, written) of one instruction that runs as a kernel; `shapes` as for `products`.

    Every operand is read once and every result written once, with two exceptions, as in XLA's own cost analysis: of an
    array of which a kernel takes a slice (a layer of a stack, the rows of an embedding) it reads the slice, and an
    array that it updates in place it writes where it changes. Caches are left out: an operand that an earlier kernel
    has just written may still be in L2.
    """
    if i.opcode == "fusion":
        return _of_fusion(module.computations[i.called[0]])
    if i.opcode in _SLICES:
        return nbytes(i.shape) + sum(nbytes(shapes[operand]) for operand in i.operands[1:]), nbytes(i.shape)
    if i.opcode in _UPDATES:
        changed = nbytes(shapes[i.operands[_UPDATES[i.opcode]]])
        return changed + sum(nbytes(shapes[operand]) for operand in i.operands[1:]), changed
    read = sum(nbytes(shapes[operand]) for operand in i.operands)
    return read, read if i.opcode == "copy-start" else nbytes(i.shape)


def _of_fusion(block: list[Instruction]) -> tuple[int, int]:
    """Of the instructions that one kernel fuses."""
    named = {i.name: i for i in block}
    users: dict[str, list[tuple[Instruction, int]]] = {}
    for i in block:
        for place, operand in enumerate(i.operands):
            users.setdefault(operand, []).append((i, place))

    def read(name: str, width: int) -> float:
        """Bytes that the users of an array of this many bits per element read."""
        total = 0.0
        for user, place in users.get(name, ()):
            if user.opcode in ("bitcast", "reshape", "tuple"):
                total += read(user.name, width)
            elif user.opcode in _SLICES and place == 0:
                total += width / 8 * sum(math.prod(dims) for _, dims in arrays(user.shape))
            elif user.opcode in _UPDATES and place == 0:
                # Added to in place: what changes is read first. A slice is overwritten unread.
                total += nbytes(named[user.operands[2]].shape) if user.opcode == "scatter" else 0
            else:
                return float("inf")
        return total

    def written(i: Instruction) -> int:
        if i.opcode == "tuple":
            return sum(written(named[operand]) for operand in i.operands)
        if i.opcode in ("bitcast", "reshape") and i.operands:
            return written(named[i.operands[0]])
        if i.opcode in _UPDATES:
            return nbytes(named[i.operands[_UPDATES[i.opcode]]].shape)
        return 0 if i.opcode == "parameter" else nbytes(i.shape)

    inputs = [i for i in block if i.opcode == "parameter" and arrays(i.shape)]
    total = sum(min(nbytes(i.shape), read(i.name, bits(arrays(i.shape)[0][0]))) for i in inputs)
    return round(total), sum(written(i) for i in block if i.root)
