"""check, of programs that jaxpar did not make: what their author promises of them, beside what they do."""

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
from .report import JittedExplanation, explained

_LINES = 3  # of a finding, that are named


@dataclass(frozen=True, kw_only=True)
class Promises:
    """What the author of a step promises of its compiled program, per device and step. None: nothing.

    >>> kept = Promises(
    ...     collectives={("all-gather", "fsdp"): 2e9, ("all-reduce", ("data", "fsdp")): 1e9},
    ...     copies={"fsdp": 1e6},
    ...     memory=70e9,
    ... )

    Attributes:
      collectives: (kind, axis or axes in the mesh's order) -> bytes of its buffers at most. Others may have less than
        1 kB each in all, as sums of scalars have.
      copies: axis -> bytes: no argument with more on a device is the same along that axis.
      memory: bytes of arguments, outputs and temporaries at most, donated memory counted once.
      involuntary: whether arrays may be gathered whole for no other end than to be cut anew.
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
    """Whether any program that `jax.jit` lowers keeps what its author promises. Nothing runs.

    Args:
      fn, args, target, mesh: as for `explain`. Of a step of `jp.make_train_step`, whose strategy promises, it is
        `jaxpar.inspect.check.check(step, batch, overlap=overlap)`.
      promises: what is promised; `Promises()` that nothing is gathered whole only to be cut anew.

    What is broken is named with its line or argument: print what is returned, or call its `require()`. Raises
    ValueError as `explain`, for a promise of an axis that the mesh lacks, and of a text for promises of memory and
    copies, which a text does not tell.
    """
    if isinstance(fn, Step):
        if promises is not None or len(args) != 1 or target is not None or mesh is not None:
            raise ValueError(f"{fn!r} promises what its strategy says, on its own mesh; give its batch alone")
        return check_step(fn, *args, overlap=overlap)
    if overlap:
        raise ValueError(
            "overlap= asks what a strategy promises, which this step has none of; leave it out, or use make_train_step"
        )
    program = program_of(fn, args, target, mesh)
    promises, found = promises or Promises(), explained(program)
    keys = [axis for _, axes in promises.collectives or () for axis in _axes(axes)]
    named = [axis for key in keys for axis in key.rpartition(" of ")[2].split("+")]  # "2 of data+fsdp" too
    if unknown := {*named, *promises.copies} - {*program.mesh.axis_names}:
        raise ValueError(f"axis {sorted(unknown)[0]!r} is promised, the mesh has {', '.join(program.mesh.axis_names)}")
    if found.memory is None and (promises.memory is not None or promises.copies):
        raise ValueError("a text does not tell of memory and copies; give what was compiled, or the function")
    findings = [*_memory(promises, found), *_collectives(promises, found), *_copies(promises, found)]
    again = [site for site in found.sites if site.involuntary]
    if not promises.involuntary:
        sent = sum(site.sent for site in again)
        findings.append(_finding("involuntary", "full rematerialization", 0, sent, few(list(map(str, again)), _LINES)))
    return Proof(found.name, found.devices, tuple(findings), own=True)


def _axes(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes


def _finding(part: str, what: str, promised: float, found: int, note: str) -> Finding:
    kept = found <= promised
    return Finding(part, what, int(promised), found, "ok" if kept else "UNPROMISED", "" if kept else note)


def _memory(promises: Promises, found: JittedExplanation) -> Iterator[Finding]:
    if promises.memory is not None and found.memory is not None:
        parts = ", ".join(f"{name.replace('_', ' ')} {size(n)}" for name, n in vars(found.memory).items())
        yield _finding("memory", "a device", promises.memory, found.memory.total, parts)


def _collectives(promises: Promises, found: JittedExplanation) -> Iterator[Finding]:
    if promises.collectives is None:
        return
    sums = {(kind, _axes(axes)): 0 for kind, axes in promises.collectives}
    for one in found.ledger:
        sums[one.kind, one.axes] = sums.get((one.kind, one.axes), 0) + one.bytes
    promised = {(kind, _axes(axes)): limit for (kind, axes), limit in promises.collectives.items()}
    for (kind, axes), nbytes in sums.items():
        mine = [str(site) for site in found.sites if (site.kind, site.axes) == (kind, axes)]
        limit = promised.get((kind, axes), SCALARS - 1)
        yield _finding("collectives", f"{kind} {'+'.join(axes)}", limit, nbytes, "; ".join(mine[:_LINES]))


def _copies(promises: Promises, found: JittedExplanation) -> Iterator[Finding]:
    for axis, limit in promises.copies.items():
        same = [x for x in found.arguments or () if axis in x.copied]
        over = sorted((x for x in same if x.held > limit), key=lambda x: -x.held)
        total = max((x.held for x in same), default=0)
        note = f"{few([x.path for x in over])}, {size(sum(x.held for x in over))} in all, the same along {axis}"
        yield _finding("copies", f"along {axis}, the largest", limit, total, note)
