"""The cost of a compiled program: its kernels, each with FLOPs, bytes and the number of its executions.

The iterations of a loop are its `known_trip_count`, as in `Ledger`, which lists the collectives.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from ...program import trip_counts
from .kernels import Choice, Executable, Kernel, Operation, While, loops_of_ranks
from .products import Product


@dataclass(frozen=True)
class Cost:
    """A kernel, and how often it runs.

    Attributes:
      kernel: the kernel.
      executions: number of executions per step; None in a loop of unknown length.
      conditional: the kernel runs in one branch of a conditional, or on one rank. Only the branch or rank with most
        FLOPs and bytes is counted.
    """

    kernel: Kernel
    executions: int | None
    conditional: bool = False


class Costs(tuple[Cost, ...]):
    """The kernels of a program, each once, in the order in which they first run. Counts are per device and step."""

    @classmethod
    def from_hlo(cls, text: str) -> Self:
        """Return the costs of `compiled.as_text()`, from the CPU, GPU or TPU compiler.

        >>> import jax
        >>> program = jax.jit(lambda x, w: x @ w).lower(jax.numpy.ones((3, 5)), jax.numpy.ones((5, 7))).compile()
        >>> Costs.from_hlo(program.as_text()).flops
        {'float32': 210}
        """
        return cls.of(Executable(text))

    @classmethod
    def of(cls, *programs: Executable) -> Self:
        """Return the costs of programs that run one after the other."""
        return cls(cost for program in programs for cost in _costs_of(program.operations, 1, False))

    @property
    def flops(self) -> dict[str, int]:
        """FLOPs of matrix products by their operands' dtype; causal attention counts half.

        This and the other sums raise ValueError if a loop's length is unknown.
        """
        return self._sums(lambda product: product.flops)

    @property
    def full_flops(self) -> dict[str, int]:
        """FLOPs of matrix products as their shapes give them, with masked attention and padding."""
        return self._sums(lambda product: product.full_flops)

    @property
    def bytes(self) -> int:
        """Bytes read and written by all kernels, matrix products included."""
        return sum((cost.kernel.read + cost.kernel.written) * self._executions(cost) for cost in self)

    @property
    def products(self) -> list[tuple[Product, int]]:
        """Every matrix product and how often it is computed; equal products are merged, and most FLOPs come first."""
        executions: dict[Product, int] = {}
        for cost in self:
            for product in cost.kernel.products:
                executions[product] = executions.get(product, 0) + self._executions(cost)
        return sorted(executions.items(), key=lambda item: -item[0].flops * item[1])

    def _sums(self, value: Callable[[Product], int]) -> dict[str, int]:
        """Sum a value over all products, by dtype."""
        sums: dict[str, int] = {}
        for product, executions in self.products:
            sums[product.dtype] = sums.get(product.dtype, 0) + executions * value(product)
        return sums

    @staticmethod
    def _executions(cost: Cost) -> int:
        """Return the executions of a kernel. Raises ValueError if they are unknown."""
        if cost.executions is None:
            raise ValueError(
                f"{cost.kernel.name} ({cost.kernel.source}) runs in a while loop of unknown length and cannot be "
                "summed; use lax.scan or static bounds, or read the costs one by one"
            )
        return cost.executions


def _costs_of(operations: Sequence[Operation], executions: int | None, conditional: bool) -> Iterator[Cost]:
    """Yield the costs of operations that run `executions` times, loops and conditionals included."""
    for operation in operations:
        if isinstance(operation, Kernel):
            yield Cost(operation, executions, conditional)
        elif isinstance(operation, While) and operation.rank is None:
            trips = operation.trips
            inner_executions = None if executions is None or trips is None else trip_counts.times(executions, trips)
            yield from _costs_of(operation.body, inner_executions, conditional)
        elif isinstance(operation, Choice):
            # Which branch runs is not known here. The heaviest is an upper bound.
            branches = [list(_costs_of(branch, executions, True)) for branch in operation.branches]
            yield from max(branches, key=_weight)
    # Each rank runs only its own loops, as if they were branches of one conditional.
    if rank_costs := [list(_costs_of(loops, executions, True)) for loops in loops_of_ranks(operations).values()]:
        yield from max(rank_costs, key=_weight)


def _weight(costs: Sequence[Cost]) -> tuple[int, int]:
    """Return (FLOPs, bytes) of a branch, to compare branches."""
    # A loop of unknown length counts as one iteration, which is enough to compare branches.
    kernels = [(cost.kernel, cost.executions or 1) for cost in costs]
    flops = sum(kernel.flops * executions for kernel, executions in kernels)
    return flops, sum((kernel.read + kernel.written) * executions for kernel, executions in kernels)
