"""The benchmark of collectives: nccl-tests' factors, sizes, checked results, and what it writes."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxpar import collectives
from jaxpar.inspect.bench.bandwidth import BenchOptions, bytes_of, main
from jaxpar.inspect.bench.timing import Effort, Op, busbw_factor, measure

ONCE = Effort(iterations=2, repeats=2, warmup=1, seconds=0.1)


def mesh(n: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:n]), ("rank",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("n", [2, 4, 8, 64])
def test_factors_are_those_of_nccl_tests(n: int) -> None:
    """doc/PERFORMANCE.md of nccl-tests, and its scatter.cu, gather.cu, sendrecv.cu."""
    reduced, part, whole = 2 * (n - 1) / n, (n - 1) / n, 1
    expected = {
        **{"all_reduce": reduced, "ring_all_reduce": reduced, "reduce_scatter": part, "all_gather": part},
        **{"broadcast": whole, "reduce": whole, "all_to_all": part, "scatter": part, "gather": part},
        "send_recv": whole,
    }
    assert {op: busbw_factor(op, n) for op in get_args(Op)} == pytest.approx(expected)


@pytest.mark.parametrize("op", get_args(Op))
def test_measured_and_right(op: str) -> None:
    row = measure(op, 1001, "float32" if op != "reduce" else "bfloat16", mesh(3), ONCE)
    width = 2 if op == "reduce" else 4
    assert row.wrong == 0
    assert row.bytes == 1001 // width // 3 * 3 * width
    assert row.algbw == pytest.approx(row.bytes / row.seconds / 1e9)
    assert row.busbw == pytest.approx(row.algbw * busbw_factor(op, 3))
    assert 1 <= row.timed <= 4


@pytest.mark.parametrize("op", ["all_reduce", "gather", "all_to_all", "send_recv"])
def test_wrong_results_are_counted(op: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One element of every rank's result is changed: the check sees them all."""
    right = getattr(collectives, op)

    def wrong(x: Any, axes: Any, **options: Any) -> jax.Array:
        y = right(x, axes, **options)
        return y.at[-1].set(jnp.asarray(9, y.dtype))

    monkeypatch.setattr(collectives, op, wrong)
    assert measure(op, 256, "float32", mesh(2), ONCE).wrong == 2
    if op == "gather":
        with pytest.raises(RuntimeError, match="8 elements are wrong"):
            main(BenchOptions(ops=(op,), largest="1k", out=tmp_path))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    options = BenchOptions(
        *(("all_reduce", "all_gather"), "1k", "5k"), repeats=1, iterations=1, seconds=0.01, out=tmp_path
    )
    rows = main(options)
    assert [(row.op, row.bytes) for row in rows] == [(op, n) for op in options.ops for n in (1024, 4096)]
    text = capsys.readouterr().out
    assert "Simulated devices" in text
    assert max(map(len, text.replace(str(tmp_path), "").splitlines())) <= 80
    assert len(re.findall(r"│ all_(?:reduce|gather) ", text)) == 4
    written = json.loads((tmp_path / "collectives.json").read_text())
    assert written["ranks"] == 8
    assert written["simulated"] is True
    assert [row["busbw"] for row in written["rows"]] == [row.busbw for row in rows]
    assert (tmp_path / "collectives.png").stat().st_size > 5000


def test_sizes() -> None:
    assert [bytes_of(text) for text in ("1", "1k", "4KB", "256M", "2 GiB")] == [1, 1024, 4096, 2**28, 2**31]
    assert BenchOptions(smallest="1k", largest="256M").sizes == [4**i * 1024 for i in range(10)]
    assert BenchOptions(smallest="100", largest="350", factor=2).sizes == [100, 200]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"smallest": "1x"}, r"'1x' is no size; use for example 1000, 64k"),
        ({"largest": "0"}, r"'0' is no size"),
        ({"smallest": "2k", "largest": "1k"}, r"smallest='2k' is above largest='1k'"),
        ({"factor": 1}, r"factor=1 never reaches"),
        ({"repeats": 0}, r"repeats=0 measures nothing; use 1 or more"),
        ({"ops": ("all_gathr",)}, r"ops: 'all_gathr' cannot be measured; .*did you mean 'all_gather'\?"),
        ({"dtype": "bfloat"}, r"dtype: 'bfloat' cannot be measured; .*did you mean 'bfloat16'\?"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchOptions(**options)


def test_one_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: alone)
    with pytest.raises(ValueError, match=r"needs two devices, and there is 1 \(cpu\); try devices=8"):
        main(BenchOptions())
