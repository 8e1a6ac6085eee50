"""The models of the test battery: tiny, of awkward sizes, and written as a user would, without a thought for meshes.

Each entry is a model and a global batch of 16 rows. Between them they hold every form in which parameters, layers,
randomness and statistics reach a loss. Dims: B rows, T positions, D dim, V vocab, L layers.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import jaxpar as jp
from jaxpar.data import pad_rows
from jaxpar.models import llama, named

ROWS = 16


@dataclass(frozen=True)
class Entry:
    """A model, a NumPy batch with 16 rows, and how many layer stacks a trace of its loss holds."""

    name: str
    model: jp.Model
    batch: Any
    stacks: int


def random_tokens(vocab: int, length: int, rows: int = ROWS, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(vocab, size=(rows, length)).astype(np.int32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


# Decoders, scanned with nnx.scan. 126 and 131 do not divide: the embedding, the head and the stacked query kernel
# [3, 126, 126] are large enough to be padded, key and value [3, 126, 42] are not, ffn divides by 8.
GPT = llama.Config(vocab=131, dim=126, layers=3, heads=9, kv_heads=3, ffn=48)
NARROW = llama.Config(vocab=61, dim=24, layers=3, heads=4, kv_heads=2, ffn=40)


def gpt() -> Entry:
    model = jp.from_nnx(lambda rngs: llama.Llama(GPT, rngs=rngs), llama.loss)
    return Entry("gpt", model, {"tokens": random_tokens(GPT.vocab, 11)}, stacks=1)


def gpt_dropout() -> Entry:
    config = llama.Config(**{**vars(NARROW), "dropout": 0.3})
    model = jp.from_nnx(lambda rngs: llama.Llama(config, rngs=rngs), llama.loss)
    return Entry("gpt_dropout", model, {"tokens": random_tokens(config.vocab, 11)}, stacks=1)


def gpt_masked() -> Entry:
    """A last batch: 13 rows of different lengths, filled up to 16, so that the last of 8 devices counts nothing."""
    config = llama.Config(**{**vars(NARROW), "tied": True})
    batch, real = pad_rows({"tokens": random_tokens(config.vocab, 11, rows=13)}, ROWS)
    lengths = 1 + np.arange(ROWS) * 7 % 10
    batch["mask"] = real[:, None] * (np.arange(10) < lengths[:, None]).astype(np.float32)
    model = jp.from_nnx(lambda rngs: llama.Llama(config, rngs=rngs), llama.loss)
    return Entry("gpt_masked", model, batch, stacks=1)


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x_BTD: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        dim = x_BTD.shape[-1]
        x_BTD = x_BTD + nn.MultiHeadDotProductAttention(num_heads=3)(nn.LayerNorm()(x_BTD), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * dim + 1)(nn.LayerNorm()(x_BTD)))
        return x_BTD + nn.Dense(dim)(hidden), None


class LinenGPT(nn.Module):
    """GPT-2's shape: learned positions, LayerNorm with bias, biases everywhere, layers scanned and rematted.

    The module has no hash, since its config has none.
    """

    config: SimpleNamespace

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        vocab, dim, layers = self.config.sizes
        embed = nn.Embed(vocab, dim)
        position = self.param("position", nn.initializers.normal(0.1), (tokens_BT.shape[1], dim))
        stack = nn.scan(
            nn.remat(LinenLayer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=layers,
        )
        x_BTD, _ = stack(name="layers")(embed(tokens_BT) + position, nn.make_causal_mask(tokens_BT))
        return nn.Dense(vocab)(nn.LayerNorm()(x_BTD))


def linen_loss(apply: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return cross_entropy(apply(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])


def gpt_linen() -> Entry:
    module, batch = LinenGPT(SimpleNamespace(sizes=(61, 30, 3))), {"tokens": random_tokens(61, 11)}
    return Entry("gpt_linen", jp.from_linen(module, linen_loss, example=batch), batch, stacks=1)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x_BTD: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x_BTD + nn.Dense(x_BTD.shape[-1])(nn.gelu(nn.Dense(160)(nn.LayerNorm()(x_BTD)))), None


class Decoder(nn.Module):
    """Quick layers, a tied embedding and a norm behind them: what stands after the loop could be gathered beside it."""

    vocab: int = 480
    dim: int = 96

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab, self.dim)
        stack = nn.scan(
            nn.remat(LinenBlock, prevent_cse=False), variable_axes={"params": 0}, split_rngs={"params": True}, length=8
        )
        return embed.attend(nn.LayerNorm()(stack(name="blocks")(embed(tokens_BT), None)[0]))


def decoder_linen() -> Entry:
    batch = {"tokens": random_tokens(480, 13)}
    return Entry("decoder_linen", jp.from_linen(Decoder(), linen_loss, example=batch), batch, stacks=1)


class MLP(nnx.Module):
    def __init__(self, *dims: int, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(dims)])

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x_BD = jax.nn.relu(layer(x_BD))
        return self.layers[-1](x_BD)


def mlp() -> Entry:
    """No stack at all, and hardly a dim that divides."""

    def loss(module: MLP, batch: dict[str, jax.Array]) -> jax.Array:
        return optax.l2_loss(module(batch["x"]).astype(jnp.float32), batch["y"]).sum(axis=-1).mean()

    random = np.random.default_rng(0)
    batch = {"x": random.normal(size=(ROWS, 7)).astype(np.float32)}
    batch["y"] = np.sin(batch["x"] @ random.normal(size=(7, 17))).astype(np.float32)
    return Entry("mlp", jp.from_nnx(lambda rngs: MLP(7, 15, 16, 17, rngs=rngs), loss), batch, stacks=0)


def function() -> Entry:
    """Plain functions: tied embedding, and stacked weights that are scaled and cast before `lax.scan` sees them."""
    vocab, dim, hidden, layers = 61, 24, 41, 3

    def init(key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, 3)
        return {
            "embedding": jax.random.normal(keys[0], (vocab, dim)) * 0.2,
            "layers": {
                "up": jax.random.normal(keys[1], (layers, dim, hidden)),
                "down": jax.random.normal(keys[2], (layers, hidden, dim)),
                "gain": jnp.ones((layers, dim)),
            },
        }

    def loss(params: dict[str, Any], batch: dict[str, jax.Array], key: jax.Array | None) -> jax.Array:
        def body(x_BTD: jax.Array, layer: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            mixed = jnp.cumsum(x_BTD * layer["gain"], axis=1) / (1 + jnp.arange(x_BTD.shape[1]))[:, None]
            return x_BTD + jnp.tanh(mixed @ layer["up"]) @ layer["down"], None

        embedding = params["embedding"]
        scale = {"up": dim**-0.5, "down": hidden**-0.5, "gain": 1.0}
        stacked = {name: (leaf * scale[name]).astype(embedding.dtype) for name, leaf in params["layers"].items()}
        x_BTD, _ = jax.lax.scan(body, embedding[batch["tokens"][:, :-1]], stacked)
        return cross_entropy(x_BTD @ embedding.T, batch["tokens"][:, 1:])

    return Entry("function", jp.Model(init=init, loss=loss), {"tokens": random_tokens(vocab, 11)}, stacks=1)


class Residual(nnx.Module):
    def __init__(self, channels: int, *, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(channels, channels, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(channels, momentum=0.9, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.relu(self.norm(self.conv(x)))


class ResNet(nnx.Module):
    """Images float32 [B, H, W, 3] -> logits [B, 10]."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs) -> None:
        # Without a bias: its gradient is zero before BatchNorm, and what is left of it is rounding, as in LinenResNet.
        self.stem = nnx.Conv(3, channels, (3, 3), strides=2, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(channels, momentum=0.9, rngs=rngs)
        self.blocks = nnx.List([Residual(channels, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(channels, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))


def images() -> dict[str, np.ndarray]:
    """Rows of different brightness: statistics over one replica's rows are far from those over all of them."""
    random = np.random.default_rng(0)
    brightness = np.linspace(-2, 2, ROWS)[:, None, None, None]
    noise = random.normal(size=(ROWS, 8, 8, 3))
    return {"image": (noise + brightness).astype(np.float32), "label": np.arange(ROWS, dtype=np.int32) * 3 % 10}


def resnet() -> Entry:
    def loss(module: ResNet, batch: dict[str, jax.Array]) -> jax.Array:
        return cross_entropy(module(batch["image"]), batch["label"])

    return Entry("resnet", jp.from_nnx(lambda rngs: ResNet(13, rngs=rngs), loss), images(), stacks=0)


class LinenResNet(nn.Module):
    channels: int = 13

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        def norm(x: jax.Array) -> jax.Array:
            return nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))

        x = norm(nn.Conv(self.channels, (3, 3), strides=2)(images))
        for _ in range(2):
            x = x + norm(nn.Conv(self.channels, (3, 3), use_bias=False)(x))
        return nn.Dense(10)(x.mean(axis=(1, 2)))


def resnet_linen() -> Entry:
    def loss(apply: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return cross_entropy(apply(batch["image"], train=apply.train), batch["label"])

    return Entry("resnet_linen", jp.from_linen(LinenResNet(), loss, example=images()), images(), stacks=0)


class CrossLayer(nnx.Module):
    """Attention over `memory`, or over itself where there is none, and a feed-forward of an odd width."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(dim, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(3, dim, decode=False, rngs=rngs)
        self.up = nnx.Linear(dim, 2 * dim + 1, rngs=rngs)
        self.down = nnx.Linear(2 * dim + 1, dim, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, memory: jax.Array | None) -> jax.Array:
        query = self.norms[0](x_BTD)
        x_BTD = x_BTD + self.attention(query, query if memory is None else memory)
        return x_BTD + self.down(jax.nn.gelu(self.up(self.norms[1](x_BTD))))


class EncoderDecoder(nnx.Module):
    """Two stacks of different depth; what the encoder made, which is no parameter, enters every decoder layer."""

    def __init__(self, vocab: int, dim: int, *, rngs: nnx.Rngs) -> None:
        def stack(layers: int) -> CrossLayer:
            return nnx.split_rngs(splits=layers)(nnx.vmap(lambda rngs: CrossLayer(dim, rngs=rngs)))(rngs)

        self.embedding = nnx.Embed(vocab, dim, rngs=rngs)
        self.encoder = stack(2)
        self.decoder = stack(3)
        self.head = nnx.Linear(dim, vocab, rngs=rngs)

    def __call__(self, source_BT: jax.Array, target_BT: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry, None), out_axes=nnx.Carry)
        @nnx.remat
        def run(layer: CrossLayer, x_BTD: jax.Array, memory: jax.Array | None) -> jax.Array:
            return layer(x_BTD, memory)

        memory = run(self.encoder, self.embedding(source_BT), None)
        return self.head(run(self.decoder, self.embedding(target_BT), memory))


def encoder_decoder() -> Entry:
    """Also returns metrics: a ratio that is a `jp.Mean` and a plain mean over rows."""
    vocab = 31

    def loss(module: EncoderDecoder, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, Any]]:
        logits = module(batch["source"], batch["target"]).astype(jnp.float32)
        right = (logits.argmax(axis=-1) == batch["label"]) * batch["counted"]
        metrics = {
            "accuracy": jp.Mean(right.sum(), batch["counted"].sum()),
            "logit_square": jnp.square(logits).mean(),
        }
        return cross_entropy(logits, batch["label"]), metrics

    batch = {name: random_tokens(vocab, 7 + i, seed=i) for i, name in enumerate(("source", "target", "label"))}
    batch["target"] = batch["target"][:, :7]
    batch["label"] = batch["label"][:, :7]
    batch["counted"] = (np.arange(7) < 1 + np.arange(ROWS)[:, None] % 7).astype(np.float32)
    model = jp.from_nnx(lambda rngs: EncoderDecoder(vocab, 30, rngs=rngs), loss)
    return Entry("encoder_decoder", model, batch, stacks=2)


def gpt2_dropout() -> Entry:
    model = named("gpt-tiny", vocab=61, dim=30, heads=3, layers=3, context=12, dropout=0.3).model
    return Entry("gpt2_dropout", model, {"tokens": random_tokens(61, 11)}, stacks=1)


def mixture() -> Entry:
    """Three of six experts, none dropped: with so few tokens, several find no slot."""
    sizes = {"vocab": 61, "dim": 24, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 10, "ffn": 20}
    model = named("mixtral-tiny", **sizes, experts=6, chosen=3, qk_norm=True, z=0.01).model
    return Entry("mixture", model, {"tokens": random_tokens(61, 11)}, stacks=1)


def resnet_bottleneck() -> Entry:
    """With the stem of ImageNet's."""
    model = named("resnet-tiny", width=13, channels=3, blocks=(1, 1), bottleneck=True, stem=7).model
    return Entry("resnet_bottleneck", model, images(), stacks=0)


def mlp_stack() -> Entry:
    return Entry("mlp_stack", named("mlp-tiny", hidden=131, layers=3, channels=3).model, images(), stacks=1)


_ENTRIES = (
    gpt,
    gpt_linen,
    mlp,
    function,
    resnet,
    resnet_linen,
    gpt_dropout,
    gpt_masked,
    encoder_decoder,
    gpt2_dropout,
    resnet_bottleneck,
    mlp_stack,
    decoder_linen,
    mixture,
)
ZOO: dict[str, Callable[[], Entry]] = {entry.__name__: entry for entry in _ENTRIES}

if find_spec("equinox") and find_spec("haiku"):  # without them tests/model says that they are missing
    import others

    TOKENS = {"tokens": random_tokens(others.VOCAB, others.LENGTH + 1)}
    ZOO |= {
        "equinox_stack": lambda: Entry("equinox_stack", others.decoder(stacked=True), TOKENS, stacks=1),
        "equinox_resnet": lambda: Entry("equinox_resnet", others.resnet(), images(), stacks=0),
        "haiku_stack": lambda: Entry("haiku_stack", others.haiku_decoder(), TOKENS, stacks=1),
    }
