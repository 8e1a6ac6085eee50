"""Equinox modules as models. A module is a pytree: its floating-point arrays are parameters, what is none is static."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax.traverse_util import unflatten_dict

from ..packages import needed
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
    arrays stay as `make` made them; state is kept as the loss leaves it, and is the same on all replicas.
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

    def parts(key: jax.Array) -> tuple[Any, Any, Any, Any]:
        """Parameters, other arrays, state (None without), and what is no array."""
        with traced("make(key)", IN_INIT):
            made = make(key)
        with_state = isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], eqx.nn.State)
        module, state = made if with_state else (made, None)
        params, rest = eqx.partition(module, eqx.is_inexact_array)
        if not jax.tree.leaves(params):
            raise ValueError(
                f"from_equinox: make(key) returned a {type(module).__name__} without a floating-point array"
            )
        return params, *eqx.partition(rest, eqx.is_array), state

    kept: list[Any] = []

    def arrays(key: jax.Array) -> Any:
        params, others, static, state = parts(key)
        kept.append(static)
        return params, others, state

    params_tree, others_tree, state_tree = map(_ArrayTree, jax.eval_shape(arrays, jax.random.key(0)))
    static, stateful = kept[0], state_tree.tree.num_leaves > 0
    called = ("module", "state", "batch", "key") if stateful else ("module", "batch", "key")
    check_call(loss, "from_equinox(loss=)", *called)

    def init(key: jax.Array) -> tuple[Any, Any]:
        params, others, _, state = parts(key)
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
