"""Compare the search of a plan with an exhaustive one, which compiles every candidate."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from test_plan import ADAM, H100, cpu_target, stack

import jaxpar as jp
from jaxpar.forecast.plan.candidates import candidates
from jaxpar.hardware.devices import Target
from jaxpar.hardware.hardware import RESERVE

ROWS = 16


def hosts(target: Target) -> Target:
    return dataclasses.replace(target, hosts=2, per_host=2)


def small(memory: int) -> Target:
    """Return devices that only some of the strategies fit."""
    return cpu_target(dataclasses.replace(H100, memory_bytes=int(memory / (1 - RESERVE))), devices=4)


@pytest.mark.battery
@pytest.mark.parametrize(
    ("width", "target"),
    [
        (256, cpu_target(devices=4)),
        (1024, cpu_target(devices=4)),
        (1024, hosts(cpu_target(devices=4))),
        (1024, small(100 << 20)),
    ],
    ids=["small layers", "large layers", "two hosts", "little memory"],
)
def test_the_best_of_16_is_within_5_percent_of_the_best_of_all(width: int, target: Target) -> None:
    model, batch = stack(width=width, rules={"up": -1, "down": -2}), jax.ShapeDtypeStruct((ROWS, width), jnp.float32)
    plan: Any = lambda **options: jp.plan(model, batch, target, ADAM, cache=False, **options)
    exhaustive = plan(strategies=list(candidates(target, ROWS, "bf16")))
    searched = plan(top=16)
    assert len(searched.lines) <= 16 < len(exhaustive.lines) / 3
    assert exhaustive.lines[0].fits
    assert searched.lines[0].fits
    assert searched.lines[0].seconds <= 1.05 * exhaustive.lines[0].seconds, f"{searched.best} for {exhaustive.best}"
