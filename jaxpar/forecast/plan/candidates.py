"""Enumerate the strategies that a plan considers for a target.

    devices = pipe x context x tensor x replicas,   replicas = expert x (data | fsdp | data x fsdp within hosts)

`pipe`, `context`, `tensor` and `expert` are powers of two. `tensor` stays within a host. For each set of sizes,
`candidates` varies microbatches, the pipeline's schedule, ZeRO stage and recomputation.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...hardware.devices import Target
from ...strategy import Strategy
from ...strategy.schedules import SCHEDULES

REMATS = ("none", "dots", "layer")
# Microbatches per rank of a pipeline. With more of them the bubble is smaller, and there are more messages.
_MICROBATCHES = (1, 2, 4)


@dataclass(frozen=True)
class Splits:
    """How many ranks may share the dims that only some losses can split.

    Attributes:
      expert: the ranks that may share the experts of a mixture.
      context: the ranks that may share the positions of a row.
    """

    expert: int = 1
    context: int = 1


NO_SPLITS = Splits()


def candidates(target: Target, rows: int, precision: str, splits: Splits = NO_SPLITS) -> Iterator[Strategy]:
    """Yield the strategies that are sensible on a target.

    Strategies are left out if another is at least as good: GPipe saves more activations than 1F1B for the same bubble;
    `tensor` without `sequence` sends as much and saves more (Korthikanti et al. 2022, section 4.2.2); and `tensor`
    across hosts sends through the network what every layer waits for.

    `rows` are those of the global batch, and all candidates have one precision.
    """
    n = len(target.devices)
    if n == 1:
        for remat in REMATS:
            for m in powers(rows):
                yield Strategy(data=1, microbatches=m, remat=remat, precision=precision)
        return
    planned = [name for name, recipe in SCHEDULES.items() if recipe.planned]
    for pipe, context in itertools.product(powers(n), powers(splits.context)):
        # `tensor` divides the devices of a stage and those of a host.
        for tensor in powers(math.gcd(n // pipe, target.per_host)):
            replicas, remainder = divmod(n, pipe * context * tensor)
            if remainder or rows % replicas:
                continue
            rows_per_replica = rows // replicas
            if pipe == 1:
                microbatches = powers(rows_per_replica)
            else:
                # A pipeline needs a multiple of its ranks as microbatches.
                microbatches = [k * pipe for k in _MICROBATCHES if rows_per_replica % (k * pipe) == 0]
            schedules = [(Strategy.schedule, 1)] if pipe == 1 else list(itertools.product(planned, (1, 2)))
            for axes in _replica_axes(replicas, target, tensor * context, splits.expert, context):
                for m, (schedule, chunks), remat in itertools.product(microbatches, schedules, REMATS):
                    yield Strategy(
                        pipe=pipe,
                        context=context,
                        tensor=tensor,
                        sequence=tensor > 1,
                        microbatches=m,
                        concurrent=1,  # neighbours of compiled strategies have 2 and more
                        schedule=schedule,
                        chunks=chunks,
                        remat=remat,
                        precision=precision,
                        **axes,
                    )


def _replica_axes(
    replicas: int, target: Target, devices_per_replica: int, experts: int, context: int
) -> Iterator[dict[str, Any]]:
    """Yield the ways to spread replicas over axes: plain, ZeRO over all of them, ZeRO within hosts; by expert ranks."""
    for expert in powers(math.gcd(replicas, experts)):
        data_ranks = replicas // expert
        yield {"data": data_ranks, "expert": expert}
        # One replica whose positions are not split has no axis to shard over.
        if replicas == 1 == context:
            continue
        # As many replicas as one host has room for, and as divide all of them.
        within = math.gcd(data_ranks, max(1, target.per_host // (devices_per_replica * expert)))
        for zero in (1, 2, 3):
            # fsdp=1 would mean no ZeRO; fsdp=-1 is ZeRO over the other axes alone.
            yield {"data": 1, "fsdp": data_ranks if data_ranks > 1 else -1, "expert": expert, "zero": zero}
            if target.hosts > 1 and 1 < within < data_ranks:
                yield {"data": data_ranks // within, "fsdp": within, "expert": expert, "zero": zero}


def powers(n: int) -> list[int]:
    """Return the powers of two that divide n."""
    return [1 << k for k in range(n.bit_length()) if n % (1 << k) == 0]


def parts_per_row(n: int, rows: int) -> int:
    """Return the smallest power of two such that `rows` rows, each split into so many parts, suffice for n devices."""
    return 1 << (-(-n // rows) - 1).bit_length()
