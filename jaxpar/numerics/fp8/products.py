"""Choose the products of a program that run in FP8: a layer's weight times an operand that depends on the batch.

    1. `_reasons` looks at the whole program, before any axis cuts it, so that every layout chooses the same leaves.
       It maps each leaf with products to the reason why they stay in the compute dtype, "" if they are in FP8.
    2. `in_fp8` finds the products of the chosen leaves in the program of one device, and replaces them by `product`.

Both follow parameters through the program by `program/dims.py`.
"""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from ...backend.text import few
from ...layout.families import families
from ...parallel.tensor.edges import EDGES
from ...program import jaxpr as jx
from ...program.dims import NOTHING, Followed, Follower, source
from ...program.primitives import PRODUCTS
from ...program.walk import CUSTOM, replaced, visit
from ...strategy import Strategy
from .product import ScaledProduct, product

SMALLEST = 128  # features: a smaller product takes less time than the kernels that quantise its operands
MULTIPLE = 16  # cuBLASLt needs dims of FP8 products to be multiples of this; XLA pads a rank's part with zeros
_DATA = -2  # marks values that depend on the batch


def of_blocks(leaves: Sequence[tuple[str, Any]]) -> set[str]:
    """Return the paths of the leaves, given with their shapes, that belong to alike blocks in a row."""
    return {
        leaves[i][0]
        for family in families(leaves, lambda path: False)
        for positions in family.members
        for i in positions
    }


def in_fp8(
    whole: jx.Flat, flat: jx.Flat, leaves: Sequence[tuple[str, bool]], strategy: Strategy, dtype: Any
) -> tuple[jx.Flat, dict[str, str]]:
    """Rewrite the products of layers in FP8.

    Args:
      whole: the program of a loss before any axis has cut it. The leaves are chosen here, so that all layouts choose
        the same ones.
      flat: the program of the same loss on one device. In both programs, the first inputs are the parameters.
      leaves: for each parameter its path, and whether it belongs to alike blocks in a row. A parameter of three dims
        or more that a loop scans counts as a block too.
      strategy: the strategy, for `fp8_except` and `fp8_scaling`.
      dtype: the compute dtype; products that the model computes in another dtype stay.

    Returns:
      `flat` with its products in FP8. And for each leaf with products, by path, the reason why they are not in FP8; ""
      if they are.

    Raises:
      ValueError: if a part of `strategy.fp8_except` is in the path of no leaf that would be in FP8.
    """
    # 1. Choose the leaves.
    reasons = _reasons(whole, leaves, dtype, strategy.fp8_except)

    # 2. Replace their products in this device's program.
    new_eqns, replaced_paths = {}, set()
    for eqn, side, params in _products(flat, len(leaves))[0]:
        path = leaves[params[0]][0]
        if reasons.get(path) == "" and eqn.primitive.name == "dot_general":
            numbers: Any = tuple(tuple(tuple(dims) for dims in pair) for pair in eqn.params["dimension_numbers"])
            config = ScaledProduct(numbers, eqn.outvars[0].aval.dtype, side, path, strategy.fp8_scaling)
            new_eqns[id(eqn)] = _equation(eqn, config)
            replaced_paths.add(path)
    eqns = tuple(replaced(flat.eqns, lambda eqn: new_eqns.get(id(eqn), eqn)))

    # 3. Report a chosen leaf whose products could not be found again.
    lost = "this layout's program has no product of it and the data that could be followed"
    reasons = {path: reason or ("" if path in replaced_paths else lost) for path, reason in reasons.items()}
    return jx.Flat(flat.constvars, flat.consts, flat.invars, flat.outvars, eqns), reasons


def _reasons(flat: jx.Flat, leaves: Sequence[tuple[str, bool]], dtype: Any, exceptions: str) -> dict[str, str]:
    """Return for each leaf with products, by path, the reason why they are not in FP8; "" if they are.

    Args:
      flat, leaves, dtype: as in `in_fp8`.
      exceptions: `Strategy.fp8_except`, parts of paths joined by ":".
    """
    products, env = _products(flat, len(leaves))
    # A parameter of three dims or more that a scan cuts along one dim is a stack of matrices.
    scan_inputs = [x for eqn in flat.eqns if eqn.primitive.name == "scan" for x in jx.scan_parts(eqn).xs]
    views = [view for x in scan_inputs if not jx.is_literal(x) for view in env.get(x, NOTHING).views]
    scanned_params = {i for i, dims in views if flat.invars[i].aval.ndim > 2 and len(dims[0]) == 1}
    # A product inside `custom_vjp` would keep the function's own derivative, which knows nothing of FP8.
    custom_eqns = (eqn for eqn, _ in visit(flat.eqns) if eqn.primitive.name in CUSTOM)
    inside_custom = {id(inner) for eqn in custom_eqns for inner, _ in visit([eqn])}
    reasons: dict[str, str] = {}
    excepted = exceptions.split(":") if exceptions else []
    unmatched = dict.fromkeys(excepted)
    for eqn, side, params in products:
        path = leaves[params[0]][0]
        if not any(leaves[i][1] or i in scanned_params for i in params):
            reason = "of no layer of a stack or list"
        elif id(eqn) in inside_custom:
            reason = "within a function with its own derivative"
        elif eqn.primitive.name != "dot_general":
            reason = f"{eqn.primitive.name} has no FP8 kernel in XLA"
        else:
            reason = _unfit_reason(eqn, side, dtype)
        # An exception that names a leaf which stays anyway has not been used: it is reported below.
        for part in () if reason else excepted:
            if part and fnmatchcase(f"/{path}/", f"*/{part}/*"):  # matches whole names of the path
                unmatched.pop(part, None)
                reason = f"fp8_except={part}"
        # One product that cannot be in FP8 keeps all products of its leaf out of it.
        reasons[path] = reasons.get(path) or reason
    if unmatched:
        raise ValueError(
            f"fp8_except={exceptions!r}: {few(list(unmatched))} is in the path of no leaf whose products would be in "
            f"FP8; use a part of "
            f"{few([path for path, reason in reasons.items() if not reason]) or 'a path that step.explain names'}"
        )
    return reasons


class _Weights(Follower):
    """Follows parameters also through the edges of `tensor`: a rank's part of a parameter still belongs to it."""

    def results(self, eqn: Any, ins: Sequence[Followed]) -> list[Followed]:
        """Return the followed values that an equation makes; an edge passes on its inputs."""
        return list(ins) if eqn.primitive.name in EDGES else super().results(eqn, ins)


def _products(flat: jx.Flat, num_params: int) -> tuple[list[tuple[Any, int, list[int]]], dict[Any, Followed]]:
    """Find the products of a value that depends on parameters alone with one that depends on the batch.

    The first `num_params` inputs of the program are the parameters.

    Returns:
      For each product its equation, which operand is the parameter's (0 or 1), and the positions of the parameters. And
      for each variable of the program the followed value.
    """
    operands: dict[int, tuple[Any, Sequence[Followed]]] = {}

    def note_product(eqn: Any, ins: Sequence[Followed]) -> frozenset[int]:
        if eqn.primitive.name in PRODUCTS:
            operands[id(eqn)] = eqn, ins
        return frozenset()

    # Every input that is no parameter counts as data, also keys and variables.
    env = dict.fromkeys(flat.invars[num_params:], Followed((), frozenset({_DATA})))
    env |= {v: source(i, v.aval.shape) for i, v in enumerate(flat.invars[:num_params])}
    _Weights(note_product, _DATA).follow(flat.eqns, env)
    products = []
    for eqn, ins in operands.values():
        # A value that depends on the batch as well is no weight.
        param_sides = [side for side in (0, 1) if ins[side].views and _DATA not in ins[side].marks]
        if len(param_sides) == 1 and _DATA in ins[1 - param_sides[0]].marks:
            products.append((eqn, param_sides[0], [i for i, _ in ins[param_sides[0]].views]))
    return products, env


def _unfit_reason(eqn: Any, side: int, dtype: Any) -> str:
    """Return why the dtypes or sizes of a product do not suit FP8, "" if they do; `side` is the weight's operand."""
    (sums, batch), w = eqn.params["dimension_numbers"], eqn.invars[side].aval
    free_dims = [d for d in range(w.ndim) if d not in (*sums[side], *batch[side])]
    k, n = (math.prod(w.shape[d] for d in dims) for dims in (sums[side], free_dims))
    if wrong_dtypes := [v.aval.dtype.name for v in eqn.invars if v.aval.dtype != dtype]:
        return f"the model computes them in {wrong_dtypes[0]}"
    if min(k, n) < SMALLEST or k % MULTIPLE or n % MULTIPLE:
        return f"{k} x {n} features: FP8 needs multiples of {MULTIPLE}, from {SMALLEST}"
    return ""


def _equation(eqn: Any, config: ScaledProduct) -> Any:
    """Return the equation of the FP8 product that replaces `eqn`, with its variables and source line."""
    flat, _ = jx.trace(partial(product, config), *(v.aval for v in eqn.invars))
    (new_eqn,) = flat.eqns
    return new_eqn.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)
