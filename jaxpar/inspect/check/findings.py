"""check: proof that a strategy took effect, read from the program that will run.

    state        each array has the strategy's bytes on a device, on entry and on exit of the program, within 0.5%
    arguments    so do all of them together, as the compiler counts them
    layers       leaves that the loss takes layer by layer are fetched, and their gradients reduced, layer by layer
    as written   the collectives of the jaxpr equal the closed form's exactly
    as compiled  the compiled program's have the closed form's bytes, within 1%, and no large ones are added
    products     FP8 products are kernels that multiply float8
    tensor       its ranks compute with their parts of the weights, and gather none
    overlap      if asked for: collectives of layers run while other layers are computed (`overlap.py`)

`promises.py` states the promises, and how compilers may differ. A central server is checked by its exchanges
instead.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...backend.text import few
from ...hardware.compiled.compiler_remarks import why_unread
from ...hardware.compiled.cost import Costs
from ...hardware.compiled.kernels import Executable
from ...hardware.hardware import Hardware
from ...layout.leaves import Leaf
from ...layout.mesh import devices_text
from ...layout.precision import F8
from ...numerics.fp8.product import SCOPE
from ...program import jaxpr as jx
from ...program.walk import visit
from ...step.server import OF_REPLICAS, ServerStep
from ..expected import expected
from ..ledger import Ledger
from ..step_view import StepView as Step
from ..transfers import rehearse
from .overlap import hardware_of, overlap_findings
from .promises import ALLOWED, LARGE, SCALARS, Holding, bounds, expected_holdings, gathered_weights, not_by_layer
from .proof import Finding, Proof, Verdict
from .resharding import Move, cause, moves

_F8 = jnp.dtype(F8).name
# With recomputation, a weight has three FP8 products: the forward's, its recomputation, and dx. In a loop of one layer
# the compiler merges the first two.
_MERGED_RECOMPUTATION = 2 / 3


def check(
    step: Step, batch: Any, compiled: jax.stages.Compiled | None = None, overlap: bool | Hardware = False
) -> Proof:
    """Check that a training step does what its strategy promises, for a batch of these shapes. Nothing runs.

    Args:
      step: from `make_train_step`.
      batch: arrays or `jax.ShapeDtypeStruct`, as for `step.compile`.
      compiled: the program that will run, if it exists already. Otherwise it is compiled here, and jit finds it later.
      overlap: whether to check, too, that collectives of layers overlap with kernels, by the predicted seconds of the
        devices' kind; or a `Hardware` with the numbers of a kind that the table lacks. For GPUs only; none need be
        present.

    Raises:
      ValueError: the batch's rows do not fit the strategy; or the step is for TPUs, whose programs are not read. With
        `overlap`, also for CPUs, whose programs have no asynchronous collectives, and for `server=True`, which sends
        between programs. A broken promise does not raise here: call `Proof.require`.
    """
    step.check(batch)
    if why := why_unread(step.mesh.devices.flat[0].platform):
        raise ValueError(
            f"check: {why}; check the same strategy on as many simulated devices, and jp.verify(model, strategy, batch)"
        )
    # Refuse `overlap` before anything is compiled.
    hardware = overlap if isinstance(overlap, Hardware) else hardware_of(step) if overlap else None
    step = step.settled(batch)
    if isinstance(step, ServerStep):
        findings = list(_server_findings(step, batch))
    else:
        compiled = compiled or step.compile(batch)
        findings = [*_state_findings(step, batch, compiled), *_layer_findings(step, batch)]
        program = Executable(compiled.as_text() or "", step.mesh)
        findings += _collective_findings(step, batch, program)
        findings += overlap_findings(step, batch, program, hardware) if hardware else ()
    return Proof(str(step.strategy), devices_text(step.mesh), tuple(findings))


def _state_findings(step: Step, batch: Any, compiled: jax.stages.Compiled) -> Iterator[Finding]:
    """Yield a finding for each array of the state, and one for all arguments together."""
    state, batch_shapes = step.abstract_state(), jax.eval_shape(lambda array: array, batch)
    entry_state, row_shardings = compiled.input_shardings[0]
    checked_trees = lambda train_state: (train_state.params, train_state.copy, train_state.optimizer)
    abstract_trees, exit_shardings = (
        checked_trees(train_state) for train_state in (state, compiled.output_shardings[0])
    )
    # 1. Each array of the parameters, their copy and the optimizer state.
    arrays, tree = jax.tree.flatten(abstract_trees)
    entry_shardings = tree.flatten_up_to(checked_trees(entry_state))
    holdings = expected_holdings(step, state)
    for holding, array, entry_sharding, exit_sharding in zip(
        holdings, arrays, entry_shardings, tree.flatten_up_to(exit_shardings), strict=True
    ):
        bytes_by_side = {"leaves": _local_bytes(array, exit_sharding)}
        bytes_by_side |= {} if entry_sharding is None else {"enters": _local_bytes(array, entry_sharding)}
        # One finding for each array, about the side that is further from the promise.
        yield _array_finding(step, holding, *max(bytes_by_side.items(), key=lambda side: abs(side[1] - holding.bytes)))
    # jit drops arguments that the program does not read: their sharding is None.
    promised_bytes = sum(
        holding.bytes for holding, sharding in zip(holdings, entry_shardings, strict=True) if sharding is not None
    )
    # 2. All arguments: these arrays, the remaining state, and the batch.
    remaining_arrays, tree = jax.tree.flatten((state.step, state.variables, state.scale, state.key, batch_shapes))
    remaining_shardings = tree.flatten_up_to(
        (entry_state.step, entry_state.variables, entry_state.scale, entry_state.key, row_shardings)
    )
    promised_bytes += sum(
        _local_bytes(array, sharding)
        for array, sharding in zip(remaining_arrays, remaining_shardings, strict=True)
        if sharding is not None
    )
    memory: Any = compiled.memory_analysis()
    argument_bytes = memory.argument_size_in_bytes + memory.host_argument_size_in_bytes
    verdict = _verdict(argument_bytes, 0.995 * promised_bytes - SCALARS, 1.005 * promised_bytes + SCALARS)
    hint = "the compiler's arguments are not the state and this device's rows; see compiled.memory_analysis()"
    note = "" if verdict == "ok" else hint
    yield Finding("arguments", "state and rows", promised_bytes, argument_bytes, verdict, note)


def _local_bytes(x: Any, sharding: Any) -> int:
    """Return the bytes that one device stores of an array."""
    return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _array_finding(step: Step, holding: Holding, side: str, local_bytes: int) -> Finding:
    """Return the finding of one array, of which a device stores `local_bytes` as it "enters" or "leaves" the step."""
    verdict: Verdict = "ok"
    note = ""
    if local_bytes > 1.005 * holding.bytes:  # too large: the sharding is missing
        factor = local_bytes / max(holding.bytes, 1)
        verdict = "MISSING"
        note = f"it {side} the step {factor:.3g} times as large as its shard; print(step.layout) has its spec, and why"
    elif local_bytes < 0.995 * holding.bytes:
        verdict = "UNPROMISED"
        note = f"it {side} the step in shards that {step.strategy} does not have; print(step.layout) has its spec"
    return Finding("state", f"{holding.kind} {holding.path}", holding.bytes, local_bytes, verdict, note)


def _verdict(num_bytes: float, lowest: float, highest: float) -> Verdict:
    """Compare bytes with their bounds."""
    return "MISSING" if num_bytes < lowest else "UNPROMISED" if num_bytes > highest else "ok"


def _layer_findings(step: Step, batch: Any) -> Iterator[Finding]:
    """Yield a finding for each leaf that is wrongly fetched whole, and one for all that are fetched layer by layer."""
    traced = step.traced(batch)
    if not traced.axes:
        return
    program = traced.program
    units = step.layout.storage.units

    def layer_and_stack_bytes(leaf: Leaf) -> tuple[int, int]:
        """Return the bytes of one layer and of all layers, on a tensor rank."""
        # The dims up to `stage` count layers; the others are one layer.
        stack_bytes = math.prod(leaf.local.stored) * step.policy.computed(leaf.dtype).itemsize
        return stack_bytes // math.prod(leaf.shape[: leaf.stage + 1]), stack_bytes

    # A leaf that is fetched whole needs the memory of all its layers at once.
    for leaf in not_by_layer(step, program):
        note = (
            "the loss takes its layers one by one, and the step fetches them or reduces their gradients all at once; "
            "see print(step.layout) for why they are stored so"
        )
        yield Finding("layers", leaf.path, *layer_and_stack_bytes(leaf), "MISSING", note)
    layered_leaves = [leaf for leaf, uses in zip(units, program.uses, strict=True) if any(uses)]
    if layered_leaves:
        layer_bytes = sum(layer_and_stack_bytes(leaf)[0] for leaf in layered_leaves)
        yield Finding("layers", f"{len(layered_leaves)} leaves, one layer", layer_bytes, layer_bytes)


def _collective_findings(step: Step, batch: Any, program: Executable) -> Iterator[Finding]:
    """Yield the findings about everything that the program computes and sends."""
    jaxpr, closed = step.trace(batch), expected(step, batch)
    yield from _written_findings(closed, Ledger.from_jaxpr(jaxpr, step.mesh))
    yield from _compiled_findings(step, closed, [program], jaxpr)
    yield from _product_findings(step, step.traced(batch).notes.in_fp8, jaxpr, program)
    if step.mesh.shape["tensor"] > 1:
        yield from _tensor_findings(step, batch, jaxpr)


def _written_findings(closed: Ledger, written: Ledger) -> Iterator[Finding]:
    """Compare the closed form with the jaxpr: both must be equal."""
    fields = ("kind", "axes", "dtype")
    bytes_by_source, counts_by_source = (
        [ledger.by(*fields, value=value) for ledger in (closed, written)] for value in ("bytes", "count")
    )
    # Keys of both, in order: a collective that only one of them has is a difference too.
    for key in dict.fromkeys((*bytes_by_source[0], *bytes_by_source[1])):
        (promised_bytes, written_bytes), (expected_count, written_count) = (
            [by_key.get(key, 0) for by_key in sums] for sums in (bytes_by_source, counts_by_source)
        )
        kind, axes, dtype = key
        description = f"{kind} {'+'.join(axes)} {dtype} {expected_count} x"
        if (promised_bytes, expected_count) == (written_bytes, written_count):
            yield Finding("as written", description, promised_bytes, written_bytes)
            continue
        # Either number may be smaller: the same bytes in fewer calls are a difference, too.
        is_missing = (written_bytes, written_count) < (promised_bytes, expected_count)
        note = f"the step calls it {written_count} times, the closed form {expected_count}; " + (
            "a rule (jaxpar/parallel/) leaves it out: jp.verify(model, strategy, batch) shows which gradients suffer"
            if is_missing
            else "neither the strategy nor the loss calls it: look for its caller in step.trace(batch)"
        )
        yield Finding(
            "as written", description, promised_bytes, written_bytes, "MISSING" if is_missing else "UNPROMISED", note
        )


def _compiled_findings(step: Step, closed: Ledger, programs: Sequence[Executable], jaxpr: Any) -> Iterator[Finding]:
    """Compare the closed form with the compiled programs, within `bounds`."""
    compiled_ledger, partitioner_moves = Ledger.of(*programs), None
    loop_lengths = (eqn.params["length"] for eqn, _ in visit(jx.opened(jaxpr)[0].eqns) if eqn.primitive.name == "scan")
    # XLA unrolls a loop of one layer, which changes what it may merge.
    one_layer = 1 in loop_lengths
    keys = dict.fromkeys((collective.kind, collective.axes) for collective in (*closed, *compiled_ledger))
    for kind, axes in keys:
        promised, compiled_collectives = (
            [collective for collective in ledger if (collective.kind, collective.axes) == (kind, axes)]
            for ledger in (closed, compiled_ledger)
        )
        limits = bounds(step, kind, promised, one_layer)
        sent = sum(collective.bytes for collective in compiled_collectives)
        verdict = _verdict(sent, limits.lowest, limits.highest)
        note, moves_of_key = "", ()
        if verdict == "MISSING":
            note = (
                "the compiled program sends less than its closed form; compare print(step.explain(batch)) with a "
                "smaller strategy, and report it as a fault of jaxpar or of the compiler"
            )
        elif verdict == "UNPROMISED":
            # The optimizer may add small collectives, such as norms of leaves.
            is_large = sent - limits.promised >= LARGE
            if partitioner_moves is None:
                # Reading the moves takes time: only where a promise is broken, and once.
                partitioner_moves = moves(step, programs[0], jaxpr, SCALARS)
            moves_of_key = tuple(move for move in partitioner_moves if (move.kind, move.axes) == (kind, axes))
            verdict, note = (
                (verdict, _cause_of_moves(step, moves_of_key)) if is_large else ("ok", f"small: {ALLOWED['small']}")
            )
        if verdict == "ok" and not note:
            # The program is within the bounds. Name the allowances that it needed.
            # "norms" allows more bytes, "widened" changes the promise itself, and all others allow fewer bytes.
            is_less, is_more = sent < 0.99 * limits.promised, sent > 1.01 * limits.promised
            applies_to_name = {"widened": True, "norms": is_more}
            applied_names = [name for name in limits.names if applies_to_name.get(name, is_less)]
            note = "; ".join(f"{name}: {ALLOWED[name]}" for name in applied_names)
        yield Finding("as compiled", f"{kind} {'+'.join(axes)}", limits.promised, sent, verdict, note, moves_of_key)


def _cause_of_moves(step: Step, moves_of_key: Sequence[Move]) -> str:
    """Return what the partitioner moves and why, if the program's text tells."""
    if not moves_of_key:
        return "the compiler added it; see step.explain(batch).ledger, and compiled.as_text() for where it stands"
    largest = moves_of_key[0]
    return f"the partitioner adds it to the update; the largest move: {largest.message}; {cause(step, largest)}"


def _product_findings(step: Step, fp8_paths: Sequence[str], jaxpr: Any, program: Executable) -> Iterator[Finding]:
    """Compare the FLOPs of FP8 products in the jaxpr and in the compiled program.

    A product in a loop counts once on both sides, so that the trip counts do not matter.
    """
    if step.strategy.precision != "fp8":
        return
    description = f"{len(fp8_paths)} leaves in {_F8}"
    # 1. The products that the step's jaxpr multiplies in FP8.
    dots = (eqn for eqn, _ in visit(jx.opened(jaxpr)[0].eqns) if eqn.primitive.name == "dot_general")
    promised_flops = sum(2 * jx.matmuls([eqn]).get(_F8, (0, ""))[0] for eqn in dots)
    if step.mesh.devices.flat[0].platform == "cpu":
        note = "CPU: no kernel multiplies float8; the same numbers are multiplied as wider ones"
        yield Finding("products", description, promised_flops, promised_flops, note=note, unit="FLOP")
        return
    # 2. The products that kernels multiply in FP8. One in another dtype whose source is an FP8 product is a finding.
    compiled_flops = 0
    for kernel in (cost.kernel for cost in Costs.of(program)):
        for product in kernel.products:
            if product.dtype == _F8:
                compiled_flops += product.flops
            elif SCOPE in kernel.source:
                path = kernel.source.partition(SCOPE)[2].partition(")")[0]
                note = f"{kernel.label} multiplies {product.dtype}, of {path}: no FP8 kernel for this device; use "
                note += "precision='bf16'"
                yield Finding("products", kernel.name, product.flops, 0, "MISSING", note, unit="FLOP")
    lowest_flops = 0.99 * promised_flops * (1 if step.strategy.remat == "none" else _MERGED_RECOMPUTATION)
    note = f"less than promised of {few(fp8_paths)}: compare compiled.as_text() with step.trace(batch)"
    verdict, note = ("MISSING", note) if compiled_flops < lowest_flops else ("ok", "")
    yield Finding("products", description, promised_flops, compiled_flops, verdict, note, unit="FLOP")


def _tensor_findings(step: Step, batch: Any, jaxpr: Any) -> Iterator[Finding]:
    """Yield a finding for each large all-gather over `tensor` of weights, or for lack of a rule."""
    gathers = {
        "weights": gathered_weights(jaxpr, len(step.layout.leaves)),
        "for want of a rule": step.traced(batch).notes.gathered,
    }
    large_gathers = {
        (reason, line): num_bytes
        for reason, bytes_by_line in gathers.items()
        for line, num_bytes in bytes_by_line.items()
        if num_bytes >= LARGE
    }
    for (reason, line), num_bytes in large_gathers.items():
        note = (
            "tensor ranks gather it; give the leaf another dim, or leave it whole: rules={'path/of/leaf': None}"
            if reason == "weights"
            else "tensor ranks gather what it reads, as no rule says how to split it; express it by other operations, "
            "or leave the leaves before it whole: rules={'path/of/leaf': None}"
        )
        yield Finding("tensor", f"{reason}, {line}", 0, num_bytes, "UNPROMISED", note)
    if not large_gathers:
        yield Finding("tensor", "large gathers of weights", 0, 0)


def _server_findings(step: ServerStep, batch: Any) -> Iterator[Finding]:
    """Yield the findings about a central server: its exchanges, the replicas' programs, and the server's state."""
    rehearsal = rehearse(step, batch)
    for transfer in rehearsal.transfers:
        verdict = _verdict(transfer.found, transfer.expected, transfer.expected)
        hint = "a central server passes on neither more nor less; see parallel/data/server.py"
        note = "" if verdict == "ok" else hint
        yield Finding(
            "exchanges", f"{transfer.kind} of {transfer.what}", transfer.expected, transfer.found, verdict, note
        )
    # Replicas may send what the model itself writes, in two programs: forward and backward.
    programs = [Executable(rehearsal.programs[name].as_text() or "", step.mesh) for name in OF_REPLICAS]
    # The closed form of a server has only the model's own collectives, such as BatchNorm's.
    yield from _compiled_findings(step, expected(step, batch), programs, step.trace(batch))
    # At home, on the server, every array is whole and on one device.
    state = step.abstract_home()
    arrays = jax.tree.leaves((state.params, state.optimizer))
    for holding, array in zip(expected_holdings(step, state), arrays, strict=True):
        # An array that is on several devices is counted on each, so that a copy shows.
        server_bytes = _local_bytes(array, array.sharding) * len(array.sharding.device_set)
        verdict = _verdict(server_bytes, holding.bytes, holding.bytes)
        note = "" if verdict == "ok" else "the server should store it whole, and no other device should"
        yield Finding("state", f"{holding.kind} {holding.path}", holding.bytes, server_bytes, verdict, note)
