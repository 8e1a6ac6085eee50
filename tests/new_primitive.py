"""Who knows of a primitive that JAX does not have: run by tests/program/test_primitives.py, in a process of its own."""

import json
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import optax
from jax.interpreters import ad, batching, mlir

import jaxpar as jp
from jaxpar.parallel.pipeline.flat import cut
from jaxpar.program import jaxpr as jx
from jaxpar.program.residuals import residuals_to_save

jp.simulate(2)
twice_p = jec.Primitive("twice")
twice_p.def_impl(lambda x: 2 * x)
twice_p.def_abstract_eval(lambda x: x)
batching.defvectorized(twice_p)
ad.deflinear2(twice_p, lambda ct, x: [twice_p.bind(ct)])
mlir.register_lowering(twice_p, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))

BATCH = {"tokens": jnp.zeros((8, 16), jnp.int32)}


def init(key: jax.Array) -> Mapping[str, Any]:
    draw = lambda *shape: 0.1 * jax.random.normal(key, shape)
    moe = {"router": draw(8, 4), "up": draw(4, 8, 16), "down": draw(4, 16, 8)}
    return {"embed": draw(32, 8), "up": {"kernel": draw(8, 16)}, "down": {"kernel": draw(16, 8)}, "moe": moe}


def loss(params: Any, batch: Any, key: jax.Array | None) -> jp.Mean:
    x = params["embed"][batch["tokens"]]
    x += twice_p.bind(x @ params["up"]["kernel"]) @ params["down"]["kernel"]
    experts = {name: params["moe"][name] for name in ("up", "down")}
    expert = lambda p, x: twice_p.bind(x @ p["up"]) @ p["down"]
    y, _ = jp.experts(x, x @ params["moe"]["router"], experts, k=1, expert=expert)
    return jp.Mean((y**2).sum(), batch["tokens"].size)


def told(strategy: str) -> str:
    """What is said of the primitive where the loss is traced."""
    model = jp.Model(init=init, loss=loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            step = jp.make_train_step(model, optax.sgd(0.1), strategy)
            notes = step.traced(BATCH).notes
            gathered = {**notes.gathered, **notes.experts_gathered}
        except ValueError as error:
            return str(error)
    said = [*map(str, gathered), *(str(warning.message) for warning in caught)]
    return "; ".join(text for text in said if "twice" in text)


def known() -> dict[str, bool]:
    """Who knows of it."""
    flat, _ = jx.trace(lambda x: twice_p.bind(x).sum(), jnp.ones((4, 6)))
    saved, _ = residuals_to_save(flat.eqns, [flat.eqns[0].outvars[0]], flat.invars, ())
    by_strategy = {text: not told(text) for text in ("data=2", "tensor=2", "context=2", "expert=2")}
    return {**by_strategy, "time": float(cut.times(flat.eqns)[0]) > 0, "memory": not saved}


if __name__ == "__main__":
    print(json.dumps(known()))
