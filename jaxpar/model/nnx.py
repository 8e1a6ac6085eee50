"""Flax NNX modules as models. The module is built and split once; inside there are only dicts of arrays."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.core import Tracer

from .calls import IN_INIT, check_call, traced
from .model import Model, row_axes

_OF_LINEN = "a Linen module; use jp.from_linen(Net(...), loss, batch), whose loss gets apply"


def from_nnx(
    make: Callable[[nnx.Rngs], nnx.Module],
    loss: Callable[[Any, Any], Any],
    rules: Mapping[str, int | str | None] | None = None,
    rows: str | None = None,
) -> Model:
    """A model from an NNX module, which is not changed and need not be annotated.

    Args:
      make: `make(rngs)` builds the module; called under `jax.jit`, so that parameters are created sharded.
      loss: `loss(module, batch)` returns a scalar mean over rows or `jp.Mean`, or a pair of that and a dict of metrics.
      rules: the model's own table of what `tensor` splits; see `Model`. The names that the module's annotations give
        to dims (`nnx.with_partitioning`, `out_sharding=`) serve beside it.
      rows: "independent" where the loss is known not to couple rows, whatever its program looks like; see `Model`.

    `nnx.Param`s are the parameters. If the loss assigns to one (`nnx.SpectralNorm` does), the optimizer changes what it
    assigned, as in a loop of plain Flax; a step raises ValueError if that depends on the rows. Every other variable is
    state, kept as the loss leaves it and the same on all replicas. `nnx.BatchNorm`
    computes its statistics over the rows of all replicas. Streams of random numbers (dropout) get keys that depend on
    the stream, the step and the block of rows, and are not advanced. In `evaluate` the module is in `eval()` mode.

    Raises ValueError where `make` is not such a function.
    """
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

    def build(key: jax.Array) -> Any:
        # Annotated modules would ask for a mesh.
        with nnx.use_eager_sharding(False), traced("make(rngs)", IN_INIT):
            module = make(nnx.Rngs(key))
        if not isinstance(module, nnx.Module):
            found = _OF_LINEN if isinstance(module, nn.Module) else f"{type(module).__name__}, needs an nnx.Module"
            raise ValueError(f"from_nnx: make(rngs) returned {found}")
        for _, part in nnx.iter_modules(module):
            for name, value in list(vars(part).items()):
                if isinstance(value, Tracer):  # a plain array, which Flax takes for a static attribute under jit
                    setattr(part, name, nnx.data(value))
        return module

    graphs, holders = [], []

    def parts(key: jax.Array) -> Any:
        graph, *states = nnx.split(module := build(key), nnx.Param, ...)
        graphs.append(graph)
        holders.append(held := _held_by_objects(module))
        return states, [getattr(held_by, name) for held_by, name in held]

    # Not nnx.eval_shape: what is left of a plain array there (RoPE tables, WeightNorm's scales) is no array, and would
    # be taken for a static attribute.
    (param_state, other_state), held = jax.eval_shape(parts, jax.random.key(0))
    graph, holder = graphs[0], holders[0]
    if held:  # of the traced module: its objects, which the graph holds as they are, get the numbers
        made = jax.jit(lambda key: parts(key)[1])
        for (held_by, name), value, other in zip(holder, *map(made, jax.random.split(jax.random.key(0))), strict=True):
            if not np.array_equal(value, other, equal_nan=True):
                raise ValueError(
                    f"from_nnx: {name} of a {type(held_by).__name__} is random, and NNX does not see it, as the object "
                    "is no module; make it an nnx.Module, or keep the array in an nnx.Variable of one"
                )
            object.__setattr__(held_by, name, np.asarray(value))
    params_tree, others_tree = _Tree(param_state), _Tree(other_state)

    def init(key: jax.Array) -> tuple[Any, Any]:
        _, params, others = nnx.split(build(key), nnx.Param, ...)
        return params_tree.pure(params), others_tree.pure(others)

    def bind(params: Any, variables: Any) -> Any:
        return nnx.merge(graph, params_tree.state(params), others_tree.state(variables))

    def call(params: Any, variables: Any, batch: Any, key: jax.Array | None) -> Any:
        def run(own: bool) -> tuple[Any, Any]:
            module = bind(params, variables if key is None else others_tree.keyed(variables, key))
            if key is None:
                module.eval()
            _average(module, own)
            _embed_in_table_dtype(module)
            numbers = _plain_numbers(module)
            out = loss(module, batch)
            _warn_changed(numbers, _plain_numbers(module))
            return module, out

        try:
            module, out = run(own=True)
        except NameError as error:
            if "unbound axis name" not in str(error):
                raise
            module, out = run(own=False)  # a name of `pmap`, which is not there, is that of the rows
        _, found, others = nnx.split(module, nnx.Param, ...)
        params_tree.check(found)
        return out, others_tree.updated(variables, others), params_tree.pure(found)

    return Model(
        init,
        call,
        stateful=True,
        wrap=params_tree.state,
        unwrap=lambda tree: params_tree.pure(tree) if isinstance(tree, nnx.State) else tree,
        bind=bind,
        rules=rules,
        names=lambda: _annotations(param_state),
        rows=rows,
    )


def _average(module: nnx.Module, own: bool) -> None:
    """Makes each BatchNorm average over the axes of the rows, and over its `own`, which is that of a `vmap`."""
    for _, part in nnx.iter_modules(module):
        if isinstance(part, nnx.BatchNorm):
            given = part.axis_name if own else None
            names = () if given is None else (given,) if isinstance(given, str) else tuple(given)
            over = (*(name for name in names if name not in row_axes()), *row_axes())
            part.axis_name = over or None  # type: ignore[assignment]  # lax.pmean takes several axes


def _embed_in_table_dtype(module: nnx.Module) -> None:
    """Make each embedding compute in the dtype that its table has now.

    `nnx.Embed` notes the dtype of its table when it is made, which is the master's, and casts to it at every lookup.
    All products after it would then be in float32 under precision="bf16". Given a `dtype=` such as jnp.float32, it
    notes that one as it is, which is no `np.dtype`, and keeps it.
    """
    for _, part in nnx.iter_modules(module):
        if isinstance(part, nnx.Embed) and isinstance(part.dtype, np.dtype) and part.dtype == part.param_dtype:
            part.dtype = part.embedding.dtype


def _plain_numbers(module: nnx.Module) -> dict[str, bool | int | float]:
    """The plain Python numbers that are attributes of modules, by path."""
    return {
        "/".join(map(str, (*path, name))): value
        for path, part in nnx.iter_modules(module)
        for name, value in vars(part).items()
        if isinstance(value, bool | int | float)
    }


def _warn_changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Warn of plain numbers that the loss has changed: the traced program has them as they were."""
    for name, value in before.items():
        if (new := after.get(name, value)) != value:
            warnings.warn(
                f"the loss changes {name}, a plain Python attribute, from {value} to {new}; a step's program is traced "
                f"once, so that every step reads {value}; keep it in a variable, nnx.Variable(jnp.zeros(())), "
                "and assign to its [...]",
                stacklevel=2,
            )


def _held_by_objects(module: nnx.Module) -> list[tuple[Any, str]]:
    """Traced arrays in plain objects that are attributes of modules, such as a dataclass of RoPE tables: object, name.

    To NNX such an object is static; a traced array in it would be used after its trace has ended.
    """
    found: dict[tuple[int, str], tuple[Any, str]] = {}
    for _, part in nnx.iter_modules(module):
        for held_by in vars(part).values():
            if not isinstance(held_by, nnx.Pytree | nnx.Variable | Tracer) and hasattr(held_by, "__dict__"):
                names = [name for name, x in vars(held_by).items() if isinstance(x, Tracer)]
                found |= {(id(held_by), name): (held_by, name) for name in names}
    return list(found.values())


def _annotations(state: Any) -> dict[str, tuple[Any, ...]]:
    """By path of each annotated parameter, its names, one for each dim.

    They may be fewer than the dims: `nnx.vmap` puts its dim in front, and names it only if it is told how
    (`transform_metadata`); else the last dims have none, as in a PartitionSpec.
    """
    shapes, given = {}, {}
    for path, variable in nnx.to_flat_state(state):
        if not (leaves := jax.tree.leaves(variable)):
            continue
        shapes[path] = leaves[0].shape
        sharding = variable.get_metadata().get("out_sharding")
        sharding = getattr(sharding, "sharding", sharding)  # of a Format
        names = getattr(sharding, "spec", sharding)  # of a NamedSharding
        if names is not None:
            given[path] = (names,) if isinstance(names, str) else tuple(names)
    out = {}
    for path, names in given.items():
        missing = len(shapes[path]) - len(names)
        stack = int(missing > 0 and _in_unnamed_stack(path, shapes, given))
        out["/".join(map(str, path))] = (None,) * stack + names + (None,) * (missing - stack)
    return out


def _in_unnamed_stack(path: Any, shapes: dict[Any, Any], given: dict[Any, Any]) -> bool:
    """Whether the leaves of a module around this one share their first dim, to which no annotation gives a name."""
    for n in range(1, len(path)):
        below = [at for at in shapes if at[:n] == path[:n]]
        if len({shapes[at][:1] for at in below}) == 1 and (n == 1 or len(below) > 1):
            return not any(len(given[at]) == len(shapes[at]) for at in below if at in given)
    return False


class _Tree:
    """Between an `nnx.State` and nested dicts of arrays. Flattening a State at every step is slow; dicts are fast."""

    def __init__(self, state: Any):
        self.tree = jax.tree.structure(state)
        flat = nnx.to_flat_state(state)
        self.types = {path: type(variable) for path, variable in flat}
        self.filled = {path for path, variable in flat if jax.tree.leaves(variable)}
        numbered = jax.tree.unflatten(self.tree, list(range(self.tree.num_leaves)))
        self.order = jax.tree.leaves(self.pure(numbered))  # dicts may sort their keys in another order

    def pure(self, state: Any) -> dict[Any, Any]:
        # Raw arrays: reading `.value` may run hooks. None of nnx.Variable(None), a cache that is not made yet, say.
        every = {path: leaves for path, variable in nnx.to_flat_state(state) if (leaves := jax.tree.leaves(variable))}
        # Of a tuple of arrays, each by its number.
        return unflatten_dict({p: x[0] if len(x) == 1 else dict(enumerate(x)) for p, x in every.items()})

    def state(self, pure: Any) -> Any:
        leaves: list[Any] = [None] * self.tree.num_leaves
        for at, leaf in zip(self.order, jax.tree.leaves(pure), strict=True):
            leaves[at] = leaf
        return jax.tree.unflatten(self.tree, leaves)

    def keyed(self, pure: Any, key: jax.Array) -> Any:
        """Every stream's key folded with `key`, so that no two blocks of rows draw the same numbers."""
        bits = jax.random.bits(key, (), jnp.uint32)

        def fold(path: Any, leaf: Any) -> Any:
            if not issubclass(self._type(_keys(path)), nnx.RngKey):
                return leaf
            return jax.vmap(lambda k: jax.random.fold_in(k, bits))(leaf.reshape(-1)).reshape(leaf.shape)

        return jax.tree_util.tree_map_with_path(fold, pure)

    def _type(self, at: tuple[Any, ...]) -> type:
        """Of the variable that holds a leaf."""
        return self.types[at if at in self.types else at[:-1]]

    def check(self, state: Any) -> None:
        """Raise ValueError where a call has added a variable, unless it was only sown."""
        for path, variable in nnx.to_flat_state(state):
            if path not in self.types and not isinstance(variable, nnx.Intermediate):
                name = "/".join(map(str, path))
                raise ValueError(
                    f"the loss adds {name} ({type(variable).__name__}) to the module; create it in the constructor, or "
                    "sow it as nnx.Intermediate"
                )

    def updated(self, old: Any, state: Any) -> Any:
        """The variables after a call: random streams as they were, what was only sown left out."""
        new = {}
        for path, variable in nnx.to_flat_state(state):
            leaves = jax.tree.leaves(variable)
            if bool(leaves) != (path in self.filled) and path in self.types:
                was, now = ("an array", "None") if not leaves else ("None", "an array")
                name = "/".join(map(str, path))
                raise ValueError(f"the loss makes {name} {now}, and it was {was}; create it in the constructor")
            if path in self.filled:
                new |= {path: leaves[0]} if len(leaves) == 1 else {(*path, i): x for i, x in enumerate(leaves)}
        self.check(state)

        def leaf(path: Any, before: Any) -> Any:
            at = _keys(path)
            return before if issubclass(self._type(at), nnx.RngState) or at not in new else new[at]

        return jax.tree_util.tree_map_with_path(leaf, old)


def _keys(path: Any) -> tuple[Any, ...]:
    return tuple(entry.key for entry in path)
