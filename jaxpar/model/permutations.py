"""Routes: functions that permute tokens, and declare which of their results belong to which rows.

A mixture of experts sends each token to a buffer that holds tokens of other rows too, and its result comes back:

    tokens [N, D] -- dispatch --> buffers [E, C, D] -- experts --> [E, C, D] -- combine --> tokens [N, D]
    kind   "rows"                 "routed"                         "routed"                 "rows"

The equations are sorts, running counts and lookups at computed positions, which look as if they mixed rows. Yet each
row only receives its own results, and only the author of the function can know this.

`route` makes a `jax.custom_vjp` of such a function and registers its `Route` under a name. A trace keeps the call with
this name as one equation, so that `of` finds the declaration. To the rest of JAX it is an ordinary function.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax

Kind = Literal["rows", "routed", "whole"]
_PREFIX = "jaxpar_route_"  # begins the name of every route in a trace, and of no user's function
_routes: "dict[str, Route]" = {}


@dataclass(frozen=True)
class Route:
    """How a function's results depend on rows, and its versions for one rank of a mesh axis.

    Attributes:
      outs: the kind of each result. "rows": dim 0 holds the tokens of the first argument, which are rows or merged with
        rows. "routed": the first two dims hold tokens in an order that the function computes, at most one row at each
        position. "whole": no row reaches it. The last kind repeats for all further results.
      couples: why a row's result depends on other rows, for the error or warning; empty if it does not.
      certain: whether rows are coupled for every batch, which is an error. If False, some batches may couple them,
        which is a warning.
      part: number of ranks -> the function for one rank's tokens, where ranks share the tokens of a row. Its "routed"
        results have the rank's slots along dim 1. None if the tokens of a row cannot be split.
      spread: number of ranks -> the function for one rank's experts, where ranks share the experts. It takes the same
        arrays; those after the third are leaves [E, ...], and it gets this rank's part of them.
      gather: number of ranks -> the function for one rank's experts, where every rank gathers the tokens of all ranks.
        It takes the same arrays, but buffers [E, C, D] are those of the rank's experts, [E/e, e C, D].
    """

    outs: tuple[Kind, ...]
    couples: str = ""
    part: Callable[[int], Callable[..., Any]] | None = None
    spread: Callable[[int], Callable[..., Any]] | None = None
    certain: bool = False
    gather: Callable[[int], Callable[..., Any]] | None = None


def route(
    name: str, outs: tuple[Kind, ...], fun: Callable[..., Any], fwd: Any, bwd: Any, couples: str = "", **attributes: Any
) -> Callable[..., Any]:
    """Return a function of positional arrays, with its own derivative, that traces record as a route.

    Args:
      name: letters, digits and "_"; the same name for the same function.
      outs, couples: the attributes of `Route`.
      fun, fwd, bwd: the function and its derivative, as for `jax.custom_vjp`.
      attributes: the other attributes of `Route`.
    """
    call_name = _PREFIX + name

    def named(*arrays: Any) -> Any:
        return fun(*arrays)

    # A trace records this name for the call.
    named.__name__ = named.__qualname__ = call_name
    declared = Route(outs, couples, **attributes)
    # A second function of the same name may replace the first only if it brings no version for one rank.
    assert call_name not in _routes or not (declared.part or declared.spread or declared.gather), (
        f"{name} is another function already"
    )
    _routes[call_name] = declared
    function = jax.custom_vjp(named)
    function.defvjp(fwd, bwd)
    return function


def of(eqn: Any) -> Route | None:
    """Return the route that an equation of a traced program calls; None if it calls none."""
    jaxpr = eqn.params.get("call_jaxpr")
    if jaxpr is None or not eqn.primitive.name.startswith("custom_vjp_call"):
        return None
    declared = _routes.get(getattr(jaxpr, "jaxpr", jaxpr).debug_info.func_name)
    if declared is None or len(declared.outs) > len(eqn.outvars):
        return None
    # One kind for each result: the last one repeats.
    return replace(declared, outs=(*declared.outs, *declared.outs[-1:] * (len(eqn.outvars) - len(declared.outs))))
