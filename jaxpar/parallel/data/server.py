"""Data parallel 1.0: a central server holds the parameters and updates them.

For P parameters, K optimizer values per parameter and n replicas (the first one is the server),

    the server stores    params P   optimizer K P   gradients of all replicas, n P
    a replica stores     params P   grads P

Five exchanges per step, all through the server's links:

    1. scatter      rows of the batch             to each replica its rows
    2. broadcast    parameters                    (n - 1) P
    3. gather       losses                        each replica's sums, from which the server computes the loss
    4. scatter      gradients of the losses       one scalar each
    5. gather       gradients                     (n - 1) P, which the server adds up

Between 3 and 4 the replicas wait for the loss; after 5 they wait for the update. Each replica keeps the activations of
its forward until the loss is back. It does so for all microbatches, so that they save no memory. This strategy is here
to be measured against the others. The replicas' programs contain no collective, except for models whose rows depend on
one another (BatchNorm, `jp.all_rows`).

Sources: Li et al. 2014, Parameter Server, OSDI 11; PyTorch's `nn.DataParallel`. Plain JAX version:
`experiments/naive/server.py`. The step is `step/server.py`.
"""

import jax

from .contract import Promise, Rule, Use
from .ddp import use_params


def accumulate_grad(grad: jax.Array, use: Use) -> jax.Array:
    """Return the local gradient of one use, in the reduce dtype."""
    return grad.astype(use.dtype)


def finish_grad(accumulated: jax.Array, use: Use) -> jax.Array:
    """Return the accumulated gradient unchanged: the server adds up the replicas' gradients."""
    return accumulated


def exchanged(replicas: int, rows: int, weights: int, metrics: int, gradients: int) -> dict[str, int]:
    """Return the closed form: bytes through the server's links in one step, by exchange.

    Args:
      replicas: the number of replicas, the server among them.
      rows: bytes of one replica's rows of the batch.
      weights: bytes of the state that is broadcast: parameters, variables and a few scalars.
      metrics: the number of metrics, the loss among them; for each, a replica sends a float32 sum and a float32 count.
      gradients: bytes of one replica's gradients.
    """
    bytes_per_replica = {
        "rows of the batch": rows,
        "weights": weights,
        # A metric is a total and a count in float32.
        "losses": 4 * 2 * metrics,
        "gradients of the losses": 4,
        "gradients": gradients,
    }
    return {exchange: (replicas - 1) * size for exchange, size in bytes_per_replica.items()}


SERVER = Rule(
    name="server",
    sharded=frozenset(),
    fetch=use_params,
    give=accumulate_grad,
    finish=finish_grad,
    # The server moves arrays between devices itself, so that the replicas' programs send nothing.
    promise=Promise(holds=frozenset(), sends=lambda leaf: (), sums=False),
)
