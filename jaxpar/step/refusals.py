"""Checks of a traced loss against its strategy. Each raises ValueError if the strategy cannot run the loss, or if the
result of a step would differ from the result on one device.

`Tracing._check` calls most of them, once for each traced loss. `loss_warnings.py` has the warnings.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..backend.text import did_you_mean
from ..layout.families import unlike
from ..layout.layout import Layout
from ..model.paths import below, name_of
from ..parallel.pipeline.flat.cut import points
from ..parallel.pipeline.schedules import Schedule
from ..program import jaxpr as jx
from ..program.walk import visit
from ..slicing.pieces import Stack
from ..slicing.program import Program
from ..strategy import Strategy

_MAX_LEAVES = 3  # leaves that an error names


def check_pipe(program: Program, variables: Any, layout: Layout, strategy: Strategy) -> None:
    """Raise ValueError if a pipeline cannot run the model.

    Args:
      program: the sliced loss.
      variables: a tree of the positions of its new variables among its outputs.
    """
    ranks = layout.mesh.shape["pipe"]
    # Stages of a cut program need no layers, and can change variables one after another.
    if layout.storage.cut:
        check_variables(program, jax.tree_util.tree_leaves_with_path(variables), ranks)
        return
    # 1. The loss has a stack of equal layers.
    unequal = {
        i: reason
        for i, reason in program.unrolled
        if layout.storage.units[i].layers is not None or program.main is None
    }
    # Blocks that are stored as stages must be one stack, or, without any stack, all lists must be.
    if unequal:
        index, reason = next(iter(unequal.items()))
        raise ValueError(
            f"pipe={ranks} needs layers with the same program, and the layers of {layout.leaves[index].path} differ: "
            f"{reason}; make them alike, or use stages='cut', which makes stages of any program, or data or fsdp "
            "instead of pipe"
        )
    if program.main is None:
        raise ValueError(
            f"pipe={ranks} divides the layers of a layer stack, and the loss scans no layers whose parameters are "
            "stacked on dim 0; scan the layers (nnx.scan, nn.scan, jax.lax.scan), or use stages='cut', which makes "
            "stages of any program, or data or fsdp instead of pipe"
        )
    # 2. The layers divide among the stages.
    _check_division(program.main, layout, strategy)
    # 3. The loss scans all layers at once, in order, and changes no variable meanwhile.
    length = program.main.length
    # Each iteration takes `stride` layers of a leaf: alternating blocks are one round.
    partial = next((s for s in program.main.slices if s.stride * length != layout.storage.units[s.leaf].layers), None)
    if partial is not None:
        leaf = layout.storage.units[partial.leaf]
        raise ValueError(
            f"pipe={ranks} divides all {leaf.layers} layers of {leaf.path}, and the loss scans "
            f"{partial.stride * length} of them in a loop; scan all of them in one loop, or use stages='cut', or data "
            "or fsdp instead of pipe"
        )
    if program.main.reverse:
        raise ValueError(
            f"pipe={ranks} runs a stack from its first layer to its last, and the model runs it from its last layer to "
            "its first; run it forwards, or use stages='cut'"
        )
    # A variable that comes out as it went in has the same variable of the program.
    inputs = set(program.inputs)
    for path, position in jax.tree_util.tree_leaves_with_path(variables):
        if program.outputs[position] not in inputs:
            raise ValueError(
                f"variable {name_of(path)} changes from microbatch to microbatch, which pipe={ranks} runs at the same "
                "time; use stages='cut', which runs them in order, or data or fsdp instead of pipe, or freeze the "
                "variable (BatchNorm: use_running_average=True)"
            )


def _check_division(stack: Stack, layout: Layout, strategy: Strategy) -> None:
    """Raise ValueError if the layers of a stack do not divide among the stages of a pipeline.

    Padding may fill the last stage, except with rounds of several blocks.
    """
    ranks, chunks = layout.mesh.shape["pipe"], strategy.chunks
    stages = ranks * chunks
    length, rounds = stack.length, max(s.stride for s in stack.slices)
    if rounds > 1 and length % stages:
        raise ValueError(
            f"pipe={ranks} x chunks={chunks} makes {stages} stages and the model's stack has {length} rounds of "
            f"{rounds} blocks that alternate; use a number of stages that divides {length}, or stages='cut', or data "
            "or fsdp instead of pipe"
        )
    if length < stages:
        hint = uneven_block(layout, stack.slices[0].leaf)
        raise ValueError(
            f"pipe={ranks} x chunks={chunks} makes {stages} stages and the model's stack has "
            f"{length} layers; use at most {length} stages{hint}, or stages='cut' if a Python loop runs them"
        )


def check_ordered(loss: jx.Flat, devices: int) -> None:
    """Raise ValueError if callbacks of a loss must run in order, while several devices run it at the same time."""
    eqn = next((eqn for eqn, _ in visit(loss.eqns) if eqn.params.get("ordered") is True), None)
    if devices > 1 and eqn is not None:
        raise ValueError(
            f"the loss has a callback or print with ordered=True, {eqn.primitive.name} at {jx.where(eqn)}, and "
            f"{devices} devices run it at the same time; callbacks on several devices have no order; leave ordered= out"
        )


def check_breakpoints(loss: jx.Flat, devices: int) -> None:
    """Raise ValueError if a loss opens a debugger that a step cannot open.

    A breakpoint keeps the local variables of the lines around it, which are values of the user's own trace. A step
    computes the loss's program again, where these values do not exist. On one device `jax.debug.breakpoint` opens its
    debugger all the same.
    """
    opens = lambda eqn: _opens_debugger(eqn) and (devices > 1 or eqn.primitive.name == "pure_callback")
    for outer in loss.eqns:
        if breakpoint_eqn := next((eqn for eqn, _ in visit([outer]) if opens(eqn)), None):
            # The equation of `eqx.error_if` has no line of the user: its outer equation is at the line that calls it.
            line = jx.user_line(breakpoint_eqn) or jx.where(outer)
            raise ValueError(
                f"the loss opens a debugger at {line} (jax.debug.breakpoint, or eqx.error_if with "
                "on_error='breakpoint'), and a step cannot stop there, since it runs the loss in blocks of rows and "
                "with its derivative; call the loss by itself to debug it, as loss(step.params(state), batch, None), "
                "or use jax.debug.print, or on_error='raise' (EQX_ON_ERROR=raise)"
            )


def _opens_debugger(eqn: Any) -> bool:
    """Return whether an equation calls JAX's debugger, directly or in a function that its callback encloses."""
    callback = eqn.params.get("callback")
    # A pure_callback stores its function in an object.
    function = getattr(callback, "callback_func", callback)
    enclosed = (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
    return any(getattr(f, "__module__", "") == "jax._src.debugger.core" for f in (function, *enclosed) if callable(f))


def check_cut(schedule: Schedule, strategy: Strategy, paths: Sequence[str]) -> None:
    """Raise ValueError if a strategy cannot be combined with a pipeline that cuts a program into stages."""
    # Cuts that the user names: each is a module, and there is one fewer than stages.
    stages = schedule.ranks * schedule.chunks
    cuts = points(strategy.cuts, stages, paths)
    for cut in cuts:
        if not below(cut, paths):
            # Every prefix of a path is a module.
            modules = {"/".join(path.split("/")[:n]) for path in paths for n in range(1, path.count("/") + 2)}
            raise ValueError(
                f"stages={strategy.stages!r}: no parameter lies below {cut!r}{did_you_mean(cut, sorted(modules))}; use "
                f"paths of modules, such as {paths[-1].rpartition('/')[0] or paths[-1]!r}, or auto, layers, cut"
            )
    if cuts and len(cuts) != stages - 1:
        raise ValueError(
            f"stages={strategy.stages!r} makes {len(cuts) + 1} stages and pipe={schedule.ranks} x "
            f"chunks={schedule.chunks} has {stages}; name {stages - 1} modules, each the beginning of a stage after "
            "the first"
        )
    # Options that need all ranks in the same layer, or leaves that are stored in one piece.
    reason = f"pipe={schedule.ranks} cuts the program (stages='cut', or the model has no stack of alike layers)"
    if strategy.attention in ("ring", "usp"):
        raise ValueError(
            f"attention={strategy.attention!r}: {reason}, so that its ranks are in different layers at a time, and a "
            "hop of the ring needs all devices; use attention='gather' or 'ulysses'"
        )
    if strategy.rule:
        raise ValueError(
            f"rule={strategy.rule!r}: {reason}, and moves leaves in parts that only jaxpar's own rules know; use "
            "zero=1 to 3"
        )
    if strategy.hpz:
        raise ValueError(f"hpz=True: {reason}, and moves each leaf to its stage once a step; leave hpz out")


def check_prefetch(schedule: Schedule, strategy: Strategy, cut: bool) -> None:
    """Raise ValueError if the ticks of a pipeline should prefetch and cannot know which layer is next.

    Args:
      strategy: the strategy, with its `prefetch`.
      cut: whether stages are parts of a program instead of layers.
    """
    if strategy.prefetch == 1 and (cut or not schedule.in_turn):
        reason = (
            "stages are parts of a program, not loops over layers" if cut else "not every tick runs the same layers"
        )
        raise ValueError(
            f"prefetch=1 in {strategy}: {reason}; use schedule=1f1b with chunks=1 and stages of layers, or prefetch=0"
        )


def check_variables(program: Program, variables: Sequence[tuple[Any, Any]], ranks: int) -> None:
    """Raise ValueError if one stage of a cut program changes a variable that another stage reads.

    Two stages run different microbatches at one time, so that the reader would see a value from another microbatch.

    Args:
      program: the cut loss; each piece is a stage.
      variables: the path of each variable, and its new value's position among the outputs.
      ranks: the number of ranks of the pipeline.
    """
    stage_by_var = {v: stage for stage, piece in enumerate(program.pieces) for v in piece.outputs}
    last = len(program.pieces) - 1
    inputs = program.inputs[len(program.consts) :]
    for i, (path, position) in enumerate(variables):
        old, new = inputs[i], program.outputs[position]
        # A value that no stage computes, such as a constant, counts as the last stage's.
        home = last if jx.is_literal(new) else stage_by_var.get(new, last)
        readers = [stage for stage, piece in enumerate(program.pieces) if old in piece.inputs and stage != home]
        # An unchanged variable is the same on all stages.
        if new is not old and readers:
            raise ValueError(
                f"variable {name_of(path)} is changed in stage {home} of pipe={ranks} and read in stage {readers[0]}, "
                "which runs another microbatch at that time; use data or fsdp instead of pipe, or freeze the variable"
            )


def check_remat(program: Program, layout: Layout, strategy: Strategy, schedule: Schedule | None) -> None:
    """Raise ValueError if there is no layer to recompute, or to move to the host, as the strategy asks.

    Args:
      program: the sliced loss.
      schedule: the pipeline's; None without one.
    """
    # "twice" needs a schedule whose backwards come in two halves, I (inputs) and W (weights).
    remat, table = strategy.remat, [] if schedule is None else schedule.table()
    if remat == "twice" and not any(op.kind == "W" for column in table for ops in column for op in ops):
        raise ValueError(
            "remat='twice' recomputes a layer in each half of its backward, and here backwards are whole; use "
            "remat='layer', or a schedule that splits backwards, such as pipe=4,schedule=zb-h1"
        )
    if remat not in ("none", "auto") and not program.stacks and not program.groups:
        lengths = {eqn.params["length"] for eqn in program.eqns if eqn.primitive.name == "scan"}
        units = layout.storage.units
        # A scan is no stack if its parameters are sharded along the layers: no device has a complete layer to fetch.
        if across := [leaf.path for leaf in units if leaf.dim == leaf.stage == 0 and leaf.logical[0] in lengths]:
            without_hpz = " and without hpz" if strategy.hpz else ""
            raise ValueError(
                f"remat={remat!r} applies to the layers of a layer stack, and the {layout.shards} shards of "
                f"{', '.join(across[:_MAX_LEAVES])} have some of the layers each, since {layout.shards} divides no "
                f"other dim; use widths that it divides or fewer shards, as fsdp=2 with data=-1{without_hpz}, or "
                "remat='none' with jax.checkpoint in the model"
            )
        raise ValueError(
            f"remat={remat!r} applies to the layers of a layer stack and the model has none; scan "
            "the layers (nnx.scan, nn.scan, jax.lax.scan), or use remat='none' with jax.checkpoint in the model"
        )
    # The host's copy engine moves one contiguous piece, which a layer is only on dim 0.
    if "params" in strategy.offloads and any(s.dim for stack in program.stacks for s in stack.slices):
        raise ValueError(
            f"offload={strategy.offload!r} copies layers that lie in one piece to the device, and a stack has its "
            "layers on another dim than the first; scan over dim 0 (variable_axes={'params': 0}), or leave 'params' out"
        )
    if "activations" in strategy.offloads and not program.stacks:
        raise ValueError(
            f"offload={strategy.offload!r} keeps the saved activations of a layer stack on the host, and the model has "
            "no stack; scan the layers (nnx.scan, nn.scan, jax.lax.scan), or use more microbatches"
        )


def uneven_block(layout: Layout, index: int) -> str:
    """Return a hint how the blocks of a Python loop differ, if a block of it is no layer of the stack; else "".

    Args:
      index: the position of a stack's leaf.
    """
    stack = layout.leaves[index]
    if not stack.rolled:
        return ""
    shapes = [(leaf.path, leaf.shape) for leaf in layout.storage.models]
    member = layout.storage.models[layout.storage.origin[index][0]].path
    reason = unlike(shapes, stack.path.partition("*")[0], member)
    return "" if reason is None else f", or make its blocks alike: {reason}"


def check_independent_of_replicas(program: Program, outputs: Any, num_inputs: int, axes: frozenset[str]) -> None:
    """Raise ValueError if the result of a step would depend on how the rows are spread over devices.

    Args:
      program: the sliced loss; its last `num_inputs` inputs are variables, batch and key.
      outputs: the positions of ({metric: Mean}, variables) among its outputs.
      num_inputs: the number of variables, leaves of the batch and keys.
      axes: the mesh axes over which rows are spread.
    """
    sums, variables = outputs
    # The backward divides by the count, which therefore must be known before it and have no gradient.
    if program.depends(program.leaves, sums["loss"].count):
        raise ValueError("the count of the loss's jp.Mean depends on the parameters; count rows or tokens of the batch")
    if not axes:
        return  # a single replica
    # Batch and key differ from replica to replica; the variables, which come first, do not.
    local_inputs = program.inputs[-num_inputs:][len(jax.tree.leaves(variables)) :]
    for path, position in jax.tree_util.tree_leaves_with_path(variables):
        # A reduction over all of these axes makes a value the same on all replicas.
        if program.depends(local_inputs, position, axes):
            raise ValueError(
                f"variable {name_of(path)} is updated from this replica's rows alone, so replicas would drift apart; "
                "compute it from jp.all_rows(...), or use the BatchNorm of Flax or Equinox, which jaxpar "
                "switches to all rows"
            )


def whole_batch_error(
    error: Exception, variables: Any, rows: int, blocks: tuple[int, int], takes: Callable[[int], bool]
) -> str:
    """Return the text of an error for a loss that takes the rows of the batch, and not the rows of one block.

    Args:
      error: the error of the loss on one block.
      variables: the model's variables, abstract.
      rows: the number of rows of a block.
      blocks: the number of blocks, (replicas, microbatches).
      takes: returns whether the loss takes a number of rows.
    """
    batch_rows = rows * math.prod(blocks)
    # 1. A variable with a value for each row of the batch.
    for path, x in jax.tree_util.tree_leaves_with_path(variables):
        if x.shape[:1] == (batch_rows,):
            return (
                f"variable {name_of(path)} {list(x.shape)} has one value for each of the batch's {batch_rows} rows, "
                f"and a block has {rows} ({error}): all replicas have the same variables, which are not divided as "
                "rows are; pass it to the loss in the batch, and compute its next value by step.model(state) before "
                "the step"
            )
    # 2. Groups of rows, which blocks cut. Blocks of the smallest number of rows that the loss takes would not.
    # `takes` traces the loss for each number. It ends, since the loss takes the rows of the batch.
    needed = next(n for n in range(rows + 1, batch_rows + 1) if takes(n))
    return (
        f"the loss takes the batch's {batch_rows} rows, but not the {rows} of one of its {math.prod(blocks)} blocks "
        f"({blocks[0]} replicas x {blocks[1]} microbatches), which cut groups of rows: {error}; make each group one "
        f"row of the batch, or give {needed * math.prod(blocks)} rows, or use fewer blocks"
    )


def succeeds(fun: Callable[..., Any], *args: Any) -> bool:
    """Return whether a function takes these arguments without a TypeError or ValueError."""
    try:
        fun(*args)
    except (TypeError, ValueError):
        return False
    return True
