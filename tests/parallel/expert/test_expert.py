"""The expert axis trains mixtures that know nothing of it as one device does.

A cell compiles one step and checks gradients, three steps of SGD with momentum, bytes at rest, and the collectives.
"""

import expert_cells as cells
import pytest

FIRST = (
    ("dropless", "pipe=2,expert=2,fsdp=2,microbatches=2"),
    ("einsum", "expert=2,tensor=2"),
)
BESIDE = (
    "expert=2",
    "expert=4,data=2",
    "expert=8",
    "expert=4,fsdp=2,zero=1,microbatches=2",
    "expert=2,fsdp=2,zero=2,microbatches=2",
    "expert=2,fsdp=2,data=2,remat=layer",
    "expert=2,fsdp=2,tensor=2",
    "pipe=2,expert=2,tensor=2,microbatches=4",
    "pipe=2,expert=4,microbatches=4,schedule=zb-h1",
    "pipe=2,expert=2,fsdp=2,microbatches=4,schedule=zb-h1,remat=layer",
)


def battery() -> list[tuple[str, str]]:
    return [(name, text) for name in cells.FORMS for text in BESIDE]


@pytest.mark.parametrize(
    ("name", "text"),
    [*FIRST, *(pytest.param(*cell, marks=pytest.mark.battery) for cell in battery() if cell not in FIRST)],
    ids=lambda value: value.replace(",", "-"),
)
def test_cell(name: str, text: str) -> None:
    cells.check_cell(name, text)
