"""Attention over a context axis against softmax in NumPy's float64: values, and gradients under random cotangents."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from test_attention import reference

from jaxpar.collectives import order as collective_order
from jaxpar.ops.context import (
    from_zigzag,
    gather_attention,
    ring_attention,
    to_zigzag,
    ulysses_attention,
)

B, T, H, K, h = 2, 32, 8, 2, 8
IDS = np.sort(np.random.default_rng(3).integers(4, size=(B, T)), axis=1).astype(np.int32)
WAYS = {"gather": gather_attention, "ulysses": ulysses_attention, "ring": ring_attention}
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "everywhere": {"causal": False},
    "window": {"window": 5},
    "segments": {"segment_ids": IDS, "scale": 0.2},
    "segments everywhere": {"segment_ids": IDS, "causal": False},
    "segments, window": {"segment_ids": IDS, "window": 11},
}


def mesh(c: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:c]), ("context",))


def arrays(dtype: Any = np.float32, keys: int = T) -> list[np.ndarray]:
    """Queries, keys, values and a cotangent."""
    random = np.random.default_rng(0)
    shapes = (B, T, H, h), (B, keys, K, h), (B, keys, K, h), (B, T, H, h)
    return [np.asarray(jnp.asarray(random.normal(size=shape), dtype)) for shape in shapes]


def run(way: str, c: int, given: list[np.ndarray], order: str = "plain", **options: Any) -> list[np.ndarray]:
    """The result and the gradients of queries, keys and values, in the user's order."""
    split = {name: options.pop(name) for name in ("segment_ids", "kv_segment_ids") if name in options}
    options.setdefault("causal", True)
    there, back = (
        (functools.partial(f, ranks=c) if order == "zigzag" else lambda x: x) for f in (to_zigzag, from_zigzag)
    )

    def local(q: jax.Array, k: jax.Array, v: jax.Array, w: jax.Array, *ids: jax.Array) -> Any:
        more = dict(zip(split, ids, strict=True))
        out, pull = jax.vjp(lambda *x: WAYS[way](*x, axis="context", order=order, **more, **options), q, k, v)
        return out, *pull(w)

    ordered = lambda *x: collective_order.in_order(local, mesh(c))(jnp.int32(0), *x)[0]
    held = P(None, "context")
    mapped = jax.jit(jax.shard_map(ordered, mesh=mesh(c), in_specs=held, out_specs=held, check_vma=False))
    return [np.asarray(back(x), np.float64) for x in mapped(*map(there, map(jnp.asarray, (*given, *split.values()))))]


def assert_right(found: list[np.ndarray], given: list[np.ndarray], tolerance: float, **options: Any) -> None:
    """Each against its own scale."""
    q, k, v, w = given
    out, pull = reference(q, k, v, **options)
    for name, ours, right in zip(("out", "dq", "dk", "dv"), found, (out, *pull(w.astype(np.float64))), strict=True):
        error = np.abs(ours - right).max() / np.abs(right).max()
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order", ["plain", "zigzag"])
@pytest.mark.parametrize("c", [2, 4, 8])
@pytest.mark.parametrize("way", WAYS)
def test_equals_a_softmax(way: str, c: int, order: str, case: str) -> None:
    given = arrays()
    assert_right(run(way, c, given, order, **CASES[case]), given, 2e-6, **CASES[case])
