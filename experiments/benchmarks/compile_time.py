"""The first step of a run: how long tracing, lowering and compiling take, beside a plain `jax.jit` step of the model.

Each measurement is a fresh process on 8 simulated devices; ours and the plain step take turns, so that a busy machine
slows both. Ratios are of medians over rounds, on the clock and in CPU time of the process, all its threads together,
which is steadier where others use the machine.

    python experiments/benchmarks/compile_time.py
    python experiments/benchmarks/compile_time.py --rounds 1 --models loop --strategies pipe
    python experiments/benchmarks/compile_time.py --profile loop fsdp    # where Python's time goes, by cProfile

    build   make_train_step: the layout, the optimizer's state as shapes
    init    the program that makes the first state; it is compiled as well
    step    the first call of the step, from Python's trace to the result

    trace, lower, XLA    of all that, as jax reports it: Python to jaxpr, jaxpr to StableHLO, StableHLO to machine code
"""

import argparse
import collections
import cProfile
import json
import pstats
import time
from typing import Any

import numpy as np
from turns import cpu, fresh

DEVICES, ROWS, LENGTH, LAYERS = 8, 16, 64, 24
STRATEGIES = {
    "fsdp": "fsdp",
    "ddp": "ddp",
    "tensor": "data=4,tensor=2",
    "pipe": "pipe=2,data=4,microbatches=4",
    "pipe4": "pipe=4,data=2,microbatches=8",
    "four": "pipe=2,data=1,fsdp=2,tensor=2,microbatches=2",
}
# What jax calls the parts, in either of the versions that are supported.
PARTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "XLA",
}


def loop_model() -> Any:
    """A decoder of 24 layers in a Python loop, as much research code has it."""
    import jax
    from flax import nnx

    import jaxpar as jp
    from jaxpar.models import llama, text

    config = llama.Config(vocab=256, dim=64, layers=LAYERS, heads=4, kv_heads=2, ffn=192)

    class Loop(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embedding = nnx.Embed(config.vocab, config.dim, rngs=rngs)
            self.layers = nnx.List([llama.Layer(config, rngs=rngs) for _ in range(LAYERS)])
            self.norm = llama.RMSNorm(config.dim)

        def __call__(self, tokens_BT: jax.Array) -> jax.Array:
            angles = llama.rope_table(tokens_BT.shape[1], config.head_dim, config.rope_theta)
            x_BTD = self.embedding(tokens_BT)
            for layer in self.layers:
                x_BTD = layer(x_BTD, angles)
            return self.embedding.attend(self.norm(x_BTD))

    return jp.from_nnx(lambda rngs: Loop(rngs), text.loss, llama.RULES)


def first_step(model_name: str, strategy: str) -> dict[str, dict[str, float]]:
    """Seconds by phase, {"wall", "cpu", "trace", ...}; `strategy` "plain" is `jax.jit` without jaxpar."""
    import jax
    import optax
    import plain
    from jax import monitoring

    import jaxpar as jp
    from jaxpar.models import named

    parts: collections.Counter[str] = collections.Counter()
    monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: parts.update({PARTS[event]: seconds}) if event in PARTS else None
    )
    jp.simulate(DEVICES)
    jax.block_until_ready(jax.jit(lambda x: x + 1)(np.ones(3)))  # the backend has started
    model = loop_model() if model_name == "loop" else named("llama-tiny").model
    batch = {"tokens": np.random.default_rng(0).integers(0, 256, (ROWS, LENGTH + 1), dtype=np.int32)}
    optimizer, key = optax.adamw(1e-3), jax.random.key(0)
    phases: dict[str, dict[str, float]] = {}

    def phase(name: str, run: Any) -> Any:
        parts.clear()
        wall, used = time.perf_counter(), cpu()
        result = jax.block_until_ready(run())
        phases[name] = {"wall": time.perf_counter() - wall, "cpu": cpu() - used, **parts}
        return result

    if strategy == "plain":
        phase("build", lambda: None)
        step = jax.jit(plain.train(model, optimizer), donate_argnums=0)
        state = phase("init", lambda: jax.jit(plain.create(model, optimizer))(key))
    else:
        made: list[Any] = []
        phase("build", lambda: made.append(jp.make_train_step(model, optimizer, STRATEGIES[strategy])))
        step = made[0]
        state = phase("init", lambda: step.init(key))
    phase("step", lambda: step(state, batch))
    names = {name for found in phases.values() for name in found}
    phases["all"] = {name: sum(found.get(name, 0) for found in phases.values()) for name in sorted(names)}
    return phases


def measured(model: str, strategy: str) -> dict[str, dict[str, float]]:
    """`first_step` in a process of its own."""
    return json.loads(fresh(__file__, "--one", model, strategy))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=["llama-tiny", "loop"])
    parser.add_argument("--strategies", nargs="+", default=["fsdp", "pipe"], choices=list(STRATEGIES))
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "STRATEGY"), help="one measurement, as JSON")
    parser.add_argument("--profile", nargs=2, metavar=("MODEL", "STRATEGY"), help="one measurement under cProfile")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(first_step(*options.one)))
        return
    if options.profile:
        with cProfile.Profile() as profile:
            first_step(*options.profile)
        pstats.Stats(profile).sort_stats("cumulative").print_stats(r"jaxpar/|jax\.jit|pjit|pxla|compile", 60)
        return
    ratios: dict[str, float] = {}
    for model in options.models:
        contenders = ["plain", *options.strategies]
        runs = [{name: measured(model, name) for name in contenders} for _ in range(options.rounds)]

        def median(name: str, phase: str, part: str, runs: Any = runs) -> float:
            return float(np.median([run[name][phase].get(part, 0.0) for run in runs]))

        for name in contenders:
            for phase in ("build", "init", "step", "all"):
                found = {part: median(name, phase, part) for part in ("wall", "cpu", "trace", "lower", "XLA")}
                ratio = {part: found[part] / max(median("plain", phase, part), 1e-9) for part in ("wall", "cpu")}
                shown = "  ".join(f"{part} {seconds:6.2f}" for part, seconds in found.items())
                beside = "" if phase == "build" else f"  x{ratio['wall']:.2f} wall  x{ratio['cpu']:.2f} CPU"
                print(f"{model:10} {name:7}{phase:6}{shown}{beside if name != 'plain' else ''}", flush=True)
            if name != "plain":
                ratios[f"{model}, {name}: first step over plain jit"] = ratio["cpu"]
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
