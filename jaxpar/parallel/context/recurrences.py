"""Rules of equations that mix positions with all positions before them: cumulative sums, and scans over positions.

    cumulative sums        a chunk needs the total of each chunk before it
    linear recurrences     a chunk needs the state in which the chunk before it ends

Each rank first runs its chunks alone. All ranks gather one summary of every chunk (`ops.from_chunks`), and each joins
its chunks with the summaries of those before them.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...program import jaxpr as jx
from ...program import primitives
from ..tensor import RULES as TENSOR
from ..tensor.localiser import Found, LocalValue, place
from ..tensor.primitives import follow
from ..tensor.sums import identity
from .attention_mode import AXIS
from .localiser import ContextLocaliser
from .ops import from_chunks
from .places import constant
from .rules import rule
from .split import Split

_CUMULATIVE_JOINS = {
    "cumsum": jnp.add,
    "cumprod": jnp.multiply,
    "cummax": jnp.maximum,
    "cummin": jnp.minimum,
    "cumlogsumexp": jnp.logaddexp,
}


@rule(*_CUMULATIVE_JOINS)
def _cumulative(localiser: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Accumulate each chunk, and join it with the totals of the chunks before it.

    The totals are one number for each chunk, row and feature. They are all-gathered: each rank sends (c - 1) p of them,
    for its p chunks.
    """
    (x,) = inputs
    assert x.dim is not None
    dim, n = localiser.split(x.dim), x.shape[x.dim]
    if x.dim != eqn.params["axis"]:
        return follow(localiser, eqn, inputs)
    chunk, num_following = localiser.chunk(n, dim.overlap), max(dim.overlap, 0)
    is_reverse = eqn.params["reverse"]
    # Rows that are merged would need a prefix each.
    if dim.rows > 1 or (is_reverse and num_following):
        return None
    join = _CUMULATIVE_JOINS[eqn.primitive.name]
    neutral = jnp.asarray(identity(eqn), x.value.dtype)

    # 1. Accumulate each chunk, without places beyond the end.
    value = x.value
    if chunk * localiser.mode.parts(localiser.ranks) + num_following != n:
        is_inside = localiser.row_positions(n, dim.overlap) < n
        is_inside = jnp.expand_dims(is_inside, [d for d in range(len(x.shape)) if d != dim])
        value = jnp.where(is_inside, value, neutral)
    accumulated = [jx.bind(eqn, [part])[0] for part in jnp.split(value, localiser.mode.parts(1), dim)]

    # 2. Gather the totals of all chunks: the last accumulated value before the overlap, or the first in reverse.
    end = 0 if is_reverse else chunk - 1
    own_totals = jnp.stack([lax.slice_in_dim(y, end, end + 1, axis=int(dim)) for y in accumulated])
    totals = from_chunks(own_totals, AXIS, localiser.mode.order)

    # 3. Join each chunk with the total of those before it (after it, in reverse).
    prefixes = [jnp.full_like(totals[0], neutral)]
    for total in (totals[::-1] if is_reverse else totals)[:-1]:
        prefixes.append(join(prefixes[-1], total))
    prefix_of_chunk = jnp.stack(prefixes[::-1] if is_reverse else prefixes)
    joined = [join(prefix_of_chunk[i], y) for i, y in zip(localiser.chunks(), accumulated, strict=True)]
    return [(jnp.concatenate(joined, int(dim)), dim)]


@rule("scan")
def _scan(localiser: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Run a scan over layers on this rank's positions; run a scan over positions as a linear recurrence.

    Returns:
      The local outputs; None if the scan over positions is no diagonal linear recurrence.
    """
    parts = jx.scan_parts(eqn)
    steps = inputs[len(parts.consts) + len(parts.carry) :]
    if (local_outputs := _picking_scan(localiser, eqn, inputs)) is not None:
        return local_outputs
    # Small values of the steps, such as masks, are gathered.
    if not any(x.dim == 0 and math.prod(x.shape) > localiser.max_gathered for x in steps):
        return TENSOR["scan"](localiser, eqn, inputs)
    return _recurrence(localiser, eqn, inputs) if diagonal(parts) else None


def _picking_scan(localiser: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Rewrite a scan whose body picks the position of its step, `a[:, i]`, as a scan over these positions.

    Returns:
      The local outputs; None if the body uses a split value in any other way.
    """
    # 1. Find the step numbers 0, 1, 2, ..., and the equations that read split values.
    parts = jx.scan_parts(eqn)
    flat = jx.flatten(parts.body)
    n, k, step_range = len(parts.consts), len(parts.carry), np.arange(parts.length)
    step_constants = zip(flat.invars[n + k :], map(constant, inputs[n + k :]), strict=True)
    numbers = [v for v, value in step_constants if value is not None and np.array_equal(step_range, value)]
    split = {v: (i, x.dim) for i, (v, x) in enumerate(zip(flat.invars, inputs, strict=True)) if x.dim is not None}
    picks = [inner for inner in flat.eqns if any(not jx.is_literal(v) and v in split for v in inner.invars)]

    def picks_step(inner: Any) -> bool:
        # A `dynamic_slice` of one position, whose start has the step number's values, whatever computes it.
        if inner.primitive.name != "dynamic_slice" or inner.invars[0] not in split:
            return False
        dim, sizes = split[inner.invars[0]][1], inner.params["slice_sizes"]
        sliced_dims = [d for d, m in enumerate(inner.invars[0].aval.shape) if sizes[d] != m]
        start_eqns = jx.needed(flat.eqns, [start := inner.invars[1 + dim]])
        if sliced_dims != [dim] or sizes[dim] != 1 or jx.free(start_eqns, [start]) != numbers[:1]:
            return False
        with jax.ensure_compile_time_eval():
            start_of_step = jx.run(start_eqns, numbers[:1], [start])
            return np.array_equal(step_range, jax.vmap(start_of_step)(jnp.asarray(step_range))[0])

    if not numbers or not picks or not all(map(picks_step, picks)):
        return None

    # 2. Scan over the picked values, and give them to the body as inputs.
    other_eqns = [inner for inner in flat.eqns if inner not in picks]
    body = jx.run(other_eqns, (*flat.invars, *(inner.outvars[0] for inner in picks)), flat.outvars)

    def scan_over_positions(*values: jax.Array) -> list[jax.Array]:
        def step(carry: Any, xs: Any) -> Any:
            steps, picked_values = xs
            outs = body(*values[:n], *carry, *steps, *picked_values)
            return outs[:k], outs[k:]

        sources = [split[inner.invars[0]] for inner in picks]
        # [.., T, ..] -> [T, .., 1, ..]: the body expects the dim of size 1 that its slice had.
        positions_first = [jnp.expand_dims(jnp.moveaxis(values[i], dim, 0), dim + 1) for i, dim in sources]
        options = {name: eqn.params[name] for name in ("reverse", "unroll")}
        last, ys = lax.scan(step, list(values[n : n + k]), (list(values[n + k :]), positions_first), **options)
        return [*last, *ys]

    new_flat, _ = jx.trace(scan_over_positions, *map(jx.type_of, eqn.invars))
    return [(x.value, x.dim) for x in localiser.run(new_flat, inputs)]


def _recurrence(localiser: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Run a diagonal linear recurrence h <- a h + b in chunks.

        over a chunk       h -> A h + B       B: the chunk run from h = 0;  A: its derivative by h
        chunk 1, 2, ...    h_i+1 = A_i h_i + B_i
        on every rank      its chunks again, each from its h_i

    Each rank computes A and B of its p chunks, and all ranks gather them: 2 (c - 1) p states are sent.

    Source: Blelloch 1990, Prefix Sums and Their Applications, section 1.4.
    """
    parts = jx.scan_parts(eqn)
    n, k = len(parts.consts), len(parts.carry)
    consts, init, steps = inputs[:n], inputs[n : n + k], inputs[n + k :]
    if any(x.dim is not None for x in (*consts, *init)) or any(x.dim not in (None, 0) for x in steps):
        return None
    if localiser.overlap or localiser.rows > 1 or not all(jnp.issubdtype(x.value.dtype, jnp.inexact) for x in init):
        return None
    # Places beyond the end would change the last state.
    if (padded_length := localiser.local_length(parts.length) * localiser.ranks) != parts.length:
        raise ValueError(
            f"context={localiser.ranks} splits the {parts.length} positions of {place(eqn)}, whose states need a "
            f"multiple of {localiser.mode.parts(localiser.ranks)}; use {padded_length} positions, or tensor, fsdp or "
            "pipe instead of context"
        )
    body = jec.jaxpr_as_fun(jec.ClosedJaxpr(*jx.opened(parts.body)))
    options = {name: eqn.params[name] for name in ("reverse", "unroll") if name in eqn.params}

    def run_chunk(carry: list[jax.Array], xs: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        def step(carry: list[jax.Array], xs: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            outs = body(*(x.value for x in consts), *carry, *xs)
            return outs[:k], outs[k:]

        return lax.scan(step, carry, xs, length=localiser.chunk(parts.length), **options)

    # 1. Compute A and B of this rank's chunks: the recurrence is diagonal, so its JVP of ones is A.
    num_slots = localiser.mode.parts(1)
    xs_of_slots = [[jnp.split(localiser.part(x, 0), num_slots)[slot] for x in steps] for slot in range(num_slots)]
    start = [x.value for x in init]
    ones, zeros = (jax.tree.map(fill, start) for fill in (jnp.ones_like, jnp.zeros_like))
    chunk_maps = [jax.jvp(lambda carry, xs=xs: run_chunk(carry, xs)[0], (zeros,), (ones,)) for xs in xs_of_slots]

    # 2. Gather (B, A) of all chunks, for each carry, and compute the state at the start of each chunk.
    gather = lambda values: from_chunks(jnp.stack(values), AXIS, localiser.mode.order)
    gathered = [[gather([chunk_map[side][i] for chunk_map in chunk_maps]) for side in (0, 1)] for i in range(k)]
    chunks = range(localiser.mode.parts(localiser.ranks))
    states: list[list[jax.Array]] = [start]
    for chunk in reversed(chunks) if parts.reverse else chunks:
        states.append([b[chunk] + a[chunk] * h for (b, a), h in zip(gathered, states[-1], strict=True)])
    # The state after the last chunk is the final carry of the scan, whole on every rank.
    *states, last = states
    start_states = [jnp.stack(hs) for hs in zip(*(states[::-1] if parts.reverse else states), strict=True)]

    # 3. Run this rank's chunks from their states.
    outputs = [
        run_chunk([h[i] for h in start_states], xs)[1] for i, xs in zip(localiser.chunks(), xs_of_slots, strict=True)
    ]
    return [*((h, None) for h in last), *((jnp.concatenate(ys), Split(0)) for ys in zip(*outputs, strict=True))]


def diagonal(parts: jx.Scan) -> bool:
    """Return whether every carry h becomes a h + b, elementwise, where a and b depend on no carry."""
    flat = jx.flatten(parts.body)
    n, k = len(parts.consts), len(parts.carry)
    # variable -> the only carry in which it is affine; None if it depends on carries in any other way
    carry_of: dict[Any, int | None] = {v: i for i, v in enumerate(flat.invars[n : n + k])}
    is_carried = lambda atom: not jx.is_literal(atom) and atom in carry_of
    for eqn in flat.eqns:
        carried_vars = [v for v in eqn.invars if is_carried(v)]
        if not carried_vars:
            continue
        # An output is diagonal if the equation reads a single carry, affinely and elementwise.
        carries = {carry_of[v] for v in carried_vars}
        carried_mask = [is_carried(v) for v in eqn.invars]
        is_affine = primitives.of(eqn).elementwise and primitives.linear(eqn, carried_mask, affine=True)
        is_elementwise = all(
            v.aval.shape == eqn.outvars[0].aval.shape and jnp.issubdtype(v.aval.dtype, jnp.inexact)
            for v in (*carried_vars, *eqn.outvars)
        )
        carry_of.update(
            (v, carries.pop() if is_affine and is_elementwise and len(carries) == 1 else None) for v in eqn.outvars
        )
    return all(not is_carried(v) or carry_of[v] == i for i, v in enumerate(flat.outvars[:k]))
