"""What a claim is, and the model on which claims are measured."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
import optax

import jaxpar as jp
from jaxpar.inspect.ledger import Ledger
from jaxpar.models import named

Verdict = Literal["true", "true if", "false"]
How = Literal["traced", "compiled", "run", "timed"]
MODEL = "llama-tiny"  # 853,120 parameters in 4 layers, of which 8 devices divide every leaf
DEVICES = 8
ROWS, LENGTH = 32, 32


@dataclass(frozen=True)
class Found:
    """What a program found of a claim.

    Attributes:
      verdict: follows from the numbers.
      figure: the numbers in words.
      numbers: by name, unrounded.
    """

    verdict: Verdict
    figure: str
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """One thing that is said of strategies.

    Attributes:
      name: of the function that measures it.
      says: what lecture notes and posts say.
      source: who says it, or says why.
      how: "traced" and "compiled" need no run; "run" gives the same numbers to rounding everywhere; "timed" does not.
      measure: finds the numbers.
    """

    name: str
    says: str
    source: str
    how: How
    measure: Callable[[], Found]


CLAIMS: dict[str, Claim] = {}


def claim(says: str, source: str, how: How) -> Callable[[Callable[[], Found]], Callable[[], Found]]:
    """Registers a function as the measurement of a claim."""

    def register(measure: Callable[[], Found]) -> Callable[[], Found]:
        name = measure.__name__
        CLAIMS[name] = Claim(name, says, source, how, measure)
        return measure

    return register


def verdict(holds: bool, only_if: bool = False) -> Verdict:
    """True or false by what was measured; "true if" where it holds under a condition that the figure names."""
    return ("true if" if only_if else "true") if holds else "false"


# -- the model ---------------------------------------------------------------------------------------------------------


@functools.cache
def chosen(**changes: Any) -> Any:
    return named(MODEL, **changes)


def size() -> int:
    """The number of parameters."""
    return chosen().parameters


@functools.cache
def step_of(strategy: str, devices: int = DEVICES, adam: bool = True, **changes: Any) -> Any:
    optimizer = optax.adam(1e-3) if adam else optax.sgd(0.1, momentum=0.9)
    return jp.make_train_step(chosen(**changes).model, optimizer, strategy, jax.devices()[:devices])


def batch(rows: int = ROWS, length: int = LENGTH) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(chosen().config.vocab, size=(rows, length + 1))
    return {"tokens": tokens.astype(np.int32)}


@functools.cache
def ledger(strategy: str, devices: int = DEVICES, **changes: Any) -> Ledger:
    """What the traced step sends; nothing is compiled."""
    step = step_of(strategy, devices, **changes)
    return Ledger.from_jaxpr(step.trace(batch()), step.mesh)


def sent(strategy: str, devices: int = DEVICES, **changes: Any) -> int:
    """Bytes that a device puts on the wire in a step."""
    return sum(one.sent for one in ledger(strategy, devices, **changes))


@functools.cache
def explained(strategy: str) -> Any:
    return step_of(strategy).explain(batch())


def off(found: Any, wanted: Any) -> float:
    """The largest difference of two trees, each leaf in units of its own largest value."""
    errors = [
        np.abs(np.asarray(a) - np.asarray(b)).max() / max(np.abs(np.asarray(b)).max(), 1e-30)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    ]
    return float(max(errors))
