"""The loss and its gradients on one device's rows: what runs inside `shard_map`.

Every replica traces the loss on the rows of one microbatch (a block), differentiates its local value with respect to
local values, and leaves all reductions over replicas to its strategy's rule.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import collectives
from . import jaxpr as jx
from .layers import Program, slice_program
from .layout import Layout
from .model import Mean, Model, Replicated
from .parallel import DDP, Rule, Use, rule_of
from .strategy import Strategy

Metrics = dict[str, jax.Array]
Sums = dict[str, Mean]  # of each metric, over this device's rows


def metrics_of(sums: Sums) -> Metrics:
    """The means that sums over all rows stand for."""
    return {name: mean.total / mean.count for name, mean in sums.items()}


def block_key(key: jax.Array, step: jax.Array | int, block: jax.Array | int) -> jax.Array:
    """The key of one block of rows in one step: the same however the blocks are spread over devices."""
    return jax.random.fold_in(jax.random.fold_in(key, step), block)


class Access:
    """A rule applied to the leaves of a layout: casts, padding, and what follows from how a program uses a leaf."""

    def __init__(self, layout: Layout, rule: Rule, program: Program, microbatches: int):
        self.leaves, self.policy, self.whole_at_rest = layout.leaves, layout.policy, "params" not in rule.sharded
        # What ZeRO does not shard is replicated, as in plain data parallelism.
        self.rules = [DDP if rule.sharded and leaf.dim is None else rule for leaf in layout.leaves]
        self.last = [microbatches == 1 and uses == (True,) for uses in program.uses]

    def _use(self, index: int, sliced: bool) -> Use:
        leaf = self.leaves[index]
        return Use((leaf.dim or 0) - sliced, self.last[index], self.policy.reduced(leaf.dtype))

    def fetch(self, index: int, value: jax.Array, sliced: bool) -> jax.Array:
        """The whole leaf, or layer of it, in the compute dtype: cast before it is gathered."""
        leaf, use = self.leaves[index], self._use(index, sliced)
        value = self.rules[index].fetch(value.astype(self.policy.computed(leaf.dtype)), use)
        return value if self.whole_at_rest else leaf.unpad(value, use.dim)

    def give(self, index: int, cotangent: jax.Array, sliced: bool) -> jax.Array | None:
        """What is accumulated of one use's gradient; None for a frozen leaf."""
        leaf, use = self.leaves[index], self._use(index, sliced)
        if not leaf.trainable:
            return None
        return self.rules[index].give(leaf.pad(cotangent, use.dim), use)

    def finish(self, index: int, gradient: jax.Array) -> jax.Array:
        """The gradient that the update gets."""
        return self.rules[index].finish(gradient, self._use(index, False))


@dataclass(frozen=True)
class Local:
    """The loss of one model under one strategy, as a function of local values.

    `axes` are the mesh axes over which rows are spread and that have several devices, name -> size.
    """

    model: Model
    layout: Layout
    strategy: Strategy
    axes: dict[str, int]

    @property
    def replicas(self) -> int:
        """The number of devices that share the rows."""
        n = 1
        for size in self.axes.values():
            n *= size
        return n

    def program(self, variables: Any, batch: Any, key: jax.Array | None) -> tuple[Program, Any]:
        """The sliced loss for one microbatch (abstract or not), and the tree of its outputs."""
        policy = self.layout.policy
        params = [jax.ShapeDtypeStruct(leaf.shape, policy.computed(leaf.dtype)) for leaf in self.layout.leaves]

        def fun(leaves: Sequence[Any], rest: Any) -> Any:
            variables, batch, key = rest
            return self.model.call(
                jax.tree.unflatten(self.layout.tree, leaves), variables, batch, key, tuple(self.axes)
            )

        rest = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (variables, batch, key))
        whole = [leaf.dim == 0 for leaf in self.layout.leaves]
        program, out = slice_program(fun, params, rest, self.axes, whole, self.strategy.remat)
        if self.strategy.remat != "none" and not program.stacks:
            raise ValueError(
                f"remat={self.strategy.remat!r} applies to the layers of a layer stack and the model has none; scan "
                "the layers (nnx.scan, nn.scan, jax.lax.scan), or use remat='none' with jax.checkpoint in the model"
            )
        self._check(program, out, len(jax.tree.leaves(rest)))
        self._warn(program)
        return program, out

    def _warn(self, program: Program) -> None:
        """Say so where a low precision does not reach the matmuls."""
        low, name = self.layout.policy.compute, self.strategy.precision
        by_dtype = jx.matmuls(program.eqns)
        total = sum(flops for flops, _ in by_dtype.values())
        flops, where = by_dtype.get("float32", (0, ""))
        if low != jnp.float32 and flops > 0.5 * total:
            warnings.warn(
                f"precision={name!r}, but {flops / total:.0%} of the matmuls' operations are in float32, first at "
                f"{where}: an operand that is no parameter is float32 there; cast it (inputs, dtype= of the module) to "
                f"jnp.{low.name}",
                stacklevel=2,
            )

    def _check(self, program: Program, out: Any, inputs: int) -> None:
        """Raises ValueError where the result of a step would depend on how the rows are spread."""
        _, variables = out
        positions = jax.tree.unflatten(jax.tree.structure(out), list(range(len(jax.tree.leaves(out)))))
        if program.depends(program.leaves, positions[0]["loss"].count):
            raise ValueError(
                "the count of the loss's jp.Mean depends on the parameters; count rows or tokens of the batch"
            )
        if not self.axes:
            return
        fed = program.inputs[-inputs:][
            len(jax.tree.leaves(variables)) :
        ]  # batch and key differ from replica to replica
        for (path, _), at in zip(
            jax.tree_util.tree_leaves_with_path(variables), jax.tree.leaves(positions[1]), strict=True
        ):
            if program.depends(fed, at, frozenset(self.axes)):
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ValueError(
                    f"variable {name} is updated from this replica's rows alone, so replicas would drift apart; "
                    "average what it is computed from over jp.all_rows(...), or use Flax's own BatchNorm, which jaxpar "
                    "switches to all rows"
                )

    def split(self, batch: Any) -> Any:
        """Local rows [m r, ...] -> [m, r, ...] for m microbatches; marked leaves are repeated."""
        m = self.strategy.microbatches

        def leaf(x: Any) -> Any:
            if isinstance(x, Replicated):
                return jax.tree.map(lambda v: jnp.broadcast_to(v, (m, *v.shape)), x)
            return x.reshape(m, x.shape[0] // m, *x.shape[1:])

        return jax.tree.map(leaf, batch, is_leaf=lambda x: isinstance(x, Replicated))

    def evaluate(self, stored: Sequence[Any], variables: Any, batch: Any) -> Sums:
        """The sums of each metric over all rows, without dropout and without updates."""
        batches = self.split(batch)
        program, out = self.program(variables, jax.tree.map(lambda x: x[0], batches), None)
        access = Access(self.layout, rule_of(self.strategy), program, self.strategy.microbatches)

        def micro(batch: Any) -> Sums:
            outs, _ = program.forward(access, stored, jax.tree.leaves((variables, batch)))
            return jax.tree.unflatten(jax.tree.structure(out), outs)[0]

        return self.total(jax.tree.map(lambda x: x.sum(0), lax.map(micro, batches)))

    def gradients(
        self, stored: Sequence[Any], variables: Any, batch: Any, key: jax.Array, step: jax.Array, scale: jax.Array
    ) -> tuple[list[jax.Array], Any, Sums]:
        """Gradients as the update gets them (times `scale`), new variables, and the sums of each metric over all
        rows.
        """
        m = self.strategy.microbatches
        batches = self.split(batch)
        program, out = self.program(variables, jax.tree.map(lambda x: x[0], batches), key)
        access = Access(self.layout, rule_of(self.strategy), program, m)
        tree = jax.tree.structure(out)
        loss = jax.tree.unflatten(tree, list(range(tree.num_leaves)))[0]["loss"]
        first = collectives.index(tuple(self.axes)) * m
        keys = jax.vmap(lambda number: block_key(key, step, first + number))(jnp.arange(m))
        # A server divides by the count itself, when it has everybody's.
        seed = scale if self.strategy.server else scale / self._count(program, loss.count, variables, batches, keys)

        def micro(carry: Any, at: Any) -> tuple[Any, Sums]:
            variables, into = carry
            key, batch = at
            values = jax.tree.leaves((variables, batch, key))
            outs, tape = program.forward(access, stored, values, grad=True)
            into = program.backward(access, stored, tape, {loss.total: seed}, into)
            sums, variables = jax.tree.unflatten(tree, outs)
            return (variables, into), sums

        blocks = (keys, batches)
        one = jax.tree.map(lambda x: x[0], blocks)
        carry = (variables, [None] * len(stored))
        if m == 1:
            (variables, grads), sums = micro(carry, one)
        else:
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(micro, carry, one)[0][1])
            (variables, grads), sums = lax.scan(micro, (variables, zeros), blocks)
            sums = jax.tree.map(lambda x: x.sum(0), sums)
        finished = []
        for i, (leaf, grad) in enumerate(zip(self.layout.leaves, grads, strict=True)):
            if not leaf.trainable:
                continue
            if grad is None:  # the loss does not depend on it
                shape = self.layout.sharding(self.layout.spec(leaf, "grads")).shard_shape(
                    self.layout.stored(leaf, "grads")
                )
                finished.append(jnp.zeros(shape, self.layout.policy.reduced(leaf.dtype)))
            else:
                finished.append(access.finish(i, grad))
        return finished, variables, self.total(sums)

    def _count(self, program: Program, position: int, variables: Any, batches: Any, keys: jax.Array) -> jax.Array:
        """The loss's count over all rows, known before any backward runs."""
        count = program.only(position)
        if not program.depends(program.inputs, position):  # a plain mean: one a block
            return count(jax.tree.leaves((variables, jax.tree.map(lambda x: x[0], batches), keys[0]))) * (
                self.replicas * self.strategy.microbatches
            )
        counts = lax.map(lambda block: count(jax.tree.leaves((variables, *block))), (batches, keys))
        return collectives.all_reduce(counts.sum(), tuple(self.axes))

    def total(self, sums: Sums) -> Sums:
        """The sums over all replicas, in one all-reduce; with a server, this replica's, which it will add."""
        if self.strategy.server:
            return sums
        leaves, tree = jax.tree.flatten(sums)
        return jax.tree.unflatten(tree, list(collectives.all_reduce(jnp.stack(leaves), tuple(self.axes))))
