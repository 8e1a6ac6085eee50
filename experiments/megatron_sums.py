"""What one layer of a GPT keeps for its backward, as sums over places: Megatron-LM's, and what is expected of ours.

Korthikanti et al. 2022, arXiv:2205.05198, section 4.1 (the places), table 2 (the sums). All sizes are multiples of
s b h bytes: s positions, b rows, h features, a heads, t tensor ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
    """The paper's section 4.1, place by place, and what a layer of ours keeps."""
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
    # A norm's result is computed again, unless each tensor rank reads all of it.
    norm_result = 2 if setting.tensor > 1 and not setting.sequence else 0
    return [
        # And three numbers for every position, in float32.
        Term("inputs of 2 norms", 4, 2 * (2 + 12 / config.dim), "sequence"),
        Term("input of query, key, value", 2, norm_result, "sequence"),
        Term("query, key, value", 6, 6, "always"),
        # The paper's: softmax, mask and result of its dropout. JAX's: exp and a sum, and a rank of its heads
        # their mask. cuDNN's: the sum.
        Term("scores", 5 * scores, (4 + (setting.tensor > 1)) * scores + statistic, "always")
        if setting.plain
        else Term("scores", 0, statistic, "always"),
        Term("input of out", 2, 2, "always"),
        Term("input of up", 2, norm_result, "sequence"),
        Term("input of GELU", 8, 8, "always"),
        Term("input of down", 8, 0, "always"),  # GELU's result, computed again
        Term("masks of 2 dropouts", 2, 2 if setting.dropout else 0, "sequence"),
    ]


def total(places: Sequence[Term], setting: Setting, ours: bool) -> float | None:
    """The sum over terms on one of the ranks."""
    whole = {"always": False, "sequence": not setting.sequence}
    sizes = [(term.ours if ours else term.paper, 1 if whole[term.split] else setting.tensor) for term in places]
    return None if any(size is None for size, _ in sizes) else sum(size / ranks for size, ranks in sizes if size)
