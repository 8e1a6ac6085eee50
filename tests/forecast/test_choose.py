"""docs/choose.md: its table, compiled again for GPUs that are not there."""

import re
from pathlib import Path

import pytest

import jaxpar as jp
from jaxpar.models import named

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "choose.md").read_text()
# Model and devices -> rows, positions, and what is said once for all their strategies.
ROWS = {
    ("gpt2", 8): (64, 1024, "precision=bf16"),
    ("llama3-8b", 8): (32, 4096, "precision=bf16,remat=dots"),
    ("llama3-8b", 64): (256, 4096, "precision=bf16,remat=dots"),
}
LINE = r"^\| `([\w.-]+)` \| (\d+) \| `([^`]+)` \| ([\d.]+)( \(too much\))? \| ([\d.,]+) \| ([\d.]+)% \|$"
TABLE = [
    (m[1], int(m[2]), m[3], float(m[4]), m[5] is None, float(m[6].replace(",", "")), float(m[7]))
    for m in re.finditer(LINE, PAGE, re.MULTILINE)
]


def test_the_table_is_read() -> None:
    assert {(model, devices) for model, devices, *_ in TABLE} == set(ROWS)
    assert len(TABLE) == PAGE.count("\n| `")


def test_what_the_tree_says_stands_in_a_table_below_it() -> None:
    tree, below = PAGE.split("## In numbers")
    times = re.search(r"takes ([\d.]+), ([\d.]+) and ([\d.]+) ms", tree)
    assert times
    assert [float(x) for x in times.groups()] == [ms for model, *_, ms, _ in TABLE if model == "gpt2"]
    times = re.search(r"`hsdp` takes ([\d,]+) ms a step and `fsdp` ([\d,]+)", tree)
    assert times
    by_name = {name: ms for _, devices, name, *_, ms, _ in TABLE if devices == 64}
    assert [float(x.replace(",", "")) for x in times.groups()] == [by_name["hsdp"], by_name["fsdp"]]
    for gigabytes in ("126.5", "42.2", "54.4", "21.8"):
        assert gigabytes in tree
        assert f"sends {gigabytes:>5} GB" in below  # which tests/test_docs.py runs


def test_the_home_page_says_the_same() -> None:
    lines = {name: rest for model, devices, name, *rest in TABLE if (model, devices) == ("llama3-8b", 8)}
    home = " ".join((DOCS / "index.md").read_text().split())
    fsdp, ddp = lines["fsdp"], lines["ddp"]
    assert f"`ddp` needs {ddp[0]} GB per GPU, `fsdp` {fsdp[0]} of the usable 78.1," in home
    assert f"with a predicted MFU of {fsdp[3]}%" in home
    assert ROWS["llama3-8b", 8] == (32, 4096, "precision=bf16,remat=dots")
    assert (ddp[1], fsdp[1]) == (False, True)


@pytest.mark.battery
@pytest.mark.cuda_compiler
@pytest.mark.parametrize(("model", "devices"), ROWS)
def test_the_table_is_what_plan_finds(model: str, devices: int) -> None:
    chosen = named(model)
    rows, length, options = ROWS[model, devices]
    shown = {name: rest for named_model, n, name, *rest in TABLE if (named_model, n) == (model, devices)}
    plan = jp.plan(
        chosen.model,
        chosen.example(rows, length),
        f"{devices}xH100",
        flops=chosen.flops(rows, length),
        strategies=[f"{name},{options}" for name in shown],
        cache=False,
    )
    lines = {line.strategy: line for line in plan.lines}
    lines = {name: lines[jp.Strategy.parse(f"{name},{options}")] for name in shown}
    for name, (gigabytes, fits, milliseconds, mfu) in shown.items():
        line = lines[name]
        assert line.fits == fits
        assert line.memory["total"] / 1e9 == pytest.approx(gigabytes, rel=0.01, abs=0.05)  # as it is rounded
        assert line.seconds * 1e3 == pytest.approx(milliseconds, rel=0.03)
        assert line.prediction["mfu"] == pytest.approx(mfu / 100, rel=0.03)
    if (model, devices) == ("llama3-8b", 8):
        recomputation = re.search(r"activations, for (\d+) of the [\d,]+ ms of `zero1`", PAGE)
        assert recomputation
        assert lines["zero1"].costs()["recomputation"] * 1e3 == pytest.approx(float(recomputation[1]), rel=0.05)
