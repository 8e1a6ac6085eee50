"""Flash attention by cuDNN, with residuals and a `vmap` that do not depend on where the program will run.

`jax.nn.dot_product_attention` has cuDNN's kernels, and for this library's programs three gaps: which kernel computes is
fixed when the program is traced; under `vmap` a mask that all heads share fails, and so do arrays of which only some
are mapped (jax 0.10 to 0.12, https://github.com/jax-ml/jax/pull/36702); and backward refuses odd lengths.

Dims: B rows, T query positions, S key positions, H heads, K key/value heads, h head_dim.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

Name = Literal["cudnn", "xla"]
# What hidden scores are: cuDNN's number in bfloat16, so that sums over hidden blocks are alike on all platforms.
HIDDEN = -(2.0**41)


@dataclass(frozen=True)
class AttentionOptions:
    """What is static in a call, and which arrays follow query, key and value."""

    causal: bool
    window: int | None
    scale: float | None
    implementation: str | None
    segments: int  # arrays of ids: 0, 1 (for queries and keys alike) or 2
    masked: bool
    keys: int | None = None  # how many of the keys count; None: all
    function: Any = None  # of scores, whose operands follow in place of ids and masks (`context/score_function.py`)
    biased: bool = False  # what is added to scores [1, H, T, S] follows in place of ids and masks


def dot(
    name: Name, options: AttentionOptions, query: jax.Array, key: jax.Array, value: jax.Array, *more: jax.Array
) -> jax.Array:
    """JAX's attention, by one of its implementations. A query that sees no key gets the mean of some values."""
    if name == "xla" and query.dtype == jnp.float16:
        # JAX asks for products of float16 that are summed in float32, which XLA has for GPUs alone.
        narrow = functools.partial(_dot, name, options)
        wide = lambda *qkv: _dot(name, options, *(x.astype(jnp.float32) for x in qkv[:3]), *qkv[3:]).astype(jnp.float16)
        return lax.platform_dependent(query, key, value, *more, cuda=narrow, rocm=narrow, default=wide)
    return _dot(name, options, query, key, value, *more)


def _dot(
    name: Name, options: AttentionOptions, query: jax.Array, key: jax.Array, value: jax.Array, *more: jax.Array
) -> jax.Array:
    mask, window, lengths, bias = None, None, None, None
    if options.biased:
        (bias,) = more
    elif more:
        mask = visible(options, query.shape[1], key.shape[1], *more)
    elif options.window is not None:
        window = (options.window - 1, 0)
    elif options.keys is not None:
        lengths = jnp.full(key.shape[0], options.keys, jnp.int32)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        scale=options.scale,
        is_causal=options.causal,
        local_window_size=window,
        key_value_seq_lengths=lengths,
        implementation=name,
    )


def visible(options: AttentionOptions, t: int, s: int, *more: jax.Array) -> jax.Array:
    """The keys that each query may see but for causality, bool [B or 1, H or 1, T, S]."""
    i, j = jnp.arange(t)[:, None], jnp.arange(s)
    visible = jnp.full((1, 1, t, s), True)
    if options.segments:
        visible &= more[0][:, None, :, None] == more[options.segments - 1][:, None, None, :]
    if options.masked:
        visible &= more[-1]
    if options.window is not None:
        visible &= j > i - options.window
    if options.keys is not None:
        visible &= j < options.keys
    return visible


def even(options: AttentionOptions, query: jax.Array, key: jax.Array, value: jax.Array, *more: jax.Array) -> jax.Array:
    """Flash attention of even lengths, which cuDNN's backward demands: a query is added and dropped, a key hidden."""
    t, s = query.shape[1], key.shape[1]
    if t % 2 or s % 2:
        query, key, value = (_pad(x, 1, x.shape[1] % 2) for x in (query, key, value))
        if options.biased:
            hidden = functools.partial(jnp.pad, constant_values=HIDDEN)
            more = tuple(hidden(x, ((0, 0), (0, 0), (0, t % 2), (0, s % 2))) for x in more)
            return _flash(options)(query, key, value, *more)[:, :t]
        ids, masks = more[: options.segments], more[options.segments :]
        ids = (*(_pad(x, 1, x.shape[1] % 2) for x in ids),)
        # A dim of size 1 is for all queries or keys, or is the one that `keys` leaves.
        masks = (*(_pad(_pad(m, 2, t % 2 and m.shape[2] > 1), 3, s % 2 and m.shape[3] > 1) for m in masks),)
        more = (*ids, *masks)
        # Causality hides the key as well, and cuDNN skips what it hides.
        options = options if options.causal else dataclasses.replace(options, keys=s)
    return _flash(options)(query, key, value, *more)[:, :t]


@functools.cache
def _flash(options: AttentionOptions) -> Callable[..., jax.Array]:
    """cuDNN's attention where the program is compiled for CUDA, XLA's elsewhere, with one set of residuals for both.

    What XLA saw, it computes again in the backward pass: all that a cuDNN program would have to hold of XLA's side are
    arrays that it holds anyway.
    """
    xla = lambda *arrays: (dot("xla", options, *arrays), jnp.zeros(_statistics(arrays[0]), jnp.float32))
    # The gradient of a bias is its rows' sum, which cuDNN has for one bias of all: what `vmap` adds take turns.
    by_platform = _in_turns if options.biased else in_rows
    forward = by_platform(functools.partial(cudnn_forward, options), xla)
    again = lambda out, statistics, given, *arrays: _pull("xla", options, arrays)[1](given)
    backward = by_platform(functools.partial(cudnn_backward, options), again)

    @jax.custom_vjp
    def flash(*arrays: jax.Array) -> jax.Array:
        return forward(*arrays)[0]

    def kept(*arrays: jax.Array) -> tuple[jax.Array, Any]:
        out, statistics = forward(*arrays)
        return out, (out, statistics, arrays)

    def pulled(residuals: Any, given: jax.Array) -> Any:
        out, statistics, arrays = residuals
        found = backward(out, statistics, given, *arrays)
        return (*found, *(None for _ in arrays[len(found) :]))

    flash.defvjp(kept, pulled)
    return flash


def _pull(name: Name, options: AttentionOptions, arrays: Sequence[jax.Array]) -> tuple[jax.Array, Any]:
    n = 3 + options.biased
    return jax.vjp(lambda *some: dot(name, options, *some, *arrays[n:]), *arrays[:n])


def cudnn_forward(options: AttentionOptions, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The result, and the logarithm of the softmax's denominator, float32 [B, H, T]. Of even lengths."""
    out, pull = _pull("cudnn", options, arrays)
    (statistics,) = (x for x in jax.tree.leaves(pull) if (x.shape, x.dtype) == (_statistics(arrays[0]), jnp.float32))
    return out, statistics


def cudnn_backward(
    options: AttentionOptions, out: jax.Array, statistics: jax.Array, given: jax.Array, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """The gradients of query, key, value and a bias, by a result and its statistics: also those of more keys than are
    given.
    """
    # JAX has no function for the backward pass alone. In the derivative of a second forward pass, the results of the
    # first take the place of its own, and the compiler drops what nobody reads.
    again, pull = _pull("cudnn", options, arrays)
    leaves, tree = jax.tree.flatten(pull)
    first = lambda x: out if x is again else statistics if (x.shape, x.dtype) == (statistics.shape, jnp.float32) else x
    return jax.tree.unflatten(tree, map(first, leaves))(given)


def _statistics(query: jax.Array) -> tuple[int, ...]:
    b, t, h, _ = query.shape
    return b, h, t


def _in_turns(cuda: Callable[..., Any], default: Callable[..., Any]) -> Callable[..., Any]:
    by_platform = functools.partial(lax.platform_dependent, cuda=cuda, default=default)
    return jax.custom_batching.sequential_vmap(lambda *arrays: by_platform(*arrays))


def in_rows(cuda: Callable[..., Any], default: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays [B, ...] (masks: or 1) by platform. What `vmap` adds become rows, as cuDNN needs them."""
    mapped = jax.custom_batching.custom_vmap(
        lambda *arrays: lax.platform_dependent(*arrays, cuda=cuda, default=default)
    )

    @mapped.def_vmap
    def rule(size: int, batched: list[bool], *arrays: jax.Array) -> Any:
        b = max(x.shape[1 if on else 0] for x, on in zip(arrays, batched, strict=True))

        def rows(x: jax.Array, on: bool) -> jax.Array:
            x = x if on else x[None]
            return jnp.broadcast_to(x, (size, b, *x.shape[2:])).reshape(size * b, *x.shape[2:])

        outs = mapped(*map(rows, arrays, batched))
        return jax.tree.map(lambda y: y.reshape(size, b, *y.shape[1:]), outs), jax.tree.map(lambda _: True, outs)

    return mapped


@functools.cache
def refusal(query: tuple[int, ...], key: tuple[int, ...], dtype: str) -> str:
    """Why JAX would not let cuDNN compute this, in its own words; "" where it would."""
    even = lambda shape: jax.ShapeDtypeStruct((shape[0], shape[1] + shape[1] % 2, *shape[2:]), dtype)
    plain = AttentionOptions(False, None, None, None, 0, False)
    try:
        jax.eval_shape(functools.partial(cudnn_forward, plain), even(query), even(key), even(key))
    except RuntimeError as error:  # how JAX's checks say what cuDNN does not take; there is nothing else to ask
        return str(error).rstrip(".")
    return ""


def _pad(x: jax.Array, dim: int, by: int) -> jax.Array:
    return jnp.pad(x, [(0, by if i == dim else 0) for i in range(x.ndim)]) if by else x
