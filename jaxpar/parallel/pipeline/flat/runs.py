"""Trace the operations of a stage, each once, as functions of arrays.

    F    leaves, inputs, message from the stage before          -> message, results, residuals for the stash
    B    leaves, inputs, residuals, cotangents from next stage  -> cotangents, gradients
    I    leaves, inputs, residuals, cotangents from next stage  -> cotangents, weight residuals
    W    leaves, inputs, residuals, weight residuals            -> gradients

A schedule has either B, or its halves I and W (`slicing/halves.py`). I computes the gradient of inputs, which the stage
before waits for, and W the gradient of weights, for which nobody waits. The stash holds each residual once, from F to B
or W, even if both halves read it. Residuals that are inputs of the program, such as rows of the batch, are not stashed
but read again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ....layout.leaves import Leaf
from ....program import jaxpr as jx
from ....slicing.access import Access
from ....slicing.halves import Halves, WeightGradResiduals, pick
from ....slicing.pieces import add
from ....slicing.program import Program, backward, forward, read
from .packing import Packing
from .stages import Stage, is_linear


class LeafAccess(Access, Protocol):
    """Access to parameters, with the layout of each leaf: `pipe` shards it if its `dim` is a number."""

    leaves: Sequence[Leaf]


@dataclass(frozen=True)
class StageRun:
    """A stage's operations, traced.

    Attributes:
      forward: `forward(leaves, inputs, incoming)` returns the outgoing values, the results and the residuals.
      backwards: B, or I and W, as `fun(leaves, inputs, residuals, operands)`; empty in an evaluation. The operands are
        the cotangents of the outgoing variables, for W the weight residuals of I. It returns cotangents of the incoming
        variables (W none), gradients of the leaves (None for frozen ones; I none), and weight residuals (I alone).
      stash: the packing of the residuals.
      weight_residuals: the packing of the weight residuals; empty without I.
    """

    forward: Callable[..., tuple[list[Any], list[Any], list[Any]]]
    backwards: Mapping[str, Callable[..., tuple[list[Any], list[Any], list[Any]]]]
    stash: Packing
    weight_residuals: Packing


@dataclass(frozen=True)
class StageOperations:
    """F of a stage, and B, I and W as functions of leaves, tape and operands.

    Each backward returns cotangents of the incoming variables, gradients of the leaves, and weight residuals.

    Attributes:
      stage, program: the stage, and the program that it is a part of.
      access: how parameters are fetched and gradients given.
      seeds: cotangents of the program's outputs, by position; None for an evaluation.
      halves: `input_grads` adds them when it is traced.
    """

    stage: Stage
    program: Program
    access: Access
    seeds: Mapping[int, jax.Array] | None
    halves: list[Halves] = field(default_factory=list)

    def trace(self, leaves: Sequence[Any], inputs: Sequence[Any], is_fixed: Sequence[bool], kinds: str) -> StageRun:
        """Trace the operations.

        Args:
          leaves: the stage's leaves, abstract.
          inputs: the program's inputs, abstract.
          is_fixed: for each input, whether a backward finds the value that the forward found.
          kinds: the kinds of operations in the schedule.
        """
        # 1. F, with its tape as outputs.
        stage = self.stage
        incoming = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in stage.incoming]
        flat, (outgoing, results, tape) = jx.trace(self.forward, list(leaves), list(inputs), incoming)
        # Messages and results come first among the outputs, and the tape last.
        num_values = len(outgoing) + len(results)
        tape_variables = flat.outvars[num_values:]

        # 2. B, or I and W, as functions of the tape.
        operations: dict[str, _TracedOperation] = {}
        if self.seeds is not None:
            output_cts = [x for x, v in zip(outgoing, stage.outgoing, strict=True) if is_linear(self.program, v)]
            operations = self._trace_backwards(kinds, leaves, tape, output_cts)
        tape_reads = {kind: pick(fun.reads(fun.tape), tape_variables) for kind, fun in operations.items()}
        values = _TapeValues.of(flat, flat.invars[len(leaves) :], is_fixed, tape_reads.values())

        # 3. The functions of arrays.
        outvars = [*flat.outvars[:num_values], *values.residuals]
        # `live` drops the parts of the tape that no backward reads.
        forward_fun = jx.run(jx.live(flat.eqns, outvars), [*flat.constvars, *flat.invars], outvars)

        def run_forward(leaf_values: Sequence[Any], inputs: Sequence[Any], incoming: Sequence[Any]) -> Any:
            values = forward_fun(*flat.consts, *leaf_values, *inputs, *incoming)
            return values[: len(outgoing)], values[len(outgoing) : num_values], values[num_values:]

        backwards = {kind: values.reader(fun.function(), tape_reads[kind]) for kind, fun in operations.items()}
        weight_residuals = Packing.of_avals(operations["I"].shape[2] if "I" in operations else ())
        return StageRun(run_forward, backwards, Packing.of_avals(v.aval for v in values.residuals), weight_residuals)

    def _trace_backwards(
        self, kinds: str, leaves: Sequence[Any], tape: Any, output_cts: Sequence[Any]
    ) -> "dict[str, _TracedOperation]":
        """Trace B, or I and W, as the schedule has them."""
        if "I" not in kinds:
            return {"B": _TracedOperation.trace(self.whole_grads, leaves, tape, output_cts)}
        inputs = _TracedOperation.trace(self.input_grads, leaves, tape, output_cts)
        weights = _TracedOperation.trace(self.weight_grads, leaves, tape, inputs.shape[2])
        # W is traced on all residuals of I. Those that it does not read, such as a frozen leaf's, are not stored.
        is_read = weights.reads(weights.operands)
        return {
            "I": inputs.select_residuals(is_read),
            "W": replace(weights, operands=pick(is_read, weights.operands)),
        }

    def forward(self, leaves: Sequence[Any], inputs: Sequence[Any], incoming: Sequence[Any]) -> Any:
        """Compute F: the outgoing variables, the results, and the tape (None in an evaluation)."""
        stage, program, env = self.stage, self.program, self.program.environment(inputs)
        env.update(zip(stage.incoming, incoming, strict=True))
        program_leaves = _program_leaves(leaves, stage.piece.unit.leaf_indices, len(program.leaves))
        tape = forward([stage.piece], self.access, program_leaves, env, self.seeds is not None)
        values = [read(env, v) for v in stage.outgoing], [read(env, program.outputs[i]) for i in stage.results]
        return *values, tape if self.seeds is not None else None

    def whole_grads(self, leaves: Sequence[Any], tape: Any, output_cts: Sequence[Any]) -> Any:
        """Compute B."""
        cts, piece = self._output_cotangents(output_cts), self.stage.piece
        program_leaves = _program_leaves(leaves, piece.unit.leaf_indices, len(self.program.leaves))
        grads = backward([piece], self.access, program_leaves, tape, cts, [None] * len(program_leaves))
        return self._incoming_cotangents(cts), [grads[i] for i in piece.unit.leaf_indices], []

    def input_grads(self, leaves: Sequence[Any], tape: Any, output_cts: Sequence[Any]) -> Any:
        """Compute I."""
        cts, piece = self._output_cotangents(output_cts), self.stage.piece
        unit, ((inputs, saved),) = piece.unit, tape
        # A stage without active outputs has no residuals, and only passes cotangents on.
        if saved is None:
            return self._incoming_cotangents(cts), [], []
        active = pick(unit.active, piece.outputs)
        # The unit's outputs are no longer needed below: cotangents of what passes through the stage remain in `cts`.
        active_cts = [cts.pop(v) if v in cts else jnp.zeros(v.aval.shape, v.aval.dtype) for v in active]
        halves = unit.halves(inputs, saved[0], active_cts)
        self.halves.append(halves)  # W, which is traced next, is the other half of this program
        input_cts, weight_residuals = halves.inputs(
            self._fetch(halves.fetched[0], leaves), pick(unit.held, inputs), saved[0].values, active_cts
        )
        # An incoming variable may also pass through the stage: then it has cotangents from the next stage already.
        for v, ct in zip(pick(unit.active_inputs, piece.inputs), input_cts, strict=True):
            cts[v] = add(cts.get(v), ct)
        return self._incoming_cotangents(cts), [], weight_residuals.values

    def weight_grads(self, leaves: Sequence[Any], tape: Any, weight_residuals: Sequence[Any]) -> Any:
        """Compute W."""
        unit, ((inputs, saved),) = self.stage.piece.unit, tape
        if saved is None:
            return [], [None] * len(leaves), []
        # I was traced last, and W is its other half.
        halves = self.halves[-1]
        # W reads a part of the forward's residuals, the inputs that are held, and the residuals that I left.
        values, held_inputs = pick(halves.saved, saved[0].values), pick(unit.held, inputs)
        cts = halves.weights(
            self._fetch(halves.fetched[1], leaves),
            held_inputs,
            values,
            WeightGradResiduals(list(weight_residuals), halves),
        )
        pairs = zip(unit.leaf_indices, cts, strict=True)
        return [], [None if ct is None else self.access.give(i, ct, False) for i, ct in pairs], []

    def _fetch(self, is_read: Sequence[bool], leaves: Sequence[Any]) -> list[jax.Array]:
        """Fetch the leaves of the stage that a half reads."""
        numbers = pick(is_read, self.stage.piece.unit.leaf_indices)
        return [self.access.fetch(i, x, False) for i, x in zip(numbers, pick(is_read, leaves), strict=True)]

    def _output_cotangents(self, output_cts: Sequence[Any]) -> dict[Any, Any]:
        """Return the cotangents of the stage's outgoing variables and of its results, by variable."""
        seeds = self.seeds or {}
        # An output of the program, such as the loss, has a seed; it may be read by a later stage as well.
        cts = dict(zip([v for v in self.stage.outgoing if is_linear(self.program, v)], output_cts, strict=True))
        for i in self.stage.results:
            if i in seeds and not jx.is_literal(v := self.program.outputs[i]):
                cts[v] = add(cts.get(v), seeds[i])
        return cts

    def _incoming_cotangents(self, cts: Mapping[Any, Any]) -> list[jax.Array]:
        """Return the cotangents of the stage's active incoming variables, in order."""
        variables = [v for v in self.stage.incoming if is_linear(self.program, v)]
        return [cts[v] if v in cts else jnp.zeros(v.aval.shape, v.aval.dtype) for v in variables]


@dataclass(frozen=True)
class _TracedOperation:
    """B, I or W, traced.

    Attributes:
      flat: the program; its arguments are leaves, tape and operands.
      leaves: its variables of the leaves.
      tape: its variables of the tape.
      operands: its variables of the cotangents from the next stage, for W of the weight residuals.
      shape: the abstract results: cotangents, gradients, weight residuals.
    """

    flat: jx.Flat
    leaves: Sequence[Any]
    tape: Sequence[Any]
    operands: Sequence[Any]
    shape: tuple[list[Any], list[Any], list[Any]]

    @classmethod
    def trace(
        cls, fun: Callable[..., Any], leaves: Sequence[Any], tape: Any, operands: Sequence[Any]
    ) -> "_TracedOperation":
        """Trace a function of leaves, tape and operands at abstract arguments."""
        flat, shape = jx.trace(fun, list(leaves), tape, list(operands))
        n, m = len(leaves), len(jax.tree.leaves(tape))
        return cls(flat, flat.invars[:n], flat.invars[n : n + m], flat.invars[n + m :], shape)

    def select_residuals(self, is_read: Sequence[bool]) -> "_TracedOperation":
        """Return this operation without the weight residuals that W does not read."""
        cts, grads, weight_residuals = self.shape
        # Residuals are the last outputs, after cotangents and gradients.
        start = len(self.flat.outvars) - len(weight_residuals)
        outvars = (*self.flat.outvars[:start], *pick(is_read, self.flat.outvars[start:]))
        return replace(
            self, flat=replace(self.flat, outvars=outvars), shape=(cts, grads, pick(is_read, weight_residuals))
        )

    def reads(self, arguments: Sequence[Any]) -> list[bool]:
        """Return for each argument whether the operation reads it."""
        variables = {*jx.free(jx.live(self.flat.eqns, self.flat.outvars), self.flat.outvars)}
        return [v in variables for v in arguments]

    def function(self) -> Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Any]:
        """Return the operation as a function of the leaves, the values that it reads of the tape, and the operands."""
        # Tape values that the operation does not read are no arguments, so that nothing has to stash them.
        flat, tape = self.flat, pick(self.reads(self.tape), self.tape)
        invars = [*flat.constvars, *self.leaves, *tape, *self.operands]
        fun, tree = jx.run(jx.live(flat.eqns, flat.outvars), invars, flat.outvars), jax.tree.structure(self.shape)
        return lambda *args: jax.tree.unflatten(tree, fun(*flat.consts, *(x for values in args for x in values)))


@dataclass(frozen=True)
class _TapeValues:
    """Where a backward finds the values of the tape.

    Attributes:
      residuals: the variables in the stash, in order.
      consts: the constants of the forward's trace, by variable.
      inputs: the positions of the program's inputs that are read again, by variable.
    """

    residuals: list[Any]
    consts: dict[Any, Any]
    inputs: dict[Any, int]

    @classmethod
    def of(
        cls, flat: jx.Flat, inputs: Sequence[Any], is_fixed: Sequence[bool], tape_reads: Iterable[Sequence[Any]]
    ) -> "_TapeValues":
        """Return the places of the variables of a forward that backwards read.

        Args:
          flat: the forward.
          inputs: its variables of the program's inputs, and then others.
          is_fixed: for each input, whether a backward finds the value that the forward found.
          tape_reads: the variables of the tape that each backward reads.
        """
        # A variable has one place: an input of the program, a constant, or the stash.
        positions = {v: i for i, (v, fixed) in enumerate(zip(inputs, is_fixed, strict=False)) if fixed}
        consts = dict(zip(flat.constvars, flat.consts, strict=True))
        # A dict as an ordered set: both halves may read one variable.
        variables = dict.fromkeys(v for reads in tape_reads for v in reads if not jx.is_literal(v))
        return cls([v for v in variables if v not in positions and v not in consts], consts, positions)

    def reader(self, fun: Callable[..., Any], tape_reads: Sequence[Any]) -> Callable[..., Any]:
        """Return a function of leaves, tape and operands as one that finds the tape's values itself."""

        def run(leaves: Sequence[Any], inputs: Sequence[Any], stashed: Sequence[Any], operands: Sequence[Any]) -> Any:
            env = dict(zip(self.residuals, stashed, strict=True)) | self.consts
            env |= {v: inputs[i] for v, i in self.inputs.items()}
            return fun(leaves, [read(env, v) for v in tape_reads], operands)

        return run


def _program_leaves(leaves: Sequence[Any], numbers: Sequence[int], num_leaves: int) -> list[Any]:
    """Return all leaves of a program: a stage's leaves at their numbers, and None elsewhere."""
    # `slicing` addresses leaves by their numbers in the program.
    program_leaves: list[Any] = [None] * num_leaves
    for i, x in zip(numbers, leaves, strict=True):
        program_leaves[i] = x
    return program_leaves
