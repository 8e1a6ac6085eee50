"""The loss and its gradients on one device's rows: what runs inside `shard_map`.

Every replica traces the loss on the rows of one microbatch (a block), differentiates its local value with respect to
local values, and leaves all reductions over replicas to its strategy's rule.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import collectives
from ..jaxprs import jaxpr as jx
from ..layout.layout import Layout
from ..model.model import Mean, Model, Replicated, couplings
from ..parallel import rule_of
from ..parallel.access import Access
from ..parallel.pipeline.cut import shareable
from ..parallel.pipeline.schedules import Schedule
from ..parallel.pipeline.ticks import Pipeline
from ..parallel.tensor import RULES, localise
from ..rows import check_coupling
from ..slicing.program import Program
from ..slicing.slicer import positions, slice_program
from ..slicing.stacks import described
from ..strategy import Strategy
from .refusals import check_pipe, check_replicas, warn_gathered, warn_precision

_LARGE = 1 << 20  # bytes
Metrics = dict[str, jax.Array]
Sums = dict[str, Mean]  # of each metric, over this device's rows


def metrics_of(sums: Sums) -> Metrics:
    """The means that sums over all rows stand for."""
    return {name: mean.total / mean.count for name, mean in sums.items()}


def block_key(key: jax.Array, step: jax.Array | int, block: jax.Array | int) -> jax.Array:
    """The key of one block of rows in one step: the same however the blocks are spread over devices."""
    return jax.random.fold_in(jax.random.fold_in(key, step), block)


@dataclass(frozen=True)
class Local:
    """The loss of one model under one strategy, as a function of local values.

    `axes` are the mesh axes over which rows are spread and that have several devices, name -> size. With a pipeline,
    `schedule` is its schedule. `gathered` has what tensor ranks gather for want of a rule: where, and bytes.
    """

    model: Model
    layout: Layout
    strategy: Strategy
    axes: dict[str, int]
    schedule: Schedule | None = None
    gathered: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    _programs: dict[Any, tuple[Program, Any]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def replicas(self) -> int:
        """The number of devices that share the rows."""
        n = 1
        for size in self.axes.values():
            n *= size
        return n

    @property
    def ranks(self) -> int:
        """The number of tensor ranks."""
        return self.layout.mesh.shape["tensor"]

    @property
    def traced_axes(self) -> dict[str, int]:
        """The mesh axes that a traced program may name: what it is on one rank of `tensor`."""
        return self.axes | ({"tensor": self.ranks} if self.ranks > 1 else {})

    def program(self, variables: Any, batch: Any, key: jax.Array | None) -> tuple[Program, Any]:
        """The sliced loss for one microbatch (abstract or not), and the tree of its outputs. Sliced once."""
        leaves, tree = jax.tree.flatten((variables, batch, key))
        kind = (tree, *((jnp.shape(x), x.dtype) for x in leaves))
        if kind not in self._programs:
            self._programs[kind] = self._slice(variables, batch, key)
        return self._programs[kind]

    def _slice(self, variables: Any, batch: Any, key: jax.Array | None) -> tuple[Program, Any]:
        policy = self.layout.policy
        kept, units = self.layout.kept, self.layout.kept.units
        params = [jax.ShapeDtypeStruct(leaf.logical, policy.computed(leaf.dtype)) for leaf in units]

        def fun(leaves: Sequence[Any], rest: Any, axes: Any = self.axes) -> Any:
            variables, batch, key = rest
            return self.model.call(kept.of_units(leaves), variables, batch, key, tuple(axes))

        rest = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (variables, batch, key))
        sharded = [None if leaf.dim is None else leaf.dim - leaf.stage for leaf in units]
        own = [leaf.layers is not None for leaf in units]
        logical: list[jx.Flat] = []

        def rewrite(flat: jx.Flat) -> jx.Flat:
            logical.append(flat)
            return self._rewrite(flat)

        with couplings() as noted:
            program, out = slice_program(
                fun,
                params,
                rest,
                self.traced_axes,
                sharded,
                self.strategy.remat,
                own,
                kept.families,
                rewrite,
                self.strategy.sequence,
            )
        program = replace(program, coupled=bool(noted) or jx.communicates(program.eqns))
        self.layout.loops.update(described(program, kept))
        if self.schedule is not None:
            check_pipe(program, out, self.layout, self.strategy)
        warn_gathered(program, self.layout)
        if self.strategy.remat != "none" and not program.stacks:
            raise ValueError(
                f"remat={self.strategy.remat!r} applies to the layers of a layer stack and the model has none; scan "
                "the layers (nnx.scan, nn.scan, jax.lax.scan), or use remat='none' with jax.checkpoint in the model"
            )
        check_replicas(program, out, len(jax.tree.leaves(rest)), frozenset(self.axes))
        warn_precision(program, self.layout.policy.compute, self.strategy.precision)
        known = any(kind[0] == jax.tree.structure((variables, batch, key)) for kind in self._programs)
        if not known and self.model.rows is None and self.replicas * self.strategy.microbatches > 1:
            again = lambda rest, axes: jx.trace(partial(fun, axes=axes), params, rest, axes=self.traced_axes | axes)[0]
            check_coupling(logical[0], out, rest, again, self.axes, self.strategy)
        return program, out

    def _rewrite(self, flat: jx.Flat) -> jx.Flat:
        """The program of one tensor rank."""
        if self.ranks == 1:
            return flat
        units = self.layout.kept.units
        dims = [None if leaf.tensor is None else leaf.tensor - leaf.stage for leaf in units]
        fun, gathered = localise(flat, dims, self.layout.ruled, self.ranks, self.strategy.sequence, RULES)
        inputs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in flat.invars]
        parts = [jax.ShapeDtypeStruct(leaf.local.logical, x.dtype) for leaf, x in zip(units, inputs, strict=False)]
        local, _ = jx.trace(fun, *parts, *inputs[len(parts) :], axes=self.traced_axes)
        self.gathered.update(gathered)
        for place, size in gathered.items():
            if size >= _LARGE:
                warnings.warn(
                    f"tensor={self.ranks}: {place} has no rule for split values and gathers {size:,} bytes on every "
                    "rank; leave the leaves that it uses whole (rules={...: None}), or wrap it by jp.local_kernel",
                    stacklevel=2,
                )
        return local

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
        access = Access(self.layout, rule_of(self.strategy), program, self.strategy)
        stored = self.layout.kept.unit_values(stored)
        if self.schedule is not None:
            pipeline = self.pipeline(program, out, access, stored, variables, batches, None, None)
            return self._piped(replace(pipeline, schedule=self.schedule.forwards), out)[1]

        def micro(batch: Any) -> Sums:
            outs, _ = program.forward(access, stored, jax.tree.leaves((variables, batch)))
            return jax.tree.unflatten(jax.tree.structure(out), outs)[0]

        return self.total(jax.tree.map(lambda x: x.sum(0), lax.map(micro, batches)))

    def gradients(
        self, stored: Sequence[Any], variables: Any, batch: Any, key: jax.Array, step: jax.Array, scale: jax.Array
    ) -> tuple[list[jax.Array | None], Any, Sums]:
        """Gradients as the update gets them (times `scale`), new variables, and the sums of each metric over all
        rows.
        """
        m = self.strategy.microbatches
        batches = self.split(batch)
        program, out = self.program(variables, jax.tree.map(lambda x: x[0], batches), key)
        access = Access(self.layout, rule_of(self.strategy), program, self.strategy)
        stored = self.layout.kept.unit_values(stored)
        tree, loss = jax.tree.structure(out), positions(out)[0]["loss"]
        first = collectives.index(tuple(self.axes)) * m
        keys = jax.vmap(lambda number: block_key(key, step, first + number))(jnp.arange(m))
        seed = scale / self._count(program, loss.count, variables, batches, keys)

        def micro(carry: Any, at: Any) -> tuple[Any, Sums]:
            variables, into = carry
            key, batch = at
            values = jax.tree.leaves((variables, batch, key))
            outs, tape = program.forward(access, stored, values, grad=True)
            into = program.backward(access, stored, tape, {loss.total: seed}, into)
            sums, variables = jax.tree.unflatten(tree, outs)
            return (variables, into), sums

        blocks = (keys, batches)
        if self.schedule is not None:
            pipeline = self.pipeline(program, out, access, stored, variables, batches, keys, {loss.total: seed})
            grads, sums = self._piped(pipeline, out)
            return self.finished(access, grads), variables, sums
        one = jax.tree.map(lambda x: x[0], blocks)
        carry = (variables, [None] * len(stored))
        if m == 1:
            (variables, grads), sums = micro(carry, one)
        else:
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(micro, carry, one)[0][1])
            (variables, grads), sums = lax.scan(micro, (variables, zeros), blocks)
            sums = jax.tree.map(lambda x: x.sum(0), sums)
        return self.finished(access, grads), variables, self.total(sums)

    def pipeline(
        self,
        program: Program,
        out: Any,
        access: Any,
        stored: Sequence[Any],
        variables: Any,
        batches: Any,
        keys: jax.Array | None,
        seeds: dict[int, jax.Array] | None,
    ) -> Pipeline:
        """The pipeline of a step's microbatches; without `keys` and `seeds`, of an evaluation's."""
        assert self.schedule is not None

        def values(microbatch: jax.Array) -> list[Any]:
            at = lambda x: x[microbatch]
            return jax.tree.leaves((variables, jax.tree.map(at, batches), None if keys is None else at(keys)))

        part, rows = self._part(program, variables, batches, keys)
        loss = positions(out)[0]["loss"]
        if part is not None and seeds and not program.depends(program.inputs, loss.count):
            # Counts that are constants: one for a mean over the rows of each part, or the size of an array of rows.
            whole, mine = (p.only(loss.count)(f(jnp.int32(0))) for p, f in ((program, values), (part, rows)))
            seeds = {i: x * whole / (mine * self.schedule.ranks) for i, x in seeds.items()}
        summed = range(len(jax.tree.leaves(out[0])))
        # Cast once, not in every tick.
        dtypes = [self.layout.policy.computed(leaf.dtype) for leaf in self.layout.kept.units]
        stored = [x.astype(dtype) for x, dtype in zip(stored, dtypes, strict=True)]
        return Pipeline(program, self.schedule, access, stored, values, summed, seeds, part, rows)

    def _piped(self, pipeline: Pipeline, out: Any) -> tuple[list[Any], Sums]:
        """Gradients, and the sums of each metric over all rows."""
        grads, sums = pipeline.run()
        return grads, self.total(jax.tree.unflatten(jax.tree.structure(out[0]), sums))

    def _part(
        self, program: Program, variables: Any, batches: Any, keys: jax.Array | None
    ) -> tuple[Program | None, Callable[..., list[Any]]]:
        """The loss on one pipe rank's part of a microbatch's rows, and the values of its inputs for a microbatch; no
        program where the ranks cannot share the rows.
        """
        assert self.schedule is not None
        ranks = self.schedule.ranks

        def values(microbatch: jax.Array) -> Any:
            def leaf(x: Any) -> Any:
                if isinstance(x, Replicated):
                    return jax.tree.map(lambda v: v[microbatch], x)
                each = x.shape[1] // ranks
                return lax.dynamic_slice_in_dim(x[microbatch], lax.axis_index("pipe") * each, each)

            rows = jax.tree.map(leaf, batches, is_leaf=lambda x: isinstance(x, Replicated))
            return variables, rows, None if keys is None else keys[microbatch]

        rows = jax.tree.leaves(batches, is_leaf=lambda x: isinstance(x, Replicated))
        if any(not isinstance(x, Replicated) and x.shape[1] % ranks for x in rows):
            return None, values
        try:
            part, _ = self.program(*jax.eval_shape(values, jax.ShapeDtypeStruct((), jnp.int32)))
        except (TypeError, ValueError):  # on whole microbatches it went: the loss has their number of rows written down
            return None, values
        random = program.inputs[len(program.inputs) - 1 :] if keys is not None else ()
        if not shareable(program, part, random, ranks):
            return None, values
        return part, lambda microbatch: jax.tree.leaves(values(microbatch))

    def finished(self, access: Access, grads: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        """Accumulated gradients as the update gets them: zeros where the loss does not depend on a leaf, None where it
        is frozen.
        """
        members = {i: at for family in self.layout.kept.families for i, at in family}

        def finish(i: int, shape: tuple[int, ...]) -> jax.Array:
            grad, dtype = grads[i], self.layout.policy.reduced(access.leaves[i].dtype)
            return jnp.zeros(shape, dtype) if grad is None else access.finish(i, grad).reshape(shape)

        finished: list[jax.Array | None] = [None] * len(self.layout.leaves)
        for i, leaf in enumerate(self.layout.leaves):
            if leaf.trainable:
                spec, stored = self.layout.spec(leaf, "grads"), self.layout.stored(leaf, "grads")
                shape = self.layout.sharding(spec).shard_shape(stored)
                parts = [finish(i, shape)] if grads[i] is not None else []
                if any(grads[j] is not None for j in members.get(i, ())):  # layers that no scan reads
                    parts.append(jnp.stack([finish(j, shape[1:]) for j in members[i]]))
                finished[i] = sum(parts[1:], parts[0]) if parts else finish(i, shape)
        return finished

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
        axes = ("pipe", *self.axes) if self.schedule is not None else tuple(self.axes)
        return jax.tree.unflatten(tree, list(collectives.all_reduce(jnp.stack(leaves), axes)))
