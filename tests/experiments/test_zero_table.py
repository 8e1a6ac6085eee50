"""`experiments/zero_table.py`: the paper's table is its closed forms, and compiled steps hold what ours say."""

import json
from pathlib import Path

import matplotlib.image
import pytest
import zero_table

from jaxpar.hardware.devices import gpu_topology
from jaxpar.models import named

SIZES = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
# Bytes per parameter: Rajbhandari et al. 2020, section 5, with K = 12.
PAPER = {"Pos": (4, 12), "Pos+g": (2, 14), "Pos+g+p": (0, 16)}
OURS = PAPER | {"Pos+g+p": (0, 14)}


@pytest.mark.parametrize("model", SIZES)
def test_the_printed_table_is_the_closed_form(model: str) -> None:
    """Each number is rounded to its last digit, or cut off there."""
    for n, row in zero_table.PRINTED[model].items():
        for printed, (whole, shared), stage in zip(row, PAPER.values(), zero_table.STAGES, strict=True):
            rest = SIZES[model] / 1e9 * (whole + shared / n) - printed
            unit = 10.0 ** -len(str(printed).partition(".")[2])
            assert -0.501 * unit < rest < unit
            assert stage.paper(n) == whole + shared / n


@pytest.mark.parametrize("model", SIZES)
def test_models_have_the_size_of_the_paper(model: str) -> None:
    sizes = zero_table.MODELS[model]
    assert named("gpt2", **sizes).parameters == pytest.approx(SIZES[model], rel=2e-4)
    assert sizes["dim"] % 1024 == 0


@pytest.mark.slow
@pytest.mark.cuda_compiler
def test_every_cell_by_its_layout(tmp_path: Path) -> None:
    """Layouts of all three models hold the closed form, and what the paper printed where it counts alike."""
    cells = zero_table.main(zero_table.Options(compile=(), out=tmp_path))
    assert len(cells) == 3 * 6 * 3
    for cell in cells:
        whole, shared = OURS[cell.stage] if cell.devices > 1 else (0, 14)
        assert cell.found == pytest.approx(SIZES[cell.model] * (whole + shared / cell.devices), rel=1e-3)
        if cell.stage != "Pos+g+p" and cell.devices > 1:
            assert cell.printed is not None
            assert cell.found == pytest.approx(cell.printed, rel=0.01)
    for theme in ("", "-dark"):
        assert matplotlib.image.imread(tmp_path / f"zero_table{theme}.png").shape[1] > 1000
        assert (tmp_path / f"zero_table{theme}.svg").stat().st_size > 10_000


@pytest.mark.battery
def test_quick(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    zero_table.main(zero_table.Options(quick=True, out=tmp_path))
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100
    record = json.loads((tmp_path / "zero_table.json").read_text())
    size = record["parameters"]["gpt-tiny"]
    assert size == named("gpt-tiny").parameters
    assert [cell["devices"] for cell in record["cells"]] == [1, 1, 1, 8, 8, 8]
    for cell in record["cells"]:
        whole, shared = OURS[cell["stage"]] if cell["devices"] > 1 else (0, 14)
        found = cell["arguments"] + cell["gradients"]
        assert cell["found"] == found
        assert found == pytest.approx(size * (whole + shared / cell["devices"]), rel=1e-3)  # rows, counters
        assert cell["temporaries"] > cell["gradients"]


@pytest.mark.parametrize("given", [{"compile": ("7B",)}, {"devices": (3,)}])
def test_what_the_table_lacks_is_an_error(given: dict[str, tuple[object, ...]]) -> None:
    with pytest.raises(ValueError, match=r"is no (model|row) of the table; use (7\.5B, 128B|1, 4, 16)"):
        zero_table.Options(**given)


@pytest.mark.battery  # `test_gpu.py` compiles a smaller one
@pytest.mark.cuda_compiler
def test_a_printed_number_from_a_compiled_step() -> None:
    model = named("gpt2", **zero_table.MODELS["7.5B"])
    layout, gradients, arguments, temporaries = zero_table.measure(model, "zero2", gpu_topology("64xH100"), True)
    assert arguments == pytest.approx(layout, rel=1e-5)
    assert arguments + gradients == pytest.approx(16.6e9, rel=0.01)
    assert gradients < temporaries < 0.15 * 4 * model.parameters


@pytest.mark.battery
@pytest.mark.cuda_compiler
def test_gradients_that_microbatches_add_up_are_whole_under_zero1_only() -> None:
    model, devices = named("gpt2", dim=512, layers=6, heads=4, vocab=1024), gpu_topology("8xH100")
    whole, part = (zero_table.measure(model, f"{name},microbatches=2", devices, True) for name in ("zero1", "zero2"))
    assert (whole[1], part[1]) == (2 * model.parameters, pytest.approx(2 * model.parameters / 8, rel=0.01))
    assert part[3] < whole[1] < whole[3]
