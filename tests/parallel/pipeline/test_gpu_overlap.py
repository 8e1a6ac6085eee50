"""Pipelines with tensor parallelism, compiled for H100s that are not there: kernels do not wait for activations."""

import re

import optax
import pytest

import jaxpar as jp
from jaxpar.hardware import target
from jaxpar.inspect.predict import predict
from jaxpar.models import named

pytestmark = [pytest.mark.cuda_compiler, pytest.mark.slow]
STRATEGY = "pipe=2,tensor=4,sequence=true,chunks=2,microbatches=8,zero=1,precision=bf16"


def compiled(schedule: str, layers: int) -> tuple[str, float, float]:
    """Return the program, the seconds of collectives over `tensor`, and the seconds in which kernels wait for them."""
    model, found = named("llama3-8b", layers=layers), target("8xH100")
    step = jp.make_train_step(model.model, optax.adamw(3e-4), f"{STRATEGY},schedule={schedule}", found.devices)
    batch = model.example(8, 4096)
    program = step.compile(batch)
    sent = [part for part in predict(program, step, batch, found.hardware).parts if part.axes == ("tensor",)]
    return program.as_text(), sum(part.seconds for part in sent), sum(part.exposed for part in sent)


@pytest.mark.parametrize(("schedule", "share"), [("1f1b", 0.35), ("1f1b-overlap", 0.3)])
def test_kernels_compute_while_activations_are_sent(schedule: str, share: float) -> None:
    """Kernels waited for 54% of these seconds under 1f1b. Gradients of weights, and another microbatch, fill them."""
    _, seconds, exposed = compiled(schedule, layers=8)
    assert exposed < share * seconds


def test_no_tick_copies_the_stash() -> None:
    """With one layer in a chunk, a tick wrote the stash before its last kernel had read it: XLA copied all slots."""
    text, _, _ = compiled("1f1b-overlap", layers=4)
    (stash,) = set(re.findall(r"bf16\[(?!1,)\d+,1,1,1024,4096\]", text))  # [slots, layers, rows, positions, features]
    assert not re.search(re.escape(stash) + r"\S* copy\(", text)
