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

from jaxpar.inspect.verify.parity import TOLERANCE, differences
from jaxpar.layout.precision import all_finite
from jaxpar.make import make_train_step
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
FEW = ("fsdp", "zero2,microbatches=2,precision=bf16", "fsdp,precision=f16")


def run(record: Record, models: tuple[str, ...], few: bool) -> None:
    """The first model under every strategy, the others under three; of `few`, these three only."""
    with jax.default_matmul_precision("highest"):  # else a GPU multiplies float32 in TF32
        _run(record, models, few)
    note = "gradients: max |a - b| over max(leaf, 1e-2 of the tree); loss: relative; float32 matmuls, no TF32"
    record.show(("model", "strategy", "error_loss", "error_grad", "tolerance", "ok", "worst", "error"), note=note)


def _run(record: Record, models: tuple[str, ...], few: bool) -> None:
    # Where all are CPUs, the last plays the GPU, so that what mixes up the two devices fails here too.
    cpu, card = jax.devices("cpu")[0], jax.devices()[-1]
    for number, name in enumerate(models):
        entry = ZOO[name]()
        with jax.default_device(cpu):
            first = initial(entry.model)
        expected: dict[int, Any] = {}
        for text in FEW if number or few else (*STRATEGIES, *MORE):
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
                off = abs(loss - expected[m][0]) / abs(expected[m][0])
                record.add(model=name, strategy=text, error_loss=off, error_grad=worst.error, tolerance=least,
                           ok=worst.error <= least and off <= least, worst=worst.path)  # fmt: skip
            except Exception as error:
                record.add(model=name, strategy=text, error=said(error))


def gradients(entry: Entry, strategy: str, device: jax.Device, first: Any) -> tuple[float, Any]:
    """Loss, and gradients as a NumPy tree, from the parameters `first`."""
    step = make_train_step(entry.model, optax.sgd(0.1), strategy, mesh=[device])
    with jax.default_device(device):
        state = step.init(jax.random.key(0), params=entry.model.wrap(first))
        loss, grads = step.value_and_grad(state, entry.batch)
        while state.scale is not None and not all_finite(grads):  # training would skip steps until the scale fits
            state = dataclasses.replace(state, scale=state.scale.next(jnp.bool_(False)))
            loss, grads = step.value_and_grad(state, entry.batch)
    return float(loss), jax.tree.map(np.asarray, entry.model.unwrap(grads))
