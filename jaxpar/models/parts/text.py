"""The batch that text models take, the losses that they train on, and the generation of text.

`generate` has two phases, one `jax.lax.while_loop` each, in one program:

    grow     The text fits into the window. A cache holds keys and values; each token costs one position's compute.
    slide    The window is full. Every token shifts the positions of all others, so the model sees the window anew.

A row may hold several documents, one after the other (Krell et al. 2021, arXiv:2107.02027). The leaf `segments` numbers
them, and model and loss then compute what they would with one document in each row:

    tokens       a0 a1 a2 b0 b1 b2 b3  .        predictions   a0->a1  a1->a2  a2->b0  b0->b1  b1->b2  b2->b3  b3->.
    segments      0  0  0  1  1  1  1 -1        weights          1       1       0       1       1       1       0
    positions     0  1  2  0  1  2  3  0

Dims: B rows, T positions, W window, V vocab.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from ...parallel.context.attention.fused import attention
from .cache import Attend

# Names of segments in other libraries: batches with one of them are refused.
_OTHER_NAMES_OF_SEGMENTS = ("segment_ids", "segment", "doc_ids", "document_ids")

Draw = Callable[[jax.Array], jax.Array]  # logits [B, V] -> the next token of each row, int32 [B]


class Sizes:
    """Sizes of a text model."""

    def example(self, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of a training batch: {"tokens": int32 [B, T+1]}."""
        return {"tokens": jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)}


@dataclass(frozen=True)
class Predictions:
    """The inputs and targets of a text model, from one batch.

    Attributes:
      inputs: the arguments of the module: tokens int [B, T], and segments int [B, T] if the batch has some.
      targets: int [B, T], the token after each input.
      weights: [B, T], how much each prediction counts; None if all count 1.
    """

    inputs: tuple[jax.Array, ...]
    targets: jax.Array
    weights: jax.Array | None

    def mean(self, losses: jax.Array) -> jax.Array | Mean:
        """Average the losses [B, T] of all predictions; with weights, return the weighted sum and the total weight."""
        if self.weights is None:
            return losses.mean()
        # Not their quotient: microbatches and devices may hold different weights, and only sums can be added.
        return Mean(jnp.sum(losses * self.weights), jnp.sum(self.weights))


def loss(module: nnx.Module, batch: dict[str, jax.Array]) -> jax.Array | Mean:
    """Return the mean next-token cross-entropy in nats, float32.

    Args:
      module: tokens [B, T] -> logits [B, T, V]; for batches with segments, (tokens, segments [B, T]) -> logits.
      batch: {"tokens": int [B, T+1]}, and optionally

        - "mask" [B, T]: `mask[:, t]` weighs the prediction of `tokens[:, t + 1]`;
        - "segments" int [B, T+1]: the document of each token, for rows with several documents. Neighbours with equal
          numbers belong to one document. No token sees another document, positions begin at 0 in each, and no document
          predicts the first token of the next. Negative numbers mark padding, which has no loss.

    Returns:
      The mean over all B T predictions; with a mask or segments a `jp.Mean`, the weighted sum and the sum of the
      weights.

    Raises:
      ValueError: shapes or dtypes do not fit, or the batch has segments by another name.
    """
    predictions = predictions_of(batch)
    return loss_from_logits(module(*predictions.inputs), predictions)


def loss_from_logits(logits: jax.Array, predictions: Predictions) -> jax.Array | Mean:
    """Return `loss` from the model's logits [B, T, V]."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), predictions.targets)
    return predictions.mean(losses)


def chunked_loss(module: Any, batch: dict[str, jax.Array], chunk: int = CHUNK) -> jax.Array | Mean:
    """Return the `loss` of a `Llama` without ever storing all logits, by `jp.cross_entropy`.

    Use it for long rows and large vocabularies, whose logits [B, T, V] do not fit into memory. It computes the logits
    of `chunk` tokens at a time and recomputes them in the backward pass, which costs a third more compute in the head.
    """
    predictions = predictions_of(batch)
    hidden = module.hidden(*predictions.inputs)
    return predictions.mean(cross_entropy(hidden, module.to_logits(), predictions.targets, chunk=chunk))


def predictions_of(batch: Mapping[str, jax.Array]) -> Predictions:
    """Return the inputs, targets and weights of a batch, whose leaves `loss` describes.

    Raises:
      ValueError: shapes or dtypes do not fit, or the batch has segments by another name.
    """
    tokens, mask, segments = batch["tokens"], batch.get("mask"), batch.get("segments")
    if tokens.ndim != 2 or tokens.shape[1] < 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens are {tokens.dtype}{list(tokens.shape)}; needs integers [rows, T + 1] with T from 1, each row its "
            "input and the token after it"
        )
    if mask is not None and mask.shape != tokens[:, 1:].shape:
        raise ValueError(f"mask is {list(mask.shape)}; needs {list(tokens[:, 1:].shape)}, one number a prediction")
    # Tokens 0 to T-1 are the input, tokens 1 to T the targets.
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if segments is None:
        # Without its documents, a packed row would train on text that runs from one document into the next.
        if name := next((name for name in _OTHER_NAMES_OF_SEGMENTS if name in batch), None):
            raise ValueError(
                f"the batch has {name}, which text models do not read; they need the document of each token as "
                f"segments, integers [rows, {tokens.shape[1]}], negative for padding: rename {name}, or leave it out"
            )
        return Predictions((inputs,), targets, mask)
    if segments.shape != tokens.shape or not jnp.issubdtype(segments.dtype, jnp.signedinteger):
        raise ValueError(
            f"segments are {segments.dtype}{list(segments.shape)}; needs signed integers [rows, {tokens.shape[1]}], "
            "the document of each token, negative for padding"
        )
    # A prediction counts if its input and its target are tokens of one document.
    is_within = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
    weights = is_within.astype(jnp.float32) if mask is None else mask * is_within
    return Predictions((inputs, segments[:, :-1]), targets, weights)


def positions_and_attention(segments_BT: jax.Array) -> tuple[jax.Array, Attend]:
    """Return how a model computes rows with several documents.

    Args:
      segments_BT: the document of each token, int [B, T].

    Returns:
      The position of each token in its document, int32 [B, T], and attention within documents.
    """
    place_BT = jnp.broadcast_to(jnp.arange(segments_BT.shape[1], dtype=jnp.int32), segments_BT.shape)
    # A token begins a document if its left neighbour belongs to another one. The first place counts as a start below.
    is_start = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)))
    # The place where its document begins is the same for all tokens of a document, and no other document has it. So
    # it also separates two documents of the same number.
    start_BT = jax.lax.cummax(jnp.where(is_start, place_BT, 0), axis=1)
    return place_BT - start_BT, functools.partial(attention, segment_ids=start_BT)


def generate(
    module: Any, prompt: Any, count: int, key: jax.Array, temperature: float = 1.0, window: int | None = None,
    stop: int | Sequence[int] = (),
) -> jax.Array:  # fmt: skip
    """Continue each row of a prompt, token by token.

    Args:
      module: a `Llama` or `GPT`, such as `step.model(state)`, wherever its parameters live. It is not changed.
      prompt: integers [B, T], at least one token.
      count: how many tokens to add.
      key: a key from `jax.random.key`.
      temperature: divides the logits [B, V] before a token is drawn; 0 takes the most probable token.
      window: how many of the last tokens the model sees. None means all of them, up to the model's `context`. A model
        is at its best within the length that it was trained on.
      stop: the ids at which a row ends, such as `jaxpar.data.Tokenizer.stop`. Computation ends with the last row.

    Returns:
      int32 [B, T + count], on every device of the module. Behind its end a row is filled up with the first id of
      `stop`. With several hosts, all hosts call this function alike.

    Raises:
      ValueError: there is no prompt or nothing to add, an id of `stop` is negative, or the window is larger than the
        model's context.

    All tokens of a call are computed by one compiled program, which later calls of the same shapes reuse. While the
    text fits into the window, keys and values are cached, and a token costs a forward pass over one position. Once the
    window slides, a token costs a forward pass over the whole window. So does every token of a module that lacks the
    methods `extend` and `empty` of `Llama` and `GPT`.
    """
    if isinstance(prompt, list | tuple) and len(lengths := {np.size(row) for row in prompt}) > 1:
        raise ValueError(f"prompt has rows of {min(lengths)} to {max(lengths)} tokens; give one length in a call")
    prompt = np.asarray(prompt, np.int32)
    if prompt.ndim != 2 or not prompt.size:
        raise ValueError(f"prompt has shape {list(prompt.shape)}, needs [rows, tokens] with one token or more")
    if count < 1:
        raise ValueError(f"count={count} adds nothing; use 1 or more")
    stop_ids = np.atleast_1d(np.asarray(stop, np.int32))
    if stop_ids.ndim != 1 or (stop_ids < 0).any():
        raise ValueError(f"stop={stop} are no token ids; needs one from 0, or a list of them")
    # The window must not be longer than what the model has positions for.
    if (context := getattr(getattr(module, "config", None), "context", None)) is None:
        raise ValueError(
            f"module is a {type(module).__name__}, which is no Llama or GPT; pass step.model(state) of one"
        )
    window = int(min(prompt.shape[1] + count, context) if window is None else window)
    if not 1 <= window <= context:
        raise ValueError(f"window={window} must lie in 1 to {context}, the model's context")
    graph, state = nnx.split(module)
    # The first added token needs only the prompt's logits, so a full window still yields one token by the cache.
    num_cached = min(count, max(0, window - prompt.shape[1] + 1)) if hasattr(module, "extend") else 0
    key_data = jax.device_get(jax.random.key_data(key))  # as NumPy, which each of several hosts may pass
    static = {
        "num_cached": num_cached,
        "num_sliding": count - num_cached,
        "window": window,
        "key_impl": jax.random.key_impl(key),
    }
    return _compiled_generation(_replicated_sharding(state))(
        graph, state, prompt, key_data, np.float32(temperature), stop_ids, **static
    )


def _replicated_sharding(state: Any) -> NamedSharding | None:
    """Return the sharding that replicates over the mesh of a module's arrays; None if no array has a mesh."""
    for x in jax.tree.leaves(state):
        if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding):
            return NamedSharding(x.sharding.mesh, PartitionSpec())
    return None


@functools.cache  # one jitted function for each sharding, so that later calls find the compiled program
def _compiled_generation(sharding: NamedSharding | None) -> Any:
    """Return `_generate_tokens`, jitted, with its result in this sharding."""
    static = ("graph", "key_impl", "num_cached", "num_sliding", "window")
    return jax.jit(_generate_tokens, static_argnames=static, out_shardings=sharding, compiler_options=cpu_options())


def _generate_tokens(
    graph: Any,
    state: Any,
    prompt_BT: jax.Array,
    key_data: jax.Array,
    temperature: jax.Array,
    stop: jax.Array,
    key_impl: Any,
    num_cached: int,
    num_sliding: int,
    window: int,
) -> jax.Array:
    """Return the prompt [B, T], continued by `num_cached` tokens with the cache and then `num_sliding` without."""
    rows, length = prompt_BT.shape
    keys = jax.random.split(jax.random.wrap_key_data(key_data, impl=key_impl), num_cached + num_sliding)

    def module() -> Any:
        # NNX forbids the use of a module at another level of tracing, such as inside a loop: each use merges a copy.
        module = nnx.merge(graph, state, copy=True)
        module.eval()
        return module

    def draw_tokens(logits_BV: jax.Array, position: jax.Array) -> jax.Array:
        key = keys[position - length]
        # Gumbel's trick: argmax(logits + temperature * gumbel) is a draw from softmax(logits / temperature). At
        # temperature 0 it is the largest logit, without a division by 0.
        logits_BV = logits_BV.astype(jnp.float32)
        return jnp.argmax(logits_BV + temperature * jax.random.gumbel(key, logits_BV.shape), axis=-1)

    def grow(carry: tuple[Any, jax.Array, jax.Array], draw: Draw) -> tuple[Any, jax.Array]:
        cache, logits_BV, position = carry
        token_B = draw(logits_BV)
        logits_B1V, cache = module().extend(token_B[:, None], cache, position)
        return (cache, logits_B1V[:, 0], position + 1), token_B

    def slide(carry: tuple[jax.Array, jax.Array], draw: Draw) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        # Tokens fill the window from the left. Attention is causal, so it never sees the positions not yet filled.
        tokens_BW, num_filled = carry
        token_B = draw(module()(tokens_BW)[:, num_filled - 1])
        is_full = num_filled == window
        tokens_BW = jnp.where(is_full, jnp.roll(tokens_BW, -1, axis=1), tokens_BW)
        position = jnp.where(is_full, window - 1, num_filled)
        return (tokens_BW.at[:, position].set(token_B), position + 1), token_B

    cached_end = length + num_cached
    fill = stop[0] if stop.size else jnp.int32(0)
    tokens_BT = jnp.concatenate([prompt_BT, jnp.full((rows, num_cached + num_sliding), fill)], axis=1)
    output = tokens_BT, jnp.zeros(rows, bool)
    # 1. Fill the cache with the prompt, then add tokens one position at a time.
    if num_cached:
        cache = module().empty(rows, cached_end)
        logits_BTV, cache = module().extend(prompt_BT, cache, jnp.int32(0))
        carry = cache, logits_BTV[:, -1], jnp.int32(length)
        output = _add_tokens(grow, draw_tokens, carry, output, (length, cached_end), stop)
    # 2. Slide the window over the last tokens, padded on the right if they do not fill it.
    if num_sliding:
        visible = output[0][:, max(0, cached_end - window) : cached_end]
        carry = jnp.pad(visible, [(0, 0), (0, window - visible.shape[1])]), jnp.int32(visible.shape[1])
        output = _add_tokens(slide, draw_tokens, carry, output, (cached_end, cached_end + num_sliding), stop)
    return output[0]


def _add_tokens(
    step: Callable[[Any, Draw], tuple[Any, jax.Array]],
    draw_tokens: Callable[[jax.Array, jax.Array], jax.Array],
    carry: Any,
    output: tuple[jax.Array, jax.Array],
    span: tuple[int, int],
    stop: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Set tokens by `step` from one position up to another, or until all rows are done.

    Args:
      step: (carry, draw) -> the next carry, and the tokens [B] that it has drawn.
      draw_tokens: (logits [B, V], position) -> tokens [B].
      carry: the first carry.
      output: the tokens [B, T + count], filled up with the first id of `stop`, and whether each row is done, bool [B].
      span: the first position, and the one behind the last.
      stop: the ids at which a row ends, [S].

    Returns:
      `output`, with these positions.
    """

    def body(state: Any) -> Any:
        position, carry, tokens_BT, is_done_B = state
        # A row that is done keeps what its positions were filled up with.
        draw = lambda logits_BV: jnp.where(is_done_B, tokens_BT[:, position], draw_tokens(logits_BV, position))
        carry, token_B = step(carry, draw)
        is_done_B |= (token_B[:, None] == stop).any(axis=1)
        return position + 1, carry, tokens_BT.at[:, position].set(token_B), is_done_B

    unfinished = lambda state: (state[0] < span[1]) & ~state[-1].all()
    return jax.lax.while_loop(unfinished, body, (jnp.int32(span[0]), carry, *output))[2:]
