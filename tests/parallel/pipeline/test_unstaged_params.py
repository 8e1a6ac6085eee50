"""Parameters that no stage owns move once per step; a warning names layers of padding."""

import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.inspect.ledger import Ledger
from jaxpar.models import llama

CONFIG = llama.Config(vocab=32, dim=16, layers=5, heads=2, kv_heads=2, ffn=32)
MODEL = jp.from_nnx(lambda rngs: llama.Llama(CONFIG, rngs=rngs), llama.loss)
BATCH = {"tokens": np.zeros((32, 9), "int32")}


def sent_bytes(strategy: str) -> dict[str, int]:
    """Return the bytes sent over `pipe` and `fsdp` together, by kind: these move the parameters that no stage owns."""
    step = jp.make_train_step(MODEL, optax.sgd(0.1), strategy)
    by_kind = Ledger.from_jaxpr(step.trace(BATCH), step.mesh).by("kind", "axes")
    return {kind: size for (kind, axes), size in by_kind.items() if axes == ("pipe", "fsdp") and kind != "all-reduce"}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("zero", [2, 3])
def test_embedding_and_head_move_once_a_step(zero: int, schedule: str) -> None:
    """Their gradients were once scattered for every microbatch: 24 of 51 s of a 405B step on 1,024 devices."""
    text = f"pipe=2,fsdp=4,zero={zero},schedule={schedule}"
    unstaged_bytes = 4 * (2 * CONFIG.vocab * CONFIG.dim + CONFIG.dim)
    with_2, with_8 = (sent_bytes(f"{text},microbatches={m}") for m in (2, 8))
    assert with_2 == with_8 == {"all-gather": unstaged_bytes, "reduce-scatter": unstaged_bytes}


def test_layers_of_padding_are_said() -> None:
    with pytest.warns(UserWarning, match=r"5 layers in 4 x 1 chunks of 2 take the time and the memory of 8"):
        jp.make_train_step(MODEL, optax.sgd(0.1), "pipe=4,data=2,microbatches=4").trace(BATCH)
