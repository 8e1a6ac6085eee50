"""What models of text share: the batch they take, the loss they train on, and how they continue a text.

Dims: B rows, T positions, W window, V vocab.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ...backend.cpu_compiler import cpu_options
from ...model.model import Mean
from ...numerics.logits.cross_entropy import CHUNK, cross_entropy


class Sizes:
    """Sizes of a model of text."""

    def example(self, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of a training batch: {"tokens": int32 [B, T+1]}."""
        return {"tokens": jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)}


def loss(module: nnx.Module, batch: dict[str, jax.Array]) -> jax.Array | Mean:
    """Mean next-token cross-entropy in nats, float32.

    `batch` is {"tokens": int32 [B, T+1]} for the mean over all B T predictions, and with "mask" [B, T] a `jp.Mean`
    over the predictions whose mask is 1: `mask[:, t]` weighs the prediction of `tokens[:, t + 1]`.
    """
    tokens, mask = given(batch)
    return loss_of(module(tokens[:, :-1]), tokens, mask)


def loss_of(logits: jax.Array, tokens: jax.Array, mask: jax.Array | None) -> jax.Array | Mean:
    """`loss` of logits [B, T, V]."""
    return _mean(optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]), mask)


def chunked_loss(module: Any, batch: dict[str, jax.Array], chunk: int = CHUNK) -> jax.Array | Mean:
    """`loss` of a `Llama` by `jp.cross_entropy`: logits of `chunk` tokens at a time, for a third more work in the head.

    The same numbers. For long rows and large vocabularies, where logits are what does not fit.
    """
    tokens, mask = given(batch)
    return _mean(cross_entropy(module.hidden(tokens[:, :-1]), module.to_logits(), tokens[:, 1:], chunk=chunk), mask)


def given(batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
    """Tokens and mask of a batch, checked."""
    tokens, mask = batch["tokens"], batch.get("mask")
    if tokens.ndim != 2 or tokens.shape[1] < 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens are {tokens.dtype}{list(tokens.shape)}; needs integers [rows, T + 1] with T from 1, each row its "
            "input and the token after it"
        )
    if mask is not None and mask.shape != tokens[:, 1:].shape:
        raise ValueError(f"mask is {list(mask.shape)}; needs {list(tokens[:, 1:].shape)}, one number a prediction")
    return tokens, mask


def _mean(nats: jax.Array, mask: jax.Array | None) -> jax.Array | Mean:
    return nats.mean() if mask is None else Mean(jnp.sum(nats * mask), jnp.sum(mask))


def generate(
    module: Any, prompt: Any, count: int, key: jax.Array, temperature: float = 1.0, window: int | None = None
) -> jax.Array:
    """Continues each row of a prompt, token by token.

    Args:
      module: a `Llama` or `GPT`, such as `step.model(state)`, wherever its parameters live; it is left as it is.
      prompt: integers [B, T], at least one token.
      count: how many tokens to add.
      key: a key from `jax.random.key`.
      temperature: divides the logits (V of them) before one is drawn; 0 takes the most probable.
      window: how many of the last tokens the model sees; if None, as many as there will be, at most its `context`. A
        model is at its best within the length that it was trained on.

    Returns int32 [B, T + count], on every device of the module's, and of all hosts, which call it alike. It is one
    program for all tokens of a call, and for later calls of the same shapes. As long as all tokens fit into the window,
    keys and values are kept, and a token costs a forward pass over one position; once the window slides, all positions
    in it change, and a token costs a forward pass over the window. So does every token of a module without `extend` and
    `empty`, as `Llama` and `GPT` have them. Raises ValueError where there is no prompt, or nothing to add, or the
    window is larger than the model's context.
    """
    if isinstance(prompt, list | tuple) and len(lengths := {np.size(row) for row in prompt}) > 1:
        raise ValueError(f"prompt has rows of {min(lengths)} to {max(lengths)} tokens; give one length in a call")
    prompt = np.asarray(prompt, np.int32)
    if prompt.ndim != 2 or not prompt.size:
        raise ValueError(f"prompt has shape {list(prompt.shape)}, needs [rows, tokens] with one token or more")
    if count < 1:
        raise ValueError(f"count={count} adds nothing; use 1 or more")
    if (context := getattr(getattr(module, "config", None), "context", None)) is None:
        raise ValueError(
            f"module is a {type(module).__name__}, which is no Llama or GPT; pass step.model(state) of one"
        )
    window = int(min(prompt.shape[1] + count, context) if window is None else window)
    if not 1 <= window <= context:
        raise ValueError(f"window={window} must lie in 1 to {context}, the model's context")
    graph, state = nnx.split(module)
    # Tokens that are added while what the model sees still grows.
    growing = min(count, max(0, window - prompt.shape[1] + 1)) if hasattr(module, "extend") else 0
    data = jax.device_get(jax.random.key_data(key))  # as each of several hosts has it
    sizes = {"growing": growing, "sliding": count - growing, "window": window, "kind": jax.random.key_impl(key)}
    return _continued(_places(state))(graph, state, prompt, data, np.float32(temperature), **sizes)


def _places(state: Any) -> Any:
    """On every device of a module's arrays; None where it has none, or abstract ones."""
    for x in jax.tree.leaves(state):
        if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding):
            return NamedSharding(x.sharding.mesh, PartitionSpec())
    return None


@functools.cache
def _continued(place: Any) -> Any:
    static = ("graph", "kind", "growing", "sliding", "window")
    return jax.jit(_continue, static_argnames=static, out_shardings=place, compiler_options=cpu_options())


def _continue(
    graph: Any,
    state: Any,
    prompt_BT: jax.Array,
    data: jax.Array,
    temperature: jax.Array,
    kind: Any,
    growing: int,
    sliding: int,
    window: int,
) -> jax.Array:
    keys = jax.random.split(jax.random.wrap_key_data(data, impl=kind), growing + sliding)

    def module() -> Any:
        module = nnx.merge(graph, state, copy=True)  # a module may not be used at another level of tracing
        module.eval()
        return module

    def drawn(logits_BV: jax.Array, key: jax.Array) -> jax.Array:
        # Gumbel's trick: a draw from softmax(logits / temperature), and plainly the largest logit at 0.
        logits_BV = logits_BV.astype(jnp.float32)
        return jnp.argmax(logits_BV + temperature * jax.random.gumbel(key, logits_BV.shape), axis=-1)

    def grow(carry: tuple[Any, jax.Array, jax.Array], key: jax.Array) -> tuple[Any, jax.Array]:
        cache, logits_BV, at = carry
        token_B = drawn(logits_BV, key)
        logits_B1V, cache = module().extend(token_B[:, None], cache, at)
        return (cache, logits_B1V[:, 0], at + 1), token_B

    def slide(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        # Tokens fill the window from the left, so that attention, being causal, never sees what is not written yet.
        tokens_BW, filled = carry
        token_B = drawn(module()(tokens_BW)[:, filled - 1], key)
        full = filled == window
        tokens_BW = jnp.where(full, jnp.roll(tokens_BW, -1, axis=1), tokens_BW)
        at = jnp.where(full, window - 1, filled)
        return (tokens_BW.at[:, at].set(token_B), at + 1), token_B

    tokens_BT = prompt_BT
    if growing:
        rows, length = prompt_BT.shape
        cache = module().empty(rows, length + growing)
        logits_BTV, cache = module().extend(prompt_BT, cache, jnp.int32(0))
        start = cache, logits_BTV[:, -1], jnp.int32(length)
        tokens_BT = jnp.concatenate([prompt_BT, jax.lax.scan(grow, start, keys[:growing])[1].T], axis=1)
    if sliding:
        seen = tokens_BT[:, -window:]
        start = jnp.pad(seen, [(0, 0), (0, window - seen.shape[1])]), jnp.int32(seen.shape[1])
        tokens_BT = jnp.concatenate([tokens_BT, jax.lax.scan(slide, start, keys[growing:])[1].T], axis=1)
    return tokens_BT
