"""Warnings about a traced loss that runs, but costs more than its strategy suggests or learns less than its user means.

`Tracing._check` calls most of them, once for each traced loss.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..layout.layout import Layout
from ..layout.leaves import Leaf
from ..model.model import MAKERS, is_replicated
from ..model.paths import name_of
from ..parallel.pipeline.chunks import padded
from ..program import jaxpr as jx
from ..slicing.program import Program
from ..slicing.stacks import gathered
from ..strategy import PER_RANK

GATHERED_FROM = 64 << 20  # bytes that ZeRO-3 gathers at once; fewer cause no warning
_MAX_PADDING = 1.25  # times the layers' work; below it, only `explain` tells of padding
_LARGE_GATHER = 1 << 20  # bytes that tensor ranks gather; fewer cause no warning


def warn_padded(layers: int, ranks: int, chunks: int) -> None:
    """Warn if the chunks of a pipeline have room for many more layers than the model has."""
    stages = ranks * chunks
    # The time of a stage is that of its layers, padding included.
    if -(-layers // stages) * stages > _MAX_PADDING * layers:
        warnings.warn(f"pipe={ranks}, chunks={chunks}: {padded(layers, ranks, chunks)}", stacklevel=2)


def warn_idle(ranks: int, microbatches: int) -> None:
    """Warn of a pipeline with one microbatch, in which only one rank works at a time."""
    if ranks > 1 and microbatches == 1:
        # A rank idles (p - 1)/(m + p - 1) of a step with p ranks and m microbatches.
        m = PER_RANK * ranks
        warnings.warn(
            f"pipe={ranks} with microbatches=1: one rank works at a time, and each idles {1 - 1 / ranks:.0%} of a "
            f"step; use microbatches={m} ({(ranks - 1) / (m + ranks - 1):.0%}), or as many as divide a replica's rows",
            stacklevel=3,
        )


def warn_gathered(program: Program, layout: Layout) -> None:
    """Warn if ZeRO-3 gathers more than half of the parameters at once."""
    num_params = sum(math.prod(leaf.logical) for leaf in layout.leaves)
    # Leaves come largest first.
    num_gathered, leaves = gathered(program.pieces, layout.storage.units)
    size = num_gathered * jnp.dtype(layout.policy.compute).itemsize
    if (
        "params" in layout.sharded
        and layout.shards > 1
        and size >= GATHERED_FROM
        and 2 * num_gathered > num_params
        # If one leaf is most of it, such as an embedding, stacking layers would not help.
        and 2 * math.prod(leaves[0].logical) < num_gathered
    ):
        reasons = (
            "; ".join(f"{path}: {description}" for path, description in layout.loops.items())
            or "the loss has no loop over equal layers"
        )
        warnings.warn(
            f"zero=3 gathers {num_gathered / num_params:.0%} of the parameters at once ({size:,} bytes; "
            f"{leaves[0].path}, {leaves[1].path}, ...), outside of any stack of layers ({reasons}); make the layers "
            "alike, or scan them (nnx.scan, nn.scan, jax.lax.scan)",
            stacklevel=2,
        )


def warn_no_rule(gathered: Mapping[str, int], ranks: int) -> None:
    """Warn of operations without a rule for which tensor ranks gather large arrays.

    Args:
      gathered: by place in the model's code, the bytes that are gathered.
    """
    for place, size in gathered.items():
        if size >= _LARGE_GATHER:
            warnings.warn(
                f"tensor={ranks}: {place} has no rule for split values and gathers {size:,} bytes on every "
                "rank; leave the leaves that it uses whole (rules={...: None}), or wrap it in jp.local_kernel",
                stacklevel=2,
            )


def warn_untrained(loss: jx.Flat, outputs: Any, leaves: Sequence[Leaf]) -> None:
    """Warn if the loss reads no parameter that is trained.

    Args:
      loss: the equations, whose first inputs are the parameters.
      outputs: the positions of ({metric: Mean}, variables) among the results.
    """
    trained = [v for v, leaf in zip(loss.invars, leaves, strict=False) if leaf.trainable]
    total = loss.outvars[outputs[0]["loss"].total]
    # The total may itself be a parameter, which no equation reads.
    vars_read = {v for eqn in jx.live(loss.eqns, [total]) for v in eqn.invars if not jx.is_literal(v)} | {total}
    if trained and vars_read.isdisjoint(trained):
        warnings.warn(
            "the loss reads no parameter that is trained: every gradient is zero, and nothing is learned; compute it "
            "with the module or params that it is given, not with a module from outside of it",
            stacklevel=2,
        )


def unread_leaves(loss: jx.Flat, inputs: Any, num_params: int) -> list[str]:
    """Return the paths of the batch's leaves with rows that no result of a loss depends on.

    Args:
      loss: the equations; the first `num_params` inputs are parameters, the others the leaves of `inputs`.
      inputs: abstract (variables, batch, key).
    """
    vars_read = {v for eqn in jx.live(loss.eqns, loss.outvars) for v in eqn.invars if not jx.is_literal(v)}
    # A result may pass an input through, which no equation reads.
    vars_read |= {v for v in loss.outvars if not jx.is_literal(v)}
    # Replace the inputs' leaves by their variables, to name these by their paths.
    input_vars = iter(loss.invars[num_params:])
    batch = jax.tree.map(lambda _: next(input_vars), inputs)[1]
    leaves = jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_replicated)
    return [name_of(path) or "batch" for path, v in leaves if not is_replicated(v) and v not in vars_read]


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
    """Warn that `jp.all_rows` returns the rows of one microbatch, if a step has several.

    Args:
      noted: the calls that gather rows (`model.couplings`).
      rows: the number of rows of a microbatch on all replicas together.
    """
    if "all_rows" in noted and microbatches > 1:
        warnings.warn(
            f"jp.all_rows returns the rows of one microbatch, {rows} of the {rows * microbatches} rows of the batch, "
            f"so the result is not that of the whole batch; use microbatches=1 instead of {microbatches} (with "
            "remat=layer or more devices if memory is short), or, if the loss is meant to use the rows of a "
            f"microbatch, pass rows='independent' to {MAKERS}",
            stacklevel=2,
        )


def warn_precision(loss: jx.Flat, low: Any, name: str) -> None:
    """Warn if a low precision does not reach most of the matmuls of a loss.

    Args:
      loss: the model's own equations.
      low: the dtype of the precision.
      name: its name in the strategy.
    """
    by_dtype = jx.matmuls(loss.eqns)
    total_flops = sum(flops for flops, _ in by_dtype.values())
    flops, line = by_dtype.get("float32", (0, ""))
    # A few float32 matmuls may be meant, such as those of a router.
    if low == jnp.float32 or flops <= 0.5 * total_flops:
        return
    cause = f"an operand that is no parameter is float32 there; cast it to jnp.{low.name}, or pass dtype= to its module"
    if cast := _widening_cast(loss, low):
        cause = (
            f"{low.name} becomes float32 at {cast}, and stays float32; cast the result there to jnp.{low.name}, or "
            "pass dtype= to its module"
        )
    warnings.warn(
        f"precision={name!r}, but {flops / total_flops:.0%} of the matmuls' operations are in float32, first at "
        f"{line}: {cause}",
        stacklevel=2,
    )


def _widening_cast(loss: jx.Flat, low: Any) -> str:
    """Return the line where values of dtype `low` are cast to the float32 of the first float32 matmul.

    An embedding whose module computes in float32 has such a cast. Returns "" if the matmul depends on an input of the
    loss that is float32 itself.
    """
    index_by_var = {v: i for i, eqn in enumerate(loss.eqns) for v in eqn.outvars}
    matmul = next(i for i, eqn in enumerate(loss.eqns) if "float32" in jx.matmuls([eqn]))
    float32_inputs = lambda eqn: [v for v in eqn.invars if not jx.is_literal(v) and v.aval.dtype == jnp.float32]
    # Walk backwards from the matmul through float32 values, to the casts from which they all come.
    todo, seen, casts = float32_inputs(loss.eqns[matmul]), set[Any](), []
    while todo:
        if (v := todo.pop()) in seen:
            continue
        seen.add(v)
        # An input of the program is float32 already: no cast is to blame.
        if v not in index_by_var:
            return ""
        maker = loss.eqns[index_by_var[v]]
        if maker.primitive.name == "convert_element_type" and maker.invars[0].aval.dtype == low:
            casts.append(index_by_var[v])
        # The operand of a widening cast is not float32, so that the walk ends there.
        todo += float32_inputs(maker)
    return jx.where(loss.eqns[min(casts)]) if casts else ""


def recorded_warnings(call: Callable[[], object]) -> list[warnings.WarningMessage]:
    """Return the warnings that a call gives; the user sees them all the same."""
    with warnings.catch_warnings(record=True) as messages:
        # Filters, by which a warning is shown once, would hide some from the record.
        warnings.simplefilter("always")
        call()
    for message in messages:
        # Given again outside of the record, with the place where they came from.
        warnings.warn_explicit(message.message, message.category, message.filename, message.lineno)
    return messages
