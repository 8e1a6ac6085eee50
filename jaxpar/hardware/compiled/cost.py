"""What a compiled program computes: its kernels, each with FLOPs and bytes and how often it runs.

Loops count by their `known_trip_count`, as for `Ledger`, which has the collectives.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from ...program import trip_counts
from .kernels import Choice, Executable, Kernel, Operation, While, of_ranks
from .products import Product


@dataclass(frozen=True)
class Cost:
    """A kernel, and how often it runs.

    Attributes:
      kernel: what runs.
      executions: per step; None in a loop of unknown length.
      conditional: it runs in one branch of a conditional, or on one rank, of which the one with most FLOPs and bytes
        is counted.
    """

    kernel: Kernel
    executions: int | None
    conditional: bool = False


class Costs(tuple[Cost, ...]):
    """The kernels of a program, each once, in the order in which they first run. Per device and step."""

    @classmethod
    def from_hlo(cls, text: str) -> Self:
        """Of `compiled.as_text()`, from the CPU, GPU or TPU compiler.

        >>> import jax
        >>> program = jax.jit(lambda x, w: x @ w).lower(jax.numpy.ones((3, 5)), jax.numpy.ones((5, 7))).compile()
        >>> Costs.from_hlo(program.as_text()).flops
        {'float32': 210}
        """
        return cls.of(Executable(text))

    @classmethod
    def of(cls, *programs: Executable) -> Self:
        """The same of programs that were read before, one after the other."""
        return cls(cost for program in programs for cost in _counted(program.operations, 1, False))

    @property
    def flops(self) -> dict[str, int]:
        """FLOPs of matrix products by the dtype of their operands; masked attention counts half.

        Raises ValueError where a loop's length is unknown.
        """
        return self._sums(lambda product: product.flops)

    @property
    def full_flops(self) -> dict[str, int]:
        """The same with what is masked, and what is padding."""
        return self._sums(lambda product: product.full_flops)

    @property
    def bytes(self) -> int:
        """Bytes read and written by all kernels, matrix products included."""
        return sum((cost.kernel.read + cost.kernel.written) * self._times(cost) for cost in self)

    @property
    def products(self) -> list[tuple[Product, int]]:
        """Every matrix product and how often it is computed, equal ones added up, most FLOPs first."""
        found: dict[Product, int] = {}
        for cost in self:
            for product in cost.kernel.products:
                found[product] = found.get(product, 0) + self._times(cost)
        return sorted(found.items(), key=lambda item: -item[0].flops * item[1])

    def _sums(self, value: Callable[[Product], int]) -> dict[str, int]:
        sums: dict[str, int] = {}
        for product, times in self.products:
            sums[product.dtype] = sums.get(product.dtype, 0) + times * value(product)
        return sums

    @staticmethod
    def _times(cost: Cost) -> int:
        if cost.executions is None:
            raise ValueError(
                f"{cost.kernel.name} ({cost.kernel.source}) runs in a while loop of unknown length and cannot be "
                "summed; use lax.scan or static bounds, or read the costs one by one"
            )
        return cost.executions


def _counted(operations: Sequence[Operation], times: int | None, conditional: bool) -> Iterator[Cost]:
    for one in operations:
        if isinstance(one, Kernel):
            yield Cost(one, times, conditional)
        elif isinstance(one, While) and one.rank is None:
            known = None if times is None or one.trips is None else trip_counts.times(times, one.trips)
            yield from _counted(one.body, known, conditional)
        elif isinstance(one, Choice):
            branches = [list(_counted(branch, times, True)) for branch in one.branches]
            yield from max(branches, key=_weight)
    if own := [list(_counted(loops, times, True)) for loops in of_ranks(operations).values()]:
        yield from max(own, key=_weight)


def _weight(costs: Sequence[Cost]) -> tuple[int, int]:
    each = [(cost.kernel, cost.executions or 1) for cost in costs]
    return sum(k.flops * n for k, n in each), sum((k.read + k.written) * n for k, n in each)
