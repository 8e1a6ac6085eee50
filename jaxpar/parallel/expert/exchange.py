"""The program of one expert rank, from end to end: `exchange_tokens` rewrites a traced loss.

`TokenExchange` rewrites equation by equation (`localiser.py`, `rules.py`), except for runs of grouped matmuls
(`ragged_dot.py`). It rewrites such a run as a whole, if exchanging tokens sends fewer bytes than gathering experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ...program import jaxpr as jx
from ..tensor.localiser import LocalValue, place
from .localiser import ExpertLocaliser
from .ragged_dot import PRIMITIVE, ExpertRun, repeats, runs


@dataclass
class TokenExchange(ExpertLocaliser):
    """Rewrites a loss for an expert rank, with runs of grouped matmuls as exchanges of tokens.

    Attributes:
      fewer: place of a grouped matmul -> bytes of its tokens, where experts are gathered because they are fewer bytes.
    """

    fewer: dict[str, int] = field(default_factory=dict)

    def through(self, flat: jx.Flat, env: jx.Environment[LocalValue]) -> None:
        """Rewrite all equations of a program; a run of grouped matmuls is rewritten at its last equation."""
        run_by_last_eqn = {id(run.eqns[-1]): run for run in runs(flat, self.rules)}
        # The equations of a run wait for its last one, except for broadcasts, which others may read.
        deferred = {id(eqn) for run in run_by_last_eqn.values() for eqn in run.eqns if not repeats(eqn)}
        for eqn in flat.eqns:
            if id(eqn) in run_by_last_eqn:
                self.rewrite_run(run_by_last_eqn[id(eqn)], env)
            elif id(eqn) not in deferred:
                env.compute(eqn, self.equation)

    def rewrite_run(self, run: ExpertRun, env: jx.Environment[LocalValue]) -> None:
        """Rewrite a run of grouped matmuls: exchange tokens if this is fewer bytes, else gather experts."""
        inputs = env.read((run.sizes, *run.rows, *run.leaves, *run.rest))
        k = 1 + len(run.rows)
        leaves, rest = inputs[k : k + len(run.leaves)], inputs[k + len(run.leaves) :]
        token_bytes, expert_bytes = run.bytes()
        # The leaves must be split along their first dim, and the rest equal on all ranks: every expert reads it.
        can_exchange = all(x.dim == 0 for x in leaves) and all(x.weight for x in rest)
        if can_exchange and token_bytes <= expert_bytes:
            # Trace the exchange at the model's shapes, and rewrite the result for this rank like any other program.
            with jx.source_info_of(run.eqns[-1]):
                flat, _ = jx.trace(
                    run.compute_as_mixture, *(jax.ShapeDtypeStruct(x.shape, x.value.dtype) for x in inputs)
                )
                (env[run.out],) = self.run(flat, inputs)
            return
        if can_exchange:
            self.fewer.update({place(eqn): token_bytes for eqn in run.eqns if eqn.primitive.name == PRIMITIVE})
        # `through` has rewritten the run's broadcasts already.
        for eqn in run.eqns:
            if not repeats(eqn):
                env.compute(eqn, self.equation)


def exchange_tokens(
    flat: jx.Flat, dims: Sequence[int | None], ranks: int, rules: Any
) -> tuple[Callable[..., list[Any]], TokenExchange]:
    """Return the program of one expert rank.

    Args:
      flat: the traced loss on one rank's rows and all experts.
      dims: for each parameter, the dim of experts; None if it has none.
      ranks: the number of devices along `expert`.
      rules: primitive name -> rule (`rules.RULES`).

    Returns:
      The program and the `TokenExchange`. The program is a function of this rank's parameters (the first inputs) and of
      the other inputs; its results are for this rank's rows. No program is refused: an equation without a rule gets
      whole inputs. Tracing the program fills `gathered`, `fewer` and `all_tokens` of the `TokenExchange`.
    """
    localiser = TokenExchange(ranks, False, rules)

    # A trace fills the notes. Clear them, since the program may be traced again.
    def program(*values: Any) -> list[Any]:
        localiser.gathered.clear()
        localiser.fewer.clear()
        localiser.all_tokens.clear()
        return [localiser.whole(x) for x in localiser.run(flat, localiser.arguments(flat, values, dims))]

    return program, localiser
