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
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from ..collectives.order import Token
from ..layout.layout import Stored, is_stored
from ..layout.leaves import Leaf
from ..layout.storage import Storage
from ..layout.whole_matrices import (
    Region,
    UpdateProgram,
    alike,
    axes_at_rest,
    flops_of,
    follow,
    in_order,
    one_matrix,
    place_of,
    region_of,
)
from ..program import dims as followed
from ..program import jaxpr as jx
from ..text import number
from .contract import Sent
from .matrices import Bundle, Kind, MatrixValue


@dataclass(frozen=True)
class Owners:
    """How an update runs on whole matrices.

    Attributes:
      program: the update.
      bundles: matrices that are exchanged at once.
      order: equations, and bundles by their number, each after what it reads.
      notes: by path of a leaf: how it is owned, or why it is not.
      states: of the optimizer's arrays, by number, those that are kept for these programs alone.
      repeated: FLOPs on each device of matrices that have no owner.
    """

    program: UpdateProgram
    bundles: tuple[Bundle, ...]
    order: tuple[Any, ...]
    notes: dict[str, str]
    states: dict[int, MatrixValue]
    repeated: int

    @property
    def flops(self) -> int:
        """Of whole matrices, on the busiest device."""
        return self.repeated + sum(max(bundle.flops) for bundle in self.bundles)

    @property
    def sends(self) -> list[Sent]:
        """What is sent there and back in a step."""
        return [sent for bundle in self.bundles for sent in bundle.sends()]

    def __str__(self) -> str:
        every = self.repeated + sum(kind.flops * kind.count for bundle in self.bundles for kind in bundle.kinds)
        return f"{number(self.flops)}FLOP on the busiest device, {self.flops / max(1, every):.3f} of all matrices'"

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
        flat = self.program.flat
        env = dict(zip((*flat.invars, *flat.constvars), (*jax.tree.leaves(args), *flat.consts), strict=True))
        read = lambda v: v.val if jx.is_literal(v) else env[v]
        last: jax.Array = jnp.zeros(())
        for node in self.order:
            if not isinstance(node, int):
                env.update(zip(node.outvars, jx.bind(node, [read(v) for v in node.invars]), strict=True))
                continue
            values = [kind.read(env) for kind in self.bundles[node].kinds]
            if token is None:  # one after the other, as each needs memory; on CPU the token sees to that
                values, last = lax.optimization_barrier((values, last))
            made, token = self.bundles[node](values, mesh, token)
            last = made[0][0].ravel()[0]
            for kind, row in zip(self.bundles[node].kinds, made, strict=True):
                env.update(kind.written(row))
        return jax.tree.unflatten(jax.tree.structure(self.program.out), [read(v) for v in flat.outvars]), token


def owners(program: UpdateProgram, storage: Storage, sharded: bool, mesh: Mesh) -> Owners:
    """How an update runs on whole matrices where leaves are spread; without bundles where none is, or may be moved.

    Args:
      program: of an optimizer that sees the model's own leaves.
      storage: the leaves, as a step keeps them and as the model has them.
      sharded: whether the optimizer's state carries the axes of ZeRO.
      mesh: the step's.
    """
    dealer = _Dealer(program, axes_at_rest(storage, sharded, mesh.shape), mesh.shape)
    notes: dict[int, str] = {}
    repeated: dict[int, int] = {}  # FLOPs of what has no owner
    kinds: list[tuple[tuple[str, ...], Kind]] = []
    for leaf in sorted(program.products):
        region = region_of(program, leaf, dealer.values, dealer.steps)
        if isinstance(region, str):
            notes[leaf] = region
            continue
        axes, batch = dealer.spread(region), region.batch(dealer.shape(region))
        repeated[leaf] = -(-flops_of(region.eqns) // dealer.parts(a for d in batch for a in dealer.rest[leaf][d]))
        beside = next((i for i, (_, kind) in enumerate(kinds) if not batch and dealer.same(kind, region)), None)
        if beside is not None:
            kinds[beside] = axes, kinds[beside][1].beside(region)
        elif axes and (kind := dealer.kind(region, axes)) is not None:
            kinds.append((axes, kind))
        elif axes:
            notes[leaf] = "as the layout keeps it: its program is none of one matrix after another"
    bundles, pools = [], dict[tuple[str, ...], list[Kind]]()
    for axes, kind in kinds:
        ranks = dealer.parts(axes)
        if kind.count % ranks:
            pools.setdefault(axes, []).append(kind)
        else:
            bundles.append(Bundle((kind,), axes, ranks, (tuple(i * ranks // kind.count for i in range(kind.count)),)))
    bundles += [_dealt(kinds, axes, dealer.parts(axes)) for axes, kinds in pools.items()]
    every = [[(kind, region) for kind in bundle.kinds for region in kind.regions] for bundle in bundles]
    order = in_order(program, [tuple(region for _, region in group) for group in every])
    if order is None:
        why = "as the layout keeps it: matrices need one another's updates"
        notes |= {region.leaf: why for group in every for _, region in group}
        bundles, every, order = [], [], program.flat.eqns
    states: dict[int, MatrixValue] = {}
    for bundle, group in zip(bundles, every, strict=True):
        for kind, region in group:
            notes[region.leaf] = str(bundle)
            del repeated[region.leaf]
            states |= dealer.states(kind, region)
    tuned = [leaf.path for leaf in storage.models if leaf.trainable]
    named = {tuned[i]: why for i, why in notes.items()}
    return Owners(program, tuple(bundles), order, named, states, sum(repeated.values()))


def _dealt(kinds: Sequence[Kind], axes: tuple[str, ...], ranks: int) -> Bundle:
    """Matrices of some kinds, each to the rank with least FLOPs so far."""
    load, owner = [0] * ranks, [[0] * kind.count for kind in kinds]
    for k, kind in sorted(enumerate(kinds), key=lambda item: -item[1].flops):
        for i in range(kind.count):
            owner[k][i] = rank = load.index(min(load))
            load[rank] += max(1, kind.flops)
    return Bundle(tuple(kinds), axes, ranks, tuple(map(tuple, owner)))


class _Dealer:
    """What is asked of an update's values while its matrices are dealt out."""

    def __init__(
        self, program: UpdateProgram, rest: Sequence[tuple[tuple[str, ...], ...]], sizes: Mapping[str, int]
    ) -> None:
        self.program, self.rest, self.sizes = program, rest, sizes
        self.values, self.steps = follow(program)
        flat = program.flat
        state = flat.invars[2 * len(rest) : -1]
        made = flat.outvars[len(flat.outvars) - len(state) :]
        self.state = {v: i for side in (state, made) for i, v in enumerate(side) if not jx.is_literal(v)}

    def parts(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def shape(self, region: Region) -> tuple[int, ...]:
        return self.program.flat.invars[region.leaf].aval.shape

    def spread(self, region: Region) -> tuple[str, ...]:
        """The axes over which a matrix is spread, in the order of the mesh."""
        spread = {axis for d in region.mixed for axis in self.rest[region.leaf][d]}
        return tuple(axis for axis in self.sizes if axis in spread)

    def same(self, kind: Kind, region: Region) -> bool:
        """Whether a matrix is of a kind."""
        first = kind.regions[0]
        return self.rest[first.leaf] == self.rest[region.leaf] and alike(first, region)

    def _dims(self, var: Any, region: Region) -> followed.Dims:
        return dict(self.values.get(var, followed.NOTHING).views).get(region.leaf, ())

    def _is_leafs(self, var: Any, region: Region) -> bool:
        """Whether a value has the very dims of the leaf."""
        return self._dims(var, region) == dict(self.program.inputs[region.leaf].views)[region.leaf]

    def kind(self, region: Region, axes: tuple[str, ...]) -> Kind | None:
        """A stack, or the first of its kind; None where the program of one matrix is not known."""
        shape, rest = self.shape(region), self.rest[region.leaf]
        program = one_matrix(region, shape, self.values) if all(self._dims(v, region) for v in region.outs) else None
        if program is None:
            return None
        batch = region.batch(shape)
        first = shape[batch[0]] / self.parts(rest[batch[0]]) if batch else 1
        stays = bool(batch) and first % self.parts(axes) == 0
        ins = tuple(self._value(v, region, axes, stays) if self._dims(v, region) else None for v in region.ins)
        outs = tuple(self._value(v, region, axes, stays) for v in region.outs)
        count = math.prod(-(-shape[d] // self.parts(rest[d])) for d in batch)
        return Kind((region,), program, ins, outs, count, flops_of(program.eqns))

    def _value(self, var: Any, region: Region, axes: tuple[str, ...], stays: bool) -> MatrixValue:
        """How a value of a region is kept: as its leaf, with the owners if it `stays`, or along its longest dim."""
        rest, shape, leaf = self.rest[region.leaf], tuple(var.aval.shape), region.leaf
        places = {d: place_of(self.values[var], leaf, d) for d in region.batch(self.shape(region))}
        batch = tuple(place for place in places.values() if place is not None)
        home = stays and (not self._is_leafs(var, region) or var in self.state)
        if self._is_leafs(var, region) and not home:
            return MatrixValue(shape, var.aval.dtype, rest, batch, False, self.sizes)
        shape = (*shape, 1) if len(batch) == len(shape) else shape
        at = {place: rest[d] for d, place in places.items()}
        if home:
            at[batch[0]] = (*at[batch[0]], *axes)
        else:
            at[max((d for d in range(len(shape)) if d not in batch), key=lambda d: shape[d])] = axes
        own = tuple(at.get(d, ()) for d in range(len(shape)))
        return MatrixValue(shape, var.aval.dtype, own, batch, home, self.sizes)

    def states(self, kind: Kind, region: Region) -> dict[int, MatrixValue]:
        """The optimizer's arrays that a region reads and that are not as its leaf, or lie with its owners."""
        found = {}
        for var, kept in zip(region.ins, kind.ins, strict=True):
            if kept is None or var not in self.state or not (kept.home or not self._is_leafs(var, region)):
                continue
            v = (
                kept
                if len(kept.shape) == var.aval.ndim
                else replace(kept, shape=kept.shape[1:], axes=kept.axes[1:], batch=())
            )
            padded = sum(a != b for a, b in zip(v.padded, v.shape, strict=True))
            if v.shape == var.aval.shape and padded < 2:
                found[self.state[var]] = v
        return found
