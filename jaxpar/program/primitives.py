"""What is known of a primitive, whatever its parameters: one record each. The rows are in `factors.py`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp


@dataclass(frozen=True)
class Primitive:
    """What holds of all equations of a primitive. Of one without a row nothing does.

    Attributes:
      factors: which dims of operands and results are one index, equation by equation.
      elementwise: an element of a result is a function of that element of each operand; operands are of one shape, have
        1 in the place of a size, or are scalars.
      moves: results are elements of the operands, in other places.
      cheap: a backward computes it again, where it would else read what the forward saved.
      view: it takes no time of its own, since what reads its result may read its operand.
      kernel: XLA runs it as a kernel of its own, not within what reads its result.
      linear: of which operands it is linear while the others stay, and its derivative too: of "all" together, of
        "each", of the "first", or of the "cases", which are all but the first.
      scaling: of one that is not linear, what all operands times c > 0 do to its results: they are times c ("first"
        power), or the same ("none").
      compares: results say how operands compare.
      draws: random "keys", or random "numbers", of a key.
      zero: of an elementwise one, that it is zero where all operands are.
      reduces: its result lacks dims of its operand, over which it reduces.
      identity: its results are its operands, wherever they lie.
      separate: of several operands each becomes one result, whatever the others are.
      factorises: it factorises the matrices of its operand's last two dims, or solves by them.
      nested: it runs programs that it holds on its operands: a loop, a branch, a solver, a call with a backward of its
        own.
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
UNKNOWN = Primitive()
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")  # of matrices
SUMS = ("add", "add_any", "sub")


def primitive(names: str, factors: Callable[[Any], Iterable[Any]] | None = None, **known: Any) -> None:
    """A row for each of some names, separated by spaces."""
    PRIMITIVES.update(dict.fromkeys(names.split(), Primitive(factors, **known)))


def of(eqn: Any) -> Primitive:
    """The record of an equation's primitive."""
    return PRIMITIVES.get(eqn.primitive.name, UNKNOWN)


def having(attribute: str, *values: Any) -> tuple[str, ...]:
    """The names of the primitives whose records have an attribute (of one of these values, if any are given)."""
    has = lambda known: getattr(known, attribute) in values if values else bool(getattr(known, attribute))
    return tuple(name for name, known in PRIMITIVES.items() if has(known))


def linear(eqn: Any, among: Sequence[bool], affine: bool = False) -> bool:
    """Whether an equation is linear (`affine`: but for what is added) in all operands marked `among` at once."""
    name, how = eqn.primitive.name, of(eqn).linear
    if name in ("convert_element_type", "div") and not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return False  # it rounds
    if how == "all":
        return affine or all(among)
    if how == "cases":
        return not among[0] and (affine or all(among[1:]))
    return sum(among) == 1 and (how == "each" or (how == "first" and among[0]))
