"""Functions that permute tokens (dispatch, combine): how they say which rows a result is of.

A token goes to a buffer of its expert's, beside tokens of other rows, and its result comes back. In form that mixes
rows: sorts, running counts, lookups at computed places. What a row gets is its own all the same, and only who wrote the
function can say so. A function with a derivative of its own stands in the trace under its name, by which `of` finds
what was said. It is an ordinary `jax.custom_vjp` to everything else.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax

Kind = Literal["rows", "routed", "whole"]
_PREFIX = "jaxpar_route_"
_routes: "dict[str, Route]" = {}


@dataclass(frozen=True)
class Route:
    """What a function makes of rows.

    Attributes:
      outs: for each result "rows" (dim 0 has the tokens of the first argument, which are rows or merged with rows) or
        "routed" (the first two dims hold tokens in an order of their own: of each at most one row), or "whole" (no row
        reaches it); the last result's kind is that of all that follow.
      couples: what it makes of rows that depends on the others; empty where each result is its row's own.
      certain: whether that is so for any batch, which is refused; else it may be, which is warned of.
      part: where tokens are split over ranks, what it is on one of them: from the number of ranks a function of that
        rank's tokens, and of its slots along dim 1 of what is "routed"; None where tokens of a row may not be parted.
      spread: where experts are split over ranks, what it is on one of them: from the number of ranks a function of the
        same arrays, of which those after the third, leaves [E, ...], are this rank's.
      gather: where experts are split over ranks, each of which has all tokens of all: from the number of ranks a
        function of the same arrays, but that buffers [E, C, D] are those of a rank's experts, [E/e, e C, D].
    """

    outs: tuple[Kind, ...]
    couples: str = ""
    part: Callable[[int], Callable[..., Any]] | None = None
    spread: Callable[[int], Callable[..., Any]] | None = None
    certain: bool = False
    gather: Callable[[int], Callable[..., Any]] | None = None


def route(
    name: str, outs: tuple[Kind, ...], fun: Callable[..., Any], fwd: Any, bwd: Any, couples: str = "", **how: Any
) -> Callable[..., Any]:
    """A function of arrays, all positional, with its own derivative, that stands in the trace as a route.

    Args:
      name: of letters and digits, the same for the same function.
      outs, couples, and `how` it is computed on a part: the attributes of `Route`.
      fun, fwd, bwd: as `jax.custom_vjp` has them.
    """
    known = _PREFIX + name

    def named(*arrays: Any) -> Any:
        return fun(*arrays)

    named.__name__ = named.__qualname__ = known
    made = Route(outs, couples, **how)
    assert known not in _routes or not (made.part or made.spread or made.gather), f"{name} is another function already"
    _routes[known] = made
    function = jax.custom_vjp(named)
    function.defvjp(fwd, bwd)
    return function


def of(eqn: Any) -> Route | None:
    """The route that an equation of a traced program is, or None."""
    jaxpr = eqn.params.get("call_jaxpr")
    if jaxpr is None or not eqn.primitive.name.startswith("custom_vjp_call"):
        return None
    found = _routes.get(getattr(jaxpr, "jaxpr", jaxpr).debug_info.func_name)
    if found is None or len(found.outs) > len(eqn.outvars):
        return None
    return replace(found, outs=(*found.outs, *found.outs[-1:] * (len(eqn.outvars) - len(found.outs))))
