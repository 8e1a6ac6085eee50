"""The stages of a cut program: what each reads, hands on and leaves for its backward."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...jaxprs import jaxpr as jx
from ...slicing.pieces import Access, Segment
from ...slicing.program import Program, backward, forward, read
from ...tables.operations import KINDS, StagePlace
from ...text import size
from .cut import bytes_of, times
from .packing import Packing


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
      number: among all, in the order of the program.
      piece: its equations.
      incoming, outgoing: variables that the messages before and behind it hold: made before, read behind.
      results: positions of the program's outputs that it makes.
    """

    number: int
    piece: Segment
    incoming: tuple[Any, ...]
    outgoing: tuple[Any, ...]
    results: tuple[int, ...]

    @functools.cached_property
    def before(self) -> Packing:
        """The message that it gets, and the cotangents that it sends."""
        return Packing.of(v.aval for v in self.incoming)

    @functools.cached_property
    def behind(self) -> Packing:
        """The message that it sends, and the cotangents that it gets."""
        return Packing.of(v.aval for v in self.outgoing)


def stages(program: Program) -> list[Stage]:
    """The stages of a program of as many segments."""
    pieces = [piece for piece in program.pieces if isinstance(piece, Segment)]
    assert len(pieces) == len(program.pieces)
    home = {v: at for at, piece in enumerate(pieces) for v in piece.outputs}
    last = {v: at for at, piece in enumerate(pieces) for v in piece.inputs if v in home}
    live = lambda cut: tuple(v for v, at in home.items() if at < cut <= last.get(v, 0))
    results: list[list[int]] = [[] for _ in pieces]
    for position, atom in enumerate(program.outputs):
        results[-1 if jx.is_literal(atom) else home.get(atom, -1)].append(position)  # the last has the program's inputs
    return [Stage(at, piece, live(at), live(at + 1), tuple(results[at])) for at, piece in enumerate(pieces)]


def described(program: Program, held: Sequence[int]) -> str:
    """The stages in numbers: their parts of the predicted time, their weights, and the messages between them. `held`
    are the bytes of each leaf.
    """
    each = [float(times(group).sum()) for group in program.groups]
    every = stages(program)
    weights = [size(sum(held[i] for i in dict.fromkeys(stage.piece.unit.leaves))) for stage in every]
    carried = [sum(bytes_of(v) for v in stage.incoming if v in stage.outgoing) for stage in every]
    parts = ", ".join(f"{x / sum(each):.0%}" for x in each)
    return (
        f"the program is cut into {len(every)} stages of {parts} of the predicted time, with {', '.join(weights)} of "
        f"weights; the largest message has {size(max(stage.before.bytes for stage in every))}, and skips carry "
        f"{size(sum(carried))} of a microbatch through stages that do not make them"
    )


def paces(
    program: Program, numbers: Mapping[StagePlace, int], kinds: np.ndarray, chunks: np.ndarray
) -> dict[tuple[str, int], int]:
    """The slots in which all ranks wait for a stage's F or B: the longest that runs, of the predicted times.

    `numbers` are those of the stages by their place, `kinds` and `chunks` [slots, ranks] of operations, 0 where a rank
    is idle.
    """
    each = [float(times(group).sum()) for group in program.groups]
    found = {(kind, number): 0 for number in numbers.values() for kind in "FB"}
    for slot in range(len(kinds)):
        ran = [
            (KINDS[kinds[slot, rank] - 1], numbers[StagePlace(int(rank), int(chunks[slot, rank]))])
            for rank in np.flatnonzero(kinds[slot])
        ]
        found[max(ran, key=lambda one: each[one[1]] * (1 if one[0] == "F" else 2))] += 1
    return found


def is_linear(program: Program, v: Any) -> bool:
    """Whether a variable of a message has a cotangent."""
    return any(on for p in program.pieces for out, on in zip(p.outputs, p.unit.active, strict=True) if out is v)


@dataclass(frozen=True)
class StageRun:
    """A stage's forward and backward, traced: functions of its leaves, the program's inputs, and its messages.

    Attributes:
      forward: `forward(leaves, inputs, incoming)`: outgoing, results, what is stashed.
      backward: `backward(leaves, inputs, stashed, cotangents of the linear outgoing)`: gradients of the leaves as they
        are given, None for frozen ones, and cotangents of the linear incoming. None in an evaluation.
      stash: where what is stashed lies.
    """

    forward: Any
    backward: Any
    stash: Packing


def run(
    stage: Stage,
    program: Program,
    access: Access,
    leaves: Sequence[Any],
    inputs: Sequence[Any],
    fixed: Sequence[bool],
    seeds: dict[int, jax.Array] | None,
) -> StageRun:
    """Trace a stage, with abstract `leaves` (of its unit) and `inputs` of the program; `fixed` says which of these a
    backward finds as they were. `seeds` are cotangents of the program's outputs by position, None for an evaluation.
    """
    piece, n = stage.piece, len(program.leaves)
    incoming = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in stage.incoming]
    trees = []

    def whole(mine: Sequence[Any]) -> list[Any]:
        out: list[Any] = [None] * n
        for i, x in zip(piece.unit.leaves, mine, strict=True):
            out[i] = x
        return out

    def ahead(mine: Sequence[Any], inputs: Sequence[Any], incoming: Sequence[Any]) -> Any:
        env = program.environment(inputs)
        env.update(zip(stage.incoming, incoming, strict=True))
        tape = forward([piece], access, whole(mine), env, seeds is not None)
        outs = [read(env, v) for v in stage.outgoing]
        found = [read(env, program.outputs[i]) for i in stage.results]
        flat, tree = jax.tree.flatten(tape)
        trees.append(tree)
        return outs, found, flat if seeds is not None else []

    flat, shape = jx.trace(ahead, list(leaves), list(inputs), incoming)
    made, found, taped = shape
    before = len(made) + len(found)
    tape = flat.outvars[before:]
    if seeds is None:
        return StageRun(_as_fun(flat, flat.outvars, shape), None, Packing.of(()))

    linear = [on for v in stage.outgoing for on in [is_linear(program, v)]]
    cts_in = [x for x, on in zip(made, linear, strict=True) if on]

    def back(mine: Sequence[Any], tape: Sequence[Any], given: Sequence[Any]) -> Any:
        cts = dict(zip([v for v, on in zip(stage.outgoing, linear, strict=True) if on], given, strict=True))
        for i in stage.results:
            if i in seeds and not jx.is_literal(v := program.outputs[i]):
                cts[v] = cts[v] + seeds[i] if v in cts else seeds[i]
        tape = jax.tree.unflatten(trees[0], tape)
        grads = backward([piece], access, whole(mine), tape, cts, [None] * n)
        wanted = [v for v in stage.incoming if is_linear(program, v)]
        outs = [cts[v] if v in cts else jnp.zeros(v.aval.shape, v.aval.dtype) for v in wanted]
        return [grads[i] for i in piece.unit.leaves], outs

    pull, pulled = jx.trace(back, list(leaves), list(taped), cts_in)
    eqns = jx.live(pull.eqns, pull.outvars)
    needed = {*jx.free(eqns, pull.outvars)}
    arguments = pull.invars[len(leaves) : len(leaves) + len(tape)]
    # Of what the backward reads, rows and the like are looked up again; each other value is stashed once.
    again = {v: at for at, (v, on) in enumerate(zip(flat.invars[len(leaves) :], fixed, strict=False)) if on}
    consts = dict(zip(flat.constvars, flat.consts, strict=True))
    used = [v for v, a in zip(tape, arguments, strict=True) if a in needed and not jx.is_literal(v)]
    kept = list(dict.fromkeys(v for v in used if v not in again and v not in consts))
    ahead_fun = jx.run(
        jx.live(flat.eqns, [*flat.outvars[:before], *kept]),
        [*flat.constvars, *flat.invars],
        [*flat.outvars[:before], *kept],
    )

    def run_ahead(mine: Sequence[Any], inputs: Sequence[Any], incoming: Sequence[Any]) -> Any:
        outs = ahead_fun(*flat.consts, *mine, *inputs, *incoming)
        return outs[: len(made)], outs[len(made) : before], outs[before:]

    unused = [a for a in arguments if a not in needed]
    reads = [v for v in [*pull.constvars, *pull.invars] if v not in set(unused)]
    pull_fun = jx.run(eqns, reads, pull.outvars)

    def run_back(mine: Sequence[Any], inputs: Sequence[Any], stashed: Sequence[Any], given: Sequence[Any]) -> Any:
        known = dict(zip(kept, stashed, strict=True)) | consts | {v: inputs[at] for v, at in again.items()}
        values = [read(known, v) for v, a in zip(tape, arguments, strict=True) if a in needed]
        outs = pull_fun(*pull.consts, *mine, *values, *given)
        return jax.tree.unflatten(jax.tree.structure(pulled), outs)

    return StageRun(run_ahead, run_back, Packing.of(v.aval for v in kept))


def _as_fun(flat: jx.Flat, outs: Sequence[Any], shape: Any) -> Any:
    fun = jx.run(jx.live(flat.eqns, outs), [*flat.constvars, *flat.invars], outs)
    tree = jax.tree.structure(shape)
    return lambda *args: jax.tree.unflatten(tree, fun(*flat.consts, *jax.tree.leaves(args)))
