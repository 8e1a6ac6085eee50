"""The table of docs/measurements.md: one model under every strategy, compiled for 8 H100s that are not there.

The model has the widths of Llama-3-8B and 8 of its 32 layers (2.80 B parameters), rows of 2,048 tokens,
bf16, remat by layer, AdamW. Needs the CUDA compiler, no GPU: `make gpu-compiler`, then

    JAX_PLATFORMS=cpu python experiments/benchmarks/strategies.py

All of Llama-3-8B, rows of 8,192 tokens, 64 H100s, pipe=4,fsdp=8,tensor=2,microbatches=16 takes 12.43 GB per device, and
10.48 GB with sequence=true. Layers send only Megatron-LM's all-reduces (tests/parallel/tensor/test_gpu_tensor.py).
"""

import jax
import jax.numpy as jnp
import optax
from handwritten import Config, model_fns

import jaxpar as jp
from jaxpar.hardware.devices import gpu_topology
from jaxpar.inspect.ledger import Ledger

PIPED = "pipe=4,fsdp=2,zero=1,microbatches=8"
FOUR_AXES = "pipe=2,fsdp=2,tensor=2,sequence=true,microbatches=8"
STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "hsdp", PIPED, "fsdp=4,tensor=2", FOUR_AXES)
RULES = {"query|key|value|gate|up|head": -1, "out|down": -2, "embed": 0}  # the model has names of its own


def main() -> None:
    devices, config = gpu_topology("8xH100"), Config()
    init, loss = model_fns(config)
    print("| strategy | rows | state, GB per device | temporaries, GB | sent per device and step, GB |\n|-|-|-|-|-|")
    for name in STRATEGIES:
        mesh = devices[:1] if name == "single" else devices
        model = jp.Model(init=init, loss=loss)
        strategy = f"{name},precision=bf16,remat=layer"
        rules = RULES if "tensor" in name else None
        step = jp.make_train_step(model, optax.adamw(3e-4), strategy, mesh=mesh, rules=rules)
        rows = step.replicas * step.strategy.microbatches
        batch = {"tokens": jax.ShapeDtypeStruct((rows, config.sequence + 1), jnp.int32)}
        compiled = step.compile(batch)
        memory = compiled.memory_analysis()
        sent = Ledger.from_hlo(compiled.as_text(), step.mesh).by("kind", value="sent")
        parts = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in sent.items() if size > 5e7)
        print(
            f"| `{name}` | {rows} | {memory.argument_size_in_bytes / 1e9:.2f} "
            f"| {memory.temp_size_in_bytes / 1e9:.2f} | {parts or 'nothing'} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
