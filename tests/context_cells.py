"""The battery of the context axis: models that know nothing of it, weighed token by token, and cells."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cells import OneDevice, check
from flax import linen as nn
from tensor_cells import DIM, SGD, STEPS, VOCAB, Loop
from zoo import random_tokens

import jaxpar as jp
from jaxpar.models import gpt, llama, named
from jaxpar.numerics.logits.cross_entropy import cross_entropy

LENGTH, HEADS = 16, 4
LAYER = ("query", "key", "value", "out", "up", "down")  # what a layer of plain JAX has


def weighed(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> jp.Mean:
    """Of weights that differ from token to token: a plain mean would not see tokens out of their places."""
    nats = -jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), targets[..., None], -1)[..., 0]
    return jp.Mean(jnp.sum(nats * weights), jnp.sum(weights))


def next_token(module: Any, batch: Any) -> jp.Mean:
    tokens = batch["tokens"]
    return weighed(module(tokens[:, :-1]), tokens[:, 1:], batch["mask"])


def llama_gqa() -> jp.Model:
    """Scanned layers, grouped queries, rotary positions."""
    config = llama.Config(vocab=VOCAB, dim=DIM, layers=2, heads=8, kv_heads=4, ffn=24)
    return jp.from_nnx(lambda rngs: llama.Llama(config, rngs=rngs), llama.loss, llama.RULES)


def gpt2() -> jp.Model:
    """Learned positions, a tied head, and dropout."""
    config = gpt.Config(vocab=VOCAB, context=24, dim=DIM, layers=2, heads=HEADS, dropout=0.2)
    return jp.from_nnx(lambda rngs: gpt.GPT(config, rngs=rngs), gpt.loss, gpt.RULES)


def shifted(module: Any, batch: Any) -> jp.Mean:
    """As transformers writes it: all tokens go in, and the last position's logits are left out."""
    tokens = batch["tokens"][:, :-1]
    return weighed(module(tokens)[:, :-1], tokens[:, 1:], batch["mask"][:, 1:])


def loop() -> jp.Model:
    """Flax's own attention and a rule of differentiation, in a Python loop."""
    return jp.from_nnx(lambda rngs: Loop(rngs, HEADS, layers=2, positions=32), shifted)


class EncoderLayer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(nn.LayerNorm()(x))
        return x + nn.Dense(DIM)(nn.gelu(nn.Dense(48)(nn.LayerNorm()(x))))


class EncoderDecoder(nn.Module):
    """Cross attention to a source of another length; a summary that is its mean."""

    @nn.compact
    def __call__(self, source: jax.Array, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB, DIM)
        memory = EncoderLayer()(embed(source))
        x = embed(tokens) + nn.Dense(DIM)(memory.mean(axis=1, keepdims=True))
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(nn.LayerNorm()(x), nn.LayerNorm()(memory))
        return embed.attend(nn.LayerNorm()(x))


def encoder_decoder() -> jp.Model:
    def loss(apply: Any, batch: Any) -> jp.Mean:
        return weighed(apply(batch["source"], batch["tokens"][:, :-1]), batch["tokens"][:, 1:], batch["mask"])

    return jp.from_linen(EncoderDecoder(), loss, example=batch_of(2))


class Listener(nn.Module):
    """As Whisper: frames, whose convolution overlaps, are whole on every rank; of their number no rank has a part."""

    @nn.compact
    def __call__(self, frames: jax.Array, tokens: jax.Array) -> jax.Array:
        memory = EncoderLayer()(nn.gelu(nn.Conv(DIM, (3,))(frames)))
        x = nn.Embed(VOCAB, DIM)(tokens)
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(nn.LayerNorm()(x), nn.LayerNorm()(memory))
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


def listener() -> jp.Model:
    def loss(apply: Any, batch: Any) -> jp.Mean:
        logits = apply(batch["image"][:, 0, :-1], batch["tokens"][:, :-1])
        return weighed(logits, batch["tokens"][:, 1:], batch["mask"])

    return jp.from_linen(Listener(), loss, example=batch_of(2))


def _draws(key: jax.Array, **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    """The parameters of most models, and others of these shapes."""
    draw = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape) * shape[0] ** -0.5
    params = {name: draw(i, DIM, DIM) for i, name in enumerate(LAYER)}
    params |= {"table": draw(7, VOCAB, DIM), "head": draw(8, DIM, VOCAB), "bias": draw(9, 8, HEADS)}
    normal = lambda i, shape: 0.3 * jax.random.normal(jax.random.fold_in(key, i), shape)
    return params | {name: normal(11 + i, shape) for i, (name, shape) in enumerate(shapes.items())}


def _model(body: Callable[..., jax.Array], **shapes: tuple[int, ...]) -> jp.Model:
    """A head on `body(params, batch)`, with parameters of these shapes beside the usual ones."""

    def loss(params: Any, batch: Any, key: jax.Array | None) -> jp.Mean:
        return weighed(body(params, batch) @ params["head"], batch["tokens"][:, 1:], batch["mask"])

    return jp.Model(init=functools.partial(_draws, **shapes), loss=loss)


def _heads(params: Any, x: jax.Array) -> list[jax.Array]:
    """Queries, keys and values [B, T, H, h]."""
    return [(x @ params[name]).reshape(*x.shape[:2], HEADS, -1) for name in ("query", "key", "value")]


def _functions(attend: Callable[..., jax.Array], length: int = LENGTH) -> jp.Model:
    """A decoder in plain JAX, whose layers are scanned: `attend(params, q, k, v, batch)` on [B, T, H, h]."""

    def init(key: jax.Array) -> dict[str, Any]:
        first, second = _draws(key), _draws(jax.random.fold_in(key, 99))
        return first | {name: jnp.stack([first[name], second[name]]) for name in LAYER}

    def loss(params: Any, batch: Any, key: jax.Array | None) -> tuple[jp.Mean, Any]:
        def layer(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
            x = x + attend(params, *_heads(own, x), batch).reshape(x.shape) @ own["out"]
            return x + jnp.tanh(x @ own["up"]) @ own["down"], None

        tokens = batch["tokens"][:, : length + 1]
        x, _ = jax.lax.scan(layer, params["table"][tokens[:, :-1]], {name: params[name] for name in LAYER})
        logits, targets = (x @ params["head"])[:, :-1], tokens[:, 1:-1]  # one position fewer than went in
        found = weighed(logits, targets, batch["mask"][:, 1:length])
        right = (logits.argmax(-1) == targets).mean()
        return jp.Mean(found.total + 0.1 * found.count * jnp.square(params["head"]).sum(), found.count), {
            "right": right
        }

    return jp.Model(init=init, loss=loss)


def _plain(scores: jax.Array, v: jax.Array) -> jax.Array:
    t, s = scores.shape[-2:]
    scores = jnp.where(jnp.arange(s) <= jnp.arange(t)[:, None], scores, -1e9)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


def alibi() -> jp.Model:
    """Linear biases, by a product whose left operand has the keys."""

    def attend(params: Any, q: jax.Array, k: jax.Array, v: jax.Array, batch: Any) -> jax.Array:
        places = jnp.arange(q.shape[1])
        slopes = 2.0 ** -jnp.arange(1, HEADS + 1)
        scores = jnp.einsum("bshd,bthd->bhts", k, q) * (DIM // HEADS) ** -0.5
        return _plain(scores - slopes[:, None, None] * (places[:, None] - places), v)

    return _functions(attend)


def t5() -> jp.Model:
    """A learned bias for each distance, as T5 has it, through JAX's own attention."""

    def attend(params: Any, q: jax.Array, k: jax.Array, v: jax.Array, batch: Any) -> jax.Array:
        places = jnp.arange(q.shape[1])
        distance = jnp.clip(places[:, None] - places, 0, 7)
        bias = params["bias"][distance].transpose(2, 0, 1)[None]
        return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True)

    return _functions(attend)


def bert() -> jp.Model:
    """As transformers writes it, of 15 positions: padding, weights that are dropped, and a number for each head."""

    def attend(params: Any, q: jax.Array, k: jax.Array, v: jax.Array, batch: Any) -> jax.Array:
        counts = batch["document"][:, : k.shape[1]] < 2
        bias = jax.lax.select(counts, jnp.zeros(counts.shape), jnp.full(counts.shape, jnp.finfo(q.dtype).min))
        dropout = {"dropout_rng": jax.random.key(5), "dropout_rate": 0.2, "deterministic": False}
        weights = nn.dot_product_attention_weights(q, k, bias=bias[:, None, None], **dropout)
        weights = jnp.einsum("...hqk,h->...hqk", weights, params["bias"][0])
        return jnp.einsum("...hqk,...khd->...qhd", weights, v)

    return _functions(attend, length=LENGTH - 1)


def spelled_out() -> jp.Model:
    """Attention of documents that share a row, written out, heads before positions; its mask is made in every layer."""

    def attend(params: Any, q: jax.Array, k: jax.Array, v: jax.Array, batch: Any) -> jax.Array:
        (q, k, v), ids = (x.transpose(0, 2, 1, 3) for x in (q, k, v)), batch["document"]
        seen = (ids[:, None, :, None] == ids[:, None, None]) & jnp.tril(jnp.ones((q.shape[2], k.shape[2]), bool))
        scores = jnp.where(seen, q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3]), jnp.finfo(q.dtype).min)
        return (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3)

    return _functions(attend)


def window() -> jp.Model:
    return _functions(lambda params, q, k, v, batch: jp.attention(q, k, v, window=5))


def packed() -> jp.Model:
    """Several documents in a row."""
    return _functions(lambda params, q, k, v, batch: jp.attention(q, k, v, segment_ids=batch["document"]))


def translator() -> jp.Model:
    """An encoder and a decoder by `jp.attention`, and cross attention to a source of another length."""

    def body(params: Any, batch: Any) -> jax.Array:
        def attended(x: jax.Array, memory: jax.Array, causal: bool) -> jax.Array:
            q, (_, k, v) = _heads(params, x)[0], _heads(params, memory)
            return x + jp.attention(q, k, v, causal=causal).reshape(x.shape) @ params["out"]

        memory, x = params["table"][batch["source"]], params["table"][batch["tokens"][:, :-1]]
        memory = attended(memory, memory, causal=False)
        memory = memory + jnp.tanh(memory @ params["up"]) @ params["down"]
        return attended(attended(x, x, causal=True), memory, causal=False)

    return _model(body)


def chunked() -> jp.Model:
    """A loss whose logits never exist whole."""

    def loss(params: Any, batch: Any, key: jax.Array | None) -> jp.Mean:
        hidden = jnp.tanh(params["table"][batch["tokens"][:, :-1]] @ params["up"])
        hidden = hidden + jp.attention(*[hidden.reshape(*hidden.shape[:2], HEADS, -1)] * 3).reshape(hidden.shape)
        nats = cross_entropy(hidden, params["head"], batch["tokens"][:, 1:], chunk=16)
        return jp.Mean(jnp.sum(nats * batch["mask"]), jnp.sum(batch["mask"]))

    return jp.Model(init=_draws, loss=loss)


def flattened(shift: bool = False) -> jp.Model:
    """Tokens of all rows in one dim, as most losses have them: before the feed-forward, and in the loss."""

    def loss(params: Any, batch: Any, key: jax.Array | None) -> tuple[jp.Mean, Any]:
        tokens, targets, weights = batch["tokens"][:, :-1], batch["tokens"][:, 1:], batch["mask"]
        x = params["table"][tokens]
        x = x + jp.attention(*_heads(params, x)).reshape(x.shape) @ params["out"]
        every = x.reshape(-1, DIM)
        every = every / jnp.sqrt(jnp.square(every).mean(-1, keepdims=True) + 1e-6)
        x = x + jax.nn.relu(every @ params["up"]).reshape(x.shape) @ params["down"]
        logits = x @ params["head"]
        if shift:
            logits, targets, weights = logits[:, :-1], targets[:, :-1], weights[:, 1:]
        logits, labels, weights = logits.reshape(-1, VOCAB), targets.reshape(-1), weights.reshape(-1)
        valid = labels != 3
        one = jax.nn.one_hot(labels, VOCAB)
        smooth = -(one * 0.9 + 0.1 / VOCAB) * jax.nn.log_softmax(logits)
        nats = jnp.where(valid, optax.softmax_cross_entropy_with_integer_labels(logits, labels) + smooth.sum(-1), 0)
        nats = nats - 0.5 * jnp.square(logits[jnp.arange(labels.size), labels])
        worst = jnp.max(jnp.where(valid, nats, 0).reshape(tokens.shape[0], -1), axis=1).sum()
        right = (logits.argmax(-1) == labels).astype(jnp.float32).mean()
        return jp.Mean(jnp.sum(nats * weights) + 0.1 * worst, jnp.sum(weights * valid)), {"right": right}

    return jp.Model(init=_draws, loss=loss)


def flattened_shifted() -> jp.Model:
    """As transformers writes it: one position fewer, which ranks do not divide, merged with rows."""
    return flattened(shift=True)


def neighbours() -> jp.Model:
    """What short convolutions, shifts and running sums are written as: RWKV's token shift, Mamba's convolution, padded
    on both sides and cut; RecurrentGemma's, a sum of shifted windows; a convolution that sees what follows.
    """
    shape = ("NWC", "WIO", "NWC")

    def mixed(params: Any, x: jax.Array) -> jax.Array:
        taps, (rows, length, _) = params["taps"], x.shape
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1] + jnp.roll(x, -1, axis=1) * taps[0]
        conv = functools.partial(jax.lax.conv_general_dilated, window_strides=(1,), dimension_numbers=shape)
        cut = conv(before, taps[:, None], padding=[(2, 2)], feature_group_count=DIM)[:, :length]
        shifted = [
            jnp.concatenate([jnp.zeros((rows, i, DIM)), cut[:, : length - i]], 1) * taps[2 - i] for i in range(3)
        ]
        return conv(jnp.tanh(sum(shifted)), params["kernel"], padding="SAME")

    def body(params: Any, batch: Any) -> jax.Array:
        x = params["table"][batch["tokens"][:, :-1]]
        x = x + mixed(params, x)
        x = x + jp.attention(*_heads(params, x)).reshape(x.shape) @ params["out"]
        so_far = jnp.cumsum(x, axis=1) / 8 - jax.lax.cummax(jnp.tanh(x), axis=1, reverse=True)
        return jnp.tanh(so_far)

    return _model(body, taps=(3, DIM), kernel=(3, DIM, DIM))


def streams() -> jp.Model:
    """Two streams of tokens that attend together, as MMDiT's, and positions that go elsewhere: rolled, reversed, each
    second one, twice, written into others.
    """

    def body(params: Any, batch: Any) -> jax.Array:
        x, y = params["table"][batch["tokens"][:, :-1]], params["table"][batch["source"]]
        length, both = x.shape[1], jnp.concatenate([x, y], 1)
        attended = jax.nn.dot_product_attention(*_heads(params, both))
        both = both + attended.reshape(both.shape) @ params["out"]
        x, y = both[:, :length], both[:, length:]
        x = x + jnp.roll(x, 5, axis=1)[:, ::-1] * y[:, ::2]
        x = x + jnp.pad(y, ((0, 0), (9, 0), (0, 0)), constant_values=0.5)[:, :length]
        x = x + jnp.sin(x[:, jnp.arange(length) // 2])
        return x.at[:, 1:].add(jnp.tanh(x[:, :-1])).at[:, 1::2].mul(jnp.cos(x[:, ::2])).at[:, 3].set(0.5)

    return _model(body)


def patches() -> jp.Model:
    """Patches of images by a convolution, as ViT and DiT have them; by one of one image, channels first, vmapped over
    rows, as Equinox has them; by a reshape and a product; and windows of two positions.
    """
    sides = ("NHWC", "HWIO", "NHWC"), ("NWC", "WIO", "NWC")

    def body(params: Any, batch: Any) -> jax.Array:
        conv = functools.partial(jax.lax.conv_general_dilated, padding="VALID")

        def of_one(image: jax.Array) -> jax.Array:
            x = jax.lax.conv(jnp.moveaxis(image, -1, 0)[None], params["channels_first"], (2, 2), "VALID")[0]
            return x.reshape(DIM, -1).T

        rows, height, width, channels = batch["image"].shape
        x = conv(batch["image"], params["patch"], (2, 2), dimension_numbers=sides[0]) + params["bias"].reshape(-1)
        x = jnp.tanh(x).reshape(rows, -1, DIM) + jax.vmap(of_one)(batch["image"])
        cut = batch["image"].reshape(rows, height // 2, 2, width // 2, 2, channels)
        x = x + jnp.tanh(cut.transpose(0, 1, 3, 2, 4, 5).reshape(rows, -1, 12) @ params["cut"])
        x = x + jax.nn.dot_product_attention(*_heads(params, x)).reshape(x.shape) @ params["out"]
        return x * jnp.repeat(conv(x, params["pair"], (2,), dimension_numbers=sides[1]), 2, axis=1)

    shapes = {"patch": (2, 2, 3, DIM), "channels_first": (DIM, 3, 2, 2), "cut": (12, DIM), "pair": (2, DIM, DIM)}
    return _model(body, **shapes)


def class_token() -> jp.Model:
    """As ViT: a token before all patches, 17 positions in two layers; what becomes of it is what counts."""

    def loss(params: Any, batch: Any, key: jax.Array | None) -> jp.Mean:
        sides = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(batch["image"], params["patch"], (2, 2), "VALID", dimension_numbers=sides)
        first = jnp.broadcast_to(params["bias"].reshape(1, 1, DIM), (len(x), 1, DIM))
        x = jnp.concatenate([first, x.reshape(len(x), -1, DIM)], 1)
        for _ in range(2):
            x = x + nn.dot_product_attention(*_heads(params, x)).reshape(x.shape) @ params["out"]
            x = x + jnp.tanh(x @ params["up"]) @ params["down"]
        return weighed(x[:, 0] @ params["head"], batch["tokens"][:, 0], batch["mask"][:, 0])

    return jp.Model(init=functools.partial(_draws, patch=(2, 2, 3, DIM)), loss=loss)


def t5_translator() -> jp.Model:
    """As T5: tables of distances for an encoder, whose keys are padded, and a decoder; cross attention; 27 and 15
    positions.
    """

    def loss(params: Any, batch: Any, key: jax.Array | None) -> jp.Mean:
        source, tokens = batch["source"][:, :27], batch["tokens"][:, : LENGTH - 1]
        padding = jnp.where(source > 5, 0, -1e10)[:, None, None]

        def attended(x: jax.Array, memory: jax.Array, bias: jax.Array) -> jax.Array:
            q, (_, k, v) = _heads(params, x)[0], _heads(params, memory)
            weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) + bias)
            return x + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ params["out"]

        def table(n: int, both: bool) -> jax.Array:
            away = jnp.arange(n) - jnp.arange(n)[:, None]
            side, far = (away > 0) * 4 * both, jnp.abs(away) if both else jnp.maximum(-away, 0)
            large = 2 + (jnp.log(far / 2 + 1e-6) * 2).astype(jnp.int32)
            buckets = side + jnp.where(far < 2, far, jnp.minimum(large, 3))
            return params["bias"][buckets].transpose(2, 0, 1)[None]

        memory, x = params["table"][source], params["table"][tokens]
        memory = attended(memory, memory, table(27, both=True) + padding)
        later = jnp.where(nn.make_causal_mask(tokens), 0, -1e10)
        x = attended(attended(x, x, table(LENGTH - 1, both=False) + later), memory, padding)
        return weighed(x @ params["head"], batch["tokens"][:, 1:LENGTH], batch["mask"][:, 1:])

    return jp.Model(init=_draws, loss=loss)


def states() -> jp.Model:
    """State spaces: Mamba's, whose state is [rows, features, states], and one that runs backwards, vmapped."""

    def body(params: Any, batch: Any) -> jax.Array:
        x = params["table"][batch["tokens"][:, :-1]]
        decay = -jnp.exp(params["bias"].reshape(1, DIM))
        time = jax.nn.softplus(x @ params["query"])

        def select(h: jax.Array, given: Any) -> Any:
            x, key, time = given
            h = h * jnp.exp(time * decay)[..., None] + (time * x)[..., None] * key[:, None]
            return h, (h * key[:, None]).sum(-1)

        order = lambda x: x.swapaxes(0, 1)
        start = jnp.zeros((x.shape[0], DIM, 8))
        x = x + order(jax.lax.scan(select, start, (order(x), order(x @ params["key"][:, :8]), order(time)))[1])
        x = x + jp.attention(*_heads(params, x)).reshape(x.shape) @ params["out"]

        def back(h: jax.Array, given: Any) -> Any:
            h = given[0] * h + given[1]
            return h, h

        scan = jax.vmap(lambda h, given: jax.lax.scan(back, h, given, reverse=True))
        last, x = scan(jnp.ones_like(x[:, 0]), (jax.nn.sigmoid(x @ params["up"]), x))
        return x + last[:, None] / 8

    return _model(body)


def states_by_number() -> jp.Model:
    """Mamba's, whose loop is over numbers of positions, by which it picks decays, inputs and what reads the state."""

    def body(params: Any, batch: Any) -> jax.Array:
        x = params["table"][batch["tokens"][:, :-1]]
        time, key_, query = jax.nn.softplus(x @ params["up"]), x @ params["key"][:, :8], x @ params["query"][:, :8]
        decay = jnp.exp(jnp.einsum("btd,dn->btdn", time, -jnp.exp(params["value"][:, :8])))
        added = jnp.einsum("btd,btn,btd->bdnt", time, key_, x)

        def select(h: jax.Array, i: jax.Array) -> Any:
            h = decay[:, i] * h + added[..., i]
            return h, jnp.einsum("bdn,bn->bd", h, query[:, i])

        _, ys = jax.lax.scan(select, jnp.zeros((len(x), DIM, 8)), jnp.arange(x.shape[1]))
        x = x + ys.swapaxes(0, 1)
        return x + jp.attention(*_heads(params, x)).reshape(x.shape) @ params["out"]

    return _model(body)


def decays() -> jp.Model:
    """xLSTM's parallel form: how much of every key is forgotten, from sums over all gates before with a zero in front,
    [T + 1, T + 1], of which the first row and column are cut off.
    """

    def attend(params: Any, q: jax.Array, k: jax.Array, v: jax.Array, batch: Any) -> jax.Array:
        forget, t = jax.nn.log_sigmoid(jnp.einsum("bthd,hd->bht", k, params["bias"].T) + 2), q.shape[1]
        sums = jnp.concatenate([jnp.zeros_like(forget[..., :1]), jnp.cumsum(forget, -1)], -1)[..., None]
        sums = sums.repeat(t + 1, axis=-1)
        logs = (sums - sums.swapaxes(-2, -1))[:, :, 1:, 1:]
        kept = jnp.exp(jnp.where(jnp.tril(jnp.ones((t, t), bool)), logs, -jnp.inf))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * (DIM // HEADS) ** -0.5 * kept
        return jnp.einsum("bhts,bshd->bthd", scores / (1 + jnp.abs(scores.sum(-1, keepdims=True))), v)

    return _functions(attend)


def picked() -> jp.Model:
    """Every expert on every token, of which a token picks its best two by `all[best, rows, places]`."""

    def body(params: Any, batch: Any) -> jax.Array:
        x = params["table"][batch["tokens"][:, :-1]]
        x = x + _plain(jnp.einsum("bthd,bshd->bhts", *(heads := _heads(params, x))[:2]), heads[2]).reshape(x.shape)
        gates, best = jax.lax.top_k(x @ params["up"][:, :4], 2)
        every = jnp.tanh(jnp.einsum("btd,edf->ebtf", x, params["experts"]))
        rows, places = (jnp.arange(n) for n in x.shape[:2])
        mine = every[best, rows[:, None, None], places[:, None]]
        return x + (jax.nn.softmax(gates)[..., None] * mine).sum(-2)

    return _model(body, experts=(4, DIM, DIM))


def mixture() -> jp.Model:
    """Experts that drop nothing: each rank's tokens in slots of its own, and what overflows these."""
    sizes = {"dim": DIM, "layers": 2, "kv_heads": 2, "head_dim": 8, "ffn": 24, "experts": 4, "z": 0.01, "balance": 0.5}
    return named("mixtral-tiny", vocab=VOCAB, **sizes).model


_MODELS = (
    llama_gqa, gpt2, loop, encoder_decoder, listener, translator, alibi, bert, t5, spelled_out, window, packed, chunked,
    flattened, flattened_shifted, neighbours, streams, patches, class_token,
    t5_translator, states, states_by_number, decays, picked, mixture,
)  # fmt: skip
MODELS = {f.__name__: f for f in _MODELS}
BY_AUTO = ("encoder_decoder", "listener", "alibi", "t5", "decays", "picked")  # the attention of others goes by any way


@functools.cache
def built(name: str) -> jp.Model:
    return MODELS[name]()


@functools.cache
def one_device(name: str) -> OneDevice:
    return OneDevice(built(name))


@functools.cache
def reference(name: str, blocks: int, rows: int) -> tuple[Any, Any]:
    return one_device(name).train(SGD, batch_of(rows), blocks, STEPS)


def batch_of(rows: int, length: int = LENGTH) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(3)
    return {
        "tokens": random_tokens(VOCAB, length + 1, rows=rows),
        "source": random_tokens(VOCAB, 2 * length, rows=rows),
        "mask": draw.uniform(0.1, 2, (rows, length)).astype(np.float32),
        "document": np.sort(draw.integers(0, 3, (rows, length))).astype(np.int32),
        "image": draw.normal(size=(rows, 4, length, 3)).astype(np.float32),  # as many patches of 2 x 2
    }


def check_cell(name: str, text: str) -> None:
    """One compiled step against one device: gradients, parameters after some steps, bytes, order, collectives."""
    strategy = jp.Strategy.parse(text)
    count = math.prod(getattr(strategy, axis) for axis in ("pipe", "data", "fsdp", "expert", "context", "tensor"))
    step = jp.make_train_step(built(name), SGD, strategy, mesh=jax.devices()[:count])
    blocks = step.replicas * strategy.microbatches
    rows = 4 * blocks
    # With dropout, blocks of rows have keys of their own; to the others rows are all the same.
    check(
        step,
        built(name),
        one_device(name).first,
        batch_of(rows),
        STEPS,
        *reference(name, blocks if name == "gpt2" else rows, rows),
    )
