"""Flax Linen modules as models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from .batches import example_shapes
from .calls import check_call, reading
from .model import Model, averaged_axes, without_mesh
from .paths import name_of


class Apply:
    """What a Linen loss calls in place of `module.apply`: variables, random streams and BatchNorm are seen to.

    `apply(*args, method=None, mutable=(), **kwargs)` returns the module's output, or `(output, collections)` where
    `mutable` names collections to hand over (sown losses, intermediates). `apply.train` is False in `evaluate`.
    """

    def __init__(self, module: nn.Module, variables: dict[str, Any], key: jax.Array | None, creating: bool = False):
        self._module, self._key, self._creating = module, key, creating
        self.variables, self.train, self._calls = variables, key is not None, 0
        self.asked: set[str] = set()
        self.names: dict[str, tuple[Any, ...]] = {}  # what annotations call the dims of parameters

    def __call__(self, *args: Any, method: Any = None, mutable: Any = (), **kwargs: Any) -> Any:
        """Call the module; see the class."""
        if "rngs" in kwargs:
            raise ValueError("apply(rngs=...): leave it out; there is a key for each step and block of rows")
        if args and isinstance(args[0], Mapping) and "params" in args[0]:
            raise ValueError("apply(variables, ...): leave them out, apply(x); parameters and statistics are seen to")
        asked = (mutable,) if isinstance(mutable, str) else tuple(mutable)
        self.asked |= set(asked)
        rngs = {}
        if self._key is not None:
            # Streams that the module names otherwise (dropout, ...) are derived from this one by name.
            rngs = {"params": jax.random.fold_in(self._key, self._calls)}
        self._calls += 1
        if self._creating:
            out, new = self._create(args, method, rngs, kwargs)
        else:
            kept = [name for name in self.variables if name != "params"]
            with nn.intercept_methods(_interceptor(self.train)):
                out, new = self._module.apply(
                    self.variables, *args, method=method, mutable=[*kept, *asked], rngs=rngs, **kwargs
                )
            self.variables = {**self.variables, **{name: new[name] for name in (*kept, "params") if name in new}}
        return (out, {name: new[name] for name in asked if name in new}) if asked else out

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"apply has no {name!r}; it is called as module.apply without variables, and has apply.train",
            name=name,
            obj=self,
        )

    def _create(self, args: Any, method: Any, rngs: Any, kwargs: Any) -> tuple[Any, Any]:
        if not self.variables:
            out, new = self._module.init_with_output(rngs, *args, method=method, **kwargs)
        else:  # a second call, perhaps of another method, may create what the first did not
            out, new = self._module.apply(self.variables, *args, method=method, mutable=True, rngs=rngs, **kwargs)
        is_boxed = lambda x: isinstance(x, nn.meta.AxisMetadata)
        for path, box in jax.tree_util.tree_leaves_with_path(new.get("params", {}), is_leaf=is_boxed):
            if isinstance(box, nn.Partitioned):
                self.names.setdefault(name_of(path), tuple(box.names))
        new = nn.meta.unbox(dict(new))
        self.variables = _union(new, self.variables)
        return out, new


def from_linen(
    module: nn.Module,
    loss: Callable[[Any, Any], Any],
    example: Any,
    rules: Mapping[str, int | str | None] | None = None,
    rows: str | None = None,
) -> Model:
    """A model from a Linen module, which is not changed and need not be annotated.

    Args:
      module: the module; its variables are created by tracing the loss on `example`.
      loss: `loss(apply, batch)` calls `apply(...)` as it would `module.apply` without the variables, and returns a
        scalar mean over rows or `jp.Mean`, or a pair of that and a dict of metrics.
      example: a batch (arrays or `jax.ShapeDtypeStruct`), of any number of rows.
      rules: the model's own table of what `tensor` splits; see `Model`. The names that the module's annotations give
        to dims (`nn.with_partitioning`, `nn.with_logical_partitioning`) serve beside it.
      rows: "independent" where the loss is known not to couple rows, whatever its program looks like; see `Model`.

    The collection `params` holds the parameters; other collections are state (BatchNorm statistics), the same on all
    replicas. If a module writes to its parameters, under `apply(..., mutable=["params"])`, the optimizer changes what
    it wrote. `nn.BatchNorm` computes its statistics over the rows of all replicas. In `evaluate`, `nn.Dropout`,
    attention dropout and `nn.BatchNorm` are deterministic whatever the loss asks for.

    Raises ValueError where the arguments are not of these kinds.
    """
    if not isinstance(module, nn.Module):
        given = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise ValueError(f"from_linen got {given}, needs a flax.linen.Module instance such as Net(...)")
    if not callable(loss):
        raise ValueError(f"from_linen(loss={loss!r}): the loss must be a function loss(apply, batch)")
    check_call(loss, "from_linen(loss=)", "apply", "batch")
    shapes = example_shapes(example, "from_linen(example=)")

    def create(key: jax.Array) -> Apply:
        apply = Apply(module, {}, key, creating=True)
        with reading(zeros := jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), "the example"):
            loss(apply, zeros)
        return apply

    def names() -> dict[str, tuple[Any, ...]]:
        found: dict[str, tuple[Any, ...]] = {}
        with without_mesh():
            jax.eval_shape(lambda key: found.update(create(key).names), jax.random.key(0))
        return found

    def init(key: jax.Array) -> tuple[Any, Any]:
        apply = create(key)
        if "params" not in apply.variables:
            raise ValueError(
                f"{type(module).__name__} created no parameters on the example; does the loss call apply(...)?"
            )
        # What the loss asks for is its own, fresh at every call; batch_stats is asked for by habit, and is state.
        passing = {"params", "intermediates"} | apply.asked - {"batch_stats"}
        variables = {k: v for k, v in apply.variables.items() if k not in passing}
        return apply.variables["params"], variables

    def call(params: Any, variables: Any, batch: Any, key: jax.Array | None) -> Any:
        apply = Apply(module, {"params": params, **variables}, key)
        out = loss(apply, batch)
        new = {k: v for k, v in apply.variables.items() if k != "params"}
        for name in variables:
            if jax.tree.structure(new[name]) != jax.tree.structure(variables[name]):
                raise ValueError(
                    f"collection {name!r} changes its structure from call to call (is it sown?); "
                    f"call apply(..., mutable=[{name!r}]) to receive it in the loss"
                )
        return out, new, apply.variables["params"]

    def bind(params: Any, variables: Any) -> Any:
        return module.bind({"params": params, **variables})

    return Model(init, call, stateful=True, bind=bind, rules=rules, names=names, rows=rows)


def _interceptor(train: bool) -> Callable[..., Any]:
    """Makes BatchNorm reach over all replicas and, without `train`, whatever is random or updates deterministic."""

    def intercept(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        switch = "use_running_average" if isinstance(module, nn.BatchNorm) else "deterministic"
        if isinstance(module, nn.BatchNorm):
            # This bound copy lives for one call.
            object.__setattr__(module, "axis_name", averaged_axes(module.axis_name))
        if not train and isinstance(module, nn.BatchNorm | nn.Dropout | nn.MultiHeadDotProductAttention):
            object.__setattr__(module, switch, None)
            # The switch may come by position, after the inputs.
            args = args[:1] if isinstance(module, nn.BatchNorm | nn.Dropout) else args
            kwargs = {**kwargs, switch: True}
        return next_fun(*args, **kwargs)

    return intercept


def _union(new: Any, old: Any) -> Any:
    """Nested dicts joined; where both have a leaf, the old one."""
    if not isinstance(new, dict) or not isinstance(old, dict):
        return old
    return {k: _union(new[k], old[k]) if k in new and k in old else new.get(k, old.get(k)) for k in {**new, **old}}
