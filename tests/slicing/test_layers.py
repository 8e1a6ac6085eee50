"""Slicing: where a loss is cut, and what each piece saves: activations, and no weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.program.jaxpr import trace
from jaxpar.slicing.access import WholeAccess
from jaxpar.slicing.pieces import Segment, Stack
from jaxpar.slicing.program import Program
from jaxpar.slicing.slicer import Slicing, slice_program

LAYERS, DIM, ROWS = 4, 6, 5


def params() -> list[jax.Array]:
    key = iter(jax.random.split(jax.random.key(0), 5))
    shapes = [(11, DIM), (LAYERS, DIM, DIM), (LAYERS, DIM), (LAYERS, DIM, DIM), (DIM, DIM)]
    return [*(jax.random.normal(next(key), s) for s in shapes), jnp.ones(LAYERS)]


def rest() -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.arange(ROWS), jnp.ones(ROWS).at[2].set(0), jax.random.key(1)


def loss(leaves: list[jax.Array], rest: Any) -> list[jax.Array]:
    """Two stacks, tied and shared weights, weight norm, a cast before the scan, remat, used and unused outputs."""
    embed, w, scale, w2, shared, gain = leaves
    tokens, mask, key = rest
    shared = shared / jnp.linalg.norm(shared)

    def layer(carry: Any, x: Any) -> tuple[Any, Any]:
        h, count = carry
        w, scale, key, gain = x
        inner = jax.checkpoint(lambda h, w: jnp.tanh(h * (1 + scale) @ w.T) * gain)
        shared_by_all = checkpoint_name(h @ shared, "shared")
        y = (inner(h, w) + shared_by_all * mask[:, None]) * jax.random.bernoulli(key, 0.9, h.shape)
        return (y, count + 1), (w, jnp.sum(y**2))

    xs = (w.astype(scale.dtype) * 0.5, scale, jax.random.split(key, LAYERS), gain)
    (h, count), (_, balance) = lax.scan(layer, (embed[tokens], 0), xs)
    g, _ = jax.jit(lambda h, w: lax.scan(lambda c, w: (jnp.sin(c @ w) + h, None), h, w, reverse=True))(h, w2)
    return [jnp.mean((g @ embed.T) ** 2) + 1e-2 * balance.sum() + 1e-3 * jnp.sum(w2**2), count]


def sliced(remat: Any = "none", sharded_layers: tuple[int, ...] = ()) -> Program:
    """Slice the loss. `sharded_layers` are leaves that are sharded along their layers, so that no stack slices them."""
    flat, _ = trace(loss, params(), rest())
    return slice_program(flat, Slicing(params(), [0 if i in sharded_layers else None for i in range(6)], remat=remat))


def run(program: Program) -> tuple[list[jax.Array], list[Any], list[Any]]:
    shapes: list[Any] = []

    def value_and_grads(leaves: list[jax.Array]) -> Any:
        outputs, tape = program.forward(WholeAccess(), leaves, jax.tree.leaves(rest()), grad=True)
        for piece, (_, saved) in zip(program.pieces, tape, strict=True):
            piece_saved = saved[0] if isinstance(piece, Segment) else saved
            shapes.append([x.shape for x in piece_saved.values])
        return outputs, program.backward(WholeAccess(), leaves, tape, {0: jnp.ones(())}, [None] * len(leaves))

    outputs, grads = jax.jit(value_and_grads)(params())
    return outputs, grads, shapes


NAMED = jax.checkpoint_policies.save_only_these_names("shared")
POLICIES = {"named": NAMED, "everything": jax.checkpoint_policies.everything_saveable}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "sharded_layers"),
    [
        ("none", ()),
        ("layer", (1,)),
        pytest.param(POLICIES["named"], (1, 2, 3, 5), id="named"),
        ("none", (1, 2, 3, 5)),
        pytest.param(POLICIES["everything"], (1,), id="everything"),
        ("dots", ()),
    ],
)
def test_gradients_are_those_of_the_whole_loss(remat: Any, sharded_layers: tuple[int, ...]) -> None:
    with jax.enable_x64(True):  # in float32 the reference itself is off by 7e-5 of a leaf's scale
        outs, grads, _ = run(sliced(remat, sharded_layers))
        value, expected = jax.value_and_grad(lambda leaves: loss(leaves, rest())[0])(params())
        np.testing.assert_allclose(outs[0], value, rtol=1e-14)
        assert outs[1] == LAYERS
        for ours, theirs in zip(grads, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13 * float(jnp.abs(theirs).max()))


def test_cut() -> None:
    program = sliced()
    kinds = [type(piece) for piece in program.pieces]
    assert kinds == [Segment, Stack, Stack, Segment]
    first, second = program.stacks
    assert sorted(first.unit.leaf_indices) == [1, 2, 5]  # through the cast and the product before the scan
    assert second.unit.leaf_indices == (3,)
    assert second.reverse
    assert program.uses[0] == (False, False)  # tied: in the prologue and in the epilogue
    assert program.uses[3] == (True, False)  # sliced by its stack, whole in the penalty
    assert program.uses[4] == (False,)  # shared by all layers: handed over by the prologue


@pytest.mark.parametrize(("remat", "activations"), [("none", 4), ("layer", 1)])
def test_stash_holds_activations_and_no_weights(remat: str, activations: int) -> None:
    _, _, shapes = run(sliced(remat))
    weights = {(LAYERS, DIM, DIM), (LAYERS, DIM), (DIM, DIM)}
    for stash in shapes:
        assert not weights & set(stash), shapes
    assert shapes[1] == [(LAYERS, ROWS, DIM)] if remat == "layer" else len(shapes[1]) <= activations


def test_a_policy_says_what_is_kept() -> None:
    _, _, shapes = run(sliced(NAMED))
    assert sorted(shapes[1]) == [(LAYERS, ROWS, DIM)] * 2  # a layer's input, and the named value
    offloads = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["shared"], offload_src="device",
        offload_dst="pinned_host",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"sends the results of name to 'pinned_host', .* offload='activations'"):
        run(sliced(offloads))


def test_evaluation_saves_nothing() -> None:
    tapes = []

    def evaluate(leaves: list[jax.Array]) -> Any:
        outs, tape = sliced().forward(WholeAccess(), leaves, jax.tree.leaves(rest()))
        tapes.append(tape)
        return outs[0], loss(leaves, rest())[0]

    np.testing.assert_allclose(*jax.jit(evaluate)(params()), rtol=1e-6)
    assert all(saved is None for _, saved in tapes[0])


def test_a_leaf_scanned_twice_by_one_scan_and_read_beside_it() -> None:
    def twice(leaves: list[jax.Array], x: jax.Array) -> jax.Array:
        (w,) = leaves
        y, _ = lax.scan(lambda c, ws: (jnp.tanh(c @ ws[0]) @ ws[1], None), x, (w, w * 2))
        return y.sum() + jnp.sum(w**2)

    w, x = jax.random.normal(jax.random.key(0), (3, 4, 4)), jnp.ones((2, 4))
    program = slice_program(trace(twice, [w], x)[0], Slicing([w], [None]))
    assert program.stacks[0].unit.leaf_indices == (0,)
    _, tape = program.forward(WholeAccess(), [w], [x], grad=True)
    (ours,) = program.backward(WholeAccess(), [w], tape, {0: jnp.ones(())}, [None])
    np.testing.assert_allclose(ours, jax.grad(lambda w: twice([w], x))(w), rtol=1e-5)


def test_what_has_no_derivative() -> None:
    """Counts and `stop_gradient` have no derivative, and a pipeline sends no cotangents of them.

    A function with a custom derivative has one, whatever it computes: rounding with a straight-through gradient.
    """

    @jax.custom_vjp
    def rounded(x: jax.Array) -> jax.Array:
        return jnp.round(x).astype(jnp.int32).astype(x.dtype)

    rounded.defvjp(lambda x: (rounded(x), None), lambda _, ct: (ct,))

    def loss(leaves: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
            h = h @ w
            return h, (rounded(h).sum(), (h > 0).astype(h.dtype).sum(), lax.stop_gradient(h).sum(), h.sum())

        h, counts = lax.scan(layer, x, leaves[0])
        return [h.sum() + counts[0].sum(), *(count.mean() for count in counts[1:])]

    leaves = [jnp.ones((LAYERS, DIM, DIM))]
    flat, _ = trace(loss, leaves, jnp.ones((ROWS, DIM)))
    (stack,) = slice_program(flat, Slicing(leaves, [None])).stacks
    assert stack.unit.active == (True, True, False, False, True)
