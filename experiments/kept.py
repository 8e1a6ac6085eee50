"""What the layers of a step keep between their forward and their backward, array by array, from the traced step."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.program import jaxpr as jx
from jaxpar.step.core import Step


@dataclass(frozen=True)
class Kept:
    """An array that the forward of one layer keeps on one device.

    Attributes:
      type: dtype and shape.
      bytes: its size.
      source: the operation that computes it, and the line that this is on.
    """

    type: str
    bytes: int
    source: str


def kept(step: Step, batch: Any, layers: int) -> list[Kept]:
    """Return the arrays that the first loop of so many iterations, the layers' forwards, keeps for the backwards.

    Each iteration writes them into buffers [layers, ...] that the loop carries (`jaxpar.program.buffers.scan`).
    Constants are left out, such as the zeros that a derivative of `where` wants: XLA takes them out of loops.
    """
    loops = (jx.scan_parts(eqn) for eqn in _scans(step.trace(batch).jaxpr))
    forward = next(loop for loop in loops if loop.length == layers)
    body, _ = jx.opened(forward.body)
    found = []
    for out in body.outvars:
        write = next((eqn for eqn in body.eqns if out in eqn.outvars), None)
        if write is None or write.params.get("name") != "dynamic_update_index_in_dim":
            continue
        var = write.invars[1]  # (buffer, the layer's array, index)
        eqn = _computes(body, var)
        if eqn is None or not all(jx.is_literal(v) for v in eqn.invars):
            source = "an input" if eqn is None else f"{eqn.primitive.name} at {jx.where(eqn)}"
            found.append(Kept(var.aval.str_short(), var.aval.size * var.aval.dtype.itemsize, source))
    return found


def _scans(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from _scans(jx.opened(inner)[0])


def _computes(jaxpr: Any, var: Any) -> Any:
    """The equation that a variable comes from, inside of calls; None if it is an input."""
    eqn = next((eqn for eqn in jaxpr.eqns if var in eqn.outvars), None)
    inner = None if eqn is None else eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if eqn is None or inner is None or eqn.primitive.name == "scan":
        return eqn
    body, _ = jx.opened(inner)
    out = body.outvars[eqn.outvars.index(var)]
    return _computes(jaxpr, eqn.invars[body.invars.index(out)]) if out in body.invars else _computes(body, out)
