"""The replay of a step that was not finite: block after block of rows on one device, until the faulty block is found.

A block is one replica's rows of one microbatch, with its random key. Blocks are the same under every layout. The loss's
own program runs on a block without any strategy; only the dtypes, the blocks and the loss scale are the strategy's.

    forward of every block      some total is not finite       -> search the first such block's forward
    mean                        the count is 0, or the sum of totals overflows
    backward of every block     some gradient is not finite    -> search the first such block's backward
    sum of gradients            it overflows, or everything is finite
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
from jax.tree_util import tree_leaves_with_path

from ...backend.cpu_compiler import cpu_options
from ...backend.text import few
from ...layout.precision import all_finite
from ...layout.state import State
from ...model.batches import map_rows, rows_of
from ...model.model import is_replicated
from ...model.paths import name_of
from ...step.blocks import block_key, blocks_of_microbatch, call_on_blocks
from ...step.checks import check_state
from ..step_view import RunnableStep as Step
from .search import Fault, search


@dataclass(frozen=True)
class Nonfinite:
    """The place where a step's NaN or infinity begins; print it.

    Attributes:
      step: the number of the step, from 1.
      what: "forward"; "backward"; "mean" (the loss's count is zero); "sum" (the blocks are finite, but not their sum);
        or "" if the replay is finite.
      says: the finding in words.
      fault: the equation in the first block that is not finite. None for a sum, and if every single equation is finite.
      blocks: (microbatch, replica) of each block that is not finite, in the order of their rows.
      rows: the rows of the first such block that are enough to cause it, as positions in the global batch. None if rows
        cannot be separated, since the loss takes all rows.
    """

    step: int
    what: str
    says: str
    fault: Fault | None = None
    blocks: tuple[tuple[int, int], ...] = ()
    rows: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"step {self.step}: {self.says}"


def _rows_text(numbers: Sequence[int]) -> str:
    """Return row numbers as text."""
    return f"row{'s' * (len(numbers) > 1)} {few(list(map(str, numbers)), 8)}"


class NonfiniteError(FloatingPointError):
    """Raised for a step that was not finite.

    Attributes:
      found: where the NaN or infinity begins.
      state: the state before the step, but with the step's number: continue from it with the next batch.
      batch: the batch of the step.
      undone: the batches given to the step since then, including the call that raises this. Their steps were not
        applied: give these batches to the step again.
    """

    def __init__(self, found: Nonfinite, state: State, batch: Any, undone: tuple[Any, ...]):
        super().__init__(str(found))
        self.found, self.state, self.batch, self.undone = found, state, batch, undone


class Replay:
    """A step's mathematics from the state before it, block by block on one device; see `TrainStep.trace_nonfinite`.

    Attributes:
      loss, grads: the step's loss, and the gradients of trainable leaves by path; set if all blocks are finite.
    """

    def __init__(self, step: Step, state: State, batch: Any, device: jax.Device):
        check_state(state)
        self.step, self.device, self.number = step, device, int(state.step) + 1
        traced = step.traced(batch)
        self.takes_all_rows, policy = traced.program.coupled, step.policy
        self.num_replicas, self.num_microbatches = step.replicas, step.strategy.microbatches
        models = step.layout.storage.models
        # Arrays of all hosts come together on this host's device: parameters in their compute dtype, the batch on the
        # host.
        on_device = lambda x: jax.device_put(x, device)
        model_leaves = jax.tree.leaves(step.model_def.unwrap(step.params(state)))
        self.params = [
            on_device(whole_array(x)).astype(policy.computed(param.dtype))
            for x, param in zip(model_leaves, models, strict=True)
        ]
        self.paths = [param.path for param in models]
        self.trainable_indices = [i for i, param in enumerate(models) if param.trainable]
        self.loss, self.grads = 0.0, dict[str, jax.Array]()
        self.variables_read: dict[tuple[int, int], Any] = {}  # (microbatch, replica) -> variables
        self.tree = step.layout.storage.model_tree
        self.variables = jax.tree.map(lambda x: on_device(whole_array(x)), state.variables)
        self.key = on_device(whole_array(state.key))
        self.batch = jax.tree.map(whole_array, step.place(batch))
        self.rows_per_block = rows_of(self.batch) // (self.num_replicas * self.num_microbatches)
        self.scale = 1.0 if state.scale is None else float(state.scale.scale)
        options = cpu_options(device.platform)
        self._jitted_total: Any = jax.jit(self.total, compiler_options=options)
        self._jitted_gradients: Any = jax.jit(self.gradients, compiler_options=options)

    # -- The mathematics of a block ------------------------------------------------------------------------------------

    def total(self, params: Sequence[Any], variables: Any, rows: Any, key: Any) -> tuple[Any, Any, Any]:
        """Return the loss's total and count on a block, and the new variables.

        If the loss takes all rows, `rows` are the blocks of all replicas, [replicas, rows, ...], and `key` their keys.
        """
        model, model_tree = self.step.model_def, jax.tree.unflatten(self.tree, params)

        def total_of_block(rows: Any, key: Any) -> tuple[Any, Any, Any]:
            # With all rows, the blocks of all replicas run under the axis "rows", along which the loss takes them.
            sums, new_variables = model.call(model_tree, variables, rows, key, ("rows",) * self.takes_all_rows)
            return sums["loss"].total, sums["loss"].count, new_variables

        if not self.takes_all_rows:
            return total_of_block(rows, key)
        total, count, new_variables = call_on_blocks(total_of_block, rows, key)
        # All replicas write the same variables: take the first one's.
        return total.sum(), count.sum(), jax.tree.map(lambda x: x[0], new_variables)

    def gradients(self, seed: Any, params: Sequence[Any], variables: Any, rows: Any, key: Any) -> list[Any]:
        """Return the gradients of the trainable leaves on a block, for the cotangent `seed` of the total."""

        def total_of_trainable(trainable: list[Any]) -> Any:
            all_params = dict(enumerate(params)) | dict(zip(self.trainable_indices, trainable, strict=True))
            return self.total([all_params[i] for i in range(len(params))], variables, rows, key)[0]

        _, vjp = jax.vjp(total_of_trainable, [params[i] for i in self.trainable_indices])
        return vjp(seed)[0]

    # -- The search ----------------------------------------------------------------------------------------------------

    def locate(self) -> Nonfinite:
        """Return where the step's NaN or infinity begins: in a forward, a backward, or a sum over all blocks."""
        blocks = [
            (microbatch, replica)
            for microbatch in range(self.num_microbatches)
            for replica in range(1 if self.takes_all_rows else self.num_replicas)
        ]
        # 1. Forwards.
        bad_blocks, total_sum, count_sum, variables = list[tuple[int, int]](), np.float32(0), 0.0, self.variables
        for microbatch, replica in blocks:
            # As in the step, a microbatch reads the variables that the previous one has left.
            self.variables_read[microbatch, replica] = variables
            total, count, new_variables = self._jitted_total(*self.block_inputs(microbatch, replica))
            # The total in float32 as in the step, where it may overflow; the count only has to be exact.
            total_sum, count_sum = total_sum + np.float32(total), count_sum + float(count)
            bad_blocks += [(microbatch, replica)] * (not np.isfinite(float(total)))
            if (microbatch, replica + 1) not in blocks:
                variables = new_variables  # only after a microbatch's last block: all its blocks read the same
        if bad_blocks:
            total_of, run_block = lambda *args: self.total(*args)[0], lambda args: self._jitted_total(*args)[0]
            return self.explain("forward", total_of, run_block, bad_blocks, len(blocks))
        # Without a count there is no mean, and no seed for a backward.
        if not count_sum:
            mean_loss = lambda *args: self.total(*args)[0] / self.total(*args)[1]
            fault = self.find_fault(mean_loss, self.block_inputs(*blocks[0]))
            message = (
                f"the loss's mean is not finite: {fault}\n  the count of the loss is 0 over all rows: give no batch "
                "that is masked throughout"
            )
            return Nonfinite(self.number, "mean", message, fault)
        if not np.isfinite(total_sum):
            return self.overflow("the loss")
        self.loss = float(total_sum) / count_sum
        seed = jax.device_put(np.float32(self.scale / count_sum), self.device)
        # 2. Backwards, with the seed of the step: the loss scale over the count of all rows.
        grad_sums: list[Any] = [0.0] * len(self.trainable_indices)
        run_block = lambda args: self._jitted_gradients(seed, *args)
        # Sum in the dtype in which the step reduces, since an overflow may come from there.
        dtypes = [self.step.policy.reduced(self.params[i].dtype) for i in self.trainable_indices]
        for block in blocks:
            grads = run_block(self.block_inputs(*block))
            bad_blocks += [block] * (not all_finite(grads))
            grad_sums = [
                total + grad.astype(dtype) for total, grad, dtype in zip(grad_sums, grads, dtypes, strict=True)
            ]
        if bad_blocks:
            return self.explain("backward", functools.partial(self.gradients, seed), run_block, bad_blocks, len(blocks))
        # 3. Sums over all blocks, which may overflow though each block is finite.
        # The optimizer sees unscaled gradients in the dtype of the masters.
        unscaled = [grad.astype(self.step.policy.master(grad.dtype)) / self.scale for grad in grad_sums]
        self.grads = {self.paths[i]: grad for i, grad in zip(self.trainable_indices, unscaled, strict=True)}
        if not np.isfinite(float(optax.tree.norm(unscaled))):
            # Name the leaf with the largest element; NaN counts as infinite.
            largest_element = lambda path: float(jnp.nan_to_num(jnp.abs(self.grads[path]), nan=jnp.inf).max())
            return self.overflow(f"the gradients of {max(self.grads, key=largest_element)}")
        message = (
            "computed again block by block, it is finite: the cause is rounding in a fused kernel or in a sum over "
            "ranks, or a faulty device; try step.check_replicas(state)"
        )
        return Nonfinite(self.number, "", message)

    def overflow(self, subject: str) -> Nonfinite:
        """Return the finding that a sum over blocks overflows."""
        message = f"every block is finite, and the sum of {subject} over all, or its square, overflows"
        return Nonfinite(self.number, "sum", message)

    def explain(
        self,
        direction: str,
        fun: Callable[..., Any],
        run_block: Callable[[Any], Any],
        bad_blocks: list[tuple[int, int]],
        num_blocks: int,
    ) -> Nonfinite:
        """Return the finding for a forward or backward that is not finite in some blocks.

        It names the equation in the first such block, and the rows that cause it.

        Args:
          fun: a function of a block's inputs whose results are not finite.
          run_block: the same function, jitted, of the tuple of inputs.
          bad_blocks: (microbatch, replica) of each block that is not finite.
        """
        (microbatch, replica), inputs = bad_blocks[0], self.block_inputs(*bad_blocks[0])
        fault = self.find_fault(fun, inputs)
        share_of_blocks = f"{len(bad_blocks)} of {num_blocks} blocks are not finite"
        subject = "the loss" if direction == "forward" else "the gradient, of a finite loss,"
        no_fault = "as one compiled program, though each equation alone is: the cause is rounding in a fused kernel"
        if self.takes_all_rows:
            message = (
                f"{subject} is not finite: {fault or no_fault}\n  microbatch {microbatch}, of all ranks together, as "
                f"the loss takes all rows; {share_of_blocks}"
            )
            return Nonfinite(self.number, direction, message, fault, tuple(bad_blocks))
        params, variables, rows, key = inputs
        first_row = (replica * self.num_microbatches + microbatch) * self.rows_per_block
        numbers = range(first_row, first_row + self.rows_per_block)
        repeated_row = lambda row: map_rows(rows, lambda x: jnp.broadcast_to(x[row - first_row], x.shape))
        # Run the block with every row replaced by one of its rows: which rows are enough to cause it?
        causing_rows = [
            row for row in numbers if not all_finite(run_block((params, variables, repeated_row(row), key)))
        ]
        # A `Replicated` leaf has no rows, so that its positions stay as they are.
        leaves = tree_leaves_with_path(rows, is_leaf=is_replicated)
        replicated_names = [f"batch leaf {name_of(path)}/" for path, x in leaves if is_replicated(x)]
        is_of_rows = lambda name: name.startswith("batch leaf") and not name.startswith(tuple(replicated_names))
        # The search knows positions in the block; the user knows positions in the batch.
        if fault is not None and (brought := fault.brought) is not None and is_of_rows(brought.name):
            place = (first_row + brought.place[0], *brought.place[1:])
            fault = replace(fault, brought=replace(brought, place=place))
        cause_text = (
            "no block is finite, nor any row of this block alone: the cause is the parameters, the loss, or what all "
            "rows share"
        )
        if not causing_rows:
            cause_text = "no row alone causes it"
        elif len(causing_rows) < self.rows_per_block or len(bad_blocks) < num_blocks:
            cause_text = f"the batch causes it: {_rows_text(causing_rows)}{', each' * (len(causing_rows) > 1)} alone"
        lines = [f"{subject} is not finite: {fault or no_fault}"]
        rank = f"rank {replica}{self.rank_text(replica)}"
        lines.append(f"microbatch {microbatch}, {rank}, {_rows_text(numbers)} of the batch; {share_of_blocks}")
        # If an input was not finite, the fault names it already.
        lines += [cause_text] * (fault is not None and fault.brought is None)
        return Nonfinite(self.number, direction, "\n  ".join(lines), fault, tuple(bad_blocks), tuple(causing_rows))

    def find_fault(self, fun: Callable[..., Any], args: Any) -> Fault | None:
        """Search a function of a block's inputs, which get the names that the user knows; see `search.search`."""
        _, variables, rows, _ = args
        leaf_names = lambda kind, tree: [f"{kind} {name_of(path)}".rstrip() for path, _ in tree_leaves_with_path(tree)]
        # In the order of the leaves of (params, variables, rows, key).
        names = [f"parameter {path}" for path in self.paths]
        names += [*leaf_names("variable", variables), *leaf_names("batch leaf", rows), "the key"]
        return search(fun, names, *args)

    def block_inputs(self, microbatch: int, replica: int) -> tuple[Any, Any, Any, Any]:
        """Return a block's parameters, variables, rows and key; all replicas' rows and keys if the loss takes all."""
        key_of_block = functools.partial(block_key, self.key, self.number - 1)
        first_row = (replica * self.num_microbatches + microbatch) * self.rows_per_block
        if self.takes_all_rows:
            rows = blocks_of_microbatch(self.batch, self.num_replicas, self.num_microbatches, microbatch)
            block_indices = jnp.arange(self.num_replicas) * self.num_microbatches + microbatch
            keys = jax.vmap(key_of_block)(block_indices)
        else:
            rows = map_rows(self.batch, lambda x: x[first_row : first_row + self.rows_per_block])
            keys = key_of_block(replica * self.num_microbatches + microbatch)
        return self.params, self.variables_read[microbatch, replica], jax.device_put(rows, self.device), keys

    def rank_text(self, replica: int) -> str:
        """Return a replica's position along the axes that share rows, as text: " (data=1, fsdp=3)".

        If there are several processes, the text also names the replica's process.
        """
        axes, mesh = self.step.tracing.axes, self.step.mesh
        axis_positions = (
            dict(zip(axes, map(int, np.unravel_index(replica, tuple(axes.values()))), strict=True)) if axes else {}
        )
        parts = [f"{axis}={axis_position}" for axis, axis_position in axis_positions.items()]
        if jax.process_count() > 1:
            device = mesh.devices[tuple(axis_positions.get(axis, 0) for axis in mesh.axis_names)]
            parts.append(f"process {device.process_index}")
        return f" ({', '.join(parts)})" if parts else ""


def whole_array(x: Any) -> Any:
    """Return an array with the parts of all hosts, on this host; all-gathers it if other hosts have parts of it."""
    if not isinstance(x, jax.Array):
        return x
    if x.is_fully_replicated:
        return x.addressable_data(0)
    return np.asarray(x) if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True)
