"""The update: the optimizer's step on global arrays, outside `shard_map`.

    stored params  --to_logical-->  logical params  --+
    reduced grads  --to_logical-->  logical grads   --+--  optimizer.update  -->  new params  --to_stored, publish-->
    stored state   --to_logical-->  logical state   --+                           new state   --to_stored-->

Under every layout, an optax transformation sees whole, logical leaves, as on one device; XLA's partitioner divides the
work among the devices. Four kinds of leaves are stored in another shape or place:

    padded         sliced before the transformation, padded after it
    staged         leaves in the complete stages of a pipeline have another shape. A transformation that works element
                   by element sees them as they are (`as_stacked`); for any other they are moved to the model's shape
    whole matrices a transformation that multiplies matrices runs on their owners (`numerics/matrices/owners.py`)
    on the host    streamed through the device block by block (`offload.py`)
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
from .offload import Streams, where_applied
from .tracing import Sums
from .writes import Writes

_TRACED = (
    "it is traced by jax.jit, and arrays have no values there; optax.inject_hyperparams turns each number, given or "
    "default, into an array: name those that decide shapes or branches in static_args=, such as "
    "static_args=('min_dim_size_to_factor',) for adafactor; in an optimizer of your own, stay with jnp (jnp.where in "
    "place of if)"
)
IN_OPTIMIZER = Advice(_TRACED, _TRACED)
_MAX_LEAVES = 3  # leaves that an error names


@dataclass(frozen=True)
class Update:
    """The update of a step: an optimizer under a layout and a rule.

    Attributes:
      optimizer: the optax transformation, which accepts the loss as `value`.
      as_stacked: whether the optimizer sees leaves as a step stores them instead of the model's own.
      on_nonfinite: what happens if the loss or a gradient is not finite: "apply" the step all the same; "skip" it; or
        "stop": neither this step nor any later one is applied, and the step's number becomes negative. The host, which
        has started later steps by then, still has the state with which this step began.
      owners: the plan for an optimizer that multiplies whole matrices; None for any other.
      streams: the plan for state that rests on the host; None if none does.
    """

    optimizer: Any
    layout: Layout
    rule: Rule
    as_stacked: bool
    on_nonfinite: str = "apply"
    owners: Owners | None = None
    streams: Streams | None = None

    def init(self, params: Any) -> Any:
        """Return the first state of the optimizer, as it is stored, from one unpadded master for each leaf."""
        if self.streams is not None:
            return self.streams.init(self._seen(params))
        return self.layout.to_stored(self.optimizer.init(self._seen(params)), "optimizer")

    def _seen(self, tree: Any) -> Any:
        """Return the tree that the optimizer sees, from one value for each stored leaf. Frozen leaves are None."""
        trainable = jax.tree.map(
            lambda place, x: x if place.leaf.trainable else None, self.layout.places("params"), tree, is_leaf=is_stored
        )
        return self.layout.to_logical(trainable, "params", self.as_stacked)

    def __call__(
        self, state: State, grads: Any, variables: Any, sums: Sums, writes: Writes | None
    ) -> tuple[State, Metrics]:
        """Return the next state, and the metrics of the step.

        Args:
          state: the state before the step.
          grads: the unpadded gradients of the unscaled loss, in the tree of the leaves; None for a frozen leaf.
          variables: the model's variables after the step.
          sums: the sums of each metric over all rows.
          writes: what the loss writes to its parameters; None if it writes nothing.
        """
        # 1. The parameters and gradients that the optimizer sees, each device with its shard of them.
        written = state.params if writes is None else writes(self.layout, state.params, state.variables)
        params, grads_seen = self._seen(self._shards(written)), self._seen(grads)
        loss = metrics_of(sums)["loss"]
        norm = optax.tree.norm(grads)
        token = order.first_token(norm, self.layout.mesh)

        # 2. Whether the step is applied.
        # Any gradient that is not finite makes the norm not finite, so that no second pass over them is needed.
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        metrics = metrics_of(sums) | {"grad_norm": norm, "finite": finite}
        applied, scale, metrics["skipped"] = self._decide(state, grads, finite)

        # 3. The optimizer.
        if self.streams is not None:
            new_params, opt_state = self.streams(params, grads_seen, state.optimizer, loss, applied)
        else:
            logical_state = self.layout.to_logical(state.optimizer, "optimizer")
            (changes, logical_state), token = self._changes(grads_seen, logical_state, params, loss, token)
            # A step that is skipped also undoes what the loss wrote.
            old_params = params if written is state.params else self._seen(self._shards(state.params))
            new_params = where_applied(applied, optax.apply_updates(params, changes), old_params)
            opt_state = where_applied(applied, self.layout.to_stored(logical_state, "optimizer"), state.optimizer)
        variables = where_applied(applied, variables, state.variables)

        # 4. The parameters as they are stored; frozen leaves keep their values.
        new_params = self.layout.to_stored(new_params, "params", self.as_stacked)
        new_params = jax.tree.map(lambda old, new: old if new is None else new, state.params, new_params)
        stored, copy, token = self.publish(new_params, state, token)

        # 5. The number of the step.
        number = state.step + 1
        if self.on_nonfinite == "stop":
            # float16 begins with a scale at which gradients overflow. That is no fault until the scale is 1.
            is_overflow = False if state.scale is None else (state.scale.scale > 1) & jnp.isfinite(loss)
            number = jnp.where(state.step < 0, state.step, jnp.where(finite | is_overflow, number, -number))
            metrics["stopped"] = number < 0
        # The next step's collectives depend on its number, and so come after all collectives of this step.
        step, metrics = order.behind(token, (number, metrics))
        return State(step, stored, copy, opt_state, variables, scale, state.key), metrics

    def _decide(self, state: State, grads: Any, finite: jax.Array) -> tuple[jax.Array | None, Any, jax.Array]:
        """Decide whether a step is applied; `finite` tells whether its loss and the norm of its gradients are finite.

        Returns:
          Bool [], or None for always, without a select for each array; the next loss scale, None if there is none; and
          the number of skipped steps, for the metrics.
        """
        applied, scale, skipped = None, None, jnp.int32(0)
        if state.scale is not None:
            # The norm of finite gradients may overflow. The loss scale must not shrink for that.
            applied = all_finite(grads)
            scale = state.scale.next(applied)
            skipped = scale.skipped
        if self.on_nonfinite != "apply":
            applied = finite if applied is None else applied & finite
            if self.on_nonfinite == "stop":
                is_running = state.step >= 0
                # After a stop, nothing changes any more, the loss scale included.
                applied, scale = applied & is_running, where_applied(is_running, scale, state.scale)
        return applied, scale, skipped

    def _changes(self, grads: Any, opt_state: Any, params: Any, loss: jax.Array, token: Token | None) -> Any:
        """Call the optimizer: return ((changes of the parameters, new state), token), all of logical leaves."""
        if self.owners is not None and self.owners.bundles:
            # The order of `update_program`, whose equations the owners run.
            args = jax.tree.leaves((params, grads, opt_state, loss))
            outs, token = self.owners(self.layout.mesh, token, *args)
            return jax.tree.unflatten(self.owners.program.tree, outs), token
        try:
            with transforming("optimizer.update", params):
                return self.optimizer.update(grads, opt_state, params, value=loss), token
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise ValueError(
                f"the optimizer needs more than gradients, parameters and the loss's value: {error}; use one without a "
                "line search, or call it yourself with the results of step.value_and_grad"
            ) from error

    def constrain(self, leaf: Leaf, x: jax.Array) -> jax.Array:
        """Return the padded leaf, sharded like the optimizer's state: of a replicated leaf each device takes a part."""
        if "optimizer" not in self.rule.sharded or leaf.dim is None or is_on_host(x):
            return x
        # Padded first, since XLA shards only dims that the devices divide.
        return jax.lax.with_sharding_constraint(leaf.pad(x), self.layout.sharding(leaf.spec()))

    def _shards(self, params: Any) -> Any:
        """Return the tree of the leaves with each device's shard of every leaf (`constrain`)."""
        leaves = self.layout.leaves
        values = zip(leaves, jax.tree.leaves(params), strict=True)
        return self.layout.unflatten([self.constrain(leaf, x) for leaf, x in values])

    def publish(self, params: Any, state: State, token: Token | None) -> tuple[Any, Any, Token | None]:
        """Return the updated parameters as they are stored.

        Communicates an all-gather of every leaf that the rule stores whole (ZeRO-1 and 2); other rules store shards.

        Args:
          params: the updated parameters, unpadded, in the tree of the leaves.
          state: the state before the step. Its arrays give the dtype, and their memory is reused.
          token: the token before the all-gathers.

        Returns:
          The parameters; their copy in the compute dtype, or None if the layout stores no copy; and the next token.
        """
        leaves, shards = self.layout.leaves, self._shards(params)
        # Each device keeps its shard, or every device computed the whole update.
        if not self.rule.published or self.layout.shards == 1:
            return shards, None, token
        old_params = jax.tree.leaves(state.copy if self.layout.copied else state.params)
        gather = order.in_order(functools.partial(publish, leaves), self.layout.mesh)
        specs, whole_specs = [leaf.spec() for leaf in leaves], [leaf.spec(False) for leaf in leaves]
        whole_params, token = jax.shard_map(
            gather,
            mesh=self.layout.mesh,
            in_specs=(PartitionSpec(), specs, whole_specs),
            out_specs=(whole_specs, PartitionSpec()),
            check_vma=False,
        )(token, jax.tree.leaves(shards), old_params)
        if self.layout.copied:
            # The masters stay sharded; only the copy in the compute dtype is whole.
            return shards, self.layout.unflatten(whole_params), token
        return self.layout.unflatten(whole_params), None, token


@contextlib.contextmanager
def transforming(call_name: str, params: Any) -> Iterator[None]:
    """Explain errors of the user's optimizer, in a context around one traced call of it.

    Args:
      call_name: the call, for the error.
      params: the parameters that the optimizer sees.

    Raises ValueError if the optimizer needs the value of an array, or if its masks or labels are trees of another
    structure than the parameters, such as masks that were made from a module.
    """
    try:
        with traced(call_name, IN_OPTIMIZER):
            yield
    except (ValueError, AttributeError) as error:
        # Errors of other origin are raised as they are: these two come from optax's walks over trees.
        innermost = traceback.extract_tb(error.__traceback__)[-1].filename
        if isinstance(error, AttributeError) and isinstance(error.obj, Mapping):
            fault = f"asks for .{error.name} of the parameters"
        elif isinstance(error, ValueError) and innermost.endswith(("jax/_src/tree.py", "jax/_src/tree_util.py")):
            fault = f"has a tree, such as a mask or labels, of another structure ({_first_line(error)})"
        else:
            raise
        paths = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        path_list = ", ".join(paths[:_MAX_LEAVES]) + ", ..." * (len(paths) > _MAX_LEAVES)
        raise ValueError(
            f"{call_name} sees the parameters as a {type(params).__name__} of {path_list}, and {fault}; make masks and "
            "labels by a function of the parameters that optax calls, such as mask=lambda params: jax.tree.map(lambda "
            "p: p.ndim > 1, params), or jax.tree_util.tree_map_with_path to choose by path"
        ) from error


def _first_line(error: Exception) -> str:
    """Return the first line of an error's text that is not empty."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(itertools.dropwhile(lambda line: not line, lines), type(error).__name__)


def taking_value(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Return the transformation such that `update` accepts the loss as `value`, and ignores it if it has no use."""
    update = optimizer.update
    parameters = inspect.signature(update).parameters.values()
    if any(p.name == "value" or p.kind is p.VAR_KEYWORD for p in parameters):
        return optax.with_extra_args_support(optimizer)
    # A transformation may take other extra arguments (`optax.contrib.sam`) and raise an error for this one.
    return optax.GradientTransformationExtraArgs(
        optimizer.init, lambda updates, state, params=None, **extra: update(updates, state, params)
    )
