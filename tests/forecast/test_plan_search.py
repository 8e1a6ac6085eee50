"""What a plan's search finds, beside all that it could have found: every candidate compiled."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from test_plan import ADAM, H100, here, stack

import jaxpar as jp
from jaxpar.forecast.plan.candidates import candidates
from jaxpar.hardware.devices import Target
from jaxpar.hardware.hardware import RESERVE

ROWS = 16


def hosts(target: Target) -> Target:
    return dataclasses.replace(target, hosts=2, per_host=2)


def small(memory: int) -> Target:
    """Devices that only some of the strategies fit."""
    return here(dataclasses.replace(H100, memory_bytes=int(memory / (1 - RESERVE))), devices=4)


@pytest.mark.battery
@pytest.mark.parametrize(
    ("width", "target"),
    [(256, here(devices=4)), (1024, here(devices=4)), (1024, hosts(here(devices=4))), (1024, small(100 << 20))],
    ids=["small layers", "large layers", "two hosts", "little memory"],
)
def test_the_best_of_16_is_within_5_percent_of_the_best_of_all(width: int, target: Target) -> None:
    model, batch = stack(width=width, rules={"up": -1, "down": -2}), jax.ShapeDtypeStruct((ROWS, width), jnp.float32)
    plan: Any = lambda **options: jp.plan(model, batch, target, ADAM, cache=False, **options)
    every = plan(strategies=list(candidates(target, ROWS, "bf16")))
    found = plan(top=16)
    assert len(found.lines) <= 16 < len(every.lines) / 3
    assert every.lines[0].fits
    assert found.lines[0].fits
    assert found.lines[0].seconds <= 1.05 * every.lines[0].seconds, f"{found.best} for {every.best}"
