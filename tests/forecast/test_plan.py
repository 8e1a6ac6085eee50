"""Plans: what is tried, what is refused, the order and its reasons, the command."""

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpar as jp
from jaxpar.backend.text import WIDTH
from jaxpar.forecast.plan import planner as planning
from jaxpar.forecast.plan.candidates import candidates
from jaxpar.forecast.plan.estimates import Estimator
from jaxpar.forecast.plan.line import Line, ranked
from jaxpar.forecast.plan.neighbours import families, neighbours
from jaxpar.forecast.plan.ranking import Plan
from jaxpar.forecast.plan.reasons import reason_to_skip
from jaxpar.hardware.devices import Target, target
from jaxpar.hardware.hardware import KINDS, RESERVE, Hardware
from jaxpar.hardware.links import Reach, collective_seconds
from jaxpar.inspect.predict.efficiency import PRODUCT_START
from jaxpar.models import named
from jaxpar.run.cli.commands import main
from jaxpar.strategy import SUMS

H100 = KINDS["H100"]
L, D, F, ROWS = 4, 24, 56, 48
BATCH = jax.ShapeDtypeStruct((ROWS, D), jnp.float32)
WEIGHTS = 2 * L * D * F
FLOPS = 6.0 * WEIGHTS * ROWS
ADAM = optax.adamw(1e-3)


def stack(gain: float = 1.0, rules: Any = None, width: int = D) -> jp.Model:
    """A stack of small feed-forward layers: quick to compile, and its numbers are sums by hand."""

    def init(key: jax.Array) -> Any:
        return {"up": jax.random.normal(key, (L, width, F)), "down": jax.random.normal(key, (L, F, width))}

    def loss(params: Any, batch: jax.Array, key: Any) -> jax.Array:
        def layer(x: jax.Array, weights: Any) -> Any:
            return x + gain * jnp.tanh(x @ weights["up"]) @ weights["down"], None

        return jnp.square(jax.lax.scan(layer, batch.astype(params["up"].dtype), params)[0]).mean()

    return jp.Model(init, loss, rules=rules)


MODEL = stack()


def cpu_target(hardware: Hardware = H100, devices: int = 8) -> Target:
    """CPU devices, which are compiled for, with another's numbers."""
    return dataclasses.replace(target(f"cpu:{devices}"), hardware=dataclasses.replace(hardware, device_kind="cpu"))


def a_plan(strategies: Any, cache: Any = False, **options: Any) -> Plan:
    devices = options.pop("target", cpu_target())
    return jp.plan(MODEL, BATCH, devices, ADAM, strategies=strategies, cache=cache, **options)


# -- candidates --------------------------------------------------------------------------------------------------------


def test_candidates_fill_the_devices_and_the_rows() -> None:
    strategies = list(candidates(cpu_target(), ROWS, "bf16"))
    assert len({str(s) for s in strategies}) == len(strategies)
    for strategy in strategies:
        shape = strategy.sizes(8)
        replicas = shape["data"] * shape["fsdp"]
        assert ROWS % (replicas * strategy.microbatches) == 0
        assert strategy.precision == "bf16"
        assert strategy.sequence == (strategy.tensor > 1)
        assert strategy.pipe == 1 or strategy.microbatches % strategy.pipe == 0
    axes = {(s.pipe, s.data, s.fsdp, s.tensor, s.zero) for s in strategies}
    assert {(1, 8, 1, 1, 3), *((1, 1, 8, 1, zero) for zero in (1, 2, 3)), (2, 1, 4, 1, 3), (1, 1, 1, 8, 3)} <= axes
    assert {s.remat for s in strategies} == {"none", "dots", "layer"}


def test_candidates_across_hosts_keep_tensor_inside_and_try_hsdp() -> None:
    strategies = list(candidates(dataclasses.replace(cpu_target(), hosts=2, per_host=4), 8, "bf16"))
    assert {s.tensor for s in strategies} == {1, 2, 4}
    assert any((s.data, s.fsdp) == (2, 4) for s in strategies)


def test_candidates_of_three_rows_on_eight_devices_split_no_row() -> None:
    strategies = list(candidates(cpu_target(), 3, "bf16"))
    assert strategies
    assert all(s.sizes(8)["data"] * s.sizes(8)["fsdp"] == 1 for s in strategies)


def test_what_is_frozen_has_no_gradient_in_closed_forms() -> None:
    """Half of the parameters frozen: bfloat16 alone, neither gradients nor optimizer, two passes of their three."""
    slow = cpu_target(dataclasses.replace(H100, peaks={"bf16": 1e9}, collective_latency=0.0))  # bytes alone
    only_up = lambda path: path == "up"
    trained, half_frozen = (
        Estimator(MODEL, ADAM, slow, BATCH, None, trainable).estimate(jp.Strategy(fsdp=8, precision="bf16"))
        for trainable in (None, only_up)
    )
    assert (half_frozen.params, half_frozen.grads) == (trained.params * 3 // 4, trained.grads // 2)
    assert abs(half_frozen.optimizer - trained.optimizer / 2) < 20  # counters
    assert half_frozen.compute == pytest.approx(trained.compute * 2.5 / 3)
    assert half_frozen.sent < trained.sent


def test_closed_forms_by_hand() -> None:
    """State as 4 + 8 bytes a parameter, sharded; activations and FLOPs per row, as rows and layers have them."""
    estimator = Estimator(MODEL, ADAM, cpu_target(), BATCH)
    replicated = estimator.estimate(jp.Strategy(data=8))
    assert replicated.params == 4 * WEIGHTS
    assert abs(replicated.optimizer - 8 * WEIGHTS) < 100  # counters
    sharded = estimator.estimate(jp.Strategy(fsdp=8))
    assert sharded.params == 4 * WEIGHTS // 8
    assert sharded.activations == replicated.activations
    remats = ("none", "dots", "layer")
    activations = [estimator.estimate(jp.Strategy(data=8, remat=remat)).activations for remat in remats]
    assert activations[0] >= activations[1] > activations[2]
    assert activations[2] >= L * (ROWS // 8) * D * 4  # each layer's input
    assert activations[2] < activations[1] - L * (ROWS // 8) * F * 4 + 8 * ROWS * D * 4  # but not its matmul
    pipelined = estimator.estimate(jp.Strategy(data=4, pipe=2, microbatches=2))
    assert pipelined.bubble == pytest.approx(1 / 3)  # p - 1 of m + p - 1
    recomputing = jp.Strategy(data=8, remat="layer")
    starts = 3 * 2 * L * PRODUCT_START  # longer than these few FLOPs
    assert replicated.compute == pytest.approx(starts)
    assert estimator.estimate(recomputing).compute == pytest.approx(starts * 4 / 3)
    accumulating = estimator.estimate(jp.Strategy(data=8, microbatches=2))
    assert H100.memory_bandwidth is not None
    sums = 2 * 4 * WEIGHTS / H100.memory_bandwidth  # of gradients
    assert accumulating.compute == pytest.approx(2 * (starts + sums))
    peak = 1e9
    slow = Estimator(MODEL, ADAM, cpu_target(dataclasses.replace(H100, peaks={"tf32": peak})), BATCH)
    assert slow.estimate(jp.Strategy(data=8)).compute == pytest.approx(FLOPS / 8 / peak)
    assert slow.estimate(recomputing).compute == pytest.approx(FLOPS / 8 / peak * 4 / 3)
    pipelined = slow.estimate(jp.Strategy(data=4, pipe=2, microbatches=2))
    assert pipelined.compute == pytest.approx(FLOPS / 8 / peak * 3 / 2, rel=1e-4)
    narrow = Estimator(MODEL, ADAM, cpu_target(dataclasses.replace(H100, memory_bandwidth=1e6)), BATCH)
    assert narrow.estimate(jp.Strategy(data=8)).compute == pytest.approx(2 * 4 * WEIGHTS / 1e6)  # weights read twice


def test_the_model_runs_once_for_all_values_of_remat() -> None:
    """ResNet-50's code ran for each value of `remat` and each size of `tensor`, 56 of 85 s of closed forms."""
    calls = []

    def loss(params: Any, batch: jax.Array, key: Any) -> jax.Array:
        calls.append(len(batch))
        return MODEL.loss(params, batch, key)

    estimator = Estimator(jp.Model(MODEL.init, loss), ADAM, cpu_target(), BATCH)
    for remat in ("none", "dots", "layer"):
        estimator.estimate(jp.Strategy(data=8, remat=remat))
    assert calls == [1, 2]  # rows


def test_stages_without_layers_are_refused_before_they_are_compiled() -> None:
    """Closed forms read the layers of a stack that only a pipeline's program marks, and counted 0 of them: Llama-2-13B
    had pipelines of 256 stages for its 40 layers, whose tables took most of the time.
    """
    with pytest.raises(ValueError, match=f"{L} layers leave half or more of 8 x 1 stages empty"):
        Estimator(MODEL, ADAM, cpu_target(), BATCH).estimate(jp.Strategy(pipe=8, microbatches=8))


def test_an_update_of_whole_matrices_is_priced() -> None:
    """Five iterations of Newton-Schulz on the 2 L matrices: one of each stack on each replica, which gather all, or one
    on each of 8 owners, there and back.
    """
    muon = optax.contrib.muon(1e-3, muon_weight_dimension_numbers=jp.matrices(MODEL, BATCH))
    peak, flops_per_matrix = 1e9, 5 * (4 * D * D * F + 2 * D**3)
    target = cpu_target(dataclasses.replace(H100, peaks={"tf32": peak}))
    for strategy, matrices, kind, buffer in (
        (jp.Strategy(data=8), 2, "all-gather", 8 * 4 * D * F),
        (jp.Strategy(fsdp=8), 1, "all-to-all", 4 * D * F),
    ):
        adam_estimate, muon_estimate = (Estimator(MODEL, tx, target, BATCH).estimate(strategy) for tx in (ADAM, muon))
        assert muon_estimate.compute - adam_estimate.compute == pytest.approx(matrices * flops_per_matrix / peak)
        exchange_seconds = 2 * collective_seconds(kind, buffer, Reach(8, 1, 8), target.hardware)[0]
        assert muon_estimate.sent - adam_estimate.sent == pytest.approx(exchange_seconds)


@pytest.mark.parametrize(
    "name", ["data=8", "fsdp=8", "data=2,fsdp=4,zero=1", "pipe=2,fsdp=2,tensor=2,sequence=true,microbatches=4,chunks=2"]
)
def test_neighbours_differ_in_one_choice_and_what_follows_from_it(name: str) -> None:
    strategy = jp.Strategy.parse(f"{name},precision=bf16")
    around = list(neighbours(strategy, cpu_target(), ROWS))
    assert len({str(s) for s in around}) == len(around)
    assert strategy not in around
    for neighbour in around:
        shape = neighbour.sizes(8)
        assert ROWS % (shape["data"] * shape["fsdp"] * neighbour.microbatches) == 0
        assert neighbour.sequence == (neighbour.tensor > 1)
        assert neighbour.chunks == 1 or neighbour.microbatches % neighbour.pipe == 0
        if all(getattr(neighbour, name) == getattr(strategy, name) for name in ("microbatches", "chunks", "data")):
            assert strategy in neighbours(neighbour, cpu_target(), ROWS)  # and so is the way back
    assert {"none", "dots", "layer"} - {strategy.remat} <= {s.remat for s in around}
    assert any(s.reduce == "compute" for s in around)
    assert any(s.microbatches == 2 * strategy.microbatches for s in around)
    assert len(families([(s, None) for s in around], cpu_target())) > 2


def test_more_and_more_microbatches_run_side_by_side() -> None:
    """Four were never tried, and were 1.2 times as fast as two for a 70B on 40 hosts."""
    for concurrent, expected in ((1, {(2, 4)}), (2, {(1, 4), (4, 4)}), (4, {(2, 4), (8, 8), (1, 2)})):
        strategy = jp.Strategy.parse(f"data=2,tensor=4,microbatches=4,concurrent={concurrent}")
        around = [s for s in neighbours(strategy, cpu_target(), 64) if s.tensor == 4 and s.pipe == 1]
        assert {(s.concurrent, s.microbatches) for s in around if s.concurrent != concurrent} == expected


def test_what_waits_on_the_host() -> None:
    """Its closed forms: as much less on the device, both ways over the host's link. Around it, every sum of what there
    is to offload, and of what recomputes a budget; in a pipeline no activations, which its slots keep.
    """
    model, batch = stack(width=512), jax.ShapeDtypeStruct((ROWS, 512), jnp.float32)
    estimator = Estimator(model, ADAM, cpu_target(), batch)
    on_device, on_host = (estimator.estimate(jp.Strategy(fsdp=8, offload=offload)) for offload in ("none", "optimizer"))
    moved = on_device.optimizer - on_host.optimizer
    assert moved == 2 * 2 * L * 512 * F * 4 // 8
    assert on_host.seconds - on_device.seconds == pytest.approx(2 * moved / (H100.host_bandwidth or 0))
    params_on_host = estimator.estimate(jp.Strategy(fsdp=8, offload="optimizer+params"))
    assert on_host.params - params_on_host.params == moved // 2
    # Layers come beside compute.
    assert params_on_host.seconds - on_host.seconds == pytest.approx(moved / (H100.host_bandwidth or 0))
    auto = estimator.estimate(jp.Strategy(fsdp=8, remat="auto", budget="1GB"))
    assert auto.seconds == on_device.seconds
    assert auto.activations < on_device.activations

    around = list(neighbours(jp.Strategy(fsdp=8, remat="layer", offload="optimizer"), cpu_target(), ROWS))
    assert {s.offload for s in around if s.pipe == 1} == {"none", *SUMS}
    assert not any("params" in s.offload for s in around if s.zero < 3)
    assert {s.budget for s in around} == {"", f"{(1 - RESERVE) * (H100.memory_bytes or 0) // 1e6:.0f}MB"}
    around_all_terms = neighbours(jp.Strategy(fsdp=8, remat="layer", offload=SUMS[-1]), cpu_target(), ROWS)
    assert {s.offload for s in around_all_terms if s.pipe > 1} == {"optimizer"}


def test_gathers_in_fp8_are_tried_where_products_round_so_in_any_case() -> None:
    strategy = jp.Strategy.parse("fsdp=8,precision=fp8")
    fp8_gather = dataclasses.replace(strategy, gather="fp8")
    assert fp8_gather in neighbours(strategy, cpu_target(), ROWS)
    around = list(neighbours(fp8_gather, cpu_target(), ROWS))
    assert strategy in around
    assert {s.gather for s in around if s.zero != 3 or s.fsdp == 1} == {"compute"}
    assert {s.gather for s in neighbours(jp.Strategy.parse("fsdp=8,precision=bf16"), cpu_target(), ROWS)} == {"compute"}


def test_fp8_is_not_planned_as_bf16_where_nothing_multiplies_it() -> None:
    ampere = dataclasses.replace(cpu_target(), hardware=KINDS["A100-80GB"])
    message = r"precision='fp8' for target='.*': no peak of FP8 products is known for A100-80GB; use precision='bf16'"
    for options in ({"precision": "fp8"}, {"strategies": ["fsdp=8,precision=fp8"]}):
        with pytest.raises(ValueError, match=message):
            jp.plan(MODEL, BATCH, ampere, **options)


def test_a_second_shard_is_tried_where_shards_leave_the_host() -> None:
    """Around ZeRO-3 over all devices or within hosts, with the way back; its closed forms by hand."""
    hosts = dataclasses.replace(cpu_target(), hosts=2, per_host=4)
    over_all_hosts, within_hosts = (jp.Strategy.parse(f"{axes},precision=bf16") for axes in ("fsdp=8", "data=2,fsdp=4"))
    with_hpz = dataclasses.replace(within_hosts, hpz=True)
    around = {name: list(neighbours(name, hosts, ROWS)) for name in (over_all_hosts, within_hosts, with_hpz)}
    assert with_hpz in around[over_all_hosts]
    assert with_hpz in around[within_hosts]
    assert {within_hosts, dataclasses.replace(over_all_hosts, data=1)} <= {*around[with_hpz]}
    assert any(s.hpz and s.microbatches == 2 for s in around[with_hpz])
    hpz_strategies = [s for s in itertools.chain(*around.values()) if s.hpz]
    assert all(s.zero == 3 and s.fsdp > 1 and s.data > 1 for s in hpz_strategies)
    assert not any(s.hpz for s in neighbours(over_all_hosts, cpu_target(), ROWS))  # one host
    assert not any(s.hpz for s in neighbours(dataclasses.replace(over_all_hosts, zero=2), hosts, ROWS) if s.zero != 3)

    slow = dataclasses.replace(hosts, hardware=dataclasses.replace(H100, peaks={"bf16": 1e15}))
    model, batch = stack(width=512), jax.ShapeDtypeStruct((ROWS, 512), jnp.float32)
    estimator = Estimator(model, ADAM, slow, batch)
    over_all, shared, hpz = map(estimator.estimate, (over_all_hosts, within_hosts, with_hpz))
    assert (hpz.params, hpz.optimizer) == (over_all.params, over_all.optimizer) != (shared.params, shared.optimizer)
    weights = 2 * L * 512 * F
    assert hpz.activations - shared.activations == 2 * weights // 4  # in bfloat16, while the step runs
    seconds = lambda kind, size: collective_seconds(kind, size, Reach(2, 2, 1), slow.hardware)[0]
    hpz_seconds = seconds("all-gather", 2 * weights // 4) + seconds("reduce-scatter", 4 * weights // 4)
    assert hpz.sent - shared.sent == pytest.approx(hpz_seconds - seconds("all-reduce", 4 * weights // 4))


@pytest.mark.slow
@pytest.mark.cuda_compiler
def test_a_plan_says_what_a_slower_host_costs() -> None:
    """At half its bandwidth; and it refuses what its memory has no room for."""
    model, batch = stack(width=512), jax.ShapeDtypeStruct((ROWS, 512), jnp.float32)
    options: Any = {"strategies": ["fsdp=2,offload=optimizer"], "cache": False}
    two_gpus = target("2xH100")
    (line,) = jp.plan(model, batch, two_gpus, ADAM, **options).lines
    assert line.costs()["exposed copies to and from the host"] > 0
    assert any("With 24 GB/s each way to the host instead of 48" in note for note in line.prediction["notes"])
    small = dataclasses.replace(two_gpus, hardware=dataclasses.replace(two_gpus.hardware, host_memory_bytes=8 << 10))
    with pytest.raises(ValueError, match="on the host for each device, and the host has room for"):
        jp.plan(model, batch, small, ADAM, **options)


def test_families_take_turns() -> None:
    names = "data=8 data=8,remat=dots fsdp=8 pipe=2,fsdp=4 pipe=2,data=4 tensor=2,fsdp=4 fsdp=8,zero=1".split()
    groups = families([(jp.Strategy.parse(name), None) for name in names], cpu_target())
    assert [[str(s) for s, _ in members] for members in groups] == [
        ["data=8", "data=8,remat=dots"], ["fsdp=4,pipe=2"], ["fsdp=4,tensor=2"], ["fsdp=8"], ["data=4,pipe=2"],
        ["fsdp=8,zero=1"],
    ]  # fmt: skip


@pytest.mark.slow
def test_remat_without_a_stack_is_refused_with_the_steps_own_words() -> None:
    mlp = jp.Model(
        init=lambda key: {"w": jax.random.normal(key, (5, 7))},
        loss=lambda params, batch, key: jnp.square(batch @ params["w"]).mean(),
    )
    batch = jax.ShapeDtypeStruct((8, 5), jnp.float32)
    plan = jp.plan(mlp, batch, cpu_target(), optax.sgd(0.1), top=2, cache=False)
    assert any("remat='layer' applies to the layers of a layer stack" in why for why in plan.refused.values())
    assert all("tensor" in name or "remat" in name or "pipe" in name for name in plan.refused)
    assert len(plan.lines) == 2
    assert plan.best.remat == "none"


# -- lines -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_order_is_by_predicted_time_and_the_numbers_are_the_programs(tmp_path: Path) -> None:
    names = ["ddp,precision=bf16", "fsdp=8,precision=bf16,remat=layer", "tensor=3,precision=bf16,data=2"]
    plan = a_plan(names, flops=FLOPS)
    assert [line.seconds for line in plan.lines] == sorted(line.seconds for line in plan.lines)
    assert plan.best == plan.lines[0].strategy
    assert plan.lines[0].why == ""
    assert plan.lines[1].why
    assert list(plan.refused) == ["data=2,tensor=3,precision=bf16"]
    assert "needs 6 devices and there are 8" in plan.refused["data=2,tensor=3,precision=bf16"]
    for line in plan.lines:
        step = jp.make_train_step(MODEL, ADAM, line.strategy, mesh=cpu_target().devices)
        assert {k: line.memory[k] for k in ("params", "grads", "optimizer")} == step.layout.bytes
        assert sum(line.costs().values()) == pytest.approx(line.seconds)
        assert sum(line.links.values()) == pytest.approx(sum(got for *_, got in line.sent))
        assert set(line.links) == {"link"}
    remat = next(line for line in plan.lines if line.strategy.remat == "layer")
    assert remat.costs()["recomputation"] > 0
    json.dumps(plan.json())


@pytest.fixture(scope="module")
def plan_of_one() -> Plan:
    return a_plan(["fsdp=8,precision=bf16"], flops=FLOPS)


def test_text_is_80_wide_and_explain_names_every_number(plan_of_one: Plan) -> None:
    plan = plan_of_one
    assert all(len(row) <= WIDTH for row in str(plan).splitlines()), str(plan)
    text = plan.explain(1)
    assert all(len(row) <= WIDTH for row in text.splitlines()), text
    for number in re.findall(r"^ 1 +([\d.]+) +([\d.,]+) +([\d.,]+)", str(plan), re.MULTILINE)[0][1:]:
        assert number in text
    assert all(words in text for words in ("all-gather over fsdp", "ratio", "matmul"))
    with pytest.raises(ValueError, match="lines 1 to 1"):
        plan.explain(2)


def test_the_answer_is_the_first_sentence(plan_of_one: Plan) -> None:
    (line,) = plan_of_one.lines
    prediction = line.prediction | {"rows_per_second": 100.0, "mfu": 0.451, "seconds": 1.0}
    memory = line.memory | {"total": 53_100_000_000}
    line = dataclasses.replace(line, prediction=prediction, memory=memory, usable=60_000_000_000)
    plan = dataclasses.replace(SHOWN, lines=(line,), memory=85_000_000_000, length=1000)
    sentence = "fits: yes, 53 of 85 GB; 45% MFU; 115.7 days for 1T tokens: fsdp=8,precision=bf16"
    assert str(plan).splitlines()[0] == sentence
    without_length = dataclasses.replace(plan, length=None)
    assert str(without_length).startswith("fits: yes, 53 of 85 GB; 45% MFU; 115.7 days for 1B rows: ")
    priced = dataclasses.replace(plan, tokens=300e9, price=2.5)
    hours = 300e9 / 100_000 * 8 / 3600
    cost = f"34.7 days for 300B tokens; {hours:,.0f} device hours at 2.5 are {2.5 * hours:,.0f}: fsdp=8"
    assert cost in " ".join(str(priced).split())
    bf16_sums = dataclasses.replace(line, strategy=jp.Strategy(fsdp=8, precision="bf16", reduce="compute"))
    text = str(dataclasses.replace(plan, lines=(bf16_sums, line)))
    assert "(gradients summed in bf16; in f32, line 2, 0.0% slower, within the error)" in " ".join(text.split())
    too_large = dataclasses.replace(plan, lines=(dataclasses.replace(line, usable=1),))
    assert str(too_large).startswith("fits: no; the smallest program takes 53 of 85 GB: fsdp=8")
    assert str(dataclasses.replace(plan, lines=(), interrupted=True)).startswith("nothing was compiled")


@pytest.mark.slow
def test_what_does_not_fit_is_last_and_says_by_how_much() -> None:
    names = ["ddp", "fsdp=8,remat=layer"]
    totals = {str(line.strategy): line.memory["total"] for line in a_plan(names).lines}
    between = sum(totals.values()) // 2
    small = dataclasses.replace(H100, memory_bytes=int(between / (1 - RESERVE)))
    plan = a_plan(names, target=cpu_target(small))
    assert str(plan.best) == "fsdp=8,remat=layer"
    loser = plan.lines[-1]
    assert not loser.fits
    assert loser.why.startswith("does not fit")
    assert "too much" in loser.why
    with pytest.raises(ValueError, match="no compiled strategy fits"):
        _ = dataclasses.replace(plan, lines=(loser,)).best


def test_arguments_that_leave_nothing_to_plan_say_why() -> None:
    with pytest.raises(ValueError, match=r"no strategy is valid.*needs 3 devices"):
        a_plan(["data=3"])
    with pytest.raises(ValueError, match="several programs"):
        a_plan(["dp"])  # a central server
    with pytest.raises(ValueError, match="strategies='fsdp' is one strategy; give a list"):
        a_plan("fsdp")
    with pytest.raises(ValueError, match="target is a int; use a text such as '8xH100'"):
        a_plan(None, target=8)
    with pytest.raises(ValueError, match="a row dim"):
        jp.plan(MODEL, 3, cpu_target(), cache=False)


def line_of(name: str, **seconds: float) -> Line:
    matmul = seconds["matmul"]
    prediction = {"seconds": sum(seconds.values()), "compute": matmul, "flops": 100, "model_flops": None}
    prediction |= {"by_kind": {"matmul": matmul}, "chunked": False}
    memory, exposed = {"total": 10, "arguments": 5}, {"fsdp": seconds["exposed"]}
    return Line(jp.Strategy.parse(name), None, 20, memory, prediction, [], {}, exposed, [], 0.0, 0.0)


def faked(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> list[jp.Strategy]:
    """Replace compiling by `outcome(strategy)`: seconds, bytes, and whether logits are in chunks.

    Returns:
      The list of strategies that were compiled, which grows.
    """
    compiled: list[jp.Strategy] = []

    def line_fields(self: Any, strategy: jp.Strategy) -> Any:
        compiled.append(strategy)
        seconds, total, chunked = outcome(strategy)
        line = vars(line_of("ddp", matmul=seconds, exposed=0.0))
        names = ("memory", "prediction", "kernels", "links", "exposed", "sent", "bubble", "compile_seconds")
        fields = {name: line[name] for name in names} | {"memory": {"total": total, "arguments": 5}}
        return fields | {"prediction": {**fields["prediction"], "chunked": chunked}}

    monkeypatch.setattr(planning.Planner, "_line_fields", line_fields)
    return compiled


def test_nothing_that_keeps_more_is_compiled_after_what_does_not_fit() -> None:
    estimator = Estimator(MODEL, ADAM, cpu_target(), BATCH)
    line = line_of("fsdp=8,remat=dots", matmul=1.0, exposed=0.0)
    lines = [dataclasses.replace(line, memory={"total": 21, "arguments": 5})]
    keeps_less = "does not fit: fsdp=8,remat=dots, which saves fewer activations, needs 21 B"
    for name, why in (("fsdp=8", keeps_less), ("fsdp=8,remat=layer", None), ("fsdp=8,zero=1", None)):
        strategy = jp.Strategy.parse(name)
        assert reason_to_skip(strategy, estimator.estimate(strategy), lines, 20, 16) == why


SHOWN = Plan(
    "8xH100", "8 x H100", 100, 8, None,
    ranked([line_of("fsdp=8", matmul=1.0, exposed=0.5), line_of("data=8", matmul=1.0, exposed=0.1)]), {}, {}, False,
)  # fmt: skip


def test_the_reason_names_what_costs_more() -> None:
    first, second = SHOWN.lines
    assert first.strategy.data == 8
    assert second.why == "36.4% slower: +400 ms exposed collectives over fsdp"


def test_a_program_without_matmuls_has_no_mfu() -> None:
    """One row a device is multiplied without a matrix product by some compilers; the peak is then none."""
    model = jp.Model(lambda key: jnp.ones(5), lambda params, batch, key: jnp.square(batch * params).mean())
    batch = jax.ShapeDtypeStruct((8, 5), jnp.float32)
    plan = jp.plan(model, batch, cpu_target(), flops=1.0, strategies=["ddp"], cache=False)
    assert plan.lines[0].prediction["mfu"] is None
    assert " - " in str(plan)
    plan.explain(1)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--batch", "0"], "--batch 0 is too small; use a whole number from 1"),
        (["--seq", "9000"], "length=9000 is beyond the context of llama3-8b, which is 8192"),
        (["--target", "8xH1000", "--seq", "9000"], "did you mean H100"),  # of the two mistakes it said the other
        (["--model", "lama3-8b"], "did you mean 'llama3-8b'?"),
        (["--strategy", "fsdp", "--strategy", "fsd"], "did you mean 'fsdp'?"),
    ],
)
def test_mistakes_are_named(words: list[str], says: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *words])
    assert exit_.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("changes", "code"), [({}, None), ({"usable": 1}, 1), ({"interrupted": True}, 130)])
def test_what_the_command_says_and_exits_with(
    changes: dict[str, Any], code: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def planned(*args: Any, strategies: Any, **options: Any) -> Plan:
        assert strategies == ["fsdp", "ddp"]
        optimizer = "GradientTransformationExtraArgs" if code is None else "NoneType"
        assert [type(x).__name__ for x in args[3:]] == [optimizer]
        lines = [dataclasses.replace(line, usable=changes.get("usable", line.usable)) for line in SHOWN.lines]
        return dataclasses.replace(SHOWN, lines=ranked(lines), interrupted=changes.get("interrupted", False))

    monkeypatch.setattr("jaxpar.run.cli.plan.plan", planned)
    words = ["plan", "--strategy", "fsdp", "--strategy", "ddp", "--json"]
    if code is None:
        main([*words, "--optimizer", "muon"])
    else:
        with pytest.raises(SystemExit) as exit_:
            main(words)
        assert exit_.value.code == code
    assert [line["fits"] for line in json.loads(capsys.readouterr().out)["lines"]] == ["usable" not in changes] * 2


@pytest.mark.battery
@pytest.mark.cuda_compiler
def test_405b_on_16384_gpus() -> None:
    model, strategy = named("llama3-405b"), "tensor=8,pipe=16,data=128,microbatches=16,sequence=true,remat=layer"
    plan = jp.plan(
        model.model, model.example(2048, 8192), "2048x8xH100", strategies=[f"{strategy},precision=bf16"], cache=False
    )
    (line,) = plan.lines
    assert line.fits
    assert set(line.links) == {"link", "network"}
    assert all(got == pytest.approx(want, rel=0.01) for *_, want, got in line.sent if want > 1e6)


@pytest.mark.parametrize(
    ("name", "why"),
    [(name, "programs compiled for TPUs") for name in ("v5p:2x2x1", "v5p", "8xv5p")]
    + [("cpu:8", "CPU devices have no peaks")],
)
def test_targets_are_refused_before_their_compiler_is_missed(name: str, why: str) -> None:
    """TPUs asked for a compiler of 300 MB first, and were refused then."""
    with pytest.raises(ValueError, match=f"target='{name}': {why}.*such as '8xH100'"):
        jp.plan(MODEL, BATCH, name)
