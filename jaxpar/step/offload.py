"""Optimizer state and parameters that wait on the host, streamed through the update, a block at a time, in place.

    rest     the optimizer's program without what reads that state: norms over all gradients, counters, learning rates
    leaf     what makes a parameter and its moments anew, element by element, of these scalars
    block    a layer of a stack, or as many rows of it as have `BLOCK` bytes: copied to the device, updated there, and
             copied back to where it was

The loop over a leaf's blocks carries the host's own buffers, which XLA updates in place, by asynchronous copies, and
the next block of each. So that copies run both ways at once, the moments take turns, of Adam's two while block 0 and
then 1 is updated:

    to the device     mu of block 1    nu of block 1    mu of block 2    nu of block 2
    to the host       nu of block 0    mu of block 0    nu of block 1    mu of block 1

The device holds two blocks of each moment, and the host nothing twice. (The `xs` and `ys` of a scan are copied on the
host as well, and a whole leaf that is moved takes its size on the device.) A leaf begins when the one before is done.

ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840, section 4) keeps this state on the host and updates it there; as in
ZeRO-Infinity (Rajbhandari et al. 2021, arXiv:2104.07857) the device computes, of what is brought to it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from ..layout.layout import Layout, Stored, is_stored
from ..layout.leaves import PAD_FROM
from ..numerics.matrices.elementwise import traced_update
from ..program import jaxpr as jx
from ..program import primitives
from ..program.buffers import HOST, is_on_host, on_device

BLOCK = 64 << 20  # bytes: 1.4 ms at 48 GB/s, beside which what an iteration costs is little


class _Leaf(NamedTuple):
    """One leaf's part of a program: its equations and results, and the scalars that they read."""

    eqns: list[Any]
    outs: list[Any]
    scalars: list[Any]

    def __call__(self, arrays: dict[Any, jax.Array], scalars: Sequence[jax.Array], shape: Any) -> list[jax.Array]:
        """The results, of blocks of this shape, by variable, and of scalars."""
        env = jx.Environment(arrays | dict(zip(self.scalars, scalars, strict=True)), jx.array_of)
        spread = lambda eqn, operands: [jnp.broadcast_to(operands[0], shape)]
        for eqn in self.eqns:
            results = spread if eqn.primitive.name == "broadcast_in_dim" else jx.bind
            env.store(eqn, results(eqn, env.read(eqn.invars)))
        return env.read(self.outs)


class _Program(NamedTuple):
    """A program, split: what each leaf with state on the host has of it; and the equations of its other results, which
    are at positions `rest`, and of the scalars that leaves read: `outs` are both.
    """

    flat: jx.Flat
    leaves: dict[int, _Leaf]
    rest: list[int]
    eqns: list[Any]
    outs: list[Any]

    def others(self, values: Sequence[Any]) -> tuple[dict[int, Any], dict[Any, Any]]:
        """Of inputs, None where they are on the host: the other results, and the scalars."""
        there = dict(zip((*self.flat.constvars, *self.flat.invars), (*self.flat.consts, *values), strict=True))
        read, n = jx.free(self.eqns, self.outs), len(self.rest)
        found = jx.run(self.eqns, read, self.outs)(*(there[v] for v in read))
        return dict(zip(self.rest, found[:n], strict=True)), dict(zip(self.outs[n:], found[n:], strict=True))


@dataclass(frozen=True, eq=False)
class Streams:
    """How an optimizer's state is made and updated where some of it is on the host.

    Attributes:
      layout: of the state.
      params: the places of those that the optimizer sees.
      held: for each leaf of these that is on the host or has state there, by its position, which arrays of the state
        are like it.
      first, update: the optimizer's two programs.
    """

    layout: Layout
    params: list[Stored]
    held: dict[int, list[int]]
    first: _Program
    update: _Program

    @property
    def _places(self) -> list[Stored]:
        return jax.tree.leaves(self.layout.optimizer, is_leaf=is_stored)

    def init(self, params: Any) -> Any:
        """The first state as it is stored, from the parameters that the optimizer sees, unpadded."""
        values, places = jax.tree.leaves(params), self._places
        rest, scalars = self.first.others(values)
        new = {at: places[at].pad(x) for at, x in rest.items()}
        last: Any = ()
        for i, leaf in self.first.leaves.items():
            at = self.held[i]

            def fun(blocks: Any, of: Any, shape: Any, leaf: _Leaf = leaf, var: Any = self.first.flat.invars[i]) -> Any:
                return leaf({var: blocks[0]}, of, shape)

            value, last = lax.optimization_barrier((values[i], last))
            of, begins = [scalars[v] for v in leaf.scalars], [places[j].dtype for j in at]
            last = self._streamed(fun, places[at[0]], value, [], of, begins)
            new.update(zip(at, last, strict=True))
        return self._state(new)

    def __call__(self, params: Any, grads: Any, state: Any, loss: jax.Array, applied: Any) -> tuple[Any, Any]:
        """The next step's parameters, as they are given, and state, as it is stored.

        Args:
          params, grads: in the tree that the optimizer sees, unpadded.
          state: as it is stored.
          loss: the optimizer's `value`.
          applied: bool scalar, whether the step is; None where it always is.
        """
        values, tree = jax.tree.flatten(params)
        slopes, arrays, places, n = jax.tree.leaves(grads), jax.tree.leaves(state), self._places, len(values)
        there = [None if place.host else place.unpad(x) for place, x in zip(places, arrays, strict=True)]
        here = [None if place.host else x for place, x in zip(self.params, values, strict=True)]
        rest, scalars = self.update.others([*here, *slopes, *there, loss])
        new = {at: kept(applied, optax.apply_updates(values[at], x), values[at]) for at, x in rest.items() if at < n}
        moments = {at - n: kept(applied, places[at - n].pad(x), arrays[at - n]) for at, x in rest.items() if at >= n}
        last: Any = ()
        for i, at in self.held.items():
            leaf = self.update.leaves[i]
            order = [self.update.flat.invars[j] for j in (n + i, i, *(2 * n + j for j in at))]

            def fun(blocks: Any, of: Any, shape: Any, leaf: _Leaf = leaf, order: Any = order) -> Any:
                (of, applied), (_, *old) = of, blocks
                change, *state = leaf(dict(zip(order, blocks, strict=True)), of, shape)
                return kept(applied, [optax.apply_updates(old[0], change), *state], old)

            held, last = lax.optimization_barrier(([arrays[j] for j in at], last))
            of = [scalars[v] for v in leaf.scalars], applied
            place = places[at[0]] if at else self.params[i]
            last = self._streamed(fun, place, slopes[i], [values[i], *held], of)
            new[i] = place.unpad(last[0])
            moments.update(zip(at, last[1:], strict=True))
        return jax.tree.unflatten(tree, [new[i] for i in range(n)]), self._state(moments)

    def _state(self, arrays: dict[int, Any]) -> Any:
        tree = jax.tree.structure(self.layout.optimizer, is_leaf=is_stored)
        return jax.tree.unflatten(tree, [arrays[at] for at in range(len(arrays))])

    def _streamed(
        self, fun: Any, place: Stored, given: Any, carried: Any, scalars: Any, begins: Sequence[Any] = ()
    ) -> list[Any]:
        """`fun(blocks of what is given and carried, scalars, their shape)` of all blocks, in the place of what is
        carried: arrays as `place` has them, or on the host what `begins`, of these dtypes.

        Every device has its own shard; nothing is communicated.
        """

        def local(given: Any, carried: Sequence[Any], scalars: Any) -> list[Any]:
            begun = [jax.device_put(lax.empty(given.shape, dtype), HOST) for dtype in begins]
            of = lambda blocks, shape: fun(blocks, scalars, shape)
            return _over_blocks(of, given, [*carried, *begun], reads=not begins)

        ins, spec = (place.spec, place.spec, PartitionSpec()), place.spec
        mapped = jax.shard_map(local, mesh=self.layout.mesh, in_specs=ins, out_specs=spec, check_vma=False)
        return mapped(place.pad(given), [place.pad(x) for x in carried], scalars)


def kept(applied: Any, new: Any, old: Any) -> Any:
    """The new tree where a step is applied, else the old one; `applied` None: it always is."""
    return new if applied is None else jax.tree.map(lambda a, b: jnp.where(applied, a, b), new, old)


def _over_blocks(
    fun: Callable[[list[Any], Any], list[Any]], given: Any, carried: Sequence[Any], reads: bool
) -> list[Any]:
    """`fun` of blocks of arrays of one shape, what is given and what is carried, in the place of what is carried, which
    without `reads` begins.
    """
    blocks = Blocks.of(given.shape, max(x.dtype.itemsize for x in (given, *carried)))
    fetched = lambda x, number: blocks.take(x, number) if reads and is_on_host(x) else None

    def updated(number: Any, carried: Sequence[Any], ahead: Sequence[Any]) -> list[Any]:
        old = [blocks.take(x, number) if y is None else y for x, y in zip(carried, ahead, strict=True)]
        return fun([blocks.take(given, number), *(old if reads else [])], blocks.block)

    def body(number: Any, state: Any) -> Any:
        ahead, after = [], []
        for at, (x, y) in enumerate(zip(state[0], updated(number, *state), strict=True)):
            block = None
            if at % 2 == 0 and is_on_host(x):  # what reads and what writes one buffer runs as it stands here
                x, block = lax.optimization_barrier((x, fetched(x, number + 1)))
            after.append(blocks.put(x, y, number))
            ahead.append(fetched(after[-1], number + 1) if at % 2 else block)
        return after, ahead

    last, ahead = blocks.count - 1, [fetched(x, 0) for x in carried]
    carried, ahead = lax.fori_loop(0, last, body, (list(carried), ahead))
    return [blocks.put(x, y, last) for x, y in zip(carried, updated(last, carried, ahead), strict=True)]


@dataclass(frozen=True)
class Blocks:
    """Blocks of arrays of one shape, in order: the largest of at most `BLOCK` bytes that divide it; each lies in one
    piece.
    """

    shape: tuple[int, ...]
    block: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], itemsize: int) -> Self:
        """Of arrays whose elements have at most so many bytes."""
        block = list(shape)
        for dim, n in enumerate(shape):
            rest = itemsize * math.prod(shape[dim + 1 :])
            block[dim] = max((d for d in range(1, n + 1) if n % d == 0 and d * rest <= BLOCK), default=1)
            if block[dim] > 1 or rest <= BLOCK:
                break
        return cls(tuple(shape), tuple(block))

    @property
    def grid(self) -> list[int]:
        """How many there are along each dim."""
        return [n // b for n, b in zip(self.shape, self.block, strict=True)]

    @property
    def count(self) -> int:
        """How many there are."""
        return math.prod(self.grid)

    def at(self, number: Any) -> list[jax.Array]:
        """Where a block begins."""
        return [i * b for i, b in zip(jnp.unravel_index(number, self.grid), self.block, strict=True)]

    def take(self, x: jax.Array, number: Any) -> jax.Array:
        """A block of an array, on the device."""
        return on_device(lax.dynamic_slice(x, self.at(number), self.block))

    def put(self, x: jax.Array, block: jax.Array, number: Any) -> jax.Array:
        """The array with a block of it anew."""
        block = jax.device_put(block, HOST) if is_on_host(x) else block
        return lax.dynamic_update_slice(x, block, self.at(number))


def streams(
    optimizer: Any, layout: Layout, offloads: Sequence[str], as_stacked: bool, multiplies: bool
) -> Streams | None:
    """How an optimizer's state and the parameters that it sees are streamed; None where none of them is on the host.

    Args:
      offloads: what `Strategy.offload` sums.
      as_stacked, multiplies: whether the optimizer sees leaves as a step keeps them, and multiplies matrices.

    Raises ValueError where some are and the optimizer does not work element by element, or nothing is large enough.
    """
    places = jax.tree.leaves(layout.optimizer, is_leaf=is_stored)
    every: list[Stored] = jax.tree.leaves(layout.places("params"), is_leaf=is_stored)
    if "params" in offloads and not any(place.host for place in every):
        raise ValueError(
            f"offload='params' moves stacks of layers of {PAD_FROM:,} elements or more, and this model has none; scan "
            "the layers (nnx.scan, nn.scan, jax.lax.scan), or leave 'params' out"
        )
    mine = [place for place, leaf in zip(every, layout.leaves, strict=True) if leaf.trainable]
    if not any(place.host for place in mine) and "optimizer" not in offloads:
        return None
    if multiplies or not as_stacked:
        raise ValueError(_refused("it multiplies matrices" if multiplies else "it looks at each layer by itself"))
    if "optimizer" in offloads and not any(place.host for place in places):
        raise ValueError(
            f"offload='optimizer' moves state like a parameter's, of {PAD_FROM:,} elements or more, and this optimizer "
            "has none; leave 'optimizer' out"
        )
    seen, params = layout.storage.seen(as_stacked)
    paths, n = [leaf.path for leaf in seen], len(seen)
    there = {place.leaf.path for place in (*mine, *places) if place.leaf is not None and place.host}
    own = [i if path in there else None for i, path in enumerate(paths)]
    homes = [None if place.leaf is None else own[paths.index(place.leaf.path)] for place in places]
    held = {i: [j for j, home in enumerate(homes) if home == i] for i in own if i is not None}
    begun = [home if place.host else None for home, place in zip(homes, places, strict=True)]
    first = _split(jx.trace(optimizer.init, params)[0], own, begun, set(), paths)
    _, update, _ = traced_update(optimizer, params)
    inputs = zip(update.invars, [*mine, *([None] * n), *places, None], strict=True)
    hidden = {v for v, place in inputs if place is not None and place.host}
    update = _split(update, [*own, *own, *homes, None], [*own, *homes], hidden, paths)
    return Streams(layout, mine, held, first, update)


def _split(flat: jx.Flat, ins: Sequence[Any], outs: Sequence[Any], hidden: set[Any], paths: Sequence[str]) -> _Program:
    """A program whose inputs and results are leaves', by position (None: of none), some inputs hidden on the host."""
    home = dict(zip(flat.invars, ins, strict=True))
    every = (*flat.invars, *flat.constvars, *(v for eqn in flat.eqns for v in eqn.outvars))
    scalars = {v for v in every if not v.aval.shape}
    leaves: dict[int, _Leaf] = {}
    for i in dict.fromkeys(i for i in outs if i is not None):
        results = [v for v, of in zip(flat.outvars, outs, strict=True) if of == i]
        eqns = jx.needed(flat.eqns, results, scalars)
        read = jx.free(eqns, results)
        leaves[i] = _Leaf(eqns, results, [v for v in read if v in scalars])
        if any(home.get(v) != i for v in read if v not in scalars):
            raise ValueError(_refused(f"what becomes of {paths[i]} depends on other arrays"))
        for eqn in eqns:
            spread = eqn.primitive.name == "broadcast_in_dim" and not eqn.invars[0].aval.shape
            shapes = {v.aval.shape for v in (*eqn.invars, *eqn.outvars)} - {()}
            if not spread and not (primitives.of(eqn).elementwise and len(shapes) == 1):
                raise ValueError(_refused(f"of {paths[i]} it takes {eqn.primitive.name}"))
    rest = [at for at, of in enumerate(outs) if of is None]
    read = dict.fromkeys(v for leaf in leaves.values() for v in leaf.scalars)
    others = [*(flat.outvars[at] for at in rest), *read]
    eqns = jx.needed(flat.eqns, others)
    if found := [home[v] for v in jx.free(eqns, others) if v in hidden]:
        raise ValueError(_refused(f"a number is made of all of {paths[found[0]]} or its moments"))
    return _Program(flat, leaves, rest, eqns, others)


def _refused(why: str) -> str:
    return (
        "offload='optimizer' or 'params' brings what an update reads to the device a block at a time, and this "
        f"optimizer does not work element by element: {why}; use one that does, as optax.adamw, or leave it out"
    )
