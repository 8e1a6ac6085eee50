"""Whether the collectives that a strategy promises to overlap run while something is computed, by predicted time.

The promise covers collectives that layers repeat:

- ZeRO gathers and reduces one layer while another is computed (Zhao et al. 2023, arXiv:2304.11277, section 3.3.1).
- DDP reduces during its backward (Li et al. 2020, arXiv:2006.15704, section 3.2.3).
- If microbatches run concurrently (`concurrent`, `1f1b-overlap`), `tensor`, `context` and `expert` send activations of
  one while the other computes. Only half of these seconds is promised: at the beginning and end of an iteration the
  other microbatch has nothing to compute.

A collective that runs once in a microbatch, such as the first gather or the head's, is not promised to overlap.
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

# The largest share of seconds that may be exposed without breaking the promise.
_EXPOSED_SHARE = 0.1  # of one collective's seconds
_EXPOSED_SHARE_OF_ACTIVATIONS = 0.5  # of the seconds of all collectives of activations over an axis together
_EXPOSED_SHARE_OF_STEP = 0.01  # of the step's seconds, by all collectives of a kind over an axis together
_ACTIVATIONS = "activations"
_PARAMETERS = ("all-gather", "reduce-scatter", "all-reduce")


def hardware_of(step: Step) -> Hardware:
    """Return the numbers by which a step's time is predicted on its devices.

    Raises:
      ValueError: the devices' numbers are unknown, or the step has a central server.
    """
    device = step.mesh.devices.flat[0]
    if step.strategy.server:
        raise ValueError(
            f"overlap with {step.strategy}: a server sends between programs, where nothing overlaps; leave overlap out"
        )
    if device.platform != "gpu":
        raise ValueError(
            f"overlap: a program compiled for {device.platform.upper()} has no asynchronous collectives to read; "
            "compile for GPUs, which need not be there: make_train_step(..., mesh=target('16xH100').devices), with "
            "target of jaxpar.hardware, or --target 16xH100"
        )
    if (hardware := of_device_kind(device.device_kind)) is None:
        raise ValueError(
            f"overlap: {device.device_kind} is none of the kinds with known numbers ({', '.join(KINDS)}); give its "
            "numbers: overlap=jaxpar.hardware.kinds.load(file)"
        )
    return hardware


def overlap_findings(step: Step, batch: Any, program: Executable, hardware: Hardware) -> Iterator[Finding]:
    """Yield a finding for each kind and axes of collectives that should overlap, and one for each that does not.

    A finding's amounts are the bytes that a device sends, and the bytes that it sends while kernels run. Raises
    ValueError as `predict` does.
    """
    prediction = predict(program, step, batch, hardware)
    groups: dict[str, list[Part]] = {}
    for part in prediction.collectives:
        # Layers repeat their collectives: these run more often than once a turn.
        is_repeated = part.executions > (1 if step.schedule is not None else step.strategy.turns)
        if is_repeated and (kind := _promised_kind(step, part)):
            groups.setdefault(f"{kind} {'+'.join(part.axes)}", []).append(part)
    exposed_seconds = sum(part.exposed for parts in groups.values() for part in parts)
    note = (
        f"as predicted for {hardware.kind}, a step of {_milliseconds(prediction.seconds)} waits "
        f"{_milliseconds(exposed_seconds)} for collectives that are promised to overlap, and "
        f"{_milliseconds(prediction.exposed - exposed_seconds)} for others"
    )
    if not groups:
        yield Finding("overlap", "no loop over layers sends", 0, 0, note=note)
    for label, parts in groups.items():
        # A wait of up to a tenth of a collective's seconds is no finding.
        exposed_parts = [part for part in parts if part.exposed > _EXPOSED_SHARE * part.seconds]
        allowed_seconds = (
            _EXPOSED_SHARE_OF_ACTIVATIONS * sum(part.seconds for part in parts)
            if label.startswith(_ACTIVATIONS)
            else 0.0
        )
        # Waits that are small in sum, or allowed for activations, break no promise.
        small_seconds = _EXPOSED_SHARE_OF_STEP * prediction.seconds
        if sum(part.exposed for part in exposed_parts) <= max(allowed_seconds, small_seconds):
            exposed_parts = []
        for part in exposed_parts:
            instructions = (i for block in program.module.computations.values() for i in block)
            instruction = next(i for i in instructions if i.name == part.name)
            leaves, line = _leaves_of_collective(step, batch, instruction), program.module.line(instruction)
            description = f"{part.kind} {'+'.join(part.axes)} {part.executions} x"
            note_on_part = _cause_and_hint(step, part, leaves, line)
            yield Finding("overlap", description, part.bytes, _overlapped_bytes(part), "MISSING", note_on_part)
        if overlapped_parts := [part for part in parts if part not in exposed_parts]:
            amounts = sum(part.bytes for part in overlapped_parts), sum(map(_overlapped_bytes, overlapped_parts))
            yield Finding(
                "overlap", f"{label} {sum(part.executions for part in overlapped_parts)} x", *amounts, note=note
            )


def _promised_kind(step: Step, part: Part) -> str:
    """Return the kind of collective that the strategy promises to overlap, or "" if it promises nothing.

    It is the part's own kind for parameters and gradients of layers, "activations" where microbatches run concurrently.
    """
    # An axis entry may be "2 of data+fsdp": groups of 2 devices within these axes.
    axes = {axis for axis_names in part.axes for axis in axis_names.rpartition(" of ")[2].split("+")}
    if part.kind in _PARAMETERS and not axes & {"tensor", "pipe"} and axes & {"data", "fsdp"}:
        # ZeRO-1 and 2 gather the updated parameters after the backward, where no layer is computed.
        return part.kind if part.kind != "all-gather" or "params" in rule_of(step.strategy).promise.holds else ""
    is_concurrent = step.strategy.concurrent > 1 or (step.schedule is not None and step.schedule.beside)
    return _ACTIVATIONS if is_concurrent and "pipe" not in axes else ""


def _overlapped_bytes(part: Part) -> int:
    """Return the bytes of a collective that are sent while kernels run, in proportion to its seconds."""
    return round(part.bytes * (1 - part.exposed / part.seconds))


def _leaves_of_collective(step: Step, batch: Any, instruction: Instruction) -> str:
    """Return the paths of stacked leaves whose layer has the shape of the collective's largest array; "" for none."""
    units = step.layout.storage.units
    largest_shape = max((dims for _, dims in arrays(instruction.shape)), key=math.prod)
    paths = []
    for layer_slice in (layer_slice for stack in step.traced(batch).program.stacks for layer_slice in stack.slices):
        leaf = units[layer_slice.leaf]
        layer_shape = [dim_size for dim, dim_size in enumerate(leaf.local.stored) if dim != layer_slice.dim]
        # A gathered array has the sharded dim first, so the order of dims does not count.
        if sorted(layer_shape) == sorted(largest_shape):
            paths.append(leaf.path)
    return few(list(dict.fromkeys(paths)))


def _milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds."""
    return f"{1e3 * seconds:.3g} ms"


def _cause_and_hint(step: Step, part: Part, leaf_paths: str, line: str) -> str:
    """Return why a collective is exposed, and what to try; its leaves and its source line are "" if unknown."""
    if not part.asynchronous:
        cause = "it is synchronous"
    elif part.exposed > 0.99 * part.seconds:
        cause = "no kernel runs between its start and its done"
    else:
        cause = "the kernels between its start and its done take less time"
    strategy = step.strategy
    has_prefetch, turns = strategy.prefetches(step.mesh), strategy.turns if strategy.pipe == 1 else 1
    # The next larger number of concurrent microbatches that divides the turns; 0 if there is none.
    larger_concurrent = strategy.concurrent * next((factor for factor in range(2, turns + 1) if turns % factor == 0), 0)
    if _promised_kind(step, part) == _ACTIVATIONS or has_prefetch:
        hint = f"concurrent={larger_concurrent} fetches a layer once for so many microbatches, "
        hint *= larger_concurrent > 0  # dropped if no larger number is possible
        axes = "+".join(part.axes)
        hint += f"more rows a device give more compute to overlap with, fewer ranks of {axes} less to wait for"
    elif step.schedule is None or step.schedule.in_turn:
        hint = "prefetch=1 sends it while another layer computes"
    else:
        hint = "zero=1 sends it once a step, and schedule=1f1b with prefetch=1 while another layer computes"
    subject = f" of {leaf_paths}" * bool(leaf_paths)
    subject += f" at {line}" * bool(line and not line.startswith("jaxpar/"))
    return f"{_milliseconds(part.exposed)} of its {_milliseconds(part.seconds)} a step wait{subject}: {cause}; {hint}"
