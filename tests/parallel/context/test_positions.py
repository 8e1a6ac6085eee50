"""The program of a context rank, equation by equation: each against the function on whole sequences.

Each case is a function of features [rows, positions, 8] and of a weight, and must give the same value and gradients.
All cases of an order of the positions are one program, so that they compile once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

import jaxpar as jp
from jaxpar.parallel.context import RULES, WholeLoss, split_sequence
from jaxpar.parallel.context.attention_mode import AXIS, GATHER, AttentionMode
from jaxpar.program import jaxpr as jx

RANKS, ROWS, LENGTH, DIM = 2, 2, 16, 8


def _rope(x: jax.Array) -> jax.Array:
    """Rotary positions, written into every other feature."""
    angles = jnp.arange(LENGTH)[:, None] / 9.0 ** (jnp.arange(0, DIM, 2) / DIM)
    even, odd, cos, sin = x[..., 0::2], x[..., 1::2], jnp.cos(angles), jnp.sin(angles)
    return jnp.zeros_like(x).at[..., 0::2].set(even * cos - odd * sin).at[..., 1::2].set(even * sin + odd * cos)


def _fixed_point(x: jax.Array, w: jax.Array) -> jax.Array:
    """Iterate to a fixed point of all rows and positions together."""
    goes_on = lambda c: (c[0] < 9) & (jnp.abs(c[1] - c[2]).max() > 1e-3)
    return lax.while_loop(goes_on, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w / 9 + x), c[1]), (0, jnp.zeros_like(x), x))[1]


def _shrink_rows(x: jax.Array) -> jax.Array:
    """Shrink each row until none of its positions is large."""
    return jax.vmap(lambda r: lax.while_loop(lambda r: jnp.abs(r).max() > 0.5, lambda r: r * 0.7, r))(x)


def _matrices(x: jax.Array, w: jax.Array) -> jax.Array:
    """Compute with one matrix for each position."""
    m = x[..., None] * x[..., None, :] + 2 * jnp.eye(DIM) + w @ w.T
    results = [jnp.linalg.cholesky(m).sum(-1), jnp.linalg.solve(m, x[..., None])[..., 0], jnp.linalg.eigh(m)[0]]
    return sum(results) + jnp.abs(jnp.fft.fft(x, axis=-1)) + lax.approx_max_k(x, 2)[0].sum(-1, keepdims=True)


def _attend_in_blocks(x: jax.Array, masked: bool) -> jax.Array:
    """Attend within blocks of four positions, which have become rows."""
    blocks = x.reshape(-1, 4, 2, DIM // 2)
    mask = (jnp.arange(4)[:, None] >= jnp.arange(4))[None, None] if masked else None
    return jp.attention(jnp.sin(blocks), jnp.cos(blocks), blocks, causal=False, mask=mask).reshape(x.shape)


def _attend_in_heads(x: jax.Array, heads: int, key_heads: int) -> jax.Array:
    """Attend with rows of positions read as heads, as nanodl's T5 does: [B, T, D] as [B, H, T, D / H]."""
    query, key, value = (f(x).reshape(ROWS, heads, -1, 4).swapaxes(1, 2) for f in (jnp.sin, jnp.cos, jnp.tanh))
    key, value = (y[:, :, :: heads // key_heads] for y in (key, value))
    return jp.attention(query, key, value, causal=True).swapaxes(1, 2).reshape(x.shape)


def _smoothed(x: jax.Array) -> jax.Array:
    return x - jnp.cumsum(jnp.tanh(x), 1) / LENGTH


CASES: dict[str, Callable[[Any, Any], Any]] = {
    # For values that overlap, only some primitives had rules, and none over features.
    "softmax of two positions fewer": lambda x, w: jax.nn.log_softmax((x[:, 2:] + x[:, :-2]) @ w),
    "features of two positions fewer": lambda x, w: (
        jnp.sort(x[:, 2:] @ w, -1) * jnp.cumsum(x[:, 2:], -1) + lax.top_k(x[:, 1:], 3)[0].sum((1, 2))[:, None, None]
    ),
    "places of two positions fewer": lambda x, w: w[0][(x[:, 2:] @ w).argmax(-1)],
    "products so far of two positions fewer": lambda x, w: jnp.cumprod(1 + x[:, :-2] / 9, 1) * w[0],
    # Rolling by one position worked; by more, the error was "slice mixes its positions".
    "rolled": lambda x, w: sum(jnp.roll(x, k, axis=1) * w[i] for i, k in enumerate((1, -1, 2, -2, 4, 15, -3))),
    "last in front": lambda x, w: jnp.concatenate([x[:, -2:], x[:, :-2]], 1) @ w,
    "ends exchanged": lambda x, w: jnp.concatenate([x[:, 14:], x[:, 2:14], x[:, :2]], 1) @ w,
    "some in the middle": lambda x, w: x[:, 6:9] @ w + x[:, 2:][:, 11:].sum(1, keepdims=True) + x[:, -1:] * w[0],
    # The slice of features was dropped, so that the error was one of shapes.
    "places of some features": lambda x, w: (x @ w)[:, jnp.array([3, 0, 9]), 1:4] ** 2,
    "none of them": lambda x, w: jnp.concatenate([x[:, 16:], x, x[:, 3:3]], 1) @ w,
    "some of padded": lambda x, w: jnp.pad(x, ((0, 0), (2, 0), (0, 0)), constant_values=3.0)[:, 15:] @ w,
    "some of merged": lambda x, w: x.reshape(-1, DIM)[14:18] @ w + x.reshape(-1, DIM)[5] * w[0],
    # These had no rule, so that their inputs were refused.
    "loop": lambda x, w: _fixed_point(*map(lax.stop_gradient, (x, w))) * x,
    "loop of rows": lambda x, w: _shrink_rows(lax.stop_gradient(x)) @ w,
    "matrices and transforms": _matrices,
    "largest position": lambda x, w: (x @ w).max(1) + (x @ w).min(1) + jnp.round(x * 2).max(1) * x.mean(1),
    "ties": lambda x, w: (jnp.sign(x) + x - lax.stop_gradient(x)).max(1) @ w,
    "largest of three fewer": lambda x, w: x[:, 3:].max(1) @ w + (x[:, 1:] > 0.9).any(1) * w[0],
    "products": lambda x, w: (1 + x[:, :-2] / 9).prod(1) @ w,
    "softmax of positions": lambda x, w: jax.nn.softmax(x @ w, axis=1) * x,
    "scattered features": lambda x, w: _rope(x) @ w,
    # Calls that are kernels to tensor ranks: "jit mixes its positions", whatever they computed.
    "attention of blocks": lambda x, w: _attend_in_blocks(x @ w, masked=False),
    "masked attention of blocks": lambda x, w: _attend_in_blocks(x @ w, masked=True),
    "attention of heads": lambda x, w: _attend_in_heads(x @ w, 8, 8),
    "attention of grouped heads": lambda x, w: _attend_in_heads(x @ w, 8, 4),
    "a kernel": lambda x, w: jp.local_kernel(_smoothed, (2,), 2)(x @ w),
}


def _total(name: str) -> Callable[..., Any]:
    def total(table: jax.Array, w: jax.Array, ids: jax.Array) -> jax.Array:
        y = jnp.asarray(CASES[name](jnp.tanh(table[ids]), w))
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape)))

    return total


WAYS = {"plain": GATHER, "zigzag": AttentionMode("ring", "for its order", order="zigzag")}


@pytest.fixture(scope="module", params=WAYS)
def results(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return value and gradients of every case, on whole sequences and on two ranks."""
    random = np.random.default_rng(0)
    args = random.normal(size=(9, DIM)).astype("f"), random.normal(size=(DIM, DIM)).astype("f")
    args = (*args, random.integers(9, size=(ROWS, LENGTH)).astype("int32"))
    mesh = Mesh(np.array(jax.devices()[:RANKS]), (AXIS,), axis_types=(AxisType.Auto,))

    def local(name: str) -> Callable[..., Any]:
        flat, _ = jx.trace(_total(name), *args)
        fun = split_sequence(WholeLoss(flat, 2, [2], 1), RANKS, WAYS[request.param], RULES)
        return lambda *values: fun(*values)[0]

    def all_cases(funs: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
        return lambda *args: {name: jax.value_and_grad(fun, argnums=(0, 1))(*args) for name, fun in funs.items()}

    local_cases = all_cases({name: local(name) for name in CASES})
    ranks = lambda *args: jax.tree.map(lambda x: lax.psum(x, AXIS), local_cases(*args))
    replicated = PartitionSpec()
    ranks = jax.shard_map(ranks, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False)
    return jax.jit(all_cases({name: _total(name) for name in CASES}))(*args), jax.jit(ranks)(*args)


@pytest.mark.xdist_group("positions")
def test_rules(results: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """All cases are one program. As separate tests, a sample would compile most of them without comparing them."""
    wrong = {}
    for name in CASES:
        expected, actual = (jax.tree.leaves(r[name]) for r in results)
        for a, b in zip(expected, actual, strict=True):
            tolerance = 2e-5 * max(1.0, float(np.abs(a).max()))
            if not np.allclose(b, a, rtol=2e-5, atol=tolerance, equal_nan=True):
                wrong[name] = float(np.abs(b - a).max())
    assert not wrong


def test_what_a_kernel_computes_is_refused_by_its_own_name() -> None:
    """The error "jit mixes its positions" named the call, but neither the operation in it nor its line."""

    def sorted_positions(x: jax.Array) -> jax.Array:
        return jnp.sort(jnp.tanh(x), axis=1)

    def total(table: jax.Array, w: jax.Array, ids: jax.Array) -> jax.Array:
        return jp.local_kernel(sorted_positions, (2,), 2)(table[ids] @ w).sum()

    args = np.ones((9, DIM), "f"), np.ones((DIM, DIM), "f"), np.zeros((ROWS, LENGTH), "int32")
    flat, _ = jx.trace(total, *args)
    mesh = jax.sharding.AbstractMesh((RANKS,), (AXIS,), axis_types=(AxisType.Auto,))
    fun = split_sequence(WholeLoss(flat, 2, [2], 1), RANKS, GATHER, RULES)
    ranks = jax.shard_map(fun, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    with pytest.raises(
        ValueError, match=r"sort at .*test_positions.py:\d+:\d+ \(.*sorted_positions\) mixes its positions"
    ):
        jax.eval_shape(ranks, *args)
