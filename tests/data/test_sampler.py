"""The sampler agrees with torch's DistributedSampler, and a run that continues from a position reads the rest."""

import json
from collections import Counter

import pytest

from jaxpar.data import Position, Sampler

SIZES, RANKS = range(1, 41), range(1, 9)


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
                    drop_last = last == "drop_last"
                    theirs = distributed.DistributedSampler(order, ranks, rank, shuffle=False, drop_last=drop_last)
                    assert ours.of_rank(rank, ranks, epoch).tolist() == order[list(theirs)].tolist()


@pytest.mark.parametrize("last", ["pad", "drop_last"])
def test_batches_of_one_row_a_rank_are_what_torch_gives_the_ranks(last: str) -> None:
    for size in SIZES:
        sampler = Sampler(size, last)
        for ranks in RANKS:
            if last == "drop_last" and ranks > size:
                continue
            num_batches = len(sampler.of_rank(0, ranks))
            batches = [sampler.batch(sampler.after(number, ranks), ranks)[0] for number in range(num_batches)]
            for rank in range(ranks):
                assert [batch[rank] for batch in batches] == sampler.of_rank(rank, ranks).tolist()


def remaining_rows(sampler: Sampler, position: Position, rows: int) -> list[int]:
    """Return the rows that count from a position to the end of its epoch."""
    epoch, remaining = position.epoch, []
    while position.epoch == epoch:
        indices, mask, next_position = sampler.batch(position, rows)
        if sampler.last == "drop_last" and position.row + rows > sampler.size:
            break
        remaining += indices[mask == 1].tolist()
        position = next_position
    return remaining


def test_what_is_left_is_the_same_with_any_other_number_of_rows() -> None:
    """A run may continue after any step with any batch size. Hosts, devices and microbatches change only that."""
    for size in (1, 2, 7, 12, 23):
        sampler = Sampler(size, seed=1)
        for rows in range(1, 11):
            position, read = Position(), []
            while position.epoch < 2:
                saved = Position.read(json.loads(json.dumps(position._asdict())))
                for new_rows in range(1, 11):
                    order = sampler.order(position.epoch).tolist()
                    assert remaining_rows(sampler, saved, new_rows) == order[position.row :]
                indices, mask, position = sampler.batch(position, rows)
                read += indices[mask == 1].tolist()
            assert Counter(read) == dict.fromkeys(range(size), 2)  # every row once in each of two epochs


@pytest.mark.parametrize("last", ["mask", "pad", "drop_last"])
def test_a_batch_is_found_by_its_number(last: str) -> None:
    for size, rows in ((12, 4), (13, 4), (5, 5), (7, 3), (3, 2)):
        sampler, position = Sampler(size, last, seed=2), Position()
        for number in range(12):
            numbered_indices, numbered_mask, _ = sampler.batch(sampler.after(number, rows), rows)
            indices, mask, position = sampler.batch(position, rows)
            assert (indices == numbered_indices).all()
            assert (mask == numbered_mask).all()


def test_epochs_differ_and_seeds_do() -> None:
    sampler = Sampler(100, seed=1)
    assert sampler.order(0).tolist() != sampler.order(1).tolist()
    assert sampler.order(0).tolist() != Sampler(100, seed=2).order(0).tolist()
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
