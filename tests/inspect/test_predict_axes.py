"""Predictions of programs with a context or an expert axis: what they send, beside closed forms, and what of a dropless
mixture runs only where its tokens overflow.
"""

import dataclasses
import math
from typing import Any

import jax
import optax
import pytest

import jaxpar as jp
from jaxpar.hardware.compiled.kernels import Choice, Kernel
from jaxpar.hardware.devices import gpu_topology
from jaxpar.hardware.hardware import KINDS
from jaxpar.inspect.check import check
from jaxpar.inspect.predict.clock import Clock
from jaxpar.inspect.predict.prediction import Prediction, predict
from jaxpar.models import named

H100 = KINDS["H100"]
LAYERS, LENGTH = 2, 128


def make_step(name: str, text: str, mesh: Any, rows: int, **sizes: Any) -> tuple[Any, Any]:
    """Return a step and the shapes of its batch."""
    model = named(name, layers=LAYERS, **sizes)
    return jp.make_train_step(model.model, optax.sgd(1e-3), text, mesh), model.example(rows, LENGTH)


def sent_bytes(prediction: Prediction, axis: str, *kinds: str) -> int:
    """Return the bytes per device and step, without messages of scalars and choices."""
    parts = [part for part in prediction.collectives if part.axes == (axis,) and part.kind in kinds]
    return sum(part.bytes for part in parts if part.bytes > 4096 * part.executions)


# -- what overflows ----------------------------------------------------------------------------------------------------


def test_of_a_conditional_what_overflows_is_not_counted() -> None:
    rest = Kernel("rest", "", "memory", "", (), 10**9, 0, True)
    rare, plain = (Choice("c", ((), (rest,)), overflow) for overflow in (True, False))
    clocks = {name: Clock(H100, [0], overflow=overflow) for name, overflow in (("no", False), ("all", True))}
    seconds = {name: clock.time((rare,)) for name, clock in clocks.items()}
    assert seconds["no"] == 0
    assert not clocks["no"].parts
    assert seconds["all"] == Clock(H100, [0]).time((plain,)) > 0
    assert all(clock.overflows and not clock.notes for clock in clocks.values())


@pytest.mark.slow
def test_rounds_of_a_dropless_exchange_are_beside_the_prediction() -> None:
    """The exchange of 1.25 times the mean load always runs, forwards and backwards: 4 E C h w (e - 1)/e a layer.

    It is in float32 here. The remaining rounds take at most `overflow` seconds.
    """
    step, batch = make_step("mixtral-tiny", "expert=4", jax.devices()[:4], 8, dim=32, ffn=48)
    prediction = predict(step.compile(batch), step, batch, dataclasses.replace(H100, device_kind="cpu"))
    tokens, experts, chosen, ranks = 2 * LENGTH, 8, 2, 4
    slots = math.ceil(1.25 * tokens * chosen / experts / 8) * 8
    assert (
        sent_bytes(prediction, "expert", "all-to-all") == LAYERS * 4 * experts * slots * 32 * 4 * (ranks - 1) // ranks
    )
    assert 0 < prediction.overflow == prediction.json()["overflow"]
    assert "where tokens overflow" in str(prediction)
    assert not any("conditional" in note for note in prediction.notes)


# -- programs for GPUs -------------------------------------------------------------------------------------------------

KEYS = 2 * 2 * LENGTH * 4 * 32  # elements of keys and values of the 2 rows of a replica: 4 heads of 32


def gpu_step(name: str, text: str, rows: int, **sizes: Any) -> tuple[Any, Any]:
    return make_step(name, text + ",precision=bf16", gpu_topology("8xH100"), rows, **sizes)


def assert_agreement(step: Any, batch: Any) -> None:
    """Check that explain finds the closed form's bytes but for scalars, and that check finds no broken promise."""
    for entry in step.explain(batch).checks:
        assert entry.found == pytest.approx(entry.expected, rel=0.01, abs=1000), entry
    proof = check(step, batch)
    assert proof.ok, proof


@pytest.mark.cuda_compiler
@pytest.mark.battery
@pytest.mark.parametrize(
    ("way", "kinds", "closed"),
    [
        # The forward gathers in bfloat16, the backward reduces gradients in float32.
        ("gather", ("all-gather", "reduce-scatter"), KEYS * (2 + 4) * 3 // 4),
        # Queries and the attention's output too, 8 heads: twice as much again. The backward sends as much.
        ("ulysses", ("all-to-all",), 2 * KEYS * 3 * 2 * 3 // 4 // 4),
        # Keys and values in forward and backward, 3 hops of a quarter; their gradients go round once, in float32.
        ("ring", ("collective-permute",), KEYS * (2 + 2) * 3 // 4 + KEYS * 4),
    ],
)
def test_a_context_axis_is_predicted_explained_and_checked(way: str, kinds: tuple[str, ...], closed: int) -> None:
    step, batch = gpu_step("llama-tiny", f"fsdp=2,context=4,attention={way}", 4, dim=256, heads=8, kv_heads=4)
    program = step.compile(batch)
    prediction = predict(program, step, batch, H100)
    assert sent_bytes(prediction, "context", *kinds) == LAYERS * closed
    assert not prediction.overflow
    assert_agreement(step, batch)


@pytest.mark.cuda_compiler
@pytest.mark.battery
@pytest.mark.parametrize("capacity", [1.25, 0.0])
def test_an_expert_axis_is_predicted_explained_and_checked(capacity: float) -> None:
    """With a capacity, slots are counted in each row; without one, over all tokens of a rank: here both are equal."""
    step, batch = gpu_step("mixtral-tiny", "fsdp=2,expert=4", 16, capacity=capacity)
    prediction = predict(step.compile(batch), step, batch, H100)
    slots, dim = 2 * 40, 128  # 1.25 times 128 tokens times 2 of 8, in each of 2 rows
    assert sent_bytes(prediction, "expert", "all-to-all") == LAYERS * 4 * 8 * slots * dim * 2 * 3 // 4
    assert (prediction.overflow > 0) == (capacity == 0)
    assert_agreement(step, batch)
