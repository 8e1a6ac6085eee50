"""The pieces of a sliced loss, segments and layer stacks, run forwards and backwards.

A loss whose layers are scanned (`nnx.scan`, `nn.scan`, `lax.scan`) becomes

    segment | stack | segment | stack | ... | segment        (prologue | layers | epilogue for one stack)

where a stack is a `scan` that slices parameters, and a segment is whatever runs between two stacks. Every piece
*fetches* its parameters when it runs, again when its backward runs, and *gives* their gradients there: a strategy
is a choice of those two functions. So parameters that live sharded are whole for one layer at a time, and gradients
are reduced inside the backward loop.

Equations that depend on parameters alone (casts, transposes, 1 + scale, weight norm) run right after the fetch, outside
the differentiated function: otherwise each would leave a copy of the weights among the saved activations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax


class Access(Protocol):
    """How a strategy moves one parameter leaf: `index` is the leaf, `sliced` whether it is one layer of a stack."""

    def fetch(self, index: int, value: jax.Array, sliced: bool) -> jax.Array:
        """The whole leaf in the compute dtype, from what this device stores of it."""
        ...

    def give(self, index: int, cotangent: jax.Array, sliced: bool) -> jax.Array:
        """What this device keeps of the gradient of one use of the leaf."""
        ...


@dataclass(frozen=True)
class Unit:
    """One differentiable program: leaves -> weights (`pre`), then weights and inputs -> outputs (`rest`).

    `linear` and `active` say which inputs and outputs carry derivatives; `fixed` inputs may be read by `pre`.
    """

    leaves: tuple[int, ...]
    pre: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    rest: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    linear: tuple[bool, ...]
    active: tuple[bool, ...]

    def value(self, full: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """The outputs, without derivatives."""
        return self.rest(self.pre(full, inputs), inputs)

    def forward(self, full: Sequence[Any], inputs: Sequence[Any], kept: Sequence[Any]) -> tuple[list[Any], Saved]:
        """Outputs, and what the backward needs besides the weights and the inputs in `kept`."""
        weights = self.pre(full, inputs)

        def fun(weights: Any, linear: Any) -> tuple[Any, Any]:
            outs = self.rest(weights, _merge(self.linear, linear, inputs))
            return _pick(self.active, outs), outs

        _, pull, outs = jax.vjp(fun, weights, _pick(self.linear, inputs), has_aux=True)
        leaves, tree = jax.tree.flatten(pull)
        known = [*weights, *kept]
        where = tuple(next((i for i, k in enumerate(known) if k is leaf), None) for leaf in leaves)
        return outs, Saved([leaf for leaf, at in zip(leaves, where, strict=True) if at is None], tree, where)

    def backward(
        self, full: Sequence[Any], inputs: Sequence[Any], kept: Sequence[Any], saved: Saved, cotangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Cotangents of the leaves, and of the linear inputs, from those of the active outputs."""
        floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in full]
        pre = functools.partial(lambda diff: self.pre(_merge(floats, diff, full), inputs))
        weights, pull_pre = jax.vjp(pre, _pick(floats, full))
        pull = saved.pull([*weights, *kept])
        ct_weights, ct_inputs = pull(list(cotangents))
        (ct_full,) = pull_pre(ct_weights)
        return _merge(floats, ct_full, [None] * len(full)), ct_inputs


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["tree", "where"])
@dataclass(frozen=True)
class Saved:
    """The residuals of one `jax.vjp` that are neither weights nor kept inputs, and how to put them together again."""

    values: list[Any]
    tree: Any
    where: tuple[int | None, ...]

    def pull(self, known: Sequence[Any]) -> Callable[..., Any]:
        """The vjp function, with `known` (weights, kept inputs) in their places."""
        values = iter(self.values)
        return jax.tree.unflatten(self.tree, [next(values) if at is None else known[at] for at in self.where])


@dataclass(frozen=True)
class Segment:
    """A unit that runs once; `inputs` and `outputs` are variables of the whole program."""

    unit: Unit
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    stack: bool = False

    def forward(self, access: Access, leaves: Sequence[Any], inputs: list[Any], grad: bool) -> tuple[list[Any], Any]:
        """Outputs, and what `backward` needs (None without `grad`)."""
        full = [access.fetch(i, leaves[i], False) for i in self.unit.leaves]
        if not (grad and any(self.unit.active)):
            return self.unit.value(full, inputs), None
        return self.unit.forward(full, inputs, inputs)

    def backward(
        self, access: Access, leaves: Sequence[Any], inputs: list[Any], saved: Any, cotangents: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Gradients as given, one for each leaf of the unit, and cotangents of the linear inputs."""
        mine = [leaves[i] for i in self.unit.leaves]
        # Fetched again, and not before the cotangents are there: nothing whole survives from the forward.
        mine, cotangents = lax.optimization_barrier((mine, cotangents))
        full = [access.fetch(i, x, False) for i, x in zip(self.unit.leaves, mine, strict=True)]
        ct_full, ct_inputs = self.unit.backward(full, inputs, inputs, saved, cotangents)
        return [_give(access, i, ct, False) for i, ct in zip(self.unit.leaves, ct_full, strict=True)], ct_inputs


@dataclass(frozen=True)
class Stack:
    """A unit that runs once a layer: inputs are consts + carry + xs, outputs carry + ys, as in `lax.scan`."""

    unit: Unit
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    consts: int
    carry: int
    length: int
    reverse: bool
    stack: bool = True

    def _parts(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        n, k = self.consts, self.carry
        return list(values[:n]), list(values[n : n + k]), list(values[n + k :])

    def forward(self, access: Access, leaves: Sequence[Any], inputs: list[Any], grad: bool) -> tuple[list[Any], Any]:
        """Outputs, and what `backward` needs of each layer, stacked (None without `grad`)."""
        consts, init, xs = self._parts(inputs)

        def layer(carry: list[Any], x: tuple[list[Any], list[Any]]) -> tuple[list[Any], Any]:
            shards, xs = x
            full = [access.fetch(i, s, True) for i, s in zip(self.unit.leaves, shards, strict=True)]
            if grad:
                outs, saved = self.unit.forward(full, [*consts, *carry, *xs], [*consts, *xs])
            else:
                outs, saved = self.unit.value(full, [*consts, *carry, *xs]), None
            return outs[: self.carry], (outs[self.carry :], saved)

        shards = [leaves[i] for i in self.unit.leaves]
        carry, (ys, saved) = lax.scan(layer, init, (shards, xs), length=self.length, reverse=self.reverse)
        return [*carry, *ys], saved

    def backward(
        self, access: Access, leaves: Sequence[Any], inputs: list[Any], saved: Any, cotangents: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Gradients as given, stacked, one for each leaf of the unit, and cotangents of the linear inputs."""
        consts, _, xs = self._parts(inputs)
        linear_consts, linear_carry, _ = self._parts(self.unit.linear)
        n_const, n_carry = sum(linear_consts), sum(linear_carry)

        def layer(carry: Any, x: Any) -> tuple[Any, Any]:
            ct_carry, ct_consts = carry
            saved, shards, xs, ct_ys = x
            full = [access.fetch(i, s, True) for i, s in zip(self.unit.leaves, shards, strict=True)]
            kept = [*consts, *xs]
            # The carry's place is only for its count: its value, where the backward needs it, is among `saved`.
            args = [*consts, *([None] * self.carry), *xs]
            ct_full, ct_in = self.unit.backward(full, args, kept, saved, [*ct_carry, *ct_ys])
            ct_consts = [a + b for a, b in zip(ct_consts, ct_in[:n_const], strict=True)]
            given = [_give(access, i, ct, True) for i, ct in zip(self.unit.leaves, ct_full, strict=True)]
            return (ct_in[n_const : n_const + n_carry], ct_consts), (given, ct_in[n_const + n_carry :])

        zeros = [jnp.zeros_like(c) for c in _pick(linear_consts, consts)]
        shards = [leaves[i] for i in self.unit.leaves]
        (ct_carry, ct_consts), (given, ct_xs) = lax.scan(
            layer,
            (cotangents[:n_carry], zeros),
            (saved, shards, xs, cotangents[n_carry:]),
            length=self.length,
            reverse=not self.reverse,
        )
        return given, [*ct_consts, *ct_carry, *ct_xs]


def _give(access: Access, index: int, cotangent: Any, sliced: bool) -> Any:
    return None if cotangent is None else access.give(index, cotangent, sliced)


def _pick(mask: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    return [v for v, take in zip(values, mask, strict=True) if take]


def _merge(mask: Sequence[bool], picked: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    it = iter(picked)
    return [next(it) if take else other for take, other in zip(mask, others, strict=True)]
