"""`experiments/megatron_memory.py`: the paper's sums, ours, and what steps keep, traced and compiled."""

import json
from pathlib import Path

import jax
import matplotlib.image
import megatron_memory as experiment
import pytest
from kept import kept
from megatron_sums import Setting, terms, total

from jaxpar.hardware.devices import gpu_topology
from jaxpar.models import gpt

# cuDNN takes head_dims that are multiples of 8; its lengths are even.
OPTIONS = experiment.Options(dim=144, heads=6, length=26, rows=3, layers=(3, 5), tensor=(1, 2))
SETTINGS = [
    # Without the CUDA packages `jp.attention` is XLA's, which keeps its arguments alone.
    pytest.param(s, marks=[] if s.plain or s.remat != "none" else pytest.mark.cuda_compiler, id=f"{s}")
    for s in experiment.settings(OPTIONS.tensor)
]


@pytest.mark.parametrize(("t", "sequence"), [(1, False), (2, False), (8, False), (2, True), (8, True)])
def test_sums_of_the_paper(t: int, sequence: bool) -> None:
    """Table 2, row by row, of the 22B model (table 3): a = 64, h = 6144, s = 2048."""
    config, s = gpt.Config(dim=6144, heads=64, context=2048), 2048
    scores = 5 * 64 * s / 6144
    of = lambda plain, remat: Setting(t, sequence, plain, remat)
    everything, selective, full = (of(True, "none"), of(False, "none"), of(False, "layer"))
    found = [total(terms(setting, config, s), setting, ours=False) for setting in (everything, selective, full)]
    if sequence:
        assert found == pytest.approx([(34 + scores) / t, 34 / t, 2 / t])
    else:
        assert found == pytest.approx([10 + 24 / t + scores / t, 10 + 24 / t, 2])


@pytest.mark.parametrize("setting", SETTINGS)
def test_arrays_that_a_traced_layer_keeps(setting: Setting) -> None:
    step, batch = experiment.step_of(setting, OPTIONS, 3, jax.devices())
    config = gpt.Config(dim=OPTIONS.dim, heads=OPTIONS.heads)
    expected = total(terms(setting, config, OPTIONS.length), setting, ours=True)
    found = sum(one.bytes for one in kept(step, batch, 3))
    assert found == pytest.approx(expected * OPTIONS.length * OPTIONS.rows * OPTIONS.dim)


def test_arrays_have_a_source() -> None:
    step, batch = experiment.step_of(Setting(1, False, True, "none"), OPTIONS, 3, jax.devices())
    arrays = kept(step, batch, 3)
    wide = [one for one in arrays if one.type == "bfloat16[3,26,576]"]
    assert sum("models/gpt.py" in one.source for one in wide) == 1  # the input of GELU, which makes its result again
    assert {one.bytes for one in wide} == {2 * 3 * 26 * 576}
    assert not any("normalization.py" in one.source for one in arrays)  # what Flax keeps is the line that calls it


@pytest.mark.battery  # what is traced is held to the same sums above, for every setting
@pytest.mark.cuda_compiler
@pytest.mark.parametrize("setting", [Setting(1, False, True, "none"), Setting(2, True, False, "none")], ids=str)
def test_temporaries_of_a_compiled_layer(setting: Setting) -> None:
    options = experiment.Options(dim=256, heads=2, length=512, layers=(12, 36))
    row = experiment.measure(setting, options, gpu_topology("2xH100"))
    assert row.compiled == pytest.approx(row.expected, rel=0.01)


@pytest.mark.battery
def test_quick(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    sizes = {"dim": 64, "heads": 8, "length": 32, "tensor": (8,)}
    experiment.main(experiment.Options(quick=True, arrays=True, out=tmp_path, **sizes))
    rows = json.loads((tmp_path / "megatron_memory.json").read_text())["rows"]
    assert len(rows) == 9
    assert not any(row["compiled"] for row in rows)
    plain = [row for row in rows if row["setting"]["plain"]]
    assert [row["traced"] for row in plain] == pytest.approx([row["expected"] for row in plain])
    assert "MB bfloat16[4,32,256]" in capsys.readouterr().out
    for theme in ("", "-dark"):
        assert matplotlib.image.imread(tmp_path / f"megatron_memory{theme}.png").shape[1] > 1000
