"""Rules of equations that move positions along, or mix them with their neighbours.

A rank exchanges the ends of its chunks with its neighbours:

    slices, paddings, joins   positions move along; the chunks keep their borders and overlap
    convolutions              a chunk needs the ends of its neighbours (`ops/halo.py`)
    reversals, writes         positions are placed anew (`places.py`)

    x[:, 1:] on 2 ranks       a b c d | e f g h   -->   b c d e | f g h .
                                      one position moves to the previous chunk
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...program import jaxpr as jx
from ..tensor.localiser import Found, LocalValue, place
from ..tensor.primitives import follow, shape_of
from .attention_mode import AXIS
from .entry import windows_cover_once
from .localiser import ContextLocaliser
from .ops import order_of, with_neighbours
from .places import constant, has_source, place_positions, with_split
from .rules import rule
from .split import PARTIAL, Split


def overlap_of(localiser: ContextLocaliser, n: int, chunk: int) -> int | None:
    """Return the overlap of n positions in chunks of a given length; None if it is more than a chunk."""
    parts = localiser.mode.parts(localiser.ranks)
    # n positions have chunks of this length without any overlap.
    if -(-n // parts) == chunk:
        return 0
    return n - chunk * parts if abs(n - chunk * parts) <= chunk else None


def refuse_reach(localiser: ContextLocaliser, eqn: Any, x: LocalValue, reach: int) -> None:
    """Raise ValueError for an equation that reaches beyond the next chunk, unless its input is small enough to gather.

    `reach` is the number of neighbouring positions of `x`, its input, that it needs.
    """
    assert x.dim is not None
    if math.prod(x.shape) > localiser.max_gathered:
        dim = localiser.split(x.dim)
        n = x.shape[dim] // dim.rows
        other_axes = "data, fsdp, tensor or pipe instead of context, since it reaches over the whole sequence"
        raise ValueError(
            f"context={localiser.ranks} splits dim {int(dim)} of {list(x.shape)} into chunks of "
            f"{localiser.chunk(n, dim.overlap)} positions, and {place(eqn)} reaches {reach} further; use "
            f"{'a smaller context=, or longer sequences' if reach < n - 1 else other_axes}"
        )


def windows(
    localiser: ContextLocaliser, x: LocalValue, start: int, width: int, fill: jax.Array | None = None
) -> list[jax.Array] | None:
    """Return a window for each of this rank's chunks.

    Args:
      x: a split value.
      start: the first position of the window, relative to the first position of its chunk.
      width: the number of positions in a window.
      fill: the value of positions before the first and after the last; if None, they hold any values.

    Returns:
      The windows; None if they reach beyond the next chunk.
    """
    assert x.dim is not None
    split = localiser.split(x.dim)
    if split.rows > 1:
        return None
    n, dim = x.shape[split], int(split)
    chunk = localiser.chunk(n, split.overlap)
    num_before, num_after = max(-start, 0), max(start + width - chunk, 0)
    if split.overlap > 0 and start >= 0 and start + width <= chunk + split.overlap:
        # The overlap holds all positions that the windows need.
        chunks = jnp.split(x.value, localiser.mode.parts(1), dim)
        chunk_windows = [lax.slice_in_dim(y, start, start + width, axis=dim) for y in chunks]
    elif split.overlap > 0 or max(num_before, num_after) > chunk:
        return None
    else:
        extended = with_neighbours(x.value, num_before, num_after, AXIS, localiser.mode.order, dim)
        first = start + num_before
        chunk_windows = [lax.slice_in_dim(y, first, first + width, axis=dim) for y in extended]
    if fill is None:
        return chunk_windows
    # `with_neighbours` wraps around: the first and last windows hold positions of the other end, which `fill` replaces.
    filled_windows = []
    for chunk_index, y in zip(localiser.chunks(), chunk_windows, strict=True):
        positions = chunk_index * chunk + start + jnp.arange(width)
        is_inside = jnp.expand_dims((positions >= 0) & (positions < n), [d for d in range(y.ndim) if d != dim])
        filled_windows.append(jnp.where(is_inside, y, fill))
    return filled_windows


def slice_in_chunks(
    localiser: ContextLocaliser, x: LocalValue, start: int, length: int, fill: jax.Array | None = None
) -> Found | None:
    """Return x[start : start + length] along its split dim, in the chunks of x, with `fill` outside of x."""
    assert x.dim is not None
    dim = localiser.split(x.dim)
    chunk = localiser.chunk(x.shape[dim] // dim.rows, dim.overlap)
    overlap = overlap_of(localiser, length, chunk)
    # The borders of all chunks stay: nothing moves.
    if start == 0 == overlap and dim.overlap <= 0 and fill is None:
        return [(x.value, Split(int(dim), dim.rows))] if dim.rows == 1 else None
    if overlap is None or (chunk_windows := windows(localiser, x, start, chunk + max(overlap, 0), fill)) is None:
        return None
    return [(jnp.concatenate(chunk_windows, int(dim)), Split(int(dim), 1, overlap))]


@rule("slice")
def _slice(localiser: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Slice a split dim in one of four ways, the cheapest that fits.

    All positions stay as they are. If a slice drops some of the first and last positions, the others move along. A
    slice of at most a chunk becomes a partial sum. Any other slice exchanges positions (`place_positions`).
    """
    (x,) = inputs
    assert x.dim is not None
    dim = localiser.split(x.dim)
    # 1. Slice the other dims.
    starts, limits = [*eqn.params["start_indices"]], [*eqn.params["limit_indices"]]
    strides = [*(eqn.params["strides"] or [1] * len(starts))]
    start, limit, step, n = starts[dim], limits[dim], strides[dim], x.shape[dim] // dim.rows
    starts[dim], limits[dim], strides[dim] = 0, x.value.shape[dim], 1
    local_params = {"start_indices": tuple(starts), "limit_indices": tuple(limits), "strides": tuple(strides)}
    (value,) = jx.bind(eqn, [x.value], **local_params)

    # 2. Slice the split dim.
    if limit - start == x.shape[dim] and step == 1:
        return [(value, dim)]
    if start == limit:  # `associative_scan` takes an empty slice of the last positions
        return [(lax.slice_in_dim(value, 0, 0, axis=int(dim)), None)]
    shape = tuple(m if d == dim else k for d, (m, k) in enumerate(zip(x.shape, shape_of(eqn), strict=True)))
    sliced = LocalValue(value, dim, shape)
    local_outputs = slice_in_chunks(localiser, sliced, start, limit - start) if limit - start > 1 == step else None
    if local_outputs is None and limit - start <= localiser.chunk(n, dim.overlap) and step == 1:
        return [(slice_as_partial_sum(localiser, sliced, start, limit), PARTIAL)]
    return local_outputs or place_positions(localiser, eqn, [sliced], int(dim), np.arange(start, limit, step))


def slice_as_partial_sum(localiser: ContextLocaliser, x: LocalValue, start: int, limit: int) -> jax.Array:
    """Return x[start : limit] along its split dim as a partial sum: zeros except for positions that the rank owns."""
    assert x.dim is not None
    dim, chunk_order = localiser.split(x.dim), order_of(localiser.ranks, localiser.mode.order)
    n = x.shape[dim] // dim.rows
    chunk = localiser.chunk(n, dim.overlap)
    pieces = []
    # Each iteration takes the positions up to the end of the current chunk.
    while start < limit:
        # A split dim may hold several rows, one after the other.
        row, position = divmod(start, n)
        chunk_index = min(position // chunk, len(chunk_order) - 1)  # the last chunk also holds the overlap after it
        owner, slot = divmod(chunk_order.index(chunk_index), localiser.mode.parts(1))
        end = n if chunk_index == len(chunk_order) - 1 else (chunk_index + 1) * chunk
        length = min(limit - start, end - position)
        slot_start = row * localiser.local_length(n, dim.overlap) + slot * (chunk + max(dim.overlap, 0))
        local_start = slot_start + position - chunk_index * chunk
        piece = lax.slice_in_dim(x.value, local_start, local_start + length, axis=int(dim))
        pieces.append(jnp.where(lax.axis_index(AXIS) == owner, piece, jnp.zeros_like(piece)))
        start += length
    return jnp.concatenate(pieces, int(dim))


@rule("pad")
def _pad(localiser: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Pad a split dim: positions move along if the padding is short, else they are placed anew."""
    x, fill = inputs
    if x.dim is None:
        return None
    if (local_outputs := follow(localiser, eqn, inputs)) is not None:
        return local_outputs
    # Pad the other dims first.
    config = list(eqn.params["padding_config"])
    low, high, interior = config[x.dim]
    config[x.dim] = (0, 0, 0)
    (value,) = jx.bind(eqn, [x.value, fill.value], padding_config=tuple(config))
    n, shape = x.shape[x.dim], tuple(x.shape[d] if d == x.dim else k for d, k in enumerate(shape_of(eqn)))
    padded = LocalValue(value, x.dim, shape)
    if (
        not interior
        and (local_outputs := slice_in_chunks(localiser, padded, -low, n + low + high, fill.value)) is not None
    ):
        return local_outputs
    # Interior padding puts position i at low + i (interior + 1).
    offsets = np.arange(-low, shape_of(eqn)[x.dim] - low)
    indices, remainders = np.divmod(offsets, interior + 1)
    sources = np.where((offsets >= 0) & (remainders == 0) & (indices < n), indices, -1)
    dim = int(x.dim)
    if (local_outputs := place_positions(localiser, eqn, [padded], dim, sources)) is None:
        return None
    ((value, split),) = local_outputs
    return [(jnp.where(has_source(localiser, value, dim, sources), value, fill.value), split)]


@rule("concatenate")
def _concatenate(localiser: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Concatenate along a split dim.

    Short whole values, such as zeros, may come before and after a split one: its positions move along. Several split
    values, such as two streams of tokens, are placed anew. Ranks that are not in lockstep cannot do that: they gather
    all values but the longest, if each is at most a chunk.
    """
    axis, lengths = eqn.params["dimension"], [y.shape[eqn.params["dimension"]] for y in inputs]
    splits = {i: localiser.split(x.dim) for i, x in enumerate(inputs) if x.dim is not None}
    if any(dim != axis for dim in splits.values()):
        has_one_layout = len({dim.as_tuple[1:] for dim in splits.values()}) == 1
        return follow(localiser, eqn, inputs) if has_one_layout else None

    # 1. Move the longest split value to its place.
    longest = max(splits, key=lambda i: lengths[i])
    x, dim = inputs[longest], splits[longest]
    offsets = [sum(lengths[:i]) for i in range(len(inputs))]
    other_lengths = [lengths[i] for i in splits if i != longest]
    are_short = dim.rows == 1 and all(n <= localiser.chunk(lengths[longest], dim.overlap) for n in other_lengths)
    if (
        not are_short
        or (other_lengths and localiser.in_lockstep)
        or (local_outputs := slice_in_chunks(localiser, x, -offsets[longest], sum(lengths))) is None
    ):
        return place_positions(localiser, eqn, inputs, axis, np.arange(sum(lengths)))

    # 2. Write the other values, whole, at this rank's positions.
    ((value, dim),) = local_outputs
    assert isinstance(dim, Split)
    positions = localiser.positions(sum(lengths), dim)
    along_axis = lambda mask: jnp.expand_dims(mask, [d for d in range(value.ndim) if d != axis])
    for i, (y, offset, n) in enumerate(zip(inputs, offsets, lengths, strict=True)):
        if i != longest and n:
            local_y = jnp.take(localiser.whole(y), jnp.clip(positions - offset, 0, n - 1), axis=axis)
            value = jnp.where(along_axis((positions >= offset) & (positions < offset + n)), local_y, value)
    return [(value, dim)]


@rule("rev")
def _reverse(localiser: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Reverse dims; the positions of a split one are placed anew."""
    (x,) = inputs
    assert x.dim is not None
    dims = {int(d) for d in eqn.params["dimensions"]}
    (value,) = jx.bind(eqn, [x.value], dimensions=tuple(dims - {int(x.dim)}))
    if x.dim not in dims:
        return [(value, x.dim)]
    return place_positions(
        localiser, eqn, [LocalValue(value, x.dim, x.shape)], int(x.dim), np.arange(x.shape[x.dim])[::-1]
    )


_SCATTER_JOINS = {"": lambda _, y: y, "-add": jnp.add, "-mul": jnp.multiply, "-min": jnp.minimum, "-max": jnp.maximum}


@rule(*(f"scatter{name}" for name in _SCATTER_JOINS))
def _scatter(localiser: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Write at known positions, each once, as `x.at[:, 1:].add(y)` does."""
    (x, indices, y), numbers, name = inputs, eqn.params["dimension_numbers"], eqn.primitive.name
    scattered, inserted = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims
    starts = constant(indices)
    window_dims = [d for d in range(len(x.shape)) if d not in (*inserted, *numbers.operand_batching_dims)]
    x_dim_of = dict(zip(numbers.update_window_dims, window_dims, strict=True))  # dim of y -> dim of x
    # Where the indices do not select positions, each rank writes into its own.
    if {x.dim, x_dim_of.get(y.dim)}.isdisjoint(scattered) and (x.dim is not None or y.dim in x_dim_of):
        return follow(localiser, eqn, inputs)
    if len(scattered) != 1 or inserted not in ((), scattered) or numbers.operand_batching_dims or starts is None:
        return None
    (dim,) = scattered
    # `targets` are the positions of x that the positions of y are written to.
    if inserted:  # single positions: the dim of y that lacks a window, if it has several
        y, targets = _with_dim(localiser, y, dim, numbers.update_window_dims), starts.reshape(-1)
    else:  # one window of consecutive positions
        targets = starts.reshape(-1) + np.arange(y.shape[dim])
    # `place_positions` takes one source for each position of x, and y must be written as a whole.
    are_unique = len(np.unique(targets)) == len(targets) == y.shape[dim]
    fits = are_unique and targets.min() >= 0 and targets.max() < x.shape[dim]
    if not fits or any(x.shape[d] != y.shape[d] for d in range(len(x.shape)) if d != dim):
        return None
    # Invert the table: from each position of x to its source in y.
    sources = np.full(x.shape[dim], -1)
    sources[targets] = np.arange(len(targets))
    value, join = with_split(localiser, eqn, x, Split(dim)).value, _SCATTER_JOINS[name.removeprefix("scatter")]
    if (local_outputs := place_positions(localiser, eqn, [y], dim, sources)) is None:
        return None
    ((update, split),) = local_outputs
    return [(jnp.where(has_source(localiser, value, dim, sources), join(value, update), value), split)]


def _with_dim(localiser: ContextLocaliser, y: LocalValue, dim: int, window: Sequence[int]) -> LocalValue:
    """Move the dim of y that is no window dim to `dim`, or insert one of size 1; other dims stay in order."""
    (y_dim,) = [d for d in range(len(y.shape)) if d not in window] or [len(y.shape)]  # a single position has no dim
    value, shape = (y.value, y.shape) if y_dim < len(y.shape) else (y.value[..., None], (*y.shape, 1))
    order = [d for d in range(len(shape)) if d != y_dim]
    order.insert(dim, y_dim)
    new_split = None if y.dim is None else Split(order.index(int(y.dim)), *localiser.split(y.dim).as_tuple[1:])
    return LocalValue(jnp.transpose(value, order), new_split, tuple(shape[d] for d in order))


@rule("conv_general_dilated")
def _convolution(localiser: ContextLocaliser, eqn: Any, inputs: Sequence[LocalValue]) -> Found | None:
    """Convolve this rank's chunks, extended by the neighbouring positions that the kernel reaches.

    A convolution whose windows do not overlap needs no neighbours, and neither does one along other dims.
    """
    x, kernel = inputs
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    if x.dim is None or kernel.dim is not None:
        return None
    # 1. Positions as the batch dim: each is convolved separately.
    if x.dim == numbers.lhs_spec[0] and params["batch_group_count"] == 1:
        return [(jx.bind(eqn, [x.value, kernel.value])[0], numbers.out_spec[0])]
    if x.dim not in numbers.lhs_spec[2:]:
        return None

    # 2. Windows side by side, as in patches: each chunk must hold whole windows.
    window_dim = numbers.lhs_spec.index(x.dim) - 2
    out_dim, stride = numbers.out_spec[2 + window_dim], params["window_strides"][window_dim]
    local_length = x.value.shape[x.dim]
    if stride > 1 and windows_cover_once(eqn, [x.dim]) and localiser.rows == 1:
        multiple, n = stride * localiser.mode.parts(localiser.ranks), x.shape[x.dim]
        if n % multiple and math.prod(x.shape) > localiser.max_gathered:
            raise ValueError(
                f"context={localiser.ranks} splits the {n} positions of {place(eqn)}, whose windows of {stride} need a "
                f"multiple of {multiple}; use {n + -n % multiple} positions, or tensor, fsdp or pipe instead of context"
            )
        cuts_windows = localiser.overlap or n % multiple or local_length * localiser.ranks != n
        return None if cuts_windows else [(jx.bind(eqn, [x.value, kernel.value])[0], Split(out_dim))]
    if localiser.rows > 1 or params["window_strides"][window_dim] != 1 or params["lhs_dilation"][window_dim] != 1:
        return None

    # 3. Stride 1: extend each chunk by the kernel's reach.
    dim = localiser.split(x.dim)
    low, high = params["padding"][window_dim]
    reach = (kernel.shape[numbers.rhs_spec[2 + window_dim]] - 1) * params["rhs_dilation"][window_dim]
    chunk, length = localiser.chunk(x.shape[dim] // dim.rows, dim.overlap), x.shape[dim] + low + high - reach
    if (overlap := overlap_of(localiser, length, chunk)) is None:
        return refuse_reach(localiser, eqn, x, reach)
    zero = jnp.zeros((), x.value.dtype)
    if (parts := windows(localiser, x, -low, chunk + max(overlap, 0) + reach, zero)) is None:
        return refuse_reach(localiser, eqn, x, reach)
    # The windows contain this dim's padding already.
    padding = tuple((0, 0) if d == window_dim else pair for d, pair in enumerate(params["padding"]))
    outputs = [jx.bind(eqn, [part, kernel.value], padding=padding)[0] for part in parts]
    return [(jnp.concatenate(outputs, out_dim), Split(out_dim, 1, overlap))]
