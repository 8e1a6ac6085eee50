"""Distributed data parallel: every device stores everything, and gradients are all-reduced.

For P parameters, N devices and K optimizer values per parameter, each device

    stores  params P   grads P   optimizer K P
    sends   all-reduce P per step (2 P (N - 1)/N elements for a ring)

A leaf that a layer stack uses once is reduced inside the backward loop, so that the all-reduce of one layer overlaps
with the backward of the next (section 3.2.3). With several microbatches, gradients accumulate locally and are reduced
once per step (section 3.2.4).

Source: Li et al. 2020, PyTorch Distributed, VLDB 13. Plain JAX version: `experiments/naive/ddp.py`.
"""

from collections.abc import Iterator

import jax

from ...collectives import all_reduce
from .contract import Promise, Rule, Sent, Use, Uses


def use_params(params: jax.Array, use: Use) -> jax.Array:
    """Return the stored parameters unchanged: every device stores them whole."""
    return params


def accumulate_grad(grad: jax.Array, use: Use) -> jax.Array:
    """Return what one use adds to the accumulator: its local gradient, all-reduced already if `use.last`."""
    # Before any sum, so that microbatches and replicas add up in the dtype of `reduce`.
    grad = grad.astype(use.dtype)
    return all_reduce(grad, use.rest) if use.last else grad


def finish_grad(accumulated: jax.Array, use: Use) -> jax.Array:
    """All-reduce the accumulated gradient, unless `accumulate_grad` did so in the backward already."""
    return accumulated if use.last else all_reduce(accumulated, use.rest)


def ddp_sends(leaf: Uses) -> Iterator[Sent]:
    """Yield the closed form of one leaf: one all-reduce of its gradient per step."""
    for grad in leaf.once:
        yield Sent("all-reduce", leaf.rest, leaf.reduce, grad.count, grad.total)


DDP = Rule(
    name="ddp",
    sharded=frozenset(),
    fetch=use_params,
    give=accumulate_grad,
    finish=finish_grad,
    promise=Promise(holds=frozenset(), sends=ddp_sends),
)
