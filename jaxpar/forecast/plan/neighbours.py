"""What a plan tries next: the families of strategies, and those that differ from a strategy in one choice."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from ...hardware.devices import Target
from ...hardware.hardware import RESERVE
from ...strategy import PER_RANK, SUMS, Strategy
from ...strategy.axes import AXES, ROWS
from ...strategy.schedules import SCHEDULES
from .candidates import NONE, REMATS, Splits

T = TypeVar("T")


def families(found: Iterable[tuple[Strategy, T]], target: Target) -> list[list[tuple[Strategy, T]]]:
    """Strategies, and what is known of each, by kind: whether there is a pipeline, whether matmuls, experts or
    positions are split, and what `fsdp` shards. First the first kind for each choice of these axes, then each one's
    second, and so on.
    """
    kinds: dict[tuple[bool, ...], dict[int, list[tuple[Strategy, T]]]] = {}
    for strategy, known in found:
        shape = strategy.sizes(len(target.devices), target.hosts)
        of_axes = kinds.setdefault(tuple(shape[axis] > 1 for axis in ("pipe", "expert", "context", "tensor")), {})
        of_axes.setdefault(strategy.zero if strategy.fsdp != 1 else 0, []).append((strategy, known))
    rounds = itertools.zip_longest(*(list(by_zero.values()) for by_zero in kinds.values()))
    return [members for one in rounds for members in one if members]


def neighbours(strategy: Strategy, target: Target, rows: int, splits: Splits = NONE) -> Iterator[Strategy]:
    """The strategies that differ from one in microbatches, how many of them are concurrent, chunks or an axis by a
    factor of 2, in `remat` (where it recomputes, also by "auto" with what a device may take), in `offload` if it has
    some, in `reduce`, `zero`, `gather`, how context ranks attend, or a pipeline's schedule (for a mixture also by that
    whose forwards and backwards run side by side), or in that all replicas are plain or all are sharded, of several
    hosts within each, with `hpz` or without; and that the devices, the rows of a global batch and `splits` allow.
    `strategy`'s sizes are numbers, but for an `fsdp` of -1.
    """
    n, (pipe, m, chunks) = len(target.devices), (strategy.pipe, strategy.microbatches, strategy.chunks)
    shape = strategy.sizes(n, target.hosts)
    changes: list[dict[str, Any]] = [{"remat": remat, "budget": ""} for remat in REMATS]
    if strategy.remat != "none" and (megabytes := (1 - RESERVE) * (target.hardware.memory_bytes or 0) // 1e6):
        changes += [{"remat": "auto", "budget": f"{megabytes:.0f}MB"}]
    if strategy.offloads:
        changes += [{"offload": offload} for offload in ("none", *SUMS)]
    changes += [{"reduce": reduce} for reduce in ("f32", "compute") if strategy.precision != "f32"]
    changes += [{"microbatches": 2 * m}, {"microbatches": m // 2}]
    if (beside := strategy.concurrent) > 1:
        changes += [{"concurrent": beside // 2}]
    if pipe == 1 and max(shape["tensor"], shape["expert"], shape["context"]) > 1:
        changes += [{"concurrent": 2 * beside, "microbatches": math.lcm(m, 2 * beside)}]
    if pipe > 1:
        changes += [{"chunks": 2 * chunks}, {"chunks": chunks // 2}]
        changes += [
            {"schedule": name, "chunks": 2 if recipe.placement == "V" else chunks if recipe.planned else 1}
            for name, recipe in SCHEDULES.items()
            if recipe.planned or recipe.near
        ]
        # Tokens on their way to experts go behind another microbatch's layer, where there is one beside.
        changes += [{"schedule": "1f1b-overlap"}] if shape["expert"] > 1 else []
    if strategy.fsdp != 1:
        changes += [{"zero": zero, "sync": Strategy.sync} for zero in (1, 2, 3)]
        changes += [{"zero": 3, "sync": "step"}] if strategy.turns > 1 else []
    if strategy.fsdp != 1 and strategy.zero == 3 and strategy.precision == "fp8":
        changes += [{"gather": "compute"}, {"gather": "fp8"}]  # which FP8 products round to the same numbers
    within = math.gcd(shape["fsdp"], target.per_host // (shape["expert"] * shape["context"] * shape["tensor"]))
    if strategy.fsdp != 1 and strategy.zero == 3 and target.hosts > 1:
        over = {"data": shape["data"] * shape["fsdp"] // max(1, within), "fsdp": within}
        changes += [over | {"hpz": hpz} for hpz in (False, True) if within > 1]
    if shape["context"] > 1:
        changes += [{"attention": way} for way in ("auto", "ring", "gather", "usp")]
    for fewer in AXES:
        for more in AXES:
            if fewer != more and shape[fewer] % 2 == 0:
                changes.append({fewer: shape[fewer] // 2, more: 2 * shape[more]})
    replicas = shape["data"] * shape["fsdp"]
    changes += [{"data": replicas, "fsdp": 1}, {"data": 1, "fsdp": replicas}]
    seen = {strategy}
    for change in changes:
        axes = shape | change
        if axes["expert"] > splits.expert or axes["context"] > splits.context:
            continue
        if axes["fsdp"] == 1 != strategy.fsdp:
            others = axes["expert"] * axes["context"] > 1 and not {"data", "fsdp"} <= {*change}
            change = change | {"fsdp": -1 if others else 1}  # ZeRO over the other axes alone, or none
        found = _mended(strategy, change, rows // math.prod(axes[axis] for axis in ROWS))
        if found is None or found in seen or not _sensible(found, target, rows):
            continue
        seen.add(found)
        yield found


def alike_but(name: str, one: Strategy, other: Strategy) -> bool:
    """Whether two strategies are alike but for one choice."""
    return one == dataclasses.replace(other, **{name: getattr(one, name)})


def keeps_more(strategy: Strategy, other: Strategy) -> bool:
    """Whether a strategy is another that recomputes less."""
    named = strategy.remat in REMATS and other.remat in REMATS
    return named and REMATS.index(strategy.remat) < REMATS.index(other.remat) and alike_but("remat", strategy, other)


def _mended(strategy: Strategy, change: dict[str, Any], mine: int) -> Strategy | None:
    """The strategy with that change and what follows from it; None where it cannot be. `mine`: rows of a replica."""
    names = ("pipe", "data", "fsdp", "tensor", "microbatches", "chunks")
    values = {name: getattr(strategy, name) for name in names} | change
    if any(values[name] == 0 for name in names):
        return None
    if values["pipe"] > 1:
        change = change | {"concurrent": 1}
    if values["pipe"] == 1:
        change = change | {"chunks": 1, "schedule": Strategy.schedule}
    elif strategy.pipe == 1:
        change = change | {"microbatches": math.gcd(PER_RANK * values["pipe"], mine)}
    elif "microbatches" not in change and mine % values["microbatches"]:
        change = change | {"microbatches": math.gcd(values["microbatches"], mine)}
    if change.get("microbatches", strategy.microbatches) % change.get("concurrent", strategy.concurrent):
        change = change | {"concurrent": 1}
    if 1 in (values["data"], values["fsdp"]) or change.get("zero", strategy.zero) != 3:
        change = change | {"hpz": False}
    if values["fsdp"] == 1:
        change = change | {"zero": Strategy.zero, "sync": Strategy.sync}
    if values["fsdp"] == 1 or change.get("zero", strategy.zero) != 3:
        change = change | {"gather": Strategy.gather}
    if change.get("context") == 1:
        change = change | {"attention": Strategy.attention}
    terms = change.get("offload", strategy.offload).split("+")
    found = dataclasses.replace(strategy, **change | {"offload": "none"}, sequence=values["tensor"] > 1)
    offload = "+".join(term for term in terms if term == "none" or not found.kept_on_device(term))
    return dataclasses.replace(found, offload=offload or "none")


def _sensible(strategy: Strategy, target: Target, rows: int) -> bool:
    shape = strategy.sizes(len(target.devices), target.hosts)
    replicas = math.prod(shape[axis] for axis in ROWS)
    if rows % (replicas * strategy.microbatches) or shape["tensor"] > max(target.per_host, 1):
        return False
    return strategy.chunks == 1 or strategy.microbatches % strategy.pipe == 0
