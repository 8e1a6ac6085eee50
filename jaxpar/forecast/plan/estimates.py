"""Estimate a strategy's memory and step time by closed forms, before anything is compiled.

    state        `Layout.bytes`: the parameters, optimizer state and gradients that a device stores
    activations  bytes that the traced loss saves for its backward, per row, under this remat, tensor, context and
                 expert (`memory.forward`). In a pipeline, one stage's activations times the schedule's slots. Added
                 to them: the layer that a prefetch gathers early and the gradients that it reduces late; whole
                 gradients, if several microbatches accumulate them (zero=1, sync="step"); and hpZ's second shard
    bytes        state + max(gradients, activations). This is less than any program needs: a program frees activations
                 while it makes gradients, but not all at once, and it has temporaries too
    compute      m microbatches x the longest of: FLOPs / peak, (weights read + gradients written) / memory bandwidth,
                 kernel starts; plus reading and writing the accumulated gradient, if m > 1.
                 FLOPs are 3 forwards of the traced matmuls (4 with remat="layer"); the third only for trained
                 parameters. In a pipeline, divided by 1 - bubble, and every chunk is as long as the longest
    sent         between ranks of tensor, context and expert: the collectives of the traced loss. Weights and gradients:
                 what the promise of the strategy's rule says, separately for experts
    update       of an optimizer of whole matrices: FLOPs of the busiest owner / float32's peak, counted as compute; and
                 the exchanges that `numerics/matrices/owners.py` promises, counted as sent
    host         with `offload`: the optimizer's state to the host and back, during which nothing computes; layers and
                 their activations from the host, which overlap with compute and with copies to the host
    seconds      compute + host + communication of tensor and context + max(0, other communication - compute). This is
                 less than the program takes: peaks and link bandwidths are upper bounds

The estimates only choose which strategies are compiled. Every number that a plan shows comes from a compiled program.
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
from ...model.batches import map_rows, rows_of
from ...model.model import Model
from ...numerics.matrices.owners import Owners
from ...parallel.data import DDP, Times, Uses, rule_of
from ...parallel.pipeline.schedules import Schedule
from ...slicing.pieces import Stack
from ...step.core import Step
from ...strategy import Strategy
from ...strategy.axes import ROWS, SHARDS
from .candidates import Splits, powers

# The peak of a precision's products. For fp8 it is a bound, since gradients of weights are computed in bf16.
_PEAK = {"bf16": "bf16", "f16": "f16", "f32": "tf32", "fp8": "fp8"}


@dataclass(frozen=True)
class Estimate:
    """The closed forms of a strategy, in bytes per device and seconds per step; see the module.

    Attributes:
      params: bytes of the stored parameters, as the layout has them.
      grads: bytes of the stored gradients.
      optimizer: bytes of the optimizer's state.
      activations: bytes that the forward saves for the backward.
      seconds: compute + communication that does not overlap with it.
      compute: seconds of matmuls at the peak.
      sent: seconds of collectives, overlapping or not, and of exposed copies to and from the host.
      bubble: the share of a step in which a rank of the pipeline is idle.
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
        """Return a lower bound on the bytes that a device needs."""
        return self.params + self.optimizer + max(self.grads, self.activations)


@dataclass(frozen=True)
class _LossCost:
    """The cost of the traced loss on the ranks of `tensor`, `context` and `expert`, for one row of each rank.

    Attributes:
      flops: FLOPs of the forward.
      products: the number of matmuls.
      saved_per_row: bytes saved for the backward that grow with the rows.
      saved_fixed: bytes saved for the backward whatever the number of rows.
      layer_share: the share of these bytes that layers of layer stacks leave.
      num_layers: the layers that a pipeline distributes; 0 if the loss has no stack of layers.
      layer_elements: the elements of one layer's parameters.
      sent: (kind, axes) -> the number of collectives, and the bytes of all their buffers.
    """

    flops: float
    products: int
    saved_per_row: float
    saved_fixed: float
    layer_share: float
    num_layers: int
    layer_elements: int
    sent: dict[tuple[str, tuple[str, ...]], tuple[int, float]]


@dataclass
class _LeafGroup:
    """The elements of leaves with the same sharding.

    Attributes:
      elements: the elements on one rank.
      trained: those that are not frozen.
      outside: those outside the pipeline's stages, such as embeddings.
      outside_trained: those outside the stages that are not frozen.
    """

    elements: int = 0
    trained: int = 0
    outside: int = 0
    outside_trained: int = 0


@dataclass(frozen=True)
class _StoredState:
    """The layout of the training state under one strategy.

    Attributes:
      bytes: part of the state -> bytes on a device.
      host: part of the state -> bytes on the host.
      groups: whether leaves are sharded over `expert` -> their elements.
      mesh: the step's mesh.
      owners: the owners of whole matrices; None for an elementwise optimizer.
    """

    bytes: dict[str, int]
    host: dict[str, int]
    groups: dict[bool, _LeafGroup]
    mesh: Any
    owners: Owners | None

    @property
    def elements(self) -> int:
        """Return the number of parameters on one rank."""
        return sum(group.elements for group in self.groups.values())

    @property
    def trained(self) -> int:
        """Return the number of parameters on one rank that are not frozen."""
        return sum(group.trained for group in self.groups.values())


@dataclass
class Estimator:
    """Closed forms of the strategies of one model. Strategies that share a part, such as the layout, compute it once.

    `estimate` raises the ValueError of `make_train_step`, or of tracing, for an invalid strategy.

    Attributes:
      model, optimizer, batch, rules, trainable: as for `plan`.
      target: the devices.
    """

    model: Model
    optimizer: Any
    target: Target
    batch: Any
    rules: Any = None
    trainable: Callable[[str], bool] | None = None
    _loss_costs: dict[Any, _LossCost | ValueError] = field(default_factory=dict)
    _loss_steps: dict[str, Step] = field(default_factory=dict)
    _states: dict[Any, _StoredState | ValueError] = field(default_factory=dict)
    _schedules: dict[Any, Schedule | ValueError] = field(default_factory=dict)

    def for_target(self, target: Target) -> "Estimator":
        """Return the closed forms on another number of the same devices; both share what does not depend on it."""
        return dataclasses.replace(self, target=target, _states={})

    def splits(self, precision: str = "f32") -> tuple[Splits, str]:
        """Return how many ranks may share experts and positions, and the error of `context=2`; "" if it is valid."""
        n = len(self.target.devices)
        experts = context = 1
        if n == 1:
            return Splits(), ""
        try:
            leaves = self._step(Strategy(expert=2), self.target.devices[:2]).layout.leaves
            experts = powers(math.gcd(*(leaf.shape[leaf.expert] for leaf in leaves if leaf.expert is not None)))[-1]
        except ValueError:
            pass  # the model is no mixture of experts
        try:
            self._exact_loss_cost(Strategy(context=2, precision=precision))
            context = powers(n)[-1]
        except ValueError as error:
            return Splits(experts), str(error)
        return Splits(experts, context), ""

    def estimate(self, strategy: Strategy, exact: bool = True) -> Estimate:
        """Return the closed forms of a strategy, of whose sizes only `fsdp` may be -1.

        If they need not be exact, they use `_shared_loss_cost`.
        """
        if "auto" in (strategy.remat, strategy.concurrent):
            return self._estimate_of_choices(strategy, exact)

        # 1. What the strategy shares with others: the traced loss, the layout, the schedule.
        loss = self._exact_loss_cost(strategy) if exact else self._shared_loss_cost(strategy)
        s, shape = strategy, strategy.sizes(len(self.target.devices), self.target.hosts)
        pipe, m, stages = shape["pipe"], s.microbatches, shape["pipe"] * s.chunks
        if 0 < 2 * loss.num_layers <= stages:
            raise ValueError(
                f"{loss.num_layers} layers leave half or more of {pipe} x {s.chunks} stages empty; use fewer stages"
            )
        state = _cached(self._states, _layout_key(strategy), lambda: self._stored_state(strategy))
        rows = rows_of(self.batch) / math.prod(shape[axis] for axis in ROWS)
        schedule_key = (s.schedule, pipe, m, s.chunks)
        schedule = _cached(self._schedules, schedule_key, lambda: Schedule.of(*schedule_key)) if pipe > 1 else None
        bubble = float(schedule.bubble) if schedule else 0.0

        # 2. Activations, and what a device stores at the same time.
        one_pass = loss.saved_fixed + loss.saved_per_row * rows / m * s.concurrent
        # A slot of the schedule holds one microbatch's activations of one stage.
        saved = one_pass * schedule.slots / (pipe * s.chunks) if schedule else one_pass
        if s.prefetches(state.mesh) and s.fsdp != 1 and loss.num_layers > 1:
            # One more layer of weights under ZeRO-3, and one more layer of gradients under ZeRO-2 and 3.
            carried = (s.zero == 3) + (s.zero > 1) * state.trained / state.elements
            saved += carried * loss.layer_elements * _compute_dtype(s).itemsize
        if s.turns > 1 and s.fsdp != 1 and not rule_of(s).at_once:
            # Whole gradients accumulate in one buffer while the next microbatch makes others.
            saved += state.trained * _reduce_dtype(s).itemsize
        saved += s.hpz * state.elements / shape["fsdp"] * _compute_dtype(s).itemsize

        # 3. Compute. The rank with the most layers sets the pace of a pipeline.
        longest = stages * math.ceil(loss.num_layers / stages) / loss.num_layers if loss.num_layers else 1.0
        compute = m * longest * self._microbatch_seconds(s, shape, loss, state, rows / m) / (1 - bubble)

        # 4. Communication: `blocking` stops the kernels, `overlappable` may run beside them.
        blocking, overlappable = 0.0, self._weight_seconds(s, shape, state)
        for (kind, axes), (times, size) in loss.sent.items():
            # A rank of a pipeline runs its share of the layers, and so of their collectives.
            seconds = m * times / pipe * self._seconds(kind, size / times * rows / m, shape, axes)
            # A ring's hops overlap with the attention of the previous block, tokens with other microbatches' experts,
            # and all collectives of a concurrent microbatch with the other microbatch.
            if kind == "collective-permute" or "expert" in axes or s.concurrent > 1:
                overlappable += seconds
            else:
                blocking += seconds
        if state.owners is not None:
            peak = self.target.hardware.peak("tf32") or self.target.hardware.peak("f32")
            assert peak is not None  # `plan` refuses such targets
            compute += state.owners.flops / peak
            blocking += sum(self._seconds(send.kind, send.bytes, shape, send.axes) for send in state.owners.sends)

        # 5. Copies to and from the host.
        if s.offloads:
            if (speed := self.target.hardware.host_bandwidth) is None:
                raise ValueError(
                    f"{self.target.kind} has no host_bandwidth to plan offload={s.offload!r} by; give it one in a "
                    "cluster file, or leave offload out"
                )
            # The optimizer's state, and the trained parameters that it updates, move both ways without any compute.
            blocking += 2 * (state.host["optimizer"] + state.host["params"] * state.trained / state.elements) / speed
            copied_back = 2 * s.turns * state.host["params"]  # layers, for the forward and for the backward
            if "activations" in s.offloads:
                saved_by_layers = loss.layer_share * saved
                copied_back += s.turns * saved_by_layers
                # Activations of two layers are on the device at a time.
                saved += saved_by_layers * (2 / max(2, loss.num_layers) - 1)
            blocking += max(0.0, copied_back / speed - compute)

        seconds, sent = compute + blocking + max(0.0, overlappable - compute), blocking + overlappable
        return Estimate(
            **state.bytes, activations=int(saved), seconds=seconds, compute=compute, sent=sent, bubble=bubble
        )

    def _estimate_of_choices(self, strategy: Strategy, exact: bool) -> Estimate:
        """Return the fewest seconds and the fewest bytes of the choices of remat="auto" or concurrent="auto"."""
        if strategy.remat == "auto":
            changes: list[dict[str, Any]] = [{"remat": remat, "budget": ""} for remat in ("none", "layer")]
        else:
            changes = [{"concurrent": c} for c in (1, 2, 4) if strategy.microbatches % c == 0]
        estimates = [self.estimate(dataclasses.replace(strategy, **change), exact) for change in changes]
        fastest = min(estimates, key=lambda estimate: estimate.seconds)
        return dataclasses.replace(fastest, activations=min(estimate.activations for estimate in estimates))

    def _microbatch_seconds(
        self, s: Strategy, shape: dict[str, int], loss: _LossCost, state: _StoredState, rows: float
    ) -> float:
        """Return the seconds of a rank's kernels for one microbatch of `rows` rows."""
        hardware = self.target.hardware
        # Forward, gradients of activations, gradients of trained weights, and recomputation.
        passes = 2 + state.trained / state.elements + {"layer": 1, "twice": 2}.get(str(s.remat), 0)
        # Without FP8 or TF32 units, products run at float32's peak.
        peak = hardware.peak(_PEAK[s.precision]) or hardware.peak("f32")
        bandwidth = hardware.memory_bandwidth
        assert peak is not None  # `plan` refuses such targets
        assert bandwidth is not None
        flops = passes * loss.flops * rows / shape["pipe"] / peak
        weights = (passes - 1) * state.elements * _compute_dtype(s).itemsize / bandwidth
        starts = passes * loss.products / shape["pipe"] * PRODUCT_START
        accumulation = 2 * state.bytes["grads"] / bandwidth if s.turns > 1 else 0.0
        return max(flops, weights, starts) + accumulation

    def _stored_state(self, strategy: Strategy) -> _StoredState:
        """Make the step, without compiling it, and read its layout."""
        step = self._step(strategy, self.target.devices)
        ranks = step.mesh.shape["pipe"]
        groups: dict[bool, _LeafGroup] = {}
        for leaf in step.layout.leaves:
            group = groups.setdefault(leaf.expert is not None, _LeafGroup())
            num_elements = math.prod(leaf.local.stored) // (ranks if leaf.of_a_stage else 1)
            group.elements += num_elements
            group.trained += num_elements * leaf.trainable
            if ranks > 1 and not leaf.of_a_stage:
                group.outside += num_elements
                group.outside_trained += num_elements * leaf.trainable
        return _StoredState(step.layout.bytes, step.layout.host_bytes, groups, step.mesh, step.update.owners)

    def _step(self, strategy: Strategy, devices: Any) -> Step:
        """Make a step. Raises ValueError if `tensor` splits no parameter, which `make_train_step` allows."""
        step = make_train_step(self.model, self.optimizer, strategy, devices, self.trainable, self.rules)
        if strategy.tensor > 1 and all(leaf.tensor is None for leaf in step.layout.leaves):
            raise ValueError(
                f"tensor={strategy.tensor} splits no parameter, and each of its ranks would compute the same; say "
                "which dims to split: rules={...: -1}"
            )
        return step

    def _exact_loss_cost(self, strategy: Strategy) -> _LossCost:
        """Return the cost of the traced loss, which is traced once."""
        return _cached(self._loss_costs, _loss_key(strategy), lambda: self._loss_cost(strategy))

    def _shared_loss_cost(self, strategy: Strategy) -> _LossCost:
        """Return about a lower bound: the cost on at most two ranks of each axis, whose work all ranks share evenly."""
        sizes = {axis: min(2, getattr(strategy, axis)) for axis in ("tensor", "context", "expert")}
        small = dataclasses.replace(strategy, **sizes)
        try:
            cost = self._exact_loss_cost(small)
        except ValueError:
            return self._exact_loss_cost(strategy)  # for its own error
        # Expert ranks have as many tokens each, however many they are. Buffers of collectives keep their sizes, but for
        # all-to-alls, in which the ranks of `tensor` take parts: of heads, and with `sequence` of experts' features.
        ranks = strategy.tensor * strategy.context // (small.tensor * small.context)
        parts = lambda kind, axes: kind == "all-to-all" and (strategy.sequence or "expert" not in axes)
        sent = {
            key: (times, size / (strategy.tensor // small.tensor if parts(*key) else 1))
            for key, (times, size) in cost.sent.items()
        }
        return dataclasses.replace(
            cost,
            sent=sent,
            flops=cost.flops / ranks,
            saved_per_row=cost.saved_per_row / ranks,
            saved_fixed=cost.saved_fixed / ranks,
            layer_elements=cost.layer_elements // (ranks * strategy.expert // small.expert),
        )

    def _loss_cost(self, strategy: Strategy) -> _LossCost:
        """Trace the loss on the ranks of `tensor`, `context` and `expert` alone, for one and for two rows per rank."""
        fields = _loss_fields(strategy)
        remat = fields.pop("remat")
        s = Strategy(**fields)
        # Values of `remat` come one after another: they share one step, and so the trace of the model.
        if str(fields) not in self._loss_steps:
            self._loss_steps.clear()
            step = self._step(s, self.target.devices[: s.tensor * s.context * s.expert])
            self._loss_steps[str(fields)] = step
        step = self._loss_steps[str(fields)].choosing(remat=remat)
        # Expert ranks do not share rows, so that `expert` rows are one per rank.
        one_row, two_rows = (_with_rows(self.batch, n * s.expert) for n in (1, 2))
        cost, cost_of_two = forward(step, one_row), forward(step, two_rows)
        sent: dict[Any, tuple[int, float]] = {}
        for collective in count(step, step.traced(one_row))[0].model_collectives if step.mesh.size > 1 else ():
            # Conditional rounds send tokens that overflow an expert's buffer. Balanced experts have no overflow.
            if collective.count and not collective.conditional:
                times, size = sent.get((collective.kind, collective.axes), (0, 0.0))
                sent[collective.kind, collective.axes] = times + collective.count, size + collective.bytes
        # saved(rows) = fixed + rows * per_row, through the two points.
        saved_fixed = max(0, 2 * cost.saved - cost_of_two.saved)
        # A program without stages marks no stack as the one that a pipeline cuts: it is the one with most parameters.
        stacks = [piece for piece in step.traced(one_row).program.pieces if isinstance(piece, Stack)]
        sizes = [(stack.length, sum(math.prod(x.shape) for x in stack.unit.shapes)) for stack in stacks]
        num_layers, layer_elements = max(sizes, key=math.prod, default=(0, 0))
        return _LossCost(
            cost.flops,
            cost.products,
            saved_per_row=cost_of_two.saved - cost.saved,
            saved_fixed=saved_fixed,
            layer_share=cost.saved_by_layers / max(1, cost.saved),
            num_layers=num_layers,
            layer_elements=layer_elements,
            sent=sent,
        )

    def _weight_seconds(self, s: Strategy, shape: dict[str, int], state: _StoredState) -> float:
        """Return the seconds in which a device sends weights and gradients, by the promise of the strategy's rule.

        All leaves with the same sharding count as one leaf, which is used once forwards and once backwards per
        microbatch. Leaves outside the pipeline's stages are used once per step.
        """
        m = s.turns
        # Every tick of a pipeline fetches the weights, idle ticks too.
        ticks = m if shape["pipe"] == 1 else m + math.ceil((shape["pipe"] - 1) / s.chunks)
        seconds = 0.0
        for of_experts, group in state.groups.items():
            # The axes along which these leaves are sharded or replicated. Experts differ between the ranks of `expert`.
            axes = [axis for axis in (*ROWS, "context") if shape[axis] > 1 and not (of_experts and axis == "expert")]
            shard = tuple(axis for axis in axes if axis in SHARDS and s.fsdp != 1)
            second = ("data",) * s.hpz
            uses = Uses(
                elements=group.trained,
                fetched=_nonempty(Times(2 * ticks, group.elements - group.outside), Times(1, group.outside)),
                given=_nonempty(Times(m, group.trained - group.outside_trained), Times(1, group.outside_trained)),
                updated=(Times(1, group.elements if s.hpz else group.trained),),
                last=False,
                shard=shard,
                rest=tuple(axis for axis in axes if axis not in (*shard, *second)),
                sizes=shape,
                compute=_compute_dtype(s),
                reduce=_reduce_dtype(s),
                stored=_compute_dtype(s),
                second=second,
            )
            # Leaves without axes to shard over are replicated, whatever the rule.
            for send in (rule_of(s) if shard or s.fsdp == 1 else DDP).promise.sends(uses):
                if send.axes:
                    seconds += send.count * self._seconds(send.kind, send.bytes / send.count, shape, send.axes)
        return seconds

    def _seconds(self, kind: str, size: float, shape: dict[str, int], axes: tuple[str, ...]) -> float:
        """Return the seconds of one collective of `size` bytes over adjacent mesh axes."""
        # Devices are numbered with the last mesh axis fastest: the axes after `axes` lie between neighbours of a group.
        stride = math.prod(shape[a] for a in list(shape)[list(shape).index(axes[-1]) + 1 :])
        ranks = math.prod(shape[a] for a in axes)
        # Neighbours of a group are `stride` devices apart, so that a host has fewer of them.
        ranks_per_host = max(1, min(ranks, self.target.per_host // stride))
        reach = Reach(ranks, -(-ranks // ranks_per_host), ranks_per_host)
        return collective_seconds(kind, int(size), reach, self.target.hardware)[0]


def _nonempty(*uses: Times) -> tuple[Times, ...]:
    """Return the uses that have elements."""
    return tuple(use for use in uses if use.elements)


def _compute_dtype(s: Strategy) -> Any:
    """Return the dtype in which a strategy computes with float32 parameters."""
    return Policy.of(s).computed(jnp.dtype(jnp.float32))


def _reduce_dtype(s: Strategy) -> Any:
    """Return the dtype in which a strategy sums gradients of float32 parameters."""
    return Policy.of(s).reduced(jnp.dtype(jnp.float32))


def _cached(cache: dict[Any, Any], key: Any, make: Any) -> Any:
    """Return the value of `make()` for a key, computed once. A ValueError that it raised is stored and raised again."""
    if key not in cache:
        try:
            cache[key] = make()
        except ValueError as error:
            cache[key] = error
    if isinstance(cache[key], ValueError):
        raise cache[key]
    return cache[key]


def _layout_key(s: Strategy) -> tuple[Any, ...]:
    """Return the fields of a strategy that decide the layout of the state."""
    axes = s.pipe, s.chunks, s.data, s.fsdp, s.hpz, s.zero, s.rule, s.expert, s.context, s.tensor
    return *axes, s.precision, s.reduce, *(term in s.offloads for term in ("optimizer", "params"))


def _loss_fields(s: Strategy) -> dict[str, Any]:
    """Return the fields of a strategy that decide the traced loss of one row."""
    # Not `logits`: by default logits are in chunks, which stores least.
    names = "tensor sequence remat expert context attention precision fp8_except fp8_scaling kernels".split()
    # "twice" recomputes in both halves of a pipeline's backward, and saves what "layer" saves.
    remat = {"remat": "layer"} if s.remat == "twice" else {}
    return {name: getattr(s, name) for name in names} | remat


def _loss_key(s: Strategy) -> tuple[Any, ...]:
    """Return the values of `_loss_fields`."""
    return tuple(_loss_fields(s).values())


def _with_rows(batch: Any, rows: int) -> Any:
    """Return the shapes of a batch with another number of rows. Replicated leaves have no rows and are unchanged."""
    return map_rows(batch, lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype))
