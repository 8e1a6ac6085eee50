"""Loops over layers whose exchanges overlap with other products: their results, and the order of their equations."""

from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpar.slicing.loop import LayerLoop, _spread

LENGTH = 3


def layers(weights: Any, x: Any, reverse: bool, exchanges: int) -> LayerLoop:
    """Return x -> x + y, where y passes through products and all-to-alls, and the sum of each layer's y."""

    def body(x: jax.Array, number: jax.Array, w: jax.Array) -> Any:
        y = x
        for _ in range(exchanges):
            y = lax.all_to_all(jnp.tanh(y @ w), "expert", 0, 0, tiled=True)
        return x + y, y.sum()

    return LayerLoop(body, x, weights, LENGTH, reverse, lambda carry, sums: (carry, sums))


@pytest.mark.parametrize("exchanges", [(2, 2), (1, 3), (0, 2), (2, 0)])
def test_side_by_side_they_give_what_each_gives(exchanges: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(LENGTH, 4, 4)).astype("float32") / 2 for _ in range(2))
    x, y = (rng.normal(size=(2, 4, 4)).astype("float32") for _ in range(2))

    def run(x: Any, y: Any, beside: bool) -> Any:
        first = layers(a, x, False, exchanges[0]).then(lambda results: results[::-1])
        second = layers(b, y, True, exchanges[1])
        return first.beside(second) if beside else (first.run(), second.run())

    spread = lambda beside: jax.vmap(lambda x, y: run(x, y, beside), axis_name="expert")(x, y)
    jax.tree.map(lambda got, due: np.testing.assert_allclose(got, due, rtol=1e-5), spread(True), spread(False))


def test_each_computes_while_the_others_tokens_are_under_way() -> None:
    """The values that have arrived for one loop are held until the other loop's all-to-all can start."""
    x, y = jnp.ones((4, 4)), jnp.ones((4, 6))
    a, b = jnp.ones((LENGTH, 4, 4)), jnp.ones((LENGTH, 6, 6))
    run_both = lambda x, y: layers(a, x, False, 2).beside(layers(b, y, True, 2))
    (scan,) = (
        eqn for eqn in jax.make_jaxpr(run_both, axis_env=[("expert", 2)])(x, y).eqns if eqn.primitive.name == "scan"
    )
    (body,) = jec.jaxprs_in_params(scan.params)
    operations = {"dot_general": "compute", "all_to_all": "send"}
    order = [
        (operations[e.primitive.name], e.outvars[0].aval.shape[-1]) for e in body.eqns if e.primitive.name in operations
    ]
    assert order == [
        *(("compute", 6), ("send", 6), ("compute", 4), ("send", 4)),
        *(("compute", 6), ("send", 6), ("compute", 4), ("send", 4)),
    ]
    barriers = [[v.aval.shape[-1] for v in e.invars] for e in body.eqns if e.primitive.name == "optimization_barrier"]
    assert barriers == [[4, 6], [6, 4], [4, 6], [6, 4]]


def test_gradients_of_weights_are_computed_while_activations_are_sent() -> None:
    """XLA computed most of them at the end of a backward, and waited for the reduce-scatters before."""

    def body(carry: Any, number: Any, w: jax.Array) -> Any:
        ct, grads = carry
        first_grad, second_grad = ct.T @ ct, ct.T @ jnp.sin(ct)  # needed by no exchange
        scattered = lax.psum_scatter(ct @ w, "tensor", scatter_dimension=0, tiled=True)
        gathered = lax.all_gather(2 * scattered, "tensor", axis=0, tiled=True)
        return (jnp.tanh(gathered @ w), grads + first_grad + second_grad), ()

    def run(fills: bool, ct: jax.Array, w: jax.Array) -> Any:
        init = (ct, jnp.zeros((8, 8)))
        return LayerLoop(body, init, w, LENGTH, True, lambda carry, _: carry, fills=fills).run()

    ct, w = jnp.ones((2, 8, 8)) / 8, jax.random.normal(jax.random.key(0), (2, LENGTH, 8, 8)) / 4
    results = lambda fills: jax.vmap(lambda ct, w: run(fills, ct, w), axis_name="tensor")(ct, w)
    jax.tree.map(lambda got, due: np.testing.assert_allclose(got, due, rtol=1e-5), results(True), results(False))

    traced = jax.make_jaxpr(lambda ct, w: run(True, ct, w), axis_env=[("tensor", 2)])(ct[0], w[0])
    (scan,) = (eqn for eqn in traced.eqns if eqn.primitive.name == "scan")
    (inside,) = jec.jaxprs_in_params(scan.params)
    shown = ("dot_general", "reduce_scatter", "all_gather", "optimization_barrier")
    order = [eqn.primitive.name for eqn in inside.eqns if eqn.primitive.name in shown]
    product, barrier = "dot_general", "optimization_barrier"
    # The cotangent's product, then each exchange with one gradient, whose result is needed before the exchange's is.
    assert order == [product, "reduce_scatter", product, barrier, "all_gather", product, barrier, product]


def test_what_is_sent_for_the_next_layer_runs_beside_the_largest_products() -> None:
    """The gather ran behind the last all-to-all without compute to overlap with.

    A mixture of experts on 64 devices waited 43% of a step.
    """

    def body(carry: Any, number: Any, w: jax.Array) -> Any:
        x, weights, pending_grad = carry
        gathered = lax.all_gather(w, "fsdp", axis=0, tiled=True)  # the next layer's weights
        # the previous layer's gradient
        reduced = lax.psum_scatter(pending_grad, "fsdp", scatter_dimension=0, tiled=True)
        y = lax.all_to_all(x @ weights, "expert", 0, 0, tiled=True)
        z = jnp.tanh(jnp.tanh(y @ weights) @ weights)
        x = x + lax.all_to_all(z, "expert", 0, 0, tiled=True)
        return (x, gathered, pending_grad), (x @ weights).sum() + reduced.sum()

    def run(ahead: bool, x: jax.Array, w: jax.Array) -> Any:
        loop = LayerLoop(body, (x, w[0], w[1]), w[:, :4], LENGTH, False, lambda carry, ys: (carry, ys), ahead)
        return loop.run()

    x, w = jnp.ones((2, 2, 8, 8)) / 8, jax.random.normal(jax.random.key(0), (2, 2, LENGTH, 8, 8))
    axes = lambda fun: jax.vmap(jax.vmap(fun, axis_name="expert"), axis_name="fsdp")
    spread = lambda ahead: axes(lambda x, w: run(ahead, x, w))(x, w)
    jax.tree.map(lambda got, due: np.testing.assert_allclose(got, due, rtol=1e-5), spread(True), spread(False))

    traced = jax.make_jaxpr(lambda x, w: run(True, x, w), axis_env=[("expert", 2), ("fsdp", 2)])(x[0, 0], w[0, 0])
    (scan,) = (eqn for eqn in traced.eqns if eqn.primitive.name == "scan")
    (inside,) = jec.jaxprs_in_params(scan.params)
    names = [eqn.primitive.name for eqn in inside.eqns]
    sent = [name for name in names if name in ("all_to_all", "all_gather", "reduce_scatter")]
    assert sent == ["all_to_all", "all_gather", "all_to_all", "reduce_scatter"]
    products_and_gathers = [name for name in names if name in ("optimization_barrier", "all_gather", "dot_general")]
    product, barrier = "dot_general", "optimization_barrier"
    assert products_and_gathers == [product, product, product, barrier, "all_gather", barrier, product, barrier]


def test_all_copies_for_the_next_layer_start_before_the_last_product() -> None:
    """Every second one started after it, where no product hid it: a loop removed from the list that it went through."""
    host, device = jax.memory.Space.Host, jax.memory.Space.Device

    def step(weights: list[jax.Array], x: jax.Array) -> Any:
        weights = [jax.device_put(w, host) for w in weights]

        def body(carry: Any, i: jax.Array, _: None) -> Any:
            layer = lambda w: jax.device_put(lax.dynamic_index_in_dim(w, i, keepdims=False), device)
            return (jnp.tanh(carry[0] @ carry[1]), *map(layer, weights)), ()

        return _spread(body)((x, x, x, x), jnp.int32(1), None)

    equations = jax.make_jaxpr(step)([jnp.ones((4, 8, 8))] * 3, jnp.ones((8, 8))).eqns
    order = [e.primitive.name for e in equations if e.primitive.name in ("device_put", "dot_general")]
    assert order == ["device_put"] * 6 + ["dot_general"]  # 3 to the host, 3 back
