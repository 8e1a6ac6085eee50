"""`jp.attention` against a softmax in NumPy's float64: values, gradients, masks, transformations, heads."""

import functools
import json
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.hardware.devices import gpu_topology
from jaxpar.parallel.context.attention import flash
from jaxpar.program import equal as same
from jaxpar.program import jaxpr as jx
from jaxpar.program import kernels

B, T, S, H, K, h = 3, 7, 5, 6, 2, 8
IDS = np.array([[0, 0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0], [4, 4, 1, 1, 1, 1, 9]], np.int32)
LONE = np.array([[0, 1, 1, 1, 3], [0, 0, 0, 0, 0], [9, 9, 9, 9, 4]], np.int32)  # no key for some queries of IDS
HIDDEN = np.random.default_rng(1).random((B, H, T, S)) < 0.5
HIDDEN[1, 2, 3] = True
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "everywhere": {"causal": False},
    "cross": {"causal": False, "keys": S},
    "scale": {"scale": 0.1},
    "window": {"window": 3},
    "segments": {"segment_ids": IDS},
    "segments everywhere": {"segment_ids": IDS, "causal": False},
    "segments cross": {"segment_ids": IDS, "kv_segment_ids": LONE, "causal": False, "keys": S},
    "segments, window": {"segment_ids": IDS, "window": 2},
    "mask": {"mask": ~HIDDEN, "causal": False, "keys": S},
    "mask of keys": {"mask": ~HIDDEN[:, :1, :1], "causal": False, "keys": S},
    "one mask, causal": {"mask": np.tri(T, k=2, dtype=bool)[::-1][None, None]},
    "all": {"mask": IDS[:, None, :, None] != 1, "segment_ids": IDS, "kv_segment_ids": IDS, "window": 4, "scale": 2.0},
}
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def arrays(keys: int = T, queries: int = T, dtype: Any = np.float32) -> Arrays:
    random = np.random.default_rng(0)
    shapes = (B, queries, H, h), (B, keys, K, h), (B, keys, K, h)
    query, key, value = (np.asarray(jnp.asarray(random.normal(size=shape), dtype)) for shape in shapes)
    return query, key, value


def reference(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    *,
    causal: bool = True,
    window: int | None = None,
    segment_ids: np.ndarray | None = None,
    kv_segment_ids: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    scale: float | None = None,
) -> tuple[np.ndarray, Callable[[np.ndarray], Arrays]]:
    """Return attention in float64, and a function from its cotangent to the gradients of query, key and value."""
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    group = query.shape[2] // key.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * np.einsum("bthd,bshd->bhts", query, k)
    is_seen = np.ones(scores.shape, bool)
    i, j = np.ogrid[: scores.shape[2], : scores.shape[3]]
    if causal:
        is_seen &= j <= i
    if window is not None:
        is_seen &= i - j < window
    if segment_ids is not None:
        ids = segment_ids if kv_segment_ids is None else kv_segment_ids
        is_seen &= (segment_ids[:, :, None] == ids[:, None, :])[:, None]
    if mask is not None:
        is_seen &= mask
    weights = np.where(is_seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)

    def pull(cotangent: np.ndarray) -> Arrays:
        d_weights = np.einsum("bthd,bshd->bhts", cotangent, v)
        d_scores = scale * weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
        d_key, d_value = np.einsum("bhts,bthd->bshd", d_scores, query), np.einsum("bhts,bthd->bshd", weights, cotangent)
        d_key, d_value = (x.reshape(*key.shape[:3], group, h).sum(3) for x in (d_key, d_value))
        return np.einsum("bhts,bshd->bthd", d_scores, k), d_key, d_value

    return np.einsum("bhts,bshd->bthd", weights, v), pull


def assert_right(attention: Callable[..., jax.Array], qkv: Arrays, tolerance: float, **options: Any) -> None:
    cotangent = np.random.default_rng(2).normal(size=qkv[0].shape)

    @jax.jit
    def output_and_grads(*qkv: jax.Array) -> tuple[jax.Array, ...]:
        output, pull = jax.vjp(functools.partial(attention, **options), *qkv)
        return output, *pull(jnp.asarray(cotangent, output.dtype))

    expected_output, pull = reference(*qkv, **options)
    for actual, expected in zip(output_and_grads(*qkv), (expected_output, *pull(cotangent)), strict=True):
        assert actual.dtype == qkv[0].dtype
        np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("case", "dtype", "tolerance", "implementation"),
    [
        *((case, np.float32, 3e-5, "xla") for case in CASES),
        *((case, jnp.bfloat16, 0.06, None) for case in ("causal", "segments, window", "all")),
        *((case, np.float16, 0.01, "xla") for case in ("segments cross", "mask")),
    ],
    ids=lambda x: x if isinstance(x, str) else getattr(x, "__name__", ""),
)
def test_equals_a_softmax(case: str, dtype: Any, tolerance: float, implementation: str | None) -> None:
    options = dict(CASES[case])
    qkv = arrays(options.pop("keys", T), dtype=dtype)
    assert_right(functools.partial(jp.attention, implementation=implementation), qkv, tolerance, **options)


def stand_in(
    query: jax.Array, key: jax.Array, value: jax.Array, *, mask: Any, scale: Any, is_causal: bool, **options: Any
) -> jax.Array:
    """Stand in for cuDNN's attention in plain JAX, with its demands and residuals.

    Lengths must be even. The backward pass takes the result, and the logarithm of the softmax's denominator, from the
    forward pass.
    """
    (t, s), group = (query.shape[1], key.shape[1]), query.shape[2] // key.shape[2]
    assert t % 2 == s % 2 == 0
    scale = h**-0.5 if scale is None else scale
    is_seen = jnp.full((1, 1, t, s), True) if mask is None else mask
    i, j = jnp.ogrid[:t, :s]
    if is_causal:
        is_seen &= j <= i
    if window := options["local_window_size"]:
        is_seen &= i - j <= window[0]
    if (lengths := options["key_value_seq_lengths"]) is not None:
        is_seen &= j < lengths[:, None, None, None]

    def weights(q: jax.Array, k: jax.Array, statistics: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        scores = jnp.where(is_seen, scale * jnp.einsum("bthd,bshd->bhts", q, jnp.repeat(k, group, 2)), -(2.0**41))
        statistics = jax.nn.logsumexp(scores, -1) if statistics is None else statistics
        return jnp.exp(scores - statistics[..., None]), statistics

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        probabilities, statistics = weights(q, k)
        output = jnp.einsum("bhts,bshd->bthd", probabilities, jnp.repeat(v, group, 2))
        return output, (q, k, v, statistics, output)

    def backward(residuals: Any, cotangent: jax.Array) -> Any:
        q, k, v, statistics, output = residuals
        p, _ = weights(q, k, statistics)
        row_sums = jnp.einsum("bthd,bthd->bht", cotangent, output)[..., None]
        d_scores = scale * p * (jnp.einsum("bthd,bshd->bhts", cotangent, jnp.repeat(v, group, 2)) - row_sums)
        by_group = lambda x: x.reshape(*k.shape[:3], group, h).sum(3)
        return (
            jnp.einsum("bhts,bshd->bthd", d_scores, jnp.repeat(k, group, 2)),
            by_group(jnp.einsum("bhts,bthd->bshd", d_scores, q)),
            by_group(jnp.einsum("bhts,bthd->bshd", p, cotangent)),
        )

    attend = jax.custom_vjp(lambda *qkv: forward(*qkv)[0])
    attend.defvjp(forward, backward)
    return attend(query, key, value)


@pytest.fixture(scope="class")  # per class, not per test: the caches that it clears must be compiled again
def on_cuda() -> Any:
    """Take the branch of GPUs, with a stand-in for cuDNN."""
    jax_attention = jax.nn.dot_product_attention
    attention = lambda *qkv, implementation, **options: (
        stand_in(*qkv, **options)
        if implementation == "cudnn"
        else jax_attention(*qkv, implementation=implementation, **options)
    )
    clear = lambda: [f() for f in (jax.clear_caches, flash._flash.cache_clear, flash.refusal.cache_clear)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.nn, "dot_product_attention", attention)
        patch.setattr(jax.lax, "platform_dependent", lambda *arrays, cuda, default: cuda(*arrays))
        clear()
        yield
    clear()


def assert_vmaps(implementation: str | None) -> None:
    """Check attention under vmap with only the query mapped, which JAX's own rule for cuDNN refuses."""
    query, key, value = arrays()
    queries = np.stack([query, -query, 2 * query])
    mask = ~HIDDEN[:1, :1, :, :1] | np.eye(T, dtype=bool)
    attention = lambda q, k, v: jp.attention(q, k, v, mask=mask, segment_ids=IDS, implementation=implementation)
    loss = lambda q: jnp.square(attention(q, key, value)).sum()
    losses_and_grads = jax.vmap(jax.value_and_grad(loss))(queries)
    for i, q in enumerate(queries):
        output, pull = reference(q, key, value, mask=mask, segment_ids=IDS)
        np.testing.assert_allclose(losses_and_grads[0][i], np.square(output).sum(), rtol=1e-4)
        np.testing.assert_allclose(losses_and_grads[1][i], pull(2 * output)[0], rtol=1e-4, atol=1e-4)


def test_vmap_xla() -> None:
    assert_vmaps(None)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.xdist_group("attention on cuda")
class TestOnCuda:
    @pytest.mark.parametrize("case", CASES)
    def test_what_surrounds_cudnn_is_right(self, case: str) -> None:
        options = dict(CASES[case])
        qkv = arrays(options.pop("keys", T))
        assert_right(functools.partial(jp.attention, implementation="cudnn"), qkv, 3e-5, **options)

    def test_vmap_cudnn(self) -> None:
        assert_vmaps("cudnn")


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_transformed(dtype: Any) -> None:
    """Gradients of four layers under jit, scan and remat equal those of a Python loop in float64."""
    x = arrays(dtype=dtype)[0]

    def loss(x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x, _: (jp.attention(x, x[:, :, :K], x[:, :, K : 2 * K], segment_ids=IDS), None))
        return jnp.square(jax.lax.scan(layer, x, None, length=4)[0].astype(jnp.float32)).sum()

    grad = jax.jit(jax.grad(loss))(x)
    pulls, y = [], x.astype(np.float64)
    for _ in range(4):
        y, pull = reference(y, y[:, :, :K], y[:, :, K : 2 * K], segment_ids=IDS)
        pulls.append(pull)
    cotangent = 2 * y
    for pull in reversed(pulls):
        d_query, d_key, d_value = pull(cotangent)
        cotangent = d_query + np.concatenate([d_key, d_value, np.zeros((B, T, H - 2 * K, h))], 2)
    error = np.abs(np.asarray(grad, np.float64) - cotangent).max() / np.abs(cotangent).max()
    assert error < (1e-5 if dtype == np.float32 else 0.04)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_a_query_that_sees_no_key_gets_zeros(implementation: str | None) -> None:
    query, key, value = arrays(S)
    options = {"causal": False, "segment_ids": IDS, "kv_segment_ids": LONE, "implementation": implementation}
    output, pull = jax.vjp(lambda *qkv: jp.attention(*qkv, **options), query, key, value)
    sees_nothing = ~(IDS[:, :, None] == LONE[:, None, :]).any(-1)
    assert 0 < sees_nothing.sum() < sees_nothing.size
    grads = pull(jnp.full_like(output, jnp.inf).at[~sees_nothing].set(1.0))  # the cotangents of a loss over garbage
    assert not np.any(output[sees_nothing])
    assert not np.any(grads[0][sees_nothing])
    assert all(np.all(np.isfinite(g)) for g in grads)


@pytest.mark.parametrize("case", ["segments cross", "mask", "mask of keys", "all"])
def test_heads_apart_are_heads_together(case: str) -> None:
    """The kernel in the trace, on the heads of each of two ranks, gives the results for these heads."""
    options = dict(CASES[case])
    names = [name for name in ("segment_ids", "kv_segment_ids", "mask") if name in options]
    static = {name: value for name, value in options.items() if name not in (*names, "keys")}
    call = lambda q, k, v, *optional: jp.attention(q, k, v, **dict(zip(names, optional, strict=True)), **static)
    inputs = (*arrays(options.pop("keys", T)), *(options[name] for name in names))
    (eqn,) = [e for e in jax.make_jaxpr(call)(*inputs).eqns if kernels.of(e)]
    kernel = kernels.of(eqn)
    assert kernel is not None
    parts = [
        [x if d is None else np.split(x, 2, d)[i] for x, d in zip(inputs, kernel.in_dims, strict=True)] for i in (0, 1)
    ]
    assert parts[0][0].shape[2] == H // 2
    together = np.concatenate([kernel.fun(*part) for part in parts], kernel.out_dims[0])
    np.testing.assert_allclose(together, call(*inputs), rtol=1e-5, atol=1e-5)


def test_layers_of_a_loop_are_alike() -> None:
    def loss(x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = jp.attention(x, x, x, segment_ids=jnp.asarray(IDS), scale=0.3)
        return x.sum()

    flat, _ = jx.trace(loss, jnp.asarray(arrays(dtype=jnp.bfloat16)[0]))
    first, second = (e for e in flat.eqns if e.primitive.name not in ("reduce_sum", "convert_element_type"))
    assert same.differing(first, second) is None


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"query": np.ones((T, H, h))}, ("query [7, 6, 8] has 3 dims", "[rows, positions, heads, head_dim]")),
        ({"key": np.ones((B, T, K, h))}, ("key is float64, query float32", "bfloat16, float16, float32")),
        ({"value": np.ones((B, S, K, h), np.float32)}, ("value [3, 5, 2, 8]", "[3, S, K, 8]")),
        ({"query": np.ones((B, T, 5, h), np.float32)}, ("2 key heads do not divide 5 query heads", "divisor of 5")),
        ({"query": np.ones((B, S, H, h), np.float32)}, ("queries as keys, not 5 and 7", "causal=False and a mask")),
        ({"window": 2, "causal": False}, ("window=2, causal=False", "needs causal=True")),
        ({"window": 0}, ("window=0", "1 or more")),
        ({"scale": np.ones(1)}, ("scale is ndarray", "multiply the query")),
        ({"implementation": "flash"}, ("implementation='flash'", "'cudnn', 'xla'")),
        ({"implementation": "cudnn"}, ("'cudnn' for query float32 [3, 7, 6, 8]", "implementation='xla'")),
        ({"kv_segment_ids": IDS}, ("without segment_ids", "queries' ids")),
        ({"segment_ids": LONE}, ("segment_ids is int32 [3, 5]", "integers [3, 7]")),
        ({"segment_ids": IDS * 1.0}, ("segment_ids is float64", "integers")),
        ({"mask": IDS}, ("mask is int32 [3, 7]", "bool [3 or 1, 6 or 1, 7 or 1, 7 or 1]")),
        ({"mask": ~HIDDEN[:, :2]}, ("mask is bool [3, 2, 7, 5]", "6 or 1")),
    ],
)
def test_errors_say_what_to_do(change: dict[str, Any], parts: tuple[str, ...]) -> None:
    inputs: dict[str, Any] = dict(zip(("query", "key", "value"), arrays(), strict=True)) | change
    with pytest.raises(ValueError, match="(?s)" + ".*".join(map(re.escape, parts))):
        jp.attention(**inputs)


def compiled(loss: Callable[..., jax.Array], *shapes: tuple[int, ...], dtype: Any = jnp.bfloat16, **ids: Any) -> Any:
    """Compile the gradient of a loss for one H100."""
    placement = jax.sharding.SingleDeviceSharding(gpu_topology("1xH100")[0])
    inputs = [jax.ShapeDtypeStruct(shape, dtype, sharding=placement) for shape in shapes]
    ids = {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=placement) for name, shape in ids.items()}
    grad = jax.grad(lambda qkv, ids: loss(*qkv, **ids).astype(jnp.float32).sum())
    return jax.jit(grad).trace(inputs, ids).lower(lowering_platforms=("cuda",)).compile()


def cudnn_calls(program: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and configurations of cuDNN's kernels."""
    lines = [line for line in program.as_text().splitlines() if 'custom_call_target="__cudnn$' in line]
    name = lambda line: re.findall(r'custom_call_target="__cudnn\$(\w+)"', line)[0]
    config = lambda line: json.loads(re.findall(r"backend_config=(\{.*\})", line)[0])["cudnn_fmha_backend_config"]
    return [(name(line), config(line)) for line in lines]


PLAIN, BIASED = "fmhaSoftmax", "fmhaScaleBiasSoftmax"


@pytest.mark.cuda_compiler
@pytest.mark.parametrize(
    ("kernel", "mask", "t", "options", "ids"),
    [
        (PLAIN, "CAUSAL", 256, {}, {}),
        (PLAIN, "CAUSAL", 255, {}, {}),
        (PLAIN, "CAUSAL", 256, {"window": 9}, {}),
        (PLAIN, "NO_MASK", 256, {"causal": False}, {}),
        (PLAIN, "PADDING", 255, {"causal": False}, {}),
        (BIASED, "CAUSAL", 255, {}, {"segment_ids": (2, 255)}),
        (BIASED, "CAUSAL", 256, {"window": 9}, {"segment_ids": (2, 256)}),
    ],
)
def test_cudnn_on_gpus(kernel: str, mask: str, t: int, options: dict[str, Any], ids: dict[str, Any]) -> None:
    """Compiled for H100s: one forward and one backward kernel, which mask by themselves where they can."""
    qkv = (2, t, 4, 64), (2, t, 2, 64), (2, t, 2, 64)
    program = compiled(functools.partial(jp.attention, **options), *qkv, **ids)
    calls = cudnn_calls(program)
    assert [name for name, _ in calls] == [kernel, f"{kernel}Backward"]
    window = options.get("window", 0) if kernel == PLAIN else 0
    assert all((c["mask_type"], c["sliding_window_length"]) == (mask, window) for _, c in calls)


@pytest.mark.cuda_compiler
@pytest.mark.slow
def test_xla_on_gpus() -> None:
    qkv = (1, 32, 2, 64), (1, 32, 1, 64), (1, 32, 1, 64)
    assert not cudnn_calls(compiled(jp.attention, *qkv, dtype=jnp.float32))
    assert not cudnn_calls(compiled(functools.partial(jp.attention, implementation="xla"), *qkv))
    assert not cudnn_calls(compiled(jp.attention, *((1, 32, 2, 60),) * 3))


@pytest.mark.cuda_compiler
def test_vmap_on_gpus() -> None:
    """Mapped dims become rows. JAX's own rule gives a bias that is not mapped too few rows."""
    ids = jnp.zeros((2, 64), jnp.int32)
    attention = lambda q, k, v: jax.vmap(lambda q: jp.attention(q, k, v, segment_ids=ids))(q)
    calls = cudnn_calls(compiled(attention, (3, 2, 64, 4, 64), (2, 64, 2, 64), (2, 64, 2, 64)))
    assert [c["intermediate_tensor_shape"]["dimensions"][0] for _, c in calls] == ["6", "6"]


@pytest.mark.cuda_compiler
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_no_scores_are_kept(implementation: str | None) -> None:
    """The residuals of four scanned layers are query, key, value and result; no scores."""
    b, t, heads, d = 1, 2048, 16, 64

    def layers(x: jax.Array) -> jax.Array:
        step = lambda x, _: (jp.attention(x, x, x, implementation=implementation), None)
        return jax.lax.scan(step, x, None, length=4)[0]

    program = compiled(layers, (b, t, heads, d))
    score_bytes = 2 * b * heads * t * t  # of one layer, in bfloat16
    residual_bytes = 4 * 4 * (2 * b * t * heads * d)
    # XLA holds one layer's scores and their gradient in float32, and copies in bfloat16.
    assert program.memory_analysis().temp_size_in_bytes < 2 * residual_bytes + (
        6 * score_bytes if implementation else 0
    )
    # Forward and backward are two loops, whose kernels the compiler cannot merge: the forward runs once.
    expected = [] if implementation else [PLAIN, f"{PLAIN}Backward"]
    assert sorted(name for name, _ in cudnn_calls(program)) == expected


@pytest.mark.cuda_compiler
def test_heads_over_gpus() -> None:
    """In a fully manual region, as under tensor parallelism, cuDNN computes a rank's heads; nothing is communicated."""
    mesh = Mesh(np.array(gpu_topology("8xH100")).reshape(2, 4), ("data", "tensor"))
    spec = P("data", None, "tensor")
    local = jax.shard_map(jp.attention, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    sharded = jax.sharding.NamedSharding(mesh, spec)
    inputs = [jax.ShapeDtypeStruct((4, 128, heads, 64), jnp.bfloat16, sharding=sharded) for heads in (8, 4, 4)]
    grad = jax.grad(lambda qkv: local(*qkv).astype(jnp.float32).sum())
    program = jax.jit(grad).trace(inputs).lower(lowering_platforms=("cuda",)).compile()
    calls = cudnn_calls(program)
    assert [c["intermediate_tensor_shape"]["dimensions"] for _, c in calls] == [["2", "2", "128", "128"]] * 2
    assert not re.search(r"all-gather|all-reduce|all-to-all|permute", program.as_text())
