"""What models of text share: the batch they take, the loss they train on, and how they continue a text.

Dims: B rows, T positions, W window, V vocab.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ...model.model import Mean


def example(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a training batch: {"tokens": int32 [B, T+1]}."""
    return {"tokens": jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)}


def loss(module: nnx.Module, batch: dict[str, jax.Array]) -> jax.Array | Mean:
    """Mean next-token cross-entropy in nats, float32.

    `batch` is {"tokens": int32 [B, T+1]} for the mean over all B T predictions, and with "mask" [B, T] a `jp.Mean`
    over the predictions whose mask is 1: `mask[:, t]` weighs the prediction of `tokens[:, t + 1]`.
    """
    tokens, mask = batch["tokens"], batch.get("mask")
    if tokens.ndim != 2 or tokens.shape[1] < 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens are {tokens.dtype}{list(tokens.shape)}; needs integers [rows, T + 1] with T from 1, each row its "
            "input and the token after it"
        )
    if mask is not None and mask.shape != tokens[:, 1:].shape:
        raise ValueError(f"mask is {list(mask.shape)}; needs {list(tokens[:, 1:].shape)}, one number a prediction")
    logits = module(tokens[:, :-1]).astype(jnp.float32)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    if mask is None:
        return nats.mean()
    return Mean(jnp.sum(nats * mask), jnp.sum(mask))


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

    Returns int32 [B, T + count]. It is one program for all tokens of a call, and for later calls of the same shapes.
    Nothing is cached: every token costs a forward pass over the window. Raises ValueError where there is no prompt, or
    nothing to add, or the window is larger than the model's context.
    """
    prompt = jnp.asarray(prompt, jnp.int32)
    if prompt.ndim != 2 or not prompt.size:
        raise ValueError(f"prompt has shape {list(prompt.shape)}, needs [rows, tokens] with one token or more")
    if count < 1:
        raise ValueError(f"count={count} adds nothing; use 1 or more")
    context = module.config.context
    window = int(min(prompt.shape[1] + count, context) if window is None else window)
    if not 1 <= window <= context:
        raise ValueError(f"window={window} must lie in 1 to {context}, the model's context")
    graph, state = nnx.split(module)
    return jnp.concatenate([prompt, _continue(graph, state, prompt, count, key, temperature, window)], axis=1)


@partial(jax.jit, static_argnames=("graph", "count", "window"))
def _continue(
    graph: Any, state: Any, prompt_BT: jax.Array, count: int, key: jax.Array, temperature: float, window: int
) -> jax.Array:
    seen = prompt_BT[:, -window:]
    padded_BW = jnp.pad(seen, [(0, 0), (0, window - seen.shape[1])])

    def step(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        # Tokens fill the window from the left, so that attention, being causal, never sees what is not written yet.
        tokens_BW, filled = carry
        module = nnx.merge(graph, state, copy=True)  # a module may not be used at another level of tracing
        module.eval()
        logits_BV = module(tokens_BW)[:, filled - 1].astype(jnp.float32)
        # Gumbel's trick: a draw from softmax(logits / temperature), and plainly the largest logit at 0.
        token_B = jnp.argmax(logits_BV + temperature * jax.random.gumbel(key, logits_BV.shape), axis=-1)
        full = filled == window
        tokens_BW = jnp.where(full, jnp.roll(tokens_BW, -1, axis=1), tokens_BW)
        at = jnp.where(full, window - 1, filled)
        return (tokens_BW.at[:, at].set(token_B), at + 1), token_B

    start = (padded_BW, jnp.int32(seen.shape[1]))
    return jax.lax.scan(step, start, jax.random.split(key, count))[1].T
