"""A loss that is cut after one of its equations: a number made of all values alive there takes its place.

The number is a sum over rows, so that it means the same under every strategy. That is a model like any other, with the
same parameters and, times zero, the rest of the program behind it, so that each strategy runs it by what it makes of
the whole. Where two strategies' numbers differ, the forward of what is before the cut does; where their gradients do,
the backward.
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

from ..model.batches import rows_of
from ..model.model import Mean, Model, is_replicated, row_axes
from ..program import jaxpr as jx
from ..program.walk import is_literal, scan_parts

_CASTS = ("convert_element_type", "reduce_precision")  # which other precisions have others of
Site = tuple[int, ...]  # an equation's place; in a scan the iteration and the place in its body besides


class CutLoss:
    """A model's loss, cut after the equation at `site`; None: the loss itself.

    Attributes:
      model: with the cut loss in place of the loss.
      eqns: the equations of the loss, without casts.
      sizes: of every result of every equation, the dim of rows and its size for one row; None where it has no such dim,
        or is no floating-point number.
      grows: the same of every variable, whatever its dtype.
    """

    def __init__(self, model: Model, batch: Any, key: jax.Array):
        self.inner = model
        self.site: Site | None = None
        self.sizes: dict[Site, list[tuple[int, int] | None]] = {}
        self.grows = dict[Any, tuple[int, int] | None]()
        self._seen: Sequence[Any] = ()
        stateful = lambda params, variables, batch, key: self._loss(params, variables, batch, key)
        plain = lambda params, batch, key: self._loss(params, {}, batch, key)[0]
        same: Any = lambda tree: tree
        self.model = dataclasses.replace(
            model,
            loss=stateful if model.stateful else plain,
            wrap=same,
            unwrap=same,
            rows="independent",
            optimizer=None,
        )
        one, two = (self._traced(batch, key, times) for times in (1, 2))  # what grows with the rows has a dim of them
        self._whole, self.eqns = one, without_casts(one)
        self._measure(one, two, rows_of(batch), ())
        for number, (x, y) in enumerate(zip(self.eqns, without_casts(two), strict=True)):
            if x.primitive.name == "scan":
                self._measure(body_of(x).eqns, body_of(y).eqns, rows_of(batch), (number,))

    def at(self, site: Site | None) -> Model:
        """The model of the loss that is cut at a site, whose programs nobody has kept; until the next call of this."""
        self.site = site
        return dataclasses.replace(self.model)

    def with_rows(self, at: Site) -> list[int]:
        """The equations of the program, or of the scan `at` a place, after which something with rows is made."""
        return [site[-1] for site, sizes in self.sizes.items() if site[:-1] == at and any(sizes)]

    def summing(self, eqn: Any) -> Any:
        """Where an equation reads what a sum over rows became, the equation that sums; else the equation itself."""
        makers = {v: maker for maker in self._whole for v in maker.outvars}
        todo = [v for v in eqn.invars if not is_literal(v)]
        while todo:
            maker = makers.get(v := todo.pop())
            if maker is not None and self.grows.get(v) is None:
                read = [w for w in maker.invars if not is_literal(w)]
                if any(self.grows.get(w) is not None for w in read):
                    return maker
                todo += read
        return eqn

    def _traced(self, batch: Any, key: jax.Array, times: int) -> Sequence[Any]:
        """The loss's equations for so many times the rows."""

        def longer(x: Any) -> Any:
            return jax.ShapeDtypeStruct((times * x.shape[0], *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype))

        rows = jax.tree.map(lambda x: x if is_replicated(x) else longer(x), batch, is_leaf=is_replicated)
        jax.eval_shape(lambda key, rows: self.model.call(*self.model.create(key), rows, key), key, rows)
        return self._seen

    def _measure(self, one: Sequence[Any], two: Sequence[Any], rows: int, at: Site) -> None:
        """Notes the dims of rows of what some equations make, of which `two` have twice the rows."""
        number = -1
        for x, y in zip(one, two, strict=True):
            found = [_grows(v, w, rows) for v, w in zip(x.outvars, y.outvars, strict=True)]
            self.grows.update(zip(x.outvars, found, strict=True))
            if x.primitive.name not in _CASTS:
                number += 1
                floats = [jnp.issubdtype(v.aval.dtype, jnp.floating) for v in x.outvars]
                self.sizes[*at, number] = [of if known else None for of, known in zip(found, floats, strict=True)]

    def _loss(self, *args: Any) -> tuple[Mean, Any]:
        """What takes the place of the model's loss, and its new variables."""
        inner = lambda *args: self.inner.call(*args, rows=row_axes())
        flat, out = jx.trace(inner, *args)
        eqns = jx.live(flat.eqns, flat.outvars)  # after each with rows, something with rows is read
        names = [eqn.primitive.name for eqn in without_casts(self._seen)]
        if names and names != [eqn.primitive.name for eqn in without_casts(eqns)]:
            raise ValueError(
                "the loss has other equations for other numbers of rows or precisions: they have no common cut"
            )
        self._seen = eqns
        if self.site is None:
            sums, new = inner(*args)
            return sums["loss"], new
        cut = _Run(self, (), self.site)
        ins = [*flat.consts, *jax.tree.leaves(args)]
        outs = cut.run(eqns, (*flat.constvars, *flat.invars), flat.outvars, ins)
        sums, new = jax.tree.unflatten(jax.tree.structure(out), outs)
        total = sums["loss"].total
        # Before the first equation there is nothing to compare, and the number is 0 on both sides. What is not finite
        # behind the cut is none of its business.
        behind = jnp.where(jnp.isfinite(total), 0 * total, 0)
        return Mean(cut.number + behind, jnp.float32(max(cut.rows, 1))), new


class _Run:
    """One evaluation of a program, that of the loss or of a scan `at` a place in it, which makes `number` of what is
    alive after a site, of so many `rows`.
    """

    def __init__(self, cut: CutLoss, at: Site, site: Site):
        self.cut, self.at, self.site = cut, at, site
        self.number: Any = jnp.float32(0)
        self.rows = 0

    def run(self, eqns: Sequence[Any], invars: Any, outvars: Any, ins: Sequence[Any]) -> list[Any]:
        """The results of some equations."""
        env = jx.Environment(zip(invars, ins, strict=True))
        sizes: dict[Any, tuple[int, int] | None] = {}
        uncast: dict[Any, Any] = {}
        number, stop, enters = -1, self.site[0], len(self.site) > 1
        for i, eqn in enumerate(eqns):
            cast = eqn.primitive.name in _CASTS
            number += not cast
            here = not cast and number == stop
            env.compute(eqn, self.scan if here and enters else jx.bind)
            if not cast:
                sizes.update(zip(eqn.outvars, self.cut.sizes[*self.at, number], strict=True))
            elif not is_literal(x := eqn.invars[0]) and jnp.issubdtype((y := eqn.outvars[0]).aval.dtype, jnp.floating):
                sizes[y], uncast[y] = sizes.get(x), uncast.get(x, x)
            if here and not enters:  # of a value and its casts, which one side has alone, one
                alive = {uncast.get(v, v): v for v in jx.free(eqns[i + 1 :], outvars) if sizes.get(v)}
                for v in alive.values():
                    self.add(env[v], *sizes[v])  # type: ignore[misc]
        return env.read(outvars)

    def add(self, x: Any, dim: int, size: int) -> None:
        """A number of a value with rows. Backwards it is made again of that value: what its derivative reads, of each
        value and iteration, would be more than a step holds.
        """
        self.rows = x.shape[dim] // size
        self.number = self.number + jax.checkpoint(functools.partial(_number, dim=dim))(x) * self.rows

    def scan(self, eqn: Any, ins: Sequence[Any]) -> list[Any]:
        """A scan that makes the number in one of its iterations."""
        place, iteration, stop = self.site
        parts, body = scan_parts(eqn), body_of(eqn)
        n, k = len(parts.consts), len(parts.carry)

        def step(carry: Any, xs: Any) -> Any:
            inner = _Run(self.cut, (place,), (stop,))
            values = [*body.consts, *ins[:n], *carry, *xs]
            outs = inner.run(body.eqns, (*body.constvars, *body.invars), body.outvars, values)
            self.rows = inner.rows
            return outs[:k], (outs[k:], inner.number)

        xs = list(ins[n + k :])
        carry, (ys, numbers) = lax.scan(step, list(ins[n : n + k]), xs, parts.length, parts.reverse)
        chosen = jnp.asarray(np.eye(parts.length, dtype=np.float32)[iteration])
        self.number = self.number + (numbers * chosen).sum()
        return [*carry, *ys]


def _number(x: Any, dim: int) -> Any:
    """A mean of positive terms, so that none cancel and rounding is small beside it, in which the -1e9 of a mask does
    not hide the others. What is not finite, and the largest number that stands for it in masks, counts nothing.
    """
    x = jnp.where(jnp.abs(x) < jnp.finfo(x.dtype).max, x, 0).astype(jnp.float32)
    x = jnp.asinh(x)
    for other in (d for d in range(x.ndim) if d != dim):
        x = x * (1 + 0.5 * jnp.cos(lax.broadcasted_iota(jnp.float32, x.shape, other)))
    return (x * (x + 0.5 * jnp.abs(x))).sum() / max(x.size, 1)


def without_casts(eqns: Sequence[Any]) -> list[Any]:
    """Some equations without those that differ from precision to precision."""
    return [eqn for eqn in eqns if eqn.primitive.name not in _CASTS]


def body_of(eqn: Any) -> jx.Flat:
    """The program of a scan, flat, without what nobody reads."""
    body = jx.flatten(scan_parts(eqn).body, remats=True)
    return dataclasses.replace(body, eqns=jx.live(body.eqns, body.outvars))


def _grows(one: Any, two: Any, rows: int) -> tuple[int, int] | None:
    """The dim that grows with the rows, and its size for one row; None where none does."""
    dims = [d for d, (n, m) in enumerate(zip(one.aval.shape, two.aval.shape, strict=True)) if n != m]
    return (dims[0], one.aval.shape[dims[0]] // rows) if len(dims) == 1 else None
