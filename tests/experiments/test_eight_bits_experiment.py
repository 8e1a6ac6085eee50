"""What 8 bits cost: the losses that are kept, and what is drawn of them."""

import json
from pathlib import Path

import eight_bits
import pytest

import jaxpar as jp


@pytest.mark.parametrize("name", eight_bits.TRIALS)
def test_less_than_a_percent_after_a_thousand_steps(name: str) -> None:
    found = json.loads(eight_bits.RECORD.read_text())
    _, base, change = eight_bits.TRIALS[name]
    low = eight_bits.low_of(base, change)
    assert jp.Strategy.parse(low) != jp.Strategy.parse(base)
    assert found[low].keys() == found[base].keys() == {"200", "400", "600", "800", "1000"}
    assert abs(eight_bits.more(found[low], found[base])["1000"]) < eight_bits.ALLOWED


def test_a_choice_that_both_name_is_the_changes() -> None:
    assert eight_bits.low_of("fsdp=2,precision=bf16", "precision=fp8,gather=fp8") == "fsdp=2,precision=fp8,gather=fp8"
    assert eight_bits.more({200: 2.02}, {200: 2.0}) == {200: pytest.approx(1.0)}


def test_part_of_them_is_drawn(tmp_path: Path) -> None:
    trials = {"gather=int8, weights": eight_bits.TRIALS["gather=int8, weights"]}
    _, base, change = trials["gather=int8, weights"]
    eight_bits.draw(
        trials, {base: {1: 3.0, 2: 2.0}, eight_bits.low_of(base, change): {1: 3.0, 2: 2.01}}, tmp_path / "x"
    )
    assert (tmp_path / "x.svg").exists()
    assert (tmp_path / "x-dark.png").exists()
