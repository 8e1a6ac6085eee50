"""`gpu.py cells`: gradients of one device under each strategy that one device admits, beside the CPU's in float32."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cells import initial
from gpu_report import Record, said
from zoo import ZOO, Entry

from jaxpar.layout.precision import all_finite
from jaxpar.make import make_train_step
from jaxpar.models import named
from jaxpar.parity.parity import TOLERANCE, differences
from jaxpar.strategy import as_strategy

STRATEGIES = ("single", "ddp", "zero1", "zero2", "fsdp", "dp")
MORE = (
    "fsdp,microbatches=2",
    "zero2,microbatches=2,remat=layer",
    "fsdp,remat=layer",
    "fsdp,precision=bf16",
    "zero1,microbatches=2,precision=bf16",
    "fsdp,precision=f16",
    "ddp,precision=f16,remat=dots",
)
# Of llama-tiny: what small arrays and short rows have not, which are cuDNN's, cuBLASLt's and the host's.
WIDE = (
    "fsdp",
    "fsdp,precision=bf16",
    "single,kernels=fused,precision=bf16",
    "single,precision=fp8",
    "single,precision=fp8,fp8_scaling=tensor",
    "single,offload=activations,remat=layer",
    "fsdp,offload=activations+optimizer",
    "fsdp,offload=params",
    "fsdp,logits=64",
    "fsdp,concurrent=2,microbatches=2",
)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
FEW = ("fsdp", "zero2,microbatches=2,precision=bf16", "fsdp,precision=f16")


def run(record: Record, models: tuple[str, ...], few: bool) -> None:
    """The first model under every strategy, the others under three, or if `few` all; what `ZOO` lacks as `WIDE`."""
    with jax.default_matmul_precision("highest"):  # else a GPU multiplies float32 in TF32
        _run(record, models, few)
    note = (
        "gradients, and parameters after two updates with momentum: max |a - b| over max(leaf, 1e-2 of the tree); "
        "loss: relative; float32 matmuls, no TF32; tolerance: or 1.5 times what the precision itself costs on the CPU"
    )
    head = ("model", "strategy", "error_loss", "error_grad", "error_params", "tolerance", "ok", "worst", "error")
    record.show(head, note=note)


def _run(record: Record, models: tuple[str, ...], few: bool) -> None:
    # Where all are CPUs, the last plays the GPU, so that what mixes up the two devices fails here too.
    cpu, card = jax.devices("cpu")[0], jax.devices()[-1]
    for number, name in enumerate(models):
        entry = ZOO[name]() if name in ZOO else _wide(name)
        with jax.default_device(cpu):
            first = initial(entry.model)
        expected: dict[int, Any] = {}
        for text in WIDE if name not in ZOO else FEW if number or few else (*STRATEGIES, *MORE):
            strategy = as_strategy(text)
            if record.left < 0:
                record.add(model=name, strategy=text, error="not begun: the budget is spent")
                continue
            try:
                m = strategy.microbatches
                if m not in expected:
                    expected[m] = gradients(entry, f"single,microbatches={m}", cpu, first)
                loss, grads = gradients(entry, text, card, first)
                worst = max(differences("gradient", grads, expected[m][1]), key=lambda d: d.error)
                least = TOLERANCE[strategy.precision]
                if strategy.precision != "f32":  # what its rounding costs on the CPU, of leaves that cancel above all
                    _, low = gradients(entry, f"single,microbatches={m},precision={strategy.precision}", cpu, first)
                    rounding = max(d.error for d in differences("gradient", low, expected[m][1]))
                    least = max(least, 1.5 * rounding)
                off = abs(loss - expected[m][0]) / abs(expected[m][0])
                errors = {"error_loss": off, "error_grad": worst.error}
                if strategy.offloads or text == "fsdp":  # whose updates are programs of their own
                    after = {device: updated(entry, text, device, first) for device in (cpu, card)}
                    errors["error_params"] = max(d.error for d in differences("parameter", after[card], after[cpu]))
                record.add(model=name, strategy=text, **errors, tolerance=least,
                           ok=max(errors.values()) <= least, worst=worst.path)  # fmt: skip
            except Exception as error:
                record.add(model=name, strategy=text, error=said(error))


def _wide(name: str) -> Entry:
    tokens = np.random.default_rng(0).integers(256, size=(16, 65)).astype(np.int32)
    return Entry(name, named(name).model, {"tokens": tokens}, stacks=1)


def gradients(entry: Entry, strategy: str, device: jax.Device, first: Any) -> tuple[float, Any]:
    """Loss, and gradients as a NumPy tree, from the parameters `first`."""
    step = make_train_step(entry.model, OPTIMIZER, strategy, mesh=[device])
    with jax.default_device(device):
        state = step.init(jax.random.key(0), params=entry.model.wrap(first))
        loss, grads = step.value_and_grad(state, entry.batch)
        while state.scale is not None and not all_finite(grads):  # training would skip steps until the scale fits
            state = dataclasses.replace(state, scale=state.scale.next(jnp.bool_(False)))
            loss, grads = step.value_and_grad(state, entry.batch)
    return float(loss), jax.tree.map(np.asarray, entry.model.unwrap(grads))


def updated(entry: Entry, strategy: str, device: jax.Device, first: Any) -> Any:
    """Parameters, as a NumPy tree, after two updates by SGD with momentum."""
    step = make_train_step(entry.model, OPTIMIZER, strategy, mesh=[device])
    with jax.default_device(device):
        state = step.init(jax.random.key(0), params=entry.model.wrap(first))
        for _ in range(2):
            state, _ = step(state, entry.batch)
    return jax.tree.map(np.asarray, entry.model.unwrap(step.params(state)))
