"""Flash attention by cuDNN, with residuals and a `vmap` that do not depend on where the program will run.

`jax.nn.dot_product_attention` has cuDNN's kernels, but three gaps for the programs of this library:

- It fixes the kernel when the program is traced. `_flash` chooses it when the program is compiled.
- Under `vmap` a mask that all heads share fails, and so does a call in which only some arrays are mapped (jax 0.10 to
  0.12, https://github.com/jax-ml/jax/pull/36702). `vmap_as_rows` makes the mapped dim part of the rows.
- Its backward refuses odd lengths. `flash_attention` pads them.

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

Implementation = Literal["cudnn", "xla"]
# The score of a hidden key: cuDNN's number in bfloat16, so that sums over hidden blocks are equal on all platforms.
HIDDEN = -(2.0**41)


@dataclass(frozen=True)
class AttentionOptions:
    """The static options of a call, which also tell the arrays that follow query, key and value.

    Attributes:
      causal: query i sees keys 0 to i.
      window: query i sees keys i - window + 1 to i only; None for all.
      scale: the factor of scores; None for 1 / sqrt(h).
      implementation: as for `jp.attention`.
      segments: the number of arrays of ids that follow: 0, 1 (for queries and keys alike) or 2.
      masked: whether a mask follows.
      num_keys: the number of keys that count, the first ones; None for all.
      function: a `ScoreFunction` (`ops/score_function.py`), whose operands follow instead of ids and masks.
      biased: whether a bias of scores [1, H, T, S] follows instead of ids and masks.
    """

    causal: bool
    window: int | None
    scale: float | None
    implementation: str | None
    segments: int
    masked: bool
    num_keys: int | None = None
    function: Any = None
    biased: bool = False


UNMASKED = AttentionOptions(False, None, None, None, 0, False)


def jax_attention(
    name: Implementation,
    options: AttentionOptions,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *arrays: jax.Array,
) -> jax.Array:
    """Call JAX's attention, in one of its implementations. A query that sees no key gets the mean of some values."""
    if name == "xla" and query.dtype == jnp.float16:
        # JAX asks for float16 products with float32 sums, which XLA has on GPUs only.
        narrow = functools.partial(_jax_attention, name, options)
        wide = lambda *qkv: narrow(*(x.astype(jnp.float32) for x in qkv[:3]), *qkv[3:]).astype(jnp.float16)
        return lax.platform_dependent(query, key, value, *arrays, cuda=narrow, rocm=narrow, default=wide)
    return _jax_attention(name, options, query, key, value, *arrays)


def _jax_attention(
    name: Implementation,
    options: AttentionOptions,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *arrays: jax.Array,
) -> jax.Array:
    """Translate the options to the arguments of `jax.nn.dot_product_attention`, and call it."""
    # JAX's own window and lengths let cuDNN skip hidden blocks. With other arrays they become part of the mask.
    mask, window, lengths, bias = None, None, None, None
    if options.biased:
        (bias,) = arrays
    elif arrays:
        mask = visible_keys(options, query.shape[1], key.shape[1], *arrays)
    elif options.window is not None:
        window = (options.window - 1, 0)  # keys before a query, and after it
    elif options.num_keys is not None:
        lengths = jnp.full(key.shape[0], options.num_keys, jnp.int32)
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


def visible_keys(options: AttentionOptions, t: int, s: int, *arrays: jax.Array) -> jax.Array:
    """Return the keys that each of t queries may see of s keys, causality aside: bool [B or 1, H or 1, T, S].

    `arrays` follow query, key and value; `options` tell which of them are ids and masks.
    """
    i, j = jnp.arange(t)[:, None], jnp.arange(s)
    is_visible = jnp.full((1, 1, t, s), True)
    if options.segments:
        is_visible &= arrays[0][:, None, :, None] == arrays[options.segments - 1][:, None, None, :]
    if options.masked:
        is_visible &= arrays[-1]
    if options.window is not None:
        is_visible &= j > i - options.window
    if options.num_keys is not None:
        is_visible &= j < options.num_keys
    return is_visible


def flash_attention(
    options: AttentionOptions, query: jax.Array, key: jax.Array, value: jax.Array, *arrays: jax.Array
) -> jax.Array:
    """Attend by cuDNN where the program runs on CUDA, for any lengths.

    cuDNN's backward needs even lengths. A query is added, and dropped from the result; a key is added and hidden.
    """
    t, s = query.shape[1], key.shape[1]
    if t % 2 or s % 2:
        query, key, value = (_pad(x, 1, x.shape[1] % 2) for x in (query, key, value))
        if options.biased:
            hidden = functools.partial(jnp.pad, constant_values=HIDDEN)
            arrays = tuple(hidden(x, ((0, 0), (0, 0), (0, t % 2), (0, s % 2))) for x in arrays)
            return _flash(options)(query, key, value, *arrays)[:, :t]
        ids, masks = arrays[: options.segments], arrays[options.segments :]
        ids = (*(_pad(x, 1, x.shape[1] % 2) for x in ids),)
        # A dim of size 1 broadcasts, also over the key that is added: `num_keys` hides that one.
        masks = (*(_pad(_pad(m, 2, t % 2 and m.shape[2] > 1), 3, s % 2 and m.shape[3] > 1) for m in masks),)
        arrays = (*ids, *masks)
        # Causality hides the added key too, and cuDNN skips what causality hides.
        options = options if options.causal else dataclasses.replace(options, num_keys=s)
    return _flash(options)(query, key, value, *arrays)[:, :t]


@functools.cache
def _flash(options: AttentionOptions) -> Callable[..., jax.Array]:
    """Return cuDNN's attention if the program is compiled for CUDA, else XLA's, with the same residuals for both.

    The residuals are the result, the statistics and the inputs. XLA's backward recomputes its forward from the inputs,
    so that a program that runs on cuDNN holds nothing for XLA's sake.
    """
    no_statistics = lambda query: jnp.zeros(_statistics_shape(query), jnp.float32)
    xla_forward = lambda *arrays: (jax_attention("xla", options, *arrays), no_statistics(arrays[0]))
    # cuDNN sums the gradient of a bias over rows, since all rows share the bias. Mapped biases must not be summed.
    by_platform = _vmap_in_turns if options.biased else vmap_as_rows
    forward = by_platform(functools.partial(cudnn_forward, options), xla_forward)
    xla_backward = lambda output, statistics, cotangent, *arrays: _vjp("xla", options, arrays)[1](cotangent)
    backward = by_platform(functools.partial(cudnn_backward, options), xla_backward)

    @jax.custom_vjp
    def flash(*arrays: jax.Array) -> jax.Array:
        return forward(*arrays)[0]

    def flash_forward(*arrays: jax.Array) -> tuple[jax.Array, Any]:
        output, statistics = forward(*arrays)
        return output, (output, statistics, arrays)

    def flash_backward(residuals: Any, cotangent: jax.Array) -> Any:
        output, statistics, arrays = residuals
        gradients = backward(output, statistics, cotangent, *arrays)
        # Ids and masks have no gradients.
        return (*gradients, *(None for _ in arrays[len(gradients) :]))

    flash.defvjp(flash_forward, flash_backward)
    return flash


def _vjp(name: Implementation, options: AttentionOptions, arrays: Sequence[jax.Array]) -> tuple[jax.Array, Any]:
    """Return the result of an implementation, and its derivative by query, key, value and bias."""
    n = 3 + options.biased
    return jax.vjp(lambda *inputs: jax_attention(name, options, *inputs, *arrays[n:]), *arrays[:n])


def cudnn_forward(options: AttentionOptions, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the result, and the logarithm of the softmax's denominator, float32 [B, H, T]; lengths must be even."""
    output, vjp = _vjp("cudnn", options, arrays)
    # JAX returns the statistics in bfloat16 only, but its derivative has them: the float32 leaf of their shape.
    shape = _statistics_shape(arrays[0])
    (statistics,) = (x for x in jax.tree.leaves(vjp) if (x.shape, x.dtype) == (shape, jnp.float32))
    return output, statistics


def cudnn_backward(
    options: AttentionOptions, output: jax.Array, statistics: jax.Array, cotangent: jax.Array, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """Return the gradients of query, key, value and a bias, from a result and its statistics.

    The result and its statistics may be those over more keys than `arrays` have, as on a ring.
    """
    # JAX has no function for the backward pass alone. In the derivative of a second forward pass, the results of the
    # first replace its results, and the compiler drops the second pass, whose results nobody reads.
    second_output, vjp = _vjp("cudnn", options, arrays)
    leaves, tree = jax.tree.flatten(vjp)
    substitute = lambda x: (
        output if x is second_output else statistics if (x.shape, x.dtype) == (statistics.shape, jnp.float32) else x
    )
    return jax.tree.unflatten(tree, map(substitute, leaves))(cotangent)


def _statistics_shape(query: jax.Array) -> tuple[int, ...]:
    """Return the shape of the softmax statistics, [B, H, T]."""
    b, t, h, _ = query.shape
    return b, h, t


def _vmap_in_turns(cuda: Callable[..., Any], default: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is `cuda` on CUDA and `default` elsewhere, and that `vmap` runs once per mapped entry."""
    by_platform = functools.partial(lax.platform_dependent, cuda=cuda, default=default)
    return jax.custom_batching.sequential_vmap(lambda *arrays: by_platform(*arrays))


def vmap_as_rows(cuda: Callable[..., Any], default: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is `cuda` on CUDA and `default` elsewhere, and whose mapped dim `vmap` merges with rows.

    Its arrays are [B, ...], and masks may be [1, ...]. cuDNN takes four dims only.
    """
    mapped = jax.custom_batching.custom_vmap(
        lambda *arrays: lax.platform_dependent(*arrays, cuda=cuda, default=default)
    )

    @mapped.def_vmap
    def vmap_rule(size: int, batched: list[bool], *arrays: jax.Array) -> Any:
        # Masks may have one row: the number of rows is the largest.
        b = max(x.shape[1 if is_batched else 0] for x, is_batched in zip(arrays, batched, strict=True))

        def merge_rows(x: jax.Array, is_batched: bool) -> jax.Array:
            x = x if is_batched else x[None]
            return jnp.broadcast_to(x, (size, b, *x.shape[2:])).reshape(size * b, *x.shape[2:])

        outs = mapped(*map(merge_rows, arrays, batched))
        return jax.tree.map(lambda y: y.reshape(size, b, *y.shape[1:]), outs), jax.tree.map(lambda _: True, outs)

    return mapped


@functools.cache
def refusal(query: tuple[int, ...], key: tuple[int, ...], dtype: str) -> str:
    """Return why JAX would not let cuDNN compute these shapes in this dtype, in JAX's words; "" if it would."""
    # `flash_attention` pads odd lengths, so that the question is about even ones.
    even_shape = lambda shape: jax.ShapeDtypeStruct((shape[0], shape[1] + shape[1] % 2, *shape[2:]), dtype)
    try:
        # A value has the shape of its key.
        jax.eval_shape(functools.partial(cudnn_forward, UNMASKED), even_shape(query), even_shape(key), even_shape(key))
    except RuntimeError as error:  # JAX has no function that answers this: its checks raise what cuDNN does not take
        return str(error).rstrip(".")
    return ""


def _pad(x: jax.Array, dim: int, amount: int) -> jax.Array:
    """Append zeros along a dim."""
    return jnp.pad(x, [(0, amount if i == dim else 0) for i in range(x.ndim)]) if amount else x
