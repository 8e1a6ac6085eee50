"""Attention by heads: all-to-alls give each rank more positions of fewer heads, and return the result.

`ulysses_attention` gives each rank whole sequences of hq/c heads (Jacobs et al. 2023, DeepSpeed Ulysses,
arXiv:2309.14509):

    q, k, v [b, t/c, h, d]   --all-to-all-->   [b, t, h/c, d]
                                                     | any kernel
    out     [b, t/c, hq, d]  <--all-to-all--   [b, t, hq/c, d]

If heads are fewer than ranks, `usp_attention` exchanges them in groups of u ranks. Each rank then has u chunks of the
sequence, and the groups form a ring (Fang and Zhao 2024, A Unified Sequence Parallelism Approach for Long Context
Generative AI, arXiv:2405.07719).

Dims: b rows, t query positions, s key positions, c ranks, u ranks in a group, hq heads, hkv key/value heads, d
head_dim.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from ....collectives.nccl import all_to_all
from ....collectives.ranks import count, spanned
from ..attention.flash import AttentionOptions
from ..attention.fused import attention_kernel, check_inputs
from .order import Ring, check_order, from_zigzag, to_zigzag
from .ring import by_rounds, gather_ids
from .rounds import Rounds


def ulysses_attention(
    ring: Ring, options: AttentionOptions, q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array
) -> jax.Array:
    """Compute `jp.attention` of a sequence that is split over ranks, inside `shard_map`, by splitting heads instead.

    Sends, with e bytes an element: all-to-alls of q, of k and v together, and of the result, (c-1)/c (2 hq t + 2 hkv s)
    b d e / c in all, backward the same. If c does not divide hkv, key heads are repeated until it does: read lcm(c,
    hkv) for hkv.

    Args:
      ring: the ranks, and the positions that they hold; all ranks share heads, whatever its `group`.
      q: float [b, t/c, hq, d], this rank's queries; c divides hq.
      options, k, v: as for `gather_attention`.
      ids: as for `ring_attention`.

    Returns:
      [b, t/c, hq, d], as from `gather_attention`.

    Raises:
      ValueError: shapes, dtypes or options do not fit; or c does not divide hq.
    """
    check_inputs(options, q, k, v, *ids)
    check_order(ring.order, q, k)
    # Key heads that c does not divide are repeated, but repeated query heads would be computed several times.
    c, heads = count(ring.axis), q.shape[2]
    if heads % c:
        raise ValueError(
            f"{c} ranks do not divide {heads} query heads; use ring_attention or gather_attention, or fewer ranks"
        )
    in_user_order = lambda x: from_zigzag(x, c) if ring.order == "zigzag" else x
    # Ids of all ranks, [c, b, t/c] -> [b, t].
    whole_ids = [in_user_order(jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1)) for x in gather_ids(ring.axis, *ids)]
    kernel_options = replace(options, implementation=None)
    attend = lambda q, k, v: attention_kernel(kernel_options, q, k, v, *whole_ids)
    return attend_by_heads(attend, replace(ring, group=c), q, k, v)


def usp_attention(
    ring: Ring, options: AttentionOptions, q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array
) -> jax.Array:
    """Compute `jp.attention` of a sequence that is split over ranks, inside `shard_map`, by a ring of groups.

    u ranks next to each other exchange positions for heads. Keys and values go round the ring of the c / u groups.

    ```
    6 ranks, groups of 2, 2 heads, plain order       exchanged: all positions of the group, of one head
    rank       0   1 | 2   3 | 4   5                  0    1  |  2    3  |  4    5
    positions  a   b | c   d | e   f                  ab   ab |  cd   cd |  ef   ef      rings 0 -> 2 -> 4, 1 -> 3 -> 5
    ```

    Sends, with e bytes an element: all-to-alls in groups of u, (u-1)/u (2 hq t + 2 hkv s) b d e / c in all, backward
    the same. It also sends as much as `ring_attention` on c/u ranks with s/c positions of hkv heads a hop: forward
    2 (c/u - 1) b (s/c) hkv d e. Holds the same arrays as the ring.

    Args:
      ring: the ranks. Those of a `group` share heads; u divides c, hq and hkv. In zigzag order a group has the two
        chunks that a rank of a ring of c / u has, in parts.
      options, q, k, v, ids: as for `ring_attention`.

    Returns:
      [b, t/c, hq, d], as from `gather_attention`.

    Raises:
      ValueError: shapes, dtypes or options do not fit; or `group` does not divide ranks and heads.
    """
    check_inputs(options, q, k, v, *ids)
    check_order(ring.order, q, k)
    c, heads, groups, group = count(ring.axis), q.shape[2], k.shape[2], ring.group
    if group < 1 or any(n % group for n in (c, heads, groups)):
        raise ValueError(
            f"groups of {group} ranks do not divide {c} ranks, {heads} query heads and {groups} key heads; use a "
            "divisor of all three, or ring_attention"
        )

    def merge_groups(ids: jax.Array) -> jax.Array:
        """Reorder the ids of all ranks, [c, b, t/c], to those of the ring's groups: [c/u, b, u t/c]."""
        group_ids = ids.reshape(c // group, group, *ids.shape[1:])
        group_ids = jnp.moveaxis(group_ids, 1, 2).reshape(c // group, ids.shape[1], -1)
        return jax.vmap(lambda x: from_zigzag(x, group))(group_ids) if ring.order == "zigzag" else group_ids

    all_ids = [merge_groups(x) for x in gather_ids(ring.axis, *ids)]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return by_rounds(Rounds.of(ring, options, q, k), q, k, v, *all_ids)

    return attend_by_heads(attend, ring, q, k, v)


def attend_by_heads(
    attend: Callable[..., jax.Array], ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
    """Exchange positions for heads among the ranks of a group, attend, and exchange the result back.

    Args:
      attend: from q [b, u t/c, hq/u, d] and k, v [b, u s/c, hkv/u, d] to the result of q's shape. Key heads are
        repeated until the group divides them.
      ring: the ranks. `attend` receives the positions of a ring of c / u ranks, in its order.
      q, k, v: as for `gather_attention`.

    Returns:
      [b, t/c, hq, d].
    """
    group, is_zigzag = ring.group, ring.order == "zigzag"
    # Keys and values share an all-to-all, concatenated along d.
    # Key heads are repeated by the least factor with which the group divides them.
    kv = jnp.repeat(jnp.concatenate([k, v], -1), group // math.gcd(group, k.shape[2]), axis=2)
    q, kv = (_group_all_to_all(x, ring, 2, 1) for x in (q, kv))
    # In zigzag order the first chunks of a group's ranks follow each other in the sequence. So do their second chunks,
    # from the group's last rank to its first: `from_zigzag` makes both stretches contiguous.
    q, kv = (from_zigzag(x, group) for x in (q, kv)) if is_zigzag else (q, kv)
    output = attend(q, *jnp.split(kv, 2, axis=-1))
    return _group_all_to_all(to_zigzag(output, group) if is_zigzag else output, ring, 1, 2)


def _group_all_to_all(x: jax.Array, ring: Ring, split_dim: int, concat_dim: int) -> jax.Array:
    """All-to-all among the ranks of a group: split `split_dim` over them, and concatenate along `concat_dim`."""
    axis, group = ring.axis, ring.group
    if group == count(axis):
        return all_to_all(x, axis, split_dim, into=concat_dim)
    if group == 1:
        return x
    ranks = [[*range(first, first + group)] for first in range(0, count(axis), group)]
    return lax.all_to_all(x, spanned(axis), split_dim, concat_dim, axis_index_groups=ranks, tiled=True)
