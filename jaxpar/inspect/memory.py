"""The memory of a device in a step: the state at rest, saved activations, and the compiled program."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..hardware.compiled.memory import program_memory
from ..parallel.data.access import RuleAccess
from ..program import jaxpr as jx
from ..program.primitives import PRODUCTS
from ..program.walk import visit
from ..slicing.access import WholeAccess
from ..slicing.pieces import Stack
from ..step.pipeline import Piped, slot_tables_of
from ..step.server import OF_REPLICAS, ServerStep
from ..step.tracing import Loss
from .step_view import StepView as Step


@dataclass(frozen=True)
class Memory:
    """The memory that one device uses in a step, in bytes.

    Attributes:
      params, grads, optimizer: the state at rest on the device, as the layout stores it. A server stores the gradients
        of all replicas.
      saved: the activations that the forward of one microbatch saves for its backward, as traced (compilers may keep
        less). For a pipeline it is the stash, for a server's replica the activations of all microbatches. They are
        part of the temporaries, or with `offload` in the host's memory.
      host: the compiled program's arrays in the host's memory, per device.
      host_state: the part of `host` that is parameters and optimizer state.
      program: the name of the compiled program: "step", or the largest of several programs that run one after another.
      arguments, outputs, temporaries: of the compiled program, as in `memory_analysis()`. Gradients are temporaries, or
        arguments and outputs where programs run one after another.
      total: arguments, outputs and temporaries. An output that reuses an argument's memory is counted once.
    """

    params: int
    grads: int
    optimizer: int
    saved: int
    host: int
    host_state: int
    program: str
    arguments: int
    outputs: int
    temporaries: int
    total: int


def of_step(step: Step, batch: Any, compiled: jax.stages.Compiled) -> dict[str, Memory]:
    """Return the memory of "each device"; all devices use the same."""
    fields: dict[str, Any] = {**step.layout.bytes, "saved": saved(step, batch), **_program_bytes("step", compiled)}
    fields["host_state"] = sum(step.layout.host_bytes.values())
    return {"each device": Memory(**fields)}


def of_server(step: ServerStep, batch: Any, programs: dict[str, jax.stages.Compiled]) -> dict[str, Memory]:
    """Return the memory of the "server" and of the "others", its replicas.

    The server stores the optimizer state while it runs as a replica, and the gradients of all replicas in the update.
    """
    at_rest: dict[str, Any] = {**step.layout.bytes, "host_state": 0}
    program_bytes = {name: _program_bytes(name, compiled) for name, compiled in programs.items()}
    replica_bytes = max((program_bytes[name] for name in OF_REPLICAS), key=lambda program: program["total"])
    replica_bytes = replica_bytes | {"saved": step.strategy.microbatches * saved(step, batch)}
    # Replicas run forward and backward, then the server runs the update: its peak is the larger of both.
    replica_with_state = replica_bytes | {"total": replica_bytes["total"] + at_rest["optimizer"]}
    server_bytes = max(
        [replica_with_state, program_bytes["update"] | {"saved": 0}], key=lambda program: program["total"]
    )
    return {
        "server": Memory(**{**at_rest, "grads": step.mesh.size * at_rest["grads"], **server_bytes}),
        "others": Memory(**{**at_rest, "optimizer": 0, **replica_bytes}),
    }


def _program_bytes(name: str, compiled: jax.stages.Compiled) -> dict[str, Any]:
    """Return the fields of `Memory` that describe a compiled program."""
    analysis: Any = compiled.memory_analysis()
    host_bytes = analysis.host_argument_size_in_bytes + analysis.host_temp_size_in_bytes
    return program_memory(compiled) | {"program": name, "host": host_bytes}


def saved(step: Step, batch: Any) -> int:
    """Return the bytes that a device saves in a forward for its backward.

    It counts the forward of one microbatch, or of concurrent ones; for a pipeline, the capacity of its ring of slots.
    Nothing is compiled.
    """
    if step.schedule is not None:
        return sum(_stash_bytes(step, batch))
    return forward(step, batch).saved


def slot_bytes(step: Step, batch: Any) -> int:
    """Return the bytes of one slot of a pipelined step: what one microbatch's forward through one chunk saves.

    Nothing is compiled or allocated.
    """
    assert step.schedule is not None
    slots = slot_tables_of(step.schedule).num_stash_slots if step.layout.storage.cut else step.schedule.slots
    return _stash_bytes(step, batch)[0] // slots


def _stash_bytes(step: Step, batch: Any) -> list[int]:
    """Return the bytes that slots hold from forwards to backwards, and from input (I) to weight (W) gradients."""
    schedule = step.schedule
    assert schedule is not None
    # Traced abstractly under `shard_map`, so that shapes are per device.
    state = step.abstract_state()

    def stash_arrays(
        stored: Any, variables: Any, batch: Any, key: jax.Array
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        loss, rows = step.local.bound(stored, variables, batch, key)
        piped = Piped(step.tracing, loss, variables, rows, jax.random.split(key, schedule.microbatches))
        # The seed is any cotangent: only shapes are traced.
        return piped.pipeline(jnp.float32(1)).held()

    step.check(batch)
    stored = state.copy if step.layout.copied else state.params

    def stash_on_device(stored: Any, variables: Any, batch: Any, key: jax.Array) -> Any:
        return step.mapped(stash_arrays, batch, jax.sharding.PartitionSpec())(jnp.int32(0), stored, variables, key)[0]

    stash_shapes = jax.eval_shape(stash_on_device, stored, state.variables, batch, state.key)
    return [sum(x.size * x.dtype.itemsize for x in part) for part in stash_shapes]


def in_flight(step: Step, batch: Any) -> tuple[int, int]:
    """Return the bytes of weights and of gradients that loops over layers have in flight on a device.

    While a layer runs, loops gather the next layer's weights and reduce the previous layer's gradients. These buffers
    exist in addition to the buffers of the running layer. Nothing is compiled.
    """
    step = step.settled(batch)
    schedule = step.schedule
    if step.strategy.server or step.layout.storage.cut or (schedule is not None and not schedule.in_turn):
        return 0, 0
    loss = step.traced(batch)
    main_stack = loss.program.main
    # A rank with one layer has no next and no previous layer.
    if schedule is not None and (main_stack is None or main_stack.length <= schedule.ranks):
        return 0, 0
    # Shapes are enough. The access only has to tell which leaves the rule communicates.
    access = WholeAccess(RuleAccess(step.layout, step.rule, loss.program, step.strategy).sends)
    flights_by_piece = jax.eval_shape(lambda leaves: loss.program.in_flight(access, leaves), loss.leaves)
    flights = [
        flight
        for piece_index, flight in flights_by_piece.items()
        if schedule is None or loss.program.pieces[piece_index] is main_stack
    ]
    num_bytes = lambda arrays: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))
    return num_bytes([flight.weights for flight in flights]), num_bytes([flight.gradients for flight in flights])


class ForwardCost(NamedTuple):
    """The cost of a forward on a device.

    Attributes:
      flops, products: FLOPs and number of its matrix products.
      saved: the bytes that its backward needs.
      saved_by_layers: the part of `saved` that the layers of layer stacks leave.
    """

    flops: float
    products: int
    saved: int
    saved_by_layers: int


def forward(step: Step, batch: Any) -> ForwardCost:
    """Return the cost of a forward on a device, of one microbatch or of concurrent ones. It does not support pipelines.

    Saved arrays are needed by JAX's derivatives, or pass from one piece of the loss to the next. Each counts once.
    Weights and the batch are left out.
    """
    loss = step.traced(batch)

    def saved_by_pieces(leaves: list[Any], *inputs: Any) -> Any:
        *_, tape = Loss(loss, WholeAccess(), leaves).forward(*inputs)
        # The tape's entry of a segment is a tuple: the saved arrays, and for an epilogue its weights, which are left
        # out.
        return [(inputs, saved[0] if isinstance(saved, tuple) else saved) for inputs, saved in tape]

    traced, pieces = jx.trace(saved_by_pieces, loss.leaves, *loss.inputs, axes=loss.traced_axes)
    # Inputs and constants are weights and the batch, which exist anyway.
    saved_arrays = {v for v in traced.outvars if not jx.is_literal(v)} - {*traced.invars, *traced.constvars}
    in_piece = jax.tree.unflatten(jax.tree.structure(pieces), traced.outvars)
    stacks = [
        saved for piece, (_, saved) in zip(loss.program.pieces, in_piece, strict=True) if isinstance(piece, Stack)
    ]
    saved_by_layers = {v for v in jax.tree.leaves(stacks) if not jx.is_literal(v)} & saved_arrays
    flops = 2.0 * sum(count for count, _ in jx.matmuls(loss.program.eqns).values())
    saved = sum(map(jx.nbytes, saved_arrays))
    products = sum(num_runs for eqn, num_runs in visit(loss.program.eqns) if eqn.primitive.name in PRODUCTS)
    return ForwardCost(flops, products, saved, sum(map(jx.nbytes, saved_by_layers)))
