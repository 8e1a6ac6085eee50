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
from jaxpar.parallel.context.ops import (
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
WAYS = {
    "gather": gather_attention,
    "ulysses": ulysses_attention,
    "ring": ring_attention,
    "usp": functools.partial(usp_attention, group=2),
}
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "everywhere": {"causal": False},
    "window": {"window": 5},
    "segments": {"segment_ids": IDS, "scale": 0.2},
    "segments everywhere": {"segment_ids": IDS, "causal": False},
    "segments, window": {"segment_ids": IDS, "window": 11},
}


ZIGZAG = to_zigzag, from_zigzag


SIZES = tuple(WAYS), (2, 4, 8), ("plain", "zigzag")


def battery(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.battery)


def mesh(c: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:c]), ("context",))


def arrays(dtype: Any = np.float32, keys: int = T) -> list[np.ndarray]:
    """Queries, keys, values and a cotangent."""
    random = np.random.default_rng(0)
    shapes = (B, T, H, h), (B, keys, K, h), (B, keys, K, h), (B, T, H, h)
    return [np.asarray(jnp.asarray(random.normal(size=shape), dtype)) for shape in shapes]


def program(way: str, c: int, order: str, split: Any, **options: Any) -> Any:
    """The result and the gradients, of queries, keys, values, a cotangent and what else is split."""

    def local(q: jax.Array, k: jax.Array, v: jax.Array, w: jax.Array, *ids: jax.Array) -> Any:
        more = dict(zip(split, ids, strict=True))
        out, pull = jax.vjp(lambda *x: WAYS[way](*x, axis="context", order=order, **more, **options), q, k, v)
        return out, *pull(w)

    ordered = lambda *x: collective_order.in_order(local, mesh(c))(jnp.int32(0), *x)[0]
    held = P(None, "context")
    return jax.jit(jax.shard_map(ordered, mesh=mesh(c), in_specs=held, out_specs=held, check_vma=False))


def run(way: str, c: int, given: list[np.ndarray], order: str = "plain", **options: Any) -> list[np.ndarray]:
    """The result and the gradients of queries, keys and values, in the user's order."""
    split = {name: options.pop(name) for name in ("segment_ids", "kv_segment_ids") if name in options}
    options.setdefault("causal", True)
    both = program(way, c, order, split, **options)

    def held(length: int) -> np.ndarray:
        chunks = order_of(c, order if order in ORDERS else "plain")
        return np.arange(length).reshape(len(chunks), -1)[[*chunks]].reshape(-1)

    there = lambda x: x[:, held(x.shape[1])]
    back = lambda x: np.asarray(x)[:, np.argsort(held(x.shape[1]))]
    return [back(x).astype(np.float64) for x in both(*map(there, (*given, *split.values())))]


def assert_right(found: list[np.ndarray], given: list[np.ndarray], tolerance: float, **options: Any) -> None:
    """Each against its own scale."""
    q, k, v, w = given
    out, pull = reference(q, k, v, **options)
    for name, ours, right in zip(("out", "dq", "dk", "dv"), found, (out, *pull(w.astype(np.float64))), strict=True):
        error = np.abs(ours - right).max() / np.abs(right).max()
        assert error < tolerance, f"{name}: {error}"


def cells() -> list[Any]:
    """Every way, number of ranks, order and case; some of them beside the battery, so that each choice is met."""
    every = [*itertools.product(*SIZES, CASES)]
    kept = {
        (*cell, case) for cell, case in zip(covering(itertools.product(*SIZES)), itertools.cycle(CASES), strict=False)
    }
    return [pytest.param(*cell, marks=[] if cell in kept else pytest.mark.battery) for cell in every]


@pytest.mark.parametrize(("way", "c", "order", "case"), cells())
def test_equals_a_softmax(way: str, c: int, order: str, case: str) -> None:
    given = arrays()
    assert_right(run(way, c, given, order, **CASES[case]), given, 2e-6, **CASES[case])


@pytest.mark.parametrize("way", ["ring", battery("gather"), battery("ulysses"), battery("usp")])
def test_bfloat16(way: str) -> None:
    given = arrays(jnp.bfloat16)
    assert_right(run(way, 4, given, "zigzag", segment_ids=IDS), given, 0.02, segment_ids=IDS)


@pytest.mark.parametrize("order", [battery("plain"), "zigzag"])
@pytest.mark.parametrize("way", ["ring", "gather", "usp", "ulysses"])
def test_keys_of_another_length(way: str, order: str) -> None:
    """Some queries see none of them."""
    given = arrays(keys=48)
    keys = np.sort(np.random.default_rng(5).integers(1, 4, size=(B, 48)), axis=1).astype(np.int32)
    options = {"causal": False, "segment_ids": IDS, "kv_segment_ids": keys}
    assert (IDS == 0).any()
    assert_right(run(way, 4, given, order, **options), given, 2e-6, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("causal", "order"), [(True, "zigzag"), battery(False, "plain")])
def test_mask(causal: bool, order: str) -> None:
    """Its rows are split, and keys are in the user's order. Against jax's own attention."""
    random, (q, k, v, w) = np.random.default_rng(7), map(jnp.asarray, arrays())
    mask = (random.random((B, 1, T, T)) < 0.7) | np.eye(T, dtype=bool)
    there, back = ((functools.partial(f, ranks=4) if order == "zigzag" else lambda x, dim=1: x) for f in ZIGZAG)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, w: jax.Array, mask: jax.Array) -> Any:
        options = {"axis": "context", "causal": causal, "order": order, "mask": mask}
        out, pull = jax.vjp(lambda *x: gather_attention(*x, **options), q, k, v)
        return (out, *pull(w))

    ordered = lambda *x: collective_order.in_order(local, mesh(4))(jnp.int32(0), *x)[0]
    blocks = P(None, "context")
    specs = {"in_specs": (*[blocks] * 4, P(None, None, "context")), "out_specs": blocks}
    found = jax.jit(jax.shard_map(ordered, mesh=mesh(4), check_vma=False, **specs))(
        *map(there, (q, k, v, w)), there(jnp.asarray(mask), dim=2)
    )

    out, pull = jax.vjp(lambda *x: jax.nn.dot_product_attention(*x, None, mask, is_causal=causal), q, k, v)
    for ours, theirs in zip(map(back, found), [out, *pull(w)], strict=True):
        assert np.abs(ours - theirs).max() < 2e-6 * np.abs(theirs).max()


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.xdist_group("attention on cuda")
class TestOnCuda:
    @pytest.mark.parametrize(
        ("way", "order", "case"),
        [("ring", "zigzag", "causal"), ("ring", "plain", "segments, window"), battery("gather", "zigzag", "segments")],
    )
    def test_what_surrounds_cudnn_is_right(self, way: str, order: str, case: str) -> None:
        given = arrays()
        assert_right(run(way, 4, given, order, **CASES[case]), given, 2e-6, **CASES[case])


@pytest.mark.battery
def test_a_uniform_cotangent_would_hide_a_sequence_that_is_not_put_back() -> None:
    """Why all of the above have random ones: the order of the result is wrong here, and the gradient right."""
    q, k, v, w = arrays()
    both = program("ring", 4, "zigzag", (), causal=True)
    for given, hidden in ((np.ones_like(w), True), (w, False)):
        dq = from_zigzag(both(*(to_zigzag(jnp.asarray(x), 4) for x in (q, k, v)), jnp.asarray(given))[1], 4)
        right = reference(q, k, v)[1](given.astype(np.float64))[0]
        assert (np.abs(dq - right).max() < 1e-5 * np.abs(right).max()) == hidden


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
    """Of the compiled program, by kind: how often, and how many bytes."""
    c, e = 4, 4
    x = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in arrays(keys=s)]
    compiled = program(way, c, order, (), causal=s == T, window=window).lower(*x).compile()
    ledger = Ledger.from_hlo(compiled.as_text(), mesh(c))
    hops = ring_hops(T // c, c, window)
    if way == "ring":
        forward, backward = ring_bytes(B, s, K, h, c, e, hops)
        # Forward every hop; backward the first of keys alone, those between with gradients, two of gradients alone.
        wanted = {"collective-permute": (2 * hops + 2, forward + backward)}
    elif way == "usp":
        forward, backward = usp_bytes(B, s, H, K, h, c, 2, e, T)
        ring = sum(ring_bytes(B, s, K // 2, h, c // 2, e))
        wanted = {"collective-permute": (4, ring), "all-to-all": (6, forward + backward - ring)}
    elif way == "gather":
        forward, backward = gather_bytes(B, T, K, h, c, e)
        wanted = {"all-gather": (1, forward), "reduce-scatter": (1, backward)}
    else:
        wanted = {"all-to-all": (6, sum(ulysses_bytes(B, T, H, K, h, c, e)))}
    count, sent = (ledger.by("kind", value=value) for value in ("count", "sent"))
    assert {kind: (count[kind], sent[kind]) for kind in count} == wanted


def test_orders() -> None:
    assert order_of(4, "zigzag") == (0, 7, 1, 6, 2, 5, 3, 4)
    x = jnp.arange(2 * 24).reshape(2, 24)
    there = jax.jit(functools.partial(to_zigzag, ranks=3))(x)
    np.testing.assert_array_equal(jax.jit(functools.partial(from_zigzag, ranks=3))(there), x)
    with pytest.raises(ValueError, match="24 positions do not divide into 16 chunks; use 32, or the plain order"):
        to_zigzag(x, 8)
    for order, held in (("plain", x[0]), ("zigzag", there[0])):
        local = lambda _, order=order: positions(8, "context", order)
        mapped = jax.shard_map(local, mesh=mesh(3), in_specs=P("context"), out_specs=P("context"), check_vma=False)
        np.testing.assert_array_equal(jax.jit(mapped)(jnp.zeros(3)), held)


@pytest.mark.parametrize(
    ("way", "change", "message"),
    [
        ("ring", {"causal": False, "window": 3}, r"window=3, causal=False"),
        ("ring", {"order": "striped"}, r"order='striped'; use one of \('plain', 'zigzag'\)"),
        ("gather", {"keys": 16, "causal": True}, r"8 queries and 4 keys: which is whose\? Use causal=False"),
        ("gather", {"segment_ids": IDS * 1.0}, r"segment_ids is float.*give integers \[2, 8\]"),
        ("gather", {"kv_segment_ids": IDS}, r"without segment_ids"),
        ("ulysses", {"c": 3, "length": 24}, r"3 ranks do not divide 8 query heads; use ring_attention"),
        ("usp", {"c": 3, "length": 24}, r"groups of 2 of 3 ranks for 8 query and 2 key heads"),
    ],
)
def test_errors(way: str, change: dict[str, Any], message: str) -> None:
    options = {"causal": False, "order": "plain"} | change
    c, t = options.pop("c", 4), options.pop("length", T)
    given = [x[:, :t] for x in arrays(keys=options.pop("keys", t))]
    with pytest.raises(ValueError, match=message):
        run(way, c, given, **options)
