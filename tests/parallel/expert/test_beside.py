"""1f1b-overlap: a forward and a backward side by side train mixtures as one device does, with the same collectives."""

import expert_cells as cells
import pytest

FIRST = ("dropless", "pipe=2,expert=2,microbatches=2,schedule=1f1b-overlap,remat=layer")
BESIDE = (
    "pipe=2,expert=2,microbatches=2,schedule=1f1b-overlap,remat=layer",
    "pipe=2,expert=2,fsdp=2,microbatches=4,schedule=1f1b-overlap",
    "pipe=2,expert=2,tensor=2,microbatches=4,schedule=1f1b-overlap,remat=layer",
    "pipe=2,expert=2,fsdp=2,zero=1,microbatches=4,chunks=2,schedule=1f1b-overlap",
)
CELLS = [(name, text) for name in cells.FORMS for text in BESIDE if (name, text) != FIRST]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [FIRST, *(pytest.param(*cell, marks=pytest.mark.battery) for cell in CELLS)],
    ids=lambda value: value.replace(",", "-"),
)
def test_cell(name: str, text: str) -> None:
    cells.check_cell(name, text)
