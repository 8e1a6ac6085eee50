"""Assign each matrix of an optimizer to an owner: the rank that runs the optimizer's program on the whole matrix.

A matrix that is sharded over devices cannot be multiplied shard by shard. XLA's partitioner would gather it for every
product of Muon, Shampoo or SOAP. So each matrix gets one owner among the R ranks that shard it:

    at rest                    owner                              at rest
    [L, m, n/R]  ------->  [m, n], one after another  ------->  [L, m, n/R]
            one all-to-all                        one all-to-all

    bytes that a device sends for K matrices of S bytes
    R divides K         2 (R-1)/R K S/R
    otherwise           2 (R-1)/R W, with W the bytes of the owner with the largest share
    sharded by layer    0: each rank of a stage, or of some experts, has whole matrices
    C replicas          the above with ceil(K/C) instead of K, and (C-1)/C of C ceil(K/C) S/R

Assignment. A stack, or several matrices of one shape and program, whose number R divides, are dealt out evenly in a
separate exchange. All other matrices that the same axes shard share one exchange. The most expensive ones come first,
and each goes to the rank with the least work so far (Graham 1969; Shi et al. 2023, arXiv:2309.06497, do so for the
blocks of Shampoo).

At rest, only arrays of the optimizer that these programs alone read change their place. If their stack is dealt out
evenly, they live with its owners. Otherwise they are sharded like the rest of the state, and exchanged like matrices.

Replicas (along `data`; under ddp all devices) either repeat this work, or divide the matrices of each kind and gather
the results. The faster way is chosen, by FLOPs at the hardware's peak and by bytes over its links.

A `cond` that works on several leaves has owners within its branches, so that a branch that is not taken sends nothing.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from ...backend.machines import hosts_spanned
from ...backend.text import number
from ...collectives.order import Token
from ...hardware.hardware import of_device_kind
from ...hardware.links import Reach, collective_seconds
from ...layout.layout import Stored, is_stored
from ...layout.leaves import Leaf
from ...parallel.data.contract import Sent
from ...program import jaxpr as jx
from .matrices import Bundle, Kind, MatrixValue
from .whole_matrices import Region, UpdateProgram, flops_of, in_order, one_matrix, region_of


@dataclass(frozen=True)
class Owners:
    """The plan by which an update, or a branch of a `cond` in it, runs on whole matrices.

    Attributes:
      program: the update's program.
      order: its nodes, each after the nodes whose results it reads: equations, bundles of matrices that are exchanged
        together, and `cond`s, each a pair of its equation and the owners of its branches.
      notes: by path of a leaf, how it is owned, or why it is not.
      states: by number, the arrays of the optimizer's state that are stored differently because only these programs
        read them.
      repeated: FLOPs on each device for matrices without an owner.
    """

    program: UpdateProgram
    order: tuple[Any, ...]
    notes: dict[str, str]
    states: dict[int, MatrixValue]
    repeated: int

    @property
    def bundles(self) -> list[Bundle]:
        """The bundles that are exchanged; for a `cond`, the bundles of the branch with the most FLOPs."""
        bundles: list[Bundle] = []
        for node in self.order:
            if isinstance(node, Bundle):
                bundles.append(node)
            elif isinstance(node, tuple):
                bundles += max(node[1], key=lambda branch: branch.flops).bundles
        return bundles

    @property
    def flops(self) -> int:
        """FLOPs of products and factorisations of whole matrices on the busiest device."""
        return self.repeated + sum(max(bundle.flops) for bundle in self.bundles)

    @property
    def sends(self) -> list[Sent]:
        """The closed form of all exchanges of a step, to the owners and back."""
        return [sent for bundle in self.bundles for sent in bundle.sends()]

    def __str__(self) -> str:
        total_flops = self.repeated + sum(kind.flops * kind.total for bundle in self.bundles for kind in bundle.kinds)
        fraction = self.flops / max(1, total_flops)
        return f"{number(self.flops)}FLOP on the busiest device, {fraction:.3f} of all matrices'"

    def stored(self, places: Any) -> Any:
        """Return the places of the optimizer's arrays (`Layout.places`), with `states` stored for their owners."""
        flat, tree = jax.tree.flatten(places, is_leaf=is_stored)
        for i, value in self.states.items():
            # `_owned_states` admits arrays with at most one padded dim, which is all that a `Leaf` can pad.
            dim = next((d for d, n in enumerate(value.shape) if value.padded_shape[d] != n), None)
            leaf = None if dim is None else Leaf("", value.shape, flat[i].dtype, dim, value.padded_shape[dim])
            flat[i] = Stored(value.padded_shape, flat[i].dtype, value.spec, leaf)
        return jax.tree.unflatten(tree, flat)

    def __call__(self, mesh: Mesh, token: Token | None, *args: Any) -> tuple[list[Any], Token | None]:
        """Return the program's results for its arguments, and the token after its exchanges."""
        flat = self.program.flat
        env = jx.Environment.of(flat, args, jx.array_of)
        last = jnp.zeros(())
        for node in self.order:
            if isinstance(node, Bundle):
                values = [kind.read(env) for kind in node.kinds]
                if token is None:
                    # Bundles run one after the other, since each needs memory. On CPU the token orders them.
                    values, last = lax.optimization_barrier((values, last))
                results, token = node(values, mesh, token)
                env.update(results)
                # One element of these results, for which the next bundle's barrier waits.
                last = next(iter(results.values())).ravel()[0]
            elif isinstance(node, tuple):
                (eqn, branches), (which, *operands) = node, env.read(node[0].invars)
                outs, token = lax.switch(
                    which, [functools.partial(branch, mesh) for branch in branches], token, *operands
                )
                env.store(eqn, outs)
            else:
                env.store(node, jx.bind(node, env.read(node.invars)))
        return env.read(flat.outvars), token


class Dealer(NamedTuple):
    """Assigns the matrices of an update, or of a branch of a `cond` in it, to owners.

    Attributes:
      leaves: the model's own leaves, as the optimizer sees them.
      rest: for each leaf, the mesh axes of each of its dims at rest.
      mesh: the mesh.
    """

    leaves: Sequence[Leaf]
    rest: Sequence[tuple[tuple[str, ...], ...]]
    mesh: Mesh

    def __call__(self, program: UpdateProgram) -> Owners:
        """Return the owners of an update's matrices; without bundles if no leaf is sharded, or none may be moved."""
        eqns = program.flat.eqns
        branches_by_eqn = {
            id(eqns[k]): [self(branch) for branch in branches] for k, branches in program.branches.items()
        }
        all_branches = [branch for branches in branches_by_eqn.values() for branch in branches]
        notes = {path: note for branch in all_branches for path, note in branch.notes.items()}
        states = {i: value for branch in all_branches for i, value in branch.states.items()}
        alike = self._alike_regions(program, notes)
        bundles = self._choose_bundles(alike, notes)

        # Order equations, bundles and conditionals.
        conditionals: dict[int, Any] = {
            id(eqn): (eqn, branches_by_eqn[id(eqn)]) for eqn in eqns if id(eqn) in branches_by_eqn
        }
        owned = {id(eqn): bundle for bundle in bundles for region in bundle.regions for eqn in region.eqns}
        order = in_order(eqns, conditionals | owned)
        if order is None:
            # Two bundles need results of each other: neither can be exchanged at once.
            for bundle in bundles:
                notes |= self._note(bundle.regions, "as the layout keeps it: matrices need one another's updates")
            bundles, owned, order = [], {}, tuple(conditionals.get(id(eqn), eqn) for eqn in eqns)
        for bundle in bundles:
            notes |= self._note(bundle.regions, str(bundle))
            states |= {i: value for kind in bundle.kinds for i, value in _owned_states(kind)}

        # Count the FLOPs without owners. Ranks that shard a batch dim have a part of the matrices each.
        repeated = sum(max(branches, key=lambda branch: branch.flops).repeated for branches in branches_by_eqn.values())
        region_by_eqn = {id(eqn): region for region in itertools.chain(*alike) for eqn in region.eqns}
        # What is in no bundle and no `cond` runs on every rank that has its matrices.
        for eqn in (eqn for eqn in eqns if id(eqn) not in conditionals and id(eqn) not in owned):
            region = region_by_eqn.get(id(eqn))
            batch_axes = [self.rest[region.leaf][d] for d in region.batch] if region else []
            repeated += -(-flops_of([eqn]) // self._num_ranks(itertools.chain(*batch_axes)))
        return Owners(program, order, notes, states, repeated)

    def _alike_regions(self, program: UpdateProgram, notes: dict[str, str]) -> list[list[Region]]:
        """Group the regions of all leaves: single matrices of one program that are sharded alike, and each stack.

        Adds to `notes` the reason why a leaf has no region.
        """
        alike: list[list[Region]] = []
        for leaf in sorted({i for k, dims in enumerate(program.products) for i in dims if k not in program.branches}):
            region = region_of(program, leaf, self.leaves[leaf].shape)
            if isinstance(region, str):
                notes[self.leaves[leaf].path] = region
                continue
            candidates = (
                regions
                for regions in alike
                if self.rest[regions[0].leaf] == self.rest[leaf] and regions[0].has_same_program(region)
            )
            # A stack forms a separate group, because its matrices may be dealt out evenly.
            if (group := None if region.batch else next(candidates, None)) is None:
                alike.append([region])
            else:
                group.append(region)
        return alike

    def _choose_bundles(self, alike: Sequence[list[Region]], notes: dict[str, str]) -> list[Bundle]:
        """Bundle the matrices that the same axes shard, and choose the replicas that divide them: the fastest choice.

        Adds to `notes` why a leaf is in no bundle.
        """
        groups: dict[Any, list[tuple[list[Region], jx.Flat]]] = {}
        for regions in alike:
            if matrix_program := one_matrix(regions[0]):
                groups.setdefault(self._axes(regions[0]), []).append((regions, matrix_program))
            elif any(self.rest[regions[0].leaf]):
                notes |= self._note(regions, "as the layout keeps it: its program cannot take one matrix at a time")
        bundles: list[Bundle] = []
        for (axes, replica_axes), group in groups.items():
            # All subsets of the replica axes, the empty one first: then every replica repeats the work.
            copies_choices = [
                copies for n in range(len(replica_axes) + 1) for copies in itertools.combinations(replica_axes, n)
            ]
            for bundle in min((self._bundles(group, axes, copies) for copies in copies_choices), key=self._seconds):
                if bundle.copies or any(self.rest[bundle.regions[0].leaf]):
                    bundles.append(bundle)
                elif replica_axes:
                    notes |= self._note(
                        bundle.regions, f"whole on each rank of {'+'.join(replica_axes)}: computed by all"
                    )
        return bundles

    def _note(self, regions: Iterable[Region], text: str) -> dict[str, str]:
        """Return a note for the leaf of each region, by path."""
        return {self.leaves[region.leaf].path: text for region in regions}

    def _num_ranks(self, axes: Iterable[str]) -> int:
        """Return the number of ranks along some axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def _axes(self, region: Region) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the axes that shard each matrix of a leaf, and the axes along which ranks hold the same values."""
        axes_by_dim = self.rest[region.leaf]
        matrix_axes = {axis for d, axes in enumerate(axes_by_dim) if d not in region.batch for axis in axes}
        replica_axes = (
            axis for axis, n in self.mesh.shape.items() if n > 1 and not any(axis in axes for axes in axes_by_dim)
        )
        return tuple(axis for axis in self.mesh.shape if axis in matrix_axes), tuple(replica_axes)

    def _bundles(
        self, group: Sequence[tuple[list[Region], jx.Flat]], axes: tuple[str, ...], copies: tuple[str, ...]
    ) -> list[Bundle]:
        """Return the bundles of matrices that `axes` shard.

        Args:
          group: regions of one program each, with their program of one matrix.
          axes: the axes that shard the matrices.
          copies: the axes of replicas that divide the matrices of each kind; a single matrix cannot be divided.

        Returns:
          A bundle for each kind whose matrices are dealt out evenly; one for all others.
        """
        kinds_by_bundle: dict[Any, list[Kind]] = {}
        ranks = self._num_ranks(axes)
        for regions, matrix_program in group:
            region = regions[0]
            per_leaf = math.prod(
                -(-region.shape[d] // self._num_ranks(self.rest[region.leaf][d])) for d in region.batch
            )
            # Replicas cannot divide a single matrix: all of them compute it.
            divided_over = copies if per_leaf * len(regions) > 1 else ()
            ins, outs = (
                list[Any](self._value(region, v, axes, divided_over) for v in variables)
                for variables in (region.ins, region.outs)
            )
            num_replicas, flops = self._num_ranks(divided_over), flops_of(matrix_program.eqns)
            kind = Kind(tuple(regions), matrix_program, ins, outs, per_leaf, num_replicas, flops)
            # A kind that is dealt out evenly has an exchange for itself, whose rows need no padding.
            key = (divided_over, None if kind.share % ranks else region.leaf)
            kinds_by_bundle.setdefault(key, []).append(kind)
        return [
            Bundle(tuple(kinds), axes, divided_over, _deal_out(kinds, ranks))
            for (divided_over, _), kinds in kinds_by_bundle.items()
        ]

    def _seconds(self, bundles: Sequence[Bundle]) -> float:
        """Return the time of some bundles: FLOPs at the peak in TF32, and bytes at the links' bandwidths.

        If the peak of the devices is unknown, returns the FLOPs alone, which compare as well.
        """
        # Optimizers multiply float32 matrices, which run in TF32 where the hardware has it.
        hardware = of_device_kind(self.mesh.devices.flat[0].device_kind)
        flops = sum(max(bundle.flops) for bundle in bundles)
        sends = [sent for bundle in bundles for sent in bundle.sends()]
        if hardware is None or (peak := hardware.peak("tf32") or hardware.peak("f32")) is None:
            return flops
        ranks = {
            axes: (self._num_ranks(axes), hosts_spanned(self.mesh, axes)) for axes in {sent.axes for sent in sends}
        }
        reach = {axes: Reach(n, hosts, -(-n // hosts)) for axes, (n, hosts) in ranks.items()}
        return flops / peak + sum(
            collective_seconds(sent.kind, sent.bytes, reach[sent.axes], hardware)[0] for sent in sends
        )

    def _value(self, region: Region, var: Any, axes: tuple[str, ...], copies: tuple[str, ...]) -> MatrixValue | None:
        """Choose how a value of a region is stored at rest; return None if it belongs to no leaf.

        A value that other equations read too is stored like its leaf. A value that only the region reads may live with
        the replicas and the owners, if their number divides the stack. Otherwise it is sharded along its longest dim.
        """
        if var not in region.dims:
            return None
        axes_by_dim, shape, has_leaf_dims = self.rest[region.leaf], tuple(var.aval.shape), region.has_leaf_dims(var)
        value_axes = {region.find_dim(var, d) or 0: axes_by_dim[d] for d in region.batch}
        batch = tuple(value_axes)
        divides = lambda *over: (
            bool(batch) and region.shape[region.batch[0]] % self._num_ranks((*value_axes[batch[0]], *over)) == 0
        )
        # An array that the rest of the program reads must be where the leaf is.
        only_region_reads = var in region.state or not has_leaf_dims
        with_replica = bool(copies) and only_region_reads and divides(*copies)
        with_owner = not axes or (only_region_reads and divides(*copies, *axes))
        if with_replica or with_owner or not has_leaf_dims:
            # A number for each matrix gets an inner dim of size 1.
            shape = (*shape, 1) if len(batch) == len(shape) else shape
            matrix_dims = [d for d in range(len(shape)) if d not in batch]
            if batch:
                value_axes[batch[0]] = (*value_axes[batch[0]], *copies * with_replica, *axes * with_owner)
            # Without owners, the value is sharded along the leaf's own dims, or, if it has others, along the longest
            # one.
            if not with_owner:
                value_axes |= (
                    {d: axes_by_dim[d] for d in matrix_dims}
                    if has_leaf_dims
                    else {max(matrix_dims, key=lambda d: shape[d]): axes}
                )
            axes_by_dim = tuple(value_axes.get(d, ()) for d in range(len(shape)))
        return MatrixValue(shape, var.aval.dtype, axes_by_dim, batch, with_owner, with_replica, self.mesh.shape)


def _owned_states(kind: Kind) -> Iterator[tuple[int, MatrixValue]]:
    """Yield the arrays of the optimizer's state that are stored for a kind alone: with its owners, or unlike a leaf."""
    for region in kind.regions:
        for var, value in zip(region.ins, kind.ins, strict=True):
            if value is not None and var in region.state and value.shape == var.aval.shape:
                num_padded = sum(a != b for a, b in zip(value.padded_shape, value.shape, strict=True))
                if num_padded < 2 and (value.with_replica or value.with_owner or not region.has_leaf_dims(var)):
                    yield region.state[var], value


def _deal_out(kinds: Sequence[Kind], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return how many matrices of each kind each rank gets, dealt out as the module's docstring says."""
    # A kind without FLOPs counts as 1, so that its matrices are spread over the ranks too.
    load, counts = [0] * ranks, [[0] * ranks for _ in kinds]
    for k, kind in sorted(enumerate(kinds), key=lambda item: -item[1].flops):
        for _ in range(kind.share):
            rank = load.index(min(load))
            counts[k][rank] += 1
            load[rank] += max(1, kind.flops)
    return tuple(map(tuple, counts))
