"""Attention over a context axis, compiled for absent H100s: hops that overlap with kernels, bytes, memory."""

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
from jaxpar.inspect.explain import explain
from jaxpar.inspect.ledger import Ledger
from jaxpar.models import llama, named
from jaxpar.parallel.context.attention.flash import AttentionOptions
from jaxpar.parallel.context.attention.fused import biased_attention
from jaxpar.parallel.context.ops import (
    Ring,
    gather_attention,
    gather_bytes,
    ring_attention,
    ulysses_attention,
    ulysses_bytes,
    usp_attention,
)

pytestmark = [pytest.mark.cuda_compiler, pytest.mark.xdist_group("gpu attention")]
GROUP = 2  # ranks that share heads
WAYS = {"gather": gather_attention, "ulysses": ulysses_attention, "ring": ring_attention, "usp": usp_attention}
ROWS, HEADS, GROUPS, SIZE = 1, 32, 8, 128  # Llama-3-8B's


@functools.cache
def compiled(way: str, ranks: int, length: int, part: str = "both", order: Any = "zigzag") -> tuple[Any, Mesh]:
    """Compile attention in bfloat16: `part` is "forward", or "both" for forward and backward."""
    mesh = Mesh(np.array(gpu_topology("8xH100")[:ranks]), ("context",))
    spec = P(None, "context")
    ring = Ring("context", order, GROUP if way == "usp" else 1)
    options = AttentionOptions(True, None, None, None, 0, masked=False)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array) -> Any:
        output, pull = jax.vjp(lambda *x: WAYS[way](ring, options, *x), q, k, v)
        return {"forward": output, "both": (output, pull(cotangent))}[part]

    array = lambda heads: jax.ShapeDtypeStruct(
        (ROWS, length, heads, SIZE), jnp.bfloat16, sharding=NamedSharding(mesh, spec)
    )
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    traced = mapped.trace(*map(array, (HEADS, GROUPS, GROUPS, HEADS)))
    return traced.lower(lowering_platforms=("cuda",)).compile(), mesh


def loops(operations: Sequence[Operation]) -> Iterator[While]:
    for operation in operations:
        if isinstance(operation, While):
            yield from (operation, *loops(operation.body))


def attention(operation: Operation) -> bool:
    return isinstance(operation, Kernel) and "dot_product_attention" in operation.name


RINGS = pytest.mark.parametrize(
    ("way", "ranks"),
    [("ring", 8), *(pytest.param(*ring, marks=pytest.mark.battery) for ring in (("ring", 4), ("usp", 8)))],
)


@RINGS
def test_hops_of_the_ring_span_the_attention(way: str, ranks: int) -> None:
    """In the scheduled program each iteration sends once, from before its first kernel to after its last one.

    The forward sends keys and values, the backward also both of their gradients.
    """
    program, mesh = compiled(way, ranks, 32_768)
    operations = Executable(program.as_text(), mesh).operations
    ring_loops = [loop for loop in loops(operations) if loop.trips == ranks // (GROUP if way == "usp" else 1) - 2]
    assert len(ring_loops) == 2
    block = 2 * ROWS * 32_768 // ranks * GROUPS * SIZE
    for loop, moved_bytes in zip(ring_loops, (2 * block, 2 * block + 4 * block), strict=True):
        (start,) = (i for i, operation in enumerate(loop.body) if isinstance(operation, Start))
        (end,) = (i for i, operation in enumerate(loop.body) if isinstance(operation, Done))
        kernels = [i for i, operation in enumerate(loop.body) if attention(operation)]
        assert loop.body[start].bytes == moved_bytes
        assert len(kernels) == 2
        assert start < min(kernels)
        assert max(kernels) < end
    # Hops outside the loops overlap too, except for the last one, which brings gradients home.
    hops = [
        i
        for i, operation in enumerate(operations)
        if isinstance(operation, Start) and operation.kind == "collective-permute"
    ]
    ends = [next(j for j, operation in enumerate(operations) if operation == Done(operations[i].name)) for i in hops]
    spans = [any(map(attention, operations[i:j])) for i, j in zip(hops, ends, strict=True)]
    assert spans == [True, True, False]


@RINGS
def test_every_block_is_cudnns(way: str, ranks: int) -> None:
    """Own keys take one kernel, each loop two, and the last round two, each way; nothing else multiplies."""
    text = compiled(way, ranks, 32_768)[0].as_text()
    assert text.count('custom_call_target="__cudnn$fmha') == 2 * (1 + 2 + 2)
    assert not [line for line in text.splitlines() if " dot(" in line or "__cublas" in line]


@pytest.mark.parametrize("way", ["gather", "ulysses"])
def test_bytes_forward_are_those_of_the_closed_form(way: str) -> None:
    """Bytes of a ring are those of its hops."""
    program, mesh = compiled(way, 8, 32_768, "forward")
    queries, keys = (ROWS, 32_768, HEADS, SIZE), (ROWS, 32_768, GROUPS, SIZE)
    closed = gather_bytes(keys, 8, 2) if way == "gather" else ulysses_bytes(queries, keys, 8, 2)
    assert Ledger.from_hlo(program.as_text(), mesh).total("sent") == closed[0]


def test_a_bias_and_its_gradient_are_cudnns() -> None:
    """With an odd length. The program has neither scores of all rows nor a bias for each of them."""
    rows, length, heads, size = 3, 131, 4, 64
    placement = NamedSharding(Mesh(np.array(gpu_topology("8xH100")[:1]), ("data",)), P())

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array) -> jax.Array:
        positions = jnp.arange(length)
        bias = table[:, jnp.clip(positions[:, None] - positions, -8, 7) + 8][None]
        return jnp.square(biased_attention(q, k, v, bias, causal=True, scale=0.1).astype(jnp.float32)).sum()

    x = jax.ShapeDtypeStruct((rows, length, heads, size), jnp.bfloat16, sharding=placement)
    table = jax.ShapeDtypeStruct((heads, 16), jnp.float32, sharding=placement)
    traced = jax.jit(jax.grad(loss, (0, 1, 2, 3))).trace(x, x, x, table)
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    kernels = "__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"
    assert [text.count(f'custom_call_target="{name}"') for name in kernels] == [1, 1]
    assert not re.search(rf"\[{rows},{heads},13\d,13\d\]", text)


@pytest.mark.battery
def test_temporaries_of_the_ring_fall_with_its_ranks() -> None:
    """Eight ranks need half the memory of four, at 131,072 tokens, forward and backward."""
    bytes_on_4, bytes_on_8 = (compiled("ring", c, 131_072)[0].memory_analysis().temp_size_in_bytes for c in (4, 8))
    assert bytes_on_8 < 0.6 * bytes_on_4


@pytest.mark.battery
@pytest.mark.parametrize("way", ["gather", "ulysses", "ring"])
def test_temporaries_of_a_step_fall_with_context(way: str) -> None:
    """Temporaries of a step of Llama-3-8B, with 131,072 tokens a row on eight devices, fall as 1 / context.

    Two things do not count: the sharded gradients, 4 P / 8 bytes, which the layout lists as at rest; and the arrays of
    all positions that `gather` holds in the backward, keys and values in bfloat16 and their gradients in float32.

    Regression: with 8 ranks the loss itself was computed last, and held the gathered head until then, 16% too much.
    """
    length, gathered_bytes = 131_072, 0
    if way == "gather":
        gathered_bytes = 2 * length * GROUPS * SIZE * (2 + 4)
    config = named("llama3-8b").config
    temporaries = []
    for ranks in (2, 4, 8):
        loss = functools.partial(llama.chunked_loss, chunk=2048 * ranks)
        model = jp.from_nnx(lambda rngs: llama.Llama(config, rngs=rngs), loss, llama.RULES)
        text = f"context={ranks},fsdp=-1,attention={way},precision=bf16,remat=layer"
        step = jp.make_train_step(model, optax.adamw(3e-4), text, mesh=target("8xH100").devices)
        program = step.compile(config.example(8 // ranks, length))
        temporaries.append(program.memory_analysis().temp_size_in_bytes - 4 * config.parameters / 8 - gathered_bytes)
    for ranks, bytes_ in zip((4, 8), temporaries[1:], strict=True):
        assert bytes_ * ranks == pytest.approx(2 * temporaries[0], rel=0.05)


def of_long_rows() -> jax.stages.Compiled:
    """Compile a step of Llama-3-8B with a plain loss, for 131,072 tokens a row on a ring of eight devices."""
    model = named("llama3-8b")
    text = "context=8,fsdp=-1,attention=ring,precision=bf16,remat=layer"
    step = jp.make_train_step(model.model, optax.adamw(3e-4), text, mesh=target("8xH100").devices)
    return step.compile(model.config.example(1, 131_072))


@pytest.mark.battery
def test_logits_of_a_plain_loss_are_never_whole() -> None:
    """Each device has the logits of 16,384 tokens. Logits of all tokens would take 18.3 GB."""
    program = of_long_rows()
    assert "16384,128256]" not in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 11.8e9


@pytest.mark.battery
def test_attention_that_is_spelled_out_goes_round_the_ring_in_the_memory_of_jp_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A softmax that the model spells out takes 11.6 GB, as the kernel does."""

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        grouped = q.reshape(*k.shape[:3], -1, k.shape[3])
        scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k).astype(jnp.float32) * k.shape[3] ** -0.5
        is_seen = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(is_seen, scores, -1e30), -1).astype(v.dtype)
        return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q.shape)

    by_kernel = of_long_rows().memory_analysis().temp_size_in_bytes
    for layer in (llama.Layer, llama.Attention):
        monkeypatch.setattr(layer.__call__, "__defaults__", (plain,))
    program = of_long_rows()
    assert "131072,131072]" not in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes == pytest.approx(by_kernel, rel=0.05)


@pytest.mark.slow
def test_attention_that_is_spelled_out_is_fused_on_request_and_explained() -> None:
    """Flax's attention keeps the scores of all positions for the backward; by cuDNN there are none.

    `explain` reports bytes and seconds of the scores that do not pass through memory, four times in the forward and
    seven times in the backward; nothing where XLA computes.
    """
    model = jp.from_nnx(
        lambda rngs: nnx.MultiHeadAttention(2, 128, decode=False, rngs=rngs),
        lambda net, batch: jnp.square(net(batch["x"], mask=nnx.make_causal_mask(batch["x"][..., 0]))).mean(),
    )

    def program_and_remarks(text: str, dtype: Any) -> tuple[Any, list[str]]:
        batch = {"x": jax.ShapeDtypeStruct((2, 1024, 128), dtype)}
        step = jp.make_train_step(model, optax.sgd(0.1), text, mesh=target("2xH100").devices[:1])
        program = step.compile(batch)
        remarks = explain(step, batch, program).remarks
        return program, [remark for remark in remarks if remark.startswith("kernels=fused")]

    own, own_remarks = program_and_remarks("precision=bf16", jnp.bfloat16)
    fused, (remark,) = program_and_remarks("precision=bf16,kernels=fused", jnp.bfloat16)
    by_xla, xla_remarks = program_and_remarks("kernels=fused", jnp.float32)
    assert own_remarks == xla_remarks == []
    assert ["__cudnn$fmha" in program.as_text() for program in (own, fused, by_xla)] == [False, True, False]
    score_bytes = 2 * 2 * 1024 * 1024 * 2  # of two rows and two heads, in bfloat16
    assert own.memory_analysis().temp_size_in_bytes - fused.memory_analysis().temp_size_in_bytes > score_bytes
    seconds = 1e-6 + 11 * score_bytes / (0.86 * 3.35e12)
    assert f"stores no scores of attention. In a step, {size(score_bytes)} of them" in remark
    assert float(re.search(r"at least ([\d.]+) ms", remark)[1]) == pytest.approx(1e3 * seconds, rel=0.01)
