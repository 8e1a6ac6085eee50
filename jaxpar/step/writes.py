"""Parameters that a loss writes to in its forward pass, as spectral normalization does.

In a plain Flax loop the write stays: the gradients are those of the values before it, and the optimizer changes the
values after it. With w for what the forward pass leaves in place of the parameters p:

    loss, grads = value_and_grad(loss)(p)
    p           = w(p) + update(grads, w(p))

A step computes w separately from the loss, on whole leaves of the state, outside `shard_map`. Every layout therefore
gets the same values, and a low precision of the loss does not round them. This requires that w depends on parameters
and variables alone: replicas have different rows, and microbatches would write one after another.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..layout.layout import Layout
from ..model.model import Model
from ..program import jaxpr as jx
from ..program.buffers import on_device
from ..program.environment import through
from ..program.walk import propagate
from ..strategy import Strategy

_OTHER_KIND = (
    "keep the array in a variable that is not a parameter (in NNX an nnx.Variable of your own class, in a function's "
    "model one of its variables)"
)


@dataclass(frozen=True)
class Writes:
    """The parameters that a loss writes to, and the program of what it writes.

    Attributes:
      indices: the positions of the written leaves among the model's own leaves.
      program: its inputs are the model's own leaves, then the leaves of the variables; its outputs are the new values.
    """

    indices: tuple[int, ...]
    program: jx.Flat

    def __call__(self, layout: Layout, stored: Any, variables: Any) -> Any:
        """Return the stored parameters as the forward pass leaves them; leaves without a write stay as they are."""
        # The program reads the model's own leaves, in the masters' dtype.
        values, tree = jax.tree.flatten(layout.to_logical(jax.tree.map(on_device, stored)))
        flat = self.program
        run = jx.run(flat.eqns, (*flat.constvars, *flat.invars), flat.outvars)
        outs = run(*flat.consts, *values, *jax.tree.leaves(variables))
        for i, out in zip(self.indices, outs, strict=True):
            values[i] = out
        written = layout.to_stored(jax.tree.unflatten(tree, values))
        # A stored leaf that holds no written one stays the same array, which XLA need not copy.
        leaves = zip(
            layout.storage.origin, layout.storage.tree.flatten_up_to(stored), jax.tree.leaves(written), strict=True
        )
        return layout.unflatten(
            new_value if {*members} & {*self.indices} else old_value for members, old_value, new_value in leaves
        )


def find_writes(
    model: Model, layout: Layout, strategy: Strategy, candidates: Sequence[int], inputs: tuple[Any, Any, Any]
) -> Writes | None:
    """Return the writes of a loss to its parameters, or None if it has none.

    Args:
      candidates: positions of the model's own leaves that the loss may write to.
      inputs: abstract variables, rows and key of one microbatch.

    Raises ValueError if a step cannot carry the writes out.
    """
    leaves = layout.storage.models
    stored = [jax.ShapeDtypeStruct(x.shape, layout.policy.stored(x.dtype, x.trainable)) for x in leaves]

    # 1. Trace the parameters that the forward pass returns, and keep those that it changes.
    def new_params(params: list[Any], inputs: Any) -> list[Any]:
        _, _, params_after = model.forward(jax.tree.unflatten(layout.storage.model_tree, params), *inputs)
        return [jax.tree.leaves(params_after)[i] for i in candidates]

    # In the masters' dtype, since the loss's dtype would round what is written.
    flat, _ = jx.trace(new_params, stored, inputs, remats=True)
    sources = _sources(flat)
    candidates_with_source = zip(candidates, flat.outvars, sources, strict=True)
    written = {i: out for i, out, source in candidates_with_source if source is not flat.invars[i]}
    if not written:
        return None

    # 2. Refuse writes that depend on rows or key: blocks of rows would write different values.
    lines = {i: _line(flat, out) for i, out in written.items()}
    first_row = len(leaves) + len(jax.tree.leaves(inputs[0]))
    programs = {i: jx.needed(jx.live(flat.eqns, [out]), [out]) for i, out in written.items()}
    for i, out in written.items():
        if {*jx.free(programs[i], [] if jx.is_literal(out) else [out])} & {*flat.invars[first_row:]}:
            raise ValueError(
                f"the loss writes to the parameter {leaves[i].path}{lines[i]} a value that depends on the rows or the "
                f"random key of one block; a step can keep writes that depend on parameters and variables alone; "
                f"{_OTHER_KIND}, and compute the value from jp.all_rows(...)"
            )

    # 3. Refuse writes to frozen parameters, and strategies that cannot write once on the devices.
    if frozen := [i for i in written if not leaves[i].trainable]:
        raise ValueError(
            f"the loss writes to the parameter {leaves[frozen[0]].path}{lines[frozen[0]]}, which trainable= freezes; a "
            f"frozen parameter keeps its value; let trainable= choose it too, or {_OTHER_KIND}"
        )
    first_written = next(iter(written))
    fault = f"the loss writes to the parameter {leaves[first_written].path}{lines[first_written]}"
    _check_strategy(strategy, fault)

    # 4. One program for all writes, which reads parameters and variables.
    outs = list(written.values())
    eqns = tuple(jx.needed(jx.live(flat.eqns, outs), outs))
    return Writes(tuple(written), jx.Flat(flat.constvars, flat.consts, flat.invars[:first_row], tuple(outs), eqns))


def _check_strategy(strategy: Strategy, fault: str) -> None:
    """Raise ValueError if a step would write more than once, or cannot reach the parameter; `fault` begins the text."""
    if strategy.microbatches > 1:
        raise ValueError(
            f"{fault}, and each of {strategy.microbatches} microbatches would write again; a step with such a loss has "
            f"one microbatch; leave microbatches out, or {_OTHER_KIND}"
        )
    if off := sorted({*strategy.offloads} & {"params", "optimizer"}):
        raise ValueError(
            f"{fault}, and offload={strategy.offload!r} updates leaves that are on the host block by block; a step "
            f"with such a loss keeps them on the devices; leave {' and '.join(off)} out of offload, or {_OTHER_KIND}"
        )


def _sources(flat: jx.Flat) -> list[Any]:
    """Return, for each output, the input that it passes through unchanged; None for an output that is computed.

    Flax returns every parameter of a layer from its scans and rematerialised calls, whether or not the layer writes.
    """

    def outputs_of(eqn: Any, ins: list[Any]) -> Sequence[Any]:
        # A loop's carry that no iteration changes is its own source.
        # Values that meet, such as the branches of a `cond`, have a common source or None.
        join = lambda a, b: a if a is b else None
        outs = propagate(eqn, ins, lambda program, ins, _: through(program, ins, outputs_of, None), join)
        return [None] * len(eqn.outvars) if outs is None else outs

    return through(flat, flat.invars, outputs_of, None)


def _line(flat: jx.Flat, out: Any) -> str:
    """Return where a write is computed, such as " at model.py:12 (forward), `self.w[...] = ...`"; "" if unknown."""
    # An assignment is no equation; the place is that of the equation that computes the value.
    maker = None if jx.is_literal(out) else next((eqn for eqn in flat.eqns if out in eqn.outvars), None)
    if maker is None or not (line := jx.where(maker)):
        return ""
    file_and_number = re.match(r"(.+?):(\d+)", line)  # the path may have spaces
    code = linecache.getline(file_and_number[1], int(file_and_number[2])).strip() if file_and_number else ""
    return f" at {line}" + f", `{code}`" * bool(code)
