"""Programs inside equations: which they are, a visit, a fold, and one fixpoint for values that are followed.

Scans, whiles, conds, calls and functions with derivatives of their own hold programs. Whoever only looks goes through
them by `visit`; whoever adds up what they cost by `fold`, which leaves to it what a branch or an iteration counts;
whoever follows a property of values, such as what depends on parameters, by `propagate`. The two ends of the supported
range of jax spell some parameters differently, and this is the only file that knows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax.extend.core as jec

CALLS = ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr")  # eval_jaxpr: what jax 0.12 makes of a remat
REMATS = ("remat2", "checkpoint", "remat")
CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")

V = TypeVar("V")


def is_literal(atom: Any) -> bool:
    """Whether an atom of a jaxpr is a literal, not a variable."""
    return isinstance(atom, jec.Literal)


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """The open jaxpr and the constants of a jaxpr parameter, closed or not (newer jax has one class for both)."""
    if hasattr(jaxpr, "consts"):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def programs(eqn: Any) -> list[Any]:
    """The open jaxprs that an equation holds, in the order of its parameters; of most equations none."""
    return [opened(jaxpr)[0] for jaxpr in jec.jaxprs_in_params(eqn.params)]


def called(eqn: Any) -> Any:
    """The one jaxpr, open or closed, of a call, a remat, a scan or a function with its own derivative; else None."""
    return next((eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params), None)


def makers(eqn: Any, at: int) -> tuple[Any, ...]:
    """An equation, and within the program that it calls the one that makes its result number `at`, down to the last."""
    inner = called(eqn)
    if inner is not None and len((jaxpr := opened(inner)[0]).outvars) == len(eqn.outvars):
        for other in jaxpr.eqns:
            if jaxpr.outvars[at] in other.outvars:
                return (eqn, *makers(other, other.outvars.index(jaxpr.outvars[at])))
    return (eqn,)


def visit(
    eqns: Iterable[Any], into: Callable[[Any], bool] = lambda eqn: True, times: int = 1
) -> Iterator[tuple[Any, int]]:
    """Each equation and how often it runs, then those of the programs that it holds, where `into` lets one go.

    A scan's run as often as its length says, a while loop's once: their number is known only when it runs.
    """
    for eqn in eqns:
        yield eqn, times
        if into(eqn):
            inside = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
            for jaxpr in programs(eqn):
                yield from visit(jaxpr.eqns, into, inside)


def fold(eqns: Sequence[Any], of: Callable[[Sequence[Any], list[list[V]]], V]) -> V:
    """What `of` makes of a program: of its equations, and of what it made of the programs that each of these holds."""
    return of(eqns, [[fold(jaxpr.eqns, of) for jaxpr in programs(eqn)] for eqn in eqns])


def with_programs(eqn: Any, of: Callable[[Any], Any], constant: Callable[[Any], Any] = lambda x: x) -> Any:
    """An equation with what `of` makes of each open jaxpr that it holds: branches, bodies, calls; and `constant` of
    each array that these close over.
    """

    def made(value: Any) -> Any:
        if type(value) is tuple:  # of branches, and no record
            return tuple(map(made, value))
        if not isinstance(value, jec.Jaxpr | jec.ClosedJaxpr):
            return value
        jaxpr, consts = opened(value)
        return jec.ClosedJaxpr(of(jaxpr), list(map(constant, consts))) if hasattr(value, "consts") else of(jaxpr)

    return eqn.replace(params={name: made(x) for name, x in eqn.params.items()})


def replaced(eqns: Iterable[Any], of: Callable[[Any], Any], constant: Callable[[Any], Any] = lambda x: x) -> list[Any]:
    """What `of` makes of each equation, and then of those of the programs that this holds; and what `constant` makes of
    each array that these close over.
    """
    inside = lambda jaxpr: jaxpr.replace(eqns=replaced(jaxpr.eqns, of, constant))
    return [with_programs(of(eqn), inside, constant) for eqn in eqns]


@dataclass(frozen=True)
class Scan:
    """A `scan` equation by its parts: body inputs are consts + carry + xs, outputs are carry + ys."""

    body: Any
    length: int
    reverse: bool
    consts: tuple[Any, ...]
    carry: tuple[Any, ...]
    xs: tuple[Any, ...]
    carry_out: tuple[Any, ...]
    ys: tuple[Any, ...]


def scan_parts(eqn: Any) -> Scan:
    """Read a `scan` equation, in either spelling of its parameters."""
    params = eqn.params
    if "num_consts" in params:
        n, k = params["num_consts"], params["num_carry"]
    else:
        n, k, _ = map(len, params["ft_in"].unpack())
    atoms, outs = tuple(eqn.invars), tuple(eqn.outvars)
    return Scan(
        params["jaxpr"],
        params["length"],
        params["reverse"],
        atoms[:n],
        atoms[n : n + k],
        atoms[n + k :],
        outs[:k],
        outs[k:],
    )


def settled(carry: Sequence[V], step: Callable[[list[V]], Sequence[V]], join: Callable[[V, V], V]) -> list[V]:
    """What a loop's carry is in every iteration: joined with what a `step` makes of it, until that changes nothing.

    `join` must be monotone in a domain of finite height, so that this ends.
    """
    known = list(carry)
    while (new := [join(a, b) for a, b in zip(known, step(known), strict=True)]) != known:
        known = new
    return known


def propagate(
    eqn: Any,
    ins: Sequence[V],
    run: Callable[[Any, list[V], V | None], list[V]],
    join: Callable[[V, V], V],
    other: V | None = None,
) -> list[V] | None:
    """A property of values, followed through the programs that an equation holds: of its results, from its operands'.

    Args:
      eqn: an equation.
      ins: the property of each operand.
      run: of the results of a program (open or closed) from that of its inputs; the last argument is the property of
        what decides whether it runs (a branch's number, a loop's condition), else None.
      join: of a value that may be either of two.
      other: of all inputs of programs whose inputs are not the operands; without it these are not run.

    Returns None for an equation that holds no program, or one whose inputs are not its operands. A scanned value has
    the property of its slices.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        parts, outs = scan_parts(eqn), []
        n, k = len(parts.consts), len(parts.carry)

        def step(carry: list[V]) -> list[V]:
            outs[:] = run(parts.body, [*ins[:n], *carry, *ins[n + k :]], None)
            return outs[:k]

        carry = settled(ins[n : n + k], step, join)
        return [*carry, *outs[k:]]
    if name == "while":
        n, k = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

        def iteration(carry: list[V]) -> list[V]:
            (goes_on,) = run(params["cond_jaxpr"], [*ins[:n], *carry], None)
            run(params["cond_jaxpr"], [*ins[:n], *carry], goes_on)
            return [join(x, goes_on) for x in run(params["body_jaxpr"], [*ins[n:k], *carry], goes_on)]

        return settled(ins[k:], iteration, join)
    if name == "cond":
        index, *operands = ins
        branches = [run(branch, operands, index) for branch in params["branches"]]
        outs = [index] * len(eqn.outvars)
        for branch in branches:
            outs = [join(a, b) for a, b in zip(outs, branch, strict=True)]
        return outs
    inner = called(eqn)
    if inner is None or len(opened(inner)[0].invars) != len(ins) or len(opened(inner)[0].outvars) != len(eqn.outvars):
        if other is not None:
            for program in programs(eqn):
                run(program, [other] * len(program.invars), None)
        return None
    return run(inner, list(ins), None)
