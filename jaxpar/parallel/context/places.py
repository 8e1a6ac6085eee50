"""Move positions to other places that are known before the program runs: slices, joins, reversals, picks, writes.

    x[::-1] of 8 positions on 2 ranks    rank 0: 0 1 2 3 -> 7 6 5 4      a source for each place of each rank:
                                         rank 1: 4 5 6 7 -> 3 2 1 0      local, or a slot of another rank

`place_positions` computes this table of sources as NumPy arrays, while the program is traced. Then
`ops.rearrange_positions` exchanges the positions that a rank lacks, in a fixed sequence of permutes.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from ...program import jaxpr as jx
from ..tensor.localiser import Found, LocalValue, place
from .attention_mode import AXIS
from .localiser import ContextLocaliser
from .ops import rearrange_positions, rounds_of
from .split import Split


def place_positions(
    localiser: ContextLocaliser,
    eqn: Any,
    inputs: Sequence[LocalValue],
    dim: int,
    sources: np.ndarray,
    new_split: Split | None = None,
) -> Found | None:
    """Return chosen positions of the concatenation of some values along a dim.

    Args:
      eqn: the equation, for errors.
      inputs: the values, whole or split along `dim`.
      dim: the dim of positions.
      sources: for each position of the result, its position in the concatenation; -1 for zeros.
      new_split: the layout of the result; if None, the dim in its own chunks.

    Returns:
      The result; None if a value is split along another dim, or if the schedule forbids the exchange and the values are
      small enough to be gathered.

    Raises:
      ValueError: if the exchange needs ranks in lockstep, the schedule does not have them so, and the values are large.
    """
    if any(x.dim not in (None, dim) for x in inputs):
        return None
    new_split = new_split or Split(dim)
    source_slots, num_slots = _source_slots(localiser, inputs, dim, _on_ranks(localiser, sources, new_split))
    # No round is needed if every source is local.
    if not localiser.in_lockstep and any(rounds_of(source_slots, num_slots)):
        if all(math.prod(x.shape) <= localiser.max_gathered for x in inputs):
            return None
        raise ValueError(
            f"context={localiser.ranks} sends positions to other ranks at {place(eqn)}, which needs all ranks in one "
            "layer at one time, and under this schedule they are not; use schedule='1f1b' with stages='layers', or "
            "data, fsdp or tensor instead of context"
        )
    return [(rearrange_positions(jnp.concatenate([x.value for x in inputs], dim), source_slots, AXIS, dim), new_split)]


def _source_slots(
    localiser: ContextLocaliser, inputs: Sequence[LocalValue], dim: int, wanted: np.ndarray
) -> tuple[np.ndarray, int]:
    """Choose for each wanted position a slot that holds it: the rank's own if it has one, so that nothing is sent.

    Args:
      inputs: the values, whole or split along `dim`.
      wanted: int [ranks, local length], positions of their concatenation; -1 for none.

    Returns:
      Int [ranks, local length], where r s + i is slot i of rank r and -1 is none; and s, the slots of a rank.
    """
    # 1. Number the slots of all ranks, and note which position of the concatenation each slot holds (-1: none).
    offset, positions_of_inputs = 0, []
    for x in inputs:
        n = x.shape[dim]
        if x.dim is None:  # every rank holds all positions, in the same slots
            positions = np.tile(np.arange(n), (localiser.ranks, 1))
        else:
            positions = localiser.positions_of_ranks(n, localiser.split(x.dim))
        positions_of_inputs.append(np.where(positions < 0, -1, positions + offset))
        offset += n
    slot_positions = np.concatenate(positions_of_inputs, 1)
    slots, is_filled = np.arange(slot_positions.size).reshape(slot_positions.shape), slot_positions >= 0

    # 2. Choose.
    slot_of_position = np.zeros(offset, int)
    # A position that several ranks hold comes from one of them, unless the rank itself has it (below).
    slot_of_position[slot_positions[is_filled]] = slots[is_filled]
    source_slots = np.empty_like(wanted)
    for rank, is_local in enumerate(is_filled):
        nearest_slot = slot_of_position.copy()
        nearest_slot[slot_positions[rank][is_local]] = slots[rank][is_local]
        source_slots[rank] = np.where(wanted[rank] < 0, -1, nearest_slot[wanted[rank]])
    return source_slots, slot_positions.shape[1]


def _on_ranks(localiser: ContextLocaliser, sources: np.ndarray, split: Split) -> np.ndarray:
    """Return a table of positions as each rank holds them: [ranks, local length]."""
    return sources[localiser.positions_of_ranks(len(sources), split, beyond=len(sources) - 1)]


def with_split(localiser: ContextLocaliser, eqn: Any, x: LocalValue, dim: Split) -> LocalValue:
    """Return the value split along `dim`, with its rows and overlap."""
    if x.dim is not None and localiser.split(x.dim).as_tuple == dim.as_tuple:
        return x
    local_outputs = (
        place_positions(localiser, eqn, [x], int(dim), np.arange(x.shape[dim]), new_split=dim)
        if x.dim is not None
        else None
    )
    return LocalValue(*local_outputs[0], x.shape) if local_outputs else LocalValue(localiser.part(x, dim), dim, x.shape)


def has_source(localiser: ContextLocaliser, value: jax.Array, dim: int, sources: np.ndarray) -> jax.Array:
    """Return at which of this rank's positions `sources` is not -1, to broadcast against a value split along `dim`."""
    mask = _on_ranks(localiser, sources, Split(dim)) >= 0
    return jnp.expand_dims(jnp.asarray(mask)[lax.axis_index(AXIS)], [d for d in range(value.ndim) if d != dim])


def constant(x: LocalValue) -> np.ndarray | None:
    """Return a value that the program computes from literals and iotas alone; None for any other value."""
    # Literals and arrays that the program closes over are concrete.
    if not isinstance(x.value, Tracer):
        return np.asarray(x.value)
    if x.made is None or len(x.made[0].outvars) != 1:
        return None
    eqn, inputs = x.made
    input_constants = [constant(y) for y in inputs]
    if any(y is None for y in input_constants):
        return None
    # The loss is being traced here, so the equation must be evaluated eagerly.
    with jax.ensure_compile_time_eval():
        return np.asarray(jx.bind(eqn, [jnp.asarray(y) for y in input_constants])[0])
