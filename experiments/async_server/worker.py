"""A worker: pulls weights, computes the gradient of its rows, pushes it, whatever the others do."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar import Mean, Model
from jaxpar.backend.cpu_compiler import cpu_options
from jaxpar.layout.precision import all_finite
from jaxpar.step.blocks import block_key

from .server import HOLD, signature
from .service import Client


@dataclass(frozen=True)
class WorkerStep:
    """One step of a worker.

    Attributes:
      clock: which of its steps, from 0.
      version: how many updates had been made to the weights that it pulled.
      metrics: means over this worker's rows, at those weights: `loss`, and the loss's own.
      waited: seconds in which it was kept waiting for a slower worker.
    """

    clock: int
    version: int
    metrics: dict[str, float]
    waited: float


class Worker:
    """One worker of the server at `address`. It computes on one device, jax's default one.

    A context manager: leaving it tells the server, so that nobody waits for this worker any more.

    Args:
      model: the server's.
      address: host:port of the server, which may start later, within `deadline`.
      number: which worker this is, from 0. Rows are its own affair: for those of `ddp`, give worker i the i-th part of
        each global batch. Its keys for dropout are those of `ddp`'s replica of that number.
      deadline: seconds within which the server must answer to any message.

    `clock` is the step that comes next: 0, or that of the slowest worker where this one joins late.
    Raises ConnectionError where the server is not there; ValueError where it has another model, or the number is taken.
    """

    def __init__(self, model: Model, address: str, number: int, *, deadline: float = 30.0):
        if deadline <= HOLD:
            raise ValueError(f"deadline={deadline}: use more than {HOLD:g} s, which a pull may be kept waiting")
        self.number, self._model = number, model
        shapes, _ = jax.eval_shape(model.create, jax.random.key(0))
        self._tree = jax.tree.structure(shapes)
        self._server = Client(address, deadline, f"worker {number}")
        joined, _ = self._server("join", {"worker": number, "signature": signature(shapes)}, wait=True)
        self._who, self.clock = {"worker": number, "token": joined["token"]}, joined["clock"]
        key = jax.random.wrap_key_data(jnp.asarray(joined["key"]["data"], jnp.uint32), impl=joined["key"]["impl"])
        self._key = jax.random.fold_in(key, 1)  # as a step's state has it
        self._variables = jax.jit(lambda key: model.create(key)[1])(key)
        self._gradients: dict[Any, Any] = {}
        self._closed = threading.Event()
        self._beats = threading.Thread(target=self._beat, args=(joined["lease"] / 4,), daemon=True)
        self._beats.start()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._closed.set()
        self._beats.join()
        try:
            if kind is None or not issubclass(kind, ConnectionError):
                self._server("leave", self._who)
        finally:
            self._server.close()

    def step(self, batch: Any) -> WorkerStep:
        """One step on this worker's rows, a pytree of arrays [rows, ...]: pull, gradient, push.

        Raises ConnectionError where the server is dead, does not answer in time, or has given this worker up;
        FloatingPointError where loss or gradient is not finite, which is then not pushed.
        """
        params, version = self._pull()
        leaves, tree = jax.tree.flatten(batch)
        kind = (tree, *((jnp.shape(x), jnp.result_type(x)) for x in leaves))
        if kind not in self._gradients:
            self._gradients[kind] = self._compiled(params, batch)
        sums, grads, finite = self._gradients[kind](
            params, self._variables, batch, self._key, jnp.int32(self.clock), jnp.int32(self.number)
        )
        metrics = {name: float(mean.total / mean.count) for name, mean in sums.items()}
        if not finite:
            raise FloatingPointError(
                f"worker {self.number}, step {self.clock}: loss {metrics['loss']}, loss or gradient is not finite; it "
                "was not pushed. Try a lower learning rate, or a smaller staleness="
            )
        about = {"version": version, "loss": float(sums["loss"].total), "count": float(sums["loss"].count)}
        pushed, _ = self._server("push", self._who | about, [np.asarray(g) for g in jax.tree.leaves(grads)])
        self.clock += 1
        return WorkerStep(self.clock - 1, version, metrics, pushed["waited"])

    def _pull(self) -> tuple[Any, int]:
        while True:
            fields, arrays = self._server("pull", self._who)
            if "wait" not in fields:
                return jax.tree.unflatten(self._tree, arrays), fields["version"]

    def _compiled(self, params: Any, batch: Any) -> Any:
        """The sums of each metric over the batch's rows, the gradient of the loss's sum, and whether it is finite.

        The sum's, not the mean's: the server divides by the count of all rows that make an update, as every strategy.
        """

        def total(params: Any, variables: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, Mean]]:
            sums, _ = self._model.call(params, variables, batch, key)
            return sums["loss"].total, sums

        # No constant in it is this worker's own: with a compilation cache, the program of one serves all.
        def gradients(params: Any, variables: Any, batch: Any, key: jax.Array, step: Any, number: Any) -> Any:
            key = block_key(key, step, number)
            (_, sums), grads = jax.value_and_grad(total, has_aux=True)(params, variables, batch, key)
            return sums, grads, all_finite((sums["loss"].total, grads))

        def changed(variables: Any, params: Any, batch: Any) -> Any:
            return self._model.call(params, variables, batch, self._key)[1]

        # State that the loss hands back as it got it (tables, streams of keys) is no state.
        jaxpr = jax.make_jaxpr(changed)(self._variables, params, batch).jaxpr
        ins = jaxpr.invars[: len(jaxpr.outvars)]
        if any(a is not b for a, b in zip(ins, jaxpr.outvars, strict=True)):
            raise ValueError(
                "the loss changes mutable state (BatchNorm's statistics and the like), which no worker of an "
                "asynchronous server owns; use a model without it, or a strategy such as ddp"
            )
        return jax.jit(gradients, compiler_options=cpu_options())

    def _beat(self, every: float) -> None:
        """Tells the server that this process lives, while the main thread compiles or computes."""
        while not self._closed.wait(every):
            try:
                self._server("beat", self._who)
            except ConnectionError:
                return  # the next message of the main thread says so
