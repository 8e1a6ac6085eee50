"""What an optimizer does with whole matrices, read from its program.

Muon, Shampoo, SOAP and GaLore multiply or factorise a leaf's own dims; AdamW takes elements one by one. As in
`elementwise.py`, which one it is cannot be seen by trying it, and not from its name: the update is traced, and the dims
of each leaf are followed through it (`program/dims.py`). What stands between the products of one leaf is its region:

    gradients, state --> elementwise --> [ region: products, norms, ... of one leaf ] --> elementwise --> changes, state

Of a stack, a dim of which the program knows no two indices together (layers) is a batch dim, and the program of one
matrix is the region on a part of one index: `localise/tensor` rewrites it as for as many ranks as there are layers.
Who runs it on which matrix is dealt out in `parallel/owners.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..collectives.edges import EDGES
from ..localise.tensor import RULES
from ..localise.tensor.localiser import Localiser, LocalValue
from ..model.paths import name_of
from ..program import dims as followed
from ..program import equal, primitives
from ..program import jaxpr as jx
from ..program.primitives import PRODUCTS
from ..program.walk import visit
from .elementwise import remembered, traced_update
from .leaves import Staged
from .storage import Storage


@dataclass(frozen=True)
class UpdateProgram:
    """An optimizer's update, traced on the leaves that it sees.

    Attributes:
      flat: the program of (params, gradients, state, value), whose results are the changes and the next state.
      out: the tree of its results, abstract.
      inputs: what each of its inputs is; of a leaf's own part of the state too. Sources are the leaves, by number.
      products: for each leaf that is multiplied or factorised, by number, the dims along which.
    """

    flat: jx.Flat
    out: Any
    inputs: tuple[followed.Followed, ...]
    products: dict[int, frozenset[int]]


def update_program(optimizer: Any, storage: Storage, as_stacked: bool) -> UpdateProgram | None:
    """The update of an optimizer that multiplies or factorises leaves; None for any other, AdamW among them."""
    tuned, params = storage.seen(as_stacked)
    masters, tree = jax.tree.flatten(params)
    try:
        return _update_program(optimizer, tree, tuple(masters), tuple((leaf.path, leaf.shape) for leaf in tuned))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        return None  # it asks for what a step has not; the step says so where it is traced


@remembered
def _update_program(optimizer: Any, tree: Any, masters: tuple[Any, ...], leaves: Sequence[Any]) -> UpdateProgram | None:
    params = jax.tree.unflatten(tree, masters)
    state, flat, out = traced_update(optimizer, params)
    if not any(eqn.primitive.name in PRODUCTS or primitives.of(eqn).factorises for eqn, _ in visit(flat.eqns)):
        return None
    at = {name_of(path): i for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params))}
    own = [followed.source(i, leaf.shape) for i, leaf in enumerate(masters)]
    held = [_held(name_of(path), x, at, masters) for path, x in jax.tree_util.tree_leaves_with_path(state)]
    inputs = (*own, *own, *held, followed.NOTHING)
    products: dict[int, frozenset[int]] = {}

    def note(eqn: Any, ins: Sequence[followed.Followed]) -> frozenset[int]:
        for i, dims in multiplied(eqn, ins):
            products[i] = products.get(i, frozenset()) | dims
        return frozenset()

    follower = followed.Follower(note)
    follower.follow(flat.eqns, dict(zip(flat.invars, inputs, strict=True)))
    return UpdateProgram(flat, out, inputs, products) if products else None


def _held(name: str, x: Any, at: dict[str, int], leaves: Sequence[Any]) -> followed.Followed:
    """An array of the state, by the end of its path the leaf's whose dims it has, as far as they agree."""
    parts = name.split("/")
    number = next((at[end] for n in range(len(parts)) if (end := "/".join(parts[n:])) in at), None)
    if number is None or not x.shape:
        return followed.NOTHING
    same, shape = 0, leaves[number].shape
    while same < min(len(shape), x.ndim) and shape[same] == x.shape[same]:
        same += 1
    dims = followed.source(number, shape).views[0][1][:same]
    rest = tuple((followed.DimPart(-1, 0, n),) for n in x.shape[same:])
    return followed.Followed(((number, (*dims, *rest)),), frozenset({number}))


def multiplied(eqn: Any, ins: Sequence[followed.Followed]) -> list[tuple[int, frozenset[int]]]:
    """The leaves whose own dims an equation multiplies or factorises, and along which; a sum of squares is neither."""
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
            elif name in PRODUCTS:
                at = range(len(dims))
            sources = frozenset(p.dim for d in at for p in dims[d] if p.source == i and p.size > 1)
            if sources:
                found.append((i, sources))
    return found


@dataclass(frozen=True)
class Region:
    """Equations that work on one leaf as whole matrices, from values of its dims to others.

    Attributes:
      leaf: its number among those that the optimizer sees.
      eqns: in order.
      ins: what they read of others: values of the leaf, scalars and constants.
      outs: what others read of theirs.
      mixed: the dims of the leaf that have to be whole.
    """

    leaf: int
    eqns: tuple[Any, ...]
    ins: tuple[Any, ...]
    outs: tuple[Any, ...]
    mixed: frozenset[int]

    def batch(self, shape: Sequence[int]) -> list[int]:
        """The dims of the leaf along which the program does the same for each index."""
        return [d for d, n in enumerate(shape) if d not in self.mixed and n > 1]


_Step = tuple[frozenset[int], followed.Mixed]


def follow(program: UpdateProgram) -> tuple[dict[Any, followed.Followed], list[_Step]]:
    """What every variable is; and of every equation the leaves that it multiplies, and the dims that it mixes."""
    strong: set[int] = set()

    def note(eqn: Any, ins: Sequence[followed.Followed]) -> frozenset[int]:
        strong.update(i for i, _ in multiplied(eqn, ins))
        return frozenset()

    follower, values = followed.Follower(note), dict(zip(program.flat.invars, program.inputs, strict=True))
    steps: list[_Step] = []
    for eqn in program.flat.eqns:
        strong.clear()
        follower.mixed = set()
        follower.follow([eqn], values)
        steps.append((frozenset(strong), follower.mixed))
    return values, steps


def region_of(
    program: UpdateProgram, leaf: int, values: dict[Any, followed.Followed], steps: Sequence[_Step]
) -> Region | str:
    """The equations of a leaf between its products, those before that make what they read of fewer elements, and those
    after that move it and take elements; or why there is none.
    """
    eqns, ends = program.flat.eqns, {v for v in program.flat.outvars if not jx.is_literal(v)}
    views = lambda v: () if jx.is_literal(v) else tuple(i for i, _ in values.get(v, followed.NOTHING).views)
    users: dict[Any, set[int]] = {}
    for k, eqn in enumerate(eqns):
        for v in eqn.invars:
            if not jx.is_literal(v):
                users.setdefault(v, set()).add(k)
    strong = [k for k, (leaves, _) in enumerate(steps) if leaf in leaves]
    below, above = set(strong), set(strong)
    for k in range(strong[0], strong[-1] + 1):
        below |= {u for v in eqns[k].outvars for u in users.get(v, ())} if k in below else set()
    made = {v: k for k, eqn in enumerate(eqns) for v in eqn.outvars}
    for k in range(strong[-1], strong[0] - 1, -1):
        above |= {made[v] for v in eqns[k].invars if not jx.is_literal(v) and v in made} if k in above else set()
    inner = below & above | set(strong)
    if any({i for v in (*eqns[k].invars, *eqns[k].outvars) for i in views(v)} - {leaf} for k in inner):
        return "as the layout keeps it: one equation of the optimizer multiplies several leaves"

    def read(inside: Collection[int]) -> list[Any]:
        return jx.free([eqns[k] for k in sorted(inside)])

    cost = lambda inside: sum(math.prod(v.aval.shape) for v in read(inside) if views(v))
    closed = set(inner)
    best = set(inner)
    for k in range(max(inner), -1, -1):
        outs = [v for v in eqns[k].outvars if v in users]
        own = all(users[v] <= closed and v not in ends for v in outs) and outs
        if k not in closed and own and not {i for v in eqns[k].invars for i in views(v)} - {leaf}:
            closed.add(k)
            best = set(closed) if cost(closed) <= cost(best) else best
    for k in range(min(best), len(eqns)):
        known = primitives.of(eqns[k])
        of_leaf = [v for v in eqns[k].invars if views(v)]
        ours = of_leaf and all(made.get(v) in best and users[v] <= best | {k} and v not in ends for v in of_leaf)
        if k not in best and ours and (known.moves or known.elementwise):
            best.add(k)
    chosen = sorted(best)
    outs = [v for k in chosen for v in eqns[k].outvars if v in ends or users.get(v, set()) - best]
    mixed = {dim for k in chosen for i, dim in steps[k][1] if i == leaf}
    return Region(leaf, tuple(eqns[k] for k in chosen), tuple(read(best)), tuple(outs), frozenset(mixed))


def alike(a: Region, b: Region) -> bool:
    """Whether two regions are one program."""
    return equal.same_program(*(jx.build(r.eqns, r.ins, r.outs) for r in (a, b)))


_CUBES = 9  # n^3 FLOPs of a factorisation: of values and vectors of a symmetric matrix (Golub & Van Loan, section 8.3)


def flops_of(eqns: Iterable[Any]) -> int:
    """FLOPs of products, and of factorisations as if they were of symmetric matrices with vectors."""
    eqns = list(eqns)
    shapes = [(eqn.invars[0].aval.shape, runs) for eqn, runs in visit(eqns) if primitives.of(eqn).factorises]
    cubes = sum(runs * _CUBES * math.prod(shape) * min(shape[-2:]) for shape, runs in shapes)
    return cubes + 2 * sum(count for count, _ in jx.matmuls(eqns).values())


def place_of(value: followed.Followed, leaf: int, dim: int) -> int | None:
    """On which dim of a value a dim of its leaf is, whole and alone; None where it is not."""
    rows = dict(value.views).get(leaf, ())
    return next((d for d, row in enumerate(rows) if len(row) == 1 and row[0][:2] == (leaf, dim)), None)


def one_matrix(region: Region, shape: Sequence[int], values: Mapping[Any, followed.Followed]) -> jx.Flat | None:
    """A region's program on one matrix: values of the leaf have 1 in the place of each batch dim. None where a batch
    dim is merged with others, or the program cannot be cut along it.
    """
    flat = jx.Flat((), (), region.ins, region.outs, region.eqns)
    for d in region.batch(shape):
        ours = [region.leaf in dict(values.get(v, followed.NOTHING).views) for v in (*region.ins, *region.outs)]
        at = [
            place_of(values.get(v, followed.NOTHING), region.leaf, d) if yes else None
            for v, yes in zip((*region.ins, *region.outs), ours, strict=True)
        ]
        if any(yes and place is None for yes, place in zip(ours, at, strict=True)):
            return None
        work, found = Localiser(shape[d], False, RULES), list[Any]()
        avals = [v.aval for v in flat.invars]

        def part(*xs: Any, flat: jx.Flat = flat, at: Any = at, work: Any = work, found: Any = found) -> list[Any]:
            whole = zip(flat.invars, xs, at, strict=False)
            outs = work.run(flat, [LocalValue(x, i, v.aval.shape) for v, x, i in whole])
            found[:] = [x.dim for x in outs]
            return [x.value for x in outs]

        cut = lambda x, i: tuple(1 if e == i else n for e, n in enumerate(x.shape))
        given = [jax.ShapeDtypeStruct(cut(x, i), x.dtype) for x, i in zip(avals, at, strict=False)]
        new = jx.trace(part, *given)[0]
        if work.gathered or found != at[len(avals) :] or jx.communicates(new.eqns, EDGES):
            return None
        flat = new
    return flat


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


def in_order(program: UpdateProgram, groups: Sequence[tuple[Region, ...]]) -> tuple[Any, ...] | None:
    """Equations and groups, each after what it reads; None where two groups need one another's results."""
    inside = {id(eqn): g for g, group in enumerate(groups) for region in group for eqn in region.eqns}
    nodes = [inside.get(id(eqn), ("equation", k)) for k, eqn in enumerate(program.flat.eqns)]
    waiting: list[Any] = list(dict.fromkeys(nodes))
    ready = {*program.flat.invars, *program.flat.constvars}
    order: list[Any] = []
    while waiting:
        left = []
        for node in waiting:
            eqn = None if isinstance(node, int) else program.flat.eqns[node[1]]
            ins: Iterable[Any] = eqn.invars if eqn is not None else [v for r in groups[node] for v in r.ins]
            if all(jx.is_literal(v) or v in ready for v in ins):
                ready.update(eqn.outvars if eqn is not None else [v for r in groups[node] for v in r.outs])
                order.append(node if eqn is None else eqn)
            else:
                left.append(node)
        if len(left) == len(waiting):
            return None
        waiting = left
    return tuple(order)
