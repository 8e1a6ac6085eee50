"""Haiku's transformed functions as models."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from ..packages import needed
from ..program import jaxpr as jx
from .batches import example_shapes
from .calls import check_call, reading
from .model import Model, averaged_axes


class HaikuApply:
    """What a Haiku loss calls in place of `transformed.apply`: parameters, state, keys and statistics are seen to.

    `apply(*args, **kwargs)` returns the function's output, with and without state. `apply.train` is False in
    `evaluate`, where there is a key for modules that ask for one whatever their rate of dropout, and nothing may
    depend on it.
    """

    def __init__(self, hk: Any, transformed: Any, params: Any, state: Any, key: jax.Array | None):
        self._hk, self._transformed, self._calls = hk, transformed, 0
        self._key = jax.random.key(0) if key is None else key
        self.params, self.state, self.train = params, state, key is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; see the class."""
        if "rng" in kwargs:
            raise ValueError("apply(rng=...): leave it out; there is a key for each step and block of rows")
        key = jax.random.fold_in(self._key, self._calls)
        self._calls += 1

        def call(key: jax.Array) -> tuple[Any, Any]:
            return self._call(key, args, kwargs), self.state

        with self._hk.intercept_methods(_interceptor(self._hk, self.train)):
            if self.train:
                return call(key)[0]
            closed, made = jax.make_jaxpr(call, return_shape=True)(key)
        if not jx.depends(closed.jaxpr.eqns, closed.jaxpr.invars).isdisjoint(jx.free((), closed.jaxpr.outvars)):
            raise ValueError(
                "the result of apply depends on its rng in evaluate, as by dropout or a sample; draw only where "
                "apply.train is True, as hk.dropout(key, 0.1 if train else 0.0, x) does of a function that is given it"
            )
        out, self.state = jax.tree.unflatten(jax.tree.structure(made), jec.jaxpr_as_fun(closed)(key))
        return out

    def _call(self, key: jax.Array, args: Any, kwargs: Any) -> Any:
        if self.state is None:
            return self._transformed.apply(self.params, key, *args, **kwargs)
        out, self.state = self._transformed.apply(self.params, self.state, key, *args, **kwargs)
        return out

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"apply has no {name!r}; it is called as transformed.apply without params, state and rng, and has "
            "apply.train",
            name=name,
            obj=self,
        )


class _Creating(HaikuApply):
    """A `HaikuApply` that creates: each call may be of other arguments, and need what those before it did not."""

    def _call(self, key: jax.Array, args: Any, kwargs: Any) -> Any:
        made = self._transformed.init(key, *args, **kwargs)
        params, state = (made, None) if self.state is None else made
        self.params = _joined(params, self.params)
        if self.state is None:
            return self._transformed.apply(self.params, key, *args, **kwargs)
        self.state = _joined(state, self.state)
        return self._transformed.apply(self.params, self.state, key, *args, **kwargs)[0]


def from_haiku(
    transformed: Any,
    loss: Callable[[Any, Any], Any],
    example: Any,
    rules: Mapping[str, int | str | None] | None = None,
    rows: str | None = None,
) -> Model:
    """A model from a function that Haiku has transformed. Needs the package: `pip install dm-haiku`.

    Args:
      transformed: what `hk.transform` or `hk.transform_with_state` returns; its parameters are created by tracing the
        loss on `example`.
      loss: `loss(apply, batch)` calls `apply(...)` as it would `transformed.apply` without params, state and rng, and
        returns a scalar mean over rows or `jp.Mean`, or a pair of that and a dict of metrics.
      example: a batch (arrays or `jax.ShapeDtypeStruct`), of any number of rows.
      rules, rows: see `Model`.

    State is kept as the calls leave it, and is the same on all replicas. `hk.BatchNorm` and Haiku's vector quantizers
    compute their statistics over the rows of all replicas. In `evaluate` they have `is_training=False` whatever the
    loss asks for, and nothing may depend on the rng: ask `apply.train` before dropout.

    Raises ValueError where Haiku is not installed, or the arguments are not of these kinds.
    """
    hk = needed("haiku", "from_haiku needs")
    if not isinstance(transformed, hk.Transformed | hk.TransformedWithState):
        name = getattr(transformed, "__name__", type(transformed).__name__)
        raise ValueError(
            f"from_haiku got {name}, needs what hk.transform(f) or hk.transform_with_state(f) returns, for an f that "
            "makes its modules and calls them"
        )
    stateful = isinstance(transformed, hk.TransformedWithState)
    if "rng" not in [*inspect.signature(transformed.apply).parameters][: 2 + stateful]:
        raise ValueError("from_haiku got hk.without_apply_rng(f); hand over f itself: the rng is seen to")
    if not callable(loss):
        raise ValueError(f"from_haiku(loss={loss!r}): the loss must be a function loss(apply, batch)")
    check_call(loss, "from_haiku(loss=)", "apply", "batch")
    shapes = example_shapes(example, "from_haiku(example=)")

    def init(key: jax.Array) -> tuple[Any, Any]:
        apply = _Creating(hk, transformed, {}, {} if stateful else None, key)
        with reading(zeros := jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), "the example"):
            loss(apply, zeros)
        if not apply.params:
            raise ValueError("the loss created no parameters on the example; does it call apply(...)?")
        return apply.params, apply.state or {}

    def call(params: Any, variables: Any, batch: Any, key: jax.Array | None) -> Any:
        apply = HaikuApply(hk, transformed, params, variables if stateful else None, key)
        out = loss(apply, batch)
        return out, apply.state or {}

    def bind(params: Any, variables: Any) -> Any:
        return functools.partial(transformed.apply, params, *([variables] if stateful else []))

    return Model(init, call, stateful=True, bind=bind, rules=rules, rows=rows)


def _interceptor(hk: Any, train: bool) -> Callable[..., Any]:
    """Makes modules with statistics reach over all replicas and, without `train`, use those of before."""
    counting = (hk.BatchNorm, hk.nets.VectorQuantizer, hk.nets.VectorQuantizerEMA)

    def intercept(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if isinstance(module, counting) and context.method_name == "__call__":
            module.cross_replica_axis = averaged_axes(module.cross_replica_axis)  # the module lives for one call
            if not train:
                args, kwargs = (args[0], False, *args[2:]), {k: v for k, v in kwargs.items() if k != "is_training"}
        return next_fun(*args, **kwargs)

    return intercept


def _joined(new: Any, old: Any) -> dict[str, Any]:
    """What two calls have created, by module and name; where both have, the old."""
    return {name: {**new.get(name, {}), **old.get(name, {})} for name in {**new, **old}}
