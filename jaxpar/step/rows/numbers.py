"""Numbers that follow from sizes and literals alone, such as indices, masks and counts: computed only if a rule asks.

Each `Number` is a pair: the array in the program, and in the program's twin on twice the rows. The two together show
how a value depends on the number of rows in a block. A number holds either its pair, or the equation that makes it from
other numbers. The first use of `Number.pair` evaluates the equations that are needed.
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

MAX_ELEMENTS = 1 << 22  # larger arrays are neither computed nor searched
# If all elements of an operand are one number, so are the elements of these results. This also holds for a primitive
# that moves the elements of its only operand.
_KEEP_UNIFORM = {"reduce_max", "reduce_min", "reduce_and", "reduce_or", "dynamic_slice"}
_RANDOM = {*primitives.having("draws"), "rng_uniform"}


class Number:
    """An array in the program and in its twin, known or computed on demand by an equation from other numbers.

    Attributes:
      uniform: whether all elements are one number; the pair then holds scalars.
    """

    def __init__(
        self, pair: Any, eqns: Any = (None, None), operands: Sequence[Number] = (), output_index: int = 0
    ) -> None:
        """Store a known pair, or the equations that compute it.

        Args:
          pair: the arrays of the program and of its twin (None if unknown); None if equations compute the pair.
          eqns: the equation in the program and in its twin.
          operands: the operands of the equation.
          output_index: which result of the equation the number is.
        """
        self._pair, self._eqns, self._operands, self._output_index = pair, eqns, operands, output_index
        # A uniform number is computed as a scalar, however large its array is.
        by_element = pair is None and (primitives.of(eqns[0]).elementwise or eqns[0].primitive.name == "reduce_sum")
        self.uniform = np.ndim(pair[0]) == 0 if pair is not None else by_element and all(x.uniform for x in operands)

    @property
    def pair(self) -> tuple[Any, Any]:
        """The arrays in the program and in its twin; None for a side that cannot be computed."""
        # A stack rather than recursion: chains of equations may be longer than Python's limit.
        pending = [self]
        while pending:
            number = pending[-1]
            if missing := [x for x in number._operands if x._pair is None]:
                pending += missing
                continue
            if number._pair is None:
                number._pair = (number._compute(0), number._compute(1))
            pending.pop()
        return self._pair

    @property
    def key(self) -> Any:
        """A key that two numbers share only if they are known to be equal."""
        if not self.uniform or self._pair is None:
            return id(self)
        # Bytes are exact, and equal for NaN. The repr of an array is rounded, and takes ten times as long.
        arrays = [None if x is None else np.asarray(x) for x in self._pair]
        return tuple(x if x is None else (x.dtype, x.tobytes()) for x in arrays)

    @property
    def array(self) -> np.ndarray:
        """The array in the program."""
        return np.asarray(self.pair[0])

    def _compute(self, side: int) -> Any:
        """Evaluate the equation in the program (`side` 0) or its twin (1); return None if an operand is unknown."""
        eqn, values = self._eqns[side], [x._pair[side] for x in self._operands]
        if eqn is None or len(eqn.invars) != len(values) or any(x is None for x in values):
            return None
        if self.uniform and eqn.primitive.name == "reduce_sum":
            shape = eqn.invars[0].aval.shape
            return values[0] * math.prod(shape[d] for d in eqn.params["axes"])
        # A uniform result is computed from scalars; otherwise scalars stand for full arrays.
        avals = [v.aval for v in eqn.invars]
        shapes = [() if self.uniform else a.shape for a in avals]
        values = [np.broadcast_to(x, s).astype(a.dtype) for x, s, a in zip(values, shapes, avals, strict=True)]
        if (numpy_fun := BY_NUMPY.get(eqn.primitive.name)) is not None:
            with np.errstate(all="ignore"):
                return np.asarray(numpy_fun(eqn, *values)).astype(eqn.outvars[0].aval.dtype)
        # The loss is being traced: without this, jax would add the equation to that trace.
        with jax.ensure_compile_time_eval():
            return np.asarray(jx.bind(eqn, values)[self._output_index])


def _pad(eqn: Any, x: np.ndarray, fill: np.ndarray) -> np.ndarray:
    """Pad like `lax.pad`: with space between elements, and negative padding that cuts elements off."""
    padded = np.full(eqn.outvars[0].aval.shape, fill)
    # Element i goes to position low + i (interior + 1). Negative padding puts some outside of the array.
    targets = [
        low + np.arange(n) * (1 + interior)
        for n, (low, _, interior) in zip(x.shape, eqn.params["padding_config"], strict=True)
    ]
    masks = [(target >= 0) & (target < n) for target, n in zip(targets, padded.shape, strict=True)]
    padded[np.ix_(*(target[mask] for target, mask in zip(targets, masks, strict=True)))] = x[np.ix_(*masks)]
    return padded


def _broadcast(eqn: Any, x: np.ndarray, *_: Any) -> np.ndarray:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    return np.broadcast_to(x.reshape([x.shape[dims.index(d)] if d in dims else 1 for d in range(len(shape))]), shape)


def _slice(eqn: Any, x: np.ndarray) -> np.ndarray:
    params = eqn.params
    strides = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


# JAX compiles a program for every equation and shape that runs outside of jit, which takes 0.1 s; a
# `lax.associative_scan` has hundreds. NumPy gives the same numbers if an equation moves or compares elements, or rounds
# once.
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
    "pad": _pad,
    "reshape": lambda eqn, x: x.reshape(eqn.outvars[0].aval.shape),
    "rev": lambda eqn, x: np.flip(x, eqn.params["dimensions"]),
    "select_n": lambda eqn, case, *cases: np.choose(case, cases),
    "slice": _slice,
    "squeeze": lambda eqn, x: np.squeeze(x, eqn.params["dimensions"]),
    "stack": lambda eqn, *xs: np.stack(xs, eqn.params["axis"]),
    "sub": lambda eqn, x, y: x - y,
    "transpose": lambda eqn, x: x.transpose(eqn.params["permutation"]),
}


def constant_number(x: Any, twin: Any) -> Number | None:
    """Return the number of a constant in the program, whose value in the twin (or None) is `twin`.

    Returns None if the constant is large, or no number at all.
    """
    if not hasattr(x, "dtype") and not isinstance(x, bool | int | float):
        return None
    if math.prod(np.shape(x)) > MAX_ELEMENTS or not any(
        jnp.issubdtype(jnp.result_type(x), t) for t in (bool, jnp.number)
    ):
        return None
    pair = [None if a is None else np.asarray(a) for a in (x, twin)]
    # If all elements are equal, or all are NaN, one of them stands for the array.
    if all(a is None or (a.size and ((a == a.flat[0]).all() or (a != a).all())) for a in pair):
        pair = [None if a is None else a.flat[0] for a in pair]
    return Number(tuple(pair))


def computed_numbers(eqn: Any, twin: Any, operands: Sequence[Number | None]) -> list[Number | None]:
    """Return the numbers of an equation's results; None if an operand is unknown, or an array is too large."""
    known_operands = [x for x in operands if x is not None]
    name = eqn.primitive.name
    if len(known_operands) < len(operands) or eqn.effects or name in _RANDOM or (not operands and name != "iota"):
        return [None] * len(eqn.outvars)
    # The elements stay the same number, though their shape changes.
    if (
        known_operands
        and known_operands[0].uniform
        and (name in _KEEP_UNIFORM or (len(known_operands) == 1 and primitives.of(eqn).moves))
    ):
        return [known_operands[0]] * len(eqn.outvars)
    numbers = [Number(None, (eqn, twin), known_operands, i) for i in range(len(eqn.outvars))]
    sizes = [math.prod(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars)]
    return [x if x.uniform or max(sizes) <= MAX_ELEMENTS else None for x in numbers]
