"""Values that follow from sizes and literals alone, such as indices, masks and counts: computed where a rule asks.

Each is a pair, of the program and of its twin on twice the rows: from the two it shows how a value depends on how many
rows a block has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...program import jaxpr as jx
from ...program import primitives

LARGEST = 1 << 22  # elements of what is computed, or looked through
_SAME = {"reduce_max", "reduce_min", "reduce_and", "reduce_or", "dynamic_slice"}  # and what moves its one operand
_NEVER = {*primitives.having("draws"), "rng_uniform"}


class Number:
    """An array, or the one number that all its elements are (`uniform`): a pair, or what equations make of others."""

    def __init__(self, pair: Any, eqns: Any = (None, None), of: Sequence[Number] = (), out: int = 0) -> None:
        self._pair, self._eqns, self._of, self._out = pair, eqns, of, out
        by_element = pair is None and (primitives.of(eqns[0]).elementwise or eqns[0].primitive.name == "reduce_sum")
        self.uniform = np.ndim(pair[0]) == 0 if pair is not None else by_element and all(x.uniform for x in of)

    @property
    def pair(self) -> tuple[Any, Any]:
        """In the program, and in its twin, or None. What it follows from comes first, and not by a call within a call:
        programs are long.
        """
        waiting = [self]
        while waiting:
            one = waiting[-1]
            if missing := [x for x in one._of if x._pair is None]:
                waiting += missing
                continue
            if one._pair is None:
                one._pair = (one._computed(0), one._computed(1))
            waiting.pop()
        return self._pair

    @property
    def key(self) -> Any:
        """What two numbers have in common that are known to be the same."""
        return repr(self._pair) if self.uniform and self._pair is not None else id(self)

    @property
    def array(self) -> np.ndarray:
        """In the program."""
        return np.asarray(self.pair[0])

    def _computed(self, side: int) -> Any:
        eqn, values = self._eqns[side], [x._pair[side] for x in self._of]
        if eqn is None or len(eqn.invars) != len(values) or any(x is None for x in values):
            return None
        if self.uniform and eqn.primitive.name == "reduce_sum":
            shape = eqn.invars[0].aval.shape
            return values[0] * math.prod(shape[d] for d in eqn.params["axes"])
        avals = [v.aval for v in eqn.invars]
        shapes = [() if self.uniform else a.shape for a in avals]
        values = [np.broadcast_to(x, s).astype(a.dtype) for x, s, a in zip(values, shapes, avals, strict=True)]
        if (fun := BY_NUMPY.get(eqn.primitive.name)) is not None:
            with np.errstate(all="ignore"):
                return np.asarray(fun(eqn, *values)).astype(eqn.outvars[0].aval.dtype)
        with jax.ensure_compile_time_eval():
            return np.asarray(jx.bind(eqn, values)[self._out])


def _padded(eqn: Any, x: np.ndarray, value: np.ndarray) -> np.ndarray:
    out = np.full(eqn.outvars[0].aval.shape, value)
    places = [
        low + np.arange(n) * (1 + inner)
        for n, (low, _, inner) in zip(x.shape, eqn.params["padding_config"], strict=True)
    ]
    inside = [(at >= 0) & (at < n) for at, n in zip(places, out.shape, strict=True)]
    out[np.ix_(*(at[there] for at, there in zip(places, inside, strict=True)))] = x[np.ix_(*inside)]
    return out


def _broadcast(eqn: Any, x: np.ndarray, *_: Any) -> np.ndarray:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    return np.broadcast_to(x.reshape([x.shape[dims.index(d)] if d in dims else 1 for d in range(len(shape))]), shape)


def _sliced(eqn: Any, x: np.ndarray) -> np.ndarray:
    params = eqn.params
    strides = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


# JAX compiles a program for every equation and shape that it runs by itself, in 0.1 s: `lax.associative_scan` has
# hundreds. NumPy gives the same numbers for what moves elements, compares them, or rounds once.
BY_NUMPY: dict[str, Callable[..., Any]] = {
    "add": lambda eqn, x, y: x + y,
    "and": lambda eqn, x, y: x & y,
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda eqn, *xs: np.concatenate(xs, eqn.params["dimension"]),
    "eq": lambda eqn, x, y: x == y,
    "ge": lambda eqn, x, y: x >= y,
    "gt": lambda eqn, x, y: x > y,
    "le": lambda eqn, x, y: x <= y,
    "lt": lambda eqn, x, y: x < y,
    "max": lambda eqn, x, y: np.maximum(x, y),
    "min": lambda eqn, x, y: np.minimum(x, y),
    "mul": lambda eqn, x, y: x * y,
    "ne": lambda eqn, x, y: x != y,
    "not": lambda eqn, x: ~x,
    "or": lambda eqn, x, y: x | y,
    "pad": _padded,
    "reshape": lambda eqn, x: x.reshape(eqn.outvars[0].aval.shape),
    "rev": lambda eqn, x: np.flip(x, eqn.params["dimensions"]),
    "select_n": lambda eqn, which, *cases: np.choose(which, cases),
    "slice": _sliced,
    "squeeze": lambda eqn, x: np.squeeze(x, eqn.params["dimensions"]),
    "stack": lambda eqn, *xs: np.stack(xs, eqn.params["axis"]),
    "sub": lambda eqn, x, y: x - y,
    "transpose": lambda eqn, x: x.transpose(eqn.params["permutation"]),
}


def constant(x: Any, twin: Any) -> Number | None:
    """That of a constant of the program; None of what is large, or no number."""
    if not hasattr(x, "dtype") and not isinstance(x, bool | int | float):
        return None
    if math.prod(np.shape(x)) > LARGEST or not any(jnp.issubdtype(jnp.result_type(x), t) for t in (bool, jnp.number)):
        return None
    pair = [None if a is None else np.asarray(a) for a in (x, twin)]
    if all(a is None or (a.size and ((a == a.flat[0]).all() or (a != a).all())) for a in pair):  # the same, or all NaN
        pair = [None if a is None else a.flat[0] for a in pair]
    return Number(tuple(pair))


def computed(eqn: Any, twin: Any, of: Sequence[Number | None]) -> list[Number | None]:
    """Those of an equation's results; None where one of its operands has none, or it is large."""
    known = [x for x in of if x is not None]
    name = eqn.primitive.name
    if len(known) < len(of) or eqn.effects or name in _NEVER or (not of and name != "iota"):
        return [None] * len(eqn.outvars)
    if known and known[0].uniform and (name in _SAME or (len(known) == 1 and primitives.of(eqn).moves)):
        return [known[0]] * len(eqn.outvars)
    found = [Number(None, (eqn, twin), known, i) for i in range(len(eqn.outvars))]
    sizes = [math.prod(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars)]
    return [x if x.uniform or max(sizes) <= LARGEST else None for x in found]
