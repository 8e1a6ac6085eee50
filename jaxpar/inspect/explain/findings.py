"""explain: what a training step holds, sends and computes, from the compiled program, beside the closed form."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...backend.machines import hosts_of, leaves_host
from ...backend.text import few, size
from ...hardware.compiled.compiler_remarks import remarks as remarks_on
from ...hardware.compiled.compiler_remarks import unread
from ...hardware.compiled.cost import Costs
from ...hardware.compiled.kernels import Choice, Executable, Operation, Start, While
from ...hardware.hardware import of_device_kind
from ...layout.leaves import PAD_FROM
from ...model.batches import batch_shardings, is_array
from ...model.paths import name_of
from ...parallel.data import rule_of
from ...parallel.data.eight_bits import BLOCK
from ...parallel.pipeline.chunks import padded
from ...parallel.pipeline.flat import stages
from ...slicing.stacks import described
from ...step.pipeline import rows_of
from ...step.server import OF_REPLICAS, ServerStep
from ...step.tracing import Traced
from ..check.promises import SCALARS
from ..check.resharding import Move, cause, moves
from ..expected import expected
from ..ledger import Collective, Ledger
from ..memory import in_flight, of_server, of_step
from ..predict.efficiency import estimated_seconds
from ..step_view import StepView as Step
from ..transfers import Transfer, rehearse
from .explanation import Check, Explanation


def explain(step: Step, batch: Any, compiled: jax.stages.Compiled | None = None) -> Explanation:
    """See `Step.explain`; `compiled` where `step.compile(batch)` was called before."""
    step.check(batch)
    jaxpr, closed = step.trace(batch), expected(step, batch)
    written = Ledger.from_jaxpr(jaxpr, step.mesh)
    transfers: tuple[Transfer, ...] = ()
    remarks = []
    if isinstance(step, ServerStep):
        rehearsal = rehearse(step, batch)
        transfers, memory = tuple(rehearsal.transfers), of_server(step, batch, rehearsal.programs)
        texts = [rehearsal.programs[name].as_text() or "" for name in OF_REPLICAS]
        total = size(sum(t.found for t in transfers))
        remarks.append(f"{len(transfers)} exchanges a step pass {total} through the server's links.")
    else:
        if compiled is None:
            compiled = step.compile(batch)
        texts, memory = [compiled.as_text() or ""], of_step(step, batch, compiled)
    programs = [Executable(text, step.mesh) for text in texts]
    found, costs = Ledger.of(*programs), Costs.of(*programs)
    known = all(cost.executions is not None for cost in costs)
    moved = [move for program in programs for move in moves(step, program, jaxpr, SCALARS)]
    storage, traced = step.layout.storage, step.traced(batch)
    unasked = remarks_on(costs, step.mesh.devices.flat[0].platform)
    remarks += [
        *_prefetched(step, batch),
        *_in_8_bits(step, closed),
        *_remarks(step, traced, found, known, moved),
        *_not_written(step, costs),
        *unasked,
        *_elsewhere(step, batch),
    ]
    return Explanation(
        strategy=str(step.strategy),
        devices=f"{step.mesh.size} x {step.mesh.devices.flat[0].device_kind}",
        hosts=len({*hosts_of(step.mesh.devices).flat}),
        axes={axis: n for axis, n in step.mesh.shape.items() if n > 1},
        parameters=sum(math.prod(leaf.shape) for leaf in storage.models),
        memory=memory,
        flops=costs.flops if known else {},
        ledger=found,
        across=_across(step.mesh, programs, closed),
        checks=tuple(_compared(step, closed, written, found)),
        transfers=transfers,
        notes=step.layout.notes,
        gathered=dict(traced.notes.gathered),
        loops=described(traced.program, storage),
        moves=tuple(moved),
        values=step.chosen,
        remarks=tuple(remarks),
    )


def _not_written(step: Step, costs: Costs) -> Iterator[str]:
    """What `kernels=fused` saves. Spelled out, a product writes scores, a softmax reads them and writes weights, a
    product reads these; backward weights are read, their cotangents written, both read, the scores' written, and read
    for queries and for keys. At least: XLA has some of them in float32.
    """
    hardware = of_device_kind(step.mesh.devices.flat[0].device_kind)
    runs = [(cost.executions or 1, one) for cost in costs for one in cost.kernel.products]
    if step.strategy.kernels != "fused" or hardware is None or hardware.memory_bandwidth is None:
        return
    made = {"attention": 0, "attention backward": 0}
    for times, one in runs:
        if one.kind in made:
            made[one.kind] += times * one.batch * one.m * one.n * jnp.dtype(one.dtype).itemsize
    forward, backward = made.values()
    if forward:
        seconds = estimated_seconds({}, 4 * forward + 7 * backward, hardware)
        yield (
            f"kernels=fused: a device makes no scores in its attention, {size(forward)} a step, which would pass its "
            f"memory 4 times forward and 7 times backward: at least {1e3 * seconds:.3g} ms of a step, as predicted for "
            f"{hardware.kind}."
        )


def _across(mesh: jax.sharding.Mesh, programs: Sequence[Executable], closed: Ledger) -> frozenset[tuple[str, ...]]:
    """The axes whose collectives leave a host. Of the compiled ones their own groups say so: a part of an axis may stay
    within a host, where the axis does not.
    """
    hosts = hosts_of(mesh.devices).ravel()
    own: dict[tuple[str, ...], bool] = {}
    for start in starts(operation for program in programs for operation in program.operations):
        leaves = own.get(start.axes, False) or any(len({hosts[place] for place in group}) > 1 for group in start.groups)
        own[start.axes] = leaves
    return frozenset(
        axes
        for axes in {*own, *(one.axes for one in closed)}
        if (own[axes] if axes in own else leaves_host(mesh, axes))
    )


def starts(operations: Iterable[Operation]) -> Iterator[Start]:
    """Every collective of a compiled program, in loops and branches too."""
    for one in operations:
        if isinstance(one, Start):
            yield one
        elif isinstance(one, While):
            yield from starts(one.body)
        elif isinstance(one, Choice):
            yield from starts(itertools.chain(*one.branches))


def _compared(step: Step, closed: Ledger, written: Ledger, found: Ledger) -> Iterator[Check]:
    def chosen(ledger: Ledger, key: tuple[str, tuple[str, ...]]) -> list[Collective]:
        return [one for one in ledger if (one.kind, one.axes) == key]

    for key in dict.fromkeys((one.kind, one.axes) for ledger in (closed, written, found) for one in ledger):
        a, b, c = (chosen(ledger, key) for ledger in (closed, written, found))
        formula, compiled = sum(one.bytes for one in a), sum(one.bytes for one in c)
        name = _served(step, *key, max(formula, compiled)) if a or compiled < SCALARS else "beside the closed form"
        sent = [sum(one.sent for one in side) for side in (a, c)]
        yield Check(name, *key, formula, count(a) or 0, count(b), compiled, count(c), *sent)


def _served(step: Step, kind: str, axes: tuple[str, ...], nbytes: int) -> str:
    """What a collective is for, which its kind and axes tell."""
    if kind == "all-reduce" and nbytes < SCALARS:
        return "scalars"
    owned = step.update.owners
    if kind == "all-to-all" and owned is not None and any(axes == bundle.axes for bundle in owned.bundles):
        return "owners of matrices"
    if "tensor" in axes:
        return "tensor"
    if axes == ("pipe",):
        return "pipeline"
    if kind != "all-reduce" and axes in (("context",), ("expert",)):
        return {"context": "context", "expert": "experts"}[axes[0]]
    if kind in ("all-gather", "reduce-scatter") and "fsdp" in axes:
        return rule_of(step.strategy).name
    return "owners of matrices" if kind == "all-gather" and owned is not None else "data parallel"


def _remarks(step: Step, traced: Traced, found: Ledger, known: bool, moved: Sequence[Move]) -> Iterable[str]:
    program, notes, schedule = traced.program, traced.notes, step.schedule
    main = program.main
    if schedule and main and (why := padded(main.length, schedule.ranks, schedule.chunks)):
        yield f"{why}."
    if schedule is not None and step.layout.storage.cut:
        held = [math.prod(leaf.local.stored) * step.policy.computed(leaf.dtype).itemsize for leaf in step.layout.leaves]
        yield (
            f"{schedule.title}: {stages.described(program, held)}. The stash has {rows_of(schedule).stashes} slots, "
            f"each as large as the largest stage's; idle {float(schedule.bubble):.1%} of the time, if stages are even. "
            "Collectives inside of stages are those of the rank that sends most."
        )
    elif schedule is not None:
        left = schedule.rows.keeps if schedule.branches else 0
        yield (
            f"{schedule.title}: the stash has {schedule.slots} slots, each what one microbatch leaves in one chunk of "
            f"layers{f', and {left} of what gradients of inputs leave for those of weights' if left else ''}; "
            f"idle {float(schedule.bubble):.1%} of the time."
        )
    goes, are = "goes by blocks, as jp.attention does: none of", "is kept"
    if not step.tracing.takes_attention:
        goes, are = "stays so:", "are whole"
    for line, (keys, scores) in notes.attention_spelled.items():
        held = f"{scores.str_short()}, {size(math.prod(scores.shape) * scores.dtype.itemsize)}"
        yield f"{line}: attention that is spelled out, {keys}, {goes} its scores, {held}, {are}."
    for line, why in notes.attention_not_taken.items():
        yield f"{line}: attention that is spelled out stays so, since it {why}."
    if (mode := notes.attention_mode) is not None:
        how = mode.name + " in zigzag order" * (mode.order == "zigzag")
        yield f"context={step.mesh.shape['context']}: attention by {how}, since {mode.why}."
    for place, one in notes.logits.items():
        whole = f"{place}: the logits of {one.tokens:,} tokens, {size(4 * one.tokens * one.words)} in float32, are "
        if one.chunks > 1:
            at_once = 4 * -(-one.tokens // one.chunks) * one.words
            yield f"{whole}made {one.chunks} times a part of them, {size(at_once)}, and again in the backward."
        else:
            yield f"{whole}whole: {one.why}."
    if isinstance(step.strategy.logits, int) and not notes.logits:
        yield (
            f"logits={step.strategy.logits}: nothing is made in chunks, since the loss has no cross-entropy of more "
            "tokens whose logits are hidden states times a parameter."
        )
    yield from _in_fp8(step, notes.fp8)
    if why := unread(step.mesh.devices.flat[0].platform):
        yield f"Of the compiled program: {why}. The closed form and the jaxpr are as everywhere."
    for place, nbytes in notes.experts_gathered.items():
        ranks, tokens = step.mesh.shape["expert"], notes.experts_fewer.get(place)
        if tokens is not None:
            why = f"fewer bytes than its tokens there and back, {size(tokens)}"
        else:
            why = "where tokens could go to theirs: write the mixture by jp.experts, by lax.ragged_dot of tokens "
            why += "sorted by expert, or as products [experts, slots, features] by one-hot"
        yield f"expert={ranks}: {place} gathers all experts, {size(nbytes)}, {why}."
    for place, (gathered, sent) in notes.tokens_gathered.items():
        why = f"since slots for each of their experts would be {size(sent)}"
        yield f"expert={step.mesh.shape['expert']}: {place} gathers the tokens of all ranks, {size(gathered)}, {why}."
    if step.mesh.devices.flat[0].platform == "cpu":
        yield (
            "CPU: the program's total is arguments + outputs + temporaries, since the backend's own peak omits "
            "temporaries; collectives of bfloat16 are compiled as float32, and none overlaps with compute."
        )
    if (owned := step.update.owners) is not None:
        for why in dict.fromkeys(owned.notes.values()):
            yield f"The optimizer multiplies {few([path for path, note in owned.notes.items() if note == why])}: {why}."
        yield f"The update of whole matrices takes {owned}."
    if (own := step.model_def.optimizer) is not None:
        yield f"The model trains some leaves by a rule of its own, {own.__name__}, and the others by the optimizer."
    if any(one.bytes < SCALARS for one in found):
        yield f"Collectives of less than {SCALARS} B add up scalars: losses, metrics, the optimizer's norms."
    if not known or any(one.count is None for one in found):
        yield "?: in a loop of unknown length; the bytes are those of one round, and FLOPs are not known."
    if any(one.conditional for one in found):
        yield "Some collectives run in one branch of a conditional, or on one rank: counts and bytes are upper bounds."
    if moved:
        total = size(sum(move.bytes * move.count for move in moved))
        most = f"{moved[0].count} x {size(moved[0].bytes)}"
        why = cause(step, moved[0])
        yield f"The update sends {total} besides, the largest {most}: {moved[0]}. {why[0].upper()}{why[1:]}."


def _in_fp8(step: Step, found: Mapping[str, str]) -> Iterator[str]:
    """Which products are in FP8, which are not, and why."""
    other = step.policy.compute.name
    whole = " with a scale for each tensor" if step.strategy.fp8_scaling == "tensor" else ""
    for why in dict.fromkeys(found.values()):
        paths = few([path for path, one in found.items() if one == why])
        low = f"are in FP8{whole}, but for those of the gradients of weights, in {other}"
        yield f"Products of {paths} {f'stay in {other}: {why}' if why else low}."
    if step.strategy.precision == "fp8" and all(found.values()):
        yield "precision=fp8: no product is in FP8; precision=bf16 is the same."


def _in_8_bits(step: Step, closed: Ledger) -> Iterator[str]:
    """What travels in 8 bits, or that nothing does though it was asked for; and hpZ's second shard."""
    strategy, low = step.strategy, [one for one in closed if one.dtype == "uint8"]
    for name, what, kind in (
        ("reduce", "gradients", "all-to-all"),
        ("gather", "weights of FP8 products" if strategy.gather == "fp8" else "weights", "all-gather"),
    ):
        if (how := getattr(strategy, name)) in ("int8", "fp8"):
            mine = [one for one in low if one.kind == kind]
            axes, sent = ", ".join(dict.fromkeys("+".join(one.axes) for one in mine)), sum(one.bytes for one in mine)
            said = f"go over {axes} in bytes, with a scale for each {BLOCK}: {size(sent)} a step"
            yield f"{name}={how}: {what} from {PAD_FROM:,} elements {said if mine else 'are not sent'}."
    if strategy.hpz:
        sent = sum(one.bytes for one in closed if (one.kind, one.axes) == ("all-gather", ("data",)))
        yield f"hpz=true: {size(sent)} are gathered over data once a step, and held while it runs."


def _prefetched(step: Step, batch: Any) -> Iterator[str]:
    """What loops over layers send ahead, or that none does though it was asked for."""
    weights, gradients = in_flight(step, batch)
    if weights or gradients:
        said = [f"the weights of the next are gathered, {size(weights)}"] if weights else []
        said += [f"the gradients of the one before are reduced, {size(gradients)}"] if gradients else []
        yield f"prefetch=1: while a layer runs, {' and '.join(said)}; a device holds these besides."
    elif step.strategy.prefetch == 1:
        yield "prefetch=1: no loop over layers gathers weights or reduces gradients here, and nothing is sent ahead."


def _elsewhere(step: Step, batch: Any) -> Iterator[str]:
    """Arrays of the batch that every step would move first."""
    places = jax.tree.leaves(batch_shardings(batch, step.mesh))
    for (path, x), place in zip(jax.tree_util.tree_leaves_with_path(batch), places, strict=True):
        if is_array(x) and x.committed and not x.sharding.is_equivalent_to(place, x.ndim):
            yield (
                f"The batch's {name_of(path) or 'array'} {list(x.shape)} lies as {x.sharding}, and a step moves it to "
                f"{place.spec} first: put it there by jax.device_put, or pass NumPy arrays."
            )


def count(collectives: Sequence[Collective]) -> int | None:
    """Executions of some collectives together; None where that of one is unknown."""
    counts = [one.count for one in collectives]
    return None if None in counts else sum(n for n in counts if n is not None)
