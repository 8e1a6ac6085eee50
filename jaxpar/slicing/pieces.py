"""The pieces of a sliced loss, segments and layer stacks, run forwards and backwards.

A loss whose layers are scanned (`nnx.scan`, `nn.scan`, `lax.scan`) becomes

    segment | stack | segment | stack | ... | segment        (prologue | layers | epilogue for one stack)

where a stack is a `scan` that slices parameters, and a segment is whatever runs between two stacks. Every piece
*fetches* its parameters when it runs, again when its backward runs, and *gives* their gradients there: a strategy
is a choice of those two functions. So parameters that live sharded are whole for one layer at a time, and gradients
are reduced inside the backward loop.

A strategy may have its loops send what no computation waits for (`InFlight`): of L layers, iteration by iteration,

    forward     computes     0     1    ...  L-1     backward    computes   L-1   L-2   ...   0
                fetches      1     2    ...  L-1                 fetches    L-2   L-3   ...   0
                                                                 gives       0*   L-1   ...   1     * microbatch before

The last fetch of each loop is the first layer of the next loop, of the next microbatch too.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..program.buffers import is_on_host, on_device, zeros_after
from .access import Access, Sender
from .halves import WeightGradResiduals, pick
from .loop import LayerLoop
from .slices import Slice
from .stash import Stash
from .units import Saved, Unit


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weights", "gradients"], meta_fields=[])
@dataclass(frozen=True)
class InFlight:
    """What an iteration over layers finds that the one before has sent or left to send, by slice of the stack.

    Attributes:
      weights: those of the layer that is computed next, whole; None for a leaf that each layer fetches when it runs.
      gradients: those of the layer computed before, whole and not yet given: between two microbatches, of the layer
        that runs first forwards, before the first microbatch zeros. None for a leaf whose gradients are given at once.
    """

    weights: list[Any]
    gradients: list[Any]


Flights = dict[int, InFlight]  # by the number of the piece


@dataclass(frozen=True)
class Segment:
    """A unit that runs once; `inputs` and `outputs` are variables of the whole program.

    With `keep`, what the forward fetched serves the backward as well: right for an epilogue, whose backward follows at
    once, so that a second fetch of the largest matrix of many models would only cost traffic and memory.
    """

    unit: Unit
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    keep: bool

    def forward(self, access: Access, leaves: Sequence[Any], inputs: list[Any], grad: bool) -> tuple[list[Any], Any]:
        """Outputs, and what `backward` needs (None without `grad`)."""
        full = [access.fetch(i, leaves[i], False) for i in self.unit.leaves]
        if not (grad and any(self.unit.active)):
            return self.unit.value(full, inputs), None
        outs, saved = self.unit.forward(full, inputs)
        return outs, (saved, full if self.keep else None)

    def backward(
        self,
        access: Access,
        leaves: Sequence[Any],
        inputs: list[Any],
        saved: Any,
        cotangents: list[Any],
        into: list[Any],
    ) -> tuple[list[Any], list[Any]]:
        """`into` with this use's gradients added, one per leaf of the unit, and cotangents of the linear inputs."""
        saved, full = saved
        reads, run = self.unit.backward(inputs, saved, cotangents)
        if full is None:
            needed = pick(reads, self.unit.leaves)
            # Fetched again, and not before the cotangents are there: nothing whole survives from the forward.
            shards, cotangents = lax.optimization_barrier(([leaves[i] for i in needed], cotangents))
            full = [access.fetch(i, x, False) for i, x in zip(needed, shards, strict=True)]
        else:
            full = pick(reads, full)
        ct_full, ct_inputs = run(full, cotangents[0])
        # One after the other: cotangents (the weights are no longer needed), reductions, and then the piece before.
        ct_full, ct_inputs = lax.optimization_barrier((ct_full, ct_inputs))
        given = [
            None if ct is None else access.give(i, ct, False) for i, ct in zip(self.unit.leaves, ct_full, strict=True)
        ]
        # Sums stand before the barrier, so that a cast for them is no array of its own: of a head, gigabytes.
        totals = [add(a, g) for a, g in zip(into, given, strict=True)]
        return lax.optimization_barrier((totals, ct_inputs))


@dataclass(frozen=True)
class Stack:
    """A unit that runs once a layer: inputs are consts + carry + xs, outputs carry + ys, as in `lax.scan`.

    `slices` say for each leaf of the unit (which may have one several times) the layer that an iteration reads.
    What of a layer waits on the host, of its weights or for its backward, comes while the one before it runs: XLA makes
    asynchronous copies of it. A device holds that of two layers, and a loop's last copy is one too many.
    """

    unit: Unit
    slices: tuple[Slice, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    consts: int
    carry: int
    length: int
    reverse: bool

    def parts(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Values of the inputs as constants, carry, and what is scanned."""
        n, k = self.consts, self.carry
        return list(values[:n]), list(values[n : n + k]), list(values[n + k :])

    def forward(self, *args: Any, **options: Any) -> Any:
        """What `forwards` gives; its arguments."""
        return self.forwards(*args, **options).run()

    def backward(self, *args: Any, **options: Any) -> Any:
        """What `backwards` gives; its arguments."""
        return self.backwards(*args, **options).run()

    def in_flight(self, access: Sender, leaves: Sequence[Any]) -> InFlight | None:
        """What is in flight before the first microbatch; None where nothing ever is."""
        sends = [access.sends(s.leaf) for s in self.slices]
        if self.length == 1 or not any(map(any, sends)):
            return None
        weights = self._refetched(access, leaves, [() if early else None for early, _ in sends], self._first)
        pairs = zip(self.unit.shapes, sends, strict=True)
        return InFlight(weights, [jnp.zeros(x.shape, x.dtype) if late else None for x, (_, late) in pairs])

    def skipped(self, access: Access, leaves: Sequence[Any], flight: InFlight, back: bool = False) -> InFlight:
        """What is in flight after a forward whose backward does not run: the first layer is next again. Or, to go
        `back` behind a backward whose forward ran before, the last.
        """
        number = self.length - 1 - self._first if back else self._first
        # Else XLA fetches it with what was first in flight, and holds it all along.
        leaves, flight = lax.optimization_barrier((leaves, flight))
        return dataclasses.replace(flight, weights=self._refetched(access, leaves, flight.weights, number))

    def landed(self, access: Access, flight: InFlight, grads: list[Any]) -> list[Any]:
        """Gradients, one for each leaf of the program, with those added that are in flight after the last microbatch;
        None, where no backward ran, stays.
        """
        late = [None if grads[s.leaf] is None else x for s, x in zip(self.slices, flight.gradients, strict=True)]
        return self._added(access, grads, late, self._first, [False] * len(late))

    def forwards(
        self,
        access: Access,
        leaves: Sequence[Any],
        inputs: list[Any],
        grad: bool,
        start: Any = 0,
        real: jax.Array | None = None,
        stash: Stash | None = None,
        flight: InFlight | None = None,
        again: bool = False,
    ) -> LayerLoop:
        """A loop for outputs, and what `backwards` needs of each layer, stacked (None without `grad`); or the buffers
        of the `stash`, in which that then is. With what is in flight before it, all layers' alone, a third result is
        what is after: the last layer's weights, for a backward, or for a forward `again` the first one's.

        The iterations are those from number `start`. Where `real` [layers] is false, a layer is an
        identity layer: its outputs are its inputs.
        """
        consts, init, xs = self.parts(inputs)

        def layer(state: Any, number: Any, x: Any) -> tuple[Any, Any]:
            (carry, buffers, early, near), (xs, here) = state, x
            inputs = [*consts, *carry, *xs]
            full = self._fetched(access, leaves, self.slices, start + number, early, near)
            near = self._near(leaves, number + self._step)
            early = early and self._refetched(access, leaves, early, number + self._step, again)
            if grad:
                outs, saved = self.unit.forward(full, inputs)
            else:
                outs, saved = self.unit.value(full, inputs), None
            after = outs[: self.carry] if here is None else _where(here, outs[: self.carry], carry)
            if stash is not None and saved is not None:
                buffers, saved = stash.put(buffers, number, saved.values), None
            elif saved is not None:
                saved = saved.sent()
            return (after, buffers, early, near), (outs[self.carry :], saved)

        every = (xs, real)
        near = self._near(leaves, self._first)
        first = (init, stash.buffers if stash else [], flight.weights if flight else None, near)

        def result(state: Any, out: Any) -> Any:
            (carry, buffers, early, _), (ys, saved) = state, out
            made = [*carry, *ys], buffers if stash else saved
            return (*made, dataclasses.replace(flight, weights=early)) if flight else made

        copies = any(x is not None for x in near)
        return LayerLoop(layer, first, every, self.length, self.reverse, result, flight is not None, copies)

    def backwards(
        self,
        access: Access,
        leaves: Sequence[Any],
        inputs: list[Any],
        saved: Saved,
        cotangents: list[Any],
        into: list[Any],
        start: Any = 0,
        real: jax.Array | None = None,
        stash: Stash | None = None,
        flight: InFlight | None = None,
        again: bool = False,
    ) -> LayerLoop:
        """A loop for `into` with this use's gradients added, one stack for each leaf of the unit, and cotangents of the
        linear inputs. With a `stash`, what the forward saved is there, and `saved` is its structure. With what is in
        flight before it, a third result is what is after: the first layer's weights, or for a backward `again` the last
        one's.
        """
        consts, _, xs = self.parts(inputs)
        linear_consts, linear_carry, _ = self.parts(self.unit.linear)
        n_const, n_carry = sum(linear_consts), sum(linear_carry)

        totals, add = self._totals(access, leaves, cotangents[0], into)
        fetched = lambda number: None if stash else saved.fetched(jnp.clip(number, 0, self.length - 1))
        noted: list[Sequence[bool]] = []  # which leaves the backward reads: known once it is traced

        def layer(carry: Any, number: Any, x: Any) -> tuple[Any, Any]:
            ct_carry, ct_consts, totals, flight, ahead, near = carry
            one, xs, ct_ys, here = x
            # The carry's value, where the backward needs it, is inside `saved`.
            known = [*consts, *([None] * self.carry), *xs]
            one = one.beside(ahead) if stash is None else dataclasses.replace(saved, values=stash.at(number))
            ahead = fetched(number - self._step)
            reads, run = self.unit.backward(known, one, [*ct_carry, *ct_ys])
            noted[:] = [reads]
            early = flight and pick(reads, flight.weights)
            there = pick(reads, near)
            ct_full, ct_in = run(self._fetched(access, leaves, pick(reads, self.slices), start + number, early, there))
            near = self._near(leaves, number - self._step)
            if here is not None:
                through = [*([0] * n_const), *ct_carry, *([0] * (len(ct_in) - n_const - n_carry))]
                ct_full, ct_in = _where(here, ct_full, [0] * len(ct_full)), _where(here, ct_in, through)
            ct_consts = [a + b for a, b in zip(ct_consts, ct_in[:n_const], strict=True)]
            if flight is not None:
                late = [x is not None for x in flight.gradients]
                totals = add(totals, flight.gradients, jnp.mod(number + self._step, self.length))
                early = self._refetched(access, leaves, flight.weights, number - self._step, again, reads)
                flight = InFlight(early, [ct if x else None for x, ct in zip(late, ct_full, strict=True)])
                ct_full = [None if x else ct for x, ct in zip(late, ct_full, strict=True)]
            totals = add(totals, ct_full, start + number)
            ct_carry = ct_in[n_const : n_const + n_carry]
            return (ct_carry, ct_consts, totals, flight, ahead, near), ct_in[n_const + n_carry :]

        zeros = [jnp.zeros_like(c) for c in pick(linear_consts, consts)]
        every = (saved.here if stash is None else None, xs, cotangents[n_carry:], real)

        def result(carry: Any, ct_xs: Any) -> Any:
            ct_carry, ct_consts, totals, flight, _, _ = carry
            made = [totals[i] for i in self.unit.leaves], [*ct_consts, *ct_carry, *ct_xs]
            if flight is None:
                return made
            # What no backward reads, biases, is still that of the layer which ran last forwards.
            unread = [not read for read in noted[0]]
            early = self._refetched(access, leaves, flight.weights, self._first, which=unread)
            return (*made, dataclasses.replace(flight, weights=early))

        last = self.length - 1 - self._first
        near = self._near(leaves, last)
        first = (cotangents[:n_carry], zeros, totals, flight, fetched(last), near)
        copies = any(x is not None for x in near)
        return LayerLoop(layer, first, every, self.length, not self.reverse, result, flight is not None, copies)

    def backward_inputs(
        self,
        access: Access,
        leaves: Sequence[Any],
        inputs: list[Any],
        saved: Saved,
        cotangents: list[Any],
        start: Any = 0,
        real: jax.Array | None = None,
        stash: Stash | None = None,
        leaves_in: Stash | None = None,
    ) -> tuple[list[Any], Any]:
        """The first half of `backward`: cotangents of the linear inputs, and what it leaves of each layer, stacked (a
        `WeightGradResiduals`); or the buffers of `leaves_in`, in which that now is.
        """
        consts, _, xs = self.parts(inputs)
        linear_consts, linear_carry, _ = self.parts(self.unit.linear)
        n_const, n_carry = sum(linear_consts), sum(linear_carry)

        def layer(carry: Any, x: Any) -> tuple[Any, Any]:
            ct_carry, ct_consts, buffers = carry
            number, one, xs, ct_ys, here = x
            one = one if stash is None else dataclasses.replace(saved, values=stash.at(number))
            known, given = [*consts, *([None] * self.carry), *xs], [*ct_carry, *ct_ys]
            halves = self.unit.halves(known, one, given)
            full = self._fetched(access, leaves, pick(halves.fetched[0], self.slices), start + number)
            ct_in, left = halves.inputs(full, pick(self.unit.held, known), one.values, given)
            if here is not None:
                ct_in = _where(here, ct_in, [*([0] * n_const), *ct_carry, *([0] * (len(ct_in) - n_const - n_carry))])
            ct_consts = [a + b for a, b in zip(ct_consts, ct_in[:n_const], strict=True)]
            if leaves_in is not None:
                buffers, left = leaves_in.put(buffers, number, left.values), None
            return (ct_in[n_const : n_const + n_carry], ct_consts, buffers), (ct_in[n_const + n_carry :], left)

        zeros = [jnp.zeros_like(c) for c in pick(linear_consts, consts)]
        (ct_carry, ct_consts, buffers), (ct_xs, left) = lax.scan(
            layer,
            (cotangents[:n_carry], zeros, leaves_in.buffers if leaves_in else []),
            (jnp.arange(self.length), saved if stash is None else None, xs, cotangents[n_carry:], real),
            length=self.length,
            reverse=not self.reverse,
        )
        return [*ct_consts, *ct_carry, *ct_xs], buffers if leaves_in else left

    def backward_weights(
        self,
        access: Access,
        leaves: Sequence[Any],
        inputs: list[Any],
        saved: list[Any],
        left: WeightGradResiduals,
        into: list[Any],
        start: Any = 0,
        real: jax.Array | None = None,
        stash: Stash | None = None,
        left_in: Stash | None = None,
    ) -> list[Any]:
        """The second half of `backward`: `into` with this use's gradients added. `saved` are those of the values saved
        that it reads (`Halves.saved`); or they are in the `stash`, and what the first half left is in `left_in`, where
        `left` is its structure.
        """
        consts, _, xs = self.parts(inputs)
        there = [stash.buffers if stash else saved, left_in.buffers if left_in else left.values]
        floating = (x for values in there for x in values if jnp.issubdtype(x.dtype, jnp.floating))
        here = next(floating, leaves[self.slices[0].leaf])  # of weights without gradients nothing is left
        totals, add = self._totals(access, leaves, here, into)

        def layer(totals: Any, x: Any) -> tuple[Any, None]:
            number, one, other, xs, here = x
            one = one if stash is None else stash.at(number)
            other = other if left_in is None else dataclasses.replace(left, values=left_in.at(number))
            known = pick(self.unit.held, [*consts, *([None] * self.carry), *xs])
            full = self._fetched(access, leaves, pick(left.halves.fetched[1], self.slices), start + number)
            ct_full = left.halves.weights(full, known, one, other)
            ct_full = ct_full if here is None else _where(here, ct_full, [0] * len(ct_full))
            return add(totals, ct_full, start + number), None

        read = (saved if stash is None else None, left if left_in is None else None)
        every = (jnp.arange(self.length), *read, xs, real)
        totals, _ = lax.scan(layer, totals, every, length=self.length, reverse=not self.reverse)
        return [totals[i] for i in self.unit.leaves]

    @property
    def _first(self) -> int:
        """The number of the layer that runs first forwards, and last backwards."""
        return self.length - 1 if self.reverse else 0

    @property
    def _step(self) -> int:
        """From the number of a layer to that of the next one forwards."""
        return -1 if self.reverse else 1

    def _refetched(
        self,
        access: Access,
        leaves: Sequence[Any],
        early: Sequence[Any],
        number: Any,
        again: bool = False,
        which: Sequence[bool] | None = None,
    ) -> list[Any]:
        """`early` with those of `which`, or all, fetched of layer `number`; beyond an end, of the layer there, or
        `again` of that at the other end.
        """
        which = [x is not None and (which is None or which[i]) for i, x in enumerate(early)]
        number = jnp.mod(number, self.length) if again else jnp.clip(number, 0, self.length - 1)
        found = iter(self._fetched(access, leaves, pick(which, self.slices), number))
        return [next(found) if new else x for new, x in zip(which, early, strict=True)]

    def _near(self, leaves: Sequence[Any], number: Any) -> list[Any]:
        """Of leaves on the host what a device has of layer `number`, brought to it; beyond an end, of the layer there.
        None of the others.
        """
        number = jnp.clip(number, 0, self.length - 1)
        bring = lambda s, x: on_device(s.of(x, number)) if is_on_host(x) else None
        return [bring(s, leaves[s.leaf]) for s in self.slices]

    @staticmethod
    def _fetched(
        access: Access,
        leaves: Sequence[Any],
        slices: Sequence[Slice],
        number: Any,
        early: Sequence[Any] | None = None,
        near: Sequence[Any] | None = None,
    ) -> list[jax.Array]:
        """One layer's weights; those that were fetched `early` are there, of others what is gathered is `near`."""
        early, near = early or [None] * len(slices), near or [None] * len(slices)
        fetch = lambda s, x: access.fetch(s.leaf, s.of(leaves[s.leaf], number) if x is None else x, True)
        return [fetch(s, y) if x is None else x for s, x, y in zip(slices, early, near, strict=True)]

    def _totals(self, access: Access, leaves: Sequence[Any], after: jax.Array, into: list[Any]) -> tuple[Any, Any]:
        """The stacks of gradients by leaf, those there are or zeros, and `add(stacks, cotangents, layer)`.

        They are carried and written layer by layer. As results of the scan, their reductions would be pipelined across
        its end, with a layer's whole gradients between iterations.
        """
        given = dict(zip(self.unit.leaves, into, strict=True))
        totals = {
            s.leaf: self._empty(access, s, leaves[s.leaf], after) if given[s.leaf] is None else given[s.leaf]
            for s in self.slices
        }
        fresh = [
            given[s.leaf] is None
            and not any(s.meets(o, self.length) for o in self.slices if o is not s and o.leaf == s.leaf)
            for s in self.slices
        ]

        return totals, lambda totals, cotangents, number: self._added(access, totals, cotangents, number, fresh)

    def _added(self, access: Access, totals: Any, cotangents: Sequence[Any], number: Any, fresh: Sequence[bool]) -> Any:
        """The stacks of gradients, by leaf, with a layer's added, or written where they are `fresh`."""
        totals = totals.copy()
        for s, ct, first in zip(self.slices, cotangents, fresh, strict=True):
            given = None if ct is None else access.give(s.leaf, ct, True)
            if given is not None:
                total = totals[s.leaf]
                given = given if first else given + s.of(total, number)
                totals[s.leaf] = s.into(total, given, number)
        return totals

    @staticmethod
    def _empty(access: Access, of: Slice, shard: jax.Array, after: jax.Array) -> jax.Array | None:
        """Zeros for the gradients that the layers will give; None for a leaf that has none."""

        def given(shard: jax.Array) -> jax.Array | None:
            whole = access.fetch(of.leaf, shard, True)
            return access.give(of.leaf, whole, True) if jnp.issubdtype(whole.dtype, jnp.inexact) else None

        one = [n for d, n in enumerate(shard.shape) if d != of.dim]
        shape = jax.eval_shape(given, jax.ShapeDtypeStruct(tuple(one), shard.dtype))
        if shape is None:
            return None
        stacked = (*shape.shape[: of.dim], shard.shape[of.dim], *shape.shape[of.dim :])
        return zeros_after(after, stacked, shape.dtype)


def add(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    """The sum of two gradients, where None is zero."""
    return b if a is None else a if b is None else a + b


def _where(condition: jax.Array, a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    return [None if x is None else jnp.where(condition, x, y) for x, y in zip(a, b, strict=True)]
