"""A compiled program as kernels, collectives and loops, in the order in which they are launched."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from .entry import KINDS, Place
from .hlo import Instruction, Module, buffers
from .products import Product, products
from .traffic import FREE, traffic


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
    """

    name: str
    source: str
    kind: str
    label: str
    products: tuple[Product, ...]
    read: int
    written: int

    @property
    def flops(self) -> int:
        """Of its products; what else it computes takes less time than its bytes."""
        return sum(product.flops for product in self.products)


@dataclass(frozen=True)
class Start:
    """A collective starts. `kind`, `axes` and `bytes` are those of a `Collective`.

    Attributes:
      name: of its instruction; a `Done` waits for it.
      groups: devices that communicate, as places in the mesh; of a permute its pairs.
      waits: nothing runs beside it.
    """

    name: str
    source: str
    kind: str
    axes: tuple[str, ...]
    bytes: int
    groups: tuple[tuple[int, ...], ...] = dataclasses.field(repr=False)
    waits: bool


@dataclass(frozen=True)
class Done:
    """The collective `name` must have ended."""

    name: str


@dataclass(frozen=True)
class Loop:
    """A `while`: condition and body, `trips` times; None where XLA does not know how often."""

    name: str
    trips: int | None
    body: tuple[Operation, ...]


@dataclass(frozen=True)
class Choice:
    """A `conditional`: one of these runs."""

    name: str
    branches: tuple[tuple[Operation, ...], ...]


Operation = Kernel | Start | Done | Loop | Choice


class Program:
    """A compiled program.

    Args:
      text: `compiled.as_text()`; scheduled, as every compiled program is.
      mesh: the mesh that it was compiled for; without it collectives are left out.

    Its `operations` are those of the entry; each loop has its own.
    """

    def __init__(self, text: str, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None) -> None:
        self._with_collectives = mesh is not None
        self._module = Module(text, tuple(mesh.shape.items()) if mesh is not None else ())
        self._read: dict[str, tuple[Operation, ...]] = {}
        self.operations = self._block(self._module.entry)

    def _block(self, name: str) -> tuple[Operation, ...]:
        if name not in self._read:
            block = self._module.computations[name]
            shapes = {i.name: i.shape for i in block}
            self._read[name] = tuple(operation for i in block for operation in self._operations(i, shapes))
        return self._read[name]

    def _operations(self, i: Instruction, shapes: dict[str, str]) -> Iterator[Operation]:
        kind = "collective-permute" if i.opcode == "send" else i.opcode.removesuffix("-start")
        if kind in KINDS:
            yield from self._start(i, i, kind, shapes)
        elif i.opcode == "async-start":
            yield from self._asynchronous(i)
        elif i.opcode.endswith(("-done", "-update")) and i.opcode != "recv-done":
            yield Done(i.operands[0])
        elif i.opcode == "while":
            parts = re.findall(r"\b(?:condition|body)=%?([\w.\-]+)", i.rest)
            # GPUs do not run the condition of a loop whose length is known.
            parts = parts if i.trips is None else re.findall(r"\bbody=%?([\w.\-]+)", i.rest)
            yield Loop(i.name, i.trips, tuple(operation for part in parts for operation in self._block(part)))
        elif i.opcode == "conditional":
            yield Choice(i.name, tuple(self._block(branch) for branch in i.branches))
        elif i.opcode == "call":
            for called in i.called:
                yield from self._block(called)
        elif i.opcode not in FREE and i.opcode not in ("recv", "recv-done"):
            yield self._kernel(i, shapes)

    def _kernel(self, i: Instruction, shapes: dict[str, str]) -> Kernel:
        found = products(self._module, i, shapes)
        kind = max(found, key=lambda product: product.flops).kind if found else "memory"
        return Kernel(i.name, _source(i), kind, _label(i), found, *traffic(self._module, i, shapes))

    def _start(self, i: Instruction, outer: Instruction, kind: str, shapes: dict[str, str]) -> Iterator[Start]:
        """The collective `i`, which stands alone or in the asynchronous computation that `outer` starts."""
        if not self._with_collectives:
            return
        axes, group = self._module.axes(kind, i)
        operands = i.operands[:1] if kind == "ragged-all-to-all" else i.operands
        sent = [buffer for operand in operands for buffer in buffers(shapes[operand])]
        size = sum(one.bytes for one in Place().collectives(kind, axes, group, sent))
        if size:
            waits = (not outer.opcode.endswith("-start") and outer.opcode != "send") or '"is_sync":true' in outer.rest
            groups = tuple(tuple(ids) for ids in self._module.groups(kind, i))
            yield Start(outer.name, _source(i), kind, axes, size, groups, waits)

    def _asynchronous(self, outer: Instruction) -> Iterator[Operation]:
        for called in outer.called:
            block = self._module.computations[called]
            shapes = {i.name: i.shape for i in block}
            inner = [(i, i.opcode.removesuffix("-start")) for i in block]
            if any(kind in KINDS for _, kind in inner):
                for i, kind in inner:
                    yield from self._start(i, outer, kind, shapes) if kind in KINDS else ()
            else:  # compute on a stream of its own: as if on this one
                yield from self._block(called)


def _source(i: Instruction) -> str:
    found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', i.rest)
    return found[1] if found else ""


def _label(i: Instruction) -> str:
    if i.opcode == "custom-call":
        found = re.search(r'custom_call_target="([^"]*)"', i.rest)
        return found[1] if found else i.opcode
    if i.opcode == "fusion":
        kind = re.search(r"\bkind=k(\w+)", i.rest)
        backend = re.search(r'"fusion_backend_config":\{"kind":"_*(\w+)"', i.rest)
        return f"{backend[1] if backend else kind[1].lower() if kind else ''} fusion".strip()
    return i.opcode
