"""What an optimizer does with whole matrices, read from its program.

Muon, Shampoo, SOAP and GaLore multiply or factorise a leaf's own dims; AdamW takes elements one by one. As in
`elementwise.py`, which one it is cannot be seen by trying it, and not from its name: the update is traced, and the dims
of each leaf are followed through it (`program/dims.py`).

    rest                 owned                                               rest
    [L, m, n/N]  ----->  [L/N, m, n]   the equations between products  ----> [L, m, n/N]
             one all-to-all        of L/N whole matrices           one all-to-all

Left to the partitioner, every product of a matrix that is spread gathers it. Its owners hold whole ones: a dim of which
the program knows no two indices together (layers) is dealt out over the axes that spread the others, and matrices of
one shape with one program (layers of a Python loop) are put side by side into such a dim. What is at rest does not
change, and elementwise equations stay where their operands are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..model.paths import name_of
from ..program import dims as followed
from ..program import equal, primitives
from ..program import jaxpr as jx
from ..program.primitives import PRODUCTS
from .leaves import Staged
from .storage import Storage

# Primitives that multiply or factorise matrices; all others move, reduce, or take elements one by one.
_FACTORISE = ("cholesky", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product", "lu", "ormqr", "qr",
              "schur", "svd", "symmetric_product", "triangular_solve", "tridiagonal", "tridiagonal_solve")  # fmt: skip


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
    given = optimizer, tree, tuple(masters), tuple((leaf.path, leaf.shape) for leaf in tuned)
    try:
        hash(optimizer)
    except TypeError:  # an object of its own may have no hash
        traced = _update_program
    else:
        traced = _known_programs
    try:
        return traced(*given)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        return None  # it asks for what a step has not; the step says so where it is traced


def _update_program(optimizer: Any, tree: Any, masters: tuple[Any, ...], leaves: Sequence[Any]) -> UpdateProgram | None:
    params = jax.tree.unflatten(tree, masters)
    state = jax.eval_shape(optimizer.init, params)
    flat, out = jx.trace(
        lambda params, grads, state, value: optimizer.update(grads, state, params, value=value),
        params,
        params,
        state,
        jax.ShapeDtypeStruct((), jnp.float32),
    )
    if not jx.communicates(flat.eqns, (*PRODUCTS, *_FACTORISE)):
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


_known_programs = functools.lru_cache(maxsize=64)(_update_program)


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
            if name in _FACTORISE:
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


@dataclass(frozen=True)
class Owners:
    """How an update runs on whole matrices.

    Attributes:
      program: the update.
      groups: regions that run as one: of a stack alone, or of matrices that are put side by side.
      order: equations, and groups by their number, each after what it reads.
      values: what each variable of the program is.
      rest: the spec of each leaf as the layout keeps it, by number: axes of each dim.
      notes: by path of a leaf: how it is owned, or why it is not.
    """

    program: UpdateProgram
    groups: tuple[tuple[Region, ...], ...]
    order: tuple[Any, ...]
    values: dict[Any, followed.Followed] = field(repr=False)
    rest: tuple[tuple[tuple[str, ...], ...], ...]
    notes: dict[str, str]

    def owned(self, region: Region) -> tuple[tuple[str, ...], ...]:
        """The axes of each dim of a leaf with its owners; all of them () where it has no batch dim."""
        rest = self.rest[region.leaf]
        to = _dealt(region, rest, self.program)
        moved = _moved(region, rest)
        return tuple(() if d in region.mixed else axes + moved if d == to else axes for d, axes in enumerate(rest))

    def spec(self, var: Any, leaf: int, axes: Sequence[tuple[str, ...]]) -> PartitionSpec:
        """The spec of a value of a leaf, whose dims have these axes."""
        dims = dict(self.values[var].views)[leaf]
        first = [row[0] for row in dims]
        return PartitionSpec(*(axes[p.dim] or None if p.source == leaf else None for p in first))

    def __call__(self, put: Callable[[jax.Array, PartitionSpec], jax.Array], *args: Any) -> Any:
        """The update's results from its arguments; `put` constrains a value to a spec."""
        flat, env = self.program.flat, {}
        env.update(zip(flat.invars, jax.tree.leaves(args), strict=True))
        env.update(zip(flat.constvars, flat.consts, strict=True))
        read = lambda v: v.val if jx.is_literal(v) else env[v]
        for node in self.order:
            if not isinstance(node, int):
                env.update(zip(node.outvars, jx.bind(node, [read(v) for v in node.invars]), strict=True))
                continue
            group = self.groups[node]
            alone = _dealt(group[0], self.rest[group[0].leaf], self.program) is not None
            for region, outs in zip(
                group, (self._stack if alone else self._side_by_side)(group, env, put), strict=True
            ):
                env.update(zip(region.outs, outs, strict=True))
        return jax.tree.unflatten(jax.tree.structure(self.program.out), [read(v) for v in flat.outvars])

    def _is_of(self, var: Any, region: Region) -> bool:
        return region.leaf in dict(self.values.get(var, followed.NOTHING).views)

    def _is_whole(self, var: Any, region: Region) -> bool:
        """Whether a value has the very dims of the leaf."""
        views = dict(self.values.get(var, followed.NOTHING).views)
        return views.get(region.leaf) == dict(self.program.inputs[region.leaf].views)[region.leaf]

    def _stack(self, group: tuple[Region, ...], env: dict[Any, Any], put: Any) -> list[list[Any]]:
        """A region whose leaf has a batch dim."""
        (region,) = group
        at, owned, rest = region.leaf, self.owned(region), self.rest[region.leaf]

        def move(v: Any, x: jax.Array, *places: Any) -> jax.Array:
            # A factor of a matrix, which is no part of it, is at rest where the state is kept.
            places = places if self._is_whole(v, region) else (owned,)
            return functools.reduce(put, (self.spec(v, at, axes) for axes in places), x)

        ins = [move(v, env[v], rest, owned) if self._is_of(v, region) else env[v] for v in region.ins]
        outs = jx.run(region.eqns, region.ins, region.outs)(*ins)
        return [
            [move(v, x, owned, rest) if self._is_of(v, region) else x for v, x in zip(region.outs, outs, strict=True)]
        ]

    def _side_by_side(self, group: tuple[Region, ...], env: dict[Any, Any], put: Any) -> list[list[Any]]:
        """Matrices with one program: as many as there are, on a new first dim, which is dealt out."""
        first = group[0]
        rest, owners = self.rest[first.leaf], PartitionSpec(_moved(first, self.rest[first.leaf]))
        kept = lambda v: PartitionSpec(None, *self.spec(v, first.leaf, rest))
        ins, along = [], []
        for members in zip(*(region.ins for region in group), strict=True):
            shared = len(set(members)) == 1
            x = env[members[0]] if shared else jnp.stack([env[v] for v in members])
            if not shared and self._is_whole(members[0], first):
                x = put(put(x, kept(members[0])), owners)
            ins.append(x)
            along.append(None if shared else 0)
        outs = jax.vmap(jx.run(first.eqns, first.ins, first.outs), in_axes=along)(*ins)
        outs = [
            put(put(x, owners), kept(v) if self._is_whole(v, first) else PartitionSpec())
            for v, x in zip(first.outs, outs, strict=True)
        ]
        return [[x[k] for x in outs] for k in range(len(group))]


def owners(program: UpdateProgram, storage: Storage, sharded: bool) -> Owners:
    """How an update runs on whole matrices where leaves are spread; without groups where no matrix is, or may be moved.

    Args:
      program: of an optimizer that sees the model's own leaves.
      storage: the leaves, as a step keeps them and as the model has them.
      sharded: whether the optimizer's state carries the axes of ZeRO.
    """
    rest = _rest(storage, sharded)
    values, steps = _followed(program)
    notes: dict[int, str] = {}
    stacks: list[tuple[Region, ...]] = []
    singles: list[list[Region]] = []
    for leaf in sorted(program.products):
        region = _region(program, leaf, values, steps)
        if isinstance(region, str):
            notes[leaf] = region
        elif not _moved(region, rest[leaf]):
            continue
        elif _dealt(region, rest[leaf], program) is not None:
            stacks.append((region,))
            notes[leaf] = "whole matrices with their owners: one all-to-all there, one back"
        else:
            alike = next((g for g in singles if _alike(g[0], region) and rest[g[0].leaf] == rest[leaf]), None)
            singles.append([region]) if alike is None else alike.append(region)
    groups = stacks + [tuple(g) for g in singles if len(g) > 1]
    for g in singles:
        how = f"beside {len(g) - 1} of its shape, each whole with its owner" if len(g) > 1 else "alone of its shape"
        notes.update((region.leaf, how) for region in g)
    order = _order(program, groups)
    if order is None:
        notes = dict.fromkeys(notes, "as the layout keeps it: matrices need one another's updates")
        groups, order = [], program.flat.eqns
    tuned = [leaf.path for leaf in storage.models if leaf.trainable]
    return Owners(program, tuple(groups), order, values, rest, {tuned[i]: why for i, why in notes.items()})


def _rest(storage: Storage, sharded: bool) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """The axes of each dim of the model's own trainable leaves, as the layout keeps them."""
    found: dict[int, tuple[tuple[str, ...], ...]] = {}
    for leaf, at in zip(storage.leaves, storage.origin, strict=True):
        spec = [() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in leaf.spec(sharded)]
        axes = spec + [()] * (len(leaf.shape) - len(spec))
        if isinstance(leaf.form, Staged):
            axes = axes[leaf.stage :]
            if leaf.form.dim:
                axes.insert(leaf.form.dim, axes.pop(0))
        found.update(dict.fromkeys(at, tuple(axes[1:] if leaf.rolled else axes)))
    return tuple(found[i] for i, leaf in enumerate(storage.models) if leaf.trainable)


def _moved(region: Region, rest: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The axes over which a matrix itself is spread."""
    return tuple(axis for d in sorted(region.mixed) for axis in rest[d])


def _dealt(region: Region, rest: Sequence[tuple[str, ...]], program: UpdateProgram) -> int | None:
    """The dim of a leaf that its owners deal out: the first batch dim; None where all dims are of one matrix."""
    shape = program.flat.invars[region.leaf].aval.shape
    return next((d for d in range(len(rest)) if d not in region.mixed and shape[d] > 1), None)


_Step = tuple[frozenset[int], followed.Mixed]


def _followed(program: UpdateProgram) -> tuple[dict[Any, followed.Followed], list[_Step]]:
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


def _region(
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


def _alike(a: Region, b: Region) -> bool:
    """Whether two regions are one program."""
    return equal.same_program(*(jx.build(r.eqns, r.ins, r.outs) for r in (a, b)))


def _order(program: UpdateProgram, groups: Sequence[tuple[Region, ...]]) -> tuple[Any, ...] | None:
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
