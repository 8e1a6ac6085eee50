"""Equinox modules as models.

A module is a pytree, which `from_equinox` divides into four parts:

    params        floating-point and complex arrays
    other arrays  variables that a step carries along unchanged, such as integer tables
    state         the arrays of an `eqx.nn.State`, such as BatchNorm statistics: variables that the loss replaces
    static        everything else

`make` runs under a trace, so that parameters are created sharded. An array in a static place (a static field, the
closure of a function) would remain a tracer after the trace has ended. `_StaticArrays` puts its numbers there.

Steps and checkpoints see nested dicts of arrays; `_ArrayTree` translates.
"""

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
    """Return a model from an Equinox module, which is not changed. Needs the package: `pip install equinox`.

    Floating-point and complex arrays are the parameters, as for `eqx.filter_grad` (`eqx.is_inexact_array`). Other
    arrays, and arrays in static fields, keep the values that `make` gave them. The state after a step is what the loss
    returns, the same on all replicas. `eqx.nn.BatchNorm` computes its statistics over the rows of all replicas, and not
    of one `vmap` alone. `key` differs for every step and block of rows. In `evaluate` the module is in
    `eqx.nn.inference_mode`, and the key is always `jax.random.key(0)`.

    Args:
      make: `make(key)` builds the module (or any pytree of modules), or with mutable state the pair `(module, state)`
        of `eqx.nn.make_with_state(Net)(key)`; called under `jax.jit`, so that parameters are created sharded.
      loss: `loss(module, batch, key)` returns a scalar mean over rows or `jp.Mean`, or a pair of that and a dict of
        metrics. With state it is `loss(module, state, batch, key)`, and returns a pair of the above and the new state.
      rules, rows: see `Model`.

    Raises:
      ValueError: Equinox is not installed, or `make` and `loss` are not such functions.
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

    # 1. Trace `make` once for shapes and the static part.
    numbers: list[Any] = []  # the values of the static arrays, which replace their tracers; empty in the first trace
    static_parts: list[tuple[Any, list[str]]] = []  # of each trace: the static part, and the names of its arrays

    def parts(key: jax.Array) -> tuple[Any, Any, Any, Any]:
        """Return parameters, other arrays, state (None without), and the static arrays as traced."""
        with traced("make(key)", IN_INIT):
            result = make(key)
        with_state = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], eqx.nn.State)
        module, state = result if with_state else (result, None)
        static_arrays = _StaticArrays(eqx, numbers)
        static_arrays.visit(module)
        params, rest = eqx.partition(module, eqx.is_inexact_array)
        if not jax.tree.leaves(params):
            raise ValueError(
                f"from_equinox: make(key) returned a {type(module).__name__} without a floating-point array"
            )
        other_arrays, static = eqx.partition(rest, eqx.is_array)
        static_parts.append((static, static_arrays.names))
        return params, other_arrays, state, static_arrays.arrays

    def shapes() -> list[Any]:
        """Return the first three of `parts` as trees of shapes."""
        trees: list[Any] = []

        def leaves(key: jax.Array) -> list[Any]:
            # Return lists, and keep the structures: JAX would compare the static arrays of whole modules by ==.
            flat = list(map(jax.tree.flatten, parts(key)[:3]))
            trees[:] = [tree for _, tree in flat]
            return [values for values, _ in flat]

        return [jax.tree.unflatten(*x) for x in zip(trees, jax.eval_shape(leaves, jax.random.key(0)), strict=True)]

    part_shapes = shapes()
    # 2. Arrays in static places would be used after the trace that made them. Compute them, and trace again with their
    # values. Two keys tell whether they are random.
    if names := static_parts[-1][1]:
        compute_static = jax.jit(lambda key: parts(key)[3])
        first, second = map(compute_static, jax.random.split(jax.random.key(0)))
        for name, first_value, second_value in zip(names, first, second, strict=True):
            if not np.array_equal(first_value, second_value, equal_nan=jnp.issubdtype(first_value.dtype, jnp.inexact)):
                raise ValueError(
                    f"from_equinox: {name} is static, and make(key) draws it from its key; static values are the same "
                    "for every key; draw it with NumPy (np.random.default_rng(0)), or make it an ordinary field of its "
                    "module, which trainable= can freeze"
                )
        numbers[:] = first
        part_shapes = shapes()
    params_tree, other_tree, state_tree = map(_ArrayTree, part_shapes)
    static, stateful = static_parts[-1][0], state_tree.tree.num_leaves > 0
    loss_arguments = ("module", "state", "batch", "key") if stateful else ("module", "batch", "key")
    check_call(loss, "from_equinox(loss=)", *loss_arguments)

    # 3. The functions of the model.
    def init(key: jax.Array) -> tuple[Any, Any]:
        params, other_arrays, state, _ = parts(key)
        return params_tree.pure(params), {"module": other_tree.pure(other_arrays), "state": state_tree.pure(state)}

    def module_of(params: Any, variables: Any) -> Any:
        return eqx.combine(params_tree.filled(params), other_tree.filled(variables["module"]), static)

    def bind(params: Any, variables: Any) -> Any:
        module = module_of(params, variables)
        return (module, state_tree.filled(variables["state"])) if stateful else module

    def call(params: Any, variables: Any, batch: Any, key: jax.Array | None) -> Any:
        module = module_of(params, variables)
        # The loss of a module expects a key, and in inference nothing may depend on it.
        if key is None:
            module, key = eqx.nn.inference_mode(module), jax.random.key(0)
        module = _average_over_rows(module, eqx)
        if not stateful:
            return loss(module, batch, key), variables
        result = loss(module, state_tree.filled(variables["state"]), batch, key)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], eqx.nn.State)):
            description = f"a tuple of {len(result)}" if isinstance(result, tuple) else kind_of(result)
            raise ValueError(
                f"loss returned {description}; with an eqx.nn.State return (value, state) or ((value, metrics), state)"
            )
        return result[0], {**variables, "state": state_tree.pure(result[1])}

    def unwrap(tree: Any) -> Any:
        """Return the nested dicts of a module, whole or its parameters alone; nested dicts are returned as they are."""
        is_pure = jax.tree.structure(tree) == params_tree.dicts
        return tree if is_pure else params_tree.pure(eqx.filter(tree, eqx.is_inexact_array))

    return Model(init, call, stateful=True, wrap=params_tree.filled, unwrap=unwrap, bind=bind, rules=rules, rows=rows)


def _average_over_rows(module: Any, eqx: Any) -> Any:
    """Return the module with BatchNorms that average over the axes of the rows, after their own axes (of a `vmap`)."""
    is_norm = lambda x: isinstance(x, eqx.nn.BatchNorm)

    def extend_axes(x: Any) -> Any:
        if not is_norm(x):
            return x
        axes = x.axis_name
        axes = tuple(axes) if isinstance(axes, Sequence) and not isinstance(axes, str) else (axes,)
        return eqx.tree_at(lambda norm: norm.axis_name, x, (*axes, *row_axes()))

    return jax.tree.map(extend_axes, module, is_leaf=is_norm) if row_axes() else module


class _StaticArrays:
    """The traced arrays that modules store where JAX sees no arrays, in the order of a visit.

    Such places are static fields, the closures of functions, and the attributes of other objects.

    Args:
      eqx: the module `equinox`.
      numbers: values that replace the arrays, in the same order; empty to leave the arrays in place.

    Attributes:
      arrays: the traced arrays that the visit found.
      names: for each array the name of its place, for errors.
    """

    def __init__(self, eqx: Any, numbers: Sequence[Any]):
        self.eqx, self.numbers = eqx, numbers
        self.arrays: list[jax.Array] = []
        self.names: list[str] = []
        self._visited: dict[int, Any] = {}  # by id; holding the objects keeps their ids from being reused

    def visit(self, tree: Any) -> None:
        """Visit the modules of a tree, each once."""
        is_module = lambda x: isinstance(x, self.eqx.Module)
        for x in jax.tree.leaves(tree, is_leaf=is_module):
            # Modules may share submodules: number each of their arrays once.
            if id(x) in self._visited or isinstance(x, Tracer):
                continue
            self._visited[id(x)] = x
            if not is_module(x):
                self._replace_arrays(x, type(x).__name__)
                continue
            for field in dataclasses.fields(x):
                value = getattr(x, field.name, None)
                if not field.metadata.get("static", False):
                    self.visit(value)
                # Modules are frozen dataclasses, whose own __setattr__ raises an error.
                elif (new := self._replace_arrays(value, f"{field.name} of a {type(x).__name__}")) is not value:
                    object.__setattr__(x, field.name, new)

    def _replace_arrays(self, x: Any, name: str) -> Any:
        """Return a static value with numbers instead of arrays. Functions and other objects are changed in place."""
        if isinstance(x, Tracer):
            self.arrays.append(x)
            self.names.append(name)
            return self.numbers[len(self.arrays) - 1] if self.numbers else x
        if isinstance(x, self.eqx.Module):
            leaves, tree = jax.tree.flatten(x)
            return jax.tree.unflatten(tree, [self._replace_arrays(leaf, name) for leaf in leaves])
        if type(x) is dict:
            return {key: self._replace_arrays(value, name) for key, value in x.items()}
        if isinstance(x, list | tuple):
            values = [self._replace_arrays(value, name) for value in x]
            # Without arrays return the object itself. `_make` is for named tuples, whose fields are separate arguments.
            return x if all(map(operator.is_, x, values)) else getattr(x, "_make", type(x))(values)
        if isinstance(x, types.FunctionType):
            for variable, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
                if isinstance(value := _content(cell), Tracer):
                    cell.cell_contents = self._replace_arrays(value, f"{variable} in the function {x.__name__}")
        elif not isinstance(x, type):
            for attribute, value in vars(x).items() if hasattr(x, "__dict__") else ():
                if isinstance(value, Tracer):
                    object.__setattr__(
                        x, attribute, self._replace_arrays(value, f"{attribute} of a {type(x).__name__}")
                    )
        return x


def _content(cell: Any) -> Any:
    """Return the value in a cell of a closure."""
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None


class _ArrayTree:
    """Translates a pytree of arrays to nested dicts by path and back: checkpoints and steps know no Equinox."""

    def __init__(self, tree: Any):
        self.tree = jax.tree.structure(tree)
        # Dicts sort their keys: number the leaves of the pytree, to know their order in the dicts.
        numbered = self.pure(jax.tree.unflatten(self.tree, range(self.tree.num_leaves)))
        self.order, self.dicts = jax.tree.leaves(numbered), jax.tree.structure(numbered)

    def pure(self, tree: Any) -> dict[Any, Any]:
        """Return the nested dicts of a pytree."""
        return unflatten_dict({(*map(_key, path),): x for path, x in jax.tree_util.tree_leaves_with_path(tree)})

    def filled(self, pure: Any) -> Any:
        """Return the pytree with the arrays of nested dicts."""
        leaves: list[Any] = [None] * self.tree.num_leaves
        for i, leaf in zip(self.order, jax.tree.leaves(pure), strict=True):
            leaves[i] = leaf
        return jax.tree.unflatten(self.tree, leaves)


def _key(entry: Any) -> Any:
    """Return the key of an entry of a path: the name of an attribute, the key of an item, or a child's index."""
    return next(getattr(entry, name) for name in ("name", "key", "idx") if hasattr(entry, name))
