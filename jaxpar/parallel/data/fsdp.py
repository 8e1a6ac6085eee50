"""ZeRO-3, also called fully sharded data parallel: the parameters are sharded too.

For P parameters, N devices along `fsdp`, K optimizer values per parameter and m microbatches per step, each device

    stores        params P/N   grads P/N   optimizer K P/N
    sends         all-gather m P in the forward and m P in the backward, reduce-scatter m P
                  over `data` an all-reduce of P/N (hybrid sharding, FSDP section 3.2.2)
    sync="step"   accumulates whole gradients, P, and sends reduce-scatter P
                  (FSDP section 3.3.4, "gradient accumulation without communication")
    hpz           stores params P/N and optimizer K P/N over all N devices along `data` and `fsdp`. While a step runs,
                  it also stores a second shard in the compute dtype, P over `fsdp` alone. Once per step, it sends an
                  all-gather of that shard over `data` and a reduce-scatter of the same size. Layers are gathered over
                  `fsdp` alone. (ZeRO++, section 3.2, gathers over all devices once more in each microbatch.)

A layer's parameters are whole while the layer runs, in the forward and again in the backward. With
`Strategy.prefetch` they are gathered while the layer before runs, and a step gathers one layer more. Parameters are
cast before they are gathered, so that low precision halves the traffic. The backward of the gather is written out
(`zero.scatter_grad`), so that it reduces in float32.

Sources: Rajbhandari et al. 2020, ZeRO, section 5.3. Zhao et al. 2023, PyTorch FSDP. Wang et al. 2023, ZeRO++,
arXiv:2306.10209. Plain JAX versions: `experiments/naive/zero3.py`, `experiments/naive/hsdp.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import jax

from ...collectives import all_gather
from ...collectives.ranks import count
from ...layout.layout import Layout
from ...program.buffers import uninitialized
from .contract import Promise, Rule, Sent, Use, Uses
from .zero import finish_grad_shard, finish_whole_grad, give_whole_grad, publish, reductions, scatter_grad

# ----------------------------------------------------------------------------------------------------------------------
# Parameters, inside `shard_map`. ZeRO-1 and ZeRO-2 have the functions for gradients.


def gather_params(param_shard: jax.Array, use: Use) -> jax.Array:
    """Return the whole leaf, or one layer of it, all-gathered from this device's shard."""
    return all_gather(param_shard, use.shard, use.dim)


def secondary(layout: Layout, stored: Sequence[jax.Array]) -> list[jax.Array]:
    """Return hpZ's second shards, in the compute dtype, from what a device stores.

    Communicates an all-gather over `data`, of stacks layer by layer. The second shard of a leaf is the part that the
    devices along `fsdp` share.
    """
    # `publish` gathers stored leaves over their shard axes. With padded=-1 no dim has the padded size, so that it
    # removes no padding: the second shards are padded like the stored leaves. With trainable=True it gathers frozen
    # leaves too, so that it writes all of every array.
    leaves = [replace(leaf, shard=("data",), padded=-1, trainable=True) for leaf in layout.leaves]
    shape = lambda leaf, x: [n * count(["data"]) if d == leaf.dim else n for d, n in enumerate(x.shape)]
    empty = lambda leaf, x: uninitialized(shape(leaf, x), layout.policy.computed(leaf.dtype))
    return publish(leaves, stored, list(map(empty, leaves, stored)))


# ----------------------------------------------------------------------------------------------------------------------
# Closed forms.


def zero3_sends(leaf: Uses, once: bool = False) -> Iterator[Sent]:
    """Yield what ZeRO-3 sends for one leaf; `once` reduces gradients once per step (sync="step") instead of per use."""
    for param in leaf.fetched:
        yield Sent("all-gather", leaf.shard, leaf.compute, param.count, param.total)
    # hpZ's second shards, gathered once per step; `leaf.second` is empty without hpZ.
    for param in leaf.updated:
        yield Sent("all-gather", leaf.second, leaf.compute, param.count, param.total // leaf.shards)
    yield from reductions(leaf, leaf.once if once else leaf.given)


ZERO3 = Rule(
    name="ZeRO-3",
    sharded=frozenset({"params", "grads", "optimizer"}),
    fetch=gather_params,
    give=scatter_grad,
    finish=finish_grad_shard,
    promise=Promise(holds=frozenset({"params", "optimizer"}), sends=zero3_sends),
    at_once=True,
)
ZERO3_ONCE = Rule(
    name="ZeRO-3",
    sharded=frozenset({"params", "grads", "optimizer"}),
    fetch=gather_params,
    give=give_whole_grad,
    finish=finish_whole_grad,
    promise=Promise(holds=frozenset({"params", "optimizer"}), sends=partial(zero3_sends, once=True)),
)
