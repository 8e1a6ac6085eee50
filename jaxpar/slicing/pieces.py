"""The pieces of a sliced loss, segments and layer stacks, run forwards and backwards.

A loss whose layers are scanned (`nnx.scan`, `nn.scan`, `lax.scan`) becomes

    segment | stack | segment | stack | ... | segment        (prologue | layers | epilogue for one stack)

where a stack is a `scan` that slices parameters, and a segment is whatever runs between two stacks. Every piece
*fetches* its parameters when it runs, and again when its backward runs, where it also *gives* their gradients. A
strategy is a choice of those two functions:

    forward     fetch layer 0, compute | fetch layer 1, compute | ...
    backward    ... | fetch layer 1, recompute or read what it saved, pull back, give | fetch layer 0, ..., give

So sharded parameters are whole for one layer at a time, and gradients are reduced inside the backward loop.
A strategy may have its loops communicate for other iterations (`flights.py`), so that no computation waits.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..program.buffers import scan
from .access import Access, Gradient, Sender
from .flights import InFlight, Lookahead
from .halves import WeightGradResiduals, merge, pick
from .layer_access import LayerAccess, identity_cotangents, select
from .loop import LayerLoop
from .slices import Slice
from .stash import Stash
from .units import Saved, Unit


@dataclass(frozen=True)
class Segment:
    """A unit that runs once.

    Attributes:
      inputs: the program's variables that it reads, parameters aside.
      outputs: the program's variables that it computes.
      keep: whether the backward reuses the parameters that the forward fetched. This suits an epilogue, whose backward
        follows immediately: many models have their largest matrix there, and a second fetch would only cost traffic.
    """

    unit: Unit
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    keep: bool

    def forward(self, access: Access, leaves: Sequence[Any], inputs: list[Any], grad: bool) -> tuple[list[Any], Any]:
        """Return the outputs, and what `backward` needs (None without `grad`)."""
        full = [access.fetch(i, leaves[i], False) for i in self.unit.leaf_indices]
        if not (grad and any(self.unit.active)):
            return self.unit.value(full, inputs), None
        outputs, saved = self.unit.forward(full, inputs)
        return outputs, (saved, full if self.keep else None)

    def backward(
        self,
        access: Access,
        leaves: Sequence[Any],
        inputs: list[Any],
        saved: Any,
        cotangents: list[Any],
        into: list[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Fetch the parameters again, pull cotangents back, and give the gradients.

        Args:
          access: how leaves are fetched and gradients given.
          leaves: the stored value of every parameter leaf.
          inputs: the values of `self.inputs`.
          saved: the second result of `forward`.
          cotangents: one for each active output.
          into: the accumulated gradient of each leaf of the unit, None for zero.

        Returns:
          `into` with this use's gradients added, and the cotangents of the active inputs.
        """
        saved, full = saved
        reads, pull_back = self.unit.backward(inputs, saved, cotangents)
        if full is None:
            needed = pick(reads, self.unit.leaf_indices)
            # The second fetch waits for the cotangents. Else XLA would merge it with the forward's fetch, and the whole
            # parameters would stay in memory in between.
            shards, cotangents = lax.optimization_barrier(([leaves[i] for i in needed], cotangents))
            full = [access.fetch(i, x, False) for i, x in zip(needed, shards, strict=True)]
        else:
            full = pick(reads, full)
        ct_full, ct_inputs = pull_back(full, cotangents[0])
        # Two barriers order the rest: all cotangents first, so that the weights are free, then the reductions, then the
        # backward of the previous piece.
        ct_full, ct_inputs = lax.optimization_barrier((ct_full, ct_inputs))
        grads = [
            None if ct is None else access.give(i, ct, False)
            for i, ct in zip(self.unit.leaf_indices, ct_full, strict=True)
        ]
        # The sums stand before the barrier, so that XLA fuses their casts. Behind it, the cast of a head's gradient
        # would be an array of gigabytes.
        totals = [add(total, grad) for total, grad in zip(into, grads, strict=True)]
        return lax.optimization_barrier((totals, ct_inputs))


@dataclass(frozen=True)
class Stack:
    """A unit that runs once for each layer: inputs are consts + carry + xs, outputs carry + ys, as in `lax.scan`.

    Weights or saved values of a layer that rest on the host are copied to the device while the previous layer runs: XLA
    makes these copies asynchronous. So a device holds them for two layers. The last copy of a loop is not used.

    Attributes:
      slices: the layer that an iteration reads, for each entry of `unit.leaf_indices`. A leaf may occur several times.
      inputs: the program's variables that the scan reads, parameters aside.
      outputs: the program's variables that it computes.
      num_consts: the number of inputs that all layers share.
      num_carry: the number of inputs that pass from layer to layer.
      length: the number of layers.
      reverse: whether the forward starts at the last layer.
    """

    unit: Unit
    slices: tuple[Slice, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    num_consts: int
    num_carry: int
    length: int
    reverse: bool

    def parts(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Split values of the inputs into constants, carry and scanned values."""
        n, k = self.num_consts, self.num_carry
        return list(values[:n]), list(values[n : n + k]), list(values[n + k :])

    def split_cotangents(self, cotangents: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Split the cotangents of the active inputs into those of constants, carry and scanned values."""
        n, k, _ = (sum(part) for part in self.parts(self.unit.active_inputs))
        return list(cotangents[:n]), list(cotangents[n : n + k]), list(cotangents[n + k :])

    def layers(
        self, access: Access, leaves: Sequence[Any], start: Any = 0, is_real: jax.Array | None = None
    ) -> LayerAccess:
        """Return access to the parameters of the layers; the arguments are as for `LayerAccess`."""
        return LayerAccess(access, leaves, self.slices, self.length, start, is_real)

    def forward(self, access: Access, leaves: Sequence[Any], inputs: list[Any], grad: bool) -> tuple[list[Any], Any]:
        """Return the outputs, and what `backward` needs; the arguments are as for `Segment`."""
        return self.forward_loop(self.layers(access, leaves), inputs, grad).run()

    def backward(
        self,
        access: Access,
        leaves: Sequence[Any],
        inputs: list[Any],
        saved: Saved,
        cotangents: list[Any],
        into: list[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Return the gradients and the cotangents of the active inputs; the arguments are as for `Segment`."""
        return self.backward_loop(self.layers(access, leaves), inputs, saved, cotangents, into).run()

    def in_flight(self, access: Sender, leaves: Sequence[Any]) -> InFlight | None:
        """Return the state before the first microbatch; None if the loops send nothing for other iterations."""
        sends = [access.sends(s.leaf) for s in self.slices]
        if self.length == 1 or not any(map(any, sends)):
            return None
        # The first layer's weights are fetched before the first loop begins.
        is_early = [early for early, _ in sends]
        fetched = self.layers(access, leaves).fetch(self._first_layer, is_early)
        weights = merge(is_early, fetched, [None] * len(is_early))
        # No gradient is pending yet: the first iteration gives zeros.
        pairs = zip(self.unit.shapes, sends, strict=True)
        return InFlight(weights, [jnp.zeros(x.shape, x.dtype) if late else None for x, (_, late) in pairs])

    def refetched(self, access: Access, leaves: Sequence[Any], flight: InFlight, back: bool = False) -> InFlight:
        """Return the state with the weights of the layer that is next, if the previous loop has fetched another one.

        Args:
          access: how leaves are fetched.
          leaves: the stored value of every parameter leaf.
          flight: the state after the previous loop.
          back: whether the next loop runs backwards, and so begins with the layer that runs last forwards; False if it
            runs forwards.
        """
        layer = self.length - 1 - self._first_layer if back else self._first_layer
        # Without the barrier XLA would merge this fetch with the initial one, and hold the weights in between.
        leaves, flight = lax.optimization_barrier((leaves, flight))
        return dataclasses.replace(flight, weights=self.layers(access, leaves).prefetch(flight.weights, layer))

    def with_pending_gradients(self, access: Access, flight: InFlight, grads: list[Any]) -> list[Any]:
        """Return gradients, one for each leaf of the program, with the pending ones of the last microbatch added.

        None stays where no backward ran.
        """
        # The pending gradients belong to the layer that ran last backwards.
        pending = [None if grads[s.leaf] is None else x for s, x in zip(self.slices, flight.gradients, strict=True)]
        return self.layers(access, ()).accumulate(grads, pending, self._first_layer)

    def forward_loop(
        self,
        layers: LayerAccess,
        inputs: list[Any],
        grad: bool,
        stash: Stash | None = None,
        lookahead: Lookahead | None = None,
    ) -> LayerLoop:
        """Return the loop that runs the layers forwards.

        Args:
          layers: the parameters of the layers.
          inputs: the values of `self.inputs`.
          grad: whether a backward follows.
          stash: buffers for the saved values; without it they are stacked by layer.
          lookahead: what the loop fetches for other iterations.

        Returns:
          A loop whose result is the outputs; what `backward_loop` needs (stacked by layer, or the buffers of the
          stash, or None without `grad`); and, with `lookahead`, the state in flight after the loop.
        """
        consts, init, xs = self.parts(inputs)

        def forward_layer(state: Any, iteration: Any, scanned: Any) -> tuple[Any, Any]:
            (carry, buffers, prefetched, device_copies), (xs, is_real) = state, scanned
            inputs = [*consts, *carry, *xs]
            # 1. Fetch this layer, unless the previous iteration did, and start on the next layer's weights.
            full = layers.fetch(layers.start + iteration, None, prefetched, device_copies)
            device_copies = layers.copy_from_host(iteration + self._layer_step)
            if lookahead is not None:
                prefetched = layers.prefetch(prefetched, iteration + self._layer_step, lookahead.again)
            # 2. Compute.
            if grad:
                outputs, saved = self.unit.forward(full, inputs)
            else:
                outputs, saved = self.unit.value(full, inputs), None
            # 3. A layer of padding passes its carry on.
            new_carry = outputs[: self.num_carry]
            if is_real is not None:
                new_carry = select(is_real, new_carry, carry)
            # 4. Save for the backward.
            if stash is not None and saved is not None:
                buffers, saved = stash.put(buffers, iteration, saved.values), None
            elif saved is not None:
                saved = saved.offloaded()
            return (new_carry, buffers, prefetched, device_copies), (outputs[self.num_carry :], saved)

        def result(state: Any, stacked: Any) -> Any:
            (carry, buffers, prefetched, _), (ys, saved) = state, stacked
            results = [*carry, *ys], buffers if stash else saved
            return (*results, dataclasses.replace(lookahead.flight, weights=prefetched)) if lookahead else results

        weights, copies = lookahead and lookahead.flight.weights, layers.copy_from_host(self._first_layer)
        state = (init, stash.buffers if stash else [], weights, copies)
        ahead = lookahead is not None, layers.is_on_host
        return LayerLoop(forward_layer, state, (xs, layers.is_real), self.length, self.reverse, result, *ahead)

    def backward_loop(
        self,
        layers: LayerAccess,
        inputs: list[Any],
        saved: Saved | Stash,
        cotangents: list[Any],
        into: list[Any],
        lookahead: Lookahead | None = None,
    ) -> LayerLoop:
        """Return the loop that runs the layers backwards. Arguments that are not listed are as in `forward_loop`.

        Args:
          saved: what the forward saved, stacked by layer, or the stash where it put that.
          cotangents: one for each active output.
          into: the accumulated gradient of each leaf of the unit, stacked as the leaf; None for zero.
          lookahead: what the loop fetches and gives for other iterations.

        Returns:
          A loop whose result is `into` with this use's gradients added; the cotangents of the active inputs; and, with
          `lookahead`, the state in flight after the loop.
        """
        totals, accumulate = layers.accumulators(into, cotangents[0])
        (consts, _, xs), (ct_carry, ct_consts, ct_ys) = self.parts(inputs), self._initial_cotangents(inputs, cotangents)
        traced_reads: list[Sequence[bool]] = []  # which leaves the backward reads: known once it is traced

        def backward_layer(state: Any, iteration: Any, scanned: Any) -> tuple[Any, Any]:
            ct_carry, ct_consts, totals, flight, host_values, device_copies = state
            layer_saved, xs, ct_ys, is_real = scanned
            # 1. Take what this layer's forward saved, and start the copy of the next layer's values from the host.
            if isinstance(saved, Stash):
                layer_saved = saved.at(iteration)
            else:
                layer_saved = layer_saved.with_host_values(host_values)
                host_values = saved.copied_from_host(self._clip(iteration - self._layer_step))
            # 2. Fetch the weights that the backward reads, and pull the cotangents back.
            # The carry's value, where the backward needs it, is inside `saved`.
            layer_inputs = [*consts, *([None] * self.num_carry), *xs]
            reads, pull_back = self.unit.backward(layer_inputs, layer_saved, [*ct_carry, *ct_ys])
            traced_reads[:] = [reads]
            full = layers.fetch(layers.start + iteration, reads, flight and flight.weights, device_copies)
            ct_full, ct_in = pull_back(full)
            device_copies = layers.copy_from_host(iteration - self._layer_step)
            # 3. A layer of padding has no gradient.
            if is_real is not None:
                ct_full = select(is_real, ct_full, [0] * len(ct_full))
            ct_carry, ct_consts, ct_xs = self._add_cotangents(ct_carry, ct_consts, ct_in, is_real)
            # 4. Give the previous layer's pending gradients, prefetch the next layer, and keep this layer's pending.
            if lookahead is not None:
                # The first iteration gives the gradient of the previous microbatch: `mod` names its layer.
                totals = accumulate(totals, flight.gradients, jnp.mod(iteration + self._layer_step, self.length))
                prefetched = layers.prefetch(flight.weights, iteration - self._layer_step, lookahead.again, reads)
                pending, ct_full = flight.split(ct_full)
                flight = InFlight(prefetched, pending)
            # 5. Give this layer's other gradients.
            totals = accumulate(totals, ct_full, layers.start + iteration)
            return (ct_carry, ct_consts, totals, flight, host_values, device_copies), ct_xs

        def result(state: Any, ct_xs: Any) -> Any:
            ct_carry, ct_consts, totals, flight, _, _ = state
            results = [totals[i] for i in self.unit.leaf_indices], [*ct_consts, *ct_carry, *ct_xs]
            if flight is None:
                return results
            # No backward reads biases, so that this loop did not fetch them: their prefetched value is still from the
            # layer that ran last forwards.
            unread = [not is_read for is_read in traced_reads[0]]
            prefetched = layers.prefetch(flight.weights, self._first_layer, mask=unread)
            return (*results, dataclasses.replace(flight, weights=prefetched))

        last_layer = self.length - 1 - self._first_layer
        stacked, host_values = None, None
        if isinstance(saved, Saved):
            stacked, host_values = saved.without_host_values, saved.copied_from_host(self._clip(last_layer))
        in_flight = lookahead and lookahead.flight, host_values, layers.copy_from_host(last_layer)
        state = (ct_carry, ct_consts, totals, *in_flight)
        scanned, ahead = (stacked, xs, ct_ys, layers.is_real), (lookahead is not None, layers.is_on_host)
        return LayerLoop(backward_layer, state, scanned, self.length, not self.reverse, result, *ahead, fills=True)

    def backward_inputs(
        self,
        layers: LayerAccess,
        inputs: list[Any],
        saved: Saved | Stash,
        cotangents: list[Any],
        residual_stash: Stash | None = None,
    ) -> tuple[list[Any], Any]:
        """Run the first half of `backward` (`halves.py`). Arguments that are not listed are as in `backward_loop`.

        Args:
          residual_stash: where to put the residuals for the second half; without it they are stacked by layer.

        Returns:
          The cotangents of the active inputs, and the residuals for `backward_weights`: a `WeightGradResiduals`, or
          the buffers of `residual_stash`.
        """
        (consts, _, xs), (ct_carry, ct_consts, ct_ys) = self.parts(inputs), self._initial_cotangents(inputs, cotangents)

        def backward_layer(carry: Any, scanned: Any) -> tuple[Any, Any]:
            ct_carry, ct_consts, buffers = carry
            iteration, layer_saved, xs, ct_ys, is_real = scanned
            if isinstance(saved, Stash):
                layer_saved = saved.at(iteration)
            layer_inputs, layer_cts = [*consts, *([None] * self.num_carry), *xs], [*ct_carry, *ct_ys]
            halves = self.unit.halves(layer_inputs, layer_saved, layer_cts)
            full = layers.fetch(layers.start + iteration, halves.fetched[0])
            held_inputs = pick(self.unit.held, layer_inputs)
            ct_in, residuals = halves.inputs(full, held_inputs, layer_saved.values, layer_cts)
            ct_carry, ct_consts, ct_xs = self._add_cotangents(ct_carry, ct_consts, ct_in, is_real)
            if residual_stash is not None:
                buffers, residuals = residual_stash.put(buffers, iteration, residuals.values), None
            return (ct_carry, ct_consts, buffers), (ct_xs, residuals)

        stacked = None if isinstance(saved, Stash) else saved
        (ct_carry, ct_consts, buffers), (ct_xs, residuals) = scan(
            backward_layer,
            (ct_carry, ct_consts, residual_stash.buffers if residual_stash else []),
            (jnp.arange(self.length), stacked, xs, ct_ys, layers.is_real),
            length=self.length,
            reverse=not self.reverse,
        )
        return [*ct_consts, *ct_carry, *ct_xs], buffers if residual_stash else residuals

    def backward_weights(
        self,
        layers: LayerAccess,
        inputs: list[Any],
        saved: list[Any] | Stash,
        residuals: WeightGradResiduals | Stash,
        into: list[Any],
    ) -> list[Any]:
        """Run the second half of `backward` (`halves.py`). Arguments that are not listed are as in `backward_loop`.

        Args:
          saved: the forward's saved values that this half reads (`Halves.saved`), stacked, or the stash where they are.
          residuals: the second result of `backward_inputs`, or the stash where they are.

        Returns:
          `into` with this use's gradients added.
        """
        consts, _, xs = self.parts(inputs)
        # The accumulators must not exist before the operands of this half. Without gradients there are no residuals;
        # any leaf will do then.
        operands = [
            saved.buffers if isinstance(saved, Stash) else saved,
            residuals.buffers if isinstance(residuals, Stash) else residuals.values,
        ]
        floating = (x for values in operands for x in values if jnp.issubdtype(x.dtype, jnp.floating))
        totals, accumulate = layers.accumulators(into, next(floating, layers.leaves[self.slices[0].leaf]))

        def weight_grads(totals: Any, scanned: Any) -> tuple[Any, None]:
            iteration, layer_saved, layer_residuals, xs, is_real = scanned
            if isinstance(saved, Stash):
                layer_saved = saved.at(iteration)
            if isinstance(residuals, Stash):
                layer_residuals = residuals.at(iteration)
            held_inputs = pick(self.unit.held, [*consts, *([None] * self.num_carry), *xs])
            halves = layer_residuals.halves
            full = layers.fetch(layers.start + iteration, halves.fetched[1])
            ct_full = halves.weights(full, held_inputs, layer_saved, layer_residuals)
            if is_real is not None:  # a layer of padding has no gradient
                ct_full = select(is_real, ct_full, [0] * len(ct_full))
            return accumulate(totals, ct_full, layers.start + iteration), None

        stacked = [None if isinstance(x, Stash) else x for x in (saved, residuals)]
        scanned = (jnp.arange(self.length), *stacked, xs, layers.is_real)
        totals, _ = lax.scan(weight_grads, totals, scanned, length=self.length, reverse=not self.reverse)
        return [totals[i] for i in self.unit.leaf_indices]

    def _initial_cotangents(self, inputs: list[Any], cotangents: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Return cotangents before a backward's first layer: of the carry, of the constants (zeros), and of the ys."""
        active_consts, active_carry, _ = self.parts(self.unit.active_inputs)
        zeros = [jnp.zeros_like(c) for c in pick(active_consts, self.parts(inputs)[0])]
        return cotangents[: sum(active_carry)], zeros, cotangents[sum(active_carry) :]

    def _add_cotangents(
        self, ct_carry: list[Any], ct_consts: list[Any], ct_inputs: list[Any], is_real: jax.Array | None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Return cotangents after one layer of a backward: of the carry, of the constants (sums), and of the xs.

        Args:
          ct_carry, ct_consts: before the layer.
          ct_inputs: the cotangents of the layer's active inputs.
          is_real: false for a layer of padding, which is the identity.
        """
        if is_real is not None:
            ct_inputs = select(is_real, ct_inputs, identity_cotangents(ct_carry, len(ct_consts), len(ct_inputs)))
        layer_consts, ct_carry, ct_xs = self.split_cotangents(ct_inputs)
        return ct_carry, [total + ct for total, ct in zip(ct_consts, layer_consts, strict=True)], ct_xs

    def _clip(self, layer: Any) -> jax.Array:
        """Return a layer's number; beyond an end of the stack, the number of the layer at that end."""
        return jnp.clip(layer, 0, self.length - 1)

    @property
    def _first_layer(self) -> int:
        """The layer that runs first forwards, and last backwards."""
        return self.length - 1 if self.reverse else 0

    @property
    def _layer_step(self) -> int:
        """The difference between a layer's number and the next one's, forwards."""
        return -1 if self.reverse else 1


def add(a: Gradient | None, b: Gradient | None) -> Gradient | None:
    """Return the sum of two gradients, where None is zero."""
    return b if a is None else a if b is None else a + b
