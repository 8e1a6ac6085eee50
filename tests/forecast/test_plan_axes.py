"""Plans over context and expert: which sizes are tried, closed forms by hand, what is found where nothing else fits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from test_plan import ADAM, H100, MODEL, cpu_target, line_of

import jaxpar as jp
from jaxpar.forecast.plan.candidates import Splits, candidates, parts_per_row
from jaxpar.forecast.plan.estimates import Estimator
from jaxpar.forecast.plan.neighbours import families, neighbours
from jaxpar.forecast.plan.reasons import reason_to_skip
from jaxpar.models import named

LENGTH, HOST = 32, cpu_target(devices=4)
SLOW = dataclasses.replace(H100, link_bandwidth=1e6, link_efficiency=1.0, collective_latency=0.0)  # bytes alone


def estimator(name: str, rows: int, **changes: Any) -> Estimator:
    model = named(name, layers=2, **changes)
    return Estimator(model.model, ADAM, cpu_target(SLOW, devices=4), model.example(rows, LENGTH))


def test_candidates_split_experts_and_positions_as_far_as_they_go() -> None:
    strategies = list(candidates(HOST, 4, "bf16", Splits(expert=2, context=4)))
    assert len({str(s) for s in strategies}) == len(strategies)
    assert {s.expert for s in strategies} == {1, 2}
    assert {s.context for s in strategies} == {1, 2, 4}
    for strategy in strategies:
        shape = strategy.sizes(4)
        assert 4 % (shape["data"] * shape["fsdp"] * shape["expert"] * strategy.microbatches) == 0
        # On no axis that shards would "sharded" be plain replicas.
        assert strategy.fsdp == 1 or shape["fsdp"] * shape["expert"] * shape["context"] > 1
    assert jp.Strategy(fsdp=-1, context=4, precision="bf16") in strategies
    assert jp.Strategy(fsdp=2, expert=2, precision="bf16") in strategies
    assert list(candidates(HOST, 4, "bf16")) == [s for s in strategies if s.expert == s.context == 1]
    groups = families([(s, None) for s in strategies], HOST)
    assert len({tuple(s.sizes(4)[a] > 1 for a in ("expert", "context")) for (s, _), *_ in groups[:6]}) > 2


@pytest.mark.parametrize("name", ["fsdp=-1,context=4,attention=ring", "fsdp=2,expert=2", "fsdp=4"])
def test_neighbours_trade_these_axes(name: str) -> None:
    strategy = jp.Strategy.parse(f"{name},precision=bf16")
    splits = Splits(expert=4, context=4)
    around = list(neighbours(strategy, HOST, 16, splits))
    assert len({str(s) for s in around}) == len(around)
    for neighbour in around:
        shape = neighbour.sizes(4)
        assert neighbour.attention == "auto" or shape["context"] > 1
        assert neighbour.fsdp == 1 or shape["fsdp"] * shape["expert"] * shape["context"] > 1
        assert (neighbour.fsdp == 1) == (shape["fsdp"] == 1 and neighbour.zero == 3 and neighbour.fsdp != -1)
    assert {s.expert for s in around} | {s.context for s in around} >= {1, 2}
    assert not any(s.context > 1 or s.expert > 1 for s in neighbours(strategy, HOST, 16))


def test_around_a_mixtures_pipeline_forwards_run_beside_backwards() -> None:
    names = {}
    for axes in ("expert=2", "fsdp=2"):
        strategy = jp.Strategy.parse(f"pipe=2,{axes},microbatches=4,chunks=2,precision=bf16")
        names[axes] = {(s.schedule, s.chunks) for s in neighbours(strategy, HOST, 16, Splits(expert=4))}
    assert names["expert=2"] - names["fsdp=2"] == {("1f1b-overlap", 2)}


@pytest.mark.slow
def test_ways_of_attention_that_are_one_program_are_compiled_once() -> None:
    """Two ranks share all heads: asked for, `usp` is `ulysses`, which `auto` chooses; a ring is another program."""
    closed_forms = estimator("llama-tiny", rows=2)
    auto, usp, ring = (
        jp.Strategy.parse(f"data=2,context=2{mode}") for mode in ("", ",attention=usp", ",attention=ring")
    )
    line = line_of(str(auto), matmul=100.0, exposed=0.0)
    lines = [dataclasses.replace(line, estimate=closed_forms.estimate(auto))]
    assert usp in list(neighbours(auto, HOST, 4, Splits(context=2)))
    why = {mode: reason_to_skip(mode, closed_forms.estimate(mode), lines, 20, 16) for mode in (usp, ring)}
    assert why == {usp: f"the same as {auto} by closed forms: both compute attention in the same way", ring: None}


@pytest.mark.slow
def test_what_context_ranks_send_by_hand() -> None:
    """Keys and values of a layer gathered, and their gradients scattered; parameters and gradients in ZeRO beside."""
    closed_forms = estimator("llama-tiny", rows=2)
    config = named("llama-tiny").config
    split = closed_forms.estimate(jp.Strategy(context=4, attention="gather"))
    keys = 2 * LENGTH * config.kv_heads * config.head_dim * 4  # of a row and a layer, float32
    attention = 2 * 2 * 2 * keys * 3 / 4  # 2 rows, 2 layers, there and back
    sums = 2 * split.params * 3 / 4  # an all-reduce of gradients: fsdp=1 is plain replicas
    assert split.sent == pytest.approx((attention + sums) / 1e6, rel=0.01)
    sharded = closed_forms.estimate(jp.Strategy(fsdp=-1, context=4, attention="gather"))
    assert sharded.params == pytest.approx(split.params / 4, rel=0.01)


@pytest.mark.slow
def test_experts_are_not_priced_as_dense() -> None:
    """Memory of experts and of all else, tokens to their experts and back, and no gradient over `expert`."""
    closed_forms = estimator("mixtral-tiny", rows=4, capacity=1.25)
    config = named("mixtral-tiny", layers=2).config
    assert closed_forms.splits()[0] == Splits(expert=8, context=1)  # a capacity mixes the positions of a row
    plain, split = closed_forms.estimate(jp.Strategy(data=4)), closed_forms.estimate(jp.Strategy(expert=4))
    experts = 2 * config.experts * 3 * config.dim * config.ffn  # 2 layers: gate, up, down
    assert plain.params - split.params == 4 * experts * 3 // 4
    assert split.grads - split.params == plain.grads - plain.params
    slots = 10 * config.experts  # 1.25 x 32 tokens x 2 of 8
    tokens = 2 * 4 * slots * config.dim * 4 * 3 / 4  # 2 layers: dispatch, combine, and their backwards
    sums = 2 * (plain.params - 4 * experts) * 3 / 4  # of what is no expert
    assert split.sent == pytest.approx((tokens + sums) / 1e6, rel=0.01)
    assert plain.sent == pytest.approx(2 * plain.params * 3 / 4 / 1e6, rel=0.01)


@pytest.mark.slow
def test_sizes_that_are_not_traced_are_no_dearer_than_those_that_are() -> None:
    """A plan for a mixture traced its loss on every number of tensor, context and expert ranks: half of its time."""
    closed_forms = estimator("mixtral-tiny", rows=4, kv_heads=4)
    for name in ("expert=4", "expert=4,remat=layer", "tensor=4,sequence=true", "context=4,attention=gather"):
        strategy = jp.Strategy.parse(name)
        shared, exact = (closed_forms.estimate(strategy, exact=exact) for exact in (False, True))
        ratios = shared.seconds / exact.seconds, shared.bytes / exact.bytes
        assert all(0.7 < ratio <= 1 for ratio in ratios), (name, ratios)


def test_positions_are_split_no_further_than_devices_need() -> None:
    """A plan for 512 rows on 1,024 devices took closed forms of 1,024 parts of a row, for minutes."""
    assert [parts_per_row(n, rows) for n, rows in ((1024, 512), (1024, 1024), (8, 3), (8, 1))] == [2, 1, 4, 8]


@pytest.mark.slow
def test_a_loss_without_positions_says_so_where_they_would_be_split() -> None:
    batch = lambda rows: jax.ShapeDtypeStruct((rows, 24), jnp.float32)
    one_row, two_rows = (jp.plan(MODEL, batch(n), cpu_target(devices=2), ADAM, top=1, cache=False) for n in (1, 2))
    assert "context=2" in one_row.refused
    assert "context=2" not in two_rows.refused


@pytest.mark.battery
def test_a_long_row_is_split_and_its_program_sends_what_is_promised() -> None:
    model = named("llama-tiny", layers=1)
    options: Any = {"top": 3, "cache": False, "length": 128, "precision": "f32"}  # CPUs send bfloat16 as float32
    plan = jp.plan(model.model, model.example(1, 128), cpu_target(devices=2), ADAM, **options)
    assert any(line.strategy.context == 2 for line in plan.lines)
    for line in plan.lines:
        assert line.estimate is not None
        assert line.estimate.seconds <= line.seconds
        if line.strategy.context == 2:
            assert any(note.startswith("Attention over context is by") for note in line.prediction["notes"])
            large = [(promised, measured) for *_, promised, measured in line.sent if promised > 1e5]
            assert all(measured == pytest.approx(promised, rel=0.02) for promised, measured in large)
