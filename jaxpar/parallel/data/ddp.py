"""Distributed data parallel: everything replicated, gradients all-reduced (Li et al. 2020, PyTorch Distributed, VLDB
13).

    per device   params P   grads P   optimizer whole        sent per step   all-reduce P

A leaf that a layer stack uses once is reduced inside the backward loop, so that the reduction of one layer overlaps
with the backward of the next (section 3.2.3). With several microbatches gradients accumulate locally and are reduced
once (3.2.4). In plain JAX: `experiments/naive/ddp.py`.
"""

from collections.abc import Iterator

import jax

from ...collectives import all_reduce
from .contract import Promise, Rule, Sent, Use, Uses


def _fetch(x: jax.Array, use: Use) -> jax.Array:
    return x


def _give(x: jax.Array, use: Use) -> jax.Array:
    x = x.astype(use.dtype)
    return all_reduce(x, use.rest) if use.last else x


def _finish(x: jax.Array, use: Use) -> jax.Array:
    return x if use.last else all_reduce(x, use.rest)


def _sends(leaf: Uses) -> Iterator[Sent]:
    """The closed form: an all-reduce of P, once."""
    for each in leaf.once:
        yield Sent("all-reduce", leaf.rest, leaf.reduce, each.count, each.total)


DDP = Rule("ddp", frozenset(), _fetch, _give, _finish, Promise(frozenset(), _sends))
