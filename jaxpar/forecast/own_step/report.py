"""explain and predict, of programs that jaxpar did not make."""

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

LARGE = 1_000_000  # bytes: what is larger is said to be a copy, or not donated
_LISTED = 8


@dataclass(frozen=True)
class JittedExplanation:
    """What `jp.explain(fn, *args)` found. `print` it, or take `.json()`.

    Attributes:
      name: of the function.
      devices: number and kind, "8 x cpu".
      axes: the mesh axes of several devices, name -> size.
      memory: of one device; None of a text, which does not say.
      costs: the kernels, with their matrix products.
      ledger: the collectives, alike ones added up.
      across: the axes whose collectives leave a host; None where it is not known which device is in which.
      sites: the collectives by line, what sends most first.
      arguments: what each device holds of every array that it is given; None of a text.
      prediction: its time, where a target of GPUs was named.
      remarks: what a reader of the numbers should know, and what is not known.
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
        """Bytes that a device sends while nothing is computed."""
        return sum(one.sent for one in self.ledger if not one.overlapped)

    @property
    def copied(self) -> tuple[Argument, ...]:
        """Arguments of which devices along some axis hold the same, of 1 MB or a hundredth of what a device is given;
        what takes most first.
        """
        least = min(LARGE, sum(x.held for x in self.arguments or ()) / 100)
        large = (x for x in self.arguments or () if x.copied and x.held >= least)
        return tuple(sorted(large, key=lambda x: -x.held))

    def json(self) -> dict[str, Any]:
        """All of it as dicts, lists, text and numbers, bytes unrounded; of the kernels their FLOPs alone."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("costs", "across")}
        return plain | {
            "memory": self.memory and dataclasses.asdict(self.memory),
            "flops": self.costs.flops if _known(self.costs) else None,
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
        if _known(self.costs) and self.costs.flops:
            flops = ", ".join(f"{number(n)}FLOP in {dtype}" for dtype, n in self.costs.flops.items())
            parts.append(f"matrix products of a device: {flops}; {len(self.costs)} kernels")
        parts.append(ledger_table(self.ledger, self.across) if self.ledger else "collectives: none")
        listed = {
            "by line, what sends most first": list(map(str, self.sites)),
            "copies: each of these devices holds the same": list(_copies(self.copied)),
        }
        parts += ["\n".join([title, *_wrapped(lines)]) for title, lines in listed.items() if lines]
        parts += [str(self.prediction)] if self.prediction is not None else []
        parts += [textwrap.fill(x, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for x in self.remarks]
        return "\n\n".join(parts)


def explain(fn: Any, *args: Any, target: Target | str | None = None, mesh: Any = None) -> Any:
    """What any program that `jax.jit` lowers holds, computes and sends on each device. Nothing runs.

    Args:
      fn: a function, jitted or not, with shardings or without; or a `jax.stages.Lowered` or `Compiled`, or the text of
        a compiled program. Of a step of `jp.make_train_step` it is `step.explain(batch)`, with its closed forms.
      args: its arguments, arrays or `jax.ShapeDtypeStruct` with their shardings; static ones as they are. A
        `NamedSharding` may be on a `jax.sharding.AbstractMesh`, of devices that are not here.
      target: GPUs to compile for, such as "64xH100", in place of the arguments' devices, which must be as many: every
        mesh of arguments and program is laid on them in order, its last axes within a host. The time is then predicted.
      mesh: of a text, or of a program whose arguments have no NamedSharding: gives the names of axes.

    Raises ValueError for a mesh of another number of devices than the target or the program has, for arguments on an
    AbstractMesh without a target, and for TPUs, whose programs are not read.
    """
    if isinstance(fn, Step):
        _only_batch(fn, args, target, mesh)
        return explain_step(fn, args[0])
    program = program_of(fn, args, target, mesh)
    of_gpus = program.target is not None and program.target.hardware.peaks
    return explained(program, _timed(program) if of_gpus else None)


def predict(
    fn: Any, *args: Any, target: Target | str, mesh: Any = None, rows: int = 0, flops: float | None = None
) -> Prediction:
    """How long any program that `jax.jit` lowers takes on GPUs that are not here. Nothing runs.

    Args:
      fn, args, mesh: as for `explain`.
      target: the GPUs, such as "64xH100"; see `explain`.
      rows: of the global batch; gives rows/s.
      flops: of the step over all devices, without recomputation; gives the MFU.

    Raises ValueError as `explain`, and where the target's peaks and bandwidths are not known.
    """
    if isinstance(fn, Step):
        _only_batch(fn, args, None, mesh)
        hardware = (target_of(target) if isinstance(target, str) else target).hardware
        return predict_step(fn.compile(args[0]), fn, args[0], hardware, flops)
    return _timed(program_of(fn, args, target, mesh), rows, flops)


def _only_batch(step: Step, args: Sequence[Any], target: Any, mesh: Any) -> None:
    if len(args) != 1 or target is not None or mesh is not None:
        raise ValueError(
            f"{step!r} has a mesh and a state of its own, and takes its batch alone; for a target make it with "
            "mesh=target('8xH100').devices"
        )


def _timed(program: JittedProgram, rows: int = 0, flops: float | None = None) -> Prediction:
    target = program.target
    assert target is not None
    assert program.hosts is not None
    if not target.hardware.peaks or program.platform != "gpu":
        of_target = f"{target.kind} devices have no peaks and bandwidths"
        wrong = of_target if not target.hardware.peaks else f"the program is compiled for {program.platform.upper()}s"
        raise ValueError(f"{wrong}, and nothing can be predicted; give the function, and target='8xH100'")
    memory = program.memory and program.memory.total
    found = timed(program.executable, program.hosts, target.hardware, rows, flops, program.platform, memory)
    return dataclasses.replace(found, notes=(*found.notes, *program.notes))


def explained(program: JittedProgram, prediction: Prediction | None = None) -> JittedExplanation:
    """A program that was read, explained."""
    ledger, costs = Ledger.of(program.executable), Costs.of(program.executable)
    across = None
    if program.hosts is not None:
        hosts = program.hosts
        leaving = lambda groups: any(len({hosts[place] for place in group}) > 1 for group in groups)
        across = frozenset(one.axes for one in starts(program.executable.operations) if leaving(one.groups))
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


def _known(costs: Costs) -> bool:
    return all(cost.executions is not None for cost in costs)


def _remarks(program: JittedProgram, memory: JittedMemory | None, ledger: Ledger, costs: Costs) -> Iterator[str]:
    yield from program.notes
    if memory is None:
        yield "Of a text, memory and which arguments are copies are not known: give what was compiled, or the function."
    elif not memory.taken_over and memory.outputs >= LARGE:
        yield (
            f"No argument is donated: {size(memory.outputs)} of outputs stand beside them. A step whose old state is "
            "read no more gives its memory to the new one by jax.jit(..., donate_argnums=0)."
        )
    yield from remarks(costs, program.platform)
    if program.platform == "cpu":
        yield (
            "CPU: collectives of bfloat16 are compiled as float32, and none overlaps with compute; target='8xH100' "
            "compiles for GPUs that need not be here."
        )
    if not _known(costs) or any(one.count is None for one in ledger):
        yield "?: in a loop of unknown length; the bytes are those of one round, and FLOPs are not known."
    if any(one.conditional for one in ledger):
        yield "Some collectives run in one branch of a conditional: counts and bytes are upper bounds."


def _copies(copied: Sequence[Argument]) -> Iterator[str]:
    """Arguments that lie alike in one line, by what they take."""
    groups: dict[tuple[str, tuple[str, ...]], list[Argument]] = {}
    for x in copied:
        groups.setdefault((x.path.partition("[")[0].partition(".")[0], x.copied), []).append(x)
    for (_, axes), same in sorted(groups.items(), key=lambda item: -sum(x.held for x in item[1])):
        whole = "whole, " if all(x.held == x.bytes for x in same) else ""
        yield f"{few([x.path for x in same])}: {whole}{size(sum(x.held for x in same))}, along {'+'.join(axes)}"


def _wrapped(lines: Sequence[str]) -> Iterator[str]:
    for line in lines[:_LISTED]:
        yield textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    if (more := len(lines) - _LISTED) > 0:
        yield f"  and {more} more: see .json()"
