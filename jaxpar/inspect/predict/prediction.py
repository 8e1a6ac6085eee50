"""predict: seconds of a training step on hardware that is not here, from the program that the compiler scheduled.

The model, in full: the program is walked in the order of its schedule, with one stream of kernels, one of collectives,
and one each way of copies between a device and its host (`offload`): their bytes over the `host_bandwidth`, and kernels
beside them are no slower. A kernel takes what `efficiency` says, a collective what `links` says. An asynchronous
collective or copy runs from its start, after those before it, and its done waits for it; a synchronous one stops the
kernels. While a collective runs, kernels have a part of the device less (`efficiency.busy_share`). Loops count by their
trips. A pipeline's bubble is in the program: its ticks do masked work. Of a conditional the slowest branch is counted,
but not what a dropless mixture computes only where tokens overflow their experts' slots: `Prediction.overflow` has
that.

Devices that are alike differ, and a step takes as long as the slowest of them: its matrix products take 8% longer than
those measured on one, and at the ends of a prediction's interval 0% and 22% (`efficiency.SLOWEST`).

Left out: caches, the launch of the step itself and its input, and clocks and power but for what these shares contain.
"""

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ...backend.machines import hosts_of
from ...backend.text import size
from ...hardware.compiled.compiler_remarks import remarks, unread
from ...hardware.compiled.cost import Costs
from ...hardware.compiled.kernels import Executable
from ...hardware.compiled.memory import program_memory
from ...hardware.hardware import RESERVE, Hardware
from ...model.batches import rows_of
from ..step_view import StepView as Step
from .clock import Clock, Part
from .efficiency import LEAST, MOST, SLOWEST, UPPER_BOUND, is_upper_bound

WIDTH = 100


def longer(spent: Mapping[str, float], other: Mapping[str, float]) -> list[tuple[float, str]]:
    """What takes longer than in another step, by name: how many seconds, most first and what is shorter last."""
    names = dict.fromkeys((*spent, *other))
    return sorted(((spent.get(name, 0.0) - other.get(name, 0.0), name) for name in names), key=lambda x: -x[0])


@dataclass(frozen=True)
class Prediction:
    """A step's time, and what it is made of. `print` it, or take `.json()`; `.lines()` has every kernel.

    All seconds are those of one device and one step: `seconds` = `compute` + `exposed`.

    Attributes:
      seconds: of a step.
      interval: seconds of a step on the best and on the worst of devices that are alike.
      compute: in which kernels run.
      exposed: in which kernels wait for a collective, or for a copy to or from the host.
      hidden: of these, behind kernels.
      slowed: part of `compute`: what kernels lose to collectives that run beside them.
      flops: of a device's matrix products, as the program computes them, recomputation included.
      model_flops: of a device, as the caller counts them, without recomputation; None where not given.
      peak: FLOP/s of a device in the dtype of most of its FLOPs; 0 where it has none.
      rows: of the global batch; 0 where not given.
      devices: number of them.
      hardware: their kind.
      parts: every kernel and collective, in the order in which they first run.
      notes: what could not be known, and what the compiler did unasked.
      overflow: seconds that a step takes longer, at most, where a dropless mixture's tokens find no slot in their
        experts' buffers. They are not in `seconds`: none are needed while no expert gets more than 1.25 times the mean
        load of each rank's tokens. All of them are, where all tokens choose the experts of one rank.
      memory: bytes of a device that the program takes; None where only its text was given.
      usable: bytes of a device that a program may take, all but `RESERVE`; None where not known.
      upper_bound: the hardware's rates are those of the best shape that anybody measured, so that a step takes longer.
    """

    seconds: float
    interval: tuple[float, float]
    compute: float
    exposed: float
    hidden: float
    slowed: float
    flops: int
    model_flops: float | None
    peak: float
    rows: int
    devices: int
    hardware: str
    parts: tuple[Part, ...]
    notes: tuple[str, ...]
    overflow: float = 0.0
    memory: int | None = None
    usable: int | None = None
    upper_bound: bool = False

    @property
    def fits(self) -> bool | None:
        """Whether a device has room for the program; None where that is not known."""
        return None if self.memory is None or self.usable is None else self.memory <= self.usable

    @property
    def rows_per_second(self) -> float:
        """Rows of the global batch per second; times positions per row: tokens."""
        return self.rows / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: `model_flops` over what the peak would do in `seconds` (Chowdhery et al. 2022,
        arXiv:2204.02311, appendix B). None where no model FLOPs were given, or the program has no matrix product.
        """
        if self.model_flops is None or not self.peak:
            return None
        return self.model_flops / (self.seconds * self.peak)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: the same of what is computed, recomputation included."""
        return self.flops / (self.seconds * self.peak) if self.peak else 0.0

    @property
    def by_kind(self) -> dict[str, float]:
        """Seconds of kernels by kind, and exposed ones of collectives and copies, most first; in sum `seconds`."""
        sums: dict[str, float] = {}
        for part in self.parts:
            sums[part.kind] = sums.get(part.kind, 0.0) + (part.exposed if part.way else part.seconds)
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @property
    def collectives(self) -> tuple[Part, ...]:
        """Collectives alone, most exposed first."""
        return tuple(sorted((p for p in self.parts if p.collective), key=lambda p: (-p.exposed, -p.seconds)))

    @property
    def copies(self) -> tuple[Part, ...]:
        """Copies to and from the host alone, most exposed first."""
        return tuple(sorted((p for p in self.parts if p.way == "host"), key=lambda p: (-p.exposed, -p.seconds)))

    def json(self) -> dict[str, Any]:
        """All of it as dicts, lists, text and numbers."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        derived = {name: getattr(self, name) for name in ("fits", "rows_per_second", "mfu", "hfu", "by_kind")}
        parts = [dataclasses.asdict(part) | {"axes": list(part.axes)} for part in self.parts]
        return plain | derived | {"parts": parts, "notes": list(self.notes), "interval": list(self.interval)}

    def lines(self) -> list[str]:
        """One line for each kernel and collective, most seconds first: how often, how long, why, and where from."""
        return [
            f"{1e3 * part.seconds:10.3f} ms  {part.executions:6} x  {part.kind:18}  {part.reason}"
            f"{f'; {1e3 * part.exposed:.3f} ms exposed' if part.way else ''}  [{part.name}] {part.source}"
            for part in sorted(self.parts, key=lambda part: -part.seconds)
        ]

    def __str__(self) -> str:
        least, most = self.interval
        between = f" ({1e3 * least:.1f} to {1e3 * most:.1f})" if least < most else ""
        step = f"{1e3 * self.seconds:.1f} ms a step{between}"
        speed = f", {self.rows_per_second:.2f} rows/s" if self.rows else ""
        bound = " (upper bound)" * self.upper_bound
        head = f"{self.devices} x {self.hardware}: {step}{speed}{bound}"
        if self.fits is False:
            taken, usable = size(self.memory or 0), size(self.usable or 0)
            fault = f"does not fit: it takes {taken} of a device, and may take {usable}; the program below cannot run"
            head = f"{textwrap.fill(fault, WIDTH)}\n{head}"
        shares = [f"{self.hfu:.1%} of the peak" + (f", MFU {self.mfu:.1%}" if self.mfu is not None else "")]
        shares.append(f"kernels {1e3 * self.compute:.1f} ms, of which {1e3 * self.slowed:.1f} ms beside collectives")
        for what, parts in (("collectives", self.collectives), ("copies to and from the host", self.copies)):
            exposed = 1e3 * sum(part.exposed for part in parts)
            hidden = 1e3 * sum(part.seconds for part in parts) - exposed
            if parts or what == "collectives":
                shares.append(f"{what} {hidden:.1f} ms hidden, {exposed:.1f} ms exposed")
        if self.overflow:
            shares.append(f"at most {1e3 * self.overflow:.1f} ms more where tokens overflow their experts' slots")
        kinds = [f"  {kind:20}{1e3 * seconds:10.1f} ms" for kind, seconds in self.by_kind.items()]
        notes = [textwrap.fill(note, WIDTH, subsequent_indent="  ") for note in self.notes]
        return "\n".join([head, *shares, *kinds, *notes])


def predict(
    compiled: jax.stages.Compiled | Executable | str,
    step: Step,
    batch: Any,
    hardware: Hardware,
    model_flops: float | None = None,
) -> Prediction:
    """How long a step takes on `hardware`. Nothing runs.

    Args:
      compiled: `step.compile(batch)`, its text, or that text read as an `Executable`, on devices of that hardware.
      step: gives the mesh; its devices say which of them share a host.
      batch: arrays or `jax.ShapeDtypeStruct`, global.
      hardware: what the devices can do, as `target(...).hardware`.
      model_flops: FLOPs of the step over all devices, without recomputation, such as `named(...).flops(rows, length)`;
        gives the MFU.

    Raises ValueError where `hardware` lacks a number that the program needs, for `server=True`, for a program of
    another platform's devices, and for TPUs, whose programs are not read.
    """
    if why := unread(step.mesh.devices.flat[0].platform):
        raise ValueError(f"predict: {why}; predict for GPUs, such as target('8xH100')")
    platform = step.mesh.devices.flat[0].platform
    needed = "TPU" if hardware.device_kind.startswith("TPU") else "CPU" if hardware.device_kind == "cpu" else "GPU"
    if (made := "CPU" if platform == "cpu" else "GPU") != needed:
        raise ValueError(
            f"predict: the step is compiled for {made} devices, and {hardware.kind} runs other programs; make it for "
            "devices that need not be there: make_train_step(..., mesh=target('8xH100').devices)"
        )
    if step.strategy.server:
        raise ValueError(
            f"{step.strategy} runs several programs and its server's links between them, which the model of predict "
            "has not; print(step.explain(batch)) says what they hold and send"
        )
    memory = program_memory(compiled)["total"] if isinstance(compiled, jax.stages.Compiled) else None
    if not isinstance(compiled, Executable):
        compiled = Executable(compiled if isinstance(compiled, str) else compiled.as_text() or "", step.mesh)
    hosts = hosts_of(step.mesh.devices).ravel().tolist()
    return timed(compiled, hosts, hardware, rows_of(batch), model_flops, platform, memory)


def timed(
    compiled: Executable,
    hosts: Sequence[int],
    hardware: Hardware,
    rows: int,
    model_flops: float | None,
    platform: str,
    memory: int | None,
) -> Prediction:
    """The same of any program; `hosts`: for each place in its mesh the host of its device. `memory`: what it takes of
    a device, None where that is not known.
    """
    alone = len(hosts) == 1
    least, most = (Clock(hardware, hosts, 1.0 if alone else way).time(compiled.operations) for way in (LEAST, MOST))
    clock = Clock(hardware, hosts, 1.0 if alone else SLOWEST)
    seconds = clock.time(compiled.operations)
    worst = seconds
    if clock.overflows:
        worst = Clock(hardware, hosts, clock.slowest, overflow=True).time(compiled.operations)
    bound = (f"{hardware.kind}'s speeds are upper bounds: {UPPER_BOUND}.",) if is_upper_bound(hardware) else ()
    said = remarks(Costs.of(compiled), platform)
    kernels = [part for part in clock.parts if not part.way]
    sent = [part for part in clock.parts if part.way]
    exposed = sum(part.exposed for part in sent)
    return Prediction(
        seconds=seconds,
        interval=(least, most),
        compute=sum(part.seconds for part in kernels),
        exposed=exposed,
        hidden=sum(part.seconds for part in sent) - exposed,
        slowed=sum(part.slowed for part in kernels),
        flops=sum(part.flops for part in kernels),
        model_flops=None if model_flops is None else model_flops / len(hosts),
        peak=clock.peak,
        rows=rows,
        devices=len(hosts),
        hardware=hardware.kind,
        parts=tuple(clock.parts),
        notes=(*bound, *clock.notes, *said),
        overflow=worst - seconds,
        memory=memory,
        usable=None if hardware.memory_bytes is None else int((1 - RESERVE) * hardware.memory_bytes),
        upper_bound=bool(bound),
    )
