"""The server: parameters and the optimizer's state in one place, updated by gradients as they come."""

from __future__ import annotations

import collections
import reprlib
import threading
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar import Model
from jaxpar.backend.cpu_compiler import cpu_options
from jaxpar.model.paths import name_of
from jaxpar.step.update import taking_value

from . import service
from .clocks import Clocks
from .wire import Fields, encode

HOLD = 2.0  # seconds that a pull waits on the server; the worker then asks again, so that its deadline may be short


@dataclass(frozen=True)
class Pushed:
    """One gradient that was applied.

    Attributes:
      worker, clock: whose, and of which of its steps.
      staleness: updates that were made between the pull of the weights that it is of, and its own.
      loss, count: total and count of the loss over the worker's rows, at those weights.
      version: updates made, with it.
      seconds: since the server began.
    """

    worker: int
    clock: int
    staleness: int
    loss: float
    count: float
    version: int
    seconds: float


@dataclass(frozen=True)
class _Pending:
    worker: int
    clock: int
    pulled: int
    grads: list[np.ndarray]
    loss: float
    count: float


class Server:
    """Parameters that workers in other processes pull, and to which they push gradients without waiting for each other.

    With `staleness=0` the gradients of a step of all workers are added up and make one update, the one of `ddp` with as
    many devices. With more, or None, every gradient makes an update when it comes (Dean et al. 2012), and a worker
    waits while it is more than `staleness` steps ahead of the slowest (Ho et al. 2013); see `clocks.py`.

    A context manager: leaving it stops the server, and workers that still train end with a sentence.

    Args:
      model: whose parameters. Its mutable state (BatchNorm's statistics) would belong to nobody, and workers refuse it.
      optimizer: an optax transformation. With `staleness` above 0 it sees one worker's gradient at a time: N times as
        many updates as under `ddp`, for which the learning rate is N times too high.
      key: of the initial values and of dropout, as `step.init` takes it.
      workers: how many take part.
      staleness: steps that a worker may be ahead of the slowest; None for no bound.
      params: start from these, a tree like `step.params(state)`.
      address: host:port to listen on; port 0 for a free one. Whoever reaches it may train: there is no password and no
        encryption, so leave it on loopback or a network that is yours alone.
      lease: seconds after which a worker of whom nothing is heard is given up. The others then wait for it no more. Too
        short on a busy machine, and one that compiles is taken for dead.
      patience: seconds that a worker may take for a step, the first of which compiles, or to join.

    `address` is where it listens; `begin` when it began, by `time.monotonic`; `log` has what was applied, `lost` why
    workers were given up, by number.
    Raises ValueError for arguments that cannot be, OSError where the address is taken.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Any,
        key: jax.Array,
        *,
        workers: int,
        staleness: int | None,
        params: Any = None,
        address: str = "127.0.0.1:0",
        lease: float = 30.0,
        patience: float = 600.0,
    ):
        self._clocks = Clocks(workers, staleness, lease, patience)
        self._model, self._key = model, key
        self._params = jax.jit(lambda key: model.create(key)[0])(key) if params is None else model.unwrap(params)
        service.check_size(sum(x.nbytes for x in jax.tree.leaves(self._params)))
        optimizer = taking_value(optimizer)
        self._state = jax.jit(optimizer.init)(self._params)
        self._signature = signature(self._params)
        self._version, self._encoded = 0, (-1, b"")
        self._pending: list[_Pending] = []
        self._waited: dict[int, float] = collections.defaultdict(float)  # seconds, in the step that a worker is in
        self._changed, self.begin, self._stopped = threading.Condition(), time.monotonic(), threading.Event()
        self.log: list[Pushed] = []
        self.lost: dict[int, str] = {}

        def update(params: Any, state: Any, pushed: Any, totals: jax.Array, count: jax.Array) -> tuple[Any, Any]:
            grads = jax.tree.map(lambda *g: sum(x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in g), *pushed)
            grads = jax.tree.map(lambda g: g / count, grads)
            changes, state = optimizer.update(grads, state, params, value=totals / count)
            return optax.apply_updates(params, changes), state

        self._update = jax.jit(update, compiler_options=cpu_options())
        methods = {"join": self._join, "pull": self._pull, "push": self._push, "beat": self._beat, "leave": self._leave}
        self._rpc, self.address = service.serve(address, methods, threads=2 * workers + 2)
        self._watch = threading.Thread(target=self._expire, name="jaxpar-async-leases", daemon=True)
        self._watch.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def params(self) -> Any:
        """The parameters now, in the model's own tree."""
        with self._changed:
            return self._model.wrap(self._params)

    @property
    def version(self) -> int:
        """How many updates were made."""
        return self._version

    def wait(self, timeout: float | None = None) -> bool:
        """Until every worker has left or is lost; False where that takes longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._clocks.live, timeout)

    def stop(self) -> None:
        """Ends the server; calls in progress are cancelled."""
        self._stopped.set()
        self._rpc.stop(grace=None).wait()
        self._watch.join()

    # -- what workers call, each in a thread of its own ----------------------------------------------------------------

    def _join(self, fields: Fields, _: Any) -> bytes:
        number = _whole(fields, "worker")
        if (theirs := fields.get("signature")) != self._signature:
            raise ValueError(
                f"the worker's parameters are not the server's: {_differs(theirs, self._signature)}; "
                "build both from the same model"
            )
        with self._changed:
            token, clock = self._clocks.join(number)
            self.lost.pop(number, None)
        key = {"impl": str(jax.random.key_impl(self._key)), "data": np.asarray(jax.random.key_data(self._key)).tolist()}
        return encode({"token": token, "clock": clock, "key": key, "lease": self._clocks.lease})

    def _pull(self, fields: Fields, _: Any) -> bytes:
        number, token = _whole(fields, "worker"), _whole(fields, "token")
        with self._changed:
            self._clocks.heard(number, token)
            begin = time.monotonic()
            while not self._clocks.may_start(number):
                passed = self._changed.wait(max(begin + HOLD - time.monotonic(), 0))
                self._clocks.heard(number, token)
                if not passed:
                    self._waited[number] += time.monotonic() - begin
                    return encode({"wait": True})
            self._waited[number] += time.monotonic() - begin
            if self._encoded[0] != self._version:
                arrays = [np.asarray(x) for x in jax.tree.leaves(self._params)]
                self._encoded = self._version, encode({"version": self._version}, arrays)
            return self._encoded[1]

    def _push(self, fields: Fields, arrays: list[np.ndarray]) -> bytes:
        # Every field is checked before anything changes. A push that was refused halfway stayed, and was applied again
        # with each that followed.
        number, token, pulled = (_whole(fields, name) for name in ("worker", "token", "version"))
        loss, count = _real(fields, "loss"), _real(fields, "count")
        if count < np.finfo(np.float32).tiny:
            raise ValueError(
                f"count={count}: no row of this worker's batch counts, and gradients are divided by the count; give "
                "each worker rows whose weights add up to more than 0"
            )
        if len(arrays) != len(self._signature):
            raise ValueError(f"a push has {len(arrays)} gradients; send {len(self._signature)}, one for each leaf")
        for x, (name, shape, dtype) in zip(arrays, self._signature, strict=True):
            if [list(x.shape), str(x.dtype)] != [shape, dtype]:
                raise ValueError(f"the gradient of {name} is {x.dtype}{list(x.shape)}; send {dtype}{shape}")
            if not np.isfinite(x).all():
                raise ValueError(f"the gradient of {name} is not finite; leave it out, and try a lower learning rate")
            # Each is finite, and their quotient, which optax gets, may not be.
            if x.size and np.abs(x).max().astype(np.float64) / count > np.finfo(np.float32).max:
                raise ValueError(
                    f"the gradient of {name}, divided by count={count}, is more than float32 holds; send the sum of "
                    "the gradients of its rows, and as the count the sum of their weights"
                )
        with self._changed:
            self._clocks.heard(number, token)
            if pulled > self._version:
                raise ValueError(f"version={pulled} has not been made yet; send that of the last pull")
            if not self._clocks.may_start(number):
                raise ValueError(f"worker {number} pushes once more than it may; pull before each push")
            self._pending.append(_Pending(number, self._clocks.pushed(number), pulled, arrays, loss, count))
            self._apply()
            self._changed.notify_all()
            return encode({"waited": self._waited.pop(number, 0.0)})

    def _beat(self, fields: Fields, _: Any) -> bytes:
        # Without the lock: while an update compiles, those who live must not seem dead.
        self._clocks.heard(_whole(fields, "worker"), _whole(fields, "token"))
        return encode({})

    def _leave(self, fields: Fields, _: Any) -> bytes:
        number, token = _whole(fields, "worker"), _whole(fields, "token")
        with self._changed:
            self._clocks.heard(number, token)
            self._clocks.leave(number)
            self._apply()
            self._changed.notify_all()
        return encode({})

    # -- what happens meanwhile ----------------------------------------------------------------------------------------

    def _expire(self) -> None:
        """Gives up lost workers, so that those who wait for them go on."""
        while not self._stopped.wait(self._clocks.lease / 5):
            with self._changed:
                if gone := self._clocks.expire():
                    self.lost |= gone
                    self._apply()
                    self._changed.notify_all()

    def _apply(self) -> None:
        """One update by all gradients that are here; if workers go in step, once those of all have come."""
        pushed = self._pending
        in_step = self._clocks.staleness == 0
        if not pushed or (in_step and any(w.clock <= pushed[0].clock for w in self._clocks.live.values())):
            return
        pushed = sorted(pushed, key=lambda one: one.worker)  # sums are rounded in one order, whoever came first
        grads = [jax.tree.unflatten(jax.tree.structure(self._params), one.grads) for one in pushed]
        totals, count = sum(one.loss for one in pushed), sum(one.count for one in pushed)
        params, state = self._update(self._params, self._state, grads, jnp.float32(totals), jnp.float32(count))
        now, before = time.monotonic() - self.begin, self._version
        self.log += [
            Pushed(one.worker, one.clock, before - one.pulled, one.loss, one.count, before + 1, now) for one in pushed
        ]
        self._params, self._state, self._version, self._pending = params, state, before + 1, []


def signature(params: Any) -> list[list[Any]]:
    """The name, shape and dtype of every leaf, as they are sent: server and workers must agree on them."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [[name_of(path), list(x.shape), str(x.dtype)] for path, x in leaves]


def _differs(theirs: Any, ours: list[list[Any]]) -> str:
    match theirs:
        case [*leaves] if all(isinstance(leaf, list) and len(leaf) == 3 for leaf in leaves):
            for a, b in zip(leaves, ours, strict=False):
                if a != b:
                    return f"{a[0]} {a[2]}{a[1]} there, {b[0]} {b[2]}{b[1]} here"
            return f"{len(leaves)} leaves there, {len(ours)} here"
    return f"{reprlib.repr(theirs)} lists no leaves by name, shape and dtype"


def _whole(fields: Fields, name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value < 0:  # True is an int as well
        raise ValueError(f"{name}={reprlib.repr(value)} in a message; send a whole number from 0")
    return value


def _real(fields: Fields, name: str) -> float:
    value = fields.get(name)
    if type(value) not in (int, float) or not abs(value) <= np.finfo(np.float32).max:
        raise ValueError(f"{name}={reprlib.repr(value)} in a message; send a finite number of float32")
    return float(value)
