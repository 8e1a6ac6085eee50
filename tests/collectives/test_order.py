"""The collectives of a program for CPU devices have one order, by data; programs for other devices are unchanged.

Without this order, a plain Linen decoder under ZeRO-3 aborted the process in every run: gathers beside the loop over
layers met those inside it in one rendezvous.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rendezvous import unordered
from zoo import ZOO

import jaxpar as jp
from jaxpar import collectives
from jaxpar.collectives import order
from jaxpar.hardware.devices import gpu_topology
from jaxpar.parallel.tensor import edges
from jaxpar.program.collectives import PRIMITIVES

SGD = optax.sgd(0.1, momentum=0.9)


def decoder(strategy: str, **options: Any) -> tuple[Any, Any]:
    entry = ZOO["decoder_linen"]()
    return jp.make_train_step(entry.model, SGD, strategy, **options), entry.batch


@pytest.mark.parametrize("strategy", ["zero3", "tensor=2,fsdp=4"])
def test_without_the_token_collectives_beside_a_loop_are_in_no_order(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With it they are: `test_transparency.py` and `test_tensor.py` look at each compiled step."""
    monkeypatch.setattr(order, "needed", lambda mesh: False)
    step, batch = decoder(strategy)
    pairs = unordered(step.compile(batch).as_text())
    assert any("while" in pair for pair in pairs), pairs


@pytest.mark.parametrize("name", edges._RUN)
def test_an_edge_of_tensor_is_in_the_table_as_what_it_runs(name: str) -> None:
    """`all_gather_replicated` was renamed without its row, and so had no order, no entry in a ledger and no cost."""
    dim = (0, 1) if name == "exchange" else 0
    jaxpr = jax.make_jaxpr(lambda x: edges._RUN[name](x, dim, 2), axis_env=[("tensor", 2)])(np.ones((4, 4)))
    kinds = {kind for eqn in jaxpr.eqns if (kind := PRIMITIVES.get(eqn.primitive.name))}
    assert kinds == {kind for kind in [PRIMITIVES.get(edges._PRIMITIVES[name].name)] if kind}


@pytest.mark.slow
def test_a_decoder_that_aborted_trains() -> None:
    """Runs in a separate process with all of XLA's optimizations, as users run it."""
    soak = Path(__file__).parents[1] / "soak.py"
    command = [sys.executable, str(soak), "--cell", "decoder_linen", "zero3", "--steps", "30"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert process.returncode == 0, process.stderr[-2000:]


@pytest.mark.slow
def test_calls_within_a_callers_jit_follow_each_other() -> None:
    step, batch = decoder("zero3")
    reversed_batch = jax.tree.map(lambda x: x[::-1], batch)

    def program(state: Any, batch: Any, reversed_batch: Any) -> Any:
        held_out = step.evaluate(state, batch)
        step.evaluate(state, reversed_batch)  # its result is unused
        loss, grads = step.value_and_grad(state, reversed_batch)
        state, metrics = step(state, batch)
        return held_out, loss, grads, metrics, step.evaluate(state, batch)

    compiled = jax.jit(program).lower(step.abstract_state(), batch, reversed_batch).compile()
    assert unordered(compiled.as_text()) == []


@pytest.mark.parametrize("strategy", ["zero3", "pipe=2,fsdp=4,microbatches=4", "dp"])
def test_programs_beside_the_training_step(strategy: str) -> None:
    step, batch = decoder(strategy)
    state, key = step.abstract_state(), jax.eval_shape(lambda: jax.random.key(0))
    programs = [jax.jit(step._create, out_shardings=step._shardings).lower(key)]
    if strategy == "dp":
        programs += [step._function("train", batch).lower(state, batch)]
    else:
        programs += [step._function(name, batch).lower(state, batch) for name in ("evaluate", "gradients")]
        programs += [jax.jit(step.params).lower(state)]
    for program in programs:
        assert unordered(program.compile().as_text()) == []


AWKWARD = [0.0, -0.0, np.nan, np.inf, -np.inf, 1.5, -2.0, 7.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64"])
def test_the_token_changes_no_bit(dtype: str) -> None:
    """The result of an earlier collective, NaN and infinities included, must not reach a later one."""
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    first = np.array(AWKWARD, np.float32)
    with np.errstate(invalid="ignore"):
        x = jnp.asarray(first.astype(dtype) if dtype not in ("bfloat16", "bool") else first != 0).astype(dtype)

    def local(nan: jax.Array, x: jax.Array) -> Any:
        poison = collectives.all_gather(nan, "fsdp")
        gathered = collectives.all_gather(x, "fsdp")
        moved = collectives.shift(gathered, "fsdp", 1)
        return poison, collectives.all_to_all(moved, "fsdp"), collectives.all_gather(x[::-1], "fsdp")

    def run(fun: Any) -> list[Any]:
        mapped = jax.shard_map(fun, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False)
        return [np.asarray(y).view(np.uint8) for y in jax.jit(mapped)(jnp.full(8, jnp.nan), x)]

    ordered = lambda *args: order.in_order(local, mesh)(jnp.int32(0), *args)[0]
    for plain, with_token in zip(run(local), run(ordered), strict=True):
        np.testing.assert_array_equal(plain, with_token)


def control_flow(x: jax.Array) -> jax.Array:
    """Collectives in and beside every kind of nested program."""
    total = lambda y: collectives.all_reduce(y, "fsdp")

    @jax.custom_jvp
    def ratio(y: jax.Array) -> jax.Array:
        return total(y) / total(y + 1)

    ratio.defjvp(lambda primals, tangents: (ratio(*primals), tangents[0]))
    a = lax.fori_loop(0, 3, lambda i, y: y + total(y) / 9, x)
    b, _ = lax.scan(lambda c, _: (c - total(c) / 8 + total(c * c), None), x, None, 3, unroll=2)
    c = lax.while_loop(lambda y: total(y.sum()) < 50, lambda y: y + jnp.abs(total(y)) + 1, x)
    d = lax.cond(total(x.sum()) > 0, lambda y: total(y) + total(y * 2), lambda y: y, x)
    e = jax.checkpoint(lambda y: jnp.sin(total(y)) + ratio(y))(x)
    return a + b + c + d + e + jax.jit(total)(x) + total(jnp.zeros((0,))).sum()


def test_nested_programs_keep_their_results_and_their_order() -> None:
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    x = jax.random.normal(jax.random.key(3), (16,))

    def compile_on_mesh(fun: Any) -> Any:
        mapped = jax.shard_map(fun, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False)
        return jax.jit(mapped).lower(x).compile()

    plain = compile_on_mesh(control_flow)
    ordered = compile_on_mesh(lambda x: order.in_order(control_flow, mesh)(jnp.int32(0), x)[0])
    np.testing.assert_allclose(ordered(x), plain(x), rtol=1e-6)
    assert unordered(ordered.as_text()) == []
    assert unordered(plain.as_text())


def test_one_device_needs_no_order() -> None:
    step, batch = decoder("single")
    assert "population_count" not in str(step.trace(batch))


@pytest.mark.cuda_compiler
def test_programs_for_gpus_are_as_they_were() -> None:
    step, batch = decoder("zero3", mesh=gpu_topology("8xH100"))
    assert "population_count" not in str(step.trace(batch))
