"""Data parallel 1.0: a central server (Li et al. 2014, Parameter Server, OSDI 11; PyTorch's `nn.DataParallel`).

    server    params P   optimizer K P   gradients of all n replicas, n P       others    params P   grads P

    every step    server -> replicas   weights (broadcast, n-1 times P) and rows of the batch (scatter)
                  replicas -> server   sums of losses and metrics, and gradients (gather, n-1 times P)

All of it passes through one device, which then updates alone while the others wait. It is here to be measured against.
The replicas' program holds no collective (but for models whose rows are coupled, by BatchNorm or `jp.all_rows`).
"""

from __future__ import annotations

import jax

from .contract import Rule, Use


def _keep(x: jax.Array, use: Use) -> jax.Array:
    return x


def _give(x: jax.Array, use: Use) -> jax.Array:
    return x.astype(use.dtype)


SERVER = Rule("server", frozenset(), _keep, _give, _keep)
