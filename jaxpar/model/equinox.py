"""Equinox modules as models.

A module is a pytree, which `from_equinox` divides into four parts:

    params        floating-point and complex arrays
    other arrays  variables that a step carries along unchanged, such as integer tables
    state         the arrays of an `eqx.nn.State`, such as BatchNorm statistics: variables that the loss replaces
    static        everything else

`make` runs under a trace, so that parameters are created sharded. An array in a static place (a static field, the
closure of a function) would remain a tracer after the trace has ended. `_StaticArrays` puts its numbers there.

Steps and checkpoints see nested dicts of arrays; `ArrayTree` translates.
"""

from __future__ import annotations

import dataclasses
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
from jax.core import Tracer

from ..backend.packages import needed
from .calls import IN_INIT, check_call, kind_of, traced
from .model import Model, row_axes, without_mesh
from .module_arrays import ArrayTree, hidden_values


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
    # Modules come first: one that can be called would pass as a function.
    if isinstance(make, eqx.Module):
        name = type(make).__name__
        raise ValueError(
            f"from_equinox got a {name}, needs a function that makes one: lambda key: {name}(..., key=key)"
        )
    if not callable(make) or not callable(loss):
        raise ValueError(f"from_equinox(make={make!r}, loss={loss!r}): both must be functions")
    check_call(make, "from_equinox(make=)", "key")

    module = EquinoxModule.trace(_Maker(eqx, make), loss)
    wrap, unwrap, bind = module.params.filled, module.unwrap, module.bind
    return Model(module.init, module.call, True, wrap, unwrap, bind, rules, rows=rows)


class _Parts(NamedTuple):
    """The parts of a module that `make` built; see above."""

    params: Any
    other_arrays: Any
    state: Any  # None without an `eqx.nn.State`
    static: Any
    static_arrays: _StaticArrays


@dataclass(frozen=True, eq=False)
class _Maker:
    """A user's `make`, whose modules are divided into their parts.

    Attributes:
      eqx: the module `equinox`.
      make: as for `from_equinox`.
      numbers: the values that replace the arrays in static places; empty to leave those arrays in place.
    """

    eqx: Any
    make: Callable[[jax.Array], Any]
    numbers: Sequence[Any] = ()

    def parts(self, key: jax.Array) -> _Parts:
        """Call `make` under a trace, and divide its module."""
        eqx = self.eqx
        with traced("make(key)", IN_INIT):
            result = self.make(key)
        # `eqx.nn.make_with_state` returns such a pair.
        with_state = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], eqx.nn.State)
        module, state = result if with_state else (result, None)
        static_arrays = _StaticArrays(eqx, self.numbers)
        # Before the partition: the static part must have numbers in place of tracers.
        static_arrays.visit(module)
        params, rest = eqx.partition(module, eqx.is_inexact_array)
        if not jax.tree.leaves(params):
            raise ValueError(
                f"from_equinox: make(key) returned a {type(module).__name__} without a floating-point array"
            )
        other_arrays, static = eqx.partition(rest, eqx.is_array)
        return _Parts(params, other_arrays, state, static, static_arrays)

    def trace(self) -> tuple[_Parts, Callable[[jax.Array], list[list[jax.Array]]]]:
        """Trace `make` once.

        Returns:
          The parts, with shapes for the arrays of the first three; and a function key -> the leaves of these three.
        """
        traces: list[tuple[list[Any], _Parts]] = []

        def leaves(key: jax.Array) -> list[Any]:
            # Return lists, and keep the structures: JAX would compare the static arrays of whole modules by ==.
            parts = self.parts(key)
            flat = list(map(jax.tree.flatten, parts[:3]))
            traces.append(([tree for _, tree in flat], parts))
            return [values for values, _ in flat]

        # jit caches the trace for `init`. No mesh, as in `Model.create`: for another mesh jit would trace again.
        build = jax.jit(leaves, inline=True)
        with without_mesh():
            shapes = jax.eval_shape(build, jax.random.key(0))
        # A key of another implementation is traced again, and appends.
        trees, parts = traces[0]
        params, other_arrays, state = map(jax.tree.unflatten, trees, shapes)
        return parts._replace(params=params, other_arrays=other_arrays, state=state), build

    def with_numbers(self, names: Sequence[str]) -> _Maker:
        """Compute the arrays in static places, whose `names` are for errors."""
        values, are_random = hidden_values(lambda key: self.parts(key).static_arrays.arrays)
        for name, is_random in zip(names, are_random, strict=True):
            if is_random:
                raise ValueError(
                    f"from_equinox: {name} is static, and make(key) draws it from its key; static values are the same "
                    "for every key; draw it with NumPy (np.random.default_rng(0)), or make it an ordinary field of its "
                    "module, which trainable= can freeze"
                )
        return dataclasses.replace(self, numbers=values)


@dataclass(frozen=True, eq=False)
class EquinoxModule:
    """A module without its arrays, and its loss: the functions of a `Model`.

    Attributes:
      eqx: the module `equinox`.
      build: key -> the leaves of parameters, other arrays and state; `make` was traced once.
      loss: as for `from_equinox`.
      static: the module without its arrays.
      params, other_arrays, state: translate the parameters, the other arrays and the state.
    """

    eqx: Any
    build: Callable[[jax.Array], Any]
    loss: Callable[..., Any]
    static: Any
    params: ArrayTree
    other_arrays: ArrayTree
    state: ArrayTree

    @classmethod
    def trace(cls, maker: _Maker, loss: Callable[..., Any]) -> Self:
        """Trace `make` for shapes and the static part, and check the loss."""
        shapes, build = maker.trace()
        # Arrays in static places would be used after the trace that made them: trace again with their values.
        if names := shapes.static_arrays.names:
            shapes, build = maker.with_numbers(names).trace()
        module = cls(maker.eqx, build, loss, shapes.static, *map(ArrayTree, shapes[:3]))
        loss_arguments = ("module", "state", "batch", "key") if module.has_state else ("module", "batch", "key")
        check_call(loss, "from_equinox(loss=)", *loss_arguments)
        return module

    @property
    def has_state(self) -> bool:
        """Whether the module has mutable state."""
        return self.state.tree.num_leaves > 0

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """Return the first parameters and variables."""
        trees = self.params, self.other_arrays, self.state
        params, other_arrays, state = (
            t.pure(jax.tree.unflatten(t.tree, x)) for t, x in zip(trees, self.build(key), strict=True)
        )
        # Integer tables and the like are variables too, which a step carries along.
        return params, {"module": other_arrays, "state": state}

    def _module(self, params: Any, variables: Any) -> Any:
        """Return the module with these values."""
        return self.eqx.combine(self.params.filled(params), self.other_arrays.filled(variables["module"]), self.static)

    def bind(self, params: Any, variables: Any) -> Any:
        """Return the module with these values, or the pair of module and state."""
        module = self._module(params, variables)
        return (module, self.state.filled(variables["state"])) if self.has_state else module

    def call(self, params: Any, variables: Any, batch: Any, key: jax.Array | None) -> Any:
        """Call the loss; return its result and the new variables."""
        eqx, module = self.eqx, self._module(params, variables)
        # The loss of a module expects a key, and in inference nothing may depend on it.
        if key is None:
            module, key = eqx.nn.inference_mode(module), jax.random.key(0)
        module = _average_over_rows(module, eqx)
        # Without an `eqx.nn.State` no call of the loss can change a variable.
        if not self.has_state:
            return self.loss(module, batch, key), variables
        result = self.loss(module, self.state.filled(variables["state"]), batch, key)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], eqx.nn.State)):
            description = f"a tuple of {len(result)}" if isinstance(result, tuple) else kind_of(result)
            raise ValueError(
                f"loss returned {description}; with an eqx.nn.State return (value, state) or ((value, metrics), state)"
            )
        return result[0], {**variables, "state": self.state.pure(result[1])}

    def unwrap(self, tree: Any) -> Any:
        """Return the nested dicts of a module, whole or its parameters alone; nested dicts are returned as they are."""
        if jax.tree.structure(tree) == self.params.dicts:
            return tree
        eqx = self.eqx
        # The filter leaves None where there is no parameter, as `params` has it.
        return self.params.pure(eqx.filter(tree, eqx.is_inexact_array))


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
            # To JAX every other object is a leaf: a function with a closure, or an object with attributes.
            if not is_module(x):
                self._replace_arrays(x, type(x).__name__)
                continue
            for field in dataclasses.fields(x):
                value = getattr(x, field.name, None)
                # Fields that JAX sees: arrays there are left alone, and submodules are visited.
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
            # The first visit, without numbers, only lists the arrays. The second comes to them in the same order.
            return self.numbers[len(self.arrays) - 1] if self.numbers else x
        # A whole module in a static field is static, with all of its arrays.
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
            # A closure keeps its variables in cells, in the order of their names in the code.
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
