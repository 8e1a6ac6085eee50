"""Row labels: for each element of a value, the number of the row that it belongs to.

The labels are an integer array with the value's dims. A dim along which all labels are equal has size 1:

    [B, T, D] as the batch has it    0 1 2 ...  [B, 1, 1]
    [B T, D] merged                  0 0 0 1 1 1 ...  [B T, 1]
    [2 B, D] two views laid out      0 1 2 ... 0 1 2 ...  [2 B, 1]
    [1, D] the last row              B-1  [1, 1]

An equation that moves the dims of a value moves the dims of its labels alike. So no layout of rows needs a rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Shape = Sequence[int]


class Labels:
    """An immutable array of row numbers that can be compared and hashed.

    Attributes:
      array: the row numbers, of size 1 along each dim in which they are equal.
      dims: the dims along which the row numbers differ.
    """

    __slots__ = ("array", "dims")

    def __init__(self, array: np.ndarray) -> None:
        # One form for equal labels, so that they compare equal: constant dims have size 1.
        for d in range(array.ndim):
            if array.shape[d] > 1 and (array == array.take([0], d)).all():
                array = array.take([0], d)
        self.array = array
        self.dims = frozenset(d for d, n in enumerate(array.shape) if n > 1)

    def covers_equally(self, num_rows: int) -> bool:
        """Return whether all `num_rows` rows have elements, and equally many."""
        _, counts = np.unique(self.array, return_counts=True)
        return len(counts) == num_rows and bool((counts == counts[0]).all())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Labels) and np.array_equal(self.array, other.array))

    def __hash__(self) -> int:
        return hash((self.array.shape, self.array.tobytes()))


NO_LABELS = Labels(np.zeros((), np.int64))  # of values that are not rows


def move_dims(array: np.ndarray, target_dims: Sequence[int | None], ndim: int) -> np.ndarray:
    """Move the dims of labels to other positions.

    Args:
      target_dims: for each dim of the labels its dim in the result; None is allowed for dims of size 1.
      ndim: the number of dims of the result.
    """
    labelled_dims = sorted((d for d, n in enumerate(array.shape) if n > 1), key=lambda d: target_dims[d] or 0)
    shape = [1] * ndim
    for d in labelled_dims:
        shape[target_dims[d] or 0] = array.shape[d]
    # Dims of size 1 may go anywhere: put them last, and let the reshape distribute them.
    return array.transpose(*labelled_dims, *(d for d in range(array.ndim) if d not in labelled_dims)).reshape(shape)


def reshape_groups(old_shape: Shape, new_shape: Shape) -> Iterator[tuple[range, range]]:
    """Yield the smallest groups of consecutive dims, before and after a reshape, that have the same product."""
    i = j = 0
    while i < len(old_shape) or j < len(new_shape):
        start, old_size, new_size = (i, j), 1, 1
        # Take a dim on the side with the smaller product, until both products agree.
        while (i, j) == start or old_size != new_size:
            if j == len(new_shape) or (i < len(old_shape) and old_size <= new_size):
                old_size, i = old_size * old_shape[i], i + 1
            else:
                new_size, j = new_size * new_shape[j], j + 1
        yield range(start[0], i), range(start[1], j)


def reshape_labels(array: np.ndarray, old_shape: Shape, new_shape: Shape) -> np.ndarray:
    """Return the labels of a value after a reshape of the value from `old_shape` to `new_shape`."""
    if 0 in old_shape:
        return np.zeros((1,) * len(new_shape), array.dtype)
    full_shape, labels_shape = list(array.shape), [1] * len(new_shape)
    for old_dims, new_dims in reshape_groups(old_shape, new_shape):
        # Only a group in which labels differ must have its full size; other groups stay at size 1.
        if any(array.shape[d] > 1 for d in old_dims):
            full_shape[old_dims.start : old_dims.stop] = old_shape[old_dims.start : old_dims.stop]
            labels_shape[new_dims.start : new_dims.stop] = new_shape[new_dims.start : new_dims.stop]
    return np.broadcast_to(array, full_shape).reshape(labels_shape)


def same_in_all_rows(labels: np.ndarray, values: np.ndarray, twin_values: np.ndarray | None = None) -> bool:
    """Return whether all rows have the same values, each row in the order of its elements.

    Args:
      labels: the row of each element.
      values: the value of each element; its shape must broadcast with the labels.
      twin_values: the values in the program for twice the rows. If all values are one number, the twin's must be one
        number too: `arange(n) < 2` is true of all rows in a block of two rows, and not in larger blocks.
    """
    # A number that is constant for n rows may vary for 2 n, such as `i // n`: then it depends on the place.
    row_dims = [d for d in range(labels.ndim) if labels.shape[d] > 1 and values.ndim == labels.ndim]
    is_constant = lambda array: all((array == array.take([0], d)).all() for d in row_dims)
    if (
        row_dims
        and twin_values is not None
        and twin_values.ndim == labels.ndim
        and is_constant(values)
        and not is_constant(twin_values)
    ):
        return False
    labels, values = (x.ravel() for x in np.broadcast_arrays(labels, values))
    order, num_rows = np.argsort(labels, kind="stable"), len(np.unique(labels))
    if not num_rows:
        return True
    # Rows have unequal numbers of elements.
    if len(labels) % num_rows:
        return False
    # One line for each row, [rows, elements]: the stable sort keeps the order of the elements within a row.
    row_labels, values = labels[order].reshape(num_rows, -1), values[order].reshape(num_rows, -1)
    return bool((row_labels == row_labels[:, :1]).all() and (values == values[:1]).all())


def ordinals_in_row(labels: np.ndarray) -> np.ndarray:
    """Return, for each element, how many elements of the same row come before it."""
    flat_labels = labels.ravel()
    order = np.argsort(flat_labels, kind="stable")
    ordinals = np.empty(flat_labels.size, np.int64)
    # In sorted order, the elements of a row follow one another: subtract the position of the first.
    ordinals[order] = np.arange(flat_labels.size) - np.searchsorted(flat_labels[order], flat_labels[order])
    return ordinals.reshape(labels.shape)


def number_elements(shape: Shape, dims: Any) -> np.ndarray:
    """Return labels that differ for all elements along some dims, and have size 1 along the other dims."""
    sizes = [n if d in dims else 1 for d, n in enumerate(shape)]
    return np.arange(math.prod(sizes)).reshape(sizes)
