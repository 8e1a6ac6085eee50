"""plan_shardings, of programs that jaxpar did not make: how their arguments should lie."""

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...backend.text import WIDTH, size, table
from ...hardware.devices import Target
from ...inspect.predict import Prediction
from ...inspect.predict.prediction import longer
from .report import JittedExplanation, explain

_NAMED = 3  # parts of a step that are said to make it slower


@dataclass(frozen=True)
class ShardingPlan:
    """What `jp.plan_shardings` found. `print` it, or take `.json()`.

    Attributes:
      target: its name.
      found: of each proposal that can be, its explanation, best first: those that fit by seconds, then the others by
        bytes.
      why: of each but the first, why it is not.
      refused: proposals that cannot be, and the error.
    """

    target: str
    found: dict[str, JittedExplanation]
    why: dict[str, str]
    refused: dict[str, str]

    @property
    def best(self) -> str:
        """The name of the first. Raises ValueError where nothing fits."""
        name, one = next(iter(self.found.items()))
        if not _prediction(one).fits:
            raise ValueError(f"no proposal fits {one.devices}; {self.why[name]}")
        return name

    def json(self) -> dict[str, Any]:
        """All of it as dicts, lists, text and numbers."""
        return vars(self) | {"found": {name: one.json() for name, one in self.found.items()}}

    def __repr__(self) -> str:
        return f"ShardingPlan({', '.join(self.found)} on {self.target}; print it)"

    def __str__(self) -> str:
        rows = [["", "memory", "ms", "exposed", "sent", "proposal"]]
        for number, (name, one) in enumerate(self.found.items(), 1):
            took = _prediction(one)
            times = (f"{1e3 * seconds:,.1f}" for seconds in (took.seconds, took.exposed))
            sent = sum(each.sent for each in one.ledger)
            rows.append([f"{number}", size(took.memory or 0) + "!" * (not took.fits), *times, size(sent), name])
        lines = [f"{name}: {why}" for name, why in self.why.items()]
        lines += [f"{name} cannot be: {why}" for name, why in self.refused.items()]
        wrapped = [textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for line in lines]
        return "\n".join([f"{self.target}, each device and step", table(rows, "<>>>><"), *wrapped])


def plan_shardings(
    fn: Callable[..., Any], shardings: Mapping[str, Any] | list[Any], target: Target | str
) -> ShardingPlan:
    """A function with its arguments as each proposal has them, by predicted seconds. Nothing runs.

    Args:
      fn, target: as for `explain`.
      shardings: by name, or in a list ("1", "2", ...), the arguments as they would lie: tuples of
        `jax.ShapeDtypeStruct` with a NamedSharding, whose meshes, which may differ, have as many devices as the target.

    Raises ValueError where none can be.
    """
    if isinstance(shardings, list):
        shardings = {f"{number}": args for number, args in enumerate(shardings, 1)}
    if not isinstance(shardings, Mapping) or not all(isinstance(args, tuple) for args in shardings.values()):
        given = shardings if isinstance(shardings, str) else type(shardings).__name__
        raise ValueError(
            f"shardings is {given!r}; needs by name, or in a list, the "
            "tuple of fn's arguments as they would lie: {'fsdp': (state, batch), ...}"
        )
    found, refused = dict[str, JittedExplanation](), dict[str, str]()
    for name, args in shardings.items():
        try:
            one = explain(fn, *args, target=target)
        except ValueError as error:
            refused[name] = str(error)
        else:
            if one.prediction is None:
                raise ValueError(f"target={target!r} has no peaks and bandwidths to rank by; use GPUs, as '8xH100'")
            found[name] = one
    if not found:
        whys = "; ".join(f"{name}: {why}" for name, why in refused.items()) or "shardings is empty"
        raise ValueError(f"no proposal can be: {whys}")

    def order(name: str) -> tuple[bool, float]:
        took = _prediction(found[name])
        return (False, took.seconds) if took.fits else (True, took.memory or 0)

    ranked = {name: found[name] for name in sorted(found, key=order)}
    best = next(iter(ranked.values()))
    reasons = {name: _why(one, best) for name, one in ranked.items()}
    kind = target if isinstance(target, str) else target.name
    return ShardingPlan(kind, ranked, {name: why for name, why in reasons.items() if why}, refused)


def _prediction(one: JittedExplanation) -> Prediction:
    assert one.prediction is not None
    return one.prediction


def _why(one: JittedExplanation, best: JittedExplanation) -> str:
    """Why it is not the best; "" of that, if it fits."""
    took, least = _prediction(one), _prediction(best)
    copies = f"; copies: {', '.join(x.path for x in one.copied[:_NAMED])}" if one.copied else ""
    if not took.fits:
        over = (took.memory or 0) - (took.usable or 0)
        return f"does not fit: {size(took.memory or 0)} is {size(over)} too much{copies}"
    if one is best:
        return ""
    named = [x for x in longer(_spent(one), _spent(best))[:_NAMED] if x[0] > 0.005 * least.seconds]
    causes = ", ".join(f"{1e3 * s:+,.2f} ms {kind}" for s, kind in named) or "a little of everything"
    return f"{took.seconds / least.seconds - 1:.1%} slower: {causes}{copies}"


def _spent(one: JittedExplanation) -> dict[str, float]:
    """The seconds by what they are spent on: kernels by kind, exposed collectives by kind and axes."""
    sums: dict[str, float] = {}
    for part in _prediction(one).parts:
        kind = f"exposed {part.kind} over {'+'.join(part.axes)}" if part.collective else part.kind
        sums[kind] = sums.get(kind, 0.0) + (part.exposed if part.way else part.seconds)
    return sums
