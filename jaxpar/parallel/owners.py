"""Owners of whole matrices: who runs an optimizer's program on which matrix, and what is sent for that.

A matrix that is spread over devices cannot be multiplied where it lies: left to the partitioner, every product of Muon,
Shampoo or SOAP gathers it. So each matrix has an owner among the R ranks that spread it:

    at rest                  owner                                     at rest
    [L, m, n/R]  ------->  [m, n], one after another,  ------->  [L, m, n/R]
           one all-to-all    by `one_matrix`'s program    one all-to-all

    sent per device     there and back, of K matrices of S bytes over R ranks
    R divides K         2 (R-1)/R K S/R: what one reduce-scatter of their gradients sends is R times that
    dealt out           2 (R-1)/R W, with W/R the most that any owner's matrices have
    one matrix alone    (R-1)/R S: an all-gather; all ranks repeat its FLOPs, which an owner would need as well

Stacks, or matrices of one shape and program, whose number R divides are dealt out evenly, each in an exchange of its
own. All others that the same axes spread are dealt out together, the most FLOPs first, each to the rank that has least
(Graham 1969, LPT; Shi et al. 2023, arXiv:2309.06497, section 3.2, deal out Shampoo's blocks so). What is at rest does not
change, but that the optimizer's arrays which only these programs read lie with the owners of evenly dealt stacks, and
spread like the rest of the state where they go there and back.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ..collectives import all_gather, all_to_all, index, order
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
from ..program import trip_counts
from ..text import number
from .contract import Sent

_Axes = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class MatrixValue:
    """A value that the program of one matrix reads or makes, of all matrices of a leaf.

    Attributes:
      shape: of all of them, [..., m, n]; numbers have a last dim of 1.
      dtype: its dtype.
      axes: those of each dim, at rest.
      batch: its batch dims, in the order of the leaf's.
      home: whether it lies with the owners; else its pieces go to them.
      sizes: the size of each mesh axis.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: _Axes
    batch: tuple[int, ...]
    home: bool
    sizes: Mapping[str, int] = field(repr=False)

    @property
    def inner(self) -> list[int]:
        """The dims of one matrix."""
        return [d for d in range(len(self.shape)) if d not in self.batch]

    @property
    def local(self) -> tuple[int, ...]:
        """A device's part, padding included."""
        ranks = [math.prod(self.sizes[axis] for axis in axes) for axes in self.axes]
        return tuple(-(-n // parts) for n, parts in zip(self.shape, ranks, strict=True))

    @property
    def padded(self) -> tuple[int, ...]:
        """All of it, with padding."""
        ranks = (math.prod(self.sizes[axis] for axis in axes) for axes in self.axes)
        return tuple(n * parts for n, parts in zip(self.local, ranks, strict=True))

    @property
    def piece(self) -> tuple[int, ...]:
        """What a device has of one matrix."""
        return tuple(self.local[d] for d in self.inner)

    @property
    def count(self) -> int:
        """Of how many matrices a device has something."""
        return math.prod(self.local[d] for d in self.batch)

    @property
    def spec(self) -> PartitionSpec:
        """Where it is at rest."""
        return PartitionSpec(*(axes or None for axes in self.axes))

    def pad(self, x: jax.Array) -> jax.Array:
        """As the model has it -> [*padded]."""
        return jnp.pad(x.reshape(self.shape), [(0, n - m) for n, m in zip(self.padded, self.shape, strict=True)])

    def pieces(self, x: jax.Array) -> jax.Array:
        """A device's part -> [count, *piece]."""
        return jnp.moveaxis(x, self.batch, range(len(self.batch))).reshape(self.count, *self.piece)

    def joined(self, pieces: jax.Array) -> jax.Array:
        """The reverse."""
        x = pieces.reshape(*(self.local[d] for d in self.batch), *self.piece)
        return jnp.moveaxis(x, range(len(self.batch)), self.batch)

    def _cuts(self, axes: Sequence[str]) -> tuple[list[int], list[int], list[list[int]]]:
        """The shape of all ranks' pieces with a dim for each axis; in which order these are those of the matrix; and
        which of them are one dim of it.
        """
        shape = [*(self.sizes[axis] for axis in axes), *self.piece]
        rows = [[*map(axes.index, self.axes[d]), len(axes) + i] for i, d in enumerate(self.inner)]
        return shape, list(itertools.chain(*rows)), [[shape[i] for i in row] for row in rows]

    def whole(self, pieces: jax.Array, axes: Sequence[str]) -> jax.Array:
        """All ranks' pieces of one matrix [ranks, *piece] -> the matrix."""
        shape, turned, rows = self._cuts(axes)
        x = pieces.reshape(shape).transpose(turned).reshape([math.prod(row) for row in rows])
        return x[tuple(slice(self.shape[d]) for d in self.inner)]

    def cut(self, x: jax.Array, axes: Sequence[str]) -> jax.Array:
        """The reverse."""
        _, turned, rows = self._cuts(axes)
        widths = [(0, self.padded[d] - self.shape[d]) for d in self.inner]
        x = jnp.pad(x.reshape([self.shape[d] for d in self.inner]), widths)
        return x.reshape(list(itertools.chain(*rows))).transpose(np.argsort(turned)).reshape(-1, *self.piece)


@dataclass(frozen=True)
class Kind:
    """Matrices with one program: a stack, or leaves of one shape.

    Attributes:
      regions: one of each leaf.
      program: that of one matrix.
      ins, outs: the values that it reads and makes; None of what is no leaf's, such as a rate.
      flops: of one matrix.
    """

    regions: tuple[Region, ...]
    program: jx.Flat = field(repr=False)
    ins: tuple[MatrixValue | None, ...]
    outs: tuple[MatrixValue, ...]
    flops: int

    @property
    def each(self) -> int:
        """The matrices of one leaf on the ranks that deal them out."""
        return next(v.count * (math.prod(v.sizes[a] for a in v.axes[v.batch[0]]) if v.home else 1) for v in self.outs)

    @property
    def count(self) -> int:
        """All of its matrices there."""
        return len(self.regions) * self.each


@dataclass(frozen=True)
class Bundle:
    """Matrices that are exchanged at once.

    Attributes:
      kinds: they and their programs.
      axes: those that spread a matrix, outermost first.
      owner: of each kind, the rank that owns each of its matrices.
    """

    kinds: tuple[Kind, ...]
    axes: tuple[str, ...]
    owner: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        """Among how many they are dealt out."""
        sizes = self.kinds[0].outs[0].sizes
        return math.prod(sizes[axis] for axis in self.axes)

    @property
    def alone(self) -> bool:
        """Whether there is one matrix, which all ranks gather."""
        return sum(map(len, self.owner)) == 1

    @property
    def even(self) -> bool:
        """Whether each rank owns as many as any other, in order."""
        return all(list(own) == [i * self.ranks // len(own) for i in range(len(own))] for own in self.owner)

    def counts(self, kind: int) -> list[int]:
        """How many of a kind each rank owns."""
        return [self.owner[kind].count(rank) for rank in range(self.ranks)]

    @property
    def flops(self) -> list[int]:
        """Of each rank's matrices."""
        each = [[kind.flops * n for n in self.counts(k)] for k, kind in enumerate(self.kinds)]
        return [self.kinds[0].flops] * self.ranks if self.alone else [sum(row) for row in zip(*each, strict=True)]

    def rows(self, side: str) -> tuple[dict[Any, int], dict[tuple[int, int], list[int]]]:
        """What an exchange sends to (or, `outs`, gets from) one owner: by dtype the elements of the fullest row; and
        where in the row of each rank the pieces of a kind's value begin.
        """
        filled: dict[Any, list[int]] = {}
        at: dict[tuple[int, int], list[int]] = {}
        for k, kind in enumerate(self.kinds):
            for j, value in enumerate(getattr(kind, side)):
                if value is not None and not value.home:
                    row = filled.setdefault(value.dtype, [0] * self.ranks)
                    at[k, j] = list(row)
                    row[:] = [n + c * math.prod(value.piece) for n, c in zip(row, self.counts(k), strict=True)]
        return {dtype: max(row) for dtype, row in filled.items()}, at

    def sends(self) -> list[Sent]:
        """The closed form of its exchanges."""
        kind = "all-gather" if self.alone else "all-to-all"
        sides = ("ins",) if self.alone else ("ins", "outs")
        every = [(dtype, width) for side in sides for dtype, width in self.rows(side)[0].items()]
        return [Sent(kind, self.axes, dtype, 1, self.ranks * width) for dtype, width in every]

    def __call__(self, values: Sequence[Sequence[Sequence[jax.Array]]], mesh: Mesh, token: Token | None) -> Any:
        """What the programs make, [kind][output][region], of what they read, and the token after that.

        Args:
          values: [kind][input][region], as the optimizer has them; of one that is no leaf's one for all regions, or
            one for each.
        """
        specs = lambda side, count: [
            [[PartitionSpec() if v is None else v.spec] * count(k, j) for j, v in enumerate(getattr(kind, side))]
            for k, kind in enumerate(self.kinds)
        ]
        outs = specs("outs", lambda k, j: len(self.kinds[k].regions))
        given = [
            [list(xs) if v is None else [v.pad(x) for x in xs] for v, xs in zip(kind.ins, row, strict=True)]
            for kind, row in zip(self.kinds, values, strict=True)
        ]
        made, token = jax.shard_map(
            order.in_order(self._local, mesh),
            mesh=mesh,
            in_specs=(PartitionSpec(), specs("ins", lambda k, j: len(values[k][j]))),
            out_specs=(outs, PartitionSpec()),
            check_vma=False,
        )(token, given)
        return [
            [
                [x[tuple(map(slice, v.shape))].reshape(var.aval.shape) for x, var in zip(xs, of, strict=True)]
                for v, xs, of in zip(kind.outs, row, zip(*(r.outs for r in kind.regions), strict=True), strict=True)
            ]
            for kind, row in zip(self.kinds, made, strict=True)
        ], token

    def _local(self, values: Any) -> Any:
        """What one device does."""
        me = index(self.axes)
        pieces = {
            (k, j): jnp.concatenate([v.pieces(x) for x in values[k][j]])
            for k, kind in enumerate(self.kinds)
            for j, v in enumerate(kind.ins)
            if v is not None
        }
        widths, starts = self.rows("ins")
        arrived = {
            dtype: self._packed([(key, pieces[key]) for key in starts if pieces[key].dtype == dtype], width)
            for dtype, width in widths.items()
        }
        send = all_gather if self.alone else all_to_all
        arrived = {dtype: send(x, self.axes) for dtype, x in arrived.items()}
        widths, ends = self.rows("outs")
        left = {dtype: jnp.zeros((self.ranks, width), dtype) for dtype, width in widths.items()}
        if self._in_place():
            left = arrived
        homes: dict[tuple[int, int], jax.Array] = {}
        for k, kind in enumerate(self.kinds):
            left, own = self._run(k, kind, values[k], pieces, (arrived, starts), (left, ends), me)
            homes |= own
        if self.alone:
            back = {dtype: lax.dynamic_slice_in_dim(x, me, 1) for dtype, x in left.items()}
        else:
            back = {dtype: all_to_all(x, self.axes) for dtype, x in left.items()}
        out = []
        for k, kind in enumerate(self.kinds):
            out.append([])
            for j, v in enumerate(kind.outs):
                mine = homes[k, j] if v.home else self._unpacked(k, v, back[v.dtype], ends[k, j])
                out[-1].append([v.joined(x) for x in jnp.split(mine, len(kind.regions))])
        return out

    def _in_place(self) -> bool:
        """Whether a matrix may leave where it has arrived: what it is made of lies there alone."""
        at = [{(k, tuple(row)) for (k, _), row in self.rows(side)[1].items()} for side in ("ins", "outs")]
        sizes = [self.rows(side)[0] for side in ("ins", "outs")]
        return at[0] == at[1] and len(at[0]) == len(self.kinds) and sizes[0] == sizes[1]

    def _sorted(self, kind: int) -> np.ndarray:
        """A kind's matrices in the order of their owners."""
        return np.argsort(self.owner[kind], kind="stable")

    def _packed(self, pieces: Sequence[tuple[tuple[int, int], jax.Array]], width: int) -> jax.Array:
        """A row for each owner: its matrices' pieces, [ranks, width]."""
        if self.even or self.alone:
            rows = 1 if self.alone else self.ranks
            return jnp.concatenate([x.reshape(rows, -1) for _, x in pieces], axis=1)
        ends = {k: [0, *itertools.accumulate(self.counts(k))] for (k, _), _ in pieces}
        turned = [(k, x[self._sorted(k)]) for (k, _), x in pieces]
        rows = [jnp.concatenate([x[ends[k][r] : ends[k][r + 1]].ravel() for k, x in turned]) for r in range(self.ranks)]
        return jnp.stack([jnp.pad(row, (0, width - row.size)) for row in rows])

    def _unpacked(self, kind: int, value: MatrixValue, rows: jax.Array, starts: Sequence[int]) -> jax.Array:
        """The reverse for one value: [matrices, *piece]."""
        size = math.prod(value.piece)
        if self.even or self.alone:
            return rows[:, starts[0] : starts[0] + self.counts(kind)[0] * size].reshape(-1, *value.piece)
        parts = [rows[r, at : at + n * size] for r, (at, n) in enumerate(zip(starts, self.counts(kind), strict=True))]
        return jnp.concatenate(parts).reshape(-1, *value.piece)[np.argsort(self._sorted(kind))]

    def _run(self, k: int, kind: Kind, values: Any, pieces: Any, arrived: Any, left: Any, me: Any) -> Any:
        """The program of a kind on each matrix of this rank: rows that go back, and what stays, by value."""
        counts = [1] * self.ranks if self.alone else self.counts(k)
        numbers = np.zeros((self.ranks, max(counts)), np.int32)  # of the matrices of each rank
        for rank, n in enumerate(counts if not self.alone else ()):
            numbers[rank, :n] = np.flatnonzero(np.equal(self.owner[k], rank))
        program, (there, starts), (back, ends) = kind.program, arrived, left
        in_place = there is back
        fun = jx.run(program.eqns, (*program.constvars, *program.invars), program.outvars)
        at = lambda table, v, s: jnp.asarray(table, jnp.int32)[me] + s * math.prod(v.piece)

        def matrix(s: Any, carry: Any) -> Any:
            rows, own = carry
            args = []
            for j, (v, var) in enumerate(zip(kind.ins, program.invars, strict=True)):
                if v is None:
                    each = len(values[j]) > 1
                    x = jnp.stack(values[j])[jnp.asarray(numbers)[me, s] // kind.each] if each else values[j][0]
                elif v.home:
                    x = pieces[k, j][s]
                else:
                    size = math.prod(v.piece)
                    row = (rows if in_place else there)[v.dtype]
                    x = lax.dynamic_slice_in_dim(row, at(starts[k, j], v, s), size, axis=1)
                    x = v.whole(x, self.axes)
                args.append(x.reshape(var.aval.shape))
            rows, own = dict(rows), dict(own)
            for j, (v, x) in enumerate(zip(kind.outs, fun(*program.consts, *args), strict=True)):
                if v.home:
                    own[j] = own[j].at[s].set(x.reshape(v.piece))
                else:
                    cut = v.cut(x, self.axes).reshape(self.ranks, -1)
                    rows[v.dtype] = lax.dynamic_update_slice_in_dim(rows[v.dtype], cut, at(ends[k, j], v, s), axis=1)
            return rows, own

        own = {j: jnp.zeros((v.count, *v.piece), v.dtype) for j, v in enumerate(kind.outs) if v.home}
        if min(counts) == max(counts):
            back, own = lax.fori_loop(0, counts[0], matrix, (back, own))
        else:
            busiest = int(np.argmax(self.flops))
            paces = trip_counts.name_of(counts[busiest], counts[busiest], 1)
            with jax.named_scope(paces):
                back, own = lax.fori_loop(0, jnp.asarray(counts, jnp.int32)[me], matrix, (back, own))
        return back, {(k, j): x for j, x in own.items()}


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
    def all_flops(self) -> int:
        """Those of one device that had all matrices of its group."""
        own = sum(kind.flops * kind.count for bundle in self.bundles for kind in bundle.kinds)
        return self.repeated + own

    def sends(self) -> list[Sent]:
        """What is sent there and back in a step."""
        return [sent for bundle in self.bundles for sent in bundle.sends()]

    def described(self) -> str:
        """FLOPs of owners, in words."""
        share = self.flops / max(1, self.all_flops)
        return f"{number(self.flops)}FLOP on the busiest device, {share:.3f} of what all of them take"

    def stored(self, places: Any) -> Any:
        """The places of the optimizer's arrays, with those that are kept for owners."""
        flat, tree = jax.tree.flatten(places, is_leaf=is_stored)
        for i, value in self.states.items():
            dim = next((d for d, n in enumerate(value.shape) if value.padded[d] != n), None)
            padding = Leaf("", value.shape, flat[i].dtype, dim, value.padded[dim]) if dim is not None else None
            flat[i] = Stored(value.padded, flat[i].dtype, value.spec, padding)
        return jax.tree.unflatten(tree, flat)

    def __call__(self, mesh: Mesh, token: Token | None, *args: Any) -> tuple[Any, Token | None]:
        """The update's results from its arguments, and the token after its exchanges."""
        flat, env = self.program.flat, {}
        env.update(zip(flat.invars, jax.tree.leaves(args), strict=True))
        env.update(zip(flat.constvars, flat.consts, strict=True))
        read = lambda v: v.val if jx.is_literal(v) else env[v]
        last: jax.Array = jnp.zeros(())
        for node in self.order:
            if not isinstance(node, int):
                env.update(zip(node.outvars, jx.bind(node, [read(v) for v in node.invars]), strict=True))
                continue
            bundle = self.bundles[node]
            values = [
                [
                    [env[v] for v in (of if value is not None or len({*of}) > 1 else of[:1])]
                    for value, of in zip(kind.ins, zip(*(r.ins for r in kind.regions), strict=True), strict=True)
                ]
                for kind in bundle.kinds
            ]
            if token is None:  # one after the other: each needs room for its matrices
                values, last = lax.optimization_barrier((values, last))
            made, token = bundle(values, mesh, token)
            last = made[0][0][0].ravel()[0]
            for kind, row in zip(bundle.kinds, made, strict=True):
                for of, xs in zip(zip(*(r.outs for r in kind.regions), strict=True), row, strict=True):
                    env.update(zip(of, xs, strict=True))
        return jax.tree.unflatten(jax.tree.structure(self.program.out), [read(v) for v in flat.outvars]), token


def owners(program: UpdateProgram, storage: Storage, sharded: bool, mesh: Mesh) -> Owners:
    """How an update runs on whole matrices where leaves are spread; without bundles where no matrix is, or may be moved.

    Args:
      program: of an optimizer that sees the model's own leaves.
      storage: the leaves, as a step keeps them and as the model has them.
      sharded: whether the optimizer's state carries the axes of ZeRO.
      mesh: the step's.
    """
    dealer = _Dealer(program, axes_at_rest(storage, sharded, mesh.shape), mesh)
    tuned = [leaf.path for leaf in storage.models if leaf.trainable]
    return dealer.deal(tuned)


class _Dealer:
    """One dealing of an update's matrices."""

    def __init__(self, program: UpdateProgram, rest: Sequence[_Axes], mesh: Mesh) -> None:
        self.program, self.rest, self.mesh = program, rest, mesh
        self.values, self.steps = follow(program)
        leaves = len(rest)
        state = [*program.flat.invars[2 * leaves : -1]]
        made = program.flat.outvars[len(program.flat.outvars) - len(state) :]
        self.state = {v: i for i, v in enumerate(state)}
        self.state |= {v: i for i, v in enumerate(made) if not jx.is_literal(v)}

    def deal(self, paths: Sequence[str]) -> Owners:
        """Of leaves with these paths."""
        notes: dict[int, str] = {}
        kept: dict[int, int] = {}  # FLOPs of what has no owner
        kinds: list[tuple[tuple[str, ...], Kind]] = []
        for leaf in sorted(self.program.products):
            region = region_of(self.program, leaf, self.values, self.steps)
            if isinstance(region, str):
                notes[leaf], kept[leaf] = region, 0
                continue
            axes, batch = self._spread(region), region.batch(self._shape(region))
            local = math.prod(self.mesh.shape[axis] for d in batch for axis in self.rest[leaf][d])
            kept[leaf] = -(-flops_of(region.eqns) // local)
            if not axes:
                continue
            same = next(
                (
                    i
                    for i, (_, kind) in enumerate(kinds)
                    if not batch
                    and self.rest[kind.regions[0].leaf] == self.rest[leaf]
                    and alike(kind.regions[0], region)
                ),
                None,
            )
            if same is not None:
                old = kinds[same][1]
                kinds[same] = (axes, replace(old, regions=(*old.regions, region)))
            elif (kind := self._kind(region, axes)) is not None:
                kinds.append((axes, kind))
            else:
                notes[leaf] = "as the layout keeps it: its program is none of one matrix after another"
        bundles, pools = [], dict[tuple[str, ...], list[Kind]]()
        for axes, kind in kinds:
            ranks = math.prod(self.mesh.shape[axis] for axis in axes)
            if kind.count % ranks == 0:
                bundles.append(Bundle((kind,), axes, (tuple(i * ranks // kind.count for i in range(kind.count)),)))
            else:
                pools.setdefault(axes, []).append(kind)
        bundles += [_dealt(kinds, axes, self.mesh) for axes, kinds in pools.items()]
        order = in_order(self.program, [[r for kind in b.kinds for r in kind.regions] for b in bundles])
        if order is None:
            notes |= dict.fromkeys(
                (r.leaf for b in bundles for kind in b.kinds for r in kind.regions),
                "as the layout keeps it: matrices need one another's updates",
            )
            bundles, order = [], self.program.flat.eqns
        states: dict[int, MatrixValue] = {}
        for bundle in bundles:
            for kind in bundle.kinds:
                for region in kind.regions:
                    notes[region.leaf] = _note(bundle)
                    del kept[region.leaf]
                    states |= self._states(kind, region)
        return Owners(
            self.program,
            tuple(bundles),
            order,
            {paths[i]: why for i, why in notes.items()},
            states,
            sum(kept.values()),
        )

    def _shape(self, region: Region) -> tuple[int, ...]:
        return self.program.flat.invars[region.leaf].aval.shape

    def _spread(self, region: Region) -> tuple[str, ...]:
        """The axes over which a matrix is spread, in the order of the mesh."""
        spread = {axis for d in region.mixed for axis in self.rest[region.leaf][d]}
        return tuple(axis for axis in self.mesh.axis_names if axis in spread)

    def _kind(self, region: Region, axes: tuple[str, ...]) -> Kind | None:
        shape = self._shape(region)
        if not all(self._views(v, region) for v in region.outs):
            return None
        program = one_matrix(region, shape, self.values)
        if program is None:
            return None
        ranks, batch = math.prod(self.mesh.shape[axis] for axis in axes), region.batch(shape)
        first = math.prod(self.mesh.shape[axis] for axis in self.rest[region.leaf][batch[0]]) if batch else 1
        stays = bool(batch) and -(-shape[batch[0]] // first) % ranks == 0 and shape[batch[0]] % first == 0
        ins = tuple(self._value(v, region, axes, stays) if self._views(v, region) else None for v in region.ins)
        outs = tuple(self._value(v, region, axes, stays) for v in region.outs)
        return Kind((region,), program, ins, outs, flops_of(program.eqns))

    def _views(self, var: Any, region: Region) -> followed.Dims:
        return dict(self.values.get(var, followed.NOTHING).views).get(region.leaf, ())

    def _is_leafs(self, var: Any, region: Region) -> bool:
        """Whether a value has the very dims of the leaf."""
        return self._views(var, region) == dict(self.program.inputs[region.leaf].views)[region.leaf]

    def _value(self, var: Any, region: Region, axes: tuple[str, ...], stays: bool) -> MatrixValue:
        """How a value of a region is kept: as its leaf, with the owners, or spread along its longest dim."""
        rest, shape, leaf = self.rest[region.leaf], tuple(var.aval.shape), region.leaf
        places = {d: place_of(self.values[var], leaf, d) for d in region.batch(self._shape(region))}
        batch = tuple(place for place in places.values() if place is not None)
        at = {place: rest[d] for d, place in places.items()}
        is_leafs = self._is_leafs(var, region)
        home = stays and (not is_leafs or var in self.state)
        if is_leafs and not home:
            return MatrixValue(shape, var.aval.dtype, rest, batch, False, self.mesh.shape)
        if len(batch) == len(shape):
            shape = (*shape, 1)
        if home:
            at[batch[0]] = (*at[batch[0]], *axes)
        else:
            at[max((d for d in range(len(shape)) if d not in batch), key=lambda d: shape[d])] = axes
        own = tuple(at.get(d, ()) for d in range(len(shape)))
        return MatrixValue(shape, var.aval.dtype, own, batch, home, self.mesh.shape)

    def _states(self, kind: Kind, region: Region) -> dict[int, MatrixValue]:
        """The optimizer's arrays that a region reads and that are no leaf's, or lie with its owners."""
        found = {}
        for var, v in zip(region.ins, kind.ins, strict=True):
            if v is None or var not in self.state or v.shape != var.aval.shape:
                continue
            padded = sum(a != b for a, b in zip(v.padded, v.shape, strict=True))
            if padded < 2 and (v.home or not self._is_leafs(var, region)):
                found[self.state[var]] = v
        return found


def _dealt(kinds: Sequence[Kind], axes: tuple[str, ...], mesh: Mesh) -> Bundle:
    """Matrices of some kinds, each to the rank with least FLOPs so far."""
    load = [0] * math.prod(mesh.shape[axis] for axis in axes)
    owner = [[0] * kind.count for kind in kinds]
    for k, kind in sorted(enumerate(kinds), key=lambda item: -item[1].flops):
        for i in range(kind.count):
            owner[k][i] = rank = load.index(min(load))
            load[rank] += max(1, kind.flops)
    return Bundle(tuple(kinds), axes, tuple(map(tuple, owner)))


def _note(bundle: Bundle) -> str:
    """How its matrices are owned."""
    over = f"{bundle.ranks} ranks of {'+'.join(bundle.axes)}"
    if bundle.alone:
        return f"gathered by {over}, which all compute it: alone, it has no way back so"
    if bundle.even:
        return f"whole matrices with their owners, {bundle.counts(0)[0]} on each of {over}: one all-to-all there, one back"
    total = sum(map(len, bundle.owner))
    share = max(bundle.flops) / max(1, sum(bundle.flops))
    return f"dealt out by FLOPs, {total} matrices together over {over}, the busiest {share:.3f} of all"
