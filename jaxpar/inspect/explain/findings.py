"""explain: what a training step stores, sends and computes, from the compiled program, with the closed form."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...backend.machines import hosts_of, leaves_host
from ...backend.text import few, size
from ...hardware.compiled.compiler_remarks import remarks as compiler_remarks
from ...hardware.compiled.compiler_remarks import why_unread
from ...hardware.compiled.cost import Costs
from ...hardware.compiled.kernels import Executable, Operation, Start
from ...hardware.hardware import of_device_kind
from ...layout.leaves import PAD_FROM
from ...layout.mesh import devices_text
from ...model.batches import as_array, batch_shardings, is_array
from ...model.paths import name_of
from ...parallel.data import rule_of
from ...parallel.data.eight_bits import BLOCK
from ...parallel.pipeline.chunks import padded
from ...parallel.pipeline.flat import stages
from ...program.savings import bytes_saved
from ...slicing.program import Program
from ...slicing.stacks import described
from ...step.passes import Notes
from ...step.pipeline import slot_tables_of
from ...step.server import OF_REPLICAS, ServerStep
from ...step.tracing import Traced
from ..check.promises import SCALARS
from ..check.resharding import Move, cause, moves
from ..expected import expected
from ..ledger import Collective, Ledger, with_inner
from ..memory import in_flight, of_server, of_step
from ..predict.efficiency import estimated_seconds
from ..step_view import StepView as Step
from ..transfers import Transfer, rehearse
from .explanation import Check, Explanation


def explain(step: Step, batch: Any, compiled: jax.stages.Compiled | None = None) -> Explanation:
    """Explain a training step for a batch of these shapes; see `Step.explain`. Nothing runs.

    Args:
      batch: arrays or `jax.ShapeDtypeStruct`.
      compiled: `step.compile(batch)`, if it exists already.
    """
    batch = jax.tree.map(as_array, batch)
    step.check(batch)
    step = step.settled(batch)
    traced, jaxpr, closed_form = step.traced(batch), step.trace(batch), expected(step, batch)
    transfers: tuple[Transfer, ...] = ()
    remarks = []
    # 1. The programs and the memory. A server runs several programs, which a rehearsal compiles.
    if isinstance(step, ServerStep):
        rehearsal = rehearse(step, batch)
        transfers, memory = tuple(rehearsal.transfers), of_server(step, batch, rehearsal.programs)
        texts = [rehearsal.programs[name].as_text() or "" for name in OF_REPLICAS]
        total = size(sum(transfer.found for transfer in transfers))
        remarks.append(f"{len(transfers)} exchanges a step pass {total} through the server's links.")
    else:
        if compiled is None:
            compiled = step.compile(batch)
        texts, memory = [compiled.as_text() or ""], of_step(step, batch, compiled)
    # 2. What they send and compute.
    programs = [Executable(text, step.mesh) for text in texts]
    written_ledger, compiled_ledger = Ledger.from_jaxpr(jaxpr, step.mesh), Ledger.of(*programs)
    costs = Costs.of(*programs)
    has_known_counts = all(cost.executions is not None for cost in costs)
    # The compiled program may add collectives for the update; the trace tells which line asked for them.
    partitioner_moves = [move for program in programs for move in moves(step, program, jaxpr, SCALARS)]
    # 3. What a reader should know, in the order of print.
    remarks += [
        *_prefetch_remarks(step, batch),
        *_eight_bit_remarks(step, closed_form),
        *_step_remarks(step, traced, compiled_ledger, has_known_counts, partitioner_moves),
        *_fused_attention_remark(step, costs),
        *compiler_remarks(costs, step.mesh.devices.flat[0].platform),
        *_placement_remarks(step, batch),
    ]
    return Explanation(
        strategy=str(step.strategy),
        devices=devices_text(step.mesh),
        hosts=len({*hosts_of(step.mesh.devices).flat}),
        axes={axis: axis_size for axis, axis_size in step.mesh.shape.items() if axis_size > 1},
        parameters=sum(math.prod(leaf.shape) for leaf in step.layout.storage.models),
        memory=memory,
        flops=costs.flops if has_known_counts else {},
        ledger=compiled_ledger,
        across=_axes_across_hosts(step.mesh, programs, closed_form),
        checks=tuple(_checks(step, closed_form, written_ledger, compiled_ledger)),
        transfers=transfers,
        notes=step.layout.notes,
        gathered=dict(traced.notes.gathered),
        loops=described(traced.program, step.layout.storage),
        moves=tuple(partitioner_moves),
        savings=bytes_saved(jaxpr),
        values=step.chosen,
        remarks=tuple(remarks),
    )


def _fused_attention_remark(step: Step, costs: Costs) -> Iterator[str]:
    """Yield the bytes and seconds that `kernels=fused` saves, at least: XLA may store some arrays in float32.

    Spelled out, attention passes its scores through memory 4 times forward: the product writes the scores, the softmax
    reads them and writes weights, and a product reads the weights. Backward it is 7 times: weights are read, their
    cotangents written, both are read, the scores' cotangents are written, and read for queries and for keys.
    """
    hardware = of_device_kind(step.mesh.devices.flat[0].device_kind)
    # Seconds need a known memory bandwidth.
    if step.strategy.kernels != "fused" or hardware is None or hardware.memory_bandwidth is None:
        return
    # Queries x keys of each head, at the width of the operands.
    score_bytes = {"attention": 0, "attention backward": 0}
    for cost in costs:
        for product in cost.kernel.products:
            if product.kind in score_bytes:
                num_bytes = product.batch * product.m * product.n * jnp.dtype(product.dtype).itemsize
                score_bytes[product.kind] += (cost.executions or 1) * num_bytes
    forward, backward = score_bytes.values()
    if forward:
        seconds = estimated_seconds({}, 4 * forward + 7 * backward, hardware)
        yield (
            f"kernels=fused: a device stores no scores of attention. In a step, {size(forward)} of them would pass its "
            f"memory 4 times forward and 7 times backward: at least {1e3 * seconds:.3g} ms, as predicted for "
            f"{hardware.kind}."
        )


def _axes_across_hosts(
    mesh: jax.sharding.Mesh, programs: Sequence[Executable], closed: Ledger
) -> frozenset[tuple[str, ...]]:
    """Return the axes whose collectives leave a host.

    For a compiled collective, its groups decide: a part of an axis may stay within a host although the axis does not.
    """
    hosts = hosts_of(mesh.devices).ravel()
    # 1. Compiled collectives, by their own groups.
    is_across_by_axes: dict[tuple[str, ...], bool] = {}
    for start in starts(operation for program in programs for operation in program.operations):
        # Some group that spans hosts is enough.
        is_across_by_axes[start.axes] = is_across_by_axes.get(start.axes, False) or any(
            len({hosts[place] for place in group}) > 1 for group in start.groups
        )
    # 2. Axes that only the closed form has, by the mesh.
    return frozenset(
        axes
        for axes in {*is_across_by_axes, *(collective.axes for collective in closed)}
        if (is_across_by_axes[axes] if axes in is_across_by_axes else leaves_host(mesh, axes))
    )


def starts(operations: Iterable[Operation]) -> Iterator[Start]:
    """Return every collective of a compiled program, including those in loops and branches."""
    return (operation for operation in with_inner(operations) if isinstance(operation, Start))


def _checks(step: Step, closed_form: Ledger, written_ledger: Ledger, compiled_ledger: Ledger) -> Iterator[Check]:
    """Yield the collectives of the closed form, the jaxpr and the compiled program, by kind and axes."""
    ledgers = (closed_form, written_ledger, compiled_ledger)
    for key in dict.fromkeys((collective.kind, collective.axes) for ledger in ledgers for collective in ledger):
        expected_entries, written_entries, compiled_entries = (
            [collective for collective in ledger if (collective.kind, collective.axes) == key] for ledger in ledgers
        )
        expected_bytes = sum(collective.bytes for collective in expected_entries)
        compiled_bytes = sum(collective.bytes for collective in compiled_entries)
        # Small collectives that nobody promised are sums of scalars; `_purpose` calls them so.
        name = (
            _purpose(step, *key, max(expected_bytes, compiled_bytes))
            if expected_entries or compiled_bytes < SCALARS
            else "beside the closed form"
        )
        # Bytes on the wire depend on the kind, so they are not the buffers' bytes.
        sent_bytes = [
            sum(collective.sent for collective in entries) for entries in (expected_entries, compiled_entries)
        ]
        yield Check(
            name,
            *key,
            expected_bytes,
            _num_executions(expected_entries) or 0,
            _num_executions(written_entries),
            compiled_bytes,
            _num_executions(compiled_entries),
            *sent_bytes,
        )


def _purpose(step: Step, kind: str, axes: tuple[str, ...], nbytes: int) -> str:
    """Return what a collective serves, which its kind and axes tell."""
    if kind == "all-reduce" and nbytes < SCALARS:
        return "scalars"
    owners = step.update.owners
    # The more special purposes first: "data parallel" is what remains.
    if kind == "all-to-all" and owners is not None and any(axes == bundle.axes for bundle in owners.bundles):
        return "owners of matrices"
    if "tensor" in axes:
        return "tensor"
    if axes == ("pipe",):
        return "pipeline"
    if kind != "all-reduce" and axes in (("context",), ("expert",)):
        return {"context": "context", "expert": "experts"}[axes[0]]
    if kind in ("all-gather", "reduce-scatter") and "fsdp" in axes:
        return rule_of(step.strategy).name
    return "owners of matrices" if kind == "all-gather" and owners is not None else "data parallel"


def _step_remarks(
    step: Step, traced: Traced, ledger: Ledger, has_known_counts: bool, partitioner_moves: Sequence[Move]
) -> Iterator[str]:
    """Yield what a reader of the numbers should know about the step, in the order in which it is printed."""
    # 1. What the strategy does with the model.
    notes = traced.notes
    yield from _pipeline_remarks(step, traced.program)
    if step.concurrency_remark:
        yield step.concurrency_remark
    yield from _attention_remarks(step, notes)
    yield from _logits_remarks(step, notes)
    yield from _fp8_remarks(step, notes.fp8)
    # 2. What the platform's compiler hides or changes.
    if reason := why_unread(step.mesh.devices.flat[0].platform):
        yield f"About the compiled program: {reason}. The closed form and the jaxpr are as on other devices."
    yield from _expert_remarks(step, notes)
    if step.mesh.devices.flat[0].platform == "cpu":
        yield (
            "CPU: the program's total is arguments + temporaries + outputs that reuse no argument, since the backend's "
            "own peak omits temporaries; collectives of bfloat16 are compiled as float32, and none overlaps with "
            "compute."
        )
    # 3. The update.
    yield from _optimizer_remarks(step)
    yield from _ledger_remarks(ledger, has_known_counts)
    # The largest move stands for all; `Explanation.moves` has the others.
    if partitioner_moves:
        total = size(sum(move.bytes * move.count for move in partitioner_moves))
        move = partitioner_moves[0]
        reason = cause(step, move)
        yield (
            f"The update also sends {total}, the largest {move.count} x {size(move.bytes)}: {move}. "
            f"{reason[0].upper()}{reason[1:]}."
        )


def _pipeline_remarks(step: Step, program: Program) -> Iterator[str]:
    """Yield how a pipeline's layers are padded, the slots of its stash, and its idle time."""
    # A stack whose layers do not divide among the stages is padded.
    schedule, main_stack = step.schedule, program.main
    if schedule and main_stack and (reason := padded(main_stack.length, schedule.ranks, schedule.chunks)):
        yield f"{reason}."
    if schedule is not None and step.layout.storage.cut:
        leaf_bytes = [
            math.prod(leaf.local.stored) * step.policy.computed(leaf.dtype).itemsize for leaf in step.layout.leaves
        ]
        yield (
            f"{schedule.title}: {stages.described(program, leaf_bytes)}. The stash has "
            f"{slot_tables_of(schedule).num_stash_slots} slots, each as large as the largest stage's; idle "
            f"{float(schedule.bubble):.1%} of the time, if stages are even. Collectives inside of stages are those of "
            "the rank that sends most."
        )
    elif schedule is not None:
        # Schedules with separate weight gradients (W) also keep operands from I to W.
        num_kept = schedule.rows.num_residual_slots if schedule.branches else 0
        yield (
            f"{schedule.title}: the stash has {schedule.slots} slots, each what one microbatch leaves in one chunk of "
            f"layers{f', and {num_kept} of what gradients of inputs leave for those of weights' if num_kept else ''}; "
            f"idle {float(schedule.bubble):.1%} of the time."
        )


def _attention_remarks(step: Step, notes: Notes) -> Iterator[str]:
    """Yield which attention was recognised in the model's equations, and how `context` computes attention."""
    treatment = "are not stored, since it is computed in blocks, as by jp.attention"
    if not step.tracing.takes_attention:
        treatment = "are stored whole"
    # The shapes are those before heads are split.
    place = " over all ranks of tensor" if step.mesh.shape["tensor"] > 1 else ""
    for line, (mask, scores) in notes.attention_spelled.items():
        scores_text = f"{scores.str_short()}, {size(math.prod(scores.shape) * scores.dtype.itemsize)}"
        yield f"{line}: the scores of the model's own attention ({mask}), {scores_text}{place}, {treatment}."
    for line, reason in notes.attention_not_taken.items():
        yield f"{line}: the model's own attention is not computed in blocks, since it {reason}."
    if (mode := notes.attention_mode) is not None:
        mode_text = mode.name + " in zigzag order" * (mode.order == "zigzag")
        yield f"context={step.mesh.shape['context']}: attention by {mode_text}, since {mode.why}."


def _logits_remarks(step: Step, notes: Notes) -> Iterator[str]:
    """Yield which logits are computed in chunks, and which are whole and why."""
    for line, logits in notes.logits.items():
        num_bytes = 4 * logits.tokens * logits.words
        prefix = f"{line}: the logits of {logits.tokens:,} tokens, {size(num_bytes)} in float32, are "
        if logits.chunks > 1:
            # The last chunk may be smaller; report the size of a full one.
            chunk_bytes = 4 * -(-logits.tokens // logits.chunks) * logits.words
            yield f"{prefix}made in {logits.chunks} parts of {size(chunk_bytes)}, and again in the backward."
        else:
            yield f"{prefix}whole: {logits.why}."
    if isinstance(step.strategy.logits, int) and not notes.logits:
        yield (
            f"logits={step.strategy.logits}: nothing is made in chunks, since the loss has no cross-entropy of more "
            "tokens whose logits are hidden states times a parameter."
        )


def _expert_remarks(step: Step, notes: Notes) -> Iterator[str]:
    """Yield which mixtures gather all experts or the tokens of all ranks, and why."""
    for line, num_bytes in notes.experts_gathered.items():
        ranks, token_bytes = step.mesh.shape["expert"], notes.experts_fewer.get(line)
        if token_bytes is not None:
            reason = f"fewer bytes than its tokens there and back, {size(token_bytes)}"
        else:
            reason = "where tokens could go to theirs: write the mixture by jp.experts, by lax.ragged_dot of tokens "
            reason += "sorted by expert, or as products [experts, slots, features] by one-hot"
        yield f"expert={ranks}: {line} gathers all experts, {size(num_bytes)}, {reason}."
    for line, (gathered_bytes, slot_bytes) in notes.tokens_gathered.items():
        ranks, reason = step.mesh.shape["expert"], f"since slots for each of their experts would be {size(slot_bytes)}"
        yield f"expert={ranks}: {line} gathers the tokens of all ranks, {size(gathered_bytes)}, {reason}."


def _optimizer_remarks(step: Step) -> Iterator[str]:
    """Yield which matrices the optimizer multiplies, and which leaves the model trains by its own rule."""
    if (owners := step.update.owners) is not None:
        for reason in dict.fromkeys(owners.notes.values()):
            paths = [path for path, note in owners.notes.items() if note == reason]
            yield f"The optimizer multiplies {few(paths)}: {reason}."
        yield f"The update of whole matrices takes {owners}."
    if (rule := step.model_def.optimizer) is not None:
        yield f"The model trains some leaves by a rule of its own, {rule.__name__}, and the others by the optimizer."


def _ledger_remarks(ledger: Ledger, has_known_counts: bool) -> Iterator[str]:
    """Yield how to read the ledger: small collectives, unknown counts, and conditionals."""
    if any(collective.bytes < SCALARS for collective in ledger):
        yield f"Collectives of less than {SCALARS} B add up scalars: losses, metrics, the optimizer's norms."
    if not has_known_counts or any(collective.count is None for collective in ledger):
        yield "?: in a loop of unknown length; the bytes are those of one round, and FLOPs are not known."
    if any(collective.conditional for collective in ledger):
        yield "Some collectives run in one branch of a conditional, or on one rank: counts and bytes are upper bounds."


def _fp8_remarks(step: Step, reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield which products are in FP8, which are not, and why."""
    compute_dtype = step.policy.compute.name
    scaling_text = " with a scale for each tensor" if step.strategy.fp8_scaling == "tensor" else ""
    for reason in dict.fromkeys(reasons.values()):
        paths = few([path for path, path_reason in reasons.items() if path_reason == reason])
        fp8_text = f"are in FP8{scaling_text}, but for those of the gradients of weights, in {compute_dtype}"
        yield f"Products of {paths} {f'stay in {compute_dtype}: {reason}' if reason else fp8_text}."
    if step.strategy.precision == "fp8" and all(reasons.values()):
        yield "precision=fp8: no product is in FP8; precision=bf16 is the same."


def _eight_bit_remarks(step: Step, closed_form: Ledger) -> Iterator[str]:
    """Yield which values are sent in 8 bits, or that none are although it was asked for; and what hpZ gathers."""
    strategy = step.strategy
    byte_collectives = [collective for collective in closed_form if collective.dtype == "uint8"]
    # Each option has its own kind of collective: 8-bit gradients are exchanged before they are summed.
    for option, subject, kind in (
        ("reduce", "gradients", "all-to-all"),
        ("gather", "weights of FP8 products" if strategy.gather == "fp8" else "weights", "all-gather"),
    ):
        if (format := getattr(strategy, option)) in ("int8", "fp8"):
            collectives = [collective for collective in byte_collectives if collective.kind == kind]
            axes = ", ".join(dict.fromkeys("+".join(collective.axes) for collective in collectives))
            sent_bytes = sum(collective.bytes for collective in collectives)
            text = f"go over {axes} in bytes, with a scale for each {BLOCK}: {size(sent_bytes)} a step"
            yield f"{option}={format}: {subject} from {PAD_FROM:,} elements {text if collectives else 'are not sent'}."
    if strategy.hpz:
        sent_bytes = sum(
            collective.bytes
            for collective in closed_form
            if (collective.kind, collective.axes) == ("all-gather", ("data",))
        )
        yield f"hpz=true: {size(sent_bytes)} are gathered over data once a step, and held while it runs."


def _prefetch_remarks(step: Step, batch: Any) -> Iterator[str]:
    """Yield what loops over layers send ahead, or that they send nothing although it was asked for."""
    weights, gradients = in_flight(step, batch)
    if weights or gradients:
        parts = [f"the weights of the next are gathered, {size(weights)}"] if weights else []
        parts += [f"the gradients of the one before are reduced, {size(gradients)}"] if gradients else []
        yield f"prefetch=1: while a layer runs, {' and '.join(parts)}; a device stores these in addition."
    elif step.strategy.prefetch == 1:
        yield "prefetch=1: no loop over layers gathers weights or reduces gradients here, and nothing is sent ahead."


def _placement_remarks(step: Step, batch: Any) -> Iterator[str]:
    """Yield the batch's arrays that every step would have to move first."""
    shardings = jax.tree.leaves(batch_shardings(batch, step.mesh))
    for (path, array), sharding in zip(jax.tree_util.tree_leaves_with_path(batch), shardings, strict=True):
        # Only committed arrays stay on their devices. JAX puts others where the step needs them.
        if is_array(array) and array.committed and not array.sharding.is_equivalent_to(sharding, array.ndim):
            yield (
                f"The batch's {name_of(path) or 'array'} {list(array.shape)} lies as {array.sharding}, and a step "
                f"moves it to {sharding.spec} first: put it there by jax.device_put, or pass NumPy arrays."
            )


def _num_executions(collectives: Sequence[Collective]) -> int | None:
    """Return the number of executions of some collectives together; None if one of them is unknown."""
    counts = [collective.count for collective in collectives]
    return None if None in counts else sum(count for count in counts if count is not None)
