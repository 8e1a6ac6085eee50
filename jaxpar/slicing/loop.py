"""A scan over layers that has not run yet, so that it can run side by side with another, or reorder its collectives.

Compilers schedule the body of one loop at a time: a collective overlaps only with compute in the same body. XLA does
not estimate how long an all-to-all or a kernel takes (jax 0.10.2). With two equal layers in one body, it would compute
both and then wait for both. `LayerLoop.beside` therefore makes the two loops alternate:

    other     C0         C1       C2                   C0 needs no exchange, C1 needs the first exchanges,
    first           C0       C1       C2               C2 those that send results of C1
    sends       other  first    other    first         each overlaps with the computation that follows it

An exchange is an all-to-all, or a collective of activations over `tensor`.

A backward alone has compute for its exchanges too: gradients of weights, which no exchange needs. XLA would compute
most of them at the end. `LayerLoop.run` puts them alongside exchanges:

    inputs    C0              C1              C2       cotangents of activations
    weights        W0              W1                  gradients of the weights that C0 and C1 used
    sends          results of C0   results of C1

A forward that communicates for no other iteration has none: its products run in parts (`product_parts.py`).

A loop may also gather and reduce for other iterations (`InFlight`). `LayerLoop.run` puts each of these collectives into
a *window* between two of the loop's own collectives, where most is multiplied. XLA would start them where its own last
collective ends, with no compute left to overlap with:

    experts   C0   tokens to experts   C1   tokens back   C2        forwards; the experts are C1
    sends                              gather                       the experts' weights of the next layer

Copies from the host are a third case. XLA has at most two under way, and estimates them as short: it starts all at
once, and kernels wait. So the copies for the next layer start one by one, each alongside a product, the largest copy
alongside the largest product.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..program.buffers import scan
from ..program.walk import visit
from .iteration import Body, Iteration, exchanges_activations, hold, may_exchange
from .product_parts import overlap_products


@dataclass(frozen=True)
class LayerLoop:
    """The arguments of a `lax.scan` over layers.

    Attributes:
      body: `body(carry, iteration, x)`, as a scan's body that is also told the number of the iteration.
      init: the carry before the first iteration.
      xs: the scanned values.
      length: the number of iterations.
      reverse: whether iterations run from the last to the first.
      result: `result(carry, ys)` returns the value that `run` returns.
      sends_ahead: whether the body gathers or reduces for other iterations.
      copies_ahead: whether the body copies weights from the host for other iterations.
      fills: whether the body has products that its exchanges do not need.
    """

    body: Body
    init: Any
    xs: Any
    length: int
    reverse: bool
    result: Callable[[Any, Any], Any]
    sends_ahead: bool = False
    copies_ahead: bool = False
    fills: bool = False

    def then(self, fun: Callable[[Any], Any]) -> "LayerLoop":
        """Return this loop with `fun` applied to its result."""
        return dataclasses.replace(self, result=lambda carry, ys: fun(self.result(carry, ys)))

    def run(self, is_alone: bool = True) -> Any:
        """Run the loop, and return its result.

        Args:
          is_alone: whether the program has nothing else to compute while this loop exchanges activations.
        """
        reorders = {
            _in_windows: self.sends_ahead,
            _spread: self.copies_ahead,
            _filled: self.fills and may_exchange(),
            overlap_products: not self.fills and is_alone and may_exchange(),
        }
        body = next((reorder(self.body) for reorder, is_used in reorders.items() if is_used), self.body)
        return self.result(*_scan(body, self.init, self.xs, self.length, self.reverse))

    def beside(self, other: "LayerLoop") -> tuple[Any, Any]:
        """Run two independent loops as one, in turns from exchange to exchange, and return both results."""
        assert self.length == other.length
        is_opposite = self.reverse != other.reverse
        # The other's values are read where they are: a reversed copy would be as large as all its layers.
        row = lambda xs, i: jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), xs)

        def body(carry: Any, iteration: Any, x: Any) -> Any:
            other_iteration = other.length - 1 - iteration if is_opposite else iteration
            other_x = row(other.xs, other_iteration)
            (self_carry, y), (other_carry, other_y) = _alternate(
                Iteration(self.body, carry[0], iteration, x),
                Iteration(other.body, carry[1], other_iteration, other_x),
            )
            return (self_carry, other_carry), (y, other_y)

        init = self.init, other.init
        (self_carry, other_carry), (ys, other_ys) = _scan(body, init, self.xs, self.length, self.reverse)
        other_ys = jax.tree.map(lambda y: jnp.flip(y, 0), other_ys) if is_opposite else other_ys
        return self.result(self_carry, ys), other.result(other_carry, other_ys)


def _scan(body: Body, init: Any, xs: Any, length: int, reverse: bool) -> tuple[Any, Any]:
    """Run `lax.scan` of a `Body`.

    The iteration's number is read from an array. If it were counted, XLA's collective pipeliner would see that
    iterations write layer after layer, and move collectives that are meant for this iteration to the next one.
    """
    # Numbers are scanned too, so that in a reversed loop an iteration has the number of its layer.
    return scan(lambda carry, x: body(carry, *x), init, (jnp.arange(length), xs), length, reverse)


def _may_open(eqn: Any) -> bool:
    """Return whether the equations of a remat may move.

    One in a backward's own loop needs no protection from CSE: the forward's values are in another loop.
    """
    return not eqn.params["prevent_cse"]


def _hides_exchanges(eqn: Any) -> bool:
    """Return whether a remat has to be opened for its exchanges. Any other stays closed, and its values short-lived."""
    return _may_open(eqn) and any(exchanges_activations(inner) for inner, _ in visit([eqn]))


def _in_windows(body: Body) -> Body:
    """Return the body with its collectives for other iterations in windows between its own collectives."""

    def in_windows(carry: Any, iteration: Any, x: Any) -> Any:
        steps = Iteration(body, carry, iteration, x, remats=_may_open)
        for window in steps.windows():
            steps.compute()
            for eqns in window:
                steps.send_ahead(eqns)
                steps.compute()  # what lies between a reduce-scatter and an all-reduce of its result
            steps.send()
        steps.compute()
        return steps.result()

    return in_windows


def _filled(body: Body) -> Body:
    """Return the body with the products that no exchange needs alongside the exchanges."""

    def filled(carry: Any, iteration: Any, x: Any) -> Any:
        steps = Iteration(body, carry, iteration, x, remats=_hides_exchanges)
        if not steps.gains_from_fillers:
            return body(carry, iteration, x)
        while needed := steps.before_exchanges:
            steps.compute(needed)
            steps.send_beside(steps, steps.fillers())
        steps.compute()
        return steps.result()

    return filled


def _spread(body: Body) -> Body:
    """Return the body with its copies from the host for other iterations started one after another."""

    def spread(carry: Any, iteration: Any, x: Any) -> Any:
        steps = Iteration(body, carry, iteration, x)
        steps.compute_beside_copies()
        return steps.result()

    return spread


def _alternate(first: Iteration, second: Iteration) -> tuple[Any, Any]:
    """Run two iterations alternately, and return both results.

    A result that has arrived for one iteration is not used before the other's exchanges can start. So these overlap
    with the computation that uses it. The very first exchanges overlap only with what the other iteration computes
    before its own. If neither needs a product for them, the smaller ones come first, else those of `second`.
    """
    waiting, computing = second, first
    (first_flops, first_bytes), (second_flops, second_bytes) = first.start, second.start
    if first_flops == second_flops == 0 and first_bytes < second_bytes:
        waiting, computing = first, second
    waiting.compute()
    while first.is_unfinished or second.is_unfinished:
        hold(computing.env, computing.arrived, waiting.env, waiting.leaving)
        waiting.send_beside(computing, computing.ready())
        computing.compute()
        computing, waiting = waiting, computing
    return first.result(), second.result()
