"""The table of constraints on a `Strategy`."""

from typing import Any

import pytest

import jaxpar as jp
from jaxpar.strategy.constraints import CHOICES, CONSTRAINTS

BROKEN: list[dict[str, Any]] = [  # one strategy for each constraint, in the order of the table
    {"data": 0},
    {"pipe": "hosts"},
    {"data": -1, "fsdp": -1},
    {"zero": 4},
    {"microbatches": 0},
    {"chunks": 0},
    {"chunks": 2},
    {"schedule": "zb-v"},
    {"stages": "cut"},
    *({name: "nothing", "pipe": 2} for name in CHOICES if name != "stages"),
    {"stages": ":", "pipe": 2},
    {"hpz": 1},
    {"sequence": True},
    {"concurrent": 2, "microbatches": 2, "server": True},
    {"concurrent": 2, "microbatches": 2, "pipe": 2},
    {"concurrent": 2},
    {"attention": "ring"},
    {"prefetch": 1, "server": True},
    {"sync": "step"},
    {"hpz": True},
    {"budget": "70GB"},
    {"remat": "auto", "server": True},
    {"offload": "activations", "server": True},
    {"offload": "optimizer", "server": True},
    {"offload": "params", "fsdp": 2, "zero": 2},
    {"precision": "fp8", "server": True},
    {"gather": "int8"},
    {"reduce": "int8", "server": True},
    {"fp8_except": 3},
    {"fp8_except": "head"},
    {"server": True, "fsdp": 2},
    {"rule": "not a name"},
    {"rule": "mine", "server": True},
    {"single": True, "fsdp": 2},
]


def test_every_constraint_refuses_a_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row above another one could refuse all that the other is for: its sentence would never be read."""
    refusing = []
    check = type(CONSTRAINTS[0]).check

    def noted(constraint: Any, strategy: Any) -> None:
        try:
            check(constraint, strategy)
        except ValueError:
            refusing.append(constraint)
            raise

    monkeypatch.setattr(type(CONSTRAINTS[0]), "check", noted)
    for fields in BROKEN:
        # The sentence names a field that was given, and leaves no place of its template empty.
        with pytest.raises(ValueError, match=rf"^[^{{]*({'|'.join(fields)})[^{{]*$"):
            jp.Strategy(**fields)
    assert {id(one) for one in refusing} == {id(one) for one in CONSTRAINTS}
