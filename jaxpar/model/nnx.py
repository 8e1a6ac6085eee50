"""Flax NNX modules as models.

An NNX module holds its variables as attributes, and is a graph of objects. `from_nnx` splits it once:

    module -> graph, parameters (`nnx.Param`), variables (all others: statistics, random streams, caches)

A step sees nested dicts of arrays, because flattening an `nnx.State` in every step is slow; `_StateTree` translates.
Each call of the loss merges graph and arrays to a module, adapts it (BatchNorm, embeddings, random keys), and splits it
again for the values that the loss wrote.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.core import Tracer

from .calls import IN_INIT, check_call, traced
from .model import Model, row_axes, without_mesh
from .module_arrays import ArrayTree, hidden_values
from .paths import keys_of

Modules = Iterable[tuple[tuple[Any, ...], nnx.Module]]  # path and module, as `nnx.iter_modules` yields them
_MODES = ("deterministic", "use_running_average")  # attributes that `train()` and `eval()` of a module set
_OF_LINEN = "a Linen module; use jp.from_linen(Net(...), loss, batch), whose loss gets apply"


def from_nnx(
    make: Callable[[nnx.Rngs], nnx.Module],
    loss: Callable[[Any, Any], Any],
    rules: Mapping[str, int | str | None] | None = None,
    rows: str | None = None,
) -> Model:
    """Return a model from an NNX module, which is not changed and need not be annotated.

    `nnx.Param`s are the parameters. If the loss assigns to one (`nnx.SpectralNorm` does), the optimizer updates the
    assigned value, as in a loop of plain Flax; a step raises ValueError if that value depends on the rows. Every other
    variable is state: its value after a step is the one that the loss assigned, the same on all replicas.
    `nnx.BatchNorm` computes its statistics over the rows of all replicas. Streams of random numbers (dropout) get keys
    that depend on the stream, the step and the block of rows, and are not advanced. In `evaluate` the module is in
    `eval()` mode.

    Args:
      make: `make(rngs)` builds the module; called under `jax.jit`, so that parameters are created sharded.
      loss: `loss(module, batch)` returns a scalar mean over rows or `jp.Mean`, or a pair of that and a dict of metrics.
      rules: the model's own table of the dims that `tensor` splits; see `Model`. Names that the module's annotations
        give to dims (`nnx.with_partitioning`, `out_sharding=`) are used too.
      rows: "independent" if the loss is known not to couple rows, whatever its program looks like; see `Model`.

    Raises:
      ValueError: `make` or `loss` is no such function.
    """
    # Modules come first: most can be called, and would pass as functions.
    if isinstance(make, nnx.Module):
        raise ValueError(
            f"from_nnx got a {type(make).__name__}, needs a function that makes one: "
            f"lambda rngs: {type(make).__name__}(..., rngs=rngs)"
        )
    if isinstance(make, nn.Module) or (isinstance(make, type) and issubclass(make, nn.Module)):
        raise ValueError(f"from_nnx got {_OF_LINEN}")
    if not callable(make) or not callable(loss):
        raise ValueError(f"from_nnx(make={make!r}, loss={loss!r}): both must be functions")

    check_call(make, "from_nnx(make=)", "rngs")
    check_call(loss, "from_nnx(loss=)", "module", "batch")

    module = NNXModule.trace(make, loss)
    wrap, unwrap, bind, names = module.params.filled, module.unwrap, module.bind, module.names
    return Model(module.init, module.call, True, wrap, unwrap, bind, rules, names, rows)


@dataclass(frozen=True, eq=False)
class NNXModule:
    """A module without its arrays, and its loss: the functions of a `Model`.

    Attributes:
      build: key -> (the states of parameters and of other variables, arrays in plain objects). Traced once.
      loss: as for `from_nnx`.
      graph: the module's graph.
      param_shapes: the `nnx.State` of its parameters, abstract.
      params: translates parameters.
      other_variables: translates the other variables.
    """

    build: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any], Any]
    graph: Any
    param_shapes: Any
    params: _StateTree
    other_variables: _StateTree

    @classmethod
    def trace(cls, make: Callable[[nnx.Rngs], nnx.Module], loss: Callable[[Any, Any], Any]) -> Self:
        """Build and split the module, under a trace."""
        graphs, array_holders = [], []  # of each trace; they cannot be results of a traced function

        def parts(key: jax.Array) -> Any:
            graph, *states = nnx.split(module := _build(make, key), nnx.Param, ...)
            graphs.append(graph)
            array_holders.append(in_objects := _arrays_in_objects(module))
            return states, [getattr(obj, name) for obj, name in in_objects]

        # jit caches the trace for `init`: building 64 layers under a trace takes 20 s. With inline=True, a program that
        # calls it gets the equations themselves. No mesh, as in `Model.create`: for another mesh jit would trace again.
        build = jax.jit(parts, inline=True)
        # Not nnx.eval_shape: it turns a plain array (RoPE tables, WeightNorm's scales) into a shape, which NNX would
        # take for a static attribute.
        with without_mesh():
            (param_state, other_state), object_arrays = jax.eval_shape(build, jax.random.key(0))
        # The first trace's. A key of another implementation is traced again, and appends.
        graph, holders = graphs[0], array_holders[0]
        # Compute the arrays in plain objects. The graph refers to these objects, which hold tracers until now.
        if object_arrays:
            pairs = zip(*hidden_values(lambda key: build(key)[1]), strict=True)
            for (obj, name), (value, is_random) in zip(holders, pairs, strict=True):
                if is_random:
                    raise ValueError(
                        f"from_nnx: {name} of a {type(obj).__name__} is random, and NNX does not see it, as the object "
                        "is no module; make it an nnx.Module, or keep the array in an nnx.Variable of one"
                    )
                # The object may be a frozen dataclass.
                object.__setattr__(obj, name, np.asarray(value))
        return cls(build, loss, graph, param_state, _StateTree(param_state), _StateTree(other_state))

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """Return the first parameters and variables."""
        (params, variables), _ = self.build(key)
        return self.params.pure(params), self.other_variables.pure(variables)

    def bind(self, params: Any, variables: Any) -> Any:
        """Return the module with these values."""
        return nnx.merge(self.graph, self.params.filled(params), self.other_variables.filled(variables))

    def call(self, params: Any, variables: Any, batch: Any, key: jax.Array | None) -> Any:
        """Call the loss; return its result, the new variables and the new parameters."""

        def call_loss(use_own_axis: bool) -> tuple[Any, Any]:
            # A new module for each attempt: the first may have changed its own before it failed.
            module = self.bind(params, variables if key is None else self.other_variables.keyed(variables, key))
            if key is None:
                module.eval()
            # One walk serves all that reads the modules: with four, walks took a fifth of a loss's trace.
            modules = list(nnx.iter_modules(module))
            _set_norm_axes(modules, use_own_axis)
            _embed_in_table_dtype(modules)
            # After our own changes: the warning is about the loss's.
            numbers = _plain_numbers(modules)
            result = self.loss(module, batch)
            # The loss may have put other modules into this one.
            _warn_changed(numbers, _plain_numbers(nnx.iter_modules(module)))
            return module, result

        try:
            module, result = call_loss(use_own_axis=True)
        except NameError as error:
            if "unbound axis name" not in str(error):
                raise
            # The norm's axis is for `pmap`, and no `pmap` binds it here. It stands for the rows.
            module, result = call_loss(use_own_axis=False)
        _, new_params, new_variables = nnx.split(module, nnx.Param, ...)
        # A parameter that the loss adds would be lost: a step carries those of `init`.
        self.params.check(new_params)
        return result, self.other_variables.updated(variables, new_variables), self.params.pure(new_params)

    def unwrap(self, tree: Any) -> Any:
        """Return the nested dicts of an `nnx.State` of parameters; nested dicts are returned as they are."""
        return self.params.pure(tree) if isinstance(tree, nnx.State) else tree

    def names(self) -> dict[str, tuple[Any, ...]]:
        """Return the names that annotations give to the dims of parameters, by path."""
        return _annotations(self.param_shapes)


def _build(make: Callable[[nnx.Rngs], nnx.Module], key: jax.Array) -> nnx.Module:
    """Call `make` under a trace, and check its result."""
    # Without `use_eager_sharding(False)`, annotated modules would ask for a mesh.
    with nnx.use_eager_sharding(False), traced("make(rngs)", IN_INIT):
        module = make(nnx.Rngs(key))
    if not isinstance(module, nnx.Module):
        description = _OF_LINEN if isinstance(module, nn.Module) else f"{type(module).__name__}, needs an nnx.Module"
        raise ValueError(f"from_nnx: make(rngs) returned {description}")
    for _, submodule in nnx.iter_modules(module):
        for name, value in list(vars(submodule).items()):
            if isinstance(value, Tracer):  # a plain array: under jit Flax would take it for a static attribute
                setattr(submodule, name, nnx.data(value))
    return module


def _set_norm_axes(modules: Modules, use_own_axis: bool) -> None:
    """Set the axes that each BatchNorm averages over.

    These are the axes of the rows, after the norm's own axis (of a `vmap`) if `use_own_axis`.
    """
    for _, submodule in modules:
        if isinstance(submodule, nnx.BatchNorm):
            axis_name = submodule.axis_name if use_own_axis else None
            names = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
            # The norm's own axes, which a `vmap` in the model binds, and those over which rows are spread.
            axes = (*(name for name in names if name not in row_axes()), *row_axes())
            submodule.axis_name = axes or None  # type: ignore[assignment]  # lax.pmean takes several axes


def _embed_in_table_dtype(modules: Modules) -> None:
    """Make each embedding compute in the present dtype of its table.

    `nnx.Embed` records the dtype of its table when it is built, which is the dtype of the master weights, and casts to
    it at every lookup. All matmuls after it would then run in float32 under precision="bf16". If the user passes
    `dtype=` (jnp.float32, say), `nnx.Embed` records this very object, which is no `np.dtype`; such a choice is kept.
    """
    for _, submodule in modules:
        if (
            isinstance(submodule, nnx.Embed)
            and isinstance(submodule.dtype, np.dtype)
            and submodule.dtype == submodule.param_dtype
        ):
            submodule.dtype = submodule.embedding.dtype


def _plain_numbers(modules: Modules) -> dict[str, bool | int | float]:
    """Return the plain Python numbers that are attributes of modules, by path."""
    return {
        "/".join(map(str, (*path, name))): value
        for path, submodule in modules
        for name, value in vars(submodule).items()
        if isinstance(value, bool | int | float)
    }


def _warn_changed(old_numbers: Mapping[str, Any], new_numbers: Mapping[str, Any]) -> None:
    """Warn of plain numbers that the loss has changed: the traced program always reads the old ones."""
    for name, value in old_numbers.items():
        if (new_value := new_numbers.get(name, value)) != value:
            advice = "keep it in a variable, nnx.Variable(jnp.zeros(())), and assign to its [...]"
            if name.rpartition("/")[2] in _MODES:
                advice = "call train() in the function that makes the module; evaluate calls eval()"
            warnings.warn(
                f"the loss changes {name}, a plain Python attribute, from {value} to {new_value}; a step's program is "
                f"traced once, so that every step reads {value}; {advice}",
                stacklevel=2,
            )


def _arrays_in_objects(module: nnx.Module) -> list[tuple[Any, str]]:
    """Return the traced arrays in plain objects that are attributes of modules, as pairs of object and attribute name.

    An example is a dataclass of RoPE tables. To NNX such an object is static, and a traced array in it would be used
    after its trace has ended.
    """
    arrays: dict[tuple[int, str], tuple[Any, str]] = {}
    for _, submodule in nnx.iter_modules(module):
        for obj in vars(submodule).values():
            if not isinstance(obj, nnx.Pytree | nnx.Variable | Tracer) and hasattr(obj, "__dict__"):
                names = [name for name, x in vars(obj).items() if isinstance(x, Tracer)]
                arrays |= {(id(obj), name): (obj, name) for name in names}
    return list(arrays.values())


def _annotations(state: Any) -> dict[str, tuple[Any, ...]]:
    """Return the names that annotations give to the dims of parameters, by path; one entry for each dim.

    An annotation may have fewer names than the parameter has dims. `nnx.vmap` adds a dim in front, and names it only if
    it is told how (`transform_metadata`). In other cases the last dims have no names, as in a PartitionSpec.
    """
    shapes, names_by_path = {}, {}
    for path, variable in nnx.to_flat_state(state):
        if not (leaves := jax.tree.leaves(variable)):
            continue
        shapes[path] = leaves[0].shape
        sharding = variable.get_metadata().get("out_sharding")
        sharding = getattr(sharding, "sharding", sharding)  # it may be a Format
        names = getattr(sharding, "spec", sharding)  # or a NamedSharding
        if names is not None:
            names_by_path[path] = (names,) if isinstance(names, str) else tuple(names)
    # Give every annotation one name for each dim: None for a stack in front, and for dims at the end.
    padded = {}
    for path, names in names_by_path.items():
        missing = len(shapes[path]) - len(names)
        stack_dims = int(missing > 0 and _in_unnamed_stack(path, shapes, names_by_path))
        padded["/".join(map(str, path))] = (None,) * stack_dims + names + (None,) * (missing - stack_dims)
    return padded


def _in_unnamed_stack(path: Any, shapes: dict[Any, Any], names_by_path: dict[Any, Any]) -> bool:
    """Whether the leaves of a module around this one share their first dim, and no annotation names it."""
    # From the outermost module inwards. A module with this leaf alone says nothing about a stack.
    for n in range(1, len(path)):
        siblings = [leaf_path for leaf_path in shapes if leaf_path[:n] == path[:n]]
        if len({shapes[leaf_path][:1] for leaf_path in siblings}) == 1 and (n == 1 or len(siblings) > 1):
            return not any(
                len(names_by_path[leaf_path]) == len(shapes[leaf_path])
                for leaf_path in siblings
                if leaf_path in names_by_path
            )
    return False


class _StateTree(ArrayTree):
    """Translates between an `nnx.State` and nested dicts of arrays: flattening a State in every step is slow.

    Attributes:
      types: path -> the type of the variable.
      nonempty: the paths of variables that hold an array; the others hold None, such as a cache before its first use.
    """

    def __init__(self, state: Any):
        super().__init__(state)
        flat = nnx.to_flat_state(state)
        self.types = {path: type(variable) for path, variable in flat}
        self.nonempty = {path for path, variable in flat if jax.tree.leaves(variable)}

    def pure(self, tree: Any) -> dict[Any, Any]:
        """Return the nested dicts of a State. Variables without an array are left out."""
        # Read the raw arrays by `jax.tree.leaves`: `.value` may run hooks.
        leaves_by_path = {
            path: leaves for path, variable in nnx.to_flat_state(tree) if (leaves := jax.tree.leaves(variable))
        }
        # A variable may hold a tuple of arrays: its dict has them by index.
        return unflatten_dict({p: x[0] if len(x) == 1 else dict(enumerate(x)) for p, x in leaves_by_path.items()})

    def keyed(self, pure: Any, key: jax.Array) -> Any:
        """Return the variables with `key` folded into every random stream, so that no two blocks of rows draw alike."""
        bits = jax.random.bits(key, (), jnp.uint32)

        # Folding keeps streams different from each other, which one common key would not.
        def fold(path: Any, leaf: Any) -> Any:
            # Only keys are folded: a stream's count of draws stays.
            if not issubclass(self._type(keys_of(path)), nnx.RngKey):
                return leaf
            # Stacked layers have an array of keys.
            return jax.vmap(lambda k: jax.random.fold_in(k, bits))(leaf.reshape(-1)).reshape(leaf.shape)

        return jax.tree_util.tree_map_with_path(fold, pure)

    def _type(self, path: tuple[Any, ...]) -> type:
        """Return the type of the variable that holds a leaf."""
        return self.types[path if path in self.types else path[:-1]]  # one array of a tuple has an index too

    def check(self, state: Any) -> None:
        """Raise ValueError if the loss has added a variable, unless it has only sown it."""
        for path, variable in nnx.to_flat_state(state):
            if path not in self.types and not isinstance(variable, nnx.Intermediate):
                name = "/".join(map(str, path))
                raise ValueError(
                    f"the loss adds {name} ({type(variable).__name__}) to the module; create it in the constructor, or "
                    "sow it as nnx.Intermediate"
                )

    def updated(self, old: Any, state: Any) -> Any:
        """Return the variables after a call of the loss.

        Random streams are as before the call, and sown values are left out.

        Raises:
          ValueError: the loss has added a variable, filled an empty one or emptied a filled one.
        """
        new_leaves = {}
        for path, variable in nnx.to_flat_state(state):
            leaves = jax.tree.leaves(variable)
            # Variables that are new altogether are left to `check`, which knows those that are sown.
            if bool(leaves) != (path in self.nonempty) and path in self.types:
                old_state, new_state = ("an array", "None") if not leaves else ("None", "an array")
                name = "/".join(map(str, path))
                raise ValueError(
                    f"the loss changes {name} from {old_state} to {new_state}, and a step's variables keep their "
                    "structure; create it in the constructor"
                )
            if path in self.nonempty:
                new_leaves |= {path: leaves[0]} if len(leaves) == 1 else {(*path, i): x for i, x in enumerate(leaves)}
        self.check(state)

        def new_value(path: Any, old_leaf: Any) -> Any:
            key_path = keys_of(path)
            return (
                old_leaf
                if issubclass(self._type(key_path), nnx.RngState) or key_path not in new_leaves
                else new_leaves[key_path]
            )

        return jax.tree_util.tree_map_with_path(new_value, old)
