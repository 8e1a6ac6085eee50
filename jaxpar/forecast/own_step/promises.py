"""`check` for programs that jaxpar did not make: compare them with what their author promises.

`Promises` states upper bounds on collectives, replicated arguments and memory. `check` compiles the program and makes
one `Finding` per promise; a broken one names the lines or arguments that cause it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...backend.text import few, size
from ...hardware.devices import Target
from ...hardware.hardware import Hardware
from ...inspect.check import check as check_step
from ...inspect.check.promises import SCALARS
from ...inspect.check.proof import Finding, Proof
from ...program.collectives import KINDS
from ...step.core import Step
from .program import program_of
from .report import JittedExplanation, explain_program

_SITES = 3  # collectives that a broken promise names


@dataclass(frozen=True, kw_only=True)
class Promises:
    """The bounds that the author of a step promises for its compiled program, per device and step. None: no promise.

    >>> promises = Promises(
    ...     collectives={("all-gather", "fsdp"): 2e9, ("all-reduce", ("data", "fsdp")): 1e9},
    ...     copies={"fsdp": 1e6},
    ...     memory=70e9,
    ... )

    Attributes:
      collectives: (kind, axis or axes in the mesh's order) -> the most bytes of their buffers. Every other pair may
        have less than 1 kB in total, which allows sums of scalars.
      copies: axis -> bytes; no argument that is replicated along that axis may be larger on a device.
      memory: the most bytes of arguments, outputs and temporaries; donated memory counts once.
      involuntary: whether the compiler may gather arrays only to slice them again.

    Raises:
      ValueError: a kind is no collective.
    """

    collectives: Mapping[tuple[str, str | tuple[str, ...]], float] | None = None
    copies: Mapping[str, float] = field(default_factory=dict)
    memory: float | None = None
    involuntary: bool = False

    def __post_init__(self) -> None:
        for kind, *_ in self.collectives or ():
            if kind not in KINDS:
                raise ValueError(f"{kind!r} is no collective; promise one of {', '.join(KINDS)}")


def check(
    fn: Any,
    *args: Any,
    promises: Promises | None = None,
    target: Target | str | None = None,
    mesh: Any = None,
    overlap: bool | Hardware = False,
) -> Proof:
    """Check whether any program that `jax.jit` lowers keeps the promises of its author. Nothing runs.

    Args:
      fn, args, target, mesh: as for `explain`. A step of `jp.make_train_step` is checked against its strategy, by
        `jaxpar.inspect.check.check(step, batch, overlap=overlap)`.
      promises: the promises. `Promises()`, the default, promises only that no array is gathered to be sliced again.
      overlap: as for `jaxpar.inspect.check.check`; only for a step of `jp.make_train_step`.

    Returns:
      A proof with one finding per promise; a broken promise names its line or argument. Print the proof, or call its
      `require()`, which raises.

    Raises:
      ValueError: as `explain`; a promise names an axis that the mesh lacks; or the program is a text, which has no
        memory and no copies, and these are promised.
    """
    if isinstance(fn, Step):
        if promises is not None or len(args) != 1 or target is not None or mesh is not None:
            raise ValueError(f"{fn!r} promises what its strategy says, on its own mesh; give its batch alone")
        return check_step(fn, *args, overlap=overlap)
    if overlap:
        raise ValueError(
            "overlap= asks what a strategy promises, and this step has none; leave it out, or use make_train_step"
        )
    program = program_of(fn, args, target, mesh)
    promises, explanation = promises or Promises(), explain_program(program)

    # 1. Refuse promises that this program cannot be checked against.
    groups = [axis for _, axes in promises.collectives or () for axis in _axes(axes)]
    promised_axes = [axis for group in groups for axis in group.rpartition(" of ")[2].split("+")]  # "2 of data+fsdp"
    if unknown := {*promised_axes, *promises.copies} - {*program.mesh.axis_names}:
        axis, axes = sorted(unknown)[0], ", ".join(program.mesh.axis_names)
        raise ValueError(f"axis {axis!r} is promised, and the mesh has {axes}; promise one of these")
    if explanation.memory is None and (promises.memory is not None or promises.copies):
        raise ValueError(
            "the text of a program does not tell its memory and copies; give the compiled object, or the function"
        )

    # 2. Compare.
    findings = [
        *_memory_findings(promises, explanation),
        *_collective_findings(promises, explanation),
        *_copy_findings(promises, explanation),
    ]
    # Involuntary gathers are forbidden unless the author allows them.
    involuntary = [site for site in explanation.sites if site.involuntary]
    if not promises.involuntary:
        sent = sum(site.sent for site in involuntary)
        sites = few(list(map(str, involuntary)), _SITES)
        findings.append(_finding("involuntary", "full rematerialization", 0, sent, sites))
    return Proof(explanation.name, explanation.devices, tuple(findings), own=True)


def _axes(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes of a promise, given as one name or as a tuple."""
    return (axes,) if isinstance(axes, str) else axes


def _finding(part: str, subject: str, promised: float, measured: int, note: str) -> Finding:
    """Return the finding for an upper bound; it has its note only if the promise is broken."""
    is_kept = measured <= promised
    return Finding(part, subject, int(promised), measured, "ok" if is_kept else "UNPROMISED", "" if is_kept else note)


def _memory_findings(promises: Promises, explanation: JittedExplanation) -> Iterator[Finding]:
    """Compare the total memory of a device; the note has its parts."""
    if promises.memory is not None and explanation.memory is not None:
        parts = ", ".join(f"{name.replace('_', ' ')} {size(n)}" for name, n in vars(explanation.memory).items())
        yield _finding("memory", "a device", promises.memory, explanation.memory.total, parts)


def _collective_findings(promises: Promises, explanation: JittedExplanation) -> Iterator[Finding]:
    """Compare the bytes of each kind of collective and axes; the note has the sites that send most."""
    if promises.collectives is None:
        return
    # Promised collectives that the program lacks are listed too, with 0 bytes.
    totals = {(kind, _axes(axes)): 0 for kind, axes in promises.collectives}
    for collective in explanation.ledger:
        key = (collective.kind, collective.axes)
        totals[key] = totals.get(key, 0) + collective.bytes
    bounds = {(kind, _axes(axes)): bound for (kind, axes), bound in promises.collectives.items()}
    for (kind, axes), nbytes in totals.items():
        sites = [str(site) for site in explanation.sites if (site.kind, site.axes) == (kind, axes)]
        # Sums of scalars, such as the loss, are in every program and need no promise.
        bound = bounds.get((kind, axes), SCALARS - 1)
        yield _finding("collectives", f"{kind} {'+'.join(axes)}", bound, nbytes, "; ".join(sites[:_SITES]))


def _copy_findings(promises: Promises, explanation: JittedExplanation) -> Iterator[Finding]:
    """Compare the largest argument that is replicated along each promised axis; the note has all that are too large."""
    for axis, bound in promises.copies.items():
        replicated = [x for x in explanation.arguments or () if axis in x.copied]
        too_large = sorted((x for x in replicated if x.held > bound), key=lambda x: -x.held)
        largest = max((x.held for x in replicated), default=0)
        total = size(sum(x.held for x in too_large))
        note = f"{few([x.path for x in too_large])}, {total} in all, the same along {axis}"
        yield _finding("copies", f"along {axis}, the largest", bound, largest, note)
