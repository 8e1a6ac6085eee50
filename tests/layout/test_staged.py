"""The layers of a pipeline are stored in the order that `stage_of` defines, in every conversion."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.layout.leaves import Staged
from jaxpar.strategy.schedules.operations import place_of, stage_of


def test_layers_are_stored_where_stage_of_says() -> None:
    """The order of a V was written in four places, and no test compared them."""
    for placement, ranks, chunks, (stage_size, padding) in itertools.product(
        ("loop", "V"), (1, 2, 4), (1, 2, 3), ((1, 0), (3, 2))
    ):
        layers = ranks * chunks * stage_size - padding
        stored_dims = (chunks, ranks * stage_size) if chunks > 1 else (ranks * stage_size,)
        form = Staged(layers, stored_dims, v_ranks=ranks if placement == "V" else 0)
        x = jnp.arange(1, layers + 1)
        staged = form.in_stages(x)
        np.testing.assert_array_equal(form.in_order(staged), x)
        if stored_dims == (layers,):
            continue  # stored as the model has it
        stored = np.asarray(staged).reshape(chunks, ranks, stage_size)
        for chunk, rank in itertools.product(range(chunks), range(ranks)):
            first = stage_of(placement, ranks, rank, chunk) * stage_size  # type: ignore[arg-type]
            expected = [layer + 1 if layer < layers else 0 for layer in range(first, first + stage_size)]
            assert stored[chunk, rank].tolist() == expected


@pytest.mark.parametrize("placement", ["loop", "V"])
def test_a_traced_rank_and_chunk_have_the_same_stage(placement: str) -> None:
    stage = jax.jit(lambda rank, chunk: stage_of(placement, 4, rank, chunk))  # type: ignore[arg-type]
    for chunk, rank in itertools.product(range(3), range(4)):
        number = stage_of(placement, 4, rank, chunk)  # type: ignore[arg-type]
        assert int(stage(rank, chunk)) == number
        assert place_of(placement, 4, number) == (rank, chunk)  # type: ignore[arg-type]
