"""check(overlap=True): what layers send is under way while others are computed, in programs compiled for H100s."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxpar as jp
from jaxpar.hardware import target
from jaxpar.inspect.check import Proof, check
from jaxpar.inspect.check.overlap import _promised_kind
from jaxpar.inspect.predict import Part

LAYERS, DIM = 4, 1024
SHAPES = {"up": (LAYERS, DIM, 4 * DIM), "down": (LAYERS, 4 * DIM, DIM)}
ROWS = {"x": jax.ShapeDtypeStruct((2048, 256, DIM), np.float32)}


def init(key: jax.Array) -> dict[str, jax.Array]:
    return {name: 0.01 * jax.random.normal(key, shape) for name, shape in SHAPES.items()}


def loss(params: Any, batch: Any, key: Any) -> jax.Array:
    layer = lambda h, w: (h + jnp.tanh(h @ w["up"]) @ w["down"], None)
    return jnp.mean(lax.scan(layer, batch["x"].astype(params["up"].dtype), params)[0] ** 2)


def make_step(strategy: str, devices: Any, **options: Any) -> Any:
    return jp.make_train_step(jp.Model(init=init, loss=loss), optax.sgd(0.1), strategy, mesh=devices, **options)


@functools.cache
def step_of(strategy: str) -> Any:
    """Return a step for 16 H100s, which compiles once for all tests."""
    return make_step(f"fsdp=16,precision=bf16,microbatches=2,{strategy}", target("16xH100").devices)


def proof_of(strategy: str, **slower: float) -> Proof:
    hardware = target("16xH100").hardware
    return check(step_of(strategy), ROWS, overlap=dataclasses.replace(hardware, **slower) if slower else True)


@pytest.mark.cuda_compiler
@pytest.mark.xdist_group("gpu overlap")
def test_layers_that_are_sent_ahead_are_hidden() -> None:
    proof = proof_of("prefetch=1")
    assert proof.ok, proof
    hidden = {finding.what: finding for finding in proof.findings if finding.part == "overlap"}
    assert set(hidden) == {"all-gather fsdp 16 x", "reduce-scatter fsdp 8 x"}
    assert all(0.9 * finding.promised <= finding.found <= finding.promised for finding in hidden.values())
    # A layer in bfloat16 and its gradients in float32, times the share that a ring sends, in two microbatches.
    layer = sum(np.prod(shape[1:]) for shape in SHAPES.values())
    assert hidden["all-gather fsdp 16 x"].promised == 2 * 2 * LAYERS * 2 * layer * 15 // 16
    assert hidden["reduce-scatter fsdp 8 x"].promised == 2 * LAYERS * 4 * layer * 15 // 16
    assert "as predicted for H100" in str(proof)


@pytest.mark.cuda_compiler
@pytest.mark.xdist_group("gpu overlap")
def test_layers_that_wait_where_they_stand_are_named() -> None:
    """With several microbatches, XLA does not move a collective across iterations unasked."""
    proof = proof_of("prefetch=0")
    assert {(finding.part, finding.verdict) for finding in proof.broken} == {("overlap", "MISSING")}
    for finding in proof.broken:
        assert finding.what in ("all-gather fsdp 8 x", "reduce-scatter fsdp 8 x")
        assert finding.found < 0.9 * finding.promised
        assert "ms a step wait of down, up: " in finding.note
        assert "prefetch=1 sends it" in finding.note
    with pytest.raises(ValueError, match=r"MISSING overlap: all-gather fsdp 8 x, promised .* prefetch=1"):
        proof.require()


@pytest.mark.parametrize(
    ("strategy", "kind", "axes", "promised"),
    [
        ("fsdp=8", "all-gather", ("fsdp",), "all-gather"),
        ("fsdp=8,zero=1", "all-gather", ("fsdp",), ""),  # updated parameters, after the backward
        ("fsdp=8,zero=1", "reduce-scatter", ("fsdp",), "reduce-scatter"),
        ("data=8", "all-reduce", ("data",), "all-reduce"),
        ("data=8", "all-reduce", ("2 of data+tensor",), ""),
        ("data=8,microbatches=2", "all-to-all", ("expert",), ""),
        ("data=8,microbatches=2,concurrent=2", "all-to-all", ("expert",), "activations"),
        ("pipe=2,data=4,microbatches=4", "all-to-all", ("expert",), ""),
        ("pipe=2,data=4,microbatches=4,schedule=gpipe", "all-to-all", ("expert",), ""),
        ("pipe=2,data=4,microbatches=4,schedule=1f1b-overlap", "all-to-all", ("expert",), "activations"),
        ("pipe=2,data=4,microbatches=4,schedule=1f1b-overlap", "collective-permute", ("pipe",), ""),
    ],
)
def test_what_strategies_promise(strategy: str, kind: str, axes: tuple[str, ...], promised: str) -> None:
    assert _promised_kind(make_step(strategy, jax.devices()), Part("", "", kind, "", axes=axes)) == promised


def test_what_cannot_be_read_is_refused() -> None:
    step = make_step("fsdp", jax.devices())
    with pytest.raises(ValueError, match=r"compiled for CPU has no asynchronous collectives.*target\('16xH100'\)"):
        check(step, ROWS, overlap=True)
    with pytest.raises(ValueError, match="compiled for CPU"):
        make_step("fsdp", jax.devices(), check="overlap")
    with pytest.raises(ValueError, match="check='overlaps': use True, False or 'overlap'"):
        make_step("fsdp", jax.devices(), check="overlaps")
    with pytest.raises(ValueError, match=r"overlap with .*server=true.*: a server sends between programs"):
        check(make_step("dp", jax.devices()), ROWS, overlap=True)


@pytest.mark.cuda_compiler
@pytest.mark.xdist_group("gpu overlap")
def test_a_slower_network_breaks_the_promise() -> None:
    proof = proof_of("prefetch=1", network_bandwidth=5e9)
    assert {(finding.part, finding.verdict) for finding in proof.broken} == {("overlap", "MISSING")}
    note = proof.broken[0].note
    assert "concurrent=2 fetches a layer once for so many microbatches, more rows a device give more" in note
    assert "more compute to overlap with, fewer ranks of fsdp less to wait for" in note


@pytest.mark.cuda_compiler
@pytest.mark.xdist_group("gpu overlap")
def test_a_step_is_refused_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step("fsdp=2,precision=bf16", target("2xH100").devices, check="overlap")
    with pytest.raises(ValueError, match="MISSING overlap"):
        step.compile({"x": jax.ShapeDtypeStruct((2, 256, DIM), np.float32)})
    monkeypatch.setattr("jaxpar.inspect.check.overlap.of_device_kind", lambda name: None)
    with pytest.raises(ValueError, match=r"NVIDIA H100 80GB HBM3 is none of .*kinds.load\(file\)"):
        make_step("fsdp=2", target("2xH100").devices, check="overlap")
