"""A compiled program as kernels, collectives and loops, in the order in which they are launched.

What becomes of the instructions of a `Module`:

    fusion, dot, custom-call, ...   ->  Kernel           with its products and bytes
    all-reduce, all-reduce-start    ->  Start            of a collective
    copy-start to or from the host  ->  HostCopy
    *-done                          ->  Done             waits for a Start or a HostCopy
    while, conditional              ->  While, Choice    with operations inside
    parameter, tuple, bitcast, ...  ->  nothing          no kernel runs
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import jax

from ...program.collectives import on_the_wire
from .hlo import Instruction, Module, arrays, bits, nbytes
from .products import Product, products

# Instructions that only move, cast or fill memory. They are not enough compute to overlap with a collective.
MOVES = frozenset(
    "parameter constant tuple get-tuple-element bitcast bitcast-convert copy copy-start convert reshape transpose pad "
    "iota broadcast slice dynamic-slice dynamic-update-slice concatenate reverse partition-id replica-id after-all "
    "send recv".split()
)
# Instructions that the compiler resolves, and for which no kernel runs.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier domain "
    "add-dependency get-dimension-size recv recv-done".split()
)
_HOST = ":S(5)"  # a layout in the host's memory, by XLA's number of that memory
_HOST_COPIES = frozenset("fusion fusion-start copy copy-start dynamic-slice dynamic-update-slice".split())
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))
_VIEWS = frozenset(("bitcast", "reshape", "tuple"))
_ELEMENTWISE = frozenset(
    "abs add and cbrt ceil clamp compare convert copy cosine divide exponential exponential-minus-one floor is-finite "
    "log log-plus-one logistic maximum minimum multiply negate not or popcnt power remainder round-nearest-afz "
    "round-nearest-even rsqrt select shift-left shift-right-arithmetic shift-right-logical sign sine sqrt subtract tan "
    "tanh xor".split()
)
_UPDATES = frozenset(("dynamic-update-slice", "scatter"))  # they write into their first operand


@dataclass(frozen=True)
class Kernel:
    """One kernel: a fusion, a library call, or an instruction that is neither.

    Attributes:
      name: name of its instruction in HLO.
      source: its origin by JAX's names ("jit(_train)/.../dot_general"); "" if the compiler made it.
      kind: kind of its products ("matmul", "convolution", "attention", "attention backward"), or "memory" without any.
      label: its kind in HLO: "loop fusion", "copy", "__cublas$lt$matmul".
      products: its matrix products.
      read, written: bytes.
      computes: it computes more than a scalar, and not only copies and casts: enough to overlap with a collective.
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
        """FLOPs of its products; other arithmetic takes less time than its bytes."""
        return sum(product.flops for product in self.products)


@dataclass(frozen=True)
class Start:
    """The start of a collective.

    Attributes:
      name: name of its instruction; a `Done` waits for it.
      source: its origin by JAX's names.
      kind, axes: as in `Collective`.
      bytes: size of the whole buffer, of one execution, as `Collective` counts it.
      groups: devices that communicate, as positions in the mesh; for a permute its pairs.
      waits: no kernel runs until it is done.
      buffers: `bytes` by dtype.
      ranks: number of devices of one group.
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
    """The start of a copy between the device's memory and its host's.

    Attributes:
      name: name of its instruction; a `Done` waits for it.
      source: its origin by JAX's names.
      to_host: the copy goes to the host, and not from it.
      bytes: bytes of one execution.
      waits: no kernel runs until it is done.
    """

    name: str
    source: str
    to_host: bool
    bytes: int
    waits: bool


@dataclass(frozen=True)
class Done:
    """The point at which the collective or copy called `name` must have ended."""

    name: str


@dataclass(frozen=True)
class While:
    """A loop.

    Attributes:
      name: name of its instruction.
      trips: number of iterations; None if unknown. A fraction is a share of the iterations of the loop around it.
      body: operations of one iteration, those of the condition included.
      paces: the share of those iterations in which devices wait for this loop.
      rank: the only rank that runs the loop; None if all do.
    """

    name: str
    trips: int | Fraction | None
    body: "tuple[Operation, ...]"
    paces: Fraction | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Choice:
    """A conditional, or a loop over tokens that overflow their experts' slots: one of its branches runs.

    Attributes:
      name: name of its instruction.
      branches: the operations of each branch.
      overflow: one branch is the loop over tokens that overflow, with all its iterations; the other one does nothing.
    """

    name: str
    branches: "tuple[tuple[Operation, ...], ...]"
    overflow: bool = False


Operation = Kernel | Start | HostCopy | Done | While | Choice


def loops_of_ranks(operations: Sequence[Operation]) -> dict[int, list[Operation]]:
    """Return the loops that only one rank runs, by rank. A device runs its own rank's, like one branch of several."""
    loops: dict[int, list[Operation]] = {}
    for operation in operations:
        if isinstance(operation, While) and operation.rank is not None:
            loops.setdefault(operation.rank, []).append(dataclasses.replace(operation, rank=None))
    return loops


def num_devices_of(text: str) -> int:
    """Return the number of devices that a compiled program is for."""
    header = match[0] if (match := re.search(r"^HloModule.*", text, re.MULTILINE)) else ""
    return math.prod(int(number) for number in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header))


class Executable:
    """A compiled program.

    Args:
      text: `compiled.as_text()`; scheduled, as every compiled program is.
      mesh: the mesh that it was compiled for; without it, collectives are left out.

    Attributes:
      operations: the operations of the entry, in the order in which they are launched.
      module: the parsed text.

    Raises:
      ValueError: the program is for another number of devices than `mesh` has.
    """

    def __init__(self, text: str, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None) -> None:
        self._with_collectives = mesh is not None
        if mesh is not None and (num_devices := num_devices_of(text)) != mesh.size:
            raise ValueError(
                f"mesh has {mesh.size} devices, the program {num_devices}; give the mesh that it was compiled for"
            )
        self.module = Module(text, tuple(mesh.shape.items()) if mesh is not None else ())
        self._blocks: dict[str, tuple[Operation, ...]] = {}  # computation -> its operations
        self.operations = self._block(self.module.entry)

    def _block(self, name: str) -> tuple[Operation, ...]:
        """Return the operations of a computation."""
        if name not in self._blocks:  # several instructions may call one computation
            block = self.module.computations[name]
            shapes = {instr.name: instr.shape for instr in block}
            siblings = {instr.name: instr for instr in block}
            self._blocks[name] = tuple(
                operation for instr in block for operation in self._operations(instr, shapes, siblings)
            )
        return self._blocks[name]

    def _operations(
        self, instr: Instruction, shapes: dict[str, str], siblings: Mapping[str, Instruction]
    ) -> Iterator[Operation]:
        """Yield the operations of one instruction; `shapes` and `siblings` hold all of its computation by name."""
        # 1. Collectives and copies. Each of them runs beside the kernels until its done.
        if instr.collective:
            yield from self._start(instr, instr, shapes)
        elif instr.opcode == "async-start":
            yield from self._asynchronous(instr)
        elif instr.opcode in _HOST_COPIES and _HOST in "".join((instr.shape, *(shapes[x] for x in instr.operands))):
            yield self._host_copy(instr, shapes)
        elif instr.opcode == "fusion-start":  # jax 0.12: compute on a second stream, counted as if on the first
            yield self._kernel(dataclasses.replace(instr, opcode="fusion"), shapes)
        elif instr.opcode.endswith(("-done", "-update")) and instr.opcode != "recv-done":
            yield Done(instr.operands[0])
        # 2. Loops and branches.
        elif instr.opcode == "while":
            parts = re.findall(r"\b(?:condition|body)=%?([\w.\-]+)", instr.rest)
            runs, trips = instr.runs, self.module.trips(instr, siblings)
            # GPUs do not run the condition of a loop whose length is known.
            parts = parts if trips is None else re.findall(r"\bbody=%?([\w.\-]+)", instr.rest)
            body = tuple(operation for part in parts for operation in self._block(part))
            loop = While(instr.name, trips, body, runs.paces, runs.rank)
            # A loop over tokens that overflow is a choice between none and the most of its iterations.
            yield Choice(instr.name, ((), (loop,)), overflow=True) if runs.is_upper_bound else loop
        elif instr.opcode == "conditional":
            yield Choice(instr.name, tuple(self._block(branch) for branch in instr.branches))
        elif instr.opcode == "call":
            for called in instr.called:
                yield from self._block(called)
        # 3. Everything else is a kernel, unless the compiler resolves it.
        elif instr.opcode not in _FREE and instr.target != "AllocateBuffer":
            yield self._kernel(instr, shapes)

    def _kernel(self, instr: Instruction, shapes: dict[str, str]) -> Kernel:
        """Return the kernel of an instruction. Its kind is that of its largest product."""
        kernel_products = products(self.module, instr, shapes)
        kind = max(kernel_products, key=lambda product: product.flops).kind if kernel_products else "memory"
        read, written = traffic(self.module, instr, shapes)
        return Kernel(
            instr.name, instr.source, kind, _label(instr), kernel_products, read, written, self._computes(instr)
        )

    def _host_copy(self, instr: Instruction, shapes: dict[str, str]) -> HostCopy:
        """Return the copy that an instruction starts between device and host."""
        # A copy without a second half blocks the device.
        waits = not instr.opcode.endswith("-start")
        roots = (inner for name in instr.called for inner in self.module.computations[name] if inner.root)
        result = next(roots, instr)
        kernel = dataclasses.replace(instr, opcode="fusion") if instr.called else instr
        to_host = _HOST in result.shape.partition("}")[0]  # a copy-start's shape is (result, operand, context)
        return HostCopy(instr.name, instr.source, to_host, traffic(self.module, kernel, shapes)[1], waits)

    def _computes(self, instr: Instruction) -> bool:
        """Return whether an instruction computes more than a scalar, and does not only move memory."""
        if instr.opcode == "fusion":
            return any(self._computes(inner) for name in instr.called for inner in self.module.computations[name])
        return instr.opcode not in MOVES and not re.match(r"\w+\[\]", instr.shape)

    def _start(self, instr: Instruction, outer: Instruction, shapes: dict[str, str]) -> Iterator[Start]:
        """Yield a collective, unless collectives are left out or it sends nothing.

        `outer` starts the asynchronous computation around it, or is the collective itself.
        """
        if not self._with_collectives:
            return
        if buffers := self.module.moved(instr, shapes):
            axes, ranks = self.module.axes(instr)
            # In one instruction, or in two that the compiler has marked as synchronous, a collective blocks the device.
            is_split = outer.opcode.endswith("-start") or outer.opcode == "send"
            waits = not is_split or '"is_sync":true' in outer.rest
            groups = tuple(tuple(ids) for ids in self.module.groups(instr))
            size = sum(buffers.values())
            yield Start(outer.name, instr.source, instr.collective, axes, size, groups, waits, buffers, ranks)

    def _asynchronous(self, outer: Instruction) -> Iterator[Operation]:
        """Yield the operations of an asynchronous computation."""
        for called in outer.called:
            block = self.module.computations[called]
            shapes = {instr.name: instr.shape for instr in block}
            if any(instr.collective for instr in block):
                # The `Start` bears the name of the outer instruction, for which a `Done` waits.
                for instr in block:
                    yield from self._start(instr, outer, shapes) if instr.collective else ()
            else:  # compute on a second stream, counted as if on the first
                yield from self._block(called)


def _label(instr: Instruction) -> str:
    """Return the kind of kernel that an instruction is in HLO; see `Kernel.label`."""
    if instr.opcode == "custom-call":
        return instr.target or instr.opcode
    if instr.opcode == "fusion":
        kind = re.search(r"\bkind=k(\w+)", instr.rest)
        backend = re.search(r'"fusion_backend_config":\{"kind":"_*(\w+)"', instr.rest)
        return f"{backend[1] if backend else kind[1].lower() if kind else ''} fusion".strip()
    return instr.opcode


def traffic(module: Module, instr: Instruction, shapes: dict[str, str]) -> tuple[int, int]:
    """Return the bytes (read, written) of an instruction that runs as a kernel.

    Every operand is read once and every result written once, with two exceptions, as in XLA's own cost analysis. If a
    kernel takes a slice of an array (a layer of a stack, the rows of an embedding), or of a value that is computed from
    it element by element, only the slice is read. If it updates an array in place, only the changed part is written.

    Caches are ignored, although an operand that an earlier kernel has just written may still be in L2. `shapes` are
    those of all instructions of its computation, by name.
    """
    if instr.opcode == "fusion":
        return _traffic_of_fusion(module.computations[instr.called[0]])
    if instr.opcode in _SLICES:
        # Of a slice, read what is returned, and the indices.
        return nbytes(instr.shape) + sum(nbytes(shapes[index]) for index in instr.operands[1:]), nbytes(instr.shape)
    if instr.opcode in _UPDATES:
        # The rest of the first operand stays where it is. A scatter reads the elements to which it adds.
        updates, is_scatter = _updates_of(instr), instr.opcode == "scatter"
        indices = instr.operands[len(updates) : -len(updates)] if is_scatter else instr.operands[2:]
        changed = sum(nbytes(shapes[operand]) for operand in updates)
        return changed * (1 + is_scatter) + sum(nbytes(shapes[operand]) for operand in indices), changed
    read = sum(nbytes(shapes[operand]) for operand in instr.operands)
    # The shape of a copy-start contains its operand too.
    return read, read if instr.opcode == "copy-start" else nbytes(instr.shape)


def _updates_of(instr: Instruction) -> Sequence[str]:
    """Return the operands with the new values. The operands of a scatter are n targets, indices and n updates."""
    return instr.operands[len(instr.operands) // 2 + 1 :] if instr.opcode == "scatter" else instr.operands[1:2]


def _traffic_of_fusion(block: list[Instruction]) -> tuple[int, int]:
    """Return the bytes (read, written) of a kernel that fuses these instructions."""
    instructions = {instr.name: instr for instr in block}
    users: dict[str, list[tuple[Instruction, int]]] = {}  # name -> (user, position among its operands)
    for instr in block:
        for position, operand in enumerate(instr.operands):
            users.setdefault(operand, []).append((instr, position))
    # The kernel writes its root, and the values of which the root is a view or a tuple.
    results = [instr.name for instr in block if instr.root]
    for name in results:
        results += instructions[name].operands if instructions[name].opcode in _VIEWS else []

    def is_in_place(update: Instruction) -> bool:
        """Return whether an update changes a parameter of the kernel, and not a value that the kernel computes."""
        target = update
        while target.opcode in (*_UPDATES, "bitcast", "reshape"):
            target = instructions[target.operands[0]]
        return target.opcode == "parameter"

    def bytes_read(parameter: Instruction) -> float:
        """Return the bytes that the kernel reads of a parameter."""
        total, width = 0.0, bits(arrays(parameter.shape)[0][0])
        pending, seen = [parameter.name], {parameter.name}
        while pending:
            for user, position in users.get(pending.pop(), ()):
                if user.opcode in _VIEWS or (user.opcode in _ELEMENTWISE and user.name not in results):
                    # The kernel computes only those elements of this value that its readers read.
                    pending += [] if user.name in seen else [user.name]
                    seen.add(user.name)
                elif user.opcode in _SLICES and position == 0:
                    total += width / 8 * sum(math.prod(dims) for _, dims in arrays(user.shape))
                elif user.opcode in _UPDATES and position == 0 and is_in_place(user):
                    # A scatter reads what it adds to. A dynamic-update-slice overwrites without reading.
                    total += nbytes(instructions[user.operands[2]].shape) if user.opcode == "scatter" else 0
                    # What is updated inside the kernel is read by the readers of the result.
                    readers = [] if user.name in results else [reader for reader, _ in users[user.name]]
                    if any(reader.opcode not in (*_SLICES, *_UPDATES) for reader in readers):
                        return nbytes(parameter.shape)
                else:
                    return nbytes(parameter.shape)
        # No parameter is read more than once, however many users it has.
        return min(nbytes(parameter.shape), total)

    def bytes_written(instr: Instruction) -> int:
        """Return the bytes that a result writes."""
        if instr.opcode == "tuple":
            return sum(bytes_written(instructions[operand]) for operand in instr.operands)
        if instr.opcode in ("bitcast", "reshape") and instr.operands:
            return bytes_written(instructions[instr.operands[0]])
        if instr.opcode in _UPDATES and is_in_place(instr):
            return sum(nbytes(instructions[operand].shape) for operand in _updates_of(instr))
        return 0 if instr.opcode == "parameter" else nbytes(instr.shape)

    parameters = [instr for instr in block if instr.opcode == "parameter" and arrays(instr.shape)]
    return round(sum(map(bytes_read, parameters))), sum(bytes_written(instr) for instr in block if instr.root)
