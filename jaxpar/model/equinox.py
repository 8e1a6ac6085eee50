"""Equinox modules as models. A module is a pytree: its floating-point arrays are parameters, what is none is static."""

from __future__ import annotations

import dataclasses
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.core import Tracer

from ..backend.packages import needed
from .calls import IN_INIT, check_call, kind_of, traced
from .model import Model, row_axes


def from_equinox(
    make: Callable[[jax.Array], Any],
    loss: Callable[..., Any],
    rules: Mapping[str, int | str | None] | None = None,
    rows: str | None = None,
) -> Model:
    """A model from an Equinox module, which is not changed. Needs the package: `pip install equinox`.

    Args:
      make: `make(key)` builds the module (or any pytree of modules), or with mutable state the pair `(module, state)`
        of `eqx.nn.make_with_state(Net)(key)`; called under `jax.jit`, so that parameters are created sharded.
      loss: `loss(module, batch, key)` returns a scalar mean over rows or `jp.Mean`, or a pair of that and a dict of
        metrics. With state it is `loss(module, state, batch, key)`, and returns a pair of the above and the new state.
      rules, rows: see `Model`.

    Floating-point and complex arrays are the parameters, as `eqx.is_inexact_array` has it for `eqx.filter_grad`. Other
    arrays, and arrays in static fields, stay as `make` made them; state is kept as the loss leaves it, and is the same
    on all replicas.
    `eqx.nn.BatchNorm` computes its statistics over the rows of all replicas, not of one `vmap` alone. `key` differs for
    every step and block of rows. In `evaluate` the module is in `eqx.nn.inference_mode`, and the key is always
    `jax.random.key(0)`.

    Raises ValueError where Equinox is not installed, or `make` and `loss` are not such functions.
    """
    eqx = needed("equinox", "from_equinox needs")
    if isinstance(make, eqx.Module):
        name = type(make).__name__
        raise ValueError(
            f"from_equinox got a {name}, needs a function that makes one: lambda key: {name}(..., key=key)"
        )
    if not callable(make) or not callable(loss):
        raise ValueError(f"from_equinox(make={make!r}, loss={loss!r}): both must be functions")
    check_call(make, "from_equinox(make=)", "key")

    numbers: list[Any] = []  # of the static arrays, in place of their tracers
    kept: list[tuple[Any, list[str]]] = []

    def parts(key: jax.Array) -> tuple[Any, Any, Any, Any]:
        """Parameters, other arrays, state (None without), and the static arrays as they were traced."""
        with traced("make(key)", IN_INIT):
            made = make(key)
        with_state = isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], eqx.nn.State)
        module, state = made if with_state else (made, None)
        held = _StaticArrays(eqx, numbers)
        held.visit(module)
        params, rest = eqx.partition(module, eqx.is_inexact_array)
        if not jax.tree.leaves(params):
            raise ValueError(
                f"from_equinox: make(key) returned a {type(module).__name__} without a floating-point array"
            )
        others, static = eqx.partition(rest, eqx.is_array)
        kept.append((static, held.names))
        return params, others, state, held.arrays

    def shapes() -> list[Any]:
        trees: list[Any] = []

        def leaves(key: jax.Array) -> list[Any]:  # not whole modules: JAX would compare their static arrays by ==
            flat = list(map(jax.tree.flatten, parts(key)[:3]))
            trees[:] = [tree for _, tree in flat]
            return [values for values, _ in flat]

        return [jax.tree.unflatten(*of) for of in zip(trees, jax.eval_shape(leaves, jax.random.key(0)), strict=True)]

    made = shapes()
    if names := kept[-1][1]:  # these arrays would be used after the trace that made them
        run = jax.jit(lambda key: parts(key)[3])
        first, second = map(run, jax.random.split(jax.random.key(0)))
        for name, one, other in zip(names, first, second, strict=True):
            if not np.array_equal(one, other, equal_nan=jnp.issubdtype(one.dtype, jnp.inexact)):
                raise ValueError(
                    f"from_equinox: {name} is static, and make(key) draws it from its key; static values are the same "
                    "for every key; draw it with NumPy (np.random.default_rng(0)), or make it an ordinary field of its "
                    "module, which trainable= can freeze"
                )
        numbers[:] = first
        made = shapes()
    params_tree, others_tree, state_tree = map(_ArrayTree, made)
    static, stateful = kept[-1][0], state_tree.tree.num_leaves > 0
    called = ("module", "state", "batch", "key") if stateful else ("module", "batch", "key")
    check_call(loss, "from_equinox(loss=)", *called)

    def init(key: jax.Array) -> tuple[Any, Any]:
        params, others, state, _ = parts(key)
        return params_tree.pure(params), {"module": others_tree.pure(others), "state": state_tree.pure(state)}

    def module_of(params: Any, variables: Any) -> Any:
        return eqx.combine(params_tree.filled(params), others_tree.filled(variables["module"]), static)

    def bind(params: Any, variables: Any) -> Any:
        module = module_of(params, variables)
        return (module, state_tree.filled(variables["state"])) if stateful else module

    def call(params: Any, variables: Any, batch: Any, key: jax.Array | None) -> Any:
        module = module_of(params, variables)
        if key is None:
            module, key = eqx.nn.inference_mode(module), jax.random.key(0)
        module = _over_rows(module, eqx)
        if not stateful:
            return loss(module, batch, key), variables
        out = loss(module, state_tree.filled(variables["state"]), batch, key)
        if not (isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], eqx.nn.State)):
            found = f"a tuple of {len(out)}" if isinstance(out, tuple) else kind_of(out)
            raise ValueError(
                f"loss returned {found}; with an eqx.nn.State return (value, state) or ((value, metrics), state)"
            )
        return out[0], {**variables, "state": state_tree.pure(out[1])}

    def unwrap(tree: Any) -> Any:
        """A module, whole or its parameters alone, or the nested dicts themselves."""
        pure = jax.tree.structure(tree) == params_tree.dicts
        return tree if pure else params_tree.pure(eqx.filter(tree, eqx.is_inexact_array))

    return Model(init, call, stateful=True, wrap=params_tree.filled, unwrap=unwrap, bind=bind, rules=rules, rows=rows)


def _over_rows(module: Any, eqx: Any) -> Any:
    """The module, each of whose BatchNorms averages over its own axes, of a `vmap`, and those of the rows."""
    is_norm = lambda x: isinstance(x, eqx.nn.BatchNorm)

    def leaf(x: Any) -> Any:
        if not is_norm(x):
            return x
        own = x.axis_name
        own = tuple(own) if isinstance(own, Sequence) and not isinstance(own, str) else (own,)
        return eqx.tree_at(lambda norm: norm.axis_name, x, (*own, *row_axes()))

    return jax.tree.map(leaf, module, is_leaf=is_norm) if row_axes() else module


class _StaticArrays:
    """The traced arrays that modules keep where JAX sees no arrays, in the order of a visit: in static fields, in the
    closures of functions, and in the attributes of other objects. If there are `numbers`, these take their places.
    """

    def __init__(self, eqx: Any, numbers: Sequence[Any]):
        self.eqx, self.numbers = eqx, numbers
        self.arrays: list[jax.Array] = []
        self.names: list[str] = []
        self._seen: dict[int, Any] = {}

    def visit(self, tree: Any) -> None:
        """Visit the modules of a tree, each once."""
        is_module = lambda x: isinstance(x, self.eqx.Module)
        for x in jax.tree.leaves(tree, is_leaf=is_module):
            if id(x) in self._seen or isinstance(x, Tracer):
                continue
            self._seen[id(x)] = x
            if not is_module(x):
                self._replaced(x, type(x).__name__)
                continue
            for field in dataclasses.fields(x):
                value = getattr(x, field.name, None)
                if not field.metadata.get("static", False):
                    self.visit(value)
                elif (new := self._replaced(value, f"{field.name} of a {type(x).__name__}")) is not value:
                    object.__setattr__(x, field.name, new)

    def _replaced(self, x: Any, name: str) -> Any:
        """A static value with numbers for its arrays; functions and other objects are changed in place."""
        if isinstance(x, Tracer):
            self.arrays.append(x)
            self.names.append(name)
            return self.numbers[len(self.arrays) - 1] if self.numbers else x
        if isinstance(x, self.eqx.Module):
            leaves, tree = jax.tree.flatten(x)
            return jax.tree.unflatten(tree, [self._replaced(leaf, name) for leaf in leaves])
        if type(x) is dict:
            return {key: self._replaced(value, name) for key, value in x.items()}
        if isinstance(x, list | tuple):
            values = [self._replaced(value, name) for value in x]
            return x if all(map(operator.is_, x, values)) else getattr(x, "_make", type(x))(values)
        if isinstance(x, types.FunctionType):
            for variable, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
                if isinstance(value := _content(cell), Tracer):
                    cell.cell_contents = self._replaced(value, f"{variable} in the function {x.__name__}")
        elif not isinstance(x, type):
            for attribute, value in vars(x).items() if hasattr(x, "__dict__") else ():
                if isinstance(value, Tracer):
                    object.__setattr__(x, attribute, self._replaced(value, f"{attribute} of a {type(x).__name__}"))
        return x


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a variable that has no value yet
        return None


class _ArrayTree:
    """Between a pytree of arrays and nested dicts of them, by path: checkpoints and steps know no Equinox."""

    def __init__(self, tree: Any):
        self.tree = jax.tree.structure(tree)
        numbered = self.pure(jax.tree.unflatten(self.tree, range(self.tree.num_leaves)))
        self.order, self.dicts = jax.tree.leaves(numbered), jax.tree.structure(numbered)  # dicts sort their keys

    def pure(self, tree: Any) -> dict[Any, Any]:
        return unflatten_dict({(*map(_key, path),): x for path, x in jax.tree_util.tree_leaves_with_path(tree)})

    def filled(self, pure: Any) -> Any:
        leaves: list[Any] = [None] * self.tree.num_leaves
        for at, leaf in zip(self.order, jax.tree.leaves(pure), strict=True):
            leaves[at] = leaf
        return jax.tree.unflatten(self.tree, leaves)


def _key(entry: Any) -> Any:
    """What a path's entry says of an attribute, an item, or the number of a child."""
    return next(getattr(entry, name) for name in ("name", "key", "idx") if hasattr(entry, name))
