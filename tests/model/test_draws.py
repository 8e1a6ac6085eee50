"""Equal draws are made together: 300 small leaves took half a minute to initialise, each draw compiled anew."""

import collections
import functools
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.model.draws import SMALL, draws_together
from jaxpar.program import jaxpr as jx

LEAVES = 8
LAYERS, SIDE = 4, 256  # of large draws


def bits(fun: Any, key: Any) -> list[tuple[int, ...]]:
    """Return the shapes of all draws of a program, including the calls in it."""
    shapes = []

    def walk(jaxpr: Any) -> None:
        for eqn in jx.opened(jaxpr)[0].eqns:
            if eqn.primitive.name == "random_bits":
                shapes.append(eqn.outvars[0].aval.shape)
            for inner in jec.jaxprs_in_params(eqn.params):
                walk(inner)

    walk(jax.make_jaxpr(fun)(key))
    return shapes


def small(key: jax.Array) -> dict[str, jax.Array]:
    """Leaves of three shapes, whose keys are split and folded; one draw follows from another."""
    keys = jax.random.split(key, LEAVES)
    leaves = {f"w{i}": jax.random.normal(keys[i], (3, 4 + i % 3)) for i in range(LEAVES)}
    more = {f"u{i}": jax.random.uniform(jax.random.fold_in(key, i), (5,), minval=i % 2) for i in range(4)}
    later = jax.random.normal(jax.random.fold_in(key, (100 * leaves["w0"][0, 0]).astype(jnp.int32)), (3, 4))
    return leaves | more | {"later": later, "constant": jnp.ones(3)}


def test_the_same_numbers_in_fewer_draws() -> None:
    key = jax.random.key(3)
    together = draws_together(small)
    alone = collections.Counter(bits(small, key))
    assert len(bits(together, key)) < len(bits(small, key)) / 2
    assert sum(np.prod(shape) for shape in bits(together, key)) == sum(np.prod(s) * n for s, n in alone.items())
    new, old = jax.jit(together)(key), jax.jit(small)(key)
    assert new.keys() == old.keys()
    for name in old:
        np.testing.assert_allclose(new[name], old[name], rtol=1e-6, atol=1e-7, err_msg=name)


def test_what_follows_from_draws_is_done_together() -> None:
    """A scale for each leaf, a cast, and keys read one by one were a kernel each: 300 leaves took 20 s of CPU time."""

    def init(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, LEAVES)
        draws = [jax.random.normal(keys[-1 - i], (3, 4 + i % 2)) for i in range(LEAVES)]
        return [((0.02 if i % 3 else 0.5) * x).astype(jnp.bfloat16) for i, x in enumerate(draws)]

    def counted(fun: Any) -> collections.Counter[Any]:
        eqns = jax.make_jaxpr(fun)(key).jaxpr.eqns
        of_key = lambda eqn: jnp.issubdtype(eqn.outvars[0].aval.dtype, jax.dtypes.prng_key)
        return collections.Counter((eqn.primitive.name, of_key(eqn)) for eqn in eqns)

    key, together = jax.random.key(3), draws_together(init)
    alone, fewer = counted(init), counted(together)
    for name, of_key, num_left in (("mul", False, 2), ("convert_element_type", False, 2), ("squeeze", True, 0)):
        assert (alone[name, of_key], fewer[name, of_key]) == (LEAVES, num_left), name  # of two shapes
    for new, old in zip(jax.jit(together)(key), jax.jit(init)(key), strict=True):
        np.testing.assert_allclose(np.float32(new), np.float32(old), rtol=1e-2)  # bfloat16 of almost the same numbers


@pytest.mark.parametrize(
    ("impl", "size", "prints"),
    [
        ("rbg", 12, False),  # in batches, it draws other numbers than one by one
        ("unsafe_rbg", 12, False),
        ("threefry2x32", SMALL + 1, False),  # large draws may be sharded, and their stack would not be
        ("threefry2x32", 12, True),  # prints keep their order
    ],
)
def test_draws_that_stay(impl: str, size: int, prints: bool) -> None:
    def draw(key: jax.Array) -> list[jax.Array]:
        if prints:
            jax.debug.print("drawing", ordered=True)
        return [jax.random.normal(k, (size,)) for k in jax.random.split(key, 3)]

    key = jax.random.key(3, impl=impl)
    assert bits(draws_together(draw), key) == bits(draw, key) == [(size,)] * 3


@pytest.mark.slow
def test_of_a_first_state() -> None:
    """With raw keys inside, and under shards: the parameters are those of the model's own `init`."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        raw = jax.random.split(jax.random.PRNGKey(7), LEAVES)
        return {**small(key), **{f"r{i}": jax.random.normal(raw[i], (6,)) for i in range(2)}}

    model = jp.Model(init, lambda p, batch, key: sum(x.sum() for x in p.values()) * batch.mean())
    step = jp.make_train_step(model, optax.sgd(0.1), "fsdp")
    key = jax.random.key(1)
    params = step.params(step.init(key))
    assert len(bits(step._create, key)) < 8
    for name, old in jax.jit(init)(key).items():
        np.testing.assert_allclose(params[name], old, rtol=1e-6, atol=1e-7, err_msg=name)


def counted(key: jax.Array) -> dict[str, jax.Array]:
    """Large layers whose keys are folded with a count, as Flax NNX has it, scaled by depth and reshaped."""
    count, leaves = jnp.uint32(0), {}
    for i in range(LAYERS):
        leaves[f"w{i}"] = jax.random.normal(jax.random.fold_in(key, count), (SIDE, SIDE)) / (i + 1) ** 0.5
        count += 1
        leaves[f"x{i}"] = jax.random.normal(jax.random.fold_in(key, count), (SIDE, SIDE)).reshape(2, -1, SIDE)
        count += 1
    return leaves


def split_in_turn(key: jax.Array) -> dict[str, jax.Array]:
    """Large layers, each of whose keys is split from what the one before it left; one draw follows from another."""
    leaves = {}
    for i in range(LAYERS):
        key, of_w, of_x = jax.random.split(key, 3)
        leaves[f"w{i}"] = 0.02 * jax.random.truncated_normal(of_w, -2, 2, (SIDE, SIDE))
        leaves[f"x{i}"] = jax.random.uniform(of_x, (SIDE, 2 * SIDE), maxval=1 + i)
    return leaves


@pytest.mark.parametrize("init", [counted, split_in_turn])
def test_large_draws_of_layers_that_are_stacked_are_one(init: Any) -> None:
    """XLA takes them for the stack, of which a device draws its part, and compiles one draw and not one a layer."""

    def stacked(key: jax.Array, letters: str) -> dict[str, jax.Array]:
        leaves = jax.jit(init, inline=True)(key)
        stacks = {letter: jnp.stack([leaves.pop(f"{letter}{i}") for i in range(LAYERS)]) for letter in letters}
        return leaves | stacks

    key, old = jax.random.key(3), jax.jit(init)(jax.random.key(3))
    for letters in "wx", "w":
        together = draws_together(functools.partial(stacked, letters=letters))
        large = [shape for shape in bits(together, key) if np.prod(shape) > SMALL]
        assert sorted(shape[0] for shape in large) == sorted(
            [LAYERS] * len(letters) + [SIDE] * LAYERS * (2 - len(letters))
        )
        stacks = [eqn for eqn in jax.make_jaxpr(together)(key).eqns if eqn.primitive.name == "stack"]
        assert all(eqn.outvars[0].aval.size < SMALL for eqn in stacks)  # of keys, and no batch in rows again
        for name, new in jax.jit(together)(key).items():
            for i, layer in enumerate(new) if name in letters else [("", new)]:
                np.testing.assert_allclose(layer, old[f"{name}{i}"], rtol=1e-6, atol=1e-7, err_msg=name)


def test_layers_that_wait_for_another_stay() -> None:
    """A layer drawn by what another one is: there is no one draw of all."""

    def init(key: jax.Array) -> list[jax.Array]:
        leaves = [jax.random.normal(key, (SIDE, SIDE))]
        for _ in range(2):
            key = jax.random.fold_in(key, (100 * leaves[-1][0, 0]).astype(jnp.int32))
            leaves.append(jax.random.normal(key, (SIDE, SIDE)))
        return leaves

    key = jax.random.key(3)
    together = draws_together(lambda key: [jnp.stack(init(key))])
    assert bits(together, key) == [(SIDE, SIDE)] * 3
    np.testing.assert_allclose(jax.jit(together)(key)[0], jax.jit(init)(key), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("strategy", ["pipe=4,fsdp=2,microbatches=4", "pipe=8,microbatches=8"])
def test_a_device_draws_its_own_part(strategy: str) -> None:
    """Every stage once drew all layers of a Python loop, more than one device has memory for."""

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, 8)
        return {"layers": [{"w": jax.random.normal(k, (SIDE, SIDE)) / SIDE**0.5} for k in keys]}

    def loss(params: Any, batch: jax.Array, key: jax.Array | None) -> jax.Array:
        for layer in params["layers"]:
            batch = jnp.tanh(batch @ layer["w"])
        return jnp.square(batch).mean()

    model = jp.Model(init, loss)
    step = jp.make_train_step(model, optax.sgd(0.1), strategy)
    memory = step._creating.lower(jax.random.key(0)).compile().memory_analysis()
    assert memory.output_size_in_bytes < 1.1 * SIDE**2 * 4
    assert memory.temp_size_in_bytes < 10 * SIDE**2 * 4  # some eight times what it draws, on CPU; it was 17 and 65
    params = step.params(step.init(jax.random.key(1)))
    for new, old in zip(jax.tree.leaves(params), jax.tree.leaves(jax.jit(init)(jax.random.key(1))), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-6, atol=1e-7)
