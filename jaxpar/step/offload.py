"""Optimizer state and parameters that rest on the host and stream through the update, block by block, in place.

The optimizer's program is split by leaf (`_split`):

    global part   everything that does not read arrays on the host: norms over all gradients, counters, learning rates
    leaf part     elementwise equations that update one parameter and its moments, from the scalars of the global part

The leaf part runs on blocks. A block is one layer of a stack, or as many of its rows as fit in `BLOCK` bytes. It is
copied to the device, updated there, and copied back to its place.

The loop over the blocks of a leaf carries the host's own buffers, which XLA updates in place by asynchronous copies,
and the next block of each array. The moments alternate, so that copies run in both directions at once. For the two
moments of Adam, while block 0 and then block 1 is updated:

    to the device     mu of block 1    nu of block 1    mu of block 2    nu of block 2
    to the host       nu of block 0    mu of block 0    nu of block 1    mu of block 1

The device holds two blocks of each moment, and the host stores nothing twice. Two simpler forms cost more memory: the
`xs` and `ys` of a scan are copied on the host too, and a leaf that is moved at once takes its size on the device. A
leaf begins when the one before it is done.

ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840, section 4) keeps this state on the host and updates it there. As in
ZeRO-Infinity (Rajbhandari et al. 2021, arXiv:2104.07857), here the device computes.
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
from ..program.buffers import HOST, is_on_host, on_device, uninitialized

BLOCK = 64 << 20  # bytes: 1.4 ms at 48 GB/s, which hides the fixed cost of an iteration


class _LeafProgram(NamedTuple):
    """The leaf part of a program for one leaf.

    Attributes:
      eqns: its elementwise equations.
      outs: the variables that they compute for the program's results.
      scalars: the scalar variables that they read from the global part.
    """

    eqns: list[Any]
    outs: list[Any]
    scalars: list[Any]

    def __call__(self, arrays: dict[Any, jax.Array], scalars: Sequence[jax.Array], shape: Any) -> list[jax.Array]:
        """Return the results for one block.

        Args:
          arrays: variable -> block, all of one shape.
          scalars: the values of `self.scalars`.
          shape: the shape of the blocks.
        """
        env = jx.Environment(arrays | dict(zip(self.scalars, scalars, strict=True)), jx.array_of)
        # A scalar is broadcast to the shape of the block, where the equation names the shape of the whole leaf.
        broadcast = lambda eqn, operands: [jnp.broadcast_to(operands[0], shape)]
        for eqn in self.eqns:
            results = broadcast if eqn.primitive.name == "broadcast_in_dim" else jx.bind
            env.store(eqn, results(eqn, env.read(eqn.invars)))
        return env.read(self.outs)


class _Program(NamedTuple):
    """A program of the optimizer, split into a global part and one part for each leaf with arrays on the host.

    Attributes:
      flat: the program.
      leaves: the leaf parts, by position of the leaf among those that the optimizer sees.
      global_results: the positions of the results that the global part computes.
      eqns: the equations of the global part.
      outs: the variables that it computes: first these results, then the scalars that leaf parts read.
    """

    flat: jx.Flat
    leaves: dict[int, _LeafProgram]
    global_results: list[int]
    eqns: list[Any]
    outs: list[Any]

    def run_global(self, values: Sequence[Any]) -> tuple[dict[int, Any], dict[Any, Any]]:
        """Run the global part.

        Args:
          values: the program's inputs; None for an array on the host, which the global part does not read.

        Returns:
          position -> result, and scalar variable -> value.
        """
        inputs = dict(zip((*self.flat.constvars, *self.flat.invars), (*self.flat.consts, *values), strict=True))
        free_vars, n = jx.free(self.eqns, self.outs), len(self.global_results)
        results = jx.run(self.eqns, free_vars, self.outs)(*(inputs[v] for v in free_vars))
        return (
            dict(zip(self.global_results, results[:n], strict=True)),
            dict(zip(self.outs[n:], results[n:], strict=True)),
        )


@dataclass(frozen=True, eq=False)
class Streams:
    """The plan by which an optimizer's state is made and updated if some of it, or of the parameters, is on the host.

    Attributes:
      layout: the layout of the state.
      params: how the parameters that the optimizer sees are stored.
      moments: for each leaf with arrays on the host, by position among `params`: the positions of the state's arrays
        that mirror it.
      init_program, update_program: the optimizer's two programs.
    """

    layout: Layout
    params: list[Stored]
    moments: dict[int, list[int]]
    init_program: _Program
    update_program: _Program

    @property
    def _places(self) -> list[Stored]:
        """How each array of the optimizer's state is stored."""
        return jax.tree.leaves(self.layout.optimizer, is_leaf=is_stored)

    def init(self, params: Any) -> Any:
        """Return the first state as it is stored, from the unpadded parameters that the optimizer sees."""
        values, places = jax.tree.leaves(params), self._places
        # 1. The arrays of the state that stay on the device, such as counters.
        global_results, scalars = self.init_program.run_global(values)
        arrays = {k: places[k].pad(x) for k, x in global_results.items()}
        # 2. The arrays on the host, one leaf after the other.
        previous: Any = ()
        for i, leaf in self.init_program.leaves.items():
            members = self.moments[i]

            def init_block(
                blocks: Any,
                scalars: Any,
                shape: Any,
                leaf: _LeafProgram = leaf,
                var: Any = self.init_program.flat.invars[i],
            ) -> Any:
                return leaf({var: blocks[0]}, scalars, shape)

            # The barrier makes one leaf wait for the leaf before, so that the device holds blocks of one leaf only.
            value, previous = lax.optimization_barrier((values[i], previous))
            leaf_scalars, dtypes = [scalars[v] for v in leaf.scalars], [places[k].dtype for k in members]
            previous = self._stream(init_block, places[members[0]], value, [], leaf_scalars, dtypes)
            arrays.update(zip(members, previous, strict=True))
        return self._state(arrays)

    def __call__(self, params: Any, grads: Any, state: Any, loss: jax.Array, applied: Any) -> tuple[Any, Any]:
        """Update parameters and state.

        Args:
          params, grads: in the tree that the optimizer sees, unpadded.
          state: the optimizer's state, as it is stored.
          loss: the optimizer's `value`.
          applied: bool scalar, whether the step is applied; None means always.

        Returns:
          The new parameters, as `params` are given; and the new state, as it is stored.
        """
        values, tree = jax.tree.flatten(params)
        slopes, arrays, places, n = jax.tree.leaves(grads), jax.tree.leaves(state), self._places, len(values)
        program = self.update_program

        # 1. The global part. Its inputs are parameters, gradients, state and loss, None for those on the host; the
        # first n results are changes of parameters, the others arrays of the state.
        device_arrays = [None if place.host else place.unpad(x) for place, x in zip(places, arrays, strict=True)]
        device_params = [None if place.host else x for place, x in zip(self.params, values, strict=True)]
        results, scalars = program.run_global([*device_params, *slopes, *device_arrays, loss])
        new_params = {
            k: where_applied(applied, optax.apply_updates(values[k], x), values[k]) for k, x in results.items() if k < n
        }
        new_arrays = {
            k - n: where_applied(applied, places[k - n].pad(x), arrays[k - n]) for k, x in results.items() if k >= n
        }

        # 2. The leaf parts, one leaf after the other.
        previous: Any = ()
        for i, members in self.moments.items():
            leaf = program.leaves[i]
            # The variables of the gradient, the parameter and its moments, in the order of the blocks.
            inputs = [program.flat.invars[j] for j in (n + i, i, *(2 * n + k for k in members))]

            def update_block(
                blocks: Any, args: Any, shape: Any, leaf: _LeafProgram = leaf, inputs: Any = inputs
            ) -> Any:
                (scalars, applied), (_, *old) = args, blocks  # the first block is of the gradient
                change, *moments = leaf(dict(zip(inputs, blocks, strict=True)), scalars, shape)
                return where_applied(applied, [optax.apply_updates(old[0], change), *moments], old)

            # A leaf waits for the leaf before, as in `init`.
            moments, previous = lax.optimization_barrier(([arrays[k] for k in members], previous))
            args = [scalars[v] for v in leaf.scalars], applied
            place = places[members[0]] if members else self.params[i]
            previous = self._stream(update_block, place, slopes[i], [values[i], *moments], args)
            new_params[i] = place.unpad(previous[0])
            new_arrays.update(zip(members, previous[1:], strict=True))
        return jax.tree.unflatten(tree, [new_params[i] for i in range(n)]), self._state(new_arrays)

    def _state(self, arrays: dict[int, Any]) -> Any:
        """Return the state's tree, from its arrays by position."""
        tree = jax.tree.structure(self.layout.optimizer, is_leaf=is_stored)
        return jax.tree.unflatten(tree, [arrays[k] for k in range(len(arrays))])

    def _stream(
        self, fun: Any, place: Stored, constant: Any, carried: Any, args: Any, dtypes: Sequence[Any] = ()
    ) -> list[Any]:
        """Apply a function to every block of some arrays, each device to its own shards. Nothing is communicated.

        The new arrays are stored as `place` says.

        Args:
          fun: `fun(blocks, args, shape of a block)`, the blocks of `constant` and of `carried`; it returns the new
            blocks of `carried`, or of `dtypes`.
          place: how all these arrays are stored.
          constant: an array that is only read.
          carried: arrays that are updated in place.
          args: arrays that every block needs whole, such as scalars.
          dtypes: instead of `carried`, the dtypes of arrays that are made, on the host.
        """

        def local(constant: Any, carried: Sequence[Any], args: Any) -> list[Any]:
            # Uninitialised host memory for the first state, every block of which is written.
            empty = [jax.device_put(uninitialized(constant.shape, dtype), HOST) for dtype in dtypes]
            on_blocks = lambda blocks, shape: fun(blocks, args, shape)
            return _over_blocks(on_blocks, constant, [*carried, *empty], reads=not dtypes)

        ins, spec = (place.spec, place.spec, PartitionSpec()), place.spec
        mapped = jax.shard_map(local, mesh=self.layout.mesh, in_specs=ins, out_specs=spec, check_vma=False)
        return mapped(place.pad(constant), [place.pad(x) for x in carried], args)


def where_applied(applied: Any, new_tree: Any, old_tree: Any) -> Any:
    """Return the new tree if a step is applied, else the old one; `applied` None means always."""
    return new_tree if applied is None else jax.tree.map(lambda a, b: jnp.where(applied, a, b), new_tree, old_tree)


def _over_blocks(
    fun: Callable[[list[Any], Any], list[Any]], constant: Any, carried: Sequence[Any], reads: bool
) -> list[Any]:
    """Apply a function to all blocks of one device's arrays, and update `carried` in place.

    Args:
      fun: `fun(blocks, shape of a block)` -> new blocks of `carried`. Its blocks are of `constant`, then of `carried`.
      constant: an array that is only read, of the same shape as all others.
      carried: the arrays that are updated.
      reads: whether `fun` reads `carried`; if not, they are empty so far.
    """
    # All arrays have the same blocks, sized for the widest dtype.
    blocks = Blocks.of(constant.shape, max(x.dtype.itemsize for x in (constant, *carried)))
    fetch = lambda x, number: blocks.take(x, number) if reads and is_on_host(x) else None

    def new_blocks(number: Any, carried: Sequence[Any], prefetched: Sequence[Any]) -> list[Any]:
        old = [blocks.take(x, number) if y is None else y for x, y in zip(carried, prefetched, strict=True)]
        return fun([blocks.take(constant, number), *(old if reads else [])], blocks.block)

    def body(number: Any, state: Any) -> Any:
        prefetched, updated = [], []
        for k, (x, y) in enumerate(zip(state[0], new_blocks(number, *state), strict=True)):
            block = None
            # Even arrays fetch their next block before they write this one, odd arrays after: copies then run in both
            # directions at once. XLA orders reads and writes of one buffer as the barrier puts them.
            if k % 2 == 0 and is_on_host(x):
                x, block = lax.optimization_barrier((x, fetch(x, number + 1)))
            updated.append(blocks.put(x, y, number))
            prefetched.append(fetch(updated[-1], number + 1) if k % 2 else block)
        return updated, prefetched

    # The last block is outside the loop, since no block follows it that could be fetched.
    last, prefetched = blocks.count - 1, [fetch(x, 0) for x in carried]
    carried, prefetched = lax.fori_loop(0, last, body, (list(carried), prefetched))
    return [blocks.put(x, y, last) for x, y in zip(carried, new_blocks(last, carried, prefetched), strict=True)]


@dataclass(frozen=True)
class Blocks:
    """Blocks of arrays of one shape, in order: the largest of at most `BLOCK` bytes that divide it.

    Each block is contiguous in memory.

    Attributes:
      shape: the shape of the arrays.
      block: the shape of a block.
    """

    shape: tuple[int, ...]
    block: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], itemsize: int) -> Self:
        """Return the blocks of arrays of this shape, whose elements have at most `itemsize` bytes."""
        block = list(shape)
        for dim, n in enumerate(shape):
            # Cut dims from the first on, until the rest of an array fits in one block.
            bytes_per_index = itemsize * math.prod(shape[dim + 1 :])
            block[dim] = max((d for d in range(1, n + 1) if n % d == 0 and d * bytes_per_index <= BLOCK), default=1)
            if block[dim] > 1 or bytes_per_index <= BLOCK:
                break
        return cls(tuple(shape), tuple(block))

    @property
    def grid(self) -> list[int]:
        """The number of blocks along each dim."""
        return [n // b for n, b in zip(self.shape, self.block, strict=True)]

    @property
    def count(self) -> int:
        """The number of blocks."""
        return math.prod(self.grid)

    def at(self, number: Any) -> list[jax.Array]:
        """Return the index at which a block begins."""
        return [i * b for i, b in zip(jnp.unravel_index(number, self.grid), self.block, strict=True)]

    def take(self, x: jax.Array, number: Any) -> jax.Array:
        """Return one block of an array, on the device."""
        return on_device(lax.dynamic_slice(x, self.at(number), self.block))

    def put(self, x: jax.Array, block: jax.Array, number: Any) -> jax.Array:
        """Return the array with one block replaced, in the memory where the array is."""
        block = jax.device_put(block, HOST) if is_on_host(x) else block
        return lax.dynamic_update_slice(x, block, self.at(number))


def streams(
    optimizer: Any, layout: Layout, offloads: Sequence[str], as_stacked: bool, multiplies: bool
) -> Streams | None:
    """Plan how an optimizer's state and parameters stream through the device.

    Args:
      optimizer: an optax transformation with extra arguments.
      offloads: the parts of `Strategy.offload`.
      as_stacked: whether the optimizer sees leaves as a step stores them.
      multiplies: whether it multiplies matrices.

    Returns:
      The plan; None if nothing that the update reads is on the host. Raises ValueError if the optimizer does not work
      element by element, or if no array is large enough to be moved.
    """
    # 1. Check that there is something to move, and that blocks of it can be updated separately.
    places = jax.tree.leaves(layout.optimizer, is_leaf=is_stored)
    all_params: list[Stored] = jax.tree.leaves(layout.places("params"), is_leaf=is_stored)
    if "params" in offloads and not any(place.host for place in all_params):
        raise ValueError(
            f"offload='params' moves stacks of layers of {PAD_FROM:,} elements or more, and this model has none; scan "
            "the layers (nnx.scan, nn.scan, jax.lax.scan), or leave 'params' out"
        )
    trainable = [place for place, leaf in zip(all_params, layout.leaves, strict=True) if leaf.trainable]
    if not any(place.host for place in trainable) and "optimizer" not in offloads:
        return None
    # Blocks are cut from stored arrays, which only a transformation by element may see.
    if multiplies or not as_stacked:
        raise ValueError(
            _not_elementwise("it multiplies matrices" if multiplies else "it treats each layer separately")
        )
    if "optimizer" in offloads and not any(place.host for place in places):
        raise ValueError(
            f"offload='optimizer' moves arrays of {PAD_FROM:,} elements or more that mirror a parameter, such as "
            "momenta, and this optimizer has none; leave 'optimizer' out"
        )

    # 2. The leaf, by position, that each input and result of the two programs belongs to; None for any other.
    leaves_seen, params = layout.storage.seen(as_stacked)
    paths, n = [leaf.path for leaf in leaves_seen], len(leaves_seen)
    host_paths = {place.leaf.path for place in (*trainable, *places) if place.leaf is not None and place.host}
    param_leaf = [i if path in host_paths else None for i, path in enumerate(paths)]
    state_leaf = [None if place.leaf is None else param_leaf[paths.index(place.leaf.path)] for place in places]
    moments = {i: [k for k, home in enumerate(state_leaf) if home == i] for i in param_leaf if i is not None}

    # 3. Split the programs.
    init_results = [home if place.host else None for home, place in zip(state_leaf, places, strict=True)]
    init_program = _split(jx.trace(optimizer.init, params)[0], param_leaf, init_results, set(), paths)
    _, update, _ = traced_update(optimizer, params)
    # Inputs of the update: parameters, gradients, state, and the loss.
    input_places = zip(update.invars, [*trainable, *([None] * n), *places, None], strict=True)
    on_host = {v for v, place in input_places if place is not None and place.host}
    update = _split(update, [*param_leaf, *param_leaf, *state_leaf, None], [*param_leaf, *state_leaf], on_host, paths)
    return Streams(layout, trainable, moments, init_program, update)


def _split(
    flat: jx.Flat, input_leaf: Sequence[Any], result_leaf: Sequence[Any], on_host: set[Any], paths: Sequence[str]
) -> _Program:
    """Split a program of the optimizer into a global part and leaf parts.

    Args:
      input_leaf, result_leaf: for each input and result, the leaf that it belongs to, None for any other.
      on_host: the inputs that are on the host.

    Raises ValueError if a leaf part is not elementwise, or if the global part reads an array on the host.
    """
    home = dict(zip(flat.invars, input_leaf, strict=True))
    variables = (*flat.invars, *flat.constvars, *(v for eqn in flat.eqns for v in eqn.outvars))
    # A leaf part reads its leaf's arrays and scalars, which the global part computes once for all blocks.
    scalars = {v for v in variables if not v.aval.shape}

    # 1. The equations between the scalars and the results of each leaf.
    leaves: dict[int, _LeafProgram] = {}
    for i in dict.fromkeys(i for i in result_leaf if i is not None):
        results = [v for v, leaf in zip(flat.outvars, result_leaf, strict=True) if leaf == i]
        eqns = jx.needed(flat.eqns, results, scalars)
        free_vars = jx.free(eqns, results)
        leaves[i] = _LeafProgram(eqns, results, [v for v in free_vars if v in scalars])
        if any(home.get(v) != i for v in free_vars if v not in scalars):
            raise ValueError(_not_elementwise(f"the update of {paths[i]} depends on other arrays"))
        for eqn in eqns:
            is_broadcast = eqn.primitive.name == "broadcast_in_dim" and not eqn.invars[0].aval.shape
            shapes = {v.aval.shape for v in (*eqn.invars, *eqn.outvars)} - {()}
            if not is_broadcast and not (primitives.of(eqn).elementwise and len(shapes) == 1):
                raise ValueError(_not_elementwise(f"it applies {eqn.primitive.name} to {paths[i]}"))

    # 2. The equations of all other results, and of the scalars that leaf parts read.
    global_results = [k for k, leaf in enumerate(result_leaf) if leaf is None]
    scalars_read = dict.fromkeys(v for leaf in leaves.values() for v in leaf.scalars)
    outs = [*(flat.outvars[k] for k in global_results), *scalars_read]
    eqns = jx.needed(flat.eqns, outs)
    if host_leaves := [home[v] for v in jx.free(eqns, outs) if v in on_host]:
        raise ValueError(_not_elementwise(f"it computes a number from all of {paths[host_leaves[0]]} or its moments"))
    return _Program(flat, leaves, global_results, eqns, outs)


def _not_elementwise(reason: str) -> str:
    """Return the text of an error about an optimizer that does not work element by element."""
    return (
        "offload='optimizer' or 'params' copies the arrays of an update to the device block by block, and this "
        f"optimizer does not work element by element: {reason}; use one that does, such as optax.adamw, or leave these "
        "parts of offload out"
    )
