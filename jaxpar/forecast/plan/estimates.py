"""What closed forms say of a strategy before anything is compiled.

    state        `Layout.bytes`: parameters and optimizer state of a device; gradients
    activations  what the traced loss keeps for its backward, per row, under this remat, tensor, context and expert:
                 `memory.forward`; of a pipeline, those of a stage times the schedule's slots. Beside them the layer
                 that a prefetch gathers ahead, and the gradients of the one that it reduces behind; and whole
                 gradients, where several microbatches accumulate them (zero=1, sync="step"); hpZ's second shard
    bytes        state + the larger of gradients and activations: less than any program needs, as none frees the one
                 before it makes the other, and all have temporaries beside them
    compute      3 forwards (4 with remat="layer") of the traced matmuls, one of them for what is trained alone, over
                 1 - bubble of a pipeline, whose chunks are all as long as the longest; of a microbatch
                 the longest of: FLOPs at the peak, weights read and gradients written, a kernel's start each; beside it
                 sums of gradients are read and written, if there is more than one
    sent         what ranks of tensor, context and expert send for a row, as the traced loss has it, in messages of a
                 microbatch; of weights and gradients what the rule promises, those of experts for themselves
    update       of an optimizer of whole matrices: FLOPs of the busiest owner at float32's peak, and the exchanges that
                 `numerics/matrices/owners.py` promises; both are part of compute and sent
    host         with `offload`, the optimizer's state both ways, during which nothing computes, and activations both
                 ways, which hide behind compute; over the host's bandwidth
    seconds      compute + host + what tensor and context send + what a ring, experts, ZeRO and replicas send beyond
                 compute, at `links`' speed; bandwidths of the links and peaks are upper bounds, so that this is less
                 than the program takes

The forms only choose what is compiled. Every number that is shown of a line comes from its compiled program.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from ...hardware.devices import Target
from ...hardware.links import Reach, collective_seconds
from ...inspect.memory import forward
from ...inspect.predict.efficiency import PRODUCT_START
from ...inspect.uses import count
from ...layout.precision import Policy
from ...make import make_train_step
from ...model.batches import rows_of
from ...model.model import Model, Replicated
from ...numerics.matrices.owners import Owners
from ...parallel.data import DDP, Times, Uses, rule_of
from ...parallel.pipeline.schedules import Schedule
from ...step.core import Step
from ...strategy import Strategy
from ...strategy.axes import ROWS, SHARDS
from .candidates import Splits, powers

_PEAK = {"bf16": "bf16", "f16": "f16", "f32": "tf32", "fp8": "fp8"}  # of fp8 a bound: gradients of weights stay bf16


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


@dataclass(frozen=True)
class _Facts:
    """Of the loss on the ranks of `tensor`, `context` and `expert`, under one `remat`: forward FLOPs, kept bytes, and
    what the ranks send each other; of one row of each rank. Besides matmuls, kept bytes that do not depend on the
    rows, the layers that a pipeline deals out (0 if there is no stack), and the elements of one of them.
    """

    flops: float
    products: int
    kept: float
    fixed: float
    layers: int
    layer: int
    sent: dict[tuple[str, tuple[str, ...]], tuple[int, float]]  # (kind, axes) -> executions, bytes of all


@dataclass
class _Group:
    """Elements of leaves spread alike: a rank's, those outside a pipeline's stages, and the trained of both."""

    elements: int = 0
    trained: int = 0
    outside: int = 0
    outside_trained: int = 0


@dataclass(frozen=True)
class _Held:
    """Of the layout under one strategy: bytes at rest and on the host, the leaves of experts and all others, the mesh,
    and the owners of whole matrices, None of an elementwise optimizer.
    """

    bytes: dict[str, int]
    host: dict[str, int]
    groups: dict[bool, _Group]
    mesh: Any
    owners: Owners | None

    @property
    def elements(self) -> int:
        return sum(group.elements for group in self.groups.values())

    @property
    def trained(self) -> int:
        return sum(group.trained for group in self.groups.values())


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

    def splits(self) -> tuple[Splits, str]:
        """How many ranks may share experts and positions, and what two ranks of `context` are refused with."""
        n = len(self.target.devices)
        experts = context = 1
        if n == 1:
            return Splits(), ""
        try:
            leaves = self._step(Strategy(expert=2), self.target.devices[:2]).layout.leaves
            experts = powers(math.gcd(*(leaf.shape[leaf.expert] for leaf in leaves if leaf.expert is not None)))[-1]
        except ValueError:
            pass  # no mixture
        try:
            two = Strategy(context=2)
            _once(self._facts, _program(two), lambda: self._facts_of(two))
            context = powers(n)[-1]
        except ValueError as error:
            return Splits(experts), str(error)
        return Splits(experts, context), ""

    def estimate(self, strategy: Strategy) -> Estimate:
        """The closed forms of a strategy whose sizes are numbers, but for an `fsdp` of -1. With remat="auto", which
        keeps what there is room for, the seconds of remat="none" and the bytes of "layer".
        """
        if strategy.remat == "auto":
            fixed = (dataclasses.replace(strategy, remat=remat, budget="") for remat in ("none", "layer"))
            fastest, smallest = map(self.estimate, fixed)
            return dataclasses.replace(fastest, activations=smallest.activations)
        facts = _once(self._facts, _program(strategy), lambda: self._facts_of(strategy))
        s, shape = strategy, strategy.sizes(len(self.target.devices), self.target.hosts)
        pipe, m, stages = shape["pipe"], s.microbatches, shape["pipe"] * s.chunks
        if 0 < 2 * facts.layers <= stages:
            raise ValueError(f"{facts.layers} layers leave half or more of {pipe} x {s.chunks} stages empty; try less")
        held = _once(self._layouts, _places(strategy), lambda: self._held(strategy))
        rows = rows_of(self.batch) / math.prod(shape[axis] for axis in ROWS)
        numbers = (s.schedule, pipe, m, s.chunks)
        schedule = _once(self._schedules, numbers, lambda: Schedule.of(*numbers)) if pipe > 1 else None
        bubble = float(schedule.bubble) if schedule else 0.0
        of_one = facts.fixed + facts.kept * rows / m * s.concurrent
        kept = of_one * schedule.slots / (pipe * s.chunks) if schedule else of_one
        if s.prefetches(held.mesh) and s.fsdp != 1 and facts.layers > 1:
            carried = (s.zero == 3) + (s.zero > 1) * held.trained / held.elements
            kept += carried * facts.layer * _computed(s).itemsize
        if s.turns > 1 and s.fsdp != 1 and not rule_of(s).at_once:  # whole gradients are there while others are made
            kept += held.trained * _reduced(s).itemsize
        kept += s.hpz * held.elements / shape["fsdp"] * _computed(s).itemsize
        longest = stages * math.ceil(facts.layers / stages) / facts.layers if facts.layers else 1.0
        compute = m * longest * self._microbatch(s, shape, facts, held, rows / m) / (1 - bubble)
        waits, hideable = 0.0, self._of_weights(s, shape, held)
        for (kind, axes), (times, size) in facts.sent.items():
            seconds = m * times / pipe * self._seconds(kind, size / times * rows / m, shape, axes)
            # A ring's hops go behind the attention of the block before, tokens behind other microbatches' experts, and
            # all of a concurrent microbatch's behind the other.
            if kind == "collective-permute" or "expert" in axes or s.concurrent > 1:
                hideable += seconds
            else:
                waits += seconds
        if held.owners is not None:
            peak = self.target.hardware.peak("tf32") or self.target.hardware.peak("f32")
            assert peak is not None  # `plan` has seen to it
            compute += held.owners.flops / peak
            waits += sum(self._seconds(one.kind, one.bytes, shape, one.axes) for one in held.owners.sends)
        if s.offloads:
            if (speed := self.target.hardware.host_bandwidth) is None:
                raise ValueError(f"{self.target.kind} has no host_bandwidth to plan offload={s.offload!r} by")
            waits += 2 * (held.host["optimizer"] + held.host["params"] * held.trained / held.elements) / speed
            beside = 2 * s.turns * held.host["params"]  # layers, for the forward and for the backward
            if "activations" in s.offloads:
                beside += 2 * s.turns * kept
                kept *= 2 / max(2, facts.layers)  # two layers at a time
            waits += max(0.0, beside / speed - compute)
        seconds, sent = compute + waits + max(0.0, hideable - compute), waits + hideable
        return Estimate(**held.bytes, activations=int(kept), seconds=seconds, compute=compute, sent=sent, bubble=bubble)

    def _microbatch(self, s: Strategy, shape: dict[str, int], facts: _Facts, held: _Held, rows: float) -> float:
        """Seconds of a rank's kernels for one microbatch of so many rows."""
        hardware = self.target.hardware
        # What is frozen has no gradient, which is the third.
        passes = 2 + held.trained / held.elements + {"layer": 1, "twice": 2}.get(str(s.remat), 0)
        peak = hardware.peak(_PEAK[s.precision]) or hardware.peak("f32")
        bandwidth = hardware.memory_bandwidth
        assert peak is not None  # `plan` has seen to it
        assert bandwidth is not None
        flops = passes * facts.flops * rows / shape["pipe"] / peak
        weights = (passes - 1) * held.elements * _computed(s).itemsize / bandwidth
        starts = passes * facts.products / shape["pipe"] * PRODUCT_START
        sums = 2 * held.bytes["grads"] / bandwidth if s.turns > 1 else 0.0
        return max(flops, weights, starts) + sums

    def _held(self, strategy: Strategy) -> _Held:
        step = self._step(strategy, self.target.devices)
        ranks = step.mesh.shape["pipe"]
        groups: dict[bool, _Group] = {}
        for leaf in step.layout.leaves:
            group = groups.setdefault(leaf.expert is not None, _Group())
            count = math.prod(leaf.local.stored) // (ranks if leaf.of_a_stage else 1)
            group.elements += count
            group.trained += count * leaf.trainable
            if ranks > 1 and not leaf.of_a_stage:
                group.outside += count
                group.outside_trained += count * leaf.trainable
        return _Held(step.layout.bytes, step.layout.host_bytes, groups, step.mesh, step.update.owners)

    def _step(self, strategy: Strategy, devices: Any) -> Step:
        step = make_train_step(self.model, self.optimizer, strategy, devices, self.trainable, self.rules)
        if strategy.tensor > 1 and all(leaf.tensor is None for leaf in step.layout.leaves):
            raise ValueError(
                f"tensor={strategy.tensor} splits no parameter, and each of its ranks would compute the same; say "
                "which dims to split: rules={...: -1}"
            )
        return step

    def _facts_of(self, strategy: Strategy) -> _Facts:
        changes = {"data": 1, "fsdp": 1, "rule": "", "pipe": 1, "microbatches": 1, "concurrent": 1, "chunks": 1}
        s = dataclasses.replace(strategy, **changes)
        step = self._step(s, self.target.devices[: s.tensor * s.context * s.expert])
        one, two = (_with_rows(self.batch, n * s.expert) for n in (1, 2))
        first, second = forward(step, one), forward(step, two)
        sent: dict[Any, tuple[int, float]] = {}
        for each in count(step, step.traced(one))[0].own if step.mesh.size > 1 else ():
            # Rounds of what overflows are not counted: balanced experts have none.
            if each.count and not each.conditional:
                times, size = sent.get((each.kind, each.axes), (0, 0.0))
                sent[each.kind, each.axes] = times + each.count, size + each.bytes
        fixed = max(0, 2 * first.saved - second.saved)
        main = step.traced(one).program.main
        layers = main.length if main else 0
        layer = sum(math.prod(x.shape) for x in main.unit.shapes) if main else 0
        return _Facts(first.flops, first.products, second.saved - first.saved, fixed, layers, layer, sent)

    def _of_weights(self, s: Strategy, shape: dict[str, int], held: _Held) -> float:
        """Seconds in which weights and gradients are sent: what the rule promises of all leaves that are spread alike
        as one, which is used once forwards and once backwards; of those that no stage of a pipeline owns, once a step.
        """
        m = s.turns
        # How often it fetches them: idle ranks do too.
        ticks = m if shape["pipe"] == 1 else m + math.ceil((shape["pipe"] - 1) / s.chunks)
        seconds = 0.0
        for of_experts, group in held.groups.items():
            spread = [axis for axis in (*ROWS, "context") if shape[axis] > 1 and not (of_experts and axis == "expert")]
            shard = tuple(axis for axis in spread if axis in SHARDS and s.fsdp != 1)
            second = ("data",) * s.hpz
            uses = Uses(
                elements=group.trained,
                fetched=_some(Times(2 * ticks, group.elements - group.outside), Times(1, group.outside)),
                given=_some(Times(m, group.trained - group.outside_trained), Times(1, group.outside_trained)),
                updated=(Times(1, group.elements if s.hpz else group.trained),),
                last=False,
                shard=shard,
                rest=tuple(axis for axis in spread if axis not in (*shard, *second)),
                sizes=shape,
                compute=_computed(s),
                reduce=_reduced(s),
                stored=_computed(s),
                second=second,
            )
            for one in (rule_of(s) if shard or s.fsdp == 1 else DDP).promise.sends(uses):
                if one.axes:
                    seconds += one.count * self._seconds(one.kind, one.bytes / one.count, shape, one.axes)
        return seconds

    def _seconds(self, kind: str, size: float, shape: dict[str, int], axes: tuple[str, ...]) -> float:
        inner = math.prod(shape[a] for a in list(shape)[list(shape).index(axes[-1]) + 1 :])
        ranks = math.prod(shape[a] for a in axes)
        local = max(1, min(ranks, self.target.per_host // inner))
        way = Reach(ranks, -(-ranks // local), local)
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
    axes = s.pipe, s.chunks, s.data, s.fsdp, s.hpz, s.zero, s.rule, s.expert, s.context, s.tensor
    return *axes, s.precision, s.reduce, *(of in s.offloads for of in ("optimizer", "params"))


def _program(s: Strategy) -> tuple[Any, ...]:
    """What the program of a rank's row depends on."""
    return s.tensor, s.sequence, s.remat, s.expert, s.context, s.attention


def _with_rows(batch: Any, rows: int) -> Any:
    def leaf(x: Any) -> Any:
        return x if isinstance(x, Replicated) else jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)

    return jax.tree.map(leaf, batch, is_leaf=lambda x: isinstance(x, Replicated))
