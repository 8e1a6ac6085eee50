"""A scan over layers that has not run yet, so that another may run beside it, layer by layer.

Compilers schedule the body of one loop at a time: only what stands in one body is computed while a collective of the
other loop is under way. XLA's estimates do not know what an all-to-all or a kernel takes (jax 0.10.2), and two equal
layers side by side would both compute and then both wait. So they take turns:

    other     C0          C1            C2           C0: what needs no all-to-all, C1: what needs the results of the
    one             C0            C1           C2    first ones, C2: what needs those that need these
    sent         other's   one's    other's  one's   each while the next computes
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..program import jaxpr as jx
from ..program.collectives import KINDS

_EXCHANGES = KINDS["all-to-all"]


@dataclass(frozen=True)
class LayerLoop:
    """The arguments of a `lax.scan`, whose `body(carry, number, x)` is told the iteration's number besides, and
    `result(carry, ys)`: what its caller wants of what it returns.
    """

    body: Callable[[Any, Any, Any], tuple[Any, Any]]
    init: Any
    xs: Any
    length: int
    reverse: bool
    result: Callable[[Any, Any], Any]

    def then(self, fun: Callable[[Any], Any]) -> "LayerLoop":
        """This loop with `fun` applied to its result."""
        return dataclasses.replace(self, result=lambda carry, ys: fun(self.result(carry, ys)))

    def run(self) -> Any:
        """The result."""
        return self.result(*_counted(self.body, self.init, self.xs, self.length, self.reverse))

    def beside(self, other: "LayerLoop") -> tuple[Any, Any]:
        """The results of two independent loops, run as one; the other's all-to-alls come first."""
        assert self.length == other.length
        turned = self.reverse != other.reverse
        # Where they are: a reversed copy of what is scanned would be as large as all its layers.
        at = lambda xs, number: jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), xs)

        def body(carry: Any, number: Any, mine: Any) -> Any:
            its = other.length - 1 - number if turned else number
            (first, out), (second, others) = _in_turn(
                _Iteration(self.body, carry[0], number, mine), _Iteration(other.body, carry[1], its, at(other.xs, its))
            )
            return (first, second), (out, others)

        init = self.init, other.init
        (first, second), (out, others) = _counted(body, init, self.xs, self.length, self.reverse)
        others = jax.tree.map(lambda y: jnp.flip(y, 0), others) if turned else others
        return self.result(first, out), other.result(second, others)


def _counted(body: Callable[[Any, Any, Any], Any], init: Any, xs: Any, length: int, reverse: bool) -> tuple[Any, Any]:
    """`lax.scan` of `body(carry, number, x)`. The number is counted, and not read from those of all: so XLA's GPU
    compiler sees that gradients are written layer by layer, and sends those of one while the next is computed (its
    collective pipeliner).
    """

    def one(state: Any, x: Any) -> Any:
        count, carry = state
        carry, y = body(carry, length - 1 - count if reverse else count, x)
        return (count + 1, carry), y

    (_, carry), ys = lax.scan(one, (jnp.zeros((), jnp.int32), init), xs, length=length, reverse=reverse)
    return carry, ys


class _Iteration:
    """One iteration of a loop, which computes what it can before it needs the result of the next all-to-all."""

    def __init__(self, body: Callable[[Any, Any, Any], Any], state: Any, number: Any, x: Any):
        flat, out = jx.trace(body, state, number, x)
        self._outs, self._tree = flat.outvars, jax.tree.structure(out)
        self._todo = jx.live(flat.eqns, flat.outvars)
        self.env = dict(
            zip((*flat.constvars, *flat.invars), (*flat.consts, *jax.tree.leaves((state, number, x))), strict=True)
        )
        self.arrived = list(flat.invars[: len(jax.tree.leaves(state))])
        self._sends: list[Any] = []

    @property
    def unfinished(self) -> bool:
        """Whether there is something left to compute or to send."""
        return bool(self._todo or self._sends)

    @property
    def leaving(self) -> list[Any]:
        """The operands of the all-to-alls that can start."""
        return [eqn.invars[0] for eqn in self._sends]

    def compute(self) -> None:
        """All that needs no all-to-all but those that have arrived."""
        later = []
        for eqn in self._todo:
            if not all(jx.is_literal(v) or v in self.env for v in eqn.invars):
                later.append(eqn)
            elif eqn.primitive.name in _EXCHANGES:
                self._sends.append(eqn)
            else:
                self._bind(eqn)
        self._todo = later

    def send(self) -> None:
        """Runs the all-to-alls that can start."""
        for eqn in self._sends:
            self._bind(eqn)
        self.arrived = [v for eqn in self._sends for v in eqn.outvars]
        self._sends = []

    def result(self) -> Any:
        """What the body returns."""
        return jax.tree.unflatten(self._tree, [self._read(v) for v in self._outs])

    def _bind(self, eqn: Any) -> None:
        with jx.source_info_of(eqn):
            self.env.update(zip(eqn.outvars, jx.bind(eqn, [self._read(v) for v in eqn.invars]), strict=True))

    def _read(self, atom: Any) -> Any:
        return atom.val if jx.is_literal(atom) else self.env[atom]


def _in_turn(one: _Iteration, other: _Iteration) -> tuple[Any, Any]:
    """What both return. Of what has arrived nothing is computed before the other's all-to-alls can start."""
    computing, waiting = one, other
    waiting.compute()
    while one.unfinished or other.unfinished:
        _hold(computing, computing.arrived, waiting, waiting.leaving)
        waiting.send()
        computing.compute()
        computing, waiting = waiting, computing
    return one.result(), other.result()


def _hold(one: _Iteration, held: Sequence[Any], other: _Iteration, until: Sequence[Any]) -> None:
    """Holds variables of one iteration until those of another are there."""
    if held and until:
        here, there = [one.env[v] for v in held], [other.env[v] for v in until]
        here, there = lax.optimization_barrier((here, there))
        one.env.update(zip(held, here, strict=True))
        other.env.update(zip(until, there, strict=True))
