"""hpZ: parameters are sharded over the replicas too, and each step gathers a second shard from which layers gather."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import OneDevice, check

import jaxpar as jp
from jaxpar.inspect.check import check as proof_of
from jaxpar.inspect.expected import expected
from jaxpar.inspect.explain import explain

SGD = optax.sgd(0.05, momentum=0.9)
STEPS = 2


@functools.cache
def model() -> Any:
    """Return a model whose leaves need padding over four devices: an embedding [131, 126], stacks [2, 126, 136].

    Its scale is too small to be sharded.
    """

    def init(key: jax.Array) -> dict[str, jax.Array]:
        a, b, c = jax.random.split(key, 3)
        up, down = jax.random.normal(b, (2, 126, 136)), jax.random.normal(c, (2, 136, 126))
        scale = 1 + 0.1 * jax.random.normal(a, (2, 126))
        return {"embed": jax.random.normal(a, (131, 126)), "up": up * 0.1, "down": down * 0.1, "scale": scale}

    def loss(params: Any, batch: Any, key: jax.Array | None) -> Any:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x * w["scale"] @ w["up"]) @ w["down"], None

        stacks = {name: params[name] for name in ("up", "down", "scale")}
        x, _ = jax.lax.scan(layer, params["embed"][batch["tokens"][:, :-1]], stacks)
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["embed"].T, batch["tokens"][:, 1:])
        return jp.Mean((losses * batch["weight"]).sum(), batch["weight"].sum())

    return jp.Model(init=init, loss=loss)


@functools.cache
def batch() -> Any:
    rng = np.random.default_rng(0)
    tokens = rng.integers(131, size=(8, 5)).astype(np.int32)
    return {"tokens": tokens, "weight": rng.uniform(0.1, 2.0, (8, 4)).astype(np.float32)}


@functools.cache
def one_device() -> OneDevice:
    return OneDevice(model())


@functools.cache
def trained() -> tuple[Any, Any]:
    return one_device().train(SGD, batch(), 1, STEPS)


CELLS = ("microbatches=2", "pipe=2,microbatches=2", "sync=step,microbatches=2")
BATTERY = (
    "microbatches=1",
    "prefetch=1,microbatches=2",
    "fsdp=4,remat=layer",
    "microbatches=2,concurrent=2",
    "pipe=2,microbatches=2,schedule=zb-h1",
    "pipe=2,microbatches=2,chunks=1,schedule=gpipe",
)


@pytest.mark.parametrize("beside", [*CELLS, *(pytest.param(text, marks=pytest.mark.battery) for text in BATTERY)])
def test_training_is_one_devices(beside: str) -> None:
    strategy = f"data=2,{'' if 'fsdp' in beside else 'fsdp=2,'}{beside},hpz=true"
    devices = jax.devices()[: math.prod(map(int, re.findall(r"(?:data|fsdp|pipe)=(\d)", strategy)))]
    step = jp.make_train_step(model(), SGD, strategy, mesh=devices)
    check(step, model(), one_device().first, batch(), STEPS, *trained())
    shards = step.mesh.shape["data"] * step.mesh.shape["fsdp"]
    shard_sizes = jax.tree.map(lambda x: math.prod(x.sharding.shard_shape(x.shape)), step.abstract_state().params)
    assert shard_sizes["up"] * shards == step.layout.leaves[-1].stored[0] * 126 * 136 // step.mesh.shape["pipe"]


def test_what_leaves_a_host_does_so_once_a_step() -> None:
    """The second shard is half of the parameters, and so are its gradients; bytes are counted by hand."""
    padded_bytes = [4 * n for n in (132 * 126, 2 * 126 * 136, 2 * 136 * 126)]  # the scale is not sharded
    for m in (1, 2):
        step = jp.make_train_step(model(), SGD, f"data=2,fsdp=2,microbatches={m},hpz=true", mesh=jax.devices()[:4])
        sent_bytes = {(sent.kind, sent.axes): sent.bytes for sent in expected(step, batch())}
        for kind in ("all-gather", "reduce-scatter"):
            assert sent_bytes.get((kind, ("data",)), 0) == sum(padded_bytes) // 2
    compiled = step.compile(batch())
    assert proof_of(step, batch(), compiled).ok
    text = str(explain(step, batch(), compiled))
    assert re.search(r"hpz=true: [\d.]+ kB are gathered over data once a step, and held while it runs", text), text


def test_evaluation_frozen_leaves_and_8_bits() -> None:
    make = functools.partial(jp.make_train_step, model(), SGD, mesh=jax.devices()[:4])
    plain, step = (make(f"data=2,fsdp=2{options}") for options in ("", ",hpz=true"))
    state = step.init(jax.random.key(0), params=one_device().first)
    plain_state = plain.init(jax.random.key(0), params=one_device().first)
    assert float(step.evaluate(state, batch())["loss"]) == float(plain.evaluate(plain_state, batch())["loss"])
    low = make("data=2,fsdp=2,precision=bf16,gather=int8,reduce=int8,hpz=true", trainable=lambda path: path != "up")
    assert proof_of(low, batch(), low.compile(batch())).ok
    state = low.init(jax.random.key(0), params=one_device().first)
    frozen = np.asarray(state.params["up"])
    state, metrics = low(state, batch())
    assert np.isfinite(metrics["loss"])
    np.testing.assert_array_equal(frozen, state.params["up"])


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("fsdp,hpz=true", r"hpz=True with fsdp=-1: a second shard .* use hsdp, or give both a size with zero=3"),
        ("data=2,fsdp=2,zero=2,hpz=true", r"hpz=True with data=2,fsdp=2,zero=2: "),
        ("data=2,fsdp=2,hpz=2", r"hpz=2 is not a truth value"),
    ],
)
def test_what_has_no_second_shard_is_refused(strategy: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jp.Strategy.parse(strategy)


def test_stages_cut_from_a_program_have_none() -> None:
    with pytest.raises(ValueError, match=r"hpz=True: .* leave hpz out"):
        jp.make_train_step(model(), SGD, "pipe=2,stages=cut,data=2,fsdp=2,microbatches=2,hpz=true")
