"""Which equation of a program makes the first NaN or infinity that reaches its results.

The program runs once more, an equation at a time (`program/evaluation.py`), and every value that is not finite has a
cause: the equation that made it of finite ones, or the input that held it. A loop is entered where its results are not
finite.

A mask's -inf is no fault: an infinity that stands in the program is followed without blame, until a NaN is made of it.
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
    """An input that is not finite: its name, what it holds ("nan", "inf", "-inf"), and where."""

    name: str
    value: str
    place: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} holds {self.value}{_at(self.place)}"


@dataclass(frozen=True)
class Operand:
    """What the equation read.

    Attributes:
      kind: dtype and shape.
      low, high: of its finite elements, of complex ones the absolute values; None where none is finite.
      facing: its element at the place of the result's first non-finite one, where the shapes are the same; else None.
      maker: the primitive that made it and that one's line, the input's name, or "written in the program".
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
    """The first equation at which a NaN or an infinity begins that reaches a result.

    Attributes:
      primitive: of JAX.
      line: of the user's program.
      scope: the name stack: modules, and functions under `jax.named_scope`.
      loops: the loops that it is in, outermost first: line, iteration (from 0), and how many there are (None: a while).
      result: dtype and shape; `value` is "nan", "inf" or "-inf", the first that is not finite, at `place`.
      operands: what it read.
      backward: whether it belongs to the transposed program.
      brought: the input that was not finite and of which it is the first reader; None where operands were finite.
      order: how many faults the search has met before it; most reach no result.
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
        made = f"{self.primitive} makes {self.value}" if self.brought is None else f"{self.brought}: {self.primitive}"
        lines = [f"{made} at {self.line or 'no line of the program'}{', backwards' * self.backward}"]
        if self.scope:
            lines.append(f"in {self.scope}")
        lines += [
            f"iteration {number}{f' of 0 to {length - 1}' if length else ''} of the loop at {line}"
            for line, number, length in self.loops
        ]
        lines.append(f"result {self.result}{_at(self.place, ', first')}")
        lines += [f"operand {number} {operand}" for number, operand in enumerate(self.operands, 1)]
        return "\n  ".join(lines)


STANDING = "standing"  # the cause of an infinity that is written in the program, as a mask is
Cause = Fault | Brought | str | None


@dataclass(frozen=True)
class Held:
    """A value of the program, the cause of what is not finite in it, and what made it: equations from the outermost
    in, or a name.
    """

    x: Any
    cause: Cause
    maker: tuple[Any, ...] | str


def trace_nonfinite(fun: Callable[..., Any], *args: Any) -> Fault | None:
    """The equation at which the first NaN or infinity begins that reaches a result of `fun(*args)`; None where all
    results are finite. Print it.

    For gradients give their function: `jp.trace_nonfinite(jax.grad(loss), params, batch)`. Calls, scans, whiles,
    branches, remats and functions with derivatives of their own are entered.

    Args:
      fun: a function that `jax.jit` takes.
      args: pytrees of arrays, whose leaves are named by their number and path: "0/layers/kernel".

    Takes the memory of `fun` run once, and compiles each of its operations by itself. Communicates nothing.

    >>> fault = trace_nonfinite(lambda x: jnp.log(x - 1).sum(), jnp.arange(1.0, 4.0))
    >>> fault.primitive, fault.value, fault.place, fault.operands[0].facing
    ('log', '-inf', (0,), 0.0)
    """
    return search(fun, [f"argument {name_of(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(args)], *args)


def search(fun: Callable[..., Any], names: Sequence[str], *args: Any) -> Fault | None:
    """See `trace_nonfinite`; `names` are those of the leaves of `args`."""
    cause = _foremost([v.cause for v in _Causes().of(fun, names, *jax.tree.map(jnp.asarray, args))])
    if cause is None or isinstance(cause, Fault):
        return cause
    brought = cause if isinstance(cause, Brought) else None  # what the program returns as it came, or as it is written
    return Fault("return", "", "", (), "a result", brought.value if brought else "inf", (), (), False, brought)


class _Causes(Evaluation):
    """Keeps of each value that is not finite its cause."""

    def __init__(self) -> None:
        super().__init__(lambda outs: not all(map(_finite, outs)))
        self._met = 0  # faults

    def given(self, x: Any, name: str) -> Held:
        if _finite(x):
            return Held(x, None, name)
        stands = name in (WRITTEN, CLOSED_OVER) and not _has_nan(x)
        return Held(x, STANDING if stands else Brought(name, *_first(x)), name)

    def made(self, x: Any, at: int | None, ins: Sequence[Held], within: Sequence[Held] = ()) -> Held:
        if at is None:
            return Held(x, None if _finite(x) else ins[0].cause, ins[0].maker)
        cause = None if _finite(x) else _foremost([v.cause for v in within]) or self._cause(ins, at, x)
        return Held(x, cause, (*self.sites[:-1], *makers(self.sites[-1], at)))

    def _cause(self, ins: Sequence[Held], at: int, out: jax.Array) -> Cause:
        """The cause of a result that is not finite, of an equation whose own programs tell none."""
        eqn, spoilt = self.sites[-1], [v for v in ins if v.cause is not None]
        if not spoilt:
            return self._fault(ins, out)
        worst = [v for v in spoilt if _has_nan(v.x)]
        cause = _foremost([v.cause for v in worst or spoilt])
        if not worst:  # infinities: a mask's -inf, say, must not hide an overflow beside it
            mended = bound(eqn, [_mended(v.x) if v.cause is not None else v.x for v in ins])[at]
            if not _finite(mended) and (cause == STANDING or not _mends(out, mended)):
                return self._fault(ins, out)
        known = primitives.of(eqn)
        if isinstance(cause, Brought) and not (known.moves or known.view):  # what only moves it has not read it yet
            return self._fault(ins, out, cause)
        if cause == STANDING and _has_nan(out):
            return self._fault(ins, out)
        return cause

    def _fault(self, ins: Sequence[Held], out: jax.Array, brought: Brought | None = None) -> Fault:
        value, place = _first(out)
        operands = []
        for v in ins:
            if isinstance(v.x, jax.Array | np.ndarray) and jnp.issubdtype(v.x.dtype, jnp.number):
                low, high = _range(v.x)
                facing = np.asarray(v.x[place]).item() if v.x.shape == out.shape else None
                operands.append(Operand(_kind(v.x), low, high, facing, _said(v.maker)))
        fault = Fault(
            self.sites[-1].primitive.name,
            line_of(self.sites),
            scope_of(self.sites),
            self.loops,
            _kind(out),
            value,
            place,
            tuple(operands),
            is_backward(self.sites),
            brought,
            self._met,
        )
        self._met += 1
        return fault


def _foremost(causes: Sequence[Cause]) -> Cause:
    """Of several causes the fault that came first, else an input, else what stands in the program."""
    rank = lambda cause: (0, cause.order) if isinstance(cause, Fault) else (1 if isinstance(cause, Brought) else 2, 0)
    return min((cause for cause in causes if cause is not None), key=rank, default=None)


def _said(maker: tuple[Any, ...] | str) -> str:
    if isinstance(maker, str):
        return maker
    return maker[-1].primitive.name + (f" at {line}" if (line := line_of(maker)) else "")


def _inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x) if not hasattr(x, "dtype") else x.dtype, jnp.inexact)


def _finite(x: Any) -> bool:
    return not _inexact(x) or bool(_all_finite(x))


def _has_nan(x: Any) -> bool:
    return _inexact(x) and bool(_any_nan(x))


_all_finite = jax.jit(lambda x: jnp.isfinite(x).all())
_any_nan = jax.jit(lambda x: jnp.isnan(x).any())
# 1 in place of what is not finite: the least surprising operand of any primitive.
_mended = jax.jit(lambda x: jnp.where(jnp.isfinite(x), x, jnp.ones_like(x)))
_mends = jax.jit(lambda out, mended: (jnp.isfinite(mended) & ~jnp.isfinite(out)).any())


def _first(x: jax.Array) -> tuple[str, tuple[int, ...]]:
    """The first element that is not finite, in words, and its place."""
    at = int(jnp.argmin(jnp.isfinite(x).ravel()))
    number = complex(jnp.ravel(x)[at].item())
    said = "nan" if np.isnan(number) else "-inf" if number.real == -np.inf else "inf"
    return said, tuple(map(int, np.unravel_index(at, jnp.shape(x))))


def _range(x: Any) -> tuple[float | None, float | None]:
    x = jnp.abs(x) if jnp.iscomplexobj(x) else jnp.asarray(x)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    fine = jnp.isfinite(x)
    if not fine.any():
        return None, None
    return float(x.min(initial=jnp.inf, where=fine)), float(x.max(initial=-jnp.inf, where=fine))


def _kind(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _at(place: Sequence[int], first: str = "") -> str:
    return f"{first} at {list(place)}" if place else ""
