"""Which part of the model's own leaves a box of a stored array is: padding, stacks of layers and stages taken away.

It is what `Layout.to_logical` and `to_stored` compute, as views of arrays in this host's memory: nothing is computed on
a device, and no device sees more of a leaf than its own part.
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
      member: which of the leaves that the stored array is made of.
      box: where in that leaf it is.
      view: from the box's array [as stored] to this part of it [in the leaf's dims]; never a copy.
    """

    member: int
    box: Box
    view: Callable[[np.ndarray], np.ndarray]


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """A device's part of an array, as `jax.sharding.Sharding` tells it."""
    return tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))


def slices(box: Box, within: Box) -> tuple[slice, ...]:
    """A box as an index of the array of a larger one."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, within, strict=True))


def slabs(shape: Sequence[int], itemsize: int, size: int = 1 << 26) -> list[Box]:
    """Return boxes along the first dim, each of about `size` bytes, that make up an array."""
    rest = tuple((0, n) for n in shape[1:])
    if not math.prod(shape) or not shape:
        return [(*((0, n) for n in shape[:1]), *rest)]
    rows = max(1, size * shape[0] // (math.prod(shape) * itemsize))
    return [((begin, min(begin + rows, shape[0])), *rest) for begin in range(0, shape[0], rows)]


def parts(leaf: Leaf | None, shape: Sequence[int], box: Box) -> Iterator[LeafPart]:
    """The parts of the model's own leaves in a box of a stored array, without padding.

    Args:
      leaf: the leaf that the array holds, None for one that is no leaf's.
      shape: the array's without padding: the leaf's own, layers in front.
      box: which part of the array.
    """
    form = None if leaf is None else leaf.form
    if isinstance(form, Stacked):
        rest = _clipped(box[1:], shape[1:])
        for k in range(*box[0]):
            yield LeafPart(k, rest, _view(slices(rest, box[1:]), k - box[0][0]))
    elif isinstance(form, Staged):
        held = len(form.held)
        rest = _clipped(box[held:], shape[held:])
        inside, (first, last) = slices(rest, box[held:]), box[held - 1]
        for chunk in range(*box[0]) if held > 1 else (0,):
            lead = (chunk - box[0][0],) if held > 1 else ()
            for at, count, layer in _runs(form, chunk, first, last):
                start, stop = layer, min(layer + count, form.layers)
                if form.dim is None:
                    for k in range(start, stop):
                        yield LeafPart(k, rest, _view(inside, *lead, at + k - start - first))
                elif start < stop:
                    part = [(start, stop), *rest]
                    part[0], part[form.dim] = part[form.dim], part[0]
                    layers = slice(at - first, at + stop - start - first)
                    yield LeafPart(0, tuple(part), _view(inside, *lead, layers, swap=form.dim))
    else:
        rest = _clipped(box, shape)
        yield LeafPart(0, rest, _view(slices(rest, box)))


def _runs(form: Staged, chunk: int, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """What a chunk holds at the places `first` to `last`, as (place, count, layer): layers in a row, with padding."""
    size = form.held[-1]
    if not form.turned or chunk % 2 == 0:
        yield first, last - first, chunk * size + first
        return
    each = size // form.turned  # of one rank; the ranks come in reverse
    for rank in range(first // each, -(-last // each)):
        at, end = max(first, rank * each), min(last, (rank + 1) * each)
        yield at, end - at, stage_of("V", form.turned, rank, chunk) * each + at - rank * each


def _clipped(box: Box, shape: Sequence[int]) -> Box:
    return tuple((min(start, n), min(stop, n)) for (start, stop), n in zip(box, shape, strict=True))


def _view(inside: tuple[slice, ...], *lead: int | slice, swap: int = 0) -> Callable[[np.ndarray], np.ndarray]:
    """`lead` indexes the dims of stages and layers, `inside` the others; then layers go to dim `swap`."""
    index = (*lead, *inside, ...)
    return lambda x: np.swapaxes(x[index], 0, swap) if swap else x[index]
