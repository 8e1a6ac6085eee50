"""The operations of a pipeline rank under any schedule: one chunk of layers forwards and backwards, and the epilogue.

    chunk_forward    message, op -> next message, residuals      the first stage reads the prologue's carry instead
    epilogue         message     -> sums, gradients, cotangents  the last stage's message becomes a loss
    chunk_backward   cotangents, residuals, op -> gradients, cotangents for the stage before and for the prologue

All ranks of a microbatch may share its epilogue: the last stage's message is scattered by rows, each rank computes the
loss of its rows, and the cotangents are gathered.

    last rank         every rank                              every rank
    message [rows]  - reduce-scatter ->  [rows / p] -> loss -> cts [rows / p]  - all-gather ->  cts [rows]

`Engine` is the base of both engines. `ticks.py` runs tables in lockstep, `slots.py` tables whose ranks branch.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ... import collectives
from ...program import jaxpr as jx
from ...slicing.access import Access
from ...slicing.flights import InFlight, Lookahead
from ...slicing.layer_access import LayerAccess
from ...slicing.loop import LayerLoop
from ...slicing.program import Program, backward, forward, read
from ...slicing.stash import Stash
from .chunks import AXIS, Cotangents, Cut, Message, bypass_variables, epilogue_pieces, prologue_pieces
from .early_prologue import EarlyPrologues, is_early, shares_prologues
from .unstaged_params import UnstagedParams


class _MaskedAccess:
    """Access whose gradients count only if a condition holds."""

    def __init__(self, access: Access, condition: jax.Array):
        self.fetch, self._give, self.condition = access.fetch, access.give, condition

    def give(self, index: int, cotangent: jax.Array, sliced: bool) -> jax.Array | None:
        # Select rather than multiply by zero: a gradient that is dropped may be NaN.
        return self._give(index, jnp.where(self.condition, cotangent, jnp.zeros_like(cotangent)), sliced)


def replace_grads(grads: Sequence[Any], positions: Sequence[int], totals: Sequence[Any]) -> list[Any]:
    """Return the gradients with `totals` at some positions."""
    replaced = list(grads)
    for i, total in zip(positions, totals, strict=True):
        replaced[i] = total
    return replaced


def eliminate_dead_code(fun: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Trace a function and drop the equations that its results do not need.

    In a tick's prologue, for example, this drops the embedding if only the masks are read.
    """
    flat, results = jx.trace(fun, *args)
    run = jx.run(jx.live(flat.eqns, flat.outvars), [*flat.constvars, *flat.invars], flat.outvars)
    tree = jax.tree.structure(results)
    return lambda *args: jax.tree.unflatten(tree, run(*flat.consts, *jax.tree.leaves(args)))


@dataclass(frozen=True)
class Engine(Cut):
    """One sliced loss under one schedule, to be run inside `shard_map`.

    Attributes:
      program: the loss on the rows of one microbatch.
      schedule: its schedule.
      access: how parameters are fetched and gradients given (`unstaged_params.py`).
      leaves: this rank's leaves. Leaves of stages are the rank's layers, chunk by chunk, on dim 0, in the order of
        `Staged.in_stages`. Other leaves are as the strategy stores them, or whole if they were fetched before the
        first tick.
      values: `values(microbatch)` returns the values of the program's inputs.
      summed: positions of the outputs that are summed over microbatches.
      seeds: cotangents of outputs, by position; None for a forward pass alone (under `schedule.forwards`).
      part_program: the loss on one rank's part of a microbatch's rows, if the ranks share the epilogue; else None.
      part_values: the inputs of `part_program`, as `values`.
    """

    access: UnstagedParams
    leaves: Sequence[jax.Array]
    values: Callable[[jax.Array], list[Any]]
    summed: Sequence[int]
    seeds: dict[int, jax.Array] | None = None
    part_program: Program | None = None
    part_values: Callable[[jax.Array], list[Any]] | None = None

    @property
    def prologues(self) -> EarlyPrologues:
        """The prologues that run before the first tick, if they do (`early_prologue.py`)."""
        sharers = self.schedule.ranks if shares_prologues(self.program) else 1
        return EarlyPrologues(self.program, self.access, self.leaves, self.values, sharers, self.schedule.microbatches)

    @property
    def has_early_prologues(self) -> bool:
        """Whether prologues run before the first tick.

        Ranks that branch compute a prologue only where it is read, and gain from early ones only if they share them.
        Others gain too, if all first carries take no more memory than the prologue's weights in float32.
        """
        if self.schedule.branches or shares_prologues(self.program):
            return shares_prologues(self.program)
        weights = {leaf for piece in prologue_pieces(self.program) for leaf in piece.unit.leaf_indices}
        carry_bytes = sum(jx.nbytes(v) for v in self.prologues.carry_variables)
        fits = self.schedule.microbatches * carry_bytes <= sum(4 * self.leaves[leaf].size for leaf in weights)
        return fits and is_early(self.program)

    def zeros(self) -> tuple[Message, list[jax.Array], list[jax.Array]]:
        """Return zeros for messages, summed outputs, and the first carries of early prologues."""
        variables = self.message_variables(self.program)
        message = self.pad_by_layer(jax.tree.map(lambda v: jnp.zeros(v.aval.shape, v.aval.dtype), variables))
        prologues = self.prologues.zeros() if self.has_early_prologues else []
        return message, [jnp.zeros((), jnp.float32) for _ in self.summed], prologues

    def prologue(self, microbatch: jax.Array, grad: bool) -> tuple[dict[Any, Any], list[Any]]:
        """Return the values of variables after a microbatch's prologue, and its tape."""
        env = self.program.environment(self.values(microbatch))
        return env, forward(prologue_pieces(self.program), self.access, self.leaves, env, grad)

    def add_prologue_grads(self, grads: Sequence[Any], prologue_cts: Sequence[jax.Array]) -> list[Any]:
        """Add the gradients of the prologues that this rank computed before the first tick.

        Args:
          grads: accumulated gradients, one for each leaf.
          prologue_cts: cotangents of the first carries, [microbatches of this rank, ...]; empty if none is early.
        """
        # An evaluation has the carries alone.
        has_cotangents = self.seeds is not None and prologue_cts
        return self.prologues.backward(prologue_cts, list(grads)) if has_cotangents else list(grads)

    def prologue_microbatches(self) -> dict[str, list[int]]:
        """Return the microbatches of stage 0 by tick.

        Returns:
          `entering`: the microbatch whose forward runs in stage 0. If none does, one whose backward there is still to
          come, so that its first carry is still stored; 0 without forwards. `returning`: the microbatch whose
          cotangents leave stage 0, or -1.
        """
        microbatches: dict[str, list[int]] = {"entering": [], "returning": []}
        for column in self.schedule.table():
            # Stage 0 is chunk 0 of rank 0 in both placements.
            first_stage = [op for op in column[0] if op.chunk == 0]
            forwards = [op.microbatch for ops in (first_stage, *column) for op in ops if op.kind == "F"]
            microbatches["entering"].append(forwards[0] if forwards else 0)
            microbatches["returning"].append(next((op.microbatch for op in first_stage if op.kind in "BI"), -1))
        return microbatches

    def chunk_input(self, env: dict[Any, Any], op: Any, message: Message) -> Message:
        """Return the message that a chunk reads: in the first stage, the carry is the prologue's."""
        _, init, _ = self._stack_inputs(env, op)
        # Every rank has computed the prologue; a select chooses without a branch.
        is_first = self._stage(op) == 0
        return Message([jnp.where(is_first, a, b) for a, b in zip(init, message.carry, strict=True)], message.by_layer)

    def chunk_forward(
        self,
        env: dict[Any, Any],
        op: Any,
        message: Message,
        grad: bool,
        stash: Stash | None = None,
        lookahead: Lookahead | None = None,
    ) -> LayerLoop:
        """Return the loop over one chunk's layers.

        Args:
          env: values of the program's variables, the prologue's included.
          op: the operation; see `Cut`.
          message: the chunk's input (`chunk_input`).
          grad: whether a backward follows, so that layers save residuals.
          stash: the slot in which layers save them; None to return them stacked.
          lookahead: what the loop fetches for other loops; None to fetch each layer itself.

        Returns:
          A loop with the result of `Stack.forward_loop`, except that the next message replaces the outputs.
        """
        k, is_first = self.stack.num_carry, self._stage(op) == 0
        consts, _, xs = self._stack_inputs(env, op)

        def next_message(result: tuple[Any, ...]) -> tuple[Any, ...]:
            outputs, *rest = result
            # Each stage fills in its layers of [layers of all chunks, ...] and sends the array on.
            by_layer = []
            for j, buffer in zip(self.by_layer_positions, message.by_layer, strict=True):
                # The first stage has no stage before it: its message buffer holds another microbatch's values.
                buffer = jnp.where(is_first, jnp.zeros_like(buffer), buffer)
                by_layer.append(lax.dynamic_update_slice_in_dim(buffer, outputs[k + j], self._chunk_start(op), axis=0))
            return (Message(outputs[:k], by_layer), *rest)

        inputs = [*consts, *message.carry, *xs]
        return self.chunk_stack.forward_loop(self.chunk_layers(op), inputs, grad, stash, lookahead).then(next_message)

    def epilogue(
        self, env: dict[Any, Any], message: Message, microbatch: jax.Array, grads: list[Any], sums: list[jax.Array]
    ) -> tuple[list[Any], list[jax.Array], Cotangents | None]:
        """Compute the loss of the microbatch that leaves the last layer, and its backward.

        Every rank calls this. If the ranks share the epilogue, each works on its part of the rows, and they communicate
        a reduce-scatter of the message and an all-gather of its cotangents. If not, only the last rank's results count.

        Returns:
          Accumulated gradients, sums of outputs, and cotangents of the message (None in an evaluation).
        """
        # 1. Each rank's rows of the last stage's message. The ranks before the last contribute zeros to the sum.
        is_last = self.is_last
        program, access = self.program, _MaskedAccess(self.access, is_last)
        message = self.trim_by_layer(message)
        if self.part_program is not None and self.part_values is not None:
            program, access = self.part_program, self.access
            env = program.environment(self.part_values(microbatch))
            forward(prologue_pieces(program), access, self.leaves, env, False)
            last_message = jax.tree.map(lambda x: jnp.where(is_last, x, jnp.zeros_like(x)), message)
            message = jax.tree.map(lambda x: collectives.reduce_scatter(x, [AXIS], 0), last_message)

        # 2. The forward, and the outputs that are summed.
        variables = self.message_variables(program)
        env.update(zip(jax.tree.leaves(variables), jax.tree.leaves(message), strict=True))
        tape = forward(epilogue_pieces(program), access, self.leaves, env, bool(self.seeds))
        outputs = [read(env, program.outputs[i]) for i in self.summed]
        # On ranks before the last, the message is not the end of the stack, and the outputs are meaningless.
        if self.part_program is None:
            outputs = [jnp.where(is_last, x, 0) for x in outputs]
        sums = [total + x for total, x in zip(sums, outputs, strict=True)]
        if not self.seeds:
            return grads, sums, None

        # 3. The backward. A part of the message that the loss does not depend on has zero cotangents.
        cts = program.seeded(self.seeds)
        grads = backward(epilogue_pieces(program), access, self.leaves, tape, cts, grads)
        ct_variables = Cotangents(variables.select(self.has_cotangent), bypass_variables(self.program))
        cotangents = jax.tree.map(lambda v: cts.get(v, jnp.zeros(v.aval.shape, v.aval.dtype)), ct_variables)
        if self.part_program is not None:
            cotangents = jax.tree.map(lambda x: collectives.all_gather(x, [AXIS], 0), cotangents)
        return grads, sums, cotangents

    def chunk_backward(
        self,
        env: dict[Any, Any],
        op: Any,
        stash: Stash,
        cts: Message,
        grads: list[Any],
        lookahead: Lookahead | None = None,
    ) -> LayerLoop:
        """Return the loop over one chunk's layers backwards.

        Args:
          env: values of the program's variables, the prologue's included.
          op: the operation; see `Cut`.
          stash: the slot in which the forward saved residuals.
          cts: cotangents of the chunk's outgoing message.
          grads: accumulated gradients, one for each leaf.
          lookahead: as for `chunk_forward`.

        Returns:
          A loop with the results: accumulated gradients, cotangents for the stage before, cotangents of the prologue's
          variables, and the state in flight after the loop (None without `lookahead`).
        """
        stack_leaves, layers = self.stack.unit.leaf_indices, self.chunk_layers(op)
        if lookahead is None:
            layers = dataclasses.replace(layers, access=_MaskedAccess(self.access, op["valid"]))
        else:
            # Gradients in flight are given in another tick, which may be valid where this one is not. So mask layers
            # when their gradients are made, not when they are given.
            is_valid = jnp.full(self.layers_per_chunk, op["valid"])
            is_real = is_valid if layers.is_real is None else layers.is_real & is_valid
            layers = dataclasses.replace(layers, is_real=is_real)

        def split_result(result: tuple[Any, ...]) -> tuple[list[Any], Message, dict[Any, Any], InFlight | None]:
            totals, cotangents, *rest = result
            ct_consts, ct_carry, ct_xs = self.stack.split_cotangents(cotangents)
            prologue_cts = self.prologue_cotangents(op, ct_consts, ct_carry, ct_xs)
            # Cotangents of outputs by layer pass through unchanged: each stage reads its layers' part of them.
            message = Message(ct_carry, cts.by_layer)
            return replace_grads(grads, stack_leaves, totals), message, prologue_cts, rest[0] if rest else None

        inputs, output_cts = self.inputs_without_carry(env, op), self.output_cotangents(op, cts)
        into = [grads[i] for i in stack_leaves]
        return self.chunk_stack.backward_loop(layers, inputs, stash, output_cts, into, lookahead).then(split_result)

    def chunk_layers(self, op: Any) -> LayerAccess:
        """Return access to a chunk's layers, which are some of this rank's."""
        first_layer = op["chunk"] * self.layers_per_chunk
        return self.chunk_stack.layers(self.access, self.leaves, first_layer, self._is_layer(op))

    def inputs_without_carry(self, env: dict[Any, Any], op: Any) -> list[Any]:
        """Return the stack's inputs for a backward, with None for the carry: residuals have its values."""
        consts, _, xs = self._stack_inputs(env, op)
        return [*consts, *([None] * self.stack.num_carry), *xs]

    def output_cotangents(self, op: Any, cts: Message) -> list[Any]:
        """Return the cotangents of one chunk's outputs, given the cotangents of its outgoing message."""
        stack, k = self.stack, self.stack.num_carry
        cts_by_layer = dict(
            zip([j for j in self.by_layer_positions if stack.unit.active[k + j]], cts.by_layer, strict=True)
        )
        chunk_cts = list(cts.carry)
        for j, v in enumerate(stack.outputs[k:]):
            if stack.unit.active[k + j]:
                # The message has the cotangents of all layers. An output that nothing reads after the stack has none.
                shape = (self.layers_per_chunk, *v.aval.shape[1:])
                chunk_cts.append(
                    lax.dynamic_slice_in_dim(cts_by_layer[j], self._chunk_start(op), self.layers_per_chunk, axis=0)
                    if j in cts_by_layer
                    else jnp.zeros(shape, v.aval.dtype)
                )
        return chunk_cts

    def prologue_cotangents(
        self, op: Any, ct_consts: Sequence[Any], ct_carry: Sequence[Any], ct_xs: Sequence[Any]
    ) -> dict[Any, Any]:
        """Return one chunk's contribution to the cotangents of the prologue's variables, by variable."""
        stack = self.stack
        n, k, active_inputs = stack.num_consts, stack.num_carry, stack.unit.active_inputs
        is_first = self._stage(op) == 0
        cts_by_variable: dict[Any, Any] = {}

        def add(atom: Any, ct: jax.Array, condition: jax.Array) -> None:
            if not jx.is_literal(atom):
                ct = jnp.where(condition, ct, jnp.zeros_like(ct))
                cts_by_variable[atom] = cts_by_variable[atom] + ct if atom in cts_by_variable else ct

        # An idle rank contributes zeros. A variable that is several inputs of the stack gets the sum.
        atoms = [(i, a) for i, a in enumerate(stack.inputs) if active_inputs[i]]
        for (i, atom), ct in zip(atoms, [*ct_consts, *ct_carry, *ct_xs], strict=True):
            if i < n:
                add(atom, ct, op["valid"])
            elif i < n + k:
                # Only in stage 0 does the carry come from the prologue.
                add(atom, ct, op["valid"] & is_first)
            else:
                # [layers of the stack, ...], with this chunk's layers filled in and the padding cut off.
                all_layers = jnp.zeros((stack.length + self.padding, *ct.shape[1:]), ct.dtype)
                all_layers = lax.dynamic_update_slice_in_dim(all_layers, ct, self._chunk_start(op), axis=0)
                add(atom, all_layers[: stack.length], op["valid"])
        return cts_by_variable
