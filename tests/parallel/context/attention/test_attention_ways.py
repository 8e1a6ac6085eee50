"""Attention over a context axis against softmax in NumPy's float64: values, and gradients under random cotangents."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import covering
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from test_attention import on_cuda as on_cuda
from test_attention import reference

from jaxpar.collectives import order as collective_order
from jaxpar.inspect.ledger import Ledger
from jaxpar.parallel.context.attention.flash import AttentionOptions
from jaxpar.parallel.context.ops import (
    Ring,
    from_zigzag,
    gather_attention,
    gather_bytes,
    order_of,
    positions,
    ring_attention,
    ring_bytes,
    ring_hops,
    to_zigzag,
    ulysses_attention,
    ulysses_bytes,
    usp_attention,
    usp_bytes,
)
from jaxpar.parallel.context.ops.order import ORDERS

B, T, H, K, h = 2, 32, 8, 2, 8
IDS = np.sort(np.random.default_rng(3).integers(4, size=(B, T)), axis=1).astype(np.int32)
WAYS = {"gather": gather_attention, "ulysses": ulysses_attention, "ring": ring_attention, "usp": usp_attention}
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "everywhere": {"causal": False},
    "window": {"window": 5},
    "segments": {"segment_ids": IDS, "scale": 0.2},
    "segments everywhere": {"segment_ids": IDS, "causal": False},
    "segments, window": {"segment_ids": IDS, "window": 11},
}
SIZES = tuple(WAYS), (2, 4, 8), ("plain", "zigzag")


def battery(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.battery)


def mesh(c: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:c]), ("context",))


def arrays(dtype: Any = np.float32, keys: int = T) -> list[np.ndarray]:
    """Return queries, keys, values and a cotangent."""
    random = np.random.default_rng(0)
    shapes = (B, T, H, h), (B, keys, K, h), (B, keys, K, h), (B, T, H, h)
    return [np.asarray(jnp.asarray(random.normal(size=shape), dtype)) for shape in shapes]


def program(
    way: str, c: int, order: Any, split: Any, causal: bool, window: int | None = None, scale: float | None = None
) -> Any:
    """Compile the result and the gradients, from queries, keys, values, a cotangent and the arrays named in `split`."""
    ring = Ring("context", order, 2 if way == "usp" else 1)
    masked = "mask" in split
    options = AttentionOptions(causal, window, scale, None, len(split) - masked, masked)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, w: jax.Array, *others: jax.Array) -> Any:
        output, pull = jax.vjp(lambda *x: WAYS[way](ring, options, *x, *others), q, k, v)
        return output, *pull(w)

    ordered = lambda *x: collective_order.in_order(local, mesh(c))(jnp.int32(0), *x)[0]
    spec = P(None, "context")
    specs = (*[spec] * 4, *(P(None, None, "context") if name == "mask" else spec for name in split))
    return jax.jit(jax.shard_map(ordered, mesh=mesh(c), in_specs=specs, out_specs=spec, check_vma=False))


def run(way: str, c: int, inputs: list[np.ndarray], order: str = "plain", **options: Any) -> list[np.ndarray]:
    """Return the result and the gradients of queries, keys and values, in the user's order."""
    split = {name: options.pop(name) for name in ("segment_ids", "kv_segment_ids", "mask") if name in options}
    options.setdefault("causal", True)
    attend = program(way, c, order, split, **options)

    def rank_order(length: int) -> np.ndarray:
        chunks = order_of(c, order if order in ORDERS else "plain")
        return np.arange(length).reshape(len(chunks), -1)[[*chunks]].reshape(-1)

    to_ranks = lambda x, dim=1: np.take(x, rank_order(x.shape[dim]), dim)
    from_ranks = lambda x: np.take(np.asarray(x), np.argsort(rank_order(x.shape[1])), 1)
    others = [to_ranks(x, 2 if name == "mask" else 1) for name, x in split.items()]  # of a mask the rows are split
    return [from_ranks(x).astype(np.float64) for x in attend(*map(to_ranks, inputs), *others)]


def assert_right(results: list[np.ndarray], inputs: list[np.ndarray], tolerance: float, **options: Any) -> None:
    """Check the result and each gradient, relative to its largest value."""
    q, k, v, w = inputs
    output, pull = reference(q, k, v, **options)
    for name, actual, expected in zip(
        ("out", "dq", "dk", "dv"), results, (output, *pull(w.astype(np.float64))), strict=True
    ):
        error = np.abs(actual - expected).max() / np.abs(expected).max()
        assert error < tolerance, f"{name}: {error}"


def cells() -> list[Any]:
    """Return all ways, ranks, orders and cases; those outside the battery meet each choice at least once."""
    all_cells = [*itertools.product(*SIZES, CASES)]
    unmarked = {
        (*cell, case) for cell, case in zip(covering(itertools.product(*SIZES)), itertools.cycle(CASES), strict=False)
    }
    return [pytest.param(*cell, marks=[] if cell in unmarked else pytest.mark.battery) for cell in all_cells]


@pytest.mark.parametrize(("way", "c", "order", "case"), cells())
def test_equals_a_softmax(way: str, c: int, order: str, case: str) -> None:
    inputs = arrays()
    assert_right(run(way, c, inputs, order, **CASES[case]), inputs, 2e-6, **CASES[case])


@pytest.mark.parametrize("way", ["ring", battery("gather"), battery("ulysses"), battery("usp")])
def test_bfloat16(way: str) -> None:
    inputs = arrays(jnp.bfloat16)
    assert_right(run(way, 4, inputs, "zigzag", segment_ids=IDS), inputs, 0.02, segment_ids=IDS)


@pytest.mark.parametrize("order", [battery("plain"), "zigzag"])
@pytest.mark.parametrize("way", ["ring", "gather", "usp", "ulysses"])
def test_keys_of_another_length(way: str, order: str) -> None:
    """Keys of another length than queries; some queries see none of them."""
    inputs = arrays(keys=48)
    keys = np.sort(np.random.default_rng(5).integers(1, 4, size=(B, 48)), axis=1).astype(np.int32)
    options = {"causal": False, "segment_ids": IDS, "kv_segment_ids": keys}
    assert (IDS == 0).any()
    assert_right(run(way, 4, inputs, order, **options), inputs, 2e-6, **options)


@pytest.mark.parametrize(("causal", "order"), [(True, "zigzag"), battery(False, "plain")])
def test_mask(causal: bool, order: str) -> None:
    """A mask with split rows, and keys in the user's order."""
    mask = (np.random.default_rng(7).random((B, 1, T, T)) < 0.7) | np.eye(T, dtype=bool)
    inputs, options = arrays(), {"causal": causal, "mask": mask}
    assert_right(run("gather", 4, inputs, order, **options), inputs, 2e-6, **options)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.xdist_group("attention on cuda")
class TestOnCuda:
    @pytest.mark.parametrize(
        ("way", "order", "case"),
        [("ring", "zigzag", "causal"), ("ring", "plain", "segments, window"), battery("gather", "zigzag", "segments")],
    )
    def test_what_surrounds_cudnn_is_right(self, way: str, order: str, case: str) -> None:
        inputs = arrays()
        assert_right(run(way, 4, inputs, order, **CASES[case]), inputs, 2e-6, **CASES[case])


@pytest.mark.parametrize(
    ("way", "order", "window", "s"),
    [
        ("ring", "zigzag", None, T),
        battery("ring", "plain", 9, T),
        ("ring", "plain", 10, T),
        ("ring", "zigzag", None, 48),
        ("usp", "zigzag", None, 48),
        ("gather", "plain", None, T),
        ("ulysses", "zigzag", None, T),
        battery("usp", "zigzag", None, T),
    ],
)
def test_sends_what_the_closed_forms_say(way: str, order: str, window: int | None, s: int) -> None:
    """The compiled program has as many collectives of each kind, and bytes, as the closed forms."""
    c, e = 4, 4
    x = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in arrays(keys=s)]
    compiled = program(way, c, order, (), causal=s == T, window=window).lower(*x).compile()
    ledger = Ledger.from_hlo(compiled.as_text(), mesh(c))
    hops, queries, keys = ring_hops(T // c, c, window), (B, T, H, h), (B, s, K, h)
    if way == "ring":
        forward, backward = ring_bytes(keys, c, e, hops)
        # Permutes: every hop forward; backward the first of keys, later ones of keys and gradients, two of gradients.
        expected = {"collective-permute": (2 * hops + 2, forward + backward)}
    elif way == "usp":
        forward, backward = usp_bytes(queries, keys, c, 2, e)
        ring = sum(ring_bytes((B, s, K // 2, h), c // 2, e))
        expected = {"collective-permute": (4, ring), "all-to-all": (6, forward + backward - ring)}
    elif way == "gather":
        forward, backward = gather_bytes(keys, c, e)
        expected = {"all-gather": (1, forward), "reduce-scatter": (1, backward)}
    else:
        expected = {"all-to-all": (6, sum(ulysses_bytes(queries, keys, c, e)))}
    count, sent = (ledger.by("kind", value=value) for value in ("count", "sent"))
    assert {kind: (count[kind], sent[kind]) for kind in count} == expected


def test_orders() -> None:
    assert order_of(4, "zigzag") == (0, 7, 1, 6, 2, 5, 3, 4)
    x = jnp.arange(2 * 24).reshape(2, 24)
    reordered = jax.jit(functools.partial(to_zigzag, ranks=3))(x)
    np.testing.assert_array_equal(jax.jit(functools.partial(from_zigzag, ranks=3))(reordered), x)
    with pytest.raises(ValueError, match="24 positions do not divide into 16 chunks; use 32, or the plain order"):
        to_zigzag(x, 8)
    for order, rank_order in (("plain", x[0]), ("zigzag", reordered[0])):
        local = lambda _, order=order: positions(8, "context", order)
        mapped = jax.shard_map(local, mesh=mesh(3), in_specs=P("context"), out_specs=P("context"), check_vma=False)
        np.testing.assert_array_equal(jax.jit(mapped)(jnp.zeros(3)), rank_order)


@pytest.mark.parametrize(
    ("way", "change", "message"),
    [
        ("ring", {"causal": False, "window": 3}, r"window=3, causal=False"),
        ("ring", {"order": "striped"}, r"order='striped'; use one of \('plain', 'zigzag'\)"),
        ("gather", {"keys": 16, "causal": True}, r"needs as many queries as keys, not 8 and 4; use causal=False"),
        ("gather", {"segment_ids": IDS * 1.0}, r"segment_ids is float.*give integers \[2, 8\]"),
        ("ulysses", {"c": 3, "length": 24}, r"3 ranks do not divide 8 query heads; use ring_attention"),
        ("usp", {"c": 3, "length": 24}, r"groups of 2 ranks do not divide 3 ranks, 8 query heads and 2 key heads"),
    ],
)
def test_errors(way: str, change: dict[str, Any], message: str) -> None:
    options = {"causal": False, "order": "plain"} | change
    c, t = options.pop("c", 4), options.pop("length", T)
    inputs = [x[:, :t] for x in arrays(keys=options.pop("keys", t))]
    with pytest.raises(ValueError, match=message):
        run(way, c, inputs, **options)
