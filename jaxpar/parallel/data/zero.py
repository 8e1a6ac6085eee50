"""ZeRO-1 and ZeRO-2: optimizer state, then gradients too, sharded over `fsdp` (Rajbhandari et al. 2020, sections 5.1,
5.2).

    per device       params   grads   optimizer     sent per step, m microbatches
    ZeRO-1           P        P       K P/N         reduce-scatter P, all-gather P
    ZeRO-2           P        P/N     K P/N         reduce-scatter m P, all-gather P

ZeRO-1 accumulates whole gradients locally and scatters their sum once; ZeRO-2 never holds a whole gradient, and pays
for it with a reduce-scatter in every microbatch. Each device updates its shard of the parameters, which is then
all-gathered. In low precision the float32 master lives with the optimizer, sharded, and the all-gathered copy is in
the compute dtype. Over `data`, what `fsdp` has scattered is all-reduced: P/N.

In plain JAX: `experiments/naive/zero1.py`, `experiments/naive/zero2.py`.
"""

import math
from collections.abc import Iterator, Sequence

import jax
from jax import lax

from ...collectives import all_gather, all_reduce, reduce_scatter_as
from ...layout.leaves import Leaf
from .contract import Promise, Rule, Sent, Times, Use, Uses


def _fetch(x: jax.Array, use: Use) -> jax.Array:
    return x


def give_at_last(x: jax.Array, use: Use) -> jax.Array:
    """The whole gradient; where it is all of the step's, the shard of its sum."""
    return _reduce(x, use) if use.last else x.astype(use.dtype)


def finish_all(x: jax.Array, use: Use) -> jax.Array:
    """What `give_at_last` left undone: the shard of the sum."""
    return x if use.last else _reduce(x, use)


def _reduce(x: jax.Array, use: Use) -> jax.Array:
    return _rest(reduce_scatter_as(x, use.shard, use.dim, use.dtype), use)


def _rest(x: jax.Array, use: Use) -> jax.Array:
    return all_reduce(reduce_scatter_as(x, use.second, use.dim, use.dtype), use.rest)


def scatter(x: jax.Array, use: Use) -> jax.Array:
    """The shard of the sum over its axes, and over the rest if nothing more is to come."""
    x = reduce_scatter_as(x, use.shard, use.dim, use.dtype)
    return _rest(x, use) if use.last else x


def finish(x: jax.Array, use: Use) -> jax.Array:
    """What `scatter` left undone: the sum over the rest."""
    return x if use.last else _rest(x, use)


def publish(leaves: Sequence[Leaf], shards: Sequence[jax.Array], old: Sequence[jax.Array]) -> list[jax.Array]:
    """The whole of every leaf from updated shards, in the dtype and, where XLA donates it, the memory of the `old`
    ones.

    Stacks are gathered layer by layer, those of one length together: a gather of the whole would need a second buffer
    of its size. Frozen leaves stay as they are.
    """
    out = list(old)
    loops: dict[int, list[int]] = {}
    for i, (leaf, shard, was) in enumerate(zip(leaves, shards, old, strict=True)):
        if not leaf.trainable:
            continue
        if leaf.dim is None:
            out[i] = shard.astype(was.dtype)
        elif not leaf.by_layer:
            out[i] = leaf.unpad(all_gather(shard.astype(was.dtype), leaf.shard, leaf.dim))
        else:
            loops.setdefault(math.prod(shard.shape[: leaf.stage + 1]), []).append(i)
    for length, members in loops.items():
        # The chunks of a pipeline's rank are layers like others here.
        layers = {i: (x := shards[i]).reshape(length, *x.shape[leaves[i].stage + 1 :]) for i in members}

        def body(at: jax.Array, stacks: list[jax.Array], layers: dict[int, jax.Array] = layers) -> list[jax.Array]:
            new = []
            for (i, shards), stack in zip(layers.items(), stacks, strict=True):
                leaf, dim = leaves[i], leaves[i].inner(True)
                shard = lax.dynamic_index_in_dim(shards, at, keepdims=False).astype(stack.dtype)
                whole = leaf.unpad(all_gather(shard, leaf.shard, dim), dim)
                new.append(lax.dynamic_update_index_in_dim(stack, whole, at, axis=0))
            return new

        stacks = [(x := old[i]).reshape(length, *x.shape[leaves[i].stage + 1 :]) for i in members]
        for i, stack in zip(members, lax.fori_loop(0, length, body, stacks), strict=True):
            out[i] = stack.reshape(old[i].shape)
    return out


def scattered(leaf: Uses, gradients: Sequence[Times]) -> Iterator[Sent]:
    """`scatter` and `finish`: a reduce-scatter of each of `gradients`, an all-reduce of the shard over the rest, of
    what is left of it behind a reduce-scatter over `second`.
    """
    for each in gradients:
        yield Sent("reduce-scatter", leaf.shard, leaf.reduce, each.count * each.pieces, each.total)
    for each in leaf.once:
        shard = each.total // leaf.shards
        yield Sent("reduce-scatter", leaf.second, leaf.reduce, each.count, shard)
        yield Sent("all-reduce", leaf.rest, leaf.reduce, each.count, shard // leaf.seconds)


def _published(leaf: Uses) -> Iterator[Sent]:
    """The closed form of `publish`: an all-gather of the updated leaf."""
    for each in leaf.updated:
        yield Sent("all-gather", leaf.shard, leaf.stored, each.count, each.total)


def _sends_1(leaf: Uses) -> Iterator[Sent]:
    yield from scattered(leaf, leaf.once)
    yield from _published(leaf)


def _sends_2(leaf: Uses) -> Iterator[Sent]:
    yield from scattered(leaf, leaf.given)
    yield from _published(leaf)


_SHARDED, _HELD = frozenset({"optimizer", "grads"}), frozenset({"optimizer"})
ZERO1 = Rule("ZeRO-1", _SHARDED, _fetch, give_at_last, finish_all, Promise(_HELD, _sends_1), published=True)
ZERO2 = Rule("ZeRO-2", _SHARDED, _fetch, scatter, finish, Promise(_HELD, _sends_2), published=True, at_once=True)
