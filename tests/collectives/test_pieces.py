"""Large gradients are reduced in pieces: their number, their sum, and the compiler options for GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.collectives import nccl, scatter_pieces
from jaxpar.collectives.compiling import compiler_options
from jaxpar.hardware.devices import target
from jaxpar.inspect.ledger import Ledger
from jaxpar.models import named

BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")


@pytest.mark.parametrize(
    ("shape", "n", "pieces"),
    [
        ((4096, 14336), 8, 1),  # Llama-3-8B: 235 MB in float32
        ((8192, 28672), 8, 4),  # Llama-3-70B: 235 MB each
        ((8192, 28672), 64, 2),  # each device gets 7 MB of a piece
        ((8192, 28672), 512, 1),  # 16 pieces waited 39 ms for their rings' steps, and 2.5 for their bytes
        ((128256, 8192), 8, 16),
        ((128256, 4096), 8, 16),  # Llama-3-8B's embedding, one at a time
        ((8 * 9001, 8192), 8, 1),  # no number up to 16 divides it
    ],
)
def test_pieces_are_few_and_leave_every_device_enough(shape: tuple[int, int], n: int, pieces: int) -> None:
    assert scatter_pieces(shape, BF16, 0, n, F32) == pieces
    assert scatter_pieces(shape, F32, 0, n, F32) == 1  # nothing is widened: all of it is in memory in any case


@pytest.mark.parametrize(("dim", "size"), [(0, 1000), (1, 1000), (0, 400), (1, 400)])
def test_pieces_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch, dim: int, size: int) -> None:
    """A few pieces are unrolled, so that they overlap with compute."""
    monkeypatch.setattr(nccl, "_MAX_PIECE", size)
    monkeypatch.setattr(nccl, "_MIN_SHARD_OF_PIECE", 4)
    mesh = Mesh(np.array(jax.devices()[:4]), ("a",), axis_types=(AxisType.Auto,))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 48, 64)), jnp.bfloat16)

    def scatter(x: jax.Array) -> jax.Array:
        return nccl.reduce_scatter_as(x[0], ("a",), dim, F32)

    fun = jax.jit(jax.shard_map(scatter, mesh=mesh, in_specs=P("a"), out_specs=P(*[None] * dim, "a")))
    np.testing.assert_allclose(fun(x), np.asarray(x, np.float32).sum(0), rtol=1e-6, atol=1e-6)
    jaxpr = jax.make_jaxpr(fun)(x)
    (entry,) = Ledger.from_jaxpr(jaxpr, mesh)
    pieces = scatter_pieces((48, 64), BF16, dim, 4, F32)
    assert (entry.count, entry.bytes, entry.in_loop) == (pieces, 4 * 48 * 64, size == 400)
    assert (pieces > nccl._MAX_UNROLLED) == entry.in_loop
    assert pieces > 1


def test_a_gradient_is_widened_before_it_is_summed() -> None:
    """In bfloat16, 256 + 1 is 256."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("a",), axis_types=(AxisType.Auto,))
    x = jnp.asarray([[256.0] * 4, [1.0] * 4, [1.0] * 4, [1.0] * 4], jnp.bfloat16)
    fun = jax.shard_map(
        lambda x: nccl.reduce_scatter_as(x[0], ("a",), 0, F32), mesh=mesh, in_specs=P("a"), out_specs=P("a")
    )
    np.testing.assert_array_equal(jax.jit(fun)(x), [259.0] * 4)


def test_only_gpus_are_told_anything() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("fsdp", "context"), axis_types=(AxisType.Auto,) * 2)
    assert compiler_options(mesh, ("fsdp", "context")) is None


OVERLAP = "xla_gpu_enable_latency_hiding_scheduler"


@pytest.mark.cuda_compiler
@pytest.mark.parametrize(("hosts", "axes", "combines"), [(1, ("a", "b"), False), (2, ("b",), False), (2, ("a",), True)])
def test_gpus_are_told_to_combine_where_an_axis_spans_hosts(
    hosts: int, axes: tuple[str, ...], combines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = np.array(target(f"{hosts}x{4 // hosts}xH100").devices).reshape(2, 2)
    mesh = Mesh(devices, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    options = compiler_options(mesh, axes)
    assert options is not None
    assert options[OVERLAP]
    assert options.get("xla_gpu_all_gather_combine_threshold_bytes") == (2**30 if combines else None)
    options_ahead = compiler_options(mesh, axes, ahead=True) or {}
    assert options_ahead.get("xla_gpu_reduce_scatter_combine_threshold_bytes") == (2**30 if combines else None)
    monkeypatch.setenv("XLA_FLAGS", f"--{OVERLAP}=false")  # XLA_FLAGS come first
    assert OVERLAP not in (compiler_options(mesh, axes) or {})


@pytest.mark.slow
@pytest.mark.cuda_compiler
@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_layers_send_between_hosts_is_under_way_while_they_compute(microbatches: int) -> None:
    """XLA's scheduler is off for an A100 by default. In a loop over microbatches its pipeliner moves
    nothing, and in jax 0.12 it moves no reduce-scatter: the program itself sends ahead.
    """
    gpus, model = target("2x4xA100-80GB"), named("llama-tiny", layers=4)
    batch, text = model.example(8 * microbatches, 128), f"fsdp,microbatches={microbatches},precision=bf16"
    step = jp.make_train_step(model.model, optax.sgd(0.1), f"{text},reduce=compute", mesh=gpus.devices)
    ledger = Ledger.from_hlo(step.compile(batch).as_text() or "", step.mesh)
    for kind in ("all-gather", "reduce-scatter"):
        in_layers = [
            entry for entry in ledger if entry.kind == kind and entry.in_loop and (entry.count or 0) > microbatches
        ]
        assert in_layers
        assert all(entry.overlapped for entry in in_layers), kind
