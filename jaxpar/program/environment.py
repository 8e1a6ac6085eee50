"""Run a program one equation at a time, on values of any kind: the only interpreter of programs in jaxpar.

    env = Environment.of(program, inputs)    the value of each variable
    for eqn in program.eqns:
        env.compute(eqn, results)            stores results(eqn, operands); by default the primitive computes them
    outs = env.read(program.outvars)

A value is an array, an array with its placement, a property of an array, or a variable of another program. `evaluate`
is this loop for arrays, and `through` for properties. A caller that runs equations in another order, or several as one,
writes its own loop around the same environment.

`results` also handles the programs inside equations: `rerun` runs those of loops, branches and calls on arrays, and
`walk.propagate` follows properties through them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.extend.source_info_util as source_info_util
import jax.numpy as jnp

from .walk import called, is_literal, opened, scan_parts

V = TypeVar("V")


@contextlib.contextmanager
def source_info_of(eqn: Any) -> Iterator[None]:
    """Within this context, traced equations get the line and the name stack of an equation of the user's program."""
    # The scopes around the interpreter come first, as if the equation were written there.
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    # `ctx` has the settings under which the equation was traced, such as those of random numbers.
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def bind(eqn: Any, values: Sequence[Any], **changes: Any) -> list[Any]:
    """Return the results of an equation's primitive on other values; `changes` replaces some of its parameters."""
    # Some primitives, custom derivatives among them, bind other parameters than their equations store.
    results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params({**eqn.params, **changes}))
    return list(results) if eqn.primitive.multiple_results else [results]


def number(atom: Any) -> Any:
    """Return the number of a literal; a Python scalar stays one, without a dtype."""
    assert is_literal(atom), f"{atom} has no value yet"
    return atom.val


def array_of(atom: Any) -> jax.Array:
    """Return the number of a literal, as an array of its dtype."""
    return jnp.asarray(number(atom), atom.aval.dtype)


def itself(atom: Any) -> Any:
    """Return the atom itself: when variables are renamed, literals and all other variables stay."""
    return atom


class Environment(dict[Any, V]):
    """The values of a program's variables, while its equations run. `env[atom]` reads a variable or a literal.

    Args:
      values: the values at the start, by variable.
      literal: returns the value of an atom that is not in `values`: of a literal, and of any other variable.
    """

    def __init__(self, values: Mapping[Any, V] | Iterable[tuple[Any, V]], literal: Callable[[Any], V] = number) -> None:
        super().__init__(values)
        self._literal = literal

    @classmethod
    def of(
        cls, program: Any, inputs: Iterable[V], literal: Callable[[Any], V] = number, constant: Any = lambda x: x
    ) -> Environment[V]:
        """Return the environment in which a program begins.

        Args:
          program: the program: open, closed or `Flat`.
          literal: returns the value of an atom that has none yet.
          constant: returns the value of an array that the program closes over.
        """
        jaxpr, consts = opened(program)
        values = zip((*jaxpr.constvars, *jaxpr.invars), (*map(constant, consts), *inputs), strict=True)
        return cls(values, literal)

    def __getitem__(self, atom: Any) -> V:
        # `literal` also decides about variables without a value: `itself` keeps them, `number` raises.
        return self._literal(atom) if is_literal(atom) or atom not in self else super().__getitem__(atom)

    def read(self, atoms: Iterable[Any]) -> list[V]:
        """Return the values of some atoms."""
        return [self[atom] for atom in atoms]

    def store(self, eqn: Any, results: Iterable[V]) -> None:
        """Add the results of an equation."""
        self.update(zip(eqn.outvars, results, strict=True))

    def compute(self, eqn: Any, results: Callable[[Any, list[V]], Iterable[V]] = bind) -> None:
        """Trace an equation under its line of the user's program, and add its results, `results(eqn, operands)`."""
        with source_info_of(eqn):
            self.store(eqn, results(eqn, self.read(eqn.invars)))


def evaluate(program: Any, inputs: Iterable[Any], results: Callable[[Any, list[Any]], Iterable[Any]]) -> list[Any]:
    """Return the results of a program on arrays; `results(eqn, operands)` returns the results of one equation."""
    env = Environment.of(program, inputs, array_of)
    jaxpr, _ = opened(program)
    for eqn in jaxpr.eqns:
        env.compute(eqn, results)
    return env.read(jaxpr.outvars)


def through(program: Any, inputs: Iterable[V], results: Callable[[Any, list[V]], Iterable[V]], constant: V) -> list[V]:
    """Follow a property of values through a program.

    Args:
      inputs: the property of each input.
      results: `results(eqn, operands)` returns the property of each result of an equation.
      constant: the property of literals and of arrays that the program closes over.

    Returns:
      The property of each result.
    """
    jaxpr, _ = opened(program)
    env = Environment(zip(jaxpr.invars, inputs, strict=True), lambda atom: constant)
    for eqn in jaxpr.eqns:
        env.store(eqn, results(eqn, env.read(eqn.invars)))
    return env.read(jaxpr.outvars)


def rerun(eqn: Any, values: Sequence[Any], run: Callable[..., tuple[Any, list[Any]]], state: Any = ()) -> Any:
    """Run a scan, while, cond or call whose programs are run by another function.

    Args:
      values: its operands.
      run: `run(program, values, state)` returns `(state, results)` of a program.
      state: a tree that goes through all programs, such as a token. The condition of a while does not change it.

    Returns:
      `(state, results)` of the equation.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        parts = scan_parts(eqn)
        n, k = len(parts.consts), len(parts.carry)

        # The state is carried in front of the scan's own carry.
        def body(carry: Any, xs: Any) -> Any:
            state, outs = run(parts.body, [*values[:n], *carry[1], *xs], carry[0])
            return (state, outs[:k]), outs[k:]

        start, xs = (state, list(values[n : n + k])), list(values[n + k :])
        options = {"length": parts.length, "reverse": parts.reverse, "unroll": params["unroll"]}
        (state, carry), ys = jax.lax.scan(body, start, xs, **options)
        return state, [*carry, *ys]
    if name == "while":
        n = params["cond_nconsts"]
        k = n + params["body_nconsts"]
        # JAX's condition returns a boolean alone, so that a state that it changed would be lost.
        condition = lambda carry: run(params["cond_jaxpr"], [*values[:n], *carry[1]], carry[0])[1][0]
        step = lambda carry: run(params["body_jaxpr"], [*values[n:k], *carry[1]], carry[0])
        return jax.lax.while_loop(condition, step, (state, list(values[k:])))
    if name == "cond":
        # The default binds the loop's branch, as the lambda runs later.
        branches = [lambda state, *values, b=branch: run(b, values, state) for branch in params["branches"]]
        return jax.lax.switch(values[0], branches, state, *values[1:])
    return run(called(eqn), values, state)
