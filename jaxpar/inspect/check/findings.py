"""check: proof that a strategy took effect, read from the program that will run.

    state        every array's bytes on a device, entering the program and leaving it, are the strategy's, within 0.5%
    arguments    so are all of them together, as the compiler counts them
    layers       what the loss takes layer by layer is fetched, and its gradient reduced, layer by layer
    as written   the collectives of the jaxpr are the closed form's, exactly
    as compiled  the compiled program's have the closed form's bytes, within 1%, and nothing large stands beside them
    products     those in FP8 are kernels that multiply float8
    tensor       its ranks compute with their parts of the weights, and gather none
    overlap      where it is asked for: what layers send is under way while others are computed (`overlap.py`)

`promises.py` has what is promised, and where compilers may differ. A central server has exchanges in place of all that.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...backend.text import few
from ...hardware.compiled.compiler_remarks import unread
from ...hardware.compiled.cost import Costs
from ...hardware.compiled.kernels import Executable
from ...hardware.hardware import Hardware
from ...layout.leaves import Leaf
from ...layout.precision import F8
from ...numerics.fp8.product import SCOPE
from ...program import jaxpr as jx
from ...program.walk import visit
from ...step.server import OF_REPLICAS, ServerStep
from ..expected import expected
from ..ledger import Ledger
from ..step_view import StepView as Step
from ..transfers import rehearse
from .overlap import hardware_of, hidden
from .promises import ALLOWED, LARGE, SCALARS, Holding, bounds, gathered_weights, not_by_layer, shares
from .proof import Finding, Proof, Verdict
from .resharding import Move, cause, moves

_F8 = jnp.dtype(F8).name
# Of FP8's three, the forward's, which a backward recomputes, and dx: in a loop of one layer the compiler computes the
# first once.
_SHARED = 2 / 3


def check(
    step: Step, batch: Any, compiled: jax.stages.Compiled | None = None, overlap: bool | Hardware = False
) -> Proof:
    """Whether the training step does what its strategy promises, for a batch of these shapes. Nothing runs.

    Args:
      step: from `make_train_step`.
      batch: arrays or `jax.ShapeDtypeStruct`, as for `step.compile`.
      compiled: the program that will run, where it is at hand; else it is compiled, and jit finds it afterwards.
      overlap: whether what layers send is hidden behind kernels too, by predicted seconds of the devices' kind; or the
        numbers of a kind that the table lacks. For GPUs alone, which need not be there.

    Raises ValueError where the batch's rows do not fit the strategy, for TPUs, whose programs are not read, and with
    `overlap` for CPUs, whose programs have no asynchronous collectives, and for `server=True`, which sends between
    programs; `Proof.require` raises it for what is broken.
    """
    step.check(batch)
    if why := unread(step.mesh.devices.flat[0].platform):
        raise ValueError(
            f"check: {why}; check the same strategy on as many simulated devices, and jp.verify(model, strategy, batch)"
        )
    hardware = overlap if isinstance(overlap, Hardware) else hardware_of(step) if overlap else None
    if isinstance(step, ServerStep):
        findings = list(_server(step, batch))
    else:
        compiled = compiled or step.compile(batch)
        findings = [*_state(step, batch, compiled), *_layers(step, batch)]
        program = Executable(compiled.as_text() or "", step.mesh)
        findings += _collectives(step, batch, program)
        findings += hidden(step, batch, program, hardware) if hardware else ()
    devices = f"{step.mesh.size} x {step.mesh.devices.flat[0].device_kind}"
    return Proof(str(step.strategy), devices, tuple(findings))


def _state(step: Step, batch: Any, compiled: jax.stages.Compiled) -> Iterator[Finding]:
    state, given = step.abstract_state(), jax.eval_shape(lambda x: x, batch)
    entering, rows = compiled.input_shardings[0]
    trees = lambda s: (s.params, s.copy, s.optimizer)
    stored, leaving = (trees(s) for s in (state, compiled.output_shardings[0]))
    arrays, tree = jax.tree.flatten(stored)
    ins = tree.flatten_up_to(trees(entering))
    promised = shares(step, state)
    for share, x, enters, leaves in zip(promised, arrays, ins, tree.flatten_up_to(leaving), strict=True):
        sides = {"leaves": _local(x, leaves)} | ({} if enters is None else {"enters": _local(x, enters)})
        yield _of_array(step, share, *max(sides.items(), key=lambda side: abs(side[1] - share.bytes)))
    # What the program does not read, the compiler has no argument for: jit drops it.
    arguments = sum(share.bytes for share, enters in zip(promised, ins, strict=True) if enters is not None)
    others, tree = jax.tree.flatten((state.step, state.variables, state.scale, state.key, given))
    places = tree.flatten_up_to((entering.step, entering.variables, entering.scale, entering.key, rows))
    arguments += sum(_local(x, place) for x, place in zip(others, places, strict=True) if place is not None)
    memory: Any = compiled.memory_analysis()
    found = memory.argument_size_in_bytes + memory.host_argument_size_in_bytes
    verdict, note = _compared(found, 0.995 * arguments - SCALARS, 1.005 * arguments + SCALARS)
    try_this = "the compiler's arguments are not the state and this device's rows; see compiled.memory_analysis()"
    yield Finding("arguments", "state and rows", arguments, found, verdict, note and try_this)


def _local(x: Any, sharding: Any) -> int:
    return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _of_array(step: Step, share: Holding, side: str, found: int) -> Finding:
    note = ""
    if found > 1.005 * share.bytes:  # what is missing is the sharding
        times = found / max(share.bytes, 1)
        note = f"it {side} the step {times:.3g} times as large as its shard; print(step.layout) has its spec, and why"
        return Finding("state", f"{share.kind} {share.path}", share.bytes, found, "MISSING", note)
    if found < 0.995 * share.bytes:
        note = f"it {side} the step in shards that {step.strategy} does not have; print(step.layout) has its spec"
    return Finding("state", f"{share.kind} {share.path}", share.bytes, found, "UNPROMISED" if note else "ok", note)


def _compared(found: float, least: float, most: float) -> tuple[Verdict, str]:
    if found < least:
        return "MISSING", "less than promised"
    return ("UNPROMISED", "more than promised") if found > most else ("ok", "")


def _layers(step: Step, batch: Any) -> Iterator[Finding]:
    traced = step.traced(batch)
    if not traced.axes:
        return
    program = traced.program
    units = step.layout.storage.units

    def sizes(leaf: Leaf) -> tuple[int, int]:
        """Bytes of one layer and of all, on a tensor rank."""
        whole = math.prod(leaf.local.stored) * step.policy.computed(leaf.dtype).itemsize
        return whole // math.prod(leaf.shape[: leaf.stage + 1]), whole

    for leaf in not_by_layer(step, program):
        note = (
            "the loss takes its layers one by one, and the step fetches them or reduces their gradients all at once; "
            "see print(step.layout) for why they are stored so"
        )
        yield Finding("layers", leaf.path, *sizes(leaf), "MISSING", note)
    sliced = [leaf for leaf, uses in zip(units, program.uses, strict=True) if any(uses)]
    if sliced:
        each = sum(sizes(leaf)[0] for leaf in sliced)
        yield Finding("layers", f"{len(sliced)} leaves, one layer", each, each)


def _collectives(step: Step, batch: Any, program: Executable) -> Iterator[Finding]:
    jaxpr, closed = step.trace(batch), expected(step, batch)
    yield from _written(closed, Ledger.from_jaxpr(jaxpr, step.mesh))
    yield from _compiled(step, closed, [program], jaxpr)
    yield from _products(step, step.traced(batch).notes.in_fp8, jaxpr, program)
    if step.mesh.shape["tensor"] > 1:
        yield from _tensor(step, batch, jaxpr)


def _written(closed: Ledger, written: Ledger) -> Iterator[Finding]:
    fields = ("kind", "axes", "dtype")
    bytes_, counts = ([ledger.by(*fields, value=value) for ledger in (closed, written)] for value in ("bytes", "count"))
    for key in dict.fromkeys((*bytes_[0], *bytes_[1])):
        (promised, found), (expected_count, count) = ([side.get(key, 0) for side in both] for both in (bytes_, counts))
        kind, axes, dtype = key
        what = f"{kind} {'+'.join(axes)} {dtype} {expected_count} x"
        if (promised, expected_count) == (found, count):
            yield Finding("as written", what, promised, found)
            continue
        missing = (found, count) < (promised, expected_count)
        note = f"the step calls it {count} times, the closed form {expected_count}; " + (
            "a rule (jaxpar/parallel/) leaves it out: jp.verify(model, strategy, batch) shows which gradients suffer"
            if missing
            else "what calls it belongs neither to the strategy nor to the loss: look for it in step.trace(batch)"
        )
        yield Finding("as written", what, promised, found, "MISSING" if missing else "UNPROMISED", note)


def _compiled(step: Step, closed: Ledger, programs: Sequence[Executable], jaxpr: Any) -> Iterator[Finding]:
    found, moved = Ledger.of(*programs), None
    loops = (eqn.params["length"] for eqn, _ in visit(jx.opened(jaxpr)[0].eqns) if eqn.primitive.name == "scan")
    one_layer = 1 in loops
    keys = dict.fromkeys((one.kind, one.axes) for one in (*closed, *found))
    for kind, axes in keys:
        ours, theirs = ([one for one in side if (one.kind, one.axes) == (kind, axes)] for side in (closed, found))
        limits, sent = bounds(step, kind, ours, one_layer), sum(one.bytes for one in theirs)
        verdict, _ = _compared(sent, limits.least, limits.most)
        note, here = "", ()
        if verdict == "MISSING":
            note = (
                "the compiled program sends less than its closed form; compare print(step.explain(batch)) with a "
                "smaller strategy, and report it as a fault of jaxpar or of the compiler"
            )
        elif verdict == "UNPROMISED":
            large = sent - limits.promised >= LARGE
            if moved is None:
                moved = moves(step, programs[0], jaxpr, SCALARS)
            here = tuple(move for move in moved if (move.kind, move.axes) == (kind, axes))
            verdict, note = (verdict, _why(step, here)) if large else ("ok", f"small: {ALLOWED['small']}")
        if verdict == "ok" and not note:
            less, more = sent < 0.99 * limits.promised, sent > 1.01 * limits.promised
            differs = {"widened": True, "norms": more}
            used = [name for name in limits.names if differs.get(name, less)]
            note = "; ".join(f"{name}: {ALLOWED[name]}" for name in used)
        yield Finding("as compiled", f"{kind} {'+'.join(axes)}", limits.promised, sent, verdict, note, here)


def _why(step: Step, here: Sequence[Move]) -> str:
    """What the compiler added, where its text tells."""
    if not here:
        return "the compiler added it; see step.explain(batch).ledger, and compiled.as_text() for where it stands"
    return f"the update has it, the largest: {here[0].message}; {cause(step, here[0])}"


def _products(step: Step, in_fp8: Sequence[str], jaxpr: Any, program: Executable) -> Iterator[Finding]:
    """FLOPs of FP8 products in the jaxpr and in the compiled program, each product once in whatever loop it stands."""
    if step.strategy.precision != "fp8":
        return
    what = f"{len(in_fp8)} leaves in {_F8}"
    dots = (eqn for eqn, _ in visit(jx.opened(jaxpr)[0].eqns) if eqn.primitive.name == "dot_general")
    promised = sum(2 * jx.matmuls([eqn]).get(_F8, (0, ""))[0] for eqn in dots)
    if step.mesh.devices.flat[0].platform == "cpu":
        note = "CPU: no kernel multiplies float8; the same numbers are multiplied as wider ones"
        yield Finding("products", what, promised, promised, note=note, unit="FLOP")
        return
    found = 0
    for kernel in (cost.kernel for cost in Costs.of(program)):
        for product in kernel.products:
            if product.dtype == _F8:
                found += product.flops
            elif SCOPE in kernel.source:
                path = kernel.source.partition(SCOPE)[2].partition(")")[0]
                note = f"{kernel.label} multiplies {product.dtype}, of {path}: no FP8 kernel for this device; use "
                note += "precision='bf16'"
                yield Finding("products", kernel.name, product.flops, 0, "MISSING", note, unit="FLOP")
    least = 0.99 * promised * (1 if step.strategy.remat == "none" else _SHARED)
    note = f"less than promised of {few(in_fp8)}: compare compiled.as_text() with step.trace(batch)"
    verdict, note = ("MISSING", note) if found < least else ("ok", "")
    yield Finding("products", what, promised, found, verdict, note, unit="FLOP")


def _tensor(step: Step, batch: Any, jaxpr: Any) -> Iterator[Finding]:
    found = {
        "weights": gathered_weights(jaxpr, len(step.layout.leaves)),
        "for want of a rule": step.traced(batch).notes.gathered,
    }
    large = {(what, at): n for what, places in found.items() for at, n in places.items() if n >= LARGE}
    for (what, at), n in large.items():
        note = (
            "tensor ranks gather it; give the leaf another dim, or leave it whole: rules={'path/of/leaf': None}"
            if what == "weights"
            else "tensor ranks gather what it reads, as no rule says how to split it; express it by other operations, "
            "or leave the leaves before it whole: rules={'path/of/leaf': None}"
        )
        yield Finding("tensor", f"{what}, {at}", 0, n, "UNPROMISED", note)
    if not large:
        yield Finding("tensor", "large gathers of weights", 0, 0)


def _server(step: ServerStep, batch: Any) -> Iterator[Finding]:
    rehearsal = rehearse(step, batch)
    for t in rehearsal.transfers:
        verdict, note = _compared(t.found, t.expected, t.expected)
        note = note and "a central server passes on neither more nor less; see parallel/data/server.py"
        yield Finding("exchanges", f"{t.kind} of {t.what}", t.expected, t.found, verdict, note)
    texts = [rehearsal.programs[name].as_text() or "" for name in OF_REPLICAS]
    programs = [Executable(text, step.mesh) for text in texts]
    yield from _compiled(step, expected(step, batch), programs, step.trace(batch))  # the model's own, as BatchNorm's
    state = step.abstract_home()
    arrays = jax.tree.leaves((state.params, state.optimizer))
    for share, x in zip(shares(step, state), arrays, strict=True):
        found = _local(x, x.sharding) * len(x.sharding.device_set)
        verdict, note = _compared(found, share.bytes, share.bytes)
        yield Finding("state", f"{share.kind} {share.path}", share.bytes, found, verdict, note and "the server has it")
