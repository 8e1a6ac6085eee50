"""What a sliced loss must be for its strategy: every refusal of one, and a warning."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from . import jaxpr as jx
from .layers import positions
from .layout import Layout
from .sliced import Program
from .strategy import Strategy


def check_pipe(program: Program, out: Any, layout: Layout, strategy: Strategy) -> None:
    """Raises ValueError where a pipeline cannot run the model."""
    ranks = layout.mesh.shape["pipe"]
    if program.main is None and program.unrolled:
        index, why = program.unrolled[0]
        raise ValueError(
            f"pipe={ranks} spreads layers that are the same program, and those of {layout.leaves[index].path} "
            f"differ: {why}; make them alike, or use data or fsdp for pipe"
        )
    if program.main is None:
        raise ValueError(
            f"pipe={ranks} spreads the layers of a layer stack, and the loss scans none whose parameters are "
            f"stacked on dim 0; scan the layers (nnx.scan, nn.scan, jax.lax.scan), or use data or fsdp for pipe"
        )
    chunks = strategy.chunks
    if program.main.length < ranks * chunks:
        raise ValueError(
            f"pipe={ranks} x chunks={chunks} makes {ranks * chunks} stages and the model's stack has "
            f"{program.main.length} layers; use at most {program.main.length} stages"
        )
    if program.main.reverse:
        raise ValueError(f"pipe={ranks} and the model's stack is scanned in reverse; scan it forwards")
    given = set(program.inputs)
    for path, at in jax.tree_util.tree_leaves_with_path(positions(out)[1]):
        if program.outputs[at] not in given:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"variable {name} changes from microbatch to microbatch, which pipe={ranks} runs at the same time; "
                "use data or fsdp for pipe, or freeze it (BatchNorm: use_running_average=True)"
            )


def warn_precision(program: Program, low: Any, name: str) -> None:
    """Say so where the low precision `name`, dtype `low`, does not reach the matmuls."""
    by_dtype = jx.matmuls(program.eqns)
    total = sum(flops for flops, _ in by_dtype.values())
    flops, where = by_dtype.get("float32", (0, ""))
    if low != jnp.float32 and flops > 0.5 * total:
        warnings.warn(
            f"precision={name!r}, but {flops / total:.0%} of the matmuls' operations are in float32, first at "
            f"{where}: an operand that is no parameter is float32 there; cast it (inputs, dtype= of the module) to "
            f"jnp.{low.name}",
            stacklevel=2,
        )


def check_replicas(program: Program, out: Any, inputs: int, axes: frozenset[str]) -> None:
    """Raises ValueError where the result of a step would depend on how the rows are spread over `axes`.

    The last `inputs` inputs of the program are variables, batch and key.
    """
    _, variables = out
    at_tree = positions(out)
    if program.depends(program.leaves, at_tree[0]["loss"].count):
        raise ValueError("the count of the loss's jp.Mean depends on the parameters; count rows or tokens of the batch")
    if not axes:
        return
    fed = program.inputs[-inputs:][len(jax.tree.leaves(variables)) :]  # batch and key differ from replica to replica
    for (path, _), at in zip(jax.tree_util.tree_leaves_with_path(variables), jax.tree.leaves(at_tree[1]), strict=True):
        if program.depends(fed, at, axes):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"variable {name} is updated from this replica's rows alone, so replicas would drift apart; "
                "average what it is computed from over jp.all_rows(...), or use Flax's own BatchNorm, which jaxpar "
                "switches to all rows"
            )
