"""Data parallel 1.0: a central server (Li et al. 2014, Parameter Server, OSDI 11; PyTorch's `nn.DataParallel`).

    server    params P   optimizer K P   gradients of all n replicas, n P       others    params P   grads P

    five exchanges a step, of n devices, through the links of one
      1 scatter     rows of the batch             to each replica its rows
      2 broadcast   weights                       (n-1) P
      3 gather      losses                        each replica's sums: the server computes the loss
      4 scatter     gradients of the losses       a scalar each
      5 gather      gradients                     (n-1) P, which the server adds up

Between 3 and 4 the replicas wait for the loss, after 5 for the update. So a forward's activations are kept until the
loss is back, those of all microbatches, which therefore save no memory here. It is here to be measured against.
The replicas' programs hold no collective (but for models whose rows are coupled, by BatchNorm or `jp.all_rows`).

In plain JAX: `experiments/naive/server.py`.
"""

import jax

from .contract import Promise, Rule, Use


def _keep(x: jax.Array, use: Use) -> jax.Array:
    return x


def _give(x: jax.Array, use: Use) -> jax.Array:
    return x.astype(use.dtype)


def exchanged(replicas: int, rows: int, weights: int, metrics: int, gradients: int) -> dict[str, int]:
    """The closed form: bytes through the server's links in one step, by what is sent to or from the other replicas.

    `rows`, `weights` (with variables) and `gradients` are bytes of one replica; of each metric there are a sum and a
    count, and of the loss one gradient, in float32.
    """
    each = {
        "rows of the batch": rows,
        "weights": weights,
        "losses": 4 * 2 * metrics,
        "gradients of the losses": 4,
        "gradients": gradients,
    }
    return {what: (replicas - 1) * size for what, size in each.items()}


SERVER = Rule("server", frozenset(), _keep, _give, _keep, Promise(frozenset(), lambda leaf: (), sums=False))
