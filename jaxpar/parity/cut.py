"""A loss that is cut after one of its equations: it returns a number made of all values that are alive there.

    equations   0 ... site | site + 1 ...         alive values: made before the cut, read behind it
    cut loss    sum of numbers of the alive values  +  0 * loss

The number is a sum over rows, so that it means the same under every strategy. The cut loss belongs to a model like any
other: it has the same parameters and, times zero, the rest of the program. So each strategy runs it as it runs the
loss. If the numbers of two strategies differ, the forward before the cut differs; if their gradients differ, the
backward does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..model.batches import map_rows, rows_of
from ..model.model import Mean, Model, row_axes
from ..program import jaxpr as jx
from ..program.walk import is_literal, scan_parts

_CASTS = ("convert_element_type", "reduce_precision")  # programs differ in these from precision to precision
Site = tuple[int, ...]  # (equation,), or (scan, iteration, equation in its body); casts are not counted
RowDim = tuple[int, int]  # a dim of rows, and its size for one row


class CutLoss:
    """A model's loss, cut after the equation at `site`; if that is None, the loss itself.

    Attributes:
      model: the model, with the cut loss as its loss.
      eqns: the equations of the loss, without casts.
      row_dims_by_site: the dim of rows of every result of every equation; None if a result has no such dim, or is no
        floating-point number. An equation in a scan has the place of the scan and its place in the body as its key.
      row_dims_by_var: the dim of rows of every variable, of any dtype.
    """

    def __init__(self, model: Model, batch: Any, key: jax.Array):
        self.inner = model
        self.site: Site | None = None
        self.row_dims_by_site: dict[Site, list[RowDim | None]] = {}
        self.row_dims_by_var = dict[Any, RowDim | None]()
        self._traced_eqns: Sequence[Any] = ()
        # The loss of a model without variables has no argument for them.
        stateful = lambda params, variables, batch, key: self._loss(params, variables, batch, key)
        stateless = lambda params, batch, key: self._loss(params, {}, batch, key)[0]
        identity: Any = lambda tree: tree
        self.model = dataclasses.replace(
            # `inner.call` wraps the parameters itself: the cut loss gets the plain tree, and must not wrap it a second
            # time.
            model,
            loss=stateful if model.stateful else stateless,
            wrap=identity,
            unwrap=identity,
            rows="independent",
            optimizer=None,
        )
        # A dim that doubles with the rows is a dim of rows.
        # 1. Trace for one and for two times the rows.
        eqns, doubled_eqns = (self._trace(batch, key, times) for times in (1, 2))
        self._all_eqns, self.eqns = eqns, without_casts(eqns)
        # 2. Find the dims of rows, in the program and in the bodies of its scans.
        self._find_row_dims(eqns, doubled_eqns, rows_of(batch), ())
        for index, (x, y) in enumerate(zip(self.eqns, without_casts(doubled_eqns), strict=True)):
            if x.primitive.name == "scan":
                self._find_row_dims(scan_body(x).eqns, scan_body(y).eqns, rows_of(batch), (index,))

    def cut_at(self, site: Site | None) -> Model:
        """Return the model of the loss that is cut at a site. It is valid until the next call.

        The model is a new object each time, so that no program of another site is in a cache.
        """
        self.site = site
        return dataclasses.replace(self.model)

    def indices_with_rows(self, place: Site) -> list[int]:
        """Return the equations that make something with rows, in the program (place `()`) or in the scan at a place."""
        return [site[-1] for site, row_dims in self.row_dims_by_site.items() if site[:-1] == place and any(row_dims)]

    def summing_eqn(self, eqn: Any) -> Any:
        """Return the equation that sums over rows, if `eqn` reads values that depend on such a sum; else `eqn`."""
        producers = {v: producer for producer in self._all_eqns for v in producer.outvars}
        pending = [v for v in eqn.invars if not is_literal(v)]
        # Back over values without rows, to the first one that is made of values with rows.
        while pending:
            producer = producers.get(v := pending.pop())
            if producer is not None and self.row_dims_by_var.get(v) is None:
                operands = [w for w in producer.invars if not is_literal(w)]
                if any(self.row_dims_by_var.get(w) is not None for w in operands):
                    return producer
                pending += operands
        return eqn

    def _trace(self, batch: Any, key: jax.Array, times: int) -> Sequence[Any]:
        """Return the loss's equations for a batch of `times` as many rows."""

        def repeat_rows(x: Any) -> Any:
            return jax.ShapeDtypeStruct((times * x.shape[0], *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype))

        rows = map_rows(batch, repeat_rows)
        # Traced for its effect alone: `_loss` stores the equations.
        jax.eval_shape(lambda key, rows: self.model.call(*self.model.create(key), rows, key), key, rows)
        return self._traced_eqns

    def _find_row_dims(self, eqns: Sequence[Any], doubled_eqns: Sequence[Any], num_rows: int, place: Site) -> None:
        """Find and store the dims of rows of the results of some equations; `doubled_eqns` have twice the rows.

        `place` is `()` for the program, or the place of the scan whose body they are.
        """
        index = -1
        for x, y in zip(eqns, doubled_eqns, strict=True):
            row_dims = [_row_dim(v, w, num_rows) for v, w in zip(x.outvars, y.outvars, strict=True)]
            self.row_dims_by_var.update(zip(x.outvars, row_dims, strict=True))
            if x.primitive.name not in _CASTS:
                index += 1
                self.row_dims_by_site[*place, index] = [
                    row_dim if jnp.issubdtype(v.aval.dtype, jnp.floating) else None
                    for v, row_dim in zip(x.outvars, row_dims, strict=True)
                ]

    def _loss(self, *args: Any) -> tuple[Mean, Any]:
        """Return the cut loss, and the model's new variables; it takes the arguments of the model's loss."""
        inner = lambda *args: self.inner.call(*args, rows=row_axes())
        flat, out = jx.trace(inner, *args)
        # Only live equations: then something with rows is read after each of them.
        eqns = jx.live(flat.eqns, flat.outvars)
        names = [eqn.primitive.name for eqn in without_casts(self._traced_eqns)]
        if names and names != [eqn.primitive.name for eqn in without_casts(eqns)]:
            raise ValueError(
                "the loss has other equations for other numbers of rows or precisions: they have no common cut"
            )
        self._traced_eqns = eqns
        if self.site is None:
            means, variables = inner(*args)
            return means["loss"], variables
        # The rest of the program is evaluated too: its parameters have gradients then, if zero ones.
        evaluation = _Evaluation(self, (), self.site)
        inputs = [*flat.consts, *jax.tree.leaves(args)]
        outs = evaluation.evaluate(eqns, (*flat.constvars, *flat.invars), flat.outvars, inputs)
        means, variables = jax.tree.unflatten(jax.tree.structure(out), outs)
        total = means["loss"].total
        # The rest of the program, times zero. NaN and inf from behind the cut must not reach the number. Before the
        # first equation there is nothing to compare, and the number is 0 on both sides.
        zero = jnp.where(jnp.isfinite(total), 0 * total, 0)
        return Mean(evaluation.number + zero, jnp.float32(max(evaluation.num_rows, 1))), variables


class _Evaluation:
    """One evaluation of the program of the loss, or of the body of a scan.

    Attributes:
      place: `()` for the program, or the place of the scan.
      site: where the cut is, relative to `place`.
      number: the number made of the values that are alive after the site.
      num_rows: the number of rows of these values.
    """

    def __init__(self, cut: CutLoss, place: Site, site: Site):
        self.cut, self.place, self.site = cut, place, site
        self.number: Any = jnp.float32(0)
        self.num_rows = 0

    def evaluate(self, eqns: Sequence[Any], invars: Any, outvars: Any, inputs: Sequence[Any]) -> list[Any]:
        """Return the values of `outvars`, and add up `number` on the way."""
        env = jx.Environment(zip(invars, inputs, strict=True))
        row_dims: dict[Any, RowDim | None] = {}
        uncast: dict[Any, Any] = {}  # cast variable -> the variable that was cast
        index, cut_index, cuts_inside = -1, self.site[0], len(self.site) > 1
        for i, eqn in enumerate(eqns):
            is_cast = eqn.primitive.name in _CASTS
            index += not is_cast
            is_site = not is_cast and index == cut_index
            env.compute(eqn, self.scan if is_site and cuts_inside else jx.bind)
            if not is_cast:
                row_dims.update(zip(eqn.outvars, self.cut.row_dims_by_site[*self.place, index], strict=True))
            elif not is_literal(x := eqn.invars[0]) and jnp.issubdtype((y := eqn.outvars[0]).aval.dtype, jnp.floating):
                row_dims[y], uncast[y] = row_dims.get(x), uncast.get(x, x)
            if is_site and not cuts_inside:
                # A value and its casts count once, since only one side may have the casts.
                alive_vars = {uncast.get(v, v): v for v in jx.free(eqns[i + 1 :], outvars) if row_dims.get(v)}
                for v in alive_vars.values():
                    self.add(env[v], *row_dims[v])  # type: ignore[misc]
        return env.read(outvars)

    def add(self, x: Any, dim: int, size: int) -> None:
        """Add the number of a value whose dim `dim` holds rows of `size` each.

        The backward computes it again from the value. The residuals of all values and iterations would take more memory
        than a step has.
        """
        # The number is a mean over elements. Times the rows it is a sum over rows, which ranks and microbatches add up.
        self.num_rows = x.shape[dim] // size
        self.number = self.number + jax.checkpoint(functools.partial(_number, row_dim=dim))(x) * self.num_rows

    def scan(self, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
        """Return the results of a scan, and add the number that one of its iterations makes."""
        place, iteration, site = self.site
        parts, body = scan_parts(eqn), scan_body(eqn)
        num_consts, num_carries = len(parts.consts), len(parts.carry)

        def step(carry: Any, xs: Any) -> Any:
            # Within the body, the site is the number of an equation, and the place is the scan.
            inner = _Evaluation(self.cut, (place,), (site,))
            values = [*body.consts, *inputs[:num_consts], *carry, *xs]
            outs = inner.evaluate(body.eqns, (*body.constvars, *body.invars), body.outvars, values)
            self.num_rows = inner.num_rows
            return outs[:num_carries], (outs[num_carries:], inner.number)

        xs = list(inputs[num_consts + num_carries :])
        start = list(inputs[num_consts : num_consts + num_carries])
        carry, (ys, numbers) = lax.scan(step, start, xs, parts.length, parts.reverse)
        # Every iteration makes a number, since all run one program. A sum with a one-hot takes one of them.
        one_hot = jnp.asarray(np.eye(parts.length, dtype=np.float32)[iteration])
        self.number = self.number + (numbers * one_hot).sum()
        return [*carry, *ys]


def _number(x: Any, row_dim: int) -> Any:
    """Return a mean of positive terms, one for each element, as the number of a value.

    With f(x) = w asinh(x), where w > 0 is a weight for each place in a row, the terms are f (f + |f| / 2):

    - they are positive, so that none cancel, and rounding is small compared with the sum;
    - they grow slowly, so that the -1e9 of a mask does not hide the other elements;
    - they differ for permuted elements, and for x and -x.

    Elements that are not finite, and the largest number, with which masks are filled, count as 0.
    """
    x = jnp.where(jnp.abs(x) < jnp.finfo(x.dtype).max, x, 0).astype(jnp.float32)
    x = jnp.asinh(x)
    # No weight along the rows: which rank has a row must not change the number.
    for d in (d for d in range(x.ndim) if d != row_dim):
        x = x * (1 + 0.5 * jnp.cos(lax.broadcasted_iota(jnp.float32, x.shape, d)))
    return (x * (x + 0.5 * jnp.abs(x))).sum() / max(x.size, 1)


def without_casts(eqns: Sequence[Any]) -> list[Any]:
    """Return the equations without casts, in which precisions differ."""
    return [eqn for eqn in eqns if eqn.primitive.name not in _CASTS]


def scan_body(eqn: Any) -> jx.Flat:
    """Return the program of a scan's body, flat, without equations whose results are unread."""
    body = jx.flatten(scan_parts(eqn).body, remats=True)
    return dataclasses.replace(body, eqns=jx.live(body.eqns, body.outvars))


def _row_dim(v: Any, doubled: Any, num_rows: int) -> RowDim | None:
    """Return the one dim that grows with the rows, and its size for one row; None if no dim or several grow."""
    dims = [d for d, (n, m) in enumerate(zip(v.aval.shape, doubled.aval.shape, strict=True)) if n != m]
    return (dims[0], v.aval.shape[dims[0]] // num_rows) if len(dims) == 1 else None
