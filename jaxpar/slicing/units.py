"""One differentiable program of a sliced loss: traced forwards and backwards once, however often it runs.

Equations that depend on parameters alone (casts, transposes, 1 + scale, weight norm) run right after the fetch, outside
the differentiated function: otherwise each would leave a copy of the weights among the saved activations.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from ..program import jaxpr as jx
from ..program.buffers import anchor
from ..program.residuals import Residuals, allowed, cheap, residuals_to_save
from .halves import Halves, merge, pick


@dataclass(frozen=True)
class Unit:
    """One differentiable program: leaves -> weights (`pre`), then weights and inputs -> outputs (`rest`).

    `shapes` are those of the whole leaves; `moving`, `linear` and `active` say which weights, inputs and outputs carry
    derivatives; `held` which inputs the backward gets too, so that the forward need not save them; `twice` whether each
    half of a backward recomputes what the forward has not saved; `choice` what becomes of each value that it would save
    (`Residuals.kept`); `policy`, as of `jax.checkpoint`, what it may save, None for all that the backward reads;
    `gathers_again` whether what is gathered along a sequence for a matmul is gathered again for its backward, not kept.
    """

    leaves: tuple[int, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    pre: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    rest: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    moving: tuple[bool, ...]
    linear: tuple[bool, ...]
    active: tuple[bool, ...]
    held: tuple[bool, ...]
    twice: bool = False
    choice: str = "s"
    policy: Callable[..., Any] | None = None
    gathers_again: bool = False
    _forwards: "dict[Any, Forward]" = field(default_factory=dict, compare=False, repr=False)

    def value(self, full: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """The outputs, without derivatives."""
        return self.rest(self.pre(full, inputs), inputs)

    def forward(self, full: Sequence[Any], inputs: Sequence[Any]) -> "tuple[list[Any], Saved]":
        """Outputs, and what the backward needs besides the weights and the inputs that are held."""
        weights = self.pre(full, inputs)
        kind = _kind(weights, inputs)
        if (made := self._forwards.get(kind)) is None:
            made = self._traced(weights, inputs)
            if not any(isinstance(x, Tracer) for x in made.consts):
                self._forwards[kind] = made
        outs = made.run(*made.consts, *weights, *inputs)
        return outs[: made.outs], Saved(outs[made.outs :], made)

    def _traced(self, weights: Sequence[Any], inputs: Sequence[Any]) -> "Forward":
        trees = []

        def program(weights: Any, inputs: Any) -> Any:
            def fun(moving: Any, linear: Any) -> tuple[Any, Any]:
                outs = self.rest(merge(self.moving, moving, weights), merge(self.linear, linear, inputs))
                return pick(self.active, outs), outs

            _, pull, outs = jax.vjp(fun, pick(self.moving, weights), pick(self.linear, inputs), has_aux=True)
            leaves, tree = jax.tree.flatten(pull)
            trees.append((tree, len(outs)))
            return outs, leaves

        flat, _ = jx.trace(program, list(weights), list(inputs))
        ((tree, n),) = trees
        residuals = flat.outvars[n:]
        mine, given = flat.invars[: len(weights)], flat.invars[len(weights) :]
        fixed = [v for v, x in zip(flat.constvars, flat.consts, strict=True) if not isinstance(x, Tracer)]
        read = {v for v in residuals if not jx.is_literal(v)}
        # Of the weights those that the backward reads in any case: no other is fetched for what is cheap.
        known = {*fixed, *pick(self.held, given), *(mine if self.policy else read & {*mine})}
        wanted = allowed(flat.eqns, residuals, known, self.policy) if self.policy else residuals
        may_rerun = lambda eqn: cheap(eqn) or (self.gathers_again and eqn.primitive.name == "tensor_gather")
        keep, _ = residuals_to_save(flat.eqns, wanted, known, mine, may_rerun)
        found = Residuals(flat.eqns, flat.invars, residuals, known, mine, keep)
        saved, host, again = found.kept(self.choice)
        before = [*flat.constvars, *flat.invars]
        run = jx.run(jx.live(flat.eqns, [*flat.outvars[:n], *saved]), before, [*flat.outvars[:n], *saved])
        there = [*fixed, *mine, *pick(self.held, given)]
        recompute = jx.run(again, [*there, *saved], residuals)
        consts = [x for x in flat.consts if not isinstance(x, Tracer)]
        pull = lambda values, weights, held: jax.tree.unflatten(tree, recompute(*consts, *weights, *held, *values))
        return Forward(n, flat.consts, run, pull, found, tuple(host))

    def backward(
        self, inputs: Sequence[Any], saved: "Saved", cotangents: Sequence[Any]
    ) -> tuple[tuple[bool, ...], Callable[..., tuple[list[Any], list[Any]]]]:
        """Which leaves the backward reads, and the backward as `run(those leaves, after)`.

        `run` returns the cotangents of all leaves (None for integers) and of the linear inputs, from those of the
        active outputs; its large constants cannot exist before `after`. `inputs` may lack (be None) what is not held.
        """
        rest = (pick(self.held, inputs), saved.values, list(cotangents))
        kind = _kind(*rest)
        if (made := saved.forward.backwards.get(kind)) is None:
            made = self._pulled(saved.forward, *rest)
            if not any(isinstance(x, Tracer) for x in made[0].consts):
                saved.forward.backwards[kind] = made
        flat, eqns, reads, tree = made
        leaves, others = flat.invars[: len(self.shapes)], flat.invars[len(self.shapes) :]

        def run(full: Sequence[Any], after: jax.Array | None = None) -> tuple[list[Any], list[Any]]:
            hinted, extra = (eqns, {}) if after is None else anchor(eqns, after)
            fun = jx.run(hinted, [*flat.constvars, *extra, *pick(reads, leaves), *others], flat.outvars)
            if self.policy:  # one equation, which `1f1b-overlap` runs as a whole: opened, DeepSeek-V3 takes 12% longer
                fun = jax.checkpoint(fun, prevent_cse=False)
            outs = fun(*flat.consts, *extra.values(), *full, *jax.tree.leaves(rest))
            return jax.tree.unflatten(tree, outs)

        return reads, run

    def halves(self, inputs: Sequence[Any], saved: "Saved", cotangents: Sequence[Any]) -> Halves:
        """The backward in two programs; the arguments are those of `backward`, and may be abstract."""
        rest = (pick(self.held, inputs), saved.values, list(cotangents))
        kind = ("halves", _kind(*rest))
        if (made := saved.forward.backwards.get(kind)) is None:
            flat, eqns, _, _ = self._pulled(saved.forward, *rest, remats=True)
            floats = tuple(jnp.issubdtype(x.dtype, jnp.inexact) for x in self.shapes)
            made = Halves.of(flat, eqns, floats, *map(len, rest), twice=self.twice)
            saved.forward.backwards[kind] = made
        return made

    def _pulled(
        self, forward: "Forward", held: Any, values: Any, cotangents: Any, remats: bool = False
    ) -> tuple[Any, ...]:
        """The backward's program, its equations, which leaves they read, and the tree of its results."""
        floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in self.shapes]

        def pull(full: Any, held: Any, values: Any, cotangents: Any) -> Any:
            inputs = merge(self.held, held, [None] * len(self.held))

            def moving(diff: Any) -> tuple[Any, Any]:
                weights = self.pre(merge(floats, diff, full), inputs)
                return pick(self.moving, weights), weights

            _, pull_pre, weights = jax.vjp(moving, pick(floats, full), has_aux=True)
            ct_weights, ct_inputs = forward.pull(values, weights, held)(cotangents)
            (ct_full,) = pull_pre(ct_weights)
            return merge(floats, ct_full, [None] * len(full)), ct_inputs

        flat, out = jx.trace(pull, list(self.shapes), held, values, cotangents, remats=remats)
        eqns = jx.live(oriented(flat.eqns, flat.outvars), flat.outvars)
        read = set(jx.free(eqns, flat.outvars))
        reads = tuple(v in read for v in flat.invars[: len(self.shapes)])
        return flat, eqns, reads, jax.tree.structure(out)


@dataclass(frozen=True, eq=False)
class Forward:
    """A unit's forward for inputs of one kind.

    Attributes:
      outs: how many outputs it has.
      consts: the arrays that it closes over.
      run: `run(*consts, *weights, *inputs)`, outputs and then what is saved.
      pull: `pull(saved, weights, held inputs)`, the vjp function from cotangents of the active outputs to those of the
        weights and of the linear inputs.
      residuals: what is saved, and what could be.
      host: which of what is saved waits on the host.
      backwards: the backwards of it that were traced, whole ones and those in halves.
    """

    outs: int
    consts: tuple[Any, ...]
    run: Callable[..., list[Any]]
    pull: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Callable[..., Any]]
    residuals: Residuals
    host: tuple[bool, ...]
    backwards: dict[Any, Any] = field(default_factory=dict, repr=False)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["forward"])
@dataclass(frozen=True)
class Saved:
    """What one run of a forward left for its backward."""

    values: list[Any]
    forward: Forward

    def sent(self) -> "Saved":
        """The same with what waits on the host there; scalars and keys stay. On CPUs, which have one memory, it is an
        identity: a `device_put` of the trace, and nothing in the program.
        """
        moves = lambda x: x.ndim > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        pairs = zip(self.values, self.forward.host, strict=True)
        values = [jax.device_put(x, jax.memory.Space.Host) if host and moves(x) else x for x, host in pairs]
        return dataclasses.replace(self, values=values)

    @property
    def here(self) -> "Saved":
        """The same without what waits on the host: None in its place."""
        pairs = zip(self.values, self.forward.host, strict=True)
        return dataclasses.replace(self, values=[None if host else x for x, host in pairs])

    def fetched(self, number: jax.Array) -> list[Any]:
        """Of what all layers left on the host, that of one, on the device; None in the place of the rest."""
        fetch = lambda x: jax.device_put(lax.dynamic_index_in_dim(x, number, keepdims=False), jax.memory.Space.Device)
        return [fetch(x) if host else None for x, host in zip(self.values, self.forward.host, strict=True)]

    def beside(self, fetched: list[Any]) -> "Saved":
        """What is `here` and what was `fetched`."""
        pairs = zip(self.values, fetched, strict=True)
        return dataclasses.replace(self, values=[x if y is None else y for x, y in pairs])


def _kind(*arrays: Sequence[Any]) -> Any:
    """What a trace depends on: abstract arrays, and the mesh whose axes it may name."""
    leaves = ((jnp.shape(x), x.dtype, getattr(x, "weak_type", False)) for xs in arrays for x in xs)
    return (jax.sharding.get_abstract_mesh(), *map(len, arrays), *leaves)


def oriented(eqns: Sequence[Any], outvars: Iterable[Any] = ()) -> list[Any]:
    """The equations with every `transpose(dot_general(a, b))` that swaps the operands' dims as `dot_general(b, a)`.

    JAX computes the gradient of `x @ w` as the transpose of `g^T x`; `x^T g` is the same sums without a transposed
    copy, which XLA's CPU backend keeps, and which makes the product itself slow there.

    Products that something else reads as well, or that are among `outvars`, stay. Those that nobody reads any more are
    left for `jx.live` to drop.
    """
    reads = collections.Counter(v for eqn in eqns for v in eqn.invars if not jx.is_literal(v))
    reads.update(v for v in outvars if not jx.is_literal(v))
    products = {eqn.outvars[0]: eqn for eqn in eqns if eqn.primitive.name == "dot_general"}

    def one(eqn: Any) -> Any:
        given = eqn.invars[0] if eqn.primitive.name == "transpose" else None
        if given is None or jx.is_literal(given) or given not in products or reads[given] > 1:
            return eqn
        product = products[given]
        (a_sums, b_sums), (a_batch, b_batch) = product.params["dimension_numbers"]
        batch = len(a_batch)
        a, b = (v.aval.ndim - len(sums) - batch for v, sums in zip(product.invars, (a_sums, b_sums), strict=True))
        if tuple(eqn.params["permutation"]) != (
            *range(batch),
            *range(batch + a, batch + a + b),
            *range(batch, batch + a),
        ):
            return eqn
        params = {**product.params, "dimension_numbers": ((b_sums, a_sums), (b_batch, a_batch))}
        if isinstance(precision := params["precision"], tuple):  # one for each operand
            params["precision"] = precision[::-1]
        return product.replace(invars=product.invars[::-1], outvars=list(eqn.outvars), params=params)

    return [one(eqn) for eqn in eqns]
