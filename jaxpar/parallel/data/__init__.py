"""Strategies along the data axes: one file for each, and `rule_of`, which finds the rule that a strategy names.

A user's own rule is registered by `register` and chosen by its name.
"""

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
_RULES: dict[str, Rule] = {}  # the rules that users registered, by name


def register(rule: Rule) -> Rule:
    """Register a rule, so that `Strategy(data=8, rule="its name")` or the text "data=8,rule=..." chooses it.

    A second rule of the same name replaces the first, in steps that are made afterwards. Returns the same rule.

    Raises:
      ValueError: if `rule` is no `Rule`, or its name, `sharded` or `promise` is invalid.
    """
    if not isinstance(rule, Rule):
        raise ValueError(f"register got {rule!r}; give a jaxpar.parallel.Rule")
    # The name is a value in a strategy's text, as in "data=8,rule=int8".
    if not rule.name.isidentifier() or rule.name in PRESETS:
        raise ValueError(
            f"a rule cannot be named {rule.name!r}; use letters, digits and underscores, as in 'int8', and none of "
            f"jaxpar's own names ({', '.join(PRESETS)})"
        )
    if unknown := rule.sharded - {*_TREES}:
        raise ValueError(f"rule {rule.name!r} shards {sorted(unknown)}; use some of {', '.join(_TREES)}, or none")
    if not isinstance(rule.promise, Promise):
        raise ValueError(f"rule {rule.name!r} promises {rule.promise!r}; give a jaxpar.parallel.Promise")
    _RULES[rule.name] = rule
    return rule


def rule_of(strategy: Strategy) -> Rule:
    """Return the rule of a strategy: the server's, or the user's rule that it names, else ZeRO over `fsdp`, else ddp.

    Raises:
      ValueError: if the name is not registered; if the rule shards and `fsdp` is 1; or if it does not and `fsdp` is
        larger.
    """
    if strategy.server:
        return SERVER
    if not strategy.rule:
        # Each of `sync`, `gather` and `reduce` replaces the rule by a variant of it.
        zero3 = ZERO3_ONCE if strategy.sync == "step" else ZERO3
        zero3 = ROUNDED.get((zero3, strategy.gather), zero3)
        rule = DDP if strategy.fsdp == 1 else {1: ZERO1, 2: ZERO2, 3: zero3}[strategy.zero]
        return REDUCED[rule] if strategy.reduce == "int8" else rule
    if strategy.rule not in _RULES:
        candidates = f"use one of {', '.join(_RULES)}{did_you_mean(strategy.rule, _RULES)}, or " if _RULES else ""
        raise ValueError(
            f"rule={strategy.rule!r} is not registered; {candidates}call jaxpar.parallel.register for it first, or "
            "import the file that does"
        )
    rule = _RULES[strategy.rule]
    # A rule that shards needs `fsdp` devices to shard over; with `fsdp` devices, a rule without would waste them.
    if bool(rule.sharded) != (strategy.fsdp != 1):
        shards = f"shards {', '.join(sorted(rule.sharded))}" if rule.sharded else "shards nothing"
        advice = "give fsdp a size, as in fsdp=-1" if rule.sharded else "use data instead of fsdp, as in data=-1"
        raise ValueError(f"rule={strategy.rule!r} {shards} and fsdp={strategy.fsdp}; {advice}")
    return rule
