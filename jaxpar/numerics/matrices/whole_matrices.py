"""What an optimizer does with whole matrices, read from its program.

Muon, Shampoo, SOAP and GaLore multiply or factorise a leaf's own dims; AdamW takes elements one by one. As in
`elementwise.py`, which one it is cannot be seen by trying it, and not from its name: the update is traced, and the dims
of each leaf are followed through it (`program/dims.py`). What stands between the products of one leaf is its region:

    gradients, state --> elementwise --> [ region: products, norms, ... of one leaf ] --> elementwise --> changes, state

Of a stack, a dim of which the program knows no two indices together (layers) is a batch dim, and the program of one
matrix is the region on a part of one index: `parallel/tensor` rewrites it as for as many ranks as there are layers.
Who runs it on which matrix is dealt out in `numerics/matrices/owners.py`.
"""

from __future__ import annotations

import functools
import graphlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from ...layout.leaves import Staged
from ...layout.storage import Storage
from ...model.paths import name_of
from ...parallel.tensor import RULES
from ...parallel.tensor.edges import EDGES
from ...parallel.tensor.localiser import Localiser, LocalValue
from ...program import dims as followed
from ...program import equal, primitives
from ...program import jaxpr as jx
from ...program.primitives import PRODUCTS
from ...program.walk import visit
from .elementwise import remembered, traced_update

LeafDims = Mapping[int, frozenset[int]]  # dims of leaves, by the number of the leaf


@dataclass(frozen=True)
class UpdateProgram:
    """An optimizer's update, traced on the leaves that it sees; or a branch of one, that works on several leaves.

    Attributes:
      flat: the program; of an update of (params, gradients, state, value), whose results are the changes and the next
        state.
      values: what each variable is; of a leaf's own part of the state too. Sources are the leaves, by number.
      state: of variables that are the optimizer's arrays, old or new, their numbers.
      products: of each equation, along which dims it multiplies or factorises leaves.
      branches: by the number of a `cond` that works on several leaves, its branches.
      tree: of the results of an update.
    """

    flat: jx.Flat
    values: Mapping[Any, followed.Followed]
    state: Mapping[Any, int]
    products: tuple[LeafDims, ...]
    branches: Mapping[int, tuple[UpdateProgram, ...]]
    tree: Any = None

    @staticmethod
    def of(
        flat: jx.Flat, inputs: Sequence[followed.Followed], state: Mapping[Any, int], tree: Any = None
    ) -> UpdateProgram:
        """From what the inputs are."""
        flat = replace(flat, eqns=jx.live(flat.eqns, flat.outvars))  # what nobody reads is not to be sent
        met: dict[int, frozenset[int]] = {}
        products: list[LeafDims] = []

        def note(eqn: Any, ins: Sequence[followed.Followed]) -> frozenset[int]:
            for i, dims in multiplied(eqn, ins):
                met[i] = met.get(i, frozenset()) | dims
            return frozenset()

        follower, values = followed.Follower(note), dict(zip(flat.invars, inputs, strict=True))
        branches: dict[int, tuple[UpdateProgram, ...]] = {}
        for k, eqn in enumerate(flat.eqns):
            met.clear()
            follower.follow([eqn], values)
            products.append(dict(met))
            at = [values.get(v, followed.NOTHING) for v in (*eqn.invars[1:], *eqn.outvars) if not jx.is_literal(v)]
            if met and eqn.primitive.name == "cond" and len({i for x in at for i, _ in x.views}) > 1:
                branches[k] = tuple(_branch(jx.flatten(one), eqn, values, state) for one in eqn.params["branches"])
        return UpdateProgram(flat, values, state, tuple(products), branches, tree)

    @property
    def leaves(self) -> dict[int, frozenset[int]]:
        """The leaves that are multiplied or factorised, and along which dims."""
        return {i: frozenset().union(*(at.get(i, ()) for at in self.products)) for dims in self.products for i in dims}

    @property
    def factors(self) -> bool:
        """Whether the optimizer keeps arrays for a leaf that have not its shape."""
        return any(v.aval.shape != self.flat.invars[i].aval.shape for v in self.state for i in self.views(v))

    @functools.cached_property
    def users(self) -> dict[Any, set[int]]:
        """The equations that read a variable, by number; -1 for the program's caller."""
        found: dict[Any, set[int]] = {}
        for k, vs in [*enumerate(eqn.invars for eqn in self.flat.eqns), (-1, self.flat.outvars)]:
            for v in vs:
                if not jx.is_literal(v):
                    found.setdefault(v, set()).add(k)
        return found

    def views(self, v: Any) -> dict[int, followed.Dims]:
        """The leaves whose dims a value has, and which they are."""
        return {} if jx.is_literal(v) else dict(self.values.get(v, followed.NOTHING).views)


def _branch(
    flat: jx.Flat, eqn: Any, values: Mapping[Any, followed.Followed], state: Mapping[Any, int]
) -> UpdateProgram:
    """A branch of a `cond`, whose inputs are the operands and whose outputs are the results."""
    outer = [None if jx.is_literal(v) else v for v in (*eqn.invars[1:], *eqn.outvars)]
    inputs = [values.get(v, followed.NOTHING) for v in outer[: len(flat.invars)]]
    pairs = zip((*flat.invars, *flat.outvars), outer, strict=True)
    return UpdateProgram.of(flat, inputs, {v: state[w] for v, w in pairs if not jx.is_literal(v) and w in state})


@remembered
def update_program(optimizer: Any, tree: Any, masters: tuple[Any, ...]) -> UpdateProgram | None:
    """The update of an optimizer that multiplies or factorises leaves, in a tree of abstract masters; None for any
    other, AdamW among them.
    """
    params = jax.tree.unflatten(tree, masters)
    try:
        state, flat, out = traced_update(optimizer, params)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        return None  # it asks for what a step has not; the step says so where it is traced
    if not _multiply(flat.eqns):
        return None
    at = {name_of(path): i for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params))}
    own = [followed.source(i, leaf.shape) for i, leaf in enumerate(masters)]
    held = [_held(name_of(path), x, at, masters) for path, x in jax.tree_util.tree_leaves_with_path(state)]
    old, new = flat.invars[2 * len(own) : -1], flat.outvars[len(flat.outvars) - len(held) :]
    numbers = {v: i for side in (old, new) for i, v in enumerate(side) if not jx.is_literal(v)}
    program = UpdateProgram.of(flat, (*own, *own, *held, followed.NOTHING), numbers, jax.tree.structure(out))
    return program if program.leaves else None


def _held(name: str, x: Any, at: dict[str, int], leaves: Sequence[Any]) -> followed.Followed:
    """An array of the state, by its path the leaf's whose dims it has, as far as they agree; not in its last two dims
    if it is one of several arrays of the leaf, as the factors `GG/kernel/0` and `GG/kernel/1`.
    """
    parts = name.split("/")
    spans = ((n, m) for m in range(len(parts), 0, -1) for n in range(m))
    number, end = next(((at[path], m) for n, m in spans if (path := "/".join(parts[n:m])) in at), (None, 0))
    if number is None or not x.shape:
        return followed.NOTHING
    same, shape = 0, leaves[number].shape
    while same < min(len(shape), x.ndim if end == len(parts) else x.ndim - 2) and shape[same] == x.shape[same]:
        same += 1
    dims = followed.source(number, shape).views[0][1][:same]
    rest = tuple((followed.DimPart(-1, 0, n),) for n in x.shape[same:])
    return followed.Followed(((number, (*dims, *rest)),), frozenset({number}))


def _multiply(eqns: Iterable[Any]) -> bool:
    """Whether there is a product or a factorisation among some equations, or inside one, as of `linalg.solve`."""
    return any(eqn.primitive.name in PRODUCTS or primitives.of(eqn).factorises for eqn, _ in visit(eqns))


def multiplied(eqn: Any, ins: Sequence[followed.Followed]) -> list[tuple[int, frozenset[int]]]:
    """The leaves that an equation multiplies or factorises, or factors of theirs, and along which of their own dims; a
    sum of squares is neither.
    """
    name = eqn.primitive.name
    found: list[tuple[int, frozenset[int]]] = []
    for side, x in enumerate(ins):
        for i, dims in x.views:
            at: Sequence[int] = ()
            if primitives.of(eqn).factorises:
                at = range(max(len(dims) - 2, 0), len(dims))
            elif name == "dot_general":
                contracted, batch = eqn.params["dimension_numbers"]
                free = eqn.outvars[0].aval.ndim > len(batch[0])
                at = [d for d in range(len(dims)) if free and contracted[0] and d not in batch[side]]
            elif _multiply([eqn]):
                at = range(len(dims))
            if parts := [p for d in at for p in dims[d] if p.size > 1]:
                found.append((i, frozenset(p.dim for p in parts if p.source == i)))
    return found


@dataclass(frozen=True)
class Region:
    """Equations that work on one leaf as whole matrices, from values of its dims to others.

    Attributes:
      leaf: its number among those that the optimizer sees.
      shape: its shape.
      eqns: in order.
      ins: what they read of others: values of the leaf, scalars and constants.
      outs: what others read of theirs.
      dims: of each of these that is a value of the leaf, its dims; what is made and not known is like the leaf, or new.
      mixed: the dims of the leaf whose indices the equations bring together.
      state: of variables that are the optimizer's arrays, their numbers.
    """

    leaf: int
    shape: tuple[int, ...]
    eqns: tuple[Any, ...]
    ins: tuple[Any, ...]
    outs: tuple[Any, ...]
    dims: Mapping[Any, followed.Dims] = field(repr=False)
    mixed: frozenset[int]
    state: Mapping[Any, int] = field(repr=False)

    @property
    def batch(self) -> list[int]:
        """The dims of the leaf along which the program does the same for each index, of all values."""
        alone = lambda d: d not in self.mixed and all(self.place(v, d) is not None for v in self.dims)
        return [d for d, n in enumerate(self.shape) if n > 1 and alone(d)]

    def as_leaf(self, var: Any) -> bool:
        """Whether a value has the very dims of the leaf."""
        return self.dims[var] == dict(followed.source(self.leaf, self.shape).views)[self.leaf]

    def place(self, var: Any, dim: int) -> int | None:
        """On which dim of a value a dim of the leaf is, whole and alone; None where it is not."""
        rows = enumerate(self.dims.get(var, ()))
        return next((d for d, row in rows if len(row) == 1 and row[0][:2] == (self.leaf, dim)), None)

    def alike(self, other: Region) -> bool:
        """Whether two regions are one program."""
        return equal.same_program(*(jx.build(r.eqns, r.ins, r.outs) for r in (self, other)))


def region_of(program: UpdateProgram, leaf: int, shape: tuple[int, ...]) -> Region | str:
    """The equations of a leaf between its products, those before that make what they read of fewer elements, and those
    after that move it and take elements; or why there is none.
    """
    eqns, users, views = program.flat.eqns, program.users, program.views
    others = lambda *vs: any(views(v).keys() - {leaf} for v in vs)
    multiplying = [k for k, dims in enumerate(program.products) if leaf in dims and k not in program.branches]
    products = [v for k in multiplying for v in eqns[k].outvars]
    needed, after = {id(eqn) for eqn in jx.needed(eqns, products)}, jx.depends(eqns, products)
    chosen = {k for k, eqn in enumerate(eqns) if id(eqn) in needed and not after.isdisjoint(eqn.outvars)}
    if any(others(*eqns[k].invars, *eqns[k].outvars) for k in chosen):
        return "as the layout keeps it: one equation of the optimizer multiplies several leaves"
    read = lambda inside: jx.free(eqns[k] for k in sorted(inside))
    elements = lambda inside: sum(math.prod(v.aval.shape) for v in read(inside) if views(v))
    grown = set(chosen)
    for k in range(max(chosen), -1, -1):
        used = [users[v] for v in eqns[k].outvars if v in users]
        if k not in grown and used and all(of <= grown for of in used) and not others(*eqns[k].invars):
            grown.add(k)
            chosen = set(grown) if elements(grown) <= elements(chosen) else chosen
    made = {v for k in chosen for v in eqns[k].outvars}
    for k in range(min(chosen), len(eqns)):
        known, ours = primitives.of(eqns[k]), [v for v in eqns[k].invars if views(v)]
        alone = ours and all(v in made and users[v] <= chosen | {k} for v in ours)
        if k not in chosen and alone and (known.moves or known.elementwise):
            chosen.add(k)
            made.update(eqns[k].outvars)
    within, follower = [eqns[k] for k in sorted(chosen)], followed.Follower()
    ins, outs = read(chosen), [v for eqn in within for v in eqn.outvars if users.get(v, set()) - chosen]
    own = dict(followed.source(leaf, shape).views)[leaf]
    unknown = lambda v: own if v.aval.shape == shape else tuple((followed.DimPart(-1, 0, n),) for n in v.aval.shape)
    dims = {v: unknown(v) for v in outs} | {v: views(v)[leaf] for v in (*ins, *outs) if leaf in views(v)}
    follower.follow(within, dict(program.values))
    mixed = frozenset(dim for i, dim in follower.mixed if i == leaf)
    return Region(leaf, shape, tuple(within), tuple(ins), tuple(outs), dims, mixed, program.state)


_CUBES = 9  # n^3 FLOPs of a factorisation: of values and vectors of a symmetric matrix (Golub & Van Loan, section 8.3)


def flops_of(eqns: Iterable[Any]) -> int:
    """FLOPs of products, and of factorisations as if they were of symmetric matrices with vectors."""
    eqns = list(eqns)
    shapes = [(eqn.invars[0].aval.shape, runs) for eqn, runs in visit(eqns) if primitives.of(eqn).factorises]
    cubes = sum(runs * _CUBES * math.prod(shape) * min(shape[-2:]) for shape, runs in shapes)
    return cubes + 2 * sum(count for count, _ in jx.matmuls(eqns).values())


def one_matrix(region: Region) -> jx.Flat | None:
    """A region's program on one matrix: values of the leaf have 1 in the place of each batch dim. None where it cannot
    be cut along one.
    """
    flat: jx.Flat | None = jx.Flat((), (), region.ins, region.outs, region.eqns)
    for d in region.batch:
        at = [region.place(v, d) for v in (*region.ins, *region.outs)]
        flat = None if flat is None else _cut(flat, at, region.shape[d])
    return flat


def _cut(flat: jx.Flat, at: Sequence[int | None], parts: int) -> jx.Flat | None:
    """A program on one of the parts of its inputs and outputs along dims of theirs, None of those that are whole."""
    work, made, n = Localiser(parts, False, RULES), list[Any](), len(flat.invars)

    def part(*xs: Any) -> list[Any]:
        outs = work.run(flat, [LocalValue(x, i, v.aval.shape) for v, x, i in zip(flat.invars, xs, at[:n], strict=True)])
        made[:] = [x.dim for x in outs]
        return [x.value for x in outs]

    shapes = [
        tuple(1 if d == i else n for d, n in enumerate(v.aval.shape)) for v, i in zip(flat.invars, at[:n], strict=True)
    ]
    new = jx.trace(part, *(jax.ShapeDtypeStruct(s, v.aval.dtype) for s, v in zip(shapes, flat.invars, strict=True)))[0]
    return None if work.gathered or made != at[n:] or jx.communicates(new.eqns, EDGES) else new


def axes_at_rest(storage: Storage, sharded: bool, sizes: Mapping[str, int]) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """The axes of several devices of each dim of the model's own trainable leaves, as the layout keeps them."""
    found: dict[int, tuple[tuple[str, ...], ...]] = {}
    for leaf, at in zip(storage.leaves, storage.origin, strict=True):
        named = [() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in leaf.spec(sharded)]
        spec = [tuple(axis for axis in axes if sizes[axis] > 1) for axes in named]
        axes = spec + [()] * (len(leaf.shape) - len(spec))
        if isinstance(leaf.form, Staged):
            axes = axes[leaf.stage :]
            if leaf.form.dim:
                axes.insert(leaf.form.dim, axes.pop(0))
        found.update(dict.fromkeys(at, tuple(axes[1:] if leaf.rolled else axes)))
    return tuple(found[i] for i, leaf in enumerate(storage.models) if leaf.trainable)


def in_order(eqns: Sequence[Any], within: Mapping[int, Any]) -> tuple[Any, ...] | None:
    """Equations, each after what it reads, and in the place of those that are `within` something, by their id, that one
    thing; None where two things need one another.
    """
    nodes = [within.get(id(eqn), eqn) for eqn in eqns]
    made = {v: id(node) for node, eqn in zip(nodes, eqns, strict=True) for v in eqn.outvars}
    graph = graphlib.TopologicalSorter[int]()
    for node, eqn in zip(nodes, eqns, strict=True):
        needs = [made[v] for v in eqn.invars if not jx.is_literal(v) and v in made]
        graph.add(id(node), *(one for one in dict.fromkeys(needs) if one != id(node)))
    try:
        return tuple({id(node): node for node in nodes}[one] for one in graph.static_order())
    except graphlib.CycleError:
        return None
