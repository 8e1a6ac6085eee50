"""Map a box of a stored array to the parts of the model's own leaves that lie in it.

A stored array may be padded, and may hold a stack of layers or whole pipeline stages. A checkpoint reads and writes the
model's own leaves, so it needs to know the parts of leaves that each box holds:

    stored [L, in, out], box rows 2..4   -->   layers/2/w [in, out], layers/3/w [in, out]

These are the conversions of `Layout.to_logical` and `to_stored`, as views of arrays in this host's memory. They compute
nothing on a device, and no device sees more of a leaf than its own part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..strategy.schedules.operations import stage_of
from .leaves import Leaf, Stacked, Staged

Box = tuple[tuple[int, int], ...]  # (start, stop) of every dim


class LeafPart(NamedTuple):
    """A part of one of the model's own leaves, in a box of a stored array.

    Attributes:
      member: the leaf's position among those that the stored array holds (`Storage.origin`).
      box: where in that leaf the part lies.
      view: maps the box's array [as stored] to this part [in the leaf's dims]; never a copy.
    """

    member: int
    box: Box
    view: Callable[[np.ndarray], np.ndarray]


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Return the box of a device's part of an array, from the slices that `jax.sharding.Sharding` gives."""
    return tuple(dim_slice.indices(n)[:2] for dim_slice, n in zip(index, shape, strict=True))


def slices(box: Box, within: Box) -> tuple[slice, ...]:
    """Return the index that selects `box` in the array of the larger box `within`."""
    return tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, within, strict=True))


def slabs(shape: Sequence[int], itemsize: int) -> list[Box]:
    """Cut an array along its first dim into boxes of about 64 MiB; return the boxes."""
    inner_dims = tuple((0, n) for n in shape[1:])
    # A scalar or an array without elements is one box.
    if not math.prod(shape) or not shape:
        return [(*((0, n) for n in shape[:1]), *inner_dims)]
    # One row at least, even if it is larger.
    rows = max(1, (1 << 26) * shape[0] // (math.prod(shape) * itemsize))
    return [((begin, min(begin + rows, shape[0])), *inner_dims) for begin in range(0, shape[0], rows)]


def parts(leaf: Leaf | None, shape: Sequence[int], box: Box) -> Iterator[LeafPart]:
    """Yield the parts of the model's own leaves that lie in a box of a stored array, without padding.

    Args:
      leaf: the leaf that the array stores; None if it stores no parameter and mirrors none.
      shape: the array's shape without padding: the leaf's own, with the dims of layers in front.
      box: which part of the array.
    """
    form = None if leaf is None else leaf.form
    if isinstance(form, Stacked):
        # [layers, ...]: each row of the box is a leaf of the model.
        layer_box = _clip(box[1:], shape[1:])
        for layer in range(*box[0]):
            yield LeafPart(layer, layer_box, _view(slices(layer_box, box[1:]), layer - box[0][0]))
    elif isinstance(form, Staged):
        num_layer_dims = len(form.held)
        layer_box = _clip(box[num_layer_dims:], shape[num_layer_dims:])
        # [chunks, layers, ...] or [layers, ...]: `first` and `last` are positions on the dim over `pipe`.
        inner_index, (first, last) = slices(layer_box, box[num_layer_dims:]), box[num_layer_dims - 1]
        for chunk in range(*box[0]) if num_layer_dims > 1 else (0,):
            chunk_index = (chunk - box[0][0],) if num_layer_dims > 1 else ()
            for position, count, layer in _layer_runs(form, chunk, first, last):
                # The last stage may end with padding, which is part of no layer.
                start, stop = layer, min(layer + count, form.layers)
                if form.dim is None:
                    for k in range(start, stop):
                        yield LeafPart(k, layer_box, _view(inner_index, *chunk_index, position + k - start - first))
                elif start < stop:
                    # The model's own leaf has its layers on dim `form.dim`, the stored array has them in front.
                    part = [(start, stop), *layer_box]
                    part[0], part[form.dim] = part[form.dim], part[0]
                    layers = slice(position - first, position + stop - start - first)
                    yield LeafPart(0, tuple(part), _view(inner_index, *chunk_index, layers, swap=form.dim))
    else:
        leaf_box = _clip(box, shape)
        yield LeafPart(0, leaf_box, _view(slices(leaf_box, box)))


def _layer_runs(form: Staged, chunk: int, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yield the consecutive layers at positions `first` to `last` of a chunk, padding included.

    Yields:
      (position, count, layer): `count` layers from `layer` on are stored from `position` on.
    """
    chunk_size = form.held[-1]
    if not form.v_ranks or chunk % 2 == 0:
        yield first, last - first, chunk * chunk_size + first
        return
    # In a V, the ranks hold the stages of an odd chunk in reverse order, so that each rank starts a new run.
    stage_size = chunk_size // form.v_ranks
    for rank in range(first // stage_size, -(-last // stage_size)):
        start, stop = max(first, rank * stage_size), min(last, (rank + 1) * stage_size)
        first_layer = stage_of("V", form.v_ranks, rank, chunk) * stage_size
        yield start, stop - start, first_layer + start - rank * stage_size


def _clip(box: Box, shape: Sequence[int]) -> Box:
    """Cut the padding off a box: nothing beyond `shape` belongs to the leaf."""
    return tuple((min(start, n), min(stop, n)) for (start, stop), n in zip(box, shape, strict=True))


def _view(inner: tuple[slice, ...], *leading: int | slice, swap: int = 0) -> Callable[[np.ndarray], np.ndarray]:
    """Return a view function that indexes the dims of stages and layers by `leading` and the other dims by `inner`.

    It then moves the dim of layers from 0 to `swap`.
    """
    # The Ellipsis makes a view of an array without dims too. NumPy would copy it to a number.
    index = (*leading, *inner, ...)
    return lambda x: np.swapaxes(x[index], 0, swap) if swap else x[index]
