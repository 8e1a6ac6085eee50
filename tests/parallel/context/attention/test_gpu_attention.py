"""Attention over a context axis, compiled for H100s that are not there: hops beside kernels, bytes, memory."""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.backend.text import size
from jaxpar.hardware.compiled.kernels import Done, Executable, Kernel, Operation, Start, While
from jaxpar.hardware.devices import gpu_topology, target
from jaxpar.inspect.ledger import Ledger
from jaxpar.models import llama, named
from jaxpar.parallel.context.attention.fused import biased_attention
from jaxpar.parallel.context.ops import (
    gather_attention,
    gather_bytes,
    ring_attention,
    ring_bytes,
    ulysses_attention,
    ulysses_bytes,
    usp_attention,
    usp_bytes,
)

pytestmark = [pytest.mark.cuda_compiler, pytest.mark.xdist_group("gpu attention")]
GROUP = 2  # of ranks that share heads
WAYS = {
    "gather": gather_attention,
    "ulysses": ulysses_attention,
    "ring": ring_attention,
    "usp": functools.partial(usp_attention, group=GROUP),
}
ROWS, HEADS, GROUPS, SIZE = 1, 32, 8, 128  # Llama-3-8B's


@functools.cache
def compiled(way: str, ranks: int, length: int, what: str = "both", order: str = "zigzag") -> tuple[Any, Mesh]:
    """Attention in bfloat16, forward, backward or both."""
    mesh = Mesh(np.array(gpu_topology("8xH100")[:ranks]), ("context",))
    held = P(None, "context")

    def local(q: jax.Array, k: jax.Array, v: jax.Array, given: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *x: WAYS[way](*x, axis="context", causal=True, order=order), q, k, v)
        return {"forward": out, "both": (out, pull(given))}[what]

    array = lambda heads: jax.ShapeDtypeStruct(
        (ROWS, length, heads, SIZE), jnp.bfloat16, sharding=NamedSharding(mesh, held)
    )
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=held, out_specs=held, check_vma=False))
    traced = mapped.trace(*map(array, (HEADS, GROUPS, GROUPS, HEADS)))
    return traced.lower(lowering_platforms=("cuda",)).compile(), mesh


def loops(operations: Sequence[Operation]) -> Iterator[While]:
    for one in operations:
        if isinstance(one, While):
            yield from (one, *loops(one.body))


def attention(one: Operation) -> bool:
    return isinstance(one, Kernel) and "dot_product_attention" in one.name


@pytest.mark.parametrize(
    ("way", "ranks"),
    [
        pytest.param("ring", 4, marks=pytest.mark.battery),
        ("ring", 8),
        pytest.param("usp", 8, marks=pytest.mark.battery),
    ],
)
def test_hops_of_the_ring_span_the_attention(way: str, ranks: int) -> None:
    """In the scheduled program: each iteration sends once, starts before its first kernel and ends after its last; in
    the backward what moves are keys, values and both of their gradients.
    """
    program, mesh = compiled(way, ranks, 32_768)
    operations = Executable(program.as_text(), mesh).operations
    found = [loop for loop in loops(operations) if loop.trips == ranks // (GROUP if way == "usp" else 1) - 2]
    assert len(found) == 2
    block = 2 * ROWS * 32_768 // ranks * GROUPS * SIZE
    for loop, moved in zip(found, (2 * block, 2 * block + 4 * block), strict=True):
        (start,) = (i for i, one in enumerate(loop.body) if isinstance(one, Start))
        (done,) = (i for i, one in enumerate(loop.body) if isinstance(one, Done))
        kernels = [i for i, one in enumerate(loop.body) if attention(one)]
        assert loop.body[start].bytes == moved
        assert len(kernels) == 2
        assert start < min(kernels)
        assert max(kernels) < done
    # Before and after the loops as well, but for the last hop, of gradients that go home.
    hops = [i for i, one in enumerate(operations) if isinstance(one, Start) and one.kind == "collective-permute"]
    ends = [next(j for j, one in enumerate(operations) if one == Done(operations[i].name)) for i in hops]
    spans = [any(map(attention, operations[i:j])) for i, j in zip(hops, ends, strict=True)]
    assert spans == [True, True, False]


@pytest.mark.parametrize(
    ("way", "ranks"),
    [
        pytest.param("ring", 4, marks=pytest.mark.battery),
        ("ring", 8),
        pytest.param("usp", 8, marks=pytest.mark.battery),
    ],
)
def test_every_block_is_cudnns(way: str, ranks: int) -> None:
    """Own keys, then two kernels in each loop and after it, forward and backward; and no other product."""
    text = compiled(way, ranks, 32_768)[0].as_text()
    assert text.count('custom_call_target="__cudnn$fmha') == 2 * (1 + 2 + 2)
    assert not [line for line in text.splitlines() if " dot(" in line or "__cublas" in line]


@pytest.mark.parametrize("way", ["gather", "ulysses", "ring", pytest.param("usp", marks=pytest.mark.battery)])
def test_bytes_forward_are_those_of_the_closed_form(way: str) -> None:
    program, mesh = compiled(way, 8, 32_768, "forward")
    sizes = ROWS, 32_768, *((HEADS,) if way in ("ulysses", "usp") else ()), GROUPS, SIZE, 8
    sizes = *sizes, *((GROUP,) if way == "usp" else ()), 2
    closed = {"gather": gather_bytes, "ulysses": ulysses_bytes, "ring": ring_bytes, "usp": usp_bytes}[way](*sizes)
    assert Ledger.from_hlo(program.as_text(), mesh).total("sent") == closed[0]


def test_a_bias_and_its_gradient_are_cudnns() -> None:
    """Of an odd length; no scores of all rows are there, nor a bias for each of them."""
    rows, length, heads, size = 3, 131, 4, 64
    place = NamedSharding(Mesh(np.array(gpu_topology("8xH100")[:1]), ("data",)), P())

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array) -> jax.Array:
        places = jnp.arange(length)
        bias = table[:, jnp.clip(places[:, None] - places, -8, 7) + 8][None]
        return jnp.square(biased_attention(q, k, v, bias, causal=True, scale=0.1).astype(jnp.float32)).sum()

    x = jax.ShapeDtypeStruct((rows, length, heads, size), jnp.bfloat16, sharding=place)
    table = jax.ShapeDtypeStruct((heads, 16), jnp.float32, sharding=place)
    traced = jax.jit(jax.grad(loss, (0, 1, 2, 3))).trace(x, x, x, table)
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    kernels = "__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"
    assert [text.count(f'custom_call_target="{name}"') for name in kernels] == [1, 1]
    assert not re.search(rf"\[{rows},{heads},13\d,13\d\]", text)


@pytest.mark.battery
def test_temporaries_of_the_ring_fall_with_its_ranks() -> None:
    """At 131,072 tokens, forward and backward."""
    few, many = (compiled("ring", c, 131_072)[0].memory_analysis().temp_size_in_bytes for c in (4, 8))
    assert many < 0.6 * few


@pytest.mark.battery
@pytest.mark.parametrize("way", ["gather", "ulysses", "ring"])
def test_temporaries_of_a_step_fall_with_context(way: str) -> None:
    """Llama-3-8B, 131,072 tokens a row, eight devices: but for the sharded gradients, 4 P / 8 bytes, which the layout
    lists as at rest, and for what `gather` holds of all positions in the backward, keys and values in bfloat16 and
    their gradients in float32. Of 8, the loss itself was computed last, and held the gathered head until then: 16% too
    much.
    """
    length, whole = 131_072, 0
    if way == "gather":
        whole = 2 * length * GROUPS * SIZE * (2 + 4)
    config = named("llama3-8b").config
    found = []
    for ranks in (2, 4, 8):
        loss = functools.partial(llama.chunked_loss, chunk=2048 * ranks)
        model = jp.from_nnx(lambda rngs: llama.Llama(config, rngs=rngs), loss, llama.RULES)
        text = f"context={ranks},fsdp=-1,attention={way},precision=bf16,remat=layer"
        step = jp.make_train_step(model, optax.adamw(3e-4), text, mesh=target("8xH100").devices)
        program = step.compile(config.example(8 // ranks, length))
        found.append(program.memory_analysis().temp_size_in_bytes - 4 * config.parameters / 8 - whole)
    for ranks, bytes_ in zip((4, 8), found[1:], strict=True):
        assert bytes_ * ranks == pytest.approx(2 * found[0], rel=0.05)


def of_long_rows() -> jax.stages.Compiled:
    """A step of Llama-3-8B with a plain loss, 131,072 tokens a row round a ring of eight devices."""
    model = named("llama3-8b")
    text = "context=8,fsdp=-1,attention=ring,precision=bf16,remat=layer"
    step = jp.make_train_step(model.model, optax.adamw(3e-4), text, mesh=target("8xH100").devices)
    return step.compile(model.config.example(1, 131_072))


@pytest.mark.battery
def test_logits_of_a_plain_loss_are_never_whole() -> None:
    """Each device has those of 16,384 tokens: whole, they make it 18.3 GB."""
    program = of_long_rows()
    assert "16384,128256]" not in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 11.8e9


@pytest.mark.battery
def test_attention_that_is_spelled_out_goes_round_the_ring_in_the_memory_of_jp_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a softmax of the model's own 11.6 GB, as by the kernel."""

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        grouped = q.reshape(*k.shape[:3], -1, k.shape[3])
        scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k).astype(jnp.float32) * k.shape[3] ** -0.5
        seen = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1).astype(v.dtype)
        return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q.shape)

    by_kernel = of_long_rows().memory_analysis().temp_size_in_bytes
    for layer in (llama.Layer, llama.Attention):
        monkeypatch.setattr(layer.__call__, "__defaults__", (plain,))
    program = of_long_rows()
    assert "131072,131072]" not in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes == pytest.approx(by_kernel, rel=0.05)


@pytest.mark.slow
def test_attention_that_is_spelled_out_is_fused_on_request() -> None:
    """Flax's attention, whose scores of all positions are kept for the backward, and by cuDNN."""
    model = jp.from_nnx(
        lambda rngs: nnx.MultiHeadAttention(2, 128, decode=False, rngs=rngs),
        lambda net, batch: jnp.square(net(batch["x"], mask=nnx.make_causal_mask(batch["x"][..., 0]))).mean(),
    )
    batch, devices = {"x": jax.ShapeDtypeStruct((2, 1024, 128), jnp.bfloat16)}, target("2xH100").devices
    programs = [
        jp.make_train_step(model, optax.sgd(0.1), f"precision=bf16,kernels={kernels}", mesh=devices[:1]).compile(batch)
        for kernels in ("own", "fused")
    ]
    assert ["__cudnn$fmha" in program.as_text() for program in programs] == [False, True]
    own, fused = (program.memory_analysis().temp_size_in_bytes for program in programs)
    scores = 2 * 2 * 1024 * 1024 * 2  # of two rows and two heads, in bfloat16
    assert own - fused > scores


@pytest.mark.slow
def test_explain_says_what_the_kernel_saves() -> None:
    """Bytes and seconds of scores that pass no memory, four times forward and seven times backward; none by XLA."""
    model = jp.from_nnx(
        lambda rngs: nnx.MultiHeadAttention(2, 128, decode=False, rngs=rngs),
        lambda net, batch: jnp.square(net(batch["x"], mask=nnx.make_causal_mask(batch["x"][..., 0]))).mean(),
    )

    def said(text: str, dtype: Any) -> list[str]:
        batch = {"x": jax.ShapeDtypeStruct((2, 1024, 128), dtype)}
        step = jp.make_train_step(model, optax.sgd(0.1), text, mesh=target("2xH100").devices[:1])
        return [one for one in step.explain(batch).remarks if one.startswith("kernels=fused")]

    (saved,) = said("precision=bf16,kernels=fused", jnp.bfloat16)
    scores = 2 * 2 * 1024 * 1024 * 2
    seconds = 1e-6 + 11 * scores / (0.86 * 3.35e12)
    assert f"no scores in its attention, {size(scores)} a step" in saved
    assert float(re.search(r"([\d.]+) ms of a step", saved)[1]) == pytest.approx(1e3 * seconds, rel=0.01)
    assert not said("precision=bf16", jnp.bfloat16)
    assert not said("kernels=fused", jnp.float32)  # which XLA computes
