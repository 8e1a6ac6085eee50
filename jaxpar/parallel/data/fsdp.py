"""ZeRO-3, also called fully sharded data parallel: parameters sharded too (Rajbhandari et al. 2020, section 5.3; Zhao
et al. 2023, PyTorch FSDP).

    per device   params P/N   grads P/N   optimizer K P/N
    sent         all-gather m P forwards and m P backwards, reduce-scatter m P       (m microbatches)
    over `data`  (hybrid sharding, FSDP section 3.2.2) an all-reduce of P/N
    sync="step"  reduce-scatter P, of whole gradients that a device accumulates (FSDP section 3.3.4, without
                 communication)
    hpz          parameters and optimizer P/N and K P/N over `data` and `fsdp` together, of N devices, and while a step
                 runs a second shard in the compute dtype, P over `fsdp` alone; over `data` an all-gather of it and a
                 reduce-scatter as large, once a step; layers are gathered over `fsdp` (ZeRO++, Wang et al. 2023,
                 arXiv:2306.10209, section 3.2, where each microbatch gathers over all devices once more)

A layer's parameters are whole while the layer runs, forwards and again backwards; with `Strategy.prefetch` while the
layer before it runs as well, and a step sends one layer more. They are cast before they are gathered, so that low
precision halves the traffic; the transpose of the gather, written out, reduces in float32.

In plain JAX: `experiments/naive/zero3.py`, `experiments/naive/hsdp.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from ...collectives import all_gather
from ...collectives.ranks import count
from ...layout.layout import Layout
from .contract import Promise, Rule, Sent, Use, Uses
from .zero import finish, finish_all, give_at_last, publish, scatter, scattered


def _fetch(x: jax.Array, use: Use) -> jax.Array:
    return all_gather(x, use.shard, use.dim)


def secondary(layout: Layout, stored: Sequence[jax.Array]) -> list[jax.Array]:
    """With hpZ, what a device stores -> its part of what the devices along `fsdp` share, in the compute dtype: an
    all-gather over `data`, of stacks layer by layer.
    """
    parts = [replace(leaf, shard=("data",), padded=-1, trainable=True) for leaf in layout.leaves]  # padding stays
    shape = lambda leaf, x: [n * count(["data"]) if d == leaf.dim else n for d, n in enumerate(x.shape)]
    zeros = lambda leaf, x: jnp.zeros(shape(leaf, x), layout.policy.computed(leaf.dtype))
    return publish(parts, stored, list(map(zeros, parts, stored)))


def _sends(leaf: Uses, once: bool = False) -> Iterator[Sent]:
    """The closed form: an all-gather at every use, forwards and backwards, of hpZ's second shards one before; a
    reduce-scatter of every gradient, or `once`, of the step's.
    """
    for each in leaf.fetched:
        yield Sent("all-gather", leaf.shard, leaf.compute, each.count, each.total)
    for each in leaf.updated:
        yield Sent("all-gather", leaf.second, leaf.compute, each.count, each.total // leaf.shards)
    yield from scattered(leaf, leaf.once if once else leaf.given)


_ALL, _HELD = frozenset({"params", "grads", "optimizer"}), frozenset({"params", "optimizer"})
ZERO3 = Rule("ZeRO-3", _ALL, _fetch, scatter, finish, Promise(_HELD, _sends), at_once=True)
ZERO3_ONCE = Rule("ZeRO-3", _ALL, _fetch, give_at_last, finish_all, Promise(_HELD, partial(_sends, once=True)))
