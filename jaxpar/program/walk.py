"""Programs inside equations: find them, visit them, fold over them, and follow properties of values through them.

Scans, whiles, conds, calls and functions with custom derivatives hold programs. A reader goes through them in one of
three ways:

    visit       yields every equation, to look at it
    fold        combines the costs of programs; the reader decides how a branch or an iteration counts
    propagate   follows a property of values, such as "depends on parameters"; loops run to a fixpoint

The two ends of the supported range of jax spell some parameters differently. Only this file knows.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax.extend.core as jec

CALLS = ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr")  # jax 0.12 turns a remat into an eval_jaxpr
REMATS = ("remat2", "checkpoint", "remat")
CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")

_JAXPRS = (jec.Jaxpr, jec.ClosedJaxpr)

V = TypeVar("V")


def is_literal(atom: Any) -> bool:
    """Return whether an atom of a jaxpr is a literal, not a variable."""
    return isinstance(atom, jec.Literal)


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Return the open jaxpr and the constants of a jaxpr, closed or not."""
    # Newer jax has one class for both.
    if hasattr(jaxpr, "consts"):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def programs(eqn: Any) -> list[Any]:
    """Return the open jaxprs that an equation holds, in the order of its parameters; most equations hold none."""
    return [opened(jaxpr)[0] for jaxpr in jec.jaxprs_in_params(eqn.params)]


def called(eqn: Any) -> Any:
    """Return the one jaxpr, open or closed, of a call, remat, scan or function with a custom derivative; else None."""
    return next((eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in eqn.params), None)


def makers(eqn: Any, result_index: int) -> tuple[Any, ...]:
    """Return an equation, and those that compute its result in the programs that it calls, outermost first.

    Args:
      result_index: the number of the result.
    """
    inner = called(eqn)
    # A program with other results than the equation cannot be matched by numbers.
    if inner is not None and len((jaxpr := opened(inner)[0]).outvars) == len(eqn.outvars):
        for inner_eqn in jaxpr.eqns:
            if jaxpr.outvars[result_index] in inner_eqn.outvars:
                return (eqn, *makers(inner_eqn, inner_eqn.outvars.index(jaxpr.outvars[result_index])))
    return (eqn,)


def visit(
    eqns: Iterable[Any], into: Callable[[Any], bool] = lambda eqn: True, times: int = 1
) -> Iterator[tuple[Any, int]]:
    """Yield every equation, and how often it runs, with the equations of the programs that it holds.

    The body of a scan counts as often as its length says; the body of a while loop once, since its number of iterations
    is unknown before it runs.

    Args:
      into: returns whether the programs of an equation are visited.
      times: how often these equations run.
    """
    for eqn in eqns:
        yield eqn, times
        if into(eqn):
            inner_times = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
            for jaxpr in programs(eqn):
                yield from visit(jaxpr.eqns, into, inner_times)


def fold(eqns: Sequence[Any], combine: Callable[[Sequence[Any], list[list[V]]], V]) -> V:
    """Return what `combine` computes of a program, from its equations and the values of the programs inside them.

    Args:
      combine: `combine(eqns, values)` returns the value of a program; `values` has, for each equation, the values of
        the programs that it holds.
    """
    return combine(eqns, [[fold(jaxpr.eqns, combine) for jaxpr in programs(eqn)] for eqn in eqns])


def with_programs(eqn: Any, transform: Callable[[Any], Any], constant: Callable[[Any], Any] = lambda x: x) -> Any:
    """Return an equation with other programs inside: branches, bodies and calls; itself if none of them changes.

    Args:
      transform: returns the program that replaces an open jaxpr.
      constant: returns the value that replaces an array that a jaxpr closes over.
    """

    def transformed(value: Any) -> Any:
        if type(value) is tuple:  # the branches of a cond; a named tuple is no list of programs
            items = tuple(map(transformed, value))
            return value if all(map(operator.is_, items, value)) else items
        if not isinstance(value, _JAXPRS):
            return value
        jaxpr, consts = opened(value)
        new_jaxpr, new_consts = transform(jaxpr), list(map(constant, consts))
        if new_jaxpr is jaxpr and all(map(operator.is_, new_consts, consts)):
            return value
        # An open jaxpr stays open, as its equation expects.
        return jec.ClosedJaxpr(new_jaxpr, new_consts) if hasattr(value, "consts") else new_jaxpr

    params = {name: transformed(x) for name, x in eqn.params.items()}
    return eqn if all(params[name] is x for name, x in eqn.params.items()) else eqn.replace(params=params)


def replaced(
    eqns: Iterable[Any], replacement: Callable[[Any], Any], constant: Callable[[Any], Any] = lambda x: x
) -> list[Any]:
    """Return other equations instead of some, and instead of those in the programs inside them.

    Args:
      replacement: returns the equation that replaces an equation. The programs that it holds are replaced in turn.
      constant: returns the value that replaces an array that a jaxpr closes over.
    """
    transform = lambda jaxpr: jaxpr.replace(eqns=replaced(jaxpr.eqns, replacement, constant))
    return [with_programs(replacement(eqn), transform, constant) for eqn in eqns]


@dataclass(frozen=True)
class Scan:
    """The parts of a `scan` equation.

    Attributes:
      body: the program of an iteration: (consts, carry, slices of xs) -> (carry, slices of ys).
      length: the number of iterations.
      reverse: whether it begins with the last slice.
      consts: the operands that all iterations read.
      carry: the operands that start the carry.
      xs: the operands that iterations read slice by slice.
      carry_out: the results that are the last carry.
      ys: the results that iterations write slice by slice.
    """

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
        # Newer jax stores the three groups of operands instead of their numbers.
        n, k, _ = map(len, params["ft_in"].unpack())
    atoms, outs = tuple(eqn.invars), tuple(eqn.outvars)
    operands = atoms[:n], atoms[n : n + k], atoms[n + k :]
    return Scan(params["jaxpr"], params["length"], params["reverse"], *operands, outs[:k], outs[k:])


def settled(carry: Sequence[V], step: Callable[[list[V]], Sequence[V]], join: Callable[[V, V], V]) -> list[V]:
    """Return a property of a loop's carry that holds in every iteration, by iteration to a fixpoint.

    Args:
      carry: the property of the carry at the start.
      step: returns the property after an iteration, from the property before it.
      join: returns the property of a value that may be either of two. It must be monotone in a domain of finite height,
        so that this ends.
    """
    current = list(carry)
    while (joined := [join(a, b) for a, b in zip(current, step(current), strict=True)]) != current:
        current = joined
    return current


def propagate(
    eqn: Any,
    ins: Sequence[V],
    run: Callable[[Any, list[V], V | None], list[V]],
    join: Callable[[V, V], V],
    default: V | None = None,
) -> list[V] | None:
    """Follow a property of values through the programs that an equation holds.

    A scanned array has the property of its slices.

    Args:
      ins: the property of each operand.
      run: `run(program, ins, decides)` returns the property of each result of a program, open or closed. `decides` is
        the property of the value that decides whether the program runs (a branch's number, a loop's condition), or
        None.
      join: returns the property of a value that may be either of two.
      default: the property of all inputs of programs whose inputs are not the operands. Without it these are not run.

    Returns:
      The property of each result; None if the equation holds no program, or one whose inputs are not its operands.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        parts, outs = scan_parts(eqn), []
        n, k = len(parts.consts), len(parts.carry)

        def step(carry: list[V]) -> list[V]:
            # The last call sees the settled carry: the results that stay in `outs` hold for every iteration.
            outs[:] = run(parts.body, [*ins[:n], *carry, *ins[n + k :]], None)
            return outs[:k]

        carry = settled(ins[n : n + k], step, join)
        return [*carry, *outs[k:]]
    if name == "while":
        n, k = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

        def iteration(carry: list[V]) -> list[V]:
            (condition,) = run(params["cond_jaxpr"], [*ins[:n], *carry], None)
            # The condition decides whether the body runs, and whether it is itself computed again.
            run(params["cond_jaxpr"], [*ins[:n], *carry], condition)
            return [join(x, condition) for x in run(params["body_jaxpr"], [*ins[n:k], *carry], condition)]

        return settled(ins[k:], iteration, join)
    if name == "cond":
        # A result depends on the index too, even if all branches return the same.
        index, *operands = ins
        branches = [run(branch, operands, index) for branch in params["branches"]]
        outs = [index] * len(eqn.outvars)
        for branch in branches:
            outs = [join(a, b) for a, b in zip(outs, branch, strict=True)]
        return outs
    # Calls, remats and custom derivatives, whose program takes the operands as they are.
    inner = called(eqn)
    if inner is None or len(opened(inner)[0].invars) != len(ins) or len(opened(inner)[0].outvars) != len(eqn.outvars):
        if default is not None:
            for program in programs(eqn):
                run(program, [default] * len(program.invars), None)
        return None
    return run(inner, list(ins), None)
