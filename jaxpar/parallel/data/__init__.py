"""Strategies along the data axes, one file each, to be read beside its paper; a user's own registers as ours do."""

from ...backend.text import did_you_mean
from ...strategy import PRESETS, Strategy
from .contract import Promise as Promise
from .contract import Rule as Rule
from .contract import Sent as Sent
from .contract import Times as Times
from .contract import Use as Use
from .contract import Uses as Uses
from .ddp import DDP as DDP
from .eight_bits import REDUCED, ROUNDED
from .fsdp import ZERO3, ZERO3_ONCE
from .server import SERVER
from .zero import ZERO1, ZERO2
from .zero import publish as publish

_TREES = ("params", "grads", "optimizer")
_RULES: dict[str, Rule] = {}  # of users


def register(rule: Rule) -> Rule:
    """Make a rule known, so that `Strategy(data=8, rule="its name")` chooses it, or "data=8,rule=..." as text.

    A second rule of one name takes the place of the first, in steps that are made from then on.

    Raises ValueError where its name, `sharded` or `promise` cannot be.
    """
    if not isinstance(rule, Rule):
        raise ValueError(f"register({rule!r}): needs a jaxpar.parallel.Rule")
    if not rule.name.isidentifier() or rule.name in PRESETS:
        raise ValueError(
            f"a rule named {rule.name!r}: use letters, digits and underscores, as in 'int8', and no name of jaxpar's "
            f"own ({', '.join(PRESETS)})"
        )
    if unknown := rule.sharded - {*_TREES}:
        raise ValueError(f"rule {rule.name!r} shards {sorted(unknown)}; use some of {', '.join(_TREES)}, or none")
    if not isinstance(rule.promise, Promise):
        raise ValueError(f"rule {rule.name!r} promises {rule.promise!r}; needs a jaxpar.parallel.Promise")
    _RULES[rule.name] = rule
    return rule


def rule_of(strategy: Strategy) -> Rule:
    """The rule of a strategy: a user's by name; of jaxpar's, ZeRO where `fsdp` has devices, else plain replicas.

    Raises ValueError where a name is not known, or its rule and `fsdp` do not fit.
    """
    if strategy.server:
        return SERVER
    if not strategy.rule:
        three = ZERO3_ONCE if strategy.sync == "step" else ZERO3
        three = ROUNDED.get((three, strategy.gather), three)
        rule = DDP if strategy.fsdp == 1 else {1: ZERO1, 2: ZERO2, 3: three}[strategy.zero]
        return REDUCED[rule] if strategy.reduce == "int8" else rule
    if strategy.rule not in _RULES:
        known = f"use one of {', '.join(_RULES)}{did_you_mean(strategy.rule, _RULES)}, or " if _RULES else ""
        raise ValueError(
            f"rule={strategy.rule!r} is not registered; {known}call jaxpar.parallel.register for it first, or import "
            "the file that does"
        )
    rule = _RULES[strategy.rule]
    if bool(rule.sharded) != (strategy.fsdp != 1):
        shards = f"shards {', '.join(sorted(rule.sharded))}" if rule.sharded else "shards nothing"
        instead = "give fsdp a size, as in fsdp=-1" if rule.sharded else "use data for fsdp, as in data=-1"
        raise ValueError(f"rule={strategy.rule!r} {shards} and fsdp={strategy.fsdp}; {instead}")
    return rule
