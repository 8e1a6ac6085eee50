"""Cross-entropy of hidden states and a head, whose logits never exist whole.

Dims: T positions, D features, V vocab.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

CHUNK = 2048  # tokens


def cross_entropy(
    hidden: jax.Array, head: jax.Array, labels: jax.Array, *, ignore: int | None = None, chunk: int = CHUNK
) -> jax.Array:
    """-log softmax(hidden head)[labels] of each token, in nats: the logits of some tokens at a time.

    Forward and backward run over chunks of positions, and backward makes each chunk's logits again: of logits, what
    is held is one chunk, `chunk` V numbers in the dtype of hidden and again in float32, instead of all, for one more
    product of hidden and head (a third more of the head's work). Logits are in the dtype of hidden, to which the head
    is cast, and the softmax is in float32, as in
    `optax.softmax_cross_entropy_with_integer_labels((hidden @ head).astype(float32), labels)`, which gives the same
    numbers. The head's gradient adds up over chunks in float32, [D, V].

    8,192 tokens, V 128,256, D 4,096 in bfloat16, loss and gradients compiled for one H100 (jax 0.10.2): temporaries
    6.30 GB plainly, 2.71 GB in chunks of 2,048 and 2.30 GB of 512, of which 2.10 GB are the head's gradient.

    It communicates nothing. Under `tensor`, a head that is split over V stays so, as in the plain loss, and the sums of
    the softmax are all-reduced chunk by chunk. Under `context=c` each rank takes its part of every chunk: give c times
    the chunk; the positions of a chunk must be a multiple of c (2c for the ring).

    Args:
      hidden: float [..., T, D]. T is what is cut, every dim before it stays whole.
      head: float [D, V].
      labels: int [..., T], from 0 to V - 1.
      ignore: a label whose tokens cost nothing and give no gradient, such as -100. Any other label out of range gives
        NaN; `jp.check_ids` names it. To take the mean of what counts, return
        `jp.Mean(nats.sum(), (labels != ignore).sum())`.
      chunk: how many tokens at a time, at most, over all dims before D; but one position of every row at least.

    Returns:
      float32 [..., T]. Weights are the caller's: `jp.Mean((nats * weights).sum(), weights.sum())`.

    Raises:
      ValueError: shapes, dtypes or the chunk do not fit.

    >>> hidden, head = jnp.ones((2, 6, 4)), jnp.zeros((4, 8))
    >>> cross_entropy(hidden, head, jnp.zeros((2, 6), jnp.int32), chunk=4).shape
    (2, 6)
    """
    _check(hidden, head, labels, chunk)
    *rows, t, _ = hidden.shape
    chunks = pieces(t, -(-labels.size // chunk))
    missing = -t % chunks
    hidden = jnp.pad(hidden, [*((0, 0) for _ in rows), (0, missing), (0, 0)]) if missing else hidden
    padded = jnp.pad(labels, [*((0, 0) for _ in rows), (0, missing)]) if missing else labels

    def cut(x: jax.Array, after: int) -> jax.Array:
        """Chunk j takes the positions j, j + chunks, ..: a T that is split over devices stays so within each chunk."""
        at = len(rows)
        return jnp.moveaxis(x.reshape(*x.shape[:at], -1, chunks, *x.shape[x.ndim - after :]), at + 1, 0)

    # Never there: what the head's gradient has for dtype.
    wide = head.astype(jnp.promote_types(hidden.dtype, jnp.float32))
    narrow = lax.stop_gradient(head).astype(hidden.dtype)

    @jax.checkpoint
    def some(_: None, given: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        h, ids = given
        logits = product(HeadProduct(h.ndim - 1, 0), h, narrow, wide).astype(wide.dtype)
        return None, optax.softmax_cross_entropy_with_integer_labels(logits, ids)

    # Counted from behind, as optax counts a label below 0, it would be another one.
    known = jnp.where(padded < 0, head.shape[1], padded)
    known = known if ignore is None else jnp.where(padded == ignore, 0, known)
    _, nats = lax.scan(some, None, (cut(hidden, 1), cut(known, 0)))
    nats = first(jnp.moveaxis(nats, 0, -1).reshape(*rows, t + missing)[..., :t])
    return nats if ignore is None else jnp.where(labels == ignore, 0, nats)


@jax.custom_vjp
def first(nats: jax.Array) -> jax.Array:
    """`nats`, before any gradient: nothing in the backward reads them, so XLA's scheduler computed them last, and held
    the head and all hidden states until then (1.3 GB more at the peak of an 8B model's step on H100s, jax 0.10.2).
    """
    return nats


def _then(nats: jax.Array, given: jax.Array) -> tuple[jax.Array]:
    # Zeros that cannot exist before `nats` do. Not by lax.optimization_barrier: XLA drops what nobody reads of it.
    return (given + jnp.minimum(jnp.abs(jnp.nan_to_num(nats)), 0),)


first.defvjp(lambda nats: (nats, nats), _then)


@dataclass(frozen=True)
class HeadProduct:
    """How hidden states and a head are multiplied.

    Attributes:
      of_hidden, of_head: the dim of each that holds features; a head has one more.
      swapped: whether the head is the left operand: its words are then dim 0 of the logits, not the last.
      precision, dtype: as `lax.dot_general` has `precision` and `preferred_element_type`.
    """

    of_hidden: int
    of_head: int
    swapped: bool = False
    precision: Any = None
    dtype: Any = None

    def __call__(self, hidden: jax.Array, head: jax.Array) -> jax.Array:
        """The logits."""
        sides = [(hidden, self.of_hidden), (head, self.of_head)]
        (a, i), (b, j) = reversed(sides) if self.swapped else sides
        numbers = (([i], [j]), ([], []))
        return lax.dot_general(a, b, numbers, precision=self.precision, preferred_element_type=self.dtype)

    def by_head(self, hidden: jax.Array, given: jax.Array) -> jax.Array:
        """The head's gradient, float32 or wider, from that of the logits."""
        tokens = [d for d in range(hidden.ndim) if d != self.of_hidden]
        ours = [d + self.swapped for d in range(len(tokens))]
        wide = jnp.promote_types(given.dtype, jnp.float32)
        pair = [(hidden, tokens), (given, ours)]
        (a, i), (b, j) = reversed(pair) if self.of_head else pair
        return lax.dot_general(a, b, ((i, j), ([], [])), precision=self.precision, preferred_element_type=wide)


def _plain(how: HeadProduct, hidden: jax.Array, narrow: jax.Array, wide: jax.Array) -> jax.Array:
    """hidden narrow, whose gradient by `narrow` is one by `wide`, the same numbers in float32: a loop adds up gradients
    of what it holds in the dtype in which it holds it.
    """
    return how(hidden, narrow)


def _pull(how: HeadProduct, kept: tuple[jax.Array, jax.Array], given: jax.Array) -> tuple[jax.Array, None, jax.Array]:
    hidden, narrow = kept
    (by_hidden,) = jax.linear_transpose(lambda h: how(h, narrow), hidden)(given)
    return by_hidden, None, how.by_head(hidden, given)


_ruled = jax.custom_vjp(_plain, nondiff_argnums=(0,))
_ruled.defvjp(lambda how, hidden, narrow, wide: (how(hidden, narrow), (hidden, narrow)), _pull)
product: Callable[[HeadProduct, jax.Array, jax.Array, jax.Array], jax.Array] = _ruled  # type: ignore[assignment]


def pieces(t: int, wanted: int) -> int:
    """As few chunks as are wanted or up to twice as many, so that they divide T; else those wanted, and T is padded."""
    wanted = min(wanted, t)
    return next((n for n in range(wanted, 2 * wanted) if t % n == 0), wanted)


def _check(hidden: jax.Array, head: jax.Array, labels: jax.Array, chunk: int) -> None:
    if hidden.ndim < 2 or head.ndim != 2 or hidden.shape[-1] != head.shape[0]:
        raise ValueError(
            f"hidden {list(hidden.shape)} and head {list(head.shape)}; give [..., positions, features] and "
            "[features, vocab], such as embedding.T"
        )
    if not (jnp.issubdtype(hidden.dtype, jnp.floating) and jnp.issubdtype(head.dtype, jnp.floating)):
        raise ValueError(f"hidden is {hidden.dtype}, head {head.dtype}; give floating-point numbers")
    if labels.shape != hidden.shape[:-1] or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels are {labels.dtype} {list(labels.shape)}; give integers {list(hidden.shape[:-1])}")
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk={chunk!r}; give a number of tokens from 1 on, such as {CHUNK}")
