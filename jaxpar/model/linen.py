"""Flax Linen modules as models.

A Linen module has no arrays of its own, and its caller passes variables and random keys to `module.apply`. Here the
loss gets an `Apply`, which it calls without them:

    loss(apply, batch):   logits = apply(batch["image"])

A model's `init` traces the loss once on an example, with an `Apply` that creates variables instead of reading them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from .batches import example_shapes
from .calls import check_call, reading
from .model import Model, averaged_axes, without_mesh
from .paths import name_of


class Apply:
    """The function that a Linen loss calls instead of `module.apply`. It manages variables, random keys and BatchNorm.

    `apply(*args, method=None, mutable=(), **kwargs)` returns the module's output. Where `mutable` names collections to
    receive (sown losses, intermediates), it returns `(output, collections)`. `apply.train` is False in `evaluate`.

    Args:
      module: the module.
      variables: the values of all its collections.
      key: for this call of the loss; None in `evaluate`.
      creating: whether calls create variables.

    Attributes:
      received: the collections that the loss has received.
      names: by path, the names that annotations give to the dims of parameters; filled when variables are created.
    """

    def __init__(self, module: nn.Module, variables: dict[str, Any], key: jax.Array | None, creating: bool = False):
        self._module, self._key, self._creating = module, key, creating
        self.variables, self.train, self._calls = variables, key is not None, 0
        self.received: set[str] = set()
        self.names: dict[str, tuple[Any, ...]] = {}

    def __call__(self, *args: Any, method: Any = None, mutable: Any = (), **kwargs: Any) -> Any:
        """Call the module; see the class."""
        if "rngs" in kwargs:
            raise ValueError("apply(rngs=...): leave it out; jaxpar passes a key for each step and block of rows")
        if args and isinstance(args[0], Mapping) and "params" in args[0]:
            raise ValueError("apply(variables, ...): leave them out, apply(x); jaxpar passes parameters and statistics")
        if mutable is True or isinstance(mutable, nn.DenyList):
            raise ValueError(
                f"apply(mutable={mutable!r}): name the collections that the loss reads, as mutable=['intermediates']; "
                "jaxpar keeps statistics and other state without it"
            )
        received = (mutable,) if isinstance(mutable, str) else tuple(mutable or ())
        self.received |= set(received)
        rngs = {}  # none in `evaluate`: a module that draws then raises an error
        if self._key is not None:
            # Flax derives every other stream (dropout, ...) from "params" by name. Each call of the loss gets its own.
            rngs = {"params": jax.random.fold_in(self._key, self._calls)}
        self._calls += 1
        if self._creating:
            output, updates = self._create(args, method, rngs, kwargs)
        else:
            # State is always mutable, whether or not the loss asks for it. Parameters are only if it does.
            state_names = [name for name in self.variables if name != "params"]
            with nn.intercept_methods(_interceptor(self.train)):
                output, updates = self._module.apply(
                    self.variables, *args, method=method, mutable=[*state_names, *received], rngs=rngs, **kwargs
                )
            # Only collections that are state are kept for the next call. Others, such as sown values, are the loss's.
            self.variables = {
                **self.variables,
                **{name: updates[name] for name in (*state_names, "params") if name in updates},
            }
        return (output, {name: updates[name] for name in received if name in updates}) if received else output

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"apply has no {name!r}; it is called as module.apply without variables, and has apply.train",
            name=name,
            obj=self,
        )

    def _create(self, args: Any, method: Any, rngs: Any, kwargs: Any) -> tuple[Any, Any]:
        """Call the module and create the variables that it does not have yet; note the names of dims."""
        if not self.variables:
            result, created = self._module.init_with_output(rngs, *args, method=method, **kwargs)
        else:  # a second call, perhaps of another method, may create more variables
            result, created = self._module.apply(
                self.variables, *args, method=method, mutable=True, rngs=rngs, **kwargs
            )
        # Parameters with annotations are boxes with names. Steps get bare arrays, and `names` apart from them.
        is_boxed = lambda x: isinstance(x, nn.meta.AxisMetadata)
        for path, box in jax.tree_util.tree_leaves_with_path(created.get("params", {}), is_leaf=is_boxed):
            if isinstance(box, nn.Partitioned):
                self.names.setdefault(name_of(path), tuple(box.names))
        created = nn.meta.unbox(dict(created))
        self.variables = _union(created, self.variables)
        return result, created


def from_linen(
    module: nn.Module,
    loss: Callable[[Any, Any], Any],
    example: Any,
    rules: Mapping[str, int | str | None] | None = None,
    rows: str | None = None,
) -> Model:
    """Return a model from a Linen module, which is not changed and need not be annotated.

    The collection `params` holds the parameters. Other collections are state (BatchNorm statistics), the same on all
    replicas. If a module writes to its parameters, under `apply(..., mutable=["params"])`, the optimizer updates the
    values that it wrote. `nn.BatchNorm` computes its statistics over the rows of all replicas. In `evaluate`,
    `nn.Dropout`, attention dropout and `nn.BatchNorm` are deterministic, whatever the loss asks for.

    Args:
      module: the module; its variables are created by tracing the loss on `example`.
      loss: `loss(apply, batch)` calls `apply(...)` as it would `module.apply` without the variables, and returns a
        scalar mean over rows or `jp.Mean`, or a pair of that and a dict of metrics.
      example: a batch (arrays or `jax.ShapeDtypeStruct`), of any number of rows.
      rules: the model's own table of the dims that `tensor` splits; see `Model`. Names that the module's annotations
        give to dims (`nn.with_partitioning`, `nn.with_logical_partitioning`) are used too.
      rows: "independent" if the loss is known not to couple rows, whatever its program looks like; see `Model`.

    Raises:
      ValueError: an argument is of another kind.
    """
    if not isinstance(module, nn.Module):
        description = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise ValueError(f"from_linen got {description}, needs a flax.linen.Module instance such as Net(...)")
    if not callable(loss):
        raise ValueError(f"from_linen(loss={loss!r}): the loss must be a function loss(apply, batch)")
    check_call(loss, "from_linen(loss=)", "apply", "batch")
    linen = LinenModule(module, loss, example_shapes(example, "from_linen(example=)"))
    return Model(linen.init, linen.call, stateful=True, bind=linen.bind, rules=rules, names=linen.names, rows=rows)


@dataclass(frozen=True, eq=False)
class LinenModule:
    """A module and its loss: the functions of a `Model`.

    Attributes:
      module, loss: as for `from_linen`.
      shapes: the shapes of a batch.
    """

    module: nn.Module
    loss: Callable[[Any, Any], Any]
    shapes: Any

    def _create(self, key: jax.Array) -> Apply:
        """Call the loss on zeros of the example's shapes; the result has the variables that it created."""
        apply = Apply(self.module, {}, key, creating=True)
        with reading(zeros := jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.shapes), "the example"):
            self.loss(apply, zeros)
        return apply

    def names(self) -> dict[str, tuple[Any, ...]]:
        """Return the names that annotations give to the dims of parameters, by path."""
        dim_names: dict[str, tuple[Any, ...]] = {}
        # Names are static: an abstract trace collects them.
        # `Model.create` hides the mesh for `init`. This trace is outside of it.
        with without_mesh():
            jax.eval_shape(lambda key: dim_names.update(self._create(key).names), jax.random.key(0))
        return dim_names

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """Return the first parameters and variables."""
        apply = self._create(key)
        if "params" not in apply.variables:
            raise ValueError(
                f"{type(self.module).__name__} created no parameters on the example; does the loss call apply(...)?"
            )
        # Collections that the loss receives are fresh at every call. Only batch_stats stays state: losses written for
        # `module.apply` name it in `mutable` by habit.
        transient = {"params", "intermediates"} | apply.received - {"batch_stats"}
        variables = {k: v for k, v in apply.variables.items() if k not in transient}
        return apply.variables["params"], variables

    def call(self, params: Any, variables: Any, batch: Any, key: jax.Array | None) -> Any:
        """Call the loss; return its result, the new variables and the new parameters."""
        apply = Apply(self.module, {"params": params, **variables}, key)
        result = self.loss(apply, batch)
        new_variables = {k: v for k, v in apply.variables.items() if k != "params"}
        # A step's state has one structure, for which the step is compiled.
        for name in variables:
            if jax.tree.structure(new_variables[name]) != jax.tree.structure(variables[name]):
                raise ValueError(
                    f"collection {name!r} changes its structure from call to call (is it sown?); "
                    f"call apply(..., mutable=[{name!r}]) to receive it in the loss"
                )
        return result, new_variables, apply.variables["params"]

    def bind(self, params: Any, variables: Any) -> Any:
        """Return the module with these values."""
        return self.module.bind({"params": params, **variables})


def _interceptor(train: bool) -> Callable[..., Any]:
    """Return an interceptor: BatchNorm reaches over all replicas, and in `evaluate` modules are deterministic."""

    def intercept(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        # Only `__call__` of these modules takes the switches.
        if context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        switch = "use_running_average" if isinstance(module, nn.BatchNorm) else "deterministic"
        if isinstance(module, nn.BatchNorm):
            # No copy is needed: this bound module lives for one call.
            object.__setattr__(module, "axis_name", averaged_axes(module.axis_name))
        if not train and isinstance(module, nn.BatchNorm | nn.Dropout | nn.MultiHeadDotProductAttention):
            # Flax refuses a switch that both the module and the call set. `object`, because modules are frozen.
            object.__setattr__(module, switch, None)
            # The loss may pass the switch by position, after the inputs. Drop it there: given twice, it is an error.
            args = args[:1] if isinstance(module, nn.BatchNorm | nn.Dropout) else args
            kwargs = {**kwargs, switch: True}
        return next_fun(*args, **kwargs)

    return intercept


def _union(new: Any, old: Any) -> Any:
    """Return two nested dicts joined; a leaf in both has its value in `old`."""
    if not isinstance(new, dict) or not isinstance(old, dict):
        return old
    return {k: _union(new[k], old[k]) if k in new and k in old else new.get(k, old.get(k)) for k in {**new, **old}}
