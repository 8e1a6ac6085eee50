"""Parameters that a loss writes to in its forward pass, as spectral normalization does.

In a plain Flax loop the write stays: the gradients are those of the values before it, and the optimizer changes the
values after it. With w for what the forward pass leaves in place of the parameters p:

    loss, grads = value_and_grad(loss)(p)
    p           = w(p) + update(grads, w(p))

A step computes w apart from the loss, on whole leaves of the state, outside `shard_map`. Every layout therefore gets
the same values, and a low precision of the loss does not round them. This requires that w depends on parameters and
variables alone: replicas have different rows, and microbatches would write one after another.
"""

from __future__ import annotations

import linecache
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
      numbers: the positions of the written leaves among the model's own leaves.
      program: its inputs are the model's own leaves, then the leaves of the variables; its outputs are the new values.
    """

    numbers: tuple[int, ...]
    program: jx.Flat

    def __call__(self, layout: Layout, stored: Any, variables: Any) -> Any:
        """Return the stored parameters as the forward pass leaves them; leaves without a write stay as they are."""
        values, tree = jax.tree.flatten(layout.to_logical(jax.tree.map(on_device, stored)))
        flat = self.program
        run = jx.run(flat.eqns, (*flat.constvars, *flat.invars), flat.outvars)
        outs = run(*flat.consts, *values, *jax.tree.leaves(variables))
        for number, out in zip(self.numbers, outs, strict=True):
            values[number] = out
        new = layout.to_stored(jax.tree.unflatten(tree, values))
        leaves = zip(
            layout.storage.origin, layout.storage.tree.flatten_up_to(stored), jax.tree.leaves(new), strict=True
        )
        return layout.unflatten(after if {*at} & {*self.numbers} else before for at, before, after in leaves)


def find_writes(
    model: Model, layout: Layout, strategy: Strategy, candidates: Sequence[int], rest: tuple[Any, Any, Any]
) -> Writes | None:
    """Return the writes of a loss to its parameters, or None if it has none.

    Args:
      model, layout, strategy: of the step.
      candidates: positions of the model's own leaves that the loss may write to.
      rest: abstract variables, rows and key of one microbatch.

    Raises ValueError where a step cannot carry the writes out.
    """
    leaves = layout.storage.models
    stored = [jax.ShapeDtypeStruct(x.shape, layout.policy.stored(x.dtype, x.trainable)) for x in leaves]

    def after(params: list[Any], rest: Any) -> list[Any]:
        _, _, written = model.forward(jax.tree.unflatten(layout.storage.model_tree, params), *rest)
        return [jax.tree.leaves(written)[number] for number in candidates]

    flat, _ = jx.trace(after, stored, rest, remats=True)
    sources = _sources(flat)
    pairs = zip(candidates, flat.outvars, sources, strict=True)
    written = {number: out for number, out, source in pairs if source is not flat.invars[number]}
    if not written:
        return None
    lines = {number: _line(flat, out) for number, out in written.items()}
    before = len(leaves) + len(jax.tree.leaves(rest[0]))
    programs = {number: jx.needed(jx.live(flat.eqns, [out]), [out]) for number, out in written.items()}
    for number, out in written.items():
        if {*jx.free(programs[number], [] if jx.is_literal(out) else [out])} & {*flat.invars[before:]}:
            raise ValueError(
                f"the loss writes to the parameter {leaves[number].path}{lines[number]} from the rows or the random "
                f"key that one block has; a step can keep a write that depends on parameters and variables alone; "
                f"{_OTHER_KIND}, and compute what is written from jp.all_rows(...)"
            )
    number = next(iter(written))
    said = f"the loss writes to the parameter {leaves[number].path}{lines[number]}"
    if frozen := [number for number in written if not leaves[number].trainable]:
        raise ValueError(
            f"the loss writes to the parameter {leaves[frozen[0]].path}{lines[frozen[0]]}, which trainable= freezes; a "
            f"frozen parameter keeps its value; let trainable= name it, or {_OTHER_KIND}"
        )
    if strategy.microbatches > 1:
        raise ValueError(
            f"{said}, and each of {strategy.microbatches} microbatches would write again; a step with such a loss has "
            f"one microbatch; leave microbatches out, or {_OTHER_KIND}"
        )
    if off := sorted({*strategy.offloads} & {"params", "optimizer"}):
        raise ValueError(
            f"{said}, and offload={strategy.offload!r} updates leaves that are on the host block by block; a step with "
            f"such a loss keeps them on the devices; leave {' and '.join(off)} out of offload, or {_OTHER_KIND}"
        )
    outs = list(written.values())
    eqns = tuple(jx.needed(jx.live(flat.eqns, outs), outs))
    return Writes(tuple(written), jx.Flat(flat.constvars, flat.consts, flat.invars[:before], tuple(outs), eqns))


def _sources(flat: jx.Flat) -> list[Any]:
    """For each output the input that it is, unchanged; None for one that is computed.

    Flax returns every parameter of a layer from its scans and rematerialised calls, whether or not the layer writes.
    """

    def of(eqn: Any, ins: list[Any]) -> Sequence[Any]:
        outs = propagate(eqn, ins, lambda program, ins, _: through(program, ins, of, None), _same)
        return [None] * len(eqn.outvars) if outs is None else outs

    return through(flat, flat.invars, of, None)


def _same(a: Any, b: Any) -> Any:
    return a if a is b else None


def _line(flat: jx.Flat, out: Any) -> str:
    """Where a write is computed: " at model.py:12 (forward), `self.w[...] = ...`"."""
    maker = None if jx.is_literal(out) else next((eqn for eqn in flat.eqns if out in eqn.outvars), None)
    if maker is None or not (line := jx.where(maker)):
        return ""
    file, number = line.partition(" ")[0].split(":")[:2]
    code = linecache.getline(file, int(number)).strip() if number.isdecimal() else ""
    return f" at {line}" + f", `{code}`" * bool(code)
