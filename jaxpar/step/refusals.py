"""What a sliced loss must be for its strategy: every refusal of one, and a warning."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..backend.text import did_you_mean
from ..layout.families import unlike
from ..layout.layout import Layout
from ..layout.leaves import Leaf
from ..model.model import MAKERS, is_replicated
from ..model.paths import below, name_of
from ..parallel.pipeline.chunks import padded
from ..parallel.pipeline.flat.cut import points
from ..parallel.pipeline.schedules import Schedule
from ..program import jaxpr as jx
from ..program.walk import visit
from ..slicing.program import Program
from ..slicing.stacks import gathered
from ..strategy import PER_RANK, Strategy

GATHERED_FROM = 64 << 20  # bytes; less is not worth a word
_PADDED = 1.25  # times the layers' work; less is said by `explain` alone
_NAMED = 3  # leaves that an error names
_LARGE = 1 << 20  # bytes that tensor ranks gather


def check_pipe(program: Program, variables: Any, layout: Layout, strategy: Strategy) -> None:
    """Raises ValueError where a pipeline cannot run the model; `variables` are the positions of its new variables."""
    ranks = layout.mesh.shape["pipe"]
    chunks = strategy.chunks
    if layout.storage.cut:
        check_variables(program, jax.tree_util.tree_leaves_with_path(variables), ranks)
        return
    stages = ranks * chunks
    uneven = {
        i: why for i, why in program.unrolled if layout.storage.units[i].layers is not None or program.main is None
    }
    if uneven:
        index, why = next(iter(uneven.items()))
        raise ValueError(
            f"pipe={ranks} spreads layers that are the same program, and those of {layout.leaves[index].path} "
            f"differ: {why}; make them alike, or use stages='cut', which makes stages of any program, or data or "
            "fsdp for pipe"
        )
    if program.main is None:
        raise ValueError(
            f"pipe={ranks} spreads the layers of a layer stack, and the loss scans none whose parameters are "
            f"stacked on dim 0; scan the layers (nnx.scan, nn.scan, jax.lax.scan), or use "
            "stages='cut', which makes stages of any program, or data or fsdp for pipe"
        )
    length, rounds = program.main.length, max(s.stride for s in program.main.slices)
    if rounds > 1 and length % stages:
        raise ValueError(
            f"pipe={ranks} x chunks={chunks} makes {stages} stages and the model's stack has {length} rounds of "
            f"{rounds} blocks that alternate; use a number of stages that divides {length}, stages='cut', or data or "
            "fsdp for pipe"
        )
    if length < stages:
        unlike = uneven_block(layout, program.main.slices[0].leaf)
        raise ValueError(
            f"pipe={ranks} x chunks={chunks} makes {stages} stages and the model's stack has "
            f"{length} layers; use at most {length} stages{unlike}, or stages='cut' if a Python loop runs them"
        )
    partial = next((s for s in program.main.slices if s.stride * length != layout.storage.units[s.leaf].layers), None)
    if partial is not None:
        leaf = layout.storage.units[partial.leaf]
        raise ValueError(
            f"pipe={ranks} spreads all {leaf.layers} layers of {leaf.path}, and the loss scans "
            f"{partial.stride * length} of them at once; scan all of them in one loop, use stages='cut', or data or "
            "fsdp for pipe"
        )
    if program.main.reverse:
        raise ValueError(
            f"pipe={ranks} and the model's stack is run from its last layer to its first; run it forwards, or use "
            "stages='cut'"
        )
    given = set(program.inputs)
    for path, at in jax.tree_util.tree_leaves_with_path(variables):
        if program.outputs[at] not in given:
            raise ValueError(
                f"variable {name_of(path)} changes from microbatch to microbatch, which pipe={ranks} runs at the same "
                "time; give stages='cut', which runs them in order, use data or fsdp for pipe, or freeze it "
                "(BatchNorm: use_running_average=True)"
            )


def check_ordered(whole: jx.Flat, devices: int) -> None:
    """Raises ValueError where callbacks of a loss are to run in order, and several devices run it at the same time."""
    eqn = next((eqn for eqn, _ in visit(whole.eqns) if eqn.params.get("ordered") is True), None)
    if devices > 1 and eqn is not None:
        raise ValueError(
            f"the loss has a callback or print with ordered=True, {eqn.primitive.name} at {jx.where(eqn)}, and "
            f"{devices} devices run it at the same time; callbacks on several devices have no order; leave ordered= out"
        )


def check_breakpoints(whole: jx.Flat, devices: int) -> None:
    """Raises ValueError where a loss opens a debugger that a step cannot open.

    A breakpoint keeps the local variables of the lines around it, which are values of the user's own trace. A step
    computes the loss's program again, where these values do not exist. On one device `jax.debug.breakpoint` opens its
    debugger all the same.
    """
    opens = lambda eqn: _opens_debugger(eqn) and (devices > 1 or eqn.primitive.name == "pure_callback")
    for outer in whole.eqns:
        if found := next((eqn for eqn, _ in visit([outer]) if opens(eqn)), None):
            line = jx.user_line(found) or jx.where(outer)  # within eqx.error_if, the line that calls it
            raise ValueError(
                f"the loss opens a debugger at {line} (jax.debug.breakpoint, or eqx.error_if with "
                "on_error='breakpoint'), and a step cannot stop there, since it runs the loss in blocks of rows and "
                "with its derivative; call the loss by itself to debug it, as loss(step.params(state), batch, None), "
                "or use jax.debug.print, or on_error='raise' (EQX_ON_ERROR=raise)"
            )


def _opens_debugger(eqn: Any) -> bool:
    """Whether an equation calls back into JAX's debugger, by itself or in a function that its callback encloses."""
    callback = eqn.params.get("callback")
    called = getattr(callback, "callback_func", callback)  # a pure_callback keeps its function in an object
    enclosed = (cell.cell_contents for cell in getattr(called, "__closure__", None) or ())
    return any(getattr(f, "__module__", "") == "jax._src.debugger.core" for f in (called, *enclosed) if callable(f))


def warn_padded(layers: int, ranks: int, chunks: int) -> None:
    """Say so where chunks of layers have much more room than the model has layers."""
    stages = ranks * chunks
    if -(-layers // stages) * stages > _PADDED * layers:
        warnings.warn(f"pipe={ranks}, chunks={chunks}: {padded(layers, ranks, chunks)}", stacklevel=2)


def warn_idle(ranks: int, microbatches: int) -> None:
    """Warn of a pipeline with one microbatch, in which one rank works at a time."""
    if ranks > 1 and microbatches == 1:
        m = PER_RANK * ranks
        warnings.warn(
            f"pipe={ranks} with microbatches=1: one rank works at a time, and each idles {1 - 1 / ranks:.0%} of a "
            f"step; use microbatches={m} ({(ranks - 1) / (m + ranks - 1):.0%}), or as many as divide a replica's rows",
            stacklevel=3,
        )


def check_cut(schedule: Schedule, strategy: Strategy, paths: Sequence[str]) -> None:
    """Raises ValueError where a strategy cannot have a cut program's pipeline; `paths` are the parameters'."""
    stages = schedule.ranks * schedule.chunks
    cuts = points(strategy.cuts, stages, paths)
    for cut in cuts:
        if not below(cut, paths):
            modules = {"/".join(path.split("/")[:n]) for path in paths for n in range(1, path.count("/") + 2)}
            raise ValueError(
                f"stages={strategy.stages!r}: no parameter lies below {cut!r}{did_you_mean(cut, sorted(modules))}; use "
                f"paths of modules, such as {paths[-1].rpartition('/')[0] or paths[-1]!r}, or auto, layers, cut"
            )
    if cuts and len(cuts) != stages - 1:
        raise ValueError(
            f"stages={strategy.stages!r} makes {len(cuts) + 1} stages and pipe={schedule.ranks} x "
            f"chunks={schedule.chunks} has {stages}; name {stages - 1} modules, at which the second and those after it "
            "begin"
        )
    why = f"the model has no stack of alike layers, or stages='cut', so that pipe={schedule.ranks} cuts its program"
    if strategy.attention in ("ring", "usp"):
        raise ValueError(
            f"attention={strategy.attention!r}: {why}, whose ranks are not in one layer at one time; a hop of the "
            "ring needs all devices; use attention='gather' or 'ulysses'"
        )
    if strategy.rule:
        raise ValueError(
            f"rule={strategy.rule!r}: {why}, which moves leaves in parts that jaxpar's own rules know; use zero=1 to 3"
        )
    if strategy.hpz:
        raise ValueError(f"hpz=True: {why}, which moves leaves to where they are used once a step; leave hpz out")


def check_prefetch(schedule: Schedule, strategy: Strategy, cut: bool) -> None:
    """Raises ValueError where a pipeline's ticks should send ahead, and do not know which layer is next; `cut`: stages
    are parts of a program.
    """
    if strategy.prefetch == 1 and (cut or not schedule.in_turn):
        why = (
            "stages are parts of a program, and no loops over layers" if cut else "not every tick runs the same layers"
        )
        raise ValueError(f"prefetch=1 in {strategy}: {why}; use schedule=1f1b with chunks=1 and layers, or prefetch=0")


def check_variables(program: Program, variables: Sequence[tuple[Any, Any]], ranks: int) -> None:
    """Raises ValueError where a stage changes a variable that another one reads: they run different microbatches."""
    homes = {v: at for at, piece in enumerate(program.pieces) for v in piece.outputs}
    inputs = program.inputs[len(program.consts) :]
    for number, (path, at) in enumerate(variables):
        old, new = inputs[number], program.outputs[at]
        home = len(program.pieces) - 1 if jx.is_literal(new) else homes.get(new, len(program.pieces) - 1)
        read = [i for i, piece in enumerate(program.pieces) if old in piece.inputs and i != home]
        if new is not old and read:
            raise ValueError(
                f"variable {name_of(path)} is changed in stage {home} of pipe={ranks} and read in stage {read[0]}, "
                "which runs another microbatch at that time; use data or fsdp for pipe, or freeze it"
            )


def check_remat(program: Program, layout: Layout, strategy: Strategy, schedule: Schedule | None) -> None:
    """Raises ValueError where there is neither layer nor stage to recompute, or no two halves to do so twice."""
    remat, table = strategy.remat, [] if schedule is None else schedule.table()
    if remat == "twice" and not any(op.kind == "W" for column in table for ops in column for op in ops):
        raise ValueError(
            "remat='twice' recomputes a layer in each half of its backward, and here backwards are whole; use "
            "remat='layer', or a schedule with halves, as pipe=4,schedule=zb-h1"
        )
    if remat not in ("none", "auto") and not program.stacks and not program.groups:
        lengths = {eqn.params["length"] for eqn in program.eqns if eqn.primitive.name == "scan"}
        units = layout.storage.units
        if across := [leaf.path for leaf in units if leaf.dim == leaf.stage == 0 and leaf.logical[0] in lengths]:
            raise ValueError(
                f"remat={remat!r} applies to the layers of a layer stack, and the {layout.shards} shards of "
                f"{', '.join(across[:_NAMED])} have some of the layers each, since {layout.shards} divides no other "
                "dim; use widths that it divides or fewer shards, as fsdp=2 with data=-1, or remat='none' with "
                "jax.checkpoint in the model"
            )
        raise ValueError(
            f"remat={remat!r} applies to the layers of a layer stack and the model has none; scan "
            "the layers (nnx.scan, nn.scan, jax.lax.scan), or use remat='none' with jax.checkpoint in the model"
        )
    if "params" in strategy.offloads and any(s.dim for stack in program.stacks for s in stack.slices):
        raise ValueError(
            f"offload={strategy.offload!r} brings layers that lie in one piece to the device, and a stack has its "
            "layers on another dim than the first; scan over dim 0 (variable_axes={'params': 0}), or leave 'params' out"
        )
    if "activations" in strategy.offloads and not program.stacks:
        raise ValueError(
            f"offload={strategy.offload!r} sends what the layers of a layer stack leave to the host, and the model has "
            "no stack; scan the layers (nnx.scan, nn.scan, jax.lax.scan), or use more microbatches"
        )


def uneven_block(layout: Layout, index: int) -> str:
    """Of the loop that a leaf's layers come from, how the first block that is no layer of it differs; else nothing."""
    leaf = layout.leaves[index]
    if not leaf.rolled:
        return ""
    shapes = [(one.path, one.shape) for one in layout.storage.models]
    member = layout.storage.models[layout.storage.origin[index][0]].path
    why = unlike(shapes, leaf.path.partition("*")[0], member)
    return "" if why is None else f", or make its blocks alike: {why}"


def warn_gathered(program: Program, layout: Layout) -> None:
    """Say so where ZeRO-3 holds more than half of the parameters whole at once, and no leaf alone is most of that."""
    total = sum(math.prod(leaf.logical) for leaf in layout.leaves)
    most, leaves = gathered(program.pieces, layout.storage.units)
    size = most * jnp.dtype(layout.policy.compute).itemsize
    if (
        "params" in layout.sharded
        and layout.shards > 1
        and size >= GATHERED_FROM
        and 2 * most > total
        and 2 * math.prod(leaves[0].logical) < most
    ):
        why = (
            "; ".join(f"{path}: {how}" for path, how in layout.loops.items())
            or "the loss has no loop over equal layers"
        )
        warnings.warn(
            f"zero=3 gathers {most / total:.0%} of the parameters at once ({size:,} bytes; {leaves[0].path}, "
            f"{leaves[1].path}, ...), outside of any stack of layers ({why}); make the layers alike, or scan them "
            "(nnx.scan, nn.scan, jax.lax.scan)",
            stacklevel=2,
        )


def warn_no_rule(gathered: Mapping[str, int], ranks: int) -> None:
    """Say so where tensor ranks gather large arrays for want of a rule: where, and bytes."""
    for place, size in gathered.items():
        if size >= _LARGE:
            warnings.warn(
                f"tensor={ranks}: {place} has no rule for split values and gathers {size:,} bytes on every "
                "rank; leave the leaves that it uses whole (rules={...: None}), or wrap it by jp.local_kernel",
                stacklevel=2,
            )


def warn_untrained(whole: jx.Flat, outputs: Any, leaves: Sequence[Leaf]) -> None:
    """Say so where the loss reads no parameter that is trained."""
    trained = [v for v, leaf in zip(whole.invars, leaves, strict=False) if leaf.trainable]
    loss = whole.outvars[outputs[0]["loss"].total]
    read = {v for eqn in jx.live(whole.eqns, [loss]) for v in eqn.invars if not jx.is_literal(v)} | {loss}
    if trained and read.isdisjoint(trained):
        warnings.warn(
            "the loss reads no parameter that is trained: every gradient is zero, and nothing is learned; compute it "
            "with the module or params that it is given, not with a module from outside of it",
            stacklevel=2,
        )


def unread_leaves(whole: jx.Flat, rest: Any, params: int) -> list[str]:
    """The paths of the batch's leaves with rows that no result of a loss depends on.

    Args:
      whole: the loss; its first `params` inputs are parameters, the others the leaves of `rest`.
      rest: abstract (variables, batch, key).
    """
    read = {v for eqn in jx.live(whole.eqns, whole.outvars) for v in eqn.invars if not jx.is_literal(v)}
    read |= {v for v in whole.outvars if not jx.is_literal(v)}
    numbers = iter(whole.invars[params:])
    batch = jax.tree.map(lambda _: next(numbers), rest)[1]
    leaves = jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_replicated)
    return [name_of(path) or "batch" for path, v in leaves if not is_replicated(v) and v not in read]


def warn_unread(names: Sequence[str]) -> None:
    """Warn of leaves of the batch that the loss does not read, by their paths."""
    if names:
        leaves, them = (f"leaf {names[0]}", "it") if len(names) == 1 else (f"leaves {', '.join(names)}", "them")
        mask = " (jaxpar.data.Rows adds mask unless last='pad' or 'drop_last')" if "mask" in names else ""
        warnings.warn(
            f"the loss does not read batch {leaves}, so no result depends on {them}; read {them} in the loss, or leave "
            f"{them} out of the batch{mask}",
            stacklevel=2,
        )


def warn_rows_of_a_microbatch(noted: Sequence[str], rows: int, microbatches: int) -> None:
    """Warn that `jp.all_rows` returns the rows of one microbatch, where a step has several.

    Args:
      noted: the calls that gather rows (`model.couplings`).
      rows: how many rows a microbatch has on all replicas.
    """
    if "all_rows" in noted and microbatches > 1:
        warnings.warn(
            f"jp.all_rows returns the rows of one microbatch, {rows} of the {rows * microbatches} rows of the batch, "
            f"so the result is not that of the whole batch; use microbatches=1 in place of {microbatches}, with "
            "remat=layer or more devices where memory is short, or, if the rows of a microbatch are what you mean, "
            f"give rows='independent' to {MAKERS}",
            stacklevel=2,
        )


def warn_precision(whole: jx.Flat, low: Any, name: str) -> None:
    """Say so where the low precision `name`, dtype `low`, does not reach the matmuls of the model's own program."""
    by_dtype = jx.matmuls(whole.eqns)
    total = sum(flops for flops, _ in by_dtype.values())
    flops, where = by_dtype.get("float32", (0, ""))
    if low == jnp.float32 or flops <= 0.5 * total:
        return
    cause = "an operand that is no parameter is float32 there; cast it (inputs, dtype= of the module)"
    if cast := _widened(whole, low):
        cause = (
            f"{low.name} becomes float32 at {cast}, and is so from there on; cast what comes of it (or dtype= there)"
        )
    warnings.warn(
        f"precision={name!r}, but {flops / total:.0%} of the matmuls' operations are in float32, first at {where}: "
        f"{cause} to jnp.{low.name}",
        stacklevel=2,
    )


def _widened(whole: jx.Flat, low: Any) -> str:
    """Where values of dtype `low` become the float32 of the first matmul that is in it, as in an embedding whose module
    computes in float32; "" if an input of the loss that is float32 itself has a part in that.
    """
    number = {v: at for at, eqn in enumerate(whole.eqns) for v in eqn.outvars}
    first = next(at for at, eqn in enumerate(whole.eqns) if "float32" in jx.matmuls([eqn]))
    wide = lambda eqn: [v for v in eqn.invars if not jx.is_literal(v) and v.aval.dtype == jnp.float32]
    todo, seen, casts = wide(whole.eqns[first]), set[Any](), []
    while todo:
        if (v := todo.pop()) in seen:
            continue
        seen.add(v)
        if v not in number:
            return ""
        maker = whole.eqns[number[v]]
        if maker.primitive.name == "convert_element_type" and maker.invars[0].aval.dtype == low:
            casts.append(number[v])
        todo += wide(maker)
    return jx.where(whole.eqns[min(casts)]) if casts else ""


def check_independent_of_replicas(program: Program, outputs: Any, inputs: int, axes: frozenset[str]) -> None:
    """Raises ValueError where the result of a step would depend on how the rows are spread over `axes`.

    `outputs` are the positions of ({metric: Mean}, variables); the last `inputs` inputs of the program are variables,
    batch and key.
    """
    sums, variables = outputs
    if program.depends(program.leaves, sums["loss"].count):
        raise ValueError("the count of the loss's jp.Mean depends on the parameters; count rows or tokens of the batch")
    if not axes:
        return
    fed = program.inputs[-inputs:][len(jax.tree.leaves(variables)) :]  # batch and key differ from replica to replica
    for path, at in jax.tree_util.tree_leaves_with_path(variables):
        if program.depends(fed, at, axes):
            raise ValueError(
                f"variable {name_of(path)} is updated from this replica's rows alone, so replicas would drift apart; "
                "compute it from jp.all_rows(...), or use the BatchNorm of Flax or Equinox, which jaxpar "
                "switches to all rows"
            )


def whole_batch_error(
    error: Exception, variables: Any, rows: int, blocks: tuple[int, int], takes: Callable[[int], bool]
) -> str:
    """What to say where a loss takes the rows of the batch, and not those of one block.

    Args:
      error: what the loss says of a block.
      variables: the model's, abstract.
      rows: those of a block.
      blocks: how many blocks, (replicas, microbatches).
      takes: whether the loss takes so many rows.
    """
    every = rows * math.prod(blocks)
    for path, x in jax.tree_util.tree_leaves_with_path(variables):
        if x.shape[:1] == (every,):
            return (
                f"variable {name_of(path)} {list(x.shape)} has one value for each of the batch's {every} rows, and a "
                f"block has {rows} ({error}): all replicas have the same variables, which are not cut as rows are; "
                "give it to the loss in the batch, and compute its next value by step.model(state) before the step"
            )
    enough = next(many for many in range(rows + 1, every + 1) if takes(many))
    return (
        f"the loss takes the batch's {every} rows, but not the {rows} of one of its {math.prod(blocks)} blocks "
        f"({blocks[0]} replicas x {blocks[1]} microbatches), which cut groups of rows: {error}; give groups a dim of "
        f"their own, a row for each, or {enough * math.prod(blocks)} rows, or use fewer blocks"
    )


def recorded_warnings(call: Callable[[], object]) -> list[warnings.WarningMessage]:
    """Return the warnings that a call gives, which are given all the same."""
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        call()
    for message in messages:
        warnings.warn_explicit(message.message, message.category, message.filename, message.lineno)
    return messages


def succeeds(fun: Callable[..., Any], *args: Any) -> bool:
    """Return whether a function takes these arguments."""
    try:
        fun(*args)
    except (TypeError, ValueError):
        return False
    return True
