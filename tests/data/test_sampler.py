"""The sampler beside torch's DistributedSampler, and its positions: whoever goes on reads what is left."""

import json
from collections import Counter

import numpy as np
import pytest

from jaxpar.data import Position, Sampler

SIZES, RANKS = range(1, 41), range(1, 9)


class _Order:
    """Stands for torch's permutation: a data set whose rows are numbered in the order that ours has."""

    def __init__(self, order: np.ndarray):
        self.order = order

    def __len__(self) -> int:
        return len(self.order)


@pytest.mark.xdist_group("torch")
@pytest.mark.parametrize("last", ["pad", "drop_last"])
def test_ranks_get_the_rows_that_torch_gives_them(last: str) -> None:
    distributed = pytest.importorskip("torch.utils.data.distributed", reason="PyTorch is not installed (make hf)")
    for size in SIZES:
        for epoch, shuffle in ((0, False), (1, True)):
            ours = Sampler(size, last, shuffle, seed=3)
            order = ours.order(epoch)
            assert sorted(order.tolist()) == list(range(size))
            for ranks in RANKS:
                for rank in range(ranks):
                    theirs = distributed.DistributedSampler(
                        _Order(order), ranks, rank, shuffle=False, drop_last=last == "drop_last"
                    )
                    assert ours.of_rank(rank, ranks, epoch).tolist() == order[list(theirs)].tolist()


@pytest.mark.parametrize("last", ["pad", "drop_last"])
def test_batches_of_one_row_a_rank_are_what_torch_gives_the_ranks(last: str) -> None:
    for size in SIZES:
        sampler = Sampler(size, last)
        for ranks in RANKS:
            if last == "drop_last" and ranks > size:
                continue
            each = len(sampler.of_rank(0, ranks))
            found = [sampler.batch(sampler.after(number, ranks), ranks)[0] for number in range(each)]
            for rank in range(ranks):
                assert [batch[rank] for batch in found] == sampler.of_rank(rank, ranks).tolist()


def rows_left(sampler: Sampler, at: Position, rows: int) -> list[int]:
    """Rows that count, from a position to the end of its epoch."""
    epoch, found = at.epoch, []
    while at.epoch == epoch:
        taken, mask, after = sampler.batch(at, rows)
        if sampler.last == "drop_last" and at.row + rows > sampler.size:
            break
        found += taken[mask == 1].tolist()
        at = after
    return found


def test_what_is_left_is_the_same_with_any_other_number_of_rows() -> None:
    """After any step, in batches of any size: hosts, devices and microbatches change no more than that."""
    for size in (1, 2, 7, 12, 23):
        sampler = Sampler(size, seed=1)
        for rows in range(1, 11):
            at, read = Position(), []
            while at.epoch < 2:
                saved = Position.read(json.loads(json.dumps(at._asdict())))
                for others in range(1, 11):
                    order = sampler.order(at.epoch).tolist()
                    assert rows_left(sampler, saved, others) == order[at.row :]
                taken, mask, at = sampler.batch(at, rows)
                read += taken[mask == 1].tolist()
            assert Counter(read) == dict.fromkeys(range(size), 2)  # every row once in each of two epochs


@pytest.mark.parametrize("last", ["mask", "pad", "drop_last"])
def test_a_batch_is_found_by_its_number(last: str) -> None:
    for size, rows in ((12, 4), (13, 4), (5, 5), (7, 3), (3, 2)):
        sampler, at = Sampler(size, last, seed=2), Position()
        for number in range(12):
            found = sampler.batch(sampler.after(number, rows), rows)
            taken, mask, at = sampler.batch(at, rows)
            assert (taken == found[0]).all()
            assert (mask == found[1]).all()


def test_epochs_differ_and_seeds_do() -> None:
    one = Sampler(100, seed=1)
    assert one.order(0).tolist() != one.order(1).tolist()
    assert one.order(0).tolist() != Sampler(100, seed=2).order(0).tolist()
    assert Sampler(100, shuffle=False).order(5).tolist() == list(range(100))


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(ValueError, match=r"last='drop': use one of mask, pad, drop_last \(did you mean 'drop_last'"):
        Sampler(3, "drop")
    with pytest.raises(ValueError, match="size=0 leaves no rows"):
        Sampler(0)
    with pytest.raises(ValueError, match="of 3 rows no batch of 4 is full"):
        Sampler(3, "drop_last").batch(Position(), 4)
    with pytest.raises(ValueError, match=r"rank=4 of ranks=4: number them 0 to 3"):
        Sampler(3).of_rank(4, 4)
    for state in ({"epoch": 1}, {"epoch": 1, "row": -1}, {"epoch": 1, "row": 0.5}):
        with pytest.raises(ValueError, match="it needs epoch and row, whole numbers from 0"):
            Position.read(state)
