"""A run that trains adapters beside frozen weights is stopped and goes on: as if it had never been, on any layout."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.tree_util import keystr, tree_leaves_with_path

import jaxpar as jp
from jaxpar.models import llama
from jaxpar.run.train.recorder import read

STEPS, STOP = 5, 3
BASE = llama.Config(vocab=32, dim=16, layers=2, heads=2, kv_heads=2, ffn=16)


class Killed(Exception):
    """Ends a run in the middle of a step, unknown to the trainer."""


def batches(start: int = 0) -> Iterator[dict[str, np.ndarray]]:
    for number in itertools.count(start):
        yield {"tokens": np.random.default_rng(number).integers(32, size=(16, 9)).astype(np.int32)}


@pytest.fixture(scope="module")
def base() -> Any:
    """Weights to start from, in the form in which a Hugging Face folder gives them."""
    model = jp.from_nnx(lambda rngs: llama.Llama(BASE, rngs=rngs), llama.loss)
    return jax.tree.map(np.asarray, model.wrap(model.create(jax.random.key(1))[0]))


def run(out: Path, strategy: str, params: Any, ends: int | None = None, **options: Any) -> Any:
    """Train, and return the parameters after the last step. The run is killed after step `ends`."""

    def end(_: jp.Trainer, metrics: dict[str, Any]) -> None:
        if metrics["step"] == ends:
            raise Killed

    config = llama.Config(**{**vars(BASE), "lora": 2})
    trainer = jp.Trainer(
        jp.from_nnx(lambda rngs: llama.Llama(config, rngs=rngs), llama.loss),
        optax.adamw(0.03),
        batches,
        strategy,
        jp.Loop(steps=STEPS, save_every=2, out=out, quiet=True, **options),
        hooks=[jp.Hook(on_step=end)],
        trainable=llama.is_adapter,
        params=params,
        fresh=llama.is_adapter,
    )
    state = trainer.run()
    return {keystr(path, simple=True): np.asarray(x) for path, x in tree_leaves_with_path(trainer.step.params(state))}


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read(out / "metrics.jsonl") if "loss" in line]


def never() -> Any:
    raise AssertionError("a resumed run restores its parameters")


@pytest.mark.slow
def test_it_goes_on_bit_by_bit(base: Any, tmp_path: Path) -> None:
    """The frozen weights are bfloat16 in the state and in its checkpoints."""
    strategy = "fsdp,precision=bf16"
    unbroken = run(tmp_path / "unbroken", strategy, base)
    with pytest.raises(Killed):
        run(tmp_path / "run", strategy, lambda: base, STOP)
    resumed = run(tmp_path / "run", strategy, never, resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "unbroken")
    assert len(losses(tmp_path / "run")) == STEPS
    for name, x in unbroken.items():
        np.testing.assert_array_equal(resumed[name], x, err_msg=name)
    trained_adapters = [name for name, x in resumed.items() if "lora" in name and np.abs(x).max() > 0]
    assert len(trained_adapters) == 14  # all of them, including those that started at zero
    assert {x.dtype.name for name, x in resumed.items() if "kernel" in name} == {"bfloat16"}


@pytest.fixture(scope="module")
def unbroken(base: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Any]:
    out = tmp_path_factory.mktemp("unbroken")
    return (params := run(out, "fsdp", base)) and (losses(out), params)


@pytest.mark.battery
@pytest.mark.parametrize(
    "strategy", ["ddp", "zero2,microbatches=2", "tensor=2,fsdp=4", "pipe=2,fsdp=2,tensor=2,microbatches=2"]
)
def test_it_goes_on_elsewhere(strategy: str, base: Any, unbroken: Any, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path, "fsdp", lambda: base, STOP)
    resumed = run(tmp_path, strategy, never, resume=True)
    np.testing.assert_allclose(losses(tmp_path), unbroken[0], rtol=1e-5)
    for name, x in unbroken[1].items():
        # Adam divides by the root of small values, which amplifies rounding.
        is_exact = "lora" not in name
        atol = 0 if is_exact else 1e-3 * np.abs(x).max()
        np.testing.assert_allclose(resumed[name], x, rtol=0, atol=atol, err_msg=name)
