"""Matrices that are exchanged at once: pieces at rest, rows for their owners, one matrix after another, and back.

at rest, a device              a row for each owner              an owner, of each of its matrices
[L, m, n/R]    -- pack -->     [R, W]   -- all-to-all -->       [R, m, n/R]  -- whole -->  [m, n]  -- program
                                                                                                      |
[L, m, n/R]    <-- unpack --   [R, W]   <-- all-to-all --       [R, m, n/R]  <-- cut ---   [m, n]  <---'
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ...collectives import all_gather, all_to_all, index, order
from ...collectives.order import Token
from ...parallel.data.contract import Sent
from ...program import jaxpr as jx
from ...program import trip_counts
from .whole_matrices import Region


@dataclass(frozen=True)
class MatrixValue:
    """A value that the program of one matrix reads or makes, of all matrices of a leaf.

    Attributes:
      shape: of all of them; numbers have a last dim of 1.
      dtype: its dtype.
      axes: those of each dim, at rest.
      batch: its batch dims, in the order of the leaf's.
      home: whether it lies with the owners; else its pieces go to them.
      kept: whether a replica has its own matrices' alone; else each has those of all.
      sizes: the size of each mesh axis.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[tuple[str, ...], ...]
    batch: tuple[int, ...]
    home: bool
    kept: bool
    sizes: Mapping[str, int] = field(repr=False)

    @property
    def inner(self) -> list[int]:
        """The dims of one matrix."""
        return [d for d in range(len(self.shape)) if d not in self.batch]

    @property
    def ranks(self) -> list[int]:
        """Over how many each dim is spread."""
        return [math.prod(self.sizes[axis] for axis in axes) for axes in self.axes]

    @property
    def local(self) -> tuple[int, ...]:
        """A device's part, padding included."""
        return tuple(-(-n // ranks) for n, ranks in zip(self.shape, self.ranks, strict=True))

    @property
    def padded(self) -> tuple[int, ...]:
        """All of it, with padding."""
        return tuple(n * ranks for n, ranks in zip(self.local, self.ranks, strict=True))

    @property
    def piece(self) -> tuple[int, ...]:
        """What a device has of one matrix."""
        return tuple(self.local[d] for d in self.inner)

    @property
    def size(self) -> int:
        """Elements of a piece."""
        return math.prod(self.piece)

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

    def _ranks(self, axes: Sequence[str]) -> tuple[list[int], list[int]]:
        """The shape of all ranks' pieces with a dim for each axis, and in which order these are those of the matrix."""
        order = [i for k, d in enumerate(self.inner) for i in (*map(axes.index, self.axes[d]), len(axes) + k)]
        return [*(self.sizes[axis] for axis in axes), *self.piece], order

    def whole(self, pieces: jax.Array, axes: Sequence[str]) -> jax.Array:
        """All ranks' pieces of one matrix [ranks, *piece] -> the matrix."""
        shape, order = self._ranks(axes)
        x = pieces.reshape(shape).transpose(order).reshape([self.padded[d] for d in self.inner])
        return x[tuple(slice(self.shape[d]) for d in self.inner)]

    def cut(self, x: jax.Array, axes: Sequence[str]) -> jax.Array:
        """The reverse: [ranks, elements]."""
        shape, order = self._ranks(axes)
        x = x.reshape([self.shape[d] for d in self.inner])
        x = jnp.pad(x, [(0, self.padded[d] - self.shape[d]) for d in self.inner])
        return x.reshape([shape[i] for i in order]).transpose(np.argsort(order)).reshape(-1, self.size)


@dataclass(frozen=True)
class Kind:
    """Matrices with one program: of a stack, or of several leaves of one shape.

    Attributes:
      regions: one of each leaf.
      program: that of one matrix.
      ins, outs: of each leaf, the values that it reads and makes; None of what is no leaf's, such as a rate.
      each: how many are of each leaf, on the ranks that deal them out.
      replicas: among how many groups of ranks that hold the same they are divided.
      flops: of one.
    """

    regions: tuple[Region, ...]
    program: jx.Flat = field(repr=False)
    ins: Sequence[MatrixValue | None]
    outs: Sequence[MatrixValue]
    each: int
    replicas: int
    flops: int

    @property
    def count(self) -> int:
        """How many there are on the ranks that deal them out."""
        return self.each * len(self.regions)

    @property
    def share(self) -> int:
        """How many of these a replica works on; the last ones repeat where that does not divide them."""
        return -(-self.count // self.replicas)

    @property
    def total(self) -> int:
        """How many there are."""
        return sum(math.prod(region.shape[d] for d in region.batch) for region in self.regions)

    def read(self, env: Mapping[Any, Any]) -> list[list[jax.Array]]:
        """Of each input the values of the leaves; one, where it is none of theirs and the same of all."""
        values = []
        for v, of in zip(self.ins, zip(*(region.ins for region in self.regions), strict=True), strict=True):
            of = of if v is not None or len({*of}) > 1 else of[:1]
            values.append([env[x] if v is None else v.pad(env[x]) for x in of])
        return values

    def written(self, made: Sequence[Sequence[jax.Array]]) -> dict[Any, jax.Array]:
        """By variable the outputs of the leaves."""
        rows = zip(self.outs, made, *(region.outs for region in self.regions), strict=True)
        unpad = lambda v, x, var: x[tuple(map(slice, v.shape))].reshape(var.aval.shape)
        return {var: unpad(v, x, var) for v, xs, *of in rows for var, x in zip(of, xs, strict=True)}


@dataclass(frozen=True)
class Bundle:
    """Matrices that are exchanged at once.

    Attributes:
      kinds: they and their programs.
      axes: those that spread a matrix, outermost first.
      copies: those of replicas that divide the matrices among them.
      counts: of each kind, on how many of its replica's matrices each rank of `axes` works, one rank after another.
    """

    kinds: tuple[Kind, ...]
    axes: tuple[str, ...]
    copies: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def regions(self) -> list[Region]:
        """Those of its matrices."""
        return [region for kind in self.kinds for region in kind.regions]

    @property
    def ranks(self) -> int:
        """Of `axes`."""
        return len(self.counts[0])

    @property
    def flops(self) -> list[int]:
        """Of each rank's matrices."""
        return [
            sum(kind.flops * n for kind, n in zip(self.kinds, of, strict=True)) for of in zip(*self.counts, strict=True)
        ]

    def rows(self, side: str) -> tuple[dict[Any, int], dict[tuple[int, int], list[int]]]:
        """What goes to each owner (`ins`), or comes from it (`outs`): by dtype the elements of the fullest row; and
        where in the row of each rank the pieces of a kind's value begin.
        """
        filled: dict[Any, list[int]] = {}
        at: dict[tuple[int, int], list[int]] = {}
        for k, kind in enumerate(self.kinds):
            for j, v in enumerate(getattr(kind, side)):
                if v is not None and not v.home:
                    at[k, j] = filled.get(v.dtype, [0] * self.ranks)
                    filled[v.dtype] = [start + n * v.size for start, n in zip(at[k, j], self.counts[k], strict=True)]
        return {dtype: max(row) for dtype, row in filled.items()}, at

    def sends(self) -> list[Sent]:
        """The closed form of its exchanges."""
        sent = lambda dtype, width: Sent("all-to-all", self.axes, dtype, 1, self.ranks * width)
        moved = [sent(*item) for side in ("ins", "outs") for item in self.rows(side)[0].items()]
        made = [(kind, v) for kind in self.kinds for v in kind.outs if self.copies and not v.kept]
        return moved + [
            Sent("all-gather", self.copies, v.dtype, 1, kind.replicas * kind.share * v.size) for kind, v in made
        ]

    def __str__(self) -> str:
        over = f"{self.ranks} ranks of {'+'.join(self.axes)}"
        shared = f"a share on each of {self.kinds[0].replicas} replicas of {'+'.join(self.copies)}, which gather all; "
        shared *= bool(self.copies)
        if not self.axes:
            return shared + "whole where they lie" + ": nothing is sent" * (not self.copies)
        if all(len({*of}) == 1 for of in self.counts):
            each = self.counts[0][0]
            return f"{shared}whole with their owners, {each} on each of {over}: one all-to-all there, one back"
        count, busiest = sum(kind.share for kind in self.kinds), max(self.flops) / max(1, sum(self.flops))
        matrices = "1 matrix" if count == 1 else f"{count} matrices"
        return f"{shared}{matrices} dealt out by FLOPs over {over}, the busiest has {busiest:.3f} of all"

    def __call__(self, values: Any, mesh: Mesh, token: Token | None) -> tuple[dict[Any, jax.Array], Token | None]:
        """By variable what the programs make of what they `read`, and the token after that."""
        here, run = PartitionSpec(), order.in_order(self._local, mesh)
        outs = [[[v.spec] * len(kind.regions) for v in kind.outs] for kind in self.kinds]
        specs = [
            [[here if v is None else v.spec] * len(xs) for v, xs in zip(kind.ins, row, strict=True)]
            for kind, row in zip(self.kinds, values, strict=True)
        ]
        local = jax.shard_map(run, mesh=mesh, in_specs=(here, specs), out_specs=(outs, here), check_vma=False)
        made, token = local(token, values)
        return {
            var: x for kind, row in zip(self.kinds, made, strict=True) for var, x in kind.written(row).items()
        }, token

    def _local(self, values: Any) -> Any:
        """What one device does."""
        (widths, starts), (back, ends) = self.rows("ins"), self.rows("outs")
        values = [
            [
                xs if v is None else self._share(kind, v, jnp.concatenate([v.pieces(x) for x in xs]))
                for v, xs in zip(kind.ins, row, strict=True)
            ]
            for kind, row in zip(self.kinds, values, strict=True)
        ]
        packed = {
            t: self._packed([(k, values[k][j]) for k, j in starts if values[k][j].dtype == t], n)
            for t, n in widths.items()
        }
        rows = {"ins": {t: all_to_all(x, self.axes) for t, x in packed.items()}}
        spots = [[(k, at) for (k, _), at in side.items()] for side in (starts, ends)]
        to = "ins" if spots[0] == spots[1] and widths == back else "outs"  # a matrix may leave where it has arrived
        if to == "outs":
            rows["outs"] = {t: jnp.zeros((self.ranks, n), t) for t, n in back.items()}
        me, homes = index(self.axes), list[Any]()
        for k, kind in enumerate(self.kinds):
            own = {j: jnp.zeros((self.counts[k][0], *v.piece), v.dtype) for j, v in enumerate(kind.outs) if v.home}
            rows, own = self._run(k, values[k], (rows, own), to, starts, ends, me)
            homes.append(own)
        left = {t: all_to_all(x, self.axes) for t, x in rows[to].items()}

        def made(k: int, j: int, v: MatrixValue) -> jax.Array:
            x = homes[k][j] if v.home else self._unpacked(k, v, left[v.dtype], ends[k, j])
            return x if v.kept else all_gather(x, self.copies)[: self.kinds[k].count]

        return [
            [[*map(v.joined, jnp.split(made(k, j, v), len(kind.regions)))] for j, v in enumerate(kind.outs)]
            for k, kind in enumerate(self.kinds)
        ]

    def _share(self, kind: Kind, v: MatrixValue, pieces: jax.Array) -> jax.Array:
        """Those of this replica's matrices: [share, *piece]."""
        if v.kept or not self.copies:
            return pieces
        return jnp.take(pieces, index(self.copies) * kind.share + jnp.arange(kind.share), axis=0, mode="clip")

    def _packed(self, values: Sequence[tuple[int, jax.Array]], width: int) -> jax.Array:
        """A row for each owner, of its matrices' pieces: [ranks, width]."""
        parts = [jnp.split(x, np.cumsum(self.counts[k])[:-1]) for k, x in values]
        rows = [jnp.concatenate([x.ravel() for x in row]) for row in zip(*parts, strict=True)]
        return jnp.stack([jnp.pad(row, (0, width - row.size)) for row in rows])

    def _unpacked(self, kind: int, v: MatrixValue, rows: jax.Array, starts: Sequence[int]) -> jax.Array:
        """The reverse for one value: [matrices, *piece]."""
        parts = zip(rows, starts, self.counts[kind], strict=True)
        return jnp.concatenate([row[at : at + n * v.size] for row, at, n in parts]).reshape(-1, *v.piece)

    def _run(self, k: int, values: Any, carry: Any, to: str, starts: Any, ends: Any, me: Any) -> Any:
        """The program of a kind on each matrix of this rank: rows of both sides, and by output what stays."""
        kind, counts, program = self.kinds[k], self.counts[k], self.kinds[k].program
        fun = jx.run(program.eqns, (*program.constvars, *program.invars), program.outvars)
        mine = lambda numbers: jnp.asarray(numbers, jnp.int32)[me]
        first = index(self.copies) * kind.share + mine(np.cumsum((0, *counts[:-1])))

        def matrix(s: Any, carry: Any) -> Any:
            rows, own = {side: dict(of) for side, of in carry[0].items()}, dict(carry[1])
            args = []
            for j, (v, x, var) in enumerate(zip(kind.ins, values, program.invars, strict=True)):
                if v is None:
                    x = x[0] if len(x) == 1 else jnp.take(jnp.stack(x), first + s, axis=0, mode="clip")  # of each leaf
                elif v.home:
                    x = x[s]
                else:
                    at = mine(starts[k, j]) + s * v.size
                    x = v.whole(lax.dynamic_slice_in_dim(rows["ins"][v.dtype], at, v.size, axis=1), self.axes)
                args.append(x.reshape(var.aval.shape))
            for j, (v, x) in enumerate(zip(kind.outs, fun(*program.consts, *args), strict=True)):
                if v.home:
                    own[j] = own[j].at[s].set(x.reshape(v.piece))
                else:
                    at, row = mine(ends[k, j]) + s * v.size, v.cut(x, self.axes)
                    rows[to][v.dtype] = lax.dynamic_update_slice_in_dim(rows[to][v.dtype], row, at, axis=1)
            return rows, own

        if min(counts) == max(counts):
            return lax.fori_loop(0, counts[0], matrix, carry)
        paces = counts[int(np.argmax(self.flops))]  # whoever reads the program counts the busiest rank's
        with jax.named_scope(trip_counts.name_of(paces, paces, 1)):
            return lax.fori_loop(0, mine(counts), matrix, carry)
