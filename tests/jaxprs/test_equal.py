"""Whether two equations are the same."""

import jax
import jax.numpy as jnp

from jaxpar.jaxprs.equal import differing


def test_a_parameter_that_one_of_two_has_not() -> None:
    """Blocks of which one slices with strides and one without (flaxdiff's UViT) ended as "'NoneType'
    object is not iterable".
    """
    x = jnp.zeros((4, 4))
    strided, plain = (
        jax.make_jaxpr(lambda x, by=by: jax.lax.slice(x, (0, 0), (4, 2), by))(x).eqns[0] for by in ((2, 1), None)
    )
    assert differing(strided, plain) == differing(plain, strided) == "strides"
    assert differing(strided, strided) is None
