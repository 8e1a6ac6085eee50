"""The strategies that a plan considers for a number of devices, and what closed forms say of each before any compiling.

    state        `Layout.bytes`: parameters and optimizer state of a device; gradients
    activations  what the traced loss keeps for its backward, per row, under this remat and tensor: `memory.forward`;
                 of a pipeline, those of a stage times the schedule's slots
    bytes        state + the larger of gradients and activations: less than any program needs, as none frees the one
                 before it makes the other, and all have temporaries beside them
    compute      3 forwards (4 with remat="layer") of the traced matmuls, one of them for what is trained alone, over
                 1 - bubble of a pipeline; of a microbatch
                 the longest of: FLOPs at the peak, weights read and gradients written, a kernel's start each; beside it
                 sums of gradients are read and written, if there is more than one
    seconds      compute + what tensor sends + what ZeRO and replicas send beyond compute, at `links`' speed; bandwidths
                 of the links and peaks are upper bounds, so that this is less than the program takes

The forms only choose what is compiled. Every number that is shown of a line comes from its compiled program.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from ...layout.precision import Policy
from ...make import make_train_step
from ...model.batches import rows_of
from ...model.model import Model, Replicated
from ...parallel import Times, Uses, rule_of
from ...parallel.pipeline.schedules import Schedule
from ...step.core import Step
from ...strategy import Strategy
from ...tables import SCHEDULES
from ..expected import expected
from ..memory import forward
from ..predict.efficiency import PRODUCT_START
from ..predict.links import Reach, collective_seconds
from ..targets.devices import Target

_PEAK = {"bf16": "bf16", "f16": "f16", "f32": "tf32"}
REMATS = ("none", "dots", "layer")
_MICROBATCHES = (1, 2, 4)  # times the ranks of a pipeline: the bubble shrinks, the messages grow in number


@dataclass(frozen=True)
class Estimate:
    """Closed forms of a strategy, per device: bytes, and seconds of a step; see the module.

    Attributes:
      params, grads, optimizer: bytes at rest, as the layout has them.
      activations: bytes that backwards need of forwards.
      seconds: compute + what is sent and cannot be hidden.
      compute, sent: seconds of matmuls at the peak, and of collectives, hidden or not.
      bubble: the part of a step in which a rank of the pipeline is idle.
    """

    params: int
    grads: int
    optimizer: int
    activations: int
    seconds: float
    compute: float
    sent: float
    bubble: float

    @property
    def bytes(self) -> int:
        """That a device needs at least."""
        return self.params + self.optimizer + max(self.grads, self.activations)


def candidates(target: Target, rows: int, precision: str) -> Iterator[Strategy]:
    """The strategies that are sensible on a target for so many rows of a global batch.

    Left out are those that another is no worse than: GPipe keeps more than 1F1B for the same bubble, `tensor` without
    `sequence` sends as much and keeps more (Korthikanti et al. 2022, section 4.2.2), `tensor` across hosts sends by the
    network what each layer waits for.
    """
    n = len(target.devices)
    if n == 1:
        for remat in REMATS:
            for m in _powers(rows):
                yield Strategy(data=1, microbatches=m, remat=remat, precision=precision)
        return
    for pipe in _powers(n):
        for tensor in _powers(math.gcd(n // pipe, target.per_host)):
            replicas = n // pipe // tensor
            for axes in _sharded(replicas, target, tensor):
                if rows % replicas:
                    continue
                mine = rows // replicas
                cuts = _powers(mine) if pipe == 1 else [k * pipe for k in _MICROBATCHES if mine % (k * pipe) == 0]
                planned = [name for name, recipe in SCHEDULES.items() if recipe.planned]
                schedules = [(Strategy.schedule, 1)] if pipe == 1 else list(itertools.product(planned, (1, 2)))
                for m in cuts:
                    for schedule, chunks in schedules:
                        for remat in REMATS:
                            yield Strategy(
                                pipe=pipe,
                                tensor=tensor,
                                sequence=tensor > 1,
                                microbatches=m,
                                schedule=schedule,
                                chunks=chunks,
                                remat=remat,
                                precision=precision,
                                **axes,
                            )


def _sharded(replicas: int, target: Target, tensor: int) -> Iterator[dict[str, Any]]:
    """Plain replicas, ZeRO over all of them, and where they span hosts, ZeRO within a host."""
    yield {"data": replicas}
    if replicas == 1:
        return
    within = math.gcd(replicas, max(1, target.per_host // tensor))
    for zero in (1, 2, 3):
        yield {"data": 1, "fsdp": replicas, "zero": zero}
        if target.hosts > 1 and 1 < within < replicas:
            yield {"data": replicas // within, "fsdp": within, "zero": zero}


def _powers(n: int) -> list[int]:
    """The powers of two that divide n."""
    return [1 << k for k in range(n.bit_length()) if n % (1 << k) == 0]


@dataclass(frozen=True)
class _Facts:
    """Of the loss under one `tensor`, `sequence` and `remat`: forward FLOPs, kept bytes, bytes over `tensor`; of a row
    each; matmuls, and kept bytes that do not depend on the rows.
    """

    flops: float
    products: int
    kept: float
    fixed: float
    sent: dict[str, float]  # by kind


@dataclass(frozen=True)
class _Held:
    """Of the layout under one strategy: bytes at rest; elements of parameters that a rank computes with, and of these
    those that are trained; and both of what no stage of a pipeline owns.
    """

    bytes: dict[str, int]
    elements: int
    trained: int
    outside: tuple[int, int]


@dataclass
class Estimator:
    """Closed forms of strategies of one model, each part of them computed once.

    `estimate` raises the ValueError of `make_train_step`, or of tracing, where a strategy cannot be.
    """

    model: Model
    optimizer: Any
    target: Target
    batch: Any
    rules: Any = None
    trainable: Callable[[str], bool] | None = None
    _facts: dict[Any, _Facts | ValueError] = field(default_factory=dict)
    _layouts: dict[Any, _Held | ValueError] = field(default_factory=dict)
    _schedules: dict[Any, Schedule | ValueError] = field(default_factory=dict)

    def estimate(self, strategy: Strategy) -> Estimate:
        """The closed forms of a strategy whose sizes are numbers."""
        held = _once(self._layouts, _places(strategy), lambda: self._held(strategy))
        facts = _once(
            self._facts, (strategy.tensor, strategy.sequence, strategy.remat), lambda: self._facts_of(strategy)
        )
        s, shape = strategy, strategy.sizes(len(self.target.devices), self.target.hosts)
        pipe, replicas = shape["pipe"], shape["data"] * shape["fsdp"]
        rows = rows_of(self.batch) / replicas
        numbers = (s.schedule, pipe, s.microbatches, s.chunks)
        schedule = _once(self._schedules, numbers, lambda: Schedule(*numbers)) if pipe > 1 else None
        bubble = float(schedule.bubble) if schedule else 0.0
        of_one = facts.fixed + facts.kept * rows / s.microbatches
        kept = of_one * schedule.slots / (pipe * s.chunks) if schedule else of_one
        compute = s.microbatches * self._microbatch(s, shape, facts, held, rows / s.microbatches) / (1 - bubble)
        between = sum(self._seconds(kind, size * rows / pipe, shape, "tensor") for kind, size in facts.sent.items())
        hideable = self._of_weights(s, shape, held)
        seconds = compute + between + max(0.0, hideable - compute)
        sent = between + hideable
        return Estimate(**held.bytes, activations=int(kept), seconds=seconds, compute=compute, sent=sent, bubble=bubble)

    def _microbatch(self, s: Strategy, shape: dict[str, int], facts: _Facts, held: _Held, rows: float) -> float:
        """Seconds of a rank's kernels for one microbatch of so many rows."""
        hardware = self.target.hardware
        # What is frozen has no gradient, which is the third.
        passes = 2 + held.trained / held.elements + (s.remat == "layer")
        peak = hardware.peak(_PEAK[s.precision]) or hardware.peak("f32")
        bandwidth = hardware.memory_bandwidth
        assert peak is not None  # `plan` has seen to it
        assert bandwidth is not None
        flops = passes * facts.flops * rows / shape["pipe"] / peak
        weights = (passes - 1) * held.elements * _computed(s).itemsize / bandwidth
        starts = passes * facts.products / shape["pipe"] * PRODUCT_START
        sums = 2 * held.bytes["grads"] / bandwidth if s.microbatches > 1 else 0.0
        return max(flops, weights, starts) + sums

    def _held(self, strategy: Strategy) -> _Held:
        step = self._step(strategy, self.target.devices)
        ranks = step.mesh.shape["pipe"]
        counts = [
            (math.prod(leaf.local.stored) // (ranks if leaf.of_a_stage else 1), leaf.trainable, not leaf.of_a_stage)
            for leaf in step.layout.leaves
        ]
        outside = [(n, trained) for n, trained, alone in counts if alone and ranks > 1]
        trained = [sum(n for n, on, *_ in some if on) for some in (counts, outside)]
        return _Held(
            step.layout.bytes, sum(n for n, *_ in counts), trained[0], (sum(n for n, _ in outside), trained[1])
        )

    def _step(self, strategy: Strategy, devices: Any) -> Step:
        step = make_train_step(self.model, self.optimizer, strategy, devices, self.trainable, self.rules)
        if strategy.tensor > 1 and all(leaf.tensor is None for leaf in step.layout.leaves):
            raise ValueError(
                f"tensor={strategy.tensor} splits no parameter, and each of its ranks would compute the same; say "
                "which dims to split: rules={...: -1}"
            )
        return step

    def _facts_of(self, strategy: Strategy) -> _Facts:
        changes = {"data": 1, "fsdp": 1, "rule": "", "pipe": 1, "microbatches": 1, "chunks": 1}
        strategy = dataclasses.replace(strategy, **changes)
        step = self._step(strategy, self.target.devices[: strategy.tensor])
        one, two = (_with_rows(self.batch, n) for n in (1, 2))
        first, second = forward(step, one), forward(step, two)
        sent: dict[str, float] = {}
        if strategy.tensor > 1:
            for entry in expected(step, one):
                if entry.axes == ("tensor",):
                    sent[entry.kind] = sent.get(entry.kind, 0.0) + entry.bytes
        fixed = max(0, 2 * first.saved - second.saved)
        return _Facts(first.flops, first.products, second.saved - first.saved, fixed, sent)

    def _of_weights(self, s: Strategy, shape: dict[str, int], held: _Held) -> float:
        """Seconds in which weights and gradients are sent: what the rule promises of all leaves as one, which is used
        once forwards and once backwards; of those that no stage of a pipeline owns, once a step.
        """
        m, (alone, alone_trained) = s.microbatches, held.outside
        # How often it fetches them: idle ranks do too.
        ticks = m if shape["pipe"] == 1 else m + math.ceil((shape["pipe"] - 1) / s.chunks)
        uses = Uses(
            elements=held.trained,
            fetched=_some(Times(2 * ticks, held.elements - alone), Times(1, alone)),
            given=_some(Times(m, held.trained - alone_trained), Times(1, alone_trained)),
            updated=(Times(1, held.trained),),
            last=False,
            shard=("fsdp",) if shape["fsdp"] > 1 else (),
            rest=("data",) if shape["data"] > 1 else (),
            sizes=shape,
            compute=_computed(s),
            reduce=_reduced(s),
            stored=_computed(s),
        )
        seconds = 0.0
        for one in rule_of(s).promise.sends(uses):
            if one.axes:
                seconds += one.count * self._seconds(one.kind, one.bytes / one.count, shape, one.axes[0])
        return seconds

    def _seconds(self, kind: str, size: float, shape: dict[str, int], axis: str) -> float:
        inner = math.prod(shape[a] for a in list(shape)[list(shape).index(axis) + 1 :])
        local = max(1, min(shape[axis], self.target.per_host // inner))
        way = Reach(shape[axis], -(-shape[axis] // local), local)
        return collective_seconds(kind, int(size), way, self.target.hardware)[0]


def _some(*times: Times) -> tuple[Times, ...]:
    return tuple(each for each in times if each.elements)


def _computed(s: Strategy) -> Any:
    return Policy.of(s).computed(jnp.dtype(jnp.float32))


def _reduced(s: Strategy) -> Any:
    return Policy.of(s).reduced(jnp.dtype(jnp.float32))


def _once(found: dict[Any, Any], key: Any, make: Any) -> Any:
    """What was made for a key, or the error that it raised, again."""
    if key not in found:
        try:
            found[key] = make()
        except ValueError as error:
            found[key] = error
    if isinstance(found[key], ValueError):
        raise found[key]
    return found[key]


def _places(s: Strategy) -> tuple[Any, ...]:
    """What the layout of a state depends on."""
    return s.pipe, s.chunks, s.data, s.fsdp, s.zero, s.rule, s.tensor, s.precision, s.reduce


def _with_rows(batch: Any, rows: int) -> Any:
    def leaf(x: Any) -> Any:
        return x if isinstance(x, Replicated) else jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)

    return jax.tree.map(leaf, batch, is_leaf=lambda x: isinstance(x, Replicated))
