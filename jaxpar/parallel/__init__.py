"""Strategies along the data axes, one file each, to be read beside its paper."""

from __future__ import annotations

from ..strategy import Strategy
from .contract import Rule as Rule
from .contract import Use as Use
from .ddp import DDP
from .fsdp import ZERO3
from .server import SERVER
from .zero import ZERO1, ZERO2
from .zero import publish as publish


def rule_of(strategy: Strategy) -> Rule:
    """The rule of a strategy: ZeRO where `fsdp` has devices, plain replicas otherwise."""
    if strategy.server:
        return SERVER
    return DDP if strategy.fsdp == 1 else {1: ZERO1, 2: ZERO2, 3: ZERO3}[strategy.zero]
