"""A sliced loss as one program: its pieces run in order forwards, and in reverse backwards.

    values of inputs  -> piece 0 -> piece 1 -> ... ->  outputs        forward: fills an environment, writes a tape
    cotangents        <- piece 0 <- piece 1 <- ... <-  seeds          backward: reads the tape, accumulates gradients

An *environment* has a value for each variable of the whole program. The *tape* has, for each piece, the values of its
inputs and what its forward saved.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..program import jaxpr as jx
from .access import Access, Sender
from .flights import Flights, Lookahead
from .halves import pick
from .pieces import Segment, Stack, add
from .rolling.loops import RolledLoop


@dataclass(frozen=True)
class Program:
    """A loss as pieces.

    Attributes:
      pieces: segments and stacks, in order.
      eqns: the equations of the whole loss, before it was cut.
      consts: the arrays that it closes over.
      leaves: the variables of the parameter leaves.
      inputs: the variables of the constants, and of all inputs that are not parameters.
      outputs: its results, variables or literals.
      uses: for each parameter leaf, one bool for each piece that reads it: whether the piece is a stack that slices it.
      main: the stack that a pipeline cuts into stages.
      loops: what became of Python loops over layers.
      coupled: whether the loss of a row depends on other rows.
      groups: the equations of each piece, for a program of `cut_program`.
    """

    pieces: tuple[Segment | Stack, ...]
    eqns: tuple[Any, ...]
    consts: tuple[Any, ...]
    leaves: tuple[Any, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    uses: tuple[tuple[bool, ...], ...]
    main: Stack | None = None
    loops: tuple[RolledLoop, ...] = ()
    coupled: bool = False
    groups: tuple[tuple[Any, ...], ...] = ()

    @property
    def unrolled(self) -> tuple[tuple[int, str], ...]:
        """Loops that did not become one stack: the first leaf of each, and the first difference between its layers."""
        return tuple((loop.leaf, loop.difference) for loop in self.loops if loop.difference is not None)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The layer stacks, in order."""
        return tuple(p for p in self.pieces if isinstance(p, Stack))

    def is_read_once(self, leaf: int) -> bool:
        """Return whether one stack alone reads a leaf, and none of its layers twice, as w[i] and w[i + 1] would."""
        layers = [n for stack in self.stacks for s in stack.slices if s.leaf == leaf for n in s.layers(stack.length)]
        return self.uses[leaf] == (True,) and len({*layers}) == len(layers)

    def in_flight(self, access: Sender, leaves: Sequence[Any]) -> Flights:
        """Return the `InFlight` of each stack before the first microbatch, by the number of the piece.

        A stack whose loops send nothing for other iterations has no entry.
        """
        flights = {i: p.in_flight(access, leaves) for i, p in enumerate(self.pieces) if isinstance(p, Stack)}
        return {i: flight for i, flight in flights.items() if flight is not None}

    def with_pending_gradients(self, access: Access, flights: Flights, grads: list[Any]) -> list[Any]:
        """Return the gradients with those added that are pending after the last microbatch."""
        for i, flight in flights.items():
            stack = self.pieces[i]
            assert isinstance(stack, Stack)
            grads = stack.with_pending_gradients(access, flight, grads)
        return grads

    def forward(
        self,
        access: Access,
        leaves: Sequence[Any],
        values: Sequence[Any],
        grad: bool = False,
        flights: Flights | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Run the loss on one microbatch; arguments that are not listed are as for the function `forward`.

        Args:
          values: the values of `inputs`, constants aside.
          flights: the state of stacks that communicate for other iterations, updated in place; with `grad` alone.

        Returns:
          The outputs, and the tape that `backward` reads.
        """
        env = self.environment(values)
        tape = forward(self.pieces, access, leaves, env, grad, flights)
        return [read(env, v) for v in self.outputs], tape

    def backward(
        self,
        access: Access,
        leaves: Sequence[Any],
        tape: Sequence[Any],
        seeds: dict[int, jax.Array],
        into: Sequence[jax.Array | None],
        flights: Flights | None = None,
    ) -> list[jax.Array | None]:
        """Accumulate the gradients of one microbatch; arguments that are not listed are as for the function `backward`.

        Args:
          tape: the second result of `forward`.
          seeds: cotangents of outputs, by position.
          flights: as `forward` left them; updated in place.

        Returns:
          `into` with this microbatch's gradients added, in the form in which they are given. None stays where the loss
          does not depend on the leaf.
        """
        return backward(self.pieces, access, leaves, tape, self.seeded(seeds), into, flights)

    def environment(self, values: Sequence[Any]) -> dict[Any, Any]:
        """Return the values of the variables that exist before any piece runs."""
        return dict(zip(self.inputs, [*self.consts, *values], strict=True))

    def seeded(self, seeds: dict[int, jax.Array]) -> dict[Any, Any]:
        """Return cotangents by variable, from cotangents by position of the output."""
        return {self.outputs[i]: seed for i, seed in seeds.items() if not jx.is_literal(self.outputs[i])}

    def depends(self, sources: Sequence[Any], position: int, stop: frozenset[str] = frozenset()) -> bool:
        """Whether an output depends on some variables other than through a reduction over all the axes in `stop`."""
        atom = self.outputs[position]
        return not jx.is_literal(atom) and atom in jx.depends(self.eqns, sources, jx.reduces(stop))

    def only(self, position: int) -> Callable[[Sequence[Any]], jax.Array]:
        """Return one output, which may not depend on parameters, as a function of the inputs (constants aside)."""
        # `needed` drops equations with effects, unlike `live`. They run in the program, and must not run here again.
        output = [self.outputs[position]]
        fun = jx.run(jx.live(jx.needed(self.eqns, output), output), self.inputs, output)
        return lambda values: fun(*self.consts, *values)[0]


def forward(
    pieces: Sequence[Segment | Stack],
    access: Access,
    leaves: Sequence[Any],
    env: dict[Any, Any],
    grad: bool,
    flights: Flights | None = None,
) -> list[Any]:
    """Run some pieces, and return the tape that `backward` reads.

    Args:
      access: how leaves are fetched.
      leaves: the stored value of every parameter leaf.
      env: the value of each variable that the pieces read; the values that they compute are added.
      grad: whether a backward follows.
      flights: `InFlight` by the number of the piece, updated in place.
    """
    tape, flights = [], {} if flights is None else flights
    leaves_read: set[int] = set()
    for i, piece in enumerate(pieces):
        inputs = [read(env, v) for v in piece.inputs]
        # 1. Tied weights: a leaf that an earlier piece has read is fetched again.
        tied = leaves_read & set(piece.unit.leaf_indices)
        ordered_leaves = _delay_leaves(leaves, tied, inputs, piece.unit.active_inputs)
        # 2. Run the piece.
        if isinstance(piece, Stack) and i in flights:
            layers = piece.layers(access, ordered_leaves)
            outputs, saved, flights[i] = piece.forward_loop(layers, inputs, grad, None, Lookahead(flights[i])).run()
        else:
            outputs, saved = piece.forward(access, ordered_leaves, inputs, grad)
        # 3. Store what it computed and what its backward needs.
        leaves_read.update(piece.unit.leaf_indices)
        env.update(zip(piece.outputs, outputs, strict=True))
        tape.append((inputs, saved))
    return tape


def backward(
    pieces: Sequence[Segment | Stack],
    access: Access,
    leaves: Sequence[Any],
    tape: Sequence[Any],
    cts: dict[Any, Any],
    into: Sequence[jax.Array | None],
    flights: Flights | None = None,
) -> list[jax.Array | None]:
    """Run the backwards of some pieces, last piece first, and return `into` with their gradients added.

    Args:
      pieces: the pieces, in the order of the forward.
      access: how leaves are fetched and gradients given.
      leaves: the stored value of every parameter leaf.
      tape: the result of `forward`.
      cts: the cotangents of variables that the pieces compute. Cotangents of the variables that they read are added.
      into: one accumulated gradient for each leaf; None for zero.
      flights: `InFlight` by the number of the piece, updated in place.
    """
    grads, flights = list(into), {} if flights is None else flights
    for i, (piece, (inputs, saved)) in reversed([*enumerate(zip(pieces, tape, strict=True))]):
        # 1. Skip a piece on which the seeded outputs do not depend.
        active = pick(piece.unit.active, piece.outputs)
        if not any(v in cts for v in active):
            # The next loop of this stack is a forward again, which begins with the first layer.
            if isinstance(piece, Stack) and i in flights:
                flights[i] = piece.refetched(access, leaves, flights[i])
            continue
        # 2. Collect the cotangents of its outputs. They are popped: two pieces may write one variable (a value that two
        # stacks read whole), and each of them takes its own cotangent.
        ct_outputs = [cts.pop(v) if v in cts else jnp.zeros(v.aval.shape, v.aval.dtype) for v in active]
        # 3. Run its backward.
        args = (inputs, saved, ct_outputs, [grads[leaf] for leaf in piece.unit.leaf_indices])
        if isinstance(piece, Stack) and i in flights:
            layers = piece.layers(access, leaves)
            totals, ct_inputs, flights[i] = piece.backward_loop(layers, *args, Lookahead(flights[i])).run()
        else:
            totals, ct_inputs = piece.backward(access, leaves, *args)
        # 4. Store the gradients, and add up the cotangents of its inputs.
        for leaf, total in zip(piece.unit.leaf_indices, totals, strict=True):
            grads[leaf] = total
        for var, ct in zip(pick(piece.unit.active_inputs, piece.inputs), ct_inputs, strict=True):
            if not jx.is_literal(var):
                cts[var] = add(cts.get(var), ct)
    return grads


def _delay_leaves(leaves: Sequence[Any], delayed: set[int], inputs: list[Any], active: Sequence[bool]) -> Sequence[Any]:
    """Return the leaves, where the `delayed` ones wait for a piece's active inputs.

    Without the barrier, the compiler would merge the fetches of a tied weight, and hold it whole from its first use to
    its last.
    """
    active_inputs = pick(active, inputs)
    # Without active inputs, there is no value to wait for.
    if not delayed or not active_inputs:
        return leaves
    ordered_leaves = list(leaves)
    barred, _ = lax.optimization_barrier(([leaves[i] for i in sorted(delayed)], active_inputs))
    for i, leaf in zip(sorted(delayed), barred, strict=True):
        ordered_leaves[i] = leaf
    return ordered_leaves


def read(env: dict[Any, Any], atom: Any) -> Any:
    """Return the value of a variable or literal."""
    return jx.array_of(atom) if jx.is_literal(atom) else env[atom]
