"""A step's predicted F, I, W and messages, and the best table for them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.inspect.predict import Part, Prediction, predict
from jaxpar.inspect.predict.slots import best_schedule, op_costs, searched
from jaxpar.models import llama
from jaxpar.parallel.pipeline.schedules import OpCosts, Schedule
from jaxpar.targets import target

MODEL = jp.from_nnx(lambda rngs: llama.Llama(llama.Config(32, 16, 4, 2, 2, 32), rngs=rngs), llama.loss)


def step_of(schedule: str, devices: list[jax.Device]) -> Any:
    return jp.make_train_step(MODEL, optax.sgd(0.1), f"pipe=2,microbatches=8,schedule={schedule}", mesh=devices)


def prediction(*parts: Part) -> Prediction:
    return Prediction(1.0, (1.0, 1.0), 1.0, 0.0, 0.0, 0.0, 0, None, 0.0, 8, 2, "H100", parts, ())


def test_times_are_read_by_operation() -> None:
    step = step_of("zb-h1", jax.devices()[:2])
    assert step.schedule is not None
    place = "jit(_train)/shard_map/while/body/closed_call/slot_{}/runs_8_paces_2_of_26/while/body/dot_general"
    matmuls = [
        Part(kind, place.format(kind), "matmul", "", 8, 8 * t) for kind, t in (("F", 2.0), ("I", 2.0), ("W", 1.0))
    ]
    # Of a collective in an operation what is exposed counts; of the head nothing.
    sums = Part("ar", place.format("F"), "all-reduce", "", 8, 8.0, exposed=4.0, axes=("tensor",), way="link")
    head = Part("head", place.format("leaves"), "matmul", "", 8, 80.0)
    ways = [
        Part(f"cp{i}", "jit/ppermute", "collective-permute", "", 26, 2.6, axes=("pipe",), way="link") for i in (0, 1)
    ]
    found = prediction(*matmuls, sums, head, *ways)
    costs = op_costs(found, step)
    assert costs == pytest.approx(OpCosts(2.5, 2.0, 1.0, 5.2 / step.schedule.ticks))
    times = []
    for limit in (1, 2, 4):
        schedule, same = best_schedule(found, step, limit)
        assert same == costs
        assert max(schedule.in_flight(rank) for rank in range(2)) <= limit * schedule.chunks
        times.append(schedule.timed(costs.times(schedule.chunks), costs.message)[0])
    assert times == sorted(times, reverse=True)
    assert times[-1] <= Schedule("zb-h1", 2, 8).timed(costs.times(), costs.message)[0]
    # What a plan tries: tables that a strategy names, for p activations and 2 p.
    tables = searched(found, step)
    assert {table.kind.rpartition(":")[2] for table in tables} <= {"2", "4"}
    for table in tables:
        named = jp.Strategy.parse(f"pipe=2,microbatches=8,schedule={table.kind},chunks={table.chunks}")
        assert Schedule.of(named.schedule, 2, 8, named.chunks).table() == table.table()
    assert searched(found, step_of(tables[0].kind, jax.devices()[:2])) == []  # not of what was searched for
    assert searched(found, step_of("1f1b", jax.devices()[:2])) == []


def test_schedules_without_halves_are_refused() -> None:
    with pytest.raises(ValueError, match='compile and predict the step with schedule="zb-h1"'):
        op_costs(prediction(), step_of("1f1b", jax.devices()[:2]))


@pytest.mark.battery
@pytest.mark.cuda_compiler
def test_programs_say_what_belongs_to_which_operation() -> None:
    there = target("2xH100")
    step = step_of("zb-h1", there.devices)
    batch = {"tokens": np.zeros((8, 9), "int32")}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.int32), batch)
    costs = op_costs(predict(step.compile(abstract), step, abstract, there.hardware), step)
    assert min(costs.forward, costs.inputs, costs.weights, costs.message) > 0


@pytest.mark.battery
@pytest.mark.cuda_compiler
def test_what_is_found_for_predicted_times_trains() -> None:
    """Four ranks: a step predicted for H100s, the best table for its times, and training by it, here."""
    batch = {"tokens": np.random.default_rng(0).integers(32, size=(8, 9)).astype("int32")}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.int32), batch)
    there = target("4xH100")
    step = jp.make_train_step(MODEL, optax.sgd(0.1), "pipe=4,microbatches=8,schedule=zb-h1", mesh=there.devices)
    found = predict(step.compile(abstract), step, abstract, there.hardware)
    for limit, chunks in ((3, 1), (4, 1)):
        schedule, _ = best_schedule(found, step, limit, (chunks,))
        strategy = jp.Strategy(pipe=4, microbatches=8, schedule=schedule, chunks=schedule.chunks)
        report = jp.verify(MODEL, strategy, batch, mesh=jax.devices()[:4])
        assert report.ok, report
    plan = jp.plan(MODEL, abstract, there, optax.sgd(0.1), strategies=[step.strategy], cache=False)
    assert plan.lines[0].prediction["tables"] == [[one.kind, one.chunks] for one in searched(found, step)] != []
