"""Guards look at all rows and decide no value: `eqx.error_if` was refused as a coupling (in megalodon-jax)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify, io_callback

import jaxpar as jp

eqx = pytest.importorskip("equinox", reason="Equinox is not installed: pip install equinox")

BATCH = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


def of_any_row(y: jax.Array) -> jax.Array:
    return eqx.error_if(y, jnp.any(jnp.isnan(y)), "NaN")


def of_a_mean(y: jax.Array) -> jax.Array:
    return eqx.error_if(y, y.mean() > 1e9, "large")


def of_two_kinds(y: jax.Array) -> jax.Array:
    return eqx.branched_error_if(y, y.max() > 1e9, jnp.argmax(y.mean(0)) % 2, ["one", "other"])


def in_a_vmap(y: jax.Array) -> jax.Array:
    return jax.vmap(of_any_row)(y)


def checked(y: jax.Array) -> jax.Array:
    def check(y: jax.Array) -> jax.Array:
        checkify.check(jnp.all(y < 1e9), "too large: {y}", y=y.max())
        return y

    return checkify.checkify(check)(y)[1]


def printed(y: jax.Array) -> jax.Array:
    jax.debug.print("{m}", m=y.max())
    jax.debug.callback(lambda m: None, y.mean())
    io_callback(lambda m: None, None, y.mean())
    jax.lax.cond(jnp.any(y > 1e9), lambda: jax.debug.print("large"), lambda: None)
    return y


GUARDS = (of_any_row, of_a_mean, of_two_kinds, in_a_vmap, checked, printed)


def step_of(guard: Callable[[Any], Any], centred: bool = False) -> Any:
    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        y = guard(batch @ params["w"])
        return jnp.square(y - y.mean(0) if centred else y).mean()

    model = jp.Model(lambda key: {"w": jax.random.normal(key, (4, 4))}, loss)
    return jp.make_train_step(model, optax.sgd(0.1), "ddp,microbatches=2", mesh=jax.devices()[:2])


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_couples_no_rows(guard: Callable[[Any], Any]) -> None:
    step_of(guard).traced(BATCH)  # a warning would be an error


@pytest.mark.parametrize("guard", GUARDS)
def test_a_coupling_behind_a_guard_is_refused(guard: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"couples rows.*\n.*mean over rows"):
        step_of(guard, centred=True).traced(BATCH)


def test_a_choice_by_a_mean_is_no_guard() -> None:
    with pytest.raises(ValueError, match="couples rows"):
        step_of(lambda y: jax.lax.cond(y.mean() > 0.1, lambda y: 2 * y, lambda y: y, y)).traced(BATCH)


def test_ordered_prints_are_refused_with_their_line() -> None:
    """JAX said which object's effects "are not supported for more than 1 device", and no line."""

    def ordered(y: jax.Array) -> jax.Array:
        jax.debug.print("{m}", m=y.max(), ordered=True)
        return y

    with pytest.raises(ValueError, match=r"ordered=True, .*test_guards.py:\d+.* leave ordered= out"):
        step_of(ordered).traced(BATCH)
