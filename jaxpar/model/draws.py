"""Batch the equal random draws of a program, such as the `init` of a model.

    w0 = normal(k0, [64, 64]) * 0.02
    w1 = normal(k1, [64, 64]) * 0.02     ->     w = vmap(normal)([k0, k1, k2], [64, 64]) * 0.02,   w0 = w[0], ...
    w2 = normal(k2, [64, 64]) * 0.02

XLA compiles every draw separately, on CPUs in about 0.1 s each: a model of 300 small leaves took half a minute to
initialise, on any number of devices. JAX's default generator (threefry) draws the same numbers in a batch as singly.

Two sorts of draws are batched:

- Small draws of the same shape and parameters.
- Large draws of layers that the program stacks into one leaf. XLA uses the batch as the stack, and each device draws
  its part of it. Without this, every pipeline stage drew every layer, and all layers were in memory before their stack
  was sharded.

Elementwise equations and reshapes that follow (a standard deviation, a cast) are batched too, and keys that are rows of
one array are read together. Otherwise each would be a separate kernel.

`_kinds` says which equations are equal, `_groups` orders the program so that equal ones are adjacent, and `_evaluate`
runs it group by group.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax.dtypes import extended

from ..program import jaxpr as jx
from ..program import primitives

_DRAWS = ("random_bits", "random_fold_in", "random_split", "threefry2x32")
SMALL = 16_384  # elements. Larger draws may be sharded, and the batch would be a second copy in memory


def draws_together(fun: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    """Return `fun`, a function of a key, with equal draws batched: small ones, and large ones that `fun` stacks.

    A draw that needs the result of another is not batched with it. Generators other than threefry
    (`jax_default_prng_impl`) draw other numbers in a batch, so that their draws run one by one.
    """

    def batched(key: jax.Array) -> Any:
        closed, out_shapes = jax.make_jaxpr(fun, return_shape=True)(key)
        # Effects, such as prints, must keep their order.
        if jx.opened(closed)[0].effects:
            return fun(key)
        flat = jx.flatten(closed, calls=_is_late)
        return jax.tree.unflatten(jax.tree.structure(out_shapes), map(_value, _evaluate(flat, [key])))

    return batched


class _Layer(NamedTuple):
    """The layer of a stack that a value becomes.

    Attributes:
      stack: the variable of the stack.
      number: the index of the layer.
      layers: the number of layers.
      distance: the number of equations between the value and the stack.
    """

    stack: Any
    number: int
    layers: int
    distance: int = 0


class _Kind(NamedTuple):
    """The common properties of equations that can run as one batch.

    Attributes:
      signature: primitive, parameters, and shapes and dtypes of the operands.
      ends: for large draws, the stack in which each result ends, and the distance from it; empty for small ones.
      layers: the number of layers of the stack; 0 for small draws.
    """

    signature: Any
    ends: tuple[tuple[Any, int], ...] = ()
    layers: int = 0

    def complete(self, members: Sequence[int]) -> bool:
        """Whether `members` are all layers of the stack, in order; True for small draws, which have none."""
        return not self.ends or [*members] == [*range(self.layers)]


def _evaluate(flat: jx.Flat, args: Sequence[Any]) -> list[Any]:
    """Run a program with equal draws in batches. A result in a batch stays a `_Row` until it is needed alone."""
    # A literal becomes an array of its dtype: stacked with others as a Python number, it would lose the dtype.
    env = jx.Environment[Any].of(flat, args, lambda atom: np.asarray(atom.val, atom.aval.dtype))
    producers = {v: eqn for eqn in flat.eqns for v in eqn.outvars}
    for group in _groups(flat):
        eqn, *rest_of_group = group
        # A row of a batch stays unread. A batch that takes all rows of another then takes the array itself.
        if not rest_of_group and (row := _row(eqn, producers)):
            env[eqn.outvars[0]] = _Row(_value(env[row.of]), row.number)
            continue
        values = [env.read(member.invars) for member in group]
        with jx.source_info_of(eqn):
            if rest_of_group:
                outs = _run_batch(eqn, values)
            # The layers are the rows of one batch: `_stack` returns the batch, and nothing is copied.
            elif eqn.primitive.name == "stack" and eqn.params["axis"] == 0:
                outs = [[_stack(values[0])]]
            else:
                outs = [jx.bind(eqn, [*map(_value, values[0])])]
        for member, results in zip(group, outs, strict=True):
            env.store(member, results)
    return [v.val if jx.is_literal(v) else env[v] for v in flat.outvars]


def _is_late(eqn: Any) -> bool:
    """Whether an equation calls a function jitted with `inline=True`, which newer JAX inlines only at lowering."""
    return getattr(eqn.params.get("inline"), "name", "") == "JAX_LATE"


class _Row(NamedTuple):
    """A row of an array, which is not read before it is needed alone.

    Attributes:
      of: the array, or the variable of one.
      number: the index of the row.
    """

    of: Any
    number: int


def _value(x: Any) -> Any:
    """Return a value as an array: a `_Row` is read."""
    return x.of[x.number] if isinstance(x, _Row) else x


def _row(eqn: Any, producers: dict[Any, Any]) -> _Row | None:
    """Return the row that an equation reads, or None. `x[3]` is traced as a slice of dim 0 and `squeeze`."""
    slice_eqn = (
        producers.get(eqn.invars[0]) if eqn.primitive.name == "squeeze" and not jx.is_literal(eqn.invars[0]) else None
    )
    if slice_eqn is None or slice_eqn.primitive.name != "slice" or eqn.params["dimensions"] != (0,):
        return None
    (x,), (y,) = slice_eqn.invars, slice_eqn.outvars
    if jx.is_literal(x) or y.aval.shape != (1, *x.aval.shape[1:]):
        return None
    return _Row(x, slice_eqn.params["start_indices"][0])


def _run_batch(eqn: Any, values: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return the results of one equation for several lists of operands, as rows of a batch."""
    # Operands that are equal in all lists are not batched.
    columns = list(zip(*values, strict=True))
    are_equal = [all(_is_same(x, column[0]) for x in column) for column in columns]
    # Equal operands have equal results, which one run gives.
    if all(are_equal):
        return [jx.bind(eqn, [*map(_value, values[0])])] * len(values)
    operands = [_value(c[0]) if is_equal else _stack(c) for c, is_equal in zip(columns, are_equal, strict=True)]
    results = jax.vmap(lambda *xs: jx.bind(eqn, xs), in_axes=[None if is_equal else 0 for is_equal in are_equal])(
        *operands
    )
    return [[_Row(x, n) for x in results] for n in range(len(values))]


def _is_same(x: Any, y: Any) -> bool:
    """Whether two operands are the same value, as far as this is known without comparing arrays."""
    if isinstance(x, _Row) and isinstance(y, _Row):
        return x.of is y.of and x.number == y.number
    # Scalars are often literals, which are equal arrays and not the same one.
    are_scalars = isinstance(x, np.ndarray) and isinstance(y, np.ndarray) and x.shape == y.shape == ()
    return x is y or (are_scalars and bool(x == y))


def _stack(column: Sequence[Any]) -> Any:
    """Return values stacked on a new dim 0. Rows of one array are gathered; all its rows in order are that array."""
    rows = [x for x in column if isinstance(x, _Row) and x.of is getattr(column[0], "of", None)]
    if len(rows) < len(column):
        return jnp.stack([_value(x) for x in column])
    array, numbers = rows[0].of, [row.number for row in rows]
    return array if numbers == [*range(len(array))] else array[np.array(numbers)]


def _groups(flat: jx.Flat) -> list[list[Any]]:
    """Return the equations of a program in an order in which they can run, in groups that run as one batch."""
    kinds = _kinds(flat.eqns)
    # Keys that are split one after another give the layers of a stack different levels. The second pass moves each to
    # the latest level of its kind, which the first pass has found.
    latest_level: dict[_Kind, int] = {}
    groups: dict[tuple[int, Any], list[tuple[int, Any]]] = {}
    for _ in range(2):
        groups.clear()
        # The level of an equation is one more than its largest input level, so that equations of one level are
        # independent. Equations that depend neither on the key nor on a draw, such as counts of draws, have level 0.
        level: dict[Any, int] = collections.defaultdict(int, dict.fromkeys(flat.invars, 1))
        for eqn, (kind, layer) in zip(flat.eqns, kinds, strict=True):
            input_level = max((level[v] for v in eqn.invars if not jx.is_literal(v)), default=0)
            eqn_level = input_level + 1 if input_level or kind else 0
            if kind and kind.ends:
                eqn_level = latest_level[kind] = max(eqn_level, latest_level.get(kind, 0))
            level.update((v, eqn_level) for v in eqn.outvars)
            groups.setdefault((eqn_level, kind or id(eqn)), []).append((layer, eqn))
    ordered: list[list[Any]] = []
    for (_, kind), members in sorted(groups.items(), key=lambda item: item[0][0]):
        # Layers come in the order of the stack, so that the batch is the stack.
        members.sort(key=lambda member: member[0])
        # A large draw alone or an incomplete stack runs as it is written.
        is_batch = isinstance(kind, _Kind) and kind.complete([layer for layer, _ in members])
        eqns = [eqn for _, eqn in members]
        ordered += [eqns] if is_batch else [[eqn] for eqn in eqns]
    return ordered


def _layers(eqns: Sequence[Any]) -> dict[Any, _Layer]:
    """Return the variables that become layers of a stack, directly or through elementwise equations and reshapes."""
    layers: dict[Any, _Layer] = {}
    # From the stack backwards: an operand belongs to the layer that its result becomes.
    for eqn in reversed(eqns):
        operands = [v for v in eqn.invars if not jx.is_literal(v)]
        if eqn.primitive.name == "stack" and eqn.params["axis"] == 0:
            (out,) = eqn.outvars
            layers |= {v: _Layer(out, number, len(eqn.invars)) for number, v in enumerate(operands)}
        elif _is_elementwise(eqn) and (out := eqn.outvars[0]) in layers:
            layer = layers[out]._replace(distance=layers[out].distance + 1)
            # Operands of another size, such as a standard deviation, are shared by layers and are none themselves.
            layers |= {v: layer for v in operands if v.aval.size == out.aval.size and v not in layers}
    return layers


def _kinds(eqns: Sequence[Any]) -> list[tuple[_Kind | None, int]]:
    """Return for each equation its kind and its layer.

    The kind is None for an equation that is neither a draw nor follows elementwise from one. The layer of small draws
    is 0.
    """
    layers, drawn = _layers(eqns), set[Any]()
    kinds: list[tuple[_Kind | None, int]] = []
    for eqn in eqns:
        # A large draw has a kind only if all its results become the same layer of stacks: see the module's docstring.
        kind, number = None, 0
        if (signature := _signature(eqn, drawn)) is not None:
            drawn.update(eqn.outvars)
            ends = [layers[v] for v in eqn.outvars if v in layers]
            # Small operands and results: the batch takes little memory, so that no stack is needed.
            if sum(math.prod(v.aval.shape) for v in (*eqn.outvars, *eqn.invars)) <= SMALL:
                kind = _Kind(signature)
            elif len(ends) == len(eqn.outvars) and len({(end.number, end.layers) for end in ends}) == 1:
                number = ends[0].number
                kind = _Kind(signature, tuple((end.stack, end.distance) for end in ends), ends[0].layers)
        kinds.append((kind, number))
    return kinds


def _signature(eqn: Any, drawn: Collection[Any]) -> Any:
    """Return the signature of an equation that draws, or follows elementwise from a value in `drawn`; else None."""
    follows = _is_elementwise(eqn) and any(v in drawn for v in eqn.invars if not jx.is_literal(v))
    if not follows and not (jx.communicates([eqn], _DRAWS) and _threefry(eqn)):
        return None
    params = tuple((name, _hashable(value)) for name, value in sorted(eqn.params.items()))
    return eqn.primitive.name, params, tuple((v.aval.shape, v.aval.dtype) for v in eqn.invars)


def _is_elementwise(eqn: Any) -> bool:
    """Whether an equation is elementwise, or gives elements another shape."""
    return primitives.of(eqn).elementwise or eqn.primitive.name in ("reshape", "transpose")


def _hashable(value: Any) -> Any:
    """Return a value as a key of a dict; unhashable values and programs are compared by identity."""
    try:
        hash(value)
    except TypeError:
        return id(value)  # lives as long as its equation
    # JAX caches the traces of jitted functions: equal calls share one program.
    return id(value) if isinstance(value, jec.Jaxpr | jec.ClosedJaxpr) else value


def _threefry(eqn: Any) -> bool:
    """Whether the keys that an equation reads are all of threefry, and there are some."""
    key_dtypes = [v.aval.dtype for v in eqn.invars if jnp.issubdtype(v.aval.dtype, extended)]
    # Other generators, such as rbg, draw other numbers under `vmap` than singly.
    return bool(key_dtypes) and all(str(dtype) == "key<fry>" for dtype in key_dtypes)
