"""The strategies that a plan considers for a number of devices."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...hardware.devices import Target
from ...strategy import Strategy
from ...strategy.schedules import SCHEDULES

REMATS = ("none", "dots", "layer")
_MICROBATCHES = (1, 2, 4)  # times the ranks of a pipeline: the bubble shrinks, the messages grow in number


@dataclass(frozen=True)
class Splits:
    """How many ranks may share what only some losses have: a mixture's experts, and the positions of a row."""

    expert: int = 1
    context: int = 1


NONE = Splits()


def candidates(target: Target, rows: int, precision: str, splits: Splits = NONE) -> Iterator[Strategy]:
    """The strategies that are sensible on a target for so many rows of a global batch.

    Left out are those that another is no worse than: GPipe keeps more than 1F1B for the same bubble, `tensor` without
    `sequence` sends as much and keeps more (Korthikanti et al. 2022, section 4.2.2), `tensor` across hosts sends by the
    network what each layer waits for.
    """
    n = len(target.devices)
    if n == 1:
        for remat in REMATS:
            for m in powers(rows):
                yield Strategy(data=1, microbatches=m, remat=remat, precision=precision)
        return
    planned = [name for name, recipe in SCHEDULES.items() if recipe.planned]
    for pipe, context in itertools.product(powers(n), powers(splits.context)):
        for tensor in powers(math.gcd(n // pipe, target.per_host)):
            replicas, other = divmod(n, pipe * context * tensor)
            if other or rows % replicas:
                continue
            mine = rows // replicas
            cuts = powers(mine) if pipe == 1 else [k * pipe for k in _MICROBATCHES if mine % (k * pipe) == 0]
            schedules = [(Strategy.schedule, 1)] if pipe == 1 else list(itertools.product(planned, (1, 2)))
            for axes in _spread(replicas, target, tensor * context, splits.expert, context):
                for m, (schedule, chunks), remat in itertools.product(cuts, schedules, REMATS):
                    yield Strategy(
                        pipe=pipe,
                        context=context,
                        tensor=tensor,
                        sequence=tensor > 1,
                        microbatches=m,
                        schedule=schedule,
                        chunks=chunks,
                        remat=remat,
                        precision=precision,
                        **axes,
                    )


def _spread(replicas: int, target: Target, inner: int, experts: int, context: int) -> Iterator[dict[str, Any]]:
    """By number of expert ranks: replicas, ZeRO over all, and within hosts; a replica is `inner` devices."""
    for expert in powers(math.gcd(replicas, experts)):
        left = replicas // expert
        yield {"data": left, "expert": expert}
        if replicas == 1 == context:
            continue
        within = math.gcd(left, max(1, target.per_host // (inner * expert)))
        for zero in (1, 2, 3):
            # One device on `fsdp` is plain replicas; what is left of the devices is ZeRO over the other axes.
            yield {"data": 1, "fsdp": left if left > 1 else -1, "expert": expert, "zero": zero}
            if target.hosts > 1 and 1 < within < left:
                yield {"data": left // within, "fsdp": within, "expert": expert, "zero": zero}


def powers(n: int) -> list[int]:
    """The powers of two that divide n."""
    return [1 << k for k in range(n.bit_length()) if n % (1 << k) == 0]


def enough(n: int, rows: int) -> int:
    """The least power of two by which so many rows are cut into parts for n devices."""
    return 1 << (-(-n // rows) - 1).bit_length()
