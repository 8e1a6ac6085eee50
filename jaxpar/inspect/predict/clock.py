"""The clock of a prediction: it walks a program in the order of its schedule; see `predict`.

Kernels run one after another. Collectives, and copies to and from the host, run concurrently, each on its own stream:

    kernels      k1 | k2 (slowed)      | wait | k3
    collective        start ------------ done
                      ^ queued           ^ kernels wait for the rest: exposed

`_run_all` walks operations. Its queue holds the collectives and copies that have started and not ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...hardware.compiled.kernels import Choice, Done, HostCopy, Kernel, Operation, Start, While, loops_of_ranks
from ...hardware.hardware import Hardware
from ...hardware.links import Reach, collective_seconds
from ...program import trip_counts
from .efficiency import busy_share, kernel_seconds, peak_of


@dataclass
class Part:
    """One kernel, collective or copy to or from the host, over all its executions in a step.

    Attributes:
      name: the name of its instruction in HLO.
      source: where it comes from, by JAX's names.
      kind: the kind of the `Kernel` or of the `Collective`; "copy to host", "copy from host".
      reason: why one execution takes as long as it does.
      executions: the number of executions per step.
      seconds: the seconds in which it runs, `slowed` included.
      slowed: the seconds that a kernel loses to concurrent collectives.
      exposed: for a collective or copy, the seconds in which it runs while kernels wait, for it or for one behind it.
        If several streams run at once, its share of these seconds.
      flops: FLOPs computed.
      bytes: bytes read and written; for a collective, bytes sent by the device.
      axes: the mesh axes of a collective.
      way: for a collective, "link" or "network"; for a copy, "host"; for a kernel, "".
      asynchronous: for a collective, whether kernels may run at the same time.
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
        """Whether it is a collective."""
        return self.way not in ("", "host")

    @property
    def stream(self) -> str:
        """The stream on which it runs beside kernels, in order: one for collectives, and one for copies each way."""
        return self.kind if self.way == "host" else "collective"


Queue = dict[str, float]  # name of each collective or copy under way -> its remaining seconds, in the order of start


class Clock:
    """The time of a program, by walking it once for all its iterations.

    Args:
      hosts: the host of each device of the mesh.
      slowest: the time of the slowest device's matrix products, relative to those of the device that was measured.
      overflow: whether tokens overflow their experts' slots wherever they may, or nowhere.

    Attributes:
      notes: what could not be known.
      overflows: whether the program has a mixture whose tokens may overflow.
    """

    def __init__(self, hardware: Hardware, hosts: Sequence[int], slowest: float = 1.0, overflow: bool = False) -> None:
        self.hardware, self.hosts, self.slowest, self.overflow = hardware, hosts, slowest, overflow
        self.notes: list[str] = []
        self.overflows = False
        self._busy_share = busy_share(hardware)
        self._parts: dict[str, Part] = {}
        self._seconds: dict[str, float] = {}
        self._flops_by_peak: dict[float, int] = {}

    @property
    def parts(self) -> list[Part]:
        """The parts that run, in the order in which they first run."""
        return [part for part in self._parts.values() if part.executions]

    @property
    def peak(self) -> float:
        """FLOP/s in the dtype of most FLOPs; 0 if the program has no matrix product."""
        return max(self._flops_by_peak, key=lambda peak: self._flops_by_peak[peak], default=0.0)

    def time(self, operations: Sequence[Operation]) -> float:
        """Return the seconds of a program, until its last collective or copy has ended."""
        seconds, queue = self._run_all(operations, {}, 1)
        return seconds + max(self._remaining(queue).values(), default=0.0)

    def _remaining(self, queue: Queue) -> dict[str, float]:
        """Return the seconds that each stream still needs."""
        remaining: dict[str, float] = {}
        for name, seconds in queue.items():
            remaining[stream] = remaining.get(stream := self._parts[name].stream, 0.0) + seconds
        return remaining

    def _run_all(self, operations: Sequence[Operation], queue: Queue, times: int) -> tuple[float, Queue]:
        """Return the seconds of operations and the queue after them.

        Args:
          operations: in the order of the schedule.
          queue: the collectives and copies under way before them.
          times: how often they run, each time with this queue. With 0, they are timed without being counted.
        """
        elapsed, queue, busiest_rank = 0.0, dict(queue), self._busiest_rank(operations)
        for operation in operations:
            match operation:
                case Kernel():
                    # Kernels run while collectives and copies do; these are not exposed meanwhile.
                    seconds = self._kernel_seconds(operation, self._remaining(queue).get("collective", 0.0), times)
                    self._advance(queue, seconds, 0)
                    elapsed += seconds
                case Start() | HostCopy():
                    # It runs after everything that started before it in its stream.
                    queue[operation.name] = self._queued_seconds(operation, times)
                    # A synchronous one stops the kernels at once.
                    elapsed += self._wait_for(queue, operation.name, times) if operation.waits else 0.0
                case Done():
                    elapsed += self._wait_for(queue, operation.name, times)
                case While():
                    seconds, queue = self._loop_seconds(
                        operation, queue, times if operation.rank in (None, busiest_rank) else 0
                    )
                    elapsed += seconds
                case Choice():
                    # Time every branch without counting it, and assume that the slowest runs. The overflow branch of a
                    # mixture runs only if asked for.
                    timed_branches = [self._run_all(branch, queue, 0) for branch in operation.branches]
                    totals = [seconds + sum(remaining.values()) for seconds, remaining in timed_branches]
                    chosen_total = min(totals) if operation.overflow and not self.overflow else max(totals)
                    seconds, queue = self._run_all(operation.branches[totals.index(chosen_total)], queue, times)
                    elapsed += seconds
                    if operation.overflow:
                        self.overflows = True
                    else:
                        self._add_note(f"{operation.name}: of a conditional's branches the slowest is counted.")
        return elapsed, queue

    def _busiest_rank(self, operations: Sequence[Operation]) -> int | None:
        """Return the rank whose own loops take longest, as only its loops are counted; None if no rank has its own."""
        seconds_by_rank = {
            rank: sum(
                float(loop.trips or 0) * self._run_all(loop.body, {}, 0)[0] for loop in loops if isinstance(loop, While)
            )
            for rank, loops in loops_of_ranks(operations).items()
        }
        return max(seconds_by_rank, key=lambda rank: seconds_by_rank[rank], default=None)

    def _loop_seconds(self, loop: While, queue: Queue, times: int) -> tuple[float, Queue]:
        """Return the seconds of a loop, over all its trips, and the queue after it."""
        trips, total_seconds = loop.trips, 0.0
        if loop.paces is not None:
            # In an iteration of the outer loop, a device runs this loop or another one, and all devices wait for the
            # slowest. This loop is the slowest, and so counts, in `paces` iterations.
            seconds, queue = self._run_all(loop.body, queue, trip_counts.times(times, trips or 0))
            return float(loop.paces) * seconds, queue
        if trips is None:
            trips = 1
            self._add_note(f"{loop.name}: a loop of unknown length is counted once.")
        # Iterations differ only until the collectives that started before the loop have ended. Walk these iterations
        # one by one, and the remaining trips at once.
        while trips and queue:
            seconds, next_queue = self._run_all(loop.body, queue, times)
            total_seconds, trips = total_seconds + seconds, trips - 1
            # The queue settles into a steady state before it is empty if every iteration starts as much as it ends.
            if next_queue == queue:
                break
            queue = next_queue
        if trips:
            seconds, queue = self._run_all(loop.body, queue, trip_counts.times(times, trips))
            total_seconds += trips * seconds
        return total_seconds, queue

    def _kernel_seconds(self, kernel: Kernel, busy: float, times: int) -> float:
        """Return the seconds of one execution of a kernel, while collectives run for another `busy` seconds.

        While a collective runs, a kernel has the share s of the device. It has w seconds of work. It does min(w, s
        busy) of them while collectives run, where work takes 1/s times as long.
        """
        if kernel.name not in self._parts:
            self._seconds[kernel.name], reason = kernel_seconds(kernel, self.hardware, self.slowest)
            self._parts[kernel.name] = Part(kernel.name, kernel.source, kernel.kind, reason)
        alone_seconds = self._seconds[kernel.name]
        shared_seconds = min(alone_seconds, busy * self._busy_share)
        slowed = shared_seconds / self._busy_share - shared_seconds
        part = self._parts[kernel.name]
        part.executions += times
        part.seconds += times * (alone_seconds + slowed)
        part.slowed += times * slowed
        part.flops += times * kernel.flops
        part.bytes += times * (kernel.read + kernel.written)
        # The dtype with most FLOPs gives the peak of the prediction.
        for product in kernel.products:
            peak = peak_of(product, self.hardware)
            self._flops_by_peak[peak] = self._flops_by_peak.get(peak, 0) + times * product.flops
        return alone_seconds + slowed

    def _queued_seconds(self, operation: Start | HostCopy, times: int) -> float:
        """Return the seconds that a collective or copy needs once it is its turn, and count it."""
        if operation.name not in self._parts:
            self._seconds[operation.name], self._parts[operation.name] = (
                self._new_copy(operation) if isinstance(operation, HostCopy) else self._new_collective(operation)
            )
        # Its time alone; what it waits for is counted when it is waited for.
        part = self._parts[operation.name]
        part.executions += times
        part.seconds += times * self._seconds[operation.name]
        part.bytes += times * (operation.bytes if isinstance(operation, HostCopy) else operation.sent)
        return self._seconds[operation.name]

    def _new_collective(self, start: Start) -> tuple[float, Part]:
        """Return the seconds of one collective, and its part."""
        reach = Reach.of(start, self.hosts)
        seconds, reason = collective_seconds(start.kind, start.bytes, reach, self.hardware)
        placement = {"axes": start.axes, "way": reach.medium, "asynchronous": not start.waits}
        return seconds, Part(start.name, start.source, start.kind, reason, **placement)

    def _new_copy(self, copy: HostCopy) -> tuple[float, Part]:
        """Return the seconds of one copy to or from the host, and its part."""
        if (bandwidth := self.hardware.host_bandwidth) is None:
            raise ValueError(
                f"{self.hardware.kind} has no host_bandwidth, which copies to and from the host need; describe it in a "
                "file (jaxpar.hardware.kinds.load), or predict without offload"
            )
        kind = f"copy {'to' if copy.to_host else 'from'} host"
        reason = f"{copy.bytes / 1e6:,.1f} MB at {bandwidth / 1e9:.0f} GB/s"
        return copy.bytes / bandwidth, Part(copy.name, copy.source, kind, reason, way="host")

    def _wait_for(self, queue: Queue, name: str, times: int) -> float:
        """Let time pass until a collective or copy has ended, after those before it in its stream; return seconds."""
        if name not in queue:
            return 0.0
        stream_order = [queued for queued in queue if self._parts[queued].stream == self._parts[name].stream]
        seconds = sum(queue[queued] for queued in stream_order[: stream_order.index(name) + 1])
        self._advance(queue, seconds, times)
        queue.pop(name, None)  # rounding may have left a rest of it
        return seconds

    def _advance(self, queue: Queue, seconds: float, times: int) -> None:
        """Let time pass for the streams of a queue.

        Args:
          queue: it loses what ends.
          seconds: the time that passes.
          times: how often it passes while kernels wait; 0 if kernels run meanwhile.
        """
        remaining = self._remaining(queue)
        # If several streams are busy at once, each is exposed for its share, so that exposed seconds sum to the wait.
        busy_seconds = sum(min(stream_remaining, seconds) for stream_remaining in remaining.values())
        exposed_share = seconds / busy_seconds if busy_seconds else 0.0
        stream_seconds = dict.fromkeys(remaining, seconds)  # each stream runs its queue in order for this long
        for name in list(queue):
            stream = self._parts[name].stream
            run_seconds = min(queue[name], stream_seconds[stream])
            self._parts[name].exposed += times * run_seconds * exposed_share
            stream_seconds[stream] -= run_seconds
            queue[name] -= run_seconds
            if queue[name] <= 0:
                del queue[name]

    def _add_note(self, note: str) -> None:
        """Add a note once."""
        if note not in self.notes:
            self.notes.append(note)
