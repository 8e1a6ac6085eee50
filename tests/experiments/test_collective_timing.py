"""How collectives are timed: nccl-tests' factors, sizes, checked results."""

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_timing import Effort, Op, busbw_factor, bytes_of, measure
from jax.sharding import AxisType, Mesh

from jaxpar import collectives

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
def test_wrong_results_are_counted(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of every rank's result is changed: the check sees them all."""
    right = getattr(collectives, op)

    def wrong(x: Any, axes: Any, **options: Any) -> jax.Array:
        y = right(x, axes, **options)
        return y.at[-1].set(jnp.asarray(9, y.dtype))

    monkeypatch.setattr(collectives, op, wrong)
    assert measure(op, 256, "float32", mesh(2), ONCE).wrong == 2


def test_sizes() -> None:
    assert [bytes_of(text) for text in ("1", "1k", "4KB", "256M", "2 GiB")] == [1, 1024, 4096, 2**28, 2**31]
    with pytest.raises(ValueError, match="'1x' is no size; use for example 1000, 64k"):
        bytes_of("1x")
