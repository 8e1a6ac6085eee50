"""`experiments/gpu.py` on a CPU, at its smallest: what will run on a GPU some day runs, and says what it found."""

import json
from pathlib import Path

import gpu_attention
import gpu_cells
import gpu_profile
import gpu_report
import gpu_speed
import gpu_worker
import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_cells(tmp_path: Path) -> None:
    """The last of the simulated devices plays the GPU, the first is the CPU."""
    record = gpu_report.Record(tmp_path, "cells", budget=1000)
    gpu_cells.run(record, ("function",), few=True)
    assert jax.config.jax_default_matmul_precision is None  # predictions read it
    assert [row.get("ok") for row in record.rows] == [True] * 3, record.rows
    assert json.loads((tmp_path / "cells.json").read_text())["rows"] == record.rows
    assert "zero2,microbatches=2,precision=bf16" in (tmp_path / "cells.txt").read_text()


def test_budget_and_errors(tmp_path: Path) -> None:
    """What is not begun, and what runs out of memory, are rows that say so."""
    record = gpu_report.Record(tmp_path, "cells", budget=-1)
    gpu_cells.run(record, ("function",), few=True)
    assert all("budget" in row["error"] for row in record.rows)
    assert gpu_report.said(RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhile")).startswith("OUT OF MEMORY")
    assert not gpu_report.said(ValueError("no")).startswith("OUT")


def test_attention() -> None:
    odd, packed = gpu_attention.TINY
    for case, dtype in ((odd, "bfloat16"), (packed, "float16")):
        found = gpu_attention.measure(case, dtype, rounds=1)
        assert found["ok"], found
        assert found["by"] == "XLA"
        assert found["peak_bytes"] is None  # a CPU device does not count


@pytest.mark.parametrize(
    ("model", "contender"),
    [
        ("gpt2", "fsdp,gather=int8,reduce=int8"),
        ("mixtral-8x7b", "expert=-1,precision=fp8"),
        ("gpt2", "single,precision=fp8"),
        ("gpt2", "plain"),
    ],
)
def test_speed(model: str, contender: str) -> None:
    """A contender is ready, takes steps, and says what they took; both learn from the same loss."""
    spec = gpu_speed.spec_of(model, None, tiny=True)
    first, steps = gpu_worker.make({**spec, "tiny": False, "contender": contender})
    found = steps(2)
    assert found["seconds"] > 0
    assert found["tokens"] == spec["rows"] * spec["length"]
    assert found["loss"] == pytest.approx(np.log(64), rel=0.05)
    assert ("explained_GB" in first) == (contender != "plain")


def test_unknown_model() -> None:
    with pytest.raises(ValueError, match="'gpt3': use one of gpt2, "):
        gpu_speed.spec_of("gpt3", None, tiny=False)


@pytest.mark.slow
def test_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_profile, "LARGEST", 2**30)  # a trace holds every program of the process, of other tests too
    record = gpu_report.Record(tmp_path, "profile", budget=1000)
    gpu_profile.run(record, "gpt2", "single", tiny=True)
    assert "error" not in record.rows[0], record.rows
    assert (tmp_path / "profile.xplane.pb").stat().st_size == record.about["trace_bytes"] > 0
    shares = [row["share"] for row in record.rows if row["what"].startswith("share of")]
    assert sum(shares) == pytest.approx(1)
    kinds = {
        "nvjet_tst_128x256_64x4_2x1 (custom-call.12)": "matmul",
        "gemm_fusion_dot_7": "matmul",
        "ncclDevKernel_AllGather_RING_LL": "collective",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma": "attention",
        "loop_add_fusion_3": "other",
    }
    assert {name: gpu_profile.kind_of(name) for name in kinds} == kinds
    assert gpu_profile.gaps([(0, 4), (2, 6), (9, 10), (3, 5)]) == [3]


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without tyro is told before anything imports it, and how to bring it."""
    find = gpu_report.importlib.util.find_spec
    monkeypatch.setattr(gpu_report.importlib.util, "find_spec", lambda name: None if name == "tyro" else find(name))
    assert gpu_report.missing() == ["tyro>=1.0"]
    assert "pip download" in gpu_report.how_to_bring(gpu_report.missing())
    assert "'tyro>=1.0'" in gpu_report.how_to_bring(gpu_report.missing())


def test_command_line() -> None:
    """Its commands exist, and are all in docs/gpu.md."""
    text = (ROOT / "docs" / "gpu.md").read_text()
    for command in ("train", "cells", "attention", "speed", "profile"):
        assert f"gpu.py {command}" in text


def test_figures() -> None:
    """What docs/gpu.md says of a step is what `gpu.json` records, at as many digits."""
    record = json.loads((ROOT / "experiments" / "gpu.json").read_text())
    rows = [row for name, rows in record["rows"].items() if name.startswith(("speed", "predicted")) for row in rows]
    known = {f"{value * by:,.{digits}f}" for row in rows for value in row.values() if isinstance(value, float)
             for by in (1, 100) for digits in range(3)}  # fmt: skip
    table = (ROOT / "docs" / "gpu.md").read_text().split("| model |")[1].split("\n\n")[0]
    cells = [cell.strip(" %") for line in table.splitlines()[2:] for cell in line.split("|")[3:]]
    shown = [cell for cell in cells if cell]
    assert len(shown) > 60
    assert not [cell for cell in shown if cell not in known]
