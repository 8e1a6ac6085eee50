"""The program of one expert rank, from end to end."""

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
    """The rewriting of a loss, grouped matmuls as `ragged_dot.py` has them. `fewer` has those whose experts are
    gathered because they are fewer bytes than its tokens: where, and bytes of those.
    """

    fewer: dict[str, int] = field(default_factory=dict)

    def through(self, flat: jx.Flat, env: jx.Environment[LocalValue]) -> None:
        """All equations of a flat program, those of a run of grouped matmuls together, where its last one stands."""
        found = {id(run.eqns[-1]): run for run in runs(flat, self.rules)}
        later = {id(eqn) for run in found.values() for eqn in run.eqns if not repeats(eqn)}
        for eqn in flat.eqns:
            if id(eqn) in found:
                self.grouped(found[id(eqn)], env)
            elif id(eqn) not in later:
                env.compute(eqn, self.equation)

    def grouped(self, run: ExpertRun, env: jx.Environment[LocalValue]) -> None:
        """Tokens exchanged, where experts are split and that is fewer bytes; else the equations as they are."""
        inputs = env.read((run.sizes, *run.rows, *run.leaves, *run.rest))
        k = 1 + len(run.rows)
        leaves, rest = inputs[k : k + len(run.leaves)], inputs[k + len(run.leaves) :]
        tokens, experts = run.bytes()
        split = all(x.dim == 0 for x in leaves) and all(x.weight for x in rest)
        if split and tokens <= experts:
            with jx.source_info_of(run.eqns[-1]):
                flat, _ = jx.trace(run.exchanged, *(jax.ShapeDtypeStruct(x.shape, x.value.dtype) for x in inputs))
                (env[run.out],) = self.run(flat, inputs)
            return
        if split:
            self.fewer.update({place(eqn): tokens for eqn in run.eqns if eqn.primitive.name == PRIMITIVE})
        for eqn in run.eqns:
            if not repeats(eqn):
                env.compute(eqn, self.equation)


def exchange_tokens(
    flat: jx.Flat, dims: Sequence[int | None], ranks: int, rules: Any
) -> tuple[Callable[..., list[Any]], TokenExchange]:
    """The program of one rank, a function of its parts of the parameters (the first inputs) and of the other inputs.

    Args:
      flat: the traced loss on one rank's rows and all experts.
      dims: for each parameter, the dim of experts, None where it has none.
      ranks: the number of devices on `expert`.
      rules: what becomes of an equation, by primitive.

    Returns the function, whose results are of this rank's rows; and, filled when it is traced, where experts are
    `gathered` (place -> bytes of all of them), where they are because their tokens are more (`fewer`: place -> bytes of
    those), and where `all_tokens` are gathered. Raises nothing: what has no rule gets its inputs as the model has them.
    """
    work = TokenExchange(ranks, False, rules)

    def fun(*values: Any) -> list[Any]:
        work.gathered.clear()
        work.fewer.clear()
        work.all_tokens.clear()
        return [work.whole(x) for x in work.run(flat, work.arguments(flat, values, dims))]

    return fun, work
