"""Model: what jaxpar trains, as two functions; and what a loss may return and ask for."""

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
_MAKES = {
    "equinox": "jp.from_equinox(lambda key: ..., loss), which trains its floating-point arrays",
    "flax.nnx": "jp.from_nnx(lambda rngs: ..., loss)",
    "flax.linen": "jp.from_linen(Net(...), loss, example)",
    "haiku": "jp.Model(init, loss), whose init returns hk.transform(f).init(key, x): docs/equinox-haiku.md",
}
_RESERVED = ("loss", "grad_norm", "skipped", "finite", "stopped")
_NO_MESH = jax.sharding.AbstractMesh((), ())
_rows: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("rows", default=())
_couplings: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("couplings", default=None)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["total", "count"], meta_fields=[])
@dataclass(frozen=True)
class Mean:
    """A mean as its two sums: reported and differentiated as global total / global count, never as a mean of means.

    Attributes:
      total: scalar sum over this call's rows.
      count: scalar number of terms in it (float or integer); must not depend on the parameters.
    """

    total: jax.Array
    count: jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=[])
@dataclass(frozen=True)
class Replicated:
    """Marks a batch leaf (or subtree) that has no row dim: every device gets the whole of it. The loss sees `value`."""

    value: Any


def is_replicated(x: Any) -> bool:
    """Whether a part of a batch is marked so."""
    return isinstance(x, Replicated)


@dataclass(frozen=True)
class Model:
    """A model as two functions; `from_nnx`, `from_linen` and `from_equinox` make one from a module.

    Attributes:
      init: `init(key) -> params`, any pytree of arrays. Arguments of `init` and `loss` come by position.
      loss: `loss(params, batch, key) -> value` or `(value, metrics)`. `value` is a scalar mean over the rows of
        `batch`, or `jp.Mean`; `metrics` a dict of such values. `key` differs for every step and block of rows, and is
        None in `evaluate` (no dropout there).
      stateful: then `init` returns `(params, variables)`, and `loss(params, variables, batch, key)` a pair of the
        above and the new variables (BatchNorm statistics and the like). A loss that writes to parameters returns them
        as a third result, and the optimizer changes what it returns.
      wrap: params -> the tree that users see (`step.params`); `unwrap` is the reverse.
      bind: `bind(params, variables)`, the user's module with these values (`step.model`).
      rules: the model's own table of what `tensor` splits, such as {"ffn/up/kernel": -1} (`parallel/tensor/dims.py`).
        It is complete: what it does not name is whole, unless the annotations name it. Without one, jaxpar's presets
        serve.
      names: the model's annotations, for `tensor`: `names()` is, by leaf path, a name, None or a tuple of names for
        each dim, logical ones ("mlp") or mesh axes.
      rows: "independent" where the loss is known to be a mean over rows that do not know of each other, whatever its
        program looks like: then no loss that couples rows is refused. None: it is checked when it is first traced.
      optimizer: `optimizer(tx) -> tx`, what trains the model, of the optimizer for its weights: where some leaves have
        a rule of their own, such as biases that balance experts. `make_train_step` asks it.
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
        """`create(key)`: parameters and variables from a key.

        Raises ValueError where a stateful `init` returns no such pair, or a leaf is no array.
        """
        # Traced once for all who ask: shapes, the layout, the first state. 24 NNX layers in a Python loop take 1.3 s to
        # trace, as much as the rest of a step's tracing. Inlined, the equations are those of `init` itself.
        return jax.jit(self._create, inline=True)

    def _create(self, key: jax.Array) -> tuple[Any, Any]:
        with without_mesh(), traced("init", IN_INIT):
            made = self.init(key)
        if self.stateful and not (isinstance(made, tuple) and len(made) == 2):
            raise ValueError(f"init returned {type(made).__name__}; with stateful=True return (params, variables)")
        params, variables = made if self.stateful else (made, {})
        return _arrays(params), _arrays(variables)

    def call(self, params: Any, variables: Any, batch: Any, key: jax.Array | None, rows: tuple[str, ...] = ()) -> Any:
        """`({name: Mean}, variables)` of the loss; see `forward`."""
        return self.forward(params, variables, batch, key, rows)[:2]

    def forward(
        self, params: Any, variables: Any, batch: Any, key: jax.Array | None, rows: tuple[str, ...] = ()
    ) -> tuple[dict[str, Mean], Any, Any]:
        """`({name: Mean}, variables, params)`: the loss, and variables and parameters as it leaves them.

        A parameter that the loss does not write to is returned as the same object. `rows` are the mesh axes over which
        the rows are spread.

        Raises ValueError where the loss returns anything else than a scalar or `Mean`, and a dict of those.
        """
        batch = jax.tree.map(lambda x: x.value if isinstance(x, Replicated) else x, batch, is_leaf=is_replicated)
        with rows_over(rows), without_mesh(), reading(batch), traced("the loss", IN_LOSS):
            if self.stateful:
                out = self.loss(params, variables, batch, key)
                if not (isinstance(out, tuple) and len(out) in (2, 3)):
                    raise ValueError(f"loss returned {kind_of(out)}; with stateful=True return (value, variables)")
                written = _same(params, out[2], "parameter") if len(out) == 3 else params
                out, new = out[0], _same(variables, out[1], "variable")
            else:
                out, new, written = self.loss(params, batch, key), variables, params
        value, metrics = out if isinstance(out, tuple) and len(out) == 2 else (out, {})
        if isinstance(value, tuple | list | dict) or not isinstance(metrics, dict):
            raise ValueError(
                f"loss returned {_spelled(out)}; it must return a scalar mean over rows or jp.Mean(total, count), or "
                "either with a dict, (value, metrics): put what else it returns into a dict of metrics by name, "
                "(value, {'name': other})"
            )
        for name in metrics:
            if not isinstance(name, str):
                raise ValueError(f"loss returned a metric named {name!r}, a {type(name).__name__}; name it by a str")
        taken = [name for name in metrics if name in _RESERVED]
        if taken:
            raise ValueError(f"loss returned a metric named {taken[0]!r}, which jaxpar reports itself; rename it")
        return {name: _mean(name, v) for name, v in {"loss": value, **metrics}.items()}, new, written


def all_rows(x: jax.Array) -> jax.Array:
    """The rows of all replicas, for a loss that couples rows (contrastive, load balance).

    Args:
      x: [rows of this call, ...], any dtype, with the rows in their order. Gather two views first and concatenate them
        then: laid end to end before, they would be gathered in another order than one device has, which is refused.

    Returns [rows of the microbatch over all replicas, ...], in the order of the global batch; `x` itself on one device.
    With `microbatches` above 1 that is less than the batch, and the step warns. Differentiable. Communicates: one
    all-gather over the data axes, forwards; a reduce-scatter backwards.

    >>> all_rows(jnp.arange(3)).tolist()
    [0, 1, 2]
    """
    if (noted := _couplings.get()) is not None:
        noted.append("all_rows")  # this call must see all rows of a microbatch
    return collectives.all_gather(x, _rows.get())


@contextlib.contextmanager
def couplings() -> Iterator[list[str]]:
    """The couplings of rows that are noted within it."""
    token = _couplings.set(noted := [])
    try:
        yield noted
    finally:
        _couplings.reset(token)


@contextlib.contextmanager
def rows_over(axes: tuple[str, ...]) -> Iterator[None]:
    """Within it, `all_rows` and BatchNorm reach over these mesh axes."""
    token = _rows.set(axes)
    try:
        yield
    finally:
        _rows.reset(token)


def without_mesh() -> contextlib.AbstractContextManager[Any]:
    """Within it, a model sees no mesh, as on one device.

    Where Flax finds a mesh around it, it makes constraints of the names that annotate parameters (`nn.DenseGeneral`
    unboxes its kernel's in every call), and of those of activations. Inside a step's program they would be of a mesh
    that the user does not know, on arrays that are one device's part already.
    """
    return jax.sharding.use_abstract_mesh(_NO_MESH)


def row_axes() -> tuple[str, ...]:
    """The mesh axes over which the rows of the current loss call are spread."""
    return _rows.get()


def averaged_axes(own: Any) -> tuple[str, ...] | None:
    """The axes that a BatchNorm averages over: those of the rows, and its own of a `vmap` that is there. A name from
    `pmap`, which is not, is that of the rows.
    """

    def there(name: str) -> bool:
        try:
            jax.lax.axis_size(name)
        except NameError:
            return False
        return True

    names = () if own is None else (own,) if isinstance(own, str) else tuple(own)
    return (*(name for name in names if name not in row_axes() and there(name)), *row_axes()) or None


def _arrays(tree: Any) -> Any:
    """What `init` made, as arrays. Raises ValueError for a leaf that is none, and for a number of a module."""
    homes = [f"{base.__module__}." for base in type(tree).__mro__]
    by = next((by for home, by in _MAKES.items() if any(one.startswith(f"{home}.") for one in homes)), "")
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        try:
            if by and isinstance(x, bool | int | float):  # a rate of dropout, which no optimizer is to change
                raise TypeError(x)
            jnp.asarray(x)
        except TypeError as error:
            place = jax.tree_util.keystr(path, simple=True, separator="/")
            leaf = f"leaf {place} is" if place else "result is"
            hint = f"hand the module over by {by}" if by else "return arrays alone, and keep in the loss what is none"
            raise ValueError(
                f"init returned a {type(tree).__name__}, whose {leaf} {_described(x)}, and no array; {hint}"
            ) from error
    return jax.tree.map(jnp.asarray, tree)


def _spelled(out: Any) -> str:
    """What a loss returned, with what is in it: "a tuple of 2 (float32[], dict)"."""
    if not isinstance(out, tuple | list | dict):
        return kind_of(out)
    inside = out.values() if isinstance(out, dict) else out
    return f"{kind_of(out)} of {len(out)} ({', '.join(kind_of(x).removeprefix('a ') for x in inside)})"


def _described(x: Any) -> str:
    return f"the function {_name(x)}" if callable(x) and hasattr(x, "__name__") else f"a {type(x).__name__}"


def _mean(name: str, value: Any) -> Mean:
    what = "the loss" if name == "loss" else f"metric {name!r}"
    if not isinstance(value, Mean):
        if not _is_number(value) or jnp.shape(value) != ():
            raise ValueError(
                f"{what} is {kind_of(value)}; it must be a scalar mean over rows (try .mean()) or jp.Mean(total, count)"
            )
        value = Mean(value, jnp.ones((), jnp.float32))
    for part in (value.total, value.count):
        if not _is_number(part):
            raise ValueError(f"{what} is jp.Mean with a part that is {kind_of(part)}; sum both parts to scalars")
        if jnp.shape(part) != ():
            raise ValueError(f"{what} is jp.Mean with a part of shape {jnp.shape(part)}; sum both parts to scalars")
    if name == "loss" and not jnp.issubdtype(jnp.result_type(value.total), jnp.floating):
        raise ValueError(f"the loss is {jnp.result_type(value.total)}; gradients need a floating-point value")
    return Mean(jnp.asarray(value.total, jnp.float32), jnp.asarray(value.count, jnp.float32))


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__).replace(".<locals>", "")


def _is_number(x: Any) -> bool:
    array = isinstance(x, jax.Array | np.ndarray | np.generic | int | float)
    return array and any(jnp.issubdtype(jnp.result_type(x), kind) for kind in (jnp.floating, jnp.integer))


def _same(old: Any, new: Any, what: str) -> Any:
    """New variables or parameters with the structure, shapes and dtypes of the old; raises ValueError where structure
    or shapes differ.
    """
    before, tree = jax.tree_util.tree_flatten_with_path(old)
    if jax.tree.structure(new) != tree:
        raise ValueError(f"the loss changes the structure of the {what}s from {tree} to {jax.tree.structure(new)}")
    values = []
    for (path, a), b in zip(before, jax.tree.leaves(new), strict=True):
        if jnp.shape(a) != jnp.shape(b):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(f"{what} {name} changes shape from {jnp.shape(a)} to {jnp.shape(b)}; keep it fixed")
        values.append(b if a.dtype == b.dtype else b.astype(a.dtype))
    return jax.tree.unflatten(tree, values)
