"""Whether the collectives that a strategy hides are under way while something is computed, by predicted time.

Hidden is what layers send, again and again: ZeRO gathers and reduces one layer while another is computed (Zhao et al.
2023, arXiv:2304.11277, section 3.3.1), DDP reduces in its backward (Li et al. 2020, arXiv:2006.15704, section 3.2.3).
Where microbatches run side by side (`concurrent`, `1f1b-overlap`), so are activations that `tensor`, `context` and
`expert` send, half of their seconds: where an iteration begins and ends, the other microbatch has nothing to compute.
What runs once in a microbatch, such as the first gather and that of a head, is promised by none.
"""

import math
from collections.abc import Iterator
from typing import Any

from ...backend.text import few
from ...hardware.compiled.hlo import Instruction, arrays
from ...hardware.compiled.kernels import Executable
from ...hardware.hardware import KINDS, Hardware, of_device_kind
from ...parallel.data import rule_of
from ..predict import Part, predict
from ..step_view import StepView as Step
from .proof import Finding

WAITS = 0.1  # of a collective's own seconds: so much may wait of one of parameters
OF_ACTIVATIONS = 0.5  # and of all together that send activations over an axis
SMALL = 0.01  # of the step's seconds: so much may wait for collectives of a kind over an axis, all together
_ACTIVATIONS = "activations"
_PARAMETERS = ("all-gather", "reduce-scatter", "all-reduce")


def hardware_of(step: Step) -> Hardware:
    """The numbers by which a step's time is predicted on its devices. Raises ValueError where there are none, and for a
    server.
    """
    device = step.mesh.devices.flat[0]
    if step.strategy.server:
        raise ValueError(
            f"overlap with {step.strategy}: a server sends between programs, and hides nothing; leave it out"
        )
    if device.platform != "gpu":
        raise ValueError(
            f"overlap: a program compiled for {device.platform.upper()} has no asynchronous collectives to read; "
            "compile for GPUs, which need not be there: make_train_step(..., mesh=target('16xH100').devices), with "
            "target of jaxpar.hardware, or --target 16xH100"
        )
    if (known := of_device_kind(device.device_kind)) is None:
        raise ValueError(
            f"overlap: {device.device_kind} is none of {', '.join(KINDS)}, whose numbers are known; give those of this "
            "one, overlap=jaxpar.hardware.kinds.load(file)"
        )
    return known


def hidden(step: Step, batch: Any, program: Executable, hardware: Hardware) -> Iterator[Finding]:
    """A finding for each kind and axes of collectives that are promised to be hidden, and for each of them that is not:
    bytes that a device sends, and of these those that are sent while kernels run.

    Raises ValueError as `predict`.
    """
    found = predict(program, step, batch, hardware)
    groups: dict[str, list[Part]] = {}
    for part in found.collectives:
        again = part.executions > (1 if step.schedule is not None else step.strategy.turns)
        if again and (kind := _promised(step, part)):
            groups.setdefault(f"{kind} {'+'.join(part.axes)}", []).append(part)
    waits = sum(part.exposed for parts in groups.values() for part in parts)
    note = (
        f"as predicted for {hardware.kind}, {_ms(waits)} of a step of {_ms(found.seconds)} wait for what is promised "
        f"to be hidden, {_ms(found.exposed - waits)} for other collectives"
    )
    if not groups:
        yield Finding("overlap", "no loop over layers sends", 0, 0, note=note)
    for called, parts in groups.items():
        late = [part for part in parts if part.exposed > WAITS * part.seconds]
        enough = OF_ACTIVATIONS * sum(part.seconds for part in parts) if called.startswith(_ACTIVATIONS) else 0.0
        if sum(part.exposed for part in late) <= max(enough, SMALL * found.seconds):
            late = []
        for part in late:
            i = next(i for block in program.module.computations.values() for i in block if i.name == part.name)
            why = _why(step, part, _leaf(step, batch, i), program.module.line(i))
            what = f"{part.kind} {'+'.join(part.axes)} {part.executions} x"
            yield Finding("overlap", what, part.bytes, _hidden_bytes(part), "MISSING", why)
        if kept := [part for part in parts if part not in late]:
            sent = sum(part.bytes for part in kept), sum(map(_hidden_bytes, kept))
            yield Finding("overlap", f"{called} {sum(part.executions for part in kept)} x", *sent, note=note)


def _promised(step: Step, part: Part) -> str:
    """The kind of a collective that sends parameters or gradients of layers, or that it sends activations, where they
    are promised to be hidden; else "".
    """
    axes = {axis for named in part.axes for axis in named.rpartition(" of ")[2].split("+")}
    if part.kind in _PARAMETERS and not axes & {"tensor", "pipe"} and axes & {"data", "fsdp"}:
        # What ZeRO-1 and 2 gather is the updated parameters, behind the backward.
        return part.kind if part.kind != "all-gather" or "params" in rule_of(step.strategy).promise.holds else ""
    beside = step.strategy.concurrent > 1 or (step.schedule is not None and step.schedule.beside)
    return _ACTIVATIONS if beside and "pipe" not in axes else ""


def _hidden_bytes(part: Part) -> int:
    return round(part.bytes * (1 - part.exposed / part.seconds))


def _leaf(step: Step, batch: Any, i: Instruction) -> str:
    """That of whose layer the largest array of a collective has the shape, or those; "" where no leaf's has."""
    units, largest = step.layout.storage.units, max((dims for _, dims in arrays(i.shape)), key=math.prod)
    found = {}
    for s in (s for stack in step.traced(batch).program.stacks for s in stack.slices):
        layer = [n for d, n in enumerate(units[s.leaf].local.stored) if d != s.dim]
        if sorted(layer) == sorted(largest):  # what is gathered has its dim of shards first
            found[units[s.leaf].path] = s
    return few(list(found))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _why(step: Step, part: Part, leaf: str, line: str) -> str:
    """How a collective waits, and what to try."""
    if not part.asynchronous:
        how = "it is synchronous"
    elif part.exposed > 0.99 * part.seconds:
        how = "nothing is computed between its start and its done"
    else:
        how = "what is computed between its start and its done takes less"
    strategy = step.strategy
    ahead, turns = strategy.prefetches(step.mesh), strategy.turns if strategy.pipe == 1 else 1
    more = strategy.concurrent * next((n for n in range(2, turns + 1) if turns % n == 0), 0)
    if _promised(step, part) == _ACTIVATIONS or ahead:
        hint = f"concurrent={more} fetches a layer once for so many microbatches, " * (more > 0)
        hint += f"more rows a device give more to hide it behind, fewer ranks of {'+'.join(part.axes)} less to wait for"
    elif step.schedule is None or step.schedule.in_turn:
        hint = "prefetch=1 sends it beside another layer"
    else:
        hint = "zero=1 sends it once a step, and schedule=1f1b with prefetch=1 beside another layer"
    of = f" of {leaf}" * bool(leaf)
    of += f" at {line}" * bool(line and not line.startswith("jaxpar/"))
    return f"{_ms(part.exposed)} of its {_ms(part.seconds)} a step wait{of}: {how}; {hint}"
