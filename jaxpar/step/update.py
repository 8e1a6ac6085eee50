"""The update: the optimizer's step on global arrays, outside `shard_map`.

Whatever the layout, an optax transformation sees what it would see on one device: whole, logical leaves. What is stored
otherwise (padded) is sliced before it and padded after it. Leaves that a pipeline keeps in whole stages have another
shape; they are shown to the transformation as they are where that makes no difference to it, and brought to the model's
own shape, at the price of moving them, where it does. One that works on whole matrices has them whole with their owners
(`numerics/matrices/owners.py`).
"""

import contextlib
import functools
import inspect
import itertools
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from ..collectives import order
from ..collectives.order import Token
from ..layout.layout import Layout, is_stored
from ..layout.leaves import Leaf
from ..layout.precision import all_finite
from ..layout.state import State
from ..model.calls import Advice, traced
from ..model.paths import name_of
from ..numerics.matrices.owners import Owners
from ..parallel.data import Rule, publish
from ..program.buffers import is_on_host
from .gradients import Metrics, metrics_of
from .offload import Streams, kept
from .tracing import Sums
from .writes import Writes

_TRACED = (
    "it is traced by jax.jit, and arrays have no numbers there; optax.inject_hyperparams makes an array of each number "
    "that it is given or that is a default: name those that decide shapes or branches in static_args=, such as "
    "static_args=('min_dim_size_to_factor',) for adafactor; in an optimizer of your own, stay with jnp (jnp.where in "
    "place of if)"
)
IN_OPTIMIZER = Advice(_TRACED, _TRACED)
_SHOWN = 3  # leaves that an error names


@dataclass(frozen=True)
class Update:
    """An optimizer under a layout and a rule.

    Attributes:
      as_stacked: whether it sees leaves as a step keeps them.
      on_nonfinite: what becomes of a step whose loss or gradients are not finite: "apply"; "skip", it is not applied;
        or "stop", nor is anything after it, and the number stays at minus that step's: the host, which has started
        others by then, still has what that step began with.
      owners: how it runs on whole matrices; None where it multiplies none.
      streams: how it runs on state that waits on the host; None where none does.
    """

    optimizer: Any
    layout: Layout
    rule: Rule
    as_stacked: bool
    on_nonfinite: str = "apply"
    owners: Owners | None = None
    streams: Streams | None = None

    def init(self, params: Any) -> Any:
        """The optimizer's state, as it is stored, from the leaves of a step."""
        if self.streams is not None:
            return self.streams.init(self._seen(params))
        return self.layout.to_stored(self.optimizer.init(self._seen(params)), "optimizer")

    def _seen(self, tree: Any) -> Any:
        """The tree that the optimizer sees, from a tree with one value for each leaf. Frozen leaves are None in it."""
        tuned = jax.tree.map(
            lambda place, x: x if place.leaf.trainable else None, self.layout.places("params"), tree, is_leaf=is_stored
        )
        return self.layout.to_logical(tuned, "params", self.as_stacked)

    def __call__(
        self, state: State, grads: Any, variables: Any, sums: Sums, writes: Writes | None
    ) -> tuple[State, Metrics]:
        """Next state and metrics, from unpadded gradients in the leaves' tree (None: frozen), variables, sums, and what
        the loss writes to its parameters.
        """
        written = state.params if writes is None else writes(self.layout, state.params, state.variables)
        params, updates = self._seen(self._shards(written)), self._seen(grads)
        loss = metrics_of(sums)["loss"]
        norm = optax.tree.norm(grads)
        token = order.first_token(norm, self.layout.mesh)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)  # the norm has looked at every gradient already
        metrics = metrics_of(sums) | {"grad_norm": norm, "finite": finite, "skipped": jnp.int32(0)}
        applied, scale = None, None  # always, without a scale
        if state.scale is not None:
            applied = all_finite(grads)
            scale = state.scale.next(applied)
            metrics["skipped"] = scale.skipped
        if self.on_nonfinite != "apply":
            applied = finite if applied is None else applied & finite
            if self.on_nonfinite == "stop":
                goes_on = state.step >= 0
                applied, scale = applied & goes_on, kept(goes_on, scale, state.scale)
        if self.streams is not None:
            tuned, packed = self.streams(params, updates, state.optimizer, loss, applied)
        else:
            opt_state = self.layout.to_logical(state.optimizer, "optimizer")
            (changes, opt_state), token = self._changes(updates, opt_state, params, loss, token)
            before = params if written is state.params else self._seen(self._shards(state.params))
            tuned = kept(applied, optax.apply_updates(params, changes), before)
            packed = kept(applied, self.layout.to_stored(opt_state, "optimizer"), state.optimizer)
        variables = kept(applied, variables, state.variables)
        tuned = self.layout.to_stored(tuned, "params", self.as_stacked)
        new = jax.tree.map(lambda old, new: old if new is None else new, state.params, tuned)
        stored, copy, token = self.publish(new, state, token)
        number = state.step + 1
        if self.on_nonfinite == "stop":
            # An overflow by the scale that float16 begins with is no fault.
            by_scale = False if state.scale is None else (state.scale.scale > 1) & jnp.isfinite(loss)
            number = jnp.where(state.step < 0, state.step, jnp.where(finite | by_scale, number, -number))
            metrics["stopped"] = number < 0
        # The next step's collectives follow its number.
        step, metrics = order.behind(token, (number, metrics))
        return State(step, stored, copy, packed, variables, scale, state.key), metrics

    def _changes(self, updates: Any, opt_state: Any, params: Any, loss: jax.Array, token: Token | None) -> Any:
        if self.owners is not None and self.owners.bundles:
            args = jax.tree.leaves((params, updates, opt_state, loss))
            outs, token = self.owners(self.layout.mesh, token, *args)
            return jax.tree.unflatten(self.owners.program.tree, outs), token
        try:
            with transforming("optimizer.update", params):
                return self.optimizer.update(updates, opt_state, params, value=loss), token
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise ValueError(
                f"the optimizer asks for more than gradients, parameters and the loss's value: {error}; use one "
                "without a line search, or give step.value_and_grad to it yourself"
            ) from error

    def constrain(self, leaf: Leaf, x: jax.Array) -> jax.Array:
        """A leaf as the optimizer's shard of it, padded: where it is replicated, each device takes its part."""
        if "optimizer" not in self.rule.sharded or leaf.dim is None or is_on_host(x):
            return x
        return jax.lax.with_sharding_constraint(leaf.pad(x), self.layout.sharding(leaf.spec()))

    def _shards(self, params: Any) -> Any:
        leaves = self.layout.leaves
        values = zip(leaves, jax.tree.leaves(params), strict=True)
        return self.layout.unflatten([self.constrain(leaf, x) for leaf, x in values])

    def publish(self, params: Any, state: State, token: Token | None) -> tuple[Any, Any, Token | None]:
        """The parameters and their low-precision copy (or None) as they are stored, from updated parameters; and the
        token after that.

        Under ZeRO-1 and 2 every leaf that is stored whole is all-gathered for it; other rules store shards.
        """
        leaves, shards = self.layout.leaves, self._shards(params)
        if not self.rule.published or self.layout.shards == 1:
            return shards, None, token
        old = jax.tree.leaves(state.copy if self.layout.copied else state.params)
        gather = order.in_order(functools.partial(publish, leaves), self.layout.mesh)
        specs, whole_specs = [leaf.spec() for leaf in leaves], [leaf.spec(False) for leaf in leaves]
        whole, token = jax.shard_map(
            gather,
            mesh=self.layout.mesh,
            in_specs=(PartitionSpec(), specs, whole_specs),
            out_specs=(whole_specs, PartitionSpec()),
            check_vma=False,
        )(token, jax.tree.leaves(shards), old)
        if self.layout.copied:
            return shards, self.layout.unflatten(whole), token
        return self.layout.unflatten(whole), None, token


@contextlib.contextmanager
def transforming(what: str, params: Any) -> Iterator[None]:
    """Around a call of the user's optimizer under a trace, which sees these parameters.

    Raises ValueError where it asks for the number of an array, or for a tree of parameters that is built otherwise, as
    masks and labels that are made from a module do.
    """
    try:
        with traced(what, IN_OPTIMIZER):
            yield
    except (ValueError, AttributeError) as error:
        innermost = traceback.extract_tb(error.__traceback__)[-1].filename
        if isinstance(error, AttributeError) and isinstance(error.obj, Mapping):
            fault = f"asks for .{error.name} of the parameters"
        elif isinstance(error, ValueError) and innermost.endswith(("jax/_src/tree.py", "jax/_src/tree_util.py")):
            fault = f"has a tree, such as a mask or labels, that is not built as they are ({_first(error)})"
        else:
            raise
        paths = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        named = ", ".join(paths[:_SHOWN]) + ", ..." * (len(paths) > _SHOWN)
        raise ValueError(
            f"{what} sees the parameters as a {type(params).__name__} of {named}, and {fault}; make masks and labels "
            "by a function of the parameters that optax calls, such as mask=lambda params: jax.tree.map(lambda p: "
            "p.ndim > 1, params), or jax.tree_util.tree_map_with_path to choose by path"
        ) from error


def _first(error: Exception) -> str:
    """Its first words."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(itertools.dropwhile(lambda line: not line, lines), type(error).__name__)


def taking_value(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """The transformation, which may now be given the loss's `value`; one that has no use for it ignores it."""
    update = optimizer.update
    given = inspect.signature(update).parameters.values()
    if any(p.name == "value" or p.kind is p.VAR_KEYWORD for p in given):
        return optax.with_extra_args_support(optimizer)
    # One may ask for other extra arguments (`optax.contrib.sam`), and refuse this one.
    return optax.GradientTransformationExtraArgs(
        optimizer.init, lambda updates, state, params=None, **extra: update(updates, state, params)
    )
