"""What a device holds in a step: at rest, between forward and backward, and as the compiler counts it."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from ..hardware.compiled.memory import program_memory
from ..parallel.data.access import RuleAccess
from ..program import jaxpr as jx
from ..program.primitives import PRODUCTS
from ..program.walk import visit
from ..slicing.access import WholeAccess
from ..step.server import OF_REPLICAS, ServerStep
from ..step.tracing import Loss
from .step_view import StepView as Step
from .timeline.drawing import held_bytes


@dataclass(frozen=True)
class Memory:
    """What one device holds in a step, in bytes.

    Attributes:
      params, grads, optimizer: at rest on the device, as the layout stores them; a server's gradients are those of all
        replicas.
      saved: what the forward of one microbatch leaves for its backward, as traced (compilers may keep less); of a
        pipeline its stash, of a server's replica that of all microbatches. It is among the temporaries, or with
        `offload` in the host's memory.
      host: of the compiled program in the host's memory, for each device.
      host_state: of that, parameters and the optimizer's state.
      arguments, outputs, temporaries: of the compiled program, as `memory_analysis()` has them; gradients are among
        the temporaries, or where programs follow each other among arguments and outputs.
      total: arguments, outputs and temporaries, memory that an output takes over from an argument counted once.
      program: which program that is: "step", or of those that follow each other the one that needs most.
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
    """The memory of "each device", since all are alike."""
    parts: dict[str, Any] = {**step.layout.bytes, "saved": saved(step, batch), **_program("step", compiled)}
    parts["host_state"] = sum(step.layout.host_bytes.values())
    return {"each device": Memory(**parts)}


def of_server(step: ServerStep, batch: Any, programs: dict[str, jax.stages.Compiled]) -> dict[str, Memory]:
    """The server holds the optimizer's state while it is a replica too, and every replica's gradients at the end."""
    at_rest: dict[str, Any] = {**step.layout.bytes, "host_state": 0}
    sizes = {name: _program(name, compiled) for name, compiled in programs.items()}
    replica = max((sizes[name] for name in OF_REPLICAS), key=lambda p: p["total"])
    replica = replica | {"saved": step.strategy.microbatches * saved(step, batch)}
    with_state = replica | {"total": replica["total"] + at_rest["optimizer"]}
    server = max([with_state, sizes["update"] | {"saved": 0}], key=lambda p: p["total"])
    return {
        "server": Memory(**{**at_rest, "grads": step.mesh.size * at_rest["grads"], **server}),
        "others": Memory(**{**at_rest, "optimizer": 0, **replica}),
    }


def _program(name: str, compiled: jax.stages.Compiled) -> dict[str, Any]:
    found: Any = compiled.memory_analysis()
    host = found.host_argument_size_in_bytes + found.host_temp_size_in_bytes
    return program_memory(compiled) | {"program": name, "host": host}


def saved(step: Step, batch: Any) -> int:
    """Bytes that a device keeps of a forward, of one microbatch or of concurrent ones, for its backward; of a pipeline,
    of all that its ring of slots can hold. `batch` is arrays or `jax.ShapeDtypeStruct`; nothing is compiled.
    """
    if step.schedule is not None:
        return held_bytes(step, batch)
    return forward(step, batch).saved


def in_flight(step: Step, batch: Any) -> tuple[int, int]:
    """Bytes of weights and of gradients that a device's loops over layers hold beside those of the layer that runs,
    since they gather ahead and reduce behind; nothing is compiled.
    """
    schedule = step.schedule
    if step.strategy.server or step.layout.storage.cut or (schedule is not None and not schedule.in_turn):
        return 0, 0
    loss = step.traced(batch)
    main = loss.program.main
    if schedule is not None and (main is None or main.length <= schedule.ranks):
        return 0, 0
    whole = WholeAccess(RuleAccess(step.layout, step.rule, loss.program, step.strategy).sends)
    found = jax.eval_shape(lambda leaves: loss.program.in_flight(whole, leaves), loss.leaves)
    flights = [flight for at, flight in found.items() if schedule is None or loss.program.pieces[at] is main]
    size = lambda arrays: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))
    return size([flight.weights for flight in flights]), size([flight.gradients for flight in flights])


class ForwardCost(NamedTuple):
    """A forward on a device.

    Attributes:
      flops: of its matrix products.
      products: how many they are.
      saved: bytes that its backward needs of it.
    """

    flops: float
    products: int
    saved: int


def forward(step: Step, batch: Any) -> ForwardCost:
    """What a forward on a device computes and keeps, of one microbatch or of concurrent ones.

    Counted as kept are the arrays that JAX's derivatives ask for and those that pass from one piece of the loss to the
    next, each once, without weights and batch. Not for pipelines.
    """
    loss = step.traced(batch)

    def tape(leaves: list[Any], *inputs: Any) -> Any:
        *_, tape = Loss(loss, WholeAccess(), leaves).forward(*inputs)
        # Of a segment come what it saved and, of an epilogue, its weights.
        return [(inputs, kept[0] if isinstance(kept, tuple) else kept) for inputs, kept in tape]

    traced, _ = jx.trace(tape, loss.leaves, *loss.inputs, axes=loss.traced_axes)
    kept = {v for v in traced.outvars if not jx.is_literal(v)} - {*traced.invars, *traced.constvars}
    flops = 2.0 * sum(count for count, _ in jx.matmuls(loss.program.eqns).values())
    saved = sum(map(jx.nbytes, kept))
    products = sum(runs for eqn, runs in visit(loss.program.eqns) if eqn.primitive.name in PRODUCTS)
    return ForwardCost(flops, products, saved)
