"""The search of a plan, its cache, Ctrl-C."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from test_plan import ADAM, BATCH, H100, MODEL, ROWS, D, a_plan, cpu_target, faked, line_of, stack

import jaxpar as jp
from jaxpar.forecast.plan import cache as plan_cache
from jaxpar.forecast.plan import planner as planning
from jaxpar.forecast.plan.candidates import candidates
from jaxpar.forecast.plan.estimates import Estimator
from jaxpar.forecast.plan.neighbours import neighbours
from jaxpar.forecast.plan.reasons import reason_to_skip
from jaxpar.hardware.devices import Target
from jaxpar.hardware.hardware import KINDS, RESERVE
from jaxpar.make import TrainStep

FOUR = cpu_target(devices=4)


@pytest.mark.slow
def test_search_compiles_the_best_few_and_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = a_plan(None, cache=tmp_path, top=2, target=FOUR)
    assert len(plan.lines) == 2
    assert not any(line.cached for line in plan.lines)
    reported = {*plan.pruned, *plan.refused, *(str(line.strategy) for line in plan.lines)}
    assert {str(strategy) for strategy in candidates(FOUR, ROWS, "bf16")} <= reported
    assert all(line.estimate and line.estimate.seconds <= line.seconds for line in plan.lines)
    monkeypatch.setattr(planning, "make_train_step", None)  # nothing is built or estimated again
    monkeypatch.setattr(Estimator, "estimate", None)
    cached_plan = a_plan(None, cache=tmp_path, top=2, target=FOUR)
    assert all(line.cached for line in cached_plan.lines)
    for line, cached_line in zip(plan.lines, cached_plan.lines, strict=True):
        assert cached_line.json() | {"cached": 0} == line.json() | {"cached": 0}
    assert (cached_plan.pruned, cached_plan.refused) == (plan.pruned, plan.refused)


@pytest.mark.slow
def test_search_goes_on_around_the_best_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best is two choices away from whatever closed forms put first, and outside of their candidates. Others are
    likely to be no faster by closed forms: `top` programs were compiled, most of them in vain.
    """
    best = jp.Strategy.parse("fsdp=8,reduce=compute,logits=whole,precision=bf16")
    slower = lambda s: (s.reduce != "compute") + (s.logits != "whole")
    faked(monkeypatch, lambda s: (1.0 + slower(s), 10, s.logits == "auto"))
    plan = a_plan(None, top=48)
    assert plan.best == best
    assert best not in candidates(cpu_target(), ROWS, "bf16")
    assert len(plan.lines) <= 6
    assert any("likely, by closed forms and the program of" in why for why in plan.pruned.values())


def test_search_ends_if_two_programs_are_slower_than_closed_forms_promise() -> None:
    """ResNet-50 on 8 H100: whatever sends less than `fsdp=8` was to be faster, and was not."""
    planner, best = planner_of_one_line("fsdp=8,precision=bf16")
    candidate = dataclasses.replace(best, zero=2)
    estimate = planner.estimator.estimate(candidate)
    faster = dataclasses.replace(estimate, compute=estimate.compute / 2, seconds=estimate.seconds / 2)
    (line,) = planner.lines
    slower = [dataclasses.replace(line, prediction=line.prediction | {"seconds": 2.0})] * 2
    skip = lambda lines: reason_to_skip(candidate, faster, lines, planner.usable, 16)
    assert skip([line]) is None
    assert skip([line, slower[0]]) is None
    assert "likely" in (skip([line, *slower]) or "")
    assert skip([*slower, line]) is None


def test_plain_replicas_are_tried_once_where_zero_is_best() -> None:
    """Four small layers on 2 x 2 H100: `fsdp=4`, which waits for a collective of every layer, took .95 ms, and `data=4`
    .53 ms. Scaled to the program of `fsdp=4` its closed forms, which have no latencies, said 1.1 ms.
    """
    planner, best = planner_of_one_line("fsdp=8,precision=bf16")
    plain = jp.Strategy.parse("data=8,precision=bf16")
    estimate = planner.estimator.estimate(plain)
    slower = dataclasses.replace(estimate, compute=1.1 * planner.estimator.estimate(best).compute)
    (line,) = planner.lines
    lines = [line, *[dataclasses.replace(line, prediction=line.prediction | {"seconds": 2.0})] * 2]
    assert reason_to_skip(plain, slower, lines, planner.usable, 16) is None
    compiled = dataclasses.replace(lines[1], strategy=plain, estimate=slower)
    in_two = dataclasses.replace(plain, microbatches=2)
    assert reason_to_skip(in_two, slower, [*lines, compiled], planner.usable, 16)
    beside_tensor = jp.Strategy.parse("data=4,tensor=2,sequence=true,precision=bf16")
    assert reason_to_skip(beside_tensor, slower, lines, planner.usable, 16)


def test_what_does_not_fit_says_nothing_of_what_is_alike_and_does() -> None:
    """Llama-3-8B on 8 H100: ZeRO-1 with microbatches needed 1.7 times its closed form, and `fsdp=8,reduce=compute` was
    left out as not fitting, where `fsdp=8` needed 1.15 times its own and was the best.
    """
    planner, best = planner_of_one_line("fsdp=8,precision=bf16")
    (fitting,), candidate = planner.lines, dataclasses.replace(best, reduce="compute")
    estimate = planner.estimator.estimate(candidate)
    too_large = dataclasses.replace(best, zero=1, microbatches=2)
    memory = {"total": 2 * planner.estimator.estimate(too_large).bytes}
    others = planner.estimator.estimate(too_large)
    line = dataclasses.replace(fitting, strategy=too_large, estimate=others, memory=memory, usable=estimate.bytes)
    assert not line.fits
    assert reason_to_skip(candidate, estimate, [line], estimate.bytes, 16)
    assert reason_to_skip(candidate, estimate, [fitting, line], estimate.bytes, 16) is None


@pytest.mark.slow
def test_whole_logits_are_tried_where_the_best_has_them_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3-8B on 8 H100 took 1.715 s, and with `logits=whole` 1.685."""
    faked(monkeypatch, lambda s: (1.0 + (s.logits == "auto"), 10, s.logits == "auto"))
    assert a_plan(None, top=12, target=FOUR).best.logits == "whole"


def planner_of_one_line(name: str) -> tuple[planning.Planner, jp.Strategy]:
    """Return a planner that has compiled this strategy alone."""
    planner, strategy = (
        planning.Planner(Estimator(MODEL, ADAM, cpu_target(), BATCH), cache=False),
        jp.Strategy.parse(name),
    )
    line = line_of(name, matmul=1.0, exposed=0.0)
    planner.lines = [dataclasses.replace(line, estimate=planner.estimator.estimate(strategy))]
    return planner, strategy


def test_what_computes_nothing_again_is_tried_before_all_that_is_as_long() -> None:
    """Llama-3.2-1B on 8 H100: 16 programs, all with `remat=dots` (0.603 s), which was not needed (0.580)."""
    planner, dots = planner_of_one_line("fsdp=8,reduce=compute,remat=dots,precision=bf16")
    pair = planner._best_neighbour(16)
    assert pair is not None
    assert pair[0] == dataclasses.replace(dots, remat="none")


def test_what_is_worse_in_no_closed_form_is_tried_first() -> None:
    """Llama-3-8B on 8 H100: 448 ms with the gradients of `tensor=2` in float32, as what closed forms say to be faster
    filled the 16; `fsdp=8,reduce=compute` takes less.
    """
    planner, best = planner_of_one_line("data=2,fsdp=4,zero=3,precision=bf16")
    best_estimate = planner.estimator.estimate(best)
    faster = dataclasses.replace(best_estimate, seconds=0.9 * best_estimate.seconds, sent=2 * best_estimate.sent)
    planner.estimates = {str(dataclasses.replace(best, data=1, fsdp=8)): vars(faster)}
    pair = planner._best_neighbour(16)
    assert pair is not None
    assert pair[0] == dataclasses.replace(best, reduce="compute")


@pytest.mark.slow
def test_a_search_that_ends_early_has_looked_around_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3-405B on 1,024 H100: six programs, each of another family, and `reduce=compute` was not among them."""
    compiled = faked(monkeypatch, lambda s: (1.0, 10, False))
    a_plan(None, top=16, target=FOUR)
    first, second = compiled[:2]
    assert second in neighbours(first, FOUR, ROWS)
    assert {strategy.logits for strategy in compiled} == {"auto"}  # none of these programs has chunks


@pytest.mark.slow
def test_of_a_family_the_next_is_likely_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3-70B on 32 H100: eleven of 16 programs did not fit, the next of a family often as little as the first."""
    estimator = Estimator(MODEL, ADAM, target := cpu_target(dataclasses.replace(H100, memory_bytes=60_000)), BATCH)
    compiled = faked(monkeypatch, lambda s: (1.0, 3 * estimator.estimate(s).bytes, False))
    plan = a_plan(None, top=16, target=target)
    assert any(not line.fits for line in plan.lines)
    families = set()  # on one host, without experts or context
    for s in compiled[:8]:
        family = s.pipe > 1, s.tensor > 1, s.zero if s.fsdp != 1 else 0
        assert 3 * estimator.estimate(s).bytes <= plan.lines[0].usable or family not in families
        families.add(family)


SMALL = cpu_target(dataclasses.replace(H100, memory_bytes=int((100 << 20) / (1 - RESERVE))), devices=4)


@pytest.mark.battery
@pytest.mark.parametrize(
    ("width", "target"),
    [(256, FOUR), (1024, FOUR), (1024, dataclasses.replace(FOUR, hosts=2, per_host=2)), (1024, SMALL)],
    ids=["small layers", "large layers", "two hosts", "little memory"],
)
def test_the_best_of_16_is_within_5_percent_of_the_best_of_all(width: int, target: Target) -> None:
    """The exhaustive search compiles every candidate; only some of them fit into little memory."""
    model, batch = stack(width=width, rules={"up": -1, "down": -2}), jax.ShapeDtypeStruct((16, width), jnp.float32)
    plan: Any = lambda **options: jp.plan(model, batch, target, ADAM, cache=False, **options)
    exhaustive = plan(strategies=list(candidates(target, 16, "bf16")))
    searched = plan(top=16)
    assert len(searched.lines) <= 16 < len(exhaustive.lines) / 3
    assert exhaustive.lines[0].fits
    assert searched.lines[0].fits
    assert searched.lines[0].seconds <= 1.05 * exhaustive.lines[0].seconds, f"{searched.best} for {exhaustive.best}"


def test_the_cache_knows_model_batch_target_and_optimizer() -> None:
    base: tuple[Any, ...] = (MODEL, ADAM, BATCH, cpu_target(), None, None)
    longer = jax.ShapeDtypeStruct((ROWS + 8, D), jnp.float32)
    changes: tuple[tuple[int, Any], ...] = (
        (0, stack(gain=0.5)), (0, stack(rules={"up": -1})), (1, optax.sgd(0.1)), (2, longer),
        (3, cpu_target(KINDS["H200"])), (3, cpu_target(devices=4)), (4, {"up": -1}),
        (5, lambda path: path == "up"),
    )  # fmt: skip
    hashes = {plan_cache.plan_key(*base)}
    for index, value in changes:
        hashes.add(plan_cache.plan_key(*(value if i == index else x for i, x in enumerate(base))))
    assert len(hashes) == 1 + len(changes)
    assert plan_cache.plan_key(stack(), *base[1:]) in hashes  # traced again: no address of an object is in it


def test_a_broken_file_is_compiled_again(tmp_path: Path) -> None:
    first = a_plan(["ddp"], cache=tmp_path)
    for file in tmp_path.iterdir():
        file.write_text(file.read_text()[:-5])
    second = a_plan(["ddp"], cache=tmp_path)
    assert not second.lines[0].cached
    assert second.lines[0].memory == first.lines[0].memory


def test_ctrl_c_keeps_what_is_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = TrainStep.compile
    calls: list[Any] = []

    def interrupted(self: Any, batch: Any) -> Any:
        calls.append(self.strategy)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return compile_(self, batch)

    monkeypatch.setattr(TrainStep, "compile", interrupted)
    plan = a_plan(["ddp", "fsdp", "zero1"])
    assert plan.interrupted
    assert [str(line.strategy) for line in plan.lines] == ["data=-1"]
    assert len(calls) == 2
    assert "Interrupted" in str(plan)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXPAR_CACHE", "/somewhere")
    assert plan_cache.folder(None) == Path("/somewhere")
    assert plan_cache.folder("x") == Path("x")
    monkeypatch.delenv("JAXPAR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert plan_cache.folder(None) == Path("/cache/jaxpar/plan")


def test_a_cache_that_cannot_be_is_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    """A read-only home ended a plan after its first compilation, with a traceback."""
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file cannot be the folder .*: File exists; name another one by cache= or"):
        plan_cache.PlanCache(tmp_path / "file", "")
