"""remat="auto": what becomes of each value that layers leave for their backwards, so that a step fits its budget.

Each value of a layer of a stack is saved (s), computed again (r), or with `offload` sent to the host and back (h):

    cost      s  its bytes, for every layer     r  seconds of the equations that make it, of what is kept
                                                h  none, while a layer's copies take no longer than its computation
    choose    the least seconds whose bytes fit, by changes of one value or two from three beginnings
    compile   what the compiler's total is beyond the budget, or below it, goes back into "fit"

Seconds are those of products at the share of the peak that large ones reach, of collectives over a host's links, and of
bytes for all else that is no part of another kernel (`predict/efficiency.py`). Of the programs that fit the fastest one
is taken, as predicted: compilers start copies later than they could, so with `offload` choices without the host are
compiled too.

Rematerialisation as a choice under a budget: Chen et al. 2016 (arXiv:1604.06174); with transfers to the host: Beaumont
et al. 2021 (POFO).
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ..backend.text import amount, size
from ..hardware.compiled.compiler_remarks import unread
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
_COMPILED = 5  # programs, without the host and with it
_NEAR = 0.02  # of the budget: a choice that is so near is not tried to be bettered
WORDS = {"s": "save", "r": "recompute", "h": "host"}


@dataclass(frozen=True)
class ChosenValue:
    """What becomes of one value of a stack's layers.

    Attributes:
      what: the primitive that makes it, dtype and shape on a device.
      where: the line of the model.
      bytes: of all layers, of one microbatch or of concurrent ones; of a pipeline's rank, of all its slots.
      choice: "save", "recompute" or "host".
      seconds: of a step, that computing it again takes while all others stay as chosen; of a copy both ways, which may
        be hidden behind layers.
    """

    what: str
    where: str
    bytes: int
    choice: str
    seconds: float


class _Cost(NamedTuple):
    """Bytes of a device and of its host, and seconds of a step."""

    device: int
    host: int
    seconds: float


@dataclass(frozen=True, eq=False)
class _Stack:
    """One stack's residuals, and what choices of them cost in a step, over all its layers.

    Attributes:
      layers: of how many a device holds them at once; of a pipeline in all its slots.
      runs: how many it runs in a step.
    """

    residuals: Residuals
    layers: int
    runs: int
    hardware: Hardware

    @functools.cached_property
    def large(self) -> list[int]:
        """Which values are 1% of all or more: the others are saved."""
        sizes = [jx.nbytes(v) for v in self.residuals.values]
        return [at for at, n in enumerate(sizes) if 100 * n >= sum(sizes)]

    def all(self, letter: str) -> str:
        """The choice of one letter for all large values."""
        return "".join(letter if at in self.large else "s" for at in range(len(self.residuals.values)))

    @functools.cached_property
    def _seconds(self) -> dict[int, float]:
        return {id(eqn): _equation_seconds(eqn, self.hardware) for eqn in self.residuals.eqns}

    @functools.cache  # noqa: B019 of one search
    def cost(self, choice: str) -> _Cost:
        """Bytes that all layers leave on the device (of what is on the host, two layers) and there, and seconds."""
        kept, eqns = self.residuals.kept(choice), self.residuals.eqns
        sent = {v for v, there in zip(kept.values, kept.host, strict=True) if there}
        host, speed = sum(map(jx.nbytes, sent)), self.hardware.host_bandwidth or 1
        forward, again = (sum(self._seconds[id(eqn)] for eqn in run) for run in (eqns, kept.again))
        now, ended = 0.0, [0.0, 0.0]
        for seconds, made in [(0.0, self.residuals.inputs), *((self._seconds[id(eqn)], eqn.outvars) for eqn in eqns)]:
            now += seconds
            for v in (v for v in made if v in sent):
                # A copy begins once its value is there, and XLA has two under way at most: kernels wait for the first.
                now = max(now, ended[-2])
                ended.append(max(now, ended[-1]) + jx.nbytes(v) / speed)
        waits = max(now, ended[-1]) - forward + max(0.0, host / speed - 2 * forward - again)
        held = self.layers * (sum(map(jx.nbytes, kept.values)) - host) + min(2, self.layers) * host
        return _Cost(held, self.layers * host, self.runs * (again + waits))

    def described(self, choice: str) -> Iterator[ChosenValue]:
        """Each value and its choice."""
        made = {v: eqn for eqn in self.residuals.eqns for v in eqn.outvars}
        kept = self.residuals.kept(choice).values
        for at, (v, letter) in enumerate(zip(self.residuals.values, choice, strict=True)):
            eqn, seconds = made.get(v), 0.0
            letter = "s" if letter == "r" and v in kept else letter
            if letter == "r":
                saved = f"{choice[:at]}s{choice[at + 1 :]}"
                seconds = self.cost(choice).seconds - self.cost(saved).seconds
            elif letter == "h":
                seconds = 2 * self.runs * jx.nbytes(v) / (self.hardware.host_bandwidth or 1)
            name = "input of the layer" if eqn is None else eqn.primitive.name
            what = f"{name} {v.aval.dtype.name}{[*v.aval.shape]}"
            yield ChosenValue(what, jx.where(eqn) if eqn else "", self.layers * jx.nbytes(v), WORDS[letter], seconds)


def settle(step: AnyStep, batch: Any) -> AnyStep:
    """The step with the fastest choices whose compiled program fits `strategy.budget`; they are its `chosen`. Compiles
    up to five programs, with `offload` ten; nothing runs.

    Raises ValueError where none fits: by how much, what holds it, and the nearest budget that does.
    """
    stacks, budget, hardware = stacks_of(step, batch), _budget(step), _hardware(step) or KINDS["H100"]
    there = (1 - RESERVE) * (hardware.host_memory_bytes or math.inf) / hardware.per_host
    there -= sum(step.layout.host_bytes.values())
    tried: dict[tuple[str, ...], _Cost] = {}
    room: float = budget - sum(step.layout.bytes.values())
    for letters in ("sr", "srh") if "activations" in step.strategy.offloads else ("sr",):
        for _ in range(_COMPILED):
            choices = cheapest(stacks, room, there, letters)
            if choices in tried:
                break
            tried[choices] = _compiled(step.choosing(choices), batch, stacks, choices)
            left = budget - tried[choices].device
            if 0 <= left <= _NEAR * budget:
                break
            # A miss asks for more than it missed by, or a choice that is no smaller would come again.
            room = _cost(stacks, choices).device + (left if left >= 0 else min(left, -_NEAR * budget / 4))
    fitting = [choices for choices, found in tried.items() if found.device <= budget]
    if not fitting:
        raise ValueError(_refused(step, stacks, tried, budget))
    best = min(fitting, key=lambda choices: (tried[choices].seconds, tried[choices].device))
    chosen = tuple(value for stack, choice in zip(stacks, best, strict=True) for value in stack.described(choice))
    return step.choosing(best, chosen)


def _compiled(step: Step, batch: Any, stacks: Sequence[_Stack], choices: Sequence[str]) -> _Cost:
    """As compiled; the seconds are predicted, on CPUs those that choices should add."""
    compiled, hardware = step.compile(batch), _hardware(step)
    (memory,) = of_step(step, batch, compiled).values()
    if hardware is None or unread(step.mesh.devices.flat[0].platform):
        seconds = _cost(stacks, choices).seconds
    else:
        seconds = predict(compiled, step, batch, hardware).seconds
    return _Cost(memory.total, memory.host, seconds)


def _budget(step: Step) -> int:
    if step.strategy.budget:
        return int(amount(step.strategy.budget, "B"))
    hardware = _hardware(step)
    if hardware is None or hardware.memory_bytes is None:
        kind = step.mesh.devices.flat[0].device_kind
        raise ValueError(f"remat='auto' needs a budget, as the memory of a {kind} is not known; give budget='70GB'")
    return int((1 - RESERVE) * hardware.memory_bytes)


def _hardware(step: Step) -> Hardware | None:
    return of_device_kind(step.mesh.devices.flat[0].device_kind)


def stacks_of(step: Step, batch: Any) -> list[_Stack]:
    """The layer stacks of a step's loss, in order. On devices without known numbers costs are an H100's."""
    loss, hardware = step.traced(batch), _hardware(step) or KINDS["H100"]
    found: dict[int, _Stack] = {}

    def forward(leaves: list[Any], *inputs: Any) -> list[Any]:
        *_, tape = Loss(loss, WholeAccess(), leaves).forward(*inputs)
        for at, (piece, (_, saved)) in enumerate(zip(loss.program.pieces, tape, strict=True)):
            if isinstance(piece, Stack):
                residuals = Residuals((), (), (), (), (), ()) if saved is None else saved.forward.residuals
                layers, runs = piece.length, piece.length * step.strategy.turns
                if (schedule := step.schedule) is not None and piece is loss.program.main:
                    chunk = -(-piece.length // (schedule.ranks * schedule.chunks))
                    layers, runs = chunk * schedule.slots, chunk * schedule.chunks * schedule.microbatches
                found[at] = _Stack(residuals, layers, runs, hardware)
        return []

    jx.trace(forward, loss.leaves, *loss.inputs, axes=loss.traced_axes)
    return list(found.values())


def _cost(stacks: Sequence[_Stack], choices: Sequence[str]) -> _Cost:
    costs = (stack.cost(choice) for stack, choice in zip(stacks, choices, strict=True))
    return _Cost(*map(sum, zip(_Cost(0, 0, 0.0), *costs, strict=True)))


def cheapest(stacks: Sequence[_Stack], room: float, there: float, letters: str) -> tuple[str, ...]:
    """Choices of the least seconds whose bytes are no more than `room`, and on the host `there`; if none are, of the
    least bytes.
    """

    def rank(choices: tuple[str, ...]) -> tuple[float, float, int, int]:
        device, host, seconds = _cost(stacks, choices)
        return max(0.0, device - room) + max(0.0, host - there), seconds, host, device

    def descend(choices: tuple[str, ...]) -> tuple[str, ...]:
        while True:
            nearest = min(_near(stacks, choices, letters), key=rank, default=choices)
            if rank(nearest) >= rank(choices):
                return choices
            choices = nearest

    starts = (tuple(stack.all(letter) for stack in stacks) for letter in letters)
    return min(map(descend, starts), key=rank)


def _near(stacks: Sequence[_Stack], choices: tuple[str, ...], letters: str) -> Iterator[tuple[str, ...]]:
    """Choices that differ in one large value, or in two of a stack."""
    for at, (stack, choice) in enumerate(zip(stacks, choices, strict=True)):
        single = [(i, letter) for i in stack.large for letter in letters if letter != choice[i]]
        for change in (*itertools.combinations(single, 1), *itertools.combinations(single, 2)):
            other = list(choice)
            for i, letter in change:
                other[i] = letter
            yield (*choices[:at], "".join(other), *choices[at + 1 :])


def _refused(step: Step, stacks: Sequence[_Stack], tried: dict[tuple[str, ...], _Cost], budget: int) -> str:
    choices = min(tried, key=lambda choices: tried[choices].device)
    total, state, left = tried[choices].device, sum(step.layout.bytes.values()), _cost(stacks, choices).device
    parts = f"{size(state)} of parameters, gradients and optimizer state, {size(left)} that layers leave, "
    rest = f"{size(total - state - left)} besides (logits, gathered layers, buffers)"
    more = [term for term in OFFLOADS if not step.strategy.kept_on_device(term)]
    others = "" if {*more} <= {*step.strategy.offloads} else f"offload='{'+'.join(more)}', "
    nearest = f"budget='{math.ceil(1.005e-6 * total)}MB'"
    return (
        f"budget={size(budget)}: {step.strategy} needs {size(total)} at least, {size(total - budget)} more: {parts}"
        f"{rest}; the nearest that fits is {nearest}, or use {others}more microbatches or devices"
    )


def _equation_seconds(eqn: Any, hardware: Hardware) -> float:
    """Of what runs as a part of what reads it: none."""
    if cheap(eqn):
        return 0.0
    moved = sum(jx.nbytes(v) for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "shape"))
    if jx.communicates([eqn], PRIMITIVES) and hardware.link_bandwidth:  # a ring sends about what it reads and writes
        return moved / (hardware.link_bandwidth * (hardware.link_efficiency or 1))
    flops = {dtype: 2.0 * count for dtype, (count, _) in jx.matmuls([eqn]).items()}
    return estimated_seconds(flops, moved, hardware)
