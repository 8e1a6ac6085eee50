"""Owners of whole matrices: who runs an optimizer's program on which matrix, and what is sent for that.

A matrix that is spread over devices cannot be multiplied where it lies: left to the partitioner, every product of Muon,
Shampoo or SOAP gathers it. So each matrix has an owner among the R ranks that spread it:

    at rest                    owner                              at rest
    [L, m, n/R]  ------->  [m, n], one after another  ------->  [L, m, n/R]
            one all-to-all                        one all-to-all

    sent by a device, K matrices of S bytes
    R divides K         2 (R-1)/R K S/R
    dealt out           2 (R-1)/R W, with W the bytes of the owner that has most
    one matrix alone    (R-1)/R S: an all-gather; all ranks repeat its FLOPs, which its owner would have too

Stacks, and matrices of one shape and program, whose number R divides are dealt out evenly, each in an exchange of its
own. All others that the same axes spread are dealt out together, those of most FLOPs first, each to the rank that has
least (Graham 1969; so does Shi et al. 2023, arXiv:2309.06497, with the blocks of Shampoo). What is at rest does not
change, but for arrays of the optimizer that these programs alone read: those of a stack that is dealt out evenly lie
with its owners, others are spread like the rest of the state and go there and back.

A `cond` that works on several leaves has owners within its branches: nothing is sent for a branch that is not taken.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from ..collectives.order import Token
from ..layout.layout import Stored, is_stored
from ..layout.leaves import Leaf
from ..layout.storage import Storage
from ..layout.whole_matrices import Region, UpdateProgram, axes_at_rest, flops_of, in_order, one_matrix, region_of
from ..program import jaxpr as jx
from ..text import number
from .contract import Sent
from .matrices import Bundle, Kind, MatrixValue


@dataclass(frozen=True)
class Owners:
    """How an update, or a branch of one, runs on whole matrices.

    Attributes:
      program: its program.
      order: equations, matrices that are exchanged at once, and conditionals with owners in their branches, each after
        what it reads.
      notes: by path of a leaf: how it is owned, or why it is not.
      states: of the optimizer's arrays, by number, those that are kept for these programs alone.
      repeated: FLOPs on each device of matrices that have no owner.
    """

    program: UpdateProgram
    order: tuple[Any, ...]
    notes: dict[str, str]
    states: dict[int, MatrixValue]
    repeated: int

    @property
    def _branches(self) -> list[tuple["Owners", ...]]:
        return [node.owners for node in self.order if isinstance(node, _Conditional)]

    @property
    def _own(self) -> list[Bundle]:
        return [node for node in self.order if isinstance(node, Bundle)]

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """All that is exchanged, in branches too."""
        return (*self._own, *(bundle for branches in self._branches for one in branches for bundle in one.bundles))

    @property
    def flops(self) -> int:
        """Of whole matrices, on the busiest device; of branches the one that has most."""
        here = self.repeated + sum(max(bundle.flops) for bundle in self._own)
        return here + sum(max(one.flops for one in branches) for branches in self._branches)

    @property
    def sends(self) -> list[Sent]:
        """What is sent there and back in a step; of branches by the one that sends most."""
        most = [
            max((one.sends for one in branches), key=lambda s: sum(x.bytes for x in s)) for branches in self._branches
        ]
        return [sent for sends in (*(bundle.sends() for bundle in self._own), *most) for sent in sends]

    @property
    def all_flops(self) -> int:
        """Of whole matrices, on all devices that deal them out."""
        kinds = [kind for bundle in self._own for kind in bundle.kinds]
        here = self.repeated + sum(kind.flops * kind.count for kind in kinds)
        return here + sum(max(one.all_flops for one in branches) for branches in self._branches)

    def __str__(self) -> str:
        share = self.flops / max(1, self.all_flops)
        return f"{number(self.flops)}FLOP on the busiest device, {share:.3f} of all matrices'"

    def stored(self, places: Any) -> Any:
        """The places of the optimizer's arrays, with those that are kept for owners."""
        flat, tree = jax.tree.flatten(places, is_leaf=is_stored)
        for i, v in self.states.items():
            dim = next((d for d, n in enumerate(v.shape) if v.padded[d] != n), None)
            leaf = None if dim is None else Leaf("", v.shape, flat[i].dtype, dim, v.padded[dim])
            flat[i] = Stored(v.padded, flat[i].dtype, v.spec, leaf)
        return jax.tree.unflatten(tree, flat)

    def __call__(self, mesh: Mesh, token: Token | None, *args: Any) -> tuple[Any, Token | None]:
        """The update's results from its arguments, and the token after its exchanges."""
        outs, token = self.run(mesh, token, *jax.tree.leaves(args))
        return jax.tree.unflatten(self.program.tree, outs), token

    def run(self, mesh: Mesh, token: Token | None, *args: Any) -> tuple[list[Any], Token | None]:
        """The results of the program, and the token after its exchanges."""
        flat = self.program.flat
        env = dict(zip((*flat.invars, *flat.constvars), (*args, *flat.consts), strict=True))
        read = lambda v: jnp.asarray(v.val, v.aval.dtype) if jx.is_literal(v) else env[v]
        last = jnp.zeros(())
        for node in self.order:
            if isinstance(node, Bundle):
                values = [kind.read(env) for kind in node.kinds]
                if token is None:  # one after the other, as each needs memory; on CPU the token sees to that
                    values, last = lax.optimization_barrier((values, last))
                made, token = node(values, mesh, token)
                env.update(made)
                last = next(iter(made.values())).ravel()[0]
            elif isinstance(node, _Conditional):
                runs = [lambda token, *xs, one=one: one.run(mesh, token, *xs) for one in node.owners]
                outs, token = lax.switch(read(node.eqn.invars[0]), runs, token, *map(read, node.eqn.invars[1:]))
                env.update(zip(node.eqn.outvars, outs, strict=True))
            else:
                env.update(zip(node.outvars, jx.bind(node, [read(v) for v in node.invars]), strict=True))
        return [read(v) for v in flat.outvars], token


@dataclass(frozen=True)
class _Conditional:
    """A `cond`, and the owners of each of its branches."""

    eqn: Any
    owners: tuple[Owners, ...]


def owners(program: UpdateProgram, storage: Storage, sharded: bool, mesh: Mesh) -> Owners:
    """How an update runs on whole matrices where leaves are spread; without bundles where none is, or may be moved.

    Args:
      program: of an optimizer that sees the model's own leaves.
      storage: the leaves, as a step keeps them and as the model has them.
      sharded: whether the optimizer's state carries the axes of ZeRO.
      mesh: the step's.
    """
    tuned = [leaf for leaf in storage.models if leaf.trainable]
    return _Dealer(tuned, axes_at_rest(storage, sharded, mesh.shape), mesh.shape).owners(program)


@dataclass(frozen=True)
class _Dealer:
    """Deals out matrices.

    Attributes:
      leaves: those that the optimizer sees.
      rest: the axes of each of their dims, at rest.
      sizes: the size of each mesh axis.
    """

    leaves: Sequence[Leaf]
    rest: Sequence[tuple[tuple[str, ...], ...]]
    sizes: Mapping[str, int]

    def owners(self, program: UpdateProgram) -> Owners:
        """Of a program's matrices."""
        inner = {k: tuple(map(self.owners, branches)) for k, branches in program.branches.items()}
        notes = {path: why for branches in inner.values() for one in branches for path, why in one.notes.items()}
        states = {i: v for branches in inner.values() for one in branches for i, v in one.states.items()}
        alike: list[tuple[Region, ...]] = []  # leaves without batch dims of one program, and others one by one
        multiplied = {i for k, dims in enumerate(program.products) if k not in inner for i in dims}
        for leaf in sorted(multiplied):
            region = region_of(program, leaf, self.leaves[leaf].shape)
            if isinstance(region, str):
                notes[self.leaves[leaf].path] = region
                continue
            beside = (i for i, (one, *_) in enumerate(alike) if not region.batch and self._same(one, region))
            if (at := next(beside, None)) is None:
                alike.append((region,))
            else:
                alike[at] += (region,)
        pools: dict[Any, list[Kind]] = {}
        for regions in alike:
            axes = self._spread(regions[0])
            if axes and (kind := self._kind(program, regions, axes)) is not None:
                even = kind.count % self._parts(axes) == 0
                pools.setdefault((axes, regions[0].leaf if even else None), []).append(kind)
            elif axes:
                why = "as the layout keeps it: its program is none of one matrix after another"
                notes |= {self.leaves[region.leaf].path: why for region in regions}
        bundles = [_bundle(kinds, axes, self._parts(axes)) for (axes, _), kinds in pools.items()]
        members = [[region for kind in bundle.kinds for region in kind.regions] for bundle in bundles]
        eqns = program.flat.eqns
        order = in_order(eqns, [[eqn for region in group for eqn in region.eqns] for group in members])
        if order is None:
            why = "as the layout keeps it: matrices need one another's updates"
            notes |= {self.leaves[region.leaf].path: why for group in members for region in group}
            bundles, members, order = [], [], eqns
        for bundle, group in zip(bundles, members, strict=True):
            notes |= {self.leaves[region.leaf].path: str(bundle) for region in group}
            states |= {i: v for region in group for i, v in self._states(program, region, bundle.axes)}
        conditional = {id(eqns[k]): _Conditional(eqns[k], branches) for k, branches in inner.items()}
        nodes = [bundles[node] if isinstance(node, int) else conditional.get(id(node), node) for node in order]
        owned = {id(eqn) for group in members for region in group for eqn in region.eqns} | {*conditional}
        parts = {
            id(eqn): self._parts(axis for d in region.batch for axis in self.rest[region.leaf][d])
            for regions in alike
            for region in regions
            for eqn in region.eqns
        }
        repeated = sum(-(-flops_of([eqn]) // parts.get(id(eqn), 1)) for eqn in eqns if id(eqn) not in owned)
        return Owners(program, tuple(nodes), notes, states, repeated)

    def _parts(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def _spread(self, region: Region) -> tuple[str, ...]:
        """The axes over which a matrix is spread, in the order of the mesh."""
        spread = {axis for d in region.mixed for axis in self.rest[region.leaf][d]}
        return tuple(axis for axis in self.sizes if axis in spread)

    def _same(self, one: Region, region: Region) -> bool:
        """Whether two leaves lie alike, and have one program."""
        return self.rest[one.leaf] == self.rest[region.leaf] and one.alike(region)

    def _kind(self, program: UpdateProgram, regions: tuple[Region, ...], axes: tuple[str, ...]) -> Kind | None:
        """A stack, or leaves side by side; None where the program of one matrix is not known."""
        region, one = regions[0], one_matrix(regions[0])
        if one is None:
            return None
        values = lambda vs: tuple[Any, ...](self._value(program, region, v, axes, len(regions)) for v in vs)
        dims = [(region.shape[d], self._parts(self.rest[region.leaf][d])) for d in region.batch]
        count = math.prod((-(-n // parts) for n, parts in dims), start=len(regions))
        return Kind(regions, one, values(region.ins), values(region.outs), count, flops_of(one.eqns))

    def _value(
        self, program: UpdateProgram, region: Region, var: Any, axes: tuple[str, ...], leaves: int = 1
    ) -> MatrixValue | None:
        """How a value of a region is kept: as its leaf; with the owners if they are the ranks of even parts of a stack,
        and no other reads it; or along its longest dim. None of what is no leaf's.
        """
        if var not in region.dims:
            return None
        rest, shape, as_leaf = self.rest[region.leaf], tuple(var.aval.shape), region.as_leaf(var)
        at = {region.place(var, d) or 0: rest[d] for d in region.batch}
        batch, own = tuple(at), rest
        even = bool(batch) and region.shape[region.batch[0]] % self._parts((*at[batch[0]], *axes)) == 0
        home = even and (var in program.state or not as_leaf)
        if home or not as_leaf:
            shape = (*shape, 1) if len(batch) == len(shape) else shape
            longest = max((d for d in range(len(shape)) if d not in batch), key=lambda d: shape[d])
            at |= {batch[0]: (*at[batch[0]], *axes)} if home else {longest: axes}
            own = tuple(at.get(d, ()) for d in range(len(shape)))
        if leaves > 1:
            shape, own, batch = (leaves, *shape), ((), *own), (0,)
        return MatrixValue(shape, var.aval.dtype, own, batch, home, self.sizes)

    def _states(
        self, program: UpdateProgram, region: Region, axes: tuple[str, ...]
    ) -> Iterator[tuple[int, MatrixValue]]:
        """The optimizer's arrays that a region reads and that are not as its leaf, or lie with its owners."""
        for var in region.ins:
            v = self._value(program, region, var, axes) if var in program.state else None
            if v is None or v.shape != var.aval.shape or (region.as_leaf(var) and not v.home):
                continue
            if sum(a != b for a, b in zip(v.padded, v.shape, strict=True)) < 2:
                yield program.state[var], v


def _bundle(kinds: Sequence[Kind], axes: tuple[str, ...], ranks: int) -> Bundle:
    """As many matrices of one kind to each rank, in order, or one to all; else each to the rank with least FLOPs."""
    if len(kinds) == 1 and kinds[0].count in (1, each := kinds[0].count // ranks * ranks):
        numbers = [0] * ranks if kinds[0].count == 1 else range(each)
        return Bundle(tuple(kinds), axes, ranks, (tuple(map(tuple, np.reshape(numbers, (ranks, -1)).tolist())),))
    load, owned = [0] * ranks, [[list[int]() for _ in range(ranks)] for _ in kinds]
    for k, kind in sorted(enumerate(kinds), key=lambda item: -item[1].flops):
        for i in range(kind.count):
            rank = load.index(min(load))
            owned[k][rank].append(i)
            load[rank] += max(1, kind.flops)
    return Bundle(tuple(kinds), axes, ranks, tuple(tuple(map(tuple, of)) for of in owned))
