"""The scores of one attention, followed equation by equation from the product of queries and keys to the softmax.

    product --> "mul", "div" by a number                   the scale
            --> "add" of a mask, "select_n" by a mask      the hidden keys, as a table by distance (`hidden.Table`)
            --> casts, transposes, reshapes                other names of dims
            --> any other elementwise function             an obstacle to `jp.attention`; it can be replayed

`Scores.options` are then the options of `jp.attention` with the same effect.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....program import jaxpr as jx
from ....program import primitives
from .hidden import HIDING, Constant, Obstacle, Scope, Table, describe, number_of
from .softmax import Names, moves, names_after


@dataclass
class Scores:
    """The scores on their way from the product of queries and keys to the softmax; changes with each equation.

    Attributes:
      names: the names of their dims.
      scope: the program.
      product: the variable of the product of queries and keys.
      scale: the factor of the scores so far.
      hidden: a bool table, True for hidden keys, as far as these are known; None if none are hidden.
      hiding_numbers: the numbers that are added to scores of hidden keys, or replace them.
      obstacle: the first equation that `jp.attention` cannot express.
      may_hide_more: whether equations beyond `jp.attention` read arrays, which may hide keys that `hidden` does not.
      is_affine: whether the scores are only scaled, and a bias that does not depend on them is added.
    """

    names: Names
    scope: Scope
    product: Any
    scale: float = 1.0
    hidden: Table | None = None
    hiding_numbers: list[float] = field(default_factory=list)
    obstacle: Obstacle | None = None
    may_hide_more: bool = False
    is_affine: bool = True

    def pass_through(self, eqn: Any, operand: int) -> None:
        """Follow the scores through an equation, whose operand they are.

        Raises:
          Obstacle: it is neither a move nor an elementwise function of scores.
        """
        if moves(eqn):
            self.names = names_after(eqn, self.names)
            return
        try:
            self._scale_or_hide(eqn, operand)
        except Obstacle as obstacle:
            if not primitives.of(eqn).elementwise:
                raise
            # The first obstacle is the one to report.
            self.obstacle = self.obstacle or obstacle
            arrays = [x for i, x in enumerate(eqn.invars) if i != operand and not jx.is_literal(x) and x.aval.shape]
            self.may_hide_more = self.may_hide_more or bool(arrays)
            depends_on_scores = not jx.depends(self.scope.eqns, [self.product]).isdisjoint(arrays)
            is_bias = eqn.primitive.name in ("add", "sub") and not depends_on_scores
            self.is_affine &= is_bias
            # A bias leaves keys hidden whose scores are -inf. Any other function may let a query see them again.
            if not is_bias or max(self.hiding_numbers, default=0) > -math.inf:
                self.hidden, self.hiding_numbers = None, []

    def options(self, t: int, s: int, eqn: Any, *obstacles: Obstacle) -> tuple[bool, int | None, tuple[Any, ...]]:
        """Return the options of `jp.attention` that hide the same of s keys from t queries.

        Args:
          eqn: the equation of the product with values, for error texts.
          obstacles: anything after the softmax that `jp.attention` cannot express.

        Returns:
          `causal`, `window`, and the variables of the segment ids.

        Raises:
          Obstacle: `jp.attention` has no such options, or there is an obstacle.
        """
        for obstacle in (self.obstacle, *obstacles):
            if obstacle is not None:
                raise obstacle
        if any(number > HIDING for number in self.hiding_numbers):
            raise Obstacle(eqn, f"hides keys by {max(self.hiding_numbers):g}, which is above {HIDING:g}")
        if self.hidden is None:
            return False, None, ()
        # Pairs of unequal ids must all be hidden, as segments do; pairs of equal ids tell the causality and the window.
        (unequal_ids, equal_ids), ids = self.hidden.values, self.hidden.ids
        if not self.hidden.is_known.all() or (ids and not unequal_ids.all()):
            raise Obstacle(eqn, "hides keys by values that are neither a function of positions nor ids")
        # The distances i - j at which a query sees keys must be consecutive.
        distances = np.arange(1 - s, t)[~equal_ids].tolist()
        if not distances or distances[-1] - distances[0] >= len(distances):
            raise Obstacle(eqn, "hides keys between others that a query sees")
        # A bound at the end of the table bounds nothing.
        nearest = -math.inf if distances[0] == 1 - s else distances[0]
        farthest = math.inf if distances[-1] == t - 1 else distances[-1]
        if nearest not in (-math.inf, 0) or (farthest < math.inf and nearest != 0):
            raise Obstacle(eqn, f"lets query i see keys from i - {farthest:g} to i - {nearest:g}")
        if (ids or nearest == 0) and t != s:
            raise Obstacle(eqn, f"hides keys by position or id, with {t} queries and {s} keys")
        # A window of n keys reaches from distance 0 to n - 1.
        return nearest == 0, None if farthest == math.inf else distances[-1] + 1, tuple(x.atom for x in ids)

    def causal(self, t: int, s: int) -> bool:
        """Whether there are as many keys as queries, and no key after a query's own position has any weight."""
        if self.hidden is None or t != s:
            return False
        # With t = s the middle column is distance 0; the columns before it belong to later keys.
        middle, largest = self.hidden.values.shape[1] // 2, max(self.hiding_numbers)
        sees_itself = not self.may_hide_more and self.hidden.is_known.all() and not self.hidden.values[1, middle]
        hides_later = (self.hidden.values & self.hidden.is_known)[:, :middle].all()
        # If all keys of a query were hidden by a finite number, the softmax would be a mean over them.
        return bool(hides_later and largest <= HIDING and (sees_itself or largest == -math.inf))

    def _scale_or_hide(self, eqn: Any, operand: int) -> None:
        """Note an equation that multiplies scores by a number, or hides keys; raise Obstacle for any other."""
        name, argument = eqn.primitive.name, eqn.invars[1 - operand] if len(eqn.invars) == 2 else None
        if name in ("mul", "div"):
            factor = number_of(self._describe(argument, eqn), eqn)
            factor = factor if name == "mul" else 1 / factor
            if factor <= 0:  # a negative factor would turn hidden keys into visible ones
                raise Obstacle(eqn, f"scales scores by {factor:g}")
            self.scale, self.hiding_numbers = self.scale * float(factor), [x * factor for x in self.hiding_numbers]
        elif name in ("add", "sub"):
            match self._describe(argument, eqn):
                case Constant(_):  # a softmax does not depend on a number that all scores share
                    pass
                case Table(values, is_known, ids) if is_known.all():
                    # A mask as a bias has two levels, far apart. Scores at the upper one are seen.
                    values = values.astype(float) * (1 if name == "add" else -1)
                    hidden = values < values.max()
                    number = np.max(values - values.max(), where=hidden, initial=-math.inf)
                    if number > HIDING:
                        raise Obstacle(eqn, "adds a bias to scores")
                    self._hide(Table(hidden, is_known, ids), number, eqn)
                case _:
                    raise Obstacle(eqn, "adds a bias to scores")
        elif name == "select_n":
            match self._describe(eqn.invars[0], eqn):
                case Table(values, is_known, ids):
                    # Operand i of `select_n` is case i - 1.
                    number = self.replacing_number(eqn, operand)
                    hidden, middle = values != operand - 1, values.shape[1] // 2
                    # A bias has the same effect as this choice only if each query sees a key, namely its own position.
                    self.is_affine &= bool(number <= HIDING and is_known[1, middle] and not hidden[1, middle])
                    self._hide(Table(hidden, is_known, ids), number, eqn)
                case _:
                    raise Obstacle(eqn, "chooses scores by values that are neither a function of positions nor ids")
        else:
            raise Obstacle(eqn, f"computes {name} of scores")

    def replacing_number(self, eqn: Any, operand: int) -> float:
        """Return the number by which a `select_n` replaces its operand; raise Obstacle if it is no number."""
        return number_of(self._describe(eqn.invars[3 - operand], eqn), eqn)

    def _hide(self, keys: Table, number: float, eqn: Any) -> None:
        """Note that keys are hidden by a number, beyond those that are hidden already."""
        if self.hidden is not None:
            hidden, ids = self.hidden, self.hidden.ids | keys.ids
            if len(ids) > 1:
                raise Obstacle(eqn, "compares two kinds of ids")
            # Hidden by either; known to be seen only if neither hides it.
            values = (hidden.values & hidden.is_known) | (keys.values & keys.is_known)
            keys = Table(values, values | (hidden.is_known & keys.is_known), ids)
        self.hidden, self.hiding_numbers = keys, [*self.hiding_numbers, number]

    def _describe(self, atom: Any, eqn: Any) -> Any:
        """Describe another operand of an equation, which has the dims of the scores."""
        label = lambda dims: (dims[0].name if dims[0].name in ("t", "s") and len(dims) == 1 else "b") if dims else None
        labels = tuple(map(label, self.names))
        return describe(atom, labels if not jx.is_literal(atom) and atom.aval.shape else (), self.scope, eqn)
