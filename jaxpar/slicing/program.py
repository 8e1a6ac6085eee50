"""A sliced loss as one program: its pieces run in order forwards, and in reverse backwards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..program import jaxpr as jx
from .access import Access, Sender
from .pieces import Flights, Segment, Stack, add
from .rolling.loops import RolledLoop


@dataclass(frozen=True)
class Program:
    """A loss as pieces. `inputs` are the variables of the constants and of all that is not a parameter.

    `uses` has for each parameter leaf one entry a use: whether a stack slices it there. `main` is the stack that a
    pipeline cuts; `loops` what became of Python loops over layers; `coupled` says whether the loss of a row depends on
    other rows; `groups` has, of a program that was cut, the equations of each piece.
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
        """Loops whose layers run one by one, all or some: their first leaf, and the first difference."""
        return tuple((loop.leaf, loop.why) for loop in self.loops if loop.why is not None)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The layer stacks, in order."""
        return tuple(p for p in self.pieces if isinstance(p, Stack))

    def in_flight(self, access: Sender, leaves: Sequence[Any]) -> Flights:
        """What is in flight before the first microbatch, by the number of the piece; empty where nothing ever is."""
        flights = {at: p.in_flight(access, leaves) for at, p in enumerate(self.pieces) if isinstance(p, Stack)}
        return {at: flight for at, flight in flights.items() if flight is not None}

    def landed(self, access: Access, flights: Flights, grads: list[Any]) -> list[Any]:
        """Gradients with those added that are in flight after the last microbatch."""
        for at, flight in flights.items():
            stack = self.pieces[at]
            assert isinstance(stack, Stack)
            grads = stack.landed(access, flight, grads)
        return grads

    def forward(
        self,
        access: Access,
        leaves: Sequence[Any],
        values: Sequence[Any],
        grad: bool = False,
        flights: Flights | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Outputs for the values of `inputs` (constants aside), and the tape that `backward` reads.

        `flights` have what is in flight before and, when this returns, after: with `grad` alone.
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
        """`into` with the gradient of each leaf added, as given; None stays where the loss does not depend on it.

        `seeds` holds the cotangents of some outputs, by position; `into` one accumulator a leaf, or None for the first;
        `flights` are as `forward` left them, and then what is in flight after this.
        """
        return backward(self.pieces, access, leaves, tape, self.seeded(seeds), into, flights)

    def environment(self, values: Sequence[Any]) -> dict[Any, Any]:
        """The values of the variables that are there before any piece has run."""
        return dict(zip(self.inputs, [*self.consts, *values], strict=True))

    def seeded(self, seeds: dict[int, jax.Array]) -> dict[Any, Any]:
        """Cotangents by variable from cotangents by position of the output."""
        return {self.outputs[i]: seed for i, seed in seeds.items() if not jx.is_literal(self.outputs[i])}

    def depends(self, sources: Sequence[Any], position: int, stop: frozenset[str] = frozenset()) -> bool:
        """Whether an output depends on some variables other than through a reduction over all the axes in `stop`."""
        atom = self.outputs[position]
        return not jx.is_literal(atom) and atom in jx.depends(self.eqns, sources, jx.reduces(stop))

    def only(self, position: int) -> Callable[[Sequence[Any]], jax.Array]:
        """One output, which does not depend on the parameters, as a function of the inputs (constants aside)."""
        out = [self.outputs[position]]
        fun = jx.run(jx.live(jx.needed(self.eqns, out), out), self.inputs, out)
        return lambda values: fun(*self.consts, *values)[0]


def forward(
    pieces: Sequence[Segment | Stack],
    access: Access,
    leaves: Sequence[Any],
    env: dict[Any, Any],
    grad: bool,
    flights: Flights | None = None,
) -> list[Any]:
    """Runs some pieces, and returns the tape that `backward` reads.

    `env` has the value of each variable that the pieces read; the values that they compute are added to it. `flights`,
    by the number of the piece, become those after.
    """
    tape, flights = [], {} if flights is None else flights
    seen: set[int] = set()
    for at, piece in enumerate(pieces):
        inputs = [read(env, v) for v in piece.inputs]
        mine = _again(leaves, seen & set(piece.unit.leaves), inputs, piece.unit.linear)
        if isinstance(piece, Stack) and at in flights:
            outs, saved, flights[at] = piece.forward(access, mine, inputs, grad, flight=flights[at])
        else:
            outs, saved = piece.forward(access, mine, inputs, grad)
        seen.update(piece.unit.leaves)
        env.update(zip(piece.outputs, outs, strict=True))
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
    """`into`, one accumulator for each leaf, with the gradients of some pieces added.

    `cts` has the cotangent of each variable that the pieces compute; those of the variables that they read are added to
    it. `flights` are as in `forward`.
    """
    grads, flights = list(into), {} if flights is None else flights
    for at, (piece, (inputs, saved)) in reversed([*enumerate(zip(pieces, tape, strict=True))]):
        active = [v for v, on in zip(piece.outputs, piece.unit.active, strict=True) if on]
        if not any(v in cts for v in active):
            if isinstance(piece, Stack) and at in flights:
                flights[at] = piece.skipped(access, leaves, flights[at])
            continue
        # pop: a value that two pieces write (what two stacks read whole) has a cotangent for each, to be used once.
        given = [cts.pop(v) if v in cts else jnp.zeros(v.aval.shape, v.aval.dtype) for v in active]
        args = (access, leaves, inputs, saved, given, [grads[i] for i in piece.unit.leaves])
        if isinstance(piece, Stack) and at in flights:
            totals, ct_inputs, flights[at] = piece.backward(*args, flight=flights[at])
        else:
            totals, ct_inputs = piece.backward(*args)
        for i, total in zip(piece.unit.leaves, totals, strict=True):
            grads[i] = total
        linear = [v for v, on in zip(piece.inputs, piece.unit.linear, strict=True) if on]
        for var, ct in zip(linear, ct_inputs, strict=True):
            if not jx.is_literal(var):
                cts[var] = add(cts.get(var), ct)
    return grads


def _again(leaves: Sequence[Any], which: set[int], inputs: list[Any], linear: Sequence[bool]) -> Sequence[Any]:
    """The leaves, where those in `which`, which an earlier piece has read too (tied weights), wait for the `inputs`.

    If they did not, the compiler would fetch them once and hold them whole from their first use to their last.
    """
    after = [x for x, on in zip(inputs, linear, strict=True) if on]
    if not which or not after:
        return leaves
    out = list(leaves)
    held, _ = lax.optimization_barrier(([leaves[i] for i in sorted(which)], after))
    for i, leaf in zip(sorted(which), held, strict=True):
        out[i] = leaf
    return out


def read(env: dict[Any, Any], atom: Any) -> Any:
    """The value of a variable or literal."""
    return jx.array_of(atom) if jx.is_literal(atom) else env[atom]
