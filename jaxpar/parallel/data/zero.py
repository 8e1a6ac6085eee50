"""ZeRO-1 and ZeRO-2: shard the optimizer state, then the gradients too (Rajbhandari et al. 2020, sections 5.1 and 5.2).

For P parameters, N devices along `fsdp`, K optimizer values per parameter and m microbatches per step, each device

              stores params   grads   optimizer     sends per step (elements; times (N - 1)/N for a ring)
    ZeRO-1    P               P       K P/N         reduce-scatter P, all-gather P
    ZeRO-2    P               P/N     K P/N         reduce-scatter m P, all-gather P

The steps of one update on one device:

    backward   ZeRO-1 accumulates whole gradients. ZeRO-2 reduce-scatters the gradient of every use, so that no whole
               gradient outlives its layer.
    finish     ZeRO-1 reduce-scatters the accumulated gradient. Both all-reduce their shard over the replicas (`data`).
    update     The optimizer updates this device's shard of the parameters.
    publish    An all-gather rebuilds the whole parameters from the updated shards.

In low precision the optimizer keeps float32 master shards, and `publish` gathers them in the compute dtype.

Plain JAX versions to read first: `experiments/naive/zero1.py`, `experiments/naive/zero2.py`.
"""

import math
from collections.abc import Iterator, Sequence

import jax
from jax import lax

from ...collectives import all_gather, all_reduce, reduce_scatter_as
from ...layout.leaves import Leaf
from .contract import Promise, Rule, Sent, Times, Use, Uses
from .ddp import use_params

# ----------------------------------------------------------------------------------------------------------------------
# Gradients, inside `shard_map`. Parameters are stored whole, as under ddp.


def give_whole_grad(grad: jax.Array, use: Use) -> jax.Array:
    """Return what one use adds to the accumulator under ZeRO-1: its whole local gradient, [*leaf] in `use.dtype`.

    If this gradient is the leaf's whole gradient of the step (`use.last`), return the reduced shard, [*leaf / N].
    """
    if use.last:
        # Nothing is accumulated after this use. Reducing here lets XLA overlap it with the rest of the backward.
        return reduce_grad(grad, use)
    return grad.astype(use.dtype)


def finish_whole_grad(accumulated: jax.Array, use: Use) -> jax.Array:
    """Reduce the gradient that `give_whole_grad` summed, unless it was reduced in the backward already."""
    return accumulated if use.last else reduce_grad(accumulated, use)


def scatter_grad(grad: jax.Array, use: Use) -> jax.Array:
    """Return what one use adds to the accumulator under ZeRO-2 and ZeRO-3: the shard of its gradient.

    Communicates a reduce-scatter over `use.shard`; if `use.last`, also an all-reduce over `use.rest`.
    """
    grad_shard = reduce_scatter_as(grad, use.shard, use.dim, use.dtype)
    return reduce_over_replicas(grad_shard, use) if use.last else grad_shard


def finish_grad_shard(grad_shard: jax.Array, use: Use) -> jax.Array:
    """Sum the accumulated shard over the replicas, unless `scatter_grad` did so in the backward already."""
    return grad_shard if use.last else reduce_over_replicas(grad_shard, use)


def reduce_grad(grad: jax.Array, use: Use) -> jax.Array:
    """Return this device's shard of a gradient, summed over all devices that used the leaf."""
    return reduce_over_replicas(reduce_scatter_as(grad, use.shard, use.dim, use.dtype), use)


def reduce_over_replicas(grad_shard: jax.Array, use: Use) -> jax.Array:
    """Sum a shard over the replicas along `use.rest`.

    With hpZ (`Strategy.hpz`) the stored shard is smaller than the one along `fsdp`: scatter over `use.second` first.
    """
    return all_reduce(reduce_scatter_as(grad_shard, use.second, use.dim, use.dtype), use.rest)


# ----------------------------------------------------------------------------------------------------------------------
# Parameters after the update.


def publish(leaves: Sequence[Leaf], shards: Sequence[jax.Array], old_params: Sequence[jax.Array]) -> list[jax.Array]:
    """All-gather the updated shards into whole parameters.

    Args:
      shards: this device's updated shard of each parameter, in the dtype in which it is stored.
      old_params: the whole parameters before the update. They give the dtype, and XLA reuses their memory where the
        step donates them.

    Returns:
      The whole parameters. Frozen leaves are returned as they are.
    """
    params = list(old_params)
    stacks_by_length: dict[int, list[int]] = {}
    for i, (leaf, shard, old) in enumerate(zip(leaves, shards, old_params, strict=True)):
        if not leaf.trainable:
            continue
        if leaf.dim is None:  # too small to shard: every device has updated it
            params[i] = shard.astype(old.dtype)
        elif leaf.by_layer:
            num_layers = math.prod(shard.shape[: leaf.stage + 1])  # a pipeline rank's chunks count as layers too
            stacks_by_length.setdefault(num_layers, []).append(i)
        else:
            params[i] = leaf.unpad(all_gather(shard.astype(old.dtype), leaf.shard, leaf.dim))

    # Gather stacks layer by layer, all stacks of one length in one loop. Gathering a whole stack at once would need a
    # second buffer of its size.
    for num_layers, members in stacks_by_length.items():
        shard_stacks = {i: _flatten_stages(shards[i], leaves[i], num_layers) for i in members}
        param_stacks = [_flatten_stages(old_params[i], leaves[i], num_layers) for i in members]

        def gather_layer(
            layer: jax.Array, param_stacks: list[jax.Array], shard_stacks: dict[int, jax.Array] = shard_stacks
        ) -> list[jax.Array]:
            updated = []
            for (i, shard_stack), param_stack in zip(shard_stacks.items(), param_stacks, strict=True):
                leaf, dim = leaves[i], leaves[i].inner(True)
                shard = lax.dynamic_index_in_dim(shard_stack, layer, keepdims=False).astype(param_stack.dtype)
                whole = leaf.unpad(all_gather(shard, leaf.shard, dim), dim)
                updated.append(lax.dynamic_update_index_in_dim(param_stack, whole, layer, axis=0))
            return updated

        param_stacks = lax.fori_loop(0, num_layers, gather_layer, param_stacks)
        for i, param_stack in zip(members, param_stacks, strict=True):
            params[i] = param_stack.reshape(old_params[i].shape)
    return params


def _flatten_stages(stack: jax.Array, leaf: Leaf, num_layers: int) -> jax.Array:
    """Reshape [chunks, ..., layers per chunk, *layer] to [num_layers, *layer]."""
    return stack.reshape(num_layers, *stack.shape[leaf.stage + 1 :])


# ----------------------------------------------------------------------------------------------------------------------
# Closed forms: what the papers say a device sends. They are written independently of the functions above, so that
# `check`, which compares the two, proves something.


def reductions(leaf: Uses, grads: Sequence[Times]) -> Iterator[Sent]:
    """Yield the reduce-scatters of `grads`, and once per step the reductions of the shard over the replicas."""
    for grad in grads:
        yield Sent("reduce-scatter", leaf.shard, leaf.reduce, grad.count * grad.pieces, grad.total)
    for grad in leaf.once:
        shard_elements = grad.total // leaf.shards
        yield Sent("reduce-scatter", leaf.second, leaf.reduce, grad.count, shard_elements)
        yield Sent("all-reduce", leaf.rest, leaf.reduce, grad.count, shard_elements // leaf.hpz_parts)


def publications(leaf: Uses) -> Iterator[Sent]:
    """Yield the all-gathers that rebuild one leaf after its update (`publish`)."""
    for param in leaf.updated:
        yield Sent("all-gather", leaf.shard, leaf.stored, param.count, param.total)


def zero1_sends(leaf: Uses) -> Iterator[Sent]:
    """Yield what ZeRO-1 sends for one leaf: one reduction per step."""
    yield from reductions(leaf, leaf.once)
    yield from publications(leaf)


def zero2_sends(leaf: Uses) -> Iterator[Sent]:
    """Yield what ZeRO-2 sends for one leaf: one reduction per use."""
    yield from reductions(leaf, leaf.given)
    yield from publications(leaf)


# Both shard the gradient that the update receives. ZeRO-1 accumulates it whole before that.
ZERO1 = Rule(
    name="ZeRO-1",
    sharded=frozenset({"optimizer", "grads"}),
    fetch=use_params,
    give=give_whole_grad,
    finish=finish_whole_grad,
    promise=Promise(holds=frozenset({"optimizer"}), sends=zero1_sends),
    published=True,
)
ZERO2 = Rule(
    name="ZeRO-2",
    sharded=frozenset({"optimizer", "grads"}),
    fetch=use_params,
    give=scatter_grad,
    finish=finish_grad_shard,
    promise=Promise(holds=frozenset({"optimizer"}), sends=zero2_sends),
    published=True,
    at_once=True,
)
