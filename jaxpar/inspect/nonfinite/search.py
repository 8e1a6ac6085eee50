"""Which equation of a program makes the first NaN or infinity that reaches its results.

The program runs once more, an equation at a time, and every value that is not finite has a cause: the equation that
made it of finite ones, or the input that held it. Calls and branches are entered; a loop runs as a whole first, and is
entered where its results are not finite. What no result needs is dropped, so that it takes the memory of the program
itself.

A mask's -inf is no fault: an infinity that stands in the program is followed without blame, until a NaN is made of it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...model.paths import name_of
from ...program import jaxpr as jx
from ...program import primitives
from ...program.filter_primitives import without_filter_primitives
from ...program.walk import CALLS, CUSTOM, REMATS, called, is_literal, opened, scan_parts


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
      order: how many faults the search has met before it, most of which reach no result.
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


STANDING = "standing"  # the cause of an infinity that is written in the program
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
    args = jax.tree.map(jnp.asarray, args)
    flat, _ = jx.trace(without_filter_primitives(fun), *args)
    walk, program = _Walk(), jx.build(flat.eqns, (*flat.constvars, *flat.invars), flat.outvars)
    ins = [_entering(x, name) for x, name in zip(jax.tree.leaves(args), names, strict=True)]
    cause = _foremost([v.cause for v in walk.run(program, [*map(_closed_over, flat.consts), *ins])])
    if cause is None or isinstance(cause, Fault):
        return cause
    brought = cause if isinstance(cause, Brought) else None  # what the program returns as it came, or as it is written
    return Fault("return", "", "", (), "a result", brought.value if brought else "inf", (), (), False, brought)


class _Walk:
    """Runs programs an equation at a time, and keeps of each value that is not finite its cause."""

    def __init__(self) -> None:
        self._sites: list[Any] = []  # the equations whose programs are being run, outermost first
        self._loops: list[tuple[str, int, int | None]] = []
        self._met = 0  # faults

    def run(self, program: Any, ins: Sequence[Held]) -> list[Held]:
        """The results of a program, open or closed."""
        jaxpr, consts = opened(program)
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*map(_closed_over, consts), *ins), strict=True))
        last = {v: at for at, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not is_literal(v)}
        last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not is_literal(v)}
        read = lambda atom: _written(atom.val) if is_literal(atom) else env[atom]
        for at, eqn in enumerate(jaxpr.eqns):
            outs = self._results(eqn, list(map(read, eqn.invars)))
            env.update((v, x) for v, x in zip(eqn.outvars, outs, strict=True) if v in last)
            for v in {v for v in eqn.invars if not is_literal(v) and last[v] == at}:
                del env[v]
        return list(map(read, jaxpr.outvars))

    def _results(self, eqn: Any, ins: Sequence[Held]) -> list[Held]:
        name, inner = eqn.primitive.name, None
        if name in (*CALLS, *REMATS, *CUSTOM):
            inner = called(eqn)
        elif name == "cond":
            branches, (index, *ins) = eqn.params["branches"], ins
            inner = branches[int(np.clip(int(index.x), 0, len(branches) - 1))]
        if inner is not None:
            with self._at(eqn):
                return self.run(inner, ins)
        outs = self._bound(eqn, [v.x for v in ins])
        causes: list[Cause] = [None] * len(outs)
        if not all(map(_finite, outs)):
            loop = {"scan": self._scan, "while": self._while}.get(name)
            if loop is not None:
                with self._at(eqn):
                    causes = loop(eqn, ins)
            pairs = enumerate(zip(outs, causes, strict=True))
            causes = [None if _finite(x) else (within or self._cause(eqn, ins, at, x)) for at, (x, within) in pairs]
        makers = [(*self._sites, *_makers(eqn, at)) for at in range(len(outs))]
        return [Held(x, cause, maker) for x, cause, maker in zip(outs, causes, makers, strict=True)]

    @staticmethod
    def _bound(eqn: Any, values: Sequence[Any]) -> list[Any]:
        with eqn.ctx.manager:
            return jx.bind(eqn, values)

    # -- what holds a program ------------------------------------------------------------------------------------------

    def _scan(self, eqn: Any, ins: Sequence[Held]) -> list[Cause]:
        parts = scan_parts(eqn)
        n, k = len(parts.consts), len(parts.carry)
        carry, ys = list(ins[n : n + k]), [list[Cause]() for _ in parts.ys]
        whole = jax.jit(jec.jaxpr_as_fun(parts.body))
        numbers = range(parts.length)
        for number in reversed(numbers) if parts.reverse else numbers:
            xs = [_entering(lax.dynamic_index_in_dim(v.x, number, 0, False), v.maker, v.cause) for v in ins[n + k :]]
            outs = self._iteration(eqn, whole, parts.body, [*ins[:n], *carry, *xs], number, parts.length)
            carry = outs[:k]
            for causes, out in zip(ys, outs[k:], strict=True):
                causes.append(out.cause)
        return [*(v.cause for v in carry), *(_foremost(causes) for causes in ys)]

    def _while(self, eqn: Any, ins: Sequence[Held]) -> list[Cause]:
        n = eqn.params["cond_nconsts"]
        k = n + eqn.params["body_nconsts"]
        goes_on, whole = (jax.jit(jec.jaxpr_as_fun(eqn.params[name])) for name in ("cond_jaxpr", "body_jaxpr"))
        carry, number = list(ins[k:]), 0
        while bool(goes_on(*(v.x for v in (*ins[:n], *carry)))[0]):
            carry = self._iteration(eqn, whole, eqn.params["body_jaxpr"], [*ins[n:k], *carry], number, None)
            number += 1
        return [v.cause for v in carry]

    def _iteration(
        self, eqn: Any, whole: Any, body: Any, ins: list[Held], number: int, length: int | None
    ) -> list[Held]:
        """The results of an iteration, which is run an equation at a time where they are not finite."""
        outs = whole(*(v.x for v in ins))
        if all(map(_finite, outs)):
            return [Held(x, None, (*self._sites,)) for x in outs]
        self._loops.append((_line_of([*self._sites, eqn]), number, length))
        held = self.run(body, ins)
        self._loops.pop()
        return held

    @contextlib.contextmanager
    def _at(self, eqn: Any) -> Iterator[None]:
        self._sites.append(eqn)
        yield
        self._sites.pop()

    # -- who is at fault -----------------------------------------------------------------------------------------------

    def _cause(self, eqn: Any, ins: Sequence[Held], at: int, out: jax.Array) -> Cause:
        """The cause of a result that is not finite, of an equation whose own programs tell none."""
        spoilt = [v for v in ins if v.cause is not None]
        if not spoilt:
            return self._fault(eqn, ins, out)
        worst = [v for v in spoilt if _has_nan(v.x)]
        cause = _foremost([v.cause for v in worst or spoilt])
        if not worst:  # infinities: a mask's -inf, say, must not hide an overflow beside it
            mended = self._bound(eqn, [_mended(v.x) if v.cause is not None else v.x for v in ins])[at]
            if not _finite(mended) and (cause == STANDING or not _mends(out, mended)):
                return self._fault(eqn, ins, out)
        known = primitives.of(eqn)
        if isinstance(cause, Brought) and not (known.moves or known.view):  # what only moves it has not read it yet
            return self._fault(eqn, ins, out, cause)
        if cause == STANDING and _has_nan(out):
            return self._fault(eqn, ins, out)
        return cause

    def _fault(self, eqn: Any, ins: Sequence[Held], out: jax.Array, brought: Brought | None = None) -> Fault:
        value, place = _first(out)
        operands = []
        for v in ins:
            if isinstance(v.x, jax.Array | np.ndarray) and jnp.issubdtype(v.x.dtype, jnp.number):
                low, high = _range(v.x)
                facing = np.asarray(v.x[place]).item() if v.x.shape == out.shape else None
                operands.append(Operand(_kind(v.x), low, high, facing, _said(v.maker)))
        stacks = [str(site.source_info.name_stack) for site in (*self._sites, eqn)]
        scope = "/".join(part for stack in stacks if (part := _scope(stack)))
        fault = Fault(
            eqn.primitive.name,
            _line_of([*self._sites, eqn]),
            scope,
            tuple(self._loops),
            _kind(out),
            value,
            place,
            tuple(operands),
            any("transpose(" in stack for stack in stacks),
            brought,
            self._met,
        )
        self._met += 1
        return fault


def _foremost(causes: Sequence[Cause]) -> Cause:
    """Of several causes the fault that came first, else an input, else what stands in the program."""
    rank = lambda cause: (0, cause.order) if isinstance(cause, Fault) else (1 if isinstance(cause, Brought) else 2, 0)
    return min((cause for cause in causes if cause is not None), key=rank, default=None)


def _line_of(eqns: Sequence[Any]) -> str:
    """The user's line of the last of some equations, each in a program of the one before; of what a library wraps in
    `jit`, which knows none, that of the call.
    """
    return next((line for eqn in reversed(eqns) if (line := jx.user_line(eqn))), "")


def _said(maker: tuple[Any, ...] | str) -> str:
    if isinstance(maker, str):
        return maker
    return maker[-1].primitive.name + (f" at {line}" if (line := _line_of(maker)) else "")


def _makers(eqn: Any, at: int) -> tuple[Any, ...]:
    """An equation, and within the program that it holds the one that makes its result number `at`."""
    inner = called(eqn)
    if inner is not None and len((jaxpr := opened(inner)[0]).outvars) == len(eqn.outvars):
        for other in jaxpr.eqns:
            if jaxpr.outvars[at] in other.outvars:
                return (eqn, *_makers(other, other.outvars.index(jaxpr.outvars[at])))
    return (eqn,)


def _scope(stack: str) -> str:
    """A name stack without what JAX's transformations add: "transpose(jvp(mlp))/up" is "mlp/up"."""
    names = re.sub(r"\b(?:jvp|transpose|vmap)(?=\()|[()]|\brematted_computation\b|\bcheckpoint\b", "", stack)
    return "/".join(filter(None, names.split("/")))


def _written(x: Any) -> Held:
    return Held(x, None if _finite(x) else STANDING, "written in the program")


def _closed_over(x: Any) -> Held:
    held = _entering(x, "an array that the function closes over")
    # An infinity was written there, as a mask is.
    return replace(held, cause=STANDING) if held.cause and not _has_nan(x) else held


def _entering(x: Any, maker: Any, cause: Cause = None) -> Held:
    """An input under its name, or a part of a value that has a cause."""
    if _finite(x):
        return Held(x, None, maker)
    return Held(x, cause if cause is not None else Brought(maker, *_first(x)), maker)


# -- numbers -----------------------------------------------------------------------------------------------------------


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
    number = complex(np.asarray(x.ravel()[at]).item())
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
