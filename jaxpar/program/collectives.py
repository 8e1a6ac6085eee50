"""The names of collectives: the kinds, as HLO and a ledger spell them, and the primitives of jaxprs of each kind.

The primitives are those of jax 0.10 to 0.12. A name may end in _start, and with check_vma in _invariant or _reduced;
tensor_... are the edges of a tensor rank's program (`parallel/tensor/edges.py`).

JAX keeps a reduction over the axis of a `vmap` as a collective over the number of a dim, which sends nothing. `reduced`
turns it into a plain reduction:

    psum[axes=("data", 0)] x   -->   y = reduce_sum[axes=(0,)] x    psum[axes=("data",)] y
"""

import operator
from typing import Any

import jax
import jax.extend.core as jec
from jax import lax

from .walk import with_programs

# Each kind, and its primitives.
KINDS = {
    "all-reduce": (
        *("psum", "psum2", "psum_invariant", "unreduced_psum", "tensor_leave"),
        *("pmax", "pmin", "unreduced_pmax", "unreduced_pmin"),
    ),
    "all-gather": (
        *("all_gather", "all_gather_invariant", "all_gather_reduced"),
        *("tensor_all_gather", "tensor_all_gather_replicated"),
    ),
    "reduce-scatter": ("reduce_scatter", "unreduced_reduce_scatter", "tensor_reduce_scatter"),
    "all-to-all": ("all_to_all", "tensor_exchange"),
    "ragged-all-to-all": ("ragged_all_to_all",),
    "collective-permute": ("ppermute",),
    "collective-broadcast": ("pbroadcast", "pbroadcast_dynamic"),
}
PRIMITIVES = {name: kind for kind, names in KINDS.items() for name in names}
# The function that reduces over dims, for each primitive that may name dims.
_PLAIN_REDUCTIONS = {"psum": lax.reduce_sum, "psum2": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}


def axes_of(eqn: Any) -> tuple[Any, ...]:
    """Return the axes that a collective runs over."""
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    return (axes,) if isinstance(axes, str) else tuple(axes)


def on_the_wire(kind: str, ranks: int) -> float:
    """Return the share of a collective's buffer that each device sends, by the ring convention.

    The buffer is the full one that a device takes part in: the output of an all-gather, the input of all other kinds.
    A ring passes n - 1 of its n parts through every device, and for an all-reduce twice (Patarasuk and Yuan 2009).

    Args:
      kind: a key of `KINDS`.
      ranks: number of devices, n.

    >>> on_the_wire("all-reduce", 8), on_the_wire("all-gather", 8), on_the_wire("collective-permute", 8)
    (1.75, 0.875, 1.0)
    """
    if kind.startswith("collective-"):
        # Each device of a permute sends its buffer. NCCL pipelines a broadcast: each device passes the buffer on.
        return 1.0
    return (2 if kind == "all-reduce" else 1) * (ranks - 1) / ranks


def reduced(jaxpr: Any) -> Any:
    """Return an open jaxpr with plain reductions over dims; the same object if nothing changes."""
    eqns = [new_eqn for eqn in jaxpr.eqns for new_eqn in _reduced_eqn(eqn)]
    is_same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
    return jaxpr if is_same else jaxpr.replace(eqns=eqns)


def _reduced_eqn(eqn: Any) -> list[Any]:
    """Return the equations that replace one equation: plain reductions over dims, then a collective over axes."""
    axes = eqn.params["axes"] if eqn.primitive.name in _PLAIN_REDUCTIONS else ()
    dims = tuple(axis for axis in axes if isinstance(axis, int))
    if not dims:
        return [with_programs(eqn, reduced)]
    names = tuple(axis for axis in axes if not isinstance(axis, int))
    # The variables between the reduction over dims and the collective; without a collective, the results themselves.
    outs = [jec.Var(v.aval) for v in eqn.outvars] if names else eqn.outvars
    eqns = []
    # A collective may have several operands, a plain reduction has one.
    for x, out in zip(eqn.invars, outs, strict=True):
        abstract = jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype)
        plain = jax.make_jaxpr(lambda x: _PLAIN_REDUCTIONS[eqn.primitive.name](x, dims))(abstract).eqns[-1]
        eqns.append(plain.replace(invars=[x], outvars=[out], source_info=eqn.source_info))
    # Reduce over the mesh axes afterwards: fewer bytes are sent.
    return [*eqns, eqn.replace(invars=outs, params={**eqn.params, "axes": names})] if names else eqns
