"""Run a program one equation at a time, so that a reader learns something of every value: its origin, its size.

    class Reader(Evaluation):         decides what it knows of a value in addition to the array `x`
        given(x, name)                a value that enters the program
        made(x, at, ins, within)      a value that an equation computes

Calls and branches are entered. A loop runs as one equation first. If the reader asks for it, by `enters`, the loop is
then entered, iteration by iteration.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import numpy as np
from jax import lax

from . import jaxpr as jx
from .environment import Environment
from .filter_primitives import without_filter_primitives
from .walk import CALLS, CUSTOM, REMATS, called, is_literal, opened, scan_parts

# The names of values that enter a program and are no arguments.
WRITTEN, CLOSED_OVER = "written in the program", "an array that the function closes over"


class Evaluation(ABC):
    """Run programs on values: a value is an array `x` with what a subclass, the reader, knows of it.

    Each value is freed after its last use, so that a run takes as much memory as the program itself.

    Args:
      enters: returns whether a loop with these results is entered.

    Attributes:
      sites: the equations whose programs are being run, outermost first; the last one is the current equation.
      loops: the loops that contain it: line, iteration (from 0), and number of iterations (None for a while).
    """

    def __init__(self, enters: Callable[[Sequence[Any]], bool]) -> None:
        self._enters = enters
        self.sites: tuple[Any, ...] = ()
        self.loops: tuple[tuple[str, int, int | None], ...] = ()

    @abstractmethod
    def given(self, x: Any, name: str) -> Any:
        """Return the value of an array that enters the program under a name."""

    @abstractmethod
    def made(self, x: Any, at: int | None, ins: Sequence[Any], within: Sequence[Any] = ()) -> Any:
        """Return the value of a result of the current equation, `sites[-1]`.

        Args:
          at: the number of the result; None for a slice of an operand that an iteration of a scan reads.
          ins: the values of the operands.
          within: for a loop that was entered, the values in its iterations from which the result comes.
        """

    def of(self, fun: Callable[..., Any], names: Sequence[str], *args: Any) -> list[Any]:
        """Return the results of `fun(*args)`; `names` has the name of each leaf of `args`."""
        flat, _ = jx.trace(without_filter_primitives(fun), *args)
        leaves = zip(jax.tree.leaves(args), names, strict=True)
        return self.run(flat, [self.given(x, name) for x, name in leaves])

    def run(self, program: Any, ins: Sequence[Any]) -> list[Any]:
        """Return the results of a program: open, closed or `Flat`."""
        jaxpr, _ = opened(program)
        literal, constant = lambda atom: self.given(atom.val, WRITTEN), lambda x: self.given(x, CLOSED_OVER)
        env = Environment.of(program, ins, literal, constant)
        last_use = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not is_literal(v)}
        last_use |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not is_literal(v)}
        # The reader sees in `sites` where the current equation is, program by program.
        outer_sites = self.sites
        for i, eqn in enumerate(jaxpr.eqns):
            self.sites = (*outer_sites, eqn)
            env.store(eqn, self._results(eqn, env.read(eqn.invars)))
            # Free the values that no later equation reads, results that nothing reads among them.
            for v in (v for v in (*eqn.invars, *eqn.outvars) if not is_literal(v) and last_use.get(v, i) == i):
                env.pop(v, None)
        self.sites = outer_sites
        return env.read(jaxpr.outvars)

    def _results(self, eqn: Any, ins: Sequence[Any]) -> list[Any]:
        """Return the results of one equation."""
        name = eqn.primitive.name
        if name in (*CALLS, *REMATS, *CUSTOM):
            return self.run(called(eqn), ins)
        if name == "cond":
            # XLA clamps the number of a branch.
            branches, (index, *ins) = eqn.params["branches"], ins
            return self.run(branches[int(np.clip(int(index.x), 0, len(branches) - 1))], ins)
        # A loop runs compiled first: only its results tell whether its iterations matter.
        outs = bound(eqn, [v.x for v in ins])
        run_iterations = {"scan": self._scan, "while": self._while}.get(name)
        within = run_iterations(eqn, ins) if run_iterations is not None and self._enters(outs) else [()] * len(outs)
        return [self.made(x, i, ins, within[i]) for i, x in enumerate(outs)]

    def _scan(self, eqn: Any, ins: Sequence[Any]) -> list[list[Any]]:
        """Return, for each result of a scan, the values in its iterations from which it comes."""
        parts = scan_parts(eqn)
        n, k = len(parts.consts), len(parts.carry)
        carry, stacked = list(ins[n : n + k]), [list[Any]() for _ in parts.ys]
        for number in reversed(range(parts.length)) if parts.reverse else range(parts.length):
            xs = [self.made(lax.dynamic_index_in_dim(v.x, number, 0, False), None, [v]) for v in ins[n + k :]]
            outs = self._iteration(parts.body, [*ins[:n], *carry, *xs], number, parts.length)
            carry = outs[:k]
            for values, out in zip(stacked, outs[k:], strict=True):
                values.append(out)
        # A carry comes from the last iteration alone, a stacked result from all of them.
        return [*([v] for v in carry), *stacked]

    def _while(self, eqn: Any, ins: Sequence[Any]) -> list[list[Any]]:
        """Return, for each result of a while loop, its value in the last iteration."""
        n = eqn.params["cond_nconsts"]
        k = n + eqn.params["body_nconsts"]
        # The condition runs compiled: its values are not of interest, and it runs in every iteration.
        condition = jax.jit(jec.jaxpr_as_fun(eqn.params["cond_jaxpr"]))
        carry, number = list(ins[k:]), 0
        while bool(condition(*(v.x for v in (*ins[:n], *carry)))[0]):
            carry = self._iteration(eqn.params["body_jaxpr"], [*ins[n:k], *carry], number, None)
            number += 1
        return [[v] for v in carry]

    def _iteration(self, body: Any, ins: Sequence[Any], number: int, length: int | None) -> list[Any]:
        outer_loops = self.loops
        self.loops = (*outer_loops, (line_of(self.sites), number, length))
        outs = self.run(body, ins)
        self.loops = outer_loops
        return outs


def bound(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Return the results of an equation on some arrays; errors name its line of the user's program."""
    with jx.source_info_of(eqn):
        return jx.bind(eqn, values)


def line_of(sites: Sequence[Any]) -> str:
    """Return the user's line of the last of some equations, each in a program of the previous one.

    An equation that a library wraps in `jit` has no user's line; then the line of the call around it is returned.
    """
    return next((line for eqn in reversed(sites) if (line := jx.user_line(eqn))), "")


def scope_of(sites: Sequence[Any]) -> str:
    """Return the joined name stacks of nested equations, as "mlp/up".

    The names that JAX's transformations add are removed: "transpose(jvp(mlp))/up" is "mlp/up".
    """
    added_by_jax = r"\b(?:jvp|transpose|vmap)(?=\()|[()]|\brematted_computation\b|\bcheckpoint\b"
    stacks = (re.sub(added_by_jax, "", str(eqn.source_info.name_stack)) for eqn in sites)
    return "/".join(name for stack in stacks for name in stack.split("/") if name)


def is_backward(sites: Sequence[Any]) -> bool:
    """Return whether the last of some nested equations belongs to a backward, a transposed program."""
    return any("transpose(" in str(eqn.source_info.name_stack) for eqn in sites)
