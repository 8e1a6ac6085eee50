"""Test which dim of each parameter is split over `tensor`: by presets, annotations and tables of models.

Expected dims are written out by hand from Megatron-LM's scheme (Shoeybi et al. 2019, section 3). Dims: L layers, D dim,
H heads, h features of a head, F feed-forward, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec

import jaxpar as jp
from jaxpar.model.paths import name_of
from jaxpar.models import gpt, llama, mlp, named
from jaxpar.parallel.tensor.dims import tensor_dims, undivided_leaves

Leaves = list[tuple[str, tuple[int, ...]]]
LLAMA: dict[str, Any] = {"vocab": 62, "dim": 24, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 42}
QKV = ("query", "key", "value")
GPT = {"vocab": 62, "dim": 30, "layers": 3, "heads": 6, "context": 12}


def leaves_of(model: jp.Model) -> Leaves:
    params, _ = jax.eval_shape(model.create, jax.random.key(0))
    return [(name_of(path), x.shape) for path, x in jax.tree_util.tree_leaves_with_path(params)]


def dims(model: jp.Model, size: int = 2, rules: Any = None) -> dict[str, int]:
    return tensor_dims(leaves_of(model), size, rules, model.rules, model.names())


def from_nnx(make: Any, **kwargs: Any) -> jp.Model:
    return jp.from_nnx(make, lambda module, batch: jnp.zeros(()), **kwargs)


def below(prefix: str, expected: dict[str, int]) -> dict[str, int]:
    return {f"{prefix}/{path}": dim for path, dim in expected.items()}


# Ours, stacked: kernels [L, in, out].
LLAMA_DIMS = {
    "embedding": 0,
    "head/kernel": 1,
    **below("layers/attention", {"query/kernel": 2, "key/kernel": 2, "value/kernel": 2, "out/kernel": 1}),
    **below("layers/ffn", {"gate/kernel": 2, "up/kernel": 2, "down/kernel": 1}),
}
GPT_DIMS = {
    "embedding": 0,
    **below("layers/attention", {f"{name}/kernel": 2 for name in QKV} | {"out/kernel": 1}),
    **below("layers/attention", {f"{name}/bias": 1 for name in QKV}),
    **below("layers", {"up/kernel": 2, "up/bias": 1, "down/kernel": 1}),
}
# Flax's attention: kernels [D, H, h] and [H, h, D], biases [H, h].
ATTENTION_DIMS = {
    **{f"{name}/kernel": 1 for name in QKV},
    **{f"{name}/bias": 0 for name in QKV},
    "out/kernel": 0,
}
STACKED_ATTENTION_DIMS = {path: dim + 1 for path, dim in ATTENTION_DIMS.items()}


class Block(nnx.Module):
    """One attention of Flax, below another module."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 0) -> None:
        make = lambda rngs: nnx.MultiHeadAttention(6, 18, decode=False, rngs=rngs)
        self.attention = nnx.split_rngs(splits=layers)(nnx.vmap(make))(rngs) if layers else make(rngs)


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        return nn.MultiHeadDotProductAttention(num_heads=6, name="attention")(x), None


class LinenScanned(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(LinenLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return layers(name="layers")(x)[0]


def linen(module: nn.Module) -> jp.Model:
    batch = jax.ShapeDtypeStruct((2, 5, 18), jnp.float32)
    return jp.from_linen(module, lambda apply, batch: apply(batch).mean(), batch)


MODELS: dict[str, tuple[Any, dict[str, int]]] = {
    "llama": (lambda: named("llama-tiny", **LLAMA).model, LLAMA_DIMS),
    "llama, tied": (
        lambda: named("llama-tiny", **LLAMA, tied=True).model,
        {path: dim for path, dim in LLAMA_DIMS.items() if path != "head/kernel"},
    ),
    "gpt": (lambda: named("gpt-tiny", **GPT).model, GPT_DIMS),
    # As many layers as features: a bias [L, D] of a row-parallel kernel [L, F, D] stays whole all the same.
    "gpt, L = F": (lambda: named("gpt-tiny", **{**GPT, "dim": 6, "layers": 24}).model, GPT_DIMS),
    "mlp": (
        lambda: named("mlp-tiny", hidden=34).model,
        {"into/kernel": 1, "into/bias": 0, "layers/linear/kernel": 1, "out/kernel": 0},
    ),
    "llama of the user's": (lambda: from_nnx(lambda r: llama.Llama(llama.Config(**LLAMA), rngs=r)), LLAMA_DIMS),
    "gpt of the user's": (lambda: from_nnx(lambda r: gpt.GPT(gpt.Config(**GPT), rngs=r)), GPT_DIMS),
    "nnx attention": (lambda: from_nnx(Block), below("attention", ATTENTION_DIMS)),
    "nnx attention, stacked": (lambda: from_nnx(lambda r: Block(r, 3)), below("attention", STACKED_ATTENTION_DIMS)),
    "nnx attention alone": (lambda: from_nnx(lambda r: Block(r).attention), ATTENTION_DIMS),
    "linen attention": (lambda: linen(nn.MultiHeadDotProductAttention(num_heads=6)), ATTENTION_DIMS),
    "linen attention, scanned": (lambda: linen(LinenScanned()), below("layers/attention", STACKED_ATTENTION_DIMS)),
}


@pytest.mark.parametrize(("make", "expected"), MODELS.values(), ids=MODELS)
def test_models_are_split_as_megatron_splits_them(make: Any, expected: dict[str, int]) -> None:
    assert dims(make()) == expected


@pytest.mark.parametrize(
    "leaves",
    [
        (  # Hugging Face's Llama; layers of a Python loop, LoRA beside one kernel
            {
                "model/embed_tokens/embedding": ((62, 24), 0),
                "model/layers/0/self_attn/q_proj/kernel": ((24, 24), 1),
                "model/layers/0/self_attn/q_proj/lora_a": ((24, 2), None),
                "model/layers/0/self_attn/q_proj/lora_b": ((2, 24), None),
                "model/layers/0/self_attn/k_proj/kernel": ((24, 12), 1),
                "model/layers/0/self_attn/k_proj/bias": ((12,), 0),
                "model/layers/0/self_attn/o_proj/kernel": ((24, 24), 0),
                "model/layers/0/self_attn/o_proj/bias": ((24,), None),
                "model/layers/0/mlp/gate_proj/kernel": ((24, 42), 1),
                "model/layers/0/mlp/down_proj/kernel": ((42, 24), 0),
                "model/layers/0/input_layernorm/weight": ((24,), None),
                "lm_head/kernel": ((24, 62), 1),
            }
        ),
        (  # Tunix's, whose heads have a dim, [D, H, h] and [H, h, D]
            {
                "embedder/input_embedding": ((62, 24), 0),
                "layers/1/attn/q_proj/w": ((24, 4, 6), 1),
                "layers/1/attn/k_proj/w": ((24, 2, 6), 1),
                "layers/1/attn/o_proj/w": ((4, 6, 24), 0),
                "layers/1/mlp/up_proj/kernel": ((24, 42), 1),
                "lm_head/w": ((24, 62), 1),
            }
        ),
        (  # Gemma of Flax's examples
            {
                "layers/0/attn/q_einsum/w": ((4, 24, 6), 0),
                "layers/0/attn/kv_einsum/w": ((2, 2, 24, 6), 1),
                "layers/0/attn/attn_vec_einsum/w": ((4, 6, 24), 0),
            }
        ),
        (  # GPT-2's names: query, key and value are fused, and stay whole
            {
                "wte/embedding": ((62, 24), 0),
                "wpe/embedding": ((12, 24), None),
                "h/0/attn/c_attn/kernel": ((24, 72), None),
                "h/0/attn/c_attn/bias": ((72,), None),
                "h/0/attn/c_proj/kernel": ((24, 24), 0),
                "h/0/mlp/c_fc/kernel": ((24, 96), 1),
                "h/0/mlp/c_fc/bias": ((96,), 0),
                "h/0/mlp/c_proj/kernel": ((96, 24), 0),
                "h/0/mlp/c_proj/bias": ((24,), None),
            }
        ),
        (  # T5's and T5X's; BERT's; Meta's, stacked; ViT's; a stack of the layers of stacks
            {
                "encoder/layers_0/attention/query/kernel": ((24, 4, 6), 1),
                "encoder/layers_0/attention/out/kernel": ((4, 6, 24), 0),
                "encoder/layers_0/mlp/wi_0/kernel": ((24, 42), 1),
                "encoder/layers_0/mlp/wo/kernel": ((42, 24), 0),
                "bert/layer/0/attention/self/query/kernel": ((24, 24), 1),
                "bert/layer/0/attention/output/dense/kernel": ((24, 24), 0),
                "bert/layer/0/intermediate/dense/kernel": ((24, 42), 1),
                "bert/layer/0/output/dense/kernel": ((42, 24), 0),
                "bert/embeddings/token_type_embeddings/embedding": ((2, 24), None),
                "meta/layers/attention/wq/kernel": ((3, 24, 28), 2),
                "meta/layers/attention/wo/kernel": ((3, 28, 24), 1),
                "meta/layers/feed_forward/w1/kernel": ((3, 24, 42), 2),
                "meta/layers/feed_forward/w2/kernel": ((3, 42, 24), 1),
                "vit/MlpBlock_3/Dense_0/kernel": ((24, 42), 1),
                "vit/MlpBlock_3/Dense_1/kernel": ((42, 24), 0),
                "deep/up/kernel": ((3, 5, 24, 42), 3),
                "deep/up/bias": ((3, 5, 42), 2),
                "deep/down/kernel": ((3, 5, 42, 24), 2),
                "deep/down/bias": ((3, 5, 24), None),
            }
        ),
    ],
)
def test_presets_know_common_names(leaves: Any) -> None:
    shapes = [(path, shape) for path, (shape, _) in leaves.items()]
    assert tensor_dims(shapes, 2) == {path: dim for path, (_, dim) in leaves.items() if dim is not None}


ZEROS, ONES, NORMAL = nnx.initializers.zeros_init(), nnx.initializers.ones_init(), nnx.initializers.normal()


class Annotated(nnx.Module):
    """Annotates in every way that NNX offers, also layers that are stacked with and without a name for their dim."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        annotated = nnx.with_partitioning

        def layer_and_attention(rngs: nnx.Rngs) -> nnx.Sequential:
            inits = {"kernel_init": annotated(NORMAL, ("embed", "mlp")), "bias_init": annotated(ZEROS, ("mlp",))}
            layer = nnx.Linear(24, 42, **inits, rngs=rngs)
            # Of [D, H, h] two dims are named, the first; the initialiser sees [D, H h].
            init, out_init = annotated(NORMAL, ("embed", "heads")), annotated(NORMAL, ("heads",))
            options = {"kernel_init": init, "out_kernel_init": out_init, "decode": False}
            return nnx.Sequential(layer, nnx.MultiHeadAttention(6, 18, **options, rngs=rngs))

        def stack(**metadata: str) -> Any:
            return nnx.split_rngs(splits=3)(nnx.vmap(layer_and_attention, transform_metadata=metadata))(rngs)

        self.one = layer_and_attention(rngs)
        self.named = stack(partition_name="layers")
        self.unnamed = stack()
        self.axis = nnx.Param(jnp.ones((24, 42)), out_sharding=(None, ("fsdp", "tensor")))
        self.spec = nnx.Param(jnp.ones((42, 24)), out_sharding=PartitionSpec("tensor"))
        self.norm = nnx.LayerNorm(24, scale_init=annotated(ONES, ("tp",)), rngs=rngs)
        self.embedding = nnx.Embed(62, 24, rngs=rngs)  # not annotated, so that it is whole: no presets here


LAYER_NAMES = {
    "layers/0/kernel": ("embed", "mlp"),
    "layers/0/bias": ("mlp",),
    **{f"layers/1/{name}/kernel": ("embed", "heads", None) for name in QKV},
    "layers/1/out/kernel": ("heads", None, None),
}
NNX_NAMES = {
    **{f"one/{path}": names for path, names in LAYER_NAMES.items()},
    **{f"named/{path}": ("layers", *names) for path, names in LAYER_NAMES.items()},
    **{f"unnamed/{path}": (None, *names) for path, names in LAYER_NAMES.items()},
    **{"axis": (None, ("fsdp", "tensor")), "spec": ("tensor", None), "norm/scale": ("tp",)},
}


def test_nnx_annotations() -> None:
    model = from_nnx(Annotated)
    assert model.names() == NNX_NAMES
    assert NNX_NAMES.keys() <= dict(leaves_of(model)).keys()
    # Biases of attention are not annotated; those of [H, h] follow their kernels [D, H, h].
    layer = {"layers/0/kernel": 1, "layers/0/bias": 0, **below("layers/1", ATTENTION_DIMS)}
    stacked = {path: dim + 1 for path, dim in layer.items()}
    expected = {**below("one", layer), **below("named", stacked), **below("unnamed", stacked), "axis": 1, "spec": 0}
    assert dims(model) == expected
    # The model has values too: it was built without a mesh.
    assert jax.tree.all(jax.tree.map(lambda x: x.size > 0, model.create(jax.random.key(0))[0]))


def test_rules_for_names_of_dims() -> None:
    model = from_nnx(Annotated)
    without = dims(model, rules={"mlp": None, "heads": None})
    assert without == {"axis": 1, "spec": 0}
    by_embed = dims(model, size=3, rules={"embed": "tensor", "axis|spec": None})  # where both are named, the user's
    kernels = ("layers/0/kernel", "layers/1/query/kernel")
    assert [by_embed[f"{stack}/{path}"] for stack in ("one", "named", "unnamed") for path in kernels] == [
        0,
        0,
        1,
        1,
        1,
        1,
    ]
    assert by_embed["one/layers/0/bias"] == 0  # "mlp", as before
    leaf = dims(model, rules={"one/layers/0/kernel": 0, "embed": None})  # a path comes before a name
    assert leaf["one/layers/0/kernel"] == 0
    assert leaf["named/layers/0/kernel"] == 2
    # All names that would be split are called whole: that is no reason to ask the presets.
    with pytest.raises(ValueError, match="splits no parameter"):
        tensor_dims([("up/kernel", (4, 6))], 2, {"mlp": None}, None, {"up/kernel": ("embed", "mlp")})


class LinenAnnotated(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        logical, physical = nn.with_logical_partitioning, nn.with_partitioning
        init, out_init = logical(NORMAL, ("embed", "heads")), logical(NORMAL, ("heads",))
        x = nn.MultiHeadDotProductAttention(6, kernel_init=init, out_kernel_init=out_init, name="attention")(x)
        x = nn.Dense(42, kernel_init=logical(NORMAL, ("embed", "mlp")), name="wide")(x)
        x = nn.Dense(18, kernel_init=physical(NORMAL, ("tensor", None)), name="narrow")(x)
        return nn.LayerNorm(scale_init=logical(ONES, ("embed",)), name="norm")(x), None


class LinenAnnotatedStack(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(
            LinenAnnotated,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = layers(name="layers")(x)
        return LinenAnnotated(name="last")(x)[0]


def test_linen_annotations() -> None:
    model = linen(LinenAnnotatedStack())
    layer_names = {
        **{f"attention/{name}/kernel": ("embed", "heads") for name in QKV},
        "attention/out/kernel": ("heads",),
        **{"wide/kernel": ("embed", "mlp"), "narrow/kernel": ("tensor", None), "norm/scale": ("embed",)},
    }
    stacked = {path: ("layers", *names) for path, names in layer_names.items()}
    expected = {f"last/{path}": names for path, names in layer_names.items()}
    expected |= {f"layers/{path}": names for path, names in stacked.items()}
    assert model.names() == expected
    assert expected.keys() <= dict(leaves_of(model)).keys()
    layer_dims = {
        **below("attention", ATTENTION_DIMS),
        **{"wide/kernel": 1, "wide/bias": 0, "narrow/kernel": 0},
    }
    assert dims(model) == below("last", layer_dims) | below(
        "layers", {path: dim + 1 for path, dim in layer_dims.items()}
    )


def test_models_without_annotations_have_no_names() -> None:
    assert from_nnx(Block).names() == {}
    assert linen(LinenScanned()).names() == {}
    assert jp.Model(lambda key: {}, lambda params, batch, key: 0).names() == {}


def test_one_device_on_the_axis_needs_no_rules_but_checks_them() -> None:
    model = named("resnet-tiny").model
    assert tensor_dims(leaves_of(model), 1, None, {}) == {}
    with pytest.raises(ValueError, match="matches the end of no"):
        dims(model, 1, rules={"no such leaf": 0})


def test_large_leaves_that_stay_whole_are_reported() -> None:
    leaves: Leaves = [
        ("position", (128, 128)),
        ("small", (127, 129)),
        ("up/kernel", (128, 512)),
        ("attn/qkv/kernel", (128, 384)),
        ("gate_up_proj/kernel", (128, 384)),
    ]
    notes = undivided_leaves(leaves, tensor_dims(leaves, 4), 4)
    assert list(notes) == ["position", "attn/qkv/kernel", "gate_up_proj/kernel"]
    assert notes["position"] == "whole on every tensor rank: no rule splits it"
    assert "several projections side by side" in notes["attn/qkv/kernel"]
    assert "gate and up side by side" in notes["gate_up_proj/kernel"]


def test_a_vocabulary_that_does_not_divide_stays_whole() -> None:
    """GPT-2's 50,257 words were refused under every `tensor`. A rule that asks for the split is still an error."""
    layers: Leaves = [("up/kernel", (8, 64)), ("down/kernel", (64, 8))]
    leaves: Leaves = [("embedding", (2049, 8)), ("head/kernel", (8, 2049)), ("head/bias", (2049,)), *layers]
    split = {"up/kernel": 1, "down/kernel": 0}
    assert tensor_dims(leaves, 2) == tensor_dims(leaves, 2, model_rules={"embedding": 0, **split}) == split
    named: Leaves = [("table", (2049, 8)), ("up", (8, 64))]
    assert tensor_dims(named, 2, names={"table": ("vocab", "embed"), "up": ("embed", "mlp")}) == {"up": 1}
    notes = undivided_leaves(leaves, split, 2)
    assert notes["embedding"].endswith("tensor=2 does not divide the 2049 on dim 0; pad them to 2050 to split it")
    assert "the 2049 on dim 1" in notes["head/kernel"]
    for asked in ({"embedding": 0}, {"head/kernel": -1}):
        with pytest.raises(ValueError, match="has 2049 on dim"):
            tensor_dims(leaves, 2, asked)
    with pytest.raises(ValueError, match="has 2049 on dim 0"):
        tensor_dims(named, 2, {"vocab": "tensor"}, names={"table": ("vocab", "embed"), "up": ("embed", "mlp")})


def test_a_vocabulary_of_any_size_gives_the_gradients_of_one_device() -> None:
    def init(key: jax.Array) -> Any:
        draw = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape)
        layer = {"up": {"kernel": draw(0, 8, 16)}, "down": {"kernel": draw(1, 16, 8)}}
        return {"embedding": draw(2, 13, 8), **layer, "head": {"kernel": draw(3, 8, 13)}}

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        x = params["embedding"][batch["tokens"]]
        x = x + jnp.tanh(x @ params["up"]["kernel"]) @ params["down"]["kernel"]
        logits = jnp.concatenate([x @ params["embedding"].T, x @ params["head"]["kernel"]], -1)
        return (jax.nn.log_softmax(logits) * batch["weights"]).mean()

    key = jax.random.key(1)
    tokens, weights = jax.random.randint(key, (8, 3), 0, 13), jax.random.normal(key, (8, 3, 26))
    batch = {"tokens": tokens, "weights": weights}
    step = jp.make_train_step(jp.Model(init=init, loss=loss), optax.sgd(0.1), "tensor=2,fsdp=2,data=2")
    params = init(jax.random.key(0))
    value, grads = step.value_and_grad(step.init(jax.random.key(0), params=params), batch)
    expected, expected_grads = jax.value_and_grad(loss)(params, batch, None)
    assert value == pytest.approx(float(expected), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, expected_grads)


def test_a_printed_layout_says_what_every_tensor_rank_holds_whole() -> None:
    step = jp.make_train_step(
        named("gpt-tiny", layers=1, vocab=257).model, optax.sgd(0.1), "tensor=2", jax.devices()[:2]
    )
    (line,) = (line for line in str(step.layout).splitlines() if line.startswith("embedding "))
    assert line.endswith(
        "whole on every tensor rank: tensor=2 does not divide the 257 on dim 0; pad them to 258 to split it"
    )


def test_tables_of_our_models_name_all_that_they_can() -> None:
    """A typing error in a table would leave a leaf whole: each of its rules matches."""
    ours: dict[str, tuple[Any, Any]] = {
        "llama-tiny": (llama, LLAMA | {"lora": 2}),
        "gpt-tiny": (gpt, GPT),
        "mlp-tiny": (mlp, {"hidden": 34}),
    }
    for name, (family, changes) in ours.items():
        model = named(name, **changes).model
        assert model.rules is family.RULES
        assert tensor_dims(leaves_of(model), 2, family.RULES, {}) == dims(model)


def test_features_on_a_second_dim_in_blocks_that_tensor_splits_unlike_are_no_layers() -> None:
    """S4's blocks, whose `nn.vmap` puts features on dim 1. The last one's kernel pairs with the decoder's, so that the
    blocks are not alike; the features of the first were taken for 10 layers, whose dim a rule that nobody wrote split.
    """
    seq = {"B": (6, 10), "C": (6, 10, 2), "D": (1, 10), "P": (6, 10), "log_step": (1, 10)}
    dense = {"bias": (10,), "kernel": (10, 10)}
    block = {"seq": seq, "norm": {"bias": (10,), "scale": (10,)}, "out": dense, "out2": dense}
    zeros = lambda shapes: {
        name: jnp.zeros(inner) if isinstance(inner, tuple) else zeros(inner) for name, inner in shapes.items()
    }
    ends = {"encoder": {"bias": (10,), "kernel": (3, 10)}}, {"decoder": {"bias": (67,), "kernel": (10, 67)}}
    init = lambda key: zeros(ends[0] | {"layers_0": block, "layers_1": block} | ends[1])
    model = jp.Model(init=init, loss=lambda params, batch, key: jax.numpy.float32(0))
    make = lambda text: jp.make_train_step(model, optax.sgd(0.1), f"pipe=2,{text},microbatches=2")
    assert make("fsdp=2,tensor=2").layout.storage.cut
    assert {leaf.layers for leaf in make("fsdp=4").layout.leaves if "layers" in leaf.path} == {2}
