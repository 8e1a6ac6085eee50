"""A step that was not finite, computed again on one device: a block of rows at a time, until the block is found.

A block is one replica's rows of one microbatch, with its key: the same under every layout. The loss's own program runs
on it, plainly; nothing of the strategy is in it but the dtypes, the blocks and the loss's scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from ...backend.cpu_compiler import cpu_options
from ...backend.text import few
from ...layout.precision import all_finite
from ...layout.state import State
from ...model.batches import rows_of
from ...model.model import is_replicated
from ...model.paths import name_of
from ...step.checks import check_state
from ...step.gradients import block_key
from ..step_view import RunnableStep as Step
from .search import Fault, search


@dataclass(frozen=True)
class Nonfinite:
    """Where a step's NaN or infinity begins; print it.

    Attributes:
      step: the number of the step, from 1.
      what: "forward", "backward", "mean" (the loss's count is zero), "sum" (blocks are finite, and their sum is not),
        or "" where the replay is finite.
      says: in words.
      fault: the equation, of the first block that is not finite; None for a sum, and where every equation by itself is
        finite.
      blocks: (microbatch, replica) of each block that is not finite, in the order of their rows.
      rows: those of the first such block which bring it each by itself, as numbers of the global batch; None where they
        cannot be told apart, as the loss takes all rows.
    """

    step: int
    what: str
    says: str
    fault: Fault | None = None
    blocks: tuple[tuple[int, int], ...] = ()
    rows: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"step {self.step}: {self.says}"


def _rows(numbers: Sequence[int]) -> str:
    return f"row{'s' * (len(numbers) > 1)} {few(list(map(str, numbers)), 8)}"


class NonfiniteError(FloatingPointError):
    """That a step was not finite.

    Attributes:
      found: where it begins.
      state: that of before, but for its number: the next batch goes on from it.
      batch: that of the step.
      undone: the batches given since, to the call that raises this among others, whose steps were not applied either:
        give them to the step again.
    """

    def __init__(self, found: Nonfinite, state: State, batch: Any, undone: tuple[Any, ...]):
        super().__init__(str(found))
        self.found, self.state, self.batch, self.undone = found, state, batch, undone


class Replay:
    """The mathematics of a step, block by block on one `device`; see `TrainStep.trace_nonfinite`.

    Attributes:
      loss, grads: once all blocks are finite, the step's loss, and the gradients of what is trained, by path.
    """

    def __init__(self, step: Step, state: State, batch: Any, device: jax.Device):
        check_state(state)
        self.step, self.device, self.number = step, device, int(state.step) + 1
        traced = step.traced(batch)
        self.coupled, policy = traced.program.coupled, step.policy
        self.n, self.m, models = step.replicas, step.strategy.microbatches, step.layout.storage.models
        here = lambda x: jax.device_put(x, device)
        flat = jax.tree.leaves(step.model_def.unwrap(step.params(state)))
        self.params = [here(whole(x)).astype(policy.computed(p.dtype)) for x, p in zip(flat, models, strict=True)]
        self.paths, self.tuned = [p.path for p in models], [i for i, p in enumerate(models) if p.trainable]
        self.loss, self.grads = 0.0, dict[str, jax.Array]()
        self.reads: dict[tuple[int, int], Any] = {}  # the variables that each block reads
        self.tree = step.layout.storage.model_tree
        self.variables = jax.tree.map(lambda x: here(whole(x)), state.variables)
        self.key = here(whole(state.key))
        self.batch = jax.tree.map(whole, step.place(batch))
        self.each = rows_of(self.batch) // (self.n * self.m)
        self.scale = 1.0 if state.scale is None else float(state.scale.scale)
        options = cpu_options(device.platform)
        self._total: Any = jax.jit(self.total, compiler_options=options)
        self._gradients: Any = jax.jit(self.gradients, compiler_options=options)

    # -- the mathematics of a block ------------------------------------------------------------------------------------

    def total(self, params: Sequence[Any], variables: Any, rows: Any, key: Any) -> tuple[Any, Any, Any]:
        """The loss's total and count of a block, and new variables; where the loss takes all rows, of the blocks of all
        replicas, [replicas, rows, ...].
        """
        model, tree = self.step.model_def, jax.tree.unflatten(self.tree, params)

        def block(rows: Any, key: Any) -> tuple[Any, Any, Any]:
            sums, new = model.call(tree, variables, rows, key, ("rows",) * self.coupled)
            return sums["loss"].total, sums["loss"].count, new

        if not self.coupled:
            return block(rows, key)
        axes = jax.tree.map(lambda x: None if is_replicated(x) else 0, rows, is_leaf=is_replicated)
        total, count, new = jax.vmap(block, in_axes=(axes, 0), axis_name="rows")(rows, key)
        return total.sum(), count.sum(), jax.tree.map(lambda x: x[0], new)

    def gradients(self, seed: Any, params: Sequence[Any], variables: Any, rows: Any, key: Any) -> list[Any]:
        """Those of the leaves that are trained, of a block's total times `seed`."""

        def total(tuned: list[Any]) -> Any:
            whole = dict(enumerate(params)) | dict(zip(self.tuned, tuned, strict=True))
            return self.total([whole[i] for i in range(len(params))], variables, rows, key)[0]

        _, pull = jax.vjp(total, [params[i] for i in self.tuned])
        return pull(seed)[0]

    # -- the search ----------------------------------------------------------------------------------------------------

    def found(self) -> Nonfinite:
        """Forwards first, then backwards, then what is made of all blocks."""
        blocks = [(i, r) for i in range(self.m) for r in range(1 if self.coupled else self.n)]
        bad, totals, counts, held = list[tuple[int, int]](), np.float32(0), 0.0, self.variables
        for i, r in blocks:
            self.reads[i, r] = held
            total, count, new = self._total(*self.inputs(i, r))
            totals, counts = totals + np.float32(total), counts + float(count)
            bad += [(i, r)] * (not np.isfinite(float(total)))
            if (i, r + 1) not in blocks:
                held = new  # of the next microbatch
        if bad:
            forward, of_block = lambda *args: self.total(*args)[0], lambda args: self._total(*args)[0]
            return self.explained("forward", forward, of_block, bad, len(blocks))
        if not counts:
            divided = lambda *args: self.total(*args)[0] / self.total(*args)[1]
            fault = self.searched(divided, self.inputs(*blocks[0]))
            says = f"the loss's mean is not finite: {fault}\n  the count of the loss is 0 over all rows: give no batch "
            return Nonfinite(self.number, "mean", f"{says}that is masked throughout", fault)
        if not np.isfinite(totals):
            return self.overflows("the loss")
        self.loss = float(totals) / counts
        seed = jax.device_put(np.float32(self.scale / counts), self.device)
        sums: list[Any] = [0.0] * len(self.tuned)
        of_block = lambda args: self._gradients(seed, *args)
        for block in blocks:
            grads = of_block(self.inputs(*block))
            bad += [block] * (not all_finite(grads))
            dtypes = [self.step.policy.reduced(self.params[i].dtype) for i in self.tuned]
            sums = [total + g.astype(dtype) for total, g, dtype in zip(sums, grads, dtypes, strict=True)]
        if bad:
            return self.explained("backward", functools.partial(self.gradients, seed), of_block, bad, len(blocks))
        unscaled = [g.astype(self.step.policy.master(g.dtype)) / self.scale for g in sums]
        self.grads = {self.paths[i]: g for i, g in zip(self.tuned, unscaled, strict=True)}
        if not np.isfinite(float(optax.tree.norm(unscaled))):
            size = lambda path: float(jnp.nan_to_num(jnp.abs(self.grads[path]), nan=jnp.inf).max())
            return self.overflows(f"the gradients of {max(self.grads, key=size)}")
        says = (
            "computed again block by block, it is finite: what spoils it is rounding in a fused kernel or a sum over "
            "ranks, or a device; try step.check_replicas(state)"
        )
        return Nonfinite(self.number, "", says)

    def overflows(self, of: str) -> Nonfinite:
        """What sums over blocks do."""
        says = f"every block is finite, and the sum of {of} over all, or its square, overflows"
        return Nonfinite(self.number, "sum", says)

    def explained(
        self, what: str, fun: Callable[..., Any], of_block: Callable[[Any], Any], bad: list[tuple[int, int]], many: int
    ) -> Nonfinite:
        """The equation in the first block that is not finite, and the rows that bring it."""
        (i, r), args = bad[0], self.inputs(*bad[0])
        fault, of = self.searched(fun, args), f"{len(bad)} of {many} blocks are not finite"
        begins = "the loss" if what == "forward" else "the gradient, of a finite loss,"
        each = "in one compiled program, and each of its equations by itself is: rounding in a fused kernel"
        if self.coupled:
            says = f"{begins} is not finite: {fault or each}\n  microbatch {i}, of all ranks together, as the loss"
            return Nonfinite(self.number, what, f"{says} takes all rows; {of}", fault, tuple(bad))
        params, variables, rows, key = args
        numbers = range(begin := (r * self.m + i) * self.each, begin + self.each)
        repeated = lambda row: _by_row(rows, lambda x: jnp.broadcast_to(x[row - begin], x.shape))
        own = [row for row in numbers if not all_finite(of_block((params, variables, repeated(row), key)))]
        shared = [f"batch leaf {name_of(path)}/" for path, x in _leaves(rows, is_replicated) if is_replicated(x)]
        in_row = lambda name: name.startswith("batch leaf") and not name.startswith(tuple(shared))
        if fault is not None and (brought := fault.brought) is not None and in_row(brought.name):
            place = (begin + brought.place[0], *brought.place[1:])  # of the whole batch
            fault = replace(fault, brought=replace(brought, place=place))
        whose = (
            "no block is finite, and of this one no row by itself: parameters, the loss, or what all rows have bring it"
        )
        if not own:
            whose = "no row brings it by itself"
        elif len(own) < self.each or len(bad) < many:
            whose = f"the batch brings it: {_rows(own)}{', each' * (len(own) > 1)} by itself"
        lines = [f"{begins} is not finite: {fault or each}"]
        lines.append(f"microbatch {i}, rank {r}{self.rank(r)}, {_rows(numbers)} of the batch; {of}")
        lines += [whose] * (fault is not None and fault.brought is None)
        return Nonfinite(self.number, what, "\n  ".join(lines), fault, tuple(bad), tuple(own))

    def searched(self, fun: Callable[..., Any], args: Any) -> Fault | None:
        """See `search.search`; inputs by the names that the user knows."""
        _, variables, rows, _ = args
        named = lambda kind, tree: [f"{kind} {name_of(path)}".rstrip() for path, _ in _leaves(tree)]
        names = [f"parameter {path}" for path in self.paths]
        names += [*named("variable", variables), *named("batch leaf", rows), "the key"]
        return search(fun, names, *args)

    def inputs(self, i: int, r: int) -> tuple[Any, Any, Any, Any]:
        """Parameters, variables, rows and key of a block; where the loss takes all rows, of those of all replicas."""
        key, begin = functools.partial(block_key, self.key, self.number - 1), (r * self.m + i) * self.each
        if self.coupled:
            rows = _by_row(self.batch, lambda x: x.reshape(self.n, self.m, self.each, *x.shape[1:])[:, i])
            keys = jax.vmap(lambda r: key(r * self.m + i))(jnp.arange(self.n))
        else:
            rows = _by_row(self.batch, lambda x: x[begin : begin + self.each])
            keys = key(r * self.m + i)
        return self.params, self.reads[i, r], jax.device_put(rows, self.device), keys

    def rank(self, replica: int) -> str:
        """A replica's place along the axes that share rows, and of several processes its own: " (data=1, fsdp=3)"."""
        axes, mesh = self.step.tracing.axes, self.step.mesh
        at = dict(zip(axes, map(int, np.unravel_index(replica, tuple(axes.values()))), strict=True)) if axes else {}
        said = [f"{axis}={place}" for axis, place in at.items()]
        if jax.process_count() > 1:
            device = mesh.devices[tuple(at.get(axis, 0) for axis in mesh.axis_names)]
            said.append(f"process {device.process_index}")
        return f" ({', '.join(said)})" if said else ""


def _by_row(batch: Any, fun: Callable[[Any], Any]) -> Any:
    return jax.tree.map(lambda x: x if is_replicated(x) else fun(x), batch, is_leaf=is_replicated)


def _leaves(tree: Any, is_leaf: Any = None) -> list[Any]:
    return jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)


def whole(x: Any) -> Any:
    """An array on this host, of all hosts' parts."""
    if not isinstance(x, jax.Array):
        return x
    if x.is_fully_replicated:
        return x.addressable_data(0)
    return np.asarray(x) if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True)
