"""Programs between attention scores and their softmax: equations that are replayed on a block of scores.

Scores have five dims [b, k, g, t, s]. A program has them in some layout (`ScoreLayout`), and each dim of its values has
a label (`DimLabel`): it runs along queries, keys or heads, or along none of these. To replay an equation on a block,
each labelled dim takes the block's size. Equations that count positions (iota, random bits) take the block's positions:

    whole sequence     iota [T, S] along "s"         = 0 1 2 .. S-1 in each row
    block of n keys    iota [m, n] along "s"         = the positions of its n keys in each row

So a block's scores are those of the whole sequence, cut out, and no [T, S] array ever exists.

    ScoreReader (`attention/replayed.py`)  reads a program, and asks `operand_labels` for each equation
    ScoreProgram                           its equations; calling it replays them
    ScoreFunction (`score_function.py`)    the programs of one attention

Dims: b rows, t query positions, s key positions, k key heads, g query heads of each.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry_2x32

from ....program import factors
from ....program import jaxpr as jx


class DimLabel(NamedTuple):
    """Label of a dim of a value: the side of the scores along which it runs, and its first entry there.

    Attributes:
      side: "t" of queries, "s" of keys, "k" of key heads, "g" of the query heads of each key head; "b" of rows.
      start: the dim has the entries from `start` on.
    """

    side: str
    start: int = 0


Labels = tuple[DimLabel | None, ...]  # one for each dim; None for a dim that runs along no side
Value = tuple[Any, Labels]  # a variable of a program, and the labels of its dims


# Operands without a variable: the numbers of heads, and the sink, a term of each softmax without a value (`Weights`).
HEADS: dict[str, Value] = {side: (None, (DimLabel(side),)) for side in "kg"}
SINK: Value = (None, (None, DimLabel("k"), DimLabel("g"), DimLabel("t")))


class ScoreStep(NamedTuple):
    """One equation to replay, its operands (values or literals) and its result."""

    eqn: Any
    operands: tuple[Any, ...]
    result: Value


class ScoreLayout(NamedTuple):
    """Layout of scores in a program: which of the dims [b, k, g, t, s] each dim of the program's array merges.

    A dim of one element merges none.
    """

    merged_dims: tuple[tuple[int, ...], ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The five dims in the program's order; those of one element, which it may lack, come last."""
        flat = tuple(d for dims in self.merged_dims for d in dims)
        return (*flat, *(d for d in range(5) if d not in flat))

    def to_program(self, x: jax.Array) -> jax.Array:
        """Transpose and reshape [b, k, g, t, s] to the program's layout."""
        shape = [math.prod(x.shape[d] for d in dims) for dims in self.merged_dims]
        return jnp.transpose(x, self.order).reshape(shape)

    def from_program(self, x: jax.Array, shape: Sequence[int]) -> jax.Array:
        """Reshape and transpose an array in the program's layout to [b, k, g, t, s] of this shape."""
        return jnp.transpose(x.reshape([shape[d] for d in self.order]), [self.order.index(d) for d in range(5)])


@dataclass(frozen=True)
class ScoreProgram:
    """Equations from scores to scores, or from weights to weights, to be replayed for some queries and keys.

    Attributes:
      text: the equations as text. Programs of equal text and layouts are equal, so that jit traces them once.
      input_layout: the layout of its input.
      output_layout: the layout of its output.
      steps: its equations, in order.
      start: the value of its input.
      end: the value of its output.
      operands: the other values that it reads.
    """

    text: str
    input_layout: ScoreLayout
    output_layout: ScoreLayout
    steps: tuple[ScoreStep, ...] = field(compare=False, repr=False)
    start: Value = field(compare=False, repr=False)
    end: Value = field(compare=False, repr=False)
    operands: tuple[Value, ...] = field(compare=False, repr=False)

    @property
    def counted_sides(self) -> set[str]:
        """The sides whose positions the program reads, and not only their number."""
        counting_steps = [step for step in self.steps if step.eqn.primitive.name in ("iota", "random_bits")]
        return {x.side for step in counting_steps for x in step.result[1] if x}

    def __call__(self, x: jax.Array, positions: Mapping[str, jax.Array], operands: Sequence[jax.Array]) -> jax.Array:
        """Replay the program on a block of scores.

        Args:
          x: [b, k, g, t, s], the block.
          positions: for each side, where the block's queries, keys and heads are in the whole sequence.
          operands: the block's part of each of `self.operands`.

        Returns:
          The result, [b, k, g, t, s] in the dtype of `x`.
        """
        env = dict(zip(self.operands, operands, strict=True))
        # Blocks have the dtype of sums, and the program computes in other dtypes.
        env[self.start] = self.input_layout.to_program(x).astype(self.start[0].aval.dtype)
        for step in self.steps:
            values = [y.val if jx.is_literal(y) else env[y] for y in step.operands]
            env[step.result] = _replay(step, values, positions)
        return self.output_layout.from_program(env[self.end].astype(x.dtype), x.shape)


def _replay(step: ScoreStep, values: Sequence[jax.Array], positions: Mapping[str, jax.Array]) -> jax.Array:
    """Compute the result of one equation for a block, from the block's operands."""
    eqn, labels, params = step.eqn, step.result[1], step.eqn.params
    block_shape = lambda shape: tuple(len(positions[x.side]) if x else n for x, n in zip(labels, shape, strict=True))
    changes: dict[str, Any] = {}
    if eqn.primitive.name == "iota":
        d = params["dimension"]
        # A dim without a label is whole in every block.
        entries = jnp.arange(params["shape"][d]) if (x := labels[d]) is None else positions[x.side] + x.start
        return lax.broadcast_in_dim(entries.astype(params["dtype"]), block_shape(params["shape"]), (d,))
    if eqn.primitive.name == "random_bits":
        labelled_dims = zip(labels, params["shape"], strict=True)
        return _random_bits(
            values[0], params["shape"], [positions[x.side] + x.start if x else jnp.arange(n) for x, n in labelled_dims]
        )
    if eqn.primitive.name == "slice":
        # Along a labelled dim the operand's label has the start of the slice: its block is cut out already.
        starts = tuple(0 if x else n for x, n in zip(labels, params["start_indices"], strict=True))
        changes = {"start_indices": starts, "limit_indices": block_shape(params["limit_indices"])}
    else:
        # Parameters with sizes, such as the shape of a broadcast. Each factor changes one dim of them.
        for factor in factors.of(eqn):
            label = None if factor.outs[0] is None else labels[factor.outs[0]]
            if factor.params is not None and label is not None:
                n = len(positions[label.side])
                local = lambda shape, d, n=n: (*shape[:d], n, *shape[d + 1 :])
                for name, sizes in factor.params(local).items():
                    # Where this factor leaves the whole size, a change by an earlier factor stays.
                    dims = zip(sizes, params[name], changes.get(name, sizes), strict=True)
                    changes[name] = tuple(changed if size == full else size for size, full, changed in dims)
    return jx.bind(eqn, values, **changes)[0]


def _random_bits(key: jax.Array, shape: Sequence[int], positions: Sequence[jax.Array]) -> jax.Array:
    """Return the elements of `jax.random.bits(key, shape)` in uint32 at some positions along each dim.

    With `jax_threefry_partitionable`, an element is the threefry hash of its flat index, a 64-bit number that is kept
    here as two uint32: index = sum of position * stride over dims.
    """
    high = low = jnp.zeros([len(dim_positions) for dim_positions in positions], jnp.uint32)
    for d, dim_positions in enumerate(positions):
        stride = math.prod(shape[d + 1 :])
        dim_positions = jnp.expand_dims(dim_positions.astype(jnp.uint32), [i for i in range(len(shape)) if i != d])
        low_term = dim_positions * jnp.uint32(stride % 2**32)
        high_term = _high_bits(dim_positions, stride % 2**32) + dim_positions * jnp.uint32(stride >> 32)
        # The sum of the low words has wrapped around if it is less than a summand: carry one.
        high, low = high + high_term + (low + low_term < low_term), low + low_term
    words = threefry_2x32(jax.random.key_data(key), jnp.stack([high, low]))
    return words[0] ^ words[1]


def _high_bits(a: jax.Array, b: int) -> jax.Array:
    """Return the upper 32 bits of the product of two uint32, by products of their 16-bit halves."""
    low, high = a & 0xFFFF, a >> 16
    # The carry out of the lowest product belongs to the middle one.
    middle = high * jnp.uint32(b & 0xFFFF) + (low * jnp.uint32(b & 0xFFFF) >> 16)
    return high * jnp.uint32(b >> 16) + (middle >> 16) + ((low * jnp.uint32(b >> 16) + (middle & 0xFFFF)) >> 16)


def operand_labels(eqn: Any, labels: Labels) -> list[Labels] | None:
    """Return the labels of an equation's operands, given those of its result.

    Returns:
      One tuple for each operand; None if the equation cannot be replayed on a block, because an element of the block
      depends on elements outside it.
    """
    name, shapes = eqn.primitive.name, factors.shapes(eqn)[0]
    if name == "iota":
        return []
    if name == "random_bits":
        # Only in this way of drawing does an element depend on its index alone, and not on the array's size.
        threefry = str(eqn.invars[0].aval.dtype) == "key<fry>" and jax.config.values["jax_threefry_partitionable"]
        return [()] if threefry and not eqn.invars[0].aval.shape and eqn.params["bit_width"] == 32 else None
    if name == "slice":
        if {*(eqn.params["strides"] or [1])} != {1}:
            return None  # a block would not be consecutive entries of the operand
        starts = eqn.params["start_indices"]
        return [tuple(x and DimLabel(x.side, x.start + int(n)) for x, n in zip(labels, starts, strict=True))]
    # A dim of an operand without a label is read as a whole by every block.
    result: list[list[DimLabel | None]] = [[None] * len(shape) for shape in shapes]
    eqn_factors = factors.of(eqn) if len(eqn.outvars) == 1 else []
    for d, label in enumerate(labels):
        if label is None:
            continue
        # The factor of a dim tells the operands' dims whose elements alone decide the elements along it.
        factor = next((f for f in eqn_factors if f.outs[0] == d), None)
        n = eqn.outvars[0].aval.shape[d]
        if factor is None or any(dim is not None and shapes[i][dim] != n for i, dim in enumerate(factor.ins)):
            return None
        for i, dim in enumerate(factor.ins):
            if dim is not None:
                result[i][dim] = label
    return [tuple(dim_labels) for dim_labels in result]
