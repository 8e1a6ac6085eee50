"""The step of data parallel 1.0: two programs and the transfers between them; see `parallel/server.py`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .batches import batch_specs
from .gradients import Metrics, Sums, metrics_of
from .state import State
from .step import Step, check_state
from .strategy import AXES, ROWS

_STACKED = PartitionSpec(ROWS)


class ServerStep(Step):
    """A step whose state lives on the first device of the mesh. One process only: raises ValueError with several
    hosts.
    """

    def _home(self) -> Mesh:
        if jax.process_count() > 1:
            raise ValueError(f"server=True runs in one process and there are {jax.process_count()}; use ddp")
        first = np.array(self.mesh.devices.flat[0]).reshape((1,) * len(AXES))
        return Mesh(first, AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def _function(self, name: str, batch: Any) -> Any:
        """`compile` and `trace` see the replicas' program; the server's update is a program of its own."""
        return self._replicas(name, batch)

    def _replicas(self, name: str, batch: Any) -> Any:
        leaves, tree = jax.tree.flatten(batch)
        key = ("replicas", name == "evaluate", tree, *(np.shape(x) for x in leaves))
        if key not in self._jitted:
            self.check(batch)
            fun = self._losses if name == "evaluate" else self._stacked
            self._jitted[key] = jax.jit(fun)
        return self._jitted[key]

    def abstract_state(self) -> State:
        """The state as the replicas get it: shapes and dtypes, on every device."""
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), super().abstract_state()
        )

    def _run(self, name: str, state: State, batch: Any) -> Any:
        check_state(state)
        replicas = self._replicas(name, batch)
        rows = jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec),
            batch_specs(batch),
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        scattered = jax.device_put(batch, rows)
        # The optimizer's state stays at home: replicas get weights, variables and keys.
        sent = State(state.step, state.params, None, None, state.variables, state.scale, state.key)
        broadcast = jax.device_put(sent, NamedSharding(self.mesh, PartitionSpec()))
        gathered = jax.device_put(replicas(broadcast, scattered), NamedSharding(self._home(), PartitionSpec()))
        return self._server(name)(state, gathered)

    def _server(self, name: str) -> Any:
        if name not in self._jitted:
            fun = {"train": self._serve, "evaluate": self._report, "gradients": self._serve_gradients}[name]
            self._jitted[name] = jax.jit(fun, donate_argnums=(0,) if name == "train" else ())
        return self._jitted[name]

    # -- the replicas' program -----------------------------------------------------------------------------------------

    def _stacked(self, state: State, batch: Any) -> Any:
        """Every replica's gradients and sums, stacked; new variables, the same on all."""
        scale = state.scale.scale if state.scale is not None else jnp.float32(1)

        def local(*args: Any) -> Any:
            grads, variables, sums = self.local.gradients(*args)
            return _lift(grads), variables, _lift(sums)

        mapped = self._mapped(local, batch, (_STACKED, PartitionSpec(), _STACKED))
        return mapped(state.params, state.variables, state.key, state.step, scale)

    def _losses(self, state: State, batch: Any) -> Sums:
        return self._mapped(lambda *args: _lift(self.local.evaluate(*args)), batch, _STACKED)(
            state.params, state.variables
        )

    # -- the server's --------------------------------------------------------------------------------------------------

    def _summed(self, state: State, gathered: Any) -> Any:
        grads, variables, sums = gathered
        sums = jax.tree.map(lambda x: x.sum(0), sums)
        grads = [g.sum(0) / sums["loss"].count for g in grads]
        return self._unscaled(grads, state), variables, sums

    def _serve(self, state: State, gathered: Any) -> tuple[State, Metrics]:
        return self.update(state, *self._summed(state, gathered))

    def _serve_gradients(self, state: State, gathered: Any) -> tuple[jax.Array, Any]:
        grads, _, sums = self._summed(state, gathered)
        return metrics_of(sums)["loss"], self.filled(grads)

    def _report(self, state: State, sums: Sums) -> Metrics:
        return metrics_of(jax.tree.map(lambda x: x.sum(0), sums))


def _lift(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)
