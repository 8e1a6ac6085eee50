"""The `Model` that jaxpar trains, as two pure functions, and the values that a loss may return and ask for.

    init(key) -> params, variables
    loss(params, variables, batch, key) -> value, metrics, variables

`Model.forward` calls the loss in one way whatever the user's function returns, and checks what it returned. The loss
sees one block of rows. What it needs from the other blocks comes through this module: a `Mean` carries sum and count,
`all_rows` gathers the rows of all replicas, and BatchNorm averages over `row_axes`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import collectives
from .calls import IN_INIT, IN_LOSS, check_call, kind_of, reading, traced

MAKERS = "jp.from_nnx, jp.from_linen, jp.from_equinox or jp.Model(init=, loss=)"
# library -> the maker to use, where `init` returned a module of it instead of arrays.
_MAKES = {
    "equinox": "jp.from_equinox(lambda key: ..., loss), which trains its floating-point arrays",
    "flax.nnx": "jp.from_nnx(lambda rngs: ..., loss)",
    "flax.linen": "jp.from_linen(Net(...), loss, example)",
    "haiku": "jp.Model(init, loss), whose init returns hk.transform(f).init(key, x): docs/equinox-haiku.md",
}
# The names of metrics that a step reports itself.
_RESERVED = ("loss", "grad_norm", "skipped", "finite", "stopped")
# A mesh without axes stands for no mesh.
_NO_MESH = jax.sharding.AbstractMesh((), ())
# A loss has no argument for these: `rows_over` and `couplings` set them around its call.
_rows: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("rows", default=())
_couplings: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("couplings", default=None)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["total", "count"], meta_fields=[])
@dataclass(frozen=True)
class Mean:
    """A mean as two sums, reported and differentiated as global total / global count, never as a mean of means.

    Attributes:
      total: scalar sum over this call's rows.
      count: scalar number of terms in it (float or integer); must not depend on the parameters.
    """

    total: jax.Array
    count: jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=[])
@dataclass(frozen=True)
class Replicated:
    """Marks a batch leaf (or subtree) that has no row dim: every device gets all of it. The loss sees `value`."""

    value: Any


def is_replicated(x: Any) -> bool:
    """Whether a part of a batch is marked as `Replicated`."""
    return isinstance(x, Replicated)


@dataclass(frozen=True)
class Model:
    """A model as two functions; `from_nnx`, `from_linen` and `from_equinox` make one from a module.

    Attributes:
      init: `init(key) -> params`, any pytree of arrays. jaxpar passes the arguments of `init` and `loss` by position.
      loss: `loss(params, batch, key) -> value` or `(value, metrics)`. `value` is a scalar mean over the rows of
        `batch`, or `jp.Mean`; `metrics` is a dict of such values. `key` differs for every step and block of rows, and
        is None in `evaluate` (no dropout there).
      stateful: if True, `init` returns `(params, variables)`, and `loss(params, variables, batch, key)` returns a pair:
        the value as above, and the new variables (such as BatchNorm statistics). A loss that writes to parameters
        returns them as a third result, and the optimizer updates what it returns.
      wrap: params -> the tree that users see (`step.params`); `unwrap` is the inverse.
      bind: `bind(params, variables)` returns the user's module with these values (`step.model`).
      rules: the model's own table of the dims that `tensor` splits, such as {"ffn/up/kernel": -1}
        (`parallel/tensor/dims.py`). It is complete: a leaf that it does not name is whole, unless annotations name it.
        A model without a table gets jaxpar's presets.
      names: the model's annotations, for `tensor`. `names()` returns, for each leaf path, a name, None or a tuple of
        names for each dim. A name is logical ("mlp") or a mesh axis.
      rows: "independent" if the loss is known to be a mean over independent rows, whatever its program looks like; no
        coupling of rows is then an error. If None, the loss is checked when it is first traced.
      optimizer: `optimizer(tx) -> tx` turns the optimizer of the weights into the optimizer of the model, for leaves
        that have an update rule of their own, such as biases that balance experts. `make_train_step` calls it.
    """

    init: Callable[..., Any]
    loss: Callable[..., Any]
    stateful: bool = False
    wrap: Callable[[Any], Any] = lambda params: params
    unwrap: Callable[[Any], Any] = lambda tree: tree
    bind: Callable[[Any, Any], Any] | None = None
    rules: Mapping[str, int | str | Mapping[str, int | None] | None] | None = None
    names: Callable[[], Mapping[str, tuple[Any, ...]]] = dict
    rows: str | None = None
    optimizer: Callable[[optax.GradientTransformation], optax.GradientTransformation] | None = None

    def __repr__(self) -> str:
        names = ", ".join(f"{name}={_name(getattr(self, name))}" for name in ("init", "loss"))
        return f"Model({names}{', stateful' if self.stateful else ''})"

    def __post_init__(self) -> None:
        for name in ("init", "loss"):
            if not callable(getattr(self, name)):
                raise ValueError(f"Model({name}={getattr(self, name)!r}): {name} must be a function")
        check_call(self.init, "Model(init=)", "key")
        check_call(self.loss, "Model(loss=)", "params", *(("variables",) if self.stateful else ()), "batch", "key")
        if self.rows not in (None, "independent"):
            raise ValueError(f"Model(rows={self.rows!r}): use 'independent', or None to have the loss checked")

    @functools.cached_property
    def create(self) -> Callable[[jax.Array], tuple[Any, Any]]:
        """`create(key)` returns parameters and variables.

        Raises:
          ValueError: a stateful `init` returns no pair, or a leaf is no array.
        """
        # jit caches the trace, which serves shapes, the layout and the first state: 24 NNX layers in a Python loop take
        # 1.3 s to trace, as much as the rest of a step. With inline=True, a program that calls it gets the equations of
        # `init` themselves.
        return jax.jit(self._create, inline=True)

    def _create(self, key: jax.Array) -> tuple[Any, Any]:
        """Call `init` under a trace, and check its result."""
        with without_mesh(), traced("init", IN_INIT):
            result = self.init(key)
        if self.stateful and not (isinstance(result, tuple) and len(result) == 2):
            raise ValueError(f"init returned {type(result).__name__}; with stateful=True return (params, variables)")
        params, variables = result if self.stateful else (result, {})
        return _arrays(params), _arrays(variables)

    def call(self, params: Any, variables: Any, batch: Any, key: jax.Array | None, rows: tuple[str, ...] = ()) -> Any:
        """Return `({name: Mean}, variables)` of the loss; see `forward`."""
        return self.forward(params, variables, batch, key, rows)[:2]

    def forward(
        self, params: Any, variables: Any, batch: Any, key: jax.Array | None, rows: tuple[str, ...] = ()
    ) -> tuple[dict[str, Mean], Any, Any]:
        """Call the loss, and return its metrics with the variables and parameters after the call.

        Args:
          params, variables: as `create` returns them.
          batch: one block of rows; leaves may be marked as `Replicated`.
          key: for this step and block; None in `evaluate`.
          rows: the mesh axes over which the rows are spread.

        Returns:
          `({name: Mean}, variables, params)`, with the loss itself under "loss". A parameter that the loss does not
          write to is returned as the same object.

        Raises:
          ValueError: the loss returns anything but a scalar or `Mean`, alone or with a dict of those.
        """
        # 1. Call the loss.
        # The contexts explain errors in the user's terms; a model sees neither marks nor meshes.
        batch = jax.tree.map(lambda x: x.value if isinstance(x, Replicated) else x, batch, is_leaf=is_replicated)
        with rows_over(rows), without_mesh(), reading(batch), traced("the loss", IN_LOSS):
            if self.stateful:
                result = self.loss(params, variables, batch, key)
                if not (isinstance(result, tuple) and len(result) in (2, 3)):
                    raise ValueError(f"loss returned {kind_of(result)}; with stateful=True return (value, variables)")
                new_params = _with_old_dtypes(params, result[2], "parameter") if len(result) == 3 else params
                result, new_variables = result[0], _with_old_dtypes(variables, result[1], "variable")
            else:
                result, new_variables, new_params = self.loss(params, batch, key), variables, params
        # 2. Bring its result to one form, metrics by name.
        value, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if isinstance(value, tuple | list | dict) or not isinstance(metrics, dict):
            raise ValueError(
                f"loss returned {_describe_result(result)}; it must return a scalar mean over rows or "
                "jp.Mean(total, count), or either with a dict, (value, metrics): put what else it returns into a dict "
                "of metrics by name, (value, {'name': other})"
            )
        for name in metrics:
            if not isinstance(name, str):
                raise ValueError(
                    f"loss returned a metric named {name!r}, a {type(name).__name__}; give it a str as name"
                )
        reserved = [name for name in metrics if name in _RESERVED]
        if reserved:
            raise ValueError(f"loss returned a metric named {reserved[0]!r}, which jaxpar reports itself; rename it")
        return (
            {name: _mean(name, metric) for name, metric in {"loss": value, **metrics}.items()},
            new_variables,
            new_params,
        )


def all_rows(x: jax.Array) -> jax.Array:
    """Gather the rows of all replicas, for a loss that couples rows (contrastive, load balance).

    Differentiable. Communicates one all-gather over the data axes in the forward, and a reduce-scatter in the backward.

    Args:
      x: [rows of this call, ...], any dtype, with the rows in order. Gather two views separately and concatenate the
        results. If views are concatenated first, the gathered order differs from the order on one device, which is an
        error.

    Returns:
      [rows of the microbatch over all replicas, ...], in the order of the global batch; on one device `x` itself. With
      `microbatches` above 1 these are fewer rows than the batch has, and the step warns.

    >>> all_rows(jnp.arange(3)).tolist()
    [0, 1, 2]
    """
    if (coupled_by := _couplings.get()) is not None:
        coupled_by.append("all_rows")  # this call must see all rows of a microbatch
    return collectives.all_gather(x, _rows.get())


@contextlib.contextmanager
def couplings() -> Iterator[list[str]]:
    """Record the calls within this context that couple rows, by name."""
    # Contexts nest, so that the previous value comes back at the end.
    token = _couplings.set(coupled_by := [])
    try:
        yield coupled_by
    finally:
        _couplings.reset(token)


@contextlib.contextmanager
def rows_over(axes: tuple[str, ...]) -> Iterator[None]:
    """Let `all_rows` and BatchNorm reach over these mesh axes within this context."""
    token = _rows.set(axes)
    try:
        yield
    finally:
        _rows.reset(token)


def without_mesh() -> contextlib.AbstractContextManager[Any]:
    """Hide the mesh from a model within this context, so that it runs as on one device.

    Where Flax finds a mesh, it adds sharding constraints by the names that annotate parameters and activations
    (`nn.DenseGeneral` unboxes its kernel in every call). In a step's program such a constraint would name a mesh that
    the user does not know, on arrays that are already one device's part.
    """
    return jax.sharding.use_abstract_mesh(_NO_MESH)


def row_axes() -> tuple[str, ...]:
    """Return the mesh axes over which the rows of the current loss call are spread."""
    return _rows.get()


def averaged_axes(axis_name: Any) -> tuple[str, ...] | None:
    """Return the axes that a BatchNorm averages over; None without any.

    These are the axes of the rows, and the norm's own axes if a surrounding `vmap` binds them. A name for `pmap` is
    bound nowhere; it means the rows.

    Args:
      axis_name: the attribute of the norm: None, a name or several.
    """

    def is_bound(name: str) -> bool:
        try:
            jax.lax.axis_size(name)
        except NameError:
            return False
        return True

    # Axes of the rows are bound by jaxpar's shard_map. The norm's own name may be one of them.
    names = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    return (*(name for name in names if name not in row_axes() and is_bound(name)), *row_axes()) or None


def _arrays(tree: Any) -> Any:
    """Return the result of `init` with arrays as leaves.

    Raises:
      ValueError: a leaf is no array, or is a plain number in a module (a rate of dropout, which no optimizer may
        change).
    """
    # A user's module is a class of the user's file. Its bases tell the library.
    origins = [f"{base.__module__}." for base in type(tree).__mro__]
    advice = next(
        (advice for library, advice in _MAKES.items() if any(module.startswith(f"{library}.") for module in origins)),
        "",
    )
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        # A Python number is an array to JAX. In a module it is a setting, such as a rate of dropout.
        try:
            if advice and isinstance(x, bool | int | float):
                raise TypeError(x)
            jnp.asarray(x)
        except TypeError as error:
            place = jax.tree_util.keystr(path, simple=True, separator="/")
            leaf = f"leaf {place} is" if place else "result is"
            hint = (
                f"hand the module over by {advice}"
                if advice
                else "return arrays alone, and keep other values in the loss"
            )
            raise ValueError(
                f"init returned a {type(tree).__name__}, whose {leaf} {_describe_leaf(x)}, and no array; {hint}"
            ) from error
    return jax.tree.map(jnp.asarray, tree)


def _describe_result(result: Any) -> str:
    """Describe the result of a loss with its items: "a tuple of 2 (float32[], dict)"."""
    if not isinstance(result, tuple | list | dict):
        return kind_of(result)
    items = result.values() if isinstance(result, dict) else result
    return f"{kind_of(result)} of {len(result)} ({', '.join(kind_of(x).removeprefix('a ') for x in items)})"


def _describe_leaf(x: Any) -> str:
    """Describe a value that is no array: "the function relu", "a str"."""
    return f"the function {_name(x)}" if callable(x) and hasattr(x, "__name__") else f"a {type(x).__name__}"


def _mean(name: str, value: Any) -> Mean:
    """Return a loss or metric as a float32 `Mean`; raise ValueError if it is neither a scalar nor a `Mean`."""
    noun = "the loss" if name == "loss" else f"metric {name!r}"
    # A scalar is a mean over the rows of this call. All calls have as many rows, so that each counts 1.
    if not isinstance(value, Mean):
        if not _is_number(value) or jnp.shape(value) != ():
            raise ValueError(
                f"{noun} is {kind_of(value)}; it must be a scalar mean over rows (try .mean()) or jp.Mean(total, count)"
            )
        value = Mean(value, jnp.ones((), jnp.float32))
    for part in (value.total, value.count):
        if not _is_number(part):
            raise ValueError(f"{noun} is jp.Mean with a part that is {kind_of(part)}; sum both parts to scalars")
        if jnp.shape(part) != ():
            raise ValueError(f"{noun} is jp.Mean with a part of shape {jnp.shape(part)}; sum both parts to scalars")
    if name == "loss" and not jnp.issubdtype(jnp.result_type(value.total), jnp.floating):
        raise ValueError(f"the loss is {jnp.result_type(value.total)}; gradients need a floating-point value")
    # Sums over microbatches and replicas are in float32, whatever dtype the loss has.
    return Mean(jnp.asarray(value.total, jnp.float32), jnp.asarray(value.count, jnp.float32))


def _name(function: Any) -> str:
    """Return the name of a function, or the type of another value."""
    return getattr(function, "__qualname__", type(function).__name__).replace(".<locals>", "")


def _is_number(x: Any) -> bool:
    """Whether a value is an array or number of real numbers. Booleans are not."""
    array = isinstance(x, jax.Array | np.ndarray | np.generic | int | float)
    return array and any(jnp.issubdtype(jnp.result_type(x), kind) for kind in (jnp.floating, jnp.integer))


def _with_old_dtypes(old: Any, new: Any, noun: str) -> Any:
    """Return new variables or parameters in the dtypes of the old ones.

    Args:
      old, new: the trees before and after the call of the loss.
      noun: "variable" or "parameter", for the error.

    Raises:
      ValueError: structure or shapes differ.
    """
    old_leaves, tree = jax.tree_util.tree_flatten_with_path(old)
    if jax.tree.structure(new) != tree:
        raise ValueError(
            f"the loss changes the structure of the {noun}s from {tree} to {jax.tree.structure(new)}; return the tree "
            "that it was given, with other values"
        )
    values = []
    for (path, a), b in zip(old_leaves, jax.tree.leaves(new), strict=True):
        if jnp.shape(a) != jnp.shape(b):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(f"{noun} {name} changes shape from {jnp.shape(a)} to {jnp.shape(b)}; keep it fixed")
        # One step's variables are the next step's arguments: with other dtypes it would be compiled anew.
        # The loss may also return a Python number.
        values.append(b if getattr(b, "dtype", None) == a.dtype else jnp.asarray(b, a.dtype))
    return jax.tree.unflatten(tree, values)
