"""Whether two equations are the same."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.program.equal import differing


def test_a_parameter_that_one_of_two_has_not() -> None:
    """Comparing matmuls of which one is told a precision and one is not (flaxdiff's UViT) raised TypeError: 'NoneType'
    object is not iterable.
    """
    x = jnp.zeros((4, 4))
    told, plain = (
        jax.make_jaxpr(lambda x, how=how: jax.lax.dot(x, x, precision=how))(x).eqns[0]
        for how in (jax.lax.Precision.DEFAULT, None)
    )
    assert differing(told, plain) == differing(plain, told) == "precision"
    assert differing(told, told) is None


def test_functions_are_equal_with_equal_captured_values() -> None:
    """Defaults of arguments were not compared, so callbacks that differ by layer counted as one. An empty cell raised
    ValueError, and a function that captures itself RecursionError.
    """

    def callback(call: Callable[[Any], None]) -> Any:
        return jax.make_jaxpr(lambda x: jax.debug.callback(call, x))(1.0).eqns[0]

    by_default = [callback(lambda x, i=i: print(i, x)) for i in (0, 0, 1)]
    by_keyword = [callback(lambda x, *, i=i: print(i, x)) for i in (0, 0, 1)]
    with_closure = lambda i: lambda x: print(i, x)
    by_closure = [callback(with_closure(i)) for i in (0, 0, 1)]
    for first, same, other in (by_default, by_keyword, by_closure):
        assert differing(first, same) is None
        assert differing(first, other) is not None

    def with_empty_cell() -> Callable[[Any], None]:
        function = lambda x: print(later, x)
        if len("no") > 2:
            later = 0
        return function

    def recursive() -> Callable[[Any], None]:
        def function(x: Any, depth: int = 1) -> None:
            if depth:
                function(x, depth - 1)

        return function

    for make in (with_empty_cell, recursive):
        assert differing(callback(make()), callback(make())) is None
