"""What one layer of a GPT keeps for its backward, as sums over places: Megatron-LM's, and what is expected of ours.

Korthikanti et al. 2022, arXiv:2205.05198, section 4.1 (the places), table 2 (the sums). All sizes are multiples of
s b h bytes: s positions, b rows, h features, a heads, t tensor ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from jaxpar.models import gpt


@dataclass(frozen=True)
class Setting:
    """How layers are computed; `plain`: by JAX's own attention, which keeps its scores, in place of `jp.attention`."""

    tensor: int
    sequence: bool
    plain: bool
    remat: Literal["none", "dots", "layer"]
    dropout: float = 0.0

    @property
    def strategy(self) -> str:
        axes = "single" if self.tensor == 1 else f"tensor={self.tensor},sequence={self.sequence}"
        return f"{axes},precision=bf16,reduce=compute,remat={self.remat}"

    @property
    def recomputed(self) -> str:
        """What the backward computes again, in the words of the paper's table."""
        scores = "nothing" if self.plain else "attention"
        return {"none": scores, "dots": "all but matmuls", "layer": "layer"}[self.remat] + (
            ", dropout" if self.dropout else ""
        )


@dataclass(frozen=True)
class Term:
    """What a layer keeps at one place, in multiples of s b h bytes over all ranks: by the paper (None: it has no such
    sum), and by us. `split`: between ranks always, or with sequence parallelism.
    """

    what: str
    paper: float | None
    ours: float
    split: Literal["always", "sequence"]


def terms(setting: Setting, config: gpt.Config, length: int) -> list[Term]:
    """The paper's section 4.1, place by place, and what JAX's derivatives of our layer need."""
    scores, statistic = config.heads * length / config.dim, 4 * config.heads / config.dim
    if setting.remat == "layer":
        return [Term("input of the layer", 2, 2, "sequence")]
    if setting.remat == "dots":
        return [
            Term("input of the layer", None, 2, "sequence"),
            Term("products of query, key, value", None, 6, "always"),
            Term("product of out, summed over ranks", None, 2, "sequence"),
            Term("product of up", None, 8, "always"),
        ]
    return [
        # float32: 2 x, x - mean and scale / deviation for every feature; four numbers for every position.
        Term("inputs of 2 norms", 4, 2 * (12 + 16 / config.dim), "sequence"),
        Term("input of query, key, value", 2, 2, "sequence"),
        Term("query, key, value", 6, 6, "always"),
        # The paper's: softmax, mask and result of its dropout. JAX's: mask, exp, softmax; two sums. cuDNN's: one.
        Term("scores", 5 * scores, 7 * scores + 2 * statistic, "always")
        if setting.plain
        else Term("scores", 0, statistic, "always"),
        # Attention's own backward needs its result too, in the shape of heads.
        Term("input of out", 2, 2 if setting.plain else 4, "always"),
        Term("input of up", 2, 2, "sequence"),
        Term("input of GELU", 8, 8 * _arrays_of_gelu(), "always"),
        Term("input of down", 8, 8, "always"),
        Term("masks of 2 dropouts", 2, 2 if setting.dropout else 0, "sequence"),
    ]


def _arrays_of_gelu() -> int:
    """How many arrays JAX's derivative of GELU keeps: x, 3 x^2, tanh, 1 - tanh, (1 + tanh) / 2; newer jax four."""
    x = jax.ShapeDtypeStruct((2,), jnp.bfloat16)
    pull = jax.eval_shape(lambda x: jax.tree.leaves(jax.vjp(jax.nn.gelu, x)[1]), x)
    return sum(kept.shape == x.shape for kept in pull)


def total(places: Sequence[Term], setting: Setting, ours: bool) -> float | None:
    """The sum over terms on one of the ranks."""
    whole = {"always": False, "sequence": not setting.sequence}
    sizes = [(term.ours if ours else term.paper, 1 if whole[term.split] else setting.tensor) for term in places]
    return None if any(size is None for size, _ in sizes) else sum(size / ranks for size, ranks in sizes if size)
