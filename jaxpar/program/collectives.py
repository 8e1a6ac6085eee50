"""The names of collectives: each kind as HLO and a ledger spell it, and the primitives of jaxprs that are of it.

Primitives are those of jax 0.10 to 0.12, where a name may end in _start, and with check_vma in _invariant or _reduced;
tensor_... are the edges of a tensor rank's program (`parallel/tensor/edges.py`). JAX keeps reductions over the axis of
a `vmap` as collectives over a dim by its number; `reduced` makes plain reductions of them.
"""

from typing import Any

import jax
import jax.extend.core as jec
from jax import lax

KINDS = {
    "all-reduce": (
        *("psum", "psum2", "psum_invariant", "unreduced_psum", "tensor_leave"),
        *("pmax", "pmin", "unreduced_pmax", "unreduced_pmin"),
    ),
    "all-gather": (
        *("all_gather", "all_gather_invariant", "all_gather_reduced"),
        *("tensor_gather", "tensor_all_gather_replicated"),
    ),
    "reduce-scatter": ("reduce_scatter", "unreduced_reduce_scatter", "tensor_scatter"),
    "all-to-all": ("all_to_all",),
    "ragged-all-to-all": ("ragged_all_to_all",),
    "collective-permute": ("ppermute",),
    "collective-broadcast": ("pbroadcast", "pbroadcast_dynamic"),
}
PRIMITIVES = {name: kind for kind, names in KINDS.items() for name in names}
_PLAIN = {"psum": lax.reduce_sum, "psum2": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}


def axes_of(eqn: Any) -> tuple[Any, ...]:
    """The axes that a collective runs over."""
    named = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    return (named,) if isinstance(named, str) else tuple(named)


def on_the_wire(kind: str, ranks: int) -> float:
    """The share of a collective's buffer that each of `ranks` devices sends, by the ring convention.

    The buffer is the whole one that a device takes part in: the output of an all-gather, the input of every other kind.
    A ring passes n - 1 of its n parts through every device, and for an all-reduce twice (Patarasuk and Yuan 2009).

    >>> on_the_wire("all-reduce", 8), on_the_wire("all-gather", 8), on_the_wire("collective-permute", 8)
    (1.75, 0.875, 1.0)
    """
    if kind.startswith("collective-"):  # a permute, and a broadcast, which NCCL pipelines: each passes all of it on
        return 1.0
    return (2 if kind == "all-reduce" else 1) * (ranks - 1) / ranks


def reduced(jaxpr: Any) -> Any:
    """A jaxpr, closed or not, with reductions over dims as plain ones; the same object if nothing changes."""
    if hasattr(jaxpr, "jaxpr") and jaxpr.jaxpr is not jaxpr:  # closed; newer jax has one class for both
        inner = reduced(jaxpr.jaxpr)
        return jaxpr if inner is jaxpr.jaxpr else jec.ClosedJaxpr(inner, jaxpr.consts)
    eqns = [new for eqn in jaxpr.eqns for new in _reduced(eqn)]
    same = len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def _reduced(eqn: Any) -> list[Any]:
    axes = eqn.params["axes"] if eqn.primitive.name in _PLAIN else ()
    dims = tuple(axis for axis in axes if isinstance(axis, int))
    if not dims:
        params = {name: _inside(value) for name, value in eqn.params.items()}
        changed = any(params[name] is not value for name, value in eqn.params.items())
        return [eqn.replace(params=params) if changed else eqn]
    names = tuple(axis for axis in axes if not isinstance(axis, int))
    outs = [jec.Var(v.aval) for v in eqn.outvars] if names else eqn.outvars
    eqns = []
    for x, out in zip(eqn.invars, outs, strict=True):
        abstract = jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype)
        plain = jax.make_jaxpr(lambda x: _PLAIN[eqn.primitive.name](x, dims))(abstract).eqns[-1]
        eqns.append(plain.replace(invars=[x], outvars=[out], source_info=eqn.source_info))
    return [*eqns, eqn.replace(invars=outs, params={**eqn.params, "axes": names})] if names else eqns


def _inside(value: Any) -> Any:
    if isinstance(value, jec.Jaxpr | jec.ClosedJaxpr):
        return reduced(value)
    if type(value) is tuple:  # of branches, and no record
        inner = tuple(map(_inside, value))
        return value if all(a is b for a, b in zip(inner, value, strict=True)) else inner
    return value
