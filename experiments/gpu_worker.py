"""A contender of `gpu.py speed` in a process of its own: jaxpar's step, or a plain `jax.jit` step of the same model."""

import math
import sys
import time
from collections.abc import Callable
from typing import Any

from gpu_report import ROOT, machine
from gpu_speed import serve

sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar as jp
from jaxpar.hardware.hardware import KINDS, peak_flops
from jaxpar.inspect.explain import explain
from jaxpar.inspect.predict.prediction import predict
from jaxpar.models import Named, named

OPTIMIZER = optax.adamw(3e-4, b2=0.95, weight_decay=0.1)


def make(spec: dict[str, Any]) -> tuple[dict[str, Any], Callable[[int], dict[str, Any]]]:
    """See `gpu_speed.serve`."""
    if spec["tiny"]:
        jp.simulate(1)
    if spec["contender"] == "machine":
        return machine(), lambda count: {}
    model = named(spec["model"], **spec["changes"])
    rows, length = spec["rows"], spec["length"]
    cards = 1 if spec["contender"].startswith(("single", "plain")) else math.gcd(rows, len(jax.devices()))
    tokens = np.random.default_rng(0).integers(model.config.vocab, size=(rows, length + 1))
    batch, key = {"tokens": jnp.asarray(tokens, jnp.int32)}, jax.random.key(0)
    said: dict[str, Any] = {"parameters": model.parameters}
    if spec["contender"] == "plain":
        state = jax.jit(lambda key: begin(model, key))(key)
        step = jax.jit(lambda state, batch: plain(model, state, batch), donate_argnums=0)
        start = time.perf_counter()
        state, metrics = step(state, batch)
    else:
        precision = "" if "precision=" in spec["contender"] else ",precision=bf16"
        ours = jp.make_train_step(model.model, OPTIMIZER, spec["contender"] + precision, jax.devices()[:cards])
        state = ours.init(key)
        start = time.perf_counter()
        said |= look(ours, batch, model.flops(rows, length))
        said["look_s"] = time.perf_counter() - start
        step, start = ours, time.perf_counter()
        state, metrics = step(state, batch)
    jax.block_until_ready(state)
    said["first_step_s"] = time.perf_counter() - start

    def steps(count: int) -> dict[str, Any]:
        nonlocal state, metrics
        start = time.perf_counter()
        for _ in range(count):
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds = (time.perf_counter() - start) / count
        stats = jax.devices()[0].memory_stats() or {}
        memory = {name: stats[key] / 1e9 if key in stats else None
                  for name, key in {"peak_GB": "peak_bytes_in_use", "in_use_GB": "bytes_in_use"}.items()}  # fmt: skip
        peak = cards * (peak_flops(jax.devices()[0].device_kind, "bf16") or 0) or None
        return {"seconds": seconds, "tokens": rows * length, "loss": float(metrics["loss"]), **memory,
                "model_flops": model.flops(rows, length), "peak_flops": peak}  # fmt: skip

    return said, steps


def begin(model: Named, key: jax.Array) -> Any:
    """Float32 parameters, the model's own state beside them, and AdamW's."""
    params, variables = model.model.create(key)
    return params, variables, OPTIMIZER.init(params)


def plain(model: Named, state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
    """What one would write without jaxpar: cast to bfloat16, differentiate, update."""
    params, variables, moments = state

    def loss(params: Any) -> Any:
        low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        means, new = model.model.call(low, variables, batch, None)
        return means["loss"].total / means["loss"].count, new

    (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
    changes, moments = OPTIMIZER.update(grads, moments, params)
    metrics = {"loss": value, "grad_norm": optax.tree.norm(grads)}
    return (optax.apply_updates(params, changes), new, moments), metrics


def look(step: Any, batch: Any, flops: float) -> dict[str, Any]:
    """What jaxpar says of the step before it runs: memory by `explain`, seconds by `predict`."""
    compiled = step.compile(batch)
    found: dict[str, Any] = {"explained_GB": explain(step, batch, compiled).memory["each device"].total / 1e9}
    kind = jax.devices()[0].device_kind
    hardware = next((one for one in KINDS.values() if one.device_kind == kind), None)
    if hardware is None:
        return found | {"predicted_ms": None, "no_prediction": f"{kind!r} is not in jaxpar.hardware.hardware"}
    prediction = predict(compiled, step, batch, hardware, flops)
    by_kind = {name: 1e3 * seconds for name, seconds in prediction.by_kind.items()}
    return found | {"predicted_ms": 1e3 * prediction.seconds, "predicted_by_kind_ms": by_kind}


if __name__ == "__main__":
    serve(make)
