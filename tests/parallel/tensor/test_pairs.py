"""Models without any rule for `tensor`: `pairs.py` finds which dims are split, and they train as on one device.

They were refused: "tensor=2 splits no parameter, as no rule names one".
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import OneDevice, check, initial
from flax import linen as nn
from flax import nnx
from tensor_cells import SGD, SHARED_BATCH, STEPS
from test_tensor_dims import leaves_of

import jaxpar as jp
from jaxpar.forecast.plan.estimates import Estimator
from jaxpar.inspect.ledger import Ledger
from jaxpar.models import named
from jaxpar.parallel.tensor.dims import tensor_dims
from jaxpar.parallel.tensor.pairs import creation_order

pytestmark = SHARED_BATCH

ROWS, SIZE = 8, 6


def rand(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def weighed(out: jax.Array, weights: jax.Array) -> jax.Array:
    """A loss with random cotangents."""
    return (jnp.tanh(out) * weights).sum(axis=tuple(range(1, out.ndim))).mean()


def dims_of(model: jp.Model, size: int = 2, rules: Any = None) -> dict[str, int]:
    order = functools.partial(creation_order, model.create)
    return tensor_dims(leaves_of(model), size, rules, model.rules, model.names(), order)


class Residual(nnx.Module):
    """As in ResNet, in the order of torchvision: convolutions first, then their norms."""

    def __init__(self, inputs: int, outputs: int, norm: Callable[..., nnx.Module], rngs: nnx.Rngs) -> None:
        self.second_last = nnx.Conv(inputs, outputs, (3, 3), strides=2, use_bias=False, rngs=rngs)
        self.last = nnx.Conv(outputs, outputs, (3, 3), use_bias=False, rngs=rngs)
        self.norm_a, self.norm_b = norm(outputs, rngs=rngs), norm(outputs, rngs=rngs)
        self.shortcut = nnx.Conv(inputs, outputs, (1, 1), strides=2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.max_pool(nnx.relu(self.norm_a(self.second_last(x))), (2, 2), padding="SAME")
        return nnx.relu(self.norm_b(self.last(y)) + self.shortcut(x))


class Pictures(nnx.Module):
    def __init__(self, norm: Callable[..., nnx.Module], rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.blocks = nnx.List([Residual(4, 8, norm, rngs), Residual(8, 12, norm, rngs)])
        self.classifier = nnx.Linear(12, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.classifier(x.mean((1, 2)))


def pictures(norm: Callable[..., nnx.Module]) -> jp.Model:
    return jp.from_nnx(lambda rngs: Pictures(norm, rngs), lambda module, b: weighed(module(b["x"]), b["w"]))


class Separable(nn.Module):
    """Inverted residuals with squeeze and excitation (MobileNetV3), ConvNeXt's block, and a grouped bottleneck."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(8, (3, 3), name="Start")(x)
        return Aggregated()(Next()(Inverted()(x)))


class Inverted(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.silu(nn.GroupNorm(4)(nn.Conv(16, (1, 1), use_bias=False)(x)))
        y = nn.silu(nn.GroupNorm(4)(nn.Conv(16, (3, 3), feature_group_count=16, use_bias=False)(y)))
        y = y * nn.sigmoid(nn.Dense(16)(nn.relu(nn.Dense(4)(y.mean((1, 2), keepdims=True)))))
        return x + nn.Conv(8, (1, 1))(y)


class Next(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm()(nn.Conv(8, (3, 3), feature_group_count=8)(x))
        y = nn.Dense(8)(nn.gelu(nn.Dense(32)(y)))
        return x + y * self.param("gamma", nn.initializers.constant(0.3), (8,))


class Aggregated(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(nn.Conv(12, (1, 1))(x))
        y = nn.relu(nn.LayerNorm()(nn.Conv(12, (3, 3), feature_group_count=6)(y)))
        return nn.ConvTranspose(8, (2, 2), strides=(2, 2))(y)


def equinox() -> jp.Model:
    """Kernels [out, in, 3, 3], biases [out, 1, 1], and a dense layer [out, in]."""
    nn = pytest.importorskip("equinox", reason="Equinox is not installed: pip install equinox").nn

    def make(key: jax.Array) -> Any:
        keys = iter(jax.random.split(key, 6))
        conv = lambda *features, **options: nn.Conv2d(*features, 3, padding=1, key=next(keys), **options)
        inverted = [conv(4, 16), nn.GroupNorm(4, 16), nn.Lambda(jax.nn.silu), conv(16, 16, groups=16), conv(16, 4)]
        mean = nn.Lambda(lambda x: jnp.tanh(x).mean((1, 2)))
        dense = [nn.Linear(4, 12, key=next(keys)), nn.Lambda(jax.nn.relu), nn.Linear(12, 5, key=next(keys))]
        return nn.Sequential([conv(3, 4), nn.Sequential(inverted), mean, *dense])

    return jp.from_equinox(make, lambda module, b, key: weighed(jax.vmap(module)(jnp.moveaxis(b["x"], 3, 1)), b["w"]))


def separable() -> jp.Model:
    batch = {"x": rand(1, SIZE, SIZE, 3), "w": rand(1, 2 * SIZE, 2 * SIZE, 8)}
    return jp.from_linen(Separable(), lambda apply, b: weighed(apply(b["x"]), b["w"]), example=batch)


class Graph(nn.Module):
    """Message passing over a graph's edges, one graph a row (Battaglia et al. 2018, arXiv:1806.01261)."""

    @nn.compact
    def __call__(self, nodes: jax.Array, edges: jax.Array) -> jax.Array:
        def pass_messages(nodes: jax.Array, edges: jax.Array) -> jax.Array:
            for step in range(2):
                ends = jnp.concatenate([nodes[edges[:, 0]], nodes[edges[:, 1]]], -1)
                messages = nn.Dense(12, name=f"zeta{step}")(ends)
                pooled = jax.ops.segment_sum(jnp.tanh(messages), edges[:, 1], nodes.shape[0])
                nodes = nodes + nn.Dense(6, name=f"alpha{step}")(nn.LayerNorm(name=f"between{step}")(pooled))
            return nodes

        return nn.vmap(
            lambda _, n, e: pass_messages(n, e), variable_axes={"params": None}, split_rngs={"params": False}
        )(self, nodes, edges)


def graph() -> jp.Model:
    return jp.from_linen(Graph(), lambda apply, b: weighed(apply(b["x"], b["edges"]), b["w"]), example=GRAPHS)


class Words(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.RNN(nn.OptimizedLSTMCell(8))(nn.Embed(10, 6)(tokens))
        return nn.Dense(10, name="b")(nn.relu(nn.Dense(16, name="c")(x)))


def words() -> jp.Model:
    return jp.from_linen(Words(), lambda apply, b: weighed(apply(b["x"]), b["w"]), example=TOKENS)


class Recurrent(nnx.Module):
    """With a cell of Flax, whose weights are whole, and one by hand, whose weights look like a pair."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rnn = nnx.RNN(nnx.GRUCell(6, 8, rngs=rngs))
        self.read, self.again = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(self.read(x) + self.again(h))
            return h, h

        _, out = jax.lax.scan(step, jnp.zeros((x.shape[0], 8)), self.rnn(x).swapaxes(0, 1))
        return out.swapaxes(0, 1)


def recurrent() -> jp.Model:
    return jp.from_nnx(Recurrent, lambda module, b: weighed(module(b["x"]), b["w"]))


def functions() -> jp.Model:
    """Names of no meaning; a table of words, and its transpose at the end."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        draw = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape) * shape[0] ** -0.5
        first = {"lookup_table": draw(0, 10, 6), "z": draw(1, 6, 16), "shift": draw(2, 16), "zz": draw(3, 6, 16)}
        return {**first, "a": draw(4, 16, 6), "last": draw(5, 6)}

    def loss(p: dict[str, jax.Array], batch: dict[str, jax.Array], key: jax.Array | None) -> jax.Array:
        x = p["lookup_table"][batch["x"]]
        x = x + (jax.nn.silu(x @ p["z"] + p["shift"]) * (x @ p["zz"])) @ p["a"] + p["last"]
        return weighed(x @ p["lookup_table"].T, batch["w"])

    return jp.Model(init, loss)


IMAGES = {"x": rand(ROWS, SIZE, SIZE, 3), "w": rand(ROWS, 5, seed=1)}
MAPS = {"x": rand(ROWS, SIZE, SIZE, 3), "w": rand(ROWS, 2 * SIZE, 2 * SIZE, 8, seed=1)}
EDGES = np.random.default_rng(2).integers(5, size=(ROWS, 7, 2)).astype(np.int32)
GRAPHS = {"x": rand(ROWS, 5, 6), "edges": EDGES, "w": rand(ROWS, 5, 6, seed=1)}
TOKENS = {"x": np.random.default_rng(3).integers(10, size=(ROWS, 4)).astype(np.int32), "w": rand(ROWS, 4, 10, seed=1)}
SERIES = {"x": rand(ROWS, 4, 6), "w": rand(ROWS, 4, 8, seed=1)}

BLOCK = {"second_last/kernel": 3, "last/kernel": 2}
CONV = {f"blocks/{i}/{path}": dim for i in range(2) for path, dim in BLOCK.items()}
GROUP = functools.partial(nnx.GroupNorm, num_groups=2)
MODELS: dict[str, tuple[Callable[[], jp.Model], Any, dict[str, int]]] = {
    "BatchNorm": (lambda: pictures(nnx.BatchNorm), IMAGES, CONV),
    "equinox": (
        equinox,
        IMAGES,
        {
            **{f"layers/1/layers/{i}/{name}": 0 for i in (0, 1, 3) for name in ("weight", "bias")},
            **{"layers/1/layers/4/weight": 1, "layers/3/weight": 0, "layers/3/bias": 0, "layers/5/weight": 1},
        },
    ),
    "separable": (
        separable,
        MAPS,
        {
            **{f"Inverted_0/Conv_{i}/kernel": dim for i, dim in enumerate((3, 3, 2))},
            **{f"Inverted_0/GroupNorm_{i}/{name}": 0 for i in range(2) for name in ("scale", "bias")},
            # Dense_0 is made first, and used last.
            **{"Inverted_0/Dense_1/kernel": 0, "Inverted_0/Dense_0/kernel": 1, "Inverted_0/Dense_0/bias": 0},
            **{"Next_0/Dense_1/kernel": 1, "Next_0/Dense_1/bias": 0, "Next_0/Dense_0/kernel": 0},
            **{f"Aggregated_0/Conv_{i}/{name}": dim for i in range(2) for name, dim in (("kernel", 3), ("bias", 0))},
            **{"Aggregated_0/LayerNorm_0/scale": 0, "Aggregated_0/LayerNorm_0/bias": 0},
            **{"Aggregated_0/ConvTranspose_0/kernel": 2},
        },
    ),
    "graph": (
        graph,
        GRAPHS,
        {
            f"{path}": dim
            for i in range(2)
            for path, dim in {
                f"zeta{i}/kernel": 1,
                f"zeta{i}/bias": 0,
                f"between{i}/scale": 0,
                f"between{i}/bias": 0,
                f"alpha{i}/kernel": 0,
            }.items()
        },
    ),
    "words": (words, TOKENS, {"Embed_0/embedding": 0, "c/kernel": 1, "c/bias": 0, "b/kernel": 0}),
    "recurrent": (recurrent, SERIES, {"read/kernel": 1, "read/bias": 0, "again/kernel": 0}),
    "functions": (functions, TOKENS, {"lookup_table": 0, "z": 1, "shift": 0, "zz": 1, "a": 0}),
}


@functools.cache
def built(name: str) -> jp.Model:
    return MODELS[name][0]()


@pytest.mark.parametrize("name", MODELS)
def test_dims(name: str) -> None:
    assert dims_of(built(name)) == MODELS[name][2]


LEAVES: dict[str, tuple[Any, dict[str, int]]] = {
    "equal widths: in pairs": (
        [(f"layers/{i}/kernel", (24, 24)) for i in range(5)],
        {"layers/0/kernel": 1, "layers/1/kernel": 0, "layers/2/kernel": 1, "layers/3/kernel": 0},
    ),
    "the pair that multiplies most": (
        [("a/kernel", (8, 16)), ("b/kernel", (16, 64)), ("c/kernel", (64, 32))],
        {"b/kernel": 1, "c/kernel": 0},
    ),
    "no bottleneck": ([("a", (64, 8)), ("b", (8, 64))], {}),
    "hidden features that do not divide": ([("a", (4, 9)), ("b", (9, 4))], {}),
    "a stack of layers": (
        [("layers/a", (3, 8, 32)), ("layers/shift", (3, 32)), ("layers/b", (3, 32, 8))],
        {"layers/a": 2, "layers/shift": 1, "layers/b": 1},
    ),
    "weights [in, out]": ([("up/weight", (8, 32)), ("down/weight", (32, 8))], {"up/weight": 1, "down/weight": 0}),
    "weights [out, in]": ([("up/weight", (32, 8)), ("down/weight", (8, 32))], {"up/weight": 0, "down/weight": 1}),
    "two readers": (
        [("a/kernel", (64, 32)), ("mean/kernel", (32, 4)), ("var/kernel", (32, 4)), ("b/kernel", (4, 32))],
        {"a/kernel": 1, "mean/kernel": 0, "var/kernel": 0},
    ),
    "a shortcut is part of no other pair": (
        [
            *[("0/one/kernel", (1, 1, 8, 8)), ("0/two/kernel", (3, 3, 8, 8)), ("0/shortcut/kernel", (1, 1, 4, 8))],
            *[("1/one/kernel", (1, 1, 8, 16)), ("1/two/kernel", (3, 3, 16, 16)), ("1/shortcut/kernel", (1, 1, 8, 16))],
        ],
        {"0/one/kernel": 3, "0/two/kernel": 2, "1/one/kernel": 3, "1/two/kernel": 2},
    ),
    "a shortcut is made between": (
        [("one/kernel", (3, 3, 8, 16)), ("cut/kernel", (1, 1, 8, 16)), ("two/kernel", (3, 3, 16, 16))],
        {"one/kernel": 3, "two/kernel": 2},
    ),
    "an image of one channel": (
        [("one/kernel", (3, 3, 1, 8)), ("two/kernel", (3, 3, 1, 8)), ("three/kernel", (3, 3, 8, 4))],
        {"one/kernel": 3, "two/kernel": 3, "three/kernel": 2},
    ),
    "groups that the ranks do not divide": (
        [("a/kernel", (1, 1, 8, 12)), ("b/kernel", (3, 3, 4, 12)), ("c/kernel", (1, 1, 12, 8))],
        {"b/kernel": 3, "c/kernel": 2},
    ),
    "a large one alone": ([("a/kernel", (512, 256)), ("b/kernel", (100, 100)), ("c", (512, 256))], {"a/kernel": 0}),
    "positions and tables": (
        [("pos_embedding", (1, 16, 24)), ("table", (63, 24)), ("tok/embed", (62, 24)), ("cls_token", (1, 1, 24))],
        {"table": 1, "tok/embed": 0},
    ),
    "feed-forwards and convolutions beside attention that is known": (
        [
            *[("attn/query/kernel", (24, 24)), ("attn/out/kernel", (24, 24))],
            *[("mlp/0/kernel", (24, 96)), ("mlp/0/bias", (96,)), ("mlp/1/kernel", (96, 24))],
            *[("pool/kernel", (24, 24)), ("classes/kernel", (24, 8)), ("lora_a", (24, 2)), ("lora_b", (2, 24))],
            *[("block/a/kernel", (3, 3, 24, 24)), ("block/a/bias", (24,)), ("block/b/kernel", (3, 3, 24, 8))],
        ],
        {"block/a/kernel": 3, "block/a/bias": 0, "block/b/kernel": 2}
        | {"attn/query/kernel": 1, "attn/out/kernel": 0, "mlp/0/kernel": 1, "mlp/0/bias": 0, "mlp/1/kernel": 0},
    ),
    "the value of a state, which is no attention's": (
        [("hidden/kernel", (8, 32)), ("policy/kernel", (32, 4)), ("value/kernel", (32, 1))],
        {"hidden/kernel": 1, "policy/kernel": 0},
    ),
    "a head that is known": (
        [("a/kernel", (8, 32)), ("b/kernel", (32, 8)), ("head/kernel", (8, 10))],
        {"a/kernel": 1, "b/kernel": 0, "head/kernel": 1},
    ),
}


@pytest.mark.parametrize(("leaves", "expected"), LEAVES.values(), ids=LEAVES)
@pytest.mark.filterwarnings("ignore:tensor=2 splits no parameter:UserWarning")
def test_of_shapes_in_order(leaves: Any, expected: dict[str, int]) -> None:
    assert tensor_dims(leaves, 2) == expected


def test_rules_come_first() -> None:
    leaves = [("a/kernel", (8, 32)), ("a/bias", (32,)), ("b/kernel", (32, 8)), ("c/kernel", (8, 32))]
    with pytest.raises(ValueError, match="no product follows another"):
        tensor_dims(leaves, 2, {"b/kernel": None})
    turned = tensor_dims(leaves, 2, order=lambda: [path for path, _ in leaves][::-1])
    assert turned == {"c/kernel": 1, "b/kernel": 0}
    by_rule = tensor_dims(leaves, 2, {"c/kernel": -1})
    assert (by_rule, by_rule.found) == ({"c/kernel": 1}, frozenset())  # who splits a leaf says what is split
    pair = tensor_dims(leaves, 2, {"c/kernel": None})
    assert (dict(pair), pair.found) == ({"a/kernel": 1, "a/bias": 0, "b/kernel": 0}, frozenset(pair))
    assert tensor_dims(leaves, 2, None, {"c/kernel": -1}) == {"c/kernel": 1}  # a table is complete
    assert tensor_dims(leaves, 2, None, None, {"c/kernel": ("embed", "mlp")}) == {"c/kernel": 1}
    names = {"c/kernel": ("embed", "kv")}  # which say nothing of this axis
    assert tensor_dims(leaves, 2, None, None, names) == {"a/kernel": 1, "a/bias": 0, "b/kernel": 0}


@functools.cache
def one_device(name: str) -> OneDevice:
    return OneDevice(built(name))


@functools.cache
def trained(name: str) -> tuple[Any, Any]:
    return one_device(name).train(SGD, MODELS[name][1], 1, STEPS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(f"pairs {name}")) for name in MODELS]
)
@pytest.mark.parametrize(
    "strategy", ["tensor=2,fsdp=2,data=2", pytest.param("tensor=2,fsdp=1", marks=pytest.mark.battery)]
)
def test_parity(name: str, strategy: str) -> None:
    """Gradients, parameters after three steps, and the collectives' closed form."""
    model, batch = built(name), MODELS[name][1]
    devices = jax.devices()[: 8 if "data" in strategy else 2]
    step = jp.make_train_step(model, SGD, strategy, devices)
    check(step, model, one_device(name).first, batch, STEPS, *trained(name))


def test_a_pair_sends_one_sum_forwards_and_one_backwards() -> None:
    """The second all-reduce is only needed if the input has a gradient. Those of the gradients are not counted."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        draw = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape)
        return {
            "before": draw(0, 5),
            "up": draw(1, 5, 32),
            "b": draw(2, 32),
            "gate": draw(3, 5, 32),
            "z": draw(4, 32, 5),
        }

    def loss(p: dict[str, jax.Array], batch: jax.Array, key: jax.Array | None, active: bool) -> jax.Array:
        x = batch * p["before"] if active else batch + jax.lax.stop_gradient(p["before"])
        return jnp.tanh((jax.nn.gelu(x @ p["up"] + p["b"]) * (x @ p["gate"])) @ p["z"]).mean()

    for active in (False, True):
        model = jp.Model(init, functools.partial(loss, active=active))
        step = jp.make_train_step(model, SGD, "tensor=2,fsdp=1", jax.devices()[:2])
        assert {leaf.path: leaf.tensor for leaf in step.layout.leaves if leaf.tensor is not None} == {
            **{"up": 1, "b": 0, "gate": 1, "z": 0}
        }
        rows = Ledger.from_jaxpr(step.trace(rand(6, 5)), step.mesh)
        sent = Counter({row.kind: row.count for row in rows if row.axes == ("tensor",)})
        assert sent == {"all-reduce": 1 + active}, active


def test_what_no_rank_can_split_is_computed_by_each_and_said() -> None:
    def loss(module: nnx.Linear, batch: jax.Array) -> jax.Array:
        return module(batch).mean()

    model = jp.from_nnx(lambda rngs: nnx.Linear(7, 3, rngs=rngs), loss)
    with pytest.warns(UserWarning, match=r"tensor=2 splits no parameter.*kernel \[7, 3\].*each of the 2 ranks holds"):
        step = jp.make_train_step(model, SGD, "tensor=2,data=4")
    state = step.init(jax.random.key(0))
    _, grads = step.value_and_grad(state, rand(8, 7))
    expected = jax.grad(lambda p: loss(step.model_def.bind(p, {}), rand(8, 7)))(
        jax.tree.map(jnp.asarray, initial(model))
    )
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    with pytest.warns(UserWarning, match="splits no"), pytest.raises(ValueError, match="each of its ranks would"):
        Estimator(model, SGD, None, None)._step(jp.Strategy(tensor=2, data=4), jax.devices())  # `plan` has better ones
    with pytest.raises(ValueError, match="splits no parameter"):  # as the user's own rules say
        jp.make_train_step(model, SGD, "tensor=2,data=4", rules={"kernel": None})


def test_groups_that_ranks_do_not_divide_are_gathered() -> None:
    """It is an error only if a rule asks for the split, not if `pairs.py` found it."""
    step = jp.make_train_step(pictures(GROUP), SGD, "tensor=4,fsdp=1", jax.devices()[:4])
    gathered = step.traced(IMAGES).notes.gathered
    assert [place.partition(" ")[0] for place in gathered] == ["reshape"]
    with pytest.raises(ValueError, match="whole heads"):
        jp.make_train_step(
            pictures(GROUP), SGD, "tensor=4,fsdp=1", jax.devices()[:4], rules={"second_last/kernel": -1}
        ).trace(IMAGES)


def test_our_resnet_is_split() -> None:
    dims = dims_of(named("resnet-tiny").model)
    pairs = {f"blocks/{i}/branch/{j}/conv/kernel": 3 - j for i in range(3) for j in range(2)}
    assert {path: dim for path, dim in dims.items() if path.endswith("conv/kernel")} == pairs
    assert dims["head/kernel"] == 1
