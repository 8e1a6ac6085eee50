"""Choose the strategies that a plan tries next: by families of strategies, and around a strategy, by one change.

`families` sorts strategies by the axes that they use, so that a plan compiles one of each kind first. `neighbours`
yields the strategies that differ from a good one in one choice, and `_repaired` adds what follows from that choice.
"""

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
from .candidates import NO_SPLITS, REMATS, Splits

T = TypeVar("T")


def families(pairs: Iterable[tuple[Strategy, T]], target: Target) -> list[list[tuple[Strategy, T]]]:
    """Group strategies, each with a value that is passed through, by the axes that they use.

    A family is a set of axes (`pipe`, `expert`, `context`, `tensor`) and the ZeRO stage along `fsdp`. First comes the
    first family of each set of axes, then the second of each, and so on. Sets of axes, stages, and the members of a
    family keep the order of `pairs`.
    """
    by_axes: dict[tuple[bool, ...], dict[int, list[tuple[Strategy, T]]]] = {}
    for strategy, value in pairs:
        shape = strategy.sizes(len(target.devices), target.hosts)
        by_stage = by_axes.setdefault(tuple(shape[axis] > 1 for axis in ("pipe", "expert", "context", "tensor")), {})
        by_stage.setdefault(strategy.zero if strategy.fsdp != 1 else 0, []).append((strategy, value))
    rounds = itertools.zip_longest(*(list(by_stage.values()) for by_stage in by_axes.values()))
    return [members for families_of_round in rounds for members in families_of_round if members]


def neighbours(strategy: Strategy, target: Target, rows: int, splits: Splits = NO_SPLITS) -> Iterator[Strategy]:
    """Yield the strategies that differ from one strategy in one choice, and in what follows from it, each once.

    They are those that the devices, the rows and `splits` allow. The choices are:

    - `microbatches`, `concurrent`, `chunks`, or two axes, by a factor of 2
    - `remat`; if the strategy recomputes, also "auto" with the memory that a program may take
    - `offload`, if the strategy offloads
    - `reduce`, `zero`, `gather`, `attention`
    - the schedule of a pipeline; for a mixture of experts also the one that overlaps forwards with backwards
    - all replicas plain, or all sharded; on several hosts also sharded within each host, with and without `hpz`

    The sizes of `strategy` are numbers; only `fsdp` may be -1. `rows` are those of the global batch.
    """
    shape = strategy.sizes(len(target.devices), target.hosts)
    seen = {strategy}
    for change in _changes(strategy, target, shape):
        axes = shape | change
        if axes["expert"] > splits.expert or axes["context"] > splits.context:
            continue
        # fsdp is 1 after the change and was not before.
        if axes["fsdp"] == 1 != strategy.fsdp:
            # Keep ZeRO over the remaining axes, unless there are none, or the change chose plain replicas.
            keeps_zero = axes["expert"] * axes["context"] > 1 and not {"data", "fsdp"} <= {*change}
            change = change | {"fsdp": -1 if keeps_zero else 1}
        neighbour = _repaired(strategy, change, rows // math.prod(axes[axis] for axis in ROWS))
        if neighbour is None or neighbour in seen or not _sensible(neighbour, target, rows):
            continue
        seen.add(neighbour)
        yield neighbour


def _changes(strategy: Strategy, target: Target, shape: dict[str, int]) -> list[dict[str, Any]]:
    """Return the fields that each choice changes, with their new values; some are invalid. `shape`: axis -> size."""
    pipe, m, chunks = strategy.pipe, strategy.microbatches, strategy.chunks

    # 1. Memory: recomputation and offload.
    changes: list[dict[str, Any]] = [{"remat": remat, "budget": ""} for remat in REMATS]
    if strategy.remat != "none" and (megabytes := (1 - RESERVE) * (target.hardware.memory_bytes or 0) // 1e6):
        changes += [{"remat": "auto", "budget": f"{megabytes:.0f}MB"}]
    if strategy.offloads:
        changes += [{"offload": offload} for offload in ("none", *SUMS)]

    # 2. Precision of sums, and microbatches.
    changes += [{"reduce": reduce} for reduce in ("f32", "compute") if strategy.precision != "f32"]
    changes += [{"microbatches": 2 * m}, {"microbatches": m // 2}]
    if (concurrent := strategy.concurrent) > 1:
        changes += [{"concurrent": concurrent // 2}]
    if pipe == 1 and max(shape["tensor"], shape["expert"], shape["context"]) > 1:
        changes += [{"concurrent": 2 * concurrent, "microbatches": math.lcm(m, 2 * concurrent)}]

    # 3. The pipeline's schedule.
    if pipe > 1:
        changes += [{"chunks": 2 * chunks}, {"chunks": chunks // 2}]
        changes += [
            {"schedule": name, "chunks": 2 if recipe.placement == "V" else chunks if recipe.planned else 1}
            for name, recipe in SCHEDULES.items()
            if recipe.planned or recipe.near
        ]
        # Tokens on their way to experts overlap with another microbatch's layer, if one runs at the same time.
        changes += [{"schedule": "1f1b-overlap"}] if shape["expert"] > 1 else []

    # 4. ZeRO.
    if strategy.fsdp != 1:
        changes += [{"zero": zero, "sync": Strategy.sync} for zero in (1, 2, 3)]
        changes += [{"zero": 3, "sync": "step"}] if strategy.turns > 1 else []
    if strategy.fsdp != 1 and strategy.zero == 3 and strategy.precision == "fp8":
        # FP8 products round weights to the same numbers whether they are gathered in FP8 or not.
        changes += [{"gather": "compute"}, {"gather": "fp8"}]
    within = math.gcd(shape["fsdp"], target.per_host // (shape["expert"] * shape["context"] * shape["tensor"]))
    if strategy.fsdp != 1 and strategy.zero == 3 and target.hosts > 1:
        within_hosts = {"data": shape["data"] * shape["fsdp"] // max(1, within), "fsdp": within}
        changes += [within_hosts | {"hpz": hpz} for hpz in (False, True) if within > 1]

    # 5. Context ranks, and the sizes of axes.
    if shape["context"] > 1:
        changes += [{"attention": mode} for mode in ("auto", "ring", "gather", "usp")]
    # Move a factor of two from one axis to another.
    for halved in AXES:
        for doubled in AXES:
            if halved != doubled and shape[halved] % 2 == 0:
                changes.append({halved: shape[halved] // 2, doubled: 2 * shape[doubled]})
    replicas = shape["data"] * shape["fsdp"]
    changes += [{"data": replicas, "fsdp": 1}, {"data": 1, "fsdp": replicas}]
    return changes


def alike_but(name: str, a: Strategy, b: Strategy) -> bool:
    """Return whether two strategies are equal in all fields but one."""
    return a == dataclasses.replace(b, **{name: getattr(a, name)})


def keeps_more(a: Strategy, b: Strategy) -> bool:
    """Return whether strategy `a` is `b` with less recomputation, so that it saves more activations."""
    has_order = a.remat in REMATS and b.remat in REMATS
    return has_order and REMATS.index(a.remat) < REMATS.index(b.remat) and alike_but("remat", a, b)


def _repaired(strategy: Strategy, change: dict[str, Any], rows_per_replica: int) -> Strategy | None:
    """Return the strategy with a change and all that follows from it; None if a size would be 0."""
    names = ("pipe", "data", "fsdp", "tensor", "microbatches", "chunks")
    values = {name: getattr(strategy, name) for name in names} | change
    # Half of 1 is 0.
    if any(values[name] == 0 for name in names):
        return None
    # A strategy refuses `concurrent` with a pipeline, and chunks or a schedule without one.
    if values["pipe"] > 1:
        change = change | {"concurrent": 1}
    if values["pipe"] == 1:
        change = change | {"chunks": 1, "schedule": Strategy.schedule}
    elif strategy.pipe == 1:
        change = change | {"microbatches": math.gcd(PER_RANK * values["pipe"], rows_per_replica)}
    elif "microbatches" not in change and rows_per_replica % values["microbatches"]:
        change = change | {"microbatches": math.gcd(values["microbatches"], rows_per_replica)}
    if change.get("microbatches", strategy.microbatches) % change.get("concurrent", strategy.concurrent):
        change = change | {"concurrent": 1}
    # Options of ZeRO return to their defaults where they would have no meaning.
    if 1 in (values["data"], values["fsdp"]) or change.get("zero", strategy.zero) != 3:
        change = change | {"hpz": False}
    if values["fsdp"] == 1:
        change = change | {"zero": Strategy.zero, "sync": Strategy.sync}
    if values["fsdp"] == 1 or change.get("zero", strategy.zero) != 3:
        change = change | {"gather": Strategy.gather}
    if change.get("context") == 1:
        change = change | {"attention": Strategy.attention}
    # Offload the terms that the new choices allow on the host.
    terms = change.get("offload", strategy.offload).split("+")
    repaired = dataclasses.replace(strategy, **change | {"offload": "none"}, sequence=values["tensor"] > 1)
    offload = "+".join(term for term in terms if term == "none" or not repaired.kept_on_device(term))
    return dataclasses.replace(repaired, offload=offload or "none")


def _sensible(strategy: Strategy, target: Target, rows: int) -> bool:
    """Return whether microbatches divide the rows, `tensor` stays within a host, and chunks fit the pipeline."""
    shape = strategy.sizes(len(target.devices), target.hosts)
    replicas = math.prod(shape[axis] for axis in ROWS)
    if rows % (replicas * strategy.microbatches) or shape["tensor"] > max(target.per_host, 1):
        return False
    # Interleaved chunks run microbatches in groups of as many as there are ranks.
    return strategy.chunks == 1 or strategy.microbatches % strategy.pipe == 0
