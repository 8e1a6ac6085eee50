"""What equations that take rows apart, lay them side by side or number them make of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from ...program.primitives import having
from .arithmetic import combine
from .generic import Met, generic, mixes_rows
from .labels import Labels, alike, blocks, ordinals, reshaped
from .reader import Reader, rule, shape_of, shapes
from .values import FROM_ALL, SOME, Note, Value, coupled, mixed, others

# What becomes of the labels of an operand [its shape, or 1 in its place], for each result.
_PIECES: dict[str, Callable[[Any, np.ndarray], list[np.ndarray]]] = {
    "rev": lambda e, x: [np.flip(x, tuple(d for d in e.params["dimensions"] if x.shape[d] > 1))],
    "slice": lambda e, x: [x[_window(e, x)]],
    "tile": lambda e, x: [np.tile(x, [n if k > 1 else 1 for n, k in zip(e.params["reps"], x.shape, strict=True)])],
    "split": lambda e, x: np.split(x, [*accumulate(e.params["sizes"])][:-1], e.params["axis"]),
    "unstack": lambda e, x: [x.take(i, e.params["axis"]) for i in range(len(e.outvars))],
    "reshape": lambda e, x: [_reshaped(e, x)],
}


def _reshaped(eqn: Any, x: np.ndarray) -> np.ndarray:
    old = shapes(eqn)[0]
    order = eqn.params["dimensions"] or range(x.ndim)  # `vmap` of a convolution takes dims in another order
    return reshaped(x.transpose(order), tuple(old[d] for d in order), shape_of(eqn))


def _window(eqn: Any, x: np.ndarray) -> tuple[slice, ...]:
    p = eqn.params
    cut = zip(p["start_indices"], p["limit_indices"], p["strides"] or [1] * x.ndim, x.shape, strict=True)
    return tuple(slice(None) if n == 1 else slice(*which) for *which, n in cut)


@rule(*_PIECES)
def _pieces(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    (x, *_), name, to = ins, eqn.primitive.name, Met(eqn).ins[0]
    reshapes = name == "reshape" and eqn.params["dimensions"] is None
    if x.kind == "whole" and (reshapes or name == "tile"):
        shape = shapes(eqn)[0]  # of dims that become one, or several, all differ where one does; copies are alike
        groups = blocks(shape, shape_of(eqn)) if reshapes else [([d], [d]) for d, n in enumerate(shape) if n > 1]
        varies = frozenset(d for before, after in groups if x.varies.intersection(before) for d in after)
        return [replace(y, varies=varies) for y in generic(r, eqn, twin, ins)]
    if x.kind != "rows" or not (reshapes or any(to[d] is None for d in x.at.dims)):
        return [replace(y, number=x.number if x.kind != "whole" else None) for y in generic(r, eqn, twin, ins)]
    outs, places = (_PIECES[name](eqn, array) for array in (x.at.array, ordinals(x.at.array)))
    return [of_rows(eqn, x, at, inner) for at, inner in zip(outs, places, strict=True)]


def of_rows(eqn: Any, x: Value, at: np.ndarray, inner: np.ndarray, pick: Note | None = None) -> Value:
    """Rows x after an equation has moved, or picked, elements: of which rows they are, and which of each row's."""
    name, labels = eqn.primitive.name, Labels(at)
    said = {"rev": "reverse order over rows", "unstack": "takes rows one by one"}.get(name, SOME)
    strided = name == "slice" and max(eqn.params["strides"] or [1]) > 1  # of pairs, which no block may part
    pick = (x.pick if x.places else None) or pick or Note.at(eqn, f"{said}; {FROM_ALL}", certain=not strided)
    found = x.plain(at=labels, pick=x.pick if name == "reshape" or labels == x.at else pick)
    if not at.size:
        return coupled([x], pick)
    if alike(at, inner):
        return found
    return found.noted(Note.at(eqn, "takes of each row what depends on its place in its block", certain=False))


@rule("concatenate", "stack")
def _concatenate(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    dim, stacked = eqn.params.get("dimension", eqn.params.get("axis")), eqn.primitive.name == "stack"
    sizes = [1] * len(ins) if stacked else [s[dim] for s in shapes(eqn)]
    rows = [x for x in ins if x.kind == "rows"]
    if all(x.kind == "whole" for x in ins):
        return generic(r, eqn, twin, ins)
    if any(x.kind == "sum" for x in ins) or (
        len({x.at for x in rows}) == 1 and (stacked or dim not in rows[0].at.dims)
    ):
        return _beside(eqn, ins, sizes, dim)
    if len(rows) < len(ins) or any(x.routed for x in rows):
        return mixes_rows(eqn, ins)
    labels = [np.expand_dims(x.at.array, dim) if stacked else x.at.array for x in rows]
    joint = np.broadcast_shapes(*(np.delete(a.shape, dim) for a in labels))
    full = [np.broadcast_to(a, (*joint[:dim], n, *joint[dim:])) for a, n in zip(labels, sizes, strict=True)]
    functions = [ordinals(a) * len(rows) + i for i, a in enumerate(full)]  # each operand may be another
    power = rows[0].power if len({x.power for x in rows}) == 1 else math.nan
    x = replace(rows[0], power=power, plus=any(x.plus for x in rows))
    note = Note.at(eqn, f"puts rows into another order; {FROM_ALL}")
    found = of_rows(eqn, x, np.concatenate(full, dim), np.concatenate(functions, dim), note)
    ordered = Labels(np.arange(r.rows).reshape([-1 if d == dim else 1 for d in range(len(joint) + 1)]))
    return replace(found, pick=None) if found.at == ordered else found


def _beside(eqn: Any, ins: Sequence[Value], sizes: Sequence[int], dim: int) -> Value:
    """What is laid side by side in each row, or of sums; of indices, columns that are known: the lookup says whether
    they meet the rows that they count.
    """
    of_indices = eqn.primitive.name == "concatenate" and dim == len(shape_of(eqn)) - 1
    of_indices = of_indices and np.issubdtype(eqn.outvars[0].aval.dtype, np.integer)
    known = [
        of_indices and n == 1 and x.kind == "whole" and x.number is not None for x, n in zip(ins, sizes, strict=True)
    ]
    found = combine(eqn, {k: x for k, x in enumerate(ins) if not (known[k] or x.zero)})
    at = enumerate(accumulate(sizes[:-1], initial=0))
    return replace(found, columns=tuple((start, ins[k].number) for k, start in at if known[k]))


@rule("iota", "rng_uniform")
def _iota(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> Value:
    dims = [eqn.params["dimension"]] if "dimension" in eqn.params else range(len(shape_of(eqn)))
    return Value(varies=frozenset(dims))


@rule(*having("draws"))
def _random(r: Reader, eqn: Any, twin: Any, ins: Sequence[Value]) -> list[Value] | Value:
    """Keys of rows give numbers of rows. The block's own key gives each row its own, a key that all blocks have gives
    each block the same.
    """
    rows, ndim = [x for x in ins if x.kind == "rows"], len(shape_of(eqn))
    if any(x.kind == "sum" for x in ins):
        return mixed(eqn, ins)
    if rows:
        at = [Labels(x.at.array.reshape([*x.at.array.shape, *[1] * ndim][:ndim])) for x in rows]
        return rows[0].plain(at=at[0]) if len({*at}) == 1 else others(eqn, ins)
    if any(x.keyed for x in ins):
        return Value()
    write = "use the key that the loss is given, and in evaluate, which gives none, numbers of the batch"
    pick = Note.at(eqn, f"draws with a key that is the same in all blocks; {write}", False)
    return [Value(varies=frozenset(range(len(shape_of(eqn, j)))), pick=pick) for j in range(len(eqn.outvars))]
