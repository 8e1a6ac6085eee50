"""All-reduce on a ring, by neighbour permutes alone (Patarasu & Yuan 2009, Bandwidth optimal all-reduce algorithms for
clusters of workstations; Gibiansky 2017, Bringing HPC techniques to deep learning).

Each of n ranks cuts its buffer into n chunks.

    reduce-scatter   In step s, rank r receives a partial sum of chunk r - s from its left neighbour, and adds its own
                     chunk. After n - 1 steps it has the complete sum of chunk r + 1.
    all-gather       In n - 1 more steps the complete sums go round.

Three ranks, with the chunks a, b and c; numbers are the ranks in the partial sum, capitals complete sums:

    rank 0      a  b  c    +c (2)        +b (1, 2)  B        B and A     A B C
    rank 1      a  b  c    +a (0)        +c (2, 0)  C        C and B     A B C
    rank 2      a  b  c    +b (1)        +a (0, 1)  A        A and C     A B C
"""

import jax
import jax.numpy as jnp
from jax import lax

from .ranks import Axes, collective, count, index
from .reductions import COMBINE, check_op, mean


@collective
def ring_all_reduce(x: jax.Array, axes: Axes, op: str = "sum") -> jax.Array:
    """`all_reduce` by messages between neighbours: [...] -> [...], any size.

    Sends 2(n-1) chunks of S/n bytes (rounded up to whole elements): 2(n-1)/n S, the minimum for any algorithm. All
    ranks get the same bits. Each chunk is summed in another order of ranks, so floats equal those of `all_reduce` to
    rounding.

    Args:
      x: this rank's values.
      axes: mesh axes, or `on(mesh)`; the ring follows the ranks.
      op: as in `all_reduce`.

    Raises:
      ValueError: no such axis or op, or the op is not defined for this dtype.
    """
    check_op(op, x.dtype)
    if not axes:
        return x
    n, rank = count(axes), index(axes)
    right_neighbours = [(i, (i + 1) % n) for i in range(n)]
    # [n, chunk]. Padding is reduced with padding alone, and cut off at the end, so that zeros suit every op.
    chunks = jnp.pad(x.reshape(-1), (0, -x.size % n)).reshape(n, -1)

    def receive_and_add(partial_sum: jax.Array, step: jax.Array) -> tuple[jax.Array, None]:
        local_chunk = lax.dynamic_index_in_dim(chunks, (rank - step) % n, keepdims=False)
        return COMBINE[op](lax.ppermute(partial_sum, axes, right_neighbours), local_chunk), None

    def receive(chunk: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        chunk = lax.ppermute(chunk, axes, right_neighbours)
        return chunk, chunk

    # 1. Reduce-scatter.
    first_chunk = lax.dynamic_index_in_dim(chunks, rank, keepdims=False)
    complete, _ = lax.scan(receive_and_add, first_chunk, jnp.arange(1, n))  # chunk rank + 1
    # 2. All-gather.
    # Finished chunks are copied and never added up again, so that all ranks get the same bits.
    _, received = lax.scan(receive, complete, None, n - 1)  # chunks rank, rank - 1, ...
    backwards = jnp.concatenate([complete[None], received])  # row i is chunk rank + 1 - i
    total = backwards[(rank + 1 - jnp.arange(n)) % n].reshape(-1)[: x.size].reshape(x.shape)
    return mean(total, axes) if op == "avg" else total
