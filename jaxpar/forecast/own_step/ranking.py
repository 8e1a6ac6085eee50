"""`plan_shardings` for programs that jaxpar did not make: rank ways to shard their arguments.

Each proposal is compiled for the target and explained by `report.explain`. Proposals that fit come first, by predicted
seconds; a proposal that does not fit, or is slower, has its reason.
"""

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...backend.text import WIDTH, size, table
from ...hardware.devices import Target
from ...inspect.predict import Prediction
from ...inspect.predict.prediction import time_differences
from .report import JittedExplanation, explain

_MAX_CAUSES = 3  # parts of a step, and copied arguments, that a reason names


@dataclass(frozen=True)
class ShardingPlan:
    """The result of `jp.plan_shardings`. `print` it, or take `.json()`.

    Attributes:
      target: the name of the target.
      found: the explanation of each valid proposal, best first: those that fit by seconds, then the others by bytes.
      why: for each proposal that is not the best, the reason.
      refused: invalid proposals, each with its error.
    """

    target: str
    found: dict[str, JittedExplanation]
    why: dict[str, str]
    refused: dict[str, str]

    @property
    def best(self) -> str:
        """Return the name of the best proposal. Raises ValueError if no proposal fits."""
        name, explanation = next(iter(self.found.items()))
        if not _prediction(explanation).fits:
            raise ValueError(f"no proposal fits {explanation.devices}; the smallest, {name}, {self.why[name]}")
        return name

    def json(self) -> dict[str, Any]:
        """Return the plan as dicts, lists, text and numbers."""
        return vars(self) | {"found": {name: explanation.json() for name, explanation in self.found.items()}}

    def __repr__(self) -> str:
        return f"ShardingPlan({', '.join(self.found)} on {self.target}; print it)"

    def __str__(self) -> str:
        rows = [["", "memory", "ms", "exposed", "sent", "proposal"]]
        for number, (name, explanation) in enumerate(self.found.items(), 1):
            prediction = _prediction(explanation)
            times = (f"{1e3 * seconds:,.1f}" for seconds in (prediction.seconds, prediction.exposed))
            sent = sum(collective.sent for collective in explanation.ledger)
            memory = size(prediction.memory or 0) + "!" * (not prediction.fits)  # "!" marks what does not fit
            rows.append([f"{number}", memory, *times, size(sent), name])
        lines = [f"{name}: {why}" for name, why in self.why.items()]
        lines += [f"{name} is invalid: {why}" for name, why in self.refused.items()]
        wrapped = [textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for line in lines]
        return "\n".join([f"{self.target}, each device and step", table(rows, "<>>>><"), *wrapped])


def plan_shardings(
    fn: Callable[..., Any], shardings: Mapping[str, Any] | list[Any], target: Target | str
) -> ShardingPlan:
    """Rank ways to shard a function's arguments by predicted seconds. Nothing runs.

    Args:
      fn, target: as for `explain`.
      shardings: the proposals, by name or in a list (named "1", "2", ...). Each is the tuple of arguments:
        `jax.ShapeDtypeStruct` with NamedShardings. Their meshes may differ, but all need as many devices as the target.

    Raises:
      ValueError: no proposal is valid, or the target has no peaks and bandwidths.
    """
    # 1. Check the proposals.
    if isinstance(shardings, list):
        shardings = {f"{number}": args for number, args in enumerate(shardings, 1)}
    if not isinstance(shardings, Mapping) or not all(isinstance(args, tuple) for args in shardings.values()):
        value = shardings if isinstance(shardings, str) else type(shardings).__name__
        raise ValueError(
            f"shardings is {value!r}; give, by name or in a list, tuples of fn's arguments with their shardings: "
            "{'fsdp': (state, batch), ...}"
        )

    # 2. Compile each.
    explanations, refused = dict[str, JittedExplanation](), dict[str, str]()
    for name, args in shardings.items():
        try:
            explanation = explain(fn, *args, target=target)
        except ValueError as error:
            refused[name] = str(error)
        else:
            # Without a prediction nothing can be ranked. It lacks for all proposals, since they share the target.
            if explanation.prediction is None:
                raise ValueError(f"target={target!r} has no peaks and bandwidths to rank by; use GPUs, as '8xH100'")
            explanations[name] = explanation
    if not explanations:
        errors = "; ".join(f"{name}: {error}" for name, error in refused.items()) or "shardings is empty"
        raise ValueError(f"no proposal is valid: {errors}")

    # 3. Rank them. A slow proposal that fits is better than any that does not, for which seconds mean nothing.
    def rank_key(name: str) -> tuple[bool, float]:
        prediction = _prediction(explanations[name])
        return (False, prediction.seconds) if prediction.fits else (True, prediction.memory or 0)

    ranked = {name: explanations[name] for name in sorted(explanations, key=rank_key)}
    best = next(iter(ranked.values()))
    reasons = {name: _reason(explanation, best) for name, explanation in ranked.items()}
    target_name = target if isinstance(target, str) else target.name
    return ShardingPlan(target_name, ranked, {name: why for name, why in reasons.items() if why}, refused)


def _prediction(explanation: JittedExplanation) -> Prediction:
    """Return the prediction of a proposal, which every ranked one has."""
    assert explanation.prediction is not None
    return explanation.prediction


def _reason(explanation: JittedExplanation, best: JittedExplanation) -> str:
    """Return why a proposal is not the best, or does not fit; "" for the best one, if it fits."""
    prediction, best_prediction = _prediction(explanation), _prediction(best)
    paths = [x.path for x in explanation.copied[:_MAX_CAUSES]]
    copies = f"; copies: {', '.join(paths)}" if paths else ""
    if not prediction.fits:
        excess = (prediction.memory or 0) - (prediction.usable or 0)
        return f"does not fit: {size(prediction.memory or 0)} is {size(excess)} too much{copies}"
    if explanation is best:
        return ""
    differences = time_differences(_seconds_by_kind(explanation), _seconds_by_kind(best))[:_MAX_CAUSES]
    # Differences below half a percent of the step explain nothing.
    causes = [(seconds, kind) for seconds, kind in differences if seconds > 0.005 * best_prediction.seconds]
    listed = ", ".join(f"{1e3 * seconds:+,.2f} ms {kind}" for seconds, kind in causes) or "a little of everything"
    return f"{prediction.seconds / best_prediction.seconds - 1:.1%} slower: {listed}{copies}"


def _seconds_by_kind(explanation: JittedExplanation) -> dict[str, float]:
    """Return the seconds of a step by kind: kernels by kind, exposed communication by kind and axes."""
    totals: dict[str, float] = {}
    for part in _prediction(explanation).parts:
        kind = f"exposed {part.kind} over {'+'.join(part.axes)}" if part.collective else part.kind
        totals[kind] = totals.get(kind, 0.0) + (part.exposed if part.way else part.seconds)
    return totals
