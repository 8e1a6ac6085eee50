"""What becomes of scores between their product and their softmax, read from a program as a function of a block of them.

What runs along queries and keys at once is replayed for each block: from positions, from what has an entry for each
query, key or head (ids, slopes, a padding mask), and from tables. All these are operands, which are computed where they
stand in the program, and whole along at most one of the two; an input of the program that runs along both is one too.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....program import jaxpr as jx
from ....program.kernels import local_kernel
from ..ops.blocks import dtype_of_sums
from ..ops.score_function import (
    Along,
    Labels,
    ScoreFunction,
    ScoreLayout,
    ScoreProgram,
    ScoreStep,
    Value,
    operands_of,
    scored_attention,
)
from .flash import AttentionOptions
from .hidden import Hindered, Scope

Names = Sequence[Sequence[Any]]  # of each dim those that it merges, which have a name
Named = tuple[Any, Names]


def replayed(
    scores: tuple[Named, Named],
    weights: tuple[Named, Named] | None,
    sinks: Sequence[Any],
    sizes: Mapping[Any, int],
    scope: Scope,
    last: Any,
    causal: bool,
) -> tuple[tuple[Any, ...], Callable[..., jax.Array], str]:
    """An attention whose scores become others: what it reads; the function of queries, keys, values [B, T, H, h] and of
    what it reads; what it does with scores, for people. Raises Hindered.

    `scores` are the product of queries and keys and what the softmax is of, beside `sinks`, each with the names of its
    dims; `weights` the softmax and what values are multiplied by, None where that is it; `sizes` are those of rows,
    heads, groups, "t" and "s", in this order; `causal`, whether no later key than a query's own counts.
    """
    ends = [x for x in (scores, weights) if x is not None]
    try:
        programs, by_heads = [_program(*x, sizes, scope, last, "kgts") for x in ends], True
    except Hindered:
        programs, by_heads = [_program(*x, sizes, scope, last, "ts") for x in ends], False
    function = ScoreFunction(programs[0], programs[1] if weights else None, bool(sinks), by_heads)
    kept = functools.partial(scored_attention, AttentionOptions(causal, None, None, None, 0, False, None, function))
    dim = [[part.name for part in dims] for dims in scores[1][1]].index(["s"])
    every = [value for program in programs for value in program.operands]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *read: jax.Array) -> jax.Array:
        b, groups, each = len(q), k.shape[2], q.shape[2] // k.shape[2]
        along = {"t": sizes["t"], "s": sizes["s"], "k": groups, "g": each}
        operands = [jnp.arange(along[side], dtype=jnp.int32) for side in function.numbered]
        operands += [_counting(value, x, along) for value, x in zip(every, read, strict=False)]
        if sinks:
            more = jnp.concatenate(read[len(every) :], dim).astype(dtype_of_sums(q))
            more = jax.nn.logsumexp(more, dim, keepdims=True)
            operands.append(programs[0].back.back(more, (b, groups, each, sizes["t"], 1))[..., 0])
        return local_kernel(kept, *function.heads())(q, k, v, *operands)

    read = (*(x for x, _ in every), *sinks)
    takes = ", ".join(dict.fromkeys(x.aval.str_short() for x in read if x.aval.shape))
    return read, attend, "by a function of scores and positions" + f" that reads {takes}" * bool(takes)


def bias_of(
    scores: tuple[Named, Named], sizes: Mapping[Any, int], scope: Scope, last: Any
) -> tuple[tuple[Any, ...], Callable[..., jax.Array]]:
    """What is added to scores, hidden keys included: what it reads; of queries, keys and that [1, H, T, S]. Raises
    Hindered where rows have others. Arguments are as of `replayed`.
    """
    program = _program(*scores, sizes, scope, last, "bkgts")
    if any(x and x.side == "b" for _, labels in program.operands for x in labels):
        raise Hindered(last, "adds a bias to scores that is not the same for all rows")

    def bias(q: jax.Array, k: jax.Array, *read: jax.Array) -> jax.Array:
        along = {"b": 1, "k": k.shape[2], "g": q.shape[2] // k.shape[2], "t": sizes["t"], "s": sizes["s"]}
        operands = [_counting(value, x, along) for value, x in zip(program.operands, read, strict=True)]
        places = {side: jnp.arange(n, dtype=jnp.int32) for side, n in along.items()}
        added = program(jnp.zeros([*along.values()], dtype_of_sums(q)), places, operands)
        return added.reshape(1, q.shape[2], sizes["t"], sizes["s"])

    return tuple(x for x, _ in program.operands), bias


def _program(start: Named, end: Named, sizes: Mapping[Any, int], scope: Scope, last: Any, sides: str) -> ScoreProgram:
    """From scores to scores, or from weights to weights, for some of these `sides` without the others."""
    begin = (start[0], _sides(start[1], last, sides))
    reader = ScoreReader(begin, sizes, math.prod([*sizes.values()][:-2]))
    value = reader.value(end[0], _sides(end[1], last, sides), scope, last)
    into, back = (
        ScoreLayout(tuple(tuple(_DIMS[_side(x)] for x in dims) for dims in names)) for _, names in (start, end)
    )
    return ScoreProgram("\n".join(reader.text), into, back, (*reader.steps,), begin, value, (*reader.operands,))


def _counting(value: Value, x: jax.Array, sizes: Mapping[str, int]) -> jax.Array:
    """Of an operand what counts, where it has more."""
    for d, along in enumerate(value[1]):
        if along is not None:
            x = lax.slice_in_dim(x, along.start, along.start + sizes[along.side], axis=d)
    return x


_DIMS = {"b": 0, "k": 1, "g": 2, "t": 3, "s": 4}


def _side(dim: Any) -> str:
    """Of rows, key heads, the query heads of each, queries or keys."""
    return dim.name if dim.name in ("t", "s") else "k" if dim.name == ("b", 1) else dim.name[0]


def _sides(names: Names, eqn: Any, known: str) -> Labels:
    """Which dims run along the sides that are to be known. Raises Hindered."""
    of = [[side for dim in dims if (side := _side(dim)) in known] for dims in names]
    if any(some and len(dims) > 1 for some, dims in zip(of, names, strict=True)):
        raise Hindered(eqn, "merges positions or heads of scores with other dims")
    return tuple(Along(some[0]) if some else None for some in of)


@dataclass
class ScoreReader:
    """One reading: of what is made of `start`, where "t" and "s" have these `sizes`, with `numbers` of each position at
    most.

    Attributes:
      steps: the equations to be replayed, in order.
      operands: what they read beside the start.
      named: a name for each value that has been read, so that equal programs have equal texts.
    """

    start: Value
    sizes: Mapping[Any, int]
    numbers: int
    steps: list[ScoreStep] = field(default_factory=list)
    operands: list[Value] = field(default_factory=list)
    named: dict[Value, str] = field(default_factory=dict)
    text: list[str] = field(default_factory=list)

    def value(self, atom: Any, labels: Labels, scope: Scope, reader: Any) -> Any:
        """A literal, or a value that is there once the steps have run. Raises Hindered."""
        if jx.is_literal(atom):
            return atom
        labels = tuple(None if n == 1 else x for x, n in zip(labels, atom.aval.shape, strict=True))
        value, sides, eqn = (atom, labels), {x.side for x in labels if x} & {"t", "s"}, scope.made(atom)
        if value in self.named or value == self.start:
            return value
        if len(sides) == 2 and eqn is None and atom in scope.outer and scope.around is not None:
            return self.value(scope.outer[atom], labels, scope.around, reader)
        if len(sides) == 2 and eqn is not None:
            if (known := operands_of(eqn, labels)) is None or atom is self.start[0]:
                raise Hindered(eqn, f"computes {eqn.primitive.name} along queries or keys")
            ins = [self.value(x, own, scope, eqn) for x, own in zip(eqn.invars, known, strict=True)]
            self.steps.append(ScoreStep(eqn, tuple(ins), value))
            of = [str(x) if jx.is_literal(x) else self.named.get(x, "start") for x in ins]
            self._name(value, f"{eqn.primitive.name} {sorted(map(str, eqn.params.items()))} {of}")
        else:
            if len(sides) == 1 and math.prod(atom.aval.shape) > self.numbers * self.sizes[min(sides)]:
                raise Hindered(reader, f"takes {atom.aval.str_short()}, more than a number for each head of a position")
            self.operands.append(value)
            self._name(value, "operand")
        return value

    def _name(self, value: Value, text: str) -> None:
        self.named[value] = f"v{len(self.named)}"
        self.text.append(f"{self.named[value]} = {text} {value[0].aval.str_short()} {value[1]}")
