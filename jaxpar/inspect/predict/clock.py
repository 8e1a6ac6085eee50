"""The clock of a prediction: a program walked in the order of its schedule, on its streams; see `predict`."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...hardware.compiled.kernels import Choice, Done, HostCopy, Kernel, Operation, Start, While, of_ranks
from ...hardware.hardware import Hardware
from ...hardware.links import Reach, collective_seconds
from ...program import trip_counts
from .efficiency import busy_share, kernel_seconds, peak_of


@dataclass
class Part:
    """One kernel, collective or copy to or from the host, over all its executions in a step.

    Attributes:
      name: of its instruction in HLO.
      source: where it comes from, by JAX's names.
      kind: of the `Kernel`, or of the `Collective`; "copy to host", "copy from host".
      executions: per step.
      seconds: in which it runs, `slowed` included.
      slowed: seconds more than it would take without collectives beside it.
      exposed: of a collective or copy the seconds in which it runs and kernels wait, for it or for one after it; of
        those at once, on streams of their own, its share.
      flops, bytes: computed; read and written, or of a collective sent by the device.
      axes: of a collective.
      way: of a collective, "link" or "network"; of a copy, "host".
      asynchronous: of a collective: kernels may run beside it.
      reason: of the time of one execution.
    """

    name: str
    source: str
    kind: str
    reason: str
    executions: int = 0
    seconds: float = 0.0
    slowed: float = 0.0
    exposed: float = 0.0
    flops: int = 0
    bytes: int = 0
    axes: tuple[str, ...] = ()
    way: str = ""
    asynchronous: bool = False

    @property
    def collective(self) -> bool:
        """Whether it is one."""
        return self.way not in ("", "host")

    @property
    def stream(self) -> str:
        """Of what runs beside kernels, what waits for one another: collectives, and a host's copies each way."""
        return self.kind if self.way == "host" else "collective"


Queue = dict[str, float]  # what runs beside kernels, in its order, and the seconds that each still needs


class Clock:
    """Walks a program; `parts` and `notes` then say what it met, `overflows` that a mixture's tokens may find no slot.

    Args:
      hardware: what a device can do.
      hosts: for each place in the mesh the host of its device.
      slowest: how much longer the slowest device's matrix products take than what was measured on one.
      overflow: tokens overflow their experts' slots wherever they may; else nowhere.
    """

    def __init__(self, hardware: Hardware, hosts: Sequence[int], slowest: float = 1.0, overflow: bool = False) -> None:
        self.hardware, self.hosts, self.slowest, self.overflow = hardware, hosts, slowest, overflow
        self.notes: list[str] = []
        self.overflows = False
        self._share = busy_share(hardware)
        self._parts: dict[str, Part] = {}
        self._seconds: dict[str, float] = {}
        self._peaks: dict[float, int] = {}

    @property
    def parts(self) -> list[Part]:
        """What ran, in the order in which it first ran."""
        return [part for part in self._parts.values() if part.executions]

    @property
    def peak(self) -> float:
        """FLOP/s in the dtype of most FLOPs; 0 where none are computed."""
        return max(self._peaks, key=lambda peak: self._peaks[peak], default=0.0)

    def time(self, operations: Sequence[Operation]) -> float:
        """Seconds of a whole program."""
        seconds, queue = self._run(operations, {}, 1)
        return seconds + max(self._left(queue).values(), default=0.0)

    def _left(self, queue: Queue) -> dict[str, float]:
        """Seconds that each stream still needs."""
        left: dict[str, float] = {}
        for name, seconds in queue.items():
            left[stream] = left.get(stream := self._parts[name].stream, 0.0) + seconds
        return left

    def _run(self, operations: Sequence[Operation], queue: Queue, times: int) -> tuple[float, Queue]:
        """(seconds, queue after them) of operations that run `times`, each time alike, with this queue before them."""
        now, queue, busiest = 0.0, dict(queue), self._busiest(operations)
        for one in operations:
            match one:
                case Kernel():
                    spent = self._kernel(one, self._left(queue).get("collective", 0.0), times)
                    self._pass(queue, spent, 0)
                    now += spent
                case Start() | HostCopy():
                    queue[one.name] = self._beside(one, times)
                    now += self._wait(queue, one.name, times) if one.waits else 0.0
                case Done():
                    now += self._wait(queue, one.name, times)
                case While():
                    spent, queue = self._loop(one, queue, times if one.rank in (None, busiest) else 0)
                    now += spent
                case Choice():
                    # Tried without being counted: the slowest branch is the one that runs, but for what overflows.
                    tried = [self._run(branch, queue, 0) for branch in one.branches]
                    choose = min if one.overflow and not self.overflow else max
                    chosen = choose(range(len(tried)), key=lambda at: tried[at][0] + sum(tried[at][1].values()))
                    spent, queue = self._run(one.branches[chosen], queue, times)
                    now += spent
                    if one.overflow:
                        self.overflows = True
                    else:
                        self._note(f"{one.name}: of a conditional's branches the slowest is counted.")
        return now, queue

    def _busiest(self, operations: Sequence[Operation]) -> int | None:
        """Of ranks that have loops of their own the one that they take longest: of these its own are counted."""
        spent = {
            rank: sum(float(one.trips or 0) * self._run(one.body, {}, 0)[0] for one in loops if isinstance(one, While))
            for rank, loops in of_ranks(operations).items()
        }
        return max(spent, key=lambda rank: spent[rank], default=None)

    def _loop(self, loop: While, queue: Queue, times: int) -> tuple[float, Queue]:
        trips, total = loop.trips, 0.0
        if loop.paces is not None:
            # In an iteration of the loop around it a device runs this or another; the slowest of them takes the time.
            spent, queue = self._run(loop.body, queue, trip_counts.times(times, trips or 0))
            return float(loop.paces) * spent, queue
        if trips is None:
            trips = 1
            self._note(f"{loop.name}: a loop of unknown length is counted once.")
        # Iterations differ only until what was sent before the loop has arrived.
        while trips and queue:
            spent, left = self._run(loop.body, queue, times)
            total, trips = total + spent, trips - 1
            if left == queue:
                break
            queue = left
        if trips:
            spent, queue = self._run(loop.body, queue, trip_counts.times(times, trips))
            total += trips * spent
        return total, queue

    def _kernel(self, kernel: Kernel, busy: float, times: int) -> float:
        """Seconds of one execution, while collectives run for `busy` seconds."""
        if kernel.name not in self._parts:
            self._seconds[kernel.name], reason = kernel_seconds(kernel, self.hardware, self.slowest)
            self._parts[kernel.name] = Part(kernel.name, kernel.source, kernel.kind, reason)
        work = self._seconds[kernel.name]
        beside = min(work, busy * self._share)  # of its work, what it gets done beside collectives
        slowed = beside / self._share - beside
        part = self._parts[kernel.name]
        part.executions += times
        part.seconds += times * (work + slowed)
        part.slowed += times * slowed
        part.flops += times * kernel.flops
        part.bytes += times * (kernel.read + kernel.written)
        for product in kernel.products:
            peak = peak_of(product, self.hardware)
            self._peaks[peak] = self._peaks.get(peak, 0) + times * product.flops
        return work + slowed

    def _beside(self, one: Start | HostCopy, times: int) -> float:
        """Seconds of a collective or a copy, once it is its turn."""
        if one.name not in self._parts:
            made = self._copy(one) if isinstance(one, HostCopy) else self._collective(one)
            self._seconds[one.name], self._parts[one.name] = made
        part = self._parts[one.name]
        part.executions += times
        part.seconds += times * self._seconds[one.name]
        part.bytes += times * (one.bytes if isinstance(one, HostCopy) else one.sent)
        return self._seconds[one.name]

    def _collective(self, start: Start) -> tuple[float, Part]:
        way = Reach.of(start, self.hosts)
        seconds, reason = collective_seconds(start.kind, start.bytes, way, self.hardware)
        on = {"axes": start.axes, "way": way.name, "asynchronous": not start.waits}
        return seconds, Part(start.name, start.source, start.kind, reason, **on)

    def _copy(self, copy: HostCopy) -> tuple[float, Part]:
        if (speed := self.hardware.host_bandwidth) is None:
            raise ValueError(
                f"{self.hardware.kind} has no host_bandwidth, and its copies to and from the host no time; describe it "
                "in a file (jaxpar.hardware.kinds.load), or predict without offload"
            )
        kind = f"copy {'to' if copy.to_host else 'from'} host"
        reason = f"{copy.bytes / 1e6:,.1f} MB at {speed / 1e9:.0f} GB/s"
        return copy.bytes / speed, Part(copy.name, copy.source, kind, reason, way="host")

    def _wait(self, queue: Queue, name: str, times: int) -> float:
        """Seconds until what runs beside kernels has ended: what is before it in its stream comes first."""
        if name not in queue:
            return 0.0
        order = [one for one in queue if self._parts[one].stream == self._parts[name].stream]
        seconds = sum(queue[one] for one in order[: order.index(name) + 1])
        self._pass(queue, seconds, times)
        queue.pop(name, None)  # which rounding may have left
        return seconds

    def _pass(self, queue: Queue, seconds: float, times: int) -> None:
        """Time passes for the streams of a queue, exposed `times`."""
        busy = sum(min(x, seconds) for x in self._left(queue).values())
        left, share = dict.fromkeys(self._left(queue), seconds), seconds / busy if busy else 0.0
        for name in list(queue):
            stream = self._parts[name].stream
            run = min(queue[name], left[stream])
            self._parts[name].exposed += times * run * share
            left[stream] -= run
            queue[name] -= run
            if queue[name] <= 0:
                del queue[name]

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
