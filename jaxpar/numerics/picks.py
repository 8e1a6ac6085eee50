"""Lookups of one element per row, such as the labels' logits in a cross-entropy, with a select as their derivative.

    y[n] = x[n, i[n]]                          forward: a gather, as before
    d x[n, v] = dy[n] if v = i[n] else 0       backward: one compare and one select, fused into whatever reads it

JAX transposes a gather into a scatter. XLA fuses no scatter: it writes all elements of d x, in the logits' float32,
adds dy to one element of each row, and reads them all again for the rest of the backward. In the compiled step of GPT-2
(16,384 tokens, 50,257 words, bfloat16, one H200, jax 0.10.2) this moves 9.9 GB, and a select 3.3 GB.

A select compares every element, and so pays only if each row has one index: k indices would take k compares for each
element, where a scatter writes k elements. A lookup therefore becomes a `pick` if

- the table has floating-point numbers, and more than one element in each row; and
- each row is read once: the other dims of the table are batch dims of the gather (`jnp.take_along_axis`, `jax.vmap`),
  or their indices count 0, 1, 2, ... (`logits[jnp.arange(n), labels]`).

Then the select's bytes are never more than the scatter's. Forward values are those of the same gather. Indices out of
range give the same values and gradients as in JAX: filled with NaN and without gradient, clipped, or, if the program
promised that there are none, read clipped and without gradient.

The equations of a one-hot product are elementwise already. XLA fuses them, so that they stay as they are.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir

from ..program import jaxpr as jx
from ..program import kernels
from ..program.savings import saving
from ..program.walk import with_programs

_MODES = lax.GatherScatterMode


# ----------------------------------------------------------------------------------------------------------------------
# The primitive.


def pick(x: jax.Array, index: jax.Array, dim: int, mode: Any = _MODES.FILL_OR_DROP, fill: Any = None) -> jax.Array:
    """Return the element of each row of `x` that `index` names; its derivative is a select.

    Args:
      x: float [..., V, ...]; a row is along `dim`.
      index: int, of the shape of x without `dim`.
      dim: the dim of V.
      mode: how indices out of range are read, as in `lax.gather`.
      fill: the value for indices out of range in mode `FILL_OR_DROP`; None for NaN.

    Returns:
      Of the dtype of x, and the shape of `index`.

    >>> x = jnp.arange(6.0).reshape(2, 3)
    >>> pick(x, jnp.array([2, 0]), 1).tolist()
    [2.0, 3.0]
    """
    return PICK.bind(x, index, dim=dim, mode=mode, fill=fill)


def _gathered(x: jax.Array, index: jax.Array, dim: int, mode: Any, fill: Any) -> jax.Array:
    """Return the value of a pick, by a gather."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(dim,),
        start_index_map=(dim,),
        operand_batching_dims=tuple(d for d in range(x.ndim) if d != dim),
        start_indices_batching_dims=tuple(range(index.ndim)),
    )
    return lax.gather(x, index[..., None], numbers, (1,) * x.ndim, mode=mode, fill_value=fill)


def _spread(ct: jax.Array, index: jax.Array, shape: Sequence[int], dim: int, mode: Any) -> jax.Array:
    """Return the cotangent of a table of this shape: that of the result at the index of each row, and zeros."""
    # A uint8 cannot count 300 places; a wider type holds all its values.
    last_place, max_index = shape[dim] - 1, jnp.iinfo(index.dtype).max
    index = index if max_index >= last_place else index.astype(jnp.int32)
    # An index that was clipped has read the first or last element. Any other index out of range meets no place.
    index = jnp.clip(index, 0, last_place) if mode == _MODES.CLIP else index
    places = lax.broadcasted_iota(index.dtype, shape, dim)
    is_read = places == jnp.expand_dims(index, dim)
    spread, zeros = jnp.broadcast_to(jnp.expand_dims(ct, dim), shape), jnp.zeros(shape, ct.dtype)
    # A scatter would write all elements into memory, and another kernel would read them. XLA fuses a select.
    with saving("lookups", 2 * spread.size * spread.dtype.itemsize):
        return lax.select(is_read, spread, zeros)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    (x, index), (tangent, _) = primals, tangents
    out = PICK.bind(x, index, **params)
    if type(tangent) is ad.Zero:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, PICK.bind(tangent, index, **params | {"fill": 0})  # a fill value is a constant


def _transpose(ct: Any, x: Any, index: Any, *, dim: int, mode: Any, fill: Any) -> tuple[Any, None]:
    return (ad.Zero(x.aval) if type(ct) is ad.Zero else _spread(ct, index, x.aval.shape, dim, mode)), None


def _batch(args: Sequence[Any], dims: Sequence[Any], *, dim: int, **params: Any) -> tuple[Any, int]:
    """Put the batch dim in front of both operands."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    in_front = lambda x, d: jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
    x, index = (in_front(x, d) for x, d in zip(args, dims, strict=True))
    return PICK.bind(x, index, dim=dim + 1, **params), 0


PICK = jec.Primitive("pick")
PICK.def_impl(_gathered)
PICK.def_abstract_eval(lambda x, index, *, dim, mode, fill: x.update(shape=(*x.shape[:dim], *x.shape[dim + 1 :])))
mlir.register_lowering(PICK, mlir.lower_fun(_gathered, multiple_results=False))
ad.primitive_jvps[PICK] = _jvp
ad.primitive_transposes[PICK] = _transpose
batching.primitive_batchers[PICK] = _batch


# ----------------------------------------------------------------------------------------------------------------------
# The rewriting.


def with_picks(flat: jx.Flat) -> jx.Flat:
    """Return a program with picks instead of gathers, where that saves bytes.

    It also replaces gathers within loops, branches and checkpoints. Kernels and functions with custom derivatives stay:
    nothing transposes their equations.
    """
    # Only an array that is whole on this process can be read.
    consts = {
        v: x for v, x in zip(flat.constvars, flat.consts, strict=True) if getattr(x, "is_fully_addressable", True)
    }
    return replace(flat, eqns=tuple(_replaced(flat.eqns, consts)))


def _replaced(eqns: Iterable[Any], consts: Mapping[Any, Any]) -> list[Any]:
    """Return equations with picks; `consts` are the arrays that are known."""
    source = _Sources({v: eqn for eqn in eqns for v in eqn.outvars}, consts)
    new_eqns: list[Any] = []
    for eqn in eqns:
        if (rows := _Rows.of(eqn, source)) is not None:
            new_eqns += rows.equations(eqn)
        elif eqn.primitive.name not in jx.CUSTOM and kernels.of(eqn) is None:
            new_eqns.append(with_programs(eqn, _with_inner_picks))
        else:
            new_eqns.append(eqn)
    return new_eqns


def _with_inner_picks(jaxpr: Any) -> Any:
    """Return a jaxpr inside an equation with picks; itself if it has no lookup."""
    eqns = _replaced(jaxpr.eqns, {})
    return jaxpr if all(map(operator.is_, eqns, jaxpr.eqns)) else jaxpr.replace(eqns=eqns)


@dataclass(frozen=True)
class _Sources:
    """The origin of a program's variables.

    Attributes:
      producers: the equation that computes each variable.
      consts: the arrays that are known.
    """

    producers: Mapping[Any, Any]
    consts: Mapping[Any, Any]

    def counting_dim(self, atom: Any, column: int = 0) -> int | None:
        """Return the dim of index vectors along which a coordinate counts 0, 1, 2, ...; None if there is none.

        Args:
          atom: integers [..., coordinates], or [...] within.
          column: which coordinate, if there are several.
        """
        if jx.is_literal(atom):
            return None
        shape = atom.aval.shape
        if atom in self.consts and not column:
            values = np.asarray(self.consts[atom])
            return next((d for d in range(values.ndim) if (values == _iota(values.shape, d)).all()), None)
        if (eqn := self.producers.get(atom)) is None:
            return None
        name, params, operands = eqn.primitive.name, eqn.params, eqn.invars
        if name == "concatenate" and params["dimension"] == len(shape) - 1:
            # Find the operand that holds the coordinate.
            for x in operands:
                if column < x.aval.shape[-1]:
                    return self.counting_dim(x, column)
                column -= x.aval.shape[-1]
        if name == "slice" and operands[0].aval.shape[:-1] == shape[:-1] and set(params["strides"] or (1,)) == {1}:
            return self.counting_dim(operands[0], column + params["start_indices"][-1])
        if column:
            return None
        if name == "iota":
            return params["dimension"]
        if name == "select_n" and len(operands) == 3 and self._wraps_negatives(operands):
            return self.counting_dim(operands[1])
        if name == "convert_element_type" and jnp.issubdtype(atom.aval.dtype, jnp.integer):
            dim = self.counting_dim(operands[0])
            return dim if dim is not None and shape[dim] - 1 <= jnp.iinfo(atom.aval.dtype).max else None
        if name in ("broadcast_in_dim", "reshape"):
            return self._moved(eqn)
        return None

    def _wraps_negatives(self, operands: Sequence[Any]) -> bool:
        """Return whether a `select_n` is JAX's `i + size if i < 0 else i`, which is i itself if i counts from 0."""
        if jx.is_literal(operands[0]):
            return False
        if operands[0] in self.consts:  # NumPy's `arange` was compared before the trace
            return not np.any(self.consts[operands[0]])
        test = self.producers.get(operands[0])
        if test is None or test.primitive.name != "lt" or test.invars[0] is not operands[1]:
            return False
        return jx.is_literal(test.invars[1]) and test.invars[1].val == 0

    def _moved(self, eqn: Any) -> int | None:
        """Return the counting dim of a result whose elements are those of the operand, repeated or with dims of 1."""
        (x, *_), shape = eqn.invars, eqn.outvars[0].aval.shape
        dim = self.counting_dim(x)
        if dim is None:
            return None
        if eqn.primitive.name == "broadcast_in_dim":
            out_dim = eqn.params["broadcast_dimensions"][dim]
            return out_dim if shape[out_dim] == x.aval.shape[dim] else None
        # A reshape that only adds or drops dims of size 1 keeps the order of the others.
        dims, out_dims = ([d for d, n in enumerate(s) if n != 1] for s in (x.aval.shape, shape))
        keeps_order = [x.aval.shape[d] for d in dims] == [shape[d] for d in out_dims]
        return out_dims[dims.index(dim)] if keeps_order and dim in dims else None


def _iota(shape: Sequence[int], dim: int) -> np.ndarray:
    """Return the numbers of the places along a dim, to broadcast against an array of this shape."""
    return np.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))])


@dataclass(frozen=True)
class _Rows:
    """A gather that reads one element of each row of its table.

    Attributes:
      dim: the dim of the table along which a row is.
      column: the coordinate of the index vectors that names the element.
      places: for each other dim of the table, in order, the dim of the indices that goes with it; None for a dim of
        size 1 without an index.
      unit_dims: the other dims of the indices, of size 1.
    """

    dim: int
    column: int
    places: tuple[int | None, ...]
    unit_dims: tuple[int, ...]

    @classmethod
    def of(cls, eqn: Any, sources: _Sources) -> "_Rows | None":
        """Return the rows of a gather; None for another equation."""
        if eqn.primitive.name != "gather" or eqn.params["mode"] == _MODES.ONE_HOT:
            return None
        (table, indices), numbers, sizes = eqn.invars, eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        shape, batch = table.aval.shape, indices.aval.shape[:-1]
        if not jnp.issubdtype(table.aval.dtype, jnp.inexact) or math.prod(sizes) != 1:
            return None
        # 1. Dims of the table whose index is the number of the row.
        rows = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
        picked_dims = []
        for column, d in enumerate(numbers.start_index_map):
            place = sources.counting_dim(indices, column)
            if place is not None and place < len(batch) and batch[place] == shape[d] and place not in rows.values():
                rows[d] = place
            else:
                picked_dims.append((d, column))
        # 2. All but one, and each row once. `jnp.take_along_axis` gives no index to a dim of size 1.
        unit_dims = tuple(place for place in range(len(batch)) if place not in rows.values())
        if len(picked_dims) != 1 or any(batch[place] != 1 for place in unit_dims):
            return None
        ((dim, column),) = picked_dims
        other_dims = [d for d in range(len(shape)) if d != dim]
        if shape[dim] == 1 or any(d not in rows and shape[d] != 1 for d in other_dims):
            return None
        return cls(dim, column, tuple(map(rows.get, other_dims)), unit_dims)

    def equations(self, eqn: Any) -> list[Any]:
        """Return the equations of the pick that replaces a gather."""
        shape, out_shape = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        # The dims of the indices in the order of the table's, those of size 1 first.
        order = (*self.unit_dims, *(place for place in self.places if place is not None))

        def pick_rows(table: jax.Array, indices: jax.Array) -> jax.Array:
            index = lax.index_in_dim(indices, self.column, indices.ndim - 1, keepdims=False).transpose(order)
            rows = (*shape[: self.dim], *shape[self.dim + 1 :])
            y = pick(table, index.reshape(rows), self.dim, eqn.params["mode"], eqn.params["fill_value"])
            return y.reshape(index.shape).transpose(np.argsort(order)).reshape(out_shape)

        flat, _ = jx.trace(pick_rows, *map(jx.type_of, eqn.invars))
        names = jx.Environment(
            [*zip(flat.invars, eqn.invars, strict=True), (flat.outvars[0], eqn.outvars[0])], jx.itself
        )
        renamed = lambda e: e.replace(invars=names.read(e.invars), outvars=names.read(e.outvars))
        return [renamed(e).replace(source_info=eqn.source_info) for e in flat.eqns]
