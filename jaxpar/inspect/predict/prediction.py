"""predict: the seconds of a training step on hardware that need not be present, from the compiler's scheduled program.

The model in full: the program is walked in the order of its schedule. There is one stream of kernels, one of
collectives, and one for each direction of copies between a device and its host (`offload`).

- A kernel takes the time that `efficiency` gives, a collective the time that `links` gives. A copy takes its bytes over
  the `host_bandwidth`, and does not slow kernels.
- An asynchronous collective or copy runs from its start, after those before it in its stream; its done waits for it. A
  synchronous one stops the kernels.
- While a collective runs, kernels have a smaller part of the device (`efficiency.busy_share`).
- Loops count by their trips. A pipeline's bubble is in the program: its ticks do masked work.
- A conditional counts by its slowest branch. The exception is the computation of a dropless mixture for tokens that
  overflow their experts' slots, which `Prediction.overflow` reports.

Equal devices differ in speed, and a step takes as long as the slowest: its matrix products take 8% longer than those
measured on one device, and 0% and 22% longer at the ends of a prediction's interval (`efficiency.EXPECTED_PACE`).

The model leaves out caches, the launch of the step and its input, and clocks and power beyond what the measured shares
contain.
"""

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ...backend.machines import hosts_of
from ...backend.text import size
from ...hardware.compiled.compiler_remarks import remarks, why_unread
from ...hardware.compiled.cost import Costs
from ...hardware.compiled.kernels import Executable
from ...hardware.compiled.memory import program_memory
from ...hardware.hardware import RESERVE, Hardware
from ...model.batches import rows_of
from ..step_view import StepView as Step
from .clock import Clock, Part
from .efficiency import EXPECTED_PACE, FASTEST_PACE, SLOWEST_PACE, UPPER_BOUND, is_upper_bound

WIDTH = 100


def time_differences(
    seconds_by_name: Mapping[str, float], other_seconds: Mapping[str, float]
) -> list[tuple[float, str]]:
    """Return (difference in seconds to another step, name), the largest first; negative where this step is faster."""
    names = dict.fromkeys((*seconds_by_name, *other_seconds))
    return sorted(
        ((seconds_by_name.get(name, 0.0) - other_seconds.get(name, 0.0), name) for name in names),
        key=lambda difference: -difference[0],
    )


def _most_exposed_first(parts: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(sorted(parts, key=lambda part: (-part.exposed, -part.seconds)))


@dataclass(frozen=True)
class Prediction:
    """A step's time and its parts. `print` it, or use `.json()`; `.lines()` has every kernel.

    All seconds are per device and step: `seconds` = `compute` + `exposed`.

    Attributes:
      seconds: the time of a step.
      interval: the time of a step on the fastest and on the slowest of equal devices.
      compute: seconds in which kernels run.
      exposed: seconds in which kernels wait for a collective, or for a copy to or from the host.
      hidden: seconds of collectives and copies that overlap with kernels.
      slowed: the part of `compute` that kernels lose to concurrent collectives.
      flops: FLOPs of a device's matrix products, as the program computes them, recomputation included.
      model_flops: FLOPs of a device as the caller counts them, without recomputation; None if not given.
      peak: FLOP/s of a device in the dtype of most of its FLOPs; 0 if it has none.
      rows: rows of the global batch; 0 if not given.
      devices: the number of devices.
      hardware: the kind of the devices.
      parts: every kernel and collective, in the order in which they first run.
      notes: what could not be known, and what the compiler did unasked.
      overflow: the most seconds that a step takes longer because a dropless mixture's tokens find no slot in their
        experts' buffers. They are not part of `seconds`. None of them are needed while no expert gets more than 1.25
        times the mean load of each rank's tokens; all of them are if all tokens choose the experts of one rank.
      memory: bytes of a device that the program needs; None if only its text was given.
      usable: bytes of a device that a program may use, all but `RESERVE`; None if unknown.
      upper_bound: whether the hardware's rates are for the best measured shape, so that a step takes longer.
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
        """Whether a device has room for the program; None if that is unknown."""
        return None if self.memory is None or self.usable is None else self.memory <= self.usable

    @property
    def rows_per_second(self) -> float:
        """Rows of the global batch per second. Multiply by positions per row for tokens per second."""
        return self.rows / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: model_flops / (seconds peak) (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

        None if no model FLOPs were given, or if the program has no matrix product.
        """
        if self.model_flops is None or not self.peak:
            return None
        return self.model_flops / (self.seconds * self.peak)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: flops / (seconds peak), recomputation included."""
        return self.flops / (self.seconds * self.peak) if self.peak else 0.0

    @property
    def by_kind(self) -> dict[str, float]:
        """Seconds of kernels, and exposed seconds of collectives and copies, by kind. Their sum is `seconds`."""
        sums: dict[str, float] = {}
        for part in self.parts:
            # Collectives and copies count with their exposed seconds, so that the sum is the step's time.
            sums[part.kind] = sums.get(part.kind, 0.0) + (part.exposed if part.way else part.seconds)
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @property
    def collectives(self) -> tuple[Part, ...]:
        """The collectives, the most exposed first."""
        return _most_exposed_first(part for part in self.parts if part.collective)

    @property
    def copies(self) -> tuple[Part, ...]:
        """The copies to and from the host, the most exposed first."""
        return _most_exposed_first(part for part in self.parts if part.way == "host")

    def json(self) -> dict[str, Any]:
        """Return everything as dicts, lists, text and numbers."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        derived = {name: getattr(self, name) for name in ("fits", "rows_per_second", "mfu", "hfu", "by_kind")}
        parts = [dataclasses.asdict(part) | {"axes": list(part.axes)} for part in self.parts]
        return fields | derived | {"parts": parts, "notes": list(self.notes), "interval": list(self.interval)}

    def lines(self) -> list[str]:
        """Return a line for each kernel and collective, the longest first: how often, how long, why, and from where."""
        return [
            f"{1e3 * part.seconds:10.3f} ms  {part.executions:6} x  {part.kind:18}  {part.reason}"
            f"{f'; {1e3 * part.exposed:.3f} ms exposed' if part.way else ''}  [{part.name}] {part.source}"
            for part in sorted(self.parts, key=lambda part: -part.seconds)
        ]

    def __str__(self) -> str:
        fastest, slowest = self.interval
        interval_text = f" ({1e3 * fastest:.1f} to {1e3 * slowest:.1f})" if fastest < slowest else ""
        step_text = f"{1e3 * self.seconds:.1f} ms a step{interval_text}"
        speed_text = f", {self.rows_per_second:.2f} rows/s" if self.rows else ""
        bound_text = " (upper bound)" * self.upper_bound
        heading = f"{self.devices} x {self.hardware}: {step_text}{speed_text}{bound_text}"
        # First of all: a program that does not fit cannot run as fast as predicted.
        if self.fits is False:
            needed, usable = size(self.memory or 0), size(self.usable or 0)
            fault = f"does not fit: it needs {needed} of a device, and may use {usable}; the program below cannot run"
            heading = f"{textwrap.fill(fault, WIDTH)}\n{heading}"
        summary = [f"{self.hfu:.1%} of the peak" + (f", MFU {self.mfu:.1%}" if self.mfu is not None else "")]
        summary.append(f"kernels {1e3 * self.compute:.1f} ms, of which {1e3 * self.slowed:.1f} ms beside collectives")
        for kind, parts in (("collectives", self.collectives), ("copies to and from the host", self.copies)):
            exposed = 1e3 * sum(part.exposed for part in parts)
            hidden = 1e3 * sum(part.seconds for part in parts) - exposed
            if parts or kind == "collectives":
                summary.append(f"{kind} {hidden:.1f} ms hidden, {exposed:.1f} ms exposed")
        if self.overflow:
            summary.append(f"at most {1e3 * self.overflow:.1f} ms more where tokens overflow their experts' slots")
        kinds = [f"  {kind:20}{1e3 * seconds:10.1f} ms" for kind, seconds in self.by_kind.items()]
        notes = [textwrap.fill(note, WIDTH, subsequent_indent="  ") for note in self.notes]
        return "\n".join([heading, *summary, *kinds, *notes])


def predict(
    compiled: jax.stages.Compiled | Executable | str,
    step: Step,
    batch: Any,
    hardware: Hardware,
    model_flops: float | None = None,
) -> Prediction:
    """Predict how long a step takes on `hardware`. Nothing runs.

    Args:
      compiled: `step.compile(batch)`, its text, or the `Executable` read from this text, for devices of that hardware.
      step: the training step, for its mesh: the devices tell which of them share a host.
      batch: the global batch, as arrays or `jax.ShapeDtypeStruct`.
      hardware: the numbers of the devices, as `target(...).hardware`.
      model_flops: FLOPs of the step over all devices, without recomputation, for example `named(...).flops(rows,
        length)`. It gives the MFU.

    Raises:
      ValueError: `hardware` lacks a number that the program needs; the step has `server=True`; the program is for
        devices of another platform; or it is for TPUs, whose programs are not read.
    """
    if reason := why_unread(step.mesh.devices.flat[0].platform):
        raise ValueError(f"predict: {reason}; predict for GPUs, such as target('8xH100')")
    platform = step.mesh.devices.flat[0].platform
    needed_platform = (
        "TPU" if hardware.device_kind.startswith("TPU") else "CPU" if hardware.device_kind == "cpu" else "GPU"
    )
    if (compiled_platform := "CPU" if platform == "cpu" else "GPU") != needed_platform:
        raise ValueError(
            f"predict: the step is compiled for {compiled_platform} devices, and {hardware.kind} runs other programs; "
            "make it for devices that need not be there: make_train_step(..., mesh=target('8xH100').devices)"
        )
    if step.strategy.server:
        raise ValueError(
            f"{step.strategy} runs several programs and sends over its server's links between them, which predict does "
            "not model; print(step.explain(batch)) says what they hold and send"
        )
    # The text of a program does not tell its memory.
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
    """Predict how long a compiled program takes; see `predict`.

    Args:
      hosts: the host of each device of the program's mesh.
      rows: rows of the global batch.
      model_flops: FLOPs of the step over all devices, without recomputation; None if unknown.
      memory: bytes of a device that the program needs; None if unknown.
    """
    is_single_device = len(hosts) == 1
    # A single device is not compared with others: it gets the measured pace.
    fastest, slowest = (
        Clock(hardware, hosts, 1.0 if is_single_device else pace).time(compiled.operations)
        for pace in (FASTEST_PACE, SLOWEST_PACE)
    )
    clock = Clock(hardware, hosts, 1.0 if is_single_device else EXPECTED_PACE)
    seconds = clock.time(compiled.operations)
    overflow_seconds = seconds
    # A mixture's overflow branch runs rarely. Its time is reported apart, from a second walk that always takes it.
    if clock.overflows:
        overflow_seconds = Clock(hardware, hosts, clock.slowest, overflow=True).time(compiled.operations)
    bound_note = (f"{hardware.kind}'s speeds are upper bounds: {UPPER_BOUND}.",) if is_upper_bound(hardware) else ()
    # The compiler may have recomputed kernels, or computed attention without cuDNN, which costs time.
    compiler_notes = remarks(Costs.of(compiled), platform)
    kernels = [part for part in clock.parts if not part.way]
    transfers = [part for part in clock.parts if part.way]
    exposed = sum(part.exposed for part in transfers)
    return Prediction(
        seconds=seconds,
        interval=(fastest, slowest),
        compute=sum(part.seconds for part in kernels),
        exposed=exposed,
        hidden=sum(part.seconds for part in transfers) - exposed,
        slowed=sum(part.slowed for part in kernels),
        flops=sum(part.flops for part in kernels),
        model_flops=None if model_flops is None else model_flops / len(hosts),
        peak=clock.peak,
        rows=rows,
        devices=len(hosts),
        hardware=hardware.kind,
        parts=tuple(clock.parts),
        notes=(*bound_note, *clock.notes, *compiler_notes),
        overflow=overflow_seconds - seconds,
        memory=memory,
        usable=None if hardware.memory_bytes is None else int((1 - RESERVE) * hardware.memory_bytes),
        upper_bound=bool(bound_note),
    )
