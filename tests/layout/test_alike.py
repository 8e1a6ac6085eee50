"""`sees_stacked` finds from its program whether an optimizer may see layers as a step stores them."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxpar.layout.leaves import Pipe, Sharing
from jaxpar.layout.storage import Storage, make_leaves
from jaxpar.numerics.matrices.elementwise import sees_stacked

WARM = optax.warmup_cosine_decay_schedule(0, 0.05, 100, 1000)  # its first update is zero for every optimizer


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loop() -> Storage:
    """Return four layers of a Python loop, stored as one stack."""
    layers = [{"w": array(8, 8), "b": array(8)} for _ in range(4)]
    return make_leaves({"layers": layers, "head": array(8, 5)}, None, Sharing(2))


def stages() -> Storage:
    """Return five stacked layers in two chunks on two ranks, with zeros after the last."""
    return make_leaves({"layers": {"w": array(5, 8, 16)}, "head": array(8, 5)}, None, Sharing(2, Pipe(2, 2)))


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1, momentum=0.9, nesterov=True),
        optax.adamw(WARM, weight_decay=0.1),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(WARM)),
        optax.lion(1e-3),
        optax.MultiSteps(optax.adam(1e-3), 4),
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    ],
)
def test_element_by_element(optimizer: optax.GradientTransformation) -> None:
    for storage in loop(), stages():
        assert not storage.same
        assert sees_stacked(optax.with_extra_args_support(optimizer), storage)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.lamb(WARM),
        optax.contrib.muon(WARM),
        optax.adafactor(1e-3),
        optax.MultiSteps(optax.lamb(0.01), 4),  # a trial would see no update before the fourth step
        optax.chain(optax.clip_by_block_rms(3.0), optax.sgd(0.1)),  # a trial would need large gradients
        optax.chain(optax.adaptive_grad_clip(3.0), optax.sgd(0.1)),
        optax.chain(optax.clip_by_global_norm(1.0), optax.lars(0.1)),
        optax.chain(optax.centralize(), optax.sgd(0.1)),
    ],
)
def test_by_leaf(optimizer: optax.GradientTransformation) -> None:
    for storage in loop(), stages():
        assert not sees_stacked(optax.with_extra_args_support(optimizer), storage)


def test_by_rank_and_path() -> None:
    """A stack has one dim more than its layers, and another path."""
    matrices = optax.adamw(1e-3, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params))
    assert not sees_stacked(optax.with_extra_args_support(matrices), loop())

    def labels(params: optax.Params) -> optax.Params:
        name = lambda path, _: "frozen" if "[0]" in jax.tree_util.keystr(path) else "tuned"
        return jax.tree_util.tree_map_with_path(name, params)

    first = optax.multi_transform({"frozen": optax.set_to_zero(), "tuned": optax.sgd(WARM)}, labels)
    assert not sees_stacked(optax.with_extra_args_support(first), loop())


@pytest.mark.parametrize(("power", "is_elementwise"), [(2, True), (3, True), (-2, False)])
def test_by_a_power_of_all_leaves(power: int, is_elementwise: bool) -> None:
    """x**-2 of the zeros after the last layer is not zero, so that its sum differs; it was accepted as the same."""

    def update(grads: optax.Updates, params: optax.Params | None) -> optax.Updates:
        total = sum(jnp.sum(jax.lax.integer_pow(g, power)) for g in jax.tree.leaves(grads))
        return jax.tree.map(lambda g: g / total, grads)

    assert sees_stacked(optax.with_extra_args_support(optax.stateless(update)), stages()) == is_elementwise
