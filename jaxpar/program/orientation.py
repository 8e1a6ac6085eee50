"""Gradients of weights as one product each: JAX computes that of `x @ w` as the transpose of `g^T x`.

`x^T g` is the same sums, without a transposed copy. XLA's CPU backend keeps the transpose, where it makes the
product itself slow as well.
"""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from . import jaxpr as jx


def oriented(eqns: Sequence[Any], outvars: Iterable[Any] = ()) -> list[Any]:
    """The equations with every `transpose(dot_general(a, b))` that swaps the operands' dims as `dot_general(b, a)`.

    Products that something else reads as well, or that are among `outvars`, stay. Those that nobody reads any more are
    left for `jx.live` to drop.
    """
    reads = collections.Counter(v for eqn in eqns for v in eqn.invars if not jx.is_literal(v))
    reads.update(v for v in outvars if not jx.is_literal(v))
    products = {eqn.outvars[0]: eqn for eqn in eqns if eqn.primitive.name == "dot_general"}

    def one(eqn: Any) -> Any:
        given = eqn.invars[0] if eqn.primitive.name == "transpose" else None
        if given is None or jx.is_literal(given) or given not in products or reads[given] > 1:
            return eqn
        product = products[given]
        (a_sums, b_sums), (a_batch, b_batch) = product.params["dimension_numbers"]
        batch = len(a_batch)
        a, b = (v.aval.ndim - len(sums) - batch for v, sums in zip(product.invars, (a_sums, b_sums), strict=True))
        if tuple(eqn.params["permutation"]) != (
            *range(batch),
            *range(batch + a, batch + a + b),
            *range(batch, batch + a),
        ):
            return eqn
        params = {**product.params, "dimension_numbers": ((b_sums, a_sums), (b_batch, a_batch))}
        if isinstance(precision := params["precision"], tuple):  # one for each operand
            params["precision"] = precision[::-1]
        return product.replace(invars=product.invars[::-1], outvars=list(eqn.outvars), params=params)

    return [one(eqn) for eqn in eqns]
