"""Context over two processes, by a ring, with logits in chunks, gives the gradients of one process."""

from pathlib import Path

import pytest
from two_processes import check_two


@pytest.mark.battery
def test_gradients_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    check_two(tmp_path / "grads.npz", "context_cells", "llama_gqa", "context=2,attention=ring,logits=8", 4)
