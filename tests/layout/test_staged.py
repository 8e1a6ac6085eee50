"""The layers of a pipeline are stored in the order that `stage_of` defines, in every conversion."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.layout.leaves import Staged
from jaxpar.strategy.schedules.operations import place_of, stage_of

CASES = [(placement, ranks, chunks, stage_size, padding) for placement in ("loop", "V") for ranks in (1, 2, 4)
         for chunks in (1, 2, 3) for stage_size, padding in ((1, 0), (3, 2))]  # fmt: skip


@pytest.mark.parametrize(("placement", "ranks", "chunks", "stage_size", "padding"), CASES)
def test_layers_are_stored_where_stage_of_says(
    placement: str, ranks: int, chunks: int, stage_size: int, padding: int
) -> None:
    """The order of a V was written in four places, and no test compared them."""
    layers = ranks * chunks * stage_size - padding
    stored_dims = (chunks, ranks * stage_size) if chunks > 1 else (ranks * stage_size,)
    form = Staged(layers, stored_dims, v_ranks=ranks if placement == "V" else 0)
    x = jnp.arange(1, layers + 1)
    staged = form.in_stages(x)
    np.testing.assert_array_equal(form.in_order(staged), x)
    if stored_dims == (layers,):
        return  # stored as the model has it
    stored = np.asarray(staged).reshape(chunks, ranks, stage_size)
    for chunk in range(chunks):
        for rank in range(ranks):
            first = stage_of(placement, ranks, rank, chunk) * stage_size  # type: ignore[arg-type]
            expected = [layer + 1 if layer < layers else 0 for layer in range(first, first + stage_size)]
            assert stored[chunk, rank].tolist() == expected


@pytest.mark.parametrize("placement", ["loop", "V"])
def test_a_traced_rank_and_chunk_have_the_same_stage(placement: str) -> None:
    stage = jax.jit(lambda rank, chunk: stage_of(placement, 4, rank, chunk))  # type: ignore[arg-type]
    for chunk in range(3):
        for rank in range(4):
            number = stage_of(placement, 4, rank, chunk)  # type: ignore[arg-type]
            assert int(stage(rank, chunk)) == number
            assert place_of(placement, 4, number) == (rank, chunk)  # type: ignore[arg-type]
