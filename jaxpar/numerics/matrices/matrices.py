"""Exchange a bundle of matrices: send their pieces to the owners, run the program of each matrix, send results back.

At rest, each of R ranks stores a piece [m, n/R] of every matrix, here of a stack of L. A row of W elements holds all
pieces that go to one owner, of all matrices in the bundle and of one dtype:

at rest, on a device           one row per owner                an owner, for each of its matrices
[L, m, n/R]    -- pack -->     [R, W]   -- all-to-all -->       [R, m, n/R]  -- assemble -->  [m, n]  -- program
                                                                                                          |
[L, m, n/R]    <-- unpack --   [R, W]   <-- all-to-all --       [R, m, n/R]  <-- disassemble  [m, n]  <---'

    MatrixValue   the layout of one value that the program reads or makes
    Kind          matrices with the same program
    Bundle        kinds that are exchanged together; calling it runs the picture above
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
from ...program.buffers import uninitialized
from .whole_matrices import Region


@dataclass(frozen=True)
class MatrixValue:
    """The layout of a value that the program of one matrix reads or makes, for all matrices of a leaf.

    Attributes:
      shape: the shape of the value for all matrices. A number per matrix has a last dim of 1.
      dtype: its dtype.
      axes: the mesh axes of each dim at rest.
      batch: its batch dims, in the order of the leaf's batch dims.
      with_owner: whether it lives with the owners; otherwise its pieces are sent to them.
      with_replica: whether a replica stores it for its own share of the matrices alone; otherwise for all matrices.
      sizes: the size of each mesh axis.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[tuple[str, ...], ...]
    batch: tuple[int, ...]
    with_owner: bool
    with_replica: bool
    sizes: Mapping[str, int] = field(repr=False)

    @property
    def matrix_dims(self) -> list[int]:
        """The dims of one matrix: all dims but the batch dims."""
        return [d for d in range(len(self.shape)) if d not in self.batch]

    @property
    def ranks_by_dim(self) -> list[int]:
        """The number of ranks over which each dim is sharded."""
        return [math.prod(self.sizes[axis] for axis in axes) for axes in self.axes]

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of a device's part, padding included."""
        return tuple(-(-n // ranks) for n, ranks in zip(self.shape, self.ranks_by_dim, strict=True))

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape at rest, padding included."""
        return tuple(n * ranks for n, ranks in zip(self.local, self.ranks_by_dim, strict=True))

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The shape of a device's piece of one matrix."""
        return tuple(self.local[d] for d in self.matrix_dims)

    @property
    def piece_size(self) -> int:
        """The number of elements of a device's piece of one matrix."""
        return math.prod(self.piece_shape)

    @property
    def spec(self) -> PartitionSpec:
        """The spec at rest."""
        return PartitionSpec(*(axes or None for axes in self.axes))

    def pad(self, x: jax.Array) -> jax.Array:
        """Pad the optimizer's array to [*padded_shape]."""
        return jnp.pad(x.reshape(self.shape), [(0, n - m) for n, m in zip(self.padded_shape, self.shape, strict=True)])

    def to_pieces(self, x: jax.Array) -> jax.Array:
        """Convert a device's part [*local] to its pieces of all matrices, [matrices, *piece_shape]."""
        return jnp.moveaxis(x, self.batch, range(len(self.batch))).reshape(-1, *self.piece_shape)

    def from_pieces(self, pieces: jax.Array) -> jax.Array:
        """Convert a device's pieces [matrices, *piece_shape] to its part [*local]; inverse of `to_pieces`."""
        x = pieces.reshape(*(self.local[d] for d in self.batch), *self.piece_shape)
        return jnp.moveaxis(x, range(len(self.batch)), self.batch)

    def _rank_dims(self, axes: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return how the pieces of all ranks make up one matrix.

        Returns:
          The shape of all pieces with one dim per axis, [*axes, *piece_shape]. And the order that puts the dims of the
          axes that shard a dim of the matrix directly before that dim.
        """
        # For each dim of the matrix: the axes that shard it, outermost first, and then its piece.
        order = [i for k, d in enumerate(self.matrix_dims) for i in (*map(axes.index, self.axes[d]), len(axes) + k)]
        return [*(self.sizes[axis] for axis in axes), *self.piece_shape], order

    def assemble(self, pieces: jax.Array, axes: Sequence[str]) -> jax.Array:
        """Return one matrix, without padding, from the pieces of all ranks along `axes`, [ranks, piece_size]."""
        shape, order = self._rank_dims(axes)
        # [*axes, *piece_shape] -> each dim of the matrix behind its axes -> the matrix, padded -> without padding.
        x = pieces.reshape(shape).transpose(order).reshape([self.padded_shape[d] for d in self.matrix_dims])
        return x[tuple(slice(self.shape[d]) for d in self.matrix_dims)]

    def disassemble(self, x: jax.Array, axes: Sequence[str]) -> jax.Array:
        """Return the pieces of all ranks, [ranks, piece_size], from one matrix; inverse of `assemble`."""
        shape, order = self._rank_dims(axes)
        x = x.reshape([self.shape[d] for d in self.matrix_dims])
        x = jnp.pad(x, [(0, self.padded_shape[d] - self.shape[d]) for d in self.matrix_dims])
        # `argsort` of a permutation is its inverse.
        return x.reshape([shape[i] for i in order]).transpose(np.argsort(order)).reshape(-1, self.piece_size)


@dataclass(frozen=True)
class Kind:
    """Matrices with the same program: all matrices of a stack, or of several leaves of one shape.

    Attributes:
      regions: the region of each leaf.
      program: the program of one matrix.
      ins, outs: the layouts of the values that the program reads and makes, the same for each leaf; None for a value
        that belongs to no leaf, such as a learning rate.
      per_leaf: the number of matrices of each leaf, among the ranks that deal them out.
      replicas: the number of replicas that divide the matrices among them.
      flops: FLOPs of one matrix.
    """

    regions: tuple[Region, ...]
    program: jx.Flat = field(repr=False)
    ins: Sequence[MatrixValue | None]
    outs: Sequence[MatrixValue]
    per_leaf: int
    replicas: int
    flops: int

    @property
    def count(self) -> int:
        """The number of matrices among the ranks that deal them out."""
        return self.per_leaf * len(self.regions)

    @property
    def share(self) -> int:
        """The number of matrices of one replica. If they do not divide evenly, the last matrices are repeated."""
        return -(-self.count // self.replicas)

    @property
    def total(self) -> int:
        """The number of matrices on all devices."""
        return sum(math.prod(region.shape[d] for d in region.batch) for region in self.regions)

    def read(self, env: Mapping[Any, Any]) -> list[list[jax.Array]]:
        """Return, for each input of the program, its padded value for every leaf.

        An input that belongs to no leaf and is the same variable for all leaves has one value.
        """
        values = []
        for layout, variables in zip(self.ins, zip(*(region.ins for region in self.regions), strict=True), strict=True):
            # A scalar may differ from leaf to leaf, as learning rates by leaf do.
            variables = variables if layout is not None or len({*variables}) > 1 else variables[:1]
            values.append([env[var] if layout is None else layout.pad(env[var]) for var in variables])
        return values

    def unpad_results(self, results: Sequence[Sequence[jax.Array]]) -> dict[Any, jax.Array]:
        """Return the value of each variable that the regions make, from each output's padded values for every leaf."""
        rows = zip(self.outs, results, *(region.outs for region in self.regions), strict=True)
        # Cut the padding off, and give up the last dim of 1 that a number per matrix has.
        unpad = lambda layout, x, var: x[tuple(map(slice, layout.shape))].reshape(var.aval.shape)
        return {
            var: unpad(layout, x, var)
            for layout, values, *variables in rows
            for var, x in zip(variables, values, strict=True)
        }


@dataclass(frozen=True)
class Bundle:
    """Matrices that are exchanged together.

    Attributes:
      kinds: the matrices and their programs.
      axes: the mesh axes that shard each matrix, outermost first. Their ranks are the owners.
      copies: the mesh axes of the replicas that divide the matrices among them.
      counts: for each kind, the number of matrices that each rank of `axes` owns, of its replica's share.
    """

    kinds: tuple[Kind, ...]
    axes: tuple[str, ...]
    copies: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def regions(self) -> list[Region]:
        """The regions of all kinds."""
        return [region for kind in self.kinds for region in kind.regions]

    @property
    def ranks(self) -> int:
        """The number of ranks of `axes`."""
        return len(self.counts[0])

    @property
    def flops(self) -> list[int]:
        """FLOPs of the matrices that each rank owns."""
        return [
            sum(kind.flops * n for kind, n in zip(self.kinds, rank_counts, strict=True))
            for rank_counts in zip(*self.counts, strict=True)
        ]

    def rows(self, side: str) -> tuple[dict[Any, int], dict[tuple[int, int], list[int]]]:
        """Return the layout of the rows that are exchanged.

        Args:
          side: "ins" for the rows that go to the owners, "outs" for those that come back.

        Returns:
          The width of the rows of each dtype: the elements of the fullest one. And for each value, by (number of the
          kind, number of the value), the offset of its first piece in each rank's row.
        """
        filled: dict[Any, list[int]] = {}  # elements so far, of each rank's row
        offsets: dict[tuple[int, int], list[int]] = {}
        for k, kind in enumerate(self.kinds):
            for j, layout in enumerate(getattr(kind, side)):
                if layout is not None and not layout.with_owner:
                    # Values with the owners are not sent, and scalars are known to all.
                    offsets[k, j] = filled.get(layout.dtype, [0] * self.ranks)
                    filled[layout.dtype] = [
                        start + n * layout.piece_size for start, n in zip(offsets[k, j], self.counts[k], strict=True)
                    ]
        return {dtype: max(row) for dtype, row in filled.items()}, offsets

    def sends(self) -> list[Sent]:
        """Return the closed form of the exchanges."""
        exchange = lambda dtype, width: Sent("all-to-all", self.axes, dtype, 1, self.ranks * width)
        exchanges = [exchange(*item) for side in ("ins", "outs") for item in self.rows(side)[0].items()]
        gathered = [
            (kind, layout) for kind in self.kinds for layout in kind.outs if self.copies and not layout.with_replica
        ]
        return exchanges + [
            Sent("all-gather", self.copies, layout.dtype, 1, kind.replicas * kind.share * layout.piece_size)
            for kind, layout in gathered
        ]

    def __str__(self) -> str:
        owners = f"{self.ranks} ranks of {'+'.join(self.axes)}"
        # The prefix is for divided matrices alone: times 0 it is empty.
        prefix = f"a share on each of {self.kinds[0].replicas} replicas of {'+'.join(self.copies)}, which gather all; "
        prefix *= bool(self.copies)
        if not self.axes:
            return prefix + "whole where they lie" + ": nothing is sent" * (not self.copies)
        if all(len({*rank_counts}) == 1 for rank_counts in self.counts):
            per_rank = self.counts[0][0]
            return f"{prefix}whole with their owners, {per_rank} on each of {owners}: one all-to-all there, one back"
        count, busiest = sum(kind.share for kind in self.kinds), max(self.flops) / max(1, sum(self.flops))
        matrices = "1 matrix" if count == 1 else f"{count} matrices"
        return f"{prefix}{matrices} dealt out by FLOPs over {owners}, the busiest has {busiest:.3f} of all"

    def __call__(self, values: Any, mesh: Mesh, token: Token | None) -> tuple[dict[Any, jax.Array], Token | None]:
        """Exchange the matrices and run their programs.

        Args:
          values: for each kind, what `Kind.read` returns.
          token: orders the collectives on CPU; None elsewhere.

        Returns:
          The value of each variable that the regions make, and the token after the exchanges.
        """
        replicated, local_fun = PartitionSpec(), order.in_order(self._local, mesh)
        out_specs = [[[layout.spec] * len(kind.regions) for layout in kind.outs] for kind in self.kinds]
        in_specs = [
            [
                [replicated if layout is None else layout.spec] * len(xs)
                for layout, xs in zip(kind.ins, kind_values, strict=True)
            ]
            for kind, kind_values in zip(self.kinds, values, strict=True)
        ]
        mapped = jax.shard_map(
            local_fun, mesh=mesh, in_specs=(replicated, in_specs), out_specs=(out_specs, replicated), check_vma=False
        )
        results, token = mapped(token, values)
        return {
            var: x
            for kind, kind_results in zip(self.kinds, results, strict=True)
            for var, x in kind.unpad_results(kind_results).items()
        }, token

    def _local(self, values: Any) -> Any:
        """Run the exchanges and the programs on one device, inside `shard_map`.

        Inputs and results are, for each kind and value, this device's part of the values of the leaves.
        """
        (in_widths, in_offsets), (out_widths, out_offsets) = self.rows("ins"), self.rows("outs")

        # 1. Cut the device's parts into pieces [share, *piece_shape], and keep the share of this replica.
        values = [
            [
                xs if layout is None else self._share(kind, layout, jnp.concatenate([layout.to_pieces(x) for x in xs]))
                for layout, xs in zip(kind.ins, kind_values, strict=True)
            ]
            for kind, kind_values in zip(self.kinds, values, strict=True)
        ]

        # 2. Pack one row per owner [ranks, width], and exchange them.
        packed = {
            dtype: self._pack([(k, values[k][j]) for k, j in in_offsets if values[k][j].dtype == dtype], width)
            for dtype, width in in_widths.items()
        }
        rows = {"ins": {dtype: all_to_all(x, self.axes) for dtype, x in packed.items()}}

        # 3. Run the programs. If outputs have the same row layout as inputs, each matrix overwrites its own pieces, so
        #    that no second buffer is needed.
        offsets_by_kind = [[(k, starts) for (k, _), starts in side.items()] for side in (in_offsets, out_offsets)]
        out_rows = "ins" if offsets_by_kind[0] == offsets_by_kind[1] and in_widths == out_widths else "outs"
        if out_rows == "outs":
            # Each rank writes the pieces of the matrices that it owns, and `_unpack` reads no others.
            rows["outs"] = {dtype: uninitialized((self.ranks, width), dtype) for dtype, width in out_widths.items()}
        rank, owned_results = index(self.axes), list[Any]()
        for k, kind in enumerate(self.kinds):
            # Arrays live with owners only if all ranks own equally many matrices: rank 0's number serves for all.
            owned = {
                j: uninitialized((self.counts[k][0], *layout.piece_shape), layout.dtype)
                for j, layout in enumerate(kind.outs)
                if layout.with_owner
            }
            rows, owned = self._run_matrices(k, values[k], (rows, owned), out_rows, in_offsets, out_offsets, rank)
            owned_results.append(owned)

        # 4. Exchange the results, unpack them, and gather the shares of all replicas.
        received = {dtype: all_to_all(x, self.axes) for dtype, x in rows[out_rows].items()}

        def result(k: int, j: int, layout: MatrixValue) -> jax.Array:
            if layout.with_owner:
                pieces = owned_results[k][j]
            else:
                pieces = self._unpack(k, layout, received[layout.dtype], out_offsets[k, j])
            # The last replicas repeat matrices if the shares do not divide evenly.
            return pieces if layout.with_replica else all_gather(pieces, self.copies)[: self.kinds[k].count]

        return [
            [
                [*map(layout.from_pieces, jnp.split(result(k, j, layout), len(kind.regions)))]
                for j, layout in enumerate(kind.outs)
            ]
            for k, kind in enumerate(self.kinds)
        ]

    def _share(self, kind: Kind, layout: MatrixValue, pieces: jax.Array) -> jax.Array:
        """Return the pieces of this replica's matrices, [share, *piece_shape], from the pieces of all."""
        if layout.with_replica or not self.copies:
            return pieces
        # "clip" repeats the last matrix where the shares of all replicas are more than the matrices.
        return jnp.take(pieces, index(self.copies) * kind.share + jnp.arange(kind.share), axis=0, mode="clip")

    def _pack(self, values: Sequence[tuple[int, jax.Array]], width: int) -> jax.Array:
        """Return one row per owner with the pieces of its matrices, [ranks, width].

        Args:
          values: (number of a kind, pieces [share, *piece_shape]) of each value.
          width: the elements of a row, to which shorter rows are padded.
        """
        # Matrices are owned in order: the first rank owns the first `counts[k][0]` of kind k.
        parts = [jnp.split(pieces, np.cumsum(self.counts[k])[:-1]) for k, pieces in values]
        rows = [jnp.concatenate([x.ravel() for x in rank_parts]) for rank_parts in zip(*parts, strict=True)]
        return jnp.stack([jnp.pad(row, (0, width - row.size)) for row in rows])

    def _unpack(self, kind: int, layout: MatrixValue, rows: jax.Array, offsets: Sequence[int]) -> jax.Array:
        """Return the pieces of one value, [share, *piece_shape], from the rows of all owners."""
        parts = zip(rows, offsets, self.counts[kind], strict=True)
        flat_pieces = [row[start : start + n * layout.piece_size] for row, start, n in parts]
        return jnp.concatenate(flat_pieces).reshape(-1, *layout.piece_shape)

    def _run_matrices(
        self, k: int, values: Any, carry: Any, out_rows: str, in_offsets: Any, out_offsets: Any, rank: Any
    ) -> Any:
        """Run the program of kind `k` on each matrix that this rank owns, one after the other.

        Args:
          values: the pieces of its inputs; arrays that live with the owner, and values that belong to no leaf.
          carry: (rows by side and dtype, results that live with the owner by output).
          out_rows: the side of the rows to which results are written, "ins" or "outs".
          in_offsets, out_offsets: from `rows`.
          rank: this rank's index along `axes`.

        Returns:
          The carry, with this kind's results written to it.
        """
        kind, counts, program = self.kinds[k], self.counts[k], self.kinds[k].program
        matrix_fun = jx.run(program.eqns, (*program.constvars, *program.invars), program.outvars)
        on_this_rank = lambda numbers: jnp.asarray(numbers, jnp.int32)[rank]
        # The number, among all matrices of the kind, of the first one that this rank owns.
        first_matrix = index(self.copies) * kind.share + on_this_rank(np.cumsum((0, *counts[:-1])))

        def run_matrix(i: Any, carry: Any) -> Any:
            rows, owned = {side: dict(by_dtype) for side, by_dtype in carry[0].items()}, dict(carry[1])
            args = []
            for j, (layout, x, var) in enumerate(zip(kind.ins, values, program.invars, strict=True)):
                if layout is None:
                    # The same value for all leaves, or one for each leaf.
                    x = x[0] if len(x) == 1 else jnp.take(jnp.stack(x), first_matrix + i, axis=0, mode="clip")
                elif layout.with_owner:
                    x = x[i]
                else:
                    start = on_this_rank(in_offsets[k, j]) + i * layout.piece_size
                    pieces = lax.dynamic_slice_in_dim(rows["ins"][layout.dtype], start, layout.piece_size, axis=1)
                    x = layout.assemble(pieces, self.axes)
                args.append(x.reshape(var.aval.shape))
            for j, (layout, x) in enumerate(zip(kind.outs, matrix_fun(*program.consts, *args), strict=True)):
                if layout.with_owner:
                    owned[j] = owned[j].at[i].set(x.reshape(layout.piece_shape))
                else:
                    start = on_this_rank(out_offsets[k, j]) + i * layout.piece_size
                    rows[out_rows][layout.dtype] = lax.dynamic_update_slice_in_dim(
                        rows[out_rows][layout.dtype], layout.disassemble(x, self.axes), start, axis=1
                    )
            return rows, owned

        # A loop keeps one whole matrix at a time in memory.
        if min(counts) == max(counts):
            return lax.fori_loop(0, counts[0], run_matrix, carry)
        # Ranks run different numbers of matrices. The name of the loop tells readers of the compiled program the number
        # of the busiest rank, which sets the pace.
        busiest_count = counts[int(np.argmax(self.flops))]
        with jax.named_scope(trip_counts.name_of(busiest_count, busiest_count, 1)):
            return lax.fori_loop(0, on_this_rank(counts), run_matrix, carry)
