"""A program run an equation at a time, by whoever wants to know something of every value: where it began, how large it
is. Calls and branches are entered; a loop runs as a whole first, and is entered, iteration by iteration, if it matters.
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

# What enters a program that no argument is.
WRITTEN, CLOSED_OVER = "written in the program", "an array that the function closes over"


class Evaluation(ABC):
    """Runs programs; its reader says what a value is held as: an array `x`, beside what is known of it. Each is held
    until it is last read, so that a run takes the memory of the program itself.

    Args:
      enters: whether a loop with these results is entered.

    Attributes:
      sites: the equations whose programs are being run, outermost first, and last the one that is.
      loops: the loops that these are in: line, iteration (from 0), and how many there are (None: a while).
    """

    def __init__(self, enters: Callable[[Sequence[Any]], bool]) -> None:
        self._enters = enters
        self.sites: tuple[Any, ...] = ()
        self.loops: tuple[tuple[str, int, int | None], ...] = ()

    @abstractmethod
    def given(self, x: Any, name: str) -> Any:
        """What enters the program."""

    @abstractmethod
    def made(self, x: Any, at: int | None, ins: Sequence[Any], within: Sequence[Any] = ()) -> Any:
        """Result number `at` of the equation at `sites`, of its operands; of a loop that was entered, of what its
        iterations have made of it. None: the part of an operand that an iteration reads.
        """

    def of(self, fun: Callable[..., Any], names: Sequence[str], *args: Any) -> list[Any]:
        """The results of `fun(*args)`; `names` are those of the leaves of `args`."""
        flat, _ = jx.trace(without_filter_primitives(fun), *args)
        leaves = zip(jax.tree.leaves(args), names, strict=True)
        return self.run(flat, [self.given(x, name) for x, name in leaves])

    def run(self, program: Any, ins: Sequence[Any]) -> list[Any]:
        """The results of a program: open, closed or `Flat`."""
        jaxpr, _ = opened(program)
        written = lambda atom: self.given(atom.val, WRITTEN)
        env = Environment.of(program, ins, written, self._closed_over)
        last = {v: at for at, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not is_literal(v)}
        last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not is_literal(v)}
        outside = self.sites
        for at, eqn in enumerate(jaxpr.eqns):
            self.sites = (*outside, eqn)
            env.store(eqn, self._results(eqn, env.read(eqn.invars)))
            for v in (v for v in (*eqn.invars, *eqn.outvars) if not is_literal(v) and last.get(v, at) == at):
                env.pop(v, None)
        self.sites = outside
        return env.read(jaxpr.outvars)

    def _closed_over(self, x: Any) -> Any:
        return self.given(x, CLOSED_OVER)

    def _results(self, eqn: Any, ins: Sequence[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name in (*CALLS, *REMATS, *CUSTOM):
            return self.run(called(eqn), ins)
        if name == "cond":
            branches, (index, *ins) = eqn.params["branches"], ins
            return self.run(branches[int(np.clip(int(index.x), 0, len(branches) - 1))], ins)
        outs = bound(eqn, [v.x for v in ins])
        loop = {"scan": self._scan, "while": self._while}.get(name)
        within = loop(eqn, ins) if loop is not None and self._enters(outs) else [()] * len(outs)
        return [self.made(x, at, ins, within[at]) for at, x in enumerate(outs)]

    def _scan(self, eqn: Any, ins: Sequence[Any]) -> list[list[Any]]:
        """What the iterations have made of each result."""
        parts = scan_parts(eqn)
        n, k = len(parts.consts), len(parts.carry)
        carry, made = list(ins[n : n + k]), [list[Any]() for _ in parts.ys]
        for number in reversed(range(parts.length)) if parts.reverse else range(parts.length):
            xs = [self.made(lax.dynamic_index_in_dim(v.x, number, 0, False), None, [v]) for v in ins[n + k :]]
            outs = self._iteration(parts.body, [*ins[:n], *carry, *xs], number, parts.length)
            carry = outs[:k]
            for values, out in zip(made, outs[k:], strict=True):
                values.append(out)
        return [*([v] for v in carry), *made]

    def _while(self, eqn: Any, ins: Sequence[Any]) -> list[list[Any]]:
        n = eqn.params["cond_nconsts"]
        k = n + eqn.params["body_nconsts"]
        goes_on = jax.jit(jec.jaxpr_as_fun(eqn.params["cond_jaxpr"]))
        carry, number = list(ins[k:]), 0
        while bool(goes_on(*(v.x for v in (*ins[:n], *carry)))[0]):
            carry = self._iteration(eqn.params["body_jaxpr"], [*ins[n:k], *carry], number, None)
            number += 1
        return [[v] for v in carry]

    def _iteration(self, body: Any, ins: Sequence[Any], number: int, length: int | None) -> list[Any]:
        outside = self.loops
        self.loops = (*outside, (line_of(self.sites), number, length))
        outs = self.run(body, ins)
        self.loops = outside
        return outs


def bound(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The results of an equation of some values, in its place in the user's program."""
    with jx.source_info_of(eqn):
        return jx.bind(eqn, values)


def line_of(sites: Sequence[Any]) -> str:
    """The user's line of the last of some equations, each in a program of the one before; of what a library wraps in
    `jit`, which knows none, that of the call.
    """
    return next((line for eqn in reversed(sites) if (line := jx.user_line(eqn))), "")


def scope_of(sites: Sequence[Any]) -> str:
    """Their name stack without what JAX's transformations add: of "transpose(jvp(mlp))/up" "mlp/up"."""
    added = r"\b(?:jvp|transpose|vmap)(?=\()|[()]|\brematted_computation\b|\bcheckpoint\b"
    stacks = (re.sub(added, "", str(eqn.source_info.name_stack)) for eqn in sites)
    return "/".join(name for stack in stacks for name in stack.split("/") if name)


def is_backward(sites: Sequence[Any]) -> bool:
    """Whether the last of them belongs to a transposed program."""
    return any("transpose(" in str(eqn.source_info.name_stack) for eqn in sites)
