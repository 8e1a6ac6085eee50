"""Buffers that are allocated and not filled: no step depends on what they held before a loop wrote them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from poison import poison_empty
from zoo import ZOO

import jaxpar as jp
from jaxpar.models import named
from jaxpar.parallel.pipeline.schedules import Schedule
from jaxpar.program.buffers import scan, uninitialized

SGD = optax.sgd(0.05, momentum=0.9)


def irregular() -> tuple[jp.Model, Any]:
    """Layers of different widths, and a mask of a key: a program that `pipe` cuts into stages without a stack."""
    widths = (12, 20, 16, 24, 8)

    def init(key: jax.Array) -> dict[str, jax.Array]:
        shapes = zip(jax.random.split(key, 4), widths[:-1], widths[1:], strict=True)
        return {f"layer{i}": jax.random.normal(k, (m, n)) / m**0.5 for i, (k, m, n) in enumerate(shapes)}

    def loss(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        x = batch["x"]
        for i, fun in enumerate((jnp.tanh, jnp.sin, jax.nn.gelu, jnp.cos)):
            x = fun(x @ params[f"layer{i}"])
            if i == 1 and key is not None:
                x = x * jax.random.bernoulli(key, 0.8, x.shape) / 0.8
        return jnp.square(x).sum(1).mean()

    return jp.Model(init=init, loss=loss), {"x": np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)}


def middle_layers() -> tuple[jp.Model, Any]:
    """A loss that reads two of four stacked layers: nothing writes the gradients of the others."""

    def loss(params: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["w"][1:3])
        return jnp.square(x).sum(1).mean()

    init = lambda key: {"w": jax.random.normal(key, (4, 12, 12)) / 12**0.5}
    return jp.Model(init=init, loss=loss), irregular()[1]


BUILDERS = {"irregular": irregular, "middle_layers": middle_layers}


@functools.cache
def setting(name: str) -> tuple[jp.Model, Any]:
    """Return a model and a batch of 8 or 16 rows."""
    if name in BUILDERS:
        return BUILDERS[name]()
    if name in ZOO:
        return ZOO[name]().model, ZOO[name]().batch
    layers = {"llama": {"kv_heads": 2}, "mixtral": {"kv_heads": 2, "head_dim": 8}}[name.removesuffix("-tiny")]
    model = named(name, vocab=64, dim=32, layers=4, heads=4, ffn=24, **layers)
    shapes = model.example(8, 12)
    return model.model, {k: np.arange(np.prod(x.shape)).reshape(x.shape) * 7 % 64 for k, x in shapes.items()}


def two_steps(name: str, devices: int, strategy: str) -> list[np.ndarray]:
    """Return all arrays after two steps: parameters, optimizer state, variables and metrics."""
    model, batch = setting(name)
    step = jp.make_train_step(model, SGD, strategy, mesh=jax.devices()[:devices])
    state, metrics = step.init(jax.random.key(0)), []
    for _ in range(2):
        state, figures = step(state, batch)
        metrics.append(figures)
    arrays = jax.tree.leaves((state.params, state.optimizer, state.variables, metrics))
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in arrays]


CELLS = [
    ("middle_layers", 1, "single"),
    ("llama-tiny", 1, "single"),
    ("llama-tiny", 1, "single,remat=layer,microbatches=2"),
    ("llama-tiny", 2, "fsdp=2,prefetch=1,microbatches=2"),
    ("llama-tiny", 4, "data=2,fsdp=2,hpz=true"),
    ("llama-tiny", 2, "dp"),
    ("llama-tiny", 2, "tensor=2,microbatches=2,concurrent=2"),
    ("llama-tiny", 2, "context=2"),
    ("mixtral-tiny", 2, "expert=2"),
    ("llama-tiny", 2, "pipe=2,microbatches=4,schedule=gpipe,remat=layer"),
    ("gpt2_dropout", 2, "pipe=2,microbatches=4"),  # keys in the stash
    ("llama-tiny", 3, "pipe=3,microbatches=4"),  # 4 layers in 3 stages: padding
    ("llama-tiny", 2, "pipe=2,chunks=2,microbatches=4"),
    ("llama-tiny", 4, "pipe=2,tensor=2,microbatches=4,schedule=1f1b-overlap"),
    ("llama-tiny", 4, "pipe=2,fsdp=2,prefetch=1,microbatches=4"),
    ("gpt2_dropout", 2, "pipe=2,microbatches=4,schedule=zb-h1"),
    ("llama-tiny", 2, "pipe=2,chunks=2,microbatches=4,schedule=zb-v"),
    ("mixtral-tiny", 2, "pipe=2,chunks=2,microbatches=4,schedule=dualpipe-v"),
    ("irregular", 2, "pipe=2,microbatches=4,schedule=zb-h1"),
]


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_no_step_depends_on_unwritten_elements(cell: tuple[str, int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs a buffer holds what other arrays left: filled with NaN and extremes, it changes no bit of a result."""
    expected, shapes = two_steps(*cell), poison_empty(monkeypatch)
    found = two_steps(*cell)
    assert shapes, "the step has no such buffer"
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(b).all()


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "1f1b-overlap"])
@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(2, 1, 4), (2, 2, 4), (4, 1, 2), (4, 2, 8), (4, 1, 12)])
def test_ranks_in_lockstep_read_what_they_have_written(name: str, ranks: int, chunks: int, microbatches: int) -> None:
    """Idle ranks too: a kernel that took its sizes from memory that nobody wrote could write anywhere."""
    schedule = Schedule.of(name, ranks, microbatches, chunks)
    arrays = schedule.arrays()
    written, waiting = [set() for _ in range(ranks)], set()
    for repeats, phases in schedule.phases():
        start = phases[0].start
        for _ in range(repeats):
            for phase in phases:
                for tick in range(start, start + phase.length):
                    if phase.forward and not schedule.waiting:
                        [slots.add(arrays["write"][tick, rank]) for rank, slots in enumerate(written)]
                    if phase.backward:
                        assert all(arrays["read"][tick, rank] in slots for rank, slots in enumerate(written))
                        waits = {m % schedule.waiting for m in arrays["B_microbatch"][tick]} if schedule.waiting else ()
                        assert waiting.issuperset(waits)
                    if phase.forward and schedule.waiting:  # side by side, the backward reads first
                        [slots.add(arrays["write"][tick, rank]) for rank, slots in enumerate(written)]
                    if phase.epilogue and schedule.waiting:
                        waiting.add((schedule.epilogue(tick) or 0) % schedule.waiting)
                start += phase.length


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_stacks_as_jax_does(reverse: bool) -> None:
    """Of any tree: keys, integers, a weak type, and nothing at all."""
    xs = {"x": jnp.arange(12.0).reshape(4, 3), "key": jax.random.split(jax.random.key(0), 4)}

    def body(carry: Any, x: Any) -> Any:
        total = carry + x["x"].sum()
        return total, (x["key"], [x["x"] * total, None], {"int": x["x"].astype(jnp.int8), "weak": jnp.sin(1.0)})

    expected = jax.jit(lambda: lax.scan(body, 0.0, xs, reverse=reverse))()
    found = jax.jit(lambda: scan(body, 0.0, xs, 4, reverse))()
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert jax.typeof(a) == jax.typeof(b)  # weak types are equal too
        np.testing.assert_array_equal(*(jax.random.key_data(x) if x.dtype == xs["key"].dtype else x for x in (a, b)))


def test_cpus_fill_with_zeros() -> None:
    """So that a step that read such an element would do the same in every run."""
    assert not np.asarray(jax.jit(lambda: uninitialized((3, 5), jnp.float32))()).any()
