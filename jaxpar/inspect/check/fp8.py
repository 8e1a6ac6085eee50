"""Whether the products that are promised in FP8 are kernels that multiply float8."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from ...localise.fp8.product import F8, SCOPE
from ...program import jaxpr as jx
from ...program.walk import visit
from ...step.core import Step
from ...text import few
from ..compiled.cost import Costs
from ..compiled.kernels import Executable
from .proof import Finding

_F8 = jnp.dtype(F8).name
# Of the forward, which a backward recomputes, and dx: in a loop of one layer the compiler computes the first once.
_SHARED = 2 / 3


def products(step: Step, jaxpr: Any, program: Executable) -> Iterator[Finding]:
    """FLOPs of FP8 products in the jaxpr and in the compiled program, each product once in whatever loop it stands."""
    if step.strategy.precision != "fp8":
        return
    what = f"{len(step.tracing.in_fp8)} leaves in {_F8}"
    dots = (eqn for eqn, _ in visit(jx.opened(jaxpr)[0].eqns) if eqn.primitive.name == "dot_general")
    promised = sum(2 * jx.matmuls([eqn]).get(_F8, (0, ""))[0] for eqn in dots)
    if step.mesh.devices.flat[0].platform == "cpu":
        note = "CPU: no kernel multiplies float8; the same numbers are multiplied as wider ones"
        yield Finding("products", what, promised, promised, note=note, unit="FLOP")
        return
    found = 0
    for kernel in (cost.kernel for cost in Costs.of(program)):
        for product in kernel.products:
            if product.dtype == _F8:
                found += product.flops
            elif SCOPE in kernel.source:
                path = kernel.source.partition(SCOPE)[2].partition(")")[0]
                note = f"{kernel.label} multiplies {product.dtype}, of {path}: no FP8 kernel for this device; use "
                note += "precision='bf16'"
                yield Finding("products", kernel.name, product.flops, 0, "MISSING", note, unit="FLOP")
    least = 0.99 * promised * (1 if step.strategy.remat == "none" else _SHARED)
    note = f"less than promised of {few(step.tracing.in_fp8)}: compare compiled.as_text() with step.trace(batch)"
    verdict, note = ("MISSING", note) if found < least else ("ok", "")
    yield Finding("products", what, promised, found, verdict, note, unit="FLOP")
