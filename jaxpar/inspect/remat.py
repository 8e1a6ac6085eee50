"""remat="auto": save, recompute or offload each value that layers leave for their backwards, under a budget.

Each value of a stack's layer is saved (s), recomputed (r), or with `offload` sent to the host and back (h):

    cost      s  its bytes, for every layer
              r  the seconds of the equations that compute it from saved values
              h  none, while a layer's copies take no longer than its computation
    choose    the fewest seconds whose bytes fit: a descent from each uniform choice (all s, all r, all h),
              which changes one or two values at a time
    compile   compare the compiler's total with the budget, correct the bytes that "choose" may use, and repeat

Seconds are estimates (`predict/efficiency.py`). Matrix products run at the share of the peak that large ones reach, and
collectives over a host's links. Any other equation takes the time of its bytes, or none if it is part of another
kernel.

Among the compiled programs that fit, the one with the fewest predicted seconds is taken. Compilers start copies later
than they could, so that with `offload`, choices without the host are compiled too.

Rematerialisation as a choice under a budget: Chen et al. 2016 (arXiv:1604.06174). With transfers to the host: Beaumont
et al. 2021 (POFO).
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ..backend.text import amount, size
from ..hardware.compiled.compiler_remarks import why_unread
from ..hardware.hardware import KINDS, RESERVE, Hardware, of_device_kind
from ..program import jaxpr as jx
from ..program.collectives import PRIMITIVES
from ..program.residuals import Residuals, cheap
from ..slicing.access import WholeAccess
from ..slicing.pieces import Stack
from ..step.tracing import Loss
from ..strategy import OFFLOADS
from .memory import of_step
from .predict.efficiency import estimated_seconds
from .predict.prediction import predict
from .step_view import RunnableStep as Step

AnyStep = TypeVar("AnyStep", bound=Step)
_MAX_COMPILATIONS = 5  # of choices without the host, and again of choices with it
_CLOSE_ENOUGH = 0.02  # share of the budget; a program that leaves less unused is not improved any more
WORDS = {"s": "save", "r": "recompute", "h": "host"}


@dataclass(frozen=True)
class ChosenValue:
    """The choice for one value of a stack's layers.

    Attributes:
      what: the primitive that computes it, with dtype and shape on a device.
      where: the line of the model.
      bytes: bytes of all layers, of one microbatch or of concurrent ones; for a pipeline's rank, of all its slots.
      choice: "save", "recompute" or "host".
      seconds: for "recompute", the seconds of a step that it adds to all other choices. For "host", the seconds of its
        copies both ways, which may overlap with layers.
    """

    what: str
    where: str
    bytes: int
    choice: str
    seconds: float


class _Cost(NamedTuple):
    """Bytes on a device and on its host, and seconds of a step."""

    device: int
    host: int
    seconds: float


@dataclass(frozen=True, eq=False)
class _Stack:
    """One stack's residuals, and the cost of choices for them in a step, over all its layers.

    Attributes:
      layers: the number of layers whose values a device stores at once; for a pipeline, in all its slots.
      runs: the number of layers that run in a step.
    """

    residuals: Residuals
    layers: int
    runs: int
    hardware: Hardware

    @functools.cached_property
    def large_indices(self) -> list[int]:
        """The indices of values with at least 1% of the bytes. The others are always saved."""
        sizes = [jx.nbytes(value) for value in self.residuals.values]
        return [index for index, nbytes in enumerate(sizes) if 100 * nbytes >= sum(sizes)]

    def uniform_choice(self, letter: str) -> str:
        """Return the choice of one letter for all large values."""
        return "".join(letter if index in self.large_indices else "s" for index in range(len(self.residuals.values)))

    @functools.cached_property
    def _seconds_by_eqn(self) -> dict[int, float]:
        """The estimated seconds of each equation, by its id."""
        return {id(eqn): equation_seconds(eqn, self.hardware) for eqn in self.residuals.eqns}

    @functools.cache  # noqa: B019 - a stack lives for one search
    def cost(self, choice: str) -> _Cost:
        """Return the bytes that all layers leave on the device and the host, and the seconds added to a step.

        Values on the host also take the device memory of two layers, which copies fill and empty alternately.
        """
        kept, eqns = self.residuals.kept(choice), self.residuals.eqns
        host_values = {value for value, is_on_host in zip(kept.values, kept.host, strict=True) if is_on_host}
        host_bytes, bandwidth = sum(map(jx.nbytes, host_values)), self.hardware.host_bandwidth or 1
        # Recomputation runs the equations between the kept values and what the backward reads.
        forward_seconds, recompute_seconds = (
            sum(self._seconds_by_eqn[id(eqn)] for eqn in equations) for equations in (eqns, kept.again)
        )
        # Simulate one layer's forward with its copies to the host.
        compute_end, copy_ends = 0.0, [0.0, 0.0]
        for seconds, new_values in [
            (0.0, self.residuals.inputs),
            *((self._seconds_by_eqn[id(eqn)], eqn.outvars) for eqn in eqns),
        ]:
            compute_end += seconds
            for value in (value for value in new_values if value in host_values):
                # A copy begins when its value exists. XLA has at most two copies under way, so kernels wait for the
                # one before the last.
                compute_end = max(compute_end, copy_ends[-2])
                copy_ends.append(max(compute_end, copy_ends[-1]) + jx.nbytes(value) / bandwidth)
        # In the backward, copies overlap with the recomputation and with the backward itself, twice a forward.
        exposed_seconds = (
            max(compute_end, copy_ends[-1])
            - forward_seconds
            + max(0.0, host_bytes / bandwidth - 2 * forward_seconds - recompute_seconds)
        )
        device_bytes = self.layers * (sum(map(jx.nbytes, kept.values)) - host_bytes) + min(2, self.layers) * host_bytes
        return _Cost(device_bytes, self.layers * host_bytes, self.runs * (recompute_seconds + exposed_seconds))

    def chosen_values(self, choice: str) -> Iterator[ChosenValue]:
        """Yield each value with its choice."""
        producers = {value: eqn for eqn in self.residuals.eqns for value in eqn.outvars}
        kept_values = self.residuals.kept(choice).values
        for index, (value, letter) in enumerate(zip(self.residuals.values, choice, strict=True)):
            eqn, seconds = producers.get(value), 0.0
            # A value that another one needs for its recomputation is kept although it was chosen to be recomputed.
            letter = "s" if letter == "r" and value in kept_values else letter
            if letter == "r":
                saved_choice = f"{choice[:index]}s{choice[index + 1 :]}"
                seconds = self.cost(choice).seconds - self.cost(saved_choice).seconds
            elif letter == "h":
                seconds = 2 * self.runs * jx.nbytes(value) / (self.hardware.host_bandwidth or 1)
            name = "input of the layer" if eqn is None else eqn.primitive.name
            description = f"{name} {value.aval.dtype.name}{[*value.aval.shape]}"
            yield ChosenValue(
                description, jx.where(eqn) if eqn else "", self.layers * jx.nbytes(value), WORDS[letter], seconds
            )


def settle(step: AnyStep, batch: Any) -> AnyStep:
    """Return the step with the fastest choices whose compiled program fits `strategy.budget`; its `chosen` lists them.

    Compiles up to five programs, with `offload` ten. Nothing runs.

    Raises:
      ValueError: no program fits. The message tells by how much, what uses the memory, and the nearest budget that
        fits.
    """
    # Where the devices' numbers are unknown, an H100's rank the choices.
    stacks, budget, hardware = stacks_of(step, batch), _budget_bytes(step), _hardware(step) or KINDS["H100"]
    # A device's share of its host's memory, without the state that is there already.
    host_room = (1 - RESERVE) * (hardware.host_memory_bytes or math.inf) / hardware.per_host
    host_room -= sum(step.layout.host_bytes.values())
    compiled_costs: dict[tuple[str, ...], _Cost] = {}
    device_room: float = budget - sum(step.layout.bytes.values())
    for letters in ("sr", "srh") if "activations" in step.strategy.offloads else ("sr",):
        # Each round aims at the room that the previous program's miss suggests.
        for _ in range(_MAX_COMPILATIONS):
            choices = cheapest(stacks, device_room, host_room, letters)
            # The same choices would compile to the same program.
            if choices in compiled_costs:
                break
            compiled_costs[choices] = _compiled_cost(step.choosing(choices), batch, stacks, choices)
            unused_bytes = budget - compiled_costs[choices].device
            if 0 <= unused_bytes <= _CLOSE_ENOUGH * budget:
                break
            # After a miss, demand at least half a percent of the budget less, or an equally large choice would return.
            device_room = _total_cost(stacks, choices).device + (
                unused_bytes if unused_bytes >= 0 else min(unused_bytes, -_CLOSE_ENOUGH * budget / 4)
            )
    # Predicted bytes guide the search; only compiled programs decide.
    fitting = [choices for choices, cost in compiled_costs.items() if cost.device <= budget]
    if not fitting:
        raise ValueError(_refusal(step, stacks, compiled_costs, budget))
    # Among equally fast programs, take the smaller one.
    best_choices = min(fitting, key=lambda choices: (compiled_costs[choices].seconds, compiled_costs[choices].device))
    chosen = tuple(
        value for stack, choice in zip(stacks, best_choices, strict=True) for value in stack.chosen_values(choice)
    )
    return step.choosing(best_choices, chosen)


def _compiled_cost(step: Step, batch: Any, stacks: Sequence[_Stack], choices: Sequence[str]) -> _Cost:
    """Return the cost of a compiled step, with predicted seconds; on CPUs, the seconds that the choices should add."""
    # The compiled program's memory is exact, its time is predicted.
    compiled, hardware = step.compile(batch), _hardware(step)
    (memory,) = of_step(step, batch, compiled).values()
    if hardware is None or why_unread(step.mesh.devices.flat[0].platform):
        seconds = _total_cost(stacks, choices).seconds
    else:
        seconds = predict(compiled, step, batch, hardware).seconds
    return _Cost(memory.total, memory.host, seconds)


def _budget_bytes(step: Step) -> int:
    """Return the budget in bytes: the strategy's, or the device's memory less a reserve."""
    if step.strategy.budget:
        return int(amount(step.strategy.budget, "B"))
    hardware = _hardware(step)
    if hardware is None or hardware.memory_bytes is None:
        kind = step.mesh.devices.flat[0].device_kind
        raise ValueError(f"remat='auto' needs a budget, as the memory of a {kind} is not known; give budget='70GB'")
    return int((1 - RESERVE) * hardware.memory_bytes)


def _hardware(step: Step) -> Hardware | None:
    """Return the numbers of the step's devices; None if they are unknown."""
    return of_device_kind(step.mesh.devices.flat[0].device_kind)


def stacks_of(step: Step, batch: Any) -> list[_Stack]:
    """Return the layer stacks of a step's loss, in order. Costs on devices with unknown numbers are an H100's."""
    loss, hardware = step.traced(batch), _hardware(step) or KINDS["H100"]
    stacks_by_piece: dict[int, _Stack] = {}

    def record_stacks(leaves: list[Any], *inputs: Any) -> list[Any]:
        *_, tape = Loss(loss, WholeAccess(), leaves).forward(*inputs)
        for piece_index, (piece, (_, saved)) in enumerate(zip(loss.program.pieces, tape, strict=True)):
            if isinstance(piece, Stack):
                residuals = Residuals((), (), (), (), (), ()) if saved is None else saved.forward.residuals
                layers, runs = piece.length, piece.length * step.strategy.turns
                # Only the main stack is split into a pipeline's stages.
                if (schedule := step.schedule) is not None and piece is loss.program.main:
                    layers_per_chunk = -(-piece.length // (schedule.ranks * schedule.chunks))
                    layers = layers_per_chunk * schedule.slots
                    runs = layers_per_chunk * schedule.chunks * schedule.microbatches
                stacks_by_piece[piece_index] = _Stack(residuals, layers, runs, hardware)
        return []

    jx.trace(record_stacks, loss.leaves, *loss.inputs, axes=loss.traced_axes)
    return list(stacks_by_piece.values())


def _total_cost(stacks: Sequence[_Stack], choices: Sequence[str]) -> _Cost:
    """Return the sum of the costs of all stacks."""
    costs = (stack.cost(choice) for stack, choice in zip(stacks, choices, strict=True))
    return _Cost(*map(sum, zip(_Cost(0, 0, 0.0), *costs, strict=True)))


def cheapest(stacks: Sequence[_Stack], device_room: float, host_room: float, letters: str) -> tuple[str, ...]:
    """Return the choices with the fewest seconds whose bytes fit; if none fit, the choices closest to fitting.

    `letters` are the choices for each value, of "s", "r" and "h". Room is in bytes.
    """

    def rank(choices: tuple[str, ...]) -> tuple[float, float, int, int]:
        """Order by bytes that do not fit, then by seconds."""
        device, host, seconds = _total_cost(stacks, choices)
        return max(0.0, device - device_room) + max(0.0, host - host_room), seconds, host, device

    def descend(choices: tuple[str, ...]) -> tuple[str, ...]:
        """Move to the best neighbour while it is better."""
        # Strictly better each time, so that the descent ends.
        while True:
            best_neighbour = min(_neighbours(stacks, choices, letters), key=rank, default=choices)
            if rank(best_neighbour) >= rank(choices):
                return choices
            choices = best_neighbour

    # The descent is local, so it starts from all values saved, all recomputed, and all on the host.
    uniform_choices = (tuple(stack.uniform_choice(letter) for stack in stacks) for letter in letters)
    return min(map(descend, uniform_choices), key=rank)


def _neighbours(stacks: Sequence[_Stack], choices: tuple[str, ...], letters: str) -> Iterator[tuple[str, ...]]:
    """Yield the choices that differ in one large value, or in two of one stack."""
    for stack_index, (stack, choice) in enumerate(zip(stacks, choices, strict=True)):
        # Pairs escape from choices in which one value is only worth changing together with another.
        changes_of_one = [(i, letter) for i in stack.large_indices for letter in letters if letter != choice[i]]
        for changes in (*itertools.combinations(changes_of_one, 1), *itertools.combinations(changes_of_one, 2)):
            changed = list(choice)
            for i, letter in changes:
                changed[i] = letter
            yield (*choices[:stack_index], "".join(changed), *choices[stack_index + 1 :])


def _refusal(step: Step, stacks: Sequence[_Stack], tried: dict[tuple[str, ...], _Cost], budget: int) -> str:
    """Return the error text for a budget that no program fits."""
    choices = min(tried, key=lambda choices: tried[choices].device)
    total, state = tried[choices].device, sum(step.layout.bytes.values())
    layer_bytes = _total_cost(stacks, choices).device
    state_text = f"{size(state)} of parameters, gradients and optimizer state, {size(layer_bytes)} that layers leave, "
    other_text = f"and {size(total - state - layer_bytes)} of logits, gathered layers and buffers"
    possible_offloads = [term for term in OFFLOADS if not step.strategy.kept_on_device(term)]
    offload_hint = (
        "" if {*possible_offloads} <= {*step.strategy.offloads} else f"offload='{'+'.join(possible_offloads)}', "
    )
    # In MB, and half a percent more than the smallest program took.
    budget_hint = f"budget='{math.ceil(1.005e-6 * total)}MB'"
    return (
        f"budget={size(budget)} is too small: {step.strategy} needs at least {size(total)}, {size(total - budget)} "
        f"more: {state_text}{other_text}; the nearest budget that fits is {budget_hint}, or use {offload_hint}more "
        "microbatches or devices"
    )


def equation_seconds(eqn: Any, hardware: Hardware) -> float:
    """Return the estimated seconds of an equation; 0 for one that runs as part of the kernel that reads it."""
    if cheap(eqn):
        return 0.0
    moved_bytes = sum(jx.nbytes(var) for var in (*eqn.invars, *eqn.outvars) if hasattr(var.aval, "shape"))
    # A ring sends about as many bytes as it reads and writes.
    if jx.communicates([eqn], PRIMITIVES) and hardware.link_bandwidth:
        return moved_bytes / (hardware.link_bandwidth * (hardware.link_efficiency or 1))
    flops = {dtype: 2.0 * count for dtype, (count, _) in jx.matmuls([eqn]).items()}
    return estimated_seconds(flops, moved_bytes, hardware)
