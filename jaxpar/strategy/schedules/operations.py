"""What tables of pipelines are made of: operations, and where a rank's chunks lie among the stages."""

from typing import Any, Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
WORDS = {"F": "forward", "B": "backward", "I": "gradient of inputs", "W": "gradient of weights"}
TIME = {"F": 1, "B": 2, "I": 1, "W": 1}  # of each kind of operation, with a chunk's forward as the unit
MOST = 1 << 16  # ranks, microbatches, chunks: tables of more would fill the memory before anything is said


class Op(NamedTuple):
    """What one rank does with one microbatch in one of its chunks of layers.

    Attributes:
      kind: F, the forward; B, the whole backward; or its halves (Qi et al. 2023, Zero Bubble Pipeline Parallelism,
        section 2): I, the gradient of the chunk's inputs, which the rank before waits for, and W, that of its weights,
        for which nobody waits.
      chunk: of this rank, counted in the order of the layers.
      microbatch: its number.
    """

    kind: Kind
    chunk: int
    microbatch: int


Table = tuple[tuple[tuple[Op, ...], ...], ...]  # [slot][rank]: none, one, or a forward and then a whole backward
Orders = list[list[Op]]  # of each rank, what it does, one after the other

Placement = Literal["loop", "V"]
PLACEMENTS: tuple[Placement, ...] = ("loop", "V")


class Given(NamedTuple):
    """A table that stands in no list, and its placement."""

    table: Table
    placement: Placement


class StagePlace(NamedTuple):
    """A chunk of a rank."""

    rank: int
    chunk: int


def stage_of(placement: Placement, ranks: int, rank: Any, chunk: Any) -> Any:
    """Return the number of a rank's chunk among all chunks, in the order of the layers: integers, or traced ones.

    "loop": chunk c of rank s is stage c p + s (Narayanan et al. 2021, section 2.2.2). "V": odd chunks run backwards
    through the ranks, so that rank s holds stages s and 2 p - 1 - s (Qi et al. 2023, section 6).
    """
    stage = chunk * ranks + rank
    if placement == "V":  # in an odd chunk rank becomes ranks - 1 - rank; without a branch, as both may be traced
        stage += (chunk % 2) * (ranks - 1 - 2 * rank)
    return stage


def place_of(placement: Placement, ranks: int, stage: int) -> StagePlace:
    """The rank and the chunk of a stage: the inverse of `stage_of`."""
    chunk, rest = divmod(stage, ranks)
    return StagePlace(ranks - 1 - rest if placement == "V" and chunk % 2 else rest, chunk)


def toward(kind: Kind, stage: int, stages: int) -> int | None:
    """The stage that waits for what an operation makes; None at the ends of the model and for W."""
    after = {"F": stage + 1, "B": stage - 1, "I": stage - 1}.get(kind)
    return after if after is not None and 0 <= after < stages else None


def neighbour(
    placement: Placement, ranks: int, chunks: int, kind: Kind, rank: int, chunk: int
) -> tuple[StagePlace | None, int]:
    """The place that waits for what an operation makes, or None; and the way there.

    The way is 1 to the next rank, -1 to the one before, around the ring; 0 stays on the rank.

    "loop": activations go to the next rank, cotangents to the one before. "V": activations of even chunks go to the
    next rank, those of odd ones to the one before, cotangents the other way; at the turn they stay.
    """
    to = toward(kind, stage_of(placement, ranks, rank, chunk), ranks * chunks)
    if to is None:
        return None, 0
    place = place_of(placement, ranks, to)
    if placement == "loop" and ranks > 1:
        return place, 1 if kind == "F" else -1
    return place, place.rank - rank
