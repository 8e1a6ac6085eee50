"""ZeRO-1 and ZeRO-2: optimizer state, then gradients too, sharded over `fsdp` (Rajbhandari et al. 2020, sections 5.1, 5.2).

    per device       params   grads   optimizer     sent per step, m microbatches
    ZeRO-1           P        P       K P/N         reduce-scatter P, all-gather P
    ZeRO-2           P        P/N     K P/N         reduce-scatter m P, all-gather P

ZeRO-1 accumulates whole gradients locally and scatters their sum once; ZeRO-2 never holds a whole gradient, and pays
for it with a reduce-scatter in every microbatch. Each device updates its shard of the parameters, which is then
all-gathered. In low precision the float32 master lives with the optimizer, sharded, and the all-gathered copy is in the compute
dtype. Over `data`, what `fsdp` has scattered is all-reduced: P/N.
"""

from __future__ import annotations

import jax

from ..collectives import all_gather, all_reduce, reduce_scatter
from .contract import Rule, Use


def _fetch(x: jax.Array, use: Use) -> jax.Array:
    return x


def _give_at_last(x: jax.Array, use: Use) -> jax.Array:
    return _reduce(x, use) if use.last else x


def _finish_all(x: jax.Array, use: Use) -> jax.Array:
    return x if use.last else _reduce(x, use)


def _reduce(x: jax.Array, use: Use) -> jax.Array:
    return all_reduce(reduce_scatter(x, ["fsdp"], use.dim), ["data"])


def scatter(x: jax.Array, use: Use) -> jax.Array:
    """The shard of the sum over `fsdp`, and over `data` if nothing more is to come."""
    x = reduce_scatter(x, ["fsdp"], use.dim)
    return all_reduce(x, ["data"]) if use.last else x


def finish(x: jax.Array, use: Use) -> jax.Array:
    """What `scatter` left undone: the sum over `data`."""
    return x if use.last else all_reduce(x, ["data"])


def _publish(x: jax.Array, use: Use) -> jax.Array:
    return all_gather(x, ["fsdp"], use.dim)


ZERO1 = Rule("zero1", frozenset({"optimizer", "grads"}), _fetch, _give_at_last, _finish_all, _publish)
ZERO2 = Rule("zero2", frozenset({"optimizer", "grads"}), _fetch, scatter, finish, _publish)
