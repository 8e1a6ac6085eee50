"""A differentiable program of a sliced loss, which is traced forwards and backwards once, however often it runs.

    leaves  --weights_of-->  weights  --compute(inputs)-->  outputs        and what the backward needs (`Saved`)

Equations that depend on parameters alone (casts, transposes, 1 + scale, weight norm) run right after the fetch, outside
the differentiated function. Inside it, each would save a copy of the weights with the activations.

A `Unit` caches its traces: a `Forward` for each kind of inputs, and in it a backward for each kind of cotangents. The
saved values are chosen by `program/residuals.py`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from ..program import jaxpr as jx
from ..program.buffers import anchor
from ..program.residuals import Residuals, allowed, cheap, mark_row_sums, residuals_to_save, row_scales
from .halves import Halves, merge, pick
from .scatters import by_selects
from .tanh import by_exponentials


@dataclass(frozen=True)
class Unit:
    """One differentiable program: leaves -> weights, then weights and inputs -> outputs.

    Attributes:
      leaf_indices: the numbers of the parameter leaves that it reads.
      shapes: shapes and dtypes of the whole leaves, or of one layer of them.
      weights_of: `weights_of(whole leaves, inputs)` returns the weights.
      compute: `compute(weights, inputs)` returns the outputs.
      active_weights: which weights carry derivatives.
      active_inputs: which inputs carry derivatives.
      active: which outputs carry derivatives.
      held: which inputs the backward gets too, so that the forward need not save them.
      twice: whether each half of a backward recomputes what the forward has not saved.
      choice: a letter for each value that the forward would save: keep, offload or recompute it (`Residuals.kept`).
      policy: a `jax.checkpoint` policy for what it may save; None for everything that the backward reads.
      stores_saved: whether saved values are stored until the backward, in the stack of a loop over layers or in a
        pipeline's stash. If so, an operand that was gathered along the sequence for a matmul is not saved, but gathered
        again. In other units, XLA decides which values it stores.
    """

    leaf_indices: tuple[int, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    weights_of: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    compute: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    active_weights: tuple[bool, ...]
    active_inputs: tuple[bool, ...]
    active: tuple[bool, ...]
    held: tuple[bool, ...]
    twice: bool = False
    choice: str = "s"
    policy: Callable[..., Any] | None = None
    stores_saved: bool = False
    _forwards: "dict[Any, Forward]" = field(default_factory=dict, compare=False, repr=False)

    def value(self, full: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs, without derivatives."""
        return self.compute(self.weights_of(full, inputs), inputs)

    def forward(self, full: Sequence[Any], inputs: Sequence[Any]) -> "tuple[list[Any], Saved]":
        """Return the outputs, and the saved values; weights and held inputs are not among them."""
        weights = self.weights_of(full, inputs)
        kind = _trace_key(weights, inputs)
        if (forward := self._forwards.get(kind)) is None:
            forward = self._trace_forward(weights, inputs)
            # A trace that closed over tracers is valid inside the current trace alone.
            if not any(isinstance(x, Tracer) for x in forward.consts):
                self._forwards[kind] = forward
        results = forward.run(*forward.consts, *weights, *inputs)
        return results[: forward.num_outputs], Saved(results[forward.num_outputs :], forward)

    def _trace_forward(self, weights: Sequence[Any], inputs: Sequence[Any]) -> "Forward":
        """Trace the forward and its vjp, and choose what it saves."""
        trees = []

        # 1. Trace outputs and JAX's residuals (the leaves of the vjp function) as one program.
        def program(weights: Any, inputs: Any) -> Any:
            def fun(active_weights: Any, active_inputs: Any) -> tuple[Any, Any]:
                outputs = self.compute(
                    merge(self.active_weights, active_weights, weights),
                    merge(self.active_inputs, active_inputs, inputs),
                )
                return pick(self.active, outputs), outputs

            primals = pick(self.active_weights, weights), pick(self.active_inputs, inputs)
            _, pull, outputs = jax.vjp(fun, *primals, has_aux=True)
            # The vjp function is a pytree: its leaves are the residuals, its structure the backward.
            leaves, tree = jax.tree.flatten(pull)
            trees.append((tree, len(outputs)))
            return outputs, leaves

        flat, _ = jx.trace(program, list(weights), list(inputs))
        ((tree, num_outputs),) = trees
        residuals = flat.outvars[num_outputs:]
        weight_vars, input_vars = flat.invars[: len(weights)], flat.invars[len(weights) :]
        # A backward may run in another trace, and takes no tracer that this trace has closed over.
        fixed = [v for v, x in zip(flat.constvars, flat.consts, strict=True) if not isinstance(x, Tracer)]

        # 2. Choose smaller values from which the backward can recompute its residuals cheaply. It fetches the weights
        # that it reads in any case; without a policy, no other matrix is fetched to recompute a cheap value.
        read_vars = {v for v in residuals if not jx.is_literal(v)}
        # Vectors, such as the bias of a norm, may be fetched: they are no larger than one row of the value.
        is_vector = lambda v: math.prod(v.aval.shape) == max(v.aval.shape, default=1)
        readable_weights = weight_vars if self.policy else [v for v in weight_vars if v in read_vars or is_vector(v)]
        available = {*fixed, *pick(self.held, input_vars), *readable_weights}
        required = allowed(flat.eqns, residuals, available, self.policy) if self.policy else residuals
        scales = row_scales(flat.eqns)
        is_gather = lambda eqn: self.stores_saved and eqn.primitive.name == "tensor_all_gather"
        may_rerun = lambda eqn: cheap(eqn) or is_gather(eqn) or not scales.isdisjoint(eqn.outvars)
        to_save, _ = residuals_to_save(flat.eqns, required, available, weight_vars, may_rerun)
        choices = Residuals(flat.eqns, flat.invars, residuals, available, weight_vars, to_save)
        saved, is_on_host, recomputed = choices.kept(self.choice)
        if self.stores_saved:
            recomputed = mark_row_sums(recomputed, scales)

        # 3. Build the forward, which returns outputs and saved values, and the vjp function from the saved values.
        results = [*flat.outvars[:num_outputs], *saved]
        run = jx.run(jx.live(flat.eqns, results), [*flat.constvars, *flat.invars], results)
        operands = [*fixed, *weight_vars, *pick(self.held, input_vars)]
        recompute = jx.run(recomputed, [*operands, *saved], residuals)
        consts = [x for x in flat.consts if not isinstance(x, Tracer)]
        pull = lambda values, weights, held_inputs: jax.tree.unflatten(
            tree, recompute(*consts, *weights, *held_inputs, *values)
        )
        return Forward(num_outputs, flat.consts, run, pull, choices, tuple(is_on_host))

    def backward(
        self, inputs: Sequence[Any], saved: "Saved", cotangents: Sequence[Any]
    ) -> tuple[tuple[bool, ...], Callable[..., tuple[list[Any], list[Any]]]]:
        """Return which leaves the backward reads, and the backward as a function of them.

        Args:
          inputs: the inputs of the forward; those that are not held may be None.
          cotangents: one for each active output.

        Returns:
          A bool for each leaf, and `pull_back(whole leaves that it reads, after)`. This function returns the cotangents
          of all leaves (None for integers) and of the active inputs. Its large constants cannot exist before `after`.
        """
        operands = (pick(self.held, inputs), saved.values, list(cotangents))
        kind = _trace_key(*operands)
        if (backward := saved.forward.backwards.get(kind)) is None:
            backward = self._trace_backward(saved.forward, *operands)
            if not any(isinstance(x, Tracer) for x in backward[0].consts):
                saved.forward.backwards[kind] = backward
        flat, eqns, reads, tree = backward
        leaf_vars, operand_vars = flat.invars[: len(self.shapes)], flat.invars[len(self.shapes) :]

        def pull_back(full: Sequence[Any], after: jax.Array | None = None) -> tuple[list[Any], list[Any]]:
            # Large constants, such as the zeros of a scatter, get a dependency on `after`.
            anchored, anchors = (eqns, {}) if after is None else anchor(eqns, after)
            fun = jx.run(anchored, [*flat.constvars, *anchors, *pick(reads, leaf_vars), *operand_vars], flat.outvars)
            if self.policy:
                # The checkpoint keeps the backward one equation, which `1f1b-overlap` runs as a whole. Without it,
                # DeepSeek-V3 takes 12% longer.
                fun = jax.checkpoint(fun, prevent_cse=False)
            results = fun(*flat.consts, *anchors.values(), *full, *jax.tree.leaves(operands))
            return jax.tree.unflatten(tree, results)

        return reads, pull_back

    def halves(self, inputs: Sequence[Any], saved: "Saved", cotangents: Sequence[Any]) -> Halves:
        """Return the backward as two programs. The arguments are as in `backward`, and may be abstract."""
        operands = (pick(self.held, inputs), saved.values, list(cotangents))
        kind = ("halves", _trace_key(*operands))
        if (halves := saved.forward.backwards.get(kind)) is None:
            # Rematerialised calls are inlined, so that the cut may go through them.
            flat, eqns, _, _ = self._trace_backward(saved.forward, *operands, remats=True)
            floats = tuple(jnp.issubdtype(x.dtype, jnp.inexact) for x in self.shapes)
            halves = Halves.split(flat, eqns, floats, *map(len, operands[:2]), twice=self.twice)
            saved.forward.backwards[kind] = halves
        return halves

    def _trace_backward(
        self, forward: "Forward", held_inputs: Any, values: Any, cotangents: Any, remats: bool = False
    ) -> tuple[Any, ...]:
        """Return the backward's program, its equations, which leaves they read, and the tree of its results."""
        floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in self.shapes]

        def pull(full: Any, held_inputs: Any, values: Any, cotangents: Any) -> Any:
            inputs = merge(self.held, held_inputs, [None] * len(self.held))

            def active_weights(float_leaves: Any) -> tuple[Any, Any]:
                weights = self.weights_of(merge(floats, float_leaves, full), inputs)
                return pick(self.active_weights, weights), weights

            # outputs -> weights and inputs (recomputed from the saved values), then weights -> leaves
            _, pull_weights, weights = jax.vjp(active_weights, pick(floats, full), has_aux=True)
            ct_weights, ct_inputs = forward.pull(values, weights, held_inputs)(cotangents)
            (ct_full,) = pull_weights(ct_weights)
            return merge(floats, ct_full, [None] * len(full)), ct_inputs

        flat, results = jx.trace(pull, list(self.shapes), held_inputs, values, cotangents, remats=remats)
        # `pull` takes all leaves, but most backwards read only some of them: only these are fetched again.
        eqns = by_exponentials(oriented(flat.eqns, flat.outvars))
        eqns = jx.live(by_selects(eqns, dict(zip(flat.constvars, flat.consts, strict=True))), flat.outvars)
        read_vars = set(jx.free(eqns, flat.outvars))
        reads = tuple(v in read_vars for v in flat.invars[: len(self.shapes)])
        return flat, eqns, reads, jax.tree.structure(results)


@dataclass(frozen=True, eq=False)
class Forward:
    """A unit's forward for inputs of one kind.

    Attributes:
      num_outputs: the number of the unit's outputs.
      consts: the arrays that it closes over.
      run: `run(*consts, *weights, *inputs)` returns the outputs, and then the saved values.
      pull: `pull(saved, weights, held inputs)` returns the vjp function: from cotangents of the active outputs to
        cotangents of the active weights and of the active inputs.
      residuals: the saved values, and those that could be saved.
      host: which saved values wait on the host.
      backwards: the traced backwards, whole and in halves, by the kind of their operands.
    """

    num_outputs: int
    consts: tuple[Any, ...]
    run: Callable[..., list[Any]]
    pull: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Callable[..., Any]]
    residuals: Residuals
    host: tuple[bool, ...]
    backwards: dict[Any, Any] = field(default_factory=dict, repr=False)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["forward"])
@dataclass(frozen=True)
class Saved:
    """The values that one run of a forward saved for its backward, or the runs of all layers, stacked."""

    values: list[Any]
    forward: Forward

    def offloaded(self) -> "Saved":
        """Move the values that wait on the host there; scalars and random keys stay on the device.

        CPUs have one memory. There it is a `device_put` in the trace, and nothing in the compiled program.
        """
        is_movable = lambda x: x.ndim > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        pairs = zip(self.values, self.forward.host, strict=True)
        values = [jax.device_put(x, jax.memory.Space.Host) if host and is_movable(x) else x for x, host in pairs]
        return dataclasses.replace(self, values=values)

    @property
    def without_host_values(self) -> "Saved":
        """The saved values on the device, with None for each value that waits on the host."""
        pairs = zip(self.values, self.forward.host, strict=True)
        return dataclasses.replace(self, values=[None if host else x for x, host in pairs])

    def copied_from_host(self, layer: jax.Array) -> list[Any]:
        """Copy one layer's values from the host to the device; None for each value that is on the device."""
        copy = lambda x: jax.device_put(lax.dynamic_index_in_dim(x, layer, keepdims=False), jax.memory.Space.Device)
        return [copy(x) if host else None for x, host in zip(self.values, self.forward.host, strict=True)]

    def with_host_values(self, host_values: list[Any]) -> "Saved":
        """Fill in the values that `copied_from_host` returned; inverse of `without_host_values`."""
        pairs = zip(self.values, host_values, strict=True)
        return dataclasses.replace(self, values=[x if copied is None else copied for x, copied in pairs])


def _trace_key(*arrays: Sequence[Any]) -> Any:
    """Return what a trace depends on: abstract arrays, and the mesh whose axes it may name."""
    # A weak type promotes in another way, and so makes another program.
    leaves = ((jnp.shape(x), x.dtype, getattr(x, "weak_type", False)) for xs in arrays for x in xs)
    return (jax.sharding.get_abstract_mesh(), *map(len, arrays), *leaves)


def oriented(eqns: Sequence[Any], outvars: Iterable[Any] = ()) -> list[Any]:
    """Write every `transpose(dot_general(a, b))` that swaps the operands' dims as `dot_general(b, a)`.

    JAX computes the gradient of `x @ w` as the transpose of `g^T x`. The product `x^T g` has the same sums without a
    transposed copy. XLA's CPU backend keeps that copy, and it slows the product itself down there.

    A product stays if another equation reads it too, or if it is among `outvars`. Products without a reader remain for
    `jx.live` to drop.
    """
    readers = jx.readers(eqns, outvars)
    # A product with a second reader would be computed twice, in both orientations.
    products = {eqn.outvars[0]: eqn for eqn in eqns if eqn.primitive.name == "dot_general"}

    def orient(eqn: Any) -> Any:
        operand = eqn.invars[0] if eqn.primitive.name == "transpose" else None
        if operand is None or jx.is_literal(operand) or operand not in products or len(readers[operand]) > 1:
            return eqn
        product = products[operand]
        (a_sums, b_sums), (a_batch, b_batch) = product.params["dimension_numbers"]
        num_batch = len(a_batch)
        # A product's dims are [batch, free dims of a, free dims of b]: the transpose must swap the last two groups.
        a_dims, b_dims = (
            v.aval.ndim - len(sums) - num_batch for v, sums in zip(product.invars, (a_sums, b_sums), strict=True)
        )
        if tuple(eqn.params["permutation"]) != (
            *range(num_batch),
            *range(num_batch + a_dims, num_batch + a_dims + b_dims),
            *range(num_batch, num_batch + a_dims),
        ):
            return eqn
        # Swapping the operands swaps their dimension numbers and their precisions.
        params = {**product.params, "dimension_numbers": ((b_sums, a_sums), (b_batch, a_batch))}
        if isinstance(precision := params["precision"], tuple):
            params["precision"] = precision[::-1]
        return product.replace(invars=product.invars[::-1], outvars=list(eqn.outvars), params=params)

    return [orient(eqn) for eqn in eqns]
