"""bisect: the first equation of a loss whose results, or whose gradients, differ between two strategies.

The loss is cut after an equation, and a number made of all values that live there takes its place: a sum over rows, so
that it means the same under every strategy. That is a model like any other, with the same parameters and, times zero,
the rest of the program behind it, so that each strategy runs it by what it makes of the whole. Where the number
differs, the forward of what is before the cut does; where its gradients do, the backward. Halving finds the equation. A
scan is halved over its iterations, and then within its body.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from ...make import make_train_step
from ...model.batches import rows_of
from ...model.model import Mean, Model, is_replicated
from ...program import jaxpr as jx
from ...program.walk import is_literal, scan_parts
from ...strategy import Strategy, as_strategy
from .differences import TOLERANCE, differences, dtypes_of
from .reference import Reference

_CASTS = ("convert_element_type", "reduce_precision")  # of which other precisions have others
Site = tuple[int, ...]  # an equation's place; in a scan the iteration and the place in its body besides


@dataclass(frozen=True)
class Bisected:
    """Where two strategies part; print it.

    Attributes:
      a, b: the strategies; b may be "one device".
      primitive: of the equation, "" where nothing differs.
      line, scope: of the user's program, its module path.
      iteration: of the loop that it is in, None outside.
      backward: whether the loss's value agrees up to it, and gradients differ.
      what: the value, or the gradient that is furthest off; `error`, how far, relative to its scale.
      tolerance: what was allowed.
      programs: how many were compiled and run on each side.
    """

    a: str
    b: str
    primitive: str
    line: str
    scope: str
    iteration: int | None
    backward: bool
    what: str
    error: float
    tolerance: float
    programs: int

    def __str__(self) -> str:
        if not self.primitive:
            return f"{self.a} and {self.b} agree within {self.tolerance:.0e}: there is no equation to name"
        way = "its backward" if self.backward else "its result"
        lines = [f"{self.a} and {self.b} part at {self.primitive}, {way}, at {self.line or 'no line of the program'}"]
        lines += [f"in {self.scope}"] if self.scope else []
        lines += [f"iteration {self.iteration} of the loop"] if self.iteration is not None else []
        lines.append(f"{self.what} differs by {self.error:.2g} of its scale (allowed {self.tolerance:.0e})")
        return "\n  ".join([*lines, f"what is before it agrees; {self.programs} programs on each side"])


def bisect(
    model: Model,
    a: Strategy | str | None,
    b: Strategy | str | None,
    batch: Any,
    mesh: Mesh | Sequence[jax.Device] | None = None,
    key: jax.Array | None = None,
) -> Bisected:
    """The first equation of the loss whose results, or gradients, differ between two strategies beyond rounding.

    Args:
      model, batch, mesh: as for `make_train_step`; the batch may be NumPy arrays.
      a, b: strategies, which may differ in precision; None is one device, plainly, as in `jp.verify`.
      key: the key of the initial values; `jax.random.key(0)` if None.

    Rounding is what `jp.verify` allows for the lower of the precisions. Compared are values that have a dim of rows;
    what sums them is named where all of these agree. Costs about log2 of the number of equations programs on each side,
    each compiled and run once, in a gradient step's memory. Communicates what these do.

    Raises ValueError where something is not finite, where the two make other programs of the loss, and where a strategy
    takes none that is cut.
    """
    sides = [None if one is None else as_strategy(one) for one in (a, b)]
    if sides == [None, None]:
        raise ValueError("bisect(a=None, b=None) compares one device with itself; give a strategy, such as 'fsdp'")
    said = ["one device" if one is None else str(one) for one in (a, b)]
    search = _Search(model, batch, sides, mesh, jax.random.key(0) if key is None else key)
    found = search.found()
    return dataclasses.replace(found, a=said[0], b=said[1], programs=len(search.told))


class _Cut:
    """A model's loss, cut after the equation at `site`; None: the loss itself.

    Attributes:
      seen: the equations of its program when it was last traced.
      sizes: of every result of every equation, the dim of rows and its size for one row; None where it has no such dim,
        or is no floating-point number.
    """

    def __init__(self, model: Model):
        self.inner = model
        self.site: Site | None = None
        self.seen: Sequence[Any] = ()
        self.sizes: dict[Site, list[tuple[int, int] | None]] = {}
        stateful = lambda params, variables, batch, key: self.loss(params, variables, batch, key)
        plain = lambda params, batch, key: self.loss(params, batch, key)
        same: Any = lambda tree: tree
        self.model = dataclasses.replace(
            model,
            loss=stateful if model.stateful else plain,
            wrap=same,
            unwrap=same,
            rows="independent",
            optimizer=None,
        )

    def loss(self, *args: Any) -> Any:
        """What takes the place of the model's loss."""
        flat, tree = jx.trace(self.inner.loss, *args)
        eqns = jx.live(flat.eqns, flat.outvars)  # after each with rows, something with rows is read
        names = [eqn.primitive.name for eqn in self.seen if eqn.primitive.name not in _CASTS]
        if names and names != [eqn.primitive.name for eqn in eqns if eqn.primitive.name not in _CASTS]:
            raise ValueError(
                "the loss has other equations for other numbers of rows or precisions: they have no common cut"
            )
        self.seen = eqns
        if self.site is None:
            return self.inner.loss(*args)
        ins = [*flat.consts, *jax.tree.leaves(args)]
        cut = _Run(self, self.site)
        outs = cut.run(eqns, (*flat.constvars, *flat.invars), flat.outvars, ins, self.site[0], ())
        value = jax.tree.unflatten(jax.tree.structure(tree), outs)
        new: Sequence[Any] = ()
        if self.inner.stateful:
            value, *new = value
        value = value[0] if isinstance(value, tuple) else value
        total = value.total if isinstance(value, Mean) else value
        # Before the first of them there is nothing to compare, and the number is 0 on both sides.
        found = Mean(cut.number + 0 * jnp.asarray(total, jnp.float32), jnp.float32(max(cut.rows, 1)))
        return (found, *new) if self.inner.stateful else found


class _Run:
    """One evaluation of a program, which makes `number` of what is alive after a site, of so many `rows`."""

    def __init__(self, cut: _Cut, site: Site):
        self.cut, self.site = cut, site
        self.number: Any = jnp.float32(0)
        self.rows = 0

    def run(
        self, eqns: Sequence[Any], invars: Any, outvars: Any, ins: Sequence[Any], stop: int | None, at: Site
    ) -> list[Any]:
        """The results of some equations, cut after number `stop`; `at` is where the program is, in a scan its place."""
        env = dict(zip(invars, ins, strict=True))
        read = lambda atom: atom.val if is_literal(atom) else env[atom]
        last = {v: i for i, eqn in enumerate(eqns) for v in eqn.invars if not is_literal(v)}
        last |= {v: len(eqns) for v in outvars if not is_literal(v)}
        sizes: dict[Any, tuple[int, int] | None] = {}
        number = -1
        for i, eqn in enumerate(eqns):
            values = list(map(read, eqn.invars))
            if cast := eqn.primitive.name in _CASTS:
                sizes[eqn.outvars[0]] = None if is_literal(eqn.invars[0]) else sizes.get(eqn.invars[0])
            else:
                number += 1
                sizes.update(zip(eqn.outvars, self.cut.sizes[*at, number], strict=True))
            with jx.source_info_of(eqn):
                if not cast and not at and number == stop and len(self.site) > 1:
                    outs = self.scan(eqn, values)
                else:
                    outs = jx.bind(eqn, values)
            env.update(zip(eqn.outvars, outs, strict=True))
            if not cast and number == stop and (at or len(self.site) == 1):
                for v, known in sizes.items():
                    if known is not None and last.get(v, -1) > i:
                        self.add(env[v], *known)
        return list(map(read, outvars))

    def add(self, x: Any, dim: int, size: int) -> None:
        """A number of a value with rows: no sum of terms that cancel by themselves, as those of a softmax do."""
        self.rows = x.shape[dim] // size
        x = x.astype(jnp.float32)
        for other in (d for d in range(x.ndim) if d != dim):
            x = x * (1 + 0.5 * jnp.cos(lax.broadcasted_iota(jnp.float32, x.shape, other)))
        self.number = self.number + (x * (x + 1)).sum() * (self.rows / max(x.size, 1))

    def scan(self, eqn: Any, ins: Sequence[Any]) -> list[Any]:
        """A scan that makes the number in one of its iterations."""
        place, iteration, stop = self.site
        parts = scan_parts(eqn)
        n, k = len(parts.consts), len(parts.carry)
        body = _body(eqn)

        def step(carry: Any, xs: Any) -> Any:
            inner = _Run(self.cut, self.site)
            values = [*body.consts, *ins[:n], *carry, *xs]
            outs = inner.run(body.eqns, (*body.constvars, *body.invars), body.outvars, values, stop, (place,))
            self.rows = inner.rows
            return outs[:k], (outs[k:], inner.number)

        xs = list(ins[n + k :])
        carry, (ys, numbers) = lax.scan(step, list(ins[n : n + k]), xs, parts.length, parts.reverse)
        chosen = jnp.asarray(np.eye(parts.length, dtype=np.float32)[iteration])
        self.number = self.number + (numbers * chosen).sum()
        return [*carry, *ys]


class _Search:
    """Halves a loss between two sides, of which None is one device."""

    def __init__(self, model: Model, batch: Any, sides: Sequence[Strategy | None], mesh: Any, key: jax.Array):
        self.batch, self.sides, self.mesh, self.key = batch, sides, mesh, key
        self.tolerance = max(TOLERANCE[name] for one in sides if one is not None for name in dtypes_of(one))
        self.cut, self.told = _Cut(model), dict[Site | None, tuple[str, float, bool]]()
        self.grows = dict[Any, tuple[int, int] | None]()  # of each variable of the loss's program
        made = []
        for times in (1, 2):  # what grows with the rows has a dim of them
            kind = jax.dtypes.canonicalize_dtype  # of NumPy's int64
            longer = lambda x, n=times, kind=kind: jax.ShapeDtypeStruct((n * x.shape[0], *x.shape[1:]), kind(x.dtype))
            more = jax.tree.map(lambda x, longer=longer: x if is_replicated(x) else longer(x), batch,
                                is_leaf=is_replicated)  # fmt: skip
            jax.eval_shape(lambda key, rows: self.cut.model.call(*model.create(key), rows, key), key, more)
            made.append(self.cut.seen)
        self.eqns = made[0]
        self.measure(made[0], made[1], ())
        for number, (one, two) in enumerate(zip(_without_casts(made[0]), _without_casts(made[1]), strict=True)):
            if one.primitive.name == "scan":
                self.measure(_body(one).eqns, _body(two).eqns, (number,))

    def measure(self, one: Sequence[Any], two: Sequence[Any], at: Site) -> None:
        """Notes the dims of rows of what some equations make, of which `two` have twice the rows."""
        number = -1
        for x, y in zip(one, two, strict=True):
            found = [_grows(v, w, rows_of(self.batch)) for v, w in zip(x.outvars, y.outvars, strict=True)]
            self.grows.update(zip(x.outvars, found, strict=True))
            if x.primitive.name not in _CASTS:
                number += 1
                floats = [jnp.issubdtype(v.aval.dtype, jnp.floating) for v in x.outvars]
                self.cut.sizes[*at, number] = [of if known else None for of, known in zip(found, floats, strict=True)]

    def found(self) -> Bisected:
        """The equation; the sides have no names yet."""
        if not self.differs(None):
            return Bisected("", "", "", "", "", None, False, "", 0.0, self.tolerance, 0)
        places, eqns = self.with_rows(()), _without_casts(self.eqns)
        at = self.first(places, lambda place: (place,))
        if at is None:  # all values with rows agree: it is what sums them
            following = next((e for i, e in enumerate(eqns) if i > (places or [-1])[-1]), eqns[-1])
            return self.named(following, None, None)
        eqn, site, iteration = eqns[at], (at,), None
        if eqn.primitive.name == "scan" and (inner := self.with_rows((at,))):
            parts = scan_parts(eqn)
            order = range(parts.length)[::-1] if parts.reverse else range(parts.length)
            iteration = self.first(order, lambda number: (at, number, inner[-1]))
            if iteration is not None:
                within = self.first(inner, lambda place: (at, iteration, place))
                assert within is not None, "the last cut was seen to differ"
                eqn, site = _without_casts(_body(eqn).eqns)[within], (at, iteration, within)
        return self.named(self.summing(eqn), iteration, site)

    def named(self, eqn: Any, iteration: int | None, site: Site | None) -> Bisected:
        """What `Bisected` has of it."""
        what, error, backward = self.told[site]
        scope = str(eqn.source_info.name_stack)
        line = jx.user_line(eqn)
        return Bisected("", "", eqn.primitive.name, line, scope, iteration, backward, what, error, self.tolerance, 0)

    def summing(self, eqn: Any) -> Any:
        """Where an equation reads what a sum over rows became, the equation that sums; else the equation itself."""
        makers = {v: maker for maker in self.eqns for v in maker.outvars}
        todo = [v for v in eqn.invars if not is_literal(v)]
        while todo:
            maker = makers.get(v := todo.pop())
            if maker is not None and self.grows.get(v) is None:
                read = [w for w in maker.invars if not is_literal(w)]
                if any(self.grows.get(w) is not None for w in read):
                    return maker
                todo += read
        return eqn

    def with_rows(self, at: Site) -> list[int]:
        """The equations of a program after which something with rows is made; its own cuts."""
        return [site[-1] for site, sizes in self.cut.sizes.items() if site[:-1] == at and any(sizes)]

    def first(self, places: Sequence[int], site: Callable[[int], Site]) -> int | None:
        """The first place at which the sides differ, of which all after it do as well; None where not even the last."""
        if not places or not self.differs(site(places[-1])):
            return None
        low, high = 0, len(places) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.differs(site(places[middle])) else (middle + 1, high)
        return places[high]

    def differs(self, site: Site | None) -> bool:
        """Whether the sides do, at a cut; `told` then has what differs most, how far, and whether it is a gradient."""
        if site not in self.told:
            self.cut.site = site
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what there is to say of the loss has been said of it
                (loss, grads), (other, others) = (self.ran(side) for side in self.sides)
            if not all(np.isfinite(x).all() for x in (loss, other, *jax.tree.leaves((grads, others)))):
                raise ValueError("a loss or gradient is not finite, which is in every cut; try step.trace_nonfinite")
            error = abs(loss - other) / max(abs(other), 1e-30)
            self.told[site] = "the value", error, False
            worst = max(differences("gradient", grads, others), key=lambda d: d.error)
            if error <= self.tolerance < worst.error:
                self.told[site] = f"the gradient of {worst.path}", worst.error, True
        return self.told[site][1] > self.tolerance

    def ran(self, strategy: Strategy | None) -> tuple[float, Any]:
        """Loss and gradients of the cut loss on one side."""
        model = dataclasses.replace(self.cut.model)  # whose programs nobody has kept
        other = next(one for one in self.sides if one is not None)
        step = make_train_step(model, None, strategy or other, self.mesh)
        if strategy is None:
            loss, grads = Reference(model, step.strategy, step.replicas).value_and_grad(self.key, self.batch)
        else:
            loss, grads = step.value_and_grad(step.init(self.key), self.batch)
        return float(loss), jax.tree.map(np.asarray, grads)


def _without_casts(eqns: Sequence[Any]) -> list[Any]:
    return [eqn for eqn in eqns if eqn.primitive.name not in _CASTS]


def _body(eqn: Any) -> jx.Flat:
    body = jx.flatten(scan_parts(eqn).body, remats=True)
    return dataclasses.replace(body, eqns=jx.live(body.eqns, body.outvars))


def _grows(one: Any, two: Any, rows: int) -> tuple[int, int] | None:
    """The dim that grows with the rows, and its size for one row; None where none does."""
    dims = [d for d, (n, m) in enumerate(zip(one.aval.shape, two.aval.shape, strict=True)) if n != m]
    return (dims[0], one.aval.shape[dims[0]] // rows) if len(dims) == 1 else None
