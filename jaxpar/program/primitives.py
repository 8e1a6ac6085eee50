"""Properties of primitives, whatever their parameters: one record each. The rows of the table are in `factors.py`.

A reader of programs asks for a property (`primitives.of(eqn).cheap`) instead of keeping a list of names, so that a new
primitive needs one row to be known everywhere.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp


@dataclass(frozen=True)
class Primitive:
    """The properties of all equations of a primitive. A primitive without a row has none of them.

    Attributes:
      factors: returns which dims of an equation's operands and results are one index (`factors.py`).
      elementwise: an element of a result is a function of the same element of each operand. Operands are of one shape,
        have size 1 along a dim, or are scalars.
      moves: results are elements of the operands, in other places.
      cheap: a backward computes it again instead of reading a result that the forward saved.
      view: it takes no time, since a reader of its result may read its operand.
      kernel: XLA runs it as a separate kernel, not fused into the reader of its result.
      linear: the operands in which it is linear while the others are fixed: "all" together, "each" alone, the "first",
        or the "cases", which are all but the first. JAX's derivative must be the same function: `stop_gradient`, whose
        derivative is zero, is not linear here.
      scaling: for a primitive that is not linear, the power of c by which the results are multiplied if all operands
        are multiplied by c > 0: the "first" power, or "none", so that they stay the same.
      compares: results say how operands compare.
      draws: it draws random "keys", or random "numbers", from a key.
      zero: elementwise, and zero where all operands are zero.
      reduces: its result lacks dims of its operand, over which it reduces.
      identity: its results are its operands, in whatever memory they are.
      separate: each of several operands becomes one result, independently of the others.
      factorises: it factorises the matrices of its operand's last two dims, or solves by them.
      nested: it runs programs on its operands: a loop, a branch, a solver, or a call with a custom backward.
    """

    factors: Callable[[Any], Iterable[Any]] | None = None
    elementwise: bool = False
    moves: bool = False
    cheap: bool = False
    view: bool = False
    kernel: bool = False
    linear: Literal["", "all", "each", "first", "cases"] = ""
    scaling: Literal["", "first", "none"] = ""
    compares: bool = False
    draws: Literal["", "keys", "numbers"] = ""
    zero: bool = False
    reduces: bool = False
    identity: bool = False
    separate: bool = False
    factorises: bool = False
    nested: bool = False


PRIMITIVES: dict[str, Primitive] = {}
# The record of all primitives without a row: nothing is known of them.
UNKNOWN = Primitive()
# Products of matrices.
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
SUMS = ("add", "add_any", "sub")


def primitive(names: str, factors: Callable[[Any], Iterable[Any]] | None = None, **properties: Any) -> None:
    """Add a row for each of some names.

    Args:
      names: names of primitives, separated by spaces.
      factors: returns the factors of an equation.
      properties: other fields of `Primitive`.
    """
    PRIMITIVES.update(dict.fromkeys(names.split(), Primitive(factors, **properties)))


def of(eqn: Any) -> Primitive:
    """Return the record of an equation's primitive."""
    return PRIMITIVES.get(eqn.primitive.name, UNKNOWN)


def having(attribute: str, *values: Any) -> tuple[str, ...]:
    """Return the names of the primitives with a property; if values are given, with one of these values."""
    has = lambda record: getattr(record, attribute) in values if values else bool(getattr(record, attribute))
    return tuple(name for name, record in PRIMITIVES.items() if has(record))


def linear(eqn: Any, among: Sequence[bool], affine: bool = False) -> bool:
    """Return whether an equation is linear in some operands together.

    Args:
      among: for each operand, whether it is one of them.
      affine: whether the result may also add something that does not depend on them.
    """
    name, linearity = eqn.primitive.name, of(eqn).linear
    if name in ("convert_element_type", "div") and not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return False  # a cast or a division of integers rounds
    if linearity == "all":
        return affine or all(among)
    # A select is linear in its cases, which the first operand chooses.
    if linearity == "cases":
        return not among[0] and (affine or all(among[1:]))
    # A product of two of them is not linear in both together.
    return sum(among) == 1 and (linearity == "each" or (linearity == "first" and among[0]))
