"""The program of a tensor rank, primitive by primitive: every rule against the function on whole arrays.

Each case is a function of two arrays, the first of which is split along a dim, and must give the same value and the
same gradients of both. All cases of a dim are one program, so that they compile once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, PartitionSpec

import jaxpar as jp
from jaxpar.parallel.tensor import RULES, localise
from jaxpar.program import jaxpr as jx

RANKS = 2
X, Y = (4, 6, 8), (4, 6, 8)


@jax.custom_vjp
def _cube(x: jax.Array, count: jax.Array) -> jax.Array:
    return x**3 * count


_cube.defvjp(lambda x, n: (x**3 * n, (x, n)), lambda saved, ct: (5.0 * saved[0] ** 2 * saved[1] * ct, None))


def _branch(x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.lax.cond(y.sum() > 0, lambda x: jnp.sin(x), lambda x: x * 2, x)


def _carried(x: jax.Array, y: jax.Array) -> jax.Array:
    """A carry that is split, and has a gradient, only after a step; outputs by step."""
    carry, ys = jax.lax.scan(lambda c, a: (c + a * x, c * a), jnp.zeros_like(x), y[:, 0, 0])
    return carry + ys.sum(0)


def _scanned(x: jax.Array, y: jax.Array) -> jax.Array:
    carry, ys = jax.lax.scan(lambda c, a: (jnp.tanh(c + a[0]), c * a[1]), y[0], (x, y), reverse=True)
    return carry[None] + ys


def _tied(x: jax.Array) -> jax.Array:
    """Signs, with the gradient of `x`."""
    return jnp.sign(x) + (x - jax.lax.stop_gradient(x))


def _conv(x: jax.Array, y: jax.Array, groups: int = 1, padding: Any = "SAME", **options: Any) -> jax.Array:
    """[N, H, C] and [H, C / groups, O] -> [N, H, O]."""
    numbers = ("NHC", "HIO", "NHC")
    return jax.lax.conv_general_dilated(
        x, y, (1,), padding, dimension_numbers=numbers, feature_group_count=groups, **options
    )


def _grown(x: jax.Array, y: jax.Array) -> jax.Array:
    """Until there is enough of all of it; what is carried is split after a step."""
    more = lambda c: (c[0] < 5) & (jnp.abs(c[1]).sum() < 500)
    return jax.lax.while_loop(more, lambda c: (c[0] + 1, c[1] * x + y), (0, jnp.zeros_like(y)))[1]


def _halved(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda v: jnp.abs(v).max() > 0.5, lambda v: v * 0.7, x)


def _definite(x: jax.Array) -> jax.Array:
    """[..., a, b] -> [..., a, a]."""
    return x @ x.swapaxes(-1, -2) / 8 + 3 * jnp.eye(x.shape[-2])


def _matrices(x: jax.Array, y: jax.Array) -> jax.Array:
    """Compute with one matrix for each index of the last dim."""
    a, b = x.transpose(2, 0, 1), y.transpose(2, 0, 1)
    linalg, m = jnp.linalg, _definite(a)
    results = [linalg.cholesky(m), linalg.solve(m, b), linalg.inv(m), linalg.slogdet(m)[1], linalg.eigh(m)[0]]
    results += [linalg.svd(a, compute_uv=False), jax.scipy.linalg.solve_triangular(m, b, lower=True)]
    results += [jax.vmap(lambda m, b: jax.scipy.sparse.linalg.cg(lambda v: m @ v, b, maxiter=3)[0])(m, b[..., 0])]
    return sum(jnp.cos(result).sum() for result in results) * y


# x is split along dim 2; the second result is whole, and comes from a whole argument.
KERNEL = jp.local_kernel(lambda x, y, z: (jnp.sin(x) * y, z**2), (2, 2, None), (2, None))
INDEX = np.array([[3, 0, -1], [1, 1, 2]])
FAR = np.array([[3, 9, -1], [7, -30, 2]])
CASES: dict[str, Callable[[Any, Any], Any]] = {
    "elementwise": lambda x, y: jnp.sin(x) * y + jax.nn.sigmoid(x - y[:, :1]) / (2 + y[:1, :, :1] ** 2),
    "scalars and select": lambda x, y: jnp.where(x > y, 2 * x, y) + jnp.clip(x, -0.5, y.max()),
    "int and bool": lambda x, y: ((x > 0).astype(jnp.int32) * 3 + jnp.round(y).astype(jnp.int32)) * (x + y),
    "vector broadcast": lambda x, y: x * y[0, 0] + y[0, 0] * jnp.ones((4, 6, 8)) * x,
    "positions": lambda x, y: x + y[0] * 2 + y[:, 0][:, None] * y[0][None],
    "reshape": lambda x, y: x.reshape(4, 6, 2, 4).transpose(2, 0, 3, 1).reshape(8, 24) @ y.reshape(24, 8),
    "flatten": lambda x, y: x.reshape(-1) * y.reshape(-1),
    "flatten two": lambda x, y: x.reshape(24, 8) * y.reshape(24, 8),
    "reductions": lambda x, y: (x * y).sum(0) + (x * y).sum((1, 2)).max() + (x.mean(1) @ y[0].T @ y[1]).sum(0),
    "max and min": lambda x, y: x.max(0) + x.min((0, 1)) * y[0] + x.max() * y[0, 0] + x.max(1)[:, None].min(2).sum(),
    "ties": lambda x, y: sum(_tied(x).max(a).sum() * y + _tied(x * y).min(a).sum() for a in (0, 1, 2, (0, 2))),
    "small ids": lambda x, y: sum(jnp.take(x, np.uint8(INDEX % 4), a).sum() for a in range(3)) * y,
    "out of bounds": lambda x, y: (x[FAR].sum() + x[:, FAR].sum() + x[..., FAR].sum()) * y,
    "stack and tile": lambda x, y: (
        jnp.stack([x, y], 1).sum(1) * jnp.tile(x, (1, 1, 2))[..., :8] + sum(jnp.unstack(x, axis=1)).sum()
    ),
    "name": lambda x, y: checkpoint_name(x * y, "named"),
    "kernel": lambda x, y: KERNEL(x, y, x.sum(2))[0] * y + KERNEL(x, y, y[:, :, 0])[1].sum(),
    "few heads of keys": lambda x, y: jp.attention(
        x.reshape(1, 24, 4, 2), y.reshape(1, 24, 4, 2)[:, :, :1], y.reshape(1, 24, 4, 2)[:, :, 1:2]
    ),
    "split heads of keys": lambda x, y: jp.attention(y[..., None], x[:, :, :2, None] * 2, x[:, :, 2:4, None]),
    "convolution by x": lambda x, y: jax.lax.conv_general_dilated(
        y[:, :4], x[:, :4, :3], (1,), "SAME", dimension_numbers=("NCH", "OIH", "NCH")
    ),
    "prod": lambda x, y: (1 + x / 9).prod(1) + (1 + x / 9).prod((0, 2))[:, None].sum() + y[:, 0],
    "softmax": lambda x, y: sum(jax.nn.softmax(x, a) * y + jax.nn.log_softmax(x * y, a) for a in range(3)),
    "logsumexp": lambda x, y: sum(jax.nn.logsumexp(x, a).sum() for a in range(3)) * y,
    "argmax": lambda x, y: sum(
        jnp.take(y[0, 0], x.argmax(a) % 8).sum() + x.argmin(a).sum() * x.sum() for a in range(3)
    ),
    "cumulative": lambda x, y: sum(jnp.cumsum(x, a) * y + jax.lax.cumlogsumexp(x, a) for a in range(3)),
    "sort": lambda x, y: sum(jnp.sort(x, a) * y for a in range(3)) + jax.lax.top_k(x, 3)[0].sum(),
    "concatenate": lambda x, y: (
        jnp.concatenate([x, y], 0)[2:6] + jnp.concatenate([x, y], 1)[:, 3:9] + jnp.concatenate([y, x], 2)[..., 4:12]
    ),
    "pad and rev": lambda x, y: (
        jnp.pad(x, ((1, 0), (0, 0), (0, 0)))[:4] * y
        + jnp.pad(x, ((0, 0), (2, 1), (0, 2)))[:, :6, 1:9]
        + x[::-1, ::-1, ::-1]
    ),
    "slices": lambda x, y: x[1:3].sum() * y + x[:, 1:5:2].sum() + x[..., ::2].sum() + x[:, 0][:, None] + x[..., :1],
    "dynamic slices": lambda x, y: (
        jax.lax.dynamic_slice(x, (1, 0, 2), (2, 6, 3)).sum() * y + jax.lax.dynamic_update_slice(x, y[:2, :3], (1, 2, 0))
    ),
    "split": lambda x, y: (
        sum((-1) ** i * part.sum() for a in range(3) for i, part in enumerate(jnp.split(x, 2, a))) * y
    ),
    "matmul free": lambda x, y: jnp.einsum("abc,dbc->ad", x, y),
    "matmul batch": lambda x, y: jnp.einsum("abc,abd->acd", x, y),
    "matmul both": lambda x, y: jnp.einsum("abc,adc->abd", x, x) @ y,
    "matmul outer": lambda x, y: jnp.einsum("abc,def->ad", x, x * y),
    "matmul transposed": lambda x, y: jnp.einsum("abc,cd->dab", x, y[0].T @ y[1]),
    "split two ways": lambda x, y: (lambda m: (m * m.T).sum() * y)(jnp.sin(x[0].T @ y[0])),
    "take": lambda x, y: sum(jnp.take(x, INDEX % 4, a).sum() for a in range(3)) * y + x[INDEX].sum((0, 1)),
    "take of every place": lambda x, y: sum(jnp.take(x, np.arange(x.shape[a]), a) * y for a in range(3)),
    "take clipped": lambda x, y: sum(jnp.take(x, FAR, a, mode="clip").sum() for a in range(3)) * y,
    "take wrapped": lambda x, y: sum(jnp.take(x, FAR, a, mode="wrap").sum() for a in range(3)) * y,
    "take filled": lambda x, y: sum(jnp.take(x, FAR, a, mode="fill", fill_value=7.0).sum() for a in range(3)) * y,
    "take missing": lambda x, y: (
        jnp.nan_to_num(jnp.take(x, FAR, 0), nan=3.0).sum() + jnp.nan_to_num(jnp.take(x, FAR, 2), nan=2.0).sum() * y
    ),
    "indices of several dims": lambda x, y: (
        x[jnp.array([0, 3, 1]), jnp.array([5, 1, 2])].sum(0) + x[jnp.array([0, 3]), :, jnp.array([7, 2])].sum() * y
    ),
    "take along": lambda x, y: sum(jnp.take_along_axis(x, (jnp.abs(y) * 9).astype(jnp.int32) % 4, a) for a in range(3)),
    "looked up by split": lambda x, y: y[0, 0][(jnp.abs(x) * 9).astype(jnp.int32) % 8] * x,
    "one hot": lambda x, y: (jax.nn.one_hot(INDEX % 8, 8)[:, :, None] * x[:2, None, :3]).sum() * y,
    "custom_jvp": lambda x, y: (
        jax.nn.relu(x * y) + jax.nn.relu6(x) * jax.nn.silu(y) + jax.nn.gelu(x, approximate=False)
    ),
    "custom_vjp": lambda x, y: _cube(x * y, jnp.int32(3)) + _cube(x.sum(0), jnp.int32(2)),
    "custom of whole": lambda x, y: jax.nn.relu(y) * x + jax.nn.relu((x * y).sum()) * x,
    "remat": lambda x, y: jax.checkpoint(lambda x: jnp.sin(jnp.einsum("abc,dbc->ad", x, y)))(x),
    "remat by policy": lambda x, y: jax.checkpoint(
        lambda x: jnp.sin(x @ y[0].T) @ y[1], policy=jax.checkpoint_policies.dots_saveable
    )(x),
    "scan, split later": _carried,
    "scan, split slices": _scanned,
    "cond": _branch,
    "cond, of which a branch is whole": lambda x, y: jax.lax.cond(
        y.sum() > 0, lambda x, y: 2 * x, lambda x, y: y**2, x, y
    ),
    "switch": lambda x, y: jax.lax.switch(
        (y.sum() > 0).astype(int), [lambda x, w: x * 2, lambda x, w: x @ w], x, y[0, :, :].T @ y[1]
    ),
    "fori_loop": lambda x, y: jax.lax.fori_loop(0, 3, lambda i, c: c * y + x, x),
    "while": lambda x, y: _grown(*map(jax.lax.stop_gradient, (x, y))) * x,
    "while of rows": lambda x, y: sum(jax.vmap(_halved, a)(jax.lax.stop_gradient(x * y)).sum() for a in range(3)) * x,
    "matrices": _matrices,
    "transforms": lambda x, y: sum(
        jnp.abs(jnp.fft.fft(x, axis=a)).sum() + jnp.fft.irfft(jnp.fft.rfft(y * x, axis=a), axis=a) for a in (0, 1)
    ),
    "best of several": lambda x, y: jax.lax.approx_max_k(x, 2, reduction_dimension=1)[0].sum(1, keepdims=True) * y,
    "bits": lambda x, y: (
        jnp.where(jax.lax.bitcast_convert_type(x, jnp.int32) > 0, x, y) * jax.lax.clz((x * 99).astype(jnp.int32))
    ),
    "special functions": lambda x, y: jax.scipy.special.polygamma(1, 1 + x**2) * y + jnp.logaddexp2(x, y),
    "gradient inside": lambda x, y: (
        jax.grad(lambda v: (jnp.sin(v) * x).sum())(y) + jax.grad(lambda v: (v**3 * y).sum())(x)
    ),
    "jvp inside": lambda x, y: jax.jvp(lambda v: jnp.tanh(v) * x, (y,), (x,))[1],
    "vmap": lambda x, y: jax.vmap(lambda a, b: a @ b.T, in_axes=(1, 1))(x, y),
    "stop_gradient": lambda x, y: jax.lax.stop_gradient(x) * y + x * jax.lax.stop_gradient(x.sum()),
    "convolution": lambda x, y: jax.lax.conv_general_dilated(
        x, y[:, :, :3], (1,), "SAME", dimension_numbers=("NCH", "OIH", "NCH")
    ),
    "depthwise": lambda x, y: _conv(x, y[:3, :1], groups=8) * _conv(y, x[:3, :1], groups=8),
    "channel multiplier": lambda x, y: _conv(x, jnp.tile(y[:3, :1], (1, 1, 2)), groups=8),
    "grouped": lambda x, y: (
        _conv(x, y[:3, :4], groups=2) * _conv(x, y[:3, :2], groups=4) + _conv(y, x[:3, :4], groups=2)
    ),
    "groups that ranks do not divide": lambda x, y: _conv(jnp.repeat(x, 3, -1), y[:3].transpose(0, 2, 1), groups=3),
    "convolution by parts of x": lambda x, y: (
        _conv(x, y[:3].transpose(0, 2, 1)) * _conv(y, x[:3].transpose(0, 2, 1)) + _conv(y[..., :6], x[:3])[..., :6]
    ),
    "transposed convolution": lambda x, y: (
        _conv(x, y[:3].transpose(0, 2, 1), padding=[(2, 2)], lhs_dilation=(2,)).sum()
        * jax.lax.conv_transpose(y[..., :6], x[:3], (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))
    ),
    "gradients of convolutions": lambda x, y: (
        jax.grad(lambda k: jnp.sin(_conv(x, k, groups=8)).sum())(y[:3, :1])
        * jax.grad(lambda k: jnp.sin(_conv(y, k, groups=2)).sum())(x[:3, :4]).sum()
        + jax.grad(lambda v: jnp.sin(_conv(v, y[:3, :4], groups=2)).sum())(x).sum()
    ),
    "pooling": lambda x, y: sum(
        jax.lax.reduce_window(x * y, start, of, window, (1, 1, 1), "SAME") * y
        for window in ((2, 1, 1), (1, 3, 1), (1, 1, 2))
        for start, of in ((-jnp.inf, jax.lax.max), (0.0, jax.lax.add))
    ),
    "pooling of any kind": lambda x, y: (
        y[:, :5]
        * jax.lax.reduce_window(
            jax.lax.stop_gradient(x), jnp.float32(1), lambda a, b: a * b, (1, 2, 1), (1, 1, 1), "VALID"
        )
    ),
    "gradient of pooling": lambda x, y: (
        jax.grad(lambda v: (jax.lax.reduce_window(v, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 2, 1), "VALID") ** 2).sum())(
            x
        )
        * y
    ),
    "dropout": lambda x, y: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, X), x / 0.5, 0) * y,
    "layer norm": lambda x, y: (
        (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * y[0, 0]
    ),
    "scatter": lambda x, y: y.at[jnp.array([0, 2])].add(x[:2]).at[:, 1].set(x[:, 0]),
    "segment sum": lambda x, y: (
        jax.ops.segment_sum(x, jnp.array([0, 1, 0, 2]), 3) * y[:3]
        + jax.ops.segment_max(x, jnp.array([0, 1, 2, 2]), 3)
        + jax.ops.segment_sum(y, jnp.array([0, 1, 0, 2]), 3) * x[:3]
    ),
    "scatter of parts": lambda x, y: (
        y.at[:, jnp.array([1, 1, 4])].add(x[:, :3]).at[jnp.array([2])].max(x[1:2]).at[..., jnp.array([0, 5])].mul(2.0)
    ),
}


def whole_loss(name: str) -> Callable[..., Any]:
    return lambda x, y: jnp.sum(jnp.asarray(CASES[name](x, y)) * 1.0)


BATTERY = pytest.mark.battery
DIMS = [pytest.param(0, marks=BATTERY), pytest.param(1, marks=BATTERY), 2]


@pytest.fixture(scope="module", params=DIMS, ids=lambda dim: f"dim {dim}")
def results(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return value and gradients of every case, on whole arrays and on two ranks."""
    dim, random = request.param, np.random.default_rng(0)
    x, y = (random.normal(size=shape).astype(np.float32) for shape in (X, Y))
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("tensor",), axis_types=(AxisType.Auto,))

    def local(name: str) -> Callable[..., Any]:
        flat, _ = jx.trace(whole_loss(name), x, y)
        fun, _ = localise(flat, [dim, None], ["x", "y"], RANKS, False, RULES)
        return lambda x, y: fun(x, y)[0]

    def all_cases(loss_of: Callable[[str], Callable[..., Any]]) -> Callable[..., Any]:
        return lambda x, y: {name: jax.value_and_grad(loss_of(name), argnums=(0, 1))(x, y) for name in CASES}

    split = PartitionSpec(*[None] * dim, "tensor")
    outs = {name: (PartitionSpec(), (split, PartitionSpec())) for name in CASES}
    ranks = jax.shard_map(
        all_cases(local), mesh=mesh, in_specs=(split, PartitionSpec()), out_specs=outs, check_vma=False
    )
    return jax.jit(all_cases(whole_loss))(x, y), jax.jit(ranks)(x, y)


@pytest.mark.xdist_group("localise")
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


def test_a_value_that_is_split_two_ways_is_exchanged() -> None:
    """It was gathered: as many times the bytes as there are ranks."""
    x, y = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (X, Y))
    flat, _ = jx.trace(whole_loss("split two ways"), x, y)
    fun, _ = localise(flat, [2, None], ["x", "y"], RANKS, False, RULES)
    local, _ = jx.trace(fun, jax.ShapeDtypeStruct((4, 6, 4), jnp.float32), y, axes={"tensor": RANKS})
    edges = [e.primitive.name for e in local.eqns if e.primitive.name.startswith("tensor_")]
    assert "tensor_exchange" in edges
    assert not {"tensor_all_gather", "tensor_all_gather_replicated"} & {*edges}


STAY = ("while", "while of rows", "matrices", "transforms", "best of several", "bits", "special functions")


@pytest.mark.parametrize("name", STAY)
def test_what_has_a_rule_is_not_gathered(name: str) -> None:
    """Loops, transforms and solves had no rule, so that all their inputs were gathered."""
    x, y = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (X, Y))
    flat, _ = jx.trace(lambda x, y: jnp.sum(CASES[name](x, y)), x, y)
    fun, gathered = localise(flat, [2, None], ["x", "y"], RANKS, False, RULES)
    jx.trace(fun, jax.ShapeDtypeStruct((4, 6, 4), jnp.float32), y, axes={"tensor": RANKS})
    assert not gathered
