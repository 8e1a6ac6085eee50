"""The step of data parallel 1.0: four programs, and the five exchanges between them; see `parallel/data/server.py`."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..backend.cpu_compiler import cpu_options
from ..collectives import order
from ..layout.precision import LossScale
from ..layout.state import State
from ..model.batches import as_array, batch_shardings, batch_specs, dealt
from ..program.filter_primitives import without_filter_primitives
from ..strategy.axes import AXES, ROWS
from .checks import check_state
from .core import Step
from .gradients import added, first, measures, metrics_of
from .tracing import Sums

OF_REPLICAS = ("forward", "backward")  # the programs that run on every device; "loss" and "update" are the server's
_HERE, _STACKED = PartitionSpec(), PartitionSpec(ROWS)


class Carrier(Protocol):
    """How a step is carried out: for real (`Live`), or only written down (`inspect/transfers.py`)."""

    def move(self, kind: str, what: str, tree: Any, to: Any) -> Any:
        """A tree of arrays at the shardings `to`; `kind` is "scatter", "broadcast" or "gather"."""
        ...

    def run(self, name: str, program: Any, *args: Any) -> Any:
        """The results of a jitted program."""
        ...


class Live:
    """Moves arrays and runs programs."""

    def move(self, kind: str, what: str, tree: Any, to: Any) -> Any:
        """See `Carrier`."""
        return jax.device_put(tree, to)

    def run(self, name: str, program: Any, *args: Any) -> Any:
        """See `Carrier`."""
        return program(*args)


class ServerStep(Step):
    """A step whose state lives on the mesh's first device. One process only: ValueError with several hosts."""

    def _home(self) -> Mesh:
        if jax.process_count() > 1:
            raise ValueError(f"server=True runs in one process and there are {jax.process_count()}; use ddp")
        server = np.array(self.mesh.devices.flat[0]).reshape((1,) * len(AXES))
        return Mesh(server, AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def _function(self, name: str, batch: Any, inside: bool = False) -> Any:
        """`compile` and `trace` see the replicas' programs as one; the server's own are apart."""
        return self._programs(batch)["evaluate" if name == "evaluate" else "both"]

    def abstract_state(self) -> State:
        """The state as the replicas get it: shapes and dtypes, on every device."""
        everywhere = NamedSharding(self.mesh, _HERE)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), super().abstract_state()
        )

    def abstract_home(self) -> State:
        """The state as the server stores it."""
        return super().abstract_state()

    def measured(self, state: State, batch: Any, order: np.ndarray) -> dict[str, jax.Array]:
        """See `Step.measured`; the server deals the rows itself."""
        return self._run("measured", state, dealt(jax.tree.map(as_array, batch), order))

    def _run(self, name: str, state: State, batch: Any) -> Any:
        check_state(state)
        if any(isinstance(x, Tracer) for x in jax.tree.leaves((state, batch))):
            raise ValueError(
                "server=True is four programs, with arrays moved between them, and cannot be traced by jit, grad, "
                "vmap, scan or eval_shape; call the step outside of them, or use ddp"
            )
        return self.carry(Live(), name, state, self._take_in(batch))

    def carry(self, by: Carrier, name: str, state: State, batch: Any) -> Any:
        """One step: "train", "evaluate", "gradients" or "measured". All that moves between devices moves here."""
        programs, home = self._programs(batch), self.layout.sharding(_HERE)
        everywhere, stacked = NamedSharding(self.mesh, _HERE), NamedSharding(self.mesh, _STACKED)
        rows = by.move("scatter", "rows of the batch", batch, batch_shardings(batch, self.mesh))
        # The optimizer's state stays at home: replicas get weights, variables and keys.
        sent = State(state.step, state.params, None, None, state.variables, state.scale, state.key)
        weights = by.move("broadcast", "weights", sent, everywhere)
        if name == "evaluate":
            sums = by.move("gather", "losses", by.run("evaluate", programs["evaluate"], weights, rows), home)
            return by.run("report", self._server("report"), sums)
        losses, tape = by.run("forward", programs["alike" if name == "measured" else "forward"], weights, rows)
        sums, variables = by.move("gather", "losses", losses, home)
        seeds = by.run("loss", self._server("loss"), sums, state.scale)
        seeds = by.move("scatter", "gradients of the losses", seeds, stacked)
        grads = by.run("backward", programs["backward"], weights, rows, tape, seeds)
        del rows, weights, losses, tape, seeds  # so that the replicas' memory is free again
        grads = by.move("gather", "gradients", grads, home)
        return by.run("update", self._server(name), state, (grads, variables, sums))

    def _programs(self, batch: Any) -> dict[str, Any]:
        leaves, tree = jax.tree.flatten(batch)
        key = ("replicas", tree, *(np.shape(x) for x in leaves))
        if key not in self._jitted:
            self.check(batch)
            alike = functools.partial(self._forward, alike=True)
            programs = {"evaluate": self._losses, "forward": self._forward, "alike": alike, "backward": self._backward}
            programs |= {"both": self._both}
            options = cpu_options(self.mesh.devices.flat[0].platform)
            self._jitted[key] = {name: jax.jit(fun, compiler_options=options) for name, fun in programs.items()}
        return self._jitted[key]

    def _losses(self, state: State, batch: Any) -> Sums:
        run = self.mapped(lambda *args: _lift(self.local.evaluate(*args)), batch, _STACKED)
        return run(state.step, state.params, state.variables)[0]

    def _forward(self, state: State, batch: Any, alike: bool = False) -> Any:
        """Every replica's sums, stacked, with new variables, the same on all; and the tapes of all microbatches."""

        def local(stored: Any, variables: Any, batch: Any, key: jax.Array, step: jax.Array) -> Any:
            loss, rows = self.local.bound(stored, variables, batch, key)

            def micro(variables: Any, block: Any) -> Any:
                key, rows = block
                sums, variables, tape = loss.forward(variables, rows, key)
                return variables, (sums, _apart(tape, loss.stored))

            variables, (sums, tapes) = lax.scan(micro, variables, (self.local.keys(key, step, alike), rows))
            return (_lift(self.local.total(added(sums), rows)), variables), _lift(tapes)

        run = self.mapped(local, batch, ((_STACKED, _HERE), _STACKED))
        return run(state.step, state.params, state.variables, state.key, state.step)[0]

    def _backward(self, state: State, batch: Any, tapes: "Tapes", seeds: jax.Array) -> list[jax.Array | None]:
        """Every replica's gradients, stacked, from the gradient of the loss with respect to each replica's sum."""

        def local(stored: Any, variables: Any, batch: Any, key: jax.Array, tapes: Tapes, seeds: jax.Array) -> Any:
            loss, _ = self.local.bound(stored, variables, batch, key)
            tapes = first(tapes)

            def micro(grads: Any, tape: Tapes) -> Any:
                return loss.backward(tape.whole(loss.stored), seeds[0], grads), None

            shapes = jax.eval_shape(lambda: micro([None] * len(loss.stored), first(tapes))[0])
            grads, _ = lax.scan(micro, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), tapes)
            return _lift(self.local.finished(loss, grads))

        ins = (_HERE, _HERE, _HERE, batch_specs(batch), _HERE, _STACKED, _STACKED)
        run = order.in_order(without_filter_primitives(local), self.mesh)
        mapped = jax.shard_map(run, mesh=self.mesh, in_specs=ins, out_specs=(_STACKED, _HERE), check_vma=False)
        token = order.first_token(seeds, self.mesh)  # which come after all that the forward program does
        return mapped(token, jax.tree.leaves(state.params), state.variables, batch, state.key, tapes, seeds)[0]

    def _both(self, state: State, batch: Any) -> Any:
        (sums, variables), tapes = self._forward(state, batch)
        return self._backward(state, batch, tapes, self._seeds(sums, state.scale)), variables, sums

    def _server(self, name: str) -> Any:
        if name not in self._jitted:
            fun = {
                "loss": self._seeds,
                "train": lambda state, gathered: self.update(
                    state, *self._summed(state, gathered), writes=self.tracing.writes
                ),
                "gradients": lambda *given: self.handed_out(*self._summed(*given)),
                "measured": lambda *given: measures(*self._summed(*given)[::2]),
                "report": lambda sums: metrics_of(added(sums)),
            }[name]
            options = cpu_options(self.mesh.devices.flat[0].platform)
            donate = (0,) if name == "train" else ()
            self._jitted[name] = jax.jit(fun, donate_argnums=donate, compiler_options=options)
        return self._jitted[name]

    def _seeds(self, sums: Sums, scale: LossScale | None) -> jax.Array:
        """The gradient of the (scaled) loss with respect to each replica's sum [n]: one over the count of all rows."""
        counts = sums["loss"].count
        return jnp.full(counts.shape, (1 if scale is None else scale.scale) / counts.sum(), jnp.float32)

    def _summed(self, state: State, gathered: Any) -> Any:
        grads, variables, sums = gathered
        return self._unscaled(added(grads), state), variables, added(sums)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["tree", "where"])
@dataclass(frozen=True)
class Tapes:
    """A tape without the stored leaves: `where` says which of these stands in each place of the tree, None for none."""

    values: list[Any]
    tree: Any
    where: tuple[int | None, ...]

    def whole(self, stored: Sequence[Any]) -> Any:
        """The tape."""
        it = iter(self.values)
        return jax.tree.unflatten(self.tree, [next(it) if at is None else stored[at] for at in self.where])


def _apart(tape: Any, stored: Sequence[Any]) -> Tapes:
    """A tape without the stored leaves, which the backward program has itself."""
    leaves, tree = jax.tree.flatten(tape)
    where = tuple(next((i for i, w in enumerate(stored) if w is x), None) for x in leaves)
    return Tapes([x for x, at in zip(leaves, where, strict=True) if at is None], tree, where)


def _lift(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)
