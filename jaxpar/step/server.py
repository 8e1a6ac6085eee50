"""The step of `dp`, data parallelism with a central server: four programs, and five exchanges between them.

    server (the mesh's first device)                              replicas (all devices, the first included)
    --------------------------------                              ------------------------------------------
    batch, weights      -- scatter rows, broadcast weights -->    forward: sums of the loss, and a tape
    loss: seeds         <-- gather losses ---------------------
                        -- scatter seeds --------------------->   backward: gradients of each replica's rows
    update: optimizer   <-- gather gradients ------------------

The seed of a replica is the gradient of the loss with respect to the replica's sum over rows: the scale divided by the
count of all rows. `ServerStep.carry` is the order above. `parallel/data/server.py` has the cost of the exchanges.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..backend.cpu_compiler import cpu_options
from ..collectives import order
from ..layout.precision import LossScale
from ..layout.state import State
from ..model.batches import as_array, batch_shardings, batch_specs, dealt
from ..program.buffers import scan
from ..program.filter_primitives import without_filter_primitives
from ..strategy.axes import AXES, ROWS
from .checks import check_state, is_traced
from .core import Step
from .gradients import gradient_figures, metrics_of, sum_leading_dim, take_first
from .tracing import Sums

OF_REPLICAS = ("forward", "backward")  # the programs that run on every device; "loss" and "update" are the server's
_REPLICATED, _STACKED = PartitionSpec(), PartitionSpec(ROWS)


class Carrier(Protocol):
    """The two operations of a step: `Live` carries them out, `inspect/transfers.py` only records them."""

    def move(self, kind: str, what: str, tree: Any, to: Any) -> Any:
        """Move a tree of arrays to the shardings `to`.

        Args:
          kind: "scatter", "broadcast" or "gather".
          what: the content, in words, for reports.
          to: one sharding, or a tree of them.
        """
        ...

    def run(self, name: str, program: Any, *args: Any) -> Any:
        """Run a jitted program and return its results."""
        ...


class Live:
    """Moves arrays and runs programs."""

    def move(self, kind: str, what: str, tree: Any, to: Any) -> Any:
        """Put the arrays on their devices; see `Carrier`."""
        return jax.device_put(tree, to)

    def run(self, name: str, program: Any, *args: Any) -> Any:
        """Call the program; see `Carrier`."""
        return program(*args)


class ServerStep(Step):
    """A step whose state lives on the mesh's first device. One process only: ValueError with several hosts."""

    def _home(self) -> Mesh:
        """Return a mesh of the first device alone, on which the state lives."""
        if jax.process_count() > 1:
            raise ValueError(f"server=True runs in one process and there are {jax.process_count()}; use ddp")
        server = np.array(self.mesh.devices.flat[0]).reshape((1,) * len(AXES))
        return Mesh(server, AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def _function(self, name: str, batch: Any, inside: bool = False) -> Any:
        """Return the replicas' programs as one, which `compile` and `trace` look at; the server's are separate."""
        return self._programs(batch)["evaluate" if name == "evaluate" else "both"]

    def abstract_state(self) -> State:
        """Return the state as the replicas receive it: shapes and dtypes, replicated over all devices."""
        everywhere = NamedSharding(self.mesh, _REPLICATED)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), super().abstract_state()
        )

    def abstract_home(self) -> State:
        """Return the state as the server stores it: shapes, dtypes and shardings."""
        return super().abstract_state()

    def measured(self, state: State, batch: Any, order: np.ndarray) -> dict[str, jax.Array]:
        """Return figures of the gradients, as `Step.measured` does; the server deals the rows itself."""
        return self._run_program("measured", state, dealt(jax.tree.map(as_array, batch), order))

    def _run_program(self, name: str, state: State, batch: Any) -> Any:
        """Run a step; raises ValueError within a caller's program, since arrays move between the programs."""
        check_state(state)
        # `device_put` between the programs moves real arrays, which a trace does not have.
        if is_traced(state, batch):
            raise ValueError(
                "server=True is four programs, with arrays moved between them, and cannot be traced by jit, grad, "
                "vmap, scan or eval_shape; call the step outside of them, or use ddp"
            )
        return self.carry(Live(), name, state, self._take_in(batch))

    def carry(self, carrier: Carrier, name: str, state: State, batch: Any) -> Any:
        """Carry out one step, and return its results; all arrays that move between devices move here.

        Args:
          carrier: moves arrays and runs programs, or records them.
          name: "train", "evaluate", "gradients" or "measured".
          state: the state, on the server.
          batch: the global batch.
        """
        # `home` is the server, the only device of the layout's mesh; the other two span all devices.
        programs, home = self._programs(batch), self.layout.sharding(_REPLICATED)
        everywhere, stacked = NamedSharding(self.mesh, _REPLICATED), NamedSharding(self.mesh, _STACKED)

        # 1. Rows and weights go to the replicas. The optimizer's state stays on the server.
        rows = carrier.move("scatter", "rows of the batch", batch, batch_shardings(batch, self.mesh))
        replica_state = State(state.step, state.params, None, None, state.variables, state.scale, state.key)
        weights = carrier.move("broadcast", "weights", replica_state, everywhere)
        if name == "evaluate":
            losses = carrier.run("evaluate", programs["evaluate"], weights, rows)
            sums = carrier.move("gather", "losses", losses, home)
            return carrier.run("report", self._server_program("report"), sums)

        # 2. Forward on the replicas; the server computes the loss and each replica's seed.
        forward = programs["alike" if name == "measured" else "forward"]
        losses, tape = carrier.run("forward", forward, weights, rows)
        sums, variables = carrier.move("gather", "losses", losses, home)
        seeds = carrier.run("loss", self._server_program("loss"), sums, state.scale)
        seeds = carrier.move("scatter", "gradients of the losses", seeds, stacked)

        # 3. Backward on the replicas; the server adds the gradients and updates.
        grads = carrier.run("backward", programs["backward"], weights, rows, tape, seeds)
        # The replicas' memory must be free again before the server gathers all gradients.
        del rows, weights, losses, tape, seeds
        grads = carrier.move("gather", "gradients", grads, home)
        return carrier.run("update", self._server_program(name), state, (grads, variables, sums))

    def _programs(self, batch: Any) -> dict[str, Any]:
        """Return the replicas' programs for batches of this shape, by name; jitted once."""
        leaves, tree = jax.tree.flatten(batch)
        cache_key = ("replicas", tree, *(np.shape(x) for x in leaves))
        if cache_key not in self._jitted:
            self.check(batch)
            alike = functools.partial(self._forward, alike=True)
            programs = {"evaluate": self._losses, "forward": self._forward, "alike": alike, "backward": self._backward}
            # Only `compile` and `trace` look at this one; a step runs the two programs separately.
            programs |= {"both": self._forward_and_backward}
            options = cpu_options(self.mesh.devices.flat[0].platform)
            self._jitted[cache_key] = {name: jax.jit(fun, compiler_options=options) for name, fun in programs.items()}
        return self._jitted[cache_key]

    def _losses(self, state: State, batch: Any) -> Sums:
        """Return the sums of each metric of every replica, [replicas], without dropout."""
        run = self.mapped(lambda *args: _add_replica_dim(self.local.evaluate(*args)), batch, _STACKED)
        return run(state.step, state.params, state.variables)[0]

    def _forward(self, state: State, batch: Any, alike: bool = False) -> Any:
        """Run the forward of all microbatches on every replica.

        Args:
          state: the weights, variables and keys, replicated.
          batch: the global batch.
          alike: give every block the key of block 0.

        Returns:
          ((sums of each metric [replicas], new variables, the same on all replicas), tapes [replicas, m, ...]).
        """

        def local(stored: Any, variables: Any, batch: Any, key: jax.Array, step: jax.Array) -> Any:
            loss, rows = self.local.bound(stored, variables, batch, key)

            # The tapes of all microbatches are outputs, so that the backward can be another program.
            def micro(variables: Any, block: Any) -> Any:
                key, rows = block
                sums, variables, tape = loss.forward(variables, rows, key)
                return variables, (sums, _without_stored(tape, loss.stored))

            keys = self.local.keys(key, step, alike)
            variables, (sums, tapes) = scan(micro, variables, (keys, rows), keys.shape[0])
            sums = self.local.reduce_sums(sum_leading_dim(sums), rows)
            return (_add_replica_dim(sums), variables), _add_replica_dim(tapes)

        run = self.mapped(local, batch, ((_STACKED, _REPLICATED), _STACKED))
        return run(state.step, state.params, state.variables, state.key, state.step)[0]

    def _backward(self, state: State, batch: Any, tapes: "Tapes", seeds: jax.Array) -> list[jax.Array | None]:
        """Run the backward of all microbatches on every replica.

        Args:
          state, batch: as for `_forward`.
          tapes: the tapes that `_forward` returned.
          seeds: the gradient of the loss with respect to each replica's sum, [replicas].

        Returns:
          The gradients of every replica, [replicas, *leaf].
        """

        def local(stored: Any, variables: Any, batch: Any, key: jax.Array, tapes: Tapes, seeds: jax.Array) -> Any:
            loss, _ = self.local.bound(stored, variables, batch, key)
            tapes = take_first(tapes)  # [m, ...], without the dim of replicas

            def micro(grads: Any, tape: Tapes) -> Any:
                return loss.backward(tape.with_stored(loss.stored), seeds[0], grads), None

            # A leaf that the loss does not read stays None in the accumulators.
            shapes = jax.eval_shape(lambda: micro([None] * len(loss.stored), take_first(tapes))[0])
            grads, _ = lax.scan(micro, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), tapes)
            return _add_replica_dim(self.local.finish_grads(loss, grads))

        ins = (_REPLICATED, _REPLICATED, _REPLICATED, batch_specs(batch), _REPLICATED, _STACKED, _STACKED)
        run = order.in_order(without_filter_primitives(local), self.mesh)
        mapped = jax.shard_map(run, mesh=self.mesh, in_specs=ins, out_specs=(_STACKED, _REPLICATED), check_vma=False)
        # The seeds depend on all results of the forward program, so that its collectives come before these.
        token = order.first_token(seeds, self.mesh)
        return mapped(token, jax.tree.leaves(state.params), state.variables, batch, state.key, tapes, seeds)[0]

    def _forward_and_backward(self, state: State, batch: Any) -> Any:
        """Return what the server gathers in a step, computed by one program, for `compile` and `trace`."""
        (sums, variables), tapes = self._forward(state, batch)
        return self._backward(state, batch, tapes, self._seeds(sums, state.scale)), variables, sums

    def _server_program(self, name: str) -> Any:
        """Return one of the server's programs, jitted once."""
        if name not in self._jitted:
            fun = {
                "loss": self._seeds,
                "train": lambda state, gathered: self.update(
                    state, *self._summed(state, gathered), writes=self.tracing.writes
                ),
                "gradients": lambda *args: self.loss_and_grads(*self._summed(*args)),
                "measured": lambda *args: gradient_figures(*self._summed(*args)[::2]),
                "report": lambda sums: metrics_of(sum_leading_dim(sums)),
            }[name]
            options = cpu_options(self.mesh.devices.flat[0].platform)
            # The update writes the new state into the memory of the old one.
            donate = (0,) if name == "train" else ()
            self._jitted[name] = jax.jit(fun, donate_argnums=donate, compiler_options=options)
        return self._jitted[name]

    def _seeds(self, sums: Sums, scale: LossScale | None) -> jax.Array:
        """Return the gradient of the scaled loss with respect to each replica's sum: scale / all rows, [replicas]."""
        # loss = scale sum_r total_r / sum_r count_r, and its derivative by total_r is the same for all replicas r.
        counts = sums["loss"].count
        return jnp.full(counts.shape, (1 if scale is None else scale.scale) / counts.sum(), jnp.float32)

    def _summed(self, state: State, gathered: Any) -> Any:
        """Return (gradients, variables, sums) over all replicas, from each replica's; gradients are unscaled."""
        # The variables are equal on all replicas, and come without a dim of replicas.
        grads, variables, sums = gathered
        return self._grads_for_update(sum_leading_dim(grads), state), variables, sum_leading_dim(sums)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["tree", "stored_positions"])
@dataclass(frozen=True)
class Tapes:
    """A tape without the parameters that a device stores, which the backward program receives anyway.

    Attributes:
      values: the arrays of the tape that are no stored parameters, in order.
      tree: the structure of the complete tape.
      stored_positions: for each leaf of `tree`, its position among the stored parameters, None if it is in `values`.
    """

    values: list[Any]
    tree: Any
    stored_positions: tuple[int | None, ...]

    def with_stored(self, stored: Sequence[Any]) -> Any:
        """Return the complete tape."""
        values = iter(self.values)
        leaves = [next(values) if i is None else stored[i] for i in self.stored_positions]
        return jax.tree.unflatten(self.tree, leaves)


def _without_stored(tape: Any, stored: Sequence[Any]) -> Tapes:
    """Remove the stored parameters from a tape; inverse of `Tapes.with_stored`."""
    # By identity: the forward puts a stored parameter into its tape as the same traced value.
    leaves, tree = jax.tree.flatten(tape)
    positions = tuple(next((i for i, param in enumerate(stored) if param is x), None) for x in leaves)
    return Tapes([x for x, i in zip(leaves, positions, strict=True) if i is None], tree, positions)


def _add_replica_dim(tree: Any) -> Any:
    """Add a leading dim, which the spec `_STACKED` makes the dim of replicas."""
    return jax.tree.map(lambda x: x[None], tree)
