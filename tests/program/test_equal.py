"""Whether two equations are the same."""

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
