"""The asynchronous server: in step it is ddp, out of step it is bounded, and nobody waits for the dead."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from async_server import Server, Worker, wire
from async_server.clocks import Clocks, Lost
from flax import nnx

import jaxpar as jp

ROWS, STEPS = 4, 3


def model(width: int = 3) -> jp.Model:
    """With dropout, and a loss that counts what a mask leaves: rows weigh differently on each worker."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"w": jax.random.normal(key, (5, width)), "b": jnp.zeros(width)}

    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array], key: jax.Array | None) -> jp.Mean:
        x = batch["x"] if key is None else batch["x"] * jax.random.bernoulli(key, 0.5, batch["x"].shape)
        errors = ((x @ params["w"] + params["b"] - batch["y"][:, :1]) ** 2).sum(1)
        return jp.Mean((errors * batch["mask"]).sum(), batch["mask"].sum())

    return jp.Model(init=init, loss=loss)


def batch(step: int, workers: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    n = ROWS * workers
    x, y = (rng.normal(size=(n, width)).astype("float32") for width in (5, 2))
    return {"x": x, "y": y, "mask": (np.arange(n) % 3 > 0).astype("float32")}


def part(step: int, number: int, workers: int) -> dict[str, np.ndarray]:
    return {name: x[number * ROWS : (number + 1) * ROWS] for name, x in batch(step, workers).items()}


def served(workers: int = 1, staleness: int | None = 0, **options: Any) -> Server:
    made = options.pop("model", model())
    return Server(made, optax.sgd(0.1), jax.random.key(0), workers=workers, staleness=staleness, **options)


def waits_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 1800
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def work(address: str, number: int, workers: int, steps: int) -> None:
    with Worker(model(), address, number) as worker:
        for step in range(steps):
            worker.step(part(step, number, workers))


def test_in_step_it_is_data_parallelism() -> None:
    """staleness=0: the parameters of `ddp` and of one device, dropout and unequal counts of rows included."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    with Server(model(), optimizer, jax.random.key(0), workers=2, staleness=0) as server:
        with ThreadPoolExecutor() as pool:
            for job in [pool.submit(work, server.address, number, 2, STEPS) for number in range(2)]:
                job.result()
        assert server.wait(300)
        assert not server.lost
        params, log = server.params, server.log
    for strategy, devices in ("ddp", 2), ("single,microbatches=2", 1):  # the same blocks of rows
        step = jp.make_train_step(model(), optimizer, strategy, jax.devices()[:devices])
        state = step.init(jax.random.key(0))
        losses = []
        for i in range(STEPS):
            state, metrics = step(state, batch(i, 2))
            losses.append(float(metrics["loss"]))
        for name, wanted in step.params(state).items():
            np.testing.assert_allclose(params[name], wanted, rtol=1e-5, atol=1e-6, err_msg=strategy)
    means = [sum(p.loss for p in log if p.clock == i) / sum(p.count for p in log if p.clock == i) for i in range(STEPS)]
    assert means == pytest.approx(losses, rel=1e-5)
    assert {p.staleness for p in log} == {0}


def test_a_fast_worker_waits_at_the_bound() -> None:
    with (
        served(workers=2, staleness=1) as server,
        Worker(model(), server.address, 0) as fast,
        Worker(model(), server.address, 1) as slow,
    ):
        for step in range(2):  # it may begin a step at 1 ahead, and ends it at 2
            fast.step(part(step, 0, 2))
        with ThreadPoolExecutor() as pool:
            before = server._clocks.live[0].moved
            third = pool.submit(fast.step, part(2, 0, 2))
            waits_for(lambda: server._clocks.live[0].moved > before)  # it has asked, and is kept waiting
            with pytest.raises(TimeoutError):
                third.result(timeout=0.5)
            slow.step(part(0, 1, 2))
            assert third.result(timeout=1800).waited > 0.4
        pulled = slow._pull()
        slow.step(part(1, 1, 2))
        slow._pull = lambda: pulled  # type: ignore[method-assign]  # what it computes is of weights one update old
        slow.step(part(2, 1, 2))
        assert [one.worker for one in server.log[:4]] == [0, 0, 1, 0]
        assert [one.staleness for one in server.log] == [0, 0, 0, 0, 0, 1]


def test_without_a_bound_nobody_waits() -> None:
    with (
        served(workers=2, staleness=None) as server,
        Worker(model(), server.address, 0) as fast,
        Worker(model(), server.address, 1),
    ):
        for step in range(5):
            assert fast.step(part(step, 0, 2)).version == step  # and every gradient makes an update
        assert server.version == 5
        assert server._watch.is_alive()
    assert not server._watch.is_alive()


@pytest.mark.slow
def test_nobody_waits_for_the_dead() -> None:
    """A worker that joined and is never heard of again holds the others for the lease, and not for ever."""
    with served(workers=2, lease=20) as server:
        server._clocks._now = lambda: 0.0  # where compiling takes longer than a lease nobody is lost by that
        dead = Worker(model(), server.address, 1)
        dead._closed.set()  # as if killed: no sign of it from here on
        with ThreadPoolExecutor() as pool:
            living = pool.submit(work, server.address, 0, 2, 2)
            waits_for(lambda: server._pending)
            assert server.version == 0
            server._clocks.live[1].seen -= 21  # so much later
            living.result(timeout=1800)
        assert server.version == 2
        assert "no sign of it for 20 s" in server.lost[1]
        with pytest.raises(ConnectionError, match=r"worker 1: worker 1 was given up .* start it again"):
            dead.step(part(0, 1, 2))


def test_a_dead_server_ends_its_workers_with_a_sentence() -> None:
    with served(staleness=None) as server:
        worker = Worker(model(), server.address, 0)
        worker.step(part(0, 0, 1))
    with (
        pytest.raises(ConnectionError, match=r"worker 0: the server at 127.0.0.1:\d+ cannot be reached \(pull\); see"),
        worker,
    ):
        worker.step(part(1, 0, 1))
    with pytest.raises(ConnectionError, match=r"does not answer within 2.5 s|cannot be reached"):
        Worker(model(), server.address, 0, deadline=2.5)


def test_what_does_not_fit_is_refused() -> None:
    with served() as server:
        with pytest.raises(ValueError, match=r"w float32\[5, 4\] there, w float32\[5, 3\] here|b float32\[4\] there"):
            Worker(model(4), server.address, 0)
        with pytest.raises(ValueError, match="worker 3 of workers=1: number them 0 to 0"):
            Worker(model(), server.address, 3)
        with Worker(model(), server.address, 0) as worker:
            with pytest.raises(ValueError, match="takes part already"):
                Worker(model(), server.address, 0)
            about = {"version": 0, "loss": 1.0, "count": 1.0}
            with pytest.raises(ValueError, match=r"gradient of \w is float32\[1\]; send"):
                worker._server("push", worker._who | about, [np.zeros(1, "float32")] * 2)
            with pytest.raises(FloatingPointError, match=r"worker 0, step 0: loss nan.*not pushed"):
                worker.step(part(0, 0, 1) | {"x": np.full((ROWS, 5), np.nan, "float32")})
            none = part(0, 0, 1) | {"mask": np.zeros(ROWS, "float32")}
            with pytest.raises(
                ValueError, match=r"worker 0: count=0\.0: no row of this worker's batch counts, .*; give"
            ):
                worker.step(none)
            assert server.version == 0
            # The advice: rows whose weights add up to more than 0.
            assert worker.step(none | {"mask": np.eye(1, ROWS, dtype="float32")[0]}).version == 0
        with pytest.raises(OSError, match="cannot be bound"):
            served(address=server.address)


def test_no_field_of_a_message_changes_anything_before_all_are_checked() -> None:
    """A push whose version was text was applied, failed afterwards, and was applied again with every later push; with
    count=0 the parameters were not finite.
    """
    no_number = [None, "0", "x", True, [], {}, [0], 10**400, float("nan"), float("inf"), -float("inf")]
    no_whole = [*no_number, -1, 1.5]
    with (
        served(workers=2, staleness=1) as server,
        Worker(model(), server.address, 0) as worker,
    ):
        leaves = [np.ones(shape, dtype) for _, shape, dtype in server._signature]
        push = worker._who | {"version": 0, "loss": 1.5, "count": 2.0}
        calls = ("pull", "beat", "leave")
        wrong = [(call, {**push, who: x}) for call in calls for who in worker._who for x in no_whole]
        wrong += [("push", {**push, name: x}) for name in ("worker", "token", "version") for x in no_whole]
        wrong += [("push", {**push, name: x}) for name in ("loss", "count") for x in no_number]
        wrong += [("push", {**push, "count": x}) for x in (0, -1, 1e-40)]
        wrong += [("push", {**push, "version": 1})]
        wrong += [("push", {key: x for key, x in push.items() if key != name}) for name in push]
        wrong += [("join", {"worker": x, "signature": server._signature}) for x in [*no_whole, 0, 2]]
        wrong += [("join", {"worker": 1, "signature": x}) for x in [*no_whole, [[]], [[1, 2, 3]], "abc"]]
        before = jax.tree.map(np.asarray, server.params)
        for method, fields in wrong:
            with pytest.raises((ValueError, ConnectionError), match="worker 0: "):
                worker._server(method, fields, leaves if method == "push" else [])
            assert (server.version, server._pending, server.log) == (0, [], []), (method, fields)
            assert [one.clock for one in server._clocks.live.values()] == [0, 0], (method, fields)
        for bad in (np.nan, np.inf):
            with pytest.raises(ValueError, match=r"gradient of \w is not finite"):
                worker._server("push", push, [np.full_like(x, bad) for x in leaves])
        with pytest.raises(ValueError, match=r"gradient of \w, divided by count=1e-30, is more than float32 holds"):
            worker._server("push", push | {"count": 1e-30}, [np.full_like(x, 1e30) for x in leaves])
        jax.tree.map(np.testing.assert_array_equal, before, server.params)
        for _ in range(2):
            worker._server("push", push, leaves)
        with pytest.raises(ValueError, match="worker 0 pushes once more than it may; pull before each push"):
            worker._server("push", push, leaves)
        # The right pushes were applied once each: by SGD, 0.1 of a gradient of 1/2.
        assert [(one.worker, one.clock) for one in server.log] == [(0, 0), (0, 1)]
        for name, x in server.params.items():
            np.testing.assert_allclose(x, before[name] - 2 * 0.1 / 2, rtol=1e-5)


def test_mutable_state_is_refused() -> None:
    class Normed(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.norm = nnx.BatchNorm(5, rngs=rngs)

    normed = jp.from_nnx(lambda rngs: Normed(rngs), lambda module, batch: (module.norm(batch["x"]) ** 2).mean())
    with (
        served(model=normed) as server,
        Worker(normed, server.address, 0) as worker,
        pytest.raises(ValueError, match="the loss changes mutable state"),
    ):
        worker.step(part(0, 0, 1))


# -- the rule, without arrays and RPC ----------------------------------------------------------------------------------


def clocks(**more: Any) -> tuple[Clocks, list[float]]:
    now = [0.0]
    return Clocks(**{"workers": 3, "staleness": 1, "lease": 10, "patience": 60} | more, now=lambda: now[0]), now


def test_leases_and_patience() -> None:
    rule, now = clocks()
    tokens = [rule.join(number)[0] for number in (0, 1)]
    assert rule.pushed(0) == 0
    assert rule.may_start(0)  # one ahead
    assert rule.pushed(0) == 1
    assert not rule.may_start(0)  # two ahead, also of worker 2, which has not joined
    now[0] = 9
    rule.heard(0, tokens[0])
    now[0] = 11
    assert rule.expire() == {1: "no sign of it for 10 s, last at step 0"}
    assert not rule.may_start(0)
    for now[0] in range(12, 70):  # a worker that is kept waiting loses no patience, and one that never came is given up
        rule.heard(0, tokens[0])
        rule.may_start(0)
        if gone := rule.expire():
            assert gone == {2: "it has not joined in 60 s"}
    assert rule.may_start(0)
    with pytest.raises(Lost, match="worker 1 was given up"):
        rule.heard(1, tokens[1])
    again, clock = rule.join(1)
    assert clock == 2  # with the slowest
    assert again not in tokens
    for now[0] in range(70, 140):  # alive, and stuck
        rule.heard(1, again)
        rule.pushed(0)
        rule.heard(0, tokens[0])
        if gone := rule.expire():
            assert gone == {1: "no step in 60 s, last at step 2"}
            break
    else:
        raise AssertionError("worker 1 was never given up")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [({"workers": 0}, "workers=0"), ({"staleness": -1}, "staleness=-1"), ({"lease": 70}, "lease=70, patience=60")],
)
def test_arguments_that_cannot_be(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        clocks(**wrong)


# -- messages ----------------------------------------------------------------------------------------------------------


def test_messages_come_back_bit_by_bit() -> None:
    arrays = [np.float32([[1, np.nan], [np.inf, -0.0]]), np.zeros((0, 3), "int8"), np.asarray(jnp.bfloat16(1.5))]
    fields, back = wire.decode(wire.encode({"worker": 1, "x": [1.5, "a"]}, arrays))
    assert fields == {"worker": 1, "x": [1.5, "a"]}
    for a, b in zip(arrays, back, strict=True):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    with pytest.raises(ValueError, match="an array of object cannot be sent"):
        wire.encode({}, [np.array([object()])])


def messages() -> Iterator[bytes]:
    whole = wire.encode({"worker": 1}, [np.arange(5, dtype="float32")])
    yield from (whole[:n] for n in range(0, len(whole), 7))
    for at in range(0, len(whole), 3):
        yield whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
    yield b"\x80\x04\x95"  # a pickle
    array = '{"fields": {}, "arrays": [["%s", [%d]]]}'
    wrong = [array % about for about in (("float32", -1), ("object", 1), ("float32", 10**12))]
    for header in (b"{}", b"[]", b"\xff", b"[" * 100_000, *map(str.encode, wrong)):
        yield wire._MAGIC + wire._HEAD.pack(wire.zlib.crc32(header), len(header)) + header


def test_what_is_no_message_is_refused() -> None:
    for message in messages():
        with pytest.raises(ValueError, match="message"):
            wire.decode(message)
