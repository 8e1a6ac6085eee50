"""Guards such as `eqx.error_if` read all rows and decide no value.

They were refused as a coupling, in megalodon-jax.
"""

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

Guard = Callable[[Any], Any]
BATCH = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


def of_any_row(y: jax.Array) -> jax.Array:
    return eqx.error_if(y, jnp.any(jnp.isnan(y)), "NaN")


def or_nan(y: jax.Array, wrong: jax.Array) -> jax.Array:
    return eqx.error_if(y, wrong, "NaN", on_error="nan")


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


NAN_GUARDS: dict[str, Guard] = {
    "nan of any row": lambda y: or_nan(y, jnp.any(jnp.isnan(y))),
    "nan of each row": lambda y: or_nan(y, jnp.isnan(y).any(-1)),
    "nan of a mean": lambda y: or_nan(y, y.mean() > 1e9),
    "nan in a vmap": jax.vmap(lambda y: or_nan(y, jnp.any(jnp.isnan(y)))),
}
GUARDS: dict[str, Guard] = NAN_GUARDS | {
    "of any row": of_any_row,
    "of a mean": lambda y: eqx.error_if(y, y.mean() > 1e9, "large"),
    "of two kinds": lambda y: eqx.branched_error_if(y, y.max() > 1e9, jnp.argmax(y.mean(0)) % 2, ["one", "other"]),
    "in a vmap": jax.vmap(of_any_row),
    "checked": checked,
    "printed": printed,
}


def step_of(guard: Guard, centred: bool = False, strategy: str = "ddp,microbatches=2") -> Any:
    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        y = guard(batch @ params["w"])
        return jnp.square(y - y.mean(0) if centred else y).mean()

    model = jp.Model(lambda key: {"w": jax.random.normal(key, (4, 4))}, loss)
    return jp.make_train_step(model, optax.sgd(0.1), strategy, mesh=jax.devices()[: 1 if strategy == "single" else 2])


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_couples_no_rows_and_hides_no_coupling(name: str) -> None:
    step_of(GUARDS[name]).traced(BATCH)  # a warning would be an error
    with pytest.raises(ValueError, match=r"couples rows.*\n.*mean over rows"):
        step_of(GUARDS[name], centred=True).traced(BATCH)


@pytest.mark.parametrize("name", NAN_GUARDS)
def test_a_guard_of_nan_makes_the_loss_nan_as_on_one_device(name: str) -> None:
    """It was refused as a coupling. NaN in the rows of one block makes the mean of all rows NaN."""
    step, bad = step_of(NAN_GUARDS[name]), BATCH.copy()
    bad[13, 2] = np.nan
    state = step.init(jax.random.key(0))
    assert np.isfinite(step.evaluate(state, BATCH)["loss"])
    assert np.isnan(step.evaluate(state, bad)["loss"])
    assert np.isnan(np.square(NAN_GUARDS[name](bad @ step.params(state)["w"])).mean())


@pytest.mark.parametrize(
    "hides",
    [jnp.nan_to_num, lambda y: jnp.where(jnp.isnan(y), 0.0, y), lambda y: jnp.where(jnp.isfinite(y), y, 0.0)],
)
def test_nan_that_a_later_line_takes_away_is_a_coupling(hides: Guard) -> None:
    """One device would set all rows of the batch to 0, and a block only its own rows."""
    with pytest.raises(ValueError, match=r"couples rows.*\n.*test_guards.py:\d+.*on_error='raise'"):
        step_of(lambda y: hides(NAN_GUARDS["nan of a mean"](y))).traced(BATCH)
    step_of(lambda y: hides(GUARDS["of a mean"](y))).traced(BATCH)  # as the error advises


def test_integers_of_a_guard_of_nan_are_a_coupling() -> None:
    """Equinox replaces integers by the largest number, which is not NaN, so that the loss is a different number."""
    with pytest.raises(ValueError, match="couples rows"):
        step_of(lambda y: y * or_nan((y > 0).astype(int), y.max() > 1e9)).traced(BATCH)


def test_checks_in_a_loss_are_heard_by_checkify_around_the_step() -> None:
    """The check of one rank is enough, on any rank that has the bad row."""

    def check(y: jax.Array) -> jax.Array:
        checkify.check(jnp.all(jnp.abs(y) < 1e9), "too large")
        return y

    step, bad = step_of(check), BATCH.copy()
    bad[13, 2] = 1e12
    state, checked = step.init(jax.random.key(0)), checkify.checkify(step.evaluate)
    assert checked(state, BATCH)[0].get() is None
    assert "too large" in checked(state, bad)[0].get()


def breaks(y: jax.Array) -> jax.Array:
    jax.debug.breakpoint()
    return y


@pytest.mark.parametrize("strategy", ["ddp,microbatches=2", "single"])
def test_breakpoints_are_refused_with_their_line(strategy: str) -> None:
    """JAX's error told of a tracer without numbers, or of one that escaped, and named no line."""
    equinox_breakpoint = lambda y: eqx.error_if(y, jnp.any(y > 1e9), "large", on_error="breakpoint")
    for guard in (breaks, equinox_breakpoint) if strategy != "single" else (equinox_breakpoint,):
        with pytest.raises(ValueError, match=r"debugger at .*test_guards.py:\d+.*call the loss by itself"):
            step_of(guard, strategy=strategy).traced(BATCH)


def test_a_choice_by_a_mean_is_no_guard() -> None:
    with pytest.raises(ValueError, match="couples rows"):
        step_of(lambda y: jax.lax.cond(y.mean() > 0.1, lambda y: 2 * y, lambda y: y, y)).traced(BATCH)


def test_ordered_prints_are_refused_with_their_line() -> None:
    """JAX's error named an object whose effects "are not supported for more than 1 device", and no line."""

    def ordered(y: jax.Array) -> jax.Array:
        jax.debug.print("{m}", m=y.max(), ordered=True)
        return y

    with pytest.raises(ValueError, match=r"ordered=True, .*test_guards.py:\d+.* leave ordered= out"):
        step_of(ordered).traced(BATCH)
