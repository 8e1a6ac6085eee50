"""The parts of a pipeline's table: operations, and the stages that each rank's chunks are.

The layers are cut into p v stages, v of them on each of p ranks. A rank calls its stages chunks. With p = 4, v = 2:

    placement "loop"                        placement "V"
    rank        0  1  2  3                  rank        0  1  2  3
    chunk 0     0  1  2  3   stages         chunk 0     0  1  2  3   stages, downwards
    chunk 1     4  5  6  7                  chunk 1     7  6  5  4   and back up
"""

from typing import Any, Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
WORDS = {"F": "forward", "B": "backward", "I": "gradient of inputs", "W": "gradient of weights"}
TIME = {"F": 1, "B": 2, "I": 1, "W": 1}  # of each kind of operation, with a chunk's forward as the unit
MOST = 1 << 16  # ranks, microbatches, chunks: a larger table would fill the memory before an error could be raised


class Op(NamedTuple):
    """The work of one rank on one microbatch in one of its chunks of layers.

    Attributes:
      kind: F, the forward; B, the whole backward; or its halves (Qi et al. 2023, Zero Bubble Pipeline Parallelism,
        section 2): I, the gradient of the chunk's inputs, for which the previous rank waits, and W, the gradient of its
        weights, for which no rank waits.
      chunk: the number of the chunk among this rank's chunks, in the order of the layers.
      microbatch: the number of the microbatch.
    """

    kind: Kind
    chunk: int
    microbatch: int


Table = tuple[tuple[tuple[Op, ...], ...], ...]  # [slot][rank]: no operation, one, or F and then B
Orders = list[list[Op]]  # the operations of each rank, in order

Placement = Literal["loop", "V"]
PLACEMENTS: tuple[Placement, ...] = ("loop", "V")


class Given(NamedTuple):
    """A table that comes from outside `SCHEDULES`, and its placement."""

    table: Table
    placement: Placement


class StagePlace(NamedTuple):
    """The rank that holds a stage, and the stage's number among this rank's chunks."""

    rank: int
    chunk: int


def stage_of(placement: Placement, ranks: int, rank: Any, chunk: Any) -> Any:
    """Return the stage of a rank's chunk: its number among all chunks, in the order of the layers.

    "loop": chunk c of rank s is stage c p + s (Narayanan et al. 2021, section 2.2.2). "V": odd chunks run backwards
    through the ranks, so that rank s holds stages s and 2 p - 1 - s (Qi et al. 2023, section 6).

    The parameters are stored in this order by `Staged` (`layout/leaves.py`), and checkpoints read them by it
    (`layout/boxes.py`).

    Args:
      placement: "loop" or "V".
      ranks: p, the number of ranks.
      rank: s, an integer or a traced one.
      chunk: c, an integer or a traced one.
    """
    stage = chunk * ranks + rank
    if placement == "V":
        # In an odd chunk `rank` becomes `ranks - 1 - rank`. There is no branch, since both may be traced.
        stage += (chunk % 2) * (ranks - 1 - 2 * rank)
    return stage


def place_of(placement: Placement, ranks: int, stage: int) -> StagePlace:
    """Return the rank and the chunk of a stage: the inverse of `stage_of`."""
    chunk, column = divmod(stage, ranks)
    return StagePlace(ranks - 1 - column if placement == "V" and chunk % 2 else column, chunk)


def toward(kind: Kind, stage: int, stages: int) -> int | None:
    """Return the stage that waits for an operation's result; None at the ends of the model and for W."""
    # W sends nothing: the gradient of weights stays on its rank.
    receiver = {"F": stage + 1, "B": stage - 1, "I": stage - 1}.get(kind)
    return receiver if receiver is not None and 0 <= receiver < stages else None


def neighbour(
    placement: Placement, ranks: int, chunks: int, kind: Kind, rank: int, chunk: int
) -> tuple[StagePlace | None, int]:
    """Return where an operation's result is needed, and the way there.

    "loop": activations go to the next rank, cotangents to the previous one. "V": activations of even chunks go to the
    next rank, and of odd chunks to the previous one; cotangents go the other way. At the bend of the V both stay on the
    rank.

    Returns:
      (place, way): the place is None if no stage waits for the result. The way is 1 to the next rank, -1 to the
      previous one, both around the ring, and 0 if the message stays on the rank.
    """
    receiver = toward(kind, stage_of(placement, ranks, rank, chunk), ranks * chunks)
    if receiver is None:
        return None, 0
    place = place_of(placement, ranks, receiver)
    if placement == "loop" and ranks > 1:
        # From the last rank the ring leads to rank 0, so that a difference of ranks would not be the way.
        return place, 1 if kind == "F" else -1
    # On a V the receiver is one rank away, or on the same rank at the bend, as on a loop of one rank.
    return place, place.rank - rank
