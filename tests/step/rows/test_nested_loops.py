"""The reader reads a loop in rounds until its carry settles, and loops within it only once for equal inputs."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxpar as jp
from jaxpar.step.rows.reader import Reader

Layer = Callable[[jax.Array, jax.Array], jax.Array]
BATCH = {"x": np.ones((8, 4), np.float32)}


def warnings_of(layer: Layer) -> list[str]:
    """Return the warnings about a layer before a mean over rows."""
    loss = lambda w, batch, key: jnp.square(layer(batch["x"], w)).mean()
    step = jp.make_train_step(jp.Model(lambda key: jnp.eye(4), loss), optax.sgd(0.1), "data=2", mesh=jax.devices()[:2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.trace(BATCH)
    return [str(w.message) for w in caught]


def in_scans(depth: int, layer: Layer) -> Layer:
    """Return a layer within `depth` loops, whose carry settles after three rounds."""
    if depth == 0:
        return layer
    inner = in_scans(depth - 1, layer)

    def loop(x: jax.Array, w: jax.Array) -> jax.Array:
        step = lambda carry, _: ((inner(carry[0], w) + carry[2], carry[0], carry[1]), None)
        return sum(lax.scan(step, (x, jnp.zeros_like(x), jnp.ones_like(x)), None, length=2)[0])

    return loop


def in_fori_loops(depth: int, layer: Layer) -> Layer:
    if depth == 0:
        return layer
    inner = in_fori_loops(depth - 1, layer)
    return lambda x, w: lax.fori_loop(0, 2, lambda _, x: inner(x, w), x)


def in_scans_over_rows(depth: int, layer: Layer) -> Layer:
    by_row = lambda x, w: lax.scan(lambda _, row: (None, layer(row[None], w)[0]), None, x)[1]
    return in_fori_loops(depth - 1, by_row)


@pytest.fixture
def equations_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[Layer], int]:
    """Return a function that counts the equations that are read of a layer."""
    num_read = 0

    def counted(self: Reader, *args: Any, read_equation: Any = Reader.read_equation) -> Any:
        nonlocal num_read
        num_read += 1
        return read_equation(self, *args)

    def of_layer(layer: Layer) -> int:
        num_before = num_read
        assert warnings_of(layer) == []
        return num_read - num_before

    monkeypatch.setattr(Reader, "read_equation", counted)
    return of_layer


@pytest.mark.parametrize("loops", [in_scans, in_fori_loops, in_scans_over_rows], ids=lambda f: f.__name__)
def test_reading_nested_loops_takes_as_long_as_there_are_loops(
    loops: Callable[[int, Layer], Layer], equations_read: Callable[[Layer], int]
) -> None:
    """The number of rounds was to the power of the depth: 1,457 equations were read for 5 loops of 17."""
    depth_2, depth_4, depth_6 = (equations_read(loops(depth, lambda x, w: jnp.tanh(x @ w))) for depth in (2, 4, 6))
    assert depth_6 - depth_4 <= depth_4 - depth_2


def test_layers_in_a_row_are_read_once_each(equations_read: Callable[[Layer], int]) -> None:
    """Layers of `associative_scan` and of nested loops, as in memorax's mLSTM."""

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        x_BTD = x[:, :, None] * w[0]
        merge = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        _, gated = lax.associative_scan(merge, (jax.nn.sigmoid(x_BTD @ w), x_BTD), axis=1)
        refined = lambda x: lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x @ w), x)
        step = lambda carry, x_BD: (carry + x_BD, refined(carry))
        return x + lax.scan(step, jnp.zeros_like(x), gated.swapaxes(0, 1))[1].sum(-1).T

    def repeat(count: int) -> Layer:
        return lambda x, w: layer(repeat(count - 1)(x, w), w) if count else x

    one_layer, two_layers, three_layers = (equations_read(repeat(count)) for count in (1, 2, 3))
    assert 0 < three_layers - two_layers == two_layers - one_layer


def test_a_function_that_is_read_again_is_not_taken_for_what_it_is_of_other_indices() -> None:
    """A function takes rows in order, and then in reverse."""
    take = jax.jit(lambda x, indices: x[indices])

    def layers(reverse: bool) -> Layer:
        def layer(x: jax.Array, _: Any) -> tuple[jax.Array, None]:
            rows = jnp.arange(len(x))
            return jnp.tanh(take(x, rows) + take(x, rows[::-1] if reverse else rows)), None

        return lambda x, w: lax.scan(layer, x @ w, None, length=2)[0]

    assert warnings_of(layers(False)) == []
    (message,) = warnings_of(layers(True))
    assert "picks rows by computed indices" in message
