"""Functions of scores, read from a program: everything between the product of queries and keys and their softmax.

Values that run along queries and keys at once are replayed for each block (`ops/score_program.py`). They are computed
from operands: positions, values with an entry for each query, key or head (ids, slopes, a padding mask), and tables.
The program computes the operands as before, on whole arrays, since they are small: each runs along queries or keys, not
both. An input of the program that runs along both is an operand, too.
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
from ..ops.blocks import accumulation_dtype
from ..ops.score_function import ScoreFunction, scored_attention
from ..ops.score_program import DimLabel, Labels, ScoreLayout, ScoreProgram, ScoreStep, Value, operand_labels
from .flash import AttentionOptions
from .hidden import Obstacle, Scope
from .softmax import Names

Named = tuple[Any, Names]  # a variable, and the names of its dims


@dataclass(frozen=True)
class AttentionSite:
    """An attention that a program spells out.

    Attributes:
      scope: the program.
      last: the equation of the product with values, for error texts.
      sizes: the sizes of rows, heads, groups, "t" and "s", in this order.
    """

    scope: Scope
    last: Any
    sizes: Mapping[Any, int]

    def read_program(self, start: Named, end: Named, sides: str) -> ScoreProgram:
        """Read the program from scores to scores, or from weights to weights, so that it replays on parts of `sides`.

        Raises:
          Obstacle: some of its elements depend on elements outside their part.
        """
        input_value = (start[0], _label_dims(start[1], self.last, sides))
        reader = ScoreReader(input_value, self.sizes, math.prod([*self.sizes.values()][:-2]))
        output_value = reader.read(end[0], _label_dims(end[1], self.last, sides), self.scope, self.last)
        input_layout, output_layout = (
            ScoreLayout(tuple(tuple(_SCORE_DIMS[_side_of(x)] for x in dims) for dims in names))
            for _, names in (start, end)
        )
        text, steps, operands = "\n".join(reader.text), (*reader.steps,), (*reader.operands,)
        return ScoreProgram(text, input_layout, output_layout, steps, input_value, output_value, operands)


def replayed_attention(
    site: AttentionSite,
    scores: tuple[Named, Named],
    weights: tuple[Named, Named] | None,
    sinks: Sequence[Any],
    causal: bool,
) -> tuple[tuple[Any, ...], Callable[..., jax.Array], str]:
    """Read an attention whose scores go through a function before their softmax, to be computed block by block.

    Args:
      scores: the product of queries and keys, and the operand of the softmax, without `sinks`.
      weights: the softmax, and the weights of values; None if these are the same.
      sinks: scores without a key, which are terms of the softmax.
      causal: whether no key after a query's own position has any weight.

    Returns:
      The variables that the function reads; the attention, from queries, keys, values [B, T, H, h] and the values of
      these variables; a description for people.

    Raises:
      Obstacle: the function cannot be replayed on a block.
    """
    ends = [x for x in (scores, weights) if x is not None]
    try:
        # If the programs do not mix heads, some heads can be computed without the others.
        programs, by_heads = [site.read_program(*x, "kgts") for x in ends], True
    except Obstacle:
        programs, by_heads = [site.read_program(*x, "ts") for x in ends], False
    function = ScoreFunction(programs[0], programs[1] if weights else None, bool(sinks), by_heads)
    kernel = functools.partial(scored_attention, AttentionOptions(causal, None, None, None, 0, False, None, function))
    key_dim = [[part.name for part in dims] for dims in scores[1][1]].index(["s"])
    operand_values = [value for program in programs for value in program.operands]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *operand_arrays: jax.Array) -> jax.Array:
        b, key_heads, group_size = len(q), k.shape[2], q.shape[2] // k.shape[2]
        side_sizes = {"t": site.sizes["t"], "s": site.sizes["s"], "k": key_heads, "g": group_size}
        # Operands in the order of `ScoreFunction.operands`: numbers of heads, operands of the programs, the sink.
        operands = [jnp.arange(side_sizes[side], dtype=jnp.int32) for side in function.counted_heads]
        values_and_arrays = zip(operand_values, operand_arrays, strict=False)  # arrays of sinks follow
        operands += [_slice_labelled(value, x, side_sizes) for value, x in values_and_arrays]
        if sinks:
            # Several sinks act as one, whose score is their log-sum-exp.
            sink = jnp.concatenate(operand_arrays[len(operand_values) :], key_dim).astype(accumulation_dtype(q))
            sink = jax.nn.logsumexp(sink, key_dim, keepdims=True)
            shape = (b, key_heads, group_size, site.sizes["t"], 1)
            operands.append(programs[0].output_layout.from_program(sink, shape)[..., 0])
        return local_kernel(kernel, *function.heads())(q, k, v, *operands)

    read = (*(x for x, _ in operand_values), *sinks)
    types = ", ".join(dict.fromkeys(x.aval.str_short() for x in read if x.aval.shape))
    return read, attend, "by a function of scores and positions" + f" that reads {types}" * bool(types)


def read_bias(site: AttentionSite, scores: tuple[Named, Named]) -> tuple[tuple[Any, ...], Callable[..., jax.Array]]:
    """Read the bias that a program adds to scores, hidden keys included. Arguments are as for `replayed_attention`.

    Returns:
      The variables that the bias reads; the bias [1, H, T, S], from queries, keys and the values of these variables.

    Raises:
      Obstacle: rows have different biases, or the program cannot be replayed.
    """
    program, sizes = site.read_program(*scores, "bkgts"), site.sizes
    if any(x and x.side == "b" for _, labels in program.operands for x in labels):
        raise Obstacle(site.last, "adds a bias to scores that is not the same for all rows")

    def bias(q: jax.Array, k: jax.Array, *operand_arrays: jax.Array) -> jax.Array:
        # With one row, and scores of zero, the program's result is the bias alone.
        side_sizes = {"b": 1, "k": k.shape[2], "g": q.shape[2] // k.shape[2], "t": sizes["t"], "s": sizes["s"]}
        values_and_arrays = zip(program.operands, operand_arrays, strict=True)
        operands = [_slice_labelled(value, x, side_sizes) for value, x in values_and_arrays]
        positions = {side: jnp.arange(n, dtype=jnp.int32) for side, n in side_sizes.items()}
        result = program(jnp.zeros([*side_sizes.values()], accumulation_dtype(q)), positions, operands)
        return result.reshape(1, q.shape[2], sizes["t"], sizes["s"])

    return tuple(x for x, _ in program.operands), bias


def _slice_labelled(value: Value, x: jax.Array, sizes: Mapping[str, int]) -> jax.Array:
    """Cut the entries that a program reads out of an operand: along each labelled dim, those from its start on."""
    for d, label in enumerate(value[1]):
        if label is not None:
            x = lax.slice_in_dim(x, label.start, label.start + sizes[label.side], axis=d)
    return x


_SCORE_DIMS = {"b": 0, "k": 1, "g": 2, "t": 3, "s": 4}  # side -> dim of [b, k, g, t, s]


def _side_of(dim: Any) -> str:
    """Return the side of a named dim: "b" rows, "k" key heads, "g" query heads of each, "t" queries or "s" keys."""
    return dim.name if dim.name in ("t", "s") else "k" if dim.name == ("b", 1) else dim.name[0]


def _label_dims(names: Names, eqn: Any, sides: str) -> Labels:
    """Return the labels of a value's dims, for those that run along one of `sides`.

    Raises:
      Obstacle: a dim merges one of these sides with something else.
    """
    sides_by_dim = [[side for dim in dims if (side := _side_of(dim)) in sides] for dims in names]
    if any(dim_sides and len(dims) > 1 for dim_sides, dims in zip(sides_by_dim, names, strict=True)):
        raise Obstacle(eqn, "merges positions or heads of scores with other dims")
    return tuple(DimLabel(dim_sides[0]) if dim_sides else None for dim_sides in sides_by_dim)


@dataclass
class ScoreReader:
    """Reads backwards, from a result to `start`, which equations a program must replay.

    Attributes:
      start: the value at which reading ends: the product of queries and keys, or the softmax.
      sizes: the sizes of "t" and "s", among others.
      max_entries: the most numbers that an operand may have for each position: one for each row and head.
      steps: the equations to replay, in order.
      operands: the other values that they read.
      value_names: a name for each value that has been read, by which equal programs have equal texts.
      text: a line for each value that has been read.
    """

    start: Value
    sizes: Mapping[Any, int]
    max_entries: int
    steps: list[ScoreStep] = field(default_factory=list)
    operands: list[Value] = field(default_factory=list)
    value_names: dict[Value, str] = field(default_factory=dict)
    text: list[str] = field(default_factory=list)

    def read(self, atom: Any, labels: Labels, scope: Scope, reader: Any) -> Any:
        """Add the steps that compute an atom of the program `scope` to `steps`, or the atom to `operands`.

        `labels` are the labels of its dims, and `reader` is the equation that takes it, for error texts.

        Returns:
          The literal, or the value, which is known once the steps have run.

        Raises:
          Obstacle: it cannot be replayed on a block, and is too large for an operand.
        """
        if jx.is_literal(atom):
            return atom
        labels = tuple(None if n == 1 else x for x, n in zip(labels, atom.aval.shape, strict=True))
        value, sides, eqn = (atom, labels), {x.side for x in labels if x} & {"t", "s"}, scope.producer(atom)
        if value in self.value_names or value == self.start:
            return value
        # An input of a loop's body or the like is read in the program around it.
        if len(sides) == 2 and eqn is None and atom in scope.outer and scope.parent is not None:
            return self.read(scope.outer[atom], labels, scope.parent, reader)
        # Only what runs along queries and keys is as large as the scores, and must be replayed.
        if len(sides) == 2 and eqn is not None:
            if (labels_of_operands := operand_labels(eqn, labels)) is None or atom is self.start[0]:
                raise Obstacle(eqn, f"computes {eqn.primitive.name} along queries or keys")
            atoms_and_labels = zip(eqn.invars, labels_of_operands, strict=True)
            operands = [self.read(x, x_labels, scope, eqn) for x, x_labels in atoms_and_labels]
            self.steps.append(ScoreStep(eqn, tuple(operands), value))
            operand_names = [str(x) if jx.is_literal(x) else self.value_names.get(x, "start") for x in operands]
            self._name(value, f"{eqn.primitive.name} {sorted(map(str, eqn.params.items()))} {operand_names}")
        else:
            if len(sides) == 1 and math.prod(atom.aval.shape) > self.max_entries * self.sizes[min(sides)]:
                raise Obstacle(
                    reader, f"takes {atom.aval.str_short()}, which has more than one number for each head and position"
                )
            self.operands.append(value)
            self._name(value, "operand")
        return value

    def _name(self, value: Value, text: str) -> None:
        """Name a value by its number, and add its line to the text."""
        self.value_names[value] = f"v{len(self.value_names)}"
        self.text.append(f"{self.value_names[value]} = {text} {value[0].aval.str_short()} {value[1]}")
