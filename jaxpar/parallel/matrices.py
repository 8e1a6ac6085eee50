"""Matrices that are exchanged at once: pieces at rest, rows for their owners, one matrix after another, and back.

at rest, a device              a row for each owner              an owner, of each of its matrices
[L, m, n/R]    -- pack -->     [R, W]   -- all-to-all -->       [R, m, n/R]  -- whole -->  [m, n]  -- program
                                                                                                      |
[L, m, n/R]    <-- unpack --   [R, W]   <-- all-to-all --       [R, m, n/R]  <-- cut ---   [m, n]  <---'
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ..collectives import all_gather, all_to_all, index, order
from ..collectives.order import Token
from ..layout.whole_matrices import Region
from ..program import jaxpr as jx
from ..program import trip_counts
from .contract import Sent


@dataclass(frozen=True)
class MatrixValue:
    """A value that the program of one matrix reads or makes, of all matrices of a kind.

    Attributes:
      shape: of all of them; numbers have a last dim of 1.
      dtype: its dtype.
      axes: those of each dim, at rest.
      batch: its batch dims, in the order of the leaf's.
      home: whether it lies with the owners; else its pieces go to them.
      sizes: the size of each mesh axis.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[tuple[str, ...], ...]
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
        ranks = [math.prod(self.sizes[axis] for axis in axes) for axes in self.axes]
        return tuple(n * parts for n, parts in zip(self.local, ranks, strict=True))

    @property
    def piece(self) -> tuple[int, ...]:
        """What a device has of one matrix."""
        return tuple(self.local[d] for d in self.inner)

    @property
    def spec(self) -> PartitionSpec:
        """Where it is at rest."""
        return PartitionSpec(*(axes or None for axes in self.axes))

    def pad(self, x: jax.Array) -> jax.Array:
        """As the optimizer has it -> [*padded]."""
        return jnp.pad(x.reshape(self.shape), [(0, n - m) for n, m in zip(self.padded, self.shape, strict=True)])

    def pieces(self, x: jax.Array) -> jax.Array:
        """A device's part -> [matrices, *piece]."""
        return jnp.moveaxis(x, self.batch, range(len(self.batch))).reshape(-1, *self.piece)

    def joined(self, pieces: jax.Array) -> jax.Array:
        """The reverse."""
        x = pieces.reshape(*(self.local[d] for d in self.batch), *self.piece)
        return jnp.moveaxis(x, range(len(self.batch)), self.batch)

    def _cuts(self, axes: Sequence[str]) -> tuple[list[int], list[int], list[list[int]]]:
        """The shape of all ranks' pieces with a dim for each axis; in which order these are those of the matrix; and,
        dim by dim of it, their sizes.
        """
        shape = [*(self.sizes[axis] for axis in axes), *self.piece]
        rows = [[*map(axes.index, self.axes[d]), len(axes) + i] for i, d in enumerate(self.inner)]
        return shape, list(itertools.chain(*rows)), [[shape[i] for i in row] for row in rows]

    def whole(self, pieces: jax.Array, axes: Sequence[str]) -> jax.Array:
        """All ranks' pieces of one matrix [ranks, *piece] -> the matrix."""
        shape, turned, rows = self._cuts(axes)
        x = pieces.reshape(shape).transpose(turned).reshape([*map(math.prod, rows)])
        return x[tuple(slice(self.shape[d]) for d in self.inner)]

    def cut(self, x: jax.Array, axes: Sequence[str]) -> jax.Array:
        """The reverse: [ranks, elements]."""
        _, turned, rows = self._cuts(axes)
        widths = [(0, self.padded[d] - self.shape[d]) for d in self.inner]
        x = jnp.pad(x.reshape([self.shape[d] for d in self.inner]), widths)
        return x.reshape([*itertools.chain(*rows)]).transpose(np.argsort(turned)).reshape(-1, math.prod(self.piece))


@dataclass(frozen=True)
class Kind:
    """Matrices with one program: a stack, or leaves of one shape, which are put side by side.

    Attributes:
      regions: one of each leaf.
      program: that of one matrix.
      ins, outs: the values that it reads and makes; None of what is no leaf's, such as a rate.
      count: how many they are, on the ranks that deal them out.
      flops: of one.
    """

    regions: tuple[Region, ...]
    program: jx.Flat = field(repr=False)
    ins: tuple[MatrixValue | None, ...]
    outs: tuple[MatrixValue, ...]
    count: int
    flops: int

    def beside(self, region: Region) -> "Kind":
        """With one more leaf, which has no batch dims."""

        def more(v: MatrixValue | None) -> MatrixValue | None:
            if v is None or v.batch:
                return v and replace(v, shape=(v.shape[0] + 1, *v.shape[1:]))
            return replace(v, shape=(2, *v.shape), axes=((), *v.axes), batch=(0,))

        ins, outs = (tuple(map(more, values)) for values in (self.ins, self.outs))
        return replace(self, regions=(*self.regions, region), ins=ins, outs=outs, count=self.count + 1)

    def read(self, env: Mapping[Any, Any]) -> list[jax.Array]:
        """Its inputs; of several leaves as one array, but for what is the same of all."""
        rows = zip(self.ins, zip(*(region.ins for region in self.regions), strict=True), strict=True)
        same = lambda v, of: len(of) == 1 or (v is None and len({*of}) == 1)
        return [env[of[0]] if same(v, of) else jnp.stack([env[var] for var in of]) for v, of in rows]

    def written(self, made: Sequence[jax.Array]) -> Iterator[tuple[Any, jax.Array]]:
        """Of each output of each leaf the variable and the value."""
        for v, x, *of in zip(self.outs, made, *(region.outs for region in self.regions), strict=True):
            x = x[tuple(map(slice, v.shape))]
            for var, own in zip(of, x if len(of) > 1 else [x], strict=True):
                yield var, own.reshape(var.aval.shape)


@dataclass(frozen=True)
class Bundle:
    """Matrices that are exchanged at once.

    Attributes:
      kinds: they and their programs.
      axes: those that spread a matrix, outermost first.
      ranks: of these axes.
      owner: of each kind, the rank that owns each of its matrices.
    """

    kinds: tuple[Kind, ...]
    axes: tuple[str, ...]
    ranks: int
    owner: tuple[tuple[int, ...], ...]

    @property
    def alone(self) -> bool:
        """Whether there is one matrix, which all ranks gather."""
        return sum(map(len, self.owner)) == 1

    @property
    def even(self) -> bool:
        """Whether each rank owns as many as any other, in order."""
        return all(list(own) == [i * self.ranks // len(own) for i in range(len(own))] for own in self.owner)

    def counts(self, kind: int) -> list[int]:
        """How many of a kind each rank works on."""
        return [1] * self.ranks if self.alone else [self.owner[kind].count(rank) for rank in range(self.ranks)]

    @property
    def flops(self) -> list[int]:
        """Of each rank's matrices."""
        each = [[kind.flops * n for n in self.counts(k)] for k, kind in enumerate(self.kinds)]
        return [sum(row) for row in zip(*each, strict=True)]

    def rows(self, side: str) -> tuple[dict[Any, int], dict[tuple[int, int], list[int]]]:
        """What goes to each owner (`ins`), or comes from it (`outs`): by dtype the elements of the fullest row; and
        where in the row of each rank the pieces of a kind's value begin.
        """
        filled: dict[Any, list[int]] = {}
        at: dict[tuple[int, int], list[int]] = {}
        for k, kind in enumerate(self.kinds):
            for j, v in enumerate(getattr(kind, side)):
                if v is not None and not v.home:
                    row = filled.setdefault(v.dtype, [0] * self.ranks)
                    at[k, j] = list(row)
                    row[:] = [n + c * math.prod(v.piece) for n, c in zip(row, self.counts(k), strict=True)]
        return {dtype: max(row) for dtype, row in filled.items()}, at

    def sends(self) -> list[Sent]:
        """The closed form of its exchanges."""
        kind, sides = ("all-gather", ["ins"]) if self.alone else ("all-to-all", ["ins", "outs"])
        widths = [item for side in sides for item in self.rows(side)[0].items()]
        return [Sent(kind, self.axes, dtype, 1, self.ranks * width) for dtype, width in widths]

    def __str__(self) -> str:
        over = f"{self.ranks} ranks of {'+'.join(self.axes)}"
        if self.alone:
            return (
                f"alone on {over}: gathered and computed by all, since an owner would have as much to do, and to send"
            )
        if self.even:
            return f"whole with their owners, {self.counts(0)[0]} on each of {over}: one all-to-all there, one back"
        share = max(self.flops) / max(1, sum(self.flops))
        return (
            f"{sum(map(len, self.owner))} matrices dealt out by FLOPs over {over}, the busiest has {share:.3f} of all"
        )

    def __call__(self, values: Sequence[Sequence[jax.Array]], mesh: Mesh, token: Token | None) -> Any:
        """What the programs make, padded, by kind and output, of their inputs by kind; and the token after that."""
        specs = lambda side: [
            [PartitionSpec() if v is None else v.spec for v in getattr(kind, side)] for kind in self.kinds
        ]
        given = [
            [x if v is None else v.pad(x) for v, x in zip(kind.ins, row, strict=True)]
            for kind, row in zip(self.kinds, values, strict=True)
        ]
        here = PartitionSpec()
        run = order.in_order(self._local, mesh)
        ins, outs = (here, specs("ins")), (specs("outs"), here)
        return jax.shard_map(run, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)(token, given)

    def _local(self, values: Any) -> Any:
        """What one device does."""
        (widths, starts), (back_widths, ends) = self.rows("ins"), self.rows("outs")
        send, me = all_gather if self.alone else all_to_all, index(self.axes)
        rows = {
            dtype: send(self._packed([(k, self._value(k, j).pieces(values[k][j])) for k, j in at], width), self.axes)
            for dtype, width in widths.items()
            if (at := [(k, j) for k, j in starts if self._value(k, j).dtype == dtype])
        }
        spots = [[(k, at) for (k, _), at in side.items()] for side in (starts, ends)]
        in_place = spots[0] == spots[1] and widths == back_widths  # a matrix leaves where it has arrived
        left = rows if in_place else {d: jnp.zeros((self.ranks, n), d) for d, n in back_widths.items()}
        homes = []
        for k in range(len(self.kinds)):
            left, own = self._run(k, values[k], None if in_place else rows, left, (starts, ends), me)
            homes.append(own)
        take = lambda x: lax.dynamic_slice_in_dim(x, me, 1) if self.alone else all_to_all(x, self.axes)
        back = {dtype: take(x) for dtype, x in left.items()}
        return [
            [
                v.joined(homes[k][j] if v.home else self._unpacked(k, v, back[v.dtype], ends[k, j]))
                for j, v in enumerate(kind.outs)
            ]
            for k, kind in enumerate(self.kinds)
        ]

    def _value(self, k: int, j: int) -> MatrixValue:
        value = self.kinds[k].ins[j]
        assert value is not None
        return value

    def _packed(self, pieces: Sequence[tuple[int, jax.Array]], width: int) -> jax.Array:
        """A row for each owner, of its matrices' pieces: [ranks, width]; of a matrix alone, one."""
        if self.even or self.alone:
            return jnp.concatenate([x.reshape(1 if self.alone else self.ranks, -1) for _, x in pieces], axis=1)
        of = [[np.flatnonzero(np.equal(self.owner[k], rank)) for k, _ in pieces] for rank in range(self.ranks)]
        rows = [jnp.concatenate([x[at].ravel() for (_, x), at in zip(pieces, row, strict=True)]) for row in of]
        return jnp.stack([jnp.pad(row, (0, width - row.size)) for row in rows])

    def _unpacked(self, kind: int, v: MatrixValue, rows: jax.Array, starts: Sequence[int]) -> jax.Array:
        """The reverse for one value: [matrices, *piece]."""
        size, counts = math.prod(v.piece), self.counts(kind)
        if self.even or self.alone:
            return rows[:, starts[0] : starts[0] + counts[0] * size].reshape(-1, *v.piece)
        parts = [rows[r, at : at + n * size] for r, (at, n) in enumerate(zip(starts, counts, strict=True))]
        back = np.argsort(np.argsort(self.owner[kind], kind="stable"))
        return jnp.concatenate(parts).reshape(-1, *v.piece)[back]

    def _run(self, k: int, values: Any, arrived: Any, left: Any, spots: Any, me: Any) -> Any:
        """The program of a kind on each matrix of this rank: the rows with what goes back, and by output what stays.

        `arrived` is None where matrices are read from the rows that they go back in.
        """
        kind, counts, (starts, ends) = self.kinds[k], self.counts(k), spots
        program = kind.program
        fun = jx.run(program.eqns, (*program.constvars, *program.invars), program.outvars)
        at = lambda begin, v, s: jnp.asarray(begin, jnp.int32)[me] + s * math.prod(v.piece)
        numbers = np.argsort(self.owner[k], kind="stable")  # of matrices, owner after owner
        first = np.zeros(self.ranks, int) if self.alone else np.cumsum([0, *counts[:-1]])
        own = {j: v.pieces(jnp.zeros(v.local, v.dtype)) for j, v in enumerate(kind.outs) if v.home}

        def matrix(s: Any, carry: Any) -> Any:
            rows, own = carry
            args = []
            for j, (v, x, var) in enumerate(zip(kind.ins, values, program.invars, strict=True)):
                if v is None:
                    each = x.ndim > var.aval.ndim  # a number of each leaf
                    x = x[jnp.asarray(numbers)[jnp.asarray(first)[me] + s]] if each else x
                elif v.home:
                    x = v.pieces(x)[s]
                else:
                    row = (rows if arrived is None else arrived)[v.dtype]
                    size = math.prod(v.piece)
                    x = v.whole(lax.dynamic_slice_in_dim(row, at(starts[k, j], v, s), size, axis=1), self.axes)
                args.append(x.reshape(var.aval.shape))
            rows, own = dict(rows), dict(own)
            for j, (v, x) in enumerate(zip(kind.outs, fun(*program.consts, *args), strict=True)):
                if v.home:
                    own[j] = own[j].at[s].set(x.reshape(v.piece))
                else:
                    start = at(ends[k, j], v, s)
                    rows[v.dtype] = lax.dynamic_update_slice_in_dim(rows[v.dtype], v.cut(x, self.axes), start, axis=1)
            return rows, own

        if min(counts) == max(counts):
            return lax.fori_loop(0, counts[0], matrix, (left, own))
        paces = counts[int(np.argmax(self.flops))]  # whoever reads the program counts the busiest rank's
        with jax.named_scope(trip_counts.name_of(paces, paces, 1)):
            return lax.fori_loop(0, jnp.asarray(counts, jnp.int32)[me], matrix, (left, own))
