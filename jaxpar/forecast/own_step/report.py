"""`explain` and `predict` for programs that jaxpar did not make.

`program.py` compiles and reads the program, `sites.py` names the origin of its collectives. This file puts both into a
`JittedExplanation`, with the predicted time for a target of GPUs, and prints it. Steps of jaxpar explain themselves.
"""

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...backend.text import WIDTH, few, heading, number, size, table
from ...hardware.compiled.compiler_remarks import remarks
from ...hardware.compiled.cost import Costs
from ...hardware.devices import Target
from ...hardware.devices import target as target_of
from ...inspect.explain import explain as explain_step
from ...inspect.explain.explanation import ledger_table
from ...inspect.explain.findings import starts
from ...inspect.ledger import Ledger
from ...inspect.predict import Prediction
from ...inspect.predict import predict as predict_step
from ...inspect.predict.prediction import timed
from ...step.core import Step
from .program import Argument, JittedMemory, JittedProgram, program_of
from .sites import Site, sites_of

LARGE = 1_000_000  # bytes: larger arguments are reported if they are replicated, larger outputs if nothing is donated
_LISTED = 8  # lines of a list; .json() has all of them


@dataclass(frozen=True)
class JittedExplanation:
    """The result of `jp.explain(fn, *args)`. `print` it, or take `.json()`.

    Attributes:
      name: the name of the function.
      devices: number and kind of the devices, "8 x cpu".
      axes: the mesh axes of several devices, name -> size.
      memory: the memory of one device. None for a text, which does not tell.
      costs: the kernels, with their matrix products.
      ledger: the collectives; equal ones are added up.
      across: the axes whose collectives leave a host. None if the hosts of the devices are unknown.
      sites: the collectives by line, those that send most first.
      arguments: every array argument, with the bytes that each device stores. None for a text.
      prediction: the predicted time, if `target` names GPUs.
      remarks: warnings about the numbers, and about what is unknown.
    """

    name: str
    devices: str
    axes: dict[str, int]
    memory: JittedMemory | None
    costs: Costs
    ledger: Ledger
    across: frozenset[tuple[str, ...]] | None
    sites: tuple[Site, ...]
    arguments: tuple[Argument, ...] | None
    prediction: Prediction | None
    remarks: tuple[str, ...]

    @property
    def exposed(self) -> int:
        """Return the bytes that a device sends without overlapping compute."""
        return sum(collective.sent for collective in self.ledger if not collective.overlapped)

    @property
    def copied(self) -> tuple[Argument, ...]:
        """Return the large arguments that are replicated along some mesh axis, largest first.

        An argument is large if a device stores 1 MB of it, or a hundredth of all arguments' bytes.
        """
        # In a small program nothing has a megabyte: a hundredth of all arguments is large there.
        threshold = min(LARGE, sum(x.held for x in self.arguments or ()) / 100)
        large = (x for x in self.arguments or () if x.copied and x.held >= threshold)
        return tuple(sorted(large, key=lambda x: -x.held))

    def json(self) -> dict[str, Any]:
        """Return the explanation as dicts, lists, text and numbers. Bytes are exact; kernels are summed to FLOPs."""
        # Costs are long and hold HLO objects; sets of tuples, such as `across`, are no JSON.
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("costs", "across")}
        return plain | {
            "memory": self.memory and dataclasses.asdict(self.memory),
            "flops": self.costs.flops if _has_known_counts(self.costs) else None,
            "ledger": [dataclasses.asdict(x) | {"axes": list(x.axes), "sent": x.sent} for x in self.ledger],
            "across": None if self.across is None else [list(axes) for axes in sorted(self.across)],
            "sites": [dataclasses.asdict(x) for x in self.sites],
            "arguments": self.arguments and [dataclasses.asdict(x) for x in self.arguments],
            "prediction": self.prediction and self.prediction.json(),
            "remarks": list(self.remarks),
        }

    def __repr__(self) -> str:
        return f"JittedExplanation({self.name!r} on {self.devices}; print it)"

    def __str__(self) -> str:
        axes = ", ".join(f"{axis}={n}" for axis, n in self.axes.items()) or "no axes"
        parts = [heading(self.name, f"{self.devices} ({axes})")]
        if self.memory is not None:
            rows = [["memory", "each device"], *([k.replace("_", " "), size(n)] for k, n in vars(self.memory).items())]
            parts.append(table(rows, "<>"))
        # FLOPs in a loop of unknown length are unknown, and a sum without them would mislead.
        if _has_known_counts(self.costs) and self.costs.flops:
            flops = ", ".join(f"{number(n)}FLOP in {dtype}" for dtype, n in self.costs.flops.items())
            parts.append(f"matrix products of a device: {flops}; {len(self.costs)} kernels")
        parts.append(ledger_table(self.ledger, self.across) if self.ledger else "collectives: none")
        listed = {
            "by line, most bytes sent first": list(map(str, self.sites)),
            "copies: every device along these axes stores the same": list(_describe_copies(self.copied)),
        }
        parts += ["\n".join([title, *_wrapped_lines(lines)]) for title, lines in listed.items() if lines]
        parts += [str(self.prediction)] if self.prediction is not None else []
        parts += [textwrap.fill(x, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for x in self.remarks]
        return "\n\n".join(parts)


def explain(fn: Any, *args: Any, target: Target | str | None = None, mesh: Any = None) -> Any:
    """Explain the memory, compute and communication of any program that `jax.jit` lowers. Nothing runs.

    Args:
      fn: a function, jitted or not, with or without shardings; or a `jax.stages.Lowered` or `Compiled`; or the text of
        a compiled program. For a step of `jp.make_train_step`, the result is `step.explain(batch)`, with closed forms.
      args: the function's arguments: arrays, or `jax.ShapeDtypeStruct` with their shardings; static arguments
        unchanged. A `NamedSharding` may be on a `jax.sharding.AbstractMesh`, whose devices are not here.
      target: GPUs to compile for, such as "64xH100", instead of the arguments' devices. Both need the same number of
        devices. Every mesh of arguments and program is laid on the target's devices in order, so that its last axes
        stay within a host. The time is then predicted.
      mesh: names the mesh axes of a text, or of a program whose arguments have no NamedSharding.

    Returns:
      A `JittedExplanation`; all bytes and FLOPs are per device and step.

    Raises:
      ValueError: the mesh has another number of devices than the target or the program; the arguments are on an
        AbstractMesh and there is no target; or the program is for TPUs, which are not read.
    """
    if isinstance(fn, Step):
        _require_only_batch(fn, args, target, mesh)
        return explain_step(fn, args[0])
    program = program_of(fn, args, target, mesh)
    has_peaks = program.target is not None and program.target.hardware.peaks
    return explain_program(program, _predict_program(program) if has_peaks else None)


def predict(
    fn: Any, *args: Any, target: Target | str, mesh: Any = None, rows: int = 0, flops: float | None = None
) -> Prediction:
    """Predict how long any program that `jax.jit` lowers takes on GPUs that need not be here. Nothing runs.

    Args:
      fn, args, mesh: as for `explain`.
      target: the GPUs, such as "64xH100"; see `explain`.
      rows: the rows of the global batch, from which rows/s follows.
      flops: the FLOPs of the step over all devices, without recomputation, from which the MFU follows.

    Raises:
      ValueError: as `explain`; or the target's peaks and bandwidths are unknown.
    """
    if isinstance(fn, Step):
        _require_only_batch(fn, args, None, mesh)
        hardware = (target_of(target) if isinstance(target, str) else target).hardware
        return predict_step(fn.compile(args[0]), fn, args[0], hardware, flops)
    return _predict_program(program_of(fn, args, target, mesh), rows, flops)


def _require_only_batch(step: Step, args: Sequence[Any], target: Any, mesh: Any) -> None:
    """Raise ValueError if a step of jaxpar is given more than its batch."""
    if len(args) != 1 or target is not None or mesh is not None:
        raise ValueError(
            f"{step!r} has its own mesh and state, and takes its batch alone; for a target make it with "
            "mesh=target('8xH100').devices"
        )


def _predict_program(program: JittedProgram, rows: int = 0, flops: float | None = None) -> Prediction:
    """Return the predicted time of a program that was compiled for a target; errors as for `predict`."""
    target = program.target
    assert target is not None
    # A target's devices are known, and with them their hosts.
    assert program.hosts is not None
    if not target.hardware.peaks or program.platform != "gpu":
        unknown_peaks = f"{target.kind} devices have no peaks and bandwidths"
        why = unknown_peaks if not target.hardware.peaks else f"the program is compiled for {program.platform.upper()}s"
        raise ValueError(f"{why}, and nothing can be predicted; give the function, and target='8xH100'")
    memory = program.memory and program.memory.total
    prediction = timed(program.executable, program.hosts, target.hardware, rows, flops, program.platform, memory)
    return dataclasses.replace(prediction, notes=(*prediction.notes, *program.notes))


def explain_program(program: JittedProgram, prediction: Prediction | None = None) -> JittedExplanation:
    """Return the explanation of a compiled program, with its predicted time if there is one."""
    ledger, costs = Ledger.of(program.executable), Costs.of(program.executable)
    across = None  # unknown, unlike an empty set
    if program.hosts is not None:
        hosts = program.hosts
        # A replica group leaves a host if its devices, given by their places in the mesh, are on several hosts.
        leaves_host = lambda groups: any(len({hosts[place] for place in group}) > 1 for group in groups)
        across = frozenset(start.axes for start in starts(program.executable.operations) if leaves_host(start.groups))
    return JittedExplanation(
        name=program.name,
        devices=program.devices,
        axes={axis: n for axis, n in program.mesh.shape.items() if n > 1},
        memory=program.memory,
        costs=costs,
        ledger=ledger,
        across=across,
        sites=sites_of(program),
        arguments=program.arguments,
        prediction=prediction,
        remarks=tuple(_remarks(program, program.memory, ledger, costs)),
    )


def _has_known_counts(costs: Costs) -> bool:
    """Return whether every kernel's number of executions is known: loops may have an unknown length."""
    return all(cost.executions is not None for cost in costs)


def _remarks(program: JittedProgram, memory: JittedMemory | None, ledger: Ledger, costs: Costs) -> Iterator[str]:
    """Yield sentences about what is unknown, and about what the user can improve."""
    yield from program.notes
    if memory is None:
        yield (
            "The memory and the copies of arguments are not known from a text: give the compiled object, or the "
            "function."
        )
    elif not memory.taken_over and memory.outputs >= LARGE:
        yield (
            f"No argument is donated: {size(memory.outputs)} of outputs need memory of their own. If the old state is "
            "not read after the step, jax.jit(..., donate_argnums=0) reuses its memory for the new state."
        )
    yield from remarks(costs, program.platform)
    # On GPUs, the same step has other dtypes and overlaps; the user should not take these numbers for it.
    if program.platform == "cpu":
        yield (
            "CPU: collectives of bfloat16 are compiled as float32, and none overlaps with compute; target='8xH100' "
            "compiles for GPUs that need not be here."
        )
    if not _has_known_counts(costs) or any(collective.count is None for collective in ledger):
        yield "?: in a loop of unknown length; the bytes are for one iteration, and FLOPs are not known."
    if any(collective.conditional for collective in ledger):
        yield "Some collectives run in one branch of a conditional: counts and bytes are upper bounds."


def _describe_copies(copied: Sequence[Argument]) -> Iterator[str]:
    """Yield a line for the replicated leaves of each function argument and set of axes, largest in sum first."""
    groups: dict[tuple[str, tuple[str, ...]], list[Argument]] = {}
    for x in copied:
        # "state.params['w']" and "state.opt_state[0].mu" are leaves of one argument, `state`.
        groups.setdefault((x.path.partition("[")[0].partition(".")[0], x.copied), []).append(x)
    for (_, axes), group in sorted(groups.items(), key=lambda item: -sum(x.held for x in item[1])):
        unsharded = "whole, " if all(x.held == x.bytes for x in group) else ""
        yield f"{few([x.path for x in group])}: {unsharded}{size(sum(x.held for x in group))}, along {'+'.join(axes)}"


def _wrapped_lines(lines: Sequence[str]) -> Iterator[str]:
    """Yield the first lines of a list, wrapped, and the number of those that are not shown."""
    for line in lines[:_LISTED]:
        yield textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    if (more := len(lines) - _LISTED) > 0:
        yield f"  and {more} more: see .json()"
