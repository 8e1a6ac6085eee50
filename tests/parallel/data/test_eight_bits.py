"""Weights and gradients that travel in 8 bits, compared with NumPy code that quantises in the same way.

Received arrays are compared bit by bit, steps with one device, collectives by kind, count and bytes.
"""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import check as check_cell
from cells import descended, initial
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.inspect.check import check as proof_of
from jaxpar.inspect.explain import explain
from jaxpar.inspect.ledger import Ledger
from jaxpar.layout.precision import quantised
from jaxpar.models import llama, mixtral
from jaxpar.parallel import Use, rule_of

SGD = optax.sgd(0.05, momentum=0.9)
STEPS = 2
MIN_SIZE = 128 * 128  # elements; smaller arrays travel unquantised
# 136 x 136 over 2 or 4 devices is not a multiple of a block of 256; the keys and values of 136 x 68 are too small.
CONFIG = llama.Config(vocab=128, dim=136, layers=2, heads=4, kv_heads=2, ffn=152)


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """Return a shard as other ranks receive it: quantised in blocks of 256, and dequantised."""
    blocks = np.pad(x.astype(np.float32).ravel(), (0, -x.size % 256)).reshape(-1, 256)
    amax = np.maximum(np.abs(blocks).max(1, keepdims=True), np.float32(1e-30))
    if kind == "int8":
        scale = (amax * np.float32(1 / 127)).astype(x.dtype).astype(np.float32)
        blocks = np.round(blocks * (np.float32(127) / amax)) * scale
    else:
        factor = np.exp2(np.floor(np.log2(448 / amax)))
        blocks = (blocks * factor).astype(jnp.float8_e4m3fn).astype(np.float32) / factor
    return blocks.ravel()[: x.size].reshape(x.shape).astype(x.dtype)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(
    ("shape", "dim", "dtype"), [((8, 2056), 0, "float32"), ((131, 136), 1, "bfloat16"), ((8, 2048), 0, "bfloat16")]
)
def test_what_arrives_is_what_plain_code_rounds(kind: str, shape: tuple[int, ...], dim: int, dtype: str) -> None:
    x = jax.random.normal(jax.random.key(0), shape).at[0, 0].set(0.0).astype(dtype)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("fsdp", "context"))
    use = Use(dim, ("fsdp", "context"), (), False, jnp.dtype("float32"))
    spec = P(*(["fsdp", "context"] if d == dim else None for d in range(2)))
    precision = "fp8" if kind == "fp8" else "bf16"
    fetch = functools.partial(rule_of(jp.Strategy.parse(f"fsdp,precision={precision},gather={kind}")).fetch, use=use)
    fetch_whole = jax.jit(jax.shard_map(fetch, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False))
    shards = np.split(np.asarray(x), 8, dim)
    np.testing.assert_array_equal(fetch_whole(x), np.concatenate([rounded(shard, kind) for shard in shards], dim))
    shard_size = x.size // 8
    (sent,) = Ledger.from_jaxpr(jax.make_jaxpr(fetch_whole)(x), mesh)
    assert (sent.kind, sent.dtype, sent.count) == ("all-gather", "uint8", 1)
    assert sent.bytes == 8 * (shard_size + 4 * math.ceil(shard_size / 256))
    # A NaN spoils its own block alone.
    with_nan = jnp.asarray(fetch_whole(x.at[3, 5].set(jnp.nan)))
    assert np.isnan(with_nan[3, 5])
    assert np.isnan(with_nan).sum() <= 256


@pytest.mark.parametrize(
    ("preset", "shape", "dim", "dtype"),
    [("zero2", (131, 136), 1, "bfloat16"), ("fsdp", (2056, 8), 0, "float32"), ("ddp", (131, 137), 0, "float32")],
)
def test_sums_are_those_of_what_plain_code_rounds(preset: str, shape: tuple[int, ...], dim: int, dtype: str) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))
    shard_axes, replica_axes = ((), ("data", "fsdp")) if preset == "ddp" else (("fsdp",), ("data",))
    use = Use(dim, shard_axes, replica_axes, True, jnp.dtype("float32"))
    give = functools.partial(rule_of(jp.Strategy.parse(f"{preset},reduce=int8")).give, use=use)
    spec = P(*("fsdp" if d == dim and shard_axes else None for d in range(2)))
    reduce_grads = jax.jit(
        jax.shard_map(lambda x: give(x[0]), mesh=mesh, in_specs=P(("data", "fsdp")), out_specs=spec, check_vma=False)
    )
    grads = jax.random.normal(jax.random.key(0), (8, *shape)).astype(dtype)  # one of each device

    def sum_rounded(rows: Any) -> np.ndarray:
        """Return the sum of rounded rows, in the order of the ranks."""
        return np.asarray(jnp.stack([rounded(row.astype(np.float32), "int8") for row in rows]).sum(0))

    def all_reduced(flat: list[np.ndarray]) -> np.ndarray:
        """Return the all-reduce of flat arrays: sums of their parts, each rounded again."""
        parts = zip(*(np.split(np.pad(x, (0, -x.size % len(flat))), len(flat)) for x in flat), strict=True)
        return np.concatenate([rounded(sum_rounded(rows), "int8") for rows in parts])[: flat[0].size]

    if preset == "ddp":
        expected = all_reduced([np.asarray(grad).ravel() for grad in grads]).reshape(shape)
    else:
        shards = [[np.split(np.asarray(grad), 4, dim)[rank] for grad in grads] for rank in range(4)]
        scattered = [[sum_rounded(rows[:4]), sum_rounded(rows[4:])] for rows in shards]  # for both replicas
        if grads[0].size // 4 < MIN_SIZE:
            reduced = [sum(replicas) for replicas in scattered]  # the all-reduce of a small shard is not quantised
        else:
            reduced = [all_reduced([x.ravel() for x in replicas]).reshape(replicas[0].shape) for replicas in scattered]
        expected = np.concatenate(reduced, dim)
    np.testing.assert_allclose(reduce_grads(grads), expected, rtol=1e-6, atol=1e-6)
    ledger = Ledger.from_jaxpr(jax.make_jaxpr(reduce_grads)(grads), mesh)
    sends = {(sent.kind, sent.axes): (sent.dtype, sent.bytes) for sent in ledger}
    encoded_bytes = lambda n: n + 4 * math.ceil(n / 256)
    if preset == "ddp":
        total_bytes = 8 * encoded_bytes(math.ceil(grads[0].size / 8))
        assert sends == {(kind, replica_axes): ("uint8", total_bytes) for kind in ("all-to-all", "all-gather")}
    else:
        shard_size = grads[0].size // 4
        assert sends == {
            ("all-to-all", shard_axes): ("uint8", 4 * encoded_bytes(shard_size)),
            ("all-reduce", replica_axes): ("float32", 4 * shard_size),
        }


@pytest.mark.parametrize("dims", [(0,), (1,)])
def test_fp8_products_round_what_arrives_to_the_same_numbers(dims: tuple[int, ...]) -> None:
    x = jax.random.normal(jax.random.key(0), (256, 256), jnp.bfloat16) / 50
    received = jnp.asarray(rounded(np.asarray(x), "fp8"))
    assert (received != x).any()
    for actual, expected in zip(quantised(received, dims), quantised(x, dims), strict=True):
        np.testing.assert_array_equal(actual.astype(jnp.float32), expected.astype(jnp.float32))


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("ddp,gather=int8", r"gather='int8' with data=-1: only zero=3 gathers weights .* fsdp=-1, or leave gather out"),
        ("zero2,gather=int8", r"gather='int8' with fsdp=-1,zero=2: only zero=3"),
        ("fsdp,gather=fp8,precision=bf16", r"precision='bf16'.*use precision='fp8', or gather='int8'"),
        (
            "dp,reduce=int8",
            r"reduce='int8' with data=-1,server=true: it is how ddp and ZeRO send .* use ddp or fsdp=-1",
        ),
        ("fsdp,reduce=int4", r"reduce='int4' is unknown; use one of f32, compute, int8"),
        ("fsdp,gather=int4", r"gather='int4' is unknown; use one of compute, int8, fp8"),
    ],
)
def test_what_sends_nothing_in_8_bits_is_refused(strategy: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jp.Strategy.parse(strategy)


@functools.cache
def model(experts: bool = False) -> Any:
    if experts:
        config = mixtral.Config(vocab=128, dim=136, layers=2, heads=4, kv_heads=2, ffn=152, experts=4)
        return jp.from_nnx(lambda rngs: mixtral.Mixtral(config, rngs=rngs), mixtral.loss, rows="independent")
    return jp.from_nnx(lambda rngs: llama.Llama(CONFIG, rngs=rngs), llama.loss)


@functools.cache
def text() -> Any:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 128, (8, 5)).astype(np.int32)
    return {"tokens": tokens, "mask": rng.uniform(0.1, 2.0, (8, 4)).astype(np.float32)}


def as_gathered(step: Any, params: Any) -> Any:
    """Return parameters as ranks compute with them: rounded shard by shard, and stacks layer by layer."""

    def round_leaf(leaf: Any, x: np.ndarray) -> np.ndarray:
        num_layer_dims = leaf.stage + 1 if leaf.path.startswith("layers/") else 0
        ranks = [step.mesh.shape[axis] for axis in ("tensor", "expert") if getattr(leaf, axis) is not None]
        if leaf.dim is None or math.prod(x.shape[num_layer_dims:]) // math.prod(ranks) < MIN_SIZE:
            return x
        result = x.copy()
        for index in step.layout.sharding(leaf.spec()).devices_indices_map(x.shape).values():
            layers = x[index].reshape(-1, *x[index].shape[num_layer_dims:])
            result[index] = np.stack([rounded(layer, "int8") for layer in layers]).reshape(x[index].shape)
        return result

    stored = jax.tree.map(np.asarray, step.layout.to_stored(params))
    leaves = [round_leaf(leaf, x) for leaf, x in zip(step.layout.leaves, jax.tree.leaves(stored), strict=True)]
    return jax.tree.map(np.asarray, step.layout.to_logical(jax.tree.unflatten(jax.tree.structure(stored), leaves)))


GATHER = (
    "fsdp=2,microbatches=2",
    "fsdp=4,remat=layer",
    "data=2,fsdp=2,prefetch=1,microbatches=2",
    "fsdp=2,tensor=2,sequence=true",
    "fsdp=2,context=2",
    "fsdp=2,expert=2",
    "fsdp=2,microbatches=2,concurrent=2",
    "pipe=2,fsdp=2,microbatches=4",
    "pipe=2,fsdp=2,microbatches=4,schedule=zb-h1",
    "pipe=2,fsdp=2,microbatches=4,prefetch=1",
)
REDUCE = (
    "fsdp=2,microbatches=2",
    "data=2,fsdp=2,zero=2",
    "data=4",
    "fsdp=2,zero=1,microbatches=2",
    "fsdp=2,sync=step,microbatches=2,gather=int8",
    "data=2,fsdp=2,prefetch=1,microbatches=2",
    "fsdp=2,tensor=2,sequence=true",
    "fsdp=2,expert=2",
    "pipe=2,fsdp=2,microbatches=4,schedule=zb-h1",
)


def cells() -> list[Any]:
    """Return all strategies; outside the battery is the first that gathers and the first that reduces in int8."""
    gather, reduce = (
        [f"{text},{name}=int8" for text in texts] for name, texts in (("gather", GATHER), ("reduce", REDUCE))
    )
    others = [pytest.param(strategy, marks=pytest.mark.battery) for strategy in (*gather[1:], *reduce[1:])]
    return [pytest.param(gather[0], marks=pytest.mark.slow), reduce[0], *others]


@pytest.mark.parametrize("strategy", cells())
def test_gradients_are_those_at_rounded_weights(strategy: str) -> None:
    """One device computes its gradients at the rounded weights, if weights are gathered in int8. Gradients that are
    rounded themselves are near its own.
    """
    sizes = re.findall(r"(?:data|fsdp|tensor|pipe|context|expert)=(\d)", strategy)
    net, devices = model("expert" in strategy), jax.devices()[: math.prod(map(int, sizes))]
    step = jp.make_train_step(net, SGD, strategy, mesh=devices)
    call = lambda params: (sums := net.call(params, None, text(), None)[0]["loss"]).total / sums.count
    computed_with = lambda params: as_gathered(step, params) if "gather" in strategy else params
    first, gradient = initial(net), jax.jit(jax.grad(call))
    trained = descended(lambda params, _: gradient(computed_with(params)), net.unwrap(first), SGD, STEPS)
    tolerance = {"tolerance": 0.05} if "reduce" in strategy else {}
    check_cell(step, net, first, text(), STEPS, *trained, **tolerance)


def test_explain_and_check_have_the_bytes() -> None:
    step = jp.make_train_step(model(), SGD, "fsdp=2,gather=int8,reduce=int8", mesh=jax.devices()[:2])
    compiled = step.compile(text())
    assert proof_of(step, text(), compiled).ok
    page = " ".join(str(explain(step, text(), compiled)).split())
    for what, sent in (("reduce=int8: gradients", ""), ("gather=int8: weights", r"[\d.]+ kB a")):
        line = f"{what} from 16,384 elements go over fsdp in bytes, with a scale for each 256: {sent}"
        assert re.search(line, page), page
