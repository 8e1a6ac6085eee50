"""Which inputs are looked up as they are, in how many, in NumPy's and JAX's spellings and through programs inside."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxpar.program import jaxpr as jx
from jaxpar.program.lookups import lookups

TABLE, LOGITS = jnp.zeros((16, 3)), jnp.zeros((6, 4))
IDS = jnp.zeros(6, jnp.int32)


def sizes(loss: Callable[[Any], Any]) -> int | None:
    flat, _ = jx.trace(loss, IDS)
    return {i: lookup.size for i, lookup in lookups(flat, [0]).items()}.get(0)


@pytest.mark.parametrize(
    ("loss", "size"),
    [
        (lambda ids: TABLE[ids], 16),
        (lambda ids: jnp.take(TABLE, ids, axis=0), 16),
        (lambda ids: TABLE[ids.astype(jnp.int8)], 16),
        (lambda ids: LOGITS[jnp.arange(6), ids], 4),
        (lambda ids: jnp.take_along_axis(LOGITS, ids[:, None], 1), 4),
        (lambda ids: optax.softmax_cross_entropy_with_integer_labels(LOGITS, ids), 4),
        (lambda ids: TABLE[ids].sum() + LOGITS[jnp.arange(6), ids].sum(), 4),
        (lambda ids: jax.vmap(lambda i: TABLE[i])(ids), 16),
        (lambda ids: jax.lax.scan(lambda x, i: (x + TABLE[i], None), jnp.zeros(3), ids), 16),
        (lambda ids: jax.checkpoint(lambda i: TABLE[i])(ids), 16),
        (lambda ids: jax.lax.dynamic_slice(TABLE, (ids[0], 0), (1, 3)), 16),
    ],
)
def test_looked_up_as_they_are(loss: Callable[[Any], Any], size: int) -> None:
    assert sizes(loss) == size


@pytest.mark.parametrize(
    "loss",
    [
        lambda ids: TABLE[jnp.where(ids < 0, 0, ids)],
        lambda ids: TABLE[ids].sum() * (ids >= 0),  # it knows of others
        lambda ids: TABLE[jnp.clip(ids, 0, 15)],
        lambda ids: TABLE[ids % 16],
        lambda ids: jax.nn.one_hot(ids, 16) @ TABLE,
        lambda ids: jax.lax.dynamic_slice(TABLE, (ids[0], 0), (4, 3)),  # which begins where it fits
        lambda ids: ids * 2,
    ],
)
def test_not_looked_up_as_they_are(loss: Callable[[Any], Any]) -> None:
    assert sizes(loss) is None
