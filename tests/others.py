"""Models of Equinox and Haiku, written as their users write them: for the battery and for tests of each.

Import it where the packages are installed. Dims: B rows, T positions, D dim, V vocab, L layers.
"""

import functools
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax

import jaxpar as jp

VOCAB, LENGTH, DIM, HEADS, LAYERS = 40, 8, 24, 4, 2


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


class Block(eqx.Module):
    """A layer of one sequence [T, D], as all of Equinox's take no rows; its activation is a leaf, and no array."""

    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.LayerNorm]
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, dropout: float, *, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, DIM, key=first)
        self.norms = [eqx.nn.LayerNorm(DIM) for _ in range(2)]
        self.mlp = eqx.nn.MLP(DIM, DIM, 32, depth=1, activation=jax.nn.gelu, key=second)
        self.dropout = eqx.nn.Dropout(dropout)

    def __call__(self, x_TD: jax.Array, key: jax.Array) -> jax.Array:
        hidden, mask = jax.vmap(self.norms[0])(x_TD), jnp.tril(jnp.ones((len(x_TD), len(x_TD)), bool))
        x_TD = x_TD + self.dropout(self.attention(hidden, hidden, hidden, mask=mask), key=key)
        return x_TD + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x_TD))


class Decoder(eqx.Module):
    """Blocks in a list, or as one stack that `eqx.filter_vmap` makes and `lax.scan` runs."""

    embed: eqx.nn.Embedding
    position: jax.Array
    offsets: jax.Array  # integers: an array that is no parameter
    blocks: Any
    head: eqx.nn.Linear
    stacked: bool = eqx.field(static=True)

    def __init__(self, stacked: bool, dropout: float, *, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.Embedding(VOCAB, DIM, key=keys[0])
        self.position = jax.random.normal(keys[1], (LENGTH, DIM)) * 0.1
        self.offsets = jnp.arange(LENGTH)
        layers = jax.random.split(keys[2], LAYERS)
        block = lambda key: Block(dropout, key=key)
        self.blocks = eqx.filter_vmap(block)(layers) if stacked else [block(key) for key in layers]
        self.head = eqx.nn.Linear(DIM, VOCAB, key=keys[3])
        self.stacked = stacked

    def __call__(self, tokens_T: jax.Array, key: jax.Array) -> jax.Array:
        x_TD = jax.vmap(self.embed)(tokens_T) + self.position[self.offsets]
        keys = jax.random.split(key, LAYERS)
        if self.stacked:
            arrays, static = eqx.partition(self.blocks, eqx.is_array)
            layer = lambda x_TD, of: (eqx.combine(of[0], static)(x_TD, of[1]), None)
            x_TD, _ = jax.lax.scan(layer, x_TD, (arrays, keys))
        else:
            for block, one in zip(self.blocks, keys, strict=True):
                x_TD = block(x_TD, one)
        return jax.vmap(self.head)(x_TD)


def next_token(module: Decoder, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
    tokens_BT = batch["tokens"]
    logits = jax.vmap(module)(tokens_BT[:, :-1], jax.random.split(key, len(tokens_BT)))
    return cross_entropy(logits, tokens_BT[:, 1:])


def decoder(stacked: bool, dropout: float = 0.0) -> jp.Model:
    return jp.from_equinox(lambda key: Decoder(stacked, dropout, key=key), next_token)


class ResNet(eqx.Module):
    """Images [3, H, W] -> logits [10], with BatchNorm over the rows of a `vmap`, whose statistics are state."""

    stem: eqx.nn.Conv2d
    convolutions: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.BatchNorm]
    head: eqx.nn.Linear

    def __init__(self, channels: int, *, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        conv = lambda ins, key, **more: eqx.nn.Conv2d(ins, channels, 3, padding=1, use_bias=False, key=key, **more)
        self.stem = conv(3, keys[0], stride=2)
        self.convolutions = [conv(channels, key) for key in keys[1:3]]
        self.norms = [eqx.nn.BatchNorm(channels, axis_name="batch", momentum=0.9, mode="batch") for _ in range(3)]
        self.head = eqx.nn.Linear(channels, 10, key=keys[3])

    def __call__(self, image: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
        x, state = self.norms[0](self.stem(image), state)
        x = jax.nn.relu(x)
        for convolution, norm in zip(self.convolutions, self.norms[1:], strict=True):
            y, state = norm(convolution(x), state)
            x = x + jax.nn.relu(y)
        return self.head(x.mean(axis=(1, 2))), state


def classified(module: ResNet, state: eqx.nn.State, batch: dict[str, jax.Array], key: jax.Array) -> Any:
    run = jax.vmap(module, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    logits, state = run(batch["image"].transpose(0, 3, 1, 2), state)
    return cross_entropy(logits, batch["label"]), state


def resnet() -> jp.Model:
    return jp.from_equinox(lambda key: eqx.nn.make_with_state(ResNet)(13, key=key), classified)


def haiku_decoder(dropout: float = 0.0, stacked: bool = True) -> jp.Model:
    """As in the recipe of docs/equinox-haiku.md. Haiku's modules take rows; `hk.layer_stack` is its scan, and dropout a
    function that asks for keys.
    """

    def block(x_BTD: jax.Array, train: bool) -> jax.Array:
        norm = lambda x: hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)
        length = x_BTD.shape[1]
        hidden, mask = norm(x_BTD), jnp.tril(jnp.ones((1, 1, length, length), bool))
        init = hk.initializers.VarianceScaling()
        attention = hk.MultiHeadAttention(HEADS, DIM // HEADS, model_size=DIM, w_init=init, with_bias=False)
        attended = attention(hidden, hidden, hidden, mask=mask)
        if train and dropout:
            attended = hk.dropout(hk.next_rng_key(), dropout, attended)
        x_BTD = x_BTD + attended
        return x_BTD + hk.Linear(DIM)(jax.nn.gelu(hk.Linear(32)(norm(x_BTD))))

    def run(tokens_BT: jax.Array, train: bool) -> jax.Array:
        x_BTD = hk.Embed(VOCAB, DIM)(tokens_BT)
        x_BTD += hk.get_parameter("position", (LENGTH, DIM), init=hk.initializers.RandomNormal(0.1))
        if stacked:
            x_BTD = hk.experimental.layer_stack(LAYERS)(lambda x: block(x, train))(x_BTD)
        else:
            for _ in range(LAYERS):
                x_BTD = block(x_BTD, train)
        return hk.Linear(VOCAB)(x_BTD)

    net = hk.transform(run)

    def init(key: jax.Array) -> Any:
        return net.init(key, jnp.zeros((1, LENGTH), jnp.int32), True)

    def loss(params: Any, batch: dict[str, jax.Array], key: jax.Array | None) -> jax.Array:
        return cross_entropy(net.apply(params, key, batch["tokens"][:, :-1], key is not None), batch["tokens"][:, 1:])

    return jp.Model(init, loss, bind=lambda params, _: functools.partial(net.apply, params))
