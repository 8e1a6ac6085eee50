"""Sizes of a `DeepSeek`, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.models.parts.config import MixtureSizes, check_sizes


@dataclass(frozen=True)
class Config(MixtureSizes):
    """Sizes of a `DeepSeek`. Raises ValueError where they do not fit each other."""

    vocab: int = 256
    dim: int = 128
    layers: int = 5  # all of them
    dense: int = 1  # the first, whose feed-forward is no mixture
    heads: int = 4
    query_rank: int = 64  # features of a position from which the queries of all heads are made
    rank: int = 32  # features of a position from which the keys and values of all heads are made: all that is cached
    head_dim: int = 32  # features of a head's query and key that are not rotated
    rope_dim: int = 16  # those that are; of keys they are the same for all heads
    value_dim: int = 32
    ffn: int = 384  # hidden features of a dense layer
    expert_ffn: int = 96  # of one expert
    experts: int = 16
    chosen: int = 4  # experts of a token
    shared: int = 1  # experts of every token, beside those
    groups: int = 4  # of experts, one on each node
    group_limit: int = 2  # to which a token goes
    scale: float = 2.5  # of the weights of a token's experts, which sum to 1 before
    normalize: bool = True
    context: int = 1024
    rope_theta: float = 10_000.0
    rope_factor: float = 1.0  # by which YaRN stretches the 4,096 positions of the first training; see `yarn.py`
    norm_eps: float = 1e-6
    capacity: float = 0.0  # slots of an expert in each row, in units of the mean load; 0: no token is dropped
    balance: float = 1e-4  # weight of the balance loss of each row, beside the bias that balances without one

    tied = False  # as `llama` has it, and no size
    dropout = 0.0
    lora = 0
    lora_alpha = 0.0

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.dense >= self.layers:
            raise ValueError(f"dense={self.dense} of layers={self.layers} leave no mixture; use 1 to {self.layers - 1}")
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim={self.rope_dim} is odd; rotary embedding needs pairs: {self.rope_dim + 1}, say")
        if self.value_dim > self.query_dim:
            raise ValueError(
                f"value_dim={self.value_dim} is more than head_dim + rope_dim, {self.query_dim}; use at most that"
            )
        if self.experts % self.groups or not 1 <= self.group_limit <= self.groups:
            raise ValueError(
                f"groups={self.groups}, group_limit={self.group_limit} of experts={self.experts}: use groups that "
                "divide the experts, and a limit of 1 to all of them"
            )
        if not self.chosen <= (reach := self.group_limit * self.experts // self.groups):
            raise ValueError(f"chosen={self.chosen} of the {reach} experts in group_limit={self.group_limit} groups")
        if min(self.capacity, self.balance, self.scale) < 0:
            raise ValueError(
                f"capacity={self.capacity}, balance={self.balance}, scale={self.scale}: use numbers from 0"
            )

    @property
    def query_dim(self) -> int:
        """Features of a head's query and key: those that are rotated, and those that are not."""
        return self.head_dim + self.rope_dim

    def _parameters(self, experts: int) -> int:
        norms = 2 * self.dim + self.query_rank + self.rank
        ends = 2 * self.vocab * self.dim + self.dim
        biases = (self.layers - self.dense) * self.experts
        return self._kernels(experts) + self.layers * norms + biases + ends

    def _kernels(self, experts: int) -> int:
        """Of all layers, where a mixture has so many experts."""
        attention = self.dim * (self.query_rank + self.rank + self.rope_dim + self.heads * self.value_dim)
        attention += self.query_rank * self.heads * self.query_dim
        attention += self.rank * self.heads * (self.head_dim + self.value_dim)
        mixture = self.dim * self.experts + 3 * self.dim * self.expert_ffn * (experts + self.shared)
        dense = 3 * self.dim * self.ffn
        return self.layers * attention + self.dense * dense + (self.layers - self.dense) * mixture

    def flops(self, rows: int, length: int) -> float:
        """Operations forward and backward: 6 per position and weight of a matmul that it meets, and 6 T per position,
        head and feature of a query and of a value for attention (as `llama` counts it). Empty slots of experts'
        buffers are not counted.
        """
        weights = self._kernels(self.chosen) + self.vocab * self.dim
        attention = self.layers * self.heads * (self.query_dim + self.value_dim) * length
        return float(rows * length * 6 * (weights + attention))


# The numbers of its `config.json`: https://huggingface.co/deepseek-ai/DeepSeek-V3 (section 4.2 of the paper).
SIZES = {
    "deepseek-tiny": Config(),
    "deepseek-v3": Config(
        vocab=129280,
        dim=7168,
        layers=61,
        dense=3,
        heads=128,
        query_rank=1536,
        rank=512,
        head_dim=128,
        rope_dim=64,
        value_dim=128,
        ffn=18432,
        expert_ffn=2048,
        experts=256,
        chosen=8,
        groups=8,
        group_limit=4,
        context=163840,
        rope_factor=40.0,
    ),
}
