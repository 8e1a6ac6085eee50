"""Owners of whole matrices: who runs an optimizer's program on which matrix, and what is sent for that.

A matrix that is spread over devices cannot be multiplied where it lies: left to the partitioner, every product of Muon,
Shampoo or SOAP gathers it. So each matrix has an owner among the R ranks that spread it:

    at rest                    owner                              at rest
    [L, m, n/R]  ------->  [m, n], one after another  ------->  [L, m, n/R]
            one all-to-all                        one all-to-all

    sent by a device, K matrices of S bytes
    R divides K         2 (R-1)/R K S/R
    dealt out           2 (R-1)/R W, with W the bytes of the owner that has most
    stacks by layer     0: each rank of a stage, or of some experts, has whole ones
    C replicas          K is ceil(K/C) in the lines above; and (C-1)/C of C ceil(K/C) S/R

Stacks, and matrices of one shape and program, whose number R divides are dealt out evenly, each in an exchange of its
own. All others that the same axes spread are dealt out together, those of most FLOPs first, each to the rank that has
least (Graham 1969; so does Shi et al. 2023, arXiv:2309.06497, with the blocks of Shampoo). What is at rest does not
change, but for arrays of the optimizer that these programs alone read: those of a stack that is dealt out evenly lie
with its owners, others are spread like the rest of the state and go there and back.

Ranks that hold the same (along `data`; under ddp all) repeat this, or divide the matrices of each kind among them and
gather the results: what takes less by FLOPs at the peak and bytes over the links, within a host or between hosts.

A `cond` that works on several leaves has owners within its branches: nothing is sent for a branch that is not taken.
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
    """How an update, or a branch of one, runs on whole matrices.

    Attributes:
      program: its program.
      order: each after what it reads: equations, matrices that are exchanged at once, and conditionals, each a pair of
        its equation and the owners of its branches.
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
    def bundles(self) -> list[Bundle]:
        """What is exchanged; of branches by the one that has most FLOPs."""
        found: list[Bundle] = []
        for node in self.order:
            if isinstance(node, Bundle):
                found.append(node)
            elif isinstance(node, tuple):
                found += max(node[1], key=lambda one: one.flops).bundles
        return found

    @property
    def flops(self) -> int:
        """Of whole matrices, on the busiest device."""
        return self.repeated + sum(max(bundle.flops) for bundle in self.bundles)

    @property
    def sends(self) -> list[Sent]:
        """What is sent there and back in a step."""
        return [sent for bundle in self.bundles for sent in bundle.sends()]

    def __str__(self) -> str:
        every = self.repeated + sum(kind.flops * kind.total for bundle in self.bundles for kind in bundle.kinds)
        return f"{number(self.flops)}FLOP on the busiest device, {self.flops / max(1, every):.3f} of all matrices'"

    def stored(self, places: Any) -> Any:
        """The places of the optimizer's arrays, with those that are kept for owners."""
        flat, tree = jax.tree.flatten(places, is_leaf=is_stored)
        for i, v in self.states.items():
            dim = next((d for d, n in enumerate(v.shape) if v.padded[d] != n), None)
            leaf = None if dim is None else Leaf("", v.shape, flat[i].dtype, dim, v.padded[dim])
            flat[i] = Stored(v.padded, flat[i].dtype, v.spec, leaf)
        return jax.tree.unflatten(tree, flat)

    def __call__(self, mesh: Mesh, token: Token | None, *args: Any) -> tuple[list[Any], Token | None]:
        """The program's results from its arguments, and the token after its exchanges."""
        flat = self.program.flat
        env = jx.Environment.of(flat, args, jx.array_of)
        last = jnp.zeros(())
        for node in self.order:
            if isinstance(node, Bundle):
                values = [kind.read(env) for kind in node.kinds]
                if token is None:  # one after the other, as each needs memory; on CPU the token sees to that
                    values, last = lax.optimization_barrier((values, last))
                made, token = node(values, mesh, token)
                env.update(made)
                last = next(iter(made.values())).ravel()[0]
            elif isinstance(node, tuple):
                (eqn, branches), (which, *operands) = node, env.read(node[0].invars)
                outs, token = lax.switch(which, [functools.partial(one, mesh) for one in branches], token, *operands)
                env.store(eqn, outs)
            else:
                env.store(node, jx.bind(node, env.read(node.invars)))
        return env.read(flat.outvars), token


class Dealer(NamedTuple):
    """Deals out the matrices of an update, or of a branch of one.

    Attributes:
      leaves: the model's own leaves, as the optimizer sees them.
      rest: the axes of each dim of theirs at rest.
      mesh: the devices.
    """

    leaves: Sequence[Leaf]
    rest: Sequence[tuple[tuple[str, ...], ...]]
    mesh: Mesh

    def __call__(self, program: UpdateProgram) -> Owners:
        """How it runs on whole matrices where leaves are spread; without bundles where none is, or may be moved."""
        eqns = program.flat.eqns
        inner = {id(eqns[k]): [self(one) for one in branches] for k, branches in program.branches.items()}
        notes = {path: why for branches in inner.values() for one in branches for path, why in one.notes.items()}
        states = {i: v for branches in inner.values() for one in branches for i, v in one.states.items()}
        alike: list[list[Region]] = []  # leaves without batch dims of one program, and others one by one
        for leaf in sorted({i for k, dims in enumerate(program.products) for i in dims if k not in program.branches}):
            region = region_of(program, leaf, self.leaves[leaf].shape)
            if isinstance(region, str):
                notes[self.leaves[leaf].path] = region
                continue
            same = (one for one in alike if self.rest[one[0].leaf] == self.rest[leaf] and one[0].alike(region))
            if (others := None if region.batch else next(same, None)) is None:
                alike.append([region])
            else:
                others.append(region)
        groups: dict[Any, list[tuple[list[Region], jx.Flat]]] = {}
        for regions in alike:
            if one := one_matrix(regions[0]):
                groups.setdefault(self._axes(regions[0]), []).append((regions, one))
            elif any(self.rest[regions[0].leaf]):
                notes |= self._named(regions, "as the layout keeps it: its program is none of one matrix after another")
        bundles: list[Bundle] = []
        for (axes, free), group in groups.items():
            ways = [copies for n in range(len(free) + 1) for copies in itertools.combinations(free, n)]
            for bundle in min((self._bundles(group, axes, copies) for copies in ways), key=self._seconds):
                if bundle.copies or any(self.rest[bundle.regions[0].leaf]):
                    bundles.append(bundle)
                elif free:
                    notes |= self._named(bundle.regions, f"whole on each rank of {'+'.join(free)}: computed by all")
        within: dict[int, Any] = {id(eqn): (eqn, inner[id(eqn)]) for eqn in eqns if id(eqn) in inner}
        owned = {id(eqn): bundle for bundle in bundles for one in bundle.regions for eqn in one.eqns}
        order = in_order(eqns, within | owned)
        if order is None:
            for bundle in bundles:
                notes |= self._named(bundle.regions, "as the layout keeps it: matrices need one another's updates")
            bundles, owned, order = [], {}, tuple(within.get(id(eqn), eqn) for eqn in eqns)
        for bundle in bundles:
            notes |= self._named(bundle.regions, str(bundle))
            states |= {i: v for kind in bundle.kinds for i, v in _states(kind)}
        repeated = sum(max(branches, key=lambda one: one.flops).repeated for branches in inner.values())
        stacks = {id(eqn): one for one in itertools.chain(*alike) for eqn in one.eqns}
        for eqn in (eqn for eqn in eqns if id(eqn) not in within and id(eqn) not in owned):
            at = [self.rest[one.leaf][d] for d in one.batch] if (one := stacks.get(id(eqn))) else []
            repeated += -(-flops_of([eqn]) // self._parts(itertools.chain(*at)))  # ranks of batch dims have a part each
        return Owners(program, order, notes, states, repeated)

    def _named(self, regions: Iterable[Region], why: str) -> dict[str, str]:
        return {self.leaves[region.leaf].path: why for region in regions}

    def _parts(self, axes: Iterable[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def _axes(self, region: Region) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes that spread a matrix of a leaf, and those along which ranks have the same ones."""
        rest = self.rest[region.leaf]
        spread = {axis for d, over in enumerate(rest) if d not in region.batch for axis in over}
        same = (axis for axis, n in self.mesh.shape.items() if n > 1 and not any(axis in over for over in rest))
        return tuple(axis for axis in self.mesh.shape if axis in spread), tuple(same)

    def _bundles(
        self, group: Sequence[tuple[list[Region], jx.Flat]], axes: tuple[str, ...], copies: tuple[str, ...]
    ) -> list[Bundle]:
        """Matrices that are spread alike; replicas divide all kinds but those of one matrix."""
        pools: dict[Any, list[Kind]] = {}
        ranks = self._parts(axes)
        for regions, one in group:
            region = regions[0]
            each = math.prod(-(-region.shape[d] // self._parts(self.rest[region.leaf][d])) for d in region.batch)
            over = copies if each * len(regions) > 1 else ()
            ins, outs = (list[Any](self._value(region, v, axes, over) for v in vs) for vs in (region.ins, region.outs))
            kind = Kind(tuple(regions), one, ins, outs, each, self._parts(over), flops_of(one.eqns))
            pools.setdefault((over, None if kind.share % ranks else region.leaf), []).append(kind)
        return [Bundle(tuple(kinds), axes, over, _dealt(kinds, ranks)) for (over, _), kinds in pools.items()]

    def _seconds(self, bundles: Sequence[Bundle]) -> float:
        """At the peak in TF32 and the links' bandwidths; of devices whose peak is not known the FLOPs alone."""
        hardware = of_device_kind(self.mesh.devices.flat[0].device_kind)
        flops, sent = sum(max(bundle.flops) for bundle in bundles), [x for bundle in bundles for x in bundle.sends()]
        if hardware is None or (peak := hardware.peak("tf32") or hardware.peak("f32")) is None:
            return flops
        ranks = {axes: (self._parts(axes), hosts_spanned(self.mesh, axes)) for axes in {x.axes for x in sent}}
        ways = {axes: Reach(n, hosts, -(-n // hosts)) for axes, (n, hosts) in ranks.items()}
        return flops / peak + sum(collective_seconds(x.kind, x.bytes, ways[x.axes], hardware)[0] for x in sent)

    def _value(self, region: Region, var: Any, axes: tuple[str, ...], copies: tuple[str, ...]) -> MatrixValue | None:
        """How a value of a region is kept: as its leaf; if no other reads it, by the replicas and the owners, as far as
        these are the ranks of even parts of a stack, or along its longest dim. None of what is no leaf's.
        """
        if var not in region.dims:
            return None
        own, shape, as_leaf = self.rest[region.leaf], tuple(var.aval.shape), region.as_leaf(var)
        at = {region.place(var, d) or 0: own[d] for d in region.batch}
        batch = tuple(at)
        divide = lambda *over: bool(batch) and region.shape[region.batch[0]] % self._parts((*at[batch[0]], *over)) == 0
        alone = var in region.state or not as_leaf
        kept, home = bool(copies) and alone and divide(*copies), not axes or (alone and divide(*copies, *axes))
        if kept or home or not as_leaf:
            shape = (*shape, 1) if len(batch) == len(shape) else shape
            inner = [d for d in range(len(shape)) if d not in batch]
            if batch:
                at[batch[0]] = (*at[batch[0]], *copies * kept, *axes * home)
            if not home:
                at |= {d: own[d] for d in inner} if as_leaf else {max(inner, key=lambda d: shape[d]): axes}
            own = tuple(at.get(d, ()) for d in range(len(shape)))
        return MatrixValue(shape, var.aval.dtype, own, batch, home, kept, self.mesh.shape)


def _states(kind: Kind) -> Iterator[tuple[int, MatrixValue]]:
    """The optimizer's arrays that a kind reads and that are not as their leaf, or lie with its owners."""
    for region in kind.regions:
        for var, v in zip(region.ins, kind.ins, strict=True):
            if v is not None and var in region.state and v.shape == var.aval.shape:
                padded = sum(a != b for a, b in zip(v.padded, v.shape, strict=True))
                if padded < 2 and (v.kept or v.home or not region.as_leaf(var)):
                    yield region.state[var], v


def _dealt(kinds: Sequence[Kind], ranks: int) -> tuple[tuple[int, ...], ...]:
    """How many of each kind each rank gets: those of most FLOPs first, each to the rank with least."""
    load, counts = [0] * ranks, [[0] * ranks for _ in kinds]
    for k, kind in sorted(enumerate(kinds), key=lambda item: -item[1].flops):
        for _ in range(kind.share):
            rank = load.index(min(load))
            counts[k][rank] += 1
            load[rank] += max(1, kind.flops)
    return tuple(map(tuple, counts))
