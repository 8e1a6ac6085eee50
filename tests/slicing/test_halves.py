"""A layer stack's backward in two halves equals the whole backward, bitwise, and computes no matrix product twice."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpar.program.jaxpr import opened, trace
from jaxpar.slicing.access import WholeAccess
from jaxpar.slicing.halves import Halves, pick
from jaxpar.slicing.pieces import Stack
from jaxpar.slicing.slicer import Slicing, slice_program

LAYERS, ROWS, LENGTH, DIM, HEADS, FFN = 2, 2, 5, 8, 2, 12
SHAPES = [(DIM,), (DIM, 3 * DIM), (DIM, DIM), (DIM, 2 * FFN), (FFN, DIM)]


def loss(leaves: list[jax.Array], inputs: Any) -> jax.Array:
    """Decoder layers, with a balance loss by layer, a learned constant that all of them read, and a mask."""
    *stacks, bias = leaves
    x, mask = inputs

    def norm(x: jax.Array) -> jax.Array:
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, jax.Array]:
        scale, qkv, out, up, down = w
        q, k, v = jnp.split((norm(x) * (1 + scale) @ qkv).reshape(ROWS, LENGTH, HEADS, -1), 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias + jnp.where(mask, 0, -1e9)
        heads = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        x = x + heads.reshape(ROWS, LENGTH, DIM) @ out
        gate, value = jnp.split(norm(x) @ up, 2, axis=-1)
        return x + (jax.nn.silu(gate) * value) @ down, jnp.sum(x**2)

    x, balance = lax.scan(layer, x, tuple(stacks))
    return jnp.sum(jnp.sin(x)) + 1e-2 * jnp.sum(balance)


def values() -> tuple[list[jax.Array], tuple[jax.Array, jax.Array]]:
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape) * 0.3
    leaves = [draw(i, LAYERS, *shape) for i, shape in enumerate(SHAPES)]
    return [*leaves, draw(7, HEADS, 1, LENGTH)], (draw(8, ROWS, LENGTH, DIM), jnp.tri(LENGTH, dtype=bool))


def stack_of(remat: str) -> Stack:
    leaves, inputs = values()
    flat, _ = trace(loss, leaves, inputs)
    (stack,) = slice_program(flat, Slicing(leaves, [None] * len(leaves), remat=remat)).stacks
    return stack


def example_of(stack: Stack) -> tuple[list[Any], list[Any], list[Any]]:
    """Return leaves, inputs of the stack, and cotangents of its active outputs."""
    leaves, _ = values()
    draw = lambda v, i: jax.random.normal(jax.random.key(i), v.aval.shape)
    inputs = [
        draw(v, i) if v.aval.dtype != bool else jnp.tri(*v.aval.shape, dtype=bool) for i, v in enumerate(stack.inputs)
    ]
    return leaves, inputs, [draw(v, 9 + i) for i, v in enumerate(stack.outputs) if stack.unit.active[i]]


def whole_backward(stack: Stack, leaves: Any, inputs: Any, cotangents: Any) -> Any:
    _, saved = stack.forward(WholeAccess(), leaves, inputs, True)
    return stack.backward(WholeAccess(), leaves, inputs, saved, cotangents, [None] * len(stack.unit.leaf_indices))


def split_backward(stack: Stack, leaves: Any, inputs: Any, cotangents: Any) -> Any:
    _, saved = stack.forward(WholeAccess(), leaves, inputs, True)
    layers = stack.layers(WholeAccess(), leaves)
    cts, residuals = stack.backward_inputs(layers, inputs, saved, cotangents)
    saved_values = [x for x, on in zip(saved.values, residuals.halves.saved, strict=True) if on]
    into = [None] * len(stack.unit.leaf_indices)
    return stack.backward_weights(layers, inputs, saved_values, residuals, into), cts


def products(jaxpr: Any) -> int:
    """Count the matrix products in a program; those of a loop's body count once."""
    eqns = opened(jaxpr)[0].eqns
    inner = [j for eqn in eqns for j in jax.extend.core.jaxprs_in_params(eqn.params)]
    return sum(eqn.primitive.name == "dot_general" for eqn in eqns) + sum(map(products, inner))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "layer", "dots", "twice"])
def test_halves_are_the_whole(remat: str) -> None:
    stack = stack_of(remat)
    args = example_of(stack)
    with jax.disable_jit():  # operation by operation, so that no compiler joins them in another way
        expected, actual = whole_backward(stack, *args), split_backward(stack, *args)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if remat == "none":
            np.testing.assert_array_equal(ours, theirs)
        else:  # in the whole, what is recomputed is one call, which is compiled
            np.testing.assert_allclose(ours, theirs, atol=1e-6 * float(jnp.abs(theirs).max()))
    counts = [
        products(jax.make_jaxpr(lambda *args, f=f: f(stack, *args))(*args)) for f in (whole_backward, split_backward)
    ]
    # A layer with remat is recomputed once. With "twice", W recomputes it again, except for its last product.
    assert counts[1] - counts[0] == (5 if remat == "twice" else 0)


def residuals_of(remat: str) -> Any:
    stack = stack_of(remat)

    def residuals(leaves: Any, inputs: Any, cotangents: Any) -> Any:
        _, saved = stack.forward(WholeAccess(), leaves, inputs, True)
        return stack.backward_inputs(stack.layers(WholeAccess(), leaves), inputs, saved, cotangents)[1]

    return jax.eval_shape(residuals, *example_of(stack))


def test_what_is_left() -> None:
    """The residuals are the cotangent of each weight's product, and no weight."""
    residuals = residuals_of("none")
    # At most vectors are fetched again. The first half computes their gradients.
    assert not any(residuals.halves.fetched[1][1:])
    rows = (LAYERS, ROWS, LENGTH)
    widths = (DIM, FFN, 2 * FFN, 3 * DIM, 1)  # 1: the scale of a norm, which the first half has computed again
    assert {x.shape for x in residuals.values} <= {(*rows, n) for n in widths} | {(LAYERS, DIM)}
    assert sum(x.size for x in residuals.values) <= LAYERS * ROWS * LENGTH * (3 * DIM + DIM + 2 * FFN + DIM)
    once, twice = (sum(x.size for x in residuals_of(remat).values) for remat in ("layer", "twice"))
    assert twice < 0.75 * once  # no operands of products, which the second half computes again


def test_what_both_halves_make_of_constants() -> None:
    """T5's distances between positions raised a KeyError.

    The second half recomputed an equation that it had already. So the equation was in it twice, and its operands were
    gone the second time.
    """

    def backward(w: jax.Array, x: jax.Array, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
        far = jnp.arange(8)[None, :] - jnp.arange(8)[:, None]
        near, past = jnp.abs(far).astype(jnp.float32), jnp.where(far > 0, x, 0.0)
        return past @ ct + near @ ct + w, past * near * ct

    args = [jax.random.normal(jax.random.key(i), (8, 8)) for i in range(3)]
    flat, _ = trace(backward, *args)
    halves = Halves.split(flat, flat.eqns, (True,), 0, 1)
    w, x, ct = args
    (ct_x,), residuals = halves.inputs(pick(halves.fetched[0], [w]), [], [x], [ct])
    (ct_w,) = halves.weights(pick(halves.fetched[1], [w]), [], pick(halves.saved, [x]), residuals)
    for ours, theirs in zip((ct_w, ct_x), backward(*args), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
