"""Model packages that others wrote, from PyPI: random weights, zero2 and zero3 against Flax alone.

Their files are as published. One of flaxmodels needs a name replaced before it trains; what happens without is tested.
`make test` installs them without what they ask for: some 80 distributions that their models do not import.
"""

import functools
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp

# They use names that JAX and Flax have deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Tree = Any
ROWS, LENGTH, VOCAB = 16, 12, 64
SGD = optax.sgd(0.1, momentum=0.9)  # Adam would hide a wrong gradient scale
DECODER = {
    "num_layers": 2,
    "vocab_size": VOCAB,
    "embed_dim": 32,
    "hidden_dim": 48,
    "num_heads": 4,
    "head_dim": 8,
    "num_kv_heads": 2,
    "rope_theta": 10_000,
    "norm_eps": 1e-5,
}


def imported(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Where it should be installed, a skip would hide that it is not.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{error}; `make test` installs it")


@dataclass(frozen=True)
class Package:
    """A package's model as a `jp.Model`, and the same loss(params, batch) by Flax alone on one device."""

    model: jp.Model
    plain: Callable[[Tree, Tree], jax.Array]
    batch: Tree


def from_nnx(build: Callable[[nnx.Rngs], nnx.Module], loss: Callable[..., jax.Array], batch: Tree) -> Package:
    with nnx.use_eager_sharding(False):
        graph, _ = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))

    def plain(params: nnx.State, batch: Tree) -> jax.Array:
        return loss(nnx.merge(graph, params), batch)

    return Package(jp.from_nnx(build, loss), plain, batch)


def from_linen(module: nn.Module, loss: Callable[..., jax.Array], batch: Tree) -> Package:
    model = jp.from_linen(module, loss, example=batch)
    _, abstract = jax.eval_shape(model.create, jax.random.key(0))
    # Statistics before the first step; in training they are written, never read.
    variables = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)

    def plain(params: Tree, batch: Tree) -> jax.Array:
        def apply(*args: Any, **kwargs: Any) -> Tree:
            return module.apply({"params": params, **variables}, *args, mutable=list(variables), **kwargs)[0]

        return loss(apply, batch)

    return Package(model, plain, batch)


def tokens() -> dict[str, np.ndarray]:
    return {"tokens": np.random.default_rng(0).integers(VOCAB, size=(ROWS, LENGTH + 1)).astype(np.int32)}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@functools.cache
def tunix(family: str) -> types.ModuleType:
    """`tunix.models.<family>.model` without the `__init__` files above it, which import trainers and checkpoints.

    Importing it turns Flax's eager sharding off for the whole process; turned on again, because a user may.
    """
    eager = nnx.using_eager_sharding()
    for name in ("tunix", f"tunix.models.{family}") if importlib.util.find_spec("tunix") else ():
        spec = importlib.util.find_spec(name)
        assert spec is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)  # and not executed
    module = imported(f"tunix.models.{family}.model")
    nnx.use_eager_sharding(eager)
    return module


def decoder(make: Callable[[nnx.Rngs], nnx.Module]) -> Package:
    """Annotated with mesh axes of Tunix's own (`fsdp`, `tp`); the layers are a Python loop."""

    def loss(module: Any, batch: Tree) -> jax.Array:
        inputs = batch["tokens"][:, :-1]
        positions = jnp.broadcast_to(jnp.arange(LENGTH), inputs.shape)
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (*inputs.shape, LENGTH))
        logits, _ = module(inputs, positions, None, causal)
        return cross_entropy(logits, batch["tokens"][:, 1:])

    return from_nnx(make, loss, tokens())


def tunix_llama3(monkeypatch: pytest.MonkeyPatch) -> Package:
    module = tunix("llama3")
    config = module.ModelConfig(**DECODER, remat_config=module.RematConfig.DECODER)
    return decoder(lambda rngs: module.Llama3(config, rngs=rngs))


def tunix_qwen3(monkeypatch: pytest.MonkeyPatch) -> Package:
    """Tied embedding; four experts of which two are used, so that most of an expert's rows do not count."""
    module = tunix("qwen3")
    config = module.ModelConfig(**DECODER, use_tied_embedding=True, num_experts=4, num_experts_per_tok=2)
    return decoder(lambda rngs: module.Qwen3(config, rngs=rngs))


def flaxmodels_resnet(monkeypatch: pytest.MonkeyPatch) -> Package:
    """Its first two stages, with Flax's BatchNorm in place of the package's copy of it.

    Small, because among millions of activations one lies so close to zero that rounding turns its ReLU on or off.
    """
    package = resnet()
    monkeypatch.setattr(imported("flaxmodels.resnet.ops"), "BatchNorm", nn.BatchNorm)
    monkeypatch.setitem(imported("flaxmodels.resnet.resnet").LAYERS, "resnet18", [1, 1, 0, 0])
    return from_linen(*package)


def resnet() -> tuple[nn.Module, Callable[[Any, Tree], jax.Array], Tree]:
    module = imported("flaxmodels").ResNet18(output="logits", pretrained=None, num_classes=10)

    def loss(apply: Any, batch: Tree) -> jax.Array:
        return cross_entropy(apply(batch["image"], train=True), batch["label"])

    # Rows of different brightness: statistics of one replica's rows are far from those of all.
    brightness = np.linspace(0.2, 1, ROWS)[:, None, None, None]
    image = np.random.default_rng(0).uniform(size=(ROWS, 16, 16, 3)) * brightness
    return module, loss, {"image": image.astype(np.float32), "label": np.arange(ROWS, dtype=np.int32) * 3 % 10}


def flaxdiff_dit(monkeypatch: pytest.MonkeyPatch) -> Package:
    """A diffusion transformer: modules made in `setup`, layers in a Python loop, a table of rotations as a constant."""
    module = imported("flaxdiff.models.simple_dit").SimpleDiT(patch_size=4, emb_features=32, num_layers=2, num_heads=4)

    def loss(apply: Any, batch: Tree) -> jax.Array:
        return jnp.square(apply(batch["noisy"], batch["time"], batch["text"]) - batch["noise"]).mean()

    random = np.random.default_rng(0)
    shapes = {"noisy": (8, 8, 3), "time": (), "text": (4, 24), "noise": (8, 8, 3)}
    batch = {name: random.normal(size=(ROWS, *shape)).astype(np.float32) for name, shape in shapes.items()}
    return from_linen(module, loss, batch)


PACKAGES = (tunix_llama3, tunix_qwen3, flaxmodels_resnet, flaxdiff_dit)


def shaken(params: Tree) -> Tree:
    """Tunix starts its feed-forwards at zero, where most gradients vanish and would be equal for no good reason."""
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: np.asarray(np.asarray(x) + 0.05 * random.normal(size=x.shape), np.float32), params)


def assert_close(actual: Tree, expected: Tree) -> None:
    """Same tree; |a - b| <= 1e-5 max(leaf max, 1e-3 tree max), as the whole project defines parity."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected))
    pairs = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(actual), strict=True)
    for (path, b), a in pairs:
        a, b = np.asarray(a), np.asarray(b)
        tolerance = 1e-5 * max(np.abs(b).max(), 1e-3 * largest)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("strategy", [pytest.param("zero2", marks=pytest.mark.battery), "zero3"])
@pytest.mark.parametrize("make", PACKAGES, ids=lambda make: make.__name__)
@pytest.mark.slow
def test_trains_as_on_one_device(
    make: Callable[[pytest.MonkeyPatch], Package], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = make(monkeypatch)
    values, _ = jax.jit(package.model.create)(jax.random.key(0))
    params = start = shaken(package.model.wrap(values))
    plain = jax.jit(jax.value_and_grad(package.plain))
    step = jp.make_train_step(package.model, SGD, strategy)
    state = step.init(jax.random.key(0), params=start)

    # Jitted, since each operation and shape would be a program otherwise.
    momentum, update, to_logical = jax.jit(SGD.init)(start), jax.jit(SGD.update), jax.jit(step.layout.to_logical)
    for number in range(2):
        state, metrics = step(state, package.batch)
        loss, grads = plain(params, package.batch)
        if number == 0:  # the momentum after the first step is the gradient
            assert all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(grads))
            np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
            unwrap = package.model.unwrap
            assert_close(unwrap(to_logical(state.optimizer[0].trace)), unwrap(grads))
        updates, momentum = update(grads, momentum, params)
        params = jax.tree.map(lambda x, change: x + np.asarray(change), params, updates)
    trained = step.params(state)
    assert_close(trained, params)
    largest = max(jax.tree.leaves(trained), key=lambda leaf: leaf.size)
    assert largest.sharding.is_fully_replicated == (strategy == "zero2")


@pytest.mark.slow
def test_a_batchnorm_that_is_not_flaxs_is_refused() -> None:
    """The ResNets of flaxmodels have their own copy, which would compute statistics of one replica's rows."""
    module, loss, batch = resnet()
    step = jp.make_train_step(jp.from_linen(module, loss, example=batch), SGD, "zero3")
    message = "batch_stats/.*/mean is updated from this replica's rows alone.* the BatchNorm of Flax or Equinox"
    with pytest.raises(ValueError, match=message):
        step.compile(batch)
