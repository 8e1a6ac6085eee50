"""Everything that a trainer accepts as data: positions, short batches, tuples, tensors, and batches read ahead."""

import itertools
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.data import Ahead, Rows
from jaxpar.data.streams import Fitting, training


def test_a_position_that_the_data_cannot_take_is_refused() -> None:
    says = r"position in its data is \{'at': 5\}, and a list takes none; resume with the"
    with pytest.raises(ValueError, match=says):
        training([1], 4, 0, state={"batches": 5, "data": {"at": 5}})


def test_grains_elastic_iterators_go_on_with_another_number_of_hosts() -> None:
    grain = pytest.importorskip("grain", reason="grain is not installed (jaxpar[images])")
    rows = grain.MapDataset.source(range(48)).shuffle(seed=3)

    def hosts(count: int, state: Any = None) -> list[Any]:
        shards = [grain.sharding.ShardOptions(i, count) for i in range(count)]
        return [training(grain.experimental.ElasticIterator(rows, 8, s), 8, 0, state=state) for s in shards]

    two_hosts = hosts(2)
    read = [row for _ in range(3) for host in two_hosts for row in next(host).tolist()]
    (state,) = {json.dumps(host.state()) for host in two_hosts}  # the same on every host
    four_hosts = hosts(4, json.loads(state))
    remaining = [row for _ in range(3) for host in four_hosts for row in next(host).tolist()]
    assert sorted(read + remaining) == list(range(48))


@pytest.mark.xdist_group("torch")
def test_tensors_of_other_libraries_become_arrays() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed (make hf)")
    data = torch.utils.data.TensorDataset(torch.arange(8.0).reshape(8, 1), torch.arange(8))
    x, y = next(training(torch.utils.data.DataLoader(data, batch_size=4), 4, 0))
    assert (type(x), type(y)) == (np.ndarray, np.ndarray)
    assert y.tolist() == [0, 1, 2, 3]
    x, y = next(training(Rows(data, last="pad", shuffle=False), 4, 0))
    assert (x[:, 0].tolist(), y.tolist()) == ([0, 1, 2, 3], [0, 1, 2, 3])


def test_short_batches_with_a_mask_are_filled_up() -> None:
    fit = Fitting()
    full = {"x": np.ones((8, 2)), "mask": np.ones(8)}
    short = {"x": np.arange(3.0), "mask": np.ones((3, 2), np.float32)}
    assert fit(full, 4) is full
    filled = fit({**short, "all": jp.Replicated(np.ones(5))}, 4)
    assert filled["x"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]  # as many rows as the first batch
    assert filled["mask"].tolist() == [[1, 1]] * 3 + [[0, 0]] * 5
    assert filled["all"].value.shape == (5,)
    assert Fitting()(short, 4)["x"].shape == (4,)
    assert fit({"x": np.ones(3)}, 4)["x"].shape == (3,)
    assert short["mask"].shape == (3, 2)


def model() -> jp.Model:
    def loss(params: Any, batch: Any, key: Any) -> Any:
        x, mask = (batch["x"], batch["mask"]) if isinstance(batch, dict) else (batch[0], np.ones(len(batch[0])))
        return jp.Mean((((x @ params["w"]) ** 2) * mask).sum(), mask.sum())

    return jp.Model(init=lambda key: {"w": jax.numpy.ones((4,))}, loss=loss)


def run(data: Any, strategy: str = "ddp", **options: Any) -> tuple[list[float], jp.Trainer]:
    """Train on data; return the loss of every step, and the trainer."""
    losses: list[float] = []
    hook = jp.Hook(on_step=lambda _, metrics: losses.append(metrics["loss"]))
    loop = jp.Loop(**{"steps": 3, "rows": 16, "quiet": True} | options)
    trainer = jp.Trainer(model(), optax.sgd(0.01), data, strategy, loop, hooks=[hook])
    trainer.run()
    return losses, trainer


def test_an_epoch_that_does_not_divide_trains_as_on_one_device() -> None:
    """21 rows are batches of 16 and 5 on 8 replicas; the trainer fills up a list's second batch."""
    x = np.random.default_rng(0).normal(size=(21, 4)).astype(np.float32)
    rows = Rows({"x": x}, shuffle=False)
    short = [{"x": x[:16], "mask": np.ones(16, np.float32)}, {"x": x[16:], "mask": np.ones(5, np.float32)}]
    expected, _ = run(short, "single")
    assert run(rows)[0] == pytest.approx(expected, rel=1e-5)
    losses, trainer = run(short)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert trainer.rows == 16
    trainer.held_out = rows
    held_out_loss = trainer.evaluate()["held_out_loss"]
    trainer.held_out = [(x[:16],)]
    assert trainer.evaluate()["held_out_loss"] != held_out_loss
    w = np.asarray(trainer.step.params(trainer.state)["w"])
    assert held_out_loss == pytest.approx(((x @ w) ** 2).mean(), rel=1e-5)
    says = r"batch has 5 rows; 8 replicas x 1 .*pad with jp.pad_rows\(batch, 8\), whose mask"
    with pytest.raises(ValueError, match=says):
        run([(x[:16],), (x[16:],)])


def test_rows_without_weight_count_nowhere_or_are_refused() -> None:
    """A loss that ignores the mask would train on the rows that fill up a batch."""
    x = np.ones((21, 4), np.float32)
    loss = lambda params, batch, key: ((batch["x"] @ params["w"]) ** 2).mean()
    maskless_model = jp.Model(init=lambda key: {"w": jax.numpy.ones((4,))}, loss=loss)
    short = [{"x": x[:5], "mask": np.ones(5, np.float32)}]
    for strategy, data in (("ddp", Rows({"x": x})), ("pipe=1,data=8", short)):
        trainer = jp.Trainer(maskless_model, optax.sgd(0.1), data, strategy, jp.Loop(steps=1, rows=16, quiet=True))
        with pytest.raises(ValueError, match=r"loss does not depend on batch\['mask'\]: return jp.Mean.* 'drop_last'"):
            trainer.run()
    jp.Trainer(maskless_model, optax.sgd(0.1), Rows({"x": x[:16]}), "ddp", jp.Loop(steps=1, rows=16, quiet=True)).run()


# -- read ahead --------------------------------------------------------------------------------------------------------


def wait_for(condition: Any) -> None:
    """Wait until a condition is true; fail after half an hour."""
    end = time.monotonic() + 1800
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    assert condition()


def test_a_bounded_number_of_batches_is_read_ahead_and_the_position_is_that_of_what_was_taken() -> None:
    read: list[int] = []

    def data(start: int) -> Iterator[Any]:
        for number in range(start, 9):
            read.append(number)
            yield {"x": np.full(4, number)}

    with Ahead(training(data, 4, 0), lambda batch: batch["x"] * 2, 3) as batches:
        wait_for(lambda: len(read) == 3)
        time.sleep(0.02)
        assert len(read) == 3  # the thread reads no further
        assert batches.state() == {"batches": 0}
        assert next(batches).tolist() == [0] * 4
        assert batches.state() == {"batches": 1}
        assert [next(batches)[0] for _ in range(8)] == [2 * i for i in range(1, 9)]
        for _ in range(2):
            with pytest.raises(ValueError, match="the data ended after 9 batches"):
                next(batches)
    wait_for(lambda: not batches._thread.is_alive())
    with pytest.raises(ValueError, match="count=0 batches cannot be read ahead"):
        Ahead([], lambda batch: batch, 0)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_what_the_data_raise_comes_where_the_batch_would_have_come(error: type[BaseException]) -> None:
    def data() -> Iterator[Any]:
        yield 1
        raise error("of the loader")

    with Ahead(data(), lambda batch: batch, 5) as batches:
        assert next(batches) == 1
        with pytest.raises(error, match="of the loader"):
            next(batches)
    with Ahead(itertools.count(), lambda batch: batch, 2) as batches:
        next(batches)
    wait_for(lambda: not batches._thread.is_alive())  # endless data do not keep it alive
    with pytest.raises(ValueError, match="these batches are closed"):
        next(batches)
    assert list(Ahead([1, 2], lambda batch: batch, 1)) == [1, 2]


def test_a_run_that_reads_ahead_is_the_same_and_leaves_no_thread() -> None:
    x = np.random.default_rng(1).normal(size=(21, 4)).astype(np.float32)
    earlier_threads = threading.enumerate()
    losses, _ = run(Rows({"x": x}), steps=4)
    prefetched_losses, trainer = run(Rows({"x": x}), steps=4, prefetch=2)
    assert prefetched_losses == losses
    assert trainer.position == {"batches": 4, "data": {"epoch": 2, "row": 0}}
    readers = lambda: {t for t in threading.enumerate() if t.name == "jaxpar-data"} - {*earlier_threads}
    wait_for(lambda: not readers())
    sent = trainer.step.send({"x": x[:16], "mask": np.ones(16)})
    assert trainer.step.place(sent)["x"] is sent["x"]  # it is already on the step's devices


def test_integers_that_32_bits_cannot_hold_are_named() -> None:
    """2**32 + 5 was once trained as 5."""
    step = jp.make_train_step(model(), optax.sgd(0.1), "ddp")
    state = step.init(jax.random.key(0))
    batch = {"x": np.ones((8, 4), np.int64), "mask": np.ones(8, np.float32)}
    loss = float(step.evaluate(state, batch)["loss"])
    assert loss == float(step.evaluate(state, {**batch, "x": np.ones((8, 4), np.int32)})["loss"])
    batch["x"][3, 1] = 2**32 + 5
    with pytest.raises(ValueError, match="batch leaf x holds 4294967301 in row 3, and as int32 would be 5; correct"):
        step.evaluate(state, batch)
    with pytest.raises(ValueError, match="batch leaf x holds 4294967301 in row 3"):
        step.send(batch)
