"""Search for the equation that makes the first NaN or infinity which reaches a program's results.

The program runs once more, one equation at a time (`program/evaluation.py`). Every value that is not finite gets a
cause: the equation that made it from finite operands, or the input that had it. A loop is entered only if its results
are not finite.

The -inf of a mask is no fault. An infinity that is written in the program is followed without blame until an equation
makes a NaN of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...model.paths import name_of
from ...program import primitives
from ...program.evaluation import CLOSED_OVER, WRITTEN, Evaluation, bound, is_backward, line_of, scope_of
from ...program.walk import makers


@dataclass(frozen=True)
class Brought:
    """A leaf of the inputs that is not finite.

    Attributes:
      name: the input's name.
      value: its first element that is not finite: "nan", "inf" or "-inf".
      place: the position of that element.
    """

    name: str
    value: str
    place: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} holds {self.value}{_place_text(self.place)}"


@dataclass(frozen=True)
class Operand:
    """An operand of the faulty equation.

    Attributes:
      kind: dtype and shape.
      low, high: the range of its finite elements; for complex ones, of their absolute values. None if none is finite.
      facing: its element at the position of the result's first non-finite one. None if the shapes differ.
      maker: the primitive that made it with its line, the input's name, or "written in the program".
    """

    kind: str
    low: float | None
    high: float | None
    facing: float | complex | None
    maker: str

    def __str__(self) -> str:
        numbers = "nothing finite" if self.low is None else f"{self.low:.4g} to {self.high:.4g}"
        facing = f", there {self.facing:.4g}" if self.facing is not None else ""
        return f"{self.kind}, {numbers}{facing}: {self.maker}"


@dataclass(frozen=True)
class Fault:
    """The first equation that makes a NaN or an infinity which reaches a result.

    Attributes:
      primitive: the JAX primitive.
      line: the line of the user's program.
      scope: the name stack: modules, and functions under `jax.named_scope`.
      loops: the loops around it, outermost first: (line, iteration from 0, number of iterations or None for a while
        loop).
      result: dtype and shape of its result.
      value: the first element of the result that is not finite: "nan", "inf" or "-inf".
      place: the position of that element.
      operands: the operands.
      backward: whether it belongs to the transposed program.
      brought: the input that was not finite, of which it is the first reader; None if all operands were finite.
      order: the number of faults that the search found before it. Most of them reach no result.
    """

    primitive: str
    line: str
    scope: str
    loops: tuple[tuple[str, int, int | None], ...]
    result: str
    value: str
    place: tuple[int, ...]
    operands: tuple[Operand, ...]
    backward: bool
    brought: Brought | None = None
    order: int = 0

    def __str__(self) -> str:
        headline = (
            f"{self.primitive} makes {self.value}" if self.brought is None else f"{self.brought}: {self.primitive}"
        )
        lines = [f"{headline} at {self.line or 'no line of the program'}{', backwards' * self.backward}"]
        if self.scope:
            lines.append(f"in {self.scope}")
        lines += [
            f"iteration {number}{f' of 0 to {length - 1}' if length else ''} of the loop at {line}"
            for line, number, length in self.loops
        ]
        lines.append(f"result {self.result}{_place_text(self.place, ', first')}")
        lines += [f"operand {number} {operand}" for number, operand in enumerate(self.operands, 1)]
        return "\n  ".join(lines)


MASK = "mask"  # the cause of an infinity that is written in the program, such as a mask's
Cause = Fault | Brought | str | None


@dataclass(frozen=True)
class TracedValue:
    """A value of the program during the search.

    Attributes:
      x: the array.
      cause: the cause of its elements that are not finite; None if all are finite.
      maker: the equations that made it, from the outermost to the innermost; or the name of an input.
    """

    x: Any
    cause: Cause
    maker: tuple[Any, ...] | str


def trace_nonfinite(fun: Callable[..., Any], *args: Any) -> Fault | None:
    """Find the equation that makes the first NaN or infinity which reaches a result of `fun(*args)`.

    For gradients, pass their function: `jp.trace_nonfinite(jax.grad(loss), params, batch)`. The search enters calls,
    scans, while loops, branches, remats and functions with custom derivatives.

    It takes the memory of one run of `fun`, and compiles each of its operations on its own. It communicates nothing.

    Args:
      fun: a function that `jax.jit` accepts.
      args: pytrees of arrays. Their leaves are named by number and path: "0/layers/kernel".

    Returns:
      The fault; print it. None if all results are finite.

    >>> fault = trace_nonfinite(lambda x: jnp.log(x - 1).sum(), jnp.arange(1.0, 4.0))
    >>> fault.primitive, fault.value, fault.place, fault.operands[0].facing
    ('log', '-inf', (0,), 0.0)
    """
    return search(fun, [f"argument {name_of(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(args)], *args)


def search(fun: Callable[..., Any], names: Sequence[str], *args: Any) -> Fault | None:
    """Find the fault of `fun(*args)` as `trace_nonfinite` does; `names` are the names of the leaves of `args`."""
    cause = _most_blamed([result.cause for result in _CauseTracker().of(fun, names, *jax.tree.map(jnp.asarray, args))])
    if cause is None or isinstance(cause, Fault):
        return cause
    # No equation is to blame: the program returns an input, or an infinity that is written in it.
    brought = cause if isinstance(cause, Brought) else None
    return Fault("return", "", "", (), "a result", brought.value if brought else "inf", (), (), False, brought)


class _CauseTracker(Evaluation):
    """An evaluation that keeps the cause of each value that is not finite."""

    def __init__(self) -> None:
        super().__init__(lambda results: not all(map(_is_finite, results)))
        self._num_faults = 0

    def given(self, x: Any, name: str) -> TracedValue:
        """Return the traced value of an input or a constant."""
        if _is_finite(x):
            return TracedValue(x, None, name)
        # Only the program's own infinities are masks; an argument's come from the user.
        is_mask = name in (WRITTEN, CLOSED_OVER) and not _has_nan(x)
        return TracedValue(x, MASK if is_mask else Brought(name, *_first_nonfinite(x)), name)

    def made(
        self, x: Any, at: int | None, ins: Sequence[TracedValue], within: Sequence[TracedValue] = ()
    ) -> TracedValue:
        """Return the traced value of result `at` of the current equation, which has operands `ins`.

        For a loop that was entered, `within` has what its iterations made of the result; see `Evaluation.made`.
        """
        if at is None:  # one iteration's slice of an operand
            return TracedValue(x, None if _is_finite(x) else ins[0].cause, ins[0].maker)
        cause = (
            None
            if _is_finite(x)
            else _most_blamed([value.cause for value in within]) or self._cause_of_result(ins, at, x)
        )
        return TracedValue(x, cause, (*self.sites[:-1], *makers(self.sites[-1], at)))

    def _cause_of_result(self, operands: Sequence[TracedValue], result_index: int, result: jax.Array) -> Cause:
        """Return the cause of a non-finite result of an equation, if the programs inside the equation have none."""
        eqn, nonfinite_operands = self.sites[-1], [operand for operand in operands if operand.cause is not None]
        if not nonfinite_operands:
            return self._new_fault(operands, result)
        nan_operands = [operand for operand in nonfinite_operands if _has_nan(operand.x)]
        cause = _most_blamed([operand.cause for operand in nan_operands or nonfinite_operands])
        # Replace infinities by 1 and compute again. If the result is still not finite, the equation itself makes an
        # infinity, which a mask's -inf must not hide.
        if not nan_operands:
            result_of_ones = bound(
                eqn, [_nonfinite_to_one(operand.x) if operand.cause is not None else operand.x for operand in operands]
            )[result_index]
            if not _is_finite(result_of_ones) and (cause == MASK or not _becomes_finite(result, result_of_ones)):
                return self._new_fault(operands, result)
        properties = primitives.of(eqn)
        # An equation that only moves an input does not read it yet.
        if isinstance(cause, Brought) and not (properties.moves or properties.view):
            return self._new_fault(operands, result, cause)
        # A mask turned into NaN, such as -inf minus -inf, is a fault.
        if cause == MASK and _has_nan(result):
            return self._new_fault(operands, result)
        return cause

    def _new_fault(self, inputs: Sequence[TracedValue], result: jax.Array, brought: Brought | None = None) -> Fault:
        """Return the fault of the current equation; `brought` is the program's input that it read, if not finite."""
        value, place = _first_nonfinite(result)
        operands = []
        for operand in inputs:
            if isinstance(operand.x, jax.Array | np.ndarray) and jnp.issubdtype(operand.x.dtype, jnp.number):
                # Other dtypes, such as keys, have no range.
                low, high = _finite_range(operand.x)
                # For an elementwise equation, the operand's element that gave the result's.
                facing = np.asarray(operand.x[place]).item() if operand.x.shape == result.shape else None
                operands.append(Operand(_dtype_and_shape(operand.x), low, high, facing, _maker_text(operand.maker)))
        fault = Fault(
            self.sites[-1].primitive.name,
            line_of(self.sites),
            scope_of(self.sites),
            self.loops,
            _dtype_and_shape(result),
            value,
            place,
            tuple(operands),
            is_backward(self.sites),
            brought,
            self._num_faults,
        )
        self._num_faults += 1
        return fault


def _most_blamed(causes: Sequence[Cause]) -> Cause:
    """Return the cause to blame: the fault found first, else an input, else a mask."""
    rank = lambda cause: (0, cause.order) if isinstance(cause, Fault) else (1 if isinstance(cause, Brought) else 2, 0)
    return min((cause for cause in causes if cause is not None), key=rank, default=None)


def _maker_text(maker: tuple[Any, ...] | str) -> str:
    """Return in words what made a value."""
    if isinstance(maker, str):
        return maker
    return maker[-1].primitive.name + (f" at {line}" if (line := line_of(maker)) else "")


def _is_inexact(x: Any) -> bool:
    """Return whether a value is floating-point or complex."""
    return jnp.issubdtype(jnp.result_type(x) if not hasattr(x, "dtype") else x.dtype, jnp.inexact)


def _is_finite(x: Any) -> bool:
    """Return whether all elements are finite."""
    return not _is_inexact(x) or bool(_all_finite(x))


def _has_nan(x: Any) -> bool:
    """Return whether some element is NaN."""
    return _is_inexact(x) and bool(_any_nan(x))


_all_finite = jax.jit(lambda x: jnp.isfinite(x).all())
_any_nan = jax.jit(lambda x: jnp.isnan(x).any())
# Elements that are not finite become 1, where nearly every primitive is finite.
_nonfinite_to_one = jax.jit(lambda x: jnp.where(jnp.isfinite(x), x, jnp.ones_like(x)))
_becomes_finite = jax.jit(lambda result, result_of_ones: (jnp.isfinite(result_of_ones) & ~jnp.isfinite(result)).any())


def _first_nonfinite(x: jax.Array) -> tuple[str, tuple[int, ...]]:
    """Return the first element that is not finite, in words, and its position."""
    flat_index = int(jnp.argmin(jnp.isfinite(x).ravel()))
    element = complex(jnp.ravel(x)[flat_index].item())
    value = "nan" if np.isnan(element) else "-inf" if element.real == -np.inf else "inf"
    return value, tuple(map(int, np.unravel_index(flat_index, jnp.shape(x))))


def _finite_range(x: Any) -> tuple[float | None, float | None]:
    """Return the smallest and largest finite element, or None for both; for complex arrays, of the absolute values."""
    x = jnp.abs(x) if jnp.iscomplexobj(x) else jnp.asarray(x)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    is_finite = jnp.isfinite(x)
    if not is_finite.any():
        return None, None
    return float(x.min(initial=jnp.inf, where=is_finite)), float(x.max(initial=-jnp.inf, where=is_finite))


def _dtype_and_shape(x: Any) -> str:
    """Return dtype and shape as text."""
    return f"{x.dtype}{list(x.shape)}"


def _place_text(place: Sequence[int], first: str = "") -> str:
    """Return the position as text; "" for a scalar."""
    return f"{first} at {list(place)}" if place else ""
